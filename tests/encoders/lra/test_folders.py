"""Published folders: each layout, ids against the text, held-out rows, and everything that may be missing."""

import numpy as np
import pytest
import torch
from listops_text import decode

from linnet.config import ConfigError
from linnet.encoders.lra import END, UNKNOWN, LraDataConfig, check_lra, lra_content, prepare_lra
from linnet.encoders.lra.listops import generate_listops
from linnet.encoders.train import augment_lra

IMAGES = pytest.importorskip("PIL.Image")


def read(source, cache, task, **values):
    return prepare_lra(LraDataConfig(task=task, source=str(source), **values), cache)


def texts(split, number: int) -> list[str]:
    """The texts of a row, with ? for unknown characters."""
    ids = split.rows(np.array([number])).inputs[0]
    symbols = split.task.symbols
    return [
        "".join("?" if one == UNKNOWN else symbols[one - 3] for one in text if one > END)
        for text in ids.reshape(-1, ids.shape[-1]).tolist()
    ]


def test_listops_tables_give_the_ids_of_generated_trees(tmp_path):
    folder = tmp_path / "release" / "listops-1000"
    folder.mkdir(parents=True)
    shard = generate_listops("full", "train", 0, 3, 0)
    ends = np.cumsum(shard.lengths)
    rows = [shard.values[end - length : end] for end, length in zip(ends, shard.lengths, strict=True)]
    for name in ("train", "val", "test"):
        lines = [f"( ( {decode(row)} ) )\t{label}" for row, label in zip(rows, shard.labels, strict=True)]
        (folder / f"basic_{name}.tsv").write_text("\n".join(["Source\tTarget", *lines]) + "\n")
    corpus = read(tmp_path / "release", tmp_path / "cache", "listops")
    assert corpus.task.num_tokens == 18 and len(corpus.validation) == 3
    for number, row in enumerate(rows):
        found = corpus.test.rows(np.array([number]))
        assert np.array_equal(found.inputs[0], row) and found.labels[0] == shard.labels[number]


def review(label: str, split: str, number: int) -> str:
    return f"{label} {split} " + f"{number:02d} " * 8 + "é"  # characters that occur fewer than 15 times are unknown


