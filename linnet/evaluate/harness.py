"""Adapter that runs a Linnet model in lm-evaluation-harness (extra `eval`).

The adapter works on the native model. Answers to the same question share one reading of it
(`linnet.evaluate.likelihood`), texts are scored with the carried state, and the engine generates. The results equal
those of the harness's adapter for transformers on the exported model.
"""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from linnet.config import ConfigError, nearest, parse, refuse
from linnet.data import Tokenizer
from linnet.data.tokenizer import encode_inside
from linnet.evaluate.likelihood import log_likelihoods
from linnet.evaluate.texts import Document, first_token, score_text
from linnet.inference import Engine, Sampling
from linnet.parallel.mesh import divided, sharers

LONGEST = 256  # tokens to generate if a task sets no limit
AT_ONCE = 64  # prompts that the engine continues between two reports of progress
MESSAGES = logging.getLogger(__name__)
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the harness's order of precedence
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")  # passed to the engine
NEUTRAL = {  # settings that the engine lacks, with the value that changes nothing
    **dict.fromkeys(("num_beams", "num_return_sequences", "n", "best_of", "typical_p", "length_penalty"), 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "min_new_tokens"), 0),
    "use_cache": True,
}


class LinnetLM(TemplateLM):
    """Scores and generates for the harness.

    Attributes:
        max_length: tokens of context and continuation that the model may see; None for all.
        too_long: what happens to longer requests. cut: a context loses its beginning, with a warning, and texts are
            scored in windows of this length, as in the harness. refuse: raise `ConfigError` before scoring anything.
        cuts: number of contexts and texts that were cut so far.
        merged: number of questions so far whose end would share a token with the beginning of an answer.
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
        self.engine, self.max_length, self.too_long = engine, max_length, too_long
        self.cuts = self.merged = 0
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
        """Returns the log-likelihoods of continuations, and whether greedy decoding gives them.

        White space at the end of a context is scored with the continuation, as in the harness. The harness encodes both
        texts together. If that changes the tokens of a context, or leaves a continuation none, all continuations of
        this question are encoded apart from their contexts; `merged` counts such questions.
        """
        questions: dict[tuple[Any, ...], list[int]] = {}
        for i, request in enumerate(requests):
            context = request.args[0] if request.doc_id is None else None
            questions.setdefault((request.task_name, request.doc_id, context), []).append(i)
        encoded, before = {}, self.merged
        for rows in questions.values():
            encoded |= zip(rows, self._encode([requests[i].args[:2] for i in rows]), strict=True)
        if self.merged > before:
            message = "encoded %d of %d questions apart from their answers, because both share a token"
            MESSAGES.warning(message, self.merged - before, len(questions))
        return self._loglikelihood_tokens([(requests[i].args, *encoded[i]) for i in range(len(requests))])

    def _encode(self, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Returns the tokens of the context and the continuation of each answer to one question."""
        texts = [(context.rstrip(), context[len(context.rstrip()) :] + answer) for context, answer in texts]
        contexts = {context: self.tok_encode(context) for context, _ in texts}
        both = [(contexts[context], self.tok_encode(context + answer)) for context, answer in texts]
        pairs = [(context, whole[len(context) :]) for context, whole in both]
        apart = any(whole[: len(context)] != context for context, whole in both)
        if apart or any(answer and not tokens for (_, answer), (_, tokens) in zip(texts, pairs, strict=True)):
            self.merged += 1

            def encode(text: str) -> list[int]:
                return self.tok_encode(text, add_special_tokens=False)

            pairs = [
                (contexts[text], encode_inside(encode, answer) if text else encode(answer)) for text, answer in texts
            ]
        return [(context or [self.prefix_token_id], tokens) for context, tokens in pairs]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores tokens; a continuation without a token has the log-likelihood 0, with a warning."""
        self._refuse([len(context) + len(continuation) - 1 for _, context, continuation in requests])
        rows = [i for i, (_, _, continuation) in enumerate(requests) if len(continuation)]
        if empty := len(requests) - len(rows):
            MESSAGES.warning("%d of %d continuations have no token; their log-likelihood is 0", empty, len(requests))
        pairs = self._cut([(requests[i][1], requests[i][2]) for i in rows])
        scores = [(0.0, True)] * len(requests)
        likelihoods = log_likelihoods(self.engine.model, pairs, progress=self._counter(len(pairs)))
        for i, score in zip(rows, likelihoods, strict=True):
            scores[i] = tuple(score)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihoods of whole texts; an end-of-document token precedes each text."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        self._refuse([len(tokens) for tokens in texts])
        count = self._counter(len(texts))

        def score(tokens: list[int]) -> tuple[float, bool]:
            nats, cut = 0.0, False
            if tokens and self.max_length is None:
                row = Document("", np.array([self.prefix_token_id, *tokens]), 0, 0)
                nats = -score_text(self.engine.model, [row]).documents[0].nats
            elif tokens:
                windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
                pairs = [make_disjoint_window(window) for window in windows]
                nats, cut = sum(score.nats for score in log_likelihoods(self.engine.model, pairs)), len(pairs) > 1
            count(1)
            return nats, cut

        scores = divided(texts, score, len)
        self.cuts += sum(cut for _, cut in scores)
        return [nats for nats, _ in scores]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns continuations up to the first stop string of each request, without the stop string.

        Draws are independent. The seed of a draw depends on the task, its question, the prompt, the seed in the task's
        settings, and the number of this repeat, so that other requests do not change it.
        """
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        settings, repeats = [sampling_of(request.args[1]) for request in requests], Counter()
        for i, request in enumerate(requests):
            key = json.dumps([request.task_name, request.doc_id, request.args[0], settings[i].seed])
            seed = int.from_bytes(sha256(f"{key} {repeats[key]}".encode()).digest()[:8]) >> 1
            settings[i] = settings[i].model_copy(update={"seed": seed})
            repeats[key] += 1
        self._refuse([len(p) + s.max_tokens - 1 for p, s in zip(prompts, settings, strict=True)])
        pairs = self._cut([(p, [0] * s.max_tokens) for p, s in zip(prompts, settings, strict=True)])
        prompts = [prompt for prompt, _ in pairs]
        count = self._counter(len(prompts))

        def generate(start: int) -> list[str]:
            done = self.engine.generate(prompts[start : start + AT_ONCE], settings[start : start + AT_ONCE])
            count(len(done))
            return [completion.text for completion in done]

        return list(itertools.chain(*divided(range(0, len(prompts), AT_ONCE), generate)))

    def _counter(self, total: int) -> Callable[[int], None]:
        """Returns a function that adds to the number of answered requests and reports it to `progress`."""
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done = min(done + more * sharers(), total)
            self.progress(done, total)

        return count

    def _refuse(self, lengths: list[int]) -> None:
        """Raises ConfigError if requests are too long and must not be cut."""
        if self.max_length is None or self.too_long == "cut":
            return
        if longer := [length for length in lengths if length > self.max_length]:
            what = f"context: {len(longer)} of {len(lengths)} requests exceed {self.max_length} tokens"
            fix = "give more, or use too_long: cut"
            raise ConfigError([f"{what} (the longest has {max(longer)}); {fix}"], "evaluate")

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


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """Returns the settings of the engine for the `generation_kwargs` of a task.

    Decoding is greedy unless a temperature above 0 is set and `do_sample` is not false.

    Raises:
        ConfigError: the engine lacks a setting, or a value is out of range.
    """
    values = {key: value for key, value in options.items() if value is not None and NEUTRAL.get(key) != value}
    limits = [values.pop(name) for name in LIMITS if name in values]
    stops: list[Any] = []
    for texts in (values.pop("until", []), values.pop("stop", [])):
        stops += texts if isinstance(texts, list | tuple) else [texts]
    sampled = values.pop("do_sample", True)
    known = (*LIMITS, *SETTINGS, "until", "stop", "do_sample")
    problems = [
        f"{key}: {value!r}: the engine has no such setting; remove it ({nearest(key, known)})"
        for key, value in values.items()
        if key not in SETTINGS
    ]
    if not isinstance(sampled, bool):
        problems.append(f"do_sample: {sampled!r} is neither true nor false; write one of them")
    refuse(problems, "generation_kwargs")
    values |= {"max_tokens": limits[0] if limits else LONGEST, "stop": [stop for stop in stops if stop != ""]}
    values |= {} if sampled else {"temperature": 0.0}
    values |= {"top_k": 0} if values.get("top_k") == -1 else {}  # transformers and vLLM: all tokens
    return parse(Sampling, values, "generation_kwargs")
