"""The training files of configs/: each can be read, and those of ImageNet have the learning rates that were used."""

from pathlib import Path

import pytest

from linnet.config import read_yaml
from linnet.train import read_training
from linnet.train.objectives import find_objective
from linnet.train.schedule import length

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TRAININGS = {file.stem: values for file in FILES if "model" in (values := read_yaml(file)) and "runs" not in values}
TRAININGS = {name: values for name, values in TRAININGS.items() if "architectures" not in values}
del TRAININGS["sst2"]  # needs a run to start from: tests/train/test_sentences.py
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


def test_the_small_files_are_there():
    assert {"digits", "cifar10", *PAPERS} <= TRAININGS.keys()
