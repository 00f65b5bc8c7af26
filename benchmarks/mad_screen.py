"""How long MAD's `screen`, `published` and waterfall take on a GPU, and what they score.

    python benchmarks/mad_screen.py --out FOLDER                      # screen, 8 architectures; again until it is done
    python benchmarks/mad_screen.py --out FOLDER --seeds 0,1          # the second seed joins
    python benchmarks/mad_screen.py --out FOLDER --form mad-lab       # attention and GLA as published, same settings
    python benchmarks/mad_screen.py --out FOLDER --budget published   # the same on all 66 settings
    python benchmarks/mad_screen.py --out FOLDER --budget waterfall   # attention and GLA, from core to published
    python benchmarks/mad_screen.py --out /tmp/try --try --device cpu # a tiny form of the same, to see that it works

A call ends after `--minutes` and the next one goes on: finished runs are never trained again, and a bundle resumes from
its last epoch. Every finished run is a row of benchmarks/results/mad-<budget>[-mad-lab]-<gpu>/mad.csv (for the
waterfall, of a folder per step), and a run with a row there is not trained again on another machine either.
benchmarks/results/mad-screen-<gpu>.csv has a row for each architecture whose runs were all trained in FOLDER: the
minutes of all calls, the runs done of those planned, and the score of each task. The last lines say whether scores
discriminate and repeat (`linnet mad agreement`).
"""

import argparse
import csv
import io
import json
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import timing
import torch

from linnet.mad.architectures import architecture
from linnet.mad.cli.agreement import agreement, print_steps
from linnet.mad.results import PLAN, RUNS, TABLE, read_plan, read_results
from linnet.mad.run import COLUMNS, forms, prepare, train
from linnet.mad.scores import number_of_results, score, write_scores
from linnet.mad.settings import BUDGETS, plan
from linnet.mad.waterfall import ARCHITECTURES, STEPS, prepare_waterfall, train_waterfall, waterfall_rows
from linnet.runs.files import write_atomic
from linnet.study.executors import ExecutorConfig

