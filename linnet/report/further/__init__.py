"""The section of the further laws (`linnet.laws.further`) on the page of a study."""

from collections.abc import Sequence
from html import escape

from linnet.config import ConfigError
from linnet.laws.fit import load_table
from linnet.laws.fit.table import POINT
from linnet.laws.further import LawFit, Options, fit_laws
from linnet.report import shell, units
from linnet.report.drawing import Figure
from linnet.report.further import figures as further_figures
from linnet.report.records import Study
from linnet.study.collect import complete_table

Section = tuple[LawFit, Figure | None]


def read(
    study: Study, bootstrap: int, exclude: Sequence[str] = (), best_of: bool = False
) -> tuple[list[Section], dict[str, list[str]]]:
    """Returns the laws that the study's table supports, each with its figure, and the others with the reasons.

    Args:
        exclude, best_of: see `linnet.laws.fit.load_table`.
    """
    if study.fit is None:
        return [], {}
    try:
        table, _ = load_table(study.folder / "table.csv", exclude=exclude, best_of=best_of, point=POINT)
        options = Options(bootstrap=bootstrap, reference=study.architectures[0])
        found, unsupported = fit_laws(complete_table(table, study.folder), ["all"], options)
    except ConfigError as error:
        study.problems.append(f"No further laws could be fitted: {'; '.join(error.problems)}")
        return [], {}
    return [(law, further_figures.draw(study, law)) for law in found], unsupported


def parts(study: Study, sections: list[Section], unsupported: dict[str, list[str]], command: str) -> list[str]:
    """Returns the HTML of the section."""
    if not sections and not unsupported:
        return []
    own = shell.typed("linnet", "fit", study.folder, law="all")
    caption = (
        "Laws beyond L(C), N_opt(C) and D_opt(C), with 95 % bootstrap intervals; C in exact FLOPs, N without "
        "embeddings. "
        f"<code>{escape(own)}</code> prints them in full, and docs/laws.md has their equations."
    )
    html = ["<h2>Further laws</h2>", f'<p class="caption">{caption}</p>']
    for law, figure in sections:
        html.append(shell.section(figure, command) if figure else f"<h2>{escape(law.title)}</h2>")
        html.append(_numbers(law))
    if unsupported:
        rows = "".join(
            f"<li>{escape(name)}: {escape('; '.join(dict.fromkeys(reasons)))}</li>"
            for name, reasons in unsupported.items()
        )
        title = f"{units.plural(len(unsupported), 'law')} that this table does not support"
        html.append(f"<details><summary>{title}</summary><ul>{rows}</ul></details>")
    return html


def _numbers(law: LawFit) -> str:
    """The numbers, tests and notes of a law, folded."""
    rows = []
    for one in law.estimates:
        value = "refused" if one.value is None else units.significant(one.value, 4)
        ends = "" if one.interval is None else " to ".join(units.significant(end, 4) for end in one.interval)
        p = "" if one.p is None else f"{one.p:.2g}"
        rows.append((escape(one.name), escape(one.of), value, ends, p, escape(one.refused or one.note)))
    lines = [f"{test.name}: p = {_p(test)}; {test.conclusion}" for test in law.tests]
    for test in law.predictions:
        error = test.refused or f"mean error {units.percent(test.mean_error or 0.0)} on {test.tested}"
        lines.append(f"Held out, {test.name}: {error}")
    lines += [law.source, f"Intervals: {law.scheme}", *law.notes]
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    equation = f"<p><code>{escape(law.equation)}</code></p>"
    table = shell.table(f"law-{law.law}", ("*", "Of", "#Value", "#95 %", "#p", "?"), rows)
    body = f"{equation}{table}<ul>{listed}</ul>"
    return f"<details><summary>{escape(law.title)}: numbers, tests and notes</summary>{body}</details>"


def _p(test) -> str:
    return f"{test.p:.2g}" + ("" if test.p_bootstrap is None else f" ({test.p_bootstrap:.2g} by bootstrap)")
