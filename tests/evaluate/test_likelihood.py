"""Log-likelihoods of continuations: shared contexts give what whole rows give."""

import numpy as np
import pytest
import torch

from linnet.evaluate import likelihood
from linnet.evaluate.likelihood import log_likelihoods
from linnet.models import build_model, family

FAMILIES = ["tnl", "hgrn2", "lightnet", "cosformer2", "hgrn", "gla", "llama"]


def by_hand(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    row = torch.tensor([context + continuation])
    with torch.no_grad():
        logs = model(row[:, :-1])[0][0, len(context) - 1 :].log_softmax(-1)
    targets = row[0, len(context) :]
    return logs.gather(-1, targets[:, None]).sum().item(), bool((logs.argmax(-1) == targets).all())


def requests() -> list[tuple[list[int], list[int]]]:
    generator = np.random.default_rng(0)

    def draw(n: int) -> list[int]:
        return generator.integers(0, 61, n).tolist()

    shared, other, short = draw(40), draw(40), draw(1)
    mixed = [(shared, draw(n)) for n in (1, 5, 3)] + [(draw(n), draw(4)) for n in (7, 90, 1)]
    return mixed + [(other, draw(2)), (short, draw(3)), (other, draw(7)), (short, draw(1)), (shared, draw(1))]


@pytest.mark.parametrize("tokens", [50, 2**15])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_is_what_its_whole_row_gives(name, tokens, monkeypatch):
    monkeypatch.setattr(likelihood, "_CPU", likelihood._Cost(8, tokens, 3))
    monkeypatch.setattr(likelihood, "LOGITS", 3 * 61)
    model = build_model(family(name)(32, 2, vocab_size=61)).double().eval()
    for found, (context, continuation) in zip(log_likelihoods(model, requests()), requests(), strict=True):
        nats, greedy = by_hand(model, context, continuation)
        assert found.nats == pytest.approx(nats, rel=1e-9) and found.greedy == greedy


@pytest.mark.parametrize("states", [2, 64])
@pytest.mark.parametrize("name", ["tnl", "llama", "mamba"])
def test_requests_that_part_at_different_places(name, states, monkeypatch):
    monkeypatch.setattr(likelihood, "_CPU", likelihood._Cost(8, 2**11, states))
    generator = np.random.default_rng(1)

    def draw(n: int) -> list[int]:
        return generator.integers(0, 61, n).tolist()

    examples, asked = draw(30), []
    for question in (draw(25), draw(40), draw(19)):
        start, answer = examples + question, draw(24)
        asked += [
            (start, answer),
            (start, answer[:20] + draw(5)),
            (start, draw(9)),
            (start, answer),
            (start, answer[:3]),
        ]
        asked.append((start + answer[:2], answer[2:]))  # the same tokens, of which fewer are scored
    asked += [(draw(4), draw(3)), (examples[:20], examples[20:] + draw(2))]
    model, read = build_model(family(name)(32, 2, vocab_size=61)).double().eval(), []
    model.backbone.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].shape[:2].numel()))
    for found, (context, continuation) in zip(log_likelihoods(model, asked), asked, strict=True):
        nats, greedy = by_hand(model, context, continuation)
        assert found.nats == pytest.approx(nats, rel=1e-9) and found.greedy == greedy
    whole = sum(len(context) + len(continuation) - 1 for context, continuation in asked)
    assert sum(read) - whole < 0.5 * whole  # `by_hand` reads whole rows


def test_the_likeliest_tokens_are_greedy():
    model = build_model(family("tnl")(32, 2, vocab_size=61)).eval()
    row = [3]
    for _ in range(5):
        row.append(model(torch.tensor([row]))[0][0, -1].argmax().item())
    other = [row[1], (row[2] + 1) % 61]
    assert [one.greedy for one in log_likelihoods(model, [([3], row[1:]), ([3], other)])] == [True, False]


def test_a_shared_context_is_read_once():
    model, read = build_model(family("hgrn2")(32, 2, vocab_size=61)), []
    model.backbone.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].shape[:2].numel()))
    log_likelihoods(model, [([1] * 100, [i]) for i in range(5)])
    assert sum(read) == 99 + 5


def test_nothing_to_score():
    model = build_model(family("tnl")(32, 2, vocab_size=61))
    with pytest.raises(ValueError, match="request 1: 0 "):
        log_likelihoods(model, [([1], [2]), ([], [2])])
    with pytest.raises(ValueError, match="request 0: 1 .* 0 "):
        log_likelihoods(model, [([1], [])])
