"""Many small models in one batched step: runs in lockstep, stacked weights, layers as matrix products."""

import contextlib
import copy
import math
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

from linnet import trust
from linnet.config import ConfigError, digest, grouped
from linnet.evaluate.likelihood import evaluating
from linnet.layers import dropout
from linnet.layers.norm import BatchNorm
from linnet.models.causal_lm import IGNORE
from linnet.ops.capture import Captured
from linnet.runs import RunFolder
from linnet.train import device as devices
from linnet.train.config import TrainConfig, TrainingConfig, resolve
from linnet.train.identity import as_begun, contents_of, find
from linnet.train.loop import Run, checked, claim, train
from linnet.train.monitor import Stop, graceful_stop
from linnet.train.objective import Loss, training_loss
from linnet.train.session import Flags

# Trains many small models of one shape together, with stacked parameters and one batched call per step.
#
# A small model leaves most of a GPU idle, because launching kernels dominates its time. An ensemble stacks the
# parameters of its members, maps forward and loss over the stack with `torch.vmap` (every op of Linnet has a vmap
# rule), and takes one ordinary backward of all losses. Members share only the call: each has its own learning rate and
# weight decay, can have its own data, and equals the same model trained alone, up to rounding.
#
# A member whose loss becomes non-finite is masked: its parameters stay, and the others continue.
#
# The host makes no decision in a step: learning rates and masks are tensors, so a step on a GPU is one CUDA graph. If
# a layer has no vmap rule (because it reads values), members run one after another, with the same results. AdamW: I.
# Loshchilov and F. Hutter, arXiv:1711.05101; cosine to zero, no warm-up (paper 004, appendix B).

FEW_TOKENS = 512  # largest number of ids of an embedding that is read by a product
PADDING = 8  # columns added for a bias, so that rows stay aligned as half-precision products need them


class _Multiplied(nn.Embedding):
    """An embedding read by a product with the tokens as one-hot rows.

    Its gradient is a product as well. With few ids, each row of the table gets a sum over thousands of tokens; the
    gradient of a look-up computes this sum by sorting the tokens or with atomics.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        ids = torch.arange(self.num_embeddings, device=tokens.device)
        rows = (tokens.flatten()[:, None] == ids).to(self.weight.dtype)
        pieces = math.gcd(len(rows), 16)  # splits the sum over tokens, so that more of the GPU is busy
        with torch.autocast(tokens.device.type, enabled=False):
            x = torch.bmm(rows.unflatten(0, (pieces, -1)), self.weight.expand(pieces, -1, -1))
        return x.view(*tokens.shape, -1)


class _Widened(nn.Linear):
    """A linear layer with its bias as a column of the weight, which is multiplied by a column of ones in the input.

    Under vmap, a separate bias costs an extra pass: an addition to a float32 result under autocast, and for its
    gradient a sum over all tokens and a cast.
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = F.pad(self.bias[:, None], (0, PADDING - 1))
        return F.linear(F.pad(x, (0, PADDING), value=1.0), torch.cat([self.weight, bias], 1))


def multiply(model: nn.Module, biases: bool = True) -> None:
    """Makes plain embeddings with few ids use matrix products; with `biases`, also the biases of plain linear layers
    from a narrow input to a wide output."""
    for module in model.modules():
        if type(module) is nn.Embedding and module.padding_idx is None and module.max_norm is None:
            if module.num_embeddings <= FEW_TOKENS:
                module.__class__ = _Multiplied
        elif biases and type(module) is nn.Linear and module.bias is not None:
            if 2 * module.in_features <= module.out_features:  # otherwise the copies cost as much as they save
                module.__class__ = _Widened


BETAS = (0.9, 0.98)
EPS = 1e-8


@dataclass(frozen=True)
class Score:
    """The score of one member on a split.

    Attributes:
        loss: nats per target.
        accuracy: share of targets that are predicted.
        macro_batch: mean accuracy over classes per batch (classes that are predicted but never a target count 0),
            averaged over batches by their rows. The published implementation of MAD calls this accuracy.
    """

    loss: float
    accuracy: float
    macro_batch: float


