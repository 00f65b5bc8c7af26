"""A residual block that a vector per row modulates: adaLN-zero (DiT, arXiv:2212.09748, section 3.2)."""

from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import Config
from linnet.layers.base import LayerContext, State
from linnet.layers.block import Block, with_dropout
from linnet.layers.non_causal import ScanOption
from linnet.layers.positions.grid import Grid


class ModulatedBlock(Block):
    """x += g1 * mixer(norm(x) (1 + s1) + b1), then x += g2 * channel(norm(x) (1 + s2) + b2).

    (b1, s1, g1, b2, s2, g2) = Linear(silu(condition)), which starts at zero, so that the block starts as the identity.
    Norms have no gain or bias of their own.
    """

    takes_condition = True
    affine = False

    def __init__(
        self,
        mixer: tuple[str, Config] | None,
        channel: tuple[str, Config] | None,
        context: LayerContext,
        dropout: float = 0.0,
        scan: ScanOption = "both",
        drop_path: float = 0.0,
    ):
        super().__init__(mixer, channel, context, dropout, scan, drop_path)
        self.modulation = nn.Linear(context.d_model, 3 * len(self.sublayers()) * context.d_model)
        self.modulation.starts_zero = True

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        values: Tensor | None = None,
        keep: tuple[Tensor, Tensor] | None = None,
        grid: Grid | None = None,
        condition: Tensor | None = None,
    ):
        """x [B, T, D] -> (x [B, T, D], state after the last token or None).

        Args:
            condition: [B, D]. The other arguments are those of `Block`.

        Raises:
            ValueError: without a condition.
        """
        if condition is None:
            raise ValueError("condition: is missing; a modulated block needs one vector per row, [B, D]")
        keys = self.mask_keys(dropout_keys, cu_seqlens)
        parts = list(self.modulation(F.silu(condition)).chunk(3 * len(self.sublayers()), -1))
        if self.mixer is not None:
            shift, scale, gate = (parts.pop(0) for _ in range(3))
            y, state = self.mix(modulate(self.mixer_norm(x), shift, scale), state, cu_seqlens, grid)
            x = x + gate[:, None] * with_dropout(y, keys, self.mixer_dropout, self.mixer_path)
        if self.channel is not None:
            shift, scale, gate = parts
            y, state = self.mix_channels(modulate(self.channel_norm(x), shift, scale), None, state, cu_seqlens, grid)
            x = x + gate[:, None] * with_dropout(y, keys, self.channel_dropout, self.channel_path)
        return (x if keep is None else x[keep]), state


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Returns x (1 + scale) + shift for x [B, T, D] and one shift and scale per row, [B, D] each.

    1 + scale has the dtype of x: scales start at zero, and in bfloat16 1 + 0.003 is 1.
    """
    return x * (1 + scale.to(x.dtype)[:, None]) + shift[:, None]
