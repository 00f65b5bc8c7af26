"""`linnet evaluate images`, and the comparison of two classifiers."""

import base64
import csv
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.data.images.decode import encode_png
from linnet.evaluate.compare import command
from linnet.evaluate.results import read_evaluations
from linnet.models import build
from linnet.runs.model import save_model
from linnet.vision.config import VisionConfig
from linnet.vision.data import ImageDataConfig, prepare_images
from linnet.vision.evaluate import further_images, prepare_further
from linnet.vision.evaluate.images import score_images, smaller

pytest.importorskip("sklearn")


def vision(**changes):
    values = {"d_model": 16, "layout": "attention+mlp x1", "options": {"attention": {"num_heads": 1, "rope": False}}}
    values |= {"image_size": 8, "patch": 4, "channels": 1, "classes": 10, "init_std": 0.25, "position": "learned"}
    return VisionConfig(**values | changes)


def folder(path, seed=0, **changes):
    model = build("classifier", config := vision(**changes), seed)
    return save_model(path, config, model.state_dict())


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return cache, prepare_images(ImageDataConfig(split="test"), cache, whole=True).validation


def evaluate(*arguments):
    return CliRunner().invoke(app, ["evaluate", "images", *map(str, arguments), "--device", "cpu"])


def test_record_is_what_scikit_learn_says(tmp_path, digits):
    metrics = pytest.importorskip("sklearn.metrics")
    cache, split = digits
    run = folder(tmp_path / "run")
    done = evaluate(run, "--data", "digits", "--cache", cache, "--batch", 100)
    assert done.exit_code == 0, done.output
    assert "297 images" in done.output and "95 % interval" in done.output
    (record,) = read_evaluations(run)
    values = {one.metric: one.value for one in record.results}
    with torch.no_grad():
        logits = build("classifier", vision(), 0)(split.images(slice(None))).double().numpy()
    labels = split.labels(slice(None)).numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert values["accuracy"] == metrics.accuracy_score(labels, logits.argmax(1))
    assert values["top5_accuracy"] == metrics.top_k_accuracy_score(labels, logits, k=5)
    assert values["nll"] == pytest.approx(metrics.log_loss(labels, p), rel=1e-5)
    assert sum(count for *_, count in record.detail["confusions"]) == len(split) == record.detail["images"]
    low, high = record.detail["wilson"]["accuracy"]
    assert low < values["accuracy"] < high
    mistakes = record.detail["mistakes"]
    assert len(mistakes) == 24
    assert [one["label_probability"] for one in mistakes] == sorted(one["label_probability"] for one in mistakes)
    image = pytest.importorskip("PIL.Image")
    with image.open(__import__("io").BytesIO(base64.b64decode(mistakes[0]["png"]))) as picture:
        assert (np.asarray(picture) == split.images([mistakes[0]["index"]])[0, 0].numpy()).all()


def test_two_classifiers_are_compared_on_the_same_images_only(tmp_path, digits):
    cache, split = digits
    runs = [folder(tmp_path / f"seed-{seed}", seed) for seed in (0, 1)]
    for run in runs:
        assert evaluate(run, "--data", "digits", "--cache", cache).exit_code == 0
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "--json"])
    assert done.exit_code == 0, done.output
    found = {one["metric"]: one for one in json.loads(done.stdout)}
    assert found["accuracy"]["n"] == 297 and found["accuracy"]["chance"] == pytest.approx(0.1)
    assert len(found["accuracy"]["differences"]) == 1  # accuracy is tested, the rest is shown
    # The same settings over other pixels are not compared.
    images = tmp_path / "images.npz"
    for shift in (0, 1):
        np.savez(
            images, images=split.images(slice(None)).numpy()[:, 0] + shift, labels=split.labels(slice(None)).numpy()
        )
        assert evaluate(runs[shift], "--data", images, "--cache", cache).exit_code == 0
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "--no-page"])
    assert "not the content that was scored" in " ".join(done.output.split())
    records = [one for run in runs for one in read_evaluations(run) if one.asked["data"] == [str(images)]]
    assert len({one.scored for one in records}) == 2
    with open(runs[0] / "evaluations" / f"{records[0].name}.csv", newline="") as file:
        assert sum(row["metric"] == "accuracy" for row in csv.DictReader(file)) == 297


def test_a_batch_does_not_change_the_scores(digits):
    model = build("classifier", vision(), 0)
    whole, parts = (score_images(model, digits[1], digits[1].classes, batch) for batch in (297, 64))
    assert whole.digest == parts.digest and (whole.scores.predicted == parts.scores.predicted).all()
    assert np.allclose(whole.scores.nll, parts.scores.nll, atol=1e-5)


