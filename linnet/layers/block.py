"""A residual block: x + mixer(norm(x)), then x + channel(norm(x)). Either sublayer may be absent.

With `context.norm_after` each sublayer reads the residual stream, and its output is normed: x + norm(mixer(x)) (OLMo 2,
arXiv:2501.00656). `context.residual_scale` multiplies what a sublayer adds (Granite). With `context.residual_norm`, a,
the stream itself is normed: a norm(x) + mixer(norm(x)) (MiniMax-01, arXiv:2501.08313).
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import Config
from linnet.layers.base import Channel, LayerContext, Mixer, State, TensorSpec, find_channel, find_mixer
from linnet.layers.dropout import Dropout, DropPath, row_keys
from linnet.layers.non_causal import ScanOption, mix_all, passes, refuse_next_token, refuse_state
from linnet.layers.norm import add_and_norm, build_norm, norm_and_keep
from linnet.layers.positions import Grid
from linnet.layers.ring import mix

Stream = Tensor | tuple[Tensor, Tensor]  # the residual stream, or two tensors whose sum it is
_PATHS = 1 << 20  # first site of drop paths, above every site of dropout
_CHANNEL = "channel_"  # start of the names of the channel mixer's state


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
        shares: name of the mixer if it shares values with later layers (`Mixer.shares_values`), else "". `forward` and
            `step` then get these values, None in the first layer, and return them after the state.
        defers_sum: where gradients are computed, `forward` returns its last sum as a pair of terms, which the next norm
            adds in its own pass over memory (`Backbone.defer_sums`).
        defers_views: whether it does so if a term is a view, as a product with a bias is.
    """

    takes_condition: ClassVar[bool] = False
    affine: ClassVar[bool] = True
    defers_sum: bool = False
    defers_views: bool = True

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
        self.residual_norm = context.residual_norm
        self.mixer = self.channel = None
        self.shares = ""
        if mixer is not None:
            # The block itself runs a series: two passes of a mixer that scans from both ends.
            context = dataclasses.replace(context, scan="both" if scan == "series" else scan)
            self.mixer = find_mixer(mixer[0])(mixer[1], context)
            self.shares = mixer[0] if self.causal and self.mixer.shares_values else ""
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
        x: Stream,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        values: Tensor | None = None,
        keep: tuple[Tensor, Tensor] | None = None,
        grid: Grid | None = None,
    ):
        """x [B, T, D] -> (x [B, T, D], state after the last token or None), and shared values if it `shares`.

        Args:
            x: the residual stream, or two tensors whose sum it is (`defers_sum` of the block before).
            dropout_keys: from `DropoutPosition`, [B, T, 2]; None applies no dropout and drops no path. They are an
                argument and not looked up inside, so that recomputing a block gives the masks of its first pass.
            values: what earlier layers share with this one, [B, T, C].
            keep: rows and columns, int64 [n] each, of the tokens to return, as [n, D]; None is all. A channel mixer
                that sees each token alone computes only these.
            grid: of the tokens, in a model without causality; None is a sequence.
        """
        keys, before = self.mask_keys(dropout_keys, cu_seqlens), state
        shared = [] if values is None else [values]
        early = None if isinstance(self.channel, Mixer) else keep
        x, added = as_terms(x)
        if self.mixer is not None:
            y, x = self._add(self.mixer_norm, added, x)
            y, state = self.mix(y, state, cu_seqlens, grid, shared)
            y = with_dropout(self._added(y, self.mixer_norm), keys, self.mixer_dropout, self.mixer_path)
            if early is not None:
                x, y, keys = x[early], y[early], tuple(None if key is None else key[early] for key in keys)
            if self.channel is None:
                return self._sum(x, y), state, *shared
            y, x = self._add(self.channel_norm, y, x)
        else:
            if early is not None:
                x, added = x[early], None if added is None else added[early]
                keys = tuple(None if key is None else key[early] for key in keys)
            y, x = self._add(self.channel_norm, added, x)
        y, state = self.mix_channels(y, before, state, cu_seqlens, grid)
        y = with_dropout(self._added(y, self.channel_norm), keys, self.channel_dropout, self.channel_path)
        if early is not keep:
            x, y = x[keep], y[keep]
        return self._sum(x, y), state, *shared

    def _sum(self, x: Tensor, y: Tensor) -> Stream:
        """Returns the residual stream x + y after the block."""
        defers = self.defers_sum and torch.is_grad_enabled()
        return (x, y) if defers and (self.defers_views or not (x._is_view() or y._is_view())) else x + y

    def _added(self, y: Tensor, norm: nn.Module) -> Tensor:
        """Returns what the output of a sublayer adds to the residual stream."""
        y = norm(y) if self.norm_after else y
        return y if self.residual_scale == 1.0 else y * self.residual_scale

    def _read(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what a sublayer reads of the residual stream x, and what its output is added to."""
        if self.norm_after:
            return x, x
        if self.residual_norm is None:
            return norm_and_keep(norm, x)
        y = norm(x)
        return y, y * self.residual_norm

    def _add(self, norm: nn.Module, y: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `_read` of the residual stream x + y; y None is zero."""
        if y is None or self.norm_after or self.residual_norm is not None:
            return self._read(norm, x if y is None else x + y)
        return add_and_norm(norm, y, x)

    def mix(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        grid: Grid | None = None,
        values: list[Tensor] | None = None,
    ) -> tuple[Tensor, State | None]:
        """Returns the output of the token mixer for its input x [B, T, D], and the state after the last token.

        Args:
            values: as in `Mixer.shares_values`.
        """
        return self._run(self.mixer, x, state, cu_seqlens, grid, *((values,) if self.shares else ()))

    def mix_channels(
        self, x: Tensor, before: State | None, after: State | None, cu_seqlens: Tensor | None, grid: Grid | None
    ) -> tuple[Tensor, State | None]:
        """Returns the output of the channel mixer for its input x, and the state of the block after the last token.

        Args:
            before, after: states of the block before the first token, and after the token mixer.
        """
        if not isinstance(self.channel, Mixer):
            return self.channel(x), after
        y, channel_state = self._run(self.channel, x, None if before is None else _of_channel(before), cu_seqlens, grid)
        return y, None if channel_state is None else _joined(after, channel_state)

    def _run(self, layer: Mixer, x: Tensor, state: State | None, cu_seqlens: Tensor | None, grid: Grid | None, *more):
        if self.causal:
            return mix(layer, x, state, cu_seqlens, *more)
        refuse_state(state)
        return mix_all(layer, x, self.scan, cu_seqlens, grid, self.scan_sum), None

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

    def step(self, x: Tensor, added: Tensor | None, state: State, values: Tensor | None = None):
        """Computes one token, x + added [B, D], as `forward`. Raises ValueError in a model without causality.

        Args:
            added: what the layer before adds to the residual stream x, or None. The norm that reads the sum forms it.

        Returns:
            x, what the last layer adds to it, the state, and shared values if it `shares`.
        """
        if not self.causal:
            refuse_next_token()
        before, shared = state, [] if values is None else [values]
        if self.mixer is not None:
            inputs, x = self._add(self.mixer_norm, added, x)
            y, state = self.mixer.step(inputs, state, *((shared,) if self.shares else ()))
            y = self._added(y, self.mixer_norm)
            if self.channel is None:
                return x, y, state, *shared
            y, x = self._add(self.channel_norm, y, x)
        else:
            y, x = self._add(self.channel_norm, added, x)
        if isinstance(self.channel, Mixer):
            y, channel_state = self.channel.step(y, _of_channel(before))
            state = _joined(state, channel_state)
        else:
            y = self.channel(y)
        return x, self._added(y, self.channel_norm), state, *shared

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        spec = {} if self.mixer is None or not self.causal else self.mixer.state_spec(batch, context_length)
        if self.causal and isinstance(self.channel, Mixer):
            return _joined(spec, self.channel.state_spec(batch, context_length))
        return spec

    def pending_spec(self, batch: int, tokens: int) -> dict[str, TensorSpec]:
        return {} if self.mixer is None or not self.causal else self.mixer.pending_spec(batch, tokens)

    def init_state(self, batch: int, context_length: int, device=None, dtype=None) -> State:
        """Returns the state before the first token. Raises ValueError in a model without causality."""
        if not self.causal:
            refuse_next_token()
        state = {} if self.mixer is None else self.mixer.init_state(batch, context_length, device, dtype)
        if isinstance(self.channel, Mixer):
            return _joined(state, self.channel.init_state(batch, context_length, device, dtype))
        return state

    def flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of one sequence that no matrix product and no op counts (`Mixer.flops`)."""
        return sum(self.passes(layer) * layer.flops(seq_len) for layer in self.sublayers())

    def sublayers(self) -> list[Mixer | Channel]:
        """Returns the mixer and the channel mixer, without one that is absent."""
        return [layer for layer in (self.mixer, self.channel) if layer is not None]

    def passes(self, layer: Mixer | Channel) -> int:
        """Returns how often a layer of this block computes each token in one pass of the model."""
        return 1 if self.causal or not isinstance(layer, Mixer) else passes(layer, self.scan)


def _of_channel(state: State) -> State:
    """Returns the state of the channel mixer in the state of a block."""
    return {name.removeprefix(_CHANNEL): x for name, x in state.items() if name.startswith(_CHANNEL)}


def _joined(state: dict, of_channel: dict) -> dict:
    """Returns the state, or its specs, of a block from those of its mixer and of its channel mixer."""
    return {**state, **{_CHANNEL + name: x for name, x in of_channel.items()}}


def with_dropout(
    y: Tensor, keys: tuple[Tensor | None, Tensor | None], dropout: Dropout | None, path: DropPath | None
) -> Tensor:
    """Returns the output of a sublayer after dropout and drop path, with the keys of `Block.mask_keys`."""
    if keys[0] is not None:
        y = dropout(y, keys[0])
    return y if keys[1] is None else path(y, keys[1])


def as_terms(x: Stream) -> tuple[Tensor, Tensor | None]:
    """Returns the terms of the sum that a residual stream is; the second is None if the stream is one tensor."""
    return x if isinstance(x, tuple) else (x, None)


# A residual block that a vector per row modulates: adaLN-zero (DiT, arXiv:2212.09748, section 3.2).


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
