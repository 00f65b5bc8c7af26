"""The objective `sentences`: a fine-tuning from a masked run, with exact resume and the metric of its task."""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError, read_yaml
from linnet.encoders.glue import pack_rows
from linnet.encoders.models import SentenceModel
from linnet.encoders.train import SentenceObjective
from linnet.layers import dropout
from linnet.models import family
from linnet.papers.verbs.base import numbers, with_derived
from linnet.runs import RunFolder, checkpoint
from linnet.runs.model import load_model
from linnet.train import train
from linnet.train.config import RunConfig
from linnet.train.identity import digest_of
from linnet.train.loop import result_numbers
from linnet.train.monitor import Guard
from linnet.train.objectives import in_steps, read_training
from linnet.train.preflight import preflight

pytest.importorskip("sklearn")
CPU = torch.device("cpu")
RUN = {"log_every": 1, "device": "cpu", "checkpoint_every": 10}


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    """SST-2 whose sentences are positive if they have an "a", CoLA alike, and STS-B with numbers."""
    folder, random = tmp_path_factory.mktemp("glue"), np.random.default_rng(0)
    words = ["bad", "bed", "bid", "bode", "cab", "cob", "dab", "deb", "fab", "fib"]
    for name in ("SST-2", "CoLA", "STS-B"):
        (folder / name).mkdir()
        for file, count in (("train.tsv", 96), ("dev.tsv", 40)):
            lines = {"SST-2": ["sentence\tlabel"], "STS-B": ["sentence1\tsentence2\tscore"], "CoLA": []}[name]
            for number in range(count):
                text = " ".join(random.choice(words, random.integers(1, 3)))
                label = int("a" in text)
                lines.append(
                    {"SST-2": f"{text}\t{label}", "STS-B": f"{text}\tcab {number}\t{5 * label}"}.get(
                        name, f"x\t{label}\t*\t{text}"
                    )
                )
            (folder / name / file).write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def start(text, cache, tmp_path_factory):
    """A masked run of a few steps."""
    model = family("lightnet-bert", "masked_lm")(16, 2, num_heads=2).model_dump()
    values = {"objective": "masked", "model": model, "data": {"source": [str(text)]}, "steps": 4, "batch_size": 4}
    config = read_training(values | {"seq_len": 32, "evaluate_tokens": 512, "run": RUN})
    return train(config, tmp_path_factory.mktemp("masked"), cache)


@pytest.fixture(scope="module")
def tuning(start, glue):
    def build(task="sst2", **changes):
        values = {"objective": "sentences", "data": {"source": str(glue), "task": task}, "batch_size": 8, "steps": 30}
        values |= {"init_from": str(start.path), "model": {"dropout": 0.1}, "optimizer": {"learning_rate": 1e-2}}
        values |= changes
        run = RUN | {key: values.pop(key) for key in RunConfig.model_fields if key in values}
        return read_training({key: value for key, value in values.items() if value is not None} | {"run": run})

    return build


def losses(run):
    return [row["loss"] for row in run.metrics() if "loss" in row]


def test_a_fine_tuning_starts_from_the_masked_weights_learns_and_resumes_exactly(tuning, start, cache, tmp_path):
    config = tuning()
    assert config.model.outputs == 2 and config.model.layout.startswith("tpe lightnet") and config.model.dropout == 0.1
    whole = train(config, tmp_path / "a", cache)
    result = whole.result()
    assert numbers(result).keys() <= with_derived(result_numbers(config))
    assert result["score"] > 80 and result["metric"] == "accuracy" and result["task"] == "sst2"
    assert whole.metrics()[-1]["sentences"] == 30 * 8
    model, tokenizer = load_model(whole.path, kinds=("sentence",))
    assert isinstance(model, SentenceModel) and tokenizer.name == "byte"

    shutil.copytree(tmp_path / "a", tmp_path / "b")  # as if it was killed after step 20
    stopped = RunFolder.open(tmp_path / "b" / whole.path.name)
    for path in stopped.checkpoints():
        if checkpoint.step_of(path) > 20:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    (stopped.path / "result.json").unlink()
    again = train(config, tmp_path / "b", cache)
    assert losses(again) == losses(whole) and len(losses(again)) == 30
    last = [checkpoint.load(run.checkpoints()[-1])[0]["model"] for run in (whole, again)]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])

    first = train(tuning(steps=1, optimizer={"learning_rate": 1e-30}), tmp_path / "c", cache)
    masked, own = (checkpoint.load(run.checkpoints()[-1])[0]["model"] for run in (start, first))
    assert set(own) - set(masked) == {"pooler.weight", "pooler.bias", "head.weight", "head.bias"}
    assert all(torch.allclose(masked[name], own[name], atol=1e-6) for name in masked)
    # Fine-tuning goes on from a fine-tuned model too, with a new head.
    train(tuning("stsb", init_from=str(whole.path), steps=1), tmp_path / "d", cache)


