"""`linnet evaluate`: scores texts with a saved model, keeps the result, and says what is wrong."""

import errno
import json
import os
import shutil
import signal
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from chats import CHATML, VOCABULARY, model_folder, turns, write_chats
from children import COMMAND, Child
from typer.testing import CliRunner

from linnet.cli import app
from linnet.cli.evaluate.show import show
from linnet.data import ByteTokenizer
from linnet.data.chat import TURNS, encode_chat
from linnet.data.chat.template import ChatTemplate
from linnet.evaluate.compare import command
from linnet.evaluate.evaluators import TextEvaluator
from linnet.evaluate.results import Evaluation, Item, Result, read_evaluation
from linnet.evaluate.texts import Document, score_text
from linnet.models import build_model, family
from linnet.runs import checkpoint, load_model
from linnet.runs.model import save_model
from linnet.signals import Terminated


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for name in ("tnl", "llama"):
        config = family(name)(32, 2, vocab_size=256)
        save_model(path / name, config, build_model(config).state_dict(), ByteTokenizer())
    (path / "a.txt").write_text("a first document, of one line\n" * 9)
    (path / "b.jsonl").write_text('{"text": "two [small]"}\n{"text": "ones"}\n')
    return path


def call(*arguments) -> object:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_json_is_what_the_function_gives_and_is_kept(folder):
    result = call("text", folder / "tnl", folder / "a.txt", folder / "b.jsonl", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)["text"]
    found = record["detail"]
    model, tokenizer = load_model(folder / "tnl")
    texts = [(folder / "a.txt").read_text(), "two [small]", "ones"]
    expected = score_text(model, [Document.of_text("x", text, tokenizer) for text in texts])
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert found["bits_per_byte_interval"] is None, "three documents"
    assert [d["name"].rpartition("/")[2] for d in found["documents"]] == ["a.txt", "b.jsonl:1", "b.jsonl:2"]
    assert (found["method"], found["window"]) == ("carried", None)
    [kept] = (folder / "tnl" / "evaluations").glob("text-*.json")
    assert json.loads(kept.read_text()) == record


def test_results_of_two_keys_are_both_kept(folder, tmp_path):
    (file := tmp_path / "two.jsonl").write_text('{"a": "one text", "b": "another"}\n')
    kept = folder / "tnl" / "evaluations"
    before = set(kept.glob("*.json"))
    assert "; give --text-key (" in call("text", folder / "tnl", file).stderr
    for key in ("a", "b"):
        assert call("text", folder / "tnl", file, "--text-key", key).exit_code == 0
    assert {json.loads(path.read_text())["asked"]["text_key"] for path in set(kept.glob("*.json")) - before} == {
        "a",
        "b",
    }


def test_attention_reads_in_windows_unless_asked_otherwise(folder):
    numbers = {}
    for method in ("auto", "carried"):
        arguments = ["--method", method, "--dtype", "float64", "--json"]
        arguments += ["--window", 64] if method == "auto" else []
        found = json.loads(call("text", folder / "llama", folder / "a.txt", *arguments).stdout)["text"]["detail"]
        numbers[found["method"]] = found["loss"]
        assert found["stride"] == (32 if method == "auto" else None)
    assert numbers.keys() == {"windowed", "carried"} and len(set(numbers.values())) == 2


def test_windows_are_without_effect_where_the_state_is_carried(folder):
    for run, method, noted in (("tnl", "auto", True), ("tnl", "windowed", False), ("llama", "auto", False)):
        result = call("text", folder / run, folder / "a.txt", "--method", method, "--window", 64, "--stride", 16)
        assert result.exit_code == 0, result.output
        assert ("--window, --stride: no effect" in result.stderr) == noted
    assert "no effect" not in call("text", folder / "tnl", folder / "a.txt").stderr


@pytest.mark.parametrize("name", ["tnl", "llama"])
@pytest.mark.parametrize("kind", ["text", "blocks"])
def test_a_model_that_was_trained_on_single_tokens_is_scored(folder, tmp_path, name, kind):
    (run := shutil.copytree(folder / name, tmp_path / "run")).joinpath("SHA256SUMS").unlink()
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "seq_len: 1\n")
    result = call(kind, run, folder / "a.txt")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("kind, key, usual", [("text", "window", 1024), ("blocks", "block", 512)])
