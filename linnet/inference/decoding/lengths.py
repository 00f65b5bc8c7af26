"""Limits reads of KV caches to the current length: a step gets views of the states that hold all tokens so far.

The lengths double, so that a few CUDA graphs cover all contexts. The shortest length is one block of keys in PyTorch's
CPU attention. With whole blocks, the sums of a row do not depend on how many empty places follow its tokens.
"""

from torch import Tensor

from linnet.models import CausalLM, ModelState

SHORTEST = 512


class CacheLengths:
    """The lengths to which the states of a model are cut.

    Attributes:
        values: the lengths in ascending order. The last one is the context length, at which nothing is cut. It is the
            only one if no state depends on the length.
    """

    def __init__(self, model: CausalLM, context_length: int):
        self.values, length = [context_length], SHORTEST
        whole = model.backbone.state_bytes(context_length)
        while length < context_length and model.backbone.state_bytes(length) < whole:
            self.values.insert(-1, length)
            length *= 2
        self._shapes = {length: _shapes(model, length) for length in self.values[:-1]}

    def choose(self, tokens: int) -> int:
        """Returns the shortest length that holds `tokens`, or the last one if none does, as for ring buffers."""
        return next((length for length in self.values if length >= tokens), self.values[-1])

    def corner(self, states: ModelState, length: int) -> ModelState:
        """Returns views of the states that hold the first `length` tokens. Pending buffers are not cut."""
        if length not in self._shapes:
            return states
        return {
            layer: {name: _cut(x, self._shapes[length][layer].get(name)) for name, x in state.items()}
            for layer, state in states.items()
        }


def merge(states: ModelState, after: ModelState) -> ModelState:
    """Returns `states` updated with `after`, the states that a model returned for a `corner` of them.

    Tensors that were cut are written in place.
    """
    return {layer: {name: _put(x, after[layer][name]) for name, x in state.items()} for layer, state in states.items()}


def _shapes(model: CausalLM, length: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shape of each state for `length` tokens, without the batch dimension."""
    states = model.init_state(1, length, "meta")
    return {layer: {name: tuple(x.shape[1:]) for name, x in state.items()} for layer, state in states.items()}


def _cut(x: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    return x if shape is None or tuple(x.shape[1:]) == shape else x[(slice(None), *map(slice, shape))]


def _put(whole: Tensor, part: Tensor) -> Tensor:
    if whole.shape == part.shape:
        return part
    whole[tuple(map(slice, part.shape))] = part
    return whole
