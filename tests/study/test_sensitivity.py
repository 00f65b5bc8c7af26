"""`rate_sensitivity`: two further runs per architecture that no fit reads, and marks on comparisons that they doubt."""

import json
import math
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import parse
from linnet.laws.orders import Order
from linnet.report.findings import _differences, _lowest_loss, plain, summary
from linnet.report.page import _sensitivity
from linnet.report.records import Study, check_table
from linnet.report.tables import difference_table
from linnet.runs import RunFolder
from linnet.study import StudyConfig, plan, run_study
from linnet.study.collect import collect, read_plan, read_rate_runs
from linnet.study.sensitivity import UNKNOWN, Sensitivity, doubts, read_sensitivities, sentences, words
from linnet.study.tune import make_sweeps, plan_sweeps

SAID = "the learning rate may decide"
LOSSES = (("llama", 2.0), ("tnl", 2.03), ("far", 2.5))


@pytest.fixture
def asked(tiny):
    return tiny | {"budgets": [1e8, 2e8, 4e8], "sizes": [[8, 1], [16, 1], [24, 1]], "rate_sensitivity": True}


def test_the_median_run_of_each_architecture_is_planned_at_two_more_rates(asked):
    with_them = plan(parse(StudyConfig, asked | {"seeds": [3, 1]}))
    without = plan(parse(StudyConfig, asked | {"seeds": [3, 1], "rate_sensitivity": False}))
    assert [run.record() for run in with_them.runs] == [run.record() for run in without.runs]
    assert without.all_runs == without.runs and not without.sensitivity
    assert len(with_them.all_runs) == len(with_them.runs) + 4
    assert with_them.flops == pytest.approx(sum(run.flops for run in (*with_them.runs, *with_them.sensitivity)))
    planned = {run.run: run for run in with_them.runs}
    for name in ("llama", "tnl"):
        own = {run.factor: run for run in with_them.sensitivity if run.architecture == name}
        assert set(own) == {0.5, 2.0}
        for factor, run in own.items():
            base = planned[run.of]
            assert (base.architecture, base.budget, base.size, base.seed) == (name, 2e8, "16x1", 3)
            assert run.train.optimizer.learning_rate == factor * base.train.optimizer.learning_rate
            assert run.learning_rate == run.train.optimizer.learning_rate
            assert run.run not in planned
            rate = {"learning_rate": base.train.optimizer.learning_rate}
            same = run.train.model_copy(update={"optimizer": run.train.optimizer.model_copy(update=rate)})
            assert same == base.train, "the runs must differ in the rate alone"


def test_points_and_tuning_do_not_change_or_repeat_the_runs(asked, tmp_path):
    names = {run.run for run in plan(parse(StudyConfig, asked)).sensitivity}
    further = [{"architecture": "tnl", "budget": 3e8, "size": [20, 1], "seed": seed} for seed in range(3)]
    config = parse(StudyConfig, asked | {"points": further})
    assert {run.run for run in plan(config).sensitivity} == names
    sweeps = make_sweeps(config, [16, 24])
    places = {(one.architecture.name, one.width): [0] for one in sweeps}
    assert not plan_sweeps(config, sweeps, places, 1, 1e8, tmp_path).sensitivity


def test_a_study_trains_them_resumes_and_shows_them(asked, tmp_path):
    asked |= {
        "budgets": [],
        "tokens": [6000],
        "sizes": [[16, 1]],
        "architectures": [{"name": "llama", "published": 2.5}, {"name": "tnl", "base": "llama", "published": 2.4}],
    }
    file, out = tmp_path / "tiny.yaml", tmp_path / "studies"
    file.write_text(yaml.safe_dump(asked))
    command = ["study", str(file), "--out", str(out), "--no-report"]
    planned = CliRunner().invoke(app, [*command, "--plan"])
    assert planned.exit_code == 0, planned.output
    assert "rate sensitivity" in planned.output and "6 runs (2 for the fits, 4 at other rates)" in planned.output
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "0.5 x the rate" in result.output and "loss at half, one and two times" in result.output
    folder = out / "tiny"
    varied = read_rate_runs(folder)
    assert len(read_plan(folder)) == 2 and len(varied) == 4
    names = {run["run"] for run in varied}
    assert not names & {row["run"] for row in collect(folder)}, "table.csv is what fits read"
    found = read_sensitivities(folder)
    assert set(found) == {"llama", "tnl"}
    for run in varied:
        loss = RunFolder(folder / "runs" / run["run"]).result()["loss"]
        assert found[run["architecture"]].losses[run["factor"]] == loss
        assert f"{loss:.4f}" in result.output
    for one in found.values():
        assert one.value == max(one.losses.values()) - min(one.losses.values()) > 0

    def study_of(config):
        rows = [row for row in collect(folder) if row["architecture"] in map(_name, config["architectures"])]
        return Study(folder, config, check_table(rows), None)

    study = study_of(asked)
    assert summary(study).startswith("2 runs of ") and "Not counted here: 4 runs at other" in summary(study)
    page = " ".join(_sensitivity(study))
    assert all(f"{one.value:.4f}" in page for one in found.values())
    gap = abs(found["tnl"].losses[1.0] - found["llama"].losses[1.0])
    near = gap < max(one.value for one in found.values())
    assert _marks(study, result.output) == [near] * 4

    lost = RunFolder(folder / "runs" / varied[0]["run"])  # as after a kill
    (lost.path / "result.json").unlink()
    assert read_sensitivities(folder)[varied[0]["architecture"]].value is None
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}
    run_study(parse(StudyConfig, asked), out)
    assert lost.done and {path: path.stat().st_mtime_ns for path in kept} == kept
    assert read_sensitivities(folder) == found

    damaged = lost.path / "result.json"
    values = json.loads(damaged.read_text())
    damaged.write_text(json.dumps(values | {"status": "diverged", "loss": None}))
    assert math.isinf(read_sensitivities(folder)[varied[0]["architecture"]].value)
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and "diverged" in again.output
    assert _marks(study, again.output) == [True] * 4
    for run in varied:
        path = folder / "runs" / run["run"] / "result.json"
        path.write_text(json.dumps(values | {"loss": found[run["architecture"]].losses[1.0]}))
    assert [one.value for one in read_sensitivities(folder).values()] == [0, 0]
    assert _marks(study, CliRunner().invoke(app, command).output) == [False] * 4
    assert UNKNOWN not in result.output and UNKNOWN[1:] not in page
    bare = CliRunner().invoke(app, [*command, "--set", "rate_sensitivity=false"])
    assert "sensitivity" not in json.loads((folder / "plan.json").read_text())
    assert read_sensitivities(folder) == {}
    assert UNKNOWN in bare.output.replace("\n", " ") and UNKNOWN[1:] in " ".join(_sensitivity(study_of(asked)))
    assert "<code>rate_sensitivity: true</code> trains two" in " ".join(_sensitivity(study_of(asked)))
    assert not _sensitivity(study_of(asked | {"architectures": ["tnl"]})), "nothing is compared"


