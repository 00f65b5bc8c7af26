"""The command line: one file or folder per verb.

Verbs import torch and the rest only when they run, so `--help` is instant.
"""

import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from linnet.cli.bench import bench
from linnet.cli.compare import compare
from linnet.cli.convert import convert
from linnet.cli.data import data
from linnet.cli.demo import demo
from linnet.cli.evaluate import evaluate
from linnet.cli.fit import fit
from linnet.cli.generate import generate
from linnet.cli.models import models
from linnet.cli.report import report
from linnet.cli.runs import runs
from linnet.cli.schema import schema
from linnet.cli.serve import serve
from linnet.cli.study import study
from linnet.cli.study.tune import tune
from linnet.cli.train import train
from linnet.companions import Offer, companions
from linnet.config import ConfigError, printable
from linnet.signals import Interrupt, Terminated

ANEW = "the same command starts again from the beginning"
GOING_ON = "run the same command again to resume from what is saved"
STOPPED = dict.fromkeys(("demo", "train", "study", *companions()), GOING_ON) | {
    "evaluate": f"results that were printed are saved; {ANEW}",
    "evaluate demo": GOING_ON,
    "data lra": GOING_ON,
    "data latents": GOING_ON,
    "runs remove": "runs that were printed are removed; name the others again to remove them too",
}
UNSAVED = {"--plan", "--coordinate-check"}  # options with which a command that resumes saves nothing


PACKAGE = Path(__file__).parents[1]

# New objects between two collections of reference cycles, for 700 of Python. Importing torch and a verb makes half a
# million objects that stay, and looking for cycles among them again and again took a fifth of a short command.
COLLECT_EVERY = 50_000

# Turns for which a thread of OpenMP waits for the others, or for work, before it sleeps. libgomp's own 300,000 hold a
# core for most of a millisecond while the thread that is waited for has none, because other processes run: on a busy
# machine of two cores a training took many times as long (docs/training.md).
SPINS = "1000"
# Verbs of many small operations in a row, which lose more by threads that sleep on a quiet machine.
DECODING = {"generate", "serve", "bench"}


@contextmanager
def _plain_warnings(console: Console) -> Iterator[None]:
    """Prints warnings of Linnet as one line on stderr, without the line of source code that raised them."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message, category, filename, lineno, file=None, line=None):
            if category.__module__.partition(".")[0] == "linnet" or PACKAGE in Path(filename).parents:
                console.print(f"[bold yellow]warning[/] {escape(printable(str(message)))}", highlight=False)
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _hide_types_of_switches(command: Any) -> None:
    """Leaves `<bool>` out of the help of switches, which take no value, for a command and all below it."""
    every = command.get_params

    def get_params(ctx: typer.Context) -> list:
        parameters = every(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    command.get_params = get_params
    for other in getattr(command, "commands", {}).values():
        _hide_types_of_switches(other)


class _Group(typer.core.TyperGroup):
    """Turns errors that a user can fix into a message and an exit code; other errors keep their traceback."""

    def __init__(self, **attributes):
        super().__init__(**attributes)
        _hide_types_of_switches(self)

    def invoke(self, ctx):
        console = Console(stderr=True, soft_wrap=True)
        try:
            try:
                with _plain_warnings(console):
                    return super().invoke(ctx)
            except typer.BadParameter as error:
                if not error.message or error.param is None:  # an argument is missing: typer prints the usage
                    raise
                raise ConfigError([_bad_value(error)], "command line") from None
        except ConfigError as error:
            console.print(f"[bold red]error[/] {escape(printable(str(error)))}", highlight=False)
            raise typer.Exit(2) from None
        except OSError as error:
            from linnet.runs.files import FULL

            if error.errno in FULL:
                where = "" if error.filename is None else f"{error.filename}: "
                message = f"{where}the disk is full; free some space and run the same command again"
            elif error.filename is not None:
                message = f"{error.filename}: cannot be read or written ({error.strerror}); name another path"
            elif isinstance(error, FileNotFoundError) and _is_nowhere():
                message = "the current folder was removed; change to one that is there"
            else:
                raise
            console.print(f"[bold red]error[/] {escape(printable(message))}", highlight=False)
            raise typer.Exit(2) from None
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            message = "out of memory: lower the batch, the length or the size of the model, or use a larger machine"
            reason = escape(str(error).partition("\n")[0][:300])
            console.print(f"[bold red]error[/] {message} ({reason})", highlight=False)
            raise typer.Exit(2) from None
        except (KeyboardInterrupt, Terminated) as stop:
            if "LINNET_LAUNCH" not in os.environ:  # else the process that started this one prints it
                hint = STOPPED.get(ctx.meta.get("verb"), STOPPED.get(ctx.invoked_subcommand, ANEW))
                hint = ANEW if hint == GOING_ON and "unsaved" in ctx.meta else hint
                console.print(f"[bold yellow]stopped[/]; {hint}")
            raise typer.Exit(getattr(stop, "code", 130)) from None

    def resolve_command(self, ctx, args):
        for flag, value in zip(args, [*args[1:], None], strict=True):
            if (flag, value) == ("--out", "") or flag == "--out=":  # an empty path would be the current folder
                raise ConfigError(["--out '': is empty; name a folder, or '.' for the current one"], "command line")
        ctx.meta["verb"] = " ".join(args[:2])  # such as "evaluate demo"
        if not UNSAVED.isdisjoint(args):
            ctx.meta["unsaved"] = True
        return super().resolve_command(ctx, args)


def _is_nowhere() -> bool:
    """Whether the current folder was removed. It still exists under the name `.`."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _out_of_memory(error: Exception) -> bool:
    """Whether an error of Python or PyTorch, which has no class of its own on a CPU, says that memory is exhausted."""
    signs = ("can't allocate memory", "out of memory", "Storage size calculation overflowed", "numel: integer multipl")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def _bad_value(error: typer.BadParameter) -> str:
    """Returns the error of a value that typer refuses in the form of all other errors: option, problem, value."""
    name = error.param.name if error.param.param_type_name == "argument" else error.param.opts[0]
    cause = error.__cause__  # newer releases of typer check with pydantic, and their message lacks the value
    details = cause.errors()[0] if hasattr(cause, "errors") else {"type": "value_error"}
    suffix = "" if details["type"] == "value_error" else f" (given {details['input']!r})"
    return f"{name}: {error.message.removeprefix('Value error, ').rstrip('.')}{suffix}"


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Linnet: from one layer file to a scaling law, for linear-complexity sequence models.",
    epilog="Start with [bold]linnet demo --quick[/], then [bold]linnet models[/] and [bold]linnet study --help[/].",
)


