"""The Triton form of additive decay attention against float64: on a GPU, and small shapes in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, poison, widen

from linnet.ops import additive_attention, debug, use_backend
from linnet.ops.additive import chunked
from linnet.ops.rotation import spread

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU: no other GPU runs Gluon kernels for it, nor does Triton's interpreter",
)
# The kernels of a causal forward and backward on a Hopper GPU, by whether there is LRPE.
HOPPER = {
    False: {"hopper_values_kernel", "hopper_queries_kernel", "hopper_keys_kernel"},
    True: {"hopper_rotated_values_kernel", "hopper_rotated_queries_kernel", "hopper_rotated_keys_kernel"},
}
NAMES = ("o", "S", "z", "dq", "dk", "dv", "dtheta", "dS", "dz")
INF = float("inf")


def logits(u, kind):
    """Raw logits of unit size, made harder. Not below -inf, so that everything has a gradient."""
    T = u.shape[1]
    if kind == "wide":
        return u.clamp(-3, 3) * 10  # +-30
    if kind == "rising":  # the first tokens are far below the later ones, by less than a chunk may grow
        return u + torch.linspace(-80, 0, T, dtype=u.dtype)[:, None, None]
    if kind == "falling":
        return u + torch.linspace(0, -1e4, T, dtype=u.dtype)[:, None, None]
    if kind == "jump":  # beyond e^88 from one chunk to another
        return u + 500 * (torch.arange(T)[:, None, None] >= T // 64 * 32)
    if kind == "climbing":  # references move with every chunk
        return u + 12 * (torch.arange(T)[:, None, None] // 64)
    if kind == "masked":
        u = u.clone()
        u[:, : T // 3, :, ::2] = -INF
        u[:, ::5] = -INF
    return u


def make(B, T, K, V, *, kind="plain", theta=False, positions=False, state=True, causal=True, offsets=None,
         final="Sz", dtype=torch.bfloat16, device="cuda", H=2, scale=0.7):  # fmt: skip
    """Arguments of the form's forward, and gradients of its results: of the final state those that `final` names.

    positions: True for [B, T], or the shape of some.
    """
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, to)

    N = B if offsets is None else len(offsets) - 1
    exact, rows = torch.promote_types(dtype, torch.float32), 2 * K if theta else K
    q, v, do = normal(B, T, H, K), normal(B, T, H, V), normal(B, T, H, V)
    k = logits(torch.randn(B, T, H, K, generator=generator, dtype=torch.float64), kind).to(device, dtype)
    frequencies = torch.rand(H, K, generator=generator, dtype=torch.float64).to(device, exact) if theta else None
    shape = (B, T) if positions is True else positions
    places = torch.randint(0, 100_000, shape, generator=generator).to(device) if positions else None
    S, z = (normal(N, H, rows, V, to=exact), normal(N, H, K, to=exact)) if state else (None, None)
    dS, dz = normal(N, H, rows, V, to=exact), normal(N, H, K, to=exact)
    dS, dz = dS if "S" in final else None, dz if "z" in final else None
    cuts = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    return (q, k, v, frequencies, places, S, z, scale, causal, cuts), (do, dS, dz)


def places(q, k, v, theta, positions, offsets):
    """Where tokens are, to be multiplied by [B, T, H, K]."""
    at = torch.arange(q.shape[1], device=q.device)
    if positions is not None:
        at = positions
    elif offsets is not None:
        starts = offsets.long()
        at = at - starts[torch.searchsorted(starts, at, right=True) - 1]
    if at.ndim == 3:
        return spread(at.double(), q.shape[3])[:, :, None]
    return at.double().expand(q.shape[:2])[..., None, None]


def errors(form, inputs, gradients):
    """Relative RMS errors of o, the final state and all gradients against float64, by name.

    A softmax does not see what all its logits have in common, so what their gradients are made of cancels, in part or
    altogether: the errors of dk and dz are taken relative to q dq and S dS, which are subtracted in it. That of theta
    sums over tokens what is of the size of t q dq, and of both signs: its error is relative to the squares' sum.
    """

    def backward(form, inputs, gradients, S_end, z_end):
        *tensors, z, scale, causal, cuts = inputs
        return form.backward(*gradients, *tensors, z if causal else z_end, S_end, scale, causal, cuts)

    precise = widen(inputs)
    expected = chunked.forward(*precise)
    expected += backward(chunked, precise, widen(gradients), *expected[1:])
    poison(expected, inputs[2].dtype)
    wanted = any(x is not None for x in gradients[1:])
    actual = form.forward(*inputs, wanted)
    actual += backward(form, inputs, gradients, *actual[1:])
    slopes = precise[0] * expected[3]
    extra = {"dk": slopes.square().sum(), "dtheta": 0.0}
    if gradients[1] is not None:
        extra["dk"] += (expected[1] * gradients[1].double()).sum(-1).square().sum()
    if inputs[3] is not None:
        extra["dtheta"] = (slopes * places(*inputs[:5], inputs[9])).square().sum()
    extra["dz"] = extra["dk"]
    found = {}
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        if name in ("dS", "dz") and inputs[5] is None or name in ("S", "z") and inputs[8] and not wanted:
            assert a is None, name
            continue
        there = e != -INF
        assert torch.equal(there, a != -INF), name
        a, e = a.double().masked_fill(~there, 0), e.masked_fill(~there, 0)
        size = (e.square().sum() + extra.get(name, 0.0)).sqrt()
        found[name] = ((a - e).norm() / size.clamp(min=1e-30)).item() if e.numel() else 0.0
    return found


def assert_agrees(*call, ran="triton", **options):
    """Compares forward and backward with float64, and looks at which kernels did it.

    ran: "triton" for any, "general" for none of Hopper's, "hopper" for all of Hopper's and no other that sweeps, or
    "chunked" for none.
    """
    from linnet.ops.additive import triton
    from linnet.ops.launching import record

    inputs, gradients = make(*call, **options)
    with record() as started:
        found = errors(triton, inputs, gradients)
    started, theta = {name.removeprefix("additive.") for name in started}, inputs[3] is not None
    if ran == "chunked":
        assert not started
    elif ran == "hopper" and inputs[8]:
        assert started - {"hopper_sums_kernel", "shares.sum_kernel"} == HOPPER[theta]
    elif ran == "hopper":  # the forward alone
        assert {"hopper_sums_kernel", "hopper_product_kernel", "use_keys_kernel"} <= started
    else:
        assert {"values_kernel", *HOPPER[theta], "hopper_sums_kernel"} & started
        assert ran == "triton" or not any(name.startswith("hopper") for name in started)
    limit = TOLERANCE[inputs[0].dtype]
    if options.get("kind") == "jump":
        limit = max(limit, 500 * torch.finfo(torch.float32).eps)  # of z near 500, by which weights are off
    wrong = {name: error for name, error in found.items() if not error <= limit}
    assert not wrong, (call, options, wrong)


@gpu
@pytest.mark.parametrize("K, V", [(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (256, 128), (24, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widths(K, V, dtype):
    assert_agrees(2, 333, K, V, dtype=dtype)
    assert_agrees(1, 333, K, V, dtype=dtype, causal=False, state=False)
    assert_agrees(1, 333, min(K, 128), V, dtype=dtype, theta=True)


@gpu
@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 257, 1024, 4097])
def test_lengths(T, theta):
    assert_agrees(1, T, 64, 64, theta=theta)
    assert_agrees(3, T, 128, 128, theta=theta, state=False)
    assert_agrees(2, T, 64, 128, theta=theta, state=False, causal=False)


@gpu
@pytest.mark.parametrize("kind", ["wide", "rising", "falling", "jump", "masked"])
@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hard_logits(kind, theta, dtype):
    for T in (60, 400):
        assert_agrees(2, T, 64, 64, kind=kind, theta=theta, dtype=dtype)
        assert_agrees(2, T, 64, 64, kind=kind, theta=theta, dtype=dtype, causal=False, state=False)


@gpu
@pytest.mark.parametrize("offsets", [[0, 700], [0, 0, 1, 64, 65, 700, 700], [0, 640, 700]])
@pytest.mark.parametrize("causal", [False, True])
def test_documents(offsets, causal):
    assert_agrees(1, 700, 64, 64, offsets=offsets, theta=True, causal=causal, state=causal, ran="general")
    assert_agrees(1, 700, 128, 128, offsets=offsets, causal=causal, state=causal, ran="general")


@gpu
@pytest.mark.parametrize("segments", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("offsets", [None, [0, 0, 130, 1500, 2100]])
@pytest.mark.parametrize("theta", [False, True])
def test_segments(segments, offsets, theta, monkeypatch):
    from linnet.ops.additive.launch import Call

    monkeypatch.setattr(Call, "count_segments", lambda *_: segments)
    assert_agrees(1, 2100, 128, 64, offsets=offsets, theta=theta, ran="general")
    assert_agrees(1, 2100, 64, 128, offsets=offsets, theta=theta, causal=False, state=False, ran="general")


@pytest.fixture
def few_heads(monkeypatch):
    """Lets the kernels for Hopper GPUs, which other GPUs do without, run where heads are few, on whole sequences."""
    from linnet.ops.additive import hopper

    monkeypatch.setattr(hopper, "LEAST", {False: 0.0, True: 0.0})
    monkeypatch.setattr("linnet.ops.additive.hopper.count_swept_twice", lambda *_: 1)
    return monkeypatch


@hopper
@pytest.mark.parametrize("K, V, columns", [(64, 64, 64), (128, 128, 64), (128, 128, 128), (64, 128, 64), (128, 64, 64)])
@pytest.mark.parametrize("kind", ["plain", "wide", "rising", "falling", "jump", "masked"])
def test_hopper(K, V, columns, kind, few_heads):
    few_heads.setattr("linnet.ops.additive.hopper.choose_columns", lambda *_: columns)
    for T in (128, 384):  # where a jump is between chunks
        for state, final in ((True, "Sz"), (False, "S"), (False, "")):
            assert_agrees(2, T, K, V, kind=kind, state=state, final=final, ran="hopper")
    if kind == "plain":
        assert_agrees(2, 64, K, V, ran="hopper")
        assert_agrees(1, 8192, K, V, ran="hopper")
        assert_agrees(2, 2048, K, V, causal=False, state=False, ran="hopper")


@hopper
@pytest.mark.parametrize("V", [64, 128])
@pytest.mark.parametrize("kind", ["plain", "wide", "rising", "falling", "jump", "masked"])
def test_hopper_rotated(V, kind, few_heads):
    for T in (128, 384):
        for state, final in ((True, "Sz"), (False, "S"), (False, "")):
            assert_agrees(2, T, 128, V, kind=kind, state=state, final=final, theta=True, ran="hopper")
    assert_agrees(2, 256, 128, V, kind=kind, theta=True, positions=True, ran="hopper")
    if kind == "plain":
        assert_agrees(1, 64, 128, V, theta=True, ran="hopper")
        assert_agrees(1, 65_536, 128, V, theta=True, H=1, ran="hopper")


@hopper
@pytest.mark.parametrize("columns", [64, 128])
def test_hopper_rotated_columns_and_scales(columns, few_heads):
    few_heads.setattr("linnet.ops.additive.hopper.choose_columns", lambda *_: columns)
    assert_agrees(2, 384, 128, 128, theta=True, scale=-3.0, ran="hopper")
    assert_agrees(2, 384, 128, 128, theta=True, scale=0.0, ran="general")  # the kernels would divide by it
    assert_agrees(2, 512, 128, 128, theta=True, kind="climbing", ran="hopper")
    assert_agrees(1, 65_536, 128, 128, theta=True, H=1, state=False, ran="hopper")


@hopper
@pytest.mark.parametrize("segments", [2, 3, 8])
def test_hopper_segments(segments, few_heads):
    few_heads.setattr("linnet.ops.additive.hopper.count_segments", lambda _: segments)
    for K, V in ((128, 128), (64, 64), (128, 64)):
        for state in (True, False):
            assert_agrees(2, 1024, K, V, state=state, ran="hopper")
            assert_agrees(1, 1536, K, V, state=state, kind="masked", ran="hopper")
    assert_agrees(1, 4096, 128, 128, ran="hopper")  # several shares per segment


@hopper
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("theta", [False, True])
def test_hopper_segments_swept_twice(count, theta, few_heads):
    few_heads.setattr("linnet.ops.additive.hopper.count_swept_twice", lambda *_: count)
    T = 128 * count
    for kind in ("plain", "jump", "climbing", "masked"):
        for state, final in ((True, "Sz"), (False, "S"), (True, "")):
            assert_agrees(2, T, 128, 128, kind=kind, state=state, final=final, theta=theta, ran="hopper")
    assert_agrees(2, T, 128, 64, theta=theta, ran="hopper")
    if theta:
        assert_agrees(2, T, 128, 128, theta=True, positions=True, ran="hopper")


@hopper
@pytest.mark.parametrize("theta", [False, True])
def test_long_sequences_of_few_heads(theta, monkeypatch):
    monkeypatch.setattr("linnet.ops.additive.hopper.SEGMENT_TOKENS", 0)
    assert_agrees(1, 65_536, 128, 128, theta=theta, H=1, state=False, ran="hopper")
    assert_agrees(1, 9 * 1024, 128, 128, theta=theta, H=12, final="", ran="hopper")


def test_how_many_segments_are_swept_twice(monkeypatch):
    """Of a GPU with 132 multiprocessors: for whole rounds of programs, few segments, and none of less than 8 chunks."""
    from linnet.ops.additive import hopper
    from linnet.ops.additive.launch import Call

    def count(B, T, H):
        x = torch.empty(1, device="meta").expand(B, T, H, 128)
        return hopper.count_swept_twice(Call(x, x, x, None, None, None, 1.0, x), 64)

    monkeypatch.setattr(hopper, "count_processors", lambda _: 132)
    assert [count(1, 65_536, H) for H in (8, 16, 32, 33, 34)] == [16, 8, 4, 4, 1]
    assert count(1, 131_072, 4) == 32 and count(1, 2**19, 1) == 128 and count(2, 32_768, 8) == 8
    assert count(1, 32_704, 16) == 1  # short
    assert count(1, 64 * 523, 16) == 1 and count(1, 64 * 522, 16) == 6  # a prime number of chunks


@hopper
def test_hopper_with_many_heads():
    for theta in (False, True):
        assert_agrees(9, 1024, 128, 128, H=16, state=False, theta=theta, ran="hopper")
        assert_agrees(9, 192, 128, 128, H=16, theta=theta, ran="hopper")
    assert_agrees(9, 64, 128, 128, H=16, theta=True, ran="hopper")
    assert_agrees(9, 128, 128, 128, H=16, kind="masked", theta=True, positions=True, ran="hopper")
    assert_agrees(5, 128, 128, 128, H=16, ran="hopper")


@gpu
@pytest.mark.parametrize("final", ["", "S", "z"])
@pytest.mark.parametrize("causal", [False, True])
def test_final_states_without_a_gradient(final, causal):
    for theta in (False, True):
        assert_agrees(2, 700, 64, 64, theta=theta, causal=causal, state=causal, final=final)
        assert_agrees(1, 4096, 64, 64, theta=theta, causal=causal, state=False, final=final)


@gpu
def test_positions():
    assert_agrees(2, 500, 64, 64, theta=True, positions=True, ran="general")
    assert_agrees(2, 500, 64, 64, theta=True, positions=True, dtype=torch.float32, ran="general")


@gpu
def test_long_sequence():
    assert_agrees(1, 131_072, 64, 64)


@gpu
@pytest.mark.parametrize("K, V, dtype", [(3, 5, torch.bfloat16), (64, 264, torch.float32), (16, 16, torch.float64)])
def test_what_has_no_kernel_is_chunked(K, V, dtype):
    assert_agrees(1, 100, K, V, dtype=dtype, ran="chunked")


@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("T", [200, 256])  # the second is for the kernels for Hopper GPUs
def test_through_autograd_and_compile(causal, rotated, T, few_heads):
    (q, k, v, theta, _, S, z, scale, *_), _ = make(2, T, 128, 64, theta=rotated)
    from linnet.ops.launching import record

    leaves = [x.requires_grad_() for x in (q, k, v, theta, *((S, z) if causal else ())) if x is not None]

    def run(q, k, v, *more):
        theta, state = (more[0], more[1:]) if rotated else (None, more)
        return additive_attention(
            q, k, v, theta=theta, scale=scale, causal=causal, initial_state=state or None, output_final_state=True
        )

    def everything(form):
        o, (S, z) = form(*leaves)
        return [o, S, z, *torch.autograd.grad(o.float().sum() + S.square().sum() + z.sum(), leaves)]

    with record() as started:
        plain, again = everything(run), everything(run)
    assert started
    with use_backend("chunked"):
        expected = everything(run)
    for a, b, c, e in zip(plain, again, everything(torch.compile(run, fullgraph=True)), expected, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)  # deterministic, compiled or not
        assert (a.double() - e.double()).norm() <= 6e-3 * e.double().norm()


@gpu
def test_debug_looks_at_offsets():
    (q, k, v, *_), _ = make(1, 37, 16, 16)
    cuts = torch.tensor([0, 20, 10, 37], dtype=torch.int32, device="cuda")
    with debug(), pytest.raises(ValueError, match="cu_seqlens"):
        additive_attention(q, k, v, cu_seqlens=cuts)


@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_the_compiler_takes_kernels_for_hopper(theta, state, monkeypatch):
    """Triton's interpreter does not run them, so that without a GPU this is all that is known of them."""
    from translation import translate_launch

    from linnet.ops.additive import hopper
    from linnet.ops.additive.launch import Call

    (*inputs, S, z, scale, _, cuts), gradients = make(2, 128, 128, 128, theta=theta, state=state, device="cpu")
    call, started = Call.of(*inputs, cuts, scale), []
    monkeypatch.setattr(hopper, "launch_all", started.extend)
    monkeypatch.setattr("linnet.ops.additive.launch.sum_shares", lambda shares, dtype: shares.sum((0, 2)).to(dtype))
    _, *end = hopper.forward(call, S, z, True)
    hopper.backward(call, *gradients, S, z, end[0], call.theta)
    assert len(started) == 4
    for *call, options in started:
        translate_launch(*call, **options)


