"""The Triton form of the selective scan against float64: on a GPU, and small shapes in Triton's interpreter."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, poison, widen

from linnet.ops import debug, selective_scan, selective_step, use_backend
from linnet.ops.selective_scan import chunked

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make(R, T, D, N, *, models=1, skip=True, softplus=False, state=True, offsets=None, decay="mixed",
         dtype=torch.float32, device="cuda"):  # fmt: skip
    """Arguments of the registered op, and gradients of y and the final state."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, to)

    wide = torch.promote_types(dtype, torch.float32)
    sequences = R * (1 if offsets is None else len(offsets) - 1)
    delta, A = normal(R, T, D, to=wide).exp() / 3, -normal(models, D, N, to=wide).exp()
    if decay == "slow":
        delta *= 1e-3
    elif decay == "extreme":
        delta[:, ::3], delta[:, 1::5] = 0.0, 1e6
        A[:, ::4], A[:, 1::4] = 0.0, -1e30
    states = [normal(sequences, D, N, to=wide) if state else None for _ in range(2)]
    cuts = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    B, C = normal(R, T, N), normal(R, T, N)
    if decay == "extreme":
        B[:, 1::5] = 0.0  # what is written there would drown the rest
    weight, bias = (normal(models, D, to=wide) if given else None for given in (skip, softplus))
    if softplus:
        delta = 4 * normal(R, T, D) - 3
    return (normal(R, T, D), delta, A, B, C, weight, bias, states[0], cuts), (normal(R, T, D), states[1])


def call(form, inputs, gradients):
    y, final, starts = form.selective_forward(*inputs)
    return [y, final, *form.selective_backward(*inputs, starts, *gradients)]


def assert_agrees(*sizes, kernel="selective_scan.", **options):
    from linnet.ops.selective_scan import triton

    inputs, gradients = make(*sizes, **options)
    expected = call(chunked, widen(inputs), widen(gradients))
    poison(expected, inputs[0].dtype)
    # Over thousands of tokens the errors of a float32 exponential, the same for each token, add up.
    tolerance = 1e-4 if options.get("decay") == "slow" and inputs[0].dtype == torch.float32 else None
    with launching(kernel):
        found = call(triton, inputs, gradients)
    assert_near(found, expected, tolerance or TOLERANCE[inputs[0].dtype])


def assert_steps_agree(R, T, D, N, **options):
    """Tokens in a row against the parallel form, with B and C slices of one row."""
    (x, delta, A, B, C, skip, _, state, _), _ = make(R, T, D, N, **options)
    skip = None if skip is None else skip[0]
    with use_backend("chunked"):
        exact = widen((x, delta, A[0], B, C, skip))
        expected = selective_scan(*exact, initial_state=state.double(), output_final_state=True)
    B, C = torch.cat([B, C], -1).split(N, -1)
    outputs = []
    for t in range(T):
        torch.full((R, D), float("nan"), dtype=x.dtype, device=x.device)  # the memory that y will get
        with use_backend("triton"):
            outputs.append(selective_step(x[:, t], delta[:, t], A[0], B[:, t], C[:, t], skip, state))
    assert_near([torch.stack(outputs, 1), state], expected)


def use_segments(monkeypatch, count):
    from linnet.ops.selective_scan import triton

    monkeypatch.setattr(triton, "count_segments", lambda *_: count)


