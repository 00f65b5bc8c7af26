"""Planning: exact FLOPs, dropped points, and all problems reported before any work."""

import re
import sys
from types import SimpleNamespace

import pytest

from linnet.config import ConfigError, parse, read_yaml
from linnet.models import flops_exact
from linnet.study import StudyConfig, plan
from linnet.study.ladder import _middle
from linnet.train.identity import contents_of, find

VALUES = {
    "name": "small",
    "architectures": ["llama", "tnl"],
    "budgets": [2e9, 5e9],
    "sizes": [[16, 1], [32, 2]],
    "seq_len": 32,
    "batch_size": 4,
    "minimum_steps": 5,
}

LATE = {"schedule": {"warmup": 100000}}


def plan_of(**changes):
    return plan(parse(StudyConfig, VALUES | changes))


def test_each_run_spends_its_budget_to_half_a_step():
    runs = plan_of().runs
    assert len(runs) == 8
    for run in runs:
        per_step = flops_exact(run.train.model, 32, 4)
        assert run.flops == run.steps * per_step
        assert abs(run.flops - run.budget) <= per_step / 2
        assert run.tokens == run.steps * 4 * 32
        assert run.train.total_steps == run.steps


def test_largest_first_and_named_by_the_hash_of_the_resolved_settings():
    runs = plan_of().runs
    assert [run.flops for run in runs] == sorted((run.flops for run in runs), reverse=True)
    assert len({run.run for run in runs}) == len(runs)
    for run in runs:
        assert run.run == find(run.train, None, contents_of(run.train)).folder.path.name
        assert run.run.startswith(run.architecture)
    assert [run.run for run in plan_of().runs] == [run.run for run in runs]


def test_sizes_that_differ_in_heads_have_labels_of_their_own():
    planned = plan_of(sizes=[[16, 1, 1], [16, 1, 2], {"d_model": 16, "num_layers": 1, "num_heads": 2, "inner": 32}])
    assert {run.size for run in planned.runs} == {"16x1x1", "16x1x2", "16x1/32"}
    assert {run.size for run in plan_of(sizes=[[16, 1, 2]]).runs} == {"16x1"}
    added = [{"architecture": "tnl", "budget": 2e9, "size": [16, 1, 1]}]
    assert {run.size for run in plan_of(sizes=[[16, 1, 2]], points=added).runs} == {"16x1x1", "16x1x2"}
    with pytest.raises(ConfigError) as refused:
        plan_of(architectures=["tnl"], sizes=[[16, 1, 3], [16, 1, 5], [16, 1, 2], [17, 1, 4]])
    places = {line.partition(": ")[0] for line in refused.value.problems}
    assert places == {"architectures.tnl 16x1x3", "architectures.tnl 16x1x5", "architectures.tnl 17x1"}
    with pytest.raises(
        ConfigError, match="gdn 12x1: .* d_model 12; .*the first number of a size in `sizes` is its d_m"
    ):
        plan_of(architectures=["gdn"], sizes=[[12, 1, 2]])


UNUSED = {
    "executor": {"kind": "inline", "workers": 3, "threads": 2},
    "train": {"schedule": {"name": "constant", "final": 0.5}},
    "architectures": ["llama", {"name": "bare", "family": "tnl", "options": {"tnl": {"lrpe_shared_heads": True}}}],
}


def test_keys_without_effect_are_refused_in_a_new_study_only(tmp_path):
    config = parse(StudyConfig, VALUES | UNUSED)
    with pytest.raises(ConfigError) as refused:
        plan(config, check_data=False, root=tmp_path / "new" / "runs")
    assert [line.partition(" has no effect ")[0] for line in refused.value.problems] == [
        "executor.workers: 3",
        "executor.threads: 2",
        "train.schedule.final: 0.5",
        "architectures.bare: options.tnl.lrpe_shared_heads: true",
    ]
    assert "with kind: inline; leave it out, or use kind: local" in refused.value.problems[0]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "study.yaml").touch()
    assert plan(config, check_data=False, root=tmp_path / "old" / "runs").runs


@pytest.mark.parametrize("executor", [{"kind": "inline", "workers": 1}, {"workers": 3, "threads": 2}])
def test_keys_that_an_executor_reads_are_taken(executor, tmp_path):
    assert plan(parse(StudyConfig, VALUES | {"executor": executor}), check_data=False, root=tmp_path / "runs").runs
    address = parse(StudyConfig, VALUES | {"executor": executor | {"address": "auto"}})
    with pytest.raises(ConfigError, match="executor.address: auto has no effect .*use kind: ray"):
        plan(address, check_data=False, root=tmp_path / "runs")


