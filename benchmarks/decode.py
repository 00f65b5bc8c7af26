"""Milliseconds a token of whole models in decoding: `CausalLM.step` in eager mode, in a CUDA graph, and compiled.

    python benchmarks/decode.py --csv

Models of about 390M parameters: 26 layers, width 1,024, 8 heads of 128, GLU 2,816, 50,304 tied tokens, weights in
bfloat16, states in float32 (or `--states bfloat16`). A token is the step, an argmax of its logits and the copy of that
into the input, so that nothing leaves the GPU. `graph` replays the captured step, `compiled` one that went through
torch.compile first (`fullgraph`), and `engine` is what linnet.inference runs: merged projections, kernels for few rows,
graphs of the step and of the choice, whose token is copied to the host. `requests` are rounds of the engine itself with
a request in each slot, all that it does on the host included. The floor is the bytes of the weights once and of the
states twice (or as often as the engine writes them) over the measured copy bandwidth.

Every row is first held against the parallel form (chunked, in PyTorch): `error` is the relative RMS error of the logits
of 16 tokens. Both round to bfloat16 at different places, so a few percent are expected. `kernels`: launches per token.

`--csv` puts the rows into benchmarks/results/decode-<gpu>.csv; `--profile FILE` writes the kernels of a token there.
"""

import argparse
import copy
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import models
import timing
import torch
from torch import Tensor

from linnet.inference import Engine, Sampling
from linnet.inference import decoding as inference
from linnet.inference.decoding import choose_interval, saved_bytes
from linnet.inference.engine import lower_precision
from linnet.models import CausalLM, build_model
from linnet.ops import use_backend

KEYS = ("model", "batch", "mode", "layers", "width", "states")
MODELS = ("tnl", "hgrn2", "cosformer2", "lightnet", "gla", "hgrn", "gdn", "mamba2")
MODES = ("eager", "graph", "compiled", "engine", "requests")
GATE_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tnl", "hgrn2"], choices=MODELS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--modes", nargs="+", default=["eager", "graph", "engine", "requests"], choices=MODES)
    parser.add_argument("--layers", type=int, help="default: 26, of mamba2 48")
    parser.add_argument("--width", type=int, default=models.WIDTH)
    parser.add_argument("--inner", type=int, default=models.INNER)
    parser.add_argument("--states", choices=("float32", "bfloat16"), default="float32", help="of engine and requests")
    parser.add_argument("--profile", type=Path, help="write the kernels of a token there")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()

    constants = timing.constants(f"python benchmarks/decode.py {shlex.join(sys.argv[1:])}")
    path = timing.RESULTS / f"decode-{timing.short_name(constants['gpu'])}.csv"
    bandwidth, _ = timing.measure_ceilings()
    print(
        f"{constants['gpu']}: copy {bandwidth / 1e12:.2f} TB/s\n"
        f"{'model':<12}{'batch':>6}  {'mode':<10}{'ms':>8}{'floor ms':>10}{'kernels':>9}{'error':>8}{'first s':>9}"
    )
    for name in options.models:
        model = build_model(models.config(name, options.layers, options.width, options.inner))
        model.to("cuda").requires_grad_(False).eval()
        lower_precision(model, torch.bfloat16)
        for batch in options.batches:
            for mode in options.modes:
                row = time_row(name, model, batch, mode, bandwidth, options.profile, getattr(torch, options.states))
                row |= {"layers": models.depth(name, options.layers), "width": options.width}
                print(
                    f"{name:<12}{batch:>6}  {mode:<10}{row['token_ms']:>8.3f}{row['floor_ms']:>10.3f}"
                    f"{row['kernels']:>9}{row['error']:>8.4f}{row['first_s']:>9.1f}",
                    flush=True,
                )
                if options.csv:
                    timing.update(path, [row | constants], KEYS)
        torch._dynamo.reset()


class Decoder:
    """A model's step on buffers that stay where they are, as a CUDA graph needs it."""

    write_every = 1  # tokens between writes of the states
    halved_bytes = 0  # what states in bfloat16 save

    def __init__(self, model: CausalLM, batch: int, mode: str):
        self.tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
        self.states = model.init_state(batch, 1, "cuda")
        self._empty = [x.clone() for x in tensors(self.states)]
        self._step = torch.compile(model.step, fullgraph=True, dynamic=False) if mode == "compiled" else model.step
        self.advance: Callable[[], None] = self._advance
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):  # before a capture, so that all is compiled and all handles are made
                self._advance()
        torch.cuda.synchronize()
        if mode != "eager":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._advance()
            self._graph, self.advance = graph, graph.replay

    def _advance(self) -> None:
        self.logits, after = self._step(self.tokens, self.states)
        assert all(a is b for a, b in zip(tensors(after), tensors(self.states), strict=True)), "states are not in place"
        self.tokens.copy_(self.logits.argmax(-1))

    def reset(self) -> None:
        for x, empty in zip(tensors(self.states), self._empty, strict=True):
            x.copy_(empty)


