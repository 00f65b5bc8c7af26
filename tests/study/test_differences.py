"""Differences of loss from a base: paired by seed, with the interval of Student's t, beside printed differences."""

import csv
import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from linnet.config import ConfigError, parse
from linnet.report.page import write_report
from linnet.runs.files import write_atomic
from linnet.study import StudyConfig, run_study
from linnet.study.architectures import Architecture
from linnet.study.collect import as_csv
from linnet.study.differences import DIFFERENCES, differences, missing_pairs, read_differences, write_differences


def row(name, seed, loss, tokens=100, status="done", width=16):
    return {
        "architecture": name, "seed": seed, "loss": loss, "tokens": tokens, "status": status,
        "d_model": width, "num_layers": 2, "seq_len": 8,
    }  # fmt: skip


def architectures(**printed):
    first = Architecture(name="base", published=printed.get("base"))
    return [first, *(Architecture(name=name, base="base", published=printed.get(name)) for name in ("a", "b"))]


def test_a_difference_is_the_mean_over_seeds_and_its_interval():
    ln2 = math.log(2)
    losses = {"base": [1.0, 3.0, 2.0], "a": [1.0 + 1 * ln2, 3.0 + 2 * ln2, 2.0 + 3 * ln2]}
    rows = [row(name, seed, loss) for name, own in losses.items() for seed, loss in enumerate(own)]
    rows += [row("a", 3, 9.0), row("b", 0, None, status="diverged"), row("a", 0, 5.0, tokens=50)]
    rows += [row("base", 4, 1.0), row("a", 4, 9.0, status="diverged")]  # a loss of a run that did not end is none
    (one,) = differences(architectures(base=2.2, a=2.3), rows)
    assert (one.architecture, one.base, one.size, one.target, one.seeds) == ("a", "base", "16x2", 100, 3)
    assert one.bits == pytest.approx(2.0) and one.printed == pytest.approx(0.1)
    half = 4.302653 * 1.0 / math.sqrt(3)  # t with two degrees of freedom, standard deviation 1
    assert (one.low, one.high) == (pytest.approx(2 - half), pytest.approx(2 + half))
    assert one.verdict == "cannot be told"


def test_sizes_of_one_width_and_depth_keep_their_own_differences():
    losses = {("base", 32): 1.0, ("base", 48): 2.0, ("a", 32): 1.5, ("a", 48): 2.1}
    rows = [
        row(name, seed, loss + seed) | {"size": f"16x2/{inner}"}
        for (name, inner), loss in losses.items()
        for seed in range(2)
    ]
    for listed in (rows, rows[::-1]):
        bits = {one.size: one.bits * math.log(2) for one in differences(architectures(), listed)}
        assert bits == {"16x2/32": pytest.approx(0.5), "16x2/48": pytest.approx(0.1)}
    heads = [{**one, "size": one["size"].replace("/", "x")} for one in rows]
    bits = {one.size: one.bits * math.log(2) for one in differences(architectures(), heads)}
    assert bits == {"16x2x32": pytest.approx(0.5), "16x2x48": pytest.approx(0.1)}
    heads = [{**one, "size": "16x2"} for one in rows]
    (mean,) = differences(architectures(), heads)
    assert mean.bits * math.log(2) == pytest.approx(0.3) and mean.seeds == 2
    assert not differences(architectures(), heads[:4] + [heads[4], heads[5]]), "a mean of two beside one run"


def test_architectures_and_seeds_without_a_pair_are_named_with_the_reason():
    rows = [row("base", seed, 1.0 + seed) for seed in range(3)]
    rows += [row("a", seed, 2.0 + seed, status="diverged" if seed else "done") for seed in range(3)]
    rows += [row("b", seed, None, status="diverged") for seed in range(3)]
    bases = {"base": None, "a": "base", "b": "base"}
    partly, never = missing_pairs(bases, rows, differences(architectures(), rows))
    assert (
        partly.startswith("a: the difference from its base base leaves out") and "2 of 3 runs of a diverged" in partly
    )
    assert never.startswith("b: no difference from its base base") and "3 of 3 runs of b diverged" in never
    assert not missing_pairs({"base": None, "a": "base"}, rows[:4], differences(architectures(), rows))


def test_a_study_without_bases_keeps_no_differences_of_an_earlier_one(tmp_path):
    write_atomic(tmp_path / "plan.json", '{"runs": []}')
    write_atomic(tmp_path / DIFFERENCES, "architecture,base\n")
    write_differences(tmp_path, architectures()[:1], [])
    assert not (tmp_path / DIFFERENCES).exists()


@pytest.mark.parametrize(
    "shift, printed, verdict",
    [
        (0.5, {"base": 2.2, "a": 2.3}, "sign as printed"),
        (-0.5, {"base": 2.2, "a": 2.3}, "opposite sign"),
        (0.5, {}, "worse"),
        (-0.5, {"a": 2.3}, "better"),
        (-0.5, {"base": 2.3, "a": 2.3}, "better"),
    ],
)
def test_the_verdict_is_about_the_sign(shift, printed, verdict):
    rows = [row("base", seed, 1.0 + seed) for seed in range(3)]
    rows += [row("a", seed, 1.0 + seed + shift + 0.01 * seed) for seed in range(3)]
    assert [one.verdict for one in differences(architectures(**printed), rows)] == [verdict]
    assert differences(architectures(**printed), [r for r in rows if r["seed"] == 0])[0].verdict.endswith("one seed")


