"""Prints what `linnet fit` found: the laws, then their uncertainty, then everything that was refused."""

from collections.abc import Container

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from linnet.config import count_of
from linnet.laws.fit import ArchitectureFit, HeldOut, IsoflopFit, Law, ParametricFit, StudyFit
from linnet.laws.fit.results import law_of_form
from linnet.laws.fit.table import CONVENTIONS

TITLES = {
    "isoflop": "IsoFLOP: a parabola in each budget, laws through the optima",
    "envelope": "Envelope of the training curves",
    "power": "Lowest loss of each budget",
    "parametric": "Surface L(N, D) = E + A / N^alpha + B / D^beta",
}


FORMS = {"pure": "without a constant", "constant": "with a constant"}


def show(study: StudyFit, source: str, rows: int, unit: str) -> None:
    """Prints a study's fits to the console."""
    console = Console(highlight=False)
    in_unit = "FLOPs" if unit == "flops" else "PF-days (8.64e19 FLOPs)"
    counted = escape(f"N is {size_column(study.columns, study.count)}, C is {_cost_column(study)}, in {in_unit}")
    console.print(f"[bold]{escape(source)}[/]: {rows} rows; {counted}")
    for note in study.notes:
        _line(console, f"[dim]{escape(note)}[/]")
    show_headline(console, study, unit)
    methods = list(next(iter(study.values())).methods)
    if len(study.candidates) > 1:
        console.print("\n[bold]Held-out errors[/] of the methods that could be the headline")
        console.print(_candidates(study))
    if len(methods) > 1:
        console.print("\n[bold]The other methods[/], exponents with 95 %")
        console.print(_others(study, [method for method in methods if method != study.headline or study.apart]))
    if any(fit.isoflop is not None and len(fit.isoflop.sensitivity) > 1 for fit in study.values()):
        console.print("\n[bold]How the IsoFLOP exponents move[/]")
        console.print(_sensitivity(study))
    if any(len(fit.conventions) > 1 and any(law.alpha for law in fit.conventions) for fit in study.values()):
        sizes = f"; a and b: {study.allocation}" if study.apart else ""
        console.print(f"\n[bold]Other ways of counting[/] ({study.headline}{sizes})")
        console.print(_conventions(study))
    _crossings(console, study)
    _excluded(console, study)
    _refusals(console, study)


def show_predictions(rows: list[dict]) -> None:
    """Prints the losses that `linnet.laws.fit.predictions` returns."""
    console = Console(highlight=False)
    if rows:
        console.print("\n[bold]Predicted loss[/] of the surface")
    for row in rows:
        where = f"{row['architecture']} at N = {row['N']:.4g}, D = {row['D']:.4g}: "
        if row["loss"] is None:
            _line(console, f"[yellow]{escape(where + '; '.join(row['refused']))}[/]")
            continue
        low, high = row["interval"] or (None, None)
        ends = "no interval" if low is None else f"95 %: {low:.4f} to {high:.4f}"
        _line(console, escape(f"{where}{row['loss']:.4f} ({ends}){'' if row['inside'] else ', outside the table'}"))


def show_summary(console: Console, study: StudyFit) -> None:
    """Prints what `linnet study` ends with: headline, IsoFLOP exponents, crossings, and refusals of both methods."""
    for note in study.notes:
        _line(console, f"[dim]{escape(note)}[/]")
    if study.compares:
        fix = "`base: NAME` of an architecture compares it with NAME, paired by seed"
        _line(console, f"each architecture has one size at one budget, so there is no law to fit; {fix}")
        return
    show_headline(console, study, "flops")
    shown = {study.headline, study.allocation, "isoflop"}
    if (study.headline != "isoflop" or study.apart) and any(fit.isoflop is not None for fit in study.values()):
        console.print("\n[bold]IsoFLOP[/], exponents with 95 %")
        console.print(_others(study, ["isoflop"]))
    _crossings(console, study)
    _excluded(console, study)
    _refusals(console, study, shown)


def show_headline(console: Console, study: StudyFit, unit: str) -> None:
    """Prints the laws of the headline method, with their intervals and notes."""
    methods = list(next(iter(study.values())).methods)
    fits = {name: fit.best for name, fit in study.items()}
    if not all(fit.refused for fit in fits.values()):
        console.print(f"\n[bold]{TITLES[study.headline]}; L(C) {FORMS[study.form]}[/]")
        if reason := _chosen(study):
            _line(console, f"[dim]{reason}[/]")
        if study.apart:
            _line(console, f"[dim]{study.apart}[/]")
        console.print(_laws(study, unit))
        if study.headline == "isoflop" and len(methods) == 1:
            console.print(_optima(fits))
        if study.headline == "parametric":
            console.print(_surfaces(fits))
        _under(console, study)


