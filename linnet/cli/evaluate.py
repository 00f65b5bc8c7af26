"""`linnet evaluate`: how well a model predicts texts, finds needles in them, answers questions, and recalls."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from linnet.config import ConfigError, gather


class Method(StrEnum):
    auto = "auto"
    carried = "carried"
    windowed = "windowed"


class Needle(StrEnum):
    easy = "easy"
    standard = "standard"
    multikey = "multikey"
    multivalue = "multivalue"
    multiquery = "multiquery"
    tracking = "tracking"
    words = "words"


class Suite(StrEnum):
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


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


TEXTS, NEEDLES, RECALL, TASKS = "Texts", "Needles", "Recall", "Suites and tasks"
OPTIONS = {  # that say how to ask, by what asks so
    ("--text",): ("method", "window", "stride", "text_key"),
    ("--needle",): ("depths", "scoring", "haystack", "digits"),
    ("--needle", "--recall"): ("lengths", "samples"),
    ("--recall",): ("pairs",),
    ("--suite", "--task"): ("include", "shots", "limit", "context", "too_long"),
}
NEEDLE_LENGTHS, RECALL_LENGTHS = "1024:16384:35", "64,128,256,512,1024"


def evaluate(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Run folder, or a folder of linnet convert.", show_default=False),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Text to score: a file, folder, glob in quotes, JSONL or Parquet; may be given again.",
            show_default=False,
            rich_help_panel=TEXTS,
        ),
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            help="carried: every token from all before it in its document, from state to state. windowed: from the "
            "last --window tokens or fewer. auto: carried where the state does not grow, else windowed.",
            rich_help_panel=TEXTS,
        ),
    ] = Method.auto,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window.", min=2, show_default="the length of training, or 1024", rich_help_panel=TEXTS
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between windows.", min=1, show_default="half a window", rich_help_panel=TEXTS),
    ] = None,
    text_key: Annotated[
        str, typer.Option(help="Key (JSONL) or column (Parquet) that holds the text.", rich_help_panel=TEXTS)
    ] = "text",
    needle: Annotated[
        Needle | None,
        typer.Option(
            help="Hide facts in a long text and ask for them. easy: the text holds the question too; standard: the "
            "answer alone; the others: several keys, values, questions, a chain of variables, or common words.",
            show_default=False,
            rich_help_panel=NEEDLES,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of prompts, of --recall too: FROM:TO:HOW MANY, or lengths with commas.",
            show_default=f"{NEEDLE_LENGTHS}; recall {RECALL_LENGTHS}",
            rich_help_panel=NEEDLES,
        ),
    ] = None,
    depths: Annotated[
        int, typer.Option(help="How many depths of a needle, from 0 to 1.", min=1, rich_help_panel=NEEDLES)
    ] = 35,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Prompts of each cell: length and depth, or length and pairs.",
            min=1,
            show_default="1; recall 32",
            rich_help_panel=NEEDLES,
        ),
    ] = None,
    scoring: Annotated[
        Scoring,
        typer.Option(
            help="match: the model goes on, and the answer is looked for. choice: it is compared.",
            rich_help_panel=NEEDLES,
        ),
    ] = Scoring.match,
    haystack: Annotated[
        str | None,
        typer.Option(help="Text file to hide needles in.", show_default="text made up", rich_help_panel=NEEDLES),
    ] = None,
    digits: Annotated[
        int,
        typer.Option(help="Of the hidden numbers; fewer for small models.", min=1, max=6, rich_help_panel=NEEDLES),
    ] = 5,
    recall: Annotated[
        bool,
        typer.Option(
            "--recall",
            help="Ask MQAR and recall tasks of MAD in words of the model's own, without training on them.",
            rich_help_panel=RECALL,
        ),
    ] = False,
    pairs: Annotated[
        str, typer.Option(help="Pairs of keys and values in a sequence, with commas.", rich_help_panel=RECALL)
    ] = "4,8,16,32,64",
    suite: Annotated[
        list[Suite] | None,
        typer.Option(
            help="Ask a suite of the papers through lm-evaluation-harness; may be given again. Its questions come from "
            "Hugging Face's hub or its cache.",
            show_default=False,
            rich_help_panel=TASKS,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Ask tasks of the harness, or of --include.",
            show_default=False,
            rich_help_panel=TASKS,
        ),
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option(
            help="A folder with tasks of your own: YAML files, and JSONL files beside them. They come before the "
            "harness's of the same names, in suites too.",
            show_default=False,
            rich_help_panel=TASKS,
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            help="Examples before each question.",
            min=0,
            show_default="as the suite or task says",
            rich_help_panel=TASKS,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="First questions of each task.", min=1, show_default="all", rich_help_panel=TASKS),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a question and its answer that the model may see.",
            min=2,
            show_default="all; attention: the length of training",
            rich_help_panel=TASKS,
        ),
    ] = None,
    too_long: Annotated[
        TooLong | None,
        typer.Option(
            help="What becomes of what is longer than --context. cut: it loses its beginning, and whole texts are "
            "scored in windows. refuse: an error before anything is scored.",
            show_default="refuse; cut for scrolls",
            rich_help_panel=TASKS,
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="auto is the GPU where there is one.")] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and products.")] = Dtype.float32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every document.")] = False,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help="Train two small models in RUN (default runs/evaluate-demo), evaluate them in every way that needs no "
            "network, and compare them: a minute or two on two cores.",
        ),
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(help="Of --demo: what to train and ask, such as configs/needles.yaml.", show_default=False),
    ] = None,
    typed: typer.Context = None,  # which options the command line has; a call from Python has none
) -> None:
    """Score a model: on texts (--text), by needles (--needle), by recall (--recall), by questions (--suite, --task).

    Texts: perplexity by token, word and byte, with intervals over documents, and by the length of the context.
    A text file is one document, JSONL has one a line.
    Needles: accuracy by depth and length, and the four scores of paper 000.
    Recall: accuracy by the length of a sequence and the pairs in it, beside that of guessing.
    Suites: csr (seven tasks of commonsense), perplexity, scrolls, mmlu and ceval, as papers 000 and 001 have them.
    Results are also kept in RUN/evaluations, with the score of every document, cell and question.

    Example: [bold]linnet evaluate runs/tnl-10m-1a2b3c4d5e6f --text "books/*.txt"[/]
    """
    from linnet.cli.evaluate_demo import FOLDER, read_plan, run_demo
    from linnet.cli.evaluate_needle import check_needles, find_needles, parse_numbers
    from linnet.cli.evaluate_recall import ask_recall, check_cells
    from linnet.cli.evaluate_run import keep, open_run, print_json, warn_unkept
    from linnet.cli.evaluate_tasks import Asked, ask, context_of, prepare
    from linnet.cli.evaluate_text import score_texts

    given = set() if typed is None else {name for name in typed.params if _is_given(typed, name)}
    if demo:
        message = "not with --demo, which asks what its plan says; leave it out"
        problems = [f"{_option(name)}: {message}" for name in sorted(given - {"demo", "plan", "run"})]
        if run is not None and (run / "config.yaml").exists():
            problems.append(f"RUN: {run} is a run folder; --demo trains models of its own, name a folder for them")
        if problems:
            raise ConfigError(problems, "evaluate")
        run_demo(run or FOLDER, read_plan(plan))
        return
    problems = _idle(given, method, needle)
    if plan is not None:
        problems.append("--plan: belongs to --demo; give both, or none")
    if run is None:
        problems.append("RUN: name a run folder to evaluate, or give --demo")
    names = [name.strip() for name in task.split(",") if name.strip()] if task else []
    speaks = bool(text or needle or suite or names)
    if not speaks and not recall:
        message = "give --text PATH, --needle MODE, --recall, --suite NAME or --task NAME,..."
        problems.append(f"nothing to evaluate: {message}")
    if needle and recall and (lengths or samples):
        problems.append("--needle, --recall: --lengths and --samples of one do not suit the other; ask in two commands")
    places = parse_numbers("lengths", lengths or (NEEDLE_LENGTHS if needle else RECALL_LENGTHS), problems)
    cells = {"lengths": places, "pairs": parse_numbers("pairs", pairs, problems), "samples": samples or 32}
    if needle and recall:
        cells["lengths"] = parse_numbers("lengths", RECALL_LENGTHS, problems)
    grid = {"samples": samples or 1, "scoring": scoring.value, "haystack": haystack, "digits": digits}
    grid |= {"lengths": places, "depths": [i / max(depths - 1, 1) for i in range(depths)]}
    if needle:
        grid |= {"mode" if needle in (Needle.easy, Needle.standard) else "variant": needle.value}
    # Numbers that could not be read are told above, and have no value to look at.
    problems += _wrong(
        run,
        text or [],
        text_key,
        grid if needle and places else None,
        cells if recall and all(cells.values()) else None,
    )
    if problems:
        raise ConfigError(_by_option(problems), "evaluate")
    asked = Asked(include, shots, limit, context, too_long and too_long.value)
    questions, opened, found, damaged = [], None, {}, []
    with gather(problems):
        questions = prepare([one.value for one in suite or []], names, asked)
    from linnet.runs.model import damage_told  # with torch, which takes seconds

    with gather(problems), damage_told(damaged.append):
        opened = open_run(run, device.value, dtype.value, as_json, needs_text=speaks)
    if opened is not None:
        window = window or opened.training_length or 1024
        if stride is not None and stride >= window:
            problems.append(f"--stride: is {stride}, but a window has {window} tokens; give a smaller one")
        for one in questions:
            with gather(problems):
                context_of(opened, one, asked)
        with gather(problems):
            if needle:
                check_needles(opened, grid)
        with gather(problems):
            if recall:
                check_cells(opened, cells)
    if problems:
        raise ConfigError(_by_option(problems), "evaluate")
    warn_unkept(opened)
    _note_run(opened, damaged, bool(text))

    def done(kind: str, evaluation) -> None:  # at once, so that what comes next may fail
        found[kind] = evaluation
        keep(opened, evaluation)

    if text:
        done("text", score_texts(opened, text, text_key, method.value, window, stride))
    if needle:
        done("needle", find_needles(opened, grid))
    if recall:
        done("recall", ask_recall(opened, cells))
    for one in questions:
        done(one.kind, ask(opened, one, asked))
    if as_json:
        print_json(found)


def _note_run(opened, damaged: list[str], text: bool) -> None:
    """Says which step the scores are of where that is not the last, and what the first tokens of texts suffer from."""
    from rich.console import Console
    from rich.markup import escape

    errors = Console(stderr=True, soft_wrap=True)
    for line in damaged:
        errors.print(f"[yellow]{escape(line)}[/]", highlight=False)
    if damaged and not opened.quiet:
        name, step = escape(opened.about["run"]), opened.about["step"]
        told = f"{name}: scores of step {step:,}; its newer checkpoints are damaged"
        Console(soft_wrap=True).print(told, highlight=False)
    if text and opened.about["documents"] == 1:
        message = "trained on a single document, so it never read the token that begins each text here"
        errors.print(f"[bold yellow]note[/] {message}: the first tokens of a text may score badly", highlight=False)


def _wrong(run: Path | None, text: list[str], text_key: str, grid: dict | None, cells: dict | None) -> list[str]:
    """What is wrong with the run, texts, needles and recall, as far as it shows before a model is there."""
    from linnet.config import parse
    from linnet.data.sources import find_files, read_documents
    from linnet.evaluate import recall
    from linnet.evaluate.needle import NeedleConfig
    from linnet.runs import RunFolder

    problems: list[str] = []
    with gather(problems):
        if run is not None:
            RunFolder.open(run)
    if text:
        wrong: list[str] = []
        files = find_files(text, "--text", wrong, [])
        documents = sum(1 for file in files for _ in read_documents(file, text_key, wrong))
        problems += wrong if wrong or documents else [f"--text: {', '.join(map(repr, text))} hold no text; name others"]
    with gather(problems):
        if grid is not None:
            parse(NeedleConfig, grid)
    with gather(problems):
        if cells is not None:
            list(recall.cells(parse(recall.RecallConfig, cells)))
    if grid and grid["haystack"] and not Path(grid["haystack"]).is_file():
        problems.append(f"--haystack: {grid['haystack']!r} is no file; give one with text")
    return problems


def _by_option(problems: list[str]) -> list[str]:
    """Problems of keys, and of items of theirs, under the names of the options that set them."""
    known, told = {"device", *(name for names in OPTIONS.values() for name in names)}, []
    for line in problems:
        place, colon, rest = line.partition(":")
        key = place.partition(".")[0]
        told.append(f"{_option(key)}{colon}{rest}" if key in known else line)
    return told


def _is_given(typed: typer.Context, name: str) -> bool:
    source = typed.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _option(name: str) -> str:
    return {"as_json": "--json"}.get(name, f"--{name.replace('_', '-')}")


def _idle(given: set[str], method: Method, needle: Needle | None) -> list[str]:
    """What is wrong with options that would change nothing: of what is not asked, and of a way not taken."""
    asked, found = {_option(name) for name in given}, []
    for askers, names in OPTIONS.items():
        if not asked & set(askers):
            needed = " or ".join(askers)
            found.append((names, f"says how {needed} asks; give {needed} too, or leave it out"))
    if method is Method.carried:
        found.append((("window", "stride"), "belongs to windows; leave it out, or give --method windowed"))
    if needle is Needle.words:
        found.append((("haystack", "digits"), "--needle words asks for words of a list; leave it out"))
    return [f"{_option(name)}: {message}" for names, message in found for name in names if name in given]
