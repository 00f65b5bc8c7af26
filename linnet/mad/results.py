"""Reads the runs of a MAD folder as rows: mad.csv, and the result.json of every run folder in it.

The design of an architecture is read from a model's configuration, never guessed from a name. If only a table of
results exists, its column `layers` names the layers. Without this column, names that are recipes or layouts give the
design; others are unknown. Layers and recipes are imported on first use, so that a help text does not import torch.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.config import ConfigError, load_json, refuse
from linnet.runs.files import read_csv

if TYPE_CHECKING:
    from linnet.models import ModelConfig

TABLE, RUNS, PLAN = "mad.csv", "runs", "plan.json"
DONE = "done"
DEAD = 0.01  # an expert with less than this fraction of an even share counts as unused
TEXTS = ("architecture", "task", "setting", "varied", "status", "budget", "spec", "decay", "layers")
_COUNTS = ("seed", "parameters", "state_size", "epoch")
_REQUIRED = ("architecture", "task", "setting", "learning_rate", "weight_decay", "accuracy", "status")
_SHARES = ("accuracy", "macro_batch", "validation_accuracy")
ATTENTION = "attention"
# Variants of a mixer that paper 004 puts into one family. Other mixers are families of their own.
FAMILY = {"mh_hyena": "hyena", "hyena_experts": "hyena"}
WITHOUT_HEADS = {"mh_hyena": "hyena"}  # a mixer with heads -> the same mixer without


@dataclass(frozen=True)
class Design:
    """The layers of an architecture.

    Attributes:
        mixers, channels: names in alphabetical order, each once.
    """

    mixers: tuple[str, ...]
    channels: tuple[str, ...]

    @classmethod
    def of(cls, layers: Iterable[str]) -> "Design":
        """Returns the design with these layers. An unregistered name is a mixer from a file."""
        from linnet.layers.base import CHANNELS, MIXERS

        names = sorted({name for name in layers if not getattr(MIXERS.get(name), "before_layers", False)})
        channels = tuple(name for name in names if name in CHANNELS and name not in MIXERS)
        return cls(tuple(name for name in names if name not in channels), channels)

    @property
    def striped(self) -> bool:
        """Whether attention layers alternate with those of another mixer."""
        return ATTENTION in self.mixers and len(self.mixers) > 1

    @property
    def base(self) -> tuple[str, ...]:
        """Returns the mixers except attention; attention if it is the only one."""
        return tuple(mixer for mixer in self.mixers if mixer != ATTENTION) or self.mixers

    @property
    def family(self) -> str:
        """Returns the families of the mixers except attention: multi-head Hyena, striped or not, belongs to hyena."""
        return "+".join(sorted({FAMILY.get(mixer, mixer) for mixer in self.base}))


def design_of(model: "ModelConfig") -> Design:
    """Returns the design of a model."""
    return Design.of(name for block in model.blocks for name in (block.mixer, block.channel) if name)


def layers_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the layers of a recorded model, whose `options` have a key for each layer.

    The plugin files of its mixers may be missing.
    """
    return tuple(record.get("options", {}))


def named_design(name: str) -> Design | None:
    """Returns the design of a recipe or a layout; None for other names."""
    from linnet.models import RECIPES, get_recipe, parse_layout

    if name in RECIPES:
        return design_of(get_recipe(name))
    try:
        blocks = parse_layout(name)
    except ValueError:
        return None
    return Design.of(layer for block in blocks for layer in (block.mixer, block.channel) if layer)


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
        setting: a name such as `fuzzy_recall/seq_len=256`. varied: its variable, "" in a baseline.
        accuracy: token accuracy on the test split. macro_batch: mean over classes and batches on the same split.
        validation_accuracy: token accuracy on the split that selects runs. loss: nats per target on the test split.
        parameters, state_size: numbers of the model; None if not recorded.
        status: "done", or how the run ended. Unknown numbers are NaN.
        budget, spec: of the run; "" if not recorded.
        epoch: the epoch whose weights were scored. decay: whether "all" parameters decay, or only "matrices".
        expert_shares: for each layer with experts, the share of the tokens' choices that each expert got on the test
            split (`loads` in files).
        layers: names of the model's layers, separated by spaces; "" if not recorded.
    """

    architecture: str
    task: str
    setting: str
    learning_rate: float
    weight_decay: float
    accuracy: float
    status: str
    varied: str = ""
    seed: int = 0
    macro_batch: float = math.nan
    validation_accuracy: float = math.nan
    loss: float = math.nan
    parameters: int | None = None
    state_size: int | None = None
    budget: str = ""
    spec: str = ""
    epoch: int | None = None
    decay: str = ""
    expert_shares: dict[str, list[float]] = field(default_factory=dict, hash=False)
    layers: str = ""

    @property
    def design(self) -> Design | None:
        """The layers of the model; None if neither the run nor the architecture's name determines them."""
        return Design.of(self.layers.split()) if self.layers else named_design(self.architecture)

    @property
    def key(self) -> tuple:
        """Identifies the run: rows with equal keys belong to the same run."""
        return self.architecture, self.setting, self.learning_rate, self.weight_decay, self.seed

    @property
    def ended(self) -> bool:
        """Whether the run trained to its end and has an accuracy."""
        return self.status == DONE and math.isfinite(self.accuracy)


