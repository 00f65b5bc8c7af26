"""The last resort of an op under `torch.vmap`: where folding the model axis cannot express a call, once a model."""

import torch


def each(op, size: int, in_dims: tuple, args: tuple) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Runs `op` for every model and stacks the results: (outputs, out_dims) as a vmap rule returns them."""
    calls = [
        op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in range(size)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)
