"""The Gaussian diffusion process of a denoiser: noise schedule, training loss and samplers, without data or network.

Ho, Jain, Abbeel 2020 (arXiv:2006.11239) define the process, Nichol and Dhariwal 2021 (arXiv:2102.09672) the learned
variance and respaced steps, Song, Meng, Ermon 2021 (arXiv:2010.02502) DDIM, Ho and Salimans 2022 (arXiv:2207.12598)
guidance without a classifier. The choices are those of DiT (Peebles and Xie 2023, arXiv:2212.09748): 1000 steps, beta
linear from 1e-4 to 0.02, the network predicts the noise and where the variance lies between its two bounds.

    abar_t = prod_{s <= t} (1 - beta_s)
    x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps,   eps ~ N(0, 1)

Steps are counted from 0, as in code: x_0 below is the image, and `t` = 0 is the first noisy step. Tables are float64;
numbers are computed in the dtype of the images, but at least in float32.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

STEPS = 1000
SamplerName = Literal["ddpm", "ddim"]
DEFAULT_STEPS: dict[str, int] = {"ddpm": 250, "ddim": 50}
FEW = 10  # steps below which DDIM's spacing begins too far from pure noise
Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_t [B, C, S, S], t int64 [B], classes int64 [B]) -> [B, C or 2C, S, S]: the noise, and v if it is learned."""


def linear_betas(steps: int = STEPS) -> Tensor:
    """Returns beta_t, float64 [steps], linear from 1e-4 to 0.02."""
    return torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)


class Estimate(NamedTuple):
    """One reverse step, as the network sees it.

    Attributes:
        image: estimate of x_0. mean, log_variance: of the Gaussian of x_{t-1} given x_t.
    """

    image: Tensor
    mean: Tensor
    log_variance: Tensor


