"""The groups of rows that `kernels.py` can time. Each fits in a few minutes; those of fla tune for minutes first."""

from collections.abc import Callable, Iterator

import peers
import torch
from cases import HEADS, TOKENS, Case, Cost, Shape, attention_cost, compare, decays, draw, draw_qkv, draw_state
from convolutions import longconv_group, selective_group  # noqa: F401
from torch import Tensor
from torch.nn import functional as F

from linnet.layers.norm import SRMSNorm
from linnet.ops import (
    additive_attention,
    diagonal_scan,
    forget_gated_attention,
    gated_delta_rule,
    gated_linear_attention,
    lightning_attention,
    modal_convolution,
    ssd,
)
from linnet.ops.cross_entropy import linear_cross_entropy
from linnet.ops.delta.chunked import backward_flops, forward_flops
from linnet.ops.ssd.chunked import backward_flops as ssd_backward_flops
from linnet.ops.ssd.chunked import forward_flops as ssd_forward_flops

LENGTHS = (1024, 2048, 4096, 8192, 16_384)
LONG = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
FEW = (1024, 4096, 16_384)
WITH_PEERS = (Shape.of(1024), Shape.of(16_384), Shape(8192, 1))


def peer(op: str, shape: Shape, run: Callable[..., Tensor], inputs: Callable | None = None) -> Case:
    return Case(op, shape._asdict(), inputs or (lambda: draw_qkv(shape)), run, attention_cost(shape))


# Lightning attention


def lightning(shape: Shape, op: str = "lightning") -> Case:
    rates = decays()

    def run(q, k, v):
        return lightning_attention(q, k, v, log_decay=rates)[0]

    def check() -> float:
        def call(q, k, v, state):
            return lightning_attention(
                q, k, v, log_decay=rates.to(state.dtype), initial_state=state, output_final_state=True
            )

        # The kernel for Hopper GPUs takes whole chunks alone.
        lengths = (shape.short(), shape.short()._replace(length=min(shape.length, 4096)))
        return max(compare(call, [*draw_qkv(at), draw_state(at)]) for at in lengths)

    return Case(op, shape._asdict(), lambda: draw_qkv(shape), run, attention_cost(shape), check)


def lightning_group() -> Iterator[Case]:
    yield from (lightning(Shape.of(length)) for length in (512, *LENGTHS))
    yield from (lightning(Shape(length, 1)) for length in (2048, 8192, 32_768, 65_536, 131_072))
    for key, value in ((64, 64), (256, 128), (256, 256)):
        yield from (lightning(Shape.of(length, key=key, value=value)) for length in FEW)


def lightning_peers_group() -> Iterator[Case]:
    for shape in (*WITH_PEERS, Shape(65_536, 1)):
        yield lightning(shape)
        yield peer("fla simple_gla", shape, peers.simple_gla(decays()))
        yield peer("lightning_attn", shape, peers.lightning_attn(decays()))


def softmax_group() -> Iterator[Case]:
    for length in LENGTHS:
        yield lightning(Shape.of(length))
        for backend in ("cudnn", "flash"):
            yield peer(backend, Shape.of(length), peers.softmax(backend))


def figure4_group() -> Iterator[Case]:
    """131,072 tokens, cut into sequences of each length."""
    for length in LONG:
        shape = Shape.of(length, 131_072)
        yield lightning(shape)._replace(check=None)
        for backend in ("cudnn", "flash"):
            yield peer(backend, shape, peers.softmax(backend))
        if length <= 4096:
            yield peer("left product", shape, peers.left_product(decays()))


# Gated


def draw_gates(shape: Shape) -> list[Tensor]:
    """q, the logits of forget gates as a projection gives them, v, and lower bounds as in the middle of a model."""
    bounds = torch.linspace(0.2, 0.8, shape.heads * shape.key, device="cuda").view(shape.heads, shape.key)
    return [*draw_qkv(shape), bounds]


def draw_decays(shape: Shape) -> list[Tensor]:
    """q, k, v and log-decays in float32."""
    logits = draw(shape.batch, shape.length, shape.heads, shape.key).float()
    return [*draw_qkv(shape), F.logsigmoid(logits + 3)]


