"""Plans a study: turns its configuration into runs with exact FLOPs.

Planning checks the whole configuration before any work and reports all problems together.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnet.config import ConfigError, count_of, first_names, gather, refuse
from linnet.data import DataConfig, given_vocabulary
from linnet.data.problems import text_problems
from linnet.data.sizes import BatchSizes, steps_of
from linnet.data.sources import find_files
from linnet.models import StackConfig, count_parameters, flops_exact
from linnet.models.stack import unused_options
from linnet.study.architectures import (
    Architecture,
    Rung,
    Size,
    load_plugins,
    lost_keys,
    make_rungs,
    rule_width,
    share_note,
)
from linnet.study.config import SET_BY_THE_LADDER, StudyConfig, fixed_keys
from linnet.study.executors import unread_problems
from linnet.study.rates import WIDEST, reach, read_rates
from linnet.study.sensitivity import FACTORS
from linnet.train import TrainingConfig, read_training, resolve
from linnet.train.identity import contents_of, find
from linnet.train.monitor import check_loggers
from linnet.train.objective import Data
from linnet.train.objectives import OBJECTIVES, find_objective
from linnet.train.optimizer import too_long
from linnet.train.preflight import unread_settings


@dataclass(frozen=True)
class PlannedRun:
    """One run of a ladder.

    Attributes:
        run: name of the run folder.
        budget: planned training FLOPs. `flops` are the FLOPs of the whole number of steps.
        size: label of the size, such as `64x3` (`StudyConfig.label`).
        seq_len: tokens per row; None for images.
        tokens: tokens, or images, that the run reads.
    """

    run: str
    architecture: str
    budget: float
    size: str
    seed: int
    seq_len: int | None
    batch_size: int
    steps: int
    tokens: int
    flops: float
    params_total: int
    params_non_embedding: int
    learning_rate: float
    train: TrainingConfig = field(repr=False)

    def record(self) -> dict[str, Any]:
        """Returns everything except the training configuration, for plan.json."""
        fields = {key: value for key, value in self.__dict__.items() if key != "train"}
        return fields if self.units == "tokens" else fields | {"units": self.units}

    @property
    def units(self) -> str:
        """What `tokens` counts: tokens or images."""
        return find_objective(self.train).units


@dataclass(frozen=True)
class RateRun(PlannedRun):
    """A planned run at another learning rate, for `rate_sensitivity`. It takes no part in fits.

    Attributes:
        of: name of the planned run.
        factor: its learning rate in units of that of the planned run.
    """

    of: str = ""
    factor: float = 1.0


@dataclass(frozen=True)
class Dropped:
    """A point of the grid that is not trained, and the reason.

    Attributes:
        ratio: its tokens, or images, per non-embedding parameter.
    """

    architecture: str
    target: float
    size: str
    reason: str
    ratio: float


@dataclass(frozen=True)
class Plan:
    """The runs of a study, largest first, so that the last runs to end are small.

    Attributes:
        lost: what a layout without a family leaves out, by architecture (`lost_keys`).
        sensitivity: the runs of `rate_sensitivity`, which fits do not read.
    """

    config: StudyConfig
    runs: tuple[PlannedRun, ...]
    dropped: tuple[Dropped, ...]
    lost: dict[str, list[str]] = field(default_factory=dict)
    sensitivity: tuple[RateRun, ...] = ()

    @property
    def all_runs(self) -> tuple[PlannedRun, ...]:
        """Every run that is trained, with those of `rate_sensitivity`, largest first."""
        return tuple(sorted((*self.runs, *self.sensitivity), key=_order)) if self.sensitivity else self.runs

    @property
    def flops(self) -> float:
        """Training FLOPs of every run."""
        return sum(run.flops for run in self.all_runs)

    def notes(self) -> list[str]:
        """Returns notes for the reader of the plan: dropped points, bases that no run can be compared with, and budgets
        with too few sizes for an optimum.

        A study with one size per budget compares architectures, so it gets no note about optima.
        """
        lines = [*_without_runs(self), *_reaches(self.config, self.runs)]
        for name, keys in self.lost.items():
            told = f"architecture {name} is a layout without a family, so it has {', '.join(keys)}"
            lines.append(f"{told}; add `family`, or set these under `model` of the architecture")
        for architecture in self.config.architectures:
            depths = {run.train.model.num_layers for run in self.runs if run.architecture == architecture.name}
            lines += [note] if (note := share_note(architecture, depths)) else []
        reasons: dict[str, list[str]] = {}
        for point in self.dropped:
            reasons.setdefault(point.reason, []).append(f"{point.architecture} {point.target:.3g} {point.size}")
        for reason, points in reasons.items():
            lines.append(f"{count_of(len(points), 'point')} dropped ({reason}): {first_names(points, 4)}")
        if cut := [run.run for run in self.all_runs if too_long(run.train.schedule, run.train.total_steps)]:
            verb, their, them = ("are", "their", "them") if cut[1:] else ("is", "its", "it")
            note = f"{count_of(len(cut), 'run')} {verb} shorter than {their} warm-up (with the decay of wsd), "
            note += f"which ends with {them}: "
            note += ", ".join(cut[:4]) + (", ..." if cut[4:] else "")
            lines.append(f"{note}; give train.schedule shares below 1")
        lines += _without_pairs(self.config, self.runs)
        if self.config.budgets:
            groups: dict[tuple[str, float], set[int]] = {}
            for run in self.runs:
                groups.setdefault((run.architecture, run.budget), set()).add(run.params_non_embedding)
            places = {architecture.name: i for i, architecture in enumerate(self.config.architectures)}
            ordered = sorted(groups.items(), key=lambda group: (places[group[0][0]], group[0][1]))
            small = [f"{name} {budget:.3g}" for (name, budget), sizes in ordered if len(sizes) < 4]
            if small and any(len(sizes) > 1 for sizes in groups.values()):  # else it compares models and asks no law
                some = f"fewer than 4 sizes, too few to find an optimum, at: {first_names(small, 4)}"
                lines.append(f"{some}; give more `sizes`, or a wider tokens_per_param")
        return lines


def plan(
    config: StudyConfig,
    *,
    check_data: bool = True,
    cache: str | Path | None = None,
    root: str | Path | None = None,
    where: str = "study",
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Returns the runs of a study.

    Args:
        config: the study.
        check_data: whether to require the files that `data` and evaluations name. Training the study needs them.
        cache: folder of prepared corpora. If given and `check_data`, also reads text that is not prepared yet, to
            check it.
        root: folder of the study's runs. Runs that are in it already keep their names. A new study, which has none, may
            not set keys that have no effect.
        where: name of the configuration in messages.
        progress: is called with the number of the model whose FLOPs are counted.

    Raises:
        ConfigError: lists all problems of architectures, sizes, plugins, data and training settings; or no point is
            left to train. If the tokenizer is still to be trained, `run_study` reports the problems of evaluations
            that depend on it.
    """
    problems: list[str] = []
    plugins = load_plugins(config.plugins, problems)
    lengths = sorted({length for architecture in config.architectures if (length := config.row_length(architecture))})
    base = config.base(_vocab_size(config.data, problems) if isinstance(config.data, DataConfig) else 0)
    if not isinstance(config.data, DataConfig):
        if check_data:
            with gather(problems):
                OBJECTIVES[config.OBJECTIVE].content(config, cache)
    elif check_data and cache is not None:
        problems += text_problems(config.data.model_dump(mode="json"), cache, lengths[-1], told=problems)
    elif check_data:
        for key in ("source", "validation"):
            if names := getattr(config.data, key):
                find_files(names, f"data.{key}", problems, [])
    rungs = make_rungs(config.architectures, config.sizes, config.init_std, base, problems)
    without_rate = _rate_problems(config, rungs)
    problems += without_rate
    named = {architecture.name: architecture for architecture in config.architectures}
    extra = []
    for point in config.points:
        alone = named[point.architecture].model_copy(update={"sizes": [point.size]})
        extra += make_rungs([alone], None, config.init_std, base, problems)
    problems += fixed_keys(config.train)
    train = {key: value for key, value in config.train.items() if key not in SET_BY_THE_LADDER}
    priced: list[list[dict[str, Any]]] = []
    if rungs and not without_rate:
        with gather(problems):  # model by model, since only the last ones are kept in memory
            for number, rung in enumerate(rungs, 1):
                if progress is not None:
                    progress(f"counting FLOPs of model {number} of {len(rungs)}")
                priced.append([numbers(config, *rung, target) for target in config.targets])
    if len(priced) == len(rungs) > 0:
        # Problems found so far, so that none is reported twice: the model needs the tokenizer too, for example.
        told = "\n".join(problems)
        try:  # all runs share these settings, so checking one run is enough
            smallest = min(values["batch_size"] for each in priced for values in each)
            first = read_training(_train_values(config, train, *rungs[0], smallest, steps=1, seed=0, plugins=[]))
            if check_data:
                lines = evaluation_problems(first, lengths)
                problems += [line for line in lines if line.removeprefix("train.") not in told]
                check_loggers(first.run.loggers)
            # A study that has begun goes on, even if an old release took such keys.
            if root is not None and not (Path(root).parent / "study.yaml").is_file():
                problems += _unused(config, first, rungs)
        except ConfigError as error:
            problems += [
                f"train.{line}" for line in error.problems if (line.text if line.path == "model" else line) not in told
            ]
    refuse(problems, where)

    runs, dropped, contents = [], [], contents_of(first, cache)
    chosen = []
    for (architecture, size, model), each in zip(rungs, priced, strict=True):
        for target, values in zip(config.targets, each, strict=True):
            if reason := _reason(config, values):
                ratio = values["tokens"] / values["params_non_embedding"]
                dropped.append(Dropped(architecture.name, target, config.label(size), reason, ratio))
            else:
                chosen += [(architecture, size, model, seed, values, target) for seed in config.seeds]
    for point, (architecture, size, model) in zip(config.points, extra, strict=True):
        values = numbers(config, architecture, size, model, point.budget)
        if not values["steps"]:
            what = f"points: {architecture.name} {config.label(size)}"
            problems.append(f"{what}: {point.budget:g} FLOPs are less than one step")
        chosen.append((architecture, size, model, point.seed, values, None))
    refuse(problems, where)
    grid: dict[str, dict[float, list[PlannedRun]]] = {}  # architecture -> target -> its runs, without `points`
    for architecture, size, model, seed, values, place in chosen:
        used = [plugins[name] for name in sorted(model.options) if name in plugins]
        batch_size, steps = values["batch_size"], values["steps"]
        settings = _train_values(config, train, architecture, size, model, batch_size, steps, seed, used)
        run = resolve(read_training(settings))
        named = {"architecture": architecture.name, "size": config.label(size), "seed": seed, "train": run}
        with gather(problems):
            name = find(run, root, contents).folder.path.name
            runs.append(PlannedRun(run=name, **named, **values))
            if place is not None:
                grid.setdefault(architecture.name, {}).setdefault(place, []).append(runs[-1])
    refuse(problems, where)
    runs = list({run.run: run for run in runs}.values())  # a point of the grid may be given again under `points`
    if not runs:
        reasons = dict.fromkeys(f"{p.architecture} {p.size} at {p.target:.3g}: {p.reason}" for p in dropped)
        raise ConfigError(["no point of the ladder is left to train; every point is dropped", *reasons], where)
    runs.sort(key=_order)
    varied: list[RateRun] = []
    if config.rate_sensitivity:
        with gather(problems):
            varied = [run for targets in grid.values() for run in _other_rates(_middle(targets), contents, root)]
    refuse(problems, where)
    lost = {architecture.name: keys for architecture, _, model in rungs if (keys := lost_keys(architecture, model))}
    return Plan(config, tuple(runs), tuple(dropped), lost, tuple(sorted(varied, key=_order)))


