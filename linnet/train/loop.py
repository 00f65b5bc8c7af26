"""Trains from a configuration to a finished run folder.

The record is metrics.jsonl; the terminal, TensorBoard and Weights & Biases show its rows. The same call resumes a
killed run: it loads the last good checkpoint, drops the rows after it, and continues with the batches, random numbers
and optimizer state of an uninterrupted run. On the CPU every later loss is the same, bit for bit.
"""

import itertools
import shutil
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from linnet import provenance, trust
from linnet.config import ConfigError, gather, unwritable
from linnet.runs import RunFolder, checkpoint
from linnet.runs.files import write_atomic
from linnet.runs.record import ROWS_LOST
from linnet.train import device as devices
from linnet.train.clock import Clock
from linnet.train.config import TrainConfig, resolve
from linnet.train.evaluation import rows_kept
from linnet.train.guards import Trouble
from linnet.train.identity import as_begun, contents_of, find
from linnet.train.loggers import open_loggers
from linnet.train.objective import Progress
from linnet.train.preflight import Preflight, preflight
from linnet.train.schedule import factor
from linnet.train.session import Session, model_tensors, start_from
from linnet.train.stop import Stop, graceful_stop


def train(config: TrainConfig, root: str | Path, cache: str | Path, progress: Progress | None = None) -> RunFolder:
    """Trains one model, or resumes where an earlier call was stopped. Returns at once if the run is done.

    Args:
        config: what to train.
        root: folder of run folders.
        cache: folder of prepared data.
        progress: is called with each row of the record, with {"event": "data", ...} while data are prepared, with
            {"event": "start", "step", "steps", "path"} before the first step, and with {"event": "scoring", "step",
            "done", "total"} (tokens) while held-out data are scored.

    Raises:
        ConfigError: lists all problems with what the configuration names; nothing was trained, no folder was created.
        CheckpointError: the disk is full, and the previous checkpoint is intact; or all checkpoints of a stopped run
            are damaged.
        LockedError: another process trains this run.
        KeyboardInterrupt: after Ctrl-C, with a checkpoint written.
    """
    config = resolve(config)
    place = find(config, root, contents_of(config, cache))
    folder, config, problems = place.folder, as_begun(place, config), []
    if folder.done:
        _remember(config)
        return folder
    if reason := unwritable(folder.path):
        problems.append(f"{folder.path}: {reason}; choose another folder for runs")
    if (folder.path / "result.json").is_dir():  # writing the result would fail after all the work
        problems.append(f"{folder.path / 'result.json'}: is a folder; move it away")
    with gather(problems):
        found = preflight(config, cache, progress)
    if problems:
        raise ConfigError(problems, "train")
    device = found.device
    _remember(config)
    with place.make(config).lock():
        if folder.done:  # the process that held the lock before has finished it
            return folder
        folder.write_error(None)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                Run(config, folder, place.digest, found, progress).run()
        except Exception as error:
            with suppress(OSError):  # a full disk must not replace the original error
                folder.write_error(f"{error}\n" if isinstance(error, ConfigError) else traceback.format_exc())
            raise
    return folder


