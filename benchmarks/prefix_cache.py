"""Time to the first token of conversations with and without the automatic prefix cache, and a soak.

    python benchmarks/prefix_cache.py --csv
    python benchmarks/prefix_cache.py --soak 600 --model gdn_hybrid

The trace: conversations with a common first message of 1,500 tokens; each turn adds a question of 60 tokens to the
prompt, and the answer before it, of 40. One request at a time. Three engines take the same trace in turns: one without
a cache that cuts every `prefill_chunk` tokens ("plain"), one without a cache that cuts at turns too ("cuts"), and one
with a cache. Seconds are of the process's CPU, so that other processes disturb them less. The answers must be equal.
`--soak` sends conversations for so many seconds to a cache that is full, and prints how the process's memory grows.
"""

import argparse
import gc
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import timing
import torch

from linnet.inference import Engine, Sampling
from linnet.models import build_model, family

RESULTS = Path(__file__).parent / "results" / "prefix-cache-cpu.csv"
END, VOCAB = 1, 32_000
SYSTEM, QUESTION, ANSWER = 1500, 60, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["hgrn2", "gdn_hybrid"])
    parser.add_argument("--size", nargs=2, type=int, default=[768, 8], metavar=("WIDTH", "LAYERS"))
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--soak", type=float, default=0.0, help="seconds")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.soak:
        for name in options.model:
            soak(name, options)
        return
    rows = [row for name in options.model for row in measure(name, options)]
    if options.csv:
        timing.update(RESULTS, rows, ["model", "turn"])


def engine(name: str, options: argparse.Namespace, gib: float, turn_ends: set[int]) -> Engine:
    model = build_model(family(name)(*options.size, vocab_size=VOCAB), seed=0)
    made = Engine(model, slots=1, context_length=4096, prefix_cache=gib, device="cpu")
    made.turn_ends = turn_ends
    return made


def message(generator: np.random.Generator, tokens: int) -> list[int]:
    return [*generator.integers(2, VOCAB, tokens - 1).tolist(), END]


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """CPU seconds until the first token, and the whole answer."""
    began, seconds, tokens = time.process_time(), 0.0, []
    for piece in engine.stream(prompt, Sampling(max_tokens=4, ignore_end=True)):
        if not tokens:
            seconds = time.process_time() - began
        tokens.append(piece.token)
    return seconds, tokens


def measure(name: str, options: argparse.Namespace) -> list[dict]:
    engines = {
        "plain": engine(name, options, 0.0, set()),
        "cuts": engine(name, options, 0.0, {END}),
        "cache": engine(name, options, options.gib, {END}),
    }
    generator = np.random.default_rng(0)
    system, seconds = message(generator, SYSTEM), {key: [[] for _ in range(options.turns)] for key in engines}
    parameters = sum(x.numel() for x in engines["plain"].model.parameters())
    print(f"{name}, {parameters / 1e6:.0f}M parameters, {torch.get_num_threads()} threads, seconds to the first token")
    for number in range(options.conversations):
        prompt = list(system)
        for turn in range(options.turns):
            prompt += message(generator, QUESTION)
            answers = {}
            for key in sorted(engines, key=lambda key: (number + turn + len(key)) % 3):  # none is always the first
                taken, answers[key] = first_token(engines[key], prompt)
                seconds[key][turn].append(taken)
            if answers["cuts"] != answers["cache"]:
                raise SystemExit(f"{name}: turn {turn + 1} of conversation {number + 1}: the cache changed the answer")
            prompt += message(generator, ANSWER)
    rows = []
    for turn in range(options.turns):
        medians = {key: statistics.median(values[turn]) for key, values in seconds.items()}
        row = {"model": name, "parameters": parameters, "turn": turn + 1}
        row |= {f"{key}_seconds": round(value, 4) for key, value in medians.items()}
        row |= {"cache_over_cuts": round(medians["cache"] / medians["cuts"], 4)}
        row |= {"cuts_over_plain": round(medians["cuts"] / medians["plain"], 4)}
        row |= {
            "torch": torch.__version__,
            "cpu": platform.processor() or platform.machine(),
            "commit": timing.commit(),
        }
        row |= {"command": f"python benchmarks/prefix_cache.py {shlex.join(sys.argv[1:])}"}
        rows.append(row)
        print(
            f"   turn {turn + 1}: plain {medians['plain']:.3f}, cuts {medians['cuts']:.3f} "
            f"({row['cuts_over_plain']:.3f}), cache {medians['cache']:.3f} ({row['cache_over_cuts']:.3f} of cuts)",
            flush=True,
        )
    return rows


def soak(name: str, options: argparse.Namespace) -> None:
    served, generator, process = engine(name, options, 0.05, {END}), np.random.default_rng(0), psutil.Process()
    began, sizes, requests = time.monotonic(), [], 0
    while time.monotonic() - began < options.soak:
        prompt = message(generator, 300)
        for _ in range(3):
            prompt += message(generator, QUESTION)
            first_token(served, prompt)
            requests += 1
        gc.collect()
        sizes.append(process.memory_info().rss / 2**20)
        if served.prefixes.bytes > served.prefixes.budget:
            raise SystemExit(f"{name}: {served.prefixes.bytes} bytes exceed the budget")
    fifth = max(1, len(sizes) // 5)
    early, late = max(sizes[fifth : 2 * fifth]), max(sizes[-fifth:])
    growth = f"{early:.0f} MiB in the second fifth, then {late:.0f}"
    print(f"{name}: {requests} requests in {options.soak:.0f} s; {growth}")


if __name__ == "__main__":
    main()
