"""Results of the methods for one architecture and for a study; law.py has their common base."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from linnet.laws.fit.law import HeldOut, Interval, Law, Result, around, plain
from linnet.laws.fit.lse import Objective


@dataclass
class Bootstrap(Result):
    """How the intervals of a fit were made.

    Attributes:
        scheme: "pairs", "pairs, clustered by run", "weights of rows", "residuals of the parabolas", "residuals of the
            law", "residuals of the runs",
            "residuals of the parabolas, runs as clusters".
        resamples: number of resamples drawn.
        usable: number of resamples that gave a law. The intervals use only these.
        seed: seed of the generator.
        note: the reason if there are no intervals.
    """

    scheme: str = "none"
    resamples: int = 0
    usable: int = 0
    seed: int = 0
    note: str = ""

    def refuse(self, reason: str) -> None:
        """Records why there are no intervals."""
        self.note, self.usable = f"no interval: {reason}", 0


@dataclass
class MethodFit(Result):
    """The fit of one method to one architecture.

    Attributes:
        method: "power", "isoflop", "envelope" or "parametric".
        L, L_irreducible, N_opt, D_opt: the laws. Each may be refused with its own reasons while the others are kept.
        a_plus_b: exponent of N_opt plus exponent of D_opt; 1 if cost is exactly proportional to N D.
        cost_ratio: {"C", "ratio"} with ratio = 6 N_opt D_opt / C at both ends of the data. It shows whether the two
            laws, fitted separately, spend the budget C together.
        points: the points that L was fitted to, one per budget (or point of the envelope):
            {"C", "loss", "N", "D", "run", "inside", "fitted"}. `inside` is True if the point counted for N_opt and
            D_opt, `fitted` if it counted for L.
        extrapolation: {"C", "pure", "irreducible"}: both loss laws at ten times the largest C, to show how much the
            prediction depends on the form.
        bootstrap: how the intervals were made.
        refused: reasons why the whole method is refused; every law then repeats them.
        notes: remarks on the data and the fit.
    """

    method: str
    L: Law = field(default_factory=lambda: Law("L"))
    L_irreducible: Law = field(default_factory=lambda: Law("L"))
    N_opt: Law = field(default_factory=lambda: Law("N_opt"))
    D_opt: Law = field(default_factory=lambda: Law("D_opt"))
    a_plus_b: float | None = None
    cost_ratio: list[dict] = field(default_factory=list)
    points: list[dict] = field(default_factory=list)
    extrapolation: dict = field(default_factory=dict)
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    computed = ("parameters", "intervals")

    @property
    def parameters(self) -> dict[str, float]:
        """beta, alpha of the pure L(C); a, k_N, b, k_D. The parameters of refused laws are absent."""
        return {**self.L.parameters, **self.N_opt.parameters, **self.D_opt.parameters}

    @property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals of `parameters` by the same names."""
        return {**self.L.intervals, **self.N_opt.intervals, **self.D_opt.intervals}

    def refuse(self, reason: str, *names: str, points: int = 0) -> None:
        """Refuses some laws, which were found at `points` points; without names, all four and so the method."""
        if not names:
            self.refused.append(reason)
        for name in names or ("L", "L_irreducible", "N_opt", "D_opt"):
            setattr(self, name, Law(getattr(self, name).quantity, points=points, refused=[reason]))


