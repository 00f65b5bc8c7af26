"""The benchmark as data: the settings of each task, the learning rates, and the runs of a budget.

A setting is a task at one difficulty. Settings change one variable of the task's baseline at a time (004, appendix
B.2), which gives 66 settings. Each is trained at the six points of `GRID`, and the best of the six counts.

MQAR has its own budgets and is not part of the score (section 4.1 of paper 002, after Figure 2 of zoology).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from linnet.config import ConfigError, nearest, refuse, unknown
from linnet.data.synthetic import TASKS, Task

HELD_OUT = 1280  # samples of the validation split and of the test split
BATCH = 128
EPOCHS = 200


class GridPoint(NamedTuple):
    learning_rate: float
    weight_decay: float


GRID = tuple(GridPoint(rate, decay) for rate in (1e-4, 5e-4, 1e-3) for decay in (0.0, 0.1))


@dataclass(frozen=True)
class Setting:
    """A task at one difficulty.

    Attributes:
        task: the task, with the variables of the setting.
        train_samples: number of training samples. held_out: samples of the validation split and of the test split each.
        varied: the variable that differs from the baseline of the task, "" in the baseline itself.
        width, batch_size: of the models, if the setting fixes them.
    """

    task: Task
    train_samples: int
    held_out: int = HELD_OUT
    varied: str = ""
    width: int | None = None
    batch_size: int | None = None

    @property
    def short_name(self) -> str:
        if self.width:
            return f"{self.task.seq_len}x{self.task.num_pairs},width={self.width}"
        if not self.varied:
            return "baseline"
        value = self.train_samples if self.varied == "samples" else getattr(self.task, self.varied)
        return f"{self.varied}={value}"

    @property
    def name(self) -> str:
        """Returns the name of the setting within its specification: `fuzzy_recall/seq_len=256`."""
        return f"{self.task.name}/{self.short_name}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the setting as plain values, for the configuration of a run."""
        return {
            "setting": self.name,
            "task": self.task.name,
            "varied": self.varied,
            "options": self.task.model_dump(mode="json"),
            "num_tokens": self.task.num_tokens,
            "train_samples": self.train_samples,
            "held_out": self.held_out,
        } | ({"width": self.width} if self.width else {})


@dataclass(frozen=True)
class Budget:
    """How much of the benchmark to run.

    Attributes:
        baselines_only: whether the harder settings are left out.
        comparable: whether scores can be compared with those of a full run on the same settings.
        max_samples: limit of the training samples, None for the number in the setting.
        held_out: samples of the validation split and of the test split each.
        mqar: whether the settings are those of MQAR, not of the benchmark.
        max_tokens: limit of the tokens per batch, None for the batch size of the setting.
        caution: meaning of the scores, for a budget that is not comparable.
        settings: names of the settings; all, or all baselines, if empty.
        label: what the scores are, for a budget whose scores are comparable among themselves only.
        spec, layers: specification and layers that define the budget, None if any will do.
        seed: default seed. metric, legacy: the number that scores a run, and whether it is selected on the test split.
    """

    name: str
    summary: str
    baselines_only: bool = False
    comparable: bool = True
    grid: tuple[GridPoint, ...] = GRID
    epochs: int = EPOCHS
    batch_size: int = BATCH
    max_samples: int | None = None
    held_out: int = HELD_OUT
    mqar: bool = False
    max_tokens: int | None = None
    caution: str = "a smoke score only shows whether a model learns at all"
    settings: tuple[str, ...] = ()
    label: str = ""
    spec: str | None = None
    layers: str | None = None
    seed: int = 0
    metric: str = "accuracy"
    legacy: bool = False

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("mqar",) if self.mqar else MAD_TASKS


