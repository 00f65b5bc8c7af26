"""Recipes of models of images: denoisers (DiT, LightNet) and classifiers (LightNet, DeiT, HGRN, Vim, TNN)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from linnet.models.recipes.registry import default_heads, register_family, register_recipe
from linnet.vision.config import DenoiserConfig, VisionConfig

Images = TypeVar("Images", DenoiserConfig, VisionConfig)


def _attention_layers(d_model: int, num_layers: int, num_heads: int, inner: int) -> dict[str, Any]:
    """Returns the keys of layers of softmax attention without rotations, with the biases of a ViT."""
    options = {"attention": {"num_heads": num_heads, "rope": False}, "mlp": {"inner": inner}}
    keys = {"d_model": d_model, "layout": f"attention+mlp x{num_layers}", "options": options}
    return {**keys, "norm": "layernorm", "norm_eps": 1e-6, "bias": "all"}


def _lightnet_layers(d_model: int, num_layers: int, num_heads: int, inner: int) -> dict[str, Any]:
    """Returns the keys of layers of LightNet with positions from LRPE and TPE."""
    options = {"lightnet": {"num_heads": num_heads, "norm": "layernorm"}, "swiglu": {"inner": inner}}
    layout = f"tpe lightnet+swiglu x{num_layers}"
    return {"d_model": d_model, "layout": layout, "options": options, "norm": "layernorm"}


def _hgrn2_layers(d_model: int, num_layers: int, num_heads: int, inner: int) -> dict[str, Any]:
    """Returns the keys of layers of HGRN2."""
    options = {"hgrn2": {"num_heads": num_heads}, "sglu": {"inner": inner}}
    return {"d_model": d_model, "layout": f"hgrn2+sglu x{num_layers}", "options": options, "norm": "srmsnorm"}


def _family(
    name: str, config: type[Images], layers: Callable[..., dict[str, Any]], **keys: Any
) -> Callable[..., Images]:
    """Registers a family of models of images and returns it.

    Args:
        layers: width, depth, heads and inner width -> the keys of the layers.
        keys: further keys; without `init`, linear layers start at 1 / sqrt(d_model).
    """

    def build(
        d_model: int,
        num_layers: int,
        num_heads: int = 0,
        inner: int = 0,
        image_size: int = 32,
        patch: int = 2,
        channels: int = 3,
        classes: int = 10,
    ) -> Images:
        values = layers(d_model, num_layers, num_heads or default_heads(d_model), inner) | keys
        if "init" not in keys:
            values["init_std"] = d_model**-0.5
        return config(**values, image_size=image_size, patch=patch, channels=channels, classes=classes)

    return register_family(name, kind="classifier" if config is VisionConfig else "denoiser")(build)


def _changed(config: Images, options: Mapping[str, dict[str, Any]], **changes: Any) -> Images:
    """Returns a configuration with other keys, and other options of its layers."""
    values = config.model_dump() | changes
    for layer, changed in options.items():
        values["options"][layer] |= changed
    return type(config)(**values)


# Denoisers: DiT (arXiv:2212.09748) and LightNet's (paper 003, Table 11).
#
# Paper 003 gives parameters without saying how the time step and the class enter. Only two tokens before the patches
# fit all four counts (33.53, 131.06, 470.05 and 678.52 M here for 33, 131, 470 and 680): adaLN in every block adds
# half. The width of the gated units at L is 2816, as in the paper's language models, and the gate has rank 64. Heads
# are 64 wide (of DiT-XL 72): the paper's head counts (6 at B) give 128. Recipes are for latents of 32 x 32 (images of
# 256 x 256).
#
# The small recipes start linear layers at 1 / sqrt(d_model), as the small classifiers do.


# Softmax attention, a fixed table of positions, and adaLN-zero.
dit = _family("dit", DenoiserConfig, _attention_layers, init="xavier", conditioning="adaln_zero", position="sin_cos")
# LightNet with positions from LRPE and TPE; the time step and the class are two tokens before the patches.
lightnet_dit = _family("lightnet-dit", DenoiserConfig, _lightnet_layers, conditioning="tokens", position="none")

# Latents of ImageNet's classes, 4 x 32 x 32.
LATENTS = {"image_size": 32, "patch": 2, "channels": 4, "classes": 1000, "init_std": 0.02}


def _dit_latents(d_model: int, num_layers: int, num_heads: int) -> DenoiserConfig:
    return _changed(dit(d_model, num_layers, num_heads), {}, **LATENTS)


def _lightnet_latents(d_model: int, num_layers: int, num_heads: int, inner: int) -> DenoiserConfig:
    return _changed(lightnet_dit(d_model, num_layers, num_heads, inner), {"lightnet": {"gate_rank": 64}}, **LATENTS)


DIT = {"s": (384, 12, 6), "b": (768, 12, 12), "l": (1024, 24, 16), "xl": (1152, 28, 16)}
LIGHTNET = {"s": (384, 18, 6, 1024), "b": (768, 18, 12, 2048), "l": (1024, 36, 16, 2816), "xl": (1152, 42, 18, 3072)}
for _size, _dit in DIT.items():
    register_recipe(f"dit-{_size}", partial(_dit_latents, *_dit), kind="denoiser")
for _size, _lightnet in LIGHTNET.items():
    register_recipe(f"lightnet-dit-{_size}", partial(_lightnet_latents, *_lightnet), kind="denoiser")

# Digits and CIFAR-10: width, layers, heads, inner width (0: the layer's), then image size, patch, channels, classes.
register_recipe("dit-8px", lambda: dit(64, 4, 2, 0, 8, 2, 1, 10), kind="denoiser")
register_recipe("lightnet-dit-8px", lambda: lightnet_dit(64, 4, 2, 0, 8, 2, 1, 10), kind="denoiser")
register_recipe("dit-32px", lambda: dit(256, 12, 4, 0, 32, 2, 3, 10), kind="denoiser")
register_recipe("lightnet-dit-32px", lambda: lightnet_dit(256, 18, 4, 0, 32, 2, 3, 10), kind="denoiser")


# Image classifiers: LightNet (paper 003, Tables 1 and 12), DeiT (arXiv:2012.12877), HGRN and HGRN2 (paper 002, 4.4),
# Vim (arXiv:2401.09417), and TNN (arXiv:2305.04749; paper 002, Table 8).
#
# Departures. Heads are 64 wide everywhere: the head counts of paper 003 (Table 12) give widths of 24 to 48. LightNet's
# gate has rank 64. HGRN ends with the norm of its blocks; the authors' code ends it with SRMSNorm. The paper's HGRN2
# has biases and a table of 256 positions (inferred from its counts: its code is not public); Linnet's has neither and
# is 0.8 percent smaller. Vim has a class token in the middle of the patches; here its head reads the mean of the
# patches, so the token and its row of positions are missing (2 d_model parameters). TNN's filters are the same in both
# directions, and its network of distances is that of its language models; the small one is 1.2 percent below the print.
# Residual ends start divided by sqrt(2 L), as in all models of Linnet.
#
# The small recipes start linear layers at 1 / sqrt(d_model): with 0.02, models of width 64 learn digits only slowly.

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


# LightNet: positions from LRPE and TPE, so no table and no class token; it takes images of any size.
lightnet_vit = _family("lightnet-vit", VisionConfig, _lightnet_layers)
# Softmax attention with a learned table of positions and the mean of all patches (arXiv:2205.01580).
vit = _family("vit", VisionConfig, _attention_layers, position="learned")
# HGRN2 in two scans, forwards and backwards over the rows of patches.
hgrn2_vit = _family("hgrn2-vit", VisionConfig, _hgrn2_layers)


def hgrn_vit(d_model: int) -> VisionConfig:
    """HGRN in two scans: complex recurrences with an angle for each direction, and biases in all linear layers."""
    return VisionConfig(
        d_model=d_model,
        layout="hgrn+swiglu x12",
        options={"hgrn": {"complex": True, "theta_per_direction": True}, "swiglu": {"inner": 2 * d_model}},
        norm="layernorm",
        bias="all",
        **_imagenet(14),
    )


def vim(d_model: int) -> VisionConfig:
    """24 layers of Mamba in two scans, each with weights of its own, and no channel mixer."""
    return VisionConfig(
        d_model=d_model,
        layout="mamba x24",
        options={"mamba": {"conv_bias": True, "weights_per_direction": True}},
        norm="rmsnorm",
        position="learned",
        **_imagenet(16),
    )


def tnn_vit(d_model: int) -> VisionConfig:
    """TNN: Toeplitz matrices over the rows of patches, and a GLU as wide as the model."""
    return VisionConfig(
        d_model=d_model,
        layout="tnn+swiglu x12",
        options={"swiglu": {"inner": d_model}},
        norm="layernorm",
        **_imagenet(16),
    )


def _imagenet(patch: int) -> dict:
    return {"image_size": 224, "patch": patch, "channels": 3, "classes": 1000, "init_std": 0.02, **IMAGENET}


def _lightnet_imagenet(d_model: int, inner: int) -> VisionConfig:
    config = lightnet_vit(d_model, 12, d_model // 64, inner)
    return _changed(config, {"lightnet": {"gate_rank": 64}}, **_imagenet(16))


def _deit(d_model: int) -> VisionConfig:
    return _changed(vit(d_model, 12, d_model // 64), {}, pool="cls", **_imagenet(16))


def _hgrn2_imagenet(d_model: int) -> VisionConfig:
    return _changed(hgrn2_vit(d_model, 12, d_model // 64, 3 * d_model), {}, **_imagenet(14))


for size, (width, inner) in {"t": (192, 512), "s": (384, 1024), "b": (768, 2048)}.items():
    register_recipe(f"lightnet-vit-{size}", partial(_lightnet_imagenet, width, inner), kind="classifier")
for size, width in {"t": 192, "s": 384, "b": 768}.items():
    register_recipe(f"deit-{size}", partial(_deit, width), kind="classifier")
for name, build in (("hgrn-vit", hgrn_vit), ("hgrn2-vit", _hgrn2_imagenet), ("vim", vim), ("tnn-vit", tnn_vit)):
    for size, width in {"t": 192, "s": 384}.items():
        register_recipe(f"{name}-{size}", partial(build, width), kind="classifier")


def _small(
    build: Callable[..., VisionConfig],
    shape: tuple[int, int, int],
    images: tuple[int, int, int],
    mean: list[float],
    std: list[float],
) -> VisionConfig:
    """Returns a small recipe: of a family, (width, layers, heads), (image size, patch, channels), and its pixels."""
    return _changed(build(*shape, 0, *images, 10), {}, mean=mean, std=std)


SMALL = {
    "8px": ((64, 3, 2), (8, 2, 1), [0.305], [0.376]),  # digits
    "28px": ((96, 4, 3), (28, 4, 1), [0.286], [0.353]),  # Fashion-MNIST
    "32px": ((192, 12, 3), (32, 2, 3), [0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]),  # CIFAR-10
}
for size, (shape, images, mean, std) in SMALL.items():
    for name, family in (("lightnet-vit", lightnet_vit), ("vit", vit), ("hgrn2-vit", hgrn2_vit)):
        register_recipe(f"{name}-{size}", partial(_small, family, shape, images, mean, std), kind="classifier")
