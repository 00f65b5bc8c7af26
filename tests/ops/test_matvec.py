"""A matrix times one or a few rows: against float64, in the interpreter here and compiled on a GPU."""

import importlib.util

import pytest
import torch
from precision import assert_near, widen
from torch.nn import functional as F

from linnet.ops.matvec import DeferredNorm, gated_linear, linear, linears, make_counters

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
        expected = F.linear(*widen((x, weight, b)))
        found = matvec(x, weight, b)
        assert found.shape == (1, count) and found.dtype == dtype
        assert_near([found], [expected])
        assert matvec(x, weight, b, early=True).equal(found)
    if count % 2 == 0:
        gate, up = F.linear(*widen((x, weight))).chunk(2, 1)
        assert_near([matvec(x, weight, None, "silu")], [F.silu(gate) * up])
        assert_near([matvec(x, weight, None, "sigmoid", early=True)], [gate.sigmoid() * up])
    residual, gain, h = draw(1, width), draw(width), torch.empty(1, width, dtype=dtype, device=device)
    total = (x + residual).double()
    normed = total / (total.square().mean(1, keepdim=True) + 1e-6).sqrt()
    norm = DeferredNorm(x, residual, gain, h, 1e-6)
    assert_near([matvec(x, weight, bias, None, norm)], [F.linear(normed * gain, *widen((weight, bias)))])
    assert h.equal(x + residual)
    alone = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt()
    norm = DeferredNorm(x, None, None, None, 1e-6)
    assert_near([matvec(x, weight, None, None, norm, early=True)], [F.linear(alone, weight.double())])
    for activation in ("silu", "sigmoid"):
        total = x.double() * (F.silu if activation == "silu" else torch.sigmoid)(residual.double())
        normed = total / (total.square().mean(1, keepdim=True) + 1e-6).sqrt() * gain.double()
        norm = DeferredNorm(x, None, gain, None, 1e-6, residual, activation)
        assert_near([matvec(x, weight, bias, None, norm)], [F.linear(normed, *widen((weight, bias)))])


# Rows, sizes of the matrices, their width, an activation of a gated pair.
ROWS = [
    (64, [48, 48, 48, 16], 80, None),
    (3, [64], 288, None),
    (17, [96, 96], 272, "silu"),
    (5, [48, 48], 1024, "none"),
    (1, [16, 16], 16, "sigmoid"),
]
TILES = [None, (16, 64, 1, 2), (32, 64, 3, 3), (16, 128, 2, 2)]  # one, two and three parts of a sum
# All rows as tiles are chosen for them; three rows with all tiles; and tiles that matrices do not fill.
INTERPRETED = [*((case, None) for case in ROWS), *((ROWS[1], tile) for tile in TILES[1:]), (ROWS[0], TILES[2])]
INTERPRETED += [(ROWS[2], TILES[1]), (ROWS[3], TILES[3])]


def check_rows(rows, sizes, width, activation, tile, dtype, device) -> None:
    from linnet.ops.matvec.triton import few_rows, supports_rows

    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator).to(device, dtype)
    matrix = torch.full((sum(sizes) + 2, width), float("nan"), dtype=dtype, device=device)
    matrix[1:-1] = torch.randn(sum(sizes), width, generator=generator).to(device, dtype) / width**0.5
    weight, counters = matrix[1:-1], make_counters(torch.device(device))
    assert supports_rows(x, weight, sizes, activation)
    expected = [x.double() @ part.double().T for part in weight.split(sizes)]
    if activation is not None:
        act = {"none": lambda gate: gate, "silu": F.silu, "sigmoid": torch.sigmoid}[activation]
        expected = [act(expected[0]) * expected[1]]
    found = few_rows(x, weight, sizes, counters, activation, tile)
    again = few_rows(x, weight, sizes, counters, activation, tile)
    for ours, repeated, reference in zip(found, again, expected, strict=True):
        assert ours.shape == reference.shape and ours.is_contiguous() and ours.equal(repeated)
    assert_near(found, expected)
    assert not counters.any()  # ready for the next call
    if device == "cuda":  # a row does not depend on where it stands; for the interpreter's products it may
        for ours, turned in zip(found, few_rows(x.flip(0), weight, sizes, counters, activation, tile), strict=True):
            assert turned.flip(0).equal(ours)


