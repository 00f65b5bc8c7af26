"""The scores of GLUE's eight tasks, and their average as papers print it.

F1, Matthews' and Pearson's correlation come from scikit-learn and SciPy (extra `eval`). All numbers are in per cent.
The average is that of nine numbers, MNLI's two sets apart, where a missing or failed one counts as 0: so the rows of
paper 003, Table 5, come out to the digit.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping

import numpy as np
from torch import nn

from linnet.config import ConfigError, not_installed
from linnet.data.labelled import HeldOut, longest_first
from linnet.encoders.glue import SCORES, Sentences, pack_rows
from linnet.evaluate.likelihood import outputs_of
from linnet.install import install_command

NEEDED = ("sklearn", "scipy")
ROWS = 64  # sentences per forward pass


def check_installed() -> None:
    """Raises ConfigError with the command that installs what the scores need, if something is missing."""
    if missing := not_installed(NEEDED):
        fix = f"the scores of GLUE need it; install the extra `eval`: {install_command('eval')}"
        raise ConfigError([f"{name}: not installed; {fix}" for name in missing], "glue")


def task_score(metric: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    """Returns the score of a task in per cent; 0 if it is not defined (Pearson's of constant outputs).

    Args:
        metric: accuracy, f1, matthews or pearson (`linnet.encoders.glue.GlueTask.metric`).
        outputs: float [n, classes]; of pearson [n, 1], the numbers.
        labels: int64 [n], the classes; of pearson float [n].
    """
    from scipy.stats import pearsonr
    from sklearn import metrics

    outputs = np.asarray(outputs, dtype=np.float64)
    if metric == "pearson":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant outputs, whose correlation is NaN
            value = float(pearsonr(outputs[:, 0], labels)[0]) if len(labels) > 1 else math.nan
        return 0.0 if math.isnan(value) else 100.0 * value
    found = outputs.argmax(1)
    match metric:
        case "accuracy":
            return 100.0 * float(metrics.accuracy_score(labels, found))
        case "f1":
            return 100.0 * float(metrics.f1_score(labels, found, zero_division=0.0))
        case "matthews":
            return 100.0 * float(metrics.matthews_corrcoef(labels, found))
    raise ValueError(f"metric {metric!r} is unknown; use accuracy, f1, matthews or pearson")


def average(scores: Mapping[str, float | None]) -> float:
    """Returns the mean of the nine numbers of GLUE, in per cent; one that is missing, None or NaN counts as 0.

    Args:
        scores: numbers by the names of `linnet.encoders.glue.SCORES`.

    Raises:
        ValueError: a name is not one of these.
    """
    if unknown := sorted(set(scores) - set(SCORES)):
        raise ValueError(f"scores {', '.join(unknown)} are not of GLUE; use {', '.join(SCORES)}")
    numbers = (scores.get(name) for name in SCORES)
    return math.fsum(0.0 if number is None or math.isnan(number) else number for number in numbers) / len(SCORES)


def sentence_outputs(
    model: nn.Module,
    sentences: Sentences,
    rows: int = ROWS,
    autocast: contextlib.AbstractContextManager | None = None,
    progress: Callable[[int], object] = lambda more: None,
) -> np.ndarray:
    """Returns the outputs of a model of sentences, float32 [n, outputs], in the order of the sentences.

    Args:
        rows: sentences per forward pass; long ones are taken together.
        progress: called with the number of sentences of each pass.
    """
    held_out = HeldOut(sentences, rows, longest_first(sentences.lengths))
    return outputs_of(model, held_out, lambda *batch: model(*pack_rows(*batch)).float(), autocast, progress)


def output_losses(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the loss of each sentence, float64 [n]: the negative log-likelihood of its class, or squared error."""
    outputs = outputs.astype(np.float64)
    if outputs.shape[1] == 1:
        return np.square(outputs[:, 0] - labels)
    peak = outputs.max(1, keepdims=True)
    logsumexp = peak[:, 0] + np.log(np.exp(outputs - peak).sum(1))
    return logsumexp - outputs[np.arange(len(labels)), labels]
