"""ViT and DeiT: logits of transformers' own model, and conversion both ways, in its layout and in timm's."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.models import build, get_recipe
from linnet.runs import load_model, save_model

# Beside a CPU build of torch, torchvision lacks two operators, and then neither timm nor transformers can be imported.
# Their Python parts never call them.
if importlib.util.find_spec("torchvision") is not None and not hasattr(torch.ops.torchvision, "nms"):
    OPERATORS = torch.library.Library("torchvision", "DEF")
    OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")
export_vit = pytest.importorskip("linnet.vision.hf").export_vit

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGES = {"image_size": 24, "patch_size": 8, "num_channels": 2, "num_labels": 5}
PIXELS = {"image_mean": [0.25, 0.5], "image_std": [0.5, 0.75], "do_normalize": True}


@pytest.fixture
def images():
    return torch.rand(3, 2, 24, 24, generator=torch.Generator().manual_seed(1))


def theirs(**changes):
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SHAPE, **IMAGES, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that gains, biases and tokens show
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def write(model, folder, **pixels):
    model.save_pretrained(folder)
    if pixels:
        (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


@pytest.mark.parametrize("changes", [{}, {"hidden_act": "relu", "layer_norm_eps": 1e-3}, {"hidden_act": "relu2"}])
def test_logits_are_those_of_transformers_and_come_back(changes, images, tmp_path):
    model = theirs(**changes)
    found = hf.convert(write(model, tmp_path / "vit", **PIXELS), tmp_path / "own")
    own, tokenizer = load_model(found.path, kinds=None)
    assert tokenizer is None and found.layout == "ViT" and not found.notes
    mean, std = (torch.tensor(PIXELS[key]).view(2, 1, 1) for key in ("image_mean", "image_std"))
    with torch.no_grad():
        wanted = model((images - mean) / std).logits
        assert (own(images) - wanted).abs().max() < 1e-5 < wanted.abs().max()
    back = export_vit(found.path, tmp_path / "back")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("vit", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again = transformers.ViTForImageClassification.from_pretrained(back)
    with torch.no_grad():
        assert torch.equal(again((images - mean) / std).logits, wanted)
    again = hf.convert(back, tmp_path / "again")
    assert again.model == found.model
    assert json.loads((again.path / "classes.json").read_text()) == [f"LABEL_{index}" for index in range(5)]


@pytest.mark.parametrize(
    "pixels, times, normalised",
    [
        (PIXELS | {"do_rescale": False}, 255.0, True),
        (PIXELS | {"rescale_factor": 1 / 127.5}, 2.0, True),
        ({"do_normalize": False, "do_rescale": True, "rescale_factor": 1 / 127.5}, 2.0, False),
        ({**PIXELS, "do_rescale": True, "rescale_factor": 0.00392156862745098}, 1.0, True),
    ],
)
def test_pixels_are_scaled_as_the_preprocessor_says(pixels, times, normalised, images, tmp_path):
    model = theirs()
    found = hf.convert(write(model, tmp_path / "vit", **pixels), tmp_path / "own")
    mean, std = (torch.tensor(PIXELS[key]).view(2, 1, 1) for key in ("image_mean", "image_std"))
    read = (times * images - mean) / std if normalised else times * images
    with torch.no_grad():
        wanted = model(read).logits
        assert (load_model(found.path, kinds=None)[0](images) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    if times == 1.0:
        assert found.model.mean == PIXELS["image_mean"]


@pytest.mark.parametrize("key, value", [("do_rescale", "no"), ("rescale_factor", 0), ("do_normalize", 1)])
def test_wrong_settings_of_a_preprocessor_are_named(key, value, tmp_path):
    folder = write(theirs(), tmp_path / "vit", **PIXELS | {key: value})
    with pytest.raises(ConfigError, match=f"preprocessor_config.json: {key}"):
        hf.convert(folder, tmp_path / "own")


def test_pixels_are_taken_as_they_are_without_a_preprocessor(images, tmp_path):
    model = theirs()
    found = hf.convert(write(model, tmp_path / "vit"), tmp_path / "own")
    assert "preprocessor_config.json" in found.notes[0]
    with torch.no_grad():
        difference = load_model(found.path, kinds=None)[0](images) - model(images).logits
    assert difference.abs().max() < 1e-5


def deit(tmp_path, **changes):
    """A folder of a small DeiT of Linnet's, with its weights and names of classes."""
    values = get_recipe("deit-t").model_dump() | {"d_model": 32, "layout": "attention+mlp x2", "image_size": 32}
    values |= {"classes": 3, "init_std": 0.2}
    values["options"]["attention"]["num_heads"] = 4
    config = type(get_recipe("deit-t"))(**values | changes)
    folder = save_model(tmp_path / "deit", config, build("classifier", config).state_dict())
    (folder / "classes.json").write_text(json.dumps(["cat", "dog", "owl"]))
    return folder, config