SCREENED = (
    "mad-attention-swiglu",
    "tnl+swiglu x2",
    "hgrn2+swiglu x2",
    "mad-gla-swiglu",
    "mad-mamba",
    "mad-hyena-swiglu",
    "mad-mh-hyena-swiglu",
    "mad-hyena-experts-swiglu",
)
KEYS = ("budget", "architecture", "seeds")
SAME = ("architecture", "setting", "learning_rate", "weight_decay", "seed")  # of the same run, by `Result.key`
TRY = {"epochs": 1, "batch_size": 16, "max_samples": 32, "held_out": 32}
SMALL = {"d_model": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; keep it between calls")
    parser.add_argument("--budget", default="screen", choices=("screen", "published", "full", "waterfall"))
    parser.add_argument("--form", default="paper", choices=("paper", "mad-lab"), help="tasks, training and layers")
    parser.add_argument("--architectures", nargs="+")
    parser.add_argument("--seeds", default="", help="with commas between; default: that of the budget")
    parser.add_argument("--bundle", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--try", dest="small", action="store_true", help="tiny models, samples and one epoch; no CSV")
    options = parser.parse_args()
    if options.form == "mad-lab" and options.budget in ("published", "waterfall"):
        parser.error(f"--form mad-lab: --budget {options.budget} has its forms already; leave it out")
    warnings.simplefilter("ignore")
    if options.small:
        make_small(options.budget)
    deadline = threading.Timer(60 * options.minutes, os.kill, (os.getpid(), signal.SIGINT))
    deadline.daemon = True
    deadline.start()
    done = False
    try:
        done = waterfall(options) if options.budget == "waterfall" else run(options)
    except KeyboardInterrupt:
        print("the time of this call is over", flush=True)
    finally:
        deadline.cancel()
    if options.budget != "waterfall":
        report(options)
    print("done" if done else "not done: run the same command again", flush=True)


def make_small(budget: str) -> None:
    """Replaces the budgets by tiny forms of themselves, whose scores mean nothing."""
    for name in ("screen", "published", "full", "core"):
        few = BUDGETS[name].settings or ("memorization/baseline", "compression/baseline")
        kept = tuple(one for one in few if one.split("/")[0] in ("memorization", "compression"))[:3]
        tiny = replace(BUDGETS[name], grid=BUDGETS[name].grid[:2], settings=kept, baselines_only=False, **TRY)
        BUDGETS[name] = tiny


def run(options: argparse.Namespace) -> bool:
    """Trains each architecture in turn. Returns whether no run is missing."""
    seeds = [int(part) for part in options.seeds.split(",") if part] or [BUDGETS[options.budget].seed]
    done = True
    for name in names_of(options):
        spec = None if options.form == "paper" else options.form
        layers = forms(options.budget, spec, spec).layers
        model = architecture(name, SMALL if options.small else None, 0 if options.small else 4096, layers)
        work = prepare(
            {name: model},
            options.out / folder_name(options),
            budget=options.budget,
            spec=spec,
            layers=spec,
            seeds=seeds,
            known=kept(options) if kept(options).is_dir() and not options.small else None,
            device=options.device,
            executor=ExecutorConfig(kind="inline", retries=0),
        )
        root = work.folder / RUNS
        missing = [one for one in work.runs if not (root / one.run / "result.json").exists()]
        if not missing:
            continue
        began = time.monotonic()
        try:
            failed = train(work, bundle=options.bundle).failed
        finally:
            add_seconds(options.out, f"{folder_name(options)} {name}", time.monotonic() - began)
            left = sum(not (root / one.run / "result.json").exists() for one in work.runs)
            print(f"{name:<28}{len(work.runs) - left:>5} of {len(work.runs)} runs", flush=True)
        done = done and not failed
    return done


def waterfall(options: argparse.Namespace) -> bool:
    began = time.monotonic()
    folder, rows = options.out / "waterfall", kept(options)
    try:
        works = prepare_waterfall(
            folder,
            options.architectures or ARCHITECTURES,
            device=options.device,
            budget="core",
            changes=SMALL if options.small else None,
            known=rows if rows.is_dir() and not options.small else None,
            executor=ExecutorConfig(kind="inline", retries=0),
        )
        failed = train_waterfall(works)
    finally:
        add_seconds(options.out, "waterfall", time.monotonic() - began)
        constants = timing.constants(f"python benchmarks/mad_screen.py {shlex.join(sys.argv[1:])}")
        for step in STEPS if not options.small else ():
            if step.folder == step.name and (folder / step.folder / TABLE).is_file():
                keep(folder / step.folder, rows / step.folder, constants)
    published = options.out / "published"
    print_steps(waterfall_rows(options.out / "waterfall", published if published.is_dir() else None))
    print(f"{read_seconds(options.out)['waterfall'] / 60:.1f} minutes")
    return not failed


def report(options: argparse.Namespace) -> None:
    """Prints a line for each architecture, puts it into the CSV, and prints whether scores discriminate and repeat."""
    folder = made = options.out / folder_name(options)
    constants = timing.constants(f"python benchmarks/mad_screen.py {shlex.join(sys.argv[1:])}")
    if not options.small:
        folder = kept(options)
        keep(made, folder, constants)
    try:
        results = read_results(folder)
    except ValueError:  # no run has ended
        return
    scores, seconds = score(results, **number_of_results(results)), read_seconds(options.out)
    here = [json.loads(path.read_text()) for path in made.glob(f"{RUNS}/*/result.json")]
    spec = None if options.form == "paper" else options.form
    rows = []
    for name in names_of(options):
        if name not in scores:
            continue
        own = [one for one in results if one.architecture == name]
        trained = sum(one["architecture"] == name and "known" not in one for one in here)
        spent, seeds = seconds.get(f"{folder_name(options)} {name}", 0.0), sorted({one.seed for one in own})
        row = {"budget": folder_name(options), "architecture": name, "seeds": ",".join(map(str, seeds))}
        row |= {"runs": len(own), "planned": len(plan(options.budget, spec=spec)) * len(seeds)}
        row |= {"minutes": round(spent / 60, 2), "bundle": options.bundle}
        # A mean over some of the settings is not a score.
        row |= {"score": round(100 * scores[name].score, 2) if row["runs"] == row["planned"] else ""}
        row |= {task: round(100 * one.score, 2) for task, one in scores[name].tasks.items()}
        shown = row["score"] or "-"
        print(f"{name:<28}{row['minutes']:>8.2f} min{shown:>8}{trained:>6} of {len(own)} here", flush=True)
        rows += [row | constants] if trained == len(own) else []
    if not options.small:
        write_scores(folder, scores)
    if rows and not options.small:
        path = timing.RESULTS / f"mad-screen-{timing.short_name(constants.get('gpu', 'cpu'))}.csv"
        timing.update(path, rows, KEYS)
    agreement(folder, full=options.out / "full" if (options.out / "full").is_dir() else None, as_json=False)


def folder_name(options: argparse.Namespace) -> str:
    return options.budget if options.form == "paper" else f"{options.budget}-{options.form}"


def kept(options: argparse.Namespace) -> Path:
    """The folder of the rows of finished runs, for other machines."""
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    return timing.RESULTS / f"mad-{folder_name(options)}-{timing.short_name(gpu)}"


def keep(folder: Path, to: Path, constants: Mapping[str, str]) -> None:
    """Puts rows of finished runs beside those of other machines, or in their place, and the models into the plan."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for table in (to / TABLE, folder / TABLE):
        if table.is_file():
            with open(table, newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    key = tuple(row[name] for name in SAME)
                    if key not in rows or row["run"] != rows[key]["run"]:
                        rows[key] = {"gpu": constants.get("gpu", ""), "commit": constants["commit"]} | row
    if not rows:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, "gpu", "commit"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[key] for key in sorted(rows))
    to.mkdir(parents=True, exist_ok=True)
    write_atomic(to / TABLE, text.getvalue())
    before, plan = read_plan(to), read_plan(folder)
    models = before.get("models", {}) | plan.get("models", {})
    write_atomic(to / PLAN, json.dumps(before | plan | {"models": models, "runs": []}, indent=1) + "\n")


def names_of(options: argparse.Namespace) -> list[str]:
    screened = options.budget in ("screen", "full") and options.form == "paper"
    return list(options.architectures or (SCREENED if screened else ARCHITECTURES))


def add_seconds(folder: Path, name: str, seconds: float) -> None:
    found = read_seconds(folder)
    found[name] = found.get(name, 0.0) + seconds
    write_atomic(folder / "seconds.json", json.dumps(found, indent=1) + "\n")


def read_seconds(folder: Path) -> dict[str, float]:
    path = folder / "seconds.json"
    return json.loads(path.read_text()) if path.is_file() else {}


if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    main()
