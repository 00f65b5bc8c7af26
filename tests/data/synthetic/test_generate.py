"""Splits of every task: the same bytes however they are asked for, and no sample in two splits."""

import hashlib
import multiprocessing

import numpy as np
import pytest

from linnet.config import ConfigError, parse
from linnet.data.synthetic import BLOCK, IGNORE, TASKS, Compression, Mqar, NoisyRecall, find_task, generate

SPLITS = ("train", "validation", "test")
FORMS = [(name, spec) for name in TASKS for spec in ("paper", "mad-lab") if (name, spec) != ("mqar", "mad-lab")]


def rows(samples) -> list[bytes]:
    return [row.tobytes() for row in samples.inputs]


@pytest.mark.parametrize(("name", "spec"), FORMS)
def test_shapes_ids_and_splits(name, spec):
    task = TASKS[name](spec=spec)
    seen = {}
    for split in SPLITS:
        samples = generate(task, split, 600, seed=3)
        inputs, targets = samples
        assert inputs.shape == targets.shape == (600, task.input_length)
        assert inputs.dtype == targets.dtype == np.int64
        assert 0 <= inputs.min() and inputs.max() < task.num_tokens
        asked = targets != IGNORE
        assert asked.any(axis=1).all() and 0 <= targets[asked].min() and targets.max() < task.num_tokens
        seen[split] = set(rows(samples))
    assert not seen["train"] & seen["validation"] and not seen["test"] & (seen["train"] | seen["validation"])


@pytest.mark.parametrize(("name", "spec"), FORMS)
def test_chance_is_what_a_guess_among_the_answers_gives(name, spec):
    task = TASKS[name](spec=spec)
    targets = generate(task, "test", 600, seed=3).targets
    asked = targets[targets != IGNORE]
    answers = [kind for kind in task.kinds if kind.start <= np.median(asked) < kind.stop][0]
    guesses = answers.start + np.random.default_rng(0).integers(answers.size, size=(20, len(asked)))
    assert (guesses == asked).mean() == pytest.approx(task.chance, rel=0.1)


# Of 40 training rows at seed 7. A change here makes every committed score another benchmark's.
DIGESTS = {
    ("in_context_recall", "paper"): "fff0909b914f",
    ("in_context_recall", "mad-lab"): "73c846ef7770",
    ("fuzzy_recall", "paper"): "7d78852de6b7",
    ("fuzzy_recall", "mad-lab"): "3290a56df5e8",
    ("noisy_recall", "paper"): "b368da6fd285",
    ("noisy_recall", "mad-lab"): "a4dbb412819a",
    ("selective_copying", "paper"): "1aecbad9a90d",
    ("selective_copying", "mad-lab"): "f834b2dd41b8",
    ("compression", "paper"): "559ee6ac4093",
    ("compression", "mad-lab"): "c0dd44964d21",
    ("memorization", "paper"): "df164968addc",
    ("memorization", "mad-lab"): "7f72676bd4a0",
    ("mqar", "paper"): "97e1a029134e",
}


@pytest.mark.parametrize(("name", "spec"), FORMS)
def test_bytes_of_a_seed_do_not_change(name, spec):
    inputs, targets = generate(TASKS[name](spec=spec), "train", 40, seed=7)
    assert hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()[:12] == DIGESTS[name, spec]


def _part(start: int) -> tuple[bytes, bytes]:
    inputs, targets = generate(NoisyRecall(seq_len=32), "test", 300, seed=5, start=start)
    return inputs.tobytes(), targets.tobytes()


def test_workers_and_order_do_not_matter():
    whole = generate(NoisyRecall(seq_len=32), "test", 4 * 300, seed=5)
    starts = [900, 0, 600, 300]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        parts = dict(zip(starts, pool.map(_part, starts, chunksize=1), strict=True))
    assert 300 % BLOCK and 4 * 300 > BLOCK  # parts cross blocks
    for kind, array in enumerate(whole):
        assert b"".join(parts[start][kind] for start in sorted(starts)) == array.tobytes()
    threads = generate(NoisyRecall(seq_len=32), "test", 4 * 300, seed=5, threads=3)
    assert [array.tobytes() for array in threads] == [array.tobytes() for array in whole]