def size_column(columns: dict[str, str], count: str) -> str:
    """Returns what N is: the column of the table, and what it counts where its name is one that Linnet writes."""
    name = "N" if count == "non-embedding" else "N_total"
    column = columns.get(name, name)
    known = {"params_non_embedding": " (without embeddings)", "params_total": " (with embeddings)"}
    return f"column {column}{known.get(column, '')}"


def _cost_column(study: StudyFit) -> str:
    if study.flops == "exact":
        return f"column {study.columns['C']}" if "C" in study.columns else "6 N D"
    return CONVENTIONS[study.flops].removeprefix("as ")


def _chosen(study: StudyFit) -> str:
    """Returns why this method and form are the headline; "" if there was nothing to choose."""
    best = next((candidate for candidate in study.candidates if candidate.chosen), None)
    if best is None or len(study.candidates) < 2:
        return ""
    if best.error is None:
        return "not chosen by held-out error: no larger budgets are left to predict"
    over = f"{best.error:.2%} over {count_of(best.tested, 'budget')}"
    if (lower := study.closest) is not None:
        other = f"{lower.method} {FORMS[lower.form]} has {lower.error:.2%}"
        return f"chosen with a held-out error of {over}: {other}, which is less by no more than the noise of the minima"
    return f"chosen by the lowest held-out error, {over}"


def _laws(study: StudyFit, unit: str) -> Table:
    table = _table("", "exponent (95 %)", "held-out error")
    for name, fit in study.items():
        both = "" if fit.sizes.a_plus_b is None else f"a + b = {fit.sizes.a_plus_b:.3f}"
        table.add_row(f"[bold]{escape(name)}[/]", "", "")
        for law in (fit.L, fit.N_opt, fit.D_opt):
            if law.refused:
                table.add_row(f"  {law.quantity}: [yellow]refused[/]", "", "")
                continue
            last = _held_out(fit.held_out) if law is fit.L else both if law is fit.D_opt else ""
            table.add_row(f"  {law.text(unit)}", _exponent_interval(law), last)
            table.add_row(f"   [dim]{_value_at_end(law)}[/]", "", "")
            if law is fit.L and fit.other_L is not None:
                other = fit.other_L
                test = fit.tests.get(fit.headline, {}).get("pure" if other.constant is None else "constant")
                text = other.text(unit).removeprefix("L = ")
                table.add_row(f"  [dim]or[/] {text}", _exponent_interval(other), _held_out(test))
    return table


def _exponent_interval(law: Law) -> str:
    if law.exponent_interval is None:
        return "[dim]none[/]"
    low, high = law.exponent_interval
    return f"{low:.3f} to {high:.3f}"


def _value_at_end(law: Law) -> str:
    form, rough = ("{:.4f}", "{:.4f}") if law.quantity == "L" else ("{:.3g}", "{:.2g}")
    value, span = form.format(float(law.predict(law.c_max))), law.interval_at(law.c_max)
    ends = f" ({' to '.join(rough.format(end) for end in span)})" if span else ""
    return f"at {law.c_max:.2g}: {value}{ends}"


def _held_out(test: HeldOut | None) -> str:
    if test is None or test.refused:
        return "[dim]no test[/]"
    return f"{test.mean_error:.2%} on {test.tested}"


def _candidates(study: StudyFit) -> Table:
    table = _table("method", "L(C)", "held-out error", "budgets predicted", "")
    for candidate in study.candidates:
        error = "[dim]no test[/]" if candidate.error is None else f"{candidate.error:.2%}"
        table.add_row(
            candidate.method,
            FORMS[candidate.form],
            error,
            str(candidate.tested),
            "headline" if candidate.chosen else "",
        )
    return table


