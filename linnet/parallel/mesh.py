"""The ranks of a run: who they are, which groups they form, and calls that all of them make together.

`start` connects the processes that torchrun (or `linnet train --devices N`, or Ray) started and returns this rank's
`Mesh`. With one process it returns None, and training does not use torch.distributed at all.

A restarted group must not meet the addresses that a killed attempt left in the launcher's store, so each attempt keeps
its addresses under a prefix of its own. torchrun's restart counts cannot name it: they differ between nodes that joined
at different times. Rank 0 draws the name, and every other rank asks for it with a number of its own (`_attempt`).
"""

import contextlib
import datetime
import os
import pickle
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from linnet.config import ConfigError, grouped, refuse
from linnet.ops import compat_torch
from linnet.parallel import alive
from linnet.parallel.config import Degrees, ParallelConfig

JOIN = 300.0  # seconds in which every rank must appear
FIRST_STEP = 1800.0  # seconds that a communication of the first step may take: ranks compile at different speeds
HOST = 7 * 86400.0  # seconds that a rank waits on the host: rank 0 may prepare data or evaluate for hours

DIMENSIONS = ("dp_replicate", "dp_shard", "sp", "tp")

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")

Result = TypeVar("Result")
Item = TypeVar("Item")

_own_group = False  # whether `join` made the group
_stores: dict[tuple[str, str, int], dist.Store] = {}  # by address, port and rank; rank 0's keeps the port


class PeerError(RuntimeError):
    """Another rank failed in a call that all ranks make together. The message names the rank and its error."""


def is_shared(error: BaseException) -> bool:
    """Returns whether every rank raised this error (in a call that all ranks make together), so that one may tell."""
    return getattr(error, "shared", False)


def is_secondary(error: BaseException) -> bool:
    """Returns whether an error of this rank only says that another one failed or was lost."""
    return isinstance(error, PeerError) or any(text in str(error) for text in _LOST)


def shared(error: BaseException, same: bool = True) -> BaseException:
    """Marks an error that a call of all ranks raises on every rank, and returns it.

    Args:
        same: whether the error is the same on all ranks.
    """
    error.shared = same  # type: ignore[attr-defined]
    return error


class Mesh:
    """This rank's place among all ranks.

    Attributes:
        rank, world: number of this rank, and number of ranks.
        device: the device of this rank.
        degrees: number of ranks per dimension; also as dp_replicate, dp_shard, sp and tp.
        dp, dp_rank: number of ranks that read different rows, and this rank's number among them.
        devices: mesh (dp_replicate, dp_shard, sp, tp) of all ranks; tp is innermost.
        fsdp: mesh for `fully_shard`: (dp_shard x sp), or (dp_replicate, dp_shard x sp) with several copies. The ranks
            of one row (sp) have the same weights and different tokens, so they share the weights too.
        tp_group, sp_group: the ranks that share a layer, and those that share a row.
        data_group: the ranks with different tokens (dp_replicate x dp_shard x sp); losses are summed over it.
        sequence_method: how states pass between the spans of a row.
        host: gloo group of all ranks for flags, barriers, errors and checkpoints.
    """

    def __init__(self, config: ParallelConfig, device: torch.device):
        """Builds the groups; every rank must call it, with a process group that exists."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device, self.timeout, self.sequence_method = device, config.timeout, config.sequence_method
        self.degrees: Degrees = config.degrees(self.world)
        shape = (self.degrees.dp_replicate, self.degrees.dp_shard, self.degrees.sp, self.degrees.tp)
        self.dp_replicate, self.dp_shard, self.sp, self.tp = shape
        self.dp = self.degrees.dp
        self.host = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=HOST))
        self.devices: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)
        merged = init_device_mesh(
            device.type,
            (self.dp_replicate, self.dp_shard * self.sp, self.tp),
            mesh_dim_names=("dp_replicate", "dp_shard_sp", "tp"),
        )
        copies = self.dp_replicate > 1
        self.fsdp: DeviceMesh = merged["dp_replicate", "dp_shard_sp"] if copies else merged["dp_shard_sp"]
        if self.tp == 1:
            self.data_group = dist.group.WORLD
        elif copies:
            numbers = torch.arange(self.world).view(-1, self.tp)
            self.data_group, _ = dist.new_subgroups_by_enumeration(numbers.T.tolist())
        else:
            self.data_group = merged["dp_shard_sp"].get_group()
        self.tp_group = self.devices["tp"].get_group()
        self.sp_group = self.devices["sp"].get_group()
        replica, shard, self.sp_rank, self.tp_rank = self.devices.get_coordinate()
        self.dp_rank = replica * self.dp_shard + shard
        self._groups = [
            group
            for mesh in (self.devices, merged)
            for name in mesh.mesh_dim_names
            for group in [mesh[name].get_group()]
        ] + [self.data_group, dist.group.WORLD]
        self.barrier()  # a rank that leaves at once would cut connections that others are still making

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which alone writes the record and the result."""
        return self.rank == 0

    def together(self) -> contextlib.AbstractContextManager[None]:
        """A context of all ranks: an error inside it on any rank is raised on every rank at its end."""
        return together(self.host)

    def on_main(self, do: Callable[[], Result]) -> Result:
        """Calls `do` on rank 0 and returns its result (small, picklable) on every rank; so with its error."""
        return on_main(do, self.host)

    def first(self, value: Result | None) -> Result | None:
        """Returns the value (small, picklable) of the first rank that has one, None if none has; waits for all."""
        return next((result for result in self.gather(value) if result is not None), None)

    def gather(self, value: Result) -> list[Result]:
        """Returns the values (picklable) of all ranks, in their order; waits for all."""
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, value, group=self.host)
        return told

    def barrier(self) -> None:
        """Waits for all ranks on the host, for as long as it takes."""
        dist.barrier(self.host)

    def agree(self, digests: Mapping[str, str]) -> None:
        """Raises ConfigError on every rank if a digest is not the same on all: {"code": ..., "data": ...}."""
        agree(digests, self.host)

    def after_first_step(self) -> None:
        """Lowers the time that a communication may take to `parallel.timeout`."""
        for group in self._groups:
            compat_torch.set_group_timeout(group, datetime.timedelta(seconds=self.timeout))


