"""Attention with a long filter in its kernels against float64: on a GPU, and small shapes in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, poison, widen

from linnet.ops import ModalFilter, filtered_attention, long_convolution, use_backend
from linnet.ops.longconv import chunked
from linnet.ops.longconv.chunked import transpose

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make(R, T, H, D, *, models=1, dtype=torch.float32, device="cuda"):
    """q, k, v, filters and a gradient, as the registered op has them."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    q, k, v, dy = (normal(R, T, H, D).to(dtype) for _ in range(4))
    return (q, k, v, normal(models, H, T).to(torch.promote_types(dtype, torch.float32))), dy


def run(form, inputs, dy):
    return [form.attend_forward(*inputs), *form.attend_backward(*inputs, dy)]


def assert_agrees(*sizes, **options):
    from linnet.ops.longconv import triton

    inputs, dy = make(*sizes, **options)
    expected = run(chunked, widen(inputs), dy.double())
    poison(expected, dy.dtype)
    with launching("longconv."):
        found = run(triton, inputs, dy)
    assert [x.dtype for x in found] == [x.dtype for x in (inputs[0], *inputs)]
    assert_near(found, expected, TOLERANCE[dy.dtype])
    assert all(torch.equal(a, b) for a, b in zip(found, run(triton, inputs, dy), strict=True))


def test_all_pairs_at_once_are_the_attention():
    """The plain form that the kernels are held against, through autograd and for models of their own."""
    (q, k, v, filters), dy = make(4, 9, 2, 3, models=2, dtype=torch.float64, device="cpu")
    products = (k[..., :, None] * v[..., None, :]).flatten(2)
    rows = [products[i : i + 1] for i in range(4)]
    summed = torch.cat([long_convolution(x, filters[i // 2])[0] for i, x in enumerate(rows)])
    expected = (q[..., None] * summed.view(4, 9, 2, 3, 3)).sum(-2)
    torch.testing.assert_close(chunked.attend_forward(q, k, v, filters), expected)
    op = torch.ops.linnet.filtered_attention.default
    arguments = [x.requires_grad_() for x in (q, k, v, filters)]
    torch.library.opcheck(op, tuple(arguments))
    assert torch.autograd.gradcheck(op, arguments)


def test_vmap_of_the_op():
    (q, k, v, filters), _ = make(6, 5, 2, 3, models=3, dtype=torch.float64, device="cpu")
    op = torch.ops.linnet.filtered_attention.default
    expected = op(q, k, v, filters).unflatten(0, (3, 2))
    members = [x.unflatten(0, (3, -1)).requires_grad_() for x in (q, k, v, filters)]
    together = torch.vmap(op)(*members)
    torch.testing.assert_close(together, expected)
    apart = torch.stack([op(*(x[i] for x in members)) for i in range(3)])
    for a, e in zip(*(torch.autograd.grad(y.sin().sum(), members) for y in (together, apart)), strict=True):
        torch.testing.assert_close(a, e)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("D", [8, 33, 64])
def test_kernels(D, dtype):
    for T in (1, 64, 130):
        assert_agrees(4, T, 2, D, models=2, dtype=dtype)


@gpu
def test_many_rows_and_tiles():
    assert_agrees(24 * 16, 128, 16, 8, models=24, dtype=torch.bfloat16)
    assert_agrees(2, 1000, 3, 16)


@gpu
def test_the_form_of_long_sequences_agrees():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to("cuda", dtype).requires_grad_()

    filter = ModalFilter(-normal(4, 2).detach().exp(), normal(4, 2), normal(4, 2, 2), normal(4))
    inputs = [normal(2, 300, 4, 8, dtype=torch.bfloat16) for _ in range(3)]

    def everything(form):
        with use_backend(form):
            y = filtered_attention(*inputs, filter)
            return [y, *torch.autograd.grad(y.float().square().sum(), [*inputs, *filter[1:]])]

    for a, e in zip(everything("triton"), everything("chunked"), strict=True):
        assert (a.double() - e.double()).norm() <= 5e-3 * e.double().norm()


@gpu
@pytest.mark.parametrize("T", [64, 130, 256, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_convolution(T, dtype):
    """By Toeplitz product, of bfloat16 for bfloat16 inputs, and by FFT, with transpositions in a kernel."""
    generator = torch.Generator().manual_seed(0)
    x, kernel, dy = (torch.randn(*shape, generator=generator).cuda() for shape in ((130, T, 24), (8, T), (130, T, 24)))

    def everything(to):
        leaves = x.to(dtype).to(to).requires_grad_(), kernel.to(torch.promote_types(to, torch.float32)).requires_grad_()
        y = long_convolution(*leaves)[0]
        return [y, *torch.autograd.grad(y, leaves, dy.to(dtype).to(to))]

    assert_near(everything(dtype), everything(torch.float64), TOLERANCE[dtype])


def assert_transposes(*shape, dtype, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for to in (dtype, torch.float32):
        with use_backend("triton"):
            y = transpose(x, to)
        assert y.is_contiguous() and torch.equal(y, x.mT.to(to))


@gpu
def test_transposition():
    for shape in ((3, 128, 64), (2, 130, 70), (1, 1, 1), (24, 2048, 128)):
        for dtype in (torch.bfloat16, torch.float32):
            assert_transposes(*shape, dtype=dtype, device="cuda")


INTERPRETED = [((2, 20, 2, 3), {}), ((4, 9, 1, 17), {"models": 2}), ((3, 40, 1, 8), {"dtype": "float16"})]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + 1


if __name__ == "__main__":
    from linnet.ops.longconv import triton

    triton.TILE = 16  # tokens instead of 64
    for sizes, options in INTERPRETED:
        assert_agrees(*sizes, device="cpu", **options | {"dtype": getattr(torch, options.get("dtype", "float32"))})
        print(*sizes, "agrees")
    for shape in ((2, 130, 70), (1, 64, 64), (1, 1, 3)):
        assert_transposes(*shape, dtype=torch.float16, device="cpu")
    print("transposition agrees")