class Served:
    """What the engine runs, with the handles of `Decoder`. The model is changed."""

    def __init__(self, model: CausalLM, batch: int, state_dtype: torch.dtype):
        inference.prepare_steps(model)
        shape = batch, models.VOCABULARY, 1, torch.device("cuda")
        self._decoder = inference.Decoder(model, *shape, state_dtype=state_dtype)
        self.tokens, self.logits = self._decoder.tokens, self._decoder.logits
        self.states = model.init_state(batch, 1, "cuda")  # before the first token
        self.halved_bytes = self._decoder.halved_bytes
        self.write_every = self._decoder.write_every

    def advance(self) -> None:
        self._decoder.advance()
        self._decoder.choose(inference.PLAIN)

    def reset(self) -> None:
        self._decoder.insert(0, self.states, torch.zeros_like(self.logits))


class Requests:
    """Rounds of an engine whose slots are all in use. The model is changed."""

    def __init__(self, model: CausalLM, batch: int, state_dtype: torch.dtype):
        engine = Engine(model, slots=batch, device="cuda", state_dtype=state_dtype)
        requests = [engine.submit([1, 2, 3], Sampling(max_tokens=None)) for _ in range(batch)]
        while not all(request.generated for request in requests):
            engine.advance()
        self.states, self.advance = engine.model.init_state(batch, 1, "meta"), engine.advance
        self.write_every = choose_interval(engine.model, batch, engine.device, state_dtype)
        self.halved_bytes = engine._decoder.halved_bytes


def tensors(states: dict[str, dict[str, Tensor]]) -> list[Tensor]:
    return [x for state in states.values() for x in state.values()]


@torch.no_grad()
def time_row(
    name: str, model: CausalLM, batch: int, mode: str, bandwidth: float, profile: Path | None, state_dtype: torch.dtype
) -> dict:
    """One row of the table."""
    began = time.perf_counter()
    match mode:
        case "engine":
            decoder = Served(copy.deepcopy(model), batch, state_dtype)
        case "requests":
            decoder = Requests(copy.deepcopy(model), batch, state_dtype)
        case _:
            decoder = Decoder(model, batch, mode)
    first = time.perf_counter() - began
    error = 0.0 if mode == "requests" else gate(model, decoder)  # its steps are those of `engine`
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = sum(x.numel() * x.element_size() for x in tensors(decoder.states)) - decoder.halved_bytes
    half = {"states": "bfloat16"} if decoder.halved_bytes else {}
    moved = weights + 2 * states - batch * saved_bytes(model, decoder.write_every, state_dtype)
    timing.warm_up(decoder.advance)
    # Tokens that write their states and others together: a median of single ones would leave the former out.
    rounds = decoder.write_every
    milliseconds = timing.time_calls(lambda: [decoder.advance() for _ in range(rounds)], -(-50 // rounds)) / rounds
    kernels, report = count_kernels(decoder.advance)
    if profile is not None:
        profile.parent.mkdir(parents=True, exist_ok=True)
        with profile.open("a") as file:
            file.write(f"{name}, batch {batch}, {mode}: {milliseconds:.3f} ms per token, {kernels} kernels\n{report}\n")
    return {
        "model": name,
        "batch": batch,
        "mode": mode,
        "token_ms": round(milliseconds, 4),
        "tokens_per_second": round(batch / milliseconds * 1e3),
        "weight_bytes": weights,
        "state_bytes": states,
        "floor_ms": round(moved / bandwidth * 1e3, 4),
        "kernels": kernels,
        "error": round(error, 4),
        "first_s": round(first, 1),
    } | half


def gate(model: CausalLM, decoder: Decoder | Served) -> float:
    """Relative RMS error of the logits of given tokens against the parallel form; AssertionError if over 0.1."""
    batch = decoder.tokens.shape[0]
    tokens = torch.randint(models.VOCABULARY, (batch, GATE_TOKENS), device="cuda")
    decoder.reset()
    logits = []
    for t in range(GATE_TOKENS):
        decoder.tokens.copy_(tokens[:, t])
        decoder.advance()
        logits.append(decoder.logits[:2].clone())
    with use_backend("chunked"):
        expected = model(tokens[:2])[0].double()
    error = ((torch.stack(logits, 1).double() - expected).norm() / expected.norm()).item()
    assert error <= 0.1, f"logits of single steps differ by {error} from those of the parallel form"
    return error


def count_kernels(advance: Callable[[], None], most: int = 30) -> tuple[int, str]:
    """Kernels of one token, and those that take longest: microseconds, share, calls, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        advance()
        torch.cuda.synchronize()
    events = sorted(record.key_averages(), key=lambda event: -event.self_device_time_total)
    events = [event for event in events if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events)
    lines = [
        f"{event.self_device_time_total:9.1f} us {event.self_device_time_total / total:6.1%} {event.count:5d}  "
        f"{event.key[:130]}"
        for event in events[:most]
    ]
    return sum(event.count for event in events), "\n".join([f"kernels: {total / 1e3:.3f} ms", *lines])


if __name__ == "__main__":
    main()
