"""The state that the steps of a training change, and how it is saved and restored.

gradients()   forward and backward of the next batch
judge()       reads the losses since the last call and returns the first bad one
apply()       clips the gradient and updates the weights
"""

import contextlib

import torch
from torch import Tensor

from linnet.config import ConfigError
from linnet.layers import dropout
from linnet.runs import RunFolder, checkpoint
from linnet.runs.checkpoint import Tensors
from linnet.runs.model import mismatches
from linnet.train import recompute
from linnet.train.config import TrainConfig
from linnet.train.guards import Guard, Trouble
from linnet.train.objective import RunObjective, training_loss
from linnet.train.optim import Optimizer
from linnet.train.prefetch import Prefetch
from linnet.train.schedule import factor


class Session:
    """Model, optimizer and position of one training.

    Attributes:
        step: number of updates.
        position: number of used batches in the data order; larger than `step` after a skipped batch.
        recent: losses (nats per target) since the last row of the record.
        since_point: losses since the last point of the training curve, if the configuration has `curve_every`.
        recent_auxiliary: auxiliary losses of these steps, if layers add some; they are not part of the loss.
        grad_norm: norm of the last gradient that `judge` read.
    """

    def __init__(self, config: TrainConfig, objective: RunObjective, device: torch.device):
        self.config, self.objective, self.device = config, objective, device
        self.model = objective.build(config.seed, device)
        recompute.apply(self.model, config.run.recompute)
        loss = training_loss(self.model, objective.loss(self.model))
        self._loss = torch.compile(loss) if config.run.compile else loss
        self.optimizer = Optimizer(self.model, config.optimizer)
        self.prefetch = Prefetch(objective.batches(), device)
        self.guard = Guard(config.guard)
        self.autocast = (
            torch.autocast(device.type, dtype=torch.bfloat16)
            if config.precision == "bfloat16"
            else contextlib.nullcontext()
        )
        # Reading a loss makes the host wait for a GPU, so on a GPU losses are read when a row of the record is due,
        # unless the policy needs to know a bad batch before its update.
        self.judges_every_step = device.type == "cpu" or config.guard.policy == "skip"
        self.step = self.position = 0
        self.recent: list[float] = []
        self.since_point: list[float] = []
        self.recent_auxiliary: list[float] = []
        self.grad_norm = 0.0
        # (position, loss, gradient norm, auxiliary loss if there is one) of each batch that `judge` has not read yet.
        self._unread: list[tuple[int, list[Tensor]]] = []

    def gradients(self) -> None:
        """Stores the gradient of the mean loss over all targets of the next batch in the parameters.

        Auxiliary losses add to the gradient but not to the loss; each micro-batch's term is weighted by its share of
        targets.
        """
        while self.position in self.guard.skipped:
            self.position += 1
        batch = self.prefetch.get(self.position)
        parts = self.config.accumulation
        # Autograd runs a GPU's backward in a separate thread, which helps with several GPUs. Here is only one, and
        # switching to that thread and back costs some hundred microseconds on a busy host.
        with torch.autograd.set_multithreading_enabled(False):
            if parts == 1:
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
                        total, own, *extra = self._loss(*part)
                    row += len(part[0])
                    share = total / count
                    extra = [term * (own / count) for term in extra]
                    sum(extra, share).backward()
                    loss += share.detach()
                    auxiliary += [term.detach() for term in extra]
                auxiliary = [torch.stack(auxiliary).sum()] if auxiliary else []
        self._norm = self.optimizer.gradient_norm()
        self._unread.append((self.position, [loss.detach(), self._norm, *(term.detach() for term in auxiliary)]))

    def _position(self, row: int = 0) -> contextlib.AbstractContextManager:
        """Selects the dropout masks of a micro-batch that begins at a row of the step's batch."""
        return dropout.position(self.model, step=self.step, first_row=row, row_length=self.objective.row_length)

    def judge(self) -> Trouble | None:
        """Reads the losses since the last call and returns the first bad one. Waits for a GPU."""
        if not self._unread:
            return None
        numbers = torch.stack([number for _, numbers in self._unread for number in numbers]).tolist()
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

    def apply(self) -> None:
        """Clips the gradient and updates the weights with the schedule's learning rate."""
        self.optimizer.clip(self._norm)
        self.optimizer.step(factor(self.config.schedule, self.step, self.config.total_steps))
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
        return tensors, {
            "step": self.step,
            "position": self.position,
            "guard": self.guard.state(),
            "recent": self.recent,
            "since_point": self.since_point,
            **({"recent_auxiliary": self.recent_auxiliary} if self.recent_auxiliary else {}),
            **self.objective.meta(),
        }

    def load(self, tensors: Tensors, meta: dict, rollback: bool = False) -> None:
        """Restores the output of `state`. Raises `ConfigError` if it belongs to other data or another model."""
        if problems := self.objective.resume_problems(meta):
            raise ConfigError(problems, "resume")
        load_model(self.model, tensors["model"])
        self.optimizer.load(tensors["optimizer"])
        self.optimizer.drop_gradients()
        torch.set_rng_state(tensors["random"]["cpu"])
        if self.device.type == "cuda" and "cuda" in tensors["random"]:
            torch.cuda.set_rng_state(tensors["random"]["cuda"], self.device)
        self.guard.load(meta["guard"], rollback)
        self.step, self.position, self.recent = meta["step"], meta["position"], list(meta["recent"])
        self.since_point = list(meta.get("since_point", []))
        self.recent_auxiliary = list(meta.get("recent_auxiliary", []))
        self._unread.clear()


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
    own = model_tensors(model)
    problems = mismatches(
        {name: tuple(tensor.shape) for name, tensor in own.items()},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )
    if problems:
        raise ConfigError(problems, where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def start_from(session: Session, run: str) -> None:
    """Loads the weights of the last good checkpoint of another run (`init_from`), without its step or optimizer.

    Raises:
        ConfigError: the run has no good checkpoint, or its weights belong to other data or another model.
    """
    where = f"init_from {run}"
    path, tensors, meta, problems = checkpoint.latest_good(RunFolder.open(run).checkpoint_folder)
    if path is None:
        raise ConfigError(problems or [f"{run}: has no checkpoint"], where)
    if problems := session.objective.start_problems(meta, path):
        raise ConfigError(problems, where)
    load_model(session.model, tensors["model"], where)
