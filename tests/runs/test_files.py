"""Folders that are written whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from linnet.config import ConfigError
from linnet.data.parts import write_json
from linnet.runs import RunFolder
from linnet.runs.files import UNFINISHED, new_folder, write_atomic

FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_SAFE = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
WRITERS = [write_atomic, lambda path, text: write_json(path, json.loads(text))]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("error", [FULL, FULL_SAFE, KeyboardInterrupt(), ConfigError(["key: value"])])
def test_nothing_stays_of_a_folder_that_fails(error, there, tmp_path):
    path = tmp_path / "out"
    if there:
        path.mkdir()
    raised = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigError
    with pytest.raises(raised) as caught, new_folder(path, "test") as folder:
        (folder / "file").write_text("half")
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("half")
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


@pytest.fixture
def left(tmp_path):
    """Returns a folder as a killed command leaves it."""
    path = tmp_path / "out"
    (path / UNFINISHED / "below").mkdir(parents=True)
    (path / UNFINISHED / "below" / "file").write_text("half")
    return path


@pytest.mark.system
def test_a_killed_command_leaves_nothing_that_looks_whole(tmp_path):
    code = (
        "import os, pathlib, signal, sys\nfrom linnet.runs.files import new_folder\n"
        "with new_folder(pathlib.Path(sys.argv[1]), 'test') as folder:\n"
        "    (folder / 'file').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == -signal.SIGKILL
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [UNFINISHED]
    with new_folder(tmp_path / "out", "test"):
        pass


def test_a_killed_command_can_run_again(left):
    with pytest.raises(ConfigError, match=f"{left}: .*config.yaml.*killed"):
        RunFolder.open(left)
    with new_folder(left, "test") as folder:
        assert not list(folder.iterdir())
        (folder / "file").write_text("whole")
        with pytest.raises(ConfigError, match="another process"), new_folder(left, "test"):
            pass
    assert [(entry.name, entry.read_text()) for entry in left.iterdir()] == [("file", "whole")]


def test_what_a_person_put_beside_a_killed_command_stays(left):
    (left / "mine").write_text("mine")
    with pytest.raises(ConfigError, match=f"{left}: .*{UNFINISHED}.* other files"), new_folder(left, "test"):
        pass
    assert {entry.name for entry in left.iterdir()} == {UNFINISHED, "mine"}


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_with_the_name_of_an_unfinished_file_is_not_followed(tmp_path, write):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / f".a.json.{os.getpid()}.tmp").symlink_to(other)
    write(tmp_path / "a.json", "{}")
    assert other.read_text() == "mine" and json.loads((tmp_path / "a.json").read_text()) == {}
    assert sorted(os.listdir(tmp_path)) == ["a.json", "other"]


@pytest.mark.parametrize("write", WRITERS)
def test_an_error_while_writing_names_the_file(tmp_path, write, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as error:
        write(tmp_path / "a.json", "{}")
    assert error.value.filename == str(tmp_path / "a.json") and not list(tmp_path.iterdir())
