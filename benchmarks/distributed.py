"""Training on two GPUs against one, and against peers in the same run: the bars of docs/distributed.md.

    python benchmarks/distributed.py all --csv                       # every bar, about 15 minutes on 2 x H200
    python benchmarks/distributed.py topology weak memory --csv      # some of them
    python benchmarks/distributed.py all --device cpu --tiny         # the same code on small models, to try it

| bar | what it measures |
|---|---|
| topology | `nvidia-smi topo -m`, and the bandwidth of an all-gather, a reduce-scatter and an all-reduce |
| weak | 32k tokens per GPU: two GPUs (FSDP2) against one without it |
| one | one GPU: FSDP2 on a group of one against no process group |
| long | a row of 524,288 tokens over two GPUs against 262,144 on one |
| ring | a row of 262,144 tokens against a LASP ring in plain torch |
| context | the same row against LLaMA with torch's context parallel |
| lengths | one row over two GPUs, from 32k to 512k tokens (`--longest 2097152` for more) |
| tensor | tensor parallel 2 on shapes of a 7B, against one GPU and against FSDP2 |
| memory | peak memory against `linnet train --plan`, one GPU and two |
| save | steps during a background checkpoint |
| muon | a step with Muon against one with AdamW |
| evaluate | tokens/s of `linnet evaluate text`: 32 documents, divided among two GPUs against one |
| kill | seconds from SIGKILL of one rank of `linnet train --devices 2` to its next step |
| stop | seconds from SIGTERM to one rank to the end of all, with a checkpoint of one step |

Models are of 1.3B parameters (24 layers, width 2,048, GLU 5,632, 50,304 tied tokens), in bfloat16 autocast, with the
real session of `linnet train` on random tokens. GPUs of less than 120 GiB get half of the tokens. Each line is the
median of the timed steps. Two worker processes do all bars; one-GPU cases run on rank 0 while rank 1 waits on the host.
A bar that takes longer than its limit is killed with its workers, and the next bar starts new ones.

`--csv` puts rows into benchmarks/results/distributed-<gpu>.csv as they come; `distributed.py table` writes them into
docs/distributed.md. LINNET_COMMIT names the commit if the copy
has no git history.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import timing
import torch
import torch.distributed as dist

import linnet.parallel.build
from linnet.evaluate.texts import Document, score_text
from linnet.models import ModelConfig, build_model, empty_model, family
from linnet.models.causal_lm import draw_parts
from linnet.models.costs import flops_causal
from linnet.parallel import mesh as meshes
from linnet.parallel.config import ParallelConfig
from linnet.parallel.mesh import Mesh
from linnet.train import TrainConfig
from linnet.train.costs import GIB, find_gpu, plan_training
from linnet.train.objectives.text import TextObjective
from linnet.train.session import Session

KEYS = ("bar", "case", "model", "devices", "layout", "length", "tokens_per_gpu", "recompute", "compiled")
LIMITS = {"long": 300, "context": 240, "kill": 300, "stop": 300, "memory": 300}  # seconds of a bar; others get LIMIT
LIMIT = 180
DRAWING = 8  # threads that draw the weights of a model


@dataclasses.dataclass
class Sizes:
    """What `--tiny` makes small."""

    width: int = 2048
    layers: int = 24
    inner: int = 5632
    vocabulary: int = 50_304
    scale: int = 1  # divides lengths
    wide: tuple[int, int, int] = (4096, 8, 11_008)  # width, layers, inner of the 7B shapes


TINY = Sizes(64, 2, 128, 512, 1024, (64, 2, 128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bars", nargs="+", choices=["all", "table", *BARS])
    parser.add_argument("--models", nargs="+", help="in place of the models of a bar")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile in all cases (per block on several GPUs)")
    parser.add_argument("--recompute", choices=["none", "selective", "block"], help="in place of that of a bar")
    parser.add_argument("--longest", type=int, default=524_288, help="of `lengths`; half of it on small GPUs")
    parser.add_argument("--fewer", action="store_true", help="every second of `lengths`")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a short case")
    parser.add_argument("--profile", type=Path, help="write the kernels of one step of each case to this file")
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds of each bar, in place of its own limit")
    options = parser.parse_args()
    if "LINNET_BENCHMARK_BARS" in os.environ:
        work(options)
        return
    if options.bars == ["table"]:
        write_table()
        return
    bars = list(BARS) if "all" in options.bars else options.bars
    began = time.perf_counter()
    while bars:
        world = 1 if bars[0] == "one" else 2
        together = [bar for bar in bars if (bar == "one") == (world == 1)]
        alone = [bar for bar in together if bar in ("kill", "stop")]  # they start processes of their own
        group = [bar for bar in together if bar not in alone] or alone
        done = run_group(group, 1 if group == alone else world, options)
        bars = [bar for bar in bars if bar not in done]
    print(f"all: {time.perf_counter() - began:.0f} s", flush=True)


PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"
START, END = "<!-- measured: written by benchmarks/distributed.py table -->\n", "<!-- end of measured -->\n"


def write_table() -> None:
    """Puts the rows of all cards into docs/distributed.md: every bar, then every case."""
    files = sorted(timing.RESULTS.glob("distributed-h*.csv"))
    rows = [row | {"card": row["gpu"].split()[1]} for file in files for row in timing.read(file)]
    lines = ["| card | bar | model | measured | asked | met | commit |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["asked"]:
            met = "yes" if row["met"] == "True" else "**no**"
            name = f"{row['bar']}: {row['case']}"
            cells = (row["card"], name, row["model"], row["value"], row["asked"], met, row["commit"][:7])
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| card | case | model | tokens per row | recompute | ms per step | tokens/s per GPU | GiB | plan |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if row["gb_per_second"]:
            what = f"{row['case']} of 1 GiB, {row['gb_per_second']} GB/s received"
            lines.append(f"| {row['card']} | {what} | | | | {row['step_ms']} | | | |")
        elif row["tokens_per_second_per_gpu"]:
            numbers = (f"{int(row['length']):,}", row["recompute"], row["step_ms"])
            speed = f"{int(row['tokens_per_second_per_gpu']):,}"
            name = f"{row['bar']}: {row['case']}" + (", compiled" if row["compiled"] == "True" else "")
            cells = (row["card"], name, row["model"], *numbers, speed, row["memory_gib"], row["plan_gib"])
            lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines)
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}{text}\n{END}{rest.partition(END)[2]}")
    print(text)


def run_group(bars: list[str], world: int, options: argparse.Namespace) -> list[str]:
    """Starts `world` workers for some bars and watches them. Returns the bars that ended, in whatever way."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        now = Path(folder) / "now"  # the bar that runs, written by rank 0
        now.write_text("start")
        common = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LINNET_BENCHMARK_BARS": " ".join(bars),
            "LINNET_BENCHMARK_NOW": str(now),
            "NCCL_NVLS_ENABLE": "0",  # multicast may be off on a shared host
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        workers = [
            subprocess.Popen(
                [sys.executable, *sys.argv], env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r)}
            )
            for r in range(world)
        ]
        seen, since, failed = "start", time.monotonic(), None
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.2)
            at = now.read_text() or seen
            if at != seen:
                seen, since = at, time.monotonic()
            limit = options.limit or LIMITS.get(seen, LIMIT)
            if time.monotonic() - since > limit:
                failed = f"{seen}: took longer than {limit:.0f} s"
            elif any(worker.poll() for worker in workers):
                time.sleep(3)  # the other rank may print its error
                failed = f"{seen}: a worker ended with {[worker.poll() for worker in workers]}"
            if failed:
                break
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        if failed or seen != "end":
            print(failed or f"{seen}: the workers ended", flush=True)
        if seen == "end":
            return bars
        return bars[: bars.index(seen) + 1] if seen in bars else bars


