"""The noise in an image: `objective: diffusion`.

The model is a `Denoiser`. Each image gets a random time step and random noise, and the loss is the mean squared error
of the predicted noise plus, with `model.learn_sigma`, the variational bound of the variance in bits
(`linnet.vision.models.diffusion.Diffusion.losses`). Held-out images get the same steps and the same noise in each
validation of each run, so that small differences between models show after minutes.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from linnet.config import ConfigError, Factor, gather
from linnet.data.images.decode import check_png, encode_png, picture_grid
from linnet.data.labelled import HeldOut
from linnet.evaluate.likelihood import evaluating
from linnet.train.config import EVALUATIONS
from linnet.train.objective import Batch, Loss, Show
from linnet.train.optimizer import AverageConfig
from linnet.train.scoring import sum_over_batches
from linnet.vision.config import DenoiserConfig
from linnet.vision.data import AugmentConfig, ImageCorpus
from linnet.vision.latents import scale_problems
from linnet.vision.models.diffusion import STEPS, Diffusion, NoiseStream, from_pixels
from linnet.vision.sampler import LATENT_SCALE, ImageSampler, SampleConfig
from linnet.vision.train.evaluations import ImageSubject, SampleEvaluation
from linnet.vision.train.images import (
    ImageObjective,
    ImageRunConfig,
    ImageTraining,
    none_given,
)

if TYPE_CHECKING:
    from linnet.parallel.mesh import Mesh

BINS = 4
"""Ranges of time steps whose held-out loss is reported apart."""
CLASSES = 10
"""Most classes of which pictures show samples."""
GUIDANCE = 2.0
"""Guidance of these samples, if the model is trained for it."""
_GOLDEN = 0.6180339887498949  # fractional part of the golden ratio: its multiples cover time steps evenly


class DiffusionRunConfig(ImageRunConfig):
    """How the training of a denoiser is executed."""

    pictures: int = Field(
        8,
        ge=0,
        le=64,
        description=f"samples of each class (of at most {CLASSES}) that are drawn with each validation; 0: none",
    )


class DiffusionTraining(ImageTraining):
    """The training of a denoiser."""

    # Other types than in the base, which is the class of an objective of its own.
    objective: Literal["diffusion"] = Field(  # type: ignore[assignment]
        "diffusion", description="the training objective: `diffusion`, the noise in an image"
    )
    model: DenoiserConfig = Field(  # type: ignore[assignment]
        description="a recipe's name, a recipe with changes, or a layout with its images"
    )
    run: DiffusionRunConfig = Field(
        DiffusionRunConfig(), description="how the training is executed; not part of the run's identity"
    )
    average: AverageConfig | None = Field(
        AverageConfig(decay=0.9999, warmup=True),
        description="moving average of the weights, which is sampled from; null: none",
    )
    latent_scale: Factor = Field(
        LATENT_SCALE, description="factor of latents (data.kind: latents), to about unit variance"
    )
    evaluate_draws: int = Field(
        1, ge=1, le=1000, description="time steps and noises for each held-out image in a validation"
    )

    evaluations: list[SampleEvaluation] = Field(  # type: ignore[assignment]
        [], exclude_if=none_given, description=EVALUATIONS
    )

    @model_validator(mode="after")
    def _scale_of_latents(self) -> Self:
        if self.data.kind == "images" and self.latent_scale != LATENT_SCALE:  # the default, which is always saved
            raise ValueError(f"latent_scale: {self.latent_scale:g} has no effect with data.kind: images; leave it out")
        return self

    @field_validator("augment")
    @classmethod
    def _only_flips(cls, augment: AugmentConfig, info: Any) -> AugmentConfig:
        if augment.kind not in ("none", "flip") or augment.mixes or augment.smoothing:
            raise ValueError("a denoiser learns images as they are; use none or flip, without mixup, cutmix, smoothing")
        if augment.kind == "flip" and "data" in info.data and info.data["data"].kind == "latents":
            raise ValueError(
                "flip: mirrored latents are not the latents of mirrored images; encode the mirrored images too, and "
                "use augment: none"
            )
        return augment


class DiffusionObjective(ImageObjective):
    """Trains a denoiser on a corpus of images, or of latents, with classes."""

    Config = DiffusionTraining  # type: ignore[assignment]
    name, units, loss_unit = "diffusion", "images", "squared error + bits"
    SCORES: ClassVar = {"mse": "squared error of the noise"}
    config: DiffusionTraining

    @classmethod
    def row_tokens(cls, config: DiffusionTraining) -> int:  # type: ignore[override]
        model = config.model
        return (model.image_size // model.patch) ** 2 + (2 if model.conditioning == "tokens" else 0)

    @classmethod
    def missing(cls, config: DiffusionTraining) -> list[str]:  # type: ignore[override]
        problems: list[str] = []
        if config.data.kind == "latents":
            return scale_problems(config.data.source, config.latent_scale)
        if config.run.pictures:
            with gather(problems):
                check_png()
        return [f"{line}, or set run.pictures=0" for line in problems]

    @classmethod
    def subject(cls, config: DiffusionTraining, data: ImageCorpus | None, device: torch.device) -> ImageSubject:  # type: ignore[override]
        scale = config.latent_scale if config.data.kind == "latents" else None
        return dataclasses.replace(super().subject(config, data, device), latent_scale=scale)

    @property
    def latent_scale(self) -> float | None:
        """Factor of latents; None for pixels."""
        return self.config.latent_scale if self.config.data.kind == "latents" else None

    def loss(self, model: nn.Module) -> Loss:
        process = Diffusion()

        def loss(images: Tensor, t: Tensor, noise: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
            square, bound = _losses(model, process, images, t, noise, classes)
            return (square + bound).sum(), torch.full((), len(t), dtype=torch.int64, device=t.device)

        return loss

    def augment(self, batch: Batch, position: int, rank: int = 0, world: int = 1) -> Batch:
        """Returns images in [-1, 1] (or scaled latents), time steps, noise, and classes, some of them dropped.

        The numbers of the global batch come from one generator of (seed, position), which lies on the device: a GPU
        draws other numbers than a CPU.
        """
        config = self.config
        images, labels = super().augment(batch, position, rank, world)
        images = scaled(images, self.latent_scale)
        device, rows = images.device, config.batch_sizes.rows(position)
        own = slice(*config.batch_sizes.share(position, rank, world))
        generator = torch.Generator(device).manual_seed(_seed_of(config.seed, position))
        t = torch.randint(STEPS, (rows,), generator=generator, device=device)
        dropped = torch.rand(rows, generator=generator, device=device) < config.model.class_drop
        noise = torch.randn(rows, *images.shape[1:], generator=generator, device=device)
        classes = torch.where(dropped[own], config.model.classes, labels)
        return images, t[own], noise[own], classes

    def validate(
        self,
        model: nn.Module,
        autocast: contextlib.AbstractContextManager,
        show: Show | None = None,
        mesh: "Mesh | None" = None,
    ) -> dict[str, float]:
        """Scores held-out images; the row has the loss of each quarter of time steps besides that of all.

        `validation_loss_t250` is the loss of steps 250 to 499, and so on.
        """
        process, width = Diffusion(), STEPS // BINS

        def measure(images: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> Tensor:
            images = scaled(images, self.latent_scale)
            square, bound = _losses(model, process, images, t, noise, labels)
            inside = torch.nn.functional.one_hot(t // width, BINS).to(square.dtype)
            losses = ((square + bound)[:, None] * inside).sum(0)  # no product of matrices: autocast would round it
            return torch.cat([square.sum()[None], losses, inside.sum(0)])

        draws = self.config.evaluate_draws
        batches = NoisyHeldOut(self.held_out(mesh), draws)
        square, *numbers = sum_over_batches(model, batches, batches.size, measure, autocast, show, mesh).tolist()
        losses, counts = numbers[:BINS], numbers[BINS:]
        return {
            "validation_loss": sum(losses) / sum(counts),
            "validation_mse": square / sum(counts),
            "validation_images": round(sum(counts)) // draws,
        } | {
            f"validation_loss_t{number * width}": loss / count
            for number, (loss, count) in enumerate(zip(losses, counts, strict=True))
            if count
        }

    def pictures(
        self, model: nn.Module, autocast: contextlib.AbstractContextManager, mesh: "Mesh | None" = None
    ) -> dict[str, bytes]:
        """Returns a grid of samples, one row per class, always from the same noise; none for latents."""
        config = self.config.model
        columns = self.config.run.pictures
        if not columns or self.latent_scale is not None or config.channels not in (1, 3):
            return {}
        count = min(CLASSES, config.classes)
        shown = [number * config.classes // count for number in range(count)]
        classes = [one for one in shown for _ in range(columns)]
        settings = SampleConfig(guidance=GUIDANCE if config.class_drop else 1.0)
        try:
            with evaluating(model), autocast:
                images = torch.cat(list(ImageSampler(model, graphs=False).draw(classes, settings)))
        except ConfigError:  # samples that are not finite: the validation's row shows it
            return {}
        finally:
            if mesh is not None:
                from linnet.parallel.build import settle

                settle(model)
        return {".png": encode_png(picture_grid(images.cpu().numpy(), columns))}

    def result_fields(self, rows: int, validation: dict[str, Any]) -> dict[str, Any]:
        bins = {
            key.removeprefix("validation_"): value
            for key, value in validation.items()
            if key.startswith("validation_loss_t")
        }
        return {**super().result_fields(rows, validation), **bins}

    @classmethod
    def result_numbers(cls, config: Any) -> set[str]:
        return super().result_numbers(config) | {f"loss_t{number * STEPS // BINS}" for number in range(BINS)}


class NoisyHeldOut(Sequence[Batch]):
    """The held-out images with their classes, time steps and noise: always the same, in batches.

    Args:
        draws: how often each image is scored, each time at another step with other noise.

    Attributes:
        size: number of images, counted once for each draw.
    """

    def __init__(self, images: HeldOut, draws: int):
        self._images, self._draws = images, draws
        self.size = self._images.size * draws

    def __len__(self) -> int:
        return len(self._images) * self._draws

    def __getitem__(self, number: Any) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        draw, place = divmod(number, len(self._images))
        images, labels = self._images[place]
        samples = [(place * self._images.rows + row) * self._draws + draw for row in range(len(labels))]
        t = torch.tensor([int(STEPS * ((0.5 + sample * _GOLDEN) % 1)) for sample in samples])
        return images, labels, t, NoiseStream(0, samples, tuple(images.shape[1:])).next()


def scaled(images: Tensor, latent_scale: float | None) -> Tensor:
    """Returns the model's input of stored images: pixels in [-1, 1], or latents times a factor."""
    return from_pixels(images) if latent_scale is None else images.float() * latent_scale


def _losses(
    model: nn.Module, process: Diffusion, images: Tensor, t: Tensor, noise: Tensor, classes: Tensor
) -> tuple[Tensor, Tensor]:
    return process.losses(model(process.diffuse(images, t, noise), t, classes), images, t, noise)


def _seed_of(seed: int, position: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/diffusion/{position}".encode()).digest()[:8], "big") >> 1
