"""All layouts give the same images; corpora are verified, rebuilt and never left half-written."""

import errno
import os
import resource
import shutil
import time

import numpy as np
import pytest
import torch
from PIL import Image

from linnet.config import ConfigError, parse
from linnet.data import CorpusDamaged
from linnet.vision.data import ImageDataConfig, check_images, corpus, image_content, open_images, prepare_images


def config_of(*source, **values):
    return parse(ImageDataConfig, {"source": [str(path) for path in source], **values})


def by_pixels(found):
    """The images of both splits with their classes, in an order that no layout determines."""
    rows = []
    for split in (found.train, found.validation):
        images, labels = split.images(slice(None)), split.labels(slice(None))
        rows += [(found.classes[label], image.numpy().tobytes()) for image, label in zip(images, labels, strict=True)]
    return sorted(rows)


@pytest.mark.parametrize("kind", ["folders", "parquet", "tar", "idx", "npz", "npy", "store"])
def test_all_layouts_hold_the_same_images(layouts, grey, tmp_path, kind):
    made = grey if kind == "idx" else layouts
    path = made.folders() if kind == "store" else getattr(made, kind)()
    values = {"store": "encoded"} if kind == "store" else {}
    found = prepare_images(config_of(path, **values, validation_fraction=0.2), tmp_path / "cache")
    assert (found.channels, found.side) == (1 if kind == "idx" else 3, 6)
    assert found.metadata["stored"] == ("encoded" if kind == "store" else "pixels")
    assert (len(found.train), len(found.validation)) == (24, 6)
    assert found.validation.labels(slice(None)).bincount().tolist() == [2, 2, 2]
    names = ("ant", "bee", "cat") if kind in ("folders", "store") else ("0", "1", "2")
    first = made.values[:, None] if kind == "idx" else made.values.transpose(0, 3, 1, 2)
    assert by_pixels(found) == sorted((names[n % 3], first[n].tobytes()) for n in range(30))
    if kind != "idx":  # the choice depends on the pixels, not on the layout
        other = prepare_images(config_of(layouts.npz("other.npz"), validation_fraction=0.2), tmp_path / "cache")
        assert torch.equal(
            other.validation.images(slice(None)).sort(0)[0], found.validation.images(slice(None)).sort(0)[0]
        )
    image = found.validation.image(1)
    assert np.array_equal(np.asarray(image).reshape(6, 6, -1), found.validation.images([1])[0].permute(1, 2, 0))
    expected = found.train.images(slice(None)).double().div(255)
    assert found.mean == pytest.approx(expected.mean((0, 2, 3)).tolist(), abs=1e-5)
    assert found.std == pytest.approx(expected.std((0, 2, 3), correction=0).tolist(), abs=1e-5)


def test_parts_of_a_source(layouts, grey, tmp_path):
    """Folders, files and arrays with train, validation and test in their names are found, whatever the layout."""
    train, test = range(21), range(21, 30)
    layouts.folders("parts/train", train), layouts.folders("parts/val", test)
    layouts.parquet("packed/data/train-00000-of-00001.parquet", train)
    layouts.parquet("packed/data/test-00000-of-00001.parquet", test)
    grey.idx("numbers", "train", slice(21)), grey.idx("numbers", "t10k", slice(21, 30))
    v, y = layouts.values, layouts.labels
    layouts.npz("arrays.npz", x_train=v[:21], y_train=y[:21], x_test=v[21:], y_test=y[21:])
    for name in ("parts", "packed", "numbers", "arrays.npz"):
        found = prepare_images(config_of(tmp_path / name), tmp_path / "cache")
        assert (len(found.train), len(found.validation), found.metadata["split"]) == (21, 9, "given"), name
    found = prepare_images(config_of(tmp_path / "packed", split="test", validation_fraction=0.34), tmp_path / "cache")
    assert (len(found.train), len(found.validation)) == (6, 3)
    for values, message in (({"split": "trian"}, "split: .*'train'"), ({"held_out": "dev"}, "held_out: .*'dev'")):
        with pytest.raises(ConfigError, match=message):
            prepare_images(config_of(tmp_path / "packed", **values), tmp_path / "cache")
    for key in ("split", "held_out"):
        with pytest.raises(ConfigError, match=f"{key}: 'test', but the source has no parts"):
            prepare_images(config_of(layouts.folders(), **{key: "test"}), tmp_path / "cache")
    one = layouts.npz("one.npz", x_test=v, y_test=y)
    assert len(prepare_images(config_of(one), tmp_path / "cache").train) == 27  # there is nothing to choose
    with pytest.raises(ConfigError, match="split: .*no part 'validation'"):
        prepare_images(config_of(one, split="validation"), tmp_path / "cache")


