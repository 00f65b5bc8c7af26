"""The Triton form of gated linear attention, with and without HGRN2's gate, against float64: on a GPU, and small shapes
in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, poison, widen

from linnet.ops import debug, forget_gate, forget_gated_attention, gated_linear_attention, use_backend
from linnet.ops.gated import chunked

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# The largest log-decay per token; those of "resets" clear a part of the channels again and again.
DECAYS = {"slow": 1e-6, "mild": 0.3, "strong": 5.0, "extreme": 40.0, "resets": 0.3}


def make(B, T, K, V, *, decay="mild", forget=False, state=True, offsets=None, dtype=torch.bfloat16, device="cuda"):
    """Arguments of the forward (k or None, log-decays or logits, bound or None) and gradients of its results."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, to)

    N = B if offsets is None else len(offsets) - 1
    state_dtype = torch.promote_types(dtype, torch.float32)
    q, k, v, do = normal(B, T, 2, K), normal(B, T, 2, K), normal(B, T, 2, V), normal(B, T, 2, V)
    states = [normal(N, 2, K, V, to=state_dtype) if state else None for _ in range(2)]
    cuts = None if offsets is None else torch.tensor([offsets] * 2, dtype=torch.int32, device=device).T[:, 0]  # strided
    if forget:
        gate = normal(B, T, 2, K) * DECAYS[decay]
        bound = normal(2, K, to=state_dtype).sigmoid() if decay == "mild" else None
        return (q, None, gate, bound, v, states[0], cuts, 0.7), (do, states[1])
    gate = -DECAYS[decay] * torch.rand(B, T, 2, K, generator=generator, dtype=torch.float64)
    if decay == "resets":
        gate[:, ::5, :, ::2] = -float("inf")
    return (q, k, gate.to(device, state_dtype), None, v, states[0], cuts, 0.7), (do, states[1])


def exact_results(inputs, gradients):
    """What the kernels give, in float64: o, the final state (where it has a gradient), dq, dk, dgate, dbound, dv,
    dinitial."""
    q, k, gate, bound, v, state, cuts, scale = widen(inputs)
    do, dfinal = widen(gradients)
    leaves, log_decay = [], gate
    if k is None:
        leaves = [x.requires_grad_() for x in (gate, bound) if x is not None]
        log_decay, k = forget_gate(gate, bound)
    call = (q, k.detach(), v, log_decay.detach(), state, cuts, scale)
    o, final = chunked.gated_forward(*call)
    dq, dk, dv, dlog_decay, dinitial = chunked.gated_backward(*call, do, dfinal)
    final, dinitial = None if dfinal is None else final, None if state is None else dinitial
    if not leaves:
        return [o, final, dq, dk, dlog_decay, None, dv, dinitial]
    dgate, *dbound = torch.autograd.grad([log_decay, k], leaves, [dlog_decay, dk])
    return [o, final, dq, None, dgate, *(dbound or [None]), dv, dinitial]


def assert_agrees(*call, without=(), **options):
    """`without`: which of the initial state and of the final state's gradient is left out."""
    from linnet.ops.gated import triton

    inputs, gradients = make(*call, **options)
    if "initial" in without:
        inputs = (*inputs[:5], None, *inputs[6:])
    if "final" in without:
        gradients = (gradients[0], None)
    expected = exact_results(inputs, gradients)
    poison(expected, inputs[0].dtype)
    with launching("gated.prepare_kernel"):
        o, final = triton.forward(triton.Call(*inputs), gradients[1] is not None)
    with launching("gated.gradients_kernel"):
        dq, dk, dv, dgate, dbound, dinitial = triton.backward(triton.Call(*inputs), *gradients)
    found = [o, final, dq, dk, dgate, dbound, dv, dinitial]
    assert [x is None for x in found] == [x is None for x in expected]
    assert_near(found, expected, TOLERANCE[inputs[0].dtype])


