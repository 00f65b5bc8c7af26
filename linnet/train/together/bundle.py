"""Trains runs that differ in their seed or rates together, in lockstep, with one batched forward and backward per step.

Each run keeps its folder, record, checkpoints, guard and optimizer (`linnet.train.loop.Run`), so a run of a bundle can
go on alone and the other way round. The bundle computes only the gradients: the parameters of all members are stacked,
and those of each model are views of the stack. A run equals the same run alone up to rounding.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from linnet.config import ConfigError, digest
from linnet.ops.capture import Captured
from linnet.runs import RunFolder
from linnet.train.config import TrainConfig, TrainingConfig, resolve
from linnet.train.identity import as_begun, contents_of, find
from linnet.train.loop import Run, checked, claim, remember, train
from linnet.train.monitor import Stop, graceful_stop
from linnet.train.objective import Loss
from linnet.train.session import Flags
from linnet.train.together.ensemble import Members

_OWN = {"name", "architecture", "seed"}  # keys in which members may differ, beside those of the optimizer below
_OWN_RATES = {"learning_rate", "weight_decay"}


def alone_because(config: TrainingConfig) -> str | None:
    """Returns the key and value for which a run can only be trained alone, None if it can be a member of a bundle."""
    if not isinstance(config, TrainConfig):
        return f"objective: {config.objective}"
    found = {
        "data.packing": (config.data.packing, "cross"),
        "accumulation": (config.accumulation, 1),
        "batch_ramp": (config.batch_ramp, None),
        "average": (config.average, None),
        "guard.policy": (config.guard.policy, "stop"),
        "run.compile": (config.run.compile, False),
        "run.recompute": (config.run.recompute, "none"),
        "parallel": (config.parallel.devices, 1),
        "init_from": (config.init_from, None),
    }
    return next((f"{key}: {value}" for key, (value, needed) in found.items() if value != needed), None)


def shape_of(config: TrainingConfig) -> str:
    """Returns a digest that is equal for runs that can share a bundle."""
    values = config.model_dump(mode="json", exclude=_OWN)
    values["optimizer"] = {key: value for key, value in values["optimizer"].items() if key not in _OWN_RATES}
    return digest(values)


def bundles(configs: Sequence[TrainingConfig], most: int) -> list[list[int]]:
    """Returns the indices of runs that are trained together, at most `most` each, in order of their first member."""
    groups: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        alone = most == 1 or alone_because(config) is not None
        groups.setdefault(str(index) if alone else shape_of(config), []).append(index)
    return [group[at : at + most] for group in groups.values() for at in range(0, len(group), most)]


def train_together(configs: Sequence[TrainingConfig], root: str | Path, cache: str | Path) -> list[RunFolder]:
    """Trains runs of one `shape_of` together, or resumes them. Runs that are done are left as they are.

    Members that were stopped at different steps are trained in groups of one step, one group after another.

    Raises:
        ConfigError, CheckpointError, LockedError, KeyboardInterrupt: as `linnet.train.train`, for any of the runs.
        ValueError: the runs cannot share a bundle.
    """
    if len({shape_of(config) for config in configs}) > 1 or any(map(alone_because, configs)):
        raise ValueError("bundle: these runs cannot be trained together; ask `bundles` which ones can")
    if len(configs) == 1:
        return [train(configs[0], root, cache)]
    folders, runs = [], []
    with ExitStack() as stack:
        for config in map(resolve, configs):
            place = find(config, root, contents_of(config, cache))
            folder, config = place.folder, as_begun(place, config)
            folders.append(folder)
            remember(config)
            if not folder.done:
                found = checked(config, folder, cache)
                if claim(stack, place, config):
                    runs.append((config, folder, place.digest, found))
        if not runs:
            return folders
        device = runs[0][3].device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                members = [Run(*each, None) for each in runs]
                for run in members:
                    run.open(stack)
                with graceful_stop() as stop:
                    for group in _by_step(members):
                        _Lockstep(group, stop).run()
                    if stop.signal is not None:  # it came while the last run was finished
                        stop.end()
        except Exception as error:
            text = f"{error}\n" if isinstance(error, ConfigError) else traceback.format_exc()
            for _, folder, *_ in runs:
                with suppress(OSError):  # a full disk must not replace the original error
                    if not folder.done:
                        folder.write_error(text)
            raise
    return folders


def _by_step(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[int, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.session.step, []).append(run)
    return [groups[step] for step in sorted(groups)]


class _Lockstep:
    """Runs at one step, which go on together until each of them ends."""

    def __init__(self, runs: Sequence[Run], stop: Stop):
        self.stop = stop
        self.steps: dict[Run, Iterator[Flags]] = {run: run.advance(stop) for run in runs}
        for run in runs:
            run.bundle = len(runs)

    def run(self) -> None:
        gradients: _Gradients | None = None
        while waiting := self._next():
            if gradients is None or gradients.runs != list(waiting):  # a run that diverged has left
                gradients = _Gradients(list(waiting))
            gradients.take(self._agreed(waiting))

    def _next(self) -> dict[Run, Flags]:
        """Lets each run go on to its next step. Returns the flags of those that have one; the others are finished."""
        waiting: dict[Run, Flags] = {}
        asked: BaseException | None = None
        for run, steps in list(self.steps.items()):
            try:
                waiting[run] = next(steps)
            except StopIteration:
                run.finish(run.status)
                del self.steps[run]
            except (KeyboardInterrupt, SystemExit) as error:  # a signal, after this run has saved its checkpoint
                asked = error
                del self.steps[run]
        if asked is not None:
            for run in waiting:  # those that went on before the signal came
                with suppress(type(asked)):
                    run.pause(self.stop)
            raise asked
        return waiting

    def _agreed(self, waiting: dict[Run, Flags]) -> Flags:
        """Returns the flags that are set for any run. Where one run is to save, all do: they resume at one step."""
        due, failed = (any(flags) for flags in zip(*waiting.values(), strict=True))
        if due:
            for run in waiting:
                run.saved_at = float("-inf")
        return due, failed


class _Gradients:
    """The gradients of runs that are at one step."""

    def __init__(self, runs: list[Run]):
        self.runs = runs
        self.sessions = [run.session for run in runs]
        first = self.sessions[0]
        self._views: _Views | None = None
        if len(runs) > 1:
            models = [session.model for session in self.sessions]
            self._views = _Views(models, first.device, first.config.precision, first.objective.loss)
            self._pass: Callable[..., Tensor] = self._views.whole_pass
            if first.config.run.graph and first.device.type == "cuda":
                self._pass = Captured(self._views.whole_pass, first.device)

    def take(self, flags: Flags) -> None:
        """Stores the gradient of its next batch in each session."""
        if self._views is None:
            self.sessions[0].gradients(flags)
            return
        batches = [session.next_batch() for session in self.sessions]
        tokens, targets = (torch.stack(parts) for parts in zip(*batches, strict=True))
        self._views.set_step(self.sessions[0].step)
        numbers = self._pass(tokens, targets)
        for index, session in enumerate(self.sessions):
            session.take_gradients(numbers[index], self._views.gradients_of(index), flags)


class _Views(Members):
    """Members whose models read their weights in the stack, so that an update of a model is one of the stack."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: torch.device,
        precision: Literal["float32", "bfloat16"],
        loss: Callable[[nn.Module], Loss],
    ):
        super().__init__(models, device, precision, loss)
        for index, model in enumerate(models):
            named = dict(model.named_parameters())
            for name, stacked in self._parameters.items():
                named[name.removeprefix("model.")].data = stacked.detach()[index]
        self._flat = torch.zeros_like(self._values)
        self._used: list[bool] = []

    def set_step(self, step: int) -> None:
        """Selects the masks of dropout."""
        for place in self._mask_places:
            place[..., 1] = step

    def whole_pass(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Computes the gradients of all members, for `gradients_of`.

        Returns:
            The mean loss, the norm of the gradient, and the auxiliary losses if there are some, [M, 2 or 3].
        """
        losses = self._run(lambda: self._map_losses(tokens, targets))
        _, found = self._gradients(losses)
        leaves = self._parameters.values()
        given = (torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True))
        torch.cat([g.reshape(self.size, -1) for g in given], 1, out=self._flat)
        self._used = [g is not None for g in found]
        losses = losses.detach().view(self.size, -1)
        norms = torch.linalg.vector_norm(self._flat, dim=1, keepdim=True)
        return torch.cat([losses[:, :1], norms, losses[:, 1:]], 1)

    def gradients_of(self, index: int) -> list[Tensor | None]:
        """Returns the gradient of each parameter of a member, as views of one tensor."""
        parts = self._flat[index].split(self._widths)
        shapes = (p.shape[1:] for p in self._parameters.values())
        found = zip(parts, shapes, self._used, strict=True)
        return [part.view(shape) if used else None for part, shape, used in found]
