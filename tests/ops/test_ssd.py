"""Scalar decay: the definition against the chunked form and the step, for value heads that share keys and any decay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import TOLERANCE, assert_near
from registered import check_op
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import chunks, debug, gated_linear_attention, lightning_attention, ssd, ssd_step, use_backend
from linnet.ops.ssd import dual

LEARNED = ("q", "k", "v", "log_decay", "times", "skip", "initial_state")
TOKENS = ("q", "k", "v", "log_decay")


def make(
    B=2, T=37, H=2, group=2, K=3, V=5, *, strength=1.0, resets=0, state=True, offsets=None, factors=None,
    dtype=torch.float64, seed=0,
):  # fmt: skip
    """Log-decays in [-strength, 0], -inf at every `resets`-th token. `factors`: "head" has times and one skip for all
    tokens, "token" times and a skip of each, "skip" the latter alone."""
    generator, wide = torch.Generator().manual_seed(seed), torch.promote_types(dtype, torch.float32)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(to)

    log_decay = -strength * torch.rand(B, T, H * group, generator=generator, dtype=torch.float64)
    if resets:
        log_decay[:, ::resets] = -float("inf")
    N = B if offsets is None else len(offsets) - 1
    call = dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, H * group, V), log_decay=log_decay.to(wide))
    if factors in ("head", "token"):
        call["times"] = normal(B, T, H * group, to=wide)
    if factors:
        call["skip"] = normal(*((1, 1) if factors == "head" else (B, T)), H * group, to=wide)
    call["initial_state"] = normal(N, H * group, K, V, to=wide) if state else None
    if offsets is not None:
        call["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    return {name: x.requires_grad_() if is_learned(name, x) else x for name, x in call.items()} | {"scale": 0.7}


def is_learned(name, x):
    return name in LEARNED and x is not None


def detached(call):
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def widened(call, dtype=torch.float64):
    return {name: x.detach().to(dtype).requires_grad_() if is_learned(name, x) else x for name, x in call.items()}


def everything(call, form="chunked", op=ssd):
    """o, the final state, and the gradients of all that has one, for a loss that reads both results."""
    with use_backend(form):
        results = op(**call, output_final_state=True)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))
    return [*results, *torch.autograd.grad(loss, [x for name, x in call.items() if is_learned(name, x)])]


def assert_same(actual, expected, tolerance=1e-12):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * max(1.0, e.abs().max().item()))


@settings(max_examples=40)
@given(
    T=st.one_of(st.sampled_from([1, 2, 63, 64, 65, 128]), st.integers(1, 200)),
    H=st.integers(1, 2),
    group=st.integers(1, 3),
    K=st.integers(1, 4),
    V=st.integers(1, 4),
    strength=st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e4]),
    resets=st.sampled_from([0, 1, 7]),
    state=st.booleans(),
    factors=st.sampled_from([None, "head", "token", "skip"]),
    segment=st.sampled_from([1, 2**11, 2**18]),
)
def test_chunked_is_the_definition(T, H, group, K, V, strength, resets, state, factors, segment):
    call = make(2, T, H, group, K, V, strength=strength, resets=resets, state=state, factors=factors, seed=T)
    with pytest.MonkeyPatch.context() as patch:  # segments of one chunk, of a few, of all
        patch.setattr(chunks, "SEGMENT_ELEMENTS", segment)
        actual = everything(call)
    assert_same(actual, everything(call, "reference"))


@pytest.mark.parametrize("log_decay", [0.0, -1e-8, -20.0, -1e4])
def test_decays_at_their_extremes(log_decay):
    call = make(1, 150, 1, K=16, V=8)
    call["log_decay"] = torch.full_like(call["log_decay"], log_decay).requires_grad_()
    expected = everything(call, "reference")
    assert_same(everything(call), expected)
    assert_near(everything(widened(call, torch.float32)), expected, least=1e-4)


@pytest.mark.parametrize("offsets", [[0, 90], [0, 30, 30, 31, 90], [0, 1, 70, 90]])
def test_documents_are_separate_calls(offsets):
    call = make(1, 90, offsets=offsets)
    actual = everything(call)
    assert_same(actual, everything(call, "reference"))
    plain = detached(call)
    plain.pop("cu_seqlens")
    for i, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if start == end:
            assert_same([actual[1][i]], [plain["initial_state"][i]])
            continue
        part = plain | {name: plain[name][:, start:end] for name in TOKENS}
        part["initial_state"] = plain["initial_state"][i : i + 1]
        assert_same(ssd(**part, output_final_state=True), [actual[0][:, start:end], actual[1][i : i + 1]])


def test_a_sequence_in_two_calls_and_in_steps():
    call = detached(make(T=150))
    expected = ssd(**call, output_final_state=True)
    state, parts = call["initial_state"], []
    for start, end in ((0, 70), (70, 150)):
        part = call | {name: call[name][:, start:end] for name in TOKENS}
        o, state = ssd(**part | {"initial_state": state}, output_final_state=True)
        parts.append(o)
    assert_same([torch.cat(parts, 1), state], expected)
    state = call["initial_state"].clone()
    steps = [ssd_step(*(call[name][:, t] for name in TOKENS), state, scale=call["scale"]) for t in range(150)]
    assert_same([torch.stack(steps, 1), state], expected)


@pytest.mark.parametrize("factors", ["head", "token"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_factors_are_those_of_values(dtype, factors):
    """To the bit: what enters the state is rounded as the values are, and the skip is added to rounded outputs."""
    call = make(T=70, factors=factors, dtype=dtype)

    def apart(v, times, skip, **more):
        o, state = ssd(v=(times[..., None] * v).to(v.dtype), **more)
        return (o + skip[..., None] * v).to(v.dtype), state

    for actual, expected in zip(everything(call), everything(call, op=apart), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("factors", [None, "head", "token"])
def test_gradcheck(factors):
    call = make(B=1, T=5, H=1, group=2, K=2, V=3, factors=factors)
    learned = {name: x for name, x in call.items() if is_learned(name, x)}

    def run(*tensors):
        return ssd(**(call | dict(zip(learned, tensors, strict=True))), output_final_state=True)

    assert torch.autograd.gradcheck(run, list(learned.values()))


def test_it_is_gated_linear_attention_with_one_decay_for_all_channels():
    def gated(q, k, log_decay, **more):
        q, k = (x.repeat_interleave(2, 2) for x in (q, k))
        return gated_linear_attention(q, k, log_decay=log_decay[..., None].expand_as(q), **more)

    call = make(T=100, resets=30)
    assert_same(everything(call), everything(call, op=gated))


def test_constant_decays_are_lightning_attention():
    call = detached(make(T=100, group=1))
    constant = torch.tensor([-0.1, -2.0], dtype=torch.float64)
    call["log_decay"] = constant.expand_as(call["log_decay"])
    expected = lightning_attention(**call | {"log_decay": constant}, output_final_state=True)
    assert_same(ssd(**call, output_final_state=True), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    call = make(T=200, K=16, V=16, dtype=dtype)
    actual = everything(call)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert_near(actual, everything(widened(call)), TOLERANCE[dtype])


def test_a_strong_decay_anywhere_is_precise_in_float32():
    call = make(T=300, K=16, V=16, strength=0.1)
    log_decay = call["log_decay"].detach().clone()
    log_decay[:, ::5] = -1e4
    call["log_decay"] = log_decay.requires_grad_()
    assert_near(everything(widened(call, torch.float32)), everything(call))


def test_weak_decays_do_not_drift_in_float32():
    """float32 has no decay between 1 and 1 - 6e-8, so a product of rounded decays forgets these."""
    call = detached(make(1, 20_000, 1, 1, K=2, V=2))
    call["log_decay"] = torch.full_like(call["log_decay"], -2e-8)
    _, final = ssd(
        **{name: x.float() if is_learned(name, x) else x for name, x in call.items()}, output_final_state=True
    )
    assert_near([final], [ssd(**call, output_final_state=True)[1]], 1e-6)


def test_arguments_stay_as_they_were():
    call = make(B=1, T=64, H=1, group=1)
    before = {name: x.detach().clone() for name, x in call.items() if is_learned(name, x)}
    everything(call)
    for name, x in before.items():
        assert torch.equal(call[name], x), name


def test_slices_of_wider_tensors_are_taken_as_they_are():
    call = make(T=70, K=4, V=4)
    expected = everything(call)
    wide = torch.cat([call[name].detach().flatten(2) for name in ("q", "k", "v")], -1).requires_grad_()
    q, k, v = wide.split([8, 8, 16], -1)
    sliced = {"q": q.unflatten(-1, (2, 4)), "k": k.unflatten(-1, (2, 4)), "v": v.unflatten(-1, (4, 4))}
    assert_same(everything(call | sliced), expected)


VARIANTS = [None, [0, 20, 20, 30]]


@pytest.mark.parametrize("offsets", VARIANTS)
def test_opcheck(offsets):
    call = make(1, 30, offsets=offsets, factors=offsets and "head")
    arguments = [call.get(name) for name in (*LEARNED, "cu_seqlens", "scale")]
    for return_final_state in (True, False):
        check_op(dual.forward, (*arguments, return_final_state), symbolic=return_final_state == (offsets is None))


def test_compiles_in_one_graph():
    call = make(T=70, factors="token")
    compiled = torch.compile(lambda **call: ssd(**call, output_final_state=True), fullgraph=True, backend="aot_eager")
    assert_same(compiled(**call), ssd(**call, output_final_state=True))


@pytest.mark.parametrize("factors", [None, "head", "token"])
@pytest.mark.parametrize("offsets", VARIANTS)
def test_vmap_is_a_loop(offsets, factors):
    calls = [make(1, 30, offsets=offsets, factors=factors, seed=seed) for seed in range(3)]
    names = [name for name in LEARNED if name in calls[0]]

    def run(*tensors):
        return ssd(**(calls[0] | dict(zip(names, tensors, strict=True))), output_final_state=True)

    batched = vmap(run, in_dims=-1)(*(torch.stack([call[name] for call in calls], -1) for name in names))
    each = [run(*(call[name] for name in names)) for call in calls]
    looped = [torch.stack(x) for x in zip(*each, strict=True)]
    learned = [call[name] for call in calls for name in names]
    assert_same(batched, looped)
    grads = (torch.autograd.grad(sum(x.sin().sum() for x in results), learned) for results in (batched, looped))
    assert_same(*grads)


def test_flops_from_shapes_alone():
    """Two keys with two value heads each, K = V = 16; the tail has 36 tokens."""
    call = make(1, 100, K=16, V=16, dtype=torch.float32, state=False)
    call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    pairs, counter = 64**2 + 36**2, FlopCounterMode(display=False)
    with counter:
        o, _ = ssd(**call)
    forward = pairs * 2 * (2 * 16 + 4 * 16) + 4 * 100 * 4 * 256
    assert counter.get_total_flops() == forward
    with counter:
        torch.autograd.grad(o.sum(), call["q"])
    assert counter.get_total_flops() == pairs * (6 * 2 * 16 + 4 * 4 * 16) + 4 * 100 * 10 * 256


BAD = {
    r"k \[2, 37, 2, 4\]": lambda c: c | {"k": torch.zeros(2, 37, 2, 4)},
    "3 heads and q, k have 2": lambda c: c | {"v": torch.zeros(2, 37, 3, 5)},
    r"log_decay .*\[2, 37, 2\].*\[2, 37, 4\]": lambda c: c | {"log_decay": c["log_decay"][..., ::2]},
    r"log_decay .*torch.int64": lambda c: c | {"log_decay": c["log_decay"].long()},
    r"initial_state.* \[2, 4, 5, 3\].* \[2, 4, 3, 5\]": lambda c: c | {"initial_state": c["initial_state"].mT},
    "initial_state.*torch.float32.*torch.float64": lambda c: c | {"initial_state": c["initial_state"].float()},
    "batch.* 2": lambda c: c | {"cu_seqlens": torch.tensor([0, 37], dtype=torch.int32)},
    r"times has shape \[2, 37, 2\]; give \[2, 37, 4\]": lambda c: c | {"times": torch.zeros(2, 37, 2)},
    r"skip has shape \[4\]; give \[2, 37, 4\] or \[1, 1, 4\]": lambda c: c | {"skip": torch.zeros(4)},
    "log_decay is float16": lambda c: c | {"log_decay": c["log_decay"].half().requires_grad_()},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        ssd(**BAD[message](detached(make())))


def test_mixed_dtypes_are_computed_in_the_wider_one():
    call = make(T=70, dtype=torch.float32)
    mixed = call | {name: call[name].detach().bfloat16().requires_grad_() for name in ("q", "v")}
    actual = everything(mixed)
    assert [x.dtype for x in (actual[0], actual[2], actual[3])] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_near(actual, everything(widened(mixed)), TOLERANCE[torch.bfloat16])


def test_step_refuses_wrong_shapes():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"state has shape \[2, 3, 4, 5\]"):
        ssd_step(x, x, x, x[..., 0], torch.zeros(2, 3, 4, 5))


def test_debug_looks_at_values():
    call = detached(make())
    call["log_decay"] = call["log_decay"] + 1.5
    ssd(**call)
    with debug(), pytest.raises(ValueError, match="log_decay.* 1.4"):
        ssd(**call)