# In the workers.


def work(options: argparse.Namespace) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    if world > 1:
        meshes.join()
    now = Path(os.environ["LINNET_BENCHMARK_NOW"])
    bench = Bench(options, rank, world)
    for bar in os.environ["LINNET_BENCHMARK_BARS"].split():
        if rank == 0:
            now.write_text(bar)
            print(f"== {bar}", flush=True)
        began = time.perf_counter()
        BARS[bar](bench)
        if rank == 0:
            print(f"   {bar}: {time.perf_counter() - began:.1f} s", flush=True)
    if rank == 0:
        now.write_text("end")
    if dist.is_initialized():
        dist.destroy_process_group()


class Bench:
    """One worker: its models' weights, its meshes, and the table."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int):
        self.options, self.rank, self.world = options, rank, world
        self.sizes = TINY if options.tiny else Sizes()
        self.device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
        self.constants = timing.constants(f"python benchmarks/distributed.py {shlex.join(sys.argv[1:])}")
        self._meshes: dict[str, Mesh] = {}
        self._parts: dict[str, list] = {}
        linnet.parallel.build.draw_parts = self.parts  # drawn once per model, not once per case

    def parts(self, config: ModelConfig, seed: int = 0, threads: int = 1) -> list:
        key = config.model_dump_json()
        if key not in self._parts:
            self._parts = {key: list(draw_parts(config, seed, threads))}  # those of one model at a time
        return self._parts[key]

    def mesh(self, **degrees: int) -> Mesh:
        """The mesh of all ranks with these degrees; made once, since each has communicators of its own."""
        key = json.dumps(degrees)
        if key not in self._meshes:
            self._meshes[key] = Mesh(ParallelConfig(**degrees), self.device)
        return self._meshes[key]

    def model(self, name: str, wide: bool = False) -> ModelConfig:
        width, layers, inner = self.sizes.wide if wide else (self.sizes.width, self.sizes.layers, self.sizes.inner)
        options = {} if not self.options.tiny else {"num_heads": 2}
        return family(name)(width, layers, options.get("num_heads", 0), inner, vocab_size=self.sizes.vocabulary)

    def names(self, *names: str) -> list[str]:
        return self.options.models or list(names)

    def length(self, tokens: int) -> int:
        return max(64, tokens // self.sizes.scale)

    def room(self, tokens: int) -> int:
        """Tokens that fit this GPU, of those that fit 141 GB."""
        small = self.device.type == "cuda" and torch.cuda.get_device_properties(self.device).total_memory < 120 * GIB
        return self.length(tokens // 2 if small else tokens)

    def case(
        self,
        bar: str,
        case: str,
        name: str,
        length: int,
        rows: int = 1,
        *,
        degrees: dict[str, int] | None = None,
        recompute: str = "none",
        wide: bool = False,
        steps: int | None = None,
        around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        predict: bool = True,
        optimizer: str = "adamw",
    ) -> dict | None:
        """Times the steps of one training: on all ranks with `degrees`, else on rank 0 alone. Returns rank 0's row.

        Args:
            length: tokens per row. rows: of all ranks together.
            around: a context around each step, for the peers.
            predict: whether to compare the memory with the plan's.
        """
        options, alone = self.options, degrees is None
        self.free()
        row: dict | None = None
        problem = ""
        if not alone or self.rank == 0:
            config = TrainConfig(
                model=self.model(name, wide),
                seq_len=length,
                batch_size=rows,
                steps=1000,
                precision="bfloat16",
                parallel=degrees or {},
                optimizer={"name": optimizer},
                run={"device": options.device, "recompute": options.recompute or recompute, "compile": options.compile},
            )
            try:
                row = self.measure(config, None if alone else self.mesh(**degrees), steps, around)
            except torch.cuda.OutOfMemoryError as error:
                problem = f"out of memory: {str(error)[:120]}"
            except Exception as error:
                if not alone:  # the other rank may wait in a communication
                    raise
                problem = f"{type(error).__name__}: {str(error)[:300]}"
        if alone and self.rank:
            self.parts(self.model(name, wide), 0, DRAWING)  # for the next case, while rank 0 works
        if self.world > 1:
            dist.barrier(self.mesh().host)
        self.free()
        if self.rank:
            return None
        if row is None:
            print(f"{case:<22}{name:<10}{length:>9}  {problem}", flush=True)
            return None
        devices = 1 if alone else self.world
        row = {
            "bar": bar,
            "case": case,
            "model": name,
            "devices": devices,
            "layout": "one process" if alone else " ".join(f"{k} {v}" for k, v in degrees.items()) or "dp_shard auto",
            "length": length,
            "tokens_per_gpu": rows * length // devices,
            "recompute": config.run.recompute,
            "compiled": options.compile,
            **row,
        }
        row["tokens_per_second_per_gpu"] = round(rows * length / devices / row["step_ms"] * 1e3)
        if predict and options.device == "cuda":
            row["plan_gib"] = round(plan_training(config, devices, find_gpu("h200")).tensors / GIB, 2)
        print(
            f"{case:<22}{name:<10}{length:>9}{row['tokens_per_gpu']:>9}{row['recompute']:>10}{row['first_s']:>8.1f} s"
            f"{row['step_ms']:>10.1f} ms{row['tokens_per_second_per_gpu']:>9,} tokens/s/GPU"
            f"{row['memory_gib']:>8.2f} GiB{'' if 'plan_gib' not in row else '  plan ' + str(row['plan_gib'])}",
            flush=True,
        )
        self.write(row)
        return row

    def measure(self, config: TrainConfig, mesh: Mesh | None, steps: int | None, around: Callable) -> dict:
        began = time.perf_counter()
        session = Session(config, Random(config, self), self.device, mesh)

        def step() -> None:
            with around():
                session.gradients()
            session.apply()

        step()
        self.wait()
        first = time.perf_counter() - began
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if steps != 1:
            step()
        times = self.time_steps(step, steps or (self.options.steps if self.device.type == "cuda" else 2))
        memory = torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else 0.0
        if self.options.profile and self.device.type == "cuda":
            self.profile(config, step)
        session.prefetch.close()
        loss = session.judge()
        if loss is not None:
            raise RuntimeError(f"the loss is not good: {loss}")
        return {
            "first_s": round(first, 1),
            "step_ms": round(statistics.median(times), 2),
            "slowest_ms": round(max(times), 2),
            "steps": len(times),
            "memory_gib": round(memory, 2),
            "loss": round(session.recent[-1], 4),
        }

    def time_steps(self, step: Callable[[], None], count: int) -> list[float]:
        """Returns the milliseconds of steps in a row. The host runs ahead of a GPU, as in `linnet train`."""
        self.wait()
        if self.device.type != "cuda":
            marks = [time.perf_counter() * 1e3]
            for _ in range(count):
                step()
                marks.append(time.perf_counter() * 1e3)
            return [after - before for before, after in zip(marks, marks[1:], strict=False)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False)]

    def profile(self, config: TrainConfig, step: Callable[[], None]) -> None:
        activities = [torch.profiler.ProfilerActivity.CUDA] if self.rank == 0 else []
        with torch.profiler.profile(activities=activities) if activities else contextlib.nullcontext() as record:
            step()  # on every rank of the case
            torch.cuda.synchronize()
        if record is None:
            return
        table = record.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
        self.options.profile.parent.mkdir(parents=True, exist_ok=True)
        with self.options.profile.open("a") as file:
            spans = f"{config.parallel.sp} spans" if config.parallel.sp > 1 else f"{self.world} workers"
            file.write(f"{config.architecture} {config.batch_size} x {config.seq_len}, {spans}\n{table}\n")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        if self.options.compile:
            torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def judge(self, bar: str, case: str, name: str, value: float, wanted: float, at_least: bool = True) -> None:
        """Prints and writes a number beside what is asked."""
        met = value >= wanted if at_least else value <= wanted
        sign = ">=" if at_least else "<="
        print(f"   {case} {name}: {value:.3f}, asked {sign} {wanted}: {'met' if met else 'NOT MET'}", flush=True)
        row = {
            "bar": bar,
            "case": case,
            "model": name,
            "value": round(value, 4),
            "asked": f"{sign} {wanted}",
            "met": met,
        }
        self.write(row)

    def write(self, row: dict) -> None:
        if self.options.csv and self.rank == 0:
            gpu = timing.short_name(self.constants["gpu"]) if "gpu" in self.constants else "cpu"
            timing.update(timing.RESULTS / f"distributed-{gpu}.csv", [row | self.constants], KEYS)


class Random(TextObjective):
    """Random tokens in place of a text; the weights come from the worker's cache."""

    def __init__(self, config: TrainConfig, bench: Bench):
        self.config, self.bench, self.row_length = config, bench, config.seq_len
        self.targets_per_row = config.seq_len

    def build(self, seed: int, device: torch.device | str | None = None) -> torch.nn.Module:
        model = empty_model(self.config.model, device)
        places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, part in self.bench.parts(self.config.model, seed, DRAWING):
                for key, tensor in (*part.named_parameters(prefix=name), *part.named_buffers(prefix=name)):
                    if key in places:
                        places[key].copy_(tensor)
        return model

    def meta(self) -> dict:
        return {}

    def batches(self) -> "RandomBatches":
        return RandomBatches(self.config)


