"""The state that the steps of a training change, and how it is saved and restored.

gradients()   forward and backward of the next batch
judge()       reads the losses since the last call and returns the first bad one
apply()       clips the gradient and updates the weights
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from linnet.config import ConfigError, refuse
from linnet.layers import dropout
from linnet.layers.base import layers_of
from linnet.layers.norm import synchronise
from linnet.layers.ring import passes_states
from linnet.layers.routing import balance_over
from linnet.ops import compat_torch, projections
from linnet.ops.capture import Captured
from linnet.ops.sequence import sequence_parallel
from linnet.parallel.mesh import Mesh
from linnet.parallel.tensor import Cuts, reduce_partial
from linnet.runs import RunFolder, checkpoint
from linnet.runs.checkpoint import Tensors
from linnet.runs.model import AVERAGE, WEIGHTS, changed_files, mismatches, not_finite, read_weights
from linnet.train import float8, recompute
from linnet.train.config import TrainingConfig
from linnet.train.device import autocast, keep_freed_memory
from linnet.train.monitor import Guard, Trouble
from linnet.train.objective import Batch, BatchSource, RunObjective, training_loss
from linnet.train.optimizer import Average, Optimizer, factor


class Prefetch:
    """Serves the batches of a source on a device: of each batch the rows of one rank of `world`."""

    def __init__(self, source: BatchSource, device: torch.device, rank: int = 0, world: int = 1):
        self._source, self._device = source, device
        self._share = {} if world == 1 else {"rank": rank, "world": world}
        self._ahead: dict[int, Future[Batch]] = {}
        # On a CPU a second thread would only compete with the model for time.
        self._thread = ThreadPoolExecutor(1, "linnet-prefetch") if device.type == "cuda" else None

    def get(self, position: int) -> Batch:
        if self._thread is None:
            return self._source.batch(position, **self._share)
        future = self._ahead.pop(position, None) or self._thread.submit(self._pinned, position)
        for other in self._ahead.values():  # batches that were read ahead before the position jumped
            other.cancel()
        self._ahead = {position + 1: self._thread.submit(self._pinned, position + 1)}
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in future.result())

    def close(self) -> None:
        """Stops reading ahead, and the worker processes of the source."""
        if (close := getattr(self._source, "close", None)) is not None:
            close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _pinned(self, position: int) -> Batch:
        return tuple(tensor.pin_memory() for tensor in self._source.batch(position, **self._share))


Flags = tuple[bool, bool]


class Session:
    """Model, optimizer and position of one training.

    On several ranks every rank has a session, and calls the same methods at the same steps: `gradients`, `judge`,
    `state`, `load` and `weights` communicate. Each step has one all-reduce beside those of the model: of the gradient
    norm and the flags.

    Attributes:
        step: number of updates.
        position: number of used batches in the data order; larger than `step` after a skipped batch.
        rows: number of rows of the batches of all updates.
        recent: losses (nats per target) since the last row of the record.
        since_point: losses since the last point of the training curve, if the configuration has `curve_every`.
        recent_auxiliary: auxiliary losses of these steps, if layers add some; they are not part of the loss.
        grad_norm: norm of the last gradient that `judge` read.
        flags: the flags that `gradients` was called with, true if they were on any rank: those of this step, on a GPU
            those of the step before, because reading them must not wait for the device.
        average: the moving average of the weights, if the configuration asks for one.
        split: the tensors of the model that tensor parallelism has cut (`tensor.cuts`); None without it.
    """

    def __init__(self, config: TrainingConfig, objective: RunObjective, device: torch.device, mesh: Mesh | None = None):
        """
        Args:
            mesh: the ranks that train together; None is one process.
        """
        self.config, self.objective, self.device, self.mesh = config, objective, device, mesh
        keep_freed_memory(device)
        self.parts = config.parts
        self.split: Cuts | None = None
        if mesh is None:
            self.model = objective.build(config.seed, device)
            self._convert(self.model)
            recompute.apply(self.model, config.run.recompute)
        else:
            self.model, self.split = objective.build_sharded(config.seed, mesh, self._wrap)
            if mesh.dp * mesh.sp > 1:
                balance_over(self.model, mesh.data_group)
                synchronise(self.model, mesh.data_group)
        loss = training_loss(self.model, objective.loss(self.model))
        self._loss = torch.compile(loss) if config.run.compile and mesh is None else loss
        graph = config.run.graph and self.parts == 1 and mesh is None and device.type == "cuda"
        self._graph = Captured(self._whole_pass, device) if graph else None
        self._gradients: dict[tuple, list[Tensor | None]] = {}  # by the shapes of a batch, where its graph leaves them
        split_dims = {name: dim for name, (dim, _) in (self.split or {}).items()}
        self.optimizer = Optimizer(self.model, config.optimizer, mesh, split_dims)
        self._share = first, world = (0, 1) if mesh is None else (mesh.dp_rank, mesh.dp)
        self.prefetch = Prefetch(objective.batches(), device, first, world)
        self.average = None if config.average is None else Average(config.average, model_tensors(self.model))
        self.guard = Guard(config.guard)
        self.autocast = autocast(device, config.autocast_precision)
        # Reading a loss makes the host wait for a GPU, so on a GPU losses are read when a row of the record is due,
        # unless the policy needs to know a bad batch before its update.
        self.judges_every_step = device.type == "cpu" or config.guard.policy == "skip"
        self.step = self.position = self.rows = 0
        self.recent: list[float] = []
        self.since_point: list[float] = []
        self.recent_auxiliary: list[float] = []
        self.grad_norm = 0.0
        self.flags: Flags = (False, False)
        self._flags: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._targets: dict[int, Tensor] = {}  # rows of a batch -> targets of each of its parts
        # (position, loss, gradient norm, auxiliary loss if there is one) of each batch that `judge` has not read yet.
        self._unread: list[tuple[int, list[Tensor]]] = []

    def _convert(self, model: torch.nn.Module) -> None:
        """Chooses how layers multiply."""
        if self.config.precision == "float8":  # preflight refuses a CPU, on which the tests make a session
            float8.convert(model, emulate=self.device.type == "cpu")
        if self.config.run.compile:
            return
        projections.prepare(layers_of(model))
        if self.config.run.recompute == "none" and hasattr(model.backbone, "defer_sums"):
            model.backbone.defer_sums(views=self.mesh is None)

    def _wrap(self, model: torch.nn.Module) -> None:
        """Adds recomputation and compilation to the blocks of a model, inside the hooks that shard it."""
        run = self.config.run
        self._convert(model)
        recompute.apply(model, run.recompute, exchanges=self.mesh.sp > 1, compiled=run.compile)
        if run.compile:
            blocks = model.backbone.blocks
            compat_torch.allow_recompilations(4 * len(blocks))
            for block in blocks:
                if self.mesh.sp > 1 and passes_states(block.mixer, self.mesh.sequence_method):
                    continue  # torch 2.11 does not compile such a block if it is recomputed
                block.forward = torch.compile(block.forward, fullgraph=True)

    @property
    def batches(self) -> float:
        """Whole batches that the model was trained on: `step`, and fewer if the batch grows."""
        return self.step if self.config.batch_ramp is None else self.rows / self.config.batch_size

    def gradients(self, flags: Flags = (False, False)) -> None:
        """Stores the gradient of the mean loss over all targets of the next batch in the parameters.

        Auxiliary losses add to the gradient but not to the loss; each micro-batch's term is weighted by its share of
        targets.

        Args:
            flags: what other ranks are to know of this one, for `flags`.
        """
        batch = self.next_batch()
        if self.mesh is not None:
            self._gradients_of_ranks(batch, self.mesh, flags)
            return
        self.flags = flags
        parts = self.config.parts_at(self.position)
        # Autograd runs the backward pass of a GPU in a thread of its own, which helps with several GPUs. Here is only
        # one, and switching to that thread and back costs some hundred microseconds on a busy host.
        with torch.autograd.set_multithreading_enabled(False):
            if self._graph is not None:
                with self._position():
                    loss, self._norm, *auxiliary = self._replay(self._graph, batch).unbind()
            elif parts == 1:
                with self.autocast, self._position():
                    total, count, *auxiliary = self._loss(*batch)
                loss = total / count
                sum(auxiliary, loss).backward()
            else:
                # Every target has the same weight, whatever its micro-batch: sum over all / number of all targets.
                count, loss, row = self.objective.count(*batch), torch.zeros((), device=self.device), 0
                auxiliary: list[Tensor] = []
                for part in zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True):
                    with self.autocast, self._position(row):
                        total, targets, *extra = self._loss(*part)
                    row += len(part[0])
                    share = total / count
                    extra = [term * (targets / count) for term in extra]
                    sum(extra, share).backward()
                    loss += share.detach()
                    auxiliary += [term.detach() for term in extra]
                auxiliary = [torch.stack(auxiliary).sum()] if auxiliary else []
        if self._graph is None:
            self._norm = self.optimizer.gradient_norm()
        self._unread.append((self.position, [loss.detach(), self._norm, *(term.detach() for term in auxiliary)]))

    def next_batch(self) -> Batch:
        """Returns the batch of the next step, on the device."""
        while self.position in self.guard.skipped:
            self.position += 1
        return self.objective.augment(self.prefetch.get(self.position), self.position, *self._share)

    def take_gradients(self, numbers: Tensor, gradients: Sequence[Tensor | None], flags: Flags) -> None:
        """Does the work of `gradients` with what another computed for the batch of this step (`together/bundle.py`).

        Args:
            numbers: the mean loss, the norm of the gradient, and the auxiliary losses, if there are some.
            gradients: one per parameter of the model; an update may change them.
        """
        self.flags = flags
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        loss, self._norm, *auxiliary = numbers.unbind()
        self._unread.append((self.position, [loss, self._norm, *auxiliary]))

    def _whole_pass(self, *batch: Tensor) -> Tensor:
        """Stores the gradient of a batch; returns its loss, the gradient's norm and the auxiliary losses, [2 + n]."""
        self.optimizer.drop_gradients()  # those of a capture that failed
        with self.autocast:
            total, count, *auxiliary = self._loss(*batch)
        loss = total / count
        sum(auxiliary, loss).backward()
        self._gradients[_shapes(batch)] = [parameter.grad for parameter in self.model.parameters()]
        return torch.stack([loss.detach(), self.optimizer.gradient_norm(), *(term.detach() for term in auxiliary)])

    def _replay(self, graph: Captured, batch: Batch) -> Tensor:
        """`_whole_pass` through a graph: a replay fills the memory of the gradients that its capture has made."""
        numbers = graph(*batch)
        for parameter, gradient in zip(self.model.parameters(), self._gradients[_shapes(batch)], strict=True):
            parameter.grad = gradient
        if not graph.holds(*batch):
            del self._gradients[_shapes(batch)]  # of a call without a graph, and freed by the update
        return numbers

    def _gradients_of_ranks(self, batch: Batch, mesh: Mesh, flags: Flags) -> None:
        """Does the work of `gradients` for this rank's share of the batch; gradients are summed over ranks."""
        parts = self.config.parts_at(self.position)
        pieces = list(zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True))
        row, losses, auxiliary = self._bounds(mesh.dp)[mesh.dp_rank], [], []
        with torch.autograd.set_multithreading_enabled(False), sequence_parallel(mesh.sp_group, mesh.sequence_method):
            targets = self._targets_of_parts(pieces, mesh)
            count = targets.sum()
            for number, part in enumerate(pieces):
                self._reduce_after(number + 1 == len(pieces))
                with self.autocast, self._position(row):
                    total, _, *extra = self._loss(*part)
                row += len(part[0])
                share = total / count
                extra = [term * (targets[number] / count) for term in extra]
                sum(extra, share).backward()
                losses.append(share.detach())
                auxiliary += [term.detach() for term in extra]
        if mesh.tp > 1:
            reduce_partial(self.model, mesh.tp_group)
        self._norm, raised = self.optimizer.agreed_norm(flags)
        self._remember(raised)
        numbers = [torch.stack(losses).sum(), self._norm, *([torch.stack(auxiliary).sum()] if auxiliary else [])]
        self._unread.append((self.position, numbers))

    def _targets_of_parts(self, pieces: Sequence[Batch], mesh: Mesh) -> Tensor:
        """Returns the number of targets of each micro-batch on all ranks together, int64 [parts].

        If every row has the same number, it is known without communication.
        """
        if (per_row := self.objective.targets_per_row) is not None:
            bounds = self._bounds(mesh.dp)
            if bounds[-1] not in self._targets:
                parts = [0] * len(pieces)
                for start, end in itertools.pairwise(bounds):
                    for number, part in enumerate(torch.arange(end - start).tensor_split(len(pieces))):
                        parts[number] += len(part) * per_row
                self._targets[bounds[-1]] = torch.tensor(parts, device=self.device)
            return self._targets[bounds[-1]]
        counts = torch.stack([self.objective.count(*part) for part in pieces])
        torch.distributed.all_reduce(counts, group=mesh.data_group)
        return counts // mesh.sp  # the ranks of a row have counted the whole row each

    def _bounds(self, ranks: int) -> list[int]:
        """Returns the first row of each rank in the batch at `position`, and the number of its rows."""
        rows = self.config.batch_sizes.rows(self.position)
        return [rows * rank // ranks for rank in range(ranks + 1)]

    def _reduce_after(self, last: bool) -> None:
        """Decides how gradients are reduced after the next micro-batch."""
        if self.parts == 1:
            return
        if not self.config.parallel.sync_parts:
            self.model.set_requires_gradient_sync(last)
        elif self.mesh.dp_replicate > 1:
            self.model.set_requires_all_reduce(last)  # copies of the model need the gradient after the last one only

    def _remember(self, raised: Tensor) -> None:
        """Sets `flags`, from an earlier step if reading them now would wait for a GPU."""
        if self.device.type != "cuda":
            self._flags.append((raised, None))
        else:
            host = torch.empty(raised.shape, dtype=raised.dtype, pin_memory=True)
            host.copy_(raised, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._flags.append((host, event))
            if len(self._flags) < 2:
                return
        numbers, event = self._flags.popleft()
        if event is not None:
            event.synchronize()
        stop, failed = numbers.tolist()
        self.flags = (stop > 0, failed > 0)

    def _position(self, row: int = 0) -> contextlib.AbstractContextManager:
        """Selects the dropout masks of a micro-batch that begins at a row of the step's batch."""
        return dropout.position(self.model, step=self.step, first_row=row, row_length=self.objective.row_length)

    def judge(self) -> Trouble | None:
        """Reads the losses since the last call and returns the first bad one. Waits for a GPU."""
        if not self._unread:
            return None
        read = torch.stack([number for _, numbers in self._unread for number in numbers])
        numbers = (read if self.mesh is None else self._sum_over_ranks(read, self.mesh)).tolist()
        width = len(numbers) // len(self._unread)
        rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        positions = [position for position, _ in self._unread]
        self._unread.clear()
        for position, (loss, norm, *auxiliary) in zip(positions, rows, strict=True):
            trouble = self.guard.watch(loss, norm, position)
            if trouble is not None:
                return trouble
            self.recent.append(loss)
            if self.config.curve_every is not None:
                self.since_point.append(loss)
            self.recent_auxiliary += auxiliary
        self.grad_norm = self._norm = rows[-1][1]
        return None

    def _sum_over_ranks(self, read: Tensor, mesh: Mesh) -> Tensor:
        """Returns the losses of all ranks together, the same numbers on every rank, for (loss, norm, ...) per step."""
        numbers = read.clone()
        torch.distributed.all_reduce(numbers, group=mesh.data_group)
        width = len(numbers) // len(self._unread)
        numbers[1::width] = read[1::width]  # norms are those of all ranks already
        torch.distributed.broadcast(numbers, src=0)  # a sum could differ between ranks in its last bit
        return numbers

    def apply(self) -> None:
        """Clips the gradient and updates the weights with the schedule's learning rate."""
        self.optimizer.clip(self._norm)
        self.optimizer.step(factor(self.config.schedule, self.step, self.config.total_steps))
        if self.average is not None:
            self.average.update(self.step)
        self.rows += self.config.batch_sizes.rows(self.position)
        self.step += 1
        self.position += 1

    def skip(self) -> None:
        """Drops the gradient of this batch; the weights stay unchanged."""
        self.optimizer.drop_gradients()
        self.position += 1

    def state(self) -> tuple[Tensors, dict]:
        """Returns everything that the next steps depend on: tensors for safetensors, plain values for JSON."""
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        tensors = {"model": model_tensors(self.model), "optimizer": self.optimizer.tensors(), "random": random}
        if self.average is not None:
            tensors[AVERAGE] = self.average.tensors()
        return tensors, {
            "step": self.step,
            "position": self.position,
            "guard": self.guard.state(),
            "recent": self.recent,
            "since_point": self.since_point,
            **({"recent_auxiliary": self.recent_auxiliary} if self.recent_auxiliary else {}),
            **({} if self.config.batch_ramp is None else {"rows_read": self.rows}),
            **self.objective.meta(),
        }

    def load(self, tensors: Tensors | Path, meta: dict, rollback: bool = False) -> None:
        """Restores the output of `state`. Raises `ConfigError` if it belongs to other data or another model.

        Args:
            tensors: on several ranks the path of the checkpoint, of which each rank reads its part.
        """
        refuse(self.objective.resume_problems(meta), "resume")
        if self.mesh is None:
            load_model(self.model, tensors["model"])
            self.optimizer.load(tensors["optimizer"])
            if self.average is not None:
                fill(self.average.tensors(), tensors.get(AVERAGE, {}))
            random = tensors["random"]
        else:
            random = self._read_shards(tensors, "model", "optimizer", *([AVERAGE] if self.average else []))
        torch.set_rng_state(random["cpu"])
        if self.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)
        self.optimizer.drop_gradients()
        self.guard.load(meta["guard"], rollback)
        self.step, self.position, self.recent = meta["step"], meta["position"], list(meta["recent"])
        self.rows = meta.get("rows_read", self.step * self.config.batch_size)
        self.since_point = list(meta.get("since_point", []))
        self.recent_auxiliary = list(meta.get("recent_auxiliary", []))
        self._unread.clear()
        self._flags.clear()

    def _read_shards(self, path: Path, *groups: str, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Reads this rank's shards of a checkpoint of any layout into the model, the optimizer and the average.

        Args:
            groups: groups of the checkpoint to read.
            without: prefixes of names of the model that are not read.

        Returns:
            The random states of this rank.
        """
        from linnet.parallel.build import settle
        from linnet.runs import sharded

        settle(self.model)
        self.optimizer.prepare()  # state that the checkpoint does not have is that before the first step
        model = {name: tensor for name, tensor in model_tensors(self.model).items() if not name.startswith(without)}
        places = {"model": model, "optimizer": self.optimizer.tensors()}
        if self.average is not None:
            places[AVERAGE] = self.average.tensors()
        return sharded.load(path, {group: places[group] for group in groups}, self.mesh, self.split)

    def weights(self) -> dict[str, Tensor]:
        """Returns the whole weights that count: the average if there is one.

        On several ranks they are on the host of rank 0, and the other ranks get {}.
        """
        tensors = model_tensors(self.model) if self.average is None else self.average.tensors()
        if self.mesh is None:
            return tensors
        from linnet.parallel.build import whole_tensors

        return whole_tensors(tensors, self.mesh, self.split or {})

    def averaged(self) -> contextlib.AbstractContextManager:
        """Puts the average into the model, if there is one, while the context lasts."""
        if self.average is None:
            return contextlib.nullcontext()
        if self.mesh is not None:
            from linnet.parallel.build import settle

            settle(self.model)  # so that the model has no other copy of its weights than the shards
        return self.average.in_place()


def _shapes(batch: Batch) -> tuple:
    return tuple((tensor.shape, tensor.dtype) for tensor in batch)


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name; shared (tied) ones once, as safetensors requires."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def load_model(model: torch.nn.Module, tensors: dict[str, Tensor], where: str = "checkpoint") -> None:
    """Copies saved tensors into `model`. Raises `ConfigError` that lists every name and shape that differs."""
    fill(model_tensors(model), tensors, where)


def fill(own: dict[str, Tensor], tensors: dict[str, Tensor], where: str = "checkpoint") -> None:
    """Copies saved tensors into those of the same names. Raises `ConfigError` as `load_model`."""
    problems = mismatches(
        {name: tuple(tensor.shape) for name, tensor in own.items()},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )
    refuse(problems, where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def start_from(session: Session, run: str) -> None:
    """Loads the weights of `init_from`, without a step or optimizer: of a run's last good checkpoint, or of a model.

    Raises:
        ConfigError: the run has no good checkpoint, or the weights are damaged, not finite, or those of another model.
    """
    where, start = f"init_from {run}", RunFolder.open(run)
    prefixes, problems = session.objective.own_parts, []
    if (start.path / WEIGHTS).is_file():  # a model folder
        refuse(changed_files(start.path), where)
        path = start.path
        tensors = {"model": read_weights(path)} if session.mesh is None else {}
    elif session.mesh is None:
        path, tensors, _, problems = checkpoint.latest_good(start.checkpoint_folder)
    else:
        from linnet.runs import sharded

        path, _, problems = sharded.latest_good(start.checkpoint_folder, session.mesh)
    if path is None:
        raise ConfigError(problems or [f"{run}: has no checkpoint"], where)
    if session.mesh is None:
        mine, stored = (
            {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
            for tensors in (model_tensors(session.model), tensors["model"])
        )
        fill(mine, stored, where)
    else:
        session._read_shards(path, "model", without=prefixes)
    loaded = model_tensors(session.model).items()
    shards = {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in loaded}
    refuse(not_finite(shards), where)
    if session.average is not None:
        session.average.restart()
