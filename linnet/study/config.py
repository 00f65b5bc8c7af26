"""What a study is: architectures x compute budgets x sizes, one question asked of many runs.

The ladder is an IsoFLOP design (Hoffmann et al. 2022, approach 2): within a budget every run spends the same training
FLOPs (the exact count, `linnet.models.costs.flops_exact`) on a model of another size, so that the loss over the size
has a minimum. With `tokens` in place of `budgets` every size sees the same number of tokens instead, as in paper 000,
section 3.3, and the optimum is read from the envelope of the training curves.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from linnet.config import Config
from linnet.data import DataConfig
from linnet.study.executors import ExecutorConfig


def _size(value: Any) -> Any:
    """`[64, 3]`, `[64, 3, 4]` and `70m` are short for the mapping."""
    if isinstance(value, str):
        return {"recipe": value}
    if isinstance(value, list) and 2 <= len(value) <= 3:
        return dict(zip(("d_model", "num_layers", "num_heads"), value, strict=False))
    return value


def _sizes(value: Any) -> Any:
    """`{widths: [...], layers: [...]}` is short for every pair of the two."""
    if (
        isinstance(value, dict)
        and set(value) == {"widths", "layers"}
        and all(isinstance(v, list) for v in value.values())
    ):
        return [{"d_model": width, "num_layers": layers} for layers in value["layers"] for width in value["widths"]]
    return value


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _constant(value: Any) -> Any:
    """A number is one value for all sizes."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"value": value, "exponent": 0.0, "maximum": value} if number else value


class Size(Config):
    """A rung of the ladder: a shape, or the published size `recipe` (`70m` means the recipe `<family>-70m`).

    Short forms in YAML: `[d_model, num_layers]`, `[d_model, num_layers, num_heads]`, `70m`.

    Attributes:
        d_model: width.
        num_layers: blocks; a pattern of blocks repeats until it has so many.
        num_heads: heads; default: as the family has them at this width.
        inner: inner width of the channel mixers; default: as the family has it.
        recipe: a published size of the family, such as `70m`, in place of a shape.
    """

    d_model: int | None = Field(None, gt=0)
    num_layers: int | None = Field(None, gt=0)
    num_heads: int | None = Field(None, gt=0)
    inner: int | None = Field(None, gt=0)
    recipe: str | None = None

    @model_validator(mode="after")
    def _one_form(self):
        shape = (self.d_model, self.num_layers, self.num_heads, self.inner)
        if self.recipe is None and (self.d_model is None or self.num_layers is None):
            raise ValueError("a size needs d_model and num_layers, or the name of a published size such as 70m")
        if self.recipe is not None and any(part is not None for part in shape):
            raise ValueError(f"a size is a shape or a recipe, not both (recipe {self.recipe!r}); drop one")
        return self

    @property
    def label(self) -> str:
        """Short name in tables: `64x3`, or `70m`."""
        return self.recipe or f"{self.d_model}x{self.num_layers}"


# `json_schema_input_type` gives the short forms to `linnet schema`.
_OneSize = Annotated[Size, BeforeValidator(_size, json_schema_input_type=Size | str | list[int])]
Sizes = Annotated[
    list[_OneSize],
    BeforeValidator(_sizes, json_schema_input_type=list[_OneSize] | dict[Literal["widths", "layers"], list[int]]),
    Field(min_length=1),
]


class ByWidth(Config):
    """A number that follows the model's width: value * (d_model / width) ** exponent, at most `maximum`.

    Attributes:
        value: the number at `width`.
        width: the width d_model that `value` belongs to.
        exponent: of d_model / width.
        maximum: upper bound at small widths.
    """

    value: float = Field(gt=0)
    width: int = Field(gt=0)
    exponent: float
    maximum: float = Field(float("inf"), gt=0)

    def at(self, d_model: int) -> float:
        """The number at this width, rounded to 4 digits so that configurations read well."""
        return float(f"{min(self.maximum, self.value * (d_model / self.width) ** self.exponent):.4g}")


class LearningRate(ByWidth):
    """Peak learning rate by width. A bare number in YAML is one rate for all sizes.

    The default, 3e-3 at width 64 falling as 1 / width, keeps small models of every family near their best rate, so
    that the ladder compares sizes rather than learning rates.
    """

    value: float = Field(3e-3, gt=0)
    width: int = Field(64, gt=0)
    exponent: float = -1.0
    maximum: float = Field(1e-2, gt=0)


class InitStd(ByWidth):
    """Standard deviation of the first weights by width. A bare number in YAML is one for all sizes.

    The published 0.02 belongs to widths from 512 up; a laptop's widths of 16 to 100 start too small with it and learn
    late, so the default keeps 0.02 at 512 and follows 1 / sqrt(width) (docs/negative-results.md has the numbers).
    """

    value: float = Field(0.02, gt=0)
    width: int = Field(512, gt=0)
    exponent: float = -0.5


Rate = Annotated[LearningRate, BeforeValidator(_constant, json_schema_input_type=LearningRate | float)]
Std = Annotated[InitStd, BeforeValidator(_constant, json_schema_input_type=InitStd | float)]


