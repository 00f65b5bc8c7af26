"""Corpora: prepared once, found by content, whole or refused, and safe when two processes prepare at once."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from linnet.config import ConfigError, parse
from linnet.data import CorpusDamaged, DataConfig, corpus, open_corpus, prepare, shards

WORDS = "the quick brown fox jumps over the lazy dog and naïve cafés open late".split()


def write_texts(folder: Path, count: int = 60, seed: int = 0) -> list[str]:
    """Documents of different sizes, one a file; returns them in the order of their paths."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(random.choice(WORDS, random.integers(50, 150))) + "\n" for _ in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    return texts


def config_of(*paths: Path, **values) -> DataConfig:
    return parse(DataConfig, {"source": [str(path) for path in paths], "validation_fraction": 0.1, **values})


def decoded(found, split: str) -> list[str]:
    part = found.split(split)
    return [found.tokenizer.decode(part.document(number)) for number in range(part.documents)]


@pytest.fixture
def texts(tmp_path) -> list[str]:
    return write_texts(tmp_path / "texts")


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_every_document_is_in_one_split_and_comes_back_exactly(texts, tmp_path, tokenizer):
    found = prepare(config_of(tmp_path / "texts", tokenizer=tokenizer), tmp_path / "cache")
    train, held = decoded(found, "train"), decoded(found, "validation")
    assert sorted(train + held) == sorted(texts) and train == [text for text in texts if text in train]
    assert len(held) == found.validation.documents > 0 and found.metadata["split"] == "documents"
    for split in ("train", "validation"):
        part = found.split(split)
        lengths = found.tokenizer.byte_lengths[part[:]]
        assert lengths.sum() == part.bytes == sum(len(text.encode()) for text in decoded(found, split))
        assert found.bytes_per_token(split) == part.bytes / len(part)
        ends = np.flatnonzero(part[:] == found.tokenizer.end_of_document)
        assert np.array_equal(ends + 1, part.document_starts[1:]) and ends[-1] == len(part) - 1
    assert found.train[:].dtype == (np.uint8 if tokenizer == "byte" else np.uint16)
    assert found.vocab_size == (256 if tokenizer == "byte" else 300)
    with pytest.raises(ValueError):
        found.train.tokens[0] = 1


def test_merges_are_learned_from_the_training_split_alone(texts, tmp_path):
    held = tmp_path / "held.txt"
    held.write_text("zqzqzq " * 2000)
    found = prepare(config_of(tmp_path / "texts", tokenizer="bpe:300", validation=[str(held)]), tmp_path / "cache")
    assert len(found.tokenizer.encode("zqzq")) == 4
    assert found.bytes_per_token("validation") < 1.2


def test_a_corpus_is_found_again_by_its_content(texts, tmp_path, monkeypatch):
    config = config_of(tmp_path / "texts")
    first = prepare(config, tmp_path / "cache")
    monkeypatch.setattr(corpus, "_build", lambda *_: pytest.fail("it was made again"))
    assert prepare(config, tmp_path / "cache").digest == first.digest
    shutil.copytree(tmp_path / "texts", tmp_path / "moved")
    assert prepare(config_of(tmp_path / "moved"), tmp_path / "cache").digest == first.digest
    monkeypatch.undo()
    for other in ({"seed": 1}, {"validation_fraction": 0.2}, {"tokenizer": "bpe:270"}, {"max_bytes": 5000}):
        assert prepare(config_of(tmp_path / "texts", **other), tmp_path / "cache").digest != first.digest
    (tmp_path / "texts" / "0003.txt").write_text("changed")
    assert prepare(config, tmp_path / "cache").digest != first.digest
    assert not list((tmp_path / "cache").glob(".*"))


def test_one_document_holds_out_its_end(tmp_path):
    text = "".join(f"line {number} of one long text\n" for number in range(1000))
    (tmp_path / "one.txt").write_text(text)
    found = prepare(config_of(tmp_path / "one.txt"), tmp_path / "cache")
    train, held = decoded(found, "train"), decoded(found, "validation")
    assert train[0] + held[0] == text and len(train) == len(held) == 1 and held[0].startswith("line ")
    assert len(held[0]) / len(text) == pytest.approx(0.1, abs=0.005)
    assert found.metadata["split"] == "tails"


def test_given_held_out_text_is_kept_out_of_training(texts, tmp_path):
    copy = tmp_path / "held" / "copy.txt"
    copy.parent.mkdir()
    copy.write_text(texts[7], encoding="utf-8")
    (tmp_path / "held" / "new.txt").write_text("something new")
    found = prepare(config_of(tmp_path / "texts", validation=[str(tmp_path / "held")]), tmp_path / "cache")
    assert decoded(found, "validation") == [texts[7], "something new"]
    assert decoded(found, "train") == texts[:7] + texts[8:]
    assert found.metadata["copies_left_out"] == 1
    with pytest.raises(ConfigError, match="held-out"):
        prepare(config_of(copy, validation=[str(copy)]), tmp_path / "cache")


