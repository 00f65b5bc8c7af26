"""The assistant's turns of conversations: `objective: chat`, the fine-tuning of a causal language model.

Model, tokenizer and chat template are those of `init_from`. The loss is the mean negative log-likelihood over the
tokens of the assistant's turns, in nats per target; the state of every layer restarts at each conversation.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from linnet.config import ConfigError, Problem, checking
from linnet.data.chat import COUNTS, TURNS, ChatConfig, content, prepare_chats
from linnet.data.chat.template import FILE, ChatTemplate, load_chat_template
from linnet.data.labelled import HeldOut, LabelledBatches
from linnet.data.problems import problems_of
from linnet.data.sources import fingerprint
from linnet.evaluate import score
from linnet.models import ModelConfig
from linnet.models.causal_lm import IGNORE
from linnet.parallel.mesh import Mesh
from linnet.runs import RunFolder
from linnet.runs.model import TEXT, TOKENIZER, read_tokenizer
from linnet.train.config import TrainingConfig
from linnet.train.objective import Autocast, Preparing, Progress, Show
from linnet.train.objectives.text import CorpusObjective, TextObjective, scored_rows, size_problems


class ChatTraining(TrainingConfig):
    """The fine-tuning of a causal language model on conversations: `objective: chat`.

    `model` needs only what differs from the model of `init_from`, for example {dropout: 0.1}.
    """

    ROW: ClassVar = "rows"

    objective: Literal["chat"] = Field("chat", description="the training objective: `chat`, the assistant's turns")
    data: ChatConfig = Field(description="the conversations to train on")
    model: ModelConfig = Field(description="what differs from the model of `init_from`")
    batch_size: int = Field(16, ge=1, le=1 << 40, description="rows per step, over all its `accumulation` parts")
    seq_len: int = Field(1024, ge=2, le=1 << 40, description="tokens per row, which holds whole conversations")

    def file_names(self) -> dict[str, Any]:
        return super().file_names() | {"template": self.data.template}

    @model_validator(mode="before")
    @classmethod
    def _model_of_start(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("init_from") is None:
            fix = "name a run or model folder to continue (--from MODEL)"
            raise ValueError(f"init_from: is not given, and conversations fine-tune a model; {fix}")
        return cls.of_start(values, TEXT) if isinstance(values, Mapping) else values


class ChatObjective(TextObjective):
    """Fine-tunes a causal language model on conversations."""

    Config = ChatTraining
    name, loss_unit = "chat", "nats per token of the assistant"
    SCORES: ClassVar = {}

    @classmethod
    def read(cls, config: Any, cache: str | Path, show: Preparing | None = None) -> Any:
        template = start_of(config.init_from or "", config.data.template)
        return prepare_chats(config.data, template, config.seq_len, config.seed)

    @classmethod
    def content(cls, config: Any, cache: str | Path | None = None) -> dict[str, str]:
        folder = RunFolder.open(config.init_from or "")
        digests = content(config.data, None if cache is None else Path(cache))
        tokenizer = read_tokenizer(folder)
        digests["tokenizer"] = "" if tokenizer is None else tokenizer.digest
        return digests | {"template": fingerprint(Path(config.data.template or folder.path / FILE))[:12]}

    @classmethod
    def source_problems(cls, values: Mapping[str, Any], cache: str | Path, told: Sequence[str]) -> list[str]:
        return problems_of(ChatConfig, values.get("data", {}), content, told=told)

    @classmethod
    def size(cls, data: Any) -> int:
        return len(data.train) * data.train.length

    @classmethod
    def data_problems(cls, config: Any, data: Any) -> list[str]:
        return size_problems(config.model, config.seq_len, data.tokenizer.vocab_size)

    @classmethod
    def subject(cls, config: Any, data: Any, device: torch.device) -> Any:
        return None

    def show_passes(self, progress: Progress) -> None:
        super(CorpusObjective, self).show_passes(progress)
        counts = ", ".join(f"{count:,} {key.replace('_', ' ')}" for key, count in self.data.counts.items() if count)
        lost = self.data.counts["left_out"] + self.data.counts["shortened"]
        first, last = self.data.needed
        fixes = [f"set seq_len={first} to leave none out"] if self.data.counts["left_out"] and first < last else []
        fixes += [f"set seq_len={last} to keep all turns"] if lost else []
        text = f"{counts}, in {len(self.data.train):,} rows"
        progress({"event": "passes", "text": "; ".join([text, *fixes]), "warning": lost > 0})
        if note := self.data.template.note:
            progress({"event": "passes", "text": note, "warning": True})

    def batches(self) -> LabelledBatches:
        return LabelledBatches(self.data.train, self.config.batch_sizes, self.config.seed)

    def loss_fields(self, loss: float) -> dict[str, float]:
        return {}

    def validate(
        self, model: nn.Module, autocast: Autocast, show: Show | None = None, mesh: Mesh | None = None
    ) -> dict[str, float]:
        """Scores the held-out conversations: each number of a turn by itself, and all targets together."""
        batches = HeldOut(self.data.validation, scored_rows(self.config, 1 if mesh is None else mesh.dp))
        fields, nats, tokens = {}, 0.0, 0
        for done, number in enumerate(numbers := self.data.validation.turns):
            if show is not None:
                show(done, len(numbers))
            rows = [(ids, two.masked_fill(turns != number, IGNORE), starts) for ids, two, starts, turns in batches]
            result = score(model, rows, autocast=autocast, loss=self.loss(model), mesh=mesh)
            fields[f"validation_{TURNS[number - 1]}_turn"] = result.loss
            nats, tokens = nats + result.loss * result.tokens, tokens + result.tokens
        return {"validation_loss": nats / tokens, **fields}

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        turns = {f"{name}_turn": validation.get(f"validation_{name}_turn") for name in TURNS}
        return turns | self.data.counts | {"seq_len": self.config.seq_len}

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        return {*COUNTS, "seq_len", *(f"{name}_turn" for name in TURNS)}

    def files(self) -> dict[str, str]:
        return super().files() | {FILE: self.data.template.source}


def start_of(run: str | Path, template: str | Path | None = None) -> ChatTemplate:
    """Returns the chat template of a run or model folder, or the one in the file `template`, for its tokenizer.

    Raises:
        ConfigError: the folder lacks one of the two, or the template cannot be used.
    """
    folder = RunFolder.open(run)
    where, tokenizer = f"init_from: {folder.path} has no", read_tokenizer(folder)
    if tokenizer is None:
        raise ConfigError([f"{where} {TOKENIZER}; copy the tokenizer.json of the model into it"], "train")
    with checking("train", lambda line: Problem(f"data.template: {line}")):
        chat_template = load_chat_template(folder.path, tokenizer, None if template is None else Path(template))
    if chat_template is None:
        fix = f"set data.template to a Jinja file, or put {FILE} into the folder"
        raise ConfigError([f"{where} {FILE}; {fix}"], "train")
    return chat_template
