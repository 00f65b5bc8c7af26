"""Gated linear attention: the definition against the chunked form and the step, for decays from 1 down to 0."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import TOLERANCE, assert_near, assert_same

from linnet.ops import chunks, debug, gated_linear_attention, gated_step, lightning_attention, use_backend

INF = float("inf")
TENSORS = ("q", "k", "v", "log_decay", "initial_state")
TOKENS = TENSORS[:4]


def make(B=2, T=37, H=2, K=3, V=5, *, strength=1.0, resets=0, state=True, offsets=None, dtype=torch.float64, seed=0):
    """Log-decays are uniform in [-strength, 0]; every `resets`-th token clears the first channel (log-decay -inf)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(to).requires_grad_()

    call = dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, H, V), scale=0.7)
    log_decay = -strength * torch.rand(B, T, H, K, generator=generator, dtype=torch.float64)
    if resets:
        log_decay[:, ::resets, :, 0] = -INF
    call["log_decay"] = log_decay.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    if state:
        N = B if offsets is None else len(offsets) - 1
        call["initial_state"] = normal(N, H, K, V, to=torch.promote_types(dtype, torch.float32))
    if offsets is not None:
        call["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    return call


def detached(call):
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def loss_of(results):
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    return sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))


def everything(call, form="chunked"):
    """o, the final state, and the gradients of all that has one, for a loss that reads both results."""
    with use_backend(form):
        results = gated_linear_attention(**call, output_final_state=True)
    leaves = [x for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return [*results, *torch.autograd.grad(loss_of(results), leaves)]


@settings(max_examples=25)
@given(
    B=st.integers(1, 2),
    T=st.one_of(st.sampled_from([1, 2, 63, 64, 65, 128]), st.integers(1, 200)),
    H=st.integers(1, 2),
    K=st.integers(1, 4),
    V=st.integers(1, 4),
    strength=st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e4]),
    resets=st.sampled_from([0, 1, 7]),
    state=st.booleans(),
    piece=st.sampled_from([1, 2**9, 2**18]),
)
def test_chunked_is_the_definition(B, T, H, K, V, strength, resets, state, piece):
    call = make(B, T, H, K, V, strength=strength, resets=resets, state=state, seed=T)
    with pytest.MonkeyPatch.context() as patch:  # segments of one chunk, of a few, of all
        patch.setattr(chunks, "SEGMENT_ELEMENTS", piece)
        actual = everything(call)
    assert_same(actual, everything(call, "reference"))


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(0, 90), max_size=4), state=st.booleans())
def test_documents_are_separate_calls(cuts, state):
    offsets = [0, *sorted(cuts), 90]
    call = make(1, 90, offsets=offsets, state=state)
    actual = everything(call)
    assert_same(actual, everything(call, "reference"))
    plain = detached(call)
    plain.pop("cu_seqlens")
    for i, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if start < end:
            part = plain | {name: plain[name][:, start:end] for name in TOKENS}
            if state:
                part["initial_state"] = plain["initial_state"][i : i + 1]
            o, final = gated_linear_attention(**part, output_final_state=True)
            assert_same([o, final], [actual[0][:, start:end], actual[1][i : i + 1]])
        else:
            expected = plain["initial_state"][i] if state else torch.zeros(2, 3, 5, dtype=torch.float64)
            assert_same([actual[1][i]], [expected])


UNEVEN = [0, 30, 30, 31, 60, 125, 155, 187, 200]


@pytest.mark.parametrize("K", [3, 12])
@pytest.mark.parametrize("final", [False, True])
def test_many_documents_together(K, final):
    """Narrow keys in the order of time, wide ones as padded rows of a few batches."""
    call = make(1, 200, K=K, offsets=UNEVEN, resets=7, strength=30.0)
    leaves = [call[name] for name in TENSORS]
    found = []
    for form in ("chunked", "reference"):
        with use_backend(form):
            results = gated_linear_attention(**call, output_final_state=final)[: 1 + final]
        found.append([*results, *torch.autograd.grad(loss_of(results), leaves)])
    assert_same(*found)


