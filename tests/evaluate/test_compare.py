"""Comparisons of models: tests and intervals against what they must be, and which results belong together."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from linnet.evaluate.classification import exact_interval, paired_interval
from linnet.evaluate.compare import bootstrap_means, compare, holm, notes, permutation_p, shared, split
from linnet.evaluate.results import Evaluation, Item, Result
from linnet.laws.orders import percentile_interval


def evaluation(scores, weights=None, *, kind="tasks", asked=None, step=None, ids=None, **of_items) -> Evaluation:
    weights = [1.0] * len(scores) if weights is None else weights
    ids = [f"q{i}" for i in range(len(scores))] if ids is None else ids
    items = [Item(*row) for row in zip(ids, scores, weights, strict=True)]
    result = Result.of_items("quiz", "acc", items, **of_items)
    return Evaluation(kind, {"step": step}, asked or {"file": "quiz.jsonl"}, (result,))


def test_few_items_are_tested_exactly():
    differences = np.array([0.5, -0.1, 0.3, 0.2, 0.4, 0.25])
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=6)]
    expected = np.mean([total >= abs(differences.sum()) - 1e-12 for total in sums])
    assert permutation_p(differences) == pytest.approx(expected)
    assert permutation_p(np.ones(4)) == pytest.approx(2 / 16)
    assert permutation_p(np.zeros(9)) == 1.0
    assert permutation_p(np.array([1.0, -1.0, 0.0])) == 1.0


def test_many_items_are_tested_as_scipy_does():
    generator = np.random.default_rng(3)
    differences = generator.normal(0.12, 1.0, 200)
    expected = stats.permutation_test(
        (differences, np.zeros(200)), lambda a, b, axis: np.sum(a - b, axis=axis), permutation_type="samples",
        vectorized=True, n_resamples=9999, rng=np.random.default_rng(0),
    ).pvalue  # fmt: skip
    assert 0.01 < expected < 0.4
    assert permutation_p(differences) == pytest.approx(expected, abs=0.02)


def test_the_test_keeps_its_level():
    generator = np.random.default_rng(0)
    found = [permutation_p(generator.normal(size=12)) for _ in range(400)]
    assert 0.02 < np.mean(np.array(found) <= 0.05) < 0.09


def test_holm_by_hand():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0] and holm([]) == []


def test_bootstrap_draws_the_same_items_for_all_models():
    scores = np.array([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]])
    drawn = bootstrap_means(scores, np.array([[1.0, 2.0, 3.0]] * 2))
    assert drawn.shape == (2000, 2) and np.allclose(drawn[:, 1] - drawn[:, 0], 10.0)
    rows = np.array(list(itertools.product(range(3), repeat=3)))  # all drawings, each as likely as another
    weighted = (np.array([0.0, 2.0, 6.0])[rows].sum(1) / np.array([1.0, 2.0, 3.0])[rows].sum(1)).mean()
    assert drawn[:, 0].mean() == pytest.approx(weighted, abs=0.04)
    assert set(np.round(bootstrap_means(np.array([[0.0, 1.0]]), np.ones((1, 2)))[:, 0], 9)) == {0.0, 0.5, 1.0}


def test_the_interval_of_a_mean_is_about_the_normal_one():
    scores = np.random.default_rng(1).normal(2.0, 1.0, 400)
    [group] = shared({"a": [evaluation(scores)]})
    [found] = compare([group])
    [number] = found.numbers
    half = 1.96 * scores.std() / 20
    assert number.value == pytest.approx(scores.mean())
    assert number.interval == pytest.approx((scores.mean() - half, scores.mean() + half), abs=0.015)
    assert found.differences == () and found.n == 400


@pytest.mark.parametrize("items", [6, 12])
def test_intervals_of_few_items_hold_the_mean_as_often_as_they_say(items):
    """Plain percentiles hold it in 85 % of 6 normal items."""
    draws, inside = np.random.default_rng(0), []
    for seed in range(1000):
        scores = draws.normal(size=(1, items))
        low, high = percentile_interval(bootstrap_means(scores, np.ones((1, items)), seed)[:, 0], items)
        inside.append(low <= 0.0 <= high)
    assert 0.92 <= np.mean(inside) <= 0.97


@pytest.mark.parametrize("items", [6, 20, 50])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.98])
def test_intervals_of_right_answers_hold_the_share_near_0_and_1(items, share):
    """Percentiles of a bootstrap hold a share of 0.98 of 6 questions in 12 %: six right answers show no wrong one."""
    draws, numbers, pairs = np.random.default_rng(1), [], []
    for _ in range(100):
        luck = draws.random(items)
        scores = {"a": luck < share, "b": np.where(draws.random(items) < 0.5, luck, draws.random(items)) < share / 2}
        [found] = compare(shared({name: [evaluation(one.astype(float))] for name, one in scores.items()}))
        for number, truth in zip(found.numbers, (share, share / 2), strict=True):
            numbers.append(number.interval[0] <= truth <= number.interval[1])
            assert number.interval[0] < number.interval[1] and number.interval[0] <= number.value <= number.interval[1]
        [difference] = found.differences
        pairs.append(difference.interval[0] <= share / 2 <= difference.interval[1])
        assert difference.interval[0] < difference.interval[1]
    assert np.mean(numbers) >= 0.93 and np.mean(pairs) >= 0.92


def test_items_with_one_score_that_is_no_share_show_no_noise():
    [found] = compare(shared({name: [evaluation([0.4] * 8)] for name in "ab"}))
    assert [number.interval for number in found.numbers] == [None, None] and found.differences[0].interval is None


def test_a_few_heavy_items_make_an_interval_as_wide_as_few_items_do():
    """With 20 documents whose sizes have a log deviation of 1.5, intervals that count 20 hold the mean in 91 %."""
    draws, inside = np.random.default_rng(0), []
    for seed in range(600):
        scores, sizes = draws.normal(size=20), np.exp(1.5 * draws.normal(size=20))
        drawn = bootstrap_means(scores[None], sizes[None], seed)[:, 0]
        low, high = percentile_interval(drawn, 20, sizes)
        narrow = percentile_interval(drawn, 20)
        assert low <= narrow[0] and narrow[1] <= high
        inside.append(low <= 0.0 <= high)
    assert 0.93 <= np.mean(inside) <= 0.98


def test_fewer_than_six_items_have_no_interval_and_show_nothing():
    rows = {name: [evaluation([1.0 - place] * 5)] for place, name in enumerate("ab")}
    [found] = compare(shared(rows))
    assert [number.interval for number in found.numbers] == [None, None]
    assert [one.interval for one in found.differences] == [None] and found.best is None
    assert "5 items cannot show a difference" in " ".join(notes(shared(rows)[0], [found]))
    assert replace(found, chance=0.5).guesses(found.numbers[0])


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_answers_that_are_all_alike_have_an_interval_with_a_width(score):
    [found] = compare(shared({name: [evaluation([score] * 10)] for name in "ab"}))
    low, high = exact_interval(int(10 * score), 10)
    assert high - low > 0.3
    assert [number.interval for number in found.numbers] == [pytest.approx((low, high))] * 2
    assert [(pair.interval, pair.p) for pair in found.differences] == [(paired_interval(0, 0, 10), 1.0)]
    [weighted] = compare(shared({"a": [evaluation([score] * 10, list(range(1, 11)))]}))
    assert weighted.numbers[0].interval is None  # the number of items is then not that of a share


def test_a_paired_difference_is_found_where_intervals_overlap():
    hard = np.random.default_rng(2).normal(0.0, 5.0, 60)
    noise = np.random.default_rng(3).normal(0.0, 0.2, 60)
    [found] = compare(shared({"a": [evaluation(hard + 0.2 + noise)], "b": [evaluation(hard)]}))
    (a, b), [difference] = found.numbers, found.differences
    assert a.interval[0] < b.value < a.interval[1]
    assert 0 < difference.interval[0] < difference.value < difference.interval[1]
    assert difference.value == pytest.approx(a.value - b.value) and difference.p == 1e-4 == difference.adjusted
    assert found.best == "a"


@pytest.mark.parametrize("other", [{}, {"b": [evaluation([math.nan] * 8)]}])
def test_one_model_is_the_best_of_nothing(other):
    [found] = compare(shared({"a": [evaluation([1.0] * 8)]} | other))
    assert found.first == "a" and found.best is None


def test_models_that_are_level_have_no_best():
    rows = {"a": [evaluation([1.0, 0.0])], "b": [evaluation([0.0, 1.0])], "c": [evaluation([0.0, 0.0])]}
    [found] = compare(shared(rows))
    assert found.best is None and found.first == "a" and found.order.level("a") == ["b", "c"]


def test_adjusted_over_all_tests_of_a_call():
    rows = {name: [evaluation(np.random.default_rng(i).normal(0, 1, 30))] for i, name in enumerate("abc")}
    [found] = compare(shared(rows))
    assert [(d.first, d.second) for d in found.differences] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [d.adjusted for d in found.differences] == pytest.approx(holm([d.p for d in found.differences]))
    assert all(d.adjusted >= d.p for d in found.differences)


def test_perplexities_are_compared_as_such():
    one = evaluation([1.0, 2.0], [3.0, 1.0], better="lower", average="exp")
    two = evaluation([1.5, 2.5], [3.0, 1.0], better="lower", average="exp")
    [found] = compare(shared({"a": [one], "b": [two]}))
    assert found.numbers[0].value == pytest.approx(math.exp(1.25)) == pytest.approx(one.results[0].value)
    assert found.differences[0].value == pytest.approx(math.exp(1.25) - math.exp(1.75))
    assert found.first == "a" and found.differences[0].p == pytest.approx(0.5) and found.best is None


def test_items_that_weigh_differently_are_not_tested():
    [found] = compare(shared({"a": [evaluation([1, 2], [1, 2])], "b": [evaluation([1, 2], [1, 3])]}))
    assert not found.differences and "weigh" in found.untested


def test_one_item_is_not_tested_and_the_reason_says_what_would_be():
    [found] = compare(shared({name: [evaluation([1.0])] for name in "ab"}))
    assert not found.differences and "evaluate six or more" in found.untested


@pytest.mark.parametrize("score", [math.nan, math.inf])
@pytest.mark.parametrize("average", ["mean", "exp"])
def test_scores_that_are_not_finite_are_no_difference(score, average):
    """Of a model that diverged: no sum of differences is as large as NaN, which looked like a p-value of 0."""
    rows = {"a": [evaluation([1.0, 2.0, 3.0], average=average)]}
    rows["b"] = [evaluation([1.0, score, 3.0], average=average)]
    [found] = compare(shared(rows))
    assert not found.differences and "not finite" in found.untested
    assert [number.interval for number in found.numbers] == [None, None]
    assert math.isfinite(found.numbers[0].value)
    with pytest.raises(ValueError, match="not finite"):
        permutation_p(np.array([0.5, score]))


def test_perplexities_beyond_all_numbers_have_intervals():
    rows = {name: [evaluation([900.0, 800.0, 700.0] * 2 + [1.0], better="lower", average="exp")] for name in "ab"}
    [found] = compare(shared(rows))
    assert found.numbers[0].interval[1] == math.exp(700.0) and found.differences[0].p == 1.0


def test_only_common_items_count():
    one, two = evaluation([1, 2, 3], ids=["x", "y", "z"]), evaluation([5, 6], ids=["z", "y"])
    [found] = compare(shared({"a": [one], "b": [two]}))
    assert (found.n, found.left_out) == (2, 1)
    assert [number.value for number in found.numbers] == [2.5, 5.5]
    [found] = compare(shared({"a": [one], "b": [evaluation([1], ids=["w"])]}))
    assert (found.n, found.left_out) == (0, 4) and "in common" in found.untested


def test_what_was_asked_otherwise_is_kept_apart():
    asked = {"file": "quiz.jsonl", "precision": "float32"}
    rows = {
        "a": [evaluation([1, 0], asked=asked), evaluation([1], asked={"file": "other.jsonl"})],
        "b": [evaluation([0, 0], asked=asked | {"precision": "bfloat16"})],
    }
    first, second = shared(rows)
    assert [entry.name for entry in first.entries] == ["a", "b"] and first.lacking == ()
    assert first.asked == {"file": "quiz.jsonl"}
    assert [entry.name for entry in second.entries] == ["a"] and second.lacking == ("b",)


def test_the_last_step_counts_and_ways_of_reading_are_told_apart():
    def read(score, step, method):
        return evaluation([score, score], asked={"text": ["a"], "method": method}, step=step, kind="text")

    rows = {
        "a": [read(1, 10, "carried"), read(2, 20, "carried"), read(3, 20, "windowed")],
        "b": [read(4, 5, "carried")],
    }
    [group] = shared(rows)
    assert [entry.name for entry in group.entries] == ["a (carried)", "a (windowed)", "b"]
    assert [entry.evaluation.results[0].value for entry in group.entries] == [2, 3, 4]


def test_results_without_items_are_shown_and_not_tested():
    mean = Result("csr", "mean", 0.4)
    rows = {name: [Evaluation("csr", {}, {}, (*evaluation([1, 0]).results, mean))] for name in "ab"}
    quiz, average = compare(shared(rows))
    assert quiz.metric == "acc" and len(quiz.differences) == 1
    assert average.metric == "mean" and average.differences == () and average.numbers[0].interval is None


def test_the_metric_that_counts_is_tested():
    items = (Item("x", 1.0), Item("y", 0.0))
    results = tuple(Result.of_items("quiz", metric, items) for metric in ("acc", "acc_norm"))
    for shown, tested in (([["quiz", "acc_norm"]], "acc_norm"), ([], "acc")):
        rows = {name: [Evaluation("csr", {}, {}, results, {"shown": shown} if shown else {})] for name in "ab"}
        assert [one.metric for one in compare(shared(rows)) if one.differences] == [tested]


def test_other_content_under_the_same_settings_is_not_compared():
    one, two = (replace(evaluation([1, 0, 1], kind="csr"), scored=digest) for digest in ("aaaa", "bbbb"))
    groups = shared({"a": [one], "b": [two], "c": [two]})
    assert [(group.scored, [entry.model for entry in group.entries]) for group in groups] == [
        ("bbbb", ["b", "c"]),
        ("aaaa", ["a"]),
    ]
    [line] = split(groups)
    assert "aaaa" in line and "bbbb" in line
    assert [[number.name for number in one.numbers] for one in compare(groups)] == [["b", "c"], ["a"]]
    assert not split(shared({"a": [one], "b": [replace(one, asked=one.asked)]}))


def test_old_records_without_a_digest_are_compared_with_a_note():
    old, new = evaluation([1, 0, 1]), replace(evaluation([0, 0, 1]), scored="aaaa")
    [group] = shared({"a": [old], "b": [new]})
    assert not group.lacking and any(line.startswith("a: ") for line in notes(group, []))
    [group] = shared({"a": [old, new], "b": [new]})  # the record that says what was scored counts
    assert all(entry.evaluation is new for entry in group.entries) and not notes(group, [])
    assert len(shared({"a": [old], "b": [new], "c": [replace(new, scored="bbbb")]})) == 3


def test_no_model_is_best_that_does_not_beat_guessing():
    def best(scores: list[int], known: bool = True) -> str | None:
        rows = {"a": scores, "b": [0] * len(scores)}
        chance = {"chance": [["quiz", "acc", 0.5]]} if known else {}
        [one] = compare(shared({name: [replace(evaluation(own), detail=chance)] for name, own in rows.items()}))
        return one.best

    assert best([1, 1, 0, 1, 0, 1]) is None  # the value is above guessing, its interval is not
    assert best([1] * 20 + [0]) == "a"
    scores = [Result("quiz", "weighted", value) for value in (0.9, 0.2)]
    rows = {name: replace(evaluation(own), detail={"chance": [["quiz", "acc", 0.5]]}) for name, own in
            (("a", [1, 0, 1]), ("b", [0, 0, 0]))}  # fmt: skip
    rows = {n: [replace(r, results=(*r.results, s))] for (n, r), s in zip(rows.items(), scores, strict=True)}
    assert [one.best for one in compare(shared(rows))] == [None, None]
    assert best([1] + [0] * 20, known=False) is None and best([1, 1, 0, 1, 1, 1, 1], known=False) == "a"


@pytest.mark.parametrize("kind, told", [("text", "per token do not compare; bits per byte"), ("tasks", None)])
def test_numbers_per_token_of_other_tokenizers_have_a_note(kind, told):
    one = evaluation([1.0] * 6, kind=kind)
    other = replace(one, model={"step": None, "tokenizer": "other"})
    [group] = shared({"a": [one], "b": [other]})
    found = [line for line in notes(group, []) if "tokenizers differ" in line]
    assert len(found) == bool(told) and all(told in line for line in found)