def _say_versions(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version
        from platform import python_version

        import linnet

        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "not installed"
        typer.echo(f"linnet {linnet.__version__}, torch {torch}, python {python_version()}")
        raise typer.Exit


@app.callback()
def _linnet(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the versions, for a bug report.", callback=_say_versions, is_eager=True),
    ] = False,
) -> None:
    pass


for verb in (demo, models, train, generate, serve, compare, fit, convert, report, schema):
    app.command(name=verb.__name__)(verb)
study.command()(tune)
app.add_typer(study, name="study")
app.add_typer(data, name="data")
app.add_typer(evaluate, name="evaluate")
for verb, package in companions().items():
    app.add_typer(import_module(f"{package}.cli").app, name=verb)
app.add_typer(runs, name="runs")
app.add_typer(bench, name="bench")
groups = {"": app, "data": data, "evaluate": evaluate, "bench": bench}
for path, command in Offer("commands").items():  # "data images": the command images of data
    group, _, name = path.rpartition(" ")
    groups[group].command(name=name)(command)


def main() -> None:
    from linnet.install import name_conflict
    from linnet.trust import SAFE_PATH

    command = typer.main.get_command(app)  # before the signals: a stop here has nothing to save, and no handler yet
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, Interrupt())
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "RANK" not in os.environ:  # ranks may wait in C++
        signal.signal(signal.SIGTERM, Interrupt(Terminated))
    gc.set_threshold(COLLECT_EVERY, *gc.get_threshold()[1:])
    # transformers imports torchao, which warns of each of its GPU libraries that a PyTorch for CPUs cannot load.
    for name in ("torchao", "torch.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # libgomp reads it when torch is imported.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ) and not DECODING & set(sys.argv[1:2]):
        os.environ["GOMP_SPINCOUNT"] = SPINS
    os.environ[SAFE_PATH] = "1"  # for all processes that this one starts, those of PyTorch's compiler included
    if conflict := name_conflict():
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold yellow]warning[/] {escape(conflict)}")
    if "LINNET_LAUNCH" in os.environ:
        from linnet.train.processes.launch import ended_by

        sys.exit(ended_by(lambda: command(prog_name="linnet")))
    sys.exit(command(prog_name="linnet"))