class RandomBatches:
    def __init__(self, config: TrainConfig):
        self.config = config

    def batch(self, step: int, rank: int = 0, world: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        rows, length = self.config.batch_size, self.config.seq_len
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.config.model.vocab_size, (rows, length + 1), generator=drawn)
        mine = tokens[rows * rank // world : rows * (rank + 1) // world]
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


# The bars.


def topology(bench: Bench) -> None:
    """Bytes per second that a rank receives, of 1 GiB in bfloat16."""
    if bench.rank == 0 and bench.device.type == "cuda":
        print(subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout, flush=True)
    group, world = bench.mesh().fsdp.get_group(), bench.world
    size = 2**29 if bench.device.type == "cuda" else 2**16
    whole = torch.zeros(size, dtype=torch.bfloat16, device=bench.device)
    part = torch.zeros(size // world, dtype=torch.bfloat16, device=bench.device)
    share = whole.nbytes * (world - 1) / world
    calls = {
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, part, group=group), share),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole, group=group), share),
        "all-reduce": (lambda: dist.all_reduce(whole, group=group), 2 * share),
    }
    for name, (call, received) in calls.items():
        for _ in range(3):
            call()
        bench.wait()
        began, count = time.perf_counter(), 20 if bench.device.type == "cuda" else 2
        for _ in range(count):
            call()
        bench.wait()
        seconds = (time.perf_counter() - began) / count
        if bench.rank == 0:
            print(f"{name:<16}{received / seconds / 1e9:8.1f} GB/s received", flush=True)
            row = {"bar": "topology", "case": name, "devices": world, "step_ms": round(seconds * 1e3, 3)}
            bench.write(row | {"gb_per_second": round(received / seconds / 1e9, 1)})


