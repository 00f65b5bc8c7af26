"""Holds what this tree computes against an earlier commit, bit for bit, on a CPU.

    python benchmarks/unchanged.py 1ad5c78

One small model per family trains 20 steps on the text of this repository's docs. The two trees must agree in every
loss, gradient norm and validation loss, in the order of the data, in each weight at the end, in 32 decoded tokens and
their logits, and in parameters, FLOPs and bytes of state. Then the earlier tree's runs are cut back to their checkpoint
of step 10, and this tree must find them under the same configuration, go on, and end with the same rows and weights.
Models of images, masked text, sentences and long sequences train on small data of their own. In place of decoded
tokens, the record of their evaluation must be the same, and the earlier tree's runs are scored by this one.

`--tree FOLDER` compares with a checkout that is there already. Exit status 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
MODELS = {
    "llama": {"recipe": "llama-10m", "d_model": 64},
    "llama-window-gqa": {
        "d_model": 64, "layout": "attention+swiglu x2",
        "options": {"attention": {"num_heads": 4, "num_kv_heads": 2, "window": 24}},
    },
    "tnl": {"recipe": "tnl-10m", "d_model": 64},
    "tnl1": {"recipe": "tnl1-385m", "d_model": 64, "layout": "tnl+glu x3"},
    "hgrn": {"recipe": "hgrn-10m", "d_model": 64},
    "hgrn2": {"recipe": "hgrn2-10m", "d_model": 64},
    "cosformer2": {"recipe": "cosformer2-10m", "d_model": 64},
    "lightnet": {"recipe": "lightnet-10m", "d_model": 64},
    "gla": {"recipe": "gla-10m", "d_model": 64},
    "mamba": {"recipe": "mamba-10m", "d_model": 64},
    "hyena-moe": {"recipe": "mad-hyena-moe", "d_model": 64},
    "mh-hyena-attention-moe": {"recipe": "mad-mh-hyena-attention-moe"},
    "hyena-experts": {"recipe": "mad-hyena-experts-swiglu"},
    "hybrid": {"d_model": 64, "layout": "(tnl+sglu attention+swiglu) x2", "options": {"attention": {"window": 32}}},
}  # fmt: skip
IMAGES = {"d_model": 32, "image_size": 8, "patch": 2, "channels": 1, "classes": 10}
OPTIONS = {"attention": {"num_heads": 2}, "lightnet": {"num_heads": 2}, "swiglu": {"inner": 32}}
ENCODER = {"d_model": 32, "layout": "attention+mlp lightnet+swiglu", "options": {**OPTIONS, "mlp": {"inner": 32}}}
COUNTS = {"train": 48, "validation": 24, "test": 24}
TRAININGS = {
    "vit": {
        "objective": "images", "model": {**ENCODER, **IMAGES, "pool": "cls", "position": "learned"},
        "data": {"source": ["digits"]}, "augment": {"kind": "crop_flip", "mixup": 0.8, "smoothing": 0.1, "repeats": 2},
    },
    "denoiser": {
        "objective": "diffusion", "model": {**ENCODER, **IMAGES}, "data": {"source": ["digits"]},
        "evaluate_images": 32,
    },
    "masked": {
        "objective": "masked", "model": {**ENCODER, "dropout": 0.1}, "data": {"source": ["text.txt"]}, "seq_len": 64,
        "evaluate_tokens": 2048,
    },
    "sst2": {
        "objective": "sentences", "model": ENCODER, "data": {"source": "glue", "task": "sst2", "tokenizer": "byte"},
    },
    "stsb": {
        "objective": "sentences", "model": {**ENCODER, "pool": "mean"},
        "data": {"source": "glue", "task": "stsb", "tokenizer": "byte", "max_length": 24},
    },
    "listops": {
        "objective": "sequences", "data": {"task": "listops", "size": "reduced", "samples": COUNTS},
        "model": {**ENCODER, "dropout": 0.1},
    },
    "pathfinder": {
        "objective": "sequences", "data": {"task": "pathfinder", "size": "reduced", "samples": COUNTS},
        "model": ENCODER,
    },
}  # fmt: skip
SCORED = {  # the command that scores a run of an objective, and what follows the run
    "images": ["images", "--cache", "cache"],
    "masked": ["masked", "text.txt"],
    "sentences": ["glue"],
    "sequences": ["lra", "--cache", "cache"],
}
STEPS, KEPT = 20, 10
TIMES = ("seconds", "per_second", "flop_utilisation", "memory_bytes")  # ends of keys that differ from run to run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="an earlier commit")
    parser.add_argument("--tree", type=Path, help="a checkout of it")
    names = [*MODELS, *TRAININGS]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        print("\n" + json.dumps(probe(options.probe, options.models)))
        return 0
    if (options.revision is None) == (options.tree is None):
        parser.error("name an earlier commit, or its checkout with --tree")
    with tempfile.TemporaryDirectory() as folder:
        tree = options.tree or Path(folder) / "tree"
        if options.tree is None:
            subprocess.run(["git", "-C", HERE, "worktree", "add", "-q", "--detach", tree, options.revision], check=True)
        try:
            return compare(tree.resolve(), Path(folder), options.models)
        finally:
            if options.tree is None:
                subprocess.run(["git", "-C", HERE, "worktree", "remove", "--force", tree], check=True)


def compare(tree: Path, folder: Path, models: list[str]) -> int:
    """Prints a line per model and returns the exit status."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((tree / "docs").glob("*.md")))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    write_glue(folder / "glue", text.split())
    then = run_probe(tree, folder, "then", models)
    now = run_probe(HERE, folder, "now", models)
    cut_back(folder / "then" / "runs")
    resumed = run_probe(HERE, folder, "then", models)
    failed = 0
    for name in models:
        lines = [
            *differences(then[name], now[name]),
            *(f"{x} (resumed)" for x in differences(then[name], resumed[name])),
        ]
        if resumed[name]["resumed"] != then[name]["folder"]:
            lines.append("the earlier tree's folder was not found")
        print(f"{name:<26}{'; '.join(lines) or 'same'}", flush=True)
        failed += bool(lines)
    return 1 if failed else 0


