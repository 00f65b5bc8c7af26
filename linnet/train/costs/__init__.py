"""What a training takes, before it starts: FLOPs, time, the memory of a step, and the data that it needs."""

import contextlib
import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from linnet.config import ConfigError
from linnet.layers.ring import passes_states
from linnet.models.causal_lm import empty_model
from linnet.models.config import ModelConfig
from linnet.models.costs import flops_causal, flops_exact, meta_model
from linnet.ops import activation, backend, norm, rotation
from linnet.ops.compat_torch import FakeTensor, FakeTensorMode, TorchDispatchMode, quiet_fakes, tree_iter
from linnet.ops.cross_entropy import FEW_LOGITS
from linnet.ops.cross_entropy.chunked import BLOCK_LOGITS
from linnet.ops.sequence import MOST_GATHERED
from linnet.parallel.config import Degrees, ParallelConfig
from linnet.train import recompute
from linnet.train.config import TrainConfig
from linnet.train.evaluation import collected
from linnet.train.optimizer import split

# Bytes that the blocks of a model hold while they train, counted without a GPU and without memory.
#
# Every kind of block runs forward and backward on fake tensors, which have shapes and no data. A dispatch mode watches
# their storages come and go. On a GPU in eager mode some functions are one kernel, which keeps less for the backward
# than the composition that fake tensors get: stand-ins with the outputs and the saved tensors of these kernels take
# its place. `tests/train/test_plan.py` holds the sums against peaks that were measured on an H200.


@dataclass(frozen=True)
class Footprint:
    """What one block holds for one row of tokens, in bytes.

    Attributes:
        saved: kept from the forward to the backward, the output of the block included, its input not.
        forward: most that exists during the forward, on top of its input.
        backward: most that exists during the backward, on top of its input: `saved`, gradients of activations, and
            with recomputation what it computes again.
        weights: of the block's parameters in the products' dtype, kept as long as autocast is on. Not per row.
    """

    saved: float
    forward: float
    backward: float
    weights: float


@lru_cache(maxsize=256)
def block_footprints(
    config_json: str, length: int, mode: recompute.Recompute, low_precision: bool, fused: bool
) -> tuple[Footprint, ...]:
    """Returns the footprint of each block of a model for one row of `length` tokens. Equal blocks are counted once.

    Args:
        config_json: the JSON of a ModelConfig.
        mode: recomputation: none, selective or block.
        low_precision: whether products run in bfloat16 under autocast.
        fused: whether norms and gates run as one kernel each: eager mode without a dispatch mode, or a compiler.
    """
    config = ModelConfig.model_validate_json(config_json)
    model = empty_model(config, "meta").train()
    recompute.apply(model, mode)
    counted: dict[tuple, Footprint] = {}
    footprints = []
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    _to_fakes(model, fakes)  # outside the mode, which would convert every tensor on the way
    with fakes:
        for block in model.backbone.blocks:
            shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
            kind = (repr(block.layers), shapes)
            if kind not in counted:
                counted[kind] = _count(block, config.d_model, length, low_precision, fused)
            footprints.append(counted[kind])
    return tuple(footprints)


def _count(block: nn.Module, width: int, length: int, low_precision: bool, fused: bool) -> Footprint:
    # So many rows that activations outweigh the gradients of the weights, which are not per row, at every moment.
    parameters = sum(p.numel() for p in block.parameters())
    rows = -(-parameters // (width * length))
    peaks: list[tuple[int, int, int]] = []
    while not peaks:
        try:
            for count in (rows, 2 * rows):
                with (
                    collected(),
                    quiet_fakes(),
                ):  # checkpointed blocks leave cycles, whose ends no other count may see
                    peaks.append(_run(block, (count, length, width), low_precision, fused))
        except RuntimeError as error:
            if "overflow" not in str(error):
                raise
            if rows == 1:
                what = f"seq_len: {length} tokens in a block of {parameters:,} parameters are more than can be counted"
                raise ConfigError([f"{what}; lower seq_len, model.d_model or the layers' own widths"], "plan") from None
            # A tensor of more than 2^63 bytes: activations outweigh any gradient at a 16th of the rows too.
            rows, peaks = max(1, rows // 16), []
    once, twice = peaks
    saved, forward, backward = ((b - a) / rows for a, b in zip(once, twice, strict=True))
    return Footprint(saved, forward, backward, weights=once[0] - rows * saved)


def _run(block: nn.Module, shape: tuple, low_precision: bool, fused: bool) -> tuple[int, int, int]:
    """Returns the bytes after the forward, and the peaks of the forward and of the backward."""
    x = torch.empty(shape, requires_grad=True) * 1
    live = _Live(known=[x, *block.parameters(), *block.buffers()])
    with _kernels(fused), torch.autocast("cpu", torch.bfloat16, enabled=low_precision), live:
        y = block(x)[0]
        saved, forward = live.now, live.peak
        # The next block holds y as its input, and has let go of it when this block's backward begins.
        edge, gradient = torch.autograd.graph.get_gradient_edge(y), torch.empty_like(y)
        del y
        live.peak = live.now
        torch.autograd.backward([edge], [gradient])
    block.zero_grad()
    return saved, forward, live.peak


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def _to_fakes(model: nn.Module, fakes: FakeTensorMode) -> None:
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            fake = FakeTensor(fakes, tensor.detach().to("meta"), torch.device("cpu"))
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)


@contextlib.contextmanager
def _kernels(fused: bool) -> Iterator[None]:
    """Makes ops choose the forms of a GPU, and with `fused` the stand-ins of kernels that only eager mode takes."""
    places: list[tuple[Any, str, Any]] = [
        (backend, "use_triton", lambda op, is_cuda, module="triton": backend.has_triton(op, module))
    ]
    if fused:
        places += [
            (norm, "rms_norm_reference", _norm),
            (norm, "layer_norm_reference", _layer_norm),
            (rotation, "rotate_reference", _rotate),
            (activation, "gated_reference", lambda gate, x, _: _Kernel.apply([(x.shape, x.dtype)], gate, x)),
            (activation, "log_sigmoid_reference", lambda x, _: _Kernel.apply([(x.shape, torch.float32)], x)),
            (activation, "softplus_steps_reference", _softplus_steps),
            (activation, "forget_inputs_reference", _forget_inputs),
        ]
    before = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, stand_in in places:
            setattr(module, name, stand_in)
        yield
    finally:
        for (module, name, _), function in zip(places, before, strict=True):
            setattr(module, name, function)


class _Kernel(torch.autograd.Function):
    """A kernel that saves its inputs; its gradients are as large as they are."""

    @staticmethod
    def forward(ctx, outputs, *inputs):
        ctx.save_for_backward(*inputs)
        made = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in outputs)
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx, *_):
        return None, *(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)


