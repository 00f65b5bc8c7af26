"""Decides which configurations are the same training, and finds the run folder of a training.

A run's digest covers every key that its result depends on and omits keys at their default, so that a key of a new
release renames no run. A model counts by its blocks, not by the notation of its layout. Text, tokenizers, plugins and
`init_from` count by their content, not by their path. Excluded are `run` and `parallel`, which describe the execution,
and the labels `name` and `architecture`.

A default must not change without a new `FORMAT`: existing digests omit the key and would then mean another value.
"""

import contextlib
import copy
import functools
import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import linnet
from linnet import trust
from linnet.config import ConfigError, digest, shown
from linnet.models.layout import LayerSpec
from linnet.models.stack import StackConfig
from linnet.runs import RunFolder, checkpoint
from linnet.runs.folder import FORMAT
from linnet.runs.model import WEIGHTS
from linnet.train import device as devices
from linnet.train.config import TrainConfig, TrainingConfig, present, resolve
from linnet.train.objectives import find_objective, read_training, training_class

LABELS = ("name", "architecture")
CARRIED_OUT = ("run", "parallel", "evaluations.every")
BY_CONTENT = (
    "data.source",
    "data.mixture.source",
    "data.validation",
    "data.tokenizer.path",
    "data.template",
    "plugins",
    "plugin_digests",
    "init_from",
)
ROLLBACK = ("checkpoint_every", "keep_checkpoints")  # of `run`: they select the target of guard.policy rollback
ROLLBACK_GPU = ("log_every", "evaluate_every")  # of `run`: a GPU's losses are read, and bad ones found, at these steps


@dataclass(frozen=True)
class Place:
    """The run folder of a training, which may not exist yet.

    Attributes:
        digest: digest of the training, in the current format.
        old: whether 0.1.0 created the folder. Such a folder keeps its name and config.yaml.
    """

    folder: RunFolder
    digest: str
    old: bool = False

    def make(self, settings: dict[str, Any]) -> RunFolder:
        """Creates the folder with its config.yaml, which states these settings, unless it exists."""
        if not self.folder.exists:
            self.folder.write_config(settings, self.digest)
        return self.folder


def find(config: TrainingConfig, root: str | Path | None, contents: dict[str, str] | None) -> Place:
    """Returns the folder of a training under `root`, `<name or architecture>-<digest>`: the existing, or one to create.

    Args:
        root: None does not look for an existing folder.
        contents: result of `contents_of`. Without it, a folder is also found by the paths that it names.

    Raises:
        ConfigError: the folder's config.yaml was edited, or the run was extended beyond this length; or a folder of
            0.1.0 contains this training with a key that no longer exists.
    """
    key = digest_of(config, contents)
    name = RunFolder.name({"name": config.name, "architecture": config.architecture}, key)
    named = RunFolder(Path(root or "") / name)
    if root is None:
        return Place(named, key)
    if named.exists:
        if named.digest == key:
            _check_unedited(named, config)
            return Place(named, key)
        steps = read_config(named).total_steps
        what = f"{named.path}: this run of {config.total_steps} steps was extended to {steps}"
        fix = f"set steps={steps}, or train in another folder of runs (--out)"
        raise ConfigError([f"{what}; {fix}"], "run folder")
    wanted = None
    for folder in RunFolder.all(root):
        stated = folder.digest
        if stated == key and folder.config.get("architecture") == config.architecture:
            return Place(folder, key)  # found under another label, or extended to this length
        if stated is None or contents is None:
            wanted = wanted or settings(config)
            if _holds(folder, config, wanted):
                return Place(folder, key, stated is None)
    return Place(named, key)


def unfinished_like(settings: dict[str, Any], root: str | Path) -> str | None:
    """Returns a note about the begun run under `root` that differs from a training in the fewest keys, at most three.

    Reads the files alone and imports no plugin.
    """
    wanted, candidates = _plain(settings), []
    for folder in RunFolder.all(root):
        with contextlib.suppress(ConfigError):
            if folder.done or folder.owner() is not None:
                continue
            step = checkpoint.step_of(saved[-1]) if (saved := folder.checkpoints()) else 0
            stored_values = folder.config
            stored = _plain(stored_values)
            differ = [key for key in wanted if key in stored and wanted[key] != stored[key]]
            if not differ and stored_values.get("architecture") != settings.get("architecture"):
                continue  # the same training under another label
            candidates.append((len(differ), f"{folder.path} (at step {step:,})", differ, stored))
    count, name, differ, stored = min(candidates, key=lambda candidate: candidate[0], default=(0, "", [], {}))
    if not name or count > 3:
        return None
    if not count:
        why = "a file that they name has changed; to continue it, restore the file as it was when it began"
        return f"this is a new run; {name} is unfinished and has the same keys, but {why}"
    here = ", ".join(f"{key} {shown(wanted[key])}, there {shown(stored[key])}" for key in differ)
    changes = [f"{key}={'null' if stored[key] is None else stored[key]}" for key in differ]
    there = shlex.join(word for change in changes for word in ("--set", change))
    return f"this is a new run; {name} is unfinished and differs: {here}; continue it with {there}"


