"""The next token of a text: `objective: text`, the default.

The model is a `CausalLM` with the vocabulary of the corpus. The loss is the mean negative log-likelihood over all
targets of a batch, in nats per token; validation reports it also in bits per byte.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linnet.config import ConfigError, gather, shown
from linnet.data import Batches, Corpus, flatten_documents, given_tokenizer, prepare, validation_batches
from linnet.data.corpus import Portion, content, mixture_of, revisions
from linnet.data.problems import in_data, text_problems
from linnet.evaluate import Score, score
from linnet.layers.positions import length_problems
from linnet.models import CausalLM, ModelConfig, build_model, flops_exact, flops_paper, state_bytes
from linnet.models.causal_lm import IGNORE
from linnet.models.costs import counted_by_weights
from linnet.parallel.mesh import Mesh
from linnet.parallel.tensor import Cuts
from linnet.runs.model import TOKENIZER, files_of_start, vocabulary_of
from linnet.runs.record import BY_WEIGHTS
from linnet.train import passes
from linnet.train.config import CorpusTraining, TrainConfig, TrainingConfig, check_vocabulary
from linnet.train.objective import Autocast, Loss, Preparing, Progress, RunObjective, Show
from linnet.train.suites import TextSubject

# What the objectives on rows of tokens from a corpus share: text and masked text.

FEW = 100  # bytes of held-out text below which its loss says nothing
SOURCES = "validation_source_losses"  # key of a validation row: held-out loss of each source of a mixture
SCORED = 4096  # least held-out tokens per forward pass: scoring stores nothing for gradients, so more tokens fit


class CorpusObjective(RunObjective):
    """An objective whose data are a corpus of text."""

    units = "tokens"

    @functools.cached_property
    def row_length(self) -> int:
        return self.config.seq_len

    @classmethod
    def read(cls, config: CorpusTraining, cache: str | Path, show: Preparing | None = None) -> Corpus:
        return prepare(config.data, cache, progress=show)

    @classmethod
    def content(cls, config: CorpusTraining, cache: str | Path | None = None) -> dict[str, str]:
        return content(config.data, cache)

    @classmethod
    def source_problems(cls, values: Mapping[str, Any], cache: str | Path, told: Sequence[str]) -> list[str]:
        return text_problems(values.get("data", {}), cache, values.get("seq_len"), told=told)

    @classmethod
    def units_per_step(cls, config: CorpusTraining) -> int:
        return config.batch_size * config.seq_len

    @classmethod
    def row_tokens(cls, config: CorpusTraining) -> int:
        return config.seq_len

    def show_passes(self, progress: Progress) -> None:
        super().show_passes(progress)
        config, data = self.config, self.data
        if mixture := mixture_of(config.data, data):
            batches = Batches(data.train, config.seq_len, config.batch_sizes, config.seed, mixture=mixture)
            tokens = config.batch_sizes.first(config.total_steps) * config.seq_len
            available = [rows * config.seq_len for rows in batches.per_source]
            for text, warning in passes.lines(passes.gives(mixture, available, tokens)):
                progress({"event": "passes", "text": text, "warning": warning})
        if (held := data.validation.bytes) < FEW:
            key = "validation" if config.data.validation else "validation_fraction"
            what = f"data.{key}: {getattr(config.data, key)} holds out too little text to score (bytes: {held})"
            fix = "give more text, raise data.validation_fraction, or name other text in data.validation"
            progress({"event": "passes", "text": f"{what}; {fix}", "warning": True})

    def files(self) -> dict[str, str]:
        tokenizer = self.data.tokenizer
        return {TOKENIZER: tokenizer.to_json(), **files_of_start(self.config.init_from, tokenizer)}

    def meta(self) -> dict[str, Any]:
        return {
            "data": self.data.digest,
            "documents": self.data.train.documents,
            "vocabulary": self.vocabulary(),
        }

    def vocabulary(self) -> dict[str, Any]:
        """Returns what identifies the meaning of token ids in this run, for comparison with another run."""
        return vocabulary_of(self.config.model, self.data.tokenizer)

    def start_problems(self, meta: dict[str, Any], path: Path) -> list[str]:
        mine = self.vocabulary()
        if meta.get("vocabulary") == {}:  # a model folder without a tokenizer
            fix = "put the tokenizer.json that it was trained with into this folder"
            return [f"{path}: has no tokenizer.json, so it is not known what its token ids mean; {fix}"]
        theirs = vocabulary if isinstance(vocabulary := meta.get("vocabulary"), dict) else {}
        # Names are not compared, because the name of a tokenizer may be that of its file.
        if all(mine[key] == theirs.get(key) for key in ("model", "tokens", "digest")):
            return []
        rows, tokens, name, digest = (shown(theirs.get(key)) for key in ("model", "tokens", "tokenizer", "digest"))
        return [
            f"the vocabulary differs: {path} has {rows} rows for the {tokens} tokens of {name} ({digest}), "
            f"this configuration has {mine['model']} rows for the "
            f"{mine['tokens']} tokens of {mine['tokenizer']!r} ({mine['digest']!r}); "
            "use the same data.tokenizer and model.vocab_size"
        ]


def size_problems(model: ModelConfig, seq_len: int, tokens: int) -> list[str]:
    """Returns why a tokenizer of so many tokens, or a row, does not fit a model: it has fewer rows of a table."""
    problems = length_problems("seq_len", seq_len, model.num_positions, "raise the second")
    try:
        check_vocabulary(model.vocab_size, tokens)
    except ValueError as error:
        problems.append(f"model: {error}")
    return problems


def mixture_problems(config: CorpusTraining, batches: Batches) -> list[str]:
    """Returns why a training cannot read its mixture: it is longer than the epochs of the sources."""
    if batches.limit is None or config.epochs is not None:  # epochs of all rows become steps later
        return []
    steps = config.total_steps
    if (rows := config.batch_sizes.first(steps)) <= batches.limit:
        return []
    while config.batch_sizes.first(steps) > batches.limit:
        steps -= max(1, (config.batch_sizes.first(steps) - batches.limit) // config.batch_size)
    have = f"its sources end after the epochs that they have, {batches.limit:,} rows of {config.seq_len:,} tokens"
    fix = f"use steps={max(steps, 0)}" if steps > 0 else "use a smaller batch_size"
    return [
        f"data.mixture: {have}, and the training reads {rows:,} rows in {config.total_steps:,} steps; {fix}, more "
        "epochs, or weights"
    ]


def source_fields(
    config: CorpusTraining, corpus: Corpus, rows: int, losses: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Returns the tokens and passes of each source of a mixture after the first rows, for result.json.

    Args:
        losses: held-out losses by the name of the source, where they are known.
    """
    if not (mixture := mixture_of(config.data, corpus)):
        return {}
    losses = losses or {}
    batches = Batches(corpus.train, config.seq_len, config.batch_sizes, config.seed, mixture=mixture)
    read = zip(mixture, batches.source_rows(rows), batches.per_source, strict=True)
    return {
        "sources": [
            {
                "source": source.name,
                "digest": source.digest,
                "tokens": count * config.seq_len,
                "passes": count / windows if windows else 0.0,
                **({"validation_loss": losses[source.name]} if source.name in losses else {}),
            }
            for source, count, windows in read
        ]
    }


