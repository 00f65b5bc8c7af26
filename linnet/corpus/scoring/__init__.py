"""Self-cleaning of a corpus: a model that reads one half of the documents scores the other half, and the worst are cut.

score.py     nats per byte of every document, from one model or from two that each read one half;
             leaves out the worst documents of each source; both tails are shown
sample.py    documents for people to judge, by source and by decile of the score; what people
             decided, with intervals, and whether the loop goes on

Here are the rounds of the loop: training, scoring, filtering and sampling.

After paper 001, appendix D (its self-cleaning scheme). Two departures, which docs/corpus.md explains: no model scores
text that it was trained on, and the cut is a share of each source, because the paper does not give its threshold.
"""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from linnet import trust
from linnet.config import Config, ConfigError, gather, load_json, parse, read_yaml, refuse, unwritable
from linnet.corpus.documents import Document, Part, Samples, around, find_inputs, find_parts, read_part
from linnet.corpus.scoring.sample import PASS_RATE, Sample, decide, draw_sample, read_verdicts
from linnet.corpus.scoring.score import FilterConfig, filter_stage, half_of, score_stage
from linnet.corpus.stage import Progress, run_stage
from linnet.runs import RunFolder
from linnet.runs.files import write_atomic
from linnet.study.executors import ExecutorConfig, Job, make_executor, unread_problems
from linnet.study.runner import train_run
from linnet.train import TrainConfig, run_folder
from linnet.train import device as devices

# Rounds of self-cleaning: train on what is left, score everything, cut, let people look, and again.
#
#     <out>/loop.yaml        the configuration
#     <out>/loop.json        what the loop came to, written when it ends
#     <out>/round-N/runs/    the two models, one trained on each half of what round N - 1 kept
#     <out>/round-N/scored/  every document with its score by the model of the other half (a stage)
#     <out>/round-N/kept/    the documents that are left (a stage)
#     <out>/round-N/review.html, verdicts.json   the page for people, and what they saved
#     <out>/round-N/round.json                   thresholds, losses and agreement; written last
#
# Each round scores all documents of the source, so that a document which a bad model dropped can come back, and two
# rounds can agree. The same call continues where an earlier one was stopped, and ends with the same bytes.

CONFIG, RESULT, ROUND, REVIEW, VERDICTS = "loop.yaml", "loop.json", "round.json", "review.html", "verdicts.json"
HALVES = (0, 1)
AFTERWARDS = ("rounds", "wait", "executor")  # keys that may change when a loop continues

Review = Callable[[Sample, Path], None]
Say = Callable[[str], None]


class LoopConfig(FilterConfig):
    """The configuration of `linnet corpus loop`."""

    source: list[str] = Field(
        min_length=1, description="the text to clean: sources of `linnet corpus clean`, or stages"
    )
    text_key: str = Field("text", description="key (JSONL) or column (Parquet) of the text")
    train: TrainConfig = Field(description="the training of the scoring models, without `data.source`")
    rounds: int = Field(3, ge=1, description="most rounds")
    agree: float = Field(0.99, gt=0, le=1, description="stop when two rounds decide alike on this share of documents")
    seed: int = Field(0, ge=0, lt=1 << 32, description="seed of the halves and of the samples for people")
    sample: int = Field(200, ge=1, description="documents on the review page of a round")
    pass_rate: float = Field(
        PASS_RATE, gt=0, le=1, description="stop when the verdicts show that this share of what is kept is good"
    )
    wait: bool = Field(False, description="stop after each round until its verdicts.json is there")
    executor: ExecutorConfig = Field(ExecutorConfig(), description="where the scoring models are trained")

    @field_validator("source", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("train")
    @classmethod
    def _no_source(cls, train: TrainConfig) -> TrainConfig:
        if train.data.model_fields_set & {"source", "mixture"}:
            raise ValueError("data.source: the loop trains on what is left of its own `source`; remove this key")
        return train

    def to_dict(self) -> dict[str, Any]:
        """Returns all keys as plain values, from which the same configuration can be read."""
        values = self.model_dump(mode="json")
        for key in ("source", "mixture"):
            del values["train"]["data"][key]
        return values


@dataclass(frozen=True)
class LoopResult:
    """The result of a loop.

    Attributes:
        rounds: the content of each round.json.
        stopped: why it ended: "agreement", "verdicts", "rounds", or "waiting" for verdicts.
        kept: the stage of the last round with the documents that are left.
    """

    rounds: list[dict[str, Any]]
    stopped: Literal["agreement", "verdicts", "rounds", "waiting"]
    kept: Path


class HalfConfig(Config):
    """Settings of the stage that takes one half of the documents."""

    half: int
    seed: int


@dataclass(frozen=True)
class TakeHalf:
    """The work of that stage."""

    half: int
    seed: int

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]:
        return (
            document for document in read_part(part, counts, samples) if half_of(document.text, self.seed) == self.half
        )


