"""The records of a report: the study folder, read once. This module trains nothing.

study.yaml                       the configuration
table.csv                        one row per run
<path of the run>/metrics.jsonl  its training curve

Or any folder of run folders, whose table is made here.
"""

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from linnet import provenance
from linnet.config import ConfigError, digest, read_yaml, refuse
from linnet.laws.fit import ArchitectureFit, Crossing, IsoflopGroup, Law, StudyFit, fit_study
from linnet.laws.fit.reading import unended_note
from linnet.laws.fit.table import labels, other_tokens
from linnet.runs import RunFolder
from linnet.runs.record import curve_rows
from linnet.study.collect import COLUMNS, IMAGE_COLUMNS, PLAN, TEXTS, complete, describe, load_study, read_plan, renew
from linnet.study.sensitivity import Sensitivity, read_sensitivities

_TOKEN = re.compile(r"(?<![\w-])token(s?)(?![\w-])")
CURVE_BINS = 40  # points of a training curve that are drawn
IMAGES = IMAGE_COLUMNS["tokens"]
REQUIRED = ("run", "architecture", "params_non_embedding", "tokens", "flops", "loss")


@dataclass(frozen=True)
class OneRun:
    """One run in memory, for its page. `architectures` is its name, under the name that `Canvas` reads.

    Attributes:
        curve: training rows of metrics.jsonl with a finite loss. validations: its validation rows with one.
        evaluations: its rows of evaluations that did not fail.
    """

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    curve: list[dict]
    validations: list[dict]
    evaluations: list[dict]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def architectures(self) -> list[str]:
        return [self.name]


def read_run(run: str | Path) -> OneRun:
    """Reads a run folder; a run that is not done has no result. Raises ConfigError if it cannot be read."""
    folder = RunFolder.open(run)
    result: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):
        result = folder.result()
    rows = folder.metrics()
    curve = [row for row in curve_rows(rows) if finite(row.get("loss")) and "step" in row]
    validations = [row for row in rows if finite(row.get("validation_loss")) and "step" in row]
    evaluations = [row for row in rows if "metrics" in row and "step" in row]
    return OneRun(folder.path, folder.config, result, curve, validations, evaluations)


def finite(value: Any) -> bool:
    """Whether a value is a number that is neither NaN nor infinite."""
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass
class Study:
    """A study folder in memory.

    Attributes:
        folder: where it is.
        config: study.yaml as a plain mapping, empty when there is none.
        table: DataFrame of all rows with the columns `COLUMNS`; `usable` marks runs that ended with a finite loss. For
            images the columns of tokens count images, and there is a column `accuracy`.
        curves: DataFrame (run, architecture, params_non_embedding, tokens, flops, loss), thinned for drawing.
        planned: whether it is a study, not just a folder of runs.
        fit: the laws of all architectures, or None where the table could not be fitted.
        problems: sentences about parts of the report that could not be made.
        units: what the data are counted in: tokens or images.
        incomparable: why the losses of the runs do not compare (other texts, or tokens of another tokenizer), or "".
        data: run -> digest of its data and tokenizer, of a folder of runs; a study has one for all.
    """

    folder: Path
    config: dict[str, Any]
    table: Any
    curves: Any
    planned: bool = True
    fit: StudyFit | None = None
    problems: list[str] = field(default_factory=list)
    units: str = "tokens"
    incomparable: str = ""
    data: dict[str, str] = field(default_factory=dict)

    def in_units(self, text: str) -> str:
        """Returns text that was written for a study of texts in the units of this one: "nats per image"."""
        if self.units == "tokens":
            return text
        return _TOKEN.sub(lambda match: self.units[: len(self.units) - (match[1] == "")], text)

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def architectures(self) -> list[str]:
        """In the order of study.yaml; those of the table alone come last."""
        named = self.config.get("architectures") or []
        named = [entry.get("name") if isinstance(entry, dict) else entry for entry in named]
        recorded = list(dict.fromkeys(self.table["architecture"]))
        return [name for name in named if name in recorded] + [name for name in recorded if name not in named]

    @property
    def bases(self) -> dict[str, str | None]:
        """Architecture -> the one that its losses are compared with, of those that study.yaml gives settings."""
        entries = self.config.get("architectures") or []
        return {str(entry.get("name")): entry.get("base") for entry in entries if isinstance(entry, dict)}

    @property
    def fits(self) -> dict[str, ArchitectureFit]:
        """Architecture -> its fit, in the order of `architectures`."""
        return {name: self.fit[name] for name in self.architectures if self.fit is not None and name in self.fit}

    @property
    def crossings(self) -> list[Crossing]:
        """Where the laws of loss of two architectures meet, in the order of `architectures`."""
        order = {name: index for index, name in enumerate(self.architectures)}
        pairs = self.fit.crossings if self.fit is not None else []
        return sorted(pairs, key=lambda pair: sorted((order[pair.first], order[pair.second])))

    @property
    def seeds(self) -> list[int]:
        return list(self.config.get("seeds") or [])

    @property
    def usable(self):
        return self.table[self.table["usable"]]

    @property
    def budgets(self) -> list[float]:
        """Compute budgets that several runs share; empty for a study that fixes tokens, or images, instead.

        There, seeds of one size spend the same compute, but other sizes do not.
        """
        if self.config.get("tokens") or self.config.get(IMAGES):
            return []
        runs = self.usable["budget"].value_counts()
        return sorted(runs[runs > 1].index)

    @property
    def sensitivities(self) -> dict[str, Sensitivity]:
        """Architecture -> its losses at three learning rates, {} for a study without `rate_sensitivity`."""
        if not (self.folder / PLAN).is_file():
            return {}
        try:
            sensitivities = read_sensitivities(self.folder)
        except ConfigError:  # a damaged plan or result
            return {}
        return {name: sensitivities[name] for name in self.architectures if name in sensitivities}

    @property
    def made(self) -> str:
        """When and with what the runs were made: dates, versions and devices, from their result.json."""
        folders = [self.run_folder(row) for _, row in self.usable.iterrows()]
        results = []
        for folder in folders:
            with contextlib.suppress(ConfigError):  # a run that is not done, or a damaged result
                results += [RunFolder(folder).result()] if folder is not None else []
        return provenance.shown(results)

    def run_folder(self, row) -> Path | None:
        """The folder of a run of the table, or None where the table names none. Relative paths start at the study."""
        if not isinstance(row["path"], str) or not row["path"]:
            return None
        return self.folder / row["path"]