@dataclass
class IsoflopGroup(Result):
    """The runs of one budget and the parabola fitted to their losses: loss = p[0] + p[1] x + p[2] x^2, x = log10 N.

    Attributes:
        C: geometric mean of the compute of the runs in FLOPs, used as the compute of the optimum.
        budget: planned or given FLOPs; None if the group was found by clustering.
        run, N, D, flops, loss: lists with one entry per run, in order of N; `counted` has the FLOPs in the convention
            of the fit.
        used: whether the parabola is fitted to the run; one entry per run.
        excluded: runs that the others contradict, left out of every fit: {"run", "N", "loss", "distance"}, the distance
            from the parabola of the other runs in standard deviations.
        window: "all" or, if sizes far from the lowest run are left out, "near the lowest run".
        parabola: (p0, p1, p2), or None.
        parabola_D: the parabola of the same losses in log10 D, or None.
        residual_sd: standard deviation of the losses about a parabola, from the other budgets; None if unknown.
        N_opt, L_opt: optimum of the parabola in log N, or None. A refused optimum keeps its numbers if they can be
            computed.
        D_opt: optimum of the parabola in log D, fitted apart; `D_check` if that parabola has none.
        D_check: tokens of N_opt at the cost of the runs beside it, as a check of D_opt.
        N_akima: N at the minimum of an Akima interpolation of log loss in log N, or None.
        N_interval, D_interval: 95 % intervals of N_opt and D_opt.
        N_lowest, L_lowest, run_lowest: the row of lowest loss, without excluded runs.
        inside: True if the optimum counts for N_opt(C).
        refused: reasons why the optimum does not count.
        notes: doubts that do not refuse the optimum.
    """

    C: float
    run: list[str]
    N: list[float]
    D: list[float]
    flops: list[float]
    loss: list[float]
    budget: float | None = None
    used: list[bool] = field(default_factory=list)
    excluded: list[dict] = field(default_factory=list)
    window: str = "all"
    counted: list[float] = field(default_factory=list)
    parabola: tuple[float, float, float] | None = None
    parabola_D: tuple[float, float, float] | None = None
    residual_sd: float | None = None
    N_opt: float | None = None
    D_opt: float | None = None
    L_opt: float | None = None
    D_check: float | None = None
    N_akima: float | None = None
    N_interval: Interval | None = None
    D_interval: Interval | None = None
    N_lowest: float | None = None
    L_lowest: float | None = None
    run_lowest: str | None = None
    inside: bool = False
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def at(self) -> float:
        """FLOPs by which texts name the budget: the planned ones, as in the plan of a study, else C."""
        return self.budget or self.C


@dataclass
class PowerFit(MethodFit):
    """L(C) fitted to the lowest loss of each budget, and N_opt and D_opt to the runs with these losses."""


@dataclass
class IsoflopFit(MethodFit):
    """Laws fitted to the optima of one parabola per budget (Hoffmann et al., Approach 2).

    Attributes:
        groups: one group per budget, in order of C.
        ungrouped: number of rows without a budget.
        D_check: D_opt(C) through `IsoflopGroup.D_check`: the cost of the runs instead of a second parabola.
        N_akima: N_opt(C) through `IsoflopGroup.N_akima`: interpolation instead of a parabola.
        N_cubic: N_opt(C) by cubics with one coefficient for all budgets. Beyond the data, the intervals of N_opt and
            D_opt have it inside.
        sensitivity: how the exponents move: {"window", "without", "a", "b", "budgets"} for every window with all
            budgets, and for the window of the fit without each budget. `without` is the budget left out, or None.
    """

    groups: list[IsoflopGroup] = field(default_factory=list)
    ungrouped: int = 0
    D_check: Law = field(default_factory=lambda: Law("D_opt"))
    N_akima: Law = field(default_factory=lambda: Law("N_opt"))
    N_cubic: Law = field(default_factory=lambda: Law("N_opt"))
    sensitivity: list[dict] = field(default_factory=list)


@dataclass
class EnvelopeFit(MethodFit):
    """Laws fitted to the lower envelope of training curves (Hoffmann et al., Approach 1; paper 000, section 4).

    Attributes:
        mode: "minimum" (lowest curve at each of many C) or "hull" (lower convex hull in log-log).
        hull_size: number of vertices of the lower convex hull of all kept points in log-log.
        curves: number of runs used.
        runs_on_envelope: number of runs that touch the envelope.
        warmup_removed: number of records dropped at the beginnings of the curves.
        decays: True if the learning rate of a run falls below half of its peak. Points in the middle of such a run have
            a higher loss than a run that ends there.
    """

    mode: str = "minimum"
    hull_size: int = 0
    curves: int = 0
    runs_on_envelope: int = 0
    warmup_removed: int = 0
    decays: bool = False


