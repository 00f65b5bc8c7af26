"""The short convolution: PyTorch's own against the plain form and, on a GPU or in the interpreter, the kernels."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, poison, widen

from linnet.ops import short_convolution, short_convolution_step, use_backend

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make(B=2, T=19, D=5, W=4, *, bias=True, dtype=torch.float64, device="cpu", models=()):
    """x and weight, and with `bias` also that and the offset."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, to=dtype):
        x = torch.randn(*models, *shape, generator=generator, dtype=torch.float64).to(device, to)
        return x.requires_grad_()

    wide = torch.promote_types(dtype, torch.float32)
    return [normal(B, T, D), normal(D, W, to=wide), *([normal(D, to=wide), normal(D, to=wide)] if bias else [])]


def run(x, weight, bias=None, offset=None, silu=False):
    return short_convolution(x, weight, bias, offset=offset, silu=silu)


def everything(inputs, form, silu, function=run):
    with use_backend(form):  # the backward is of the form that is chosen where it is called
        y = function(*inputs, silu=silu)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).bfloat16().to(y)  # alike in all dtypes
        return [y, *torch.autograd.grad(y, inputs, dy)]


def in_columns(x):
    """The same numbers as columns of a wider tensor."""
    wide = torch.nn.functional.pad(x.detach(), (8, 8), value=float("nan"))
    return wide[..., 8:-8].requires_grad_()


def tokens_first(x):
    """The same numbers in the order [T, B, D]: of one token it is contiguous, whatever the stride of that axis."""
    return torch.stack([*x.detach().unbind(1)]).transpose(0, 1).requires_grad_()


def assert_agrees(form, *sizes, silu=True, layout=None, **options):
    inputs = make(*sizes, **options)
    if layout is not None:
        inputs[0] = layout(inputs[0])
    expected = everything([x.detach().requires_grad_() for x in widen(inputs)], "reference", silu)
    poison(expected, inputs[0].dtype)
    found = everything(inputs, form, silu)
    assert [x.dtype for x in found] == [inputs[0].dtype, *(x.dtype for x in inputs)]
    assert_near(found, expected, TOLERANCE[inputs[0].dtype])


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("sizes", [(2, 19, 5, 4), (8, 1, 1, 4), (3, 2, 2, 3), (1, 9, 3, 1)])
def test_the_plain_form(sizes, silu):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert_agrees("chunked", *sizes, silu=silu, dtype=dtype)
    assert_agrees("chunked", *sizes, silu=silu, bias=False)


def test_autocast_leaves_the_arithmetic_alone():
    inputs = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(*inputs)
    assert torch.equal(actual, run(*inputs))


@pytest.mark.parametrize("bias", [False, True])
def test_operator_registration(bias):
    x, weight, *rest = make(bias=bias, models=(2,))
    arguments = (x.detach().flatten(0, 1).requires_grad_(), weight, *(rest or (None, None)), True)
    torch.library.opcheck(torch.ops.linnet.short_convolution.default, arguments)


def test_compiles_whole_and_gives_the_same():
    inputs = make()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_near(everything(inputs, "auto", True, compiled), everything(inputs, "auto", True))


@pytest.mark.parametrize("shared", ["nothing", "x", "weight"])
@pytest.mark.parametrize("bias", [False, True])
def test_vmap_equals_one_model_at_a_time(shared, bias):
    inputs, dims = make(bias=bias, models=(3,)), [0] * (2 + 2 * bias)
    if shared != "nothing":
        i = ("x", "weight").index(shared)
        inputs[i], dims[i] = inputs[i][0].detach().requires_grad_(), None
    together = torch.vmap(run, tuple(dims))(*inputs)
    apart = [run(*(x if dim is None else x[m] for x, dim in zip(inputs, dims, strict=True))) for m in range(3)]
    torch.testing.assert_close(together, torch.stack(apart))
    grads = (torch.autograd.grad(y.sin().sum(), inputs) for y in (together, torch.stack(apart)))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)


