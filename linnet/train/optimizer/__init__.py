"""The step's arithmetic: optimizers, the learning rate as a function of the step, the average of the weights.

AdamW steps everything, or Muon the hidden matrices and AdamW the rest. Weight decay acts on hidden matrices and an
untied head: the weights of `nn.Linear`. Embeddings (tied ones too), gains, biases and the layers' own parameters
(decays, LRPE angles, TPE coefficients) are not decayed, because zero is not a neutral value for them.

AdamW: I. Loshchilov and F. Hutter, arXiv:1711.05101. Muon: K. Jordan, kellerjordan.github.io/posts/muon; its update is
scaled to the size of AdamW's (J. Liu et al., arXiv:2502.16982, section 2.2), so both share one learning rate.

Learning-rate schedules are pure functions of the step, so that resuming needs no saved state.

The exponential moving average of the weights is kept beside them and scored with them. After update t (from 0) of the
optimizer, a <- d a + (1 - d) w with d = decay, or with a warm-up min(decay, (1 + t) / (10 + t)), so that the first
weights are forgotten quickly. The average has the precision of the weights (float32) and their layout: sharded weights
have a sharded average. B. T. Polyak and A. B. Juditsky, SIAM J. Control Optim. 30 (1992).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from torch import Tensor, nn

from linnet.config import Config, ConfigError, added, grouped, nearest
from linnet.layers.base import CHANNELS, MIXERS
from linnet.models.parametrisation import rate_factors
from linnet.ops import compat_torch

if TYPE_CHECKING:
    from linnet.parallel.mesh import Mesh

import contextlib
import math
from collections.abc import Iterator
from typing import Self

from pydantic import model_validator

_Beta = Annotated[float, Field(ge=0, lt=1)]


LARGEST_INDEPENDENT = 0.01  # of `weight_decay` with `decay: independent`


class OptimizerConfig(Config):
    """The optimizer and its settings.

    Attributes:
        name: `adamw`, or `muon` (hidden matrices by Muon, the rest by AdamW).
        learning_rate: peak value, which the schedule scales.
        betas, eps: settings of AdamW.
        weight_decay: decoupled from the gradient; acts on the weights of linear layers.
        decay: `coupled`: a step multiplies these weights by 1 - rate * weight_decay, as in PyTorch; `independent`: by
            1 - factor of the schedule * weight_decay, so that another rate, or that of another width, has the same
            decay. It needs a much smaller weight_decay, such as 1e-4.
        exempt: names of layers whose weights are not decayed, such as hyena (paper 004, appendix C.2). Models without
            these layers are trained as if it were empty. Muon refuses it.
        momentum: momentum of Muon (Nesterov).
        clip: largest norm of the whole gradient; null: no clipping.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), strict=False)
    eps: float = Field(1e-8, ge=1e-30, le=1)
    weight_decay: float = Field(0.1, ge=0, le=1e3)
    decay: Literal["coupled", "independent"] = Field("coupled", exclude_if=lambda decay: decay == "coupled")
    exempt: list[str] = []
    momentum: float = Field(0.95, ge=0, lt=1)
    clip: float | None = Field(1.0, ge=1e-6, le=1e9)

    @field_validator("decay")
    @classmethod
    def _small(cls, decay: str, info: ValidationInfo) -> str:
        if decay == "independent" and info.data.get("weight_decay", 0.0) > LARGEST_INDEPENDENT:
            weight_decay = info.data["weight_decay"]
            raise ValueError(
                f"independent removes weight_decay: {weight_decay:g} of each matrix in every step; use a weight_decay "
                f"of at most {LARGEST_INDEPENDENT:g}, such as {1e-3 * weight_decay:g} (rate times coupled decay)"
            )
        return decay

    @field_validator("exempt")
    @classmethod
    def _layers(cls, exempt: list[str], info: ValidationInfo) -> list[str]:
        known = {*MIXERS, *CHANNELS}
        problems = [f"no layer {name!r}; {nearest(name, known)}" for name in exempt if name not in known]
        if exempt and info.data.get("name") == "muon":
            problems.append("Muon decays all matrices alike; use name: adamw, or remove exempt")
        if problems:
            raise ValueError("; ".join(problems))
        return exempt


