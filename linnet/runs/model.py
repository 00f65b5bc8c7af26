"""Loads a trained model from its folder, for generation or export.

Two kinds of folder contain a model: a run (its last good checkpoint is used), and a model folder, which is a run
without its history. `linnet convert` writes model folders:

    config.yaml          the model's configuration under `model`, as in a run; `kind` if it is not a causal language
                         model (`linnet.models.causal_lm`; in a run, `objective` says it); `plugins` if its mixers need
                         them; `prompt_start` if token ids precede each prompt,
                         `generation_ends` if more ids than the end of a document end a generation (without a tokenizer:
                         all that do), `bos_token` of its
                         chat template, `sampling` if it is served with a temperature and the like of its own. A run
                         that continues such a model has these keys in prompts.json
    model.safetensors    its weights
    tokenizer.json       its tokenizer, in the format of `linnet.data.load_tokenizer`, if it has one
    classes.json         of a model of images, the names of the classes, if they are known
    SHA256SUMS           of the weights, the tokenizer and config.yaml, verified on load; `sha256sum -c` reads it too.
                         0.1.0 did not write it, nor earlier builds of 0.2.0 the sum of config.yaml
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from linnet import trust
from linnet.config import MOST_PROBLEMS, ConfigError, load_json, load_text, nearest, parse, refuse
from linnet.data import ByteTokenizer, Tokenizer, load_tokenizer
from linnet.data.chat.template import FILE as TEMPLATE
from linnet.data.chat.template import read_template
from linnet.layers.base import load_plugin
from linnet.models import KINDS, OBJECTIVE_KINDS, StackConfig, empty_of, kind_of, upgrade
from linnet.models.kinds import Kind
from linnet.runs import checkpoint
from linnet.runs.checkpoint import CheckpointError
from linnet.runs.files import new_folder, save_tensors, write_atomic
from linnet.runs.folder import RunFolder, keep_copies

TOKENIZER, WEIGHTS, CONFIG, SUMS = "tokenizer.json", "model.safetensors", "config.yaml", "SHA256SUMS"
PROMPTS = "prompts.json"
MODEL, AVERAGE = "model", "average"  # groups of a checkpoint: the last weights, and their moving average
TEXT = ("causal_lm",)
TOKENS_OF_PROMPTS = ("prompt_start", "generation_ends")  # of a converted model, with its tokenizer
Weights = Literal["average", "raw"]
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}  # of safetensors' dtypes
SHOWN = 5  # largest number of tensors that a message names


class DamagedCheckpoint(UserWarning):
    """Newer checkpoints of a run are damaged, so an older one is used."""


@dataclass(frozen=True)
class Streamed:
    """Weights that are read when they are asked for, so that a large model need not be in memory.

    Attributes:
        dtypes: by name, as safetensors calls them (F32, BF16, ...). shapes: by name. read: returns a tensor.
    """

    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]

    def save(self, path: Path) -> None:
        """Writes the tensors as one safetensors file (its header is JSON of dtypes, shapes and offsets)."""
        header, end = {}, 0
        for name, shape in self.shapes.items():
            start, end = end, end + math.prod(shape) * BYTES[self.dtypes[name]]
            header[name] = {"dtype": self.dtypes[name], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in self.shapes:
                file.write(self.read(name).contiguous().flatten().view(torch.uint8).numpy())


@dataclass(frozen=True)
class Generation:
    """How generations of a model end and draw tokens.

    Attributes:
        ends: ids at which a generation ends; the end of a document comes first if there is a tokenizer.
        sampling: what the model is served with if a request does not say it: `temperature`, `top_p`, ...
    """

    ends: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> "Generation":
        """Returns what a tokenizer says, nothing for None."""
        if tokenizer is None:
            return cls()
        ends = dict.fromkeys((tokenizer.end_of_document, *tokenizer.generation_ends))
        return cls(tuple(ends), tokenizer.sampling)


class Loaded(NamedTuple):
    """A model loaded from its folder.

    Attributes:
        step: training step of the checkpoint; None for a model folder.
        documents: number of documents that it was trained on; None if the folder does not record it.
        generation: how its generations end and draw tokens, also without a tokenizer.
    """

    model: Any
    tokenizer: Tokenizer | None
    step: int | None
    documents: int | None = None
    generation: Generation = Generation()


def load_model(
    path: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    allow_plugins: bool = False,
    kinds: Collection[str] | None = TEXT,
    weights: Weights | None = None,
) -> tuple[Any, Tokenizer | None]:
    """Returns the model of a run or model folder, in evaluation mode, and its tokenizer (None if the folder has none).

    Args:
        device: device of the model; None is the CPU.
        dtype: dtype of its parameters; None keeps the stored one. Below float32, the parameters of `full_precision`
            stay float32, as fixed tables (decays, RoPE) do.
        allow_plugins: run the Python files that the folder names as `plugins`, although no run was made with them
            here (`linnet.trust`).
        kinds: the kinds of models (`linnet.models.KINDS`) that the caller can use; None is any.
        weights: `average` is the moving average of a training with `average`, `raw` the last weights; None is the
            average where there is one.

    Raises:
        ConfigError: the folder contains no model, its parts do not fit together, a file or weight is damaged, a
            plugin is not trusted, or the model is of another kind; the message lists all problems.
    """
    loaded = load_checkpoint(path, device, dtype, allow_plugins=allow_plugins, kinds=kinds, weights=weights)
    return loaded.model, loaded.tokenizer


def load_checkpoint(
    path: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    allow_plugins: bool = False,
    kinds: Collection[str] | None = TEXT,
    weights: Weights | None = None,
    best: bool = False,
) -> Loaded:
    """Returns the model as `load_model` does, with the training step of the weights.

    Args:
        best: take the checkpoint of the lowest validation loss (`run.keep_best`) and not the last one.

    Raises:
        ConfigError: as `load_model`, or the folder has no such checkpoint.
    """
    folder = RunFolder.open(path)
    config = read_config(folder, allow_plugins, kinds)
    tokenizer = read_tokenizer(folder)
    model = empty_of(config)
    tensors, step, documents = _read_weights(folder, weights, best)
    assign_weights(model, tensors, str(path), dtype)
    refuse(not_finite(tensors) + changed_files(folder.path), str(path))
    generation = Generation.of(tokenizer) if tokenizer else _read_generation(folder, config)
    return Loaded(model.eval().to(device or "cpu"), tokenizer, step, documents, generation)


def read_config(folder: RunFolder, allow_plugins: bool = False, kinds: Collection[str] | None = None) -> StackConfig:
    """Returns the configuration of the folder's model, of any kind, and imports its plugins.

    Args:
        allow_plugins: import plugins that are not trusted, and those that have changed, with a warning.
        kinds: the kinds of models that the caller can use; None is any.

    Raises:
        ConfigError: the folder has no configuration, a plugin is missing, has changed or is not trusted, or the model
            is of another kind.
    """
    if problems := changed_files(folder.path, (CONFIG,)):  # first: what it says now may hide the change
        raise ConfigError(problems, str(folder.path))
    values = folder.config
    kind = read_kind(folder)
    if "model" not in values:
        raise ConfigError(
            [f"{folder.path}/config.yaml: has no key `model`, so this folder contains no single model"], "model"
        )
    if kinds is not None and kind.name not in kinds:
        needed = " or ".join(KINDS[name].config.TITLE for name in kinds if name in KINDS)
        fix = f"use {kind.commands}, or name another folder" if kind.commands else "name another folder"
        raise ConfigError([f"{folder.path}: contains {kind.config.TITLE}, but {needed} is needed here; {fix}"], "model")
    trust.check_plugins(values, folder.path / "config.yaml", allow_plugins)
    for plugin in values.get("plugins") or []:
        load_plugin(plugin)
    model = values["model"]
    return parse(kind.config, upgrade(model) if isinstance(model, dict) else model, f"{folder.path}/config.yaml")


def read_kind(folder: RunFolder) -> Kind:
    """Returns the kind of model that a folder contains: from `kind` in a model folder, or `objective` in a run.

    Raises:
        ConfigError: the kind or objective is unknown.
    """
    values, where = folder.config, f"{folder.path}/config.yaml"
    if (name := values.get("kind")) is not None:
        key, known = "kind", {kind: kind for kind in KINDS}
    else:
        key, known = "objective", {objective: kind for objective, kind in OBJECTIVE_KINDS.items() if kind in KINDS}
        name = values.get("objective", "text")
    if not isinstance(name, str) or name not in known:
        problem = f"{key}: {name!r} is not a kind of model that this release knows; {nearest(str(name), known)}"
        raise ConfigError([problem], where)
    return KINDS[known[name]]


def read_tokenizer(folder: RunFolder) -> Tokenizer | None:
    """Returns the folder's tokenizer. Early runs did not store it: these need a byte tokenizer or the original file.

    Raises:
        ConfigError: the tokenizer is damaged, or was learned for this run and is only in the cache of its corpus.
    """
    if (folder.path / TOKENIZER).is_file():
        tokenizer = load_tokenizer(folder.path / TOKENIZER)
        _set_prompts(tokenizer, folder)
        return tokenizer
    match folder.config.get("data", {}).get("tokenizer"):
        case {"kind": "byte"}:
            return ByteTokenizer()
        case {"kind": "file", "path": path, **rest}:
            return load_tokenizer(path, rest.get("end_of_document"))
        case {"kind": "bpe" | "wordpiece"}:
            message = f"{folder.path}: has no {TOKENIZER}; copy it from the folder of its corpus in the data cache"
            raise ConfigError([message], "tokenizer")
    return None


def _set_prompts(tokenizer: Tokenizer, folder: RunFolder) -> None:
    """Sets what a folder notes of prompts and generations. Raises ConfigError for values that do not fit."""
    values, where = folder.config, folder.path / CONFIG
    if (folder.path / PROMPTS).is_file():
        where = folder.path / PROMPTS
        try:
            values = load_json(where)
            if not isinstance(values, dict):
                raise ValueError(f"it holds {type(values).__name__}, not an object")
        except (OSError, ValueError) as error:
            raise ConfigError([f"{where}: is damaged ({error}); copy the run folder again"], "model") from None
    for key in TOKENS_OF_PROMPTS:
        setattr(tokenizer, key, _read_tokens(values, key, tokenizer.vocab_size, where))
    tokenizer.sampling = _read_sampling(values, where)
    if not isinstance(start := values.get("bos_token"), str | None):
        raise ConfigError([f"bos_token: {start!r} is not the text of a token; write for example <s>"], str(where))
    tokenizer.bos_token = start


def _read_generation(folder: RunFolder, config: StackConfig) -> Generation:
    """Returns what a folder without a tokenizer notes of generations. Raises ConfigError for values that do not fit."""
    values, where = folder.config, folder.path / CONFIG
    ends = _read_tokens(values, "generation_ends", getattr(config, "vocab_size", 0), where)
    return Generation(ends, _read_sampling(values, where))


def _read_tokens(values: Mapping[str, Any], key: str, count: int, where: Path) -> tuple[int, ...]:
    ids = values.get(key, [])
    if not isinstance(ids, list) or any(type(x) is not int or not 0 <= x < count for x in ids):
        message = f"{key}: {ids!r} is not a list of tokens; use numbers from 0 to {count - 1}"
        raise ConfigError([message], str(where))
    return tuple(ids)


def _read_sampling(values: Mapping[str, Any], where: Path) -> dict[str, float]:
    sampling = values.get("sampling", {})
    if not isinstance(sampling, dict) or any(type(value) not in (int, float) for value in sampling.values()):
        message = f"sampling: {sampling!r} is not a mapping of numbers, such as {{temperature: 0.6}}"
        raise ConfigError([message], str(where))
    return sampling


def _prompts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what a folder notes of prompts and generations, the inverse of `_set_prompts`."""
    values: dict[str, Any] = {key: list(ids) for key in TOKENS_OF_PROMPTS if (ids := getattr(tokenizer, key))}
    values |= {} if tokenizer.bos_token is None else {"bos_token": tokenizer.bos_token}
    return values | ({"sampling": dict(tokenizer.sampling)} if tokenizer.sampling else {})


