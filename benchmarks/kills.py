"""Kills trainings and studies with SIGKILL at random moments, and compares what they end with to runs never killed.

    python benchmarks/kills.py --kills 200 --seed 0
    python benchmarks/kills.py --kills 20 --devices 2

Two fifths of the kills hit a training, two fifths a study that trains in its own process, and one fifth a study with
two worker processes, or one of its workers. The command is started again after each kill until it ends; then all begins
anew. Checked:

- every row of metrics.jsonl without its times, every result, the table of a study, and the bytes of weights, optimizer
  and random state in the last checkpoint are those of the run that was never killed;
- after each kill, no process of it is left within 30 s, and every run and study can be locked again;
- in the end no half-written file is left.

With `--devices N` all kills hit a training on N devices (processes on the CPU), which `linnet train --devices N` starts
again: half of them a random rank while a checkpoint is written, one in six the launcher, the others a random rank at
any moment, its start included. Some runs use tensor parallelism, and every other run saves in the background.

Prints a summary, and each difference with the seed. Exit status 1 if anything differs. `tests/train/test_resume.py` has
a short form. Linux only: it reads /proc.
"""

import argparse
import collections
import contextlib
import csv
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from processes import alive, descendants, is_worker, left_after, start, wait

from linnet.config import parse
from linnet.runs import LockedError, RunFolder
from linnet.study import StudyConfig, run_study
from linnet.train import TrainConfig, train
from linnet.train.processes import launch

TIMES = {"tokens_per_second", "seconds", "memory_bytes", "flop_utilisation", "date"}

