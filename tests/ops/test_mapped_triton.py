"""Norms, gated activations and rotations under `torch.vmap` reach their Triton kernels, and give what PyTorch gives."""

import importlib.util

import pytest
import torch
from precision import assert_near, widen

from linnet.ops import use_backend
from linnet.ops.activation import gated_activation, log_sigmoid
from linnet.ops.norm import rms_norm
from linnet.ops.rotation import rotate

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

MODELS = 3


def check(device, function, arguments, dims):
    found = []
    for form, given in (("chunked", widen(arguments)), ("triton", arguments)):
        leaves = [x.to(device, copy=True) for x in given]
        wanted = [x.requires_grad_() for x in leaves if x.is_floating_point()]
        with use_backend(form):
            outputs = torch.vmap(function, tuple(dims))(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            generator = torch.Generator().manual_seed(1)
            weights = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
            found.append([*outputs, *torch.autograd.grad(outputs, wanted, weights)])
        assert (form == "triton") == reaches_kernel(outputs[0])
    expected, actual = found
    assert_near(actual, expected)


def reaches_kernel(x):
    """Whether a kernel's autograd function is behind a tensor."""
    waiting = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node.name().startswith(("_RmsNorm", "_GatedActivation", "_LogSigmoid", "_Rotate")):
            return True
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return False


def check_norms(device):
    randn = torch.randn
    many = 70 if device == "cuda" else 9  # of some programs in either case
    for width, rows in ((24, (2, 5)), (128, (3, many)), (16, (2, many, 3)), (8, ())):
        arguments = (randn(MODELS, *rows, width), randn(MODELS, width))
        check(device, rms_norm, arguments, (0, 0))
        gate, residual = randn(MODELS, *rows, width), randn(*rows, width)
        check(
            device,
            lambda x, w, g, r: rms_norm(x, w, gate=g, gate_activation="silu", residual=r),
            (*arguments, gate, residual),
            (0, 0, 0, None),
        )
    check(device, rms_norm, (randn(MODELS, 2, 4100), randn(MODELS, 4100)), (0, 0))
    check(device, rms_norm, (randn(4, MODELS, 24),), (1,))
    check(device, rms_norm, (randn(4, MODELS, 24), randn(24)), (1, None))
    check(device, rms_norm, (randn(4, 24), randn(MODELS, 24)), (None, 0))
    check(device, lambda x, w: rms_norm(x, w, keep=True), (randn(4, MODELS, 24), randn(MODELS, 24)), (1, 0))


def check_activations(device):
    arguments = (torch.randn(MODELS, 4, 50), torch.randn(4, 50))
    check(device, lambda gate, x: gated_activation(gate, x, "silu"), arguments, (0, None))
    check(device, lambda x: log_sigmoid(x, 16.0), (4 * torch.randn(2, MODELS, 50),), (1,))


def check_rotations(device):
    places = torch.arange(7).expand(4, 7)
    check(device, rotate, (torch.randn(4, MODELS, 7, 3, 8), places, torch.randn(1, 4)), (1, None, None))


def check_log_sigmoid(device):
    """Against float64, to the last digits where it is near 0 and where it is not."""
    x = torch.cat([torch.linspace(-100, 100, 3001), torch.tensor([0.0, 1e-8, -1e-8, 30.0, 88.0])]).to(device)
    with use_backend("triton"):
        leaf = x.clone().requires_grad_()
        y = log_sigmoid(leaf, 16.0)
        (slope,) = torch.autograd.grad(y.sum(), leaf)
    wide = x.double().requires_grad_()
    expected = torch.nn.functional.logsigmoid(wide) / 16
    (expected_slope,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(slope.double(), expected_slope, rtol=1e-5, atol=1e-37)


CHECKS = (check_log_sigmoid, check_norms, check_activations, check_rotations)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("check_op", CHECKS)
def test_on_a_gpu(check_op):
    check_op("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(CHECKS)


if __name__ == "__main__":
    for check_op in CHECKS:
        check_op("cpu")
        print(check_op.__name__, "agrees")
