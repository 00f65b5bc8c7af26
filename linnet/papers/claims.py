"""Claims: sentences about a table that can be false, and how they are decided.

    A < B < C on COLUMN             also <=, >, >=; A, B are rows of the item or numbers; COLUMN, COLUMN: on each
    ROW within 0.25 % on COLUMN     measured against printed; `every row` for ROW; plain numbers: column's unit
    A within 1 % of B on COLUMN     equal but for a margin

A comparison of two rows is decided by the 95 % interval of the mean difference over seeds, paired by seed (Student's
t). A claim of several comparisons holds if each of them does, and does not hold if one does not, so for the latter they
share the 5 %. Records without a seed are exact and compared as they are; those with an interval of their own (fits) are
compared by the intervals.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from linnet.laws.orders import LEVEL, t_interval

HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "cannot be told", "not run"
EVERY = "every row"
MOST = 4  # reasons shown; of comparisons with printed numbers, those that are furthest off come first


@dataclass(frozen=True)
class Claim:
    """A claim of an item.

    Attributes:
        text: as the item writes it.
        check: the sentence that is decided; "" if it is untested.
        kind: order, printed, equal or untested.
        rows: rows that it names, numbers and `every row` left out.
        columns: columns that it names.
        terms: rows or numbers of a comparison, in the order of the sentence.
        operators: `<`, `<=`, `>` or `>=` between the terms.
        margin: of `within`; a share if `relative`.
        untested: the reason why nothing decides it.
    """

    text: str
    check: str = ""
    kind: str = "untested"
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    terms: tuple[str | float, ...] = ()
    operators: tuple[str, ...] = ()
    margin: float = 0.0
    relative: bool = False
    untested: str = ""


@dataclass(frozen=True)
class Measured:
    """What was measured of one row and column.

    Attributes:
        values: seed -> value; the seed None is an exact value.
        interval: 95 % interval of the value, if the verb gives one.
        unsure: the value is fitted and has no interval, so it decides nothing.
    """

    values: Mapping[int | None, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    unsure: bool = False

    @property
    def exact(self) -> bool:
        return None in self.values and self.interval is None and not self.unsure

    @property
    def mean(self) -> float:
        return math.fsum(self.values.values()) / len(self.values)


Table = Mapping[tuple[str, str], Measured]
"""(row, column) -> what was measured."""


_OPERATOR = re.compile(r"\s(<=|<|>=|>)\s")
_MARGIN = re.compile(r"(.+?) within (\d+(?:\.\d+)?(?:e-?\d+)?)( ?%)?(?: of (.+))?")


def parse_claim(value: str | Mapping) -> Claim:
    """Returns a claim. Raises ValueError for a sentence that is none of the three forms.

    Args:
        value: a sentence, or {text, untested}, or {text, check} with the sentence in `check` and plain words in `text`.
    """
    if isinstance(value, Mapping):
        if "text" not in value or set(value) - {"text", "check", "untested"} or len(value) != 2:
            raise ValueError("a claim is a sentence, {text, check} or {text, untested}")
        if "untested" in value:
            return Claim(str(value["text"]), untested=str(value["untested"]))
        return _parse(str(value["check"]), str(value["text"]))
    return _parse(str(value), str(value))


def _parse(check: str, text: str) -> Claim:
    body, on, columns = " ".join(check.split()).rpartition(" on ")
    names = tuple(name.strip() for name in columns.split(","))
    if not on or not all(names):
        raise ValueError(f"{check!r}: does not end in `on COLUMN`")
    parts = _OPERATOR.split(body)
    if len(parts) > 1:
        terms = tuple(_term(part.strip()) for part in parts[::2])
        operators = tuple(parts[1::2])
        if len({operator[0] for operator in operators}) > 1:
            raise ValueError(f"{check!r}: mixes < and >; write two claims")
        rows = tuple(term for term in terms if isinstance(term, str))
        if not rows:
            raise ValueError(f"{check!r}: names no row")
        return Claim(text, check, "order", rows, names, terms, operators)
    if match := _MARGIN.fullmatch(body):
        relative = match[3] is not None
        margin = float(match[2]) / (100 if relative else 1)
        if match[4]:
            return Claim(text, check, "equal", (match[1], match[4]), names, margin=margin, relative=relative)
        rows = () if match[1] == EVERY else (match[1],)
        return Claim(text, check, "printed", rows, names, margin=margin, relative=relative)
    raise ValueError(
        f"{check!r}: neither `A < B on COLUMN`, `ROW within N % on COLUMN` nor `A within N % of B on COLUMN`"
    )


def _term(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim.

    Attributes:
        claim: its text.
        verdict: holds, does not hold, cannot be told or not run.
        reason: numbers that decide, or why nothing does.
    """

    claim: str
    verdict: str
    reason: str = ""


