"""Exports a run or model folder as a folder that transformers loads.

Its model card is README.md, with the front matter that the Hub reads: what the run recorded, shape and sizes, tokens,
text, loss, and how to load the model. The license is the user's to choose, so its line is a comment.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import GenerationConfig
from transformers.utils import logging

import linnet
from linnet.config import ConfigError, nearest
from linnet.data import Tokenizer
from linnet.data.chat.template import read_template
from linnet.deprecation import renamed
from linnet.hf.layouts import FAMILIES, Plan, Settings
from linnet.hf.model import LinnetConfig, LinnetForCausalLM, to_transformers
from linnet.hf.source import SAFE
from linnet.models import CausalLM
from linnet.runs import RunFolder
from linnet.runs.files import check_empty, new_folder, save_tensors
from linnet.runs.model import Generation, load_checkpoint

__getattr__ = partial(renamed, __name__)

PREPROCESSOR = "preprocessor_config.json"
SHARD_SIZE = "5GB"


def export(path: str | Path, out: str | Path, *, allow_plugins: bool = False, shard_size: str = SHARD_SIZE) -> Path:
    """Writes the model of a run or model folder as config.json, model.safetensors and the tokenizer's files.

    A modelling file of a few lines (`linnet.hf.model.CODE`) lets programs load the folder with `trust_remote_code`,
    and README.md is its model card.

    Args:
        path: a run or model folder.
        out: a new or empty folder.
        allow_plugins: as in `linnet.runs.load_model`.
        shard_size: largest size of a file of weights, such as 5GB, 200MB or 64KB, unless one tensor is larger.

    Returns:
        `out`.

    Raises:
        ConfigError: `path` has no model, `out` is not empty or cannot be created, or `shard_size` is not a size.
    """
    path, out, size = Path(path), Path(out), _bytes(shard_size)
    check_empty(out, "export")
    loaded = load_checkpoint(path, allow_plugins=allow_plugins)
    causal, tokenizer = loaded.model, loaded.tokenizer
    config = LinnetConfig(model=causal.config.model_dump(mode="json"))
    config.architectures = [LinnetForCausalLM.__name__]
    model, ends = wrap(causal, config), _ends(tokenizer, loaded.generation)
    model.config.update(ends)
    model.generation_config = _generation(ends, loaded.generation.sampling)
    with new_folder(out, "export") as folder, _without_bars():
        model.save_pretrained(folder, max_shard_size=size)
        _write_rest(path, folder, out.resolve().name, causal, tokenizer, own_code=True)
    return out


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hides the progress bars of transformers: a command that writes a folder prints its path alone."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def export_as(
    target: str, path: str | Path, out: str | Path, *, allow_plugins: bool = False, shard_size: str = SHARD_SIZE
) -> Path:
    """Writes a model in the layout of another project, which needs no code of Linnet's.

    Args:
        target: a key of `linnet.hf.layouts.FAMILIES`.
        path, out, allow_plugins, shard_size: as in `export`.

    Raises:
        ConfigError: as `export`, or the model has settings that the layout does not have; the message lists their keys.
    """
    path, out, size = Path(path), Path(out), _bytes(shard_size)
    check_empty(out, "export")
    if target not in FAMILIES:
        raise ConfigError([f"target: {target!r} is not a layout; {nearest(target, FAMILIES)}"], "export")
    loaded = load_checkpoint(path, allow_plugins=allow_plugins)
    causal, tokenizer = loaded.model, loaded.tokenizer
    family = FAMILIES[target]
    values, tied, tensors = family.write(causal.config), causal.config.tie_embeddings, causal.state_dict()
    if tied and family.stores_head:
        tensors["head.weight"] = tensors["embedding.weight"]
    plan = family.read(Settings(values, tied and not family.stores_head))
    seq_len = RunFolder.open(path).config.get("seq_len")
    if isinstance(seq_len, int):
        values["max_position_embeddings"] = max(seq_len, values.get("max_position_embeddings", 1))
    values |= {"dtype": str(causal.embedding.weight.dtype).removeprefix("torch."), "bos_token_id": None}
    values |= (ends := _ends(tokenizer, loaded.generation))
    with new_folder(out, "export") as folder:
        _write_shards(folder, plan, tensors, size)
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        _generation(ends, loaded.generation.sampling).save_pretrained(folder)
        _write_rest(path, folder, out.resolve().name, causal, tokenizer, own_code=False)
    return out


export_llama = partial(export_as, "llama")


def joined(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layout from Linnet's, the inverse of what `convert` reads."""
    return {name: _joined(plan, places, tensors) for name, places in _sources(plan).items()}


