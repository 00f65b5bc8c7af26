"""Lightning attention: the definition against the chunked form and the step, with and without decay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import TOLERANCE, assert_near, assert_same

from linnet.ops import chunks, debug, lightning_attention, lightning_step, use_backend

DECAYS = {"none": None, "slow": [-0.001, -0.01], "fast": [-0.3, -20.0], "mixed": [0.0, -float("inf")]}


def make(B=2, T=37, H=2, K=3, V=5, *, decay="slow", state=True, offsets=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(to).requires_grad_()

    call = dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, H, V), scale=0.7)
    if DECAYS[decay] is not None:
        call["log_decay"] = torch.tensor(DECAYS[decay][:H], dtype=torch.promote_types(dtype, torch.float32))
    if state:
        N = B if offsets is None else len(offsets) - 1
        call["initial_state"] = normal(N, H, K, V, to=torch.promote_types(dtype, torch.float32))
    if offsets is not None:
        call["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    return call


def detached(call):
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def everything(call, form="chunked"):
    """o, the final state, and the gradients of all that has one, for a loss that reads both results."""
    with use_backend(form):
        results = lightning_attention(**call, output_final_state=True)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))
    leaves = [x for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return [*results, *torch.autograd.grad(loss, leaves)]


@settings(max_examples=25)
@given(
    B=st.integers(1, 2),
    T=st.one_of(st.sampled_from([1, 63, 64, 65, 128]), st.integers(1, 200)),
    H=st.integers(1, 2),
    K=st.integers(1, 4),
    V=st.integers(1, 4),
    decay=st.sampled_from(list(DECAYS)),
    state=st.booleans(),
    piece=st.sampled_from([1, 2**9, 2**18]),
)
def test_chunked_is_the_definition(B, T, H, K, V, decay, state, piece):
    call = make(B, T, H, K, V, decay=decay, state=state, seed=T)
    with pytest.MonkeyPatch.context() as patch:  # segments of one chunk, of a few, of all
        patch.setattr(chunks, "SEGMENT_ELEMENTS", piece)
        actual = everything(call)
    assert_same(actual, everything(call, "reference"))


@pytest.mark.parametrize("decay", list(DECAYS))
def test_documents_are_padded_where_no_final_state_is_wanted(decay):
    call = make(1, 200, decay=decay, offsets=[0, 30, 30, 31, 60, 125, 155, 187, 200])
    leaves = [x for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    found = []
    for form in ("chunked", "reference"):
        with use_backend(form):
            o, _ = lightning_attention(**call)
        weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        found.append([o, *torch.autograd.grad((o * weights).sum(), leaves)])
    assert_same(*found)


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(0, 90), max_size=4), decay=st.sampled_from(list(DECAYS)), state=st.booleans())
def test_documents_are_separate_calls(cuts, decay, state):
    offsets = [0, *sorted(cuts), 90]
    call = make(1, 90, decay=decay, state=state, offsets=offsets)
    actual = everything(call)
    assert_same(actual, everything(call, "reference"))
    plain = detached(call)
    plain.pop("cu_seqlens")
    for i, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if start < end:
            part = plain | {name: plain[name][:, start:end] for name in "qkv"}
            if state:
                part["initial_state"] = plain["initial_state"][i : i + 1]
            o, final = lightning_attention(**part, output_final_state=True)
            assert_same([o, final], [actual[0][:, start:end], actual[1][i : i + 1]])
        else:
            expected = plain["initial_state"][i] if state else torch.zeros(2, 3, 5, dtype=torch.float64)
            assert_same([actual[1][i]], [expected])


@pytest.mark.parametrize("decay", DECAYS)
def test_a_sequence_in_two_calls(decay):
    call = make(T=150, decay=decay)
    whole = everything(call)
    split = dict(call)
    state = split.pop("initial_state")
    parts = []
    for start, end in ((0, 70), (70, 150)):
        part = split | {name: call[name][:, start:end] for name in "qkv"}
        o, state = lightning_attention(**part, initial_state=state, output_final_state=True)
        parts.append(o)
    results = [torch.cat(parts, 1), state]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
    assert_same([*results, *torch.autograd.grad(loss, [call[x] for x in ("q", "k", "v", "initial_state")])], whole)


@pytest.mark.parametrize("decay", DECAYS)
def test_steps_are_the_sequence(decay):
    call = detached(make(T=70, decay=decay))
    o, final = lightning_attention(**call, output_final_state=True)
    state = call["initial_state"].clone()
    constants = {name: call[name] for name in ("log_decay", "scale") if name in call}
    steps = [lightning_step(*(call[x][:, t] for x in "qkv"), state, **constants) for t in range(70)]
    assert_same([torch.stack(steps, 1), state], [o, final])


def test_gradcheck():
    call = make(B=1, T=5, K=2, V=3)
    names = ("q", "k", "v", "initial_state")

    def run(*tensors):
        return lightning_attention(**(call | dict(zip(names, tensors, strict=True))), output_final_state=True)

    assert torch.autograd.gradcheck(run, [call[name] for name in names])


def test_gradient_through_the_final_state_alone():
    call = make()
    grads = {}
    for form in ("chunked", "reference"):
        with use_backend(form):
            state = lightning_attention(**call, output_final_state=True)[1]
        grads[form] = torch.autograd.grad(state.square().sum(), [call["k"], call["v"], call["initial_state"]])
    assert_same(grads["chunked"], grads["reference"])


def test_no_decay_is_a_decay_of_one():
    call = make(T=100, decay="none")
    assert_same(everything(call), everything(call | {"log_decay": torch.zeros(2)}))


def test_arguments_stay_as_they_were():
    """With one head and one sequence, gathering a piece needs no permutation and might return the argument itself."""
    call = detached(make(B=1, T=64, H=1))
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    everything({name: x.requires_grad_() if name in ("q", "k", "v") else x for name, x in call.items()})
    for name, x in before.items():
        assert torch.equal(call[name], x), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    call = make(T=200, K=16, V=16, dtype=dtype)
    exact = {name: x.detach().double().requires_grad_() if name in ("q", "k", "v", "initial_state") else x
             for name, x in call.items()}  # fmt: skip
    actual, expected = everything(call), everything(exact)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert [x.dtype for x in actual[2:]] == [dtype, dtype, dtype, torch.float32]
    assert_near(actual, expected, TOLERANCE[dtype])


def test_long_sequence_in_linear_memory():
    T, half = 131_072, 65_536 + 13
    call = make(B=1, T=T, H=1, K=4, V=4, dtype=torch.float32)
    o, final, *grads = everything(call)
    call = detached(call)
    first, second = ({name: call[name][:, part] for name in "qkv"} for part in (slice(half), slice(half, None)))
    constants = {name: call[name] for name in ("log_decay", "scale")}
    _, state = lightning_attention(**first, **constants, initial_state=call["initial_state"], output_final_state=True)
    tail, state = lightning_attention(**second, **constants, initial_state=state, output_final_state=True)
    assert_near([tail, state], [o[:, half:], final])
    assert all(x.isfinite().all() for x in grads)


BAD = {
    "k [2, 37, 2, 4]": lambda c: c | {"k": torch.zeros(2, 37, 2, 4)},
    "v [2, 36, 2, 5]": lambda c: c | {"v": c["v"][:, :36]},
    "q [2, 0, 2, 3]": lambda c: c | {name: c[name][:, :0] for name in "qkv"},
    "torch.int64": lambda c: c | {"q": c["q"].long()},
    r"log_decay.* \[3\]": lambda c: c | {"log_decay": torch.zeros(3)},
    "log_decay.*requires_grad": lambda c: c | {"log_decay": torch.zeros(2, requires_grad=True)},
    r"initial_state.* \[2, 2, 5, 3\].* \[2, 2, 3, 5\]": lambda c: c | {"initial_state": c["initial_state"].mT},
    "torch.float32.*torch.float64": lambda c: c | {"initial_state": c["initial_state"].float()},
    "batch.* 2": lambda c: c | {"cu_seqlens": torch.tensor([0, 37], dtype=torch.int32)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    pattern = message if "\\" in message else message.replace("[", r"\[")
    with pytest.raises(ValueError, match=pattern):
        lightning_attention(**BAD[message](detached(make())))


@pytest.mark.parametrize("offsets", [[0, 20, 10, 37], [1, 37], [0, 36], [0, 38]])
def test_bad_offsets(offsets):
    call = detached(make(B=1, state=False))
    with pytest.raises(ValueError, match="cu_seqlens"):
        lightning_attention(**call, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match="int64.*int32"):
        lightning_attention(**call, cu_seqlens=torch.tensor([0, 37]))


@pytest.mark.parametrize("value", [0.1, float("nan")])
def test_debug_looks_at_values(value):
    call = make() | {"log_decay": torch.tensor([-1.0, value])}
    lightning_attention(**call)
    with debug(), pytest.raises(ValueError, match="log_decay"):
        lightning_attention(**call)


def test_step_refuses_wrong_shapes():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"state \[2, 3, 4, 5\]"):
        lightning_step(x, x, x, torch.zeros(2, 3, 4, 5))


def test_forms_without_a_kernel_count_on_the_meta_device():
    x, state = torch.zeros(1, 2, 3, device="meta"), torch.zeros(1, 2, 3, 3, device="meta")
    assert lightning_step(x, x, x, state).shape == x.shape
    with use_backend("reference"):
        assert lightning_attention(x[None], x[None], x[None])[0].shape == (1, 1, 2, 3)


def test_a_state_that_is_not_requested_is_not_made():
    q, k, v = (torch.randn(2, 10, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    decay = torch.tensor([-0.1, -0.2, 0.0])
    from linnet.ops.lightning import lightning

    assert lightning.forward(q, k, v, decay, None, None, 1.0, False)[1].numel() == 0
    found = lightning.backward(*(x.detach() for x in (q, k, v)), decay, None, None, 1.0, v.detach(), None)
    assert found[3].numel() == 0
    values = torch.vmap(lambda q: lightning_attention(q, k, v, log_decay=decay)[0])(torch.stack([q, k]))
    torch.testing.assert_close(values[1], lightning_attention(k, k, v, log_decay=decay)[0])


def test_tensors_elsewhere_are_refused_by_name():
    q, k, v = (torch.randn(1, 4, 2, 4) for _ in range(3))
    for name, call in {
        "v": {"v": v.to("meta")},
        "log_decay": {"log_decay": torch.zeros(2, device="meta")},
        "cu_seqlens": {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")},
        "initial_state": {"initial_state": torch.zeros(1, 2, 4, 4, device="meta")},
    }.items():
        with pytest.raises(ValueError, match=rf"{name}.* meta.* q .*cpu.*{name}\.to\('cpu'\)"):
            lightning_attention(**({"q": q, "k": k, "v": v} | call))
