"""What the objectives on rows of tokens from a corpus share: text and masked text."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from linnet.data import Batches, Corpus, prepare
from linnet.data.corpus import content, mixture_of
from linnet.data.problems import text_problems
from linnet.runs.model import TOKENIZER, files_of_start, vocabulary_of
from linnet.train import passes
from linnet.train.config import CorpusTraining
from linnet.train.objective import Progress, RunObjective, Show

FEW = 100  # bytes of held-out text below which its loss says nothing
SOURCES = "validation_source_losses"  # key of a validation row: held-out loss of each source of a mixture
SCORED = 4096  # least held-out tokens per forward pass: scoring stores nothing for gradients, so more tokens fit


class CorpusObjective(RunObjective):
    """An objective whose data are a corpus of text.

    Attributes:
        corpus: the prepared text.
    """

    units = "tokens"
    corpus: Corpus

    @classmethod
    def read(
        cls, config: CorpusTraining, cache: str | Path, show: Callable[[str, int, int], None] | None = None
    ) -> Corpus:
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

    @classmethod
    def show_passes(cls, config: Any, data: Any, progress: Progress | None) -> None:
        super().show_passes(config, data, progress)
        if progress is not None and (mixture := mixture_of(config.data, data)):
            batches = Batches(data.train, config.seq_len, config.batch_sizes, config.seed, mixture=mixture)
            tokens = config.batch_sizes.first(config.total_steps) * config.seq_len
            available = [rows * config.seq_len for rows in batches.per_source]
            for text, warning in passes.lines(passes.gives(mixture, available, tokens)):
                progress({"event": "passes", "text": text, "warning": warning})
        if progress is not None and (held := data.validation.bytes) < FEW:
            key = "validation" if config.data.validation else "validation_fraction"
            what = f"data.{key}: {getattr(config.data, key)} holds out too little text to score (bytes: {held})"
            fix = "give more text, raise data.validation_fraction, or name other text in data.validation"
            progress({"event": "passes", "text": f"{what}; {fix}", "warning": True})

    def files(self) -> dict[str, str]:
        tokenizer = self.corpus.tokenizer
        return {TOKENIZER: tokenizer.to_json(), **files_of_start(self.config.init_from, tokenizer)}

    def meta(self) -> dict[str, Any]:
        return {
            "data": self.corpus.digest,
            "documents": self.corpus.train.documents,
            "vocabulary": self.vocabulary(),
        }

    def vocabulary(self) -> dict[str, Any]:
        """Returns what identifies the meaning of token ids in this run, for comparison with another run."""
        return vocabulary_of(self.config.model, self.corpus.tokenizer)

    def resume_problems(self, meta: dict[str, Any]) -> list[str]:
        if meta["data"] == self.corpus.digest:
            return []
        return [
            f"data: the text changed since this run's checkpoint (digest {meta['data']}, now "
            f"{self.corpus.digest}); restore it, or delete the run folder to train anew"
        ]

    def start_problems(self, meta: dict[str, Any], path: Path) -> list[str]:
        mine = self.vocabulary()
        theirs = dict.fromkeys(mine) | (found if isinstance(found := meta.get("vocabulary"), dict) else {})
        # Names are not compared, because the name of a tokenizer may be that of its file.
        if all(mine[key] == theirs[key] for key in ("model", "tokens", "digest")):
            return []
        return [
            f"the vocabulary differs: {path} has {theirs['model']} rows for the {theirs['tokens']} tokens of "
            f"{theirs['tokenizer']} ({theirs['digest']}), this configuration has {mine['model']} rows for the "
            f"{mine['tokens']} tokens of {mine['tokenizer']} ({mine['digest']}); "
            "use the same data.tokenizer and model.vocab_size"
        ]


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
