"""`linnet study`: a ladder of models, trained and turned into scaling laws."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from linnet.options import AllowPlugins, Count, default_verb, echo_json, end_with_failed, make_table, options, working

if TYPE_CHECKING:
    from linnet.study.adaptive import Limit
    from linnet.study.config import StudyConfig
    from linnet.study.design import Question
    from linnet.study.runner import StudyResult
    from linnet.study.sensitivity import Sensitivities

    Further = tuple[Question | None, Limit | None]


study = typer.Typer(
    cls=default_verb("run"), rich_markup_mode="rich", help="Train a ladder of models and fit how they scale."
)


@study.command()
@options
def run(
    config: Path | None = None,
    *,
    mixer: str | None = None,
    architectures: str | None = None,
    budgets: str | None = None,
    set_: list[str] | None = None,
    workers: Count | None = None,
    out: Path = Path("studies"),
    plan: bool = False,
    propose: str | None = None,
    until: str | None = None,
    at_most: str | None = None,
    report: bool = True,
    allow_plugins: AllowPlugins = False,
    json_: bool = False,
) -> None:
    """Train a ladder of models and fit how each architecture scales.

    Within each compute budget a study trains models of several sizes, finds
    the size of lowest loss, and fits laws of loss, size and data against
    compute. It shows its cost before it starts. Stop it at any time: the same
    command resumes it. The exit code is 1 if a run failed, or if none trained
    to its end; a run that diverged has a result.

    [bold]linnet study configs/demo.yaml[/]

    [bold]linnet study --mixer examples/my_mixer.py:MyMixer[/]

    [bold]linnet study configs/demo.yaml --architectures tnl,gla --plan[/]

    [bold]linnet study configs/demo.yaml --until "tnl: a +- 0.05" --at-most 10min[/]

    [bold]linnet study tune configs/demo.yaml[/] finds the learning rates first.

    Args:
        config: A study file, such as [bold]configs/demo.yaml[/].
        mixer (FILE.py:CLASS): Add a token mixer from a file of your own.
        architectures: Only these (and --mixer), with commas between: tnl,hgrn2. Families that CONFIG lacks are added.
        budgets: Training FLOPs per run, in place of CONFIG's: 1e11,3e11,1e12.
        set_ (KEY=VALUE): Change a setting: --set seq_len=128; may be given again.
        workers: Runs at the same time. Default: one per GPU, or one per CPU core.
        out: Folder of studies; this one gets a folder in it.
        plan: Show the runs, their cost and their time; train nothing.
        propose ([ARCH:]QUANTITY): Train nothing; name the runs that narrow the interval of a quantity most per FLOP: a,
            b, E, alpha, beta, L(C), N_opt(C) or D_opt(C).
        until (QUESTION): After the study, add the runs that --propose would name until an interval is reached:
            'a +- 0.05', 'tnl: L(1e12) +- 1%'.
        at_most (COST): Largest cost of the runs that --until adds: FLOPs (2e13) or time (30min). Default: the FLOPs of
            CONFIG's runs.
        report: Write the report page at the end.
        json_: Print the plan or the laws as JSON, in full precision.
    """
    from linnet.study.runner import CACHE

    with working("checking the settings"):
        settings = _settings(config, mixer, architectures, budgets, workers, set_ or [], out / CACHE, allow_plugins)
        further = _further(settings, plan, propose, until, at_most)
    make_study(settings, out, plan=plan, report=report, as_json=json_, where=str(config or "study"), further=further)


def make_study(
    settings: "StudyConfig",
    out: Path,
    *,
    plan: bool = False,
    report: bool = True,
    as_json: bool = False,
    where: str = "study",
    further: "Further" = (None, None),
) -> Path | None:
    """Plans a study, trains its runs, fits its laws, and prints each.

    Args:
        out: the folder of studies.
        plan: only print the plan.
        report: write the report page; its path is returned.
        as_json: print the plan or the laws as JSON.
        where: what errors call the configuration.
        further: a quantity whose interval further runs narrow, and the largest cost of these runs. Without a cost, the
            runs are only shown.

    Raises:
        typer.Exit: with code 1, after all else, if a run failed or none trained to its end.
    """

    from rich.console import Console
    from rich.markup import escape

    from linnet.cli.study.page import print_laws, print_plan, print_sensitivities
    from linnet.cli.train.plan import print_missing
    from linnet.config import FIGURES, FITS, ConfigError, check_study, gather, refuse, unwritable
    from linnet.data.problems import missing_text
    from linnet.study.collect import RUNS, TABLE
    from linnet.study.config import remembered
    from linnet.study.executors import worker_slots
    from linnet.study.ladder import plan as make_plan
    from linnet.study.ladder import unread_evaluation_problems
    from linnet.study.runner import CACHE, run_study, show_passes, show_sources
    from linnet.study.sensitivity import read_sensitivities
    from linnet.study.timing import estimate
    from linnet.train import passes

    console, problems, ladder = Console(stderr=True) if as_json else Console(), [], None
    points, settings = settings.points, remembered(settings, out / settings.name)
    question, limit = further
    if question and not limit:
        from linnet.cli.study.adaptive import show_proposals

        check_study(FITS, "study")
        if not (out / settings.name / TABLE).is_file():
            problem = f"--propose: {out / settings.name} has no runs yet; run `linnet study` without --propose first"
            raise ConfigError([problem], where)
        ladder = make_plan(settings, check_data=False, cache=out / CACHE, root=out / settings.name / RUNS)
        records = show_proposals(ladder, out / settings.name, question, console)
        if as_json:
            echo_json(records, allow_nan=False)
        return None
    if not plan:
        with gather(problems):
            # A missing extra would otherwise show after hours of training.
            check_study(FITS + FIGURES if report else FITS, "study")
        if reason := unwritable(out / settings.name):
            problems.append(f"--out {str(out)!r}: {reason}; name another folder")
    with working("planning the study" if plan else "looking through the text, planning the study") as progress:
        with gather(problems):
            runs = out / settings.name / RUNS
            ladder = make_plan(settings, check_data=not plan, cache=out / CACHE, root=runs, progress=progress)
            if plan:
                problems += unread_evaluation_problems(ladder)
        refuse(problems, where)
        seconds = estimate(ladder, progress)
    done = {path.parent.name for path in runs.glob("*/result.json")}
    print_plan(ladder, seconds, worker_slots(settings.executor, settings.devices), done, console)
    if plan:
        if settings.OBJECTIVE == "text":
            tokens = [run.tokens for run in ladder.all_runs]
            if available := passes.estimate(settings.data):
                show_passes(tokens, available, "tokens", console, about=True)
            sizes = [passes.estimate(settings.data, source.source) for source in settings.data.mixture]
            show_sources(settings.data.mixture, sizes, tokens, console, about=True)
            print_missing(missing_text(settings.data), console)
        if as_json:
            echo_json([run.record() for run in ladder.all_runs])
        return None

    result = run_study(settings, out, plan=ladder, seconds=seconds, console=console)
    for row in result.broken:
        line = f"[red]{row['status']}[/]: {escape(str(result.folder / row['path']))}"
        console.print(line, highlight=False, soft_wrap=True)
    sensitivities = read_sensitivities(result.folder)
    _print_differences(settings, result, sensitivities, console)
    print_sensitivities(sensitivities, len(settings.architectures), console)
    failed = result.failed
    if len(result.broken) == len(result.rows):
        if any(row["status"] == "diverged" for row in result.broken):
            console.print(_lower_rate(settings, result), highlight=False, markup=False, soft_wrap=True)
        end_with_failed(failed, console)
        raise typer.Exit(1)
    if question:
        from linnet.cli.study.adaptive import narrow

        failed = narrow(settings, points, out, question, limit, console)
    laws = _fit(result.folder)
    print_laws(laws, console)
    from linnet.report.findings import conclude
    from linnet.report.page import CONCLUSIONS
    from linnet.report.records import read_study

    page, lines = None, []
    if as_json or not report:
        concluded = conclude(read_study(result.folder, laws))
        if as_json:
            echo_json(laws.to_json() | concluded, allow_nan=False)
        lines = [CONCLUSIONS, *concluded["conclusions"]]
    if report:
        from linnet.report import write_report

        lines = []
        with working("drawing the report"):
            page = write_report(result.folder, fit=laws, tell=lines.append)
        console.print(f"\nreport: [bold]{escape(str(page))}[/]", highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    end_with_failed(failed, console)
    return page


def _further(
    settings: "StudyConfig", plan: bool, propose: str | None, until: str | None, at_most: str | None
) -> "Further":
    """Returns the question of --propose or --until, and for --until the largest cost."""
    if propose is None and until is None and at_most is None:
        return None, None
    from linnet.config import gather, refuse
    from linnet.study.adaptive import Limit, parse_limit
    from linnet.study.design import parse_question
    from linnet.study.ladder import plan as make_plan

    option, text = ("--propose", propose) if until is None else ("--until", until)
    problems: list[str] = []
    question = limit = None
    if text is None:
        problems.append("--at-most: limits --until, which is not given; add --until 'a +- 0.05', or remove it")
    else:
        with gather(problems):
            question = parse_question(text, [architecture.name for architecture in settings.architectures], option)
    if until is not None and (propose is not None or plan):
        problems.append(f"--until: trains runs, and {'--plan' if plan else '--propose'} does not; give one of them")
    elif propose is not None and plan:
        problems.append("--propose: names runs to add, and --plan shows those of CONFIG; both train nothing: give one")
    if until is None and propose is not None and at_most is not None:
        problems.append("--at-most: limits --until; --propose trains nothing; remove one")
    if settings.tokens:
        problems.append(f"{option}: needs a study of `budgets`, but this one sets `tokens`")
    if at_most is not None:
        with gather(problems):
            limit = parse_limit(at_most)
    refuse(problems, "command line")
    if until is not None and limit is None:
        limit = Limit(flops=make_plan(settings, check_data=False).flops)
    return question, limit


def _fit(folder: Path):
    """Fits the laws of a study by every method."""
    from linnet.laws.fit import fit_study
    from linnet.study.collect import load_study

    rows, curves, notes = load_study(folder)
    with working("fitting") as show:
        laws = fit_study(rows, curves, progress=show)
    laws.notes = notes
    return laws


def read_shipped(name: str) -> dict:
    """Returns the content of a study file of the package: demo, demo-quick or quick."""
    from importlib.resources import files

    from linnet.config import parse_yaml

    return parse_yaml(files("linnet.study").joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def _settings(config, mixer, architectures, budgets, workers, assignments, cache, allow_plugins=False):
    """Returns the study that the command line describes."""
    from linnet.config import ConfigError, gather, override
    from linnet.data.problems import text_problems
    from linnet.layers.base import load_plugin
    from linnet.study.config import read_study

    if config is None and mixer is None:
        problem = "CONFIG: give a study file such as configs/demo.yaml, or --mixer FILE.py:Class"
        raise ConfigError([problem], "command line")
    if config is not None:
        values = _read(config, allow_plugins)
        if "model" in values and "architectures" not in values:
            message = f"CONFIG: {config} is one training, not a study; run: linnet train {config}"
            raise ConfigError([message], "command line")
    else:
        values = read_shipped("quick")
    problems: list[str] = []
    mixers: list[str] = []  # added by --mixer, and kept under --architectures
    if mixer is not None:
        with gather(problems):
            mixers = [load_plugin(mixer)]
            plugins, listed = _listed(values, "plugins"), _listed(values, "architectures")
            values["plugins"] = plugins if mixer in plugins else [*plugins, mixer]
            values["architectures"] = listed if mixers[0] in map(_name, listed) else [*mixers, *listed]
            if config is None:
                values["name"] = f"quick-{mixers[0]}"
    if architectures is not None:
        known = {_name(a): a for a in _listed(values, "architectures")}
        chosen = [name.strip() for name in architectures.split(",") if name.strip()]
        chosen = [*(name for name in mixers if name not in chosen), *chosen]
        values["architectures"] = [known.get(name, name) for name in chosen]
    if budgets is not None:
        values["budgets"] = []
        for part in filter(str.strip, budgets.split(",")):
            try:
                values["budgets"].append(float(part))
            except ValueError:
                problems.append(f"--budgets {part!r}: not a number of FLOPs; write 1e11,3e11,1e12")
    with gather(problems):
        values = override(values, assignments)
    if workers is not None and isinstance(values.setdefault("executor", {}), dict):
        values["executor"] |= {"workers": workers}
    settings = None
    with gather(problems):
        settings = read_study(values)
    if settings and settings.plugins:
        with gather(problems):
            _check_mixers(settings)
    if problems:
        train = values.get("train")
        if not isinstance(train, dict) or train.get("objective", "text") == "text":
            problems += text_problems(values.get("data", {}), cache, values.get("seq_len"), told=problems)
        raise ConfigError(problems, str(config or "study"))
    return settings


def _read(config: Path, allow_plugins: bool) -> dict:
    """Reads a study file. A study folder's plugins that are not where it says are named by its runs' copies of them.

    Raises:
        ConfigError: it is the study.yaml of a study folder and its Python files are not trusted.
    """
    from linnet import trust
    from linnet.config import read_yaml
    from linnet.study.collect import PLAN
    from linnet.train.config import present

    values = read_yaml(config)
    if config.name != "study.yaml" or not (config.parent / PLAN).is_file():
        return values
    plugins, train = values.get("plugins"), values.get("train")
    for number, plugin in enumerate(plugins if isinstance(plugins, list) else []):
        file = trust.plugin_file(plugin if isinstance(plugin, str) else "")
        if file.suffix == ".py" and not file.is_file():
            copies = {path.parent.name: path for path in config.parent.glob(f"runs/*/{trust.COPIES}/*/{file.name}")}
            if len(copies) == 1:
                values["plugins"][number] = f"{copies.popitem()[1]}:{plugin.rpartition(':')[2]}"
    if isinstance(train, dict):
        values["train"] = present(train)
    evaluations = train.get("evaluations") if isinstance(train, dict) else None
    trust.check_training({**values, "evaluations": evaluations}, config, allow_plugins)
    return values


def _print_differences(settings: "StudyConfig", result: "StudyResult", sensitivities: "Sensitivities", console) -> None:
    """Prints the differences of architectures from their bases, if there are some."""
    import math

    from linnet.study.differences import missing_pairs, read_differences
    from linnet.study.progress import count
    from linnet.study.sensitivity import words

    differences = read_differences(result.folder)
    for text in missing_pairs({a.name: a.base for a in settings.architectures}, result.rows, differences):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if not differences:
        return
    read = "#tokens" if "tokens" in result.rows[0] else "#images"
    papers = ("#printed",) if any(row.printed is not None for row in differences) else ()
    columns = ("architecture", "base", "size", read, "#seeds", "#bits", "#95 %", "#p, adjusted", *papers, "")
    table = make_table(*columns, style={"header_style": "bold"})
    for row in differences:
        interval = "" if row.low is None else f"{row.low:+.4f} to {row.high:+.4f}"
        printed = ("" if row.printed is None else f"{row.printed:+.3f}",) if papers else ()
        p = "" if row.p is None else f"{row.p:.2g}"
        numbers = (count(row.target), str(row.seeds), f"{row.bits:+.4f}", interval, p, *printed)
        table.add_row(row.architecture, row.base, row.size, *numbers, row.verdict)
    console.print("loss minus that of the base, paired by seed, bits per token (differences.csv):", highlight=False)
    console.print(table)
    for row in differences:
        if mark := words(sensitivities, row.architecture, row.base, abs(row.bits), math.log(2)):
            text = f"{row.architecture} and {row.base} at {row.size}, {count(row.target)} {read[1:]}: {mark}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)


def _lower_rate(settings: "StudyConfig", result: "StudyResult") -> str:
    """Returns what to do if no run trained to its end and some diverged."""
    rates = [row["learning_rate"] for row in result.rows if row["status"] == "diverged" and row["learning_rate"]]
    fixed = [architecture.name for architecture in settings.architectures if architecture.learning_rate]
    if fixed or not rates:
        fix = f"lower learning_rate{' of ' + ', '.join(fixed) if fixed else ''}"
    else:
        fix = f"lower the learning rate, for example --set learning_rate={min(rates) / 10:.1g}"
        fix += f" (it was {min(rates):g}{f' to {max(rates):g}' if max(rates) > min(rates) else ''})"
    every = all(row["status"] == "diverged" for row in result.rows)
    what = "every run diverged" if every else "every run diverged or failed"
    return f"{what}, so there is nothing to fit; {fix}, or find it with linnet study tune"


def _check_mixers(settings) -> None:
    """Raises ConfigError for plugins that break the contract of a mixer; one size of each is checked.

    Planning reports the other problems: a plugin that does not load, a model that cannot be built.
    """
    from linnet.config import ConfigError, gather
    from linnet.layers.base import load_plugin
    from linnet.layers.check import check_mixers
    from linnet.study.architectures import make_model

    left, unloaded, problems = {}, [], []
    for plugin in settings.plugins:
        with gather(unloaded):
            left[load_plugin(plugin)] = plugin
    rungs = ((a, size) for a in settings.architectures for size in a.sizes or settings.sizes)
    while left and (rung := next(rungs, None)):
        with contextlib.suppress(ValueError):
            model = make_model(*rung, settings.base(256))
            plugins = [left.pop(name) for name in model.options if name in left]
            with gather(problems):
                packs = getattr(settings.data, "packing", "cross") == "reset"
                check_mixers(plugins, model.options, model.d_model, model.norm, model.causal, model.axes, packs)
    if problems:
        raise ConfigError([*unloaded, *problems], "study")


def _listed(values: dict, key: str) -> list:
    """Returns the list under a key; any other value as its only item, which parsing refuses later."""
    entries = values.get(key) or []
    return entries if isinstance(entries, list) else [entries]


def _name(architecture) -> str:
    """Returns the name of an architecture, which in a file may be given alone."""
    return architecture["name"] if isinstance(architecture, dict) and "name" in architecture else str(architecture)
