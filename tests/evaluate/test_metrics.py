"""SCROLLS' metrics against values worked out by hand."""

import pytest


@pytest.fixture(scope="module")
def metrics():
    """Imported for these tests only: rouge-score brings nltk and scikit-learn."""
    return pytest.importorskip("linnet.evaluate.tasks.suites", reason="needs the extra eval")


def test_answers_are_compared_as_squad_does(metrics):
    assert metrics.normalise("The  Cat's, an  A+ theatre!\n") == "cats theatre"
    assert metrics.normalise("Panama's canal; anthem") == "panamas canal anthem"
    assert metrics.normalise("a the an") == ""


@pytest.mark.parametrize(
    "prediction, references, expected",
    [
        ("the red red car", ["a red car"], 2 * 2 / (3 + 2)),  # 2 of 3 words, 2 of 2
        ("red", ["blue", "red house on the hill"], 2 * 1 / (1 + 4)),
        ("blue", ["red"], 0.0),
        ("", ["red"], 0.0),
        ("the", [""], 0.0),
        ("Unanswerable", ["unanswerable."], 1.0),
    ],
)
def test_f1_counts_words(metrics, prediction, references, expected):
    assert metrics.f1(prediction, references) == pytest.approx(expected)


def test_rouge_of_one_reference(metrics):
    """9 and 6 words; 5 in common (the cat sat on the), of 8 and 5 pairs 3 (the cat, on the, cat sat); longest 5."""
    found = metrics.rouge("the cat sat there on the old grey mat", ["the cat sat on the rug"])
    assert found["rouge1"] == pytest.approx(2 * 5 / (9 + 6))
    assert found["rouge2"] == pytest.approx(2 * 3 / (8 + 5))
    assert found["rougeL"] == pytest.approx(2 * 5 / (9 + 6))


def test_rouge_takes_the_best_reference_of_each_kind_and_does_not_stem(metrics):
    found = metrics.rouge("b a", ["a b", "b c a"])
    assert found["rouge1"] == 1.0 and found["rouge2"] == 0.0
    assert found["rougeL"] == pytest.approx(2 * 2 / (2 + 3))
    assert metrics.rouge("running", ["run"])["rouge1"] == 0.0


def test_rouge_of_nothing_in_common(metrics):
    assert metrics.rouge("", ["a b"]) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
