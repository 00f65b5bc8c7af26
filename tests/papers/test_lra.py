"""002 Table 7 reads the user's folder of the Long Range Arena, and averages its six tasks."""

import io
import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from reproduce_items import LIBRARY
from rich.console import Console

from linnet.config import ConfigError
from linnet.encoders.lra import LraDataConfig, lra_task
from linnet.encoders.train import LONGEST
from linnet.papers.cli import print_plan
from linnet.papers.library import DATA, ITEMS, PAPER, read_library
from linnet.papers.prepare import prepare
from linnet.papers.run import run
from linnet.papers.table import Request, table
from linnet.papers.verbs import Job, Outcome, Record, find_verb
from linnet.train import read_training
from linnet.train.objectives import find_objective
from linnet.train.optimizer import warning

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
    counts = {"train": 20, "test": 3}  # of the test split every model reads all
    images = {f"x_{part}": rng.integers(0, 256, (n, 32, 32, 3)).astype(np.uint8) for part, n in counts.items()}
    labels = {f"y_{part}": np.arange(n) % 10 for part, n in counts.items()}
    np.savez(folder / "image" / "cifar.npz", **images, **labels)
    return folder


def table7(library, **request):
    (work,) = prepare(library, library.find("002", ["table7"]), Request(**{"scale": "full", **request}))
    return work


@pytest.mark.parametrize("scale, rows", [("full", {"hgrn", "hgrn2"}), ("reduced", {"hgrn", "hgrn2", "transformer"})])
def test_the_folder_of_the_user_fills_its_columns(small, arena, tmp_path, scale, rows):
    pytest.importorskip("PIL.Image")
    only = ("text", "retrieval", "image", "image-as-published") + ("text-as-published",) * (scale == "full")
    result = run(table7(small, scale=scale, out=tmp_path, only=only, data={"lra": str(arena)}, seeds=(0,)))
    for row in rows:
        cells = result["rows"][row]
        found = {column for column, cell in cells.items() if "measured" in cell}
        best = {"text", "text_held_out", "retrieval", "image", "image_grey"}
        assert found == best | {f"{column}_last" for column in best}
        assert all(0 <= cells[column]["measured"] <= 100 for column in found)
    assert not result["notes"] and result["skipped"]["listops"] == "left out by --only"
    tasks = {}
    for path in tmp_path.glob(f"own-002-table7/{scale}/*/*/config.yaml"):
        data = yaml.safe_load(path.read_text("utf-8"))["data"]
        tasks[path.parents[1].name] = (data["task"], data["source"])
    sources = {name: str(arena / name.removesuffix("-as-published")) for name in only}
    assert tasks == {name: (name.replace("text-as-published", "text"), source) for name, source in sources.items()}


def test_without_the_folder_its_tasks_are_skipped_with_the_reason(small, tmp_path):
    work = table7(small, out=tmp_path)
    reason = "needs --data lra=FOLDER"
    skipped = ("text", "text-as-published", "retrieval", "image", "image-as-published")
    assert work.skipped == dict.fromkeys(skipped, reason)
    assert list(work.jobs) == ["listops", "pathfinder", "path-x", "average", "average-last"]
    with pytest.raises(ConfigError, match="retrieval: data.source: '.*retrieval' is not a folder"):
        table7(small, out=tmp_path, only=("retrieval",), data={"lra": str(tmp_path)})


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_steps_that_cannot_run_are_refused_with_what_their_data_lack(cpu, tmp_path):
    (tmp_path / "lra" / "text" / "train" / "pos").mkdir(parents=True)
    request = {"scale": "reduced", "only": ("text", "retrieval"), "data": {"lra": str(tmp_path / "lra")}}
    with pytest.raises(ConfigError) as error:
        table7(LIBRARY, **request, out=tmp_path / "out")
    text = str(error.value)
    assert "no step can run here (text: needs a GPU; retrieval: needs a GPU)" in text and "--only listops" in text
    assert "text: has no test split" in text and "retrieval' is not a folder" in text
    with pytest.raises(ConfigError, match="retrieval' is not a folder"):
        table7(LIBRARY, **request, out=tmp_path / "out", planning=True)
    assert not (tmp_path / "out").exists()


def test_a_plan_says_which_steps_are_skipped_here(cpu, tmp_path):
    work = table7(LIBRARY, scale="reduced", only=("listops", "text"), seeds=(0,), out=tmp_path, planning=True)
    reason = "needs --data lra=FOLDER and a GPU"
    assert list(work.costs) == ["listops", "text"] and work.elsewhere == {"text": reason}
    print_plan(work, Console(file=(shown := io.StringIO()), width=200))
    assert (
        f"text: will be skipped here ({reason})\nneeds cpu, data lra and a GPU for text; seeds 0\n" in shown.getvalue()
    )
    assert "stated in the item, for all its steps and seeds 0, 1, 2: CPU 20 min, estimated" in shown.getvalue()


