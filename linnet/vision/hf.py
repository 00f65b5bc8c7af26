"""Vision Transformers (arXiv:2010.11929) and DeiT (arXiv:2012.12877) as transformers and timm save them.

All are pre-norm stacks of softmax attention and a GELU perceptron with biases, a class token and a learned table of
positions. transformers keeps q, k and v apart; timm has one matrix of their rows. Both project patches by a convolution
whose kernel and stride are the patch. A DeiT without a distillation token is a ViT; transformers' own `deit` has one.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from linnet.config import ConfigError, load_json, parse, refuse
from linnet.hf.export import PREPROCESSOR, joined
from linnet.hf.layouts.base import BLOCK, LARGEST, Part, Plan, Settings, stack
from linnet.models import StackConfig
from linnet.runs import load_model
from linnet.runs.files import check_empty, new_folder, save_tensors
from linnet.runs.folder import CLASSES
from linnet.vision.config import VisionConfig

ACTIVATIONS = {name: name for name in ("gelu", "relu", "relu2", "silu")}
EXPORT = "export as ViT"
TRANSFORMERS = {
    "mixer_norm": "layernorm_before",
    "mixer.q_proj": "attention.attention.query",
    "mixer.k_proj": "attention.attention.key",
    "mixer.v_proj": "attention.attention.value",
    "mixer.out_proj": "attention.output.dense",
    "channel_norm": "layernorm_after",
    "channel.up_proj": "intermediate.dense",
    "channel.down_proj": "output.dense",
}
TIMM = {
    "mixer_norm": "norm1",
    "mixer.q_proj": ("attn.qkv", 0),
    "mixer.k_proj": ("attn.qkv", 1),
    "mixer.v_proj": ("attn.qkv", 2),
    "mixer.out_proj": "attn.proj",
    "channel_norm": "norm2",
    "channel.up_proj": "mlp.fc1",
    "channel.down_proj": "mlp.fc2",
}
# timm's names of models without layers that Linnet lacks: width, layers and heads of each size.
ARCHITECTURE = re.compile(r"(?:vit|deit)_(tiny|small|base|large)_patch(\d+)_(\d+)(?:\..*)?")
SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}


def read(settings: Settings) -> Plan:
    """Reads config.json of transformers' ViTForImageClassification."""
    names = settings.values.get("id2label")
    classes = len(names) if isinstance(names, Mapping) else settings.integer("num_labels", 2, LARGEST["vocabulary"])
    width = settings.integer("hidden_size", 768)
    model = {
        "d_model": width,
        "num_layers": settings.integer("num_hidden_layers", 12, LARGEST["layers"]),
        "num_heads": settings.integer("num_attention_heads", 12),
        "inner": settings.integer("intermediate_size", 3072),
        "activation": settings.choice("hidden_act", "gelu", ACTIVATIONS),
        "norm_eps": settings.number("layer_norm_eps", 1e-12),
        "image_size": _side(settings, "image_size", 224, 1 << 14),
        "patch": _side(settings, "patch_size", 16, 1 << 10),
        "channels": settings.integer("num_channels", 3, 1 << 10),
        "classes": classes,
    }
    settings.only("qkv_bias", True, why="Linnet has biases in all linear layers of attention, or in none")
    ends = {
        "patches.proj": "vit.embeddings.patch_embeddings.projection",
        "backbone.norm": "vit.layernorm",
        "head": "classifier",
    }
    tokens = {"class_token": "vit.embeddings.cls_token", "position": "vit.embeddings.position_embeddings"}
    pixels, ignored = _pixels(settings, int(model["channels"])), (r"(vit\.)?pooler\..*",)
    return _plan(settings, model, pixels, ends, tokens, "vit.encoder.layer.{}", TRANSFORMERS, ignored)


