"""Converts checkpoints of other projects to Linnet model folders, which `linnet.runs.load_model` reads."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import CONFIG_MAPPING

from linnet.config import MOST_PROBLEMS, ConfigError, checking, gather, nearest, refuse, shown
from linnet.data import Tokenizer, load_tokenizer
from linnet.data.chat.template import FILE as TEMPLATE
from linnet.data.chat.template import read_template
from linnet.hf.export import PREPROCESSOR
from linnet.hf.layouts import FAMILIES, HEAD, LAYOUTS, MISSING, SSM, TIMM, Plan, Settings
from linnet.hf.source import AUTHOR, Source, open_source, read_json
from linnet.layers import load_plugin
from linnet.models import ModelConfig, StackConfig, empty_of
from linnet.runs.files import check_empty, new_folder
from linnet.runs.folder import CLASSES
from linnet.runs.model import TOKENIZER, Generation, Streamed, bad_weights, is_finite, write_model

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        path: the new model folder.
        layout: name of the layout that was read.
        model: configuration of the model.
        notes: messages for the user, such as why the tokenizer was left out.
    """

    path: Path
    layout: str
    model: StackConfig
    notes: tuple[str, ...]


def convert(path: str | Path, out: str | Path, allow_pickle: bool = False, plugins: Sequence[str] = ()) -> Converted:
    """Converts a checkpoint folder (config.json and weights) to a model folder. Weights keep their dtype.

    `model_type` in config.json selects the layout (`linnet.hf.layouts.LAYOUTS`); a file with `architecture` alone is
    timm's. Of a model of images, preprocessor_config.json gives `mean` and `std`, and the names of its classes become
    classes.json.

    Args:
        path: the checkpoint folder.
        out: a new or empty folder.
        allow_pickle: also read pytorch_model.bin, with `weights_only`.
        plugins: files of the mixers that the checkpoint has from outside the package, as `linnet.layers.load_plugin`
            takes them. This runs them; the new folder names them.

    Raises:
        ConfigError: lists all settings in config.json that Linnet's layers cannot express, or the tensors that are
            missing, left over or of another shape than config.json implies; or a plugin cannot be imported, or the
            model has no such mixer. Nothing is written then.
    """
    check_empty(Path(out), "convert")
    mixers: dict[str, str] = {}
    with checking("convert") as problems:
        for plugin in plugins:
            with gather(problems):
                mixers[plugin] = load_plugin(plugin)
    source = open_source(path, allow_pickle)
    kind = source.config.get("model_type")
    if kind is None and isinstance(source.config.get("architecture"), str):
        kind = TIMM
    if kind is None and {"d_model", "n_layer"} <= source.config.keys():
        kind = SSM
    if kind in (None, "rwkv7") and AUTHOR in source.shapes:
        kind = "rwkv7_author"
    if isinstance(kind, str) and kind in MISSING:
        problem = f"model_type: {kind!r} needs a layer that Linnet does not have: {MISSING[kind]}; a mixer of your own"
        raise ConfigError([f"{problem} can add it (docs/mixers.md), but this checkpoint cannot be read"], str(path))
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise ConfigError(
            [f"model_type: {kind!r} is not a layout that Linnet reads; {nearest(str(kind), LAYOUTS)}"], str(path)
        )
    name, read, spellings = LAYOUTS[kind]
    head = FAMILIES[kind].spellings("head") if kind in FAMILIES else HEAD
    embedding = next((name for name in spellings.split("|") if name in source.shapes), spellings)
    images, nested = read_json(source.path / PREPROCESSOR), source.config.get("text_config")
    if isinstance(nested, dict):  # of a model that also reads images
        source.config |= {**nested, "text_config": nested}
    asked = Asked(source.config)
    settings = Settings(asked, bool(embedding) and _tied(source, embedding, head), images=images, shapes=source.shapes)
    if (quantised := source.config.get("quantization_config")) is not None:
        fix = "use the checkpoint in bfloat16 or float32"
        problem = f"quantization_config: quantised weights are not read (given {shown(quantised)}); {fix}"
        settings.problems.append(problem)
    settings.flag("tie_word_embeddings", False)
    plan = read(settings)
    settings.check()
    unused = [plugin for plugin, name in mixers.items() if name not in plan.model.options]
    what = f"has no effect: the layout {plan.model.layout!r} does not have its mixer; leave it out"
    refuse([f"--mixer {plugin}: {what}" for plugin in unused], "convert")
    shapes = _check_tensors(plan, source, head if settings.tied else "")
    notes = [
        f"{what} was left out: {count} tensors {pattern}"
        for pattern, what in plan.skipped.items()
        if (count := sum(1 for name in source.shapes if re.fullmatch(pattern, name)))
    ]
    if embedding and source.config.get("tie_word_embeddings") is True and not settings.tied:
        notes.append(f"{head} differs from the embedding and was kept, although tie_word_embeddings is true")
    notes += _unread(nested if isinstance(nested, dict) else source.config, kind, asked.names)
    words = isinstance(plan.model, ModelConfig)
    tokenizer = _tokenizer(source, plan.model, notes) if words else None
    generation = _generation(source, (tokenizer or plan.model).vocab_size, notes) if words else None
    if tokenizer is not None and generation is not None:
        tokenizer.generation_ends = tuple(end for end in generation.ends if end != tokenizer.end_of_document)
        tokenizer.sampling = generation.sampling
    template = _template(source, notes) if words else None

    bad = []

    def read_part(name: str) -> torch.Tensor:
        part = plan.parts[name].take(map(source.read, plan.parts[name].names), shapes[name])
        if not is_finite(part):
            bad.append(name)
        return part

    tensors = Streamed({name: source.dtypes[plan.parts[name].names[0]] for name in shapes}, shapes, read_part)
    out = Path(out)
    with new_folder(out, "convert") as folder:
        write_model(folder, plan.model, tensors, tokenizer, list(mixers), generation)
        refuse(bad_weights(bad, len(shapes)), str(source.path))
        if template is not None:
            (folder / TEMPLATE).write_text(template, encoding="utf-8")
        if not words:
            _note_images(folder, source, plan.model, notes)
    return Converted(out, name, plan.model, tuple(notes))