def _sources(plan: Plan) -> dict[str, list[tuple[str, int]]]:
    """Returns Linnet's parameters in each tensor of a layout: their names, and the tensor's number among theirs."""
    places: dict[str, list[tuple[str, int]]] = {}
    for name, part in plan.parts.items():
        for index, its in enumerate(part.names):
            places.setdefault(its, []).append((name, index))
    return places


def _joined(plan: Plan, places: list[tuple[str, int]], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    first = tensors[places[0][0]]
    whole = torch.empty(plan.parts[places[0][0]].shape(tuple(first.shape)), dtype=first.dtype)
    for name, index in places:
        plan.parts[name].put(whole, tensors[name].detach().cpu(), index)
    return whole


def _write_shards(out: Path, plan: Plan, tensors: Mapping[str, torch.Tensor], size: int) -> None:
    """Writes the tensors of a layout in files of at most `size` bytes, and an index if there are several."""
    shards: list[list[str]] = [[]]
    sources, left, total = _sources(plan), size, 0
    for name, places in sources.items():
        count = sum(tensors[name].nbytes // len(plan.parts[name].names) for name, _ in places)
        if count > left and shards[-1]:
            shards.append([])
            left = size
        shards[-1].append(name)
        left, total = left - count, total + count
    files = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [SAFE]
    for file, held in zip(files, shards, strict=True):
        save_tensors(out / file, {name: _joined(plan, sources[name], tensors) for name in held}, {"format": "pt"})
    if len(shards) > 1:
        held_by = {name: file for file, held in zip(files, shards, strict=True) for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": held_by}
        (out / f"{SAFE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes(size: str) -> int:
    """Returns the bytes of a size such as 5GB."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([KMG]?)B", size.strip().upper())
    count = int(float(match[1]) * 1000 ** " KMG".index(match[2] or " ")) if match else 0
    if not count:
        raise ConfigError([f"shard_size: {size!r} is not a size; write for example 5GB, 200MB or 64KB"], "export")
    return count


def _ends(tokenizer: Tokenizer | None, generation: Generation) -> dict[str, Any]:
    """Returns the keys of config.json for the tokens that end a generation."""
    ends = list(generation.ends)
    pad = None if tokenizer is None else tokenizer.end_of_document
    return {"eos_token_id": ends if len(ends) > 1 else next(iter(ends), None), "pad_token_id": pad}


def _generation(ends: Mapping[str, Any], sampling: Mapping[str, float]) -> GenerationConfig:
    penalty = {"repetition_penalty": sampling["repetition_penalty"]} if "repetition_penalty" in sampling else {}
    draws = len(sampling) > len(penalty) and sampling.get("temperature") != 0  # else transformers refuses the others
    return GenerationConfig(**ends, **({**sampling, "do_sample": True} if draws else penalty))


def _write_rest(
    path: Path, out: Path, name: str, causal: CausalLM, tokenizer: Tokenizer | None, own_code: bool
) -> None:
    """Writes the tokenizer and the card of the run or model folder `path`.

    Args:
        name: what the card calls the new folder.
        own_code: whether that folder needs Linnet's code, which a Llama does not.
    """
    if tokenizer is not None:
        to_transformers(tokenizer, read_template(path)).save_pretrained(out)
    (out / CARD).write_text(card(path, name, causal, tokenizer, own_code), encoding="utf-8")


def wrap(causal: CausalLM, config: LinnetConfig) -> LinnetForCausalLM:
    """Returns a transformers model that wraps a Linnet model and shares its weights."""
    with torch.device("meta"):
        model = LinnetForCausalLM(config)
    model.model = causal
    return model.eval()


CARD = "README.md"
INSTALL = "pip install 'linnet-lm[hf]'"
TRUST = """
`trust_remote_code=True` runs `modeling_linnet.py` of this folder, which imports the installed package `linnet-lm` and
does nothing else. After `import linnet.hf` the model loads without it.
"""


def card(path: Path, name: str, model: CausalLM, tokenizer: Tokenizer | None, own_code: bool) -> str:
    """Returns the text of the card; `name` is the folder's name, for the examples."""
    folder = RunFolder.open(path)
    result: Mapping[str, Any] = {}
    if folder.done:
        try:
            result = folder.result()
        except ConfigError:  # a damaged result.json; the card then has no numbers of the training
            result = {}
    mixers = sorted({spec.mixer for spec in model.config.blocks if spec.mixer})
    front = yaml.safe_dump(
        {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["linnet", *mixers]},
        sort_keys=False,
    )
    trust = ", trust_remote_code=True" if own_code else ""
    return f"""---
{front}# license: choose one before you publish, for example apache-2.0
---

# {name}

A causal language model made with [Linnet](https://pypi.org/project/linnet-lm/) {linnet.__version__}.

{_table("model", _sizes(model, tokenizer))}
{_training(folder.config, result)}
## How to load it

    {INSTALL if own_code else "pip install transformers"}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
inputs = tokenizer(["The"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=40)))
```
{TRUST if own_code else ""}{_plugins(folder.config)}"""


def _sizes(model: CausalLM, tokenizer: Tokenizer | None) -> dict[str, str]:
    config = model.config
    total, backbone = (sum(p.numel() for p in part.parameters()) for part in (model, model.backbone))
    head = 0 if model.head is None else model.head.weight.numel()
    assert total == backbone + head + model.embedding.weight.numel()
    rows = {
        "layout": f"`{config.layout}`",
        "layers, width": f"{config.num_layers}, {config.d_model:,}",
        "parameters": f"{total:,} ({backbone:,} without embedding and head)",
        "vocabulary": f"{config.vocab_size:,}",
    }
    if tokenizer is not None:
        rows["tokenizer"] = f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens"
    return rows


def _training(config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    rows: dict[str, str] = {}
    data = config.get("data")
    if isinstance(data, Mapping) and "source" in data:
        source = data["source"]
        names = [source] if isinstance(source, str) else [str(item) for item in source]
        rows["text"] = ", ".join(f"`{_public(name)}`" for name in names)
        rows["tokens per sequence"] = _number(config.get("seq_len"))
    for key, label in (("tokens", "tokens"), ("steps", "steps"), ("flops", "training FLOPs")):
        if result.get(key) is not None:
            rows[label] = _number(result[key])
    if result.get("loss") is not None:
        rows["held-out loss"] = f"{result['loss']:.4f} nats per token"
        if result.get("bits_per_byte") is not None:
            rows["held-out loss"] += f", {result['bits_per_byte']:.4f} bits per byte"
    if not rows:
        return "The folder that this model was exported from does not record its training.\n"
    return _table("training", rows)


def _public(name: str) -> str:
    """Returns the name of a source without the folders of this machine; names on the Hub (`hf:`) stay whole."""
    return name if name.startswith("hf:") else Path(name).name


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not recorded"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _table(title: str, rows: Mapping[str, str]) -> str:
    def cell(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|")

    lines = [f"| {title} | |", "|---|---|", *(f"| {name} | {cell(value)} |" for name, value in rows.items())]
    return "\n".join(lines) + "\n"


def _plugins(config: Mapping[str, Any]) -> str:
    plugins = config.get("plugins") or []
    if not plugins:
        return ""
    names = ", ".join(f"`{plugin}`" for plugin in plugins)
    return f"""
Its mixers are in files that are not part of this folder: {names}.
Load them before the model, with `linnet.layers.load_plugin`.
"""