def test_max_bytes_takes_a_fixed_random_part(texts, tmp_path):
    found = prepare(config_of(tmp_path / "texts", max_bytes=10_000), tmp_path / "cache")
    assert 9_997 <= found.train.bytes + found.validation.bytes <= 10_000
    parts = decoded(found, "train") + decoded(found, "validation")
    assert sum(part in texts for part in parts) >= len(parts) - 1 and all(part in "".join(texts) for part in parts)
    assert texts[0] not in parts or texts[1] not in parts or texts[2] not in parts


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_give_the_same_tokens_as_files(texts, tmp_path, kind):
    path = tmp_path / f"texts.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": texts}), path)
    files = prepare(config_of(tmp_path / "texts"), tmp_path / "cache")
    rows = prepare(config_of(path), tmp_path / "cache")
    for split in ("train", "validation"):
        assert np.array_equal(files.split(split)[:], rows.split(split)[:])


def test_a_tokenizer_file_that_cannot_express_all_text(texts, tmp_path):
    vocab = {word: number for number, word in enumerate(["[UNK]", "</s>", *sorted({*WORDS} - {"fox"})])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "words.json"))
    found = prepare(config_of(tmp_path / "texts", tokenizer=str(tmp_path / "words.json")), tmp_path / "cache")
    assert found.tokenizer.byte_lengths is None and found.tokenizer.end_of_document == 1
    assert found.train.unknown + found.validation.unknown == "".join(texts).count("fox")
    held = decoded(found, "validation")
    assert found.validation.bytes == sum(
        len(text.encode()) for text in texts if text.replace("fox", "[UNK]").strip() in held
    )


def test_all_problems_come_at_once_and_before_anything_is_written(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    paths = [tmp_path / name for name in ("latin.txt", "rows.jsonl", "missing.txt")]
    config = config_of(*paths, validation=["none/*.txt"], tokenizer="none.json")
    with pytest.raises(ConfigError) as error:
        prepare(config, tmp_path / "cache")
    text = "\n".join(error.value.problems)
    assert len(error.value.problems) == 5 and not (tmp_path / "cache").exists()
    for part in (
        "latin.txt: ",
        "line 1: ",
        "source: ",
        "validation: 'none/*.txt'",
        "none.json",
    ):
        assert part in text


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "tiny.txt").write_text("x")
    with pytest.raises(ConfigError, match="0.1 of .* 1 byte"):
        prepare(config_of(tmp_path / "tiny.txt"), tmp_path / "cache")
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match="source: .* 1 file"):
        prepare(config_of(tmp_path / "rows.jsonl"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer": "bpe"}, "tokenizer: 'bpe' .*bpe:4096"),
        ({"tokenizer": {"kind": "bpe", "vocab_sise": 300}}, "vocab_sise: .*'vocab_size'"),
        ({"tokenizer": "bpe:256"}, "vocab_size: .*257"),
        ({"sauce": []}, "sauce: .*'source'"),
        ({"source": 3}, "source: 3"),
        ({"validation_fraction": 1.0}, "validation_fraction: .*1"),
    ],
)
def test_bad_keys_and_values_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(DataConfig, values)


def test_short_forms_and_their_long_ones_are_one_configuration():
    short = parse(DataConfig, {"source": ["stdlib"], "tokenizer": "bpe:512", "validation": "held.txt"})
    assert short.source == "stdlib" and short.tokenizer.vocab_size == 512 and short.validation == ["held.txt"]
    assert parse(DataConfig, short.model_dump(mode="json")) == short
    assert parse(DataConfig, {"source": "a.txt"}).source == ["a.txt"]


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "train.documents", "tokenizer.json", "corpus.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_damage_is_named_and_never_trained_on(texts, tmp_path, name, damage, monkeypatch):
    config = config_of(tmp_path / "texts")
    found = prepare(config, tmp_path / "cache")
    before = found.train[:].copy()
    path = found.folder / name
    content = path.read_bytes()
    time.sleep(0.01)  # a change within one tick of the clock is not seen by a process that has verified the file
    if damage == "missing":
        path.unlink()
    else:
        at = len(content) // 2
        rest = b"" if damage == "truncated" else bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(content[:at] + rest)
    monkeypatch.setattr(corpus, "_build", lambda *_: pytest.fail("it was made again unasked"))
    for attempt in (lambda: prepare(config, tmp_path / "cache"), lambda: open_corpus(found.folder)):
        with pytest.raises(CorpusDamaged, match=f"{name}: .*{found.folder}"):
            attempt()
    monkeypatch.undo()
    again = prepare(config, tmp_path / "cache", rebuild=True)
    assert np.array_equal(again.train[:], before) and path.read_bytes() == content
    again.verify()


