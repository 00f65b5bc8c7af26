"""The training files of configs/: each can be read, and those of ImageNet have the learning rates that were used."""

import re
import shlex
from pathlib import Path

import pytest

from linnet.config import override, read_yaml
from linnet.train import read_training
from linnet.train.objectives import find_objective
from linnet.train.optimizer import length, warning

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TRAININGS = {file.stem: values for file in FILES if "model" in (values := read_yaml(file)) and "runs" not in values}
TRAININGS = {name: values for name, values in TRAININGS.items() if "architectures" not in values}
del TRAININGS["sst2"]  # needs a run to start from: tests/encoders/train/test_sentences.py
FOLDERS = [name for name in TRAININGS if str(TRAININGS[name]["data"].get("source", "")).startswith("lra/")]
LRA = {name: TRAININGS[name] for name in TRAININGS if name.startswith("lra-") and "reduced" not in name}
for _name in FOLDERS:  # need published folders, whose symbols a model must know
    del TRAININGS[_name]
IMAGENET = 1_281_167
# Peak and last learning rate, epochs of warm-up, batch size.
PAPERS = {
    "deit-imagenet": (1e-3, 1e-5, 5, 1024),
    "lightnet-vit-imagenet": (2e-3, 1e-5, 20, 2048),
    "hgrn2-vit-imagenet": (1.5e-3, 1e-5, 20, 1024),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_the_file_is_read_and_its_model_counted(name):
    config = read_training(TRAININGS[name], name)
    assert find_objective(config).count_costs(config).parameters > 0
    assert read_training(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", PAPERS)
def test_imagenet_has_the_rates_after_scaling(name):
    peak, last, warmup, batch = PAPERS[name]
    config = read_training(TRAININGS[name])
    assert (config.batch_size, config.epochs, config.optimizer.learning_rate) == (batch, 300, peak)
    assert config.optimizer.learning_rate * config.schedule.final == pytest.approx(last, rel=1e-3)
    steps = -(-300 * IMAGENET // batch)
    assert length(config.schedule.warmup, steps) * batch / IMAGENET == pytest.approx(warmup, rel=1e-3)
    assert config.augment.kind == "deit" and config.model.image_size == config.data.size == 224


def test_wikitext_103_has_the_published_schedule():
    config = read_training(TRAININGS["wikitext-103"])
    assert config.data.validation == ["wikitext-103=wikitext-103-raw:valid"] and config.model.dropout == 0.1
    assert config.batch_size * config.seq_len == 65_536 and config.steps == 50_000
    assert config.optimizer.learning_rate * config.schedule.start == pytest.approx(1e-7)
    assert find_objective(config).count_costs(config).parameters == pytest.approx(44.66e6, rel=1e-3)


def test_the_small_files_are_there():
    assert {"digits", "cifar10", *PAPERS} <= TRAININGS.keys()


# Paper 002's scripts: batch size, learning rate, steps, warm-up, length of the cosine, expansion, width and layers.
SCRIPTS = {
    "lra-listops": (128, 5e-4, 37_500, 5_000, 50_000, 4, 64, 5),
    "lra-text": (64, 5e-3, 15_600, 10_000, 50_000, 8, 128, 4),
    "lra-text-as-published": (64, 5e-3, 15_600, 10_000, 50_000, 8, 128, 4),
    "lra-retrieval": (128, 5e-3, 22_980, 312, 50_000, 2, 256, 2),
    "lra-image": (64, 3e-3, 52_725, 30_000, 50_000, 2, 512, 6),
    "lra-image-as-published": (64, 3e-3, 52_725, 30_000, 50_000, 2, 512, 6),
    "lra-pathfinder": (128, 2e-3, 125_000, 50_000, 500_000, 2, 128, 6),
    "lra-path-x": (256, 7.5e-4, 125_000, 150_000, 500_000, 1, 32, 6),
}


# S4's recipe: batch size, learning rate, steps, warm-up, width, layers, norm and dropout.
RECIPES = {
    "lra-listops-s4": (32, 0.01, 120_000, 12_000, 256, 6, "batchnorm", 0.0),
    "lra-text-s4": (16, 0.01, 50_000, 5_000, 256, 6, "batchnorm", 0.0),
    "lra-retrieval-s4": (64, 0.01, 45_960, 5_000, 256, 6, "batchnorm", 0.0),
    "lra-image-s4": (50, 0.01, 180_000, 18_000, 512, 6, "batchnorm", 0.1),
    "lra-pathfinder-s4": (64, 0.004, 500_000, 50_000, 256, 6, "batchnorm", 0.0),
    "lra-path-x-s4": (16, 0.002, 500_000, 50_000, 256, 6, "batchnorm", 0.0),
}


def test_the_long_range_arena_has_the_settings_of_the_scripts_with_their_quirks():
    assert LRA.keys() == SCRIPTS.keys() | RECIPES.keys()
    for name, expected in SCRIPTS.items():
        config = read_training(LRA[name])
        schedule, model = config.schedule, config.model
        found = (config.batch_size, config.optimizer.learning_rate, config.steps, schedule.warmup, schedule.length)
        expansion = model.d_model // model.options["hgrn2"]["num_heads"]
        assert (*found, expansion, model.d_model, model.num_layers) == expected, name
        told = warning(schedule, config.total_steps)
        assert told and ("inside the warm-up" if name == "lra-path-x" else "cosine") in told, name


@pytest.mark.parametrize("name", RECIPES)
def test_each_task_has_a_file_of_the_recipe_of_s4(name):
    config = read_training(LRA[name])
    schedule, model = config.schedule, config.model
    found = (config.batch_size, config.optimizer.learning_rate, config.steps, schedule.warmup, model.d_model)
    assert (*found, model.num_layers, model.norm, model.dropout) == RECIPES[name]
    assert config.optimizer.weight_decay == 0.05 and config.data.task == name[4:-3]
    assert (warning(schedule, config.total_steps) is None) == (name != "lra-retrieval-s4")


def test_text_as_published_selects_its_epoch_on_the_test_split():
    published, ours = LRA["lra-text-as-published"], LRA["lra-text"]
    assert published["data"] == {**ours["data"], "selection": "test"}
    same = published.keys() - {"data", "name"}
    assert {key: published[key] for key in same} == {key: ours[key] for key in same}


def commands_of(name):
    """The commands in the comments of a file, as the arguments of --set."""
    text = (Path(__file__).parents[2] / "configs" / f"{name}.yaml").read_text()
    lines = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    for command in lines.replace("\\", "").split("linnet train ")[1:]:
        words = shlex.split(re.sub(r"(?<=\w)'s\b", "", command))
        yield [words[n + 1] for n, word in enumerate(words) if word == "--set" and "=" in words[n + 1]]


@pytest.mark.parametrize("name", sorted(name for name in SCRIPTS if "published" not in name))
def test_the_presets_in_the_comments_are_trainings(name):
    own, *presets = commands_of(name)
    (hgrn,) = (read_training(override(LRA[name], assignments)) for assignments in presets)
    assert hgrn.name == f"{name}-hgrn"
    assert hgrn.model.options["hgrn"]["complex"] and hgrn.model.norm == "batchnorm"
    repaired = read_training(override(LRA[name], [one for one in own if one.startswith("schedule.")]))
    assert warning(repaired.schedule, repaired.total_steps) is None