def hgrn2(shape: Shape) -> Case:
    """Gated with HGRN2's gates inside; their lower bounds have a gradient too."""

    def run(q, logits, v, beta):
        return forget_gated_attention(q, logits, v, lower_bound=beta)[0]

    def check() -> float:
        def call(q, logits, v, beta, state):
            return forget_gated_attention(q, logits, v, lower_bound=beta, initial_state=state, output_final_state=True)

        return compare(call, [*draw_gates(shape.short()), draw_state(shape.short())])

    return Case("gated, HGRN2", shape._asdict(), lambda: draw_gates(shape), run, attention_cost(shape), check)


def gated(shape: Shape) -> Case:
    def run(q, k, v, g):
        return gated_linear_attention(q, k, v, g)[0]

    def check() -> float:
        def call(q, k, v, g, state):
            return gated_linear_attention(q, k, v, g, initial_state=state, output_final_state=True)

        return compare(call, [*draw_decays(shape.short()), draw_state(shape.short())])

    return Case("gated", shape._asdict(), lambda: draw_decays(shape), run, gated_cost(shape), check)


def gated_cost(shape: Shape) -> Cost:
    """With log-decays of 4 bytes, and their gradient."""
    cost, decay = attention_cost(shape), 4 * shape.batch * shape.length * shape.heads * shape.key
    return cost._replace(forward_bytes=cost.forward_bytes + decay, backward_bytes=cost.backward_bytes + 2 * decay)


def gated_group() -> Iterator[Case]:
    shapes = [*(Shape.of(length) for length in (*LENGTHS, 65_536)), Shape(8192, 1)]
    yield from map(hgrn2, shapes)
    yield from map(gated, [*shapes, Shape.of(8192, key=256, value=256), Shape.of(8192, key=64, value=64)])


def gated_peers_group() -> Iterator[Case]:
    for shape in WITH_PEERS:
        yield hgrn2(shape)
        yield gated(shape)
        yield peer("fla gla, HGRN2", shape, peers.gla_with_hgrn2_gates, lambda s=shape: draw_gates(s))
        yield peer("fla gla", shape, peers.gla, lambda s=shape: draw_decays(s))._replace(cost=gated_cost(shape))


# Delta rule


def draw_delta(shape: Shape, keys: int, op: str = "delta") -> list[Tensor]:
    """q and k of unit norm in `keys` heads, v, log-decays in float32 (per channel of the key but for "delta"), and what
    a token erases and writes: one number, or for "gdn2" two tensors with one per channel."""
    q, k, v = draw_qkv(shape)
    q, k = (F.normalize(x[:, :, :keys].float(), dim=-1).bfloat16() for x in (q, k))
    sizes = shape.batch, shape.length, shape.heads
    decays = F.logsigmoid(draw(*sizes, *[shape.key] * (op != "delta")).float() + 3)
    widths = [(shape.key,), (shape.value,)] if op == "gdn2" else [()]
    return [q, k, v, decays, *(draw(*sizes, *width).sigmoid() for width in widths)]


def delta(shape: Shape, keys: int, op: str = "delta") -> Case:
    scale = shape.key**-0.5

    def run(*inputs):
        return gated_delta_rule(*inputs, scale=scale)[0]

    def check() -> float:
        def call(*inputs):
            *inputs, state = inputs
            return gated_delta_rule(*inputs, scale=scale, initial_state=state, output_final_state=True)

        # The kernels for Hopper GPUs take whole chunks alone.
        lengths = (shape.short(), shape.short()._replace(length=min(shape.length, 1024)))
        most = 0.0065 if op == "gdn2" else 0.005  # as tests/ops/test_delta_triton.py
        return max(compare(call, [*draw_delta(at, keys, op), draw_state(at)], most=most) for at in lengths)

    sizes = shape._asdict() | {"heads": f"{keys}/{shape.heads}"}
    return Case(op, sizes, lambda: draw_delta(shape, keys, op), run, delta_cost(shape, keys, op), check)