def test_a_length_that_is_not_that_of_the_training_is_said(folder, tmp_path, kind, key, usual):
    """A converted folder does not hold the training length, so the same model was scored in other windows, unsaid."""
    (run := shutil.copytree(folder / "llama", tmp_path / "run")).joinpath("SHA256SUMS").unlink()
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "seq_len: 64\n")
    short = family("llama")(32, 1, vocab_size=256).model_copy(update={"positions": "learned", "num_positions": 24})
    save_model(tmp_path / "short", short, build_model(short).state_dict(), ByteTokenizer())
    for path, options, length in (
        (folder / "llama", (), usual),
        (folder / "llama", (f"--{key}", 32), None),
        (run, (), None),
        (tmp_path / "short", (), 24),
    ):
        found = call(kind, path, folder / "a.txt", *options)
        assert found.exit_code == 0, found.output
        notes = " ".join(found.stderr.split())
        assert (f"--{key}: {length} tokens, because" in notes) if length else (f"--{key}" not in notes)
    assert "--window" not in call("text", folder / "tnl", folder / "a.txt").stderr


def test_what_a_person_sees(folder, tmp_path):
    shutil.copytree(folder / "tnl", folder / "tnl [a]")  # brackets in a name are not markup
    few = call("text", folder / "tnl [a]", folder / "b.jsonl")
    assert few.exit_code == 0 and "no interval: fewer than 6 documents" in few.stdout
    (six := tmp_path / "six.jsonl").write_text("".join(f'{{"text": "document {i} of six"}}\n' for i in range(6)))
    result = call("text", folder / "tnl [a]", six)
    assert result.exit_code == 0
    for part in ("tnl [a]: 6 documents by the carried state", "bits per byte", "per word", "8 to 15", "95 % interval"):
        assert part in result.stdout
    (spaces := tmp_path / "spaces.txt").write_text(" \n" * 20)
    result = call("text", folder / "tnl [a]", spaces)
    assert result.exit_code == 0 and "per byte" in result.stdout and "per word" not in result.stdout


def test_conversations_have_the_losses_of_a_pass_over_each(tmp_path):
    path = model_folder(tmp_path / "base", family("tnl")(32, 2, vocab_size=VOCABULARY))
    talks = [turns("a", "b", "c", f"dd{n}", "e", "f", "g", "h") for n in range(6)]
    file = write_chats(tmp_path / "held.jsonl", *talks, {"prompt": "x", "completion": "<|im_end|>"})
    result = call("chat", path, file, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)["chat"]
    model, tokenizer = load_model(path)
    template, sums = ChatTemplate(CHATML, tokenizer), {}
    for messages in (*talks, turns("x", "<|im_end|>")):
        chat = encode_chat(messages, [], template)
        logits, _ = model(torch.from_numpy(chat.tokens.astype("int64"))[None])
        nats = -logits[0].log_softmax(-1)[range(len(chat.tokens) - 1), chat.tokens[1:].astype("int64")]
        for name, at in (("loss", chat.turns > 0), *((f"{n}_turn", chat.turns == i + 1) for i, n in enumerate(TURNS))):
            sums.setdefault(name, []).extend(nats[torch.from_numpy(at[1:])].tolist())
    values = {one["metric"]: one["value"] for one in record["results"]}
    assert values == pytest.approx(
        {name: sum(nats) / len(nats) for name, nats in sums.items()} | {"exact": 0}, abs=1e-5
    )
    assert record["detail"] == {"answers": 25, "targets": len(sums["loss"])}
    assert {one["n"] for one in record["results"]} == {7, 6}
    shown = call("chat", path, file).stdout
    assert "first_turn" in shown and f"{values['loss']:.4f}" in shown