class Architecture(Config):
    """One line of the comparison. `tnl` in YAML is short for `{name: tnl}`, the family of that name.

    Attributes:
        name: label in tables and figures.
        family: a model family (`linnet.models.recipes.FAMILIES`) or an outside mixer's name; default `name`.
        layout: in place of a family: a pattern of blocks, repeated until the size's `num_layers` is reached
            (`tnl+sglu tnl+sglu attention+swiglu`).
        options: options of the layers by layer name.
        sizes, seq_len, batch_size, learning_rate: in place of the study's.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    family: str | None = None
    layout: str | None = None
    options: dict[str, dict[str, Any]] = {}
    sizes: Sizes | None = None
    seq_len: int | None = Field(None, gt=0)
    batch_size: int | None = Field(None, gt=0)
    learning_rate: Rate | None = None

    @model_validator(mode="after")
    def _one_form(self):
        if self.family is not None and self.layout is not None:
            raise ValueError(f"architecture {self.name!r} has a family and a layout; drop one")
        return self


class Bounds(Config):
    """Lowest and highest tokens per non-embedding parameter that are worth a run.

    Attributes:
        low: points with fewer are dropped.
        high: points with more are dropped.
    """

    low: float = Field(0.0, ge=0)
    high: float = Field(float("inf"), gt=0)

    @model_validator(mode="after")
    def _ordered(self):
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


def _bounds(value: Any) -> Any:
    return {"low": value[0], "high": value[1]} if isinstance(value, list) and len(value) == 2 else value


_OneArchitecture = Annotated[Architecture, BeforeValidator(_named, json_schema_input_type=Architecture | str)]


class StudyConfig(Config):
    """A ladder of runs and how to train them.

    Attributes:
        name: of the study and of its folder.
        architectures: family names, or mappings (see `Architecture`).
        budgets: training FLOPs per run, counted exactly; in place of `tokens`.
        tokens: training tokens per run; in place of `budgets`.
        sizes: shapes (see `Size`), or `{widths: [...], layers: [...]}` for every pair.
        seq_len: tokens per sequence.
        batch_size: sequences per step, one number or one per budget.
        learning_rate: a number, or how it falls with width (see `LearningRate`).
        init_std: the same for the scale of the first weights (see `InitStd`).
        data: the text and its tokenizer, as in a training.
        train: further settings of `linnet.train.TrainConfig`, the same for all runs (optimizer, schedule, ...).
        seeds: every point is run once for each.
        minimum_steps: points with fewer optimizer steps are dropped: they would measure the warm-up.
        tokens_per_param: `[low, high]`; points outside are dropped, so that the sizes follow the budget.
        curve_points: points of a training curve that each run records.
        plugins: outside mixers, `path/to/file.py:Class`.
        executor: where runs are trained, and how many at a time.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    architectures: Annotated[list[_OneArchitecture], Field(min_length=1)]
    budgets: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = []
    tokens: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = []
    sizes: Sizes | None = None
    seq_len: int = Field(256, gt=0)
    batch_size: Annotated[int, Field(gt=0)] | list[Annotated[int, Field(gt=0)]] = 8
    learning_rate: Rate = LearningRate()
    init_std: Std = InitStd()
    data: DataConfig = DataConfig()
    train: dict[str, Any] = {}
    seeds: list[int] = Field([0], min_length=1)
    minimum_steps: int = Field(20, gt=0)
    tokens_per_param: Annotated[Bounds, BeforeValidator(_bounds, json_schema_input_type=Bounds | list[float])] = (
        Bounds()
    )
    curve_points: int = Field(60, gt=1)
    plugins: list[str] = []
    executor: ExecutorConfig = ExecutorConfig()

    @classmethod
    def extra_problems(cls, values: Any) -> list[str]:
        """Unknown families and shapes that the layers refuse, which planning tells once all keys are right."""
        from linnet.study.ladder import model_problems  # is written in terms of this class

        if not isinstance(values, dict):
            return []
        part = {key: values[key] for key in ("architectures", "sizes", "plugins") if key in values}
        try:
            config = cls.model_validate({"name": "study", "budgets": [1.0], **part})
        except ValidationError:
            return []
        return model_problems(config)

    # Fields are validated in the order above, so a check can look at what stands before it.

    @field_validator("architectures")
    @classmethod
    def _distinct_names(cls, architectures: list[Architecture]) -> list[Architecture]:
        names = [architecture.name for architecture in architectures]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} comes twice; give one of them another `name`")
        return architectures

    @field_validator("budgets", "tokens", "seeds")
    @classmethod
    def _distinct(cls, values: list) -> list:
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"{', '.join(f'{value:g}' for value in twice)} comes twice; drop one")
        return values

    @field_validator("tokens")
    @classmethod
    def _one_kind(cls, tokens: list[float], info: ValidationInfo) -> list[float]:
        if "budgets" in info.data and bool(tokens) == bool(info.data["budgets"]):
            given = "both are given; drop one" if tokens else "neither is given"
            raise ValueError(f"a study has `budgets` (training FLOPs of a run) or `tokens` (of a run), but {given}")
        return tokens

    @field_validator("sizes")
    @classmethod
    def _sizes_for_all(cls, sizes: list[Size] | None, info: ValidationInfo) -> list[Size] | None:
        without = [a.name for a in info.data.get("architectures", []) if a.sizes is None]
        if sizes is None and without:
            raise ValueError(f"{', '.join(without)} has no sizes; give some, for example [[32, 2], [64, 3]]")
        return sizes

    @field_validator("batch_size")
    @classmethod
    def _one_a_budget(cls, batch_size: int | list[int], info: ValidationInfo) -> int | list[int]:
        targets = info.data.get("budgets") or info.data.get("tokens")
        if isinstance(batch_size, list) and targets and len(batch_size) != len(targets):
            count = f"{len(batch_size)} numbers for {len(targets)} budgets"
            raise ValueError(f"{count}; give one for each, or one number for all")
        return batch_size

    @property
    def targets(self) -> list[float]:
        """The budgets, or the token counts where the study is by tokens."""
        return self.budgets or self.tokens
