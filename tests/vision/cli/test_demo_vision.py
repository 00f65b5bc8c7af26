"""`linnet demo --vision`: its plan, and the whole of it with few steps."""

from typer.testing import CliRunner

from linnet.cli import app
from linnet.train.objectives import read_training
from linnet.vision.cli import demo as demo_vision


def test_the_plan_trains_three_models_of_one_width():
    plan = demo_vision.read_plan()
    configs = [read_training({**plan.train, **one}, "demo") for one in plan.models.values()]
    assert [config.objective for config in configs] == ["images"] * 3
    assert len({config.model.d_model for config in configs}) == 1


def test_the_demo_ends_with_a_page(tmp_path, monkeypatch):
    plan = demo_vision.read_plan()
    models = {name: plan.models[name] for name in ("lightnet", "attention")}
    train = {key: value for key, value in plan.train.items() if key != "epochs"} | {"steps": 2}
    monkeypatch.setattr(demo_vision, "read_plan", lambda: demo_vision.Plan(models=models, train=train))
    done = CliRunner().invoke(app, ["demo", "--vision", "--out", str(tmp_path), "--workers", "1"])
    assert done.exit_code == 0, done.output
    page = tmp_path / "vision-demo" / "report" / "index.html"
    assert "95 % interval" in page.read_text() and str(page) in done.output.replace("\n", "")


def test_bad_options(tmp_path):
    assert CliRunner().invoke(app, ["demo", "--vision", "--quick"]).exit_code == 2
    (tmp_path / "vision-demo").mkdir()
    (tmp_path / "vision-demo" / "config.yaml").write_text("model: {}\n")
    done = CliRunner().invoke(app, ["demo", "--vision", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "run folder" in done.output
