"""Tasks of lm-evaluation-harness: the harness's own tasks, and tasks in your own folders (extra `eval`).

A task is a YAML file that defines where its questions are and how they are asked. In your own folder, `dataset_path:
json` with `data_files` names JSONL files, relative to the YAML file. These files are checked line by line before the
evaluation starts, and need no network. Questions of the harness's tasks come from the Hugging Face Hub or its cache.

suites.py     the suites of papers 000 and 001, and what guessing gives; SCROLLS' tasks and their metrics
"""

import ast
import contextlib
import json
import logging
import math
import os
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
import huggingface_hub
import lm_eval.api.task
import yaml
from jinja2 import Environment, TemplateError, meta
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.utils import apply_template

from linnet.config import ConfigError, checking, first_names, gather, refuse, unknown
from linnet.data.records import UNREADABLE, BadRow, SourceFile, damage, read_rows
from linnet.evaluate.harness import LinnetLM, sampling_of
from linnet.evaluate.results import Item, Result

# Checks of local tasks: every line of their JSONL files, before the evaluation starts.

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
    by_split = {}
    for split, paths in splits.items():
        paths = paths if isinstance(paths, list) else [paths]
        if any("://" in str(path) for path in paths):
            return None
        by_split[split] = [folder / path for path in paths]
    return by_split


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
    forms: dict[bool, str] = {}  # whether an answer is a list -> the first row where it is, or is not
    fields = set() if "process_docs" in config else _fields(config)
    choosing = config.get("output_type") == "multiple_choice" and "process_docs" not in config
    choosing &= not any(_is_function(config.get(key)) for key in ("doc_to_choice", "doc_to_target"))
    for paths in files.values():
        for path in paths:
            for where, row in _rows(name, path, problems):
                missing = [field for field in sorted(fields) if row.get(field) is None]
                if missing:
                    present = ", ".join(map(repr, row)) or "no fields"
                    problems.append(f"{where}: lacks {', '.join(map(repr, missing))}, which it needs; it has {present}")
                elif choosing:
                    problems += [f"{where}: {problem}" for problem in _check_choice(config, row, where, forms)]
    if len(forms) > 1:  # the harness takes the form of the first question for all
        listed, single = forms[True], forms[False]
        problems.append(f"{listed}: the answer is a list of indices, and not so at {single}; write lists in all rows")
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
    environment, fields = Environment(), set()
    for key in _TEMPLATES:
        setting = config.get(key)
        for template in setting if isinstance(setting, list) else [setting]:
            if not isinstance(template, str):
                continue
            if "{" not in template:
                if key != "doc_to_text" and not isinstance(setting, list) and template.isidentifier():
                    fields.add(template)  # the name of a field
                continue
            try:
                names = meta.find_undeclared_variables(environment.parse(template))
            except TemplateError:
                continue  # the harness reports it
            if "defined" not in template and "default" not in template:
                fields |= names
    return fields


def _check_choice(config: Mapping[str, Any], row: dict, where: str, forms: dict[bool, str]) -> list[str]:
    """Returns the problems of the choices and the answer of one question.

    Args:
        config, row: content of the task's YAML file, and the question.
        where: file and line of the question.
        forms: gets `where` under whether the answer is a list, if there is none yet.
    """
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
    listed = isinstance(answer, list)
    forms.setdefault(listed, where)
    if answer == []:
        problems.append("answer [] has no index, so nothing is right; give one or more")
    for target in answer if listed else [answer]:
        if isinstance(target, int) and not isinstance(target, bool):
            if not 0 <= target < len(choices):
                known = f"{len(choices)} choices; use 0 to {len(choices) - 1}"
                problems.append(f"answer {target} is not an index of its {known}")
        elif listed:
            problems.append(f"answer {target!r} in a list is not an index; use 0 to {len(choices) - 1}")
        elif target not in choices:
            problems.append(f"answer {target!r} is neither an index nor one of the choices {choices!r}")
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


OWN = Path(lm_eval.__file__).parent / "tasks"  # the harness's tasks
SEED = 1234  # seed of the examples before a question; the harness's default
_PERPLEXITIES = {"word_perplexity": 1.0, "byte_perplexity": 1.0, "bits_per_byte": math.log(2)}


