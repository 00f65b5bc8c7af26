"""Checkpoints are whole or not there, verified when read, and never unpickled."""

import errno
import json
import os
import re
import resource
import shutil

import pytest
import torch

from linnet.runs import CheckpointError, checkpoint, latest_good

TENSORS = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer": {"weight.step": torch.tensor(7.0), "rows": torch.ones(4, 2).t()},
}


def write(folder, step, keep=None):
    tensors = {"model": {"weight": torch.full((2, 3), float(step))}}
    return checkpoint.save(folder, step, tensors, {"step": step, "loss": 0.1 + 0.2}, keep)


def test_round_trip_is_exact(tmp_path):
    path = checkpoint.save(tmp_path, 100, TENSORS, {"losses": [0.1 + 0.2, 1e-300], "nested": {"a": None}})
    assert path.name == "step-00000100"
    assert {file.name for file in path.iterdir()} == {"model.safetensors", "optimizer.safetensors", "state.json"}
    tensors, meta = checkpoint.load(path)
    assert meta == {"losses": [0.1 + 0.2, 1e-300], "nested": {"a": None}}
    for group, named in TENSORS.items():
        assert set(tensors[group]) == set(named)
        for name, tensor in named.items():
            assert tensors[group][name].dtype == tensor.dtype
            assert torch.equal(tensors[group][name], tensor)


def test_reads_only_the_groups_asked_for(tmp_path):
    path = checkpoint.save(tmp_path, 1, TENSORS, {})
    (path / "optimizer.safetensors").unlink()
    assert set(checkpoint.load(path, ["model"])[0]) == {"model"}
    with pytest.raises(CheckpointError, match="optimizer.safetensors: .*missing"):
        checkpoint.load(path)


def test_keeps_the_last(tmp_path):
    for step in (10, 20, 100, 30):
        write(tmp_path, step, keep=2)
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-00000030", "step-00000100"]


def test_keeps_the_best_too(tmp_path):
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, step, {"model": {"weight": torch.ones(1)}}, {}, 1, best=min(step, 20))
    assert [checkpoint.step_of(path) for path in checkpoint.listed(tmp_path)] == [20, 40]


def test_writing_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 5)
    checkpoint.save(tmp_path, 5, {"model": {"weight": torch.zeros(1)}}, {"second": True})
    assert checkpoint.load(tmp_path / "step-00000005")[1] == {"second": True}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def damage_truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    return "model.safetensors: 91 bytes, but 96 were written"


def damage_flip(path):
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    return "model.safetensors: the contents changed"


def damage_missing(path):
    (path / "model.safetensors").unlink()
    return "model.safetensors: the file is missing"


def damage_state(path):
    file = path / "state.json"
    file.write_text(file.read_text()[:40])
    return "state.json: is damaged"


def damage_number(path):
    file = path / "state.json"
    state = json.loads(file.read_text())
    state["meta"]["step"] = 21
    file.write_text(json.dumps(state))
    return "state.json: the contents changed"


def damage_nested(path):
    (path / "state.json").write_text("[" * 100_000)
    return "state.json: is damaged"


def damage_folder(path):
    shutil.rmtree(path)
    path.write_text("")
    return "is a file"


def damage_files(path):
    (path / "state.json").unlink()
    (path / "state.json").mkdir()
    return "state.json: cannot be read"


def damage_forged(path):
    """As an editor leaves it who knows how state.json vouches for itself."""
    file = path / "state.json"
    state = json.loads(file.read_text())
    del state["self"]
    file.write_text(checkpoint._state_text(state | {"sha256": list(state["sha256"])}))
    return "state.json: is damaged: sha256"


DAMAGES = [
    damage_forged,
    damage_truncate,
    damage_flip,
    damage_missing,
    damage_state,
    damage_number,
    damage_nested,
    damage_folder,
]


