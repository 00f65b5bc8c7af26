"""The long convolution: the definition against the parallel form and the step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import assert_near, assert_same
from registered import check_compiled, check_vmap, check_vmap_of_backward, leaves, share_documents, with_gradients
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import ModalFilter, backend, filtered_attention, long_convolution, long_convolution_step
from linnet.ops.longconv import chunked, heads


def make(B=2, T=37, F=3, P=2, N=4, *, state=False, documents=None, dtype=torch.float64, seed=0):
    """Arguments of `run`: those of the function, the filter by its parts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    call = dict(
        x=normal(B, T, F * P),
        log_decay=(-normal(F, N).detach().exp() / 5).requires_grad_(),
        theta=normal(F, N),
        residue=normal(F, N, 2),
        skip=normal(F),
    )
    if state:
        states = B if documents is None else len(documents) - 1
        call["initial_state"] = normal(states, F * P, N, 2)
    if documents is not None:
        call["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return call


def run(call, form="chunked", final=True):
    call = dict(call)
    filter = ModalFilter(*(call.pop(name) for name in ModalFilter._fields))
    with backend.use_backend(form):
        y, state = long_convolution(call.pop("x"), filter, **call, output_final_state=final)
    return (y, state) if final else (y,)


def everything(call, form="chunked"):
    return with_gradients(run(call, form), call)


@pytest.fixture(params=["toeplitz", "fft"])
def form(request, monkeypatch):
    """Both parallel forms at any length."""
    use_toeplitz(monkeypatch, 10**6 if request.param == "toeplitz" else 0)


def use_toeplitz(patch, up_to):
    patch.setattr(chunked, "TOEPLITZ", up_to)
    patch.setattr(chunked, "LINES", 1)


@settings(max_examples=30)
@given(
    B=st.integers(1, 3), T=st.integers(1, 90), F=st.integers(1, 3), P=st.integers(1, 3), N=st.integers(1, 4),
    state=st.booleans(), toeplitz=st.sampled_from([0, 1000]),
)  # fmt: skip
def test_parallel_form_is_the_definition(B, T, F, P, N, state, toeplitz):
    call = make(B, T, F, P, N, state=state, seed=T)
    with pytest.MonkeyPatch.context() as patch:
        use_toeplitz(patch, toeplitz)
        assert_same(everything(call), everything(call, "reference"))


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 80), max_size=5), state=st.booleans(), toeplitz=st.sampled_from([0, 20, 1000]))
def test_documents(cuts, state, toeplitz):
    edges = [0, *sorted(cuts), 80]
    call = make(1, 80, state=state, documents=edges)
    with pytest.MonkeyPatch.context() as patch:
        use_toeplitz(patch, toeplitz)
        assert_same(everything(call), everything(call, "reference"))


def test_the_kernel_is_the_sum_of_the_modes():
    """Equation of the filter itself, at a long lag: h_t = skip [t = 0] + sum Re(R lambda^t)."""
    call = {name: x.detach() for name, x in make(B=1, T=3000, F=2, P=1).items()}
    call["log_decay"] = call["log_decay"] / 100
    call["x"] = torch.zeros_like(call["x"])
    call["x"][:, 0] = 1.0
    t = torch.arange(3000, dtype=torch.float64)
    rate = torch.complex(call["log_decay"], call["theta"])
    kernel = (torch.view_as_complex(call["residue"])[..., None] * (rate[..., None] * t).exp()).sum(1).real
    kernel[:, 0] += call["skip"]
    assert_same(run(call)[0], kernel.t()[None])
    single = {name: x.float() for name, x in call.items()}
    assert_near(run(single)[:1], [kernel.t()[None]], 1e-4)  # angles in the thousands have fewer digits


@pytest.mark.parametrize("lags", [50, 20, 80])
@pytest.mark.parametrize("documents", [None, [0, 11, 11, 50]])
def test_a_filter_by_its_values(form, lags, documents):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 50, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(3, lags, generator=generator, dtype=torch.float64, requires_grad=True)
    offsets = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    found = []
    for name in ("chunked", "reference"):
        with backend.use_backend(name):
            y, none = long_convolution(x, kernel, cu_seqlens=offsets)
        assert none is None
        found.append([y, *torch.autograd.grad(y.sin().sum(), (x, kernel))])
    assert_same(*found)
    with pytest.raises(ValueError, match="give a ModalFilter"):
        long_convolution(x, kernel, output_final_state=True)


def test_steps_equal_the_sequence_and_continue_from_a_prefill():
    call = {name: x.detach() for name, x in make(T=60).items()}
    filter = ModalFilter(*(call[name] for name in ModalFilter._fields))
    expected, final = run(call)
    y, state = run(call | {"x": call["x"][:, :40]})
    assert_same(run(call | {"x": call["x"][:, 40:], "initial_state": state}), (expected[:, 40:], final))
    steps = [long_convolution_step(call["x"][:, t], filter, state) for t in range(40, 60)]
    assert_same((torch.cat([y, torch.stack(steps, 1)], 1), state), (expected, final))


def test_a_step_may_read_some_channels_only():
    call = {name: x.detach() for name, x in make(B=2, F=3, P=4, state=True).items()}
    filter = ModalFilter(*(call[name] for name in ModalFilter._fields))
    channels = torch.tensor([[0, 7, 11], [5, 5, 2]])
    states = [call["initial_state"].clone() for _ in range(2)]
    whole = long_convolution_step(call["x"][:, 0], filter, states[0])
    some = long_convolution_step(call["x"][:, 0], filter, states[1], channels=channels)
    assert_same([some, states[1]], [whole.gather(1, channels), states[0]])


