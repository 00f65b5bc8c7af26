"""Needles in haystacks: where they lie, how long the prompts are, what counts as found, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.data import ByteTokenizer
from linnet.data.tokenizer import train_bpe
from linnet.evaluate.retrieval import needle
from linnet.evaluate.retrieval.needle import NeedleConfig, draw_question, hidden_digest, items, run_needle, share_found
from linnet.inference import Engine
from linnet.models import build_model, family

VARIANTS = ["single", "multikey", "multivalue", "multiquery", "tracking"]
TOKENIZER = ByteTokenizer()


def texts(**changes) -> list[tuple[int, int, str, tuple[str, ...]]]:
    config = NeedleConfig(lengths=[600, 1500], depths=[0.0, 0.3, 1.0], **changes)
    return [
        (row, column, TOKENIZER.decode(item.prompt), item.answers) for row, column, item in items(config, TOKENIZER)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_fill_their_length_and_hold_their_answers(variant):
    found = texts(variant=variant)
    assert [(row, column) for row, column, _, _ in found] == [(r, c) for c in range(2) for r in range(3)]
    for _, column, text, answers in found:
        assert [600, 1500][column] - 80 < len(text.encode()) <= [600, 1500][column]
        hidden, asked = text.rsplit("Question:", 1)
        assert all(hidden.count(answer) >= 1 for answer in answers)
        assert variant == "tracking" or not any(answer in asked for answer in answers)


@pytest.mark.parametrize("mode", ["easy", "standard"])
def test_the_needle_lies_at_its_depth(mode):
    for row, _, text, (answer,) in texts(mode=mode):
        hay, _, _ = text.rpartition("Question:")
        place = hay.index(answer) / len(hay)
        low, high = [(0.0, 0.2), (0.2, 0.5), (0.9, 1.0)][row]
        assert low <= place <= high, (row, place)
        assert text.count("Question:") == (2 if mode == "easy" else 1)


def test_the_easy_mode_ends_with_the_question_that_the_text_answers():
    for _, _, text, (answer,) in texts(mode="easy"):
        asked = text[text.rindex("Question:") :]
        assert text.count(asked) == 2 and f"{asked} {answer}." in text


def test_the_seed_decides_all():
    assert texts(seed=1) == texts(seed=1)
    assert texts(seed=1) != texts(seed=2)
    assert len({text for _, _, text, _ in texts(samples=3)}) == 18


def test_any_text_can_be_the_haystack(tmp_path):
    path = tmp_path / "hay.txt"
    path.write_bytes(b"\xef\xbb\xbfOne thing is said. Another\nis not. ")
    for _, _, text, _ in texts(haystack=str(path)):
        assert text.count(" One thing is said. ") >= 2 and "Another is not. " in text and "\ufeff" not in text


def test_what_counts_as_found():
    assert share_found(" 51234. And then", ["51234"]) == 1.0
    assert share_found("151234, 512", ["51234"]) == 0.0
    assert share_found("They are ABC, XYZ", ["XYZ", "ABC", "QQQ", "RRR"]) == 0.5


@pytest.mark.parametrize("scoring", ["match", "choice"])
def test_a_model_that_learned_nothing_finds_nothing_but_by_chance(scoring):
    engine = Engine(build_model(family("tnl")(32, 1, vocab_size=256)), TOKENIZER, slots=5)
    config = NeedleConfig(lengths=[300], depths=[0.0, 0.5], samples=10, scoring=scoring)
    answered = []
    found = run_needle(engine, config, answered.append)
    assert found.shape == (2, 1) and sum(answered) == 20
    assert found.mean() == 0.0 if scoring == "match" else found.mean() < 0.5


@pytest.mark.parametrize("digits", [1, 5])
def test_rivals_look_like_the_answer_and_are_nine(digits):
    [(_, _, item)] = items(NeedleConfig(lengths=[300], depths=[0.5], digits=digits), TOKENIZER)
    assert len({item.answers[0], *item.rivals}) == 10
    assert all(len(rival) == digits and rival.isdigit() for rival in item.rivals)


def test_with_several_keys_wrong_answers_are_values_of_the_text():
    """A model that copies any number of the text must not be right."""
    for variant, found in {"multikey": 3, "multiquery": 9, "multivalue": 9, "tracking": 9}.items():
        config = NeedleConfig(lengths=[900], depths=[0.5], samples=5, variant=variant, scoring="choice")
        for _, _, item in items(config, TOKENIZER):
            text = TOKENIZER.decode(item.prompt.tolist())
            assert len({", ".join(item.answers), *item.rivals}) == 10
            assert sum(all(part in text for part in rival.split(", ")) for rival in item.rivals) == found


@pytest.mark.parametrize("variant", ["multivalue", "tracking"])
def test_by_choice_a_list_has_as_many_values_that_are_not_asked_for(variant):
    """A model that finds values, but not whose they are, must be right by chance alone; nor does their place say it."""
    places = []
    for seed in range(20):
        match, choice = (
            draw_question(NeedleConfig(variant=variant, scoring=scoring, digits=1), np.random.default_rng(seed))
            for scoring in ("match", "choice")
        )
        assert match.needles == tuple(text for text in choice.needles if text in match.needles)
        assert len(choice.needles) == 2 * len(match.needles) and match.answers == choice.answers
        values = {value for rival in choice.confused for value in rival.split(", ")} - set(choice.answers)
        assert len(values) == 4 and len(set(choice.confused)) == 15
        places += [place for place, text in enumerate(choice.needles) if text not in match.needles]
    assert set(places) == set(range(1, 8))


def test_results_by_choice_compare_only_if_their_wrong_answers_do():
    digests = {
        (variant, scoring): hidden_digest(NeedleConfig(lengths=[900], depths=[0.5], variant=variant, scoring=scoring))
        for variant in ("single", "multikey")
        for scoring in ("match", "choice")
    }
    assert digests["single", "match"] == digests["single", "choice"]
    assert digests["multikey", "match"] != digests["multikey", "choice"]


def test_what_cannot_be_asked(tmp_path):
    with pytest.raises(ConfigError, match=r"lengths: 50 .*\d{2,}"):
        list(items(NeedleConfig(lengths=[50]), TOKENIZER))
    with pytest.raises(ConfigError, match="depths"):
        parse(NeedleConfig, {"depths": [1.5]}, "needle")
    with pytest.raises(ConfigError, match="none.txt"):
        list(items(NeedleConfig(haystack=str(tmp_path / "none.txt")), TOKENIZER))
    (tmp_path / "empty.txt").write_text(" \n ")
    with pytest.raises(ConfigError, match="empty.txt"):
        list(items(NeedleConfig(haystack=str(tmp_path / "empty.txt")), TOKENIZER))
    model = build_model(family("llama")(32, 1, vocab_size=256))
    with pytest.raises(ConfigError, match="lengths: .*200"):
        run_needle(Engine(model, TOKENIZER, slots=1, context_length=200), NeedleConfig(lengths=[300], depths=[0.0]))
    with pytest.raises(ConfigError, match="tokenizer: "):
        run_needle(Engine(model, None, slots=1, context_length=200), NeedleConfig(lengths=[300], depths=[0.0]))


def test_the_default_grid_is_the_paper_s():
    config = NeedleConfig()
    assert len(config.lengths) == len(config.depths) == 35
    assert (config.lengths[0], config.lengths[-1], config.depths[0], config.depths[-1]) == (1024, 16_384, 0.0, 1.0)
    assert np.diff(config.lengths).min() > 0


def test_a_haystack_without_full_stops_fills_a_prompt(tmp_path):
    (file := tmp_path / "log.txt").write_text("words and no end of them " * 200 + "x" * 1000)
    config = NeedleConfig(lengths=[2000], depths=[0.5], haystack=str(file))
    [(_, _, item)] = items(config, ByteTokenizer())
    assert 1690 < len(item.prompt) <= 2000


def test_a_model_in_float64_goes_on():
    engine = Engine(
        build_model(family("tnl")(32, 1, vocab_size=256)).double(), ByteTokenizer(), dtype=torch.float64, slots=2
    )
    grid = run_needle(engine, NeedleConfig(lengths=[300], depths=[0.0]))
    assert grid.shape == (1, 1)


@pytest.mark.parametrize("variant", [*VARIANTS, "words"])
def test_prompts_are_tokenised_as_running_text(variant):
    """As a model has read it in training: with the space before a word in the word's token."""
    text = " ".join("The old clerk wrote about the mill at noon. Question: What is the number?" for _ in range(50))
    tokenizer = train_bpe([text], 300)
    config = NeedleConfig(variant=variant, lengths=[400], depths=[0.0, 0.5], samples=2)
    for _, _, item in items(config, tokenizer):
        assert item.prompt.tolist() == tokenizer.encode(tokenizer.decode(item.prompt)).tolist()
        assert 300 < len(item.prompt) <= 400


def test_the_digest_covers_every_question(monkeypatch):
    config = parse(NeedleConfig, {"lengths": [64, 128], "depths": [0.0, 1.0], "samples": 2})
    whole, draws = needle.hidden_digest(config), []
    draw = needle.draw_question
    for changed in range(8):
        draws.clear()

        def other(config, generator, changed=changed):
            draws.append(None)
            one = draw(config, generator)
            return replace(one, asked="Another question?") if len(draws) == changed + 1 else one

        monkeypatch.setattr(needle, "draw_question", other)
        assert needle.hidden_digest(config) != whole, changed
    assert len(draws) == 8
    monkeypatch.undo()
    assert needle.hidden_digest(config) == whole
