"""Thresholds per source, both tails, and documents without a score."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.config import ConfigError, parse
from linnet.corpus.documents import find_parts, read_part
from linnet.corpus.scoring.score import Cut, FilterConfig, filter_stage, find_cut


def write(path, scores):
    rows = [{"text": f"document {i}", "nats_per_letter": score} for i, score in enumerate(scores)]
    path.write_text("\n".join(json.dumps({k: v for k, v in row.items() if v is not None}) for row in rows))
    return str(path)


def documents(folder):
    return [d for part in find_parts([str(folder)], "kept", [], []) for d in read_part(part, Counter())]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.floats(0.05, 1), st.floats(0, 0.04))
def test_a_cut_leaves_out_at_most_the_share_of_each_tail(scores, keep, low):
    cut = find_cut(scores, keep, low)
    tails = Counter(cut.drops(score) for score in scores)
    assert tails["high tail"] <= (1 - keep) * len(scores) + 1e-9
    assert tails["low tail"] <= low * len(scores) + 1e-9
    kept = [score for score in scores if cut.drops(score) is None]
    assert all(cut.drops(score) or min(kept) <= score <= max(kept) for score in scores)


def test_the_report_reads_the_same_keys():
    from linnet.corpus.page import records
    from linnet.corpus.scoring import score

    assert records.NATS == score.KEYS


def test_a_cut_without_ties_leaves_out_exactly_the_share():
    assert find_cut(range(10), 0.9, 0.2) == Cut(2.0, 8.0)
    assert find_cut(range(10), 1.0) == Cut(None, None)
    assert find_cut([1.0], 0.1) == Cut(None, None)  # nothing is left of one document


def test_each_source_has_its_own_thresholds_and_both_tails_are_shown(tmp_path):
    low = write(tmp_path / "code.jsonl", [1 + i / 100 for i in range(20)] + [None])
    high = write(tmp_path / "prose.jsonl", [2 + i / 100 for i in range(10)])
    stage = filter_stage([low, high], tmp_path / "out", FilterConfig(keep=0.9))
    kept = documents(tmp_path / "out")
    assert Counter(d.source for d in kept) == {"code": 19, "prose": 9}  # 18 scored and the one without a score
    assert stage["counts"]["kept.without a score"] == 1 and stage["counts"]["left out.high tail"] == 3
    code = stage["results"]["code"]
    assert (code["high"], code["low"], code["above"], code["below"]) == (1.17, None, 2, 0)
    assert [one["score"] for one in code["highest"]] == [1.19, 1.18, 1.17]
    assert [one["row"] for one in code["lowest"]] == [0, 1, 2]
    assert stage["samples"]["left out.high tail"][0]["score"] > 1.17


def test_one_threshold_for_all_and_the_low_tail_on_request(tmp_path):
    low = write(tmp_path / "code.jsonl", [1 + i / 100 for i in range(20)])
    high = write(tmp_path / "prose.jsonl", [2 + i / 100 for i in range(10)])
    stage = filter_stage([low, high], tmp_path / "out", FilterConfig(keep=0.9, low=0.1, by="all"))
    assert Counter(d.source for d in documents(tmp_path / "out")) == {"code": 17, "prose": 7}
    assert stage["counts"]["left out.low tail"] == 3
    again = filter_stage([low, high], tmp_path / "two", FilterConfig(keep=0.9, low=0.1, by="all"), workers=2)
    assert again == stage


def test_scores_are_required(tmp_path):
    with pytest.raises(ConfigError, match="corpus score"):
        filter_stage([write(tmp_path / "a.jsonl", [None])], tmp_path / "out", FilterConfig())


@pytest.mark.parametrize("values", [{"keep": 0}, {"keep": 1.5}, {"low": -0.1}, {"low": 0.9}, {"keep": 0.1, "low": 0.1}])
def test_shares_outside_of_their_range(values):
    with pytest.raises(ConfigError, match="keep|low"):
        parse(FilterConfig, values)


def test_scores_per_letter_order_documents_of_other_alphabets(tmp_path):
    rows = [{"text": str(i), "nats_per_byte": 2.0 - i / 9, "nats_per_letter": 1.0 + i / 9} for i in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for per, left_out in (("byte", "0"), ("letter", "9")):
        filter_stage([str(tmp_path / "a.jsonl")], tmp_path / per, FilterConfig(per=per))
        assert {str(i) for i in range(10)} - {d.text for d in documents(tmp_path / per)} == {left_out}
