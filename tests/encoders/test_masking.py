"""Masks: exact counts, shares of 80/10/10, a pure function of (key, sample), and the same rows on any ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.config import ConfigError
from linnet.data.loader import IGNORED, Batches
from linnet.data.shards import ShardWriter, TokenShards
from linnet.encoders.masking import MaskedBatches, MaskedValidation, MaskingConfig, mask_rows

CONFIG = MaskingConfig()


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> TokenShards:
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, "train", np.dtype("<u2"), 0, None)
    for length in (300, 31, 400, 7, 362):
        writer.add(np.arange(1, length + 1), length)
    return TokenShards(folder, "train", writer.finish(), 0)


@given(length=st.integers(4, 200), rate=st.floats(0.1, 0.9), sample=st.integers(0, 2**40))
@settings(max_examples=50)
def test_every_row_has_exactly_the_asked_number_of_targets(length, rate, sample):
    config = MaskingConfig(rate=rate)
    if config.problems(length):
        return
    tokens = np.arange(length)[None].repeat(3, 0)
    inputs, targets = mask_rows(tokens, np.arange(sample, sample + 3), "k", config, 1000)
    chosen = targets != IGNORED
    assert (chosen.sum(1) == round(rate * length)).all()
    assert (inputs[~chosen] == tokens[~chosen]).all() and (targets[chosen] == tokens[chosen]).all()
    assert inputs.min() >= 0 and inputs.max() <= 1000


def test_places_and_replacements_have_the_right_shares_and_no_row_repeats_another():
    rows, length, vocab = 4000, 128, 300
    tokens = np.full((rows, length), 7)
    inputs, targets = mask_rows(tokens, np.arange(rows), "train 0", CONFIG, vocab)
    chosen = targets != IGNORED
    assert (chosen.sum(1) == 32).all()
    # 128,000 targets: the standard error of a share is 0.0012 at most, of a column's count 27.4 around 1,000.
    assert abs(chosen.sum(0) - rows / 4).max() < 5 * 27.4
    seen = inputs[chosen]
    assert abs((seen == vocab).mean() - 0.8) < 0.006
    assert abs((seen == 7).mean() - 0.1 - 0.1 / vocab) < 0.005
    drawn = seen[(seen != vocab) & (seen != 7)]
    assert len(set(drawn)) == vocab - 1 and drawn.max() == vocab - 1
    assert len({row.tobytes() for row in chosen}) == rows
    # Neighbouring places are masked together as often as independent choices would be.
    assert abs((chosen[:, 1:] & chosen[:, :-1]).mean() - 0.25 * 31 / 127) < 0.003


def test_masks_depend_on_key_and_sample_alone():
    tokens = np.arange(640).reshape(5, 128)
    inputs, targets = mask_rows(tokens, np.arange(10, 15), "train 3", CONFIG, 700)
    again = mask_rows(tokens[[3, 1]], np.array([13, 11]), "train 3", CONFIG, 700)
    assert (again[0] == inputs[[3, 1]]).all() and (again[1] == targets[[3, 1]]).all()
    other = mask_rows(tokens, np.arange(10, 15), "train 4", CONFIG, 700)
    assert (other[1] != targets).any(1).all()


@pytest.mark.parametrize("packing", ["cross", "reset"])
def test_ranks_share_the_masked_batch(shards, packing):
    batches = MaskedBatches(shards, 9, 7, 5, CONFIG, 500, packing)
    plain = Batches(shards, 9, 7, 5, packing)
    for step in (0, 15, 31):
        inputs, targets, *starts = batches.batch(step)
        tokens, _, *expected = plain.batch(step)
        assert torch.equal(torch.where(targets == IGNORED, inputs, targets), tokens)
        assert all(torch.equal(a, b) for a, b in zip(starts, expected, strict=True))
        for world in (2, 3):
            ranks = [batches.batch(step, rank, world) for rank in range(world)]
            assert torch.equal(torch.cat([rank[0] for rank in ranks]), inputs)
            assert torch.equal(torch.cat([rank[1] for rank in ranks]), targets)
    one, two = (batches.batch(step) for step in (3, 3 + batches.windows))  # the same row positions, an epoch later
    assert not torch.equal(one[1] == IGNORED, two[1] == IGNORED)


def test_validation_is_fixed_and_covers_the_split(shards):
    whole = MaskedValidation(shards, 10, 4, CONFIG, 500)
    assert whole.tokens == len(shards) // 10 * 10 and whole.targets == whole.tokens // 10 * 2
    rows = torch.cat([torch.where(targets == IGNORED, inputs, targets) for inputs, targets in whole])
    assert rows.flatten().tolist() == list(shards[: whole.tokens])
    some = MaskedValidation(shards, 10, 3, CONFIG, 500, max_tokens=100, packing="reset")
    inputs, targets, starts = some[1]
    assert len(some) == 4 and inputs.shape == (3, 10) and starts.shape[0] == 3
    assert len(some[3][0]) == 1
    found = {row.numpy().tobytes() for batch in whole for row in batch[0]}  # a row has its mask in any selection
    assert all(row.numpy().tobytes() in found for batch in some for row in batch[0])


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5])
def test_rates_without_anything_to_predict_or_to_read_are_refused(rate):
    with pytest.raises(ConfigError, match=f"rate: {rate:g} leaves nothing to .*such as 0.25"):
        MaskingConfig(rate=rate)


def test_bad_masks_name_key_value_and_fix(shards):
    with pytest.raises(ConfigError, match="random: masked .0.8. . random .0.3. is above 1"):
        MaskingConfig(random=0.3)
    with pytest.raises(ConfigError, match="seq_len: 3 is too short"):
        MaskedBatches(shards, 3, 2, 0, CONFIG, 500)
    assert "masks no token" in MaskingConfig(rate=0.05).problems(8)[0]
    assert "masks all 4" in MaskingConfig(rate=0.9).problems(4)[0]
    with pytest.raises(ConfigError, match="seq_len: 5000 is too long: the held-out text has"):
        MaskedValidation(shards, 5000, 2, CONFIG, 500)
    with pytest.raises(ConfigError, match="seq_len"):
        MaskedBatches(shards, 5000, 2, 0, CONFIG, 500)
