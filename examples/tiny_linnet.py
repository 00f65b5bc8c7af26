"""The whole of Linnet in one file: a token mixer, a model, a training run and a scaling law.

    python examples/tiny_linnet.py            # about 20 s on one CPU core
    python examples/tiny_linnet.py RUNS       # keep the run folders; a second call finds them done

Read it from top to bottom. `examples/my_mixer.py` is the next step: a mixer that uses Linnet's kernels and that
`linnet train`, `linnet study` and `linnet mad` take from its file. `docs/mixers.md` explains every method of a mixer.
"""

import sys
import tempfile

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import Config, parse
from linnet.laws.fit import fit_power
from linnet.layers.base import LayerContext, Mixer, TensorSpec, register_mixer
from linnet.models import ModelConfig, build_model, count_parameters, flops_exact, state_bytes
from linnet.train import TrainConfig, train

# 1. A mixer. It is linear attention in which each head forgets at a constant rate gamma between 0 and 1:
#
#     S_t = gamma S_{t-1} + k_t^T v_t      the state: [K, K] per head, the same size at every length
#     o_t = q_t S_t / sqrt(K)
#
# The class gives these equations in two forms. `step` is the recurrence above, for one token. `forward` cuts the
# sequence into chunks of C tokens: it computes a chunk as one matrix product and passes the state from chunk to chunk.
# Training is then parallel inside a chunk, and its cost is linear in the sequence length.


class TinyConfig(Config):
    """Options of the mixer. A configuration sets them: `options: {tiny: {num_heads: 2}}`."""

    num_heads: int = Field(2, ge=1, description="number of heads")
    chunk: int = Field(32, ge=1, description="tokens per chunk")


@register_mixer("tiny", TinyConfig)  # the name that layouts and tables use
class Tiny(Mixer):
    """Maps x [B, T, D] to [B, T, D]. `context` gives the width D and the place of the layer in the model."""

    def __init__(self, config: TinyConfig, context: LayerContext):
        super().__init__()
        if context.d_model % config.num_heads:
            raise ValueError(f"tiny.num_heads: {config.num_heads} does not divide the width {context.d_model}")
        self.heads, self.width, self.chunk = config.num_heads, context.d_model // config.num_heads, config.chunk
        self.qkv = nn.Linear(context.d_model, 3 * context.d_model, bias=False)
        self.out = nn.Linear(context.d_model, context.d_model, bias=False)
        self.out.ends_residual = True  # the last matrix of a residual branch starts smaller in deep models
        # Heads forget at different rates: half of what a head holds is gone after 2, ..., 128 tokens.
        halflives = 2.0 ** torch.linspace(1, 7, config.num_heads)
        self.register_buffer("log_gamma", -(torch.tensor(2.0).log() / halflives), persistent=False)

    def forward(self, x: Tensor, state=None, cu_seqlens: Tensor | None = None):
        """All tokens at once. Training gives no state; prefill gives one and gets the state after the last token."""
        if cu_seqlens is not None:  # several documents in one row: each starts with an empty state
            ends = cu_seqlens.tolist()
            return torch.cat([self.forward(x[:, a:b])[0] for a, b in zip(ends, ends[1:], strict=False)], 1), None
        q, k, v = self._project(x)  # [B, T, H, K] each
        S = q.new_zeros(len(x), self.heads, self.width, self.width) if state is None else state["S"]
        outputs = []
        for start in range(0, x.shape[1], self.chunk):
            qc, kc, vc = (part[:, start : start + self.chunk] for part in (q, k, v))
            i = torch.arange(qc.shape[1], device=x.device, dtype=S.dtype)  # positions in this chunk
            log_gamma = self.log_gamma.to(S.dtype)[:, None]
            # Inside the chunk: attention without softmax, multiplied by gamma^(i - j) for j <= i and 0 otherwise.
            decay = (log_gamma[..., None] * (i[:, None] - i)).exp().tril()  # [H, C, C]
            inside = torch.einsum("bihk,bjhk,hij,bjhv->bihv", qc, kc, decay, vc)
            # From the chunks before: the state at the start of the chunk, decayed to position i.
            before = torch.einsum("bihk,bhkv,hi->bihv", qc, S, (log_gamma * (i + 1)).exp())
            outputs.append(inside + before)
            # The state at the end of the chunk.
            left = (log_gamma * (len(i) - 1 - i)).exp()  # [H, C]: the decay from position j to the end
            S = S * (log_gamma * len(i)).exp()[..., None] + torch.einsum("bjhk,hj,bjhv->bhkv", kc, left, vc)
        return self._read(torch.cat(outputs, 1)), None if state is None else {"S": S}

    def step(self, x: Tensor, state):
        """One token, x [B, D]: the recurrence itself."""
        q, k, v = self._project(x)  # [B, H, K] each
        gamma = self.log_gamma.to(q.dtype).exp()[:, None, None]
        S = gamma * state["S"] + k[..., :, None] * v[..., None, :]
        return self._read(torch.einsum("bhk,bhkv->bhv", q, S)), {"S": S}

    def state_spec(self, batch: int, context_length: int):
        """The tensors that pass from token to token. This mixer's do not depend on the context length."""
        return {"S": TensorSpec((batch, self.heads, self.width, self.width))}

    def _project(self, x: Tensor):
        qkv = self.qkv(x).to(torch.promote_types(x.dtype, torch.float32))  # as the state, if x is bfloat16
        return qkv.unflatten(-1, (3 * self.heads, self.width)).chunk(3, dim=-2)

    def _read(self, o: Tensor) -> Tensor:
        o = nn.functional.rms_norm(o / self.width**0.5, (self.width,), eps=1e-6).flatten(-2)
        return self.out(o.to(self.out.weight.dtype))


