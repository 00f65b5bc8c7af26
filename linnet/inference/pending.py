"""Where tokens wait beside large states, so that a step reads all of them but writes each only every few tokens.

A step of many slots is bound by the bytes of their states, each read and written, and writing every fourth token leaves
little more than the reading. Which layers can wait, and what for, they say in `Mixer.waiting_spec`. Slots count for
themselves, on the GPU: one that a request enters begins at none, so that its tokens do not depend on when it came.
"""

import torch
from torch import Tensor

from linnet.layers.base import TensorSpec
from linnet.models import CausalLM, ModelState

INTERVAL = 4  # tokens between writes; with 8, what waits takes the time, and in a full memory the slots, that it spares
_LEAST = 2**29  # bytes of states that a step reads; of fewer, caches and launches take what is spared


def choose_interval(model: CausalLM, slots: int, device: torch.device) -> int:
    """How many tokens there should be between writes: 1 (each token writes), or more where states are large."""
    if device.type != "cuda":
        return 1
    return INTERVAL if slots * _bytes_that_can_wait(model) >= _LEAST else 1


def make_room(model: CausalLM, states: ModelState, slots: int, tokens: int) -> Tensor | None:
    """Adds to the states of all slots where up to `tokens` - 1 tokens wait.

    Returns:
        int32 [slots]: how many wait in each slot, none now; whoever advances counts it from 0 to tokens - 1 and round.
        None where no layer can wait.
    """
    waiting = torch.zeros(slots, dtype=torch.int32, device=model.embedding.weight.device)
    specs = _specs(model, slots, tokens)
    for layer, room in specs.items():
        for name, spec in room.items():
            states[layer][name] = torch.zeros(spec.shape, dtype=spec.dtype, device=waiting.device)
        states[layer]["waiting"] = waiting
    return waiting if specs else None


def waiting_bytes(model: CausalLM, tokens: int = INTERVAL) -> int:
    """What `make_room` takes for one slot."""
    return sum(spec.bytes for room in _specs(model, 1, tokens).values() for spec in room.values())


def spared_bytes(model: CausalLM, tokens: int) -> int:
    """By how many bytes a slot and token move less than with states that are written every token, on average.

    A token reads half of where tokens wait, and all but the last in an interval write one of these.
    """
    room = waiting_bytes(model, tokens)
    return _bytes_that_can_wait(model) * (tokens - 1) // tokens - room // 2 - room // tokens


def _specs(model: CausalLM, slots: int, tokens: int) -> dict[str, dict[str, TensorSpec]]:
    specs = {str(index): block.waiting_spec(slots, tokens) for index, block in enumerate(model.backbone.blocks)}
    return {layer: room for layer, room in specs.items() if room}


def _bytes_that_can_wait(model: CausalLM) -> int:
    """Of one slot."""
    blocks = (model.backbone.blocks[int(layer)] for layer in _specs(model, 1, INTERVAL))
    return sum(spec.bytes for block in blocks for spec in block.state_spec(1, 1).values())
