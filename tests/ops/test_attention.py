"""Windows and documents against a dense mask in float64, and the blocks that flex attention reads."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from linnet.ops import use_backend
from linnet.ops.attention import attend_window, causal_attention, flex, full_attention
from linnet.ops.attention.flex import block_mask, document_mask, first_visible, last_visible

DOCUMENTS = [0, 1, 60, 60, 160, 260, 301]


def draw(length=301, batch=2, heads=4, groups=2, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, length, count, width) for count in (heads, groups, groups, heads)]
    q, k, v, do = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], do


def visible(length, window, bounds, causal=True):
    """[T, T], pair by pair."""
    index = torch.arange(length)
    mask = (index[:, None] >= index) & (index[:, None] - index < (window or length))
    mask = mask if causal else torch.ones_like(mask)
    if bounds is not None:
        number = torch.tensor([sum(end <= t for end in bounds[1:]) for t in range(length)])
        mask &= number[:, None] == number
    return mask


def expected(tensors, do, window, bounds, causal=True):
    """o and gradients by a softmax written out."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors)
    share = q.shape[2] // k.shape[2]
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(share, 2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible(q.shape[1], window, bounds, causal), float("-inf"))
    o = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.repeat_interleave(share, 2))
    return [o, *torch.autograd.grad(o, (q, k, v), do.double())]


def offsets(bounds):
    return None if bounds is None else torch.tensor(bounds, dtype=torch.int32)


@pytest.mark.parametrize("form", ["auto", "reference"])
@pytest.mark.parametrize("bounds", [None, DOCUMENTS, [0, 301]])
@pytest.mark.parametrize("window", [0, 1, 2, 7, 64, 65, 100, 129, 300, 301, 999])
def test_windows_and_documents_agree_with_a_dense_mask(window, bounds, form):
    tensors, do = draw(batch=2 if bounds is None else 1)
    with use_backend(form):
        o = causal_attention(*tensors, window, offsets(bounds))
        found = [o, *torch.autograd.grad(o, tensors, do)]
    torch.testing.assert_close(found, expected(tensors, do, window, bounds))


@pytest.mark.parametrize("form", ["auto", "reference"])
@pytest.mark.parametrize("bounds", [None, DOCUMENTS])
def test_attention_without_causality_agrees_with_a_dense_mask(bounds, form):
    tensors, do = draw(batch=2 if bounds is None else 1)
    with use_backend(form):
        o = full_attention(*tensors, offsets(bounds))
        found = [o, *torch.autograd.grad(o, tensors, do)]
    torch.testing.assert_close(found, expected(tensors, do, 0, bounds, causal=False))
    stacked = [torch.stack([x.detach(), 2 * x.detach()]) for x in tensors]
    each = torch.stack([full_attention(*(x[i] for x in stacked), offsets(bounds)) for i in range(2)])
    torch.testing.assert_close(torch.vmap(lambda q, k, v: full_attention(q, k, v, offsets(bounds)))(*stacked), each)