def judge(
    claim: Claim,
    table: Table,
    expected: Callable[[str, str], float | None],
    missing: Callable[[str, str], tuple[str, str]],
    printed_rows: tuple[str, ...] = (),
    text: Callable[[str, str], str | None] = lambda row, column: None,
    wrong: Callable[[str, str], str | None] = lambda row, column: None,
) -> Verdict:
    """Returns the verdict on a claim.

    Args:
        table: what was measured.
        expected: (row, column) -> printed number, corrected, or None.
        missing: (row, column) -> verdict and reason for a cell that was not measured: not run, or cannot be told if a
            run failed or a law was refused.
        printed_rows: rows that `every row` stands for, as far as they have a cell in the column.
        text: (row, column) -> what is printed there in place of a number, or None.
        wrong: (row, column) -> what is printed there if `expected` corrects it, or None.
    """
    if claim.kind == "untested":
        return Verdict(claim.text, NOT_RUN, claim.untested)
    findings: list[tuple[str, str, float]] = []
    rows = claim.rows or printed_rows
    share = LEVEL / len(claim.columns) / max(1, len(rows if claim.kind == "printed" else claim.operators))
    for column in claim.columns:
        if claim.kind == "order":
            pairs = zip(claim.terms, claim.operators, claim.terms[1:], strict=False)
            findings += [(*_order(a, op, b, column, table, missing, share), 0.0) for a, op, b in pairs]
        elif claim.kind == "equal":
            findings.append((*_equal(claim, column, table, missing, share), 0.0))
        else:
            for row in rows:
                if (cell := text(row, column)) is not None:
                    findings.append((UNDECIDED, f"{row}: {cell!r} is printed, which is not a number ({column})", 0.0))
                elif claim.rows or expected(row, column) is not None:
                    findings.append(_printed(claim, row, column, table, expected, missing, wrong, share))
    if not findings:
        return Verdict(claim.text, NOT_RUN, "no row of it has a printed number")
    for verdict in (FAILS, NOT_RUN, UNDECIDED, HOLDS):
        if reasons := [
            reason for outcome, reason, _ in sorted(findings, key=lambda finding: -finding[2]) if outcome == verdict
        ]:
            return Verdict(claim.text, verdict, _joined(list(dict.fromkeys(reasons))))
    raise AssertionError(findings)


def _joined(reasons: list[str]) -> str:
    more = f"; and {len(reasons) - MOST} more" if len(reasons) > MOST else ""
    return "; ".join(reasons[:MOST]) + more


def _order(a, operator: str, b, column: str, table: Table, missing, share: float) -> tuple[str, str]:
    """Returns the finding of one comparison; `share` is the level of a difference of the opposite sign."""
    for term in (a, b):
        if isinstance(term, str) and (term, column) not in table:
            return missing(term, column)
    first, second = (table[t, column] if isinstance(t, str) else Measured({None: t}) for t in (a, b))
    low, high = difference(second, first)
    below = difference(second, first, share)[1]
    if operator[0] == ">":
        low, high, below = -high, -low, -difference(second, first, share)[0]
    named = [term if isinstance(term, str) else f"{term:g}" for term in (a, b)]
    said = " - ".join(named[::-1] if operator[0] == "<" else named)
    reason = f"{said} = {_shown(low, high)} ({column})"
    if math.isnan(low):
        return UNDECIDED, _undecided(a, first, b, second, column)
    if low == high == 0 and not (first.exact and second.exact):
        return UNDECIDED, f"{a} and {b} are equal in every seed ({column})"
    if low == high and not (first.exact or second.exact):  # coarse scores of few seeds
        return UNDECIDED, f"{said} = {high:.4g} in every seed, which gives no interval ({column})"
    if low > 0 or (low >= 0 and operator.endswith("=")):
        return HOLDS, reason
    if below < 0 or (below <= 0 and not operator.endswith("=")):
        return FAILS, reason
    return UNDECIDED, reason


