"""Small sets of real image files, in all layouts that Linnet reads."""

import gzip
import io
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def encoded(values: np.ndarray, kind: str = "PNG", **options) -> bytes:
    """A file with pixels uint8 [H, W] or [H, W, 3]."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind, **options)
    return file.getvalue()


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">I{values.ndim}I", 0x800 + values.ndim, *values.shape) + values.tobytes()


class Layouts:
    """The same 30 images of 6 x 6 in three classes, written in one layout after another."""

    def __init__(self, folder, channels: int = 3):
        self.folder = folder
        shape = (30, 6, 6, 3) if channels == 3 else (30, 6, 6)
        self.values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        self.labels = np.arange(30) % 3

    def folders(self, name: str = "folders", numbers=range(30)):
        for number in numbers:
            path = self.folder / name / CLASSES[self.labels[number]] / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(self.values[number]))
        return self.folder / name

    def parquet(self, name: str = "all.parquet", numbers=range(30), image="image", label="label", names=None):
        import json

        import pyarrow as pa
        from pyarrow import parquet

        rows = [{"bytes": encoded(self.values[number]), "path": f"{number}.png"} for number in numbers]
        table = pa.table({image: rows, label: [int(self.labels[number]) for number in numbers]})
        if names:
            feature = {"info": {"features": {label: {"_type": "ClassLabel", "names": list(names)}}}}
            table = table.replace_schema_metadata({"huggingface": json.dumps(feature)})
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path)
        return path

    def tar(self, name: str = "all.tar", numbers=range(30), label=lambda number: str(number % 3), members=()):
        with tarfile.open(self.folder / name, "w") as archive:
            files = [(f"{number:03d}.png", encoded(self.values[number])) for number in numbers]
            files += [(f"{number:03d}.cls", label(number).encode()) for number in numbers]
            for member, data in [*files, *members]:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return self.folder / name

    def idx(self, name: str = "idx", part: str = "train", numbers=slice(None), end: str = ".gz"):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        for word, values in (("images", self.values), ("labels", self.labels.astype(np.uint8))):
            data = idx(values[numbers])
            path = folder / f"{part}-{word}-idx{values.ndim}-ubyte{end}"
            path.write_bytes(gzip.compress(data) if end else data)
        return folder

    def npz(self, name: str = "all.npz", **arrays):
        np.savez(self.folder / name, **(arrays or {"image": self.values, "label": self.labels}))
        return self.folder / name

    def npy(self, name: str = "all.npy", values=None, labels=None):
        np.save(self.folder / name, self.values if values is None else values)
        np.save(self.folder / name.replace(".npy", ".labels.npy"), self.labels if labels is None else labels)
        return self.folder / name


@pytest.fixture
def layouts(tmp_path):
    return Layouts(tmp_path)


@pytest.fixture
def grey(tmp_path):
    return Layouts(tmp_path, channels=1)
