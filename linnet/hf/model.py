"""A transformers model that wraps a Linnet model: from_pretrained, generate, pipeline, Trainer, PEFT."""

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_outputs import CausalLMOutputWithPast

from linnet.hf.cache import LinnetCache
from linnet.hf.config import LinnetConfig
from linnet.models import CausalLM, build_model, empty_model
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
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _is_stateful = True  # refuses generation with an assistant model, which must drop tokens from the cache

    def __init__(self, config: LinnetConfig):
        super().__init__(config)
        self.model = CausalLM(config.linnet())
        self._keep_in_fp32_modules_strict = {f"model.{name}" for name in full_precision(self.model)}
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` creates the cache, not `generate`

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initializes parameters that the checkpoint lacks, and the fixed tables, which no checkpoint contains."""
        missing = [p for p in self.model.parameters() if not getattr(p, "_is_hf_initialized", False)]
        config = self.config.linnet()
        source = build_model(config, torch.initial_seed() % 2**31) if missing else empty_model(config)
        for own, its in zip(self.model.parameters(), source.parameters(), strict=True):
            initialization.copy_(own, its)
        for own, its in zip(self.model.buffers(), source.buffers(), strict=True):
            initialization.copy_(own, its)

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
        """Returns logits, the loss if labels are given, and the cache after the last token.

        Args:
            input_ids: int64 [B, T]. Give these or `inputs_embeds`.
            inputs_embeds: [B, T, D], embeddings as `get_input_embeddings` gives them.
            attention_mask: [B, T], or with a cache also [B, all columns so far]; 0 is padding.
            past_key_values: cache of an earlier call, to continue from.
            labels: int64 [B, T], not shifted; -100 does not count.
            use_cache: whether to return a cache. Default: `config.use_cache`, and False in training.
            logits_to_keep: number of last positions (0: all), or a tensor of positions.
            num_items_in_batch: divisor of the loss; None takes the mean.

        Raises:
            ValueError: attention weights or hidden states are requested, both or none of `input_ids` and
                `inputs_embeds` are given, the mask has another shape, or the cache has another class or batch size.
        """
        if output_attentions or output_hidden_states:
            raise ValueError(
                "output_attentions, output_hidden_states: Linnet's models return neither; leave both options off"
            )
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
        x = self._whole(x, cache) if mask is None else self._padded(x, mask, cache)
        if cache is not None:
            cache.seen += x.shape[1]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
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

    def _whole(self, x: Tensor, cache: LinnetCache | None) -> Tensor:
        """Runs the backbone over x [B, T, D] without padding."""
        if cache is None:
            return self.model.backbone(x)[0]
        if x.shape[1] == 1 and not torch.is_grad_enabled():  # a step writes its states in place
            x, cache.states = self.model.backbone.step(x[:, 0], cache.states)
            return x[:, None]
        x, cache.states = self.model.backbone(x, cache.states)
        return x

    def _padded(self, x: Tensor, mask: Tensor, cache: LinnetCache | None) -> Tensor:
        """Runs the backbone over the tokens of x [B, T, D] in `mask`, and returns zeros at the other places.

        Rows with the same number of tokens are computed together.
        """
        if cache is None and not (mask[:, 1:] & ~mask[:, :-1]).any():
            return self.model.backbone(x)[0]  # the model is causal: padding at the right does not change the tokens
        counts = mask.sum(1)
        y = torch.zeros_like(x)
        for count in counts.unique().tolist():
            if count == 0:
                continue
            rows = (counts == count).nonzero()[:, 0]
            places = mask[rows].nonzero()[:, 1].view(len(rows), count)
            part = x[rows[:, None], places]
            part, states = self.model.backbone(part, None if cache is None else cache.take(rows))
            y = y.index_put((rows[:, None], places), part)
            if cache is not None:
                cache.put(rows, states)
        return y