def dead(shares: list[float]) -> list[int]:
    """Returns the indices of the experts that get almost no tokens."""
    return [expert for expert, share in enumerate(shares) if share * len(shares) < DEAD]


def read_results(folder: str | Path) -> list[Result]:
    """Returns all runs of a folder, in the order of its table. A result.json replaces the row of the same run.

    Raises:
        ConfigError: lists all problems: the folder is missing or has no run, or rows are not results.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError([f"{folder}: no such folder; give one that linnet mad run made"], "MAD")
    results, problems, layers = {}, [], read_layers(folder)
    for where, values in _rows(folder, problems):
        missing = [name for name in _REQUIRED if name not in values]
        if missing:
            problems.append(f"{where}: {', '.join(missing)} missing; linnet mad run writes it")
            continue
        values.setdefault("layers", " ".join(layers.get(values["architecture"], ())))
        try:
            result = parse_result(values)
        except (TypeError, ValueError) as error:
            problems.append(f"{where}: {error}")
            continue
        results[result.key] = result
    refuse(problems, "MAD", most=8)
    if not results:
        below = sorted(str(path.parent) for path in folder.glob(f"*/{TABLE}"))
        hint = f"give one of {', '.join(below)}" if below else "see linnet mad run"
        raise ConfigError([f"{folder}: no finished run (no rows in {TABLE}, no result.json); {hint}"], "MAD")
    return list(results.values())


def read_plan(folder: Path) -> dict[str, Any]:
    """Returns the plan.json of a folder, {} if it has none. Raises `ConfigError` if it is damaged."""
    path = folder / PLAN
    if not path.is_file():
        return {}
    try:
        return load_json(path)
    except ValueError as error:
        raise ConfigError([f"{path}: is damaged ({error}); delete it and run again"], "MAD") from None


def read_layers(folder: Path) -> dict[str, tuple[str, ...]]:
    """Returns the layers of each architecture in the plan of a folder, {} if there is no readable plan."""
    try:
        models = read_plan(folder).get("models", {})
    except ConfigError:
        return {}
    return {name: layers_of(record) for name, record in models.items()}


def _rows(folder: Path, problems: list[str]):
    table = folder / TABLE
    if table.is_file():
        try:
            for number, row in enumerate(read_csv(table), start=2):
                yield f"{table}, line {number}", row
        except (UnicodeDecodeError, csv.Error) as error:
            problems.append(f"{table}: not a whole CSV table ({error}); copy it again, or end its last line")
    for path in sorted(folder.glob(f"{RUNS}/*/result.json")):
        try:
            values = load_json(path)
        except ValueError as error:
            problems.append(f"{path}: damaged ({error}); delete it and run linnet mad run again")
            continue
        if isinstance(values, dict) and "setting" in values:
            yield str(path), values


def parse_result(values: dict[str, Any]) -> Result:
    """Returns the result in a row or a result.json. Raises `ValueError` or `TypeError` if it is none."""
    known: dict[str, Any] = {}
    for name in (column.name for column in fields(Result)):
        value = values.get(name)
        if name in TEXTS:
            known[name] = str(value) if value is not None else ""
        elif name in _COUNTS:
            known[name] = int(float(value)) if value not in (None, "") else None
        elif name == "expert_shares":
            known[name] = _shares(values.get("loads"))
        else:
            try:
                known[name] = float(value) if value not in (None, "") else math.nan
            except ValueError:
                raise ValueError(f"{name} is not a number: {value!r}") from None
    known["seed"] = known["seed"] or 0
    if "/" not in known["setting"]:
        known["setting"] = f"{known['task']}/{known['setting'] or 'baseline'}"
    for name in _SHARES:
        if not (math.isnan(known[name]) or 0 <= known[name] <= 1):
            raise ValueError(f"{name} is a share from 0 to 1, not {known[name]}")
    return Result(**known)


def _shares(value: Any) -> dict[str, list[float]]:
    """Reads shares by layer from a result.json, or from the JSON text in a table."""
    try:
        loads = json.loads(value) if isinstance(value, str) and value else value or {}
        return {str(layer): [float(share) for share in shares] for layer, shares in loads.items()}
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"loads: {value!r} is not a JSON object of layers with lists of shares") from None
