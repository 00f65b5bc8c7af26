"""Checkpoints of many ranks: whole or absent, read by any layout and by one process; errors reach all ranks."""

import argparse
import errno
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Died
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from typer.testing import CliRunner

from linnet.cli import app
from linnet.parallel import ParallelConfig
from linnet.parallel.mesh import Mesh
from linnet.runs import CheckpointError, RunFolder, checkpoint, latest_good, sharded, slices
from linnet.runs.model import load_checkpoint
from linnet.runs.saver import Saver
from linnet.train import TrainConfig, train

# Uneven rows, fewer rows than ranks, one number, bfloat16, no rows at all; the dimension that tensor parallelism cuts.
SHAPES = {"rows": (7, 4), "few": (2, 6), "one": (), "wide": (4, 10), "half": (6,), "none": (0, 3), "table": (11,)}
SPLIT = {name: (dim, SHAPES[name]) for name, dim in {"few": 0, "wide": 1, "table": 0}.items()}
LAYOUTS = {
    2: [{}, {"tp": 2}],
    3: [{}],
    4: [{"tp": 2}, {"sp": 2}, {"dp_replicate": 2, "tp": 2}],
}


def name_of(world, layout):
    return "-".join([str(world), *(f"{key}{value}" for key, value in layout.items())])


def whole(seed):
    """The state of one process."""
    draw = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}
    model["half"] = model["half"].bfloat16()
    moments = {f"{name}.exp_avg": tensor.float() * 3 for name, tensor in model.items() if name != "table"}
    steps = {f"{name}.step": torch.tensor(7.0) for name in ("rows", "wide")}
    return {"model": model, "optimizer": moments | steps}


