"""Evaluation of one model.

session.py        the steps around every evaluation    evaluators.py   its kinds    results.py    the record
texts/            perplexity of texts                  likelihood.py   log-likelihoods; outputs of labelled rows
retrieval/        needles in haystacks, recall probes  needle_scores.py  the metrics of needles
tasks/            tasks and suites of lm-evaluation-harness    harness.py    its adapter of a Linnet model
classification.py metrics of a classifier
compare.py        several models on the same items

`score` is imported when it is first used, so that records of evaluations can be read without importing torch.
"""

from linnet.deprecation import lazily

__all__ = ["Score", "score"]

__getattr__ = lazily(__name__, dict.fromkeys(__all__, "texts"))
