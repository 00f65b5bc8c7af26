"""The diffusion process against transcriptions of the papers' equations, and against diffusers if installed."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from linnet.vision.models.diffusion import (
    Diffusion,
    NoiseStream,
    Reverse,
    discretised_log_likelihood,
    from_pixels,
    guided,
    linear_betas,
    sampling_process,
    to_pixels,
)

SHAPE = (3, 4, 4)


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_tables_are_those_of_the_schedule():
    beta = np.linspace(1e-4, 0.02, 1000)
    abar = np.cumprod(1 - beta)
    assert math.isclose(abar[-1], 4.0358e-5, rel_tol=1e-4)
    x, eps, t = draws(2, *SHAPE), draws(2, *SHAPE, seed=1), torch.tensor([0, 999])
    noisy = Diffusion().diffuse(x, t, eps)
    for i, step in enumerate(t.tolist()):
        expected = math.sqrt(abar[step]) * x[i] + math.sqrt(1 - abar[step]) * eps[i]
        assert torch.allclose(noisy[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("t", [1, 20, 500, 999])
def test_bound_is_the_divergence_of_two_gaussians(t):
    beta = np.linspace(1e-4, 0.02, 1000)
    abar = np.cumprod(1 - beta)
    x, eps, out = draws(1, *SHAPE).clamp(-1, 1), draws(1, *SHAPE, seed=1), draws(1, 6, 4, 4, seed=2)
    steps = torch.tensor([t])
    square, bound = Diffusion().losses(out, x, steps, eps)

    predicted, v = (part.numpy() for part in out.chunk(2, 1))
    x_0, noise = x.numpy(), eps.numpy()
    x_t = np.sqrt(abar[t]) * x_0 + np.sqrt(1 - abar[t]) * noise

    def mean(image):
        a = np.sqrt(abar[t - 1]) * beta[t] / (1 - abar[t])
        b = np.sqrt(1 - beta[t]) * (1 - abar[t - 1]) / (1 - abar[t])
        return a * image + b * x_t

    small = beta[t] * (1 - abar[t - 1]) / (1 - abar[t])
    share = (v + 1) / 2
    variance = np.exp(share * np.log(beta[t]) + (1 - share) * np.log(small))
    estimate = (x_t - np.sqrt(1 - abar[t]) * predicted) / np.sqrt(abar[t])
    gap = mean(x_0) - mean(estimate)
    divergence = np.log(np.sqrt(variance / small)) + (small + gap**2) / (2 * variance) - 0.5
    assert math.isclose(square.item(), ((predicted - noise) ** 2).mean(), rel_tol=1e-12)
    assert math.isclose(bound.item(), divergence.mean() / math.log(2), rel_tol=1e-9)
    # float32 keeps the digits, also at the last steps, where x_0 is the difference of two large numbers
    _, single = Diffusion().losses(out.float(), x.float(), steps, eps.float())
    assert math.isclose(single.item(), bound.item(), rel_tol=1e-5)


def test_first_step_scores_the_pixels():
    levels = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8).view(1, 1, 1, 5)
    x, eps, out = from_pixels(levels).double(), draws(1, 1, 1, 5), draws(1, 2, 1, 5, seed=1)
    _, bound = Diffusion().losses(out, x, torch.tensor([0]), eps)
    beta = np.linspace(1e-4, 0.02, 1000)
    abar = np.cumprod(1 - beta)
    small = beta[1] * (1 - abar[0]) / (1 - abar[1])  # betatilde of the second step stands for the first, which is 0
    predicted, v = (part.numpy().ravel() for part in out.chunk(2, 1))
    x_t = np.sqrt(abar[0]) * x.numpy().ravel() + np.sqrt(1 - abar[0]) * eps.numpy().ravel()
    mean = (x_t - np.sqrt(1 - abar[0]) * predicted) / np.sqrt(abar[0])
    scale = np.exp(0.5 * ((v + 1) / 2 * np.log(beta[0]) + (1 - (v + 1) / 2) * np.log(small)))
    value = levels.numpy().ravel() / 127.5 - 1
    upper = np.where(levels.numpy().ravel() == 255, np.inf, value + 1 / 255)
    lower = np.where(levels.numpy().ravel() == 0, -np.inf, value - 1 / 255)
    mass = norm.cdf(upper, mean, scale) - norm.cdf(lower, mean, scale)
    assert math.isclose(bound.item(), -np.log2(mass).mean(), rel_tol=1e-6)


def test_masses_of_all_levels_sum_to_one():
    levels = from_pixels(torch.arange(256, dtype=torch.uint8)).double()
    mean, log_scale = torch.tensor(0.3, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)
    log_mass = discretised_log_likelihood(levels, mean - levels, log_scale.expand(256))
    assert math.isclose(log_mass.exp().sum().item(), 1.0, rel_tol=1e-5)


def test_bound_trains_the_variance_only():
    out = draws(2, 6, 4, 4).requires_grad_()
    x, eps, t = draws(2, *SHAPE, seed=1).clamp(-1, 1), draws(2, *SHAPE, seed=2), torch.tensor([0, 700])
    square, bound = Diffusion().losses(out, x, t, eps)
    (by_bound,) = torch.autograd.grad(bound.sum(), out, retain_graph=True)
    (by_square,) = torch.autograd.grad(square.sum(), out)
    assert not by_bound[:, :3].any() and by_bound[:, 3:].all()
    assert by_square[:, :3].all() and not by_square[:, 3:].any()
    assert by_bound.isfinite().all()


def test_without_a_learned_variance_there_is_no_bound():
    square, bound = Diffusion().losses(draws(1, *SHAPE), draws(1, *SHAPE, seed=1), torch.tensor([3]), draws(1, *SHAPE))
    assert square.item() == 0 and bound.item() == 0


def test_respaced_process_keeps_the_noise_levels():
    whole = Diffusion()
    for count, spacing, chosen in (
        (250, "even", [round(i * 999 / 249) for i in range(250)]),
        (50, "leading", list(range(0, 1000, 20))),
        (600, "leading", [i * 5 // 3 for i in range(600)]),  # up to 998: a start from pure noise must not be at 599
        (1000, "even", list(range(1000))),
        (1, "even", [999]),
    ):
        part = whole.respaced(count, spacing)
        assert part.timesteps.tolist() == chosen
        x, eps = draws(count, *SHAPE), draws(count, *SHAPE, seed=1)
        own = part.diffuse(x, torch.arange(count), eps)
        assert torch.allclose(own, whole.diffuse(x, part.timesteps, eps), atol=1e-12)
    with pytest.raises(ValueError, match="steps: 1001"):
        whole.respaced(1001)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_samplers_reach_the_image_that_a_perfect_network_sees(sampler):
    """The noise of a network that knows x_0 leads back to x_0 from any start."""
    image = draws(2, *SHAPE).clamp(-1, 1).float()
    whole = Diffusion()

    def network(noisy, t, classes):
        eps = (noisy - whole.table("image", t, noisy) * image) / whole.table("noise", t, noisy)
        return torch.cat([eps, torch.zeros_like(eps)], 1)

    for steps in (10, 100):
        reverse = Reverse(network, sampler, sampling_process(sampler, steps))
        made = reverse.run(torch.zeros(2, dtype=torch.int64), NoiseStream(0, [0, 1], SHAPE))
        assert torch.allclose(made, image, atol=1e-4)


def test_ddpm_draws_have_the_learned_moments():
    process, t = Diffusion(), torch.full((20_000,), 400)
    noisy = draws(1, 1, 1, 1).expand(20_000, 1, 1, 1)
    out = draws(1, 2, 1, 1, seed=1).expand(20_000, 2, 1, 1)
    _, mean, log_variance = process.estimate(out, noisy, t, clip=False)
    made = process.ddpm_step(out, noisy, t, draws(20_000, 1, 1, 1, seed=2), clip=False)
    assert math.isclose(made.mean().item(), mean[0].item(), abs_tol=4 * log_variance[0].div(2).exp().item() / 141)
    assert math.isclose(made.var().log().item(), log_variance[0].item(), abs_tol=0.05)
    assert torch.equal(
        process.ddpm_step(out, noisy, t * 0, noisy, False), process.estimate(out, noisy, t * 0, False).mean
    )


def test_guidance_moves_the_noise_and_not_the_variance():
    def network(noisy, t, classes):
        eps = classes.view(-1, 1, 1, 1) * torch.ones_like(noisy)
        return torch.cat([eps, 10 * eps], 1)

    noisy, t, classes = draws(2, 4, 2, 2), torch.tensor([1, 2]), torch.tensor([3, 5])
    out = guided(network, none=10, guidance=1.5)(noisy, t, classes)
    assert torch.allclose(out[:, :4].mean((1, 2, 3)), torch.tensor([10 - 1.5 * 7, 10 - 1.5 * 5], dtype=torch.float64))
    assert torch.equal(out[:, 4:], network(noisy, t, classes)[:, 4:])
    three = guided(network, none=10, guidance=1.5, channels=3)(noisy, t, classes)
    assert torch.equal(three[:, :3], out[:, :3]) and torch.equal(three[:, 3], network(noisy, t, classes)[:, 3])
    assert guided(network, none=10, guidance=1.0) is network
    low = guided(lambda *args: network(*args).bfloat16(), none=10, guidance=1.3)(noisy, t, classes)
    assert torch.equal(low, guided(network, none=10, guidance=1.3)(noisy, t, classes))  # rounded before, not after


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_a_sample_does_not_depend_on_its_batch(sampler):
    def network(noisy, t, classes):
        return torch.cat([noisy * 0.5 + classes.view(-1, 1, 1, 1), noisy.tanh()], 1)

    def make(indices):
        reverse = Reverse(network, sampler, sampling_process(sampler, 20))
        return reverse.run(torch.tensor([i % 3 for i in indices]), NoiseStream(7, indices, SHAPE))

    together = make([0, 1, 2, 3])
    assert torch.equal(torch.cat([make([i]) for i in range(4)]), together)
    assert torch.equal(make([3, 1]), together[[3, 1]])
    assert not torch.equal(together[0], together[3])  # another index, the same class


def test_pixels_survive_the_round_trip():
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_pixels(from_pixels(pixels)), pixels)
    assert to_pixels(torch.tensor([-9.0, 9.0])).tolist() == [0, 255]


@pytest.mark.parametrize("clip", [False, True])
def test_steps_equal_those_of_diffusers(clip):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    x, out = draws(1, *SHAPE), draws(1, 6, 4, 4, seed=1)

    def scheduler(kind, **settings):
        made = kind(trained_betas=linear_betas().numpy(), clip_sample=clip, **settings)
        made.betas = linear_betas()  # its own tables are float32, in which 1 - abar_0 keeps three digits
        made.alphas_cumprod = (1 - made.betas).cumprod(0)
        return made

    ddpm = scheduler(diffusers.DDPMScheduler, variance_type="learned_range")
    ddpm.set_timesteps(1000)
    whole = Diffusion()
    for t in (999, 500, 1, 0):
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
        theirs = ddpm.step(out, t, x, generator=generator).prev_sample
        ours = whole.ddpm_step(out, x, torch.tensor([t]), noise, clip)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-9), t

    ddim = scheduler(diffusers.DDIMScheduler)
    ddim.set_timesteps(50)
    process = sampling_process("ddim", 50)
    assert ddim.timesteps.flip(0).tolist() == process.timesteps.tolist()
    for index in (49, 20, 1, 0):
        t = int(process.timesteps[index])
        theirs = ddim.step(out[:, :3], t, x, eta=0.0, use_clipped_model_output=clip).prev_sample
        ours = process.ddim_step(out, x, torch.tensor([index]), clip)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-9), t
