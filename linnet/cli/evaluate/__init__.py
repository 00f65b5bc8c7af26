"""`linnet evaluate`: texts, needles in haystacks, recall, images, samples, masked texts, GLUE, tasks and suites."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from linnet.cli.allow import ALLOW_PLUGINS
from linnet.cli.numbers import parse_numbers
from linnet.config import ConfigError, gather, unwritable

if TYPE_CHECKING:
    from linnet.evaluate.session import Evaluator, Session

FOLDER = Path("runs/evaluate-demo")


class Method(StrEnum):
    auto = "auto"
    carried = "carried"
    windowed = "windowed"


class Mode(StrEnum):
    easy = "easy"
    standard = "standard"
    multikey = "multikey"
    multivalue = "multivalue"
    multiquery = "multiquery"
    tracking = "tracking"
    words = "words"


class SuiteName(StrEnum):
    csr = "csr"
    perplexity = "perplexity"
    scrolls = "scrolls"
    mmlu = "mmlu"
    ceval = "ceval"


class TooLong(StrEnum):
    refuse = "refuse"
    cut = "cut"


class Scoring(StrEnum):
    match = "match"
    choice = "choice"


class Split(StrEnum):
    train = "train"
    validation = "validation"
    test = "test"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


evaluate = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Score a model on texts, needles, recall, images, masked texts, GLUE, tasks or suites; RUN/evaluations keeps "
    "the results.",
    epilog='Start with [bold]linnet evaluate text RUN "books/*.txt"[/]; docs/evaluation.md explains every number.',
)

RUN = typer.Argument(metavar="RUN", help="A run folder, or a folder of linnet convert.", show_default=False)
DeviceOption = Annotated[Device, typer.Option(help="auto is the GPU if there is one.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Number format of weights and products.")]
AllowOption = Annotated[bool, typer.Option("--allow-plugins", help=ALLOW_PLUGINS)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object with every item instead of tables.")]
IncludeOption = Annotated[
    Path | None,
    typer.Option(
        help="A folder with your own tasks: YAML files, and JSONL files in the same folder. They replace the harness's "
        "tasks of the same names.",
        show_default=False,
    ),
]
ShotsOption = Annotated[
    int | None, typer.Option(help="Examples before each question.", min=0, show_default="as the task or suite says")
]
LimitOption = Annotated[
    int | None, typer.Option(help="Ask only the first N questions of each task.", min=1, show_default="all")
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a question and its answer that the model may see.",
        min=2,
        show_default="all; attention: the training length",
    ),
]
TooLongOption = Annotated[
    TooLong | None,
    typer.Option(
        help="What happens to questions longer than --context. cut: they lose their beginning, and whole texts are "
        "scored in windows. refuse: an error before anything is scored.",
        show_default="refuse; cut for scrolls",
    ),
]


@evaluate.command()
def text(
    typed: typer.Context,
    run: Annotated[Path, RUN],
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH", help="Files, folders or globs in quotes: text, JSONL or Parquet.", show_default=False
        ),
    ],
    method: Annotated[
        Method,
        typer.Option(
            help="carried: predict every token from all before it in its document, from state to state. windowed: from "
            "the last --window tokens or fewer. auto: carried if the state does not grow and no table "
            "of positions ends, else windowed."
        ),
    ] = Method.auto,
    window: Annotated[
        int | None, typer.Option(help="Tokens per window.", min=2, show_default="the training length, or 1024")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows.", min=1, show_default="half a window")
    ] = None,
    text_key: Annotated[str, typer.Option(help="Key (JSONL) or column (Parquet) of the text.")] = "text",
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Score texts: perplexity per token, word and byte, with intervals over documents, and by context length.

    A text file is one document, JSONL has one per line, Parquet one per row.

    [bold]linnet evaluate text runs/tnl-10m-1a2b3c4d5e6f "books/*.txt"[/]
    """
    from linnet.evaluate.evaluators import TextEvaluator

    problems = []
    if method is Method.carried:
        message = "has no effect with --method carried; leave it out, or give --method windowed"
        problems = [f"--{name}: {message}" for name in ("window", "stride") if _is_given(typed, name)]
    evaluator = TextEvaluator(tuple(paths), method.value, window, stride, text_key)
    _run(typed, run, [evaluator], problems, device, dtype, as_json, allow_plugins)