def test_a_batch_of_certain_and_wrong_sentences_does_not_end_the_training(tuning):
    """Its mean loss is far above the median of a late epoch; only a loss that is not finite counts as bad."""
    for spike, good in ((None, True), (3.0, False)):
        config = tuning() if spike is None else tuning(guard={"spike": spike})
        guard = Guard(config.guard)
        assert all(guard.watch(0.1, 1.0, position) is None for position in range(64))
        assert (guard.watch(1.3, 1.0, 64) is None) is good
        assert guard.watch(float("nan"), 1.0, 65).kind == "non-finite"


def test_gradients_and_dropout_are_the_same_in_parts(tuning, cache):
    objective = SentenceObjective.prepare(tuning(), CPU, cache)
    model, batch, found = objective.build(0), objective.batches().batch(3), []
    loss = objective.loss(model)
    for parts in (1, 3):
        model.zero_grad()
        row = 0
        for part in zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True):
            with dropout.position(model, step=3, first_row=row, row_length=objective.row_length):
                total, count = loss(*part)
            row += len(part[0])
            assert count == objective.count(*part) == len(part[0])
            (total / objective.count(*batch)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("task, metric", [("sst2", "accuracy"), ("cola", "matthews"), ("stsb", "pearson")])
def test_validation_scores_the_dev_sentences_one_by_one(tuning, cache, task, metric):
    objective = SentenceObjective.prepare(tuning(task), CPU, cache)
    model = objective.build(0).eval()
    found = objective.validate(model, contextlib.nullcontext())
    dev = objective.dev[task]
    outputs = []
    with torch.no_grad():
        for number in range(len(dev)):
            tokens, lengths, _ = dev.rows(np.array([number]))
            outputs.append(model(*pack_rows(tokens, lengths))[0])
    outputs, labels = torch.stack(outputs), torch.from_numpy(dev.labels)
    if task == "stsb":
        expected = (outputs[:, 0] - labels).square().mean()
        score = 100 * np.corrcoef(outputs[:, 0], labels)[0, 1]
    else:
        expected = F.cross_entropy(outputs, labels)
        score = 100 * (outputs.argmax(1) == labels).float().mean() if task == "sst2" else found["validation_score"]
    assert found["validation_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert found["validation_score"] == pytest.approx(float(score), abs=1e-2) and objective.task.metric == metric


def test_bad_starts_tasks_and_data_are_refused_before_work(tuning, text, glue, cache, tmp_path):
    values = {"model": family("tnl")(16, 2, num_heads=2).model_dump(), "data": {"source": [str(text)]}, "seq_len": 32}
    values |= {"batch_size": 4, "steps": 1, "evaluate_tokens": 512, "run": RUN}
    text_run = train(read_training(values), tmp_path / "text", cache)
    for changes, words in (
        ({"init_from": None, "model": {"recipe": "bert-4x128"}}, "name a run of `objective: masked`"),
        ({"init_from": str(text_run.path)}, "contains a causal language model, but a fine-tuning starts from a masked"),
        ({"init_from": str(tmp_path / "nowhere")}, "is not a run folder"),
        ({"model": {"outputs": 3}}, "outputs: 3, but task sst2 needs 2"),
        ({"data": {"source": str(glue), "task": "sst"}}, "task"),
    ):
        with pytest.raises(ConfigError, match=words):
            tuning(**changes)
    (tmp_path / "empty").mkdir()
    for changes, words in (
        ({"data": {"source": str(tmp_path / "empty"), "task": "sst2"}}, "data.source: .*has no files of task sst2"),
        ({"task": "rte"}, "needs RTE/dev.tsv"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(tuning(**changes), tmp_path / "runs", cache)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("vocabulary", ["many", {"tokens": [0] * 10**6, "model": "\x1b]0;title"}])
def test_a_forged_vocabulary_of_the_start_is_refused_in_a_line(tuning, cache, vocabulary):
    [line] = preflight(tuning(), cache).objective.start_problems({"vocabulary": vocabulary}, Path("start"))
    assert line.startswith("the vocabulary differs: start has ") and len(line) < 1000 and "\x1b" not in line


def test_training_from_new_weights_needs_a_tokenizer_alone(tuning, glue, cache, tmp_path):
    data = {"source": str(glue), "task": "sst2", "tokenizer": "byte"}
    config = tuning(init_from=None, data=data, model={"recipe": "bert-4x128"}, steps=1)
    assert config.model.vocab_size == 256 and config.model.outputs == 2
    assert digest_of(config, None) != digest_of(tuning(steps=1), None)
    result = train(config, tmp_path, cache).result()
    assert 0 <= result["score"] <= 100


def test_the_shipped_file_is_read_with_a_run_to_start_from(start, glue, cache):
    values = read_yaml(Path(__file__).parents[3] / "configs" / "sst2.yaml")
    with pytest.raises(ConfigError, match="name a run of `objective: masked`"):
        read_training(values)
    config = read_training(values | {"init_from": str(start.path), "data": {"source": str(glue), "task": "sst2"}})
    assert config.model.layout.startswith("tpe lightnet") and config.model.dropout == 0.1
    assert in_steps(config, cache).total_steps == 5 * 96 // 16
