"""Times the rows of benchmarks/kernels.py with an earlier tree and with this one, in turns, on one GPU.

    python benchmarks/before_after.py lightning softmax gated additive norm --tree ../before

One process per tree holds the inputs of a row; they take turns, `--rounds` times each, while the other waits. A round
gives the time of all kernels of a forward, and of a forward and backward, as PyTorch's profiler sums it: the host's
part, which differs from minute to minute, is not in it. The medians are compared. Exit status 1 if a row takes more
than `--limit` times as long as before. `--csv` writes benchmarks/results/before_after-<gpu>.csv.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CALLS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="group")
    parser.add_argument("--tree", type=Path, required=True, help="a checkout of the earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1.03)
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.tree, options.groups)
        return 0
    constants = {}
    if options.csv:
        import timing

        constants = timing.constants(f"python benchmarks/before_after.py {' '.join(sys.argv[1:])}")
    before, after = Worker(options.tree.resolve(), options.groups), Worker(HERE.parent, options.groups)
    rows, slower = [], 0
    print(f"{'row':<44}{'before ms':>20}{'after ms':>20}{'times':>14}")
    for label in before.rows:
        if label not in after.rows:
            print(f"{label:<44} only in the earlier tree")
            continue
        workers = (before, after)
        for worker in workers:  # kernels compile side by side
            worker.tell("open", label)
        if problem := next((x for x in [worker.read() for worker in workers] if x), None):
            print(f"{label:<44} {problem}", flush=True)
            continue
        rounds = [[worker.ask("time", label) for worker in workers] for _ in range(options.rounds)]
        for worker in workers:
            worker.ask("close", label)
        then, now = ([statistics.median(one[side][i] for one in rounds) for i in (0, 1)] for side in (0, 1))
        times = [b / a for a, b in zip(then, now, strict=True)]
        slower += max(times) > options.limit
        mark = " <" if max(times) > options.limit else ""
        print(
            f"{label:<44}{then[0]:>10.4f}{then[1]:>10.4f}{now[0]:>10.4f}{now[1]:>10.4f}"
            f"{times[0]:>7.3f}{times[1]:>7.3f}{mark}",
            flush=True,
        )
        rows.append(
            {
                "row": label,
                "before_forward_ms": round(then[0], 5), "before_both_ms": round(then[1], 5),
                "after_forward_ms": round(now[0], 5), "after_both_ms": round(now[1], 5),
                "forward_ratio": round(times[0], 4), "both_ratio": round(times[1], 4),
            }
        )  # fmt: skip
    print(f"{len(rows)} rows, {slower} above {options.limit}x")
    if options.csv:
        path = timing.RESULTS / f"before_after-{timing.short_name(constants['gpu'])}.csv"
        timing.update(path, [row | constants for row in rows], ["row"])
    return 1 if slower else 0


class Worker:
    """A process with the package and the benchmarks of one tree.

    Attributes:
        rows: the labels of what it can time.
    """

    def __init__(self, tree: Path, groups: list[str]):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *groups, "--tree", tree, "--worker"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.rows = self.read()

    def ask(self, what: str, label: str):
        self.tell(what, label)
        return self.read()

    def tell(self, what: str, label: str) -> None:
        self.process.stdin.write(json.dumps([what, label]) + "\n")
        self.process.stdin.flush()

    def read(self):
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"a worker ended with {self.process.wait()}")


def work(tree: Path, names: list[str]) -> None:
    """Answers the questions of standard input with a tree's own cases."""
    import torch

    sys.path[0] = str(tree / "benchmarks")
    groups = importlib.import_module("groups").GROUPS
    cases = {
        f"{case.op} {' '.join(str(value) for value in case.shape.values())}": case
        for name in names
        for case in groups[name]()
        if case.check  # rivals are the same in both trees
    }
    answer(list(cases))
    held: dict = {}
    for line in sys.stdin:
        what, label = json.loads(line)
        if what == "open":
            try:
                held[label] = calls_of(cases[label])
                for call in held[label]:
                    for _ in range(2):
                        call()
                answer(None)
            except Exception as problem:
                answer(f"{type(problem).__name__}: {str(problem)[:120]}")
        elif what == "time":
            answer([device_ms(call) for call in held[label]])
        else:
            held.pop(label, None)
            gc.collect()
            torch.cuda.empty_cache()
            answer(None)


def answer(value) -> None:
    print("answer " + json.dumps(value), flush=True)


def calls_of(case) -> list:
    """A forward without gradients, and a forward with the gradients of all inputs."""
    import torch

    inputs = case.inputs()
    gradient = torch.randn_like(case.run(*inputs))
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]

    def forward() -> None:
        with torch.no_grad():
            case.run(*inputs)

    def both() -> None:
        torch.autograd.grad(case.run(*leaves), [x for x in leaves if x.requires_grad], gradient)

    return [forward, both]


def device_ms(call) -> float:
    """Milliseconds of all kernels of a call, the mean of `CALLS`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    return sum(row.self_device_time_total for row in profiler.key_averages()) / CALLS / 1e3


if __name__ == "__main__":
    sys.exit(main())
