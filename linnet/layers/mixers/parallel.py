"""Mixers side by side: they read the same input, and their outputs are added, y = sum_i b_i mixer_i(a_i x).

Falcon-H1 (Zuo et al. 2025, arXiv:2507.22448) has attention and Mamba-2 in every block, with factors a and b. Hymba
(Dong et al. 2024, arXiv:2411.13676) has attention and Mamba; departure: there they share the projections, and a norm of
each output precedes the sum.

In a model without causality each mixer is causal in each order of the scan, as a mixer of a generic form is.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import Config, ConfigError, Factor, nearest, parse
from linnet.layers.base import (
    MIXERS,
    LayerConfig,
    LayerContext,
    Mixer,
    State,
    TensorSpec,
    find_mixer,
    nearest_name,
    register_mixer,
)
from linnet.layers.ring import mix


class ParallelConfig(LayerConfig):
    """Options of `parallel`."""

    nested = ("mixers",)

    mixers: dict[str, dict[str, Any]] = Field(
        {"attention": {}, "mamba": {}}, description="the mixers by name, each with its options"
    )
    input_scales: dict[str, Factor] = Field({}, description="factor of the input of a mixer, by its name; else 1")
    output_scales: dict[str, Factor] = Field({}, description="factor of the output of a mixer, by its name; else 1")

    def check(self, context: LayerContext) -> list[str]:
        problems = []
        if len(self.mixers) < 2:
            problems.append(
                f"mixers: {', '.join(self.mixers) or 'none'} alone; name two or more, each with its options"
            )
        for key in ("input_scales", "output_scales"):
            problems += [
                f"{key}: {name!r} is not one of `mixers`; {nearest(name, self.mixers)}"
                for name in getattr(self, key)
                if name not in self.mixers
            ]
        apart = {name for name, mixer in MIXERS.items() if mixer.before_layers or mixer.shares_values}
        known = [name for name in MIXERS if name not in apart and name != "parallel"]
        for name, settings in self.mixers.items():
            if name not in known:
                problems.append(
                    f"mixers: {name!r} is not a mixer that can run in parallel; {nearest_name(name, known)}"
                )
                continue
            try:
                options = parse(MIXERS[name].Config, settings)
            except ConfigError as error:
                problems += [f"mixers.{name}.{problem}" for problem in error.problems]
                continue
            check = getattr(options, "check", None)  # the options of a plugin may have no `check`
            problems += [f"mixers.{name}.{problem}" for problem in ([] if check is None else check(_causal(context)))]
        return problems

    def each(self) -> Iterator[tuple[str, type[Mixer], Config]]:
        """Yields the name, the class and the options of each mixer."""
        for name, settings in self.mixers.items():
            yield name, find_mixer(name), parse(find_mixer(name).Config, settings)


@register_mixer("parallel", ParallelConfig)
class Parallel(Mixer):
    """x [B, T, D] -> [B, T, D]; the state is that of each mixer, under `<mixer>.<name>`."""

    sequence_parallel = True  # each mixer exchanges what it needs, or passes its state on

    def __init__(self, config: ParallelConfig, context: LayerContext):
        super().__init__()
        self.refuse_options(config, context)
        self.config = config
        self.mixers = nn.ModuleDict({name: kind(options, _causal(context)) for name, kind, options in config.each()})
        for mixer in self.parts():
            mixer.within = f"{self.name}.mixers."
        self.nominal_state = any(mixer.nominal_state for mixer in self.parts())

    @classmethod
    def shared_spec(cls, config: ParallelConfig, context: LayerContext) -> dict[str, Callable[[], nn.Module]]:
        spec: dict[str, Callable[[], nn.Module]] = {}
        for _, kind, options in config.each():
            spec |= kind.shared_spec(options, _causal(context))
        return spec

    @classmethod
    def span_problems(cls, config: ParallelConfig, context: LayerContext, span: int, ranks: int, tp: int = 1):
        return [
            f"mixers.{name}.{problem}"
            for name, kind, options in config.each()
            for problem in kind.span_problems(options, context, span, ranks, tp)
        ]

    def parts(self) -> list[Mixer]:
        return list(self.mixers.values())  # type: ignore[arg-type]

    def least_span(self, ranks: int) -> int:
        return max(mixer.least_span(ranks) for mixer in self.parts())

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        return self._sum(x, state, lambda mixer, x, carry: mix(mixer, x, carry, cu_seqlens))

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._sum(x, state, lambda mixer, x, carry: mixer.step(x, carry))

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        return self._joined(lambda mixer: mixer.state_spec(batch, context_length))

    def init_state(self, batch: int, context_length: int, device=None, dtype: torch.dtype | None = None) -> State:
        return self._joined(lambda mixer: mixer.init_state(batch, context_length, device, dtype))

    def flops_004(self, seq_len: int) -> float:
        return sum(mixer.flops_004(seq_len) for mixer in self.parts())

    def flops_paper(self, seq_len: int) -> float:
        return sum(mixer.flops_paper(seq_len) for mixer in self.parts())

    def flops(self, seq_len: int) -> float:
        return sum(mixer.flops(seq_len) for mixer in self.parts())

    def flops_masked(self, seq_len: int) -> float:
        return sum(mixer.flops_masked(seq_len) for mixer in self.parts())

    def inactive_parameters(self) -> int:
        return sum(mixer.inactive_parameters() for mixer in self.parts())

    def _sum(self, x: Tensor, state: State | None, run: Callable) -> tuple[Tensor, State | None]:
        outputs, after = [], {}
        for name, mixer in self.mixers.items():
            factor, scale = (scales.get(name, 1.0) for scales in (self.config.input_scales, self.config.output_scales))
            carry = None
            if state is not None:
                carry = {key.partition(".")[2]: entry for key, entry in state.items() if key.partition(".")[0] == name}
            y, carry = run(mixer, x if factor == 1.0 else x * factor, carry)
            outputs.append(y if scale == 1.0 else y * scale)
            after |= {f"{name}.{key}": entry for key, entry in (carry or {}).items()}
        return sum(outputs[1:], outputs[0]), None if state is None else after

    def _joined(self, of: Callable[[Mixer], dict]) -> dict:
        return {f"{name}.{key}": entry for name, mixer in self.mixers.items() for key, entry in of(mixer).items()}


def _causal(context: LayerContext) -> LayerContext:
    """Returns the context of the mixers, which scan in the orders that the block gives them."""
    return dataclasses.replace(context, causal=True, axes=1, prefix=0)
