"""The protocol: trains every run of a budget for each architecture, in bundles, the largest first.

Runs with a result are not trained again. At each setting the validation split selects the run that counts
(`linnet.mad.scores`); its accuracy is measured on the test split.
"""

import contextlib
import csv
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from linnet import trust
from linnet.config import ConfigError, gather, grouped, parse, refuse
from linnet.layers.base import load_plugin
from linnet.layers.positions import length_problems
from linnet.mad.architectures import recorded, state_size
from linnet.mad.bundle import DIVERGED, finish, run_flops, seconds_per_step, shape_of, train_bundle
from linnet.mad.results import PLAN, RUNS, TABLE, TEXTS, parse_result, read_layers, read_plan, read_results
from linnet.mad.scores import Scores, number_of, score, write_scores
from linnet.mad.settings import BUDGETS, PlannedRun, Setting, plan
from linnet.mad.training import MAD_LAB, MQAR, PAPER, Training
from linnet.models import ModelConfig
from linnet.models.recipes.mad import LAYERS, fit_length
from linnet.options import duration
from linnet.runs import RunFolder
from linnet.runs.files import FULL, csv_text, read_csv, room, write_atomic
from linnet.study.executors import Executor, ExecutorConfig, Job, Outcome, make_executor
from linnet.study.progress import StudyProgress, count
from linnet.study.timing import fit_line, seconds_of, wall_seconds
from linnet.train import device as devices
from linnet.train.objectives.synthetic import SyntheticObjective, synthetic_objective

# A folder of MAD runs: its plan, its lock, and the table of its results.
#
# <folder>/
#     plan.json     budget, specification, the models, and the names of the run folders
#     runs/         one folder per run: config.yaml, metrics.jsonl, result.json
#     mad.csv       all results, a pure function of plan.json and the run folders
#     scores.csv    the scores of the architectures

_OPTIONS = {
    "spare_decay": "--no-weight-decay",
    "layers": "--layers",
    "training": "--training",
}  # keys of plan.json, which never change -> current options

_SORTED = ("architecture", "setting", "learning_rate", "weight_decay", "seed")
COLUMNS = (
    "architecture task setting varied learning_rate weight_decay seed accuracy macro_batch validation_accuracy loss "
    "validation_loss train_loss epoch parameters state_size status diverged_at steps budget spec decay loads run layers"
).split()


def collect(folder: Path) -> list[dict[str, Any]]:
    """Writes the results of all run folders to mad.csv, atomically, and returns them by architecture and setting."""
    rows, layers = [], read_layers(folder)
    for path in sorted((folder / RUNS).glob("*/result.json")):
        row = (run := RunFolder(path.parent)).result()
        if missing := [key for key in _SORTED if key not in row]:
            raise run.damaged_result(f"it has no {', '.join(missing)}")
        rows.append(row | {"run": path.parent.name, "layers": " ".join(layers.get(row["architecture"], ()))})
    rows.sort(key=lambda row: [row[key] for key in _SORTED])
    cells = (row | {"loads": json.dumps(row["loads"]) if row.get("loads") else ""} for row in rows)
    write_atomic(folder / TABLE, csv_text(COLUMNS, cells))
    return rows


