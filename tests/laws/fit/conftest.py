"""Runs without noise from a known surface, so that the expected result of every method is known."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

SPREAD = np.linspace(-1, 1, 9)


@dataclass(frozen=True)
class Surface:
    """The surface L = E + A / N^alpha + B / D^beta with C = 6 N D."""

    E: float = 1.7
    A: float = 400.0
    B: float = 2000.0
    alpha: float = 0.34
    beta: float = 0.37

    @property
    def a(self) -> float:
        return self.beta / (self.alpha + self.beta)

    def loss(self, N, D):
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    def optimum(self, C):
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return G * (C / 6) ** self.a

    def ladder(self, budgets, spread=SPREAD, architecture="tnl") -> pd.DataFrame:
        """Returns runs of each budget with sizes at exp(spread) times the optimum."""
        rows = []
        for C in budgets:
            for step in np.exp(spread):
                N = self.optimum(C) * step
                D = C / (6 * N)
                row = {"N": N, "N_total": 1.1 * N, "D": D, "C": C, "loss": self.loss(N, D), "budget": C}
                rows.append({"run": f"{architecture}-{len(rows)}", "architecture": architecture, **row})
        return pd.DataFrame(rows)

    def curves(self, sizes, ratios=(0.2, 1000), points=120) -> pd.DataFrame:
        """Returns one training curve per size, from ratios[0] to ratios[1] tokens per parameter."""
        parts = []
        for N in sizes:
            D = np.geomspace(ratios[0] * N, ratios[1] * N, points)
            columns = {"N": N, "N_total": 1.1 * N, "D": D, "C": 6 * N * D, "loss": self.loss(N, D)}
            parts.append(pd.DataFrame({"run": f"{N:.4g}", "architecture": "tnl", **columns}))
        return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="session")
def surface() -> Surface:
    return Surface()


@pytest.fixture(scope="session")
def chinchilla(real_data):
    """240 of the digitised Chinchilla points, without the five of highest loss."""
    from linnet.laws.fit import filter_table, load_table

    path = real_data / "chinchilla" / "svg_extracted_data.csv"
    if not path.is_file():
        pytest.skip(f"no Chinchilla points at {path}")
    table, _ = load_table(path)
    return filter_table(table, max_loss=3.42)[0]