def run_loop(
    config: LoopConfig,
    out: str | Path,
    *,
    review: Review | None = None,
    workers: int = 1,
    anew: bool = False,
    progress: Progress | None = None,
    say: Say = lambda line: None,
) -> LoopResult:
    """Runs the rounds that are not done yet.

    Args:
        review: writes the page on which people judge a sample (`linnet.corpus.scoring.sample.write_review`).
        workers: processes of each stage.
        anew: remove the rounds of another configuration in `out`.
        say: called with a line about each training and each finished round.

    Raises:
        ConfigError: the configuration, its sources or `out` is wrong, or `out` holds another loop; nothing is done.
            Later, a training failed.
    """
    out = Path(out)
    _check(config, out, anew)
    out.mkdir(parents=True, exist_ok=True)
    with RunFolder(out).alone("process", "loop"):
        for folder in out.glob("round-*"):
            RunFolder(folder).clean()
        if anew:
            for path in [*out.glob("round-*"), out / CONFIG, out / RESULT]:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return _rounds(config, out, review, workers, progress, say)


def _rounds(
    config: LoopConfig, out: Path, review: Review | None, workers: int, progress: Progress | None, say: Say
) -> LoopResult:
    write_atomic(out / CONFIG, yaml.safe_dump(config.to_dict(), sort_keys=False))
    done: list[dict[str, Any]] = []
    stopped: Literal["agreement", "verdicts", "rounds", "waiting"] = "rounds"
    for number in range(1, config.rounds + 1):
        folder = out / f"round-{number}"
        result: dict[str, Any] | None = None
        with contextlib.suppress(OSError, ValueError):
            result = load_json(folder / ROUND)
        if result is None:
            result = _round(config, number, out, review, workers, progress, say)
        for name in ("half-0", "half-1", "cache"):  # text of this round that nothing reads any more
            shutil.rmtree(folder / name, ignore_errors=True)
        done.append(result)
        say(_line(result))
        if (reason := _reason_to_stop(config, result, folder)) is not None:
            stopped = reason
            break
    kept = out / f"round-{len(done)}" / "kept"
    record = {"stopped": stopped, "kept": kept.relative_to(out).as_posix(), "rounds": done}
    write_atomic(out / RESULT, json.dumps(record, indent=1) + "\n")
    return LoopResult(done, stopped, kept)


def _check(config: LoopConfig, out: Path, anew: bool) -> None:
    """Raises ConfigError with all problems that can be found before any work."""
    problems: list[str] = []
    find_inputs(config.source, "source", problems, config.text_key)
    if reason := unwritable(out):
        problems.append(f"--out {out}: {reason}; name another folder")
    for name in around(out, config.source):
        problems.append(f"--out {out}: is in the source {name}, which would then read it; name a folder outside of it")
    with gather(problems):
        devices.choose(config.train.run.device)
    if not (out / CONFIG).is_file() or anew:  # else an old release began the loop
        problems += [f"executor.{line}" for line in unread_problems(config.executor)]
    if (out / CONFIG).is_file() and not anew:
        try:  # as a configuration: a key that a release adds has its default in older loops
            before = parse(LoopConfig, read_yaml(out / CONFIG))
            changed = [
                key
                for key in LoopConfig.model_fields
                if key not in AFTERWARDS and getattr(before, key) != getattr(config, key)
            ]
        except ConfigError:
            changed = [CONFIG]
        if changed:
            keys = ", ".join(changed)
            problems.append(f"--out {out}: holds a loop with another {keys}; name another folder, or give --anew")
    elif not (out / CONFIG).is_file() and out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir()):
        problems.append(f"--out {out}: is not empty and not a loop; name another folder")
    refuse(problems, "loop")


