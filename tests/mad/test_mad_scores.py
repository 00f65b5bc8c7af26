"""Scores from result rows: what counts, what is selected by, when a score may stand beside others."""

import csv
import json
import math
from statistics import fmean, stdev

import pytest
from mad_folders import COLUMNS as ROW
from mad_folders import rows, write_mad, write_rows, write_runs

from linnet.config import ConfigError
from linnet.layers.base import MIXERS
from linnet.mad.architectures import architecture, recorded
from linnet.mad.checks import FAILS, HOLDS, NOT_ENOUGH, OPEN, TOO_FEW, checks
from linnet.mad.results import Design, Result, design_of, layers_of, named_design, read_results
from linnet.mad.scores import COLUMNS, score, write_scores
from linnet.models import get_recipe

TWO = ("mad-hyena-swiglu", "mad-hyena-attention-swiglu")


def run(task="memorization", setting="baseline", rate=1e-3, test=0.5, validation=0.5, seed=0, name="a", **more):
    return Result(name, task, f"{task}/{setting}", rate, 0.0, test, "done", seed=seed, validation_accuracy=validation,
                  **more)  # fmt: skip


def test_the_best_by_validation_counts_with_its_test_accuracy():
    runs = [run(rate=1e-3, test=0.6, validation=0.9), run(rate=1e-4, test=0.7, validation=0.8)]
    assert score(runs)["a"].score == 0.6
    assert score(runs, legacy=True)["a"].score == 0.7


def test_tasks_weigh_the_same_whatever_their_settings():
    runs = [run(test=0.2), run("compression", test=0.4), run("compression", "seq_len=64", test=1.0, varied="seq_len")]
    found = score(runs)["a"]
    assert found.tasks["compression"].score == pytest.approx(0.7)
    assert found.score == pytest.approx((0.2 + 0.7) / 2)
    assert list(found.tasks) == ["compression", "memorization"]  # the benchmark's order
    assert len(found.settings) == 3


def test_seeds_give_a_mean_and_a_spread():
    runs = [run(test=0.2), run(test=0.4, seed=1), run("compression", test=0.5), run("compression", test=0.9, seed=1)]
    found = score(runs)["a"]
    assert found.score == pytest.approx(fmean([0.2, 0.4, 0.5, 0.9]))
    assert found.spread == pytest.approx(stdev([0.35, 0.65]))
    assert found.tasks["memorization"].spread == pytest.approx(stdev([0.2, 0.4]))
    assert found.seeds == (0, 1)


def test_the_numbers_are_of_the_seeds_that_are_named():
    runs = [run(test=0.2), run(test=0.4, seed=1), run("compression", test=0.5)]
    runs.append(Result("a", "compression", "compression/baseline", 1e-3, 0.0, math.nan, "diverged", seed=1))
    found = score(runs)["a"]
    assert found.seeds == (0,) and found.spread is None
    assert found.score == pytest.approx((0.2 + 0.5) / 2)
    assert found.tasks["memorization"].score == 0.2 and found.tasks["memorization"].spread is None
    setting = found.settings["memorization/baseline"]
    assert setting.score == 0.2 and list(setting.best) == [0] and setting.runs == 1


def test_without_a_seed_that_has_every_setting_a_score_is_not_comparable():
    runs = [run(test=0.2, budget="core"), run("compression", test=0.5, seed=1, budget="core")]
    found = score(runs)["a"]
    assert found.seeds == () and found.score == pytest.approx(0.35)
    assert any("no seed has every setting" in reason for reason in found.reasons)


def test_macro_batch():
    runs = [run(test=0.6, macro_batch=0.5), run(rate=1e-4, test=0.5, validation=0.4, macro_batch=0.55)]
    assert score(runs, metric="macro_batch")["a"].score == 0.5
    assert score(runs, metric="macro_batch", legacy=True)["a"].score == 0.55
    with pytest.raises(ConfigError, match="macro_batch.*accuracy"):
        score([run()], metric="macro_batch")
    with pytest.raises(ConfigError, match="'accuracy'"):
        score([run()], metric="acuracy")


def test_runs_without_a_validation_split_are_refused_except_in_legacy():
    runs = [run(validation=math.nan)]
    with pytest.raises(ConfigError, match="validation_accuracy"):
        score(runs)
    assert score(runs, legacy=True)["a"].score == 0.5


