"""`linnet evaluate images` and `linnet evaluate samples`."""

from pathlib import Path
from typing import Literal

import typer

from linnet.cli.evaluate import Running, run_evaluators
from linnet.options import Count, options


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
    from linnet.vision.evaluate.data import ImageEvaluator

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
    given = {"sampler": sampler, "steps": steps, "guidance": guidance, "seed": seed}
    settings = read_settings(given | {"guidance_channels": guidance_channels}, problems)
    where = {"cache": cache, "allow_plugins": running.allow_plugins, "autoencoder": autoencoder}
    chosen = {"extractor": extractor, "classifier": classifier, "count": samples, "batch": batch}
    evaluator = SampleEvaluator(settings=settings, **chosen, **where)
    run_evaluators(typed, run, [evaluator], problems, running)