def test_on_a_cpu_it_is_a_linear_layer():
    x, weight, bias = torch.randn(1, 5), torch.randn(3, 5), torch.randn(3)
    assert linear(x, weight, bias).equal(F.linear(x, weight, bias))
    assert linear(x[None], weight).equal(F.linear(x[None], weight))
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(10, 6, dtype=torch.float64)
    found = linears(x, weight, [7, 3])
    assert [part.shape for part in found] == [(4, 7), (4, 3)] and torch.cat(found, 1).equal(F.linear(x, weight))
    gate, up = F.linear(x, weight).split(5, -1)
    torch.testing.assert_close(gated_linear(x, weight, "silu"), F.silu(gate) * up)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_what_the_kernel_of_few_rows_does_not_take():
    from linnet.ops.matvec.triton import supports_rows

    x, weight = torch.zeros(4, 32, dtype=torch.float16), torch.zeros(64, 32, dtype=torch.float16)
    assert supports_rows(x, weight, [48, 16], None) and supports_rows(x, weight, [32, 32], "none")
    assert not supports_rows(x, weight, [16, 48], None) and not supports_rows(x, weight, [40, 24], None)
    assert not supports_rows(x, weight, [48, 16], "none") and not supports_rows(x, weight, [32, 32], "gelu")
    assert not supports_rows(x.float(), weight.float(), [64], None) and not supports_rows(x[:, ::2], weight, [64], None)
    assert not supports_rows(torch.zeros(65, 32, dtype=torch.float16), weight, [64], None)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted(interpreted):
    assert interpreted(__file__) == 2 * len(SHAPES) + len(INTERPRETED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled(dtype):
    for shape in [*SHAPES, (50_304, 1024), (4096, 4096)]:
        check(*shape, dtype, "cuda")
    x = torch.randn(1, 64, device="cuda", dtype=dtype)
    weight = torch.randn(48, 64, device="cuda", dtype=dtype, requires_grad=True)
    linear(x, weight).sum().backward()  # a gradient is asked for: the library's product
    assert weight.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_compiled(dtype):
    for case in ROWS:
        for tile in TILES:
            check_rows(*case, tile, dtype, "cuda")
    for case in ((64, [1024, 1024, 1024, 128], 1024, None), (64, [1024], 2816, None), (8, [2816, 2816], 1024, "none")):
        check_rows(*case, None, dtype, "cuda")
    weight, counters = torch.randn(96, 64, device="cuda", dtype=dtype) / 8, make_counters(torch.device("cuda"))
    for rows in (1, 2, 64, 65):
        x = torch.randn(rows, 64, device="cuda", dtype=dtype)
        with torch.no_grad():
            expected = F.linear(x.double(), weight.double())
            found = [
                linear(x, weight, None, counters),
                torch.cat(linears(x, weight, [64, 32], None, counters), 1),
                torch.cat(linears(x, weight, [32, 32, 32], None, counters), 1),
            ]
            for ours in found:
                torch.testing.assert_close(ours.double(), expected, rtol=1e-2, atol=1e-2)
            gate, up = expected.split(48, 1)
            ours = gated_linear(x, weight, "silu", counters).double()
            torch.testing.assert_close(ours, F.silu(gate) * up, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float16):  # to bfloat16 the interpreter cuts off instead of rounding
            check(*shape, dtype, "cpu")
            print(*shape, dtype, "agrees")
    for case, tile in INTERPRETED:
        check_rows(*case, tile, torch.float16, "cpu")
        print(*case, tile, "agrees")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.no_grad()
def test_products_of_a_graph_wait_for_each_other():
    weights = torch.randn(60, 512, 512, device="cuda", dtype=torch.bfloat16) / 512**0.5
    counters = [make_counters(weights.device) for _ in weights]
    for rows in (1, 16):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        expected = x
        for weight, ready in zip(weights, counters, strict=True):
            expected = linear(expected, weight, None, ready)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for weight, ready in zip(weights, counters, strict=True):
                y = linear(y, weight, None, ready)
        for _ in range(20):
            graph.replay()
            assert y.equal(expected)
