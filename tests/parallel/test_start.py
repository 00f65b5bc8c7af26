"""How ranks find each other, tell each other of errors, and train whole runs together."""

import datetime
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from linnet import provenance
from linnet.config import ConfigError, parse
from linnet.data import loader
from linnet.models import family
from linnet.parallel import Mesh, ParallelConfig, PeerError, alive, mesh
from linnet.runs import RunFolder, checkpoint
from linnet.train import TrainConfig, loop, train
from linnet.train.objectives.text import TextObjective
from linnet.train.preflight import check_devices
from linnet.train.session import Session

SOON = 10.0  # seconds in which a message must reach every rank


def settings(text: Path, architecture: str = "tnl", parallel: dict | None = None, **changes) -> TrainConfig:
    model = family(architecture)(32, 2, num_heads=4).model_dump()
    if architecture == "hgrn":
        model["options"]["hgrn"] = {"complex": True}  # which tensor parallelism does not split
    run = {"device": "cpu", "log_every": 1, "checkpoint_every": 4} | changes.pop("run", {})
    values = {"seq_len": 32, "batch_size": 8, "steps": 8, "evaluate_tokens": 512, "model": model, "run": run}
    values |= {"data": {"source": [str(text)]}, "parallel": parallel or {}}
    return parse(TrainConfig, values | changes)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(loader.__file__).read_text(encoding="utf-8") * 4, encoding="utf-8")
    path.with_name("novel.txt").write_text(mesh.__doc__, encoding="utf-8")
    return path


def losses(folder: RunFolder) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in folder.metrics() if "loss" in row}


# --- The mesh


def places(parallel: dict) -> tuple:
    """Runs in a worker. Where this rank is, and who shares what with it."""
    found = Mesh(ParallelConfig(**parallel), torch.device("cpu"))
    groups = [dist.get_process_group_ranks(group) for group in (found.data_group, found.sp_group, found.tp_group)]
    return (found.dp_rank, found.sp_rank, found.tp_rank), *groups, found.fsdp.mesh.flatten().tolist()


def test_ranks_of_a_mesh(pool):
    assert pool.run(4, places, {"tp": 2, "sp": 2}) == [
        ((0, 0, 0), [0, 2], [0, 2], [0, 1], [0, 2]),
        ((0, 0, 1), [1, 3], [1, 3], [0, 1], [1, 3]),
        ((0, 1, 0), [0, 2], [0, 2], [2, 3], [0, 2]),
        ((0, 1, 1), [1, 3], [1, 3], [2, 3], [1, 3]),
    ]
    found = pool.run(4, places, {"tp": 2, "dp_replicate": 2})
    assert [(one[0], one[1], one[3]) for one in found] == [
        ((0, 0, 0), [0, 2], [0, 1]),
        ((0, 0, 1), [1, 3], [0, 1]),
        ((1, 0, 0), [0, 2], [2, 3]),
        ((1, 0, 1), [1, 3], [2, 3]),
    ]


def told() -> list:
    """Runs in a worker. What each call of all ranks raises or returns on this one."""
    found = Mesh(ParallelConfig(), torch.device("cpu"))
    seen: list = []

    def one_fails(error: Exception) -> None:
        if found.rank == 1:
            raise error

    def together(do):
        with found.together():
            return do()

    def turn() -> float:
        with mesh.in_turns(found.host):
            time.sleep(0.1)
            return time.monotonic()

    def turn_fails() -> None:  # on rank 0, so that rank 1 never enters; the context around it adds nothing
        with mesh.in_turns(found.host):
            seen.append("entered")
            raise ConfigError(["x: 1 is wrong; use 2"], "here")

    def both_fail() -> None:
        raise ConfigError(["x: 1 is wrong; use 2", f"y: {found.rank} is wrong"], "here")

    calls = [
        lambda: together(lambda: one_fails(ConfigError(["x: 1 is wrong; use 2"], "here"))),
        lambda: together(lambda: one_fails(checkpoint.CheckpointError(["disk"]))),
        lambda: together(lambda: one_fails(ZeroDivisionError("division"))),
        lambda: together(lambda: one_fails(FileNotFoundError(2, "none", "/x"))),
        lambda: together(both_fail),
        lambda: found.on_main(lambda: found.rank + 5),
        lambda: found.on_main(lambda: [][0]),
        lambda: found.agree({"code": "a", "data": str(found.rank)}),
        lambda: found.first(None if found.rank == 0 else signal.SIGTERM.value),
        lambda: together(lambda: found.rank),
        turn,
        lambda: together(turn_fails),
    ]
    for call in calls:
        try:
            seen.append(call())
        except Exception as error:
            seen.append((type(error).__name__, getattr(error, "problems", str(error))))
    return seen


