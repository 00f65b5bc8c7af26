"""Needle in a haystack: facts hidden in a long text, and questions about them at its end.

Paper 000 has two modes: in the easy one the text holds a question with its answer, and the prompt ends with the same
question again; in the standard one it holds the answer alone, as a statement. The variants ask for more, after RULER
(C.-P. Hsieh et al., arXiv:2404.06654): several keys of which one is asked (multikey), several values of one key
(multivalue), several keys asked at once (multiquery), and a chain of variables (tracking).

The haystack is text of this module's own, or any text file. Everything follows from the seed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from linnet.config import Config, ConfigError
from linnet.data import Tokenizer
from linnet.evaluate.likelihood import log_likelihoods
from linnet.evaluate.needle_scores import RIVALS
from linnet.evaluate.ruler import common_words
from linnet.inference import Engine, Sampling

VALUES = 4  # values, keys asked for or links of a chain in the variants that have several

_WHERE = "harbour station library orchard workshop museum garden bakery mill lighthouse theatre stable".split()
_WHO = "the keeper, a traveller, my neighbour, the old clerk, a sailor, the gardener, her cousin, a student".split(", ")
_DID = "waited near, walked past, painted, remembered, wrote about, repaired, photographed, came back to".split(", ")
_WHEN = "in the morning, before the rain, at noon, during the fair, last winter, after supper, every week".split(", ")
_KIND = "amber cobalt crimson ivory jade olive pearl russet scarlet silver teal violet".split()
_THING = "anchor barrel compass drum engine feather goblet hammer kettle lantern mirror quill ribbon saddle".split()


# A sentence, or where none ends within 300 characters, words or a piece of a word up to there: a text without full
# stops would else be one sentence, which no prompt has room for.
_SENTENCE = re.compile(r".{1,299}?[.!?](?: |$)|.{1,300}(?: |$)|.{1,300}")


class NeedleConfig(Config):
    """What is asked, and where it is hidden.

    Attributes:
        variant: single hides one fact and asks for it; the others are those of RULER, of which `words` asks for the
            most common words of a list.
        mode: of `variant="single"`: whether the question stands in the text beside its answer.
        lengths: tokens of a prompt, from the haystack's first to the question's last.
        depths: where in the haystack the needle lies, from 0 (its beginning) to 1 (just before the question).
        samples: prompts of each cell, each with a needle of its own.
        scoring: match asks the model to go on and looks for the answer; choice compares its likelihood with those of
            `RIVALS` other answers, of which one in ten is right by chance.
        haystack: a text file to hide in; None makes text up.
        digits: of the numbers that are hidden; fewer for models too small to copy five.
        seed: of the hidden facts, the haystack and the places of needles.
    """

    mode: Literal["easy", "standard"] = "easy"
    variant: Literal["single", "multikey", "multivalue", "multiquery", "tracking", "words"] = "single"
    lengths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = Field(
        default_factory=lambda: np.linspace(1024, 16_384, 35).round().astype(int).tolist()
    )
    depths: Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=1)] = Field(
        default_factory=lambda: np.linspace(0.0, 1.0, 35).round(6).tolist()
    )
    samples: Annotated[int, Field(ge=1)] = 1
    scoring: Literal["match", "choice"] = "match"
    haystack: str | None = None
    digits: Annotated[int, Field(ge=1, le=6)] = 5
    seed: int = 0


@dataclass(frozen=True)
class Item:
    """One prompt: its tokens, what a right completion holds, and wrong answers to choose from."""

    prompt: np.ndarray
    answers: tuple[str, ...]
    rivals: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """What is hidden, and what is asked about it."""

    needles: tuple[str, ...]  # the first goes to the asked depth, the others anywhere
    asked: str  # ends the prompt; the answer follows at once
    answers: tuple[str, ...]


def items(config: NeedleConfig, tokenizer: Tokenizer) -> Iterator[tuple[int, int, Item]]:
    """The prompts of a grid as (place of the depth, place of the length, item).

    Raises:
        ConfigError: a length that does not hold its needles and question, or a haystack that is empty or unreadable.
    """
    sentences = _haystack(config, tokenizer)
    start = np.asarray(tokenizer.prompt_start, dtype=np.int64)  # of a converted model
    for column, length in enumerate(config.lengths):
        room = length - len(start)
        for row, depth in enumerate(config.depths):
            for sample in range(config.samples):
                generator = np.random.default_rng([config.seed, length, row, sample])
                if config.variant == "words":  # of a list; the depth only draws another one
                    item = Item(*common_words(room, RIVALS, generator, tokenizer))
                else:
                    question = draw_question(config, generator)
                    item = _hide(question, sentences, room, depth, generator, tokenizer)
                yield row, column, replace(item, prompt=np.concatenate([start, item.prompt]))


def run_needle(engine: Engine, config: NeedleConfig, progress=None) -> np.ndarray:
    """The share of answers found in each cell, float64 [depths, lengths].

    Args:
        progress: called with the number of prompts that a step has answered.

    Raises:
        ConfigError: as `items`; a model without a tokenizer; a prompt beyond what an attention model's cache holds.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError(["tokenizer: the model has none, so no text can be asked; put tokenizer.json beside it"])
    asked = list(items(config, tokenizer))
    _check_limit(engine, asked)
    total = np.zeros((len(config.depths), len(config.lengths)))
    score = _match if config.scoring == "match" else _choose
    size = max(1, engine.slots)
    for start in range(0, len(asked), size):
        batch = asked[start : start + size]
        for (row, column, _), found in zip(batch, score(engine, [item for _, _, item in batch]), strict=True):
            total[row, column] += found / config.samples
        if progress is not None:
            progress(len(batch))
    return total


