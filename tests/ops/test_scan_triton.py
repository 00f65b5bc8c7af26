"""The Triton form of the diagonal recurrence against float64: on a GPU, and small shapes in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, poison, widen

from linnet.ops import debug, diagonal_scan, use_backend
from linnet.ops.scan import chunked

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
INF = float("inf")


def make(B, T, D, *, theta=False, state=True, offsets=None, decay="mixed", dtype=torch.float32, device="cuda"):
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, to)

    N, pair = B if offsets is None else len(offsets) - 1, (2,) if theta else ()
    rates = -normal(B, T, D, to=torch.float64).exp() / 3
    if decay == "slow":
        rates *= 1e-3
    elif decay == "extreme":
        options = torch.tensor([-INF, -30.0, -1e-6, 0.0, -1.0], dtype=torch.float64)
        rates = options[torch.randint(5, (B, T, D), generator=generator)].to(device)
    elif decay == "huge":
        rates = rates * 0 - 1e30
    wide = torch.promote_types(dtype, torch.float32)
    angles = normal(D, to=torch.float32) if theta else None
    states = [normal(N, D, *pair, to=wide) if state else None for _ in range(2)]
    cuts = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    x, dh = normal(B, T, D, *pair), normal(B, T, D, *pair)
    return (x, rates.to(dtype), angles, states[0], cuts), (dh, states[1])


def everything(form, inputs, gradients):
    """h, the final state and the gradients of x, log_decay, theta and the initial state."""
    h, final = form.scan_forward(*inputs)
    return [h, final, *form.scan_backward(*inputs, h, *gradients)]


def assert_agrees(*call, kernel="scan.", **options):
    from linnet.ops.scan import triton

    inputs, gradients = make(*call, **options)
    expected = everything(chunked, widen(inputs), widen(gradients))
    poison(expected, inputs[0].dtype)
    # Over thousands of tokens the errors of a float32 exponential and rotation, the same for each token, add up.
    tolerance = 1e-4 if options.get("decay") == "slow" and inputs[0].dtype == torch.float32 else None
    with launching(kernel):
        found = everything(triton, inputs, gradients)
    assert_near(found, expected, tolerance or TOLERANCE[inputs[0].dtype])


def set_tiles(monkeypatch, *tiles):
    from linnet.ops.scan import triton

    monkeypatch.setattr(triton, "_plan", triton._plan.__wrapped__)  # not the plans of before
    monkeypatch.setattr(triton, "choose_tiles", lambda *_: triton.Tiles(*tiles))


@gpu
@pytest.mark.parametrize("D", [1, 3, 64, 100, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_widths(D, dtype):
    assert_agrees(2, 333, D, dtype=dtype)


@gpu
@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("decay", ["slow", "mixed", "extreme", "huge"])
@pytest.mark.parametrize("T", [1, 63, 64, 129, 1024, 4097])
def test_lengths(T, decay, theta):
    assert_agrees(1, T, 128, decay=decay, theta=theta)
    assert_agrees(3, T, 64, decay=decay, theta=theta, state=False, dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("offsets", [[0, 2100], [0, 0, 1, 64, 65, 700, 2100, 2100], [0, 128, 2099, 2100]])
def test_documents(offsets, state, theta):
    assert_agrees(1, 2100, 96, offsets=offsets, state=state, theta=theta)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_documents_on_a_device_that_is_not_the_current_one():
    assert_agrees(1, 700, 96, offsets=[0, 0, 64, 700], device="cuda:1")


@gpu
@pytest.mark.parametrize("group", [1, 4, 8, 32, 64])
@pytest.mark.parametrize("rows, length, channels", [(4, 8, 128), (8, 8, 64), (8, 16, 64), (16, 8, 64)])
def test_tiles(rows, length, channels, group, monkeypatch):
    set_tiles(monkeypatch, rows, length, channels, group)
    assert_agrees(2, 5000, 256, decay="slow")
    assert_agrees(40, 1024, 512, decay="slow", dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize("theta", [False, True])
def test_long_sequence(theta):
    assert_agrees(1, 131_072, 128, decay="slow", theta=theta)


@gpu
def test_float64_is_chunked():
    assert_agrees(1, 100, 7, dtype=torch.float64, kernel=None)


@gpu
def test_a_reset_forgets_exactly():
    (x, rates, *_), _ = make(1, 3000, 64, decay="slow")
    x = x * 1e30
    rates[:, 1000] = -INF
    h, _ = diagonal_scan(x, rates)
    assert h.isfinite().all() and torch.equal(h[:, 1000], x[:, 1000])


@gpu
@pytest.mark.parametrize("theta", [False, True])
def test_through_autograd_and_compile(theta):
    (x, rates, angles, state, _), _ = make(2, 3000, 128, theta=theta, dtype=torch.bfloat16)
    leaves = [y.requires_grad_() for y in (x, rates, angles, state) if y is not None]

    def run():
        return diagonal_scan(x, rates, theta=angles, initial_state=state, output_final_state=True)

    def everything(form):
        h, final = form()
        return [h, final, *torch.autograd.grad(h.float().sum() + final.square().sum(), leaves)]

    plain, again = everything(run), everything(run)
    with use_backend("chunked"):
        expected = everything(run)
    for a, b, c, e in zip(plain, again, everything(torch.compile(run, fullgraph=True)), expected, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)  # deterministic, compiled or not
        assert (a.double() - e.double()).norm() <= 5e-3 * e.double().norm()


@gpu
def test_one_stream_does_not_wait_for_another():
    """Two scans at once, each larger than the GPU holds."""
    (x, rates, *_), _ = make(1, 60_000, 1024, dtype=torch.bfloat16)
    expected, _ = diagonal_scan(x, rates)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(diagonal_scan(x, rates)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(h, expected) for h in found)


@gpu
def test_strided_inputs():
    (x, rates, *_), _ = make(2, 100, 64)
    expected, _ = diagonal_scan(x, rates)
    x, rates = torch.stack([x, rates], 2).unbind(2)
    assert torch.equal(diagonal_scan(x, rates)[0], expected)


@gpu
def test_debug_looks_at_offsets():
    (x, rates, *_), _ = make(1, 37, 16)
    cuts = torch.tensor([0, 20, 10, 37], dtype=torch.int32, device="cuda")
    with debug(), pytest.raises(ValueError, match="cu_seqlens"):
        diagonal_scan(x, rates, cu_seqlens=cuts)


# The interpreter cuts bfloat16 off instead of rounding it.
INTERPRETED = [
    ((2, 10, 5), {"decay": "extreme"}, (2, 2, 16, 1)),
    ((1, 16, 16), {"state": False}, (2, 2, 16, 2)),
    ((2, 20, 3), {"dtype": "float16"}, (4, 2, 16, 8)),
    ((1, 10, 20), {"theta": True}, (2, 2, 16, 2)),
    ((1, 18, 5), {"offsets": [0, 0, 5, 6, 18, 18]}, (2, 2, 16, 4)),
    ((1, 10, 5), {"offsets": [0, 4, 10], "theta": True, "state": False}, (2, 2, 16, 1)),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED)


if __name__ == "__main__":
    for call, options, tiles in INTERPRETED:
        options = options | {"dtype": getattr(torch, options.get("dtype", "float32")), "device": "cpu"}
        with pytest.MonkeyPatch.context() as monkeypatch:
            set_tiles(monkeypatch, *tiles)
            assert_agrees(*call, **options)
        print(*call, "agrees")
