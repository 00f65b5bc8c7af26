"""The configuration of a model: a layout of layers, their options, and what surrounds them.

In a file a model is a recipe's name, a recipe with changes, or everything spelled out:

    model: tnl-10m

    model: {recipe: tnl-10m, vocab_size: 4096}

    model:
      d_model: 256
      layout: (tnl+sglu x3 attention+swiglu) x2
      options: {tnl: {num_heads: 4}, attention: {num_heads: 4, window: 128}}
"""

from typing import Any, ClassVar

from pydantic import Field, model_validator

import linnet.layers  # noqa: F401  (registers the layers)
from linnet.config import Config, ConfigError, nearest, parse
from linnet.layers.base import CHANNELS, MIXERS, LayerContext, find_channel, find_mixer
from linnet.layers.norm import NormKind
from linnet.layers.positions.tpe import TpeConfig
from linnet.models.layout import LayerSpec, parse_layout


class ModelConfig(Config):
    """Everything that fixes a causal language model up to its weights.

    After validation `options` holds the complete options of each layer that the layout names.
    """

    ELSEWHERE: ClassVar = dict.fromkeys(
        ("num_layers", "n_layers", "n_layer", "layers", "depth"),
        "layers and their number are in `layout`, for example 'tnl+sglu x6'",
    )

    d_model: int = Field(ge=1, description="width D of the residual stream")
    layout: str = Field(description="the layers, for example 'tnl+sglu x24'")
    vocab_size: int = Field(256, ge=2, description="number of tokens")
    options: dict[str, dict[str, Any]] = Field({}, description="options of each kind of layer, by its name")
    aliases: dict[str, str] = Field({}, description="short names for blocks, used in the layout")
    norm: NormKind = Field("rmsnorm", description="norm before each layer and before the head")
    norm_eps: float | None = Field(
        None, gt=0, description="of the model's norms; null is the kind's own (1e-6, LayerNorm 1e-5)"
    )
    tpe: TpeConfig | None = Field(None, description="Toeplitz position encoding after the embedding; null for none")
    tie_embeddings: bool = Field(True, description="the head shares the weights of the embedding")
    embedding_scale: float = Field(1.0, gt=0, description="TNL v1 uses sqrt(d_model)")
    init_std: float = Field(0.02, gt=0, description="of linear layers and embeddings; residual ends divide by sqrt(2L)")

    @model_validator(mode="before")
    @classmethod
    def _expand_recipe(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"recipe": values}
        if isinstance(values, dict) and "recipe" in values:
            from linnet.models.recipes import get_recipe  # recipes are written in terms of this class

            changes = {key: value for key, value in values.items() if key != "recipe"}
            recipe = get_recipe(values["recipe"]).model_dump()
            if changes.get("layout", recipe["layout"]) != recipe["layout"]:
                recipe["options"] = {}
            options = dict(recipe["options"])
            for name, layer_options in (changes.pop("options", None) or {}).items():
                options[name] = {**options.get(name, {}), **layer_options}
            return {**recipe, **changes, "options": options}
        return values

    @model_validator(mode="after")
    def _check_layers(self) -> "ModelConfig":
        blocks = parse_layout(self.layout, self.aliases)
        used = {name for block in blocks for name in block if name}
        problems = [
            f"options.{name}: the layout {self.layout!r} has no such layer; {nearest(name, used)}"
            for name in self.options
            if name not in used
        ]
        resolved = {}
        for name in sorted(used):
            layer = find_mixer(name) if name in MIXERS else find_channel(name)
            try:
                options = parse(layer.Config, self.options.get(name, {}))
                self._try(layer, options)
                resolved[name] = options.model_dump()
            except ConfigError as error:
                problems += [f"options.{name}.{problem}" for problem in error.problems]
            except ValueError as error:
                text = str(error)  # of a part of the layer, where it does not begin with the name
                problems.append(f"options.{text}" if text.startswith(f"{name}.") else f"options.{name}: {text}")
        if problems:
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "options", resolved)
        return self

    def _try(self, layer: type, options: Config) -> None:
        """Builds one layer without memory, so that its own checks speak before any work."""
        import torch

        with torch.device("meta"):
            layer(options, LayerContext(d_model=self.d_model, norm=self.norm))

    @property
    def blocks(self) -> list[LayerSpec]:
        """The stack, first to last."""
        return parse_layout(self.layout, self.aliases)

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    def layer_options(self, name: str) -> Config:
        """The options of one kind of layer."""
        layer = MIXERS.get(name) or CHANNELS[name]
        return parse(layer.Config, self.options.get(name, {}))

    def shown_option(self, key: str) -> Any:
        """The value of an option (num_heads, inner, ...) in the first kind of layer that has it, or None."""
        for name in dict.fromkeys(name for block in self.blocks for name in block if name):
            if key in self.options.get(name, {}):
                return self.options[name][key]
        return None
