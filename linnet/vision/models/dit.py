"""Denoisers: DiT (arXiv:2212.09748) and LightNet's (paper 003, Table 11).

Paper 003 gives parameters without saying how the time step and the class enter. Only two tokens before the patches fit
all four counts (33.53, 131.06, 470.05 and 678.52 M here for 33, 131, 470 and 680): adaLN in every block adds half. The
width of the gated units at L is 2816, as in the paper's language models, and the gate has rank 64. Heads are 64 wide
(of DiT-XL 72): the paper's head counts (6 at B) give 128. Recipes are for latents of 32 x 32 (images of 256 x 256).

The small recipes start linear layers at 1 / sqrt(d_model), as the small classifiers do.
"""

from functools import partial

from linnet.models.recipes.registry import default_heads, register_family, register_recipe
from linnet.vision.config import DenoiserConfig


@register_family("dit", kind="denoiser")
def dit(
    d_model: int,
    num_layers: int,
    num_heads: int = 0,
    inner: int = 0,
    image_size: int = 32,
    patch: int = 2,
    channels: int = 3,
    classes: int = 10,
) -> DenoiserConfig:
    """Softmax attention, a fixed table of positions, and adaLN-zero."""
    return DenoiserConfig(
        d_model=d_model,
        layout=f"attention+mlp x{num_layers}",
        options={
            "attention": {"num_heads": num_heads or default_heads(d_model), "rope": False},
            "mlp": {"inner": inner},
        },
        norm="layernorm",
        norm_eps=1e-6,
        bias="all",
        init="xavier",
        conditioning="adaln_zero",
        position="sin_cos",
        image_size=image_size,
        patch=patch,
        channels=channels,
        classes=classes,
    )


@register_family("lightnet-dit", kind="denoiser")
def lightnet_dit(
    d_model: int,
    num_layers: int,
    num_heads: int = 0,
    inner: int = 0,
    image_size: int = 32,
    patch: int = 2,
    channels: int = 3,
    classes: int = 10,
) -> DenoiserConfig:
    """LightNet with positions from LRPE and TPE; the time step and the class are two tokens before the patches."""
    return DenoiserConfig(
        d_model=d_model,
        layout=f"tpe lightnet+swiglu x{num_layers}",
        options={
            "lightnet": {"num_heads": num_heads or default_heads(d_model), "norm": "layernorm"},
            "swiglu": {"inner": inner},
        },
        norm="layernorm",
        init_std=d_model**-0.5,
        conditioning="tokens",
        position="none",
        image_size=image_size,
        patch=patch,
        channels=channels,
        classes=classes,
    )


def _latents(config: DenoiserConfig, options: dict[str, dict]) -> DenoiserConfig:
    """Returns a denoiser of latents 4 x 32 x 32 of ImageNet's classes, with other options of its layers."""
    values = config.model_dump() | {"image_size": 32, "patch": 2, "channels": 4, "classes": 1000, "init_std": 0.02}
    for layer, own in options.items():
        values["options"][layer] |= own
    return DenoiserConfig(**values)


def _dit_latents(d_model: int, num_layers: int, num_heads: int) -> DenoiserConfig:
    return _latents(dit(d_model, num_layers, num_heads), {})


def _lightnet_latents(d_model: int, num_layers: int, num_heads: int, inner: int) -> DenoiserConfig:
    return _latents(lightnet_dit(d_model, num_layers, num_heads, inner), {"lightnet": {"gate_rank": 64}})


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
