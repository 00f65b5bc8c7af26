"""Log-probabilities of a prompt's tokens (`echo` with `logprobs`), with which evaluation harnesses score answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from linnet.data import Tokenizer
from linnet.inference import Engine
from linnet.inference.request import Detokenizer
from linnet.models.causal_lm import CacheLengths, merge

Score = tuple[float, tuple[tuple[int, float], ...]]  # logprob of the token; (token, logprob) of the likeliest tokens


@dataclass
class Echo:
    """A prompt that its completions repeat.

    Attributes:
        ids: its tokens.
        text: its text. A character that continues in the completion is in the completion's text.
        offsets: characters of the text before each token.
        scores: of each token, if they were requested.
    """

    ids: list[int]
    text: str = ""
    offsets: list[int] = field(default_factory=list)
    scores: list[Score | None] = field(default_factory=list)

    @classmethod
    def of(
        cls, prompt: str | Sequence[int], ids: list[int], tokenizer: Tokenizer | None, continues: bool, scored: bool
    ) -> "Echo":
        """Returns the echo of a prompt.

        Args:
            ids: its tokens, those that the tokenizer puts in front included.
            continues: whether its completions have tokens.
            scored: whether offsets are needed.
        """
        if tokenizer is None:
            return cls(ids, offsets=[0] * len(ids))
        start = len(tokenizer.prompt_start)
        start = start if tuple(ids[:start]) == tokenizer.prompt_start else 0
        text, stream, offsets = tokenizer.decode(ids[start:]), Detokenizer(tokenizer), [0] * start
        for token in ids[start:] if scored else ():
            stream.push(token)
            offsets.append(stream.offset)
        if isinstance(prompt, str):
            # Some tokenizers put a space before a text, and some change its letters and spaces.
            added = len(text) - len(prompt) if text.endswith(prompt) else 0
            return cls(ids, prompt, [min(max(offset - added, 0), len(prompt)) for offset in offsets])
        held = Detokenizer(tokenizer, ids).flush() if continues else ""
        return cls(ids, text.removesuffix(held), offsets)


@torch.no_grad()
def score_prompt(engine: Engine, prompt: Sequence[int], count: int) -> Iterator[list[Score | None]]:
    """Yields the scores of a prompt's tokens, chunk by chunk. The first token has None, because no token precedes it.

    This can run at the same time as the engine's rounds, since both only read the weights. It needs memory for the
    logits of one chunk.

    Args:
        count: number of likeliest tokens to return per place.
    """
    states, lengths = engine.model.init_state(1, len(prompt), engine.device), CacheLengths(engine.model, len(prompt))
    ids = torch.tensor(prompt, dtype=torch.int64, device=engine.device)
    before = None  # logits for the first token of the chunk
    for start in range(0, len(ids), engine.prefill_chunk):
        tokens = ids[start : start + engine.prefill_chunk]
        logits, after = engine.model(tokens[None], lengths.corner(states, start + len(tokens)))
        states = merge(states, after)
        logits = logits[0].float()
        lines = logits[:-1] if before is None else torch.cat([before, logits[:-1]])
        before = logits[-1:]
        logprobs = lines.log_softmax(-1)
        token_logprobs = logprobs.gather(1, tokens[-len(lines) :, None])[:, 0].tolist() if len(lines) else []
        top_logprobs, top_tokens = logprobs[:, : engine.vocab].topk(min(count, engine.vocab), dim=-1)
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(top_tokens.tolist(), top_logprobs.tolist(), strict=True)]
        scores: list[Score | None] = list(zip(token_logprobs, tops, strict=True))
        yield [None, *scores] if start == 0 else scores


BROKEN = "\ufffd"


class TokenNames:
    """Names of single tokens: their text, or `token_id:7` for a token that is not text by itself.

    Examples of the latter are parts of a character and end tokens. The completions API uses the names as keys, so only
    tokens with the same text share a name.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first word of a text, so each token is decoded after another one.
        self._before = [] if tokenizer is None else tokenizer.encode("a").tolist()
        self._start = 0 if tokenizer is None else len(tokenizer.decode(self._before))
        self._texts: dict[int, str | None] = {}

    def text(self, token: int) -> str | None:
        """Returns the text of a token, or None if it is not complete text by itself."""
        if self._tokenizer is None:
            return None
        if token not in self._texts:
            text = self._tokenizer.decode([*self._before, token])[self._start :]
            self._texts[token] = None if not text or BROKEN in text else text
        return self._texts[token]

    def data(self, token: int) -> bytes | None:
        """Returns the bytes of a token, which may be part of a character, or None if they are not known."""
        text = self.text(token)
        if text is not None or self._tokenizer is None or self._tokenizer.byte_lengths is None:
            return None if text is None else text.encode()
        return self._tokenizer.token_bytes[token] or None  # an end token has no bytes

    def __getitem__(self, token: int) -> str:
        return self.text(token) or f"token_id:{token}"
