"""What `torch.library` knows of lightning and gated attention: fake, autograd, vmap, FLOPs; compilation, autocast."""

import sys

import pytest
import torch
from registered import check_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from linnet.ops import gated_linear_attention, lightning_attention, use_backend
from linnet.ops.fast_path import make_fast_path
from linnet.ops.gated import gated
from linnet.ops.lightning import lightning

OPS = {"lightning": (lightning_attention, lightning.forward), "gated": (gated_linear_attention, gated.forward)}
VARIANTS = ["plain", "no decay", "state", "documents"]


def make(op, variant="plain", *, B=2, T=70, H=3, K=4, V=5, dtype=torch.float64, device="cpu", seed=0):
    """Keyword arguments of the public function, in the order of the registered op."""
    if variant == "documents":
        B = 1
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)
        return x.requires_grad_()

    call = dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, H, V))
    if op == "gated":
        call["log_decay"] = normal(B, T, H, K).detach().abs().neg().requires_grad_()
    else:
        call["log_decay"] = None if variant == "no decay" else normal(H).detach().abs().neg()
    call["initial_state"] = normal(B if variant != "documents" else 3, H, K, V) if variant != "plain" else None
    call["cu_seqlens"] = torch.tensor([0, 20, 20, T], dtype=torch.int32) if variant == "documents" else None
    return call | {"scale": 0.5}


def leaves(call):
    return [x for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad]


def loss(results):
    return sum((x.double().sin() * (i + 1)).sum() for i, x in enumerate(results))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, variant):
    call = make(op, variant, T=30).values()
    for return_final_state in (True, False):
        symbolic = return_final_state == (variant in ("plain", "documents"))
        check_op(OPS[op][1], (*call, return_final_state), symbolic)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", OPS)
def test_compiles_in_one_graph(op, variant):
    call, function = make(op, variant), OPS[op][0]

    def run(**call):
        return function(**call, output_final_state=True)

    expected = run(**call)
    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(**call)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    grads = (torch.autograd.grad(loss(results), leaves(call)) for results in (actual, expected))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("op", OPS)
