"""The metrics of SCROLLS (U. Shaham et al., arXiv:2201.03533), computed here: ROUGE, F1 and exact match.

The benchmark's own script is fetched from the network when it is used. Here ROUGE is the `rouge-score` package's (extra
`eval`), without stemming, and F1 and exact match compare answers after SQuAD's normalisation. A prediction is held
against each of its references, and the best counts. All numbers are from 0 to 1; papers print a hundred times that.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from rouge_score.rouge_scorer import RougeScorer

ROUGES = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, no ASCII punctuation, no articles, single spaces."""
    bare = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 where the prediction is one of the references after `normalise`, else 0."""
    return float(normalise(prediction) in map(normalise, references))


def f1(prediction: str, references: Sequence[str]) -> float:
    """The best F1 of the words of prediction and reference after `normalise`; a word counts as often as it stands.

    Where no word is common it is 0, of two empty answers too (SQuAD 1.1, as the benchmark has it).
    """
    return max(_f1(normalise(prediction).split(), normalise(reference).split()) for reference in references)


def rouge(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, -2 and -L: the F-measure against each reference, the best of each."""
    scores = [_scorer().score(reference, prediction) for reference in references]
    return {name: max(score[name].fmeasure for score in scores) for name in ROUGES}


def geometric_mean(scores: dict[str, float]) -> float:
    """SCROLLS' one number of ROUGE-1, -2 and -L (of their means over documents, not of one document's)."""
    product = 1.0
    for name in ROUGES:
        product *= scores[name]
    return product ** (1 / len(ROUGES))


def _f1(words: list[str], expected: list[str]) -> float:
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0


@lru_cache(maxsize=1)
def _scorer() -> RougeScorer:
    return RougeScorer(list(ROUGES), use_stemmer=False)
