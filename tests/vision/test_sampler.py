"""Samplers of images: a step of tensors alone, which a GPU replays as a graph, and very few steps."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linnet.models import build
from linnet.vision.config import DenoiserConfig
from linnet.vision.models.diffusion import NoiseStream, Reverse, guided, sampling_process
from linnet.vision.sampler import ImageSampler, SampleConfig

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAYOUTS = {
    "dit": {
        "layout": "attention+mlp x2",
        "options": {"attention": {"num_heads": 2, "rope": False}},
        "position": "sin_cos",
    },
    "lightnet": {"layout": "tpe lightnet+swiglu x2", "options": {"lightnet": {"num_heads": 2}}},
    "mamba": {"layout": "mamba x2"},
    "hgrn2": {"layout": "hgrn2+glu x2", "options": {"hgrn2": {"num_heads": 2}}},
}


def denoiser(name: str, conditioning: str = "adaln_zero", width: int = 32) -> torch.nn.Module:
    """A denoiser whose head and gates, which start at zero, have values too."""
    shape = {"image_size": 8, "patch": 2, "channels": 1, "classes": 3, "class_drop": 0.1}
    model = build(
        "denoiser", DenoiserConfig(d_model=width, conditioning=conditioning, **shape, **LAYOUTS[name]), 0
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05, generator=generator)
    return model


class TensorsAlone(TorchDispatchMode):
    """Raises where a GPU would wait for the host, or the host for a GPU: both end a capture."""

    HOST = ("_local_scalar_dense", "is_nonzero", "nonzero", "lift_fresh", "masked_select", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in self.HOST or name.startswith("unique"):
            raise AssertionError(f"{name} reads or makes numbers on the host")
        for value in [*args, *(kwargs or {}).values()]:
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                raise AssertionError(f"{name} of a tensor that is not on the device of the model")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("conditioning", ["adaln_zero", "tokens"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_a_step_reads_and_makes_no_number_on_the_host(name, conditioning, sampler):
    model = denoiser(name, conditioning).to("meta")
    reverse = Reverse(guided(model, model.none, 2.0), sampler, sampling_process(sampler, 20))
    numbers = torch.empty(4, dtype=torch.int64, device="meta")
    noisy = torch.empty(4, 1, 8, 8, device="meta")
    inputs = (noisy, numbers, numbers, numbers, *([noisy] if sampler == "ddpm" else []))
    with torch.no_grad():
        reverse.step(*inputs)  # tables are placed and positions made by the first of all steps, before a capture
        with TensorsAlone():
            assert reverse.step(*inputs).shape == noisy.shape
            with pytest.raises(AssertionError, match="not on the device"):
                torch.zeros(3).exp()


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_steps_in_static_memory_give_the_same_images(sampler):
    """What a graph does: inputs are copied to one place, and the output is one place that the next step overwrites."""
    model = denoiser("lightnet")
    reverse = Reverse(guided(model, model.none, 1.5), sampler, sampling_process(sampler, 8))
    places: list[torch.Tensor] = []
    result: list[torch.Tensor] = []

    def static(*inputs: torch.Tensor) -> torch.Tensor:
        if not places:
            places.extend(torch.empty_like(x) for x in inputs)
            result.append(torch.empty_like(inputs[0]))
        for place, x in zip(places, inputs, strict=True):
            place.copy_(x)
        kept = [x.clone() for x in places]
        result[0].copy_(reverse.step(*places))
        assert all(map(torch.equal, kept, places))  # a step leaves its inputs as they are
        return result[0].clone()

    classes = torch.tensor([0, 2, 1])
    images = [reverse.run(classes, NoiseStream(3, range(3), (1, 8, 8)), step) for step in (None, static)]
    assert torch.equal(*images) and images[0].isfinite().all()


@pytest.mark.parametrize("steps", [1, 2, 3, 9, 10])
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_few_steps_begin_at_pure_noise(sampler, steps):
    process = sampling_process(sampler, steps)
    assert len(process.timesteps) == steps
    assert (
        process.timesteps[-1] >= 900
        and process.table("image", process.timesteps.new_tensor([steps - 1]), torch.zeros(1)) < 0.03
    )
    model = denoiser("dit")
    [images] = ImageSampler(model).draw([0, 1], SampleConfig(sampler=sampler, steps=steps, guidance=2.0))
    assert images.shape == (2, 1, 8, 8) and images.dtype == torch.uint8
    assert steps == 1 or process.timesteps[0] == 0


def test_one_step_is_the_networks_estimate_of_the_image():
    model = denoiser("dit")
    noisy, t, classes = NoiseStream(0, [0], (1, 8, 8)).next(), torch.tensor([999]), torch.tensor([1])
    with torch.no_grad():
        expected = sampling_process("ddpm", 1000).estimate(model(noisy, t, classes), noisy, t, clip=True).image
    for sampler in ("ddim", "ddpm"):
        reverse = Reverse(model, sampler, sampling_process(sampler, 1))
        made = reverse.run(classes, NoiseStream(0, [0], (1, 8, 8)))
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


@gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_a_graph_draws_the_same_images(name, sampler, precision, recwarn):
    model = denoiser(name, width=64).cuda()
    config = SampleConfig(sampler=sampler, steps=12, guidance=2.0, seed=5)
    with_graph, without = (ImageSampler(model, precision=precision, graphs=graphs) for graphs in (True, False))
    assert with_graph.graphs and not without.graphs
    classes = [number % 3 for number in range(10)]
    images = [torch.cat(list(one.draw(classes, config, batch=4))) for one in (with_graph, without)]  # 4, 4, 2 samples
    assert torch.equal(*images)
    assert not [str(one.message) for one in recwarn if "CUDA graph" in str(one.message)]  # it was captured


@gpu
def test_a_compiled_network_draws_the_same_images():
    """On a CPU tests/vision/cli/test_sample.py draws them."""
    model = denoiser("lightnet").cuda()
    config = SampleConfig(steps=6, guidance=2.0, seed=5)
    compiled, whole = (ImageSampler(model, compile=compile) for compile in (True, False))
    torch._dynamo.utils.counters.clear()
    images = [torch.cat(list(one.draw([0, 1, 2], config, batch=2))).int() for one in (compiled, whole)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # for two images, and for one
    assert (images[0] - images[1]).abs().max() <= 1  # a pixel at the edge of a step of 1/255
