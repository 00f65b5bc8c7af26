"""Checks of an engine's settings and of prompts, made before anything is computed."""

from collections.abc import Sequence

import numpy as np
import torch

from linnet.config import refuse
from linnet.data import Tokenizer

NOTHING = np.zeros(0, np.int64)


def check_settings(slots: int, context_length: int | None, prefill_chunk: int | None, device: str) -> None:
    """Raises `ConfigError` with all invalid settings of an engine."""
    whole = {"slots": slots, "context_length": context_length, "prefill_chunk": prefill_chunk}
    given = {key: value for key, value in whole.items() if value is not None}
    problems = [f"{key}: {value} is not above 0" for key, value in given.items() if value < 1]
    problems += [f"{key}: {value} is above {1 << 31:,}" for key, value in given.items() if value > 1 << 31]
    if device not in ("auto", "cpu", "cuda"):
        problems.append(f"device: {device!r} is unknown; use auto, cpu or cuda")
    elif device == "cuda" and not torch.cuda.is_available():
        problems.append("device: cuda needs a CUDA GPU, and this machine has none; use cpu")
    refuse(problems, "engine")


def encode(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab: int, problems: list[str], begins: bool = True
) -> np.ndarray:
    """Returns the token ids of a prompt, int64 [T]. Adds the reasons to `problems` if the prompt cannot be used.

    Args:
        begins: the text is the start of a sequence, not the continuation of a prefix. It then starts with the
            tokenizer's `prompt_start`. If the tokenizer has no such tokens, an empty text becomes the end-of-document
            token. In training this token precedes each document, so the model begins a new document.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            problems.append("prompt: is text, but this engine has no tokenizer; give token ids")
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
        problems.append("prompt: is neither text nor a list of token ids; give text or a list of whole numbers")
        return NOTHING
    if outside := tokens[(tokens < 0) | (tokens >= vocab)][:3].tolist():
        problems.append(f"prompt: {outside} are not token ids; use numbers from 0 to {vocab - 1}")
    return tokens.astype(np.int64)
