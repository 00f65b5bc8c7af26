"""`linnet train` as a person uses it."""

import argparse
import json
import re
import signal
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from linnet.cli import app
from linnet.runs import RunFolder

SETTINGS = {
    "model": {"d_model": 16, "layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 2}}},
    "data": {"source": [argparse.__file__]},
    "seq_len": 32,
    "batch_size": 4,
    "steps": 10,
    "run": {"log_every": 2},
    "evaluate_tokens": 256,
}


@pytest.fixture
def linnet(tmp_path, monkeypatch):
    """linnet(*arguments) runs `linnet train` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(SETTINGS))
    return lambda *arguments: CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_trains_a_file_and_shows_the_result_again(linnet):
    done = linnet("run.yaml")
    assert done.exit_code == 0, done.output
    [folder] = Path("runs").glob("tnl-*")
    result = RunFolder(folder).result()
    assert f"held-out loss {result['loss']:.4f}" in done.output and done.output.count("held-out loss") == 1
    assert str(folder) in done.output.replace("\n", "")
    assert "10 steps of 4 x 32 tokens = 1,280 tokens" in done.output
    again = linnet("run.yaml")
    assert again.exit_code == 0
    assert f"held-out loss {result['loss']:.4f}" in again.output


def test_a_text_without_held_out_bytes_is_a_warning_before_the_first_step_and_its_score_is_explained(linnet):
    Path("line.txt").write_text("one line of text, no more\n")  # one byte is held out, and the next token ends it
    words = ["--set", "data.source=line.txt", "--set", "seq_len=8", "--set", "steps=1", "--set", "batch_size=1"]
    done = linnet("run.yaml", *words)
    shown = " ".join((done.output + done.stderr).split())
    assert done.exit_code == 0 and shown.index("warning: data.validation_fraction: 0.02") < shown.index("1 steps of")
    [folder] = Path("runs").glob("tnl-*")
    assert RunFolder(folder).result()["bits_per_byte"] is None
    assert "no bits per byte (the held-out data are too few" in shown and "nan" not in shown and "?" not in shown
    assert "warning: data.validation" not in linnet("run.yaml", "--out", "other").output


def test_json_is_the_only_output(linnet):
    done = linnet("run.yaml", "--json", "--out", "elsewhere", "--cache", "kept")
    found = json.loads(done.stdout)
    assert found["status"] == "done" and found["steps"] == 10
    assert RunFolder(found["path"]).result() == {key: value for key, value in found.items() if key != "path"}
    assert Path(found["path"]).parent == Path("elsewhere") and list(Path("kept").iterdir())


def test_extend(linnet):
    assert linnet("run.yaml", "--set", "schedule.name=constant").exit_code == 0
    [folder] = Path("runs").glob("tnl-*")
    done = linnet("--extend", folder, "--set", "steps=14", "--set", "run.log_every=7", "--device", "cpu")
    assert done.exit_code == 0, done.output
    result = RunFolder(folder).result()
    assert result["steps"] == 14 and result["run"]["log_every"] == 7 and result["run"]["device"] == "cpu"
    assert "14 steps of 4 x 32 tokens" in done.output and "extended from 10 steps to 14" in done.output
    for named, arguments in {"CONFIG": ["run.yaml"], "seed": ["--set", "seed=1"], "--model": ["--model", "x"]}.items():
        refused = linnet("--extend", folder, "--set", "steps=20", *arguments)
        assert refused.exit_code == 2 and named in refused.output


def test_a_recipe_text_and_settings_from_the_command_line(linnet):
    Path("a.txt").write_text("some text to learn from\n" * 200)
    Path("b.txt").write_text("and some other text that is not the same\n" * 200)
    arguments = ["--model", "tnl-10m", "--data", "a.txt", "--data", "b.txt", "--device", "cpu"]
    arguments += ["--set", "steps=1", "--set", "seq_len=16", "--set", "batch_size=2"]
    done = linnet(*arguments, "--set", "model.d_model=32", "--set", "model.options.tnl.num_heads=2", "--json")
    assert done.exit_code == 0, done.output
    config = RunFolder(json.loads(done.stdout)["path"]).config
    assert Path(json.loads(done.stdout)["path"]).name.startswith("tnl-10m-")
    assert config["data"]["source"] == ["a.txt", "b.txt"] and config["run"]["device"] == "cpu"
    assert config["steps"] == 1 and config["model"]["d_model"] == 32 and config["model"]["vocab_size"] == 256


MIXER = Path(__file__).parents[2] / "examples" / "my_mixer.py"


def test_a_mixer_of_a_file(linnet):
    small = ["--set", "model.d_model=32", "--set", "model.options.my_mixer.num_heads=2", "--set", "steps=1"]
    small += ["--set", "seq_len=16", "--data", argparse.__file__, "--device", "cpu"]
    done = linnet("--mixer", f"{MIXER}:MyMixer", *small, "--json")
    assert done.exit_code == 0, done.output
    config = RunFolder(json.loads(done.stdout)["path"]).config
    assert config["model"]["layout"] == "my_mixer+swiglu x6" and config["plugins"] == [f"{MIXER}:MyMixer"]
    in_a_file = linnet("run.yaml", "--mixer", f"{MIXER}:MyMixer", "--set", "model.layout=my_mixer+sglu x1", "--json")
    assert in_a_file.exit_code == 2 and "options.tnl" in in_a_file.output  # options of a layer that is gone
    values = {**SETTINGS, "model": {"d_model": 16, "layout": "my_mixer+sglu x1"}}
    Path("run.yaml").write_text(yaml.safe_dump(values))
    in_a_file = linnet("run.yaml", "--mixer", f"{MIXER}:MyMixer", "--json")
    config = RunFolder(json.loads(in_a_file.stdout)["path"]).config
    assert config["model"]["layout"] == "my_mixer+sglu x1"
    Path("run.yaml").write_text(yaml.safe_dump(values | {"plugins": config["plugins"]}))
    again = linnet("run.yaml", "--mixer", f"{MIXER}:MyMixer", "--json")  # named twice, it is the same run
    assert json.loads(again.stdout)["path"] == json.loads(in_a_file.stdout)["path"]


def test_a_mixer_that_breaks_the_contract_trains_nothing(linnet):
    """By option and in a file, told beside what else is wrong, and nothing is left behind."""
    text = MIXER.read_text()
    ahead = text.replace("return self._read(o, x), None if", "return self._read(o, x.flip(1)), None if")
    Path("ahead.py").write_text(ahead.replace('"my_mixer"', '"train_ahead"'))
    lacking = text.replace("def state_spec", "def state_shape").replace('"my_mixer"', '"train_lacking"')
    Path("lacking.py").write_text(lacking)
    done = linnet("--mixer", "ahead.py:MyMixer", "--data", "none.txt")
    assert done.exit_code == 2 and "2 problems" in done.output and "'none.txt'" in done.output
    assert "mixer 'ahead.py:MyMixer': is not causal" in done.output
    layout = "train_ahead+sglu x1 train_lacking+sglu x1"
    values = {**SETTINGS, "model": {"d_model": 16, "layout": layout}}
    Path("run.yaml").write_text(yaml.safe_dump(values | {"plugins": ["ahead.py:MyMixer", "lacking.py:MyMixer"]}))
    done = linnet("run.yaml")
    assert done.exit_code == 2 and "2 problems" in done.output
    assert "'ahead.py:MyMixer': is not causal" in done.output
    assert re.search("'lacking.py:MyMixer': .*state_spec", done.output)
    assert {path.name for path in Path().iterdir()} - {"__pycache__"} == {"run.yaml", "ahead.py", "lacking.py"}


def test_a_mixer_that_nothing_uses_or_is_not_there(linnet):
    unused = linnet("run.yaml", "--mixer", f"{MIXER}:MyMixer")
    assert unused.exit_code == 2 and re.search(r"--mixer: .*'tnl\+sglu x2' .*'my_mixer'", unused.output)
    both = linnet("--model", "tnl-10m", "--mixer", f"{MIXER}:MyMixer")
    assert both.exit_code == 2 and "1 problem" in both.output
    wrong = linnet("--mixer", "mine.py:Mine", "--set", "steps=0")
    assert wrong.exit_code == 2 and "mine.py" in wrong.output and "steps" in wrong.output
    wrong = linnet("--mixer", "mine.py:Mine", "--set", "model.options.mine.num_heads=2", "--set", "steps=0")
    assert "2 problems" in wrong.output  # an unknown option adds no problem
    assert "model" not in wrong.output and not Path("runs").exists()


def test_all_problems_at_once_and_nothing_is_made(linnet):
    done = linnet("run.yaml", "--set", "stepz=5", "--set", "precision=float16", "--set", "model.d_model=15")
    assert done.exit_code == 2
    for part in ("stepz", "did you mean 'steps'", "precision", "15"):
        assert part in done.output
    assert not Path("runs").exists()
    assert linnet().exit_code == 2 and "--model NAME" in linnet().output
    assert linnet("missing.yaml").exit_code == 2 and "missing.yaml" in linnet("missing.yaml").output


def test_what_is_wrong_with_a_text_is_told_with_the_rest_and_nothing_is_made(linnet):
    Path("latin.txt").write_bytes(b"\xe9 is not UTF-8")
    Path("short.txt").write_text("a short text")
    text = ["--data", "latin.txt", "--set", "data.validation=[none.txt]"]
    asked = ["--set", "evaluations=[{kind: text, paths: [latin.txt]}]"]
    for arguments, count, messages in [
        ([*text, "--set", "stepz=5"], 3, ["stepz", "data.validation: 'none.txt' does not exist", "latin.txt: is not"]),
        ([*text, *asked, "--device", "cuda"], 4, ["device: 'cuda'", "evaluations.0 (text): paths: latin.txt is"]),
        (["--data", "gone.txt", "--set", "data.sauce=x"], 2, ["data.sauce", "data.source: 'gone.txt' does not exist"]),
        (["--data", "short.txt", "--set", "stepz=5"], 2, ["seq_len: 32 is too long", "at most 12 tokens"]),
        (["--data", "short.txt", "--device", "cuda", "--out", "run.yaml"], 3, ["run.yaml' is a file", "seq_len: 32"]),
    ]:
        done = linnet("run.yaml", *arguments)
        assert done.exit_code == 2 and f"{count} problems" in done.output and "steps of" not in done.output, done.output
        assert all(message in done.output for message in messages), done.output
    assert not list(Path("runs").glob("tnl-*"))


@pytest.mark.parametrize(
    ("objective", "data", "told"),
    [
        ("masked", {"source": "absent.txt"}, "data.source: 'absent.txt' does not exist"),
        (
            "sentences",
            {"task": "sst2", "source": "sst2"},
            "sst2/dev.tsv: its first line ['text', 'label'] has no column 'sentence'",
        ),
    ],
)
def test_what_is_wrong_with_texts_is_told_with_the_rest(linnet, objective, data, told):
    Path("sst2").mkdir()
    for name in ("train", "dev"):
        Path(f"sst2/{name}.tsv").write_text("text\tlabel\n")
    settings = {"objective": objective, "data": data, "model": "bert-crammed", "stepz": 5}
    Path("training.yaml").write_text(yaml.safe_dump(settings))
    done = linnet("training.yaml", "--set", "optimizer.learning_rate=-1")
    assert done.exit_code == 2 and not Path("runs").exists(), done.output
    for part in ("stepz", "learning_rate", told):
        assert part in done.output, done.output


def test_what_is_wrong_with_a_folder_of_sequences_is_told_with_the_rest(linnet):
    Path("lra").mkdir()
    Path("lra/basic_train.tsv").write_text("Source\tLabel\n")
    settings = {"objective": "sequences", "data": {"task": "listops", "source": "lra"}, "model": "tnl-10m", "stepz": 5}
    Path("listops.yaml").write_text(yaml.safe_dump(settings))
    done = linnet("listops.yaml", "--set", "optimizer.learning_rate=-1")
    assert done.exit_code == 2 and not Path("runs").exists(), done.output
    for part in ("stepz", "learning_rate", "no column 'Target'", "data.source: lra/basic_val.tsv", "basic_test.tsv"):
        assert part in done.output, done.output


def test_paths_that_are_something_else(linnet):
    Path("study.yaml").write_text("architectures: [tnl]\nbudgets: [1e9]\n")
    Path("file").write_text("")
    for arguments, message in {
        ("study.yaml",): "study.yaml is a study, not one training; run: linnet study study.yaml",
        (".",): ".: ",
        ("run.yaml", "--out", "file"): "file' is a file",
    }.items():
        done = linnet(*arguments)
        assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output, done.output


def test_objectives_that_read_one_folder_take_it_as_data(linnet):
    model = {"d_model": 32, "layout": "hgrn2", "options": {"hgrn2": {"num_heads": 2}}}
    settings = {"objective": "sequences", "data": {"task": "listops"}, "model": model, "batch_size": 4, "steps": 1}
    Path("listops.yaml").write_text(yaml.safe_dump(settings))
    done = linnet("listops.yaml", "--data", "missing")
    assert done.exit_code == 2 and "'missing'" in done.output, done.output
    done = linnet("listops.yaml", "--data", "one", "--data", "two")
    assert done.exit_code == 2 and "--data: 2 given" in done.output, done.output


def test_ctrl_c_and_on(linnet, monkeypatch):
    from linnet.train.monitor import TerminalProgress

    call = TerminalProgress.__call__

    def interrupt(self, row):
        call(self, row)
        if row.get("step") == 6 and "loss" in row:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TerminalProgress, "__call__", interrupt)
        stopped = linnet("run.yaml")
    assert stopped.exit_code == 130 and "same command" in stopped.output
    [folder] = Path("runs").glob("tnl-*")
    assert [path.name for path in RunFolder(folder).checkpoints()] == ["step-00000006"]
    done = linnet("run.yaml")
    assert done.exit_code == 0 and "step 6 of 10" in done.output


@pytest.mark.parametrize("option", ["--plan", "--coordinate-check"])
def test_what_saves_nothing_does_not_promise_to_resume(monkeypatch, option):
    def stop(*_, **__):
        raise KeyboardInterrupt

    for name in ("show_coordinates", "show_plan"):
        monkeypatch.setattr(import_module("linnet.cli.train.plan"), name, stop)
    result = CliRunner().invoke(app, ["train", "--model", "tnl-10m", "--device", "cpu", option])
    assert result.exit_code == 130 and "from the beginning" in result.output and "saved" not in result.output


def test_divergence_says_what_to_do(linnet):
    done = linnet("run.yaml", "--set", "optimizer.learning_rate=1e30", "--set", "optimizer.clip=null")
    assert done.exit_code == 1
    assert "loss or gradient not finite" in done.output or "loss spike" in done.output
    assert "diverged at step" in done.output and "guard.policy" in done.output


def test_help_teaches():
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "120"}).output
    for part in ("linnet train --model tnl-10m", "--set", "Ctrl-C", "result.json"):
        assert part in shown
