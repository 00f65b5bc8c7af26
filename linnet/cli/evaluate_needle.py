"""The part of `linnet evaluate` that looks for needles in haystacks: --needle."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.cli.evaluate_run import Opened, progress


def find_needles(opened: Opened, asked: dict):
    """Asks for needles at all lengths and depths, prints the grid, and gives the record.

    Args:
        asked: values of `NeedleConfig`.
    """
    from linnet.config import parse
    from linnet.evaluate.needle import NeedleConfig, run_needle
    from linnet.evaluate.needle_scores import needle_scores, sensitivity
    from linnet.evaluate.results import Evaluation, Item, Result

    config = parse(NeedleConfig, asked, "needle")
    engine = opened.engine(max(config.lengths) + 128)
    with progress(opened, "prompts", len(config.lengths) * len(config.depths) * config.samples) as advance:
        grid = run_needle(engine, config, advance)
    scores = needle_scores(grid)
    if not opened.quiet:
        _show(grid, config, scores)
        Console().print(f"the grid as a page: linnet compare {escape(str(opened.path))}", soft_wrap=True, style="dim")
    cells = [
        Item(f"{length} tokens, depth {depth:g}", grid[row, column].item())
        for column, length in enumerate(config.lengths)
        for row, depth in enumerate(config.depths)
    ]
    task = f"needle-{config.variant if config.variant != 'single' else config.mode}"
    results = (
        Result.of_items(task, "accuracy", cells),
        Result(task, "weighted", scores.weighted, n=len(cells)),
        Result(task, "niah_score", scores.score, n=len(cells)),
    )
    detail = {"config": config.model_dump(), "accuracy": grid.tolist(), **scores.to_dict()}
    detail |= {"sensitivity": sensitivity(grid)}
    return Evaluation("needle", opened.about, config.model_dump() | {"precision": opened.precision}, results, detail)


def check_needles(opened: Opened, asked: dict) -> None:
    """Raises ConfigError where needle and question do not fit into the shortest prompt: before all else is asked."""
    from linnet.config import parse
    from linnet.evaluate.needle import NeedleConfig, items

    config = parse(NeedleConfig, asked, "needle")
    next(items(config.model_copy(update={"lengths": config.lengths[:1], "samples": 1}), opened.tokenizer))


def parse_numbers(key: str, text: str, problems: list[str]) -> list[int]:
    """Numbers given as FROM:TO:HOW MANY (evenly spaced) or with commas."""
    try:
        if ":" in text:
            first, last, count = map(int, text.split(":"))
            step = (last - first) / max(count - 1, 1)
            found = [round(first + i * step) for i in range(count)]
        else:
            found = [int(part) for part in text.split(",")]
        if found and min(found) > 0 and found == sorted(set(found)):
            return found
    except ValueError:
        pass
    usual = "4,8,16" if key == "pairs" else "1024:16384:35"
    problems.append(f"--{key}: {text!r} is not FROM:TO:HOW MANY or ascending numbers above 0 with commas; give {usual}")
    return []


def _show(grid, config, scores) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("tokens", "at this length", "up to it", "penalty", "from the first depth to the last"):
        table.add_column(column, justify="left" if column.startswith("from") else "right")
    for i, length in enumerate(config.lengths):
        cells = "".join(" ░▒▓█"[round(4 * share)] for share in grid[:, i])
        numbers = (scores.at_length[i], scores.up_to_length[i], scores.penalties[i])
        table.add_row(f"{length:,}", *(f"{value:.3f}" for value in numbers), cells)
    console.print(table)
    console.print(f"accuracy {grid.mean():.4f}, weighted {scores.weighted:.4f}, NIAH score {scores.score:.4f}")