TRAINING = {
    "model": {"recipe": "tnl-10m", "d_model": 16, "layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 2}}},
    "seq_len": 32,
    "batch_size": 4,
    "steps": 60,
    "evaluate_tokens": 512,
    "optimizer": {"learning_rate": 1e-2},
    "curve_every": 7,
    "run": {"device": "cpu", "log_every": 1, "checkpoint_every": 3, "evaluate_every": 8},
}
STUDY = {
    "name": "killed",
    "architectures": ["llama", "tnl"],
    "budgets": [4e8],
    "sizes": [[16, 1], [24, 1]],
    "seq_len": 32,
    "batch_size": 4,
    "minimum_steps": 5,
    "train": {"evaluate_tokens": 1024, "run": {"device": "cpu", "log_every": 5, "checkpoint_every": 4}},
}


# Each in turn, with `run.async_save` in every second one. Kills of one run must not change its bits.
PARALLEL: list[dict] = [{}, {"tp": 2}]
STARTING = 120.0  # seconds in which a training on many devices must make a step


class Trial:
    """A command that is killed and started again.

    Attributes:
        root: folder of everything that it writes, emptied after each comparison.
        runs: glob of its run folders below `root`.
    """

    def __init__(self, name: str, root: Path, work: Callable[[Path], None], runs: str):
        self.name, self.root, self.work, self.runs = name, root, work, runs
        self.expected: dict = {}
        self.seconds = 0.0

    def measure(self) -> None:
        """Runs it once without a kill, and keeps its result and its time."""
        began = time.monotonic()
        status = wait(start(self.work, self.root))
        if status != 0:
            sys.exit(f"{self.name}: fails without a kill (status {status})")
        self.seconds, self.expected = time.monotonic() - began, self.found()
        shutil.rmtree(self.root)

    def found(self) -> dict:
        """Returns everything that must not depend on kills, by name."""
        values: dict = {}
        for folder in self.folders():
            rows = [{key: value for key, value in row.items() if key not in TIMES} for row in folder.metrics()]
            result = {key: value for key, value in folder.result().items() if key not in TIMES}
            state = json.loads((folder.checkpoints()[-1] / "state.json").read_text())
            values |= {f"{folder.path.name} {what}": x for what, x in
                       (("rows", rows), ("result", result), ("weights", state["sha256"]))}  # fmt: skip
        for table in self.root.glob("*/table.csv"):
            values["table"] = [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(open(table))]
        return values

    def folders(self) -> list[RunFolder]:
        return [RunFolder(path.parent) for path in sorted(self.root.glob(f"{self.runs}/config.yaml"))]


def locked(trial: Trial) -> list[str]:
    """Returns the folders that cannot be locked, or claim an owner."""
    found = []
    for folder in [*trial.folders(), *(RunFolder(path.parent) for path in trial.root.glob("*/study.yaml"))]:
        try:
            if folder.owner() is not None:
                raise LockedError(folder.path, "")
            with folder.lock():
                pass
        except LockedError:
            found.append(str(folder.path))
    return found


def halves(root: Path) -> list[str]:
    """Returns the half-written files and folders below `root`."""
    return [str(path) for path in root.rglob("*.tmp")]


def kill_until_done(trial: Trial, budget: int, moments: random.Random, told: Callable[[str], None]) -> dict[str, int]:
    """Starts the trial until it ends, and kills it at most `budget` times. Returns the counts of what happened."""
    counts = collections.Counter()
    while True:
        pid = start(trial.work, trial.root)
        if counts["kills"] < budget:
            time.sleep(trial.seconds * moments.uniform(0.0, 0.5))
            below = descendants(pid)
            workers = [one for one in below if is_worker(one)]
            victim = moments.choice(workers) if workers and moments.random() < 0.4 else pid
            with contextlib.suppress(ProcessLookupError):
                counts["kills"] += victim != pid and alive(victim)
                counts["kills of workers"] += victim != pid and alive(victim)
                os.kill(victim, signal.SIGKILL)
            if victim != pid:  # the study gives the run to another worker and goes on
                time.sleep(trial.seconds * moments.uniform(0.0, 0.3))
                below = descendants(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            below = []
        status = wait(pid)
        counts["kills"] += status == -signal.SIGKILL  # otherwise it had ended before
        count_left(trial, below, "a kill", counts, told)
        if status == 0 and all(folder.done for folder in trial.folders()):
            break
        if status not in (0, -signal.SIGKILL):
            told(f"{trial.name}: ended with status {status}")
            counts["failures"] += 1
            break
    compare(trial, status, counts, told)
    return counts


def count_left(
    trial: Trial, below: list[int], event: str, counts: collections.Counter, told: Callable[[str], None]
) -> None:
    """Counts the processes of `below` and the locks that an event has left behind, and ends these processes."""
    if left := left_after(below):
        told(f"{trial.name}: processes {left} are left after {event}")
        counts["orphans"] += len(left)
        for one in left:
            os.kill(one, signal.SIGKILL)
    if stale := locked(trial):
        told(f"{trial.name}: locked after a kill: {', '.join(stale)}")
        counts["stale locks"] += len(stale)


def compare(trial: Trial, status: int, counts: collections.Counter, told: Callable[[str], None]) -> None:
    """Compares what a trial ended with to the run that was never killed, and removes it."""
    found = trial.found() if status == 0 else {}
    for name in trial.expected.keys() | found.keys():
        if status == 0 and trial.expected.get(name) != found.get(name):
            told(f"{trial.name}: {name} differs from the run that was never killed")
            counts["differences"] += 1
    if torn := halves(trial.root):
        told(f"{trial.name}: left half-written: {', '.join(torn)}")
        counts["half-written files"] += len(torn)
    counts["comparisons"] += status == 0
    shutil.rmtree(trial.root)


def ranks_below(pid: int) -> list[int]:
    """Returns the processes that train, below a launcher."""
    return [one for one in descendants(pid) if is_rank(one)]


def is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() and alive(pid)
    return False


def kill_ranks_until_done(trial: Trial, budget: int, moments: random.Random, told: Callable[[str], None]) -> dict:
    """Starts a training on many devices and kills a rank or the launcher up to `budget` times, until it ends."""
    counts: collections.Counter = collections.Counter()
    waits: list[float] = []
    while True:
        pid, status = start(trial.work, trial.root), None
        while status is None and counts["kills"] < budget:
            kind = moments.choice(["saving", "saving", "saving", "any", "any", "launcher"])
            status = reach(trial, pid, kind, moments)
            if status is not None:
                break
            ranks = ranks_below(pid)
            victim = pid if kind == "launcher" else moments.choice(ranks) if ranks else pid
            counts["kills"] += 1
            counts[
                f"kills of {'the launcher' if victim == pid else 'ranks while saving' if saving(trial) else 'ranks'}"
            ] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            if victim == pid:
                status = wait(pid)
                count_left(trial, ranks, "the launcher was killed", counts, told)
            else:
                waits.append(steps_again(trial, pid))
        status = wait(pid) if status is None else status
        if status == -signal.SIGKILL:
            continue
        if status:
            told(f"{trial.name}: ended with status {status}")
            counts["failures"] += 1
        break
    compare(trial, status, counts, told)
    if waits:
        print(f"{trial.name}: longest from a kill to the next step {max(waits):.1f} s", flush=True)
    return counts


def saving(trial: Trial) -> bool:
    return any(trial.root.glob("*/checkpoints/.step-*.tmp"))


def rows_of(trial: Trial) -> int:
    return sum(path.read_bytes().count(b"\n") for path in trial.root.glob("*/metrics.jsonl"))


def reach(trial: Trial, pid: int, kind: str, moments: random.Random) -> int | None:
    """Waits for the moment of a kill. Returns the exit status if the training ends before."""
    began, rows, seen = time.monotonic(), rows_of(trial), None
    delay = trial.seconds * moments.uniform(0.0, 0.4)
    while time.monotonic() - began < STARTING:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if kind == "saving":
            if rows_of(trial) > rows and seen is None:
                seen = time.monotonic()
            if seen is not None and time.monotonic() - seen > delay / 4 and saving(trial):
                time.sleep(moments.uniform(0.0, 0.01))
                return None
        elif time.monotonic() - began > delay:
            return None
        time.sleep(0.001)
    return None


def steps_again(trial: Trial, pid: int) -> float:
    """Waits until the ranks that were started again have made a step. Returns the seconds."""
    began, before = time.monotonic(), None
    while time.monotonic() - began < STARTING and alive(pid):
        rows = rows_of(trial)
        before = rows if before is None else min(before, rows)  # going on cuts rows after the checkpoint
        if rows > before or (found := trial.folders()) and found[0].done:
            break
        time.sleep(0.005)
    return time.monotonic() - began


def trials(folder: Path) -> list[Trial]:
    text = folder / "text.txt"
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefgh", k=words.randint(2, 6))) for _ in range(60)]
    text.write_text("\n".join(" ".join(words.choices(vocabulary, k=8)) for _ in range(1000)))
    data, cache = {"data": {"source": [str(text)]}}, folder / "cache"

    def training(root: Path) -> None:
        train(parse(TrainConfig, TRAINING | data), root, cache)

    def study(executor: dict) -> Callable[[Path], None]:
        return lambda root: run_study(parse(StudyConfig, STUDY | data | {"executor": executor}), root, cache)

    pool = {"kind": "local", "workers": 2, "threads": 1}
    return [
        Trial("training", folder / "training", training, "*"),
        Trial("study in one process", folder / "inline", study({"kind": "inline"}), "*/runs/*"),
        Trial("study with two workers", folder / "pool", study(pool), "*/runs/*"),
    ]


def trials_on(devices: int, folder: Path) -> list[Trial]:
    """Trainings on many devices."""
    import yaml

    found = []
    for number, parallel in enumerate(PARALLEL):
        own = folder / f"parallel-{number}"
        run = TRAINING["run"] | {"async_save": number % 2 == 1}
        (file := folder / f"{own.name}.yaml").write_text(
            yaml.safe_dump(
                TRAINING | {"run": run, "parallel": parallel, "data": {"source": [str(folder / "text.txt")]}}
            )
        )
        command = ["train", str(file), "--devices", str(devices), "--cache", str(folder / "cache")]

        def training(root: Path, command: list[str] = command) -> None:
            outcome = launch.launch([*command, "--out", str(root)], devices, restarts=1000)
            if outcome.code:
                raise RuntimeError(outcome.message)

        name = f"training on {devices} devices, {parallel or 'FSDP'}{', saves in the background' if number % 2 else ''}"
        found.append(Trial(name, own, training, "*"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (default: 200)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000), help="of the moments")
    parser.add_argument("--pool-share", type=float, default=0.2, help="share of kills for the study with two workers")
    parser.add_argument("--devices", type=int, default=1, help="kill a training on this many devices (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    moments, problems = random.Random(options.seed), []

    def told(problem: str) -> None:
        problems.append(problem)
        print(f"seed {options.seed}: {problem}", flush=True)

    rest = options.kills - round(options.kills * options.pool_share)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="linnet-kills-") as place:
        os.environ["LINNET_CONFIG_HOME"] = place
        total = collections.Counter()
        tried = trials(Path(place))
        budgets, kill = [rest - rest // 2, rest // 2, options.kills - rest], kill_until_done
        if options.devices > 1:
            tried, kill = trials_on(options.devices, Path(place)), kill_ranks_until_done
            budgets = [(options.kills + number) // len(tried) for number in range(len(tried))]
        for trial, budget in zip(tried, budgets, strict=True):
            trial.measure()
            counts = collections.Counter()
            while counts["kills"] < budget:
                counts += kill(trial, min(budget - counts["kills"], 16), moments, told)
            named = ("kills", *sorted(name for name in counts if name.startswith("kills ")), "comparisons")
            shown = ", ".join(f"{counts[key]} {key}" for key in named if counts[key])
            print(f"{trial.name}: {shown} ({trial.seconds:.1f} s without a kill)", flush=True)
            total += counts
    bad = ("differences", "orphans", "stale locks", "half-written files", "failures")
    print(
        f"{total['kills']} SIGKILLs, seed {options.seed}, {time.monotonic() - began:.0f} s: {total['comparisons']} "
        f"comparisons with runs that were never killed, " + ", ".join(f"{total[key]} {key}" for key in bad)
    )
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
