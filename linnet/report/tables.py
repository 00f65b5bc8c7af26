"""The tables of a report, as HTML: laws, counting conventions, runs left out, every run with a link to its folder."""

import contextlib
import math
import os
from html import escape
from pathlib import Path

from linnet.config import ConfigError
from linnet.laws.fit import ArchitectureFit, Law
from linnet.laws.fit.results import law_of_form
from linnet.report import shell, units
from linnet.report.records import Study, coefficient_interval, through_optima
from linnet.runs import RunFolder
from linnet.study.differences import read_differences
from linnet.study.sensitivity import FACTORS, shown_loss, shown_value, words


def law_table(study: Study) -> str:
    """L(C), N_opt(C) and D_opt(C) of each architecture as in paper 000's Table 3, with what that table leaves out."""
    constant = "E + " if any(fit.L.constant is not None for fit in study.fits.values()) else ""
    columns = (
        "*Architecture", f"L(C) = {constant}β C<sup>α</sup>, nats per token",
        "N<sub>opt</sub>(C) = k C<sup>a</sup>, parameters", "D<sub>opt</sub>(C) = k C<sup>b</sup>, tokens",
        "#a + b", "#Held-out error",
    )  # fmt: skip
    rows = []
    without = {"; ".join(fit.L_irreducible.refused) for fit in study.fits.values() if not fit.L.refused}
    common = without.pop() if len(without) == 1 else ""  # then it is said once, below the table
    for name, fit in study.fits.items():
        edge = "" if fit.L.refused or through_optima(fit) else '<div class="fine">through the lowest losses seen</div>'
        other = "" if common or fit.L.refused else _other_form(fit)
        loss = f"{_law(fit.L, 'β', 'α', 'L', _loss)}{edge}{other}{_remarks(fit)}"
        sizes = (_law(fit.N_opt, "k", "a", "N", units.count), _law(fit.D_opt, "k", "b", "D", units.count))
        numbers = (units.significant(fit.sizes.a_plus_b), _held_out(fit.held_out))
        rows.append((shell.swatch(study.architectures, name), loss, *sizes, *numbers))
    note = f'<p class="fine below">The same with an irreducible constant is refused: {units.prose(common)}.</p>'
    return shell.table("laws", columns, rows) + (note if common else "")


FORMS = {"pure": "without a constant", "constant": "with a constant"}


def candidate_table(study: Study) -> str:
    """The methods and forms that could be the headline, with the error by which it was chosen; "" for one alone."""
    candidates = study.fit.candidates if study.fit is not None else []
    rows = []
    for candidate in candidates if len(candidates) > 1 else ():
        error = units.MISSING if candidate.error is None else units.percent(candidate.error)
        rows.append(
            (candidate.method, FORMS[candidate.form], error, candidate.tested, "headline" if candidate.chosen else "")
        )
    return shell.table("candidates", ("*Method", "L(C)", "#Held-out error", "#Budgets predicted", ""), rows)


def method_table(study: Study) -> str:
    """The exponents of the methods that the table of laws does not show whole, as `linnet fit` prints them."""
    rows = []
    for name, fit in study.fits.items():
        for method, method_fit in fit.methods.items():
            if (method == fit.headline and fit.sizes is method_fit) or method_fit.refused:
                continue
            loss = law_of_form(method_fit, fit.form)
            cells = [_exponent(law) for law in (loss, method_fit.N_opt, method_fit.D_opt)]
            tests = fit.tests.get(method, {})
            test = tests.get("constant" if loss.constant is not None else "pure")
            error = units.MISSING if test is None or test.refused else units.percent(test.mean_error)
            rows.append((shell.swatch(study.architectures, name), method, *cells, error))
    exponents = ("Exponent of L(C)", "a of N<sub>opt</sub>", "b of D<sub>opt</sub>")
    return shell.table("methods", ("*Architecture", "Method", *exponents, "#Held-out error"), rows)


def refused_table(study: Study) -> str:
    """The budgets of which the parabola has no optimum that counts, with reasons."""
    rows = []
    for name, fit in study.fits.items():
        for group in fit.isoflop.groups if fit.isoflop is not None else ():
            if not group.inside:
                reason = units.prose(*group.refused)
                rows.append((shell.swatch(study.architectures, name), units.flops(group.at), len(group.N), reason))
    return shell.table("refused-optima", ("*Architecture", "#Budget", "#Runs", "?Reason"), rows)


