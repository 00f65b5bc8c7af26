"""Every op on spans of a row, one per rank, against the op on the whole row: outputs, final states and all gradients.

float64; decays down to 0, masked tokens, packed documents that begin inside spans, at their edges, and cover several.
"""

import pytest
import torch
import torch.distributed as dist

from linnet import ops
from linnet.data.loader import flatten_documents
from linnet.models import ModelConfig, build_model
from linnet.ops import sequence

B, H, K, V, D = 2, 2, 3, 4, 6
OPS = ["lightning", "lightning no decay", "gated", "forget", "forget bounded", "additive", "additive lrpe", "scan"]
OPS += ["ssd", "complex scan", "selective", "selective bias", "modal", "long convolution"]
OPS += ["delta", "delta decay", "delta channels", "delta vectors", "dplr"]
TOLERANCE = 1e-12


def make(op, length, seed, initial=False):
    """(inputs that are cut in time [B, T, ...], parameters, initial states [B, ...] or None, what calls the op)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def reset(x, value):  # some entries of every kind of input that may be infinite are
        return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.1, value)

    name = op.split()[0]
    q, k, v = normal(B, length, H, K), normal(B, length, H, K), normal(B, length, H, V)
    state = {"S": normal(B, H, K, V)} if initial else {}
    match op:
        case "lightning" | "lightning no decay":
            log_decay = None if op != "lightning" else torch.tensor([-0.05, -torch.inf if seed % 2 else -1.0]).double()

            def call(x, p, s, **more):
                return ops.lightning_attention(
                    *x.values(), log_decay=log_decay, scale=0.5, initial_state=s.get("S"), **more
                )

            return {"q": q, "k": k, "v": v}, {}, state, call
        case "gated":

            def call(x, p, s, **more):
                return ops.gated_linear_attention(*x.values(), scale=0.5, initial_state=s.get("S"), **more)

            g = reset(-normal(B, length, H, K).square() * 0.2, -torch.inf)
            return {"q": q, "k": k, "v": v, "g": g}, {}, state, call
        case "ssd":

            def call(x, p, s, **more):
                return ops.ssd(**x, **p, scale=0.5, initial_state=s.get("S"), **more)

            g = reset(-normal(B, length, 2 * H).square() * 0.2, -torch.inf)
            x = {"q": q, "k": k, "v": normal(B, length, 2 * H, V), "log_decay": g, "times": normal(B, length, 2 * H)}
            state = {"S": normal(B, 2 * H, K, V)} if initial else {}
            return x, {"skip": normal(1, 1, 2 * H)}, state, call
        case "delta" | "delta decay" | "delta channels" | "delta vectors":

            def call(x, p, s, **more):
                gates = (x.get("g"), x["erase"], x.get("write"))
                return ops.gated_delta_rule(x["q"], x["k"], x["v"], *gates, scale=0.5, initial_state=s.get("S"), **more)

            per_channel = (K,) if op in ("delta channels", "delta vectors") else ()
            x = {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": normal(B, length, 2 * H, V)}
            if op != "delta":
                x["g"] = reset(-normal(B, length, 2 * H, *per_channel).square() * 0.2, -torch.inf)
            if op == "delta vectors":
                x["erase"], x["write"] = (2 * normal(B, length, 2 * H, n).sigmoid() for n in (K, V))
            else:
                x["erase"] = 2 * normal(B, length, 2 * H).sigmoid()
            return x, {}, {"S": normal(B, 2 * H, K, V)} if initial else {}, call
        case "dplr":

            def call(x, p, s, **more):
                return ops.dplr_rule(*x.values(), scale=0.5, initial_state=s.get("S"), **more)

            g = reset(-normal(B, length, H, K).square() * 0.2, -torch.inf)
            a, b = 0.5 * normal(2, B, length, H, K)
            return {"q": q, "k": k, "v": v, "g": g, "a": a, "b": b}, {}, state, call
        case "forget" | "forget bounded":
            bound = {} if op == "forget" else {"bound": torch.rand(H, K, generator=generator, dtype=torch.float64)}

            def call(x, p, s, **more):
                return ops.forget_gated_attention(
                    *x.values(), lower_bound=p.get("bound"), initial_state=s.get("S"), **more
                )

            return {"q": q, "x": 3 * k, "v": v}, bound, state, call
        case "additive" | "additive lrpe":
            theta = {} if op == "additive" else {"theta": normal(H, K)}
            if initial:
                state = {"S": normal(B, H, K * (1 + len(theta)), V), "z": 3 * normal(B, H, K)}

            def call(x, p, s, **more):
                given = (s["S"], s["z"]) if s else None
                return ops.additive_attention(*x.values(), theta=p.get("theta"), initial_state=given, **more)

            k = reset(8 * k, -torch.inf)
            k[:, : length // 2, 0] = -torch.inf  # nothing is seen before the second half
            return {"q": q, "k": k, "v": v}, theta, state, call
        case "scan" | "complex scan":
            pair = () if name == "scan" else (2,)
            theta = {} if name == "scan" else {"theta": normal(D)}

            def call(x, p, s, **more):
                return ops.diagonal_scan(x["x"], x["g"], theta=p.get("theta"), initial_state=s.get("S"), **more)

            g = reset(-normal(B, length, D).square() * 0.2, -torch.inf)
            state = {"S": normal(B, D, *pair)} if initial else {}
            return {"x": normal(B, length, D, *pair), "g": g}, theta, state, call
        case "selective" | "selective bias":
            bias = {"bias": normal(D)} if op != "selective" else {}
            parameters = {"A": -normal(D, K).exp(), "D": normal(D)} | bias

            def call(x, p, s, **more):
                return ops.selective_scan(
                    x["x"], x["delta"], p["A"], x["B"], x["C"], p["D"], delta_bias=p.get("bias"),
                    initial_state=s.get("S"), **more,
                )  # fmt: skip

            x = {"x": normal(B, length, D), "delta": normal(B, length, D).abs() * 0.3}
            x |= {"B": normal(B, length, K), "C": normal(B, length, K)}
            return x, parameters, {"S": normal(B, D, K)} if initial else {}, call
        case "modal":
            parameters = {"log_decay": reset(-normal(D, K).square(), -torch.inf), "weight": normal(D, K)}

            def call(x, p, s, **more):
                return ops.modal_convolution(x["x"], **p, initial_state=s.get("S"), **more)

            return {"x": normal(B, length, D)}, parameters, {"S": normal(B, D, K)} if initial else {}, call
        case "long convolution":
            names = {"log_decay": -normal(3, K).square(), "theta": normal(3, K), "residue": normal(3, K, 2)}
            parameters = names | {"skip": normal(3)}

            def call(x, p, s, **more):
                return ops.long_convolution(x["x"], ops.ModalFilter(**p), initial_state=s.get("S"), **more)

            return {"x": normal(B, length, D)}, parameters, {"S": normal(B, D, K, 2)} if initial else {}, call


def starts_of(length, seed):
    """int32 [B, N] as `mark_documents` gives them: at the edges of spans, inside them, and one row almost whole."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[0, length // 2, *torch.randint(1, length, (3,), generator=generator).tolist()], [0, length - 1]]
    rows = [sorted(set(row)) for row in rows]
    return torch.tensor([row + [length] * (8 - len(row)) for row in rows], dtype=torch.int32)