def files_of_start(start: str | Path | None, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns files that a run has from the folder where its training starts, if both have the same tokenizer.

    These are what that folder notes of prompts and generations, and its chat template, by name.
    """
    if start is None or not (Path(start) / TOKENIZER).is_file():
        return {}
    start_tokenizer = read_tokenizer(folder := RunFolder.open(start))
    if start_tokenizer is None or start_tokenizer.digest != tokenizer.digest:
        return {}
    template, notes = read_template(folder.path), _prompts(start_tokenizer)
    files = {} if template is None else {TEMPLATE: template}
    return files | ({PROMPTS: json.dumps(notes)} if notes else {})


def vocabulary_of(model: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what identifies the meaning of token ids, as checkpoints keep it under `vocabulary`.

    Args:
        model: configuration with `vocab_size`, the rows of its embedding.
    """
    file = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:12]
    vocabulary = {"model": model.vocab_size, "tokenizer": tokenizer.name, "tokens": tokenizer.vocab_size}
    return vocabulary | {"digest": file}


def read_vocabulary(folder: RunFolder) -> dict[str, Any]:
    """Returns `vocabulary_of` the model in a folder; {} without a tokenizer."""
    tokenizer = read_tokenizer(folder)
    return {} if tokenizer is None else vocabulary_of(read_config(folder), tokenizer)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Returns the weights of a model folder. Raises ConfigError if the file is damaged."""
    try:
        return load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"{path / WEIGHTS}: is damaged ({error}); convert or copy it again"], "model") from None


def save_model(
    path: str | Path,
    config: StackConfig,
    tensors: "Mapping[str, Tensor] | Streamed",
    tokenizer: Tokenizer | None = None,
    plugins: list[str] | None = None,
    generation: Generation | None = None,
) -> Path:
    """Writes a model folder for `load_model`. Nothing stays of one that cannot be written.

    Args:
        tensors: the weights by name; `Streamed` ones are read and written one by one.
        plugins: files of the model's mixers. They are trusted from now on (`linnet.trust`).
        generation: how its generations end and draw tokens, if there is no tokenizer, which says it.

    Raises:
        ConfigError: `path` is not empty, or the folder cannot be written.
    """
    with new_folder(path := Path(path), "model folder") as folder:
        write_model(folder, config, tensors, tokenizer, plugins, generation)
    return path


def write_model(
    folder: Path,
    config: StackConfig,
    tensors: "Mapping[str, Tensor] | Streamed",
    tokenizer: Tokenizer | None = None,
    plugins: list[str] | None = None,
    generation: Generation | None = None,
) -> None:
    """Writes the files of a model folder into an empty one, the configuration last; arguments as `save_model`."""
    if isinstance(tensors, Streamed):
        tensors.save(folder / WEIGHTS)
    else:
        save_tensors(folder / WEIGHTS, tensors)
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    values: dict[str, Any] = {"model": config.model_dump(mode="json")}
    if (kind := kind_of(config).name) not in TEXT:
        values = {"kind": kind, **values}
    if plugins:
        values |= {"plugins": plugins, "plugin_digests": trust.digests(plugins)}
        keep_copies(values, folder)
        trust.remember(plugins)
    if tokenizer is not None:
        values |= _prompts(tokenizer)
    elif generation is not None:
        values |= {"generation_ends": list(generation.ends)} if generation.ends else {}
        values |= {"sampling": dict(generation.sampling)} if generation.sampling else {}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    sums = {name: checkpoint.sha256(folder / name) for name in (WEIGHTS, TOKENIZER) if (folder / name).is_file()}
    sums[CONFIG] = hashlib.sha256(text.encode()).hexdigest()
    write_atomic(folder / SUMS, "".join(f"{value}  {name}\n" for name, value in sums.items()))
    write_atomic(folder / CONFIG, text)


def assign_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], where: str, dtype: torch.dtype | None = None
) -> None:
    """Replaces the tensors of `model` by saved ones. Those of 8-bit floats become bfloat16.

    Raises ConfigError with names and shapes that differ, and weights that are whole numbers, as quantised ones are.
    """
    own = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    problems = mismatches(shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    fix = "take config.yaml and the weights from one folder"
    whole = [name for name, x in tensors.items() if name in own and _is_real(own[name]) and not _is_real(x)]
    refuse(
        [f"{line}; {fix}" for line in problems]
        + [f"{name}: holds {tensors[name].dtype}; use weights that are not quantised" for name in whole],
        where,
        most=MOST_PROBLEMS,
    )
    # PyTorch does not compute with 8-bit floats, and bfloat16 holds each of their values.
    tensors = {name: x.bfloat16() if _is_real(x) and x.dtype.itemsize == 1 else x for name, x in tensors.items()}
    if dtype is not None:
        kept = full_precision(model) if dtype.itemsize < 4 else set()
        tensors = {name: tensor.to(torch.float32 if name in kept else dtype) for name, tensor in tensors.items()}
    model.load_state_dict(tensors, assign=True)


def _is_real(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def full_precision(model: nn.Module) -> set[str]:
    """Returns the names of the parameters that a model needs in float32, as declared by its layers."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in getattr(module, "full_precision", ())
    }


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns a problem if weights are NaN or infinite: such a model predicts nothing."""
    return bad_weights([name for name, x in tensors.items() if not is_finite(x)], len(tensors))


def is_finite(x: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity."""
    # The extremes of a tensor are NaN if it has a NaN. They need no memory beside the tensor.
    return not (x.is_floating_point() and x.numel()) or bool(
        torch.stack(torch.aminmax(_comparable(x))).isfinite().all()
    )


