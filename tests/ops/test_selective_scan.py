"""The selective scan: the definition against the chunked form and the step, and what `torch.library` knows of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import assert_near, assert_same
from registered import (
    check_compiled,
    check_op,
    check_vmap,
    check_vmap_of_backward,
    permuted,
    share_documents,
    with_gradients,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import backend, debug, selective_scan, selective_step
from linnet.ops.selective_scan import chunked


def make(Bt=2, T=37, D=3, N=4, *, skip=True, softplus=False, state=False, documents=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    call = dict(
        x=normal(Bt, T, D),
        delta=normal(Bt, T, D).detach().exp().requires_grad_(),
        A=normal(D, N).detach().exp().neg().requires_grad_(),
        B=normal(Bt, T, N),
        C=normal(Bt, T, N),
        D=normal(D) if skip else None,
    )
    if softplus:
        call["delta_bias"] = normal(D)
    if state:
        states = Bt if documents is None else len(documents) - 1
        wide = torch.promote_types(dtype, torch.float32)
        call["initial_state"] = normal(states, D, N).detach().to(wide).requires_grad_()
    if documents is not None:
        call["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return call


def run(call, form="chunked"):
    with backend.use_backend(form):
        return selective_scan(**call, output_final_state=True)


def everything(call, form="chunked"):
    return with_gradients(run(call, form), call)


def use_chunks_of(patch, tokens):
    patch.setattr(chunked, "chunk_length", lambda *_: tokens)


@settings(max_examples=40)
@given(
    Bt=st.integers(1, 3), T=st.integers(1, 70), D=st.integers(1, 4), N=st.integers(1, 5),
    skip=st.booleans(), softplus=st.booleans(), state=st.booleans(), chunk=st.sampled_from([1, 2, 7, 32, 256]),
)  # fmt: skip
def test_chunked_is_the_definition(Bt, T, D, N, skip, softplus, state, chunk):
    call = make(Bt, T, D, N, skip=skip, softplus=softplus, state=state, seed=T)
    with pytest.MonkeyPatch.context() as patch:
        use_chunks_of(patch, chunk)
        assert_same(everything(call), everything(call, "reference"))


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 60), max_size=5), state=st.booleans(), chunk=st.sampled_from([3, 16, 64]))
def test_documents(cuts, state, chunk):
    call = make(1, 60, state=state, documents=[0, *sorted(cuts), 60])
    with pytest.MonkeyPatch.context() as patch:
        use_chunks_of(patch, chunk)
        assert_same(everything(call), everything(call, "reference"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decays_from_zero_to_one(dtype):
    """Steps of 0 (nothing is written or forgotten), rates of 0 (a sum) and products far beyond underflow."""
    call = make(T=90, D=6, N=4, state=True, dtype=dtype)
    with torch.no_grad():
        call["delta"][:, ::3] = 0.0
        call["delta"][:, 40] = 1e6
        call["A"][0], call["A"][1], call["A"][2] = 0.0, -1e-12, -1e30
        call["B"][:, 40] = 0.0
    expected = {name: x.detach().double().requires_grad_() for name, x in call.items()}
    assert_near(everything(call), everything(expected, "reference"))


def test_it_is_a_sum_over_the_past():
    """The closed form: y_t = sum over s of C_t exp(A sum of delta after s) delta_s B_s x_s."""
    call = {name: x.detach() for name, x in make(T=30, skip=False).items() if x is not None}
    total = call["delta"].cumsum(1)
    seen = torch.ones(30, 30, dtype=torch.bool).tril()[..., None]
    lag = torch.where(seen, total[:, :, None] - total[:, None], 0.0)
    kernel = (lag[..., None] * call["A"]).exp() * seen[..., None]
    y = torch.einsum("btn,btsdn,bsd,bsn->btd", call["C"], kernel, call["delta"] * call["x"], call["B"])
    assert_same([run(call)[0]], [y])


def test_steps_equal_the_sequence_and_continue_from_a_prefill():
    call = {name: x.detach() for name, x in make(T=50).items()}

    def part(first, last, **more):
        return {name: x[:, first:last] if x.ndim == 3 else x for name, x in call.items()} | more

    expected, final = run(call)
    y, state = run(part(0, 30))
    assert_same(run(part(30, 50, initial_state=state)), (expected[:, 30:], final))
    steps = []
    for t in range(30, 50):
        token = {name: x[:, t] if x.ndim == 3 else x for name, x in call.items()}
        steps.append(selective_step(**token, state=state))
    assert_same((torch.cat([y, torch.stack(steps, 1)], 1), state), (expected, final))


def test_gradcheck():
    call = make(Bt=1, T=7, D=2, N=2, softplus=True, state=True, documents=[0, 2, 2, 7])
    names = [name for name, x in call.items() if x.requires_grad]
    with pytest.MonkeyPatch.context() as patch:
        use_chunks_of(patch, 2)
        assert torch.autograd.gradcheck(
            lambda *tensors: run(call | dict(zip(names, tensors, strict=True))), [call[name] for name in names]
        )


def test_any_strides():
    call = make(T=9, state=True)
    other = {name: permuted(x) for name, x in call.items()}
    assert_same(everything(other), everything(call))
    arguments = stacked(other)
    *outputs, starts = torch.ops.linnet.selective(*arguments)
    assert all(x.is_contiguous() for x in outputs)
    grads = torch.ops.linnet.selective_backward(*arguments, starts, *map(permuted, outputs))
    assert all(x.is_contiguous() for x in grads)


def stacked(call, models=1):
    """The arguments of the registered op: as many models as asked for, all the same."""
    names = ("x", "delta", "A", "B", "C", "D", "delta_bias", "initial_state", "cu_seqlens")
    values = {name: call.get(name) for name in names}
    for name, x in values.items():
        if x is not None and name != "cu_seqlens":
            values[name] = x.detach().repeat(models, *[1] * (x.ndim - 1)).requires_grad_()
    return tuple(
        x.detach().unflatten(0, (models, -1)).requires_grad_()
        if name in ("A", "D", "delta_bias") and x is not None
        else x
        for name, x in values.items()
    )


@pytest.mark.parametrize("models", [1, 2])
def test_operator_registration(models):
    op = torch.ops.linnet.selective.default
    check_op(op, stacked(make(1, 9, 4, state=True, documents=[0, 4, 9]), models), symbolic=models == 2)
    check_op(op, stacked(make(T=5, D=4, skip=False, softplus=True), models), symbolic=models == 1)


def test_compiles_whole_and_gives_the_same():
    call = make(1, 40, state=True, documents=[0, 15, 40])
    check_compiled(run, call)


@pytest.mark.parametrize("shared", ["nothing", "A and D", "B", "no skip", "softplus", "documents", "documents apart"])
def test_vmap_equals_one_model_at_a_time(shared):
    members = [make(1, 11, softplus=shared == "softplus", state=shared != "documents apart", seed=i) for i in range(3)]
    call = {name: torch.stack([member[name].detach() for member in members], -1) for name in members[0]}
    dims = dict.fromkeys(call, -1)
    for name in {"A and D": ("A", "D"), "B": ("B",)}.get(shared, ()):
        call[name], dims[name] = call[name][..., 0], None
    if shared == "no skip":
        del call["D"], dims["D"]
    share_documents(call, dims, shared)
    check_vmap(run, call, dims)


@pytest.mark.parametrize("documents", [None, [0, 4, 9]])
def test_vmap_of_the_backward(documents):
    call = make(1, 9, state=True, documents=documents)
    check_vmap_of_backward(run, call)


def test_flops_are_counted_on_the_meta_device():
    call = {name: torch.empty_like(x, device="meta").requires_grad_() for name, x in make(2, 64, 5, 3).items()}
    with FlopCounterMode(display=False) as counter:
        y, _ = selective_scan(**call)
    assert counter.get_total_flops() == 6 * 2 * 64 * 5 * 3
    with counter:
        y.sum().backward()
    assert counter.get_total_flops() == 23 * 2 * 64 * 5 * 3


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_states_exist_for_a_chunk_at_a_time():
    call = {name: x.detach() for name, x in make(1, 1024, 32, 16, dtype=torch.float32).items()}
    arguments = stacked(call)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(chunked, "CPU_ELEMENTS", 32 * 32 * 16)
        with Largest() as forward:
            y, _, starts = chunked.selective_forward(*arguments)
        with Largest() as backward:
            chunked.selective_backward(*arguments, starts, y, None)
    assert forward.elements <= 1024 * 32 and backward.elements <= 1024 * 32 < 1024 * 32 * 16


def test_half_precision_computes_in_float32():
    call = make(T=60, state=True, dtype=torch.bfloat16)
    y, final = run(call)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert_near((y, final), run({name: x.detach().double() for name, x in call.items()}))


def test_autocast_leaves_the_arithmetic_alone():
    call = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(call)
    assert_same(actual, run(call), 0.0)


def test_eager_calls_skip_the_dispatcher_and_second_derivatives_are_refused():
    call = make(T=5)
    y, _ = run(call)
    assert "FastPath" in type(y.grad_fn).__name__
    (dx,) = torch.autograd.grad(y.square().sum(), call["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="linnet"):
        torch.autograd.grad(dx.sum(), call["A"])


def test_what_does_not_go_together_is_refused():
    call = make(T=5)
    for name, wrong in (
        ("delta", call["delta"][:, :4]),
        ("B", call["B"][..., :3]),
        ("D", call["D"][:2]),
        ("A", call["A"].mT),
    ):
        with pytest.raises(ValueError, match=r"selective_scan: x \[2, 5, 3\].*delta \[Bt, T, D\]"):
            selective_scan(**(call | {name: wrong}))
    with pytest.raises(ValueError, match=r"initial_state.* \[2, 3\].* \[2, 3, 4\]"):
        selective_scan(**call, initial_state=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="torch.int64"):
        selective_scan(**(call | {"x": torch.zeros(2, 5, 3, dtype=torch.int64)}))
    with pytest.raises(ValueError, match=r"selective_step: .*state \[2, 4, 3\]"):
        token = {name: x[:, 0] if x.ndim == 3 else x for name, x in call.items()}
        selective_step(**token, state=torch.zeros(2, 4, 3))
    with debug(), pytest.raises(ValueError, match=r"\bA\b"):
        selective_scan(**(call | {"A": -call["A"]}))
