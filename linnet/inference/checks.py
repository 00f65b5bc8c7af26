"""What must be right about an engine and a prompt before anything is computed."""

from collections.abc import Sequence

import numpy as np
import torch

from linnet.config import ConfigError
from linnet.data import Tokenizer

NOTHING = np.zeros(0, np.int64)


def check_settings(slots: int, context_length: int | None, prefill_chunk: int | None, device: str) -> None:
    """Raises `ConfigError` that lists all settings of an engine that make no sense."""
    whole = {"slots": slots, "context_length": context_length, "prefill_chunk": prefill_chunk}
    problems = [f"{key}: {value} is not above 0" for key, value in whole.items() if value is not None and value < 1]
    if device not in ("auto", "cpu", "cuda"):
        problems.append(f"device: {device!r} is unknown; use auto, cpu or cuda")
    elif device == "cuda" and not torch.cuda.is_available():
        problems.append("device: there is no CUDA GPU here; use cpu")
    if problems:
        raise ConfigError(problems, "engine")


def encode(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab: int, problems: list[str], begins: bool = True
) -> np.ndarray:
    """The token ids of a prompt, int64; where it has none that can be used, `problems` says why.

    A text that `begins` has the tokenizer's `prompt_start` in front. Where there is none an empty text is the end of a
    document, which stands before each document in training: the model begins a new one.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            problems.append("prompt: is text, but the model has no tokenizer here; give token ids")
            return NOTHING
        try:
            start = tokenizer.prompt_start or (() if prompt else (tokenizer.end_of_document,))
            return np.concatenate([np.asarray(start if begins else (), np.int64), tokenizer.encode(prompt)])
        except ValueError as error:
            problems.append(f"prompt: {error}")
            return NOTHING
    tokens = np.asarray(prompt)
    if tokens.size == 0:
        return NOTHING
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        problems.append("prompt: give text, or a list of whole numbers")
        return NOTHING
    if outside := tokens[(tokens < 0) | (tokens >= vocab)][:3].tolist():
        problems.append(f"prompt: {outside} are no tokens; use numbers from 0 to {vocab - 1}")
    return tokens.astype(np.int64)
