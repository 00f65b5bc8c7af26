"""The Triton form of the modal convolution against float64: on a GPU, and small shapes in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, poison, widen

from linnet.ops import debug, modal_convolution, use_backend
from linnet.ops.modal import chunked

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
INF = float("inf")


def make(B, T, D, E, *, state=True, offsets=None, decay="mixed", dtype=torch.float32, device="cuda"):
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, to)

    N, wide = B if offsets is None else len(offsets) - 1, torch.promote_types(dtype, torch.float32)
    rates = -normal(D, E, to=torch.float64).exp() / 5
    if decay == "slow":
        rates *= 1e-3
    elif decay == "fast":
        rates = rates * 0 - 30
    elif decay == "extreme":
        options = torch.tensor([-INF, -30.0, -1e-6, 0.0, -1.0], dtype=torch.float64)
        rates = options[torch.randint(5, (D, E), generator=generator)].to(device)
    states = [normal(N, D, E, to=wide) if state else None for _ in range(2)]
    cuts = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    x, weight, dy = normal(B, T, D), normal(D, E, to=wide), normal(B, T, D)
    return (x, rates.to(wide), weight, states[0], cuts), (dy, states[1])


def assert_agrees(*call, tolerance=None, **options):
    """y, the final state and the gradients of x, log_decay, weight and the initial state."""
    from linnet.ops.modal.triton import modal_backward, modal_forward

    inputs, gradients = make(*call, **options)
    exact = widen(inputs)
    expected = [*chunked.modal_forward(*exact), *chunked.modal_backward(*exact, *widen(gradients))]
    poison(expected, inputs[0].dtype)
    has_kernels = inputs[0].dtype != torch.float64 and inputs[1].shape[1] <= 64
    with launching("modal." if has_kernels else None):
        found = [*modal_forward(*inputs), *modal_backward(*inputs, *gradients)]
    assert_near(found, expected, tolerance or TOLERANCE[inputs[0].dtype])


@gpu
@pytest.mark.parametrize("D, E", [(1, 1), (3, 5), (64, 16), (100, 36), (32, 64), (8, 65)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_widths(D, E, dtype):
    assert_agrees(2, 333, D, E, dtype=dtype)


@gpu
@pytest.mark.parametrize("decay", ["slow", "mixed", "fast", "extreme"])
@pytest.mark.parametrize("T", [1, 7, 8, 65, 1024, 4097])
def test_lengths(T, decay):
    assert_agrees(1, T, 64, 16, decay=decay)
    assert_agrees(3, T, 32, 64, decay=decay, state=False, dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("offsets", [[0, 2100], [0, 0, 1, 64, 65, 700, 2100, 2100], [0, 128, 2099, 2100]])
def test_documents(offsets, state):
    assert_agrees(1, 2100, 40, 16, offsets=offsets, state=state)


@gpu
@pytest.mark.parametrize("segments", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("offsets", [None, [0, 0, 130, 1500, 2100]])
def test_segments(segments, offsets, monkeypatch):
    from linnet.ops.modal import triton

    monkeypatch.setattr(triton, "count_segments", lambda *_: segments)
    # A decay near 1 is off by a unit of float32, 2^-24, or so, which counts once a token of a segment.
    tolerance = 2100 * 2.0**-24
    assert_agrees(1, 2100, 40, 36, offsets=offsets, decay="slow", tolerance=tolerance)
    assert_agrees(1, 2100, 40, 16, offsets=offsets, decay="extreme", tolerance=tolerance)
    assert_agrees(1, 2100, 40, 16, offsets=offsets)


@gpu
def test_long_sequence():
    assert_agrees(1, 65_536, 32, 16)


@gpu
def test_float64_is_chunked():
    assert_agrees(1, 100, 7, 3, dtype=torch.float64)


@gpu
def test_more_documents_than_an_axis_of_a_grid_takes():
    assert_agrees(1, 70_000, 3, 2, offsets=range(70_001))


@gpu
def test_through_autograd_and_compile():
    (x, rates, weight, state, _), _ = make(2, 700, 64, 16, dtype=torch.bfloat16)
    leaves = [y.requires_grad_() for y in (x, rates, weight, state)]

    def run():
        return modal_convolution(x, rates, weight, initial_state=state, output_final_state=True)

    def everything(form):
        y, final = form()
        return [y, final, *torch.autograd.grad(y.float().sum() + final.square().sum(), leaves)]

    plain, again = everything(run), everything(run)
    with use_backend("chunked"):
        expected = everything(run)
    for a, b, c, e in zip(plain, again, everything(torch.compile(run, fullgraph=True)), expected, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)  # deterministic, compiled or not
        assert (a.double() - e.double()).norm() <= 5e-3 * e.double().norm()


@gpu
def test_strided_inputs():
    (x, rates, weight, *_), _ = make(2, 100, 64, 16)
    expected, _ = modal_convolution(x, rates, weight)
    x, _ = torch.stack([x, x], 2).unbind(2)
    rates, weight = torch.stack([rates, weight], 2).unbind(2)
    assert torch.equal(modal_convolution(x, rates, weight)[0], expected)


@gpu
def test_debug_looks_at_offsets():
    (x, rates, weight, *_), _ = make(1, 37, 16, 4)
    cuts = torch.tensor([0, 20, 10, 37], dtype=torch.int32, device="cuda")
    with debug(), pytest.raises(ValueError, match="cu_seqlens"):
        modal_convolution(x, rates, weight, cu_seqlens=cuts)


INTERPRETED = [
    ((2, 9, 3, 5), {"decay": "extreme"}, 1),
    ((1, 6, 33, 4), {"state": False}, 1),
    ((1, 18, 3, 36), {"dtype": "float16"}, 3),
    ((1, 20, 3, 5), {"offsets": [0, 0, 1, 18, 18, 20], "decay": "extreme"}, 2),
]


def use_small_units(monkeypatch):
    """A quarter of the tokens in a segment's unit, and read ahead, so that few tokens fill some."""
    from linnet.ops.modal import triton

    def vectors(*call, vectors=triton.Call._vectors):
        count, ahead = vectors(*call)
        return count, ahead // 4

    monkeypatch.setattr(triton, "UNIT", type(triton.UNIT)(triton.UNIT.value // 4))
    monkeypatch.setattr(triton.Call, "_vectors", vectors)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED)


if __name__ == "__main__":
    for call, options, segments in INTERPRETED:
        options = options | {"dtype": getattr(torch, options.get("dtype", "float32")), "device": "cpu"}
        with pytest.MonkeyPatch.context() as monkeypatch:
            use_small_units(monkeypatch)
            monkeypatch.setattr("linnet.ops.modal.triton.count_segments", lambda *_, segments=segments: segments)
            assert_agrees(*call, **options)
        print(*call, "agrees")
