"""The forms of the published implementation, the budgets `screen` and `published`, bundles of several vocabularies."""

import io
import json
import shutil

import pytest
from mad_folders import train_mad, write_mad
from rich.console import Console

from linnet.config import ConfigError
from linnet.mad import bundle, run
from linnet.mad.architectures import architecture, has_nominal_state, state_size
from linnet.mad.results import read_results
from linnet.mad.run import bundles, forms, mad_runs, prepare
from linnet.mad.scores import (
    PUBLISHED,
    all_numbers,
    folder_agreement,
    number_of_results,
    rank_correlation,
    refusal,
    score,
    seed_agreement,
    spreads,
)
from linnet.mad.settings import BUDGETS, Budget, GridPoint, plan
from linnet.mad.training import MAD_LAB, Training, Watch
from linnet.mad.waterfall import STEPS, prepare_waterfall, train_waterfall, waterfall_rows
from linnet.runs import RunFolder
from linnet.study.executors import ExecutorConfig
from linnet.train.together import Ensemble

SMALL = {"d_model": 16, "options": {"gla": {"num_heads": 2}, "swiglu": {"inner": 16}}}
TINY = {"epochs": 2, "batch_size": 16, "max_samples": 40, "held_out": 32}


def small(monkeypatch, settings, grid=((1e-3, 0.0), (1e-2, 0.1)), **changes):
    """Makes the budget smoke a tiny one of some settings."""
    points = tuple(GridPoint(*point) for point in grid)
    budget = Budget("smoke", "tiny", False, False, grid=points, settings=tuple(settings), **TINY | changes)
    monkeypatch.setitem(BUDGETS, "smoke", budget)


