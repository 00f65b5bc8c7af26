"""Many small models of one shape trained together: the parameters stacked, one batched call where there were many.

A small model leaves most of a GPU idle and spends its time in launching. An ensemble stacks the parameters of its
members, maps their forward and loss over the stack with `torch.vmap` (every op of Linnet has a rule for it), and takes
one ordinary backward of all losses. Members share nothing but the call: each has its own learning rate, weight decay,
and data if wanted, and equals the same model trained alone, up to rounding.

A member whose loss is no longer finite is masked: its parameters stay, the others go on.

Where a layer has no rule for vmap (it reads values, say), members run one after another, with the same results.
AdamW: I. Loshchilov and F. Hutter, arXiv:1711.05101; cosine to zero, no warm-up (paper 004, appendix B).
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

BETAS = (0.9, 0.98)
EPS = 1e-8
IGNORE = -100


@dataclass(frozen=True)
class Score:
    """How well one member answers the targets of a split.

    Attributes:
        loss: nats a target.
        accuracy: share of targets answered right.
        macro_batch: of each batch the mean over classes of their accuracy (classes that are answered but never asked
            count 0), and of batches the mean by their rows: what the published implementation of MAD calls accuracy.
    """

    loss: float
    accuracy: float
    macro_batch: float


class Ensemble:
    """Members of one shape, trained in step.

    Attributes:
        alive: bool [M] on the device, False from the first loss that was not finite.
        vectorised: False once a layer turned out to have no rule for vmap.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        learning_rates: Sequence[float],
        weight_decays: Sequence[float],
        steps: int,
        *,
        device: torch.device | str = "cpu",
        precision: Literal["float32", "bfloat16"] = "float32",
        compile: bool = False,
        vectorised: bool = True,
        betas: tuple[float, float] = BETAS,
        constant: bool = False,
        spared: Collection[str] = (),
    ):
        """Takes copies of the models' weights.

        Args:
            models: each with `loss(tokens, targets) -> (sum in nats, number of targets)`, and logits from a call.
            learning_rates, weight_decays: one for each; the decay acts on every parameter but `spared`.
            steps: of the whole run, over which the learning rates go to zero.
            precision: bfloat16 is autocast; parameters and AdamW's moments are float32 in both.
            compile: the forward and backward with `torch.compile`.
            vectorised: False runs members one after another.
            betas: of AdamW. constant: learning rates stay as they are, in place of the cosine.
            spared: names of parameters of a model that do not decay.

        Raises:
            ValueError: no models, models of different shapes, or not as many rates and decays as models.
        """
        if not models or not len(models) == len(learning_rates) == len(weight_decays):
            raise ValueError(
                f"ensemble: {len(models)} models, {len(learning_rates)} learning rates and {len(weight_decays)} weight "
                "decays; give as many of each, at least one"
            )
        shapes = [{name: p.shape for name, p in model.named_parameters()} for model in models]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError("ensemble: the models have different parameters; give models of one configuration")
        self.size, self.steps, self.device = len(models), steps, torch.device(device)
        self.betas, self.constant = betas, constant
        self.step_number = 0
        self.vectorised = vectorised
        parameters, buffers = stack_module_state([_Call(model) for model in models])
        self._parameters = {
            name: p.detach().to(self.device).contiguous().requires_grad_() for name, p in parameters.items()
        }
        # What is the same in all members stays one tensor, so that ops may treat it as one.
        self._shared = {name: b[0].to(self.device) for name, b in buffers.items() if bool((b == b[:1]).all())}
        self._buffers = {name: b.to(self.device) for name, b in buffers.items() if name not in self._shared}
        self._call = _Call(models[0]).to(self.device)
        self._decayed = [name.removeprefix("model.") not in spared for name in self._parameters]
        self._first = [torch.zeros_like(p) for p in self._parameters.values()]
        self._second = [torch.zeros_like(p) for p in self._parameters.values()]
        self._rates = torch.tensor(learning_rates, dtype=torch.float32, device=self.device)
        self._decays = torch.tensor(weight_decays, dtype=torch.float32, device=self.device)
        self.alive = torch.ones(self.size, dtype=torch.bool, device=self.device)
        self._last_step = torch.full((self.size,), -1, device=self.device)
        self._autocast = precision == "bfloat16"
        self._losses = torch.compile(self._map_losses) if compile else self._map_losses

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One update of every living member on the mean loss of its batch.

        Args:
            tokens, targets: int64 [B, T], the same for all, or [M, B, T].

        Returns:
            The losses before the update, nats a target, [M] on the device. Nothing is waited for.
        """
        leaves = list(self._parameters.values())
        losses = self._run(lambda: self._losses(tokens, targets))
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        losses = losses.detach()
        self.alive &= losses.isfinite()
        self._last_step = torch.where(self.alive, self.step_number, self._last_step)
        with torch.no_grad():
            self._update(leaves, gradients)
        self.step_number += 1
        return losses

    def diverged_at(self) -> list[int | None]:
        """Of each member the step whose loss was the first not to be finite, None for those that live. Waits."""
        lives, last = self.alive.tolist(), self._last_step.tolist()
        return [None if living else step + 1 for living, step in zip(lives, last, strict=True)]

    def member(self, index: int) -> dict[str, Tensor]:
        """The parameters of one member, by the names that they have in its model."""
        return {name.removeprefix("model."): p[index].detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor, batch_size: int) -> list[Score]:
        """Loss and accuracies of each member on a split: int64 [N, T] for all, or [M, N, T]."""
        rows = tokens.shape[-2]
        nll = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        right, asked, macro = torch.zeros_like(nll), torch.zeros_like(nll), torch.zeros_like(nll)
        for start in range(0, rows, batch_size):
            batch = slice(start, min(start + batch_size, rows))
            inputs, answers = tokens[..., batch, :].to(self.device), targets[..., batch, :].to(self.device)
            logits = self._run(lambda inputs=inputs: self._map(lambda call, x: call(x), inputs)).float()
            answers = answers.expand(logits.shape[:-1])
            kept = answers != IGNORE
            told = F.cross_entropy(logits.flatten(0, -2), answers.flatten(), ignore_index=IGNORE, reduction="none")
            nll += told.view(self.size, -1).double().sum(1)
            given = logits.argmax(-1)
            right += ((given == answers) & kept).flatten(1).sum(1)
            asked += kept.flatten(1).sum(1)
            macro += (batch.stop - batch.start) * _macro(given, answers, kept, logits.shape[-1])
        table = torch.stack([nll / asked, right / asked, macro / rows], dim=1).tolist()
        return [Score(*row) for row in table]

    def _map_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._map(_mean_loss, tokens, targets)

    def _run(self, function: Callable[[], Tensor]) -> Tensor:
        """Calls under autocast; where vmap does not go through a layer, once more without it, and so from then on."""
        kind = self.device.type
        context = torch.autocast(kind, dtype=torch.bfloat16) if self._autocast else contextlib.nullcontext()
        with context:
            if not self.vectorised:
                return function()
            try:
                return function()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if "vmap" not in str(error) and "functorch" not in str(error):
                    raise
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"vmap does not go through a layer, so members run one by one: {reason}", stacklevel=4)
                self.vectorised, self._losses = False, self._map_losses
                return function()

    def _map(self, function: Callable[..., Tensor], *data: Tensor) -> Tensor:
        """`function(call, *data)` of every member, stacked; data of three dimensions has one slice for each."""

        def one(parameters, buffers, *own):
            state = {**parameters, **buffers, **self._shared}
            return function(lambda *arguments: functional_call(self._call, state, arguments), *own)

        dims = [0 if x.ndim == 3 else None for x in data]
        if self.vectorised:
            return torch.vmap(one, in_dims=(0, 0, *dims))(self._parameters, self._buffers, *data)
        outputs = []
        for m in range(self.size):
            own = [x[m] if dim == 0 else x for x, dim in zip(data, dims, strict=True)]
            parameters = {name: p[m] for name, p in self._parameters.items()}
            outputs.append(one(parameters, {name: b[m] for name, b in self._buffers.items()}, *own))
        return torch.stack(outputs)

    def _update(self, leaves: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """AdamW. All but the last line is the same for every member, so it runs over all tensors at once."""
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]  # as AdamW: no gradient, no update
        if not used:
            return
        leaves, gradients, decayed = ([x[i] for i in used] for x in (leaves, gradients, self._decayed))
        first, second = [self._first[i] for i in used], [self._second[i] for i in used]
        t = self.step_number + 1
        torch._foreach_lerp_(first, gradients, 1 - self.betas[0])
        torch._foreach_mul_(second, self.betas[1])
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - self.betas[1])
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, math.sqrt(1 - self.betas[1] ** t))
        torch._foreach_add_(scale, EPS)
        updates = torch._foreach_div(first, scale)
        rates = self._rates if self.constant else self._rates * cosine(self.step_number, self.steps)
        kept, moved = 1 - rates * self._decays, rates / (1 - self.betas[0] ** t)
        for p, update, decays in zip(leaves, updates, decayed, strict=True):
            shape = (-1,) + (1,) * (p.ndim - 1)
            before = p * kept.view(shape) if decays else p
            after = torch.addcmul(before, moved.view(shape), update, value=-1)
            p.copy_(torch.where(self.alive.view(shape), after, p))


class _Call(nn.Module):
    """A model as one call: the loss where targets are given, else logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor | None = None):
        if targets is not None:
            return self.model.loss(tokens, targets)
        output = self.model(tokens)
        return output[0] if isinstance(output, tuple) else output


def _mean_loss(call: Callable, tokens: Tensor, targets: Tensor) -> Tensor:
    total, count = call(tokens, targets)
    return total / count


def cosine(step: int, steps: int) -> float:
    """Share of the learning rate at update `step` (0 is the first) of `steps`: from 1 towards 0 along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _macro(given: Tensor, answers: Tensor, kept: Tensor, classes: int) -> Tensor:
    """Mean accuracy over the classes that are asked for or answered: int64 [M, B, T] and a mask -> float64 [M]."""
    given, answers, kept = given.flatten(1), answers.flatten(1).clamp(min=0), kept.flatten(1).double()
    zeros = torch.zeros(len(given), classes, dtype=torch.float64, device=given.device)
    right = zeros.scatter_add(1, answers, kept * (given == answers))
    asked = zeros.scatter_add(1, answers, kept)
    seen = asked + zeros.scatter_add(1, given, kept)
    return (right / asked.clamp(min=1)).sum(1) / (seen > 0).sum(1).clamp(min=1)
