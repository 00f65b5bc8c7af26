"""`linnet data`: prepares, shows and repairs corpora, and reports problems."""

import json
import re

import pytest
from chats import VOCABULARY, model_folder, turns, write_chats
from hf_models import small
from typer.testing import CliRunner

from linnet.cli import app


@pytest.fixture
def call(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"document {number} says [hello] to the next one\n" * 5)
    (folder / "logo.bin").write_bytes(b"\0\1")

    def run(*arguments: str):
        return CliRunner().invoke(app, ["data", *arguments, "--out", str(tmp_path / "cache")])

    run.folder, run.cache = str(folder), tmp_path / "cache"
    return run


def test_letters_are_not_drawn_for_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("linnet.data.dna.make_chain", lambda *_: pytest.fail("the chain was made first"))
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["data", "dna", "--out", str(tmp_path / "file" / "a.fa")])
    assert result.exit_code == 2 and "--out" in result.output and "name another place" in result.output


def test_conversations_are_shown_with_their_targets_marked(tmp_path, monkeypatch):
    def show(*arguments: str):
        return CliRunner().invoke(app, ["data", "chat", *arguments])

    file = str(write_chats(tmp_path / "c.jsonl", turns("[red]hi", "ho", "a", "b"), turns("x" * 99, "y")))
    folder = model_folder(tmp_path / "model", small("tnl", VOCABULARY))
    words = show(file, "--from", str(folder), "--show", "1").stdout
    assert "[ho<|im_end|>]\n" in words and "[b<|im_end|>]" in words and "user\n[red]hi<|im_end|>" in words
    assert words.count("conversation 1") == 1 and "conversation 2" not in words
    (folder / "SHA256SUMS").unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"linnet": {"end_of_document": "<|im_end|>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))  # as many chat models have it
    assert show(file, "--from", str(folder), "--show", "1").stdout == words
    found = json.loads(show(file, "--seq-len", "90", "--json").stdout)  # bytes and ChatML
    assert found["conversations"] == 2 and found["answers"] == 3
    assert found["left_out"] == 1 and found["answers_left_out"] == 2
    assert [part["text"] for part in found["shown"][0] if part["target"]] == ["ho<|im_end|>\n"]
    assert json.loads(show(file, "--per-answer", "--json").stdout)["conversations"] == 3
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    assert "hi|[ho|]a|[b|]" in show(file, "--template", str(template)).stdout
    assert "no special token ends" in show(file, "--from", str(folder), "--template", str(template)).stderr
    assert "no special token ends" not in show(file, "--from", str(folder)).stderr
    for arguments, message in (
        ((str(tmp_path / "no.jsonl"),), "FILE: .*no.jsonl"),
        ((file, "--from", str(tmp_path)), "is not a run folder"),
        ((file, "--template", str(tmp_path / "no.jinja")), "no.jinja: cannot be read"),
    ):
        result = show(*arguments)
        assert result.exit_code == 2 and re.search(message, result.stderr.replace("\n", ""))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "a.txt").write_text("some text\n" * 20)
    for words in (("chat",), ("chat", "--tokenizer", "byte"), ("./chat",)):
        assert json.loads(CliRunner().invoke(app, ["data", *words, "--json"]).stdout)["tokenizer"] == "byte"
    assert json.loads(show(file, "--json").stdout)["conversations"] == 2
    assert "--show" in show("--help").stdout


def test_json_is_complete(call):
    found = json.loads(call(call.folder, "--tokenizer", "bpe:280", "--json").stdout)
    assert (found["tokenizer"], found["vocab_size"], found["split"]) == ("bpe:280", 280, "documents")
    splits = found["splits"].values()
    assert sum(split["documents"] for split in splits) == 40
    assert sum(split["bytes"] for split in splits) == sum(
        path.stat().st_size for path in (call.cache.parent / "texts").glob("*.txt")
    )
    for split in splits:
        assert split["bytes_per_token"] == split["bytes"] / split["tokens"] > 1.3
    assert found["skipped"] == 1 and "logo.bin: " in found["skipped_files"][0]
    assert found["sample"].startswith("document ") and call.cache / found["digest"] == call.cache / found["folder"]


def test_what_a_person_sees(call):
    result = call(call.folder)
    assert result.exit_code == 0
    for part in (
        "train",
        "validation",
        "tokenizer byte, 256 tokens; held out by document",
        "1 files skipped",
        "says [hello]",
    ):
        assert part in result.stdout


def test_damage_is_said_and_mended(call):
    folder = call.cache / json.loads(call(call.folder, "--json").stdout)["digest"]
    content = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(content[:-3])
    result = call(call.folder, "--json")
    assert result.exit_code == 0 and "damaged" in result.stderr
    assert re.search("train.bin:.*truncated", result.stderr.replace("\n", " "))
    assert (folder / "train.bin").read_bytes() == content and json.loads(result.stdout)


def test_bad_input_is_listed_with_exit_code_2(call):
    result = call("missing.txt", "none/*.txt", "--validation", "nothing")
    assert result.exit_code == 2 and result.stderr.count("  - ") == 3 and not call.cache.exists()
    result = call(call.folder, "--tokenizer", "words", "--validation-fraction", "0")
    assert result.exit_code == 2 and result.stderr.count("  - ") == 2
    result = call("", "missing.txt", "--max-bytes", "0", "--tokenizer", "bpe:7")  # "" does not name the current folder
    assert result.exit_code == 2 and result.stderr.count("  - ") == 4
    for problem in ("PATH: '' is empty", "PATH: 'missing.txt' does not", "--max-bytes: Input", "--tokenizer: Input"):
        assert problem in result.stderr
    assert "linnet data lra listops" in call("listops").stderr
    (tiny := call.cache.parent / "tiny.txt").write_text("x")
    result = call(str(tiny), "--validation-fraction", "0.1")  # once, and with what was given
    assert result.exit_code == 2 and result.stderr.count("  - ") == 1 and re.search("0.1 .* 1 byte", result.stderr)


def test_help_teaches(call):
    result = CliRunner().invoke(app, ["data", "--help"])
    assert result.exit_code == 0 and "Example" in result.stdout and "images" in result.stdout
    result = CliRunner().invoke(app, ["data", "text", "--help"])
    assert result.exit_code == 0 and "Example" in result.stdout and "--tokenizer" in result.stdout


def test_text_is_the_default_also_before_options(call):
    plain = call(call.folder, "--json")
    assert call("text", call.folder, "--json").stdout == plain.stdout
    assert call("--seed", "0", call.folder, "--json").stdout == plain.stdout
