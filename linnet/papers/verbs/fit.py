"""The verb `fit`: laws of a study of an earlier step, or of a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from linnet.config import FITS, check_study, digest, gather, nearest, parse, refuse
from linnet.papers.library import PACKAGE
from linnet.papers.settings import FitSettings
from linnet.papers.verbs.base import Cost, Job, Outcome, Planned, Record, write_planned

METHODS = ("power", "isoflop", "envelope", "parametric")


def check(job: Job) -> Cost:
    settings = parse(FitSettings, job.values, job.where)
    problems: list[str] = []
    with gather(problems):
        check_study(FITS, job.where)
        from linnet.laws.further import LAWS

        problems += [f"laws {law!r}: unknown; {nearest(law, LAWS)}" for law in settings.laws if law not in LAWS]
    if settings.method not in METHODS:
        problems.append(f"method {settings.method!r}: unknown; {nearest(settings.method, METHODS)}")
    if (settings.table is None) == (job.step.of is None):
        problems.append("of, table: give one of the two, a study of an earlier step or a table")
    elif settings.table is not None and not job.planning and not _path(settings.table).is_file():
        problems.append(f"table: no file {settings.table!r}; name a CSV")
    elif job.step.of is not None and job.before[job.step.of].step.verb != "study":
        problems.append(f"of: {job.step.of!r} is a {job.before[job.step.of].step.verb}, not a study")
    refuse(problems, job.where)
    return Cost(runs=0, flops=0.0, seconds=0.0, columns=_columns(settings))


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
    write_planned(job, None, digest([job.digest, job.values]), {"values": job.values}, console)


def collect(job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
    from linnet.laws.fit import PF_DAY, fit_study, load_table, parse_columns
    from linnet.laws.fit.law import NAMES
    from linnet.study.collect import load_study

    settings = parse(FitSettings, planned[0].about["values"], job.where)
    columns, curves = parse_columns(settings.columns), None
    if settings.table is not None:
        source = _path(settings.table)
        rows, _ = load_table(source, columns)
    else:
        assert job.step.of is not None
        if (folder := earlier[job.step.of].folder) is None or not earlier[job.step.of].runs:
            return Outcome([Record("all", None, failed=f"{job.step.of} has no finished run")])
        source = folder
        rows, curves, _ = load_study(source, columns)
    if settings.laws:
        return Outcome(_laws(settings, rows, source), runs=0, flops=0.0)
    study = fit_study(rows, curves, method=settings.method, bootstrap=settings.bootstrap, conventions=False)
    records = []
    for name, architecture_fit in study.items():
        fit = architecture_fit.methods[settings.method]
        if not fit.parameters:
            records.append(Record(name, None, failed="; ".join(fit.refused) or "the law was refused"))
            continue
        parameters = _finite(fit.parameters)
        ends = {key: fit.intervals.get(key) for key in parameters}
        intervals = {
            key: None if bounds is None else (float(bounds[0]), float(bounds[1])) for key, bounds in ends.items()
        }
        for law in (fit.L, fit.N_opt, fit.D_opt):
            if law.coefficient_pf_days is not None:
                key = f"{(law.names or NAMES[law.quantity])[0]}_pf_days"
                parameters[key], intervals[key] = law.coefficient_pf_days, law.interval_at(PF_DAY)
        records.append(Record(name, None, parameters, intervals))
    return Outcome(records, runs=0, flops=0.0)


def _laws(settings: FitSettings, rows: Any, source: Path) -> list[Record]:
    from linnet.laws.further import Options, fit_laws
    from linnet.study.collect import complete_table

    if source.is_dir():
        rows = complete_table(rows, source)
    laws, _ = fit_laws(rows, settings.laws, Options(bootstrap=settings.bootstrap, of=settings.of_loss))
    records = []
    for law in laws:
        for estimate in law.estimates:
            label = estimate.of or "all"
            if estimate.value is None:
                records.append(Record(label, None, failed=estimate.refused or "; ".join(law.refused)))
            else:
                records.append(Record(label, None, {estimate.name: estimate.value}, {estimate.name: estimate.interval}))
        if law.refused and not law.estimates:
            records.append(Record("all", None, failed=f"{law.law}: {'; '.join(law.refused)}"))
    return records


def _columns(settings: FitSettings) -> frozenset[str] | None:
    """Returns the names of the numbers that a fit may give; None if a law names some after the table."""
    from linnet.laws.fit.law import NAMES
    from linnet.laws.further import ESTIMATES

    if settings.laws:
        named = [ESTIMATES[law] for law in settings.laws]
        return None if None in named else frozenset(name for names in named for name in names or ())
    if settings.method == "parametric":
        return frozenset(("E", "A", "B", "alpha", "beta", "a", "b"))
    pure = {name for names in NAMES.values() for name in names[:2]}  # without a constant
    return frozenset(pure | {f"{names[0]}_pf_days" for names in NAMES.values()})


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if value is not None}


def _path(name: str) -> Path:
    return Path(name) if Path(name).is_absolute() or not (PACKAGE / name).is_file() else PACKAGE / name
