"""`linnet data images` and `linnet data latents`: prepare images for training and show what they hold."""

import functools
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from linnet.cli.data import Bar, prepared
from linnet.config import checking, gather, parse
from linnet.options import AsJson, Count, by_option, echo_json, make_table, options, values_of

CLASSES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class ImageKeys:
    """What is prepared and how: keys of `linnet.vision.data.ImageDataConfig`, which checks them.

    Attributes:
        split: Part to train on, if the source has parts.
        held_out: Part to hold out (default: validation, or else test).
        validation: Held-out images: a source; may be given again.
        validation_fraction: Share of each class to hold out (default: 0.1, if the source has no part for it).
        kind: images or latents.
        image_key: Column or array of the images (default: the usual names).
        label_key: Column or array of the labels (default: the usual names).
        classes: Names of labels 0, 1, ..., with commas (default: those of the source).
        size: Side in pixels: resize and cut out the centre (default: as they are).
        crop: Share of the shorter side that the cut keeps (default: 0.875; 1 for latents).
        convert: grey or rgb (default: as they are).
        store: auto, encoded or pixels.
        skip_damaged: Leave out damaged images.
        max_images: Use this many training images, in random order (default: all).
        seed: Seed of the choice of images; the order of training has its own.
    """

    split: str = "train"
    held_out: str | None = None
    validation: list[str] | None = None
    validation_fraction: float | None = None
    kind: str = "images"
    image_key: str | None = None
    label_key: str | None = None
    classes: str | None = None
    size: int | None = None
    crop: float | None = None
    convert: str | None = None
    store: str = "auto"
    skip_damaged: bool = False
    max_images: int | None = None
    seed: int = 0


@options
def prepare_images(
    source: list[str],
    *,
    out: Path = Path("runs/cache"),
    keys: ImageKeys,
    as_json: AsJson = False,
) -> None:
    """Prepare images for training, once, and show what they hold.

    All images are decoded and checked, and stored on disk with their classes;
    part of them is held out. A second call finds the corpus, checks it, and
    rebuilds it if it is damaged.

    Example: [bold]linnet data images photos --size 64 --convert rgb[/]

    Args:
        source (SOURCE): Folders of classes (root/class/*.png), Parquet, tar shards, IDX files, .npz and .npy arrays,
            folders of these, [bold]hf:NAME:CONFIG:SPLIT[/], or [bold]digits[/] of scikit-learn.
        out: Folder of prepared corpora; each gets a subfolder.
        as_json: Print one JSON object.
    """
    from linnet.vision import data as library

    classes = None if keys.classes is None else keys.classes.split(",")
    with checking("data", by_option(ImageKeys.__annotations__, source="SOURCE")):
        values = {"source": source, **values_of(keys), "classes": classes}
        corpus = prepared(library.prepare_images, parse(library.ImageDataConfig, values, "data"), out)
    summary = _image_summary(corpus)
    if as_json:
        echo_json(summary)
    else:
        _show_images(summary)