def test_a_claim_names_the_step_that_would_measure_it(cpu, tmp_path):
    work = table7(LIBRARY, scale="reduced", only=("listops", "text"), seeds=(0,), out=tmp_path)
    found = {one["claim"]: one["reason"] for one in table(work, {})["verdicts"]}
    assert found["transformer < hgrn2 on listops"] == "listops is not run: not run yet"
    assert found["transformer < hgrn2 on text"] == "text is not run: needs --data lra=FOLDER and a GPU"
    assert found["transformer < hgrn2 on image"] == "image-as-published is not run: left out by --only"
    assert found["hgrn < hgrn2 on path_x"] == "no step of the reduced form measures hgrn on path_x"


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
            [
                Record(row, seed, {"best_test_accuracy": value + seed / 100, "test_accuracy": value - 0.1})
                for row, value in rows
                for seed in (0, 1)
            ]
        )
    return found


def averages(work, given):
    job: Job = work.jobs["average"]
    verb = find_verb("mean")
    return {(one.label, one.seed): one for one in verb.collect(job, [], given).records}


VALUES = {
    **{"listops": (0.60, 0.61), "text": (0.2, 0.2), "text-as-published": (0.88, 0.89), "retrieval": (0.94, 0.95)},
    **{"image": (0.1, 0.1), "image-as-published": (0.88, 0.89), "pathfinder": (0.93, 0.94), "path-x": (0.97, 0.98)},
}


def test_the_average_is_that_of_the_six_printed_tasks(small, tmp_path):
    work = table7(small, out=tmp_path, planning=True)
    found = averages(work, outcomes(VALUES))
    printed = found["hgrn", 0].values["best_test_accuracy"]
    assert printed == pytest.approx(5.20 / 6)  # without the grey images and the Text that holds out reviews
    assert found["hgrn2", 1].values["best_test_accuracy"] == pytest.approx(5.26 / 6 + 0.01)
    assert set(work.costs["average"].labels) == {"hgrn", "hgrn2"}


def test_a_missing_task_leaves_no_average(small, tmp_path):
    work = table7(small, out=tmp_path, planning=True)
    assert not averages(work, outcomes({name: pair for name, pair in VALUES.items() if name != "path-x"}))
    given = outcomes(VALUES)
    *others, _ = given["text-as-published"].records  # HGRN2 with seed 1 is not trained yet
    given["text-as-published"] = Outcome(others, unfinished=1)
    assert set(averages(work, given)) == {("hgrn", 0), ("hgrn", 1), ("hgrn2", 0)}
    given["text-as-published"] = Outcome([*others, Record("hgrn2", 1, failed="the run diverged")])
    assert averages(work, given)["hgrn2", 1].failed == "text-as-published: the run diverged"


def test_the_claim_on_the_average_is_judged(small, tmp_path):
    """By the table of the item, from runs of all six tasks."""
    work = table7(small, out=tmp_path, planning=True)
    given = outcomes({name: (pair[0], pair[1] + 0.001 * number) for number, (name, pair) in enumerate(VALUES.items())})
    for record in given["text-as-published"].records:
        record.values["best_test_accuracy"] += 0.002 * (record.seed or 0) * (record.label == "hgrn2")
    for name in ("average", "average-last"):
        given[name] = find_verb("mean").collect(work.jobs[name], [], given)
    result = table(work, given)
    verdicts = {one["claim"]: one["verdict"] for one in result["verdicts"]}
    assert verdicts["hgrn < hgrn2 on average"] == "holds"
    cell = result["rows"]["hgrn"]["average"]
    assert cell["measured"] == pytest.approx(100 * 5.20 / 6 + 0.5) and cell["inside"] is True
    last = result["rows"]["hgrn"]["average_last"]
    assert last["measured"] == pytest.approx(100 * (5.20 / 6 - 0.1)) and last["inside"] is None
    best = result["rows"]["hgrn"]["retrieval"]["measured"]
    assert best == pytest.approx(94.5) and result["rows"]["hgrn"]["retrieval_last"]["measured"] == pytest.approx(84.0)


def test_a_repaired_schedule_stands_beside_each_published_one():
    """Every training of HGRN2 has a second row, whose schedule ends with the training."""
    (entry,) = LIBRARY.find("002", ["table7"])
    (work,) = prepare(LIBRARY, [entry], Request(scale="full", planning=True))
    repaired = ("hgrn2-repaired", "hgrn-repaired")
    for name, job in work.jobs.items():
        if job.step.verb == "train":
            assert "hgrn2-repaired" in job.vary
            for label, values in job.vary.items():
                schedule = read_training(values).schedule
                assert (warning(schedule, values["steps"]) is None) == (label in repaired), (name, label)


def test_a_full_form_leaves_only_models_without_scripts_on_other_tasks_to_the_reduced_one():
    (entry,) = LIBRARY.find("002", ["table7"])
    (work,) = prepare(LIBRARY, [entry], Request(scale="full", planning=True))
    (note,) = [line for line in work.notes if "will not be decided" in line]
    cells = ", ".join(f"transformer ({task})" for task in ("text", "retrieval", "image", "pathfinder"))
    # Attention, cosFormer and RG-LRU, on four tasks each.
    assert note.startswith("12 of 23 claims") and note.endswith(f": {cells} and 8 more")


def test_a_mean_of_steps_that_are_not_there_is_refused(tmp_path):
    (entry,) = LIBRARY.find("002", ["table7"])
    (work,) = prepare(LIBRARY, [entry], Request(scale="full", out=tmp_path, planning=True))
    job = work.jobs["average"]
    job.values["steps"] = ["listopps", "text"]
    with pytest.raises(ConfigError, match="steps: 'listopps' is not an earlier train step; .*listops"):
        find_verb("mean").check(job)