def _exponent(law: Law) -> str:
    if law.refused:
        return '<span class="refused">refused</span>'
    span = law.exponent_interval
    ends = f" ({units.significant(span[0])} to {units.significant(span[1])})" if span else ""
    return units.significant(law.exponent) + ends


def crossing_table(study: Study) -> str:
    """Where the laws of loss of each pair of architectures meet."""
    rows = []
    for crossing in study.crossings:
        pair = sorted((crossing.first, crossing.second), key=study.architectures.index)
        names = " and ".join(shell.swatch(study.architectures, name) for name in pair)
        at = units.MISSING if crossing.C is None else units.scientific(crossing.C)
        at += "" if crossing.C is None or crossing.inside else ", outside the data"
        span = " to ".join(units.scientific(end) for end in crossing.interval) if crossing.interval else units.MISSING
        other = ""
        if crossing.other_form is not None and crossing.C is not None:
            meeting = "they do not meet" if crossing.other_C is None else "outside the data,"
            meeting = units.scientific(crossing.other_C) if crossing.other_inside else meeting
            other = f"{meeting} {FORMS[crossing.other_form]}"
        rows.append((names, at, span, other, units.prose(*crossing.refused)))
    columns = ("*Laws of", "Meet at C (FLOPs)", "95 %", "In the other form", "?Why there is no crossing or no interval")
    return shell.table("crossings", columns, rows)


def difference_table(study: Study) -> str:
    """Loss of each architecture minus that of its base, from differences.csv; "" if the study has none."""
    rows, sensitivities, differences = [], study.sensitivities, read_differences(study.folder)
    papers = any(difference.printed is not None for difference in differences)
    for difference in differences:
        interval = units.MISSING if difference.low is None else f"{difference.low:+.4f} to {difference.high:+.4f}"
        printed = units.MISSING if difference.printed is None else f"{difference.printed:+.3f}"
        names = map(escape, (difference.architecture, difference.base, difference.size))
        mark = words(sensitivities, difference.architecture, difference.base, abs(difference.bits), math.log(2))
        verdict = "; ".join(filter(None, (difference.verdict, mark)))
        p = units.MISSING if difference.p is None else f"{difference.p:.2g}"
        numbers = (units.count(difference.target), difference.seeds, f"{difference.bits:+.4f}", interval, p)
        rows.append((*names, *numbers, *([printed] if papers else []), escape(verdict)))
    numbers = (
        f"#{study.units.capitalize()}",
        "#Seeds",
        "#Bits per token",
        "#95 %",
        "#p, adjusted",
        *(["#Printed"] if papers else []),
    )
    columns = ("*Architecture", "Base", "Size", *numbers, "Sign")
    return shell.table("differences", columns, rows)


def rate_table(study: Study) -> str:
    """The loss of each architecture at half, one and two times its learning rate; "" if the study lacks these runs."""
    rows = []
    for name, sensitivity in study.sensitivities.items():
        texts = (units.flops(sensitivity.budget), units.significant(sensitivity.rate))
        cells = (
            *texts,
            *(shown_loss(sensitivity, factor) for factor in (FACTORS[0], 1.0, FACTORS[1])),
            shown_value(sensitivity),
        )
        rows.append((shell.swatch(study.architectures, name), escape(sensitivity.size), *cells))
    losses = ("#Loss at 1/2 x", "#Loss at 1 x", "#Loss at 2 x")
    columns = ("*Architecture", "Size", "#Budget", "#Rate", *losses, "#Sensitivity")
    return shell.table("rate-sensitivity", columns, rows)


WINDOW_WORDS = {"auto": "as fitted", "all": "all sizes", "sizes": "three sizes each way", "loss": "losses within 5 %"}


def sensitivity_table(study: Study) -> str:
    """How the exponents of the IsoFLOP method move with the window of sizes and without each budget."""
    rows = []
    for name, fit in study.fits.items():
        if fit.isoflop is None or fit.isoflop.N_opt.refused:
            continue
        for index, row in enumerate(fit.isoflop.sensitivity):
            first = shell.swatch(study.architectures, name) if index == 0 else ""
            without = "" if row["without"] is None else f", without {units.flops(row['without'])}"
            what = WINDOW_WORDS.get(row["window"], row["window"]) + without
            rows.append((first, what, *(units.significant(row[symbol]) for symbol in "ab"), row["budgets"]))
    exponents = ("#a of N<sub>opt</sub>", "#b of D<sub>opt</sub>")
    return shell.table("sensitivity", ("*Architecture", "Parabolas through", *exponents, "#Budgets"), rows)


