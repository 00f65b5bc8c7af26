"""Kills `linnet reproduce` with SIGKILL at random moments, and compares its tables with those of runs never killed.

    python benchmarks/reproduce_kills.py --kills 20 --seed 0
    python benchmarks/reproduce_kills.py --kills 20 --items study

Two items are made for it: a study whose workers train, and trainings with evaluations. After each kill the same command
runs again, is killed again, and so on until it ends; then result.json is compared byte for byte, the folder is removed,
and all begins anew until it was killed `--kills` times. Moments are uniform over the time that the item takes.

Prints a line per item. Exit status 1 if a table differs or a command fails. Linux only: it reads /proc.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from processes import alive, descendants, left_after, start, wait

ITEMS = {
    "study": """
title: a study
state: complete
published:
  source: Table 1
  columns: {loss: nats per byte, flops: FLOPs}
  rows: {llama: {}, tnl: {}}
  base: llama
claims: [tnl < llama on loss, tnl < llama on flops]
reduced:
  seeds: [0, 1]
  steps:
    - verb: study
      config: study/demo-quick.yaml
      set: {budgets: [1e9], sizes: [[8, 1, 2]], tokens_per_param: [1, 1000], data.source: TEXT, executor.workers: 2,
            train.run.checkpoint_every: 5, train.evaluate_tokens: 2048}
""",
    "train": """
title: trainings and needles
state: complete
published:
  source: Table 2
  columns: {loss: nats per byte, niah: score}
  rows: {attention: {}, tnl: {}}
claims: [tnl < attention on loss]
reduced:
  seeds: [0, 1]
  steps:
    - verb: train
      config: {seq_len: 64, batch_size: 4, steps: 40, data: {source: TEXT, tokenizer: byte}, evaluate_tokens: 2048,
               optimizer: {learning_rate: 3e-3}, run: {checkpoint_every: 5, device: cpu}}
      vary:
        attention: {model: {layout: attention+swiglu, d_model: 16}}
        tnl: {model: {layout: tnl+sglu, d_model: 16}}
    - verb: evaluate
      of: train
      config: {needle: {lengths: [256], depths: [0.0, 1.0], samples: 1, digits: 1}}
      columns: {niah: needle-easy.niah_score}
""",
}


def make_items(folder: Path) -> None:
    """Writes the items and the text that they train on."""
    text = folder / "text.txt"
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(200)]
    text.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(4000)))
    paper = folder / "items" / "900"
    paper.mkdir(parents=True)
    (paper / "paper.yaml").write_text("title: kills\n")
    for name, item in ITEMS.items():
        (paper / f"{name}.yaml").write_text(item.replace("TEXT", str(text)))


def reproduce(items: Path, name: str, out: Path) -> None:
    from linnet.papers.library import read_library
    from linnet.papers.prepare import prepare
    from linnet.papers.run import run
    from linnet.papers.table import Request

    library = read_library(items)
    (work,) = prepare(library, library.find("900", [name]), Request(out=out))
    run(work)


def attempt(items: Path, name: str, out: Path, moment: float | None) -> tuple[int, bool, bool]:
    """Runs an item, killed after `moment` seconds. Returns its status, whether it was killed, and whether any process
    is left."""
    pid = start(partial(reproduce, items, name), out)
    below: list[int] = []
    killed = False
    if moment is not None:
        time.sleep(moment)
        below = descendants(pid)
        if killed := alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    status = wait(pid)
    return status, killed, bool(left_after(below))


def trial(items: Path, name: str, place: Path, kills: int, moments: random.Random) -> list[str]:
    """Measures an item, then kills it until it was killed often enough. Returns the problems."""
    result = Path(f"own-900-{name}") / "reduced" / "result.json"
    began = time.monotonic()
    status, _, _ = attempt(items, name, place / "whole", None)
    if status:
        return [f"{name}: fails without a kill (status {status})"]
    seconds, expected = time.monotonic() - began, (place / "whole" / result).read_bytes()
    done = compared = 0
    problems: list[str] = []
    while done < kills and not problems:
        out = place / "killed"
        while True:
            moment = moments.random() * seconds if done < kills else None
            status, killed, left = attempt(items, name, out, moment)
            done += killed
            if left:
                problems.append(f"{name}: processes are left after a kill")
            if not killed:
                break
        if status:
            problems.append(f"{name}: ends with status {status} after kills")
        elif (out / result).read_bytes() != expected:
            problems.append(f"{name}: the table differs from that of the run that was never killed")
        compared += 1
        shutil.rmtree(out, ignore_errors=True)
    found = f"{done} SIGKILLs, {compared} tables compared, {len(problems)} problems"
    print(f"{name}: {found} ({seconds:.1f} s without a kill)", flush=True)
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="SIGKILLs per item (default: 20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000), help="of the moments")
    parser.add_argument("--items", default=",".join(ITEMS), help="study, train, or both with a comma between")
    options = parser.parse_args()
    moments = random.Random(options.seed)
    problems: list[str] = []
    import torch

    from linnet.papers import verbs

    torch.set_num_threads(1)  # a fork does not have the threads of its parent
    for verb in ("study", "train", "evaluate"):  # imported before the forks, which then start in no time
        verbs.find_verb(verb)
    with tempfile.TemporaryDirectory(prefix="linnet-kills-") as folder:
        make_items(Path(folder))
        for name in options.items.split(","):
            problems += trial(Path(folder) / "items", name, Path(folder), options.kills, moments)
    for problem in problems:
        print(f"seed {options.seed}: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
