"""Samples images from a trained denoiser.

sampler = ImageSampler.of_run("runs/lightnet-dit-1a2b3c4d5e6f")
images = torch.cat(list(sampler.draw([0, 1, 2, 3], SampleConfig(guidance=2.0))))   # uint8 [4, C, S, S]
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from linnet.config import Config, ConfigError, gather, parse, refuse
from linnet.ops import compat_torch
from linnet.ops.capture import Captured
from linnet.runs import RunFolder
from linnet.runs.model import Weights, load_checkpoint
from linnet.vision.latents import Autoencoder
from linnet.vision.models import Denoiser
from linnet.vision.models.diffusion import (
    DEFAULT_STEPS,
    STEPS,
    NoiseStream,
    Reverse,
    SamplerName,
    guided,
    sampling_process,
    to_pixels,
)

LATENT_SCALE = 0.18215  # of Stable Diffusion's encoder, which makes latents of about unit variance


class SampleConfig(Config):
    """How images are drawn."""

    sampler: SamplerName = Field("ddim", description="ddim, without noise after the first, or ddpm")
    steps: int | None = Field(
        None, ge=1, le=STEPS, description=f"steps of the sampler, at most {STEPS}; null: 50 for ddim, 250 for ddpm"
    )
    guidance: float = Field(
        1.0, ge=0, le=1e6, description="1: the class alone; above: away from images without a class"
    )
    guidance_channels: int | None = Field(
        None, ge=1, description="channels that guidance changes; null: all. DiT's published numbers need 3 of 4"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="sample i is a function of the seed and i")

    @property
    def number_of_steps(self) -> int:
        return self.steps or DEFAULT_STEPS[self.sampler]

    def problems(self, model: Any, classes: Sequence[int]) -> list[str]:
        """Returns why a denoiser with the configuration `model` cannot draw these classes in this way."""
        problems = []
        unknown = sorted({label for label in classes if not 0 <= label < model.classes})
        if unknown:
            shown = ", ".join(map(str, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            problems.append(f"classes: {shown} is unknown; the model has the classes 0 to {model.classes - 1}")
        if self.guidance != 1.0 and not model.class_drop:
            problems.append(
                f"guidance: {self.guidance:g} needs a model that was trained with class_drop above 0, and this one has "
                "class_drop: 0; use guidance 1"
            )
        if self.guidance_channels is not None and self.guidance_channels > model.channels:
            problems.append(
                f"guidance_channels: {self.guidance_channels} is above the model's {model.channels} channels; use at "
                f"most {model.channels}"
            )
        return problems


def read_settings(values: dict[str, Any], problems: list[str]) -> SampleConfig:
    """Returns settings whose wrong values, reported in `problems`, are left at their defaults.

    So the other ones can still be compared with the model, and one error lists all problems.
    """
    wrong: list[str] = []
    with gather(wrong):
        return parse(SampleConfig, values)
    problems += wrong
    keys = {line.partition(":")[0] for line in wrong}
    return parse(SampleConfig, {key: value for key, value in values.items() if key not in keys})


class ImageSampler:
    """A denoiser with what its samples need.

    Attributes:
        latent_scale: factor between stored latents and the model's; None for a model of pixels.
        autoencoder: decodes latents, so that samples are pixels; None leaves them.
        graphs: whether a GPU replays a step as one CUDA graph, with the same samples. A batch of another size has a
            graph of its own; its first three steps are made without one.
        compiled: whether the network runs through `torch.compile`.
        run, step: the folder of the weights and their training step, None where unknown.
    """

    def __init__(
        self,
        model: Denoiser,
        latent_scale: float | None = None,
        precision: str = "float32",
        run: Path | None = None,
        step: int | None = None,
        graphs: bool = True,
        compile: bool = False,
        autoencoder: Autoencoder | None = None,
    ):
        self.model, self.latent_scale, self.run, self.step = model.eval(), latent_scale, run, step
        self.precision, self.compiled, self.autoencoder = precision, compile, autoencoder
        if compile:
            compat_torch.allow_recompilations(16)  # for each size of a batch, and each sampler of a process
        self._forward = torch.compile(model, dynamic=False) if compile else model
        self.device = next(model.parameters()).device
        self.graphs = graphs and self.device.type == "cuda"

    @classmethod
    def of_run(
        cls,
        run: str | Path,
        device: torch.device | str | None = None,
        precision: str = "float32",
        *,
        weights: Weights | None = None,
        allow_plugins: bool = False,
        compile: bool = False,
    ) -> "ImageSampler":
        """Returns the sampler of a run or model folder.

        Args:
            precision: `bfloat16` computes products in bfloat16; weights and images stay float32.
            weights: as in `linnet.runs.load_model`.
            compile: run the network through `torch.compile`, which takes up to a minute for each size of a batch. The
                samples are the same up to rounding.

        Raises:
            ConfigError: the folder contains no denoiser.
        """
        folder = RunFolder.open(run)
        loaded = load_checkpoint(run, device, allow_plugins=allow_plugins, kinds=("denoiser",), weights=weights)
        scale = latent_scale(folder.config)
        return cls(loaded.model, scale, precision, folder.path, loaded.step, compile=compile)

    def draw(
        self,
        classes: Sequence[int],
        config: SampleConfig,
        *,
        first: int = 0,
        batch: int = 64,
        show: Callable[[int, int], None] | None = None,
    ) -> Iterator[Tensor]:
        """Yields batches of samples first, first + 1, ...: uint8 [n, C, S, S], or latents float32 as they are stored.

        Latents are decoded to uint8 where there is an `autoencoder`.

        Sample i is the same for every batch size, up to the rounding of the network.

        Args:
            classes: one per sample.
            show: called with (steps done, steps) over all batches.

        Raises:
            ConfigError: classes or settings that the model does not have.
        """
        model = self.model.config
        refuse(config.problems(model, classes), "sample")
        shape = (model.channels, model.image_size, model.image_size)
        network = guided(self._network, self.model.none, config.guidance, config.guidance_channels)
        process = sampling_process(config.sampler, config.steps)
        reverse = Reverse(network, config.sampler, process, clip=self.latent_scale is None)
        step = Captured(torch.no_grad()(reverse.step), self.device) if self.graphs else reverse.step
        starts = range(0, len(classes), batch)
        total = len(starts) * config.number_of_steps
        for number, start in enumerate(starts):
            chosen = list(classes[start : start + batch])
            indices = range(first + start, first + start + len(chosen))
            done = number * config.number_of_steps
            images = reverse.run(
                torch.tensor(chosen, device=self.device),
                NoiseStream(config.seed, indices, shape, self.device),
                step,
                show=None if show is None else lambda step, _, done=done: show(done + step, total),
            )
            if not images.isfinite().all():
                raise ConfigError(["samples: NaN or infinite; use precision float32 or another checkpoint"], "sample")
            if self.latent_scale is None:
                yield to_pixels(images)
                continue
            latents = images / self.latent_scale
            yield latents if self.autoencoder is None else self.autoencoder.decode(latents)
        if show is not None:
            show(total, total)

    def _network(self, noisy: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        half = torch.autocast(self.device.type, dtype=torch.bfloat16) if self.precision == "bfloat16" else nullcontext()
        with half:
            return self._forward(noisy, t, classes)


def latent_scale(values: dict[str, Any]) -> float | None:
    """Returns the factor of the latents that a run was trained on, from its config.yaml; None for pixels."""
    data = values.get("data")
    if not isinstance(data, dict) or data.get("kind") != "latents":
        return None
    return float(values.get("latent_scale", LATENT_SCALE))


def spread(classes: Sequence[int], count: int) -> list[int]:
    """Returns `count` classes that take turns."""
    return [classes[i % len(classes)] for i in range(count)]