def _plain(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the keys of a configuration, with dots, that identify a training."""
    keys: dict[str, Any] = {}
    for key, value in values.items():
        if prefix + key in (*LABELS, *CARRIED_OUT, "plugins", "plugin_digests"):
            continue
        keys |= _plain(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return keys


def run_folder(config: TrainingConfig, root: str | Path, cache: str | Path | None = None) -> RunFolder:
    """Returns the folder of a training under `root`; creates it with its config.yaml if it is missing."""
    return find(config, root, contents_of(config, cache)).make(resolve(config).model_dump(mode="json"))


def digest_of(config: TrainingConfig, contents: dict[str, str] | None) -> str:
    """Returns the digest of a training: 12 hexadecimal digits.

    Args:
        contents: result of `contents_of`; None uses the paths of the files instead.
    """
    by = {"names": config.file_names()} if contents is None else {"content": contents}
    return digest({"format": FORMAT, "settings": settings(config), **by})


def contents_of(config: TrainingConfig, cache: str | Path | None = None) -> dict[str, str] | None:
    """Returns digests of the content of the files that a training reads; None if one of them cannot be read.

    Args:
        cache: folder of prepared data, which remembers the digests of large files.
    """
    try:
        digests = find_objective(config).content(config, cache)
        if config.init_from is not None:
            start = RunFolder.open(config.init_from)
            whole = start.path / WEIGHTS
            weights = checkpoint.sha256(whole) if whole.is_file() else checkpoint.content(start.checkpoint_folder)
            if weights is None:
                return None
            digests["init_from"] = weights[:12]
        return digests
    except (ConfigError, OSError):
        return None


def settings(config: TrainingConfig) -> dict[str, Any]:
    """Returns the keys that the result depends on, except those that count by content. Defaults are omitted."""
    left_out = {key for key in (*LABELS, *CARRIED_OUT, *BY_CONTENT, "steps", "tokens", "epochs") if "." not in key}
    values = config.model_dump(mode="json", exclude=left_out, exclude_defaults=True)
    values["steps"] = config.total_steps  # `tokens` is another notation of the same length
    values["data"] = _data(config.data)
    values["model"] = _model(config.model)
    if config.objective != "text":  # a default of its class, but not of all trainings
        values["objective"] = config.objective
    for evaluation in values.get("evaluations", []):
        evaluation.pop("every", None)
    if config.plugins:
        digests = config.plugin_digests or resolve(config).plugin_digests
        values["plugins"] = [[plugin.rpartition(":")[2], digests[plugin]] for plugin in config.plugins]
    if config.guard.policy == "rollback":
        names = list(ROLLBACK)
        with contextlib.suppress(ConfigError):  # a missing GPU is reported before training
            if devices.choose(config.run.device).type == "cuda":
                names += ROLLBACK_GPU
        values["rollback"] = {name: getattr(config.run, name) for name in names}
    return values


def _data(data: Any) -> dict[str, Any]:
    """Returns the keys of `data` without defaults and without paths of files, which count by content."""
    values = data.model_dump(mode="json", exclude_defaults=True, exclude={"source", "validation", "template"})
    if mixture := getattr(data, "mixture", None):  # which source has which of them counts by content
        values["mixture"] = sorted([source.epochs, source.weight] for source in mixture)
    if "tokenizer" in values:
        values["tokenizer"].pop("path", None)
        values["tokenizer"]["kind"] = data.tokenizer.kind
    return values


def _model(model: StackConfig) -> dict[str, Any]:
    """Returns the model without defaults. Layers count by block, in any notation of layout, aliases and options."""
    stack = model.stack

    def given(name: str, spec: LayerSpec) -> dict[str, Any]:
        options = model.layer_options(name, spec)
        old = getattr(options, "causal_defaults", {}) if model.causal else {}
        dumped = options.model_dump(mode="json", exclude_defaults=True)
        return {key: value for key, value in dumped.items() if key not in old or value != old[key]}

    def block(spec: LayerSpec) -> dict[str, Any]:
        options = {name: given(name, spec) for name in spec.names}
        differences = {name: changes for name, changes in options.items() if changes}
        return {"mixer": spec.mixer, "channel": spec.channel, "options": differences}

    specs = {id(spec): spec for spec in (*stack.before, *stack.blocks)}  # repeated blocks are one object
    blocks = {key: block(spec) for key, spec in specs.items()}
    runs = itertools.groupby(blocks[id(spec)] for spec in stack.blocks)
    values = model.model_dump(mode="json", exclude={"layout", "aliases", "options"}, exclude_defaults=True)
    values["before"] = [blocks[id(spec)] for spec in stack.before]
    return values | {"blocks": [[block, len(list(equal))] for block, equal in runs]}


def read_config(folder: RunFolder, allow_plugins: bool = False) -> TrainingConfig:
    """Returns the configuration of a run folder of any format, and imports its plugins.

    Args:
        allow_plugins: import plugins although no run was made with them here.

    Raises:
        ConfigError: a key no longer exists, a plugin changed or is not trusted, or a value is invalid; the message
            names it.
    """
    values = present(folder.config)
    trust.check_training(values, folder.path / "config.yaml", allow_plugins)
    try:
        return training_class(values).model_validate(values)
    except ValidationError as error:
        unknown = [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]
        if unknown:
            raise ConfigError(_dropped(folder, unknown), "run folder") from None
        return read_training(values, f"{folder.path}/config.yaml")  # raises, with all problems


def _check_unedited(folder: RunFolder, config: TrainingConfig) -> None:
    stored = read_config(folder)
    if settings(stored) != settings(config):
        what = f"{folder.path}/config.yaml was changed: it no longer describes the training whose digest it states"
        message = f"{what}; restore it, or delete the folder to train anew"
        raise ConfigError([message], "run folder")


def _holds(folder: RunFolder, config: TrainingConfig, wanted: dict) -> bool:
    """Returns whether a folder contains a training, judged by its keys and paths.

    Raises:
        ConfigError: the folder contains the training, but some of its keys no longer exist.
    """
    file = folder.path / "config.yaml"
    state = file.stat()
    values = copy.deepcopy(_read(folder.path, state.st_size, state.st_mtime_ns))
    cheap = ("seed", "seq_len", "batch_size", "architecture")  # compared first: few runs of a study agree in these
    if not isinstance(values, dict) or values.get("objective", "text") != config.objective:
        return False
    if any(values.get(name) != getattr(config, name, None) for name in cheap):
        return False
    try:
        trust.check_training(values, file)
    except ConfigError:  # `config` runs no such file, so this is another training
        return False
    values, unknown = _known(values)
    try:
        stored = training_class(values).model_validate(values)
    except ValidationError:
        return False
    if stored.file_names() != config.file_names() or not _same(folder, stored, config, wanted):
        return False
    if unknown:
        raise ConfigError(_dropped(folder, unknown), "run folder")
    return True


def _same(folder: RunFolder, stored: TrainingConfig, config: TrainingConfig, wanted: dict) -> bool:
    values = settings(stored)
    every = config.curve_every
    if folder.digest is None and every is not None and stored.run.log_every in (every, config.run.log_every):
        values["curve_every"] = every  # 0.1.0 had the curve for fits in the rows of log_every, which a study could set
    return values == wanted


@functools.lru_cache(maxsize=4096)
def _read(path: Path, size: int, modified: int) -> dict | None:
    with contextlib.suppress(ConfigError):
        return RunFolder(path).config
    return None


def _known(values: Mapping[str, Any]) -> tuple[dict, list[tuple]]:
    """Returns the values without the keys that no longer exist, and these keys."""
    values = present(values)
    try:
        training_class(values).model_validate(values)
    except ValidationError as error:
        unknown = [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]
        values = copy.deepcopy(values)
        for *parents, last in unknown:
            inside: Any = values
            for part in parents:
                inside = inside[part] if isinstance(inside, list) or part in inside else inside
            inside.pop(last, None)
        return values, unknown
    return values, []


def _dropped(folder: RunFolder, unknown: list[tuple]) -> list[str]:
    problems = []
    for place in unknown:
        key = ".".join(str(part) for part in place)
        what = f"{folder.path}/config.yaml: {key}: unknown to Linnet {linnet.__version__}, so this run cannot continue"
        fix = "continue it with the release that made it, or train anew in another folder of runs (--out)"
        problems.append(f"{what}; {fix}")
    return problems


def as_begun(place: Place, config: TrainingConfig) -> TrainConfig:
    """Returns the configuration with which a run continues in its folder.

    In a folder of 0.1.0 the training curve for fits is in the rows of `log_every`, so this key cannot change.
    """
    if not place.old or config.curve_every is None:
        return config
    run = config.run.model_copy(update={"log_every": read_config(place.folder).run.log_every})
    return config.model_copy(update={"curve_every": None, "run": run})
