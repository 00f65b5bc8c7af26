"""Every mixer on rows that are cut into spans, one per GPU, against the same model on whole rows on one GPU.

    torchrun --standalone --nproc-per-node 2 benchmarks/spans.py
    torchrun --standalone --nproc-per-node 2 benchmarks/spans.py --device cpu --names tnl --length 64    # to try it

Prints for each case the relative difference of the loss, and the largest of any parameter's gradient (norm of the
difference over the norm), in float32 and in bfloat16 autocast: spans add in another order, so neither is 0. Exits with
1 if a difference exceeds its limit. Cases: whole rows, packed documents, states passed around a ring, and blocks that
are recomputed and compiled.
"""

import argparse
import contextlib
import functools
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from linnet.layers import routing
from linnet.models import ModelConfig, build_model
from linnet.ops import sequence
from linnet.train import recompute
from linnet.train.objective import training_loss

LIMITS = {"float32": 1e-3, "bfloat16": 5e-2}
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
    "hyena": ("hyena+swiglu x2", {}),
    "mh_hyena": ("mh_hyena+swiglu x2", {}),
    "hyena_experts": ("hyena_experts+moe x2", {"moe": {"balance_coefficient": 0.01}}),
    "attention": ("attention+swiglu x2", {"attention": HEADS | {"num_kv_heads": 1}}),
    "window": ("attention+swiglu x2", {"attention": HEADS | {"window": 256}}),
}


def gradients(name: str, arguments, *, bfloat16: bool, mode: str, compiled: bool, device: torch.device) -> dict:
    """The loss and the gradients of a model, of this rank's span inside `sequence_parallel`."""
    layout, options = MODELS[name]
    config = ModelConfig(d_model=WIDTH, vocab_size=VOCABULARY, layout=layout, options=options)
    model = build_model(config, seed=1, device=device)
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


def compare(
    name: str, arguments, method: str, bfloat16: bool, mode: str, compiled: bool, device
) -> tuple[float, float]:
    """The relative differences of the loss and of the worst gradient."""
    run = functools.partial(gradients, name, arguments, bfloat16=bfloat16, device=device)
    with sequence.sequence_parallel(dist.group.WORLD, method):
        found = run(mode=mode, compiled=compiled)
    for tensor in found.values():
        dist.all_reduce(tensor)
    whole = run(mode="none", compiled=False)
    loss = (found.pop("loss") / whole.pop("loss") - 1.0).abs().item()
    return loss, max(((found[key] - x).norm() / x.norm().clamp(min=1e-12)).item() for key, x in whole.items())


@record
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--names", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
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
        for case in given.cases:
            arguments, (method, mode, compiled) = packed if case == "documents" else rows, CASES[case]
            if compiled and name not in ("tnl", "mamba", "attention"):
                continue
            for precision, limit in LIMITS.items():
                loss, gradient = compare(name, arguments, method, precision == "bfloat16", mode, compiled, device)
                failed += not (loss <= limit and gradient <= limit)
                if dist.get_rank() == 0:
                    mark = "" if loss <= limit and gradient <= limit else f"  above {limit}"
                    print(
                        f"{name:14} {case:10} {precision:9} loss {loss:.1e}  gradient {gradient:.1e}{mark}", flush=True
                    )
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
