"""Pending tokens beside large states, so that a step reads a state and its pending tokens but writes it only every few.

A step of many slots is bound by the bytes of their states, each read and written, and writing every fourth token leaves
little more than the reading. `Mixer.pending_spec` says which layers have pending tokens, and of what. Each slot counts
for itself, on the GPU: a slot that a request takes begins at none, so that its tokens do not depend on when it came.
"""

import torch
from torch import Tensor

from linnet.layers.base import TensorSpec
from linnet.models import CausalLM, ModelState

INTERVAL = 4  # tokens between writes; with 8, the pending tokens take the time and memory that fewer writes save
_LEAST = 2**29  # below this many bytes of state, delayed writes save nothing: caches and launches take the time


def choose_interval(model: CausalLM, slots: int, device: torch.device) -> int:
    """Returns the tokens between writes: 1 (each token writes), or more where states are large."""
    if device.type != "cuda":
        return 1
    return INTERVAL if slots * _deferrable_bytes(model) >= _LEAST else 1


def add_pending(model: CausalLM, states: ModelState, slots: int, tokens: int) -> Tensor | None:
    """Adds to the states of all slots the buffers of up to `tokens` - 1 pending tokens.

    Returns:
        int32 [slots], the pending tokens of each slot, 0 now; the caller counts it from 0 to tokens - 1 and round.
        None if no layer has pending tokens.
    """
    pending = torch.zeros(slots, dtype=torch.int32, device=model.embedding.weight.device)
    specs = _specs(model, slots, tokens)
    for layer, buffers in specs.items():
        for name, spec in buffers.items():
            states[layer][name] = torch.zeros(spec.shape, dtype=spec.dtype, device=pending.device)
        states[layer]["pending"] = pending
        if hasattr(model.backbone.blocks[int(layer)].mixer, "waiting_spec"):  # a mixer written for Linnet 0.1
            states[layer]["waiting"] = pending
    return pending if specs else None


def pending_bytes(model: CausalLM, tokens: int = INTERVAL) -> int:
    """Returns the bytes that `add_pending` takes for one slot."""
    return sum(spec.bytes for buffers in _specs(model, 1, tokens).values() for spec in buffers.values())


def saved_bytes(model: CausalLM, tokens: int) -> int:
    """Returns by how many bytes per slot and token, on average, memory traffic is below that of always written states.

    A token reads half of the pending buffers, and all but the last in an interval write one place of them.
    """
    buffers = pending_bytes(model, tokens)
    return _deferrable_bytes(model) * (tokens - 1) // tokens - buffers // 2 - buffers // tokens


def _specs(model: CausalLM, slots: int, tokens: int) -> dict[str, dict[str, TensorSpec]]:
    specs = {str(index): block.pending_spec(slots, tokens) for index, block in enumerate(model.backbone.blocks)}
    return {layer: buffers for layer, buffers in specs.items() if buffers}


def _deferrable_bytes(model: CausalLM) -> int:
    """The bytes of state per slot that need not be written every token."""
    blocks = (model.backbone.blocks[int(layer)] for layer in _specs(model, 1, INTERVAL))
    return sum(spec.bytes for block in blocks for spec in block.state_spec(1, 1).values())