def results(folder):
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/*/result.json")}
    return {name: {key: value for key, value in one.items() if key != "date"} for name, one in found.items()}


def test_screen_is_26_settings_at_four_points():
    runs = plan("screen")
    assert len({one.setting.name for one in runs}) == 26 and len(runs) == 104
    assert sum(one.steps for one in runs) == 589_600
    assert {tuple(one.point) for one in runs} == {(rate, decay) for rate in (5e-4, 1e-3) for decay in (0, 0.1)}
    counts = {
        task: len({one.setting.name for one in runs if one.setting.task.name == task})
        for task in BUDGETS["screen"].tasks
    }
    assert list(counts.values()) == [4, 4, 4, 4, 4, 6]
    assert {one.setting.name for one in plan("screen", spec="mad-lab")} == {one.setting.name for one in runs}


def test_published_is_defined_with_the_forms_of_the_implementation():
    runs = plan("published")
    assert len(runs) == 396 and {one.setting.task.spec for one in runs} == {"mad-lab"}
    assert forms("published") == ("mad-lab", "mad-lab", "mad-lab") and forms("core") == ("paper", "paper", "paper")
    assert forms("screen", "mad-lab", "mad-lab") == ("mad-lab", "mad-lab", "mad-lab")
    assert forms("core", spec="mad-lab", training="paper") == ("mad-lab", "paper", "paper")
    with pytest.raises(ConfigError) as told:
        forms("published", "paper", "paper", "paper")
    assert [problem.partition(" ")[0] for problem in told.value.problems] == ["spec", "layers", "training"]
    with pytest.raises(ConfigError, match="layers 'own' is unknown"):
        forms("core", layers="own")
    models = {"mad-hyena-swiglu": architecture("mad-hyena-swiglu", layers="mad-lab")}
    configs = [
        one.config
        for one in mad_runs(models, "published", settings=["in_context_recall/baseline", "compression/baseline"])
    ]
    assert {one["seed"] for one in configs} == {12345} and {one["layers"] for one in configs} == {"mad-lab"}
    assert {Training.of(one) for one in configs} == {MAD_LAB}
    lengths = {(one["task"], one["input_length"], one["model"]["options"]["hyena"]["filter_length"]) for one in configs}
    assert ("in_context_recall", 127, 128) in lengths and ("compression", 32, 32) in lengths


def test_the_layers_of_the_implementation_keep_their_state():
    multi = architecture("mad-mh-hyena-swiglu", layers="mad-lab")
    assert state_size(multi) == 8192 and has_nominal_state(multi)
    for name in ("mad-hyena-moe", "mad-hyena-experts-swiglu", "mad-mamba", "mad-gla-swiglu", "tnl+swiglu x2"):
        model = architecture(name, layers="mad-lab")
        assert state_size(model) == 4096 and model.head_bias and has_nominal_state(model) == ("hyena" in name)
    assert architecture("tnl+swiglu x2", layers="mad-lab").options["swiglu"]["inner"] == 352
    assert not has_nominal_state(architecture("mad-hyena-swiglu"))


def test_a_folder_is_of_one_form_and_old_folders_are_of_the_paper_s(monkeypatch, tmp_path):
    small(monkeypatch, ["memorization/baseline"])
    models = {"gla+swiglu": architecture("gla+swiglu", SMALL, state=0)}
    train_mad(models, tmp_path)
    path = tmp_path / "plan.json"
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("layers", "training")}
    path.write_text(json.dumps(old))
    with pytest.raises(ConfigError, match="--layers paper, not mad-lab"):
        prepare(models, tmp_path, budget="smoke", device="cpu", layers="mad-lab")
    with pytest.raises(ConfigError, match="--training paper, not mad-lab"):
        prepare(models, tmp_path, budget="smoke", device="cpu", training="mad-lab")
    assert not train_mad(models, tmp_path).failed


VOCABULARIES = ("in_context_recall/baseline", "noisy_recall/frac_noise=0.8")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("form", [pytest.param("paper", marks=pytest.mark.thorough), "mad-lab"])
def test_settings_of_several_vocabularies_share_a_bundle_and_equal_single_runs(monkeypatch, tmp_path, form):
    small(monkeypatch, VOCABULARIES, grid=((1e-2, 0.1),))
    model = architecture("gla+swiglu", SMALL, state=0, layers=form)
    models, options = {"gla+swiglu": model}, {"layers": form, "spec": form, "seeds": [0, 1]}
    planned = mad_runs(models, "smoke", **options)
    assert [len(group) for group in bundles(planned, 24)] == [4]
    train_mad(models, tmp_path / "one", bundle=1, **options)
    train_mad(models, tmp_path / "all", bundle=24, **options)
    single, together = results(tmp_path / "one"), results(tmp_path / "all")
    assert len(single) == 4 and {one["bundle"] for one in together.values()} == {4}
    assert len({one["parameters"] for one in together.values()}) == 2, "without padding: 16 ids and 32"
    for name, one in single.items():
        other = together[name]
        assert other["parameters"] == one["parameters"]
        for key in ("loss", "train_loss", "validation_loss"):
            assert other[key] == pytest.approx(one[key], rel=1e-4)
        for key in ("accuracy", "macro_batch"):
            assert other[key] == pytest.approx(one[key], abs=0.01)


def test_large_vocabularies_are_not_padded():
    models = {"gla+swiglu x2": architecture("gla+swiglu x2")}
    groups = bundles(mad_runs(models, "screen", tasks=["memorization"]), 24)
    sizes = sorted(sorted({run.config["model"]["vocab_size"] for run in group}) for group in groups)
    assert sizes == [[257, 513], [1025], [2049], [4097], [8193]]
    groups = bundles(mad_runs(models, "full"), 96)
    whole = [group for group in groups if group[0].config["input_length"] == 128 and len(group) == 90]
    assert len({run.config["setting"] for run in whole[0]}) == 15


@pytest.fixture
def early(monkeypatch):
    """Members that learn quickly end after the first epoch, and the others never: the first of two groups of three."""
    small(monkeypatch, ["memorization/baseline"], grid=((1e-3, 0.0), (1e-2, 0.0), (1e-2, 0.1)), epochs=4)
    names, init = [], Watch.__init__

    def named(self, runs, *arguments, **options):
        init(self, runs, *arguments, **options)
        names[:] = [run["learning_rate"] for run in runs]

    score_all = Ensemble.score

    def scored(self, *arguments):
        found = score_all(self, *arguments)
        return [
            type(one)(one.loss, one.accuracy, 1.0 if rate > 5e-3 else 0.0)
            for one, rate in zip(found, names, strict=True)
        ]

    monkeypatch.setattr(Watch, "__init__", named)
    monkeypatch.setattr(Ensemble, "score", scored)
    return {"gla+swiglu": architecture("gla+swiglu", SMALL, state=0)}


def test_runs_that_end_early_are_written_and_the_others_go_on_as_a_smaller_bundle(early, monkeypatch, tmp_path):
    sizes, step = [], Ensemble.step
    monkeypatch.setattr(Ensemble, "step", lambda self, *batch: sizes.append(self.size) or step(self, *batch))
    options = {"training": "mad-lab"}
    train_mad(early, tmp_path / "all", bundle=3, **options)
    assert sizes == [3] * 3 + [1] * 9, "three steps an epoch"
    found = results(tmp_path / "all")
    assert sorted(one["bundle"] for one in found.values()) == [1, 3, 3]
    assert not list(tmp_path.glob("all/runs/*/checkpoints"))
    train_mad(early, tmp_path / "one", bundle=1, **options)
    for name, one in results(tmp_path / "one").items():
        assert one["epoch"] == found[name]["epoch"]
        assert one["steps"] == found[name]["steps"] == (3 if one["learning_rate"] > 5e-3 else 12)
        assert one["loss"] == pytest.approx(found[name]["loss"], rel=1e-4)
        curves = [RunFolder(tmp_path / part / "runs" / name).metrics() for part in ("one", "all")]
        assert [row["loss"] for row in curves[0]] == pytest.approx([row["loss"] for row in curves[1]], rel=1e-4)


