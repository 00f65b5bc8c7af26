"""A study folder as `linnet study` leaves it, computed from known laws instead of trained: in place of hours of runs.

The loss of a model with N parameters after D tokens is E + A/N^alpha + B/D^beta with a little noise that depends on the
run alone, so that the optimum of each budget lies inside its sizes and the fitted laws are known.
"""

import csv
import json
import math
import random
from pathlib import Path

import yaml

COLUMNS = (
    "run architecture budget params_non_embedding params_total tokens flops flops_paper loss bits_per_byte "
    "state_bytes seconds status path"
).split()
# architecture: (E, A, alpha, B, beta, FLOPs overhead over 6ND, state bytes of width 64, FLOP/s)
LAWS = {
    "llama": (0.60, 38.0, 0.35, 190.0, 0.37, 1.45, 1_048_576, 2.6e9),
    "tnl": (0.58, 36.0, 0.35, 185.0, 0.37, 1.20, 98_304, 3.1e9),
    "hgrn2": (0.57, 38.0, 0.36, 182.0, 0.37, 1.15, 65_536, 2.4e9),
    "cosformer2": (0.62, 37.0, 0.35, 192.0, 0.37, 1.25, 196_608, 2.2e9),
    "lightnet": (0.56, 40.0, 0.36, 185.0, 0.37, 1.22, 131_584, 1.3e9),
}
BUDGETS = (1.5e11, 3e11, 6e11, 1.2e12)
WIDTHS = (16, 24, 32, 48, 64, 96)
# loss -> metric: chance, midpoint and steepness of a share; coefficient and exponent of the text's bits
TRANSFER = {"questions": (0.25, 3.0, 3.0), "book": (None, 1.6, 1.2)}
RESAMPLES = 20  # of the bootstrap in tests: enough for intervals to be there


def write_study(
    folder: Path,
    architectures=tuple(LAWS),
    budgets=BUDGETS,
    widths=WIDTHS,
    curves: bool = True,
    spoil: dict[str, str] | None = None,
    noise: float = 0.002,
    evaluations: bool = False,
) -> Path:
    """Writes study.yaml, table.csv and runs/.

    Args:
        evaluations: whether the runs were evaluated on the way: `TRANSFER` of the loss at the time.
        spoil: architecture -> "diverged" or "failed": what became of its first run.
        curves: whether the runs have metrics.jsonl.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spoil = dict(spoil or {})
    rows = []
    for architecture in architectures:
        for budget in budgets:
            for width in widths:
                status = spoil.pop(architecture, "done")
                rows.append(_run(folder, architecture, budget, width, status, curves, noise, evaluations))
    config = {
        "name": "synthetic-ladder",
        "architectures": list(architectures),
        "budgets": list(budgets),
        "sizes": [[width, 2] for width in widths],
        "seq_len": 256,
        "batch_size": 8,
        "data": {"source": "stdlib", "tokenizer": "byte"},
        "seeds": [0],
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return folder


def _run(folder, architecture, budget, width, status, curves, noise, evaluations) -> dict:
    offset, a, alpha, b, beta, overhead, state, speed = LAWS.get(architecture, LAWS["tnl"])
    params = 12 * 2 * width**2 + 2 * width
    total = params + 256 * width
    tokens = int(budget / (6 * overhead * (params + 256 * width)) / 2048) * 2048
    flops = tokens * 6 * overhead * total
    name = f"{architecture}-{width}-{budget:.1e}".replace("+", "")
    chance = random.Random(name)

    def law(seen):
        return offset + a / params**alpha + b / seen**beta

    loss = law(tokens) * (1 + noise * chance.gauss(0, 1))
    path = folder / "runs" / name
    path.mkdir(parents=True, exist_ok=True)
    config = {"architecture": architecture, "seed": 0, "seq_len": 256, "batch_size": 8, "steps": tokens // 2048}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    row = {
        "run": name,
        "architecture": architecture,
        "budget": budget,
        "params_non_embedding": params,
        "params_total": total,
        "tokens": tokens,
        "flops": flops,
        "flops_paper": flops * 0.9,
        "loss": loss,
        "bits_per_byte": loss / math.log(2),
        "state_bytes": state * width // 64,
        "seconds": flops / speed * chance.uniform(0.9, 1.1),
        "status": status,
        "path": f"runs/{name}",
    }
    if status == "failed":
        (path / "error.txt").write_text("RuntimeError: out of memory\n")
        row |= {"tokens": "", "flops": "", "flops_paper": "", "loss": "", "bits_per_byte": "", "seconds": ""}
    elif status == "diverged":
        row |= {"loss": "", "bits_per_byte": ""}
    if curves and status != "failed":
        _curve(path, tokens, flops, row["seconds"], law, chance)
    if evaluations and status == "done":
        _evaluate(path, tokens, flops, law, loss, chance)
    return row


def _evaluate(path, tokens, flops, law, final, chance) -> None:
    """Rows of evaluations at a third, two thirds and the end; guessing alone for "luck"."""
    with open(path / "metrics.jsonl", "a") as file:
        for share in (1 / 3, 2 / 3, 1.0):
            place = {"step": round(tokens * share) // 2048, "tokens": round(tokens * share), "flops": flops * share}
            loss = final if share == 1.0 else law(tokens * share)
            file.write(json.dumps(place | {"validation_loss": loss}) + "\n")
            floor, midpoint, steepness = TRANSFER["questions"]
            right = floor + (1 - floor) / (1 + math.exp(steepness * (loss - midpoint)))
            for name, p in (("questions", right), ("luck", floor)):
                p = sum(chance.random() < p for _ in range(400)) / 400
                row = {"kind": "tasks", "metrics": {"accuracy": p}, "shown": ["accuracy"], "questions": 400}
                row |= {"chance": {"accuracy": floor}}
                file.write(json.dumps(place | {"evaluation": name} | row) + "\n")
            _, coefficient, exponent = TRANSFER["book"]
            bits = coefficient * loss**exponent * (1 + 0.004 * chance.gauss(0, 1))
            row = {"evaluation": "book", "kind": "text", "metrics": {"bits_per_byte": bits, "perplexity": 2**bits}}
            row |= {"shown": ["bits_per_byte"], "chance": {}}
            file.write(json.dumps(place | row) + "\n")


def _curve(path, tokens, flops, seconds, law, chance) -> None:
    steps = tokens // 2048
    with open(path / "metrics.jsonl", "w") as file:
        for index in range(1, 61):
            step = max(1, steps * index // 60)
            seen = step * 2048
            share = seen / tokens
            loss = min(5.55, law(seen)) * (1 + 0.01 * chance.gauss(0, 1))
            row = {"step": step, "tokens": seen, "flops": flops * share, "loss": loss, "seconds": seconds * share}
            file.write(json.dumps(row | {"bits_per_byte": loss / math.log(2), "learning_rate": 3e-3}) + "\n")
        last = {"step": steps, "tokens": tokens, "flops": flops, "validation_loss": law(tokens)}
        file.write(json.dumps(last) + "\n")
