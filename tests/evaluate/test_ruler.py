"""Common words: how often words stand, that the length is kept, and that it is asked like a needle."""

import re
from collections import Counter

import numpy as np
import pytest
from chats import sentencepiece

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.evaluate.retrieval import needle
from linnet.evaluate.retrieval.needle import TIERS, NeedleConfig, common_words, items, run_needle
from linnet.inference import Engine
from linnet.models import build_model, family

TOKENIZER = ByteTokenizer()


def listed(length: int, seed: int = 0):
    prompt, answers, rivals = common_words(length, 9, np.random.default_rng(seed), TOKENIZER)
    text = TOKENIZER.decode(prompt)
    words, question = text.partition(": ")[2].split("Question: ")
    return prompt, Counter(words.split()), question, answers, rivals


@pytest.mark.parametrize("length, tier", [(16_384, 0), (4096, 0), (2048, 1), (1024, 2), (400, 3), (250, 4)])
def test_common_words_stand_often_and_others_rarely(length, tier):
    number, often, rarely = TIERS[tier]
    prompt, counts, question, answers, rivals = listed(length)
    assert length - 5 * rarely < len(prompt) <= length
    assert len(answers) == number and all(counts.pop(answer) == often for answer in answers)
    assert set(counts.values()) == {rarely} and len(counts) >= number
    assert sum(counts.values()) >= number * often  # at least half of the list are others
    assert question.startswith("Which word comes" if number == 1 else f"Which {number} words come")
    for rival in rivals:
        assert len(set(rival.split(", ")) & set(counts)) == number


def test_each_place_of_the_grid_has_a_list_of_its_own():
    config = NeedleConfig(variant="words", lengths=[400, 600], depths=[0.0, 1.0], samples=2)
    found = list(items(config, TOKENIZER))
    assert len({item.answers for _, _, item in found}) == 8
    again = list(items(config, TOKENIZER))
    assert all((a.prompt == b.prompt).all() for (_, _, a), (_, _, b) in zip(found, again, strict=True))


@pytest.mark.parametrize("variant", ["words", "single"])
def test_prompts_begin_as_a_converted_model_expects(variant):
    tokenizer, config = ByteTokenizer(), NeedleConfig(variant=variant, lengths=[400], depths=[0.5])
    [(_, _, bare)] = items(config, tokenizer)
    tokenizer.prompt_start = (1,)
    [(_, _, begun)] = items(config, tokenizer)
    assert begun.prompt[0] == 1 and begun.prompt[1] == bare.prompt[0] and len(begun.prompt) <= 400


@pytest.mark.parametrize("scoring", ["match", "choice"])
def test_a_model_that_learned_nothing_finds_few(scoring):
    engine = Engine(build_model(family("tnl")(32, 1, vocab_size=256)), TOKENIZER, slots=5)
    config = NeedleConfig(variant="words", lengths=[300], depths=[0.0, 0.5], samples=10, scoring=scoring)
    found = run_needle(engine, config)
    assert found.shape == (2, 1) and found.mean() == 0.0 if scoring == "match" else found.mean() < 0.5


def test_a_length_that_holds_no_list():
    with pytest.raises(ConfigError, match=r"lengths: 150 .*\d{3,}"):
        list(items(NeedleConfig(variant="words", lengths=[150]), TOKENIZER))


@pytest.mark.parametrize("variant", ["words", "single"])
def test_a_length_that_is_too_short_names_one_that_fits(variant):
    """With the tokens that begin a prompt: the length is the one that was given."""
    tokenizer = ByteTokenizer()
    tokenizer.prompt_start = (1,) * 40
    for length in (60, 150):
        with pytest.raises(ConfigError, match=rf"lengths: {length} is too short .*give (about )?\d+ or more") as caught:
            list(items(NeedleConfig(variant=variant, lengths=[length], depths=[0.5], samples=1), tokenizer))
    least = int(str(caught.value).split("give ")[1].removeprefix("about ").split()[0])
    least += 50 if variant == "words" else 0  # whose words have several lengths
    [(_, _, item)] = items(NeedleConfig(variant=variant, lengths=[least], depths=[0.5], samples=1), tokenizer)
    assert len(item.prompt) <= least


def test_an_answer_to_choose_follows_one_space(monkeypatch):
    tokenizer, asked = sentencepiece("normalizer"), []
    engine = Engine(build_model(family("tnl")(32, 1, vocab_size=tokenizer.vocab_size)), tokenizer, device="cpu")
    scored = needle.log_likelihoods
    monkeypatch.setattr(needle, "log_likelihoods", lambda model, pairs: asked.extend(pairs) or scored(model, pairs))
    run_needle(engine, NeedleConfig(lengths=[300], depths=[0.5], samples=1, scoring="choice"))
    texts = [tokenizer.decode(answer) for _, answer in asked]
    assert len(texts) == 10 and all(re.fullmatch(r"▁[0-9]+\.", text) for text in texts)