@dataclass(frozen=True)
class PlannedRun:
    """One model of an architecture to train: a setting at one point of the grid."""

    setting: Setting
    point: GridPoint
    epochs: int
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.setting.name}/lr={self.point.learning_rate:g},wd={self.point.weight_decay:g}"

    @property
    def steps(self) -> int:
        """Optimiser steps; the last batch of an epoch may be smaller."""
        return self.epochs * -(-self.setting.train_samples // self.batch_size)


# Settings with few samples separate what the baselines saturate, and cost a tenth.
_FEW = tuple(f"samples={count}" for count in (3200, 1600, 800))
_SCREEN = (
    *(f"in_context_recall/{name}" for name in (*_FEW, "vocab_size=128")),
    *(f"fuzzy_recall/{name}" for name in ("baseline", *_FEW)),
    *(f"noisy_recall/{name}" for name in (*_FEW, "frac_noise=0.8")),
    *(f"selective_copying/{name}" for name in ("baseline", *_FEW)),
    *(f"compression/{name}" for name in ("baseline", *_FEW)),
    *(f"memorization/{name}" for name in ("baseline", *(f"vocab_size={2**power}" for power in range(9, 14)))),
)

BUDGETS = {
    budget.name: budget
    for budget in (
        Budget(
            "smoke",
            "whether a model learns at all: few samples, epochs and rates; not comparable with other scores",
            baselines_only=True,
            comparable=False,
            grid=(GridPoint(5e-4, 0.0), GridPoint(1e-3, 0.0)),
            epochs=5,
            batch_size=16,
            max_samples=800,
            held_out=320,
        ),
        Budget("core", "the six baselines, whole", baselines_only=True),
        Budget("full", "every setting"),
        Budget(
            "screen",
            "26 settings at four points, most with few samples, to choose between designs; comparable among themselves",
            grid=tuple(GridPoint(rate, decay) for rate in (5e-4, 1e-3) for decay in (0.0, 0.1)),
            settings=_SCREEN,
            label="screen scores (26 of 66 settings at 4 of 6 points): comparable with other screen scores only",
        ),
        Budget(
            "published",
            "every setting as the published implementation has it: tasks, training, layers, number and selection",
            label="as published: tasks, training, layers, number and selection of the published implementation, which "
            "selects runs on the test split; not comparable with other budgets",
            spec="mad-lab",
            layers="mad-lab",
            seed=12345,
            metric="macro_batch",
            legacy=True,
        ),
        Budget(
            "mqar",
            "not part of the score: MQAR at two widths and four lengths, as zoology trains it",
            grid=tuple(GridPoint(rate, 0.1) for rate in (1e-4, 4.6e-4, 2.2e-3, 1e-2)),
            epochs=64,
            held_out=3000,
            mqar=True,
        ),
        Budget(
            "mqar-short",
            "MQAR in minutes on a GPU: 12 epochs, small batches, two rates; not comparable with published accuracies",
            comparable=False,
            grid=(GridPoint(5e-4, 0.1), GridPoint(1e-3, 0.1)),
            epochs=12,
            held_out=1000,
            mqar=True,
            max_tokens=2**15,
            caution="mqar-short trains 12 epochs of zoology's 64, in batches of half the tokens, at two rates of four",
        ),
    )
}

_SAMPLES = 12_800
_HARDER = {"vocab_size": (32, 64, 128), "seq_len": (256, 512, 1024), "samples": (6400, 3200, 1600, 800)}
_COPYING = {"seq_len": (512, 1024), "tokens_to_copy": (32, 64, 96)}
# For each task: training samples of the baseline, and the values of each variable other than the baseline's. The
# baselines are the defaults of the tasks.
_SWEEPS: dict[str, tuple[int, dict[str, tuple]]] = {
    "in_context_recall": (_SAMPLES, _HARDER),
    "fuzzy_recall": (_SAMPLES, _HARDER),
    "noisy_recall": (_SAMPLES, _HARDER | {"frac_noise": (0.4, 0.6, 0.8)}),
    "selective_copying": (_SAMPLES, _HARDER | _COPYING),
    "compression": (_SAMPLES, _HARDER | {"seq_len": (64, 128, 256)}),
    "memorization": (256, {"vocab_size": (512, 1024, 2048, 4096, 8192)}),
}
MAD_TASKS = tuple(_SWEEPS)

# Zoology's Figure 2, which section 4.1 of paper 002 follows: (length, pairs). Not part of the MAD score.
MQAR_SETTINGS = tuple(
    Setting(TASKS["mqar"](seq_len=length, num_pairs=pairs), train_samples=100_000, held_out=3000, varied="seq_len")
    for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64))
)
MQAR_WIDTHS = (64, 128)
_ANY = 2**62
_MQAR_BATCHES = {64: 512, 128: 512, 256: 256, 512: 128}


def mqar_settings() -> tuple[Setting, ...]:
    """Returns the eight settings of MQAR: four lengths, with models of both widths."""
    return tuple(
        replace(setting, width=width, batch_size=_MQAR_BATCHES[setting.task.seq_len])
        for width in MQAR_WIDTHS
        for setting in MQAR_SETTINGS
    )


