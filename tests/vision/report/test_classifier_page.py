"""The page of a trained image classifier, and the page of several."""

import re
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.evaluate.session import prepare
from linnet.report.downstream import over_steps
from linnet.report.records import read_run
from linnet.runs import RunFolder
from linnet.train import train
from linnet.train.identity import read_config
from linnet.train.objectives import read_training
from linnet.vision.evaluate import ImageEvaluator
from linnet.vision.report import write_classifier, write_classifiers

TINY = {
    "objective": "images",
    "data": {"source": ["digits"]},
    "batch_size": 16,
    "steps": 4,
    "run": {"device": "cpu", "log_every": 1, "evaluate_every": 2, "checkpoint_every": 0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs of tiny classifiers on digits: (folders by name, cache)."""
    root = tmp_path_factory.mktemp("runs")
    model = {"d_model": 16, "image_size": 8, "patch": 4, "channels": 1, "classes": 10}
    layouts = {"attention": "attention+mlp x1", "lightnet": "lightnet+swiglu x1"}
    found = {}
    for name, layout in layouts.items():
        options = {"attention": {"num_heads": 1, "rope": False}} if name == "attention" else {name: {"num_heads": 1}}
        values = TINY | {"name": name, "model": model | {"layout": layout, "options": options}}
        found[name] = train(read_training(values, name), root, root / "cache").path
    return found, root / "cache"


def test_page_without_and_with_an_evaluation(trained, tmp_path):
    runs, cache = trained
    run = runs["attention"]
    page = write_classifier(run, tmp_path / "before" / "index.html").read_text()
    assert "linnet evaluate images" in page and "Confusions" not in page and 'id="training"' in page
    evaluator = ImageEvaluator(cache=cache)
    evaluation = evaluator.run(prepare(run, [evaluator]))
    assert {f"{one.task}.{one.metric}" for one in evaluation.results} == evaluator.measures()
    evaluation.save(run)
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "after" / "index.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "after" / "index.html").read_text()
    assert all(f'id="{name}"' in page for name in ("training", "calibration", "confusions", "scores"))
    assert page.count("data:image/png;base64,") == 24 and "95 % interval" in page
    assert not re.search(r'(src|href)="https?://', page)  # it needs no network
    assert "scores of step" not in page
    assert {path.suffix for path in (tmp_path / "after").iterdir()} == {".html", ".png", ".svg"}


def test_scores_of_an_earlier_step_are_said_to_be(trained, tmp_path):
    runs, cache = trained
    shutil.copytree(runs["attention"], copy := tmp_path / "run")
    evaluator = ImageEvaluator(cache=cache)
    evaluation = evaluator.run(prepare(copy, [evaluator]))
    replace(evaluation, model=evaluation.model | {"step": 2}).save(copy)
    for path in (copy / "evaluations").glob("images-*.json"):
        if '"step": 4' in path.read_text():
            path.unlink()
    page = write_classifier(copy, tmp_path / "index.html").read_text()
    assert "These are scores of step 2</b>, and the training is at step 4" in page


def test_a_damaged_configuration_is_named(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained[0]["attention"], copy)
    (copy / "config.yaml").write_text("objective: [")
    done = CliRunner().invoke(app, ["report", str(copy)])
    assert done.exit_code == 2 and "config.yaml" in done.stderr and "table.csv" not in done.stderr


def test_page_of_evaluations_during_training(trained, tmp_path):
    runs, cache = trained
    assert (
        'id="evaluations"' not in write_classifier(runs["attention"], tmp_path / "without" / "index.html").read_text()
    )
    values = read_config(RunFolder(runs["attention"])).model_dump(mode="json")
    values["evaluations"] = [{"kind": "images", "name": "held-out", "split": "test", "every": 2}]
    run = train(read_training(values), tmp_path, cache)
    page = write_classifier(run.path, tmp_path / "with" / "index.html").read_text()
    assert 'id="evaluations"' in page and (tmp_path / "with" / "evaluations.png").is_file()
    figure = over_steps(read_run(run.path))
    drawn = [rows for rows in figure.spec["datasets"].values() if "step" in (rows or [{}])[0]]
    accuracy, loss = ([(row["step"], row["value"]) for row in rows] for rows in drawn)
    rows = [row for row in run.metrics() if "evaluation" in row]
    assert accuracy == [(row["step"], pytest.approx(row["metrics"]["accuracy"], rel=1e-5)) for row in rows]
    assert loss == [(row["step"], pytest.approx(row["metrics"]["loss"], rel=1e-5)) for row in rows] and len(loss) == 2
    assert "held-out: accuracy" in page and "held-out: top5" not in page


def test_page_of_several_models(trained, tmp_path):
    runs, cache = trained
    for run in runs.values():
        evaluator = ImageEvaluator(cache=cache)
        evaluator.run(prepare(run, [evaluator])).save(run)
    pages = {name: run / "report" / "index.html" for name, run in runs.items()}
    picture = ("Samples", "drawn by hand", b"\x89PNG")
    made = write_classifiers(
        runs, tmp_path / "index.html", title="Two models", command="linnet demo", pages=pages, pictures=[picture]
    )
    page = made.read_text()
    assert "attention − lightnet" in page and "Adjusted p" in page and page.count("data:image/png") == 1
    assert 'id="accuracy-against-speed"' in page and "report/index.html" in page
    tied = "may be chance" in page  # then the page ranks nothing
    assert ("cannot be told apart by their accuracy" in page) == tied != ("has the highest accuracy" in page)
