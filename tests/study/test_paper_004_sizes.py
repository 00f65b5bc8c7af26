"""The protocol of paper 004, appendix C: sizes, batches and rates of a study by its tables."""

import re
import warnings
from pathlib import Path

import pytest

from linnet.config import ConfigError, parse, read_yaml
from linnet.laws.further.topology import TOPOLOGIES
from linnet.models import active_parameters, count_parameters, get_recipe
from linnet.models.costs import meta_of
from linnet.models.recipes.sizes_004 import C2_SIZES
from linnet.study import StudyConfig, plan
from linnet.study.architectures import Architecture, Base, Size, make_model, make_rungs
from linnet.study.config import read_study

CONFIGS = Path(__file__).parents[2] / "configs"

STRIPED = "hyena+swiglu attention+swiglu hyena+swiglu x10"

# Every third size, with the smallest and the largest; the others repeat it.
_NAMES = [name for name in C2_SIZES if name != "c2-8m"]
PRINTED = [
    name if number % 3 == 0 or name == _NAMES[-1] else pytest.param(name, marks=pytest.mark.thorough)
    for number, name in enumerate(_NAMES)
]


def named(name: str) -> float:
    """Returns the parameters that a name says."""
    return float(name[3:-1]) * (1e9 if name.endswith("b") else 1e6)


def model(size: str, **architecture):
    return make_model(parse(Architecture, {"name": "one"} | architecture), Size(recipe=size), Base.text(50_257))


@pytest.mark.parametrize("name", PRINTED)
def test_the_transformer_of_a_size_has_about_the_parameters_of_its_name(name):
    size, config = C2_SIZES[name], get_recipe(name)
    assert count_parameters(config)[0] == pytest.approx(named(name), rel=0.04)
    assert size.d_model == size.num_heads * (64 if size.d_model < 1400 else 128)


@pytest.mark.parametrize(
    "name, millions", [("8m", 7.2), ("150m", 151.9), ("350m", 353.9), ("1.3b", 1310), ("7b", 6968)]
)
def test_counts_of_the_transformer(name, millions):
    assert count_parameters(get_recipe(f"c2-{name}"))[0] / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.filterwarnings("ignore:layout")
def test_a_size_is_a_shape_for_every_family_and_layout():
    assert model("c2-150m", family="tnl").options == {
        "tnl": model("c2-150m", family="tnl").options["tnl"] | {"num_heads": 12},
        "sglu": {"inner": 2048},
    }
    striped = model("c2-150m", layout=STRIPED)
    assert [spec.mixer for spec in striped.blocks].count("attention") == 2 and striped.num_layers == 16
    # Mamba's mixer takes the place of the GLU too, so it has twice the blocks.
    assert model("c2-150m", family="mamba").num_layers == 32
    assert count_parameters(model("c2-150m", family="mamba"))[0] == pytest.approx(159.2e6, rel=1e-3)


def test_the_smallest_size_has_its_printed_count_in_no_architecture():
    """7.2 to 7.4 million, of which 6.4 are the tied embedding: the print of 8 is not the count of its shape."""
    layouts = ({"family": "mamba"}, {"layout": "mamba&mamba attention+swiglu"}, {"family": "llama"})
    counts = [count_parameters(model("c2-8m", **layout))[0] / 1e6 for layout in layouts]
    assert counts == pytest.approx([7.364, 7.288, 7.212], abs=6e-4)


