"""`linnet study tune`: sweeps that extend themselves, resume, and write what a study reads."""

import json
import math

import pandas
import pytest
import yaml
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError, parse
from linnet.report import rates as report_rates
from linnet.report.records import Study
from linnet.study.config import StudyConfig
from linnet.study.rates import read_rates
from linnet.study.runner import StudyResult
from linnet.study.tune import make_sweeps, tune

VALUES = {
    "name": "small",
    "architectures": ["tnl"],
    "tokens": [2048],
    "sizes": [[16, 1, 1], [32, 1, 2]],
    "seq_len": 32,
    "batch_size": 8,
    "learning_rate": 0.02,
    "data": {"tokenizer": "byte"},
    "train": {"evaluate_tokens": 512, "run": {"device": "cpu"}},
    "minimum_steps": 1,
    "executor": {"kind": "inline"},
}


@pytest.fixture
def values(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}; " for n in range(1500)))
    return VALUES | {"data": {"source": str(text), "tokenizer": "byte"}}


def test_every_wrong_argument_is_named_at_once(values, tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(values))
    given = ["--widths", "16,abc", "--rates", "4", "--target=-3", "--set", "seq_len=-1", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["study", "tune", str(file), *given])
    assert result.exit_code == 2
    for word in ("--widths '16,abc'", "--rates: 4", "--target -3", "seq_len"):
        assert word in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_sweep_resumes_extends_and_is_read_by_a_study(values, tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(values))
    command = ["study", "tune", str(file), "--seeds", "1", "--out", str(tmp_path / "studies")]
    planned = CliRunner().invoke(app, [*command, "--plan"])
    assert planned.exit_code == 0 and "10 runs" in planned.output
    assert planned.output.startswith("study small") and "?" not in planned.output and "note" not in planned.output
    low = ["--set", "learning_rate=0.0005"]  # far below the best rate
    first = CliRunner().invoke(app, [*command, *low, "--json"])
    assert first.exit_code == 0, first.output
    assert "the lowest loss is at the highest rate" in first.stderr and "adding" in first.stderr
    folder = tmp_path / "studies" / "small" / "tune"
    done = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}
    assert len(done) > 10
    found = json.loads(first.stdout)["architectures"]["tnl"]
    assert set(found["widths"]) == {"16", "32"}
    rates = yaml.safe_load((folder / "rates.yaml").read_text())["architectures"]["tnl"]
    assert rates["b"] == found["b"] and rates["b_low"] <= rates["b"] <= rates["b_high"]
    lost = next(iter(done)).parent  # as after a kill
    (lost / "result.json").unlink()
    again = CliRunner().invoke(app, [*command, *low, "--json"])
    assert json.loads(again.stdout)["architectures"]["tnl"] == found
    kept = [path for path in done if path.parent != lost]
    assert [path.stat().st_mtime_ns for path in kept] == [done[path] for path in kept]
    assert (lost / "result.json").is_file()


def test_another_tuning_keeps_the_rates_of_other_architectures(values, tmp_path, monkeypatch):
    def train(config, folder, *args, plan, **options):
        lines = ["architecture,d_model,learning_rate,seed,loss,status"]
        for run in plan.runs:
            loss = 2 + math.log2(run.learning_rate / 0.02 * run.train.model.d_model / 16) ** 2
            width = run.train.model.d_model
            lines.append(f"{run.architecture},{width},{run.learning_rate},{run.seed},{loss},done")
        (folder / "tune").mkdir(parents=True, exist_ok=True)
        (folder / "tune" / "table.csv").write_text("\n".join(lines) + "\n")
        return StudyResult(folder / "tune", [])

    monkeypatch.setattr("linnet.study.tune.run_study", train)
    file, rates = tmp_path / "small.yaml", tmp_path / "studies" / "small" / "tune" / "rates.yaml"
    file.write_text(yaml.safe_dump(values | {"architectures": ["tnl", "llama"]}))

    def tuned(*given):
        result = CliRunner().invoke(app, ["study", "tune", str(file), "--out", str(tmp_path / "studies"), *given])
        assert result.exit_code == 0, result.output
        return result.output, read_rates(rates).architectures

    output, laws = tuned("--architectures", "llama", "--widths", "16,32,64")
    assert set(laws) == {"llama"} and "before" not in output
    output, laws = tuned("--architectures", "tnl", "--target", "4096")
    assert {name: list(law.widths) for name, law in laws.items()} == {"llama": [16, 32, 64], "tnl": [16, 32]}
    assert {law.target for law in laws.values()} == {"2048 tokens per run", "4096 tokens per run"}
    assert "keeps the law of llama from before (widths 16, 32, 64)" in output
    output, laws = tuned("--architectures", "llama", "--widths", "16,32")
    assert list(laws["llama"].widths) == [16, 32] and "llama: replaces" in output and "keeps the law of tnl" in output
    rates.write_text("architectures: {}")
    damaged = CliRunner().invoke(app, ["study", "tune", str(file), "--out", str(tmp_path / "studies")])
    assert damaged.exit_code == 2 and "rates.yaml" in damaged.stderr


