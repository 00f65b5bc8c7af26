"""What `linnet fit` prints: the laws first, then how sure they are, then everything that was refused."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.study.fit import IsoflopFit, Law, MethodFit, ParametricFit, StudyFit

TITLES = {
    "isoflop": "IsoFLOP: a parabola in each budget, laws through the optima",
    "envelope": "Envelope of the training curves",
    "power": "Lowest loss of each budget",
    "parametric": "Surface L(N, D) = E + A / N^alpha + B / D^beta",
}


def show(study: StudyFit, source: str, rows: int, unit: str) -> None:
    """Prints a study's fits to the console."""
    console = Console()
    count = "without embeddings" if study.count == "non-embedding" else "with embeddings"
    cost = "as the table has it" if study.flops == "exact" else "6 N D"
    console.print(f"[bold]{escape(source)}[/]: {rows} rows; N counted {count}, C {cost}, in {_unit_name(unit)}")
    for note in study.notes:
        console.print(f"  [dim]{escape(note)}[/]")
    methods = list(next(iter(study.values())).methods)
    for method in methods:
        fits = {name: fit.methods[method] for name, fit in study.items()}
        if all(fit.refused for fit in fits.values()):
            continue
        console.print()
        mark = " [green](stands for the study)[/]" if method == study.headline and len(methods) > 1 else ""
        console.print(f"[bold]{TITLES[method]}[/]{mark}")
        console.print(_laws(fits, unit))
        if method == "parametric":
            console.print(_surfaces(fits))
        if method == "isoflop" and len(methods) == 1:
            console.print(_optima(fits))
        _under(console, fits)
    if any(len(fit.conventions) > 1 for fit in study.values()):
        console.print()
        console.print(f"[bold]Ways of counting[/] ({study.headline})")
        console.print(_conventions(study))
    _crossings(console, study)
    _refusals(console, study)


def _laws(fits: dict[str, MethodFit], unit: str) -> Table:
    table = _table("architecture", "law", "95 % of the exponent", "a + b", "held-out error")
    for name, fit in fits.items():
        laws = [fit.L] if fit.L is fit.L_irreducible else [fit.L, fit.L_irreducible]
        for law in [*laws, fit.N_opt, fit.D_opt]:
            if law.refused:
                continue
            exponent = {"L": "alpha", "N_opt": "a", "D_opt": "b"}[law.quantity]
            interval = law.intervals.get(exponent)
            shown = f"[{interval[0]:.4f}, {interval[1]:.4f}]" if interval else "-"
            both = f"{fit.a_plus_b:.3f}" if law is fit.D_opt and fit.a_plus_b is not None else ""
            table.add_row(escape(name) if law is fit.L else "", law.text(unit), escape(shown), both, _held_out(law))
        if all(law.refused for law in (*laws, fit.N_opt, fit.D_opt)):
            table.add_row(escape(name), "[yellow]refused[/]", "", "", "")
        table.add_section()
    return table


def _held_out(law: Law) -> str:
    test = law.held_out
    if test is None:
        return ""
    if test.refused:
        return "[dim]no test[/]"
    return f"{test.mean_error:.2%} (max {test.max_error:.2%}) on {test.tested}"


def _surfaces(fits: dict[str, ParametricFit]) -> Table:
    table = _table("architecture", "E", "A", "B", "alpha", "beta", "a", "objective", "starts at optimum")
    for name, fit in fits.items():
        if fit.refused:
            continue
        values = [f"{fit.parameters[key]:.5g}" for key in ("E", "A", "B", "alpha", "beta", "a")]
        table.add_row(escape(name), *values, f"{fit.objective:.6e}", f"{fit.starts_at_optimum:,} of {fit.starts:,}")
        if fit.intervals:
            shown = [fit.intervals[key] for key in ("E", "A", "B", "alpha", "beta", "a")]
            table.add_row("[dim]95 %[/]", *(f"[dim]{low:.4g} to {high:.4g}[/]" for low, high in shown), "", "")
    return table


