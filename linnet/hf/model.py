"""A transformers model that wraps a Linnet model: from_pretrained, generate, pipeline, Trainer, PEFT."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import local_torch_dtype

from linnet.hf.cache import LinnetCache
from linnet.hf.config import LinnetConfig
from linnet.models import CausalLM, build_model, empty_model
from linnet.models.backbone import ModelState
from linnet.runs.model import full_precision


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
        for own, its in zip(self.model.parameters(), source.parameters(), strict=True):
            initialization.copy_(own, its)
        for own, its in zip(self.model.buffers(), source.buffers(), strict=True):
            initialization.copy_(own, its)

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
        found = [torch.zeros_like(x) for _ in range(len(self.model.backbone.blocks) + 1 if every else 1)]
        for count in counts.unique().tolist():
            if count == 0:
                continue
            rows = (counts == count).nonzero()[:, 0]
            places = mask[rows].nonzero()[:, 1].view(len(rows), count)
            hidden, states = self._run(x[rows[:, None], places], None if cache is None else cache.take(rows), every)
            found = [
                y.index_put((rows[:, None], places), part.to(y.dtype)) for y, part in zip(found, hidden, strict=True)
            ]
            if cache is not None:
                cache.put(rows, states)
        return found

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
    found: list[Tensor] = []
    handles = [block.register_forward_pre_hook(lambda _, given: found.append(given[0])) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
