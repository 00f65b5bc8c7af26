"""`linnet evaluate`: texts, conversations, needles in haystacks, recall, images, masked texts, GLUE, tasks, suites."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from linnet.config import Config, ConfigError, checking, gather, parse, refuse, unwritable
from linnet.options import (
    AllowPlugins,
    AsJson,
    Count,
    Device,
    Dtype,
    by_option,
    echo_json,
    is_given,
    options,
    parse_numbers,
    working,
)

if TYPE_CHECKING:
    from linnet.evaluate.session import Evaluator, Session
    from linnet.parallel import Mesh

C = TypeVar("C", bound=Config)
FOLDER = Path("runs/evaluate-demo")


class SuiteName(StrEnum):  # typer takes no list of a Literal
    csr = "csr"
    perplexity = "perplexity"
    scrolls = "scrolls"
    mmlu = "mmlu"
    ceval = "ceval"


@dataclass(frozen=True, kw_only=True)
class Running:
    """How a model is run and what is printed, in all evaluations.

    Attributes:
        device: auto is the GPU if there is one.
        devices: Divide the texts or questions among this many devices of this machine, with the same results: GPUs, or
            processes with --device cpu (default: 1).
        dtype: Number format of weights and products.
        as_json: Print one JSON object with every item instead of tables.
    """

    device: Device = "auto"
    devices: Count | None = None
    dtype: Dtype = "float32"
    as_json: AsJson = False
    allow_plugins: AllowPlugins = False


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Which questions of a task are asked, and how: `linnet.evaluate.evaluators.Questions`.

    Attributes:
        include: A folder with your own tasks: YAML files, and JSONL files in the same folder. They replace the
            harness's tasks of the same names.
        shots: Examples before each question (default: as the task or suite says).
        limit: Ask only the first N questions of each task (default: all).
        context: Tokens of a question and its answer that the model may see (default: all; attention: the training
            length).
        too_long: What happens to questions longer than --context. cut: they lose their beginning, and whole texts are
            scored in windows. refuse: an error before anything is scored (default: refuse; cut for scrolls).
    """

    include: Path | None = None
    shots: Annotated[int | None, typer.Option(min=0)] = None
    limit: Count | None = None
    context: Annotated[int | None, typer.Option(min=2)] = None
    too_long: Literal["refuse", "cut"] | None = None


evaluate = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Score a model on texts, conversations, needles, recall, images, masked texts, GLUE, tasks or suites; "
    "RUN/evaluations keeps the results.",
    epilog='Start with [bold]linnet evaluate text RUN "books/*.txt"[/]; docs/evaluation.md explains every number.',
)


@evaluate.command()
@options
def text(
    typed: typer.Context,
    run: Path,
    paths: list[str],
    *,
    method: Literal["auto", "carried", "windowed"] = "auto",
    window: Annotated[int | None, typer.Option(min=2)] = None,
    stride: Count | None = None,
    text_key: str = "text",
    running: Running,
) -> None:
    """Score texts: perplexity per token, word and byte, with intervals over documents, and by context length.

    A text file is one document, JSONL has one per line, Parquet one per row.

    [bold]linnet evaluate text runs/tnl-10m-1a2b3c4d5e6f "books/*.txt"[/]

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        paths (PATH): Files, folders or globs in quotes: text, JSONL or Parquet.
        method: carried: predict every token from all before it in its document, from state to state. windowed: from
            those before it in a window. auto: windowed if the state grows with the context or positions are a learned
            table, else carried.
        window: Tokens per window, the predicted ones included (default: the training length, or 1024).
        stride: Tokens between windows (default: half a window).
        text_key: Key (JSONL) or column (Parquet) of the text.
    """
    from linnet.evaluate.evaluators import TextEvaluator

    problems = []
    if method == "carried":
        message = "has no effect with --method carried; leave it out, or give --method windowed"
        problems = [f"--{name}: {message}" for name in ("window", "stride") if is_given(typed, name)]
    evaluator = TextEvaluator(paths=paths, method=method, window=window, stride=stride, text_key=text_key)
    run_evaluators(typed, run, [evaluator], problems, running)