@pytest.mark.parametrize("target", ["vit", "timm"])
def test_the_command_writes_and_reads_a_vit(target, tmp_path):
    folder, config = deit(tmp_path)
    for start, end, to in (("deit", "out", target), ("out", "again", "linnet")):
        arguments = ["convert", str(tmp_path / start), "--to", to, "--out", str(tmp_path / end)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.stderr
    before, after = (load_model(tmp_path / name, kinds=None)[0] for name in ("deit", "again"))
    values = before.config.model_dump()
    values["options"]["mlp"]["inner"] = 128  # written out
    assert after.config.model_dump() == values | {"init_std": 0.02}
    states = before.state_dict(), after.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert json.loads((tmp_path / "again" / "classes.json").read_text()) == ["cat", "dog", "owl"]
    result = CliRunner().invoke(app, ["convert", str(folder), "--to", "hf", "--out", str(tmp_path / "hf")])
    assert result.exit_code == 2 and "--to vit" in " ".join(result.stderr.split())
    if target == "timm":
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert tensors["blocks.1.attn.qkv.weight"].shape == (96, 32) and tensors["pos_embed"].shape == (1, 5, 32)
        assert torch.equal(tensors["blocks.1.attn.qkv.weight"][32:64], before.backbone.blocks[1].mixer.k_proj.weight)
        assert tensors["patch_embed.proj.weight"].shape == (32, 3, 16, 16) and tensors["cls_token"].shape == (1, 1, 32)


def test_logits_are_those_of_timm_both_ways(tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    folder, _ = deit(tmp_path)
    out = export_vit(folder, tmp_path / "timm", "timm")
    theirs = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    size = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_classes": 7}
    torch.manual_seed(0)
    other = timm.create_model("deit_tiny_patch16_224", **size).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    timm.models._hub.save_for_hf(other, tmp_path / "hub", model_args=size, safe_serialization=True)
    found = hf.convert(tmp_path / "hub", tmp_path / "own")
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for path, model in ((folder, theirs), (found.path, other)):
        own = load_model(path, kinds=None)[0]
        with torch.no_grad():
            assert (own(images) - model(own.normalise(images))).abs().max() < 1e-5


def test_what_is_no_vit_is_refused(tmp_path):
    gated = {"attention": {"num_heads": 4, "rope": False, "gate": "head"}, "mlp": {}}
    folder, _ = deit(tmp_path, pool="mean", head_bias=False, options=gated, norm_after=["attention"])
    with pytest.raises(ConfigError) as raised:
        export_vit(folder, tmp_path / "out")
    named = {line.partition(":")[0] for line in raised.value.problems}
    assert named == {"pool", "head_bias", "norm_after", "options.attention.gate"}
    config = get_recipe("lightnet-vit-8px")
    light = save_model(tmp_path / "light", config, build("classifier", config).state_dict())
    with pytest.raises(ConfigError, match="layout"):
        export_vit(light, tmp_path / "out")
    with pytest.raises(ConfigError, match="an image classifier.*linnet evaluate images"):
        hf.export(light, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"model_type": "deit"}, "model_type: 'deit'.*distillation"),
        ({"qkv_bias": False}, "qkv_bias"),
        ({"hidden_act": "gelu_new"}, "hidden_act"),
        ({"image_size": 25}, "image_size: 25"),
        ({"patch_size": 4}, "patch_embeddings"),
        ({"model_type": None, "architecture": "swin_tiny"}, "architecture: 'swin_tiny'"),
        ({"model_type": None, "architecture": "vit_base_patch16_224", "model_args": {"reg_tokens": 4}}, "reg_tokens"),
    ],
)
def test_checkpoints_that_cannot_be_read(changes, key, tmp_path):
    folder = write(theirs(), tmp_path / "vit")
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=key):
        hf.convert(folder, tmp_path / "own")
    assert not (tmp_path / "own").exists()