class Asked(dict):
    """A dictionary that notes which of its keys were looked at, in `names`."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.names: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)


# keys of config.json that say how a model was saved or loaded, not what it computes
INERT = {"auto_map", "quantization_config", "tokenizer_class", "torch_dtype", "unsloth_fixed", "unsloth_version"}


def _unread(values: Mapping[str, Any], kind: str, asked: set[str]) -> list[str]:
    """Returns a note about keys that neither a layout nor transformers' class of it reads: code of its own may.

    Args:
        kind: the `model_type`; one of another project than transformers has no note.
        asked: keys that the layout looked at.
    """
    kind = values.get("model_type", kind)
    of_fla = any(key.startswith("fuse_") for key in values)  # flash-linear-attention has some names of transformers'
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or of_fla:
        return []
    known = CONFIG_MAPPING[kind]()
    names = asked | INERT | known.to_dict().keys() | set(known.attribute_map)
    left = [key for key, value in values.items() if key not in names and value and not key.startswith("_")]
    if not left:
        return []
    which = f"config.json: {', '.join(sorted(left))}: neither Linnet nor transformers' {kind} reads this"
    return [f"{which}; a model whose own code does would compute something else than the converted one"]


def _tied(source: Source, embedding: str, head: str) -> bool:
    """Returns whether the head shares the embedding's weight; a stored head that differs is kept."""
    if source.config.get("tie_word_embeddings") is False:
        return False
    return head not in source.shapes or _equal(source, embedding, head)


