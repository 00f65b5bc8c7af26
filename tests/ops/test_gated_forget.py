"""Attention with a forget gate: its definition against gated attention of the gate's own log-decays and keys."""

import pytest
import torch
from precision import assert_near
from registered import check_op
from torch.func import vmap

from linnet.ops import forget_gate, forget_gated_attention, gated_linear_attention, use_backend
from linnet.ops.gated.forget import forget_gated

VARIANTS = ["plain", "bound", "state", "documents"]


def make(variant="bound", *, B=2, T=70, H=3, K=4, V=5, dtype=torch.float64, strength=1.0, seed=0):
    """Keyword arguments of the public function, in the order of the registered op."""
    generator = torch.Generator().manual_seed(seed)
    B = 1 if variant == "documents" else B

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    call = dict(q=normal(B, T, H, K), x=normal(B, T, H, K), v=normal(B, T, H, V))
    call["x"] = (strength * call["x"]).detach().requires_grad_()
    call["lower_bound"] = None if variant == "plain" else normal(H, K).detach().sigmoid().requires_grad_()
    call["initial_state"] = normal(3 if variant == "documents" else B, H, K, V) if variant != "plain" else None
    call["cu_seqlens"] = torch.tensor([0, 20, 20, T], dtype=torch.int32) if variant == "documents" else None
    return call | {"scale": 0.5}


def composed(q, x, v, lower_bound, **options):
    log_decay, k = forget_gate(x, lower_bound)
    return gated_linear_attention(q, k.to(q.dtype), v, log_decay, **options)


def leaves(call):
    return [x for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad]


def loss(results):
    return sum((x.double().sin() * (i + 1)).sum() for i, x in enumerate(results))


def everything(function, call):
    results = function(**call, output_final_state=True)
    return [*results, *torch.autograd.grad(loss(results), leaves(call))]


@pytest.mark.parametrize("strength", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", ["auto", "reference"])
def test_is_its_composition(form, variant, strength):
    call = make(variant, strength=strength)
    with use_backend(form):
        actual = everything(forget_gated_attention, call)
        expected = everything(composed, call)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_has_the_same_results(dtype):
    call = {
        name: x if name in ("lower_bound", "initial_state", "scale", "cu_seqlens") else x.detach().to(dtype)
        for name, x in make(dtype=torch.float32).items()
    }
    for a, e in zip(*(f(**call, output_final_state=True) for f in (forget_gated_attention, composed)), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck(variant):
    for return_final_state in (True, False):
        symbolic = return_final_state == (variant in (VARIANTS[0], VARIANTS[-1]))
        check_op(forget_gated.forward, (*make(variant, T=30).values(), return_final_state), symbolic)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_in_one_graph(variant):
    call = make(variant)
    compiled = torch.compile(forget_gated_attention, fullgraph=True, backend="aot_eager")
    assert_near(everything(compiled, call), everything(forget_gated_attention, call))


@pytest.mark.parametrize("shared", ["x", "lower_bound"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_vmap_is_a_loop(variant, shared):
    """Values and gradients of three models at once, all arguments batched but one; and vmap of the backward."""
    calls = [make(variant, T=20, seed=seed) for seed in range(3)]
    same = {name: x for name, x in calls[0].items() if x is None or name in (shared, "cu_seqlens", "scale")}
    differ = [name for name in calls[0] if name not in same]

    def run(*tensors):
        return forget_gated_attention(**same, **dict(zip(differ, tensors, strict=True)), output_final_state=True)

    batched = vmap(run, in_dims=-1)(*(torch.stack([call[name] for call in calls], -1) for name in differ))
    looped = [torch.stack(x) for x in zip(*(run(*(call[name] for name in differ)) for call in calls), strict=True)]
    learned = [x for call in calls for x in leaves(call | same)]
    grads = [torch.autograd.grad(loss(x), learned, allow_unused=True) for x in (batched, looped)]
    weights = [torch.randn(3, *x.shape, dtype=torch.float64) for x in run(*(calls[0][name] for name in differ))]
    own = leaves(calls[0])
    results = forget_gated_attention(**calls[0], output_final_state=True)
    many = torch.autograd.grad(results, own, weights, is_grads_batched=True, retain_graph=True)
    each = zip(
        *(torch.autograd.grad(results, own, [w[i] for w in weights], retain_graph=True) for i in range(3)), strict=True
    )
    for actual, expected in ((batched, looped), grads, (many, [torch.stack(x) for x in each])):
        for a, e in zip(actual, expected, strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bound", [torch.zeros(3), torch.zeros(3, 4, dtype=torch.int64)])
def test_refuses_a_wrong_bound(bound):
    with pytest.raises(ValueError, match=r"lower_bound.* \[3, 4\]"):
        forget_gated_attention(**make() | {"lower_bound": bound})