def differences(then: dict, now: dict) -> list[str]:
    """Names of what differs, with the size of the difference where it is one of numbers."""
    found = [key for key in then if key not in ("folder", "resumed", "logits", "flops") and then[key] != now[key]]
    found += [f"flops {then['flops']} -> {now['flops']}"] if then["flops"] != now["flops"] else []
    if then.get("logits") != now.get("logits"):
        scale = max(abs(x) for x in then["logits"])
        gap = max(abs(a - b) for a, b in zip(then["logits"], now["logits"], strict=True))
        found.append(f"logits by {gap / scale:.1e}")
    return found


def run_probe(tree: Path, folder: Path, place: str, models: list[str]) -> dict:
    """What `probe` finds with the package of a tree."""
    (folder / place).mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--probe", folder / place, "--models", *models]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cut_back(runs: Path) -> None:
    """Leaves runs as a kill after step `KEPT` would have left them."""
    for run in runs.iterdir():
        (run / "result.json").unlink()
        for path in sorted((run / "checkpoints").iterdir()):
            if int("".join(filter(str.isdigit, path.name))) > KEPT:
                shutil.rmtree(path)


def probe(folder: Path, models: list[str]) -> dict:
    """Trains the models in `folder` and describes each by plain values."""
    import torch

    from linnet.config import parse
    from linnet.data import Batches, prepare
    from linnet.models.costs import count_parameters, flops_exact, flops_paper, state_bytes
    from linnet.runs import latest_good, load_model
    from linnet.train import TrainConfig, train

    torch.set_num_threads(1)
    found = {}
    for name in (name for name in models if name in TRAININGS):
        found[name] = probe_training(folder, name)
    for name in (name for name in models if name in MODELS):
        values = {
            "name": name, "model": MODELS[name], "data": {"source": ["text.txt"]}, "seq_len": 64, "batch_size": 4,
            "accumulation": 2, "steps": STEPS, "evaluate_tokens": 2048,
        }  # fmt: skip
        run = {"device": "cpu", "log_every": 1, "checkpoint_every": KEPT, "evaluate_every": KEPT}
        values |= {"run": run} if "run" in TrainConfig.model_fields else run  # older trees have these keys at the top
        config = parse(TrainConfig, values)
        there = sorted(path.name for path in (folder / "runs").glob(f"{name}-*"))
        run = train(config, folder / "runs", folder / "cache")
        _, tensors, _, _ = latest_good(run.checkpoint_folder)
        batches = Batches(prepare(config.data, folder / "cache").train, 64, 4, config.seed)
        model, _ = load_model(run.path)
        found[name] = {
            "rows": rows_of(run),
            "weights": {key: hash_of(value) for key, value in sorted(tensors["model"].items())},
            "data": hash_of(torch.cat([batches.batch(step)[0] for step in range(8)])),
            **decode(model),
            "parameters": count_parameters(config.model),
            "flops": [flops_exact(config.model, 64), flops_paper(config.model, 64), flops_exact(config.model, 256)],
            "state_bytes": [state_bytes(config.model, length) for length in (64, 4096)],
            "folder": run.path.name,
            "resumed": there[0] if there else None,
        }
    return found


