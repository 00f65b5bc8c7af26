"""A matrix times a vector: against float64, in the interpreter here and compiled on a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from linnet.ops.matvec import linear

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
SHAPES = [(1, 1), (3, 17), (16, 256), (37, 300), (8, 1024), (5, 1025), (24, 2816)]  # rows and columns of the matrix


def check(count: int, width: int, dtype: torch.dtype, device: str) -> None:
    from linnet.ops.matvec.triton import matvec, supports

    generator = torch.Generator().manual_seed(count)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)  # noqa: E731
    # Rows lie inside poisoned ones: what the kernel must not read is NaN.
    rows = torch.full((3, width + 32), float("nan"), dtype=dtype, device=device)
    rows[1, 16 : 16 + width] = draw(width)
    x = rows[1:2, 16 : 16 + width]
    matrix = torch.full((count + 2, width), float("nan"), dtype=dtype, device=device)
    matrix[1:-1] = draw(count, width)
    weight, bias = matrix[1:-1], draw(count)
    for b in (None, bias):
        assert supports(x, weight, b)
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        found = matvec(x, weight, b)
        assert found.shape == (1, count) and found.dtype == dtype
        assert ((found.double() - expected).norm() / expected.norm()).item() <= TOLERANCE[dtype]
        assert matvec(x, weight, b).equal(found)


def test_on_a_cpu_it_is_a_linear_layer():
    x, weight, bias = torch.randn(1, 5), torch.randn(3, 5), torch.randn(3)
    assert linear(x, weight, bias).equal(F.linear(x, weight, bias))
    assert linear(x[None], weight).equal(F.linear(x[None], weight))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted():
    code = (
        "import torch\nfrom test_matvec import SHAPES, check\n"
        "for shape in SHAPES:\n    for dtype in (torch.float32, torch.bfloat16):\n        check(*shape, dtype, 'cpu')\n"
    )
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_compiled(dtype):
    for shape in [*SHAPES, (50_304, 1024), (4096, 4096)]:
        check(*shape, dtype, "cuda")
    x = torch.randn(1, 64, device="cuda", dtype=dtype)
    weight = torch.randn(48, 64, device="cuda", dtype=dtype, requires_grad=True)
    linear(x, weight).sum().backward()  # a gradient is asked for: the library's product
    assert weight.grad is not None