def _others(study: StudyFit, methods: list[str]) -> Table:
    table = _table("", "method", "L exponent", "a", "b", "held-out error")
    for name, fit in study.items():
        first = escape(name)
        for method in methods:
            fitted = fit.methods[method]
            if fitted.refused:
                continue
            loss = law_of_form(fitted, study.form)
            test = fit.tests.get(method, {}).get("pure" if loss.constant is None else "constant")
            numbers = [_exponent(law) for law in (loss, fitted.N_opt, fitted.D_opt)]
            table.add_row(first, method, *numbers, "" if loss.refused else _held_out(test))
            first = ""
    return table


def _exponent(law: Law) -> str:
    if law.refused:
        return "refused"
    span = law.exponent_interval
    return f"{law.exponent:.3f}" + (f" ({span[0]:.3f} to {span[1]:.3f})" if span else "")


def _sensitivity(study: StudyFit) -> Table:
    """One row per architecture and exponent; the page and the JSON have every window and every budget."""
    table = _table("", "", "as fitted", "other windows", "without one budget", "cubic", "Akima")
    for name, fit in study.items():
        rows = fit.isoflop.sensitivity if fit.isoflop is not None else []
        for symbol in "ab" if rows else "":
            others = [row[symbol] for row in rows[1:] if row["without"] is None and row[symbol] is not None]
            without = [row[symbol] for row in rows if row["without"] is not None and row[symbol] is not None]
            first = escape(name) if symbol == "a" else ""
            laws = (fit.isoflop.N_cubic, fit.isoflop.N_akima) if symbol == "a" else ()
            curves = [_range([law.exponent] if law.exponent is not None else []) for law in laws]
            table.add_row(first, symbol, f"{rows[0][symbol]:.4f}", _range(others), _range(without), *curves)
    return table


def _range(values: list[float]) -> str:
    low, high = f"{min(values, default=0):.4f}", f"{max(values, default=0):.4f}"
    return "-" if not values else low if low == high else f"{low} to {high}"


def _surfaces(fits: dict[str, ParametricFit]) -> Table:
    table = _table("parameter", "value", "95 %", "standard deviation")
    for name, fit in fits.items():
        if fit.refused:
            continue
        if len(fits) > 1:
            table.add_row(f"[bold]{escape(name)}[/]", "", "", "")
        for key, value in fit.parameters.items():
            low, high = fit.intervals.get(key, (None, None))
            shown = "" if low is None else f"{low:.5g} to {high:.5g}"
            deviation = f"{fit.deviations[key]:.3g}" if key in fit.deviations else ""
            table.add_row(f"  {key}", f"{value:.6g}", shown, deviation)
    return table


def _optima(fits: dict[str, IsoflopFit]) -> Table:
    table = _table("C", "runs", "N_opt", "D_opt", "loss there", "")
    for name, fit in fits.items():
        if len(fits) > 1:
            table.add_row(f"[bold]{escape(name)}[/]")
        for group in fit.groups:
            if group.inside:
                cells = [f"{group.N_opt:.3e}", f"{group.D_opt:.3e}", f"{group.L_opt:.4f}", "[green]inside[/]"]
            else:
                cells = ["-", "-", f"{group.L_lowest:.4f}", "[yellow]refused[/] (lowest observed)"]
            table.add_row(f"{group.C:.3e}", str(len(group.N)), *cells)
    return table


def _under(console: Console, study: StudyFit) -> None:
    fits = {name: fit.best for name, fit in study.items()}
    bootstraps = [fit.bootstrap for fit in (*fits.values(), *(fit.sizes for fit in study.values()))]
    schemes = {bootstrap.scheme: bootstrap for bootstrap in bootstraps if bootstrap.resamples}
    for scheme, each in schemes.items():
        _line(console, f"[dim]intervals: bootstrap of {scheme}; {each.resamples:,} resamples, seed {each.seed}[/]")
    notes: dict[str, list[str]] = {}
    for name, fit in fits.items():
        lines = [*fit.notes]
        if isinstance(fit, ParametricFit) and not fit.refused:
            reached = f"{fit.starts_at_optimum:,} of {fit.starts:,} starts"
            lines.append(f"sum of Huber losses {fit.objective:.7e} over {fit.rows} rows, reached from {reached}")
        lines += [fit.bootstrap.note] if fit.bootstrap.note else []
        law_notes = [(law.quantity, note) for law in _all_laws(study[name]) for note in law.notes]
        lines += [
            f"{what}: {note}" for what, note in law_notes if not (fit.bootstrap.note and note.startswith("no interval"))
        ]
        cost_ratio = study[name].sizes.cost_ratio
        if cost_ratio and not all(0.9 < end["ratio"] < 1.1 for end in cost_ratio):
            (low, high), (first, last) = zip(
                *((f"{end['C']:.2g}", f"{end['ratio']:.2f}") for end in cost_ratio), strict=True
            )
            change = f"is {first}" if first == last else f"goes from {first} to {last}"
            lines.append(f"6 N_opt D_opt / C {change} between {low} and {high} FLOPs")
        far = fit.extrapolation
        if far.get("irreducible") is not None and fit.L is not fit.L_irreducible:
            chosen = study[name].L
            span = chosen.interval_at(far["C"])
            ends = f" (95 % of both: {span[0]:.3f} to {span[1]:.3f})" if span else ""
            with_and_without = f"{far['pure']:.3f} without, {far['irreducible']:.3f} with a constant"
            lines.append(f"loss at {far['C']:.2g} FLOPs: {with_and_without}{ends}")
        for line in lines:
            notes.setdefault(line, []).append(name)
    for line, names in notes.items():
        whose = "" if len(set(names)) == len(fits) else f"{', '.join(dict.fromkeys(names))}: "
        _line(console, f"[dim]{escape(whose + line)}[/]")