def _match(engine: Engine, batch: list[Item]) -> list[float]:
    """The share of the answers that stand in what the model goes on with."""
    settings = []
    for item in batch:
        longest = len(engine.tokenizer.encode(" " + ", ".join(item.answers) + "."))
        settings.append(Sampling(max_tokens=2 * longest + 8))
    completions = engine.generate([item.prompt for item in batch], settings)
    pairs = zip(batch, completions, strict=True)
    return [share_found(completion.text, item.answers) for item, completion in pairs]


def share_found(text: str, answers: Sequence[str]) -> float:
    """The share of answers that stand in a text as words of their own: 123 does not stand in 41234."""
    words = set(re.findall(r"\w+", text))
    return sum(answer in words for answer in answers) / len(answers)


def _choose(engine: Engine, batch: list[Item]) -> list[float]:
    """1 where the right answer is likelier than each rival."""
    requests = []
    for item in batch:
        for answer in (", ".join(item.answers), *item.rivals):
            requests.append((item.prompt, engine.tokenizer.encode(f" {answer}.")))
    nats = np.array([found.nats for found in log_likelihoods(engine.model, requests)]).reshape(len(batch), -1)
    return (nats[:, 0] > nats[:, 1:].max(1)).astype(float).tolist()


def _check_limit(engine: Engine, asked: Sequence[tuple[int, int, Item]]) -> None:
    longest = max(len(item.prompt) for _, _, item in asked)
    if engine.limit is not None and longest >= engine.limit:
        raise ConfigError(
            [f"lengths: a prompt has {longest} tokens, but the model's cache holds {engine.limit}; shorten them, or "
             "give the engine a longer context_length"],
            "needle",
        )  # fmt: skip


def draw_question(config: NeedleConfig, generator: np.random.Generator) -> Question:
    """A question of the configuration's variant, and mode, about things and numbers drawn at random."""
    kinds = [f"{kind} {thing}" for kind in _KIND for thing in _THING]
    keys = [kinds[i] for i in generator.permutation(len(kinds))[:VALUES]]
    low = 10 ** (config.digits - 1)
    values = [str(value) for value in generator.choice(np.arange(low, 10 * low), VALUES, replace=False)]

    def state(key: str, value: str) -> str:
        return f"The number of the {key} is {value}."

    def ask(key: str) -> str:
        return f"Question: What is the number of the {key}? Answer: The number of the {key} is"

    match config.variant:
        case "single":
            key, value = keys[0], values[0]
            needle = f"{ask(key)} {value}." if config.mode == "easy" else state(key, value)
            return Question((needle,), ask(key), (value,))
        case "multikey":
            return Question(tuple(map(state, keys, values)), ask(keys[0]), (values[0],))
        case "multivalue":
            key, needles = keys[0], tuple(state(keys[0], value) for value in values)
            return Question(needles, f"Question: What are all numbers of the {key}? Answer: They are", tuple(values))
        case "multiquery":
            asked = "Question: What are the numbers of the " + ", the ".join(keys) + "? Answer: They are"
            return Question(tuple(map(state, keys, values)), asked, tuple(values))
        case "tracking":
            names = ["".join(generator.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 5)) for _ in range(VALUES)]
            links = [f"VAR {names[0]} = {values[0]}."]
            links += [f"VAR {b} = VAR {a}." for a, b in zip(names, names[1:], strict=False)]
            asked = f"Question: Which variables have the value {values[0]}? Answer: They are"
            return Question(tuple(links), asked, tuple(names))


