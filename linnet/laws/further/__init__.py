"""Further laws of a table of runs, each with intervals, a held-out test where it means something, and refusals.

    table, notes = load_table("runs.csv")
    laws, unsupported = fit_laws(table, ["gap", "state"])      -> [LawFit], {name: reasons}
    laws, unsupported = fit_laws(table, ["all"])               all that the table supports, and why not the others
    laws[0].estimates                                          [Estimate]: .name .of .value .interval .p .note .refused
    laws[0].tests, .predictions, .points, .to_json()

    allocation        a and b of N_opt and D_opt, and their differences between architectures
    joint             surfaces with shared or own E and exponents, and tests of them
    efficiency        compute that one architecture needs for the loss of another
    over-training     loss by compute and tokens per parameter (Gadre et al. 2024)
    gap               loss of sizes off the optimum at equal compute (paper 004)
    state             perplexity by size of state (paper 004)
    share             best share of attention (paper 004)
    topology          order of the blocks (paper 004)
    batch             shift of the optimum with the batch size (paper 004)
    data-constrained  value of repeated data (Muennighoff et al. 2023)

Needs only NumPy, SciPy and pandas (the extra `study`), not torch. docs/laws.md has the equations.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module

import pandas as pd

from linnet.config import count_of, nearest, refuse
from linnet.laws import ESTIMATES
from linnet.laws.fit import apply_convention
from linnet.laws.fit.table import COLUMNS_OF_LAWS, ends_of, read_numbers
from linnet.laws.further.base import Estimate, LawFit, Options, Prediction, Test, with_state
from linnet.laws.further.topology import TOPOLOGIES

LAWS: dict[str, Callable[[pd.DataFrame, Options], LawFit]] = {
    name: getattr(import_module(f"{__name__}.{module}"), f"fit_{module}")
    for name in ESTIMATES
    for module in [name.replace("-", "_")]
}

__all__ = ["ESTIMATES", "Estimate", "LAWS", "LawFit", "Options", "Prediction", "TOPOLOGIES", "Test", "fit_laws"]


def fit_laws(
    table: pd.DataFrame,
    names: Sequence[str],
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[LawFit], dict[str, list[str]]]:
    """Fits laws to a table.

    Args:
        table: from `linnet.laws.fit.load_table` or `linnet.study.collect.load_study`, with the columns of
            `linnet.study.collect` that the laws need. The last row of each run counts.
        names: keys of `LAWS`, or "all".
        options: see `Options`.
        progress: called with one line of text before each law.

    Returns:
        The laws in the order of `LAWS`, without those that "all" names and the table does not support; and these, each
        with its reasons. A law that is named itself is always in the list, refused or not.

    Raises:
        ConfigError: a name is unknown, or a cell of a column is not a number in its range.
    """
    options = options or Options()
    table = table.sort_values(["architecture", "C", "N", "D", "loss"])  # the order of a file must change nothing
    unknown = [
        f"law {name!r}: unknown; {nearest(name, [*LAWS, 'all'])}" for name in names if name not in (*LAWS, "all")
    ]
    if options.of not in ("loss", "perplexity"):
        unknown.append(f"of: {options.of!r} is unknown; use loss or perplexity")
    refuse(unknown, "fit")
    options = replace(options, shared={})
    refuse(read_numbers(table, COLUMNS_OF_LAWS), "table")
    # Rows of one training are not independent.
    ends = ends_of(apply_convention(table, options.count, options.flops)).reset_index(drop=True)
    rows, earlier = with_state(ends, options.context), len(table) - len(ends)
    left = f"{count_of(earlier, 'earlier row')} of the runs left out: the last one of each name and size counts"
    laws, unsupported = [], {}
    for name, fit in LAWS.items():
        if name not in names and "all" not in names:
            continue
        if progress:
            progress(name)
        law = replace(fit(rows, options), flops=options.flops, count=options.count)
        law.notes += [left] if earlier else []
        if law.refused and name not in names:
            unsupported[name] = law.refused
        else:
            laws.append(law)
    return laws, unsupported
