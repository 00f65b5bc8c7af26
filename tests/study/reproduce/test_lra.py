"""002 Table 7 reads the user's folder of the Long Range Arena, and averages its six tasks."""

import json
import shutil

import numpy as np
import pytest
import yaml
from reproduce_items import LIBRARY

from linnet.config import ConfigError
from linnet.data.lra import LraDataConfig, lra_task
from linnet.study.reproduce.library import DATA, ITEMS, PAPER, read_library
from linnet.study.reproduce.run import Request, prepare, run
from linnet.study.reproduce.verbs import Job, Outcome, Record, find_verb
from linnet.train import read_training
from linnet.train.objectives import find_objective
from linnet.train.objectives.sequences import LONGEST

SMALL = {  # of every training of the full form: a model and a number of steps that a CPU finishes at once
    **{"model.d_model": 8, "model.layout": "hgrn2+swiglu", "model.scan": "both", "model.positions": "none"},
    **{"model.options": {"hgrn2": {"num_heads": 2}, "swiglu": {"inner": 8}}, "precision": "float32"},
    **{"batch_size": 2, "steps": 1, "schedule.warmup": 0.5, "schedule.length": None, "run.evaluate_every": 1},
}
ROWS = {"data.samples": {"train": 4, "validation": 2, "test": 4}}
HGRN = {"model.layout": "hgrn+swiglu", "model.options": {"hgrn": {"complex": True}, "swiglu": {"inner": 8}}}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The item with its own steps, data and columns, which needs no GPU; the full form has small models."""
    folder = tmp_path_factory.mktemp("items")
    shutil.copytree(ITEMS / "002" / "configs", folder / "002" / "configs")
    shutil.copy(ITEMS / DATA, folder / DATA)
    (folder / "002" / PAPER).write_text("title: HGRN2\n")
    values = yaml.safe_load((ITEMS / "002" / "table7.yaml").read_text("utf-8"))
    values["full"]["device"] = "cpu"
    for step in values["full"]["steps"]:
        if step["verb"] == "train":
            step["set"] = step.get("set", {}) | SMALL | ({} if "needs" in step else ROWS)
            step["vary"] = {"hgrn2": {}, "hgrn": HGRN}
    for step in values["reduced"]["steps"]:
        if "needs" in step:
            step["device"] = "cpu"
            step["set"] |= {"batch_size": 2, "steps": 1, "precision": "float32", "run.evaluate_every": 1}
            step["set"]["schedule"] = {"name": "cosine", "warmup": 0.5}
    (folder / "002" / "table7.yaml").write_text(json.dumps(values))
    return read_library(folder)


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """A folder as docs/lra.md describes it: made-up reviews, pairs and images in the published forms."""
    folder = tmp_path_factory.mktemp("lra")
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            (folder / "text" / "aclImdb" / split / label).mkdir(parents=True)
            for number in range(10):
                path = folder / "text" / "aclImdb" / split / label / f"{number}_1.txt"
                path.write_text(f"{label} {split} {number} " * 3, "utf-8")
    (folder / "retrieval").mkdir()
    for name in ("train", "eval", "test"):
        lines = [f"{number % 2}.0\ta\tb\tone {name}\ttwo {number}" for number in range(6)]
        (folder / "retrieval" / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "image").mkdir()
    rng = np.random.default_rng(0)
    images = {f"x_{part}": rng.integers(0, 256, (20, 32, 32, 3)).astype(np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": np.arange(20) % 10 for part in ("train", "test")}
    np.savez(folder / "image" / "cifar.npz", **images, **labels)
    return folder


def table7(library, **request):
    (work,) = prepare(library, library.find("002", ["table7"]), Request(**{"scale": "full", **request}))
    return work


@pytest.mark.parametrize("scale, rows", [("full", {"hgrn", "hgrn2"}), ("reduced", {"hgrn", "hgrn2", "transformer"})])
def test_the_folder_of_the_user_fills_its_columns(small, arena, tmp_path, scale, rows):
    pytest.importorskip("PIL.Image")
    only = ("text", "retrieval", "image", "image-as-published")
    result = run(table7(small, scale=scale, out=tmp_path, only=only, data={"lra": str(arena)}, seeds=(0,)))
    for row in rows:
        cells = result["rows"][row]
        found = {column for column, cell in cells.items() if "measured" in cell}
        assert found == {"text", "retrieval", "image", "image_grey"}
        assert all(0 <= cells[column]["measured"] <= 100 for column in found)
    assert not result["notes"] and result["skipped"]["listops"] == "left out by --only"
    tasks = {}
    for path in tmp_path.glob(f"own-002-table7/{scale}/*/*/config.yaml"):
        data = yaml.safe_load(path.read_text("utf-8"))["data"]
        tasks[path.parents[1].name] = (data["task"], data["source"])
    assert tasks == {name: (name, str(arena / name.removesuffix("-as-published"))) for name in only}


def test_without_the_folder_its_tasks_are_skipped_with_the_reason(small, tmp_path):
    work = table7(small, out=tmp_path)
    reason = "needs --data lra=FOLDER"
    assert work.skipped == dict.fromkeys(("text", "retrieval", "image", "image-as-published"), reason)
    assert list(work.jobs) == ["listops", "pathfinder", "path-x", "average"]
    with pytest.raises(ConfigError, match="retrieval: data.source: '.*retrieval' is not a folder"):
        table7(small, out=tmp_path, only=("retrieval",), data={"lra": str(tmp_path)})


@pytest.mark.parametrize("task", ["text", "retrieval", "image", "image-as-published"])
def test_a_task_costs_the_same_before_its_folder_is_there(arena, task):
    """Its plan may use no number that the folder contradicts."""
    pytest.importorskip("PIL.Image")
    values = {"objective": "sequences", "model": {"d_model": 8, "layout": "hgrn+swiglu"}, "steps": 1}
    values["optimizer"] = {"learning_rate": 1e-3}
    flops = []
    for source in (str(arena / task.removesuffix("-as-published")), "/nowhere"):
        config = read_training({**values, "data": {"task": task, "source": source}}, task)
        flops.append(find_objective(config).step_flops(config))
    assert flops[0] == flops[1] > 0
    task_of = LraDataConfig(task=task, source=str(arena / task.removesuffix("-as-published")))
    assert LONGEST[task] == (lra_task(task_of).kind, lra_task(task_of).max_length)


def outcomes(values):
    """Trainings of both rows with two seeds; `values` maps a step to (hgrn, hgrn2) of seed 0, 0.01 more for seed 1."""
    found = {}
    for name, pair in values.items():
        rows = zip(("hgrn", "hgrn2"), pair, strict=True)
        found[name] = Outcome(
            [Record(row, seed, {"test_accuracy": value + seed / 100}) for row, value in rows for seed in (0, 1)]
        )
    return found


def averages(work, given):
    job: Job = work.jobs["average"]
    verb = find_verb("mean")
    return {(one.label, one.seed): one for one in verb.collect(job, [], given).records}


VALUES = {
    **{"listops": (0.60, 0.61), "text": (0.88, 0.89), "retrieval": (0.94, 0.95), "image": (0.1, 0.1)},
    **{"image-as-published": (0.88, 0.89), "pathfinder": (0.93, 0.94), "path-x": (0.97, 0.98)},
}


def test_the_average_is_that_of_the_six_printed_tasks(small, tmp_path):
    work = table7(small, out=tmp_path, planning=True)
    found = averages(work, outcomes(VALUES))
    assert found["hgrn", 0].values["test_accuracy"] == pytest.approx(5.20 / 6)  # without the grey images
    assert found["hgrn2", 1].values["test_accuracy"] == pytest.approx(5.26 / 6 + 0.01)
    assert set(work.costs["average"].labels) == {"hgrn", "hgrn2"}


def test_a_missing_task_leaves_no_average(small, tmp_path):
    work = table7(small, out=tmp_path, planning=True)
    assert not averages(work, outcomes({name: pair for name, pair in VALUES.items() if name != "path-x"}))
    given = outcomes(VALUES)
    *others, _ = given["text"].records  # HGRN2 with seed 1 is not trained yet
    given["text"] = Outcome(others, unfinished=1)
    assert set(averages(work, given)) == {("hgrn", 0), ("hgrn", 1), ("hgrn2", 0)}
    given["text"] = Outcome([*others, Record("hgrn2", 1, failed="the run diverged")])
    assert averages(work, given)["hgrn2", 1].failed == "text: the run diverged"


def test_the_claim_on_the_average_is_judged(small, tmp_path):
    """By the table of the item, from runs of all six tasks."""
    from linnet.study.reproduce.run import table

    work = table7(small, out=tmp_path, planning=True)
    given = outcomes({name: (pair[0], pair[1] + 0.001 * number) for number, (name, pair) in enumerate(VALUES.items())})
    for record in given["text"].records:
        record.values["test_accuracy"] += 0.002 * (record.seed or 0) * (record.label == "hgrn2")
    given["average"] = find_verb("mean").collect(work.jobs["average"], [], given)
    result = table(work, given)
    verdicts = {one["claim"]: one["verdict"] for one in result["verdicts"]}
    assert verdicts["hgrn < hgrn2 on average"] == "holds"
    cell = result["rows"]["hgrn"]["average"]
    assert cell["measured"] == pytest.approx(100 * 5.20 / 6 + 0.5) and cell["inside"] is True


def test_a_mean_of_steps_that_are_not_there_is_refused(tmp_path):
    (entry,) = LIBRARY.find("002", ["table7"])
    (work,) = prepare(LIBRARY, [entry], Request(scale="full", out=tmp_path, planning=True))
    job = work.jobs["average"]
    job.values["steps"] = ["listopps", "text"]
    with pytest.raises(ConfigError, match="steps: 'listopps' is not an earlier train step; .*listops"):
        find_verb("mean").check(job)
