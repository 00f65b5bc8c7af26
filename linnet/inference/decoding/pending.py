"""Pending buffers for large states: a step reads a state and its pending tokens, but writes the state only every few.

The time of a step with many slots is bound by reading and writing their states. Writing every fourth token removes most
of the cost of the writes. `Mixer.pending_spec` says which layers have pending buffers, and their shapes. Each slot has
its own counter on the GPU. It starts at 0 when a request takes the slot, so that the tokens of a request do not depend
on when it came.
"""

import torch
from torch import Tensor

from linnet.layers.base import TensorSpec
from linnet.models import CausalLM, ModelState

INTERVAL = 4  # tokens between writes; with 8, the pending tokens take the time and memory that fewer writes save
_LEAST = 2**29  # below this many bytes of state, delayed writes save nothing: caches and launches take the time


def choose_interval(model: CausalLM, slots: int, device: torch.device) -> int:
    """Returns the tokens between two writes of a state: 1 (every token writes), or more if states are large."""
    if device.type != "cuda":
        return 1
    return INTERVAL if slots * _deferrable_bytes(model) >= _LEAST else 1


def add_pending(model: CausalLM, states: ModelState, slots: int, tokens: int) -> Tensor | None:
    """Adds pending buffers for up to `tokens` - 1 tokens to the states of all slots.

    Returns:
        int32 [slots], the number of pending tokens of each slot, all 0. The caller adds 1 per token, modulo `tokens`.
        None if no layer has pending buffers.
    """
    pending = torch.zeros(slots, dtype=torch.int32, device=model.embedding.weight.device)
    specs = _specs(model, slots, tokens)
    for layer, buffers in specs.items():
        for name, spec in buffers.items():
            states[layer][name] = torch.zeros(spec.shape, dtype=spec.dtype, device=pending.device)
        states[layer]["pending"] = pending
    return pending if specs else None


def pending_bytes(model: CausalLM, tokens: int = INTERVAL) -> int:
    """Returns the bytes that `add_pending` allocates per slot."""
    return sum(spec.bytes for buffers in _specs(model, 1, tokens).values() for spec in buffers.values())


def saved_bytes(model: CausalLM, tokens: int) -> int:
    """Returns the average memory traffic saved, in bytes per slot and token, compared with writing at every token.

    On average a token reads half of the pending buffers. All tokens but the last of an interval write one place there.
    """
    buffers = pending_bytes(model, tokens)
    return _deferrable_bytes(model) * (tokens - 1) // tokens - buffers // 2 - buffers // tokens


def _specs(model: CausalLM, slots: int, tokens: int) -> dict[str, dict[str, TensorSpec]]:
    specs = {str(index): block.pending_spec(slots, tokens) for index, block in enumerate(model.backbone.blocks)}
    return {layer: buffers for layer, buffers in specs.items() if buffers}


def _deferrable_bytes(model: CausalLM) -> int:
    """Returns the bytes of state per slot whose writes can be delayed."""
    blocks = (model.backbone.blocks[int(layer)] for layer in _specs(model, 1, INTERVAL))
    return sum(spec.bytes for block in blocks for spec in block.state_spec(1, 1).values())
