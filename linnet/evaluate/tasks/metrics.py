"""The metrics of SCROLLS (U. Shaham et al., arXiv:2201.03533), computed here: ROUGE and F1.

The benchmark's own script is downloaded at each use. Here ROUGE comes from the package `rouge-score` (extra `eval`),
without stemming. F1 compares answers after SQuAD's normalisation. A prediction is compared with each of
its references, and the best value counts. All numbers lie between 0 and 1; papers print them in per cent.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

ROUGES = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """Returns an answer in SQuAD's normal form: lower case, no ASCII punctuation, no articles, single spaces."""
    bare = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def f1(prediction: str, references: Sequence[str]) -> float:
    """Returns the best F1 of the words of prediction and reference after `normalise`; repeated words count repeatedly.

    F1 is 0 if no word is common, also for two empty answers (SQuAD 1.1, as in the benchmark).
    """
    return max(_f1(normalise(prediction).split(), normalise(reference).split()) for reference in references)


def rouge(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Returns ROUGE-1, -2 and -L by name: for each, the best F-measure over the references."""
    scores = [_scorer().score(reference, prediction) for reference in references]
    return {name: max(score[name].fmeasure for score in scores) for name in ROUGES}


def _f1(words: list[str], expected: list[str]) -> float:
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0


@lru_cache(maxsize=1)
def _scorer() -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer  # imports scipy.stats, which takes longer than most tasks' metrics

    return RougeScorer(list(ROUGES), use_stemmer=False)
