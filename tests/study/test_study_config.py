"""The study's configuration: short forms, and all problems reported together."""

import re

import pytest

from linnet.config import ConfigError, parse
from linnet.study import StudyConfig
from linnet.study.config import LearningRate

MINIMAL = {"name": "small", "architectures": ["tnl"], "budgets": [1e9], "sizes": [[16, 1]]}


def study(**changes) -> StudyConfig:
    return parse(StudyConfig, MINIMAL | changes)


def test_short_forms_of_sizes():
    config = study(sizes=[[16, 1], [32, 2, 4], "70m", {"d_model": 64, "num_layers": 3, "inner": 192}])
    assert [size.label for size in config.sizes] == ["16x1", "32x2", "70m", "64x3/192"]
    assert config.sizes[1].num_heads == 4
    assert config.sizes[2].recipe == "70m"
    assert config.sizes[3].inner == 192


def test_widths_and_layers_give_every_pair():
    config = study(sizes={"widths": [16, 32], "layers": [1, 2]})
    assert [size.label for size in config.sizes] == ["16x1", "32x1", "16x2", "32x2"]


def test_learning_rate_falls_with_width_up_to_a_maximum():
    rate = LearningRate(value=4e-3, width=64, exponent=-1.0, maximum=1e-2)
    assert [rate.at(width) for width in (16, 64, 128)] == [1e-2, 4e-3, 2e-3]
    assert [study(learning_rate=3e-4).learning_rate.at(width) for width in (8, 4096)] == [3e-4, 3e-4]


def test_everything_wrong_is_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        study(nmae="x", architectures=["tnl", {"name": "llama", "sise": [[8, 1]]}], budgets=[1e9, -1.0], seq_len="long")
    problems = "\n".join(caught.value.problems)
    assert re.search("nmae: .*'x'.*'name'", problems)
    assert "architectures.1.sise" in problems and "'sizes'" in problems
    assert "budgets.1" in problems
    assert "seq_len" in problems
    assert len(caught.value.problems) == 4


def test_models_that_cannot_be_are_listed_beside_wrong_keys():
    with pytest.raises(ConfigError) as caught:
        study(nmae="x", architectures=["tnl", "tnll"], sizes=[[16, 1], [65, 1, 4]], plugins=["no.py:M"])
    problems = caught.value.problems
    assert "nmae: " in problems[0] and "no.py" in problems[1] and len(problems) == 4
    assert re.match(r"architectures.tnl 65x1: options.tnl.num_heads: 4 .*65", problems[2])
    assert re.match("architectures.tnll 16x1, 65x1: .*'tnll' .*'tnl'", problems[3])
    assert "d_model" not in problems[3]


def test_an_unknown_base_hides_no_other_problem():
    wrong = {"name": "a", "family": "tnl", "base": "tnk", "options": {"tnl": {"gat": "none"}, "sglu": {"inne": 3}}}
    with pytest.raises(ConfigError) as caught:
        study(architectures=["tnl", wrong, "tnll"], sizes=[[16, 1]])
    first, *problems = sorted(caught.value.problems, key=lambda line: line.partition(":")[0])
    assert "a.base: 'tnk'" in first and len(problems) == 3
    assert {line[: line.index(":")] for line in problems} == {"architectures.a 16x1", "architectures.tnll 16x1"}
    assert "options.tnl.gat: " in " ".join(problems) and "options.sglu.inne: " in " ".join(problems)


def test_wrong_keys_of_the_training_are_listed_beside_others_by_their_full_names():
    with pytest.raises(ConfigError) as caught:
        study(nmae="x", train={"schedule": {"warmpu": 0.1}, "stepz": 3, "steps": 3})
    problems = "\n".join(caught.value.problems)
    assert "train.schedule.warmpu: " in problems and "train.stepz: " in problems
    assert "train.steps: cannot be set here" in problems


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"points": [{"architecture": "tnk", "budget": 1e9, "size": [16, 1]}]}, "points: architecture 'tnk'"),
        ({"points": [{"architecture": "tnl", "budget": -1, "size": [16, 1]}]}, "points.0.budget: "),
        ({"seeds": [-1]}, "seeds.0: "),
        ({"tokens": [1e6]}, "tokens: "),
        ({"budgets": []}, "budgets"),
        ({"sizes": None}, "sizes: tnl"),
        ({"architectures": ["tnl", "tnl"]}, "architectures: tnl"),
        ({"budgets": [1e9, 1e9]}, "1e+09"),
        ({"batch_size": [4, 8]}, "batch_size: 2 "),
        ({"sizes": [{"d_model": 8}]}, "num_layers"),
        ({"sizes": [{"recipe": "70m", "d_model": 8}]}, "recipe"),
        ({"tokens_per_param": [20, 10]}, "tokens_per_param"),
        ({"name": "../x"}, "name"),
    ],
)
def test_contradictions_are_named(changes, expected):
    with pytest.raises(ConfigError, match=None) as caught:
        study(**changes)
    assert expected in str(caught.value)
