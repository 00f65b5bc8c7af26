"""Designs of further runs: the questions, the linearised widths against simulation, and the choice of runs."""

import math

import numpy as np
import pandas as pd
import pytest

from linnet.config import ConfigError, parse
from linnet.laws.fit import fit_study
from linnet.study import StudyConfig, plan
from linnet.study.adaptive import parse_limit, propose
from linnet.study.config import remembered, with_points
from linnet.study.design import Place, answer, parse_question

BUDGETS = np.array([1e17, 3e17, 1e18, 3e18, 1e19])
NOISE = 0.004


def surface(N, D):
    return 1.7 + 400 / N**0.34 + 1500 / D**0.36


def table(seed: int = 0, budgets=BUDGETS, sizes: int = 7) -> pd.DataFrame:
    """An IsoFLOP ladder with noise around the optima of a known surface, for which C = 6 N D."""
    rng, rows = np.random.default_rng(seed), []
    for C in budgets:
        best = (0.34 * 400 / (0.36 * 1500)) ** (1 / 0.7) * (C / 6) ** (0.36 / 0.7)
        for N in best * np.geomspace(0.35, 2.8, sizes):
            D = C / (6 * N)
            rows.append({"N": N, "D": D, "C": C, "budget": C, "loss": surface(N, D) * (1 + NOISE * rng.normal())})
    found = pd.DataFrame(rows)
    return found.assign(architecture="tnl", run=[f"run {i}" for i in range(len(found))], N_total=np.nan)


def fitted(rows: pd.DataFrame, method: str = "isoflop"):
    return fit_study(rows, method=method, bootstrap=300)["tnl"]


@pytest.mark.parametrize(
    ("text", "name", "compute", "architecture", "half_width", "percent"),
    [
        ("a", "a", None, None, None, False),
        ("tnl: a +- 0.05", "a", None, "tnl", 0.05, False),
        (" L( 1e12 )±1 % ", "L", 1e12, None, 1.0, True),
        ("hgrn2:N_opt(3e20)+/-10%", "N_opt", 3e20, "hgrn2", 10.0, True),
    ],
)
def test_questions(text, name, compute, architecture, half_width, percent):
    found = parse_question(text, ["tnl", "hgrn2"])
    assert (found.name, found.compute, found.architecture) == (name, compute, architecture)
    assert (found.half_width, found.percent) == (half_width, percent)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gamma", "'gamma'"),
        ("L", "L(1e12)"),
        ("L(nan)", "L(1e12)"),
        ("a(1e12)", "one number"),
        ("tnk: a", "'tnk'"),
        ("a +- 0", "positive"),
        ("a + 0.1", "HALF-WIDTH"),
        ("", "N_opt(C)"),
    ],
)
def test_wrong_questions_are_refused_by_name(text, named):
    with pytest.raises(ConfigError) as caught:
        parse_question(text, ["tnl"])
    assert named in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_question("a", ["tnl"], "--until")
    assert "+-" in str(caught.value)


def test_limits():
    assert parse_limit("2e13").flops == 2e13 and parse_limit("30 min").seconds == 1800
    for wrong in ("x", "-1", "nan", "inf", "3 weeks"):
        with pytest.raises(ConfigError, match="--at-most"):
            parse_limit(wrong)


def places(C: float, offsets, copies: int) -> list[Place]:
    best = (0.34 * 400 / (0.36 * 1500)) ** (1 / 0.7) * (C / 6) ** (0.36 / 0.7)
    found = [Place(math.log(best) + x, math.log(C / 6 / best) - x, math.log(C)) for x in offsets]
    return found * copies


@pytest.mark.parametrize("ends", [BUDGETS[:1], BUDGETS[[0, 4]], np.array([3e19])])
def test_the_expected_width_of_a_is_that_of_simulated_ladders(ends):
    """The exponent's standard deviation over simulated ladders falls by the predicted factor."""
    offsets = np.log(np.geomspace(0.35, 2.8, 7))
    found = answer(fitted(table()), parse_question("a", ["tnl"]))
    extra = [place for C in ends for place in places(C, offsets, 3)]
    predicted = found.spread(extra) / found.spread(())

    rng = np.random.default_rng(1)

    def exponents(copies: dict[float, int]) -> np.ndarray:
        optima = []
        for C, number in copies.items():
            spots = places(C, offsets, number)
            x = np.array([place.log_N for place in spots])
            y = surface(np.exp(x), np.exp([place.log_D for place in spots]))
            noisy = y[:, None] * (1 + NOISE * rng.normal(size=(len(x), 400)))
            c2, c1, _ = np.polyfit(x - x.mean(), noisy, 2)
            optima.append(x.mean() - c1 / (2 * c2))
        return np.polyfit(np.log(list(copies)), np.array(optima), 1)[0]

    before = exponents(dict.fromkeys(BUDGETS, 1))
    after = exponents(dict.fromkeys(BUDGETS, 1) | {C: 4 if C in BUDGETS else 3 for C in ends})
    assert after.std() / before.std() == pytest.approx(predicted, rel=0.12)