def test_pictures_get_smaller():
    image = torch.arange(200 * 300, dtype=torch.int64).remainder(256).to(torch.uint8).view(1, 200, 300)
    assert smaller(image, 96).shape == (1, 50, 75) and smaller(image, 300) is image
    assert (smaller(torch.full((3, 97, 97), 7, dtype=torch.uint8), 96) == 7).all()


def test_images_that_do_not_fit_the_model_are_refused(tmp_path, digits):
    cache, _ = digits
    done = evaluate(folder(tmp_path / "two", classes=2), "--data", "digits", "--cache", cache)
    assert done.exit_code == 2 and "classes" in done.output
    done = evaluate(folder(tmp_path / "model"), "--cache", cache)
    assert done.exit_code == 2 and "--data" in done.output  # a model folder does not say what it was trained on
    done = evaluate(tmp_path / "model", "--split", "test")
    assert done.exit_code == 2 and "--split" in done.output
    done = evaluate(tmp_path / "model", "--data", tmp_path / "nothing", "--cache", cache)
    assert done.exit_code == 2 and "nothing" in done.output
    (tmp_path / "damaged" / "0").mkdir(parents=True)
    (tmp_path / "damaged" / "0" / "a.png").write_bytes(b"")
    done = evaluate(tmp_path / "model", "--data", tmp_path / "damaged", "--cache", cache)
    assert done.exit_code == 2 and "replace the file" in done.output and "skip_damaged" not in done.output


def test_problems_of_other_images_name_the_options(tmp_path, digits):
    """A training has keys for what the command has no options for."""
    cache, pixels = digits[0], np.zeros((12, 8, 8), dtype=np.uint8)
    model = folder(tmp_path / "model")
    (model / "classes.json").write_text(json.dumps([str(number) for number in range(10)]))
    for name in "ab":
        (tmp_path / "named" / name).mkdir(parents=True)
        Image.fromarray(pixels[0]).save(tmp_path / "named" / name / "0.png")
    arrays = {
        "labels": {"images": pixels, "labels": np.arange(12)},
        "names": {"pictures": pixels, "tags": np.arange(12) % 2},
        "floats": {"images": pixels / 255, "labels": np.arange(12) % 2},
        "train": {"x_train": pixels, "y_train": np.arange(12) % 2},
    }
    for name, values in arrays.items():
        np.savez(tmp_path / f"{name}.npz", **values)
    for words, part in (
        (["named"], "--data: label 'a' is not one of the classes"),
        (["named", "--data", tmp_path / "labels.npz"], "--data: some labels are numbers"),
        (["labels.npz"], "label 10 is outside the classes 0 to 9"),
        (["names.npz"], "rename one of them"),
        (["named", "--split", "test"], "--split: 'test', but the source has no parts"),
        (["floats.npz"], "give uint8 from 0 to 255"),
        (["train.npz", "--split", "test"], "--split: the source has no part 'test'"),
        (["train.npz", "--cache", model / "config.yaml"], "--cache: "),
    ):
        options = ["--cache", cache, *words[1:]]
        done = evaluate(model, "--data", tmp_path / words[0], *options)
        assert done.exit_code == 2 and part in done.output, done.output
        assert not re.search(r"\bset |_key|names in classes|- classes:", done.output), done.output
    values = yaml.safe_load((model / "config.yaml").read_text())
    keys = {"image_key": "pictures", "label_key": "tags"}  # those of the training are kept
    (model / "SHA256SUMS").unlink()
    (model / "config.yaml").write_text(yaml.safe_dump(values | {"data": {"source": ["absent"], **keys}}))
    assert evaluate(model, "--data", tmp_path / "names.npz", "--cache", cache).exit_code == 0
    done = evaluate(model, "--cache", cache)
    assert done.exit_code == 2 and "config.yaml: data.source: 'absent'" in done.output


