"""The model card of an exported folder: README.md with the front matter that the Hub reads.

It says what the run recorded: shape and sizes, tokens, text, loss, and how to load the model. The license is the user's
to choose, so its line is a comment.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import linnet
from linnet.config import ConfigError
from linnet.data import Tokenizer
from linnet.models import CausalLM
from linnet.runs import RunFolder

CARD = "README.md"
INSTALL = "pip install 'linnet-lm[hf]'"
TRUST = """
`trust_remote_code=True` runs `modeling_linnet.py` of this folder, which imports the installed package `linnet-lm` and
does nothing else. After `import linnet.hf` the model loads without it.
"""


def write_card(path: Path, out: Path, model: CausalLM, tokenizer: Tokenizer | None, own_code: bool) -> None:
    """Writes the card of the model of the run or model folder `path` into `out`.

    Args:
        own_code: whether the folder needs Linnet's code, which a Llama does not.
    """
    (out / CARD).write_text(card(path, out.resolve().name, model, tokenizer, own_code), encoding="utf-8")


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
