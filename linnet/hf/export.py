"""Exports a run or model folder as a folder that transformers loads."""

from pathlib import Path

import torch
from transformers import GenerationConfig

from linnet.config import ConfigError
from linnet.hf.card import write_card
from linnet.hf.config import LinnetConfig
from linnet.hf.model import LinnetForCausalLM
from linnet.hf.tokenizer import to_transformers
from linnet.models import CausalLM
from linnet.runs import load_model

TEMPLATE = "chat_template.jinja"


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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError([f"{out}: is not an empty folder; choose a new one with --out"], "export")
    causal, tokenizer = load_model(path, allow_plugins=allow_plugins)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{out}: cannot be made ({error.strerror}); choose another with --out"], "export") from None
    end = None if tokenizer is None else tokenizer.end_of_document
    config = LinnetConfig(model=causal.config.model_dump(mode="json"), eos_token_id=end, pad_token_id=end)
    config.architectures = [LinnetForCausalLM.__name__]
    model = wrap(causal, config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(out)
    if tokenizer is not None:
        template = path / TEMPLATE
        written = template.read_text(encoding="utf-8") if template.is_file() else None
        to_transformers(tokenizer, written).save_pretrained(out)
    write_card(path, out, causal, tokenizer)
    return out


def wrap(causal: CausalLM, config: LinnetConfig) -> LinnetForCausalLM:
    """Returns a transformers model that wraps a Linnet model and shares its weights."""
    with torch.device("meta"):
        model = LinnetForCausalLM(config)
    model.model = causal
    return model.eval()
