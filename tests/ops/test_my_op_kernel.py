"""The Triton kernel of examples/my_op.py against its chunked form, in Triton's interpreter or on a GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from linnet.layers import load_plugin
from linnet.layers.base import find_mixer

CASES = [None, [0, 3, 3, 5]]


def check(boundaries: list[int] | None, device: str) -> None:
    spec = f"{Path(__file__).parents[2]}/examples/my_op.py:DeltaMixer"
    example = sys.modules[find_mixer(load_plugin(spec)).__module__]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, size, device=device) for size in (3, 3, 33))
    k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, 5, 2, device=device)
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32, device=device)
    state = torch.randn(1 if boundaries is None else 3, 2, 3, 33, device=device)
    found = example.run_kernel(q, k, v, beta, state.clone(), cu_seqlens, 0.5)
    arguments = [x.double() for x in (q, k, v, beta, state)]
    for x, expected in zip(found, example.forward(*arguments, cu_seqlens, 0.5), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("boundaries", CASES)
def test_the_kernel_computes_the_chunked_form(boundaries):
    check(boundaries, "cuda")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel itself is tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(CASES)


if __name__ == "__main__":
    for boundaries in CASES:
        check(boundaries, "cpu")
        print(boundaries, "agrees")
