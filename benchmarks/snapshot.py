"""Writes what this tree offers to its users, or compares two trees by it.

    python benchmarks/snapshot.py before.json
    python benchmarks/snapshot.py before.json after.json

The record has every command with its arguments and options (flags, type, default, help), the lines of its help page
without their order, the schema of every kind of configuration, and the names in docs/reference. The comparison prints
each difference, and exits with status 1 if there is one.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

HERE = Path(__file__).resolve().parents[1]
NAME = re.compile(r"^(?:#+ |\| )(.+?)(?: \||$)", re.MULTILINE)  # a heading, or the first cell of a row


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[str, dict]:
    """Returns all commands below a group, by their words."""
    found = {" ".join(path) or "linnet": {"help": group.help, "epilog": group.epilog, "options": options(group)}}
    for name, command in group.commands.items():
        inner = (*path, name)
        if hasattr(command, "commands"):
            found |= commands(command, inner)
        else:
            about = {"help": command.help, "epilog": command.epilog, "page": page(inner)}
            found[" ".join(inner)] = about | {"options": options(command)}
    return found


def options(command: Any) -> dict[str, dict]:
    """Returns the arguments and options of a command, by the first flag or the name."""
    return {
        (one.opts[0] if one.param_type_name == "option" else one.name.rstrip("_")): {
            "flags": [*one.opts, *one.secondary_opts] if one.param_type_name == "option" else [],
            "type": kind(one),
            "required": one.required,
            "many": [one.nargs, one.multiple],
            "default": plain(one.default),
            "shown default": one.show_default if isinstance(one.show_default, str) else None,
            "help": one.help,
            "metavar": one.metavar,
            "variable": one.envvar,
            "hidden": one.hidden,
        }
        for one in command.params
    }


def kind(option: Any) -> dict[str, Any]:
    """Returns the name of an option's type, with its choices or bounds."""
    if hasattr(option, "type_descriptor"):  # newer releases of typer
        type_ = option.type_descriptor.annotation
        type_ = get_args(type_)[0] if get_origin(type_) is list else type_
        choices = list(get_args(type_) or getattr(type_, "__members__", ()))
        name, about = "choice" if choices else type_.__name__, {"min": option.min, "max": option.max}
    else:
        name, about = option.type.name, {key: getattr(option.type, key, None) for key in ("min", "max")}
        choices = [plain(one) for one in getattr(option.type, "choices", ())]
    return {"name": name, **about, "choices": choices}


def plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    return value if isinstance(value, str | int | float | list | None) else str(value)


def page(words: tuple[str, ...]) -> list[str]:
    from typer.testing import CliRunner

    from linnet.cli import app

    text = CliRunner().invoke(app, [*words, "--help"], terminal_width=400, env={"COLUMNS": "400"}).output
    return sorted(" ".join(line.split()) for line in text.splitlines())


def snapshot() -> dict[str, Any]:
    from typer.main import get_command

    from linnet.cli import app
    from linnet.cli.schema import build_schema

    reference = {
        path.name: NAME.findall(path.read_text(encoding="utf-8")) for path in (HERE / "docs/reference").glob("*.md")
    }
    schemas = {kind: build_schema(kind) for kind in ("train", "study", "mad")}
    return {"commands": commands(get_command(app)), "schema": schemas, "reference": reference}


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Returns a line per value that differs, with its place."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{path} > {key}")]
    if isinstance(old, list) and isinstance(new, list) and path.endswith("page"):
        lines = [f"{path}: - {line}" for line in old if line not in new]
        return lines + [f"{path}: + {line}" for line in new if line not in old]
    return [] if old == new else [f"{path}:\n  - {json.dumps(old)}\n  + {json.dumps(new)}"]


def main(names: list[str]) -> int:
    if len(names) not in (1, 2) or any(name.startswith("-") for name in names):
        print(__doc__)
        return 2
    if len(names) == 1:
        text = json.dumps(snapshot(), indent=1, sort_keys=True)
        Path(names[0]).write_text(text + "\n", encoding="utf-8")
        return 0
    old, new = (json.loads(Path(name).read_text(encoding="utf-8")) for name in names)
    lines = differences(old, new)
    print("\n".join(lines) or "equal")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main(sys.argv[1:]))
