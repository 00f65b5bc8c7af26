"""Recall probes: MQAR and tasks of MAD for a trained language model, without training on them.

The ids in the tasks of `linnet.data.synthetic` have no meaning. Here each sequence maps its ids to random tokens of
the model's vocabulary, so that only the sequence itself tells which tokens belong together. The probes are the tasks
whose rule a sequence shows: MQAR (section 4.1 of paper 002), and in-context recall, noisy recall, fuzzy recall and
selective copying of MAD (paper 004). They differ from the papers in one task: a sequence of selective copying follows
an example with answers, because nothing else shows the rule, and the input contains each answer before the next one is
asked. Two tasks are missing: memorization, since a model learns its facts only by training, and compression, which
needs its own decoder.

There are two accuracies: that of the likeliest of all tokens, and that of the likeliest among the values in the
sequence (the data tokens, for copying). Guessing has a known value of the second: one in the number of different
values.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from linnet.config import ConfigError, refuse
from linnet.data import Tokenizer
from linnet.data.synthetic import IGNORE, Mqar, Task, find_task, generate
from linnet.evaluate.likelihood import evaluating
from linnet.evaluate.results import Item, Result, digest_of
from linnet.evaluate.retrieval import PROBES as PROBES
from linnet.evaluate.retrieval import RecallConfig
from linnet.evaluate.texts import first_token
from linnet.layers.positions import length_problems
from linnet.models import CausalLM
from linnet.parallel.mesh import divided

TOKENS = 2**15  # tokens per batch


@dataclass(frozen=True)
class Cell:
    """Accuracies of one task, length and number of pairs.

    Attributes:
        accuracies: of each sequence, among all tokens, float64 [samples].
        choices: of each sequence, among the values, float64 [samples].
        chance: the value of `choices` that guessing gives.
    """

    task: str
    length: int
    pairs: int
    accuracies: np.ndarray
    choices: np.ndarray
    chance: float

    def to_dict(self) -> dict:
        shown = {"task": self.task, "length": self.length, "pairs": self.pairs, "chance": self.chance}
        return shown | {"accuracy": self.accuracies.mean().item(), "choice": self.choices.mean().item()}


class Asked(NamedTuple):
    """Sequences of tokens.

    Attributes:
        inputs, targets: int64 [N, T]; targets that are not asked are -100.
        values: which tokens are values of the sequence, bool [N, vocabulary].
    """

    inputs: np.ndarray
    targets: np.ndarray
    values: np.ndarray


def words_of(tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """Returns ids of tokens that are visible text of whole characters, int64; without a tokenizer, all ids but 0."""
    if tokenizer is None:
        return np.arange(1, vocab_size)
    ids = []
    for id in range(min(tokenizer.vocab_size, vocab_size)):
        text = "" if id in (tokenizer.end_of_document, tokenizer.unknown) else tokenizer.decode([id])
        if text.strip() and text.strip().isprintable() and "\ufffd" not in text:
            ids.append(id)
    return np.array(ids, dtype=np.int64)


def cells(config: RecallConfig) -> Iterator[tuple[str, int, int, Task]]:
    """Yields (name, length, pairs, task); tasks that do not fit into their length are skipped.

    Raises:
        ConfigError: no task fits.
    """
    fitting = 0
    for name in config.tasks:
        for length in config.lengths:
            for pairs in config.pairs:
                task = _task(name, length, pairs)
                if task is not None:
                    fitting += 1
                    yield name, length, pairs, task
    if not fitting:
        what = f"lengths: all of {config.lengths} are too short for {config.pairs} pairs"
        message = f"{what}; give longer ones, or fewer pairs"
        raise ConfigError([message], "recall")


def drawn_digest(config: RecallConfig) -> str:
    """Returns a digest of the sequences of all cells, before they become tokens of a vocabulary."""
    drawn = (_draw(task, config.samples, config.seed) for *_, task in cells(config))
    return digest_of(part.tobytes() for batch in drawn for part in (batch.inputs, batch.targets))


def check_recall(
    config: RecallConfig, tokenizer: Tokenizer | None, vocab_size: int, num_positions: int | None = None
) -> None:
    """Raises ConfigError if no cell fits the lengths and the vocabulary, or one is too long; does not run a model.

    Args:
        num_positions: rows of the model's learned table of positions; None without one.
    """
    words = words_of(tokenizer, vocab_size)
    tasks = [task for *_, task in cells(config)]
    if num_positions is not None:
        tasks.sort(key=_tokens, reverse=True)  # the first that fits is the longest: a draw takes up to a second
    longest = next((_tokens(task) for task in tasks if ask(task, 1, words, vocab_size) is not None), None)
    if longest is None:
        raise _too_few(words, config)
    if num_positions is not None:
        first = int(tokenizer is not None)  # the document's first token, which comes before each sequence
        longest += first
        fix = f"give lengths of at most {num_positions - first}"
        what = "lengths: tokens of the longest sequence" + (" and the one before it" if first else "")
        refuse(length_problems(what, longest, num_positions, fix), "recall")


def _too_few(words: np.ndarray, config: RecallConfig) -> ConfigError:
    few = f"the model has {len(words)} tokens of visible text, which is too few for {config.pairs} pairs"
    return ConfigError([f"pairs: {few}; give fewer"], "recall")


@torch.no_grad()
def run_recall(
    model: CausalLM,
    tokenizer: Tokenizer | None,
    config: RecallConfig,
    *,
    autocast: contextlib.AbstractContextManager | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Cell]:
    """Returns the accuracies of all cells that fit the lengths and the vocabulary.

    Args:
        model: the model to ask, on the device of its parameters.
        tokenizer: if there is one, sequences use only tokens of visible text and begin with the document's first token.
        config: the probes.
        autocast: precision of the forward pass; None is that of the parameters.
        progress: called after each batch with the number of sequences in it.

    Raises:
        ConfigError: no cell fits.
    """
    words = words_of(tokenizer, model.config.vocab_size)
    first = None if tokenizer is None else first_token(tokenizer)

    def answer(cell: tuple[str, int, int, Task]) -> Cell | None:
        *about, task = cell
        questions = ask(task, config.samples, words, model.config.vocab_size, config.seed)
        return None if questions is None else Cell(*about, *_answer(model, questions, first, progress))

    with evaluating(model), autocast or contextlib.nullcontext():
        answered = divided(list(cells(config)), answer, lambda cell: cell[-1].seq_len)
    if not (fitting := [cell for cell in answered if cell is not None]):
        raise _too_few(words, config)
    return fitting


def left_out(config: RecallConfig, cells: list[Cell]) -> list[dict]:
    """Returns the cells of a configuration that `run_recall` did not measure, each with its reason."""
    measured = {(cell.task, cell.length, cell.pairs) for cell in cells}
    rows = []
    for place in itertools.product(config.tasks, config.lengths, config.pairs):
        if place not in measured:
            reason = "too short" if _task(*place) is None else "too few words"
            rows.append({**dict(zip(("task", "length", "pairs"), place, strict=True)), "reason": reason})
    return rows


def to_results(found: list[Cell]) -> tuple[Result, ...]:
    """Returns the results of the record: per task one item per sequence, with all cells together.

    The metric `choice` comes first, since a comparison tests the first metric of a task.
    """
    results = []
    for task in dict.fromkeys(cell.task for cell in found):
        for metric, of in (("choice", "choices"), ("accuracy", "accuracies")):
            items = [
                Item(f"{cell.length} tokens, {cell.pairs} pairs, {row}", score)
                for cell in found
                if cell.task == task
                for row, score in enumerate(getattr(cell, of).tolist())
            ]
            results.append(Result.of_items(f"recall-{task}", metric, items))
    return tuple(results)


def ask(task: Task, samples: int, words: np.ndarray, vocab_size: int, seed: int = 0) -> Asked | None:
    """Sequences of a task in words of a vocabulary, a draw of words each; None where a sequence needs more words."""
    drawn = _draw(task, samples, seed)
    inputs, targets = _demonstrate(drawn.inputs, drawn.targets) if task.name == "selective_copying" else drawn
    wanted = next(kind for kind in task.kinds if kind.name in ("values", "data"))
    generator = np.random.default_rng([seed, task.seq_len, task.num_tokens])
    values = np.zeros((samples, vocab_size), dtype=bool)
    spoken, answers = np.empty_like(inputs), np.full_like(targets, IGNORE)
    for row in range(samples):
        ids, places = np.unique(inputs[row], return_inverse=True)
        if len(ids) > len(words):
            return None
        chosen = generator.choice(words, len(ids), replace=False)
        spoken[row] = chosen[places]
        scored = targets[row] != IGNORE
        answers[row, scored] = chosen[np.searchsorted(ids, targets[row, scored])]
        values[row, chosen[(ids >= wanted.start) & (ids < wanted.stop)]] = True
    return Asked(spoken, answers, values)


def _draw(task: Task, samples: int, seed: int):
    """The inputs and targets of a task in ids; for copying two sequences per sample, a demonstration and a question."""
    return generate(task, "test", samples * (2 if task.name == "selective_copying" else 1), seed=seed)


def _tokens(task: Task) -> int:
    """Returns the tokens of a sequence that `ask` gives."""
    return task.input_length * (2 if task.name == "selective_copying" else 1)


def _task(name: str, length: int, pairs: int) -> Task | None:
    """Returns a task of that length and number of pairs; None if the length is too short."""
    settings = {"seq_len": length, "vocab_size": 2 * pairs}
    if name == "mqar":
        settings |= {"num_pairs": pairs, "vocab_size": max(Mqar().vocab_size, 2 * length)}
    elif name == "selective_copying":  # an example and a question, each of half the length
        settings |= {"seq_len": length // 2, "tokens_to_copy": pairs, "spec": "mad-lab", "vocab_size": 2 * pairs + 2}
    try:
        return find_task(name).model_validate(settings)
    except ValidationError:
        return None


def _demonstrate(inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Joins pairs of rows into one: an example with answers, then a question.

    In both halves the input after each asked position is its answer.
    """
    inputs, targets = inputs.copy(), targets.copy()
    count = int((targets[0] != IGNORE).sum())
    inputs[:, -count + 1 :] = targets[:, -count:-1]
    targets[::2] = IGNORE
    shown, asked = inputs[::2], inputs[1::2]
    return np.concatenate([shown, asked], axis=1), np.concatenate([targets[::2], targets[1::2]], axis=1)


