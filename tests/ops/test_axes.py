"""Positions on several axes in additive attention and in the rotation, and what the non-causal form commutes with."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import additive_attention, backend
from linnet.ops.additive import additive_step
from linnet.ops.rotation import rotate, rotate_reference


def coordinates(*sides, prefix=0):
    """int64 [1, T, A] of a grid in row-major order, after `prefix` tokens at 0."""
    grid = torch.tensor(list(itertools.product(*map(range, sides))))
    return torch.cat([grid.new_zeros(prefix, len(sides)), grid])[None]


def make(T, B=2, H=2, K=5, V=3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (H, K)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def attend(q, k, v, theta, positions=None, form="chunked", causal=False, **options):
    with backend.use_backend(form):
        return additive_attention(q, k, v, theta=theta, positions=positions, scale=0.7, causal=causal, **options)[0]


def everything(tensors, positions, form, **options):
    tensors = [x.detach().requires_grad_() for x in tensors]
    o = attend(*tensors, positions, form, **options)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [o, *torch.autograd.grad((o * weight).sum(), tensors)]


def assert_same(actual, expected, tolerance=1e-10):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


def by_hand(q, k, v, theta, positions):
    """o_t = scale sum_s v_s sum_c q_tc softmax(k)_sc cos(theta_c (t - s) on the axis of c): the kernel, in full."""
    K, A = q.shape[3], positions.shape[2]
    channel_axis = [c // (-(-K // A)) for c in range(K)]
    place = positions[..., channel_axis].double()  # [1 or B, T, K]
    turn = (place[:, :, None] - place[:, None])[:, :, :, None] * theta  # [1 or B, T, S, H, K]
    scores = (q[:, :, None] * k.softmax(1)[:, None] * turn.cos()).sum(-1)
    return 0.7 * torch.einsum("btsh,bshv->bthv", scores, v)


GRIDS = {"one axis": ((11,), 0), "3 x 5": ((3, 5), 0), "prefix": ((3, 5), 2), "three axes": ((2, 3, 2), 1)}


@pytest.mark.parametrize("sides, prefix", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("causal", [False, True])
def test_forms_agree_with_gradients(sides, prefix, causal):
    positions = coordinates(*sides, prefix=prefix)
    tensors = make(positions.shape[1])
    expected = everything(tensors, positions, "reference", causal=causal)
    assert_same(everything(tensors, positions, "chunked", causal=causal), expected)
    rows = positions.expand(2, -1, -1).clone()
    assert_same(everything(tensors, rows, "chunked", causal=causal), expected)
    if not causal:
        assert_same([by_hand(*tensors, positions)], expected[:1])


@pytest.mark.parametrize("largest", [50, 1000])  # of many coordinates no table is made
def test_rows_may_have_positions_of_their_own(largest):
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(3, largest, (2, 70, 2), generator=generator, dtype=torch.int32)
    tensors = make(70)
    assert_same(everything(tensors, positions, "chunked"), everything(tensors, positions, "reference"))
    alone = [x[:1] if x.ndim == 4 else x for x in tensors]
    assert_same([attend(*alone, positions[:1])], [attend(*tensors, positions)[:1]])


def test_packed_grids_are_separate_grids():
    cuts = torch.tensor([0, 6, 15], dtype=torch.int32)
    positions = torch.cat([coordinates(2, 3), coordinates(3, 3)], 1)
    tensors = make(15, B=1)
    for form in ("reference", "chunked"):
        packed = attend(*tensors, positions, form, cu_seqlens=cuts)
        for part in (slice(0, 6), slice(6, 15)):
            alone = attend(*(x[:, part] for x in tensors[:3]), tensors[3], positions[:, part], form)
            assert_same([packed[:, part]], [alone])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_axis_is_the_sequence_to_the_bit(causal, dtype):
    tensors = make(70, dtype=dtype)
    expected = attend(*tensors, causal=causal)
    for positions in (
        torch.arange(70)[None],
        torch.arange(70)[None, :, None],
        torch.arange(70).expand(2, -1)[..., None],
    ):
        assert torch.equal(attend(*tensors, positions, causal=causal), expected)
    x, _, _, theta = tensors
    expected = rotate(x, torch.arange(70).expand(2, -1), theta, doubling=True)
    for positions in (torch.arange(70)[None], torch.arange(70)[None, :, None]):
        assert torch.equal(rotate(x, positions, theta, doubling=True), expected)


@pytest.mark.parametrize("doubling", [True, False])
def test_rotation_turns_each_group_by_its_axis(doubling):
    positions, width = coordinates(3, 5, prefix=1), 5 if doubling else 10
    x, _, _, theta = make(16, K=width)
    theta = theta[:, :5].contiguous()
    x.requires_grad_()
    theta.requires_grad_()
    y = rotate(x, positions, theta, doubling=doubling)
    angle = positions[..., [0, 0, 0, 1, 1]][:, :, None] * theta
    a, b = (x, 0.0) if doubling else x.chunk(2, -1)
    expected = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    assert_same([y], [expected])
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    grads = [torch.autograd.grad((z * weight).sum(), (x, theta)) for z in (y, expected)]
    assert_same(*grads)
    with backend.use_backend("reference"):
        assert_same([rotate(x, positions.expand(2, -1, -1), theta, doubling=doubling)], [expected])


def test_compiles_whole_and_maps():
    positions, tensors = coordinates(3, 4), [x.requires_grad_() for x in make(12)]

    def run(q, k, v, theta):
        return attend(q, k, v, theta, positions) + rotate(q, positions, theta, doubling=True)[..., :3]

    expected = run(*tensors)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors)
    assert_same([compiled], [expected])
    assert_same(torch.autograd.grad(compiled.sin().sum(), tensors), torch.autograd.grad(expected.sin().sum(), tensors))
    models = [make(12, seed=i) for i in range(3)]
    stacked = [torch.stack(x) for x in zip(*models, strict=True)]
    assert_same(torch.vmap(run)(*stacked), [run(*model) for model in models])
    moved = torch.stack([positions, 2 * positions, positions.flip(1)])
    together = torch.vmap(attend)(*stacked, moved)
    assert_same(together, [attend(*model, at) for model, at in zip(models, moved, strict=True)])


def test_flops_do_not_depend_on_the_axes():
    q, k, v, theta = (torch.empty(*shape, device="meta", requires_grad=True) for shape in
                      [(2, 12, 3, 16), (2, 12, 3, 16), (2, 12, 3, 8), (3, 16)])  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, theta, coordinates(3, 4).to("meta")).sum().backward()
    assert counter.get_total_flops() == 12 * 2 * 12 * 3 * 32 * 8  # 4 K V and backward 8 K V, with 2 K for K


def test_bad_positions_name_the_shape():
    q, k, v, theta = make(12)
    for wrong in (
        coordinates(3, 5),
        coordinates(3, 4).expand(3, -1, -1),
        coordinates(3, 4).double(),
        torch.zeros(1, 12, 0),
    ):
        with pytest.raises(ValueError, match=r"positions must be integers .*T = 12"):
            attend(q, k, v, theta, wrong)
    for wrong in (coordinates(3, 5), coordinates(3, 4).expand(3, -1, -1), torch.arange(12)):
        with pytest.raises(ValueError, match="positions"):
            rotate(q, wrong, theta, doubling=True)
    S, z = torch.zeros(2, 2, 10, 3).double(), torch.zeros(2, 2, 5).double()
    with pytest.raises(ValueError, match="one axis"):
        additive_step(q[:, 0], k[:, 0], v[:, 0], (S, z), theta=theta, positions=torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="positions"):
        rotate(q[:, 0], torch.zeros(2, 2, dtype=torch.int64), theta, doubling=True)


# Symmetries of a non-causal layer, and a symmetry that it does not have (float64).


def test_permuting_tokens_without_positions_permutes_the_outputs():
    q, k, v, theta = make(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    moved = attend(q[:, order], k[:, order], v[:, order], None)
    assert_same([moved], [attend(q, k, v, None)[:, order]])
    at = coordinates(3, 4)  # and with positions, if these go along
    moved = attend(q[:, order], k[:, order], v[:, order], theta, at[:, order])
    assert_same([moved], [attend(q, k, v, theta, at)[:, order]])
    assert not torch.allclose(attend(q[:, order], k[:, order], v[:, order], theta, at), moved)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_shifting_one_axis_changes_nothing(axis):
    tensors, at = make(12), coordinates(2, 3, 2)
    shift = torch.zeros(3, dtype=torch.int64)
    shift[axis] = 17
    assert_same([attend(*tensors, at + shift)], [attend(*tensors, at)])


@pytest.mark.parametrize("axis", [0, 1])
def test_a_mirror_of_an_axis_commutes_with_lrpe(axis):
    """Why LightNet needs a position encoding that is not even: LRPE alone cannot tell left from right."""
    q, k, v, theta = make(12)
    at = coordinates(3, 4)

    def mirror(x):
        return x.unflatten(1, (3, 4)).flip(1 + axis).flatten(1, 2)

    assert_same([attend(mirror(q), mirror(k), mirror(v), theta, at)], [mirror(attend(q, k, v, theta, at))])


def test_transposing_the_grid_exchanges_the_groups():
    q, k, v, theta = make(12, K=6)

    def transpose(x):
        return x.unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2)

    def exchange(x):
        return x.roll(3, -1)

    moved = attend(exchange(transpose(q)), exchange(transpose(k)), transpose(v), exchange(theta), coordinates(4, 3))
    assert_same([moved], [transpose(attend(q, k, v, theta, coordinates(3, 4)))])


def test_the_last_causal_token_sees_the_grid():
    tensors, at = make(15), coordinates(3, 5)
    assert_same([attend(*tensors, at, causal=True)[:, -1]], [attend(*tensors, at)[:, -1]])


def test_rotated_products_are_the_attention():
    """The rotation of another mixer (cosFormer2 without causality: q (k^T v)) has the same kernel."""
    q, k, v, theta = make(12)
    at = coordinates(3, 4)
    turned = [rotate_reference(x, at, theta, True) for x in (q, k.softmax(1))]
    o = 0.7 * torch.einsum("bthk,bshk,bshv->bthv", *turned, v)
    assert_same([o], [attend(q, k, v, theta, at)])