def _equal(source: Source, embedding: str, head: str) -> bool:
    if source.shapes.get(embedding) != source.shapes[head]:
        return False
    ours, theirs = source.read(embedding), source.read(head)
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def _check_tensors(plan: Plan, source: Source, tied_head: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the model's parameters. Raises ConfigError with all tensors that do not fit.

    `tied_head` is the name of a head that may be left over, because it is the embedding.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in empty_of(plan.model, "meta").state_dict().items()}
    assert shapes.keys() == plan.parts.keys(), shapes.keys() ^ plan.parts.keys()
    needed = {part.name: part.shape(shapes[name])[0] for name, part in plan.parts.items() if plan.recut}
    for names in plan.recut:
        source.cut_at({name: needed[name] for name in names})
    problems, used = {}, set()
    for name, its in [(name, its) for name, part in plan.parts.items() for its in part.names]:
        used.add(its)
        wanted, shape = plan.parts[name].shape(shapes[name]), source.shapes.get(its)
        if shape is None:
            problems[its] = f"{its}: is missing; its shape must be {list(wanted)}"
        elif shape != wanted:
            problems[its] = f"{its}: has shape {list(shape)}, but config.json implies {list(wanted)}"
        elif its in source.integers:
            dtype = source.dtypes[its]
            problems[its] = f"{its}: holds {dtype}, not real numbers; use a checkpoint whose weights are not quantised"
    left = [name for name in source.shapes if name not in used and not plan.ignores(name)]
    problems |= {name: f"{name}: Linnet's model does not use it" for name in left if name != tied_head}
    where = f"weights of {source.path} (take them and config.json from one checkpoint)"
    refuse(problems.values(), where, most=MOST_PROBLEMS)
    return shapes


def _tokenizer(source: Source, model: ModelConfig, notes: list[str]) -> Tokenizer | None:
    file = source.path / TOKENIZER
    settings, ids = _extra(source), [token for ends in _named_ends(source).values() for token in ends]
    if not file.is_file() and (source.path / "tokenizer.model").is_file():
        notes.append(
            f"the tokenizer was left out: tokenizer.model is a sentencepiece file, and Linnet reads only {TOKENIZER}; "
            f"write one with transformers, AutoTokenizer.from_pretrained({str(source.path)!r}).save_pretrained("
            f"{str(source.path)!r}), which needs sentencepiece, and convert again"
        )
        return None
    if not file.is_file():
        notes.append(f"the checkpoint folder has no {TOKENIZER}, so the model folder has no tokenizer")
        return None
    end = _content(settings.get("eos_token")) or (ids[0] if ids else None)
    try:
        tokenizer = load_tokenizer(file, end, added=_added(source, settings), most=model.vocab_size)
    except ConfigError as error:
        fix = "correct it, or eos_token of tokenizer_config.json, and convert again"
        notes.append(f"the tokenizer was left out: {'; '.join(error.problems)}; {fix}")
        return None
    if tokenizer.vocab_size > model.vocab_size:
        notes.append(
            f"the tokenizer was left out: it has {tokenizer.vocab_size} tokens, but the model's embedding has only "
            f"{model.vocab_size} rows"
        )
        return None
    tokenizer.prompt_start = tokenizer.own_start()
    if tokenizer.prompt_start and settings.get("add_bos_token") is False:
        notes.append(f"{TOKENIZER} begins a text with {list(tokenizer.prompt_start)}, although add_bos_token is false")
    tokenizer.bos_token = _content(settings.get("bos_token")) or ""
    return tokenizer


def _generation(source: Source, count: int, notes: list[str]) -> Generation:
    """Returns how generations end and draw tokens. `count` is the number of tokens that can be generated."""
    named = _named_ends(source)
    end_sets = {where: {token for token in ends if token < count} for where, ends in named.items()}
    if beyond := sorted({token for ends in named.values() for token in ends if token >= count}):
        which = ", ".join(map(str, beyond[:5]))
        notes.append(f"eos_token_id: {which} was left out: there are {count} tokens; correct it, and convert again")
    if len({frozenset(ends) for ends in end_sets.values()}) > 1:
        said = ", ".join(f"{sorted(ends)} of {where}" for where, ends in end_sets.items())
        notes.append(f"eos_token_id differs: {said}; a generation ends at each of them")
    return Generation(tuple(sorted(set().union(*end_sets.values()))), _sampling(source, notes))


NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def _added(source: Source, settings: Mapping[str, Any]) -> list[AddedToken]:
    """Returns the tokens that the files beside tokenizer.json name, in the order in which transformers adds them."""
    decoder = settings.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        older = read_json(source.path / "added_tokens.json")
        decoder = {token_id: {"content": token, "special": False} for token, token_id in older.items()}
    entries = [decoder[key] for key in sorted(decoder, key=lambda key: int(key) if str(key).isdigit() else -1)]
    special = [settings.get(key) for key in NAMED]
    for more in (settings.get(key) or [] for key in EXTRA):
        special += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    names = {content for token in special if (content := _content(token))}
    tokens = {}
    for token in entries + special:
        if content := _content(token):
            values = token if isinstance(token, dict) else {}
            flags = {key: values.get(key) is True for key in FLAGS}
            flags["special"] = content in names or values.get("special") is True
            tokens.setdefault(content, AddedToken(content, **flags))
    return list(tokens.values())


def _content(token: Any) -> str | None:
    """Returns the text of a token of tokenizer_config.json, which is a text or an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _named_ends(source: Source) -> dict[str, list[int]]:
    """Returns the ids that end a generation, by the file that names them.

    Raises ConfigError if an `eos_token_id` is not a token or a list of tokens.
    """
    nested = source.config.get("text_config")
    places = {
        "config.json": source.config,
        "text_config of config.json": nested if isinstance(nested, dict) else {},
        GENERATION: read_json(source.path / GENERATION),
    }
    named: dict[str, list[int]] = {}
    for where, values in places.items():
        ends = values.get("eos_token_id")
        ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if any(type(token) is not int or token < 0 for token in ids):
            raise ConfigError(
                [f"{where}: eos_token_id: {ends!r} is not a token; use an id or a list of them"], source.path
            )
        if ids:
            named[where] = ids
    return named


def _sampling(source: Source, notes: list[str]) -> dict[str, float]:
    """Returns what the checkpoint draws tokens with, as generation_config.json says; a note names what it cannot be."""
    values = {key: value for key, value in read_json(source.path / GENERATION).items() if value is not None}
    least = {"temperature": 0.0, "top_k": 0, "top_p": 1e-6, "min_p": 0.0, "repetition_penalty": 1e-3}
    most = {"temperature": 100.0, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.99, "repetition_penalty": 100.0}
    sampling = {}
    for key in [key for key in least if key in values]:
        value, kinds = values[key], (int,) if key == "top_k" else (int, float)
        if type(value) in kinds and least[key] <= value <= most[key]:
            sampling[key] = value
        else:
            what = f"{'whole ' if key == 'top_k' else ''}number from {least[key]:g} to {most[key]:g}"
            notes.append(f"{GENERATION}: {key}: {shown(value)} was left out, because it is not a {what}")
    return sampling


def _template(source: Source, notes: list[str]) -> str | None:
    """Returns the chat template: a separate file since transformers 5, a key of tokenizer_config.json before.

    Of several templates by name it is the default one; a note names the others.
    """
    template = _extra(source).get("chat_template")
    listed = template if isinstance(template, list) else []
    named = {str(spec["name"]): spec.get("template") for spec in listed if isinstance(spec, dict) and "name" in spec}
    named |= {file.stem: None for file in sorted(source.path.glob("additional_chat_templates/*.jinja"))}
    if (file := read_template(source.path)) is not None:
        template = file
    elif listed:
        template = named.get("default")
    if others := sorted(name for name in named if name != "default"):
        notes.append(f"chat templates left out: {', '.join(others)}; the default one serves every conversation")
    return template if isinstance(template, str) else None


def _note_images(folder: Path, source: Source, model: StackConfig, notes: list[str]) -> None:
    """Writes the names of the classes, and tells if the mean and deviation of pixels are not known."""
    names = source.config.get("id2label") or source.config.get("label_names")
    if isinstance(names, dict):
        names = [names.get(str(index)) for index in range(len(names))]
    whole = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if whole and len(names) == getattr(model, "classes", 0):
        (folder / CLASSES).write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    if getattr(model, "mean", None) is None:
        notes.append(
            f"the checkpoint has no mean and deviation of pixels ({PREPROCESSOR}), so the model takes pixels from 0 to "
            f"1 as they are; if it was trained otherwise, write model.mean and model.std into its config.yaml"
        )


def _extra(source: Source) -> dict[str, Any]:
    """Returns the settings of the tokenizer; transformers before 5 kept some in a file of their own."""
    return read_json(source.path / "special_tokens_map.json") | read_json(source.path / "tokenizer_config.json")
