"""Translates command lines of `linnet evaluate` 0.1.0, which had no sub-commands, into sub-commands."""

import shlex
from collections.abc import Iterable

from linnet.config import ConfigError, nearest
from linnet.deprecation import warn

FLAGS = ("--recall", "--json", "--demo", "--allow-plugins")  # take no value
COMMON = ("--device", "--dtype", "--json", "--allow-plugins")
ASKS = {"--text": "text", "--needle": "needle", "--recall": "recall", "--suite": "suite", "--task": "tasks"}
QUESTIONS = ("--include", "--shots", "--limit", "--context", "--too-long")
OPTIONS = {
    "text": ("--method", "--window", "--stride", "--text-key"),
    "needle": ("--lengths", "--depths", "--samples", "--scoring", "--haystack", "--digits"),
    "recall": ("--lengths", "--samples", "--pairs"),
    "suite": QUESTIONS,
    "tasks": QUESTIONS,
    "demo": ("--plan",),
}


def translate(args: list[str], commands: Iterable[str]) -> list[list[str]]:
    """Returns the sub-commands that do what `linnet evaluate ARGS` did, and warns with them.

    Args:
        args: words of the command line after `linnet evaluate`.
        commands: names of the sub-commands.

    Raises:
        ConfigError: no evaluation or no run is named, or an option is unknown or has no effect.
    """
    given, places = _scan(args)
    asked = [kind for option, kind in ASKS.items() if option in given]
    if not asked and "--demo" not in given:
        wrong = places[0] if places else args[0]
        message = f"{wrong}: not a sub-command, and no evaluation is named; {nearest(wrong, commands)}"
        raise ConfigError([f"{message}; write linnet evaluate text {wrong} PATH"], "evaluate")
    asked = ["demo"] if "--demo" in given else asked
    problems = [f"{option}: {what}" for option, what in _idle(given, asked)]
    if not places and asked != ["demo"]:
        problems.append("RUN: name a run folder to evaluate")
    problems += [f"{extra}: unexpected; give one RUN" for extra in places[1:]]
    if {"needle", "recall"} <= set(asked) and given.keys() & {"--lengths", "--samples"}:
        problems.append("--needle, --recall: --lengths and --samples cannot be given for both; use two commands")
    if problems:
        raise ConfigError(problems, "evaluate")
    lines = [_line(kind, given, places) for kind in asked]
    new = " && ".join(shlex.join(["linnet", "evaluate", *line]) for line in lines)
    warn(f"linnet evaluate {places[0] if places else ''}".strip() + " with options alone", new, stacklevel=2)
    return lines


def _scan(args: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Returns values by option, and the words that are not options."""
    given: dict[str, list[str]] = {}
    places: list[str] = []
    rest = iter(args)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            places.append(word)
        elif name in FLAGS:
            given.setdefault(name, [])
        elif equals or (value := next(rest, None)) is not None:
            given.setdefault(name, []).append(value)
        else:
            raise ConfigError([f"{name}: has no value; give one after it"], "evaluate")
    return given, places


def _idle(given: Iterable[str], asked: list[str]) -> list[tuple[str, str]]:
    """Returns options that do not apply to the requested evaluations, each with the problem."""
    demo = asked == ["demo"]
    fitting = {option for kind in asked for option in OPTIONS[kind]}
    fitting |= {"--demo"} if demo else {*ASKS, *COMMON}
    found = []
    for option in given:
        kinds = [kind for kind, options in OPTIONS.items() if option in options]
        if option in fitting:
            continue
        if demo and (kinds or option in ASKS or option in COMMON):
            found.append((option, "has no effect with --demo; leave it out"))
        elif kinds:
            names = ", ".join(f"linnet evaluate {kind}" for kind in kinds)
            found.append((option, f"has no effect on these evaluations; it belongs to {names}"))
        else:
            known = {*ASKS, *COMMON, "--demo", *(name for options in OPTIONS.values() for name in options)}
            found.append((option, f"unknown option; {nearest(option, known)}"))
    return found


def _line(kind: str, given: dict[str, list[str]], places: list[str]) -> list[str]:
    line = [kind, *places]
    if kind == "text":
        line += given["--text"]
    elif kind == "needle":
        line += ["--mode", given["--needle"][-1]]
    elif kind == "suite":
        line += given["--suite"]
    elif kind == "tasks":
        line += [name.strip() for name in given["--task"][-1].split(",") if name.strip()]
    for option in (*OPTIONS[kind], *(() if kind == "demo" else COMMON)):
        if option in FLAGS:
            line += [option] if option in given else []
        elif option in given:
            line += [option, given[option][-1]]
    return line