def delta_cost(shape: Shape, keys: int, op: str = "delta") -> Cost:
    """q and k have fewer heads than v; a log-decay of 4 bytes (or one per channel) and strengths of 2 per value head,
    and their gradients. FLOPs in chunks of 64, as the op counts them."""
    B, T, HV, K, V = shape
    sizes = (B, T, keys, K), (B, T, keys, K), (B, T, HV, V), (B, T, HV) if op == "delta" else (B, T, HV, K)
    gates = (2 if op == "delta" else 2 * K) + (K + V if op == "gdn2" else 1)
    forward = 2 * B * T * (2 * keys * K + 2 * HV * V + gates * HV)
    backward = 2 * B * T * (4 * keys * K + 3 * HV * V + 2 * gates * HV)
    return Cost(forward, backward, forward_flops(*sizes), backward_flops(*sizes))


DELTA_SHAPES = ((Shape(32_768, 1, 32), 16), (Shape(4096, 1, 32), 16), (Shape.of(4096), 16), (Shape.of(1024), 16))


def delta_group() -> Iterator[Case]:
    for shape, keys in (*DELTA_SHAPES, (Shape(65_536, 1), 16), (Shape.of(4096, key=64, value=64), 16)):
        yield delta(shape, keys)


def delta_peers_group() -> Iterator[Case]:
    for shape, keys in DELTA_SHAPES:
        case = delta(shape, keys)
        yield case
        yield case._replace(op="fla gated delta", run=peers.gated_delta(shape.key**-0.5), check=None)


def kda_peers_group() -> Iterator[Case]:
    for shape in (Shape(32_768, 1, 32), Shape(4096, 8, 8)):
        case = delta(shape, shape.heads, "kda")
        yield case
        yield case._replace(op="fla kda", run=peers.kda(shape.key**-0.5), check=None)


def gdn2_peers_group() -> Iterator[Case]:
    for shape in (Shape(32_768, 1, 32), Shape(4096, 8, 8)):
        case = delta(shape, shape.heads, "gdn2")
        yield case
        yield case._replace(op="fla gdn2", run=peers.gdn2(shape.key**-0.5), check=None)


# Scalar decay


def draw_scalar(shape: Shape, keys: int) -> list[Tensor]:
    """q and k in `keys` heads, v, and a log-decay in float32 per token and value head."""
    q, k, v = draw_qkv(shape)
    decays = F.logsigmoid(draw(shape.batch, shape.length, shape.heads).float() + 3)
    return [*(x[:, :, :keys].contiguous() for x in (q, k)), v, decays]


def scalar(shape: Shape, keys: int) -> Case:
    def run(*inputs):
        return ssd(*inputs)[0]

    def check() -> float:
        def call(*inputs):
            *inputs, state = inputs
            return ssd(*inputs, initial_state=state, output_final_state=True)

        return compare(call, [*draw_scalar(shape.short(), keys), draw_state(shape.short())])

    B, T, HV, K, V = shape.batch, shape.length, shape.heads, shape.key, shape.value
    sizes = (B, T, keys, K), (B, T, keys, K), (B, T, HV, V)
    cost = Cost(
        B * T * (2 * (2 * keys * K + 2 * HV * V) + 4 * HV),
        B * T * (2 * (4 * keys * K + 3 * HV * V) + 8 * HV),
        ssd_forward_flops(*sizes),
        ssd_backward_flops(*sizes),
    )
    described = shape._asdict() | {"heads": f"{keys}/{shape.heads}"}
    return Case("ssd", described, lambda: draw_scalar(shape, keys), run, cost, check)


def ssd_group() -> Iterator[Case]:
    """Mamba-2's one key; heads of keys as many as of values, as in RetNet, with fla beside."""
    yield scalar(Shape(4096, 8, 32, 128, 64), 1)
    cases = [scalar(Shape.of(length), HEADS) for length in FEW]
    yield from cases
    for case in cases:
        yield case._replace(op="fla simple_gla", run=peers.simple_gla_of_tokens, check=None)


# Additive