@evaluate.command()
@options
def chat(
    typed: typer.Context,
    run: Path,
    paths: list[str],
    *,
    template: Path | None = None,
    per_answer: bool = False,
    running: Running,
) -> None:
    """Score conversations: loss of the assistant's turns in nats per token, and the answers that it gives exactly.

    [bold]linnet evaluate chat MODEL held-out.jsonl[/], before and after a fine-tuning; then linnet compare

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        paths (PATH): JSONL files, folders or globs in quotes; each line has [bold]messages[/], or [bold]prompt[/] and
            [bold]completion[/].
        template: A chat template, in place of the folder's.
        per_answer: Each answer follows the turns before it as a server shows them, for templates that change earlier
            turns.
    """
    from linnet.evaluate.evaluators import ChatEvaluator

    file = None if template is None else str(template)
    run_evaluators(typed, run, [ChatEvaluator(paths=paths, template=file, per_answer=per_answer)], [], running)


@evaluate.command()
@options
def blocks(
    typed: typer.Context,
    run: Path,
    paths: list[str],
    *,
    block: Count | None = None,
    text_key: str = "text",
    best: bool = False,
    running: Running,
) -> None:
    """Score texts in blocks without memory, as WikiText-103 is published: perplexity per token, word and byte.

    A model whose state does not grow is scored with a carried state too.

    [bold]linnet evaluate blocks RUN wikitext-103=FOLDER:test[/]

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        paths (PATH): Files, folders or globs in quotes, or [bold]wikitext-103=FOLDER:test[/].
        block: Tokens per block (default: the training length, or 512).
        text_key: Key (JSONL) or column (Parquet) of the text.
        best: Score the checkpoint of the lowest validation loss, which run.keep_best kept, not the last.
    """
    from linnet.evaluate.evaluators import BlocksEvaluator

    run_evaluators(typed, run, [BlocksEvaluator(paths=paths, block=block, text_key=text_key)], [], running, best)


@evaluate.command()
@options
def needle(
    typed: typer.Context,
    run: Path,
    *,
    mode: Literal["easy", "standard", "multikey", "multivalue", "multiquery", "tracking", "words"] = "easy",
    lengths: str = "1024:16384:35",
    depths: Count = 35,
    samples: Count = 1,
    scoring: Literal["match", "choice"] = "match",
    haystack: str | None = None,
    digits: Annotated[int, typer.Option(min=1, max=6)] = 5,
    running: Running,
) -> None:
    """Look for needles in haystacks: accuracy by depth and context length, and the four scores of paper 000.

    [bold]linnet evaluate needle RUN --lengths 1024:8192:8 --depths 9 --samples 4[/]

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        mode: easy: the haystack holds the question with its answer. standard: the answer alone. The others: several
            keys, values or questions, a chain of variables, or the most common words of a list.
        lengths: Context lengths in tokens: FROM:TO:HOW MANY, or a list with commas.
        depths: How many depths of a needle, from 0 to 1.
        samples: Prompts per cell, that is per length and depth.
        scoring: match: generate and look for the answer. choice: compare its likelihood with nine wrong answers.
        haystack: Text file to hide needles in (default: generated text).
        digits: Digits of the hidden numbers; fewer for small models.
    """
    from linnet.evaluate.evaluators import NeedleEvaluator

    problems: list[str] = []
    if mode == "words":
        message = "has no effect with --mode words, which hides nothing; leave it out"
        problems = [f"--{name}: {message}" for name in ("haystack", "digits") if is_given(typed, name)]
    settings = {
        "mode" if mode in ("easy", "standard") else "variant": mode,
        "lengths": _numbers("lengths", lengths, problems),
        "depths": [i / max(depths - 1, 1) for i in range(depths)],
        "samples": samples,
        "scoring": scoring,
        "haystack": haystack,
        "digits": digits,
    }
    run_evaluators(typed, run, _parsed(NeedleEvaluator, settings, problems), problems, running)


