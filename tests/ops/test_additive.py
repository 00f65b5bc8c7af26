"""Additive decay attention: the definition against the chunked form and the step; in float64 unless said otherwise."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from precision import assert_near
from registered import permuted
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import backend
from linnet.ops.additive import additive_attention, additive_step, chunked

INF = float("inf")


def make(
    B=2, T=37, H=2, K=4, V=3, *, theta=False, state=False, documents=None, spread=1.0, dtype=torch.float64, seed=0
):
    """Arguments of a call, by name; leaves require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    N = B if documents is None else len(documents) - 1
    call = dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, H, V), scale=0.7)
    call["k"] = (call["k"].detach() * spread).requires_grad_()
    if theta:
        call["theta"] = normal(H, K)
    if state:
        call["initial_state"] = (normal(N, H, 2 * K if theta else K, V), normal(N, H, K))
    if documents is not None:
        call["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return call


def run(call, form="chunked"):
    call = dict(call)
    q, k, v = (call.pop(name) for name in "qkv")
    with backend.use_backend(form):
        o, (S, z) = additive_attention(q, k, v, output_final_state=True, **call)
    return o, S, z


def leaves(call):
    flat = [*call.values()]
    flat += flat.pop(flat.index(call["initial_state"])) if "initial_state" in call else []
    return [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]


def everything(call, form="chunked"):
    """Outputs, final state, and the gradients of a random function of all of them to every leaf."""
    outputs = run(call, form)
    generator = torch.Generator().manual_seed(7)
    loss = 0.0
    for x in outputs:
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        loss = loss + (x.masked_fill(x == -INF, 0.0) * weight).sum()
    return [*outputs, *torch.autograd.grad(loss, leaves(call))]


def assert_same(actual, expected, tolerance=1e-10):
    for a, e in zip(actual, expected, strict=True):
        size = max(1.0, e.masked_fill(e == -INF, 0.0).abs().max().item()) if e.numel() else 1.0
        torch.testing.assert_close(a / size, e / size, rtol=0, atol=tolerance, check_dtype=False)


CASES = {
    "plain": dict(),
    "one token": dict(T=1, state=True),
    "ragged": dict(B=1, T=150, theta=True, state=True),
    "no state": dict(T=130, theta=True),
    "documents": dict(B=1, T=90, documents=[0, 20, 20, 21, 90], theta=True, state=True),
    "wide": dict(T=70, K=3, V=17, state=True),
    "extreme": dict(T=70, spread=3000.0, theta=True, state=True),
    "whole": dict(T=33, causal=False, theta=True),
    "whole documents": dict(B=1, T=33, causal=False, documents=[0, 0, 5, 33], spread=5.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_chunked_is_the_definition(case):
    case = dict(case)
    options = {"causal": case.pop("causal")} if "causal" in case else {}
    call = make(**case) | options
    assert_same(everything(call), everything(call, "reference"))


@settings(max_examples=25)
@given(
    B=st.integers(1, 2), T=st.integers(1, 80), H=st.integers(1, 2), K=st.integers(1, 5), V=st.integers(1, 5),
    theta=st.booleans(), state=st.booleans(), causal=st.booleans(), spread=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    masked=st.integers(0, 3), chunk=st.sampled_from([4, 16, 64]), segment=st.sampled_from([1, 2**20]),
    halves=st.booleans(),
)  # fmt: skip
@example(1, 2, 1, 1, 1, False, False, True, 1e4, 0, 4, 1, False)  # a masked token after a very negative logit
def test_any_shape(B, T, H, K, V, theta, state, causal, spread, masked, chunk, segment, halves):
    call = make(B, T, H, K, V, theta=theta, state=state and causal, spread=spread, seed=T) | {"causal": causal}
    k = call["k"].detach().clone()
    k[:, :masked] = -INF
    k[:, T // 2 :: 5, 0] = -INF
    call["k"] = k.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK", chunk)
        patch.setattr(chunked, "SEGMENT_CPU", segment)
        if halves:
            patch.setattr(chunked, "FLOOR", {torch.float64: INF})
        assert_same(everything(call), everything(call, "reference"))


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 60), max_size=5), theta=st.booleans(), causal=st.booleans())
def test_documents_are_separate_calls(cuts, theta, causal):
    edges = [0, *sorted(cuts), 60]
    call = make(1, 60, theta=theta, documents=edges) | {"causal": causal}
    o, S, z = run(call)
    alone = {name: x for name, x in call.items() if name != "cu_seqlens"}
    for i, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        if start == end:
            assert (S[i].abs().max(), z[i].max()) == (0.0, -INF)
            continue
        part = run(alone | {name: call[name][:, start:end] for name in "qkv"})
        assert_same((o[:, start:end], S[i : i + 1], z[i : i + 1]), part)


@pytest.mark.parametrize("theta", [False, True])
def test_steps_equal_the_sequence_and_continue_from_a_prefill(theta):
    call = make(T=90, theta=theta)
    call = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    expected = run(call)
    prefix = call | {name: call[name][:, :70] for name in "qkv"}
    o, S, z = run(prefix)
    outputs = [o]
    for t in range(70, 90):
        positions = torch.full((2,), t) if theta else None
        token = [call[name][:, t] for name in "qkv"]
        o = additive_step(*token, (S, z), theta=call.get("theta"), positions=positions, scale=0.7)
        outputs.append(o[:, None])
    assert_same((torch.cat(outputs, 1), S, z), expected)

    rest = call | {name: call[name][:, 70:] for name in "qkv"}
    rest |= {"initial_state": run(prefix)[1:], "positions": torch.arange(70, 90).expand(2, -1)}
    o, S, z = run(rest)
    assert_same((o, S, z), (expected[0][:, 70:], *expected[1:]))


def test_step_from_nothing_and_with_masked_tokens():
    call = make(T=6)
    k = call["k"].detach().clone()
    k[:, :2] = -INF
    k[0, 4] = -INF
    call["k"] = k
    expected = run({name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()})
    S, z = torch.zeros_like(expected[1]), torch.full_like(expected[2], -INF)
    steps = [additive_step(call["q"][:, t], k[:, t], call["v"][:, t], (S, z), scale=0.7) for t in range(6)]
    assert_same((torch.stack(steps, 1), S, z), expected)
    assert expected[0][:, :2].abs().max() == 0


def test_the_state_is_a_running_average_and_the_last_token_sees_it_all():
    """Identities of the paper: keys and decays add up to one, and the causal last token is the non-causal one."""
    call = make(B=1, T=100, H=1, K=4, V=1, theta=True)
    ones = call | {"v": torch.ones_like(call["v"])}
    del ones["theta"]
    _, S, _ = run(ones)
    torch.testing.assert_close(S, torch.ones_like(S), rtol=0, atol=1e-12)

    causal, whole = run(call), run(call | {"causal": False})
    assert_same((causal[0][:, -1], *causal[1:]), (whole[0][:, -1], *whole[1:]))
    softmax = call["k"].softmax(1)
    assert_same(
        [run({"q": call["q"], "k": call["k"], "v": call["v"]})[1]],
        [softmax[0, :, 0].T[None, None] @ call["v"][:, :, 0]],
    )


def test_rotated_products_depend_on_distance_only():
    call = make(T=20, theta=True)
    moved = call | {"positions": torch.arange(20).expand(2, -1) + 1000}
    assert_same(run(call)[:1], run(moved)[:1])


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck(causal):
    call = make(B=1, T=5, H=2, K=2, V=2, theta=True, state=causal)
    names = ["q", "k", "v", "theta"]

    def function(*tensors):
        state = {"initial_state": tensors[4:]} if causal else {}
        return run(call | dict(zip(names, tensors, strict=False)) | state | {"causal": causal})

    assert torch.autograd.gradcheck(function, [call[name] for name in names] + list(call.get("initial_state", ())))


def test_any_strides():
    """Arguments laid out otherwise give the same, and results are contiguous, as the fake implementation says."""
    call = make(B=2, T=9, theta=True, state=True)
    other = {name: permuted(x) for name, x in call.items()}
    expected, actual = everything(call), everything(other)
    assert_same(actual, expected)
    op = torch.ops.linnet.additive
    outputs = op(
        other["q"], other["k"], other["v"], other["theta"], None, *other["initial_state"], None, 0.7, True, "none"
    )
    assert all(x.is_contiguous() for x in outputs)
    arguments = [other[name] for name in ("q", "k", "v", "theta")]
    grads = torch.ops.linnet.additive_backward(
        *arguments, None, *other["initial_state"], None, 0.7, True, "none", *outputs[1:], *map(permuted, outputs)
    )
    assert all(x.is_contiguous() for x in grads)


def test_operator_registration():
    call = make(B=1, T=9, theta=True, state=True, documents=[0, 4, 9])
    S, z = call["initial_state"]
    for args in (
        (call["q"], call["k"], call["v"], call["theta"], None, S, z, call["cu_seqlens"], 1.0, True, "silu"),
        (call["q"], call["k"], call["v"], None, None, None, None, None, 1.0, False, "none"),
        (call["q"], call["k"], call["v"], call["theta"], None, None, None, None, 1.0, True, "none", False),
        (call["q"], call["k"], call["v"], None, None, None, None, None, 1.0, False, "silu", False),
    ):
        torch.library.opcheck(torch.ops.linnet.additive.default, args)


@pytest.mark.parametrize("causal", [True, False])
def test_a_state_that_was_not_requested_is_not_made(causal):
    """Causal: neither the final one nor the gradient of a first one that is not there; the rest is the same."""
    calls = [make(T=20, theta=True, seed=i) | {"causal": causal} for i in range(2)]
    q, k, v, theta = (calls[0][name].detach() for name in ("q", "k", "v", "theta"))
    outputs = torch.ops.linnet.additive(q, k, v, theta, None, None, None, None, 0.7, causal, "none", False)
    assert [x.numel() == 0 for x in outputs] == [False, causal, causal]
    arguments = (q, k, v, theta, None, None, None, None, 0.7, causal, "none")
    found = torch.ops.linnet.additive_backward(*arguments, *outputs[1:], torch.ones_like(v), None, None)
    assert [x.numel() == 0 for x in found] == [False] * 4 + [True] * 2

    def run_without(q, k, v, theta):
        return additive_attention(q, k, v, theta=theta, scale=0.7, causal=causal)[0]

    def differentiate(o, inputs):
        return torch.autograd.grad(o.sin().sum(), inputs)

    tensors = [leaves(call) for call in calls]
    expected = [run(call)[0] for call in calls]
    stacked = [torch.stack(x).detach().requires_grad_() for x in zip(*tensors, strict=True)]
    together = torch.vmap(run_without)(*stacked)
    assert_same([*together, run_without(*tensors[0])], [*expected, expected[0]])
    apart = [differentiate(o, x) for o, x in zip(expected, tensors, strict=True)]
    assert_same(differentiate(together, stacked), [torch.stack(x) for x in zip(*apart, strict=True)])


def test_compiles_whole_and_gives_the_same():
    call = make(B=1, T=40, theta=True, state=True, documents=[0, 15, 40])
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(compiled(call), run(call))
    plain = everything(call)
    loss = sum((x.sin()).sum() for x in compiled(call))
    expected = sum((x.sin()).sum() for x in run(call))
    assert_same(torch.autograd.grad(loss, leaves(call)), torch.autograd.grad(expected, leaves(call)))
    assert len(plain) == 3 + 6


@pytest.mark.parametrize("shared", ["nothing", "theta", "no theta", "positions apart", "documents", "documents apart"])
def test_vmap_equals_one_model_at_a_time(shared):
    models = 3
    call = {
        name: torch.stack([make(B=1, T=11, theta=True, seed=i)[name].detach() for i in range(models)])
        for name in ("q", "k", "v", "theta")
    }
    dims = dict.fromkeys(call, 0)
    if shared == "theta":
        call["theta"], dims["theta"] = call["theta"][0], None
    elif shared == "no theta":
        del call["theta"], dims["theta"]
        call["v"], dims["v"] = call["v"].movedim(0, 2), 2
    elif shared == "positions apart":
        call["positions"], dims["positions"] = torch.stack([torch.arange(11)[None] * (i + 1) for i in range(models)]), 0
    elif shared == "documents":
        call["cu_seqlens"], dims["cu_seqlens"] = torch.tensor([0, 4, 4, 11], dtype=torch.int32), None
    elif shared == "documents apart":
        call["cu_seqlens"] = torch.tensor([[0, 4, 11], [0, 1, 11], [0, 0, 11]], dtype=torch.int32)
        dims["cu_seqlens"] = 0
    names, in_dims = list(call), tuple(dims.values())
    tensors = [x.requires_grad_(x.is_floating_point()) for x in call.values()]

    def function(*tensors):
        return run(dict(zip(names, tensors, strict=True)))

    def grads(outputs):
        loss = sum((x.masked_fill(x == -INF, 0.0) + 1).sin().sum() for x in outputs)
        return torch.autograd.grad(loss, [x for x in tensors if x.requires_grad])

    together = torch.vmap(function, in_dims)(*tensors)
    apart = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims, strict=True)))
        for i in range(models)
    ]
    apart = [torch.stack(parts) for parts in zip(*apart, strict=True)]
    assert_same(together, apart)
    assert_same(grads(together), grads(apart))


