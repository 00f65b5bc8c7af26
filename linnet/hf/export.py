"""Exports a run or model folder as a folder that transformers loads."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from linnet.config import ConfigError
from linnet.data import Tokenizer
from linnet.deprecation import renamed
from linnet.hf.card import write_card
from linnet.hf.config import LinnetConfig
from linnet.hf.layouts import Plan, Settings, llama
from linnet.hf.model import LinnetForCausalLM
from linnet.hf.tokenizer import to_transformers
from linnet.models import CausalLM
from linnet.runs import RunFolder, load_model

__getattr__ = partial(renamed, __name__)

TEMPLATE, PREPROCESSOR = "chat_template.jinja", "preprocessor_config.json"


def export(path: str | Path, out: str | Path, *, allow_plugins: bool = False) -> Path:
    """Writes the model of a run or model folder as config.json, model.safetensors and the tokenizer's files.

    A modelling file of a few lines (`linnet.hf.config.CODE`) lets programs load the folder with `trust_remote_code`,
    and README.md is its model card.

    Args:
        path: a run or model folder.
        out: a new or empty folder.
        allow_plugins: as in `linnet.runs.load_model`.

    Returns:
        `out`.

    Raises:
        ConfigError: `path` has no model, or `out` is not empty or cannot be created.
    """
    path, out = Path(path), Path(out)
    check_empty(out)
    causal, tokenizer = load_model(path, allow_plugins=allow_plugins)
    config = LinnetConfig(model=causal.config.model_dump(mode="json"))
    config.architectures = [LinnetForCausalLM.__name__]
    return _write(path, out, causal, wrap(causal, config), tokenizer)


def export_llama(path: str | Path, out: str | Path, *, allow_plugins: bool = False) -> Path:
    """Writes a model of the layout `attention+swiglu` as transformers' own Llama, which needs no code of Linnet's.

    Args and returns as `export`.

    Raises:
        ConfigError: as `export`, or the model has settings that a Llama does not have; the message lists their keys.
    """
    path, out = Path(path), Path(out)
    check_empty(out)
    causal, tokenizer = load_model(path, allow_plugins=allow_plugins)
    values = llama.write(causal.config)
    seq_len = RunFolder.open(path).config.get("seq_len")
    if isinstance(seq_len, int):
        values["max_position_embeddings"] = max(seq_len, values.get("max_position_embeddings", 1))
    parts = llama.read(Settings(values, causal.config.tie_embeddings)).parts
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**values, bos_token_id=None))
    tensors = {parts[name].name: tensor for name, tensor in causal.state_dict().items()}
    model.load_state_dict(tensors, assign=True, strict=False)  # a tied head has no tensor of its own
    model.tie_weights()
    return _write(path, out, causal, model.eval(), tokenizer)


def joined(plan: Plan, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layout from Linnet's, the inverse of what `convert` reads."""
    found: dict[str, torch.Tensor] = {}
    for name, part in plan.parts.items():
        tensor = tensors[name].detach().cpu()
        if part.name not in found:
            found[part.name] = torch.empty(part.shape(tuple(tensor.shape)), dtype=tensor.dtype)
        part.put(found[part.name], tensor)
    return found


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{out}: cannot be made ({error.strerror}); choose another with --out"], "export") from None


def check_empty(out: Path) -> None:
    """Raises ConfigError if a folder has content."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError([f"{out}: is not an empty folder; choose a new one with --out"], "export")


def _write(path: Path, out: Path, causal: CausalLM, model: PreTrainedModel, tokenizer: Tokenizer | None) -> Path:
    """Writes a transformers model, the tokenizer and the card of the run or model folder `path`; returns `out`."""
    make_folder(out)
    end = None if tokenizer is None else tokenizer.end_of_document
    every = [] if tokenizer is None else [*dict.fromkeys((end, *tokenizer.generation_ends))]
    ends: dict[str, Any] = {"eos_token_id": every if len(every) > 1 else end, "pad_token_id": end}
    model.config.update(ends)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(out)
    if tokenizer is not None:
        template = path / TEMPLATE
        written = template.read_text(encoding="utf-8") if template.is_file() else None
        to_transformers(tokenizer, written).save_pretrained(out)
    write_card(path, out, causal, tokenizer, own_code=isinstance(model, LinnetForCausalLM))
    return out


def wrap(causal: CausalLM, config: LinnetConfig) -> LinnetForCausalLM:
    """Returns a transformers model that wraps a Linnet model and shares its weights."""
    with torch.device("meta"):
        model = LinnetForCausalLM(config)
    model.model = causal
    return model.eval()