def _answer(
    model: CausalLM, asked: Asked, first: int | None, progress: Callable[[int], None] | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns both shares of right answers per sequence, float64 [N] each, and the value of the second by guessing."""
    device = next(model.parameters()).device
    size = max(1, TOKENS // asked.inputs.shape[1])
    shares = []
    for start in range(0, len(asked.inputs), size):
        part = [torch.from_numpy(x[start : start + size]).to(device) for x in asked]
        inputs, targets, values = part
        if first is not None:
            inputs = torch.nn.functional.pad(inputs, (1, 0), value=first)
        x, _ = model.backbone(model.embed(inputs))
        row, column = (targets != IGNORE).nonzero(as_tuple=True)
        logits = model.logits(x[row, column + (first is not None)])
        if not logits.isfinite().all():
            raise ConfigError(["the model's logits are NaN or infinite, so they have no likeliest token"], "model")
        expected, counts = targets[row, column], torch.bincount(row, minlength=len(targets)).double()
        for likeliest in (logits.argmax(-1), logits.masked_fill(~values[row], -torch.inf).argmax(-1)):
            right = torch.zeros_like(counts).index_add_(0, row, (likeliest == expected).double())
            shares.append((right / counts).cpu().numpy())
        if progress is not None:
            progress(len(targets))
    chance = float((1 / asked.values.sum(axis=1)).mean())
    return np.concatenate(shares[::2]), np.concatenate(shares[1::2]), chance