@gpu
@pytest.mark.parametrize(
    "K, V", [(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (256, 128), (24, 72), (64, 128), (128, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("forget", [False, True])
def test_widths(K, V, dtype, forget):
    assert_agrees(2, 333, K, V, dtype=dtype, forget=forget)


@gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 257, 1024, 4097])
@pytest.mark.parametrize("forget", [False, True])
def test_lengths(T, decay, forget):
    assert_agrees(1, T, 64, 64, decay=decay, forget=forget)
    assert_agrees(3, T, 128, 128, decay=decay, forget=forget, state=False)


@gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("forget", [False, True])
def test_any_decay_in_float32(decay, forget):
    assert_agrees(2, 200, 64, 64, decay=decay, forget=forget, dtype=torch.float32)


@gpu
@pytest.mark.parametrize("offsets", [[0, 700], [0, 0, 1, 64, 65, 700, 700], [0, 640, 700]])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("forget", [False, True])
def test_documents(offsets, width, forget):
    assert_agrees(1, 700, width, width, offsets=offsets, forget=forget)


@gpu
@pytest.mark.parametrize("segments", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("K, V", [(128, 128), (64, 64), (256, 128)])
@pytest.mark.parametrize("offsets", [None, [0, 0, 130, 1500, 2100]])
def test_segments(segments, K, V, offsets, monkeypatch):
    from linnet.ops.gated import triton

    monkeypatch.setattr(triton, "_count_segments", lambda *_: segments)
    assert_agrees(1, 2100, K, V, offsets=offsets)


@gpu
@pytest.mark.parametrize("without", ["initial", "final"])
@pytest.mark.parametrize("segments", [1, 3])
def test_one_state_of_two(without, segments, monkeypatch):
    """The sweeps of a backward share a launch, and each has its state."""
    from linnet.ops.gated import triton

    monkeypatch.setattr(triton, "_count_segments", lambda *_: segments)
    assert_agrees(2, 333, 64, 64, without=without)


@pytest.mark.parametrize("width, little, stages", [(128, True, 5), (256, False, 3), (256, True, 2)])
def test_fewer_chunks_of_wide_keys_are_in_flight_where_shared_memory_is_small(width, little, stages, monkeypatch):
    from linnet.ops.gated import triton

    monkeypatch.setattr(triton, "has_little_shared_memory", lambda _: little)
    q = torch.zeros(1, 64, 1, width, dtype=torch.bfloat16)
    call = triton.Call(q, q, q, None, q, None, None, 1.0)
    assert triton._count_stages(call, 1) == stages


@gpu
def test_long_sequence():
    assert_agrees(1, 131_072, 64, 64)


def assert_weak_decays_are_kept(T, K, V, *, strength, within, dtype=torch.float32, device="cuda", segments=None):
    """Of positive inputs, whose states only grow: what rounding takes away then adds up."""
    from linnet.ops.gated import triton

    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.rand(1, T, 1, x, generator=generator).to(device, dtype) for x in (K, K, V, V))
    log_decay = torch.full((1, T, 1, K), -strength, device=device)
    state, dfinal = (100 * torch.rand(1, 1, K, V, generator=generator).to(device) for _ in range(2))
    call = (q, k, v, log_decay, state, None, 1.0)
    count = triton._count_segments
    triton._count_segments = count if segments is None else lambda *_: segments
    try:
        o, final = triton.gated_forward(*call)
        dq, dk, dv, _, dinitial = triton.gated_backward(*call, do, dfinal)
    finally:
        triton._count_segments = count
    expected = chunked.gated_forward(*widen(call))
    gradients = chunked.gated_backward(*widen(call), do.double(), dfinal.double())
    assert_near([final, dinitial], [expected[1], gradients[-1]], within)
    if dtype == torch.float32:
        assert_near([o, dq, dk, dv], [expected[0], *gradients[:3]], 2 * within)


@gpu
@pytest.mark.parametrize("strength", [1e-8, 1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("segments", [1, 7])
def test_weak_decays_do_not_drift_over_many_tokens(strength, dtype, segments):
    # As bfloat16, keys hardly decay within a chunk of 32 tokens: by 16 decays on average, in any number of tokens.
    within = 5e-6 + (20 * strength if dtype == torch.bfloat16 else 0)
    for width in (64, 128):
        assert_weak_decays_are_kept(
            100_000, width, width, strength=strength, within=within, dtype=dtype, segments=segments
        )


def assert_summaries_agree(B, T, K, V, *, segments=None, dtype=torch.bfloat16, **options):
    """The state after a span, the gradient of the one before it, and the decay, without running the op."""
    from linnet.ops.gated import triton

    (q, k, gate, bound, v, *_, scale), (do, _) = make(B, T, K, V, state=False, dtype=dtype, **options)
    count = triton._count_segments
    triton._count_segments = count if segments is None else lambda *_: segments
    try:
        state, over = triton.summarise(triton.Call(q, k, gate, bound, v, None, None, scale), v)
        dstate, again = triton.summarise(triton.Call(q, k, gate, bound, do, None, None, scale), do, reverse=True)
    finally:
        triton._count_segments = count
    q, k, gate, bound, v, do = widen((q, k, gate, bound, v, do))
    if k is None:
        gate, k = forget_gate(gate, bound)
    expected, decay = chunked.gated_summary(q, k, gate, v, scale, False)
    before, _ = chunked.gated_summary(q, k, gate, do, scale, True)
    assert_near([state, dstate, over, again], [expected, before, decay, decay], TOLERANCE[dtype])


@gpu
@pytest.mark.parametrize("segments", [None, 1, 3, 40])
@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("T, K, V", [(2048, 128, 128), (1999, 64, 64), (100, 256, 128)])
def test_summaries(segments, forget, T, K, V):
    assert_summaries_agree(2, T, K, V, segments=segments, forget=forget)


@gpu
@pytest.mark.parametrize("K, V, dtype", [(12, 5, torch.bfloat16), (64, 264, torch.float32), (16, 16, torch.float64)])
@pytest.mark.parametrize("forget", [False, True])
def test_what_has_no_kernel_is_chunked(K, V, dtype, forget):
    (q, k, gate, bound, v, state, *_), _ = make(2, 100, K, V, dtype=dtype, forget=forget)
    options = {"initial_state": state, "output_final_state": True}
    with launching(None):
        o, final = run(q, k, gate, bound, v, **options)
    with use_backend("chunked"):
        expected = run(q, k, gate, bound, v, **options)
    assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])


def run(q, k, gate, bound, v, **options):
    if k is None:
        return forget_gated_attention(q, gate, v, lower_bound=bound, **options)
    return gated_linear_attention(q, k, v, gate, **options)


@gpu
@pytest.mark.parametrize("forget", [False, True])
def test_through_autograd_and_compile(forget):
    (q, k, gate, bound, v, state, _, scale), _ = make(2, 200, 64, 64, forget=forget)
    leaves = [x.requires_grad_() for x in (q, k, gate, bound, v, state) if x is not None]

    def attend():
        return run(q, k, gate, bound, v, scale=scale, initial_state=state, output_final_state=True)

    def everything(form):
        o, final = form()
        return [o, final, *torch.autograd.grad(o.float().sum() + final.square().sum(), leaves)]

    plain, again = everything(attend), everything(attend)
    with use_backend("chunked"):
        expected = everything(attend)
    for a, b, c, e in zip(plain, again, everything(torch.compile(attend, fullgraph=True)), expected, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)  # deterministic, compiled or not
        assert (a.double() - e.double()).norm() <= 5e-3 * e.double().norm()


@gpu
def test_a_cuda_graph_leaves_none_of_its_memory_behind():
    from linnet.ops.gated.triton import _CHOICES

    (q, k, gate, _, v, *_), _ = make(2, 200, 64, 64, state=False)
    leaves = [x.requires_grad_() for x in (q, k, gate, v)]

    def differentiate():
        return torch.autograd.grad(gated_linear_attention(q, k, v, gate)[0].float().sum(), leaves)

    expected = differentiate()  # compiles and loads the kernels
    torch.cuda.synchronize()
    _CHOICES.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.graph(graph):
        captured = differentiate()
    assert not _CHOICES
    graph.replay()
    for again in (captured, differentiate()):
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@gpu
def test_strided_inputs():
    (q, k, gate, _, v, *_), _ = make(2, 100, 64, 64)
    expected, _ = gated_linear_attention(q, k, v, gate)
    q, k, v = torch.stack([q, k, v], 2).unbind(2)
    assert torch.equal(gated_linear_attention(q, k, v, gate)[0], expected)


@gpu
def test_debug_looks_at_offsets():
    (q, k, gate, _, v, *_), _ = make(1, 37, 16, 16)
    cuts = torch.tensor([0, 20, 10, 37], dtype=torch.int32, device="cuda")
    with debug(), pytest.raises(ValueError, match="cu_seqlens"):
        gated_linear_attention(q, k, v, gate, cu_seqlens=cuts)


# Triton's interpreter has no bfloat16 products.
INTERPRETED = [
    ((1, 40, 16, 24), {}),
    ((1, 20, 24, 16), {"decay": "resets", "state": False}),
    ((1, 32, 16, 16), {"decay": "extreme"}),
    ((1, 35, 16, 16), {"offsets": [0, 0, 17, 18, 35, 35], "forget": True}),
    ((1, 40, 16, 16), {"decay": "slow", "segments": 2, "without": "final"}),
    ((1, 33, 16, 16), {"without": "initial"}),
]
# A decay of 16 tokens that rounds to 1: each of 40 chunks would lose 2.9e-8 of the state.
INTERPRETED_WEAK = [(640, 16, 16, {"segments": segments}) for segments in (1, 2)]

INTERPRETED_SUMMARIES = [
    ((1, 70, 16, 24), {"segments": 3}),
    ((2, 35, 16, 16), {"forget": True, "segments": 2}),
    ((1, 40, 16, 16), {"decay": "resets"}),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + len(INTERPRETED_WEAK) + len(INTERPRETED_SUMMARIES)


if __name__ == "__main__":
    from linnet.ops.gated import triton

    count = triton._count_segments
    for call, options in INTERPRETED:
        options = options | {"dtype": getattr(torch, options.get("dtype", "float32")), "device": "cpu"}
        segments = options.pop("segments", None)
        triton._count_segments = count if segments is None else lambda *_, segments=segments: segments
        assert_agrees(*call, **options)
        print(*call, "agrees")
    for *call, options in INTERPRETED_WEAK:
        assert_weak_decays_are_kept(*call, strength=1.8e-9, within=4e-7, device="cpu", **options)
        print(*call, "agrees")
    for call, options in INTERPRETED_SUMMARIES:
        assert_summaries_agree(*call, dtype=torch.float32, device="cpu", **options)
        print(*call, "agrees")
