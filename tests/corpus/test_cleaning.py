"""The stage `clean`: documents, counts and samples."""

import json
from collections import Counter

import pytest

from linnet.corpus.documents import Samples, find_inputs
from linnet.corpus.rules import Change, Clean, Rules, excerpts
from linnet.corpus.rules.spans import MASK
from linnet.corpus.stage import run_stage

SENTENCE = "A sentence that is long enough for the filter of lengths, number %d of those that stay here."


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    rows = [{"text": f"<p>{SENTENCE % number}</p>!!", "id": 7} for number in range(20)] + [{"text": "x"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "code.py").write_text("x  =  '<b>!!'  # see http://a.b\n" * 3)
    return folder


def test_documents_counts_and_samples(folder):
    problems: list[str] = []
    (part,) = find_inputs([str(folder)], "sources", problems).parts
    counts, samples = Counter(), Samples()
    documents = list(Clean()(part, counts, samples))
    assert [document.text for document in documents if document.file == "rows.jsonl"] == [
        SENTENCE % number + "\n!" for number in range(20)
    ]
    assert documents[0].text.startswith("x  =  '<b>!!'") or documents[-1].text.startswith("x  =  '<b>!!'")
    assert counts["changed.tags"] == counts["changed.punctuation"] == 20 and counts["removed.punctuation"] == 20
    assert counts["dropped.length"] == 1 and counts["kind.prose"] == 21 and counts["kind.code"] == 1
    found = samples.values()
    assert len(found["changed.tags"]) == 5 and found["dropped.length"][0]["text"] == "x"
    assert found["changed.tags"][0]["before"].startswith("<p>A sentence")
    assert found["changed.tags"][0]["after"].startswith("\nA sentence")


def test_a_cleaned_folder_is_clean(folder, tmp_path):
    rules = Rules.model_validate({"urls": False})
    first = run_stage("clean", [str(folder)], tmp_path / "once", rules, Clean(rules))
    again = run_stage("clean", [str(tmp_path / "once")], tmp_path / "again", rules, Clean(rules))
    assert first["counts"]["changed.tags"] == 20
    assert not [name for name in again["counts"] if name.startswith(("changed", "dropped"))]
    shards = [(tmp_path / name / "shard-00000.jsonl.zst").read_bytes() for name in ("once", "again")]
    assert shards[0] == shards[1]


def test_excerpts_show_spans():
    long = "`" + "s" * 100 + "`"
    before, after = excerpts(Change("tags", f"{MASK} a {MASK} <b>c", f"{MASK} a {MASK} c", ["`x`", long]))
    assert before.startswith("`x` a `sss") and before.endswith("s` <b>c") and len(before) < 70
    assert after.endswith("s` c")