def test_conversations_of_two_models_are_compared_though_their_templates_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = family("tnl")(32, 2, vocab_size=VOCABULARY)
    first = model_folder(tmp_path / "a", config)
    second = model_folder(tmp_path / "b", config, CHATML + "{# b #}", seed=1)
    kept = "(message['content'] if loop.last or message['role'] == 'user' else '') | trim"
    changes = CHATML.replace("message['content'] | trim", kept)
    (tmp_path / "changes.jinja").write_text(changes)
    file = write_chats(tmp_path / "held.jsonl", *(turns("a", "b", "c", f"d{n}") for n in range(6)))
    assert call("chat", first, file).exit_code == call("chat", second, file).exit_code == 0
    result = CliRunner().invoke(app, ["compare", str(first), str(second)])
    assert "chat: " in result.stdout and "The template differs: a " in result.stdout, result.output
    refused = call("chat", first, file, "--template", "changes.jinja")
    assert refused.exit_code == 2 and "set --per-answer" in refused.stderr
    assert call("chat", first, file, "--template", "changes.jinja", "--per-answer").exit_code == 0
    records = map(read_evaluation, (first / "evaluations").glob("chat-*.json"))
    [words] = [command(record, "a") for record in records if record.asked["per_answer"]]
    assert words == f"linnet evaluate chat a {file} --template changes.jinja --per-answer"
    (first / "chat_template.jinja").unlink()
    without = call("chat", first, file)
    assert without.exit_code == 2 and "--template: " in without.stderr
    missing = call("chat", first, tmp_path / "none.jsonl")
    assert missing.exit_code == 2 and "PATH: " in missing.stderr


def test_needles_are_looked_for_and_kept(folder, monkeypatch):
    arguments = ["--mode", "standard", "--lengths", "300:500:3", "--depths", 2]
    result = call("needle", folder / "llama", *arguments, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)["needle"]
    found = record["detail"]
    assert found["config"]["lengths"] == [300, 400, 500] and found["config"]["depths"] == [0.0, 1.0]
    assert found["accuracy"] == [[0.0] * 3] * 2 and found["score"] == 0.0 and len(found["sensitivity"]) == 12
    [kept] = (folder / "llama" / "evaluations").glob("needle-*.json")
    assert json.loads(kept.read_text()) == record
    assert {one["metric"]: one["n"] for one in record["results"]} == {"accuracy": 6, "weighted": 6, "niah_score": 6}
    monkeypatch.setattr("linnet.options.STEADY", 0.0)
    shown = call("needle", folder / "tnl", "--lengths", "300,500", "--depths", 2, "--scoring", "choice")
    assert "prompts: 100 %, about 0 s left\n" in shown.stderr
    assert "of 4 prompts" in shown.stdout and "NIAH score" in shown.stdout and "500" in shown.stdout


def test_recall_is_asked_of_models_without_a_tokenizer_too(folder, tmp_path):
    config = family("tnl")(32, 2, vocab_size=64)
    save_model(tmp_path / "mute", config, build_model(config).state_dict())
    arguments = ["--lengths", "16,32", "--pairs", "4,8", "--samples", 2]
    for path in (tmp_path / "mute", folder / "tnl"):
        result = call("recall", path, *arguments, "--json")
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)["recall"]
        assert {one["task"] for one in record["results"]} >= {"recall-mqar", "recall-selective_copying"}
        cells = {(one["task"], one["length"], one["pairs"]): one for one in record["detail"]["cells"]}
        assert cells["mqar", 16, 4]["chance"] == 0.25 and ("mqar", 16, 8) not in cells
        missing = {(one["task"], one["length"], one["pairs"]) for one in record["detail"]["not_measured"]}
        assert ("mqar", 16, 8) in missing and not missing & cells.keys() and len(missing) + len(cells) == 5 * 2 * 2
        [kept] = (path / "evaluations").glob("recall-*.json")
        assert json.loads(kept.read_text()) == record
    shown = call("recall", folder / "tnl", *arguments).stdout
    assert "among all tokens" in shown and "mqar" in shown and "(0.25)" in shown
    assert "8 keys" in shown and "8 to copy" in shown and "not measured, too short: " in shown
    shown = call("recall", folder / "tnl", "--lengths", "16,256", "--pairs", "4,64", "--samples", 1).stdout
    assert "too few words" in shown and "not measured, too few words: the model has fewer tokens" in shown


