"""The steps' Triton kernels: tokens in a row against the parallel form in float64; small shapes in the interpreter."""

import functools
import importlib.util
import math

import pytest
import torch
from precision import TOLERANCE, assert_near, launching, widen
from torch.nn import functional as F

from linnet import ops
from linnet.ops import stepping
from linnet.ops.activation import softplus_decay, softplus_steps
from linnet.ops.delta import projected_delta_step
from linnet.ops.gated import forget_gated_step
from linnet.ops.gated.forget import forget_gated_attention
from linnet.ops.norm import unit_norm
from linnet.ops.shortconv import short_convolution_steps
from linnet.ops.ssd import projected_ssd_step

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
INF = float("inf")
GROUPED_OPS = ["delta", "delta_channels", "projected_delta", "projected_kda", "projected_net", "ssd", "projected_ssd"]
MATRIX_OPS = [
    *GROUPED_OPS,
    "lightning",
    "lightning_silu",
    "gated",
    "forget_gated",
    "forget_gated_silu",
    "additive",
    "additive_turned",
]


class Case:
    """An op over T tokens: `parallel` gives outputs and final states, `step` takes token t.

    `every`: a grouped op writes its state only every so many tokens, and its sequences are at different ones.
    """

    def __init__(self, op, shape, dtype=torch.bfloat16, device="cuda", tokens=6, extreme=False, every=1):
        self.generator = torch.Generator().manual_seed(sum(shape))
        self.op, self.shape, self.dtype, self.device = op, shape, dtype, device
        self.tokens, self.extreme, self.every, self.pending = tokens, extreme, every, None
        make = {"scan": self._scan, "scan_complex": self._scan, "modal": self._modal}
        make |= {"convolutions": self._convolutions} | dict.fromkeys(GROUPED_OPS, self._grouped)
        make = make.get(op, self._matrix)
        self.streams, self.constants, self.states, self.parallel, self.step = make()

    def normal(self, *shape, dtype=None):
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.device, dtype or self.dtype)

    def decays(self, *shape):
        x = -self.normal(*shape, dtype=torch.float32).exp()
        if self.extreme:
            x.flatten()[::3], x.flatten()[1::3], x.flatten()[2::3] = 0.0, -INF, -30.0
        return x

    def _matrix(self):
        B, H, K, V = self.shape
        T, op, scale = self.tokens, self.op, 0.7
        q, k, v = self.normal(B, T, H, K), self.normal(B, T, H, K), self.normal(B, T, H, V)
        if op == "lightning":
            constants = {"log_decay": self.decays(2 * H)[::2]}
            streams, states = (q, k, v), (self.normal(B, H, K, V, dtype=torch.float32),)
            parallel, step = ops.lightning_attention, ops.lightning_step
        elif op == "lightning_silu":
            constants = {"log_decay": self.decays(H)}
            streams, states = (q, k, v), (self.normal(B, H, K, V, dtype=torch.float32),)
            step = functools.partial(ops.lightning_step, activation="silu")

            def parallel(q, k, v, **rest):
                return ops.lightning_attention(F.silu(q), F.silu(k), v, **rest)

        elif op == "gated":
            constants = {}
            streams, states = (q, k, v, self.decays(B, T, H, K)), (self.normal(B, H, K, V, dtype=torch.float32),)
            parallel, step = ops.gated_linear_attention, ops.gated_step
        elif op == "forget_gated":
            constants = {"lower_bound": self.normal(H, K, dtype=torch.float32).sigmoid()}
            streams, states = (q, 9 * k, v), (self.normal(B, H, K, V, dtype=torch.float32),)
            parallel, step = forget_gated_attention, forget_gated_step
        elif op == "forget_gated_silu":
            constants = {"lower_bound": self.normal(H, K, dtype=torch.float32).sigmoid()}
            streams, states = (q, 9 * k, v), (self.normal(B, H, K, V, dtype=torch.float32),)
            step = functools.partial(forget_gated_step, activation="silu")

            def parallel(q, *rest, **options):
                return forget_gated_attention(F.silu(q), *rest, **options)

        else:
            turned = op == "additive_turned"
            z = self.normal(B, H, K, dtype=torch.float32)
            S = self.normal(B, H, K * (1 + turned), V, dtype=torch.float32)
            if self.extreme:  # a head before its first token, and large logits
                S[:, 0], z[:, 0], k[:, 0, 0], k[:, 1, -1] = 0.0, -INF, -INF, 30.0
            streams, states, constants = (q, k, v), (S, z), {}
            if turned:
                at = torch.arange(T, device=self.device) + torch.tensor([5, 131_000] * B, device=self.device)[:B, None]
                constants = {"theta": self.normal(H, K, dtype=torch.float32), "positions": at}
            parallel, step = ops.additive_attention, ops.additive_step

        def run(streams, constants, states):
            initial = states if len(states) == 2 else states[0]
            o, final = parallel(*streams, **constants, scale=scale, initial_state=initial, output_final_state=True)
            return [o, *(final if len(states) == 2 else [final])]

        def run_step(t, streams, constants, states):
            if "positions" in constants:
                constants = constants | {"positions": constants["positions"][:, t]}
            return step(*streams, states if len(states) == 2 else states[0], **constants, scale=scale)

        return streams, constants, states, run, run_step

    def _grouped(self):
        """Ops whose heads of values, two times those of keys, have gates of their own."""
        (B, H, K, V), T, op, scale = self.shape, self.tokens, self.op, 0.7
        HV, wide = 2 * H, torch.float32
        q, k, v = self.normal(B, T, H, K), self.normal(B, T, H, K), self.normal(B, T, HV, V)
        states = (self.normal(B, HV, K, V, dtype=wide),)
        if self.every > 1:
            self.pending = self._nothing_pending(B, H, HV, K, V)
        rates = self.normal(HV, dtype=wide)
        if op == "ssd":
            return (
                (q, k, v, self.decays(B, T, HV)),
                {},
                states,
                self._runs(ops.ssd, scale),
                self._steps(ops.ssd_step, scale),
            )
        if op == "projected_ssd":
            streams = (q, k, v, self.normal(B, T, HV))
            constants = {"rates": rates, "bias": self.normal(HV, dtype=wide) - 2, "skip": self.normal(HV, dtype=wide)}

            def dual(q, k, v, decay, rates, bias, skip, initial_state, output_final_state, scale):
                times, log_decay = softplus_steps(decay, rates, bias, (0.05, 0.9))
                o, final = ops.ssd(q, k, times[..., None] * v, log_decay, initial_state=initial_state,
                                   output_final_state=True)  # fmt: skip
                return o + skip[:, None] * v, final

            def step(t, streams, constants, states):
                return projected_ssd_step(
                    *streams, **constants, state=states[0], steps=(0.05, 0.9), pending=self.pending
                )

            return streams, constants, states, self._runs(dual, 1.0), step
        if op in ("delta", "delta_channels"):
            k = unit_norm(k)
            channels = op == "delta_channels"
            decay = self.decays(B, T, HV, K) if channels else self.decays(B, T, HV)
            erase = self.normal(B, T, HV, K, dtype=wide).sigmoid() if channels else self.normal(B, T, HV).sigmoid()
            streams = (q, k, v, decay, erase, self.normal(B, T, HV, V)) if channels else (q, k, v, decay, erase)

            def step(t, streams, constants, states):
                streams = streams if channels else (*streams, None)
                return ops.gated_delta_step(*streams, states[0], scale=scale, pending=self.pending)

            return streams, {}, states, self._runs(ops.gated_delta_rule, scale), step
        tail = (K,) if op == "projected_kda" else ()
        streams = (q, k, v, self.normal(B, T, HV))
        streams += () if op == "projected_net" else (self.normal(B, T, HV, *tail),)
        constants = {} if op == "projected_net" else {"rates": rates, "bias": self.normal(HV, *tail, dtype=wide) - 2}

        def rule(q, k, v, strength, decay=None, rates=None, bias=None, **options):
            log_decay = None if decay is None else softplus_decay(decay, rates, bias)
            return ops.gated_delta_rule(unit_norm(q), unit_norm(k), v, log_decay, 2 * strength.sigmoid(), **options)

        def step(t, streams, constants, states):
            q, k, v, strength, decay = (*streams, None)[:5]
            gates = (decay, constants.get("rates"), constants.get("bias"))
            settings = {"most": 2.0, "scale": scale, "pending": self.pending}
            return projected_delta_step(q, k, v, *gates, strength, states[0], **settings)

        return streams, constants, states, self._runs(rule, scale), step

    def _runs(self, parallel, scale):
        def run(streams, constants, states):
            options = {"scale": scale, "initial_state": states[0], "output_final_state": True}
            return list(parallel(*streams, **constants, **options))

        return run

    def _steps(self, step, scale):
        return lambda t, streams, constants, states: step(
            *streams, states[0], **constants, scale=scale, pending=self.pending
        )

    def _nothing_pending(self, B, H, HV, K, V):
        """Buffers in which tokens that add nothing are pending, another number in each sequence; NaN behind them."""
        room, wide = self.every - 1, torch.float32
        heads = None if self.op == "projected_net" else (HV, room)
        heads = (*heads, K) if self.op in ("delta_channels", "projected_kda") else heads
        shapes = ((H, room, K), self.dtype), ((HV, room, V), wide), (heads, wide)
        number = torch.arange(B, dtype=torch.int32, device=self.device) % self.every
        behind = torch.arange(room, device=self.device) >= number[:, None]
        buffers = [None if shape is None else torch.zeros(B, *shape, dtype=dtype, device=self.device)
                   for shape, dtype in shapes]  # fmt: skip
        for x in buffers:
            if x is not None:
                x.masked_fill_(behind[(slice(None), None, slice(None), None)[: x.ndim]], float("nan"))
        return stepping.Pending(number, *buffers)

    def fill_pending(self):
        """Makes the pending tokens some that change the state. Returns a copy of them."""
        self.pending = stepping.Pending(self.pending.number, *(x.uniform_(-1.0, 0.0) for x in self.pending[1:]))
        return stepping.Pending(*(x.clone() for x in self.pending))

    def _convolutions(self):
        B, *widths = self.shape
        taps = 4 if self.extreme else 3
        streams = tuple(self.normal(B, self.tokens, D) for D in widths)
        constants = {f"weight{i}": self.normal(D, taps) for i, D in enumerate(widths)}
        constants |= {f"bias{i}": self.normal(D) for i, D in enumerate(widths) if self.extreme}
        states = tuple(self.normal(B, taps - 1, D).float() for D in widths)

        def parts(constants):
            return [[constants.get(f"{name}{i}") for i in range(len(widths))] for name in ("weight", "bias")]

        def run(streams, constants, states):
            rows = zip(streams, *parts(constants), states, strict=True)
            results = [ops.short_convolution(x, w, b, silu=True, initial_state=s, output_final_state=True)
                       for x, w, b, s in rows]  # fmt: skip
            return [torch.cat([y for y, _ in results], -1), *(final for _, final in results)]

        def step(t, streams, constants, states):
            weights, biases = parts(constants)
            return torch.cat(short_convolution_steps(streams, weights, states, biases, silu=True), -1)

        return streams, constants, states, run, step

    def _scan(self):
        (B, D), T = self.shape, self.tokens
        tail = (2,) if self.op == "scan_complex" else ()
        streams = self.normal(B, T, D, *tail), self.decays(B, T, D)
        constants = {"theta": self.normal(D, dtype=torch.float32)} if tail else {}
        states = (self.normal(B, D, *tail, dtype=torch.float32),)

        def run(streams, constants, states):
            return ops.diagonal_scan(*streams, **constants, initial_state=states[0], output_final_state=True)

        return streams, constants, states, run, lambda t, s, c, states: ops.diagonal_step(*s, states[0], **c)

    def _modal(self):
        (B, D, E), T = self.shape, self.tokens
        constants = {"log_decay": self.decays(D, E), "weight": self.normal(D, E)}
        states = (self.normal(B, D, E, dtype=torch.float32),)

        def run(streams, constants, states):
            return ops.modal_convolution(*streams, **constants, initial_state=states[0], output_final_state=True)

        return (
            (self.normal(B, T, D),),
            constants,
            states,
            run,
            lambda t, s, c, states: ops.modal_step(*s, **c, state=states[0]),
        )

    def check(self, half=False):
        """`half`: the states are bfloat16, rounded at each token."""
        constants = dict(zip(self.constants, widen(self.constants.values()), strict=True))
        if half:
            self.states = tuple(x.bfloat16() for x in self.states)
        with ops.use_backend("chunked"):
            expected = self.parallel(widen(self.streams), constants, widen(self.states))
        held = [surround(x) for x in self.states]
        outputs = []
        for t in range(self.tokens):
            token = tuple(x[:, t] for x in self.streams)
            torch.full(
                token[2 % len(token)].shape, float("nan"), dtype=self.dtype, device=self.device
            )  # memory that o will get
            before, writes = held[0][0].clone(), None if self.pending is None else self.pending.number == self.every - 1
            with ops.use_backend("triton"), launching(""):
                outputs.append(self.step(t, token, self.constants, tuple(x for x, _ in held)))
            if writes is not None:
                assert torch.equal(held[0][0][~writes], before[~writes])
                self.pending.number.add_(1).remainder_(self.every)
        if self.pending is not None:
            self.pending.settle(held[0][0])
        # The launches that make keys and values round them, as the layers' parallel forms do before the op.
        rounded = self.op.startswith("projected")
        assert_near(
            [torch.stack(outputs, 1), *(x for x, _ in held)],
            expected,
            0.01 if half else TOLERANCE[self.dtype] if rounded else None,
        )
        assert all(around[:8].isnan().all() and around[-8:].isnan().all() for _, around in held)
        assert all(x.dtype == self.dtype for x in outputs)

    def check_nan(self):
        """Where NaN in an input makes a result NaN by the definition, it does so in the kernels of both forms."""
        constants = {name: x for name, x in self.constants.items() if x.is_floating_point()}
        for name, inputs in ("streams", self.streams), ("constants", constants.values()), ("states", self.states):
            for number, x in enumerate(inputs):
                kept = x.clone()
                (x[:, 1] if name == "streams" else x)[..., -1] = float("nan")
                with ops.use_backend("reference"):
                    expected = self.parallel(self.streams, self.constants, self.states)
                with ops.use_backend("triton"), launching(""):
                    actual = self.parallel(self.streams, self.constants, self.states)
                states = tuple(state.clone() for state in self.states)
                with ops.use_backend("triton"):
                    tokens = [tuple(y[:, t] for y in self.streams) for t in range(self.tokens)]
                    outputs = [self.step(t, token, self.constants, states) for t, token in enumerate(tokens)]
                x.copy_(kept)
                steps = torch.stack(outputs, 1), *states
                assert any(y.isnan().any() for y in expected), (self.op, name, number)
                for form, results in ("kernel", actual), ("step", steps):
                    lost = [(y.isnan() & ~z.isnan()).any().item() for y, z in zip(expected, results, strict=True)]
                    assert not any(lost), (self.op, form, name, number, lost)