def test_diverged_runs_take_no_part():
    lost = Result("a", "memorization", "memorization/baseline", 1e-4, 0.0, math.nan, "diverged")
    found = score([run(test=0.3), lost])
    assert found["a"].score == 0.3
    only = score([run(test=0.3), Result("b", *["memorization", "memorization/baseline"], 1e-4, 0.0, 0.9, "diverged")])
    assert list(only) == ["a"] and "none of its 1 runs" in only.unscored["b"]


@pytest.mark.parametrize("budget, settings", [("core", 6), ("full", 66)])
def test_whole_budgets_are_comparable(tmp_path, budget, settings):
    scores = score(read_results(write_mad(tmp_path, TWO, budget)))
    assert [scores[name].comparable for name in TWO] == [True, True]
    assert all(len(one.settings) == settings and one.budget == budget for one in scores.values())
    assert list(scores) == sorted(TWO), "an order by the scores would be a ranking"


def test_what_keeps_a_score_from_being_comparable():
    def reasons(found):
        return score([Result(**row) for row in found])["mad-gla-swiglu"].reasons

    whole = rows(["mad-gla-swiglu"])
    assert reasons(whole) == ()
    assert "smoke score only shows whether" in reasons(rows(["mad-gla-swiglu"], "smoke"))[0]
    assert "no known budget" in reasons([row | {"budget": ""} for row in whole])[0]
    assert "several budgets" in reasons(whole[:-1] + [whole[-1] | {"budget": "smoke"}])[0]
    assert "1 of 6 settings" in reasons([row for row in whole if row["task"] != "compression"])[0]
    assert "1 of 6 settings lack some of their 6 runs: in_context_recall/baseline" in reasons(whole[1:])[0]
    assert "both specifications" in reasons(whole[:-1] + [whole[-1] | {"spec": "mad-lab"}])[0]
    lost = [row | {"status": "diverged"} if row["task"] == "memorization" else row for row in whole]
    assert "memorization/baseline" in reasons(lost)[0]


def test_run_folders_and_the_table_are_read_alike(tmp_path):
    found = rows(TWO, seeds=(0, 1))
    table, folders = write_rows(tmp_path / "table", found), write_runs(tmp_path / "folders", found)
    assert score(read_results(table)) == score(read_results(folders))


def test_a_result_file_takes_the_place_of_its_row(tmp_path):
    found = rows(["mad-mamba"])
    write_runs(write_rows(tmp_path, found), [found[0] | {"accuracy": 0.123}])
    results = read_results(tmp_path)
    assert len(results) == len(found) and results[0].accuracy == 0.123


def test_a_folder_of_folders_is_none(tmp_path):
    """Runs of two budgets would take each other's place."""
    for budget in ("core", "smoke"):
        write_runs(write_rows(tmp_path / budget, rows(["mad-mamba"], budget)), rows(["mad-mamba"], budget))
    with pytest.raises(ConfigError, match=f"{tmp_path}/core, {tmp_path}/smoke"):
        read_results(tmp_path)


def test_written_scores_read_back(tmp_path):
    scores = score(read_results(write_mad(tmp_path, TWO, seeds=(0, 1))))
    with open(write_scores(tmp_path, scores), newline="") as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == tuple(COLUMNS) and len(table) == 2 * 7
    for name in TWO:
        own = {row["task"]: row for row in table if row["architecture"] == name}
        assert float(own["all"]["score"]) == scores[name].score
        assert float(own["all"]["score"]) == pytest.approx(
            fmean(float(row["score"]) for task, row in own.items() if task != "all")
        )
        assert own["all"]["comparable"] == "True" and own["all"]["seeds"] == "2" and own["all"]["settings"] == "6"


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (lambda folder: None, "mad.*folder"),
        (lambda folder: folder.mkdir(), "mad.*run"),
        (lambda folder: write_rows(folder, rows(["mad-mamba"]), ["architecture", "task"]), "status"),
        (lambda folder: write_rows(folder, [rows(["mad-mamba"])[0] | {"accuracy": 61}]), "accuracy.* 61"),
        (lambda folder: write_rows(folder, [rows(["mad-mamba"])[0] | {"accuracy": "x"}]), "accuracy"),
        (lambda folder: (write_runs(folder, rows(["mad-mamba"])[:1]) / "runs/run-00000/result.json").write_text("{"),
         "damaged"),
    ],
)  # fmt: skip
def test_what_is_no_folder_of_runs(tmp_path, spoil, problem):
    spoil(tmp_path / "mad")
    with pytest.raises(ConfigError, match=problem):
        read_results(tmp_path / "mad")