@pytest.mark.parametrize("most", [3, pytest.param(5, marks=pytest.mark.thorough)])
def test_a_kill_beside_an_early_end_loses_no_more_than_an_epoch(early, monkeypatch, tmp_path, most):
    """Killed before the results of the ended runs are written (after their checkpoint), or among the later epochs."""
    monkeypatch.setattr(bundle, "SECONDS", 0.0)
    options = {"training": "mad-lab", "bundle": 3}
    train_mad(early, tmp_path / "whole", **options)
    step, made, write = Ensemble.step, [], run.train_bundle.__globals__["write_results"]

    def limited(self, *batch):
        if len(made) == most + 1:
            raise KeyboardInterrupt
        made.append(self.step_number)
        return step(self, *batch)

    def killed(*arguments):
        raise KeyboardInterrupt

    if most == 3:
        monkeypatch.setitem(run.train_bundle.__globals__, "write_results", killed)
    monkeypatch.setattr(Ensemble, "step", limited)
    with pytest.raises(KeyboardInterrupt):
        train_mad(early, tmp_path / "killed", **options)
    assert len(results(tmp_path / "killed")) == (0 if most == 3 else 2)
    monkeypatch.setitem(run.train_bundle.__globals__, "write_results", write)
    monkeypatch.setattr(Ensemble, "step", lambda self, *batch: made.append(self.step_number) or step(self, *batch))
    made[:] = []
    train_mad(early, tmp_path / "killed", **options)
    assert made[0] == (3 if most == 3 else 6)
    whole, again = results(tmp_path / "whole"), results(tmp_path / "killed")
    for name, one in whole.items():
        assert (again[name]["loss"], again[name]["epoch"]) == (pytest.approx(one["loss"], rel=1e-4), one["epoch"])
        assert again[name]["steps"] == one["steps"]
    assert not list(tmp_path.glob("killed/runs/*/checkpoints"))


def test_published_scores_use_their_own_number_and_selection(tmp_path):
    names = ["mad-attention-swiglu", "mad-gla-swiglu", "mad-mamba"]
    found = read_results(write_mad(tmp_path, names, budget="published", spec="mad-lab"))
    assert number_of_results(found) == {"metric": "macro_batch", "legacy": True}
    every = all_numbers(found)
    assert set(every) == {(metric, legacy) for metric in ("accuracy", "macro_batch") for legacy in (False, True)}
    own = score(found, **number_of_results(found))
    assert own["mad-mamba"].comparable and "as published" in own.labels[0]
    assert own["mad-mamba"].score == every["macro_batch", True]["mad-mamba"].score
    assert every["macro_batch", False]["mad-mamba"].score <= own["mad-mamba"].score
    assert number_of_results(read_results(write_mad(tmp_path / "core", names))) == {
        "metric": "accuracy",
        "legacy": False,
    }
    assert refusal("published") is None and len(PUBLISHED) == 5
    assert all("not shown beside published" in refusal(name) for name in ("core", "full", "screen", "smoke", ""))
    for values in PUBLISHED.values():
        assert values["all"] == pytest.approx(sum(v for k, v in values.items() if k != "all") / 6, abs=0.06)


