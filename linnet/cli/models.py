"""`linnet models`: the recipes, with what each costs."""

import fnmatch
import json
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from linnet.options import RULED, AsJson, Count, make_table, options, working

if TYPE_CHECKING:
    from linnet.models import StackConfig

LADDERS = ("c2-", "c3-", "c4-")  # recipes of long ladders, which the whole list leaves out


@options
def models(
    names: list[str] | None = None,
    *,
    mixer: list[str] | None = None,
    context: Count = 8192,
    as_json: AsJson = False,
    vision: bool = False,
    recount: bool = False,
    flops: Literal["000", "004"] = "000",
) -> None:
    """List the model recipes: shape, parameters, training FLOPs and bytes of state.

    PFLOPs per step are for the batch of paper 000 (480 sequences of 8192
    tokens). "paper" follows the convention of its Table 1 and reproduces its
    Table 7; "exact" sums every matrix product with the real widths, the head
    included. With --flops 004 "paper" follows appendix C.4 of paper 004, with
    embedding and head.

    A run or model folder counts what it holds, also one that [bold]linnet convert[/] made.

    Without names, models of text are listed, and with --vision those of images.
    A name selects among all. The sizes of paper 004, c2-, c3- and c4-, are
    listed by name only.

    Example: [bold]linnet models tnl hgrn2-1b --context 131072[/]

    [bold]linnet models tnl-10m --mixer examples/my_mixer.py:MyMixer[/]

    [bold]linnet models --vision[/]

    Args:
        names: Show only these recipes; a prefix such as tnl, a pattern such as '*-wt103', or a folder.
        mixer (FILE.py:CLASS): Show the model that [bold]linnet train[/] makes of your own mixer; may be given again.
        context: Context length in tokens, for the bytes of state.
        as_json: Print a list of objects in full precision.
        vision: List models of images: classifiers, then denoisers.
        recount: Count from the layers (half a minute for all) instead of reading stored counts.
        flops (000|004): Paper whose convention counts the FLOPs in the column "paper"; for models of text.
    """
    from linnet.config import refuse
    from linnet.models.costs import PAPER_BATCH, PAPER_SEQ_LEN, flops_004
    from linnet.models.recipes import table
    from linnet.models.registry import get_recipe, unknown_recipe

    refuse(
        [
            f"{name}: is a file; name a recipe or a folder. For a training file: linnet train {name} --plan"
            for name in names or []
            if Path(name).is_file()
        ],
        "linnet models",
    )
    folders = [name for name in names or [] if Path(name).is_dir()]
    names = [name for name in names or [] if name not in folders]
    with working("checking the mixer"):
        configs = {name: _model_of(name) for name in folders} | _models_with(mixer or [])
    texts, images = table.names_of(table.TEXT), table.names_of(table.IMAGES)
    known = images if vision else texts + images if names else texts
    wanted = names if names or configs else [""]
    fits = {
        name: [recipe for recipe in known if recipe.startswith(name) or fnmatch.fnmatch(recipe, name)]
        for name in wanted
    }
    refuse([unknown_recipe(name) for name, matches in fits.items() if not matches], "linnet models")
    chosen = [recipe for recipe in known if any(recipe in matches for matches in fits.values())]
    if left_out := [] if names or configs or as_json else [recipe for recipe in chosen if recipe.startswith(LADDERS)]:
        chosen = [recipe for recipe in chosen if recipe not in left_out]
    rows = []
    with working("counting parameters and FLOPs") as show:
        for name in chosen:
            show(name)
            rows.append(table.recipe_summary(name, context, recount))
        for name, config in configs.items():
            show(name)
            rows.append(table.model_summary(name, config, context))
    for row in rows if flops == "004" else ():
        if "pflops_per_step" in row:
            config = configs.get(row["name"]) or get_recipe(row["name"])
            row["pflops_per_step"] = PAPER_BATCH * flops_004(config, PAPER_SEQ_LEN) / 1e15
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if of_text := [row for row in rows if "image_size" not in row]:
        _print_table(of_text, context)
    if left_out:
        print(f"and {len(left_out)} sizes of paper 004: linnet models {' '.join(LADDERS)}")
    if of_images := [row for row in rows if "image_size" in row]:
        _print_images(of_images)


