"""Multiple-choice questions on a CPU: our adapter for lm-evaluation-harness against the harness's own, on one model.

    python benchmarks/harness.py --csv

The model (`--model`, random weights) is exported to transformers' classes for the harness's adapter. Questions of
`--context` bytes with `--choices` answers are made up; both score the same requests, the better of `--repeats` counts,
and the log-likelihoods must agree. `--csv` writes benchmarks/results/harness.csv. Needs the extras eval and hf.
"""

import argparse
import csv
import logging
import shlex
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import timing
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import linnet.hf  # noqa: F401  (registers the classes)
from linnet.data import ByteTokenizer
from linnet.evaluate.harness import LinnetLM
from linnet.hf import export
from linnet.inference import Engine
from linnet.models import build_model, get_recipe
from linnet.runs import load_model
from linnet.runs.model import save_model

RESULTS = Path(__file__).parent / "results" / "harness.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["tnl-10m", "hgrn2-10m", "llama-10m"])
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--context", type=int, default=256, help="bytes of a question")
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="rows of the harness's adapter")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    requests, rows = draw(options), []
    print(f"{'model':<14}{'harness s':>11}{'linnet s':>11}{'times':>8}{'furthest':>10}", flush=True)
    for name in options.model:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = build(name, Path(folder), options.batch)
        found = {}
        for kind, lm in (("harness", theirs), ("linnet", ours)):
            found[kind] = min((measure(lm, requests) for _ in range(options.repeats)), key=lambda pair: pair[0])
        (slow, expected), (fast, given) = found["harness"], found["linnet"]
        apart = max(abs(a - b) for a, b in zip(expected, given, strict=True))
        if apart > 1e-3 * max(map(abs, expected)):
            raise SystemExit(f"{name}: log-likelihoods are {apart} nats apart")
        print(f"{name:<14}{slow:>11.2f}{fast:>11.2f}{slow / fast:>8.2f}{apart:>10.1e}", flush=True)
        row = {"model": name, "questions": options.questions, "context": options.context, "choices": options.choices}
        row |= {"harness_s": round(slow, 3), "linnet_s": round(fast, 3), "times": round(slow / fast, 2), "apart": apart}
        row |= {package: version(package) for package in ("torch", "lm_eval", "transformers")}
        rows.append(row | {"command": f"python benchmarks/harness.py {shlex.join(sys.argv[1:])}"})
    if options.csv:
        rows = [row | {"commit": timing.commit()} for row in rows]
        with open(RESULTS, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def draw(options: argparse.Namespace) -> list[Instance]:
    """Every answer of every question as a request."""
    generator = np.random.default_rng(0)

    def words(size: int) -> str:
        return "".join(generator.choice(list("abcdefghij "), size))

    requests = []
    for _ in range(options.questions):
        question = "q" + words(options.context - 1 - int(generator.integers(32))) + "?"
        for _ in range(options.choices):
            answer = " " + words(int(generator.integers(8, 24))) + "."
            requests.append(Instance("loglikelihood", {}, (question, answer), 0))
    return requests


def build(name: str, folder: Path, batch: int) -> tuple[LinnetLM, HFLM]:
    """Both adapters over the same weights."""
    config = get_recipe(name)
    save_model(folder / "linnet", config, build_model(config).state_dict(), ByteTokenizer())
    export(folder / "linnet", folder / "hf")
    model, tokenizer = load_model(folder / "linnet")
    exported = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    theirs = HFLM(
        exported,
        tokenizer=AutoTokenizer.from_pretrained(folder / "hf"),
        batch_size=batch,
        max_length=2048,
        device="cpu",
    )
    return LinnetLM(Engine(model, tokenizer, slots=1, context_length=2048, device="cpu")), theirs


def measure(lm, requests: list[Instance]) -> tuple[float, list[float]]:
    start = time.perf_counter()
    found = lm.loglikelihood(requests, disable_tqdm=True)
    return time.perf_counter() - start, [nats for nats, _ in found]


if __name__ == "__main__":
    main()