def excluded_table(study: Study) -> str:
    """Runs that a request or a fit left out, with reasons."""
    rows = []
    for row in study.fit.excluded if study.fit is not None else ():
        name = shell.swatch(study.architectures, row["architecture"])
        rows.append((escape(row["run"]), name, units.loss(row["loss"]), units.prose(row["reason"])))
    return shell.table("excluded", ("Run", "Architecture", "#Loss", "?Reason"), rows)


def convention_table(study: Study) -> str:
    """The exponents under each way of counting parameters and FLOPs."""
    rows, any_refused = [], False
    for name, fit in study.fits.items():
        for index, convention in enumerate(fit.conventions):
            count = "without embeddings" if convention.count == "non-embedding" else "with embeddings"
            numbers = [units.significant(value) for value in (convention.alpha, convention.a, convention.b)]
            reason = units.prose(*convention.refused)
            any_refused = any_refused or bool(reason)
            first = shell.swatch(study.architectures, name) if index == 0 else ""
            rows.append((first, count, FLOPS[convention.flops], *numbers, reason))
    exponents = ("#α of L(C)", "#a of N<sub>opt</sub>", "#b of D<sub>opt</sub>")
    why = "?Refused because" if any_refused else "?"
    return shell.table("conventions", ("*Architecture", "Parameters", "FLOPs", *exponents, why), rows)


def left_out_table(study: Study, page_folder: Path) -> str:
    """Returns a table of the runs that the fits leave out, with reasons."""
    rows = []
    for _, row in study.table[~study.table["usable"]].iterrows():
        status = "no finite loss" if row["status"] == "done" else str(row["status"])
        name = shell.swatch(study.architectures, row["architecture"])
        about = (_link(study, row, page_folder), name, units.flops(row["budget"]))
        rows.append((*about, shell.Cell(escape(status), kind="bad"), escape(_error(study, row))))
    return shell.table("left-out", ("Run", "Architecture", "Budget", "Status", "?Last words"), rows)


FLOPS = {"exact": "exact", "paper": "paper 000", "causal": "exact, causal", "6nd": "6ND", "004": "paper 004"}

RUN_COLUMNS = (
    ("budget", "Budget (FLOPs)", units.scientific),
    ("params_non_embedding", "N", units.count),
    ("params_total", "N with embeddings", units.count),
    ("tokens", "D (tokens)", units.count),
    ("flops", "C (exact FLOPs)", units.scientific),
    ("flops_paper", "C, paper's count", units.scientific),
    ("loss", "Loss (nats)", units.loss),
    ("bits_per_byte", "Bits per byte", lambda value: units.significant(value, 4)),
    ("state_bytes", "State", units.size),
    ("seconds", "Time", units.duration),
)


def run_table(study: Study, page_folder: Path) -> str:
    """Every run with its numbers; each row can be pointed at by `#run-<name>`."""
    accuracy = ("accuracy", "Accuracy", units.percent)
    columns = [
        accuracy if column[0] == "bits_per_byte" and study.units == "images" else column for column in RUN_COLUMNS
    ]
    rows = []
    for _, row in study.table.iterrows():
        cells: list = [_link(study, row, page_folder), shell.swatch(study.architectures, row["architecture"])]
        for name, _, shown in columns:
            exact = "" if math.isnan(row[name]) else f"{row[name]:.10g}"
            cells.append(shell.Cell(shown(row[name]), f' data-v="{exact}" title="{exact}"'))
        rows.append([*cells, shell.Cell(escape(str(row["status"])), kind="" if row["usable"] else "bad")])
    titles = ("Run", "Architecture", *(f"#{title}" for _, title, _ in columns), "Status")
    return shell.table("runs", titles, rows, "sortable", [f"run-{escape(run)}" for run in study.table["run"]])


