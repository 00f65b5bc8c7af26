"""The op of the examples against its recurrence: values, gradients, documents, vmap, compilation, FLOPs, the mixer."""

import sys
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

from linnet.layers import LayerContext, load_plugin
from linnet.layers.base import find_mixer
from linnet.layers.check import check_mixer
from linnet.ops.documents import over_documents

ROOT = Path(__file__).parents[2]
SPEC = f"{ROOT / 'examples' / 'my_op.py'}:DeltaMixer"
example = sys.modules[find_mixer(load_plugin(SPEC)).__module__]


def make(B=2, T=70, H=2, K=4, V=3, states=None, dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D, dtype=dtype) for D in (K, K, V))
    beta, state = torch.rand(B, T, H, dtype=dtype), torch.randn(states or B, H, K, V, dtype=dtype)
    return [x.requires_grad_() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, beta, state)]


def recurrence(q, k, v, beta, state, scale=0.5):
    """The first two equations of the file, token by token."""
    outputs = []
    for t in range(q.shape[1]):
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def by_document(arguments, cu_seqlens):
    *tensors, state = arguments
    spans = list(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False))
    calls = [
        recurrence(*(x[:, a:b] for x in tensors), state[i : i + 1]) if b > a else (tensors[2][:, :0], state[i : i + 1])
        for i, (a, b) in enumerate(spans)
    ]
    return torch.cat([o for o, _ in calls], 1), torch.cat([state for _, state in calls])


def same(call, reference, arguments):
    found, expected = call(*arguments), reference(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    of_found, of_expected = (
        torch.autograd.grad(sum((y.sin() * (i + 1)).sum() for i, y in enumerate(ys)), arguments)
        for ys in (found, expected)
    )
    torch.testing.assert_close(of_found, of_expected, rtol=1e-8, atol=1e-9)


def run(q, k, v, beta, state, cu_seqlens=None):
    settings = {"scale": 0.5, "initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
    return example.delta_rule(q, k, v, beta, **settings)


@pytest.mark.parametrize("length", [1, 31, 32, 70])
def test_values_and_gradients_are_those_of_the_recurrence(length):
    same(run, recurrence, make(T=length))


@pytest.mark.parametrize("boundaries", [[0, 70], [0, 1, 1, 40, 69, 70], [0, 0, 33, 66, 70, 70], [0, 5, 10, 15, 70]])
def test_packed_documents_are_those_of_calls_of_their_own(boundaries):
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    arguments = make(B=1, states=len(boundaries) - 1)
    same(lambda *a: run(*a, cu_seqlens), lambda *a: by_document(a, cu_seqlens), arguments)


def test_documents_of_similar_length_share_a_call_and_padding_is_bounded():
    cu_seqlens = torch.tensor([0, 1, 1, 9, 16, 80, 200, 1224], dtype=torch.int32)
    sizes = []

    def form(tensors, states):
        sizes.append(tuple(tensors[0].shape))
        return [tensors[0] * 2], [states[0] + tensors[0].sum(1)]

    x = torch.arange(1224.0)[None, :, None].requires_grad_()
    (y,), (sums,) = over_documents(form, [x], [torch.zeros(7, 1)], cu_seqlens)
    assert sorted(sizes) == [(1, 64, 1), (1, 120, 1), (1, 1024, 1), (2, 1, 1), (2, 8, 1)]
    torch.testing.assert_close(y, 2 * x)
    spans = zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)
    torch.testing.assert_close(sums[:, 0], torch.stack([x[0, a:b].sum() for a, b in spans]))
    torch.testing.assert_close(torch.autograd.grad(y.sum() + sums.sum(), x)[0], torch.full_like(x, 3.0))
    with pytest.raises(ValueError, match="cu_seqlens"):
        over_documents(form, [x], [None], torch.tensor([0, 9], dtype=torch.int32))


@pytest.mark.parametrize("packed", [False, True])
def test_the_op_is_whole_for_pytorch(packed):
    cu_seqlens = torch.tensor([0, 20, 20, 30], dtype=torch.int32) if packed else None
    *tensors, state = make(B=1 if packed else 2, T=30, states=3 if packed else 2)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += [] if packed else ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(example.OP.forward, (*tensors, state, cu_seqlens, 0.5, True), test_utils=checks)


def test_vmap_over_models_is_a_loop_over_them():
    mixer_class = find_mixer("my_delta")
    mixers = [mixer_class(mixer_class.Config(num_heads=2), LayerContext(d_model=8)).double() for _ in range(3)]
    names = [name for name, _ in mixers[0].named_parameters()]
    x = torch.randn(1, 40, 8, dtype=torch.float64)
    for cu_seqlens in (None, torch.tensor([0, 7, 40], dtype=torch.int32)):
        stacked = {
            name: torch.stack([m.get_parameter(name).detach() for m in mixers]).requires_grad_() for name in names
        }
        options = {"cu_seqlens": cu_seqlens}
        found = vmap(lambda weights, options=options: functional_call(mixers[0], weights, (x,), options)[0])(stacked)
        expected = torch.stack([mixer(x, **options)[0] for mixer in mixers])
        torch.testing.assert_close(found, expected)
        of_found = torch.autograd.grad(found.square().sum(), list(stacked.values()))
        of_expected = torch.autograd.grad(
            expected.square().sum(), [m.get_parameter(name) for name in names for m in mixers]
        )
        for n, one in enumerate(of_found):
            torch.testing.assert_close(one, torch.stack(of_expected[3 * n : 3 * n + 3]))


def test_flops_are_those_of_its_formulas():
    with torch.device("meta"):
        q, v = torch.randn(2, 64, 3, 8, requires_grad=True), torch.randn(2, 64, 3, 16)
        beta = torch.rand(2, 64, 3)
    with FlopCounterMode(display=False) as counter:
        o, _ = example.delta_rule(q, q, v, beta)
        o.sum().backward()
    forward = 2 * 64 * 3 * (32 * (3 * 8 + 2 * 16) + 6 * 8 * 16)
    assert counter.get_total_flops() == forward + 2 * 64 * 3 * (32 * (9 * 8 + 5 * 16) + 16 * 8 * 16)


def test_the_mixer_of_it_passes_its_checks():
    check_mixer(SPEC, {"num_heads": 2}, 16)
