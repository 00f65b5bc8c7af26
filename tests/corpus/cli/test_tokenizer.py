"""`linnet corpus tokenizer`: the file it writes, what it prints, and its errors."""

import json

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.data import load_tokenizer

TEXT = "the cat sat on the mat and the cat's hat sat there. 我们在中国学习中文。\n"


def run(*words: object):
    return CliRunner().invoke(app, ["corpus", "tokenizer", *map(str, words)])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "pages.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} {TEXT * 3}"}) + "\n" for number in range(20)))
    return path


def test_a_tokenizer_is_written_and_its_scripts_are_shown(pages, tmp_path):
    out = tmp_path / "new" / "tokenizer.json"
    found = run(pages, "--vocab", 330, "--cjk", 50, "--out", out, "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    tokenizer = load_tokenizer(out)
    assert values["digest"] == tokenizer.digest and values["vocab_size"] == tokenizer.vocab_size == 330
    assert sum(values["tokens"].values()) == 330
    assert values["tokens"]["Han characters of the text"] == 8 and values["tokens"]["Han characters of the list"] == 42
    assert values["documents"] == 20 and values["bytes"] == values["learned_bytes"] == values["measured_bytes"]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    before = out.read_bytes()
    found = run(pages, "--vocab", 330, "--cjk", 50, "--out", out)
    assert "characters/token" in found.stdout and "Han" in found.stdout and out.read_bytes() == before


def test_fewer_bytes_to_learn_from_are_a_share_of_the_documents(pages, tmp_path):
    out = tmp_path / "tokenizer.json"
    found = run(pages, "--vocab", 270, "--train-bytes", 2000, "--out", out, "--json")
    assert 0 < json.loads(found.stdout)["learned_bytes"] < json.loads(found.stdout)["bytes"] / 2


def test_problems_are_errors_and_nothing_is_written(pages, tmp_path):
    for words, key in (
        ((tmp_path / "missing", "--out", tmp_path / "a.json"), "FOLDER"),
        ((pages, "--vocab", 300, "--cjk", 100, "--out", tmp_path / "a.json"), "--vocab"),
        ((pages, "--vocab", 60_000, "--out", tmp_path / "a.json"), "--vocab"),
        ((pages, "--vocab", 100_000, "--cjk", 90_000, "--out", tmp_path / "a.json"), "--cjk"),
        ((pages, "--out", tmp_path), "--out"),
        ((pages, "--out", pages / "a.json"), "--out"),
    ):
        found = run(*words)
        assert found.exit_code == 2 and key in found.output, found.output
    assert not list(tmp_path.iterdir())
