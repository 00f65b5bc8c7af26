"""`linnet corpus dedup`: what it prints, and what it refuses."""

import json

from typer.testing import CliRunner

from linnet.cli import app

LONG = " ".join(f"word{number}" for number in range(60))


def call(*arguments: object):
    return CliRunner().invoke(app, ["corpus", "dedup", *map(str, arguments)])


def test_summary(tmp_path):
    texts = [LONG, "short", LONG.replace("word0 ", "new "), "short", "Question: is this an item of the evaluation set?"]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "is this an item of the evaluation set"}) + "\n")
    folder, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    result = call(folder, "--out", out, "--verify", "--against", tmp_path / "test.jsonl")
    assert result.exit_code == 0, result.output
    for shown in ("exact copy", "near copy", "evaluation item", "corpus/corpus.jsonl:2", "0.96", "2 documents"):
        assert shown in result.stdout
    again = call(folder, "--out", out, "--verify", "--against", tmp_path / "test.jsonl", "--json")
    assert json.loads(again.stdout)["results"]["exact copies"] == 1
    lines = call(folder, "--out", tmp_path / "lines", "--level", "line", "--json")
    assert json.loads(lines.stdout)["results"]["copied lines"] == 0


def test_wrong_options_are_named_together(tmp_path):
    (tmp_path / "corpus.txt").write_text(LONG)
    wrong = call(
        tmp_path / "corpus.txt", "--out", tmp_path / "out", "--threshold", "1.5", "--overlap", "0", "--level", "x"
    )
    assert wrong.exit_code == 2
    for key in ("threshold", "overlap", "level"):
        assert key in wrong.stderr
    engine = call(tmp_path / "corpus.txt", "--out", tmp_path / "out", "--engine", "slurm")
    assert engine.exit_code == 2 and "use local or ray" in engine.stderr
    assert not (tmp_path / "out").exists()