class _Norm(torch.autograd.Function):
    """The norm's kernel saves h = x + residual, the gain and the gate."""

    @staticmethod
    def forward(ctx, x, weight, gate, residual, dtype):
        h = x if residual is None else torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
        ctx.save_for_backward(h, weight, gate)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return torch.empty(x.shape, dtype=dtype), h

    @staticmethod
    def backward(ctx, dy, dh):
        h, weight, gate = ctx.saved_tensors
        of_x, of_residual = ctx.dtypes
        dx = torch.empty(h.shape, dtype=of_x)
        dresidual = None
        if of_residual is not None:
            dresidual = dx if of_residual == of_x else torch.empty(h.shape, dtype=of_residual)
        others = (None if t is None else torch.empty_like(t) for t in (weight, gate))
        return dx, *others, dresidual, None


def _softplus_steps(x, rates, bias, _):
    return _Kernel.apply([(x.shape, torch.float32)] * 2, x, rates, bias)


def _forget_inputs(c, x, beta):
    return _Kernel.apply([(c.shape, c.dtype), (x.shape, torch.float32)], c, x, beta)


def _norm(x, weight, eps, gate, gate_activation, residual, dtype, gate_first):
    return _Norm.apply(x, weight, gate, residual, dtype)


def _layer_norm(x, weight, bias, eps, gate, gate_activation, residual, narrow, gate_first):
    low = torch.is_autocast_enabled("cpu")  # of the fake tensors
    dtype = torch.promote_types(x.dtype, x.dtype if residual is None else residual.dtype)
    if low:
        dtype = torch.get_autocast_dtype("cpu") if narrow else torch.float32
    return _Norm.apply(x, weight, gate, residual, dtype)


def _rotate(x, positions, theta, doubling, activation="none"):
    shape = (*x.shape[:-1], x.shape[-1] * (2 if doubling else 1))
    if activation != "none" or theta.requires_grad:
        return _Kernel.apply([(shape, x.dtype)], x, theta)
    return _Rotation.apply(x, shape)