class Optimizer:
    """The torch optimizers of one model, stepped together; its state is named tensors, never a pickle.

    On several ranks each updates its shards as plain tensors, which share the memory of the model's DTensors: calls on
    DTensors would cost the host a dispatch per tensor. State exists from the start, so that a checkpoint can be read
    into it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        mesh: "Mesh | None" = None,
        split_dims: Mapping[str, int] | None = None,
    ):
        """Groups the parameters of `model` (already on its device).

        Args:
            mesh: the ranks over which the model is sharded; None is one process.
            split_dims: name -> dimension in which tensor parallelism cuts it, of the tensors that it cuts.
        """
        self.config, self.mesh = config, mesh
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        hidden, decayed, rest = split(model, config.exempt)
        factors = rate_factors(model, config.name)
        self._factor_of = {p: factors.get(name, 1.0) for name, p in self.parameters.items()}
        # Parameter of the model -> parameter that is updated: itself, or its shard.
        self._own: dict[nn.Parameter, nn.Parameter] = {p: p for p in self.parameters.values()}
        if mesh is not None:
            self._own = {p: nn.Parameter(p.detach().to_local()) for p in self.parameters.values()}
            self._counted = self._distinct(mesh, split_dims or {})
            self._matrices = {self._own[p] for p in hidden} if config.name == "muon" else set()
        adamw: list[dict[str, Any]] = [
            {"params": decayed if config.name == "muon" else hidden + decayed, "weight_decay": config.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [
                    part | {"params": [self._own[p] for p in part["params"]]}
                    for group in adamw
                    for part in self._by_factor(group["params"], group["weight_decay"])
                ],
                lr=config.learning_rate,
                betas=config.betas,
                eps=config.eps,
                fused=True,  # one kernel for all parameters, also on the CPU
            )
        ]
        if config.name == "muon" and hidden:
            settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "momentum": config.momentum}
            if mesh is None:
                groups = self._by_factor(hidden, config.weight_decay)
                self._parts.append(torch.optim.Muon(groups, **settings, adjust_lr_fn="match_rms_adamw"))
            else:
                self._parts.append(self._sharded_muon(hidden, mesh, split_dims or {}, settings))
        self._groups = [(group, group.get("factor", 1.0)) for part in self._parts for group in part.param_groups]
        self._all = list(self._own.values())
        if mesh is not None:
            self.prepare()

    def _by_factor(self, parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
        """Returns parameter groups of the model's parameters, one for each factor of the learning rate."""
        groups = grouped((self._factor_of[parameter], parameter) for parameter in parameters)
        return [
            {"params": members, "factor": factor, "weight_decay": weight_decay * self._decay_factor(factor)}
            for factor, members in groups.items()
        ]

    def _decay_factor(self, factor: float) -> float:
        """Returns what the weight decay is multiplied by, so that its product with the rate is that of `decay`."""
        return 1.0 / (self.config.learning_rate * factor) if self.config.decay == "independent" else 1.0

    def _sharded_muon(
        self, hidden: list[nn.Parameter], mesh: "Mesh", split_dims: Mapping[str, int], settings: dict
    ) -> torch.optim.Optimizer:
        from linnet.parallel.muon import Matrix, Muon

        names = {p: name for name, p in self.parameters.items()}
        matrices = [
            Matrix(self._own[p], tuple(p.shape), split_dims.get(names[p]), factor, self._decay_factor(factor))
            for p in hidden
            for factor in (self._factor_of[p],)
        ]
        return Muon(matrices, mesh, **settings)

    def _distinct(self, mesh: "Mesh", split_dims: Mapping[str, int]) -> set[nn.Parameter]:
        """Returns the shards whose elements this rank counts in the norm: each element of the model on one rank."""
        if mesh.devices.get_local_rank("dp_replicate"):
            return set()
        named = self.parameters.items()
        return {self._own[p] for name, p in named if mesh.tp_rank == 0 or name in split_dims}

    def prepare(self) -> None:
        """Sets the state to that before the first step."""
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    if isinstance(part, torch.optim.AdamW):
                        new = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
                        new["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    else:
                        new = {"momentum_buffer": torch.zeros_like(parameter.detach())}
                    part.state[parameter] = new

    def step(self, factor: float) -> None:
        """Updates the weights with `factor` times the peak learning rate and frees the gradients."""
        rate = factor * self.config.learning_rate
        for group, its in self._groups:
            group["lr"] = rate * its
        for part in self._parts:
            part.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter, shard in self._own.items():
            parameter.grad = shard.grad = None

    def gradient_norm(self) -> Tensor:
        """Returns the norm of the whole gradient, a scalar on the parameters' device."""
        gradients = [p.grad for p in self._all if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack(compat_torch.foreach_norm(gradients)))

    @torch.no_grad()
    def agreed_norm(self, flags: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Returns the norm of the whole gradient, and on how many ranks each flag is set, on the device.

        One all-reduce, without waiting for the device. Every rank must call it after the backward pass.
        """
        for parameter, shard in self._own.items():
            # A rank without rows of a parameter has an empty shard. AdamW's kernels need not see it; Muon must know
            # that the other ranks have a gradient.
            gradient = parameter.grad if shard.numel() or shard in self._matrices else None
            shard.grad = None if gradient is None else gradient.to_local()
        counted = (tensor for tensor in self._all if tensor.grad is not None and tensor in self._counted)
        gradients = [tensor.grad for tensor in counted if tensor.numel()]
        total = torch.zeros(1 + len(flags), dtype=torch.float64, device=self._all[0].device)
        if gradients:
            norm = torch.linalg.vector_norm(torch.stack(compat_torch.foreach_norm(gradients)))
            total[0] = norm.double().square()  # in float64 the square root below gives the norm back exactly
        for place, flag in enumerate(flags, start=1):
            if flag:
                total[place].fill_(1.0)
        torch.distributed.all_reduce(total)
        return total[0].sqrt().to(torch.promote_types(self._all[0].dtype, torch.float32)), total[1:]

    def clip(self, norm: Tensor | float) -> None:
        """Scales gradients of norm `norm` down to `clip`. With a tensor the host does not wait for a GPU; a number
        gives the same bits, so that training does not depend on when losses are read (for example for the record)."""
        limit = self.config.clip
        if limit is None:
            return
        scale = torch.clamp(limit / (torch.as_tensor(norm, dtype=torch.float32) + 1e-12), max=1.0)
        if isinstance(norm, float):
            scale = scale.item()
            if scale == 1.0:
                return
        compat_torch.foreach_multiply_([p.grad for p in self._all if p.grad is not None], scale)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the whole state: `<parameter>.<name of the state>` -> tensor."""
        states = [part.state for part in self._parts]
        return {
            f"{name}.{key}": self._as_parameter(value, parameter)
            for name, parameter in self.parameters.items()
            for state in states
            for key, value in state.get(self._own[parameter], {}).items()
        }

    def _as_parameter(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """Returns a state of a shard as a DTensor with the layout of its parameter, in the same memory."""
        if self.mesh is None or not value.ndim:
            return value
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restores a state of `tensors()`. Raises `ConfigError` if it belongs to another optimizer or model."""
        states: dict[str, dict[str, Tensor]] = {}
        for full, value in tensors.items():
            name, _, key = full.rpartition(".")
            states.setdefault(name, {})[key] = value
        if unknown := sorted(set(states) - set(self.parameters)):
            raise ConfigError([f"optimizer state of an unknown parameter {unknown[0]}"], "checkpoint")
        for part in self._parts:
            part.state.clear()
            for group in part.param_groups:
                for parameter in group["params"]:
                    part.state[parameter] = {}
        owner = {id(p): part for part in self._parts for group in part.param_groups for p in group["params"]}
        for name, parameter in self.parameters.items():
            owner[id(parameter)].state[parameter] = {
                key: value.to(parameter.device) for key, value in states.get(name, {}).items()
            }


def split(
    model: nn.Module, exempt: Sequence[str] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Returns the parameters as (hidden matrices, other decayed matrices, the rest), each once, in the model's order.

    Hidden matrices are the weights of linear layers inside `model.backbone`, outside of layers named in `exempt`.
    """
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = tuple((MIXERS | CHANNELS)[name] for name in exempt)
    kept = {id(p) for m in model.modules() if isinstance(m, layers) for p in m.parameters()} | embedded
    hidden_ids = {id(m.weight) for m in model.backbone.modules() if isinstance(m, nn.Linear)} - kept
    decayed_ids = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - kept - hidden_ids
    parameters = [p for p in model.parameters() if p.requires_grad]
    hidden = [p for p in parameters if id(p) in hidden_ids]
    decayed = [p for p in parameters if id(p) in decayed_ids]
    return hidden, decayed, [p for p in parameters if id(p) not in hidden_ids | decayed_ids]


class ScheduleConfig(Config):
    """The learning rate over a run, as a fraction of its peak.

    Schedules: `constant`; `cosine` (half a cosine from the peak to `final`); `linear` (a straight line to `final`);
    `wsd` (warm-up, stable, decay: constant, then a straight line to `final` over the last `decay` of the steps);
    `inverse_sqrt` (peak / sqrt(step / warm-up), "Attention Is All You Need", section 5.3); `triangle` (from a quarter
    of the peak straight up to it at 75 % of the steps, then to 0, without a warm-up; "Cramming", arXiv:2212.14034,
    over steps in place of hours).
    """

    name: Literal["constant", "cosine", "wsd", "inverse_sqrt", "linear", "triangle"] = Field(
        "cosine", description="shape of the schedule after the warm-up"
    )
    warmup: float = Field(
        0.02,
        ge=0,
        le=1 << 40,
        description="a straight line from 0 to the peak; below 1 a fraction of the steps, from 1 on a number of steps; "
        "triangle has none",
    )
    start: float | None = added(
        None,
        ge=0,
        lt=1,
        description="learning rate of the first update, as a fraction of the peak, which the update after the warm-up "
        "reaches, as in fairseq; null: the warm-up of w steps begins with 1/w of the peak and ends with all of it",
    )
    final: float = Field(
        0.1, ge=0, le=1, description="learning rate at the end, as a fraction of the peak (cosine, linear, wsd)"
    )
    decay: float = Field(
        0.2,
        ge=1e-6,
        le=1 << 40,
        description="length of the last phase of wsd; below 1 a fraction of the steps, else a number",
    )
    length: int | None = added(
        None,
        ge=1,
        description="steps of the whole cosine, warm-up included, where the training has another number of them: a "
        "shorter training ends before the rate is at `final`, and a longer one raises it again; null: the training's",
    )

    @model_validator(mode="after")
    def _triangle_has_its_own_warmup(self) -> Self:
        usual = type(self).model_fields["warmup"].default  # which every saved configuration has
        if self.name == "triangle" and self.warmup != usual:
            raise ValueError(f"warmup: {self.warmup:g} has no effect, name: triangle has its own rise; leave it out")
        return self

    @model_validator(mode="after")
    def _start_of_warmup(self) -> Self:
        if self.start is not None and (self.name == "triangle" or not self.warmup):
            why = "name: triangle has its own" if self.name == "triangle" else "warmup is 0"
            raise ValueError(f"start: {self.start:g} is of the warm-up, and {why}; leave it out")
        return self

    @model_validator(mode="after")
    def _length_of_cosine(self) -> Self:
        if self.length is not None and self.name != "cosine":
            what = f"length: {self.length} is of the cosine, and name is {self.name}, which has none"
            raise ValueError(f"{what}; leave it out")
        if self.length is not None and (warmup := length(self.warmup, self.length)) > self.length - 2:
            problem = f"length: {self.length} has no room for a cosine after {warmup} steps of warm-up"
            fix = f"use at least {warmup + 2}, or a shorter warmup"
            raise ValueError(f"{problem}; {fix}")
        return self


def factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Returns the learning rate of update `step` (0 is the first) of `steps`, as a fraction of the peak.

    The first update of a warm-up of w steps has 1/w of the peak, the w-th the whole peak; the last update of a decaying
    schedule has `final`. With `schedule.start` the first update has that fraction, and the one after the warm-up the
    peak. With `schedule.length` this is the rate of a training of so many steps, and the cosine goes on past them.
    """
    if schedule.name == "triangle":
        return min(0.25 + step / steps, 4.0 - 4.0 * step / steps)
    steps = schedule.length or steps
    warmup = length(schedule.warmup, steps)
    if step < warmup:
        return (step + 1) / warmup if schedule.start is None else schedule.start + (1 - schedule.start) * step / warmup
    if schedule.name == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1 if schedule.start is None else max(step, 1)))
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        warmup = decay_start(schedule, steps) - 1
    # done is 0 at the last step with the peak and 1 at the last step of all.
    done = max(0.0, (step - warmup) / max(1, steps - 1 - warmup))
    if schedule.length is None:
        done = min(1.0, done)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if schedule.name == "cosine" else 1 - done
    return schedule.final + (1 - schedule.final) * shape


def too_long(schedule: ScheduleConfig, steps: int) -> str | None:
    """Returns why the warm-up, with the decay of wsd, has no room in a training of so many steps; None if it has.

    `factor` cuts it at the last step: the rate never reaches its peak, or falls to `final` in fewer steps.
    """
    if schedule.name == "triangle" or schedule.length is not None:
        return None
    phases = {"warmup": schedule.warmup} | ({"decay": schedule.decay} if schedule.name == "wsd" else {})
    needed = {key: value * steps if value < 1 else value for key, value in phases.items()}
    if sum(needed.values()) < steps + 0.5:
        return None
    lengths = " and ".join(f"{key}: {phases[key]:g} ({count:,.0f} steps)" for key, count in needed.items())
    key = max(needed, key=needed.__getitem__)
    return f"schedule.{lengths}: more than the {steps:,} steps of the training; use more steps, or a share: {key}: 0.1"


def short_plan(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a training of a demo with a warm-up of at most its `steps`: plans may be made short."""
    schedule = values.get("schedule", {})
    warmup = min(schedule.get("warmup", 0), values.get("steps", math.inf))
    return values | {"schedule": {**schedule, "warmup": warmup}} if "warmup" in schedule else values


def warning(schedule: ScheduleConfig, steps: int) -> str | None:
    """Returns what a training of so many steps does not see of its schedule; None if it sees all."""
    whole = schedule.length
    if whole is None or whole == steps:
        return too_long(schedule, steps)
    warmup, last = length(schedule.warmup, whole), factor(schedule, steps - 1, steps)
    if steps <= warmup:
        what = f"training ends at step {steps:,}, inside the warm-up of {warmup:,} steps"
    elif steps > whole:
        what = f"training has {steps:,} steps, and the cosine rises again after {whole:,}"
    else:
        what = f"training ends at step {steps:,}, before the end of the cosine at {whole:,}"
    return f"schedule.length: {what}; its last learning rate is {last:.2g} of the peak"


def decay_start(schedule: ScheduleConfig, steps: int) -> int:
    """Returns the number of updates of wsd before its decay begins."""
    return max(length(schedule.warmup, steps), steps - length(schedule.decay, steps))


def length(value: float, steps: int) -> int:
    """Returns a warm-up or decay in steps: a value below 1 is a fraction of `steps`, other values are steps."""
    return min(steps, round(value * steps) if value < 1 else round(value))


class AverageConfig(Config):
    """A moving average of the weights."""

    decay: float = Field(0.9999, gt=0, lt=1, description="share of the average that an update keeps")
    warmup: bool = Field(True, description="keep at most (1 + t) / (10 + t) at update t, so that the average starts")


class Average:
    """The average of the weights of one model, on the device of the weights."""

    def __init__(self, config: AverageConfig, weights: Mapping[str, Tensor]):
        """Starts at the weights.

        Args:
            weights: parameters and buffers by name, which training changes in place; DTensors of a sharded model.
        """
        self.config = config
        self._weights = dict(weights)
        self._average = {name: tensor.detach().clone() for name, tensor in self._weights.items()}
        pairs = [(_local(self._average[name]), _local(weight)) for name, weight in self._weights.items()]
        moving = [pair for pair in pairs if pair[0].is_floating_point() and pair[0].numel()]
        self._moving = ([a for a, _ in moving], [weight for _, weight in moving])
        self._fixed = [pair for pair in pairs if not pair[0].is_floating_point()]

    def restart(self) -> None:
        """Sets the average to the weights."""
        for name, weight in self._weights.items():
            _local(self._average[name]).copy_(_local(weight))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the weights after update `step` of the optimizer, counted from 0."""
        decay = self.config.decay
        if self.config.warmup:
            decay = min(decay, (1 + step) / (10 + step))
        compat_torch.foreach_lerp_(*self._moving, 1 - decay)
        for average, weight in self._fixed:
            average.copy_(weight)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the average by the names of the weights."""
        return self._average

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchanges weights and average, and exchanges them back at the end, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weight in zip(*self._moving, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
