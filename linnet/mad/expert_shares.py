"""How evenly the experts of routed layers are used: the share of the tokens' choices that each expert gets.

Shares are counted on the test split, with the weights that score the run. Results contain them under the key `loads`.
"""

import contextlib
import copy

import torch
from torch import Tensor, nn

from linnet.layers.routing import record_loads
from linnet.train.together.ensemble import Ensemble

Shares = dict[str, list[float]]  # path of a layer in the model -> the share of each of its experts


def is_routed(model: nn.Module) -> bool:
    """Returns whether a model has layers with experts."""
    return any(hasattr(module, "route") for module in model.modules())


@torch.no_grad()
def expert_shares(
    ensemble: Ensemble, model: nn.Module, tokens: Tensor, batch_size: int, precision: str
) -> list[Shares]:
    """Runs each member once more, separately, and counts the expert choices of its tokens.

    Args:
        model: a model with the shape of the members. tokens: int64 [N, T], shared by all, or [M, N, T].

    Returns:
        For each member the share of all choices per expert; the shares of a layer sum to 1.
    """
    device = tokens.device
    model = copy.deepcopy(model).to(device)
    found = []
    for index in range(ensemble.size):
        model.load_state_dict(ensemble.member(index), strict=False)  # buffers are not trained
        rows = tokens if tokens.ndim == 2 else tokens[index]
        low = torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()
        with low, record_loads(model) as recorded:
            for batch in rows.split(batch_size):
                model(batch)
        sizes = torch.tensor([len(batch) for batch in rows.split(batch_size)], device=device) / len(rows)
        found.append({_place(name): _mean(torch.stack(parts), sizes) for name, parts in recorded.items()})
    return found


def _place(name: str) -> str:
    return name.removeprefix("backbone.blocks.").replace(".", " ")


def _mean(parts: Tensor, sizes: Tensor) -> list[float]:
    return [round(share, 6) for share in (parts.double() * sizes[:, None].double()).sum(0).tolist()]