def test_variants_that_equal_their_base_get_a_sign_in_one_of_twenty_studies():
    generator, told = np.random.default_rng(0), 0
    names = [f"v{number}" for number in range(18)]
    compared = [Architecture(name="base"), *(Architecture(name=name, base="base") for name in names)]
    for _ in range(200):
        losses = 2 + 0.01 * generator.standard_normal((19, 3))
        rows = [
            row(name, seed, loss)
            for name, own in zip(["base", *names], losses, strict=True)
            for seed, loss in enumerate(own)
        ]
        told += any(not one.verdict.startswith("cannot") for one in differences(compared, rows))
    assert 1 <= told <= 19  # 5 % is 10, with three standard errors; 105 by each interval alone
    rows += [row("v3", seed, 9.0 + 1e-4 * generator.standard_normal()) for seed in range(3, 6)]
    rows += [row("base", seed, 2.0) for seed in range(3, 6)]
    rows = [one for one in rows if one["architecture"] in ("base", "v3") and one["seed"] > 2]
    assert [(one.verdict, one.p < 1e-6) for one in differences(compared, rows)] == [("worse", True)]


def test_differences_of_one_size_at_two_lengths_are_told_apart(tmp_path, capsys):
    from rich.console import Console

    from linnet.cli.study import _print_differences
    from linnet.report.tables import difference_table

    rows = [
        row(name, seed, 2.0 + seed + (name == "a"), tokens=tokens)
        for name in ("base", "a")
        for tokens in (3456, 7654)
        for seed in range(2)
    ]
    settings, result = SimpleNamespace(architectures=architectures()), SimpleNamespace(folder=tmp_path, rows=rows)
    study = SimpleNamespace(folder=tmp_path, sensitivities={}, units="tokens")
    for published in ({}, {"base": 2.2, "a": 2.3}):
        found = differences(architectures(**published), rows)
        write_atomic(tmp_path / DIFFERENCES, as_csv([asdict(one) for one in found]))
        _print_differences(settings, result, {}, Console(width=120))
        printed, page = capsys.readouterr().out, difference_table(study)
        for text in (printed, page):
            assert "3.46k" in text and "7.65k" in text and ("rinted" in text) == bool(published)


def test_a_base_that_is_not_in_the_study_is_refused_by_name():
    for base in ("tnl", "nope"):
        values = {"name": "s", "architectures": [{"name": "tnl", "base": base}, "gla"], "budgets": [1e9]}
        with pytest.raises(ConfigError, match=rf"tnl\.base: '{base}'"):
            parse(StudyConfig, values | {"sizes": [[16, 1]]})


def test_a_study_writes_its_differences(tiny, tmp_path, monkeypatch):
    tiny |= {"sizes": [[16, 1]], "seeds": [0, 1], "tokens": [2000], "minimum_steps": 2}
    del tiny["budgets"]
    wild = {"name": "wild", "family": "gla", "base": "gla", "learning_rate": 1e30}  # diverges in its first step
    one = {"name": "ape", "family": "gla", "base": "gla", "model": {"positions": "sinusoidal"}, "published": 2.0}
    config = parse(StudyConfig, tiny | {"architectures": ["gla", one, wild]})
    result = run_study(config, tmp_path)
    with (result.folder / DIFFERENCES).open() as file:
        (found,) = csv.DictReader(file)
    assert (found["architecture"], found["seeds"], found["printed"]) == ("ape", "2", "")
    losses = {(r["architecture"], r["seed"]): r["loss"] for r in result.rows}
    pairs = [(losses["ape", seed] - losses["gla", seed]) / math.log(2) for seed in (0, 1)]
    assert float(found["bits"]) == pytest.approx(sum(pairs) / 2)
    (again,) = read_differences(result.folder)
    assert again == differences(config.architectures, result.rows)[0]
    pytest.importorskip("pandas")
    page = write_report(result.folder, bootstrap=0, laws=False).read_text()
    assert "Differences from a base" in page and f"{again.bits:+.4f}" in page
    assert "wild: no difference from its base gla" in page and "2 of 2 runs of wild diverged" in page
    assert "there is no scaling law; the differences from a base" in page and "<h2>The laws</h2>" not in page
    assert "printed difference" not in page  # one of the two losses is not given
    rows = list(csv.DictReader((result.folder / DIFFERENCES).open()))
    write_atomic(
        result.folder / DIFFERENCES, as_csv([row | {"printed": 0.1, "verdict": "opposite sign"} for row in rows])
    )
    monkeypatch.setattr("linnet.report.shell.write_pictures", lambda folder, figure: None)  # they were written
    page = write_report(result.folder, bootstrap=0, laws=False).read_text()
    assert "Of 1 printed difference from a base, 0 have the printed sign, 1 the opposite one" in page
