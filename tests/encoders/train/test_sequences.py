"""Classifiers of sequences, from a task to its accuracies: learning, exact resume, best epoch, and what is refused."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.encoders.lra import prepare_lra
from linnet.encoders.models import SequenceClassifier
from linnet.encoders.train import SequenceObjective
from linnet.papers.verbs.base import numbers, with_derived
from linnet.runs import RunFolder, checkpoint, load_model
from linnet.train import read_training, train
from linnet.train.config import RunConfig
from linnet.train.loop import result_numbers

CPU = torch.device("cpu")
COUNTS = {"train": 48, "validation": 24, "test": 24}
LISTOPS = {"task": "listops", "size": "reduced", "samples": COUNTS}
MODEL = {
    "d_model": 16,
    "layout": "hgrn+swiglu",
    "options": {"swiglu": {"inner": 16}},
    "norm": "batchnorm",
    "positions": "sinusoidal",
    "init_std": 0.25,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def training(**changes):
    values = {"objective": "sequences", "data": LISTOPS, "model": MODEL, "batch_size": 8, "steps": 20}
    values |= {"optimizer": {"learning_rate": 1e-2}} | changes
    run = {"device": "cpu", "log_every": 1, "evaluate_every": 5, "checkpoint_every": 5, "keep_checkpoints": 9}
    run |= {key: values.pop(key) for key in RunConfig.model_fields if key in values}
    return read_training(values | {"run": run})


def losses(run):
    return [row["loss"] for row in run.metrics() if "loss" in row]


def test_a_training_resumes_exactly_and_reports_the_last_and_the_best_epoch(cache, tmp_path):
    config = training(model=MODEL | {"dropout": 0.1})
    assert (config.model.vocab_size, config.model.classes, config.model.head) == (18, 10, "linear")
    whole = train(config, tmp_path / "a", cache)
    result, rows = whole.result(), [row for row in whole.metrics() if "validation_accuracy" in row]
    assert numbers(result).keys() <= with_derived(result_numbers(config))
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    best = max(rows, key=lambda row: row["validation_accuracy"])
    assert (result["best_step"], result["best_test_accuracy"]) == (best["step"], best["test_accuracy"])
    assert (result["accuracy"], result["test_accuracy"]) == tuple(
        rows[-1][key] for key in ("validation_accuracy", "test_accuracy")
    )
    assert losses(whole)[-1] < losses(whole)[0] and result["unique_sequences"] == 48 and result["task"] == "listops"

    shutil.copytree(tmp_path / "a", tmp_path / "b")  # as if it was killed after step 10
    stopped = RunFolder.open(tmp_path / "b" / whole.path.name)
    for path in stopped.checkpoints():
        if checkpoint.step_of(path) > 10:
            shutil.rmtree(path)
    (stopped.path / "result.json").unlink()
    again = train(config, tmp_path / "b", cache)
    assert losses(again) == losses(whole) and len(losses(again)) == 20
    last = [checkpoint.load(run.checkpoints()[-1])[0]["model"] for run in (whole, again)]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    assert "backbone.norm.running_mean" in last[0]  # the running statistics too
    keys = ("best_step", "best_accuracy", "best_test_accuracy", "test_accuracy")
    assert all(again.result()[key] == result[key] for key in keys)

    output = CliRunner().invoke(app, ["evaluate", "lra", str(whole.path), "--cache", str(cache), "--json"])
    assert output.exit_code == 0, output.output
    row = json.loads(output.stdout)["table"]["hgrn"]
    assert row["last"] == {"listops": pytest.approx(100 * result["test_accuracy"])}
    assert row["best"] == {"listops": pytest.approx(100 * result["best_test_accuracy"])}
    assert row["average"] == pytest.approx(row["mean"] / 6)


def test_validation_scores_every_row_alone(cache):
    objective = SequenceObjective.prepare(training(), CPU, cache)
    model = objective.build(0)
    fields = objective.validate(model, contextlib.nullcontext())
    assert isinstance(model, SequenceClassifier) and model.training
    model.eval()
    for name, split in (("validation", objective.data.validation), ("test", objective.data.test)):
        logits = []
        for number in range(len(split)):
            inputs, lengths, _ = split.rows([number])
            logits.append(model(inputs, lengths)[0].detach())
        logits, labels = torch.stack(logits), torch.from_numpy(split.labels)
        assert fields[f"{name}_accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        assert fields[f"{name}_loss"] == pytest.approx(loss, rel=1e-5)


def test_selection_on_the_test_split_is_the_published_quirk(cache, tmp_path):
    run = train(training(data=LISTOPS | {"selection": "test"}, steps=5), tmp_path, cache)
    result = run.result()
    assert result["selection"] == "test" and result["test_accuracy"] == result["accuracy"]
    assert result["best_test_accuracy"] == result["best_accuracy"]


def test_pixels_are_trained_as_images_of_the_task(cache, tmp_path):
    data = {"task": "pathfinder", "size": "reduced", "samples": {"train": 8, "validation": 4, "test": 4}}
    config = training(data=data, model={**MODEL, "scan": "series", "positions": "none"}, steps=2, batch_size=4)
    assert (config.model.side, config.model.channels, config.model.classes, config.model.axes) == (16, 1, 2, 2)
    run = train(config, tmp_path, cache)
    assert run.result()["status"] == "done" and run.metrics()[-1]["sequences"] == 8
    model, _ = load_model(run.path, kinds=("sequence",))
    assert model.grid.sides == (16, 16)


def test_pairs_of_texts_are_trained_through_one_encoder(cache, tmp_path):
    folder = tmp_path / "aan"
    folder.mkdir()
    for split in ("train", "eval", "test"):
        lines = [f"{n % 2}.0\tA{n}\tB{n}\t{'abc' * (n + 1)}\t{'bca'[n % 3] * (9 - n)}" for n in range(8)]
        (folder / f"new_aan_pairs.{split}.tsv").write_text("\n".join(lines) + "\n")
    config = training(data={"task": "retrieval", "source": str(folder)}, steps=3, batch_size=4)
    assert (config.model.head, config.model.classes) == ("retrieval", 2)
    run = train(config, tmp_path / "runs", cache)
    assert run.result()["status"] == "done" and run.result()["unique_sequences"] == 8
    (folder / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(ConfigError, match=r"new_aan_pairs\.eval\.tsv"):
        train(training(data={"task": "retrieval", "source": str(folder)}, steps=4), tmp_path / "runs", cache)


def test_what_does_not_fit_the_task_is_refused_by_name(cache, tmp_path):
    for model, told in (
        ({"vocab_size": 9}, "model.vocab_size: 9 is below the 18 tokens"),
        ({"classes": 3}, "model.classes: 3, but task listops needs 10"),
        ({"positions": "learned", "num_positions": 40}, "model.num_positions: 40 is below the longest sequence"),
        ({"side": 16}, "model.side: 16, but task listops has no pixels"),
        ({"head": "retrieval"}, "model.head: retrieval, but task listops needs linear"),
    ):
        with pytest.raises(ConfigError, match=told):
            train(training(model=MODEL | model), tmp_path, cache)
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"data\.task: .*'listop'"):
        training(data={"task": "listop"})
    with pytest.raises(ConfigError, match="data.*source: text is not generated"):
        training(data={"task": "text"})
    with pytest.raises(ConfigError, match=r"data\.source: .*nowhere"):
        train(training(data={"task": "text", "source": str(tmp_path / "nowhere")}), tmp_path, cache)


def test_an_average_of_six_counts_a_missing_task_as_0():
    from linnet.encoders.evaluate.lra import averages, table

    transformer = {"listops": 38.37, "text": 61.95, "retrieval": 80.69, "image": 40.57, "pathfinder": 65.26}
    average, mean = averages(transformer | {"path-x": None})
    assert f"{average:.2f}" == "47.81" and mean == pytest.approx(286.84 / 5)  # paper 002, Table 7
    with pytest.raises(ValueError, match="image-as-published"):
        averages({"image-as-published": 90.0})
    runs = [{"architecture": "a", "task": "image-as-published", "last": x, "best": x + 0.1} for x in (0.5, 0.7)]
    row = table(runs)["a"]
    assert row["last"] == {"image": pytest.approx(60.0)} and row["best"] == {"image": pytest.approx(70.0)}
    assert row["runs"] == {"image": 2} and row["average"] == pytest.approx(10.0)


def test_a_mean_over_runs_that_are_no_repetitions_is_told(tmp_path, capsys):
    from linnet.encoders.cli.verbs import show_lra

    records = {}
    for name, task, changes in (
        ("a", "image", {"seed": 0}),
        ("b", "image", {"seed": 1}),
        ("c", "image-as-published", {}),
        ("d", "listops", {}),
        ("e", "listops", {"model": {"d_model": 64}}),
    ):
        config = {"objective": "sequences", "data": {"task": task}, "model": {"d_model": 32}, "name": name} | changes
        path = tmp_path / name
        path.mkdir()
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        about = {"model": {"architecture": "hgrn"}, "asked": {"task": task}}
        records[path] = about | {"detail": {"accuracy": 0.5, "best_test_accuracy": 0.5}}
    show_lra(dict(list(records.items())[:2]), False)
    assert capsys.readouterr().err == ""
    show_lra(records, False)
    first, second = capsys.readouterr().err.splitlines()
    assert "hgrn, image: the mean is over runs that differ in data;" in first
    assert "hgrn, listops: the mean is over runs that differ in model;" in second


def test_published_images_are_augmented_in_training_only(tmp_path):
    arrays = {f"x_{part}": np.random.randint(0, 256, (20, 32, 32, 3), dtype=np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": np.arange(20) % 10 for part in ("train", "test")}
    np.savez(tmp_path / "cifar.npz", **arrays, **labels)
    data = {"task": "image-as-published", "source": str(tmp_path)}
    config = training(data=data, model=MODEL | {"norm": "layernorm"})
    corpus = prepare_lra(config.data, tmp_path / "cache")
    objective = SequenceObjective(config, corpus, CPU)
    batch = objective.batches().batch(3)
    changed = objective.augment(batch, 3)
    assert not torch.equal(changed[0], batch[0]) and torch.equal(changed[2], batch[2])
    parts = [objective.augment(objective.batches().batch(3, rank, 2), 3, rank, 2)[0] for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), changed[0])
    grey = training(data=data | {"task": "image"}, model=MODEL | {"norm": "layernorm"})
    plain = SequenceObjective(grey, prepare_lra(grey.data, tmp_path / "cache"), CPU)
    assert plain.augment(batch, 3) is batch
