"""Caches are read up to the current length: a step gets the corner of each state that holds all tokens so far.

The lengths double, so that few CUDA graphs serve all contexts. The shortest is one block of keys of PyTorch's attention
on a CPU; with whole blocks a row's sums do not depend on how many empty slots stand behind its tokens.
"""

from torch import Tensor

from linnet.models import CausalLM, ModelState

SHORTEST = 512


class CacheLengths:
    """The lengths to which the states of a model are cut.

    Attributes:
        values: the lengths, rising. The last one is the context length, at which nothing is cut; it is the only one
            where no state depends on the length.
    """

    def __init__(self, model: CausalLM, context_length: int):
        self.values, length = [context_length], SHORTEST
        whole = model.backbone.state_bytes(context_length)
        while length < context_length and model.backbone.state_bytes(length) < whole:
            self.values.insert(-1, length)
            length *= 2
        self._shapes = {length: _shapes(model, length) for length in self.values[:-1]}

    def choose(self, tokens: int) -> int:
        """Returns the shortest length that holds `tokens`; the last one if none does, as with rings that wrap."""
        return next((length for length in self.values if length >= tokens), self.values[-1])

    def corner(self, states: ModelState, length: int) -> ModelState:
        """Returns views of the states that hold the first `length` tokens. Pending buffers stay whole."""
        if length not in self._shapes:
            return states
        return {
            layer: {name: _cut(x, self._shapes[length][layer].get(name)) for name, x in state.items()}
            for layer, state in states.items()
        }


def merge(states: ModelState, after: ModelState) -> ModelState:
    """Returns `states` with what the model made of their corner; tensors that were cut are written in place."""
    return {layer: {name: _put(x, after[layer][name]) for name, x in state.items()} for layer, state in states.items()}


def _shapes(model: CausalLM, length: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes behind the batch."""
    states = model.init_state(1, length, "meta")
    return {layer: {name: tuple(x.shape[1:]) for name, x in state.items()} for layer, state in states.items()}


def _cut(x: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    return x if shape is None or tuple(x.shape[1:]) == shape else x[(slice(None), *map(slice, shape))]


def _put(whole: Tensor, part: Tensor) -> Tensor:
    if whole.shape == part.shape:
        return part
    whole[tuple(map(slice, part.shape))] = part
    return whole
