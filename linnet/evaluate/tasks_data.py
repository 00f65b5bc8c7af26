"""The questions of a local task: JSONL files beside its YAML file, checked line by line before any work is done."""

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta
from lm_eval.utils import apply_template

MOST = 50  # problems that are written out; the others are counted
_TEMPLATES = ("doc_to_text", "doc_to_choice", "doc_to_target")


def local_files(config: Mapping[str, Any], folder: Path) -> dict[str, list[Path]] | None:
    """The JSONL files of each split of a task, or None where its data are not local JSON.

    Args:
        config: of the task, as its YAML file has it.
        folder: where that file is; relative paths start there.
    """
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if config.get("dataset_path") != "json" or not files:
        return None
    splits = files if isinstance(files, dict) else {"train": files}
    found = {}
    for split, paths in splits.items():
        paths = paths if isinstance(paths, list) else [paths]
        if any("://" in str(path) for path in paths):
            return None
        found[split] = [folder / path for path in paths]
    return found


def check_task(name: str, config: Mapping[str, Any], files: Mapping[str, list[Path]]) -> list[str]:
    """What is wrong with the questions of a task, each with its file and line.

    Fields are those that the task's templates name. A task that turns its rows into others first (`process_docs`) is
    checked for JSON alone, and answers are where no function of the task makes them.
    """
    problems: list[str] = []
    fields = set() if "process_docs" in config else _fields(config)
    choosing = config.get("output_type") == "multiple_choice" and "process_docs" not in config
    choosing &= not any(_is_function(config.get(key)) for key in ("doc_to_choice", "doc_to_target"))
    for paths in files.values():
        for path in paths:
            for where, row in _rows(name, path, problems):
                missing = [field for field in sorted(fields) if row.get(field) is None]
                if missing:
                    given = ", ".join(map(repr, row)) or "nothing"
                    problems.append(f"{where}: has no {', '.join(map(repr, missing))}; it has {given}")
                elif choosing:
                    problems += [f"{where}: {problem}" for problem in _check_choice(config, row)]
    if len(problems) > MOST:
        problems[MOST:] = [f"{name}: and {len(problems) - MOST} more"]
    return problems


def _rows(name: str, path: Path, problems: list[str]) -> Iterator[tuple[str, dict]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{name}: {path} cannot be read ({error}); name it relative to the task's YAML file")
        return
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        count += 1
        try:
            row = json.loads(line)
        except ValueError as error:
            problems.append(f"{path}:{number}: is not JSON ({error}); write one object a line")
            continue
        if isinstance(row, dict):
            yield f"{path}:{number}", row
        else:
            problems.append(f"{path}:{number}: not a JSON object; write one object per line")
    if not count:
        problems.append(f"{name}: {path} is empty; write a question a line")


def _fields(config: Mapping[str, Any]) -> set[str]:
    """What the templates need of every row. A template that asks whether something is there needs nothing."""
    environment, found = Environment(), set()
    for key in _TEMPLATES:
        given = config.get(key)
        for template in given if isinstance(given, list) else [given]:
            if not isinstance(template, str):
                continue
            if "{" not in template:
                if key != "doc_to_text" and not isinstance(given, list) and template.isidentifier():
                    found.add(template)  # the name of a field
                continue
            try:
                names = meta.find_undeclared_variables(environment.parse(template))
            except TemplateError:
                continue  # the harness says so
            if "defined" not in template and "default" not in template:
                found |= names
    return found


def _check_choice(config: Mapping[str, Any], row: dict) -> list[str]:
    """What is wrong with the choices and the answer of one question."""
    try:
        choices, answer = (_value(config.get(key), row) for key in ("doc_to_choice", "doc_to_target"))
    except Exception as error:  # whatever a template does with this row
        return [f"choices or answer cannot be made of it ({type(error).__name__}: {error})"]
    if isinstance(choices, dict):
        choices = list(choices.values())
    if choices is None:
        return []
    if not isinstance(choices, list) or len(choices) < 2:
        return [f"choices {choices!r} are not a list of at least two"]
    problems = []
    for one in answer if isinstance(answer, list) else [answer]:
        if isinstance(one, int) and not isinstance(one, bool):
            if not 0 <= one < len(choices):
                problems.append(
                    f"answer {one} is not an index of its {len(choices)} choices; use 0 to {len(choices) - 1}"
                )
        elif one not in choices:
            problems.append(f"answer {one!r} is neither an index nor one of the choices {choices!r}")
    return problems


def _is_function(template: Any) -> bool:
    """Whether it stands for a function of a Python file, which the harness writes as a path until it is called."""
    return isinstance(template, str) and Path(template).is_absolute() and "{" not in template


def _value(template: Any, row: dict) -> Any:
    """A template's value for a row, as the harness makes it: a field, a list as it is, or text that is rendered."""
    if not isinstance(template, str):
        return template if isinstance(template, int | list) else None
    if template in row:
        return row[template]
    text = apply_template(template, row)
    if text.isdigit():  # of a template alone: a field with digits is text, "12" one of the choices "12" and "29"
        return int(text)
    if text.startswith(("[", "{")):
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text
    return text