def world() -> int:
    """Returns the number of processes that were started together, 1 without a launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def rank() -> int:
    """Returns the number of this process among those that were started together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if world() > 1 else 0


def join() -> None:
    """Connects this process to the others of its launcher, unless it is connected. Communicates on the CPU only.

    Raises:
        ConfigError: the port is in use, or a rank did not come.
    """
    global _own_group
    if dist.is_initialized():
        return
    mine, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore("linnet", _store(mine, count))
    attempt = _attempt(store, mine, count, JOIN)
    meeting = dist.PrefixStore(attempt, store)
    alive.watch(meeting, attempt, mine, count, JOIN)  # first: a signal may end a rank for which the next call waits
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",  # NCCL connects at its first communication, so this costs nothing
        store=meeting,
        rank=mine,
        world_size=count,
        timeout=datetime.timedelta(seconds=FIRST_STEP),
    )
    _own_group = True


def start(config: ParallelConfig, device: torch.device) -> Mesh | None:
    """Returns this rank's mesh, or None if there is one process. Every rank must call it.

    Args:
        device: `cpu` or `cuda`; the mesh's `device` is this rank's own of them.

    Raises:
        ConfigError: the degrees do not fit, there are more ranks than devices, or a rank did not come. On every rank.
    """
    if world() == 1:
        return None
    join()
    with together():
        refuse([*config._mesh_problems(world()), *device_problems(device)], "parallel")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
    return Mesh(config, device)


def device_problems(device: torch.device, local_world: int | None = None) -> list[str]:
    """Returns why the ranks on this machine cannot have a device each.

    Args:
        local_world: number of ranks on this machine; None asks the launcher's environment.
    """
    if device.type != "cuda":
        return []
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if local_world is None else local_world
    have, problems = torch.cuda.device_count(), []
    if count > have:
        gpus = "1 GPU" if have == 1 else f"{have} GPUs"
        problems.append(f"--devices: {count} were asked for, but {socket.gethostname()} has {gpus}; use at most {have}")
    if not dist.is_nccl_available():
        problems.append(
            "run.device: this PyTorch has no NCCL, with which GPUs communicate; install a build of PyTorch for CUDA on "
            "Linux, or use run.device: cpu"
        )
    return problems


