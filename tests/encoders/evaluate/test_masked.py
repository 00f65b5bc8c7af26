"""`linnet evaluate masked` and `glue`: every number against a direct computation, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from linnet.cli import app
from linnet.data import ByteTokenizer
from linnet.encoders.config import SentenceConfig
from linnet.encoders.evaluate import GlueEvaluator
from linnet.encoders.evaluate.masked import area_under_curve, score_masked, score_sentences
from linnet.encoders.glue import TASKS, encode, read_dev
from linnet.encoders.masking import MaskingConfig
from linnet.evaluate.results import read_evaluations
from linnet.evaluate.texts import Document
from linnet.models import build, family
from linnet.runs.model import save_model

pytest.importorskip("sklearn")
SENTENCES = ["The cat sat on the mat.", "mat the on sat", "a", "Dogs bark loudly at night."]


def config(name="lightnet-bert", **changes):
    return family(name, "masked_lm")(16, 2, num_heads=2).model_copy(update={"init_std": 0.3, **changes})


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    values = config()
    model = build("masked_lm", values, 0).eval()
    path = tmp_path_factory.mktemp("model") / "masked"
    return save_model(path, values, model.state_dict(), ByteTokenizer()), model


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    for name, lines in (
        ("CoLA", [f"x\t{number % 2}\t*\t{text}" for number, text in enumerate(SENTENCES)]),
        ("SST-2", ["sentence\tlabel", *(f"{text}\t{number % 2}" for number, text in enumerate(SENTENCES))]),
    ):
        (folder / name).mkdir()
        for file in ("train.tsv", "dev.tsv"):
            (folder / name / file).write_text("\n".join(lines) + "\n")
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def pseudo(model, text):
    """The pseudo-log-likelihood, one masked token at a time, each in a pass of its own."""
    tokens = torch.tensor([0, *text.encode(), 0])
    total = 0.0
    for place in range(1, len(tokens) - 1):
        seen = tokens.clone()
        seen[place] = model.mask_token
        total += model(seen[None])[0, place].log_softmax(-1)[tokens[place]].item()
    return total


@torch.no_grad()
def test_pseudo_log_likelihoods_mask_each_token_in_turn(masked, glue, tmp_path, monkeypatch):
    path, model = masked
    # Several passes, whose rows are of several sentences.
    monkeypatch.setattr("linnet.encoders.evaluate.masked.TOKENS", 100)
    expected = [pseudo(model, text) for text in SENTENCES]
    (tmp_path / "lines.txt").write_text("\n\n".join(SENTENCES) + "\n")
    done = run("masked", path, "--sentences", tmp_path / "lines.txt", "--cola", glue, "--longest", 25)
    assert done.exit_code == 0, done.output
    assert "1 skipped" in done.output and "auc per token" in done.output
    records = {record.kind: record for record in read_evaluations(path)}
    kept = [value for value, text in zip(expected, SENTENCES, strict=True) if len(text) <= 25]
    lines, cola = records["sentences"], records["cola"]
    assert [item.score for item in lines.results[0].items] == pytest.approx(kept, rel=1e-4)
    assert lines.results[0].value == pytest.approx(np.mean(kept), rel=1e-4)
    tokens = sum(len(text) for text in SENTENCES if len(text) <= 25)
    assert lines.results[1].metric == "pseudo_perplexity"
    assert lines.results[1].value == pytest.approx(np.exp(-sum(kept) / tokens), rel=1e-4)
    values = {one.metric: one.value for one in cola.results}
    labels = [number % 2 for number, text in enumerate(SENTENCES) if len(text) <= 25]
    pairs = [(a > b) + 0.5 * (a == b) for a, x in zip(kept, labels, strict=True) if x
             for b, y in zip(kept, labels, strict=True) if not y]  # fmt: skip
    assert values["auc"] == pytest.approx(np.mean(pairs)) and cola.detail["skipped"] == 1
    assert area_under_curve(np.array([0, 0, 1]), np.array([1.0, 2.0, 2.0])) == 0.75


def test_rows_beyond_a_table_of_positions_are_refused(tmp_path):
    values = config(positions="learned", num_positions=32)
    path = save_model(tmp_path / "table", values, build("masked_lm", values, 0).state_dict(), ByteTokenizer())
    (tmp_path / "text.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 3)
    long = run("masked", path, tmp_path / "text.txt", "--row", 33)
    assert long.exit_code == 2 and "--row: 33 is above model.num_positions: 32; use at most 32" in long.output
    assert run("masked", path, tmp_path / "text.txt", "--row", 32).exit_code == 0


def test_sentences_beyond_a_table_of_positions_are_named(tmp_path):
    values = config(positions="learned", num_positions=32)
    path = save_model(tmp_path / "table", values, build("masked_lm", values, 0).state_dict(), ByteTokenizer())
    lines, cola = tmp_path / "lines.txt", tmp_path / "CoLA"
    lines.write_text("short\n\n" + 31 * "a" + "\n" + 30 * "b" + "\n")
    cola.mkdir()
    (cola / "dev.tsv").write_text(f"x\t1\t*\tshort\nx\t0\t*\t{40 * 'c'}\nx\t0\t*\tlow\n")
    done = run("masked", path, "--sentences", lines, "--cola", cola)
    assert done.exit_code == 2, done.output
    for words in (f"{lines}:3: ", ": 33 is above model.num_positions: 32", f"{cola}/dev.tsv:2: ", ": 42 is above"):
        assert words in done.output
    assert done.output.count("skip it with --longest 30") == 2 and not (path / "evaluations").exists()
    assert run("masked", path, "--sentences", lines, "--cola", cola, "--longest", 30).exit_code == 0
    lines.write_text("".join(31 * "a" + "\n" for _ in range(20)))
    assert "and 15 more such sentences" in run("masked", path, "--sentences", lines).output


@torch.no_grad()
def test_masked_perplexity_is_that_of_masked_rows(masked, tmp_path):
    path, model = masked
    (tmp_path / "text.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 3)
    done = run("masked", path, tmp_path / "text.txt", "--row", 32, "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.output)["masked"]
    document = Document.of_text("x", (tmp_path / "text.txt").read_text(), ByteTokenizer())
    found = score_masked(model, [document], MaskingConfig(), 32)
    assert record["results"][0]["value"] == pytest.approx(np.exp(-found.sums[0] / found.counts[0]), rel=1e-5)
    rows = [len(document.tokens[start : start + 32]) for start in range(0, len(document.tokens), 32)]
    assert found.counts[0] == sum(round(0.25 * length) for length in rows if length >= 4) == record["detail"]["tokens"]
    again = score_masked(model, [document, document], MaskingConfig(), 32)  # the same masks beside any other document
    assert again.sums == pytest.approx(found.sums[[0, 0]], rel=1e-5)
    with pytest.raises(ValueError, match="nothing to score"):
        score_sentences(model, ByteTokenizer(), [("empty", "")])


def test_glue_scores_runs_and_takes_the_best_of_each_task(glue, tmp_path):
    values = SentenceConfig(**config("bert").model_dump(), outputs=2)
    runs, accuracies = [], []
    for seed, (task, name) in enumerate((("sst2", "SST-2"), ("sst2", "SST-2"), ("cola", "CoLA"))):
        model = build("sentence", values, seed).eval()
        path = save_model(tmp_path / f"{task}-{seed}", values, model.state_dict(), ByteTokenizer())
        file = path / "config.yaml"
        about = yaml.safe_load(file.read_text()) | {"data": {"source": str(glue / name), "task": task}}
        file.write_text(yaml.safe_dump(about))
        (path / "SHA256SUMS").unlink()
        runs.append(path)
        examples = read_dev(glue, TASKS[task])[task]
        with torch.no_grad():
            for text, label in zip(examples.texts, examples.labels, strict=True):
                tokens = torch.from_numpy(encode(ByteTokenizer(), text, 128))
                right = model(tokens[None], torch.tensor([0, len(tokens)], dtype=torch.int32)).argmax() == label
                accuracies.append(100.0 * right.item())
    done = run("glue", *runs, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    sst2 = [np.mean(accuracies[:4]), np.mean(accuracies[4:8])]
    assert found["scores"]["sst2"] == max(sst2) and found["from"]["sst2"] == str(runs[int(np.argmax(sst2))])
    assert set(found["scores"]) == {"sst2", "cola"}
    assert found["average"] == pytest.approx(sum(found["scores"].values()) / 9)
    (record,) = read_evaluations(runs[0])
    assert {f"{one.task}.{one.metric}" for one in record.results} <= GlueEvaluator().measures()
    assert [item.score for item in record.results[0].items] == accuracies[:4]
    shown = run("glue", runs[0], runs[2], "--data", glue)
    assert shown.exit_code == 0 and "average of nine" in shown.output and shown.output.count("missing") == 7
    # The best runs of two pretrained models are those of none.
    file = runs[1] / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"init_from": "runs/other"}))
    found = json.loads(run("glue", *runs, "--json").output)["models"]
    (mine, other), name = found.values(), list(found)[1]
    assert set(mine["scores"]) == {"sst2", "cola"} and mine["scores"]["sst2"] == sst2[0]
    assert name.endswith("runs/other") and other["scores"] == {"sst2": sst2[1]}
    assert run("glue", *runs).output.count("average of nine") == 2
    before = len(read_evaluations(runs[0]))
    refused = run("glue", runs[0], tmp_path / "absent", tmp_path / "none", "--data", tmp_path / "nowhere")
    for part in ("absent: is not a run folder", "none: is not a run folder", "--data: "):
        assert refused.exit_code == 2 and refused.output.count(part) == 1, refused.output
    assert run("glue", runs[0], tmp_path / "absent").exit_code == 2
    for path, data, part in (
        (tmp_path / "without", None, "does not say which task"),
        (tmp_path / "moved", {"task": "sst2", "source": str(tmp_path / "gone")}, "gone"),
    ):
        shutil.copytree(runs[1], path)
        about = yaml.safe_load((path / "config.yaml").read_text())
        (path / "config.yaml").write_text(
            yaml.safe_dump({key: one for key, one in (about | {"data": data}).items() if one})
        )
        refused = run("glue", runs[0], path)
        assert refused.exit_code == 2 and part in refused.output, refused.output
    assert len(read_evaluations(runs[0])) == before  # nothing is scored before all runs are checked


def test_what_cannot_be_scored_is_refused_by_name(masked, glue, tmp_path):
    path, _ = masked
    values = SentenceConfig(**config().model_dump())
    other = save_model(tmp_path / "s", values, build("sentence", values).state_dict(), ByteTokenizer())
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "one.txt").write_text("two words\n")
    (tmp_path / "tiny.txt").write_text("a")
    for name, text in (("sst2", "sentence\tlabel\na\t1\n"), ("bad", "x\t1\t*\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dev.tsv").write_text(text)
    for arguments, words in (
        (("masked", path), "nothing to score"),
        (("masked", path, "--cola", glue / "SST-2"), "--cola: "),
        (("masked", path, "--cola", glue / "SST-2"), "is the folder of SST-2"),
        (("masked", path, "--cola", tmp_path / "sst2"), "is the folder of sst2"),
        (("masked", path, "--cola", tmp_path / "bad"), "--cola: dev.tsv has 1 damaged lines; fix the lines\n"),
        (("masked", path, "--cola", glue, "--longest", 1), "--longest: 1 leaves sentences of one label"),
        (("masked", path, "--sentences", tmp_path / "one.txt", "--longest", 1), "--longest: 1 skips every sentence"),
        (("masked", path, tmp_path / "tiny.txt"), "nothing to score"),
        (("masked", path, "--cola", tmp_path), "CoLA"),
        (("masked", path, "--sentences", tmp_path / "empty.txt"), "no line of text"),
        (("masked", path, "--sentences", tmp_path / "empty.txt", "--row", 8), "--row"),
        (("masked", other, "--cola", glue), "a model of sentences"),
        (("glue", path), "a masked language model"),
        (("glue", other), "objective: sentences"),
        (("glue", other, "--data", tmp_path / "nowhere"), "is not a folder"),
        (("text", path, tmp_path / "empty.txt"), "linnet evaluate masked"),
        (("masked", path, tmp_path / "nothing.txt"), "nothing.txt"),
    ):
        done = run(*arguments)
        assert done.exit_code != 0 and words in f"{done.output} {done.exception}", (arguments, done.output)
