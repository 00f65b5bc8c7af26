"""Folders with models of every kind: read as they were written, and refused by commands that cannot use them."""

import pytest
import torch
import yaml
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.models import KINDS, OBJECTIVE_KINDS, build, family, get_recipe
from linnet.runs import checkpoint, load_model, save_model

SMALL = {
    "causal_lm": family("tnl")(16, 1, num_heads=2),
    "classifier": family("hgrn2-vit", "classifier")(16, 1, 2, 24, image_size=4, channels=1, classes=3),
    "denoiser": family("dit", "denoiser")(16, 1, 2, 24, image_size=4, channels=1, classes=3),
    "masked_lm": family("bert", "masked_lm")(16, 1, 2, 24, 67),
}
SMALL["sentence"] = KINDS["sentence"].config(**SMALL["masked_lm"].model_dump(), outputs=2)
SMALL["sequence"] = KINDS["sequence"].config(
    d_model=16, layout="hgrn2+glu", options={"hgrn2": {"num_heads": 2}}, norm="batchnorm", vocab_size=18, classes=10
)


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_every_objective_has_a_kind():
    assert set(OBJECTIVE_KINDS.values()) == set(KINDS) == set(SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_folder_comes_back_and_other_callers_refuse_it(kind, tmp_path):
    model = build(kind, SMALL[kind], seed=3)
    folder = save_model(tmp_path / "model", SMALL[kind], model.state_dict())
    again, tokenizer = load_model(folder, kinds=None)
    assert type(again) is KINDS[kind].module and again.config == SMALL[kind] and tokenizer is None
    assert same(again.state_dict(), model.state_dict()) and not again.training
    assert same(load_model(folder, kinds=(kind,))[0].state_dict(), model.state_dict())
    values = yaml.safe_load((folder / "config.yaml").read_text())
    assert values.get("kind", "causal_lm") == kind  # folders of text stay as they were
    other = "classifier" if kind == "causal_lm" else "causal_lm"
    with pytest.raises(ConfigError) as raised:
        load_model(folder, kinds=(other,))
    for text in (KINDS[kind].config.TITLE, KINDS[other].config.TITLE, KINDS[kind].commands):
        assert text and text in str(raised.value)
    with pytest.raises(ConfigError, match="weights: average"):
        load_model(folder, kinds=None, weights="average")


def test_a_run_has_the_kind_of_its_objective_and_the_average_of_its_weights(tmp_path):
    config = SMALL["classifier"]
    last, average, early = (build("classifier", config, seed).state_dict() for seed in range(3))
    values = {"objective": "images", "model": config.model_dump(mode="json")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    checkpoint.save(tmp_path / "checkpoints", 1, {"model": early}, {})
    assert same(load_model(tmp_path, kinds=("classifier",))[0].state_dict(), early)
    with pytest.raises(ConfigError, match="step-00000001 has no averaged weights"):
        load_model(tmp_path, kinds=None, weights="average")
    checkpoint.save(tmp_path / "checkpoints", 2, {"model": last, "average": average}, {})
    for weights, wanted in ((None, average), ("average", average), ("raw", last)):
        assert same(load_model(tmp_path, kinds=None, weights=weights)[0].state_dict(), wanted)
    for key, value in (("objective", "pictures"), ("kind", "transformer")):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values | {key: value}))
        with pytest.raises(ConfigError, match=f"{key}: '{value}'"):
            load_model(tmp_path, kinds=None)


@pytest.mark.parametrize(
    "command", [["generate", "{}", "a"], ["serve", "{}"], ["evaluate", "text", "{}", "{}/text.txt"]]
)
def test_commands_for_texts_refuse_an_image_classifier(command, tmp_path):
    model = build("classifier", SMALL["classifier"])
    folder = save_model(tmp_path / "model", SMALL["classifier"], model.state_dict())
    (folder / "text.txt").write_text("some text")
    result = CliRunner().invoke(app, [part.format(folder) for part in command])
    assert result.exit_code == 2 and "an image classifier" in " ".join(result.stderr.split()), result.output


def test_training_a_recipe_of_another_objective_is_refused(tmp_path):
    arguments = ["train", "--model", "vit-8px", "--data", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "describes an image classifier" in " ".join(result.stderr.split()), result.output


def test_models_of_images_have_no_next_token():
    for kind in ("classifier", "denoiser"):
        backbone = build(kind, SMALL[kind]).backbone
        with pytest.raises(ValueError, match="no next token"):
            backbone.init_state(1, 4)
        with pytest.raises(ValueError, match="no next token"):
            backbone.step(torch.zeros(1, 16), {})


def test_init_of_a_denoiser_is_xavier_with_zeros():
    model = build("denoiser", get_recipe("dit-8px"))
    weight = model.backbone.blocks[0].mixer.q_proj.weight.detach()
    bound = (6 / 128) ** 0.5
    assert weight.abs().max() <= bound and weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    zeros = [name for name, module in model.named_modules() if getattr(module, "starts_zero", False)]
    assert zeros and all(not model.get_submodule(name).weight.any() for name in zeros)


def test_patches_make_tokens_of_unit_variance_unless_a_table_stands_beside_them():
    for name, std in (("lightnet-vit-8px", 0.5), ("vit-8px", 0.125)):  # of 4 pixels; of width 64
        weight = build("classifier", get_recipe(name)).patches.proj.weight
        assert weight.std().item() == pytest.approx(std, rel=0.15)