def additive(shape: Shape, rotated: bool = False, causal: bool = True) -> Case:
    """With LRPE its frequencies have a gradient too."""

    def draw_inputs(at: Shape) -> list[Tensor]:
        return [*draw_qkv(at), *([torch.rand(at.heads, at.key, device="cuda")] if rotated else [])]

    def run(q, k, v, theta=None):
        return additive_attention(q, k, v, theta=theta, causal=causal)[0]

    def check() -> float:
        def call(q, k, v, *rest):
            theta, *states = rest if rotated else (None, *rest)
            o, after = additive_attention(
                q, k, v, theta=theta, causal=causal, initial_state=tuple(states) or None, output_final_state=True
            )
            return o, *after

        def error(at: Shape) -> float:
            states = [draw_state(at, widen * at.key), draw(at.batch, HEADS, at.key).float()]
            return compare(call, [*draw_inputs(at), *(states if causal else [])])

        # Whole chunks and many heads have kernels of their own.
        return max(error(shape.short()), error(shape._replace(length=min(shape.length, 1024), batch=4)))

    widen = 2 if rotated else 1
    op = f"additive{' with LRPE' if rotated else ''}{'' if causal else ', not causal'}"
    return Case(op, shape._asdict(), lambda: draw_inputs(shape), run, attention_cost(shape, widen), check)


def two_scans(shape: Shape) -> Case:
    """Both directions by our own gated form, one after the other (the other way to look ahead).

    The scan from the end is timed as one from the start: the same work, but for turning its tensors round.
    """

    def run(q, k, v, g):
        return gated_linear_attention(q, k, v, g)[0] + gated_linear_attention(q, k, v, g)[0]

    cost = attention_cost(shape)
    return Case("two scans of gated", shape._asdict(), lambda: draw_decays(shape), run, cost)


def additive_group() -> Iterator[Case]:
    for length in (*LENGTHS, 65_536):
        yield additive(Shape.of(length))
        yield additive(Shape.of(length), rotated=True)
    yield additive(Shape(8192, 1))
    for length in FEW:
        yield additive(Shape.of(length), causal=False)
        yield two_scans(Shape.of(length))


def additive_peers_group() -> Iterator[Case]:
    for shape in WITH_PEERS:
        yield additive(shape)
        yield peer("fla lightnet", shape, peers.lightnet)


# Element-wise recurrence, norms, loss


