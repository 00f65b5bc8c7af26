"""The reduced WikiText-2 table on CPU cores: models of the papers' WikiText-103 tables at six layers of width 128.

    python benchmarks/wikitext_cpu.py FOLDER --csv --workers 16               every model, three seeds, one core each
    python benchmarks/wikitext_cpu.py FOLDER --models rwkv4 --seeds 0 --csv   one row
    python benchmarks/wikitext_cpu.py                                         the rows measured so far, from the CSV

FOLDER has valid.txt and test.txt of WikiText-2 in its word-level form. Models train on the first and are scored on the
second (docs/evaluation.md): perplexity per BPE token and line end, in blocks of 128 tokens from zero state. The models
of the items of papers are those of their reduced forms; RetNet and RG-LRU, which the tables lack, have 12 d_model^2
parameters per layer or a little more. `--csv` puts the rows into benchmarks/results/wikitext-2-cpu.csv, with the
commit, the versions and the command. Runs that are done are not made again. Seconds are those of one thread.
"""

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import timing
import torch
from vision_runs import Plan, execute

from linnet.config import override, read_yaml
from linnet.evaluate.evaluators import BlocksEvaluator
from linnet.evaluate.session import prepare
from linnet.papers.library import read_library

RESULTS = timing.RESULTS / "wikitext-2-cpu.csv"
CONFIG = Path(__file__).parents[1] / "configs" / "wikitext-2-reduced.yaml"
ITEMS = (("001", "table1"), ("002", "table5"), ("003", "table3"))
MORE = {
    "retnet": {
        "model.recipe": "retnet-10m",
        "model.init": "xavier",  # as the other models
        "model.options": {"retnet": {"num_heads": 4}, "mlp": {"inner": 256}},
    },
    "rglru": {
        "model.recipe": "rglru-10m",
        "model.init": "xavier",
        "model.options": {"rglru": {"num_heads": 4}, "glu": {"inner": 384}},
    },
}


def models() -> dict[str, dict]:
    """Returns the name of each model with its changes of the configuration."""
    changes = dict(MORE)
    library = read_library()
    for key in ITEMS:
        steps = library.items[key].item.reduced.steps
        changes |= next(step.vary for step in steps if step.verb == "train")
    return changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="WikiText-2; without it, the rows of the file are shown")
    parser.add_argument("--models", nargs="+", help=f"only these of {', '.join(models())}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/wikitext-cpu"))
    parser.add_argument("--workers", type=int, default=1, help="trainings at the same time, of one thread each")
    parser.add_argument("--minutes", type=float, help="start no training after so many minutes")
    parser.add_argument("--steps", type=int, help="train so many steps only, to try the script")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    if unknown := set(options.models or ()) - set(models()):
        parser.error(f"--models: {', '.join(sorted(unknown))} is unknown; use {', '.join(models())}")
    rows = timing.read(RESULTS)
    if options.folder is not None:
        made = measure(options)
        if options.csv:
            timing.update(RESULTS, made, ("model", "seed"))
        rows = timing.read(RESULTS) if options.csv else [{name: str(row[name]) for name in row} for row in made]
    show(rows)


def measure(options: argparse.Namespace) -> list[dict]:
    text = {part: f"wikitext-2={options.folder.resolve()}:{part}" for part in ("valid", "test")}
    shared = {"data.source": text["valid"], "data.validation": text["test"]}
    shared |= {"run.device": "cpu", "run.checkpoint_every": 0}
    shared |= {} if options.steps is None else {"steps": options.steps, "schedule.warmup": 0.1}
    chosen = {name: changes for name, changes in models().items() if name in (options.models or models())}
    plans = []
    for seed in options.seeds:
        for name, changes in chosen.items():
            changed = [f"{key}={json.dumps(value)}" for key, value in (shared | changes).items()]
            plans.append(Plan("wikitext-2", name, seed, override(read_yaml(CONFIG), changed) | {"name": name}))
    command = f"python benchmarks/wikitext_cpu.py {shlex.join(sys.argv[1:])}"
    folders = execute(plans, options.out, options.out / "cache", options.workers, options.minutes)
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        scores = list(pool.map(perplexity, [folder.path for folder in folders.values()], [text["test"]] * len(folders)))
    rows = []
    for (plan, folder), score in zip(folders.items(), scores, strict=True):
        result = folder.result()
        row = {"model": plan.variant, "seed": plan.seed, "perplexity": round(score, 3)}
        row |= {"parameters": result["params_total"], "steps": result["steps"], "seconds": round(result["seconds"], 1)}
        rows.append(row | timing.constants(command))
    return rows


def perplexity(run: Path, text: str) -> float:
    """Returns the perplexity of a text in blocks from zero state, in one thread."""
    torch.set_num_threads(1)
    evaluator = BlocksEvaluator(paths=[text])
    record = evaluator.run(prepare(run, [evaluator]))
    return next(result.value for result in record.results if (result.task, result.metric) == ("blocks", "perplexity"))


def show(rows: list[dict[str, str]]) -> None:
    """Prints the mean perplexity of each model over its seeds, by name: few seeds give no order."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["model"], []).append(float(row["perplexity"]))
    print(f"{'model':<16}{'seeds':>6}{'perplexity':>12}   each seed")
    for name, values in sorted(groups.items()):
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"{name:<16}{len(values):>6}{statistics.mean(values):>12.2f}   {each}")


if __name__ == "__main__":
    main()