def test_common_words_are_asked_like_needles(folder):
    result = call("needle", folder / "tnl", "--mode", "words", "--lengths", "300,400", "--depths", 1, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["needle"]["results"][0]["task"] == "needle-words"


def test_tasks_are_refused_or_cut_where_attention_would_read_too_far(folder, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    (tmp_path / "one.yaml").write_text(
        "task: one\ndataset_path: json\ndataset_kwargs: {data_files: {test: one.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: c\ndoc_to_target: a\n"
    )
    (tmp_path / "one.jsonl").write_text(json.dumps({"q": "x" * 99, "c": ["yes", "no"], "a": 0}) + "\n")
    arguments = ["one", "--include", tmp_path]
    for more, message in {
        (): "give --context N",
        ("--context", 50): "--context: 2 of 2 requests exceed 50 tokens (the longest has 102); give more",
    }.items():
        result = call("tasks", folder / "llama", *arguments, *more)
        assert result.exit_code == 2 and message in result.output.replace("\n", " "), result.output
    result = call("tasks", folder / "llama", *arguments, "--context", 50, "--too-long", "cut", "--json")
    assert json.loads(result.stdout)["tasks"]["detail"]["cuts"] == 2
    assert call("tasks", folder / "tnl", *arguments).exit_code == 0


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        ({"kind": "bpe", "vocab_size": 256}, "has no tokenizer.json; copy it from the folder of its corpus"),
        ({"kind": "file", "path": "/nowhere/tokenizer.json"}, "/nowhere/tokenizer.json"),
        (None, "has no tokenizer.json"),
    ],
)
def test_a_run_whose_tokenizer_is_missing(tmp_path, tokenizer, message):
    config = family("tnl")(32, 2, vocab_size=256)
    values = {"model": config.model_dump(mode="json"), "data": {} if tokenizer is None else {"tokenizer": tokenizer}}
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    checkpoint.save(tmp_path / "checkpoints", 3, {"model": build_model(config).state_dict()}, {})
    (tmp_path / "a.txt").write_text("text")
    result = call("text", tmp_path, tmp_path / "a.txt")
    assert result.exit_code == 2 and message in result.output.replace("\n", " "), result.output


