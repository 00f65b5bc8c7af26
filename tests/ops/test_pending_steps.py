"""Pending tokens beside the state: against single steps in float64 that write every token, slots in any mixture."""

import importlib.util
from contextlib import nullcontext

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, widen

from linnet.ops import forget_gated_pending_step, forget_gated_step, lightning_pending_step, lightning_step, use_backend

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
INF = float("inf")
STEPS = {
    "lightning": (lightning_step, lightning_pending_step),
    "forget_gated": (forget_gated_step, forget_gated_pending_step),
}


class Slots:
    """Sequences that begin anew at different tokens, their memory poisoned with NaN where nothing may be read."""

    def __init__(
        self, op, shape, every, dtype=torch.float32, device="cpu", activation="silu", decays="some", strided=False
    ):
        self.generator = torch.Generator().manual_seed(sum(shape) + every)
        self.B, self.H, self.K, self.V = B, H, K, V = shape
        self.every, self.dtype, self.device = every, dtype, device
        self.plain, self.step = STEPS[op]
        self.wide = 1.0
        if op == "lightning":
            rates = -self.normal(H, dtype=torch.float32).exp()
            if decays == "extreme":
                rates[::3], rates[1::3], rates[2::3] = 0.0, -INF, -30.0
            self.settings = {"activation": activation, "log_decay": None if decays == "none" else rates}
        else:
            bounds = self.normal(H, K, dtype=torch.float32).sigmoid()
            self.settings = {"activation": activation, "lower_bound": None if decays == "none" else bounds}
            self.wide = 200.0 if decays == "extreme" else 3.0  # gates that are all open or all closed
        self.settings["scale"] = 0.7
        self.start = self.normal(B, H, K, V, dtype=torch.float32)
        self.around = torch.full((B * H * K * V + 16,), float("nan"), device=device)
        self.state = self.around[8:-8].view(B, H, K, V)
        self.state.copy_(self.start)
        self.keys, self.values = (
            torch.full((B, H, every - 1, size), float("nan"), dtype=dtype, device=device) for size in (K, V)
        )
        self.pending = torch.zeros(2 * B if strided else B, dtype=torch.int32, device=device)
        if strided:
            self.pending = self.pending[::2]
        self.exact = self.start.double()

    def launching(self, backend):
        """Asserts that the kernel runs where it can."""
        fits = self.every <= 32 and self.pending.is_contiguous()
        return launching("" if fits else None) if backend == "triton" else nullcontext()

    def normal(self, *shape, dtype=None):
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.device, dtype or self.dtype)

    def tokens(self):
        return (
            self.normal(self.B, self.H, self.K),
            self.wide * self.normal(self.B, self.H, self.K),
            self.normal(self.B, self.H, self.V),
        )

    def advance(self, q, k, v, step=None):
        o = (step or self.step)(q, k, v, self.state, self.keys, self.values, self.pending, **self.settings)
        self.pending.add_(1).remainder_(self.every)
        return o

    def check(self, backend, tokens=None):
        outputs, wanted = [], []
        settings = dict(zip(self.settings, widen(self.settings.values()), strict=True))
        for t in range(tokens or 2 * self.every + 3):
            for b in range(self.B):
                if t == 1 + 2 * b:  # another request: pending tokens belong to no request
                    self.pending[b], self.state[b], self.exact[b] = 0, self.start[b], self.start[b].double()
                    self.keys[b] = self.values[b] = float("nan")
            q, k, v = self.tokens()
            writes = self.pending == self.every - 1
            before = self.state.clone()
            with use_backend("chunked"):
                wanted.append(self.plain(*widen((q, k, v)), self.exact, **settings))
            with use_backend(backend), self.launching(backend):
                outputs.append(self.advance(q, k, v))
            assert torch.equal(self.state[~writes], before[~writes])  # nothing is written
            # Outside the kernel SiLU rounds to the dtype of k, as in `lightning_step`.
            tolerance = TOLERANCE[torch.float32 if backend == "triton" else self.dtype]
            assert_near([self.state[writes]], [self.exact[writes]], tolerance)
        assert all(o.dtype == self.dtype for o in outputs)
        assert_near([torch.stack(outputs)], [torch.stack(wanted)])
        assert self.around[:8].isnan().all() and self.around[-8:].isnan().all()


