"""Exchanges between the ranks that share a row: states, halos and all-to-all, against one process with whole rows."""

import functools

import pytest
import torch
import torch.distributed as dist

from linnet.ops import sequence
from linnet.train import recompute


def folds(states, decays, grads, kind, method):
    """(the entering state, gradients of state and decay) of this rank, and the names of the graph's nodes."""
    rank = dist.get_rank()
    with sequence.sequence_parallel(dist.group.WORLD, method):
        state = states[rank].clone().requires_grad_()
        decay = None if decays is None else decays[rank].clone().requires_grad_()
        found = sequence.exchange(state, decay, kind=kind)
        found.backward(grads[rank])
        after = sequence.exchange(state.detach(), None if decay is None else decay.detach(), reverse=True, kind=kind)
    return found.detach(), after, state.grad, None if decay is None else decay.grad


def folds_normalised(states, sums, grads, grads_z, method):
    rank = dist.get_rank()
    with sequence.sequence_parallel(dist.group.WORLD, method) as place:
        state, z = states[rank].clone().requires_grad_(), sums[rank].clone().requires_grad_()
        found, found_z = sequence.normalised.call(state, z, None, place.name, place.method)
        finite = found_z > -torch.inf
        torch.autograd.backward([found, found_z.masked_fill(~finite, 0.0)], [grads[rank], grads_z[rank]])
    return found.detach(), found_z.detach(), state.grad, z.grad


def moves(xs, weights, length, width):
    """Halos and all-to-all of this rank, with the gradient of its x."""
    rank = dist.get_rank()
    with sequence.sequence_parallel(dist.group.WORLD):
        assert sequence.first_position(length) == rank * length
        x = xs[rank].clone().requires_grad_()
        halo = sequence.halo(x, width)
        heads = sequence.all_to_all(x, 1, 2)
        back = sequence.all_to_all(heads * 2.0, 2, 1)
        ((halo * weights[:, :width]).sum() + (back * weights).sum()).backward()
    return halo.detach(), heads.detach(), back.detach(), x.grad


