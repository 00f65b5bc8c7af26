"""Best learning rates by width: the parabola of a sweep, the law through several widths, and rates.yaml.

In a sweep of one architecture and width, the loss is a parabola in log2 of the rate, with the same shape for all seeds
and a constant of its own for each seed. Its vertex is the best rate r*. The law is ln r*(d) = ln a + b ln d, fitted to
the vertices with the inverse of their variances as weights. Variances are those of least squares (the delta method for
a vertex), with one residual variance for all widths of an architecture; intervals are those of Student's t.

Losses rise faster above the best rate than below it, and then every vertex lies too low, or too high, by an amount that
depends on the place of the rates. So each interval has that of cubics too, whose third coefficient all widths share, as
far as the losses support it: an end goes the share 1 - 1 / F of the way to the cubics', with F the squares that the
coefficient explains over the residual variance. `tests/study/test_rates.py` checks the coverage by simulation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field

from linnet.config import Config, ConfigError, nearest, parse, read_yaml
from linnet.study.collect import TABLE, read_table

TUNE = "tune"  # folder of the runs of a tuning, inside that of a study
WIDEST = 4.0  # a width that is more than so many times the widest tuned one gets a warning
FEWEST = 5  # rates of a parabola
FLOOR = 1e-16  # of a residual variance: losses are float32
LACK_OF_FIT = 0.05  # a power law that the vertices contradict at this level gets the wider interval of their scatter

Losses = Mapping[float, Mapping[int, float]]
"""Rate -> seed -> loss; not finite where the training diverged."""


@dataclass(frozen=True)
class Vertex:
    """The best rate of one architecture at one width.

    Attributes:
        rate: the vertex; None if it is refused.
        refused: why, or "".
        side: -1 or 1 if the sweep must be extended to lower or higher rates, else 0.
        loss: loss at the vertex, or the lowest mean loss.
        coefficients: of the mean loss over seeds, in powers of log2(rate) - centre.
        rows: the (log2 rate, seed, loss) in the parabola.
        rss, freedom: residual sum of squares of the fit, and its degrees of freedom.
        shape: variance of log2 of the vertex in units of the residual variance.
    """

    rate: float | None
    refused: str = ""
    side: int = 0
    loss: float = math.nan
    centre: float = 0.0
    coefficients: tuple[float, float, float] = (0.0, 0.0, 0.0)
    rows: tuple[tuple[float, int, float], ...] = ()
    rss: float = 0.0
    freedom: int = 0
    shape: float = math.nan


def find_vertex(losses: Losses) -> Vertex:
    """Returns the best rate of a sweep of rates a factor 2 apart.

    The parabola goes through the `FEWEST` rates around the one with the lowest mean loss. It is refused if that one is
    at the edge of the sweep.
    """
    rates = sorted(losses)
    means = [float(np.mean(list(losses[rate].values()))) for rate in rates]
    good = [rate for rate, mean in zip(rates, means, strict=True) if math.isfinite(mean)]
    if not good:
        return Vertex(None, "no rate of the sweep trains without diverging", -1)
    best = min(good, key=lambda rate: means[rates.index(rate)])
    lowest = means[rates.index(best)]
    if best == rates[0]:
        return Vertex(None, f"the lowest loss is at the lowest rate, {best:.3g}", -1, lowest)
    if best == rates[-1]:
        return Vertex(None, f"the lowest loss is at the highest rate, {best:.3g}", 1, lowest)
    if len(good) < FEWEST:
        return Vertex(None, f"only {len(good)} rates train without diverging; {FEWEST} are needed", -1, lowest)
    if best == good[-1]:
        return Vertex(None, f"the lowest loss is at {best:.3g}, and the next higher rate diverges", 0, lowest)
    at = good.index(best)
    first = min(max(0, at - FEWEST // 2), len(good) - FEWEST)
    window = good[first : first + FEWEST]
    rows = [(math.log2(rate), seed, loss) for rate in window for seed, loss in losses[rate].items()]
    seeds = sorted({seed for _, seed, _ in rows})
    x = np.array([row[0] for row in rows])
    y = np.array([row[2] for row in rows])
    centre = float(x.mean())
    indicators = [[float(seed == other) for other in seeds] for _, seed, _ in rows]
    columns = np.column_stack([np.array(indicators), x - centre, (x - centre) ** 2])
    q, r = np.linalg.qr(columns)
    solution = np.linalg.solve(r, q.T @ y)
    c0, (c1, c2) = float(solution[: len(seeds)].mean()), solution[len(seeds) :]
    if c2 <= 0 or not window[0] < (rate := 2.0 ** (centre - c1 / (2 * c2))) < window[-1]:
        side = -1 if at < FEWEST // 2 else 1 if at >= len(good) - FEWEST // 2 and good[-1] == rates[-1] else 0
        return Vertex(None, "the parabola has no minimum between the rates", side, lowest)
    inverse = np.linalg.inv(r)
    covariance = (inverse @ inverse.T)[len(seeds) :, len(seeds) :]
    gradient = np.array([-1 / (2 * c2), c1 / (2 * c2**2)])
    return Vertex(
        rate=float(rate),
        loss=c0 - c1**2 / (4 * c2),
        centre=centre,
        coefficients=(c0, float(c1), float(c2)),
        rows=tuple(rows),
        rss=float(((y - columns @ solution) ** 2).sum()),
        freedom=len(y) - columns.shape[1],
        shape=float(gradient @ covariance @ gradient),
    )


def read_vertices(folder: Path) -> dict[str, dict[int, Vertex]]:
    """Returns architecture -> width -> the best rate, from the table of a tuning folder.

    Raises:
        ConfigError: the table is cut off.
    """
    losses: dict[str, dict[int, dict[float, dict[int, float]]]] = {}
    for row in read_table(folder / TABLE, "linnet study tune"):
        if row["status"] not in ("done", "diverged"):
            continue
        loss = float(row["loss"]) if row["loss"] and row["status"] == "done" else math.inf
        width, rate, seed = int(row["d_model"]), float(row["learning_rate"]), int(row["seed"])
        losses.setdefault(row["architecture"], {}).setdefault(width, {}).setdefault(rate, {})[seed] = loss
    return {name: {width: find_vertex(sweep) for width, sweep in widths.items()} for name, widths in losses.items()}


class TunedWidth(Config):
    """The best rate at one width, with a 95 % interval, and the loss there."""

    rate: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0, allow_inf_nan=True)
    loss: float


class TunedRate(Config):
    """The law rate(d) = a d^b of one architecture.

    Attributes:
        b_low, b_high: 95 % interval of b.
        fits: whether the widths agree with a power law; if not, the interval is that of their scatter.
        target: what each run spent, for readers.
    """

    a: float = Field(gt=0)
    b: float
    b_low: float = Field(allow_inf_nan=True)
    b_high: float = Field(allow_inf_nan=True)
    fits: bool = True
    target: str = ""
    widths: dict[int, TunedWidth] = Field(min_length=2)

    def at(self, d_model: int) -> float:
        """Returns the rate at a width, rounded to 4 digits."""
        return float(f"{self.a * d_model**self.b:.4g}")

    @property
    def widest(self) -> int:
        return max(self.widths)


class Rates(Config):
    """The content of rates.yaml.

    Attributes:
        study: name of the study that was tuned.
        target: what each run spent, in files that were written before each law had its own.
    """

    study: str = ""
    target: str = ""
    architectures: dict[str, TunedRate] = Field(min_length=1)

    def of(self, name: str) -> TunedRate:
        """Returns the law of an architecture. Raises ValueError: it was not tuned."""
        if name not in self.architectures:
            raise ValueError(f"has no rates of {name}; {nearest(name, self.architectures)}")
        return self.architectures[name]


def fit_rates(vertices: Mapping[int, Vertex]) -> TunedRate | None:
    """Returns the law through the vertices of several widths; None for fewer than two vertices."""
    from scipy import stats

    optima = {width: vertex for width, vertex in sorted(vertices.items()) if vertex.rate is not None}
    if len(optima) < 2:
        return None
    freedom = sum(vertex.freedom for vertex in optima.values())
    noise = sum(vertex.rss for vertex in optima.values()) / freedom
    y = np.log(np.array([vertex.rate for vertex in optima.values()], dtype=float))
    variance = np.array([vertex.shape for vertex in optima.values()]) * max(noise, FLOOR) * math.log(2) ** 2
    x = np.log(list(optima))
    columns = np.column_stack([np.ones_like(x), x])
    inverse = np.linalg.inv(columns.T @ (columns / variance[:, None]))
    ln_a, b = inverse @ columns.T @ (y / variance)
    reach, fits = float(stats.t.ppf(0.975, freedom)), True
    scale, left = 1.0, len(optima) - 2
    if left:
        scatter = float((((y - ln_a - b * x) ** 2) / variance).sum()) / left
        fits = bool(stats.f.sf(scatter, left, freedom) >= LACK_OF_FIT)
        if not fits:
            scale, reach = scatter, float(stats.t.ppf(0.975, left))
    half = reach * math.sqrt(scale * inverse[1, 1])
    margins = float(stats.t.ppf(0.975, freedom)) * np.sqrt(variance)
    b_ends = np.array([b - half, b + half])
    ends = np.stack([y - margins, y + margins])
    if (cubics := _cubics(list(optima.values()))) is not None:
        share, moved, covariance = cubics
        reach = float(stats.t.ppf(0.975, freedom - 1))
        slopes = (inverse @ (columns / variance[:, None]).T)[1]  # b as a sum of the vertices
        half = reach * math.sqrt(max(float(slopes @ covariance @ slopes), 0.0))
        margins = reach * np.sqrt(np.diag(covariance))
        b_ends = _towards(b_ends, slopes @ moved + np.array([-half, half]), share)
        ends = _towards(ends, np.stack([moved - margins, moved + margins]), share)
    lows, highs = np.exp(ends)
    widths = {
        width: TunedWidth(
            rate=float(f"{vertex.rate:.4g}"),
            low=float(f"{low:.4g}"),
            high=float(f"{high:.4g}"),
            loss=round(vertex.loss, 5),
        )
        for (width, vertex), low, high in zip(optima.items(), lows, highs, strict=True)
        if vertex.rate is not None
    }
    low, high = map(float, b_ends)
    return TunedRate(a=float(np.exp(ln_a)), b=float(b), b_low=low, b_high=high, fits=fits, widths=widths)


def _towards(ends: np.ndarray, others: np.ndarray, share: float) -> np.ndarray:
    """Returns the ends [2, ...] of intervals, moved outwards by a share of the way to those of others."""
    low = ends[0] + share * np.minimum(0.0, others[0] - ends[0])
    high = ends[1] + share * np.maximum(0.0, others[1] - ends[1])
    return np.stack([low, high])


def _cubics(vertices: Sequence[Vertex]) -> tuple[float, np.ndarray, np.ndarray] | None:
    """Returns the minima of cubics through the sweeps of several widths, with one third coefficient for all widths.

    Returns:
        the share by which intervals follow them, the log of their rates [W], and the covariance of these [W, W]; None
        if the losses do not support a third coefficient. A cubic without a minimum inside its rates has it at the rate
        that is the nearest to it.
    """
    parts, square, product, left, freedom = [], 0.0, 0.0, 0.0, -1
    for vertex in vertices:
        u = np.array([row[0] for row in vertex.rows]) - vertex.centre
        seed, y = np.array([row[1] for row in vertex.rows]), np.array([row[2] for row in vertex.rows])
        q, r = np.linalg.qr(np.column_stack([*(seed == number for number in np.unique(seed)), u, u**2]).astype(float))
        inverse, third = np.linalg.inv(r)[-2:], u**3 - q @ (q.T @ u**3)
        parts.append((inverse @ inverse.T, inverse @ (q.T @ u**3), float(np.abs(u).max())))
        square, product = square + float(third @ third), product + float(third @ y)
        left, freedom = left + vertex.rss, freedom + vertex.freedom
    c3 = product / square
    noise = max((left - c3 * product) / freedom, FLOOR)
    if c3 * product <= noise:
        return None
    minima, shares, noises = [], [], []
    for vertex, (covariance, cubed, most) in zip(vertices, parts, strict=True):
        bend = vertex.coefficients[2]
        c1, c2 = np.array(vertex.coefficients[1:]) - c3 * cubed
        root = math.sqrt(max(c2**2 - 3 * c3 * c1, 0.0))
        minimum = min(max(-c1 / (c2 + root), -most), most) if c2 + root > 0 else math.copysign(most, -c1)
        at, curve = np.array([1, 2 * minimum]), max(2 * c2 + 6 * c3 * minimum, bend)
        minima.append(minimum + vertex.centre)
        noises.append(float(at @ covariance @ at) / curve**2)
        shares.append((at @ cubed - 3 * minimum**2) / curve)
    covariance = noise * (np.diag(noises) + np.outer(shares, shares) / square)
    return 1 - noise / (c3 * product), math.log(2) * np.array(minima), math.log(2) ** 2 * covariance


def write_rates(rates: Rates, path: str | Path) -> None:
    """Writes rates.yaml atomically."""
    from linnet.runs.files import write_atomic

    text = "# Best learning rates by width: rate(d) = a d^b. Written by linnet study tune.\n"
    write_atomic(Path(path), text + yaml.safe_dump(rates.model_dump(exclude={"target"}), sort_keys=False))


def read_rates(path: str | Path) -> Rates:
    """Returns the content of rates.yaml. Raises ConfigError that names the file if it is missing or wrong."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError([f"learning_rate.from: the file {path} does not exist; linnet study tune writes it"], "study")
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> Rates:
    values: dict[str, Any] = read_yaml(path)
    return parse(Rates, values, str(path))


def reach(rates: Rates, name: str, widths: Sequence[int]) -> tuple[str, bool]:
    """Returns how far the widths of an architecture lie from its tuned ones, and whether any is beyond `WIDEST`."""
    tuned = rates.of(name)
    outside = {width: width / tuned.widest for width in widths if width > tuned.widest}
    outside |= {width: min(tuned.widths) / width for width in widths if width < min(tuned.widths)}
    text = f"{name} tuned at widths {min(tuned.widths)} to {tuned.widest}"
    if not outside:
        return f"{text}, which hold all of its sizes", False
    far = [f"{width} ({factor:.3g} x)" for width, factor in sorted(outside.items())]
    return f"{text}; extrapolated to {', '.join(far)}", any(width > WIDEST * tuned.widest for width in outside)
