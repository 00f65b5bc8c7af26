"""`linnet study --propose` and `--until`: further runs that narrow an interval, shown or trained."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from linnet.config import count_of
from linnet.laws.fit.results import ArchitectureFit, MethodFit
from linnet.options import WIDE, duration, make_table
from linnet.runs import RunFolder
from linnet.study.adaptive import MOST, Candidate, Limit, Proposal, propose
from linnet.study.collect import RUNS, load_study
from linnet.study.config import Point, StudyConfig, with_points
from linnet.study.design import Answer, Question
from linnet.study.executors import worker_slots
from linnet.study.ladder import Plan
from linnet.study.ladder import plan as make_plan
from linnet.study.progress import count
from linnet.study.runner import CACHE, run_study
from linnet.study.timing import StepCosts, seconds_of, step_costs

SHOWN = 8
"""Number of runs that `--propose` names when the question has no half-width."""
ROUND = 3
"""A round of `--until` trains the first third of the runs that are expected to be enough, then fits again."""


def show_proposals(plan: Plan, folder: Path, question: Question, console: Console) -> list[dict]:
    """Prints the runs that narrow the interval most per FLOP, and returns them as records."""
    proposals = _proposals(plan, folder, question, MOST if question.half_width else SHOWN)
    prices = _Prices(plan, step_costs(plan))
    for proposal in proposals:
        _say(console, _state(proposal, question))
        if proposal.runs and not proposal.reached:
            console.print(_table(proposal, prices))
            _say(console, f"together {prices.text(proposal.runs)}{_end(proposal)}")
    return [_record(proposal, prices) for proposal in proposals]


def narrow(
    settings: StudyConfig, own: list[Point], out: Path, question: Question, limit: Limit, console: Console
) -> tuple[Path, ...]:
    """Trains further runs of a study until an interval is reached, or the rest would cost more than the limit.

    Returns the folders of all runs of the study that failed.

    Args:
        settings: the study with the runs that earlier calls added, which are done.
        own: the points that its file has; the others count towards the limit.
    """
    folder, costs = out / settings.name, None
    failed: tuple[Path, ...] = ()
    while True:
        plan = make_plan(settings, check_data=False, cache=out / CACHE, root=folder / RUNS)
        costs = costs or step_costs(plan)
        prices = _Prices(plan, costs)
        missing = [run for run in plan.all_runs if not RunFolder(folder / RUNS / run.run).done]
        if missing:
            seconds = costs and {
                run.run: seconds_of(costs[run.architecture], run.steps, run.flops) for run in plan.all_runs
            }
            failed = run_study(settings, out, plan=plan, seconds=seconds, console=console).failed
        proposals = _proposals(plan, folder, question, MOST)
        for proposal in proposals:
            _say(console, _state(proposal, question))
        waiting = [proposal for proposal in proposals if not proposal.reached]
        waiting.sort(key=lambda proposal: proposal.flops)
        if not waiting:
            return failed
        left = prices.left(limit, [point for point in settings.points if point not in own])
        chosen: list[Candidate] = []
        for proposal in waiting:
            known = isinstance(proposal.now, Answer)
            if not proposal.runs or (known and not proposal.enough):
                _say(console, _not_enough(proposal, prices))
            elif not prices.within([*chosen, *proposal.runs], left):
                _say(console, _too_dear(proposal, question, prices, left, bool(chosen)))
            else:
                size = len(proposal.runs)
                if known:
                    size = min(size, max(prices.workers, math.ceil(size / ROUND)))
                chosen += proposal.runs[:size]
        if not chosen:
            return failed
        _say(console, f"training {prices.text(chosen)} more")
        settings = with_points(settings, [run.point for run in chosen])


class _Prices:
    """What runs cost: FLOPs, and time on this machine if it is known."""

    def __init__(self, plan: Plan, costs: StepCosts | None):
        self.plan, self.costs = plan, costs
        self.workers = worker_slots(plan.config.executor, plan.config.devices)

    def seconds(self, runs: Sequence[Candidate]) -> float | None:
        """Returns the seconds that runs take one after another on one worker."""
        if self.costs is None:
            return None
        return sum(seconds_of(self.costs[run.point.architecture], run.steps, run.flops) for run in runs)

    def text(self, runs: Sequence[Candidate]) -> str:
        """Returns the cost for people: `12 runs, 3.1e+11 FLOPs, about 2 min`."""
        seconds = self.seconds(runs)
        time = "" if seconds is None else f", about {duration(seconds / min(self.workers, max(len(runs), 1)))}"
        return f"{len(runs)} run{'s' * (len(runs) != 1)}, {sum(run.flops for run in runs):.3g} FLOPs{time}"

    def left(self, limit: Limit, added: Sequence[Point]) -> Limit:
        """Returns what is left of a limit after the points that were added before."""
        known = {(run.architecture, run.budget, run.size, run.seed): run for run in self.plan.runs}
        label = self.plan.config.label
        runs = [known[point.architecture, point.budget, label(point.size), point.seed] for point in added]
        seconds = 0.0
        if self.costs is not None:
            seconds = sum(seconds_of(self.costs[run.architecture], run.steps, run.flops) for run in runs)
        return Limit(limit.flops - sum(run.flops for run in runs), limit.seconds - seconds / self.workers)

    def within(self, runs: Sequence[Candidate], left: Limit) -> bool:
        seconds = self.seconds(runs)
        time = 0.0 if seconds is None else seconds / self.workers
        return sum(run.flops for run in runs) <= left.flops and time <= left.seconds


def _proposals(plan: Plan, folder: Path, question: Question, most: int) -> list[Proposal]:
    """Fits the finished runs of a study and returns the proposal for each architecture that is asked about."""
    from linnet.laws.fit import fit_study

    rows, _, _ = load_study(folder)
    proposals = []
    for name in [architecture.name for architecture in plan.config.architectures]:
        if question.architecture not in (None, name):
            continue
        part = rows[rows["architecture"] == name].reset_index(drop=True)
        methods: dict[str, MethodFit] = {}
        for method in ("isoflop", "parametric") if len(part) else ():
            methods |= fit_study(part, method=method, conventions=False)[name].methods
        proposals.append(propose(plan, ArchitectureFit(name, len(part), methods, "isoflop"), question, most))
    return proposals


def _state(proposal: Proposal, question: Question) -> str:
    """Returns one line: the estimate, its interval, and the wanted half-width."""
    now, name = proposal.now, proposal.architecture
    if isinstance(now, str):
        runs = f"; {count_of(len(proposal.runs), 'run')} would show more" if proposal.runs else ""
        return f"{name}: {question.quantity} has no interval yet ({now}){runs}"
    low, high = now.interval
    text = f"{name}: {question.quantity} = {now.value:.4g}, 95 % {low:.4g} to {high:.4g} ({now.method}), "
    text += f"+- {now.half_width:.2g}"
    if proposal.wanted is not None:
        text += f": {'reached' if proposal.reached else 'wanted'} +- {proposal.wanted:.2g}"
    return text


def _table(proposal: Proposal, prices: _Prices) -> Table:
    """Returns a table with a row per point; runs of one point that differ in the seed share a row."""
    columns = ("architecture", "#FLOPs", "#size", "#parameters", "#tokens", "#runs", "#time", "#expected +-")
    table = make_table(*columns, no_wrap=True, style=WIDE)
    groups: dict[tuple, list[int]] = {}
    for i, run in enumerate(proposal.runs):
        groups.setdefault((run.point.budget, prices.plan.config.label(run.point.size)), []).append(i)
    for (budget, size), members in sorted(groups.items(), key=lambda group: group[1][-1]):
        runs, last = [proposal.runs[i] for i in members], proposal.expected[members[-1]]
        seconds = prices.seconds(runs)
        table.add_row(
            proposal.architecture,
            f"{budget:.3g}",
            size,
            count(runs[0].params),
            count(runs[0].tokens),
            str(len(members)),
            "?" if seconds is None else duration(seconds),
            "?" if math.isnan(last) else f"{last:.2g}",
        )
    return table


def _end(proposal: Proposal) -> str:
    if isinstance(proposal.now, str):
        return ""
    end = f"; expected half-width with them: {proposal.expected[-1]:.2g}"
    short = proposal.wanted is not None and not proposal.enough
    return end + (f", still above the wanted {proposal.wanted:.2g}" if short else "")


def _not_enough(proposal: Proposal, prices: _Prices) -> str:
    if not proposal.runs:
        return f"{proposal.architecture}: no further run of this study's sizes and budgets would narrow the interval"
    cost, last = prices.text(proposal.runs), proposal.expected[-1]
    return f"{proposal.architecture}: priced out: even {cost}, are expected to give only +- {last:.2g}"


def _too_dear(proposal: Proposal, question: Question, prices: _Prices, left: Limit, others: bool) -> str:
    """Returns why a proposal is not trained: its whole cost, what is left to spend, and how far that would go."""
    rest = f"{left.flops:.3g} FLOPs" if math.isfinite(left.flops) else duration(left.seconds)
    goal = "an interval" if isinstance(proposal.now, str) else f"+- {proposal.wanted:.2g}"
    line = f"{proposal.architecture}: priced out: {goal} for {question.quantity} needs about "
    line += f"{prices.text(proposal.runs)}, but --at-most leaves {rest}"
    line += " beside the other architectures" if others else ""
    if isinstance(proposal.now, Answer):
        affordable = 0
        while affordable < len(proposal.runs) and prices.within(proposal.runs[: affordable + 1], left):
            affordable += 1
        if affordable:
            line += f", which is expected to give +- {proposal.expected[affordable - 1]:.2g}"
    return line


def _record(proposal: Proposal, prices: _Prices) -> dict:
    """Returns a proposal as plain values."""
    now = proposal.now
    estimate = {"refused": now} if isinstance(now, str) else {
        "value": now.value, "interval": list(now.interval), "half_width": now.half_width, "method": now.method
    }  # fmt: skip
    runs = [
        {
            **run.point.model_dump(mode="json", exclude_none=True),
            "params_non_embedding": run.params,
            "tokens": run.tokens,
            "flops": run.flops,
            "seconds": prices.seconds([run]),
            "expected_half_width": None if math.isnan(expected) else expected,
        }
        for run, expected in zip(proposal.runs, proposal.expected, strict=True)
    ]
    return {"architecture": proposal.architecture, **estimate, "wanted": proposal.wanted, "runs": runs}


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