def scan(length: int, width: int = HEADS * 128, theta: bool = False) -> Case:
    shape = {"length": length, "batch": TOKENS // length, "width": width}

    def draw_inputs(length: int, batch: int, pair: tuple = (2,) if theta else ()) -> list[Tensor]:
        return [draw(batch, length, width, *pair), F.logsigmoid(draw(batch, length, width).float() + 3)]

    angles = torch.rand(width, device="cuda") if theta else None

    def run(x, log_decay):
        return diagonal_scan(x, log_decay, theta=angles)[0]

    def check() -> float:
        def call(x, log_decay, state):
            turned = None if angles is None else angles.to(state.dtype)
            return diagonal_scan(x, log_decay, theta=turned, initial_state=state, output_final_state=True)

        short, batch = min(length, 4096) - 5, min(TOKENS // length, 2)
        state = draw(batch, width, *((2,) if theta else ())).float()
        return compare(call, [*draw_inputs(short, batch), state])

    parts, elements = 2 if theta else 1, TOKENS * width
    # x, log_decay in, h out; backward log_decay, h, dh in, dx and dlog_decay out
    cost = Cost(elements * (2 * parts + 4 + 2 * parts), elements * (4 + 4 * parts + 2 * parts + 4))
    op = "diagonal_scan, complex" if theta else "diagonal_scan"
    return Case(op, shape, lambda: draw_inputs(length, TOKENS // length), run, cost, check)


def modal(length: int, width: int = 1024, modes: int = 64) -> Case:
    """TPE as LightNet and cosFormer2 have it, after the embedding. Its FLOPs are outside the tensor cores."""

    def draw_inputs(length: int, batch: int) -> list[Tensor]:
        rates = torch.logspace(-3, 0, modes, device="cuda").expand(width, modes)
        return [draw(batch, length, width, dtype=torch.float32), -rates, draw(width, modes, dtype=torch.float32)]

    def run(x, log_decay, weight):
        return modal_convolution(x, log_decay, weight)[0]

    def check() -> float:
        def call(x, log_decay, weight, state):
            return modal_convolution(x, log_decay, weight, initial_state=state, output_final_state=True)

        short, batch = min(length, 1024) - 5, min(TOKENS // length, 2)
        return compare(call, [*draw_inputs(short, batch), draw(batch, width, modes, dtype=torch.float32)])

    shape, elements = {"length": length, "batch": TOKENS // length, "width": width}, TOKENS * width
    cost = Cost(2 * 4 * elements, 3 * 4 * elements)
    op, inputs = f"modal_convolution, {modes} modes", lambda: draw_inputs(length, TOKENS // length)
    return Case(op, shape, inputs, run, cost, check)


def hgrn_peer(length: int, width: int = HEADS * 128) -> Case:
    return scan(length, width)._replace(op="fla hgrn", run=peers.hgrn, check=None)


def scan_group() -> Iterator[Case]:
    for length in (*FEW, 65_536):
        yield scan(length)
        yield scan(length, theta=True)
        yield modal(length)


def scan_peers_group() -> Iterator[Case]:
    for length in FEW:
        yield scan(length)
        yield hgrn_peer(length)


def norm_group() -> Iterator[Case]:
    """SRMSNorm over widths with equal work, and over lengths at the width of paper 001, Figure 7."""
    for width in (64, 128, 256, 512, 1024, 2048, 3072, 4096, 8192):
        yield from srmsnorm(2**28 // width, width, "width")
    for length in (1024, 4096, 16_384, 65_536, 131_072):
        yield from srmsnorm(length, 3072, "length")


def srmsnorm(tokens: int, width: int, along: str) -> Iterator[Case]:
    ours = SRMSNorm(width)

    def formula(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def library(x: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), eps=1e-6)

    def check() -> float:
        return compare(lambda x: (ours(x),), [draw(1023, width)], lambda x: (formula_in(x),))

    def formula_in(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    shape = {"tokens": tokens, "width": width, "along": along}
    cost = Cost(2 * 2 * tokens * width, 3 * 2 * tokens * width)
    inputs = lambda: [draw(tokens, width)]  # noqa: E731
    torch._dynamo.reset()  # so that each width is compiled, however many came before
    yield Case("srmsnorm", shape, inputs, ours, cost, check)
    yield Case("torch.compile", shape, inputs, torch.compile(formula, dynamic=False), cost)
    yield Case("F.rms_norm", shape, inputs, library, cost)
    if along == "length":
        yield Case("formula", shape, inputs, formula, cost)


def cross_entropy_group() -> Iterator[Case]:
    """The last linear layer and its loss: 32,768 tokens, width 1,024, 50,304 classes."""
    tokens, width, classes = 32_768, 1024, 50_304
    targets = torch.randint(classes, (tokens,), device="cuda")

    def inputs() -> list[Tensor]:
        return [draw(tokens, width), draw(classes, width) * 0.02]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets) / tokens

    def check() -> float:
        few = targets[:2048]
        return compare(
            lambda x, weight: (linear_cross_entropy(x, weight, few),),
            [draw(2048, width), draw(classes, width) * 0.02],
            lambda x, weight: (F.cross_entropy(F.linear(x, weight), few, reduction="sum"),),
        )

    shape = {"tokens": tokens, "width": width, "classes": classes}
    products = 2.0 * tokens * width * classes
    cost = Cost(2 * width * (tokens + classes), 4 * width * (tokens + classes), products, 2 * products)
    yield Case("linear_cross_entropy", shape, inputs, ours, cost, check)
    yield Case("full logits", shape, inputs, peers.cross_entropy_torch(targets), cost)
    yield Case("full logits, compiled", shape, inputs, torch.compile(peers.cross_entropy_torch(targets)), cost)
    yield Case("fla fused", shape, inputs, peers.cross_entropy_fla(targets), cost)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    name.removesuffix("_group"): function for name, function in globals().items() if name.endswith("_group")
}