@dataclass
class ParametricFit(MethodFit):
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al., Approach 3, fitted as by Besiroglu et al.).

    `parameters` are E, A, B, alpha, beta and, unless the laws are refused, the exponents
    a = beta / (alpha + beta), b = alpha / (alpha + beta).
    N_opt, D_opt and L_irreducible follow from them in closed form with C = `flops_per_nd` N D.

    Attributes:
        surface: E, A, B, alpha, beta.
        surface_intervals: 95 % intervals of the surface's parameters.
        deviations: bootstrap standard deviations of the surface's parameters and of a.
        correlations: correlations of (log A, alpha) and (log B, beta) over the resamples.
        objective: sum of the Huber losses of the residuals.
        minimised: their threshold delta, and whether the residuals are raw losses rather than their logarithms.
        rows: number of rows fitted.
        starts: number of starts.
        starts_at_optimum: number of starts that ended within 1e-6 (relative) of the best objective.
        flops_per_nd: geometric mean of C / (N D) in the table.
        flops_per_nd_spread: largest C / (N D) over the smallest.
        budget_deviation: standard deviation of an error of log loss that the rows of a budget share, which intervals
            have too; 0 if none shows.
        held_out: held-out test of the surface.
        draws: [resamples, 5] bootstrap draws of (log A, log B, log E, alpha, beta); not serialised.
    """

    surface: dict[str, float] = field(default_factory=dict)
    surface_intervals: dict[str, Interval] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    correlations: dict[str, float] = field(default_factory=dict)
    objective: float | None = None
    minimised: Objective = Objective()
    rows: int = 0
    starts: int = 0
    starts_at_optimum: int = 0
    flops_per_nd: float = 6.0
    flops_per_nd_spread: float = 1.0
    budget_deviation: float = 0.0
    held_out: HeldOut | None = None
    draws: np.ndarray | None = field(default=None, repr=False, compare=False)

    def predict(self, N, D) -> np.ndarray:
        """Returns the loss of the surface at N parameters and D tokens. Raises ValueError if it was refused."""
        if not self.surface:
            raise ValueError(f"L(N, D) was refused: {'; '.join(self.refused)}")
        E, A, B, alpha, beta = (self.surface[name] for name in ("E", "A", "B", "alpha", "beta"))
        return E + A / np.asarray(N, dtype=float) ** alpha + B / np.asarray(D, dtype=float) ** beta

    def interval_at(self, N: float, D: float) -> Interval | None:
        """Returns the 95 % interval of the loss at N parameters and D tokens, or None without bootstrap draws."""
        if self.draws is None:
            return None
        log_A, log_B, log_E, alpha, beta = self.draws.T
        values = np.exp(log_E) + np.exp(log_A - alpha * np.log(N)) + np.exp(log_B - beta * np.log(D))
        return around(float(self.predict(N, D)), values)

    @property
    def parameters(self) -> dict[str, float]:
        """E, A, B, alpha, beta, a, b."""
        if not self.surface:
            return {}
        exponents = {law.exponent for law in (self.N_opt, self.D_opt)} - {None}
        named = {"a": self.N_opt.exponent, "b": self.D_opt.exponent} if exponents else {}
        return {**self.surface, **named}

    @property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals of `parameters` by the same names."""
        named = {name: law.intervals[name] for name, law in (("a", self.N_opt), ("b", self.D_opt)) if law.intervals}
        return {**self.surface_intervals, **named}


@dataclass
class Convention(Result):
    """Exponents of one method under another way of counting (without intervals).

    Attributes:
        count: "non-embedding" or "total".
        flops: one of `linnet.laws.fit.table.FLOPS`.
        method: the headline method.
        alpha: exponent of L(C); None if refused.
        a, b: exponents of N_opt and D_opt; None if refused.
        refused: reasons why N_opt is refused.
    """

    count: str
    flops: str
    method: str
    alpha: float | None = None
    a: float | None = None
    b: float | None = None
    refused: list[str] = field(default_factory=list)


@dataclass
class Candidate(Result):
    """A method and a form of L(C) that could be the headline, and how well they predict the largest budgets.

    Attributes:
        method: "power", "isoflop", "envelope" or "parametric".
        form: "pure" for L = beta C^alpha, "constant" for L = E + beta C^alpha.
        error: mean of |predicted / target - 1| over the held-out budgets of `architectures`; None if not tested.
        tested: number of held-out budgets, over all these architectures.
        architectures: those on which every candidate was tested.
        chosen: whether it is the headline.
    """

    method: str
    form: str
    error: float | None = None
    tested: int = 0
    architectures: list[str] = field(default_factory=list)
    chosen: bool = False