def test_compiles_where_the_state_is_not_read(op):
    call, function = make(op), OPS[op][0]
    expected = torch.autograd.grad(function(**call)[0].square().sum(), leaves(call))
    compiled = torch.compile(lambda **call: function(**call)[0], fullgraph=True, backend="aot_eager")
    for a, e in zip(torch.autograd.grad(compiled(**call).square().sum(), leaves(call)), expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shared", ["k", "log_decay", "initial_state"])
@pytest.mark.parametrize("op", OPS)
def test_vmap_is_a_loop(op, shared, variant):
    """Values and gradients of three models at once, all arguments batched but one, which is the same for all."""
    function = OPS[op][0]
    calls = [make(op, variant, T=20, seed=seed) for seed in range(3)]
    same = {name: x for name, x in calls[0].items() if x is None or name in (shared, "cu_seqlens", "scale")}
    differ = [name for name in calls[0] if name not in same]

    def run(*tensors):
        return function(**same, **dict(zip(differ, tensors, strict=True)), output_final_state=True)

    # Batched along the last axis, so that a rule that takes axis 0 for granted fails.
    batched = vmap(run, in_dims=-1)(*(torch.stack([call[name] for call in calls], -1) for name in differ))
    looped = [torch.stack(x) for x in zip(*(run(*(call[name] for name in differ)) for call in calls), strict=True)]
    learned = [x for call in calls for x in leaves(call | same)]
    for actual, expected in (
        (batched, looped),
        *zip(*[[torch.autograd.grad(loss(x), learned, allow_unused=True)] for x in (batched, looped)], strict=True),
    ):
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", OPS)
def test_vmap_of_the_backward_is_a_loop(op, variant):
    """Many gradients of one call, which vmap the backward op, and that op with a batch of decays."""
    call = make(op, variant, T=20)
    results = OPS[op][0](**call, output_final_state=True)
    weights = [torch.randn(3, *x.shape, dtype=torch.float64) for x in results]
    batched = torch.autograd.grad(results, leaves(call), weights, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        each = torch.autograd.grad(results, leaves(call), [w[i] for w in weights], retain_graph=True)
        for a, e in zip(batched, each, strict=True):
            torch.testing.assert_close(a[i], e)
    if call["log_decay"] is not None:
        decays = torch.stack([call["log_decay"].detach(), 2 * call["log_decay"].detach()], -1)
        backward = getattr(torch.ops.linnet, f"{op}_backward")

        def run(log_decay):
            inputs = (call | {"log_decay": log_decay}).values()
            return backward(
                *(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs), results[0].detach(), None
            )

        batched = vmap(run, in_dims=-1)(decays)
        for i in range(2):
            for a, e in zip(batched, run(decays[..., i]), strict=True):
                torch.testing.assert_close(a[i], e)


@pytest.mark.parametrize("op", OPS)
def test_vmap_over_offsets(op):
    call, function = make(op, "documents"), OPS[op][0]
    offsets = torch.tensor([[0, 20, 20, 70], [0, 1, 69, 70]], dtype=torch.int32)
    actual = vmap(lambda o: function(**(call | {"cu_seqlens": o}), output_final_state=True))(offsets)
    for i, o in enumerate(offsets):
        expected = function(**(call | {"cu_seqlens": o}), output_final_state=True)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a[i], e)


@pytest.mark.parametrize("op", OPS)
def test_vmap_of_a_layer_trains_many_models_at_once(op):
    """The use of the rule: stacked parameters, one call; and the same under torch.compile."""
    layer, function = torch.nn.Linear(6, 12, bias=False).double(), OPS[op][0]
    weights = torch.randn(4, 12, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 2, 10, 6, dtype=torch.float64)

    def run(weight, x):
        q, k, v = functional_call(layer, {"weight": weight}, x).unflatten(-1, (2, 6)).split(2, -1)
        log_decay = -k.square() if op == "gated" else torch.tensor([-0.1, -0.2])
        return function(q, k, v, log_decay=log_decay)[0].square().sum()

    def all_at_once(weights, x):
        return vmap(run)(weights, x).sum()

    (expected,) = torch.autograd.grad(sum(run(w, y) for w, y in zip(weights, x, strict=True)), weights)
    for form in (all_at_once, torch.compile(all_at_once, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad(form(weights, x), weights)[0], expected)


@pytest.mark.parametrize("op", OPS)
def test_forward_mode_is_refused(op):
    """PyTorch would let go of tangents without a word; the definition has them."""
    call, function = make(op, T=5), OPS[op][0]
    q = call.pop("q").detach()

    def run(q):
        return function(q, **call)[0]

    for transform in (run, vmap(run)):
        with pytest.raises(NotImplementedError, match=r"use_backend\('reference'\)"):
            jvp(transform, *[(q if transform is run else torch.stack([q, q]),)] * 2)
    assert jvp(lambda x: x.sum() * run(q), (q,), (q,))[1].isfinite().all()  # no tangent comes in
    with use_backend("reference"):
        torch.testing.assert_close(jvp(run, (q,), (q,))[1], run(q))  # linear in q


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_are_refused(op):
    """With the way out, in place of PyTorch's advice to register a formula; the definition has them."""
    call, function = make(op, T=5), OPS[op][0]
    q = call.pop("q")

    def gradient(q):
        (result,) = torch.autograd.grad(function(q, **call)[0].sin().sum(), q, create_graph=True)
        return result.square().sum()

    with pytest.raises(NotImplementedError, match=r"no second derivative.*use_backend\('reference'\)"):
        torch.autograd.grad(gradient(q), q)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*use_backend\('reference'\)"):
        grad(lambda q: grad(lambda q: function(q, **call)[0].sin().sum())(q).square().sum())(q.detach())
    with pytest.raises(NotImplementedError, match=r"use_backend\('reference'\)"):
        jvp(grad(lambda q: function(q, **call)[0].sin().sum()), (q.detach(),), (q.detach(),))
    with use_backend("reference"):
        assert torch.autograd.gradcheck(lambda q: torch.autograd.grad(gradient(q), q, create_graph=True)[0].sum(), q)


# Multiply-adds of a token and head in whole chunks of C = 64, in units of [C K, C V, K V], forward and with backward.
COUNTS = {"lightning": ([1, 1, 2], [4, 3, 7]), "gated": ([0.5, 1, 2], [2, 3, 7])}


@pytest.mark.parametrize("op", OPS)
def test_flops_are_counted_on_the_meta_device(op):
    B, T, H, K, V = 2, 8192, 3, 16, 32
    call, function = make(op, B=B, T=T, H=H, K=K, V=V, dtype=torch.float32, device="meta"), OPS[op][0]
    terms = torch.tensor([64 * K, 64 * V, K * V], dtype=torch.float64)
    for backward, units in enumerate(COUNTS[op]):
        with FlopCounterMode(display=False) as counter:
            o, _ = function(**call)
            if backward:
                o.sum().backward()
        assert counter.get_total_flops() == 2 * B * T * H * (terms @ torch.tensor(units, dtype=torch.float64))
    short = make(op, B=B, T=10, H=H, K=K, V=V, dtype=torch.float32, device="meta")
    with FlopCounterMode(display=False) as counter:
        function(**short)
    terms[:2] *= 10 / 64
    assert counter.get_total_flops() == 2 * B * 10 * H * (terms @ torch.tensor(COUNTS[op][0], dtype=torch.float64))


@pytest.mark.parametrize("op", OPS)
def test_autocast_leaves_the_arithmetic_alone(op):
    call, function = make(op, dtype=torch.float32), OPS[op][0]
    expected = function(**call)[0]
    with torch.autocast("cpu", torch.bfloat16):
        actual = function(**call)[0]
        grads = torch.autograd.grad(actual.sum(), leaves(call))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for a, e in zip(grads, torch.autograd.grad(expected.sum(), leaves(call)), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@pytest.mark.parametrize("op", OPS)
def test_a_whole_scale_reaches_the_op_as_a_float(op, monkeypatch):
    """Triton makes a constant of an integer 1, and a planned launch would keep it for every other scale."""
    call, found = make(op) | {"scale": 1}, []
    registered = {"lightning": lightning, "gated": gated}[op]
    spied = registered._replace(call=lambda *arguments: found.extend(arguments) or (None, None))
    monkeypatch.setattr(sys.modules[f"linnet.ops.{op}"], op, spied)
    OPS[op][0](**call)
    assert [x for x in found if not isinstance(x, torch.Tensor | None | bool)] == [1.0]
    assert not any(type(x) is int for x in found)


def test_eager_calls_of_a_step_say_what_they_changed():
    @torch.library.custom_op("linnet_test::advance", mutates_args=("state",))
    def advance(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.detach().numpy()[:] += 1  # behind PyTorch's back, as a kernel does
        return x.clone()

    state = torch.zeros(2)
    kept = torch.ones(2, requires_grad=True)
    product = kept * state
    make_fast_path(advance)(torch.ones(2), state)
    assert state.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="inplace"):
        product.sum().backward()
    with torch.inference_mode():
        make_fast_path(advance)(torch.ones(2), torch.zeros(2))


def test_eager_calls_skip_the_dispatcher_until_somebody_looks_on():
    """Gradients, recomputation and FLOPs are the same with and without the fast path."""
    call = make("lightning", dtype=torch.float32)
    expected = torch.autograd.grad(loss(lightning.forward(*call.values())), leaves(call))

    def nodes(o):
        return type(o.grad_fn).__name__

    o, final = lightning_attention(**call, output_final_state=True)
    assert "FastPath" in nodes(o)
    with FlopCounterMode(display=False) as counter:  # it looks at the backward alone
        direct = torch.autograd.grad(loss((o, final)), leaves(call))
    assert counter.get_total_flops() > 0
    again = checkpoint(lambda: lightning_attention(**call, output_final_state=True), use_reentrant=False)
    for a, b, e in zip(direct, torch.autograd.grad(loss(again), leaves(call)), expected, strict=True):
        assert torch.equal(a, e) and torch.equal(b, e)
    with FlopCounterMode(display=False):
        assert "FastPath" not in nodes(lightning_attention(**call)[0])
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        assert "FastPath" not in nodes(lightning_attention(**fake)[0])
