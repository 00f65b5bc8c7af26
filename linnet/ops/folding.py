"""How an op obeys `torch.vmap`: the axis of models is folded into an axis the op already has, and the op runs once."""

from torch import Tensor


def fold(x: Tensor | None, dim: int | None, size: int, axis: int) -> Tensor | None:
    """Merges the model axis of x into the axis that is `axis` for one model; the models come first in the merged axis.

    Args:
        x: a batched argument, or None.
        dim: where its model axis is; None when all models share it.
        size: number of models.
        axis: for one model, the axis to merge into (0 for the batch; 2 for the heads of [B, T, H, D]).
    """
    if x is None:
        return None
    x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:]) if dim is None else x.movedim(dim, axis)
    return x.flatten(axis, axis + 1)


def unfold(x: Tensor, size: int, axis: int) -> Tensor:
    """The inverse of `fold` for a result: splits the merged axis, leaving the model axis at `axis` (its out-dim)."""
    return x.unflatten(axis, (size, x.shape[axis] // size))
