"""Milliseconds per token of a released shape, Qwen3.5-0.8B with random weights: Linnet and transformers in one run.

    python benchmarks/released.py --csv

transformers draws the weights, Linnet converts the saved folder (`linnet.hf.convert`), and both must give the same
logits up to bfloat16. Then both answer a batch of prompts greedily, all of the host included. Linnet is its engine:
a token's time is that of a round with all rows in their answers, the median of three times 64 rounds. transformers'
`generate` is timed as a whole: a long answer less a short one, over the tokens between. It runs with
flash-linear-attention's kernels with a growing cache (`eager`), which a profile must show, and with a static one and
its own compilation (`static`), where the profile says what ran.

The shape: 18 layers of Gated DeltaNet (16 heads of 128) and 6 of attention (8 heads of 256, 2 of keys), width 1,024,
GLU 3,584, 248,320 tied tokens: 752,393,024 parameters.
"""

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import timing
import torch
import transformers

from linnet import hf
from linnet.inference import Engine, Sampling
from linnet.runs import load_model

KEYS = ("model", "batch", "mode")
MODES = ("linnet", "eager", "static")
PROMPT, SHORT, LONG, ROUNDS, CONTEXT = 128, 32, 160, 64, 512
SHAPE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584, "vocab_size": 248_320,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
PARAMETERS = 752_393_024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    constants = timing.constants(f"python benchmarks/released.py {shlex.join(sys.argv[1:])}")
    path = timing.RESULTS / f"released-{timing.short_name(constants['gpu'])}.csv"

    torch.manual_seed(0)
    with torch.device("cuda"):
        theirs = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SHAPE)).bfloat16().eval()
    assert sum(p.numel() for p in theirs.parameters()) == PARAMETERS
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder) / "theirs")
        converted = hf.convert(Path(folder) / "theirs", Path(folder) / "ours").path
        print(f"{constants['gpu']}: logits differ by {gate(theirs, converted):.4f} (relative RMS)")
        print(f"{'batch':>6}  {'mode':<8}{'ms per token':>14}{'first s':>10}  kernel of the delta rule")
        for batch in options.batches:
            prompts = torch.randint(SHAPE["vocab_size"], (batch, PROMPT), device="cuda")
            for mode in options.modes:
                began = time.perf_counter()
                timed = ours(converted, prompts) if mode == "linnet" else of_transformers(theirs, prompts, mode)
                first = time.perf_counter() - began
                kernel = kernel_of(timed.run)
                assert mode != "eager" or "fused_recurrent" in kernel, f"{kernel} is not flash-linear-attention's"
                row = {"model": "qwen3.5-0.8b", "batch": batch, "mode": mode, "token_ms": round(timed.token_ms(), 4)}
                row |= {"first_s": round(first, 1), "kernel": kernel}
                print(f"{batch:>6}  {mode:<8}{row['token_ms']:>14.3f}{first:>10.1f}  {kernel}", flush=True)
                if options.csv:
                    timing.update(path, [row | constants], KEYS)
                del timed
                torch._dynamo.reset()
                torch.cuda.empty_cache()


@torch.no_grad()
def gate(theirs, converted: Path) -> float:
    """The relative RMS difference of the logits of two rows; AssertionError if over 0.1, as in decode.py."""
    model = load_model(converted)[0].to("cuda", torch.bfloat16).eval()
    tokens = torch.randint(SHAPE["vocab_size"], (2, 100), device="cuda")
    expected = theirs(tokens, use_cache=False).logits.float()
    error = ((model(tokens)[0].float() - expected).norm() / expected.norm()).item()
    assert error <= 0.1, f"logits differ by {error}"
    return error


class Timed(NamedTuple):
    """What answers: `run` some tokens for a profile, and the milliseconds of a token."""

    run: Callable[[], None]
    token_ms: Callable[[], float]


def ours(converted: Path, prompts: torch.Tensor) -> Timed:
    engine = Engine.of_run(converted, slots=len(prompts), context_length=CONTEXT, device="cuda")
    requests = [engine.submit(row, Sampling(max_tokens=None, ignore_end=True)) for row in prompts.tolist()]
    while not all(request.generated for request in requests):  # prompts are read one after another
        engine.advance()

    def token_ms() -> float:
        times = [seconds(lambda: [engine.advance() for _ in range(ROUNDS)]) / ROUNDS * 1e3 for _ in range(3)]
        assert engine.active == len(prompts), "some answers have ended"
        return statistics.median(times)

    return Timed(lambda: [engine.advance() for _ in range(4)], token_ms)


def of_transformers(theirs, prompts: torch.Tensor, mode: str) -> Timed:
    cache = {"cache_implementation": "static"} if mode == "static" else {}

    @torch.no_grad()
    def answer(tokens: int) -> None:
        mask = torch.ones_like(prompts)
        sizes = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        rows = theirs.generate(prompts, attention_mask=mask, do_sample=False, **sizes, **cache)
        assert rows.shape[1] == PROMPT + tokens

    def token_ms() -> float:
        pairs = [seconds(lambda: answer(LONG)) - seconds(lambda: answer(SHORT)) for _ in range(3)]
        return statistics.median(pairs) / (LONG - SHORT) * 1e3

    for tokens in (SHORT, LONG):
        answer(tokens)
    return Timed(lambda: answer(4), token_ms)


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def kernel_of(run: Callable[[], None]) -> str:
    """The name of the kernel of the delta rule's step that ran, or of the one that took longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        run()
        torch.cuda.synchronize()
    events = sorted(record.key_averages(), key=lambda event: -event.self_device_time_total)
    names = [event.key for event in events]
    return next((name for name in names if "recurrent" in name or name == "step_kernel"), names[0])[:60]


if __name__ == "__main__":
    main()