def use_short_chunks(monkeypatch):
    """Chunks of half as many tokens, and fewer between the states that are kept, so that few tokens fill some."""
    from linnet.ops.selective_scan import chunked, triton

    def between(states):
        return 4 if states <= 4 else 8

    def choose(states, backward, choose=triton.choose_tile):
        tile = choose(states, backward)
        length = tile.length // 2
        return tile._replace(length=length, every=between(states) // length)

    monkeypatch.setattr(triton, "choose_tile", choose)
    monkeypatch.setattr(chunked, "tokens_between", between)


@gpu
@pytest.mark.parametrize("N, D", [(1, 1), (2, 100), (3, 256), (8, 33), (16, 40), (23, 64), (64, 10)])
def test_widths(N, D):
    assert_agrees(2, 133, D, N)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    assert_agrees(2, 136, 256, 4, dtype=dtype)
    assert_agrees(2, 136, 256, 4, dtype=dtype, softplus=True)


@gpu
@pytest.mark.parametrize("decay", ["slow", "mixed", "extreme"])
@pytest.mark.parametrize("T", [1, 7, 8, 64, 129, 1024, 4097])
def test_lengths(T, decay):
    assert_agrees(1, T, 128, 16, decay=decay)
    assert_agrees(3, T, 64, 4, decay=decay, state=False, skip=False, dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("offsets", [[0, 2100], [0, 0, 1, 64, 65, 700, 2100, 2100], [0, 128, 2099, 2100]])
def test_documents(offsets, state, models):
    assert_agrees(models, 2100, 96, 4, offsets=offsets, state=state, models=models)


@gpu
@pytest.mark.parametrize("segments", [1, 2, 5, 16])
def test_segments(segments, monkeypatch):
    use_segments(monkeypatch, segments)
    assert_agrees(2, 1000, 64, 16, decay="slow")
    assert_agrees(1, 1000, 64, 4, offsets=[0, 300, 301, 301, 1000], decay="slow")


@gpu
def test_models_of_their_own_in_one_batch():
    assert_agrees(24 * 16, 128, 256, 4, models=24, state=False, softplus=True, dtype=torch.bfloat16)
    assert_agrees(6, 100, 40, 4, models=3)


@gpu
def test_long_sequence():
    assert_agrees(1, 65_536, 64, 16, decay="slow")


@gpu
def test_what_the_kernels_do_not_take_is_chunked():
    assert_agrees(1, 100, 7, 4, dtype=torch.float64, kernel=None)
    assert_agrees(1, 100, 7, 65, kernel=None)


@gpu
def test_through_autograd_and_compile():
    (x, delta, A, B, C, D, _, state, _), _ = make(2, 3000, 128, 16, dtype=torch.bfloat16)
    call = dict(x=x, delta=delta, A=A[0], B=B, C=C, D=D[0], initial_state=state)
    leaves = [y.requires_grad_() for y in call.values()]

    def run():
        return selective_scan(**call, output_final_state=True)

    def everything(form):
        y, final = form()
        return [y, final, *torch.autograd.grad(y.float().sum() + final.square().sum(), leaves)]

    plain, again = everything(run), everything(run)
    with use_backend("chunked"):
        expected = everything(run)
    for a, b, c, e in zip(plain, again, everything(torch.compile(run, fullgraph=True)), expected, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)  # deterministic, compiled or not
        assert (a.double() - e.double()).norm() <= 5e-3 * e.double().norm()


def test_a_backward_after_another_form():
    from linnet.ops.selective_scan import triton

    inputs, gradients = make(2, 19, 5, 4, softplus=True, device="cpu")
    _, _, starts = chunked.selective_forward(*inputs)
    expected = chunked.selective_backward(*inputs, starts, *gradients)
    found = triton.selective_backward(*inputs, starts, *gradients)
    assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


@gpu
def test_a_backward_outside_of_the_block_that_chose_a_form():
    (x, delta, A, B, C, *_), _ = make(2, 100, 64, 4)
    leaves = [y.requires_grad_() for y in (x, delta, A, B, C)]
    expected = torch.autograd.grad(selective_scan(x, delta, A[0], B, C)[0].sum(), leaves)
    with use_backend("chunked"):
        total = selective_scan(x, delta, A[0], B, C)[0].sum()
    for a, e in zip(torch.autograd.grad(total, leaves), expected, strict=True):
        assert (a - e).norm() <= 1e-5 * e.norm()


@gpu
def test_strided_inputs():
    (x, delta, A, B, C, *_), _ = make(2, 100, 64, 4)
    expected, _ = selective_scan(x, delta, A[0], B, C)
    B, C = torch.cat([B, C], -1).split(4, -1)
    x, delta = torch.stack([x, delta], 2).unbind(2)
    assert torch.equal(selective_scan(x, delta, A[0], B, C)[0], expected)


@gpu
def test_debug_looks_at_offsets():
    (x, delta, A, B, C, *_), _ = make(1, 37, 16, 4)
    cuts = torch.tensor([0, 20, 10, 37], dtype=torch.int32, device="cuda")
    with debug(), pytest.raises(ValueError, match="cu_seqlens"):
        selective_scan(x, delta, A[0], B, C, cu_seqlens=cuts)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps(dtype):
    for sizes, options in [((3, 9, 256, 4), {}), ((2, 9, 37, 5), {"skip": False}), ((2, 9, 1500, 16), {})]:
        assert_steps_agree(*sizes, dtype=dtype, **options)
    assert_steps_agree(2, 9, 64, 16, decay="extreme", dtype=dtype)


@gpu
def test_a_step_in_a_graph():
    (x, delta, A, B, C, skip, _, state, _), _ = make(2, 1, 64, 4)
    token = x[:, 0], delta[:, 0], A[0], B[:, 0], C[:, 0], skip[0]
    eager, graphed = state.clone(), state.clone()
    outputs = [selective_step(*token, eager) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = selective_step(*token, graphed)
    for expected in outputs:
        graph.replay()
        assert torch.equal(y, expected)
    assert torch.equal(eager, graphed)


# The interpreter cuts bfloat16 off instead of rounding it.
INTERPRETED = [
    ((2, 6, 5, 4), {"decay": "extreme"}, 1),
    ((1, 8, 64, 4), {"state": False, "skip": False}, 1),
    ((1, 9, 3, 16), {"softplus": True}, 3),  # a whole segment, one of a token, one of none
    ((2, 5, 130, 1), {}, 2),  # several rows, blocks of channels and segments at once
    ((1, 11, 3, 16), {"dtype": "bfloat16"}, 1),  # two chunks after a state that was kept
    ((1, 5, 5, 4), {"dtype": "float16"}, 1),
    ((4, 3, 3, 2), {"models": 2, "softplus": True}, 1),
    ((1, 5, 5, 23), {"offsets": [0, 2, 5]}, 1),
    ((1, 10, 5, 4), {"offsets": [0, 0, 5, 6, 10, 10]}, 2),
    ((2, 6, 5, 3), {"offsets": [0, 4, 6], "models": 2}, 1),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + 2


if __name__ == "__main__":
    for sizes, options, segments in INTERPRETED:
        options = options | {"dtype": getattr(torch, options.get("dtype", "float32")), "device": "cpu"}
        with pytest.MonkeyPatch.context() as monkeypatch:
            use_short_chunks(monkeypatch)
            use_segments(monkeypatch, segments)
            assert_agrees(*sizes, **options)
        print(*sizes, "agrees")
    for sizes in ((2, 3, 5, 3), (1, 3, 300, 4)):
        assert_steps_agree(*sizes, device="cpu", decay="extreme")
        print(*sizes, "agrees")