def run(op, length, seed, packed, initial, cut, compiled=False):
    """Output, final states, and gradients by name of one rank; `cut` takes its span from what is cut in time."""
    inputs, parameters, states, call = make(op, length, seed, initial)
    weights = torch.randn(B, length, 64, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    x = {name: cut(y).clone().requires_grad_() for name, y in inputs.items()}
    p, s = ({name: y.clone().requires_grad_() for name, y in group.items()} for group in (parameters, states))
    more, given = {"output_final_state": True}, x
    if packed:
        starts = sequence.cut_documents(starts_of(length, seed), cut(weights).shape[1])
        tokens = cut(weights)[..., 0]
        *_, more["cu_seqlens"] = flatten_documents(tokens, tokens, starts)
        given = {name: y.flatten(0, 1)[None] for name, y in x.items()}
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    o, final = call(given, p, s, **more)
    final = final if isinstance(final, tuple) else (final,)
    o = o.view(B, -1, *o.shape[2:])
    place = sequence.span()
    loss = (o.flatten(2) * cut(weights)[..., : o[0, 0].numel()]).sum()
    if place is None or place.rank == place.size - 1:
        for y in final:
            finite = y[-1] if packed else y  # the last document's alone: those before end on other ranks
            finite = finite.masked_fill(finite == -torch.inf, 0.0)
            loss = loss + (finite * torch.linspace(-1, 1, finite.numel(), dtype=torch.float64).view(finite.shape)).sum()
    loss.backward()
    grads = [{name: y.grad for name, y in group.items()} for group in (x, p, s)]
    return o.detach(), [y.detach() for y in final], *grads


def spans(cases, method):
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    with sequence.sequence_parallel(dist.group.WORLD, method):
        for case in cases:
            results.append(run(*case, cut=lambda x: x.chunk(size, 1)[rank]))
    return results


def compiled_spans(cases):
    rank, size = dist.get_rank(), dist.get_world_size()
    with sequence.sequence_parallel(dist.group.WORLD):
        return [run(*case, cut=lambda x: x.chunk(size, 1)[rank], compiled=True) for case in cases]


def compare(cases, results):
    """`results`: of each rank, of each case."""
    for number, case in enumerate(cases):
        o, final, dx, dp, ds = run(*case, cut=lambda x: x)
        found = [rank[number] for rank in results]
        pairs = {"o": (torch.cat([x[0] for x in found], 1), o)}
        packed = case[3]
        for i, expected in enumerate(final):
            last = found[-1][1][i]
            pairs[f"final {i}"] = (last[-1], expected[-1]) if packed else (last, expected)
        pairs |= {name: (torch.cat([x[2][name] for x in found], 1), grad) for name, grad in dx.items()}
        for group, grads in ((3, dp), (4, ds)):
            pairs |= {name: (sum(x[group][name] for x in found), grad) for name, grad in grads.items()}
        for name, (given, expected) in pairs.items():
            assert not given.isnan().any() or expected.isnan().any(), (case, name)
            given, expected = given.nan_to_num(0.0), expected.nan_to_num(0.0)
            error = (given - expected).abs().max() / max(1.0, expected.abs().max())
            assert error <= TOLERANCE, (case, name, error.item())


def refusals():
    """What a span cannot do, by the error's class and what it must name."""
    x, cuts = torch.ones(1, 4, 2, 3), torch.tensor([0, 2, 4], dtype=torch.int32)
    model = build_model(ModelConfig(layout="tnl+sglu", d_model=8, vocab_size=8, options={"tnl": {"num_heads": 2}}))
    states = model.init_state(1, 8)
    state = torch.zeros(1, 2, 3, 3)
    with sequence.sequence_parallel(dist.group.WORLD):
        cases = [
            (RuntimeError, "prefill", lambda: model(torch.zeros(1, 4, dtype=torch.int64), states)),
            (ValueError, "causal", lambda: ops.additive_attention(x, x, x, causal=False)),
            (ValueError, "ModalFilter", lambda: ops.long_convolution(x[..., 0], torch.ones(2, 4))),
            (ValueError, "ModalFilter", lambda: ops.filtered_attention(x, x, x, torch.ones(2, 4))),
            (ValueError, "cut_documents", lambda: ops.lightning_attention(x, x, x, cu_seqlens=cuts)),
            (ValueError, "halo", lambda: sequence.halo(x, 5)),
            (ValueError, "all_to_all", lambda: sequence.all_to_all(x, 1, 3)),
        ]
        for error, name, call in cases:
            with pytest.raises(error, match=name):
                call()
        with pytest.raises(RuntimeError, match="chunked"), ops.use_backend("reference"):
            ops.lightning_attention(x, x, x)
        sequence.cut_documents(torch.tensor([[0, 2]], dtype=torch.int32), 4)
        with pytest.raises(ValueError, match="initial_state"):
            ops.lightning_attention(x, x, x, cu_seqlens=cuts, initial_state=state.repeat(2, 1, 1, 1))


def test_refusals(pool):
    pool.run(2, refusals)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ops(pool, world):
    """Rows and packed documents, with and without a state before the row."""
    length = 5 * world
    cases = [(op, length, world, packed, False) for op in OPS for packed in (False, True)]
    cases += [(op, length, world + 1, False, True) for op in OPS]
    compare(cases, pool.run(world, spans, cases, "gather"))


def test_scan_in_rounds(pool):
    """The exchange that serves more than 16 ranks."""
    cases = [(op, 16, 7, False, False) for op in OPS]
    compare(cases, pool.run(4, spans, cases, "scan"))


def test_compiled(pool):
    """`torch.compile(fullgraph=True)` of ops of each kind with their exchanges, and of packed documents."""
    cases = [
        ("lightning", 8, 3, False, False),
        ("forget bounded", 8, 3, True, False),
        ("complex scan", 8, 3, False, True),
    ]
    cases += [("additive lrpe", 8, 3, True, False), ("selective bias", 8, 3, False, False)]
    cases += [("ssd", 8, 3, False, True), ("delta vectors", 8, 3, True, False), ("dplr", 8, 3, False, True)]
    compare(cases, pool.run(2, compiled_spans, cases))