def test_an_error_of_one_rank_reaches_all(pool):
    first, second = pool.run(2, told, timeout=30)
    assert first[0] == second[0] == ("ConfigError", ["rank 1: x: 1 is wrong; use 2"])
    assert first[1] == second[1] == ("CheckpointError", ["rank 1: disk"])
    assert first[2] == (PeerError.__name__, "rank 1: ZeroDivisionError: division")
    assert second[2] == ("ZeroDivisionError", "division")
    assert first[3][0] == second[3][0] == "FileNotFoundError"
    assert first[4] == second[4] == ("ConfigError", ["x: 1 is wrong; use 2", "y: 0 is wrong", "rank 1: y: 1 is wrong"])
    assert first[5] == second[5] == 5
    assert (first[6][0], second[6][0]) == ("IndexError", PeerError.__name__)
    [line] = first[7][1]
    assert first[7] == second[7] and line.startswith("data: rank 1") and "same data" in line
    assert first[8] == second[8] == signal.SIGTERM.value
    assert (first[9], second[9]) == (0, 1) and second[10] - first[10] > 0.09
    wanted = ("ConfigError", ["x: 1 is wrong; use 2"])
    assert first[11:] == ["entered", wanted] and second[11:] == [wanted]


def test_an_attempt_never_meets_the_one_before():
    """A late rank, in a store with the answers and confirmations of an attempt whose ranks were killed."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=20))

    def attempt(late: float) -> list[str]:
        names = [""] * 3

        def join(rank: int) -> None:
            time.sleep(late if rank == 1 else 0)
            names[rank] = mesh._attempt(store, rank, 3, 20.0)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return names

    first, second = attempt(0), attempt(0.5)
    assert len({*first, *second}) == 2 and len(set(first)) == len(set(second)) == 1


def dying(rank: int) -> int:
    """Runs in a worker of its own. One rank is killed while the others wait for what never comes."""
    alive.GRACE = 0.3  # nothing here has an error of its own to tell
    mesh.join()
    if mesh.rank() == 0:  # a stranger who tries the port does not count as a lost rank
        port = alive._sockets[0].getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
    dist.barrier()
    time.sleep(0.3)
    if mesh.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_end_soon_after_the_death_of_another(pool, rank):
    began = time.monotonic()
    found = pool.run(3, dying, rank, fresh=True, group=False)
    assert [one.exit_code for one in found] == [-signal.SIGKILL if other == rank else 1 for other in range(3)]
    assert time.monotonic() - began < 30


def leaving() -> int:
    """Rank 1 ends between the meeting of all ranks and its connection to them."""
    alive.GRACE = 0.3
    if os.environ["RANK"] == "1":
        dist.init_process_group = lambda *args, **kwargs: os._exit(130)
    mesh.join()
    return 0


def test_ranks_do_not_wait_for_the_connection_of_one_that_has_ended(pool):
    began = time.monotonic()
    workers = pool.run(3, leaving, fresh=True, group=False)
    assert [worker.exit_code for worker in workers] == [1, 130, 1] and time.monotonic() - began < 30


def test_a_signal_acts_while_a_rank_waits_for_rank_0():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            mesh._attempt(dist.HashStore(), 1, 2, 60.0)
        assert time.monotonic() - began < 30
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(ConfigError, match="ranks 1, 2 did not come"):
        mesh._attempt(dist.HashStore(), 0, 3, 0.2)


def test_a_port_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(key, value)
        began = time.monotonic()
        with pytest.raises(ConfigError, match=f"MASTER_PORT: {port} is in use") as caught:
            mesh.join()
        assert "another port" in str(caught.value) and time.monotonic() - began < SOON


# --- Checks before work


def test_more_devices_than_there_are(text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    few, nccl = mesh.device_problems(torch.device("cuda"), 5)
    assert few.startswith("--devices: 5") and "at most 2" in few
    assert nccl.startswith("run.device") and "NCCL" in nccl
    with pytest.raises(ConfigError) as caught:
        check_devices(settings(text, batch_size=2, parallel={"sp": 3}), 6)
    assert [line.partition(" ")[0] for line in caught.value.problems] == ["parallel.sp:"]


def bad_input(text: Path, root: Path) -> list[tuple[str, list[str], float]]:
    """Runs in a worker. The error, its problems and the seconds of trainings that one rank cannot do as the others."""
    seen, rank = [], dist.get_rank()

    def failing(config: TrainConfig, *patches: tuple[object, str, object]) -> None:
        began, patch = time.monotonic(), pytest.MonkeyPatch()
        for target, name, value in patches if rank == 1 else ():
            patch.setattr(target, name, value)
        try:
            train(config, root / "runs", root / "cache")
            seen.append(("", [], 0.0))
        except Exception as error:
            seen.append((type(error).__name__, getattr(error, "problems", [str(error)]), time.monotonic() - began))
        patch.undo()

    failing(settings(text), (provenance, "code_digest", lambda: "other code"))
    failing(settings(text, seed=rank))
    failing(settings(text), (loop, "unwritable", lambda path: "cannot be written to, the disk is read-only"))
    failing(settings(text), (TextObjective, "meta", lambda self: {"data": "other text"}))
    failing(settings(text, parallel={"tp": 3}))
    failing(settings(text, "hgrn", parallel={"tp": 2}))
    failing(settings(text, batch_size=1))
    failing(settings(text.with_name("missing.txt")))
    return seen


def test_bad_input_reaches_every_rank_soon(pool, text, tmp_path):
    wanted = [
        ["code: rank 1", "same code"],
        ["configuration: rank 1", "same configuration"],
        ["rank 1:", "read-only", "choose another folder"],
        ["data: rank 1", "same data"],
        ["tp 3", "multiple of 3"],
        ["hgrn", "parallel.tp"],
        ["batch_size: 1", "batch_size >= 2"],
        ["missing.txt"],
    ]
    first, second = pool.run(2, bad_input, text, tmp_path, timeout=90)
    for mine, other, words in zip(first, second, wanted, strict=True):
        assert mine[0] == "ConfigError" and mine[:2] == other[:2] and max(mine[2], other[2]) < SOON
        assert all(word in mine[1][0] for word in words)
    assert not (tmp_path / "runs").exists()


# --- Whole runs

WHOLE = ("tnl", "hgrn2")  # attention's own exchanges are those of test_tensor and test_spans


def whole(text: Path, architecture: str, parallel: dict | None = None) -> TrainConfig:
    """A run with an evaluation on the way and checkpoints in the background, for one of the architectures."""
    if architecture != "tnl":
        return settings(text, architecture, parallel)
    held_out = {"kind": "text", "name": "novel", "paths": [str(text.with_name("novel.txt"))], "every": 4}
    return settings(text, architecture, parallel, evaluations=[held_out], run={"async_save": True})


def whole_runs(text: Path, root: Path, parallel: dict) -> list[str]:
    """Runs in a worker. Trains each architecture to its end."""
    return [str(train(whole(text, name, parallel), root, root / "cache").path) for name in WHOLE]


def stopped_runs(text: Path, root: Path, parallel: dict, steps: int) -> list:
    """Runs in a worker. SIGTERM reaches the last rank alone, in the middle of the step before `steps`."""

    class Stopped(Session):
        def gradients(self, *given) -> None:
            if self.step == steps - 2 and mesh.rank() == mesh.world() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            super().gradients(*given)

    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "Session", Stopped)
    try:
        train(settings(text, "hgrn2", parallel), root, root / "cache")
        return ["not stopped"]
    except SystemExit as stop:
        return [stop.code, [path.name for path in checkpoint.listed(next(root.glob("hgrn2*/checkpoints")))]]
    finally:
        patch.undo()


def waiting(text: Path, root: Path) -> tuple[str, float]:
    """Runs in a worker. Rank 1 stays away for longer than a communication may take, after the first step."""
    began = [0.0]

    class Late(Session):
        def gradients(self, *given) -> None:
            began[0] = time.monotonic()
            if self.step == 2 and mesh.rank():
                time.sleep(4.0)
            super().gradients(*given)

    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "Session", Late)
    try:
        train(settings(text, parallel={"timeout": 1.0}), root, root / "cache")
        return "", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - began[0]
    finally:
        patch.undo()


def test_nobody_waits_for_ever(pool, text, tmp_path):
    (error, seconds), (other, _) = pool.run(2, waiting, text, tmp_path, group=False)
    assert "Timed out" in error and 0.5 < seconds < 4.0 and other
    [folder] = (tmp_path).glob("tnl-*")
    assert "Timed out" in RunFolder(folder).error() and (folder / "errors" / "rank-1.txt").is_file()


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> dict[str, RunFolder]:
    """The runs of one process."""
    root = tmp_path_factory.mktemp("alone")
    return {name: train(whole(text, name), root, root / "cache") for name in WHOLE}


@pytest.mark.parametrize("world, parallel", [(2, {}), (4, {"tp": 2, "sp": 2})], ids=["2", "tp2sp2"])
def test_whole_runs_are_those_of_one_process(pool, text, tmp_path, alone, world, parallel):
    # New processes: PyTorch keeps meshes of earlier tests, whose groups are gone.
    paths = pool.run(world, whole_runs, text, tmp_path, parallel, timeout=120, group=False, fresh=True)
    assert all(one == paths[0] for one in paths)
    for path, (name, one) in zip(paths[0], alone.items(), strict=True):
        folder, wanted = RunFolder(path), losses(one)
        assert folder.path.name == one.path.name  # another number of devices is the same run
        found = losses(folder)
        assert found.keys() == wanted.keys()
        assert max(abs(found[step] - wanted[step]) / wanted[step] for step in wanted) < 2e-6, name
        result = folder.result()
        assert result["status"] == "done" and result["devices"] == world
        assert result["loss"] == pytest.approx(one.result()["loss"], rel=2e-6)
        evaluated = one.result()["evaluations"]
        assert evaluated.keys() == result["evaluations"].keys() == ({"novel"} if name == "tnl" else set())
        for label, metrics in evaluated.items():
            assert result["evaluations"][label] == pytest.approx(metrics, rel=1e-5)
        assert not (folder.path / "errors").exists() and folder.error() is None


def test_a_stop_of_one_rank_saves_the_same_step_on_all_and_another_number_goes_on(pool, text, tmp_path, alone):
    wanted = losses(alone["hgrn2"])
    assert pool.run(2, stopped_runs, text, tmp_path, {}, 3, group=False) == [[143, ["step-00000003"]]] * 2
    assert (
        pool.run(4, stopped_runs, text, tmp_path, {"sp": 2}, 6, group=False)
        == [[143, ["step-00000004", "step-00000006"]]] * 4
    )
    folder = train(settings(text, "hgrn2"), tmp_path, tmp_path / "cache")
    found = losses(folder)
    assert folder.result()["status"] == "done" and found.keys() == wanted.keys()
    assert max(abs(found[step] - wanted[step]) / wanted[step] for step in wanted) < 2e-6
    changes = [row["changed"]["parallel"] for row in folder.metrics() if row.get("event") == "execution_changed"]
    assert [["sp 2" in str(one) for one in pair] for pair in changes] == [[False, True], [True, False]]
