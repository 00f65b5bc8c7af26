"""Folders of 0.2.0 resume, score and report: runs of text and of images, a study, a MAD folder, a stage of a corpus.

`tests/fixtures/v0.2/make.py` wrote them with 0.2.0. Losses of another CPU may round otherwise; all else is exact.
"""

import csv
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.runs import RunFolder

OLD = Path(__file__).parents[1] / "fixtures" / "v0.2"
EXPECTED = json.loads((OLD / "expected.json").read_text(encoding="utf-8"))
CLOCK = ("seconds", "per_second", "flop_utilisation", "memory_bytes")
SCORES = {"text": "evaluate text {} text.txt", "images": "evaluate images {} --cache cache"}


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A copy of what 0.2.0 left, as the folder that commands work in."""
    monkeypatch.chdir(shutil.copytree(OLD, tmp_path / "old"))
    return tmp_path / "old"


def call(line: str) -> str:
    done = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def rows_of(path: Path) -> list[dict]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def same(values, expected) -> None:
    """Compares nested values but for times. Fractions to 1e-4: a perplexity of words has the error of many tokens."""
    if isinstance(expected, dict):
        assert expected.keys() <= values.keys()
        for key in (key for key in expected if not key.endswith(CLOCK)):
            same(values[key], expected[key])
    elif isinstance(expected, list):
        assert len(values) == len(expected)
        for value, wanted in zip(values, expected, strict=True):
            same(value, wanted)
    else:
        assert values == (pytest.approx(expected, rel=1e-4) if isinstance(expected, float) else expected)


def score(name: str, run: Path) -> dict:
    """Scores a run and returns the results. The record is removed."""
    call(SCORES[name].format(run))
    [record] = (run / "evaluations").glob("*.json")
    results = json.loads(record.read_text())["results"]
    shutil.rmtree(run / "evaluations")
    return results


@pytest.mark.parametrize("name", SCORES)
def test_a_run_scores_as_it_did_then_resumes_and_ends_the_same(old, name):
    [run] = Path("runs").glob(f"{name}-*")
    configuration = (run / "config.yaml").read_text()
    same(score(name, run), EXPECTED[run.name]["step 4"])
    assert "continuing from step 4 of 8" in call(f"train {name}.yaml --out runs --cache cache")
    same([row for row in RunFolder(run).metrics() if "event" not in row], EXPECTED[run.name]["rows"])
    same(score(name, run), EXPECTED[run.name]["end"])
    assert (run / "config.yaml").read_text() == configuration and len(list(Path("runs").iterdir())) == 2


def test_a_study_trains_what_is_left_and_ends_with_the_same_table(old):
    table, runs = rows_of(old / "study.csv"), sorted(path.name for path in Path("studies/tiny/runs").iterdir())
    finished = {path: path.stat().st_mtime_ns for path in Path("studies/tiny/runs").glob("*/result.json")}
    call("study study.yaml --out studies --no-report")
    assert sorted(path.name for path in Path("studies/tiny/runs").iterdir()) == runs and len(finished) == 3
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())
    rows = {row["run"]: row for row in rows_of(Path("studies/tiny/table.csv"))}
    for row in table:
        for key in row.keys() - {"seconds"}:
            same(number(rows[row["run"]][key]), number(row[key]))
    assert len(table) == len(rows) == 4
    call("report studies/tiny --no-laws --bootstrap 0")
    page = Path("studies/tiny/report/index.html").read_text(encoding="utf-8")
    assert all(f"{float(row['loss']):.4f}"[:5] in page for row in table)


def test_a_mad_folder_reports_and_trains_only_the_missing_run(old):
    call("mad report mad")
    table = rows_of(Path("mad/mad.csv"))
    finished = {path: path.stat().st_mtime_ns for path in Path("mad/runs").glob("*/result.json")}
    call(
        "mad run tnl+sglu --set d_model=8 --state 0 --budget smoke --tasks compression,memorization --device cpu "
        "--executor inline --out mad --no-report"
    )
    rows = rows_of(Path("mad/mad.csv"))
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items()) and len(finished) == 3
    assert [row["run"] for row in rows] == [row["run"] for row in table]
    assert len(list(Path("mad/runs").glob("*/result.json"))) == 4
    for row, wanted in zip(rows, table, strict=True):
        same({key: number(value) for key, value in row.items()}, {key: number(wanted[key]) for key in wanted})


def number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def test_a_stage_of_a_corpus_is_the_stage_that_this_tree_makes(old):
    def content(folder: str) -> dict[str, bytes]:
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}
        assert files.pop("provenance.json")
        return files

    call("corpus clean documents.jsonl --out new")
    before = content("corpus")
    times = [path.stat().st_mtime_ns for path in sorted(Path("corpus").glob("*.zst"))]
    call("corpus clean documents.jsonl --out corpus")
    assert before == content("new") == content("corpus")
    assert [path.stat().st_mtime_ns for path in sorted(Path("corpus").glob("*.zst"))] == times
