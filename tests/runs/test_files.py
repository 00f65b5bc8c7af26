"""Folders that are written whole or not at all."""

import errno

import pytest
from safetensors import SafetensorError

from linnet.config import ConfigError
from linnet.runs.files import new_folder

FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_SAFE = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("error", [FULL, FULL_SAFE, KeyboardInterrupt(), ConfigError(["key: value"])])
def test_nothing_stays_of_a_folder_that_fails(error, there, tmp_path):
    path = tmp_path / "out"
    if there:
        path.mkdir()
    raised = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigError
    with pytest.raises(raised) as caught, new_folder(path, "test"):
        (path / "file").write_text("half")
        (path / "below").mkdir()
        (path / "below" / "file").write_text("half")
        raise error
    assert path.exists() == there and not list(tmp_path.rglob("file"))
    if error in (FULL, FULL_SAFE):
        assert str(path) in str(caught.value) and "disk is full" in str(caught.value)


def test_what_is_there_already_stays(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "file", tmp_path / "broken"):
        with pytest.raises(ConfigError, match=f"{path}: .*empty folder"), new_folder(path, "test"):
            pass
    with pytest.raises(ConfigError, match="below: cannot be made"), new_folder(tmp_path / "file" / "below", "test"):
        pass
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
