"""The table of a study: one row per started run with its status, written atomically."""

import csv
import errno
import json
import math
import shutil
from pathlib import Path

import pytest

from linnet.config import ConfigError
from linnet.models import flops_004, flops_exact
from linnet.report.records import read_study
from linnet.runs import RunFolder
from linnet.runs.model import read_config
from linnet.study.collect import COLUMNS, as_csv, collect, complete, load_study, read_plan, renew
from linnet.study.differences import read_differences
from linnet.study.rates import read_vertices

RESULT = {
    "status": "done",
    "architecture": "tnl",
    "tokens": 1000,
    "flops": 2.5e9,
    "flops_paper": 2.4e9,
    "loss": 2.345678901234567,
    "bits_per_byte": 3.38,
    "state_bytes": 128,
    "seconds": 1.5,
}


@pytest.fixture
def folder(tmp_path):
    planned = []
    for architecture, size in (("tnl", 20), ("tnl", 10), ("llama", 10), ("llama", 20), ("llama", 30)):
        run = RunFolder.create(tmp_path / "runs", {"architecture": architecture, "size": size})
        planned.append(
            {
                "run": run.path.name,
                "architecture": architecture,
                "budget": 2e9,
                "params_non_embedding": size,
                "params_total": size + 5,
            }
        )
        if (architecture, size) == ("llama", 20):
            run.write_error("the worker died")
        elif (architecture, size) == ("llama", 30):
            run.write_result(RESULT | {"status": "diverged", "loss": float("nan"), "bits_per_byte": None})
        elif architecture == "tnl":
            run.write_result(RESULT)
    planned.append(planned[0] | {"run": "tnl-not-begun"})
    (tmp_path / "plan.json").write_text(json.dumps({"runs": planned}))
    RunFolder.create(tmp_path / "runs", {"architecture": "left over from an earlier plan"})
    return tmp_path


def test_a_row_for_each_run_that_began(folder):
    rows = collect(folder)
    assert [(row["architecture"], row["params_non_embedding"], row["status"]) for row in rows] == [
        ("llama", 10, "unfinished"),
        ("llama", 20, "failed"),
        ("llama", 30, "diverged"),
        ("tnl", 10, "done"),
        ("tnl", 20, "done"),
    ]
    assert rows[3]["loss"] == RESULT["loss"]
    assert all((folder / row["path"] / "config.yaml").is_file() for row in rows)


def test_table_csv_has_the_columns_in_full_precision(folder):
    collect(folder)
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert float(rows[4]["loss"]) == RESULT["loss"]
    assert rows[2]["loss"] == "" and rows[2]["status"] == "diverged"
    assert [path.name for path in folder.glob("*.tmp")] == []


def test_a_damaged_result_is_named_and_the_table_stays(folder):
    collect(folder)
    before = (folder / "table.csv").read_text()
    damaged = next((folder / "runs").glob("tnl-*/result.json"))
    damaged.write_text('{"status": "do')
    with pytest.raises(ConfigError, match="result.json"):
        collect(folder)
    assert (folder / "table.csv").read_text() == before


def test_readers_renew_a_table_that_lacks_runs_that_have_ended(folder, monkeypatch):
    """A study that still runs, or was killed, has not written its table since; an edited table of all runs stays."""
    collect(folder)
    text = (folder / "table.csv").read_text()
    (folder / "table.csv").write_text(edited := text.replace("2.345678901234567", "2.5"))
    assert renew(folder) == [] and (folder / "table.csv").read_text() == edited
    left = next(row for row in csv.DictReader(text.splitlines()) if row["status"] == "unfinished")
    RunFolder(folder / left["path"]).write_result(RESULT)
    with monkeypatch.context() as patch:
        patch.setattr("linnet.study.collect.write_atomic", refuse_to_write)
        (problem,) = renew(folder)
        assert "table.csv lacks 1 of 4 ended runs" in problem and "Permission denied" in problem
    load_study(folder, best_of=True)
    rows = {row["run"]: row for row in csv.DictReader((folder / "table.csv").read_text().splitlines())}
    assert rows[left["run"]]["status"] == "done" and "2.5," not in (folder / "table.csv").read_text()
    (folder / "table.csv").unlink()
    assert left["run"] in set(read_study(folder, bootstrap=0).table["run"])


