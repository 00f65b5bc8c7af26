"""The modal convolution on grids: both forms against the definition, with gradients, mostly in float64."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import modal_convolution, modal_grid_convolution, use_backend
from linnet.ops.modal import grid

INF = float("inf")


def make(*sides, B=2, D=3, E=4, directions=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    A = len(sides)
    log_decay, weight = -normal(A, directions, D, E).exp() / 5, normal(A, directions, D, E)
    return [one.to(dtype).requires_grad_() for one in (normal(B, *sides, D), log_decay, weight)]


def everything(tensors, form="chunked", **options):
    with use_backend(form):
        y = modal_grid_convolution(*tensors, **options)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        return [y, *torch.autograd.grad((y * weight).sum(), tensors)]


def assert_same(actual, expected, tolerance=1e-10):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


SIDES = [(1,), (7,), (40,), (3, 5), (1, 6), (2, 3, 4)]


@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("longest", [0, 4, 128])
def test_forms_are_the_definition(sides, directions, longest, monkeypatch):
    """Product, modes, and one of the two per axis."""
    monkeypatch.setattr(grid, "LONGEST_PRODUCT", longest)
    tensors = make(*sides, directions=directions)
    assert_same(everything(tensors), everything(tensors, "reference"))


def test_the_definition_is_the_sum_over_offsets():
    x, log_decay, weight = make(3, 4, B=1)
    kernels = (weight[..., None] * (log_decay[..., None] * torch.arange(4)).exp()).sum(-2)  # [A, R, D, j]
    y = torch.zeros_like(x)
    for r in range(3):
        for c in range(4):
            for u in range(3):
                y[0, r, c] += kernels[0, int(u > r), :, abs(u - r)] * x[0, u, c]
            for u in range(4):
                y[0, r, c] += kernels[1, int(u > c), :, abs(u - c)] * x[0, r, u]
    assert_same([modal_grid_convolution(x, log_decay, weight)], [y])


def test_one_direction_is_the_causal_convolution():
    x, log_decay, weight = make(40, directions=1)
    assert_same(
        [modal_grid_convolution(x, log_decay, weight)], [modal_convolution(x, log_decay[0, 0], weight[0, 0])[0]]
    )
    x, log_decay, weight = make(40)
    ahead = modal_convolution(x, log_decay[0, 0], weight[0, 0])[0]
    behind = modal_convolution(x.flip(1), log_decay[0, 1], weight[0, 1])[0].flip(1)
    assert_same([modal_grid_convolution(x, log_decay, weight)], [ahead + behind - weight[0, 1].sum(-1) * x])


def test_a_grid_of_one_row_is_a_sequence_and_what_its_own_axis_adds():
    x, log_decay, weight = make(1, 9)
    line = modal_grid_convolution(x[:, 0], log_decay[1:], weight[1:])
    assert_same([modal_grid_convolution(x, log_decay, weight)[:, 0]], [line + weight[0, 0].sum(-1) * x[:, 0]])


@pytest.mark.parametrize("directions", [1, 2])
def test_packed_rows_are_separate_rows(directions):
    tensors = make(21, B=1, directions=directions)
    cuts = torch.tensor([0, 5, 5, 6, 21], dtype=torch.int32)
    packed = everything(tensors, cu_seqlens=cuts)
    assert_same(packed, everything(tensors, "reference", cu_seqlens=cuts))
    x, *parameters = tensors
    rows = [modal_grid_convolution(x[:, a:b], *parameters) for a, b in [(0, 5), (5, 6), (6, 21)]]
    assert_same(packed[:1], [torch.cat(rows, 1)])


def test_modes_that_see_their_own_token_only():
    x, log_decay, weight = (one.detach() for one in make(3, 4))
    log_decay = torch.full_like(log_decay, -INF).requires_grad_()
    for form in ("chunked", "reference"):
        with use_backend(form):
            y = modal_grid_convolution(x, log_decay, weight)
        assert_same([y], [x * weight[:, 0].sum((0, -1))])
        assert torch.autograd.grad(y.sum(), log_decay)[0].isfinite().all()


def test_compiles_whole_and_maps(monkeypatch):
    monkeypatch.setattr(grid, "LONGEST_PRODUCT", 4)  # a product along one axis, modes along the other
    tensors = make(3, 6)
    compiled = torch.compile(modal_grid_convolution, fullgraph=True, backend="aot_eager")(*tensors)
    expected = modal_grid_convolution(*tensors)
    assert_same([compiled], [expected])
    assert_same(*(torch.autograd.grad(y.sin().sum(), tensors) for y in (compiled, expected)))
    models = [make(3, 6, seed=i) for i in range(3)]
    together = torch.vmap(modal_grid_convolution)(*(torch.stack(one) for one in zip(*models, strict=True)))
    assert_same(together, [modal_grid_convolution(*model) for model in models])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(dtype):
    x, log_decay, weight = make(14, 14)
    single = [x.to(dtype), log_decay.float(), weight.float()]
    y = modal_grid_convolution(*single)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(modal_grid_convolution(*single), y)
    assert y.dtype == dtype
    error = (y.double() - modal_grid_convolution(x, log_decay, weight)).norm() / y.double().norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


def test_flops_are_those_of_the_products():
    x, log_decay, weight = (one.detach().to("meta") for one in make(3, 5, B=2, D=6, E=4))
    with FlopCounterMode(display=False) as counter:
        modal_grid_convolution(x, log_decay, weight)
    assert counter.get_total_flops() == 2 * 15 * 6 * 2 * (3 + 5)  # both directions at once; tables are free


def test_bad_shapes_are_named():
    x, log_decay, weight = make(3, 4)
    cuts = torch.tensor([0, 3], dtype=torch.int32)
    for arguments, options in [
        ((x[:, 0], log_decay, weight), {}),
        ((x, log_decay[..., :2], weight), {}),
        ((x, log_decay[0], weight[0]), {}),
        ((x, log_decay, weight), {"cu_seqlens": cuts}),
        ((x[..., :2], log_decay, weight), {}),
    ]:
        with pytest.raises(ValueError, match="modal_grid_convolution"):
            modal_grid_convolution(*arguments, **options)
