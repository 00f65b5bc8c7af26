"""A residual block: x + mixer(norm(x)), then x + channel(norm(x)). Either sublayer may be absent."""

from torch import Tensor, nn

from linnet.config import Config
from linnet.layers.base import LayerContext, State, TensorSpec, find_channel, find_mixer
from linnet.layers.dropout import Dropout
from linnet.layers.norm import add_and_norm, build_norm, norm_and_keep
from linnet.layers.ring import mix


class Block(nn.Module):
    """Pre-norm block.

    Args:
        mixer, channel: (name, options) of the token mixer and the channel mixer, or None.
        dropout: probability of dropout on the output of each sublayer, before it is added to the residual stream.

    Attributes:
        layers: `mixer` and `channel` as given.
    """

    def __init__(
        self,
        mixer: tuple[str, Config] | None,
        channel: tuple[str, Config] | None,
        context: LayerContext,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.layers = (mixer, channel)
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
        site = 1 + 2 * context.layer_index  # site 0 is the embedding's
        self.mixer_dropout = Dropout(dropout, site) if dropout else None
        self.channel_dropout = Dropout(dropout, site + 1) if dropout else None

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        keep: tuple[Tensor, Tensor] | None = None,
    ):
        """x [B, T, D] -> (x [B, T, D], state after the last token or None).

        Args:
            dropout_keys: from `DropoutPosition`, [B, T, 2]; None applies no dropout. They are an argument and not
                looked up inside, so that recomputing a block gives the masks of its first pass.
            keep: rows and columns, int64 [n] each, of the tokens to return, as [n, D]; None is all. The channel mixer
                computes only these.
        """
        if self.mixer is not None:
            y, x = norm_and_keep(self.mixer_norm, x)
            y, state = mix(self.mixer, y, state, cu_seqlens)
            if dropout_keys is not None:
                y = self.mixer_dropout(y, dropout_keys)
            if keep is not None:
                x, y, dropout_keys = x[keep], y[keep], None if dropout_keys is None else dropout_keys[keep]
            if self.channel is None:
                return x + y, state
            y, x = add_and_norm(self.channel_norm, y, x)
        else:
            y, x = norm_and_keep(self.channel_norm, x if keep is None else x[keep])
        y = self.channel(y)
        return x + (y if dropout_keys is None else self.channel_dropout(y, dropout_keys)), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes one token, x [B, D]."""
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
