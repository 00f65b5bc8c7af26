"""What the training loop costs over a bare one: forward, backward, optimizer, and nothing else.

    python benchmarks/train_overhead.py                         # a model of 20k parameters: the hardest case
    python benchmarks/train_overhead.py --width 128 --layers 4

The bare loop has its batches ready in memory, no clipping, no guard, no record. The training loop is that of
`linnet.train` with everything on, as users run it: batches from shards, gradient norm and clipping, the guard's look at
every loss, the schedule, a row in metrics.jsonl every 10 steps. Checkpoints and validations are left out of both: their
number is the user's choice. The two take turns in short stretches, so that a noisy machine disturbs both alike; the
ratio is that of the medians over the stretches. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from linnet.config import parse
from linnet.models import build_model, count_parameters, family
from linnet.train import TrainConfig, resolve
from linnet.train.identity import find
from linnet.train.loop import Run
from linnet.train.monitor import Stop
from linnet.train.preflight import preflight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="tnl")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--stretches", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="steps in a stretch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    with tempfile.TemporaryDirectory() as folder:
        run = open_run(options, Path(folder))
        bare = bare_loop(run)
        stretch = options.steps
        times: dict[str, list[float]] = {"bare": [], "linnet": []}
        advance(run, stretch), bare(stretch)  # warm up
        for number in range(options.stretches):
            turns = [("bare", lambda: bare(stretch)), ("linnet", lambda: advance(run, stretch))]
            for name, turn in turns if number % 2 else reversed(turns):
                began = time.perf_counter()
                turn()
                wait(options.device)
                times[name].append((time.perf_counter() - began) / stretch * 1e3)
        run.record.close()

    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["linnet"] / medians["bare"]
    _, outside = count_parameters(run.config.model)
    print(f"{options.family}, {outside:,} parameters without embeddings, {options.device}, {options.threads} thread(s)")
    print(f"bare   {medians['bare']:.3f} ms per step\nlinnet {medians['linnet']:.3f} ms per step\nratio  {ratio:.3f}")
    print(
        json.dumps(
            {
                "benchmark": "train_overhead",
                "family": options.family,
                "device": options.device,
                "params_non_embedding": outside,
                "bare_ms": round(medians["bare"], 4),
                "linnet_ms": round(medians["linnet"], 4),
                "ratio": round(ratio, 4),
            }
        )
    )


def open_run(options: argparse.Namespace, folder: Path) -> Run:
    text = folder / "text.txt"
    text.write_text(
        "".join(f"line {number}: the quick brown fox jumps over the lazy dog\n" for number in range(20_000))
    )
    values = {
        "model": family(options.family)(options.width, options.layers).model_dump(),
        "data": {"source": [str(text)]},
        "seq_len": options.seq_len,
        "batch_size": options.batch_size,
        "steps": 1_000_000,
        "run": {"checkpoint_every": 0, "device": options.device},
    }
    config = resolve(parse(TrainConfig, values))
    place = find(config, folder / "runs", None)
    run = Run(
        config, place.make(config.model_dump(mode="json")), place.digest, preflight(config, folder / "cache"), None
    )
    run.start()
    return run


def advance(run: Run, steps: int) -> None:
    """So many steps of the real loop."""
    run.steps = run.session.step + steps
    for flags in run.advance(Stop()):
        run.session.gradients(flags)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bare_loop(run: Run):
    """The same model, data and optimizer without the rest."""
    config = run.config
    model = build_model(config.model, seed=config.seed, device=run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    batches = [run.session.prefetch.get(position) for position in range(50)]

    def loop(steps: int) -> None:
        for step in range(steps):
            nll, count = model.loss(*batches[step % len(batches)])
            (nll / count).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return loop


if __name__ == "__main__":
    main()