@pytest.mark.parametrize("length", [64, 65, 127, 128, 129, 192, 200])
def test_ragged_lengths(length):
    tensors, do = draw(length, groups=4)
    o = causal_attention(*tensors, 50)
    torch.testing.assert_close([o, *torch.autograd.grad(o, tensors, do)], expected(tensors, do, 50, None))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_other_dtypes(dtype, tolerance):
    tensors, do = draw(groups=4, width=16, dtype=dtype)
    o = causal_attention(*tensors, 70)
    assert o.dtype == dtype
    for found, right in zip([o, *torch.autograd.grad(o, tensors, do)], expected(tensors, do, 70, None), strict=True):
        assert (found.double() - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize("bounds", [None, DOCUMENTS])
def test_models_under_vmap(bounds):
    tensors, do = draw(batch=3)
    stacked = [x.detach()[:, None].requires_grad_() for x in tensors]  # three models of one row each
    do = do[:, None]
    o = torch.vmap(lambda q, k, v: causal_attention(q, k, v, 40, offsets(bounds)))(*stacked)
    found = [o, *torch.autograd.grad(o, stacked, do)]
    each = [expected([x[i] for x in stacked], do[i], 40, bounds) for i in range(3)]
    torch.testing.assert_close(found, [torch.stack(parts) for parts in zip(*each, strict=True)])


def test_a_window_makes_no_mask_of_the_whole_row():
    """A [T, T] mask of 2^16 tokens would take 4 GiB."""
    q = torch.randn(1, 1 << 16, 1, 8)
    assert causal_attention(q, q, q, 64).shape == q.shape


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("bounds", [None, [0, 1, 60, 60, 160, 260, 384], [0, 128, 256, 300]])
@pytest.mark.parametrize("window", [0, 1, 100, 128, 129, 200])
def test_blocks_for_flex_attention(window, bounds):
    """The blocks are those of the mask, and the mask is that of a token's window and document."""
    length = 384
    first = first_visible(length, window, offsets(bounds), torch.device("cpu"))
    mask = block_mask(first)
    padded = bounds if bounds is None or bounds[-1] == length else [*bounds, length]
    right = visible(length, window, padded)
    wanted = create_block_mask(lambda b, h, q, k: right[q, k], None, None, length, length, device="cpu")
    assert torch.equal(mask.to_dense(), wanted.to_dense())
    assert torch.equal(mask.full_kv_num_blocks, wanted.full_kv_num_blocks)
    assert torch.equal(mask.q_num_blocks, wanted.q_num_blocks)
    q, k, v = (x.detach().float().transpose(1, 2) for x in draw(length, groups=4)[0])
    with torch.no_grad():
        o = flex_attention(q, k, v, block_mask=mask)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~right, float("-inf"))
    torch.testing.assert_close(o, scores.softmax(-1) @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("bounds", [[0, 384], [0, 1, 60, 60, 160, 300, 384], [0, 128, 256, 300], [0, 20, 370, 384]])
def test_blocks_for_flex_attention_without_causality(bounds):
    length = 384
    cpu = torch.device("cpu")
    mask = document_mask(first_visible(length, 0, offsets(bounds), cpu), last_visible(length, offsets(bounds), cpu))
    right = visible(length, 0, bounds if bounds[-1] == length else [*bounds, length], causal=False)
    wanted = create_block_mask(lambda b, h, q, k: right[q, k], None, None, length, length, device="cpu")
    assert torch.equal(mask.to_dense(), wanted.to_dense())
    assert torch.equal(mask.full_kv_num_blocks, wanted.full_kv_num_blocks)
    assert torch.equal(mask.q_num_blocks, wanted.q_num_blocks)
    q, k, v = (x.detach().float().transpose(1, 2) for x in draw(length, groups=4)[0])
    with torch.no_grad():
        o = flex_attention(q, k, v, block_mask=mask)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~right, float("-inf"))
    torch.testing.assert_close(o, scores.softmax(-1) @ v, rtol=1e-4, atol=1e-5)


def test_masks_are_kept_as_long_as_the_boundaries_stay():
    bounds, device = offsets([0, 100, 384]), torch.device("cpu")
    mask = flex._mask(384, 0, bounds, device)
    assert flex._mask(384, 0, bounds, device) is mask
    assert flex._mask(384, 0, offsets([0, 100, 384]), device) is not mask
    assert flex._mask(384, 50, bounds, device) is not mask
    assert flex._mask(384, 0, bounds, device, causal=False) is not mask
    bounds[1] = 200
    assert not torch.equal(flex._mask(384, 0, bounds, device).to_dense(), mask.to_dense())
    assert flex._mask(384, 50, None, device) is flex._mask(384, 50, None, device)


@pytest.mark.parametrize(
    "bounds, named", [([0, 20, 10, 301], "20"), ([0, 20], "301"), ([5, 301], "5"), ([0, 400], "400")]
)
def test_boundaries_that_do_not_rise_are_refused(bounds, named):
    tensors, _ = draw(batch=1)
    with pytest.raises(ValueError, match=rf"cu_seqlens.*{named}"):
        causal_attention(*tensors, 0, offsets(bounds))


def test_a_negative_window_is_refused():
    with pytest.raises(ValueError, match="window.*-3"):
        causal_attention(*draw()[0], -3)


@pytest.mark.parametrize("window", [1, 5, 1000])
def test_a_window_of_the_whole_row_is_full_attention(window):
    (q, k, v), _ = draw(5)
    assert torch.equal(attend_window(q, k, v, max(window, 5)), causal_attention(q, k, v))


@pytest.mark.parametrize("attend", [causal_attention, full_attention])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_compiler_may_take_the_number_of_heads_as_a_symbol(attend, groups):
    """As it does where the layers of a model have different numbers of heads."""
    (q, k, v), _ = draw(9, groups=groups)
    wide = torch.randn(2, 9, 32, dtype=torch.float64)

    def run(x, heads):
        return attend(x.unflatten(-1, (heads, 8)), k, v)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for heads in (4, 8):
        x = torch.cat([wide] * (heads // 4), -1)
        torch.testing.assert_close(compiled(x, heads), run(x, heads))
