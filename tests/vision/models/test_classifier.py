"""Image classifiers: their parts, image sizes, losses, and the recipes, shrunk."""

import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError, parse
from linnet.models import build, families_of, family, get_recipe, kind_of, recipes_of
from linnet.models.patches import sin_cos_2d
from linnet.vision.config import VisionConfig
from linnet.vision.models import Grid, ImageClassifier

RECIPES = recipes_of("classifier")


def pixels(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def shrunk(name: str, layers: int = 2) -> VisionConfig:
    """The recipe's own layout and options: few layers, width 32, images of 3 x 3 patches, 5 classes."""
    values = get_recipe(name).model_dump()
    narrow = {"num_heads": 2, "inner": 48, "gate_rank": 8}
    options = {
        layer: {key: narrow.get(key, value) for key, value in own.items()} for layer, own in values["options"].items()
    }
    head = values["layout"].partition(" x")[0]
    return VisionConfig(
        **values
        | {"d_model": 32, "layout": f"{head} x{layers}", "options": options, "patch": 2, "image_size": 6, "classes": 5}
        | {"channels": 3, "mean": None, "std": None, "init_std": 0.1}
    )


SHRUNK = {shrunk(name).model_dump_json(): name for name in reversed(RECIPES)}  # sizes of one family become one model


@pytest.mark.parametrize("name", SHRUNK.values())
def test_learning_reaches_every_weight(name):
    config = shrunk(name)
    model = build("classifier", config, seed=1).double()
    images, labels = pixels(3, config.channels, 6, 6), torch.tensor([0, 4, 2])
    total, count = model.loss(images, labels)
    assert count == 3
    logits = model(images)
    assert logits.shape == (3, 5) and model.features(images).shape == (3, 32)
    torch.testing.assert_close(total, F.cross_entropy(logits, labels, reduction="sum"))
    total.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0 or key.endswith(("k_proj.bias", "gamma")), key
    again = build("classifier", config, seed=2).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(images), logits)


@pytest.mark.parametrize("name", SHRUNK.values())
def test_a_compiler_agrees(name):
    config = shrunk(name, layers=1)
    model = build("classifier", config).double()
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # the ops' tests trace through autograd too
    images = pixels(2, config.channels, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images))


def test_weights_are_a_function_of_the_seed_and_the_name():
    config = shrunk("lightnet-vit-8px")
    one, same, other = (build("classifier", config, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def small(**changes) -> VisionConfig:
    values = {"d_model": 16, "layout": "hgrn2+swiglu", "options": {"hgrn2": {"num_heads": 2}}, "init_std": 0.2}
    return parse(VisionConfig, values | {"image_size": 8, "patch": 2, "channels": 2, "classes": 3} | changes)


def test_parts_are_composed_as_documented():
    """The logits from the parts: normalised pixels, patches, table, backbone, pool, head."""
    config = small(position="learned", mean=[0.25, 0.5], std=[0.5, 2.0])
    model = build("classifier", config).double()
    images = pixels(2, 2, 8, 8)
    x = (images.double() / 255 - torch.tensor([0.25, 0.5]).view(2, 1, 1)) / torch.tensor([0.5, 2.0]).view(2, 1, 1)
    x = model.patches(x) + model.position.weight
    x, _ = model.backbone(x, grid=Grid((4, 4)))
    torch.testing.assert_close(model(images), model.head(x.mean(1)))
    torch.testing.assert_close(model(images.double() / 255), model(images))
    for pool, place in (("first", 0), ("last", -1)):
        other = build("classifier", config.model_copy(update={"pool": pool})).double()
        torch.testing.assert_close(other(images), model.head(x[:, place]))


def test_uint8_and_low_precision():
    model = build("classifier", small()).bfloat16()
    logits = model(pixels(2, 2, 8, 8))
    total, _ = model.loss(pixels(2, 2, 8, 8), torch.tensor([0, 1]))
    assert logits.dtype == torch.bfloat16 and total.dtype == torch.float32


@pytest.mark.parametrize("position", ["none", "sin_cos"])
def test_images_of_other_sizes(position):
    model = build("classifier", small(position=position)).double()
    images = pixels(2, 2, 6, 10)
    assert model(images).shape == (2, 3)
    if position == "sin_cos":
        x = model.patches(images.double() / 255) + sin_cos_2d(3, 5, 16)
        x, _ = model.backbone(x, grid=Grid((3, 5)))
        torch.testing.assert_close(model(images), model.head(x.mean(1)))


def test_images_that_do_not_fit():
    model = build("classifier", small(position="learned"))
    for shape, key in [
        ((1, 2, 6, 10), "6 x 10.*position: learned"),
        ((1, 2, 9, 8), "patch: 2"),
        ((1, 3, 8, 8), "channels: 2"),
    ]:
        with pytest.raises(ValueError, match=key):
            model(torch.zeros(shape))


def test_soft_labels_and_smoothing():
    model = build("classifier", small()).double()
    images, labels = pixels(4, 2, 8, 8), torch.tensor([0, 1, 2, 1])
    hard, count = model.loss(images, labels)
    soft, same = model.loss(images, F.one_hot(labels, 3).float())
    torch.testing.assert_close(hard, soft)
    assert count == same == 4
    smooth, _ = model.loss(images, labels, smoothing=0.3)
    spread = 0.7 * F.one_hot(labels, 3).double() + 0.1
    torch.testing.assert_close(smooth, -(spread * model(images).log_softmax(-1)).sum())


def test_all_problems_of_a_configuration_are_told_at_once():
    with pytest.raises(ConfigError) as raised:
        small(image_size=9, d_model=18, position="sin_cos", pool="cls", mean=[0.5], std=[1.0, 1.0, 1.0])
    keys = [line.partition(":")[0] for line in raised.value.problems]  # a line for each
    assert keys == ["image_size", "position", "mean", "std", "pool"]
    with pytest.raises(ConfigError, match="std"):
        small(std=[1.0, 0.0])
    with pytest.raises(ConfigError, match="patch: 16"):
        small(patch=16)
    with pytest.raises(ConfigError, match="position"):
        small(positions="sinusoidal")


def test_a_recipe_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="'tnl-10m' describes a causal language model.*an image classifier"):
        parse(VisionConfig, {"recipe": "tnl-10m"})
    changed = parse(VisionConfig, {"recipe": "lightnet-vit-8px", "num_layers": 2, "classes": 4})
    assert (changed.num_layers, changed.classes, changed.init_std) == (2, 4, 64**-0.5)


@pytest.mark.parametrize("name", ["lightnet-vit", "vit", "hgrn2-vit", "gla"])
def test_families_take_sizes_and_images(name):
    assert name in families_of("classifier") or name == "gla"  # a mixer without a family gets one
    config = family(name, "classifier")(32, 2, 2, 48, image_size=8, patch=4, channels=1, classes=3)
    assert kind_of(config).module is ImageClassifier
    model = build("classifier", config)
    assert config.num_layers == 2 and model(pixels(2, 1, 8, 8)).shape == (2, 3)