class _Rotation(torch.autograd.Function):
    """A rotation by fixed angles needs nothing of x in its backward."""

    @staticmethod
    def forward(ctx, x, shape):
        ctx.shape = x.shape
        return torch.empty(shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return torch.empty(ctx.shape, dtype=dy.dtype), None


# Memory, traffic and time of a training on any number of GPUs, computed before it starts. Needs no GPU.
#
# Memory is the largest of the moments of a step: the loss, where most activations exist; the backward of each
# block; the end of the backward, where all gradients exist. Activations are counted (`footprint.py`), the rest
# is arithmetic over the parameters and what FSDP2 gathers. Traffic counts the bytes that a GPU receives, as ring
# algorithms move them. Time is the FLOPs at a speed that was measured, and the communication that they cannot hide.

GIB = 2**30
PER_MACHINE = 8  # GPUs that have links to each other
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
        numbers, gpu = {"memory": whole} | numbers, replace(GPUS[name], name=shown)
    else:
        gpu = GPUS["h200" if name == "auto" else name]
    return replace(gpu, **numbers)


def plan_training(config: TrainConfig, devices: int, gpu: Gpu) -> Plan:
    """Returns the predicted costs of a training on a number of GPUs, whether it fits or not.

    Raises:
        ConfigError: the configuration does not run on so many devices, with every problem and its fix.
    """
    parallel = config.parallel
    if problems := _problems(config, parallel, devices):
        raise ConfigError(problems, "plan")
    return _plan(config, parallel, devices, gpu)


def _problems(config: TrainConfig, parallel: ParallelConfig, devices: int) -> list[str]:
    batch = config.batch_size, config.accumulation, config.batch_ramp is not None
    return parallel.problems(devices, config.model, config.seq_len, *batch)


def _plan(config: TrainConfig, parallel: ParallelConfig, devices: int, gpu: Gpu) -> Plan:
    degrees = parallel.degrees(devices)
    parts = parallel.accumulation or config.accumulation
    rows = -(-config.batch_size // (degrees.dp * parts))
    memory, moment = _memory(config, parallel, degrees, rows, parts)
    tokens = config.batch_size * config.seq_len
    compute = _flops(config) / (gpu.speed * 1e12) / devices * (1 + SUMMARIES * (degrees.sp > 1))
    transfers = _transfers(config, parallel, degrees, rows, parts, gpu)
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
    low = 2 if config.autocast_precision == "bfloat16" else 4
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
    memory = {name: size for name, size in moments[moment].items() if size}
    return {**memory, OUTSIDE_TENSORS: outside * GIB}, moment


def _transfers(
    config: TrainConfig, parallel: ParallelConfig, degrees: Degrees, rows: int, parts: int, gpu: Gpu
) -> tuple[Transfer, ...]:
    sizes = _sizes(config, degrees.tp)
    low = 2 if config.autocast_precision == "bfloat16" else 4
    span, width = config.seq_len // degrees.sp, config.model.d_model
    transfers: list[Transfer] = []

    def add(name: str, received: float, extent: int, hidden: bool) -> None:
        """`extent`: how many ranks apart the farthest members of the group are."""
        if received:
            bandwidth = gpu.link if extent <= PER_MACHINE else gpu.network
            transfers.append(Transfer(name, received, received / (bandwidth * 1e9), hidden))

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
    return tuple(transfers)


def fixes(config: TrainConfig, devices: int, gpu: Gpu) -> list[str]:
    """Returns changes of which each alone makes a training fit, the cheapest first."""
    layouts = []

    def fits(changed: TrainConfig, parallel: ParallelConfig, count: int) -> bool:
        return not _problems(changed, parallel, count) and _plan(changed, parallel, count, gpu).fits

    def recomputing(mode: str) -> TrainConfig:
        return config.model_copy(update={"run": config.run.model_copy(update={"recompute": mode})})

    def fewest_parts(changed: TrainConfig) -> int | None:
        doubled = (config.accumulation * 2**n for n in range(1, 40))
        counts = (parts for parts in doubled if parts <= config.batch_size)
        in_parts = (config.parallel.model_copy(update={"accumulation": parts}) for parts in counts)
        return next((candidate.accumulation for candidate in in_parts if fits(changed, candidate, devices)), None)

    block = recomputing("block")
    if parts := fewest_parts(config):
        layouts.append(f"parallel.accumulation={parts}")
    modes = ["none", "selective", "block"]
    stronger = modes[modes.index(config.run.recompute) + 1 :]
    if mode := next((mode for mode in stronger if fits(recomputing(mode), config.parallel, devices)), None):
        layouts.append(f"run.recompute={mode}")
    if not layouts and stronger and (parts := fewest_parts(block)):
        layouts.append(f"run.recompute=block with parallel.accumulation={parts}")
    fixed = config.parallel.model_copy(update={"dp_shard": "auto"})
    for count in (devices * 2**n for n in range(1, 11)):
        if fits(config, fixed, count):
            layouts.append(f"--devices {count}")
            break
    for sp in (2**n for n in range(1, 11)):
        spans = fixed.model_copy(update={"sp": config.parallel.sp * sp})
        if not layouts and fits(block, spans, devices * sp):
            layouts.append(f"--devices {devices * sp} with parallel.sp={spans.sp} and run.recompute=block")
    if not layouts:
        for length in (config.seq_len // 2**n for n in range(1, 12)):
            shorter = block.model_copy(update={"seq_len": length})
            if length and fits(shorter, config.parallel, devices):
                layouts.append(f"seq_len={length} with run.recompute=block")
                break
    return layouts


def refuse(found: Plan, config: TrainConfig) -> None:
    """Raises ConfigError with what would fit if a plan does not."""
    if found.fits:
        return
    options = fixes(config, found.devices, found.gpu)
    advice = f"use {', or '.join(options)}" if options else "use a smaller model"
    room = f"the {found.gpu.memory:.0f} GiB of {found.gpu.name}"
    problem = f"memory: {found.total / GIB:.1f} GiB per GPU do not fit into {room}; {advice}"
    raise ConfigError([problem], "plan")
