"""What states in bfloat16 cost: the loss of held-out text, decoded token by token with states of both precisions.

    linnet train --model gdn-10m --data train.txt --set seq_len=4096 --set data.tokenizer=byte --set steps=1000
    python benchmarks/half_states.py runs/gdn-10m-... --text test.txt --csv

Each row of text starts from nothing, and every token's state is rounded, as in `linnet serve --state-dtype bfloat16`.
The difference of the losses is paired by row; its interval is that of Student's t over the rows. Weights are as the
engine has them: bfloat16 on a GPU, float32 on a CPU.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

import timing
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from linnet.inference import Engine
from linnet.runs import load_model

KEYS = ("model", "tokens", "rows", "window")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--tokens", type=int, default=4096, help="of a row")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    constants = timing.constants(f"python benchmarks/half_states.py {shlex.join(sys.argv[1:])}")
    device = constants.get("gpu") or constants["cpu"]
    path = timing.RESULTS / f"half-states-{timing.short_name(device)}.csv"
    print(f"{device}\n{'model':<12}{'tokens':>12}{'loss':>9}{'more with bfloat16 states (95 %)':>36}")
    for run in options.runs:
        _, tokenizer = load_model(run)
        tokens = tokenizer.encode(options.text.read_text())[: options.rows * (options.tokens + 1)]
        rows = torch.tensor(tokens).view(options.rows, -1)
        wide, half = (losses(run, rows, dtype) for dtype in (torch.float32, torch.bfloat16))
        for first in (0, options.tokens * 3 // 4):  # all tokens, and the last quarter
            row = {"model": run.name.rpartition("-")[0], "tokens": options.tokens, "rows": options.rows}
            row |= compare(wide[:, first:].mean(1), half[:, first:].mean(1)) | {"window": f"{first}-{options.tokens}"}
            difference = f"{row['more']:.5f} +- {row['more_ci']:.5f}"
            print(f"{row['model']:<12}{row['window']:>12}{row['loss']:>9.4f}{difference:>36}", flush=True)
            if options.csv:
                timing.update(path, [row | constants], KEYS)


@torch.no_grad()
def losses(run: Path, rows: Tensor, state_dtype: torch.dtype) -> Tensor:
    """Nats of each token but the first of rows [N, T + 1]: float64 [N, T]."""
    engine = Engine.of_run(run, slots=len(rows), state_dtype=state_dtype)
    decoder, rows = engine._decoder, rows.to(engine.device)
    empty = engine.model.init_state(len(rows), 1, engine.device)
    decoder.insert(0, empty, torch.zeros_like(decoder.logits))
    nats = []
    for before, after in zip(rows.T[:-1], rows.T[1:], strict=True):
        decoder.tokens.copy_(before)
        decoder.advance()
        nats.append(F.cross_entropy(decoder.logits.float(), after, reduction="none"))
    return torch.stack(nats, 1).double().cpu()


def compare(wide: Tensor, half: Tensor) -> dict[str, float]:
    """The mean loss of rows, and how much more it is with states in bfloat16, +- half of its 95 % interval."""
    more, count = half - wide, len(wide)
    error = more.std().item() / math.sqrt(count) * stats.t.ppf(0.975, count - 1)
    return {"loss": round(wide.mean().item(), 5), "more": round(more.mean().item(), 6), "more_ci": round(error, 6)}


if __name__ == "__main__":
    main()
