"""Recall probes: MQAR and tasks of MAD for a language model as it is, without training on them.

The tasks of `linnet.data.synthetic` are made of ids that mean nothing. Here the ids of each sequence become tokens of
the model's own vocabulary, drawn anew for each, so that only the sequence itself says what belongs together. Asked are
the tasks whose rule a sequence shows: MQAR (section 4.1 of paper 002), and in-context, noisy and fuzzy recall and
selective copying of MAD (paper 004). Departures: a sequence of selective copying comes after one with its answers,
since nothing else says what is to be done, and each answer follows the one before it. Left out are memorization, whose
facts only training can give, and compression, which needs a decoder of its own.

Two accuracies: of the likeliest of all tokens, and of the likeliest among the values that stand in the sequence (data
tokens, for copying). The second is at least a chance that is known: one in the number of different values.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, ValidationError

from linnet.config import Config, ConfigError
from linnet.data import Tokenizer
from linnet.data.synthetic import IGNORE, Mqar, Task, find_task, generate
from linnet.evaluate.mode import evaluating
from linnet.evaluate.results import Item, Result
from linnet.evaluate.text import first_token
from linnet.models import CausalLM

Probe = Literal["mqar", "in_context_recall", "noisy_recall", "fuzzy_recall", "selective_copying"]
PROBES: tuple[Probe, ...] = ("mqar", "in_context_recall", "noisy_recall", "fuzzy_recall", "selective_copying")
TOKENS = 2**15  # read at once


class RecallConfig(Config):
    """What is asked.

    Attributes:
        tasks: names of the probes.
        lengths: tokens of a sequence.
        pairs: of keys and values in a sequence of MQAR; keys, and values, that other recall tasks draw from; tokens to
            copy. Lengths that do not hold so many are left out.
        samples: sequences of each length and number of pairs.
        seed: of the sequences and of the tokens that stand for their ids.
    """

    tasks: Annotated[list[Probe], Field(min_length=1)] = list(PROBES)
    lengths: Annotated[list[Annotated[int, Field(ge=8)]], Field(min_length=1)] = [64, 128, 256, 512, 1024]
    pairs: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] = [4, 8, 16, 32, 64]
    samples: Annotated[int, Field(ge=1)] = 32
    seed: int = 0


@dataclass(frozen=True)
class Cell:
    """Accuracies of one task, length and number of pairs; `chance` is that of `choice` by guessing.

    Attributes:
        accuracies, choices: of each sequence, float64 [samples].
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
    """Sequences as tokens: inputs and targets int64 [N, T], and which tokens are values, bool [N, vocabulary]."""

    inputs: np.ndarray
    targets: np.ndarray
    values: np.ndarray


def words_of(tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """Ids of tokens that stand for visible text of whole characters, int64; without a tokenizer, all ids but 0."""
    if tokenizer is None:
        return np.arange(1, vocab_size)
    found = []
    for id in range(min(tokenizer.vocab_size, vocab_size)):
        text = "" if id in (tokenizer.end_of_document, tokenizer.unknown) else tokenizer.decode([id])
        if text.strip() and text.strip().isprintable() and "\ufffd" not in text:
            found.append(id)
    return np.array(found, dtype=np.int64)


def cells(config: RecallConfig) -> Iterator[tuple[str, int, int, Task]]:
    """The tasks to ask, with name, length and pairs; those that do not fit are left out.

    Raises:
        ConfigError: none fits.
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
        message = (
            f"lengths: none of {config.lengths} holds any of {config.pairs} pairs; give longer ones, or fewer pairs"
        )
        raise ConfigError([message], "recall")


def check_recall(config: RecallConfig, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raises ConfigError where no cell fits the lengths and the vocabulary; asks no model."""
    words = words_of(tokenizer, vocab_size)
    if all(ask(task, 1, words, vocab_size) is None for *_, task in list(cells(config))):
        raise _too_few(words, config)


def _too_few(words: np.ndarray, config: RecallConfig) -> ConfigError:
    few = f"the model has {len(words)} tokens of visible text, too few for any of {config.pairs} pairs"
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
    """Asks all cells that fit the lengths and the vocabulary.

    Args:
        tokenizer: where there is one, only tokens of visible text are used, after what stands before a document.
        progress: called with the number of sequences that a step has read.

    Raises:
        ConfigError: no cell fits.
    """
    words, found = words_of(tokenizer, model.config.vocab_size), []
    first = None if tokenizer is None else first_token(tokenizer)
    with evaluating(model), autocast or contextlib.nullcontext():
        for name, length, pairs, task in cells(config):
            asked = ask(task, config.samples, words, model.config.vocab_size, config.seed)
            if asked is not None:
                found.append(Cell(name, length, pairs, *_answer(model, asked, first, progress)))
    if not found:
        raise _too_few(words, config)
    return found


def to_results(found: list[Cell]) -> tuple[Result, ...]:
    """Of the record of an evaluation: an item a sequence, all cells of a task together; first what comparisons test."""
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
    copying = task.name == "selective_copying"
    drawn = generate(task, "test", samples * (2 if copying else 1), seed=seed)
    inputs, targets = _demonstrate(drawn.inputs, drawn.targets) if copying else drawn
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


def _task(name: str, length: int, pairs: int) -> Task | None:
    """A task of that length and number of pairs, None where it does not hold them."""
    settings = {"seq_len": length, "vocab_size": 2 * pairs}
    if name == "mqar":
        settings |= {"num_pairs": pairs, "vocab_size": max(Mqar().vocab_size, 2 * length)}
    elif name == "selective_copying":  # two of half the length
        settings |= {"seq_len": length // 2, "tokens_to_copy": pairs, "spec": "mad-lab", "vocab_size": 2 * pairs + 2}
    try:
        return find_task(name).model_validate(settings)
    except ValidationError:
        return None


def _demonstrate(inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of rows as one, the first answered; in both an answer stands right after the place that asks for it."""
    inputs, targets = inputs.copy(), targets.copy()
    count = int((targets[0] != IGNORE).sum())
    inputs[:, -count + 1 :] = targets[:, -count:-1]
    targets[::2] = IGNORE
    shown, asked = inputs[::2], inputs[1::2]
    return np.concatenate([shown, asked], axis=1), np.concatenate([targets[::2], targets[1::2]], axis=1)


def _answer(
    model: CausalLM, asked: Asked, first: int | None, progress: Callable[[int], None] | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """For each sequence the shares of right answers, float64 [N] twice, and the chance of the second."""
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
        expected, counts = targets[row, column], torch.bincount(row, minlength=len(targets)).double()
        for likeliest in (logits.argmax(-1), logits.masked_fill(~values[row], -torch.inf).argmax(-1)):
            right = torch.zeros_like(counts).index_add_(0, row, (likeliest == expected).double())
            shares.append((right / counts).cpu().numpy())
        if progress is not None:
            progress(len(targets))
    chance = float((1 / asked.values.sum(axis=1)).mean())
    return np.concatenate(shares[::2]), np.concatenate(shares[1::2]), chance