def test_only_a_ladder_of_sizes_is_told_that_it_has_too_few():
    assert any("fewer than 4 sizes" in note for note in plan_of().notes())
    assert plan_of(sizes=[[16, 1]]).notes() == []  # a comparison at one size, which asks for no law


def test_budgets_with_too_few_sizes_are_named_in_the_order_of_the_study():
    (note,) = plan_of(architectures=["tnl", "llama"]).notes()
    names = [(name, budget) for name in ("tnl", "llama") for budget in VALUES["budgets"]]
    assert f"at: {', '.join(f'{name} {float(budget):.3g}' for name, budget in names)}; give more `sizes`" in note


def test_runs_that_end_inside_their_warm_up_are_noted():
    own = plan_of(sizes=[[16, 1]], train=LATE)
    (note,) = own.notes()
    assert f"{len(own.runs)} runs are shorter than their warm-up" in note and own.runs[0].run in note
    assert plan_of(sizes=[[16, 1]], train={"schedule": {"warmup": 2}}).notes() == []
    one = plan_of(architectures=["tnl"], budgets=VALUES["budgets"][:1], sizes=[[16, 1]], seeds=[0], train=LATE)
    assert one.notes()[0].startswith("1 run is shorter than its warm-up")


def test_a_base_that_no_run_can_be_compared_with_is_noted():
    own = [{"name": "tnl"}, {"name": "no-gate", "family": "tnl", "base": "tnl", "options": {"tnl": {"gate": "none"}}}]
    (note,) = plan_of(architectures=own, sizes=[[16, 1]]).notes()
    assert "no-gate from tnl" in note and "set `tokens` in place of `budgets`" in note
    assert plan_of(architectures=own, sizes=[[16, 1]], tokens=[2048], budgets=[]).notes() == []
    own[1]["options"] = {"tnl": {"layer_factor": False}}  # the same FLOPs per token
    assert plan_of(architectures=own, sizes=[[16, 1]]).notes() == []
    own[1]["sizes"] = [[24, 1]]
    (note,) = plan_of(architectures=own, sizes=[[16, 1]], tokens=[2048], budgets=[]).notes()
    assert "no-gate from tnl" in note and "same sizes" in note


def test_points_outside_the_bounds_are_dropped_and_named():
    everything = plan_of()
    ratios = sorted(run.tokens / run.params_non_embedding for run in everything.runs)
    bound = (ratios[0] + ratios[1]) / 2
    bounded = plan_of(tokens_per_param=[bound, 1e9])
    assert len(bounded.runs) == len(everything.runs) - 1
    assert len(bounded.dropped) == 1
    assert any(note.startswith("1 point dropped (tokens per") for note in bounded.notes())
    assert not any("no run of" in note for note in bounded.notes())
    assert any("tokens per parameter outside tokens_per_param: [" in note for note in bounded.notes())
    steps = sorted(run.steps for run in everything.runs)
    few = plan_of(minimum_steps=steps[3])
    assert {run.run for run in few.runs} == {run.run for run in everything.runs if run.steps >= steps[3]}


def test_an_architecture_that_loses_every_point_is_named_first():
    large = {"name": "large", "family": "tnl", "sizes": [[64, 3]]}
    plans = plan_of(architectures=["tnl", large], tokens_per_param=[20, 1e9])
    assert {run.architecture for run in plans.runs} == {"tnl"}
    ratios = sorted(point.ratio for point in plans.dropped if point.architecture == "large")
    assert ratios[-1] < 20
    first = plans.notes()[0]
    assert "large" in first and f"{ratios[-1]:.3g} tokens" in first and "`tokens_per_param`" in first


def test_nothing_left_is_an_error():
    with pytest.raises(ConfigError, match="minimum_steps|100,000|100000"):
        plan_of(minimum_steps=100_000)


def test_points_join_the_grid_once_and_without_its_bounds():
    grid = plan_of()
    new = {"architecture": "tnl", "budget": 3e9, "size": [24, 1]}
    known = {"architecture": "tnl", "budget": 2e9, "size": [16, 1]}
    again = plan_of(points=[new, {**new, "seed": 1}, known], tokens_per_param=[0, 1e9])
    added = {run.run: run for run in again.runs if run.run not in {one.run for one in grid.runs}}
    assert len(again.runs) == len(grid.runs) + 2
    assert {(run.architecture, run.budget, run.size) for run in added.values()} == {("tnl", 3e9, "24x1")}
    assert {run.seed for run in added.values()} == {0, 1}
    strict = plan_of(points=[new], tokens_per_param=[1, 50])
    assert len(strict.dropped) > 0 and any(run.size == "24x1" for run in strict.runs)
    with pytest.raises(ConfigError) as error:
        plan_of(points=[{**new, "budget": 1.0}, {**new, "size": [23, 1, 2]}])
    assert "num_heads" in str(error.value) or "23" in str(error.value)