def test_problems_of_suites_are_reported_together(folder, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    (tmp_path / "wikitext.yaml").write_text("task: [\n")
    result = call("suite", folder / "tnl", "perplexity", "csr", "--include", tmp_path)
    assert result.exit_code == 2 and "1 problem" in result.output and "wikitext.yaml" in result.output


@pytest.mark.parametrize(
    "arguments, keys",
    [
        (("text", "RUN", "TEXT", "--method", "carried", "--window", 8), ["--window"]),
        (("needle", "RUN", "--mode", "words", "--digits", 5, "--haystack", "TEXT"), ["--haystack", "--digits"]),
    ],
)
def test_options_that_have_no_effect_are_all_named(folder, arguments, keys):
    """Also where the value is the default: what counts is what was typed."""
    places = {"RUN": folder / "tnl", "TEXT": folder / "a.txt"}
    result = call(*(places.get(one, one) for one in arguments))
    assert result.exit_code == 2 and keys_of(result) == keys


def keys_of(result) -> list[str]:
    """The keys that an error names, one per problem."""
    return [line[4:].partition(":")[0] for line in result.stderr.splitlines() if line.startswith("  - ")]


@pytest.mark.parametrize(("signal", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_signal_says_what_is_kept(signal, code, folder, monkeypatch):
    def stop(*_, **__):
        raise signal

    monkeypatch.setattr("linnet.evaluate.texts.score_text", stop)
    result = call("text", folder / "tnl", folder / "a.txt")
    assert result.exit_code == code and "stopped" in result.output
    assert "demo" not in result.output and "starts again" in result.output
    monkeypatch.setattr(import_module("linnet.cli.evaluate.demo"), "run_demo", stop)
    assert "to resume" in call("demo").output


@pytest.mark.parametrize(
    "arguments, keys",
    [
        (("text", "FOLDER", "TEXT"), 1),
        (("text", "RUN", "none.txt"), ["PATH"]),
        (("text", "RUN", "EMPTY"), 1),
        (("text", "MUTE", "TEXT"), 1),
        (("text", "RUN", "TEXT", "--window", 8, "--stride", 8), ["--stride"]),
        (("text", "RUN", "JSONL", "--text-key", "body"), 2),
        (("recall", "RUN", "--pairs", "0,4"), ["--pairs"]),
        (("recall", "RUN", "--lengths", 500, "--pairs", 100), ["--pairs"]),
        (("recall", "nowhere", "--lengths", 2), 2),
        (("needle", "RUN", "--lengths", "9,5"), ["--lengths"]),
        (("needle", "RUN", "--lengths", "10:20"), ["--lengths"]),
        (("needle", "RUN", "--lengths", "20"), 1),
        (("needle", "nowhere", "--haystack", "FOLDER"), 2),
    ],
)
def test_errors_name_the_option_or_the_file(folder, tmp_path, arguments, keys):
    (tmp_path / "empty.txt").write_text("")
    config = family("tnl")(32, 2, vocab_size=256)
    save_model(tmp_path / "mute", config, build_model(config).state_dict())
    places = {"RUN": folder / "tnl", "TEXT": folder / "a.txt", "JSONL": folder / "b.jsonl", "FOLDER": folder}
    places |= {"EMPTY": tmp_path / "empty.txt", "MUTE": tmp_path / "mute"}
    result = call(*(places.get(one, one) for one in arguments))
    assert result.exit_code == 2, result.output
    assert len(keys_of(result)) == keys if isinstance(keys, int) else keys_of(result) == keys, result.output


def test_a_folder_that_cannot_be_written_to_is_noted_before_the_numbers(folder, tmp_path):
    shutil.copytree(folder / "tnl", tmp_path / "tnl", ignore=shutil.ignore_patterns("evaluations"))
    (tmp_path / "tnl" / "evaluations").write_text("")
    result = call("text", tmp_path / "tnl", folder / "a.txt")
    assert result.exit_code == 0 and result.output.startswith("note ") and "evaluations" in result.output
    assert "not saved in " in result.output  # also after the numbers, since the folder may become read-only meanwhile


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_numbers_of_a_full_disk_are_printed_and_the_command_fails(folder, tmp_path, monkeypatch, options):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    shutil.copytree(folder / "tnl", tmp_path / "tnl", ignore=shutil.ignore_patterns("evaluations"))
    monkeypatch.setattr(os, "fsync", full)
    result = call("text", tmp_path / "tnl", folder / "a.txt", *options)
    assert result.exit_code == 2 and "perplexity" in result.output
    assert f"{tmp_path / 'tnl'}: " in result.output and "disk is full; free" in result.output
    assert not list((tmp_path / "tnl" / "evaluations").iterdir())


def test_texts_with_windows_line_ends_and_training_data_are_noted(folder, tmp_path):
    shutil.copytree(folder / "tnl", tmp_path / "tnl", ignore=shutil.ignore_patterns("evaluations", "SHA256SUMS"))
    (tmp_path / "seen.txt").write_text("a text that was trained on\n")
    (tmp_path / "copy.txt").write_text("a text that was trained on\n")
    (tmp_path / "other.txt").write_bytes(b"one line\r\nof a file of Windows\r\n")
    with open(tmp_path / "tnl" / "config.yaml", "a") as file:
        file.write(f"data: {{source: ['{tmp_path}/seen.txt']}}\n")
    names = {"seen": ["training data"], "copy": ["training data"], "other": ["CRLF"]}
    for name, parts in names.items():
        result = call("text", tmp_path / "tnl", tmp_path / f"{name}.txt")
        notes = [line for line in result.stderr.splitlines() if line.startswith("note ")]
        assert result.exit_code == 0 and len(notes) == len(parts), result.output
        assert all(part in note and f"{name}.txt" in note for part, note in zip(parts, notes, strict=True))
    assert "note " not in call("text", tmp_path / "tnl", folder / "a.txt").stderr


def test_documents_without_text_are_noted(folder, tmp_path):
    rows = [{"text": "a text"}, {"text": ""}, {"text": None}, {"text": "another"}, {"text": ""}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = call("text", folder / "tnl", tmp_path / "rows.jsonl")
    note = f"3 documents of {tmp_path / 'rows.jsonl'} left out, because the text is empty or null"
    assert result.exit_code == 0 and note in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_a_gpu_that_is_not_there(folder):
    result = call("text", folder / "tnl", folder / "a.txt", "--device", "cuda")
    assert result.exit_code == 2 and keys_of(result) == ["--device"]


def test_a_record_is_written_before_it_is_printed(folder, monkeypatch):
    from linnet.cli.evaluate import show as evaluate_show
    from linnet.evaluate.results import read_evaluations

    before = {record.name for record in read_evaluations(folder / "tnl")}

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(evaluate_show, "show", closed)
    call("text", folder / "tnl", folder / "a.txt", "--window", 24, "--method", "windowed")
    assert len({record.name for record in read_evaluations(folder / "tnl")} - before) == 1


def test_a_new_kind_of_evaluation_needs_no_table_of_its_own(capsys):
    items = (Item("a.txt", 2.0), Item("b.txt", 4.0))
    show(Evaluation("rank", {}, {}, (Result.of_items("rank", "mean_rank", items, "lower"),)), Path("run"))
    assert capsys.readouterr().out.split() == (
        "task metric value error guessing questions rank mean_rank 3.0000 1.0000 2".split()
    )


def test_answers_that_are_all_wrong_have_no_error_of_zero(capsys):
    items = tuple(Item(f"q{n}", 0.0) for n in range(4))
    show(Evaluation("tasks", {}, {}, (Result.of_items("quiz", "acc", items, "higher"),)), Path("run"))
    header, row, note = filter(str.split, capsys.readouterr().out.splitlines())
    assert row.split() == ["quiz", "acc", "0.0000", "4"]
    assert "quiz acc" in note and "0.00 to 0.60" in note


def test_devices_that_cannot_share_an_evaluation_are_refused(folder, monkeypatch):
    found = call("text", folder / "tnl", folder / "a.txt", "--devices", 0)
    assert found.exit_code == 2 and "--devices: Input should be greater than or equal to 1 (given '0')" in found.stderr
    monkeypatch.setattr(TextEvaluator, "divides", False)
    found = call("text", folder / "tnl", folder / "a.txt", "--devices", 2)
    assert found.exit_code == 2 and "--devices: text cannot be divided among 2; leave it out" in found.stderr
    assert call("text", folder / "tnl", folder / "a.txt", "--devices", 1).exit_code == 0
    monkeypatch.undo()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = call("text", folder / "tnl", folder / "a.txt", "--devices", 2)
    assert found.exit_code == 2 and "torchrun started 2 processes; drop --devices" in found.stderr


@pytest.mark.system
def test_two_processes_give_the_record_of_one_and_end_together(folder, tmp_path):
    asked = ["text", folder / "tnl", folder / "a.txt", folder / "b.jsonl", "--device", "cpu", "--json"]
    alone, shared = (Child(COMMAND, "evaluate", *asked, *more) for more in ((), ("--devices", "2")))
    assert (alone.wait(), shared.wait()) == (0, 0), shared.output()
    records = [json.loads(child.output()) for child in (alone, shared)]
    for record in records:
        del record["text"]["model"]["evaluated"]["date"]
    assert records[0] == records[1]

    asked = ["needle", folder / "tnl", "--lengths", "2000:9000:40", "--device", "cpu", "--devices", "2"]
    for name in ("dying", "stopped"):
        (tmp_path / name).mkdir()
    dying, stopped = (Child(COMMAND, "evaluate", *asked, TMPDIR=str(tmp_path / name)) for name in ("dying", "stopped"))
    for name, child in (("dying", dying), ("stopped", stopped)):
        while len(notes := list((tmp_path / name).glob("linnet-launch-*/pid-*"))) < 2:
            assert child.poll() is None, child.output()
            time.sleep(0.05)
        ranks = {note.name: int(note.read_text() or 0) for note in notes}
        if name == "dying":
            os.kill(ranks["pid-1"], signal.SIGKILL)
        else:
            child.send_signal(signal.SIGINT)
        assert child.wait(60) == (1 if name == "dying" else 130), child.output()
        assert ("rank 1 was killed by SIGKILL" in child.output()) == (name == "dying")
        assert "Traceback" not in child.output() and not list((tmp_path / name).glob("linnet-launch-*"))
        assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
