"""Pass rates, their intervals, and the decision."""

import json

import pytest

from linnet.config import ConfigError
from linnet.corpus.scoring.sample import Verdicts, decide, read_verdicts


def verdicts(**counts):
    """Documents of two sources; the names of verdicts that start with `none` are not judged."""
    documents = []
    for kind, count in counts.items():
        for i in range(count):
            verdict = None if kind == "none" else kind
            documents.append({"source": "ab"[i % 2], "file": "f", "row": i, "decile": 1 + i % 10, "verdict": verdict})
    return Verdicts.model_validate({"format": 1, "sample": "0" * 12, "documents": documents})


def test_rates_and_wilson_intervals_by_group():
    decision = decide(verdicts(good=81, bad=19, unsure=4, none=2))
    total = decision.total
    assert (total.good, total.bad, total.unsure, total.open, total.rate) == (81, 19, 4, 2, 0.81)
    assert total.interval == pytest.approx((0.7222, 0.8749), abs=1e-4)  # Wilson's formula, n = 100
    assert [one.name for one in decision.sources] == ["a", "b"]
    assert len(decision.deciles) == 10 and len(decision.strata) == 10
    assert sum(one.judged for one in decision.strata) == 100


@pytest.mark.parametrize(
    ("counts", "stop"),
    [
        ({"good": 195, "bad": 5}, True),  # interval from 0.943
        ({"good": 184, "bad": 16}, False),  # 92 % is above 0.9, but not certainly
        ({"good": 100, "bad": 100}, False),
        ({"good": 10}, False),  # too few
        ({"unsure": 9, "none": 3}, False),
    ],
)
def test_the_loop_stops_when_the_rate_is_certain(counts, stop):
    decision = decide(verdicts(**counts), 0.9)
    assert decision.stop is stop and decision.to_dict()["decision"] == ("stop" if stop else "go")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"format": 2, "sample": "a", "documents": []}', "format"),
        (
            json.dumps(
                {"format": 1, "sample": "a", "documents": [{"source": "a", "file": "f", "row": 0, "decile": 11}]}
            ),
            "decile",
        ),
        (
            json.dumps(
                {
                    "format": 1,
                    "sample": "a",
                    "documents": [{"source": "a", "file": "f", "row": 0, "decile": 1, "verdict": 3}],
                }
            ),
            "verdict",
        ),
    ],
)
def test_files_that_no_page_saved(tmp_path, text, key):
    (tmp_path / "v.json").write_text(text)
    with pytest.raises(ConfigError, match=key):
        read_verdicts(tmp_path / "v.json")
    with pytest.raises(ConfigError, match="missing"):
        read_verdicts(tmp_path / "missing.json")