def probe_training(folder: Path, name: str) -> dict:
    """Trains a model of another objective than text, and scores its run with the command for it."""
    import torch
    from typer.testing import CliRunner

    from linnet.cli import app
    from linnet.runs import latest_good
    from linnet.train import read_training, train
    from linnet.train.objectives import find_objective

    values = {"name": name, "steps": STEPS, "batch_size": 8, "accumulation": 2} | TRAININGS[name]
    config = read_training(
        values | {"run": {"device": "cpu", "log_every": 1, "checkpoint_every": KEPT, "evaluate_every": KEPT}}
    )
    there = sorted(path.name for path in (folder / "runs").glob(f"{name}-*"))
    objective = find_objective(config).prepare(config, torch.device("cpu"), folder / "cache")
    batches = [objective.augment(objective.batches().batch(step), step) for step in range(8)]
    run = train(config, folder / "runs", folder / "cache")
    _, tensors, _, _ = latest_good(run.checkpoint_folder)
    records = []
    if config.objective in SCORED:
        verb, *options = SCORED[config.objective]
        done = CliRunner().invoke(app, ["evaluate", verb, str(run.path), *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        for path in sorted((run.path / "evaluations").glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            record["detail"].pop("images_per_second", None)
            records.append([record[key] for key in ("kind", "asked", "scored", "results", "detail")])
            records.append(
                hash_of(torch.frombuffer(bytearray(path.with_suffix(".csv").read_bytes()), dtype=torch.uint8))
            )
    return {
        "rows": rows_of(run),
        "weights": {key: hash_of(value) for key, value in sorted(tensors["model"].items())},
        "data": [[hash_of(tensor) for tensor in batch] for batch in batches],
        "digest": objective.data.digest,
        "files": objective.files(),
        "evaluation": records,
        "parameters": objective.costs.parameters,
        "flops": [objective.costs.flops, find_objective(config).step_flops(config)],
        "folder": run.path.name,
        "resumed": there[0] if there else None,
    }


def rows_of(run) -> list[dict]:
    """The rows of a run's record without events and times."""
    rows = [row for row in run.metrics() if "event" not in row]
    return [{key: value for key, value in row.items() if not key.endswith(TIMES)} for row in rows]


def write_glue(folder: Path, words: list[str]) -> None:
    """Writes small files of SST-2 and STS-B, whose sentences are words of a text."""
    for name, header in (("SST-2", "sentence\tlabel"), ("STS-B", "sentence1\tsentence2\tscore")):
        (folder / name).mkdir(parents=True)
        for file, first, count in (("train.tsv", 0, 60), ("dev.tsv", 1000, 20)):
            texts = [" ".join(words[first + 7 * row : first + 7 * row + 2 + row % 9]) for row in range(count + 1)]
            pairs = zip(texts, texts[1:], strict=False)
            lines = [f"{a}\t{len(a) % 2}" if name == "SST-2" else f"{a}\t{b}\t{len(b) % 6}" for a, b in pairs]
            (folder / name / file).write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")


def decode(model) -> dict:
    """32 greedy tokens after a prompt, by prefill and steps, and the logits of every fourth of them."""
    import torch

    prompt = torch.tensor([list(b"The loss of a model falls as it ")])
    with torch.inference_mode():
        logits, states = model.prefill(prompt, model.init_state(1, 128))
        tokens, seen = [], logits[0].tolist()
        for number in range(32):
            token = logits.argmax(-1)
            tokens.append(int(token))
            logits, states = model.step(token, states)
            seen += logits[0].tolist() if number % 4 == 3 else []
    return {"tokens": tokens, "logits": seen}


def hash_of(tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