def test_gradcheck(form):
    call = make(B=1, T=7, F=2, P=1, N=2, state=True, documents=[0, 2, 2, 7])
    names = [name for name, x in call.items() if x.requires_grad]
    inputs = [call[name] for name in names]
    assert torch.autograd.gradcheck(lambda *tensors: run(call | dict(zip(names, tensors, strict=True))), inputs)


def test_single_precision_and_its_gradients(form):
    call = make(B=2, T=300, F=4, P=2, dtype=torch.float32)
    exact = {name: x.detach().double().requires_grad_() for name, x in call.items()}
    assert_near(everything(call), everything(exact, "reference"))
    assert run(call | {"x": call["x"].bfloat16()})[0].dtype == torch.bfloat16


def test_autocast_leaves_the_arithmetic_alone(form):
    call = make(dtype=torch.float32, state=True)
    expected = run(call)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(call)
    assert_same(actual, expected, 0.0)
    grads = (torch.autograd.grad(sum(x.sin().sum() for x in outputs), leaves(call)) for outputs in (actual, expected))
    assert_same(*grads, 0.0)


@pytest.mark.parametrize("documents", [None, [0, 4, 9]])
def test_operator_registration(form, documents):
    x = torch.randn(2, 1, 9, 3, 2, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(2, 3, 9, dtype=torch.float64, requires_grad=True)
    offsets = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    torch.library.opcheck(torch.ops.linnet.convolve.default, (x, kernel, offsets))
    permuted = x.detach().permute(4, 0, 3, 1, 2).contiguous().permute(1, 3, 4, 2, 0)
    op = torch.ops.linnet
    assert op.convolve(permuted, kernel, offsets).is_contiguous()
    assert all(grad.is_contiguous() for grad in op.convolve_backward(permuted, kernel, offsets, permuted))


@pytest.mark.parametrize("documents, state", [(None, False), ([0, 15, 40], True)])
def test_compiles_whole_and_gives_the_same(documents, state):
    call = make(B=1, T=40, state=state, documents=documents)
    torch._dynamo.reset()
    check_compiled(run, call)


@pytest.mark.parametrize("shared", ["nothing", "filter", "x", "documents", "documents apart"])
def test_vmap_equals_one_model_at_a_time(form, shared):
    members = [make(B=1, T=11, state=True, seed=i) for i in range(3)]
    call = {name: torch.stack([member[name].detach() for member in members]) for name in members[0]}
    dims = dict.fromkeys(call, 0)
    for name in {"filter": ModalFilter._fields, "x": ("x",)}.get(shared, ()):
        call[name], dims[name] = call[name][0], None
    share_documents(call, dims, shared)
    if shared != "x":
        call["x"], dims["x"] = call["x"].movedim(0, 1), 1
    check_vmap(run, call, dims)


@pytest.mark.parametrize("documents", [None, [0, 4, 9]])
def test_vmap_of_the_backward(documents):
    call = make(B=1, T=9, state=True, documents=documents)
    check_vmap_of_backward(run, call)


@settings(max_examples=20)
@given(T=st.integers(1, 100), N=st.integers(1, 3), D=st.integers(1, 4), chunk=st.sampled_from([1, 4, 32]))
def test_attention_with_a_filter_is_the_convolution_of_the_products(T, N, D, chunk):
    call = make(B=1, T=1, F=3, N=N, seed=T)
    filter = [call[name] for name in ModalFilter._fields]
    generator = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, T, 3, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    products, _ = long_convolution((k[..., :, None] * v[..., None, :]).flatten(2), ModalFilter(*filter))
    expected = (q[..., None] * products.view(2, T, 3, D, D)).sum(-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "CHUNK", chunk)
        actual = filtered_attention(q, k, v, ModalFilter(*filter))
    with backend.use_backend("reference"):
        assert_same([filtered_attention(q, k, v, ModalFilter(*filter))], [expected])
    assert_same([actual], [expected])
    inputs = [q, k, v, *filter]
    assert_same(*(torch.autograd.grad(y.sin().sum(), inputs, retain_graph=True) for y in (actual, expected)))


def test_flops_are_counted_on_the_meta_device():
    def count(T, backward):
        x = torch.empty(64, T, 6, device="meta", requires_grad=True)
        kernel = torch.empty(3, T, device="meta", requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            y, _ = long_convolution(x, kernel)
            if backward:
                y.sum().backward()
        return counter.get_total_flops()

    assert [count(100, backward) for backward in (False, True)] == [2 * 384 * 100**2, 6 * 384 * 100**2]
    size = 8192
    transform = 2.5 * size * 13
    assert count(4096, False) == (2 * 384 + 3) * transform + 384 * 3 * size
    assert count(4096, True) == (5 * 384 + 9) * transform + 3 * 384 * 3 * size


def test_wrong_arguments_are_named():
    call = make()
    with pytest.raises(ValueError, match="F.*D"):
        run(call | {"x": torch.zeros(2, 5, 7)})
    with pytest.raises(ValueError, match="residue"):
        run(call | {"residue": torch.zeros(3, 4)})
    with pytest.raises(ValueError, match="skip"):
        run(call | {"skip": torch.zeros(6)})
    with pytest.raises(ValueError, match="initial_state"):
        run(call | {"initial_state": torch.zeros(2, 6, 4)})
    filter = ModalFilter(*(call[name] for name in ModalFilter._fields))
    with pytest.raises(ValueError, match=r"\[2, 5, 4, 6\]"):
        filtered_attention(*torch.zeros(3, 2, 5, 4, 6), filter)
    with pytest.raises(ValueError, match="long_convolution_step"):
        long_convolution_step(torch.zeros(2, 6), filter, torch.zeros(2, 6, 4))