def surround(x):
    """A copy of x in the middle of a buffer of NaN."""
    around = x.new_full((x.numel() + 16,), float("nan"))
    inner = around[8:-8].view(x.shape)
    inner.copy_(x)
    return inner, around


@gpu
@pytest.mark.parametrize("op", MATRIX_OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("K, V", [(32, 32), (64, 64), (96, 80), (128, 128), (256, 128), (256, 256), (33, 47), (1, 3)])
def test_widths(op, K, V, dtype):
    Case(op, (2, 3, K, V), dtype).check()


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("op", ["delta", "delta_channels", "projected_delta", "ssd", "projected_ssd"])
def test_a_state_in_bfloat16_is_rounded_once_a_token(op, every):
    case = Case(op, (4, 3, 8, 8), torch.float32, "cpu", tokens=1, every=every)
    token, state = tuple(x[:, 0] for x in case.streams), case.states[0].bfloat16()
    wide = state.float()
    before = case.fill_pending() if every > 1 else None
    expected = case.step(0, token, case.constants, (wide,))
    case.pending = before
    assert torch.equal(case.step(0, token, case.constants, (state,)), expected)
    assert torch.equal(state, wide.bfloat16())


@gpu
@pytest.mark.parametrize("op", GROUPED_OPS)
@pytest.mark.parametrize("K, V", [(64, 64), (128, 64), (33, 47)])
def test_states_in_bfloat16(op, K, V):
    Case(op, (2, 3, K, V)).check(half=True)


@gpu
@pytest.mark.parametrize("op", GROUPED_OPS)
@pytest.mark.parametrize("K, V", [(64, 64), (96, 192), (128, 64), (33, 47)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pending_tokens(op, K, V, dtype):
    Case(op, (5, 3, K, V), dtype, every=4).check()
    Case(op, (65, 4, K, V), dtype, every=3, extreme=True).check()
    Case(op, (3, 2, K, V), dtype, every=4).check(half=True)


@pytest.mark.parametrize("op", GROUPED_OPS)
def test_pending_tokens_settle_where_no_kernel_runs(op):
    case = Case(op, (3, 2, 8, 8), torch.float64, "cpu", every=4, extreme=True)
    case.states = tuple(x.double() for x in case.states)
    expected = case.parallel(case.streams, case.constants, case.states)
    states = tuple(x.clone() for x in case.states)
    outputs = []
    for t in range(case.tokens):
        outputs.append(case.step(t, tuple(x[:, t] for x in case.streams), case.constants, states))
        case.pending.number.add_(1).remainder_(case.every)
    assert_near([torch.stack(outputs, 1), *states], expected, 1e-12)


@pytest.mark.parametrize("op", ["delta", "delta_channels", "ssd"])
def test_autocast_does_not_reach_pending_tokens(op):
    case = Case(op, (4, 3, 8, 8), torch.float32, "cpu", tokens=1, every=4)
    token, state, before = tuple(x[:, 0] for x in case.streams), case.states[0].clone(), case.fill_pending()
    expected = case.step(0, token, case.constants, case.states)
    case.pending = before
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.step(0, token, case.constants, (state,)), expected)
    assert torch.equal(state, case.states[0])


@pytest.mark.parametrize("wrong, message", [
    ({"number": torch.zeros(3, dtype=torch.int64)}, r"pending.number .*give \[3\] of torch.int32"),
    ({"keys": torch.zeros(3, 2, 3, 7)}, r"pending.keys .*give \[3, 2, 3, 8\]"),
    ({"updates": torch.zeros(3, 4, 2, 8)}, r"pending.updates .*give \[3, 4, 3, 8\]"),
    ({"keys": torch.zeros(3, 2, 0, 8)}, r"give \[3, 2, N - 1, 8\]"),
    ({"decays": None}, "give both or neither"),
])  # fmt: skip
def test_refuses_pending_tokens_that_do_not_go_together(wrong, message):
    case = Case("delta", (3, 2, 8, 8), torch.float32, "cpu", tokens=1, every=4)
    case.pending = case.pending._replace(**wrong)
    with pytest.raises(ValueError, match=message):
        case.step(0, tuple(x[:, 0] for x in case.streams), case.constants, case.states)


@gpu
@pytest.mark.parametrize("op", MATRIX_OPS)
@pytest.mark.parametrize("B, H", [(1, 1), (1, 8), (9, 8), (64, 8), (300, 32)])
def test_batches(op, B, H):
    Case(op, (B, H, 64, 64), extreme=True).check()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("extreme", [False, True])
def test_diagonal_and_modal(dtype, extreme):
    for op, shape in [
        ("convolutions", (3, 700, 256, 77)),
        ("convolutions", (1, 64)),
        ("scan", (3, 1024)),
        ("scan_complex", (2, 77)),
        ("modal", (3, 1024, 64)),
        ("modal", (2, 37, 5)),
    ]:
        Case(op, shape, dtype, extreme=extreme).check()


@gpu
def test_many_tokens_in_a_row():
    for op in MATRIX_OPS:
        Case(op, (1, 2, 64, 64), torch.float32, tokens=2000).check()


@gpu
@pytest.mark.parametrize("op", [*MATRIX_OPS, "scan", "modal"])
def test_in_a_graph(op):
    """A captured step advances the state on every replay, and is deterministic."""
    case = Case(op, {"scan": (3, 64), "modal": (3, 64, 8)}.get(op, (3, 2, 64, 64)), tokens=1)
    token = tuple(x[:, 0].clone() for x in case.streams)
    eager, graphed = ([x.clone() for x in case.states] for _ in range(2))
    outputs = [case.step(0, token, case.constants, tuple(eager)) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.step(0, token, case.constants, tuple(graphed))
    for expected in outputs:
        graph.replay()
        assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))


@gpu
def test_compiled_in_one_graph():
    case = Case("gated", (2, 2, 64, 64), tokens=1)
    token, state = tuple(x[:, 0] for x in case.streams), case.states[0]
    plain, compiled = state.clone(), state.clone()
    expected = ops.gated_step(*token, plain)
    assert torch.equal(torch.compile(ops.gated_step, fullgraph=True)(*token, compiled), expected)
    assert torch.equal(plain, compiled)


def test_compiled_under_vmap():
    """A compiler may see the steps of many models at once, which PyTorch's operations take; no kernel is run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = dict.fromkeys(MATRIX_OPS, (3, 2, 8, 8)) | {"scan": (3, 64), "modal": (3, 64, 8)}
    cases = [Case(op, shape, torch.float32, device, tokens=1) for op, shape in shapes.items()]
    tokens = [[torch.stack([x[:, 0], 0.5 * x[:, 0]]) for x in case.streams] for case in cases]
    states = [[torch.stack([x, -x]) for x in case.states] for case in cases]

    def run(tokens, states):
        results = []
        for case, token, before in zip(cases, tokens, states, strict=True):
            # Not in place on what vmap maps, and so the same in both forms.
            after = [x.clone() for x in before]
            results += [case.step(0, token, case.constants, tuple(after)), *after]
        return results

    with ops.use_backend("triton"):
        compiled = torch.compile(torch.vmap(run), backend="eager", fullgraph=True, dynamic=False)(tokens, states)
    with ops.use_backend("chunked"):
        expected = torch.vmap(run)(tokens, states)
    assert_near(compiled, expected)


@gpu
def test_what_has_no_kernel():
    """A gradient, a state of float64 and one that is not in one piece go through the plain form."""
    case = Case("gated", (2, 2, 64, 64), torch.float32, tokens=1)
    (q, k, v, log_decay), state = (x[:, 0] for x in case.streams), case.states[0]
    expected = ops.gated_step(q, k, v, log_decay, state.clone())
    for own, key in ((state.mT.contiguous().mT, k), (state.double(), k), (state.clone(), k.clone().requires_grad_())):
        assert not stepping.use_kernel("gated", own, q, key, v, log_decay)
        torch.testing.assert_close(ops.gated_step(q, key, v, log_decay, own), expected)
    wide = torch.cat([q, k, v], -1)  # heads that are not in one piece
    torch.testing.assert_close(ops.gated_step(*wide.split(64, -1), log_decay, state.clone()), expected)


def check_weak_decays(tokens, device="cuda"):
    """Decays half way between two numbers of float32, in many steps."""
    draw = [torch.rand(tokens, 1, 2, 16, generator=torch.Generator().manual_seed(n)).to(device) for n in range(3)]
    less = 17.5 * 2**-24  # 1 - decay
    gates = {ops.gated_step: math.log1p(-less), forget_gated_step: -math.log(less / (1 - less))}
    for step, gate in gates.items():
        gate = torch.full_like(draw[0], gate)
        state = torch.ones(1, 2, 16, 16, device=device)
        expected = state.double()
        for t, (q, k, v) in enumerate(zip(*draw, strict=True)):
            with ops.use_backend("triton"), launching(""):
                step(q, k, v, gate[t], state) if step is ops.gated_step else step(q, gate[t], v, state)
            key = k.double() if step is ops.gated_step else (-gate[t].double()).sigmoid()
            expected = expected * (1 - less) + key[..., None] * v.double()[..., None, :]
        assert_near([state], [expected], 2e-6)


@gpu
def test_weak_decays_do_not_drift_over_many_steps():
    check_weak_decays(2000)


NAN = dict.fromkeys(MATRIX_OPS, (1, 1, 16, 16)) | {"scan": (2, 64), "modal": (2, 64, 4)}


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [3, 64])  # a whole chunk is what kernels for Hopper take
@pytest.mark.parametrize("op", NAN)
def test_nan_is_not_lost(op, tokens, dtype):
    shape = (2, 2, 64, 64) if tokens > 3 and op in MATRIX_OPS else NAN[op]
    Case(op, shape, dtype, tokens=tokens).check_nan()


INTERPRETED = [
    *((op, (2, 3, 16, 32), {}) for op in MATRIX_OPS if op not in GROUPED_OPS or op == "projected_delta"),
    *((op, (1, 2, 5, 19), {"extreme": True}) for op in MATRIX_OPS),
    ("convolutions", (2, 7, 300, 5), {"extreme": True}),
    ("convolutions", (2, 40), {}),
    ("scan", (2, 300), {"extreme": True}),
    ("scan_complex", (2, 40), {}),
    ("modal", (2, 37, 5), {"extreme": True}),
    ("modal", (2, 512, 4), {}),
]
INTERPRETED_PENDING = [*((op, (2, 2, 5, 19), True) for op in GROUPED_OPS), ("projected_delta", (3, 1, 16, 16), False)]
INTERPRETED_HALF = ["projected_delta", "projected_ssd"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED) + len(INTERPRETED_PENDING) + len(INTERPRETED_HALF) + len(NAN) + 1


if __name__ == "__main__":
    for op, shape, options in INTERPRETED:
        Case(op, shape, torch.float32, "cpu", tokens=3, **options).check()
        print(op, shape, "agrees")
    for op, shape, extreme in INTERPRETED_PENDING:
        Case(op, shape, torch.float32, "cpu", tokens=5, extreme=extreme, every=4).check()
        print(op, shape, "with pending tokens agrees")
    for op in INTERPRETED_HALF:
        Case(op, (1, 2, 5, 19), torch.float32, "cpu", tokens=3).check(half=True)
        print(op, "with a state in bfloat16 agrees")
    for op, shape in NAN.items():
        Case(op, shape, torch.float32, "cpu", tokens=2).check_nan()
        print(op, "agrees on NaN")
    check_weak_decays(200, "cpu")
    print("weak decays agrees")