def read_study(
    folder: str | Path,
    fit: StudyFit | None = None,
    bootstrap: int = 1000,
    exclude: Sequence[str] = (),
    best_of: bool = False,
) -> Study:
    """Reads a study folder and fits its laws.

    Args:
        fit: the laws, where the caller has fitted them to this folder already.
        bootstrap: resamples for the intervals of the laws, as in `linnet fit`.
        exclude, best_of: see `linnet.laws.fit.load_table`.

    Raises:
        ConfigError: there is no such folder, neither table.csv nor runs in it, or the table lacks columns or rows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        problem = f"STUDY {str(folder)!r}: there is no such folder; give the one that linnet study printed"
        raise ConfigError([problem], "report")
    config = _read_config(folder)
    stale = renew(folder)
    runs, unread = ([], []) if (folder / "table.csv").is_file() else _rows_of_runs(folder)
    if runs:
        units = "images" if all(IMAGES in row for row in runs) else "tokens"
        study = Study(folder, config, check_table(runs), None, planned=False, units=units, problems=unread)
        study.curves = _read_curves(study)
        study.data = {row["run"]: _data_of(folder / row["run"]) for row in runs}
        kinds = len({study.data.get(run) for run in study.usable["run"]})
        if kinds > 1:
            study.incomparable = f"the runs have {kinds} settings of `data` (texts and tokenizers)"
        return study
    table, units = _read_table(folder / "table.csv", folder)
    study = Study(folder, config, table, None, units=units, problems=stale)
    if not stale and (note := unended_note((folder / "table.csv").read_text(encoding="utf-8"))):
        study.problems.append(f"table.csv, {note}")
    planned = _planned(folder)
    if planned > len(table):
        missing = planned - len(table)
        study.problems.append(f"{missing} of {planned} planned runs have not begun; linnet study goes on with them")
    if not config:
        study.problems.append("There is no study.yaml, so the configuration is not shown")
    study.curves = _read_curves(study)
    study.fit = fit if fit is not None else _fit(study, bootstrap, exclude, best_of)
    return study


def first_architecture(folder: Path, rows) -> str:
    """Returns the architecture of some rows of a study folder that laws compare the others with: the study's first."""
    return Study(folder, _read_config(folder), rows, None).architectures[0]


def _read_config(folder: Path) -> dict[str, Any]:
    return read_yaml(folder / "study.yaml") if (folder / "study.yaml").is_file() else {}


