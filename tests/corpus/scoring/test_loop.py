"""The loop finds planted garbage, resumes with the same bytes, and stops where it should."""

import json
import shutil
from collections import Counter

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from linnet.config import ConfigError, parse, read_yaml
from linnet.corpus.documents import find_parts, read_part
from linnet.corpus.scoring import LoopConfig, agreement, run_loop
from linnet.corpus.scoring.sample import write_review
from linnet.runs import RunFolder


@pytest.fixture(scope="module")
def values(sources):
    """Plain values of a loop of two rounds whose models train for 20 steps."""
    return {
        "source": sources,
        "rounds": 2,
        "keep": 0.85,
        "sample": 12,
        "train": {
            "model": {
                "recipe": "tnl-10m",
                "d_model": 16,
                "layout": "tnl+sglu x1",
                "options": {"tnl": {"num_heads": 2}},
            },
            "seq_len": 32,
            "batch_size": 4,
            "steps": 20,
            "evaluate_tokens": 128,
            "optimizer": {"learning_rate": 1e-2},
            "run": {"device": "cpu", "checkpoint_every": 5},
        },
        "executor": {"kind": "inline"},
    }


@pytest.fixture(scope="module")
def finished(values, tmp_path_factory):
    """The folder of that loop, finished, and its result."""
    out = tmp_path_factory.mktemp("loop") / "out"
    return out, run_loop(parse(LoopConfig, values), out, review=write_review)


def kept_rows(folder):
    return [d for part in find_parts([str(folder)], "kept", [], []) for d in read_part(part, Counter())]


def snapshot(out):
    """All files whose bytes are promised: not those of trainings, which hold times, nor provenance."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in files
        if "runs" not in path.parts and path.name != "provenance.json"
    }


def test_two_rounds_find_the_garbage(finished):
    out, result = finished
    assert result.stopped == "rounds" and len(result.rounds) == 2
    first, second = result.rounds
    assert (first["documents"], first["agreement"]) == (80, None)
    assert 0 < second["agreement"] <= 1 and second["kept"] == first["kept"]
    kept = kept_rows(result.kept)
    assert len(kept) == second["kept"] and sum(d.extra["bad"] for d in kept) == 0
    assert second["agreement"] == agreement(out / "round-1" / "kept", out / "round-2" / "kept", 80)
    assert (out / "round-2" / "review.html").stat().st_size > 1000
    assert not list(out.glob("round-*/half-*")) and not list(out.glob("round-*/cache"))
    assert json.loads((out / "loop.json").read_text())["rounds"] == result.rounds


def test_a_stopped_loop_ends_with_the_same_bytes(finished, values, tmp_path):
    """Every file that a round writes last is taken away in turn, as by a kill before it was written."""
    whole = snapshot(finished[0])
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    shutil.rmtree(out / "round-2")
    (out / "round-1" / "round.json").unlink()
    (out / ".loop.yaml.1.tmp").write_text("half")
    (out / "round-1" / ".review.html.1.tmp").write_text("half")
    (out / "round-1" / "review.html").unlink()
    shutil.rmtree(out / "round-1" / "kept")
    (out / "loop.json").unlink()
    older = read_yaml(out / "loop.yaml")
    del older["agree"]  # as a release wrote it that did not have this key
    (out / "loop.yaml").write_text(yaml.safe_dump(older))
    run_loop(parse(LoopConfig, values), out, review=write_review)
    assert snapshot(out) == whole


def test_agreement_and_verdicts_stop_the_loop(finished, values, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0], out)
    (out / "loop.yaml").unlink()
    shutil.rmtree(out / "round-2")
    (out / "loop.json").unlink()
    waiting = parse(LoopConfig, values | {"wait": True})
    (out / "loop.yaml").write_text((finished[0] / "loop.yaml").read_text())
    assert run_loop(waiting, out).stopped == "waiting"
    rows = [{"source": "one", "file": "f", "row": i, "decile": 1, "verdict": "good"} for i in range(60)]
    record = {"format": 1, "sample": "0" * 12, "documents": rows}
    (out / "round-1" / "verdicts.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="this round has the sample"):
        run_loop(waiting, out)
    record["sample"] = finished[1].rounds[0]["sample"]
    (out / "round-1" / "verdicts.json").write_text(json.dumps(record))
    result = run_loop(waiting, out)
    assert result.stopped == "verdicts" and result.kept == out / "round-1" / "kept" and len(result.rounds) == 1
    (out / "round-1" / "verdicts.json").unlink()
    (out / "round-2").mkdir()
    shutil.copy(finished[0] / "round-2" / "round.json", out / "round-2")
    changed = json.loads((out / "round-2" / "round.json").read_text()) | {"agreement": 0.995}
    (out / "round-2" / "round.json").write_text(json.dumps(changed))
    assert run_loop(parse(LoopConfig, values | {"rounds": 3}), out).stopped == "agreement"


def test_two_loops_in_one_folder(finished, values):
    with RunFolder(finished[0]).lock(), pytest.raises(ConfigError, match="another process"):
        run_loop(parse(LoopConfig, values), finished[0])


def test_another_configuration_in_the_same_folder(finished, values):
    out = finished[0]
    with pytest.raises(ConfigError, match="keep"):
        run_loop(parse(LoopConfig, values | {"keep": 0.8}), out)
    assert (out / "loop.json").is_file()
    assert parse(LoopConfig, read_yaml(out / "loop.yaml")) == parse(LoopConfig, values)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"keep": 1.5}, "keep"),
        ({"low": 1.0}, "low"),
        ({"agree": 2}, "agree"),
        ({"source": []}, "source"),
        ({"train": {"model": "tnl-10m", "data": {"source": "stdlib"}}}, "data.source"),
        ({"train": {"objective": "images", "model": "vit-32px"}}, "objective"),
        ({"rounds": 0}, "rounds"),
        ({"sampel": 3}, "sample"),
    ],
)
def test_wrong_keys_are_named(values, change, key):
    with pytest.raises(ConfigError, match=key):
        parse(LoopConfig, values | change)


def test_problems_are_found_before_any_work(values, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    changes = {"source": [str(tmp_path / "nowhere")], "executor": {"kind": "inline", "workers": 2}}
    config = parse(LoopConfig, values | changes)
    with pytest.raises(ConfigError, match="executor.workers: 2 has no effect") as error:
        run_loop(config, tmp_path / "full")
    assert len(error.value.problems) == 3
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_the_text_of_parquet_may_have_any_column(values, tmp_path):
    parquet.write_table(pyarrow.table({"content": ["one document"]}), tmp_path / "one.parquet")
    changed = values | {"source": [str(tmp_path / "one.parquet")]}
    with pytest.raises(ConfigError, match="no column 'text'"):
        run_loop(parse(LoopConfig, changed), tmp_path / "out")
    with pytest.raises(ConfigError, match="too few documents"):
        run_loop(parse(LoopConfig, changed | {"text_key": "content"}), tmp_path / "out")


def test_too_few_documents_for_two_halves(values, tmp_path):
    (tmp_path / "one.txt").write_text("one document")
    with pytest.raises(ConfigError, match="too few documents"):
        run_loop(parse(LoopConfig, values | {"source": [str(tmp_path / "one.txt")]}), tmp_path / "out")


def test_a_training_that_fails_is_named(values, tmp_path):
    config = parse(LoopConfig, values | {"train": values["train"] | {"seq_len": 100_000}})
    with pytest.raises(ConfigError, match="half 0 failed: seq_len"):
        run_loop(config, tmp_path / "out")
