"""Checks, then times the kernels on a GPU beside the peers that can be imported, in groups of rows.

    python benchmarks/kernels.py lightning softmax --csv

Each row of ours is first held against float64 on a short sequence of its shape (relative RMS error at most 0.005, of
gdn2 0.0065, for outputs, final states and all gradients), then timed: medians of CUDA events, in bf16, on tensors that
are larger than the cache where the tokens are many. `both` is a forward and the gradients of all inputs, `GiB` the peak
memory of that.
The floor of a row is the larger of its bytes (each input read once, each output written once) over the bandwidth of a
large copy and its FLOPs over the rate of a large matrix product, both measured first; `x` are times over the floor.

Groups: lightning, softmax, figure4, gated, delta, additive, scan, selective, longconv, norm, cross_entropy;
lightning_peers, gated_peers, delta_peers, kda_peers, gdn2_peers, additive_peers, scan_peers (these tune for minutes).
`--csv` puts the rows into benchmarks/results/<group>-<gpu>.csv.
"""

import argparse
import gc
import shlex
import sys

import timing
import torch
from cases import Case
from groups import GROUPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", default=["lightning"], metavar="group", help="default: lightning")
    parser.add_argument("--only", default="", help="rows whose name has this part")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--csv", action="store_true", help="write the tables")
    options = parser.parse_args()
    if unknown := [group for group in options.groups if group not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")

    ceilings = timing.measure_ceilings()
    print(
        f"{torch.cuda.get_device_name()}: copy {ceilings[0] / 1e12:.2f} TB/s, product {ceilings[1] / 1e12:.0f} TFLOP/s"
    )
    for group in options.groups:
        constants = timing.constants(f"python benchmarks/kernels.py {shlex.join(sys.argv[1:])}")
        path = timing.RESULTS / f"{group}-{timing.short_name(constants['gpu'])}.csv"
        print(f"\n{group:<34}{'fwd ms':>10}{'x':>7}{'both ms':>10}{'x':>7}{'GiB':>7}{'error':>9}")
        try:
            for case in GROUPS[group]():
                if options.only in case.op and (row := time_case(case, options.repeats, *ceilings)) and options.csv:
                    timing.update(path, [row | constants], ["op", *case.shape])
                gc.collect()
        except ImportError as problem:
            print(problem, flush=True)


def time_case(case: Case, repeats: int, bandwidth: float, rate: float) -> dict | None:
    """A row of the table, printed; None where a peer is not there or fails, which must not end the others."""
    label = f"{case.op} {' '.join(str(value) for value in case.shape.values())}"
    try:
        error = case.check() if case.check else None
        inputs = case.inputs()
        with torch.no_grad():
            forward = timing.measure(lambda: case.run(*inputs), repeats)
        leaves = [x.requires_grad_() for x in inputs]
        gradient = torch.randn_like(case.run(*leaves))

        def both() -> None:
            torch.autograd.grad(case.run(*leaves), leaves, gradient)

        timing.warm_up(both)
        memory = timing.peak_memory(both)
        total = timing.time_calls(both, repeats)
    except AssertionError:
        raise
    except Exception as problem:
        print(f"{label:<34}{type(problem).__name__}: {str(problem)[:160]}", flush=True)
        if case.check and not isinstance(problem, ImportError):
            raise
        return None
    floor = floor_ms(case.cost.forward_bytes, case.cost.forward_flops, bandwidth, rate)
    both_floor = floor + floor_ms(case.cost.backward_bytes, case.cost.backward_flops, bandwidth, rate)
    print(
        f"{label:<34}{forward:>10.3f}{forward / floor:>7.2f}{total:>10.3f}{total / both_floor:>7.2f}{memory:>7.2f}"
        f"{'' if error is None else format(error, '9.4f')}",
        flush=True,
    )
    return {
        "op": case.op,
        **case.shape,
        "forward_ms": round(forward, 4),
        "both_ms": round(total, 4),
        "forward_floor_ms": round(floor, 4),
        "both_floor_ms": round(both_floor, 4),
        "memory_gib": round(memory, 3),
        "error": "" if error is None else round(error, 5),
        "copy_tb_s": round(bandwidth / 1e12, 3),
        "matmul_tflop_s": round(rate / 1e12),
    }


def floor_ms(bytes_moved: float, flops: float, bandwidth: float, rate: float) -> float:
    return 1e3 * max(bytes_moved / bandwidth, flops / rate)


if __name__ == "__main__":
    main()
