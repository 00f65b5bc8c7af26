"""Windows and documents by compiled flex attention on a GPU."""

import pytest
import torch
from test_attention import draw, expected, offsets

from linnet.ops import SlowPathWarning, backend
from linnet.ops.attention import causal_attention, flex, full_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BOUNDS = [0, 1, 60, 60, 160, 260, 301]


@pytest.fixture
def calls(monkeypatch):
    """The shapes that flex attention ran on."""
    found, attend = [], flex.attend_flex

    def spy(q, *rest):
        found.append(tuple(q.shape))
        return attend(q, *rest)

    monkeypatch.setattr(flex, "attend_flex", spy)
    return found


def on_gpu(**shape):
    tensors, do = draw(**shape)
    return [x.detach().cuda().requires_grad_() for x in tensors], do.cuda()


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 5e-3), (torch.float32, 5e-3)])
@pytest.mark.parametrize("heads, groups, width", [(4, 2, 64), (2, 2, 8), (3, 1, 128), (2, 2, 192)])
@pytest.mark.parametrize("window, bounds", [(100, None), (0, BOUNDS), (70, BOUNDS)])
def test_agrees_with_float64(window, bounds, heads, groups, width, dtype, tolerance, calls):
    batch = 2 if bounds is None else 1
    tensors, do = on_gpu(batch=batch, heads=heads, groups=groups, width=width, dtype=dtype)
    cu_seqlens = None if bounds is None else offsets(bounds).cuda()
    o = causal_attention(*tensors, window, cu_seqlens)
    found = [o, *torch.autograd.grad(o, tensors, do)]
    assert calls == [(batch, 301, heads, width)] and o.dtype == dtype
    for mine, right in zip(found, expected([x.cpu() for x in tensors], do.cpu(), window, bounds), strict=True):
        assert (mine.double().cpu() - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize("heads, groups, width", [(4, 2, 64), (2, 2, 8)])
def test_agrees_with_float64_without_causality(heads, groups, width, calls):
    tensors, do = on_gpu(batch=1, heads=heads, groups=groups, width=width, dtype=torch.bfloat16)
    o = full_attention(*tensors, offsets(BOUNDS).cuda())
    found = [o, *torch.autograd.grad(o, tensors, do)]
    assert calls == [(1, 301, heads, width)] and o.dtype == torch.bfloat16
    right = expected([x.cpu() for x in tensors], do.cpu(), 0, BOUNDS, causal=False)
    for mine, one in zip(found, right, strict=True):
        assert (mine.double().cpu() - one).norm() <= 2e-2 * one.norm()


def test_other_boundaries_compile_nothing(calls):
    tensors, _ = on_gpu(batch=1, width=64, dtype=torch.bfloat16)
    causal_attention(*tensors, 0, offsets(BOUNDS).cuda()).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for bounds in ([0, 301], [0, 7, 301], [0, 7, 7, 100, 200, 250, 260, 270, 301]):
            causal_attention(*tensors, 0, offsets(bounds).cuda()).sum().backward()
    assert len(calls) == 4


def test_compiles_into_the_graph_of_a_model():
    tensors, do = on_gpu(batch=1, width=64, dtype=torch.bfloat16)
    cu_seqlens = offsets(BOUNDS).cuda()

    def run(q, k, v, cu_seqlens):
        return 2 * causal_attention(q, k, v, 70, cu_seqlens)

    expected = run(*tensors, cu_seqlens)
    found = torch.compile(run, fullgraph=True)(*tensors, cu_seqlens)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    for a, b in zip(*(torch.autograd.grad(o, tensors, do) for o in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_float64_runs_by_blocks_with_a_warning(calls):
    backend.warn_slow.cache_clear()
    tensors, do = on_gpu()
    with pytest.warns(SlowPathWarning, match="float64"):
        o = causal_attention(*tensors, 70)
    found = [o, *torch.autograd.grad(o, tensors, do)]
    right = expected([x.cpu() for x in tensors], do.cpu(), 70, None)
    torch.testing.assert_close([x.cpu() for x in found], right)
    assert not calls


def test_models_under_vmap(calls):
    tensors, do = on_gpu(batch=3, width=64, dtype=torch.bfloat16)
    stacked = [x.detach()[:, None].requires_grad_() for x in tensors]
    o = torch.vmap(lambda q, k, v: causal_attention(q, k, v, 40))(*stacked)
    found = [o, *torch.autograd.grad(o, stacked, do[:, None])]
    for mine, right in zip(found, expected([x.cpu() for x in tensors], do.cpu(), 40, None), strict=True):
        assert (mine[:, 0].double().cpu() - right).norm() <= 2e-2 * right.norm()


def test_boundaries_are_checked_in_debug():
    tensors, _ = on_gpu(batch=1, width=64, dtype=torch.bfloat16)
    with backend.debug(), pytest.raises(ValueError, match=r"cu_seqlens.*10"):
        causal_attention(*tensors, 0, offsets([0, 20, 10, 301]).cuda())
