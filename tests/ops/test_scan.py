"""The diagonal recurrence: the definition against the two-level form and the step, real and complex."""

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
from linnet.ops.scan import diagonal_scan, diagonal_step

INF = float("inf")


def make(B=2, T=37, D=3, *, theta=False, state=False, documents=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    pair = (2,) if theta else ()
    call = dict(x=normal(B, T, D, *pair), log_decay=(-normal(B, T, D).detach().exp() / 3).requires_grad_())
    if theta:
        call["theta"] = normal(D)
    if state:
        N = B if documents is None else len(documents) - 1
        call["initial_state"] = (
            normal(N, D, *pair).detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        )
    if documents is not None:
        call["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return call


def run(call, form="chunked"):
    with backend.use_backend(form):
        return diagonal_scan(**call, output_final_state=True)


def everything(call, form="chunked"):
    return with_gradients(run(call, form), call)


@settings(max_examples=30)
@given(
    B=st.integers(1, 3), T=st.integers(1, 150), D=st.integers(1, 4),
    theta=st.booleans(), state=st.booleans(), resets=st.sampled_from([0, 1, 7]),
)  # fmt: skip
def test_chunked_is_the_definition(B, T, D, theta, state, resets):
    call = make(B, T, D, theta=theta, state=state, seed=T)
    if resets:
        log_decay = call["log_decay"].detach().clone()
        log_decay[:, ::resets, 0] = -INF
        call["log_decay"] = log_decay.requires_grad_()
    assert_same(everything(call), everything(call, "reference"))


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 40), max_size=5), theta=st.booleans(), state=st.booleans())
def test_documents(cuts, theta, state):
    edges = [0, *sorted(cuts), 40]
    call = make(1, 40, theta=theta, state=state, documents=edges)
    assert_same(everything(call), everything(call, "reference"))


@pytest.mark.parametrize("theta", [False, True])
def test_steps_equal_the_sequence_and_continue_from_a_prefill(theta):
    call = {name: x.detach() for name, x in make(T=50, theta=theta).items()}
    expected, final = run(call)
    h, state = run(call | {name: call[name][:, :30] for name in ("x", "log_decay")})
    rest = {name: call[name][:, 30:] for name in ("x", "log_decay")}
    assert_same(run(call | rest | {"initial_state": state}), (expected[:, 30:], final))
    options = {"theta": call["theta"]} if theta else {}
    steps = [diagonal_step(rest["x"][:, t], rest["log_decay"][:, t], state, **options) for t in range(20)]
    assert_same((torch.cat([h, torch.stack(steps, 1)], 1), state), (expected, final))


def test_a_reset_forgets_exactly_and_decays_never_overflow():
    call = make(B=1, T=200, D=2, dtype=torch.float32)
    log_decay = torch.full((1, 200, 2), -80.0)
    log_decay[:, 100] = -INF
    call["log_decay"] = log_decay.requires_grad_()
    call["x"] = (call["x"].detach() * 1e30).requires_grad_()
    h, _ = run(call)
    assert h.isfinite().all() and torch.equal(h[:, 100], call["x"][:, 100])
    grads = torch.autograd.grad(h[:, 150:].sum(), leaves(call))
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, :100].abs().max() == 0


def test_complex_without_rotation_is_two_real_scans():
    call = make(theta=True) | {"theta": torch.zeros(3, dtype=torch.float64)}
    h, final = run(call)
    real = [run({"x": call["x"][..., i], "log_decay": call["log_decay"]}) for i in range(2)]
    assert_same((h, final), [torch.stack(parts, -1) for parts in zip(*real, strict=True)])


@pytest.mark.parametrize("theta", [False, True])
def test_gradcheck(theta):
    call = make(B=1, T=6, D=2, theta=theta, state=True, documents=[0, 2, 2, 6])
    names = [name for name, x in call.items() if x.requires_grad]
    inputs = [call[name] for name in names]
    assert torch.autograd.gradcheck(lambda *tensors: run(call | dict(zip(names, tensors, strict=True))), inputs)


@pytest.mark.parametrize("theta", [False, True])
def test_any_strides(theta):
    """Arguments laid out otherwise give the same, and results are contiguous, as the fake implementation says."""
    call = make(B=2, T=9, theta=theta, state=True)
    other = {name: permuted(x) for name, x in call.items()}
    expected, actual = everything(call), everything(other)
    assert_same(actual, expected)
    op = torch.ops.linnet.scan
    outputs = op(other["x"], other["log_decay"], other.get("theta"), other["initial_state"], None)
    assert all(x.is_contiguous() for x in outputs)
    grads = torch.ops.linnet.scan_backward(
        other["x"],
        other["log_decay"],
        other.get("theta"),
        other["initial_state"],
        None,
        *map(permuted, outputs[:1] + outputs),
    )
    assert all(x.is_contiguous() for x in grads)


def test_operator_registration():
    call = make(B=1, T=9, theta=True, state=True, documents=[0, 4, 9])
    torch.library.opcheck(torch.ops.linnet.scan.default, tuple(call.values()))
    call = make(T=5)
    torch.library.opcheck(torch.ops.linnet.scan.default, (call["x"], call["log_decay"], None, None, None))