def weak(bench: Bench) -> None:
    length = bench.length(4096)
    rows = bench.room(32_768) // length
    for name in bench.names("tnl", "hgrn2"):
        one = bench.case("weak", "one GPU", name, length, rows)
        for what, degrees in (("two GPUs, FSDP2", {}), ("two, reshard false", {"reshard": False})):
            two = bench.case("weak", what, name, length, 2 * rows, degrees=degrees)
            if one and two:
                ratio = two["tokens_per_second_per_gpu"] / one["tokens_per_second_per_gpu"]
                bench.judge("weak", f"per GPU, {what}", name, ratio, 0.97)


def one(bench: Bench) -> None:
    length = bench.length(4096)
    rows = bench.room(32_768) // length
    for name in bench.names("tnl"):
        plain = bench.case("one", "no process group", name, length, rows)
        if not dist.is_initialized():
            os.environ.setdefault("MASTER_PORT", "0")
            store = dist.HashStore()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if bench.device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
            )
        sharded = bench.case("one", "FSDP2 on one rank", name, length, rows, degrees={})
        if plain and sharded:
            bench.judge("one", "time of FSDP2 at N = 1", name, sharded["step_ms"] / plain["step_ms"], 1.02, False)
            if abs(plain["loss"] - sharded["loss"]) > 1e-3:
                print(f"   the losses differ: {plain['loss']}, {sharded['loss']}", flush=True)


