"""A model of Linnet's as a model of lm-evaluation-harness (extra `eval`).

The adapter works on the native model: answers that share a question read it once (`linnet.evaluate.likelihood`), texts
are scored by the carried state, and generation goes through the engine. What the harness's own adapter for transformers
gives on the exported model it gives too.
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
from linnet.evaluate.text import Document, first_token, score_text
from linnet.inference import Engine, Sampling

LONGEST = 256  # tokens to generate where a task does not say
AT_ONCE = 64  # prompts that the engine is given to go on with, between two reports of progress
MESSAGES = logging.getLogger(__name__)


class LinnetLM(TemplateLM):
    """Scores and generates for the harness.

    Attributes:
        max_length: tokens of context and continuation that the model may see; None for all.
        too_long: what happens to what is longer. cut: a context loses its beginning, with a warning, and texts are
            scored in windows of this length, as the harness does it. refuse: `ConfigError` before anything is scored.
        cuts: how many contexts and texts were cut so far.
        progress: called with how many requests of how many have been answered.
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
            raise ValueError("the engine has no tokenizer; give one of a folder with tokenizer.json")
        self.engine, self.max_length, self.too_long, self.cuts = engine, max_length, too_long, 0
        self.progress = progress or (lambda done, total: None)
        self.encoder: Tokenizer = engine.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.encoder.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text or an answer without a question."""
        return first_token(self.encoder)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
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
        """The log-likelihood of whole texts, their first token after the end of a document."""
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
        """Continuations up to the first of a request's stops, without it."""
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
        """Counts requests for `progress`."""
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            self.progress(done, total)

        return count

    def _refuse(self, lengths: list[int]) -> None:
        """Raises ConfigError where requests are too long and not to be cut."""
        if self.max_length is None or self.too_long == "cut":
            return
        if longer := [length for length in lengths if length > self.max_length]:
            message = (
                f"context: {len(longer)} of {len(lengths)} requests are longer than {self.max_length} tokens, the "
                f"longest {max(longer)}; allow more (context), or have them cut (too-long)"
            )
            raise ConfigError([message], "evaluate")

    def _cut(self, pairs: list[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Contexts without their beginnings where they are too long together with what follows them."""
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
                "%d of %d contexts are cut at their beginning, the longest of %d tokens: max_length is %d",
                self.cuts - before, len(pairs), longest, self.max_length,
            )  # fmt: skip
        return kept


def _sampling(options: dict[str, Any]) -> Sampling:
    """What a task asks of generation; greedy unless it says do_sample or a temperature above 0."""
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
