"""A transformers model that wraps a Linnet model, with its configuration, its cache and its tokenizer: from_pretrained,
generate, pipeline, Trainer, PEFT.

transformers and programs on top of it do not discover plug-ins, so a saved folder carries a file of a few lines,
`modeling_linnet.py`, which imports Linnet. With `trust_remote_code=True` they run this file and need nothing else.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    Cache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    initialization,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import local_torch_dtype

from linnet.config import parse
from linnet.data import ByteTokenizer, Tokenizer
from linnet.data.chat.template import bos_token
from linnet.data.tokenizer import END_OF_DOCUMENT
from linnet.models import CausalLM, ModelConfig, ModelState, build_model, empty_model, upgrade
from linnet.runs.model import full_precision

MODULE = "modeling_linnet"
AUTO_MAP = {"AutoConfig": f"{MODULE}.LinnetConfig", "AutoModelForCausalLM": f"{MODULE}.LinnetForCausalLM"}
# transformers tells people to install what a modelling file imports, unless the import is inside `try`; `pip install
# linnet` would install another project.
CODE = '''"""This model is Linnet's: everything is in the package linnet-lm."""

try:
    from linnet.hf import LinnetConfig, LinnetForCausalLM
except ImportError as error:
    raise ImportError("this model needs Linnet: pip install 'linnet-lm[hf]'") from error

