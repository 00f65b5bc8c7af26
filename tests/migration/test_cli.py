"""Command lines of 0.1.0 that work for one more release, with the new form in a warning."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import Config, ConfigError, parse
from linnet.data import ByteTokenizer
from linnet.deprecation import LinnetDeprecationWarning
from linnet.evaluate.results import read_evaluations
from linnet.models import build_model, family
from linnet.runs.model import save_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config, path = family("tnl")(32, 2, vocab_size=256), tmp_path_factory.mktemp("models") / "tnl"
    save_model(path, config, build_model(config).state_dict(), ByteTokenizer())
    (path / "a.txt").write_text("a first document, of one line\n" * 9)
    return path


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def keys_of(result) -> list[str]:
    return [line[4:].partition(":")[0] for line in result.stderr.splitlines() if line.startswith("  - ")]


def test_several_kinds_at_once(run, monkeypatch):
    """One JSON object, as before; the warning holds one command per kind.

    The record of the model holds the date of the evaluation, so only the settings and the numbers are compared.
    """
    dates = (f"2026-01-01T00:00:{second:02}+00:00" for second in itertools.count())
    monkeypatch.setattr("linnet.provenance.date", lambda: next(dates))
    asked = ["--needle", "standard", "--depths", 2, "--lengths=300,500"]
    old = call("evaluate", run, "--text", run / "a.txt", *asked, "--json", "--device", "cpu")
    assert old.exit_code == 0, old.output
    found = json.loads(old.stdout)
    assert list(found) == ["text", "needle"]
    for command in (
        f"linnet evaluate text {run} {run / 'a.txt'} --device cpu --json",
        f"linnet evaluate needle {run} --mode standard --lengths 300,500 --depths 2 --device cpu --json",
    ):
        assert command in old.stderr
        kind = command.split()[2]
        new = json.loads(call(*command.split()[1:]).stdout)[kind]
        assert all(new[key] == found[kind][key] for key in ("asked", "results", "detail"))


def test_recall_alone(run):
    old = call("evaluate", run, "--recall", "--lengths", 32, "--pairs", 4, "--samples", 2)
    assert old.exit_code == 0 and "deprecated" in old.stderr and "mqar" in old.stdout
    assert "recall" in {record.kind for record in read_evaluations(run)}


def test_tasks_and_suites(run, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    tasks = ["--task", "capitals,opposites", "--include", "examples/tasks", "--limit", 2]
    old = call("evaluate", run, *tasks)
    assert old.exit_code == 0 and f"linnet evaluate tasks {run} capitals opposites --include" in old.stderr
    old = call("evaluate", run, "--suite", "csr", "--include", tmp_path / "none")
    assert old.exit_code == 2 and f"linnet evaluate suite {run} csr --include" in old.stderr


def test_the_demo(tmp_path):
    (tmp_path / "config.yaml").write_text("model: tnl-10m\n")
    for old, new in {(): "", ("--plan", "x.yaml"): " --plan x.yaml"}.items():
        result = call("evaluate", tmp_path, "--demo", *old)
        assert result.exit_code == 2 and f"linnet evaluate demo {tmp_path}{new}" in result.stderr
        assert keys_of(result) == ["FOLDER"]


@pytest.mark.parametrize(
    "arguments, keys",
    [
        (["RUN"], ["RUN"]),
        (["--text", "x"], ["RUN"]),
        (["RUN", "--text", "x", "--pairs", "4,8", "--limit", "3"], ["--pairs", "--limit"]),
        (["RUN", "--demo", "--text", "x", "--json"], ["--text", "--json"]),
        (["RUN", "--text", "x", "--plan", "p"], ["--plan"]),
        (["RUN", "--needle", "easy", "--recall", "--samples", "2"], ["--needle, --recall"]),
        (["RUN", "--text", "x", "--txt", "y"], ["--txt"]),
        (["RUN", "--text"], ["--text"]),
    ],
)
def test_what_was_an_error_is_one(run, arguments, keys):
    result = call("evaluate", *arguments)
    assert result.exit_code == 2 and keys_of(result) == keys, result.output


def test_the_old_name_of_extra_problems():
    class Old(Config):
        steps: int

        @classmethod
        def beside(cls, values):
            return ["rate: also wrong"]

    with pytest.warns(LinnetDeprecationWarning, match="extra_problems"), pytest.raises(ConfigError) as error:
        parse(Old, {"steps": "x"})
    assert error.value.problems[-1] == "rate: also wrong"
