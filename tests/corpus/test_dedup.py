"""Deduplication of whole corpora: what is removed, what stays, and that nothing else changes a byte of the result."""

import hashlib
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import zstandard

from linnet.config import ConfigError
from linnet.corpus import dedup as stage
from linnet.corpus import documents
from linnet.corpus.dedup import DedupConfig, dedup
from linnet.corpus.dedup.minhash import components, equal_runs


def words_of(rng: random.Random, count: int) -> list[str]:
    return [f"w{rng.randrange(3000)}" for _ in range(count)]


def changed(rng: random.Random, words: list[str], count: int) -> list[str]:
    words = list(words)
    for place in rng.sample(range(len(words)), count):
        words[place] = f"x{rng.randrange(10**6)}"
    return words


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return str(path)


def write_files(folder: Path, texts: list[str]) -> str:
    """Writes a folder of four files, which make several parts."""
    folder.mkdir(parents=True)
    for number in range(4):
        write(folder / f"{number}.jsonl", texts[number * len(texts) // 4 : (number + 1) * len(texts) // 4])
    return str(folder)


def rows(out: Path) -> list[dict]:
    shards = sorted(out.glob("shard-*.jsonl.zst"))
    lines = [line for path in shards for line in zstandard.open(path, "rt", encoding="utf-8")]
    return [json.loads(line) for line in lines]


def texts(out: Path) -> list[str]:
    return [row["text"] for row in rows(out)]


def content(out: Path) -> dict[str, str]:
    """The digests of all files whose bytes are promised."""
    paths = [*out.glob("shard-*"), out / "stage.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def similarity(a: str, b: str) -> float:
    sets = []
    for text in (a, b):
        words = re.findall(r"\w+", text.lower())
        sets.append({tuple(words[start : start + 5]) for start in range(max(len(words) - 4, 1))})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.fixture
def several_parts(monkeypatch):
    """Parts of a few kilobytes, so that a small corpus has several."""
    monkeypatch.setattr(documents, "SMALLEST", 20_000)


@pytest.fixture(scope="module")
def copies() -> tuple[list[str], list[str]]:
    """60 texts, and in random order after them: exact copies, and copies with 1 %, 10 % and 40 % of words changed."""
    rng = random.Random(0)
    originals = [" ".join(words_of(rng, 200)) for _ in range(60)]
    later = []
    for number, text in enumerate(originals):
        later.append([text, *(" ".join(changed(rng, text.split(), share * 2)) for share in (1, 10, 40))][number % 4])
    rng.shuffle(later)
    return originals, later


def test_copies_are_removed_and_the_first_stays(tmp_path, copies, several_parts):
    originals, later = copies
    source = write_files(tmp_path / "corpus", [*originals, "", *later])
    result = dedup([source], tmp_path / "out", DedupConfig())
    kept = texts(tmp_path / "out")
    assert kept[:60] == originals and len(result["shards"]) > 2
    highest = {text: max(similarity(text, other) for other in originals) for text in later}
    assert not [text for text in kept[60:] if highest[text] > 0.9]
    assert {text for text in later if highest[text] < 0.5} <= set(kept)
    results = result["results"]
    assert results["exact copies"] == 15 and results["near copies"] >= 15
    assert results["documents"] - results["exact copies"] - results["near copies"] == len(kept)
    assert result["counts"]["documents removed/exact copy/corpus"] == 15
    assert rows(tmp_path / "out")[0] == {"text": originals[0], "source": "corpus", "file": "0.jsonl", "row": 0}
    for example in result["results"]["examples"]["near copy"]:
        assert example["similarity"] > 0.7 and example["because of"] != example["removed"]
    assert {example["similarity"] for example in result["results"]["examples"]["exact copy"]} == {1.0}


def test_result_does_not_depend_on_workers_kills_or_place(tmp_path, copies, several_parts):
    originals, later = copies
    source = write_files(tmp_path / "corpus", [*originals, *later])
    settings = DedupConfig(verify=True)
    dedup([source], tmp_path / "one", settings)
    moved = write_files(tmp_path / "elsewhere" / "corpus", [*originals, *later])
    dedup([moved], tmp_path / "two", settings, workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert not (tmp_path / "one" / "parts").exists()

    class Killed(Exception):
        pass

    def stop_in(name):
        calls = []

        def progress(what, done, total):
            calls.append(what)
            if calls.count(name) == 2:
                raise Killed

        return progress

    for name in ("keys", "shingles", "verified", "dedup"):
        with pytest.raises(Killed):
            dedup([source], tmp_path / "killed", settings, progress=stop_in(name))
        if name == "dedup":  # a shard that was written while the machine stopped
            (tmp_path / "killed" / ".shard-00000.jsonl.zst.1.tmp").write_bytes(b"half")
    dedup([source], tmp_path / "killed", settings)
    assert content(tmp_path / "one") == content(tmp_path / "killed")
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        path.name for path in (tmp_path / "killed").iterdir()
    }


def test_verify_removes_only_documents_with_a_copy_at_the_threshold(tmp_path):
    rng = random.Random(1)
    found = []
    for _ in range(150):
        text = words_of(rng, 60)
        found += [" ".join(text), *(" ".join(changed(rng, text, rng.randrange(1, 4))) for _ in range(3))]
    source = write(tmp_path / "corpus.jsonl", found)
    result = dedup([source], tmp_path / "verified", DedupConfig(verify=True))
    dedup([source], tmp_path / "plain", DedupConfig())
    kept = set(texts(tmp_path / "verified"))
    groups = [found[start : start + 4] for start in range(0, len(found), 4)]
    for group in groups:
        for number, text in enumerate(group):
            if text not in kept:
                assert max(similarity(text, other) for other in group[:number] + group[number + 1 :]) >= 0.8
    assert set(texts(tmp_path / "plain")) < kept
    assert result["results"]["compared"] > result["results"]["verified"] > 0 == result["results"]["not compared"]
    assert all(row["similarity"] >= 0.8 for row in result["results"]["examples"]["near copy"])


def test_numbers_short_texts_and_texts_without_words(tmp_path):
    rng = random.Random(2)
    tables = [" ".join(f"row {place} {rng.randrange(10**6)}" for place in range(40)) for _ in range(30)]
    chinese = "".join(chr(rng.randrange(0x4E00, 0x9FA0)) for _ in range(300))
    short = ["three words here", "Three words: here", "three words there", "!!!", "!!!", "???", "yes", "no", "yes"]
    near = chinese[:150] + "的" + chinese[150:]
    source = write(tmp_path / "corpus.jsonl", [*tables, *short, chinese, near, chinese[::-1]])
    dedup([source], tmp_path / "out", DedupConfig(verify=True))
    kept = ["three words here", "three words there", "!!!", "???", "yes", "no", chinese, chinese[::-1]]
    assert texts(tmp_path / "out") == [*tables, *kept]


def test_a_chain_of_copies_is_one_cluster_and_its_first_document_stays(tmp_path):
    rng = random.Random(3)
    chain = [words_of(rng, 400)]
    for step in range(12):
        chain.append([*chain[-1][: step * 30], *words_of(rng, 6), *chain[-1][step * 30 + 6 :]])
    found = [" ".join(text) for text in chain]
    rng.shuffle(found)
    source = write(tmp_path / "corpus.jsonl", found)
    result = dedup([source], tmp_path / "out", DedupConfig())
    assert texts(tmp_path / "out") == found[:1] and result["results"]["largest cluster"] == 13


def test_against_removes_planted_items_and_what_is_part_of_them(tmp_path, several_parts):
    rng = random.Random(4)
    own = [" ".join(words_of(rng, 300)) for _ in range(80)]
    question, passage = words_of(rng, 25), words_of(rng, 5000)
    items = [" ".join(question), "who wrote seven very odd books", "yes it is", " ".join(words_of(rng, 50))]
    write(tmp_path / "items.jsonl", items)
    (tmp_path / "passages.txt").write_text(" ".join(passage))
    reworded = " ".join([*question[:12], "otherwise", *question[13:]])  # has 10 of its 18 n-grams
    planted = {
        "the item among other text": own[0] + " " + items[0].upper() + "? " + own[1],
        "an item with one word changed at its end": own[3] + " " + " ".join([*question[:-1], "otherwise"]),
        "a short item": "It asked: who wrote seven very odd books?",
        "only a shorter item": "Yes, it is.",
        "a part of a passage": " ".join(passage[900:1000]),
        "a near copy of an item": " ".join(changed(rng, items[3].split(), 1)),
    }
    harmless = [f"{' '.join(words_of(rng, 90))} {words}" for words in ("yes it is", "who wrote seven books", reworded)]
    harmless.append(" ".join(question[:9]))
    source = write(tmp_path / "corpus.jsonl", [*own, *planted.values(), *harmless])
    against = [str(tmp_path / "items.jsonl"), str(tmp_path / "passages.txt")]
    result = dedup([source], tmp_path / "out", DedupConfig(), against=against)
    kept = texts(tmp_path / "out")
    assert [name for name, text in planted.items() if text in kept] == []
    assert kept == [*own, *harmless]
    assert result["results"]["evaluation items"] == 5 and result["results"]["documents with evaluation items"] >= 6
    example = result["results"]["examples"]["evaluation item"][0]
    assert example["because of"]["source"] == "items" and example["because of"]["text"] == items[0]
    assert "passages" in {one["label"] for one in result["settings"]["against"]}
    (tmp_path / "items.jsonl").write_text(json.dumps({"text": "another item that has some more words"}) + "\n")
    with pytest.raises(ConfigError, match="against"):
        dedup([source], tmp_path / "out", DedupConfig(), against=against)


def test_copied_lines(tmp_path, several_parts):
    rng = random.Random(5)
    notice = "Permission is hereby granted, free of charge, to any person obtaining a copy"
    bodies = ["\n".join(" ".join(words_of(rng, 20)) for _ in range(5)) for _ in range(60)]
    found = [f"{body}\n    return self\n{notice}" for body in bodies]
    found.append("permission is HEREBY granted free of charge to any person obtaining a copy.")
    source = write_files(tmp_path / "corpus", found)
    result = dedup([source], tmp_path / "out", DedupConfig(level="line"))
    assert texts(tmp_path / "out") == [found[0], *(f"{body}\n    return self" for body in bodies[1:])]
    assert result["results"]["copied lines"] == 60 == result["counts"]["lines removed/corpus"]
    assert result["counts"]["documents removed/all lines copied/corpus"] == 1


def test_near_copies_of_lines(tmp_path, several_parts):
    """A notice with another year and name goes, lines of the text stay, and the first of a cluster is kept."""
    rng = random.Random(5)
    notice = (
        "Downloaded from the archive of the society on {} by reader {} and not to be copied sold or shown to others {}"
    )
    terms = "under the terms of the licence that the society grants to its members and to nobody else in any country"
    bodies = ["\n".join(" ".join(words_of(rng, 20)) for _ in range(5)) for _ in range(60)]
    bodies[7] += f"\n{bodies[3].splitlines()[2]}"  # an exact copy
    found = [f"{body}\n{notice.format(rng.randrange(2000), number, terms)}" for number, body in enumerate(bodies)]
    source = write_files(tmp_path / "corpus", found)
    exact = dedup([source], tmp_path / "exact", DedupConfig(level="line"))
    assert exact["results"]["copied lines"] == 1 and "near copies of lines" not in exact["results"]
    result = dedup([source], tmp_path / "out", DedupConfig(level="line", near=True, threshold=0.5), workers=2)
    kept = [found[0], *("\n".join(body.splitlines()[:5]) for body in bodies[1:])]
    assert texts(tmp_path / "out") == kept
    assert result["results"]["near copies of lines"] == 59 == result["counts"]["removed.near copy of a line"]
    assert result["results"]["copied lines"] == 1 == result["counts"]["removed.copied line"]
    assert result["counts"]["lines removed/corpus"] == 60
    shown = result["samples"]["removed.near copy of a line"][0]["text"]
    assert shown.startswith("Downloaded from the archive")
    with pytest.raises(ConfigError, match="--near"):
        dedup([source], tmp_path / "again", DedupConfig(near=True))
    assert "near" not in exact["settings"] and result["settings"]["near"] is True


def test_bad_settings_are_named_before_anything_is_written(tmp_path):
    source = write(tmp_path / "corpus.jsonl", ["some text"])
    wrong = DedupConfig(level="line", verify=True, threshold=0.5)
    with pytest.raises(ConfigError) as error:
        dedup([source], tmp_path / "out", wrong, against=[str(tmp_path / "missing.jsonl")])
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "--against",
        "--verify",
        "--threshold",
        "--against",
    ]
    assert not (tmp_path / "out").exists()


def test_components():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 500, 300), rng.integers(0, 500, 300)
    expected = np.arange(500)
    for _ in range(500):
        for a, b in zip(first, second, strict=True):
            expected[a] = expected[b] = min(expected[a], expected[b])
    assert (components(500, first, second) == expected).all()
    chain = np.arange(9999)
    assert not components(10_000, chain, chain + 1).any()
    assert components(3, chain[:0], chain[:0]).tolist() == [0, 1, 2]


def test_equal_runs():
    first, again = equal_runs(np.array([5, 7, 5, 5, 9, 7]))
    assert sorted(zip(first.tolist(), again.tolist(), strict=True)) == [(0, 2), (0, 3), (1, 5)]
    first, again = equal_runs(np.array([[1, 2], [2, 1], [1, 2], [1, 1]]))
    assert (first.tolist(), again.tolist()) == ([0], [2])
    assert not len(equal_runs(np.empty((0, 2)))[0]) and not len(equal_runs(np.empty(0))[0])


def test_a_document_is_compared_with_a_bounded_number_of_others(monkeypatch):
    monkeypatch.setattr(stage, "MOST_COMPARED", 3)
    compare = stage._Compare([np.array([number], np.uint64) for number in range(10)], np.arange(10), 0.8)
    compare.group(list(range(10)))
    assert compare.links == [] and compare.compared == 45 and compare.left_out == 0


def test_sets_of_which_nothing_can_be_read_are_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("{}\n[1]\n")
    empty = str(tmp_path / "empty.jsonl")
    for number, settings in enumerate((DedupConfig(verify=True), DedupConfig(level="line"))):
        with pytest.raises(ConfigError, match="SOURCE"):
            dedup([empty], tmp_path / str(number), settings)
    source = write(tmp_path / "one.jsonl", ["yes", "no", "a b c d e f g h i j k l m n o p q"])
    with pytest.raises(ConfigError, match="--against"):
        dedup([source], tmp_path / "against", DedupConfig(), against=[empty])
    write(tmp_path / "items.jsonl", ["", "yes"])
    dedup([source], tmp_path / "short", DedupConfig(), against=[str(tmp_path / "items.jsonl")])
    assert len(texts(tmp_path / "short")) == 2