def _equal(claim: Claim, column: str, table: Table, missing, share: float) -> tuple[str, str]:
    a, b = claim.rows
    for row in (a, b):
        if (row, column) not in table:
            return missing(row, column)
    low, high = difference(table[a, column], table[b, column])
    least, most = difference(table[a, column], table[b, column], share)
    bound = claim.margin * (abs(table[b, column].mean) if claim.relative else 1)
    if math.isnan(low):
        return UNDECIDED, _undecided(a, table[a, column], b, table[b, column], column)
    reason = f"{a} - {b} = {_shown(low, high)}, margin {bound:.3g} ({column})"
    if -bound <= low and high <= bound:
        return HOLDS, reason
    return (FAILS if most < -bound or least > bound else UNDECIDED), reason


def _printed(
    claim: Claim, row: str, column: str, table: Table, expected, missing, wrong, share: float
) -> tuple[str, str, float]:
    if (row, column) not in table:
        return *missing(row, column), 0.0
    printed = expected(row, column)
    if printed is None:
        return NOT_RUN, f"{row} has no printed {column}", 0.0
    low, high = difference(table[row, column], Measured({None: printed}))
    least, most = difference(table[row, column], Measured({None: printed}), share)
    bound = claim.margin * (abs(printed) if claim.relative else 1)
    if math.isnan(low):  # one noisy value: its place is known, its interval is not
        return UNDECIDED, _undecided(row, table[row, column], "", Measured({None: printed}), column), 0.0
    mean = table[row, column].mean
    error = wrong(row, column)
    said = f"printed {printed:.6g}" if error is None else f"printed {error}, corrected to {printed:.6g}"
    reason, off = f"{row}: {mean:.6g}, {said} ({column})", abs(mean - printed) / (bound or 1.0)
    if -bound <= low and high <= bound:
        return HOLDS, reason, off
    return (FAILS if most < -bound or least > bound else UNDECIDED), reason, off


def difference(a: Measured, b: Measured, level: float = LEVEL) -> tuple[float, float]:
    """Returns the interval of a - b, of 95 %. NaN, NaN if one seed, or a fit without an interval, cannot give it.

    Intervals of fits are of 95 % whatever the level: that of the difference of two is wider than that.
    """
    if a.unsure or b.unsure:
        return math.nan, math.nan
    if a.interval is not None or b.interval is not None:
        (a_low, a_high), (b_low, b_high) = (_own_interval(measured) for measured in (a, b))
        return a_low - b_high, a_high - b_low
    if a.exact and b.exact:
        return a.mean - b.mean, a.mean - b.mean
    if a.exact or b.exact:
        noisy, fixed, sign = (b, a, -1) if a.exact else (a, b, 1)
        return t_interval([sign * (value - fixed.mean) for value in noisy.values.values()], level)
    seeds = [seed for seed in a.values if seed in b.values]
    return t_interval([a.values[seed] - b.values[seed] for seed in seeds], level)


def _own_interval(measured: Measured) -> tuple[float, float]:
    if measured.interval is not None:
        return measured.interval
    return (measured.mean, measured.mean) if measured.exact else t_interval(list(measured.values.values()))


def _shown(low: float, high: float) -> str:
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _undecided(a, first: Measured, b, second: Measured, column: str) -> str:
    """Says why two values have no interval of their difference."""
    both = ((str(a), first), (str(b), second))
    if fitted := [name for name, measured in both if measured.unsure]:
        return f"the fit gives no interval of {' and '.join(fitted)} ({column})"
    names = [name for name, measured in both if not measured.exact and len(measured.values) < 2]
    return f"one seed of {' and '.join(names) or f'{a} and {b} in common'} ({column}); give --seeds 0,1,2"
