"""The Triton form of lightning attention against float64: on a GPU, and small shapes in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, poison, widen

from linnet.ops import debug, lightning_attention, use_backend
from linnet.ops.lightning import chunked

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DECAYS = {"none": None, "slow": [-1e-6, -0.01], "mixed": [0.0, -0.3], "extreme": [-30.0, -float("inf")]}


def make(B, T, K, V, *, decay="slow", state=True, offsets=None, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, to)

    N = B if offsets is None else len(offsets) - 1
    state_dtype = torch.promote_types(dtype, torch.float32)
    q, k, v, do = normal(B, T, 2, K), normal(B, T, 2, K), normal(B, T, 2, V), normal(B, T, 2, V)
    states = [normal(N, 2, K, V, to=state_dtype) if state else None for _ in range(2)]
    rates = None if DECAYS[decay] is None else torch.tensor(DECAYS[decay], device=device, dtype=state_dtype)
    cuts = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    return (q, k, v, rates, states[0], cuts, 0.7), (do, states[1])


def assert_agrees(*call, kernel="lightning.", **options):
    """o, the final state, dq, dk, dv and the gradient of the initial state, where there is one."""
    from linnet.ops.lightning.triton import lightning_backward, lightning_forward

    inputs, gradients = make(*call, **options)
    exact = widen(inputs)
    expected = [*chunked.lightning_forward(*exact), *chunked.lightning_backward(*exact, *widen(gradients))]
    poison(expected, inputs[2].dtype)
    with launching(kernel):
        found = [*lightning_forward(*inputs), *lightning_backward(*inputs, *gradients)]
    if found[-1] is None:  # no state, and no gradient of one
        del found[-1], expected[-1]
    assert_near(found, expected, TOLERANCE[inputs[0].dtype])


@gpu
@pytest.mark.parametrize("K, V", [(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (256, 128), (24, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widths(K, V, dtype):
    assert_agrees(2, 333, K, V, decay="mixed", dtype=dtype)


@gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 257, 1024, 4097])
def test_lengths(T, decay):
    assert_agrees(1, T, 64, 64, decay=decay)
    assert_agrees(3, T, 128, 128, decay=decay, state=False)


@gpu
@pytest.mark.parametrize("offsets", [[0, 700], [0, 0, 1, 64, 65, 700, 700], [0, 640, 700]])
@pytest.mark.parametrize("width", [64, 128])
def test_documents(offsets, width):
    assert_agrees(1, 700, width, width, decay="mixed", offsets=offsets)


@gpu
@pytest.mark.parametrize("segments", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("K, V", [(128, 128), (64, 64), (64, 128), (256, 128)])
@pytest.mark.parametrize("offsets", [None, [0, 0, 130, 1500, 2100]])
def test_segments(segments, K, V, offsets, monkeypatch):
    from linnet.ops.lightning import triton

    monkeypatch.setattr(triton, "_count_segments", lambda *_: segments)
    triton._plan.cache_clear()
    assert_agrees(1, 2100, K, V, offsets=offsets)
    triton._plan.cache_clear()


def assert_summaries_agree(B, T, K, V, *, dtype=torch.bfloat16, **options):
    """The state after a span, and the gradient of the one before it, without running the op."""
    from linnet.ops.lightning.triton import lightning_summary

    (q, k, v, rates, *_, scale), (do, _) = make(B, T, K, V, state=False, dtype=dtype, **options)
    found = [lightning_summary(q, k, rates, c, scale, reverse) for c, reverse in ((v, False), (do, True))]
    q, k, v, do, rates = widen((q, k, v, do, rates))
    expected = [chunked.lightning_summary(q, k, rates, c, scale, reverse) for c, reverse in ((v, False), (do, True))]
    assert_near(found, expected, TOLERANCE[dtype])


@gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 63, 4096, 65_537])
@pytest.mark.parametrize("K, V", [(128, 128), (64, 128), (24, 72)])
def test_summaries(decay, T, K, V):
    assert_summaries_agree(2, T, K, V, decay=decay)


@gpu
def test_profilers_see_launches():
    """A kernel that has run before is started past Triton, unless a profiler looks on."""
    from triton import knobs

    inputs = [torch.randn(1, 64, 1, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    names = []

    def hook(launched):
        names.append(launched.get()["name"])

    expected = [lightning_attention(*inputs)[0] for _ in range(2)]
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        seen = lightning_attention(*inputs)[0]
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    after = lightning_attention(*inputs)[0]
    assert len(names) == 1 and all(torch.equal(x, expected[0]) for x in (expected[1], seen, after))


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


hopper = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")


@hopper
@pytest.mark.parametrize("columns, stages", [(32, 8), (64, 3), (64, 4), (128, 3)])
@pytest.mark.parametrize("K, V", [(64, 64), (128, 128), (64, 128), (128, 64), (256, 128), (256, 256), (64, 256)])
@pytest.mark.parametrize("segments", [1, 5])
def test_hopper_configurations(columns, stages, K, V, segments, monkeypatch):
    """All that the heuristics may choose, for one chunk, few, and more than are in flight; states given or not."""
    from linnet.ops.lightning import triton

    def choose(inner, outer, programs, processors, sweeps):
        if columns == 32 and not inner == outer == 64 * sweeps:
            return (64, 2) if inner == 256 else (64, 3)
        return (64, 2) if inner == 256 else (min(outer, columns), stages)

    monkeypatch.setattr(triton, "choose_hopper_tiles", choose)
    monkeypatch.setattr(triton, "_count_segments", lambda *_: segments)
    triton._plan.cache_clear()
    for B, T, decay, state in ((2, 704, "mixed", True), (1, 64, "extreme", True), (1, 256, "none", False)):
        assert_agrees(B, T, K, V, decay=decay, state=state, kernel="lightning.hopper_kernel")
    triton._plan.cache_clear()


@hopper
def test_few_heads_of_64():
    """As many as leave half of the multiprocessors to another program."""
    from linnet.ops.lightning.triton import choose_hopper_tiles

    assert choose_hopper_tiles(64, 64, 60, 132, 1)[0] == 32
    assert_agrees(30, 704, 64, 64, decay="mixed", kernel="lightning.narrow_kernel")


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("T, K, V", [(256, 64, 64), (256, 128, 128), (256, 256, 256), (256, 128, 64), (8192, 64, 64)])
def test_the_compiler_takes_kernels_for_hopper(T, K, V, state, monkeypatch):
    """Triton's interpreter does not run them, so that without a GPU this is all that is known of them."""
    from translation import translate_launch

    from linnet.ops.lightning import triton

    def start(self, *arguments):
        started.add(self.name)
        translate_launch(self.kernel, self.grid, arguments, (), self.constants, **self.options)

    started = set()
    monkeypatch.setattr(triton, "is_hopper", lambda device: True)
    monkeypatch.setattr(triton.Launcher, "__call__", start)
    triton._plan.cache_clear()
    inputs, gradients = make(1, T, K, V, state=state, device="cpu")
    triton.lightning_forward(*inputs)
    triton.lightning_backward(*inputs, *gradients)
    triton._plan.cache_clear()  # of launches for Hopper on a CPU
    assert started & {"lightning.hopper_kernel", "lightning.narrow_kernel"}


