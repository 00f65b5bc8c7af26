"""A model of Linnet's as a model of lm-evaluation-harness (extra `eval`), and the suites of papers 000 and 001.

The adapter works on the native model: answers that share a question read it once (`linnet.evaluate.likelihood`), texts
are scored by the carried state, and generation goes through the engine. What the harness's own adapter for transformers
gives on the exported model it gives too.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from linnet.data import Tokenizer
from linnet.evaluate.likelihood import log_likelihoods
from linnet.evaluate.text import Document, score_text
from linnet.inference import Engine, Sampling

LONGEST = 256  # tokens to generate where a task does not say
MESSAGES = logging.getLogger(__name__)


class LinnetLM(TemplateLM):
    """Scores and generates for the harness.

    Attributes:
        max_length: tokens of context and continuation that the model may see; None for all. What is longer loses its
            beginning, with a warning, and texts are then scored in windows of this length, as the harness does it.
    """

    def __init__(self, engine: Engine, max_length: int | None = None):
        super().__init__()
        if engine.tokenizer is None:
            raise ValueError("the engine has no tokenizer; give one of a folder with tokenizer.json")
        self.engine, self.max_length = engine, max_length
        self.encoder: Tokenizer = engine.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.encoder.end_of_document

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return f"linnet-{self.encoder.name}-{self.encoder.digest}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text. There are no special tokens to add; the end of a document is no text."""
        return self.encoder.encode(string.replace("\0", "")).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        return [tuple(found) for found in log_likelihoods(self.engine.model, pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, their first token after the end of a document."""
        found = []
        for request in requests:
            (text,) = request.args
            tokens = self.tok_encode(text)
            if not tokens:
                found.append(0.0)
            elif self.max_length is None:
                row = Document("", np.array([self.eot_token_id, *tokens]), 0, 0)
                found.append(-score_text(self.engine.model, [row]).documents[0].nats)
            else:
                windows = get_rolling_token_windows(tokens, self.eot_token_id, self.max_length, context_len=1)
                pairs = [make_disjoint_window(window) for window in windows]
                found.append(sum(one.nats for one in log_likelihoods(self.engine.model, pairs)))
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first of a request's stops, without it."""
        prompts, settings = [], []
        for request in requests:
            context, options = request.args
            sampling = _sampling(options)
            tokens = self.tok_encode(context) or [self.eot_token_id]
            if self.max_length is not None:
                tokens, _ = self._cut(tokens, [0] * sampling.max_tokens)
            prompts.append(tokens)
            settings.append(sampling)
        return [completion.text for completion in self.engine.generate(prompts, settings)]

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The context without its beginning where it is too long together with what follows it."""
        if self.max_length is None or len(context) + len(continuation) <= self.max_length + 1:
            return context, continuation
        kept = max(self.max_length + 1 - len(continuation), 1)
        MESSAGES.warning(
            "a context of %d tokens is cut to its last %d: max_length is %d", len(context), kept, self.max_length
        )
        return context[-kept:], continuation


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
