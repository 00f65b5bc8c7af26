"""Needle in a haystack: facts hidden in a long text, and questions about them at its end.

Paper 000 has two modes. In the easy mode the text contains a question with its answer, and the prompt ends with the
same question. In the standard mode the text contains only the answer, as a statement. The other variants are harder
and follow RULER (C.-P. Hsieh et al., arXiv:2404.06654): several keys with a question about one of them (multikey),
several values of one key (multivalue), a question about several keys (multiquery), a chain of variables (tracking),
and the most common words of a list (words).

The haystack is generated text or any text file. The seed determines everything.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from linnet.config import ConfigError
from linnet.data import Tokenizer
from linnet.data.records import BadRow, read_text
from linnet.data.tokenizer import encode_inside
from linnet.evaluate.likelihood import log_likelihoods
from linnet.evaluate.needle_scores import RIVALS
from linnet.evaluate.results import digest_of
from linnet.evaluate.retrieval import NeedleConfig
from linnet.inference import Engine, Sampling
from linnet.parallel.mesh import divided
from linnet.runs.files import write_atomic

# Common words, after RULER (C.-P. Hsieh et al., arXiv:2404.06654, section 3): which words are most common in a list?
#
#     bavo luki nesa bavo dotu bavo ...   Question: Which 10 words ... Answer: They are
#
# As in RULER, ten words occur 30 times each and the others 3 times each, in random order. Other words fill the list up
# to the length, so a longer list is harder. Differences from RULER: the words are made of syllables, which needs no
# list of English words; they are not numbered; there is no example before the list; and a list in which ten common
# words would take more than half of the length has fewer or less frequent common words (`TIERS`).

# Number of common words, occurrences of each common word, occurrences of each other word.
TIERS = ((10, 30, 3), (10, 10, 1), (5, 10, 1), (2, 10, 1), (1, 5, 1))
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
_INTRODUCTION = "A list of words, of which some come more often than others:"


def wording() -> list[str]:
    """Returns the texts of which lists and questions are made."""
    return [_INTRODUCTION, *_SYLLABLES, *map(_question, (1, 10)), repr(TIERS)]


def common_words(
    length: int, rivals: int, generator: np.random.Generator, tokenizer: Tokenizer
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Returns a prompt, the common words that it asks for, and wrong answers.

    Args:
        length: upper bound of the prompt's tokens, with those of `prompt_start`, which the prompt lacks.
        rivals: number of wrong answers.
        generator: source of all draws.
        tokenizer: the tokenizer of the model.

    Raises:
        ConfigError: the length is too short for a list.
    """
    ids = generator.permutation(len(_SYLLABLES) ** 2)
    words = [_SYLLABLES[i // len(_SYLLABLES)] + _SYLLABLES[i % len(_SYLLABLES)] for i in ids]
    for number, often, rarely in TIERS:
        question = _question(number)
        room = length - len(tokenizer.prompt_start)
        room -= len(tokenizer.encode(_INTRODUCTION)) + len(tokenizer.encode(f" {question}"))
        listed = words[:number] * often
        taken = sum(len(tokenizer.encode(f" {word}")) for word in listed)
        if 2 * taken > room:
            continue
        others = []
        for word in words[number:]:
            size = rarely * len(tokenizer.encode(f" {word}"))
            if taken + size > room:
                break
            others.append(word)
            listed += [word] * rarely
            taken += size
        if len(others) < number:
            continue
        order = generator.permutation(len(listed))
        text = " ".join([_INTRODUCTION, *(listed[i] for i in order), question])
        # Tokens of running text differ from those of single words.
        prompt = np.asarray(tokenizer.encode(text), dtype=np.int64)
        wrong = tuple(", ".join(generator.choice(others, number, replace=False)) for _ in range(rivals))
        return prompt, tuple(words[:number]), wrong
    least = length - room + 2 * taken
    message = f"lengths: {length} is too short for a list of common words; give about {least} or more"
    raise ConfigError([message], "needle")


def _question(number: int) -> str:
    asked = "word comes" if number == 1 else f"{number} words come"
    return f"Question: Which {asked} most often in the list? Answer: {'It is' if number == 1 else 'They are'}"


VALUES = 4  # number of values, keys or links of a chain in the variants that have several

_WHERE = "harbour station library orchard workshop museum garden bakery mill lighthouse theatre stable".split()
_WHO = "the keeper, a traveller, my neighbour, the old clerk, a sailor, the gardener, her cousin, a student".split(", ")
_DID = "waited near, walked past, painted, remembered, wrote about, repaired, photographed, came back to".split(", ")
_WHEN = "in the morning, before the rain, at noon, during the fair, last winter, after supper, every week".split(", ")
_KIND = "amber cobalt crimson ivory jade olive pearl russet scarlet silver teal violet".split()
_THING = "anchor barrel compass drum engine feather goblet hammer kettle lantern mirror quill ribbon saddle".split()


# A sentence. If none ends within 300 characters, the match ends after a word, or inside a word longer than that.
# Without this bound, a text without full stops would be a single sentence that does not fit into any prompt.
_SENTENCE = re.compile(r".{1,299}?[.!?](?: |$)|.{1,300}(?: |$)|.{1,300}")


@dataclass(frozen=True)
class Item:
    """One prompt: its tokens, the answers that a right completion contains, and the wrong answers."""

    prompt: np.ndarray
    answers: tuple[str, ...]
    rivals: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """The hidden facts, and the question about them."""

    needles: tuple[str, ...]  # the first lies at the requested depth, the others at random depths
    asked: str  # the end of the prompt, which the answer continues
    answers: tuple[str, ...]
    confused: tuple[str, ...] = ()  # wrong answers that a model gives which finds the values, but not whose they are


def items(config: NeedleConfig, tokenizer: Tokenizer) -> Iterator[tuple[int, int, Item]]:
    """Yields the prompts of a grid as (index of the depth, index of the length, item).

    Raises:
        ConfigError: a length is too short for the needles and the question, or the haystack is empty or unreadable.
    """
    sentences = [(text, _count(text, tokenizer)) for text in _sentences(config)]
    start = np.asarray(tokenizer.prompt_start, dtype=np.int64)  # not empty for some converted models
    for column, length in enumerate(config.lengths):
        for row, depth in enumerate(config.depths):
            for sample in range(config.samples):
                generator = _generator(config, length, row, sample)
                if config.variant == "words":  # has no needle; each depth draws another list
                    item = Item(*common_words(length, RIVALS, generator, tokenizer))
                else:
                    question = draw_question(config, generator)
                    item = _hide(question, sentences, length, depth, generator, tokenizer)
                yield row, column, replace(item, prompt=np.concatenate([start, item.prompt]))


def run_needle(engine: Engine, config: NeedleConfig, progress=None) -> np.ndarray:
    """Returns the share of answers found in each cell, float64 [depths, lengths].

    Args:
        engine: the model to ask.
        config: the grid.
        progress: called after each batch with the number of prompts in it.

    Raises:
        ConfigError: as for `items`; the model has no tokenizer; or a prompt exceeds the cache of an attention model.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError(["tokenizer: the model has none, but prompts are text; put tokenizer.json into its folder"])
    asked = list(items(config, tokenizer))
    _check_limit(engine, asked)
    total = np.zeros((len(config.depths), len(config.lengths)))
    score = _match if config.scoring == "match" else _choose
    size, prompts = max(1, engine.slots), [item for _, _, item in asked]

    def answer(batch: list[Item]) -> list[float]:
        shares = score(engine, batch)
        if progress is not None:
            progress(len(batch))
        return shares

    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    shares = itertools.chain(*divided(batches, answer, lambda batch: sum(len(item.prompt) for item in batch)))
    for (row, column, _), share in zip(asked, shares, strict=True):
        total[row, column] += share / config.samples
    return total


def _match(engine: Engine, batch: list[Item]) -> list[float]:
    """Returns, for each item, the share of its answers that the model's continuation contains."""
    settings = []
    for item in batch:
        longest = len(engine.tokenizer.encode(" " + ", ".join(item.answers) + "."))
        settings.append(Sampling(max_tokens=2 * longest + 8))
    completions = engine.generate([item.prompt for item in batch], settings)
    pairs = zip(batch, completions, strict=True)
    return [share_found(completion.text, item.answers) for item, completion in pairs]


def share_found(text: str, answers: Sequence[str]) -> float:
    """Returns the share of answers that a text contains as whole words: 41234 does not contain 123."""
    words = set(re.findall(r"\w+", text))
    return sum(answer in words for answer in answers) / len(answers)


def _choose(engine: Engine, batch: list[Item]) -> list[float]:
    """Returns, for each item, 1 if the right answer is likelier than every wrong one, else 0."""
    requests = []
    for item in batch:
        for answer in (", ".join(item.answers), *item.rivals):
            ids = encode_inside(lambda text: engine.tokenizer.encode(text).tolist(), f" {answer}.")
            requests.append((item.prompt, np.asarray(ids, dtype=np.int64)))
    nats = np.array([likelihood.nats for likelihood in log_likelihoods(engine.model, requests)]).reshape(len(batch), -1)
    return (nats[:, 0] > nats[:, 1:].max(1)).astype(float).tolist()


def _check_limit(engine: Engine, asked: Sequence[tuple[int, int, Item]]) -> None:
    longest = max(len(item.prompt) for _, _, item in asked)
    if engine.limit is not None and longest >= engine.limit:
        what = f"lengths: a prompt has {longest} tokens, but the model's cache holds {engine.limit}"
        fix = "use shorter lengths, or an engine with a longer context_length"
        raise ConfigError([f"{what}; {fix}"], "needle")


def draw_question(config: NeedleConfig, generator: np.random.Generator) -> Question:
    """Draws a question of the configured variant and mode, about random things and numbers."""
    kinds = [f"{kind} {thing}" for kind in _KIND for thing in _THING]
    keys = [kinds[i] for i in generator.permutation(len(kinds))[:VALUES]]
    low = 10 ** (config.digits - 1)
    numbers = np.arange(low, 10 * low)
    values = [str(value) for value in generator.choice(numbers, VALUES, replace=False)]

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
            return Question(tuple(map(state, keys, values)), ask(keys[0]), (values[0],), tuple(values[1:]))
        case "multivalue":
            prompt = f"Question: What are all numbers of the {keys[0]}? Answer: They are"
            question = Question(tuple(state(keys[0], value) for value in values), prompt, tuple(values))
            if config.scoring == "match":
                return question
            others = generator.choice(np.setdiff1d(numbers, np.array(values, int)), VALUES, replace=False).astype(str)
            return _among(question, [state(keys[1], value) for value in others], others.tolist(), generator)
        case "multiquery":
            prompt = "Question: What are the numbers of the " + ", the ".join(keys) + "? Answer: They are"
            others = tuple(map(", ".join, itertools.permutations(values)))[1:]
            return Question(tuple(map(state, keys, values)), prompt, tuple(values), others)
        case "tracking":
            names, links = _chain(values[0], generator)
            prompt = f"Question: Which variables have the value {values[0]}? Answer: They are"
            question = Question(tuple(links), prompt, tuple(names))
            if config.scoring == "match":
                return question
            others, needles = _chain(values[1], generator)
            return _among(question, needles, others, generator)


def _chain(value: str, generator: np.random.Generator) -> tuple[list[str], list[str]]:
    """Draws variables and statements that give the first a value, and each other that of the one before."""
    names = ["".join(generator.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 5)) for _ in range(VALUES)]
    links = [f"VAR {names[0]} = {value}."]
    return names, links + [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(names)]


def _among(
    question: Question, needles: Sequence[str], values: Sequence[str], generator: np.random.Generator
) -> Question:
    """Returns a question with as many needles that it does not ask for, whose values stand in its wrong answers.

    Each list of needles keeps its order.
    """
    ours, theirs = iter(question.needles[1:]), iter(needles)
    order = generator.permutation([True] * (len(question.needles) - 1) + [False] * len(needles))
    mixed = tuple(next(ours if right else theirs) for right in order)
    lists = itertools.product(*zip(question.answers, values, strict=True))  # the first is the answer
    return replace(question, needles=(question.needles[0], *mixed), confused=tuple(map(", ".join, lists))[1:])


def hidden_digest(config: NeedleConfig) -> str:
    """Returns a digest of the haystack's text and of all questions of the grid, for any tokenizer."""
    if config.variant == "words":
        return digest_of([*wording(), str(config.seed)])
    return digest_of(itertools.chain(_sentences(config), _questions(config)))


def _questions(config: NeedleConfig) -> Iterator[str]:
    """Yields the needles, the question and the answers of every prompt."""
    grid = itertools.product(config.lengths, range(len(config.depths)), range(config.samples))
    for length, row, sample in grid:
        question = draw_question(config, _generator(config, length, row, sample))
        yield from (*question.needles, question.asked, *question.answers)
        yield from question.confused if config.scoring == "choice" else ()


def _generator(config: NeedleConfig, length: int, row: int, sample: int) -> np.random.Generator:
    return np.random.default_rng([config.seed, length, row, sample])


def _sentences(config: NeedleConfig) -> list[str]:
    """Returns the sentences of the haystack."""
    if config.haystack is None:
        generator = np.random.default_rng(config.seed)
        return [draw_sentence(generator).rstrip() for _ in range(400)]
    try:
        text = read_text(config.haystack)
    except (OSError, BadRow) as error:
        raise ConfigError([f"haystack: {config.haystack!r} cannot be read as text ({error})"], "needle") from None
    texts = [part.rstrip() for part in _SENTENCE.findall(" ".join(text.split()))]
    if not texts:
        raise ConfigError([f"haystack: {config.haystack!r} is empty; give a text file"], "needle")
    return texts


def _count(text: str, tokenizer: Tokenizer) -> int:
    """Returns the number of tokens that a text adds when it follows another one."""
    return len(tokenizer.encode(f" {text}"))


def draw_sentence(generator: np.random.Generator) -> str:
    """Draws a sentence for a haystack, with a trailing space."""
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
    """Returns a prompt of at most `length` tokens that is less than one sentence shorter; a short haystack is repeated.

    Those of `prompt_start`, which the prompt lacks, count.

    The tokenizer gets the prompt as one text. If it got one sentence at a time, it would give other tokens than for
    running text, and the model would see tokens that it did not see in training.
    """
    most = length - len(tokenizer.prompt_start)
    room = most - sum(_count(text, tokenizer) for text in (*question.needles, question.asked))
    if room < 0:
        message = f"lengths: {length} is too short for the needles and the question; give {length - room} or more"
        raise ConfigError([message], "needle")
    hay, first = [], int(generator.integers(len(sentences)))
    while True:
        text, size = sentences[(first + len(hay)) % len(sentences)]
        if size > room:
            break
        hay.append(text)
        room -= size
    others = generator.random(len(question.needles) - 1)  # depths of all needles but the first
    rivals = _rivals(question, generator)
    while True:
        places = [round(depth * len(hay)), *sorted((others * (len(hay) + 1)).astype(int).tolist())]
        parts = list(hay)
        for place, needle in sorted(zip(places, question.needles, strict=True), key=lambda pair: -pair[0]):
            parts.insert(place, needle)
        prompt = np.asarray(tokenizer.encode(" ".join([*parts, question.asked])), dtype=np.int64)
        if len(prompt) <= most or not hay:
            return Item(prompt, question.answers, rivals)
        hay.pop()  # the whole text has more tokens than its parts together


def _rivals(question: Question, generator: np.random.Generator) -> tuple[str, ...]:
    """Returns `RIVALS` different wrong answers of the same form and length, so that one answer in ten is right.

    Those that the text suggests come first.
    """
    chosen = generator.permutation(len(question.confused))[:RIVALS]
    candidates: dict[str, None] = dict.fromkeys([", ".join(question.answers), *(question.confused[i] for i in chosen)])
    while len(candidates) <= RIVALS:
        candidates[", ".join(_like(answer, generator) for answer in question.answers)] = None
    return tuple(candidates)[1:]


def _like(answer: str, generator: np.random.Generator) -> str:
    """Draws as many digits as the answer has (the first of several is not 0), or as many capital letters."""
    letters = list("0123456789" if answer.isdigit() else "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    first = letters[1:] if answer.isdigit() and len(answer) > 1 else letters
    return "".join([generator.choice(first), *generator.choice(letters, len(answer) - 1)])


# Training text from which a small model learns to find needles: hidden questions with answers, and the same again.
#
# The sentences are those of the easy or standard mode of `linnet.evaluate.retrieval.needle`, with new questions. A
# model learns recall suddenly, after a plateau. Long texts make the plateau longer, since most of their tokens do not
# depend on recall. A curriculum of trainings avoids this, each starting from the weights of the previous one
# (`init_from`): first one question and few sentences of haystack, then several questions, then longer texts. Several
# questions are needed because with one question the model learns to copy the last number that it read, and if several
# texts share a sequence, this number may belong to another text.

SHORT = 0.3  # share of documents with at most two sentences of haystack, so that the model does not forget short texts


def lessons(
    count: int,
    sentences: int,
    *,
    keys: int = 1,
    hidden: int = 1,
    digits: int = 2,
    seed: int = 0,
    mode: Literal["easy", "standard"] = "easy",
) -> Iterator[str]:
    """Yields documents: needles among sentences of haystack, and questions about some of them with answers at the end.

    All numbers are drawn uniformly.

    Args:
        count: number of documents.
        sentences: upper bound of haystack sentences per document.
        keys: upper bound of different questions per document; the end asks 1 to `keys` + 1 of them.
        hidden: upper bound of copies of each needle in the haystack.
        digits: digits of the answers.
        seed: seed of all draws.
        mode: easy hides the question with its answer, standard the answer as a statement.
    """
    generator = np.random.default_rng(seed)
    config = NeedleConfig(digits=digits, mode=mode)
    for _ in range(count):
        known: dict[str, Question] = {}
        for _ in range(int(generator.integers(1, keys + 1))):
            question = draw_question(config, generator)
            known.setdefault(question.asked, question)  # one number per thing
        questions = list(known.values())
        parts = [
            f"{question.needles[0]} " for question in questions for _ in range(int(generator.integers(1, hidden + 1)))
        ]
        most = min(sentences, 2) if generator.random() < SHORT else sentences
        for _ in range(int(generator.integers(most + 1))):
            parts.insert(int(generator.integers(len(parts) + 1)), draw_sentence(generator))
        asked = generator.integers(len(questions), size=int(generator.integers(1, keys + 2))).tolist()
        ends = (f"{questions[place].asked} {questions[place].answers[0]}. " for place in asked)
        yield "".join([*parts, *ends]).rstrip()


def write_lessons(path: str | Path, count: int, sentences: int, **options) -> Path:
    """Writes `lessons` as JSONL with the key `text`, in one atomic step; an existing file is kept unchanged."""
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps({"text": text}) + "\n" for text in lessons(count, sentences, **options)))
    return path
