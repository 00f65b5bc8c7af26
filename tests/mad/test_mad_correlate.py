"""Correlations of scores with compute-optimal losses, on laws that are known."""

import json
import math

import numpy as np
import pytest
from mad_folders import rows, write_mad, write_rows
from scipy import stats

from linnet.config import ConfigError
from linnet.laws.fit import Law
from linnet.mad.correlate import correlate, correlate_laws, match, pearson, read, spearman
from linnet.mad.results import Result
from linnet.mad.scores import score

LEVELS = {
    "mad-hyena-swiglu": 0.50,
    "mad-mh-hyena-swiglu": 0.56,
    "mad-hyena-attention-swiglu": 0.62,
    "mad-mamba": 0.60,
    "mad-mamba-attention-swiglu": 0.72,
    "mad-gla-swiglu": 0.58,
    "mad-gla-attention-swiglu": 0.70,
}


def law(beta, alpha=-0.05, noise=0.0, c_max=1e13):
    draws = np.stack(
        [np.random.default_rng(0).normal(math.log(beta), noise, 200), np.full(200, alpha), np.zeros(200)], 1
    )
    intervals = {"alpha": (alpha - 0.01, alpha + 0.01)} if noise else {}
    return Law("L", beta, alpha, c_min=1e11, c_max=c_max, intervals=intervals, draws=draws if noise else None)


def scored(levels=LEVELS, layers=None):
    layers = layers or {}
    return score([Result(**row, layers=layers.get(row["architecture"], "")) for row in rows(levels)])


def found(laws, levels=LEVELS, layers=None, **options):
    return correlate_laws(scored(levels, layers), laws, {name: name for name in laws}, **options)


def falling(levels=LEVELS, noise=0.0):
    """The higher the level the lower the loss, in a straight line."""
    return {name: law(20 - 10 * level, noise=noise) for name, level in levels.items()}


def test_numbers_agree_with_scipy():
    generator = np.random.default_rng(0)
    for _ in range(20):
        one, two = generator.integers(0, 6, 9).astype(float), generator.normal(size=9)
        assert pearson(one, two) == pytest.approx(stats.pearsonr(one, two).statistic)
        assert spearman(one, two) == pytest.approx(stats.spearmanr(one, two).statistic)
    assert math.isnan(pearson(np.ones(4), np.arange(4.0)))


def test_scores_that_tell_the_loss():
    result = found(falling())
    overall = result.overall["all"]
    assert overall.architectures == 7 and overall.pearson < -0.99 and overall.spearman == pytest.approx(-1, abs=0.04)
    assert overall.pearson_interval[1] < -0.9 and overall.spearman_interval[1] < -0.8
    assert result.overall["within families"].pearson < -0.95
    assert result.overall["hyena"].architectures == 3 and result.overall["hyena"].pearson_interval is None
    assert "mamba" not in result.overall  # two architectures
    assert result.overall["between families"].architectures == 3
    assert set(result.tasks) == set(scored().tasks)
    assert result.compute == 1e13 and not found(falling(noise=1e-9)).notes


def test_within_and_across_families_may_say_different_things():
    """In each family the higher score has the lower loss, and the family with higher scores has higher losses."""
    levels = {
        "mad-hyena-swiglu": 0.40,
        "mad-mh-hyena-swiglu": 0.42,
        "mad-hyena-experts-swiglu": 0.44,
        "mad-mamba": 0.60,
        "my-mamba-moe": 0.62,
        "my-mamba-swiglu": 0.64,
        "mad-gla-moe": 0.80,
        "mad-gla-swiglu": 0.82,
        "mad-gla-attention-swiglu": 0.84,
    }
    families = {"hyena": 10.0, "mamba": 12.0, "gla": 14.0}
    laws = {}
    for name, level in levels.items():
        family = next(known for known in families if known in name)
        laws[name] = law(families[family] - 15 * (level - {"hyena": 0.42, "mamba": 0.62, "gla": 0.82}[family]))
    layers = {"my-mamba-moe": "mamba moe", "my-mamba-swiglu": "mamba swiglu"}
    overall = found(laws, levels, layers).overall
    apart = found(laws, levels)
    assert "mamba" in overall and "mamba" not in apart.overall
    assert apart.notes[0].startswith("my-mamba-moe, my-mamba-swiglu: a family of its own each")
    assert overall["all"].pearson > 0.8
    assert overall["between families"].pearson > 0.99
    assert overall["within families"].pearson < -0.7 and overall["within families"].pearson_interval[1] < 0


def test_uncertain_laws_widen_the_interval():
    sure, unsure = (found(falling(noise=noise)).overall["all"].pearson_interval for noise in (0.0, 0.2))
    assert unsure[1] - unsure[0] > sure[1] - sure[0]
    assert found(falling(noise=0.2)).points[0].loss_interval[0] < found(falling()).points[0].loss