class Members:
    """Models of one shape whose parameters are stacked, and their losses and gradients in one batched call.

    Attributes:
        size: number of members.
        vectorised: False once a layer without a vmap rule was found.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: torch.device,
        precision: Literal["float32", "bfloat16"],
        loss: Callable[[nn.Module], Loss],
        vectorised: bool = True,
        fused_biases: bool = True,
    ):
        """Copies the weights of the models.

        Args:
            models, precision, loss, vectorised: as for `Ensemble`.
            fused_biases: whether biases become columns of the weights on a GPU (`linnet.train.together`).

        Raises:
            ValueError: the models have different shapes, or running statistics (`norm: batchnorm`).
        """
        shapes = [{name: p.shape for name, p in model.named_parameters()} for model in models]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError("ensemble: the models have different parameters; give models of one configuration")
        if any(isinstance(module, BatchNorm) for module in models[0].modules()):
            raise ValueError("ensemble: norm: batchnorm keeps running statistics; train these models one by one")
        self.size, self.device, self.vectorised = len(models), device, vectorised
        self._autocast = precision == "bfloat16"
        self._take_weights(models, loss, fused_biases)

    def _take_weights(self, models: Sequence[nn.Module], loss: Callable[[nn.Module], Loss], fused_biases: bool) -> None:
        """Copies the parameters of each member into one row of a tensor, the layout of AdamW and checkpoints."""
        parameters, buffers = stack_module_state([_Call(model, loss) for model in models])
        self._widths = [p[0].numel() for p in parameters.values()]
        self._values = torch.cat([p.detach().flatten(1) for p in parameters.values()], 1).to(self.device)
        parts = zip(parameters.items(), self._values.split(self._widths, 1), strict=True)
        self._parameters = {name: x.view(p.shape).detach().requires_grad_() for (name, p), x in parts}
        # Tensors that are equal in all members stay one tensor, so that ops may treat them as shared.
        self._shared = {name: b[0].to(self.device) for name, b in buffers.items() if bool((b == b[:1]).all())}
        self._buffers = {name: b.to(self.device) for name, b in buffers.items() if name not in self._shared}
        template = copy.deepcopy(models[0])
        if self.device.type == "cuda":
            multiply(template, biases=fused_biases)
        self._call = _Call(template, loss).to(self.device)
        # Dropout: each member has the seed of its own masks, and `_step` writes the number of the step next to it.
        if (place := dropout.place_of(template)) is not None:
            place.given = True
        places = {**self._shared, **self._buffers}.items()
        self._mask_places = [value for name, value in places if name.endswith("dropout_position.value")]

    def _gradients(self, losses: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Returns the mean losses [M], and the gradient of each stacked parameter, [M, ...]; None for an unused one."""
        leaves, told = list(self._parameters.values()), losses if losses.ndim == 1 else losses[:, 0]
        # Stay in this thread: a capture records only its own thread, and switching threads takes time.
        with torch.autograd.set_multithreading_enabled(False):
            return told.detach(), torch.autograd.grad(losses.sum(), leaves, allow_unused=True)

    def _map_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._map(_mean_loss, tokens, targets)

    def _context(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self._autocast else contextlib.nullcontext()

    def _run(self, function: Callable[[], Tensor]) -> Tensor:
        """Calls under autocast. If a layer has no vmap rule, calls again without vmap, and so do all later calls."""
        with self._context():
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
                warnings.warn(f"a layer has no vmap rule, so members run one after another: {reason}", stacklevel=4)
                self.vectorised = False
                return function()

    def _map(self, function: Callable[..., Tensor], *data: Tensor) -> Tensor:
        """Returns `function(call, *data)` of all members, stacked; data with three dimensions have one slice each."""

        def one(parameters, buffers, *own):
            state = {**parameters, **buffers, **self._shared}
            return function(lambda *arguments: functional_call(self._call, state, arguments), *own)

        dims = [0 if x.ndim == 3 else None for x in data]
        if self.vectorised:
            return torch.vmap(one, in_dims=(0, 0, *dims))(self._parameters, self._buffers, *data)
        outputs = []
        for m in range(self.size):
            slices = [x[m] if dim == 0 else x for x, dim in zip(data, dims, strict=True)]
            parameters = {name: p[m] for name, p in self._parameters.items()}
            outputs.append(one(parameters, {name: b[m] for name, b in self._buffers.items()}, *slices))
        return torch.stack(outputs)


class Ensemble(Members):
    """Members of one shape, trained in step.

    Attributes:
        alive: bool [M] on the device, False from the first loss that was not finite.
        compiled: False once `torch.compile` failed.
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
        capture: bool = True,
        vectorised: bool = True,
        betas: tuple[float, float] = BETAS,
        constant: bool = False,
        no_decay: Collection[str] = (),
        loss: Callable[[nn.Module], Loss] = attrgetter("loss"),
    ):
        """Copies the weights of the models.

        Args:
            models: each returns logits when called.
            learning_rates, weight_decays: one per model; the decay acts on every parameter outside `no_decay`.
            steps: updates of the whole run, over which the learning rates go to zero.
            precision: bfloat16 is autocast; parameters and AdamW's moments are float32 in both cases.
            compile: whether batches of the size of the first go through `torch.compile`; smaller ones never do.
            capture: whether a step on a GPU, and the scoring of a batch, is one CUDA graph.
            vectorised: False runs members one after another.
            betas: betas of AdamW. constant: True for constant learning rates instead of a cosine to zero.
            no_decay: names of the parameters of a model that are excluded from weight decay.
            loss: returns the loss of a model, (tokens, targets) -> (sum in nats, number of targets), as
                `Objective.loss` does; by default the model's own loss.

        Raises:
            ValueError: no models, models of different shapes, numbers of rates or decays that differ from the models',
            or models with running statistics (`norm: batchnorm`), which members cannot share.
        """
        if not models or not len(models) == len(learning_rates) == len(weight_decays):
            raise ValueError(
                f"ensemble: {len(models)} models, {len(learning_rates)} learning rates and {len(weight_decays)} weight "
                "decays; give the same number of each, at least one"
            )
        # A compiler fuses a bias into the following operation.
        super().__init__(models, torch.device(device), precision, loss, vectorised, fused_biases=not compile)
        self.steps, self.betas, self.constant = steps, betas, constant
        self.step_number, self.compiled = 0, compile
        self._first, self._second = torch.zeros_like(self._values), torch.zeros_like(self._values)
        self._rates, self._decays = (
            torch.tensor(x, dtype=torch.float32, device=self.device)[:, None] for x in (learning_rates, weight_decays)
        )
        if no_decay:
            decays = [name.removeprefix("model.") not in no_decay for name in self._parameters]
            self._decays = self._decays * self._spread(decays)
        self._used: Tensor | None = None
        self.alive = torch.ones(self.size, dtype=torch.bool, device=self.device)
        self._last_step = torch.full((self.size,), -1, device=self.device)
        self._steps_made = torch.zeros((), dtype=torch.float64, device=self.device)
        self._compiled_losses, self._compiled_update = self._map_losses, _adamw
        self._batch_shape: torch.Size | None = None
        if compile:
            torch.compiler.reset()  # PyTorch limits recompilations per function, and earlier ensembles count
            self._compiled_losses, self._compiled_update = map(torch.compile, (self._map_losses, _adamw))
        capture = capture and self.device.type == "cuda"
        self._advance: Callable[..., Tensor] = self._step
        self._sums: Callable[..., Tensor] = self._batch_sums
        if capture:
            self._advance = step = Captured(self._step, self.device)
            # Scoring after each epoch of a few steps takes longer than they do if its kernels are launched one by one.
            self._sums = Captured(self._batch_sums, self.device, "the scoring of a batch", beside=step)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Makes one update of every living member on the mean loss of its batch.

        Args:
            tokens, targets: int64 [B, T], the same for all members, or [M, B, T].

        Returns:
            The losses before the update, nats per target, [M] on the device; the host does not wait for them.
        """
        losses = self._advance(tokens, targets)
        self.step_number += 1
        return losses

    @property
    def captured(self) -> bool:
        """Whether a step has been captured as a CUDA graph."""
        return isinstance(self._advance, Captured) and self._advance.graphs > 0 and not self._advance.failed

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that steps change, by name, on the device and without copies."""
        return {
            "parameters": self._values,
            "first_moments": self._first,
            "second_moments": self._second,
            "alive": self.alive,
            "last_step": self._last_step,
            "steps_made": self._steps_made,
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the `state` of an ensemble of the same models. Waits for the device.

        Raises:
            ValueError: the names or shapes of the state differ.
        """
        tensors = self.state()
        if {name: x.shape for name, x in state.items()} != {name: x.shape for name, x in tensors.items()}:
            raise ValueError("ensemble: the state belongs to other models; give a state of an ensemble of these models")
        for name, x in tensors.items():
            x.copy_(state[name])
        self.step_number = int(self._steps_made)

    def diverged_at(self) -> list[int | None]:
        """Returns for each member the first step whose loss was not finite, or None. Waits for the device."""
        lives, last = self.alive.tolist(), self._last_step.tolist()
        return [None if living else step + 1 for living, step in zip(lives, last, strict=True)]

    def member(self, index: int) -> dict[str, Tensor]:
        """Returns copies of the parameters of one member, by their names in its model."""
        return {name.removeprefix("model."): p[index].detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor, batch_size: int) -> list[Score]:
        """Returns loss and accuracies of each member on a split: int64 [N, T] for all members, or [M, N, T]."""
        rows = tokens.shape[-2]
        sums = torch.zeros(self.size, 4, dtype=torch.float64, device=self.device)
        for start in range(0, rows, batch_size):
            batch = slice(start, start + batch_size)
            sums += self._sums(*(x[..., batch, :].to(self.device) for x in (tokens, targets)))
        nll, right, asked, macro = sums.unbind(1)
        table = torch.stack([nll / asked, right / asked, macro / rows], dim=1).tolist()
        return [Score(*row) for row in table]

    @torch.no_grad()
    def _batch_sums(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns sums over a batch, [M, 4]: nats, targets that are predicted, targets, and rows x `macro_batch`."""
        with evaluating(self._call):
            logits = self._run(lambda: self._map(lambda call, x: call(x), tokens)).float()
        answers = targets.expand(logits.shape[:-1])
        kept = answers != IGNORE
        losses = F.cross_entropy(logits.flatten(0, -2), answers.flatten(), ignore_index=IGNORE, reduction="none")
        predicted = logits.argmax(-1)
        parts = [
            losses.view(self.size, -1).double().sum(1),
            ((predicted == answers) & kept).flatten(1).sum(1),
            kept.flatten(1).sum(1),
            tokens.shape[-2] * _macro(predicted, answers, kept, logits.shape[-1]),
        ]
        return torch.stack([part.double() for part in parts], 1)

    def _spread(self, flags: Sequence[bool]) -> Tensor:
        """Repeats one flag per parameter tensor for each of its numbers, [P]."""
        return torch.tensor(flags).repeat_interleave(torch.tensor(self._widths)).to(self.device)

    def _step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Makes one step on the device, in place."""
        for place in self._mask_places:
            place[..., 1] = self._steps_made
        losses, gradients = self._compiled_or(self._differentiate_compiled, self._differentiate, tokens, targets)
        with torch.no_grad():
            self.alive &= losses.isfinite()
            torch.where(self.alive, self._steps_made.long(), self._last_step, out=self._last_step)
            moves = self.alive[:, None]
            if any(gradient is None for gradient in gradients):  # as in AdamW: no gradient, no update
                if self._used is None:
                    self._used = self._spread([gradient is not None for gradient in gradients])
                moves = moves & self._used
            leaves = self._parameters.values()
            filled = (torch.zeros_like(p) if g is None else g for p, g in zip(leaves, gradients, strict=True))
            gradient = torch.cat([g.reshape(self.size, -1) for g in filled], 1)
            factor = 1.0 if self.constant else 0.5 * (1 + torch.cos(self._steps_made * (math.pi / self.steps)))
            self._steps_made += 1
            self._compiled_or(
                self._compiled_update, _adamw, self._values, self._first, self._second, gradient, self._rates * factor,
                self._decays, moves, self._steps_made, self.betas,
            )  # fmt: skip
        return losses

    def _compiled_or(self, compiled: Callable, plain: Callable, *arguments):
        """Calls the compiled function; after its first failure, calls the plain one."""
        if self.compiled:
            try:
                return compiled(*arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Dynamo, Inductor and Triton raise different classes
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                warnings.warn(f"torch.compile failed, so the models run without it: {reason}", stacklevel=5)
                self.compiled = False
        return plain(*arguments)

    def _differentiate_compiled(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        if self._batch_shape is None:
            self._batch_shape = tokens.shape
        if tokens.shape != self._batch_shape:
            return self._differentiate(tokens, targets)
        with self._context():
            losses = self._compiled_losses(tokens, targets)
        return self._gradients(losses)

    def _differentiate(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        return self._gradients(self._run(lambda: self._map_losses(tokens, targets)))


def _adamw(
    values: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    rates: Tensor,
    decays: Tensor,
    moves: Tensor,
    step: Tensor,
    betas: tuple[float, float],
) -> None:
    """Makes step number `step` (the first is 1) of AdamW on all members, in place.

    Args:
        values, first, second, gradient: [M, P]. rates: [M, 1]. decays: [M, 1] or [M, P].
        moves: bool, broadcast to [M, P]; values stay where it is False.
    """
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    scale = second.sqrt().div_((1 - betas[1] ** step).sqrt()).add_(EPS)
    after = torch.addcmul(values * (1 - rates * decays), rates / (1 - betas[0] ** step), first / scale, value=-1)
    values.copy_(torch.where(moves, after, values))


class _Call(nn.Module):
    """A model as one call: returns the loss if targets are given, else logits."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Loss]):
        super().__init__()
        self.model, self._loss = model, training_loss(model, loss(model))

    def forward(self, tokens: Tensor, targets: Tensor | None = None):
        if targets is not None:
            return self._loss(tokens, targets)
        output = self.model(tokens)
        return output[0] if isinstance(output, tuple) else output


def _mean_loss(call: Callable, tokens: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss; [2] if layers add auxiliary losses: the mean loss and the sum of auxiliary losses."""
    total, count, *auxiliary = call(tokens, targets)
    return torch.stack([total / count, *auxiliary]) if auxiliary else total / count


def cosine(step: int, steps: int) -> float:
    """Returns the factor of the learning rate at update `step` (the first is 0) of `steps`: a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _macro(given: Tensor, answers: Tensor, kept: Tensor, classes: int) -> Tensor:
    """Returns the mean accuracy over classes that are targets or predictions: int64 [M, B, T] -> float64 [M]."""
    given, answers, kept = given.flatten(1), answers.flatten(1).clamp(min=0), kept.flatten(1).double()
    zeros = torch.zeros(len(given), classes, dtype=torch.float64, device=given.device)
    right = zeros.scatter_add(1, answers, kept * (given == answers))
    asked = zeros.scatter_add(1, answers, kept)
    seen = asked + zeros.scatter_add(1, given, kept)
    return (right / asked.clamp(min=1)).sum(1) / (seen > 0).sum(1).clamp(min=1)


# Trains runs that differ in their seed or rates together, in lockstep, with one batched forward and backward per step.
#
# Each run keeps its folder, record, checkpoints, guard and optimizer (`linnet.train.loop.Run`), so a run of a bundle
# can go on alone and the other way round. The bundle computes only the gradients: the parameters of all members are
# stacked, and those of each model are views of the stack. A run equals the same run alone up to rounding.

_OWN = {"name", "architecture", "seed"}  # keys in which members may differ, beside those of the optimizer below
_OWN_RATES = {"learning_rate", "weight_decay"}


def alone_because(config: TrainingConfig) -> str | None:
    """Returns the key and value for which a run can only be trained alone, None if it can be a member of a bundle."""
    if not isinstance(config, TrainConfig):
        return f"objective: {config.objective}"
    settings = {
        "data.packing": (config.data.packing, "cross"),
        "accumulation": (config.accumulation, 1),
        "batch_ramp": (config.batch_ramp, None),
        "average": (config.average, None),
        "precision": (config.precision, config.autocast_precision),
        "guard.policy": (config.guard.policy, "stop"),
        "run.compile": (config.run.compile, False),
        "run.recompute": (config.run.recompute, "none"),
        "parallel": (config.parallel.devices, 1),
        "init_from": (config.init_from, None),
    }
    return next((f"{key}: {value}" for key, (value, needed) in settings.items() if value != needed), None)


def shape_of(config: TrainingConfig) -> str:
    """Returns a digest that is equal for runs that can share a bundle."""
    values = config.model_dump(mode="json", exclude=_OWN)
    values["optimizer"] = {key: value for key, value in values["optimizer"].items() if key not in _OWN_RATES}
    return digest(values)


def bundles(configs: Sequence[TrainingConfig], most: int) -> list[list[int]]:
    """Returns the indices of runs that are trained together, at most `most` each, in order of their first member."""
    groups: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        alone = most == 1 or alone_because(config) is not None
        groups.setdefault(str(index) if alone else shape_of(config), []).append(index)
    return [group[at : at + most] for group in groups.values() for at in range(0, len(group), most)]


def train_together(configs: Sequence[TrainingConfig], root: str | Path, cache: str | Path) -> list[RunFolder]:
    """Trains runs of one `shape_of` together, or resumes them. Runs that are done are left as they are.

    Members that were stopped at different steps are trained in groups of one step, one group after another.

    Raises:
        ConfigError, CheckpointError, LockedError, KeyboardInterrupt: as `linnet.train.train`, for any of the runs.
        ValueError: the runs cannot share a bundle.
    """
    if len({shape_of(config) for config in configs}) > 1 or any(map(alone_because, configs)):
        raise ValueError("bundle: these runs cannot be trained together; ask `bundles` which ones can")
    if len(configs) == 1:
        return [train(configs[0], root, cache)]
    folders, runs = [], []
    with ExitStack() as stack:
        for config in map(resolve, configs):
            place = find(config, root, contents_of(config, cache))
            folder, config = place.folder, as_begun(place, config)
            folders.append(folder)
            trust.remember(config.plugins, config.includes)
            if not folder.done:
                needs = checked(config, folder, cache)
                if claim(stack, place, config.model_dump(mode="json")):
                    runs.append((config, folder, place.digest, needs))
        if not runs:
            return folders
        first, *_, needs = runs[0]
        device, rows = needs.device, first.batch_size * len(runs)
        tokens = needs.objective.row_tokens(first) * rows
        stack.enter_context(devices.threads(device, first.model.d_model, tokens))
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                members = [Run(*each, None) for each in runs]
                for run in members:
                    run.open(stack)
                with graceful_stop() as stop:
                    for group in _by_step(members):
                        _Lockstep(group, stop).run()
                    if stop.signal is not None:  # it came while the last run was finished
                        stop.end()
        except Exception as error:
            text = f"{error}\n" if isinstance(error, ConfigError) else traceback.format_exc()
            for _, folder, *_ in runs:
                with suppress(OSError):  # a full disk must not replace the original error
                    if not folder.done:
                        folder.write_error(text)
            raise
    return folders


def _by_step(runs: Sequence[Run]) -> list[list[Run]]:
    groups = grouped((run.session.step, run) for run in runs)
    return [groups[step] for step in sorted(groups)]


class _Lockstep:
    """Runs at one step, which go on together until each of them ends."""

    def __init__(self, runs: Sequence[Run], stop: Stop):
        self.stop = stop
        self.steps: dict[Run, Iterator[Flags]] = {run: run.advance(stop) for run in runs}
        for run in runs:
            run.bundle = len(runs)

    def run(self) -> None:
        gradients: _Gradients | None = None
        while waiting := self._next():
            if gradients is None or gradients.runs != list(waiting):  # a run that diverged has left
                gradients = _Gradients(list(waiting))
            gradients.take(self._agreed(waiting))

    def _next(self) -> dict[Run, Flags]:
        """Lets each run go on to its next step. Returns the flags of those that have one; the others are finished."""
        waiting: dict[Run, Flags] = {}
        asked: BaseException | None = None
        for run, steps in list(self.steps.items()):
            try:
                waiting[run] = next(steps)
            except StopIteration:
                run.finish(run.status)
                del self.steps[run]
            except (KeyboardInterrupt, SystemExit) as error:  # a signal, after this run has saved its checkpoint
                asked = error
                del self.steps[run]
        if asked is not None:
            for run in waiting:  # those that went on before the signal came
                with suppress(type(asked)):
                    run.pause(self.stop)
            raise asked
        return waiting

    def _agreed(self, waiting: dict[Run, Flags]) -> Flags:
        """Returns the flags that are set for any run. Where one run is to save, all do: they resume at one step."""
        due, failed = (any(flags) for flags in zip(*waiting.values(), strict=True))
        if due:
            for run in waiting:
                run.saved_at = float("-inf")
        return due, failed


class _Gradients:
    """The gradients of runs that are at one step."""

    def __init__(self, runs: list[Run]):
        self.runs = runs
        self.sessions = [run.session for run in runs]
        first = self.sessions[0]
        self._views: _Views | None = None
        if len(runs) > 1:
            models = [session.model for session in self.sessions]
            self._views = _Views(models, first.device, first.config.precision, first.objective.loss)
            self._pass: Callable[..., Tensor] = self._views.whole_pass
            if first.config.run.graph and first.device.type == "cuda":
                self._pass = Captured(self._views.whole_pass, first.device)

    def take(self, flags: Flags) -> None:
        """Stores the gradient of its next batch in each session."""
        if self._views is None:
            self.sessions[0].gradients(flags)
            return
        batches = [session.next_batch() for session in self.sessions]
        tokens, targets = (torch.stack(parts) for parts in zip(*batches, strict=True))
        self._views.set_step(self.sessions[0].step)
        numbers = self._pass(tokens, targets)
        for index, session in enumerate(self.sessions):
            session.take_gradients(numbers[index], self._views.gradients_of(index), flags)


class _Views(Members):
    """Members whose models read their weights in the stack, so that an update of a model is one of the stack."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: torch.device,
        precision: Literal["float32", "bfloat16"],
        loss: Callable[[nn.Module], Loss],
    ):
        super().__init__(models, device, precision, loss)
        for index, model in enumerate(models):
            named = dict(model.named_parameters())
            for name, stacked in self._parameters.items():
                named[name.removeprefix("model.")].data = stacked.detach()[index]
        self._flat = torch.zeros_like(self._values)
        self._used: list[bool] = []

    def set_step(self, step: int) -> None:
        """Selects the masks of dropout."""
        for place in self._mask_places:
            place[..., 1] = step

    def whole_pass(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Computes the gradients of all members, for `gradients_of`.

        Returns:
            The mean loss, the norm of the gradient, and the auxiliary losses if there are some, [M, 2 or 3].
        """
        losses = self._run(lambda: self._map_losses(tokens, targets))
        _, gradients = self._gradients(losses)
        leaves = self._parameters.values()
        filled = (torch.zeros_like(p) if g is None else g for p, g in zip(leaves, gradients, strict=True))
        torch.cat([g.reshape(self.size, -1) for g in filled], 1, out=self._flat)
        self._used = [g is not None for g in gradients]
        losses = losses.detach().view(self.size, -1)
        norms = torch.linalg.vector_norm(self._flat, dim=1, keepdim=True)
        return torch.cat([losses[:, :1], norms, losses[:, 1:]], 1)

    def gradients_of(self, index: int) -> list[Tensor | None]:
        """Returns the gradient of each parameter of a member, as views of one tensor."""
        parts = self._flat[index].split(self._widths)
        shapes = (p.shape[1:] for p in self._parameters.values())
        views = zip(parts, shapes, self._used, strict=True)
        return [part.view(shape) if used else None for part, shape, used in views]
