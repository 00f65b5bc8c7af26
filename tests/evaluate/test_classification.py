"""Metrics of classifiers against scikit-learn and SciPy."""

import math

import numpy as np
import pytest

from linnet.evaluate.classification import (
    calibration,
    confusions,
    exact_interval,
    join,
    paired_interval,
    score_logits,
    wilson,
    worst,
)

N, CLASSES = 700, 12


@pytest.fixture(scope="module")
def drawn():
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(N, CLASSES)) * 2
    labels = np.where(generator.random(N) < 0.5, logits.argmax(1), generator.integers(CLASSES, size=N))
    return logits, labels


def test_accuracies_and_likelihood_are_those_of_scikit_learn(drawn):
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels = drawn
    scores = score_logits(logits, labels)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert scores.top(1).mean() == metrics.accuracy_score(labels, logits.argmax(1))
    for k in (1, 3, 5):
        assert scores.top(k).mean() == metrics.top_k_accuracy_score(labels, logits, k=k)
    assert scores.nll.mean() == pytest.approx(metrics.log_loss(labels, p, labels=range(CLASSES)), rel=1e-12)
    matrix = np.zeros((CLASSES, CLASSES), dtype=int)
    for label, predicted, count in confusions(scores):
        matrix[label, predicted] = count
    assert (matrix == metrics.confusion_matrix(labels, logits.argmax(1))).all()


def test_calibration_is_that_of_scikit_learns_bins(drawn):
    curve = pytest.importorskip("sklearn.calibration").calibration_curve
    scores = score_logits(*drawn)
    error, bins = calibration(scores)
    accuracy, confidence = curve(scores.top(1), scores.confidence, n_bins=15)
    filled = [one for one in bins if one.count]
    assert np.allclose([one.accuracy for one in filled], accuracy)
    assert np.allclose([one.confidence for one in filled], confidence)
    weights = np.array([one.count for one in filled]) / N
    assert error == pytest.approx((weights * abs(accuracy - confidence)).sum(), rel=1e-12)


def test_calibration_of_a_calibrated_and_of_a_sure_model():
    labels = np.array([0, 0, 0, 1])  # 3 of 4 right with a confidence of 3/4
    logits = np.tile([math.log(3.0), 0.0], (4, 1))
    assert calibration(score_logits(logits, labels))[0] == pytest.approx(0.0, abs=1e-12)
    sure = score_logits(np.tile([100.0, 0.0], (4, 1)), labels)
    error, bins = calibration(sure)
    assert error == pytest.approx(0.25) and bins[-1].count == 4  # a confidence of 1 is in the last bin


@pytest.mark.parametrize(("right", "n"), [(0, 6), (6, 6), (1, 6), (4, 6), (5, 10), (199, 200), (9000, 10000)])
def test_the_exact_interval_is_scipys(right, n):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(right, n).proportion_ci(0.95, method="exact")
    assert exact_interval(right, n) == pytest.approx((expected.low, expected.high), abs=1e-9)
    with pytest.raises(ValueError, match="right"):
        exact_interval(n + 1, n)


def test_models_that_agree_on_all_items_have_an_interval_of_their_difference():
    low, high = paired_interval(0, 0, 20)
    assert low == -high and 0.05 < high < 0.2
    assert paired_interval(12, 0, 12)[0] > 0 and paired_interval(12, 0, 12)[1] <= 1
    assert paired_interval(2, 7, 30) == pytest.approx(tuple(-end for end in paired_interval(7, 2, 30)[::-1]))


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 50), (50, 50), (277, 297), (1, 10_000)])
def test_wilson_is_scipys_interval(right, n):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert wilson(right, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("right", "n"), [(0, 0), (3, 2), (-1, 4)])
def test_wilson_refuses_impossible_counts(right, n):
    with pytest.raises(ValueError, match="right"):
        wilson(right, n)


def test_ties_rank_like_the_prediction():
    logits = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    scores = score_logits(logits, np.array([0, 1]))
    assert scores.predicted.tolist() == [0, 0] and scores.ranks.tolist() == [0, 1]


def test_worst_are_the_least_likely_wrong_answers_and_parts_join(drawn):
    logits, labels = drawn
    scores = join([score_logits(logits[:100], labels[:100]), score_logits(logits[100:], labels[100:])])
    whole = score_logits(logits, labels)
    assert (scores.nll == whole.nll).all() and (scores.ranks == whole.ranks).all()
    found = worst(scores, 10)
    wrong = np.flatnonzero(logits.argmax(1) != labels)
    assert set(found) <= set(wrong) and scores.nll[found].min() >= max(set(scores.nll[wrong]) - set(scores.nll[found]))
    assert len(worst(score_logits(np.eye(3), np.arange(3)), 10)) == 0


def test_bad_logits_and_labels_are_refused():
    with pytest.raises(ValueError, match="logits"):
        score_logits(np.array([[np.nan, 0.0]]), np.array([0]))
    with pytest.raises(ValueError, match="labels"):
        score_logits(np.zeros((1, 2)), np.array([2]))