def test_a_second_copy_of_every_run_halves_the_variance_on_the_surface():
    rows = table()
    fit = fitted(rows, "parametric")
    again = [Place(*np.log([row.N, row.D, row.C])) for row in rows.itertuples()]
    for asked in ("a", "E", "alpha", "L(1e20)", "N_opt(1e20)"):
        found = answer(fit, parse_question(asked, ["tnl"]))
        assert found.method == "parametric"
        assert found.spread(again) / found.spread(()) == pytest.approx(1 / math.sqrt(2), rel=1e-4)
        assert found.spread(again[:1]) < found.spread(())


STUDY = {
    "name": "small",
    "architectures": ["tnl"],
    "budgets": [1e10, 2e10, 4e10, 8e10],
    "sizes": [[8, 1, 2], [12, 1, 2], [16, 1, 2], [24, 1, 2], [32, 1, 2], [48, 1, 2]],
    "tokens_per_param": [8, 2000],
    "seq_len": 64,
    "batch_size": 2,
}


def simulated(ladder, curved: bool = True) -> pd.DataFrame:
    """The table that a study would have if its losses were parabolas around 6 sqrt(C) / 250 parameters."""
    rng, rows = np.random.default_rng(0), []
    for run in ladder.runs:
        x = math.log(run.params_non_embedding / (6 * math.sqrt(run.budget) / 250))
        loss = 2.5 - 0.1 * math.log(run.budget / 1e10) + (0.08 * x**2 if curved else 0.1 * x) + 0.01 * rng.normal()
        point = {"N": run.params_non_embedding, "D": run.tokens, "C": run.flops, "budget": run.budget, "loss": loss}
        rows.append({**point, "architecture": "tnl", "run": run.run, "N_total": np.nan})
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def ladder():
    return plan(parse(StudyConfig, STUDY), check_data=False)


@pytest.fixture(scope="module")
def small(ladder):
    return fitted(simulated(ladder))


def test_proposals_reach_the_wanted_width_and_can_be_added(ladder, small):
    now = answer(small, parse_question("a", ["tnl"])).half_width
    found = propose(ladder, small, parse_question(f"a +- {now / 2}", ["tnl"]))
    assert found.enough and not found.reached
    assert found.expected == sorted(found.expected, reverse=True)
    assert found.expected[-1] <= now / 2
    assert found.expected[0] == pytest.approx(now * found.now.spread([found.runs[0].place]) / found.now.spread(()))
    assert min(run.point.budget for run in found.runs) >= 1e10
    longer = with_points(ladder.config, [run.point for run in found.runs])
    again = plan(longer, check_data=False)
    assert len(again.runs) == len(ladder.runs) + len(found.runs), "every proposal is a run that is not there yet"
    assert sum(run.flops for run in again.runs) - ladder.flops == pytest.approx(found.flops)
    reached = propose(ladder, small, parse_question(f"a +- {now * 2}", ["tnl"]))
    assert reached.reached and not reached.runs


def test_the_first_proposal_narrows_more_per_flop_than_any_other(ladder, small):
    found = propose(ladder, small, parse_question("a", ["tnl"]), most=1)
    gain = (found.now.half_width - found.expected[-1]) / found.flops
    for run in ladder.runs:
        place = Place(*np.log([run.params_non_embedding, run.tokens, run.budget]))
        if found.now.inside(place):
            assert (found.now.half_width - found.now.expected([place])) / run.flops <= gain * (1 + 1e-9)


def test_without_an_optimum_the_missing_sizes_are_proposed(ladder):
    found = propose(ladder, fitted(simulated(ladder, curved=False)), parse_question("a", ["tnl"]))
    assert "no interval" not in str(found.now) and "isoflop" in found.now
    assert found.runs and all(math.isnan(width) for width in found.expected)
    smallest = {budget: min(r.params_non_embedding for r in ladder.runs if r.budget == budget) for budget in (8e10,)}
    assert any(run.params < smallest[8e10] for run in found.runs if run.point.budget == 8e10)


def test_a_folder_remembers_its_points(ladder, tmp_path):
    point = {"architecture": "tnl", "budget": 3e10, "size": [12, 1, 2], "seed": 2}
    other = {**point, "architecture": "llama"}
    (tmp_path / "study.yaml").write_text(f"name: small\npoints: [{point}, {other}]\n".replace("'", '"'))
    found = remembered(ladder.config, tmp_path)
    assert [one.architecture for one in found.points] == ["tnl"] and found.points[0].seed == 2
    assert remembered(found, tmp_path).points == found.points