def stepped(x, weight, state, bias=None, offset=None, silu=False):
    """Token by token, with a state of its own for each, so that autograd can go back."""
    tokens = []
    for t in range(x.shape[1]):
        state = state.clone()
        tokens.append(short_convolution_step(x[:, t], weight, state, bias, offset=offset, silu=silu))
    return torch.stack(tokens, 1), state


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("sizes", [(2, 19, 5, 4), (3, 2, 2, 3), (1, 9, 3, 1), (2, 3, 2, 8)])
def test_every_form_continues_from_a_state(sizes, silu):
    """At once, in two calls, token by token, and the reference, in float64: outputs, states and all gradients."""
    x, weight, bias, offset = make(*sizes)
    B, T, D, W = sizes
    state = torch.randn(B, W - 1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inputs = [x, weight, bias, offset, state]
    options = {"offset": offset, "silu": silu, "output_final_state": True}

    def whole():
        return short_convolution(x, weight, bias, initial_state=state, **options)

    def in_two_calls():
        first, between = short_convolution(x[:, : T // 2], weight, bias, initial_state=state, **options)
        second, final = short_convolution(x[:, T // 2 :], weight, bias, initial_state=between, **options)
        return torch.cat([first, second], 1), final

    def reference():
        with use_backend("reference"):
            return whole()

    def everything(form):
        y, final = form()
        loss = (y.sin() * torch.arange(1.0, T + 1)[:, None]).sum() + final.square().sum()
        return [y, final, *torch.autograd.grad(loss, inputs)]

    expected = everything(lambda: stepped(x, weight, state, bias, offset, silu))
    for form in (whole, in_two_calls, reference):
        torch.testing.assert_close(everything(form), expected)


def test_without_a_state_the_zeros_before_the_first_token_are_one():
    x, weight, bias, offset = make()
    y, final = short_convolution(x, weight, bias, offset=offset, output_final_state=True)
    torch.testing.assert_close(y, run(x, weight, bias, offset))
    torch.testing.assert_close(final, (x + offset)[:, -3:])
    _, short = short_convolution(x[:, :2], weight, bias, output_final_state=True)
    assert not short[:, 0].any() and torch.equal(short[:, 1:], x[:, :2])
    half = short_convolution(x.bfloat16(), weight, bias, output_final_state=True)
    assert [part.dtype for part in half] == [torch.bfloat16, torch.float64]


@pytest.mark.parametrize("silu", [False, True])
def test_rows_documents_and_steps_round_once(silu):
    """In bfloat16, as a model is served: each tap that is rounded on its own changes a third of the outputs."""
    x, weight, bias, _ = (z.detach().bfloat16() for z in make(B=1, T=200))
    state = torch.zeros(1, 3, 5)
    forms = {
        "rows": short_convolution(x, weight, bias, silu=silu),
        "rows with a state": short_convolution(x, weight, bias, silu=silu, initial_state=state),
        "documents": short_convolution(x, weight, bias, silu=silu, cu_seqlens=torch.tensor([0, 0, 200]).int()),
        "steps": stepped(x, weight, state, bias, None, silu)[0],
    }
    exact = short_convolution(x.double(), weight.double(), bias.double(), silu=silu).bfloat16()
    for name, y in forms.items():
        assert y.dtype == torch.bfloat16, name
        assert (y == exact).float().mean() > 0.99, name


def test_documents_have_states_of_their_own():
    x, weight, bias, offset = make(B=1)
    bounds, options = [0, 2, 2, 11, 19], {"offset": offset, "silu": True, "output_final_state": True}
    state = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    together = short_convolution(
        x, weight, bias, initial_state=state, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), **options
    )
    alone = [
        short_convolution(x[:, a:b], weight, bias, initial_state=state[i : i + 1], **options)
        for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
    expected = [torch.cat([y for y, _ in alone], 1), torch.cat([final for _, final in alone])]
    torch.testing.assert_close(list(together), expected)
    inputs = [x, weight, bias, offset, state]
    found, wanted = (torch.autograd.grad(y.sin().sum() + s.square().sum(), inputs) for y, s in (together, expected))
    torch.testing.assert_close(found, wanted)


def test_no_tokens():
    x, weight, bias, _ = make(T=1)
    assert short_convolution(x[:, :0], weight, bias).shape == (2, 0, 5)


def test_wrong_arguments_are_named():
    x, weight, bias, _ = make()
    for call in ((x[0], weight), (x, weight.mT), (x, weight, bias[1:]), (x, weight[:, :0]), (x.long(), weight)):
        with pytest.raises(ValueError, match=r"short_convolution: x \["):
            short_convolution(*call)
    for state in (x.new_zeros(2, 4, 5), x.new_zeros(1, 3, 5), x.new_zeros(2, 3, 5).long()):
        with pytest.raises(ValueError, match="initial_state"):
            short_convolution(x, weight, initial_state=state)
        if state.is_floating_point():
            with pytest.raises(ValueError, match="short_convolution_step: x"):
                short_convolution_step(x[:, 0], weight, state)


@gpu
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels(dtype, silu):
    for T, D, W in ((1, 1, 4), (2, 100, 3), (127, 100, 3), (128, 256, 4), (129, 256, 4), (1000, 64, 8), (9, 64, 9)):
        assert_agrees("triton", 3, T, D, W, silu=silu, dtype=dtype, device="cuda", bias=D != 100)
        for layout in (in_columns, tokens_first):
            assert_agrees("triton", 3, T, D, W, silu=silu, dtype=dtype, device="cuda", layout=layout)


@gpu
def test_kernels_with_models_of_their_own_are_deterministic():
    inputs = make(16, 128, 256, 4, models=(24,), dtype=torch.bfloat16, device="cuda")
    call = torch.vmap(lambda *inputs: run(*inputs, silu=True))

    def everything_in(form):
        with use_backend(form):
            y = call(*inputs)
            return [y, *torch.autograd.grad(y.float().square().sum(), inputs)]

    first, again, plain = (everything_in(form) for form in ("triton", "triton", "chunked"))
    for a, b, e in zip(first, again, plain, strict=True):
        assert torch.equal(a, b) and (a.double() - e.double()).norm() <= 5e-3 * e.double().norm()


INTERPRETED = [
    ((2, 19, 5, 4), {}),
    ((1, 16, 128, 3), {"bias": False, "silu": False}),
    ((1, 20, 3, 4), {}),  # two segments
    ((2, 3, 33, 8), {"silu": False}),
    ((2, 19, 24, 4), {"layout": in_columns}),
    ((1, 9, 24, 4), {"layout": in_columns, "bias": False}),
    ((5, 1, 8, 4), {"layout": tokens_first}),
    ((2, 3, 8, 4), {"layout": tokens_first}),
    ((1, 2, 2, 1), {}),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED)


if __name__ == "__main__":
    from linnet.ops.shortconv import triton

    triton.SEGMENT = 16  # tokens instead of 128
    for sizes, options in INTERPRETED:
        assert_agrees("triton", *sizes, dtype=torch.float32, **options)
        print(*sizes, "agrees")