def source_table(study: Study) -> str:
    """Tokens, passes and held-out loss of each source of a mixture, over finished runs; "" without mixtures."""
    sources: dict[str, list[dict]] = {}
    for _, row in study.table.iterrows():
        if (folder := study.run_folder(row)) is not None and RunFolder(folder).done:
            with contextlib.suppress(ConfigError):  # a damaged result hides no other run
                for part in RunFolder(folder).result().get("sources") or []:
                    sources.setdefault(f"{part['source']} ({part['digest']})", []).append(part)
    rows = []
    for name, parts in sorted(sources.items()):
        cells = [escape(name)]
        for key, show in (("tokens", units.count), ("passes", units.significant), ("validation_loss", units.loss)):
            values = [part[key] for part in parts if part.get(key) is not None]
            low, high = (show(pick(values)) if values else units.MISSING for pick in (min, max))
            cells.append(low if low == high else f"{low} to {high}")
        rows.append(cells)
    return shell.table("sources", ("*Source", "#Tokens per run", "#Passes per run", "#Held-out loss"), rows)


def _law(law, coefficient: str, exponent: str, quantity: str, shown) -> str:
    """A law, the intervals of its parameters, and its value at the end of its data; or why there is none."""
    if law.refused:
        return shell.refused(law.refused)
    lines = []
    symbols = (
        (exponent, law.exponent_interval, units.significant),
        (coefficient, coefficient_interval(law), _coefficient),
    )
    for symbol, span, form in symbols:
        if span:
            lines.append(f"<i>{symbol}</i> {form(span[0])} to {form(span[1])}")
    at = law.interval_at(law.c_max)
    span = f" ({shown(at[0])} to {shown(at[1])})" if at else ""
    end = units.scientific(law.c_max, 2)
    lines.append(f"<i>{quantity}</i> {shown(float(law.predict(law.c_max)))}{span} at {end}")
    return f'<div class="law">{_formula(law)}</div>' + "".join(f'<div class="fine">{line}</div>' for line in lines)


def _other_form(fit: ArchitectureFit) -> str:
    """The law of loss in the form that was not chosen, or why there is none."""
    if fit.other_L is not None:
        at = 10 * fit.L.c_max
        both = " or ".join(_loss(float(law.predict(at))) for law in (fit.L, fit.other_L))
        values = f"at {units.scientific(at, 2)}: {both}"
        return f'<div class="fine">or {_formula(fit.other_L)}</div><div class="fine">{values}</div>'
    if fit.L_irreducible.refused:
        reasons = units.prose(*fit.L_irreducible.refused)
        return f'<div class="why">with a constant: refused, {reasons}</div>'
    return ""


def _remarks(fit: ArchitectureFit) -> str:
    """Why a law of loss has no interval or no check."""
    if fit.L.refused:
        return ""
    notes = dict.fromkeys(filter(None, (*fit.L.notes, fit.best.bootstrap.note)))
    return "".join(f'<div class="why">{units.prose(note)}</div>' for note in notes)


def _formula(law) -> str:
    constant = f"{units.significant(law.constant)} + " if law.constant is not None else ""
    return f"{constant}{_coefficient(law.coefficient)} C<sup>{units.significant(law.exponent)}</sup>"


def _coefficient(value: float) -> str:
    return units.significant(value) if 1e-3 <= abs(value) < 1e5 else units.scientific(value)


def _loss(value: float) -> str:
    return units.significant(value, 4)


def _held_out(test) -> str:
    if test is None:
        return units.MISSING
    if test.refused:
        return f'<div class="why">{units.prose(*test.refused)}</div>'
    fine = (
        f"at most {units.percent(test.max_error)}, {units.plural(test.tested, 'point')}",
        f"above {units.scientific(test.c_max, 2)} FLOPs",
    )
    return f'<div class="law">{units.percent(test.mean_error)}</div><div class="fine">{"<br>".join(fine)}</div>'


def _link(study: Study, row, page_folder: Path) -> str:
    folder, name = study.run_folder(row), escape(row["run"])
    if folder is None or not folder.is_dir():
        return name
    target = Path(os.path.relpath(folder.resolve(), page_folder.resolve())).as_posix()
    return f'<a href="{escape(target)}/">{name}</a>'


def _error(study: Study, row) -> str:
    """Returns the last line of a run's error.txt."""
    folder = study.run_folder(row)
    text = RunFolder(folder).error() if folder is not None else None
    return text.strip().splitlines()[-1] if text and text.strip() else ""