@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("documents", [None, [0, 4, 9]])
def test_vmap_of_the_backward(theta, documents):
    """Batched cotangents go through the rule of the backward operator."""
    call = make(B=1, T=9, theta=theta, state=True, documents=documents)
    outputs = run(call)
    cotangents = [torch.randn(3, *x.shape, dtype=x.dtype) for x in outputs]
    together = torch.autograd.grad(outputs, leaves(call), cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(outputs, leaves(call), [x[i] for x in cotangents], retain_graph=True)
        assert_same([x[i] for x in together], alone)


def test_flops_are_counted_on_the_meta_device():
    B, T, H, K, V = 2, 256, 3, 16, 8
    q, k, v = (torch.empty(B, T, H, d, device="meta", requires_grad=True) for d in (K, K, V))
    theta = torch.empty(H, K, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        o, _ = additive_attention(q, k, v, theta=theta)
    forward = B * T * H * (2 * 64 * (2 * K + V) + 4 * 2 * K * V)
    assert counter.get_total_flops() == forward
    with counter:
        o.sum().backward()
    assert counter.get_total_flops() == B * T * H * (2 * 64 * (6 * K + 2 * V) + 10 * 2 * K * V)
    with FlopCounterMode(display=False) as counter:
        additive_attention(q, k, v, causal=False)
    assert counter.get_total_flops() == B * T * H * 4 * K * V


@pytest.mark.parametrize("form", ["normal", "halves"])
@pytest.mark.parametrize("shape", ["jump", "fall", "ramp", "noise"])
def test_extreme_logits_in_float32(shape, form, monkeypatch):
    """Logits of 1e4 and jumps of that size anywhere in a chunk: the definition's values, but for z, which has steps of
    1e-3 there in float32."""
    call = make(B=1, T=150, theta=True)
    t = torch.arange(150.0, dtype=torch.float64)[None, :, None, None]
    added = {
        "jump": 1e4 * (t >= 30), "fall": -1e4 * (t >= 30), "ramp": 60 * t,
        "noise": 1e4 * torch.randn(1, 150, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    }[shape]  # fmt: skip
    call["k"] = (call["k"].detach() + added).float().double().requires_grad_()
    if form == "halves":
        monkeypatch.setattr(chunked, "FLOOR", {torch.float32: INF, torch.float64: INF})
    exact = everything(call, "reference")
    single = {
        name: x.detach().float().requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in call.items()
    }
    assert_same([x.double() for x in everything(single)], exact, 3e-3)


@pytest.mark.parametrize("first", [0, 40])
def test_a_large_finite_mask_is_a_mask(first):
    call = make(T=100, theta=True)
    call = {name: x.detach().float() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    masked, finite = call["k"].clone(), call["k"].clone()
    masked[:, first : first + 20], finite[:, first : first + 20] = -INF, -1e9
    expected, actual = run(call | {"k": masked}), run(call | {"k": finite})
    assert actual[0].isfinite().all()
    assert_near((actual[0][:, first + 20 :], *actual[1:]), (expected[0][:, first + 20 :], *expected[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(dtype):
    call = make(T=100, theta=True, dtype=dtype)
    exact = {name: x.detach().double().requires_grad_() if name in ("q", "k", "v", "theta") else x
             for name, x in call.items()}  # fmt: skip
    (o, S, z), expected = run(call), run(exact)
    assert (o.dtype, S.dtype, z.dtype) == (dtype, torch.float32, torch.float32)
    assert_near((o, S, z), expected)
    grads = torch.autograd.grad(o.sum(), leaves(call))
    assert all(grad.dtype == dtype for grad in grads)
    assert_near(grads, torch.autograd.grad(expected[0].sum(), leaves(exact)))


def test_a_long_sequence_keeps_its_digits_and_its_memory():
    T = 131_072
    generator = torch.Generator().manual_seed(0)
    q, k, v = (1 + torch.randn(1, T, 1, d, generator=generator) for d in (4, 4, 2))  # no sum is near 0
    with torch.no_grad():
        o, (S, z) = additive_attention(q, k, v, output_final_state=True)
    exact = torch.einsum("tk,tv->kv", k[0, :, 0].double().softmax(0), v[0, :, 0].double())
    expected = [exact, k[0, :, 0].double().logsumexp(0), q[0, -1, 0].double() @ exact]
    assert_near([S[0, 0], z[0, 0], o[0, -1, 0]], expected, 5e-5)  # 2,048 chunks, each with its roundings


def test_bad_arguments_name_the_shape():
    q, k, v = torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 3, 6)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    short = torch.tensor([0, 4], dtype=torch.int32)
    good = dict(q=q, k=k, v=v)
    for message, wrong in (
        (r"q \[2, 5, 3, 4\].* k \[2, 5, 3, 3\]", dict(k=k[..., :3])),
        (r"v \[2, 4, 3, 6\]", dict(v=v[:, :4])),
        ("torch.int64", dict(v=v.long())),
        (r"theta.* \[3, 4\]", dict(theta=torch.zeros(4))),
        (r"positions.* \[2, 5\]", dict(positions=torch.zeros(2, 5))),
        ("causal=True", dict(causal=False, initial_state=(q, k))),
        (r"initial_state.* \[2, 5, 3, 4\].* \[2, 3, 4, 6\]", dict(initial_state=(q, k))),
        (r"initial_state.* \[2, 3, 4\].*torch.float32", dict(initial_state=(torch.zeros(2, 3, 4, 6), k))),
        ("batch.* 2", dict(cu_seqlens=offsets)),
        (r"cu_seqlens.* 4 .* 5", dict(q=q[:1], k=k[:1], v=v[:1], cu_seqlens=short)),
    ):
        with pytest.raises(ValueError, match=message):
            run(good | wrong)
    with pytest.raises(ValueError, match="-inf"), backend.debug():
        run(dict(q=q, k=k + INF, v=v))
    S, z = torch.zeros(2, 3, 4, 6), torch.zeros(2, 3, 4)
    token = (q[:, 0], k[:, 0], v[:, 0])
    for message, args, options in (
        (r"additive_step.*\[2, 5, 3, 4\]", (q, k, v, (S, z)), {}),
        (r"S \[2, 3, 8, 6\]", (*token, (S, z)), dict(theta=torch.zeros(3, 4), positions=torch.zeros(2))),
        ("theta.*positions|positions.*theta", (*token, (S, z)), dict(theta=torch.zeros(3, 4))),
        (r"positions.* \[2\]", (*token, (S, z)), dict(theta=torch.zeros(3, 4), positions=torch.zeros(3))),
        ("float32.*float64", (*token, (S.half(), z.half())), {}),
    ):
        with pytest.raises(ValueError, match=message):
            additive_step(*args, **options)


def test_autocast_does_not_reach_inside():
    call = {name: x.detach().float() if isinstance(x, torch.Tensor) else x for name, x in make(theta=True).items()}
    expected = run(call)
    with torch.autocast("cpu", torch.bfloat16):
        actual, definition = run(call), run(call, "reference")
    assert_same(actual, expected, 0.0)
    assert_near(definition, expected)


@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("own_positions", [False, True])
def test_rows_without_causality_may_be_taken_a_few_at_a_time(monkeypatch, theta, own_positions):
    call = make(B=5, T=6, theta=theta) | {"causal": False}
    if theta:
        rows = 5 if own_positions else 1
        call["positions"] = torch.randint(0, 3, (rows, 6, 2), dtype=torch.int32)
    found = []
    for budget in (chunked.ROWS_CPU, 2 * 6 * 2 * 8):  # all rows, and two at a time
        monkeypatch.setattr(chunked, "ROWS_CPU", budget)
        outputs = run(call)
        loss = sum((out * torch.linspace(0.1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
        found.append((*outputs, *torch.autograd.grad(loss, leaves(call))))
    assert len(chunked._cuts(call["q"], call["v"], call.get("theta"), None)) == (3 if theta else 2)
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-13, atol=1e-13)