def read_known(
    folder: str | Path, about: Mapping[str, Any], models: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Returns the results of another folder by the names of their run folders, which have digests of configurations.

    Results of a model that is another one there, or whose mixer file is another, are left out. about, models: of the
    folder that takes the results, as in `check_plan`.

    Raises:
        ConfigError: lists all problems: not a folder of `linnet mad run`, other settings (its precision for example),
            or rows that are not results.
    """
    table, plan = Path(folder) / TABLE, read_plan(Path(folder))
    if not plan or not table.is_file():
        raise ConfigError([f"known {folder}: has no {TABLE} and {PLAN}; give a folder of linnet mad run"], "MAD")
    problems = [
        f"known {folder}: its runs have {_OPTIONS.get(key, key)} {plan.get(key)}, not {value}; leave it out"
        for key, value in about.items()
        if key != "budget" and plan.get(key) != value
    ]
    known, there = {}, plan.get("models", {})
    same = {name for name, model in models.items() if name in there and not any(_changes(there[name], model))}
    try:
        reader = read_csv(table)
        if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
            problems.append(f"known {table}: has no column {', '.join(missing)}; linnet mad run writes it")
        for line, row in enumerate(() if missing else reader, start=2):
            try:
                values = {key: _value(key, row[key]) for key in COLUMNS[:-2]}
                parse_result(values)
                if row["architecture"] in same:
                    known[row["run"]] = values | {"known": str(folder)}
            except (TypeError, ValueError) as error:
                problems.append(f"known {table}, line {line}: {error}; delete the line")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"known {table}: cannot be read ({error})")
    refuse(problems, "MAD", most=8)
    return known


def _value(key: str, text: str | None) -> Any:
    """A cell as a result.json has it."""
    if text is None:
        raise ValueError("it is cut off")
    return text if key in TEXTS else json.loads(text) if text else None


def adopt(root: Path, configs: Iterable[Mapping[str, Any]], known: Mapping[str, Mapping[str, Any]], budget: str) -> int:
    """Gives runs without a result the one that is known of them. Returns how many got one."""
    count = 0
    for config in configs:
        name = RunFolder.name(config)
        if name in known and not RunFolder(root / name).done:
            run = RunFolder.create(root, config)
            run.write_result({**known[name], "budget": budget})
            shutil.rmtree(run.checkpoint_folder, ignore_errors=True)
            count += 1
    return count


def designs(architectures: Mapping[str, ModelConfig], plugins: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the record of each architecture: its model, and the digests of the files of its mixers."""
    sums = {load_plugin(plugin): trust.plugin_digest(plugin)[:12] for plugin in plugins}
    return {
        name: recorded(model)
        | {"mixer file": {spec.mixer: sums[spec.mixer] for spec in model.blocks if spec.mixer in sums}}
        for name, model in architectures.items()
    }


def check_plan(folder: Path, about: Mapping[str, Any], models: Mapping[str, dict[str, Any]]) -> None:
    """Checks that a folder contains only runs of this budget and specification, and one model per name.

    Args:
        about: budget and other settings that all runs of the folder share. models: as `designs` returns them.

    Raises:
        ConfigError: the folder contains other runs, or is a file; lists all problems.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError([f"{folder}: is a file; choose another --out"], "MAD")
    before = read_plan(folder)
    if before:  # folders of earlier releases do not say these
        before = {"layers": "paper", "training": before.get("spec", "paper")} | before
    problems = [
        f"{folder}: has runs with {_OPTIONS.get(key, key)} {before[key]}, not {value}; give another --out"
        for key, value in about.items()
        if before.get(key, value) != value
    ]
    known = before.get("models", {})
    changed = {name: ", ".join(_changes(known[name], model)) for name, model in models.items() if name in known}
    if any(changed.values()):
        runs = [RunFolder(path) for path in (folder / RUNS).glob("*") if path.is_dir()]
        begun = {run.config["architecture"] for run in runs if run.done or run.checkpoints()}
        problems += [
            f"{folder}: has runs of another model named {name} ({what}); give another --out"
            for name, what in changed.items()
            if what and name in begun
        ]
    refuse(problems, "MAD")


def write_plan(
    folder: Path, about: Mapping[str, Any], models: Mapping[str, dict[str, Any]], runs: Sequence[str]
) -> None:
    """Adds models and the names of runs to the plan of a folder."""
    before = read_plan(folder)
    whole = dict(about) | {"models": before.get("models", {}) | models}
    whole["runs"] = list(dict.fromkeys([*before.get("runs", []), *runs]))
    write_atomic(folder / PLAN, json.dumps(whole, indent=1) + "\n")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Creates the folder and locks it, so that two processes do not train the same runs."""
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ConfigError([f"{folder}: cannot be created ({error.strerror}); choose another --out"], "MAD") from None
    with RunFolder(folder).alone("linnet mad run", "MAD"):
        yield


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changes(before, after, f"{at}{key}.")
        elif before != after:
            yield f"{at}{key} was {before!r} and is {after!r}"


LARGEST_BUNDLE = 24


@dataclass(frozen=True)
class MadRun:
    """One model to train: the configuration of its run folder, and its training FLOPs."""

    config: dict[str, Any]
    flops: float

    @property
    def run(self) -> str:
        return RunFolder.name(self.config)

    @property
    def steps(self) -> int:
        """Number of updates, if no early stop ends the run."""
        return self.config["epochs"] * -(-self.config["train_samples"] // self.config["batch_size"])

    @property
    def scored(self) -> float:
        """Number of samples that are scored, in all, over that of trained ones."""
        epochs = self.config["epochs"]
        scored = Training.of(self.config).scorings(epochs) * self.config["held_out"]
        return scored / (epochs * self.config["train_samples"])

    @property
    def shape(self) -> str:
        """Returns a key that is equal for runs that can be trained together."""
        return shape_of(self.config)


@dataclass(frozen=True)
class Work:
    """Checked work for `train`.

    Attributes:
        about: settings that all runs of the folder share. models: the record of each architecture.
        device: "cpu" or "cuda". plugins: files of mixers.
        known: results that count as done, by the name of the run folder.
    """

    folder: Path
    about: dict[str, Any]
    models: dict[str, dict[str, Any]]
    runs: list[MadRun]
    executor: Executor
    device: str
    plugins: tuple[str, ...]
    known: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def missing(self) -> list[MadRun]:
        """The runs that have no result, in the folder or known from another."""
        root = self.folder / RUNS
        return [run for run in self.runs if run.run not in self.known and not RunFolder(root / run.run).done]

    def groups(self, bundle: int | None) -> list[list[MadRun]]:
        """Returns the missing runs in bundles of at most `bundle`, None as in `train`."""
        return bundles(self.missing, bundle or (LARGEST_BUNDLE if self.device == "cuda" else 1))


@dataclass(frozen=True)
class MadResult:
    """The outcome of `train`. `failed`: each run without a result, with the last line of its error."""

    folder: Path
    scores: Scores | None
    failed: dict[str, str]


class Forms(NamedTuple):
    """Which form of the benchmark is run: each "paper", or "mad-lab" for that of the published implementation."""

    spec: str
    layers: str
    training: str


def forms(budget: str, spec: str | None = None, layers: str | None = None, training: str | None = None) -> Forms:
    """Returns the forms of a budget, where None stands for that of the budget.

    Raises:
        ConfigError: lists all problems: an unknown form, or one that the budget is not defined with.
    """
    chosen, problems = BUDGETS.get(budget), []
    required = {"spec": None, "layers": None} if chosen is None else {"spec": chosen.spec, "layers": chosen.layers}
    required["training"] = required["spec"]
    form = {"spec": spec or required["spec"] or "paper", "layers": layers or required["layers"] or "paper"}
    form["training"] = training or form["spec"]
    for key, value in form.items():
        if value not in LAYERS:
            if key == "training" and training is None:
                continue  # that of `spec`, which is reported
            problems.append(f"{key} {value!r} is unknown; use paper or mad-lab")
        elif required[key] not in (None, value):
            problems.append(f"{key} {value!r}: the budget {budget} is defined with {required[key]}; leave {key} out")
        elif chosen is not None and chosen.mqar and value != "paper":
            problems.append(f"{key} {value!r}: MQAR has one form only; leave {key} out")
    refuse(problems, "MAD")
    return Forms(**form)


def mad_runs(
    architectures: Mapping[str, ModelConfig],
    budget: str = "core",
    *,
    tasks: Sequence[str] = (),
    settings: Sequence[str] = (),
    spec: str | None = None,
    seeds: Sequence[int] | None = None,
    decay: Literal["all", "matrices"] = "all",
    layers: str | None = None,
    training: str | None = None,
) -> list[MadRun]:
    """Returns every run of a budget; arguments as in `prepare`.

    Raises `ConfigError` as `plan` does, and for a model that fits no task.
    """
    planned = plan(budget, tasks=tasks, settings=settings, spec=spec)
    chosen = forms(budget, spec, layers, training)
    seeds = (BUDGETS[budget].seed,) if seeds is None else seeds
    form = MQAR if BUDGETS[budget].mqar else MAD_LAB if chosen.training == "mad-lab" else PAPER
    form = replace(form, matrices_only=decay == "matrices")
    extras: dict[str, Any] = {} if form == PAPER else {"training": form.to_dict()}
    extras |= {} if chosen.layers == "paper" else {"layers": chosen.layers}
    runs, problems = [], []
    for name, model in architectures.items():
        problems += _table_problems(name, model, planned)
        shapes: dict[Setting, dict[str, Any]] = {}
        costs: dict[Setting, float] = {}
        for run in planned:
            if run.setting not in shapes:
                shapes[run.setting] = {}
                with gather(problems, f"{name} at {run.setting.name}: {{}}".format):
                    objective = _objective(model, run, chosen.layers == "mad-lab")
                    shapes[run.setting] = _shape(objective, run) | extras
                    costs[run.setting] = run_flops(shapes[run.setting], objective)
        if problems:
            continue
        for run in planned:
            point = {"learning_rate": run.point.learning_rate, "weight_decay": run.point.weight_decay}
            about = {"name": f"{name}-{run.name}", "architecture": name, **shapes[run.setting], **point}
            runs += [MadRun(about | {"seed": seed}, costs[run.setting]) for seed in seeds]
    refuse(problems, "MAD")
    return runs


def bundles(runs: Sequence[MadRun], largest: int) -> list[list[MadRun]]:
    """Groups runs of one shape, at most `largest` per bundle; bundles with the most work come first.

    Runs with like vocabularies share a bundle, so that little is padded.
    """
    groups = grouped((run.shape, run) for run in runs)
    if largest > 1:
        groups = {
            key: sorted(group, key=lambda run: run.config["model"]["vocab_size"]) for key, group in groups.items()
        }
    chunks = [group[i : i + largest] for group in groups.values() for i in range(0, len(group), largest)]
    return sorted(chunks, key=lambda bundle: -sum(run.flops for run in bundle))


def prepare(
    architectures: Mapping[str, ModelConfig],
    folder: str | Path,
    *,
    budget: str = "core",
    tasks: Sequence[str] = (),
    settings: Sequence[str] = (),
    spec: str | None = None,
    seeds: Sequence[int] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    executor: ExecutorConfig | None = None,
    plugins: Sequence[str] = (),
    decay: Literal["all", "matrices"] = "all",
    layers: str | None = None,
    training: str | None = None,
    known: str | Path | None = None,
) -> Work:
    """Plans all runs of a budget and writes nothing. Runs use float32 on a CPU and bfloat16 autocast on a GPU.

    Args:
        architectures: name -> model; each task sets the vocabulary.
        folder: folder for one budget, specification and device type; several calls may add architectures, tasks and
            seeds.
        tasks, settings: restrict the runs to these, as in `plan`.
        executor: where bundles are trained; None is one process per GPU, or per CPU core.
        plugins: files of mixers, in the form of `linnet.layers.base.load_plugin`.
        decay: whether weight decay acts on "all" parameters, or on the "matrices" of linear layers alone.
        spec: distributions of the tasks, "paper" or "mad-lab"; None is that of the budget, or "paper".
        seeds: None is that of the budget.
        layers: "paper" or "mad-lab", as the models were made (`linnet.mad.architectures.architecture`); None is
            that of the budget, or "paper".
        training: form of training, "paper" or "mad-lab"; None is that of `spec`.
        known: another folder of runs in the same form and precision; a run of the same configuration that has a row in
            its mad.csv is not trained again.

    Raises:
        ConfigError: all problems at once: an unknown budget, task, setting or device, a model that does not fit a
            task, a folder with other runs, or a `known` one that does not fit. Only if there are none: a Ray
            cluster that cannot be reached.
    """
    folder, problems = Path(folder), []
    runs: list[MadRun] = []
    models: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = {"budget": budget, "spare_decay": decay == "matrices"}
    with gather(problems):
        form = forms(budget, spec, layers, training)
        about |= {"spec": form.spec, "layers": form.layers, "training": form.training}
    with gather(problems):
        options = {"layers": layers, "training": training, "seeds": seeds, "decay": decay}
        runs = mad_runs(architectures, budget, tasks=tasks, settings=settings, spec=spec, **options)
    with gather(problems):
        kind = devices.choose(device).type
        about["precision"] = "bfloat16" if kind == "cuda" else "float32"
    with gather(problems):
        models = designs(architectures, plugins)
    with gather(problems):
        check_plan(folder, about if budget in BUDGETS else {}, models)
    results: dict[str, dict[str, Any]] = {}
    with gather(problems):
        results = {} if known is None else read_known(known, about, models)
    refuse(problems, "MAD")
    workers = make_executor(executor or ExecutorConfig(retries=1))  # last, because it may start Ray
    return Work(folder, about, models, runs, workers, kind, tuple(plugins), results)


def train(work: Work, *, bundle: int | None = None, compile: bool = False, console: Console | None = None) -> MadResult:
    """Trains the runs of prepared work that have no result, then scores all runs of the folder.

    Args:
        bundle: largest number of runs trained together; None is 24 on a GPU and 1 on a CPU, which one model keeps busy.
        compile: whether bundles go through `torch.compile`.

    Raises:
        ConfigError: another process works in the folder; or, later, the disk is full. Finished runs are kept.
        KeyboardInterrupt: stopped. Finished runs are kept.
    """
    folder, console = work.folder, console or Console(quiet=True)
    with room(folder, "MAD"), alone(folder):
        finish(RunFolder(path) for path in (folder / RUNS).iterdir())  # bundles that were killed while writing results
        check_plan(folder, work.about, work.models)  # again, since only now no other process can change it
        write_plan(folder, work.about, work.models, [run.run for run in work.runs])
        trust.remember(work.plugins)
        if taken := adopt(folder / RUNS, [run.config for run in work.runs], work.known, work.about["budget"]):
            console.print(f"{taken} of {len(work.runs)} results are those of the known folder")
        missing = work.missing
        if len(missing) < len(work.runs):
            console.print(f"{len(work.runs) - len(missing)} of {len(work.runs)} runs are done; {len(missing)} to go")
        failed: dict[str, str] = {}
        try:
            if missing:
                groups = work.groups(bundle)
                console.print(cost(missing, len(groups)))
                jobs = [_job(group, work, compile) for group in groups]
                failed = _train(missing, jobs, folder, work.executor, console)
        finally:
            rows = collect(folder)  # also after an error, so that the table has all finished runs
        scores = score(read_results(folder), **number_of(work.about["budget"])) if rows else None
        if scores is not None:
            write_scores(folder, scores)
    return MadResult(folder, scores, failed)


def _objective(model: ModelConfig, run: PlannedRun, published: bool) -> SyntheticObjective:
    """Returns the objective of an architecture at one setting, with the setting's vocabulary, width and length."""
    task = run.setting.task
    changes = {"vocab_size": task.num_tokens, "d_model": run.setting.width or model.d_model}
    config = fit_length(parse(ModelConfig, model.model_dump() | changes), task.input_length, task.seq_len)
    return synthetic_objective(task, config, published)


def _table_problems(name: str, model: ModelConfig, planned: Sequence[PlannedRun]) -> list[str]:
    """Returns why a learned table of positions is too short for the planned settings: one line, of the longest."""
    longest = max((run.setting for run in planned), key=lambda setting: setting.task.input_length)
    length = longest.task.input_length
    fix = f"use positions: none, or num_positions: {length}"
    return length_problems(f"{name} at {longest.name}: seq_len", length, model.num_positions, fix)


def _shape(objective: SyntheticObjective, run: PlannedRun) -> dict[str, Any]:
    """Returns the keys that the runs of an architecture at one setting have in common.

    The name of each run folder depends on them, so keys that an objective does not need stay unchanged.
    """
    task = objective.task
    shape = {
        "model": recorded(objective.model),
        **run.setting.to_dict(),
        "autoencoder": task.autoencoder,
        "input_length": task.input_length,
        "epochs": run.epochs,
        "batch_size": run.batch_size,
    }
    return shape | ({} if task.questions is None else {"answers": task.questions})


def _job(group: list[MadRun], work: Work, compile: bool) -> Job:
    model = ModelConfig.model_validate(group[0].config["model"])
    payload = {
        "root": str(work.folder / RUNS),
        "device": work.device,
        "precision": work.about["precision"],
        "compile": compile,
        "plugins": list(work.plugins),
        "plugin_digests": trust.digests(work.plugins),
        "common": {"state_size": state_size(model), "budget": work.about["budget"]},  # of all results
        "runs": [run.config for run in group],
    }
    return Job(group[0].run, payload)


def cost(runs: Sequence[MadRun], groups: int) -> str:
    """Describes the work ahead: model-steps and FLOPs, "at most" if runs may end early."""
    steps = sum(run.steps for run in runs)
    most = "at most " if any(Training.of(run.config).watch for run in runs) else ""
    work = f"{most}{count(steps)} model-steps and {sum(run.flops for run in runs):.2g} FLOPs"
    return f"{len(runs)} runs in {groups} bundles: {work}"


def estimate(work: Work, progress: Callable[[str], None] | None = None) -> float | None:
    """Returns the seconds that the missing runs take; None on a GPU, or if this machine cannot time a step.

    Scoring a sample takes the time of a forward pass, a third of a training step's.

    Args:
        progress: is called with the name of the architecture whose steps are timed.
    """
    if work.device != "cpu":
        return None
    missing, seconds = work.missing, []
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(work.executor, "threads", before))
    try:
        for name in dict.fromkeys(run.config["architecture"] for run in missing):
            if progress is not None:
                progress(f"timing a few steps of {name}")
            runs = [run for run in missing if run.config["architecture"] == name]
            line = fit_line({run.flops / run.steps: run.config for run in runs}, seconds_per_step)
            if line is None:
                return None
            seconds += [seconds_of(line, run.steps, run.flops) * (1 + run.scored / 3) for run in runs]
    finally:
        torch.set_num_threads(before)
    return wall_seconds(seconds, work.executor.workers)


def _train(runs: list[MadRun], jobs: list[Job], folder: Path, executor: Executor, console: Console) -> dict[str, str]:
    """Runs the jobs and returns the runs that failed, each with the last line of its error."""
    root = folder / RUNS
    progress = StudyProgress(runs, root, None, executor.workers, console)
    failed: dict[str, str] = {}
    width = max(len(run.config["architecture"]) for run in runs)
    with progress, contextlib.closing(executor.run(jobs, train_bundle)) as outcomes:
        for outcome in outcomes:
            if outcome is None:
                progress.tick()
                continue
            for run in outcome.job.payload["runs"]:
                name = RunFolder.name(run)
                if not RunFolder(root / name).done:
                    RunFolder.create(root, run).write_error(outcome.error)
                    failed[name] = outcome.error.strip().splitlines()[-1].strip()
                progress.line(name, _line(run, outcome, root / name, width))
    return failed


def _line(run: dict[str, Any], outcome: Outcome, path: Path, width: int) -> str:
    """Describes a run and its result in one line, with the architecture in a column of `width`."""
    point = f"lr {run['learning_rate']:g} wd {run['weight_decay']:g}"
    head = f"{escape(run['architecture'].ljust(width))}  {run['setting']:<34} {point:<16}"
    if not RunFolder(path).done:
        return f"{head}  [red]failed[/]: {escape(outcome.error.strip().splitlines()[-1].strip())}"
    result = RunFolder(path).result()
    if result["status"] == DIVERGED:
        step = result["diverged_at"]  # None if only the scores were not finite
        return f"{head}  [red]diverged[/] at step {step or result['steps']} of {MadRun(run, 0.0).steps}"
    return f"{head}  accuracy {result['accuracy']:.3f}  loss {result['loss']:.3f}  {duration(outcome.seconds)}"
