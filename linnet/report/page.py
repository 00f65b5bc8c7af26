"""The report of a study: the content of its page."""

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import yaml

from linnet.config import FIGURES, FITS, check_study
from linnet.laws.fit import StudyFit
from linnet.report import downstream, further, rates, shell, tables, units
from linnet.report.drawing import Figure
from linnet.report.figures import draw
from linnet.report.findings import findings, plain, summary
from linnet.report.records import Study, read_study
from linnet.study.collect import by_weights
from linnet.study.differences import missing_pairs, read_differences
from linnet.study.sensitivity import FIX, SETTING, UNKNOWN, doubts, sentences

CONCLUSIONS = "What you may conclude"


def write_report(
    study_folder: str | Path,
    out: str | Path | None = None,
    *,
    fit: StudyFit | None = None,
    bootstrap: int = 1000,
    laws: bool = True,
    exclude: Sequence[str] = (),
    best_of: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """Writes the report of a study from its records alone; nothing is trained.

    Args:
        study_folder: a folder that `linnet study` made: study.yaml, table.csv, runs/; or any folder of run folders.
        out: the page; default `report/index.html` in the study folder. The figures go beside it.
        fit: the laws, where the caller has fitted them to this folder already.
        bootstrap: resamples for the 95 % intervals of the laws; 0 for none.
        laws: whether the page has the further laws (`linnet.laws.further`).
        exclude, best_of: which runs the fits leave out; see `linnet.laws.fit.load_table`.
        tell: is called with a line for each part that the page lacks and why, then for each fit to the evaluations of
            the runs, then with the sentences of the page.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the folder or its table is not there or unusable, or the extra `study` is not installed.
    """
    check_study(FIGURES + FITS, "report")
    if out is not None or Path(study_folder).is_dir():  # reading reports a folder that does not exist
        shell.check_page(shell.page_name(study_folder, out))
    study = read_study(study_folder, fit, bootstrap, exclude, best_of)
    page = shell.page_path(study_folder, out)
    changed = {"bootstrap": None if bootstrap == 1000 else bootstrap, "no_laws": None if laws else True}
    changed["best_of"] = True if best_of else None
    words = [word for request in exclude for word in ("--exclude", request)]
    command = shell.typed("linnet", "report", study_folder, *words, out=out, **changed)
    series = downstream.read_series(study, bootstrap)
    of_metrics = tuple(f"{score.title}: " for score in series)  # the page alone has these, one for each metric
    absent = [f"note {problem}" for problem in study.problems if not problem.startswith(of_metrics)]
    for line in (*absent, *downstream.lines(series)) if tell is not None else ():
        tell(line)
    figures = tuple(_in_units(study, part) for part in (draw(study), downstream.draw(study, series)))
    sections, unsupported = further.read(study, bootstrap, exclude, best_of) if laws else ([], {})
    sections = [(law, figure and _in_units(study, [figure])[0]) for law, figure in sections]
    drawn = [*figures[0], *figures[1], *(figure for _, figure in sections if figure is not None)]
    section = further.parts(study, sections, unsupported, command)
    if vertices := rates.read(study):
        swept = rates.draw(study, vertices)
        drawn += [] if swept is None else [swept]
        section += rates.parts(study, vertices, swept, command)
    headlines = findings(study) + downstream.finding(series)
    shell.write_page(page, _page(study, series, figures, headlines, section, page.parent, command), drawn)
    for line in (CONCLUSIONS, *map(plain, headlines)) if tell is not None else ():
        tell(study.in_units(line))
    return page


def _in_units(study: Study, figures: list[Figure]) -> list[Figure]:
    """Returns figures with the words of the study's units."""
    if study.units == "tokens":
        return figures
    return [
        Figure(
            figure.name,
            study.in_units(figure.title),
            study.in_units(figure.caption),
            json.loads(study.in_units(json.dumps(figure.spec))),
        )
        for figure in figures
    ]


def _page(
    study: Study,
    series: list[downstream.Series],
    figures: tuple[list[Figure], list[Figure]],
    headlines: list[str],
    section: list[str],
    folder: Path,
    command: str,
) -> str:
    first = [figure for figure in figures[0] if figure.name == "loss-against-compute"]
    parts = [
        f'<p class="lead">{summary(study)}</p>',
        *(f'<p class="notice">{units.prose(problem)}.</p>' for problem in study.problems),
        *(shell.section(figure, command) for figure in first),
        *shell.findings(headlines, CONCLUSIONS),
        shell.key(study.architectures),
        *_differences(study),
        *_sensitivity(study),
        *_laws(study),
        *(shell.section(figure, command) for part in figures for figure in part if figure not in first),
        *_downstream(study, series),
        *section,
        *_conventions(study),
        *_runs(study, folder),
        *_making(study, command),
    ]
    parts = [study.in_units(part) for part in parts]
    return shell.document(f"{'Scaling laws' if study.planned else 'Runs'}: {study.name}", parts)


def _differences(study: Study) -> list[str]:
    caption = (
        "Held-out loss minus that of the base at the same shape and tokens, paired by seed, with the 95 % interval of "
        "the mean over seeds (Student's t). A sign is stated at p < 0.05, adjusted over all rows by Holm's method."
    )
    differences = read_differences(study.folder)
    if any(difference.printed is not None for difference in differences):
        caption += (
            " Printed: the difference of the losses that a paper prints for larger models, whose sign need not be that "
            "of these."
        )
    table = tables.difference_table(study)
    rows = study.table[["architecture", "status"]].to_dict("records")
    lost = missing_pairs(study.bases, rows, differences)
    lost = [f'<p class="notice">{escape(text)}.</p>' for text in lost]
    return shell.captioned("Differences from a base", caption, table, *lost) if table or lost else []


def _sensitivity(study: Study) -> list[str]:
    table, heading = tables.rate_table(study), "<h2>How much the learning rate matters</h2>"
    if not table:
        said = f"{UNKNOWN[0].upper()}{UNKNOWN[1:]}: <code>{SETTING}</code>{escape(FIX.removeprefix(SETTING))}."
        return [heading, f"<p>{said}</p>"] if study.planned and len(study.architectures) > 1 else []
    caption = (
        "Held-out loss in nats per token of one run of each architecture, of the median size at the median budget, at "
        "half, one and two times its learning rate. A size is its width x layers, and / its inner width if that is not "
        "the usual one. The sensitivity is the largest difference between two of the three losses. "
        "These runs take no part in the fits."
    )
    sensitivities = study.sensitivities
    marked = "".join(f"<li>{escape(text)}</li>" for text in sentences(doubts(sensitivities, study.architectures)))
    told = "No two architectures differ by less than the larger of their sensitivities at this point."
    if any(sensitivity.value is None for sensitivity in sensitivities.values()):
        told = "Some of these runs have no result yet, so not every pair of architectures can be judged."
    if marked:
        told = (
            "These architectures differ at this point by less than the larger of their sensitivities, so the learning "
            "rate may decide which one is better:"
        )
    parts = [heading, f'<p class="caption">{caption}</p>', table]
    parts += [f"<p>{told}</p>"] if len(sensitivities) > 1 else []
    return [*parts, f"<ul>{marked}</ul>"] if marked else parts


def _laws(study: Study) -> list[str]:
    if not study.fits or study.fit.compares:
        return []
    method, command = study.fit.headline, shell.typed("linnet", "fit", study.folder, json=True)
    other = any(fit.other_L is not None for fit in study.fits.values())
    forms = ", and for the loss the other form, with both values at ten times the largest compute" if other else ""
    sizes = f"{escape(study.fit.apart)}. ".replace("_opt", "<sub>opt</sub>") if study.fit.apart else ""
    caption = (
        f"Power laws as in paper 000's Table 3, C in FLOPs, by the {_METHODS[method]}, {_chosen(study.fit)}. {sizes}"
        "Under each law stand the 95 % bootstrap intervals of its exponent and coefficient, and its value at the "
        f"largest compute{forms}. Exponent and coefficient move together, so compare values rather than coefficients. "
        "The held-out error is that of the law "
        f"fitted to the smaller budgets, at the largest. <code>{escape(command)}</code> prints everything in full."
    )
    parts = shell.captioned("The laws", caption, tables.law_table(study))
    for title, words, table in (
        ("How the headline was chosen", _CANDIDATES, tables.candidate_table(study)),
        ("The other methods", _OTHERS, tables.method_table(study)),
        ("Which optima are refused", _OPTIMA, tables.refused_table(study)),
        ("Where the laws of loss meet", _CROSSINGS, tables.crossing_table(study)),
        ("How the exponents move with the runs", _SENSITIVITY, tables.sensitivity_table(study)),
    ):
        if table:
            parts.append(f'<details><summary>{title}</summary><p class="caption">{words}</p>{table}</details>')
    return parts


def _chosen(fit: StudyFit) -> str:
    form = tables.FORMS[fit.form]
    best = next((candidate for candidate in fit.candidates if candidate.chosen and candidate.error is not None), None)
    if best is None:
        return f"L(C) {form} (no budgets are left to choose by held-out error)"
    if (lower := fit.closest) is not None:
        why = f"{lower.method} has {units.percent(lower.error or 0.0)}, less by no more than the noise of the minima"
        return f"L(C) {form}: a held-out error of {units.percent(best.error)} ({why})"
    return f"L(C) {form}: the lowest held-out error, {units.percent(best.error)}" if len(fit.candidates) > 1 else form


_CANDIDATES = (
    "Each method, with each form of L(C), is fitted to the smaller budgets and predicts the best loss of the largest. "
    "All predict the same losses: the minima of the parabolas of these budgets, or the lowest losses seen if there are "
    "fewer than three parabolas. The one with the lowest error is the headline of all "
    "architectures."
)
_OTHERS = "The same exponents by the other methods, with 95 % intervals."
_CROSSINGS = (
    "A compute outside the data of both is given only with its interval. There is no interval if too few budgets leave "
    "the form of the laws untested, if some resamples of the laws do not meet or disagree about which is lower above, "
    "or if the laws of the other form meet outside it."
)
_OPTIMA = (
    "The lowest run of such a budget is a cross in the figure of loss against size, and takes no part in "
    "N<sub>opt</sub> and D<sub>opt</sub>."
)
_SENSITIVITY = (
    "The exponents of the IsoFLOP method with other windows of sizes, and without each budget. A value outside the "
    "interval of the law means that this choice moves the exponent by more than the noise of the runs."
)

_METHODS = {
    "isoflop": "IsoFLOP method (the optimum of a parabola in each budget)",
    "power": "lowest losses of each budget",
    "envelope": "envelope of the training curves",
    "parametric": "parametric surface L(N, D)",
}


def _downstream(study: Study, series: list[downstream.Series]) -> list[str]:
    if not series:
        return []
    caption = (
        "The law of the held-out loss, and each metric as a function of it, with 95 % bootstrap intervals over runs. "
        "The error of both steps together is that on the runs which no cheaper run beats, the held-out error that on "
        "those of most compute when the others alone are fitted. Errors of shares are points of a hundred."
    )
    return shell.captioned("From compute to metrics", caption, downstream.table(study, series))


def _conventions(study: Study) -> list[str]:
    table = tables.convention_table(study)
    if not table:
        return []
    caption = (
        "Exponents depend on what is counted: embeddings are a large part of small models, and 6ND leaves out "
        "everything that is not a weight. Compare architectures, and papers, under one convention only."
    )
    if note := by_weights(study.folder, study.table.to_dict("records")):
        caption += f" {escape(note[0].upper() + note[1:])}."
    return shell.captioned("How counting changes the exponents", caption, table)


def _runs(study: Study, folder: Path) -> list[str]:
    lost, excluded = tables.left_out_table(study, folder), tables.excluded_table(study)
    parts = ["<h2>Runs that took no part in the fits</h2>", lost, excluded] if lost or excluded else []
    if mixture := tables.source_table(study):
        parts += ["<h2>Sources of the mixture</h2>", mixture]
    caption = (
        "Every number above comes from these runs. A name leads to the run's folder (config.yaml, metrics.jsonl, "
        "result.json). Clicking a point in a figure leads here, clicking a column sorts, and pointing at a number "
        "shows all its digits."
    )
    table = f'<div class="tall">{tables.run_table(study, folder)}</div>'
    return [*parts, *shell.captioned("All runs", caption, table)]


def _making(study: Study, command: str) -> list[str]:
    facts = {
        "Redraw": f"<code>{escape(command)}</code>, from study.yaml, table.csv and the run folders alone",
        "Seeds": escape(", ".join(str(seed) for seed in study.seeds)),
        "Trained with": escape(study.made),
        "Drawn with": escape(shell.drawn_with()),
        "Intervals": escape(_bootstrap(study)),
    }
    parts = ["<h2>How this was made</h2>", shell.facts(facts)]
    if study.config:
        text = yaml.safe_dump(study.config, sort_keys=False, allow_unicode=True, width=100)
        parts.append(f"<details><summary>study.yaml</summary><pre>{escape(text)}</pre></details>")
    return parts


def _bootstrap(study: Study) -> str:
    bootstraps = [fit.bootstrap for each in study.fits.values() for fit in (each.best, each.sizes)]
    made = {
        each.scheme: f"{each.resamples} bootstrap resamples ({each.scheme}), seed {each.seed}"
        for each in bootstraps
        if each.resamples
    }
    return "; ".join(made.values())