def test_readers_renew_a_table_that_is_cut_off_or_say_so(folder):
    collect(folder)
    table = folder / "table.csv"
    text = table.read_text()
    table.write_text(text[:-3])
    assert renew(folder) == [] and table.read_text() == text
    lines = text.splitlines()
    names = [name for name in lines[0].split(",") if name != "loss"] + ["loss"]
    done = next(row for row in csv.DictReader(lines) if row["status"] == "done")
    table.write_text(",".join(names) + "\n" + ",".join(done[name] for name in names)[:-3])
    (folder / "plan.json").unlink()
    assert any("line 2: the last line has no line end" in note for note in load_study(folder)[2])
    assert any("no line end" in line for line in read_study(folder, bootstrap=0).problems)


def test_tables_that_commands_wrote_are_refused_if_cut_off(tmp_path):
    for name, read in (("table.csv", read_vertices), ("differences.csv", read_differences)):
        (tmp_path / name).write_text("architecture,base\na,b")
        with pytest.raises(ConfigError, match=f"{name}: the last line has no line end.*linnet study"):
            read(tmp_path)


def refuse_to_write(path, text):
    raise PermissionError(errno.EACCES, "Permission denied")


def test_not_a_study_folder(tmp_path):
    with pytest.raises(ConfigError, match="study folder"):
        collect(tmp_path)
    with pytest.raises(ConfigError, match="no such file or folder; give the folder of a study, or a CSV"):
        load_study(tmp_path / "none")


def test_a_folder_of_an_earlier_release_gains_the_columns_of_its_configurations(tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "fixtures/v0.1/studies/tiny", tmp_path / "tiny")
    done, _ = sorted(collect(tmp_path / "tiny"), key=lambda row: row["status"])
    assert {name: done[name] for name in ("d_model", "num_layers", "attention_share", "layout")} == {
        "d_model": 8,
        "num_layers": 1,
        "attention_share": 0.0,
        "layout": "tnl+sglu x1",
    }
    assert (done["seq_len"], done["batch_tokens"], done["learning_rate"], done["seed"]) == (16, 32, 0.01, 0)
    assert (done["state_fixed"], done["state_dynamic"], done["domain"]) == (64, 0, "text")
    assert done["params_active"] == done["params_non_embedding"] == 960 and done["flops_causal"] == done["flops"]


def test_rows_without_the_columns_are_completed_from_their_folders(tmp_path):
    folder = shutil.copytree(Path(__file__).parents[1] / "fixtures/v0.1/studies/tiny", tmp_path / "tiny")
    rows = [{"run": "tnl-30bad1ae3a37", "flops": 5971968.0, "seed": 7}, {"run": "gone"}]
    assert complete(rows, folder) == 1
    model = read_config(RunFolder(folder / "runs/tnl-30bad1ae3a37"))
    assert rows[0]["flops_004"] == pytest.approx(5971968.0 * flops_004(model, 16) / flops_exact(model, 16))
    assert rows[0]["layout"] == "tnl+sglu x1" and rows[0]["seed"] == 7 and rows[1] == {"run": "gone"}


def test_tables_of_no_run_and_of_one():
    assert as_csv([]) == ",".join(COLUMNS) + "\n"
    assert as_csv([{"run": "one", "loss": math.nan}]) == "run,loss\none,\n"


@pytest.mark.parametrize(
    "plan", ['{"runs": 3}', '{"runs": ["a"]}', '{"runs": [], "sensitivity": 1}', "[]", "[" * 100_000]
)
def test_a_plan_of_somebody_else_is_damaged(tmp_path, plan):
    (tmp_path / "plan.json").write_text(plan)
    with pytest.raises(ConfigError, match=r"plan\.json: is damaged"):
        read_plan(tmp_path)
