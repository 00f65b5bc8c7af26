"""Tokens per second of training recipes on a CPU, beside the softmax Transformer of the same size: loss and gradients.

    python benchmarks/cpu_training.py

The models take turns, so that a busy machine slows all alike; medians. Without the optimizer's step.
"""

import argparse
import statistics
import time

import torch

from linnet.models import build_model, get_recipe

RIVAL = "llama-10m"
RECIPES = ("gdn-10m", "kda-10m", "mamba2-10m", "rwkv7-10m", "hgrn2-10m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    models = {name: build_model(get_recipe(name), seed=0) for name in (RIVAL, *options.recipes)}
    vocabulary = min(model.config.vocab_size for model in models.values())
    tokens = torch.randint(0, vocabulary, (options.rows, options.length + 1))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(1 + options.repeats):  # the first turn warms up
        for name, model in models.items():
            began = time.perf_counter()
            total, count = model.loss(tokens[:, :-1], tokens[:, 1:])
            (total / count).backward()
            seconds[name].append(time.perf_counter() - began)
            model.zero_grad()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    for name, median in medians.items():
        rate = options.rows * options.length / median
        print(f"{name:<14}{rate:>8,.0f} tokens/s{medians[RIVAL] / median:>7.2f} of {RIVAL}")


if __name__ == "__main__":
    main()
