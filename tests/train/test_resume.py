"""A run that is stopped in any way and started again is the run that was never stopped."""

import errno
import os
import random
import signal

import pytest
import torch
from children import Child

from linnet.config import ConfigError
from linnet.models import family
from linnet.runs import CheckpointError, LockedError, Record, RunFolder, checkpoint
from linnet.study.collect import load_study
from linnet.train import run_folder, train

TIMES = {"tokens_per_second", "seconds", "memory_bytes", "flop_utilisation", "date"}
MODEL = family("tnl")(16, 2, num_heads=2).model_dump()
LONG = {"steps": 40, "log_every": 1, "checkpoint_every": 3, "evaluate_every": 8}

# Trains in a child that is killed with SIGKILL after a random time, until one child is left to finish. Times are shares
# of that of a whole run, so that on any machine, busy or not, kills fall into every part of it.
KILLER = """
import os, random, signal, sys, time
import torch
from linnet.config import parse, read_yaml
from linnet.train import TrainConfig, train
torch.set_num_threads(1)
config, root, trial, cache, seed, children = sys.argv[1:]
config = parse(TrainConfig, read_yaml(config))
moments = random.Random(int(seed))
def child(root):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            train(config, root, cache)
            status = 0
        finally:
            os._exit(status)
    return pid
def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
begin = time.monotonic()
assert wait(child(trial)) == 0
whole = time.monotonic() - begin
killed = 0
for number in range(int(children) + 1):
    pid = child(root)
    if number < int(children):
        time.sleep(whole * moments.uniform(0.02, 0.5) if number else 0.05)  # no machine is done in 0.05 s
        os.kill(pid, signal.SIGKILL)
    status = wait(pid)
    killed += status == -signal.SIGKILL
    if status == 0:
        break
    assert status == -signal.SIGKILL, status
print(killed)
"""


