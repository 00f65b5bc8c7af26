"""A power law of compute with its intervals, its test beyond the data and the reasons where it is refused.

Every result of a fit has `to_json()`: dictionaries, lists, numbers and strings only (NaN and infinities become None).
What cannot be known is not a number: a refused law has `refused` filled with reasons in plain words and its numbers are
None. Compute C is in FLOPs, N in parameters, D in tokens, losses as in the table (nats a token in a study).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

PF_DAY = 8.64e19
"""FLOPs in one PFLOP-day, the unit in which the coefficients of paper 000, Table 3 make sense."""

Interval = tuple[float, float]
"""A 95 % percentile bootstrap interval (low, high)."""

NAMES = {"L": ("beta", "alpha", "E"), "N_opt": ("k_N", "a", "constant"), "D_opt": ("k_D", "b", "constant")}
"""Names of coefficient, exponent and constant of each law: L = E + beta C^alpha, N_opt = k_N C^a, D_opt = k_D C^b."""


class Result:
    """A serialisable result."""

    def to_json(self) -> dict:
        """Plain values: every public field, then the properties that a reader would otherwise have to compute."""
        return plain(self)


def plain(value):
    """Turns results, arrays and NumPy numbers into what `json.dumps` takes; NaN and infinities become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [f.name for f in dataclasses.fields(value) if f.repr]
        return {name: plain(getattr(value, name)) for name in [*shown, *getattr(value, "computed", ())]}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass
class HeldOut(Result):
    """How well a law fitted at C <= `c_max` predicts the losses above it.

    Attributes:
        c_max: FLOPs; rows or points above it were not seen by this fit.
        trained, tested: numbers of rows or points below and above.
        mean_error, max_error: of |predicted / observed - 1|, as fractions.
        rms_log_error: root mean square of log(predicted / observed).
        points: one a tested row: {"C", "loss", "predicted", "relative_error"}.
        refused: why there is no such test; then the numbers are None.
    """

    c_max: float | None = None
    trained: int = 0
    tested: int = 0
    mean_error: float | None = None
    max_error: float | None = None
    rms_log_error: float | None = None
    points: list[dict] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class Law(Result):
    """One power law of compute: quantity = constant + coefficient * C^exponent, C in FLOPs.

    Attributes:
        quantity: "L", "N_opt" or "D_opt".
        coefficient, exponent: None where refused. constant: the irreducible loss, None in a pure power law.
        c_min, c_max: the range of C of the points fitted. points: how many. rms_log_error: of the fit on them.
        intervals: 95 % by parameter name (see `parameters`); empty where there is no bootstrap.
        band: {"C", "value", "low", "high"} on a grid from `c_min` to 10 `c_max`, to be drawn; low and high are None
            without a bootstrap.
        held_out: the extrapolation test (only for losses).
        names: of coefficient, exponent and constant in `parameters` and `intervals`; `NAMES` where None.
        refused: reasons why there is no law. notes: what to know when reading it.
        draws: [resamples, 3] bootstrap draws of (log coefficient, exponent, constant or 0); not serialised.
    """

    quantity: str
    coefficient: float | None = None
    exponent: float | None = None
    constant: float | None = None
    c_min: float | None = None
    c_max: float | None = None
    points: int = 0
    rms_log_error: float | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)
    band: list[dict] = field(default_factory=list)
    held_out: HeldOut | None = None
    names: tuple[str, str, str] | None = None
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    draws: np.ndarray | None = field(default=None, repr=False, compare=False)

    computed = ("parameters", "coefficient_pf_days", "formula")

    @property
    def parameters(self) -> dict[str, float]:
        """By name: beta, alpha (and E) of L; k_N, a of N_opt; k_D, b of D_opt. Empty where refused."""
        if self.refused:
            return {}
        values = zip(self.names or NAMES[self.quantity], (self.coefficient, self.exponent, self.constant), strict=True)
        return {name: value for name, value in values if value is not None}

    @property
    def exponent_interval(self) -> Interval | None:
        """95 % of the exponent, whatever it is called here."""
        return self.intervals.get((self.names or NAMES[self.quantity])[1])

    @property
    def coefficient_pf_days(self) -> float | None:
        """The coefficient for C in PF-days (paper 000's Table 3): the value of the law's power term at 1 PF-day."""
        return None if self.refused else self.coefficient * PF_DAY**self.exponent

    @property
    def formula(self) -> str:
        """The law in words for people, C in FLOPs; "refused" where it is."""
        return self.text()

    def text(self, unit: str = "flops") -> str:
        """`L = 3.71 C^-0.0798`, with C in "flops" or "pf-days"."""
        if self.refused:
            return "refused"
        coefficient = self.coefficient if unit == "flops" else self.coefficient_pf_days
        constant = "" if self.constant is None else f"{self.constant:.4g} + "
        return f"{self.quantity} = {constant}{coefficient:.4g} C^{self.exponent:.4f}"

    def predict(self, compute) -> np.ndarray:
        """The law at `compute` (FLOPs, any shape). Raises ValueError where the law was refused."""
        if self.refused:
            raise ValueError(f"{self.quantity}(C) was refused: {'; '.join(self.refused)}")
        compute = np.asarray(compute, dtype=float)
        return np.exp(np.log(self.coefficient) + self.exponent * np.log(compute)) + (self.constant or 0.0)

    def interval_at(self, compute: float) -> Interval | None:
        """The 95 % interval of the law at `compute` FLOPs from the bootstrap draws, or None without them."""
        if self.refused or self.draws is None or not len(self.draws):
            return None
        values = np.exp(self.draws[:, 0] + self.draws[:, 1] * np.log(compute)) + self.draws[:, 2]
        low, high = np.percentile(values, [2.5, 97.5])
        return float(low), float(high)