def find_tasks(
    names: Sequence[str],
    include: str | Path | None = None,
    *,
    shots: int | None = None,
    folders: Iterable[str] | None = None,
    replaced: Mapping[str, Callable[[], Task]] | None = None,
) -> dict[str, Task]:
    """Returns tasks by name, with their data, ready to be asked; groups and tags are replaced by their tasks.

    Args:
        names: names of tasks, groups or tags.
        include: a folder of your own tasks, which replace the harness's tasks of the same names.
        shots: examples before each question, except for tasks that fix 0 examples; None leaves it to the task.
        folders: the harness's task folders to search; None searches all, which takes seconds.
        replaced: name -> function that makes the task instead of the harness.

    Raises:
        ConfigError: `include` holds files that are not YAML; names are unknown; local questions have problems; data
            cannot be loaded; or the engine lacks a setting of `generation_kwargs`.
    """
    if include is not None and not Path(include).is_dir():
        problem = f"include: {str(include)!r} is not a folder; name a folder with YAML files of tasks"
        raise ConfigError([problem], "tasks")
    if include is not None and (problems := list(_broken(Path(include)))):
        raise ConfigError(problems, "tasks")
    replaced = replaced or {}
    paths = [] if folders is None else [OWN / folder for folder in folders]
    asked = [name for name in names if name not in replaced]
    with _quiet():
        manager = TaskManager(include_path=[*paths, *([include] if include else [])], include_defaults=False)
        if folders is None and any(name not in manager.task_index for name in asked):
            manager = TaskManager(include_path=include)
    known = {**manager.task_index, **replaced}
    refuse(unknown("task:", names, known), "tasks")
    leaves = list(dict.fromkeys(leaf for name in names for leaf in _leaves(manager.task_index, name, replaced)))
    overrides = _check_own(manager, [leaf for leaf in leaves if leaf not in replaced])
    tasks: dict[str, Task] = {}
    failed: dict[str, list[str]] = {}
    hub = False
    with _quiet(), _offline_where_unreachable() as offline:
        for leaf in leaves:
            try:
                tasks[leaf] = _load(manager, leaf, overrides.get(leaf), replaced.get(leaf))
            except Exception as error:  # loaders of data raise many kinds of errors
                why = f"({type(error).__name__}: {' '.join(str(error).split())})"
                what, asked_hub = _blamed(manager, leaf, error)
                failed.setdefault(f"{what} cannot be loaded {why}", []).append(leaf)
                hub |= asked_hub
                if asked_hub and not offline:  # every further task could spend minutes on retries
                    break
    if failed:
        problems = [f"{first_names(names, 3)}: {why}" for why, names in failed.items()]
        raise ConfigError([*problems, _where_from()] if hub else problems, "tasks")
    for name, task in tasks.items():
        with gather(problems, f"{name}: generation_kwargs.{{}}".format):
            sampling_of(task.get_config("generation_kwargs") or {})
        default = task.get_config("num_fewshot")
        examples = default or 0 if shots is None or default == 0 else shots
        if examples and task.OUTPUT_TYPE == "multiple_choice" and getattr(task, "multiple_target", 0):
            message = "its answers are lists, of which the harness makes no examples; set num_fewshot: 0 in its YAML"
            problems.append(f"{name}: {examples} shots: {message}")
        task.set_config(key="num_fewshot", value=examples)
        task.set_fewshot_seed(seed=SEED)
    refuse(problems, "tasks")
    return tasks