def _haystack(config: NeedleConfig, tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Sentences, each with its number of tokens behind another."""
    if config.haystack is None:
        generator = np.random.default_rng(config.seed)
        texts = [draw_sentence(generator).rstrip() for _ in range(400)]
    else:
        try:
            text = Path(config.haystack).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"haystack: {config.haystack!r} cannot be read as text ({error})"], "needle") from None
        texts = [part.rstrip() for part in _SENTENCE.findall(" ".join(text.split()))]
        if not texts:
            raise ConfigError([f"haystack: {config.haystack!r} is empty; give a text file"], "needle")
    return [(text, _count(text, tokenizer)) for text in texts]


def _count(text: str, tokenizer: Tokenizer) -> int:
    """Tokens of a text that stands behind another."""
    return len(tokenizer.encode(f" {text}"))


def draw_sentence(generator: np.random.Generator) -> str:
    """A sentence of haystack, with the space behind it."""
    who, did, where, when = (_pick(words, generator) for words in (_WHO, _DID, _WHERE, _WHEN))
    return f"{who[0].upper()}{who[1:]} {did} the {where} {when}. "


def _pick(words: list[str], generator: np.random.Generator) -> str:
    return words[generator.integers(len(words))]


def _hide(
    question: Question,
    sentences: list[tuple[str, int]],
    length: int,
    depth: float,
    generator: np.random.Generator,
    tokenizer: Tokenizer,
) -> Item:
    """A prompt of at most `length` tokens, shorter by less than a sentence (the file is repeated where it is short).

    The prompt is made as text and tokenised whole: sentences that were tokenised alone, with the space behind them,
    are not what a tokenizer makes of running text, and a model would see words that it never met.
    """
    room = length - sum(_count(text, tokenizer) for text in (*question.needles, question.asked))
    if room < 0:
        message = f"lengths: {length} tokens do not hold the needles and the question ({length - room}); give more"
        raise ConfigError([message], "needle")
    hay, first = [], int(generator.integers(len(sentences)))
    while True:
        text, size = sentences[(first + len(hay)) % len(sentences)]
        if size > room:
            break
        hay.append(text)
        room -= size
    others = generator.random(len(question.needles) - 1)  # where the needles lie that are not asked for, or not first
    rivals = _rivals(question.answers, generator)
    while True:
        places = [round(depth * len(hay)), *sorted((others * (len(hay) + 1)).astype(int).tolist())]
        parts = list(hay)
        for place, needle in sorted(zip(places, question.needles, strict=True), key=lambda pair: -pair[0]):
            parts.insert(place, needle)
        prompt = np.asarray(tokenizer.encode(" ".join([*parts, question.asked])), dtype=np.int64)
        if len(prompt) <= length or not hay:
            return Item(prompt, question.answers, rivals)
        hay.pop()  # a tokenizer that makes more of the whole than of its parts


def _rivals(answers: Sequence[str], generator: np.random.Generator) -> tuple[str, ...]:
    """`RIVALS` other answers of the same form and length, no two alike: so one in ten is right by chance."""
    found: dict[str, None] = {", ".join(answers): None}
    while len(found) <= RIVALS:
        found[", ".join(_like(answer, generator) for answer in answers)] = None
    return tuple(found)[1:]


def _like(answer: str, generator: np.random.Generator) -> str:
    """As many digits (the first of several is not 0), or as many capitals."""
    letters = list("0123456789" if answer.isdigit() else "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    first = letters[1:] if answer.isdigit() and len(answer) > 1 else letters
    return "".join([generator.choice(first), *generator.choice(letters, len(answer) - 1)])
