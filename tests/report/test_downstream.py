"""Evaluations in the report: read from the record and from RUN/evaluations, drawn, fitted, or refused in words."""

import argparse
import json
import math
import optparse
import re
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_study import RESAMPLES, TRANSFER, write_study

from linnet.config import ConfigError, parse
from linnet.evaluate.results import Evaluation, Item, Result
from linnet.laws.fit import fit_study
from linnet.laws.orders import Order
from linnet.report import downstream, shell, units, write_report
from linnet.report.records import read_study
from linnet.study import StudyConfig, run_study


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A study whose runs were evaluated on the way; its first run was evaluated by `linnet evaluate` too."""
    folder = tmp_path_factory.mktemp("evaluated") / "study"
    write_study(folder, architectures=("llama", "tnl"), widths=(16, 32, 64), spoil={"tnl": "failed"}, evaluations=True)
    return folder


@pytest.fixture(scope="module")
def series(evaluated):
    study = read_study(evaluated, bootstrap=0)
    return study, downstream.read_series(study, 50)


def test_series_are_the_metrics_with_their_points(series):
    study, found = series
    assert [(one.evaluation, one.metric, one.chance) for one in found] == [
        ("questions", "accuracy", 0.25), ("luck", "accuracy", 0.25), ("book", "bits_per_byte", None),
    ]  # fmt: skip
    points = found[0].points
    assert len(points) == 3 * (2 * 4 * 3 - 1) and points["last"].sum() == 23
    last = points[points["last"]].set_index("run")
    table = study.usable.set_index("run")
    assert (last["loss"] == table["loss"]).all() and (last["C"] == table["flops"]).all()
    assert (points["questions"] == 400).all()


def test_fits_are_those_that_made_the_data(series):
    _, (questions, luck, book) = series
    for name in ("llama", "tnl"):
        chance, midpoint, steepness = TRANSFER["questions"]
        step = questions.fits[name].transfer
        assert step.parameters == pytest.approx({"midpoint": midpoint, "steepness": steepness}, rel=0.1)
        low, high = step.intervals["midpoint"]
        assert low < step.first < high
        assert book.fits[name].transfer.second == pytest.approx(TRANSFER["book"][2], rel=0.02)
        assert "no signal" in luck.fits[name].transfer.refused[0]
        assert questions.fits[name].test.mean_error < 0.05


@pytest.fixture
def isoflop_alone(monkeypatch):
    """Laws by one method, without intervals, for tests of other parts of the page."""
    monkeypatch.setattr(
        "linnet.report.records.fit_study",
        lambda table, curves, bootstrap: fit_study(table, curves, method="isoflop", bootstrap=0, conventions=False),
    )


def test_the_page_has_figures_fits_and_refusals(evaluated, isoflop_alone, monkeypatch):
    monkeypatch.setattr(shell, "write_pictures", lambda folder, figure: None)
    told = []
    source = write_report(evaluated, bootstrap=RESAMPLES, laws=False, tell=told.append).read_text()
    specs = {
        name: json.loads(text.replace("<\\/", "</"))
        for name, text in re.findall(r'id="spec-([\w-]+)">(.*?)</script>', source, re.S)
    }
    assert len(specs["evaluations"]["vconcat"]) == 3 and len(specs["compute-to-metric"]["vconcat"]) == 2
    titles = json.dumps(specs["evaluations"], ensure_ascii=False)
    axes = ("training compute C (exact FLOPs)", "training tokens D", "non-embedding parameters N", "bits per byte")
    for title in (*axes, "share of right answers", "questions: accuracy"):
        assert title in titles
    drawn = [row for rows in specs["evaluations"]["datasets"].values() for row in rows if "run" in row]
    assert {row["run"] for row in drawn} == {run.name for run in (evaluated / "runs").iterdir()} - {_failed(evaluated)}
    [table] = re.findall(r'<table id="downstream".*?</table>', source, re.S)
    assert table.count("<tr>") == 1 + 6 and table.count("no signal") == 2 and "midpoint" in table
    assert re.search("luck: accuracy: .* 25.0", source)
    assert re.search("questions: accuracy: .*<b>", source)
    fits = told[: told.index("What you may conclude")]  # the sentences of the page follow
    assert len(fits) == 6 and fits[0].startswith("questions: accuracy, llama: L = ")
    assert re.search(
        r"\(95 %: midpoint [\d.]+ to [\d.]+, steepness .*\); error .* on the runs, .* beyond them", told[0]
    )
    assert re.match(r"luck: accuracy, tnl: L = .*; loss -> metric: no signal", told[3])


def _failed(folder: Path) -> str:
    return next(path.parent.name for path in (folder / "runs").glob("*/error.txt"))


def of_two(first: float, second: float, chance: float | None, questions: float = 400, noise=None, fitted=40):
    """A metric of one run of each of two architectures."""
    rows = [
        dict.fromkeys(downstream.COLUMNS, 1.0)
        | {"architecture": name, "value": value, "questions": questions, "C": 1e12}
        for name, value in (("tnl", first), ("llama", second))
    ]
    fit = types.SimpleNamespace(rms_error=noise, transfer=types.SimpleNamespace(refused=["too few points"]))
    fit.law = types.SimpleNamespace(points=fitted)
    points = pd.DataFrame(rows).astype({"last": bool})
    return downstream.Series("quiz", "accuracy", chance, points, {"tnl": fit, "llama": fit})


def test_the_best_of_many_runs_that_guess_is_not_above_guessing():
    """With two standard errors for each of 12 runs, 24 % of pages name a run that guesses."""
    draws, named = np.random.default_rng(0), 0
    for _ in range(200):
        series = of_two(0.5, 0.5, 0.25)
        rows = [series.points.iloc[0].to_dict() | {"architecture": f"m{i}"} for i in range(12)]
        points = pd.DataFrame(rows).assign(value=draws.binomial(400, 0.25, 12) / 400).astype({"last": bool})
        [sentence] = downstream.finding([replace(series, points=points)])
        named += "standard errors above guessing" not in sentence
    assert named <= 14  # 2.3 % of pages, with four standard errors


@pytest.mark.parametrize(
    "one, sentence",
    [
        (
            of_two(0.9, 0.5, 0.25, noise=0.01),
            "the best is <b>tnl</b> with 90.0%, where guessing gives 25.0%, after 10¹² FLOPs.",
        ),
        (of_two(0.9, 0.5, 0.25), "<b>llama</b> with 50.0% and <b>tnl</b> with 90.0% cannot be told apart, where"),
        (of_two(0.2, 0.1, 0.25), "no run is 2.3 standard errors above guessing, 25.0%; the highest seen is 20.0%."),
        (of_two(0.29, 0.1, 0.25), "no run is 2.3 standard errors above guessing, 25.0%; the highest seen is 29.0%."),
        (of_two(0.29, 0.1, 0.25, 4000, noise=0.01), "the best is <b>tnl</b> with 29.0%"),
        (of_two(0.0, 0.0, 0.0), "no run is 2.3 standard errors above guessing, 0"),
        (of_two(0.9, 0.88, 0.25, noise=0.001), "<b>llama</b> with 88.0% and <b>tnl</b> with 90.0% cannot be told"),
        (of_two(0.9, 0.5, 0.25, math.nan), "<b>llama</b> with 50.0% and <b>tnl</b> with 90.0% cannot be told apart"),
        (of_two(1.0, 0.75, 0.25, 12, noise=0.001), "cannot be told apart"),
        (of_two(3.0, 2.0, None), "<b>llama</b> with 2.000 and <b>tnl</b> with 3.000 cannot be told apart."),
        (of_two(3.0, 2.0, None, noise=0.1), "the best is <b>llama</b> with 2.000, after 10¹² FLOPs."),
        (of_two(3.0, 2.0, None, noise=0.1, fitted=4), "cannot be told apart"),
        (of_two(3.0, 2.0, None, noise=0.1, fitted=2), "cannot be told apart"),
        (of_two(0.9, 0.5, 0.25, noise=0.3), "cannot be told apart"),
    ],
)
def test_the_headline_names_no_best_that_guesses_or_is_level(one, sentence):
    [text] = downstream.finding([one])
    text = text.replace("\N{NO-BREAK SPACE}", "").replace("\N{NARROW NO-BREAK SPACE}", "")
    assert sentence.replace(" FLOPs", "FLOPs") in text.replace(" FLOPs", "FLOPs"), text


def test_the_headline_of_one_run_names_no_best():
    both = of_two(3.0, 2.0, None)
    [text] = downstream.finding([replace(both, points=both.points[:1], fits={"tnl": both.fits["tnl"]})])
    assert "<b>tnl</b>" in text and "best" not in text
    [text] = [units.ranked(Order({"tnl": 0.5}), "accuracy", lambda name: "50%")]
    assert "<b>tnl</b>" in text and "highest" not in text


def test_pictures_are_drawn(series, tmp_path):
    for figure in downstream.draw(*series):
        shell.write_pictures(tmp_path, figure)
        svg = (tmp_path / f"{figure.name}.svg").read_text()
        assert svg.count("<path") > 50 and "NaN" not in svg


def test_results_of_linnet_evaluate_count_too(isoflop_alone, tmp_path):
    """Tasks with the score of guessing, probes, needles and texts; scores of unknown range are left out."""
    folder = write_study(tmp_path / "study", architectures=("tnl",), widths=(16, 32))
    study = read_study(folder, bootstrap=0)
    for number, (_, run) in enumerate(study.table.iterrows()):
        path, steps = study.run_folder(run), int(run["tokens"]) // 2048
        with open(path / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": steps, "tokens": run["tokens"], "validation_loss": run["loss"]}) + "\n")
        items = [Item(str(i), float(i <= 3 * number)) for i in range(30)]
        model = {"run": path.name, "step": steps, "tokens": int(run["tokens"]), "flops": run["flops"]}

        def keep(kind, results, detail, asked, model=model, path=path):
            Evaluation(kind, model, asked, tuple(results), detail).save(path)

        piqa = [Result.of_items("piqa", metric, items) for metric in ("acc", "acc_norm")]
        chance = {"chance": [["piqa", "acc", 0.5], ["piqa", "acc_norm", 0.5]]}
        keep("tasks", [*piqa, Result("sums", "rouge1", 31.0)], chance, {"tasks": ["piqa", "sums"]})
        keep("csr", [Result("csr", "average", 0.4, n=7), *piqa], {"chance": [["csr", "average", 0.4]]}, {})
        keep("recall", [Result.of_items("recall-mqar", metric, items) for metric in ("accuracy", "choice")],
             {"cells": [{"task": "mqar", "chance": c} for c in (0.25, 0.125)]}, {})  # fmt: skip
        keep("needle", [Result.of_items("needle-easy", "accuracy", items)], {}, {"scoring": "choice"})
        keep("text", [Result("text", "bits_per_byte", 3.0, n=2, better="lower")], {}, {"text": ["a"]})
        keep("text", [Result("text", "bits_per_byte", 2.0, n=2, better="lower")], {}, {"text": ["b"]})
    (path / "evaluations" / "bad.json").write_text("{")
    found = downstream.read_series(study, 0)
    assert any("bad.json" in problem for problem in study.problems)
    told = {one.title: (one.chance, len(one.points)) for one in found}
    texts = {title: told.pop(title) for title in list(told) if title.startswith("text-")}
    assert told == {
        "tasks piqa (linnet evaluate): acc": (0.5, 8),
        "csr (linnet evaluate): average": (0.4, 8),
        "recall recall-mqar (linnet evaluate): choice": (0.1875, 8),
        "needle needle-easy (linnet evaluate): accuracy": (0.1, 8),
    }
    assert list(texts.values()) == [(None, 8)] * 2
    assert all(re.match(r"text-[0-9a-f]{4} \([ab]\) ", title) for title in texts) and len({*texts}) == 2
    assert all(one.points["last"].all() and one.points["loss"].notna().all() for one in found)


@pytest.mark.parametrize(
    "asked, scored, tokenizers, kind, series",
    [
        ("ab", "xx", "tt", "text", 2),  # other files, in one evaluation of each run
        ("aa", "xy", "tt", "text", 2),  # a file that changed between two evaluations
        ("aa", "xx", "tu", "text", 1),  # bits per byte compare whatever the tokenizer
        ("aa", "xx", "tu", "blocks", 2),  # losses per token do not
        ("aa", "xx", "tt", "blocks", 1),
        ("aa", "x-", "tt", "text", 1),  # a record of 0.1 has no digest of its text
    ],
)
def test_evaluations_of_other_texts_are_other_metrics(isoflop_alone, tmp_path, asked, scored, tokenizers, kind, series):
    folder = write_study(tmp_path / "study", architectures=("tnl", "llama"), widths=(16,), budgets=(1.5e11,))
    study = read_study(folder, bootstrap=0)
    metric = "bits_per_byte" if kind == "text" else "perplexity"
    for index, (_, run) in enumerate(study.table.iterrows()):
        model = {"step": 9, "tokens": int(run["tokens"]), "flops": run["flops"], "tokenizer": tokenizers[index]}
        result = Result(kind, metric, 3.0, n=2, better="lower")
        content = None if scored[index] == "-" else scored[index]
        settings = {"text": [asked[index]], "method": ["carried", "windowed"][index]}  # a model's own way of reading
        Evaluation(kind, model, settings, (result,), {}, content).save(study.run_folder(run))
    found = downstream.read_series(study, 0)
    assert len({one.title for one in found}) == len(found) == series
    assert sum(len(one.points) for one in found) == 2


def test_evaluations_of_one_name_and_other_settings_are_other_metrics(tmp_path):
    for name, source in (("one", "a.txt"), ("two", "b.txt"), ("three", "b.txt")):
        (tmp_path / name).mkdir()
        config = {
            "model": {},
            "architecture": name,
            "evaluations": [{"kind": "text", "name": "book", "paths": [source]}],
        }
        (tmp_path / name / "config.yaml").write_text(json.dumps(config))
        numbers = {"status": "done", "params_non_embedding": 1e4, "tokens": 1e6, "flops": 6e10, "loss": 2.5}
        (tmp_path / name / "result.json").write_text(json.dumps(numbers))
        row = {"step": 9, "tokens": 1e6, "flops": 6e10, "evaluation": "book", "shown": ["bits_per_byte"]}
        row |= {"metrics": {"bits_per_byte": 2.0}, "chance": {}}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = downstream.read_series(read_study(tmp_path), 0)
    runs = {one.evaluation.partition(" ")[2]: sorted(one.points["run"]) for one in found}
    assert runs == {"(a.txt)": ["one"], "(b.txt)": ["three", "two"]}


def test_runs_without_what_others_have_are_named(isoflop_alone, tmp_path):
    folder = write_study(tmp_path / "study", architectures=("tnl",), widths=(16, 32, 64), evaluations=True)
    assert not any("questions" in problem for problem in _problems(folder))
    first, second, third = sorted(folder.glob("runs/*/metrics.jsonl"))[:3]

    def change(path, update):
        rows = [update(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows if row))

    change(first, lambda row: None if row.get("evaluation") == "questions" else row)
    change(second, lambda row: None if "validation_loss" in row else row)
    nan = {"metrics": {"accuracy": math.nan}}
    change(third, lambda row: row | nan if row.get("evaluation") == "questions" else row)
    told = [problem for problem in _problems(folder) if problem.startswith("questions: accuracy")]
    runs = len(list(folder.glob("runs/*")))
    assert told == [
        f"questions: accuracy: 1 of {runs} finished runs have no value at their end: {first.parent.name}",
        f"questions: accuracy: values that are not finite are left out, of {third.parent.name}",
        f"questions: accuracy: values without a held-out loss at their step are not fitted, of {second.parent.name}; "
        "set run.evaluate_every so that it divides their `every`",
    ]


def _problems(folder):
    study = read_study(folder, bootstrap=0)
    downstream.read_series(study, 0)
    return study.problems


def test_too_few_points_are_told_and_what_there_is_is_drawn(tmp_path):
    folder = write_study(tmp_path / "study", architectures=("tnl",), budgets=(1.5e11,), widths=(16,), evaluations=True)
    study = read_study(folder, bootstrap=0)
    series = downstream.read_series(study, 10)
    [figure] = downstream.draw(study, series)
    assert figure.name == "evaluations"
    [line] = [line for line in downstream.lines(series) if "book" in line]  # what has no fit stands together
    assert line.startswith("no fit (") and " | " in line
    assert re.search("3 points .* 5", line) and "1 run " in line
    assert downstream.draw(study, []) == []


def test_a_study_of_seconds_from_training_to_the_page(tmp_path, isoflop_alone, monkeypatch):
    """Nothing made up: runs are trained, evaluated on the way, and drawn; then the folder of runs alone."""
    held = tmp_path / "held.py"
    held.write_text(Path(optparse.__file__).read_text())
    config = {
        "name": "tiny", "architectures": ["llama", "tnl"], "tokens": [2048, 4096, 8192], "sizes": [[16, 1, 2]],
        "seq_len": 32, "batch_size": 4, "minimum_steps": 10, "learning_rate": 1e-2, "executor": {"kind": "inline"},
        "data": {"source": [argparse.__file__]},
        "train": {"run": {"device": "cpu", "evaluate_every": 16}, "evaluate_tokens": 512, "evaluations": [
            {"kind": "text", "name": "other", "paths": [str(held)], "most_bytes": 1000},
            {"kind": "needle", "lengths": [256], "depths": [0.5], "every": 30},
        ]},
    }  # fmt: skip
    wanted, write = ("evaluations", "compute-to-metric"), shell.write_pictures
    monkeypatch.setattr(
        shell, "write_pictures", lambda folder, figure: write(folder, figure) if figure.name in wanted else None
    )
    result = run_study(parse(StudyConfig, config), tmp_path)
    assert len(result.rows) == 6 and not result.broken
    told = []
    page = write_report(result.folder, bootstrap=RESAMPLES, laws=False, tell=told.append)
    assert {path.stem for path in page.parent.glob("*.png")} == set(wanted)
    text = {line.partition(":")[0]: line for line in told if ", tnl: " in line}
    assert "bits_per_byte = " in text["other"] and "refused" not in text["other"]
    assert "loss -> metric: " in text["needle"]

    monkeypatch.setattr(shell, "write_pictures", lambda folder, figure: None)
    runs = write_report(result.folder / "runs", bootstrap=RESAMPLES, laws=False)
    source = runs.read_text()
    assert runs.parent == result.folder / "runs" / "report" and "<h1>Runs: runs</h1>" in source
    assert 'id="evaluations"' in source and 'id="training-curves"' in source and "No laws could be" not in source
    names = set(read_study(result.folder / "runs").table["run"])
    assert names == {path.name for path in (result.folder / "runs").iterdir() if (path / "config.yaml").is_file()}
    with pytest.raises(ConfigError, match="run folders"):
        write_report(tmp_path / "cache")
