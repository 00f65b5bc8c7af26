"""The diagonal-plus-low-rank rule: the definition against the chunked form and the step, for any decay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import TOLERANCE, assert_near
from registered import check_op
from torch.func import vmap
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import chunks, debug, dplr_rule, dplr_step, gated_delta_rule, use_backend
from linnet.ops.dplr import dplr
from linnet.train.recompute import _policy

TENSORS = ("q", "k", "v", "log_decay", "a", "b", "initial_state")
TOKENS = TENSORS[:6]


def make(
    B=2, T=37, H=2, K=3, V=5, *, strength=0.6065, resets=0, rate=1.0, state=True, offsets=None, dtype=torch.float64,
    seed=0,
):  # fmt: skip
    """As RWKV-7: b of unit norm, a = -rate b with rates in [0, `rate`] per channel; log-decays in [-strength, 0], -inf
    at every `resets`-th token."""
    generator, wide = torch.Generator().manual_seed(seed), torch.promote_types(dtype, torch.float32)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform():
        return torch.rand(B, T, H, K, generator=generator, dtype=torch.float64)

    call = {name: normal(B, T, H, V if name == "v" else K) for name in ("q", "k", "v")}
    call["b"] = normalize(normal(B, T, H, K), dim=-1)
    call["a"], log_decay = -rate * uniform() * call["b"], -strength * uniform()
    if resets:
        log_decay[:, ::resets] = -float("inf")
    call = {name: x.to(dtype) for name, x in call.items()} | {"log_decay": log_decay.to(wide)}
    N = B if offsets is None else len(offsets) - 1
    call["initial_state"] = normal(N, H, K, V).to(wide) if state else None
    call = {name: None if call[name] is None else call[name].requires_grad_() for name in TENSORS}
    if offsets is not None:
        call["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    return call | {"scale": 0.7}


def is_learned(name, x):
    return name in TENSORS and x is not None


def detached(call):
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def widened(call, dtype=torch.float64):
    return {name: x.detach().to(dtype).requires_grad_() if is_learned(name, x) else x for name, x in call.items()}


def everything(call, form="chunked"):
    """o, the final state, and the gradients of all that has one, for a loss that reads both results."""
    with use_backend(form):
        results = dplr_rule(**call, output_final_state=True)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))
    return [*results, *torch.autograd.grad(loss, [x for name, x in call.items() if is_learned(name, x)])]


def assert_same(actual, expected, tolerance=1e-12):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * max(1.0, e.abs().max().item()))


@settings(max_examples=30)
@given(
    T=st.one_of(st.sampled_from([1, 2, 63, 64, 65, 128]), st.integers(1, 200)),
    K=st.integers(1, 4),
    V=st.integers(1, 4),
    strength=st.sampled_from([0.0, 0.01, 0.6065, 30.0, 1e4]),
    resets=st.sampled_from([0, 1, 7]),
    rate=st.sampled_from([0.0, 1.0, 2.0]),
    state=st.booleans(),
    segment=st.sampled_from([1, 2**9, 2**18]),
)
def test_chunked_is_the_definition(T, K, V, strength, resets, rate, state, segment):
    rate = min(rate, 1.0) if strength else rate / 2  # below what stretches a state
    call = make(2, T, 2, K, V, strength=strength, resets=resets, rate=rate, state=state, seed=T)
    with pytest.MonkeyPatch.context() as patch:  # segments of one chunk, of a few, of all
        patch.setattr(chunks, "SEGMENT_ELEMENTS", segment)
        actual = everything(call)
    assert_same(actual, everything(call, "reference"), 1e-10)


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("log_decay", [0.0, -1e-8, -0.6065, -20.0])
def test_gates_at_their_extremes(log_decay, rate):
    call = make(1, 150, 1, K=16, V=8)
    call["log_decay"] = torch.full_like(call["log_decay"], log_decay).requires_grad_()
    call["a"] = (-rate * call["b"]).detach().requires_grad_()
    expected = everything(call, "reference")
    assert_same(everything(call), expected)
    assert_near(everything(widened(call, torch.float32)), expected, least=1e-4)


def test_the_read_is_before_the_decay():
    """By hand: the second token forgets all that was, after it has read it."""
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    decay = torch.tensor([0.0, -float("inf")], dtype=torch.float64).view(1, 2, 1, 1)
    v = torch.tensor([3.0, 10.0], dtype=torch.float64).view(1, 2, 1, 1)
    o, state = dplr_rule(one, one, v, decay, -0.5 * one, one, output_final_state=True)
    assert o.flatten().tolist() == [3.0, 8.5] and state.item() == 8.5


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
        assert_same(dplr_rule(**part, output_final_state=True), [actual[0][:, start:end], actual[1][i : i + 1]])


def test_a_sequence_in_two_calls_and_in_steps():
    call = detached(make(T=150))
    expected = dplr_rule(**call, output_final_state=True)
    state, parts = call["initial_state"], []
    for start, end in ((0, 70), (70, 150)):
        part = call | {name: call[name][:, start:end] for name in TOKENS}
        o, state = dplr_rule(**part | {"initial_state": state}, output_final_state=True)
        parts.append(o)
    assert_same([torch.cat(parts, 1), state], expected)
    state, steps = call["initial_state"].clone(), []
    for t in range(150):
        steps.append(dplr_step(*(call[name][:, t] for name in TOKENS), state, scale=call["scale"]))
    assert_same([torch.stack(steps, 1), state], expected)


def test_gradcheck():
    call = make(B=1, T=5, H=1, K=2, V=3)

    def run(*tensors):
        return dplr_rule(**(call | dict(zip(TENSORS, tensors, strict=True))), output_final_state=True)

    assert torch.autograd.gradcheck(run, [call[name] for name in TENSORS])


def test_a_rule_whose_two_vectors_are_the_key_is_the_gated_delta_rule():
    """Without a decay the order of decay and read does not matter: a = -beta k, b = k, values beta v."""
    call = detached(make(T=100, strength=0.0))
    key, beta = call["b"], torch.rand(2, 100, 2, dtype=torch.float64)
    call |= {"k": key, "a": -beta[..., None] * key, "v": beta[..., None] * call["v"]}
    state = {"initial_state": call["initial_state"], "scale": call["scale"], "output_final_state": True}
    expected = gated_delta_rule(call["q"], key, call["v"] / beta[..., None], None, beta, **state)
    assert_same(dplr_rule(**call, output_final_state=True), expected, 1e-11)


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


def test_arguments_stay_as_they_were():
    call = make(B=1, T=64, H=1)
    before = {name: x.detach().clone() for name, x in call.items() if is_learned(name, x)}
    everything(call)
    for name, x in before.items():
        assert torch.equal(call[name], x), name


VARIANTS = [None, [0, 20, 20, 30]]


@pytest.mark.parametrize("offsets", VARIANTS)
def test_opcheck(offsets):
    call = make(1, 30, offsets=offsets)
    arguments = [call.get(name) for name in (*TENSORS, "cu_seqlens", "scale")]
    for return_final_state in (True, False):
        check_op(dplr.forward, (*arguments, return_final_state), symbolic=return_final_state == (offsets is None))


def test_compiles_in_one_graph():
    call = make(T=70)
    compiled = torch.compile(
        lambda **call: dplr_rule(**call, output_final_state=True), fullgraph=True, backend="aot_eager"
    )
    assert_same(compiled(**call), dplr_rule(**call, output_final_state=True))


@pytest.mark.parametrize("offsets", VARIANTS)
def test_vmap_is_a_loop(offsets):
    calls = [make(1, 30, offsets=offsets, seed=seed) for seed in range(3)]

    def run(*tensors):
        return dplr_rule(**(calls[0] | dict(zip(TENSORS, tensors, strict=True))), output_final_state=True)

    batched = vmap(run, in_dims=-1)(*(torch.stack([call[name] for call in calls], -1) for name in TENSORS))
    each = [run(*(call[name] for name in TENSORS)) for call in calls]
    looped = [torch.stack(x) for x in zip(*each, strict=True)]
    learned = [call[name] for call in calls for name in TENSORS]
    assert_same(batched, looped)
    grads = (torch.autograd.grad(sum(x.sin().sum() for x in results), learned) for results in (batched, looped))
    assert_same(*grads)


def test_selective_recomputation_runs_the_rule_once(monkeypatch):
    from linnet.ops.dplr import chunked

    call, runs = make(T=70), []
    forward = chunked.dplr_forward
    monkeypatch.setattr(chunked, "dplr_forward", lambda *arguments: runs.append(0) or forward(*arguments))
    context = {"context_fn": lambda: create_selective_checkpoint_contexts(_policy)}
    o = checkpoint(lambda: dplr_rule(**call)[0].sin(), use_reentrant=False, **context)
    expected = torch.autograd.grad(dplr_rule(**call)[0].sin().sum(), call["a"])
    assert_same(torch.autograd.grad(o.sum(), call["a"]), expected)
    assert len(runs) == 2


def test_flops_from_shapes_alone():
    """Per token and head of K = V = 16: C (6 K + 2/3 C + 8 V) and 8 x 256; the tail has 36 tokens."""
    call = detached(make(1, 100, 2, K=16, V=16, dtype=torch.float32))
    counter = FlopCounterMode(display=False)
    with counter:
        dplr_rule(**{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()})
    assert counter.get_total_flops() == 2 * ((64**2 + 36**2) * (96 + 42 + 128) + 100 * 8 * 256)


BAD = {
    r"k \[2, 37, 2, 4\]": lambda c: c | {"k": torch.zeros(2, 37, 2, 4)},
    r"v \[2, 37, 3, 5\]": lambda c: c | {"v": torch.zeros(2, 37, 3, 5)},
    r"q \[2, 37, 3\].* \[B, T, H, K\]": lambda c: c | {"q": c["q"][:, :, 0]},
    r"log_decay .*\[2, 37, 2\].*\[2, 37, 2, 3\]": lambda c: c | {"log_decay": c["log_decay"][..., 0]},
    r"a has shape \[2, 37, 1, 3\]": lambda c: c | {"a": c["a"][:, :, :1]},
    r"b .*torch.int64": lambda c: c | {"b": c["b"].long()},
    r"b .*meta.*q": lambda c: c | {"b": c["b"].to("meta")},
    r"initial_state.* \[2, 2, 5, 3\].* \[2, 2, 3, 5\]": lambda c: c | {"initial_state": c["initial_state"].mT},
    "batch.* 2": lambda c: c | {"cu_seqlens": torch.tensor([0, 37], dtype=torch.int32)},
    "log_decay is float16": lambda c: c | {"log_decay": c["log_decay"].half().requires_grad_()},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        dplr_rule(**BAD[message](detached(make())))


def test_step_refuses_wrong_shapes_and_narrow_states():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"state \[2, 3, 5, 4\]"):
        dplr_step(x, x, x, x, x, x, torch.zeros(2, 3, 5, 4))
    with pytest.raises(ValueError, match="state has dtype torch.bfloat16"):
        dplr_step(x, x, x, x, x, x, torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16))


def test_debug_looks_at_values():
    call = detached(make())
    call["log_decay"] = call["log_decay"] + 1.5
    dplr_rule(**call)
    with debug(), pytest.raises(ValueError, match="log_decay.* 1.4"):
        dplr_rule(**call)
