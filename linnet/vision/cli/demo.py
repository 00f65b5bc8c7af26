"""`linnet demo --vision`: trains small image models on digits, scores them, and writes a page about them.

Processes train the models in parallel, one thread each. vision.yaml in this folder holds models and settings.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from linnet.config import FIGURES, Config, check_study, not_installed, parse, parse_yaml, refuse
from linnet.options import BOLD, make_table

PLAN = "vision.yaml"
CACHE = "cache"
DENOISER = "denoiser"
COLUMNS, GUIDANCE, ZOOM = 12, 2.0, 5  # samples per digit; strength of the class; screen pixels per pixel


class Plan(Config):
    """Content of the plan.

    Attributes:
        models: settings of `linnet train` that one classifier has alone, by its name.
        train: settings that all classifiers share.
        denoiser: settings of the denoiser whose samples the page shows; None trains none.
    """

    models: dict[str, dict[str, Any]]
    train: dict[str, Any]
    denoiser: dict[str, Any] | None = None


def run_demo(folder: Path, workers: int | None = None) -> Path:
    """Trains and scores the models in `folder`, prints a table, and returns the page.

    Models that are trained already are reused.

    Args:
        folder: folder of the models and the page.
        workers: trainings at the same time; None is one per core, at most one per model.

    Raises:
        ConfigError: the folder is a run, or scikit-learn, which has the digits, or the extra `study` is not installed.
    """
    from time import perf_counter

    from linnet.cli.evaluate.demo import worker_pool

    _check(folder)
    started, console = perf_counter(), Console(highlight=False, soft_wrap=True)
    plan = read_plan()
    names = [*([DENOISER] if plan.denoiser else []), *plan.models]  # the longest training first
    workers = min(workers or os.cpu_count() or 1, len(names))
    console.print(f"{', '.join(plan.models)} learn to read digits (in {folder}):", markup=False)
    jobs = ([str(folder)] * len(names), names, [plan.model_dump()] * len(names))
    if workers == 1:
        made = list(map(make, *jobs))
    else:
        with worker_pool(workers) as pool:
            made = list(pool.map(make, *jobs))
    runs = dict(zip(names, map(Path, made), strict=True))
    denoiser = runs.pop(DENOISER, None)
    page = _write(folder, runs, denoiser)
    _show(runs, console)
    console.print(str(page), markup=False)
    console.print(f"{perf_counter() - started:.0f} s. One model: linnet report {shlex.quote(str(runs[names[-1]]))}",
                  style="dim", markup=False)  # fmt: skip
    return page


def read_plan() -> Plan:
    """Reads the plan of the package."""
    from importlib.resources import files

    return parse(Plan, parse_yaml(files("linnet.vision.cli").joinpath(PLAN).read_text(encoding="utf-8")), PLAN)


def make(folder: str, name: str, plan: dict[str, Any]) -> str:
    """Trains one model, scores it on the held-out images, and returns its folder."""
    from linnet.cli.evaluate.demo import announced
    from linnet.evaluate.session import prepare
    from linnet.train import train
    from linnet.train.objectives import read_training
    from linnet.train.optimizer import short_plan
    from linnet.vision.evaluate import ImageEvaluator

    root = Path(folder)
    training = plan["denoiser"] if name == DENOISER else {**plan["train"], **plan["models"][name]}
    config = read_training(short_plan({**training, "name": name}), f"{PLAN}: {name}")
    length = f"{config.epochs:g} epochs" if config.epochs is not None else f"{config.total_steps:,} steps"
    with announced(f"{name}: {length}") as results:
        run = train(config, root, root / CACHE)
        if name == DENOISER:
            results.append(f"squared error of the noise {run.result()['mse']:.4f}")
            return str(run.path)
        results.append(f"accuracy {run.result()['accuracy']:.2%}")
    evaluator = ImageEvaluator(cache=root / CACHE)
    evaluator.run(prepare(run.path, [evaluator])).save(run.path)
    return str(run.path)


def _check(folder: Path) -> None:
    problems = []
    if (folder / "config.yaml").exists():
        problems.append(f"--out: {folder} is a run folder; the demo trains models of its own, name another folder")
    if not_installed(["sklearn"]):
        problems.append("sklearn: not installed; it has the digits; install it: pip install scikit-learn")
    refuse(problems, "demo")
    check_study(FIGURES, "demo")


def _samples(run: Path) -> tuple[str, str, bytes]:
    """Returns heading, caption and PNG of samples: one row per class."""
    import torch

    from linnet.data.images.decode import encode_png, picture_grid
    from linnet.vision.sampler import ImageSampler, SampleConfig

    classes = [number for number in range(10) for _ in range(COLUMNS)]
    with torch.no_grad():
        images = torch.cat(list(ImageSampler.of_run(run).draw(classes, SampleConfig(guidance=GUIDANCE))))
    picture = picture_grid(images.numpy(), COLUMNS).repeat(ZOOM, axis=1).repeat(ZOOM, axis=2)
    caption = f"Drawn by a small denoiser of the same layers, one row per digit, guidance {GUIDANCE:g}."
    return "Samples", caption, encode_png(picture)


def _write(folder: Path, runs: dict[str, Path], denoiser: Path | None) -> Path:
    """Writes the page of each model, and the page of all."""
    from linnet.report.shell import typed
    from linnet.vision.report import write_classifier, write_classifiers

    pages = {name: write_classifier(run) for name, run in runs.items()}
    command = typed("linnet", "demo", "--vision", out=None if folder.parent == Path("runs") else folder.parent)
    return write_classifiers(
        runs,
        folder / "report" / "index.html",
        title="Three image classifiers on digits",
        command=command,
        pages=pages,
        pictures=[] if denoiser is None else [_samples(denoiser)],
    )


def _show(runs: dict[str, Path], console: Console) -> None:
    from linnet.report import units
    from linnet.vision.report import read_classifier

    columns = ("model", "#parameters", "#accuracy", "#95 % interval", "#loss", "#images/s in training")
    table = make_table(*columns, style=BOLD)
    for name, run in runs.items():
        model = read_classifier(run)
        assert model.record is not None
        values = {result.metric: result.value for result in model.record.results}
        low, high = model.record.detail["wilson"]["accuracy"]
        cells = (units.count(model.result["params_total"]), f"{values['accuracy']:.2%}", f"{low:.1%} to {high:.1%}")
        table.add_row(name, *cells, f"{values['nll']:.4f}", f"{model.result['images_per_second']:,.0f}")
    console.print(table)
