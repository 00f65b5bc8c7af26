"""Trains from a configuration to a finished run folder.

The record is metrics.jsonl; the terminal, TensorBoard and Weights & Biases show its rows. The same call resumes a
killed run: it loads the last good checkpoint, drops the rows after it, and continues with the batches, random numbers
and optimizer state of an uninterrupted run. On the CPU every later loss is the same, bit for bit.

On several devices every rank makes these calls; rank 0 alone writes the record, the result and the terminal. All
ranks make each call that communicates (a step, a validation, a checkpoint), so nothing that leads to one may depend on
what only one rank knows: a signal, a full disk or the clock of one rank reaches the others with the gradient's norm.
"""

import functools
import itertools
import os
import shutil
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from linnet import provenance, trust
from linnet.config import ConfigError, digest, gather, refuse, unwritable
from linnet.parallel.mesh import (
    Mesh,
    agree,
    in_turns,
    is_secondary,
    is_shared,
    on_main,
    shared,
    start,
    together,
    world,
)
from linnet.parallel.mesh import stop as stop_group
from linnet.runs import RunFolder, checkpoint
from linnet.runs.checkpoint import Tensors
from linnet.runs.files import write_atomic
from linnet.runs.folder import PICTURES
from linnet.runs.record import ROWS_LOST
from linnet.runs.saver import Saver
from linnet.train import device as devices
from linnet.train import float8
from linnet.train.config import TrainingConfig, resolve
from linnet.train.evaluation import rows_kept
from linnet.train.identity import Place, as_begun, contents_of, find, unfinished_like
from linnet.train.monitor import Stop, Trouble, graceful_stop, open_loggers
from linnet.train.objective import Progress
from linnet.train.objectives import find_objective, in_steps
from linnet.train.optimizer import factor
from linnet.train.preflight import Preflight, check_devices, check_start, length_problems, preflight, unused_problems
from linnet.train.session import Flags, Session, start_from


class Clock:
    """Counts the seconds of a run over all its calls; pauses (validations, checkpoints) do not count as training."""

    def __init__(self):
        self._before = self._pauses = self._lap = 0.0
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter()

    def total(self) -> float:
        return self._before + time.perf_counter() - self._began

    def training(self) -> float:
        return self.total() - self._pauses

    def lap(self) -> float:
        """Returns the training seconds since the last lap."""
        before, self._lap = self._lap, self.training()
        return max(self._lap - before, 1e-9)

    @contextmanager
    def paused(self):
        before = time.perf_counter()
        yield
        self._pauses += time.perf_counter() - before

    def state(self) -> list[float]:
        return [self.total(), self._pauses, self._lap]

    def load(self, state: list[float]) -> None:
        self._before, self._pauses, self._lap = state
        self.start()


