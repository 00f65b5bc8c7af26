"""`linnet evaluate demo`: trains two small models, evaluates them and writes a page that compares them.

A softmax Transformer and TNL learn to find needles from `linnet.evaluate.retrieval.needle`, in three trainings with
longer and longer texts. Two processes train them in parallel. Both models then get every evaluation that needs no
network. demo.yaml in this folder holds the lessons, the shapes and the steps.
"""

import contextlib
import json
import os
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console

from linnet.config import FIGURES, FITS, Config, not_installed, parse, parse_yaml, read_yaml, refuse
from linnet.install import install_command
from linnet.trust import safe_path

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


class Lessons(Config):
    """Arguments of `linnet.evaluate.retrieval.needle.lessons`."""

    count: int
    sentences: int
    keys: int = 1
    hidden: int = 1


class Stage(Config):
    """Lessons, and the settings of `linnet train` for this stage."""

    lessons: Lessons
    train: dict


class Learner(Config):
    """A model, its settings of `linnet train`, and its steps in each stage."""

    model: dict
    train: dict
    steps: list[int]


class Needles(Config):
    """Options of `linnet evaluate needle`."""

    lengths: str
    depths: int
    samples: int
    digits: int


class Recall(Config):
    """Options of `linnet evaluate recall`."""

    lengths: str
    pairs: str
    samples: int


class Plan(Config):
    """Content of a plan file.

    Attributes:
        train: settings of `linnet train` that all trainings share.
        held_out: documents for perplexity.
        questions: documents from which the questions of `task` are made.
        task: a task of lm-evaluation-harness, as the text of its YAML file.
    """

    models: dict[str, Learner]
    tokenizer: str
    train: dict
    stages: list[Stage]
    held_out: Lessons
    needles: Needles
    recall: Recall
    questions: Lessons
    task: str


def run_demo(folder: Path, plan: dict | None = None) -> None:
    """Trains and evaluates the models in `folder`, prints the table, and writes the page.

    Models that are trained already are reused.

    Args:
        folder: folder of the models and the page.
        plan: content of a plan file; None is demo.yaml.
    """
    from linnet.cli.compare import show_comparison

    started, console = perf_counter(), Console(highlight=False, soft_wrap=True)
    plan = plan or read_plan()
    _write(folder, plan)
    names = list(plan["models"])
    console.print(f"{' and '.join(names)} learn to find needles, then are evaluated (in {folder}):", markup=False)
    with worker_pool(len(names)) as pool:
        runs = [Path(run) for run in pool.map(_make, [str(folder)] * len(names), names, [plan] * len(names))]
    absent = not_installed(FIGURES + FITS)
    page = folder / "comparison" / "index.html"
    show_comparison(runs, None if absent else page)
    if absent:
        lacking = f"{', '.join(absent)} not installed ({install_command('study')})"
        console.print(f"No page was written: {lacking}", markup=False)
    if not_installed(["lm_eval"]):
        console.print(f"No questions were asked: lm_eval is not installed ({install_command('eval')})", markup=False)
    again = shlex.join(["linnet", "compare", *map(str, runs), *(["--no-page"] if absent else ["--out", str(page)])])
    console.print(f"{perf_counter() - started:.0f} s. Again: {again}", style="dim", markup=False)


def read_plan(path: Path | None = None) -> dict:
    """Reads a plan file, by default demo.yaml. Raises ConfigError if it is not a valid `Plan`."""
    from importlib.resources import files

    where = "demo.yaml" if path is None else str(path)
    if path is not None:
        values = read_yaml(path)
    else:
        values = parse_yaml(files("linnet.cli.evaluate").joinpath(where).read_text(encoding="utf-8"))
    plan = parse(Plan, values, where)
    problems = [
        f"models.{name}.steps: {len(model.steps)} numbers for {len(plan.stages)} stages; give one number per stage"
        for name, model in plan.models.items()
        if len(model.steps) != len(plan.stages)
    ]
    refuse(problems, where)
    return values