def kept(x):
    """By mode, eager and compiled: the gradient of x through all exchanges of a recomputed block, and collectives."""
    counts = {"gather": 0, "shift": 0, "all_to_all": 0}

    def count(module, name, key):
        original = getattr(module, name)

        def counted(*args, **kwargs):
            counts[key] += 1
            return original(*args, **kwargs)

        setattr(module, name, counted)
        return functools.partial(setattr, module, name, original)

    undo = [
        count(sequence, "all_gather", "gather"),
        count(dist, "batch_isend_irecv", "shift"),
        count(dist, "all_to_all_single", "all_to_all"),
    ]

    def block(x):
        state = sequence.exchange((x * x).sum(1), x.mean(1).sigmoid())
        place = sequence.span()
        scaled, z = sequence.normalised.call(state[..., None].exp(), state, None, place.name, place.method)
        halo = sequence.halo(x, 2)
        whole = sequence.all_to_all(sequence.all_to_all(x.sin()[..., None], 1, 2), 2, 1)[..., 0]
        return whole * state[:, None] + (scaled[..., 0] + z.exp())[:, None] + halo.sum(1, keepdim=True).tanh()

    def recomputed(mode, compiled):
        module = torch.nn.Module()
        module.backbone = torch.nn.Module()
        module.backbone.blocks = [torch.nn.Module()]
        module.backbone.blocks[0].forward = block
        recompute.apply(module, mode, exchanges=True, compiled=compiled)
        run = module.backbone.blocks[0].forward
        return torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run

    with sequence.sequence_parallel(dist.group.WORLD):
        results = {}
        for case in (("none", False), ("selective", False), ("block", False), ("selective", True), ("block", True)):
            y = x[dist.get_rank()].clone().requires_grad_()
            recomputed(*case)(y).square().sum().backward()
            results[case] = y.grad, dict(counts)
            counts.update(dict.fromkeys(counts, 0))
    for restore in undo:
        restore()
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", ["channels", "none", "pairs", "matrices"])
def test_exchange(pool, world, kind):
    """The state that enters, in both directions, and all gradients, against the recurrence in plain PyTorch."""
    torch.manual_seed(world)
    pairs = kind == "pairs"
    shape, decay_shape = ((2, 3, 2), (2, 3, 2)) if pairs else ((2, 3, 4, 5), (3, 4, 4 if kind == "matrices" else 1))
    states, grads = torch.randn(2, world, *shape, dtype=torch.float64)
    decays = None
    if kind != "none":
        decays = 0.5 * torch.randn(world, *(decay_shape if pairs else (1, *decay_shape)), dtype=torch.float64)
        decays[1, ..., 0, :] = 0.0  # what a document boundary or a decay to zero leaves
    how = "channels" if kind == "none" else kind
    results = {m: pool.run(world, folds, states, decays, grads, how, m) for m in ("gather", "scan")}

    def view(x):
        return torch.view_as_complex(x) if pairs else x

    def real(x):
        return torch.view_as_real(x) if pairs else x

    def passed(x, i):
        if decays is None:
            return x
        return decays[i] @ x if kind == "matrices" else x * view(decays[i])

    states.requires_grad_()
    if decays is not None:
        decays.requires_grad_()
    before, after = [torch.zeros_like(view(states[0]))], [torch.zeros_like(view(states[0]))]
    for i in range(world - 1):
        before.append(passed(before[-1], i) + view(states[i]))
    for i in range(world - 1, 0, -1):
        after.append(passed(after[-1], i) + view(states[i]))
    torch.autograd.backward([real(x) for x in before[1:]], list(grads[1:]))
    for found in results.values():
        for rank, (entering, leaving, dstate, ddecay) in enumerate(found):
            torch.testing.assert_close(entering, real(before[rank]).detach(), rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(leaving, real(after[world - 1 - rank]).detach(), rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(dstate, states.grad[rank], rtol=1e-13, atol=1e-13)
            if decays is not None:
                torch.testing.assert_close(ddecay, decays.grad[rank], rtol=1e-13, atol=1e-13)
    if kind == "none":  # float64 sums in the order of the ranks: the same bits each time
        assert all(torch.equal(x[0], real(before[i])) for i, x in enumerate(results["gather"]))


@pytest.mark.parametrize("rows", [1, 2])
def test_exchange_normalised(pool, rows):
    """Log-sums of -inf (no token seen) and states of K and 2 K rows."""
    torch.manual_seed(rows)
    world = 4
    states, grads = torch.randn(2, world, 1, 2, 3 * rows, 4, dtype=torch.float64)
    sums, grads_z = torch.randn(2, world, 1, 2, 3, dtype=torch.float64)
    sums = sums * 30
    sums[:2, :, 0, 1] = -torch.inf
    states[:2, :, 0, 1::3] = 0.0
    results = [pool.run(world, folds_normalised, states, sums, grads, grads_z, m) for m in ("gather", "scan")]
    states.requires_grad_()
    sums.requires_grad_()
    for rank in range(1, world):
        z = sums[:rank].logsumexp(0)
        weights = (sums[:rank] - z.masked_fill(z == -torch.inf, 0.0)).exp()
        entering = (torch.cat([weights] * rows, -1)[..., None] * states[:rank]).sum(0)
        for found in results:
            torch.testing.assert_close(found[rank][0], entering.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found[rank][1], z.detach(), rtol=1e-13, atol=1e-13)
        finite = z > -torch.inf
        ((entering * grads[rank]).sum() + (z.masked_fill(~finite, 0.0) * grads_z[rank]).sum()).backward()
    for found in results:
        for rank in range(world):
            expected = sums.grad[rank].nan_to_num(0.0)
            torch.testing.assert_close(found[rank][2], states.grad[rank].nan_to_num(0.0), rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(found[rank][3], expected, rtol=1e-10, atol=1e-10)


def test_moves(pool):
    """Halos, and from spans of all heads to whole rows of some heads and back, with gradients."""
    torch.manual_seed(0)
    world, length, width = 4, 5, 3
    whole = torch.randn(2, world * length, 4, 3, dtype=torch.float64)
    weights = torch.randn(2, length, 4, 3, dtype=torch.float64)
    found = pool.run(world, moves, torch.stack(whole.chunk(world, 1)), weights, length, width)
    for rank, (halo, heads, back, grad) in enumerate(found):
        assert torch.equal(heads, whole[:, :, rank : rank + 1])
        assert torch.equal(back, 2.0 * whole.chunk(world, 1)[rank])
        expected = torch.zeros_like(halo) if rank == 0 else whole[:, rank * length - width : rank * length]
        assert torch.equal(halo, expected)
        expected = 2.0 * weights
        if rank < world - 1:
            expected[:, -width:] += weights[:, :width]
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-14)


def test_recomputed_and_compiled(pool):
    """Recomputation repeats no exchange, and a compiled block (`fullgraph`) has the gradients of the eager one."""
    x = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    for found in pool.run(2, kept, x):
        expected, _ = found["none", False]
        for (mode, _), (grad, counts) in found.items():
            torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-13)
            repeated = 2 if mode == "block" else 0  # activations, which all ranks can exchange again
            assert counts == {"gather": 4, "shift": 2, "all_to_all": 4 + repeated}  # once, and once backward


def test_matrices_join_in_float32_under_autocast():
    first, second, over = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        joined, decay = sequence.join_matrices((first, over), (second, over))
    torch.testing.assert_close(joined, second + over @ first)
    torch.testing.assert_close(decay, over @ over)


def test_without_ranks():
    """One process: rows are whole, positions start at 0, and a request for another rank says what to do."""
    with sequence.sequence_parallel(None):
        assert sequence.span() is None
        assert sequence.first_position(7) == 0
        starts = torch.tensor([[0, 3]], dtype=torch.int32)
        assert sequence.cut_documents(starts, 5) is starts
        with pytest.raises(RuntimeError, match="sequence_parallel"):
            sequence.exchange(torch.zeros(2))
    with pytest.raises(ValueError, match="method"), sequence.sequence_parallel(None, "zigzag"):
        pass