def bad_weights(names: Sequence[str], count: int) -> list[str]:
    """Returns a problem if some of `count` tensors, those of `names`, are not finite."""
    if not names:
        return []
    named = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return [f"{len(names)} of {count} tensors have weights that are NaN or infinite: {named}; use other weights"]


def _comparable(x: Tensor) -> Tensor:
    """Returns a tensor of 8-bit floats, which PyTorch does not compare, as one of 32 bits; others as they are."""
    return x.float() if x.dtype.itemsize == 1 else x


def changed_files(folder: Path, names: Iterable[str] = (WEIGHTS, TOKENIZER)) -> list[str]:
    """Returns a problem for each of these files of a model folder that is missing or differs from the written one."""
    sums, problems = folder / SUMS, []
    if not sums.is_file():
        return []
    try:
        lines = [line.split() for line in load_text(sums, errors="replace").splitlines()]
    except ValueError as error:
        return [f"{sums}: is damaged ({error}); copy the folder again"]
    expected = {line[1]: line[0] for line in lines if len(line) == 2}
    for name in names:
        file = folder / name
        if name in expected and not file.is_file():
            problems.append(f"{file}: the file is missing, but {SUMS} names it; copy it again")
        elif name in expected and checkpoint.sha256(file) != expected[name]:
            problems.append(
                f"{file}: the contents changed since they were written (SHA-256 differs); copy the folder again, or "
                f"delete {sums} if you changed the file yourself"
            )
    return problems