CASES = [
    (op, *case)
    for op in STEPS
    for case in (
        ((3, 1, 16, 32), 4, {}),
        ((1, 3, 5, 19), 3, {"decays": "extreme"}),
        ((2, 2, 20, 7), 2, {"decays": "none", "activation": "none"}),
        ((2, 1, 16, 16), 6, {"dtype": torch.bfloat16}),
        ((1, 1, 8, 8), 34, {}),  # no kernel takes so many
        ((3, 2, 16, 16), 4, {"strided": True}),
    )
]


@pytest.mark.parametrize("op, shape, every, options", CASES)
def test_agrees_with_steps_that_write(op, shape, every, options):
    Slots(op, shape, every, **options).check("chunked")


@pytest.mark.parametrize("wrong, message", [
    ({"keys": torch.zeros(2, 3, 4, 5)}, "N > 1"),
    ({"keys": torch.zeros(2, 3, 0, 4), "values": torch.zeros(2, 3, 0, 4)}, "N > 1"),
    ({"values": torch.zeros(2, 3, 4, 4, dtype=torch.float64)}, "of torch.float32"),
    ({"pending": torch.zeros(2, dtype=torch.int64)}, "int32"),
    ({"state": torch.zeros(2, 3, 4, 5)}, "state"),
    ({"log_decay": torch.zeros(2)}, r"\[3\]"),
    ({"activation": "gelu"}, "gelu"),
])  # fmt: skip
def test_refuses_what_does_not_go_together(wrong, message):
    x, room = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, 4)
    right = {"state": torch.zeros(2, 3, 4, 4), "keys": room, "values": room.clone()}
    right |= {"pending": torch.zeros(2, dtype=torch.int32)}
    assert lightning_pending_step(x, x, x, **right).shape == x.shape
    with pytest.raises(ValueError, match=message):
        lightning_pending_step(x, x, x, **right | wrong)


def test_an_unknown_activation_of_a_gated_step_is_refused():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="gelu"):
        forget_gated_step(x, x, x, torch.zeros(2, 3, 4, 4), activation="gelu")


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (3, 4, 96, 80), (9, 8, 128, 128), (2, 3, 256, 256), (2, 3, 33, 47)])
@pytest.mark.parametrize("op, every", [("lightning", 2), ("lightning", 16), ("forget_gated", 3), ("forget_gated", 8)])
def test_widths(op, every, shape, dtype):
    Slots(op, shape, every, dtype, "cuda").check("triton")


@gpu
@pytest.mark.parametrize("op", STEPS)
@pytest.mark.parametrize("B, H", [(1, 1), (64, 8), (300, 32)])
def test_batches(op, B, H):
    Slots(op, (B, H, 64, 64), 8, torch.bfloat16, "cuda", decays="extreme").check("triton")


@gpu
@pytest.mark.parametrize("op", STEPS)
def test_in_a_graph(op):
    """Replays go through writes and pending as eager steps do, each slot at its own count."""
    eager, graphed = (Slots(op, (3, 2, 64, 64), 4, torch.bfloat16, "cuda") for _ in range(2))
    tokens = eager.tokens()
    for slots in (eager, graphed):
        slots.advance(*tokens)  # compiles
        slots.pending.copy_(torch.tensor([1, 0, 3]))
        slots.keys.fill_(0.5)
        slots.values.fill_(0.5)
    graph = torch.cuda.CUDAGraph()
    before = [x.clone() for x in (graphed.state, graphed.keys, graphed.values, graphed.pending)]
    with torch.cuda.graph(graph):
        out = graphed.advance(*tokens)
    for x, was in zip((graphed.state, graphed.keys, graphed.values, graphed.pending), before, strict=True):
        x.copy_(was)
    for _ in range(9):
        graph.replay()
        assert torch.equal(out, eager.advance(*tokens))
    assert torch.equal(eager.state, graphed.state)


@gpu
@pytest.mark.parametrize("op", STEPS)
def test_compiled_in_one_graph(op):
    eager, compiled = (Slots(op, (3, 2, 64, 64), 3, torch.bfloat16, "cuda") for _ in range(2))
    step = torch.compile(eager.step, fullgraph=True)
    for _ in range(4):
        tokens = eager.tokens()
        assert torch.equal(compiled.advance(*tokens, step), eager.advance(*tokens))
    assert torch.equal(eager.state, compiled.state)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel itself is tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(CASES)


if __name__ == "__main__":
    for op, shape, every, options in CASES:
        Slots(op, shape, every, **options).check("triton")
        print(op, shape, every, options, "agrees")