@dataclass
class ArchitectureFit(Result):
    """All fits of one architecture.

    Attributes:
        architecture: name of the architecture.
        rows: number of rows used from the table.
        methods: method name -> fit, for the requested methods (power, isoflop, envelope, parametric).
        headline: the method that summaries show. It is the same for all architectures of a study.
        allocation: the method of `N_opt` and `D_opt`, the same for all architectures; "" means the headline.
        form: the form of L(C) that summaries show, "pure" or "constant"; the same for all architectures of a study.
        budgets: number of budgets, or of points of the largest compute, that the held-out tests could use.
        tests: method -> form -> held-out test of L(C) on the targets that all methods share
            (`linnet.laws.fit.selection`). `Law.held_out` is the test of a method on its own points.
        conventions: exponents of the headline method under each way of counting that the table allows.
        notes: dropped rows and the reasons.
    """

    architecture: str
    rows: int
    methods: dict[str, MethodFit]
    headline: str
    form: str = "pure"
    allocation: str = ""
    budgets: int = 0
    tests: dict[str, dict[str, HeldOut]] = field(default_factory=dict)
    conventions: list[Convention] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    computed = ("refused",)

    @property
    def best(self) -> MethodFit:
        """The fit of the headline method."""
        return self.methods[self.headline]

    @property
    def L(self) -> Law:
        """L(C) of the headline method in the chosen form; pure if the form with a constant was refused."""
        return law_of_form(self.best, self.form)

    @property
    def other_L(self) -> Law | None:
        """L(C) of the headline method in the other form; None if the method has one form only, or refused it."""
        other = self.best.L if self.L is self.best.L_irreducible else self.best.L_irreducible
        return None if other is self.L or other.coefficient is None else other

    @property
    def L_irreducible(self) -> Law:
        return self.best.L_irreducible

    @property
    def held_out(self) -> HeldOut | None:
        """The held-out test of `L` that all methods share; if there is none, that on the method's own points."""
        tests = self.tests.get(self.headline, {})
        form = "constant" if self.L.constant is not None else "pure"
        test = tests.get(form)
        return test if test is not None and not test.refused else self.L.held_out

    @property
    def sizes(self) -> MethodFit:
        """The fit of the method of N_opt and D_opt, which is chosen apart from that of L(C)."""
        return self.methods[self.allocation or self.headline]

    @property
    def N_opt(self) -> Law:
        return self.sizes.N_opt

    @property
    def D_opt(self) -> Law:
        return self.sizes.D_opt

    @property
    def isoflop(self) -> IsoflopFit | None:
        return self.methods.get("isoflop")

    @property
    def envelope(self) -> EnvelopeFit | None:
        return self.methods.get("envelope")

    @property
    def parametric(self) -> ParametricFit | None:
        return self.methods.get("parametric")

    @property
    def power(self) -> PowerFit | None:
        return self.methods.get("power")

    @property
    def refused(self) -> list[str]:
        """All refusals, one line each: "isoflop N_opt and D_opt: ...", "isoflop at 1e+18 FLOPs: ..."."""
        lines = []
        for name, fit in self.methods.items():
            what: dict[str, list[str]] = {}
            for reason in fit.refused:
                what[reason] = []
            laws = {id(law): law for law in (fit.L, fit.L_irreducible, fit.N_opt, fit.D_opt)}  # a surface has one L
            for law in () if fit.refused else laws.values():
                shown = "L with a constant" if law is fit.L_irreducible and law is not fit.L else law.quantity
                for reason in law.refused:
                    what.setdefault(reason, []).append(shown)
            lines += [" ".join([name, " and ".join(whose)]).strip() + f": {reason}" for reason, whose in what.items()]
            where: dict[str, list[str]] = {}
            for group in getattr(fit, "groups", ()):
                for reason in group.refused:
                    where.setdefault(reason, []).append(f"{group.at:.3g}")
            lines += [f"{name} at {', '.join(budgets)} FLOPs: {reason}" for reason, budgets in where.items()]
        return lines


def law_of_form(fit: MethodFit, form: str) -> Law:
    """Returns L(C) of a method in a form, "pure" or "constant"; pure if the form with a constant was refused."""
    return fit.L_irreducible if form == "constant" and not fit.L_irreducible.refused else fit.L