def mad_settings(spec: str = "paper") -> tuple[Setting, ...]:
    """Returns the 66 settings of the benchmark, grouped by task with the baseline first.

    Args:
        spec: "paper" or "mad-lab"; the vocabulary of noisy recall includes the noise in the latter.
    """
    settings = []
    for name, (samples, sweeps) in _SWEEPS.items():
        settings.append(Setting(TASKS[name](spec=spec), samples))
        for varied, values in sweeps.items():
            for value in values:
                if varied == "samples":
                    settings.append(Setting(TASKS[name](spec=spec), value, varied=varied))
                    continue
                if (name, varied, spec) == ("noisy_recall", "vocab_size", "mad-lab"):
                    value += TASKS[name].model_fields["noise_vocab_size"].default
                settings.append(Setting(TASKS[name](spec=spec, **{varied: value}), samples, varied=varied))
    return tuple(settings)


def plan(
    budget: str = "core",
    *,
    tasks: Sequence[str] = (),
    settings: Sequence[str] = (),
    spec: str | None = None,
) -> tuple[PlannedRun, ...]:
    """Returns the runs that score one architecture.

    Args:
        budget: a name in `BUDGETS`.
        tasks: only these; all if empty. Hyphens may replace underscores.
        settings: only these, each a name such as `fuzzy_recall/seq_len=256`, its second half, or only the variable
            (`seq_len`); all if empty.
        spec: "paper" or "mad-lab"; None is that of the budget, or "paper".

    Raises:
        ConfigError: an unknown name, or no run is left; lists all problems.
    """
    chosen = BUDGETS.get(budget)
    tasks = [task.replace("-", "_") for task in tasks]
    problems = unknown("budget", [budget], BUDGETS)
    known = chosen.tasks if chosen is not None else MAD_TASKS
    for task in tasks:
        if task == "mqar" and task not in known:
            problems.append(f"tasks: mqar is not in budget {budget}; use its own budgets: mqar, mqar-short")
        elif task not in known:
            problems.append(f"tasks: {task!r} is not a task of {_benchmark(chosen)}; {nearest(task, known)}")
    fixed = None if chosen is None else chosen.spec
    spec = fixed or "paper" if spec is None else spec
    if fixed not in (None, spec):
        problems.append(f"spec {spec!r}: the budget {budget} is defined with {fixed}; leave spec out")
    elif spec not in ("paper", "mad-lab"):
        problems.append(f"spec {spec!r} is unknown; use paper or mad-lab")
    elif chosen is not None and chosen.mqar and spec != "paper":
        problems.append(f"spec {spec!r}: MQAR has one form only; leave spec at paper")
    every = (
        mqar_settings() if chosen is not None and chosen.mqar else mad_settings(spec if spec == "mad-lab" else "paper")
    )
    names = {name for setting in every for name in _names(setting)}
    problems += [f"settings: {name!r} is not a setting; {_hint(name, names)}" for name in settings if name not in names]
    refuse(problems, "MAD")
    asked = [
        setting
        for setting in every
        if (not tasks or setting.task.name in tasks) and (not settings or not _names(setting).isdisjoint(settings))
    ]
    kept = [setting for setting in asked if not setting.varied or not chosen.baselines_only]
    kept = [setting for setting in kept if not chosen.settings or setting.name in chosen.settings]
    if not kept:
        hint = "use budget full, which has them all" if asked else "drop --tasks or --settings"
        raise ConfigError(
            [f"settings: none of {', '.join(settings)} is in budget {budget} of these tasks; {hint}"], "MAD"
        )
    most = chosen.max_samples or max(setting.train_samples for setting in kept)
    return tuple(
        PlannedRun(
            replace(setting, train_samples=min(setting.train_samples, most), held_out=chosen.held_out),
            point,
            chosen.epochs,
            min(setting.batch_size or chosen.batch_size, (chosen.max_tokens or _ANY) // setting.task.seq_len),
        )
        for setting in kept
        for point in chosen.grid
    )


def listing(runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Returns a summary of runs as plain values: their number and steps, in total and for each setting."""
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        about = {"batch_size": run.batch_size, "epochs": run.epochs, "runs": 0, "steps": 0}
        summary = settings.setdefault(run.setting.name, run.setting.to_dict() | about)
        summary["runs"] += 1
        summary["steps"] += run.steps
    points = list(dict.fromkeys(run.point for run in runs))
    return {
        "runs": len(runs),
        "steps": sum(run.steps for run in runs),
        "grid": [point._asdict() for point in points],
        "settings": list(settings.values()),
    }


def _hint(name: str, names: set[str]) -> str:
    hint = nearest(name, names)
    return hint if hint.startswith("did you mean") else "linnet mad list has them all"


def _names(setting: Setting) -> set[str]:
    parts = setting.short_name.split(",")  # MQAR settings are also found by 512x64 or width=64 alone
    return {setting.name, setting.short_name, setting.varied or "baseline", *parts}


def _benchmark(budget: Budget | None) -> str:
    return "MQAR" if budget is not None and budget.mqar else "MAD"