# 2. A model. A layout says which layers stand in which order: here two blocks of this mixer and a SwiGLU.


def model_of(width: int) -> ModelConfig:
    return ModelConfig(d_model=width, layout="tiny+swiglu x2", vocab_size=256)


def check_forms(width: int = 32) -> float:
    """Returns the largest difference of the logits between the chunked form and the recurrence."""
    model = build_model(model_of(width), seed=0).double()
    tokens = torch.randint(256, (1, 100))
    logits, _ = model(tokens)  # all tokens at once
    states, largest = model.init_state(1, 100, dtype=torch.float64), 0.0
    for t in range(100):  # the same, token by token, with a state of constant size
        one, states = model.step(tokens[:, t], states)
        largest = max(largest, (one - logits[:, t]).abs().max().item())
    return largest


# 3. A run. A configuration determines it, and its folder holds everything that a table or a figure needs.


def run_of(width: int, steps: int, folder: str):
    """Trains a model on the sources of Python's standard library, byte by byte; returns the finished run folder."""
    values = {
        "model": model_of(width).model_dump(),
        "data": {"source": "stdlib", "max_bytes": 500_000},
        "seq_len": 128,
        "batch_size": 8,
        "steps": steps,
        "optimizer": {"learning_rate": 1e-2},
        "evaluate_tokens": 16_384,
        "run": {"device": "cpu"},
    }
    return train(parse(TrainConfig, values), folder, f"{folder}/data")


RUNS = ((16, 30), (24, 60), (32, 120), (48, 200))
"""Width and steps of each run."""


def main(folder: str) -> None:
    print(f"1. the chunked form and the recurrence differ by {check_forms():.0e}")
    config = model_of(32)
    parameters, flops = count_parameters(config)[0], flops_exact(config, 128) / 128
    print(f"2. {parameters:,} parameters, {flops:,.0f} FLOPs per token in training,")
    print(f"   {state_bytes(config, 128):,} bytes of state per sequence at any length")
    # 4. A law. Four budgets, each spent on a model and a number of steps that suit it, give four losses; a power law
    # goes through them. `linnet study` does this with many sizes per budget, intervals and a report.
    compute, losses = [], []
    for width, steps in RUNS:
        result = run_of(width, steps, folder).result()
        compute.append(result["flops"])
        losses.append(result["loss"])
        print(f"3. width {width}, {steps} steps: {compute[-1]:.2e} FLOPs, held-out loss {losses[-1]:.3f} nats per byte")
    law = fit_power(compute, losses, bootstrap=200)
    print(f"4. {law.text()}; at ten times the largest budget it predicts {law.predict(10 * compute[-1]):.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