def test_the_content_is_read_through_once_a_process(texts, tmp_path, monkeypatch):
    found = prepare(config_of(tmp_path / "texts"), tmp_path / "cache")
    monkeypatch.setattr(shards, "content_problem", lambda path, entry: None if "tokenizer" in path.name else "read")
    open_corpus(found.folder)
    with pytest.raises(CorpusDamaged, match="read"):
        found.verify()
    monkeypatch.setattr(shards, "_verified", set())
    with pytest.raises(CorpusDamaged, match="read"):
        open_corpus(found.folder)


def test_two_processes_prepare_at_once(texts, tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from linnet.config import parse; from linnet.data import DataConfig, prepare\n"
        "config = parse(DataConfig, {'source': sys.argv[1], 'tokenizer': 'bpe:300'})\n"
        "Path(sys.argv[3], sys.argv[4]).touch()\n"
        "while len(list(Path(sys.argv[3]).iterdir())) < 2: time.sleep(0.001)\n"
        "print(prepare(config, sys.argv[2]).digest)"
    )
    (tmp_path / "ready").mkdir()
    arguments = [sys.executable, "-c", code, *(str(tmp_path / name) for name in ("texts", "cache", "ready"))]
    environment = {**os.environ, "PYTHONPATH": str(Path(corpus.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([*arguments, name], stdout=subprocess.PIPE, text=True, env=environment) for name in ("a", "b")
    ]
    try:
        digests = {process.communicate(timeout=300)[0].strip() for process in both}
    finally:
        for process in both:  # one that failed leaves the other waiting for it
            process.kill()
    assert [process.returncode for process in both] == [0, 0] and len(digests) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(digests)
    open_corpus(tmp_path / "cache" / digests.pop()).verify()


def test_a_folder_made_meanwhile_by_another_process_stays(tmp_path):
    target = tmp_path / "cache" / "name"
    with shards.new_folder(target) as first, shards.new_folder(target) as second:
        (first / "file").write_text("first")
        (second / "file").write_text("second")
    assert (target / "file").read_text() == "second"  # the inner block ends first
    assert [path.name for path in target.parent.iterdir()] == ["name"]


def test_what_fails_leaves_nothing_behind(texts, tmp_path, monkeypatch):
    old = tmp_path / "cache" / ".name.0.tmp"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.ShardWriter, "add", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        prepare(config_of(tmp_path / "texts"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []  # nor what a killed process left long ago


def test_the_unfinished_folder_of_a_killed_process_is_removed_at_once(tmp_path):
    code = (
        "import os, sys, pathlib\nfrom linnet.data import shards\n"
        f"with shards.new_folder(pathlib.Path({str(tmp_path)!r}) / 'name') as folder:\n"
        "    print(folder.name, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    unfinished = tmp_path / process.stdout.readline().strip()
    with shards.new_folder(tmp_path / "other"):
        assert unfinished.is_dir()  # its process lives
    process.kill()
    process.communicate()
    with shards.new_folder(tmp_path / "third"):
        assert not unfinished.exists()


@pytest.mark.parametrize("moment", ["_read", "_scan", "_build"])
def test_a_source_that_changes_while_it_is_read_is_refused(texts, tmp_path, monkeypatch, moment):
    original = getattr(corpus, moment)

    def change_it(*arguments):
        if moment == "_scan":
            found = original(*arguments)
        (tmp_path / "texts" / "0005.txt").write_text("other")
        return found if moment == "_scan" else original(*arguments)

    monkeypatch.setattr(corpus, moment, change_it)
    with pytest.raises(ConfigError, match="changed"):
        prepare(config_of(tmp_path / "texts"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_progress_ends_at_the_whole(texts, tmp_path):
    calls = []
    prepare(
        config_of(tmp_path / "texts", tokenizer="bpe:300"),
        tmp_path / "cache",
        progress=lambda *call: calls.append(call),
    )
    assert [what for what, _, _ in calls[-2:]] == ["learning merges", "tokenizing"]
    last = {what: (done, total) for what, done, total in calls}
    size = sum(len(text.encode()) for text in texts)
    assert last["reading"] == last["tokenizing"] == (size, size)


def test_stdlib_is_a_corpus(tmp_path):
    found = prepare(parse(DataConfig, {"max_bytes": 2_000_000}), tmp_path)
    assert 1_999_990 <= found.train.bytes + found.validation.bytes <= 2_000_000
    assert found.validation.documents > 0 and "import " in found.tokenizer.decode(found.train[:20_000])


def test_bigram_entropy_of_wikitext(real_data, tmp_path):
    """The held-out bytes are the file's own: their bigram entropy is the known one, 3.364 bits a byte."""
    folder = real_data / "wikitext-2"
    config = config_of(folder / "test.txt", validation=[str(folder / "valid.txt")])
    found = prepare(config, tmp_path)
    text = found.validation.document(0)
    assert text.tobytes() == (folder / "valid.txt").read_bytes() and found.train.bytes == 1_256_449
    pairs = np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=65536).reshape(256, 256)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -np.nansum(pairs * np.log2(pairs / pairs.sum(1, keepdims=True))) / pairs.sum()
    assert bits == pytest.approx(3.364, abs=0.002) and math.isfinite(bits)