@gpu
@pytest.mark.parametrize("T", [64, 100, 1000])
def test_many_wide_heads(T):
    assert_agrees(100, T, 256, 256)


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("tensors", [3, 4])
def test_wide_tiles_are_for_hopper(is_hopper, tensors, monkeypatch):
    """Others have less shared memory than they take."""
    triton = pytest.importorskip("linnet.ops.lightning.triton")
    chosen = []
    monkeypatch.setattr(triton, "_has_hopper_kernels", lambda _: is_hopper)
    choose, dtypes = triton.choose_tiles, (torch.bfloat16,) * tensors
    monkeypatch.setattr(triton, "choose_tiles", lambda *sizes: chosen.append(sizes[3]) or choose(*sizes))
    triton._plan.__wrapped__(
        torch.Size((100, 100, 1, 256)), 256, dtypes, None, False, 100, torch.device("cpu"), False, False, False
    )
    assert set(chosen) == {is_hopper}


@pytest.mark.parametrize("width, little, stages", [(128, True, 4), (256, False, 4), (256, True, 2)])
def test_fewer_chunks_of_wide_heads_are_in_flight_where_shared_memory_is_small(width, little, stages, monkeypatch):
    triton = pytest.importorskip("linnet.ops.lightning.triton")
    monkeypatch.setattr(triton, "has_little_shared_memory", lambda _: little)
    shape = triton.Shape(1, 64, 1, 1, torch.bfloat16, False, False, False, torch.device("cpu"))
    for sizes in ((width, 64), (64, width)):
        assert triton._tiles(triton.Form(*sizes, False, False, False, False), shape).stages == stages


