"""Saves a prefix of prompts in a file of constant size: the states after its last token, instead of its text.

The file is a safetensors file with the tensors `state.<layer>.<name>` (a batch of one), `logits` of the next token, and
`seen` (which tokens occurred). Its metadata holds the model's digest, the number of tokens and the format.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from linnet.config import ConfigError, refuse
from linnet.models import ModelState

_FORMAT = "1"


@dataclass(frozen=True)
class Prefix:
    """The states of a model after some tokens, from which requests continue.

    Attributes:
        digest: digest of the model (`weights_digest`).
        tokens: number of tokens read.
        states: the states, a batch of one.
        logits: [vocab], of the next token.
        seen: bool [vocab], the tokens that occurred.
    """

    digest: str
    tokens: int
    states: ModelState
    logits: Tensor
    seen: Tensor

    def save(self, path: str | Path) -> None:
        """Writes the file. Raises `ConfigError` if it cannot be written."""
        named = {f"state.{layer}.{name}": x for layer, state in self.states.items() for name, x in state.items()}
        named |= {"logits": self.logits, "seen": self.seen}
        metadata = {"format": _FORMAT, "digest": self.digest, "tokens": str(self.tokens)}
        try:
            save_file({name: x.contiguous().cpu() for name, x in named.items()}, path, metadata)
        except (OSError, SafetensorError) as error:
            raise ConfigError([f"{path}: cannot be written ({error})"], "prefix") from None


def load_prefix(path: str | Path, digest: str, like: ModelState, vocab: int, device: torch.device) -> Prefix:
    """Reads a file that `Prefix.save` wrote.

    Args:
        digest: digest of the model that will continue from the prefix.
        like: states of a batch of one; those of the file must have the same shapes and dtypes.
        vocab: length of `logits` and `seen`.
        device: where to put the tensors.

    Raises:
        ConfigError: the file is missing, is not a prefix, or belongs to another model or context length.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except FileNotFoundError:
        message = f"{path}: does not exist; give a file that `Prefix.save` or `linnet generate --save-state` wrote"
        raise ConfigError([message], "prefix") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"{path}: is not a saved prefix ({error})"], "prefix") from None
    if metadata.get("format") != _FORMAT or "digest" not in metadata:
        raise ConfigError([f"{path}: is not a saved prefix (its metadata has no format {_FORMAT})"], "prefix")
    if metadata["digest"] != digest:
        message = (
            f"{path}: belongs to the model {metadata['digest']}, not to this one ({digest}): weights, precision or "
            "configuration differ; make the prefix again with this model"
        )
        raise ConfigError([message], "prefix")
    expected = {f"state.{layer}.{name}": x for layer, state in like.items() for name, x in state.items()}
    problems = [f"{path}: {name} is missing" for name in (*expected, "logits", "seen") if name not in named]
    problems += [
        f"{path}: {name} has shape {list(named[name].shape)}, here {list(x.shape)}; use the same context_length"
        for name, x in expected.items()
        if name in named and (named[name].shape != x.shape or named[name].dtype != x.dtype)
    ]
    problems += [f"{path}: {name} is not [{vocab}]" for name in ("logits", "seen") if _width(named.get(name)) != vocab]
    refuse(problems, "prefix")
    states = {layer: {name: named[f"state.{layer}.{name}"] for name in state} for layer, state in like.items()}
    return Prefix(digest, int(metadata["tokens"]), states, named["logits"], named["seen"])


def weights_digest(model: nn.Module, config: str | None = None) -> str:
    """Returns a digest (12 hexadecimal digits) of a configuration and of the weights' names, dtypes, shapes and values.

    Without a configuration it is that of the names and values of all tensors of the model's state, buffers included.
    """
    total = hashlib.sha256((config or "").encode())
    for name, tensor in sorted(model.state_dict().items() if config is None else model.named_parameters()):
        total.update((name if config is None else f"{name} {tensor.dtype} {list(tensor.shape)}").encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()[:12]


def _width(x: Tensor | None) -> int | None:
    return None if x is None or x.ndim != 1 else x.shape[0]