def test_tokens_give_every_size_the_same_tokens():
    ladder = plan_of(budgets=[], tokens=[12_800.0])
    assert {run.tokens for run in ladder.runs} == {12_800}
    assert len({run.flops for run in ladder.runs}) == len(ladder.runs)
    assert all(run.budget == run.flops for run in ladder.runs)


def test_an_architecture_can_change_what_the_study_says():
    ladder = plan_of(
        architectures=[
            "tnl",
            {"name": "tnl-log", "family": "tnl", "options": {"tnl": {"slopes": "log_spaced"}}},
            {"name": "long", "family": "tnl", "seq_len": 64, "batch_size": 2, "learning_rate": 1e-3},
            {"name": "hybrid", "layout": "tnl+sglu attention+swiglu", "sizes": [[16, 2], [32, 4]]},
        ]
    )
    by_name = {}
    for run in ladder.runs:
        by_name.setdefault(run.architecture, run)
    assert by_name["tnl-log"].train.model.options["tnl"]["slopes"] == "log_spaced"
    assert by_name["tnl"].train.model.options["tnl"]["slopes"] == "alibi"
    assert (by_name["long"].seq_len, by_name["long"].batch_size, by_name["long"].learning_rate) == (64, 2, 1e-3)
    hybrids = {run.size: run.train.model for run in ladder.runs if run.architecture == "hybrid"}
    assert [block.mixer for block in hybrids["32x4"].blocks] == ["tnl", "attention"] * 2
    assert hybrids["32x4"].d_model == 32


def test_budgets_and_seeds_multiply_and_batches_follow_the_budget():
    ladder = plan_of(batch_size=[2, 8], seeds=[0, 1, 2], architectures=["tnl"])
    assert {(run.budget, run.batch_size) for run in ladder.runs} == {(2e9, 2), (5e9, 8)}
    assert len(ladder.runs) == 12
    assert {run.train.seed for run in ladder.runs} == {0, 1, 2}


def test_a_learning_rate_beside_that_of_the_study_is_refused():
    """It would be the rate of every run, whatever `learning_rate`, the plan and a sweep of rates say."""
    with pytest.raises(ConfigError, match=r"train\.optimizer\.learning_rate: cannot be set here; set `learning_rate`"):
        plan_of(train={"optimizer": {"learning_rate": 5.0}})


def test_train_settings_reach_every_run():
    ladder = plan_of(train={"optimizer": {"weight_decay": 0.01}, "schedule": {"name": "wsd"}, "run": {"log_every": 3}})
    for run in ladder.runs:
        assert run.train.optimizer.weight_decay == 0.01
        assert run.train.optimizer.learning_rate == run.learning_rate
        assert run.train.schedule.name == "wsd"
        assert run.train.run.log_every == 3


def test_everything_wrong_is_listed_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        plan_of(
            architectures=["tnl", "hgrm2", {"name": "odd", "layout": "tnl+sglu attention+swigl"}],
            sizes=[[16, 1], [30, 2, 4]],
            data={"source": [str(tmp_path / "nothing.txt")]},
            train={"steps": 5, "schedul": {"name": "cosine"}},
            plugins=["missing.py:Mixer"],
        )
    problems = "\n".join(caught.value.problems)
    assert re.search("'hgrm2' .*'hgrn2'", problems)
    assert problems.count("hgrm2 16x1, 30x2") == problems.count("'hgrm2'") == 1  # one line for all sizes
    assert "tnl 30x2" in problems and "num_heads" in problems
    assert "swigl" in problems
    assert "nothing.txt" in problems
    assert "train.steps" in problems
    assert "train.schedul" in problems and "'schedule'" in problems
    assert "missing.py" in problems


@pytest.mark.parametrize("parts", [3, 24])
def test_parts_of_a_batch_are_not_compared_with_another_batch_than_that_of_the_study(parts):
    wrong = VALUES | {"minimum_stepz": 3, "batch_size": 240, "train": {"accumulation": parts, "batch_ramp": 0.5}}
    with pytest.raises(ConfigError) as caught:
        parse(StudyConfig, wrong)
    assert "minimum_stepz" in str(caught.value) and "accumulation" not in str(caught.value)


