"""`linnet sample`: images from a trained denoiser."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from linnet.config import checking, gather, nearest, refuse, unwritable
from linnet.options import AllowPlugins, by_option, echo_json, options

if TYPE_CHECKING:
    import numpy as np

    from linnet.vision.sampler import ImageSampler, SampleConfig

RECORD, GRID, LATENTS = "samples.json", "grid.png", "latents.npz"
MOST_COLUMNS = 16  # of the grid


@options
def sample(
    run: Path,
    *,
    classes: str | None = None,
    count: int = 64,
    sampler: Literal["ddim", "ddpm"] = "ddim",
    steps: int | None = None,
    guidance: float | None = None,
    guidance_channels: int | None = None,
    seed: int = 0,
    first: int = 0,
    out: Path | None = None,
    weights: Literal["average", "raw"] | None = None,
    batch: int = 64,
    autoencoder: str | None = None,
    device: str = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
    compile: bool = False,
    allow_plugins: AllowPlugins = False,
    json_: bool = False,
) -> None:
    """Draw images from a denoiser: one PNG file per image, a grid of them, and a record.

    A model of latents writes latents.npz instead, unless an autoencoder decodes them.

    [bold]linnet sample RUN --classes 0-9 --count 64 --guidance 2[/]
    [bold]linnet sample RUN --sampler ddpm --steps 250 --seed 1 --out samples[/]

    Args:
        run: The run folder of a denoiser.
        classes: Numbers, ranges or names of classes: 0-9, or 3,5,cat. They take turns (default: all).
        count: Number of images.
        sampler: ddim: no randomness after the first noise. ddpm: noise in each step.
        steps: Steps of the sampler, at most 1000 (default: 50 for ddim, 250 for ddpm).
        guidance: Above 1, images are pushed towards their class; 1 asks for the class alone (default: 1.5; 1 if the
            model was trained with class_drop: 0).
        guidance_channels: Channels that guidance changes; 3 gives DiT's published numbers (default: all).
        seed: Sample i is a function of the seed and i.
        first: Index of the first sample, to add to an earlier call.
        out: A new or empty folder for the images (default: RUN/samples).
        weights: The moving average of the weights, or the last ones (default: average, if any).
        batch: Images per forward pass; it does not change them.
        autoencoder: Folder of the AutoencoderKL of diffusers that encoded the latents: config.json and safetensors.
        device: auto (the GPU if there is one), cpu or cuda.
        dtype: Number format of products.
        compile: Compile the network first, up to a minute for each size of a batch; pays off where drawing takes
            minutes.
        json_: Print the record of the samples as JSON.
    """
    import json
    import time

    from linnet import provenance, trust
    from linnet.data.images.decode import check_png
    from linnet.runs import RunFolder
    from linnet.runs.files import check_empty, new_folder, write_atomic
    from linnet.runs.model import read_config
    from linnet.train.device import choose
    from linnet.vision.evaluate import read_classes
    from linnet.vision.latents import find_decoder, sources_of
    from linnet.vision.sampler import ImageSampler, latent_scale, read_settings, spread

    problems: list[str] = []
    config: Any = None
    with gather(problems):
        folder = RunFolder.open(run)
        trust.check_plugins(folder.config, folder.path / "config.yaml", allow_plugins)
        config = read_config(folder, allow_plugins, ("denoiser",))
    with gather(problems):
        device = choose(device)
    for name, value, least in (("count", count, 1), ("batch", batch, 1), ("first", first, 0)):
        if value < least:
            problems.append(f"--{name}: {value} is below {least}; give {least} or more")
    out = out or run / "samples"
    with gather(problems):
        check_empty(out, "sample")
        if reason := unwritable(out):
            problems.append(f"--out {out}: {reason}; name another folder")
    options = {"sampler": sampler, "steps": steps, "seed": seed, "guidance_channels": guidance_channels}
    if guidance is None:
        guidance = 1.0 if config is not None and not config.class_drop else 1.5
    wrong: list[str] = []
    settings = read_settings(options | {"guidance": guidance}, wrong)
    chosen: list[int] = []
    names: list[str] | None = None
    if config is not None:
        with gather(problems):
            names = read_classes(folder.path, config.classes)
        chosen = read_class_list(classes, config.classes, names, problems)
        wrong += settings.problems(config, chosen)
        latents = latent_scale(folder.config) is not None
        decoder = find_decoder(autoencoder, latents, config, wrong)
        if not latents or decoder is not None:
            with gather(problems):
                check_png()
    problems += map(by_option((*type(settings).model_fields, "classes", "autoencoder")), wrong)
    refuse(problems, "sample")

    drawer = ImageSampler.of_run(run, device, dtype, weights=weights, allow_plugins=allow_plugins, compile=compile)
    if decoder is not None:
        with checking("sample", by_option(["autoencoder"])):
            drawer.autoencoder = decoder.open(drawer.device, sources_of(folder))
    asked = spread(chosen, first + count)[first:]
    began = time.perf_counter()
    with new_folder(out, "sample") as unfinished:
        files, images = _draw(drawer, asked, settings, first, batch, unfinished, json_)
        seconds = time.perf_counter() - began
        record = {
            "run": str(folder.path),
            "step": drawer.step,
            "weights": weights or ("average" if folder.config.get("average") else "raw"),
            "settings": settings.model_dump() | {"steps": settings.number_of_steps},
            "precision": dtype,
            "compiled": compile,
            **({} if drawer.autoencoder is None else {"autoencoder": drawer.autoencoder.digest}),
            "classes": names or [str(number) for number in range(config.classes)],
            "samples": [
                {"index": first + number, "class": label, **({"file": files[number]} if files else {})}
                for number, label in enumerate(asked)
            ],
            "seconds": seconds,
            "images_per_second": count / seconds,
            **provenance.stamp(drawer.device),
        }
        if files:
            from linnet.data.images.decode import encode_png, picture_grid

            columns = len(chosen) if len(chosen) <= MOST_COLUMNS else 8
            if images.shape[1] in (1, 3):
                write_atomic(unfinished / GRID, encode_png(picture_grid(images, min(columns, count))))
        write_atomic(unfinished / RECORD, json.dumps(record, indent=1) + "\n")
    if json_:
        echo_json(record)
    else:
        typer.echo(f"{count} images in {out} ({count / seconds:.1f} per second)", err=True)
        typer.echo(out / (GRID if files else LATENTS))


def _draw(
    drawer: "ImageSampler",
    asked: list[int],
    settings: "SampleConfig",
    first: int,
    batch: int,
    out: Path,
    quiet: bool,
) -> "tuple[list[str], np.ndarray]":
    """Draws and writes the samples; returns the names of PNG files ([] for latents), and the first images."""
    import numpy as np
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from linnet.data.images.decode import encode_png
    from linnet.runs.files import naming

    files: list[str] = []
    kept: list[np.ndarray] = []
    columns = (TextColumn("steps"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as shown:
        task = shown.add_task("steps", total=None)

        def show(done: int, total: int) -> None:
            shown.update(task, completed=done, total=total)

        for images in drawer.draw(asked, settings, first=first, batch=batch, show=show):
            values = images.cpu().numpy()
            if values.dtype != np.uint8 or values.shape[1] not in (1, 3):
                kept.append(values if values.dtype == np.uint8 else values.astype(np.float16))
                continue
            for image in values:
                number = len(files)
                files.append(f"{first + number:06d}-class{asked[number]}.png")
                with naming(out / files[-1]):
                    (out / files[-1]).write_bytes(encode_png(image))
            kept.append(values)
    whole = np.concatenate(kept)
    if not files:
        with naming(out / LATENTS):
            np.savez(out / LATENTS, images=whole, labels=np.asarray(asked, dtype=np.int64))
    return files, whole


def read_class_list(given: str | None, count: int, names: list[str] | None, problems: list[str]) -> list[int]:
    """Returns the classes that a user names: numbers, ranges and names with commas; None is all.

    Where all names are numbers of their own (class folders `0` to `11` are sorted as words), numbers are names.

    Args:
        count: number of classes of the model. names: of the classes, if they are known.
        problems: gets every part that is not a class.
    """

    if given is None:
        return list(range(count))
    indices: list[int] = []
    named = names is not None and all(map(str.isdecimal, names)) and names != list(map(str, range(count)))
    for part in given.split(","):
        word = part.strip()
        ends = [end.strip() for end in word.split("-")]
        between = len(ends) == 2 and all(map(str.isdecimal, ends)) and int(ends[0]) <= int(ends[1])
        if names is not None and word in names and (named or not word.isdecimal()):
            indices.append(names.index(word))
        elif named and names is not None and between and set(ends) <= set(names):
            inside = [name for name in names if int(ends[0]) <= int(name) <= int(ends[1])]
            indices += [names.index(name) for name in sorted(inside, key=int)]
        elif word.isdecimal() and not named:
            indices.append(int(word))
        elif between and int(ends[1]) < 10 * count + 10 and not named:
            indices += range(int(ends[0]), int(ends[1]) + 1)
        else:
            known = f"; {nearest(word, names)}" if names is not None and word else ""
            problems.append(f"--classes: {word!r} is neither a number, a range such as 0-9, nor a class{known}")
    return indices or list(range(count))