def stop() -> None:
    """Leaves the group of `join` at the end of a run that went well; a group that others made stays.

    After an error, end the process instead: leaving would wait for ranks that do not answer.
    """
    global _own_group
    if _own_group and dist.is_initialized():
        alive.leave()
        dist.destroy_process_group()
    _own_group = False


@contextlib.contextmanager
def together(host: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A context that every rank enters: an error inside it on any rank is raised on every rank at its end.

    With one process it does nothing. With several it connects them first (`join`) if they are not.

    Args:
        host: a group of all ranks that communicates on the CPU; None is the group of `join`.

    Raises:
        ConfigError: any rank raised one; problems that not all ranks found name the rank.
        PeerError: another rank raised something else, and this one did not.
    """
    if world() == 1:
        yield
        return
    join()
    error = None
    try:
        yield
    except Exception as raised:
        if hasattr(raised, "shared"):  # by a call of all ranks inside the context: no rank comes to the one below
            raise
        error = raised
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if error is None else _packed(error), group=host)
    if not any(told):
        return
    errors = {number: pickle.loads(packed) for number, packed in enumerate(told) if packed is not None}
    configs = {number: error for number, error in errors.items() if isinstance(error, ConfigError)}
    if configs:
        raise shared(_merged(configs, len(told))) from None
    number, first = min(errors.items())
    if isinstance(first, OSError):
        raise shared(error if error is not None and isinstance(error, OSError) else first)
    raise shared(error if error is not None else PeerError(f"rank {number}: {first}"), same=False)


def on_main(do: Callable[[], Result], host: dist.ProcessGroup | None = None) -> Result:
    """Calls `do` on rank 0 and returns its result (small, picklable) on every rank, or raises its error there."""
    with together(host):
        box: list[Any] = [do() if rank() == 0 else None]
    if world() > 1:
        dist.broadcast_object_list(box, src=0, group=host)
    return box[0]


_sharing: Mesh | None = None  # whose ranks share the items of `divided`
_sharers = 1


@contextlib.contextmanager
def dividing(mesh: Mesh | None) -> Iterator[None]:
    """In this context the ranks of a mesh share the items of `divided`; with None each process computes all of them."""
    global _sharing
    before, _sharing = _sharing, mesh
    try:
        yield
    finally:
        _sharing = before


def is_dividing() -> bool:
    """Returns whether `divided` shares its items with other ranks."""
    return _sharing is not None


def sharers() -> int:
    """Returns how many ranks share the items that this one computes now: about so many are done for each of its own."""
    return _sharers


def divided(
    items: Sequence[Item], compute: Callable[[Item], Result], size: Callable[[Item], float] = lambda item: 1.0
) -> list[Result]:
    """Returns `compute(item)` of all items, in their order, on every rank; under `dividing` each rank computes a share.

    Every rank must call it with the same items. Nothing inside `compute` is divided again, unless there is one item:
    then every rank computes it.

    Args:
        compute: returns what can be pickled, the same on every rank.
        size: how long an item takes, in any unit; the ranks get similar sums.
    """
    global _sharers
    mesh = _sharing
    if mesh is None or len(items) < 2:
        return [compute(item) for item in items]
    sizes = [size(item) for item in items]
    loads, mine = [0.0] * mesh.world, []
    for number in sorted(range(len(items)), key=lambda number: -sizes[number]):  # each to the rank with least to do
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        if rank == mesh.rank:
            mine.append(number)
    with dividing(None):
        _sharers = mesh.world
        try:
            with mesh.together():
                computed = {number: compute(items[number]) for number in mine}
        finally:
            _sharers = 1
    results = {number: result for share in mesh.gather(computed) for number, result in share.items()}
    return [results[number] for number in range(len(items))]


@contextlib.contextmanager
def in_turns(host: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A context that one rank of each machine enters first, then the others; an error is raised on every rank."""
    first = int(os.environ.get("LOCAL_RANK", rank())) == 0
    if not first:
        with together(host):  # waits for the first
            pass
    with together(host):
        yield
    if first and world() > 1:
        with together(host):  # waits for the others
            pass


def agree(digests: Mapping[str, str], host: dist.ProcessGroup | None = None) -> None:
    """Raises ConfigError on every rank if a digest is not the same on all ranks.

    Args:
        digests: what is compared -> its digest; every rank gives the same keys.
    """
    if world() == 1:
        return
    join()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (socket.gethostname(), dict(digests)), group=host)
    problems = []
    for what in digests:
        wanted = told[0][1].get(what)
        others = [number for number, (_, peer_digests) in enumerate(told) if peer_digests.get(what) != wanted]
        if others:
            host_name, report = told[others[0]]
            ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
            problems.append(
                f"{what}: {ranks} ({host_name}: {report.get(what)}) and rank 0 ({told[0][0]}: {wanted}) differ; give "
                f"every machine the same {what}"
            )
    if problems:
        raise shared(ConfigError(problems, "parallel"))


