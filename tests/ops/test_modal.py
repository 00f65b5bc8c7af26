"""The modal convolution: the definition against the chunked form and the step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import assert_near, assert_same
from registered import (
    check_compiled,
    check_vmap,
    check_vmap_of_backward,
    leaves,
    permuted,
    share_documents,
    with_gradients,
)
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import backend
from linnet.ops.modal import chunked, modal_convolution, modal_step

INF = float("inf")


def make(B=2, T=37, D=3, E=4, *, state=False, documents=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    call = dict(x=normal(B, T, D), log_decay=(-normal(D, E).detach().exp() / 5).requires_grad_(), weight=normal(D, E))
    if state:
        N = B if documents is None else len(documents) - 1
        call["initial_state"] = normal(N, D, E).detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    if documents is not None:
        call["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return call


def run(call, form="chunked"):
    with backend.use_backend(form):
        return modal_convolution(**call, output_final_state=True)


def everything(call, form="chunked"):
    return with_gradients(run(call, form), call)


@settings(max_examples=30)
@given(
    B=st.integers(1, 3), T=st.integers(1, 150), D=st.integers(1, 4), E=st.integers(1, 5),
    state=st.booleans(), forgetful=st.booleans(), chunk=st.sampled_from([1, 5, 16, 32]),
)  # fmt: skip
def test_chunked_is_the_definition(B, T, D, E, state, forgetful, chunk):
    call = make(B, T, D, E, state=state, seed=T)
    if forgetful:
        log_decay = call["log_decay"].detach().clone()
        log_decay[0, 0], log_decay[-1, -1] = -INF, 0.0
        call["log_decay"] = log_decay.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK", chunk)
        assert_same(everything(call), everything(call, "reference"))


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 80), max_size=5), state=st.booleans())
def test_documents(cuts, state):
    edges = [0, *sorted(cuts), 80]
    call = make(1, 80, state=state, documents=edges)
    assert_same(everything(call), everything(call, "reference"))


def test_it_is_a_toeplitz_matrix():
    call = make(B=1, T=100)
    t = torch.arange(100, dtype=torch.float64)
    kernel = (call["weight"][..., None] * (call["log_decay"][..., None] * t).exp()).sum(1)
    lag = t[:, None] - t
    matrix = torch.where(lag >= 0, kernel[:, lag.clamp(min=0).long()], 0.0)
    assert_same([run(call)[0]], [torch.einsum("cts,bsc->btc", matrix, call["x"])])


def test_steps_equal_the_sequence_and_continue_from_a_prefill():
    call = {name: x.detach() for name, x in make(T=100).items()}
    expected, final = run(call)
    y, state = run(call | {"x": call["x"][:, :70]})
    assert_same(run(call | {"x": call["x"][:, 70:], "initial_state": state}), (expected[:, 70:], final))
    steps = [modal_step(call["x"][:, t], call["log_decay"], call["weight"], state) for t in range(70, 100)]
    assert_same((torch.cat([y, torch.stack(steps, 1)], 1), state), (expected, final))


def test_gradcheck():
    call = make(B=1, T=7, D=2, E=2, state=True, documents=[0, 2, 2, 7])
    names = [name for name, x in call.items() if x.requires_grad]
    inputs = [call[name] for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK", 2)
        assert torch.autograd.gradcheck(lambda *tensors: run(call | dict(zip(names, tensors, strict=True))), inputs)


def test_any_strides():
    """Arguments laid out otherwise give the same, and results are contiguous, as the fake implementation says."""
    call = make(B=2, T=9, state=True)
    other = {name: permuted(x) for name, x in call.items()}
    expected, actual = everything(call), everything(other)
    assert_same(actual, expected)
    op = torch.ops.linnet.modal
    outputs = op(*other.values(), None)
    assert all(x.is_contiguous() for x in outputs)
    grads = torch.ops.linnet.modal_backward(*other.values(), None, *map(permuted, outputs))
    assert all(x.is_contiguous() for x in grads)


def test_operator_registration():
    call = make(B=1, T=9, state=True, documents=[0, 4, 9])
    torch.library.opcheck(torch.ops.linnet.modal.default, tuple(call.values()))
    torch.library.opcheck(torch.ops.linnet.modal.default, (*make(T=5).values(), None, None))


def test_compiles_whole_and_gives_the_same():
    call = make(B=1, T=40, state=True, documents=[0, 15, 40])
    check_compiled(run, call)


@pytest.mark.parametrize("shared", ["nothing", "parameters", "weight", "documents", "documents apart"])
def test_vmap_equals_one_model_at_a_time(shared):
    members = [make(B=1, T=11, state=True, seed=i) for i in range(3)]
    call = {name: torch.stack([member[name].detach() for member in members]) for name in members[0]}
    dims = dict.fromkeys(call, 0)
    for name in {"parameters": ("log_decay", "weight"), "weight": ("weight",)}.get(shared, ()):
        call[name], dims[name] = call[name][0], None
    share_documents(call, dims, shared)
    call["x"], dims["x"] = call["x"].movedim(0, 1), 1
    check_vmap(run, call, dims)


@pytest.mark.parametrize("documents", [None, [0, 4, 9]])
def test_vmap_of_the_backward(documents):
    call = make(B=1, T=9, state=True, documents=documents)
    check_vmap_of_backward(run, call)


def test_flops_are_counted_on_the_meta_device():
    B, T, D, E = 2, 256, 5, 16
    x = torch.empty(B, T, D, device="meta", requires_grad=True)
    log_decay, weight = (torch.empty(D, E, device="meta", requires_grad=True) for _ in range(2))
    with FlopCounterMode(display=False) as counter:
        y, _ = modal_convolution(x, log_decay, weight)
    assert counter.get_total_flops() == B * T * D * (2 * 32 + 4 * E)
    with counter:
        y.sum().backward()
    assert counter.get_total_flops() == B * T * D * (4 * 32 + 10 * E)


def test_half_precision_computes_in_float32():
    call = make(T=100, state=True, dtype=torch.bfloat16)
    exact = {name: x.detach().double().requires_grad_() for name, x in call.items()}
    (y, final), expected = run(call), run(exact)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert_near((y, final), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(run({name: x.detach().float() for name, x in call.items()}), expected)
    grads = torch.autograd.grad(y.float().sum(), leaves(call))
    assert_near(grads, torch.autograd.grad(expected[0].sum(), leaves(exact)), 5e-3)


def test_a_long_sequence():
    T = 131_072
    x = torch.ones(1, T, 1)
    with torch.no_grad():
        y, final = modal_convolution(x, torch.full((1, 1), -1e-4), torch.ones(1, 1), output_final_state=True)
    t = torch.arange(1, T + 1, dtype=torch.float64)
    exact = torch.expm1(-1e-4 * t) / torch.expm1(torch.tensor(-1e-4, dtype=torch.float64))
    assert_near([y[0, :, 0], final[0, 0]], [exact, exact[-1:]], 1e-3)


def test_bad_arguments_name_the_shape():
    x, modes = torch.zeros(2, 5, 3), torch.zeros(3, 4)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    good = dict(x=x, log_decay=modes, weight=modes)
    for message, wrong in (
        (r"weight \[3, 5\]", dict(weight=torch.zeros(3, 5))),
        (r"x \[2, 5, 4\]", dict(x=torch.zeros(2, 5, 4))),
        (r"x \[2, 0, 3\]", dict(x=x[:, :0])),
        ("torch.int64", dict(x=x.long())),
        (r"initial_state.* \[2, 3\].* \[2, 3, 4\]", dict(initial_state=torch.zeros(2, 3))),
        ("batch.* 2", dict(cu_seqlens=offsets)),
    ):
        with pytest.raises(ValueError, match=message):
            run(good | wrong)
    with pytest.raises(ValueError, match="log_decay"), backend.debug():
        run(good | dict(log_decay=modes + 1))
    state = torch.zeros(2, 3, 4)
    for message, args in (
        (r"x \[2, 5, 3\]", (x, modes, modes, state)),
        (r"x \[2, 5\]", (torch.zeros(2, 5), modes, modes, state)),
        ("float16.*float32.*float64", (x[:, 0], modes, modes, state.half())),
    ):
        with pytest.raises(ValueError, match=message):
            modal_step(*args)