def as_study(source: Path, rows, fit: StudyFit) -> Study:
    """Returns the runs that were fitted as a study: those of a study folder, or a table of `load_table`."""
    if source.is_dir():
        study = read_study(source, fit)
        fitted = study.table["run"].isin(rows["run"]) | ~study.table["usable"]
        study.table = study.table[fitted & study.table["architecture"].isin(list(fit))]
        return study
    names = {"N": "params_non_embedding", "N_total": "params_total", "D": "tokens", "C": "flops"}
    table = check_table(rows.rename(columns=names).to_dict("records"))
    units = IMAGES if rows.attrs["columns"].get("D") == IMAGES else "tokens"
    return Study(source, {}, table, None, fit=fit, units=units, incomparable=other_tokens(rows))


def _data_of(folder: Path) -> str:
    """Returns a digest of what a run was trained and scored on: `data`, and the tokenizer that was trained from it."""
    run = RunFolder(folder)
    settings = {name: value for name, value in (run.config.get("data") or {}).items() if name != "packing"}
    tokenizer = folder / "tokenizer.json"  # `linnet.runs.model.TOKENIZER`, whose module needs torch
    text = tokenizer.read_text(encoding="utf-8", errors="replace") if tokenizer.is_file() else ""
    return digest([settings, text])


def _fit(study: Study, bootstrap: int, exclude: Sequence[str], best_of: bool) -> StudyFit | None:
    """Fits the laws; if this fails, the page reports the problem and shows the rest."""
    try:
        table, curves, _ = load_study(study.folder, exclude=exclude, best_of=best_of)
        if curves is not None:
            curves = curves[curves["run"].isin(table["run"])]
        return fit_study(table, curves, bootstrap=bootstrap)
    except ConfigError as error:
        study.problems.append(f"No laws could be fitted: {'; '.join(error.problems)}")
        return None


def _planned(folder: Path) -> int:
    """Returns the number of planned runs, 0 if the folder does not hold a plan."""
    try:
        return len(read_plan(folder))
    except ConfigError:
        return 0


def _read_table(path: Path, folder: Path):
    if not path.is_file():
        fix = "run linnet study to the end of at least one run, or give a folder of run folders"
        if (folder / "config.yaml").is_file():
            fix = f"this is one run; `linnet runs tail {folder}` shows its losses, and a folder of runs has a page"
        raise ConfigError([f"{path}: there is no such file; {fix}"], "report")
    try:
        table = pd.read_csv(path)
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not a CSV table ({' '.join(str(error).split())})"], "report") from None
    units = IMAGES if IMAGES in table else "tokens"
    missing = [name for name in REQUIRED if name not in table and (name, units) != ("tokens", IMAGES)]
    if missing:
        problems = [f"{path}: column {name!r} is not there; linnet study writes it" for name in missing]
        raise ConfigError(problems, "report")
    if table.empty:
        raise ConfigError([f"{path}: no rows; wait for the first run of linnet study to end"], "report")
    rows = table.to_dict("records")
    complete(rows, folder)  # a table of an earlier release lacks the columns that follow from the configurations
    return check_table(rows), units