def _name(architecture):
    return architecture["name"] if isinstance(architecture, dict) else architecture


def _marks(study, printed):
    """Whether each place that compares the two architectures says that the rate may decide."""
    lowest = _lowest_loss(study)
    assert "cannot be told apart" in lowest and SAID not in lowest, "one run each: no order that a rate could change"
    difference = "tnl and llama at 16x1, " in printed
    places = (difference_table(study), _differences(study))
    return [difference, *(SAID in text for text in places), _listed(study)]


def _listed(study):
    return "<li>llama and tnl: gap" in " ".join(_sensitivity(study))


def _one(name, losses, budget=1e9, tokens=100):
    return Sensitivity(name, budget, "16x1", tokens, 0.01, dict(zip((0.5, 1.0, 2.0), losses, strict=True)))


def test_a_gap_below_the_larger_sensitivity_is_marked():
    wide, near, far = _one("wide", (2.10, 2.00, 2.05)), _one("near", (2.05, 2.06, 2.055)), _one("far", (2.2, 2.2, 2.2))
    found = {one.architecture: one for one in (wide, near, far)}
    assert wide.value == pytest.approx(0.10) and near.value == pytest.approx(0.01)
    (doubt,) = doubts(found)
    assert sentences([doubt]) == ["wide and near: gap 0.0600, rate sensitivity 0.1000"]
    many = [replace(doubt, first=f"a{n // 6}", second=f"b{n % 6}") for n in range(12)]
    assert sentences(many)[0] == "a0 and each of b0, b1, b2, b3, b4, b5" and len(sentences(many)) == 2
    assert (doubt.first, doubt.second) == ("wide", "near")
    assert (doubt.gap, doubt.sensitivity) == (pytest.approx(0.06), pytest.approx(0.10))
    assert doubts({"near": near, "far": far}) == []
    assert doubts({"wide": wide, "near": replace(near, budget=2e9, tokens=200)}) == [], "at another budget"
    assert len(doubts({"wide": wide, "near": replace(near, budget=2e9)})) == 1, "the same tokens"
    assert "0.1000" in words(found, "wide", "far", 0.09) and words(found, "wide", "far", 0.11) == ""
    assert words(found, "near", "far", 0.014, math.log(2)) != "", "0.01 nats are 0.0144 bits"
    assert words(found, "near", "far", 0.015, math.log(2)) == words({}, "near", "far", 0.0) == ""
    exploded = found | {"far": _one("far", (2.2, 2.2, math.inf))}
    assert math.isinf(exploded["far"].value) and "diverged" in words(exploded, "near", "far", 5.0)


@pytest.mark.parametrize(("losses", "marked"), [((2.0, 2.0, 2.05), True), ((2.0, 2.0, 2.01), False)])
def test_an_order_of_losses_that_is_told_is_marked_where_the_rate_may_decide_it(losses, marked, tmp_path, monkeypatch):
    runs = {"params_non_embedding": 1e5, "tokens": 1e6, "flops": 6e11, "budget": 6e11, "status": "done"}
    rows = [
        {"run": f"{name}{n}", "architecture": name, "loss": loss + 0.1 * n, **runs}
        for name, loss in LOSSES
        for n in (0, 1)
    ]
    study = Study(tmp_path, {}, check_table(rows), None)
    told = Order(
        dict(LOSSES), 6e11, frozenset({"llama", "tnl", "far"}), frozenset({("llama", "tnl"), ("llama", "far")})
    )
    monkeypatch.setattr("linnet.report.findings.orders", lambda fits: {"L": told})
    monkeypatch.setattr(Study, "sensitivities", {"llama": _one("llama", losses)})
    lowest = plain(_lowest_loss(study))
    assert "The loss of tnl (+1.5 %) and far (+25 %) is higher." in lowest.replace("\xa0", " ")
    assert ("For tnl the gap is smaller than the rate sensitivity" in lowest and SAID in lowest) == marked