def test_evaluations_are_checked_before_any_run(tmp_path):
    (text := tmp_path / "book.txt").write_text("some text to train on\n" * 500)
    needles = {"kind": "needle", "lengths": [20]}
    asked = {"evaluations": [{"kind": "text", "paths": [str(text)]}, needles]}
    with pytest.raises(ConfigError) as caught:
        plan_of(data={"source": [str(text)]}, train=asked)
    trained_on, short = caught.value.problems  # one line each for all runs
    assert trained_on.startswith("train.evaluations.0 (text): paths: ")
    assert short.startswith("train.evaluations.1 (needle): ")
    with pytest.raises(ConfigError) as caught:  # the tokenizer is not trained yet
        plan_of(data={"source": [str(text)], "tokenizer": "bpe:300"}, train=asked | {"schedul": 1})
    assert [line.partition(":")[0] for line in caught.value.problems] == ["train.schedul"]
    with pytest.raises(ConfigError) as caught:
        plan_of(data={"source": [str(text)], "tokenizer": "bpe:300"}, train=asked)
    assert caught.value.problems == [trained_on]
    asked["evaluations"] = asked["evaluations"][:1]
    config = parse(StudyConfig, VALUES | {"data": {"source": [str(tmp_path)]}, "train": asked})
    assert plan(config, check_data=False).runs  # `--plan` needs no files


def test_what_is_not_there_is_told_once_and_before_any_run(tmp_path, monkeypatch):
    (tokenizer := tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        plan_of(
            data={"source": [__file__], "tokenizer": {"kind": "file", "path": str(tokenizer)}}, train={"schedul": 1}
        )
    first, second = caught.value.problems
    assert first.startswith("data.tokenizer: ") and second.startswith("train.schedul: ")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="train.run.loggers: 'wandb'"):
        plan_of(data={"source": [__file__]}, train={"run": {"loggers": ["wandb"]}})


def test_a_changed_plugin_makes_other_runs(tmp_path):
    file = tmp_path / "mine.py"
    text = (
        "from linnet.layers.base import register_mixer\n"
        "from linnet.layers.mixers.softmax.attention import Attention, AttentionConfig\n"
        "@register_mixer('mine_{}', AttentionConfig)\n"
        "class Mine(Attention):\n    pass\n"
    )
    file.write_text(text.format("ladder"))
    changes = {"plugins": [f"{file}:Mine"], "architectures": ["llama", "mine_ladder"]}
    before = {run.run: run.architecture for run in plan_of(**changes).runs}
    file.write_text(text.format("ladder") + "# another version\n")
    after = {run.run: run.architecture for run in plan_of(**changes).runs}
    assert {before[run] for run in set(before) & set(after)} == {"llama"}


@pytest.mark.parametrize("name", ["demo", "scaling-laws-000", "scaling-laws-000-shape", "scaling-laws-000-context"])
def test_configs_of_the_repository_can_be_planned(name, request):
    config = parse(StudyConfig, read_yaml(request.config.rootpath / "configs" / f"{name}.yaml"))
    ladder = plan(config, check_data=False)
    if name == "demo":
        assert len(config.architectures) == 5
        assert len(config.budgets) >= 3
        groups = {}
        for run in ladder.runs:
            groups.setdefault((run.architecture, run.budget), set()).add(run.params_non_embedding)
        assert len(groups) == 5 * len(config.budgets)
        assert min(len(sizes) for sizes in groups.values()) >= 5
        assert min(run.params_non_embedding for run in ladder.runs) < 20_000
    elif name == "scaling-laws-000":  # 300B tokens at 480 x 8192 are 76,294 steps
        assert len(ladder.runs) == 24
        assert {run.steps for run in ladder.runs} == {76_294}
        assert {run.learning_rate for run in ladder.runs} == {3e-4}
    else:
        assert {round(run.tokens / 1e9) for run in ladder.runs} == {300}


def test_rates_vary_at_the_median_target_and_size():
    def run(size, seed=0):
        return SimpleNamespace(seed=seed, params_non_embedding=size)

    targets = {3e9: [run(1)], 2e9: [run(30), run(20), run(10), run(20, seed=1)], 1e9: [run(2)]}
    assert (_middle(targets).params_non_embedding, _middle(targets).seed) == (20, 0)
    assert _middle({1e9: [run(1)], 2e9: [run(2)]}).params_non_embedding == 1  # of two in the middle the smaller