def _pixels(settings: Settings, channels: int) -> dict[str, Any]:
    """Returns `mean` and `std` of pixels from 0 to 1, as preprocessor_config.json has them for those it rescales."""
    images = Settings(settings.images)
    normalises, rescales = images.flag("do_normalize", True), images.flag("do_rescale", True)
    factor = images.number("rescale_factor", 1 / 255) if rescales else 1.0
    settings.problems += [f"{PREPROCESSOR}: {problem}" for problem in images.problems]
    pixels = {key: settings.images.get(f"image_{key}") if normalises else None for key in ("mean", "std")}
    if math.isclose(times := 255 * factor, 1.0, rel_tol=1e-4) or not settings.images:
        return pixels
    pixels["std"] = pixels["std"] or [1.0] * channels
    numbers = {key: values for key, values in pixels.items() if isinstance(values, list)}
    if any(type(number) not in (int, float) for values in numbers.values() for number in values):
        return pixels  # the model's own check names them
    return pixels | {key: [number / times for number in values] for key, values in numbers.items()}


def read_timm(settings: Settings) -> Plan:
    """Reads config.json of timm: the name of the architecture, and `model_args` where they differ from it."""
    match = ARCHITECTURE.fullmatch(str(settings.values.get("architecture")))
    if match is None:
        name = settings.values.get("architecture")
        raise ConfigError(
            [f"architecture: {name!r} is not one that Linnet reads: vit_ or deit_, a size ({', '.join(SIZES)}), "
             "_patchN_N, such as deit_small_patch16_224"], "config.json"
        )  # fmt: skip
    width, layers, heads = SIZES[match[1]]
    arguments, about = (settings.values.get(key) or {} for key in ("model_args", "pretrained_cfg"))
    known = {"img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "num_classes"}
    known.add("global_pool")
    settings.problems += [f"model_args.{key}: Linnet's ViT has no such option" for key in arguments if key not in known]
    args = Settings({**settings.values, **arguments}, problems=settings.problems)
    width = args.integer("embed_dim", width)
    model = {
        "d_model": width,
        "num_layers": args.integer("depth", layers, LARGEST["layers"]),
        "num_heads": args.integer("num_heads", heads),
        "inner": int(width * args.number("mlp_ratio", 4.0)),
        "activation": "gelu",
        "norm_eps": 1e-6,
        "image_size": _side(args, "img_size", int(match[3]), 1 << 14),
        "patch": _side(args, "patch_size", int(match[2]), 1 << 10),
        "channels": args.integer("in_chans", 3, 1 << 10),
        "classes": args.integer("num_classes", 1000, LARGEST["vocabulary"]),
    }
    args.only("global_pool", "token", why="Linnet reads timm's models with a class token")
    ends = {"patches.proj": "patch_embed.proj", "backbone.norm": "norm", "head": "head"}
    tokens = {"class_token": "cls_token", "position": "pos_embed"}
    pixels = {key: about.get(key) for key in ("mean", "std")}
    return _plan(settings, model, pixels, ends, tokens, "blocks.{}", TIMM)


def _side(settings: Settings, key: str, default: int, largest: int) -> int:
    """Returns the side of a square, which may be given as a pair of equal numbers."""
    value = settings.values.get(key)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        settings = Settings({key: value[0]}, problems=settings.problems)
    return settings.integer(key, default, largest)


def write(config: StackConfig) -> dict[str, Any]:
    """Returns the config.json of transformers' ViT from a configuration; `read` gives that model back.

    Raises:
        ConfigError: names all settings that a ViT does not have.
    """
    shape = _shape(config)
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": shape["d_model"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "intermediate_size": shape["inner"],
        "hidden_act": shape["activation"],
        "layer_norm_eps": shape["norm_eps"],
        "image_size": shape["image_size"],
        "patch_size": shape["patch"],
        "num_channels": shape["channels"],
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": config.init_std,
    }