def test_the_page_of_a_study_has_the_parabolas(tmp_path):
    study, lines = tmp_path / "s", ["architecture,d_model,learning_rate,seed,loss,status"]
    (study / "tune").mkdir(parents=True)
    for width in (16, 32):
        for place in range(-2, 3):
            lines.append(f"tnl,{width},{0.01 * 2**place},0,{2 + 0.1 * (place - 0.3) ** 2 + 0.01 / width},done")
    lines += [f"gla,16,{0.01 * 2**place},0,{2 - 0.1 * place},done" for place in range(5)]
    (study / "tune" / "table.csv").write_text("\n".join(lines) + "\n")
    table = pandas.DataFrame({"architecture": ["tnl", "gla"]})
    record = Study(study, {}, table, None)
    vertices = report_rates.read(record)
    assert vertices["tnl"][16].rate == pytest.approx(0.01 * 2**0.3, rel=1e-6)
    figure = report_rates.draw(record, vertices)
    text = " ".join(report_rates.parts(record, vertices, figure, "linnet report s"))
    assert "0.0123" in text and "the lowest loss is at the highest rate" in text and "d<sup>" in text
    assert {row["width"] for rows in figure.spec["datasets"].values() for row in rows} == {"16", "32"}
    assert report_rates.read(Study(tmp_path, {}, table, None)) == {}
    assert report_rates.parts(record, {}, None, "") == []


def test_widths_that_the_study_lacks_get_the_layers_of_the_nearest(values):
    sweeps = make_sweeps(parse(StudyConfig, values | {"sizes": [[16, 1, 1], [64, 3]]}), [16, 128])
    assert [(one.width, one.size.num_layers, one.centre) for one in sweeps] == [(16, 1, 0.02), (128, 3, 0.02)]
    assert sweeps[0].rate(1) == 0.04


def test_wrong_arguments_are_refused(values, tmp_path):
    config = parse(StudyConfig, values)
    with pytest.raises(ConfigError, match="--widths: .* is one width, and a law needs two"):
        make_sweeps(config, [16])
    for width in (0, -16):
        with pytest.raises(ConfigError, match=f"--widths: {width} is not a width"):
            make_sweeps(config, [width, 24])
    with pytest.raises(ConfigError, match="--rates: 4 must be an odd number of at least 5"):
        tune(config, tmp_path, rates=4)
    ape = {"name": "ape", "family": "tnl", "model": {"positions": "learned", "num_positions": 16}}
    with pytest.raises(ConfigError, match="architectures.ape .*seq_len: 32 is above model.num_positions: 16"):
        make_sweeps(parse(StudyConfig, values | {"architectures": ["tnl", ape]}), [16, 32])
    with pytest.raises(ConfigError, match="num_heads"):
        make_sweeps(
            parse(StudyConfig, values | {"architectures": [{"name": "tnl", "options": {"tnl": {"num_heads": 3}}}]}),
            [16, 32],
        )
