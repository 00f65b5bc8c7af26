"""What every verb has: help that says all it was given, and one name for one thing."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from children import Child
from typer.main import get_command
from typer.testing import CliRunner

import linnet
from linnet.cli import app
from linnet.signals import Interrupt


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


@pytest.mark.parametrize("group", sorted({verb.partition(" ")[0] for verb in VERBS if " " in verb}))
def test_help_of_a_group_names_its_commands(group):
    """Also where the group takes the arguments of one command without its name, and --help is that command's."""
    shown = CliRunner().invoke(app, [group, "--help"]).output
    default = getattr(type(get_command(app).commands[group]), "default", None)
    names = {verb.partition(" ")[2] for verb in VERBS if verb.startswith(f"{group} ")} - {default}
    assert not [name for name in names if name not in shown]


def test_switches_take_no_value():
    """Of all commands at once: also of groups, of --help and --version, and of those for completion."""
    groups = {verb.partition(" ")[0] for verb in VERBS if " " in verb}
    shown = {verb: CliRunner().invoke(app, [*verb.split(), "--help"]).output for verb in ("", *groups, *VERBS)}
    assert all("--help" in text for text in shown.values())
    assert not [verb for verb, text in shown.items() if "<bool>" in text]


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_whole_at_80_columns(verb, monkeypatch):
    """A word that is wider than its column would be cut, and a long list of choices folded within a choice."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [*verb.split(), "--help"]).output.replace("--no-allow-plu…", "")
    assert "…" not in shown.replace("no-allow-plugin…", "")  # the default of corpus score's pair of flags
    context = typer.Context(COMMANDS[verb])
    for parameter in COMMANDS[verb].get_params(context):
        if parameter.param_type_name == "option":
            assert parameter.display_type_rich(ctx=context) in shown, parameter.name


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
    before = signal.signal(signal.SIGINT, Interrupt())
    try:
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module("swallowing")
            time.sleep(30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "swallowing" in sys.modules


@pytest.mark.parametrize("options, signals", [("", 2), ("patient=False", 1)])
def test_an_interrupt_need_not_wait_for_an_import(tmp_path, options, signals):
    text = "import signal, time\nfor _ in range({}):\n    signal.raise_signal(signal.SIGINT)\ntime.sleep(30)"
    (tmp_path / "slow.py").write_text(text.format(signals))
    program = "import signal, sys\nfrom linnet.signals import Interrupt\n"
    program += f"signal.signal(signal.SIGINT, Interrupt({options}))\nsys.path.insert(0, sys.argv[1])\nimport slow"
    child = Child(program, tmp_path)
    assert child.wait(20) == -signal.SIGINT and child.output() == ""


def test_an_interrupt_before_the_commands_are_imported_has_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)")
    path = f"{tmp_path}{os.pathsep}{Path(linnet.__file__).parents[1]}"
    command = [sys.executable, "-P", "-m", "linnet", "--version"]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGINT and ended.stderr == b""


def test_ctrl_c_while_commands_are_built_ends_the_process_without_a_traceback():
    path = str(Path(linnet.__file__).parents[1])
    program = """
import signal, sys, typer.main
def build(*_, **__):
    signal.raise_signal(signal.SIGINT)
typer.main.get_command = typer.main.get_group = build
sys.argv = ["linnet", "--version"]
from linnet.__main__ import main
main()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGINT and ended.stderr == b""


def test_sigterm_lets_a_command_clean_up():
    """So a study asks its workers to save, and temporary folders are removed."""
    program = """
import time, linnet.cli
def wait(**_):
    try:
        print("began", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
linnet.cli.typer.main.get_command = lambda app: wait
linnet.cli.main()
"""
    child = Child(program)
    while "began" not in child.output() and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 128 + signal.SIGTERM and "cleaned up" in child.output()


@pytest.mark.parametrize(
    "verb, variables, turns",
    [("train", {}, "1000"), ("generate", {}, "None"), ("train", {"GOMP_SPINCOUNT": "7"}, "7")]
    + [("train", {"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_sleep_soon(verb, variables, turns):
    program = "import os, linnet.cli\nshow = lambda **_: print(os.environ.get('GOMP_SPINCOUNT'))\n"
    program += "linnet.cli.typer.main.get_command = lambda app: show\nlinnet.cli.main()"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    command = [sys.executable, "-P", "-c", program, verb]
    path = str(Path(linnet.__file__).parents[1])
    ended = subprocess.run(command, env=environment | variables | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.stdout.strip() == turns, ended.stderr
