"""The columns of a run table that laws read beyond N, D, C and loss: numbers, their problems, and what is missing."""

import numpy as np
import pandas as pd

from linnet.config import refuse

NUMBERS = {
    "attention_share": (0.0, 1.0),
    "state_fixed": (0.0, np.inf),
    "state_dynamic": (0.0, np.inf),
    "seq_len": (1.0, np.inf),
    "batch_tokens": (1.0, np.inf),
    "unique_tokens": (1.0, np.inf),
    "seed": (-np.inf, np.inf),
}
"""Column -> the range of its values. A column may be absent, and a cell may be empty."""


def read_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the table with `NUMBERS` as floats; empty cells and absent columns become NaN.

    Raises:
        ConfigError: lists every cell that is not a number in the range of its column.
    """
    table, problems = table.copy(), []
    for name, (low, high) in NUMBERS.items():
        if name not in table:
            table[name] = np.nan
            continue
        cells = table[name].astype(str).str.strip()
        blank = cells.str.lower().isin(("", "nan", "na", "null", "none"))
        values = pd.to_numeric(cells.where(~blank), errors="coerce")
        bad = ~blank & ~((values >= low) & (values <= high) & np.isfinite(values))
        if bad.any():
            lines = ", ".join(str(line) for line in table["line"][bad][:12]) if "line" in table else str(int(bad.sum()))
            limits = "a number" if high == np.inf and low < 0 else f"a number from {low:g} to {high:g}"
            fix = f"give {limits.replace(' to inf', ' up')}, or leave the cell empty"
            problems.append(f"{name}: {cells[bad].iloc[0]!r} in lines {lines}; {fix}")
        table[name] = values.astype(float)
    refuse(problems, "table")
    return table


def with_state(table: pd.DataFrame, context: int | None) -> pd.DataFrame:
    """Returns the table with a column `state`: numbers carried between tokens, with caches at `context` tokens.

    Without `context`, caches are those of the context of training.
    """
    scale = 1.0 if context is None else context / table["seq_len"]
    return table.assign(state=table["state_fixed"] + table["state_dynamic"] * scale)


def lacking(table: pd.DataFrame, *names: str) -> list[str]:
    """Returns a reason for each column that no row has."""
    fix = "studies of this release write it; in another table, add the column"
    return [f"no column {name}: {fix}" for name in names if not (name in table and table[name].notna().any())]
