"""Evaluation of one model.

`score` is imported when it is first used, so that records of evaluations can be read without importing torch.
"""

__all__ = ["Score", "score"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from linnet.evaluate import perplexity

    return getattr(perplexity, name)
