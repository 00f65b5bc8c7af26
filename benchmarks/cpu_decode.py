"""Milliseconds per token on a CPU after 2,048 tokens: Linnet's engine beside transformers' Llama of the same size.

    python benchmarks/cpu_decode.py --csv
    python benchmarks/cpu_decode.py --tokens 100000     # memory of one request of so many tokens

float32, random weights, batch 1, greedy. Contenders take turns of some tokens, so that a busy machine slows all alike,
and the medians are compared; the first tokens of a turn, which find another's weights in the caches, do not count.
Llama runs as its `generate` runs it (SDPA, `DynamicCache`), but for the bookkeeping of `generate`, which is left out in
its favour. `compiled` is the engine with `compile=True`.

With `--tokens` the resident memory of the process is printed along the way; it must not grow. The last line is JSON.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import timing
import torch

from linnet.inference import Engine, Sampling
from linnet.models import build_model, get_recipe

RESULTS = Path(__file__).parent / "results" / "cpu_decode.csv"
PACKAGES = ("torch", "transformers")
ENDLESS = Sampling(max_tokens=None)
TURN, UNCOUNTED = 10, 2  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tnl-10m")
    parser.add_argument("--llama", default="llama-10m")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=50, help=f"turns of {TURN} tokens each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="measure memory over so many tokens instead")
    parser.add_argument("--no-compiled", action="store_true", help="leave the compiled step out")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.tokens:
        print(json.dumps(measure_memory(options.model, options.tokens)))
        return
    with torch.no_grad():
        contenders = {"transformers": start_llama(options.llama, options.context)}
        contenders["linnet"] = start_linnet(options.model, options.context, False)
        if not options.no_compiled:
            contenders["linnet compiled"] = start_linnet(options.model, options.context, True)
        times = take_turns(contenders, options.rounds)
    milliseconds = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    for name, value in milliseconds.items():
        print(f"{name:<18}{value:8.3f} ms per token {milliseconds['transformers'] / value:8.2f} times transformers")
    constants = {"threads": options.threads} | {name: importlib.metadata.version(name) for name in PACKAGES}
    rows = [
        {"system": name, "context": options.context, "token_ms": round(value, 4)} | constants
        for name, value in milliseconds.items()
    ]
    if options.csv:
        command = {"command": f"python benchmarks/cpu_decode.py {' '.join(sys.argv[1:])}", "commit": timing.commit()}
        timing.update(RESULTS, [row | command for row in rows], ("system", "context", "threads"))
    print(json.dumps(milliseconds))


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, advance in contenders.items():
            for token in range(TURN):
                began = time.perf_counter()
                advance()
                if turn > 0 and token >= UNCOUNTED:
                    times[name].append(time.perf_counter() - began)
    return times


def start_linnet(recipe: str, context: int, compiled: bool) -> Callable[[], object]:
    engine = Engine(build_model(get_recipe(recipe)), slots=1, device="cpu", compile=compiled)
    request = engine.submit(prompt(context, engine.vocab), ENDLESS)
    while not request.generated:
        engine.advance()
    return engine.advance


def start_llama(recipe: str, context: int) -> Callable[[], object]:
    from linnet.inference.benchmark import TransformersLlama

    peer = TransformersLlama("transformers", get_recipe(recipe), recipe, "cpu", torch.float32)
    return peer.start(torch.tensor([prompt(context, peer.vocab_size)]))


def prompt(context: int, vocab: int) -> list[int]:
    return torch.randint(vocab, (context,), generator=torch.Generator().manual_seed(0)).tolist()


def measure_memory(recipe: str, tokens: int) -> dict[str, float]:
    """Resident MiB after a twentieth of the tokens and at the end, and the most that it grew in between."""
    engine = Engine(build_model(get_recipe(recipe)), slots=1, device="cpu")
    engine.submit(prompt(512, engine.vocab), ENDLESS)
    found, began = [], time.perf_counter()
    for part in range(20):
        for _ in range(tokens // 20):
            engine.advance()
        found.append(resident())
        seconds = time.perf_counter() - began
        print(f"{(part + 1) * tokens // 20:>9,} tokens {found[-1]:9.1f} MiB {seconds:8.1f} s", flush=True)
    return {"first_mib": found[0], "last_mib": found[-1], "growth_mib": max(found) - found[0], "tokens": tokens}


def resident() -> float:
    """MiB of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    main()