def _model_of(path: str) -> "StackConfig":
    from linnet.models.recipes import table
    from linnet.runs import RunFolder
    from linnet.runs.model import read_config

    return read_config(RunFolder.open(path), kinds=(*table.TEXT, *table.IMAGES))


def _models_with(mixers: list[str]) -> dict[str, "StackConfig"]:
    """Returns the models of `linnet train --mixer` by the names of the mixers, which are checked as there."""
    from linnet.cli.train import SHAPE
    from linnet.config import gather, refuse
    from linnet.layers.base import load_plugin
    from linnet.layers.check import check_mixers
    from linnet.models import family

    models, problems = {}, []
    for spec in mixers:
        with gather(problems):
            name = load_plugin(spec)
            model = family(name)(*SHAPE)
            check_mixers([spec], model.options, model.d_model, model.norm)
            models[name] = model
    refuse(problems, "linnet models")
    return models


def _print_images(rows: list[dict]) -> None:
    from linnet.models.recipes.table import PUBLISHED

    caption = (
        "L layers, d width, h heads, g inner width; image: side / patch in pixels; T tokens; params: all, in "
        "millions; paper: those that are printed; GFLOPs of a forward pass per image, 2 per multiply-add; top-1: "
        "published accuracy in percent on ImageNet, not measured here."
    )
    names = ("#image", "#T", "#params", "#paper", "#GFLOPs", "#top-1")

    def cells(row: dict) -> tuple[str, ...]:
        published = PUBLISHED.get(row["name"])
        return (
            f"{row['image_size']}/{row['patch']}",
            str(row["tokens"]),
            f"{row['params_total'] / 1e6:.2f}",
            "-" if published is None else published.params,
            _number(row["flops_forward"] / 1e9),
            "-" if published is None or published.top1 is None else f"{published.top1:.1f}",
        )

    _print_groups(rows, lambda row: row["kind"], names, cells, caption, padding=0)  # eleven columns in 80 characters


def _print_table(rows: list[dict], context: int) -> None:
    from linnet.report import units

    caption = (
        "L layers, d width, h heads, g GLU width; millions of parameters without embeddings;\n"
        f"PFLOPs per training step of 480 x 8192 tokens; state of one sequence at {context:,} tokens: "
        "recurrent states in float32, keys and values in bfloat16 (float32 on a CPU: twice as much).\n"
        "Sizes in names are nominal: the papers' count the embeddings, -10m is about 5 million."
    )
    names = ("#params M", "#paper", "#exact", "#state")

    def cells(row: dict) -> list[str]:
        numbers = (row["params_non_embedding"] / 1e6, row["pflops_per_step"], row["pflops_per_step_exact"])
        return [*map(_number, numbers), units.size(row["state_bytes"])]

    _print_groups(rows, lambda row: row["name"].partition("-")[0], names, cells, caption, padding=(0, 1, 0, 0))


def _print_groups(
    rows: list[dict],
    group_of: Callable[[dict], str],
    names: Iterable[str],
    cells_of: Callable[[dict], Iterable[str]],
    caption: str,
    padding: int | tuple[int, ...],
) -> None:
    """Prints the names and shapes of models and further cells, with a line between groups of neighbouring rows."""
    style = RULED | {"padding": padding, "caption": caption, "caption_justify": "left"}
    table = make_table("~model", "#L", "#d", "#h", "#g", *names, no_wrap=True, style=style)
    for _, group in groupby(rows, group_of):
        for row in group:
            shape = (row[key] for key in ("num_layers", "d_model", "num_heads", "glu_width"))
            table.add_row(row["name"], *("-" if size is None else str(size) for size in shape), *cells_of(row))
        table.add_section()
    Console().print(table)


def _number(value: float) -> str:
    """Returns a number with one decimal, or with two digits if it is below 0.1."""
    return f"{value:,.1f}" if value >= 0.1 else f"{value:.2g}"