@evaluate.command()
@options
def recall(
    typed: typer.Context,
    run: Path,
    *,
    lengths: str = "64,128,256,512,1024",
    pairs: str = "4,8,16,32,64",
    samples: Count = 32,
    running: Running,
) -> None:
    """Ask MQAR and the recall tasks of MAD in tokens of the model's vocabulary, without training on them.

    [bold]linnet evaluate recall RUN --lengths 256,2048 --pairs 8,32[/]

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        lengths: Tokens per sequence: FROM:TO:HOW MANY, or a list with commas.
        pairs: Pairs of keys and values per sequence of MQAR, keys and values to draw from in the other recall tasks,
            tokens to copy; a list with commas.
        samples: Sequences per cell, that is per length and number of pairs.
    """
    from linnet.evaluate.evaluators import RecallEvaluator

    problems: list[str] = []
    settings = {"lengths": _numbers("lengths", lengths, problems), "pairs": _numbers("pairs", pairs, problems)}
    run_evaluators(typed, run, _parsed(RecallEvaluator, settings | {"samples": samples}, problems), problems, running)


@evaluate.command()
@options
def tasks(
    typed: typer.Context,
    run: Path,
    names: list[str],
    *,
    asking: Asking,
    running: Running,
) -> None:
    """Ask tasks of lm-evaluation-harness, or of your own (needs the extra eval).

    [bold]linnet evaluate tasks RUN capitals opposites --include examples/tasks[/]

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        names (NAME): Tasks or groups of the harness, or tasks of --include.
    """
    from linnet.evaluate.evaluators import Questions, TaskEvaluator

    questions = Questions(**vars(asking))
    run_evaluators(typed, run, [TaskEvaluator(names=names, questions=questions)], [], running)


@evaluate.command()
@options
def suite(
    typed: typer.Context,
    run: Path,
    names: list[SuiteName],
    *,
    asking: Asking,
    running: Running,
) -> None:
    """Ask the suites of papers 000 and 001 through lm-evaluation-harness: csr, perplexity, scrolls, mmlu, ceval.

    The questions come from Hugging Face's hub or its cache. Needs the extra eval.

    [bold]linnet evaluate suite RUN csr perplexity[/]

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        names (SUITE): Which suites.
    """
    from linnet.evaluate.evaluators import Questions, TaskEvaluator

    questions = Questions(**vars(asking))
    chosen = dict.fromkeys(name.value for name in names)
    evaluators = [TaskEvaluator(suite=name, questions=questions) for name in chosen]
    run_evaluators(typed, run, evaluators, [], running)


@evaluate.command()
@options
def demo(
    folder: Path = FOLDER,
    *,
    plan: Path | None = None,
) -> None:
    """Train two small models on needles, evaluate both in every way, and compare them: in about 100 s on two cores.

    It needs no network. A second call reuses trained models.

    [bold]linnet evaluate demo[/]

    Args:
        folder: Where the models and the page go.
        plan: What to train and ask, such as [bold]configs/needles.yaml[/].
    """
    from linnet.cli.evaluate.demo import read_plan, run_demo

    if (folder / "config.yaml").exists():
        message = f"FOLDER: {folder} is a run folder; the demo trains models of its own, name another folder"
        raise ConfigError([message], "evaluate")
    run_demo(folder, read_plan(plan))


@dataclass(frozen=True)
class _Job:
    """The evaluations of one command line.

    Attributes:
        problems: problems that were found in the options.
        options: names of the command's options, under which problems of keys are reported.
        best: score the checkpoint of the lowest validation loss and not the last one.
    """

    run: Path
    evaluators: list["Evaluator"]
    problems: list[str]
    running: Running
    options: frozenset[str]
    best: bool = False

    @property
    def rename(self) -> Callable[[str], str]:
        """Writes a problem of a key under the name of the option, or of the argument, that sets it."""
        names = {"text": "PATH"} if "text_key" in self.options else {"paths": "PATH"}
        named = by_option(self.options, **names)
        return lambda line: named(line.replace("data.per_answer=true", "--per-answer"))


