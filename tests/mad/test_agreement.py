"""`linnet mad agreement`, `linnet mad waterfall`, and the pages of `screen` and `published`."""

import json
import re

import pytest
from mad_folders import write_mad
from typer.testing import CliRunner

from linnet.cli import app
from linnet.mad.settings import BUDGETS, Budget, GridPoint

NAMES = ["mad-attention-swiglu", "mad-gla-swiglu", "mad-mamba"]


def call(*arguments):
    return CliRunner().invoke(app, ["mad", *map(str, arguments)])


def text_of(page):
    found = re.sub(r"<(style|script|svg).*?</\1>", "", page.read_text(), flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found))


def test_agreement_prints_and_gives_json(tmp_path):
    screen = write_mad(tmp_path / "screen", NAMES, budget="screen", seeds=(0, 1))
    full = write_mad(tmp_path / "full", NAMES, budget="full")
    shown = call("agreement", screen, "--full", full)
    assert shown.exit_code == 0 and "seeds 0 and 1: 0 of 3 pairs" in shown.stdout
    assert "rank correlation with" in shown.stdout and "screen scores" in shown.stdout
    found = json.loads(call("agreement", screen, "--full", full, "--json").stdout)
    assert len(found["tasks"]) == 6 and found["seeds"][0]["spearman"] == pytest.approx(1.0)
    assert found["full"]["architectures"] and found["full"]["spearman"]["all"] == pytest.approx(1.0)
    assert "no agreement of seeds" in call("agreement", full).stdout
    pair = write_mad(tmp_path / "pair", NAMES[:2], budget="screen", seeds=(0, 1))  # too few for a rank correlation
    found = json.loads(call("agreement", pair, "--json").stdout, parse_constant=pytest.fail)
    assert found["seeds"][0]["spearman"] is None and "rank correlation -" in call("agreement", pair).stdout


def test_agreement_shows_the_scores_of_an_architecture_that_lacks_one_seed(tmp_path):
    folder = write_mad(tmp_path, NAMES, budget="screen", seeds=(0, 1, 2))
    table = folder / "mad.csv"
    lines = table.read_text().splitlines(keepends=True)
    seed = lines[0].split(",").index("seed")
    kept = [line for line in lines if not (line.startswith(NAMES[0]) and line.split(",")[seed] == "2")]
    assert len(kept) < len(lines)
    table.write_text("".join(kept))
    shown = [line.strip() for line in call("agreement", folder).stdout.splitlines()]
    scores = [line for line in shown if re.match(r"seed \d: ", line)]
    assert [NAMES[0] in line for line in scores] == [True, True, False], shown


def test_agreement_compares_no_architecture_that_lacks_settings(tmp_path):
    folder = write_mad(tmp_path, NAMES[:2], budget="screen", seeds=(0, 1))
    table = folder / "mad.csv"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if not (line.startswith(NAMES[1]) and "memorization" in line)))
    shown = call("agreement", folder).stdout
    assert f"no comparison: it needs two architectures with every setting, and here are {NAMES[0]}\n" in shown
    assert "points between" not in shown


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes seconds, and other tests do it."""
    monkeypatch.setattr("linnet.mad.page.draw", lambda records: [])


def test_published_scores_stand_beside_scores_of_the_published_form_alone(no_figures, tmp_path):
    published = write_mad(tmp_path / "published", NAMES, budget="published", spec="mad-lab")
    core = write_mad(tmp_path / "core", NAMES, budget="core", spec="mad-lab")
    paper = write_mad(tmp_path / "paper", NAMES, budget="core")
    for folder in (published, core, paper):
        assert call("report", folder).exit_code == 0
    page = text_of(published / "report/index.html")
    assert "As published" in page and "74.5" in page and "arXiv:2406.06484" in page
    assert "macro_batch, test" in page and "accuracy, validation" in page
    page = text_of(core / "report/index.html")
    assert "74.5" not in page and "not shown beside published scores: it has 6 of 66 settings" in page
    assert "Both numbers" not in text_of(paper / "report/index.html")


def test_a_screen_page_is_labelled(no_figures, tmp_path):
    folder = write_mad(tmp_path, NAMES, budget="screen", seeds=(0, 1))
    assert call("report", folder).exit_code == 0
    page = text_of(folder / "report/index.html")
    assert "Screen scores (26 of 66 settings" in page and "tasks tell the highest and the lowest apart" in page


def test_one_seed_counts_no_tasks_that_tell_architectures_apart(no_figures, tmp_path):
    """They may be 86 points apart, so "0 tasks tell them apart by 10 points" would read as no difference."""
    folder = write_mad(tmp_path, NAMES, budget="screen")
    assert call("report", folder).exit_code == 0
    page = text_of(folder / "report/index.html")
    assert "One seed does not say whether the highest and the lowest of a task differ" in page
    assert "tasks tell" not in page and "tasks tell" not in call("agreement", folder).stdout


@pytest.mark.thorough
def test_the_waterfall_runs_and_prints(monkeypatch, tmp_path):
    tiny = {"epochs": 1, "batch_size": 16, "max_samples": 32, "held_out": 32}
    budget = Budget("smoke", "", True, False, grid=(GridPoint(1e-2, 0.0),), **tiny)
    monkeypatch.setitem(BUDGETS, "smoke", budget)
    own = ["--budget", "smoke", "--tasks", "memorization", "--device", "cpu", "--executor", "inline", "--out", tmp_path]
    shown = call("waterfall", "gla+swiglu", "--set", "d_model=16", *own)
    assert shown.exit_code == 0, shown.output
    assert all(step in shown.stdout for step in ("smoke", "tasks", "training", "layers", "number", "selection"))
    assert "gla+swiglu: its fixed state is" in shown.stdout and "not comparable (gla+swiglu)" in shown.stdout
    rows = json.loads(call("waterfall", "--no-run", "--json", "--out", tmp_path).stdout)
    assert len(rows) == 6 and {row["architecture"] for row in rows} == {"gla+swiglu"}


def test_a_waterfall_names_everything_wrong_at_once(tmp_path):
    wrong = {"--budget": "full", "--device": "tpu", "--executor": "ray", "--tasks": "memorisation", "--set": "d_mode=3"}
    wrong |= {"--known": tmp_path / "gone", "--published": tmp_path / "missing"}
    refused = call("waterfall", "gla+swiglux", *(part for one in wrong.items() for part in one), "--out", tmp_path)
    assert refused.exit_code == 2
    for word in ("--budget 'full'", "--device 'tpu'", "--executor 'ray'", "'memorisation'", "gone", "missing", "glux"):
        assert word in refused.stderr
    assert "d_mode" in call("waterfall", "gla+swiglu", "--set", "d_mode=3", "--out", tmp_path).stderr
    assert not list(tmp_path.iterdir())