def mismatches(own: Mapping[str, tuple], given: Mapping[str, tuple]) -> list[str]:
    """Returns why tensors of shapes `given` cannot be the weights of a model whose tensors have shapes `own`."""
    problems = [f"{name}: is not in the checkpoint" for name in own if name not in given]
    problems += [f"{name}: is not in the model" for name in given if name not in own]
    problems += [
        f"{name}: shape {list(given[name])} in the checkpoint, {list(own[name])} in the model"
        for name in own
        if name in given and tuple(own[name]) != tuple(given[name])
    ]
    return problems


def _read_weights(
    folder: RunFolder, weights: Weights | None, best: bool
) -> tuple[dict[str, Tensor], int | None, int | None]:
    """Returns the weights, their training step, and the number of documents that they were trained on."""
    file = folder.path / WEIGHTS
    lacking = "weights: average: {} has no averaged weights; use raw, or train with `average`"
    if file.is_file() and not best:
        if weights == AVERAGE:
            raise ConfigError([lacking.format(folder.path)], "model")
        return read_weights(folder.path), None, None
    problems = []
    for path in [folder.best_checkpoint()] if best else reversed(folder.checkpoints()):
        try:
            averaged = weights != "raw" and AVERAGE in checkpoint.groups(path)
            tensors, meta = checkpoint.load(path, [MODEL, AVERAGE] if averaged else [MODEL])
        except CheckpointError as error:
            problems += error.problems
            continue
        if problems:
            told = f"skipped a damaged checkpoint: {'; '.join(problems)}; using {path.name}"
            warnings.warn(told, DamagedCheckpoint, stacklevel=3)
        if weights == AVERAGE and not averaged:
            raise ConfigError([lacking.format(path)], "model")
        state = tensors[MODEL] | tensors.get(AVERAGE, {})
        return state, checkpoint.step_of(path), meta.get("documents")
    problems = [f"{line}; copy the run folder again, or train it again" for line in problems]
    raise ConfigError(problems or [f"{folder.path}: has neither {WEIGHTS} nor a checkpoint"], "model")