def _remember(config: TrainConfig) -> None:
    """Puts the Python files that a training runs on the user's list, so that its folder can be loaded here."""
    includes = [include for one in config.evaluations if (include := getattr(one, "include", None))]
    trust.remember(config.plugins, includes)


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
        self, config: TrainConfig, folder: RunFolder, digest: str, found: Preflight, progress: Progress | None
    ):
        """
        Args:
            digest: digest of the training, as `linnet.train.identity` computes it.
        """
        self.config, self.folder, self.digest, self.progress = config, folder, digest, progress
        self.device, self.objective = found.device, found.objective
        self.evaluations = self.objective.evaluations
        self.session = Session(config, self.objective, self.device)
        self.steps = config.total_steps
        self.peak_flops = config.run.peak_tflops * 1e12 if config.run.peak_tflops else devices.peak_flops(self.device)
        self.clock = Clock()
        self.row_step = 0  # step of the last training row
        self.saved_step = -1
        self.evaluated: set[str] = set()  # names of the evaluations of this step that are in the record
        self.returned_to: Path | None = None

    def run(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.session.prefetch.close)
            self.start()
            stack.callback(self.record.close)
            for logger in self.loggers:
                stack.callback(logger.close)
            with graceful_stop() as stop:  # only here: at other times an immediate stop loses nothing
                status = self.loop(stop)
                if status == "done":
                    self.finish_evaluations(stop)
            self.finish(status)

    def start(self) -> None:
        """Loads the last good checkpoint, or starts at step 0 if there are no checkpoints."""
        torch.manual_seed(self.config.seed)  # only now: the number of draws before depends on what is cached
        self.folder.clean()
        for name, text in self.objective.files().items():
            if not (self.folder.path / name).is_file():
                write_atomic(self.folder.path / name, text)
        refuse = self.folder.lost_rows  # then the checkpoint before it, whose rows may be whole, writes them again
        path, tensors, meta, problems = checkpoint.latest_good(self.folder.checkpoint_folder, refuse)
        lost = self.folder.lost_rows(meta)
        if problems and path is None:  # a run from step 0 would overwrite the rest, which may be months of work
            raise checkpoint.CheckpointError([*problems, none_good(self.folder)])
        checkpoint.set_aside_after(self.folder.checkpoint_folder, path)
        if path is not None:
            self.session.load(tensors, meta)
            self.saved_step = self.session.step
        elif self.config.init_from is not None:
            start_from(self.session, self.config.init_from)
        rows = self.folder.metrics()
        kept = rows_kept(rows, meta.get("rows", 0), self.session.step)
        self.evaluated = {row["evaluation"] for row in rows[meta.get("rows", 0) : kept]}
        self.record = self.folder.record(kept)
        if path is not None:
            self.clock.load(meta["clock"])
            self.row_step = meta["row_step"]
        self.loggers = open_loggers(
            self.config.run.loggers, self.folder.path, self.config.model_dump(mode="json"), self.session.step
        )
        event = {"event": "start", "step": self.session.step, "steps": self.steps, "path": str(self.folder.path)}
        if self.progress is not None:
            self.progress(event)
        if problems:
            told = f"checkpoints set aside as *.bad: {'; '.join(problems)}; continuing from {path}"
            if lost:
                told = f"{lost}, before every checkpoint; the run continues, but fits will leave its training curve out"
            if self.progress is None:
                warnings.warn(told, stacklevel=5)
            event = ROWS_LOST if lost else "damaged_checkpoint"
            self.write({"event": event, "step": self.session.step, "problems": [told] if lost else problems})
        if path is not None:
            self.note_changes(meta, rows[:kept])

    def note_changes(self, meta: dict, rows: list[dict]) -> None:
        """Records what changed since the checkpoint that the run continues from: its length, its device.

        Args:
            rows: rows of the record that stay.
        """
        step, now = self.session.step, devices.execution(self.device, self.config.run.compile)
        noted = {row["from_digest"] for row in rows if row.get("event") == "extended"}
        lengths = [*self.folder.extended, {"digest": self.digest, "steps": self.steps}]
        for before, after in itertools.pairwise(lengths):
            if before["digest"] not in noted:
                lengthened = {"from_steps": before["steps"], "steps": after["steps"]}
                digests = {"from_digest": before["digest"], "digest": after["digest"]}
                self.write({"event": "extended", "step": step, **lengthened, **digests})
        before = meta.get("execution", now)  # 0.1.0 did not record it
        if changed := {key: [before.get(key), now.get(key)] for key in before | now if before.get(key) != now.get(key)}:
            self.write({"event": "execution_changed", "step": step, "changed": changed})

    def loop(self, stop: Stop) -> str:
        """Makes all steps. Returns "done" or "diverged"."""
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

            session.gradients()
            if session.judges_every_step or log or evaluate or save or curve:
                trouble = session.judge()
                if trouble is not None:
                    if not self.handle(trouble):
                        return "diverged"
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
            if stop.signal is not None:
                if session.judge() is None and self.saved_step != session.step:
                    self.save()
                stop.end()
        return "done"

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
        path, tensors, meta, _ = checkpoint.latest_good(folder)
        if path == self.returned_to and len(self.folder.checkpoints()) > 1:
            shutil.rmtree(path)
            path, tensors, meta, _ = checkpoint.latest_good(folder)
        if path is None:
            raise checkpoint.CheckpointError([f"{folder}: no good checkpoint to roll back to"])
        self.returned_to = path
        self.session.load(tensors, meta, rollback=True)
        self.saved_step = self.session.step
        self.record.roll_back(rows_kept(self.folder.metrics(), meta["rows"], self.session.step))
        self.row_step = meta["row_step"]
        left_out = self.session.guard.leave_out(trouble, self.session.position)
        return {"to_step": self.session.step, "left_out": left_out}

    def finish_evaluations(self, stop: Stop) -> None:
        """Runs the evaluations of the last step, after its checkpoint is written."""
        if self.saved_step != self.session.step:
            self.save()
        self.make_evaluations(stop)
        if stop.signal is not None:
            stop.end()

    def finish(self, status: str) -> None:
        """Validates once more and writes the result. A kill during this call loses nothing and writes nothing twice."""
        validation = self.evaluate() if status == "done" else {}
        rows = [row for row in self.folder.metrics() if "loss" in row and "event" not in row]
        costs, step, units = self.objective.costs, self.session.step, self.objective.units
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
                **self.objective.result_fields(step, validation),
                "evaluations": self.last_evaluations(),
                "seconds": self.clock.total(),
                f"{units}_per_second": step * costs.units / training if training else None,
                "batch_size": self.config.batch_size,
                "steps": step,
                **provenance.stamp(self.device),
                "run": self.config.run.model_dump(mode="json"),
            }
        )

    def place(self) -> dict:
        """Returns the progress of the training: units of data and FLOPs."""
        step, costs = self.session.step, self.objective.costs
        return {self.objective.units: step * costs.units, "flops": step * costs.flops}

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
        done = session.step - self.row_step
        speed = done * costs.flops / seconds
        auxiliary = session.recent_auxiliary
        session.recent, session.recent_auxiliary, self.row_step = [], [], session.step
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

    def evaluate(self) -> dict:
        """Scores the held-out data, writes the row and returns it."""
        with self.clock.paused():
            show = None if self.progress is None else self.show_scoring
            scores = self.objective.validate(self.session.model, self.session.autocast, show)
        row = {"step": self.session.step, **self.place(), **scores}
        self.write(row)
        return row

    def show_scoring(self, done: int, total: int) -> None:
        """Reports the scored share of the held-out data to `progress`."""
        self.progress({"event": "scoring", "step": self.session.step, "done": done, "total": total})

    def make_evaluations(self, stop: Stop) -> None:
        """Runs the evaluations of this step that are not in the record, until a stop is requested."""
        for name in self.evaluations.due(self.session.step, self.steps):
            if name in self.evaluated or stop.signal is not None:
                continue
            began = time.perf_counter()
            with self.clock.paused():
                row = self.evaluations.make(name, model_tensors(self.session.model))
            self.write({"step": self.session.step, **self.place(), **row, "seconds": time.perf_counter() - began})
            self.evaluated.add(name)

    def last_evaluations(self) -> dict[str, dict]:
        """Returns the metrics of each evaluation of the last step that did not fail."""
        rows = [row for row in self.folder.metrics() if row["step"] == self.session.step and "metrics" in row]
        return {row["evaluation"]: row["metrics"] for row in rows}

    def save(self) -> None:
        with self.clock.paused():
            self.record.sync()
            tensors, meta = self.session.state()
            meta |= {"digest": self.digest, "execution": devices.execution(self.device, self.config.run.compile)}
            meta |= {
                "rows": self.record.rows,
                "rows_sha256": self.record.sha256,
                "row_step": self.row_step,
                "clock": self.clock.state(),
            }
            keep = max(self.config.run.keep_checkpoints, 2 if self.config.guard.policy == "rollback" else 1)
            checkpoint.save(self.folder.checkpoint_folder, self.session.step, tensors, meta, keep)
        self.saved_step = self.session.step

    def write(self, row: dict) -> None:
        self.record.write(row)
        for logger in self.loggers:
            logger.write(row)
        if self.progress is not None:
            self.progress(row)
