"""Measures how fast image classifiers train and classify: a fixed number of tokens per batch, images of several sides.

A training step is a forward pass, a backward pass and an AdamW step on random images and labels; inference is a forward
pass. Both are timed with the images on the device, so that no loader counts. Images are uint8 for Linnet's models,
which normalise them, and floats in the layout of channels last for transformers', which does not.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from linnet.config import ConfigError, parse
from linnet.inference.benchmark import synchronize
from linnet.layers.base import lower_precision
from linnet.ops.capture import WARM_UP, Captured
from linnet.provenance import installed_version
from linnet.train import recompute
from linnet.vision.config import VisionConfig

Mode = Literal["training", "inference"]
Form = Literal["eager", "compiled", "autotuned", "eager graph", "compiled graph"]
MODES: tuple[Mode, ...] = ("training", "inference")
FORMS: dict[Form, dict[str, Any] | None] = {  # arguments of torch.compile; None does not compile
    "eager": None,
    "compiled": {"dynamic": False},
    "autotuned": {"dynamic": False, "mode": "max-autotune"},
    "eager graph": None,  # all kernels of a call are launched as one CUDA graph
    "compiled graph": {"dynamic": False},
}
MODEL_COLUMNS = ("model", "system", "form", "mode", "side", "tokens_per_image", "batch")
_PACKAGES = ("torch", "triton", "transformers")
_FEWEST, _SECONDS = 3, 0.2  # timed calls: at least so many, and as many as fit into so many seconds


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        side: pixels per side of the images.
        tokens: patches per batch; the batch has as many images as fit, at least one.
    """

    side: int
    tokens: int
    mode: Mode
    form: Form