def _write(folder: Path, plan: dict) -> None:
    """Writes the lessons, the held-out documents, and a task of the harness made of such documents."""
    from linnet.evaluate.retrieval.needle import lessons, write_lessons
    from linnet.runs.files import write_atomic

    folder.mkdir(parents=True, exist_ok=True)
    for number, stage in enumerate(plan["stages"]):
        write_lessons(folder / "lessons" / f"{number}.jsonl", **stage["lessons"], seed=number)
    write_lessons(folder / "held-out.jsonl", **plan["held_out"], seed=len(plan["stages"]))
    task = folder / "task"
    task.mkdir(exist_ok=True)
    write_atomic(task / "numbers.yaml", plan["task"])
    rows = []
    for text in lessons(**plan["questions"], seed=1 + len(plan["stages"])):
        question, _, answer = text.removesuffix(".").rpartition(" ")
        wrong = [str(10 + (int(answer) - 10 + step) % 90) for step in (17, 41, 66)]
        rows.append(json.dumps({"question": question, "choices": [answer, *wrong], "answer": 0}))
    write_atomic(task / "numbers.jsonl", "\n".join(rows) + "\n")


@contextlib.contextmanager
def worker_pool(processes: int) -> Iterator["ProcessPoolExecutor"]:
    """Makes processes that share the cores. They are spawned, because a fork of one with torch's threads may hang."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import active_children, get_context

    with safe_path(), ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (processes,)) as pool:
        try:
            yield pool
        except BaseException:  # a stop: the pool would wait until all models are trained
            for process in active_children():
                process.terminate()
            raise


def _start_worker(processes: int) -> None:
    """Sets up a worker process: limits its threads, and ends it when the parent process ends."""
    import torch

    from linnet.data.parts import end_with_parent

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))


def _make(folder: str, name: str, plan: dict) -> str:
    """Trains one model, evaluates it, and returns its folder."""
    from linnet.evaluate.session import prepare
    from linnet.train import TrainConfig, train
    from linnet.train.optimizer import short_plan

    root, count = Path(folder), len(plan["stages"])
    previous, tokenizer, made = None, plan["tokenizer"], plan["models"][name]
    for number, (stage, steps) in enumerate(zip(plan["stages"], made["steps"], strict=True)):
        last = number == count - 1
        values = {**plan["train"], **stage["train"], **made["train"], "name": name if last else f"{name}-{number}"}
        values |= {"model": made["model"], "steps": steps, "init_from": previous}
        values["data"] = {"source": [str(root / "lessons" / f"{number}.jsonl")], "tokenizer": tokenizer}
        with announced(f"{name}: lessons {number + 1} of {count}, {steps:,} steps") as results:
            config = parse(TrainConfig, short_plan(values), "demo")
            run = train(config, root if last else root / "stages", root / "cache")
            results.append(f"held-out loss {run.result()['loss']:.3f}")
        previous, tokenizer = str(run.path), str(run.path / "tokenizer.json")
    evaluators = _evaluators(root, plan)
    session = prepare(run.path, evaluators)
    for evaluator in evaluators:
        with announced(f"{name}: {evaluator.kind}"):
            evaluator.run(session).save(session.path)
    return str(run.path)


@contextlib.contextmanager
def announced(what: str) -> Iterator[list[str]]:
    """Prints a line at the start, and one at the end with the seconds and the strings that were added to the list.

    Each line is one write, because several workers print at the same time.
    """

    started, results = perf_counter(), []
    print(f"  {what} ...\n", end="", flush=True)
    yield results
    print(f"  {what}: {', '.join([f'{perf_counter() - started:.0f} s', *results])}\n", end="", flush=True)


def _evaluators(root: Path, plan: dict) -> list:
    """Returns the evaluations of each model."""
    from linnet.evaluate.evaluators import NeedleEvaluator, Questions, RecallEvaluator, TaskEvaluator, TextEvaluator
    from linnet.options import parse_numbers

    needles, recall = plan["needles"], plan["recall"]
    depths = [i / max(needles["depths"] - 1, 1) for i in range(needles["depths"])]
    evaluators = [
        TextEvaluator(paths=[str(root / "held-out.jsonl")]),
        NeedleEvaluator(**needles | {"lengths": parse_numbers(needles["lengths"]), "depths": depths}),
        RecallEvaluator(**recall | {key: parse_numbers(recall[key]) for key in ("lengths", "pairs")}),
    ]
    if not not_installed(["lm_eval"]):  # part of the extra `eval`
        evaluators.append(TaskEvaluator(names=["numbers"], questions=Questions(include=root / "task")))
    return evaluators