@pytest.mark.parametrize(
    "layout, mixers, channels, family, striped",
    [
        ("hyena+swiglu x2", ("hyena",), ("swiglu",), "hyena", False),
        ("mh_hyena+moe attention+moe", ("attention", "mh_hyena"), ("moe",), "hyena", True),
        ("hyena_experts+swiglu attention+swiglu", ("attention", "hyena_experts"), ("swiglu",), "hyena", True),
        ("mamba x4", ("mamba",), (), "mamba", False),
        ("attention+moe x2", ("attention",), ("moe",), "attention", False),
        ("my_experts+swiglu mlp", ("my_experts",), ("mlp", "swiglu"), "my_experts", False),
    ],
)
def test_a_design_is_read_from_the_blocks_of_a_model(layout, mixers, channels, family, striped, own_mixer):
    """Whatever the architecture is called: a mixer from a file keeps its whole name, which looks like a variant's."""
    model = architecture(layout, {"d_model": 32}, state=0)
    found = design_of(model)
    assert (found.mixers, found.channels, found.family, found.striped) == (mixers, channels, family, striped)
    assert Design.of(layers_of(recorded(model))) == found, "what plan.json has says the same, without the mixer's file"


@pytest.fixture
def own_mixer(monkeypatch):
    """A mixer from outside the package."""

    class MyExperts(MIXERS["tnl"]):
        pass

    monkeypatch.setitem(MIXERS, "my_experts", MyExperts)


def test_names_are_looked_up_not_guessed():
    for name in ("mad-mh-hyena-attention-moe", "mad-mamba"):
        assert named_design(name) == design_of(get_recipe(name))
    assert named_design("gla+swiglu x2") == Design(("gla",), ("swiglu",)) and named_design("gla") == Design(
        ("gla",), ()
    )
    assert named_design("mad-mamba-moe") is None and named_design("my_experts+swiglu x2") is None


def test_a_folder_says_what_its_architectures_are(tmp_path):
    """From plan.json; from the column of a table alone; and one that says nothing is in no pair."""
    found = rows({"striped": 0.7, "uniform": 0.6, "other": 0.5})
    record = {"options": {"my_experts": {}, "attention": {}, "swiglu": {}}}
    plan = {"models": {"striped": record, "uniform": {"options": {"my_experts": {}, "swiglu": {}}}}}
    write_rows(tmp_path / "plan", found)
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(plan))
    layers = {"striped": "my_experts attention swiglu", "uniform": "my_experts swiglu", "other": ""}
    table = [one | {"layers": layers[one["architecture"]]} for one in found]
    write_rows(tmp_path / "table", table, (*ROW, "layers"))
    for folder in ("plan", "table"):
        scores = score(read_results(tmp_path / folder))
        assert scores["striped"].design.family == "my_experts" and scores["other"].design is None
        striped = checks(scores)[0]
        assert [(pair.first, pair.second) for pair in striped.pairs] == [("striped", "uniform")]
        assert [note for note in striped.notes if note.startswith("other: in no pair")]


def made(levels, **options):
    return score([Result(**row) for row in rows(levels, **options)])