def run_evaluators(
    typed: typer.Context,
    run: Path,
    evaluators: Sequence["Evaluator"],
    problems: Sequence[str],
    running: Running,
    best: bool = False,
) -> None:
    options = frozenset(parameter.name for parameter in typed.command.params if parameter.param_type_name == "option")
    job = _Job(run, list(evaluators), list(problems), running, options, best)
    _on_devices([job], lambda ranks: _execute(job, ranks))


def _on_devices(jobs: Sequence[_Job], do: Callable[["Mesh | None"], object]) -> None:
    """Calls `do` here with None, or with the mesh in each process of --devices or torchrun; only rank 0 prints."""
    import torch

    from linnet.cli.train import is_worker, start_workers
    from linnet.parallel import ParallelConfig, mesh
    from linnet.train.device import choose
    from linnet.train.processes import launch

    running = jobs[0].running
    devices = running.devices or mesh.world()
    if devices > 1:
        kinds = dict.fromkeys(e.kind for job in jobs for e in job.evaluators if not e.divides)
        refuse([f"--devices: {kind} cannot be divided among {devices}; leave it out" for kind in kinds], "evaluate")
    if running.devices and not is_worker(devices) and devices > 1 and not any(job.problems for job in jobs):
        refuse(mesh.device_problems(choose(running.device), devices), "evaluate")
        threads = str(torch.get_num_threads())  # of one process alone: their number changes the last bits of a product
        variables = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0"}
        return start_workers(devices, restarts=0, environment=variables, again="the same command starts again")
    with launch.worker():
        if mesh.world() == 1:
            do(None)
            return
        with mesh.together():
            device = choose(running.device)
        ranks = mesh.start(ParallelConfig(), device)
        with mesh.dividing(ranks), ExitStack() as silence:
            if not ranks.main:
                nowhere = silence.enter_context(open(os.devnull, "w"))
                silence.enter_context(redirect_stdout(nowhere))
                silence.enter_context(redirect_stderr(nowhere))
            with ranks.together():
                do(ranks)
        mesh.stop()


def _execute(job: _Job, ranks: "Mesh | None", echo: bool = True) -> dict[str, dict]:
    """Runs, prints and saves one evaluation after the other, so that a failure does not lose earlier records.

    Args:
        ranks: the processes that share its items; None is this one alone.
        echo: print the records if they are to be JSON.

    Returns:
        The records, by their kind.
    """
    from linnet.cli.evaluate.show import bar, show
    from linnet.evaluate.session import no_progress, prepare
    from linnet.parallel.mesh import in_turns
    from linnet.train.device import choose

    problems, device = list(job.problems), None
    with gather(problems):
        device = choose(job.running.device) if ranks is None else ranks.device
    dtype, plugins = job.running.dtype, job.running.allow_plugins
    with (
        checking("evaluate", job.rename),
        working("reading the questions and the model"),
        in_turns(ranks and ranks.host),  # the first one prepares data for all
    ):
        session = prepare(job.run, job.evaluators, device, dtype, problems, allow_plugins=plugins, best=job.best)
    _warn(session, job)
    records, unsaved = {}, []
    for evaluator in job.evaluators:
        with checking("evaluate", job.rename):
            record = evaluator.run(session, no_progress if job.running.as_json else bar)
        if ranks is None or ranks.main:
            unsaved += _keep(session, record)  # before it is printed, since a closed pipe ends the command
        if not job.running.as_json:
            show(record, session.path)
        records[record.kind] = record.to_dict()
    if job.running.as_json and echo:
        echo_json(records)
    refuse(unsaved, "evaluate")
    return records