def _round(
    config: LoopConfig,
    number: int,
    out: Path,
    review: Review | None,
    workers: int,
    progress: Progress | None,
    say: Say,
) -> dict[str, Any]:
    folder, before = out / f"round-{number}", out / f"round-{number - 1}" / "kept"
    folder.mkdir(exist_ok=True)
    left = config.source if number == 1 else [str(before)]
    halves = []
    for half in HALVES:
        halves.append(folder / f"half-{half}")
        settings, work = HalfConfig(half=half, seed=config.seed), TakeHalf(half, config.seed)
        key = config.text_key if number == 1 else "text"
        stage = run_stage("half", left, halves[-1], settings, work, workers=workers, text_key=key, progress=progress)
        if not stage["documents"]:
            problem = f"source: round {number} has too few documents for two halves, and half {half} has none"
            raise ConfigError([f"{problem}; give more text, or a larger keep"], "loop")
    say(f"round {number}: training a model on each half")
    runs = train_halves(config, halves, folder)
    scored = score_stage(
        config.source,
        [run.path for run in runs],
        folder / "scored",
        seed=config.seed,
        device=str(devices.choose(config.train.run.device)),
        workers=workers if devices.choose(config.train.run.device).type == "cpu" else 1,
        text_key=config.text_key,
        progress=progress,
    )
    cut = FilterConfig(keep=config.keep, low=config.low, by=config.by, per=config.per)
    kept = filter_stage([str(folder / "scored")], folder / "kept", cut, workers=workers, progress=progress)
    result = {
        "round": number,
        "documents": scored["documents"],
        "kept": kept["documents"],
        "text_bytes": scored["text_bytes"],
        "kept_bytes": kept["text_bytes"],
        "agreement": None if number == 1 else agreement(before, folder / "kept", scored["documents"]),
        "losses": [run.result().get("loss") for run in runs],
        "runs": [run.path.relative_to(out).as_posix() for run in runs],
        "thresholds": {name: {key: group[key] for key in ("low", "high")} for name, group in kept["results"].items()},
    }
    if review is not None:
        sample = draw_sample([str(folder / "kept")], config.sample, config.seed + number, config.per)
        result["sample"] = sample.digest
        review(sample, folder / REVIEW)
    write_atomic(folder / ROUND, json.dumps(result, indent=1) + "\n")
    return result


def train_halves(config: LoopConfig, halves: Sequence[Path], folder: Path) -> list[RunFolder]:
    """Trains one model on each half, or finishes their trainings. Returns the run folders.

    Raises:
        ConfigError: a training failed or diverged.
    """
    root, cache = folder / "runs", folder / "cache"
    trust.remember(config.train.plugins)
    trainings = []
    for half, path in enumerate(halves):
        values = config.train.model_dump(mode="json")
        values["data"]["source"] = [str(path)]
        values["name"] = values["name"] or f"half-{half}"
        trainings.append(TrainConfig.model_validate(values))
    shared = {"root": str(root), "cache": str(cache), "trusted": list(trust.digests(config.train.plugins).values())}
    runs = [run_folder(training, root, cache) for training in trainings]
    jobs = [
        Job(run.path.name, {"config": training.model_dump(mode="json"), **shared}, f"half {half}")
        for half, (training, run) in enumerate(zip(trainings, runs, strict=True))
        if not run.done
    ]
    problems = []
    if jobs:
        executor = make_executor(config.executor, config.train.parallel.devices)
        outcomes: Any = executor.run(jobs, train_run)
        with contextlib.closing(outcomes):  # after Ctrl-C, workers end with a checkpoint
            for outcome in outcomes:
                if outcome is not None and outcome.status == "failed":
                    last = outcome.error.strip().splitlines()[-1].strip().removeprefix("- ")
                    problems.append(f"train: the model of {outcome.job.label} failed: {last}")
    for half, run in enumerate(runs):
        if run.done and run.result()["status"] != "done":
            problems.append(f"train: the model of half {half} diverged; lower train.optimizer.learning_rate")
    refuse(problems, "loop")
    return runs


def agreement(before: Path, after: Path, documents: int) -> float:
    """Returns the share of all documents that two rounds decide alike: both keep them, or both leave them out."""
    first, second = (_identities(stage) for stage in (before, after))
    return 1 - len(first ^ second) / documents


def _identities(stage: Path) -> set[tuple[str, str, int]]:
    return {
        (document.source, document.file, document.row)
        for part in find_parts([str(stage)], "kept", [], [])
        for document in read_part(part, Counter())
    }


def _reason_to_stop(
    config: LoopConfig, result: dict[str, Any], folder: Path
) -> Literal["agreement", "verdicts", "waiting"] | None:
    verdicts = folder / VERDICTS
    if verdicts.is_file():
        judgements, drawn = read_verdicts(verdicts), result.get("sample")
        if drawn not in (None, judgements.sample):
            wrong = f"{verdicts}: has verdicts on the sample {judgements.sample}, and this round has the sample {drawn}"
            raise ConfigError([f"{wrong}; save it from {folder / REVIEW}, or remove it"], "loop")
        if decide(judgements, config.pass_rate).stop:
            return "verdicts"
    if result["agreement"] is not None and result["agreement"] >= config.agree:
        return "agreement"
    return "waiting" if config.wait and not verdicts.is_file() else None


def _line(result: dict[str, Any]) -> str:
    kept = f"{result['kept']:,} of {result['documents']:,} documents kept"
    agreed = "" if result["agreement"] is None else f", {result['agreement']:.2%} decided as in the round before"
    losses = " and ".join("?" if loss is None else f"{loss:.3f}" for loss in result["losses"])
    return f"round {result['round']}: {kept}{agreed}; held-out losses {losses}"