def test_compiles_whole_and_gives_the_same():
    call = make(B=1, T=40, theta=True, state=True, documents=[0, 15, 40])
    check_compiled(run, call)


@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("shared", ["nothing", "theta", "documents", "documents apart", "log_decay"])
def test_vmap_equals_one_model_at_a_time(theta, shared):
    members = [make(B=1, T=11, theta=theta, state=True, seed=i) for i in range(3)]
    call = {name: torch.stack([member[name].detach() for member in members]) for name in members[0]}
    dims = dict.fromkeys(call, 0)
    if shared in call:
        call[shared], dims[shared] = call[shared][0], None
    share_documents(call, dims, shared)
    call["x"], dims["x"] = call["x"].movedim(0, 1), 1
    check_vmap(run, call, dims)


@pytest.mark.parametrize("theta", [False, True])
@pytest.mark.parametrize("documents", [None, [0, 4, 9]])
def test_vmap_of_the_backward(theta, documents):
    call = make(B=1, T=9, theta=theta, state=True, documents=documents)
    check_vmap_of_backward(run, call)


def test_flops_are_counted_on_the_meta_device():
    for pair, forward, backward in (((), 2, 3), ((2,), 8, 14)):
        x = torch.empty(2, 256, 5, *pair, device="meta", requires_grad=True)
        log_decay = torch.empty(2, 256, 5, device="meta", requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            h, _ = diagonal_scan(x, log_decay, theta=torch.empty(5, device="meta") if pair else None)
        assert counter.get_total_flops() == forward * 2 * 256 * 5
        with counter:
            h.sum().backward()
        assert counter.get_total_flops() == backward * 2 * 256 * 5


@pytest.mark.parametrize("theta", [False, True])
def test_half_precision_computes_in_float32(theta):
    call = make(T=60, theta=theta, state=True, dtype=torch.bfloat16)
    exact = {name: x.detach().double().requires_grad_() for name, x in call.items()}
    (h, final), expected = run(call), run(exact)
    assert (h.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert_near((h, final), expected)
    grads = torch.autograd.grad(h.float().sum(), leaves(call))
    assert_near(grads, torch.autograd.grad(expected[0].sum(), leaves(exact)), 5e-3)


def test_a_long_sequence():
    T = 131_072
    x, log_decay = torch.ones(1, T, 1), torch.full((1, T, 1), -1e-4)
    with torch.no_grad():
        h, final = diagonal_scan(x, log_decay, output_final_state=True)
    t = torch.arange(1, T + 1, dtype=torch.float64)
    exact = torch.expm1(-1e-4 * t) / torch.expm1(torch.tensor(-1e-4, dtype=torch.float64))
    assert_near([h[0, :, 0]], [exact], 1e-3)
    assert torch.equal(final[0], h[0, -1])


@pytest.mark.parametrize("rate, bound", [(1e-3, 1.5e-5), (1e-4, 3e-4), (1e-5, 1.5e-3)])
def test_weak_decays_drift_no_further_than_documented(rate, bound):
    x = torch.rand(1, 100_000, 2, generator=torch.Generator().manual_seed(0))
    log_decay = torch.full_like(x, -rate)
    expected = diagonal_scan(x.double(), log_decay.double())[0]
    error = (diagonal_scan(x, log_decay)[0] - expected).abs().max() / expected.abs().max()
    assert error < bound


def test_bad_arguments_name_the_shape():
    x = torch.zeros(2, 5, 3)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    good = dict(x=x, log_decay=x)
    for message, wrong in (
        (r"x \[2, 5, 3\].*log_decay \[2, 5, 4\]", dict(log_decay=torch.zeros(2, 5, 4))),
        (r"x \[B, T, D, 2\].*theta", dict(theta=torch.zeros(3))),
        (r"theta.* \[4\].* \[3\]", dict(x=torch.zeros(2, 5, 3, 2), theta=torch.zeros(4))),
        (r"x \[2, 0, 3\]", dict(x=x[:, :0], log_decay=x[:, :0])),
        ("torch.int64", dict(x=x.long())),
        (r"initial_state.* \[3\].* \[2, 3\]", dict(initial_state=torch.zeros(3))),
        ("batch.* 2", dict(cu_seqlens=offsets)),
    ):
        with pytest.raises(ValueError, match=message):
            run(good | wrong)
    with pytest.raises(ValueError, match="log_decay"), backend.debug():
        run(dict(x=x, log_decay=x + 1))
    token = x[:, 0]
    for message, args, options in (
        (r"log_decay \[B, D\]", (x, x, x), {}),
        (r"theta.* \[2\].* \[3\]", (torch.zeros(2, 3, 2), token, torch.zeros(2, 3, 2)), dict(theta=torch.zeros(2))),
        ("float16.*float32.*float64", (token, token, token.half()), {}),
    ):
        with pytest.raises(ValueError, match=message):
            diagonal_step(*args, **options)
