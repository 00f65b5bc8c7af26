"""Samples: in proportion to strata, the same for a seed, whatever the order of the sources."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.config import ConfigError
from linnet.corpus.scoring.sample import Stratum, allocate, deciles, draw_sample


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 300))
def test_draws_are_in_proportion_and_no_stratum_is_forgotten(sizes, n):
    strata = {Stratum("a", i): size for i, size in enumerate(sizes)}
    found = allocate(strata, n)
    assert sum(found.values()) == min(n, sum(sizes))
    assert all(found[one] <= strata[one] for one in strata)
    if n >= len(sizes):
        assert min(found.values()) >= 1
    for one in strata:  # a stratum that gets more than its share and one draw has taken it from none that lacks two
        assert found[one] <= max(1, np.ceil(strata[one] / sum(sizes) * n) + 1)


def test_deciles_have_equal_sizes_and_follow_the_scores():
    scores = [3.0, 1.0, 2.0, 2.0] * 5
    found = deciles(scores, [f"{i:02}" for i in range(20)])
    assert Counter(found.tolist()) == dict.fromkeys(range(1, 11), 2)
    assert max(found[np.equal(scores, 1)]) < min(found[np.equal(scores, 3)])


def corpus(folder, sizes):
    for name, size in sizes.items():
        rows = [{"text": f"{name} {i}", "nats_per_letter": i / 7} for i in range(size)] + [{"text": f"{name} none"}]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [str(folder / f"{name}.jsonl") for name in sizes]


def test_a_sample_covers_sources_and_deciles_and_depends_on_its_seed_alone(tmp_path):
    paths = corpus(tmp_path, {"one": 60, "two": 30})
    sample = draw_sample(paths, 40, seed=3)
    counts = Counter(one.stratum for one in sample.drawn)
    assert len(sample.drawn) == 40 and set(counts) == set(sample.sizes) and len(counts) == 22
    assert sample.sizes[Stratum("one", 1)] == 6 and sample.sizes[Stratum("two", 0)] == 1
    assert all((one.score is None) == (one.stratum.decile == 0) for one in sample.drawn)
    again = draw_sample(paths[::-1], 40, seed=3)
    assert [one.document for one in again.drawn] == [one.document for one in sample.drawn]
    assert again.digest == sample.digest != draw_sample(paths, 40, seed=4).digest
    assert len(draw_sample(paths, 1000).drawn) == 92


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        draw_sample([str(tmp_path / "nowhere")], 3)


def test_scores_are_those_that_ordered_the_documents(tmp_path):
    rows = [{"text": str(i), "nats_per_byte": 2.0 - i / 9, "nats_per_letter": 1.0 + i / 9} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for per in ("byte", "letter"):
        sample = draw_sample([str(tmp_path / "rows.jsonl")], 10, per=per)
        ordered = sorted(sample.drawn, key=lambda one: one.stratum.decile)
        assert sample.per == per and [one.score for one in ordered] == sorted(row[f"nats_per_{per}"] for row in rows)
