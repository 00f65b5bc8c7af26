"""Every mixer on rows that are cut into spans, one per GPU, against the same model on whole rows on one GPU.

    torchrun --standalone --nproc-per-node 2 benchmarks/spans.py
    torchrun --standalone --nproc-per-node 2 benchmarks/spans.py --device cpu --names tnl --length 64    # to try it
    torchrun --standalone --nproc-per-node 2 benchmarks/spans.py --names tnl --trained 300    # after some training

Prints for each case the relative difference of the loss, and the largest of any parameter's gradient (norm of the
difference over the norm). In float32 spans are compared with whole rows: they add in another order, so the difference
is not 0. In bfloat16 autocast both are compared with whole rows in float32, since some gradients are small sums of
large terms that bfloat16 itself rounds: spans may be at most `FARTHER` times as far. `alone` is the distance of whole
rows, of the worst parameter. Exits with 1 if a limit is exceeded. Cases: whole rows, packed documents, states passed
around a ring, and blocks that are recomputed and compiled.
"""

import argparse
import contextlib
import copy
import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from linnet.layers import routing
from linnet.models import ModelConfig, build_model
from linnet.ops import sequence
from linnet.train import recompute
from linnet.train.objective import training_loss

LIMIT = 1e-3  # relative difference in float32
FARTHER = 1.5  # times the distance of bfloat16 itself
CLOSE = 5e-3  # relative difference that bfloat16 may always have
WIDTH, VOCABULARY = 256, 1024
HEADS = {"num_heads": 4}
CASES = {  # how states travel, what is recomputed, whether blocks are compiled
    "rows": ("auto", "none", False),
    "documents": ("auto", "block", False),
    "ring": ("ring", "block", False),
    "compiled": ("auto", "selective", True),
}
MODELS: dict[str, tuple[str, dict]] = {
    "tnl": ("tpe tnl+sglu x2", {"tnl": HEADS | {"lrpe": "first_layer"}}),
    "hgrn2": ("hgrn2+sglu x2", {"hgrn2": HEADS}),
    "hgrn": ("hgrn+swiglu x2", {}),
    "hgrn complex": ("hgrn+swiglu x2", {"hgrn": {"complex": True}}),
    "gla": ("gla+swiglu x2", {"gla": HEADS}),
    "lightnet": ("lightnet+swiglu x2", {"lightnet": HEADS}),
    "cosformer2": ("cosformer2+sglu x2", {"cosformer2": HEADS}),
    "mamba": ("mamba x2", {}),
    "mamba2": ("mamba2 x2", {}),
    "mamba3": ("mamba3 x2", {}),
    "delta_net": ("delta_net+swiglu x2", {"delta_net": HEADS}),
    "gdn": ("gdn+swiglu x2", {"gdn": {"num_heads": 2, "num_v_heads": 4, "head_dim": 64, "expand_v": 1.0}}),
    "kda": ("kda+swiglu x2", {"kda": HEADS}),
    "gdn2": ("gdn2+swiglu x2", {"gdn2": HEADS}),
    "gated_delta_product": ("gated_delta_product+swiglu x2", {"gated_delta_product": HEADS}),
    "rwkv7": ("rwkv7+rwkv x2", {"rwkv7": HEADS}),
    "parallel": ("parallel+swiglu x2", {"parallel": {"mixers": {"attention": HEADS, "gdn": HEADS}}}),
    "mla": ("mla+swiglu short_conv+swiglu", {"mla": HEADS}),
    "hyena": ("hyena+swiglu x2", {}),
    "mh_hyena": ("mh_hyena+swiglu x2", {}),
    "hyena_experts": ("hyena_experts+moe x2", {"moe": {"balance_coefficient": 0.01}}),
    "attention": ("attention+swiglu x2", {"attention": HEADS | {"num_kv_heads": 1}}),
    "window": ("attention+swiglu x2", {"attention": HEADS | {"window": 256}}),
}


