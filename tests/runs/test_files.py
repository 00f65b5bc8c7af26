"""Folders that are written whole or not at all."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from linnet.config import ConfigError
from linnet.data.parts import write_json
from linnet.runs import RunFolder
from linnet.runs.files import UNFINISHED, new_folder, save_tensors, write_atomic

FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_SAFE = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
ROOT = str(Path(__file__).parents[2])
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
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ROOT})
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


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_command_that_is_killed_while_its_files_move_can_run_again(tmp_path, moves):
    code = f"""if True:
        import os, pathlib, signal, sys
        from linnet.runs import files
        done, move = [], os.replace
        def replace(source, target):
            if pathlib.Path(source).suffix != ".tmp":
                len(done) < {moves} or os.kill(os.getpid(), signal.SIGKILL)
                done.append(target)
            move(source, target)
        os.replace = replace
        with files.new_folder(pathlib.Path(sys.argv[1]), "test") as folder:
            for name in ("a", "b", "config.json"):
                (folder / name).write_text("first")
    """
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", code, str(out)], env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == -signal.SIGKILL and len(os.listdir(out)) == 1 + moves
    with new_folder(out, "test") as folder:
        assert os.listdir(out) == [UNFINISHED]
        (folder / "b").write_text("second")
    assert os.listdir(out) == ["b"] and (out / "b").read_text() == "second"


def test_a_file_of_a_person_stays_beside_files_that_were_moving(left):
    (left / UNFINISHED / ".names").write_bytes(b"a\0below")
    (left / "a").write_text("moved")
    (left / "below").write_text("mine")  # still in the unfinished folder, so no command can have moved it
    with pytest.raises(ConfigError, match="other files"), new_folder(left, "test"):
        pass
    assert (left / "below").read_text() == "mine"


def ended() -> int:
    """Returns the number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


TENSORS = {"a": torch.arange(6.0)}
SAVERS = [write_atomic, lambda path, _: save_tensors(path, TENSORS)]


@pytest.mark.parametrize("write", SAVERS)
def test_what_killed_processes_were_writing_is_removed(tmp_path, write):
    (tmp_path / f".a[1].{ended()}.tmp").write_text("half")
    (folder := tmp_path / f".a[1].{ended()}.tmp").mkdir()
    (folder / ".tmpAbCdEf").write_text("half")
    others = [f".a[1].{os.getppid()}.tmp", f".b.{ended()}.tmp", f".a[1].{'9' * 30}.tmp", ".a[1].copy.tmp"]
    for name in others:
        (tmp_path / name).write_text("half")
    write(tmp_path / "a[1]", "text")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "a[1]"])


@pytest.mark.parametrize("write", SAVERS)
def test_what_a_process_of_another_machine_is_writing_stays(tmp_path, write):
    half = tmp_path / f".a.{ended()}.tmp"
    with open(half, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(tmp_path / "a", "text")
    assert sorted(os.listdir(tmp_path)) == sorted([half.name, "a"])


@pytest.mark.parametrize("write", SAVERS)
def test_a_written_file_has_the_permissions_that_the_umask_leaves(tmp_path, write):
    before = os.umask(0o027)
    try:
        write(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_tensors_that_do_not_fit_leave_the_earlier_file(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise FULL_SAFE

    save_tensors(path := tmp_path / "a", TENSORS, {"format": "pt"})
    before = path.read_bytes()
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(SafetensorError):
        save_tensors(path, {"a": torch.zeros(3)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a"]
    assert torch.equal(load_file(path)["a"], TENSORS["a"])


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


@pytest.mark.parametrize("write", WRITERS)
def test_an_error_before_writing_names_the_file_too(tmp_path, write):
    with pytest.raises(FileNotFoundError) as error:
        write(tmp_path / "none" / "a.json", "{}")
    assert error.value.filename == str(tmp_path / "none" / "a.json")