def test_seeds_and_sizes():
    task = NoisyRecall(seq_len=32)
    first = generate(task, "train", 600, seed=0)
    assert not set(rows(first)) & set(rows(generate(task, "train", 600, seed=1)))
    assert rows(generate(task, "train", 100, seed=0)) == rows(first)[:100]
    assert generate(task, "train", 0).inputs.shape == (0, 32)


def test_small_space_is_divided_whole():
    """4^5 samples: many draws find all, each in one split only, whatever the seed; train has about half."""
    task = Compression(vocab_size=4, seq_len=6)
    found = {split: set(rows(generate(task, split, 6000, seed=seed))) for seed, split in enumerate(SPLITS)}
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 4**5
    assert 0.45 < len(found["train"]) / 4**5 < 0.55


def test_too_few_samples_to_divide():
    task = Compression(vocab_size=2, seq_len=2)
    with pytest.raises(ConfigError, match="vocab_size.*seq_len.* 2 "):
        for split in SPLITS:
            generate(task, split, 10)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="'dev'"):
        generate(Mqar(), "dev", 1)
    with pytest.raises(ValueError, match="-1"):
        generate(Mqar(), "train", -1)
    with pytest.raises(ConfigError, match="'fuzzy_recall'"):
        find_task("fuzzy-recal")


@pytest.mark.parametrize(
    ("name", "values", "problems"),
    [
        ("in_context_recall", {"seq_len": 31, "vocab_size": 3}, ["seq_len: 31 is odd", "vocab_size: 3 is too few"]),
        ("in_context_recall", {"vocab_size": 17}, ["17 does not split equally into keys and values; use 16 or 18"]),
        ("in_context_recall", {"seq_len": 2}, ["seq_len: 2 leaves no room"]),
        ("noisy_recall", {"spec": "mad-lab", "vocab_size": 18}, ["use vocab_size of at least 20"]),
        ("noisy_recall", {"frac_noise": 0.99}, ["frac_noise: 0.99 of 128 tokens", "use at most 0.969"]),
        ("fuzzy_recall", {"vocab_size": 4}, ["max_key_size: 3 different", "max_value_size: 3", "at least 6"]),
        ("fuzzy_recall", {"seq_len": 12}, ["do not fit into seq_len 12; use at least 13"]),
        (
            "selective_copying",
            {"tokens_to_copy": 129},
            ["tokens_to_copy: 129", "at most 128, or a length of at least 258"],
        ),
        ("selective_copying", {"tokens_to_copy": 128, "spec": "mad-lab"}, ["use at most 127"]),
        (
            "selective_copying",
            {"vocab_size": 3, "spec": "mad-lab"},
            ["vocab_size: 3", "the copy token and the blank", "least 4"],
        ),
        ("compression", {"vocab_size": 1}, ["fewer than two data tokens; use at least 2"]),
        ("memorization", {"seq_len": 7, "vocab_size": 1}, ["seq_len: 7 is odd", "vocab_size: 1 is too few"]),
        ("mqar", {"num_pairs": 17}, ["num_pairs: 17 pairs", "use at most 16, or a length of at least 68"]),
        ("mqar", {"vocab_size": 64}, ["seq_len: 64 tokens need a larger vocabulary; use vocab_size of at least 65"]),
        ("mqar", {"seq_len": 65}, ["65 is odd"]),
    ],
)
def test_problems_name_key_value_and_fix(name, values, problems):
    with pytest.raises(ConfigError) as caught:
        parse(TASKS[name], values)
    for problem in problems:
        assert problem in str(caught.value)


def test_smallest_allowed_work():
    """The limits that the messages name are right."""
    for name, values in (
        ("in_context_recall", {"vocab_size": 4, "seq_len": 12}),
        ("noisy_recall", {"spec": "mad-lab", "vocab_size": 20, "frac_noise": 0.9}),
        ("noisy_recall", {"frac_noise": 0.969}),
        ("fuzzy_recall", {"vocab_size": 6, "seq_len": 13}),
        ("fuzzy_recall", {"vocab_size": 7, "seq_len": 13, "spec": "mad-lab"}),
        ("selective_copying", {"tokens_to_copy": 128}),
        ("selective_copying", {"tokens_to_copy": 127, "spec": "mad-lab"}),
        ("memorization", {"vocab_size": 2, "seq_len": 2}),
        ("mqar", {"num_pairs": 16, "vocab_size": 65}),
    ):
        task = parse(TASKS[name], values)
        for split in SPLITS:
            assert len(generate(task, split, 20).inputs) == 20
