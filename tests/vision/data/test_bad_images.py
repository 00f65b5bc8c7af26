"""What is wrong with image data is found before training, all at once, with the key or file, and the fix."""

import gzip
import io
import os
import pickle
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError, parse
from linnet.vision import train
from linnet.vision.data import ImageDataConfig, check_images, corpus, prepare_images

from .conftest import encoded


def problems_of(source, cache, **values):
    with pytest.raises(ConfigError) as error:
        prepare_images(
            parse(ImageDataConfig, {"source": source if isinstance(source, list) else str(source), **values}), cache
        )
    assert not cache.exists() or not list(cache.iterdir())  # no corpus is left
    return error.value.problems


def add(path, data=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def zeros(*shape, dtype=np.uint8):
    return np.zeros(shape, dtype=dtype)


def animated():
    file = io.BytesIO()
    frames = [Image.fromarray(np.full((6, 6, 3), shade, np.uint8)) for shade in (0, 90, 180)]
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    return file.getvalue()


def bomb():
    """A PNG of 1 GB of pixels in a few bytes: its header alone must stop Pillow."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (20_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def cmyk():
    file = io.BytesIO()
    Image.new("CMYK", (6, 6)).save(file, "JPEG")
    return file.getvalue()


DAMAGED = {
    "empty.png": (b"", "0 bytes"),
    "text.jpg": (b"not an image", "Pillow"),
    "cut.png": (encoded(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))[:3000], "truncated"),
    "cut.jpg": (encoded(zeros(64, 64, 3), "JPEG")[:400], "truncated"),
    "moving.png": (animated(), "3 frames"),
    "bomb.png": (bomb(), "MAX_IMAGE_PIXELS"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_files_are_named_together_or_counted(layouts, tmp_path):
    path, cache = layouts.folders(), tmp_path / "cache"
    for name, (data, _) in DAMAGED.items():
        add(path / "bee" / name, data)
    found = problems_of(path, cache)
    assert len(found) == 6  # five by name, and the number of the others
    shown = 0
    for name, (_, reason) in DAMAGED.items():
        lines = [line for line in found if name in line]
        assert all(reason in line and "skip_damaged: true" in line for line in lines), lines
        shown += len(lines)
    assert shown == 5 and "1 more" in found[-1]
    corpus = prepare_images(parse(ImageDataConfig, {"source": str(path), "skip_damaged": True}), cache)
    assert corpus.metadata["damaged"] == corpus.metadata["skipped"] == 6
    assert len(corpus.train) + len(corpus.validation) == 30
    for name, (_, reason) in DAMAGED.items():
        assert any(name in line and reason in line for line in corpus.metadata["skipped_files"])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", DAMAGED)
def test_each_kind_of_damage(layouts, tmp_path, name):
    path = layouts.folders()
    add(path / "bee" / name, DAMAGED[name][0])
    [line] = problems_of(path, tmp_path / "cache")
    assert name in line and DAMAGED[name][1] in line


def test_files_that_are_no_images_are_skipped(layouts, tmp_path):
    path = layouts.folders()
    for name in (".DS_Store", "bee/.DS_Store", "bee/Thumbs.db", "readme.txt", "__MACOSX/bee/x.png"):
        add(path / name, b"\0\1")
    corpus = prepare_images(parse(ImageDataConfig, {"source": str(path)}), tmp_path / "cache")
    assert len(corpus.train) + len(corpus.validation) == 30 and corpus.classes == ["ant", "bee", "cat"]
    assert corpus.metadata["skipped"] == 2 and corpus.metadata["damaged"] == 0


def one_class(made):
    path = made.folders("one", range(0, 30, 3))
    return path


def no_class(made):
    add(made.folder / "loose" / "a.png", encoded(zeros(6, 6)))
    return made.folder / "loose"


def empty_class(made):
    (made.folders() / "dog").mkdir()
    return made.folder / "folders"


def loop(made):
    path = made.folders()
    (path / "bee" / "again").symlink_to(path)
    return path


def loop_of_links(made):
    path = made.folders()
    (path / "bee" / "a.png").symlink_to(path / "bee" / "b.png")
    (path / "bee" / "b.png").symlink_to(path / "bee" / "a.png")
    return path


def link_to_nothing(made):
    path = made.folders()
    (path / "bee" / "moved.png").symlink_to("/nowhere/moved.png")
    return path


def pipe(made):
    path = made.folders()
    os.mkfifo(path / "bee" / "pipe.png")
    return path


def not_numpy(made):
    path = made.npz()
    path.write_text("version https://git-lfs")
    return path


def sizes(made):
    add(made.folders() / "bee" / "large.png", encoded(zeros(9, 9, 3)))
    return made.folder / "folders"


def channels(made):
    add(made.folders() / "bee" / "grey.png", encoded(zeros(6, 6)))
    return made.folder / "folders"


def wide(made):
    return made.npz(image=zeros(30, 4, 6, 3), label=made.labels)


def floats(made):
    add(made.folders() / "bee" / "x.tif", encoded(np.full((6, 6), np.nan, np.float32), "TIFF"))
    return made.folder / "folders"


def no_file(made):
    return made.folder / "absent"


def empty_folder(made):
    (made.folder / "empty").mkdir()
    return made.folder / "empty"


def empty_file(made):
    add(made.folder / "empty.tar")
    return made.folder / "empty.tar"


def one_image(made):
    add(made.folder / "one.png", encoded(zeros(6, 6)))
    return made.folder / "one.png"


def unknown(made):
    add(made.folder / "data.csv", b"1,2")
    return made.folder / "data.csv"


def short_labels(made):
    folder = made.idx("short", "train")
    again = made.idx("other", "train", slice(20))
    (again / "train-labels-idx1-ubyte.gz").replace(folder / "train-labels-idx1-ubyte.gz")
    return folder


def no_labels(made):
    folder = made.idx("no")
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    return folder


def wrong_magic(made):
    folder = made.idx("magic", end="")
    path = next(folder.glob("train-images*"))
    path.write_bytes(b"\0\0\x0d\x03" + path.read_bytes()[4:])
    return folder


def cut_idx(made):
    folder = made.idx("cut", end="")
    path = next(folder.glob("train-images*"))
    path.write_bytes(path.read_bytes()[:200])
    return folder


def cut_gz(made):
    folder = made.idx("cutgz")
    path = next(folder.glob("train-images*"))
    path.write_bytes(path.read_bytes()[:-300])
    return folder


def huge_idx(made):
    """A header that announces 64 GB must not be believed."""
    folder = made.idx("huge")
    head = (0x803).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in (1 << 20, 256, 256))
    (next(folder.glob("train-images*"))).write_bytes(gzip.compress(head))
    return folder


def pickled(made):
    return made.npz(image=np.array([{}], dtype=object), label=made.labels[:1])


def pickle_file(made):
    path = made.npy()
    path.write_bytes(pickle.dumps({"x": 1}))
    return path


def cut_npz(made):
    path = made.npz()
    path.write_bytes(path.read_bytes()[:500])
    return path


def nan(made):
    return made.npz(image=np.full((30, 6, 6), np.nan), label=made.labels)


def other_shape(made):
    return made.npz(image=zeros(30, 6, 6, 5), label=made.labels)


def float_labels(made):
    return made.npz(image=made.values, label=made.labels + 0.5)


def other_lengths(made):
    return made.npz(image=made.values, label=made.labels[:20])


def no_npy_labels(made):
    path = made.npy()
    path.with_name("all.labels.npy").unlink()
    return path


def unlabelled(made):
    return made.tar(members=[("a/x.png", encoded(zeros(6, 6, 3)))])


def without_image(made):
    return made.tar(members=[("y.cls", b"1")])


def outside(made):
    return made.tar(members=[("../x.png", encoded(zeros(6, 6, 3)))])


def linked(made):
    path = made.tar()
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("l.png")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    return path


def cut_tar(made):
    path = made.tar()
    path.write_bytes(path.read_bytes()[:9000])
    return path


def empty_tar(made):
    return made.tar(numbers=())


def mixed_labels(made):
    return made.tar(label=lambda number: "bee" if number % 3 else "0")


def no_column(made):
    return made.parquet(image="picture")


def no_label_column(made):
    return made.parquet(label="kind")


def other_column(made):
    return made.parquet(image="image", label="label")


def cut_parquet(made):
    path = made.parquet()
    path.write_bytes(path.read_bytes()[:300])
    return path


def nulls(made):
    import pyarrow as pa
    from pyarrow import parquet

    path = made.folder / "nulls.parquet"
    parquet.write_table(pa.table({"image": [encoded(zeros(6, 6)), None], "label": [0, None]}), path)
    return path


def float_column(made):
    import pyarrow as pa
    from pyarrow import parquet

    path = made.folder / "floats.parquet"
    parquet.write_table(pa.table({"image": [encoded(zeros(6, 6))], "label": [0.5]}), path)
    return path


def no_images(made):
    import pyarrow as pa
    from pyarrow import parquet

    path = made.folder / "words.parquet"
    parquet.write_table(pa.table({"image": ["a.png", "b.png"], "label": [0, 1]}), path)
    return path


def huge(made):
    return made.tar(label=lambda number: "9" * 30 if number == 2 else str(number % 3))


def negative(made):
    return made.npz(image=made.values, label=made.labels - 1)


def above(made):
    return made.parquet()


def gap(made):
    return made.npz(image=made.values, label=made.labels * 2)


def lonely(made):
    return made.npz(image=made.values, label=np.where(np.arange(30) == 3, 1, 0))


def latents(dtype=np.float16, bad=False, shape=(30, 4, 3, 3)):
    values = np.ones(shape, dtype)
    if bad:
        values[7, 0, 0, 0] = np.inf

    def make(made):
        return made.npy(values=values)

    return make


LATENTS = {"kind": "latents"}


@pytest.mark.parametrize(
    ("make", "values", "parts"),
    [
        (one_class, {}, ["source: ", "one class, 'ant'"]),
        (no_class, {}, ["outside a class folder", "a.png"]),
        (empty_class, {}, ["without images", "dog"]),
        (loop, {}, ["symbolic link", "again"]),
        (loop_of_links, {}, ["symbolic link", "a.png"]),
        (link_to_nothing, {}, ["symbolic link to nothing", "moved.png", "remove it"]),
        (pipe, {}, ["pipe", "pipe.png", "remove it"]),
        (sizes, {}, ["size: ", "6 x 6", "9 x 9", "large.png", "give size: 6"]),
        (channels, {}, ["convert: ", "grey.png", "convert: grey or rgb"]),
        (wide, {}, ["size: ", "4 x 6", "give size: 4"]),
        (floats, {}, ["x.tif", "floats"]),
        (no_file, {}, ["source: ", "absent", "does not exist"]),
        (empty_folder, {}, ["source: ", "without images"]),
        (empty_file, {}, ["empty.tar", "empty file"]),
        (one_image, {}, ["source: ", "one.png", "class folders"]),
        (unknown, {}, ["source: ", "data.csv", ".parquet"]),
        (short_labels, {}, ["30 images", "20 labels"]),
        (no_labels, {}, ["no labels", "train-labels-idx1-ubyte"]),
        (wrong_magic, {}, ["train-images-idx", "0x00000d03", "0x00000804"]),
        (cut_idx, {}, ["train-images-idx", "truncated"]),
        (cut_gz, {}, ["train-images-idx", "truncated"]),
        (huge_idx, {}, ["train-images-idx", "truncated"]),
        (pickled, {}, ["all.npz", "pickled"]),
        (pickle_file, {}, ["all.npy", "pickled"]),
        (not_numpy, {}, ["all.npz", "not an array of NumPy", "b'versio'", "numpy.savez"]),
        (cut_npz, {}, ["all.npz", "truncated"]),
        (nan, {}, ["all.npz", "NaN", "uint8"]),
        (other_shape, {}, ["all.npz", "[30, 6, 6, 5]", "1 or 3 channels"]),
        (float_labels, {}, ["all.npz", "labels float64"]),
        (other_lengths, {}, ["all.npz", "30 images", "20 labels"]),
        (no_npy_labels, {}, ["source: ", "all.labels.npy"]),
        (unlabelled, {}, ["all.tar", "without a label", "a/x.png", "a/x.cls"]),
        (without_image, {}, ["all.tar", "without an image", "y.cls"]),
        (outside, {}, ["all.tar", "outside the archive", "../x.png"]),
        (linked, {}, ["all.tar", "link", "l.png"]),
        (cut_tar, {}, ["all.tar", "truncated"]),
        (empty_tar, {}, ["all.tar", "no images"]),
        (mixed_labels, {}, ["label_key: ", "numbers", "names"]),
        (no_column, {}, ["all.parquet", "image_key", "picture"]),
        (no_label_column, {}, ["all.parquet", "label_key", "kind"]),
        (other_column, {"image_key": "imgae"}, ["all.parquet", "'imgae'", "did you mean 'image'"]),
        (cut_parquet, {}, ["all.parquet", "Parquet"]),
        (nulls, {}, ["nulls.parquet: row 1", "null"]),
        (float_column, {}, ["floats.parquet", "'label'", "double", "label_key"]),
        (no_images, {}, ["words.parquet", "'image'", "string"]),
        (huge, {}, ["002.png", "label 9999", "outside the classes 0 to 65535"]),
        (negative, {}, ["label -1", "outside the classes 0 to 1"]),
        (above, {"classes": ["a", "b"]}, ["label 2", "outside the classes 0 to 1", "classes"]),
        (gap, {}, ["source: no training images", "(1, 3)"]),
        (lonely, {}, ["validation: no held-out images", "(1)"]),
        (latents(bad=True), LATENTS, ["image 7", "not finite"]),
        (latents(np.int32), LATENTS, ["all.npy", "int32", "float16 [N, C, S, S]"]),
        (latents(shape=(30, 4, 3, 5)), LATENTS, ["all.npy", "[30, 4, 3, 5]"]),
        (latents(), {}, ["all.npy", "float16", "kind: latents"]),
        (above, LATENTS, ["kind: latents", "parquet"]),
        (other_lengths, {"store": "encoded"}, ["store: encoded", "all.npz"]),
    ],
)
def test_bad_sources(layouts, tmp_path, make, values, parts):
    path = make(layouts)
    found = problems_of(path, tmp_path / "cache", **values)
    assert any(all(part in line for part in parts) for line in found), found


def test_damaged_latents_are_not_to_be_skipped(layouts, tmp_path):
    """`skip_damaged` is refused for latents, so that no message may advise it."""
    (line,) = problems_of(latents(bad=True)(layouts), tmp_path / "cache", kind="latents")
    assert line.endswith("encode it again")


def test_a_name_is_a_source():
    assert parse(ImageDataConfig, "digits") == parse(ImageDataConfig, {"source": "digits"}) == ImageDataConfig()


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"size": 0}, ["size: ", "(given 0)"]),
        ({"crop": 1.5}, ["crop: ", "1.5"]),
        ({"convert": "RGB"}, ["convert: ", "'RGB'", "rgb"]),
        ({"validation": "x", "validation_fraction": 0.1}, ["validation: ['x'], validation_fraction: 0.1", "keep one"]),
        ({"classes": ["a"]}, ["classes: ['a']", "two"]),
        ({"classes": ["a", "a"]}, ["classes: ['a', 'a']", "different"]),
        ({"kind": "latents", "size": 32}, ["size: 32", "latents"]),
        ({"sauce": "digits"}, ["sauce: ", "'source'"]),
        ({"source": 3}, ["source: 3"]),
    ],
)
def test_bad_values(values, parts):
    with pytest.raises(ConfigError) as error:
        parse(ImageDataConfig, values)
    assert any(all(part in line for part in parts) for line in error.value.problems), error.value.problems


def test_all_problems_come_at_once(layouts, tmp_path):
    add(layouts.folder / "data.csv", b"1,2")
    absent = tmp_path / "absent"
    values = {"validation": [str(layouts.folder / "data.csv"), ""]}
    assert len(problems_of(absent, tmp_path / "cache", **values)) == 3
    path = layouts.folders()
    add(path / "bee" / "large.png", encoded(zeros(9, 9)))
    add(path / "cat" / "empty.png")
    found = problems_of(path, tmp_path / "cache")
    assert [line.partition(":")[0].rpartition("/")[2] for line in found] == ["empty.png", "convert", "size"]


def test_a_missing_source_hides_no_damage_of_the_others(layouts, tmp_path, monkeypatch):
    path, held, absent = layouts.folders(), layouts.folders("held"), tmp_path / "absent"
    add(path / "cat" / "empty.png")
    add(held / "cat" / "text.png", b"no image")
    values = {"validation": [str(absent), str(held)]}
    found = problems_of(path, tmp_path / "cache", **values)
    assert [any(name in line for line in found) for name in ("absent", "empty.png", "text.png")] == [True] * 3
    with pytest.raises(ConfigError, match="empty.png"):
        check_images(parse(ImageDataConfig, {"source": str(path), **values}), tmp_path / "cache")
    array = layouts.folder / "pixels.npy"
    found = problems_of([str(path), str(array)], tmp_path / "cache", kind="latents")
    assert len(found) == 2 and not any("empty.png" in line for line in found)  # its kind is the problem
    monkeypatch.setattr(corpus, "DECODED", 100)
    [line] = problems_of(path, tmp_path / "cache", **values)  # reading large sources takes too long
    assert "absent" in line


def test_images_are_checked_with_other_problems_of_a_training(layouts, tmp_path, monkeypatch):
    path = layouts.folders()
    add(path / "bee" / "empty.png")

    def problems(told=(), **values):
        return train.ImageObjective.source_problems({"data": values}, tmp_path / "cache", told)

    values = {"source": str(path), "unknown": 1}
    [line] = problems(**values)
    assert "empty.png: is empty" in line and problems([line], **values) == []
    assert problems(source="absent")[0].startswith("data.source: 'absent'")
    assert problems(source="absent", size=0) == []  # the caller reports it
    monkeypatch.setattr(train, "DECODED", 100)
    assert problems(**values) == []  # large sources take too long
    training = tmp_path / "train.yaml"
    training.write_text(
        "objective: images\nmodel: vit-8px\nbatch_size: 15\naugment: {mixup: 1.0}\ndata: {source: absent}"
    )
    result = CliRunner().invoke(app, ["train", str(training), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 2 and "batch_size: 15" in result.stderr and "data.source: 'absent'" in result.stderr
    training.write_text("objective: images\nmodel: vit-8px\nsteps: 1\naugment: deit\nrun: {device: cpu}")
    result = CliRunner().invoke(app, ["train", str(training), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 2 and "augment.kind: deit needs RGB" in result.stderr
    assert not list((tmp_path / "runs").glob("[!c]*"))  # the cache, and no run


def test_held_out_images_that_do_not_fit(layouts, tmp_path):
    """Held-out images must have all classes, and not be all of the training images."""
    path = layouts.folders()
    for name, numbers, message in (("two", range(2), "validation: .*cat"), ("all", range(30), "source: all of its")):
        held = layouts.folders(name, numbers)
        with pytest.raises(ConfigError, match=message):
            prepare_images(parse(ImageDataConfig, {"source": str(path), "validation": str(held)}), tmp_path / "cache")
    other = layouts.folders("other", range(3))
    (other / "cat").rename(other / "cow")
    config = parse(ImageDataConfig, {"source": str(path), "validation": str(other), "classes": ["ant", "bee", "cat"]})
    with pytest.raises(ConfigError, match="classes: label 'cow'"):
        prepare_images(config, tmp_path / "cache")


def test_cmyk_and_16_bits_are_converted(layouts, tmp_path):
    path = layouts.folders()
    add(path / "bee" / "ink.jpg", cmyk())
    add(path / "bee" / "deep.png", encoded(np.full((6, 6), 65535, np.uint16)))
    corpus = prepare_images(parse(ImageDataConfig, {"source": str(path), "convert": "rgb"}), tmp_path / "cache")
    assert len(corpus.train) + len(corpus.validation) == 32