def record(run: RunFolder) -> list[dict]:
    """The rows without what depends on the clock."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in run.metrics()]


@pytest.fixture(scope="module")
def whole(settings, cache, tmp_path_factory) -> RunFolder:
    """The run that was never stopped."""
    return train(settings(**LONG), tmp_path_factory.mktemp("whole"), cache)


def same(run: RunFolder, whole: RunFolder) -> None:
    assert record(run) == record(whole)
    assert {k: v for k, v in run.result().items() if k not in TIMES} == {
        k: v for k, v in whole.result().items() if k not in TIMES
    }
    last = [checkpoint.load(r.checkpoints()[-1])[0] for r in (run, whole)]
    for group in last[1]:
        for name, tensor in last[1][group].items():
            assert torch.equal(last[0][group][name], tensor), (group, name)


def test_killed_at_random_moments(settings, cache, tmp_path, whole):
    """SIGKILL during set-up, steps, checkpoints and validations: the same losses and weights, bit for bit."""
    seed = random.SystemRandom().randrange(1_000_000)  # others each time, unlike what tests draw else
    places = [whole.path / "config.yaml", tmp_path / "killed", tmp_path / "trial", cache]
    child = Child(KILLER, *places, seed, 5)
    assert child.wait() == 0, f"seed {seed}\n{child.output()}"
    assert int(child.output().split()[-1]) >= 1, f"seed {seed}: it was never killed"
    same(run_folder(settings(**LONG), tmp_path / "killed"), whole)


def stop_at(step: int, action):
    def progress(row: dict) -> None:
        if row.get("step") == step and "loss" in row:
            action()

    return progress


@pytest.mark.parametrize("number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_leaves_a_checkpoint_of_that_step(settings, cache, tmp_path, whole, number, error):
    before = signal.getsignal(number)
    with pytest.raises(error):
        train(settings(**LONG), tmp_path, cache, progress=stop_at(10, lambda: signal.raise_signal(number)))
    assert signal.getsignal(number) == before
    run = run_folder(settings(**LONG), tmp_path)
    assert [path.name for path in run.checkpoints()] == ["step-00000009", "step-00000010"]
    assert not run.done and run.error() is None
    same(train(settings(**LONG), tmp_path, cache), whole)


def test_a_second_ctrl_c_acts_at_once(settings, cache, tmp_path):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(settings(**LONG), tmp_path, cache, progress=stop_at(10, twice))
    assert [path.name for path in run_folder(settings(**LONG), tmp_path).checkpoints()][-1] == "step-00000009"


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_disk_full_while_checkpointing(settings, cache, tmp_path, whole, monkeypatch, call):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        action = lambda: patch.setattr(os, call, full)  # noqa: E731
        with pytest.raises(ConfigError, match="disk is full|No space left") as caught:
            train(settings(**LONG), tmp_path, cache, progress=stop_at(10, action))

        if call == "rename":
            assert isinstance(caught.value, CheckpointError) and "step-00000009" in str(caught.value)
    run = run_folder(settings(**LONG), tmp_path)
    assert [path.name for path in run.checkpoints()] == ["step-00000006", "step-00000009"]
    assert os.listdir(run.checkpoint_folder).sort() == ["step-00000006", "step-00000009"].sort()
    same(train(settings(**LONG), tmp_path, cache), whole)


def interrupted(settings, cache, root, step=20) -> RunFolder:
    with pytest.raises(KeyboardInterrupt):
        train(settings(**LONG), root, cache, progress=stop_at(step, lambda: signal.raise_signal(signal.SIGINT)))
    return run_folder(settings(**LONG), root)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(settings, cache, tmp_path, whole):
    run = interrupted(settings, cache, tmp_path)
    newest = run.checkpoints()[-1]
    file = newest / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"optimizer.safetensors: \d+ bytes.*step-00000018"):
        run = train(settings(**LONG), tmp_path, cache)
    assert newest.with_name("step-00000020.bad").is_dir()
    [event] = [row for row in record(run) if "event" in row]
    assert event["event"] == "damaged_checkpoint" and event["step"] == 18
    assert "optimizer.safetensors" in event["problems"][0]
    assert [row for row in record(run) if "event" not in row] == record(whole)


def test_a_checkpoint_without_what_a_resumed_run_reads_is_damaged(settings, cache, tmp_path):
    run = interrupted(settings, cache, tmp_path)
    for path in run.checkpoints():
        state = checkpoint.read_state(path)
        del state["sha256"]["optimizer.safetensors"]
        (path / "state.json").write_text(checkpoint._state_text(state | {"meta": {"step": 18}}))
    with pytest.raises(CheckpointError, match=r"state\.json: is damaged: no position, .*, optimizer"):
        train(settings(**LONG), tmp_path, cache)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch_size": 2}, "differs: batch_size 2, there 4; continue it with --set batch_size=4"),
        ({"model": MODEL | {"layout": "tnl+sglu x1"}}, "continue it with --set 'model.layout=tnl+sglu x2'"),
        ({"optimizer": {"clip": None}, "seed": 1}, "seed 1, there 0, optimizer.clip None, there 1.0"),
        ({"log_every": 7, "name": "other", "batch_size": 2}, "differs: batch_size 2"),
        ({"seed": 1, "batch_size": 2, "steps": 9, "precision": "bfloat16"}, None),
    ],
)
def test_a_new_run_beside_an_unfinished_one_that_differs_in_few_keys_is_noted(settings, cache, tmp_path, changes, told):
    begun, seen = interrupted(settings, cache, tmp_path), []
    train(settings(**(LONG | changes)), tmp_path, cache, progress=seen.append)
    notes = [row["text"] for row in seen if row.get("event") == "unfinished"]
    assert len(notes) == (told is not None)
    for note in notes:
        assert told in note and f"{begun.path} (at step 20)" in note
    seen.clear()
    train(settings(**LONG), tmp_path, cache, progress=seen.append)
    assert not any(row.get("event") == "unfinished" for row in seen)  # it goes on


def edited(run: RunFolder, change) -> None:
    """Changes the list of lines of metrics.jsonl."""
    file = run.path / "metrics.jsonl"
    change(lines := file.read_text().splitlines(keepends=True))
    file.write_text("".join(lines))


@pytest.mark.parametrize("change", [lambda lines: lines.pop(-2), lambda lines: lines.__setitem__(-1, '{"step": 20}\n')])
def test_rows_that_are_gone_are_written_again_from_the_checkpoint_before(settings, cache, tmp_path, whole, change):
    run = interrupted(settings, cache, tmp_path)
    edited(run, change)
    with pytest.warns(UserWarning, match=r"step-00000020: .*metrics\.jsonl.*step-00000018"):
        run = train(settings(**LONG), tmp_path, cache)
    assert [row["step"] for row in record(run) if "event" in row] == [18]
    assert [row for row in record(run) if "event" not in row] == record(whole)
    assert run.curve_problem() is None


def test_rows_that_no_checkpoint_can_write_again_are_said_and_leave_the_fit(settings, cache, tmp_path):
    run = interrupted(settings, cache, tmp_path)
    edited(run, lambda lines: lines.pop(3))
    assert "missing" in run.curve_problem()
    with pytest.warns(UserWarning, match="1 of the first .* rows are missing.*fits will leave"):
        run = train(settings(**LONG), tmp_path, cache)
    assert [row["event"] for row in record(run) if "event" in row] == ["rows_lost"]
    assert "lost" in run.curve_problem() and run.result()["status"] == "done"
    other = train(settings(seed=1), tmp_path, cache)
    row = {key: other.result()[key] for key in ("params_non_embedding", "tokens", "flops", "loss")}
    rows = [f"{one.path.name},{','.join(map(str, row.values()))}" for one in (run, other)]
    (tmp_path / "table.csv").write_text("\n".join(["run," + ",".join(row), rows[0], rows[1] + "1"]) + "\n")
    (tmp_path / "runs").symlink_to(tmp_path)
    _, curves, notes = load_study(tmp_path)
    assert set(curves["run"]) == {other.path.name} and any(run.path.name in note for note in notes)


def test_a_checkpoint_of_0_1_vouches_for_the_number_of_its_rows(settings, cache, tmp_path, whole, monkeypatch):
    monkeypatch.setattr(Record, "sha256", None)
    run = interrupted(settings, cache, tmp_path)
    monkeypatch.undo()
    edited(run, lambda lines: lines.__setitem__(0, lines[0].replace("}", ', "more": 1}')))
    assert run.curve_problem() is None
    assert record(train(settings(**LONG), tmp_path, cache))[1:] == record(whole)[1:]


def test_a_folder_in_the_place_of_the_result_is_told_before_training(settings, cache, tmp_path):
    run = interrupted(settings, cache, tmp_path, step=3)
    (run.path / "result.json").mkdir()
    with pytest.raises(ConfigError, match="result.json: is a folder"):
        train(settings(**LONG), tmp_path, cache)


def test_with_no_good_checkpoint_it_stops_and_touches_nothing(settings, cache, tmp_path, whole):
    run = interrupted(settings, cache, tmp_path)
    rows, names = record(run), os.listdir(run.checkpoint_folder)
    for path in run.checkpoints():
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="checkpoints") as caught:
        train(settings(**LONG), tmp_path, cache)
    assert all(path.name in str(caught.value) for path in run.checkpoints())
    assert record(run) == rows and os.listdir(run.checkpoint_folder) == names
    run.checkpoint_folder.rename(tmp_path / "away")
    same(train(settings(**LONG), tmp_path, cache), whole)


def test_a_torn_row_and_rows_behind_the_checkpoint_are_written_again(settings, cache, tmp_path, whole):
    run = interrupted(settings, cache, tmp_path)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "loss": 1.0}\n{"step": 22, "lo')
    same(train(settings(**LONG), tmp_path, cache), whole)


def test_killed_between_the_last_checkpoint_and_the_result(settings, cache, tmp_path, whole):
    run = train(settings(**LONG), tmp_path, cache)
    (run.path / "result.json").unlink()
    same(train(settings(**LONG), tmp_path, cache), whole)


def test_two_processes_on_one_run(settings, cache, tmp_path):
    with run_folder(settings(), tmp_path).lock(), pytest.raises(LockedError, match="another process"):
        train(settings(), tmp_path, cache)
    assert train(settings(), tmp_path, cache).done


def test_text_that_changed_is_another_run(settings, cache, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the text as it was\n" * 500)
    config = settings(**LONG, data={"source": [str(text)]})
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "runs", cache, progress=stop_at(20, lambda: signal.raise_signal(signal.SIGINT)))
    first = run_folder(config, tmp_path / "runs")
    text.write_text("the text as it is now\n" * 500)
    started = []
    run = train(config, tmp_path / "runs", cache, lambda row: started.append(row) if "path" in row else None)
    assert run.path != first.path and started[0]["step"] == 0
    assert first.checkpoints() and not first.done  # untouched
    text.write_text("the text as it was\n" * 500)
    assert train(config, tmp_path / "runs", cache).path == first.path


def test_ctrl_c_while_text_is_prepared_acts_at_once(settings, tmp_path):
    seen = []

    def progress(row: dict) -> None:
        seen.append(row["event"])
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(settings(**LONG), tmp_path / "runs", tmp_path / "cache", progress)
    assert seen == ["data"]


def test_a_stop_that_ends_a_compiler_is_no_error_of_the_compiler(settings, cache, tmp_path, monkeypatch):
    def gradients(self, flags):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr("linnet.train.session.Session.gradients", gradients)
    with pytest.raises(KeyboardInterrupt):
        train(settings(steps=2, compile=True), tmp_path, cache)
    assert not list(tmp_path.glob("*/error.txt"))
    with pytest.raises(RuntimeError):
        train(settings(steps=2), tmp_path, cache)