def train(config: TrainingConfig, root: str | Path, cache: str | Path, progress: Progress | None = None) -> RunFolder:
    """Trains one model, or resumes where an earlier call was stopped. Returns at once if the run is done.

    Args:
        config: what to train.
        root: folder of run folders.
        cache: folder of prepared data.
        progress: is called with each row of the record, with {"event": "data", ...} while data are prepared, with
            {"event": "unfinished", "text"} if a begun run differs in a few keys only, with
            {"event": "start", "step", "steps", "path"} before the first step (with the `units` of the whole training if
            its batch grows), and with {"event": "scoring", "step", "done", "total"} (tokens) while held-out data are
            scored.

    Raises:
        ConfigError: lists all problems with what the configuration names; nothing was trained, no folder was created.
            With several ranks, all raise it.
        CheckpointError: the disk is full, and the previous checkpoint is intact; or all checkpoints of a stopped run
            are damaged.
        LockedError: another process trains this run.
        KeyboardInterrupt: after Ctrl-C, with a checkpoint written.
    """
    config = resolve(config)
    mesh = _start(config) if world() > 1 else None
    if config.epochs is not None:
        config = _in_steps(config, cache, progress, mesh)

    def look_up() -> tuple[Place, bool]:
        place = find(config, root, contents_of(config, cache))
        return place, place.folder.done

    place, done = on_main(look_up)
    folder, config = place.folder, as_begun(place, config)
    if done:
        trust.remember(config.plugins, config.includes)
        return _left(mesh, folder)
    with together():
        needs = checked(config, folder, cache, progress, mesh)
    device = needs.device
    agree({"data": digest(needs.objective.meta())})
    trust.remember(config.plugins, config.includes)
    settings = config.model_dump(mode="json")
    if progress is not None and (mesh is None or mesh.main) and not folder.exists:
        if note := unfinished_like(settings, root):
            progress({"event": "unfinished", "text": note})
    new = not folder.path.exists()
    with ExitStack() as stack:
        if not on_main(lambda: claim(stack, place, settings)):  # the process that held the lock before has finished it
            return _left(mesh, folder)
        with together():
            _seen(folder)
        tokens = needs.objective.row_tokens(config) * config.batch_size // config.parts
        stack.enter_context(devices.threads(device, config.model.d_model, tokens))
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                with together():
                    run = Run(config, folder, place.digest, needs, progress, mesh)
                run.run()
        except Exception as error:
            if mesh is None or mesh.main or not is_shared(error):
                text = f"{error}\n" if isinstance(error, ConfigError) else traceback.format_exc()
                if is_secondary(error):
                    text = f"another rank failed (its error is in errors/) or was lost; this rank saw:\n{text}"
                with suppress(OSError):  # a full disk must not replace the original error
                    folder.write_error(text, 0 if mesh is None else mesh.rank)
            if new and isinstance(error, ConfigError) and (mesh is None or mesh.main) and not folder.begun:
                shutil.rmtree(folder.path, ignore_errors=True)  # made by this call, and no step can follow
            raise
    return _left(mesh, folder)


