"""`linnet mad run`: the skill score of architectures."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from linnet.config import FIGURES, ConfigError, count_of, gather, grouped, not_installed, override, parse, refuse
from linnet.options import (
    RULED,
    WIDE,
    AsJson,
    Count,
    by_option,
    echo_json,
    end_with_failed,
    make_table,
    options,
    parse_seeds,
    working,
)

# Short column titles, so that the table fits into 80 characters.
SHORT = {
    "in_context_recall": "recall",
    "fuzzy_recall": "fuzzy",
    "noisy_recall": "noisy",
    "selective_copying": "copying",
    "compression": "compr.",
    "memorization": "memor.",
}


@options
def run(
    layouts: list[str] | None = None,
    *,
    mixer: list[str] | None = None,
    budget: str = "smoke",
    tasks: str = "",
    settings: str = "",
    set_: list[str] | None = None,
    state: Annotated[int | None, typer.Option(min=0)] = None,
    spec: str | None = None,
    layers: str | None = None,
    training: str | None = None,
    seed: str | None = None,
    device: str = "auto",
    executor: str = "local",
    workers: Count | None = None,
    address: str | None = None,
    bundle: Count | None = None,
    compile_: bool = False,
    matrices_only: Annotated[bool, typer.Option("--no-weight-decay")] = False,
    out: Path | None = None,
    known: Path | None = None,
    plan: bool = False,
    report: bool = True,
    as_json: AsJson = False,
) -> None:
    """Score architectures by six synthetic tasks (paper 004, MAD).

    Every setting of a task is trained at several learning rates and weight
    decays; the best on a validation split counts, with its accuracy on the
    test split. The same command resumes a stopped run, and another
    architecture joins the table of the folder. The exit code is 1 if a run
    failed; a run that diverged has a result.

    [bold]linnet mad run "tnl+swiglu x2" "attention+swiglu x2"[/]

    [bold]linnet mad run --mixer examples/my_mixer.py:MyMixer --budget core --tasks fuzzy_recall[/]

    [bold]linnet mad run hgrn2 hgrn --budget mqar[/] (token mixers, in two layers)

    Args:
        layouts (LAYOUT...): Recipes ([bold]linnet models mad[/] has the paper's), or quoted layouts such as 'tnl+swiglu
            x2' (two blocks of width 128). A token mixer alone is one layer
            without a channel mixer; in MQAR two.
        mixer (FILE.py:CLASS): A token mixer from a file of your own, in two blocks with swiglu; may be given again.
        budget (NAME): smoke (does it learn at all?), core (the six baselines), screen (26 settings, few samples), full
            (all 66 settings), published (all 66 as the published implementation has them); mqar and mqar-short are
            separate from the score. [bold]linnet mad list[/] counts the runs of each.
        tasks (TASK,...): Only these tasks, with commas between (default: all).
        settings (SETTING,...): Only these settings, as in [bold]linnet mad list[/] (default: all).
        set_ (KEY=VALUE): Change every model, such as d_model=64; may be given again.
        state: Fixed state of a model without attention, in numbers; 0 takes the options as they are. Default: 4096, but
            a mixer of your own keeps its state if no option reaches that.
        spec (paper|mad-lab): Distributions of the tasks; mad-lab: those of the published implementation (default:
            paper; published: mad-lab).
        layers (paper|mad-lab): Options of the layers; mad-lab: those of the published implementation (default: paper;
            published: mad-lab).
        training (paper|mad-lab): Optimiser, schedule and the epoch that counts (default: as --spec).
        seed (N,...): Seed of data, weights and order; several (0,1,2) give a spread (default: 0; published: 12345).
        device (auto|cpu|cuda): auto is the GPU if there is one.
        executor (inline|local|ray): inline: this process; local: one process per GPU or core.
        workers: Bundles at the same time (default: one per GPU or core).
        address: Address of a Ray cluster; --out must be on storage that all machines see.
        bundle: Upper bound of models that are trained together (default: 24, on a CPU 1).
        compile_: Use torch.compile.
        matrices_only: Exclude norms, biases, embeddings and state parameters from weight decay.
        out: Folder of the runs, of one budget (default: mad/<budget>).
        known (FOLDER): A folder of linnet mad run, of this kind of device: runs with a row in its mad.csv are not
            trained again.
        plan: Show the runs and their cost; train nothing.
        report: Write the report page at the end.
        as_json: Print the scores, or the cost of the plan, as one JSON object.
    """
    from rich.console import Console

    from linnet.layers.base import MIXERS
    from linnet.mad.architectures import TOTAL
    from linnet.mad.results import RUNS
    from linnet.mad.run import Forms, forms, prepare, train
    from linnet.mad.settings import BUDGETS
    from linnet.study.executors import ExecutorConfig, unread_problems

    mqar = budget in BUDGETS and BUDGETS[budget].mqar
    problems: list[str] = []
    changes, where, models, plain, form = {}, None, {}, {}, Forms("paper", "paper", "paper")
    with gather(problems):
        changes = override({}, set_ or [])
    with gather(problems):
        form = forms(budget, spec, layers, training)
    with gather(problems), working("checking the layers"):
        models, plain = _models(layouts or [], mixer or [], changes, state, mqar, form.layers, problems)
    seeds = None if seed is None else parse_seeds("--seed", seed, problems)
    if device not in ("auto", "cpu", "cuda"):
        problems.append(f"--device {device!r} is unknown; use auto, cpu or cuda")
    if mqar and state not in (None, TOTAL):
        problems.append(f"--state {state}: has no effect on MQAR, whose models keep their own state; leave it out")
    if executor not in ("inline", "local", "ray"):
        problems.append(f"--executor {executor!r} is unknown; use inline, local or ray")
    else:
        where = parse(ExecutorConfig, {"kind": executor, "workers": workers, "address": address, "retries": 1})
        problems += map(by_option(["workers", "address"], kind="--executor"), unread_problems(where))
    with gather(problems), working("counting FLOPs"):
        work = prepare(
            models,
            out or Path("mad") / _folder_name(budget, form),
            budget=budget,
            tasks=_names(tasks),
            settings=_names(settings),
            spec=spec,
            seeds=seeds,
            device=device if device in ("cpu", "cuda") else "auto",
            executor=None if problems else where,  # making an executor may start Ray
            plugins=mixer or [],
            decay="matrices" if matrices_only else "all",
            layers=layers,
            training=training,
            known=known,
        )
    refuse(problems, "command line")
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    for name, model in models.items():
        console.print(_about(name, model, plain[name], mqar), markup=False)
        if not mqar and state is None and (short := _another_state(model)):
            console.print(f"[yellow]note[/] {escape(name)}: {short}")
        if not mqar and name in MIXERS:
            console.print(
                f"[yellow]note[/] {name}: one layer, without a channel mixer; two blocks with one, as of --mixer, "
                f"are '{name}+swiglu x2'"
            )
    if plan:
        print_plan(work, bundle, console)
        if as_json:
            values = {"runs": len(work.runs), "flops": sum(run.flops for run in work.runs)}
            left = {"runs": len(work.missing), "flops": sum(run.flops for run in work.missing)}
            echo_json({"folder": str(work.folder), "budget": budget, **values, "missing": left})
        return
    result = train(work, bundle=bundle, compile=compile_, console=console)
    if as_json:
        rows = result.scores.to_rows() if result.scores is not None else []
        about = {"folder": str(result.folder), "budget": budget, "comparable": BUDGETS[budget].comparable}
        if mqar and result.scores is not None:
            about["bar"] = bar(result.scores)
        echo_json(about | {"scores": rows, "failed": result.failed})
    elif result.scores is not None:
        print_scores(result.scores, console)
        if BUDGETS[budget].spec is not None:
            print_numbers(result.folder, console)
        page = _page(result.folder) if report else None
        console.print(f"in {result.folder}" if page is None else f"report: {page}", markup=False)
    end_with_failed([result.folder / RUNS / name for name in result.failed], console)


def print_plan(work, bundle: int | None, console) -> None:
    """Prints a row per architecture: its settings, runs, model-steps and FLOPs; then what is still to do."""
    from linnet.mad.run import cost, estimate
    from linnet.options import duration
    from linnet.study.progress import count

    table = make_table("architecture", "#settings", "#runs", "#steps", "#FLOPs", style=WIDE)
    for name in work.models:
        runs = [run for run in work.runs if run.config["architecture"] == name]
        settings, steps = {run.config["setting"] for run in runs}, sum(run.steps for run in runs)
        flops = f"{sum(run.flops for run in runs):.3g}"
        table.add_row(escape(name), str(len(settings)), str(len(runs)), count(steps), flops)
    console.print(table)
    missing, total = work.missing, f"{len(work.runs)} runs, {sum(run.flops for run in work.runs):.3g} training FLOPs"
    if len(missing) < len(work.runs):
        total += f", {sum(run.flops for run in missing):.3g} of them still to do"
    console.print(total)
    if missing:
        with working("planning the runs") as progress:
            seconds = estimate(work, progress)
        workers = count_of(work.executor.workers, "worker")
        time = "" if seconds is None else f", about {duration(seconds)} on {workers}"
        console.print(f"to do: {cost(missing, len(work.groups(bundle)))}{time}")


def print_scores(scores, console) -> None:
    """Prints the scores by task, and why they are not comparable, if so."""
    from linnet.mad.mqar import is_mqar

    if is_mqar(scores):
        print_recall(scores, console)
        if line := bar(scores):
            console.print(line, markup=False, style="bold")
    else:
        _print_table(scores, console)
        if scores.solved:
            names = ", ".join(scores.solved)
            console.print(f"all architectures reach 100 %, so these tasks do not tell them apart: {names}")
    for label in scores.labels:
        console.print(f"[bold]{escape(label)}[/]")
    reasons = grouped((reason, name) for name, score in scores.items() for reason in score.reasons)
    for reason, names in reasons.items():
        of = "" if len(names) == len(scores) else f" ({', '.join(names)})"
        console.print(f"[yellow]not comparable[/]{escape(of)}: {escape(reason)}")
    for name, reason in scores.unscored.items():
        console.print(f"{name}: no score, {reason}", markup=False)


def print_numbers(folder: Path, console) -> None:
    """Prints the scores by both metrics and both selections, beside those that others published."""
    from linnet.mad.results import read_results
    from linnet.mad.scores import PUBLISHED, all_numbers, number_of_results

    results = read_results(folder)
    every, number = all_numbers(results), number_of_results(results)
    numbers = (f"#{metric}, {'test' if legacy else 'validation'}" for metric, legacy in every)
    style = RULED | {"title": "by number and selection", "title_style": ""}
    table = make_table("~architecture", *numbers, "#published", style=style)
    for name in every[number["metric"], number["legacy"]]:
        printed = f"{PUBLISHED[name]['all']:.1f}" if name in PUBLISHED else "-"
        cells = [f"{100 * scores[name].score:.1f}" if name in scores.whole else "-" for scores in every.values()]
        table.add_row(name, *cells, printed)
    console.print(table)


def _folder_name(budget: str, form) -> str:
    from linnet.mad.run import forms
    from linnet.mad.settings import BUDGETS

    usual = forms(budget) if budget in BUDGETS else form
    parts = [budget]
    parts += [form.spec] if form.spec != usual.spec else []
    parts += [f"{form.layers}-layers"] if form.layers != usual.layers else []
    parts += [f"{form.training}-training"] if form.training != form.spec else []
    return "-".join(parts)


def _print_table(scores, console) -> None:
    """Prints a row per architecture: its tasks and its score."""
    from linnet.study.progress import count

    tasks = (f"#{SHORT.get(task, task)}" for task in scores.tasks)
    style = RULED | {"collapse_padding": True}
    table = make_table("~architecture", *tasks, "#score", "#params", "#state", no_wrap=True, style=style)
    for name, score in scores.items():
        cells = [f"{score.tasks[task].score:.3f}" if task in score.tasks else "-" for task in scores.tasks]
        spread = "" if score.spread is None else f" ± {score.spread:.3f}"
        parameters = "-" if score.parameters is None else count(score.parameters)
        state = "-" if score.state_size is None else f"{score.state_size:,}"
        total = f"[bold]{score.score:.3f}[/]{spread}" if name in scores.whole else "-"
        table.add_row(escape(name), *cells, total, parameters, state)
    console.print(table)


def _page(folder: Path) -> Path | None:
    """Writes the report of a folder and returns its path; None if the extra that draws it is not installed."""

    if not_installed(FIGURES):
        return None
    from linnet.mad.page import write_mad_report

    with working("drawing the report"):
        return write_mad_report(folder)


def _about(name: str, model, plain, mqar: bool) -> str:
    """Describes a model on one line: its layout, width and state, and the options that --state changed."""
    from linnet.mad.architectures import has_nominal_state, state_size
    from linnet.mad.settings import MQAR_WIDTHS
    from linnet.models import ModelConfig

    sizes = []
    for width in MQAR_WIDTHS if mqar else (model.d_model,):
        wide = ModelConfig.model_validate(model.model_dump() | {"d_model": width})
        nominal = ", nominal: its filters have no finite state" if has_nominal_state(wide) else ""
        sizes.append(f"width {width}, state {state_size(wide):,}{nominal}")
    layout = "" if model.layout == name else f" {model.layout},"
    changed = [
        f"{layer}.{key} {value}, not {plain.options[layer][key]}"
        for layer, options in model.options.items()
        for key, value in options.items()
        if value != plain.options[layer][key]
    ]
    return f"{name}:{layout} {'; '.join(sizes)}" + (f" (for which {'; '.join(changed)})" if changed else "")


def _another_state(model) -> str | None:
    """Returns what a fixed state other than the usual one means for a score; None if the model has the usual one."""
    from linnet.mad.architectures import state_size, target_size

    size, target = state_size(model), target_size(model)
    if size == target:
        return None
    return (
        f"its fixed state is {size:,}, not {target:,}, which no free option of the mixer reaches; a larger state helps "
        "in recall, so compare its scores with models of the same state; inputs that a short convolution keeps are not "
        "state if its state_spec is linnet.layers.short_convolution_spec"
    )


def _models(
    layouts: list[str],
    mixers: list[str],
    changes: dict,
    state: int | None,
    mqar: bool,
    layers: str,
    problems: list[str],
):
    """Returns name -> model with the asked state, and the same with the options as given.

    Args:
        state: None is the usual one, or that of a mixer from a file if no option reaches the usual one.
        mqar: whether the models are those of MQAR, which keep their own state.
        layers: "paper" or "mad-lab".
        problems: takes those of models that cannot be built.
    """
    from linnet.layers.base import load_plugin
    from linnet.layers.check import check_mixers
    from linnet.mad.architectures import TOTAL, architecture, mqar_architecture

    if not layouts and not mixers:
        problems.append("LAYOUT: give a layout ('tnl+swiglu x2') or recipe, or --mixer FILE.py:Class")
    form = "{}" if mqar else "{}+swiglu x2"
    plugins, loaded, models, plain = [], [], {}, {}
    for mixer in mixers:
        with gather(problems):
            plugins.append(form.format(load_plugin(mixer)))
            loaded.append(mixer)
    for name in (*layouts, *plugins):
        hint = ""
        try:
            plain[name] = mqar_architecture(name, changes) if mqar else architecture(name, changes, 0, layers)
            wrong: list[str] = []
            with gather(wrong):
                check_mixers(loaded, plain[name].options, plain[name].d_model, plain[name].norm)
            if wrong:
                problems += wrong
                continue
            if mqar or state == 0:
                models[name] = plain[name]
                continue
            hint = "; choose another with --state, or --state 0 to take the model as it is"
            try:
                models[name] = architecture(name, changes, TOTAL if state is None else state, layers)
            except ConfigError:
                if state is not None or name not in plugins:
                    raise
                models[name] = plain[name]
        except ConfigError as error:
            problems += [f"{name}: {problem}{hint}" for problem in error.problems]
    return models, plain


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def print_recall(scores, console) -> None:
    """Prints accuracy of MQAR by length and pairs, a row per architecture and width."""
    from linnet.mad.mqar import HARDER, Place, settings_of
    from linnet.study.progress import count

    shapes = (f"#{length},{pairs}" for length, pairs in HARDER)
    style = RULED | {"collapse_padding": True, "title": "MQAR: length, pairs", "title_style": ""}
    table = make_table("~architecture", "#width", *shapes, "#params", "#state", no_wrap=True, style=style)
    for name in scores:
        settings = settings_of(scores, name)
        for width in sorted({setting.width for setting in settings}):
            scored = [settings.get(Place(width, *shape)) for shape in HARDER]
            cells = ["-" if setting is None else f"{setting.score:.3f}" for setting in scored]
            run = next(run for setting in scored if setting is not None for run in setting.best.values())
            sizes = ["-" if run.parameters is None else count(run.parameters)]
            sizes.append("-" if run.state_size is None else f"{run.state_size:,}")
            table.add_row(escape(name), str(width), *cells, *sizes)
    console.print(table)


def bar(scores) -> str:
    """Returns a sentence on whether HGRN2 recalls more than HGRN; "" if one of them was not scored."""
    from linnet.mad.mqar import compare

    if not {"hgrn2", "hgrn"} <= set(scores):
        return ""
    check = compare(scores)
    return f"{check.claim}: {check.verdict}{check.told}"