def test_a_sequence_in_two_calls():
    call = make(T=150)
    state, parts = call["initial_state"], []
    for start, end in ((0, 70), (70, 150)):
        part = call | {name: call[name][:, start:end] for name in TOKENS} | {"initial_state": state}
        o, state = gated_linear_attention(**part, output_final_state=True)
        parts.append(o)
    results = [torch.cat(parts, 1), state]
    names = [name for name in call if name in TENSORS]
    assert_same([*results, *torch.autograd.grad(loss_of(results), [call[x] for x in names])], everything(call))


@pytest.mark.parametrize("resets", [0, 7])
def test_steps_are_the_sequence(resets):
    call = detached(make(T=70, resets=resets))
    o, final = gated_linear_attention(**call, output_final_state=True)
    state = call["initial_state"].clone()
    steps = [gated_step(*(call[x][:, t] for x in TOKENS), state, scale=call["scale"]) for t in range(70)]
    assert_same([torch.stack(steps, 1), state], [o, final])


def test_gradcheck():
    call = make(B=1, T=5, K=2, V=3)

    def run(*tensors):
        return gated_linear_attention(**(call | dict(zip(TENSORS, tensors, strict=True))), output_final_state=True)

    assert torch.autograd.gradcheck(run, [call[name] for name in TENSORS])


def test_gradient_through_the_final_state_alone():
    call = make()
    names = ["k", "v", "log_decay", "initial_state"]
    grads = {}
    for form in ("chunked", "reference"):
        with use_backend(form):
            state = gated_linear_attention(**call, output_final_state=True)[1]
        grads[form] = torch.autograd.grad(state.square().sum(), [call[name] for name in names])
    assert_same(grads["chunked"], grads["reference"])


def test_equal_channels_are_lightning():
    call = detached(make(T=100))
    rates = torch.tensor([-0.1, -2.0], dtype=torch.float64)
    call["log_decay"] = rates[:, None].expand_as(call["q"])
    gated = gated_linear_attention(**call, output_final_state=True)
    lightning = lightning_attention(**call | {"log_decay": rates}, output_final_state=True)
    assert_same(gated, lightning)


def test_arguments_stay_as_they_were():
    """With one head and one sequence, gathering a piece needs no permutation and might return the argument itself."""
    call = make(B=1, T=64, H=1)
    before = {name: call[name].detach().clone() for name in TENSORS}
    everything(call)
    for name, x in before.items():
        assert torch.equal(call[name], x), name


@pytest.mark.parametrize("strength", [0.01, 1.0, 10.0, 100.0, 1e4, "mixed", "resets"])
def test_float32_is_precise_for_any_decay(strength):
    """Forward and gradients to a few roundings: no overflow, no cancellation of large sums."""
    if isinstance(strength, str):
        call = make(T=300, K=16, V=16, strength=0.1, resets=5 if strength == "resets" else 0)
        if strength == "mixed":
            log_decay = call["log_decay"].detach().clone()
            log_decay[:, ::5, :, ::2] = -1e4
            call["log_decay"] = log_decay.requires_grad_()
    else:
        call = make(T=300, K=16, V=16, strength=strength)
    single = {name: x.detach().float().requires_grad_() if name in TENSORS else x for name, x in call.items()}
    assert_near(everything(single), everything(call))


def test_strong_decays_have_their_own_small_gradients():
    """Where every decay is strong its gradients are tiny; they are relatively precise, not rounding of what cancels."""
    call = make(T=100, K=4, V=4, strength=2.0, state=False)
    call["log_decay"] = (call["log_decay"].detach() - 20).requires_grad_()
    single = {name: x.detach().float().requires_grad_() if name in TENSORS else x for name, x in call.items()}
    actual, expected = everything(single)[-1], everything(call)[-1]
    assert expected.abs().max() < 1e-6
    assert_near([actual], [expected])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    call = make(T=200, K=16, V=16, dtype=dtype)
    exact = {name: x.detach().double().requires_grad_() if name in TENSORS else x for name, x in call.items()}
    actual, expected = everything(call), everything(exact)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert [x.dtype for x in actual[2:]] == [dtype, dtype, dtype, torch.float32, torch.float32]
    assert_near(actual, expected, TOLERANCE[dtype])


