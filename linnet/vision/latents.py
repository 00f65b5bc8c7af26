"""Latents: images that an AutoencoderKL of diffusers encodes once, and the decoding of samples.

`encode_images` writes a folder of parts (`train-00000.npz`, ...) and latents.json, which names the autoencoder by its
digest, its scaling factor, and the images. `data: {source: FOLDER, kind: latents}` trains on it. Latents are stored as
the encoder draws them, less its `shift_factor`; a training multiplies them by `latent_scale`.

The autoencoder is a local folder of config.json and safetensors. No code and no pickle of it is read.
"""

import contextlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet.config import ConfigError, Problem, checking, digest, gather, load_json, parse, shown, unwritable
from linnet.data.images import ImageDataConfig
from linnet.data.images.sources import LATENTS, about_latents
from linnet.data.parts import locked, remove_halves, whole_file, write_json
from linnet.data.sources import may_be_left
from linnet.inference.prefix import weights_digest
from linnet.install import install_command
from linnet.models.patches import whole_side
from linnet.runs import RunFolder
from linnet.vision.config import DenoiserConfig
from linnet.vision.data import ImageCorpus, prepare_images
from linnet.vision.models.diffusion import NoiseStream, from_pixels, to_pixels

FORMAT = 1  # increase it when the same inputs give other latents
ROWS = 4096  # latents per part
DECODED = 8  # images that are decoded at a time: 0.6 GB each at 256 x 256
SCALE = 0.18215  # of an AutoencoderKL that does not say its own
MIRRORED = "train-mirrored"  # the name of parts
WEIGHTS = "diffusion_pytorch_model*.safetensors"
KINDS = {1: "grey", 3: "rgb"}


@dataclass(frozen=True)
class AutoencoderFolder:
    """An autoencoder that is not loaded yet.

    Attributes:
        values: config.json.
        images, channels: channels of images and of latents.
        factor: side of an image over the side of its latent.
    """

    path: Path
    values: dict[str, Any]
    images: int
    channels: int
    factor: int

    def open(self, device: torch.device, sources: Sequence[str] = ()) -> "Autoencoder":
        """Loads it.

        Args:
            sources: of the latents of a training; those of `encode_images` must be of this autoencoder.

        Raises:
            ConfigError: weights that are missing or damaged, or that are not those of the latents.
        """
        from diffusers import AutoencoderKL

        where = f"autoencoder: {self.path}"
        settings = {"use_safetensors": True, "local_files_only": True, "low_cpu_mem_usage": False}
        try:
            model, about = AutoencoderKL.from_pretrained(str(self.path), output_loading_info=True, **settings)
            if absent := about["missing_keys"]:
                raise ValueError(f"it lacks {len(absent)} weights, such as {sorted(absent)[0]}")
        except Exception as error:  # of diffusers, safetensors or torch, whose types differ between releases
            line = " ".join(str(error).split())[:200]
            raise ConfigError([f"{where}: cannot be loaded ({line}); copy the folder again"], "latents") from None
        kept = {key: value for key, value in self.values.items() if not key.startswith("_")}
        made = digest([kept, weights_digest(model)])
        for source in sources:
            if (about := about_latents(Path(source))) and about["autoencoder"] != made:
                message = f"{where} has the digest {made}, and {source} was encoded by {about['autoencoder']}"
                raise ConfigError([f"{message}; name the autoencoder that encoded the latents"], "latents")
        return Autoencoder(model.eval().requires_grad_(False).to(device), made, self.values.get("shift_factor") or 0.0)


