"""The verb `evaluate`: scores of the runs of an earlier step. A finished evaluation is not repeated."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from linnet.config import digest, gather, load_json, parse, refuse
from linnet.data import ByteTokenizer
from linnet.evaluate.evaluators import NeedleEvaluator, Questions, TaskEvaluator
from linnet.evaluate.retrieval.needle import items
from linnet.evaluate.session import Evaluator, prepare
from linnet.papers.settings import EvaluateSettings
from linnet.papers.verbs.base import Cost, Job, Outcome, Planned, Record, write_planned
from linnet.runs.files import write_atomic
from linnet.train.device import choose

KEPT = "reproduce.json"  # in RUN/evaluations: digest of the settings -> numbers


def check(job: Job) -> Cost:
    evaluators = _evaluators(job)
    problems: list[str] = []
    if not job.planning:
        for evaluator in evaluators:
            with gather(problems):
                evaluator.check()
    refuse(problems, job.where)
    named = [evaluator.measures() for evaluator in evaluators]
    columns = None if None in named else frozenset(name for names in named for name in names or ())
    if columns is not None:
        columns |= {
            name for evaluator in evaluators if isinstance(evaluator, NeedleEvaluator) for name in _lengths(evaluator)
        }
    return Cost(columns=columns, notes=(f"{len(evaluators)} evaluations of each run of {job.step.of!r}",))


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
    assert job.step.of is not None
    evaluators = _evaluators(job)
    # A digest has the values of needles and recall as they were given, and the others with their defaults.
    texts = [
        f"{type(evaluator).__name__}(settings={job.values.get(evaluator.kind)})"
        if evaluator.kind in ("needle", "recall")
        else repr(evaluator)
        for evaluator in evaluators
    ]
    asked = digest([job.values, texts])
    for seed in job.seeds:
        write_planned(job, seed, digest([job.digest, asked]), {"asked": asked}, console)
    wanted = [record for record in earlier[job.step.of].records if not record.failed and record.seed in job.seeds]
    runs = [(record, record.run) for record in wanted if record.run is not None]
    for number, (record, folder) in enumerate(runs, 1):
        kept = folder / "evaluations" / KEPT
        before = asked in _read(kept)
        line = f"{number} of {len(runs)}: {record.label}, seed {record.seed}{', done before' if before else ''}"
        console.print(line, markup=False, highlight=False)
        if not before:
            scores = _score(folder, evaluators, job.values.get("checkpoint") == "best")
            write_atomic(kept, json.dumps(_read(kept) | {asked: scores}, indent=1) + "\n")


def collect(job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
    assert job.step.of is not None
    asked = {plan.seed: plan.about["asked"] for plan in planned}
    records, unfinished = [], 0
    for record in earlier[job.step.of].records:
        if record.seed not in asked:
            continue
        if record.failed or record.run is None:
            records.append(Record(record.label, record.seed, failed=record.failed or "it made no run folder"))
            continue
        scores = _read(record.run / "evaluations" / KEPT).get(asked[record.seed])
        if scores is None:
            unfinished += 1
        else:
            records.append(Record(record.label, record.seed, scores, run=record.run))
    return Outcome(records, unfinished=unfinished)


def _score(run: Path, evaluators: list[Evaluator], best: bool) -> dict[str, float]:
    session = prepare(run, evaluators, choose("auto"), best=best)
    scores: dict[str, float] = {}
    for evaluator in evaluators:
        record = evaluator.run(session)
        record.save(session.path)
        scores |= {
            f"{result.task}.{result.metric}": float(result.value)
            for result in record.results
            if result.value is not None
        }
        if record.kind == NeedleEvaluator.kind:
            scores |= _by_length(record.results[0].task, record.detail)
    return scores


def _by_length(task: str, detail: Mapping[str, Any]) -> dict[str, float]:
    """Returns the accuracy of needles at each length, and that of all lengths up to it."""
    accuracies: dict[str, float] = {}
    for length, at, to in zip(detail["config"]["lengths"], detail["at_length"], detail["up_to_length"], strict=True):
        accuracies |= {f"{task}.at_{length}": at, f"{task}.to_{length}": to}
    return accuracies


def _lengths(evaluator: NeedleEvaluator) -> Iterator[str]:
    """Yields the names that `_by_length` gives."""
    for length in evaluator.lengths:
        yield from (f"{evaluator.task}.at_{length}", f"{evaluator.task}.to_{length}")


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        return load_json(path)
    except (FileNotFoundError, ValueError):
        return {}


def _check_needles(job: Job, needle: NeedleEvaluator | None) -> None:
    """Raises ConfigError if a haystack is too short for its needles, which depends on the tokenizer.

    Only models of bytes are checked before they are trained; others are checked when they are scored.
    """
    before = job.before.get(job.step.of or "")
    data = before.values.get("data") if before else None
    if needle is None or not isinstance(data, dict) or data.get("tokenizer", "byte") != "byte":
        return
    for _ in items(needle.model_copy(update={"lengths": needle.lengths[:1]}), ByteTokenizer()):
        pass


def _evaluators(job: Job) -> list[Evaluator]:
    settings = parse(EvaluateSettings, job.values, job.where)
    include = None if settings.include is None else Path(settings.include)
    questions = Questions(include=include, shots=settings.shots, limit=settings.limit, context=settings.context)
    images = settings.images and settings.images.model_copy(update={"cache": job.cache})
    kinds = (settings.text, settings.blocks, settings.needle, settings.recall, images, settings.glue)
    evaluators: list[Evaluator] = [evaluator for evaluator in kinds if evaluator is not None]
    problems: list[str] = []
    with gather(problems):
        if settings.recall is not None:
            settings.recall.check()
    with gather(problems):
        _check_needles(job, settings.needle)
    if settings.samples is not None:
        from linnet.vision.evaluate.samples import SampleEvaluator  # imports the denoisers, which few items need

        with gather(problems, "samples: {}".format):
            evaluators.append(parse(SampleEvaluator, {**settings.samples, "cache": job.cache}, job.where))
    evaluators += [TaskEvaluator(suite=suite, questions=questions) for suite in settings.suites]
    if settings.tasks:
        evaluators.append(TaskEvaluator(names=tuple(settings.tasks), questions=questions))
    before = job.before.get(job.step.of or "")
    if settings.checkpoint == "best" and before is not None and before.step.verb == "train":
        if not before.values.get("run", {}).get("keep_best"):
            problems.append(f"checkpoint: best is not kept; set run.keep_best: true in step {before.step.name!r}")
    if not problems and not evaluators:
        known = "text, blocks, needle, recall, suites, tasks, images, samples, glue"
        problems.append(f"{known}: none is given; ask for one")
    refuse(problems, job.where)
    return evaluators
