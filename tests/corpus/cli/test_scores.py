"""score, filter, sample, verdicts and loop as commands: what they print, and wrong options."""

import json
from functools import partial

import pytest
import yaml
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import parse
from linnet.data import ByteTokenizer
from linnet.models import ModelConfig, build_model
from linnet.runs.model import save_model

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A folder with a model, a source of 20 documents, and its scores."""
    folder = tmp_path_factory.mktemp("scored")
    rows = [{"text": f"{i} is here. {TEXT * (1 + i % 3)}" if i % 7 else "short"} for i in range(20)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"tnl": {"num_heads": 2}}
    values = {"recipe": "tnl-10m", "d_model": 16, "layout": "tnl+sglu x1", "vocab_size": 257, "options": options}
    config = parse(ModelConfig, values)
    save_model(folder / "model", config, build_model(config).state_dict(), ByteTokenizer())
    invoke("score", folder / "texts.jsonl", "--model", folder / "model", "--out", folder / "scored")
    return folder


def invoke(*words, code=0):
    result = CliRunner().invoke(app, ["corpus", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_from_scores_to_verdicts(scored, tmp_path):
    found = json.loads((scored / "scored" / "stage.json").read_text())
    assert found["counts"]["scores.scored"] == 17
    shown = invoke("filter", scored / "scored", "--out", tmp_path / "kept", "--keep", "0.8")
    assert "left out" in shown and "highest scores" in shown and "lowest scores" in shown
    page = tmp_path / "review.html"
    drawn = json.loads(invoke("sample", tmp_path / "kept", "--n", "9", "--review", page, "--json"))
    assert sum(one["drawn"] for one in drawn["strata"]) == 9 and page.is_file()
    assert "decile 10" in invoke("sample", tmp_path / "kept", "--n", "9", "--review", page, "--per", "letter")
    assert '"per": "letter"' in page.read_text().replace('"per":"', '"per": "')
    documents = [{"source": "texts", "file": "f", "row": i, "decile": 1, "verdict": "good"} for i in range(50)]
    (tmp_path / "v.json").write_text(json.dumps({"format": 1, "sample": drawn["sample"], "documents": documents}))
    assert "stop" in invoke("verdicts", tmp_path / "v.json")
    record = json.loads(invoke("verdicts", tmp_path / "v.json", "--pass-rate", "0.95", "--json"))
    assert record["decision"] == "go" and record["total"]["low"] == pytest.approx(0.9287, abs=1e-4)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["filter", "{scored}", "--out", "{out}", "--keep", "1.5"], "--keep"),
        (["filter", "{scored}", "--out", "{out}", "--by", "moon"], "--by"),
        (["filter", "{scored}", "--out", "{out}", "--low", "2"], "--low"),
        (["filter", "{texts}", "--out", "{out}"], "linnet corpus score"),
        (["score", "{texts}", "--model", "{scored}", "--out", "{out}"], "config.yaml"),
        (["score", "{texts}", "--model", "{model}", "--out", "{out}", "--device", "tpu"], "--device"),
        (["score", "{texts}", "--model", "{model}", "--out", "{out}", "--dtype", "int8"], "--dtype"),
        (["sample", "{scored}", "--review", "{out}"], "name a page"),
        (["sample", "{scored}", "--per", "word"], "use byte or letter"),
        (["verdicts", "{texts}"], "JSON"),
        (["verdicts", "{texts}", "--pass-rate", "0"], "--pass-rate"),
        (["loop", "{texts}", "--out", "{out}"], "texts.jsonl"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(scored, tmp_path, words, named):
    places = {"texts": scored / "texts.jsonl", "scored": scored / "scored", "model": scored / "model"}
    output = invoke(*(word.format(**places, out=tmp_path / "out") for word in words), code=2)
    assert named in output
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("shard-*"))


def test_a_loop(scored, tmp_path):
    train = {"model": parse_model(), "seq_len": 16, "batch_size": 2, "steps": 2, "evaluate_tokens": 32}
    config = {"source": [str(scored / "texts.jsonl")], "keep": 0.5, "train": train | {"run": {"device": "cpu"}}}
    (tmp_path / "loop.yaml").write_text(yaml.safe_dump(config | {"executor": {"kind": "inline"}}))
    run = partial(invoke, "loop", tmp_path / "loop.yaml", "--rounds", "1", "--out", tmp_path / "loop")
    assert "documents in" in run("--set", "sample=5")
    assert json.loads(run("--set", "sample=5", "--json"))["stopped"] == "rounds"


def parse_model():
    options = {"tnl": {"num_heads": 2}}
    return {"recipe": "tnl-10m", "d_model": 16, "layout": "tnl+sglu x1", "options": options}
