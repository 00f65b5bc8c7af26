"""Memory, traffic and time of a training on any number of GPUs, computed before it starts. Needs no GPU.

Memory is the largest of the moments of a step: the loss, where most activations exist; the backward of each
block; the end of the backward, where all gradients exist. Activations are counted (`footprint.py`), the rest
is arithmetic over the parameters and what FSDP2 gathers. Traffic counts the bytes that a GPU receives, as ring
algorithms move them. Time is the FLOPs at a speed that was measured, and the communication that they cannot hide.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from linnet.config import ConfigError
from linnet.layers.ring import passes_states
from linnet.models.costs import flops_causal, flops_exact, meta_model
from linnet.ops.cross_entropy import FEW_LOGITS
from linnet.ops.cross_entropy.chunked import BLOCK_LOGITS
from linnet.ops.sequence import MOST_GATHERED
from linnet.parallel.config import Degrees, ParallelConfig
from linnet.train.config import TrainConfig
from linnet.train.costs.footprint import block_footprints
from linnet.train.optimizer import split

GIB = 2**30
OUTSIDE = 1.0  # GiB of the CUDA context and of kernels, outside PyTorch's allocator
NCCL = 1.0  # GiB of buffers of NCCL and of pieces that the allocator cannot join, with several GPUs
RECOMPUTED = {"none": 0.0, "selective": 0.05, "block": 1.0}  # share of the blocks' forward that is computed twice
SUMMARIES = 0.01  # share of the compute that sequence parallelism adds: local states before the true initial state


@dataclass(frozen=True)
class Gpu:
    """What the arithmetic needs to know of a GPU and its connections.

    Attributes:
        memory: GiB that a process can allocate.
        speed: TFLOP/s that the training of a large model reaches in bfloat16.
        link: GB/s that a GPU receives inside its machine (NVLink), in an all-gather.
        network: GB/s that a GPU receives from other machines.
    """

    name: str
    memory: float
    speed: float
    link: float
    network: float = 45.0  # one port of 400 Gbit/s per GPU


# Speed and link of an H200 are measured (docs/distributed.md). Those of the others follow: the same share of the peak
# in the data sheet (dense bfloat16, 989 TFLOP/s of an H200; NVIDIA DGX B200 and GB200 NVL72, AMD Instinct MI300X, RTX
# Blackwell and Ada architecture), and the same share of the bandwidth: 900 GB/s of its NVLink, 1,800 of Blackwell's,
# 896 of MI300X's seven links, 128 and 64 of PCI Express 5 and 4 with 16 lanes, both directions.
GPUS = {
    "h200": Gpu("h200", 139.0, 450.0, 257.0),
    "h100": Gpu("h100", 79.0, 450.0, 257.0),
    "a100": Gpu("a100", 79.0, 142.0, 171.0),
    "a100-40": Gpu("a100-40", 39.0, 142.0, 171.0),
    "gb200": Gpu("gb200", 184.0, 1137.0, 514.0),
    "b200": Gpu("b200", 178.0, 1023.0, 514.0),
    "mi300x": Gpu("mi300x", 191.0, 595.0, 256.0),
    "rtx5090": Gpu("rtx5090", 31.0, 95.0, 37.0, 37.0),
    "rtx4090": Gpu("rtx4090", 23.5, 75.0, 18.0, 18.0),
}


@dataclass(frozen=True)
class Transfer:
    """One kind of communication.

    Attributes:
        received: bytes that one GPU receives in a step. seconds: at the bandwidth of its group.
        hidden: whether it runs beside the compute.
    """

    name: str
    received: float
    seconds: float
    hidden: bool


@dataclass(frozen=True)
class Plan:
    """The predicted costs of one training.

    Attributes:
        memory: part -> bytes on one GPU at the moment of the peak.
        moment: what happens then.
        rows: rows of one GPU in one part of the batch.
        tokens_per_step, transfers, compute_seconds: of a step with a whole batch.
        step_seconds: of one such optimizer step. batches: whole batches of the training; fewer than its steps if the
            batch grows.
        hidden_share: share of `step_seconds` that computes.
    """

    gpu: Gpu
    devices: int
    degrees: Degrees
    parameters: int
    rows: int
    parts: int
    recompute: str
    memory: dict[str, float]
    moment: str
    transfers: tuple[Transfer, ...]
    compute_seconds: float
    step_seconds: float
    tokens_per_step: int
    steps: int
    batches: float

    @property
    def tensors(self) -> float:
        """Bytes of tensors at the peak, as `torch.cuda.max_memory_allocated` counts them."""
        return sum(size for name, size in self.memory.items() if name != OUTSIDE_TENSORS)

    @property
    def total(self) -> float:
        """Bytes of a GPU's memory at the peak."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.gpu.memory * GIB

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain values for JSON; bytes and seconds."""
        tokens = self.tokens_per_step / self.step_seconds
        return {
            "gpu": asdict(self.gpu),
            "devices": self.devices,
            "degrees": asdict(self.degrees),
            "parameters": self.parameters,
            "rows_per_part": self.rows,
            "parts": self.parts,
            "recompute": self.recompute,
            "fits": self.fits,
            "memory_bytes": {**self.memory, "total": self.total},
            "peak_moment": self.moment,
            "transfers": [asdict(transfer) for transfer in self.transfers],
            "compute_seconds": self.compute_seconds,
            "step_seconds": self.step_seconds,
            "tokens_per_second": tokens,
            "tokens_per_second_per_gpu": tokens / self.devices,
            "efficiency": self.compute_seconds / self.step_seconds,
            "seconds": self.step_seconds * self.batches,
        }


OUTSIDE_TENSORS = "outside tensors"


def find_gpu(text: str = "auto", memory: float | None = None) -> Gpu:
    """Returns a GPU by name, with other numbers if given: `h200`, or `h200,speed=520,network=25`.

    Args:
        text: a name of `GPUS`, or `auto`: the visible GPU, or an H200 if none is visible. Then numbers of `Gpu`.
        memory: GiB in place of the known number.

    Raises:
        ConfigError: an unknown name or key, or not a number above 0.
    """
    name, *settings = text.split(",")
    name = re.sub(r"(rtx|geforce)[ -]*", lambda word: word[1].replace("geforce", ""), name.strip().lower())
    numbers: dict[str, Any] = {"memory": memory} if memory else {}
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            numbers[key] = float(value)
        except ValueError:
            numbers[key] = 0.0
        if key not in ("memory", "speed", "link", "network") or not 0 < numbers[key] < math.inf:
            problem = f"--gpu: {setting!r} is not understood; use memory=GIB, speed=TFLOPS, link=GB/S or network=GB/S"
            raise ConfigError([problem], "command line")
    if name not in (*GPUS, "auto"):
        raise ConfigError([f"--gpu: {name!r} is unknown; use {', '.join(GPUS)} or auto"], "command line")
    if name == "auto" and torch.cuda.is_available():
        visible = torch.cuda.get_device_name().lower()
        name = next((known for known in GPUS if known in visible.replace(" ", "")), "h200")
        whole = torch.cuda.get_device_properties(0).total_memory / GIB
        shown = name if name in visible.replace(" ", "") else f"{visible}, counted as {name},"
        numbers, found = {"memory": whole} | numbers, replace(GPUS[name], name=shown)
    else:
        found = GPUS["h200" if name == "auto" else name]
    return replace(found, **numbers)


def plan(config: TrainConfig, devices: int, gpu: Gpu, per_machine: int = 8) -> Plan:
    """Returns the predicted costs of a training on a number of GPUs, whether it fits or not.

    Raises:
        ConfigError: the configuration does not run on so many devices, with every problem and its fix.
    """
    parallel = config.parallel
    if problems := _problems(config, parallel, devices):
        raise ConfigError(problems, "plan")
    return _plan(config, parallel, devices, gpu, per_machine)


def _problems(config: TrainConfig, parallel: ParallelConfig, devices: int) -> list[str]:
    problems = parallel.problems(devices, config.model, config.seq_len, config.batch_size, config.accumulation)
    return problems or config.ramp_problems(parallel, devices)


def _plan(config: TrainConfig, parallel: ParallelConfig, devices: int, gpu: Gpu, per_machine: int) -> Plan:
    degrees = parallel.degrees(devices)
    parts = parallel.accumulation or config.accumulation
    rows = -(-config.batch_size // (degrees.dp * parts))
    memory, moment = _memory(config, parallel, degrees, rows, parts)
    tokens = config.batch_size * config.seq_len
    compute = _flops(config) / (gpu.speed * 1e12) / devices * (1 + SUMMARIES * (degrees.sp > 1))
    transfers = _transfers(config, parallel, degrees, rows, parts, gpu, per_machine)
    hidden = sum(t.seconds for t in transfers if t.hidden)
    layers = config.model.num_layers
    # The first block's weights and the last block's gradients have no compute beside them.
    exposed = sum(t.seconds for t in transfers if not t.hidden) + hidden / (parts * layers)
    return Plan(
        gpu,
        devices,
        degrees,
        sum(p.numel() for p in meta_model(config.model.model_dump_json()).parameters()),
        rows,
        parts,
        config.run.recompute,
        memory,
        moment,
        transfers,
        compute,
        max(compute, hidden) + exposed,
        tokens,
        config.total_steps,
        config.batch_sizes.first(config.total_steps) / config.batch_size,
    )


def _flops(config: TrainConfig) -> float:
    """Returns the FLOPs of one step, with what is computed twice."""
    whole = flops_causal(config.model, config.seq_len, config.batch_size)
    forward = flops_exact(config.model, config.seq_len, config.batch_size, training=False)
    head = config.batch_size * 2.0 * config.seq_len * config.model.d_model * config.model.vocab_size
    return whole + RECOMPUTED[config.run.recompute] * (forward - head)


@dataclass(frozen=True)
class _Sizes:
    """Numbers of parameters on one tensor-parallel rank."""

    blocks: tuple[int, ...]  # gathered block by block
    root: int  # gathered once: embedding, head and all parameters of blocks except weights of linear layers
    embedding: int  # of them, rows of the vocabulary: one matrix
    matrices: int  # hidden matrices, which Muon steps

    @property
    def all(self) -> int:
        return sum(self.blocks) + self.root


def _sizes(config: TrainConfig, tp: int) -> _Sizes:
    model = meta_model(config.model.model_dump_json())
    blocks = []
    for block in model.backbone.blocks:
        linear = [m for m in block.modules() if isinstance(m, nn.Linear)]
        blocks.append(sum(p.numel() for m in linear for p in m.parameters()) // tp)
    whole = sum(p.numel() for p in model.parameters())
    embedding = model.embedding.weight.numel() // tp
    root = (whole - sum(blocks) * tp) // tp
    matrices = sum(p.numel() for p in split(model)[0]) // tp
    return _Sizes(tuple(blocks), root, embedding, matrices)


def _memory(
    config: TrainConfig, parallel: ParallelConfig, degrees: Degrees, rows: int, parts: int
) -> tuple[dict[str, float], str]:
    """Returns the parts of the memory at the peak, and the moment of the peak."""
    sizes = _sizes(config, degrees.tp)
    low = 2 if config.precision == "bfloat16" else 4
    shards = degrees.dp_shard * degrees.sp
    sharded = degrees.world > 1  # one process does not use FSDP
    span, width = config.seq_len // degrees.sp, config.model.d_model
    mode = config.run.recompute
    # Keeping some results of a block takes a dispatch mode, in which norms and gates are not single kernels.
    fused = mode != "selective"
    prints = block_footprints(config.model.model_dump_json(), span, mode, low == 2, fused)
    tokens = rows * span
    whole = {"none": 12, "selective": 12, "block": 4}[mode] * span * width  # not divided by tp

    def divided(size: float, at_full_width: float) -> float:
        return rows * (size if degrees.tp == 1 else at_full_width + max(0.0, size - at_full_width) / degrees.tp)

    saved = [divided(p.saved, whole) for p in prints]
    backward = [divided(p.backward, whole + 8 * span * width) for p in prints]
    stream = 4.0 * tokens * width

    hidden = sizes.matrices if config.optimizer.name == "muon" else 0
    static = {
        "weights": 4.0 * sizes.all / shards,
        "optimizer": (8.0 * (sizes.all - hidden) + 4.0 * hidden) / shards,
    }
    if sharded:
        static["gathered weights outside blocks"] = 4.0 * sizes.root
    largest = max(sizes.blocks, default=0)
    in_flight = {
        # Two blocks' weights in the forward. In the backward three, a block's gradients, and two buffers of float32
        # that are being reduced.
        "forward": 2.0 * low * largest if sharded else 0.0,
        "backward": (3.0 * low + low + 8.0) * largest if sharded else 0.0,
    }
    if sharded and (not parallel.reshard or shards == 1):
        in_flight = {moment: size + low * sum(sizes.blocks) for moment, size in in_flight.items()}
    # Without FSDP, autocast keeps the weights that it has cast until the backward has used them.
    casts = [p.weights / degrees.tp if not sharded else 0.0 for p in prints]
    kept_casts = casts if config.run.recompute != "block" else [0.0] * len(casts)

    def gradients(done: int, root: bool) -> dict[str, float]:
        """Gradients when the backward of the last `done` blocks has ended; with parts, those of the part before."""
        per_block = list(reversed(sizes.blocks))[: len(sizes.blocks) if parts > 1 else done]
        inside, outside = 4.0 * sum(per_block) / shards, 4.0 * sizes.root
        if not parallel.sync_parts and parts > 1:
            return {"gradients": 4.0 * sum(sizes.blocks) + outside}
        whole_root = outside if root else 0.0  # FSDP reduces it at the end
        return {"gradients": inside + whole_root + (outside / shards if parts > 1 and sharded else 0.0)}

    vocabulary = config.model.vocab_size // degrees.tp
    if tokens * config.model.vocab_size <= FEW_LOGITS:
        logits = tokens * vocabulary * (low + 8.0)
    else:
        block = min(tokens, max(1, BLOCK_LOGITS // vocabulary))
        logits = block * vocabulary * float(low) + low * sizes.embedding
    matrix = 4.0 * sizes.embedding
    head = 4.0 * tokens * width  # the output of the last norm and its gradient, in bfloat16
    moments: dict[str, dict[str, float]] = {
        "the loss": {
            **static,
            **gradients(0, root=False),
            "blocks in flight": in_flight["forward"],
            "activations": stream + sum(saved) + head + sum(casts),
            "cross-entropy": logits + matrix,
        },
        "the end of the backward": {
            **static,
            **gradients(len(prints), root=True),
            "blocks in flight": in_flight["backward"],
            "activations": 2 * stream,
            "cross-entropy": matrix,
        },
    }
    for index in range(len(prints)):
        moments[f"the backward of block {index}"] = {
            **static,
            **gradients(len(prints) - index - 1, root=True),
            "blocks in flight": in_flight["backward"],
            "activations": stream + sum(saved[:index]) + backward[index] + sum(kept_casts[: index + 1]),
        }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    outside = OUTSIDE + (NCCL if sharded else 0.0)
    found = {name: size for name, size in moments[moment].items() if size}
    return {**found, OUTSIDE_TENSORS: outside * GIB}, moment


def _transfers(
    config: TrainConfig,
    parallel: ParallelConfig,
    degrees: Degrees,
    rows: int,
    parts: int,
    gpu: Gpu,
    per_machine: int,
) -> tuple[Transfer, ...]:
    sizes = _sizes(config, degrees.tp)
    low = 2 if config.precision == "bfloat16" else 4
    span, width = config.seq_len // degrees.sp, config.model.d_model
    found: list[Transfer] = []

    def add(name: str, received: float, extent: int, hidden: bool) -> None:
        """`extent`: how many ranks apart the farthest members of the group are."""
        if received:
            bandwidth = gpu.link if extent <= per_machine else gpu.network
            found.append(Transfer(name, received, received / (bandwidth * 1e9), hidden))

    shards = degrees.dp_shard * degrees.sp
    share, extent = (shards - 1) / shards, shards * degrees.tp
    inside = sum(sizes.blocks)
    again = 2 if parallel.reshard else 1
    reduced = parts if parallel.sync_parts else 1
    add("all-gather of weights", share * parts * (again * low * inside + 4.0 * sizes.root), extent, hidden=True)
    add("reduce-scatter of gradients", share * 4.0 * (reduced * inside + reduced * sizes.root), extent, hidden=True)
    copies = degrees.dp_replicate
    add(
        "all-reduce of gradients over copies",
        2 * (copies - 1) / copies * 4.0 * sizes.all / shards,
        degrees.world if copies > 1 else 1,
        hidden=True,
    )
    passes = 3 if config.run.recompute == "none" else 4  # an exchange is kept, an all-reduce inside a block is repeated
    if degrees.tp > 1:
        ring = 2 * (degrees.tp - 1) / degrees.tp
        each = rows * span * width * float(low)
        blocks = len(sizes.blocks)
        # Two sums per block and direction. Recomputed blocks sum again.
        sums = 4 if passes == 3 or config.run.recompute == "selective" else 6
        add("all-reduce of activations (tp)", ring * sums * parts * blocks * each, degrees.tp, hidden=False)
    if degrees.sp > 1:
        states, exchanged = 0.0, 0.0
        blocks = meta_model(config.model.model_dump_json()).backbone.blocks
        for mixer in (part for block in blocks if block.mixer is not None for part in block.mixer.parts()):
            softmax = mixer.name in ("attention", "mla")
            specs = mixer.state_spec(1, span)
            if softmax and any(getattr(mixer.config, key, 0) for key in ("window", "block")):
                # The last keys and values of the span before, and their gradients.
                states += 2 * low * rows * (math.prod(specs["k"].shape) + math.prod(specs["v"].shape))
            elif softmax:
                exchanged += 4 * 2 * low * rows * span * width * (degrees.sp - 1) / degrees.sp
            else:
                numbers = sum(spec.size for spec in specs.values())
                rounds = degrees.sp - 1 if degrees.sp <= MOST_GATHERED else math.ceil(math.log2(degrees.sp))
                if passes_states(mixer, parallel.sequence_method):
                    rounds = 1
                elif mixer.mixes_state:
                    numbers += sum(spec.size // spec.shape[-1] * spec.shape[-2] for spec in specs.values())
                states += 2 * 4.0 * numbers * rows * rounds
        extent = degrees.sp * degrees.tp
        add("states between spans (sp)", parts * states, extent, hidden=False)
        add("all-to-all of attention (sp)", parts * exchanged, extent, hidden=False)
    return tuple(found)


def fixes(config: TrainConfig, devices: int, gpu: Gpu, per_machine: int = 8) -> list[str]:
    """Returns changes of which each alone makes a training fit, the cheapest first."""
    found = []

    def fits(changed: TrainConfig, parallel: ParallelConfig, count: int) -> bool:
        if _problems(changed, parallel, count):
            return False
        return _plan(changed, parallel, count, gpu, per_machine).fits

    def recomputing(mode: str) -> TrainConfig:
        return config.model_copy(update={"run": config.run.model_copy(update={"recompute": mode})})

    def fewest_parts(changed: TrainConfig) -> int | None:
        doubled = (config.accumulation * 2**n for n in range(1, 40))
        counts = (parts for parts in doubled if parts <= config.batch_size)
        in_parts = (config.parallel.model_copy(update={"accumulation": parts}) for parts in counts)
        return next((one.accumulation for one in in_parts if fits(changed, one, devices)), None)

    block = recomputing("block")
    if parts := fewest_parts(config):
        found.append(f"parallel.accumulation={parts}")
    modes = ["none", "selective", "block"]
    stronger = modes[modes.index(config.run.recompute) + 1 :]
    if mode := next((mode for mode in stronger if fits(recomputing(mode), config.parallel, devices)), None):
        found.append(f"run.recompute={mode}")
    if not found and stronger and (parts := fewest_parts(block)):
        found.append(f"run.recompute=block with parallel.accumulation={parts}")
    fixed = config.parallel.model_copy(update={"dp_shard": "auto"})
    for count in (devices * 2**n for n in range(1, 11)):
        if fits(config, fixed, count):
            found.append(f"--devices {count}")
            break
    for sp in (2**n for n in range(1, 11)):
        spans = fixed.model_copy(update={"sp": config.parallel.sp * sp})
        if not found and fits(block, spans, devices * sp):
            found.append(f"--devices {devices * sp} with parallel.sp={spans.sp} and run.recompute=block")
    if not found:
        for length in (config.seq_len // 2**n for n in range(1, 12)):
            shorter = block.model_copy(update={"seq_len": length})
            if length and fits(shorter, config.parallel, devices):
                found.append(f"seq_len={length} with run.recompute=block")
                break
    return found


def refuse(found: Plan, config: TrainConfig, per_machine: int = 8) -> None:
    """Raises ConfigError with what would fit if a plan does not."""
    if found.fits:
        return
    options = fixes(config, found.devices, found.gpu, per_machine)
    advice = f"use {', or '.join(options)}" if options else "use a smaller model"
    problem = (
        f"memory: {found.total / GIB:.1f} GiB per GPU do not fit into the {found.gpu.memory:.0f} GiB of "
        f"{found.gpu.name}; {advice}"
    )
    raise ConfigError([problem], "plan")
