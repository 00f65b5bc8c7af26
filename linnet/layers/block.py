"""A residual block: x + mixer(norm(x)), then x + channel(norm(x)); either part may be absent."""

from torch import Tensor, nn

from linnet.config import Config
from linnet.layers.base import LayerContext, State, TensorSpec, find_channel, find_mixer
from linnet.layers.norm import add_and_norm, build_norm, norm_and_keep


class Block(nn.Module):
    """Pre-norm block. `mixer` and `channel` are (name, options) pairs or None."""

    def __init__(self, mixer: tuple[str, Config] | None, channel: tuple[str, Config] | None, context: LayerContext):
        super().__init__()
        self.mixer = self.channel = None
        if mixer is not None:
            self.mixer = find_mixer(mixer[0])(mixer[1], context)
            owns_norm = self.mixer.owns_input_norm
            self.mixer_norm = (
                nn.Identity() if owns_norm else build_norm(context.norm, context.d_model, context.norm_eps)
            )
        if channel is not None:
            self.channel = find_channel(channel[0])(channel[1], context)
            self.channel_norm = build_norm(context.norm, context.d_model, context.norm_eps)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        """x [B, T, D] -> (x [B, T, D], state after the last token or None)."""
        if self.mixer is not None:
            y, x = norm_and_keep(self.mixer_norm, x)
            y, state = self.mixer(y, state, cu_seqlens)
            if self.channel is None:
                return x + y, state
            y, x = add_and_norm(self.channel_norm, y, x)
        else:
            y, x = norm_and_keep(self.channel_norm, x)
        return x + self.channel(y), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """x [B, D], one token."""
        if self.mixer is not None:
            y, state = self.mixer.step(self.mixer_norm(x), state)
            if self.channel is None:
                return x + y, state
            y, x = add_and_norm(self.channel_norm, y, x)
        else:
            y = self.channel_norm(x)
        return x + self.channel(y), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {} if self.mixer is None else self.mixer.state_spec(batch, context_length)

    def pending_spec(self, batch: int, tokens: int) -> dict[str, TensorSpec]:
        return {} if self.mixer is None else self.mixer.pending_spec(batch, tokens)

    def init_state(self, batch: int, context_length: int, device=None, dtype=None) -> State:
        return {} if self.mixer is None else self.mixer.init_state(batch, context_length, device, dtype)
