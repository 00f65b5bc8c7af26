"""Projection and cross-entropy in blocks against the plain way: values, gradients, and what else calls it."""

import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, widen
from torch.utils.flop_counter import FlopCounterMode

from linnet.models import causal_lm
from linnet.models.causal_lm import build_model
from linnet.models.recipes.registry import family
from linnet.ops import cross_entropy, debug, use_backend
from linnet.ops.cross_entropy import chunked, cross_entropy_reference, linear_cross_entropy

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    set_small_blocks(monkeypatch.setattr)


def set_small_blocks(setattr=setattr):
    setattr(cross_entropy, "FEW_LOGITS", 0)
    setattr(chunked, "BLOCK_LOGITS", 20 * 37)


def make(vocab=37, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, 16, generator=generator, dtype=torch.float64) for shape in ((3, 31), (vocab,)))
    weight = weight / 4  # for logits of unit variance: what bfloat16 does to larger ones is in their exponentials
    targets = torch.randint(0, vocab, (3, 31), generator=generator)
    targets[0, :20] = targets[2, -1] = -100
    return x.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), targets.to(device)


def plain(x, weight, targets):
    return cross_entropy_reference(x @ weight.T, targets, -100)


def everything(function, x, weight, targets):
    total = function(x, weight, targets)
    return [total, *torch.autograd.grad(0.3 * total, (x, weight))]


def assert_agrees(dtype, device="cpu", vocab=37, function=linear_cross_entropy):
    *operands, targets = make(vocab, dtype, device)
    found = everything(function, *operands, targets)
    exact = [x.detach().requires_grad_() for x in widen(operands)]
    assert_near(found, everything(plain, *exact, targets), TOLERANCE[dtype])
    assert [x.dtype for x in found] == [torch.promote_types(dtype, torch.float32), dtype, dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [37, 5003])
def test_blocks_give_the_plain_loss_and_gradients(dtype, vocab, device):
    for form in ("chunked", "auto"):
        with use_backend(form):
            assert_agrees(dtype, device, vocab)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    with torch.autocast(device, torch.bfloat16):
        found = everything(linear_cross_entropy, *make(dtype=torch.float32, device=device))
    assert_near(found, everything(plain, *make(device=device)), TOLERANCE[torch.bfloat16])
    assert all(x.dtype == torch.float32 for x in found)


@pytest.mark.parametrize("device", DEVICES)
def test_targets_that_do_not_count(device):
    x, weight, _ = make(device=device, dtype=torch.float32)
    total, dx, dweight = everything(linear_cross_entropy, x, weight, torch.full((3, 31), -100, device=device))
    assert total == 0 and not dx.any() and not dweight.any()


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_in_one_graph(device):
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    assert_agrees(torch.float32, device, function=compiled)
    x, weight, targets = make(device=device)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight, targets), plain(x, weight, targets))


def test_vmap_gives_every_model_its_gradient():
    x, weight, targets = make()
    weights = torch.stack([weight.detach(), 2 * weight.detach()]).requires_grad_()

    def all_at_once(weights):
        return torch.vmap(lambda w: linear_cross_entropy(x, w, targets))(weights)

    for function in (all_at_once, torch.compile(all_at_once, fullgraph=True, backend="aot_eager")):
        (found,) = torch.autograd.grad(function(weights).sum(), weights)
        for i in range(2):
            expected = torch.autograd.grad(plain(x, weights[i], targets), weights)[0][i]
            torch.testing.assert_close(found[i], expected)