@evaluate.command()
def blocks(
    typed: typer.Context,
    run: Annotated[Path, RUN],
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Files, folders or globs in quotes, or [bold]wikitext-103=FOLDER:test[/].",
            show_default=False,
        ),
    ],
    block: Annotated[
        int | None, typer.Option(help="Tokens per block.", min=1, show_default="the training length, or 512")
    ] = None,
    text_key: Annotated[str, typer.Option(help="Key (JSONL) or column (Parquet) of the text.")] = "text",
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Score the checkpoint of the lowest validation loss, which run.keep_best kept, not the last."
        ),
    ] = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Score texts in blocks without memory, as WikiText-103 is published: perplexity per token, word and byte.

    A model whose state does not grow is scored with a carried state too.

    [bold]linnet evaluate blocks RUN wikitext-103=FOLDER:test[/]
    """
    from linnet.evaluate.evaluators import BlocksEvaluator

    evaluator = BlocksEvaluator(tuple(paths), block, text_key)
    _run(typed, run, [evaluator], [], device, dtype, as_json, allow_plugins, best)


@evaluate.command()
def needle(
    typed: typer.Context,
    run: Annotated[Path, RUN],
    mode: Annotated[
        Mode,
        typer.Option(
            help="easy: the haystack holds the question with its answer. standard: the answer alone. The others: "
            "several keys, values or questions, a chain of variables, or the most common words of a list."
        ),
    ] = Mode.easy,
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens: FROM:TO:HOW MANY, or a list with commas.")
    ] = "1024:16384:35",
    depths: Annotated[int, typer.Option(help="How many depths of a needle, from 0 to 1.", min=1)] = 35,
    samples: Annotated[int, typer.Option(help="Prompts per cell, that is per length and depth.", min=1)] = 1,
    scoring: Annotated[
        Scoring,
        typer.Option(
            help="match: generate and look for the answer. choice: compare its likelihood with nine wrong answers."
        ),
    ] = Scoring.match,
    haystack: Annotated[
        str | None, typer.Option(help="Text file to hide needles in.", show_default="generated text")
    ] = None,
    digits: Annotated[
        int, typer.Option(help="Digits of the hidden numbers; fewer for small models.", min=1, max=6)
    ] = 5,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Look for needles in haystacks: accuracy by depth and context length, and the four scores of paper 000.

    [bold]linnet evaluate needle RUN --lengths 1024:8192:8 --depths 9 --samples 4[/]
    """
    from linnet.evaluate.evaluators import NeedleEvaluator

    problems: list[str] = []
    if mode is Mode.words:
        message = "has no effect with --mode words, which hides nothing; leave it out"
        problems = [f"--{name}: {message}" for name in ("haystack", "digits") if _is_given(typed, name)]
    settings = {
        "mode" if mode in (Mode.easy, Mode.standard) else "variant": mode.value,
        "lengths": _numbers("lengths", lengths, problems),
        "depths": [i / max(depths - 1, 1) for i in range(depths)],
        "samples": samples,
        "scoring": scoring.value,
        "haystack": haystack,
        "digits": digits,
    }
    evaluators = [NeedleEvaluator(settings)] if settings["lengths"] else []
    _run(typed, run, evaluators, problems, device, dtype, as_json, allow_plugins)


