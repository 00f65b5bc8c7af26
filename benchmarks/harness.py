"""Questions of lm-evaluation-harness on a CPU: our adapter against the harness's own, on one model.

    python benchmarks/harness.py --data FOLDER --csv     # real questions: lambada-200.jsonl and piqa-200.jsonl there
    python benchmarks/harness.py --csv                   # made-up questions of one length

The model (`--model`, random weights, byte tokenizer) is exported to transformers' classes for the harness's adapter.
Both adapters score the same requests on one thread, `--repeats` times, in alternating order. The medians of the CPU
seconds of the process count. The log-likelihoods must agree to 1e-4 of the largest, the accuracies must be equal.

FOLDER has one question per line: `{"text": ...}` in lambada-200.jsonl, whose last word is the answer to the words
before it, and `{"goal": ..., "sol1": ..., "sol2": ..., "label": 0 or 1}` in piqa-200.jsonl, asked with the prompt
"Question: GOAL", a new line, "Answer:" and two choices. `--csv` writes benchmarks/results/harness-real.csv, or
harness.csv for made-up questions. Needs the extras eval and hf.
"""

import argparse
import csv
import json
import logging
import shlex
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

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

RESULTS = Path(__file__).parent / "results"


class Questions(NamedTuple):
    """Requests, and the index of the right answer for each question; None if there is no right answer."""

    requests: list[Instance]
    labels: list[int] | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", help="recipes")
    parser.add_argument("--data", type=Path, help="folder of lambada-200.jsonl and piqa-200.jsonl")
    parser.add_argument("--questions", type=int, help="made-up questions (32), or the first of each file (all)")
    parser.add_argument("--context", type=int, default=256, help="bytes of a made-up question")
    parser.add_argument("--choices", type=int, default=4, help="answers of a made-up question")
    parser.add_argument("--batch", type=int, default=8, help="rows of the harness's adapter")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    tasks, rows = read(options.data, options.questions) if options.data else {"made up": draw(options)}, []
    print(f"{'model':<12}{'task':<10}{'harness s':>11}{'linnet s':>11}{'times':>8}{'furthest':>10}", flush=True)
    for name in options.model or (["llama-10m", "tnl-10m"] if options.data else ["tnl-10m", "hgrn2-10m", "llama-10m"]):
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = build(name, Path(folder), options.batch)
        for task, questions in tasks.items():
            row = {"model": name, "task": task, "requests": len(questions.requests)}
            row |= contest(theirs, ours, questions, options.repeats)
            numbers = f"{row['harness_s']:>11.2f}{row['linnet_s']:>11.2f}{row['times']:>8.2f}{row['apart']:>10.1e}"
            print(f"{name:<12}{task:<10}{numbers}", flush=True)
            row |= {package: version(package) for package in ("torch", "lm_eval", "transformers")}
            rows.append(row | {"command": f"python benchmarks/harness.py {shlex.join(sys.argv[1:])}"})
    if options.csv:
        rows = [row | {"commit": timing.commit()} for row in rows]
        with open(RESULTS / ("harness-real.csv" if options.data else "harness.csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def read(folder: Path, count: int | None) -> dict[str, Questions]:
    """Returns the questions of the two files in `folder`, all or the first `count` of each."""

    def lines(name: str) -> list[dict]:
        with open(folder / name, encoding="utf-8") as file:
            return [json.loads(line) for line in file][:count]

    requests = []
    for line in lines("lambada-200.jsonl"):
        question, _, answer = line["text"].rpartition(" ")
        requests.append(Instance("loglikelihood", {}, (question, f" {answer}"), 0))
    found = {"lambada": Questions(requests, None)}
    requests, labels = [], []
    for line in lines("piqa-200.jsonl"):
        question = f"Question: {line['goal']}\nAnswer:"
        requests += [Instance("loglikelihood", {}, (question, f" {line[choice]}"), 0) for choice in ("sol1", "sol2")]
        labels.append(line["label"])
    return found | {"piqa": Questions(requests, labels)}


def contest(theirs: HFLM, ours: LinnetLM, questions: Questions, repeats: int) -> dict:
    """Returns the median CPU seconds of both adapters, and how far apart the log-likelihoods are.

    Exits if the answers differ.
    """
    seconds, answers = {"harness": [], "linnet": []}, {}
    order = [("harness", theirs), ("linnet", ours)]
    for repeat in range(repeats):
        for kind, lm in order[:: 1 if repeat % 2 == 0 else -1]:
            taken, answers[kind] = measure(lm, questions.requests)
            seconds[kind].append(taken)
    expected, given = answers["harness"], answers["linnet"]
    apart = max(abs(a - b) for (a, _), (b, _) in zip(expected, given, strict=True))
    if apart > 1e-4 * max(abs(nats) for nats, _ in expected):
        raise SystemExit(f"log-likelihoods are {apart} nats apart")
    right = [accuracy(found, questions.labels) for found in (expected, given)]
    if right[0] != right[1]:
        raise SystemExit(f"accuracies differ: {right[0]} and {right[1]}")
    slow, fast = (statistics.median(seconds[kind]) for kind in ("harness", "linnet"))
    return {
        "harness_s": round(slow, 3),
        "linnet_s": round(fast, 3),
        "times": round(slow / fast, 2),
        "accuracy": right[0],
        "apart": apart,
    }


def accuracy(answers: list[tuple[float, bool]], labels: list[int] | None) -> float:
    """Returns the share of questions whose right answer is the likeliest, or of greedy answers without labels."""
    if labels is None:
        return sum(greedy for _, greedy in answers) / len(answers)
    count = len(answers) // len(labels)
    picked = [max(range(count), key=lambda c: answers[i * count + c][0]) for i in range(len(labels))]
    return sum(one == label for one, label in zip(picked, labels, strict=True)) / len(labels)


def draw(options: argparse.Namespace) -> Questions:
    """Every answer of every question as a request."""
    generator = np.random.default_rng(0)

    def words(size: int) -> str:
        return "".join(generator.choice(list("abcdefghij "), size))

    requests = []
    for _ in range(options.questions or 32):
        question = "q" + words(options.context - 1 - int(generator.integers(32))) + "?"
        for _ in range(options.choices):
            answer = " " + words(int(generator.integers(8, 24))) + "."
            requests.append(Instance("loglikelihood", {}, (question, answer), 0))
    return Questions(requests, None)


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


def measure(lm, requests: list[Instance]) -> tuple[float, list[tuple[float, bool]]]:
    start = time.process_time()
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    return time.process_time() - start, answers


if __name__ == "__main__":
    main()