class Shown(Sequence):
    """Batches that report progress before each is read: scoring may take longer than the training did."""

    def __init__(self, batches: Any, show: Show | None):
        self._batches, self._show = batches, show

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: Any) -> Any:
        batch = self._batches[number]  # first: an iteration ends with IndexError here
        if self._show is not None:
            self._show(self._batches.tokens * number // len(self._batches), self._batches.tokens)
        return batch


def scored_rows(config: CorpusTraining, ranks: int = 1) -> int:
    """Returns the rows per forward pass in validation: the rows of a micro-batch, but at least `SCORED` tokens.

    Args:
        ranks: number of ranks that read different rows.
    """
    return max(-(-config.batch_size // (config.parts * ranks)), SCORED // config.seq_len)


class TextObjective(CorpusObjective):
    """Trains a causal language model on a corpus."""

    Config: ClassVar[type[TrainingConfig]] = TrainConfig
    name, loss_unit = "text", "nats per token"
    SCORES: ClassVar = {"bits_per_byte": "bits per byte"}
    in_data = staticmethod(in_data)

    @functools.cached_property
    def targets_per_row(self) -> int | None:
        return None if self.config.packs else self.config.seq_len

    @classmethod
    def step_flops(cls, config: TrainConfig) -> float:
        return flops_exact(config.model, config.seq_len, config.batch_size)

    @classmethod
    def describe_model(cls, config: TrainConfig) -> str:
        return f"vocabulary {config.model.vocab_size:,}"

    @classmethod
    def parallel_problems(cls, config: TrainConfig, count: int) -> list[str]:
        batch = config.batch_size, config.accumulation, config.batch_ramp is not None
        return config.parallel.problems(count, config.model, config.seq_len, *batch)

    @classmethod
    def data_problems(cls, config: TrainConfig, data: Corpus) -> list[str]:
        """Returns why a corpus does not fit: too short for a row, nothing to score, more tokens than the model has."""
        problems: list[str] = []
        with gather(problems):
            problems += mixture_problems(config, _batches(config, data))
        with gather(problems):
            validation_batches(data.validation, config.seq_len, config.batch_size)
        return problems + size_problems(config.model, config.seq_len, data.vocab_size)

    @classmethod
    def subject(cls, config: TrainConfig, data: Corpus | None, device: torch.device) -> TextSubject:
        tokenizer = None if data is None else data.tokenizer
        if data is None:
            with contextlib.suppress(ConfigError):  # preparing the data reports it
                tokenizer = given_tokenizer(config.data.tokenizer)
        precision = config.autocast_precision
        return TextSubject(config.model, device, precision, tokenizer, config.seq_len, config.data.source)

    def build(self, seed: int, device: torch.device | str | None = None) -> CausalLM:
        return build_model(self.config.model, seed=seed, device=device)

    def build_sharded(self, seed: int, mesh: Mesh, wrap: Callable[[nn.Module], None]) -> tuple[nn.Module, Cuts | None]:
        from linnet.parallel.build import build

        config = self.config
        options = {"precision": config.autocast_precision, "reshard": config.parallel.reshard, "wrap": wrap}
        return build(config.model, seed, mesh, **options)

    def loss(self, model: nn.Module) -> Loss:
        if self.config.data.packing == "cross":
            return model.loss

        def loss(tokens: Tensor, targets: Tensor, starts: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
            return packed_loss(model, tokens, targets, starts)

        return loss

    def batches(self) -> Batches:
        return _batches(self.config, self.data)

    def count(self, tokens: Tensor, targets: Tensor, *_: Tensor) -> Tensor:
        return (targets != IGNORE).sum()

    @functools.cached_property
    def _mixture(self) -> list[Portion]:
        return mixture_of(self.config.data, self.data)

    @functools.cached_property
    def _bytes_per_token(self) -> float:
        return self.batches().bytes_per_token()

    def loss_fields(self, loss: float) -> dict[str, float]:
        return {"bits_per_byte": loss / math.log(2) / self._bytes_per_token}

    def validate(
        self, model: nn.Module, autocast: Autocast, show: Show | None = None, mesh: Mesh | None = None
    ) -> dict[str, float]:
        config, lengths = self.config, self.data.tokenizer.byte_lengths
        rows = scored_rows(config, 1 if mesh is None else mesh.dp)
        mean = self.data.bytes_per_token("validation")
        lengths = mean if lengths is None else lengths

        def scored(span: tuple[int, int] | None = None) -> Score | None:
            batches = validation_batches(
                self.data.validation, config.seq_len, rows, config.evaluate_tokens, config.data.packing, span
            )
            if span is not None and batches.tokens < 2:  # the first token of a document is none to score
                return None
            return score(model, Shown(batches, show), lengths, autocast, self.loss(model), mesh)

        sources = {source.name: scored(source.held) for source in self._mixture if source.held[1]}
        each = {name: result for name, result in sources.items() if result is not None}
        result = Score.over(list(each.values())) if each else scored()
        fields = {"validation_loss": result.loss, "validation_bits_per_byte": result.bits_per_byte}
        return fields | ({SOURCES: {name: score.loss for name, score in each.items()}} if len(each) > 1 else {})

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        config = self.config
        return {
            "bits_per_byte": validation.get("validation_bits_per_byte"),
            "flops_paper": rows * flops_paper(config.model, config.seq_len),
            **({BY_WEIGHTS: mixers} if (mixers := counted_by_weights(config.model)) else {}),
            "state_bytes": state_bytes(config.model, config.seq_len),
            "seq_len": config.seq_len,
            "unique_tokens": len(self.data.train),
            **source_fields(config, self.data, rows, validation.get(SOURCES)),
            **({"revisions": commits} if (commits := revisions(config.data)) else {}),
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
