"""Settings of a request, and that tokens are drawn as they say."""

import math
import re

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.inference import Sampling
from linnet.inference.sampling import Knobs, choose, choose_greedy, uniform


def draws(logits: list[float], count: int = 20_000, seed: int = 5, **settings) -> torch.Tensor:
    """Shares of the tokens drawn from one row of logits, by `count` slots with seeds of their own."""
    row, sampling = torch.tensor(logits), Sampling(**settings)
    knobs = Knobs.empty(1, len(logits), torch.device("cpu"))
    knobs.set(0, sampling, 0, torch.zeros(len(logits), dtype=torch.bool))
    many = Knobs(*(x.repeat(count, *[1] * (x.ndim - 1)) for x in knobs))
    many.seed.copy_(torch.arange(count) + seed * count)
    tokens = choose(row.expand(count, -1), many, False).tokens
    return torch.bincount(tokens, minlength=len(logits)).double() / count


def shares(logits: list[float]) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float64).softmax(0)


LOGITS = [0.3, 2.0, -1.0, 1.1, 0.0, 1.9]
TOLERANCE = 4 * math.sqrt(0.25 / 20_000)  # four standard deviations of a share


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_with_their_probability(temperature):
    expected = shares([x / temperature for x in LOGITS])
    assert (draws(LOGITS, temperature=temperature) - expected).abs().max() < TOLERANCE


def test_top_k_top_p_and_min_p_keep_the_likeliest():
    everything = shares(LOGITS)
    for settings, kept in [
        ({"top_k": 2}, [1, 5]),
        ({"top_k": 100}, range(6)),
        ({"top_p": 0.37}, [1]),  # the likeliest have 0.373, 0.338 and 0.152
        ({"top_p": 0.38}, [1, 5]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.35}, [1, 3, 5]),
        ({"top_k": 3, "top_p": 0.85}, [1, 3, 5]),  # of what top_k left, the first two have 0.824
        ({"top_k": 3, "top_p": 0.80}, [1, 5]),
    ]:
        expected = torch.zeros(6, dtype=torch.float64)
        expected[list(kept)] = everything[list(kept)]
        found = draws(LOGITS, temperature=1.0, **settings)
        assert (found - expected / expected.sum()).abs().max() < TOLERANCE, settings
        assert set(found.nonzero().flatten().tolist()) == set(kept), settings


def test_tiny_temperatures_are_greedy_and_huge_ones_even():
    assert draws([3.0, 3.1, -5.0], temperature=1e-30).tolist() == [0, 1, 0]
    assert (draws([3.0, 3.1, -5.0], temperature=1e4) - 1 / 3).abs().max() < TOLERANCE
    assert draws([3.0, -math.inf, 3.0], temperature=1.0)[1] == 0
    assert draws([-math.inf, 0.0], temperature=1e4)[0] == 0


def test_repetition_penalty_moves_seen_tokens_down():
    knobs = Knobs.empty(3, 3, torch.device("cpu"))
    for slot, seen in enumerate(([0, 0, 0], [0, 1, 0], [1, 1, 0])):
        knobs.set(slot, Sampling(repetition_penalty=2.0), 0, torch.tensor(seen, dtype=torch.bool))
    logits = torch.tensor([[1.5, 2.0, -1.0]]).expand(3, 3)
    assert choose(logits, knobs, False).tokens.tolist() == [1, 0, 1]
    assert knobs.seen.tolist() == [[False, True, False], [True, True, False], [True, True, False]]
    negative = torch.tensor([[-1.5, -2.0, -1.0]]).expand(3, 3)
    assert choose(negative, knobs, False).tokens.tolist() == [2, 2, 2]


def test_logprobs_are_those_of_the_model():
    knobs = Knobs.empty(2, 6, torch.device("cpu"))
    knobs.set(0, Sampling(temperature=2.0, top_k=1, repetition_penalty=3.0), 0, torch.ones(6, dtype=torch.bool))
    knobs.set(1, Sampling(), 0, torch.zeros(6, dtype=torch.bool))
    chosen = choose(torch.tensor([LOGITS, LOGITS]), knobs, True)
    expected = shares(LOGITS).log().float()
    torch.testing.assert_close(chosen.logprobs, expected[chosen.tokens])
    order = expected.argsort(descending=True)
    torch.testing.assert_close(chosen.top_tokens, order.expand(2, 6))
    torch.testing.assert_close(chosen.top_logprobs, expected[order].expand(2, 6))


def test_greedy_rows_are_the_likeliest_beside_others():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    knobs = Knobs.empty(4, 50, torch.device("cpu"))
    for slot in range(4):
        knobs.set(slot, Sampling(temperature=slot % 2), slot, torch.zeros(50, dtype=torch.bool))
    tokens = choose(logits, knobs, False).tokens
    assert tokens[::2].equal(choose_greedy(logits).tokens[::2])


def test_random_numbers_are_even_and_unlike():
    seeds, counts = torch.arange(300)[:, None], torch.arange(300)[None]
    u = uniform(seeds.expand(300, 300), counts.expand(300, 300))
    assert u.min() >= 0 and u.max() < 1 and u.unique().numel() == u.numel()
    share = torch.histc(u, 20, 0, 1) / u.numel()
    assert (share - 0.05).abs().max() < 4 * math.sqrt(0.05 / u.numel())
    for lag in ((0, 1), (1, 0), (1, 1)):
        one, other = u[: 300 - lag[0], : 300 - lag[1]], u[lag[0] :, lag[1] :]
        assert torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].abs() < 0.015
    assert uniform(torch.tensor([2**63 - 1]), torch.tensor([2**40])).item() < 1


def test_bad_settings_are_named_all_at_once():
    values = {
        "max_tokens": -3,
        "temperature": math.nan,
        "top_k": -1,
        "top_p": 0.0,
        "min_p": 1.0,
        "repetition_penalty": 0,
        "stop": [""],
        "seed": -1,
        "logprobs": 21,
        "tempratur": 1.0,
    }
    with pytest.raises(ConfigError) as error:
        parse(Sampling, values, "request")
    assert len(error.value.problems) == len(values)
    for key, problem in zip(sorted(values), sorted(error.value.problems), strict=True):
        assert problem.startswith(key), problem
    assert "'temperature'" in str(error.value) and "nan" in str(error.value)
    for key, value in {"temperature": 1e300, "top_k": 10**30, "repetition_penalty": 1e-300, "seed": 1 << 63}.items():
        with pytest.raises(ConfigError, match=f"{key}: .*{re.escape(str(value))}"):
            parse(Sampling, {key: value}, "request")
    with pytest.raises(ConfigError, match="temperature: .*finite.*inf"):
        parse(Sampling, {"temperature": math.inf}, "request")
