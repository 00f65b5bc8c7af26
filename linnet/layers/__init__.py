"""Token mixers, channel mixers, positions and norms. Importing this package registers every layer by name."""

from linnet.layers import channels, mixers
from linnet.layers.base import (
    CHANNELS,
    MIXERS,
    Channel,
    LayerContext,
    Mixer,
    State,
    TensorSpec,
    load_plugin,
    register_channel,
    register_mixer,
)
from linnet.layers.short_conv import short_convolution_spec

__all__ = [
    "CHANNELS",
    "MIXERS",
    "Channel",
    "LayerContext",
    "Mixer",
    "State",
    "TensorSpec",
    "channels",
    "load_plugin",
    "mixers",
    "register_channel",
    "register_mixer",
    "short_convolution_spec",
]
