"""The configuration of a study: architectures x compute budgets x sizes.

The ladder is an IsoFLOP design (Hoffmann et al. 2022, approach 2). All runs of one budget spend the same training FLOPs
(the exact count, `linnet.models.costs.flops_exact`) on models of different sizes, so the loss as a function of the size
has a minimum. With `tokens` instead of `budgets`, every size trains on the same number of tokens, as in paper 000,
section 3.3, and the optimum is read from the envelope of the training curves.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from linnet.companions import Offer
from linnet.config import Config, ConfigError, gather, nearest, parse, read_yaml
from linnet.data import DataConfig
from linnet.deprecation import renamed
from linnet.models import StackConfig
from linnet.parallel.config import ParallelConfig
from linnet.study.architectures import (
    Architecture,
    Base,
    InitStd,
    LearningRate,
    Rate,
    Size,
    Sizes,
    Std,
    load_plugins,
    make_rungs,
    short_size,
)
from linnet.study.executors import ExecutorConfig
from linnet.train import read_training


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Bounds(Config):
    """Range of tokens per non-embedding parameter in which points of the ladder are trained.

    Attributes:
        low: the ladder drops points with fewer tokens per parameter.
        high: the ladder drops points with more tokens per parameter.
    """

    low: float = Field(0.0, ge=0)
    high: float = Field(float("inf"), gt=0, allow_inf_nan=True)

    @model_validator(mode="after")
    def _ordered(self):
        if self.low >= self.high:
            raise ValueError(f"low: {self.low:g} must be below high: {self.high:g}")
        return self


def _bounds(value: Any) -> Any:
    return {"low": value[0], "high": value[1]} if isinstance(value, list) and len(value) == 2 else value


class Point(Config):
    """One run beside the grid, such as those that `linnet study --until` adds.

    The bounds of the grid (`minimum_steps`, `tokens_per_param`) do not apply to it.

    Attributes:
        architecture: name of one of the study's architectures.
        budget: training FLOPs of the run.
        size: its shape (see `Size`).
        seed: seed of its weights and of its sample order.
    """

    architecture: str
    budget: float = Field(gt=0, allow_inf_nan=False)
    size: Annotated[Size, BeforeValidator(short_size, json_schema_input_type=Size | str | list[int])]
    seed: int = Field(0, ge=0)


class BatchTokens(Config):
    """Tokens per step by budget and by size (paper 004, Table C.1).

    In YAML: `{4e18: 524288, 2e20: 1048576, below: {53e6: 262144}}`.

    Attributes:
        budgets: budget -> tokens per step. Other budgets have those of the nearest in log FLOPs.
        below: parameters (all of them) -> tokens per step of the models with fewer, whatever the budget.
    """

    budgets: dict[Annotated[float, Field(gt=0, allow_inf_nan=False)], Annotated[int, Field(gt=0)]] = Field(min_length=1)
    below: dict[Annotated[float, Field(gt=0, allow_inf_nan=False)], Annotated[int, Field(gt=0)]] = {}

    def at(self, budget: float, parameters: int) -> int:
        """Returns the tokens per step of a model at a budget."""
        small = [bound for bound in self.below if parameters < bound]
        if small:
            return self.below[min(small)]
        return self.budgets[min(self.budgets, key=lambda known: abs(math.log(known / budget)))]


def _batch_tokens(value: Any) -> Any:
    """Sorts the keys of a mapping into budgets and `below`."""
    if not isinstance(value, dict) or set(value) <= {"budgets", "below"}:
        return value
    budgets = {key: tokens for key, tokens in value.items() if key != "below"}
    return {"budgets": budgets} | ({"below": value["below"]} if "below" in value else {})


_InTokens = BeforeValidator(_batch_tokens, json_schema_input_type=BatchTokens | dict[str, int | dict[str, int]] | None)
_AsBounds = BeforeValidator(_bounds, json_schema_input_type=Bounds | list[float])
_OneArchitecture = Annotated[Architecture, BeforeValidator(_named, json_schema_input_type=Architecture | str)]


class StudyConfig(Config):
    """A ladder of runs and how to train them.

    Attributes:
        name: name of the study and of its folder.
        architectures: family names, or mappings (see `Architecture`).
        budgets: training FLOPs per run, counted exactly. Give either `budgets` or `tokens`.
        tokens: training tokens per run. Give either `tokens` or `budgets`.
        sizes: shapes (see `Size`), or `{widths: [...], layers: [...]}` for every pair.
        seq_len: tokens per sequence.
        batch_size: sequences per step, one number or one per budget.
        batch_tokens: tokens per step by budget and by size (see `BatchTokens`), in place of `batch_size`.
        learning_rate: a number, a rule by width (see `LearningRate`), or `table`, the rate of a size of paper 004.
        init_std: standard deviation of the initial weights: a number, or a rule by width (see `InitStd`).
        data: the text and its tokenizer, as in a training configuration.
        train: other settings of `linnet.train.TrainConfig`, the same for all runs (optimizer, schedule, ...).
        seeds: every point is trained once per seed.
        minimum_steps: points with fewer optimizer steps are dropped, because they would measure the warm-up.
        tokens_per_param: `[low, high]`; points outside are dropped, so that the sizes follow the budget.
        curve_points: number of points in the training curve that each run records.
        points: single runs beside the grid of budgets and sizes (see `Point`).
        rate_sensitivity: trains the median size at the median budget of each architecture at half and at two times its
            learning rate too. These runs take no part in fits (see `linnet.study.sensitivity`).
        plugins: mixers from outside Linnet, `path/to/file.py:Class`.
        executor: where runs are trained, and how many at the same time.
    """

    OBJECTIVE: ClassVar[str] = "text"  # the `train.objective` of this class of studies

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    architectures: Annotated[list[_OneArchitecture], Field(min_length=1)]
    budgets: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = []
    tokens: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = []
    sizes: Sizes | None = None
    seq_len: int = Field(256, gt=0)
    batch_size: Annotated[int, Field(gt=0)] | list[Annotated[int, Field(gt=0)]] = 8
    batch_tokens: Annotated[BatchTokens | None, _InTokens] = None
    learning_rate: Rate = LearningRate()
    init_std: Std = InitStd()
    data: DataConfig = DataConfig()
    train: dict[str, Any] = {}
    seeds: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    minimum_steps: int = Field(20, gt=0)
    tokens_per_param: Annotated[Bounds, _AsBounds] = Bounds()
    curve_points: int = Field(60, gt=1)
    points: list[Point] = []
    rate_sensitivity: bool = False
    plugins: list[str] = []
    executor: ExecutorConfig = ExecutorConfig()

    @property
    def devices(self) -> int:
        """Number of devices that one run takes, from `train.parallel`."""
        return ParallelConfig.model_validate(self.train.get("parallel") or {}).devices

    def base(self, vocab_size: int) -> Base:
        """Returns what all models share.

        Args:
            vocab_size: of the tokenizer, where there is one.
        """
        return Base.text(vocab_size, self.seq_len)

    def row_length(self, architecture: Architecture) -> int | None:
        """Returns the tokens of a row of an architecture's runs; None where data are not counted in tokens."""
        return architecture.seq_len or self.seq_len

    @classmethod
    def extra_problems(cls, values: Any) -> list[str]:
        """Returns the problems of architectures, sizes, plugins and `train`, for a configuration that has others too.

        Without wrong keys, planning reports the same problems.
        """
        if not isinstance(values, dict):
            return []
        part = {key: values[key] for key in ("architectures", "sizes", "plugins", "model") if key in values}
        if isinstance(named := part.get("architectures"), list):  # an unknown base would hide what is wrong with models
            part["architectures"] = [
                {key: value for key, value in architecture.items() if key != "base"}
                if isinstance(architecture, dict)
                else architecture
                for architecture in named
            ]
        try:
            config = cls.model_validate({"name": "study", "budgets": [1.0], **part})
        except ValidationError:
            return []
        problems: list[str] = []
        load_plugins(config.plugins, problems)
        length = values.get("seq_len", config.seq_len)
        base = config.base(256)
        if base.seq_len is not None:  # a wrong length is a problem of its own
            base = replace(base, seq_len=length if isinstance(length, int) else None)
        rungs = make_rungs(config.architectures, config.sizes, config.init_std, base, problems)
        return problems + (_train_problems(values.get("train"), rungs[0][2]) if rungs else [])

    # Pydantic validates fields in the order above, so a validator can read the fields before its own.

    @field_validator("architectures")
    @classmethod
    def _distinct_names(cls, architectures: list[Architecture]) -> list[Architecture]:
        names = [architecture.name for architecture in architectures]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} occurs twice; names must differ: give one of them another `name`")
        bases = {a.name: a.base for a in architectures if a.base is not None}
        unknown = [name for name, base in bases.items() if base == name or base not in names]
        if unknown:
            lines = [f"{name}.base: {bases[name]!r} is not another architecture of the study" for name in unknown]
            raise ValueError("; ".join([*lines, nearest(bases[unknown[0]], set(names) - {unknown[0]})]))
        return architectures

    @field_validator("budgets", "tokens", "seeds")
    @classmethod
    def _distinct(cls, values: list) -> list:
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"{', '.join(f'{value:g}' for value in twice)} occurs twice; remove one")
        return values

    @field_validator("tokens")
    @classmethod
    def _one_kind(cls, tokens: list[float], info: ValidationInfo) -> list[float]:
        if "budgets" in info.data and bool(tokens) == bool(info.data["budgets"]):
            problem = "both are given; remove one" if tokens else "neither is given; add one"
            raise ValueError(f"a study needs `budgets` (training FLOPs per run) or `tokens` (per run), but {problem}")
        return tokens

    @field_validator("sizes")
    @classmethod
    def _sizes_for_all(cls, sizes: list[Size] | None, info: ValidationInfo) -> list[Size] | None:
        without = [a.name for a in info.data.get("architectures", []) if a.sizes is None]
        if sizes is None and without:
            raise ValueError(f"{', '.join(without)} has no sizes; add `sizes`, for example [[32, 2], [64, 3]]")
        return sizes

    @field_validator("train")
    @classmethod
    def _own_objective(cls, train: dict[str, Any]) -> dict[str, Any]:
        if (objective := train.get("objective", "text")) != cls.OBJECTIVE:
            raise ValueError(f"objective: {objective!r} is not that of a {cls.__name__}; read the study by read_study")
        return train

    @field_validator("points")
    @classmethod
    def _points_of_budgets(cls, points: list[Point], info: ValidationInfo) -> list[Point]:
        known = [architecture.name for architecture in info.data.get("architectures", [])]
        unknown = sorted({point.architecture for point in points} - set(known))
        if known and unknown:
            lines = [f"architecture {name!r} is not in the study; {nearest(name, known)}" for name in unknown]
            raise ValueError("; ".join(lines))
        if points and info.data.get("tokens"):
            what = "points spend a budget of FLOPs, but this study sets `tokens`"
            raise ValueError(f"{what}; use `budgets`, or remove them")
        return points

    @field_validator("batch_size")
    @classmethod
    def _one_a_budget(cls, batch_size: int | list[int], info: ValidationInfo) -> int | list[int]:
        targets = info.data.get("budgets") or info.data.get("tokens")
        if isinstance(batch_size, list) and targets and len(batch_size) != len(targets):
            count = f"{len(batch_size)} numbers for {len(targets)} budgets"
            raise ValueError(f"{count}; give one number per budget, or one number for all")
        return batch_size

    @field_validator("batch_tokens")
    @classmethod
    def _budgets_and_whole_rows(cls, rule: BatchTokens | None, info: ValidationInfo) -> BatchTokens | None:
        if rule is None:
            return rule
        if info.data.get("tokens"):
            raise ValueError("is a rule by budget, but this study sets `tokens`; use `batch_size`, or `budgets`")
        if missing := [f"{budget:g}" for budget in info.data.get("budgets", []) if budget not in rule.budgets]:
            raise ValueError(f"has no budget {', '.join(missing)}; add the tokens per step of each budget of the study")
        architectures = info.data.get("architectures", [])
        lengths = {architecture.seq_len or info.data.get("seq_len", 1) for architecture in architectures}
        for tokens in [*rule.budgets.values(), *rule.below.values()]:
            for length in sorted(lengths):
                if tokens % length:
                    whole = -(-tokens // length) * length
                    raise ValueError(f"{tokens} tokens are not whole rows of seq_len {length}; use {whole}")
        return rule

    @property
    def targets(self) -> list[float]:
        """The budgets in FLOPs, or the tokens (images) per run if the study sets these."""
        return self.budgets or self.tokens

    def label(self, size: Size) -> str:
        """Returns the name of a size in tables, with its heads where sizes of an architecture differ in these alone."""
        for architecture in self.architectures:
            added = [point.size for point in self.points if point.architecture == architecture.name]
            label = size.label_among([*(architecture.sizes or self.sizes or ()), *added])
            if label != size.label:
                return label
        return size.label


__getattr__ = partial(renamed, __name__)
STUDIES: Mapping[str, type[StudyConfig]] = Offer("studies", {"text": StudyConfig})  # by their `train.objective`


def study_class(values: Any) -> type[StudyConfig]:
    """Returns the class of the study that plain values describe; `train.objective` names it, without it text.

    Raises:
        ConfigError: there are no studies with this objective.
    """
    train = values.get("train") if isinstance(values, Mapping) else None
    objective = train.get("objective", "text") if isinstance(train, Mapping) else "text"
    if not isinstance(objective, str) or objective not in STUDIES:
        fix = nearest(str(objective), STUDIES)
        raise ConfigError([f"train.objective: {objective!r} has no studies; {fix}"], "study")
    return STUDIES[objective]


def read_study(values: Mapping[str, Any], where: str = "study") -> StudyConfig:
    """Returns the study that plain values describe. Raises ConfigError that lists all problems."""
    return parse(study_class(values), values, where)


SET_BY_THE_LADDER = {
    "name": "the study names its runs",
    "architecture": "set `architectures`",
    "model": "set `architectures` and `sizes`",
    "data": "set `data` of the study",
    "seq_len": "set `seq_len` of the study",
    "batch_size": "set `batch_size` of the study",
    "steps": "set `budgets`, or `tokens`",
    "tokens": "set `tokens` of the study",
    "epochs": "set `budgets`, or the data per run, of the study",
    "seed": "set `seeds`",
    "optimizer.learning_rate": "set `learning_rate` of the study",
    "curve_every": "set `curve_points` of the study",
    "plugins": "set `plugins` of the study",
    "plugin_digests": "set `plugins` of the study",
}
"""Keys of a training that a study sets itself, and where."""


def _train_problems(train: Any, model: StackConfig) -> list[str]:
    """Returns the problems of the keys under `train`, with their full names."""
    if not isinstance(train, dict):
        return []  # reported as a wrong type
    problems = fixed_keys(train)
    with gather(problems, "train.{}".format):
        parts = train.get("accumulation", 1)
        batch = {"batch_size": 16 * parts} if isinstance(parts, int) and parts > 1 else {}  # the ladder sets the size
        settings = {key: train[key] for key in train if key not in SET_BY_THE_LADDER}
        read_training(settings | {"model": model} | batch)
    return problems


def fixed_keys(train: dict[str, Any]) -> list[str]:
    """Returns a problem for each key under `train` that the study sets itself."""
    optimizer = train.get("optimizer")
    keys = [*train, *(f"optimizer.{key}" for key in optimizer)] if isinstance(optimizer, Mapping) else train
    return [f"train.{key}: cannot be set here; {fix}" for key, fix in SET_BY_THE_LADDER.items() if key in keys]


def remembered(config: StudyConfig, folder: Path) -> StudyConfig:
    """Returns a study with the points that its folder has from earlier proposals."""
    file = folder / "study.yaml"
    if not file.is_file():
        return config
    names = {architecture.name for architecture in config.architectures}
    points = read_yaml(file).get("points") or []
    with_names = [point for point in points if isinstance(point, dict) and point.get("architecture") in names]
    values: dict[str, Any] = {"name": config.name, "architectures": sorted(names), "points": with_names}
    values |= {"budgets": [1.0], "sizes": [[8, 1]]}
    return with_points(config, parse(StudyConfig, values, str(file)).points)


def with_points(config: StudyConfig, points: Iterable[Point]) -> StudyConfig:
    """Returns a study with further points; those that it has already are not added again."""
    added = {point.model_dump_json(): point for point in [*config.points, *points]}
    return config.model_copy(update={"points": list(added.values())})
