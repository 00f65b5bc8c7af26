"""`linnet corpus clean`: what it prints and writes, what it refuses, and that a kill costs nothing."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.corpus import documents, stage


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "pages"
    folder.mkdir()
    words = "the quick brown fox jumps over the lazy dog and runs back to its den in the green hills".split()
    texts = [" ".join(words[n % 5 :]) + f" for the {n}th time, which is a <b>fact</b>.\n" for n in range(60)]
    rows = [json.dumps({"text": text, "id": number}) for number, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + '\n{"title": "no text"}\n')
    (folder / "logo.bin").write_bytes(b"\0\1")
    return folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(documents, "SMALLEST", 1000)
    monkeypatch.setattr(documents, "BLOCK", 200)


def call(*arguments: object):
    return CliRunner().invoke(app, ["corpus", "clean", *map(str, arguments)])


def content(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found.pop("provenance.json")
    return found


def test_what_a_person_sees_and_what_is_written(source, tmp_path):
    result = call(source, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for part in ("pages", "60 (100.0%)", "tags", "no text", "rows.jsonl:60", "1 files skipped", "logo.bin"):
        assert part in result.stdout, part
    found = json.loads(call(source, "--out", tmp_path / "out", "--json").stdout)
    assert found["documents"] == 60 and found["counts"]["changed.tags"] == 60
    data = CliRunner().invoke(app, ["data", str(tmp_path / "out"), "--out", str(tmp_path / "cache"), "--json"])
    splits = json.loads(data.stdout)["splits"]
    assert sum(split["documents"] for split in splits.values()) == 60
    assert sum(split["bytes"] for split in splits.values()) == found["text_bytes"]


def test_rules_of_a_file_and_one_that_is_unknown(source, tmp_path):
    (rules := tmp_path / "rules.yaml").write_text("tags: false\n")
    found = json.loads(call(source, "--out", tmp_path / "out", "--rules", rules, "--json").stdout)
    assert "changed.tags" not in found["counts"]
    rules.write_text("tagz: false\nlenght: {}\n")
    result = call(source, tmp_path / "missing", "--out", tmp_path / "other", "--rules", rules)
    assert result.exit_code == 2 and all(part in result.stderr for part in ("'tags'", "'length'", "missing"))
    assert not (tmp_path / "other").exists()
    result = call(source, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "tags: was" in result.stderr and "--anew" in result.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [(OSError(errno.ENOSPC, "No space left on device"), "the disk is full"), (KeyboardInterrupt(), "to resume")],
)
def test_a_full_disk_and_ctrl_c(source, tmp_path, monkeypatch, error, told):
    written = []

    def encode(document):
        written.append(document)
        if len(written) == 30:
            raise error
        return documents.encode(document)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "encode", encode)
        result = call(source, "--out", tmp_path / "out")
    assert result.exit_code in (2, 130) and told in result.stderr
    assert not list((tmp_path / "out").rglob("*.tmp")) and list((tmp_path / "out").glob("shard-*"))
    assert call(source, "--out", tmp_path / "out").exit_code == 0
    assert call(source, "--out", tmp_path / "whole").exit_code == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_sigkill_leaves_the_same_bytes(source, tmp_path, monkeypatch):
    """benchmarks/corpus_kills.py does this at many random moments of every stage."""
    rows = (source / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "long.jsonl").write_text("".join(rows * 60))
    monkeypatch.setattr(documents, "SMALLEST", 30_000)
    small = "from linnet.corpus import documents; documents.SMALLEST, documents.BLOCK = 30_000, 200"
    command = [sys.executable, "-c", f"{small}; from linnet.cli import main; main()", "corpus", "clean"]
    command += [str(tmp_path / "long.jsonl"), "--workers", "2"]
    out = tmp_path / "out"
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and len(list(out.glob("shard-*"))) < 2:
        time.sleep(0.005)
    assert process.poll() is None, "it ended before the kill"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "stage.json").exists()
    with contextlib.suppress(FileNotFoundError):
        (out / "parts" / "counts-00000.json").unlink()  # a shard without counts is written again
    assert call(tmp_path / "long.jsonl", "--out", out).exit_code == 0
    assert call(tmp_path / "long.jsonl", "--out", tmp_path / "whole").exit_code == 0
    assert len(content(out)) > 5 and content(out) == content(tmp_path / "whole")