def run_tasks(lm: LinnetLM, tasks: Mapping[str, Task], limit: int | None = None) -> tuple[Result, ...]:
    """Asks tasks and returns one result per metric of each task, with the score of every question.

    Args:
        lm: the model.
        tasks: the tasks by name.
        limit: ask only the first `limit` questions of each task; None asks all.

    Raises:
        ConfigError: a request is too long, and `lm.too_long` is "refuse".

    Adds to `lm.scored` a line per question.
    """
    with _quiet():
        loaded = {"tasks": dict(tasks), "groups": {}, "group_map": {}}
        answers = lm_eval.evaluate(lm, loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    results = []
    for name, task in tasks.items():
        for question in answers["samples"][name]:
            kept = [name, *(question[key] for key in ("doc_id", "filter", "doc", "target", "arguments"))]
            lm.scored.append(json.dumps(kept, sort_keys=True, default=str))
        higher = task.higher_is_better()
        for key, value in answers["results"][name].items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            samples = [sample for sample in answers["samples"][name] if sample["filter"] == kind and metric in sample]
            shown = metric if kind == "none" else key
            results.append(_result(name, shown, float(value), samples, metric, bool(higher.get(metric, True))))
    return tuple(results)


def _result(task: str, shown: str, value: float, samples: list[dict], metric: str, higher: bool) -> Result:
    """Returns the result of one metric of one task; it has items if their average equals the harness's value."""
    better = "higher" if higher else "lower"
    ids = [f"{sample['doc_id']}:{sample['doc_hash'][:8]}" for sample in samples]
    scores = [sample[metric] for sample in samples]
    items, average = [], "mean"
    if all(isinstance(score, bool | int | float) for score in scores):
        sign = -1.0 if metric == "perplexity" else 1.0  # scores of perplexity are log-likelihoods
        average = "exp" if metric == "perplexity" else "mean"
        items = [Item(id, sign * float(score)) for id, score in zip(ids, scores, strict=True)]
    elif metric in _PERPLEXITIES:  # (log-likelihood, words or bytes)
        average = "mean" if metric == "bits_per_byte" else "exp"
        unit = _PERPLEXITIES[metric]
        items = [
            Item(id, -nats / size / unit, float(size)) for id, (nats, size) in zip(ids, scores, strict=True) if size
        ]
    if items:
        result = Result.of_items(task, shown, items, better, average)
        if math.isclose(result.value, value, rel_tol=1e-6, abs_tol=1e-12):
            return result
    return Result(task, shown, value, better=better, n=len(samples))


def _broken(folder: Path) -> Iterator[str]:
    """Yields a problem for each file of a folder that is not YAML.

    The harness would skip such a file and use its own task of that name instead.
    """
    for path in sorted(folder.rglob("*.yaml")):
        try:
            with path.open(encoding="utf-8") as file:
                yaml.compose(file)  # does not resolve tags such as !function, which only the harness knows
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            yield f"{path}: not valid YAML ({' '.join(str(error).split())}); fix the file or remove it"


def _leaves(index: Mapping[str, Any], name: str, replaced: Mapping[str, Any]) -> Iterator[str]:
    """Yields the tasks of a task, group or tag."""
    entry = index.get(name)
    if name in replaced or entry is None or entry.kind.name in ("TASK", "PY_TASK"):
        yield name
        return
    children = sorted(entry.tags) if entry.kind.name == "TAG" else entry.cfg["task"]
    for child in children if isinstance(children, list) else [children]:
        child = child if isinstance(child, str) else child.get("task") or child.get("group")
        yield from _leaves(index, child, replaced)


def _check_own(manager: TaskManager, leaves: list[str]) -> dict[str, dict]:
    """Checks the local files of tasks and returns, for each task, the configuration keys with absolute paths."""
    overrides = {}
    with checking("tasks") as problems:
        for leaf in leaves:
            entry = manager.task_index[leaf]
            if entry.yaml_path is None or (files := local_files(entry.cfg, Path(entry.yaml_path).parent)) is None:
                continue
            problems += check_task(leaf, entry.cfg, files)
            absolute = {split: [str(path.resolve()) for path in paths] for split, paths in files.items()}
            overrides[leaf] = {"dataset_kwargs": {**entry.cfg["dataset_kwargs"], "data_files": absolute}}
    return overrides


def _load(manager: TaskManager, name: str, overrides: dict | None, make: Callable[[], Task] | None) -> Task:
    if make is not None:
        return make()
    asked = name if not overrides else {"group": "linnet", "task": [{"task": name, **overrides}]}
    return manager.load(asked)["tasks"][name]


def _blamed(manager: TaskManager, name: str, error: Exception) -> tuple[str, bool]:
    """Returns what cannot be loaded, and whether the libraries that load data failed on data of the hub."""
    entry = manager.task_index.get(name)
    config, file = (entry.cfg or {}, entry.yaml_path) if entry is not None else ({}, None)
    path, remote = str(config.get("dataset_path")), "://" in str(config.get("dataset_kwargs"))
    local = not remote and (path in ("json", "csv", "text", "parquet", "arrow") or Path(path).exists())
    names = {str(frame.f_globals.get("__name__")).split(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)}
    if names & {"datasets", "huggingface_hub"} and not local:
        return f"the data of {path!r}" if "dataset_path" in config else "its data", True
    return f"the task in {file}" if file else "the task", False


def _where_from() -> str:
    hub = huggingface_hub.constants
    return (
        f"the data come from {hub.ENDPOINT} or its cache, {hub.HF_HOME}; run this command once on a machine with "
        "network access, copy its cache folder to this machine and set HF_HOME to it; or use your own tasks with "
        "--include"
    )


@contextlib.contextmanager
def _offline_where_unreachable() -> Iterator[bool]:
    """Puts the hub's libraries into offline mode if the hub cannot be reached; otherwise they retry for minutes.

    Yields:
        whether the libraries are in offline mode.
    """
    hub, places = huggingface_hub.constants, [(huggingface_hub.constants, "HF_HUB_OFFLINE")]
    places.append((datasets.config, "HF_HUB_OFFLINE"))
    before = [getattr(place, name) for place, name in places]
    if not any(before) and not _reachable(hub.ENDPOINT):
        for place, name in places:
            setattr(place, name, True)
    try:
        yield hub.HF_HUB_OFFLINE
    finally:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)


def _reachable(address: str) -> bool:
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # cannot be tested without the proxy
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences progress bars and the harness's log messages below errors."""
    logger, bars = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    level, bar = logger.level, lm_eval.api.task.tqdm
    logger.setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = lambda rows, **_: rows  # no option of the harness disables this bar
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm = bar
        if not bars:
            datasets.enable_progress_bars()