class Diffusion:
    """The process at given betas.

    Attributes:
        timesteps: int64 [steps]; the network is given `timesteps[t]` at step t of this process. They differ from t
            where the process is respaced.
    """

    def __init__(self, betas: Tensor | None = None, timesteps: Tensor | None = None):
        """
        Args:
            betas: float64 [steps]; None is `linear_betas()`.
            timesteps: as the attribute; None is 0 .. steps - 1.
        """
        betas = linear_betas() if betas is None else betas.double()
        self.steps = len(betas)
        self.timesteps = torch.arange(self.steps) if timesteps is None else timesteps
        kept = (1 - betas).cumprod(0)  # abar_t
        before = torch.cat([kept.new_ones(1), kept[:-1]])  # abar_{t-1}
        posterior = betas * (1 - before) / (1 - kept)  # betatilde_t, 0 at t = 0
        floored = torch.cat([posterior[1:2], posterior[1:]]) if self.steps > 1 else betas
        self._kept = kept
        self._tables = {  # each is made in float64: 1 - abar_t is 1e-4 at the first steps
            "image": kept.sqrt(),
            "noise": (1 - kept).sqrt(),
            "noise_per_image": (1 / kept - 1).sqrt(),
            "image_before": before.sqrt(),
            "noise_before": (1 - before).sqrt(),
            "log_beta": betas.log(),
            "log_posterior": floored.log(),
            # The variance without learning is beta_t ("fixed large"), but the posterior's at the last step.
            "log_fixed": torch.cat([floored[:1], betas[1:]]).log(),
            "mean_of_image": betas * before.sqrt() / (1 - kept),
            "mean_of_noisy": (1 - before) * (1 - betas).sqrt() / (1 - kept),
        }
        self._placed: dict[torch.device, dict[str, Tensor]] = {}

    def respaced(self, count: int, spacing: Literal["even", "leading"] = "even") -> "Diffusion":
        """Returns the process of `count` of these steps with the same noise levels (arXiv:2102.09672, section 4).

        Args:
            spacing: `even` rounds an even division from the first to the last step (DDPM), and one step is the last;
                `leading` begins at 0 and rounds multiples of steps / count down (DDIM), so that with many steps it
                also ends near the last one.

        Raises:
            ValueError: `count` is not between 1 and the number of steps.
        """
        if not 1 <= count <= self.steps:
            raise ValueError(f"steps: {count} is not between 1 and {self.steps}, the steps of training")
        if spacing == "even":
            stride = (self.steps - 1) / max(count - 1, 1)
            chosen = torch.tensor([round(i * stride) for i in range(count)] if count > 1 else [self.steps - 1])
        else:
            chosen = torch.arange(count) * self.steps // count
        kept = self._kept[chosen]
        return Diffusion(1 - kept / torch.cat([kept.new_ones(1), kept[:-1]]), self.timesteps[chosen])

    def table(self, name: str, t: Tensor, like: Tensor) -> Tensor:
        """Returns the values of a table at steps t int64 [B], as [B, 1, 1, ...] to multiply `like` [B, ...]."""
        if t.device not in self._placed:
            self._placed[t.device] = {key: value.to(t.device) for key, value in self._tables.items()}
        values = self._placed[t.device][name][t].to(like.dtype)
        return values.view(-1, *[1] * (like.ndim - 1))

    def diffuse(self, images: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Returns x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps for images [B, ...] and t int64 [B]."""
        return self.table("image", t, images) * images + self.table("noise", t, images) * noise

    def losses(self, output: Tensor, images: Tensor, t: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the two terms of the loss of each image, [B] each; the loss is their sum.

        The first term is the mean of (eps - eps_theta)^2 over elements. The second is the variational bound of step t
        in bits per element, KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)) or at t = 0 the negative log-likelihood of
        the pixels under a Gaussian that is integrated over their 256 levels. Its mean is detached, so that it trains
        the variance only (arXiv:2102.09672, equation 16), and it has no factor 1/1000, as in DiT. It is 0 for a
        network without a learned variance.

        Args:
            output: the network's, [B, C, ...] or [B, 2C, ...], from `diffuse(images, t, noise)`.
            images: x_0 in [-1, 1], or latents, [B, C, ...].
        """
        images, noise, output = (_at_least_float(x) for x in (images, noise, output))
        predicted, v = split_output(output, images.shape[1])
        error = predicted - noise
        square = error.square().flatten(1).mean(1)
        if v is None:
            return square, torch.zeros_like(square)
        log_variance = self.log_variance(v, t)
        # Both means are linear in their estimate of x_0, and those differ by sqrt(1/abar - 1) (eps - eps_theta). The
        # means themselves, which lose digits where abar is small, are not needed.
        distance = -self.table("mean_of_image", t, images) * self.table("noise_per_image", t, images) * error.detach()
        posterior = self.table("log_posterior", t, images)
        divergence = 0.5 * (
            log_variance - posterior - 1 + (posterior - log_variance).exp() + distance**2 * (-log_variance).exp()
        )
        surprise = -discretised_log_likelihood(images, distance, 0.5 * log_variance)
        first = (t == 0).view(-1, *[1] * (images.ndim - 1))
        bound = torch.where(first, surprise, divergence)
        return square, bound.flatten(1).mean(1) / math.log(2)

    def log_variance(self, v: Tensor | None, t: Tensor, like: Tensor | None = None) -> Tensor:
        """Returns log variance = f log beta_t + (1 - f) log betatilde_t with f = (v + 1) / 2 (2102.09672, eq. 15).

        Args:
            v: the network's [B, C, ...]; None gives the fixed variance, beta_t, in the shape of `like`.
        """
        if v is None:
            return self.table("log_fixed", t, like).expand_as(like)
        share = (v + 1) / 2
        return share * self.table("log_beta", t, v) + (1 - share) * self.table("log_posterior", t, v)

    def estimate(self, output: Tensor, noisy: Tensor, t: Tensor, clip: bool) -> Estimate:
        """Returns what the network's output says of x_0 and of x_{t-1}, for x_t `noisy` [B, C, ...].

        Args:
            clip: limit the estimate of x_0 to [-1, 1], which is right for pixels and wrong for latents.
        """
        predicted, v = split_output(output, noisy.shape[1])
        image = noisy / self.table("image", t, noisy) - self.table("noise_per_image", t, noisy) * predicted
        image = image.clamp(-1, 1) if clip else image
        mean = self.table("mean_of_image", t, noisy) * image + self.table("mean_of_noisy", t, noisy) * noisy
        return Estimate(image, mean, self.log_variance(v, t, noisy))

    def ddpm_step(self, output: Tensor, noisy: Tensor, t: Tensor, noise: Tensor, clip: bool) -> Tensor:
        """Returns x_{t-1} drawn from its Gaussian given x_t; the last step (t = 0) returns the mean."""
        _, mean, log_variance = self.estimate(output, noisy, t, clip)
        later = (t > 0).to(noisy.dtype).view(-1, *[1] * (noisy.ndim - 1))
        return mean + later * (0.5 * log_variance).exp() * noise

    def ddim_step(self, output: Tensor, noisy: Tensor, t: Tensor, clip: bool) -> Tensor:
        """Returns x_{t-1} of the process without noise (arXiv:2010.02502, equation 12 with sigma = 0).

        The noise is that between x_t and the estimate of x_0 after clipping.
        """
        image = self.estimate(output, noisy, t, clip).image
        noise = (noisy - self.table("image", t, noisy) * image) / self.table("noise", t, noisy)
        return self.table("image_before", t, noisy) * image + self.table("noise_before", t, noisy) * noise


def split_output(output: Tensor, channels: int) -> tuple[Tensor, Tensor | None]:
    """Returns the noise and v of a network's output [B, C or 2C, ...]; v is None where it is not learned."""
    return (output, None) if output.shape[1] == channels else (output[:, :channels], output[:, channels:])


def discretised_log_likelihood(images: Tensor, distance: Tensor, log_scale: Tensor) -> Tensor:
    """Returns the log-probability (nats) of 8-bit pixels under Gaussians around them.

    A pixel value of 2 k / 255 - 1 stands for an interval of 2/255; the first and last interval are open
    (arXiv:2006.11239, equation 13).

    Args:
        images: the pixels x_0. distance: mean of the Gaussian - x_0. log_scale: log of its standard deviation.
    """
    scale = (-log_scale).exp()
    upper, lower = (1 / 255 - distance) * scale, (-1 / 255 - distance) * scale
    # The mass between both ends from the tail in which it lies, where a difference keeps its digits.
    flipped = (upper + lower) > 0
    low, high = torch.where(flipped, -upper, lower), torch.where(flipped, -lower, upper)
    inside = torch.special.ndtr(high) - torch.special.ndtr(low)
    between = inside.clamp(min=1e-12).log()
    ends = torch.where(images < -0.999, torch.special.log_ndtr(upper), torch.special.log_ndtr(-lower))
    return torch.where(images.abs() > 0.999, ends, between)


class NoiseStream:
    """Standard normal numbers for samples, a function of (seed, index) alone: each sample has a generator of its own.

    So sample i is the same for every batch size and device, up to the rounding of the network.
    """

    def __init__(self, seed: int, indices: Sequence[int], shape: tuple[int, ...], device: torch.device | str = "cpu"):
        """
        Args:
            indices: number of each sample. shape: of one sample, (C, S, S).
        """
        self.shape, self.device = shape, device
        self._generators = [torch.Generator().manual_seed(seed_of(f"{seed}/sample/{index}")) for index in indices]

    def next(self) -> Tensor:
        """Returns the next numbers of each sample, float32 [B, C, S, S]."""
        drawn = torch.stack([torch.randn(self.shape, generator=generator) for generator in self._generators])
        return drawn.to(self.device)


def guided(network: Network, none: int, guidance: float, channels: int | None = None) -> Network:
    """Returns a network whose noise is eps(none) + guidance (eps(class) - eps(none)), from one call of twice the batch.

    A guidance of 1 is the network itself, of 0 the network without a class. The variance is that of the class.

    Args:
        none: class index that stands for no class.
        channels: how many channels are guided; None is all. DiT's published numbers need 3 of 4 (its issue 41).
    """
    if guidance == 1.0:
        return network

    def call(noisy: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        both = torch.cat([classes, torch.full_like(classes, none)])
        # At least float32 (in the dtype of x_t): guidance magnifies what bfloat16 would round off.
        output, without = network(torch.cat([noisy, noisy]), torch.cat([t, t]), both).to(noisy.dtype).chunk(2)
        count = noisy.shape[1] if channels is None else channels
        return torch.cat([torch.lerp(without[:, :count], output[:, :count], guidance), output[:, count:]], 1)

    return call


def sampling_process(sampler: SamplerName, steps: int | None = None) -> Diffusion:
    """Returns the process of a sampler, respaced to `steps` (None: 250 for ddpm, 50 for ddim).

    Samples begin as pure noise, which x_t is near the last step only. With 50 steps, DiT's spacing of DDIM ends at step
    980 of 999, but with 2 at 500, where x_t is still 0.28 x_0 + noise. So below 10 steps DDIM has the spacing of DDPM.

    Raises:
        ValueError: steps above 1000.
    """
    count = steps or DEFAULT_STEPS[sampler]
    return Diffusion().respaced(count, "even" if sampler == "ddpm" or count < FEW else "leading")


@dataclass(frozen=True)
class Reverse:
    """The way back from noise to images: a network, the process of a sampler, and one step of it as tensors alone.

    Attributes:
        clip: as in `Diffusion.estimate`: True for pixels, False for latents.
    """

    network: Network
    sampler: SamplerName
    process: Diffusion
    clip: bool = True

    def step(
        self, noisy: Tensor, index: Tensor, timesteps: Tensor, classes: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """Returns x_{t-1} of x_t `noisy` [B, C, S, S], in its dtype.

        Shapes and kernels are those of every other step, and no number is read on the host, so a GPU can replay the
        step as a CUDA graph.

        Args:
            index: int64 [B], the step of the process. timesteps: int64 [B], what the network is given for it.
            noise: [B, C, S, S]; `ddpm` draws with it, `ddim` has none.
        """
        output = self.network(noisy, timesteps, classes).to(noisy.dtype)
        if noise is not None:
            return self.process.ddpm_step(output, noisy, index, noise, self.clip)
        return self.process.ddim_step(output, noisy, index, self.clip)

    @torch.no_grad()
    def run(
        self,
        classes: Tensor,
        noise: NoiseStream,
        step: Callable[..., Tensor] | None = None,
        show: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Returns images [B, C, S, S] of the classes int64 [B], float32, drawn from pure noise.

        Args:
            noise: gives x_T, and the noise of each step of `ddpm`.
            step: makes the steps in place of `step`, with the same results: a captured one.
            show: called with (steps done, steps) before each step.
        """
        noisy, timesteps = noise.next(), self.process.timesteps.to(classes.device)
        for done, index in enumerate(reversed(range(self.process.steps))):
            if show is not None:
                show(done, self.process.steps)
            t = torch.full_like(classes, index)
            more = (noise.next(),) if self.sampler == "ddpm" else ()
            noisy = (step or self.step)(noisy, t, timesteps[t], classes, *more)
        return noisy


def to_pixels(images: Tensor) -> Tensor:
    """Returns uint8 pixels of images in [-1, 1]: the nearest of 256 levels; values outside are clipped."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def from_pixels(pixels: Tensor) -> Tensor:
    """Returns float32 images in [-1, 1] of uint8 pixels."""
    return pixels.float() / 127.5 - 1


def _at_least_float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def seed_of(name: str) -> int:
    """Returns the seed of a generator of its own."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
