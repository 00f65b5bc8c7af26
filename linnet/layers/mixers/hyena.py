"""Hyena (Poli et al. 2023, arXiv:2302.10866; paper 004, section 3.2 and appendix B.3.1), order 2, with a modal filter.

q, k, v = short convolutions of linear projections; y = (q * (h conv (k * v))) W_o, with one learned filter h per
channel, as long as the sequence (`linnet.layers.hyena.LongFilter`), whose h_0 holds the paper's skip term beta.

Paper: leaves the form of the filter open. Its published implementation generates the filter with a small sine network,
which has no finite state. Here: a sum of modes, whose number is the state size that the paper counts, so that the mixer
decodes with constant state (Laughing Hyena, arXiv:2310.18780). The published implementation also ties overlapping
copies of one projection; here q, k and v have three projections.
"""

from pydantic import Field
from torch import Tensor, nn

from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, register_mixer
from linnet.layers.hyena import LongFilter, ShortProjection, long_flops_paper
from linnet.layers.short_conv import convolution_problems
from linnet.ops import long_convolution, long_convolution_step


class HyenaFilterConfig(LayerConfig):
    """Options that the three Hyena mixers share."""

    num_modes: int = Field(16, ge=1, description="complex modes of a filter: its state size")
    max_time_constant: int = Field(
        1024, ge=2, description="slowest mode at the start, in tokens; best the length of the sequences"
    )
    conv_width: int = Field(3, ge=2, description="tokens that the short convolutions see")


class HyenaConfig(HyenaFilterConfig):
    """Options of `hyena`."""


class HyenaMixer(Mixer):
    """Base class of the three Hyena mixers: q, k, v; a convolution with long filters; an output projection.

    A subclass implements `signal(k, v)`, the input [..., C] of the convolution, and `read(y, q, x)`, the mixer's output
    from the convolution's output y [..., C]. `C` is `conv_channels`; the filters are spread evenly over these channels.
    """

    sequence_parallel = True

    def __init__(self, config: HyenaFilterConfig, d_model: int, channels: int, filters: int, conv_channels: int):
        super().__init__()
        self.config, self.d_model, self.channels, self.conv_channels = config, d_model, channels, conv_channels
        self.q_proj = ShortProjection(d_model, channels, config.conv_width)
        self.k_proj = ShortProjection(d_model, channels, config.conv_width)
        self.v_proj = ShortProjection(d_model, channels, config.conv_width)
        self.filter = LongFilter(filters, config.num_modes, config.max_time_constant)

    @classmethod
    def span_problems(cls, config: HyenaFilterConfig, context: LayerContext, span: int, ranks: int, tp: int = 1):
        return convolution_problems(config.conv_width, span)

    def least_span(self, ranks: int) -> int:
        return self.config.conv_width - 1

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        carried = {} if state is None else state
        q, q_window = self.q_proj(x, carried.get("q"), cu_seqlens)
        k, k_window = self.k_proj(x, carried.get("k"), cu_seqlens)
        v, v_window = self.v_proj(x, carried.get("v"), cu_seqlens)
        y, modes = long_convolution(
            self.signal(k, v),
            self.filter(),
            initial_state=carried.get("modes"),
            output_final_state=state is not None,
            cu_seqlens=cu_seqlens,
        )
        after = None if state is None else {"q": q_window, "k": k_window, "v": v_window, "modes": modes}
        return self.read(y, q, x), after

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        q = self.q_proj.step(x, state["q"])
        k, v = self.k_proj.step(x, state["k"]), self.v_proj.step(x, state["v"])
        y = long_convolution_step(self.signal(k, v), self.filter(), state["modes"])
        return self.read(y, q, x), state

    def signal(self, k: Tensor, v: Tensor) -> Tensor:
        """Returns the input of the convolution, from keys and values: [..., channels of the filter's input]."""
        raise NotImplementedError

    def read(self, y: Tensor, q: Tensor, x: Tensor) -> Tensor:
        """Returns the mixer's output [..., D] from the convolution, the queries and the mixer's input."""
        raise NotImplementedError

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        windows = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        spec = {name: projection.state_spec(batch) for name, projection in windows.items()}
        return spec | {"modes": self.filter.state_spec(batch, self.conv_channels)}

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of the short convolutions, 2 per weight and token, which no matrix product or op counts."""
        return 2.0 * seq_len * 3 * self.channels * self.config.conv_width


@register_mixer("hyena", HyenaConfig)
class Hyena(HyenaMixer):
    """x [B, T, D] -> [B, T, D], with one filter per channel."""

    def __init__(self, config: HyenaConfig, context: LayerContext):
        d_model = context.d_model
        super().__init__(config, d_model, channels=d_model, filters=d_model, conv_channels=d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.out_proj.ends_residual = True

    def signal(self, k: Tensor, v: Tensor) -> Tensor:
        return k * v

    def read(self, y: Tensor, q: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(q * y)

    def flops_paper(self, seq_len: int) -> float:
        """6 L D^2 + 18 L D + S L D + 10 L log2(L) D + 4 L D + 2 L D^2 (paper 004, C.4; S modes)."""
        d = self.d_model
        return seq_len * (8.0 * d**2 + 18.0 * d) + long_flops_paper(seq_len, self.config.num_modes, d, d)
