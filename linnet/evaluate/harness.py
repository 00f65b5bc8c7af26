"""Adapter that runs a Linnet model in lm-evaluation-harness (extra `eval`).

The adapter works on the native model. Answers to the same question share one reading of it
(`linnet.evaluate.likelihood`), texts are scored with the carried state, and the engine generates. The results equal
those of the harness's adapter for transformers on the exported model.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from linnet.config import ConfigError
from linnet.data import Tokenizer
from linnet.evaluate.likelihood import log_likelihoods
from linnet.evaluate.texts.text import Document, first_token, score_text
from linnet.inference import Engine, Sampling

LONGEST = 256  # tokens to generate if a task sets no limit
AT_ONCE = 64  # prompts that the engine continues between two reports of progress
MESSAGES = logging.getLogger(__name__)


class LinnetLM(TemplateLM):
    """Scores and generates for the harness.

    Attributes:
        max_length: tokens of context and continuation that the model may see; None for all.
        too_long: what happens to longer requests. cut: a context loses its beginning, with a warning, and texts are
            scored in windows of this length, as in the harness. refuse: raise `ConfigError` before scoring anything.
        cuts: number of contexts and texts that were cut so far.
        scored: what was asked so far: the questions with their prompts and right answers, which `run_tasks` adds.
        progress: called with the number of answered requests and the number of all requests.
    """

    def __init__(
        self,
        engine: Engine,
        max_length: int | None = None,
        too_long: Literal["cut", "refuse"] = "cut",
        progress: Callable[[int, int], None] | None = None,
    ):
        super().__init__()
        if engine.tokenizer is None:
            raise ValueError("engine: has no tokenizer; load the engine from a folder with tokenizer.json")
        self.engine, self.max_length, self.too_long, self.cuts = engine, max_length, too_long, 0
        self.scored: list[str] = []
        self.progress = progress or (lambda done, total: None)
        self.encoder: Tokenizer = engine.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.encoder.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text, or an answer without a question."""
        return first_token(self.encoder)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's key in the harness's cache of requests."""
        return f"linnet-{self.encoder.name}-{self.encoder.digest}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text, after those with which a converted model begins a prompt unless that is turned off."""
        start = () if add_special_tokens is False else self.encoder.prompt_start
        return [*start, *self.encoder.encode(string.replace("\0", "")).tolist()]

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """The log-likelihoods of continuations, and whether greedy decoding gives them, without a bar of tqdm's."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        self._refuse([len(context) + len(continuation) - 1 for _, context, continuation in requests])
        pairs = self._cut([(context, continuation) for _, context, continuation in requests])
        found = log_likelihoods(self.engine.model, pairs, progress=self._counter(len(pairs)))
        return [tuple(one) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihoods of whole texts; an end-of-document token precedes each text."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        self._refuse([len(tokens) for tokens in texts])
        found, count = [], self._counter(len(texts))
        for tokens in texts:
            if not tokens:
                found.append(0.0)
            elif self.max_length is None:
                row = Document("", np.array([self.prefix_token_id, *tokens]), 0, 0)
                found.append(-score_text(self.engine.model, [row]).documents[0].nats)
            else:
                windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
                pairs = [make_disjoint_window(window) for window in windows]
                self.cuts += len(pairs) > 1
                found.append(sum(one.nats for one in log_likelihoods(self.engine.model, pairs)))
            count(1)
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns continuations up to the first stop string of each request, without the stop string."""
        prompts = [self.tok_encode(request.args[0]) or [self.eot_token_id] for request in requests]
        settings = [_sampling(request.args[1]) for request in requests]
        self._refuse([len(p) + s.max_tokens - 1 for p, s in zip(prompts, settings, strict=True)])
        pairs = self._cut([(p, [0] * s.max_tokens) for p, s in zip(prompts, settings, strict=True)])
        prompts = [prompt for prompt, _ in pairs]
        found, count = [], self._counter(len(prompts))
        for start in range(0, len(prompts), AT_ONCE):
            place = slice(start, start + AT_ONCE)
            done = self.engine.generate(prompts[place], settings[place])
            found += [completion.text for completion in done]
            count(len(done))
        return found

    def _counter(self, total: int) -> Callable[[int], None]:
        """Returns a function that adds to the number of answered requests and reports it to `progress`."""
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            self.progress(done, total)

        return count

    def _refuse(self, lengths: list[int]) -> None:
        """Raises ConfigError if requests are too long and must not be cut."""
        if self.max_length is None or self.too_long == "cut":
            return
        if longer := [length for length in lengths if length > self.max_length]:
            message = (
                f"context: {len(longer)} of {len(lengths)} requests exceed {self.max_length} tokens (the longest has "
                f"{max(longer)}); raise context, or set too-long to cut"
            )
            raise ConfigError([message], "evaluate")

    def _cut(self, pairs: list[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Drops the beginning of each context that is too long together with its continuation."""
        if self.max_length is None:
            return pairs
        kept, longest, before = [], 0, self.cuts
        for context, continuation in pairs:
            room = max(self.max_length + 1 - len(continuation), 1)
            if len(context) > room:
                self.cuts, longest = self.cuts + 1, max(longest, len(context))
            kept.append((context[-room:], continuation))
        if self.cuts > before:
            MESSAGES.warning(
                "cut the beginning of %d of %d contexts (the longest has %d tokens): max_length is %d",
                self.cuts - before, len(pairs), longest, self.max_length,
            )  # fmt: skip
        return kept


def _sampling(options: dict[str, Any]) -> Sampling:
    """Returns the sampling settings of a task: greedy unless it sets a temperature above 0 and allows sampling."""
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else list(until)
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
    return Sampling(
        max_tokens=int(options.get("max_gen_toks") or LONGEST),
        temperature=temperature,
        top_p=float(options.get("top_p") or 1.0) if temperature else 1.0,
        stop=[stop for stop in until if stop],
        seed=0,
    )
