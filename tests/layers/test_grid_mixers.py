"""Mixers in which every token sees all, on grids: what they are, and what they commute with. In float64."""

import pytest
import torch

from linnet.config import parse
from linnet.layers import LayerContext
from linnet.layers.base import find_mixer
from linnet.layers.positions import Grid, Lrpe

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


@pytest.mark.parametrize("directions, size", [("own", 2), ("shared", 1), ("forward", 1)])
def test_tpe_has_the_published_budget(directions, size):
    """128 numbers per channel and axis: paper 003, table 12 (vision.md's counts)."""
    for decay, numbers in (("learned", 128), ("fixed", 128)):
        tpe = build("tpe", {"directions": directions, "decay": decay}, axes=2)
        assert sum(parameter.numel() for parameter in tpe.parameters()) == 2 * D * numbers
        assert tpe.log_rate.shape[:3] == (2, size, D)
    assert build("tpe").directions == "own" and build("tpe").residual
    causal = build("tpe", causal=True)
    assert causal.directions == "forward" and not causal.residual and causal.weight.shape == (D, 64)


def test_tpe_starts_as_averages_over_up_to_two_sides():
    tpe = find_mixer("tpe")(parse(find_mixer("tpe").Config, {}), LayerContext(1, causal=False, axes=2, side=14))
    constants = (tpe.log_rate * -1).exp()[0, 0, 0]
    torch.testing.assert_close(constants[[0, -1]], torch.tensor([1.0, 28.0]))
    ones = torch.ones(1, 4000, 1)
    line = LayerContext(1, causal=False, side=14)
    tpe = find_mixer("tpe")(parse(find_mixer("tpe").Config, {"residual": False}), line)
    y = tpe(ones)[0][0, 2000, 0].item()
    assert 1.0 < y < 2.0  # one from those before and itself, less from those after


def test_tpe_is_its_kernels_and_the_tokens():
    grid = Grid((3, 4), prefix=2)
    tpe, x = build("tpe", {"num_modes": 5}, axes=2), inputs(grid.tokens)
    kernels = (tpe.weight[..., None] * (-tpe.log_rate.exp()[..., None] * torch.arange(4)).exp()).sum(-2)
    inside = x[:, 2:].unflatten(1, (3, 4))
    y = inside.clone()
    for r in range(3):
        for u in range(3):
            y[:, r] += kernels[0, int(u > r), :, abs(u - r)] * inside[:, u]
    for c in range(4):
        for u in range(4):
            y[:, :, c] += kernels[1, int(u > c), :, abs(u - c)] * inside[:, :, u]
    assert_same(run(tpe, x, grid), torch.cat([x[:, :2], y.flatten(1, 2)], 1))


@pytest.mark.parametrize("residual", [False, True])
def test_one_direction_of_tpe_is_the_causal_tpe(residual):
    options, x = {"num_modes": 5, "residual": residual}, inputs(11)
    forward, causal = build("tpe", options | {"directions": "forward"}), build("tpe", options, causal=True)
    causal.load_state_dict({name: one[0, 0] for name, one in forward.state_dict().items()})
    assert_same(run(forward, x), causal(x)[0])
    assert_same(run(forward, x, Grid((11,))), causal(x)[0])


def test_tpe_on_packed_sentences():
    tpe, x = build("tpe"), inputs(11, batch=1)
    packed = run(tpe, x, cu_seqlens=torch.tensor([0, 4, 11], dtype=torch.int32))
    assert_same(packed, torch.cat([run(tpe, x[:, :4]), run(tpe, x[:, 4:])], 1))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("directions", ["own", "shared"])
def test_only_own_directions_tell_left_from_right(directions, axis):
    grid = Grid((3, 4))
    tpe, lightnet, x = build("tpe", {"directions": directions}, axes=2), build("lightnet", axes=2), inputs(12)

    def both(x):
        return run(lightnet, run(tpe, x, grid), grid)

    def mirror(x):
        return on_grid(x, grid, lambda part: part.flip(axis))

    if directions == "shared":
        assert_same(both(mirror(x)), mirror(both(x)))
    else:
        assert differs(both(mirror(x)), mirror(both(x)))
        assert differs(both(mirror(x)).mean(1), both(x).mean(1))  # a classifier that pools by the mean sees it


def test_transposing_a_grid_and_its_parameters():
    grid, x = Grid((3, 4)), inputs(12)
    tpe, lightnet = build("tpe", axes=2), build("lightnet", axes=2)
    expected = run(lightnet, run(tpe, x, grid), grid)
    with torch.no_grad():
        tpe.log_rate.copy_(tpe.log_rate.flip(0))
        tpe.weight.copy_(tpe.weight.flip(0))
        theta = lightnet.lrpe.theta
        theta.copy_(theta.roll(3, 1))
        for name in ("q_proj", "k_proj"):
            projection = getattr(lightnet, name)
            projection.weight.copy_(projection.weight.view(2, 6, D).roll(3, 1).flatten(0, 1))

    def transpose(x, sides):
        return x.unflatten(1, sides).transpose(1, 2).flatten(1, 2)

    moved = run(lightnet, run(tpe, transpose(x, (3, 4)), Grid((4, 3))), Grid((4, 3)))
    assert_same(transpose(moved, (4, 3)), expected)


def test_tpe_on_three_axes_moves_with_the_tokens():
    """A token at one corner reaches each axis through it and no other place."""
    grid = Grid((2, 3, 4))
    tpe = build("tpe", axes=3)
    x = torch.zeros(1, 24, D, dtype=torch.float64)
    x[:, 0] = 1.0
    reached = run(tpe, x, grid)[0, :, 0].abs().view(2, 3, 4) > 1e-9
    expected = torch.zeros(2, 3, 4, dtype=torch.bool)
    expected[:, 0, 0] = expected[0, :, 0] = expected[0, 0, :] = True
    assert torch.equal(reached, expected)


def test_tpe_refuses_what_it_cannot_do():
    cls = find_mixer("tpe")
    config = parse(cls.Config, {"directions": "own"})
    assert "directions" in config.check(LayerContext(D))[0]
    assert not config.check(LayerContext(D, causal=False))
    with pytest.raises(ValueError, match="directions"):
        cls(config, LayerContext(D))
    tpe = build("tpe")
    assert tpe.state_spec(2, 8) == {}
    for call in (lambda: tpe.init_state(2, 8), lambda: tpe.step(inputs(1)[:, 0], {}), lambda: tpe(inputs(3), {})):
        with pytest.raises(ValueError, match="no next token"):
            call()