def test_names_of_classes(layouts, tmp_path):
    named = prepare_images(config_of(layouts.parquet(names=("x", "y", "z"))), tmp_path / "cache")
    assert named.classes == ["x", "y", "z"]
    given = prepare_images(config_of(layouts.tar(), classes=["p", "q", "r"]), tmp_path / "cache")
    assert given.classes == ["p", "q", "r"]
    words = layouts.tar("words.tar", label=lambda number: f"class {number % 3}")
    assert prepare_images(config_of(words), tmp_path / "cache").classes == ["class 0", "class 1", "class 2"]
    turned = config_of(layouts.folders(), classes=["cat", "bee", "ant"])
    assert by_pixels(prepare_images(turned, tmp_path / "cache"))[0][0] == "ant"


def test_labels_mean_what_their_own_source_says(layouts, tmp_path):
    """Two files with the classes in another order; numbers for a model of folders that are named by numbers."""
    true = sorted(("xyz"[n % 3], layouts.values[n].transpose(2, 0, 1).tobytes()) for n in range(30))
    first = layouts.parquet("first.parquet", range(15), names="xyz")
    layouts.labels = 2 - layouts.labels
    second = layouts.parquet("second.parquet", range(15, 30), names="zyx")
    found = prepare_images(config_of(first, second), tmp_path / "cache")
    assert found.classes == ["x", "y", "z"] and by_pixels(found) == true
    held = prepare_images(config_of(first, validation=[str(second)]), tmp_path / "cache")
    assert sorted(by_pixels(held)) == true
    scored = prepare_images(config_of(second, classes=["x", "y", "z", "w"]), tmp_path / "cache", whole=True)
    assert by_pixels(scored) == [row for row in true if row[1] in {pixels for _, pixels in by_pixels(scored)}]
    other = layouts.parquet("other.parquet", names="xzq")  # of which y is another word for neither
    for config in (config_of(first, other), config_of(other, classes=["x", "y", "z"])):
        with pytest.raises(ConfigError, match="classes: .*other.parquet names its labels x, z, q, and 'q' is not one"):
            prepare_images(config, tmp_path / "cache")
    words = prepare_images(config_of(second, classes=["ant", "bee", "cat"]), tmp_path / "cache")
    assert words.train.labels(slice(None)).tolist() == layouts.labels[15:][words.train.indices].tolist()
    many = layouts.npz(image=np.concatenate([layouts.values, layouts.values ^ 1]), label=np.arange(60) % 12)
    folders = sorted(map(str, range(12)))  # "0", "1", "10", "11", "2", ...
    scored = prepare_images(config_of(many, classes=folders), tmp_path / "cache", whole=True).validation
    assert [folders[label] for label in scored.labels(slice(None))] == [str(number % 12) for number in range(60)]


def test_names_of_another_column_are_not_those_of_the_labels(layouts, tmp_path):
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(layouts.parquet(names="xyz"))
    table = table.append_column("kind", table["label"]).replace_schema_metadata(table.schema.metadata)
    pyarrow.parquet.write_table(table, tmp_path / "two.parquet")
    found = prepare_images(config_of(tmp_path / "two.parquet", label_key="kind"), tmp_path / "cache")
    assert found.classes == ["0", "1", "2"]


def test_copies_of_held_out_images_are_left_out_of_training(layouts, tmp_path):
    """Also if they are stored in another format: the pixels count."""
    path = layouts.folders()
    for number in (0, 4):
        name = path / ("ant", "bee")[number % 3] / f"copy{number}.bmp"
        Image.fromarray(layouts.values[number]).save(name)
    held = layouts.npz("held.npz", image=layouts.values[[0, 1, 2]], label=np.array(["ant", "bee", "cat"]))
    found = prepare_images(config_of(path, validation=[str(held)]), tmp_path / "cache")
    # 0 with its copy, 1 and 2 are held out; the copy of 4 is a usual training image.
    assert (len(found.train), len(found.validation), found.metadata["copies_left_out"]) == (28, 3, 4)
    whole = prepare_images(config_of(path), tmp_path / "cache", whole=True)
    assert (len(whole.train), len(whole.validation), whole.mean) == (0, 32, None)