def find_autoencoder(folder: str | Path) -> AutoencoderFolder:
    """Finds the autoencoder that a user names, without loading its weights.

    Args:
        folder: one that diffusers' `AutoencoderKL.save_pretrained` wrote.

    Raises:
        ConfigError: diffusers is missing, the folder has no AutoencoderKL, or its weights are pickles.
    """
    path, values = Path(folder).expanduser(), None
    with checking("latents", lambda line: Problem(f"autoencoder: {line}")) as problems:
        if importlib.util.find_spec("diffusers") is None:
            problems.append(f"needs diffusers, which is not installed; install it: {install_command('diffusers')}")
        fix = "name the folder of an AutoencoderKL of diffusers, with config.json and *.safetensors"
        if not path.is_dir():
            got = "such as hf download stabilityai/sd-vae-ft-ema --local-dir FOLDER makes"
            raise ConfigError(
                [f"{folder}: {'is a file' if path.exists() else 'there is no such folder'}; {fix}, {got}"]
            )
        with contextlib.suppress(OSError, ValueError):
            values = load_json(path / "config.json")
        if (path / "vae" / "config.json").is_file() and not isinstance(values, dict):
            raise ConfigError([f"{folder}: is a pipeline of diffusers; name its autoencoder, {path / 'vae'}"])
        if not isinstance(values, dict):
            raise ConfigError([f"{path}/config.json: is missing or not a JSON object; {fix}"])
        if (kind := values.get("_class_name")) != "AutoencoderKL":
            raise ConfigError([f"{path}/config.json: _class_name: {shown(kind)} is not AutoencoderKL; {fix}"])
        blocks, shift = values.get("block_out_channels", [64]), values.get("shift_factor") or 0.0
        images, channels = values.get("in_channels", 3), values.get("latent_channels", 4)
        scale = values.get("scaling_factor", SCALE)
        for name, right, allowed in (
            ("in_channels", type(images) is int and images in KINDS, "1 or 3"),
            ("latent_channels", type(channels) is int and channels > 0, "a whole number above 0"),
            ("block_out_channels", isinstance(blocks, list) and blocks, "a list of the widths of its blocks"),
            ("scaling_factor", type(scale) in (int, float) and math.isfinite(scale) and scale, "a number other than 0"),
            ("shift_factor", type(shift) in (int, float) and math.isfinite(shift), "a number"),
        ):
            if not right:
                wrong = f"{path}/config.json: {name}: {shown(values[name])} is not {allowed}"
                problems.append(f"{wrong}; copy the folder again, or use another autoencoder")
        problems += [
            f"{path}/config.json: sets {name}, which Linnet does not apply; use an autoencoder without it"
            for name in ("latents_mean", "latents_std", "quantization_config")
            if values.get(name) is not None
        ]
        if not any(path.glob(WEIGHTS)):
            pickles = [*path.glob("*.bin"), *path.glob("*.ckpt"), *path.glob("*.pt")]
            has = f"{pickles[0].name}, a pickle, which may run code and is refused" if pickles else "no weights"
            problems.append(f"{path}: has {has}; give {WEIGHTS}, which save_pretrained of diffusers writes")
    return AutoencoderFolder(path, values, images, channels, 2 ** (len(blocks) - 1))


