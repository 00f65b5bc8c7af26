"""Prefixes of prompts as the states after their last token: saved in a file, or kept in memory for the next prompts.

A prefix in a file has a constant size. The file is a safetensors file with the tensors `state.<layer>.<name>` (a batch
of one), `logits` of the next token, and `seen` (which tokens occurred). Its metadata holds the model's digest, the
number of tokens, the last of them, and the format.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from linnet.config import ConfigError, refuse, shown
from linnet.inference.request import CONTEXT
from linnet.models import ModelState
from linnet.runs.files import is_full, save_tensors

_FORMAT = "1"


@dataclass(frozen=True)
class Prefix:
    """The states of a model after some tokens, from which requests continue.

    Attributes:
        digest: digest of the model (`weights_digest`).
        tokens: number of tokens read.
        states: the states, a batch of one.
        logits: [rows of the model's embedding], of the next token.
        seen: bool [vocab], the tokens that occurred; `vocab` is the number of the tokenizer's tokens.
        last: the last tokens, at most `CONTEXT`: the text of a completion depends on them.
    """

    digest: str
    tokens: int
    states: ModelState
    logits: Tensor
    seen: Tensor
    last: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [self.logits, self.seen, *(x for state in self.states.values() for x in state.values())]
        return sum(x.nbytes for x in tensors)

    def save(self, path: str | Path) -> None:
        """Writes the file. Raises `ConfigError` if it cannot be written."""
        named = {f"state.{layer}.{name}": x for layer, state in self.states.items() for name, x in state.items()}
        named |= {"logits": self.logits, "seen": self.seen}
        metadata = {"format": _FORMAT, "digest": self.digest, "tokens": str(self.tokens)}
        metadata["last"] = json.dumps(self.last)
        try:
            save_tensors(Path(path), {name: x.cpu() for name, x in named.items()}, metadata)
        except (OSError, SafetensorError) as error:
            fix = "the disk is full; free some space" if is_full(error) else f"{error}; name another file"
            raise ConfigError([f"{path}: cannot be written: {fix}"], "prefix") from None


@dataclass(frozen=True)
class Cut:
    """The end of a chunk of a prompt.

    Attributes:
        end: number of tokens before the cut.
        key: digest of these tokens; None at the end of a prompt where longer prompts are not cut.
        turn: whether the last of them ends a turn.
    """

    end: int
    key: bytes | None
    turn: bool


def cuts(prompt: np.ndarray, chunk: int, turn_ends: Collection[int]) -> list[Cut]:
    """Returns where a prompt is cut into chunks: after `chunk` tokens, or before at the end of a turn.

    A turn's end cuts from a quarter of `chunk` on, so that short turns do not make short chunks. Cuts depend on the
    tokens before them alone, so that prompts with a common prefix have its cuts in common. The last one is the end of
    the prompt.

    Args:
        prompt: token ids, int64 [T].
        chunk: most tokens of a chunk.
        turn_ends: tokens that end a turn or a document.
    """
    ends = np.flatnonzero(np.isin(prompt, list(turn_ends))) + 1
    total, digest, start = len(prompt), hashlib.sha256(), 0
    places: list[Cut] = []
    while start < total:
        following = ends[np.searchsorted(ends, start + max(1, chunk // 4)) :]
        turn = bool(len(following)) and int(following[0]) <= start + chunk
        end = int(following[0]) if turn else start + chunk
        if end > total:
            return [*places, Cut(total, None, False)]
        digest.update(prompt[start:end].tobytes())
        places.append(Cut(end, digest.digest(), turn))
        start = end
    return places


def covered(places: list[Cut], keys: Collection[bytes]) -> int:
    """Returns the number of tokens before the last cut whose key is kept."""
    return next((cut.end for cut in reversed(places) if cut.key in keys), 0)


class PrefixCache:
    """States at cuts of the prompts that were read, within a budget of memory; the least recently used ones go first.

    Attributes:
        budget: most bytes of states.
        bytes: bytes of the states that are kept.
    """

    def __init__(self, budget: int):
        self.budget, self.bytes = budget, 0
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()

    def find(self, places: list[Cut]) -> tuple[int, Prefix | None]:
        """Returns the number of cuts that the longest kept prefix covers, and this prefix."""
        for count in range(len(places), 0, -1):
            key = places[count - 1].key
            if key in self._kept:
                self._kept.move_to_end(key)
                return count, self._kept[key]
        return 0, None

    @property
    def keys(self) -> frozenset[bytes]:
        """The keys of the cuts that are kept. Any thread may ask for them."""
        return frozenset(self._kept)

    def keep(self, key: bytes, prefix: Prefix) -> None:
        """Keeps a prefix, unless it alone exceeds the budget. The caller must not write its tensors afterwards."""
        if key in self._kept or prefix.bytes > self.budget:
            return
        self._kept[key] = prefix
        self.bytes += prefix.bytes
        while self.bytes > self.budget:
            self.bytes -= self._kept.popitem(last=False)[1].bytes

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0


def load_prefix(path: str | Path, digest: str, like: ModelState, rows: int, vocab: int, device: torch.device) -> Prefix:
    """Reads a file that `Prefix.save` wrote.

    Args:
        digest: digest of the model that will continue from the prefix.
        like: states of a batch of one; those of the file must have the same shapes and dtypes.
        rows, vocab: length of `logits` and of `seen`.
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
        raise ConfigError([f"{path}: is damaged, or not a saved prefix ({error}); save it again"], "prefix") from None
    if metadata.get("format") != _FORMAT or "digest" not in metadata:
        message = f"{path}: is not a saved prefix (its metadata has no format {_FORMAT}); save it again"
        raise ConfigError([message], "prefix")
    if metadata["digest"] != digest:
        message = (
            f"{path}: belongs to the model {shown(metadata['digest'])}, not to this one ({digest!r}): weights, "
            "precision or configuration differ; save it again with this model (--save-state)"
        )
        raise ConfigError([message], "prefix")
    expected = {f"state.{layer}.{name}": x for layer, state in like.items() for name, x in state.items()}
    problems = [f"{path}: {name} is missing" for name in (*expected, "logits", "seen") if name not in named]
    problems += [
        f"{path}: {name} has shape {list(named[name].shape)}, here {list(x.shape)}; use the same context_length"
        for name, x in expected.items()
        if name in named and (named[name].shape != x.shape or named[name].dtype != x.dtype)
    ]
    problems += [
        f"{path}: {name} is not {kind} [{width}]; save it again"
        for name, kind, width in (("logits", "real", rows), ("seen", "bool", vocab))
        if not _is_row(named.get(name), kind, width)
    ]
    tokens, last = (_numbers(metadata.get(key, none)) for key, none in (("tokens", ""), ("last", "[]")))
    if len(tokens) != 1 or tokens[0] < 1:
        problems.append(f"{path}: tokens is {shown(metadata.get('tokens'))}, not a number above 0; save it again")
    if len(last) > CONTEXT or not all(0 <= token < vocab for token in last):
        problems.append(f"{path}: last is {shown(metadata['last'])}, not at most {CONTEXT} tokens; save it again")
    refuse(problems, "prefix")
    states = {layer: {name: named[f"state.{layer}.{name}"] for name in state} for layer, state in like.items()}
    return Prefix(digest, tokens[0], states, named["logits"], named["seen"], last)


def weights_digest(model: nn.Module, config: str | None = None) -> str:
    """Returns a digest (12 hexadecimal digits) of a configuration and of the weights' names, dtypes, shapes and values.

    Without a configuration it is that of the names and values of all tensors of the model's state, buffers included.
    """
    total = hashlib.sha256((config or "").encode())
    for name, tensor in sorted(model.state_dict().items() if config is None else model.named_parameters()):
        total.update((name if config is None else f"{name} {tensor.dtype} {list(tensor.shape)}").encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()[:12]


def _is_row(x: Tensor | None, kind: str, width: int) -> bool:
    right = x is not None and (x.dtype == torch.bool if kind == "bool" else x.is_floating_point())
    return right and x.shape == (width,)


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the whole numbers in a text, a JSON number or list; -1 for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return (-1,)
    numbers = value if isinstance(value, list) else [value]
    return tuple(number if type(number) is int and number < 1 << 62 else -1 for number in numbers)
