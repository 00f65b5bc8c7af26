"""CPU time and statistics of the generated tasks of the Long Range Arena, in one process.

    python benchmarks/lra_data.py listops                         # 100,000 trees: time, lengths, labels
    python benchmarks/lra_data.py pathfinder --images 10000       # time, brightness, labels, histogram classifier
    python benchmarks/lra_data.py path-x --images 400

Prints one JSON object. CPU seconds are those of the process (`time.process_time`), not wall time.
"""

import argparse
import json
import time
from functools import partial

import numpy as np

from linnet.data.synthetic.base import Draws
from linnet.encoders.lra.listops import FORMS, ROOTS, _draw, generate_listops
from linnet.encoders.lra.pathfinder import generate_pathfinder
from linnet.encoders.lra.stage import ROWS
from linnet.encoders.lra.task import COUNTS


def listops() -> dict:
    start = time.process_time()
    shards = [
        generate_listops("full", split, block, ROWS, 0)
        for split, count in zip(("train", "validation", "test"), COUNTS["listops", "full"], strict=True)
        for block in range(count // ROWS)
    ]
    seconds = time.process_time() - start
    lengths = np.concatenate([shard.lengths for shard in shards]) - 1  # without the end
    labels = np.bincount(np.concatenate([shard.labels for shard in shards]))
    hashes = np.concatenate([shard.hashes for shard in shards])
    kept = sum(len(_draw(Draws(0, "share", number), FORMS["full"]).labels) for number in range(20))
    return {
        "trees": len(lengths),
        "distinct": len(np.unique(hashes)),
        "cpu_seconds": round(seconds, 1),
        "kept": round(kept / (20 * ROOTS), 4),
        "length": {"mean": round(float(lengths.mean()), 1), "sd": round(float(lengths.std()), 1)},
        "quartiles": np.percentile(lengths, [25, 50, 75]).tolist(),
        "labels": (labels / len(lengths)).round(4).tolist(),
    }


def images(task: str, count: int) -> dict:
    generate = partial(generate_pathfinder, task)
    generate("full", "test", 0, 1, 1)  # tables are made once per process
    start = time.process_time()
    shards = [
        generate("full", "train", block, min(ROWS, count - block * ROWS), 0) for block in range(-(-count // ROWS))
    ]
    seconds = time.process_time() - start
    values = np.concatenate([shard.values for shard in shards])
    labels = np.concatenate([shard.labels for shard in shards]).astype(float)
    means = values.mean(axis=(1, 2, 3))
    return {
        "images": count,
        "cpu_ms_per_image": round(1000 * seconds / count, 2),
        "mean": round(float(means.mean()), 3),
        "standard_error": round(float(means.std() / count**0.5), 3),
        "above_half": round(float((values > 127.5).mean()), 5),
        "labels": round(float(labels.mean()), 4),
        "histogram_accuracy": round(histogram_accuracy(values, labels), 4),
    }


def histogram_accuracy(values: np.ndarray, labels: np.ndarray) -> float:
    """Returns the accuracy on the second half of a logistic regression on pixel histograms of the first half."""
    counts = np.stack([np.bincount(image.reshape(-1) // 8, minlength=32) for image in values]).astype(float)
    half = len(labels) // 2
    scaled = (counts - counts[:half].mean(axis=0)) / (counts[:half].std(axis=0) + 1e-9)
    features = np.concatenate([scaled, scaled**2, np.ones((len(labels), 1))], axis=1)
    weights = np.zeros(features.shape[1])
    for _ in range(300):
        guess = 1 / (1 + np.exp(-features[:half] @ weights))
        weights -= 0.1 * (features[:half].T @ (guess - labels[:half]) / half + 1e-3 * weights)
    return float(((features[half:] @ weights > 0) == labels[half:]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["listops", "pathfinder", "path-x"])
    parser.add_argument("--images", type=int, default=10_000)
    given = parser.parse_args()
    result = listops() if given.task == "listops" else images(given.task, given.images)
    print(json.dumps({"task": given.task, **result}))


if __name__ == "__main__":
    main()
