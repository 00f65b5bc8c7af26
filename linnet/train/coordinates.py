"""The coordinate check of a parametrisation: do activations stay the same size at every width while a model trains?

The model of a training is made at several widths and trained for a few steps at a constant rate. After steps 1, 2, 5
and 10, the mean |activation| of each module on the first batch is compared between widths. A parametrisation under
which the best learning rate does not depend on the width keeps them equal (G. Yang et al., Tensor Programs V,
arXiv:2203.03466, appendix D.1).

For the logits the learned part of their change since initialisation is compared. In the limit of infinite width a model
under muP computes a function that does not depend on its random first weights (ibid., section 3). At a finite width the
change of the logits is that function's, c, and a random part of mean 0 that falls as 1 / sqrt(width) by design. The
product of the changes of two models with other first weights and the same batches has the mean c^2, so its root is the
size of c without the random part. After the first step c is small beside the error of this estimate, so that step is
shown and does not count.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from linnet.config import ConfigError
from linnet.models.config import ModelConfig
from linnet.models.costs import flops_exact
from linnet.models.parametrisation import at_width
from linnet.options import duration
from linnet.train.config import TrainConfig
from linnet.train.objective import RunObjective
from linnet.train.optimizer import ScheduleConfig
from linnet.train.preflight import preflight
from linnet.train.session import Session

WIDTHS = (64, 128, 256, 512)
STEPS = (1, 2, 5, 10)
SEEDS = 4
LIMIT = 1.5  # largest allowed ratio of the mean |activation| at two of the widths
LOGITS = "logits"
LARGEST_CHANGE = 2**22  # numbers of a change of the logits that are kept: evenly spaced tokens


@dataclass(frozen=True)
class Coordinate:
    """Mean |activation| of one module after one number of steps, by width.

    Attributes:
        module: its name in `backbone`, or `embedding`, or `logits`, for which values are learned changes.
        values: one per width.
    """

    module: str
    step: int
    values: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Returns the largest value over the smallest; 1 if all are zero, infinite if one is zero or not finite."""
        low, high = min(self.values), max(self.values)
        if low == high == 0:  # as after a first step behind a projection that starts at zero
            return 1.0
        finite = torch.isfinite(torch.tensor(self.values)).all()
        return high / low if finite and low > 0 else float("inf")

    @property
    def grows(self) -> bool:
        """Returns whether it is larger at the last width than at the first. One that falls may have a limit."""
        return self.values[-1] > self.values[0]

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
        return max((point for point in self.coordinates if point.counts), key=lambda point: point.ratio)

    @property
    def passed(self) -> bool:
        return self.worst.ratio <= LIMIT

    def failed(self) -> list[str]:
        """Returns the modules that do not pass, worst first."""
        ratios: dict[str, float] = {}
        for coordinate in filter(lambda candidate: candidate.counts, self.coordinates):
            ratios[coordinate.module] = max(coordinate.ratio, ratios.get(coordinate.module, 0.0))
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
        seeds: initialisations, at least two, whose activations are averaged. All see the same batches.
        tell: is called with a line before each model that is trained, from the second on with the time left.

    Raises:
        ConfigError: the training is not of a causal language model, or it cannot have one of the widths.
        ValueError: fewer than two seeds.
    """
    if seeds < 2:
        raise ValueError(f"seeds: {seeds} cannot tell what is learned from what is random; use 2 or more")
    if not isinstance(config.model, ModelConfig):
        problem = f"--coordinate-check: needs a causal language model, not objective: {config.objective}"
        raise ConfigError([problem], "command line")
    objective = preflight(config, cache).objective
    kinds = dict.fromkeys([config.model.parametrisation, "standard"])
    changes: dict[str, dict] = {"standard": {"parametrisation": "standard", "base_width": 256}, "mup": {}}
    models = {kind: [at_width(config.model.model_copy(update=changes[kind]), d) for d in widths] for kind in kinds}
    sizes = models[config.model.parametrisation]
    flops = {width: flops_exact(model, config.seq_len) for width, model in zip(widths, sizes, strict=True)}
    ahead = [width for _ in kinds for width in widths for _ in range(seeds)]  # of the models that are not trained yet
    total, took = len(ahead), dict[int, float]()
    checks = []
    for kind, sizes in models.items():
        values: dict[tuple[str, int], list[float]] = {}
        for width, model in zip(widths, sizes, strict=True):
            runs = []
            for seed in range(config.seed, config.seed + seeds):
                if tell is not None:
                    progress = f"{total - len(ahead) + 1} of {total}: {kind}, width {width}, seed {seed}"
                    tell(f"{progress}, about {duration(_seconds(ahead, took, flops))} left" if took else progress)
                start = time.perf_counter()
                runs.append(dict(_train(config, model, seed, objective)))
                took[ahead.pop(0)] = time.perf_counter() - start
            for step in STEPS:
                reached = [run[step] for run in runs]
                for name in reached[0].sizes:
                    mean = sum(result.sizes[name] for result in reached) / seeds
                    values.setdefault((name, step), []).append(mean)
                values.setdefault((LOGITS, step), []).append(learned_size([result.change for result in reached]))
        coordinates = tuple(Coordinate(module, step, tuple(sizes)) for (module, step), sizes in values.items())
        checks.append(Check(kind, tuple(widths), coordinates))
    return checks


def _seconds(ahead: list[int], took: dict[int, float], flops: dict[int, float]) -> float:
    """Returns the seconds that models take: as the last one of that width, or by FLOPs as the last one."""
    last = list(took)[-1]
    return sum(took.get(width, took[last] * flops[width] / flops[last]) for width in ahead)


@dataclass(frozen=True)
class _Reached:
    """One model after some steps.

    Attributes:
        sizes: mean |activation| of each module.
        change: of the logits since initialisation, [tokens, vocabulary].
    """

    sizes: dict[str, float]
    change: Tensor


def learned_size(changes: Sequence[Tensor]) -> float:
    """Returns the root mean square of what the changes of models with independent first weights have in common.

    Args:
        changes: of the same shape, one per initialisation. Each is c plus a random part of mean 0, independent of the
            others, so that the mean product of two of them is the mean of c^2. If that is negative, the result is 0.
    """
    products = [(delta.double() * other.double()).mean().item() for delta, other in itertools.combinations(changes, 2)]
    return math.sqrt(max(0.0, sum(products) / len(products)))


def _train(
    config: TrainConfig, model: ModelConfig, seed: int, objective: RunObjective
) -> Iterator[tuple[int, _Reached]]:
    """Yields (step, result) for a model of one width with the first weights of `seed` and the batches of `config`."""
    run = config.run.model_copy(update={"compile": False, "graph": False, "recompute": "none"})
    changes = {"model": model, "run": run, "schedule": ScheduleConfig(name="constant", warmup=0.0)}
    # No layer of these widths is for float8.
    config = config.model_copy(update=changes | {"precision": config.autocast_precision})
    batches = type(objective)(config, objective.data, _device(config))
    session = Session(config.model_copy(update={"seed": seed}), batches, _device(config))
    tokens = batches.batches().batch(0)[0].to(session.device)
    first = _activations(session, tokens)[LOGITS]
    for step in range(1, max(STEPS) + 1):
        session.gradients()
        session.judge()
        session.apply()
        if step in STEPS:
            activations = _activations(session, tokens)
            change = (activations.pop(LOGITS) - first).flatten(0, -2)
            every = -(-change.numel() // LARGEST_CHANGE)
            sizes = {name: value.abs().double().mean().item() for name, value in activations.items()}
            yield step, _Reached(sizes, change[::every].cpu())


def _device(config: TrainConfig) -> torch.device:
    from linnet.train import device

    return device.choose(config.run.device)


@torch.no_grad()
def _activations(session: Session, tokens: Tensor) -> dict[str, Tensor]:
    """Returns the outputs of all modules on a batch, and the logits."""
    model, outputs, hooks = session.model, {}, []
    for name, module in model.named_modules():
        if not name or name == "head":
            continue

        def keep(module: nn.Module, inputs: tuple, output: Tensor | tuple, name: str = name) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.is_floating_point():
                outputs[name.removeprefix("backbone.")] = output

        hooks.append(module.register_forward_hook(keep))
    with session.autocast:
        logits, _ = model(tokens)
    for hook in hooks:
        hook.remove()
    return outputs | {LOGITS: logits}
