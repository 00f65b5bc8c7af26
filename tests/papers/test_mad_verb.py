"""The verb `mad`: forms of the published implementation, and scores by both numbers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from linnet.config import ConfigError
from linnet.mad.settings import BUDGETS, Budget, GridPoint
from linnet.papers.verbs import mad
from linnet.papers.verbs.base import Job, read_planned
from linnet.runs import RunFolder

TINY = {"epochs": 1, "batch_size": 16, "max_samples": 32, "held_out": 32}
CONFIG = {"architectures": ["gla+swiglu"], "budget": "smoke", "tasks": ["memorization"], "set": {"d_model": 16}}


def job(folder: Path, **changes) -> Job:
    step, form = SimpleNamespace(name="layers"), SimpleNamespace(throughput=None)
    return Job("004 x, layers", step, form, CONFIG | {"state": 0} | changes, {}, [3], folder, folder)


def test_runs_that_failed_are_counted_apart_from_those_that_are_not_finished(monkeypatch, tmp_path):
    def train(work, **options):
        for planned in work.missing[:2]:
            RunFolder.create(work.folder / "runs", planned.config).write_error("out of memory")

    monkeypatch.setattr(mad, "train", train)
    mad.run(asked := job(tmp_path), {}, Console(quiet=True))
    done = mad.collect(asked, read_planned(asked), {})
    assert len(done.failed) == 2 and all((path / "error.txt").is_file() for path in done.failed)
    planned = sum(len(names) for names in read_planned(asked)[0].about["runs"].values())
    assert done.runs == 0 and done.unfinished == planned - 2


@pytest.mark.thorough
def test_layers_and_numbers(monkeypatch, tmp_path):
    monkeypatch.setitem(BUDGETS, "smoke", Budget("smoke", "", True, False, grid=(GridPoint(1e-2, 0.0),), **TINY))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = job(tmp_path, spec="mad-lab", layers="mad-lab")
    mad.run(asked, {}, Console(quiet=True))
    done = mad.collect(asked, read_planned(asked), {})
    [record] = done.records
    assert (record.label, record.seed) == ("gla+swiglu", 3)
    assert {"score", "score_macro_batch", "score_macro_batch_test", "memorization"} <= record.values.keys()
    assert record.values["score_macro_batch_test"] >= record.values["score_macro_batch"]
    [config] = [RunFolder(path.parent).config for path in done.folder.glob("runs/*/result.json")]
    assert config["layers"] == "mad-lab" and config["options"]["spec"] == "mad-lab" and config["model"]["head_bias"]
    with pytest.raises(ConfigError, match="spec 'paper': the budget published is defined with mad-lab"):
        mad.check(job(tmp_path, budget="published", spec="paper"))