__all__ = ["LinnetConfig", "LinnetForCausalLM"]
'''


class LinnetConfig(PreTrainedConfig):
    """config.json of an exported model.

    Attributes:
        model: the values of a `linnet.models.ModelConfig`, or the name of a recipe; missing values have their defaults.
        use_cache: whether generation keeps states between tokens.
        tie_word_embeddings: follows `model`.

    `vocab_size`, `hidden_size` and `num_hidden_layers` are read from `model`, for programs that use these names.

    Raises:
        ConfigError: `model` is not a valid configuration, or names a mixer from outside the package that was not
            imported before.
    """

    model_type = "linnet"
    keys_to_ignore_at_inference = ["past_key_values"]

    model: dict[str, Any] | str = "tnl-10m"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        values = {"recipe": self.model} if isinstance(self.model, str) else upgrade(self.model)
        self.model = parse(ModelConfig, values, "model of config.json").model_dump(mode="json")
        self.tie_word_embeddings = self.model["tie_embeddings"]
        super().__post_init__(**kwargs)
        self.auto_map = dict(AUTO_MAP)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes config.json, and the modelling file that its `auto_map` names, for `trust_remote_code=True`."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{MODULE}.py").write_text(CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: transformers would copy this module into the folders that it saves; `CODE` stands there."""

    def linnet(self) -> ModelConfig:
        """Returns the configuration from which Linnet builds the model."""
        return parse(ModelConfig, self.model, "model of config.json")

    @property
    def vocab_size(self) -> int:
        return self.model["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, rows: int) -> None:  # transformers sets it when it resizes the embeddings
        self.model = {**self.model, "vocab_size": int(rows)}

    @property
    def hidden_size(self) -> int:
        return self.model["d_model"]

    @property
    def num_hidden_layers(self) -> int:
        return self.linnet().num_layers


class LinnetCache(Cache):
    """The states of all layers, one row per sequence of the batch.

    Linear-complexity layers have states of constant size. Attention layers have a key-value cache, which grows by
    doubling. transformers' own caches have one object per layer and count tokens only in attention layers, so
    `generate` would fail for a model without attention. This cache counts tokens itself.

    Attributes:
        states: states as `CausalLM.init_state` makes them; None before the first token.
        seen: number of columns of the batch read so far, including padding.
        capacity: number of columns for which the states have room.
    """

    is_compileable = False

    def __init__(self):
        super().__init__(layers=[])
        self.states: ModelState | None = None
        self.seen = self.capacity = 0

    def reserve(self, model: CausalLM, batch: int, tokens: int, device: torch.device) -> None:
        """Makes room for `tokens` more columns. Raises ValueError if the cache has another number of sequences."""
        if self.states is not None and self.batch_size != batch:
            raise ValueError(f"the cache holds {self.batch_size} sequences, and {batch} were given; use a new cache")
        needed = self.seen + tokens
        if self.states is not None and needed <= self.capacity:
            return
        self.capacity = max(64, 1 << (needed - 1).bit_length())
        larger = model.init_state(batch, self.capacity, device)
        # A state whose size depends on the length is filled from its start, so the old one goes to the first places.
        for name, state in (self.states or {}).items():
            for key, old in state.items():
                if old.shape != larger[name][key].shape:
                    larger[name][key][tuple(slice(size) for size in old.shape)] = old
                else:
                    larger[name][key] = old
        self.states = larger

    def take(self, rows: Tensor) -> ModelState:
        """Returns copies of the states of some sequences; rows may repeat."""
        return {
            name: {key: tensor.index_select(0, rows) for key, tensor in state.items()}
            for name, state in self.states.items()
        }

    def put(self, rows: Tensor, states: ModelState) -> None:
        """Replaces the states of some sequences."""
        self.states = {
            name: {key: tensor.index_copy(0, rows, states[name][key]) for key, tensor in state.items()}
            for name, state in self.states.items()
        }

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        for state in (self.states or {}).values():
            for tensor in state.values():
                return tensor.shape[0]
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.seen > 0

    def reset(self) -> None:
        self.states, self.seen, self.capacity = None, 0, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.states is not None:
            self.states = self.take(indices.to(self._device()))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.states is not None:
            self.states = self.take(torch.arange(self.batch_size, device=self._device()).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError, because a recurrent state cannot drop its last tokens."""
        raise ValueError("a recurrent state cannot drop tokens: generate without an assistant model, from a new cache")

    def update(self, *args, **kwargs):
        raise ValueError("Linnet's layers keep their states themselves; pass the cache to a LinnetForCausalLM")

    def __repr__(self) -> str:
        return f"LinnetCache({self.batch_size if self.states is not None else 'no'} sequences, {self.seen} tokens)"

    def _device(self) -> torch.device:
        return next(tensor.device for state in self.states.values() for tensor in state.values())


class LinnetForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model of transformers. Its `model` is the `linnet.models.CausalLM`.

    Parameters have Linnet's names with the prefix `model.`. Padding, on either side or in between, is left out of the
    computation, so that a sequence gives the same logits as without padding. Weights that a checkpoint lacks are
    initialized as in `linnet.models.build_model`, and transformers prints their names.
    """

    config_class = LinnetConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True  # forward takes num_items_in_batch
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # what softmax attention runs; every other attn_implementation but eager is refused
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _is_stateful = True  # refuses generation with an assistant model, which must drop tokens from the cache

    def __init__(self, config: LinnetConfig):
        super().__init__(config)
        self.model = CausalLM(config.linnet())
        self.model.apply(_widen)
        self.gradient_checkpointing = False
        self._keep_in_fp32_modules_strict = {f"model.{name}" for name in full_precision(self.model)}
        self.post_init()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: transformers would copy this module into the folders that it saves (`LinnetConfig`)."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` creates the cache, not `generate`

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initializes parameters that the checkpoint lacks, and the fixed tables, which no checkpoint contains."""
        missing = [p for p in self.model.parameters() if not getattr(p, "_is_hf_initialized", False)]
        config = self.config.linnet()
        with local_torch_dtype(torch.float32):  # rates in bfloat16 would be rounded before they are copied
            source = build_model(config, torch.initial_seed() % 2**31) if missing else empty_model(config)
        for target, its in zip(self.model.parameters(), source.parameters(), strict=True):
            initialization.copy_(target, its)
        for target, its in zip(self.model.buffers(), source.buffers(), strict=True):
            initialization.copy_(target, its)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LinnetForCausalLM":
        """Casts and moves the model, as `to`, `half` and others do; keeps what needs float32, and all tables, in it."""
        names, exact = full_precision(self.model), {id(table) for table in self.buffers()}
        for name, parameter in self.model.named_parameters():
            if name in names:
                exact |= {id(parameter), id(parameter.grad)} - {id(None)}

        def apply(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrow = id(tensor) in exact and result.is_floating_point() and result.dtype.itemsize < 4
            return tensor.to(result.device, torch.float32) if narrow else result

        return super()._apply(apply, recurse)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the head, or None if it shares the embedding's weight."""
        return self.model.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: LinnetCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """Returns logits, the loss if labels are given, the cache after the last token, and hidden states on request.

        Args:
            input_ids: int64 [B, T]. Give these or `inputs_embeds`.
            inputs_embeds: [B, T, D], embeddings as `get_input_embeddings` gives them.
            attention_mask: [B, T], or with a cache also [B, all columns so far]; 0 is padding.
            past_key_values: cache of an earlier call, to continue from.
            labels: int64 [B, T], not shifted; -100 does not count.
            use_cache: whether to return a cache. Default: `config.use_cache`, and False in training.
            logits_to_keep: number of last positions (0: all), or a tensor of positions.
            num_items_in_batch: divisor of the loss; None takes the mean.
            output_hidden_states: also return the input of each block and the features after the last norm, each
                [B, T, D], zero where there is padding. Default: `config.output_hidden_states`.

        Raises:
            ValueError: attention weights are requested, both or none of `input_ids` and
                `inputs_embeds` are given, the mask has another shape, or the cache has another class or batch size.
        """
        if output_attentions:
            raise ValueError("output_attentions: Linnet's layers compute no attention weights; leave this option off")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: give exactly one of the two")
        x = self.model.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if self.model.config.embedding_scale != 1.0:
            x = x * self.model.config.embedding_scale
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is not None and not isinstance(past_key_values, LinnetCache):
            name = type(past_key_values).__name__
            raise ValueError(f"past_key_values: is a {name}; use a linnet.hf.LinnetCache, or None for a new cache")
        cache = past_key_values if past_key_values is not None else LinnetCache() if use_cache else None
        mask = self._mask(attention_mask, x, 0 if cache is None else cache.seen)
        if cache is not None:
            cache.reserve(self.model, *x.shape[:2], x.device)
        hidden = (
            self._whole(x, cache, output_hidden_states)
            if mask is None
            else self._padded(x, mask, cache, output_hidden_states)
        )
        x = hidden[-1]
        if cache is not None:
            cache.seen += x.shape[1]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
            )
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=tuple(hidden) if output_hidden_states else None,
        )
        return output if return_dict is not False and self.config.return_dict else output.to_tuple()

    def _mask(self, mask: Tensor | None, x: Tensor, seen: int) -> Tensor | None:
        """Returns which tokens of x [B, T, D] are not padding, bool [B, T], or None if there is no padding."""
        if mask is None:
            return None
        batch, length = x.shape[:2]
        if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (length, seen + length):
            raise ValueError(
                f"attention_mask: has shape {list(mask.shape)}; use [{batch}, {seen + length}], with 0 for padding"
            )
        mask = mask[:, -length:].to(x.device).bool()
        return None if mask.all() else mask

    def _whole(self, x: Tensor, cache: LinnetCache | None, every: bool) -> list[Tensor]:
        """Runs the backbone over x [B, T, D] without padding; returns its features, after those of `_run`."""
        if cache is None:
            return self._run(x, None, every)[0]
        if x.shape[1] == 1 and not torch.is_grad_enabled() and not every:  # a step writes its states in place
            x, cache.states = self.model.backbone.step(x[:, 0], cache.states)
            return [x[:, None]]
        hidden, cache.states = self._run(x, cache.states, every)
        return hidden

    def _padded(self, x: Tensor, mask: Tensor, cache: LinnetCache | None, every: bool) -> list[Tensor]:
        """Runs the backbone over the tokens of x [B, T, D] in `mask`, and returns zeros at the other places.

        Rows with the same number of tokens are computed together.
        """
        if cache is None and not (mask[:, 1:] & ~mask[:, :-1]).any():  # padding at the right: the model is causal
            hidden = self._run(x, None, every)[0]
            return [part * mask[..., None] for part in hidden] if every else hidden
        counts = mask.sum(1)
        outputs = [torch.zeros_like(x) for _ in range(len(self.model.backbone.blocks) + 1 if every else 1)]
        for count in counts.unique().tolist():
            if count == 0:
                continue
            rows = (counts == count).nonzero()[:, 0]
            places = mask[rows].nonzero()[:, 1].view(len(rows), count)
            hidden, states = self._run(x[rows[:, None], places], None if cache is None else cache.take(rows), every)
            outputs = [
                y.index_put((rows[:, None], places), part.to(y.dtype)) for y, part in zip(outputs, hidden, strict=True)
            ]
            if cache is not None:
                cache.put(rows, states)
        return outputs

    def _run(self, x: Tensor, states: ModelState | None, every: bool) -> tuple[list[Tensor], ModelState | None]:
        """Runs the backbone. Returns its features, preceded by the input of each block if `every` is set, and the
        states after the last token."""
        if not every:
            y, states = self.model.backbone(x, states)
            return [y], states
        with _inputs(self.model.backbone.blocks) as hidden:
            y, states = self.model.backbone(x, states)
        return [*hidden, y], states

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Makes every `every_n_layers`-th block compute its activations again in the backward pass of training."""
        self.gradient_checkpointing = enable
        for index, block in enumerate(self.model.backbone.blocks):
            vars(block).pop("forward", None)
            if enable and index % every_n_layers == 0:
                block.forward = partial(_recomputed, block.forward, gradient_checkpointing_func)


def _widen(module: nn.Module) -> None:
    """Makes the parameters that a module names in `full_precision` float32, whatever torch's default dtype is."""
    for name in getattr(module, "full_precision", ()):
        if isinstance(parameter := getattr(module, name, None), nn.Parameter) and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()


def _recomputed(forward: Callable[..., Any], recompute: Callable[..., Any], x: Tensor, state=None, *rest: Any):
    """Calls a block's `forward` through torch's checkpoint, unless it carries a state or needs no gradient."""
    if state is not None or not torch.is_grad_enabled():
        return forward(x, state, *rest)
    return recompute(forward, x, state, *rest)


@contextmanager
def _inputs(blocks: nn.ModuleList) -> Iterator[list[Tensor]]:
    """Collects the input of each block while a backbone runs."""
    inputs: list[Tensor] = []
    handles = [block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])) for block in blocks]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


class LinnetTokenizer(PreTrainedTokenizerFast):
    """A transformers tokenizer that keeps the spelling of its own special tokens in a text apart from these tokens.

    Special tokens that a user adds are recognised in a text, and chat templates write all special tokens. transformers
    without Linnet loads a saved folder as its own class, for which `split_special_tokens` applies to all special tokens
    that are added afterwards.
    """

    def _add_tokens(self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False) -> int:
        if self.split_special_tokens:  # which the library applies to every token that it knows as special
            guarded = {token.content for token in self.added_tokens_decoder.values() if token.special}
            tokens = [AddedToken(t, special=special_tokens) if isinstance(t, str) else t for t in new_tokens]
            new_tokens = [token if token.content in guarded else _recognised(token) for token in tokens]
        return super()._add_tokens(new_tokens)

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, *args: Any, **kwargs: Any) -> str:
        if skip_special_tokens and not isinstance(token_ids, dict):
            special, ids = set(self.all_special_ids), [token_ids] if isinstance(token_ids, int) else token_ids
            token_ids = [number for number in ids if number not in special]
        return super()._decode(token_ids, skip_special_tokens, *args, **kwargs)

    def apply_chat_template(self, *args: Any, tokenizer_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        options = {"split_special_tokens": False, **(tokenizer_kwargs or {})}
        return super().apply_chat_template(*args, tokenizer_kwargs=options, **kwargs)


def _recognised(token: AddedToken) -> AddedToken:
    """Returns the token without the mark of special tokens."""
    sides = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
    return AddedToken(token.content, normalized=token.normalized, **sides)


def to_transformers(tokenizer: Tokenizer, chat_template: str | None = None) -> LinnetTokenizer:
    """Returns the tokenizer for transformers. It pads on the left with the end of a document, as generation needs.

    The spelling of a special token in a text stays text, as everywhere in Linnet. Tokens that are added afterwards are
    recognised. With a chat template the spelling of each becomes the token, because the template writes special tokens
    by their spelling. A byte tokenizer becomes a byte-level tokenizer with one token per byte, whose id 0 is the end of
    a document. It drops NUL from text, which Linnet refuses.
    """
    if isinstance(tokenizer, ByteTokenizer):
        inner, end = _bytes(tokenizer), END_OF_DOCUMENT
    else:
        values = json.loads(tokenizer.to_library())
        if not tokenizer.prompt_start:
            values["post_processor"] = None  # it would add tokens that the training text does not have
        inner = tokenizers.Tokenizer.from_str(json.dumps(values))
        end = inner.id_to_token(tokenizer.end_of_document)
        if tokenizer.end_of_document not in inner.get_added_tokens_decoder():
            inner.add_special_tokens([end])
    return LinnetTokenizer(
        tokenizer_object=inner,
        bos_token=bos_token(tokenizer) or None,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        split_special_tokens=chat_template is None,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _bytes(tokenizer: ByteTokenizer) -> tokenizers.Tokenizer:
    # The byte-level alphabet writes each byte as one character; ids are the bytes themselves.
    alphabet = dict(zip(_order(), sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord), strict=True))
    vocab = {END_OF_DOCUMENT: tokenizer.end_of_document} | {alphabet[byte]: byte for byte in range(1, 256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_DOCUMENT])
    return inner


def _order() -> list[int]:
    """Returns the 256 bytes in the order of their characters: printable bytes, which map to themselves, come first."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return shown + [byte for byte in range(256) if byte not in shown]
