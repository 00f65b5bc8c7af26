"""Causal attention with narrow heads: the kernels against PyTorch in float64, on a GPU and in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, widen
from torch.nn import functional as F

from linnet.ops import use_backend
from linnet.ops.attention import causal_attention, full_attention

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def expected_of(tensors, do):
    tensors = [x.detach().requires_grad_() for x in widen(tensors)]
    q, k, v = (x.transpose(-3, -2) for x in tensors)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    o = (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(-3, -2)
    return [o, *torch.autograd.grad(o, tensors, do.double())]


def check(shape, dtype=torch.float32, device="cuda", models=0, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    given = (models, *shape) if models else shape
    q, k, v, do = (torch.randn(given, generator=generator).to(device, dtype) for _ in range(4))
    tensors = [x.requires_grad_() for x in (q * scale, k, v)]
    torch.full((4, *given), float("nan"), device=device, dtype=dtype)  # left in the memory that results will get
    function = torch.vmap(causal_attention) if models else causal_attention
    with use_backend("triton"):
        o = function(*tensors)
        found = [o, *torch.autograd.grad(o, tensors, do)]
        again = function(*tensors)
    assert o.dtype == dtype and torch.equal(o, again)
    # The gradients of sharp shares are small differences of what was rounded.
    assert_near(found, expected_of(tensors, do), TOLERANCE[dtype] * (1 if scale == 1 else 4), least=1.0)


def check_strided_sums(device):
    """What a forward left may come back laid out otherwise (by hooks of saved tensors, say)."""
    from linnet.ops.attention.triton import attend_backward, attend_forward

    q, k, v, do = (torch.randn(2, 9, 3, 8, generator=torch.Generator().manual_seed(i)).to(device) for i in range(4))
    o, lse = attend_forward(q, k, v)
    strided = torch.full((*lse.shape, 2), float("nan"), device=device)
    strided[..., 1] = lse
    found = attend_backward(q, k, v, o, strided[..., 1], do)
    assert all(torch.equal(a, b) for a, b in zip(found, attend_backward(q, k, v, o, lse, do), strict=True))


@gpu
def test_strided_sums():
    check_strided_sums("cuda")


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 128, 16, 8), (2, 256, 4, 32), (2, 1, 3, 8), (2, 100, 2, 12), (1, 1024, 2, 16)])
def test_agrees_with_float64(shape, dtype):
    check(shape, dtype)
    check(shape, dtype, models=3)
    check(shape, dtype, scale=8.0)


@gpu
def test_compiles_as_one_graph_with_and_without_vmap():
    tensors = [torch.randn(3, 2, 32, 4, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for function, inputs in ((causal_attention, [x[0] for x in tensors]), (torch.vmap(causal_attention), tensors)):
        expected = function(*inputs)
        found = torch.compile(function, fullgraph=True)(*inputs)
        assert torch.equal(found, expected)
        grads = [torch.autograd.grad(y.float().square().sum(), tensors) for y in (expected, found)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


@gpu
@pytest.mark.parametrize("attend", [causal_attention, full_attention])
@pytest.mark.parametrize(("form", "length", "width"), [("auto", 33, 40), ("chunked", 33, 8), ("chunked", 128, 8)])
def test_what_runs_in_pytorch_under_vmap_agrees_too(form, length, width, attend):
    tensors = [torch.randn(3, 2, length, 4, width, device="cuda", requires_grad=True) for _ in range(3)]
    with use_backend(form):
        o = torch.vmap(attend)(*tensors)
    each = [x.double().transpose(2, 3) for x in tensors]
    expected = F.scaled_dot_product_attention(*each, is_causal=attend is causal_attention).transpose(2, 3)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(x.square().sum(), tensors) for x in (o, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_shapes_are_checked():
    q = torch.randn(2, 3, 4, 8)
    with pytest.raises(ValueError, match=r"\[2, 3, 4, 8\]"):
        causal_attention(q, q, q[:, :2])


INTERPRETED = [
    ((2, 37, 2, 8), torch.float32),
    ((1, 70, 1, 12), torch.float32),
    ((1, 1, 1, 4), torch.float32),
    ((1, 20, 1, 8), torch.float32, "cpu", 3),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + 1


if __name__ == "__main__":
    for shape, dtype, *rest in INTERPRETED:
        check(shape, dtype, *(rest or ["cpu"]))
        print(shape, dtype, "agrees")
    check_strided_sums("cpu")
    print("strided sums", "agrees")