def test_a_law_without_an_interval_is_told():
    laws = falling(noise=0.1)
    assert found(laws).notes == []
    (note,) = found(laws | {"mad-mamba": law(14)}).notes
    assert "too narrow" in note and "law of mad-mamba has no interval" in note
    assert found(laws | {"mad-mamba": law(14)}, resamples=0).notes == []


def test_same_seed_gives_the_same_numbers():
    assert found(falling(noise=0.1)) == found(falling(noise=0.1))
    assert found(falling(), resamples=0).overall["all"].pearson_interval is None


def test_compute_outside_the_data_is_told():
    laws = falling() | {"mad-mamba": law(14, c_max=1e12)}
    assert found(laws).compute == 1e12
    note = found(laws, compute=1e13).notes[0]
    assert "extrapolated" in note and "outside the data of mad-mamba:" in note
    with pytest.raises(ConfigError, match="give FLOPs above zero"):
        found(laws, compute=-1.0)


def test_refused_laws_take_no_part():
    result = found(falling() | {"mad-mamba": Law("L", refused=["two budgets only"])})
    assert result.overall["all"].architectures == 6
    assert "mad-mamba takes no part, its law was refused: two budgets only" in result.notes[0]
    refused = {name: Law("L", refused=["two budgets only"]) for name in LEVELS}
    with pytest.raises(ConfigError, match="0 of 7 common architectures have a law"):
        found(refused)


def test_equal_scores_have_no_correlation():
    result = found({name: law(10.0) for name in LEVELS})
    assert result.overall["all"].pearson is None and "same loss" in result.overall["all"].refused


def test_scores_that_are_not_comparable_are_told():
    scores = score([Result(**row) for row in rows(LEVELS, "smoke")])
    result = correlate_laws(scores, falling(), {name: name for name in LEVELS})
    assert "not comparable" in result.notes[0] and "smoke" in result.notes[0]


def test_too_few_common_names_are_an_error_that_names_the_others():
    with pytest.raises(ConfigError) as error:
        match(["a", "b", "mad-gla"], ["a", "b", "gla", "tnl"], {}, "MADS", "STUDY")
    text = str(error.value)
    assert "2 architectures have both a score and a law (a, b); 3 are needed" in text
    assert "in MADS but not in the study STUDY: mad-gla" in text
    assert "in STUDY but not in the scores of MADS: gla, tnl" in text and "--pair SCORED=STUDIED" in text
    assert match(["a", "b", "mad-gla"], ["a", "b", "gla"], {"mad-gla": "gla"}, "", "")["mad-gla"] == "gla"
    for names in ({"mad-gla": "gla", "b": "gla"}, {"mad-gla": "a"}):
        with pytest.raises(ConfigError, match=r"names: (b|a) and mad-gla are all '(gla|a)'"):
            match(["a", "b", "mad-gla"], ["a", "b", "gla"], names, "M", "S")
    with pytest.raises(ConfigError, match=r"'mad-gl' has no score in M; did you mean 'mad-gla'(.|\n)*'gl' is not in"):
        match(["a", "b", "mad-gla"], ["a", "b", "gla"], {"mad-gl": "gl"}, "M", "S")


def write_study(folder, levels):
    """table.csv of runs whose losses fall with the level."""
    lines = ["run,architecture,params_non_embedding,tokens,flops,loss"]
    for name, level in levels.items():
        for budget in (1e12, 3e12, 9e12, 2.7e13):
            for n in (5e3, 1e4, 2e4, 4e4, 8e4, 1.6e5, 3.2e5):
                d = budget / (6 * n)
                loss = 1.5 - level + 30 / n**0.35 + 200 / d**0.37
                lines.append(f"{name}-{n:g}-{budget:g},{name},{n},{d},{budget},{loss}")
    folder.mkdir(parents=True)
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_from_folders(tmp_path):
    mad = write_mad(tmp_path / "mad", LEVELS)
    levels = {name.replace("mad-gla", "gla"): level for name, level in LEVELS.items()} | {"tnl": 0.5}
    study = write_study(tmp_path / "study", levels)
    names = {name: name.removeprefix("mad-") for name in LEVELS if "gla" in name}
    result = correlate(read(mad, study), names, compute=1e13, resamples=30)
    assert result.overall["all"].architectures == 7
    assert result.overall["all"].pearson < -0.95 and result.overall["all"].spearman < -0.9
    assert {point.study_name for point in result.points} == set(levels) - {"tnl"}
    assert all(1 < point.loss < 6 for point in result.points) and result.method
    json.dumps(result.to_dict(), allow_nan=False)
    alone = correlate(read(mad, study), resamples=0)
    assert alone.overall["all"].architectures == 5
    lacking = [r for r in rows(LEVELS) if (r["architecture"], r["task"]) != ("mad-mamba", "compression")]
    part = correlate(read(write_rows(tmp_path / "part", lacking), study), resamples=0)
    assert part.overall["all"].architectures == 4 and "mad-mamba: no part is taken" in part.notes[0]