@pytest.mark.parametrize("damage", [*DAMAGES, damage_files], ids=lambda f: f.__name__)
def test_damage_is_named_and_the_last_good_one_offered(tmp_path, damage):
    good, bad = write(tmp_path, 10), write(tmp_path, 20)
    message = damage(bad)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(bad)
    path, tensors, meta, problems = latest_good(tmp_path)
    assert path == good and meta["step"] == 10
    assert torch.equal(tensors["model"]["weight"], torch.full((2, 3), 10.0))
    assert len(problems) == 1 and message in problems[0] and str(bad) in problems[0]
    assert checkpoint.set_aside_after(tmp_path, good) == [bad.with_name("step-00000020.bad")]
    assert checkpoint.listed(tmp_path) == [good]
    write(tmp_path, 20)
    assert latest_good(tmp_path)[2]["step"] == 20


def test_files_in_the_place_of_folders(tmp_path):
    (tmp_path / "step-00000005").write_text("")
    write(tmp_path, 5)
    assert latest_good(tmp_path)[2]["step"] == 5
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints: is a file"):
        checkpoint.listed(tmp_path / "checkpoints")


def test_no_good_checkpoint(tmp_path):
    assert latest_good(tmp_path / "nowhere") == (None, {}, {}, [])
    damage_missing(write(tmp_path, 1))
    path, _, _, problems = latest_good(tmp_path)
    assert path is None and len(problems) == 1


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, call):
    good = write(tmp_path, 10)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match=r"step-00000020: .*\(0.0 MB") as caught:
            write(tmp_path, 20, keep=1)
    assert str(good) in str(caught.value)
    assert latest_good(tmp_path)[0] == good
    assert os.listdir(tmp_path) == [good.name]


def test_a_file_that_does_not_fit_leaves_the_previous_checkpoint(tmp_path, in_child):
    """The real thing, in a process that may write files of 64 kB only: the error comes out of safetensors."""
    good = write(tmp_path, 1)

    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            checkpoint.save(tmp_path, 2, {"model": {"w": torch.zeros(100_000)}}, {}, keep=1)
        except CheckpointError as error:
            return error

    assert re.search(r"step-00000002: .*0\.4 MB", in_child(save))
    assert os.listdir(tmp_path) == [good.name]


def test_what_killed_writers_left_is_no_checkpoint(tmp_path):
    good = write(tmp_path, 10)
    (tmp_path / ".step-00000020.99.tmp").mkdir()
    (tmp_path / ".step-00000020.99.tmp" / "model.safetensors").write_bytes(b"half")
    assert latest_good(tmp_path)[0] == good
    checkpoint.clean(tmp_path)
    assert os.listdir(tmp_path) == [good.name]


def test_a_removal_that_a_kill_interrupts_leaves_only_whole_checkpoints(tmp_path, monkeypatch):
    for step in (10, 20):
        write(tmp_path, step)

    def killed(path, **_):
        if os.path.isdir(path):
            os.unlink(path / "model.safetensors")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.keep_last(tmp_path, 1)
    assert len(os.listdir(tmp_path)) == 2  # the rest of the removed one is there
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-00000020"]
    checkpoint.clean(tmp_path)
    assert os.listdir(tmp_path) == ["step-00000020"]


FORGED = {
    "format": None, "step": "20", "sha256": {"model.safetensors": "00"}, "meta": [], "layout": [2],
    "meta.clock": [1.0], "meta.guard": {"losses": []}, "meta.position": -1, "meta.recent": [[1.0]], "meta.rows": {},
    "meta.execution": "cpu", "meta.row_step": None,
}  # fmt: skip


@pytest.mark.parametrize("key", FORGED)
def test_a_forged_state_is_damaged_and_named_by_its_key(tmp_path, key):
    path = write(tmp_path, 20)
    state = json.loads((path / "state.json").read_text())
    del state["self"]
    group, _, name = key.rpartition(".")
    (state[group] if group else state)[name] = FORGED[key]
    (path / "state.json").write_text(checkpoint._state_text(state))
    for read in (checkpoint.load, checkpoint.groups, checkpoint.read_meta, checkpoint.layout):
        with pytest.raises(CheckpointError, match=rf"state\.json: (is damaged: {key}|format None)"):
            read(path)
