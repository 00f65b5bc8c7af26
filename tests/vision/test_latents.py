"""Latents: an autoencoder of diffusers with random weights encodes images, and decodes the samples of a denoiser."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.runs import RunFolder
from linnet.train import read_training, train
from linnet.vision import latents
from linnet.vision.data import ImageDataConfig, prepare_images
from linnet.vision.latents import find_autoencoder
from linnet.vision.models.diffusion import NoiseStream, from_pixels

CONFIG = {"_class_name": "AutoencoderKL", "block_out_channels": [4, 4], "latent_channels": 4}


def run(*words) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*words) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.fixture(scope="module")
def diffusers():
    return pytest.importorskip("diffusers", reason="the extra `diffusers` is not installed")


@pytest.fixture(scope="module")
def vae(diffusers, tmp_path_factory):
    """A folder of an autoencoder that shrinks images by 32, so that 256 x 256 pixels are latents of 8 x 8."""
    torch.manual_seed(0)
    path, blocks = tmp_path_factory.mktemp("vae"), 6
    made = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(4,) * blocks,
        norm_num_groups=2,
        mid_block_add_attention=False,
        scaling_factor=0.5,
        shift_factor=0.25,
    )
    made.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(24):
        path = root / ("cat", "dog", "owl")[number % 3] / f"{number:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 10, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture(scope="module")
def encoded(vae, photos, tmp_path_factory):
    root = tmp_path_factory.mktemp("latents")
    words = ["data", "latents", photos, "--autoencoder", vae, "--size", 256, "--out", root / "made", "--device", "cpu"]
    words += ["--cache", root / "cache", "--flip", "--validation-fraction", 0.25]
    return root, words, json.loads(run(*words, "--json"))


def training(root, source, **changes):
    values = {
        "objective": "diffusion",
        "data": {"source": str(source), "kind": "latents"},
        "model": {"recipe": "lightnet-dit-8px", "num_layers": 1, "channels": 4, "classes": 3},
        "latent_scale": 0.5,
        "steps": 2,
        "batch_size": 8,
        "run": {"device": "cpu", "checkpoint_every": 0},
    }
    return train(read_training(values | changes), root / "runs", root / "cache").path


@pytest.fixture(scope="module")
def denoiser(encoded):
    root, _, _ = encoded
    return training(root, root / "made")


@pytest.fixture(scope="module")
def classifier(encoded, photos):
    """A classifier of the decoded size, whose features measure samples."""
    root, _, about = encoded
    model = {"recipe": "vit-8px", "num_layers": 1, "image_size": 256, "patch": 64, "channels": 3, "classes": 3}
    model |= {"mean": None, "std": None}
    run_ = {"device": "cpu", "checkpoint_every": 0}
    values = {"objective": "images", "data": about["images"], "model": model, "steps": 1, "batch_size": 4, "run": run_}
    return train(read_training(values), root / "runs", root / "cache").path


def test_images_are_encoded_once(encoded, vae, diffusers, monkeypatch):
    root, words, about = encoded
    assert about["shape"] == [4, 8, 8] and about["scaling_factor"] == 0.5 and about["classes"] == ["cat", "dog", "owl"]
    assert about["parts"] == {"train-00000.npz": 18, "validation-00000.npz": 6, "train-mirrored-00000.npz": 18}
    assert json.loads((root / "made" / "latents.json").read_text()) == about
    with np.load(root / "made" / "train-mirrored-00000.npz") as arrays:
        found, labels = arrays["images"], arrays["labels"]
    corpus = prepare_images(ImageDataConfig.model_validate(about["images"]), root / "cache")
    images = corpus.train.images(slice(None)).flip(-1)
    drawn = diffusers.AutoencoderKL.from_pretrained(vae).encode(from_pixels(images)).latent_dist
    noise = NoiseStream(1, corpus.train.indices.tolist(), (4, 8, 8)).next()
    right = (drawn.mean + drawn.std * noise - 0.25).detach().numpy()
    assert found.dtype == np.float16 and np.abs(found - right).max() < 4e-3 * np.abs(right).max()
    assert labels.tolist() == corpus.train.labels(slice(None)).tolist()

    # a stopped call goes on with the missing part, and until then a training refuses the folder
    kept = (root / "made" / "train-00000.npz").stat().st_mtime_ns
    (root / "made" / "validation-00000.npz").unlink()
    assert "validation-00000.npz" in refused("data", "images", root / "made", "--kind", "latents", "--out", root / "c")
    rows, encode = [], latents.Autoencoder.encode

    def watched(self, images, noise):
        rows.append(len(images))
        return encode(self, images, noise)

    monkeypatch.setattr(latents.Autoencoder, "encode", watched)
    assert "42 latents" in run(*words) and sum(rows) == 6
    assert (root / "made" / "train-00000.npz").stat().st_mtime_ns == kept
    assert "other images" in refused(*words, "--crop", 0.5)


def test_latents_become_images_of_the_encoded_size(encoded, denoiser, vae, tmp_path):
    assert RunFolder.open(denoiser).result()["unique_images"] == 36
    record = json.loads(run("sample", denoiser, "--classes", "owl,0", "--count", 3, "--steps", 2, "--autoencoder", vae,
                            "--device", "cpu", "--json", "--out", tmp_path / "out"))  # fmt: skip
    files = [tmp_path / "out" / one["file"] for one in record["samples"]]
    assert [Image.open(path).size for path in files] == [(256, 256)] * 3 and (tmp_path / "out" / "grid.png").exists()
    assert record["autoencoder"] == encoded[2]["autoencoder"]
    run("sample", denoiser, "--count", 3, "--classes", "owl,0", "--steps", 2, "--out", tmp_path / "stored")
    made = torch.from_numpy(np.load(tmp_path / "stored" / "latents.npz")["images"])
    decoded = find_autoencoder(vae).open(torch.device("cpu")).decode(made).numpy()
    pixels = np.stack([np.asarray(Image.open(path)) for path in files]).transpose(0, 3, 1, 2)
    assert np.abs(decoded.astype(int) - pixels).max() <= 2  # latents.npz is float16


def test_decoded_samples_are_compared_with_the_encoded_images(encoded, denoiser, classifier, vae):
    words = ["evaluate", "samples", denoiser, "--extractor", classifier, "--cache", encoded[0] / "cache", "--steps", 2]
    words += ["--samples", 6, "--device", "cpu"]
    found = json.loads(run(*words, "--autoencoder", vae, "--json"))["samples"]
    values = {one["metric"]: one["value"] for one in found["results"]}
    name = classifier.name
    assert values[f"fd-{name}"] > 0 and found["detail"]["real"]["images"] == 18 and found["detail"]["png"]
    assert found["detail"]["corpus"] == encoded[2]["corpus"] and found["asked"]["autoencoder"]
    assert "--autoencoder" in refused(*words)
    # the same numbers come while a denoiser trains
    task = {"kind": "samples", "extractor": str(classifier), "number": 6, "steps": 2, "autoencoder": str(vae)}
    run_ = {"device": "cpu", "checkpoint_every": 0}
    path = training(encoded[0], encoded[0] / "made", steps=1, evaluations=[task], run=run_)
    rows = [row for row in RunFolder.open(path).metrics() if "evaluation" in row]
    assert len(rows) == 1 and rows[0]["metrics"][f"fd-{name}"] > 0, rows
    assert "asked_class" in rows[0]["metrics"]


def test_an_autoencoder_must_fit(encoded, denoiser, classifier, vae, photos, tmp_path, diffusers):
    root, words, _ = encoded
    told = refused("data", "latents", photos, "--autoencoder", vae, "--size", 250, "--out", tmp_path / "x")
    assert "--size" in told and "250" in told and "256" in told and not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="latent_scale: 0.18215 .*0.5"):
        training(root, root / "made", latent_scale=0.18215)
    other = tmp_path / "other"
    shutil.copytree(vae, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"latent_channels": 8}))
    sample = ["sample", denoiser, "--count", 1, "--steps", 1, "--out", tmp_path / "out", "--autoencoder"]
    told = refused(*sample, other)
    assert "8 channels" in told and "model 4" in told
    (other / "config.json").write_text(json.dumps(config))
    weights = load_file(other / "diffusion_pytorch_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "diffusion_pytorch_model.safetensors")
    assert "encoded by" in refused(*sample, other)
    weights.popitem()
    save_file(weights, other / "diffusion_pytorch_model.safetensors")
    assert "lacks 1 weights" in refused(*sample, other)
    (other / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 99)
    assert "cannot be loaded" in refused(*sample, other)
    digits = {"data": {"source": "digits"}, "latent_scale": 0.18215, "model": "dit-8px", "steps": 1}
    pixels = training(root, "digits", **digits)
    assert "pixels" in refused("sample", pixels, "--out", tmp_path / "out", "--autoencoder", vae)


@pytest.mark.parametrize(
    ("values", "file", "words"),
    [
        (None, "w.safetensors", "config.json"),
        ([], "w.safetensors", "config.json"),
        ({"_class_name": "VQModel"}, "w.safetensors", "_class_name: 'VQModel'"),
        (CONFIG | {"block_out_channels": []}, "w.safetensors", "block_out_channels"),
        (CONFIG, "diffusion_pytorch_model.bin", "pickle"),
        (CONFIG, "notes.txt", "no weights"),
        (CONFIG, "model.safetensors", "no weights"),
        (CONFIG | {"latents_mean": [0.0]}, "w.safetensors", "latents_mean"),
        (CONFIG | {"latent_channels": "4"}, "w.safetensors", "latent_channels: '4'"),
        (CONFIG | {"latent_channels": True}, "w.safetensors", "latent_channels: True"),
        (CONFIG | {"in_channels": [3]}, "w.safetensors", r"in_channels: \[3\]"),
        (CONFIG | {"scaling_factor": 0}, "w.safetensors", "scaling_factor: 0"),
        (CONFIG | {"scaling_factor": float("nan")}, "w.safetensors", "scaling_factor: nan"),
        (CONFIG | {"shift_factor": "x"}, "w.safetensors", "shift_factor: 'x'"),
    ],
)
def test_folders_that_are_refused(tmp_path, photos, values, file, words):
    """Every line of the command's error names the option, and the library does so for the key."""
    folder = tmp_path / "vae"
    folder.mkdir()
    if values is not None:
        (folder / "config.json").write_text(json.dumps(values))
    (folder / file).write_bytes(b"")
    with pytest.raises(ConfigError, match=words) as caught:
        find_autoencoder(folder)
    assert all(line.startswith("autoencoder: ") for line in caught.value.problems)
    told = refused("data", "latents", photos, "--autoencoder", folder, "--size", 256, "--out", tmp_path / "out")
    assert re.search(words, told) and all("--autoencoder: " in line for line in told.splitlines()[1:])
    assert not (tmp_path / "out").exists()