def test_the_same_seed_takes_the_same_images(layouts, tmp_path):
    path = layouts.folders()
    few = config_of(path, max_images=12)
    found = prepare_images(few, tmp_path / "cache")
    assert len(found.train) == 12 and len(found.validation) == 3
    assert torch.equal(prepare_images(few, tmp_path / "other").train.images([3]), found.train.images([3]))
    other = prepare_images(config_of(path, max_images=12, seed=1), tmp_path / "cache")
    assert by_pixels(other) != by_pixels(found)


@pytest.mark.parametrize("store", ["auto", "pixels"])
def test_images_of_several_sizes_are_resized_and_cut(layouts, tmp_path, store):
    path = layouts.folders()
    large = np.random.default_rng(1).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    Image.fromarray(large).save(path / "bee" / "large.png")
    found = prepare_images(config_of(path, size=12, crop=0.75, store=store), tmp_path / "cache")
    assert found.side == 12 and found.metadata["stored"] == ("encoded" if store == "auto" else "pixels")
    resized = Image.fromarray(large).resize((16, 24), Image.Resampling.BICUBIC).crop((2, 6, 14, 18))
    target = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    every = torch.cat([split.images(slice(None)) for split in (found.train, found.validation)])
    assert (every == target).flatten(1).all(1).sum() == 1
    own = {split.image(n).size for split in (found.train, found.validation) for n in range(len(split))}
    assert own == ({(6, 6), (20, 30)} if store == "auto" else {(12, 12)})  # what `deit` starts from


def test_all_kinds_of_pixels_become_grey_or_rgb(tmp_path):
    values = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    plain = Image.fromarray(values)
    wide = Image.fromarray(values.astype(np.uint16) * 257)
    kinds = {
        "L.png": plain,
        "P.png": plain.convert("P"),
        "LA.png": plain.convert("LA"),
        "RGBA.png": plain.convert("RGBA"),
    }
    kinds |= {
        "I16.png": wide,
        "CMYK.tif": plain.convert("CMYK"),
        "1.png": plain.convert("1"),
        "RGB.png": plain.convert("RGB"),
    }
    for name, image in kinds.items():
        for label in ("a", "b"):
            (tmp_path / "all" / label).mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / "all" / label / name)
    for convert, channels in (("grey", 1), ("rgb", 3)):
        found = prepare_images(config_of(tmp_path / "all", convert=convert), tmp_path / "cache", whole=True)
        images = found.validation.images(slice(8)).numpy()  # of class a, by name: 1, CMYK, I16, L, LA, P, RGB, RGBA
        assert images.shape == (8, channels, 8, 8)
        assert all(np.array_equal(images[n, c], values) for n in (2, 3, 4, 6, 7) for c in range(channels))
        assert abs(images[1].astype(int) - values).max() <= 2  # ink rounds
    rotated = tmp_path / "exif" / "a" / "turned.jpg"
    rotated.parent.mkdir(parents=True)
    tags = Image.Exif()
    tags[0x0112] = 6  # turned by 90 degrees
    Image.fromarray(np.repeat(values[:4], 2, 0)[:, :4]).resize((8, 4)).save(rotated, exif=tags)
    with pytest.raises(ConfigError, match="4 x 8"):
        prepare_images(config_of(tmp_path / "exif", classes=["a", "b"]), tmp_path / "cache", whole=True)


def test_latents_are_stored_as_they_are(layouts, tmp_path):
    values = np.random.default_rng(0).normal(size=(30, 4, 5, 5)).astype(np.float16)
    found = prepare_images(config_of(layouts.npy("z.npy", values), kind="latents"), tmp_path / "cache")
    assert (found.channels, found.side, found.mean, found.metadata["stored"]) == (4, 5, None, "latents")
    images = found.train.images(slice(None))
    assert images.dtype == torch.float32
    assert np.array_equal(images.numpy(), values[found.train.indices].astype(np.float32))


def test_a_corpus_is_found_again_by_its_content(layouts, tmp_path, monkeypatch):
    path = layouts.folders()
    config = config_of(path)
    first = prepare_images(config, tmp_path / "cache")
    monkeypatch.setattr(corpus, "_build", lambda *_: pytest.fail("it was made again"))
    assert prepare_images(config, tmp_path / "cache").digest == first.digest
    shutil.copytree(path, tmp_path / "moved")
    assert prepare_images(config_of(tmp_path / "moved"), tmp_path / "cache").digest == first.digest
    check_images(config, tmp_path / "cache")
    assert image_content(config) == image_content(config_of(tmp_path / "moved"), tmp_path / "cache")
    monkeypatch.undo()
    (path / "bee" / "01.png").write_bytes((path / "bee" / "04.png").read_bytes())
    assert prepare_images(config, tmp_path / "cache").digest != first.digest
    assert image_content(config) != image_content(config_of(tmp_path / "moved"))


