"""The loads of experts: which share of the tokens of a test split each expert of each routed layer gets, with the
weights that a run is scored with."""

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from linnet.layers.routing import record_loads
from linnet.train.ensemble import Ensemble

Loads = dict[str, list[float]]  # a layer, by its place in the model -> the share of each of its experts


def is_routed(model: nn.Module) -> bool:
    return any(hasattr(module, "route") for module in model.modules())


@torch.no_grad()
def expert_loads(ensemble: Ensemble, model: nn.Module, tokens: Tensor, batch_size: int, precision: str) -> list[Loads]:
    """Runs each member once more, alone, and counts where its tokens go.

    Args:
        model: any of the members' shape. tokens: int64 [N, T], the same for all, or [M, N, T].

    Returns:
        for each member the share of all choices that each expert got; the shares of a layer sum to 1.
    """
    device = tokens.device
    model = copy.deepcopy(model).to(device)
    found = []
    for index in range(ensemble.size):
        model.load_state_dict(ensemble.member(index), strict=False)  # buffers are not trained
        rows = tokens if tokens.ndim == 2 else tokens[index]
        low = torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()
        with low, record_loads(model) as loads:
            for batch in rows.split(batch_size):
                model(batch)
        sizes = torch.tensor([len(batch) for batch in rows.split(batch_size)], device=device) / len(rows)
        found.append({_place(name): _mean(torch.stack(parts), sizes) for name, parts in loads.items()})
    return found


def _place(name: str) -> str:
    return name.removeprefix("backbone.blocks.").replace(".", " ")


def _mean(parts: Tensor, sizes: Tensor) -> list[Any]:
    return [round(share, 6) for share in (parts.double() * sizes[:, None].double()).sum(0).tolist()]
