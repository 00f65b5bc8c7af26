"""Documents of a corpus: their identity, the parts, and what is left out with its reason."""

import gzip
import json
from collections import Counter

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from linnet.corpus import documents
from linnet.corpus.documents import Document, Samples, around, encode, find_inputs, find_parts, read_part
from linnet.data import records


def read(*names, **options):
    """Documents, counts, samples and inputs of sources."""
    problems: list[str] = []
    found = find_inputs([str(name) for name in names], "SOURCE", problems, **options)
    assert not problems
    counts, samples = Counter(), Samples()
    return [one for part in found.parts for one in read_part(part, counts, samples)], counts, samples.values(), found


def problems_of(*names):
    problems: list[str] = []
    find_parts([str(name) for name in names], "SOURCE", problems, [])
    return problems


@pytest.fixture
def mixed(tmp_path):
    folder = tmp_path / "mixed"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("ein Text\n", encoding="utf-8")
    lines = b'\xef\xbb\xbf{"text": "one", "id": 7}\n\n{"text": "two"}\n'
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "three"}'))
    table = pyarrow.table({"text": ["four", None, "five"], "id": [1, 2, 3]})
    parquet.write_table(table, folder / "sub" / "d.parquet", row_group_size=2)
    return folder


def test_a_document_is_known_by_source_file_and_row(mixed):
    found, counts, samples, inputs = read(mixed)
    assert found == [
        Document("ein Text\n", "mixed", "a.txt", 0),
        Document("one", "mixed", "b.jsonl.gz", 0, {"id": 7}),
        Document("two", "mixed", "b.jsonl.gz", 2),
        Document("three", "mixed", "c.jsonl.zst", 0),
        Document("four", "mixed", "sub/d.parquet", 0),
        Document("five", "mixed", "sub/d.parquet", 2),
    ]
    assert counts["documents read/mixed"] == 6 and counts["unreadable.no text"] == 1
    assert samples["unreadable.no text"][0]["row"] == 1 and inputs.labels == ["mixed"]
    assert str(mixed.parent) not in json.dumps(inputs.described)


def test_labels(mixed, tmp_path):
    (tmp_path / "other").mkdir()
    (other := tmp_path / "other" / "mixed.txt").write_text("text")
    (tmp_path / "a=b.txt").write_text("text")
    assert "label 'mixed'" in problems_of(mixed, other)[0]
    assert {one.source for one in read(mixed, f"more={other}")[0]} == {"mixed", "more"}
    assert read(tmp_path / "other" / "*.txt")[0] == [Document("text", "other", "mixed.txt", 0)]
    assert read(tmp_path / "a=b.txt")[0][0].source == "a=b"
    assert "missing" in problems_of(f"x={tmp_path}/missing")[0]


def test_parts_cut_jsonl_at_line_starts_and_text_at_line_ends(tmp_path, monkeypatch):
    lines = "".join(json.dumps({"text": "x" * (number % 50), "n": number}) + "\n" for number in range(500))
    (tmp_path / "rows.jsonl").write_text(lines.rstrip("\n"))
    (tmp_path / "text.txt").write_text(lines)
    whole, _, _, _ = read(tmp_path / "rows.jsonl")
    for name, value in (("SMALLEST", 1000), ("LARGEST", 1000), ("PIECE", 1000), ("BLOCK", 300)):
        monkeypatch.setattr(documents, name, value)
    found, _, _, inputs = read(tmp_path / "rows.jsonl")
    assert found == whole and len(inputs.parts) > 10 and {one.row for one in found} >= {1, 499}
    texts, _, _, _ = read(tmp_path / "text.txt")
    assert "".join(one.text for one in texts) == lines
    assert len(texts) > 10 and all(1000 <= len(one.text) < 1100 and one.text.endswith("\n") for one in texts[:-1])
    assert [one.row for one in texts] == list(range(len(texts)))
    (tmp_path / "text.txt").unlink()
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(lines.encode()))
    assert [(one.text, one.row) for one in read(tmp_path / "text.txt.gz")[0]] == [(one.text, one.row) for one in texts]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text": "cut', "not JSON"),
        (b"[1]", "not an object"),
        (b'{"text": 3}', "no text"),
        (b'{"other": "a"}', "no text"),
        (b'{"text": ""}', "no text"),
        (b'{"text": "a\\u0000"}', "NUL"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b'{"text": "a", "more": "\\ud800"}', "not JSON"),
        (b'{"text": "a", "more": [1e999]}', "not JSON"),
        (b'{"text": "a", "more": NaN}', "not JSON"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "' + b"x" * 3000 + b'"}', "too long"),
    ],
)
def test_bad_rows_are_left_out_and_counted(tmp_path, monkeypatch, line, kind):
    monkeypatch.setattr(documents, "LONGEST", 2000 if kind == "too long" else 1 << 20)
    monkeypatch.setattr(documents, "BLOCK", 512)
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "after"}')
    found, counts, samples, _ = read(tmp_path / "rows.jsonl")
    assert [(one.text, one.row) for one in found] == [("good", 0), ("after", 2)]
    assert counts[f"unreadable.{kind}"] == 1 and samples[f"unreadable.{kind}"][0]["row"] == 1


