"""Claims are parsed, and decided by intervals over seeds."""

import numpy as np
import pytest

from linnet.papers.claims import FAILS, HOLDS, NOT_RUN, UNDECIDED, Measured, judge, parse_claim
from linnet.papers.item import Published


def table(**rows):
    return {
        (row, "loss"): one if isinstance(one, Measured) else Measured(dict(enumerate(one))) for row, one in rows.items()
    }


def verdict(claim, found, expected=None, rows=()):
    printed = expected or {}
    return judge(
        parse_claim(claim), found, lambda r, c: printed.get(r), lambda r, c: (NOT_RUN, f"{r} missing"), rows
    ).verdict


CLEAR = table(a=(1.0, 1.1, 1.05), b=(2.0, 2.1, 2.06), c=(3.0, 3.2, 3.1))


@pytest.mark.parametrize(
    "claim, expected",
    [
        ("a < b < c on loss", HOLDS),
        ("c > b > a on loss", HOLDS),
        ("b < a on loss", FAILS),
        ("a < c < b on loss", FAILS),
        ("a <= b on loss", HOLDS),
        ("a < 0.5 on loss", FAILS),
        ("0.5 < a on loss", HOLDS),
        ("a < d on loss", NOT_RUN),
        ("a within 200 % of b on loss", HOLDS),
        ("a within 0.5 of b on loss", FAILS),
        ({"text": "words", "check": "a < b on loss"}, HOLDS),
        ({"text": "words", "untested": "no reason"}, NOT_RUN),
    ],
)
def test_verdicts(claim, expected):
    assert verdict(claim, CLEAR) == expected


def test_noise_and_one_seed_decide_nothing():
    noisy = table(a=(1.0, 2.0, 1.5), b=(1.6, 1.4, 1.6))
    assert verdict("a < b on loss", noisy) == UNDECIDED
    assert verdict("a < b on loss", table(a=(1.0,), b=(2.0,))) == UNDECIDED
    apart = {("a", "loss"): Measured({0: 1.0, 1: 1.1}), ("b", "loss"): Measured({2: 2.0, 3: 2.1})}
    assert verdict("a < b on loss", apart) == UNDECIDED  # no seed in common


def test_a_claim_of_several_comparisons_of_equal_rows_seldom_fails():
    """If each comparison had 5 %, one of eight would be the opposite in 17 % of tables."""
    generator, columns = np.random.default_rng(0), [f"c{number}" for number in range(8)]
    claim, verdicts = f"a < b on {', '.join(columns)}", []
    for _ in range(400):
        cells = {(row, c): Measured(dict(enumerate(generator.normal(size=3)))) for row in "ab" for c in columns}
        verdicts.append(verdict(claim, cells))
    assert verdicts.count(HOLDS) == 0 and verdicts.count(FAILS) <= 20
    levels = {"a": Measured({0: 1.0, 1: 1.01, 2: 1.04}), "b": Measured({0: 0.0, 1: 0.0, 2: 0.0})}
    worse = {(row, column): levels[row] for row, column in cells}
    assert verdict(claim, worse) == FAILS


@pytest.mark.parametrize("check", ["every row within 0.01 % on loss", "r0 within 0.01 % of r1 on {}"])
def test_a_claim_of_several_margins_seldom_fails_by_chance(check):
    """If each comparison had 5 %, one of twelve would lie outside a small margin in a fourth of tables."""
    generator, rows, columns = np.random.default_rng(0), [f"r{number}" for number in range(12)], ["loss"]
    if "{}" in check:
        rows, columns = ["r0", "r1"], [f"c{number}" for number in range(12)]
    claim, failed = parse_claim(check.format(", ".join(columns))), 0
    for _ in range(200):
        cells = {(r, c): Measured(dict(enumerate(generator.normal(5, 1, size=3)))) for r in rows for c in columns}
        failed += judge(claim, cells, lambda row, column: 5.0, None, tuple(rows)).verdict == FAILS
    assert failed <= 18


def test_a_fit_without_an_interval_decides_nothing():
    fits = table(a=Measured({None: 0.5}, unsure=True), b=Measured({None: 0.7}, (0.65, 0.75)))
    assert verdict("a < b on loss", fits) == UNDECIDED
    assert verdict("a within 1 % on loss", fits, {"a": 0.5}) == UNDECIDED


