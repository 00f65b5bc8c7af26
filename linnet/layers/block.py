"""A residual block: x + mixer(norm(x)), then x + channel(norm(x)). Either sublayer may be absent.

With `context.norm_after` each sublayer reads the residual stream, and its output is normed: x + norm(mixer(x)) (OLMo 2,
arXiv:2501.00656). `context.residual_scale` multiplies what a sublayer adds (Granite).
"""

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from linnet.config import Config
from linnet.layers.base import LayerContext, State, TensorSpec, find_channel, find_mixer
from linnet.layers.dropout import Dropout, DropPath, row_keys
from linnet.layers.non_causal import ScanOption, mix_all, passes, refuse_next_token, refuse_state
from linnet.layers.norm import add_and_norm, build_norm, norm_and_keep
from linnet.layers.positions.grid import Grid
from linnet.layers.ring import mix

_PATHS = 1 << 20  # first site of drop paths, above every site of dropout


class Block(nn.Module):
    """Pre-norm block, or one with norms after its sublayers.

    Args:
        mixer, channel: (name, options) of the token mixer and the channel mixer, or None.
        dropout: probability of dropout on the output of each sublayer, before it is added to the residual stream.
        scan: order in which the mixer visits the tokens, in a model without causality (`linnet.layers.non_causal`).
        drop_path: probability with which each sublayer of this block is dropped for a row, in training.

    Attributes:
        layers: `mixer` and `channel` as given.
        takes_condition: True for a subclass whose `forward` has an argument `condition`, [B, D].
        affine: whether the norms of the blocks, and the last norm of the model, have a learned gain.
    """

    takes_condition: ClassVar[bool] = False
    affine: ClassVar[bool] = True

    def __init__(
        self,
        mixer: tuple[str, Config] | None,
        channel: tuple[str, Config] | None,
        context: LayerContext,
        dropout: float = 0.0,
        scan: ScanOption = "both",
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.layers = (mixer, channel)
        self.causal, self.scan, self.scan_sum = context.causal, scan, context.scan_sum
        self.norm_after, self.residual_scale = context.norm_after, context.residual_scale
        self.mixer = self.channel = None
        if mixer is not None:
            # The block itself runs a series: two passes of a mixer that scans from both ends.
            context = dataclasses.replace(context, scan="both" if scan == "series" else scan)
            self.mixer = find_mixer(mixer[0])(mixer[1], context)
            owns_norm = self.mixer.owns_input_norm and not self.norm_after
            self.mixer_norm = (
                nn.Identity() if owns_norm else build_norm(context.norm, context.d_model, context.norm_eps, self.affine)
            )
        if channel is not None:
            self.channel = find_channel(channel[0])(channel[1], context)
            self.channel_norm = build_norm(context.norm, context.d_model, context.norm_eps, self.affine)
        site = 1 + 2 * context.layer_index  # site 0 is the embedding's
        self.mixer_dropout = Dropout(dropout, site) if dropout else None
        self.channel_dropout = Dropout(dropout, site + 1) if dropout else None
        self.mixer_path = DropPath(drop_path, _PATHS + site) if drop_path else None
        self.channel_path = DropPath(drop_path, _PATHS + site + 1) if drop_path else None

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        keep: tuple[Tensor, Tensor] | None = None,
        grid: Grid | None = None,
    ):
        """x [B, T, D] -> (x [B, T, D], state after the last token or None).

        Args:
            dropout_keys: from `DropoutPosition`, [B, T, 2]; None applies no dropout and drops no path. They are an
                argument and not looked up inside, so that recomputing a block gives the masks of its first pass.
            keep: rows and columns, int64 [n] each, of the tokens to return, as [n, D]; None is all. The channel mixer
                computes only these.
            grid: of the tokens, in a model without causality; None is a sequence.
        """
        keys = self.mask_keys(dropout_keys, cu_seqlens)
        if self.mixer is not None:
            y, x = (x, x) if self.norm_after else norm_and_keep(self.mixer_norm, x)
            y, state = self.mix(y, state, cu_seqlens, grid)
            y = with_dropout(self._added(y, self.mixer_norm), keys, self.mixer_dropout, self.mixer_path)
            if keep is not None:
                x, y, keys = x[keep], y[keep], tuple(None if one is None else one[keep] for one in keys)
            if self.channel is None:
                return x + y, state
            y, x = self._add(y, x)
        else:
            if keep is not None:
                x, keys = x[keep], tuple(None if one is None else one[keep] for one in keys)
            y, x = (x, x) if self.norm_after else norm_and_keep(self.channel_norm, x)
        y = self._added(self.channel(y), self.channel_norm)
        return x + with_dropout(y, keys, self.channel_dropout, self.channel_path), state

    def _added(self, y: Tensor, norm: nn.Module) -> Tensor:
        """Returns what the output of a sublayer adds to the residual stream."""
        y = norm(y) if self.norm_after else y
        return y if self.residual_scale == 1.0 else y * self.residual_scale

    def _add(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the input of the channel mixer, and the residual stream x + y."""
        return (x + y, x + y) if self.norm_after else add_and_norm(self.channel_norm, y, x)

    def mix(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ) -> tuple[Tensor, State | None]:
        """Returns the output of the token mixer for its input x [B, T, D], and the state after the last token."""
        if self.causal:
            return mix(self.mixer, x, state, cu_seqlens)
        refuse_state(state)
        return mix_all(self.mixer, x, self.scan, cu_seqlens, grid, self.scan_sum), None

    def mask_keys(self, dropout_keys: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns the keys of dropout and of drop path for each token, [B, T, 2] each; None where nothing is dropped.

        Documents that are packed in one row are dropped apart in a model without causality, where each is a sample.
        """
        if dropout_keys is None:
            return None, None
        rows = None if self.causal else cu_seqlens
        return (
            None if self.mixer_dropout is None else dropout_keys,
            None if self.mixer_path is None else row_keys(dropout_keys, rows),
        )

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes one token, x [B, D]. Raises ValueError in a model without causality."""
        if not self.causal:
            refuse_next_token()
        if self.mixer is not None:
            y, state = self.mixer.step(x if self.norm_after else self.mixer_norm(x), state)
            y = self._added(y, self.mixer_norm)
            if self.channel is None:
                return x + y, state
            y, x = self._add(y, x)
        else:
            y = x if self.norm_after else self.channel_norm(x)
        return x + self._added(self.channel(y), self.channel_norm), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return {} if self.mixer is None or not self.causal else self.mixer.state_spec(batch, context_length)

    def pending_spec(self, batch: int, tokens: int) -> dict[str, TensorSpec]:
        return {} if self.mixer is None or not self.causal else self.mixer.pending_spec(batch, tokens)

    def init_state(self, batch: int, context_length: int, device=None, dtype=None) -> State:
        """Returns the state before the first token. Raises ValueError in a model without causality."""
        if not self.causal:
            refuse_next_token()
        return {} if self.mixer is None else self.mixer.init_state(batch, context_length, device, dtype)

    def flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of one sequence that no matrix product and no op counts (`Mixer.flops`)."""
        mixer = 0.0 if self.mixer is None else self.passes * self.mixer.flops(seq_len)
        return mixer + (0.0 if self.channel is None else self.channel.flops(seq_len))

    @property
    def passes(self) -> int:
        """Returns how often the mixer computes each token in one pass of the model."""
        return 1 if self.causal else passes(self.mixer, self.scan)


def with_dropout(
    y: Tensor, keys: tuple[Tensor | None, Tensor | None], dropout: Dropout | None, path: DropPath | None
) -> Tensor:
    """Returns the output of a sublayer after dropout and drop path, with the keys of `Block.mask_keys`."""
    if keys[0] is not None:
        y = dropout(y, keys[0])
    return y if keys[1] is None else path(y, keys[1])
