"""What every verb has: help that says all it was given, and one name for one thing."""

import importlib
import re
import signal
import sys
import time

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import linnet
from linnet.cli import app, interrupt


def verbs(group=None, name: str = ""):
    """Names of all verbs, with their commands."""
    group = group or get_command(app)
    for part, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{name}{part} ")
        else:
            yield f"{name}{part}", command


COMMANDS = dict(verbs())
VERBS = {verb: {parameter.name: parameter for parameter in command.params} for verb, command in COMMANDS.items()}


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_every_option(verb):
    result = CliRunner().invoke(app, [*verb.split(), "--help"], terminal_width=200)
    assert result.exit_code == 0
    for parameter in VERBS[verb].values():
        if parameter.param_type_name == "option" and not parameter.hidden:
            assert parameter.opts[0] in result.output and parameter.help, parameter.name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("evaluate", "needle", "run", "--mode", "ezy"), "--mode: 'ezy' is not one of 'easy', "),
        (("schema", "images"), "kind: 'images' is not one of 'train', 'study', 'mad'\n"),
        (("convert", "--to", "onnx", "run"), "--to: 'onnx' is not one of 'hf', 'llama', 'vit', 'timm', 'linnet', "),
        (("mad", "run", "tnl", "--bundle", "0"), "--bundle: "),
        (("train", "--model", "tnl-10m", "--out", ""), "--out '': is empty; name a folder"),
        (("mad", "run", "tnl", "--out="), "--out '': is empty; name a folder"),
    ],
)
def test_a_wrong_value_is_told_as_all_errors_are(arguments, told):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and result.stderr.startswith(f"error command line: 1 problem\n  - {told}")
    assert "Value error" not in result.stderr and ("--bundle" not in told or "0" in result.stderr)


@pytest.mark.parametrize("verb", VERBS)
def test_prose_of_help_is_not_broken_twice(verb):
    """Help keeps line breaks, so a terminal of 80 columns would break a longer line once more."""
    for paragraph in (COMMANDS[verb].help or "").split("\n\n")[1:]:
        lines = [re.sub(r"\[/?\w*\]", "", line) for line in paragraph.strip("\n").split("\n")]
        commands = paragraph.lstrip().startswith("[bold]")
        assert commands or len(lines) == 1 or max(map(len, lines)) <= 78, lines


def test_brackets_in_help_are_no_markup():
    assert "[b] a blank" in CliRunner().invoke(app, ["mad", "data", "--help"], terminal_width=200).output


def test_the_type_of_numbers_is_dtype_wherever_a_model_is_run():
    """`precision` is a key of training, where weights stay float32 whatever products are made in."""
    assert not [verb for verb, parameters in VERBS.items() if "precision" in parameters]
    found = {verb for verb, parameters in VERBS.items() if "dtype" in parameters}
    assert {"generate", "serve", "evaluate text", "bench generate"} <= found


def test_versions_for_a_report_of_a_bug():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith(f"linnet {linnet.__version__}, torch ")


def test_an_interrupt_comes_after_an_import_that_would_swallow_it(tmp_path, monkeypatch):
    """PyTorch's imports do: of 40 interrupts during them, three were lost."""
    (tmp_path / "swallowing.py").write_text("""
import signal, time
try:
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.1)
except:
    pass
""")
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module("swallowing")
            time.sleep(30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "swallowing" in sys.modules