def test_agreement_of_seeds_and_folders(tmp_path):
    levels = {"a": 0.9, "b": 0.7, "c": 0.5, "d": 0.3}
    found = read_results(write_mad(tmp_path / "screen", levels, budget="screen", seeds=(0, 1)))
    scores = score(found)
    assert scores["a"].comparable and "screen" in scores.labels[0]
    gaps = spreads(scores)
    assert len(gaps) == 6 and all((one.best, one.worst) == ("a", "d") for one in gaps if one.discriminates)
    [pair] = seed_agreement(found)
    assert pair.seeds == (0, 1) and pair.swaps == 0 and pair.spearman == pytest.approx(1.0)
    assert pair.orders == (("a", "b", "c", "d"),) * 2
    other = score(read_results(write_mad(tmp_path / "full", levels | {"e": 0.1}, budget="full")))
    both = folder_agreement(scores, other)
    assert both.architectures == ("a", "b", "c", "d") and both.spearman["all"] == pytest.approx(1.0)
    assert rank_correlation({"a": 1, "b": 2, "c": 3}, {"a": 3, "b": 2, "c": 1}) == pytest.approx(-1.0)
    assert rank_correlation({"a": 1, "b": 1, "c": 1}, {"a": 3, "b": 2, "c": 1}) is None
    assert rank_correlation({"a": 1, "b": 2, "c": 2, "d": 3}, {"a": 1, "b": 3, "c": 2, "d": 4}) == pytest.approx(
        0.9487, abs=1e-4
    )


def test_tasks_at_100_per_cent_are_named(tmp_path):
    found = read_results(write_mad(tmp_path, {"a": 0.99, "b": 0.97}))
    assert score(found).solved == ["in_context_recall", "noisy_recall"] or score(found).solved == ["in_context_recall"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_waterfall_changes_one_thing_at_a_step(monkeypatch, tmp_path):
    small(monkeypatch, ["memorization/baseline", "compression/baseline"], grid=((1e-2, 0.0),))
    console = Console(file=io.StringIO())
    changes = {"d_model": 16, "options": {"gla": {"num_heads": 2}}}
    where = ExecutorConfig(kind="inline", retries=0)
    options = {"budget": "smoke", "device": "cpu", "changes": changes, "executor": where}
    assert not train_waterfall(prepare_waterfall(tmp_path, ["gla"], **options), console)
    rows = waterfall_rows(tmp_path)
    assert [row["step"] for row in rows] == ["smoke", *(step.name for step in STEPS[1:])]
    assert all("smoke score" in row["note"] for row in rows)
    assert rows[0]["change"] is None
    assert sum(row["change"] for row in rows[1:]) == pytest.approx(rows[-1]["score"] - rows[0]["score"])
    configs = {
        step.folder: [RunFolder(path.parent).config for path in (tmp_path / step.folder).glob("runs/*/result.json")]
        for step in STEPS
    }
    assert {name: len(found) for name, found in configs.items()} == dict.fromkeys(
        ("core", "tasks", "training", "layers"), 2
    )
    for folder, spec, training, layers in (
        ("core", "paper", None, None),
        ("tasks", "mad-lab", None, None),
        ("training", "mad-lab", MAD_LAB.to_dict(), None),
        ("layers", "mad-lab", MAD_LAB.to_dict(), "mad-lab"),
    ):
        for one in configs[folder]:
            assert (one["options"]["spec"], one.get("training"), one.get("layers")) == (spec, training, layers)
    with pytest.raises(ConfigError, match="published"):
        waterfall_rows(tmp_path, tmp_path / "core")
    stamps = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*/runs/*/result.json"))]
    train_waterfall(prepare_waterfall(tmp_path, ["gla"], **options))
    assert stamps == [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*/runs/*/result.json"))]

    partial = tmp_path / "partial"  # a change is that of the same tasks
    for step in ("core", "tasks", "training", "layers"):
        shutil.copytree(tmp_path / step, partial / step, ignore=shutil.ignore_patterns("runs"))
    table = partial / "tasks" / "mad.csv"
    table.write_text("".join(line for line in table.open() if "memorization" not in line))
    shown = {row["step"]: row["change"] for row in waterfall_rows(partial)}
    assert shown["tasks"] is shown["training"] is None and shown["layers"] is not None
    shutil.rmtree(partial)

    shutil.rmtree(tmp_path / "layers")  # steps that the known folder has are not trained; this one is
    monkeypatch.setattr(Ensemble, "step", None)
    other = tmp_path / "other"
    failed = train_waterfall(prepare_waterfall(other, ["gla"], known=tmp_path, **options))
    assert set(failed) == {path.parent.name for path in other.glob("layers/runs/*/config.yaml")} and len(failed) == 2
    assert len(list(other.glob("*/runs/*/result.json"))) == 6
    with pytest.raises(ConfigError, match="has no mad.csv in core, tasks, training, layers"):
        prepare_waterfall(other, ["gla"], known=tmp_path / "core", **options)
