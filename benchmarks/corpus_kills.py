"""Kills the stages of `linnet corpus` with SIGKILL at random moments, and compares all bytes with runs never killed.

    python benchmarks/corpus_kills.py --kills 50 --seed 0
    python benchmarks/corpus_kills.py --kills 50 --stage clean --workers 1

Each stage is started again after each kill until it ends; then its folder is compared, removed, and all begins anew
until it was killed `--kills` times. Moments are uniform over the time of the rest of the stage. With several workers,
two fifths of the kills hit a worker: the command must then end by itself with an error. Checked: every byte of the
folder except provenance.json and the trainings of the loop, whose records hold times, and that no process and no
half-written file is left.

Prints a line per stage. Exit status 1 if anything differs. Linux only: it reads /proc.
"""

import argparse
import collections
import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import zstandard
from processes import alive, descendants, is_worker, left_after, start, wait

from linnet.cli import app
from linnet.corpus import documents

WORDS = 4000


def sources(folder: Path, megabytes: float) -> Path:
    """Writes text, JSONL and compressed JSONL with copies, tags and damage. Returns the folder."""
    folder.mkdir()
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(WORDS)]

    def text() -> str:
        lines = [" ".join(draw.choices(vocabulary, k=draw.randint(5, 20))) for _ in range(draw.randint(3, 40))]
        return "\n".join(lines) + "<b>bold</b>!!!! see https://example.org/x\n"

    texts = [text()]
    size = 0
    while size < megabytes * 1e6:
        texts.append(draw.choice(texts) if draw.random() < 0.2 else text())
        size += len(texts[-1])
    rows = [json.dumps({"text": one, "id": number}).encode() + b"\n" for number, one in enumerate(texts)]
    rows[3::100] = [b'{"text": "cut\n' for _ in rows[3::100]]
    half = len(rows) // 2
    (folder / "rows.jsonl").write_bytes(b"".join(rows[:half]))
    quarter = half + half // 2
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(b"".join(rows[half:quarter]))[:-100])
    (folder / "rows.jsonl.zst").write_bytes(zstandard.compress(b"".join(rows[quarter:-20])))
    for number, one in enumerate(texts[-20:]):
        (folder / f"{number:02d}.txt").write_text(one)
    return folder


def commands(workers: int, place: Path) -> dict[str, list[str]]:
    """Returns the arguments of each stage, with OUT for its folder; each reads what one before has made."""
    made, end = place / "made", ["--workers", str(workers), "--out", "OUT"]
    clean, dedup, scored = str(made / "clean"), str(made / "dedup"), str(made / "score")
    return {
        "clean": [str(place / "source"), *end],
        "dedup": [clean, "--verify", "--against", str(place / "source" / "00.txt"), *end],
        "lines": [clean, "--level", "line", "--line-words", "5", *end],
        "score": [dedup, "--model", str(place / "model"), "--device", "cpu", *end],
        "filter": [scored, "--keep", "0.9", "--low", "0.05", *end],
        "sample": [scored, "--n", "50", "--review", "OUT/review.html"],
        "tokenizer": [clean, "--vocab", "1000", "--out", "OUT/tokenizer.json"],
        "loop": [str(place / "loop.yaml"), "--rounds", "2", *end],
    }


LEAVES = ("lines", "sample", "tokenizer", "loop")  # which no other stage reads
VERBS = {"lines": "dedup"}  # stages that are not called as their verb


def models(place: Path) -> None:
    """Writes a model folder for `score`, and the configuration of a loop whose models train for a moment."""
    import torch
    import yaml

    import linnet.corpus.scoring  # noqa: F401  # imported before the forks, which then start in no time
    from linnet.config import parse
    from linnet.data import ByteTokenizer
    from linnet.models import ModelConfig, build_model
    from linnet.runs.model import save_model

    torch.set_num_threads(1)  # a fork does not have the threads of its parent
    model = {"recipe": "tnl-10m", "d_model": 16, "layout": "tnl+sglu x1", "options": {"tnl": {"num_heads": 2}}}
    config = parse(ModelConfig, model | {"vocab_size": ByteTokenizer().vocab_size})
    save_model(place / "model", config, build_model(config).state_dict(), ByteTokenizer())
    run = {"device": "cpu", "log_every": 1, "checkpoint_every": 3}
    train = {"model": model, "seq_len": 32, "batch_size": 4, "steps": 12, "evaluate_tokens": 512, "run": run}
    values = {"source": [str(place / "source" / "rows.jsonl")], "keep": 0.8, "sample": 20, "train": train}
    (place / "loop.yaml").write_text(yaml.safe_dump(values | {"executor": {"kind": "inline"}}))


