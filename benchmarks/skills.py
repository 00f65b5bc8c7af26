"""Skills that tell mixers with the delta rule apart, on two cores in minutes: parity, 64 pairs to recall, copying.

    python benchmarks/skills.py --workers 2           # all; --csv keeps the rows, --only parity names a part
    python benchmarks/skills.py --only parity --quick # one seed and few steps, to try it
    python benchmarks/skills.py --device cuda --workers 8   # the same models in float32 on a GPU, several at a time

- Parity: after each bit, whether the number of ones so far is odd. Trained on rows of 40 bits, scored at bit 40 and at
  bit 256 of longer rows. A state that only shrinks cannot count; one whose eigenvalues reach -1 can (Grazzi et al.
  2024, arXiv:2411.12537).
- MQAR: 64 pairs in 256 tokens, width 64, one head; trained on 4 to 64 pairs in turn, as its authors do (Arora et al.
  2023).
- Copying: 32 tokens among blanks (paper 004, 3.1.4), width 64.

Each model has two blocks of the mixer and SwiGLU, without positions; AdamW, a cosine to zero. A row is the best of
three seeds, by its first score. Minutes are those of all seeds on one core, and on a GPU those of a process among the
workers.
"""

import argparse
import shlex
import sys
import time
from abc import ABC, abstractmethod
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import timing
import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.data.synthetic import TASKS
from linnet.data.synthetic.base import IGNORE, Draws
from linnet.models import ModelConfig, build_model

WIDTH, BATCH = 64, 64
NEGATIVE = {"allow_neg_eigval": True}
MIXERS: dict[str, tuple[str, dict]] = {
    "gdn": ("gdn", {"num_heads": 1}),
    "gdn, eigenvalues to -1": ("gdn", {"num_heads": 1} | NEGATIVE),
    "delta_net": ("delta_net", {"num_heads": 1}),
    "kda": ("kda", {"num_heads": 1}),
    "mamba2": ("mamba2", {"head_dim": 32, "state": 64}),
    "hgrn2": ("hgrn2", {"num_heads": 1}),
    "attention": ("attention", {"num_heads": 1, "rope": True}),
}


class Skill(ABC):
    """What is learned: batches of tokens and targets int64 [B, T], and the lengths at which a model is scored."""

    def __init__(self, mixers: list[str], tokens: int, steps: int, rate: float):
        self.mixers, self.tokens, self.steps, self.rate = mixers, tokens, steps, rate

    @abstractmethod
    def draw(self, draws: Draws, split: str, step: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the batch of a step."""

    def scores(self, model, draws: Draws) -> list[float]:
        """Percentages of right answers."""
        tokens, targets = self.draw(draws, "test")
        asked = targets != IGNORE
        return [100 * (predict(model, tokens)[asked] == targets[asked]).double().mean().item()]


class Parity(Skill):
    def draw(self, draws: Draws, split: str, step: int = 0) -> tuple[Tensor, Tensor]:
        bits = torch.from_numpy(draws.integers(2, 512 if split == "test" else BATCH, 256 if split == "test" else 40))
        return bits, bits.cumsum(1) % 2

    def scores(self, model, draws: Draws) -> list[float]:
        tokens, targets = self.draw(draws, "test")
        right = (predict(model, tokens) == targets).double().mean(0)
        return [100 * right[39].item(), 100 * right[255].item()]


class Synthetic(Skill):
    """Trained on tasks in turn, the last of which is scored."""

    def __init__(self, tasks: list, mixers: list[str], steps: int, rate: float):
        super().__init__(mixers, tasks[-1].num_tokens, steps, rate)
        self.tasks = tasks

    def draw(self, draws: Draws, split: str, step: int = 0) -> tuple[Tensor, Tensor]:
        if split == "test":
            samples = self.tasks[-1].draw(draws, 512, False)
        else:
            samples = self.tasks[step % len(self.tasks)].draw(draws, BATCH, True)
        return torch.from_numpy(samples.inputs), torch.from_numpy(np.ascontiguousarray(samples.targets))


def skills() -> dict[str, Skill]:
    sizes = (64, 4), (128, 8), (256, 16), (256, 32), (256, 64)
    recall = [TASKS["mqar"](vocab_size=512, seq_len=length, num_pairs=pairs) for length, pairs in sizes]
    copying = [TASKS["selective_copying"](seq_len=96, tokens_to_copy=32)]
    linear = ["gdn", "kda", "delta_net", "mamba2", "hgrn2", "attention"]
    return {
        "parity": Parity(["gdn, eigenvalues to -1", "gdn", "mamba2"], 2, 1000, 3e-3),
        "mqar": Synthetic(recall, linear, 6000, 3e-3),
        "copying": Synthetic(copying, linear, 2500, 3e-3),
    }


def predict(model, tokens: Tensor) -> Tensor:
    device = model.embedding.weight.device
    with torch.no_grad():
        return torch.cat([model(part.to(device))[0].argmax(-1).cpu() for part in tokens.split(BATCH)])


def train(skill_name: str, mixer: str, seed: int, steps: int, device: str) -> tuple[list[float], float]:
    """Scores of a model, and the seconds of its training, on one core. The vocabulary has `Skill.tokens` tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    skill, (name, options) = skills()[skill_name], MIXERS[mixer]
    config = ModelConfig(vocab_size=skill.tokens, d_model=WIDTH, layout=f"{name}+swiglu x2", options={name: options})
    model = build_model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=skill.rate, weight_decay=0.1, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, skill.rate, total_steps=steps, pct_start=0.1)
    clock = time.process_time if device == "cpu" else time.perf_counter  # other work on the machine does not count
    start = clock()
    for step in range(steps):
        tokens, targets = skill.draw(Draws(seed, "skills", "train", step), "train", step)
        logits = model(tokens.to(device))[0].flatten(0, 1)
        loss = F.cross_entropy(logits, targets.to(device).flatten(), ignore_index=IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return skill.scores(model, Draws(seed, "skills", "test")), clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(skills()), metavar="skill")
    parser.add_argument("--mixers", nargs="*", default=list(MIXERS), metavar="mixer")
    parser.add_argument("--quick", action="store_true", help="one seed, 50 steps")
    parser.add_argument("--csv", action="store_true", help="write the rows")
    parser.add_argument("--workers", type=int, default=1, help="processes, one core each")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    command = f"python benchmarks/skills.py {shlex.join(sys.argv[1:])}"
    seeds = range(1 if options.quick else 3)
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        runs = {
            (name, mixer): [
                pool.submit(train, name, mixer, seed, 50 if options.quick else skill.steps, options.device)
                for seed in seeds
            ]
            for name, skill in skills().items()
            if name in options.only
            for mixer in skill.mixers
            if mixer in options.mixers
        }
        for (name, mixer), futures in runs.items():
            scores, seconds = zip(*(future.result() for future in futures), strict=True)
            first, *rest = max(scores)
            row = {"skill": name, "mixer": mixer, "score": round(first, 2), "longer": round(rest[0], 2) if rest else ""}
            row |= {"scores": " ".join(f"{score[-1]:.1f}" for score in scores), "minutes": round(sum(seconds) / 60, 1)}
            row |= {"device": options.device, "commit": timing.commit(), "command": command}
            print(*(f"{key} {value}" for key, value in list(row.items())[:6]), flush=True)
            if options.csv:
                timing.update(timing.RESULTS / "skills.csv", [row], ["skill", "mixer", "device"])


if __name__ == "__main__":
    main()