def cut(tensors, mesh):
    """This rank's part of it, as FSDP over tensor parallelism holds it; `table` is a buffer, which FSDP leaves."""
    parts = {}
    for group, named in tensors.items():
        for name, tensor in named.items():
            local, cut = tensor, SPLIT.get(name.partition(".")[0])
            if cut is not None and tensor.ndim:
                local = tensor.chunk(mesh.tp, cut[0])[mesh.tp_rank].contiguous()
            if tensor.ndim and name != "table":
                fsdp = mesh.fsdp
                rank, ranks = fsdp.get_local_rank(fsdp.ndim - 1), fsdp.size(fsdp.ndim - 1)
                rows = local.tensor_split([-(-len(local) // ranks) * i for i in range(1, ranks)])[rank].clone()
                placements = [Replicate()] * (fsdp.ndim - 1) + [Shard(0)]
                shape, stride = local.shape, local.stride()
                local = DTensor.from_local(rows, fsdp, placements, run_check=False, shape=shape, stride=stride)
            parts.setdefault(group, {})[name] = local.clone()
    return parts


def meshes(world):
    return [(layout, Mesh(ParallelConfig(**layout), torch.device("cpu"))) for layout in LAYOUTS[world]]


def random(rank):
    return {"cpu": torch.full((3,), rank, dtype=torch.uint8)}


def save_all(folder, seed, then_load=False):
    found = meshes(dist.get_world_size())
    for number, (layout, mesh) in enumerate(found):
        background = number % 2 == 1
        saver = Saver(Path(folder) / name_of(mesh.world, layout), 1, mesh, SPLIT, background)
        for step in (1, 2, 3):
            state = cut(whole(seed + step), mesh) | {"random": random(mesh.rank)}
            saver.save(step, state, {"step": step, "losses": [0.1 + 0.2]}, best=1)
            if background:  # steps go on while a thread writes
                for named in state.values():
                    for tensor in named.values():
                        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        assert saver.join() is None and not saver.failed
    found[0][1].barrier()
    return load_all(folder, seed, found) if then_load else None


def load_all(folder, seed, found=None):
    """Reads every checkpoint in `folder` into every layout of this world; returns how many."""
    count = 0
    for _, mesh in found or meshes(dist.get_world_size()):
        for source in sorted(Path(folder).iterdir()):
            path = checkpoint.place(source, 3)
            expected = cut(whole(seed + 3), mesh)
            found = cut({g: {n: torch.zeros_like(t) for n, t in x.items()} for g, x in whole(0).items()}, mesh)
            states = sharded.load(path, found, mesh, SPLIT)
            world = int(source.name.partition("-")[0])
            assert torch.equal(states["cpu"], random(mesh.rank % world)["cpu"])
            for group, named in expected.items():
                for name, tensor in named.items():
                    mine = found[group][name]
                    if isinstance(tensor, DTensor):
                        tensor, mine = tensor.to_local(), mine.to_local()
                    assert torch.equal(mine, tensor), (source.name, mesh.degrees, group, name)
            count += 1
    return count


def test_any_layout_and_one_process_read_what_any_layout_wrote(pool, tmp_path):
    checkpoint.save(tmp_path / "1", 3, whole(13) | {"random": random(0)}, {"step": 3})
    pool.run(2, save_all, str(tmp_path), 10)
    pool.run(3, save_all, str(tmp_path), 10)
    loaded = {4: pool.run(4, save_all, str(tmp_path), 10, then_load=True)}
    loaded |= {world: pool.run(world, load_all, str(tmp_path), 10) for world in (2, 3)}
    layouts = sum(map(len, LAYOUTS.values()))
    assert len(list(tmp_path.iterdir())) == layouts + 1
    assert loaded == {world: [len(each) * (layouts + 1)] * world for world, each in LAYOUTS.items()}
    contents = set()
    for source in tmp_path.iterdir():
        kept = [3] if source.name == "1" else [1, 3]  # the best and the last
        assert [checkpoint.step_of(path) for path in checkpoint.listed(source)] == kept
        assert not [path for path in source.rglob("*") if path.name.endswith(".tmp") or path.name == ".metadata"]
        path, tensors, meta, _ = latest_good(source)
        assert meta["step"] == 3 and torch.equal(tensors["random"]["cpu"], random(0)["cpu"])
        for group, named in whole(13).items():
            assert tensors[group].keys() == named.keys()
            for name, tensor in named.items():
                assert torch.equal(tensors[group][name], tensor) and tensors[group][name].dtype == tensor.dtype
        shards = list((path / "model").glob("*"))
        if source.name != "1":
            world = int(source.name.partition("-")[0])
            assert checkpoint.layout(path)["world"] == world == len(list((path / "random").iterdir()))
            joined = slices.Reader(shards)  # raises if a number is missing, or there twice
            assert all(torch.equal(joined.whole(name), tensor) for name, tensor in whole(13)["model"].items())
            read = {name: torch.zeros_like(tensor) for name, tensor in whole(13)["model"].items() if name != "one"}
            dcp.load(read, storage_reader=HuggingFaceStorageReader(str(path / "model")), no_dist=True)
            assert all(torch.equal(read[name], whole(13)["model"][name]) for name in read)
        contents.add(checkpoint.content(source))
    assert len(contents) == 1  # the same weights have the same digest, whoever wrote them


def save_some(mesh, folder, steps, background=False):
    saver = Saver(folder, None, mesh, SPLIT, background)
    for step in steps:
        saver.save(step, cut(whole(step), mesh) | {"random": random(mesh.rank)}, {"step": step})
    saver.wait()
    return saver


def damages(folder):
    """Saves, damages a shard, a state and another shard in turn, and returns what `latest_good` says on each rank."""
    mesh, folder = Mesh(ParallelConfig(tp=2), torch.device("cpu")), Path(folder)
    save_some(mesh, folder, (1, 2, 3, 4))
    if mesh.main:
        with open(checkpoint.place(folder, 4) / "optimizer" / "shard-00003.safetensors", "r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"x")
        (checkpoint.place(folder, 3) / "state.json").unlink()
    mesh.barrier()
    path, meta, problems = sharded.latest_good(folder, mesh, lambda meta: "not this one" if meta["step"] == 2 else None)
    refused, *_ = sharded.latest_good(folder, mesh, lambda meta: "none")
    if mesh.main:
        for number in (1, 2):
            (checkpoint.place(folder, number) / "model" / "shard-00000.safetensors").unlink()
    mesh.barrier()
    nothing = sharded.latest_good(folder, mesh)
    return str(path), meta["step"], problems, str(refused), nothing[0], len(nothing[2])


def test_a_damaged_shard_on_any_rank_means_the_step_before_on_all(pool, tmp_path):
    told = pool.run(4, damages, str(tmp_path))
    assert told == [told[0]] * 4
    path, step, problems, refused, nothing, count = told[0]
    assert path == str(checkpoint.place(tmp_path, 1)) and step == 1
    assert [line.partition(": ")[0].removeprefix(f"{tmp_path}/") for line in problems] == [
        "step-00000004/optimizer/shard-00003.safetensors",
        "step-00000003/state.json",
        "step-00000002",
    ]
    assert refused == str(checkpoint.place(tmp_path, 2))  # better than none
    assert nothing is None and count == 4
    assert latest_good(tmp_path)[0] is None
    with pytest.raises(CheckpointError, match="model/shard-00000.safetensors: the file is missing"):
        checkpoint.load(checkpoint.place(tmp_path, 2), ["model"])


def full_on_one(folder):
    """Rank 1 may write files of 300 bytes only. Returns what each rank's save raised, then whether the next worked."""
    mesh, folder, told = Mesh(ParallelConfig(), torch.device("cpu")), Path(folder), []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for background in (False, True):
        own = folder / str(background)
        saver = save_some(mesh, own, (1,), background)
        if mesh.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        state = cut(whole(2), mesh) | {"random": random(mesh.rank)}
        try:
            saver.save(2, state, {"step": 2})
            while background and not saver.failed:
                time.sleep(0.01)
            saver.wait()
        except CheckpointError as error:
            told.append(error.problems)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        mesh.barrier()
        left = sorted(path.name for path in own.iterdir())
        mesh.barrier()
        saver.save(3, state, {"step": 3})
        saver.wait()
        told.append((left, sharded.latest_good(own, mesh)[1]["step"]))
        saver.close()
    return told


def test_a_rank_that_cannot_write_stops_all(pool, tmp_path):
    told = pool.run(3, full_on_one, str(tmp_path))
    assert told == [told[0]] * 3
    for background, problems, after in (("False", *told[0][:2]), ("True", *told[0][2:])):
        assert len(problems) == 1 and problems[0].startswith("rank 1: ") and "the disk is full" in problems[0]
        assert f"intact: {checkpoint.place(tmp_path / background, 1)}" in problems[0]
        assert after == (["step-00000001"], 3)


def killed(folder, rank, place):
    """Rank `rank` dies in the second save, at `place`. Returns how long the others waited."""
    mesh, folder = Mesh(ParallelConfig(dp_replicate=2), torch.device("cpu")), Path(folder)
    save_some(mesh, folder, (1,))

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if mesh.rank == rank:
        owner, name = {"write": (slices.os, "fsync"), "rename": (checkpoint.os, "rename")}[place]
        setattr(owner, name, die)
    began = time.monotonic()
    try:
        save_some(mesh, folder, (2,))
    except RuntimeError:
        return time.monotonic() - began
    return None


@pytest.mark.parametrize(("rank", "place"), [(1, "write"), (0, "rename")])
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(pool, tmp_path, rank, place):
    told = pool.run(2, killed, str(tmp_path), rank, place, fresh=True)
    assert told[rank] == Died(-signal.SIGKILL) and 0 < told[1 - rank] < 10
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-00000001", ".step-00000002.tmp"}
    checkpoint.clean(tmp_path)
    assert latest_good(tmp_path)[2]["step"] == 1 and len(list(tmp_path.iterdir())) == 1


def other_model(folder):
    mesh = Mesh(ParallelConfig(), torch.device("cpu"))
    path = Path(folder) / "step-00000001"
    save_some(mesh, Path(folder), (1,))
    state = cut(whole(0), mesh)
    state["model"]["more"] = state["model"].pop("half")
    state["model"]["rows"] = torch.zeros(7, 5)
    state["optimizer"]["new.step"] = torch.tensor(3.0)  # no step was made with it: it stays
    problems = []
    try:
        sharded.load(path, state, mesh, SPLIT)
    except CheckpointError as error:
        problems += error.problems
    del state["model"]
    sharded.load(path, state, mesh, SPLIT)
    state["optimizer"]["rows.momentum_buffer"] = torch.zeros(7, 4)
    try:
        sharded.load(path, state, mesh, SPLIT)
    except CheckpointError as error:
        problems += error.problems
    return problems, state["optimizer"]["new.step"].item()


def test_another_model_or_optimizer_is_refused_by_name(pool, tmp_path):
    for problems, step in pool.run(2, other_model, str(tmp_path)):
        assert [line.partition(": ")[2].partition(": ")[2].partition(":")[0] for line in problems] == [
            "more",
            "half",
            "rows",
            "rows.momentum_buffer",
        ]
        assert step == 3.0


def test_one_process_saves_in_the_background_too(tmp_path, monkeypatch):
    state = {"model": {"weight": torch.ones(5)}, "optimizer": {}, "random": random(0)}
    meta = {"recent": [1.0]}
    saver = Saver(tmp_path, 1, background=True)
    saver.save(1, state, meta)
    state["model"]["weight"].zero_()
    meta["recent"].append(2.0)
    saver.wait()
    path, tensors, found, _ = latest_good(tmp_path)
    assert (
        torch.equal(tensors["model"]["weight"], torch.ones(5))
        and tensors["optimizer"] == {}
        and found == {"recent": [1.0]}
    )
    assert json.loads((path / "state.json").read_text())["format"] == 1 and saver.join() is None

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    saver.save(2, state, meta)
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.save(3, state, meta)
    monkeypatch.undo()
    saver.save(3, state, meta)
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


TINY = {
    "model": {"d_model": 16, "layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 2}}},
    "data": {"source": [argparse.__file__]},
    "seq_len": 32,
    "batch_size": 4,
    "schedule": {"name": "constant"},
    "evaluate_tokens": 256,
    "run": {"device": "cpu", "checkpoint_every": 3, "log_every": 1},
}


def reshard(path):
    """Writes a checkpoint of one process again, as four ranks with 2 x FSDP and 2 x tensor parallelism do."""
    mesh, path = Mesh(ParallelConfig(tp=2), torch.device("cpu")), Path(path)
    tensors, meta = checkpoint.load(path)
    random = tensors.pop("random")
    split = {name: (0, tuple(x.shape)) for name, x in tensors["model"].items() if x.ndim and len(x) % 2 == 0}
    parts = {}
    for group, named in tensors.items():
        for name, tensor in named.items():
            cut = tensor.ndim and (name.rpartition(".")[0] if group == "optimizer" else name) in split
            local = torch.zeros_like(tensor.chunk(2)[mesh.tp_rank] if cut else tensor)
            parts.setdefault(group, {})[name] = distribute_tensor(local, mesh.fsdp) if tensor.ndim else local
    sharded.load(path, parts, mesh, split)
    saver = Saver(path.parent, None, mesh, split)
    mesh.barrier()
    saver.save(checkpoint.step_of(path), parts | {"random": random}, meta)


def told(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_reader_takes_a_checkpoint_of_four_shards(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.model_validate(TINY | {"steps": 6})
    one = train(config, tmp_path / "runs", tmp_path / "cache").path
    many = shutil.copytree(one, tmp_path / "many" / one.name)
    for path in RunFolder(many).checkpoints():
        pool.run(4, reshard, str(path))
    last = RunFolder(many).checkpoints()[-1]
    assert not (last / "model.safetensors").exists() and len(list(last.glob("*/*.safetensors"))) == 12
    Path("text.txt").write_text("def parse(self):\n    return None\n" * 9)

    said = [
        json.loads(told("generate", run, "def parse", "--max-tokens", 8, "--json"))[0]["tokens"] for run in (one, many)
    ]
    assert said[0] == said[1]
    scores = [
        json.loads(told("evaluate", "text", run, "text.txt", "--json"))["text"]["detail"]["bits_per_byte"]
        for run in (one, many)
    ]
    assert scores[0] == scores[1]
    for run in (one, many):
        told("convert", run, "--to", "hf", "--out", f"hf-{run.parent.name}")
    exported = [load_file(f"hf-{run.parent.name}/model.safetensors") for run in (one, many)]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())
    loaded, again = load_checkpoint(one), load_checkpoint(many)
    assert loaded.step == again.step == 6 and loaded.documents == again.documents
    assert one.name in told("runs", tmp_path / "many")

    # Goes on, and starts another run, from the shards, in one process: the same weights, bit for bit.
    for run in (one, many):
        told("train", "--extend", run, "--set", "steps=9")
    ends = [latest_good(RunFolder(run).checkpoint_folder)[1] for run in (one, many)]
    assert ends[0]["random"].keys() == ends[1]["random"].keys()
    for group in ("model", "optimizer", "random"):
        assert all(torch.equal(tensor, ends[1][group][name]) for name, tensor in ends[0][group].items())
    assert RunFolder(many).checkpoints()[0].name == "step-00000006"
    shutil.rmtree(RunFolder(many).checkpoints()[-1])
    first = train(TrainConfig.model_validate(TINY | {"steps": 1, "init_from": str(many)}), "init", tmp_path / "cache")
    assert 0 < first.metrics()[0]["loss"] < RunFolder(one).metrics()[0]["loss"]
    assert not dist.is_initialized()
