"""Layers without causality: grids, scans in several orders, refused states, dropped paths."""

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.layers import dropout
from linnet.layers.positions import Grid
from linnet.models.backbone import Backbone
from linnet.models.config import EncoderConfig
from linnet.models.stack import class_token_problems

GRID = Grid((2, 3), prefix=1)


class Images(EncoderConfig):
    axes = 2


def encoder(layout="gla", cls=EncoderConfig, **values):
    options = {"gla": {"num_heads": 2}} if "gla" in layout else {}
    return parse(cls, {"d_model": 8, "layout": layout, "options": options} | values)


def build(config, **grid):
    torch.manual_seed(0)
    model = Backbone(config, causal=False, **grid).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def inputs(batch, length, width=8):
    return torch.randn(batch, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_the_orders_of_a_grid():
    rows, columns = [1, 2, 3, 4, 5, 6], [1, 4, 2, 5, 3, 6]
    both = [[0, *rows], [0, *rows[::-1]]]
    cross = [*both, [0, *columns], [0, *columns[::-1]]]
    assert [p.tolist() for p in GRID.orders("forward")] == both[:1]
    assert [p.tolist() for p in GRID.orders("both")] == both
    assert [p.tolist() for p in GRID.orders("cross")] == [p.tolist() for p in GRID.orders("series")] == cross
    assert GRID.tokens == 7 and GRID.orders("both")[0].dtype == torch.int64


def test_the_coordinates_of_a_grid():
    assert GRID.positions().tolist() == [[[0, 0], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]]
    assert GRID.positions().dtype == torch.int32 and GRID.positions() is GRID.positions("cpu")
    with torch.device("meta"):
        assert Grid((2, 2, 2)).positions("meta").shape == (1, 8, 3)
    with pytest.raises(ValueError, match="sides"):
        Grid((0, 3))


@pytest.mark.parametrize("scan_sum", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("scan", ["forward", "both", "cross", "series"])
def test_a_scan_is_one_call_per_order(scan, scan_sum):
    """The mixer with explicit permutations, on a grid that is not square."""
    config = encoder("mamba", Images, scan=scan, scan_sum=scan_sum)
    model, x = build(config, axes=2, prefix=1), inputs(2, 7)
    block = model.blocks[0]
    orders = GRID.orders(scan)
    stages = [orders[:2], orders[2:]] if scan == "series" else [orders]
    y = block.mixer_norm(x)
    for stage in stages:
        y = sum(block.mixer(y[:, order])[0][:, order.argsort()] for order in stage)
        y = y if scan_sum else y / len(stage)
    torch.testing.assert_close(block(x, grid=GRID)[0], x + y)
    assert block.passes(block.mixer) == {"forward": 1, "both": 2, "cross": 4, "series": 4}[scan]
    assert block.flops(7) == block.passes(block.mixer) * block.mixer.flops(7)


def test_a_model_without_causality_has_no_state():
    model, x = build(encoder("mamba")), inputs(1, 5)
    assert model.state_bytes(100) == 0 and model.blocks[0].state_spec(1, 9) == {}
    for call in (
        lambda: model.init_state(1, 5),
        lambda: model.step(x[:, 0], {}),
        lambda: model(x, {}),
        lambda: model.blocks[0].init_state(1, 5),
        lambda: model.blocks[0].step(x[:, 0], None, {}),
        lambda: model.blocks[0](x, {}),
    ):
        with pytest.raises(ValueError, match="no next token"):
            call()


def test_a_grid_that_does_not_fit_is_refused():
    model = build(encoder("mamba", Images), axes=2, prefix=1)
    assert model(inputs(2, 7), grid=GRID)[0].shape == (2, 7, 8)
    for grid in (None, Grid((2, 3)), Grid((2, 2), 1), Grid((6,), 1)):
        with pytest.raises(ValueError, match="grid"):
            model(inputs(2, 7), grid=grid)
    with pytest.raises(ValueError, match="grid"):
        build(encoder("mamba"))(inputs(2, 7), grid=GRID)


def test_a_scan_of_columns_needs_columns():
    with pytest.raises(ConfigError, match="scan: cross"):
        encoder("mamba", scan="cross")


def test_a_class_token_needs_a_mixer_that_sees_all():
    (problem,) = class_token_problems(encoder("mamba gla"))
    assert "pool: cls" in problem and "pool: mean" in problem


def losses(model, x, parts, cu_seqlens=None):
    """Gradients of a training step in several parts of the rows, or of the documents."""
    model.zero_grad()
    row = 0
    starts = torch.arange(len(x) + 1) * x.shape[1] if cu_seqlens is None else cu_seqlens
    weight = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
    for part in torch.arange(len(starts) - 1).tensor_split(parts):
        with dropout.position(holder(model), step=3, first_row=row, seed=5):
            if cu_seqlens is None:
                y, _ = model(x[part])
            else:
                first, last = starts[part[0]], starts[part[-1] + 1]
                y, _ = model(x[:, first:last], cu_seqlens=starts[part[0] : part[-1] + 2] - first)
        (y * weight).sum().backward()
        row += len(part)
    return [p.grad.clone() for p in model.parameters()]


def holder(model):
    outer = torch.nn.Module()
    outer.backbone = model
    return outer


@pytest.mark.parametrize("packed", [False, True])
def test_dropped_paths_and_masks_are_those_of_the_row(packed):
    """The same for any accumulation; other ones at another step; documents are rows."""
    model = build(encoder("gla+mlp x2", drop_path=0.5, dropout=0.2)).train()
    x = inputs(1, 24) if packed else inputs(6, 4)
    cu_seqlens = torch.tensor([0, 3, 9, 10, 15, 19, 24], dtype=torch.int32) if packed else None
    whole = losses(model, x, 1, cu_seqlens)
    for parts in (2, 6):
        torch.testing.assert_close(losses(model, x, parts, cu_seqlens), whole)
    assert model.blocks[0].mixer_path is None and model.blocks[1].mixer_path.p == 0.5


def test_a_path_is_dropped_for_whole_rows_with_its_probability():
    model = build(encoder("gla+mlp x2", drop_path=0.25)).train()
    block, x = model.blocks[1], torch.zeros(4000, 1, 8, dtype=torch.float64)
    with dropout.position(holder(model), step=0, seed=1):
        keys = model.dropout_position(x)
    path = block.mixer_path(torch.ones(4000, 3, 8), dropout.row_keys(keys.expand(-1, 3, -1), None))
    assert (path == path[:, :1, :1]).all() and path.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs((path[:, 0, 0] == 0).float().mean() - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5
    other = block.channel_path(torch.ones(4000, 3, 8), dropout.row_keys(keys.expand(-1, 3, -1), None))
    assert 0.3 < (other == path).float().mean() < 0.8  # each sublayer is dropped on its own
    model.eval()
    y = inputs(2, 5)
    torch.testing.assert_close(model(y)[0], build(encoder("gla+mlp x2")).eval()(y)[0])