def _packed(error: Exception) -> bytes:
    """Returns an error for other ranks: itself if it survives pickling, else its text."""
    if isinstance(error, ConfigError | OSError):
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
            return packed
        except Exception:
            pass
    lines = "".join(traceback.format_exception_only(error)).strip()
    return pickle.dumps(RuntimeError(lines))


def _merged(errors: dict[int, ConfigError], world: int) -> ConfigError:
    """Returns one error with the problems of all ranks, each once; those that not all found say whose they are."""
    problems = grouped(
        (problem, number) for number, error in errors.items() for problem in dict.fromkeys(error.problems)
    )
    told = []
    for problem, ranks in problems.items():
        whose = ", ".join(map(str, ranks))
        alone = ranks == [0] or len(ranks) == world
        told.append(problem if alone else f"rank{'s' * (len(ranks) > 1)} {whose}: {problem}")
    first = next(iter(errors.values()))
    merged = pickle.loads(pickle.dumps(first))
    ConfigError.__init__(merged, told, first.where)
    return merged


def _store(rank: int, world: int) -> dist.Store:
    """Returns the store of the launcher, or of rank 0 if the launcher keeps none."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "")
    if not port.isdecimal():
        problem = f"MASTER_PORT: is {port!r}, but the ranks meet at this port; start them with torchrun or --devices"
        raise ConfigError([problem], "parallel")
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if (address, port, rank) in _stores:
        return _stores[address, port, rank]
    try:
        store = _stores[address, port, rank] = dist.TCPStore(
            address,
            int(port),
            world,
            is_master=rank == 0 and not kept,
            timeout=datetime.timedelta(seconds=JOIN),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        text = str(error)
        if "EADDRINUSE" in text or "in use" in text:
            problem = f"MASTER_PORT: {port} is in use on {socket.gethostname()}; choose another port"
        else:
            reason = text.partition("\n")[0][:300]
            problem = f"MASTER_ADDR, MASTER_PORT: rank {rank} cannot reach {address}:{port} ({reason})"
        raise ConfigError([problem], "parallel") from None
    return store


def _attempt(store: dist.Store, rank: int, world: int, seconds: float) -> str:
    """Returns the name of this attempt, which is the same on all its ranks and on no rank of an earlier attempt.

    Every rank draws a number. Rank r > 0 shows its own under `hello/r` and waits for an answer under that number, which
    no dead rank 0 can have left; rank 0 answers what it finds there with its own number, again if it changes (it first
    found the number of a dead rank), until all ranks have confirmed.
    """
    nonce = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", nonce)
        if not alive.came(store, f"answer/{nonce}", seconds):
            raise ConfigError([f"rank 0 did not come within {seconds:.0f} s; look at its output"], "parallel")
        name = store.get(f"answer/{nonce}").decode()
        store.set(f"confirmed/{name}/{rank}", "")
        return name
    answered: dict[int, bytes] = {}
    end = time.monotonic() + seconds
    while missing := [other for other in range(1, world) if not store.check([f"confirmed/{nonce}/{other}"])]:
        for other in missing:
            if store.check([f"hello/{other}"]) and answered.get(other) != (number := store.get(f"hello/{other}")):
                store.set(f"answer/{number.decode()}", nonce)
                answered[other] = number
        if time.monotonic() > end:
            ranks = ", ".join(map(str, missing))
            raise ConfigError([f"ranks {ranks} did not come within {seconds:.0f} s; look at their output"], "parallel")
        time.sleep(alive.LOOK)
    return nonce