def run(stage: str, arguments: list[str], out: Path) -> None:
    words = [word.replace("OUT", str(out)) if word.startswith("OUT") else word for word in arguments]
    status = app(["corpus", VERBS.get(stage, stage), *words, "--json"], prog_name="linnet", standalone_mode=False)
    if status:
        sys.exit(status)


def content(out: Path) -> dict[str, bytes]:
    """Returns the bytes of all that must not depend on kills: not those of trainings, which hold times."""
    files = [path for path in out.rglob("*") if path.is_file() and "runs" not in path.relative_to(out).parts]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files if path.name != "provenance.json"}


def attempt(
    stage: str, arguments: list[str], out: Path, longest: float, moments: random.Random | None
) -> tuple[int, str, bool]:
    """Starts a stage and kills it, or one of its workers, after a random part of `longest` seconds.

    Returns:
        Its exit status, what was killed ("command", "worker", or "" if it ended before), and whether processes of it
        are left.
    """
    pid = start(partial(run, stage, arguments), out)
    victim, below = "", list[int]()
    if moments is not None:
        time.sleep(longest * moments.random())
        below = descendants(pid)
        workers = [one for one in below if is_worker(one) and alive(one)]
        target = moments.choice(workers) if workers and moments.random() < 0.4 else pid
        if alive(target):
            victim = "command" if target == pid else "worker"
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
    status = wait(pid)
    left = left_after(below)
    for one in left:
        with contextlib.suppress(OSError):
            print(f"{stage}: left is {Path(f'/proc/{one}/cmdline').read_bytes().decode()!r}", flush=True)
    return status, victim, bool(left)


def trial(name: str, arguments: list[str], made: Path, place: Path, kills: int, moments: random.Random) -> list[str]:
    """Measures a stage, then kills it until it was killed often enough. Returns the problems."""
    began = time.monotonic()
    status, _, _ = attempt(name, arguments, made, 0, None)
    if status:
        return [f"{name}: fails without a kill (status {status})"]
    seconds, expected = time.monotonic() - began, content(made)
    counts: collections.Counter[str] = collections.Counter()
    problems: list[str] = []
    out = place / "killed"
    while counts["command"] + counts["worker"] < kills and not problems:
        left = True
        while left:
            budget = kills - counts["command"] - counts["worker"]
            status, victim, orphans = attempt(name, arguments, out, seconds * 0.7, moments if budget > 0 else None)
            if orphans:
                problems.append(f"{name}: processes are left after a kill")
            if status == 0:
                left = False
            elif not victim:
                problems.append(f"{name}: ended with status {status}")
                left = False
            else:
                counts[victim] += 1
        counts["comparisons"] += 1
        found = content(out) if out.is_dir() else {}
        differing = [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
        if differing:
            problems.append(f"{name}: {', '.join(sorted(differing))} differ from the run that was never killed")
        shutil.rmtree(out, ignore_errors=True)
    print(
        f"{name}: {counts['command']} SIGKILLs of the command and {counts['worker']} of workers, "
        f"{counts['comparisons']} comparisons of {len(expected)} files, {len(problems)} problems "
        f"({seconds:.1f} s without a kill)",
        flush=True,
    )
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs per stage (default: 50)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000), help="of the moments")
    parser.add_argument("--workers", type=int, default=2, help="processes of each stage (default: 2)")
    parser.add_argument("--megabytes", type=float, default=2, help="size of the text (default: 2)")
    parser.add_argument("--stage", action="append", default=[], help="only this stage; may be given again")
    options = parser.parse_args()
    documents.SMALLEST, documents.BLOCK = 1 << 17, 1 << 16  # many shards of little text
    moments, problems = random.Random(options.seed), []
    with tempfile.TemporaryDirectory(prefix="linnet-kills-") as name:
        place = Path(name)
        sources(place / "source", options.megabytes)
        models(place)
        (place / "made").mkdir()
        stages = commands(options.workers, place)
        for stage, arguments in stages.items():
            made = place / "made" / stage
            if options.stage and stage not in options.stage:
                needed = any(list(stages).index(one) > list(stages).index(stage) for one in options.stage)
                if needed and stage not in LEAVES and wait(start(partial(run, stage, arguments), made)):
                    sys.exit(f"{stage}: fails without a kill")
                continue
            problems += trial(stage, arguments, made, place, options.kills, moments)
    for problem in problems:
        print(f"seed {options.seed}: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