@dataclass
class Crossing(Result):
    """Where the loss laws of two architectures meet.

    Attributes:
        first, second: names of the architectures.
        C: FLOPs at the crossing of the headline laws, or None; outside the data of both only with an interval.
        interval: 95 % interval of C, from independent bootstrap draws of both laws.
        form, other_form: form of the headline laws, and the form of `other_C`; None without another form.
        other_C: FLOPs at the crossing of the laws of the other form, or None.
        other_inside: True if other_C is in the range of the data of both.
        lower_below, lower_above: name of the architecture with the lower loss below and above C; None if the slopes of
            the laws cannot be told apart (`linnet.laws.orders`).
        inside: True if C is in the range of the data of both.
        refused: reasons why there is no crossing or no interval.
    """

    first: str
    second: str
    C: float | None = None
    interval: Interval | None = None
    form: str = "pure"
    other_form: str | None = None
    other_C: float | None = None
    other_inside: bool = False
    lower_below: str | None = None
    lower_above: str | None = None
    inside: bool = False
    refused: list[str] = field(default_factory=list)


@dataclass
class StudyFit(Result, Mapping):
    """The fits of all architectures of a table: a mapping from architecture name to `ArchitectureFit`.

    Attributes:
        architectures: name -> fit, in the order of the table.
        headline: the method that summaries show for all architectures.
        form: the form of L(C) that they show.
        allocation: the method of the N_opt and D_opt that they show.
        candidates: the methods and forms that could be the headline, with their held-out errors.
        count, flops: the counting convention.
        crossings: one entry per pair of architectures.
        columns: name in the laws (N, D, C, loss) -> column of the table that it is.
        dropped: runs left out by request: {"run", "architecture", "loss", "reason"}. `excluded` also has those that
            the fits left out.
        notes: rows dropped from the table before fitting.
    """

    architectures: dict[str, ArchitectureFit]
    headline: str
    form: str = "pure"
    allocation: str = ""
    candidates: list[Candidate] = field(default_factory=list)
    count: str = "non-embedding"
    flops: str = "exact"
    crossings: list[Crossing] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)
    dropped: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    computed = ("excluded",)

    def to_json(self) -> dict:
        """Returns every field as plain values. The architectures are in order of their names, not of the table."""
        values = plain(self)
        return {**values, "architectures": dict(sorted(values["architectures"].items()))}

    @property
    def excluded(self) -> list[dict]:
        """Runs left out by request or by the parabolas: {"run", "architecture", "loss", "reason"}."""
        rows = list(self.dropped)
        for name, fit in sorted(self.architectures.items()):
            for group in fit.isoflop.groups if fit.isoflop is not None else ():
                for row in group.excluded:
                    far = f"{row['distance']:.0f} standard deviations from the parabola of the other runs"
                    reason = f"isoflop at {group.at:.3g} FLOPs: {far}"
                    rows.append({"run": row["run"], "architecture": name, "loss": row["loss"], "reason": reason})
        return rows

    @property
    def closest(self) -> Candidate | None:
        """The candidate of lowest held-out error, if it is not the headline: then it wins by less than the noise."""
        known = [candidate for candidate in self.candidates if candidate.error is not None]
        chosen = [candidate for candidate in known if candidate.chosen]
        best, lowest = (min(part, key=lambda c: c.error, default=None) for part in (chosen, known))
        exact = 1e-6  # errors of data without noise are rounding
        return None if best is None or lowest is None or lowest.error > best.error - exact else lowest

    @property
    def apart(self) -> str:
        """Of which method N_opt and D_opt are, if not of the headline, and why; "" if they are."""
        if self.allocation in ("", self.headline):
            return ""
        counts = [
            sum(not fit.methods[method].N_opt.refused for fit in self.architectures.values())
            for method in (self.allocation, self.headline)
        ]
        why = f"which gives them for {counts[0]} of {len(self)} architectures, {self.headline} for {counts[1]}"
        if self.headline == "power":
            why = "because the size of the lowest loss among a few scatters more"
        return f"N_opt and D_opt come from the method {self.allocation}, {why}"

    @property
    def compares(self) -> bool:
        """Whether each architecture has one size at one budget: a comparison of models, without any law."""
        groups = [fit.isoflop.groups if fit.isoflop is not None else [] for fit in self.architectures.values()]
        return all(len(budgets) == 1 and len(set(budgets[0].N)) == 1 for budgets in groups)

    def __getitem__(self, name: str) -> ArchitectureFit:
        return self.architectures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.architectures)

    def __len__(self) -> int:
        return len(self.architectures)
