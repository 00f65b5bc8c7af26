"""The variant of Gated DeltaNet of the examples: the checks of every mixer, its floor, and what it learns."""

import sys
from pathlib import Path

import torch

from linnet.layers import LayerContext, load_plugin
from linnet.layers.base import find_mixer
from linnet.layers.check import check_mixer

SPEC = f"{Path(__file__).parents[2] / 'examples' / 'my_gdn.py'}:MyGdn"


def test_it_passes_the_checks_of_every_mixer():
    check_mixer(SPEC, {"num_heads": 2, "num_v_heads": 4}, d_model=16)


def test_no_token_decays_below_the_floor():
    mixer_class = find_mixer(load_plugin(SPEC))
    assert len(Path(sys.modules[mixer_class.__module__].__file__).read_text().splitlines()) < 60
    layer = mixer_class(mixer_class.Config(num_heads=2, floor=-3.0), LayerContext(d_model=16))
    log_decay = layer.log_decay(1000 * torch.randn(2, 9, 16))
    assert log_decay.shape == (2, 9, 2) and log_decay.min() >= -3.0 and log_decay.min() < -2.9 and log_decay.max() <= 0