def _optima(fits: dict[str, IsoflopFit]) -> Table:
    table = _table("architecture", "C", "runs", "N_opt", "D_opt", "loss there", "")
    for name, fit in fits.items():
        for group in fit.groups:
            if group.inside:
                found = [f"{group.N_opt:.3e}", f"{group.D_opt:.3e}", f"{group.L_opt:.4f}", "[green]inside[/]"]
            else:
                found = ["-", "-", f"{group.L_lowest:.4f} observed", "[yellow]refused[/]"]
            first = escape(name) if group is fit.groups[0] else ""
            table.add_row(first, f"{group.C:.3e}", str(len(group.N)), *found)
        table.add_section()
    return table


def _under(console: Console, fits: dict[str, MethodFit]) -> None:
    schemes = {fit.bootstrap.scheme: fit.bootstrap for fit in fits.values() if fit.bootstrap.resamples}
    for scheme, made in schemes.items():
        console.print(f"  [dim]intervals: bootstrap of {scheme}; {made.resamples:,} resamples, seed {made.seed}[/]")
    for name, fit in fits.items():
        lines = [*fit.notes, *(f"{law.quantity}: {note}" for law in _all_laws(fit) for note in law.notes)]
        if fit.cost_ratio and not all(0.9 < end["ratio"] < 1.1 for end in fit.cost_ratio):
            low, high = fit.cost_ratio
            ends = [f"{end['ratio']:.2f} at {end['C']:.2g} FLOPs" for end in (low, high)]
            lines.append(f"6 N_opt D_opt / C goes from {ends[0]} to {ends[1]}")
        far = fit.extrapolation
        if far.get("irreducible") is not None and fit.L is not fit.L_irreducible:
            lines.append(
                f"at {far['C']:.2g} FLOPs: {far['pure']:.3f} without, {far['irreducible']:.3f} with a constant"
            )
        for line in dict.fromkeys(lines):
            console.print(f"  [dim]{escape(name)}: {escape(line)}[/]", highlight=False)


def _conventions(study: StudyFit) -> Table:
    table = _table("architecture", "N", "C", "alpha", "a", "b")
    for name, fit in study.items():
        for i, law in enumerate(fit.conventions):
            numbers = ["refused" if value is None else f"{value:.4f}" for value in (law.alpha, law.a, law.b)]
            table.add_row(escape(name) if i == 0 else "", law.count, law.flops, *numbers)
        table.add_section()
    return table


def _crossings(console: Console, study: StudyFit) -> None:
    met = [c for c in study.crossings if c.C is not None]
    if not study.crossings:
        return
    console.print()
    console.print(f"[bold]Where the laws of loss cross[/] ({study.headline})")
    for c in met:
        between = f" [{c.interval[0]:.2g}, {c.interval[1]:.2g}]" if c.interval else ""
        beyond = "" if c.inside else ", outside the data"
        console.print(
            f"  {escape(c.lower_below)} is lower below and {escape(c.lower_above)} above "
            f"{c.C:.3g} FLOPs{escape(between)}{beyond}",
            highlight=False,
        )
        for reason in c.refused:
            console.print(f"    [dim]{escape(reason)}[/]", highlight=False)
    for c in study.crossings:
        if c.C is None:
            line = f"{c.first} and {c.second}: {'; '.join(c.refused)}"
            console.print(f"  [dim]{escape(line)}[/]", highlight=False)


def _refusals(console: Console, study: StudyFit) -> None:
    refused: dict[str, list[str]] = {}
    for name, fit in study.items():
        for line in fit.refused:
            refused.setdefault(line, []).append(name)
    if not refused:
        return
    console.print()
    console.print("[bold yellow]Refused[/]")
    for line, names in refused.items():
        whose = "all" if len(names) == len(study) > 1 else ", ".join(names)
        console.print(f"  {escape(whose)}: {escape(line)}", highlight=False)


def _all_laws(fit: MethodFit) -> list[Law]:
    laws = [fit.L] if fit.L is fit.L_irreducible else [fit.L, fit.L_irreducible]
    return [*laws, fit.N_opt, fit.D_opt]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for column in columns:
        table.add_column(column)
    return table


def _unit_name(unit: str) -> str:
    return "FLOPs" if unit == "flops" else "PF-days (8.64e19 FLOPs)"
