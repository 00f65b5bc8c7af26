"""`objective: images` from start to end: what a run records, exact resume, and what does not change its result."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import SHORT_FORMS, ConfigError, override
from linnet.data.labelled import HeldOut
from linnet.papers.verbs.base import numbers, with_derived
from linnet.runs import latest_good
from linnet.runs.model import load_model
from linnet.train import TrainConfig, TrainingConfig, extend, read_training, train
from linnet.train.identity import digest_of, read_config
from linnet.train.loop import result_numbers
from linnet.train.objectives import in_steps
from linnet.train.objectives.labelled import sum_over_batches
from linnet.vision.train import ImageObjective, ImageTraining, image_problems

MODEL = {
    "d_model": 16,
    "layout": "attention+mlp x2",
    "options": {"attention": {"num_heads": 2, "rope": False}},
    "image_size": 8,
    "patch": 2,
    "channels": 1,
    "classes": 10,
    "position": "learned",
    "init_std": 0.25,
}
TINY = {
    "objective": "images",
    "data": {"source": ["digits"], "max_images": 300},
    "model": MODEL,
    "batch_size": 16,
    "steps": 12,
    "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.05},
    "run": {"device": "cpu", "log_every": 1},
}
EVERYTHING = {
    "model": MODEL | {"drop_path": 0.2, "dropout": 0.1},
    "augment": {"kind": "crop_flip", "padding": 1, "mixup": 0.4, "cutmix": 0.5, "smoothing": 0.1},
    "average": {"decay": 0.9},
}


def settings(**changes) -> TrainingConfig:
    run = TINY["run"] | changes.pop("run", {})
    return read_training(TINY | changes | {"run": run})


def losses(run) -> list[float]:
    return [row["loss"] for row in run.metrics() if "loss" in row]


@pytest.mark.parametrize("section", SHORT_FORMS)
def test_a_section_of_one_word_is_the_same_training_in_full(section):
    words = {"objective": "images", "model": "vit-8px", "data": "digits", "augment": "flip", "steps": 1}
    full = words | {section: {SHORT_FORMS[section]: words[section]}}
    assert read_training(words) == read_training(full)
    assert override(words, [f"{section}.x=1"])[section] == {SHORT_FORMS[section]: words[section], "x": 1}


def test_a_run_learns_and_records_images(cache, tmp_path):
    file = tmp_path / "digits.yaml"
    values = TINY | {"batch_size": 32, "epochs": 4, "augment": "none", "steps": None}
    file.write_text(json.dumps(values | {"optimizer": {"learning_rate": 2e-2}}))
    command = ["train", str(file), "--set", "data.max_images=600", "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, [*command, "--cache", str(cache)])
    assert done.exit_code == 0, done.output
    assert "75 steps of 32 images = 2,400 images" in done.output and "nats per image" in done.output
    assert "bits" not in done.output and "token" not in done.output.replace("16 tokens, 10 classes", "")
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.name != "cache")
    result = json.loads((folder / "result.json").read_text())
    assert numbers(result).keys() <= with_derived(result_numbers(settings()))
    assert result["images"] == 2400 and result["steps"] == 75 and result["unique_images"] == 600
    assert result["accuracy"] > 0.5 and "bits_per_byte" not in result and "tokens" not in result
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["images"] == 32 and rows[0]["images_per_second"] > 0 and not any("tokens" in row for row in rows)
    assert rows[-1]["validation_accuracy"] == result["accuracy"] and rows[-1]["validation_images"] == 297
    assert json.loads((folder / "classes.json").read_text()) == [str(number) for number in range(10)]
    again = CliRunner().invoke(app, [*command, "--cache", str(cache), "--json"])
    assert again.exit_code == 0 and json.loads(again.stdout)["accuracy"] == result["accuracy"]
    model, tokenizer = load_model(folder, kinds=None)
    assert tokenizer is None and model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_killed_run_goes_on_exactly(cache, tmp_path, stop_at):
    """With every source of randomness: crops, flips, MixUp, CutMix, dropout, drop path; and with the average."""
    whole = train(settings(**EVERYTHING), tmp_path / "whole", cache)
    at = int(torch.randint(2, 11, ()))

    with pytest.raises(KeyboardInterrupt):
        train(settings(**EVERYTHING), tmp_path / "stopped", cache, stop_at(at))
    resumed = train(settings(**EVERYTHING), tmp_path / "stopped", cache)
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 12, at
    expected, found = (latest_good(run.checkpoint_folder)[1] for run in (whole, resumed))
    for group in ("model", "average", "optimizer"):
        assert all(torch.equal(found[group][name], one) for name, one in expected[group].items()), (group, at)
    for key in ("loss", "accuracy", "raw_loss", "raw_accuracy"):
        assert whole.result()[key] == resumed.result()[key]
    assert losses(train(settings(**EVERYTHING | {"seed": 1}), tmp_path / "whole", cache)) != losses(whole)


def test_accumulation_changes_rounding_alone(cache, tmp_path):
    one, four = (train(settings(**EVERYTHING, accumulation=n, steps=5), tmp_path, cache) for n in (1, 4))
    assert one.path != four.path and losses(four) == pytest.approx(losses(one), rel=1e-6)


def test_loader_processes_change_no_batch(cache):
    read = []
    for workers in (0, 1, 4):
        config = settings(run={"workers": workers})
        batches = ImageObjective(config, ImageObjective.read(config, cache), torch.device("cpu")).batches()
        read.append([batches.batch(position) for position in (0, 1, 7, 8)])
        batches.close()
    for other in read[1:]:
        for (images, labels), (theirs, of_theirs) in zip(read[0], other, strict=True):
            assert torch.equal(images, theirs) and torch.equal(labels, of_theirs)


def test_epochs_are_steps_before_the_digest(cache, tmp_path):
    given = settings(steps=None, epochs=0.5)
    with pytest.raises(ValueError, match="epochs"):
        digest_of(given, None)
    resolved = in_steps(given, cache)
    assert (resolved.steps, resolved.epochs) == (10, None)  # 0.5 x 300 / 16, rounded up
    assert digest_of(resolved, None) == digest_of(settings(steps=10), None) != digest_of(settings(), None)
    with pytest.raises(ConfigError, match=r"steps \(12\) and epochs"):
        settings(epochs=2)


def test_digests_know_the_objective():
    assert isinstance(settings(), ImageTraining) and not isinstance(settings(), TrainConfig)
    first = settings()
    for changes in ({"augment": "flip"}, {"data": TINY["data"] | {"seed": 1}}, {"evaluate_images": 10}):
        assert digest_of(settings(**changes), None) != digest_of(first, None)
    assert digest_of(settings(run={"workers": 3}), None) == digest_of(first, None)
    assert read_training(first.model_dump(mode="json")) == first


def test_a_folder_is_found_read_and_extended(cache, tmp_path):
    constant = {"schedule": {"name": "constant", "warmup": 2.0}}
    run = train(settings(**constant, steps=4), tmp_path, cache)
    assert read_config(run) == settings(**constant, steps=4)
    longer = extend(run.path, cache, steps=6)
    assert losses(longer) == losses(train(settings(**constant, steps=6), tmp_path / "whole", cache))
    with pytest.raises(ConfigError, match="tokens"):
        extend(run.path, cache, tokens=1000)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": MODEL | {"classes": 9}}, ["model.classes: 9"]),
        ({"model": MODEL | {"image_size": 16, "channels": 3}}, ["model.image_size: 16", "model.channels: 3"]),
        ({"data": {"source": ["missing"]}}, ["data.source"]),
        ({"augment": {"kind": "crop_flip", "padding": 8}}, ["augment.padding: 8"]),
        ({"parallel": {"tp": 2}}, ["parallel.tp: 2"]),
        ({"parallel": {"sp": 2}, "data": {"source": ["missing"]}}, ["parallel.sp: 2", "data.source"]),
        ({"data": {"source": ["missing"]}, "steps": None, "epochs": 1, "parallel": {"tp": 2}}, ["data.source", "tp"]),
    ],
)
def test_problems_are_named_before_work(cache, tmp_path, changes, told):
    with pytest.raises(ConfigError) as caught:
        train(settings(**changes), tmp_path, cache)
    for text in told:
        assert any(text in line for line in caught.value.problems), caught.value
    assert not list(tmp_path.iterdir())


def test_what_contradicts_itself_is_told_before_images_are_prepared(tmp_path):
    data = {"size": 16, "convert": "rgb", "classes": ["a", "b"], "source": ["digits", "missing"]}
    with pytest.raises(ConfigError) as caught:
        train(settings(data=TINY["data"] | data), tmp_path / "runs", tmp_path / "cache")
    told = "\n".join(caught.value.problems)
    for line in (
        "but data.size is 16",
        "but data.convert is rgb",
        "but data.classes names 2",
        "data.source: 'missing'",
    ):
        assert line in told
    assert not list(tmp_path.rglob("images.bin"))


def test_mixing_in_the_first_batch_of_a_ramp_names_the_ramp():
    with pytest.raises(ConfigError, match=r"augment: the first batch of batch_ramp, batch_size / accumulation = 1 im"):
        settings(batch_size=16, accumulation=16, batch_ramp=0.5, augment={"mixup": 0.8})


def test_latents_are_not_to_be_resized_or_converted():
    """`data.size` and `data.convert` are refused for latents, so that no message may advise them."""
    model = SimpleNamespace(image_size=16, channels=3)
    for kind, fixes in (("images", ["data.size=16", "data.convert=rgb"]), ("latents", [])):
        data = SimpleNamespace(side=8, channels=4, metadata={"kind": kind})
        told = "\n".join(image_problems(model, data))
        assert "set model.image_size=8" in told and "set model.channels=4" in told
        assert [fix for fix in ("data.size=16", "data.convert=rgb") if fix in told] == fixes


def test_wrong_keys_are_named_with_their_place():
    with pytest.raises(ConfigError) as caught:
        settings(seq_len=3, device="cpu", augment={"kind": "crop_flip", "mixup": 0.5}, batch_size=15)
    lines = "\n".join(caught.value.problems)
    assert "seq_len: unknown" in lines and "write it as `run.device`" in lines and "augment: batch_size: 15" in lines


def test_a_plan_of_devices_is_refused_by_name(tmp_path):
    file = tmp_path / "digits.yaml"
    file.write_text(json.dumps(TINY))
    done = CliRunner().invoke(app, ["train", str(file), "--plan"])
    assert done.exit_code == 2 and "--plan" in done.output and "objective: images" in done.output


def test_a_validation_reads_its_images_evenly(cache):
    split = ImageObjective.read(settings(), cache).validation
    batches = HeldOut(split, 4, split.spread(10))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([labels for _, labels in batches]), split.labels([n * 297 // 10 for n in range(10)]))
    assert sum(len(labels) for _, labels in HeldOut(split, 100)) == HeldOut(split, 100).size == 297


def test_scoring_is_told_in_images(cache):
    split, told = ImageObjective.read(settings(), cache).validation, []
    batches = HeldOut(split, 4, split.spread(10))

    def measure(images, labels):
        return torch.ones(1)

    total = sum_over_batches(
        torch.nn.Linear(1, 1), batches, batches.size, measure, nullcontext(), lambda *row: told.append(row)
    )
    assert told == [(0, 10), (3, 10), (6, 10)] and total.item() == 3
