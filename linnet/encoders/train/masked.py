"""Masked tokens of a text: `objective: masked`.

The model is a `MaskedLM` with the vocabulary of the corpus. Rows are `seq_len` tokens of packed documents, without
padding, and each has exactly round(rate x seq_len) targets. The loss is the mean negative log-likelihood over these, in
nats per masked token; validation reports its exponential, the masked perplexity.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from linnet.config import SeveralKeys, checking, gather
from linnet.data import Corpus, flatten_documents
from linnet.data.corpus import mixture_of
from linnet.data.problems import in_data
from linnet.data.sizes import BatchSizes
from linnet.encoders.config import MaskedConfig
from linnet.encoders.masking import MaskedBatches, MaskedValidation, MaskingConfig
from linnet.evaluate import score
from linnet.layers.positions import length_problems
from linnet.models import flops_exact
from linnet.train.config import CorpusTraining, check_vocabulary
from linnet.train.objective import Loss, Show
from linnet.train.objectives.corpus import CorpusObjective, Shown, mixture_problems, scored_rows, source_fields

if TYPE_CHECKING:
    from linnet.encoders.models.masked_lm import MaskedLM
    from linnet.parallel.mesh import Mesh


class MaskedTraining(CorpusTraining):
    """The training of a masked language model: `objective: masked`."""

    objective: Literal["masked"] = Field("masked", description="the training objective: `masked`, hidden tokens")
    model: MaskedConfig = Field(
        description="a recipe's name (bert-crammed, lightnet-bert), a recipe with changes, or a layout; `vocab_size` "
        "defaults to the tokenizer's"
    )
    seq_len: int = Field(128, ge=1, le=1 << 40, description="tokens per sequence")
    masking: MaskingConfig = Field(MaskingConfig(), description="which tokens are predicted")

    @model_validator(mode="after")
    def _rows_can_be_masked(self) -> Self:
        problems = self.masking.problems(self.seq_len)
        problems += length_problems("seq_len", self.seq_len, self.model.num_positions, "raise the second")
        if problems:
            raise SeveralKeys(problems, "train")
        return self


class MaskedObjective(CorpusObjective):
    """Trains a masked language model on a corpus."""

    Config = MaskedTraining
    name, loss_unit = "masked", "nats per masked token"
    SCORES: ClassVar = {"masked_perplexity": "masked perplexity"}

    def __init__(self, config: MaskedTraining, corpus: Corpus, device: torch.device):
        super().__init__(config, corpus, device)
        self.corpus, self.row_length = corpus, config.seq_len
        self.targets_per_row = config.masking.count(config.seq_len)

    @classmethod
    def read(
        cls, config: CorpusTraining, cache: str | Path, show: Callable[[str, int, int], None] | None = None
    ) -> Corpus:
        with checking("data", in_data):
            return super().read(config, cache, show)

    @classmethod
    def step_flops(cls, config: MaskedTraining) -> float:
        model, rows = config.model, config.batch_size
        unseen = config.seq_len - config.masking.count(config.seq_len)  # places without logits
        head = 3.0 * 2.0 * unseen * model.d_model * model.vocab_size
        return flops_exact(model, config.seq_len, rows) - rows * head

    @classmethod
    def describe_model(cls, config: MaskedTraining) -> str:
        return f"vocabulary {config.model.vocab_size:,} and the mask token"

    @classmethod
    def data_problems(cls, config: MaskedTraining, data: Corpus) -> list[str]:
        """Returns why a corpus does not fit: too short for a row, or more tokens than the model has."""
        problems: list[str] = []
        with gather(problems):
            problems += mixture_problems(config, _batches(config, data, BatchSizes(config.batch_size)).order)
        with gather(problems):
            _validation(config, data)
        try:
            check_vocabulary(config.model.vocab_size, data.vocab_size)
        except ValueError as error:
            problems.append(f"model: {error}")
        return problems

    def loss(self, model: "MaskedLM") -> Loss:
        answers = self.config.masking.count(self.config.seq_len)
        if self.config.data.packing == "cross":
            return partial(model.loss, answers=answers)

        def loss(tokens: Tensor, targets: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
            if starts.shape[1] == 1:  # one document per row: use the rows as an ordinary batch
                return model.loss(tokens, targets, answers=answers)
            flat, wanted, cu_seqlens = flatten_documents(tokens, targets, starts)
            return model.loss(flat, wanted, cu_seqlens, answers * len(tokens))

        return loss

    def batches(self) -> MaskedBatches:
        return _batches(self.config, self.corpus, self.config.batch_sizes)

    def count(self, tokens: Tensor, targets: Tensor, *_: Tensor) -> Tensor:
        return torch.full((), targets.shape[0] * self.targets_per_row, device=targets.device)

    def validate(
        self,
        model: nn.Module,
        autocast: contextlib.AbstractContextManager,
        show: Show | None = None,
        mesh: "Mesh | None" = None,
    ) -> dict[str, float]:
        batches = _validation(self.config, self.corpus, 1 if mesh is None else mesh.dp)
        result = score(model, Shown(batches, show), 1.0, autocast, self.loss(model), mesh)
        return {"validation_loss": result.loss, "validation_masked_perplexity": result.perplexity}

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        fields = super().result_fields(rows, validation)
        fields |= {"seq_len": self.config.seq_len, "unique_tokens": len(self.corpus.train)}
        return fields | source_fields(self.config, self.corpus, rows)

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        return super().result_numbers(config) | {"seq_len", "unique_tokens"}


def _batches(config: MaskedTraining, corpus: Corpus, sizes: BatchSizes) -> MaskedBatches:
    return MaskedBatches(
        corpus.train,
        config.seq_len,
        sizes,
        config.seed,
        config.masking,
        config.model.vocab_size,
        config.data.packing,
        mixture_of(config.data, corpus),
    )


def _validation(config: MaskedTraining, corpus: Corpus, ranks: int = 1) -> MaskedValidation:
    return MaskedValidation(
        corpus.validation,
        config.seq_len,
        scored_rows(config, ranks),
        config.masking,
        config.model.vocab_size,
        config.evaluate_tokens,
        config.data.packing,
    )
