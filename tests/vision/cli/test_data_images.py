"""`linnet data images`: prepares, shows and repairs corpora of images, and reports problems."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from linnet.cli import app


@pytest.fixture
def call(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(20):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(path)
    (tmp_path / "images" / "notes.txt").write_text("by me")

    def run(*arguments: str):
        return CliRunner().invoke(app, ["data", "images", *arguments, "--out", str(tmp_path / "cache")])

    run.folder, run.cache = str(tmp_path / "images"), tmp_path / "cache"
    return run


def test_json_is_complete(call):
    found = json.loads(call(call.folder, "--validation-fraction", "0.3", "--convert", "rgb", "--json").stdout)
    assert (found["channels"], found["side"], found["stored"], found["bytes"]) == (3, 6, "pixels", 20 * 108)
    assert found["splits"] == {"train": 14, "validation": 6} and found["classes"] == {"a": [7, 3], "b": [7, 3]}
    assert len(found["mean"]) == len(found["std"]) == 3 and found["copies_left_out"] == found["damaged"] == 0
    assert found["skipped"] == 1 and "notes.txt: " in found["skipped_files"][0]
    assert call.cache / found["digest"] == call.cache / found["folder"]


def test_what_a_person_sees(call):
    result = call("digits")
    assert result.exit_code == 0, result.output
    for part in ("1,500", "297", "images of 1 x 8 x 8", "10 classes", "mean 0.3052", str(call.cache)):
        assert part in result.stdout
    assert "1 files skipped" in call(call.folder).stdout


def test_copies_and_damaged_images_are_counted(call):
    folder = call.cache.parent / "images"
    content = (folder / "a" / "00.png").read_bytes()
    (folder / "a" / "00.jpg").write_bytes(content)  # a PNG under another name
    (folder / "b" / "cut.png").write_bytes(content[:60])
    held = call.cache.parent / "held"
    for name in ("a/00.png", "b/01.png"):
        (held / name).parent.mkdir(parents=True)
        (held / name).write_bytes((folder / name).read_bytes())
    result = call(call.folder, "--validation", str(held))
    assert result.exit_code == 2 and "cut.png: is truncated" in result.stderr and "--skip-damaged" in result.stderr
    result = call(call.folder, "--validation", str(held), "--skip-damaged")
    assert "3 copies of held-out images are left out" in result.stdout
    assert "2 files skipped (1 damaged images)" in result.stdout


def test_damage_is_said_and_repaired(call):
    folder = call.cache / json.loads(call(call.folder, "--json").stdout)["digest"]
    content = (folder / "images.bin").read_bytes()
    (folder / "images.bin").write_bytes(content[:-3])
    result = call(call.folder, "--json")
    assert result.exit_code == 0 and "damaged" in result.stderr
    assert re.search("images.bin:.*truncated", result.stderr.replace("\n", " "))
    assert (folder / "images.bin").read_bytes() == content and json.loads(result.stdout)


def test_bad_input_is_listed_with_exit_code_2(call):
    result = call("missing", "", "--validation", "nothing")
    assert result.exit_code == 2 and result.stderr.count("  - ") == 3 and not call.cache.exists()
    assert "SOURCE: 'missing' does not exist" in result.stderr and "--validation: 'nothing'" in result.stderr
    result = call(call.folder, "--size", "0", "--convert", "RGB", "--store", "disk")
    assert result.exit_code == 2 and result.stderr.count("  - ") == 3
    assert "--classes: label 'b' is not one" in call(call.folder, "--classes", "a,c").stderr
    np.savez(call.cache.parent / "odd.npz", pictures=np.zeros((4, 6, 6)), tags=np.arange(4) % 2)
    odd = str(call.cache.parent / "odd.npz")
    assert "name one in --image-key" in call(odd).stderr
    assert "or give --kind latents" in call(odd, "--image-key", "pictures", "--label-key", "tags").stderr
    for option in ("--size: ", "--convert: ", "--store: "):
        assert option in result.stderr
