"""The verb `study`: from a file to laws; killed and run again; and mistakes before any work."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from children import COMMAND, Child
from page_claims import contradictions
from typer.testing import CliRunner

from linnet.cli import app
from linnet.runs import RunFolder
from linnet.study import runner

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    """A study file: two architectures, three budgets and four sizes of a few dozen steps."""
    words = " ".join(f"{n * n % 97} apples and {n % 7} pears" for n in range(3000))
    (tmp_path / "text.txt").write_text(words)
    values = {
        "name": "tiny",
        "architectures": ["llama", "tnl"],
        "budgets": [2e8, 4e8, 8e8],
        "sizes": [[8, 1], [16, 1], [24, 1], [32, 1]],
        "seq_len": 32,
        "batch_size": 4,
        "minimum_steps": 5,
        "data": {"source": [str(tmp_path / "text.txt")]},
        "train": {"evaluate_tokens": 1024},
        "executor": {"kind": "inline"},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def linnet(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_variant_that_diverged_is_named_where_its_difference_would_stand(config, tmp_path):
    values = yaml.safe_load(config.read_text()) | {"sizes": [[8, 1]], "budgets": [2e8]}
    wild = {"name": "wild", "family": "tnl", "base": "tnl", "learning_rate": 1e4}
    config.write_text(yaml.safe_dump(values | {"architectures": ["tnl", wild]}))
    shown = linnet("study", config, "--no-report", "--out", tmp_path / "studies")
    assert "diverged: " in shown and "wild: no difference from its base tnl" in shown and "`base: NAME`" in shown


def test_a_failed_run_ends_the_command_with_code_1_after_the_laws(config, tmp_path, monkeypatch):
    train = runner._train_alone

    def full(settings, *folders):
        if settings.model.d_model == 8 and settings.model.layout.startswith("tnl"):
            folder = runner.run_folder(settings, *folders)
            raise OSError(28, "No space left on device", str(folder.path))
        return train(settings, *folders)

    command = ["study", str(config), "--no-report", "--set", "budgets=[4e8]", "--out", str(tmp_path / "studies")]
    with monkeypatch.context() as patched:
        patched.setattr(runner, "_train_alone", full)
        failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 1 and "What you may conclude" in failed.output, failed.output
    path = re.search(r"1 run failed; see (\S+)", failed.output.rpartition("What you may conclude")[2])[1]
    assert "No space left on device" in Path(path.rstrip(";")).read_text()
    assert "1 run failed" not in linnet(*command)


def test_a_study_of_which_every_run_diverges_says_which_rate_to_try(config, tmp_path):
    given = ["--set", "learning_rate=1e4", "--set", "budgets=[4e8]", "--set", "sizes=[[8, 1]]"]
    result = CliRunner().invoke(app, ["study", str(config), *given, "--no-report", "--out", str(tmp_path / "studies")])
    assert result.exit_code == 1 and result.output.count("diverged: ") == 2, result.output
    assert "--set learning_rate=1e+03 (it was 10000)" in result.output and "failed" not in result.output
    values = yaml.safe_load(config.read_text()) | {"sizes": [[8, 1]], "budgets": [4e8]}
    config.write_text(yaml.safe_dump(values | {"architectures": [{"name": "tnl", "learning_rate": 1e4}]}))
    result = CliRunner().invoke(app, ["study", str(config), "--no-report", "--out", str(tmp_path / "own")])
    assert "lower learning_rate of tnl, or find it with linnet study tune" in result.output


@pytest.mark.usefixtures("no_pictures")
def test_a_study_ends_with_laws_and_a_report_and_then_narrows_an_interval(config, tmp_path):
    shown = linnet("study", config, "--architectures", "tnl", "--out", tmp_path / "studies")
    assert "12 runs" in shown and "12/12" in shown
    assert "L = " in shown
    report, *lines = shown.rpartition("report: ")[2].splitlines()
    assert Path(report).is_file() and lines[0] == "What you may conclude" and "tnl" in "".join(lines)
    table = tmp_path / "studies" / "tiny" / "table.csv"
    assert table.read_text().count("\n") == 13

    assert contradictions(Path(report).read_text()) == []
    again = ("study", config, "--architectures", "tnl", "--no-report", "--out", tmp_path / "studies")
    [found] = json.loads(linnet(*again, "--propose", "a", "--json").partition("[")[2].join("[ "))
    assert found["runs"][-1]["expected_half_width"] < found["half_width"]
    shown = linnet(*again, "--until", f"a +- {found['half_width'] / 3}", "--at-most", "1e7")
    assert "priced out" in shown and " FLOPs" in shown.partition("priced out")[2]
    assert table.read_text().count("\n") == 13, "what would cost more than the limit is not trained"
    asked = ("--until", f"tnl: a +- {found['half_width'] * 0.98}", "--at-most", "2e9")
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "studies", killed)
    shown = linnet(*again, *asked)
    assert "training " in shown
    kill_in_a_round(config, killed, "--architectures", "tnl", "--no-report", *asked)
    again_killed = linnet(*again[:-1], killed, *asked)
    assert again_killed.partition("reached")[2] == shown.partition("reached")[2] != ""
    assert losses(killed) == losses(tmp_path / "studies"), "the same runs as if it had never been killed"
    trained = {path: path.stat().st_mtime_ns for path in table.parent.glob("runs/*/result.json")}
    assert 12 < len(trained) == table.read_text().count("\n") - 1
    shown = linnet(*again)
    assert f"{len(trained)} of {len(trained)} runs are done" in shown, "the added runs stay in the study"
    assert {path: path.stat().st_mtime_ns for path in table.parent.glob("runs/*/result.json")} == trained


def kill_in_a_round(config, out, *arguments) -> None:
    """Kills `linnet study --until` with SIGKILL while it trains one of the runs that it has added."""
    before = {path.name for path in out.glob("tiny/runs/*")}
    process = begin(config, out, *arguments)

    def under_way() -> bool:
        added = [RunFolder(path) for path in out.glob("tiny/runs/*") if path.name not in before]
        return any(run.metrics() and not run.done for run in added)

    wait_until(under_way, process)
    process.kill()


def test_wrong_questions_are_errors_before_any_work(config, tmp_path):
    wrong = ["--until", "tnl: q", "--plan", "--at-most", "soon", "--out", str(tmp_path / "studies")]
    result = CliRunner().invoke(app, ["study", str(config), *wrong])
    assert result.exit_code == 2 and all(key in result.stderr for key in ("'q'", "--plan", "--at-most"))
    result = CliRunner().invoke(app, ["study", str(config), "--propose", "a", "--out", str(tmp_path / "studies")])
    assert result.exit_code == 2 and "run `linnet study`" in result.stderr
    both = ["--propose", "a", "--plan", "--out", str(tmp_path / "studies")]
    result = CliRunner().invoke(app, ["study", str(config), *both])
    assert result.exit_code == 2 and "--propose: " in result.stderr and "--plan" in result.stderr
    assert not (tmp_path / "studies").exists()


def test_plan_trains_nothing(config, tmp_path):
    chosen = ("--architectures", "tnl", "--budgets", "3e8")
    shown = linnet("study", config, "--plan", *chosen, "--out", tmp_path / "studies")
    assert "4 runs" in shown and "training FLOPs" in shown and "1 worker" in shown
    assert "llama" not in shown
    assert not (tmp_path / "studies").exists()
    runs = json.loads(CliRunner().invoke(app, ["study", str(config), "--plan", "--json"]).stdout)
    assert len(runs) == 24
    assert runs[0]["flops"] == max(run["flops"] for run in runs)


def test_a_plan_says_on_stderr_how_far_it_is(config, tmp_path, monkeypatch):
    """The FLOPs of the models of a large study take minutes."""
    arguments = ["study", str(config), "--plan", "--out", str(tmp_path), "--json"]
    assert "counting FLOPs" not in CliRunner().invoke(app, arguments).stderr  # soon done
    monkeypatch.setattr("linnet.options.QUIET", 0.0)
    found = CliRunner().invoke(app, arguments)
    assert json.loads(found.stdout)
    assert "planning the study: counting FLOPs of model 2 of" in found.stderr
    assert "planning the study: timing a few steps of architecture 2 of" in found.stderr


def test_a_plan_names_the_architecture_that_takes_most_of_the_time(config, tmp_path, monkeypatch):
    arguments = ["study", str(config), "--plan", "--out", str(tmp_path), "--budgets", "3e8"]

    def shown(tnl: float, llama: float) -> str:
        times = {"tnl": tnl, "llama": llama}
        monkeypatch.setattr(
            "linnet.study.timing.estimate",
            lambda plan, progress: {run.run: times[run.architecture] for run in plan.runs},
        )
        return CliRunner().invoke(app, arguments).output

    assert re.search(r"note: tnl takes 99% of the time; .*`budgets`.*`sizes` of tnl", shown(99.0, 1.0))
    assert "of the time" not in shown(50.0, 50.0) and "of the time" not in shown(0.99, 0.01)


def test_a_plan_shows_what_each_source_of_a_mixture_gives(config, tmp_path):
    values = yaml.safe_load(config.read_text())
    (tmp_path / "few.txt").write_text("few words " * 60)
    mixture = [{"source": str(tmp_path / name), "weight": weight} for name, weight in (("text.txt", 3), ("few.txt", 1))]
    config.write_text(yaml.safe_dump(values | {"data": {"mixture": mixture}}))
    shown = linnet("study", config, "--plan", "--out", tmp_path / "studies")
    tokens = [
        int(word.replace(",", "")) for word in re.findall(r"text.txt: gives about ([\d,]+) to ([\d,]+) ", shown)[0]
    ]
    few, passes = re.findall(r"few.txt: gives about ([\d,]+) to .* passes: about [\d.e+]+ to ([\d.e+]+)", shown)[0]
    assert int(few.replace(",", "")) == pytest.approx(tokens[0] / 3, abs=1)
    assert float(passes) == pytest.approx(tokens[1] / 3 / (600 * 0.98), rel=0.01)
    warned, plain = ([line for line in shown.splitlines() if f"{name}.txt: gives" in line] for name in ("few", "text"))
    assert "warning" in warned[0] and "warning" not in plain[0]


def test_a_plan_names_data_that_are_not_there(config, tmp_path):
    chosen = ["study", str(config), "--architectures", "tnl", "--budgets", "3e8", "--plan"]
    asked = ["--set", f"data.source=[{tmp_path}/gone]"]
    expected = f"missing data.source: '{tmp_path}/gone' does not exist"
    assert expected in linnet(*chosen, *asked) and "missing" not in linnet(*chosen)
    found = CliRunner().invoke(app, [*chosen, *asked, "--json"])
    assert len(json.loads(found.stdout)) == 4 and expected in found.stderr


def test_every_mistake_is_named_before_any_work(config, tmp_path):
    arguments = ["--out", tmp_path / "studies", "--set", "seq_length=3", "--set", "budgets=[none]"]
    result = CliRunner().invoke(app, [str(a) for a in ("study", config, *arguments)])
    assert result.exit_code == 2
    assert "'seq_len'" in result.stderr
    assert "budgets.0" in result.stderr
    result = CliRunner().invoke(app, ["study", str(config), "--architectures", "tnk", "--mixer", "no.py:M"])
    assert result.exit_code == 2 and "no.py" in result.stderr
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    wrong = ["--budgets", "1e9,]", "--mixer", "no.py:M", "--set", "seq_length=3"]
    wrong += ["--set", f"data.source=[{tmp_path / 'latin.txt'}]", "--out", config]
    result = CliRunner().invoke(app, ["study", *map(str, [config, *wrong])])
    assert result.exit_code == 2 and "4 problems" in result.stderr
    for problem in (
        "--budgets ']': not a number",
        "mixer 'no.py:M': ",
        "did you mean 'seq_len'?",
        "latin.txt: is not UTF-8",
    ):
        assert problem in result.stderr
    result = CliRunner().invoke(app, ["study", *map(str, [config, *wrong[6:], "--set", "train.steps=3"])])
    assert result.exit_code == 2 and "3 problems" in result.stderr and "folder" in result.stderr
    result = CliRunner().invoke(app, ["study"])
    assert result.exit_code == 2 and "study" in result.stderr
    (tmp_path / "run.yaml").write_text("model: tnl-10m\n")
    result = CliRunner().invoke(app, ["study", str(tmp_path / "run.yaml")])
    assert result.exit_code == 2 and "linnet train" in result.stderr
    assert not (tmp_path / "studies").exists()


TWO_RUNS = ["--no-report", "--budgets", "6e8", "--set", "train.run.checkpoint_every=10"]
TWO_RUNS += ["--set", "architectures=[tnl]", "--set", "sizes=[[8, 1], [16, 1]]"]


def start(config: Path, out: Path, *arguments) -> Child:
    """The study of two runs in a process of its own."""
    return begin(config, out, *TWO_RUNS, *arguments)


def begin(config: Path, out: Path, *arguments) -> Child:
    return Child(COMMAND, "study", config, "--out", out, *arguments, PYTHONPATH=str(ROOT))


def results(out: Path) -> dict[str, tuple[int, str]]:
    paths = out.glob("tiny/runs/*/result.json")
    return {path.parent.name: (path.stat().st_mtime_ns, path.read_text()) for path in paths}


def losses(out: Path) -> dict[str, list]:
    rows = {path.name: RunFolder(path).metrics() for path in out.glob("tiny/runs/*")}
    return {name: [(row["step"], row["loss"]) for row in run if "loss" in row] for name, run in rows.items()}


def wait_until(ready, process: Child) -> None:
    deadline = time.monotonic() + 300
    while not ready():
        assert process.poll() is None, process.output()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def one_done_and_one_under_way(out: Path) -> bool:
    runs = [RunFolder(path) for path in out.glob("tiny/runs/*")]
    return sorted(run.done for run in runs) == [False, True] and all(run.checkpoints() for run in runs)


def test_a_killed_study_goes_on_with_what_is_missing(config, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(config, killed)
    wait_until(lambda: one_done_and_one_under_way(killed), process)
    process.kill()
    (done,) = results(killed).items()

    shown = linnet("study", config, "--out", killed, *TWO_RUNS)
    assert "1 of 2 runs" in shown
    assert results(killed)[done[0]] == done[1]

    linnet("study", config, "--out", whole, *TWO_RUNS)
    assert losses(killed) == losses(whole)


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(config, tmp_path):
    one = ["--workers", "1", "--set", "executor.kind=local", "--set", "executor.threads=1"]
    process = start(config, tmp_path, *one)
    # A row: the record is opened before the run heeds signals, while nothing is lost by stopping at once.
    wait_until(lambda: any(RunFolder(path).metrics() for path in tmp_path.glob("tiny/runs/*")), process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, process.output()
    assert "same command" in process.output()
    (run,) = (RunFolder(path) for path in tmp_path.glob("tiny/runs/*"))
    assert run.checkpoints() and not run.done
    assert "unfinished" in (tmp_path / "tiny" / "table.csv").read_text()


def test_an_outside_mixer_joins_the_default_ladder(tmp_path):
    shown = linnet("study", "--mixer", ROOT / "examples" / "my_mixer.py:MyMixer", "--plan", "--out", tmp_path)
    for name in ("my_mixer", "llama", "tnl"):
        assert name in shown


def test_a_mixer_that_breaks_the_contract_is_told_before_the_plan(config, tmp_path):
    """Of the option and of the file, beside a plugin that is not there; no laws of models that look ahead."""
    text = (ROOT / "examples" / "my_mixer.py").read_text()
    ahead = text.replace("return self._read(o, x), None if", "return self._read(o, x.flip(1)), None if")
    (tmp_path / "ahead.py").write_text(ahead.replace('"my_mixer"', '"study_ahead"'))
    lacking = text.replace("def state_spec", "def state_shape").replace('"my_mixer"', '"study_lacking"')
    (tmp_path / "lacking.py").write_text(lacking)
    plugins = [f"{tmp_path}/lacking.py:MyMixer", f"{tmp_path}/none.py:MyMixer"]
    values = yaml.safe_load(config.read_text()) | {"plugins": plugins, "architectures": ["llama", "study_lacking"]}
    config.write_text(yaml.safe_dump(values))
    arguments = ["study", str(config), "--mixer", f"{tmp_path}/ahead.py:MyMixer", "--out", str(tmp_path / "studies")]
    for plan in ([], ["--plan"]):
        result = CliRunner().invoke(app, [*arguments, *plan])
        assert result.exit_code == 2 and not (tmp_path / "studies").exists(), result.output
        for told in ("ahead.py:MyMixer': is not causal", "lacking.py:MyMixer': has no state_spec", "none.py:MyMixer':"):
            assert told in result.output
    without = CliRunner().invoke(app, ["study", str(config), "--architectures", "llama", "--plan"])
    assert "no state_spec" not in without.output  # a plugin that no architecture names


def test_a_mixer_that_the_file_names_already_is_no_other(config, tmp_path):
    mixer = f"{ROOT / 'examples' / 'my_mixer.py'}:MyMixer"
    named = ["--set", "architectures=[tnl, {name: my_mixer}]", "--budgets", "4e8,", "--plan", "--out", tmp_path]
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"plugins": [mixer]}))
    linnet("study", config, *named)  # as the file has it ...
    values = yaml.safe_load(config.read_text()) | {"architectures": ["tnl", {"name": "my_mixer"}]}
    config.write_text(yaml.safe_dump(values))
    assert "my_mixer" in linnet("study", config, "--mixer", mixer, *named[2:])  # ... and with the option
