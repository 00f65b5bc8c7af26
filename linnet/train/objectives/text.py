"""The next token of a text: `objective: text`, the default.

The model is a `CausalLM` with the vocabulary of the corpus. The loss is the mean negative log-likelihood over all
targets of a batch, in nats per token; validation reports it also in bits per byte.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from linnet.config import Problem, gather, refuse
from linnet.data import (
    Batches,
    Corpus,
    Tokenizer,
    flatten_documents,
    given_tokenizer,
    validation_batches,
)
from linnet.data.corpus import Portion, mixture_of, revisions
from linnet.data.problems import in_data
from linnet.evaluate import Score, score
from linnet.layers.positions import length_problems
from linnet.models import CausalLM, build_model, flops_exact, flops_paper, state_bytes
from linnet.models.causal_lm import IGNORE
from linnet.train.config import TrainConfig, TrainingConfig, check_vocabulary
from linnet.train.evaluation import check_evaluations
from linnet.train.objective import Loss, Progress, Show
from linnet.train.objectives.corpus import (
    SOURCES,
    CorpusObjective,
    Shown,
    mixture_problems,
    scored_rows,
    source_fields,
)
from linnet.train.suites import TextSubject

if TYPE_CHECKING:
    from linnet.parallel.build import Cuts
    from linnet.parallel.mesh import Mesh


class TextObjective(CorpusObjective):
    """Trains a causal language model on a corpus."""

    Config: ClassVar[type[TrainingConfig]] = TrainConfig
    name, loss_unit = "text", "nats per token"
    SCORES: ClassVar = {"bits_per_byte": "bits per byte"}

    def __init__(self, config: TrainConfig, corpus: Corpus, device: torch.device):
        """
        Args:
            device: device for the evaluations' copies of the model.

        Raises:
            ConfigError: evaluations that cannot run.
        """
        super().__init__(config, corpus, device)
        self.corpus, self.row_length = corpus, config.seq_len
        self.targets_per_row = config.seq_len if config.data.packing == "cross" else None

    @classmethod
    def step_flops(cls, config: TrainConfig) -> float:
        return flops_exact(config.model, config.seq_len, config.batch_size)

    @classmethod
    def describe_model(cls, config: TrainConfig) -> str:
        return f"vocabulary {config.model.vocab_size:,}"

    @classmethod
    def parallel_problems(cls, config: TrainConfig, count: int) -> list[str]:
        parallel = config.parallel
        problems = parallel.problems(count, config.model, config.seq_len, config.batch_size, config.accumulation)
        return problems or config.ramp_problems(parallel, count)

    @classmethod
    def data_problems(cls, config: TrainConfig, data: Corpus) -> list[str]:
        """Returns why a corpus does not fit: too short for a row, nothing to score, more tokens than the model has."""
        problems: list[str] = []
        with gather(problems):
            problems += mixture_problems(config, _batches(config, data))
        with gather(problems):
            validation_batches(data.validation, config.seq_len, config.batch_size)
        return problems + cls.size_problems(config, data.vocab_size)

    @classmethod
    def size_problems(cls, config: Any, tokens: int) -> list[str]:
        """Returns why a tokenizer of so many tokens, or a row, does not fit the model: it has fewer rows of a table."""
        problems = length_problems("seq_len", config.seq_len, config.model.num_positions, "raise the second")
        try:
            check_vocabulary(config.model.vocab_size, tokens)
        except ValueError as error:
            problems.append(f"model: {error}")
        return problems

    @classmethod
    def subject(cls, config: TrainConfig, data: Corpus | None, device: torch.device) -> TextSubject:
        tokenizer = given_tokenizer(config.data.tokenizer) if data is None else data.tokenizer
        return _subject(config, tokenizer, device)

    @classmethod
    def prepare(
        cls, config: TrainConfig, device: torch.device, cache: str | Path, progress: Progress | None = None
    ) -> "TextObjective":
        def show(what: str, done: int, total: int) -> None:
            progress({"event": "data", "what": what, "done": done, "total": total})

        problems: list[str] = []
        corpus = objective = None
        with gather(problems, in_data):
            corpus = cls.read(config, cache, None if progress is None else show)
        no_tokenizer = any(Problem(line).path.startswith(("tokenizer", "data.tokenizer")) for line in problems)
        if corpus is not None:
            problems += cls.data_problems(config, corpus)
        with gather(problems):  # even if the corpus is unusable: all problems are reported at once
            if corpus is not None:
                objective = cls(config, corpus, device)
            elif not no_tokenizer:
                cls.check_evaluations(config)
            else:
                check_evaluations(config.evaluations, _subject(config, None, device))
        refuse(problems, "train")
        cls.show_passes(config, corpus, progress)
        return objective

    def build(self, seed: int, device: torch.device | str | None = None) -> CausalLM:
        return build_model(self.config.model, seed=seed, device=device)

    def build_sharded(
        self, seed: int, mesh: "Mesh", wrap: Callable[[nn.Module], None]
    ) -> "tuple[nn.Module, Cuts | None]":
        from linnet.parallel.build import build

        config = self.config
        return build(config.model, seed, mesh, precision=config.precision, reshard=config.parallel.reshard, wrap=wrap)

    def loss(self, model: nn.Module) -> Loss:
        if self.config.data.packing == "cross":
            return model.loss

        def loss(tokens: Tensor, targets: Tensor, starts: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
            return packed_loss(model, tokens, targets, starts)

        return loss

    def batches(self) -> Batches:
        return _batches(self.config, self.corpus)

    def count(self, tokens: Tensor, targets: Tensor, *_: Tensor) -> Tensor:
        return (targets != IGNORE).sum()

    @functools.cached_property
    def _mixture(self) -> list[Portion]:
        return mixture_of(self.config.data, self.corpus)

    @functools.cached_property
    def _bytes_per_token(self) -> float:
        return self.batches().bytes_per_token()

    def loss_fields(self, loss: float) -> dict[str, float]:
        return {"bits_per_byte": loss / math.log(2) / self._bytes_per_token}

    def validate(
        self,
        model: nn.Module,
        autocast: contextlib.AbstractContextManager,
        show: Show | None = None,
        mesh: "Mesh | None" = None,
    ) -> dict[str, float]:
        config, lengths = self.config, self.corpus.tokenizer.byte_lengths
        rows = scored_rows(config, 1 if mesh is None else mesh.dp)
        mean = self.corpus.bytes_per_token("validation")
        lengths = mean if lengths is None else lengths

        def scored(span: tuple[int, int] | None = None) -> Score | None:
            batches = validation_batches(
                self.corpus.validation, config.seq_len, rows, config.evaluate_tokens, config.data.packing, span
            )
            if span is not None and batches.tokens < 2:  # the first token of a document is none to score
                return None
            return score(model, Shown(batches, show), lengths, autocast, self.loss(model), mesh)

        sources = {source.name: scored(source.held) for source in self._mixture if source.held[1]}
        each = {name: result for name, result in sources.items() if result is not None}
        result = Score.over(list(each.values())) if each else scored()
        found = {"validation_loss": result.loss, "validation_bits_per_byte": result.bits_per_byte}
        return found | ({SOURCES: {name: one.loss for name, one in each.items()}} if len(each) > 1 else {})

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        config = self.config
        return {
            "bits_per_byte": validation.get("validation_bits_per_byte"),
            "flops_paper": rows * flops_paper(config.model, config.seq_len),
            "state_bytes": state_bytes(config.model, config.seq_len),
            "seq_len": config.seq_len,
            "unique_tokens": len(self.corpus.train),
            **source_fields(config, self.corpus, rows, validation.get(SOURCES)),
            **({"revisions": found} if (found := revisions(config.data)) else {}),
        }

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        return super().result_numbers(config) | {"flops_paper", "state_bytes", "seq_len", "unique_tokens"}


def _batches(config: TrainConfig, corpus: Corpus) -> Batches:
    mixture = mixture_of(config.data, corpus)
    return Batches(corpus.train, config.seq_len, config.batch_sizes, config.seed, config.data.packing, mixture)


def packed_loss(model: CausalLM, tokens: Tensor, targets: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss of rows in which the state of every layer restarts at each document (`data.packing: reset`).

    Args:
        tokens, targets, starts: as `linnet.data.loader.mark_documents` returns them.
    """
    if starts.shape[1] == 1:  # one document per row: use the rows as an ordinary batch
        return model.loss(tokens, targets)
    return model.loss(*flatten_documents(tokens, targets, starts))


def _subject(config: TrainConfig, tokenizer: Tokenizer | None, device: torch.device) -> TextSubject:
    return TextSubject(config.model, device, config.precision, tokenizer, config.seq_len, config.data.source)