def write_timm(config: StackConfig) -> dict[str, Any]:
    """Returns the config.json of timm's VisionTransformer, as `write` does; all sizes are in `model_args`."""
    shape = _shape(config)
    problems = [
        f"{key}: {shape[key]!r} is not what timm's ViT has, which is {needed!r}; export with --to vit"
        for key, needed in (("activation", "gelu"), ("norm_eps", 1e-6))
        if shape[key] != needed
    ]
    refuse(problems, EXPORT)
    names = {"d_model": "embed_dim", "num_layers": "depth", "image_size": "img_size", "patch": "patch_size"}
    names |= {"channels": "in_chans", "num_heads": "num_heads"}
    side = shape["image_size"]
    return {
        "architecture": "vit_base_patch16_224",
        "num_classes": shape["classes"],
        "num_features": shape["d_model"],
        "global_pool": "token",
        "model_args": {its: shape[key] for key, its in names.items()}
        | {"mlp_ratio": shape["inner"] / shape["d_model"]},
        "pretrained_cfg": {
            "input_size": [shape["channels"], side, side],
            "num_classes": shape["classes"],
            "mean": getattr(config, "mean", None) or [0.0] * shape["channels"],
            "std": getattr(config, "std", None) or [1.0] * shape["channels"],
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def _shape(config: StackConfig) -> dict[str, Any]:
    """Returns what defines a ViT. Raises ConfigError with all settings of the configuration that no ViT has."""
    kinds = {spec.names for spec in config.blocks}
    if not isinstance(config, VisionConfig) or config.stack.before or kinds != {("attention", "mlp")}:
        problem = (
            f"layout: {config.layout!r} is not attention+mlp alone, so it is not a ViT; only Linnet can run this model"
        )
        raise ConfigError([problem], EXPORT)
    attention, mlp = config.options["attention"], config.options["mlp"]
    shape = {
        "d_model": config.d_model,
        "num_layers": config.num_layers,
        "num_heads": attention["num_heads"],
        "inner": mlp["inner"] or 4 * config.d_model,
        "activation": mlp["activation"],
        "norm_eps": config.norm_eps or 1e-5,
        "image_size": config.image_size,
        "patch": config.patch,
        "channels": config.channels,
        "classes": config.classes,
    }
    problems, vit = [], parse(VisionConfig, _values(shape, {}), EXPORT)
    for key in ("norm", "norm_after", "residual_scale", "residual_norm", "bias", "pool", "position", "head_bias"):
        if getattr(config, key) != getattr(vit, key):
            problems.append(f"{key}: {getattr(config, key)!r} is not what a ViT has, which is {getattr(vit, key)!r}")
    for spec in config.blocks:
        for name in ("attention", "mlp"):
            options, its = (model.layer_options(name, spec).model_dump() for model in (config, vit))
            same = {"num_kv_heads": (0, shape["num_heads"]), "head_dim": (0, config.d_model // shape["num_heads"])}
            same |= {"inner": (0, shape["inner"]), "bias": (False, True)}  # 0 is the shape's; the model's bias is all
            problems += [
                f"options.{name}.{key}: {value!r} is not what a ViT has, which is {its.get(key, 'its default')!r}"
                for key, value in options.items()
                if value not in same.get(key, (its.get(key),))
            ]
    refuse(problems, EXPORT)
    return shape


def _values(shape: Mapping[str, Any], pixels: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain values of a `VisionConfig` that is a ViT of a shape."""
    inputs = {key: shape[key] for key in ("image_size", "patch", "channels", "classes", "norm_eps", "d_model")}
    return {
        **inputs,
        **{key: value for key, value in pixels.items() if value is not None},
        "layout": f"attention+mlp x{shape['num_layers']}",
        "options": {
            "attention": {"num_heads": shape["num_heads"], "rope": False},
            "mlp": {"inner": shape["inner"], "activation": shape["activation"]},
        },
        "norm": "layernorm",
        "bias": "all",
        "pool": "cls",
        "position": "learned",
    }


def _plan(
    settings: Settings,
    shape: Mapping[str, Any],
    pixels: Mapping[str, Any],
    ends: Mapping[str, str],
    tokens: Mapping[str, str],
    layer: str,
    names: Mapping[str, str | tuple[str, int]],
    ignored: tuple[str, ...] = (),
) -> Plan:
    """Returns the model of a shape and the sources of its parameters.

    Args:
        pixels: `mean` and `std` of the pixels, of each channel, or None.
        ends, tokens, names: Linnet's names of modules and the source's, outside and inside of layers; a pair is a
            matrix that holds q, k and v, and the place in it.
        layer: prefix of a layer's names in the source, with {} for its number.
        ignored: expressions for tensors that may be unused.
    """
    settings.check()
    model = parse(VisionConfig, _values(shape, pixels), "config.json")
    width, patch, count = model.d_model, model.patch, 1 + (model.image_size // model.patch) ** 2
    parts = {f"{module}.{kind}": Part(f"{its}.{kind}") for module, its in ends.items() for kind in ("weight", "bias")}
    kernel = (width, model.channels, patch, patch)
    parts["patches.proj.weight"] = Part(f"{ends['patches.proj']}.weight", view=kernel)
    parts["class_token.weight"] = Part(tokens["class_token"], view=(1, 1, width))
    parts["position.weight"] = Part(tokens["position"], view=(1, count, width))
    inside = {}
    for name, its in names.items():
        for kind in ("weight", "bias"):
            source, index = its if isinstance(its, tuple) else (its, 0)
            rows = 3 * width if isinstance(its, tuple) else 0
            inside[f"{name}.{kind}"] = Part(f"{source}.{kind}", index * width, rows)
    return Plan(model, parts | stack(range(model.num_layers), BLOCK, layer, inside), ignored)


def export_vit(
    path: str | Path, out: str | Path, target: Literal["vit", "timm"] = "vit", *, allow_plugins: bool = False
) -> Path:
    """Writes an image classifier of attention+mlp as a ViT of transformers or timm, which needs no code of Linnet's.

    transformers: `ViTForImageClassification.from_pretrained(out)`, with preprocessor_config.json for its processors.
    timm: `timm.create_model("local-dir:" + out, pretrained=True)`. Averaged weights are written where there are some.

    Args and returns as `export`.

    Raises:
        ConfigError: as `export`, or the model has settings that a ViT does not have; the message lists their keys.
    """
    path, out = Path(path), Path(out)
    check_empty(out, "export")
    model, _ = load_model(path, allow_plugins=allow_plugins, kinds=("classifier",))
    config = model.config
    names = _class_names(path, config.classes)
    if target == "vit":
        values = write(config)
        values["id2label"] = {str(index): name for index, name in enumerate(names)}
        values["label2id"] = {name: index for index, name in enumerate(names)}
        plan, files = read(Settings(values)), {PREPROCESSOR: _preprocessor(config)}
    else:
        values = write_timm(config) | {"label_names": names}
        plan, files = read_timm(Settings(values)), {}
    files["config.json"] = values
    with new_folder(out, "export") as folder:
        save_tensors(folder / "model.safetensors", joined(plan, model.state_dict()), {"format": "pt"})
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return out


def _class_names(path: Path, classes: int) -> list[str]:
    """Returns the names of the classes: those beside the model, or transformers' default names."""
    try:
        names = load_json(path / CLASSES)
    except (OSError, ValueError):
        names = None
    if isinstance(names, list) and len(names) == classes and len(set(map(str, names))) == classes:
        return [str(name) for name in names]
    return [f"LABEL_{index}" for index in range(classes)]


def _preprocessor(config: VisionConfig) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json: resize, divide by 255, subtract the mean, divide by std."""
    size = {"height": config.image_size, "width": config.image_size}
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": config.mean is not None or config.std is not None,
        "image_mean": config.mean or [0.0] * config.channels,
        "image_std": config.std or [1.0] * config.channels,
    }


export_timm = partial(export_vit, target="timm")
VIT_LAYOUT, TIMM_LAYOUT = ("ViT", read, ""), ("ViT of timm", read_timm, "")