@hopper
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_hopper_decays(decay, width):
    assert_agrees(3, 4096, width, width, decay=decay, kernel="lightning.hopper_kernel")


@gpu
@pytest.mark.parametrize("width", [64, 128])
def test_long_sequence(width):
    assert_agrees(1, 131_072, width, width, decay="slow")


@gpu
@pytest.mark.parametrize("K, V, dtype", [(3, 5, torch.bfloat16), (64, 264, torch.float32), (16, 16, torch.float64)])
def test_what_has_no_kernel_is_chunked(K, V, dtype):
    assert_agrees(1, 100, K, V, dtype=dtype, kernel=None)


@gpu
@pytest.mark.parametrize("length", [200, 256])
def test_through_autograd_and_compile(length):
    (q, k, v, rates, state, _, scale), _ = make(2, length, 64, 64)
    leaves = [x.requires_grad_() for x in (q, k, v, state)]

    def run(q, k, v, state):
        return lightning_attention(q, k, v, log_decay=rates, scale=scale, initial_state=state, output_final_state=True)

    def everything(form):
        o, final = form(*leaves)
        return [o, final, *torch.autograd.grad(o.float().sum() + final.square().sum(), leaves)]

    plain, again = everything(run), everything(run)
    with use_backend("chunked"):
        expected = everything(run)
    for a, b, c, e in zip(plain, again, everything(torch.compile(run, fullgraph=True)), expected, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)  # deterministic, compiled or not
        assert (a.double() - e.double()).norm() <= 5e-3 * e.double().norm()


@gpu
def test_strided_inputs():
    (q, k, v, rates, state, _, scale), _ = make(2, 100, 64, 64)
    expected, _ = lightning_attention(q, k, v, log_decay=rates, scale=scale)
    q, k, v = torch.stack([q, k, v], 2).unbind(2)
    assert torch.equal(lightning_attention(q, k, v, log_decay=rates, scale=scale)[0], expected)
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for x in (q, k, v)]  # by 2 bytes
    assert torch.equal(lightning_attention(*shifted, log_decay=rates, scale=scale)[0], expected)
    strided = torch.stack([rates, rates], 1)[:, 0]
    assert torch.equal(lightning_attention(q, k, v, log_decay=strided, scale=scale)[0], expected)


@gpu
def test_debug_looks_at_offsets():
    (q, k, v, *_), _ = make(1, 37, 16, 16)
    cuts = torch.tensor([0, 20, 10, 37], dtype=torch.int32, device="cuda")
    with debug(), pytest.raises(ValueError, match="cu_seqlens"):
        lightning_attention(q, k, v, cu_seqlens=cuts)


# Triton's interpreter has no bfloat16 products.
INTERPRETED = [
    ((2, 40, 16, 16), {"decay": "extreme"}),
    ((1, 64, 16, 24), {"decay": "none", "state": False}),
    ((1, 70, 24, 16), {"decay": "mixed"}),
    ((1, 40, 16, 24), {"decay": "mixed", "transposed": True}),  # as the tiles of bfloat16 are
    ((1, 80, 16, 16), {"offsets": [0, 0, 40, 41, 80, 80]}),
    ((1, 130, 16, 16), {"decay": "slow", "segments": 3}),  # of two chunks, two and one
]

INTERPRETED_SUMMARIES = [
    ((1, 1100, 16, 16), {"decay": "mixed"}),  # in two segments, the last chunk cut short
    ((2, 40, 16, 24), {"decay": "extreme"}),
    ((1, 64, 24, 16), {"decay": "none"}),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + len(INTERPRETED_SUMMARIES)


if __name__ == "__main__":
    from linnet.ops.lightning import triton

    choose, count = triton.choose_tiles, triton._count_segments
    for call, options in INTERPRETED:
        options = options | {"dtype": getattr(torch, options.get("dtype", "float32")), "device": "cpu"}
        transposed = options.pop("transposed", False)
        segments = options.pop("segments", None)
        triton._count_segments = count if segments is None else lambda *_, segments=segments: segments
        triton.choose_tiles = lambda *sizes, transposed=transposed: choose(*sizes)._replace(transposed=transposed)
        assert_agrees(*call, **options)
        print(*call, "agrees")
    triton._count_segments, triton.choose_tiles = count, choose
    for call, options in INTERPRETED_SUMMARIES:
        assert_summaries_agree(*call, dtype=torch.float32, device="cpu", **options)
        print(*call, "agrees")
