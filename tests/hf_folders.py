"""Checkpoint folders with random weights, for the tests of linnet.hf.convert."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Float32 weights: gains of norms near 1, matrices large enough that every part of a model shows in its logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * drawn if "norm" in name else drawn * (0.6 if len(shape) == 1 else shape[-1] ** -0.5)
    return tensors


def write_folder(path: Path, config: dict, tensors: dict[str, Tensor]) -> Path:
    """config.json and model.safetensors, as other projects leave them."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, path / "model.safetensors")
    return path


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the root mean square of what is expected."""
    return ((found - expected).abs().max() / expected.square().mean().sqrt()).item()
