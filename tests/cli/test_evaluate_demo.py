"""`linnet evaluate demo`: from nothing to a table and a page, with a plan so short that nothing is learned."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import yaml
from children import Child
from typer.testing import CliRunner

from linnet.cli import app
from linnet.cli.evaluate.demo import read_plan, run_demo
from linnet.config import parse
from linnet.evaluate.results import read_evaluations
from linnet.train import TrainConfig

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
LONG = 300  # seconds, after which something hangs: machines may be slow and busy


@pytest.fixture
def short():
    """The plan with two stages of few and short lessons, and few steps."""
    plan = read_plan()
    plan["stages"] = plan["stages"][:2]
    for stage in plan["stages"]:
        stage["lessons"]["count"] = 400
    for model in plan["models"].values():
        model["steps"] = [2, 2]
    plan["held_out"]["count"] = 4
    plan["questions"] |= {"count": 4, "sentences": 2}
    plan["tokenizer"] = "bpe:400"
    plan["needles"] |= {"lengths": "150,200", "depths": 2, "samples": 1}
    plan["recall"] |= {"lengths": "64", "samples": 2}
    return plan


def test_it_ends_with_a_table_and_a_page(short, tmp_path, capfd):
    run_demo(tmp_path / "demo", short)
    shown = capfd.readouterr().out
    assert (tmp_path / "demo" / "comparison" / "index.html").is_file()
    runs = [path for name in short["models"] for path in (tmp_path / "demo").glob(f"{name}-*")]
    assert len(runs) == len(short["models"]) == 2
    for run in runs:
        assert {"text", "needle", "recall"} <= {one.kind for one in read_evaluations(run)}
        assert run.name in shown
    assert f"--out {tmp_path / 'demo' / 'comparison' / 'index.html'}" in shown.replace("\n", "")  # to compare again
    for name in short["models"]:  # as each part begins and ends
        begun, ended = (shown.index(f"  {name}: lessons 1 of 2, 2 steps{end}") for end in (" ...", ": "))
        assert begun < ended < shown.index(f"  {name}: text ...") < shown.index(f"  {name}: recall: ")
        assert re.search(rf"  {name}: lessons 2 of 2, 2 steps: \d+ s, held-out loss \d", shown), shown
    for part in ("bits per byte", "needle-easy", "recall-mqar", "adjusted", "comparison/index.html"):
        assert part in shown.replace("\n", ""), shown


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers in /proc, which Linux alone has")
@pytest.mark.parametrize("handled", [False, True])
def test_workers_end_with_their_parent(short, tmp_path, handled):
    """Without a handler, SIGTERM ends the parent at once, so it tells its workers nothing. The command has one."""
    short["models"] = {"tnl": {**short["models"]["tnl"], "steps": [100_000] * 2}}
    code = "import json, sys; from pathlib import Path; from linnet.cli.evaluate.demo import run_demo; "
    if handled:
        code += "import signal; from linnet.signals import Interrupt, Terminated; "
        code += "signal.signal(signal.SIGTERM, Interrupt(Terminated)); "
    code += "run_demo(Path(sys.argv[1]), json.loads(sys.argv[2]))"
    parent = Child(code, tmp_path, json.dumps(short))
    workers = []
    try:
        wait_until(lambda: parent.poll() is not None or list(tmp_path.glob("stages/*/metrics.jsonl")))  # it trains
        workers = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert workers
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == (143 if handled else -signal.SIGTERM)
        wait_until(lambda: not any(map(runs, workers)))
    finally:
        for worker in filter(runs, workers):
            os.kill(int(worker), signal.SIGKILL)
        parent.kill()


def wait_until(condition) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def runs(pid: str) -> bool:
    """Whether the process runs; a process that ended but was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("path", [None, ROOT / "configs" / "needles.yaml"])
def test_the_plans_are_what_can_be_trained(path):
    plan = read_plan(path)
    for model in plan["models"].values():
        for stage in plan["stages"]:
            values = {**plan["train"], **stage["train"], **model["train"], "model": model["model"]}
            parse(TrainConfig, values | {"data": {"tokenizer": plan["tokenizer"]}})


def test_what_is_wrong_with_a_plan_is_told_before_any_work(tmp_path):
    plan = read_plan()
    plan["models"]["tnl"]["steps"] = [1]
    short, wrong = tmp_path / "short.yaml", tmp_path / "wrong.yaml"
    short.write_text(yaml.safe_dump(plan))
    plan["stages"][0]["lessons"]["sentence"] = plan["stages"][0]["lessons"].pop("sentences")
    del plan["recall"]
    wrong.write_text(yaml.safe_dump(plan))
    runner = CliRunner()
    result = runner.invoke(app, ["evaluate", "demo", str(tmp_path / "demo"), "--plan", str(short)])
    assert result.exit_code == 2 and "models.tnl.steps: 1 numbers for 3 stages" in result.output
    result = runner.invoke(app, ["evaluate", "demo", str(tmp_path / "demo"), "--plan", str(wrong)])
    for part in ("stages.0.lessons.sentence", "did you mean 'sentences'?", "recall"):
        assert part in result.output
    assert not (tmp_path / "demo").exists()


def test_a_run_folder_is_left_alone(tmp_path):
    (tmp_path / "config.yaml").write_text("model: tnl-10m\n")
    result = CliRunner().invoke(app, ["evaluate", "demo", str(tmp_path)])
    assert result.exit_code == 2 and "FOLDER: " in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
