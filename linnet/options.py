"""Options of a command, made from the function that runs it, its tables, durations, and the bar of its progress.

    @options
    def filter_(folder: str, *, out: Path, cut: Cut, workers: Count = 1) -> None:
        '''Leave out the documents with the worst scores.

        Args:
            folder (FOLDER): Folder of an earlier stage.
            out: Folder to write (default: a new one).
            workers: Processes.
        '''

Positional parameters are arguments of the command line, the others are options: `max_tokens` is --max-tokens, `set_`
is --set. The section Args has their help; a word in parentheses is the metavar, and `(default: ...)` at the end is what
help shows as the default. A boolean option that is False by default has no --no- form. A `typer.Option` in the
annotation says what is different, such as a range or other flags.

A parameter whose type is a dataclass, here `Cut`, becomes one option per keyword of it, with the help under Attributes.
The function gets the instance. Typer checks types and ranges; a configuration made by `parse_options` checks the rest.
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import json
import math
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer.core import TyperGroup
from typer.models import OptionInfo, ParameterInfo

from linnet.config import Config, ConfigError, Problem, checking, entries, parse

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["bfloat16", "float32", "float64"]
F = TypeVar("F", bound=Callable)
C = TypeVar("C", bound=Config)
SHELL = {"rm": "remove", "ls": "list"}  # commands of a shell -> of a group
WIDEST = 22  # choices of more characters are listed in the text of the help; as a metavar they would fold within words
_ENTRY = re.compile(r"(?P<name>\w+)(?: \((?P<metavar>\S+)\))?: (?P<help>.*?)(?: \(default: (?P<default>.*)\)\.)?")

Count = Annotated[int, typer.Option(min=1)]
AsJson = Annotated[bool, typer.Option("--json")]
AllowPlugins = Annotated[
    bool,
    typer.Option(help="Run the Python files that the folder's config.yaml names as plugins. Only if you trust them."),
]


def options(function: F) -> F:
    """Gives a function the signature from which typer makes arguments and options; the top of this file says how."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in _parameters(function, "Args"):
        if inspect.isclass(parameter.annotation) and dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _parameters(parameter.annotation, "Attributes")
        else:
            parameters.append(parameter)

    @functools.wraps(function)
    def run(*arguments: Any, **values: Any) -> Any:
        for name, group in groups.items():
            values[name] = values.get(name) or group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
        return function(*arguments, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__doc__ = (inspect.getdoc(function) or "").partition("\nArgs:\n")[0]
    return run  # type: ignore[return-value]


def is_given(typed: typer.Context, name: str) -> bool:
    """Returns whether a parameter has its value from the command line, and not as its default."""
    source = typed.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def default_verb(verb: str, keep_help: bool = False) -> type[TyperGroup]:
    """Returns a group of commands that takes arguments without the name of a command as those of `verb`.

    Args:
        keep_help: whether --help is that of the group, and not of `verb`, at whose end the other commands stand.
    """

    class Group(TyperGroup):
        default = verb

        def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
            known = (*self.commands, *ctx.help_option_names) if keep_help else self.commands
            if args and args[0] not in known and not args[0].startswith("-") and not Path(args[0]).exists():
                near = difflib.get_close_matches(args[0], self.commands, n=1, cutoff=0.75)
                if meant := [SHELL[args[0]]] if SHELL.get(args[0]) in self.commands else near:
                    problem = f"{args[0]}: no such command or path; did you mean {ctx.command_path} {meant[0]}?"
                    raise ConfigError([problem], "command line")
            return super().parse_args(ctx, args if args and args[0] in known else [verb, *args])

        def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
            command = super().get_command(ctx, cmd_name)
            if command is None or cmd_name != verb or keep_help:
                return command
            command, others = copy.copy(command), (item for item in self.commands.items() if item[0] != verb)
            about = (f"[bold]{ctx.command_path} {name}[/]  {other.get_short_help_str(200)}" for name, other in others)
            command.epilog = "\n\n".join([*([command.epilog] if command.epilog else []), "Further commands:", *about])
            return command

    return Group


def values_of(group: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are not None: the keys of a configuration, others have their default."""
    return {key: value for key, value in vars(group).items() if value is not None}


def parse_options(cls: type[C], values: Mapping[str, Any], where: str = "command line") -> C:
    """Returns a configuration. Raises ConfigError with the problems of all its values, under their options."""
    with checking(where, by_option(cls.model_fields)):
        return parse(cls, values, where)


def by_option(keys: Iterable[str], **names: str) -> Callable[[str], Problem]:
    """Returns a function that writes a problem of a key, or of an item of its list, under the option that sets it.

    Its fix gives options too, for `set KEY: VALUE`, `use KEY: VALUE`, `set KEY (...)`, and so does `with KEY: VALUE`.
    Other problems stay as they are.

    Args:
        keys: those that an option sets. names: of what sets further keys, such as source="PATH".
    """
    known = {key: f"--{key.replace('_', '-')}" for key in keys} | names
    words = "|".join(known)
    fix = re.compile(rf"\b(give|set|use|with) ({words})(?:: true\b|:(?= )|(?= \())|(?<= in )({words})$")

    def option(key: re.Match) -> str:
        return f"{'with' if key[1] == 'with' else 'give'} {known[key[2]]}" if key[1] else known[key[3]]

    def rename(line: str) -> Problem:
        problem = Problem(fix.sub(option, line))
        return problem.at(known.get(problem.key, problem.path))

    return rename


def _parameters(source: Callable, section: str) -> Iterator[inspect.Parameter]:
    """Yields the parameters of a function or dataclass for typer, with the texts of a section of its docstring."""
    matches = [match for entry in entries(source.__doc__ or "", section) if (match := _ENTRY.fullmatch(entry))]
    texts = {match["name"]: {key: text for key, text in match.groupdict().items() if text} for match in matches}
    for name, parameter in inspect.signature(source, eval_str=True).parameters.items():
        if parameter.annotation is typer.Context or dataclasses.is_dataclass(parameter.annotation):
            yield parameter.replace(kind=parameter.KEYWORD_ONLY)
        else:
            yield _described(parameter, texts.get(name, {}))


def _described(parameter: inspect.Parameter, text: Mapping[str, str]) -> inspect.Parameter:
    """Returns a parameter for typer, with the help, metavar and default that its text has."""
    kind, notes = _bare(parameter.annotation)
    usual = typer.Option() if parameter.kind is parameter.KEYWORD_ONLY else typer.Argument()
    info = copy.copy(next((note for note in notes if isinstance(note, ParameterInfo)), usual))
    if "help" in text:
        info.help = text["help"] + ("." if "default" in text else "")
    info.metavar = text.get("metavar", info.metavar)
    choices = list(_choices(kind))
    if info.metavar is None and len("|".join(choices)) > WIDEST:
        info.metavar = "NAME"
        if not all(re.search(rf"\b{choice}\b", info.help or "") for choice in choices):
            info.help = f"{info.help or ''} One of {', '.join(choices)}.".lstrip()
    info.show_default = text.get("default", info.show_default)
    flag = parameter.name.endswith("_") or (kind is bool and not parameter.default)
    if isinstance(info, OptionInfo) and info.default is not ...:  # the first flag
        info.param_decls = (str(info.default), *(info.param_decls or ()))
    elif isinstance(info, OptionInfo) and flag:
        info.param_decls = (f"--{parameter.name.rstrip('_').replace('_', '-')}",)
    info.default = ... if parameter.default is parameter.empty else parameter.default
    return parameter.replace(annotation=kind, default=info, kind=parameter.KEYWORD_ONLY)


def _choices(kind: Any) -> Iterator[str]:
    """Yields the values that a type allows, if it is a Literal, or a list of one, or has None beside it."""
    for part in get_args(kind):
        if get_origin(kind) is Literal:
            yield str(part)
        else:
            yield from _choices(part)


def _bare(kind: Any) -> tuple[Any, list]:
    """Returns a type without its annotations, and these: those of `Count | None` are inside."""
    if get_origin(kind) is Annotated:
        bare, inner = _bare(get_args(kind)[0])
        return bare, [*get_args(kind)[1:], *inner]
    if get_origin(kind) in (Union, UnionType):
        parts, notes = zip(*map(_bare, get_args(kind)), strict=True)
        return functools.reduce(operator.or_, parts), sum(notes, [])
    return kind, []


def echo_json(values: Any, ensure_ascii: bool = True, allow_nan: bool = True) -> None:
    """Prints values as JSON for --json."""
    typer.echo(json.dumps(values, indent=1, ensure_ascii=ensure_ascii, allow_nan=allow_nan))


def open_page(page: Path) -> None:
    """Shows a page in the browser."""
    import webbrowser

    webbrowser.open(page.resolve().as_uri())


WIDE = {"pad_edge": False, "padding": (0, 2, 0, 0)}  # styles of tables
BOLD = {**WIDE, "header_style": "bold"}
QUIET = 5.0  # seconds between two lines about progress where the output is not a terminal
STEADY = 30.0  # the same for a bar, which may last for hours
UNKNOWN = "–"
RULED = {"pad_edge": False, "box": SIMPLE}


def end_with_failed(folders: Sequence[Path], console: Console) -> None:
    """Ends the command with exit code 1 if runs failed, after a line that names the error of the first.

    Args:
        folders: run folders with an error.txt. A run that diverged has a result, so it is not one of them.
    """
    if not folders:
        return
    runs = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
    others = ", and error.txt in the folders of the others" if len(folders) > 1 else ""
    line = f"[red]{runs} failed[/]; see {escape(str(folders[0] / 'error.txt'))}{others}; the same command tries again"
    console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def make_table(*columns: str, rows: Iterable[Iterable[str]] = (), no_wrap: bool = False, style: Mapping = {}) -> Table:
    """Returns a table for the terminal; columns "#name" hold numbers and stand right, and long names "~name" fold."""
    made = Table(**{"box": None, **style})
    for column in columns:
        number, fold = column.startswith("#"), column.startswith("~")
        made.add_column(column[number or fold :], justify="right" if number else "left", no_wrap=no_wrap and not fold)
        if fold:
            made.columns[-1].overflow, made.columns[-1].min_width = "fold", 12
    for row in rows:
        made.add_row(*row)
    return made


@contextlib.contextmanager
def working(text: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Shows on stderr what a command works on; yields a function that shows how far it is, such as "model 3 of 40".

    Without a terminal it is a line, at most one every `QUIET` seconds. A thread prints it, so a single long computation
    is announced too.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        with console.status(escape(text)) as status:
            yield lambda place: status.update(escape(f"{text}: {place}"))
        return
    line, printed, at = text, "", time.monotonic()
    ended, lock = threading.Event(), threading.Lock()

    def announce() -> None:
        nonlocal printed, at
        with lock:
            if line != printed and time.monotonic() - at >= QUIET:
                printed, at = line, time.monotonic()
                console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(place: str) -> None:
        nonlocal line
        line = f"{text}: {place}"
        announce()

    def watch() -> None:
        while not ended.wait(max(QUIET / 5, 0.1)):
            announce()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()


def duration(seconds: float | None) -> str:
    """Returns seconds as people read them: 0.42 s, 12.3 s, 3 min 20 s, 5 h 12 min, 3 d 4 h; a dash for None or NaN."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    short = Decimal(f"{seconds:.2e}")
    if short < 60:
        text = f"{short:f}"
        return f"{text.rstrip('0').rstrip('.') if '.' in text else text} s"
    if round(seconds) < 3600:
        number, rest, units = *divmod(round(seconds), 60), ("min", "s")
    elif round(seconds / 60) < 48 * 60:
        number, rest, units = *divmod(round(seconds / 60), 60), ("h", "min")
    else:
        number, rest, units = *divmod(round(seconds / 3600), 24), ("d", "h")
    return f"{number} {units[0]} {rest} {units[1]}" if rest else f"{number} {units[0]}"


class Steps(Progress):
    """A progress bar on a terminal; elsewhere a line, at most one every `STEADY` seconds."""

    def __init__(self, *columns: ProgressColumn, console: Console):
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._printed = time.monotonic()

    def update(self, task_id: TaskID, **values: Any) -> None:
        super().update(task_id, **values)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        if self.console.is_terminal or time.monotonic() - self._printed < STEADY:
            return
        self._printed, task = time.monotonic(), self._tasks[task_id]
        text = f"{task.description}: {task.completed:,.0f} done"
        if task.total and task.completed:
            left = (task.elapsed or 0.0) * (task.total - task.completed) / task.completed
            text = f"{task.description}: {task.percentage:.0f} %, about {duration(round(left))} left"
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Bar(Steps):
    """A progress bar; call it with the name of the current step, its finished bytes and its total bytes."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console)
        self._doing: tuple | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._doing is None or self._doing[0] != what:
            self._doing = (what, self.add_task(what, total=total))
        self.update(self._doing[1], completed=done, total=total)


def parse_seeds(option: str, text: str, problems: list[str]) -> tuple[int, ...]:
    """Reads the seeds of an option, with commas between, each once; () and a problem if they are none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) < 1 << 63 for part in parts):
        problems.append(f"{option} {text!r}: write numbers below 2^63 with commas between, such as 0,1,2")
        return ()
    return tuple(dict.fromkeys(map(int, parts)))


def parse_numbers(given: str) -> list[int]:
    """Reads FROM:TO:HOW MANY (evenly spaced) or numbers with commas. Raises ValueError unless they ascend from 1."""
    if ":" in given:
        first, last, count = map(int, given.split(":"))
        step = (last - first) / max(count - 1, 1)
        numbers = [round(first + i * step) for i in range(count)]
    else:
        numbers = [int(part) for part in given.split(",")]
    if not numbers or min(numbers) < 1 or numbers != sorted(set(numbers)):
        raise ValueError(f"{given!r} does not ascend from 1")
    return numbers
