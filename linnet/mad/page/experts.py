"""The shares of experts in routed layers, a part of the report of MAD scores."""

from html import escape

from linnet.mad.page.figures import Records, points, task_name
from linnet.mad.results import Result, dead
from linnet.report import shell, units

_APART = 'style="padding-left:14px"'
STRONGEST = 3.0  # times an even share at which a cell has its full colour


def chosen(records: Records) -> list[tuple[str, Result]]:
    """(architecture, run) of the runs that count and have routed layers: of each setting that of the first seed."""
    found = []
    for name, one in records.scores.items():
        for setting in one.settings.values():
            run = setting.best[min(setting.best)]
            if run.expert_shares:
                found.append((name, run))
    return found


def line(records: Records) -> str:
    """The headline as HTML, "" without experts."""
    runs = chosen(records)
    layers = [shares for _, run in runs for shares in run.expert_shares.values()]
    if not layers:
        return ""
    names = [
        f"{escape(name)}, {escape(run.setting)}, layer {escape(layer)}: {_numbers(dead(shares))}"
        for name, run in runs
        for layer, shares in run.expert_shares.items()
        if dead(shares)
    ]
    where = f"{units.plural(len(layers), 'layer')} with experts of the runs that count"
    if not names:
        return f"Every expert gets tokens, in the {where}."
    shown = "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "")
    return f"In <b>{len(names)}</b> of the {where}, one or more experts get next to no token ({shown})."


def table(records: Records) -> list[str]:
    """Returns a row per layer at the baselines (or the first setting that is there); [] without experts."""
    rows, most = [], 0
    seen: set[tuple[str, str]] = set()
    for name, run in chosen(records):
        if (name, run.task) in seen:
            continue
        seen.add((name, run.task))
        for layer, shares in run.expert_shares.items():
            most = max(most, len(shares))
            gone = _numbers(dead(shares))
            about = (shell.swatch(records.architectures, name), task_name(run.task), escape(layer))
            rows.append((about, shares, shell.Cell(gone or "none", f" {_APART}", "bad" if gone else "")))
    if not rows:
        return []
    experts = (f"#{number}" for number in range(1, most + 1))
    columns = ("Architecture", "Task", "Layer", *experts, shell.Cell("Without tokens", f" {_APART}"))
    none = shell.Cell("", kind="")
    cells = [
        (*about, *(_cell(share, len(shares)) for share in shares), *[none] * (most - len(shares)), end)
        for about, shares, end in rows
    ]
    caption = (
        "Where the tokens of the test split go, in per cent of their choices (12.5 is even among eight): of the run "
        "that counts at the baseline of each task. A layer is its block and its part. An expert "
        "that gets less than a hundredth of an even share is named as without tokens."
    )
    return ["<h2>Load of the experts</h2>", f'<p class="caption">{caption}</p>', shell.table("experts", columns, cells)]


def _numbers(experts: list[int]) -> str:
    """Returns the number of an expert, counted from 1."""
    return units.listed([str(expert + 1) for expert in experts])


def _cell(share: float, experts: int) -> shell.Cell:
    strength = min(1.0, share * experts / STRONGEST)
    colour = f"rgba(0, 114, 178, {0.55 * strength:.2f})"
    return shell.Cell(points(share), f' style="background:{colour};padding-left:10px" title="{share:.6g}"')