@pytest.mark.parametrize("theta, positions", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind, final", [("plain", "Sz"), ("masked", "Sz"), ("jump", "")])
@pytest.mark.parametrize("state", [False, True])
def test_segments_are_put_together(theta, positions, kind, final, state, monkeypatch):
    """With sweeps in the chunked form in place of the kernels, which run on no CPU."""
    from linnet.ops.additive import hopper
    from linnet.ops.additive.launch import Call

    initials = []

    def tensors(call):
        at, (N, T) = call.positions, call.q.shape[:2]
        if at is None:
            at = torch.arange(T) + T * (torch.arange(N) % call.segments)[:, None]
        return call.q, call.k, call.v, call.theta, at

    def sweep_back(call, do, initial, end, before):
        end = call.empty_state()[0].zero_() if end is None else end
        return chunked.backward(do.view(call.v.shape), *initial, *tensors(call), *before, end, call.scale, True, None)

    def values(call, c, out, initial, final, boundaries=None):
        if boundaries is None:
            o, *end = chunked.forward(*tensors(call), *initial, call.scale, True, None)
        else:
            o, end = sweep_back(call, c, initial, None, initials[0])[2], ()
        out.copy_(o.view(out.shape))
        for x, y in zip(final, end, strict=False):
            if x is not None:
                x.copy_(y)

    def queries(call, do, dq, initial, boundaries, dtheta):
        initials.append(initial)
        dq.copy_(sweep_back(call, do, (None, None), None, initial)[0].view(dq.shape))
        dtheta.zero_()

    def keys(call, do, dq, dk, initial, end, final, boundaries, dtheta):
        _, du, _, slopes, dS, dz = sweep_back(call, do, initial, end, initials[0])
        dk.copy_(du.view(dk.shape))
        if theta:
            dtheta.view(call.states, *slopes.shape).zero_()[0] = slopes
        if final[0] is not None:
            final[0].copy_(dS)
            final[1].copy_(dz - call.dot(initials[0][0], dS))

    for name, function in dict(_values=values, _queries=queries, _keys=keys, launch_all=list).items():
        monkeypatch.setattr(hopper, name, function)
    monkeypatch.setattr("linnet.ops.additive.launch.sum_shares", lambda shares, dtype: shares.sum((0, 2)).to(dtype))
    monkeypatch.setattr("linnet.ops.additive.hopper.count_swept_twice", lambda *_: 3)
    inputs, gradients = make(2, 192, 4, 3, kind=kind, theta=theta, positions=positions, state=state, final=final,
                             dtype=torch.float64, device="cpu")  # fmt: skip
    *call, S, z, scale, _, cuts = inputs
    o, *end = chunked.forward(*inputs)
    expected = [o, *end, *chunked.backward(*gradients, *inputs[:7], end[0], *inputs[7:])]
    call = Call.of(*call, cuts, scale)._replace(theta=call[3], blank=o.new_empty(1))  # in float64
    if theta:
        o, *end = hopper.forward(call, S, z, True)
    *grads, dS, dz = hopper.backward(call, *gradients, S, z, end[0], call.theta)
    if state:
        dz += call.dot(S, dS)
    else:
        expected[-2:] = None, None
    assert_near([o, *end, *grads, dS, dz], expected)


# Triton's interpreter has no bfloat16 products.
def assert_spans_agree(B, T, K, V, **options):
    """The state after a span without running the op, and a backward that asks what the tokens after it give."""
    from linnet.ops.additive import triton

    inputs, (do, dS, dz) = make(B, T, K, V, **options)
    q, k, v, theta, at, S, z, scale, *_ = inputs
    exact = q, k, v, theta, at, S, z, scale = widen(inputs[:8])
    D, delta = (torch.randn(x.shape, dtype=torch.float64, device=x.device) for x in (S, z))
    expected = [*chunked.summarise(k, v, theta, at)]
    found = [*triton.summarise(inputs[1], *inputs[2:5])]
    ends = chunked.forward(*exact, True, None)
    asked = []

    def later(D_own, delta_own):
        asked.extend((D_own, delta_own))
        return D.to(inputs[5].dtype), delta.to(inputs[5].dtype)

    tensors = (*inputs[:7], ends[1].to(inputs[5].dtype), inputs[7], True, None)
    gradients = triton.backward(do, dS, dz, *tensors, later)
    *_, D_own, dz_own = chunked.backward(do.double(), None, None, *exact[:7], None, scale, True, None)
    expected += [D_own, chunked.dot(S, D_own, K) - dz_own]
    dS, dz = (None, None) if dS is None else (dS.double(), dz.double())
    dS, dz = chunked.add_later(lambda *_: (D, delta), None, None, dS, dz, ends[1])
    expected += chunked.backward(do.double(), dS, dz, *exact[:7], ends[1], scale, True, None)
    found += [*asked, *gradients]
    limit = 3 * TOLERANCE[inputs[0].dtype]
    assert_near(found[:-1], expected[:-1], limit, least=1e-3)
    # The gradient of z is what is left where S dS is subtracted: as in `errors`, its error is relative to both.
    size = torch.hypot(expected[-1].norm(), chunked.dot(S, expected[-2], K).norm())
    assert (found[-1].double() - expected[-1]).norm() <= limit * size


@gpu
@pytest.mark.parametrize("theta, positions", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("B, T, H", [(2, 1000, 2), (1, 4096, 16), (1, 32_768, 16), (4, 256, 40)])
@pytest.mark.parametrize("kind", ["plain", "wide"])
@pytest.mark.parametrize("final", ["", "Sz"])
def test_spans(theta, positions, B, T, H, kind, final):
    assert_spans_agree(B, T, 128, 128, theta=theta, positions=positions, kind=kind, H=H, final=final)


def assert_silu_agrees(B, T, K, V, dtype=torch.bfloat16, device="cuda", ran="", **options):
    """Queries before their SiLU: kernels that apply it and its slope, against float64 with the SiLU outside.

    ran: a part of the name of a kernel that must have run.
    """
    from linnet.ops.launching import record

    (q, k, v, theta, at, *_, scale, causal, cuts), (do, *_) = make(
        B, T, K, V, state=False, dtype=dtype, device=device, **options
    )

    def everything(form, q, k, v, theta, do, activation):
        tensors = [x.detach().requires_grad_() for x in (q, k, v, theta) if x is not None]
        q, k, v, *frequencies = tensors
        with use_backend(form):
            o, _ = additive_attention(
                q if activation == "silu" else torch.nn.functional.silu(q),
                k,
                v,
                theta=frequencies[0] if frequencies else None,
                positions=at,
                scale=scale,
                causal=causal,
                query_activation=activation,
                cu_seqlens=cuts,
            )
            return [o, *torch.autograd.grad(o, tensors, do)]

    given = (q, k, v, theta, do)
    expected = everything("chunked", *widen(given), "none")
    assert_near(everything("chunked", *widen(given), "silu"), expected, 1e-10)
    poison(expected, dtype)
    with record() as kernels:
        actual = everything("triton", *given, "silu")
    assert_near(actual, expected, 2 * TOLERANCE[dtype])
    assert any(ran in name for name in kernels), kernels


SILU = {
    "plain": {"causal": False},
    "lrpe": {"causal": False, "theta": True},
    "grid": {"causal": False, "theta": True, "positions": (1, 36, 2)},
    "documents": {"causal": False, "theta": True, "offsets": [0, 7, 20, 36]},
    "causal": {"theta": True},
}


@gpu
@pytest.mark.parametrize("options", SILU.values(), ids=SILU.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [16, 64, 72])
def test_queries_before_their_silu(options, dtype, width):
    assert_silu_agrees(1, 36, width, width, dtype, **options)


@hopper
def test_queries_before_their_silu_in_the_kernels_of_hopper():
    assert_silu_agrees(2, 128, 64, 64, causal=False, ran="hopper")


INTERPRETED_SPANS = [
    ((1, 70, 16, 24), {"theta": True, "positions": True, "segments": 2}),
    ((1, 130, 16, 16), {"kind": "masked", "H": 1, "segments": 3, "final": ""}),
    ((2, 40, 16, 16), {"final": ""}),
]
INTERPRETED = [
    ((2, 40, 16, 16), {"theta": True}),
    ((1, 64, 16, 24), {"state": False, "kind": "wide", "H": 1}),
    ((1, 70, 24, 16), {"kind": "rising"}),
    ((1, 40, 16, 16), {"causal": False, "state": False}),
    ((1, 75, 16, 16), {"offsets": [0, 0, 35, 36, 75, 75], "kind": "masked", "theta": True, "positions": True}),
    ((1, 130, 16, 16), {"H": 1, "state": False, "segments": 2}),
    ((1, 130, 16, 24), {"causal": False, "state": False, "theta": True, "kind": "masked", "H": 1, "segments": 3}),
    ((1, 40, 16, 16), {"state": False, "final": "", "theta": True}),
    ((1, 50, 16, 16), {"final": "z"}),
    ((1, 40, 16, 16), {"theta": True, "scale": 0.0}),
    ((1, 50, 16, 16), {"final": "", "causal": False, "state": False}),
    ((2, 36, 24, 16), {"theta": True, "positions": (1, 36, 2), "causal": False, "state": False, "H": 1, "segments": 2}),
    ((2, 36, 16, 16), {"theta": True, "positions": (2, 36, 3), "causal": False, "state": False, "H": 1}),
    ((1, 40, 24, 16), {"theta": True, "positions": (1, 40, 2), "H": 1}),
    ((1, 20, 16, 16), {"theta": True, "positions": (1, 20, 2), "causal": False, "state": False, "offsets": [0, 7, 20]}),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + len(INTERPRETED_SPANS) + len(SILU)


if __name__ == "__main__":
    from linnet.ops.additive.launch import Call

    count = Call.count_segments
    for call, options in INTERPRETED:
        options = options | {"dtype": getattr(torch, options.get("dtype", "float32")), "device": "cpu"}
        segments = options.pop("segments", None)
        Call.count_segments = count if segments is None else lambda *_, segments=segments: segments
        assert_agrees(*call, **options, ran="general")
        print(*call, "agrees")
    for name, options in SILU.items():
        Call.count_segments = lambda *_: 2
        assert_silu_agrees(1, 36, 16, 24, torch.float32, "cpu", **options)
        print(name, "agrees")
    for call, options in INTERPRETED_SPANS:
        segments = options.pop("segments", None)
        Call.count_segments = count if segments is None else lambda *_, segments=segments: segments
        assert_spans_agree(*call, dtype=torch.float32, device="cpu", **options)
        print(*call, "agrees")
