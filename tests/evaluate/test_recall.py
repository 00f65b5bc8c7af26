"""Recall probes: what is asked can be answered from the sequence, a model that recalls is right, another guesses."""

from collections import deque

import numpy as np
import pytest
import torch

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.data.synthetic import IGNORE, find_task, generate
from linnet.evaluate.retrieval import recall
from linnet.evaluate.retrieval.recall import (
    PROBES,
    RecallConfig,
    ask,
    cells,
    check_recall,
    run_recall,
    to_results,
    words_of,
)
from linnet.models import ModelConfig, build_model, family

WORDS = words_of(ByteTokenizer(), 256)
SIMPLE = ["mqar", "in_context_recall", "noisy_recall"]


def asked(name: str, length: int, pairs: int, samples: int = 16):
    [(_, _, _, task)] = cells(RecallConfig(tasks=[name], lengths=[length], pairs=[pairs]))
    return ask(task, samples, WORDS, 256)


@pytest.mark.parametrize("name", PROBES)
def test_answers_are_values_of_the_sequence_and_words_of_the_model(name):
    found = asked(name, 128, 6)
    scored = found.targets != IGNORE
    assert found.inputs.shape == (16, 128) and scored.any(axis=1).all()
    assert set(found.inputs.ravel()) <= set(WORDS)
    rows, _ = scored.nonzero()
    assert found.values[rows, found.targets[scored]].all()
    for row in range(16):
        assert set(np.flatnonzero(found.values[row])) <= set(found.inputs[row])
    assert len({tuple(sorted(set(row))) for row in found.inputs}) > 10  # other words in each sequence


@pytest.mark.parametrize("name", SIMPLE)
def test_the_value_stands_after_the_key_s_first_place(name):
    found = asked(name, 64, 8)
    for tokens, targets in zip(found.inputs.tolist(), found.targets.tolist(), strict=True):
        for place, target in enumerate(targets):
            if target != IGNORE:
                assert tokens[tokens.index(tokens[place]) + 1] == target


def test_copying_is_shown_once_with_each_answer_after_the_one_before():
    found = asked("selective_copying", 64, 5)
    for tokens, targets, values in zip(*(part.tolist() for part in found), strict=True):
        shown, copied = tokens[:32], tokens[32:]
        [mark] = [token for token in set(shown[:-5]) & set(copied[:-5]) if shown[-6] == token == copied[-6]]
        first, second = ([t for t in part[: part.index(mark)] if values[t]] for part in (shown, copied))
        assert len(first) == len(second) == 5
        assert [t for t in shown[-4:]] == first[:4]
        assert targets[:-5] == [IGNORE] * 59 and targets[-5:] == second
        assert copied[-4:] == second[:-1]


def test_words_are_visible_text():
    assert len(WORDS) == 94 and WORDS[0] == ord("!") and WORDS[-1] == ord("~")
    assert words_of(None, 8).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_the_seed_decides_all():
    one, other = asked("mqar", 64, 4), asked("mqar", 64, 4)
    assert (one.inputs == other.inputs).all()
    assert (one.inputs != asked("mqar", 64, 4, samples=17).inputs[:16]).sum() == 0


