"""Cost of state expansion on a GPU (paper 002, Table 3): a training step of HGRN with `lr` against HGRN2 of the same n.

    python benchmarks/expansion.py                     # 26 x 1,024, n = 4: about one minute on an H200
    python benchmarks/expansion.py --layers 4 --n 2,4,8
    python benchmarks/expansion.py --narrow            # HGRN2's heads of 8 channels: scan against padded products

Prints one line per form: milliseconds per step (median) and the ratio to HGRN2. The bar is 1.5 for `lr` with n = 4.
"""

import argparse
import statistics
import time

import torch

from linnet.config import parse
from linnet.models import ModelConfig, build_model
from linnet.ops.gated import narrow


def seconds(config: ModelConfig, rows: int, length: int, steps: int) -> float:
    """Returns the median time of a forward and backward pass in bfloat16."""
    model = build_model(config, seed=0, device="cuda")
    tokens = torch.randint(0, config.vocab_size, (rows, length + 1), device="cuda")
    found = []
    for step in range(steps + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            total, count = model.loss(tokens[:, :-1], tokens[:, 1:])
        (total / count).backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= 3:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def model_of(layout: str, options: dict, layers: int) -> ModelConfig:
    values = {"d_model": 1024, "layout": f"{layout} x{layers}", "vocab_size": 50_272, "options": options}
    return parse(ModelConfig, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--n", default="4", help="expansions, with commas between")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--narrow", action="store_true", help="compare the forms of HGRN2's heads of 8 channels")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/expansion.py needs a GPU")
    shape = (given.rows, given.length, given.steps)
    if given.narrow:
        config = model_of("hgrn2+sglu", {"hgrn2": {"num_heads": 128}, "sglu": {"inner": 2816}}, given.layers)
        for form, least in (("products padded to 16", 8), ("scan", 9)):
            narrow.NARROWEST = least
            print(f"hgrn2, heads of 8, {form}: {1e3 * seconds(config, *shape):.1f} ms", flush=True)
        return
    for n in map(int, given.n.split(",")):
        forms = {"hgrn2": ("hgrn2+sglu", {"hgrn2": {"num_heads": 1024 // n}, "sglu": {"inner": 2816}})}
        for kind in ("lr", "glti"):
            forms[kind] = ("hgrn+swiglu", {"hgrn": {"expand": n, "expansion": kind}, "swiglu": {"inner": 2816}})
        base = 0.0
        for name, (layout, options) in forms.items():
            taken = seconds(model_of(layout, options, given.layers), *shape)
            base = base or taken
            print(f"n = {n}, {name}: {1e3 * taken:.1f} ms, {taken / base:.2f} of hgrn2", flush=True)


if __name__ == "__main__":
    main()
