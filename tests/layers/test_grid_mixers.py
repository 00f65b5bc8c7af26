"""Mixers in which every token sees all, on grids: what they are, and what they commute with. In float64."""

import pytest
import torch

from linnet.config import parse
from linnet.layers import LayerContext
from linnet.layers.base import find_mixer
from linnet.layers.positions.grid import Grid
from linnet.layers.positions.lrpe import Lrpe

D = 12


def build(name, options=None, axes=1, side=None, causal=False):
    """A mixer with every weight random, so that no term is silent."""
    cls = find_mixer(name)
    options = {"num_heads": 2, **(options or {})} if name == "lightnet" else options or {}
    torch.manual_seed(0)
    mixer = cls(parse(cls.Config, options), LayerContext(D, causal=causal, axes=axes, side=side)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return mixer


def inputs(length, batch=2):
    return torch.randn(batch, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run(mixer, x, grid=None, **options):
    y, state = mixer(x, None, options.get("cu_seqlens"), grid)
    assert state is None
    return y


def on_grid(x, grid, change):
    """x with its grid part [B, *sides, D] changed; the prefix stays."""
    moved = change(x[:, grid.prefix :].unflatten(1, grid.sides)).flatten(1, len(grid.sides))
    return torch.cat([x[:, : grid.prefix], moved], 1)


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def differs(a, b):
    return (a - b).abs().max() > 1e-3


def test_lrpe_starts_anew_in_the_group_of_each_axis():
    theta = Lrpe(2, 7, axes=2).theta
    group = 100.0 ** (-2 * torch.arange(4.0) / 4)
    torch.testing.assert_close(theta, torch.cat([group, group[:3]]).expand(2, -1))
    torch.testing.assert_close(Lrpe(1, 6, "real", axes=3, base=10.0).theta[0], torch.ones(3))
    torch.testing.assert_close(Lrpe(2, 4, base=100.0).theta.flatten(), 100.0 ** (-2 * torch.arange(8.0) / 8))
    assert Lrpe(2, 6, shared_heads=True, axes=2).theta.shape == (1, 6)


def test_lightnet_of_one_axis_is_that_of_the_sequence():
    mixer, x = build("lightnet"), inputs(11)
    assert torch.equal(run(mixer, x), run(mixer, x, Grid((11,))))
    causal = build("lightnet", causal=True)
    causal.load_state_dict(mixer.state_dict())
    assert_same(causal(x)[0][:, -1], run(mixer, x)[:, -1])
    cuts = torch.tensor([0, 4, 11], dtype=torch.int32)
    packed = run(mixer, x[:1], cu_seqlens=cuts)
    assert_same(packed, torch.cat([run(mixer, x[:1, :4]), run(mixer, x[:1, 4:])], 1))


def test_lightnet_sees_coordinates_and_no_mirror():
    grid = Grid((3, 4), prefix=1)
    mixer, x = build("lightnet", axes=2), inputs(grid.tokens)
    y = run(mixer, x, grid)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(12)])
    assert differs(run(mixer, x[:, order], grid), y[:, order])
    bare = build("lightnet", {"lrpe": False}, axes=2)
    assert_same(run(bare, x[:, order], grid), run(bare, x, grid)[:, order])
    for axis in (1, 2):  # without the prefix, which stays at 0 while the grid moves
        flat, inside = Grid((3, 4)), x[:, 1:]
        mirrored = run(mixer, on_grid(inside, flat, lambda part, axis=axis: part.flip(axis)), flat)
        assert_same(mirrored, on_grid(run(mixer, inside, flat), flat, lambda part, axis=axis: part.flip(axis)))


def test_lightnet_without_causality_has_no_state():
    mixer, x = build("lightnet"), inputs(5)
    assert mixer.state_spec(2, 8) == {}
    for call in (lambda: mixer.init_state(2, 8), lambda: mixer.step(x[:, 0], {}), lambda: mixer(x, {})):
        with pytest.raises(ValueError, match="no next token"):
            call()
