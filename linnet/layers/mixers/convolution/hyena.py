"""Hyena (Poli et al. 2023, arXiv:2302.10866; paper 004, section 3.2 and appendix B.3.1), order 2, with a modal filter.

q, k, v = short convolutions of linear projections; y = (q * (h conv (k * v))) W_o, with one learned filter h per
channel, as long as the sequence (`linnet.layers.hyena.LongFilter`), whose h_0 holds the paper's skip term beta.

Paper: leaves the form of the filter open. Its published implementation generates the filter with a small sine network,
which has no finite state. Here: a sum of modes, whose number is the state size that the paper counts, so that the mixer
decodes with constant state (Laughing Hyena, arXiv:2310.18780). The published implementation also ties overlapping
copies of one projection; here q, k and v have three projections. The options `filter: implicit`, `proj_groups` and
`expand` give the forms of the published implementation.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import ConfigError
from linnet.layers.base import LayerConfig, LayerContext, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.hyena import LongFilter, ShortProjection, SineFilter, TiedProjection, long_flops_paper
from linnet.layers.short_conv import ConvolvedMixer
from linnet.ops import ModalFilter, long_convolution, long_convolution_step
from linnet.ops.compat_torch import is_plain


class HyenaFilterConfig(LayerConfig):
    """Options that the three Hyena mixers share."""

    unread = {
        ("filter", "modal"): ("filter_width", "filter_length"),
        ("filter", "implicit"): ("num_modes", "max_time_constant"),
    }

    num_modes: int = Field(16, ge=1, description="complex modes of a filter: its state size")
    max_time_constant: int = Field(
        1024, ge=2, description="slowest mode at the start, in tokens; best the length of the sequences"
    )
    conv_width: int = Field(3, ge=2, description="tokens that the short convolutions see")
    filter: Literal["modal", "implicit"] = Field(
        "modal",
        description="modal: a sum of `num_modes` modes; implicit: values from a small sine network of the position, "
        "which have no finite state, so that the model trains but does not generate",
    )
    filter_width: int = Field(16, ge=1, description="width of the network of implicit filters: their nominal state")
    filter_length: int = Field(1024, ge=1, description="longest sequence of implicit filters, in tokens")
    proj_groups: int = Field(
        1, ge=1, description="q, k and v are overlapping copies of one projection of 3 / proj_groups of their channels"
    )

    def channels(self, d_model: int) -> int:
        """Returns the channels of each of q, k and v."""
        return d_model

    def check(self, context: LayerContext) -> list[str]:
        channels = 3 * self.channels(context.d_model)
        if channels % self.proj_groups == 0:
            return []
        return [f"proj_groups: {self.proj_groups} does not divide the {channels} channels of q, k and v; use a divisor"]


class HyenaConfig(HyenaFilterConfig):
    """Options of `hyena`."""

    expand: int = Field(1, ge=1, description="channels of q, k and v over the model width")

    def channels(self, d_model: int) -> int:
        return self.expand * d_model


class HyenaMixer(ConvolvedMixer):
    """Base class of the three Hyena mixers: q, k, v; a convolution with long filters; an output projection.

    A subclass implements `signal(k, v)`, the input [..., C] of the convolution, and `read(y, q, x)`, the mixer's output
    from the convolution's output y [..., C]. `C` is `conv_channels`; the filters are spread evenly over these channels.
    """

    tp_counts = ("num_heads", "num_experts", "channels", "conv_channels")

    def __init__(self, config: HyenaFilterConfig, d_model: int, channels: int, filters: int, conv_channels: int):
        super().__init__()
        self.config, self.d_model, self.channels, self.conv_channels = config, d_model, channels, conv_channels
        if config.proj_groups > 1:
            self.qkv_proj = TiedProjection(d_model, channels, config.conv_width, config.proj_groups)
        else:
            self.q_proj = ShortProjection(d_model, channels, config.conv_width)
            self.k_proj = ShortProjection(d_model, channels, config.conv_width)
            self.v_proj = ShortProjection(d_model, channels, config.conv_width)
        self.nominal_state = config.filter == "implicit"
        if self.nominal_state:
            self.filter: nn.Module = SineFilter(filters, config.filter_width, config.filter_length)
        else:
            self.filter = LongFilter(filters, config.num_modes, config.max_time_constant)

    def tp_plan(self) -> dict[str, str]:
        """Splits by channels, each with its convolution and filter."""
        if self.config.proj_groups > 1:
            return {}
        plan = {}
        for name in ("q_proj", "k_proj", "v_proj"):
            plan |= {f"{name}.linear": "colwise", f"{name}.conv": "split"}
        if not self.nominal_state:
            return plan | {"filter": "split", "out_proj": "rowwise"}
        plan |= dict.fromkeys(("filter.output", "filter.skip", "filter.rates"), "split")
        network = ("filter.positions", "filter.frequency", "filter.weights", "filter.biases")
        return plan | dict.fromkeys(network, "partial") | {"out_proj": "rowwise"}

    def tp_problems(self) -> list[str]:
        if (groups := self.config.proj_groups) > 1:
            return [f"proj_groups: {groups} ties channels that other ranks hold; use proj_groups: 1"]
        return []

    @classmethod
    def span_problems(cls, config: HyenaFilterConfig, context: LayerContext, span: int, ranks: int, tp: int = 1):
        if config.filter == "implicit":
            return ["filter: implicit has no state to pass from span to span; use filter: modal, or sp: 1"]
        return super().span_problems(config, context, span, ranks, tp)

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        if state is not None:
            self._check_decodes()
        (q, k, v), windows = self._project(x, state, cu_seqlens)
        y, modes = long_convolution(
            self.signal(k, v), self.values(x.shape[1], cu_seqlens), **carried(state, "modes", cu_seqlens)
        )
        return self.read(y, q, x), None if state is None else windows | {"modes": modes}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        self._check_decodes()
        q, k, v = self._project_token(x, state)
        y = long_convolution_step(self.signal(k, v), self.values(1), state["modes"])
        return self.read(y, q, x), state

    def init_state(self, batch: int, context_length: int, device=None, dtype: torch.dtype | None = None) -> State:
        self._check_decodes()
        return super().init_state(batch, context_length, device, dtype)

    def values(self, length: int, cu_seqlens: Tensor | None = None) -> ModalFilter | Tensor:
        """Returns the filters in modes, or the values of implicit ones at the lags of a row of `length` tokens.

        Raises:
            ConfigError: the row, or on a CPU a document of a packed row, is longer than `filter_length`.
        """
        if not self.nominal_state:
            return self.filter()
        most = self.config.filter_length
        if cu_seqlens is not None:  # a document needs no lags beyond its own; a GPU is not asked for the boundaries
            on_host = cu_seqlens.device.type == "cpu" and is_plain((cu_seqlens,))
            length = int(cu_seqlens.diff().max()) if on_host else min(length, most)
        if length > most:
            problem = f"filter_length: {most} is less than a sequence of {length} tokens; raise it to {length}"
            raise ConfigError([f"options.{self.within}{self.name}.{problem}"], "model")
        return self.filter(length)

    def _check_decodes(self) -> None:
        if self.nominal_state:
            problem = (
                "filter: implicit has no finite state, so the model has no next token; use filter: modal to decode"
            )
            raise ConfigError([f"options.{self.within}{self.name}.{problem}"], "model")

    def _project(self, x: Tensor, state: State | None, cu_seqlens: Tensor | None):
        """Returns q, k, v [B, T, C] of x [B, T, D], and the windows of their convolutions after the last token."""
        carried = {} if state is None else state
        if self.config.proj_groups > 1:
            parts, window = self.qkv_proj(x, carried.get("qkv"), cu_seqlens)
            return parts, {"qkv": window}
        q, q_window = self.q_proj(x, carried.get("q"), cu_seqlens)
        k, k_window = self.k_proj(x, carried.get("k"), cu_seqlens)
        v, v_window = self.v_proj(x, carried.get("v"), cu_seqlens)
        return (q, k, v), {"q": q_window, "k": k_window, "v": v_window}

    def _project_token(self, x: Tensor, state: State) -> tuple[Tensor, ...]:
        """Returns q, k, v [B, C] of one token x [B, D]; updates the windows in place."""
        if self.config.proj_groups > 1:
            return self.qkv_proj.step(x, state["qkv"])
        return self.q_proj.step(x, state["q"]), self.k_proj.step(x, state["k"]), self.v_proj.step(x, state["v"])

    def signal(self, k: Tensor, v: Tensor) -> Tensor:
        """Returns the input of the convolution, from keys and values: [..., channels of the filter's input]."""
        raise NotImplementedError

    def read(self, y: Tensor, q: Tensor, x: Tensor) -> Tensor:
        """Returns the mixer's output [..., D] from the convolution, the queries and the mixer's input."""
        raise NotImplementedError

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        if self.config.proj_groups > 1:
            spec = {"qkv": self.qkv_proj.state_spec(batch)}
        else:
            windows = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
            spec = {name: projection.state_spec(batch) for name, projection in windows.items()}
        # Pairs (real, imaginary) of complex modes.
        return spec | {"modes": TensorSpec((batch, self.conv_channels, self.modes, 2), counted=0.5)}

    @property
    def modes(self) -> int:
        """Modes of a filter; the nominal state of an implicit one."""
        return self.config.filter_width if self.nominal_state else self.config.num_modes

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of the short convolutions, 2 per weight and token, which no matrix product or op counts."""
        return 2.0 * seq_len * 3 * self.channels * self.config.conv_width


@register_mixer("hyena", HyenaConfig)
class Hyena(HyenaMixer):
    """x [B, T, D] -> [B, T, D], with one filter per channel."""

    def __init__(self, config: HyenaConfig, context: LayerContext):
        channels = config.channels(context.d_model)
        super().__init__(config, context.d_model, channels=channels, filters=channels, conv_channels=channels)
        self.out_proj = last_linear(channels, context.d_model)

    def signal(self, k: Tensor, v: Tensor) -> Tensor:
        return k * v

    def read(self, y: Tensor, q: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(q * y)

    def flops_paper(self, seq_len: int) -> float:
        """6 L D^2 + 18 L D + S L D + 10 L log2(L) D + 4 L D + 2 L D^2 (paper 004, C.4; S modes), with `expand` D
        channels in place of D and `proj_groups` projections less."""
        d, c = self.d_model, self.channels
        dense = seq_len * ((6.0 / self.config.proj_groups + 2.0) * d * c + 18.0 * c)
        return dense + long_flops_paper(seq_len, self.modes, c, c)
