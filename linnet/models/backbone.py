"""The stack between embedding and head: an optional TPE, the blocks of the layout, a final norm."""

from collections import Counter

import torch
from torch import Tensor, nn

from linnet.layers.base import LayerContext, State
from linnet.layers.block import Block
from linnet.layers.norm import build_norm
from linnet.layers.positions.tpe import Tpe
from linnet.models.config import ModelConfig

ModelState = dict[str, State]  # "tpe" and the blocks' numbers -> what the layer carries
FAR = 1 << 40  # a context length that no window and no recurrence minds


class Backbone(nn.Module):
    """x [B, T, D] -> [B, T, D]. `shared` owns what layers share, so it is saved and counted once."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.tpe = Tpe(config.tpe, config.d_model) if config.tpe is not None else None
        self.shared = nn.ModuleDict()
        self.blocks = nn.ModuleList()
        specs = config.blocks
        options = {name: config.layer_options(name) for name in config.options}
        counts, seen = Counter(spec.mixer for spec in specs), Counter()
        for index, spec in enumerate(specs):
            context = LayerContext(
                d_model=config.d_model,
                layer_index=index,
                num_layers=len(specs),
                mixer_index=seen[spec.mixer],
                mixer_count=counts[spec.mixer],
                norm=config.norm,
                norm_eps=config.norm_eps,
                shared=self.shared,
            )
            seen[spec.mixer] += 1
            mixer = (spec.mixer, options[spec.mixer]) if spec.mixer else None
            channel = (spec.channel, options[spec.channel]) if spec.channel else None
            self.blocks.append(Block(mixer, channel, context))
        self.norm = build_norm(config.norm, config.d_model, config.norm_eps)

    def forward(self, x: Tensor, states: ModelState | None = None, cu_seqlens: Tensor | None = None):
        after: ModelState | None = None if states is None else {}
        if self.tpe is not None:
            x, state = self.tpe(x, None if states is None else states["tpe"], cu_seqlens)
            if after is not None:
                after["tpe"] = state
        for index, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[str(index)], cu_seqlens)
            if after is not None:
                after[str(index)] = state
        return self.norm(x), after

    def step(self, x: Tensor, states: ModelState) -> tuple[Tensor, ModelState]:
        after: ModelState = {}
        if self.tpe is not None:
            x, after["tpe"] = self.tpe.step(x, states["tpe"])
        for index, block in enumerate(self.blocks):
            x, after[str(index)] = block.step(x, states[str(index)])
        return self.norm(x), after

    def init_state(self, batch: int, context_length: int, device=None, dtype: torch.dtype | None = None) -> ModelState:
        states: ModelState = {}
        if self.tpe is not None:
            modes = self.tpe.state_spec(batch, context_length)["modes"]
            states["tpe"] = {"modes": torch.zeros(modes.shape, dtype=dtype or modes.dtype, device=device)}
        for index, block in enumerate(self.blocks):
            states[str(index)] = block.init_state(batch, context_length, device, dtype)
        return states

    def state_bytes(self, context_length: int) -> int:
        """Bytes carried between tokens for one sequence at a context length."""
        layers = [block.state_spec(1, context_length) for block in self.blocks]
        if self.tpe is not None:
            layers.append(self.tpe.state_spec(1, context_length))
        return sum(spec.bytes for layer in layers for spec in layer.values())

    @property
    def state_grows(self) -> bool:
        """Whether a sequence carries more the longer it is, as with a KV cache without a window."""
        return self.state_bytes(FAR) != self.state_bytes(2 * FAR)