@pytest.mark.parametrize("training", [True, False])
def test_flops_are_those_of_the_plain_way(training):
    counts = []
    for function in (plain, linear_cross_entropy):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            total = function(*make())
            if training:
                total.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == (3 if training else 1) * 2 * 93 * 37 * 16


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_costs_no_gradient(frozen):
    arguments = make()
    expected = torch.autograd.grad(plain(*arguments), arguments[1 - frozen])
    arguments[frozen].requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        found = torch.autograd.grad(linear_cross_entropy(*arguments), arguments[1 - frozen])
    torch.testing.assert_close(found, expected)
    assert counter.get_total_flops() == 2 * 2 * 93 * 37 * 16


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_s_loss_is_the_plain_one_of_its_logits(tied, monkeypatch):
    config = family("llama")(32, 1, vocab_size=37).model_copy(update={"tie_embeddings": tied})
    model, tokens = build_model(config).double(), torch.randint(0, 37, (2, 40))
    found, count = model.loss(tokens, tokens)
    found.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(causal_lm, "is_whole", lambda weight: False)
    expected, _ = model.loss(tokens, tokens)
    expected.backward()
    torch.testing.assert_close(found, expected)
    assert count == 80
    for a, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_shapes_that_do_not_go_together():
    x, weight, targets = make()
    with pytest.raises(ValueError, match=r"\[\.\.\., D\]"):
        linear_cross_entropy(x, weight.T, targets)


def test_targets_of_a_wrong_kind():
    x, weight, targets = make()
    with pytest.raises(ValueError, match=r"torch.int32.*int64"):
        linear_cross_entropy(x, weight, targets.int())
    with pytest.raises(ValueError, match="targets.* meta.* x .*cpu"):
        linear_cross_entropy(x, weight, targets.to("meta"))
    targets[1, 0] = 37
    with debug(), pytest.raises(ValueError, match="targets.* 37.* 36.* -100"):
        linear_cross_entropy(x, weight, targets)


@pytest.mark.parametrize("few", [0, 2**25])
def test_one_token(few, monkeypatch):
    monkeypatch.setattr(cross_entropy, "FEW_LOGITS", few)
    x, weight, targets = make()
    found = linear_cross_entropy(x[1, 2], weight, targets[1, 2])
    torch.testing.assert_close(found, -(weight @ x[1, 2]).log_softmax(0)[targets[1, 2]])


def check_impossible_tokens(device):
    """Logits of -inf, also where a lane of the kernel has no other."""
    from linnet.ops.cross_entropy.triton import softmax_in_place

    logits, targets = torch.randn(3, 37), torch.tensor([1, -100, 36])
    logits[:, ::2], logits[2, 36] = -float("inf"), 0.0
    expected = chunked.softmax_in_place(logits.double(), targets, -100, True)
    found = softmax_in_place(logits.to(device), targets.to(device), -100, True)
    assert_near([x.cpu() for x in found], expected)


def check_parts_of_a_vocabulary(device):
    """The two kernels of a split vocabulary: targets of other ranks, ignored rows, a part without a finite logit."""
    from linnet.ops.cross_entropy.triton import log_sums, share_in_place

    for vocab in (37, 5003):
        logits, index = torch.randn(4, vocab + 5), torch.tensor([1, -1, vocab - 1, -1])
        logits[:, :vocab:2], log_sum = -float("inf"), torch.tensor([3.0, 4.0, 5.0, float("inf")])
        exact = logits.double()
        expected = [
            *chunked.log_sums(exact, index, vocab),
            chunked.share_in_place(exact.clone(), index, log_sum, vocab),
        ]
        there = logits.to(device), index.to(device)
        found = [*log_sums(*there, vocab), share_in_place(*there, log_sum.to(device), vocab)]
        assert_near([x.cpu() for x in found], expected)
        assert torch.equal(expected[2][:, vocab:], exact[:, vocab:])
    nothing = torch.full((1, 37), -float("inf"))
    assert log_sums(nothing.to(device), torch.tensor([-1], device=device), 37)[0].item() < -1e29


@gpu
def test_impossible_tokens():
    check_impossible_tokens("cuda")
    check_parts_of_a_vocabulary("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel itself is tested")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted(interpreted):
    assert interpreted(__file__) == 4


if __name__ == "__main__":
    set_small_blocks()
    with use_backend("triton"):
        for vocab in (37, 5003):
            assert_agrees(torch.float32, vocab=vocab)
            print(vocab, "agrees")
    check_impossible_tokens("cpu")
    print("-inf agrees")
    check_parts_of_a_vocabulary("cpu")
    print("a part of a vocabulary agrees")