def train(seeds: int = 3, steps: int = 320) -> torch.nn.Module:
    """Two layers that learn to recall: keys and values are words drawn anew in each sequence.

    They learn it all at once after some 200 steps, or hardly: which weights do depends on how a machine rounds, too.
    """
    task = find_task("in_context_recall").model_validate({"seq_len": 24, "vocab_size": 12})
    for seed in range(seeds):
        model = build_model(ModelConfig(d_model=48, layout="hyena attention", vocab_size=48), seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
        losses = deque([10.0] * 10, maxlen=10)
        for step in range(steps):
            drawn = ask_words(generate(task, "train", 24, start=24 * step), step)
            nats, count = model.loss(*drawn)
            optimizer.zero_grad()
            (nats / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append((nats / count).item())
            if sum(losses) / len(losses) < 0.25:
                return model.eval()
    pytest.fail(f"none of {seeds} models learned to recall in {steps} steps: {losses[-1]:.2f} nats in the end")


def ask_words(drawn, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(step)
    words = np.stack([generator.permutation(np.arange(1, 48))[:12] for _ in drawn.inputs])
    inputs = np.take_along_axis(words, drawn.inputs, 1)
    targets = np.where(drawn.targets == IGNORE, IGNORE, np.take_along_axis(words, np.maximum(drawn.targets, 0), 1))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def test_a_model_that_recalls_is_right_and_one_that_learned_nothing_guesses():
    config = RecallConfig(tasks=SIMPLE, lengths=[16], pairs=[4], samples=128)
    told = []
    for cell in run_recall(train(), None, config, progress=told.append):
        assert cell.accuracies.mean() > 0.85 and cell.choices.mean() >= cell.accuracies.mean()
    assert sum(told) == 3 * 128
    blank = build_model(ModelConfig(d_model=48, layout="hyena attention", vocab_size=48), seed=0)
    for cell in run_recall(blank, None, config):
        assert cell.choices.mean() == pytest.approx(cell.chance, abs=0.12) and cell.accuracies.mean() < 0.1


def test_cells_that_do_not_fit_are_left_out():
    model = build_model(family("tnl")(32, 1, vocab_size=256))
    found = run_recall(model, ByteTokenizer(), RecallConfig(lengths=[16, 128], pairs=[4, 64], samples=2))
    places = {(cell.task, cell.length, cell.pairs) for cell in found}
    assert ("mqar", 16, 4) in places and ("mqar", 16, 64) not in places
    assert ("mqar", 128, 64) not in places  # 129 words are more than the 94 that bytes have
    assert ("selective_copying", 16, 4) not in places and ("selective_copying", 128, 4) in places
    results = to_results(found)
    assert {one.task for one in results} == {f"recall-{name}" for name in PROBES}
    mqar = next(one for one in results if (one.task, one.metric) == ("recall-mqar", "choice"))
    assert mqar.n == 4 and mqar.items[0].id == "16 tokens, 4 pairs, 0"
    with pytest.raises(ConfigError, match=r"lengths: .*\[8\].*\[64\]"):
        run_recall(model, None, RecallConfig(tasks=["mqar"], lengths=[8], pairs=[64]))
    with pytest.raises(ConfigError, match="94 "):
        run_recall(model, ByteTokenizer(), RecallConfig(tasks=["mqar"], lengths=[256], pairs=[64]))


@pytest.mark.parametrize("tokenizer", [None, ByteTokenizer()])
def test_sequences_beyond_a_table_of_positions_are_refused(tokenizer):
    model = ModelConfig(d_model=16, layout="hyena", vocab_size=256, positions="learned", num_positions=32)
    most = 32 if tokenizer is None else 31  # after the document's first token
    config = RecallConfig(lengths=[16, most], pairs=[4], samples=2)
    check_recall(config, tokenizer, 256, 32)
    run_recall(build_model(model, seed=0), tokenizer, config)
    tasks = [name for name in PROBES if name != "selective_copying"]  # which rounds an odd length down
    with pytest.raises(ConfigError, match=rf"lengths: .*33 is above model.num_positions: 32; .*at most {most}"):
        check_recall(RecallConfig(tasks=tasks, lengths=[16, most + 1], pairs=[4]), tokenizer, 256, 32)


def test_the_digest_covers_every_sequence(monkeypatch):
    config = RecallConfig(tasks=["mqar", "selective_copying"], lengths=[64], pairs=[4], samples=3)
    whole, generate = recall.drawn_digest(config), recall.generate
    for row, rows in [(0, 3), (2, 3), (5, 6)]:  # copying takes two sequences per sample

        def other(task, split, n, row=row, rows=rows, **rest):
            drawn = generate(task, split, n, **rest)
            if n == rows:
                drawn.targets[row, -1] += 1
            return drawn

        monkeypatch.setattr(recall, "generate", other)
        assert recall.drawn_digest(config) != whole, row
    monkeypatch.undo()
    assert recall.drawn_digest(config) == whole