def test_labels_that_a_file_names_otherwise_than_the_model_do_not_count_by_number(tmp_path, digits):
    """Unless either has no names but numbers, or the training gave names in place of those of its source."""
    import pyarrow as pa
    from pyarrow import parquet

    cache, images = digits[0], [encode_png(np.full((1, 8, 8), 20 * n, dtype=np.uint8)) for n in range(10)]
    words = "zero one two three four five six seven eight nine".split()
    feature = {"info": {"features": {"label": {"_type": "ClassLabel", "names": words}}}}
    table = pa.table({"image": [{"bytes": image} for image in images], "label": list(range(10))})
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(feature)}), tmp_path / "test.parquet")
    model = folder(tmp_path / "model")

    def score(names):
        (model / "classes.json").write_text(json.dumps(names))
        return evaluate(model, "--data", tmp_path / "test.parquet", "--cache", cache)

    for names in ([f"animal {n}" for n in range(10)], [*words[:9], "neuf"]):
        done = score(names)
        assert done.exit_code == 2 and "--data: " in done.output and "names its labels zero, one" in done.output
        assert names[0] in done.output and "classes.json" in done.output
    assert score(words).exit_code == 0
    done = score([str(n) for n in range(10)])
    assert done.exit_code == 0 and "warning" not in done.output
    sorted_as_words = [str(n) for n in (1, 0, *range(2, 10))]
    config = further_images([str(tmp_path / "test.parquet")], None, {"size": 8}, vision(), sorted_as_words)
    assert prepare_further(config, cache).validation.labels(slice(None)).tolist() == [1, 0, *range(2, 10)]
    own = config.model_copy(update={"classes": [f"animal {n}" for n in range(10)]})
    with pytest.warns(UserWarning, match="labels count by their numbers"):
        assert prepare_further(own, cache, None).validation.labels(slice(None)).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("kind", "asked", "words"),
    [
        ("masked", {"text": ["a.txt"], "text_key": "text"}, "masked RUN a.txt"),
        ("sentences", {"sentences": ["a.txt", "b.txt"]}, "masked RUN --sentences a.txt --sentences b.txt"),
        ("cola", {"cola": "glue"}, "masked RUN --cola glue"),
        ("glue", {"data": "glue", "task": "sst2"}, "glue RUN --data glue"),
        (
            "samples",
            {"extractor": "e", "samples": 5, "sampler": "ddim", "steps": 3, "guidance": 2.0},
            "samples RUN --extractor e --samples 5 --sampler ddim --steps 3 --guidance 2.0",
        ),
    ],
)
def test_each_evaluation_has_its_command(kind, asked, words):
    assert command(SimpleNamespace(kind=kind, asked=asked), "RUN") == f"linnet evaluate {words}"


def test_a_run_without_evaluation_is_told_how_to_make_one(tmp_path):
    for objective, words in (("images", "linnet evaluate images"), ("masked", "linnet evaluate masked")):
        run = tmp_path / objective
        run.mkdir()
        (run / "config.yaml").write_text(f"objective: {objective}\nname: x\n")
        done = CliRunner().invoke(app, ["compare", str(run), "--no-page"])
        assert done.exit_code == 2 and words in " ".join(done.output.split()), done.output


def test_evaluations_of_text_refuse_a_classifier_by_name(tmp_path):
    done = CliRunner().invoke(app, ["evaluate", "recall", str(folder(tmp_path / "run")), "--device", "cpu"])
    assert done.exit_code == 2 and "image classifier" in done.output


def test_further_images_are_read_as_those_of_the_training():
    data = {"size": 8, "crop": 1.0, "classes": ["a", "b"]}
    found = further_images(["digits"], None, data, vision(), None)
    assert (found.size, found.crop, found.convert, found.split) == (8, 1.0, "grey", "test")
    assert found.classes == ["a", "b"]
    unknown = further_images(["digits"], "train", {}, vision(), ["0", "1"])
    assert (unknown.size, unknown.crop, unknown.split, unknown.classes) == (8, 0.875, "train", ["0", "1"])


def test_other_images_may_have_the_usual_names_or_those_of_the_training(tmp_path):
    images, labels = np.zeros((4, 8, 8), dtype=np.uint8), np.arange(4)
    images[1:] += np.arange(1, 4, dtype=np.uint8)[:, None, None]
    np.savez(tmp_path / "usual.npz", images=images, labels=labels)
    np.savez(tmp_path / "own.npz", pictures=images, tags=labels, images=images[:2], labels=labels[:2])
    np.savez(tmp_path / "neither.npz", a=images, b=labels)
    for name, count in (("usual", 4), ("own", 4)):
        config = ImageDataConfig(source=[str(tmp_path / f"{name}.npz")], image_key="pictures", label_key="tags")
        assert len(prepare_further(config, tmp_path / "cache").validation) == count
    with pytest.raises(ConfigError, match="neither.npz.*has no 'pictures'"):
        prepare_further(config.model_copy(update={"source": [str(tmp_path / "neither.npz")]}), tmp_path / "cache")