def _start(config: TrainingConfig) -> Mesh | None:
    """Connects the ranks of a run and returns this one's mesh.

    Raises:
        ConfigError: on every rank, if the ranks do not run the same code with the same configuration, or `parallel`
            does not fit their number.
    """
    agree({"code": provenance.code_digest(), "configuration": digest(config.model_dump(mode="json"))})
    with together():
        check_devices(config, world(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return start(config.parallel, devices.choose(config.run.device))


def _in_steps(
    config: TrainingConfig, cache: str | Path, progress: Progress | None, mesh: Mesh | None
) -> TrainingConfig:
    """Returns a training whose length is in steps. Raises ConfigError with all problems of the configuration."""
    try:
        with in_turns():
            return in_steps(config, cache, progress)
    except ConfigError:
        with together():
            preflight(config, cache, progress, mesh)  # raises with those beside the data too
        raise


def checked(
    config: TrainingConfig,
    folder: RunFolder,
    cache: str | Path,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
) -> Preflight:
    """Returns what a training needs. Raises ConfigError with all problems that can be found before the first step."""
    problems: list[str] = []
    if reason := unwritable(folder.path):
        problems.append(f"{folder.path}: {reason}; choose another folder for runs")
    if (folder.path / "result.json").is_dir():  # writing the result would fail after all the work
        problems.append(f"{folder.path / 'result.json'}: is a folder; move it away")
    if not folder.exists:  # an old release began such runs
        problems += length_problems(config) + unused_problems(config)
    with gather(problems):
        needs = preflight(config, cache, progress, mesh)
    refuse(problems, "train")
    if config.init_from is not None and not folder.checkpoints():
        check_start(needs.objective, config.init_from)
    return needs


def claim(stack: ExitStack, place: Place, settings: dict) -> bool:
    """Makes the run folder, whose config.yaml states `settings`, and locks it. Returns False if the run is done."""
    folder = place.make(settings)
    stack.enter_context(folder.lock())
    if folder.done:
        return False
    folder.write_error(None)
    return True


def _seen(folder: RunFolder) -> None:
    """Raises ConfigError on a rank that does not see the run folder that rank 0 made."""
    if not folder.exists:
        where = f"{folder.path.absolute()} on {socket.gethostname()}"
        problem = (
            f"{where}: rank 0 made this run folder, but it is not there; use storage that all machines share (--out)"
        )
        raise ConfigError([problem], "train")


def _left(mesh: Mesh | None, folder: RunFolder) -> RunFolder:
    """Leaves the group of ranks and returns the folder."""
    if mesh is not None:
        mesh.barrier()
        stop_group()
    return folder


def none_good(folder: RunFolder) -> str:
    """Returns the message for a run whose checkpoints are all damaged."""
    names = ", ".join(path.name for path in folder.checkpoints())
    return (
        f"{folder.checkpoint_folder}: no checkpoint is good ({names}), so this run cannot continue; copy a good one "
        "there, or move them away or delete them to start anew from step 0"
    )


class Run:
    """One call of `train`: sets everything up, then `run`."""

    def __init__(
        self,
        config: TrainingConfig,
        folder: RunFolder,
        digest: str,
        found: Preflight,
        progress: Progress | None,
        mesh: Mesh | None = None,
    ):
        """
        Args:
            digest: digest of the training, as `linnet.train.identity` computes it.
            mesh: this rank among several, None if there is one process.
        """
        self.config, self.folder, self.digest, self.mesh = config, folder, digest, mesh
        self.main = mesh is None or mesh.main
        self.progress = progress if self.main else None
        self.device, self.objective = found.device, found.objective
        self.evaluations = self.objective.evaluations
        self.session = Session(config, self.objective, self.device, mesh)
        keep = max(config.run.keep_checkpoints, 2 if config.guard.policy == "rollback" else 1)
        background = config.run.async_save
        self.saver = Saver(folder.checkpoint_folder, keep, mesh, self.session.split, background)
        self.steps = config.total_steps
        self.peak_flops = config.run.peak_tflops * 1e12 if config.run.peak_tflops else devices.peak_flops(self.device)
        if mesh is not None and self.peak_flops is not None:
            self.peak_flops *= mesh.world
        self.clock = Clock()
        self.row_batches: float = 0  # whole batches before the last training row
        self.saved_step, self.saved_at = -1, time.monotonic()
        self.loggers: list = []
        self.steady = False  # whether a step was made: later ones need no time for compilation
        self.evaluated: set[str] = set()  # names of the evaluations of this step that are in the record
        self.returned_to: Path | None = None
        self.status = "running"
        self.bundle = 1  # runs that were trained together with this one, itself included

    def run(self) -> None:
        with ExitStack() as stack:
            self.open(stack)
            with graceful_stop() as stop:  # only here: at other times an immediate stop loses nothing
                for flags in self.advance(stop):
                    try:
                        self.session.gradients(flags)
                    except Exception:
                        if stop.signal is None or self.mesh is not None or not self.config.run.compile:
                            raise
                        self.end(stop)  # Ctrl-C reaches a C++ compiler too, whose end is an error of torch.compile
            self.finish(self.status)

    def open(self, stack: ExitStack) -> None:
        """Loads the last good checkpoint and opens the record; the stack closes what was opened."""
        stack.callback(self.session.prefetch.close)
        stack.callback(self.saver.close)
        self.start()
        if self.main:
            stack.callback(self.record.close)
        for logger in self.loggers:
            stack.callback(logger.close)

    def start(self) -> None:
        """Loads the last good checkpoint, or starts at step 0 if there are no checkpoints."""
        torch.manual_seed(self.config.seed)  # only now: the number of draws before depends on what is cached
        with together():
            if self.main:
                self.clean()
        refuse = self.folder.lost_rows  # then the checkpoint before it, whose rows may be whole, writes them again
        path, tensors, meta, problems = self.latest_good(refuse)
        lost = self.folder.lost_rows(meta) if self.main else None
        if problems and path is None:  # a run from step 0 would overwrite the rest, which may be months of work
            raise shared(checkpoint.CheckpointError([*problems, none_good(self.folder)]))
        with together():
            if self.main:
                checkpoint.set_aside_after(self.folder.checkpoint_folder, path)
        if path is not None:
            self.restore(path, tensors, meta)
        elif self.config.init_from is not None:
            with together():
                start_from(self.session, self.config.init_from)
        self.evaluated = set(on_main(lambda: self.open_record(meta.get("rows", 0))))
        if path is not None:
            self.clock.load(meta["clock"])
        event = {"event": "start", "step": self.session.step, "steps": self.steps, "path": str(self.folder.path)}
        if self.config.batch_ramp is not None:  # otherwise each step reads as much as the others
            rows = self.config.batch_sizes.first(self.steps)
            event["units"] = round(rows / self.config.batch_size * self.objective.costs.units)
        if self.progress is not None:
            self.progress(event)
        if problems and self.main:
            told = f"checkpoints set aside as *.bad: {'; '.join(problems)}; continuing from {path}"
            if lost:
                told = f"{lost}, before every checkpoint; the run continues, but fits will leave its training curve out"
            if self.progress is None:
                warnings.warn(told, stacklevel=5)
            event = ROWS_LOST if lost else "damaged_checkpoint"
            self.write({"event": event, "step": self.session.step, "problems": [told] if lost else problems})
        if path is not None and self.main:
            self.note_changes(meta)

    def clean(self) -> None:
        """Removes what killed processes left, and writes the files that make the folder a usable model."""
        self.folder.clean()
        for name, text in self.objective.files().items():
            if not (self.folder.path / name).is_file():
                write_atomic(self.folder.path / name, text)

    def open_record(self, rows_before: int) -> list[str]:
        """Opens the record and the loggers. Returns the evaluations of this step that are in the record.

        Args:
            rows_before: number of rows that precede the checkpoint from which the run continues.
        """
        rows, step, every = self.folder.metrics(), self.session.step, self.config.run.evaluate_every
        extended = step < self.steps and bool(every) and step % every == 0
        kept = rows_kept(rows, rows_before, step, validation=extended)
        self.record = self.folder.record(kept)
        config = self.config.model_dump(mode="json")
        self.loggers = open_loggers(self.config.run.loggers, self.folder.path, config, self.session.step)
        return [row["evaluation"] for row in rows[rows_before:kept] if "evaluation" in row]

    def latest_good(
        self, refuse: Callable[[dict], str | None] = lambda meta: None
    ) -> tuple[Path | None, Tensors | Path, dict, list[str]]:
        """Returns the newest good checkpoint, as `checkpoint.latest_good`; several ranks get its path for tensors."""
        if self.mesh is None:
            return checkpoint.latest_good(self.folder.checkpoint_folder, refuse)
        from linnet.runs import sharded  # takes seconds to import

        folder, mesh = self.folder.checkpoint_folder, self.mesh
        with together():
            path, meta, problems = sharded.latest_good(folder, mesh, refuse)
        return path, path or {}, meta, problems

    def note_changes(self, meta: dict) -> None:
        """Records what changed since the checkpoint that the run continues from: its length, its devices."""
        step, now = self.session.step, self.execution()
        noted = {row["from_digest"] for row in self.folder.metrics() if row.get("event") == "extended"}
        lengths = [*self.folder.extended, {"digest": self.digest, "steps": self.steps}]
        for before, after in itertools.pairwise(lengths):
            if before["digest"] not in noted:
                lengthened = {"from_steps": before["steps"], "steps": after["steps"]}
                digests = {"from_digest": before["digest"], "digest": after["digest"]}
                self.write({"event": "extended", "step": step, **lengthened, **digests})
        before = meta.get("execution", now)  # 0.1.0 did not record it
        if changed := {key: [before.get(key), now.get(key)] for key in before | now if before.get(key) != now.get(key)}:
            self.write({"event": "execution_changed", "step": step, "changed": changed})

    def execution(self) -> dict:
        """Returns what changes the rounding of losses, as checkpoints keep it."""
        settings = devices.execution(self.device, self.config.run.compile)
        return settings if self.mesh is None else settings | {"parallel": self.mesh.degrees.written()}

    def advance(self, stop: Stop) -> Iterator[Flags]:
        """Makes all steps and the evaluations of the last one. At the end `status` is "done" or "diverged".

        Yields the flags of each step (`Session.gradients`). Before it asks for the next step, the caller stores the
        gradient of the next batch in the session.
        """
        config, run, session = self.config, self.config.run, self.session
        if config.guard.policy == "rollback" and session.step == 0:
            self.save()  # the target of an early rollback
        self.clock.start()
        if session.step < self.steps:
            self.make_evaluations(stop)  # evaluations of this step that a kill interrupted
        while session.step < self.steps:
            after = session.step + 1
            log = after % run.log_every == 0 or after == self.steps
            evaluate = run.evaluate_every and after % run.evaluate_every == 0 and after < self.steps
            suites = after < self.steps and self.evaluations.due(after, self.steps)
            save = suites or (run.checkpoint_every and after % run.checkpoint_every == 0 and after < self.steps)

            curve = config.curve_every and (after % config.curve_every == 0 or after == self.steps)

            yield (stop.signal is not None or self.save_due(), self.saver.failed)
            if session.judges_every_step or log or evaluate or save or curve:
                trouble = session.judge()
                if trouble is not None:
                    if not self.handle(trouble):
                        self.status = "diverged"
                        return
                    continue
            session.apply()
            self.evaluated.clear()

            if log or curve:
                self.write(self.training_row(log) | (self.curve_point() if curve else {}))
            if evaluate:
                self.evaluate()
            if save:
                self.save()
            if suites:
                self.make_evaluations(stop)
            if self.mesh is not None and not self.steady:
                self.mesh.after_first_step()
                self.steady = True
            # Signals that came since the gradients are seen at once by one process, by several after the next step.
            if any(session.flags) or (self.mesh is None and stop.signal is not None):
                self.pause(stop)
        self.status = "done"
        self.finish_evaluations(stop)

    def save_due(self) -> bool:
        """Returns whether the last checkpoint is older than `run.checkpoint_minutes`, by the clock of rank 0."""
        minutes = self.config.run.checkpoint_minutes
        return self.main and minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def pause(self, stop: Stop) -> None:
        """Saves between two steps, and ends the process if a signal asked any rank to stop."""
        stopping = self.stop_everywhere(stop)
        save = stopping or on_main(self.save_due)
        with together():  # raises the error of a background save, on all ranks
            self.saver.wait()
        if save and self.session.judge() is None and self.saved_step != self.session.step:
            self.save()
        if stopping:
            self.end(stop)

    def end(self, stop: Stop) -> None:
        """Ends the process as the signal asks, once all that was saved is on the disk. All ranks call it."""
        with together():
            self.saver.wait()
        try:
            stop.end()
        except BaseException as asked:
            raise shared(asked) from None

    def stop_everywhere(self, stop: Stop) -> bool:
        """Returns whether a signal asked any rank to stop, after which all have this signal. All ranks call it."""
        if self.mesh is not None:
            stop.signal = self.mesh.first(stop.signal)
        return stop.signal is not None

    def handle(self, trouble: Trouble) -> bool:
        """Records a bad batch and applies the policy. Returns False if the run ends."""
        event = {"event": trouble.kind, "action": trouble.action, "step": self.session.step + 1}
        event |= {"position": trouble.position, "loss": trouble.loss, "grad_norm": trouble.grad_norm}
        if trouble.median is not None:
            event["median"] = trouble.median
        if trouble.action == "skip":
            self.session.skip()
        elif trouble.action == "rollback":
            event |= self.roll_back(trouble)
        self.write(event)
        return trouble.action != "stop"

    def roll_back(self, trouble: Trouble) -> dict:
        """Returns to the last checkpoint, or to the one before it if the last one led to trouble again."""
        folder = self.folder.checkpoint_folder
        with together():
            self.saver.wait()
        path, tensors, meta, _ = self.latest_good()
        if path == self.returned_to and len(on_main(self.folder.checkpoints)) > 1:
            on_main(lambda: checkpoint.remove(path))
            path, tensors, meta, _ = self.latest_good()
        if path is None:
            raise shared(checkpoint.CheckpointError([f"{folder}: no good checkpoint to roll back to"]))
        self.returned_to = path
        self.restore(path, tensors, meta, rollback=True)
        if self.main:
            self.record.roll_back(rows_kept(self.folder.metrics(), meta["rows"], self.session.step))
        left_out = self.session.guard.leave_out(trouble, self.session.position)
        return {"to_step": self.session.step, "left_out": left_out}

    def restore(self, path: Path, tensors: Tensors | Path, meta: dict, rollback: bool = False) -> None:
        """Puts the session where a checkpoint left it. Raises CheckpointError if a value that it needs is missing."""
        needed = ("step", "position", "recent", "guard", "row_step", "clock", "data")
        lacking = [key for key in needed if key not in meta]
        lacking += sorted({"model", "optimizer", "random"} - checkpoint.groups(path))
        if lacking:
            raise shared(checkpoint.CheckpointError([f"{path}/state.json: is damaged: no {', '.join(lacking)}"]))
        with together():
            self.session.load(tensors, meta, rollback)
        self.saved_step, self.row_batches = self.session.step, meta["row_step"]

    def finish_evaluations(self, stop: Stop) -> None:
        """Runs the evaluations of the last step, after its checkpoint is written."""
        if self.saved_step != self.session.step:
            self.save()
        self.make_evaluations(stop)
        if self.stop_everywhere(stop):
            self.end(stop)

    def finish(self, status: str) -> None:
        """Validates once more and writes the result. A kill during this call loses nothing and writes nothing twice."""
        validation = self.evaluate(last=True) if status == "done" else {}
        with together():
            reason = self.saver.join()
        if reason:
            warnings.warn(f"{reason}; every command reads the shards", stacklevel=4)
        on_main(lambda: self.write_result(status, validation))

    def write_result(self, status: str, validation: dict) -> None:
        record = self.folder.metrics()
        rows = [row for row in record if "loss" in row and "event" not in row]
        costs, session, units = self.objective.costs, self.session, self.objective.units
        training = self.clock.training()
        self.folder.write_result(
            {
                "status": status,
                "architecture": self.config.architecture,
                "params_total": costs.parameters,
                "params_non_embedding": costs.parameters_backbone,
                **self.place(),
                "loss": validation.get("validation_loss"),
                "train_loss": rows[-1]["loss"] if rows else None,
                **self.objective.result_fields(session.rows, validation),
                **self.objective.record_fields(record),
                **{key: value for key, value in validation.items() if key.startswith("raw_")},
                "evaluations": self.last_evaluations(),
                "seconds": self.clock.total(),
                f"{units}_per_second": session.batches * costs.units / training if training else None,
                "batch_size": self.config.batch_size,
                "steps": session.step,
                **provenance.stamp(self.device),
                "run": self.config.run.model_dump(mode="json"),
                **self.layout(),
                **({} if self.bundle == 1 else {"bundle": self.bundle}),
            }
        )

    def layout(self) -> dict:
        """Returns the number of devices and how the training was divided among them; {} on one."""
        if self.mesh is None:
            return {}
        return {"devices": self.mesh.world, "parallel": self.config.parallel.model_dump(mode="json")}

    def place(self) -> dict:
        """Returns the progress of the training: units of data and FLOPs."""
        batches, costs = self.session.batches, self.objective.costs
        return {self.objective.units: round(batches * costs.units), "flops": batches * costs.flops}

    def curve_point(self) -> dict:
        """Returns the mean loss since the last point of the training curve for fits, for every `run.log_every`."""
        losses, self.session.since_point = self.session.since_point, []
        return {"curve": sum(losses) / len(losses)}

    def training_row(self, log: bool) -> dict:
        """Returns a row of the record: the mean loss since the last row, and the speed.

        Args:
            log: whether a row is due; otherwise only the fields for a point of the curve are returned.
        """
        session, losses, costs = self.session, self.session.recent, self.objective.costs
        rate = self.config.optimizer.learning_rate * factor(self.config.schedule, session.step - 1, self.steps)
        if not log:
            return {"step": session.step, **self.place(), "learning_rate": rate}
        loss = sum(losses) / len(losses)
        seconds = self.clock.lap()
        done = session.batches - self.row_batches
        speed = done * costs.flops / seconds
        auxiliary = session.recent_auxiliary
        session.recent, session.recent_auxiliary, self.row_batches = [], [], session.batches
        return {
            "step": session.step,
            **self.place(),
            "loss": loss,
            **self.objective.loss_fields(loss),
            **({"auxiliary_loss": sum(auxiliary) / len(auxiliary)} if auxiliary else {}),
            "learning_rate": rate,
            "grad_norm": session.grad_norm,
            f"{self.objective.units}_per_second": done * costs.units / seconds,
            "flop_utilisation": speed / self.peak_flops if self.peak_flops else None,
            "memory_bytes": devices.memory_bytes(self.device),
            "seconds": self.clock.total(),
        }

    def evaluate(self, last: bool = False) -> dict:
        """Scores the held-out data, writes the row and returns it.

        The scores are those of the average of the weights, if there is one. Then the `last` row also has those of the
        weights themselves, as `raw_loss` and so on.
        """
        with self.clock.paused():
            with self.session.averaged():
                scores = self.score()
                self.draw_pictures()
            if last and self.session.average is not None:
                scores |= {key.replace("validation_", "raw_", 1): value for key, value in self.score().items()}
        row = {"step": self.session.step, **self.place(), **scores}
        self.write(row)
        return row

    def score(self) -> dict[str, float]:
        """Scores the held-out data with the weights that the model has."""
        session, show = self.session, None if self.progress is None else self.show_scoring
        ranks = {} if self.mesh is None else {"mesh": self.mesh}  # an objective for one device need not take it
        with float8.in_bfloat16(session.model):
            return self.objective.validate(session.model, session.autocast, show, **ranks)

    def draw_pictures(self) -> None:
        """Writes the pictures of this step into the run folder."""
        session = self.session
        pictures = self.objective.pictures(session.model, session.autocast, self.mesh)
        if not self.main:
            return
        for ending, content in pictures.items():
            path = self.folder.path / PICTURES / f"step-{session.step:08d}{ending}"
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, content)

    def show_scoring(self, done: int, total: int) -> None:
        """Reports the scored share of the held-out data to `progress`."""
        self.progress({"event": "scoring", "step": self.session.step, "done": done, "total": total})

    def make_evaluations(self, stop: Stop) -> None:
        """Runs the evaluations of this step that are not in the record, until a stop is requested."""
        for name in self.evaluations.due(self.session.step, self.steps):
            if name in self.evaluated or self.stop_everywhere(stop):
                continue
            began = time.perf_counter()
            with self.clock.paused():
                weights = self.session.weights()
                row = on_main(functools.partial(self.evaluations.make, name, weights))
            self.write({"step": self.session.step, **self.place(), **row, "seconds": time.perf_counter() - began})
            self.evaluated.add(name)

    def last_evaluations(self) -> dict[str, dict]:
        """Returns the metrics of each evaluation of the last step that did not fail."""
        rows = [row for row in self.folder.metrics() if row.get("step") == self.session.step and "metrics" in row]
        return {row["evaluation"]: row["metrics"] for row in rows}

    def save(self) -> None:
        with self.clock.paused():
            rows = on_main(self.sync_record)
            tensors, meta = self.session.state()
            meta |= {"digest": self.digest, "execution": self.execution(), **rows}
            meta |= {"row_step": self.row_batches, "clock": self.clock.state()}
            best = on_main(self.folder.best_step) if self.config.run.keep_best else None
            with together():
                self.saver.save(self.session.step, tensors, meta, best)
        self.saved_step, self.saved_at = self.session.step, time.monotonic()

    def sync_record(self) -> dict:
        """Waits until the record is on the disk. Returns its length and sum, with which a resumed run compares it."""
        self.record.sync()
        return {"rows": self.record.rows, "rows_sha256": self.record.sha256}

    def write(self, row: dict) -> None:
        """Adds a row to the record, the loggers and the terminal, on rank 0."""
        if not self.main:
            return
        self.record.write(row)
        for logger in self.loggers:
            logger.write(row)
        if self.progress is not None:
            self.progress(row)


def result_numbers(config: TrainingConfig) -> set[str]:
    """Returns the names of the numbers that result.json of a finished training may have."""
    kind = find_objective(config)
    results = {"loss", *kind.result_numbers(config)}
    raw = {kind.units, *results} if config.average is not None else set()
    counts = {"params_total", "params_non_embedding", kind.units, "flops", "batch_size", "steps", "devices", "bundle"}
    return results | {f"raw_{name}" for name in raw} | counts | {"train_loss", "seconds", f"{kind.units}_per_second"}
