"""The kinds of evaluations during training. Each is a configuration whose `prepare` reads the data that it needs and
returns a function from a model to its results.

base.py     results, and the subject: what an evaluation knows of the training
text.py     of causal language models: texts, needles, recall probes, tasks
"""

from linnet.train.suites.base import Evaluation, Found, Measure, Subject, label
from linnet.train.suites.text import (
    LanguageEvaluation,
    NeedleEvaluation,
    RecallEvaluation,
    TaskEvaluation,
    TextEvaluation,
    TextSubject,
)

__all__ = [
    "Evaluation",
    "Found",
    "LanguageEvaluation",
    "Measure",
    "NeedleEvaluation",
    "RecallEvaluation",
    "Subject",
    "TaskEvaluation",
    "TextEvaluation",
    "TextSubject",
    "label",
]