def make(name: str, device: torch.device, steps: int = 0, length: int = 512) -> torch.nn.Module:
    """A model, trained for some steps on the bytes of Python's standard library; the same on every rank."""
    layout, options = MODELS[name]
    config = ModelConfig(d_model=WIDTH, vocab_size=VOCABULARY, layout=layout, options=options)
    model = build_model(config, seed=1, device=device)
    for module in model.modules():
        if getattr(module, "starts_zero", False):  # RWKV-7: else nothing reaches the layers
            torch.nn.init.normal_(module.weight, 0.0, 0.02, torch.Generator(device).manual_seed(1))
    if not steps:
        return model
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    data, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        starts = torch.randint(len(data) - length - 1, (16,), generator=generator)
        rows = torch.stack([data[start : start + length + 1] for start in starts]).long().to(device)
        optimizer.zero_grad()
        total, *_ = training_loss(model, model.loss)(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        (total / rows[:, 1:].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for tensor in model.state_dict().values():  # the kernels of a GPU may add in another order
        dist.broadcast(tensor, 0)
    return model.zero_grad() or model


def gradients(source: torch.nn.Module, arguments, *, bfloat16: bool, mode: str, compiled: bool) -> dict:
    """The loss and the gradients of a model, of this rank's span inside `sequence_parallel`."""
    model = copy.deepcopy(source)
    device = next(model.parameters()).device
    here = sequence.span()
    if here is not None:
        routing.balance_over(model, here.group)
    recompute.apply(model, mode, exchanges=here is not None, compiled=compiled)
    if compiled:
        for block in model.backbone.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16) if bfloat16 else contextlib.nullcontext()
    with autocast:
        total, _, *extra = training_loss(model, model.loss)(*arguments)
    loss = sum(extra, total / arguments[1].numel())
    loss.backward()
    found = {"loss": loss.detach().double()}
    return found | {key: p.grad.double() for key, p in model.named_parameters() if p.grad is not None}


def compare(source, arguments, method: str, bfloat16: bool, mode: str, compiled: bool) -> tuple[float, float, float]:
    """The relative differences of the loss and of the worst gradient, and how far bfloat16 itself is there.

    In bfloat16 the worst gradient is that with the largest share of what it may differ by.
    """
    run = functools.partial(gradients, source, arguments)
    with sequence.sequence_parallel(dist.group.WORLD, method):
        spans = run(bfloat16=bfloat16, mode=mode, compiled=compiled)
    for tensor in spans.values():
        dist.all_reduce(tensor)
    whole = run(bfloat16=bfloat16, mode="none", compiled=False)
    right = run(bfloat16=False, mode="none", compiled=False) if bfloat16 else whole
    loss = (spans.pop("loss") / whole.pop("loss") - 1.0).abs().item()
    right.pop("loss", None)
    norms = {key: x.norm().clamp(min=1e-12) for key, x in right.items()}
    far = {key: ((spans[key] - x).norm() / norms[key]).item() for key, x in right.items()}
    rounding = {key: ((whole[key] - x).norm() / norms[key]).item() for key, x in right.items()}
    worst = max(far, key=lambda key: far[key] / allowed(rounding[key], bfloat16))
    return loss, far[worst], rounding[worst]


def allowed(rounding: float, bfloat16: bool) -> float:
    return FARTHER * rounding + CLOSE if bfloat16 else LIMIT


@record
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--names", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--trained", type=int, default=0, help="steps of training before the comparison")
    given = parser.parse_args()
    device = torch.device(given.device, int(os.environ["LOCAL_RANK"]) if given.device == "cuda" else None)
    if given.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(VOCABULARY, (2, given.length + 1), generator=generator).to(device)
    rows = numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()
    starts = [0, given.length // 3, given.length, given.length + 9, 2 * given.length]
    packed = (*(x.reshape(1, -1) for x in rows), torch.tensor(starts, dtype=torch.int32, device=device))
    failed = 0
    for name in given.names:
        source = make(name, device, given.trained)
        for case in given.cases:
            arguments, (method, mode, compiled) = packed if case == "documents" else rows, CASES[case]
            if compiled and name not in ("tnl", "mamba", "attention", "gdn"):
                continue
            for precision in ("float32", "bfloat16"):
                bfloat16 = precision == "bfloat16"
                loss, gradient, rounding = compare(source, arguments, method, bfloat16, mode, compiled)
                good = gradient <= allowed(rounding, bfloat16) and loss <= (CLOSE if bfloat16 else LIMIT)
                failed += not good
                if dist.get_rank() == 0:
                    end = f"  alone {rounding:.1e}" if bfloat16 else ""
                    end += "" if good else f"  above {allowed(rounding, bfloat16):.1e}"
                    print(
                        f"{name:20} {case:10} {precision:9} loss {loss:.1e}  gradient {gradient:.1e}{end}", flush=True
                    )
        if given.trained and dist.get_rank() == 0:
            right, rounded = (gradients(source, rows, bfloat16=b, mode="none", compiled=False) for b in (False, True))
            for key in right:
                if "theta" in key:
                    far = ((rounded[key] - right[key]).norm() / right[key].norm()).item()
                    print(
                        f"{name:20} {key}: gradient {right[key].norm().item():.1e}, bfloat16 {far:.1%} off", flush=True
                    )
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