def test_the_content_of_old_folders_is_remembered(layouts, tmp_path, monkeypatch):
    path = layouts.folders()
    for file in path.rglob("*.png"):
        os.utime(file, (1, 1))
    monkeypatch.setattr("linnet.data.sources.SETTLED", -1.0)
    found = image_content(config_of(path), tmp_path / "cache")
    monkeypatch.setattr("linnet.data.sources.fingerprint", lambda _: pytest.fail("it was read again"))
    assert image_content(config_of(path), tmp_path / "cache") == found
    monkeypatch.setattr("linnet.data.sources._FOLDERS", {})  # as in another process
    assert image_content(config_of(path), tmp_path / "cache") == found


@pytest.mark.parametrize("name", ["images.bin", "labels.npy", "splits.npy", "offsets.npy", "corpus.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_damage_is_named_and_repaired_when_asked(layouts, tmp_path, name, damage):
    config = config_of(layouts.folders(), store="encoded")
    found = prepare_images(config, tmp_path / "cache")
    before, path = by_pixels(found), found.folder / name
    data = path.read_bytes()
    time.sleep(0.01)  # a change within one tick of the clock is not seen by a process that has verified the file
    if damage == "missing":
        path.unlink()
    else:
        at = len(data) // 2
        path.write_bytes(data[:at] + (b"" if damage == "truncated" else bytes([data[at] ^ 1]) + data[at + 1 :]))
    for attempt in (lambda: prepare_images(config, tmp_path / "cache"), lambda: open_images(found.folder)):
        with pytest.raises(CorpusDamaged, match=f"{name}: .*{found.folder}"):
            attempt()
    assert by_pixels(prepare_images(config, tmp_path / "cache", rebuild=True)) == before and path.read_bytes() == data


def test_a_disk_that_is_full_at_the_labels_is_named(tmp_path):
    count, (usual, most) = 40_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    images = np.arange(count, dtype=np.uint32).view(np.uint8).reshape(count, 2, 2)
    np.savez(tmp_path / "a.npz", image=images, label=np.arange(count) % 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * count, most))  # more than the images, less than the labels
    try:
        with pytest.raises(ConfigError, match=os.strerror(errno.EFBIG)):
            prepare_images(config_of(tmp_path / "a.npz"), tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk_leaves_nothing_behind(layouts, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = config_of(layouts.folders())
    for target in ("add", "finish"):
        with monkeypatch.context() as patched:
            patched.setattr(corpus._Growing, target, full)
            with pytest.raises(ConfigError, match="No space left on device"):
                prepare_images(config, tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []
    prepare_images(config, tmp_path / "cache")


def test_a_source_that_changes_while_it_is_read_is_refused(layouts, tmp_path, monkeypatch):
    path, original = layouts.folders(), corpus._build

    def change(*arguments):
        shutil.copy(path / "bee" / "01.png", path / "bee" / "04.png")
        return original(*arguments)

    monkeypatch.setattr(corpus, "_build", change)
    with pytest.raises(ConfigError, match="changed"):
        prepare_images(config_of(path), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_checking_writes_nothing(layouts, tmp_path):
    check_images(config_of(layouts.folders()), tmp_path / "cache")
    with pytest.raises(ConfigError, match="does not exist"):
        check_images(config_of(tmp_path / "absent"), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_progress_ends_at_the_whole(layouts, tmp_path):
    calls = []
    path = layouts.folders()
    prepare_images(config_of(path), tmp_path / "cache", progress=lambda *call: calls.append(call))
    size = sum(file.stat().st_size for file in path.rglob("*.png"))
    assert calls[-1] == ("reading", size, size) and len(calls) > 1


def test_cifar10_from_parquet(real_data, tmp_path):
    folder = real_data / "cifar10"
    if not folder.is_dir():
        pytest.skip(f"no CIFAR-10 in {real_data}")
    config = config_of(folder / "test.parquet", max_images=100)
    found = prepare_images(config, tmp_path)
    assert (len(found.train), len(found.validation), found.channels, found.side) == (100, 1000, 3, 32)
    assert found.validation.labels(slice(None)).bincount().tolist() == [100] * 10
