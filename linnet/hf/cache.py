"""The states of Linnet's layers as a cache for transformers' `generate`."""

import torch
from torch import Tensor
from transformers import Cache

from linnet.models import CausalLM, ModelState


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
