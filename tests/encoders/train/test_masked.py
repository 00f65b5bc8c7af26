"""The objective `masked`: it learns, resumes exactly, splits batches freely, and refuses what cannot be masked."""

import contextlib
import math
import shutil

import pytest
import torch
import yaml

from linnet.config import ConfigError
from linnet.encoders.masking import MaskedValidation
from linnet.encoders.models import MaskedLM
from linnet.encoders.train import MaskedObjective
from linnet.evaluate import score
from linnet.layers import dropout
from linnet.models import family
from linnet.papers.verbs.base import numbers, with_derived
from linnet.runs import RunFolder, checkpoint
from linnet.runs.model import load_model
from linnet.train import train
from linnet.train.config import RunConfig, TrainConfig
from linnet.train.identity import digest_of, settings
from linnet.train.loop import result_numbers
from linnet.train.objectives import read_training

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def masked(text):
    def build(name="lightnet-bert", **changes):
        model = family(name, "masked_lm")(16, 2, num_heads=2).model_dump() | changes.pop("model", {})
        values = {"seq_len": 32, "batch_size": 4, "steps": 12, "evaluate_tokens": 512, **changes}
        run = {"log_every": 1, "device": "cpu", "checkpoint_every": 5}
        run |= {key: values.pop(key) for key in RunConfig.model_fields if key in values}
        values = {"objective": "masked", "model": model, "data": {"source": [str(text)]}, "run": run} | values
        return read_training({"optimizer": {"learning_rate": 1e-2}, **values})

    return build


def rows(run, *keys):
    return [tuple(row[key] for key in keys) for row in run.metrics() if keys[0] in row]


def test_a_training_learns_resumes_exactly_and_is_found_again(masked, cache, tmp_path):
    whole = train(masked(), tmp_path / "a", cache)
    result = whole.result()
    assert numbers(result).keys() <= with_derived(result_numbers(masked()))
    assert result["loss"] < 0.8 * math.log(256)
    assert result["masked_perplexity"] == pytest.approx(math.exp(result["loss"]))
    losses = rows(whole, "loss", "tokens", "flops")
    assert len(losses) == 12 and losses[-1][1] == 12 * 4 * 32
    model, tokenizer = load_model(whole.path, kinds=("masked_lm",))
    assert isinstance(model, MaskedLM) and tokenizer.name == "byte"
    with pytest.raises(ConfigError, match="contains a masked language model.*linnet evaluate masked"):
        load_model(whole.path)

    shutil.copytree(tmp_path / "a", tmp_path / "b")  # as if it was killed after step 5
    stopped = RunFolder.open(tmp_path / "b" / whole.path.name)
    for path in stopped.checkpoints():
        if checkpoint.step_of(path) > 5:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    (stopped.path / "result.json").unlink()
    again = train(masked(), tmp_path / "b", cache)
    assert again.path == stopped.path and again.path.name == whole.path.name
    assert rows(again, "loss") == rows(whole, "loss")
    last = [checkpoint.load(run.checkpoints()[-1])[0]["model"] for run in (whole, again)]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.parametrize("packing", ["cross", "reset"])
def test_gradients_are_the_same_in_parts_with_dropout(masked, cache, packing):
    config = masked(model={"dropout": 0.2}, data={"source": masked().data.source, "packing": packing})
    objective = MaskedObjective.prepare(config, CPU, cache)
    batch = objective.batches().batch(3)
    model = objective.build(0)
    loss, found = objective.loss(model), []
    for parts in (1, 4):
        model.zero_grad()
        row = 0
        for part in zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True):
            with dropout.position(model, step=3, first_row=row, row_length=objective.row_length):
                total, count = loss(*part)
            row += len(part[0])
            (total / objective.count(*batch)).backward()
        assert count == objective.count(*part)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*found, atol=1e-6)


def test_documents_of_a_row_do_not_see_each_other_where_they_are_reset(masked, cache, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "abcdefgh"}\n{"text": "ijklmnop"}\n' * 200)
    data = {"source": [str(tmp_path / "short.jsonl")], "packing": "reset"}
    objective = MaskedObjective.prepare(masked("bert", data=data), CPU, cache)
    model = objective.build(0).double().eval()
    tokens, targets, starts = objective.batches().batch(0)
    assert starts.shape[1] > 1
    total, count = objective.loss(model)(tokens, targets, starts)
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(len(tokens)):
        places = [*(place for place in starts[row].tolist() if place < 32), 32]
        for first, end in zip(places, places[1:], strict=False):
            expected += model.loss(tokens[row : row + 1, first:end], targets[row : row + 1, first:end])[0]
    assert torch.allclose(total, expected) and count == objective.count(tokens, targets, starts)


def test_validation_is_the_mean_over_masked_places_of_the_held_out_text(masked, cache):
    config = masked(evaluate_tokens=None)
    objective = MaskedObjective.prepare(config, CPU, cache)
    model = objective.build(0)
    found = objective.validate(model, contextlib.nullcontext())
    total = count = 0
    for tokens, targets in MaskedValidation(objective.data.validation, 32, 5, config.masking, 256):
        nll, number = model.eval().loss(tokens, targets)
        total, count = total + nll.item(), count + number.item()
    assert found["validation_loss"] == pytest.approx(total / count, rel=1e-5)
    assert score(model, [(tokens, targets)]).tokens == (targets != -100).sum()


def test_what_cannot_be_masked_is_refused_before_work(masked, cache, tmp_path):
    for changes, words in (
        ({"seq_len": 3}, ["seq_len: 3 is too short for masked tokens"]),
        ({"masking": {"rate": 0.001}}, ["masking.rate: 0.001 masks no token of 32"]),
        ({"seq_len": 10**6}, ["seq_len: 1000000 is too long"]),
        ({"parallel": {"tp": 2}}, ["parallel.tp: 2 is not built for objective: masked"]),
    ):
        with pytest.raises(ConfigError) as error:
            train(masked(**changes), tmp_path, cache)
        assert all(word in str(error.value) for word in words), error.value
    assert not list(tmp_path.iterdir())
    for values, words in (
        ({"masking": {"rate": 1.0}}, "masking.rate"),
        ({"seq_len": 3}, "seq_len: 3 is too short"),  # without reading the text
        ({"masking": {"rate": 0.001}}, "masks no token"),
        ({"model": {"vocab_size": 7}}, "vocab_size 7"),
    ):
        with pytest.raises(ConfigError, match=words):
            masked(**values)


def test_the_digest_covers_the_masks_and_omits_defaults(masked, cache, tmp_path):
    assert "masking" not in settings(masked()) and settings(masked(masking={"rate": 0.15}))["masking"] == {"rate": 0.15}
    assert digest_of(masked(), None) != digest_of(masked(masking={"rate": 0.15}), None)
    values = yaml.safe_load(yaml.safe_dump(masked().model_dump(mode="json")))
    assert read_training(values) == masked()
    assert "masking" not in TrainConfig.model_fields