def _unused(config: StudyConfig, first: TrainingConfig, rungs: list[Rung]) -> list[str]:
    """Returns which keys of a study are set, but not read with the values that other keys have.

    Args:
        first: settings of one run.
    """
    lines = [f"executor.{line}" for line in unread_problems(config.executor)]
    lines += [line if line.startswith("data.") else f"train.{line}" for line in unread_settings(first)]
    for architecture, _, model in rungs:  # others are set by the family, such as the number of heads
        prefixes = [f"options.{name}.{key}:" for name, options in architecture.options.items() for key in options]
        unused = [line for line in unused_options(model) if line.startswith(("aliases.", *prefixes))]
        lines += [f"architectures.{architecture.name}: {line}" for line in unused]
    return list(dict.fromkeys(lines))


def _order(run: PlannedRun) -> tuple:
    return -run.flops, -run.params_non_embedding, run.architecture, run.seed


def _middle(targets: dict[float, list[PlannedRun]]) -> PlannedRun:
    """Returns the run of the first seed, of the median size, at the median target; of two in the middle the smaller."""
    runs = targets[sorted(targets)[(len(targets) - 1) // 2]]
    first = sorted((run for run in runs if run.seed == runs[0].seed), key=lambda run: run.params_non_embedding)
    return first[(len(first) - 1) // 2]


def _other_rates(run: PlannedRun, contents: dict[str, str], root: str | Path | None) -> Iterator[RateRun]:
    """Yields a run at the other learning rates."""
    for factor in FACTORS:
        rate = factor * run.train.optimizer.learning_rate
        optimizer = run.train.optimizer.model_copy(update={"learning_rate": rate})
        train = run.train.model_copy(update={"optimizer": optimizer})
        name = find(train, root, contents).folder.path.name
        changes = {"run": name, "train": train, "learning_rate": rate, "of": run.run, "factor": factor}
        yield RateRun(**(vars(run) | changes))


def evaluation_problems(train: TrainingConfig, lengths: Iterable[int], data: Data | None = None) -> list[str]:
    """Returns the problems of the evaluations of runs with these settings.

    Args:
        train: settings of one run; the runs differ in `seq_len` only.
        lengths: tokens per training sequence of all runs.
        data: the prepared data, or None. Without data, only the problems that do not depend on them are found.
    """
    problems: list[str] = []
    runs = [train.model_copy(update={"seq_len": length}) for length in lengths] or [train]
    for run in runs:
        with gather(problems):
            find_objective(run).check_evaluations(run, data)
    return [f"train.{line}" for line in dict.fromkeys(problems)]


def unread_evaluation_problems(plan: Plan) -> list[str]:
    """Returns the problems of evaluations that show before any data are read, for a plan that was made without data.

    Evaluations that are checked only by reading their texts and tasks are left to the training.
    """
    first = plan.runs[0].train
    if not find_objective(first).evaluations_need_data(first):
        return []
    return evaluation_problems(first, sorted({run.seq_len for run in plan.runs if run.seq_len}))


def numbers(config: StudyConfig, architecture: Architecture, size: Size, model: StackConfig, target: float):
    """Returns the numbers of a run: steps, tokens (or images), FLOPs, parameters, learning rate."""
    seq_len, batch_size = config.row_length(architecture), batch_size_of(config, architecture, model, target)
    units = batch_size * (seq_len or 1)
    per_step = flops_exact(model, seq_len, batch_size)
    total, non_embedding = count_parameters(model)
    batches = steps = round(target / (per_step if config.budgets else units))
    if (ramp := config.train.get("batch_ramp")) is not None:
        parts = config.train.get("accumulation", 1)
        if batch_size % parts == 0:  # otherwise the run's own configuration is refused, by name
            steps = steps_of(batches * batch_size, batch_size, parts, ramp)
            batches = BatchSizes.over(batch_size, parts, ramp, steps).first(steps) / batch_size
    return {
        "budget": target if config.budgets else batches * per_step,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "steps": steps,
        "tokens": round(batches * units),
        "flops": batches * per_step,
        "params_total": total,
        "params_non_embedding": non_embedding,
        "learning_rate": rate_of(config, architecture, size, model),
    }


def _reason(config: StudyConfig, values: dict[str, Any]) -> str:
    """Returns why a point of the grid is dropped, or ""."""
    bounds, ratio = config.tokens_per_param, values["tokens"] / values["params_non_embedding"]
    if values["steps"] < config.minimum_steps:
        return f"fewer steps than minimum_steps: {config.minimum_steps}"
    if not bounds.low <= ratio <= bounds.high:
        return f"{find_units(config)} per parameter outside tokens_per_param: [{bounds.low:g}, {bounds.high:g}]"
    return ""


def batch_size_of(config: StudyConfig, architecture: Architecture, model: StackConfig, target: float) -> int:
    """Returns the sequences per step of a model at a budget, for other budgets than the grid's that of the nearest."""
    if architecture.batch_size is not None:
        return architecture.batch_size
    if config.batch_tokens is not None:
        return config.batch_tokens.at(target, count_parameters(model)[0]) // (config.row_length(architecture) or 1)
    if isinstance(config.batch_size, list):
        targets = config.targets
        return config.batch_size[min(range(len(targets)), key=lambda i: abs(math.log(targets[i] / target)))]
    return config.batch_size


def _rate_problems(config: StudyConfig, rungs: Iterable[Rung]) -> list[str]:
    problems: list[str] = []
    lacking: dict[str, list[str]] = {}  # file of rates -> architectures that it lacks
    for architecture, size, model in rungs:
        rule = architecture.learning_rate or config.learning_rate
        try:
            with gather(problems):
                if rule.file is not None and architecture.name not in read_rates(rule.file).architectures:
                    lacking.setdefault(rule.file, []).append(architecture.name)
                else:
                    rate_of(config, architecture, size, model)
        except ValueError as error:
            problems.append(str(error))
    for file, names in lacking.items():
        rates, names = read_rates(file), list(dict.fromkeys(names))
        study = f"study {rates.study}" if rates.study else "the study that was tuned"
        fix = f"run linnet study tune FILE --architectures {','.join(names)}, where FILE is that of {study}"
        known = ", ".join(sorted(rates.architectures))
        problems.append(f"learning_rate.from: {file} has no rates of {', '.join(names)}; known: {known}; {fix}")
    return list(dict.fromkeys(problems))


def rate_of(config: StudyConfig, architecture: Architecture, size: Size, model: StackConfig) -> float:
    """Returns the peak learning rate of a model. Raises ValueError: its table or file has none for this size."""
    rule = architecture.learning_rate or config.learning_rate
    if rule.file is not None:
        try:
            return read_rates(rule.file).of(architecture.name).at(model.d_model)
        except ConfigError as error:
            raise ValueError("; ".join(error.problems)) from None
        except ValueError as error:
            raise ValueError(f"learning_rate.from: {rule.file} {error}") from None
    return rule.of(size, rule_width(model))


def _without_pairs(config: StudyConfig, runs: Iterable[PlannedRun]) -> list[str]:
    """Returns which architectures have a base, but no run that `linnet.study.differences` can pair with one of it."""
    points: dict[str, set[tuple]] = {}
    for run in runs:
        shape = run.train.model.d_model, run.train.model.num_layers
        points.setdefault(run.architecture, set()).add((shape, run.seq_len, run.tokens, run.seed))
    alone = [
        variant
        for variant in config.architectures
        if variant.base and variant.name in points and variant.base in points
    ]
    alone = [variant for variant in alone if points[variant.name].isdisjoint(points[str(variant.base)])]
    if not alone:
        return []
    pairs, units = ", ".join(f"{variant.name} from {variant.base}" for variant in alone), find_units(config)
    shapes = [{point[0] for point in points[name]} for variant in alone for name in (variant.name, str(variant.base))]
    if config.budgets and any(not a.isdisjoint(b) for a, b in zip(shapes[::2], shapes[1::2], strict=True)):
        fix = f"one budget gives them different numbers of {units}; set `{units}` in place of `budgets`"
    else:
        fix = "give both the same sizes" + (" and seq_len" if units == "tokens" else "")
    return [f"no differences of {pairs}: no run of the two has the same shape and {units}; {fix}"]


def _without_runs(plan: Plan) -> list[str]:
    """Returns which architectures lost every point, one line per architecture."""
    lines, planned = [], {run.architecture for run in plan.runs}
    for name in dict.fromkeys(point.architecture for point in plan.dropped):
        if name in planned:
            continue
        points = [point for point in plan.dropped if point.architecture == name]
        reasons = "; ".join(dict.fromkeys(point.reason for point in points))
        low, high = min(point.ratio for point in points), max(point.ratio for point in points)
        shown = f"they have {low:.3g} to {high:.3g} {find_units(plan.config)} per parameter"
        fix = "give it other sizes or options, or change `tokens_per_param` or `minimum_steps`"
        lines.append(f"no run of architecture {name} is left: all its points are dropped ({reasons}); {shown}; {fix}")
    return lines


def _reaches(config: StudyConfig, runs: Iterable[PlannedRun]) -> list[str]:
    """Returns how far the rates of files are extrapolated, one line per architecture."""
    lines = []
    for architecture in config.architectures:
        rule = architecture.learning_rate or config.learning_rate
        widths = sorted({run.train.model.d_model for run in runs if run.architecture == architecture.name})
        if rule.file is None or not widths:
            continue
        text, far = reach(read_rates(rule.file), architecture.name, widths)
        lines.append(f"learning rates of {text}" + (f"; more than {WIDEST:g} x is a guess: tune wider" if far else ""))
    return lines


def _train_values(config, train, architecture, size, model, batch_size, steps, seed, plugins) -> dict[str, Any]:
    """Returns the settings of one run in the form of `TrainConfig`."""
    rate = rate_of(config, architecture, size, model)
    optimizer, run = train.get("optimizer", {}), train.get("run", {})
    every = max(1, steps // config.curve_points)
    return {
        "curve_every": every,
        **train,
        "run": {"log_every": every, **run} if isinstance(run, dict) else run,
        "architecture": architecture.name,
        "model": model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json"),
        **({} if (length := config.row_length(architecture)) is None else {"seq_len": length}),
        "batch_size": batch_size,
        "steps": steps,
        "seed": seed,
        "plugins": plugins,
        "optimizer": {**optimizer, "learning_rate": rate} if isinstance(optimizer, dict) else optimizer,
    }


def find_units(config: StudyConfig) -> str:
    """Returns the unit in which the data of a study are counted: tokens or images."""
    return OBJECTIVES[config.OBJECTIVE].units


def _vocab_size(data: DataConfig, problems: list[str]) -> int:
    """Returns the vocabulary size of the study's tokenizer without reading any text."""
    with gather(problems, "data.tokenizer: {}".format):
        return given_vocabulary(data.tokenizer)
    return 256
