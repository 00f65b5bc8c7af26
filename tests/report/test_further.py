"""The further laws on the page of a study, and the figure of each law."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from linnet.laws.fit import fit_study
from linnet.laws.further import TOPOLOGIES, Options, fit_laws
from linnet.report import further, shell, write_report
from linnet.report import further as further_figures
from linnet.report.records import Study


def test_the_page_shows_the_laws_that_the_table_supports(study, monkeypatch):
    drawn = []
    monkeypatch.setattr(shell, "write_pictures", lambda folder, figure: drawn.append(figure.name))
    monkeypatch.setattr(
        "linnet.report.records.fit_study",
        lambda table, curves, bootstrap: fit_study(table, curves, method="isoflop", bootstrap=0, conventions=False),
    )
    folder = study(architectures=("llama", "tnl"), budgets=(1.5e11, 3e11, 6e11, 1.2e12), curves=False)
    source = write_report(folder, bootstrap=20).read_text()
    assert {"allocation-differences", "over-training", "gap-off-the-optimum"} <= set(drawn)
    assert "Further laws" in source and "numbers, tests and notes" in source
    assert "laws that this table does not support" in source and "no column state_fixed" in source


@pytest.fixture(scope="module")
def results():
    """Each law on a table that supports it."""
    path = Path(__file__).parents[2] / "benchmarks" / "laws.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_laws", path)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    surface = tables.surface_table(0)
    one = surface[surface["architecture"] == "one"]
    moved = one.assign(N=one["N"] * np.exp(-0.3), D=one["D"] * np.exp(0.3), run=one["run"] + "b", batch_tokens=1e6)
    runs = [
        {"run": f"{name}-{s}", "architecture": name, "N": 1e8, "D": 1e9, "C": 6e17, "loss": 2 + 0.01 * s * i, "seed": s}
        for i, name in enumerate(list(TOPOLOGIES)[:3])
        for s in range(3)
    ]
    made = {
        ("allocation", "joint", "efficiency"): surface,
        ("state", "gap"): tables.state_table(0),
        ("share",): tables.share_table(0),
        ("over-training",): tables.over_training_table(0),
        ("data-constrained",): tables.passes_table(0),
        ("batch",): pd.concat([one.assign(batch_tokens=5e5), moved], ignore_index=True),
        ("topology",): pd.DataFrame(runs).assign(N_total=np.nan),
    }
    found = {}
    for names, table in made.items():
        laws, _ = fit_laws(table, names, Options(bootstrap=20))
        found |= {law.law: (table, law) for law in laws}
    return found


@pytest.mark.parametrize("name", further_figures.MAKERS)
def test_the_figure_of_each_law_that_has_one(results, name, tmp_path):
    table, law = results[name]
    figure = further_figures.draw(Study(tmp_path, {}, table, None), law)
    rows = [row for data in figure.spec["datasets"].values() for row in data]
    assert len(rows) > 2 and figure.title == law.title and json.dumps(figure.spec, allow_nan=False)
    assert any(isinstance(value, float) for row in rows for value in row.values())


def test_a_law_without_a_figure_shows_its_numbers(results, monkeypatch, tmp_path):
    """A new law needs no figure to stand on the page."""
    table, law = results["gap"]
    monkeypatch.delitem(further_figures.MAKERS, "gap")
    study = Study(tmp_path, {}, table, None)
    figure = further_figures.draw(study, law)
    html = "".join(further.parts(study, [(law, figure)], {}, "linnet report"))
    assert figure is None and law.title in html and "law-gap" in html


def test_figures_of_laws_can_be_rendered(results, tmp_path):
    for name in ("gap", "topology"):
        table, law = results[name]
        figure = further_figures.draw(Study(tmp_path, {}, table, None), law)
        shell.write_pictures(tmp_path, figure)
        assert (tmp_path / f"{figure.name}.svg").read_text().count("<path") > 5