@pytest.mark.parametrize("name", PRINTED)
def test_striped_mamba_keeps_its_pairs_together_at_the_printed_counts(name):
    """Appendix C.2: a layer of Table C.2 is two Mamba blocks, or attention with SwiGLU; cut at an odd depth too."""
    one = model(name, layout="mamba&mamba attention+swiglu")
    layers = C2_SIZES[name].num_layers
    mixers = "".join(spec.mixer[0] for spec in one.blocks)
    assert mixers == "mma" * (layers // 2) + "mm" * (layers % 2)
    assert count_parameters(one)[0] == pytest.approx(named(name), rel=0.06)


@pytest.mark.filterwarnings("ignore:layout")
@pytest.mark.parametrize("name", ["c2-102m", "c2-350m", "c2-1.3b"])
def test_mixtures_of_experts_have_the_printed_active_parameters(name):
    experts = model(name, layout=STRIPED.replace("swiglu", "moe"))
    embedding = 50_257 * experts.d_model
    assert active_parameters(experts) + embedding == pytest.approx(named(name), rel=0.05)
    both = model(name, layout="hyena_experts+moe attention+moe hyena_experts+moe x10")
    assert both.options["hyena_experts"]["expert_width"] * 8 == both.d_model


@pytest.mark.filterwarnings("ignore:layout")
def test_a_size_without_a_width_of_experts_is_refused():
    with pytest.raises(ValueError, match="'c2-8m' has no width for moe.*c2-102m to c2-1.3b"):
        model("c2-8m", layout=STRIPED.replace("swiglu", "moe"))


VALUES = {
    "name": "protocol",
    "architectures": ["llama"],
    "budgets": [4e15, 2e16],
    "sizes": ["c2-8m", "c2-22m"],
    "seq_len": 256,
    "batch_tokens": {4e15: 8192, 2e16: 16384, "below": {2e6: 4096}},
    "learning_rate": "table",
    "minimum_steps": 1,
}


def test_batches_and_rates_of_the_tables():
    runs = {(run.size, run.budget): run for run in plan(parse(StudyConfig, VALUES)).runs}
    assert {key: run.batch_size * 256 for key, run in runs.items()} == {
        ("c2-8m", 4e15): 4096,  # 0.8 million parameters with a vocabulary of bytes
        ("c2-8m", 2e16): 4096,
        ("c2-22m", 4e15): 8192,
        ("c2-22m", 2e16): 16384,
    }
    assert {run.learning_rate for run in runs.values()} == {9.77e-4, 9.57e-4}
    assert runs["c2-8m", 4e15].train.optimizer.learning_rate == 9.77e-4


def test_wrong_rules_of_batches_and_rates_are_refused():
    def problems(**changes) -> str:
        with pytest.raises(ConfigError) as caught:
            plan(parse(StudyConfig, VALUES | changes))
        return str(caught.value)

    assert "batch_tokens: has no budget 2e+16" in problems(batch_tokens={4e15: 8192})
    assert "1000 tokens are not whole rows of seq_len 256; use 1024" in problems(
        batch_tokens={4e15: 8192, 2e16: 8192, "below": {1e6: 1000}}
    )
    assert "this study sets `tokens`" in problems(budgets=[], tokens=[1e6])
    found = problems(sizes=["c2-8m", [32, 2], "70m"])
    assert "no rate for size 32x2" in found and "no rate for size 70m" in found


@pytest.mark.parametrize("file", ["topology", "scaling-laws-004-topology"])
def test_the_orders_of_table_d1_have_twelve_blocks_of_each_kind(file):
    config = read_study(read_yaml(CONFIGS / f"{file}.yaml"))
    assert [one.layout for one in config.architectures] == list(TOPOLOGIES.values())
    size = Size(d_model=64, num_layers=24)
    for one in config.architectures:
        mixers = [spec.mixer for spec in make_model(one, size, Base.text(256)).blocks]
        assert (mixers.count("hyena"), mixers.count("attention")) == (12, 12)


@pytest.mark.parametrize(
    "file", ["scaling-laws-004", "scaling-laws-004-ratio", "scaling-laws-004-bytes", "scaling-laws-004-experts"]
)
def test_each_architecture_of_the_full_studies_can_be_built_at_each_of_its_sizes(file):
    config = read_study(read_yaml(CONFIGS / f"{file}.yaml"))
    problems: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a pattern is cut at the depth, as in the paper
        rungs = make_rungs(config.architectures, config.sizes, config.init_std, Base.text(256), problems)
    assert not problems and len(rungs) >= 5 * len(config.architectures)
    for _, _, one in rungs:
        assert 8 * one.options.get("mh_hyena", {}).get("num_heads", one.d_model / 8) == one.d_model


def test_the_sweep_of_heads_has_the_same_width_of_a_head_at_every_size():
    config = read_study(read_yaml(CONFIGS / "scaling-laws-004-heads.yaml"))
    problems: list[str] = []
    rungs = make_rungs(config.architectures, config.sizes, config.init_std, Base.text(256), problems)
    assert not problems and len(rungs) == 5 * len(config.sizes) and config.budgets == [2e19]
    for architecture, _, one in rungs:
        width = int(architecture.name.rpartition("-")[2])
        mixer = meta_of(one).backbone.blocks[0].mixer
        assert mixer.heads == (one.d_model // width, width)
    eight = model("c2-150m", layout="mh_hyena+swiglu", options={"mh_hyena": {"head_dim": 8}})
    assert count_parameters(eight) == count_parameters(model("c2-150m", layout="mh_hyena+swiglu"))
    with pytest.raises(ValueError, match="head_dim: 7 does not divide d_model: 768"):
        model("c2-150m", layout="mh_hyena+swiglu", options={"mh_hyena": {"head_dim": 7}})


@pytest.mark.parametrize("path", sorted((CONFIGS.parent / "linnet/papers/items/004/configs").glob("*.yaml")))
def test_every_hybrid_of_paper_004_starts_with_the_layer_that_mad_puts_first(path):
    """Appendix D.1 prefers the gated convolution before attention, as in MAD, so that both judge the same models."""
    for architecture in read_yaml(path)["architectures"]:
        aliases = architecture.get("aliases") or {}
        mixers = [
            aliases.get(word, word).split("+")[0]
            for word in re.findall(r"\w+(?:\+\w+)?", architecture.get("layout", ""))
        ]
        if "attention" in mixers and len(set(mixers) - {name for name in mixers if re.fullmatch(r"x?\d+", name)}) > 1:
            assert mixers[0] != "attention", architecture["name"]