def test_other_things_than_a_folder_of_an_autoencoder(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "pipeline" / "vae").mkdir(parents=True)
    (tmp_path / "pipeline" / "vae" / "config.json").write_text(json.dumps(CONFIG))
    for name, words in (("nothing", "no such folder"), ("file", "is a file"), ("pipeline", "pipeline/vae")):
        with pytest.raises(ConfigError, match=f"autoencoder: {tmp_path / name}: .*{words}"):
            find_autoencoder(tmp_path / name)


def test_nothing_is_read_before_the_autoencoder_and_the_folder_are_right(vae, photos, tmp_path):
    damaged, out = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(vae, damaged)
    (damaged / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 99)
    words = ["data", "latents", photos, "--size", 256, "--out", out, "--cache", tmp_path / "cache", "--autoencoder"]
    assert f"--autoencoder: {damaged}: cannot be loaded" in refused(*words, damaged)
    out.mkdir()
    (out / "mine").write_text("")
    assert f"--out: {out} holds other files" in refused(*words, vae)
    assert not (tmp_path / "cache").exists()
    (out / "mine").rename(out / ".latents.json.1.tmp")  # as a killed call leaves it
    run(*words, vae)
    assert not list(out.glob(".*.tmp"))


def test_a_missing_library_names_its_extra(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "w.safetensors").write_bytes(b"")
    monkeypatch.setattr(latents.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\[diffusers\]"):
        find_autoencoder(tmp_path)


def test_a_damaged_description_is_named(tmp_path):
    (tmp_path / "latents.json").write_text("{")
    np.savez(tmp_path / "train-00000.npz", images=np.zeros((4, 4, 8, 8), np.float16), labels=np.arange(4))
    assert "latents.json" in refused("data", "images", tmp_path, "--kind", "latents", "--out", tmp_path / "cache")
