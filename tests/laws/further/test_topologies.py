"""The layouts of table D.1: 12 blocks of each kind, which parse."""

import pytest

from linnet.laws.further import TOPOLOGIES
from linnet.models import ModelConfig


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_twelve_of_each(name):
    aliases = {"H": "hyena+swiglu", "A": "attention+swiglu"}
    config = ModelConfig(d_model=32, vocab_size=256, layout=TOPOLOGIES[name], aliases=aliases)
    mixers = [block.mixer for block in config.blocks]
    assert len(mixers) == 24 and mixers.count("hyena") == mixers.count("attention") == 12