@pytest.mark.parametrize("end", ["jsonl.gz", "jsonl.zst", "txt.gz"])
def test_rows_before_the_cut_of_a_compressed_file_are_kept(tmp_path, end):
    lines = b"".join(
        json.dumps({"text": f"line {number}" * (number % 7 + 1)}).encode() + b"\n" for number in range(9999)
    )
    data = gzip.compress(lines) if end.endswith("gz") else b"".join(
        zstandard.compress(lines[start : start + 9000]) for start in range(0, len(lines), 9000)
    )  # fmt: skip
    (tmp_path / f"rows.{end}").write_bytes(data[: len(data) // 2])
    found, counts, samples, _ = read(tmp_path / f"rows.{end}")
    (sample,) = samples["unreadable.file cut short"]
    if end == "txt.gz":
        assert len(found) == 1 and lines.startswith(found[0].text.encode()) and found[0].text.endswith("\n")
    else:
        assert 1000 < len(found) < 9999 and sample["row"] >= found[-1].row
    assert sample["file"] == f"rows.{end}" and counts["unreadable.file cut short"] == 1


def test_files_that_expand_too_far(tmp_path, monkeypatch):
    monkeypatch.setattr("linnet.data.records.EXPANDED", 1 << 16)
    lines = b'{"text": "xxxx"}\n' * 40_000
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(lines))
    found, counts, _, _ = read(tmp_path)
    assert 1000 < len(found) < 40_000 and counts["unreadable.file expands too far"] == 1
    indices = pyarrow.array([0] * 5000, pyarrow.int32())
    texts = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 4000]))
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "bomb.parquet")
    monkeypatch.setattr("linnet.data.records.EXPANSION", 0.01)
    monkeypatch.setattr("linnet.data.records.EXPANDED", 1000)
    assert "holds more than" in problems_of(tmp_path / "bomb.parquet")[0]
    skipped = read(tmp_path)[3].skipped
    assert len(skipped) == 1 and skipped[0].startswith(f"{tmp_path.name}: bomb.parquet: holds more")


def test_a_parquet_file_that_states_little_and_holds_much_is_refused_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr("linnet.data.records.EXPANDED", 1 << 18)
    table = pyarrow.table({"text": ["x" * 4000, "y" * 4000] * 2500})
    parquet.write_table(table, tmp_path / "bomb.parquet", row_group_size=500, write_statistics=False)
    groups = records.parquet_groups(tmp_path / "bomb.parquet", "text")
    assert sum(size for _, size in groups) < 1 << 18
    (problem,) = problems_of(tmp_path / "bomb.parquet")
    assert "bomb.parquet" in problem and "holds more than" in problem
    monkeypatch.setattr("linnet.data.records.EXPANDED", 1 << 25)  # the text alone decides
    assert len(read(tmp_path / "bomb.parquet")[0]) == 5000


def test_samples_do_not_depend_on_the_order(tmp_path):
    made = [Document("", "a", "f", row) for row in range(50)]
    one, two, three = Samples(), Samples(), Samples()
    for document in made:
        one.add("rule", document, before="x" * 1000)
        (two if document.row % 2 else three).add("rule", document, before="x" * 1000)
    three.merge(json.loads(json.dumps(two.dump())))
    assert one.values() == three.values() and len(one.values()["rule"]) == documents.KEPT
    assert len(one.values()["rule"][0]["before"]) == documents.CLIPPED + 3


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_a_long_line_of_a_text_file_is_left_out_alone(tmp_path, monkeypatch, name):
    for key, value in (("PIECE", 100), ("LONGEST", 300), ("BLOCK", 30)):
        monkeypatch.setattr(documents, key, value)
    text = b"before\n" + b"x" * 1000 + b"\nafter\n"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    found, counts, samples, _ = read(tmp_path / name)
    assert [(one.text, one.row) for one in found] == [("before\n", 0), ("after\n", 1)]
    assert counts["unreadable.too long"] == 1 and samples["unreadable.too long"][0]["row"] == 0


def test_a_stage_keeps_a_text_that_json_writes_longer(tmp_path, monkeypatch):
    text = "\x01" * 900
    parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / "rows.parquet")
    monkeypatch.setattr(documents, "LONGEST", 1000)
    ((one,), *_) = read(tmp_path / "rows.parquet")
    with zstandard.open(tmp_path / "shard.jsonl.zst", "wb") as file:
        file.write(encode(one))
    piece = documents.Piece(tmp_path / "shard.jsonl.zst", "stage", "", "shard.jsonl.zst", "text", 0, -1, 0, 1)
    assert [found.text for found in read_part(documents.Part(0, (piece,)), Counter())] == [text]


def test_sources_around_a_folder(mixed, tmp_path):
    (tmp_path / "lang=en").mkdir()
    names = [str(mixed), f"more={mixed}", str(tmp_path / "lang=en"), "stdlib", f"{mixed}/a.txt"]
    assert around(mixed / "out", names) == names[:2] and around(mixed, names) == names[:2]
    assert around(tmp_path / "lang=en" / "out", names) == names[2:3] and around(tmp_path / "out", names) == []