@evaluate.command()
def recall(
    typed: typer.Context,
    run: Annotated[Path, RUN],
    lengths: Annotated[
        str, typer.Option(help="Tokens per sequence: FROM:TO:HOW MANY, or a list with commas.")
    ] = "64,128,256,512,1024",
    pairs: Annotated[
        str, typer.Option(help="Pairs of keys and values per sequence, a list with commas.")
    ] = "4,8,16,32,64",
    samples: Annotated[
        int, typer.Option(help="Sequences per cell, that is per length and number of pairs.", min=1)
    ] = 32,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Ask MQAR and the recall tasks of MAD in tokens of the model's vocabulary, without training on them.

    [bold]linnet evaluate recall RUN --lengths 256,2048 --pairs 8,32[/]
    """
    from linnet.evaluate.evaluators import RecallEvaluator

    problems: list[str] = []
    settings = {"lengths": _numbers("lengths", lengths, problems), "pairs": _numbers("pairs", pairs, problems)}
    evaluators = [RecallEvaluator(settings | {"samples": samples})] if all(settings.values()) else []
    _run(typed, run, evaluators, problems, device, dtype, as_json, allow_plugins)


@evaluate.command()
def images(
    typed: typer.Context,
    run: Annotated[Path, RUN],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Labelled images: class folders, Parquet, tar, IDX, npz, or [bold]digits[/]; may be given again.",
            metavar="SOURCE",
            show_default="the held-out images of the training",
        ),
    ] = None,
    split: Annotated[
        Split | None,
        typer.Option(help="Which part of --data, if it has parts.", show_default="test, or else validation"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images per forward pass.", min=1)] = 256,
    cache: Annotated[Path, typer.Option(help="Folder of prepared images.")] = Path("runs/cache"),
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Score an image classifier: accuracy with intervals, likelihood, calibration, confusions, worst mistakes.

    [bold]linnet evaluate images RUN[/]
    [bold]linnet evaluate images RUN --data cifar10/test.parquet[/]
    """
    from linnet.evaluate.evaluators import ImageEvaluator

    evaluator = ImageEvaluator(tuple(data or ()), split and split.value, batch, cache)
    _run(typed, run, [evaluator], [], device, dtype, as_json, allow_plugins)


class SamplerName(StrEnum):
    ddim = "ddim"
    ddpm = "ddpm"


@evaluate.command()
def samples(
    typed: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder of a denoiser.", show_default=False)],
    extractor: Annotated[
        str,
        typer.Option(
            help="Network whose features are compared: the run of a classifier, [bold]efficientnet-lite0[/], or a file "
            "of its weights or of Inception's. Its name is part of the distance's name.",
            show_default=False,
        ),
    ],
    samples: Annotated[int, typer.Option(help="Images to draw; classes take turns.")] = 1000,
    classifier: Annotated[
        str | None,
        typer.Option(
            help="Run of a classifier that says which class a sample has.",
            show_default="the extractor, if it has the same classes",
        ),
    ] = None,
    sampler: Annotated[SamplerName, typer.Option(help="As in [bold]linnet sample[/].")] = SamplerName.ddim,
    steps: Annotated[
        int | None, typer.Option(help="Steps of the sampler.", show_default="50 for ddim, 250 for ddpm")
    ] = None,
    guidance: Annotated[float, typer.Option(help="As in [bold]linnet sample[/].")] = 1.0,
    guidance_channels: Annotated[
        int | None, typer.Option(help="As in [bold]linnet sample[/].", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Sample i is a function of the seed and i.")] = 0,
    batch: Annotated[int, typer.Option(help="Images per forward pass.", min=1)] = 64,
    cache: Annotated[Path, typer.Option(help="Folder of prepared images and their features.")] = Path("runs/cache"),
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Compare samples of a denoiser with real images: Fréchet and kernel distance, asked class, memorised images.

    [bold]linnet evaluate samples RUN --extractor runs/vit-1a2b3c4d5e6f --samples 1000 --guidance 2[/]
    [bold]linnet evaluate samples RUN --extractor efficientnet-lite0 --samples 10000[/]
    """
    from linnet.evaluate.vision.samples import SampleEvaluator
    from linnet.inference.sampler import read_settings

    problems: list[str] = []
    given = {"sampler": sampler.value, "steps": steps, "guidance": guidance, "seed": seed}
    settings = read_settings(given | {"guidance_channels": guidance_channels}, problems)
    evaluator = SampleEvaluator(extractor, samples, settings, classifier, batch, cache, allow_plugins)
    _run(typed, run, [evaluator], problems, device, dtype, as_json, allow_plugins)


@evaluate.command()
def masked(
    typed: typer.Context,
    run: Annotated[Path, RUN],
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH", help="Files, folders or globs in quotes: text, JSONL or Parquet.", show_default=False
        ),
    ] = None,
    sentences: Annotated[
        list[str] | None,
        typer.Option(
            help="Text files with one sentence per line, for pseudo-log-likelihoods; may be given again.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    cola: Annotated[
        str | None,
        typer.Option(
            help="Folder of GLUE's CoLA: how well pseudo-log-likelihoods tell acceptable sentences from others.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="Tokens per row of a PATH.", min=4, show_default="the training length")
    ] = None,
    longest: Annotated[int, typer.Option(help="Skip sentences with more tokens.", min=1)] = 512,
    text_key: Annotated[str, typer.Option(help="Key (JSONL) or column (Parquet) of the text.")] = "text",
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Score a masked language model: masked perplexity of texts, pseudo-log-likelihoods of sentences, AUC on CoLA.

    [bold]linnet evaluate masked RUN "books/*.txt"[/]
    [bold]linnet evaluate masked RUN --sentences lines.txt --cola glue/CoLA[/]
    """
    from linnet.evaluate.evaluators import ColaEvaluator, MaskedEvaluator, SentencesEvaluator

    problems = [] if paths or sentences or cola else ["PATH: nothing to score; give texts, --sentences or --cola"]
    for name, needed in (("row", paths), ("text-key", paths), ("longest", sentences or cola)):
        if not needed and _is_given(typed, name.replace("-", "_")):
            problems.append(f"--{name}: has no effect on what is scored here; leave it out")
    evaluators: list[Evaluator] = [MaskedEvaluator(tuple(paths), text_key, row)] if paths else []
    evaluators += [SentencesEvaluator(tuple(sentences), longest)] if sentences else []
    evaluators += [ColaEvaluator(cola, longest)] if cola else []
    if not evaluators:
        raise ConfigError(problems, "evaluate")
    _run(typed, run, evaluators, problems, device, dtype, as_json, allow_plugins)


@evaluate.command()
def glue(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Runs of objective: sentences, of any tasks.", show_default=False),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder of GLUE, or of the one task of the runs.",
            metavar="FOLDER",
            show_default="that of each training",
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Score fine-tuned models on the dev sentences of GLUE, and print the average of its nine numbers.

    Of several runs of one task the best one counts, as papers choose the learning rate; a missing task counts as 0.

    [bold]linnet evaluate glue RUN --data glue[/]
    [bold]linnet evaluate glue runs/sst2-* runs/cola-* --data glue[/]
    """
    from linnet.cli.evaluate.show import show_glue
    from linnet.evaluate.evaluators import GlueEvaluator

    jobs = [
        _Job(run, [GlueEvaluator(data)], [], device.value, dtype.value, as_json, allow_plugins, frozenset(["data"]))
        for run in runs
    ]
    found = _execute_all(jobs)
    table = show_glue(found, printed=not as_json)
    if as_json:
        typer.echo(json.dumps({"runs": {str(run): one for run, one in found.items()}, **table}, indent=1))


@evaluate.command()
def lra(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Runs of objective: sequences, of any tasks.", show_default=False),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Folder of the one task of the runs.", metavar="FOLDER", show_default="that of the training"),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder of prepared tasks.")] = Path("runs/cache"),
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Score models on the Long Range Arena's test splits, and print its table: one row per architecture.

    Each task has the accuracy of the last epoch and of the best one. The
    printed average divides by six, and a missing task counts as 0, as in paper
    002; beside it stands the mean of the tasks that were run.

    [bold]linnet evaluate lra runs/listops-* runs/pathfinder-*[/]
    """
    from linnet.cli.evaluate.show import show_lra
    from linnet.evaluate.evaluators import LraEvaluator

    options = frozenset(["data", "cache"])
    jobs = [
        _Job(run, [LraEvaluator(data, cache)], [], device.value, dtype.value, as_json, allow_plugins, options)
        for run in runs
    ]
    found = _execute_all(jobs)
    table = show_lra(found, printed=not as_json)
    if as_json:
        typer.echo(json.dumps({"runs": {str(run): one for run, one in found.items()}, "table": table}, indent=1))


@evaluate.command()
def tasks(
    typed: typer.Context,
    run: Annotated[Path, RUN],
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help="Tasks or groups of the harness, or tasks of --include.", show_default=False
        ),
    ],
    include: IncludeOption = None,
    shots: ShotsOption = None,
    limit: LimitOption = None,
    context: ContextOption = None,
    too_long: TooLongOption = None,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Ask tasks of lm-evaluation-harness, or of your own (needs the extra eval).

    [bold]linnet evaluate tasks RUN capitals opposites --include examples/tasks[/]
    """
    from linnet.evaluate.evaluators import Questions, TaskEvaluator

    questions = Questions(include, shots, limit, context, too_long and too_long.value)
    _run(typed, run, [TaskEvaluator(tuple(names), None, questions)], [], device, dtype, as_json, allow_plugins)


@evaluate.command()
def suite(
    typed: typer.Context,
    run: Annotated[Path, RUN],
    names: Annotated[list[SuiteName], typer.Argument(metavar="SUITE", help="Which suites.", show_default=False)],
    include: IncludeOption = None,
    shots: ShotsOption = None,
    limit: LimitOption = None,
    context: ContextOption = None,
    too_long: TooLongOption = None,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
    allow_plugins: AllowOption = False,
) -> None:
    """Ask the suites of papers 000 and 001 through lm-evaluation-harness: csr, perplexity, scrolls, mmlu, ceval.

    The questions come from Hugging Face's hub or its cache. Needs the extra eval.

    [bold]linnet evaluate suite RUN csr perplexity[/]
    """
    from linnet.evaluate.evaluators import Questions, TaskEvaluator

    questions = Questions(include, shots, limit, context, too_long and too_long.value)
    chosen = dict.fromkeys(name.value for name in names)
    evaluators = [TaskEvaluator((), name, questions) for name in chosen]
    _run(typed, run, evaluators, [], device, dtype, as_json, allow_plugins)


@evaluate.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where the models and the page go.")] = FOLDER,
    plan: Annotated[
        Path | None,
        typer.Option(help="What to train and ask, such as [bold]configs/needles.yaml[/].", show_default=False),
    ] = None,
) -> None:
    """Train two small models on needles, evaluate both in every way, and compare them: in about 100 s on two cores.

    It needs no network. A second call reuses trained models.

    [bold]linnet evaluate demo[/]
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
    device: str
    dtype: str
    as_json: bool
    allow_plugins: bool
    options: frozenset[str]
    best: bool = False


def _run(
    typed: typer.Context,
    run: Path,
    evaluators: Sequence["Evaluator"],
    problems: Sequence[str],
    device: Device,
    dtype: Dtype,
    as_json: bool,
    allow_plugins: bool,
    best: bool = False,
) -> None:
    options = frozenset(one.name for one in typed.command.params if one.param_type_name == "option")
    job = _Job(run, list(evaluators), list(problems), device.value, dtype.value, as_json, allow_plugins, options, best)
    _execute(job)


def _execute(job: _Job, echo: bool = True) -> dict[str, dict]:
    """Runs, prints and saves one evaluation after the other, so that a failure does not lose earlier records.

    Args:
        echo: print the records if they are to be JSON.

    Returns:
        The records, by their kind.
    """
    from linnet.cli.evaluate.show import bar, show
    from linnet.evaluate.session import no_progress, prepare
    from linnet.train.device import choose

    problems, device = list(job.problems), None
    with gather(problems):
        device = choose(job.device)
    try:
        with Console(stderr=True).status("reading the questions and the model"):
            session = prepare(
                job.run,
                job.evaluators,
                device,
                job.dtype,
                problems,
                allow_plugins=job.allow_plugins,
                best=job.best,
            )
    except ConfigError as error:
        raise ConfigError([_by_option(line, job.options) for line in error.problems], "evaluate") from None
    _warn(session, job)
    records = {}
    for evaluator in job.evaluators:
        record = evaluator.run(session, no_progress if job.as_json else bar)
        _keep(session, record)  # before it is printed, since a closed pipe ends the command
        if not job.as_json:
            show(record, session.path)
        records[record.kind] = record.to_dict()
    if job.as_json and echo:
        typer.echo(json.dumps(records, indent=1))
    return records


def _execute_all(jobs: Sequence[_Job]) -> dict[Path, dict]:
    """Checks all jobs of one evaluator each, then runs them; returns the record of each run."""
    from linnet.evaluate.session import find_problems
    from linnet.train.device import choose

    problems: list[str] = []
    with gather(problems):
        choose(jobs[0].device)
    for job in jobs:
        found = find_problems(job.run, job.evaluators, allow_plugins=job.allow_plugins)
        problems += [_by_option(line, job.options) for line in found]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "evaluate")
    return {job.run: _execute(job, echo=False)[job.evaluators[0].kind] for job in jobs}


def _warn(session: "Session", job: _Job) -> None:
    """Prints notes on limits of the results, before they are computed."""
    from linnet.evaluate.evaluators import TextEvaluator, text_notes
    from linnet.evaluate.results import FOLDER as KEPT
    from linnet.runs import RunFolder

    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    folder, about = session.path / KEPT, session.about
    if reason := unwritable(folder):
        fix = "to save results, stop and copy the run to another folder"
        errors.print(f"[bold yellow]note[/] results will not be saved: {escape(f'{folder} {reason}')}; {fix}")
    if session.superseded and not job.as_json:
        line = f"{about['run']}: scores of step {about['step']:,}; its newer checkpoints are damaged"
        Console(soft_wrap=True).print(line, highlight=False, markup=False)
    if about["documents"] == 1 and any(isinstance(one, TextEvaluator) for one in job.evaluators):
        message = "the model was trained on a single document, so it never read the token that precedes each text here"
        errors.print(f"[bold yellow]note[/] {message}; the first tokens of a text may score badly")
    for note in text_notes(job.evaluators, RunFolder.open(session.path).config):
        errors.print(f"[bold yellow]note[/] {escape(note)}")


def _keep(session: "Session", record: Any) -> None:
    """Saves the record; if the folder cannot be written, prints a message and continues."""
    try:
        record.save(session.path)
    except OSError as error:
        message = f"[bold yellow]not saved[/] in {escape(str(session.path))}: {error.strerror}"
        Console(stderr=True).print(message, highlight=False)


def _by_option(problem: str, options: frozenset[str]) -> str:
    """Returns a problem of a key, or of an item of its list, under the name of the option that sets it."""
    if "text_key" in options:
        problem = problem.replace("; set text_key (", "; give --text-key (")
    place, colon, rest = problem.partition(":")
    key = place.partition(".")[0]
    if key in options:
        return f"--{key.replace('_', '-')}{colon}{rest}"
    return f"PATH{colon}{rest}" if key == "text" and "text_key" in options else problem


def _is_given(typed: typer.Context, name: str) -> bool:
    source = typed.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _numbers(key: str, given: str, problems: list[str]) -> list[int]:
    try:
        return parse_numbers(given)
    except ValueError:
        usual = "4,8,16" if key == "pairs" else "1024:16384:35"
        problems.append(f"--{key}: {given!r} is not FROM:TO:HOW MANY or a list like 4,8,16 that ascends; give {usual}")
        return []
