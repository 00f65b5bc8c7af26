"""How an op obeys `torch.vmap`: the axis of models is folded into an axis the op already has, and the op runs once."""

from collections.abc import Sequence

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


def fold_all(
    tensors: Sequence[Tensor | None], dims: Sequence[int | None], size: int, axes: Sequence[int | None]
) -> list[Tensor | None]:
    """`fold` of each tensor into its own axis; one whose axis is None stays. `axes` may go on beyond the tensors."""
    pairs = zip(tensors, dims, axes, strict=False)
    return [x if axis is None else fold(x, dim, size, axis) for x, dim, axis in pairs]


def unfold(x: Tensor, size: int, axis: int) -> Tensor:
    """The inverse of `fold` for a result: splits the merged axis, leaving the model axis at `axis` (its out-dim)."""
    return x.unflatten(axis, (size, x.shape[axis] // size))
