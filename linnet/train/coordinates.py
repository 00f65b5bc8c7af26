"""The coordinate check of a parametrisation: do activations stay the same size at every width while a model trains?

The model of a training is made at several widths and trained for a few steps at a constant rate. After steps 1, 2, 5
and 10, the mean |activation| of each module on the first batch is compared between widths. A parametrisation under
which the best learning rate does not depend on the width keeps them equal (G. Yang et al., Tensor Programs V,
arXiv:2203.03466, appendix D.1). For the logits the mean |change since initialisation| is compared, since random logits
fall as 1 / sqrt(width) under muP by design; after the first step alone the random part still dominates the change at
these widths, so it is shown and does not count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from linnet.config import ConfigError
from linnet.models.config import ModelConfig
from linnet.models.widths import at_width
from linnet.train.config import TrainConfig
from linnet.train.objective import RunObjective
from linnet.train.preflight import preflight
from linnet.train.schedule import ScheduleConfig
from linnet.train.session import Session

WIDTHS = (64, 128, 256, 512)
STEPS = (1, 2, 5, 10)
SEEDS = 4
LIMIT = 1.5  # largest allowed ratio of the mean |activation| at two of the widths
LOGITS = "logits"


@dataclass(frozen=True)
class Coordinate:
    """Mean |activation| of one module after one number of steps, by width.

    Attributes:
        module: its name in `backbone`, or `embedding`, or `logits`.
        values: one per width.
    """

    module: str
    step: int
    values: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Returns the largest value over the smallest; infinite if one is zero or not finite."""
        low, high = min(self.values), max(self.values)
        finite = torch.isfinite(torch.tensor(self.values)).all()
        return high / low if finite and low > 0 else float("inf")

    @property
    def counts(self) -> bool:
        return self.module != LOGITS or self.step > 1


@dataclass(frozen=True)
class Check:
    """The coordinates of one parametrisation."""

    parametrisation: str
    widths: tuple[int, ...]
    coordinates: tuple[Coordinate, ...]

    @property
    def worst(self) -> Coordinate:
        return max((one for one in self.coordinates if one.counts), key=lambda one: one.ratio)

    @property
    def passed(self) -> bool:
        return self.worst.ratio <= LIMIT

    def failed(self) -> list[str]:
        """Returns the modules that do not pass, worst first."""
        ratios: dict[str, float] = {}
        for one in filter(lambda one: one.counts, self.coordinates):
            ratios[one.module] = max(one.ratio, ratios.get(one.module, 0.0))
        return sorted((name for name, ratio in ratios.items() if ratio > LIMIT), key=lambda name: -ratios[name])


def check_coordinates(
    config: TrainConfig,
    cache: str | Path,
    widths: Sequence[int] = WIDTHS,
    seeds: int = SEEDS,
    tell: Callable[[str], None] | None = None,
) -> list[Check]:
    """Returns the check of the parametrisation of a training; of `standard` too if it is another.

    `standard` must fail: otherwise the rate is too low, or the steps are too few, for the check to tell anything.

    Args:
        cache: folder of prepared corpora.
        seeds: initialisations and data orders whose activations are averaged.
        tell: is called with a line before each width.

    Raises:
        ConfigError: the training is not of a causal language model, or it cannot have one of the widths.
    """
    if not isinstance(config.model, ModelConfig):
        problem = f"--coordinate-check: needs a causal language model, not objective: {config.objective}"
        raise ConfigError([problem], "command line")
    objective = preflight(config, cache).objective
    kinds = dict.fromkeys([config.model.parametrisation, "standard"])
    changes: dict[str, dict] = {"standard": {"parametrisation": "standard", "base_width": 256}, "mup": {}}
    models = {kind: [at_width(config.model.model_copy(update=changes[kind]), one) for one in widths] for kind in kinds}
    found = []
    for kind, sizes in models.items():
        means: dict[tuple[str, int], list[float]] = {}
        for width, model in zip(widths, sizes, strict=True):
            if tell is not None:
                tell(f"{kind}, width {width}")
            runs = [dict(_train(config, model, config.seed + seed, objective)) for seed in range(seeds)]
            for place in runs[0]:
                means.setdefault(place, []).append(sum(run[place] for run in runs) / seeds)
        coordinates = tuple(Coordinate(module, step, tuple(values)) for (module, step), values in means.items())
        found.append(Check(kind, tuple(widths), coordinates))
    return found


def _train(
    config: TrainConfig, model: ModelConfig, seed: int, objective: RunObjective
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yields (module, step) and the mean |activation| there, for a model of one width."""
    run = config.run.model_copy(update={"compile": False, "graph": False, "recompute": "none"})
    changes = {"model": model, "seed": seed, "run": run, "schedule": ScheduleConfig(name="constant", warmup=0.0)}
    config = config.model_copy(update=changes)
    session = Session(config, type(objective)(config, objective.data, _device(config)), _device(config))
    tokens = session.objective.batches().batch(0)[0].to(session.device)
    first = _activations(session, tokens)[LOGITS]
    for step in range(1, max(STEPS) + 1):
        session.gradients()
        session.judge()
        session.apply()
        if step in STEPS:
            for name, value in _activations(session, tokens, first).items():
                yield (name, step), value.abs().double().mean().item()


def _device(config: TrainConfig) -> torch.device:
    from linnet.train import device

    return device.choose(config.run.device)


@torch.no_grad()
def _activations(session: Session, tokens: Tensor, first: Tensor | None = None) -> dict[str, Tensor]:
    """Returns the outputs of all modules on a batch, and the logits less `first`."""
    model, found, hooks = session.model, {}, []
    for name, module in model.named_modules():
        if not name or name == "head":
            continue

        def keep(module: nn.Module, inputs: tuple, output: Tensor | tuple, name: str = name) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.is_floating_point():
                found[name.removeprefix("backbone.")] = output

        hooks.append(module.register_forward_hook(keep))
    with session.autocast:
        logits, _ = model(tokens)
    for hook in hooks:
        hook.remove()
    return found | {LOGITS: logits if first is None else logits - first}
