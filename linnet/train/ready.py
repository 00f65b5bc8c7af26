"""What a training needs, found before anything is made, and all that is wrong with it told at once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from linnet.config import ConfigError, gather
from linnet.data import Batches, Corpus, Tokenizer, given_tokenizer, prepare, validation_batches
from linnet.data.problems import in_data
from linnet.train import device as devices
from linnet.train.config import TrainConfig, check_vocabulary
from linnet.train.evaluation import Evaluations, check_evaluations
from linnet.train.sinks import check_sinks
from linnet.train.suites import Subject

Progress = Callable[[dict], None]


@dataclass(frozen=True)
class Ready:
    """What was found for a configuration."""

    device: torch.device
    corpus: Corpus
    evaluations: Evaluations


def make_ready(config: TrainConfig, cache: str | Path, progress: Progress | None = None) -> Ready:
    """Finds the device, prepares the text, and reads what the evaluations need.

    Args:
        cache: folder of tokenised data.
        progress: is called with {"event": "data", "what", "done", "total"} while text is prepared.

    Raises:
        ConfigError: all that is wrong with what the configuration names, as far as it shows before the first step.
    """
    problems: list[str] = []
    device = corpus = evaluations = None
    with gather(problems):
        device = devices.choose(config.device)
    with gather(problems):
        check_sinks(config.sinks)

    def show(what: str, done: int, total: int) -> None:
        progress({"event": "data", "what": what, "done": done, "total": total})

    tokenizer, found = None, []
    with gather(found):
        corpus = prepare(config.data, cache, progress=None if progress is None else show)
        tokenizer = corpus.tokenizer
    problems += [in_data(line) for line in found]
    if corpus is not None:
        problems += corpus_problems(config, corpus)
    elif not any(line.startswith("tokenizer") for line in found):
        tokenizer = given_tokenizer(config.data.tokenizer)
    with gather(problems):
        evaluations = make_evaluations(config, tokenizer, device or torch.device("cpu"))
    if problems:
        raise ConfigError(problems, "train")
    return Ready(device, corpus, evaluations)


def corpus_problems(config: TrainConfig, corpus: Corpus) -> list[str]:
    """Why a corpus is not for this training: too short for a row, nothing to score, a smaller vocabulary."""
    problems: list[str] = []
    with gather(problems):
        Batches(corpus.train, config.seq_len, config.batch_size, config.seed)
    with gather(problems):
        validation_batches(corpus.validation, config.seq_len, config.batch_size)
    try:
        check_vocabulary(config.model.vocab_size, corpus.vocab_size)
    except ValueError as error:
        problems.append(f"model: {error}")
    return problems


def make_evaluations(config: TrainConfig, tokenizer: Tokenizer | None, device: torch.device) -> Evaluations | None:
    """The evaluations of a training, or None where the tokenizer is not there yet.

    Raises:
        ConfigError: all that is wrong with them, as far as is known.
    """
    if tokenizer is None:
        check_evaluations(config.evaluations, config.seq_len, config.data.source)
        return None
    subject = Subject(tokenizer, config.model, config.seq_len, device, config.precision, config.data.source)
    return Evaluations(config.evaluations, subject, config.evaluate_every)
