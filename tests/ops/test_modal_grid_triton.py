"""The kernels of MD-TPE on small grids against float64: on a GPU, and in Triton's interpreter."""

import importlib.util

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import modal_grid_convolution, use_backend
from linnet.ops.launching import record
from linnet.ops.modal import grid

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make(*sides, B=2, D=3, E=4, directions=2, dtype=torch.float32, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    x, rate, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in [(B, *sides, D), *[(len(sides), directions, D, E)] * 2]
    )
    return [x.to(device, dtype), (-rate.exp() / 5).to(device, torch.float32), weight.to(device, torch.float32)]


def everything(tensors, form):
    tensors = [x.detach().requires_grad_() for x in tensors]
    with use_backend(form), record() as kernels:
        y = modal_grid_convolution(*tensors)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
        found = [y, *torch.autograd.grad(y, tensors, dy)]
    assert ("modal.product_kernel" in kernels) == (form == "triton")
    return found


def assert_agrees(*sides, dtype=torch.float32, device="cuda", **options):
    tensors = make(*sides, dtype=dtype, device=device, **options)
    found = everything(tensors, "triton")
    expected = everything([x.double() for x in tensors], "chunked")
    for name, a, e in zip(["y", "x", "log_decay", "weight"], found, expected, strict=True):
        assert (a.double() - e).norm() <= TOLERANCE[dtype] * e.norm(), name


@gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sides", [(1, 1), (3, 5), (14, 14), (16, 16), (17, 32), (28, 4)])
def test_sides(sides, dtype):
    assert_agrees(*sides, dtype=dtype)
    assert_agrees(*sides, B=5, D=70, directions=1, dtype=dtype)


@gpu
def test_many_images():
    assert_agrees(16, 16, B=300, D=192, E=32, dtype=torch.bfloat16)


@gpu
def test_compiles_whole_and_gives_the_same_bits_again():
    tensors = [x.requires_grad_() for x in make(14, 14, D=192)]
    found = []
    for function in [torch.compile(modal_grid_convolution, fullgraph=True), *[modal_grid_convolution] * 2]:
        y = function(*tensors)
        found.append([y, *torch.autograd.grad(y.sin().sum(), tensors)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)  # the compiler takes cosines in its own way
    assert all(map(torch.equal, found[1], found[2]))


def check_models(device="cuda"):
    x, log_decay, weight = make(3, 6, device=device)
    models = [(x * scale, log_decay * scale, weight) for scale in (1, 2, 3)]
    with use_backend("triton"):
        together = torch.vmap(modal_grid_convolution)(*(torch.stack(one) for one in zip(*models, strict=True)))
        alone = torch.stack([modal_grid_convolution(*model) for model in models])
    assert torch.equal(together, alone)


@gpu
def test_models_are_mapped():
    check_models()


def test_the_op_is_known_without_a_device():
    shapes = [(2, 3, 4, 5), (3, 3, 5), (4, 4, 5)]
    x, rows, columns = inputs = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        y = grid.grid_product.forward(x, rows, columns)
        gradients = torch.autograd.grad(y.sum(), inputs)
    assert [one.shape for one in (y, *gradients)] == [torch.Size(one) for one in (shapes[0], *shapes)]
    assert counter.get_total_flops() == 3 * 2 * y.numel() * (3 + 4)


INTERPRETED = [
    ((3, 5), {}),
    ((20, 6), {"D": 40, "directions": 1}),
    ((1, 17), {"B": 1, "dtype": "bfloat16"}),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + 1


if __name__ == "__main__":
    for sides, options in INTERPRETED:
        options = options | {"dtype": getattr(torch, options.get("dtype", "float32")), "device": "cpu"}
        assert_agrees(*sides, **options)
        print(*sides, "agrees")
    check_models("cpu")
    print("a vmap agrees")
