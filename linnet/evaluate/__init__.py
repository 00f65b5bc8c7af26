"""One model, one score."""

from linnet.evaluate.perplexity import Score, score

__all__ = ["Score", "score"]