def test_findings_compare_pairs_that_differ_in_one_thing(tmp_path):
    striped, heads, moe = checks(score(read_results(write_mad(tmp_path))))
    assert {(pair.first, pair.second) for pair in striped.pairs} == {
        ("mad-hyena-attention-swiglu", "mad-hyena-swiglu"),
        ("mad-hyena-attention-moe", "mad-hyena-moe"),
        ("mad-mh-hyena-attention-swiglu", "mad-mh-hyena-swiglu"),
        ("mad-mamba-attention-swiglu", "mad-mamba"),
    }
    assert striped.verdict == HOLDS and striped.gain == pytest.approx(0.13, abs=0.01)
    assert striped.interval[0] < striped.gain < striped.interval[1]
    note = "0 of 4 striped architectures can be told apart above the highest score of a uniform one"
    assert striped.notes == [f"{note}, that of mad-attention-swiglu"], "one seed"
    assert len(heads.pairs) == 3 and heads.gain == pytest.approx((0.04 + 0.03 + 0.04) / 3, abs=0.01)
    assert len(moe.pairs) == 3 and moe.gain == pytest.approx(0.02, abs=0.01)
    assert set(moe.pairs[0].tasks) == set(score(read_results(tmp_path)).tasks)


def test_findings_without_the_runs_for_them():
    found = checks(made(["mad-gla-swiglu", "mad-mamba"]))
    assert [check.verdict for check in found] == [NOT_ENOUGH] * 3
    assert all(check.gain is None and "needs" in check.needed for check in found)


def test_one_pair_has_a_number_and_no_verdict():
    striped = checks(made(TWO))[0]
    assert striped.verdict == TOO_FEW and striped.interval is None
    assert striped.gain == pytest.approx(0.13, abs=0.02)


def test_three_pairs_with_gains_of_one_sign_are_no_finding():
    """Among pairs without a gain every fourth such triple has one sign, and its resamples lie on one side of zero."""
    gains = {"hyena": 0.01, "gla": 0.02, "mh-hyena": 0.15}
    names = {f"mad-{mixer}{part}-swiglu": 0.5 + gain * bool(part)
             for mixer, gain in gains.items() for part in ("", "-attention")}  # fmt: skip
    striped = checks(made(names))[0]
    assert len(striped.pairs) == 3 and striped.gain == pytest.approx(0.06, abs=0.01)
    assert striped.verdict == OPEN and striped.interval[0] < 0 < striped.interval[1]


def test_pairs_that_share_an_architecture_share_its_noise():
    """Five ways to stripe one mixer are five pairs, and all have the luck of the one uniform model."""
    layouts = [f"{'hyena+swiglu ' * before}attention+swiglu{' hyena+swiglu' * after}"
               for before, after in ((1, 0), (0, 1), (1, 1), (2, 0), (0, 2))]  # fmt: skip
    luck = {layout: 0.8 + 0.01 * number for number, layout in enumerate(layouts)}
    striped = checks(made({"mad-hyena-swiglu": 0.7} | luck))[0]
    assert len(striped.pairs) == 5 and striped.verdict == TOO_FEW and striped.interval is None
    assert striped.gain == pytest.approx(0.12, abs=0.01) and "leaves 1" in striped.notes[0]
    others = {f"mad-{mixer}{part}-swiglu": 0.5 + 0.1 * bool(part)
              for mixer in ("gla", "mh-hyena") for part in ("", "-attention")}  # fmt: skip
    striped = checks(made({"mad-hyena-swiglu": 0.7} | luck | others))[0]
    assert len(striped.pairs) == 7 and striped.gain == pytest.approx((0.12 + 0.1 + 0.1) / 3, abs=0.01)
    half = striped.gain - striped.interval[0]
    assert half > 0.01, "of three independent gains, with two degrees of freedom"


def test_a_finding_that_does_not_hold():
    names = [f"mad-{mixer}{part}-swiglu" for mixer in ("hyena", "gla", "mh-hyena") for part in ("", "-attention")]
    found = checks(made({name: 0.5 if "attention" in name else 0.8 for name in names}))[0]
    assert found.verdict == FAILS and found.interval[1] < 0


def test_pairs_are_compared_on_what_both_have():
    """The one that lacks the hard settings must not gain by that."""
    easy = rows({"mad-hyena-swiglu": 0.7}, "core")
    hard = rows({"mad-hyena-attention-swiglu": 0.7}, "full")
    found = checks(score([Result(**row) for row in easy + hard]))[0]
    assert found.pairs[0].settings == 6 and abs(found.pairs[0].gain) < 0.02
    assert not any("best uniform" in note for note in found.notes), "their scores are means over different settings"


def test_incomparable_scores_are_told_in_the_finding():
    striped = checks(made(TWO, budget="smoke"))[0]
    assert "not comparable" in striped.notes[0]