@dataclass(frozen=True)
class Autoencoder:
    """An AutoencoderKL of diffusers, in float32.

    Attributes:
        digest: of its configuration and weights, 12 hexadecimal digits. shift: subtracted from latents.
    """

    model: Any
    digest: str
    shift: float

    @torch.no_grad()
    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        """Returns latents float32 [n, c, s, s] of uint8 images [n, C, S, S]: the mean plus deviation times noise."""
        drawn = self.model.encode(from_pixels(images)).latent_dist
        return drawn.mean + drawn.std * noise - self.shift

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Returns uint8 images [n, C, S, S] of stored latents [n, c, s, s]."""
        parts = (latents.float() + self.shift).split(DECODED)
        return torch.cat([to_pixels(self.model.decode(part).sample) for part in parts])


def find_decoder(
    folder: str | Path | None, latents: bool, model: DenoiserConfig, problems: list[str]
) -> AutoencoderFolder | None:
    """Finds the autoencoder that decodes the samples of a denoiser; None without one, or with problems.

    Args:
        latents: whether the denoiser was trained on latents.
        problems: receives what is wrong with it, and why it does not fit the denoiser.
    """
    with gather(problems):
        if folder is not None and not latents:
            raise ConfigError([f"autoencoder: {folder} has no effect on a model of pixels; leave it out"])
        decoder = None if folder is None else find_autoencoder(folder)
        if decoder is not None and decoder.channels != model.channels:
            has = f"has latents of {decoder.channels} channels, and the model {model.channels}"
            raise ConfigError([f"autoencoder: {folder} {has}; name the autoencoder that encoded its latents"])
        return decoder
    return None


def sources_of(folder: RunFolder) -> list[str]:
    """Returns `data.source` of a run; [] of a model folder, which does not say it."""
    data = folder.config.get("data")
    return parse(ImageDataConfig, data, f"{folder.path}/config.yaml").source if data else []


def encoded_images(data: ImageDataConfig) -> ImageDataConfig:
    """Returns the images that latents were encoded from. Raises ConfigError for latents of unknown images."""
    about = about_latents(Path(data.source[0])) if len(data.source) == 1 else None
    if about is None:
        message = f"data.source: {', '.join(data.source)} does not name the images of its latents, with which samples"
        raise ConfigError([f"{message} are compared; encode them with linnet data latents into one folder"], "evaluate")
    return parse(ImageDataConfig, about["images"], f"{data.source[0]}/{LATENTS}")


def scale_problems(sources: Sequence[str], scale: float) -> list[str]:
    """Returns where the factor of a training is not that of the autoencoder of its latents."""
    return [
        f"latent_scale: {scale:g} is not {known:g}, the scaling factor of {source}; set latent_scale: {known:g}"
        for source in sources
        if (about := about_latents(Path(source))) and (known := about["scaling_factor"]) != scale
    ]


def encode_images(
    config: ImageDataConfig,
    autoencoder: AutoencoderFolder,
    out: Path,
    cache: Path,
    device: torch.device,
    *,
    flip: bool = False,
    batch: int = 16,
    prepare: Callable[..., ImageCorpus] = prepare_images,
    show: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Encodes a corpus of images into a folder of latents. A stopped call goes on with the first missing part.

    Args:
        config: the images; `size` is a multiple of the autoencoder's factor.
        out: a new folder, or one that the same call began.
        cache: folder of prepared images.
        flip: encode the mirrored training images too.
        batch: images per forward pass; it changes latents by rounding only.
        show: called with the phase, the images done and all images.

    Returns:
        The content of latents.json.

    Raises:
        ConfigError: images that cannot be read or do not divide, or a folder with other content.
    """
    with checking("latents") as problems:
        if config.size is None or config.size % autoencoder.factor:
            why = f"is not a multiple of {autoencoder.factor}, by which {autoencoder.path} shrinks images"
            problems.append(
                f"size: {config.size} {why}; give size: {whole_side(config.size or 256, autoencoder.factor)}"
            )
        if config.kind != "images":
            problems.append(f"kind: {config.kind} is encoded already; leave it out")
        if config.convert not in (None, KINDS[autoencoder.images]):
            problems.append(
                f"convert: {config.convert}, but {autoencoder.path} reads {KINDS[autoencoder.images]}; leave it out"
            )
        if reason := unwritable(out):
            problems.append(f"out: {out}: {reason}; name another folder")
        elif about_latents(out) is None and out.is_dir() and not all(map(may_be_left, out.iterdir())):
            problems.append(f"out: {out} holds other files; name a new folder")
    model = autoencoder.open(device)  # before the images are read, which takes longer
    config = config.model_copy(update={"convert": KINDS[autoencoder.images]})
    corpus = prepare(config, cache)
    side = corpus.side // autoencoder.factor
    splits = {"train": corpus.train, "validation": corpus.validation} | ({MIRRORED: corpus.train} if flip else {})
    parts = {
        f"{name}-{start // ROWS:05d}.npz": (name, range(start, min(start + ROWS, len(split))))
        for name, split in splits.items()
        for start in range(0, len(split), ROWS)
    }
    about = {
        "format": FORMAT,
        "autoencoder": model.digest,
        "scaling_factor": float(autoencoder.values.get("scaling_factor", SCALE)),
        "images": config.model_dump(mode="json"),
        "corpus": corpus.digest,
        "classes": corpus.classes,
        "shape": [autoencoder.channels, side, side],
        "parts": {path: len(numbers) for path, (_, numbers) in parts.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        before = about_latents(out)
        if before not in (None, about):
            what = "latents of other images or of another autoencoder"
            raise ConfigError([f"out: {out} holds {what}; name a new folder"], "latents")
        remove_halves(out)
        write_json(out / LATENTS, about)
        done, total = 0, sum(about["parts"].values())
        for path, (name, numbers) in parts.items():
            split, mirrored, made = splits[name], name == MIRRORED, []
            for start in () if (out / path).is_file() else range(0, len(numbers), batch):
                rows = list(numbers[start : start + batch])
                images, indices = split.images(rows).to(device), split.indices[rows].tolist()
                noise = NoiseStream(int(mirrored), indices, tuple(about["shape"]), device).next()
                made.append(model.encode(images.flip(-1) if mirrored else images, noise).half().cpu())
                show("encoding", done + start + len(rows), total)
            if made and not (values := torch.cat(made)).isfinite().all():
                raise ConfigError([f"{autoencoder.path}: latents are not finite in float16; use another autoencoder"])
            if made:
                with whole_file(out / path) as file:
                    np.savez(file, images=values.numpy(), labels=split.labels(list(numbers)).numpy())
            done += len(numbers)
    return about