def _rows_of_runs(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The columns of a table from the run folders that lie in `folder`, and which of them cannot be read."""
    rows, problems, unread = [], [], []
    for run in RunFolder.all(folder):
        path, reason = run.path, "config.yaml names no model"
        try:
            known = "model" in run.config
        except ConfigError as error:
            known, reason = False, "; ".join(error.problems)
        if not known:
            unread += [f"{path.name} is left out: {reason}"] if run.done or run.metrics() else []
            continue
        try:
            result = run.result() if run.done else {}
            row = {"run": path.name, "path": path.name, "architecture": run.config.get("architecture") or path.name}
            row |= {"status": "failed" if run.error() is not None else "unfinished"}
            if not run.done:  # its parameters are not recorded yet; only counting them needs torch
                from linnet.models import count_parameters
                from linnet.runs.model import read_config

                with contextlib.suppress(ConfigError):  # the run is shown even if its model cannot be read
                    row["params_total"], row["params_non_embedding"] = count_parameters(read_config(run))
            known = {*COLUMNS, *IMAGE_COLUMNS.values()} - {"run"}  # in a result, `run` is how it was executed
            row |= {name: value for name, value in result.items() if name in known}
            rows.append(row | describe(run, row.get("flops")))
        except ConfigError as error:
            problems += error.problems
    refuse(problems, "report")
    return rows, unread


def check_table(rows):
    """Rows as the table of a study, with `usable`."""
    table = pd.DataFrame(rows)
    for name, column in IMAGE_COLUMNS.items():
        if column in table and column != "accuracy":
            table[name] = table[name].fillna(table[column]) if name in table else table[column]
    table = table.reindex(columns=[*COLUMNS, "accuracy"])
    texts = ("run", "architecture", "status", "path", *TEXTS)
    for name in table:
        if name not in texts:
            table[name] = pd.to_numeric(table[name], errors="coerce")
    table["status"] = table["status"].astype(object).fillna("done")
    for name in ("run", "architecture"):
        table[name] = labels(table[name].astype(str))
    numbers = table[["params_non_embedding", "tokens", "flops", "loss"]]
    table["usable"] = (table["status"] == "done") & ((numbers > 0) & (numbers < math.inf)).all(axis=1)
    return table


def _read_curves(study: Study):
    columns = ["run", "architecture", "params_non_embedding", "tokens", "flops", "loss"]
    rows, silent = [], 0
    for _, run in study.table.iterrows():
        path = study.run_folder(run)
        problem = None if path is None else RunFolder(path).curve_problem()
        if problem:
            study.problems.append(f"the training curve of {run['run']} is left out: {problem}")
        metrics = curve_rows(RunFolder(path).metrics()) if path is not None and not problem else []
        points = [
            (row["tokens"] if "tokens" in row else row[IMAGES], row["flops"], row["loss"])
            for row in metrics
            if isinstance(row.get("loss"), int | float) and math.isfinite(row["loss"]) and row.get("flops", 0) > 0
        ]
        silent += not points and not problem and bool(run["usable"])
        for point in thin(points, CURVE_BINS):
            rows.append((run["run"], run["architecture"], run["params_non_embedding"], *point))
    if silent:
        study.problems.append(f"{silent} of {len(study.usable)} finished runs have no training curve")
    return pd.DataFrame(rows, columns=columns)


def thin(points: list[tuple[float, float, float]], bins: int) -> list[tuple[float, float, float]]:
    """Means of (tokens, flops, loss) in at most `bins` bins of equal width in log FLOPs: one step's loss is noisy."""
    if len(points) <= bins:
        return points
    low, high = math.log(points[0][1]), math.log(points[-1][1])
    grouped: dict[int, list] = {}
    for point in points:
        place = int((math.log(point[1]) - low) / max(high - low, 1e-12) * bins)
        grouped.setdefault(min(place, bins - 1), []).append(point)
    return [tuple(sum(values) / len(group) for values in zip(*group, strict=True)) for group in grouped.values()]


# Numbers that a report takes from fitted laws: the intervals of their parameters, and the point of each budget.
#
# With every method, a point is "inside" if the optimum of its budget lies between the trained sizes. Otherwise the
# point is the lowest observed loss, which another size could lower.

Interval = tuple[float, float]


def coefficient_interval(law: Law) -> Interval | None:
    return law.intervals.get(list(law.parameters)[0])


def gain_of_doubling(law: Law) -> float:
    """Returns the share by which the loss falls if the largest compute of the data is doubled."""
    now, doubled = law.predict([law.c_max, 2 * law.c_max])
    return float(1 - doubled / now)


def through_optima(fit: ArchitectureFit) -> bool:
    """Whether L(C) is fitted to optima; otherwise to the lowest observed losses, as always with `power`.

    The optima of the headline method count, not those of the method that N_opt and D_opt are shown of.
    """
    return not fit.best.N_opt.refused and fit.headline != "power"


def loss_points(fit: ArchitectureFit) -> list[dict]:
    """Returns the points of L(C), one per budget or point of the envelope: {"C", "loss", "N", "D", "run", "inside"}."""
    return _group_points(fit) if fit.headline == "parametric" else fit.best.points


def optimum_points(fit: ArchitectureFit) -> list[dict]:
    """Returns the points of N_opt and D_opt, also if no law was fitted; see `loss_points`."""
    return _group_points(fit) if fit.sizes.method in ("isoflop", "parametric") else fit.sizes.points


def _group_points(fit: ArchitectureFit) -> list[dict]:
    return [_point(group) for group in fit.isoflop.groups] if fit.isoflop is not None else []


def _point(group: IsoflopGroup) -> dict:
    if group.inside:
        point = {"loss": group.L_opt, "N": group.N_opt, "D": group.D_opt}
    else:
        point = {"loss": group.L_lowest, "N": group.N_lowest, "D": group.D[group.run.index(group.run_lowest)]}
    return {"C": group.C, **point, "run": group.run_lowest, "inside": group.inside}
