"""`linnet bench vision` as a person uses it."""

import csv
import json

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.vision import throughput
from linnet.vision.throughput import rivals

SMALL = ("lightnet-vit-8px", "--side", "8", "--tokens", "32", "--least", "1", "--device", "cpu")


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "vision", *map(str, arguments)])


def test_rows_of_a_model_and_a_peer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(throughput, "_SECONDS", 0.0)  # --least calls are enough
    done = bench(*SMALL, "--side", "16", "--peer", "vit-8px", "--out", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["system"], row["mode"], row["side"], row["batch"]) for row in rows] == [
        (system, mode, side, batch)
        for system in ("linnet", "transformers")
        for side, batch in ((8, 2), (16, 1))  # 16 and 64 patches; a batch has 32, or one image
        for mode in ("training", "inference")
    ]
    assert all(row["error"] == "" and row["images_per_second"] > 0 for row in rows)
    for row in rows:
        assert row["pixels_per_second"] == pytest.approx(row["images_per_second"] * row["side"] ** 2, rel=1e-2)
    # The recipe and transformers' ViT have the same weights but for the class token.
    with open(tmp_path / "vision.csv", newline="") as file:
        kept = list(csv.DictReader(file))
    assert len(kept) == len(rows) and all(row["commit"] and row["torch"] and row["command"] for row in kept)


def test_all_bad_options_at_once():
    done = bench("lightnet-vit-8px", "tnl-10m", "no-such-vit", "--side", "9", "--mode", "sleeping", "--form", "fast",
                 "--peer", "hgrn2-vit-8px", "--device", "tpu", "--dtype", "int8")  # fmt: skip
    assert done.exit_code == 2
    for told in ("tnl-10m", "no-such-vit", "image_size", "--mode", "--form", "--peer", "--device", "--dtype"):
        assert told in done.output


def test_models_of_other_patches_are_not_compared():
    done = bench(*SMALL)  # the default peer is vit-28px
    assert done.exit_code == 2 and "--peer: patches of 2 (lightnet-vit-8px), 4 (vit-28px) pixels" in done.output


def test_models_are_compared_with_the_fastest_peer_in_their_fastest_form():
    def row(model, system, form, speed, error=""):
        return {"model": model, "system": system, "form": form, "mode": "training", "side": 8, "error": error,
                "images_per_second": speed, "pixels_per_second": speed * 64}  # fmt: skip

    peers = [row("vit", "transformers", "eager", 50.0), row("vit", "transformers", "compiled", 40.0)]
    ours = [row("light", "linnet", "eager", 30.0), row("light", "linnet", "compiled", 100.0)]
    (found,) = rivals([*peers, *ours, row("light", "linnet", "autotuned", 0.0, "out of memory")])
    assert (found["times"], found["form"], found["rival"]) == (2.0, "compiled", "vit, transformers, eager")
    assert rivals(ours)[0]["times"] is None
