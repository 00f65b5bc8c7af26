"""`linnet demo`: what it trains. `make wheel-demo` runs it, from a wheel in an empty environment."""

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.cli.study import read_shipped
from linnet.config import parse, read_yaml
from linnet.study import ladder
from linnet.study.config import StudyConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def studies(monkeypatch):
    """The studies that commands ask for, instead of their work."""
    asked = []
    module = importlib.import_module("linnet.cli.study")  # linnet.cli.study is the verb of that name
    monkeypatch.setattr(module, "make_study", lambda settings, out, **_: asked.append((settings, out)))
    return asked


def test_the_quick_demo_has_two_architectures_and_six_runs(studies, tmp_path):
    result = CliRunner().invoke(app, ["demo", "--quick", "--workers", "1", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    [(settings, out)] = studies
    runs = ladder.plan(settings, check_data=False).runs
    assert len(runs) == 6 and len({run.architecture for run in runs}) == 2
    assert len({(run.architecture, run.budget) for run in runs}) == 6  # one per budget
    assert (out, settings.executor.workers) == (tmp_path, 1)


def test_the_demo_is_the_study_of_configs(studies):
    """`linnet demo` needs no repository; in one, configs/demo.yaml names the same study."""
    for arguments in (["demo"], ["study", str(ROOT / "configs" / "demo.yaml")]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    (demo, out), (study, other) = studies
    assert demo == study and out == other and len(demo.architectures) == 5
    assert demo == parse(StudyConfig, read_shipped("demo")) == parse(StudyConfig, read_yaml(ROOT / "configs/demo.yaml"))


def test_the_demo_plans_optima_that_a_parabola_can_show():
    """At least four budgets, and for every architecture at each of them six sizes or more."""
    plan = ladder.plan(parse(StudyConfig, read_shipped("demo")), check_data=False)
    runs = plan.runs
    assert len(plan.sensitivity) == 2 * 5, "the learning rate may decide a comparison, so it is measured"
    sizes: dict[tuple[str, float], set[int]] = {}
    for run in runs:
        sizes.setdefault((run.architecture, run.budget), set()).add(run.params_non_embedding)
    assert len({budget for _, budget in sizes}) >= 4 and len({name for name, _ in sizes}) == 5
    assert min(map(len, sizes.values())) >= 6


def test_a_folder_that_cannot_be_made_is_an_error_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2 and "--out" in result.stderr
