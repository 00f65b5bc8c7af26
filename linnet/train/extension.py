"""Extending a run: continues the training in the same folder to more steps than it was created for.

The result equals that of a longer training from the start only if the learning rate of the steps so far does not depend
on the number of steps: under constant and inverse_sqrt, under a cosine with a length of its own, and under wsd before
its decay begins.
"""

from pathlib import Path

from linnet.config import ConfigError, refuse
from linnet.parallel.mesh import rank, together
from linnet.runs import RunFolder, checkpoint
from linnet.train.config import TrainingConfig, resolve
from linnet.train.identity import contents_of, digest_of, read_config
from linnet.train.loop import train
from linnet.train.objective import Progress
from linnet.train.objectives import read_training
from linnet.train.optimizer import decay_start, length


def extend(
    path: str | Path,
    cache: str | Path,
    steps: int | None = None,
    tokens: int | None = None,
    run: dict | None = None,
    progress: Progress | None = None,
    *,
    allow_plugins: bool = False,
) -> RunFolder:
    """Continues a finished or unfinished run in its folder. An existing result is kept as result-<steps>.json.

    Args:
        path: the run folder.
        cache: folder of prepared data.
        steps, tokens: the new length of the whole training; give one of the two.
        run: keys of `run` to change.
        progress: as in `train`.
        allow_plugins: run the Python files that config.yaml names, although no run was made with them here.

    Raises:
        ConfigError: the schedule, the length or the state of the run forbids it; or an error of `train`. If no step
            was made, the run is as it was before.
    """
    folder = RunFolder.open(path)
    old = read_config(folder, allow_plugins)
    new = extended(folder, old, steps, tokens, run or {})
    undo = None
    with together():
        if rank() == 0:
            contents = contents_of(new, cache)
            if contents is None:
                lost = "data.source, data.tokenizer or init_from cannot be read"
                raise ConfigError([f"{lost}, so the run cannot continue; restore them"], f"--extend {path}")
            with folder.lock():
                key = folder.digest or folder.path.name[-12:]
                before = [*folder.extended, {"digest": key, "steps": old.total_steps}]
                undo = folder.undo_of_extension()
                folder.reopen()  # first, so that after a kill the command that created the run can finish it
                folder.write_config(resolve(new).model_dump(mode="json"), digest_of(new, contents), before)
    try:
        return train(new, folder.path.parent, cache, progress)
    except ConfigError:  # of the device, the data or an evaluation, say: before the first step the run is as it was
        if undo is not None and not any(
            row.get("event") == "extended" and row["steps"] == new.total_steps for row in folder.metrics()
        ):
            with folder.lock():
                undo()
        raise


def extended(
    folder: RunFolder, old: TrainingConfig, steps: int | None, tokens: int | None, run: dict | None = None
) -> TrainingConfig:
    """Returns the configuration of an extended run. Raises ConfigError if the run cannot have this length."""
    where, before, schedule = f"--extend {folder.path}", old.total_steps, old.schedule
    if (steps is None) == (tokens is None):
        raise ConfigError(["give the new length of the whole training: --set steps=N, or --set tokens=N"], where)
    lengths: dict = {"steps": steps, "tokens": tokens}
    if tokens is None and not hasattr(old, "tokens"):
        del lengths["tokens"]
    values = old.model_dump(mode="json") | lengths
    if schedule.name != "triangle":  # which has no warm-up; given as a share, it would grow with the number of steps
        values["schedule"]["warmup"] = float(length(schedule.warmup, schedule.length or before))
    if old.batch_ramp is not None:
        values["batch_ramp"] = float(old.batch_sizes.growing)  # as the warm-up
    values["run"] |= run or {}
    new = read_training(values, where)
    problems = []
    if new.total_steps <= before:
        problems.append(f"steps: {new.total_steps} is not more than the {before} steps of this run; give more")
    if schedule.name in ("cosine", "linear", "triangle") and schedule.length is None:
        problems.append(
            f"schedule.name: {schedule.name} lowers the learning rate over all {before} steps, so more steps are "
            "another training; constant, inverse_sqrt and wsd can be extended. "
            f"Train anew with steps={new.total_steps}, or start a run from these weights (init_from: {folder.path})"
        )
    if folder.done and folder.result()["status"] != "done":
        problems.append(f"the run ended as {folder.result()['status']}; only a run that did not can be extended")
    at = checkpoint.step_of(folder.checkpoints()[-1]) if folder.checkpoints() else 0
    if folder.done and not at:
        problems.append("the run has no checkpoint to continue from; train anew")
    if schedule.name == "wsd" and at > (start := decay_start(schedule, before)):
        problems.append(
            f"schedule.name: the decay of wsd began at step {start}, and the last checkpoint is of step {at}; wsd can "
            f"be extended before its decay: move the checkpoints after step {start} away to go back, or train anew"
        )
    refuse(problems, where)
    return new
