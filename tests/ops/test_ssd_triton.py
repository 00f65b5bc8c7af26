"""The Triton form of scalar decay against float64: on a GPU, and small shapes in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, poison, widen

from linnet.ops.ssd import chunked

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# The largest log-decay per token; those of "resets" clear the state again and again.
DECAYS = {"slow": 1e-6, "mild": 0.3, "strong": 20.0, "extreme": 1e4, "resets": 0.01}


def make(
    B, T, K, V, *, H=1, group=2, decay="mild", state=True, offsets=None, factors=None, dtype=torch.bfloat16,
    device="cuda",
):  # fmt: skip
    """`factors`: "head" has times and a skip of all tokens, "token" times and a skip of each, "skip" the latter."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, to)

    N, HV = B if offsets is None else len(offsets) - 1, H * group
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, do = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V), normal(B, T, HV, V)
    states = [normal(N, HV, K, V, to=wide) if state else None for _ in range(2)]
    log_decay = -DECAYS[decay] * torch.rand(B, T, HV, generator=generator, dtype=torch.float64)
    if decay == "resets":
        log_decay[:, ::5] = -float("inf")
    cuts = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    times = torch.randn(B, T, HV, generator=generator, dtype=torch.float64).to(device, wide)
    times[:, ::7] = 0.0
    skip = normal(*((1, 1) if factors == "head" else (B, T)), HV, to=wide)
    weights = times if factors in ("head", "token") else None, skip if factors else None
    return (q, k, v, log_decay.to(device, wide), *weights, states[0], cuts, 0.7), (do, states[1])


def assert_agrees(*call, kernel="ssd.", within=None, **options):
    """o, the final state, dq, dk, dv, gradients of log-decays, factors and the initial state, if any."""
    from linnet.ops.ssd.triton import ssd_backward, ssd_forward

    inputs, gradients = make(*call, **options)
    exact = widen(inputs)
    expected = [*chunked.ssd_forward(*exact), *chunked.ssd_backward(*exact, *widen(gradients))]
    poison(expected, inputs[2].dtype)
    with launching(kernel):
        found = [*ssd_forward(*inputs), *ssd_backward(*inputs, *gradients)]
    expected = [x for x, y in zip(expected, found, strict=True) if y is not None]  # no state, and no gradient of one
    found = [x for x in found if x is not None]
    allowed = within or TOLERANCE[inputs[0].dtype]
    # A gradient of log-decays is a sum of terms of both signs, which strong decays leave nothing of.
    assert_near(found, expected, allowed, least=1e-2)


def assert_summaries_agree(B, T, K, V, *, dtype=torch.bfloat16, **options):
    """The state after a span, and the gradient of the one before it, without running the op."""
    from linnet.ops.ssd.triton import ssd_summary

    (q, k, v, log_decay, *_, scale), (do, _) = make(B, T, K, V, state=False, dtype=dtype, **options)
    found = [ssd_summary(q, k, log_decay, c, scale, reverse) for c, reverse in ((v, False), (do, True))]
    q, k, v, do, log_decay = widen((q, k, v, do, log_decay))
    expected = [
        chunked.ssd_summary(q, k, log_decay, c, scale, reverse) for c, reverse in ((v, False), (do, True))
    ]  # fmt: skip
    assert_near(found, expected, TOLERANCE[dtype])


def cut_in(segments, slices=None):
    """Replaces the choice of segments, and of slices of the value heads of a key."""
    from linnet.ops.ssd import triton

    triton._count_segments = lambda *_: segments
    if slices is not None:
        triton._count_slices = lambda *_: slices


