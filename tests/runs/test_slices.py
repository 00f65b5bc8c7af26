"""Files of slices: any part of a tensor is read from any cut of it, and a missing part is an error."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from linnet.runs.slices import Reader, Slice, write


def edges(draw, size):
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    return [0, *sorted(inner), size]


@st.composite
def cuts(draw):
    """A shape, its cut into a grid of boxes (some empty), and one more box."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    grid = [edges(draw, size) for size in shape]
    begin = [draw(st.integers(0, size)) for size in shape]
    return shape, grid, begin, [draw(st.integers(start, size)) for start, size in zip(begin, shape, strict=True)]


@settings(max_examples=60)
@given(cuts())
def test_any_part_is_read_from_any_cut(tmp_path_factory, cut):
    shape, grid, begin, end = cut
    folder, whole = tmp_path_factory.mktemp("slices"), torch.randn(shape, dtype=torch.float64)
    boxes = [[]]
    for dim in grid:
        boxes = [[*box, (a, b)] for box in boxes for a, b in zip(dim, dim[1:], strict=False)]
    files = []
    for number, box in enumerate(boxes):
        part = whole[tuple(slice(a, b) for a, b in box)]
        if part.numel():
            files.append(folder / f"{number}.safetensors")
            write(files[-1], {"x": Slice(part, tuple(a for a, _ in box), tuple(shape))})
    reader = Reader(files)
    assert reader.shapes == {"x": tuple(shape)} and torch.equal(reader.whole("x"), whole)
    expected = whole[tuple(map(slice, begin, end))]
    found = torch.full_like(expected, -1.0)
    reader.fill("x", Slice(found, tuple(begin), tuple(shape)))
    assert torch.equal(found, expected)
    if len(files) > 1:
        with pytest.raises(ValueError, match="x: the files hold"):
            Reader(files[:-1]).fill("x", Slice(torch.empty(shape, dtype=whole.dtype), (0,) * len(shape), tuple(shape)))


def test_types_sums_and_damage(tmp_path):
    types = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
    types += [torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(dtype): torch.arange(5).to(dtype) for dtype in types} | {"turned": torch.randn(3, 2).t()}
    total = write(tmp_path / "a", {name: Slice.whole(tensor) for name, tensor in tensors.items()})
    data = (tmp_path / "a").read_bytes()
    assert total == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    reader = Reader([tmp_path / "a"])
    for name, tensor in tensors.items():
        read = reader.whole(name)
        assert read.dtype == tensor.dtype and torch.equal(read.double(), tensor.double())
    (tmp_path / "b").write_bytes(data[:40])
    with pytest.raises(SafetensorError, match="/b: "):
        Reader([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    "offsets",
    ["[]", "[" * 100_000, '{"x": []}', '{"x": {"saved_offsets": ["1"]}}', '{"x": {"saved_offsets": [-2]}}']
    + ['{"x": {"saved_offsets": [1, 2]}}', '{"x": {"saved_offsets": [1125899906842624]}}'],
)
def test_offsets_of_somebody_else_are_damage_and_take_no_memory(tmp_path, offsets):
    save_file({"x": torch.zeros(2)}, tmp_path / "a", metadata={"DCP_SHARDING_INFO": offsets})
    save_file({"x": torch.zeros(1)}, tmp_path / "b")
    with pytest.raises(ValueError, match="damaged|numbers|shorter"):
        Reader([tmp_path / "a", tmp_path / "b"]).whole("x")
