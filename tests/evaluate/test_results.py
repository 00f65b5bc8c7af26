"""The record of an evaluation: averages of items, both files, and what is damaged."""

import json
import math

import pytest
import yaml

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.evaluate.results import (
    Evaluation,
    Item,
    OtherFormatError,
    Result,
    describe_model,
    read_evaluation,
    read_evaluations,
    shown_score,
)
from linnet.models import build_model, family
from linnet.runs import RunFolder, checkpoint
from linnet.runs.model import load_checkpoint

ITEMS = (Item("a, b", 0.1, 3.0), Item('"c"\n', 0.5, 1.0))


def evaluation(**changes) -> Evaluation:
    results = (
        Result.of_items("one", "loss", ITEMS, "lower"),
        Result.of_items("one", "perplexity", ITEMS, "lower", "exp"),
        Result("two", "niah_score", math.nan, n=4),
    )
    values = {"kind": "made-up", "model": {"run": "r", "step": 7}, "asked": {"text": ["x"]}, "results": results}
    return Evaluation(**{**values, "detail": {"grid": [1, math.inf]}, **changes})


def test_a_value_is_the_weighted_mean_of_its_items():
    loss, perplexity, _ = evaluation().results
    assert loss.value == pytest.approx((0.3 + 0.5) / 4) and loss.n == 2
    assert perplexity.value == pytest.approx(math.exp(0.2))
    with pytest.raises(ValueError, match="one.*loss"):
        Result.of_items("one", "loss", [Item("a", 1.0, 0.0)])


def test_what_is_saved_is_read_with_its_items(tmp_path):
    path = evaluation().save(tmp_path)
    found = read_evaluation(path)
    assert path.parent == tmp_path / "evaluations" and path.name.startswith("made-up-")
    assert found.results[:2] == evaluation().results[:2] and found.model == {"run": "r", "step": 7}
    assert math.isnan(found.results[2].value) and found.detail == {"grid": [1, None]}
    table = path.with_suffix(".csv").read_text().splitlines()
    assert table[:2] == ["task,metric,id,score,weight", 'one,loss,"a, b",0.1,3.0']
    assert json.loads(path.read_text())["results"][0] == {
        "task": "one", "metric": "loss", "value": pytest.approx(0.2), "n": 2, "better": "lower", "average": "mean",
    }  # fmt: skip


def test_items_that_are_cut_off_are_refused(tmp_path):
    path = evaluation().save(tmp_path)
    items = path.with_suffix(".csv")
    items.write_text(items.read_text().rstrip("\n")[:-2])  # the weight 1.0 as 1
    with pytest.raises(ConfigError, match="cannot be read.*no line end"):
        read_evaluation(path)


def test_another_step_or_setting_has_files_of_its_own(tmp_path):
    first = evaluation().save(tmp_path)
    assert evaluation(results=()).save(tmp_path) == first
    evaluation(model={"run": "r", "step": 8}).save(tmp_path)
    evaluation(asked={"text": ["y"]}).save(tmp_path)
    assert len(read_evaluations(tmp_path)) == 3
    assert read_evaluations(tmp_path / "nothing") == []


def test_damaged_files_are_all_named_and_foreign_ones_left_out(tmp_path):
    folder = evaluation().save(tmp_path).parent
    (folder / "old.json").write_text('{"run": "of another format"}')
    assert len(read_evaluations(tmp_path)) == 1
    (folder / "torn.json").write_text('{"format": 1, ')
    (folder / "bare.json").write_text('{"format": 1, "kind": "x"}')
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*bare.json: .*torn.json: "):
        read_evaluations(tmp_path)
    problems = ["before"]
    assert len(read_evaluations(tmp_path, problems)) == 1
    assert [problem.partition(": ")[0].rpartition("/")[2] for problem in problems] == [
        "before", "bare.json", "torn.json",
    ]  # fmt: skip
    with pytest.raises(OtherFormatError, match="old.json: .*format 1"):
        read_evaluation(folder / "old.json")


def test_the_model_is_that_of_the_checkpoint_whose_weights_were_read(tmp_path):
    config = family("tnl")(32, 2, vocab_size=256)
    values = {"architecture": "tnl", "model": config.model_dump(mode="json"), "data": {"tokenizer": {"kind": "byte"}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    rows = [{"event": "start", "step": 0}, {"step": 5, "tokens": 500, "flops": 1e6}, {"step": 20, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder, tensors = RunFolder.open(tmp_path), build_model(config).state_dict()
    for step in (10, 20):
        checkpoint.save(folder.checkpoint_folder, step, {"model": tensors}, {})
    found = describe_model(folder, load_checkpoint(tmp_path))
    assert (found["step"], found["tokens"], found["flops"]) == (20, 2000, 4e6)
    assert found["tokenizer"] == ByteTokenizer().digest and found["architecture"] == "tnl"
    assert found["params_total"] > found["params_non_embedding"] > 0
    file = folder.checkpoints()[-1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.warns(UserWarning, match="step-00000010"):
        found = describe_model(folder, load_checkpoint(tmp_path))
    assert (found["step"], found["tokens"]) == (10, 1000)


def test_an_earlier_checkpoint_of_a_growing_batch_has_read_what_its_own_row_says(tmp_path):
    config = family("tnl")(32, 2, vocab_size=256)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": config.model_dump(mode="json")}))
    rows = [{"step": 5, "tokens": 50, "flops": 5e5}, {"step": 10, "tokens": 150, "flops": 1.5e6}]
    rows += [{"step": 20, "tokens": 550, "flops": 5.5e6}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint.save(tmp_path / "checkpoints", 10, {"model": build_model(config).state_dict()}, {})
    found = describe_model(RunFolder.open(tmp_path), load_checkpoint(tmp_path))
    assert (found["step"], found["tokens"], found["flops"]) == (10, 150, 1.5e6)


def test_scores_have_no_absurd_decimals():
    shown = {2.5: "2.5000", 999.98765: "999.9877", 571676.04: "571,676", 1.5e7: "1.5e+07"}
    assert {value: shown_score(value) for value in shown} == shown
