"""What the experts get: in the ensemble, in the results, and on the page."""

import csv
import json
import re

import pytest
import torch
from mad_folders import rows, train_mad, write_rows

from linnet.config import ConfigError
from linnet.layers.routing import record_loads
from linnet.mad.architectures import architecture
from linnet.mad.bundle import expert_shares, is_routed
from linnet.mad.page import write_mad_report
from linnet.mad.results import dead, read_results
from linnet.mad.settings import BUDGETS, Budget, GridPoint
from linnet.models import ModelConfig, build_model
from linnet.train.together import Ensemble

OPTIONS = {"hyena_experts": {"num_experts": 4, "expert_width": 4}, "moe": {"num_experts": 4, "inner": 8}}


def model(seed):
    config = ModelConfig(d_model=16, layout="hyena_experts+moe", vocab_size=12, options=OPTIONS)
    return build_model(config, seed=seed)


@pytest.mark.parametrize("own", [False, True])
def test_loads_are_those_of_each_member_alone(own):
    tokens = torch.randint(12, (2, 10, 8) if own else (10, 8), generator=torch.Generator().manual_seed(0))
    ensemble = Ensemble([model(0), model(1)], [1e-3] * 2, [0.0] * 2, 3)
    assert is_routed(model(0)) and not is_routed(build_model(ModelConfig(d_model=16, layout="tnl", vocab_size=4)))
    found = expert_shares(ensemble, model(5), tokens, 4, "float32")
    for index, loads in enumerate(found):
        alone = model(index)
        with record_loads(alone) as expected:
            alone(tokens[index] if own else tokens)
        assert list(loads) == ["0 mixer", "0 channel"]
        for shares, (one,) in zip(loads.values(), expected.values(), strict=True):
            assert sum(shares) == pytest.approx(1, abs=1e-5)
            torch.testing.assert_close(torch.tensor(shares), one, rtol=0, atol=1e-5)
    assert found[0] != found[1]


def test_an_expert_with_next_to_nothing_is_dead():
    assert dead([0.5, 0.4999, 0.0001, 0.0]) == [2, 3] and dead([0.25] * 4) == [] and dead([0.003, 0.997]) == [0]


def test_results_have_the_loads(tmp_path, monkeypatch):
    grid = (GridPoint(1e-3, 0.0), GridPoint(1e-2, 0.0))
    small = Budget("smoke", "", True, False, grid, epochs=1, batch_size=16, max_samples=32, held_out=24)
    monkeypatch.setitem(BUDGETS, "smoke", small)
    changes = {"d_model": 16, "options": {**OPTIONS, "swiglu": {"inner": 8}}}
    models = {"hyena_experts+moe": architecture("hyena_experts+moe", changes | {"options": OPTIONS}, state=0)}
    models["gla+swiglu"] = architecture("gla+swiglu", {"d_model": 16, "options": {"gla": {"num_heads": 2}}}, state=0)
    options = {"tasks": ["memorization", "compression"], "bundle": 2}
    assert not train_mad(models, tmp_path, **options).failed
    found = read_results(tmp_path)
    with open(tmp_path / "mad.csv", newline="") as file:
        table = {row["run"]: row["loads"] for row in csv.DictReader(file)}
    assert len(found) == len(table) == 8 and sum(text == "" for text in table.values()) == 4
    for one in found:
        routed = one.architecture == "hyena_experts+moe"
        assert list(one.expert_shares) == (["0 mixer", "0 channel"] if routed else [])
        assert all(sum(shares) == pytest.approx(1, abs=1e-5) for shares in one.expert_shares.values())
    for path in tmp_path.glob("runs/*/result.json"):
        path.unlink()
    assert [one.expert_shares for one in read_results(tmp_path)] == [one.expert_shares for one in found], (
        "the table alone has them"
    )


def test_loads_are_of_the_weights_that_are_scored(tmp_path, monkeypatch):
    """At a rate that harms, an early epoch counts in mad-lab; a run that ends there has the same loads."""
    options = {"tasks": ["memorization"], "bundle": 2, "spec": "mad-lab"}
    changes = {"d_model": 16, "options": {"attention": {"num_heads": 2}, "moe": OPTIONS["moe"]}}
    models = {"attention+moe": architecture("attention+moe", changes, state=0)}

    def go(epochs, rates):
        grid = tuple(GridPoint(rate, 0.0) for rate in rates)
        small = Budget("smoke", "", True, False, grid, epochs=epochs, batch_size=16, max_samples=32, held_out=24)
        monkeypatch.setitem(BUDGETS, "smoke", small)
        folder = tmp_path / f"{epochs}-{len(rates)}"
        assert not train_mad(models, folder, **options).failed
        return {one.learning_rate: one for one in read_results(folder)}

    whole = go(6, (1e-3, 0.3))[0.3]
    assert whole.epoch < 6
    short = go(whole.epoch, (1e-3, 0.3))[0.3]
    assert short.epoch == whole.epoch and short.loss == whole.loss and short.expert_shares == whole.expert_shares


def test_the_page_shows_loads_and_names_the_dead(tmp_path):
    found = rows(["mad-hyena-moe", "mad-hyena-swiglu"])
    for row in found:
        if row["architecture"] == "mad-hyena-moe":
            shares = [0.5, 0.0, 0.25, 0.25] if row["task"] == "compression" else [0.25] * 4
            row["loads"] = json.dumps({"0 channel": [0.25] * 4, "1 channel": shares})
    page = write_mad_report(write_rows(tmp_path, found)).read_text(encoding="utf-8")
    words = " ".join(re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.S)).split())
    assert "In 1 of the 12 layers with experts of the runs that count, one or more experts get next to no" in words
    assert "(mad-hyena-moe, compression/baseline, layer 1 channel: 2)" in words
    assert "mad-hyena-moe compression 1 channel 50.0 0.0 25.0 25.0 2 " in words
    assert "mad-hyena-moe compression 0 channel 25.0 25.0 25.0 25.0 none" in words

    found[0]["loads"] = "[1, 2]"
    with pytest.raises(ConfigError, match="loads"):
        read_results(write_rows(tmp_path / "bad", found[:1]))
