"""`linnet corpus verdicts`: what people decided about a sample, and whether the loop goes on."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from linnet.options import AsJson, echo_json, make_table, options


@options
def verdicts(
    file: Path,
    *,
    pass_rate: float = 0.9,
    as_json: AsJson = False,
) -> None:
    """Print pass rates with Wilson intervals by source, decile and stratum, and the decision: go or stop.

    Stop: the lower end of the interval of all documents reaches --pass-rate.
    Go: another round is needed, or more verdicts. Unsure documents are counted,
    but not in the rate.

    Example: [bold]linnet corpus verdicts verdicts.json --pass-rate 0.95[/]

    Args:
        file (VERDICTS.json): The file that the review page saved.
        pass_rate: Share of good documents that is asked for, from 0 to 1.
        as_json: Print one JSON object.
    """
    from linnet.config import ConfigError
    from linnet.corpus.scoring.verdicts import decide, read_verdicts

    if not 0 < pass_rate <= 1:
        raise ConfigError(
            [f"--pass-rate {pass_rate:g}: is not above 0 and at most 1; use 0.9, for example"], "verdicts"
        )
    decision = decide(read_verdicts(file), pass_rate)
    if as_json:
        echo_json(decision.to_dict(), ensure_ascii=False)
        return
    console = Console(soft_wrap=True)
    groups = {"by source": decision.sources, "by decile": decision.deciles, "by stratum": decision.strata}
    for title, rates in {"": [decision.total], **groups}.items():
        table = make_table(title, "#good", "#bad", "#unsure", "#not judged", "#pass rate", "#95 % interval")
        for one in rates:
            low, high = one.interval
            shown = ("-", "-") if one.rate is None else (f"{one.rate:.1%}", f"{low:.1%} to {high:.1%}")
            table.add_row(escape(one.name), *(f"{n:,}" for n in (one.good, one.bad, one.unsure, one.open)), *shown)
        console.print(table)
    console.print(f"[bold]{'stop' if decision.stop else 'go'}[/]: {decision.reason}", highlight=False)