def write_reviews(folder, count: int = 40) -> None:
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            (folder / split / label).mkdir(parents=True)
            for number in range(count // 2):
                (folder / split / label / f"{number}_1.txt").write_text(review(label, split, number), "utf-8")


def test_reviews_are_characters_and_a_tenth_is_held_out(tmp_path):
    write_reviews(tmp_path / "aclImdb")
    (tmp_path / "aclImdb" / "train" / "pos" / "0_1.txt").write_text("Q" + "a" * 5000)
    corpus = read(tmp_path, tmp_path / "cache", "text")
    assert [len(corpus.split(name)) for name in ("train", "validation", "test")] == [36, 4, 40]
    symbols = corpus.task.symbols
    assert "é" in symbols and "Q" not in symbols and corpus.task.num_tokens == 3 + len(symbols)
    assert list(symbols) == sorted(symbols)
    assert [texts(corpus.test, number)[0] for number in (0, 39)] == [review("neg", "test", 0), review("pos", "test", 9)]
    assert corpus.test.labels.tolist() == [0] * 20 + [1] * 20
    every = [texts(split, number)[0] for split in (corpus.train, corpus.validation) for number in range(len(split))]
    assert len(set(every)) == 40
    long = max(every, key=len)
    assert long == "?" + "a" * 4094 and max(corpus.train.lengths.max(), corpus.validation.lengths.max()) == 4096
    published = read(tmp_path, tmp_path / "cache", "text", selection="test")
    assert len(published.train) == 40 and published.validation is published.test
    with pytest.raises(ConfigError, match="selection"):
        read(corpus.folder, tmp_path, "text", selection="test")


def test_reviews_as_tables_and_parquet(tmp_path):
    write_reviews(tmp_path / "folders")
    expected = read(tmp_path / "folders", tmp_path / "cache", "text")
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    (tmp_path / "tables").mkdir()
    (tmp_path / "parquet").mkdir()
    for split in ("train", "test"):
        rows = [
            (path.read_text("utf-8"), int(label == "pos"))
            for label in ("neg", "pos")
            for path in sorted((tmp_path / "folders" / split / label).iterdir())
        ]
        lines = "".join(f"{label}\t{text}\n" for text, label in rows)
        (tmp_path / "tables" / f"{split}.tsv").write_text("label\ttext\n" + lines, "utf-8")
        table = arrow.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
        parquet.write_table(table, tmp_path / "parquet" / f"{split}-00000-of-00001.parquet")
    for form in ("tables", "parquet"):
        corpus = read(tmp_path / form, tmp_path / "cache", "text")
        for name in ("train", "validation", "test"):
            assert torch.equal(
                corpus.split(name).rows(np.arange(4)).inputs, expected.split(name).rows(np.arange(4)).inputs
            )


def write_pairs(folder) -> None:
    folder.mkdir()
    for name in ("train", "eval", "test"):
        lines = [
            f'{number % 2}.0\tid{number}\tid\t"a ""quoted"" {name}"\t{"b" * (number * 2000)}' for number in range(3)
        ]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")


def test_pairs_are_two_texts_cut_at_4000(tmp_path):
    write_pairs(tmp_path / "tsv_data")
    corpus = read(tmp_path, tmp_path / "cache", "retrieval")
    assert corpus.task.kind == "pairs" and corpus.task.num_tokens == 3 + len(set('a "quoted" train' + "b"))
    rows = corpus.train.rows(np.array([0, 1, 2]))
    assert rows.inputs.shape == (3, 2, 4000) and rows.lengths.tolist() == [[17, 1], [17, 2001], [17, 4000]]
    assert rows.labels.tolist() == [0, 1, 0]
    assert texts(corpus.train, 1) == ['a "quoted" train', "b" * 2000]
    assert rows.inputs[2, 1, -1] == END
    assert texts(corpus.test, 0)[0] == 'a "quoted" te?t'


def write_pathfinder(folder, count: int = 30) -> list[np.ndarray]:
    images = list(np.random.default_rng(0).integers(0, 256, (count, 32, 32)).astype(np.uint8))
    (folder / "metadata").mkdir(parents=True)
    for number, image in enumerate(images):
        part = folder / "imgs" / str(number % 2)
        part.mkdir(parents=True, exist_ok=True)
        IMAGES.fromarray(image).save(part / f"sample_{number}.png")
    for part in (0, 1):
        lines = [f"imgs/{part} sample_{n}.png {n} {n // 2 % 2} 1.0 14 4 2 0.5 1 1" for n in range(part, count, 2)]
        (folder / "metadata" / f"{part}.npy").write_text("\n".join(lines) + "\n")
    return images


def test_images_of_a_released_folder(tmp_path):
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    images = write_pathfinder(folder)
    corpus = read(tmp_path, tmp_path / "cache", "pathfinder")
    assert [len(corpus.split(name)) for name in ("train", "validation", "test")] == [24, 3, 3]
    order = [*range(0, 30, 2), *range(1, 30, 2)]
    first = torch.randperm(30, generator=torch.Generator().manual_seed(42))[0]
    rows = corpus.train.rows(np.array([0]))
    assert np.array_equal(rows.inputs[0, 0], images[order[first]])
    assert rows.labels[0] == order[first] // 2 % 2 and corpus.task.grid == (32, 32)
    before = lra_content(LraDataConfig(task="pathfinder", source=str(folder)))
    IMAGES.fromarray(images[1]).save(folder / "imgs" / "0" / "sample_0.png")
    assert lra_content(LraDataConfig(task="pathfinder", source=str(folder))) != before


def test_cifar_is_grey_or_coloured(tmp_path):
    rng = np.random.default_rng(0)
    data = {part: rng.integers(0, 256, (20, 32, 32, 3)).astype(np.uint8) for part in ("train", "test")}
    arrays = {f"x_{part}": values for part, values in data.items()}
    np.savez(tmp_path / "cifar.npz", **arrays, **{f"y_{part}": np.arange(20) % 10 for part in data})
    grey, colour = (read(tmp_path, tmp_path / "cache", task) for task in ("image", "image-as-published"))
    assert len(grey.train) == 18 and len(grey.validation) == 2 and grey.task.augment == "none"
    found = grey.test.rows(np.arange(20)).inputs[:, 0].numpy().astype(float)
    assert np.abs(found - data["test"] @ [0.299, 0.587, 0.114]).max() <= 1
    assert colour.task.channels == 3 and colour.task.augment == "crop_flip"
    rows = colour.test.rows(np.arange(20))
    assert np.array_equal(rows.inputs, data["test"].transpose(0, 3, 1, 2)) and rows.labels.tolist() == [*range(10)] * 2


def test_labels_beyond_those_of_cifar10_are_refused(tmp_path):
    """CIFAR-100 has the same form."""
    images = np.zeros((3, 32, 32, 3), dtype=np.uint8)
    for label in (10, -1):
        folder = tmp_path / f"labels{label}"
        folder.mkdir()
        labels = np.array([0, 1, label])
        np.savez(folder / "cifar.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
        with pytest.raises(ConfigError, match=f"cifar.npz.* has the class {label}; give labels 0 to 9"):
            read(folder, tmp_path / "cache", "image")


def test_augmented_images_have_mirrored_borders():
    images = torch.arange(64 * 2 * 8 * 8, dtype=torch.int64).reshape(64, 2, 8, 8)
    found = augment_lra(images, seed=0, position=3, padding=4)
    assert torch.equal(found[16:32], augment_lra(images[16:32], seed=0, position=3, first=16, rows=64))
    assert not torch.equal(found, augment_lra(images, seed=0, position=4))
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)), mode="symmetric")
    shifts, flips = set(), 0
    for image, around in zip(found.numpy(), padded, strict=True):
        cuts = {(y, x): around[:, y : y + 8, x : x + 8] for y in range(9) for x in range(9)}
        match = [(place, flip) for place, cut in cuts.items() for flip in (1, -1) if (cut[..., ::flip] == image).all()]
        assert match
        shifts.add(match[0][0])
        flips += match[0][1] < 0
    assert len(shifts) > 30 and 15 < flips < 50


