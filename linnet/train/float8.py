"""Linear layers whose three products are made in float8 by torchao: `precision: float8`.

Weights, names, checkpoints and optimizer are those of bfloat16, and everything outside these layers runs under the same
autocast. torchao casts the input, the weight and the gradient of the output to float8 (Micikevicius et al. 2022,
arXiv:2209.05433) at each use, each with one scale for the whole tensor, from its largest element.
"""

import contextlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from linnet.install import install_command
from linnet.layers.routing import Routed
from linnet.models.costs import meta_model
from linnet.models.stack import StackConfig
from linnet.runs.model import full_precision
from linnet.train.config import FLOAT8_MULTIPLE

LEAST = 1024  # width from which a product in float8 can save more than the casts cost; below it are gates and ranks
CAPABILITY = (8, 9)  # of the first NVIDIA GPUs with products in float8

Layers = dict[str, nn.Linear]


def linear_layers(model: nn.Module) -> tuple[Layers, Layers]:
    """Returns the linear layers of a model's blocks by name: those for float8, and those that stay in bfloat16.

    A layer is for float8 if both of its widths are at least `LEAST` and multiples of 16. Layers with experts (their
    routers, and matrices that they index) and weights that a layer keeps in float32 stay out.
    """
    blocks = model.backbone.blocks
    kept = {name.removesuffix(".weight") for name in full_precision(blocks)}
    experts = tuple(f"{name}." for name, module in blocks.named_modules() if isinstance(module, Routed))
    chosen: Layers = {}
    others: Layers = {}
    for name, layer in blocks.named_modules():
        if isinstance(layer, nn.Linear):
            widths = layer.in_features, layer.out_features
            fits = all(width >= LEAST and width % FLOAT8_MULTIPLE == 0 for width in widths)
            fits = fits and type(layer) is nn.Linear and name not in kept and not name.startswith(experts)
            (chosen if fits else others)[name] = layer
    return chosen, others


def convert(model: nn.Module, emulate: bool = False) -> None:
    """Lets the layers of `linear_layers` multiply in float8. Call it before recomputation, compilation and sharding.

    Args:
        emulate: whether to compute with the rounded numbers in float32, for tests on a device without float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = set(linear_layers(model)[0].values())
    settings = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(
        model.backbone.blocks, module_filter_fn=lambda layer, _: layer in chosen, config=settings
    )


@contextlib.contextmanager
def in_bfloat16(model: nn.Module) -> Iterator[None]:
    """Lets all layers multiply as `nn.Linear` for a while: to score held-out data as later commands do, which is also
    faster without a compiler."""
    layers = [(layer, type(layer)) for layer in model.modules() if type(layer).__name__ == "Float8Linear"]
    for layer, _ in layers:
        layer.__class__ = nn.Linear
    try:
        yield
    finally:
        for layer, kind in layers:
            layer.__class__ = kind


def model_problems(model: StackConfig) -> list[str]:
    """Returns why a model has no use for float8, without a device."""
    if _layers(model)[0]:
        return []
    return [
        f"precision: float8 is for linear layers of blocks with both widths at least {LEAST:,} and multiples of "
        f"{FLOAT8_MULTIPLE}, and this model has none (d_model {model.d_model}); use precision: bfloat16"
    ]


def problems(model: StackConfig, device: torch.device) -> list[str]:
    """Returns why a training in float8 cannot run on a device, each with its fix."""
    reasons = model_problems(model)
    nvidia = device.type == "cuda" and torch.version.hip is None
    if not nvidia or torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        least = ".".join(map(str, CAPABILITY))
        reasons.append(
            f"precision: float8 needs an NVIDIA GPU of compute capability {least} or above, and the device is {name}; "
            "use precision: bfloat16"
        )
    if importlib.util.find_spec("torchao") is None:
        fix = install_command("float8")
        reasons.append(f"precision: float8 needs torchao, which is not installed; install it: {fix}, or use bfloat16")
    return reasons


def summary(model: StackConfig, compiled: bool) -> tuple[str, bool]:
    """Returns a sentence about the layers in float8 and in bfloat16, and whether it is a warning."""
    chosen, others = _layers(model)
    text = f"float8: {len(chosen)} linear layers; " + (f"in bfloat16: {', '.join(others)}" if others else "all")
    if compiled:
        return text, False
    return f"{text}; its casts are slow without a compiler: set run.compile=true", True


def _layers(model: StackConfig) -> tuple[list[str], list[str]]:
    """Returns the names of the layers in float8, and those in bfloat16 grouped over blocks, with number and widths."""
    chosen, others = linear_layers(meta_model(model.model_dump_json()))
    groups = Counter(
        (re.sub(r"^\d+\.", "", name), layer.in_features, layer.out_features) for name, layer in others.items()
    )
    return list(chosen), [f"{count} x {name} ({read} to {made})" for (name, read, made), count in groups.items()]