@gpu
@pytest.mark.parametrize("K, V", [(16, 16), (32, 64), (64, 64), (128, 64), (64, 128), (128, 128), (24, 72), (96, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widths(K, V, dtype):
    assert_agrees(2, 333, K, V, group=4, dtype=dtype)


@gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 257, 1024, 4097])
def test_lengths(T, decay):
    assert_agrees(1, T, 128, 64, decay=decay, group=8)
    assert_agrees(3, T, 64, 64, H=2, decay=decay, group=1, state=False)


@gpu
@pytest.mark.parametrize("offsets", [[0, 700], [0, 0, 1, 64, 65, 700, 700], [0, 640, 700]])
def test_documents(offsets):
    assert_agrees(1, 700, 64, 64, H=2, offsets=offsets)


@gpu
@pytest.mark.parametrize("factors", ["head", "token", "skip"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offsets", [None, [0, 0, 130, 640, 700]])
def test_factors(factors, dtype, offsets):
    assert_agrees(1, 700, 128, 64, H=2, group=4, factors=factors, dtype=dtype, offsets=offsets)
    assert_agrees(1, 700, 24, 40, H=2, group=1, factors=factors, dtype=dtype, offsets=offsets, state=False)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@hopper
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("H, group, slices", [(1, 32, None), (2, 4, 1), (1, 8, 2), (2, 2, 2)])
@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_on_hopper(K, H, group, slices, decay, monkeypatch):
    from linnet.ops.ssd import triton

    if slices is not None:
        monkeypatch.setattr(triton, "_count_slices", lambda *_: slices)
    assert_agrees(2, 320, K, 64, H=H, group=group, decay=decay, kernel="ssd.gradients_hopper_kernel")


@hopper
@pytest.mark.parametrize("group", [2, 4, 32])  # fewer and more value heads than are in flight
def test_gradients_of_many_units_and_factors_on_hopper(group):
    assert_agrees(4, 4096, 128, 64, H=64 // group, group=group, factors="token", kernel="ssd.gradients_hopper_kernel")


@hopper
def test_gradients_on_hopper_are_equal_to_the_bit():
    from linnet.ops.ssd.triton import ssd_backward

    inputs, gradients = make(2, 2048, 128, 64, group=16)
    first = ssd_backward(*inputs, *gradients)
    for _ in range(50):
        again = ssd_backward(*inputs, *gradients)
        assert all(x is y or torch.equal(x, y) for x, y in zip(again, first, strict=True))


@hopper
@pytest.mark.parametrize("K, V", [(64, 64), (128, 64), (128, 128), (64, 128)])
@pytest.mark.parametrize("H, group", [(1, 32), (4, 1), (2, 3)])
@pytest.mark.parametrize("decay", DECAYS)
def test_sweep_on_hopper(K, V, H, group, decay):
    assert_agrees(2, 320, K, V, H=H, group=group, decay=decay, kernel="ssd.forward_hopper_kernel")
    assert_agrees(1, 64, K, V, H=H, group=group, decay=decay, state=False, factors="token", kernel="ssd.forward_hopper")


@hopper
@pytest.mark.parametrize("segments", [2, 4])  # of five chunks: the last of four segments has none
@pytest.mark.parametrize("state", [False, True])
def test_segments_of_a_sweep_on_hopper(segments, state, monkeypatch):
    from linnet.ops.ssd import triton

    monkeypatch.setattr(triton, "_count_segments", lambda *_: segments)
    for K, V in ((64, 64), (128, 128)):
        assert_agrees(2, 320, K, V, H=2, group=3, state=state, factors="token", kernel="ssd.forward_hopper_kernel")


@hopper
@pytest.mark.parametrize("factors", [None, "head", "token", "skip"])
def test_long_sweep_on_hopper_is_equal_to_the_bit(factors):
    from linnet.ops.ssd.triton import ssd_forward

    assert_agrees(8, 4096, 128, 64, group=32, factors=factors, kernel="ssd.forward_hopper_kernel")
    inputs, _ = make(8, 4096, 128, 64, group=32, factors=factors)
    first = ssd_forward(*inputs)
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(ssd_forward(*inputs), first, strict=True))


def test_the_compiler_takes_kernels_for_hopper(monkeypatch):
    """Triton's interpreter does not run them, so that without a GPU this is all that is known of them."""
    from translation import translate_launch

    from linnet.ops.ssd import triton

    started = []
    monkeypatch.setattr(triton, "is_hopper", lambda device: True)
    monkeypatch.setattr(triton, "launch", lambda *call, **options: started.append((*call, options)))
    inputs, gradients = make(2, 128, 128, 64, group=4, factors="token", device="cpu")
    o, final = triton.ssd_forward(*inputs)
    assert o.shape == inputs[2].shape and final.shape == inputs[6].shape
    grads = triton.ssd_backward(*inputs, *gradients)
    assert all(grad is None or grad.shape == x.shape for x, grad in zip(inputs, grads, strict=False))
    names = ["decays", "forward_hopper", "decays", "states", "states", "gradients_hopper", "passing"]
    assert [kernel.__name__ for kernel, *_ in started] == [f"{name}_kernel" for name in names]
    for *call, options in started:
        translate_launch(*call, **options)


@gpu
@pytest.mark.parametrize("segments", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("offsets", [None, [0, 0, 130, 1500, 2100]])
def test_segments(segments, offsets, monkeypatch):
    from linnet.ops.ssd import triton

    monkeypatch.setattr(triton, "_count_segments", lambda *_: segments)
    assert_agrees(1, 2100, 128, 64, group=4, offsets=offsets)


@gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 63, 4096, 65_537])
def test_summaries(decay, T):
    assert_summaries_agree(2, T, 128, 64, decay=decay)


# Triton's interpreter has no bfloat16 products.
INTERPRETED = [
    ((1, 70, 16, 24), {"group": 1}),
    ((2, 20, 24, 16), {"H": 2, "group": 1, "decay": "resets", "state": False}),
    ((1, 33, 16, 16), {"decay": "extreme"}),
    ((1, 32, 16, 16), {"decay": "strong", "group": 4, "slices": 2}),
    ((1, 50, 16, 16), {"offsets": [0, 0, 17, 18, 50, 50], "decay": "resets", "segments": 2}),
    ((1, 40, 16, 16), {"decay": "slow", "segments": 3, "factors": "head"}),
    ((1, 37, 16, 24), {"factors": "token", "offsets": [0, 20, 37]}),
    ((1, 20, 16, 16), {"factors": "skip", "state": False}),
]
INTERPRETED_SUMMARIES = [((1, 40, 16, 24), {"segments": 3}), ((2, 20, 16, 16), {"decay": "resets"})]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + len(INTERPRETED_SUMMARIES)


if __name__ == "__main__":
    for cases, agree in ((INTERPRETED, assert_agrees), (INTERPRETED_SUMMARIES, assert_summaries_agree)):
        for call, options in cases:
            options = dict(options)
            cut_in(options.pop("segments", 1), options.pop("slices", 1))
            agree(*call, dtype=torch.float32, device="cpu", **options)
            print(*call, "agrees")
