"""A ladder of image classifiers: from a file to laws of the cross-entropy, in images and not in tokens."""

import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.laws.fit import fit_study
from linnet.models import flops_exact
from linnet.report import write_report
from linnet.study.collect import load_study
from linnet.study.config import read_study
from linnet.study.ladder import plan
from linnet.study.runner import run_study
from linnet.vision.study import ImageStudyConfig

STUDY = {
    "name": "digits",
    "architectures": [
        {"name": "vit", "sizes": [[8, 1, 2], [16, 1, 2]]},
        {"name": "light", "family": "lightnet-vit", "options": {"lightnet": {"lrpe": False}}},
    ],
    "model": {"image_size": 8, "patch": 4, "channels": 1, "classes": 10, "mean": [0.3]},
    "sizes": [[8, 1, 2]],
    "budgets": [8e6, 1.6e7, 3.2e7],
    "batch_size": 32,
    "minimum_steps": 2,
    "learning_rate": 1e-2,
    "data": {"source": ["digits"], "max_images": 400},
    "train": {"objective": "images", "run": {"device": "cpu"}, "evaluate_images": 100},
    "executor": {"kind": "inline"},
}


def test_the_plan_counts_images():
    config = read_study(STUDY)
    assert isinstance(config, ImageStudyConfig) and read_study(config.model_dump(mode="json")) == config
    ladder = plan(config)
    run = ladder.runs[0]
    assert run.train.model.mean == [0.3] and run.train.model.init_std == pytest.approx(run.train.model.d_model**-0.5)
    assert run.tokens == run.steps * 32 and run.units == run.record()["units"] == "images" and run.seq_len is None
    assert run.flops == run.steps * flops_exact(run.train.model, None, 32)
    fixed = read_study({key: value for key, value in STUDY.items() if key != "budgets"} | {"images": [640]})
    assert {run.steps for run in plan(fixed).runs} == {20}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seq_len": 4}, "seq_len: images"),
        ({"architectures": 3}, "architectures: "),
        ({"images": [1.0], "tokens": [1.0]}, "images and tokens"),
        ({"train": {"objective": "diffusion"}}, "train.objective: 'diffusion'"),
        ({"model": {"image_size": 9, "patch": 4}}, "image_size: 9"),
        ({"train": STUDY["train"] | {"epochs": 1}}, "train.epochs"),
        ({"data": {"source": ["missing"]}}, "source"),
        ({"train": STUDY["train"] | {"evaluations": [{"kind": "images", "split": "train"}]}}, "train.evaluations.0"),
        ({"train": STUDY["train"] | {"evaluations": [{"kind": "text"}]}}, "train.evaluations.0.kind"),
    ],
)
def test_what_does_not_fit_is_named(changes, told):
    with pytest.raises(ConfigError) as caught:
        plan(read_study(STUDY | changes))
    assert told in str(caught.value)


@pytest.mark.usefixtures("no_pictures")
def test_a_study_of_images_ends_in_laws_of_cross_entropy(tmp_path):
    shown = io.StringIO()
    train = STUDY["train"] | {"evaluations": [{"kind": "images", "split": "test", "every": 2}]}
    config = read_study(STUDY | {"architectures": STUDY["architectures"][:1], "train": train})
    folder = run_study(config, tmp_path, console=Console(file=shown, width=200)).folder
    lines = shown.getvalue()
    assert "images  loss" in lines and " accuracy" in lines and "token" not in lines and "bits" not in lines
    head, *rows = (folder / "table.csv").read_text().splitlines()
    columns = head.split(",")
    assert {"images", "accuracy", "unique_images"} < set(columns) and not {"tokens", "bits_per_byte"} & set(columns)
    assert len(rows) == 6
    cells = dict(zip(columns, rows[0].split(","), strict=True))
    assert int(cells["images"]) > 0 and 0 < float(cells["accuracy"]) <= 1 and cells["unique_images"] == "400"
    table, curves, _ = load_study(folder)
    assert (table["D"] == [int(row.split(",")[columns.index("images")]) for row in rows]).all()
    assert len(curves) > len(rows) and (curves["D"] % 32 == 0).all()
    laws = fit_study(table, curves, bootstrap=0)
    assert laws["vit"].L.exponent < 0  # the cross-entropy falls with compute
    for run in sorted((folder / "runs").iterdir()):
        asked = ["evaluate", "images", str(run), "--data", "digits", "--split", "test", "--device", "cpu"]
        assert CliRunner().invoke(app, asked).exit_code == 0
    page = write_report(folder, fit=laws, bootstrap=0, laws=False).read_text()
    text = re.sub(r'<script(?! type="application/json").*?</script>', "", page[page.index("<body") :], flags=re.S)
    assert not re.findall(r"(?<![\w-])(?:tokens?|bits per byte)(?![\w-])", text)
    assert "nats per image" in text and "Accuracy" in text
    assert 'id="evaluations"' in page and "images: accuracy" in text and "images: loss" in text
    assert "images (linnet evaluate): accuracy" in text


def test_evaluations_that_need_the_images_are_checked_before_the_first_run(tmp_path):
    (tmp_path / "broken" / "3").mkdir(parents=True)
    (tmp_path / "broken" / "3" / "a.png").write_bytes(b"")
    evaluations = [{"kind": "images", "source": str(tmp_path / "broken")}]
    study = read_study(STUDY | {"train": STUDY["train"] | {"evaluations": evaluations}})
    plan(study)
    with pytest.raises(ConfigError, match=r"train.evaluations.0 \(images\): .*a.png"):
        run_study(study, tmp_path / "studies")
    assert not list((tmp_path / "studies").glob("*/runs/*/metrics.jsonl"))


def test_a_plan_refuses_what_the_study_would_refuse_of_its_evaluations(tmp_path):
    wrong = [{"kind": "images", "split": "train"}, {"kind": "images", "name": "gone", "source": str(tmp_path / "gone")}]
    studies, told = {"wrong": wrong, "right": [{"kind": "images", "split": "test"}]}, {}
    for name, evaluations in studies.items():
        values = STUDY | {"train": STUDY["train"] | {"evaluations": evaluations}}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(values))
        done = CliRunner().invoke(app, ["study", str(file), "--plan", "--out", str(tmp_path / "out")])
        told[name] = done.exit_code, done.stderr
    assert told["right"][0] == 0 and told["wrong"][0] == 2, told
    with pytest.raises(ConfigError) as caught:
        run_study(read_study(STUDY | {"train": STUDY["train"] | {"evaluations": wrong}}), tmp_path / "out")
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "train.evaluations.0 (images)",
        "train.evaluations.1 (gone)",
    ]
    assert all(line in told["wrong"][1] for line in caught.value.problems)
    assert not (tmp_path / "out").exists()
