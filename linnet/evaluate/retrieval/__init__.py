"""What a model finds again in its context: needles in haystacks (`needle`, with lists of common words, after RULER, and
lessons, training text), and recall probes (`recall`). `linnet.evaluate.needle_scores` has the metrics of needles.
"""

from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import Field, field_validator

from linnet.config import Config

Probe = Literal["mqar", "in_context_recall", "noisy_recall", "fuzzy_recall", "selective_copying"]
PROBES: tuple[Probe, ...] = get_args(Probe)


class NeedleConfig(Config):
    """Settings of a needle grid.

    Attributes:
        mode: for `variant="single"`: easy hides the question with its answer, standard hides only the answer.
        variant: single hides one fact and asks for it; the others are the variants of RULER.
        lengths: tokens per prompt, from the first token of the haystack to the last token of the question.
        depths: positions of the needle in the haystack, from 0 (its beginning) to 1 (just before the question).
        samples: prompts per cell, each with another needle.
        scoring: match generates a continuation and looks for the answer in it. choice compares the likelihood of the
            answer with those of `RIVALS` wrong answers, so that guessing is right in one case of ten. With several keys
            they have the values of the other keys (multikey), or all values in another order (multiquery). For
            multivalue and tracking, choice hides as many values of another key or chain, which stand in them.
        haystack: path of a text file that serves as the haystack; None generates text.
        digits: digits of the hidden numbers; use fewer for models that are too small to copy five.
        seed: seed of the hidden facts, the haystack and the positions of needles.
    """

    mode: Literal["easy", "standard"] = "easy"
    variant: Literal["single", "multikey", "multivalue", "multiquery", "tracking", "words"] = "single"
    lengths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = Field(
        default_factory=lambda: np.linspace(1024, 16_384, 35).round().astype(int).tolist()
    )
    depths: Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=1)] = Field(
        default_factory=lambda: np.linspace(0.0, 1.0, 35).round(6).tolist()
    )
    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    scoring: Literal["match", "choice"] = "match"
    haystack: str | None = None
    digits: Annotated[int, Field(ge=1, le=6)] = 5
    seed: int = 0

    @field_validator("haystack")
    @classmethod
    def _is_there(cls, haystack: str | None) -> str | None:
        if haystack is not None and not Path(haystack).is_file():
            raise ValueError(f"{haystack!r} is not a file; name a text file")
        return haystack


class RecallConfig(Config):
    """Settings of the probes.

    Attributes:
        tasks: names of the probes.
        lengths: tokens per sequence.
        pairs: for MQAR, key-value pairs per sequence; for the other recall tasks, the number of keys and of values to
            draw from; for copying, tokens to copy. Lengths that are too short for a number of pairs are skipped.
        samples: sequences per length and number of pairs.
        seed: seed of the sequences and of the tokens that replace their ids.
    """

    tasks: Annotated[list[Probe], Field(min_length=1)] = list(PROBES)
    lengths: Annotated[list[Annotated[int, Field(ge=8)]], Field(min_length=1)] = [64, 128, 256, 512, 1024]
    pairs: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] = [4, 8, 16, 32, 64]
    samples: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    seed: int = 0
