"""Options made from a function's parameters, its docstring and its groups."""

import inspect
import io
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field
from rich.console import Console
from rich.progress import TextColumn
from typer.main import get_command
from typer.testing import CliRunner

from linnet.cli import app as linnet_app
from linnet.config import Config, ConfigError, entries, printable
from linnet.options import STEADY, AsJson, Count, Steps, by_option, options, parse_options, values_of, working

CALLS = []


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which documents stay.

    Attributes:
        keep: Share to keep, above 0 and at most 1 (default: nine tenths).
        by_source: Whether each source has a threshold.
        names: Sources; may be given again.
        limit: Most documents.
    """

    keep: Annotated[float, typer.Option(max=1)] = 0.9
    by_source: bool = False
    names: list[str] | None = None
    limit: Count | None = None


@options
def run(
    folder: Path,
    typed: typer.Context,
    *,
    cut: Cut,
    mode: Literal["fast", "exact"] = "fast",
    workers: Count | None = None,
    set_: list[str] | None = None,
    page: bool = True,
    rows: Annotated[int, typer.Option("--rows", "-n")] = 3,
    as_json: AsJson = False,
) -> None:
    """Leave some out.

    More about it.

    Args:
        folder (FOLDER): Folder of a stage,
            or any source.
        mode: How.
        workers: Processes (default: one per core).
        set_ (KEY=VALUE): Change a key.
        page: Write a page.
        rows: Rows to show.
        as_json: Print JSON.
    """
    assert typed.command.name == "run"
    CALLS.append((folder, cut, mode, workers, set_, page, rows, as_json))


def command():
    app = typer.Typer()
    app.command()(run)
    return app


def parameters() -> dict:
    return {one.name: one for one in get_command(command()).params}


def test_arguments_and_options_by_the_kind_of_the_parameter():
    found = parameters()
    flags = {name: [*one.opts, *one.secondary_opts] for name, one in found.items() if one.param_type_name == "option"}
    assert [name for name, one in found.items() if one.param_type_name == "argument"] == ["folder"]
    assert flags == {
        "keep": ["--keep"],
        "by_source": ["--by-source"],
        "names": ["--names"],
        "limit": ["--limit"],
        "mode": ["--mode"],
        "workers": ["--workers"],
        "set_": ["--set"],
        "page": ["--page", "--no-page"],
        "rows": ["--rows", "-n"],
        "as_json": ["--json"],
    } | {name: flags[name] for name in flags if name in ("install_completion", "show_completion")}


def test_help_metavar_and_default_come_from_the_docstrings():
    found = parameters()
    assert found["folder"].help == "Folder of a stage, or any source." and found["folder"].metavar == "FOLDER"
    assert (found["workers"].help, found["workers"].show_default) == ("Processes.", "one per core")
    assert found["set_"].metavar == "KEY=VALUE"
    assert found["keep"].help == "Share to keep, above 0 and at most 1." and found["keep"].default == 0.9
    assert found["keep"].show_default == "nine tenths"
    assert get_command(command()).help == "Leave some out.\n\nMore about it."


def test_long_choices_are_listed_in_the_help_unless_it_names_them():
    @options
    def one(
        *,
        to: Literal["a_long_name", "another", "third_one"] | None = None,
        way: Literal["forwards", "backwards", "sideways"] = "forwards",
    ) -> None:
        """Convert.

        Args:
            to: Where to.
            way: forwards: on. backwards: back. sideways: neither.
        """

    app = typer.Typer()
    app.command()(one)
    found = {parameter.name: parameter for parameter in get_command(app).params}
    assert (found["to"].metavar, found["to"].help) == ("NAME", "Where to. One of a_long_name, another, third_one.")
    assert (found["way"].metavar, found["way"].help) == ("NAME", "forwards: on. backwards: back. sideways: neither.")


@pytest.mark.parametrize("wrong", [("--workers", "0"), ("--limit", "0"), ("--keep", "2"), ("--mode", "slow")])
def test_ranges_and_choices_come_from_the_types(wrong):
    result = CliRunner().invoke(command(), ["a", *wrong])
    assert result.exit_code == 2 and wrong[0] in result.output


def test_the_function_gets_its_group():
    CALLS.clear()
    result = CliRunner().invoke(command(), ["a", "--keep", "0.5", "--names", "x", "--names", "y", "--mode", "exact"])
    assert result.exit_code == 0, result.output
    assert CALLS == [(Path("a"), Cut(keep=0.5, names=["x", "y"]), "exact", None, None, True, 3, False)]
    CliRunner().invoke(command(), ["a", "--by-source", "--no-page", "-n", "1", "--json", "--set", "a=1"])
    assert CALLS[1] == (Path("a"), Cut(by_source=True), "fast", None, ["a=1"], False, 1, True)


def test_the_values_of_a_group_are_those_that_are_set():
    assert values_of(Cut(by_source=False)) == {"keep": 0.9, "by_source": False}


def test_a_command_is_called_from_python_with_its_group():
    @options
    def cut(*, cut: Cut) -> Cut:
        """Cut."""
        return cut

    assert cut(cut=Cut(keep=0.1)).keep == 0.1


class Kept(Config):
    keep_share: float = Field(gt=0, le=1)
    limit: int = Field(ge=1)


def test_problems_of_a_configuration_name_options():
    with pytest.raises(ConfigError) as caught:
        parse_options(Kept, {"keep_share": 2.0, "limit": 0})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["--keep-share", "--limit"]


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("max_tokens: 0 is below 1", "--max-tokens: 0 is below 1"),
        ("stop.2: '' is empty", "--stop: '' is empty"),
        ("source: 'x' does not exist", "PATH: 'x' does not exist"),
        ("other_key: 1 is odd: why?", "other_key: 1 is odd: why?"),
        (
            "stop: a has no effect with max_tokens: 1; use max_tokens: 2",
            "--stop: a has no effect with --max-tokens 1; give --max-tokens 2",
        ),
    ],
)
def test_problems_of_keys_by_option(problem, expected):
    assert by_option(("max_tokens", "stop"), source="PATH")(problem) == expected


def test_names_in_received_files_do_not_control_the_terminal(tmp_path, monkeypatch):
    assert printable("a\tb\n\x1b[31m\x07\x9b é") == "a\tb\n\\x1b[31m\\x07\\x9b é"
    pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    index = {"weight_map": {"x": "\x1b]0;title\x07.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    told = CliRunner().invoke(linnet_app, ["convert", str(tmp_path), "--out", str(tmp_path / "out")])
    assert told.exit_code == 2 and "\\x1b]0;title\\x07.safetensors" in told.stderr
    assert "\x1b" not in told.stderr


def test_each_entry_of_a_docstring_is_help_of_a_parameter():
    """One whose parameter is not there, or that has another form, would be lost without a word."""

    def below(group):
        for one in group.commands.values():
            yield from below(one) if hasattr(one, "commands") else [one]

    checked = 0
    for one in below(get_command(linnet_app)):
        helps = {parameter.name: parameter.help for parameter in one.params}
        for entry in entries(inspect.unwrap(one.callback).__doc__, "Args"):
            name, _, text = entry.partition(": ")
            text = text.partition(" (default: ")[0].rstrip(".")
            shown = (helps[name.partition(" ")[0]] or "").partition(" One of ")[0]  # long choices follow
            assert shown.rstrip(".") == text, (one.name, entry)
            checked += 1
    assert checked > 60


@pytest.mark.parametrize("total, text", [(8, "prompts: 50 %, about 10 s left\n"), (None, "prompts: 4 done\n")])
def test_a_bar_prints_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, total, text):
    clock = [0.0]
    # Of this module alone: an event loop in another thread would wait by the false clock, for hours by the true one.
    monkeypatch.setattr("linnet.options.time", SimpleNamespace(monotonic=lambda: clock[0]))
    console = Console(file=io.StringIO())
    with Steps(TextColumn("{task.description}"), console=console) as bar:
        bar.get_time = lambda: clock[0]
        task = bar.add_task("prompts", total=total)
        for number in range(1, 5):
            clock[0] = number * 10.0
            bar.advance(task)
            if number < 3:
                assert not console.file.getvalue(), "less than half a minute"
    assert console.file.getvalue().count("\n") == 1
    clock[0] = 10.0 + STEADY * 2
    bar.update(task, completed=4)
    assert console.file.getvalue().endswith(text.replace("10 s", "1 min 10 s"))


def test_one_long_computation_is_announced_without_a_terminal(monkeypatch):
    """The check of a mixer, or the count of a slow one, calls nothing for a minute."""
    file = io.StringIO()
    with working("reading", Console(file=file)):
        pass
    assert file.getvalue() == ""  # soon done
    monkeypatch.setattr("linnet.options.QUIET", 0.01)
    with working("counting", Console(file=file)) as show:
        wait_for(lambda: "counting\n" in file.getvalue())
        show("model 2 of 3")
        wait_for(lambda: "counting: model 2 of 3\n" in file.getvalue())
        time.sleep(0.3)
    assert file.getvalue() == "counting\ncounting: model 2 of 3\n"


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
