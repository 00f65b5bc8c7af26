"""GLUE's scores against their definitions, and the average against the table of paper 003."""

import math

import numpy as np
import pytest

from linnet.encoders.glue import SCORES, average, task_score

pytest.importorskip("sklearn")

TABLE_5 = {  # paper 003: MNLI-m, MNLI-mm, SST-2, STS-B, RTE, QNLI, QQP, MRPC, CoLA; the printed average
    "BERT-Base (fully trained)": ([83.2, 83.4, 91.9, 86.7, 59.2, 90.6, 87.7, 89.3, 56.5], 80.9),
    "BERT-Base (no pretraining)": ([34.1, 34.1, 79.9, 17.8, 47.3, 50.0, 68.6, 77.9, None], 45.5),
    "Crammed BERT": ([83.9, 84.1, 92.2, 84.6, 53.8, 89.5, 87.3, 87.5, 44.5], 78.6),
    "LightNet": ([83.3, 83.5, 92.9, 86.3, 55.6, 89.1, 87.7, 88.5, 52.6], 79.9),
    "LightNet without TPE": ([82.1, 82.9, 92.4, 79.4, 57.8, 89.2, 87.7, 83.8, 44.1], 77.7),
}


@pytest.mark.parametrize("row", TABLE_5)
def test_the_average_is_that_of_the_paper_to_the_digit(row):
    numbers, printed = TABLE_5[row]
    assert round(average(dict(zip(SCORES, numbers, strict=True))), 1) == printed


def test_missing_and_failed_numbers_count_as_nothing_and_unknown_ones_are_refused():
    assert average({"rte": 90.0}) == average({"rte": 90.0, "cola": math.nan, "qqp": None}) == 10.0
    with pytest.raises(ValueError, match="wnli"):
        average({"wnli": 50.0})


def test_scores_follow_their_definitions():
    random = np.random.default_rng(0)
    outputs, labels = random.normal(size=(200, 2)), random.integers(0, 2, 200)
    outputs[:, 1] += 0.8 * labels
    found = outputs[:, 1] > outputs[:, 0]
    hit, false, missed = (found & (labels == 1)).sum(), (found & (labels == 0)).sum(), (~found & (labels == 1)).sum()
    right = (~found & (labels == 0)).sum()
    assert task_score("accuracy", outputs, labels) == pytest.approx(100 * (hit + right) / 200)
    assert task_score("f1", outputs, labels) == pytest.approx(100 * 2 * hit / (2 * hit + false + missed))
    product = float((hit + false) * (hit + missed) * (right + false) * (right + missed))
    matthews = (hit * right - false * missed) / math.sqrt(product)
    assert task_score("matthews", outputs, labels) == pytest.approx(100 * matthews)
    wanted = random.normal(size=200)
    guesses = (wanted + random.normal(size=200))[:, None]
    assert task_score("pearson", guesses, wanted) == pytest.approx(100 * np.corrcoef(guesses[:, 0], wanted)[0, 1])


def test_answers_that_never_change_score_zero():
    labels = np.array([0, 1, 1, 0])
    constant = np.tile([1.0, 0.0], (4, 1))
    assert task_score("matthews", constant, labels) == task_score("f1", constant, labels) == 0.0
    assert task_score("pearson", np.ones((4, 1)), labels.astype(float)) == 0.0