@pytest.mark.parametrize(
    ("task", "problems"),
    [
        ("listops", ["basic_train.tsv", "basic_val.tsv: has no column 'Target'", "basic_test.tsv"]),
        ("text", ["train.tsv: has no column 'text'", "train.tsv: has no column 'label'", "no test split"]),
        ("retrieval", ["train.tsv: no such file", "eval.tsv: its first line has 1 columns, not 5", "test.tsv"]),
        ("pathfinder", ["metadata", "imgs"]),
    ],
)
def test_all_that_is_missing_is_reported_together(tmp_path, task, problems):
    (tmp_path / "basic_val.tsv").write_text("Source\tLabel\n")
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("1.0 a b\n")
    (tmp_path / "train.tsv").write_text("review\tclass\n")
    with pytest.raises(ConfigError) as error:
        check_lra(LraDataConfig(task=task, source=str(tmp_path)), tmp_path / "cache")
    assert len(error.value.problems) == len(problems)
    for problem, line in zip(problems, error.value.problems, strict=True):
        assert problem in line
    assert not (tmp_path / "cache").exists()


def test_damaged_rows_are_named(tmp_path):
    write_pairs(tmp_path / "aan")
    path = tmp_path / "aan" / "new_aan_pairs.test.tsv"
    path.write_text("1.0\ta\tb\tc\td\n2.0\ta\tb\tc\td\n")
    with pytest.raises(ConfigError, match="new_aan_pairs.test.tsv: line 2: the label '2.0'"):
        read(tmp_path / "aan", tmp_path / "cache", "retrieval")
    write_pathfinder(tmp_path / "images", 4)
    (tmp_path / "images" / "imgs" / "0" / "sample_2.png").write_bytes(b"")
    with pytest.raises(ConfigError, match="sample_2.png: is empty"):
        read(tmp_path / "images", tmp_path / "cache", "pathfinder")
    (tmp_path / "images" / "imgs" / "0" / "sample_2.png").unlink()
    with pytest.raises(ConfigError, match="sample_2.png: no such image"):
        read(tmp_path / "images", tmp_path / "cache", "pathfinder")
    for source, size, keys in (
        (tmp_path / "none", "full", ["source"]),
        (tmp_path / "aan", "reduced", ["size", "source", "source", "source"]),  # and none of its three files
    ):
        with pytest.raises(ConfigError) as error:
            check_lra(LraDataConfig(task="listops", source=str(source), size=size), tmp_path)
        assert [line.partition(":")[0] for line in error.value.problems] == keys


def test_empty_splits_and_text_in_another_encoding_are_named(tmp_path):
    header, row = b"Source\tTarget\n", b"[MAX 1 2 ]\t2\n"
    cases = {"test split has no rows": header, "basic_test.tsv: is not UTF-8": header + b"\xff\t2\n"}
    for number, (message, content) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("train", "val", "test"):
            (folder / f"basic_{name}.tsv").write_bytes(content if name == "test" else header + row)
        with pytest.raises(ConfigError, match=message):
            read(folder, tmp_path / "cache", "listops")


@pytest.mark.parametrize("start", [0, 4])
def test_a_damaged_parquet_file_is_named_before_work(tmp_path, start):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for split in ("train", "test"):
        parquet.write_table(arrow.table({"text": ["a" * 99, "b"], "label": [0, 1]}), tmp_path / f"{split}.parquet")
    path = tmp_path / "test.parquet"
    path.write_bytes(path.read_bytes()[:start] + b"\xff" * 40 + path.read_bytes()[start + 40 :])
    if start == 0:
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="test.parquet: is not a readable Parquet file .*; make it again"):
        read(tmp_path, tmp_path / "cache", "text")


def test_pairs_in_another_encoding_are_named(tmp_path):
    write_pairs(tmp_path / "aan")
    path = tmp_path / "aan" / "new_aan_pairs.eval.tsv"
    path.write_bytes(path.read_bytes().replace(b"id0", b"\xff", 1))
    with pytest.raises(ConfigError, match="new_aan_pairs.eval.tsv: is not UTF-8"):
        check_lra(LraDataConfig(task="retrieval", source=str(tmp_path)), tmp_path / "cache")


def test_real_images(real_data, tmp_path):
    if not (real_data / "cifar10").is_dir():
        pytest.skip("no CIFAR-10 among the real data")
    pytest.importorskip("pyarrow")
    check_lra(LraDataConfig(task="image", source=str(real_data / "cifar10")), tmp_path)