@options
def encode_latents(
    source: list[str],
    *,
    autoencoder: str,
    out: Path,
    flip: bool = False,
    batch: Count = 16,
    device: str = "auto",
    cache: Path = Path("runs/cache"),
    keys: ImageKeys,
    as_json: AsJson = False,
) -> None:
    """Encode images into latents, once, for denoisers of latents.

    An AutoencoderKL of diffusers encodes all images, in parts.
    The same call goes on with the first missing part.

    Example: [bold]linnet data latents imagenet --autoencoder sd-vae --size 256 --flip --out imagenet-latents[/]

    Args:
        source (SOURCE): As those of [bold]linnet data images[/].
        autoencoder: Folder of an AutoencoderKL: config.json and safetensors.
        out: A new folder for the latents, to name in [bold]data.source[/] with [bold]kind: latents[/].
        flip: Encode the mirrored training images too.
        batch: Images per forward pass.
        device: auto (the GPU if there is one), cpu or cuda.
        cache: Folder of prepared images.
        as_json: Print latents.json.
    """
    from linnet.train.device import choose
    from linnet.vision import data as library
    from linnet.vision.latents import encode_images, find_autoencoder

    classes = None if keys.classes is None else keys.classes.split(",")
    values = {"crop": 1.0} | {"source": source, **values_of(keys), "classes": classes}
    with checking("data", by_option((*ImageKeys.__annotations__, "autoencoder", "out"), source="SOURCE")) as problems:
        with gather(problems):
            encoder = find_autoencoder(autoencoder)
        with gather(problems):
            place = choose(device)
        config = parse(library.ImageDataConfig, values, "data")
        if not problems:
            more = {"flip": flip, "batch": batch, "prepare": functools.partial(prepared, library.prepare_images)}
            with Bar(Console(stderr=True, soft_wrap=True)) as bar:
                about = encode_images(config, encoder, out, cache, place, show=bar, **more)
    if as_json:
        echo_json(about)
        return
    shape, count = " x ".join(map(str, about["shape"])), sum(about["parts"].values())
    typer.echo(f"{count:,} latents of {shape} (channels x height x width), {len(about['classes']):,} classes\nin {out}")


def _image_summary(corpus) -> dict:
    metadata = corpus.metadata
    counts = {
        name: corpus.split(name).labels(slice(None)).bincount(minlength=len(corpus.classes)).tolist()
        for name in ("train", "validation")
    }
    return {
        "folder": str(corpus.folder),
        "digest": corpus.digest,
        "kind": metadata["kind"],
        "channels": corpus.channels,
        "side": corpus.side,
        "stored": metadata["stored"],
        "bytes": metadata["files"]["images.bin"]["size"],
        "splits": {name: sum(counts[name]) for name in counts},
        "split": metadata["split"],
        "classes": {name: [counts[split][n] for split in counts] for n, name in enumerate(corpus.classes)},
        "mean": corpus.mean,
        "std": corpus.std,
        "copies_left_out": metadata["copies_left_out"],
        "damaged": metadata["damaged"],
        "skipped": metadata["skipped"],
        "skipped_files": metadata["skipped_files"],
    }


def _show_images(summary: dict) -> None:
    console = Console(soft_wrap=True)
    table, classes = make_table("class", *(f"#{name}" for name in summary["splits"])), summary["classes"]
    for name, counts in list(classes.items())[:CLASSES_SHOWN]:
        table.add_row(escape(name), *(f"{count:,}" for count in counts))
    if len(classes) > CLASSES_SHOWN:
        table.add_row(f"... {len(classes) - CLASSES_SHOWN:,} more")
    table.add_row("[bold]all[/]", *(f"{count:,}" for count in summary["splits"].values()))
    console.print(table)
    size = f"{summary['kind']} of {summary['channels']} x {summary['side']} x {summary['side']}"
    console.print(
        f"{size} (channels x height x width), {len(classes):,} classes; stored as {summary['stored']}, "
        f"{summary['bytes']:,} bytes"
    )
    console.print(_IMAGES_HELD_OUT[summary["split"]])
    if summary["mean"]:
        mean, std = (", ".join(f"{value:.4f}" for value in summary[key]) for key in ("mean", "std"))
        console.print(f"training pixels from 0 to 1: mean {mean}; standard deviation {std}", highlight=False)
    if summary["copies_left_out"]:
        console.print(f"{summary['copies_left_out']:,} copies of held-out images are left out of training")
    if summary["skipped"]:
        damaged = f" ({summary['damaged']:,} damaged images)" if summary["damaged"] else ""
        console.print(
            f"{summary['skipped']:,} files skipped{damaged}, for example {escape(summary['skipped_files'][0])}"
        )
    console.print(f"in {escape(summary['folder'])}")


_IMAGES_HELD_OUT = {
    "fraction": "held out: a share of each class, by a hash of the pixels",
    "given": "held out: the images of --validation, or of the source's own part",
}
