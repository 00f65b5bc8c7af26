"""Checks of local tasks: every line of their JSONL files, before the evaluation starts."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta
from lm_eval.utils import apply_template

from linnet.data.sources import UNREADABLE, BadRow, SourceFile, damage, read_rows

MOST = 50  # upper bound of listed problems; the others are counted
_TEMPLATES = ("doc_to_text", "doc_to_choice", "doc_to_target")


def local_files(config: Mapping[str, Any], folder: Path) -> dict[str, list[Path]] | None:
    """Returns the JSONL files of each split of a task, or None if its data are not local JSON files.

    Args:
        config: content of the task's YAML file.
        folder: folder of that file; relative paths start there.
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
    """Returns the problems of a task's questions, each with its file and line.

    Every row needs the fields that the task's templates name. If the task transforms its rows (`process_docs`), only
    the JSON syntax is checked. Answers and choices are checked unless a function of the task makes them.

    Args:
        name: name of the task.
        config: content of its YAML file.
        files: its files by split, from `local_files`.
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
                    given = ", ".join(map(repr, row)) or "no fields"
                    problems.append(f"{where}: lacks {', '.join(map(repr, missing))}, which it needs; it has {given}")
                elif choosing:
                    problems += [f"{where}: {problem}" for problem in _check_choice(config, row)]
    if len(problems) > MOST:
        problems[MOST:] = [f"{name}: {len(problems) - MOST} more problems"]
    return problems


def _rows(name: str, path: Path, problems: list[str]) -> Iterator[tuple[str, dict]]:
    empty = True
    try:
        for number, row, _ in read_rows(SourceFile(path, "jsonl", True)):
            empty, where = False, f"{path}:{number + 1}"
            if isinstance(row, BadRow):
                problems.append(f"{where}: {str(row).partition(';')[0]}; write one object per line")
            else:
                yield where, row
    except UNREADABLE as error:
        problems.append(f"{name}: {path} {damage(error)}; name it relative to the task's YAML file")
    else:
        if empty:
            problems.append(f"{name}: {path} is empty; write one question per line")


def _fields(config: Mapping[str, Any]) -> set[str]:
    """Returns the fields that the templates need in every row.

    A template that uses "defined" or "default" needs none, since it handles missing fields.
    """
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
                continue  # the harness reports it
            if "defined" not in template and "default" not in template:
                found |= names
    return found


def _check_choice(config: Mapping[str, Any], row: dict) -> list[str]:
    """Returns the problems of the choices and the answer of one question."""
    try:
        choices, answer = (_value(config.get(key), row) for key in ("doc_to_choice", "doc_to_target"))
    except Exception as error:  # templates can raise any error
        return [f"the templates of choices and answer fail on this row ({type(error).__name__}: {error}); fix them"]
    if isinstance(choices, dict):
        choices = list(choices.values())
    if choices is None:
        return []
    if not isinstance(choices, list) or len(choices) < 2:
        return [f"choices {choices!r}: not a list of at least two; give two or more"]
    problems = [
        f"choice {number} of {choices!r} is {choice!r}; write text that is not empty, numbers in quotes"
        for number, choice in enumerate(choices, 1)
        if not isinstance(choice, str) or not choice
    ]
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
    """Whether a template is a function in a Python file, which the harness represents by an absolute path."""
    return isinstance(template, str) and Path(template).is_absolute() and "{" not in template


def _value(template: Any, row: dict) -> Any:
    """Returns a template's value for a row, as the harness does: a field, an unchanged list, or rendered text."""
    if not isinstance(template, str):
        return template if isinstance(template, int | list) else None
    if template in row:
        return row[template]
    text = apply_template(template, row)
    if text.isdigit():  # only rendered text becomes an index; a field with digits may be a choice, such as "12"
        return int(text)
    if text.startswith(("[", "{")):
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text
    return text