def test_equal_values_of_every_seed_decide_no_order():
    floor = table(a=(0.0, 0.0), b=(0.0, 0.0))
    assert verdict("a < b on loss", floor) == verdict("a <= b on loss", floor) == UNDECIDED


def test_one_difference_in_every_seed_gives_no_interval():
    coarse = table(a=(0.1, 0.3), b=(0.2, 0.4))
    assert verdict("a < b on loss", coarse) == verdict("b < a on loss", coarse) == UNDECIDED
    assert verdict("a < b on loss", table(a=(0.1, 0.3, 0.2), b=(0.2, 0.4, 0.31))) == HOLDS


def test_pairing_finds_a_difference_below_the_spread_of_seeds():
    assert verdict("a < b on loss", table(a=(1.0, 2.0, 3.0), b=(1.1, 2.1, 3.11))) == HOLDS


def test_exact_values_need_no_seeds():
    exact = table(a=Measured({None: 1.0}), b=Measured({None: 1.0}), c=Measured({None: 2.0}))
    assert verdict("a < c on loss", exact) == HOLDS
    assert verdict("a < b on loss", exact) == FAILS
    assert verdict("a <= b on loss", exact) == HOLDS
    assert verdict("every row within 1 % on loss", exact, {"a": 1.005, "c": 1.99}, ("a", "b", "c")) == HOLDS
    assert verdict("c within 1 % on loss", exact, {"c": 1.9}) == FAILS
    assert verdict("b within 1 % on loss", exact, {}) == NOT_RUN


def test_a_printed_text_leaves_a_claim_open():
    exact = table(a=Measured({None: 1.0}), b=Measured({None: 1.0}), c=Measured({None: 2.0}))
    cells = {"a": {"loss": 1.005}, "b": {"loss": "OOM"}, "c": {"loss": "1.99"}, "d": {}, "e": {"loss": "x"}}
    slip = {"row": "e", "column": "loss", "printed": "x", "why": "not known"}
    published = Published(source="Table 1", columns={"loss": "nats"}, rows=cells, errata=[slip])

    def judged(claim):
        claim, rows = parse_claim(claim), tuple(published.rows)
        return judge(claim, exact, published.expected, lambda r, c: (NOT_RUN, r), rows, published.text)

    found = judged("every row within 1 % on loss")
    assert found.verdict == UNDECIDED and found.reason == "b: 'OOM' is printed, which is not a number (loss)"
    assert judged("b within 1 % on loss").verdict == UNDECIDED
    assert judged("c within 1 % on loss").verdict == HOLDS
    assert judged("every row within 0.1 % on loss").verdict == FAILS  # a and c are further off, whatever b is
    assert judged("e within 1 % on loss").verdict == NOT_RUN


def test_a_corrected_number_is_not_called_printed():
    exact = {("a", "heads"): Measured({None: 4.0})}
    slip = {"row": "a", "column": "heads", "printed": 8, "corrected": 4, "why": "512 / 128 = 4"}
    published = Published(source="Table 2", columns={"heads": "heads"}, rows={"a": {"heads": 8}}, errata=[slip])
    claim, more = parse_claim("a within 0 on heads"), (("a",), published.text, published.wrong)
    verdict = judge(claim, exact, published.expected, lambda r, c: (NOT_RUN, r), *more)
    assert verdict.verdict == HOLDS and verdict.reason == "a: 4, printed 8, corrected to 4 (heads)"


def test_intervals_of_fits():
    fits = table(
        a=Measured({None: 0.5}, (0.4, 0.6)), b=Measured({None: 0.7}, (0.65, 0.75)), c=Measured({None: 0.6}, (0.5, 0.7))
    )
    assert verdict("a < b on loss", fits) == HOLDS
    assert verdict("a < c on loss", fits) == UNDECIDED
    assert verdict("b < a on loss", fits) == FAILS
    assert verdict("0 < a on loss", fits) == HOLDS


@pytest.mark.parametrize("wrong", ["a < b", "a is good on loss", "a < b > c on loss", "1 < 2 on loss", {"text": "a"}])
def test_other_sentences_are_refused(wrong):
    with pytest.raises(ValueError):
        parse_claim(wrong)
