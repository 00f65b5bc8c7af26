"""`linnet evaluate images` and `linnet evaluate samples`."""

from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.markup import escape

from linnet.cli.evaluate import Running, run_evaluators
from linnet.evaluate.results import Evaluation
from linnet.options import BOLD, WIDE, Count, make_table, options


@options
def images(
    typed: typer.Context,
    run: Path,
    *,
    data: list[str] | None = None,
    split: Literal["train", "validation", "test"] | None = None,
    batch: Count = 256,
    cache: Path = Path("runs/cache"),
    running: Running,
) -> None:
    """Score an image classifier: accuracy with intervals, likelihood, calibration, confusions, worst mistakes.

    [bold]linnet evaluate images RUN[/]
    [bold]linnet evaluate images RUN --data cifar10/test.parquet[/]

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        data (SOURCE): Labelled images: class folders, Parquet, tar, IDX, npz, or [bold]digits[/]; may be given again
            (default: the held-out images of the training).
        split: Which part of --data, if it has parts (default: test, or else validation).
        batch: Images per forward pass.
        cache: Folder of prepared images.
    """
    from linnet.vision.evaluate import ImageEvaluator

    run_evaluators(typed, run, [ImageEvaluator(data=data or (), split=split, batch=batch, cache=cache)], [], running)


@options
def samples(
    typed: typer.Context,
    run: Path,
    *,
    extractor: str,
    samples: int = 1000,
    classifier: str | None = None,
    sampler: Literal["ddim", "ddpm"] = "ddim",
    steps: int | None = None,
    guidance: float = 1.0,
    guidance_channels: int | None = None,
    seed: int = 0,
    batch: Count = 64,
    autoencoder: str | None = None,
    cache: Path = Path("runs/cache"),
    running: Running,
) -> None:
    """Compare samples of a denoiser with real images: Fréchet and kernel distance, asked class, memorised images.

    [bold]linnet evaluate samples RUN --extractor runs/vit-1a2b3c4d5e6f --samples 1000 --guidance 2[/]
    [bold]linnet evaluate samples RUN --extractor efficientnet-lite0 --samples 10000[/]

    Args:
        run (RUN): The run folder of a denoiser.
        extractor: Network whose features are compared: the run of a classifier, [bold]efficientnet-lite0[/], or a file
            of its weights or of Inception's. Its name is part of the distance's name.
        samples: Images to draw; classes take turns.
        classifier: Run of a classifier that says which class a sample has (default: the extractor, if it has the same
            classes).
        sampler: As in [bold]linnet sample[/].
        steps: Steps of the sampler (default: 50 for ddim, 250 for ddpm).
        guidance: As in [bold]linnet sample[/].
        guidance_channels: As in [bold]linnet sample[/] (default: all).
        seed: Sample i is a function of the seed and i.
        batch: Images per forward pass.
        autoencoder: Folder of the AutoencoderKL of diffusers that encoded the latents of the training; samples are then
            compared with the encoded images.
        cache: Folder of prepared images and their features.
    """
    from linnet.vision.evaluate.samples import SampleEvaluator
    from linnet.vision.sampler import read_settings

    problems: list[str] = []
    options = {"sampler": sampler, "steps": steps, "guidance": guidance, "seed": seed}
    settings = read_settings(options | {"guidance_channels": guidance_channels}, problems)
    where = {"cache": cache, "allow_plugins": running.allow_plugins, "autoencoder": autoencoder}
    chosen = {"extractor": extractor, "classifier": classifier, "count": samples, "batch": batch}
    evaluator = SampleEvaluator(settings=settings, **chosen, **where)
    run_evaluators(typed, run, [evaluator], problems, running)


def show_images(record: Evaluation, path: Path) -> None:
    console, detail = Console(), record.detail
    values = {result.metric: result.value for result in record.results}
    speed = f"{detail['images_per_second']:,.0f} images per second"
    console.print(f"{record.model['run']}: {detail['images']:,} images, {speed}", highlight=False, markup=False)
    table = make_table(style=WIDE | {"show_header": False})
    chances = {metric: value for _, metric, value in detail["chance"]}
    for metric, name in (("accuracy", "accuracy"), ("top5_accuracy", "top-5 accuracy")):
        if metric in values:
            low, high = detail["wilson"][metric]
            interval = f"95 % interval {low:.2%} to {high:.2%}; guessing: {chances[metric]:.2%}"
            table.add_row(name, f"{values[metric]:.2%}", interval)
    table.add_row("loss", f"{values['nll']:.4f}", "nats per image")
    table.add_row(
        "calibration error", f"{values['calibration_error']:.4f}", f"{len(detail['bins'])} bins of confidence"
    )
    console.print(table)
    wrong = sorted((row for row in detail["confusions"] if row[0] != row[1]), key=lambda row: -row[2])
    if wrong:
        most = make_table("label", "predicted", "#images", style=BOLD)
        for label, predicted, count in wrong[:5]:
            most.add_row(escape(detail["classes"][label]), escape(detail["classes"][predicted]), f"{count:,}")
        console.print(most)
    console.print(f"mistakes, confusions and calibration as a page: linnet report {escape(str(path))}", soft_wrap=True,
                  style="dim")  # fmt: skip


def show_samples(record: Evaluation, path: Path) -> None:
    console, detail, settings = Console(soft_wrap=True), record.detail, record.asked
    speed = f"{detail['samples_per_second']:,.1f} per second"
    drawn = f"{settings['sampler']}, {settings['steps']} steps, guidance {settings['guidance']:g}"
    console.print(
        f"{record.model['run']}: {settings['samples']:,} samples ({drawn}; {speed})", highlight=False, markup=False
    )
    table = make_table(style=WIDE | {"show_header": False})
    distance, kernel = record.results[:2]
    real = detail["real"]
    floor = f"to {real['images']:,} training images (held-out images: {real[distance.metric]:.3f})"
    table.add_row(escape(distance.metric), f"{distance.value:.3f}", floor)
    table.add_row(escape(kernel.metric), f"{kernel.value:.5f}", f"standard error {detail['kernel_error']:.5f}")
    values = {result.metric: result.value for result in record.results}
    if "asked_class" in values:
        low, high = detail["wilson"]
        interval = f"95 % interval {low:.1%} to {high:.1%}"
        table.add_row("asked class", f"{values['asked_class']:.1%}", interval)
    near = "nearer to training images than held-out images are (50 %: equally near)"
    table.add_row("memorised", f"{values['memorised']:.1%}", near)
    if "precision" in values:
        table.add_row("precision", f"{values['precision']:.1%}", "samples that lie among training images")
        table.add_row("recall", f"{values['recall']:.1%}", "training images that lie among samples")
    console.print(table)
    console.print(f"samples as a page: linnet report {escape(str(path))}", soft_wrap=True, style="dim")