def test_long_sequence_in_linear_memory():
    T, half = 131_072, 65_536 + 13
    call = make(B=1, T=T, H=1, K=4, V=4, strength=0.01, dtype=torch.float32)
    o, final, *grads = everything(call)
    assert all(x.isfinite().all() for x in grads)
    call, state, outputs = detached(call), call["initial_state"].detach(), []
    for part in (slice(half), slice(half, None)):
        call_part = call | {name: call[name][:, part] for name in TOKENS} | {"initial_state": state}
        tail, state = gated_linear_attention(**call_part, output_final_state=True)
        outputs.append(tail)
    assert_near([torch.cat(outputs, 1), state], [o, final])


BAD = {
    r"k \[2, 37, 2, 4\]": lambda c: c | {"k": torch.zeros(2, 37, 2, 4)},
    r"log_decay.* \[2, 37, 2, 1\]": lambda c: c | {"log_decay": c["log_decay"][..., :1]},
    "log_decay.*torch.int64": lambda c: c | {"log_decay": c["log_decay"].long()},
    r"initial_state.* \[2, 2, 5, 3\].* \[2, 2, 3, 5\]": lambda c: c | {"initial_state": c["initial_state"].mT},
    "batch.* 2": lambda c: c | {"cu_seqlens": torch.tensor([0, 37], dtype=torch.int32)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**BAD[message](detached(make())))


def test_debug_looks_at_values():
    call = make()
    call["log_decay"] = call["log_decay"].detach() + 1.5
    gated_linear_attention(**call)
    with debug(), pytest.raises(ValueError, match="log_decay.* 1.4"):
        gated_linear_attention(**call)


def test_step_refuses_wrong_shapes():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"log_decay \[2, 3\]"):
        gated_step(x, x, x, x[..., 0], torch.zeros(2, 3, 4, 4))


def test_forms_without_a_kernel_count_on_the_meta_device():
    x, state = torch.zeros(1, 2, 3, device="meta"), torch.zeros(1, 2, 3, 3, device="meta")
    assert gated_step(x, x, x, x, state).shape == x.shape
    with use_backend("reference"):
        assert gated_linear_attention(x[None], x[None], x[None], x[None])[0].shape == (1, 1, 2, 3)


@pytest.mark.parametrize("strength", [1e-8, 1e-6])
def test_weak_decays_do_not_drift_over_many_tokens(strength):
    """float32 has no number between 1 - 6e-8 and 1: a product of rounded decays would lose or double this one."""
    T, generator = 20_000, torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, T, 1, 2, generator=generator) for _ in range(3))
    call = dict(q=q, k=k, v=v, log_decay=torch.full_like(q, -strength))
    wide = {name: x.double() for name, x in call.items()}
    with use_backend("chunked"):
        actual = gated_linear_attention(**call, output_final_state=True)
        expected = gated_linear_attention(**wide, output_final_state=True)
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() < 2e-6 * e.abs().max()
    state = torch.zeros(1, 1, 2, 2)
    for t in range(4000):
        gated_step(*(x[:, t] for x in call.values()), state)
    with use_backend("chunked"):
        _, expected = gated_linear_attention(**{n: x[:, :4000] for n, x in wide.items()}, output_final_state=True)
    assert (state - expected).abs().max() < 4e-6 * expected.abs().max()


def test_float16_decays_with_a_gradient_are_refused():
    call = detached(make(dtype=torch.float16))
    call["log_decay"] = call["log_decay"].half()
    gated_linear_attention(**call)
    call["log_decay"].requires_grad_()
    with pytest.raises(ValueError, match="log_decay is float16"):
        gated_linear_attention(**call)