def run_all(
    evaluators: Mapping[Path, "Evaluator"],
    options: Collection[str],
    running: Running,
    table: Callable[[dict[Path, dict], bool], dict[str, Any]],
) -> None:
    """Checks one evaluation of each run, then makes all of them.

    Args:
        table: returns the table of the records of all runs, and prints it if its second argument is True.
    """
    from linnet.evaluate.session import find_problems
    from linnet.parallel.mesh import in_turns
    from linnet.train.device import choose

    jobs = [_Job(run, [evaluator], [], running, frozenset(options)) for run, evaluator in evaluators.items()]

    def evaluate_all(ranks: "Mesh | None") -> None:
        with in_turns(ranks and ranks.host), checking("evaluate") as problems:
            with gather(problems):
                choose(running.device)
            for job in jobs:
                faults = find_problems(job.run, job.evaluators, allow_plugins=job.running.allow_plugins)
                problems += map(job.rename, faults)
        records = {job.run: record for job in jobs for record in _execute(job, ranks, echo=False).values()}
        shown = table(records, not running.as_json)
        if running.as_json:
            echo_json({"runs": {str(run): record for run, record in records.items()}, **shown})

    _on_devices(jobs, evaluate_all)


def _warn(session: "Session", job: _Job) -> None:
    """Prints notes on limits of the results, before they are computed."""
    from linnet.evaluate.evaluators import BlocksEvaluator, TextEvaluator, text_notes
    from linnet.evaluate.results import FOLDER as KEPT
    from linnet.runs import RunFolder

    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    folder, about = session.path / KEPT, session.about
    if reason := unwritable(folder):
        fix = "to save results, stop and copy the run to another folder"
        errors.print(f"[bold yellow]note[/] results will not be saved: {escape(f'{folder} {reason}')}; {fix}")
    if session.superseded and not job.running.as_json:
        line = f"{about['run']}: scores of step {about['step']:,}; its newer checkpoints are damaged"
        Console(soft_wrap=True).print(line, highlight=False, markup=False)
    if about["documents"] == 1 and any(isinstance(evaluator, TextEvaluator) for evaluator in job.evaluators):
        message = "the model was trained on a single document, so it never read the token that precedes each text here"
        errors.print(f"[bold yellow]note[/] {message}; the first tokens of a text may score badly")
    for evaluator in job.evaluators:
        if isinstance(evaluator, TextEvaluator) and (unused := evaluator.unused(session)):
            message = "no effect on this model, whose state is carried through each document; give --method windowed"
            errors.print(f"[bold yellow]note[/] {', '.join(f'--{key}' for key in unused)}: {message}")
        if isinstance(evaluator, TextEvaluator | BlocksEvaluator) and (note := evaluator.assumed(session)):
            errors.print(f"[bold yellow]note[/] {escape(by_option(('window', 'block'))(note))}")
    for note in text_notes(job.evaluators, RunFolder.open(session.path).config):
        errors.print(f"[bold yellow]note[/] {escape(note)}")


def _keep(session: "Session", record: Any) -> list[str]:
    """Saves the record. If the folder cannot be written, prints a message; if the disk is full, returns the problem."""
    from linnet.runs.files import is_full

    try:
        record.save(session.path)
    except OSError as error:
        if is_full(error):
            fix = "free some space and run the same command again"
            return [f"{session.path}: the results of {record.kind} are not saved, the disk is full; {fix}"]
        message = f"[bold yellow]not saved[/] in {escape(str(session.path))}: {error.strerror}"
        Console(stderr=True).print(message, highlight=False)
    return []


def _parsed(cls: type[C], values: dict[str, Any], problems: list[str]) -> list[C]:
    """Returns the evaluation of these values; an empty list if there are problems, to which it adds those of values."""
    if not problems:
        with gather(problems):
            return [parse(cls, values)]
    return []


def _numbers(key: str, text: str, problems: list[str]) -> list[int]:
    try:
        return parse_numbers(text)
    except ValueError:
        usual = "4,8,16" if key == "pairs" else "1024:16384:35"
        problems.append(f"--{key}: {text!r} is not FROM:TO:HOW MANY or a list like 4,8,16 that ascends; give {usual}")
        return []