def _conventions(study: StudyFit) -> Table:
    table = _table("", "N", "C", "L exponent", "a", "b")
    for name, fit in study.items():
        for i, law in enumerate(fit.conventions):
            numbers = ["refused" if value is None else f"{value:.4f}" for value in (law.alpha, law.a, law.b)]
            table.add_row(escape(name) if i == 0 else "", law.count, law.flops, *numbers)
    return table


def _crossings(console: Console, study: StudyFit) -> None:
    met = [c for c in study.crossings if c.C is not None]
    if not study.crossings:
        return
    console.print()
    console.print(f"[bold]Where the laws of loss cross[/] ({study.headline}, {FORMS[study.form]})")
    for c in met:
        names = f"{escape(c.first)} and {escape(c.second)} cross at {c.C:.3g} FLOPs"
        if c.interval:
            names += escape(f" [{c.interval[0]:.2g}, {c.interval[1]:.2g}]")
            known = c.lower_below and f"{escape(c.lower_below)} is lower below and {escape(str(c.lower_above))} above"
            names += f"; {known or 'their slopes cannot be told apart'}"
        _line(console, names + ("" if c.inside else ", outside the data"))
        if c.other_C is not None:
            other = FORMS["constant" if c.other_form == "constant" else "pure"]
            meeting = f"at {c.other_C:.3g} FLOPs" if c.other_inside else "outside the data"
            _line(console, f"[dim]{other}: {meeting}[/]", 4)
        for reason in c.refused:
            _line(console, f"[dim]{escape(reason)}[/]", 4)
    for c in study.crossings:
        if c.C is None:
            line = f"{c.first} and {c.second}: {'; '.join(c.refused)}"
            _line(console, f"[dim]{escape(line)}[/]")


def _excluded(console: Console, study: StudyFit) -> None:
    if not study.excluded:
        return
    console.print("\n[bold]Runs left out[/]")
    for row in study.excluded:
        whose = f"{row['run']} of {row['architecture']}" if len(study) > 1 else row["run"]
        loss = "" if row["loss"] is None else f", loss {row['loss']:.4g}"
        _line(console, escape(f"{whose}{loss}: {row['reason']}"))


def _refusals(console: Console, study: StudyFit, methods: Container[str] | None = None) -> None:
    """Prints the refusals of these methods, or of all."""
    refused: dict[str, list[str]] = {}
    for name, fit in study.items():
        for line in fit.refused:
            if methods is not None and line.partition(" ")[0] not in methods:
                continue
            refused.setdefault(line, []).append(name)
    if not refused:
        return
    console.print()
    console.print("[bold yellow]Refused[/]")
    for line, names in refused.items():
        whose = "all" if len(names) == len(study) > 1 else ", ".join(names)
        _line(console, f"{escape(whose)}: {escape(line)}")


def _all_laws(fit: ArchitectureFit) -> list[Law]:
    best = fit.best
    return [*([best.L] if best.L is best.L_irreducible else [best.L, best.L_irreducible]), fit.N_opt, fit.D_opt]


def _line(console: Console, markup: str, indent: int = 2) -> None:
    """Prints a paragraph with all its lines indented."""
    console.print(Padding(markup, (0, 0, 0, indent), expand=False))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0)
    return table
