"""Training in float8 beside bfloat16, in one run: tokens per second of wide layers, and losses over seeds.

    python benchmarks/float8.py speed --csv       # two layers of TNL 7B and of LLaMA 7B; compiles for most of the time
    python benchmarks/float8.py losses --csv      # TNL and LLaMA of about 390M parameters, three seeds each

Both train as `linnet train` does (`linnet.train.Session`) with `run.compile`, on bytes of Python's standard library.

`speed` makes `--steps` steps, compares the losses of the last five, then times both precisions in turns. A step has
`--tokens` tokens in rows of `--length`, with gradient norm and AdamW. The vocabulary has 256 tokens, so that the head,
which stays in bfloat16, has the small share that it has in a deep model. The bar is 1.25x the tokens per second.

`losses` trains `--steps` steps and scores held-out text in bfloat16, for each seed. The mean of float8 may be higher by
the spread of bfloat16, from its lowest to its highest seed, at most.
"""

import argparse
import gc
import importlib.metadata
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator

import timing
import torch

from linnet.models import family
from linnet.train import TrainConfig, float8
from linnet.train.monitor import Guard
from linnet.train.objectives.text import TextObjective
from linnet.train.session import Prefetch, Session, load_model, model_tensors

PRECISIONS = ("bfloat16", "float8")
KEYS = ("mode", "model", "precision", "tokens", "length", "seed")
BAR = 1.25
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["speed", "losses"])
    parser.add_argument("--models", nargs="+", default=["tnl", "llama"])
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step; default: 4096 16384 65536, of losses 16384")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="default: 2, of losses 26")
    parser.add_argument("--steps", type=int, help="default: 20, of losses 150")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of losses")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()

    constants = timing.constants(f"python benchmarks/float8.py {shlex.join(sys.argv[1:])}")
    constants["torchao"] = importlib.metadata.version("torchao")
    path = timing.RESULTS / f"float8-{timing.short_name(constants['gpu'])}.csv"
    measure = {"speed": measure_speed, "losses": measure_losses}[options.mode]
    with tempfile.TemporaryDirectory() as cache:
        for model in options.models:
            for rows in measure(model, options, cache):
                rows = [{"mode": options.mode, "model": model} | row | constants for row in rows]
                if options.csv:
                    timing.update(path, rows, KEYS)


def measure_speed(model: str, options: argparse.Namespace, cache: str) -> Iterator[list[dict]]:
    """Yields the rows of both precisions for each number of tokens."""
    layers, steps = options.layers or 2, options.steps or 20
    for tokens in options.tokens or [4096, 16_384, 65_536]:
        sessions = {
            name: start(
                {"recipe": f"{model}-7b", "num_layers": layers}, name, tokens, options.length, 1000, 3e-5, cache
            )
            for name in PRECISIONS
        }
        losses = {name: train(session, steps) for name, session in sessions.items()}
        times: dict[str, list[float]] = {name: [] for name in PRECISIONS}
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                times[name].append(timing.time_calls(lambda session=session: step(session)))
        speed = {name: tokens / statistics.median(each) * 1e3 for name, each in times.items()}
        last = {name: statistics.mean(each[-5:]) for name, each in losses.items()}
        ratio = speed["float8"] / speed["bfloat16"]
        shown = ", ".join(f"{name} {speed[name]:,.0f} tokens/s loss {last[name]:.4f}" for name in PRECISIONS)
        print(f"{model}, {layers} layers, {tokens:,} tokens: {shown}; {ratio:.3f}x (bar {BAR}x)", flush=True)
        yield [
            {
                "precision": name,
                "tokens": tokens,
                "length": options.length,
                "layers": layers,
                "tokens_per_second": round(speed[name]),
                "loss": round(last[name], 4),
                "ratio": round(speed[name] / speed["bfloat16"], 3),
            }
            for name in PRECISIONS
        ]
        release(sessions)


def measure_losses(model: str, options: argparse.Namespace, cache: str) -> Iterator[list[dict]]:
    """Yields the rows of all seeds in both precisions."""
    layers, steps = options.layers or 26, options.steps or 150
    shape = family(model)(1024, layers, 0, 2816).model_dump()
    for tokens in options.tokens or [16_384]:
        rows = []
        for name in PRECISIONS:
            session = start(shape, name, tokens, options.length, steps, 1e-3, cache)
            for seed in options.seeds:
                objective = begin_again(session, seed)
                last = statistics.mean(train(session, steps)[-20:])
                with float8.in_bfloat16(session.model):
                    held_out = objective.validate(session.model, session.autocast)["validation_loss"]
                print(f"{model}, {name}, seed {seed}: loss {last:.4f}, held-out {held_out:.4f}", flush=True)
                rows.append(
                    {"precision": name, "tokens": tokens, "length": options.length, "layers": layers}
                    | {"seed": seed, "steps": steps, "loss": round(last, 4), "held_out": round(held_out, 4)}
                )
            release({name: session})
        low, near = ([row["held_out"] for row in rows if row["precision"] == name] for name in PRECISIONS)
        difference, spread = statistics.mean(near) - statistics.mean(low), max(low) - min(low)
        verdict = "within" if difference <= spread else "outside"
        print(f"{model}: float8 - bfloat16 {difference:+.4f}: {verdict} bfloat16's spread {spread:.4f}", flush=True)
        yield rows


def start(model: dict, precision: str, tokens: int, length: int, steps: int, rate: float, cache: str) -> Session:
    """A training on the GPU, before its first step."""
    length = min(length, tokens)
    config = TrainConfig(
        model=model,
        precision=precision,
        seq_len=length,
        batch_size=tokens // length,
        steps=steps,
        data={"source": "stdlib", "max_bytes": 16_000_000},
        optimizer={"learning_rate": rate},
        run={"compile": True, "device": "cuda"},
    )
    device = torch.device("cuda")
    return Session(config, TextObjective.prepare(config, device, cache), device)


def begin_again(session: Session, seed: int) -> TextObjective:
    """Sets a session to the first step of its training with another seed, and keeps its compiled code."""
    config = session.config.model_copy(update={"seed": seed})
    objective = TextObjective(config, session.objective.data, session.device)
    load_model(session.model, model_tensors(objective.build(seed, session.device)))
    session.optimizer.load({})
    session.prefetch.close()
    session.prefetch = Prefetch(objective.batches(), session.device)
    session.step = session.position = 0
    session.recent.clear()
    session.guard = Guard(session.config.guard)
    return objective


def step(session: Session) -> None:
    session.gradients()
    session.apply()


def train(session: Session, steps: int) -> list[float]:
    """Makes steps and returns their losses."""
    for _ in range(steps):
        step(session)
    if (trouble := session.judge()) is not None:
        sys.exit(f"a bad step: {trouble}")
    return session.recent[-steps:]


def release(sessions: dict[str, Session]) -> None:
    """Frees the memory of sessions and of their compiled code."""
    for session in sessions.values():
        session.prefetch.close()
    sessions.clear()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