def long(bench: Bench) -> None:
    whole = bench.room(524_288)
    for name, wanted in (("tnl", 0.95), ("hgrn2", 0.93), ("lightnet", 0.93)):
        if name not in bench.names("tnl", "hgrn2", "lightnet"):
            continue
        one = bench.case("long", "one GPU, half the row", name, whole // 2, recompute="block", steps=2)
        two = bench.case("long", "two spans", name, whole, degrees={"sp": 2}, recompute="block", steps=2)
        if one and two:
            ratio = two["tokens_per_second_per_gpu"] / one["tokens_per_second_per_gpu"]
            bench.judge("long", "per GPU, 2 spans against 1", name, ratio, wanted)


def ring(bench: Bench) -> None:
    """The peers train spans as rows of their own under FSDP2; what crosses is theirs to pass."""
    half = bench.room(262_144)
    ours = bench.case("ring", "two spans", "tnl", half, degrees={"sp": 2}, recompute="block", steps=2)
    peer = bench.case(
        "ring", "LASP ring in torch", "tnl", half // 2, 2, degrees={}, recompute="block", steps=2,
        around=lambda: lasp_ring(bench.mesh().fsdp.get_group(), bench.rank, bench.world), predict=False,
    )  # fmt: skip
    if ours and peer:
        ratio = ours["tokens_per_second_per_gpu"] / peer["tokens_per_second_per_gpu"]
        bench.judge("ring", "speed against the ring", "tnl", ratio, 1.0)


def context(bench: Bench) -> None:
    if bench.device.type == "cpu":
        if bench.rank == 0:
            print("   torch's context parallel has no kernel for a CPU", flush=True)
        return
    half = bench.room(262_144)
    ours = bench.case("context", "two spans", "tnl", half, degrees={"sp": 2}, recompute="block", steps=2)
    peer = bench.case(
        "context", "torch context parallel", "llama", half // 2, 2, degrees={}, recompute="block", steps=1,
        around=lambda: context_parallel(bench, half // 2), predict=False,
    )  # fmt: skip
    if ours and peer:
        ratio = ours["tokens_per_second_per_gpu"] / peer["tokens_per_second_per_gpu"]
        bench.judge("context", "TNL against LLaMA with context parallel", "tnl", ratio, 1.0)
        ratio = flops_causal(bench.model("llama"), 2**20) / flops_causal(bench.model("llama"), half)
        seconds = peer["step_ms"] / 1e3 * ratio
        print(f"   LLaMA at 1,048,576 tokens, computed: {seconds:.0f} s per step", flush=True)


def lengths(bench: Bench) -> None:
    for name in bench.names("tnl"):
        speeds, length = {}, 32_768
        while bench.length(length) <= bench.room(bench.options.longest):
            steps = 2 if length >= 262_144 else 3
            row = bench.case("lengths", "one row, two spans", name, bench.length(length), degrees={"sp": 2},
                             recompute="block", steps=steps)  # fmt: skip
            if row:
                speeds[length] = row["tokens_per_second_per_gpu"]
            length *= 4 if bench.options.fewer else 2
        if speeds:
            apart = (max(speeds.values()) - min(speeds.values())) / max(speeds.values())
            bench.judge("lengths", f"spread of {len(speeds)} lengths", name, apart, 0.05, False)


def tensor(bench: Bench) -> None:
    length = bench.room(8192)
    for name in bench.names("tnl"):
        one = bench.case("tensor", "one GPU", name, length, 2, wide=True)
        split = bench.case("tensor", "tensor parallel 2", name, length, 2, degrees={"tp": 2}, wide=True)
        bench.case("tensor", "FSDP2, same per GPU", name, length, 4, degrees={}, wide=True)
        if one and split:
            ratio = split["tokens_per_second_per_gpu"] / one["tokens_per_second_per_gpu"]
            bench.judge("tensor", "of linear, tp 2", name, ratio, 0.88)


def muon(bench: Bench) -> None:
    length = bench.length(4096)
    rows = 2 * bench.room(32_768) // length
    for name in bench.names("tnl"):
        times = {
            kind: bench.case("muon", f"two GPUs, {kind}", name, length, rows, degrees={}, optimizer=kind)
            for kind in ("adamw", "muon")
        }
        if all(times.values()) and bench.rank == 0:
            print(f"   muon {name}: {times['muon']['step_ms'] / times['adamw']['step_ms']:.3f} times a step of AdamW")


def memory(bench: Bench) -> None:
    length = bench.length(4096)
    rows = bench.room(16_384) // length
    for name in bench.names("tnl", "hgrn2", "llama", "lightnet"):
        for degrees, recompute, count in ((None, "none", rows), ({}, "none", 2 * rows), ({}, "block", 8 * rows)):
            row = bench.case("memory", "two GPUs" if degrees is not None else "one GPU", name, length, count,
                             degrees=degrees, recompute=recompute, steps=1)  # fmt: skip
            if row and "plan_gib" in row:
                apart = abs(row["plan_gib"] / row["memory_gib"] - 1)
                bench.judge("memory", f"plan, {row['devices']} GPU, {recompute}", name, apart, 0.1, False)


def save(bench: Bench) -> None:
    from linnet.runs.saver import Saver

    length = bench.length(4096)
    rows = 2 * bench.room(32_768) // length
    config = TrainConfig(
        model=bench.model("tnl"), seq_len=length, batch_size=rows, steps=1000, precision="bfloat16",
        run={"device": bench.options.device, "compile": bench.options.compile},
    )  # fmt: skip
    bench.free()
    mesh = bench.mesh()
    folder = mesh.on_main(lambda: tempfile.mkdtemp(prefix="linnet-save-"))

    session = Session(config, Random(config, bench), bench.device, mesh)

    def step() -> float:
        began = time.perf_counter()
        session.gradients()
        session.apply()
        bench.wait()
        return (time.perf_counter() - began) * 1e3

    saver = Saver(Path(folder), keep=1, mesh=mesh, background=True)
    for _ in range(3):
        step()
    tensors, meta = session.state()
    saver.save(1, tensors, meta)  # pins the host's memory, once
    saver.wait()
    before = [step() for _ in range(8)]
    began = time.perf_counter()
    tensors, meta = session.state()
    saver.save(2, tensors, meta)
    blocked = time.perf_counter() - began
    during = []
    for _ in range(200):
        during.append(step())
        writing = torch.tensor(float(any(thread.name == "linnet-checkpoint" for thread in threading.enumerate())))
        dist.all_reduce(writing, group=mesh.host)
        if not writing:
            break
    seconds = time.perf_counter() - began
    saver.wait()
    session.prefetch.close()
    del tensors
    if bench.rank == 0:
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        subprocess.run(["rm", "-rf", folder], check=False)
        median, slowed = statistics.median(before), statistics.median(during)
        print(
            f"median step {median:.1f} ms; save of {size / 1e9:.1f} GB: blocked {blocked * 1e3:.0f} ms, written after "
            f"{seconds:.1f} s, {len(during)} steps meanwhile of {slowed:.1f} ms (slowest {max(during):.1f})",
            flush=True,
        )
        row = {"bar": "save", "case": "background save", "model": "tnl", "devices": bench.world}
        row |= {"step_ms": round(median, 2), "during_ms": round(slowed, 2), "slowest_ms": round(max(during), 2)}
        row |= {"blocked_ms": round(blocked * 1e3, 1), "seconds": round(seconds, 2), "gigabytes": round(size / 1e9, 2)}
        bench.write(row)
        bench.judge("save", "steps during a save", "tnl", slowed / median, 1.02, False)
        every = 1000 * median / 1e3
        bench.judge("save", "share of 1000 steps that waits", "tnl", blocked / every, 0.02, False)


def evaluate(bench: Bench) -> None:
    """Scores the same documents on one GPU and divided among all, with equal results."""
    length = bench.length(32_768)
    draw = np.random.default_rng(0)
    texts = [draw.integers(bench.sizes.vocabulary, size=length + 1) for _ in range(32)]
    documents = [Document(str(number), tokens, length, length) for number, tokens in enumerate(texts)]
    for name in bench.names("tnl"):
        model = build_model(bench.model(name), seed=0).to(bench.device)
        times: dict[int, list[float]] = {1: [], bench.world: []}
        losses = {}
        for part in (documents[:2], *[documents] * 3):  # the first compiles; then both in turns
            for devices in times:
                mesh = bench.mesh() if devices > 1 else None
                with meshes.dividing(mesh), torch.autocast(bench.device.type, torch.bfloat16):
                    bench.mesh().barrier()
                    began = time.perf_counter()
                    if mesh is not None or bench.rank == 0:
                        losses[devices] = score_text(model, part).loss
                    bench.mesh().barrier()
                    times[devices].append(time.perf_counter() - began)
        rates = {devices: len(documents) * length / statistics.median(each[1:]) for devices, each in times.items()}
        for devices, rate in rates.items():
            row = {"bar": "evaluate", "case": f"{devices} devices", "model": name, "devices": devices}
            row |= {"length": length, "tokens_per_second": round(rate)}
            if bench.rank == 0:
                print(f"{row['case']}: {rate:,.0f} tokens/s, loss {losses[devices]!r}", flush=True)
                bench.write(row)
        if bench.rank == 0:
            if losses[1] != losses[bench.world]:
                raise RuntimeError(f"the losses differ: {losses}")
            bench.judge("evaluate", "tokens/s against one", name, rates[bench.world] / rates[1], 1.9)
        del model
        bench.free()


def kill(bench: Bench) -> None:
    """Kills rank 1 of a real training after its checkpoint, and waits for the next row of the record."""
    with training(bench) as (folder, process):
        victims = ranks_of(folder, 1)
        if not victims:
            raise RuntimeError("no process of rank 1 was found")
        before = last_step(folder)
        os.kill(victims[0], signal.SIGKILL)
        killed = time.perf_counter()
        after = wait_for_step(folder, process, 1, restarted=before, pid=victims[0])
        seconds = time.perf_counter() - killed
        print(f"killed after step {before}; step {after} came {seconds:.1f} s later", flush=True)
        bench.judge("kill", "seconds to the next step", "tnl", seconds, 60.0, False)


def stop(bench: Bench) -> None:
    """Sends SIGTERM to rank 1 alone, and waits until all processes have saved and ended."""
    with training(bench) as (folder, process):
        os.kill(ranks_of(folder, 1)[0], signal.SIGTERM)
        began = time.perf_counter()
        process.wait(200)
        seconds = time.perf_counter() - began
        saved = max(int(p.name.removeprefix("step-")) for p in Path(folder).glob("runs/*/checkpoints/step-*"))
        print(f"ended with {process.returncode}; saved step {saved} of {last_step(folder)}", flush=True)
        if saved != last_step(folder) or ranks_of(folder, 0) or ranks_of(folder, 1):
            raise RuntimeError("the checkpoint is not that of the last step, or a process is left")
        bench.judge("stop", "seconds from SIGTERM to the end", "tnl", seconds, 60.0, False)


@contextlib.contextmanager
def training(bench: Bench) -> Iterator[tuple[str, subprocess.Popen]]:
    """A real `linnet train --devices 2` that has saved a checkpoint: its folder and the process that started it."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        length = bench.length(4096)
        text.write_text("".join(f"{n * 7919 % 104_729} " for n in range(max(200_000, 60 * length))))
        config = {
            "name": "killed",
            "model": bench.model("tnl").model_dump(mode="json", exclude_unset=True),
            "data": {"source": str(text), "tokenizer": {"kind": "byte"}},
            "seq_len": length,
            "batch_size": 2 * bench.length(8192) // length,
            "steps": 400,
            "precision": "bfloat16",
            "evaluate_tokens": length,
            "run": {"device": bench.options.device, "log_every": 1, "checkpoint_every": 8},
        }  # fmt: skip
        config["model"]["vocab_size"] = bench.sizes.vocabulary
        file = Path(folder) / "run.json"
        file.write_text(json.dumps(config))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LINNET_BENCHMARK", "MASTER_"))}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "linnet", "train", str(file), "--devices", "2", "--out", f"{folder}/runs"]
        log = (Path(folder) / "log").open("w")
        began = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            first = wait_for_step(folder, process, 1)
            started = time.perf_counter() - began
            print(f"first step after {started:.1f} s (corpus prepared, weights drawn)", flush=True)
            wait_for_step(folder, process, first + 10, checkpoint=True)
            yield folder, process
        except Exception:
            print((Path(folder) / "log").read_text()[-3000:], flush=True)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for pid in [*ranks_of(folder, 0), *ranks_of(folder, 1)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def last_step(folder: str) -> int:
    """The last step in the record, 0 without one."""
    steps = [0]
    for file in Path(folder).glob("runs/*/metrics.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                steps.append(json.loads(line).get("step", 0))
    return steps[-1]


def wait_for_step(folder, process, step, checkpoint=False, restarted=None, pid=0) -> int:
    """Waits until the record has a step, with `checkpoint` also a checkpoint, with `restarted` one of a new rank 1."""
    for _ in range(5 * 280):
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with {process.returncode}")
        now = last_step(folder)
        if restarted is not None:
            again = [other for other in ranks_of(folder, 1) if other != pid]
            # The record goes back to the checkpoint, so a new step is one whose row is younger than the new process.
            if again and any(
                file.stat().st_mtime > os.stat(f"/proc/{again[0]}").st_ctime and not _truncated(file, restarted)
                for file in Path(folder).glob("runs/*/metrics.jsonl")
            ):
                return now
        elif now >= step and (not checkpoint or list(Path(folder).glob("runs/*/checkpoints/step-*"))):
            return now
        time.sleep(0.2)
    raise RuntimeError("waited too long")


def _truncated(file: Path, before: int) -> bool:
    """Whether the record still ends at the checkpoint: no row has come after it."""
    checkpoints = sorted(
        int(p.name.removeprefix("step-")) for p in file.parent.glob("checkpoints/step-*") if p.is_dir()
    )
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    steps = [row["step"] for row in rows if "loss" in row]
    return not steps or not checkpoints or steps[-1] <= checkpoints[-1]


def ranks_of(folder: str, rank: int) -> list[int]:
    """Processes of `linnet train` in this folder with a rank, by their environment. Linux only."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_bytes().split(b"\0")
            command = (path / "cmdline").read_bytes()
            if f"RANK={rank}".encode() in environment and folder.encode() in command:
                found.append(int(path.name))
    return found


# Peers.


@contextlib.contextmanager
def lasp_ring(group: dist.ProcessGroup, rank: int, world: int) -> Iterator[None]:
    """Makes TNL pass its states around a ring, as LASP (arXiv:2404.02882) does: the same kernel for the span, the state
    of the span by one product, and one send and receive of float32 states per layer and direction."""
    import linnet.layers.mixers.linear.tnl as tnl

    plain = tnl.lightning_attention

    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx, own, decay):
            ctx.save_for_backward(decay)
            entering = torch.zeros_like(own)
            if rank > 0:
                dist.recv(entering, group_src=rank - 1, group=group)
            if rank + 1 < world:
                dist.send((decay * entering + own).contiguous(), group_dst=rank + 1, group=group)
            return entering

        @staticmethod
        def backward(ctx, gradient):
            (decay,) = ctx.saved_tensors
            leaving = torch.zeros_like(gradient)
            if rank + 1 < world:
                dist.recv(leaving, group_src=rank + 1, group=group)
            if rank > 0:
                dist.send((gradient + decay * leaving).contiguous(), group_dst=rank - 1, group=group)
            return leaving, None

    def attend(q, k, v, *, log_decay=None, initial_state=None, output_final_state=False, cu_seqlens=None):
        left = torch.arange(k.shape[1] - 1, -1, -1, device=k.device, dtype=torch.float32)
        weights = torch.exp(log_decay[None, :] * left[:, None])[None, :, :, None].to(k.dtype)
        own = torch.einsum("bthk,bthv->bhkv", k * weights, v).float()
        entering = Pass.apply(own, torch.exp(log_decay * k.shape[1])[None, :, None, None])
        return plain(q, k, v, log_decay=log_decay, initial_state=entering)

    tnl.lightning_attention = attend
    try:
        yield
    finally:
        tnl.lightning_attention = plain


@contextlib.contextmanager
def context_parallel(bench: Bench, length: int) -> Iterator[None]:
    """torch's context parallel around attention: a ring of SDPA, balanced by giving each rank a head and a tail."""
    from torch.distributed.tensor import experimental
    from torch.nn.attention import SDPBackend, sdpa_kernel

    positions = torch.arange(2 * length, device=bench.device)
    mesh = bench.mesh().fsdp
    with (
        sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]),
        experimental.context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]),
    ):
        yield


BARS = {
    "topology": topology,
    "weak": weak,
    "memory": memory,
    "long": long,
    "lengths": lengths,
    "tensor": tensor,
    "save": save,
    "ring": ring,
    "context": context,
    "one": one,
    "muon": muon,
    "evaluate": evaluate,
    "kill": kill,
    "stop": stop,
}

if __name__ == "__main__":
    main()