class System(Protocol):
    """A family of equal models for images of any side: Linnet's, or a peer's."""

    name: str
    config: VisionConfig  # the shape of the model

    def build(self, side: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        """Returns a model for images of this side, and a function: images -> logits [B, classes]."""

    def images(self, raw: Tensor) -> Tensor:
        """Returns uint8 images [B, C, H, W] as the model takes them."""


class Linnet:
    """A recipe with random weights, whose training may compute activations again (`run.recompute`)."""

    name = "linnet"

    def __init__(self, config: VisionConfig, mode: recompute.Recompute = "none"):
        self.config, self.mode = config, mode

    def build(self, side: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        from linnet.vision.models import ImageClassifier

        model = ImageClassifier(at_side(self.config, side))
        recompute.apply(model, self.mode)
        return model, model

    def images(self, raw: Tensor) -> Tensor:
        return raw


class Transformers:
    """transformers' `ViTForImageClassification` with SDPA, which is DeiT without its distillation, in a recipe's shape.

    Raises:
        ConfigError: the recipe is not a ViT.
    """

    name = "transformers"

    def __init__(self, config: VisionConfig, model: str):
        self.config = config
        mixers = {block.mixer for block in config.blocks}
        channels = {block.channel for block in config.blocks}
        if mixers != {"attention"} or channels != {"mlp"}:
            message = f"--peer {model}: its layers are not attention and mlp; name a ViT, such as deit-s or vit-8px"
            raise ConfigError([message], "linnet bench vision")

    def build(self, side: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        from transformers import ViTConfig, ViTForImageClassification

        config = self.config
        settings = ViTConfig(
            hidden_size=config.d_model,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.options["attention"]["num_heads"],
            intermediate_size=config.options["mlp"].get("inner") or 4 * config.d_model,
            image_size=side,
            patch_size=config.patch,
            num_channels=config.channels,
            num_labels=config.classes,
            attn_implementation="sdpa",
        )
        model = ViTForImageClassification(settings)
        return model, lambda images: model(pixel_values=images).logits

    def images(self, raw: Tensor) -> Tensor:
        return (raw.float() / 255).contiguous(memory_format=torch.channels_last)


def at_side(config: VisionConfig, side: int) -> VisionConfig:
    """Returns a configuration for images of another side. Raises ConfigError if the patches do not divide it."""
    return parse(VisionConfig, config.model_dump(mode="json") | {"image_size": side}, f"side {side}")


def measure(
    system: System, model: str, cases: Sequence[Case], device: torch.device, dtype: torch.dtype, least: int = _FEWEST
) -> Iterator[dict[str, Any]]:
    """Yields one row per case; a case that fails, for lack of memory for example, has `error`.

    Args:
        model: name of the recipe.
        dtype: float32, or bfloat16: autocast over float32 weights in training, weights in bfloat16 in inference.
        least: smallest number of timed calls.
    """
    for case in cases:
        torch.compiler.reset()  # before the garbage is collected: what it has compiled holds the last model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        tokens = (case.side // system.config.patch) ** 2
        batch = max(1, case.tokens // tokens)
        row: dict[str, Any] = dict(
            zip(MODEL_COLUMNS, (model, system.name, case.form, case.mode, case.side, tokens, batch), strict=True)
        )
        row |= {"dtype": str(dtype).removeprefix("torch."), "error": ""}
        try:
            row |= _time(system, case, batch, device, dtype, least)
        except (RuntimeError, ValueError) as problem:  # out of memory, or a shape that a system does not take
            row["error"] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"
        yield row


def _time(
    system: System, case: Case, batch: int, device: torch.device, dtype: torch.dtype, least: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model, logits = system.build(case.side)
    model.to(device).train(case.mode == "training")
    shape = (batch, system.config.channels, case.side, case.side)
    images = system.images(torch.randint(256, shape, dtype=torch.uint8)).to(device)
    labels = torch.randint(system.config.classes, (batch,)).to(device)
    options = FORMS[case.form]
    lower = dtype != torch.float32

    if case.mode == "training":

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits(images).float(), labels)

        compiled = loss if options is None else torch.compile(loss, **options)
        on_gpu = device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu, capturable=on_gpu)

        def run(images: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype) if lower else contextlib.nullcontext():
                value = compiled(images, labels)
            with torch.autograd.set_multithreading_enabled(False):  # a capture must see the backward in this thread
                value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return value.detach()
    else:
        if lower:
            lower_precision(model, dtype)
            images = images.to(dtype) if images.is_floating_point() else images
        forward = logits if options is None else torch.compile(logits, **options)

        @torch.no_grad()
        def run(images: Tensor, labels: Tensor) -> Tensor:
            return forward(images)

    call: Callable[[Tensor, Tensor], Tensor] = run
    if graph := case.form.endswith("graph"):
        if device.type != "cuda":
            raise ValueError(f"form {case.form!r} needs a GPU")
        call = captured = Captured(run, device)
    began = time.perf_counter()
    call(images, labels)
    synchronize(device)
    first = time.perf_counter() - began
    call(images, labels)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP - 1 if graph else 0):  # the last one is captured
        call(images, labels)
    if graph and not captured.graphs:
        raise RuntimeError("it cannot be captured as a CUDA graph")
    memory = torch.cuda.max_memory_allocated() if graph else None  # a replay allocates nothing
    seconds = _median(lambda: call(images, labels), device, least)
    row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_s": round(first, 3),
        "milliseconds": round(1e3 * seconds, 4),
        "images_per_second": round(batch / seconds, 2),
        "pixels_per_second": round(batch * case.side**2 / seconds),
    }
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated() if memory is None else memory
        row["memory_per_image_mib"] = round((memory - before) / 2**20 / batch, 3)
    return row


def _median(run: Callable[[], Tensor], device: torch.device, least: int) -> float:
    """Returns the median seconds of calls, each waited for."""
    times: list[float] = []
    while len(times) < least or (sum(times) < _SECONDS and len(times) < 20):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def rivals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the speed of each of Linnet's models relative to the fastest peer at the same side and mode.

    Each model counts in its fastest form. `times` is None where no peer ran, for lack of memory for example.
    """
    comparisons = []
    timed = [row for row in rows if not row["error"]]
    places = dict.fromkeys((row["mode"], row["side"]) for row in timed)
    for mode, side in places:
        here = [row for row in timed if (row["mode"], row["side"]) == (mode, side)]
        peers = [row for row in here if row["system"] != Linnet.name]
        best = max(peers, key=lambda row: row["images_per_second"], default=None)
        for model in dict.fromkeys(row["model"] for row in here if row["system"] == Linnet.name):
            linnet_rows = [row for row in here if (row["model"], row["system"]) == (model, Linnet.name)]
            row = max(linnet_rows, key=lambda row: row["images_per_second"])
            times = None if best is None else row["images_per_second"] / best["images_per_second"]
            rival = None if best is None else ", ".join(best[key] for key in ("model", "system", "form"))
            kept = {
                key: row[key] for key in ("model", "mode", "side", "form", "images_per_second", "pixels_per_second")
            }
            comparisons.append(kept | {"times": times, "rival": rival})
    return comparisons


def versions() -> dict[str, str]:
    """Returns versions of the packages that decide the speed of Linnet and its peers; "" for one not installed."""
    return {name: installed_version(name) for name in _PACKAGES}
