"""Tests a mixer from outside the package against the contract of `Mixer` before a run starts, for any kind of model.

tests/layers/test_mixers.py tests the package's own mixers more thoroughly.
"""

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linnet.config import Config, ConfigError, gather, parse, refuse
from linnet.layers.base import (
    CHANNELS,
    Channel,
    LayerContext,
    Mixer,
    NonCausal,
    State,
    TensorSpec,
    find_mixer,
    line_of,
    load_plugin,
    lower_precision,
)
from linnet.layers.non_causal import mix_all
from linnet.layers.positions import Grid

# 256 tokens: whole chunks, since a mixer may need them, and several, since mistakes are often made between two. No
# chunk begins at a cut, and tokens are looked at before an odd and an even one, since a leak may have a pattern.
BATCH, TOKENS, CUT, STEPS = 2, 256, 37, 8
APART = (CUT, 22)  # tokens of each row before those that a server computes together
CUTS = (CUT, 166)
WIDTH = 64  # width of the first layer that is tried: a wide layer takes long, above all on a busy machine
# Relative to the largest output: above rounding errors in float32 and far below mistakes, which are about as large as
# y.
TOLERANCE = 1e-3
BACKWARD = "the backward pass of forward"
# Of a gradient, over a few tokens: above what kinks such as those of ReLU add to a difference of outputs. Shifts are
# shares of a tensor's size. The short one is for layers that bend at once; in float32 only longer ones exceed rounding.
FEW, GRADIENT_TOLERANCE = 64, 0.05
SHIFTS, SHIFTS_FLOAT32 = (1e-3, 1e-6), (1e-2, 1e-1)
ROUNDINGS = 10.0  # of one output, in units of its precision
REPEATED = 100.0  # the same for a call that is repeated: products may be summed in another order
EXACT = "a difference of outputs in float64"  # which float32 cannot refute


def check_mixers(
    plugins: Iterable[str],
    options: Mapping[str, Mapping],
    d_model: int,
    norm: str = "rmsnorm",
    causal: bool = True,
    axes: int = 1,
    packs: bool = False,
) -> None:
    """Runs `check_mixer` for each plugin that the layout of a model names, and tests the channel mixers of its file.

    Args:
        plugins: specs in the form of `load_plugin`. options: layer -> options, for all layers of the layout.
        causal, axes: of the model (`StackConfig.causal` and `axes`).
        packs: of the training (`TrainingConfig.packs`).

    Raises:
        ConfigError: lists the problems of all plugins.
    """
    problems: list[str] = []
    for spec in dict.fromkeys(plugins):
        if (name := load_plugin(spec)) in options:
            with gather(problems):
                check_mixer(spec, options[name], d_model, norm, causal, axes, packs)
        for channel, cls in CHANNELS.items():
            if channel in options and cls.__module__ == find_mixer(name).__module__:
                what = f"channel mixer '{spec.rpartition(':')[0]}:{cls.__name__}'"
                with gather(problems), torch.random.fork_rng(devices=[]):
                    if issubclass(cls, Mixer):
                        _check(what, cls, options[channel], d_model, norm, causal, axes, packs)
                    else:
                        _check_channel(what, cls, options[channel], d_model)
    refuse(problems, "plugins")


def check_mixer(
    spec: str,
    options: Mapping[str, Any],
    d_model: int,
    norm: str = "rmsnorm",
    causal: bool = True,
    axes: int = 1,
    packs: bool = False,
) -> None:
    """Runs one layer of a plugin on a few random tokens on the CPU and tests that it is causal and its forms agree.

    Each row must be computed on its own, and gradients must be the derivatives of the output (differences of outputs
    tell), except in a class with `surrogate_gradient`.

    Without causality there is no state, and the layer may look ahead. The test is then that reversing a row reverses
    the output of a generic mixer that scans from both ends.

    Runs in float64, or in float32 if float64 fails, and in eval mode; what looks ahead is also found in training mode.
    A gradient that is wrong in float64 is not tried in float32, whose differences miss that of a small parameter.
    Restores the state of torch's generators.

    Args:
        spec: `path/to/file.py:ClassName`. options: options of its Config, for the width `d_model`.
        causal: whether a token of the model sees only those before it. axes: of the model's grid, 1 for a sequence.
        packs: whether the model reads several documents in a row, so that `forward` needs `cu_seqlens`.

    Raises:
        ConfigError: one line per problem, with the fix.
    """
    _check(f"mixer {spec!r}", find_mixer(load_plugin(spec)), options, d_model, norm, causal, axes, packs)


def _check(
    what: str,
    cls: type[Mixer],
    options: Mapping[str, Any],
    d_model: int,
    norm: str,
    causal: bool,
    axes: int,
    packs: bool,
) -> None:
    """Does the work of `check_mixer`; `what` is the class in messages."""
    config = parse(cls.Config, options)
    problems: list[str] = []
    if not issubclass(cls, Mixer):
        problems = [f"is not a linnet.layers.Mixer; write class {cls.__name__}(Mixer)"]
    else:
        with torch.random.fork_rng(devices=[]):
            # Options may need the full width, and constants another precision: only the last attempt is reported.
            for width, dtype in dict.fromkeys(
                [(min(d_model, WIDTH), torch.float64), (d_model, torch.float64), (d_model, torch.float32)]
            ):
                context = LayerContext(d_model=width, norm=norm, causal=causal, axes=axes)
                problems = (_problems if causal else _non_causal_problems)(cls, config, context, dtype, packs)
                if not problems or any(EXACT in problem for problem in problems):
                    break
            if not problems:
                with gather(problems):
                    _costs(cls, config, LayerContext(d_model=d_model, norm=norm, causal=causal, axes=axes))
                if causal:
                    with gather(problems):
                        _dtypes(cls, config, context)
                if causal and not problems and (problem := _bfloat16(cls, config, context)):
                    warnings.warn(
                        f"{what}: in bfloat16, in which a GPU serves by default, {problem}; or run generate and "
                        "serve with --dtype float32",
                        stacklevel=2,
                    )
                if names := _redrawn(cls, config, context):
                    warnings.warn(
                        f"{what}: the values that __init__ gives to {', '.join(names)} are lost: a model draws "
                        "the weights of nn.Linear and nn.Embedding and sets their biases to 0; keep first values of "
                        "your own in an nn.Parameter of the mixer, or set starts_zero = True on a layer whose weight "
                        "is to start at zero",
                        stacklevel=2,
                    )
    if problems:
        raise ConfigError([f"{what}: {problem}" for problem in dict.fromkeys(problems)], "plugins")


def _check_channel(what: str, cls: type[Channel], options: Mapping[str, Any], d_model: int) -> None:
    """Tests that a channel mixer computes each token on its own, as a mixer without a state."""

    class Alone(Mixer):
        surrogate_gradient = getattr(cls, "surrogate_gradient", False)

        def __init__(self, config: Config, context: LayerContext):
            super().__init__()
            self.channel = cls(config, context)

        def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
            return self.channel(x), None

        def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
            return {}

    Alone.__module__ = cls.__module__  # whose file has the lines of its errors
    config = parse(cls.Config, options)
    for width, dtype in dict.fromkeys([(min(d_model, WIDTH), torch.float64), (d_model, torch.float32)]):
        problems: list[str] = []
        with gather(problems):
            _each_token(*_mixer_and_tokens(Alone, config, LayerContext(d_model=width), dtype))
        if not (problems := problems or _problems(Alone, config, LayerContext(d_model=width), dtype, False)):
            break
    if problems:
        raise ConfigError([f"{what}: {problem}" for problem in dict.fromkeys(problems)], "plugins")


def _each_token(mixer: Mixer, x: Tensor) -> None:
    """Tests that a channel mixer gives each token [D] the same y among others, in any order, as in a row."""
    y, _ = _forward(mixer, x)
    _settled(mixer, x, y)
    order = torch.randperm(x.shape[0] * x.shape[1])
    tokens, right = x.flatten(0, 1)[order], y.flatten(0, 1)[order]
    call = functools.partial(_without_gradients, mixer.channel, tokens.clone())
    other = _ask(call, type(mixer), "forward(x) of tokens without time, x [B, D],")
    if not isinstance(other, Tensor) or other.shape != right.shape or _differing(other[None], right[None], y):
        _refuse(
            "computes a token from others: tokens in another order and without time, x [B, D], give another y; compute "
            "each token from itself, or write a Mixer with a state and register it with @register_channel"
        )


def _redrawn(cls: type[Mixer], config: Config, context: LayerContext) -> list[str]:
    """Returns the weights and biases that the constructor sets, and that a model then draws or sets to 0."""
    first: dict[nn.Module, dict[str, Tensor]] = {}

    def remembering(reset: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset_parameters(module: nn.Module) -> None:
            reset(module)
            first[module] = {name: p.detach().clone() for name, p in module.named_parameters(recurse=False)}

        return reset_parameters

    with contextlib.ExitStack() as stack:
        for kind in (nn.Linear, nn.Embedding):
            reset = kind.reset_parameters
            stack.callback(setattr, kind, "reset_parameters", reset)
            kind.reset_parameters = remembering(reset)  # type: ignore[method-assign]
        mixer = cls(config, context)
    names = []
    for path, module in mixer.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            before = first.get(module, {}).get(name)
            kept = not parameter.any() and (name == "bias" or getattr(module, "starts_zero", False))
            if not kept and (before is None or not torch.equal(parameter.detach(), before)):
                names.append(f"{path}.{name}")
    return names


def _problems(cls: type[Mixer], config: Config, context: LayerContext, dtype: torch.dtype, packs: bool) -> list[str]:
    """Returns the problems in one precision, without those that follow from an earlier one."""
    problems: list[str] = []
    has_spec = cls.state_spec is not Mixer.state_spec
    if not has_spec:
        problems.append(
            "has no state_spec, which the counts of FLOPs and bytes and decoding need; write state_spec(self, batch, "
            "context_length) that returns {name: TensorSpec(shape)}, or {} if it carries nothing"
        )
    with gather(problems):
        mixer, x = _mixer_and_tokens(cls, config, context, dtype)
        y, _ = _forward(mixer, x)
        _finite(y)
        _settled(mixer, x, y)
        with gather(problems):
            _gradients(mixer, x[:1, :FEW], lambda tokens: mixer(tokens, None, None)[0])
        _causal(mixer, x, y)
        trained, _ = _forward(mixer.train(), x)
        _repeats(mixer, x, trained)
        _causal(mixer, x, trained, " in training mode")
        mixer.eval()
        _rows(_forward(mixer, x[-1:])[0], y)
        if packs:
            with gather(problems):
                _documents(lambda tokens, cu_seqlens: _forward(mixer, tokens, cu_seqlens=cu_seqlens)[0], x[:1])
        if has_spec and (_has_step(cls) or _state(mixer, dtype)):
            alone = len(problems)
            with gather(problems):
                _carried(mixer, x, y)
            with gather(problems):
                _steps(mixer, x, y)
            if len(problems) == alone:
                with gather(problems):
                    _served(mixer, x, y)
                with gather(problems):
                    _shorter_context(mixer, x, y)
    return problems


def _non_causal_problems(
    cls: type[Mixer], config: Config, context: LayerContext, dtype: torch.dtype, packs: bool
) -> list[str]:
    """Returns the problems of a mixer in a model without causality, in one precision."""
    problems: list[str] = []
    if cls.non_causal not in get_args(NonCausal):
        return [f"non_causal is {cls.non_causal!r}; write one of {', '.join(get_args(NonCausal))}"]
    with gather(problems):
        mixer, x = _mixer_and_tokens(cls, config, context, dtype)
        grid = _grid(context, x.shape[1])
        y = _mix_all(mixer, x, grid)
        _finite(y)
        with gather(problems):
            few = _grid(context, FEW)
            _gradients(mixer, x[:1, :FEW], lambda tokens: mix_all(mixer, tokens, "both", None, few))
        if packs and grid is None:
            with gather(problems):
                _documents(lambda tokens, cu_seqlens: _mix_all(mixer, tokens, None, cu_seqlens=cu_seqlens), x[:1])
        if cls.non_causal != "generic":
            return problems
        turned = _mix_all(mixer, x.flip(1), grid).flip(1)
        apart = (_forward(mixer, x)[0] + _forward(mixer, x.flip(1))[0].flip(1)) / 2
        if changed := _differing(turned, y, y) or _differing(apart, y, y):
            _refuse(
                "computes the two directions of a row in another way together than apart, or of the reversed row (at "
                f"token {changed[0]}); compute each row of the batch from its own tokens, and keep nothing of earlier "
                "calls"
            )
    return problems


def _grid(context: LayerContext, tokens: int = TOKENS) -> Grid | None:
    """Returns a grid of so many tokens on the axes of the model; None for a sequence."""
    return None if context.axes == 1 else Grid((tokens // 2 ** (context.axes - 1), *[2] * (context.axes - 1)))


def _mix_all(
    mixer: Mixer,
    x: Tensor,
    grid: Grid | None,
    what: str = "forward(x, state, cu_seqlens)",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Returns y of a model without causality, after a look at what one call of the mixer returns."""
    grids = mixer.takes_grid and mixer.non_causal != "generic" and grid is not None
    _seed(2)
    _pair(
        _ask(lambda: _without_gradients(mixer, x.clone(), None, cu_seqlens, *[grid] * grids), type(mixer), what),
        x,
        "forward",
    )
    _seed(2)
    return _ask(lambda: _without_gradients(mix_all, mixer, x.clone(), "both", cu_seqlens, grid), type(mixer), what)


def _mixer_and_tokens(
    cls: type[Mixer], config: Config, context: LayerContext, dtype: torch.dtype
) -> tuple[Mixer, Tensor]:
    _seed(0)
    mixer = _build(cls, config, context).to(dtype).eval()
    for module in context.shared.values():
        module.to(dtype)
    _fill_zeros(mixer)
    tokens = TOKENS if context.d_model <= 4 * WIDTH else FEW  # a mixer that needs a large width takes long
    return mixer, torch.randn(BATCH, tokens, context.d_model, dtype=dtype)


def _finite(y: Tensor) -> None:
    if not y.isfinite().all():
        _refuse("forward gave y that is not finite for ordinary tokens; look for overflow, log of 0, division by 0")


def _costs(cls: type[Mixer], config: Config, context: LayerContext) -> None:
    """Counts FLOPs on the meta device, in the precision of training."""
    with torch.device("meta"):
        mixer = _build(cls, config, context)
    x = torch.empty(1, TOKENS, context.d_model, device="meta")
    what = "forward without memory (x.device is meta, where FLOPs are counted; use x.device)"
    y = _forward(mixer, x, what=what)[0] if context.causal else _mix_all(mixer, x, _grid(context), what)
    if y.dtype != x.dtype:
        _refuse(f"forward gave y in {y.dtype} for x in {x.dtype}; end it with y.to(x.dtype)")
    for name in ("flops", "flops_paper"):
        count = _ask(functools.partial(lambda name: float(getattr(mixer, name)(TOKENS)), name), cls, f"{name}(seq_len)")
        if not 0 <= count < math.inf:
            _refuse(f"{name}(seq_len) returned {count:g}; return FLOPs of one sequence, a finite number of at least 0")


def _dtypes(cls: type[Mixer], config: Config, context: LayerContext) -> None:
    """Tests that a float32 layer takes a state in the dtypes of `state_spec`, in which an engine keeps it."""
    mixer, x = _mixer_and_tokens(cls, config, context, torch.float32)
    if cls.state_spec is Mixer.state_spec or mixer.nominal_state:
        return
    state = _state(mixer, None)
    dtypes = {name: tensor.dtype for name, tensor in state.items() if tensor.is_floating_point()}
    others = [f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items() if dtype != x.dtype]
    if not others:
        return
    what = f"with the state of state_spec ({', '.join(others)})"
    _, state = _forward(mixer, x[:, :CUT], state, f"forward {what}")
    state = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in state.items()}
    _step(mixer, x[:, CUT], state, f"step {what}")


def _bfloat16(cls: type[Mixer], config: Config, context: LayerContext) -> str | None:
    """Returns why a layer does not compute in bfloat16, with a state in the dtypes of `state_spec`; None if it does."""
    mixer, x = _mixer_and_tokens(cls, config, context, torch.float32)
    for module in (mixer, *context.shared.values()):
        lower_precision(module, torch.bfloat16)
    x = x.bfloat16()
    try:
        decodes = _has_step(cls) and not mixer.nominal_state
        state = _state(mixer, None) if decodes else None
        y, after = _forward(mixer, x[:, :CUT], state)
        if y.dtype == x.dtype and state is not None:
            after = {name: tensor.to(state[name].dtype) for name, tensor in after.items()}
            y, _ = _step(mixer, x[:, CUT], after) or (y, None)
        if y.dtype != x.dtype:
            of = "step" if y.ndim == 2 else "forward"
            _refuse(f"{of} gave y in {str(y.dtype).removeprefix('torch.')} for x in bfloat16; return y.to(x.dtype)")
    except ConfigError as error:
        return error.problems[0]
    return None


def _settled(mixer: Mixer, x: Tensor, y: Tensor) -> None:
    """Tests that a mixer in eval mode computes the same again, with other random numbers too."""
    _repeats(mixer, x, y)
    if _differing(_forward(mixer, x, seed=3)[0], y, y):
        _refuse("draws random numbers in eval mode; draw them only `if self.training`")


def _repeats(mixer: Mixer, x: Tensor, y: Tensor) -> None:
    """Tests that x gives y again, with the same random numbers, after other tokens were computed."""
    _forward(mixer, x.flip(1))
    again, _ = _forward(mixer, x)
    allowed = REPEATED * torch.finfo(x.dtype).eps * y.abs().max()
    if not torch.equal(again, y) and not bool(((again - y).abs() <= allowed).all()):
        mode = "training" if mixer.training else "eval"
        _refuse(
            f"is not deterministic: a second call with the same x in {mode} mode gives another y, although the random "
            "generator starts alike; keep nothing of earlier calls in the module (what a later token needs belongs in "
            "the state), and read no clock and no generator of your own"
        )


def _causal(mixer: Mixer, x: Tensor, y: Tensor, mode: str = "") -> None:
    for cut in CUTS:
        _seed(1)
        other, _ = _forward(mixer, torch.cat([x[:, :cut], torch.randn_like(x[:, cut:])], 1))
        if changed := _differing(other[:, :cut], y[:, :cut], y):
            _refuse(
                f"is not causal{mode}: it looks ahead, so its losses would mean nothing (other tokens from {cut} on "
                f"change y at token {changed[-1]}); let y[:, t] depend on x[:, : t + 1] only: mask later tokens, pad "
                "on the left, take no statistics over tokens (BatchNorm)"
            )


def _rows(single: Tensor, y: Tensor) -> None:
    """Tests that the last row of a batch has the same y [1, T, D] alone as after the other rows, y [B, T, D]."""
    if changed := _differing(single, y[-1:], y):
        _refuse(
            f"mixes the rows of a batch: a row alone has another y than beside another row (from token {changed[0]} "
            "on); x is [batch, time, width], so give torch.nn.GRU and attention batch_first=True, and sum over no rows"
        )


def _documents(forward: Callable[[Tensor, Tensor | None], Tensor], x: Tensor) -> None:
    """Tests that two documents in one row x [1, T, D] have the same y as each alone."""
    packed = forward(x, torch.tensor([0, CUT, x.shape[1]], dtype=torch.int32))
    alone = torch.cat([forward(x[:, :CUT], None), forward(x[:, CUT:], None)], 1)
    if changed := _differing(packed, alone, alone):
        _refuse(
            f"ignores cu_seqlens: a document that shares a row has another y than alone (from token {changed[0]} on; "
            f"the second begins at {CUT}); start with an empty state at each of cu_seqlens[:-1], as the ops of Linnet "
            "do with cu_seqlens=cu_seqlens, or train with data.packing: cross"
        )


def _gradients(mixer: Mixer, x: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
    """Tests the gradients of x and of each parameter against differences of outputs, along random directions."""
    x = x.clone().requires_grad_()
    _seed(2)
    y: Tensor = _ask(functools.partial(forward, x.clone()), type(mixer), BACKWARD)
    weights = torch.randn_like(y)
    _ask((y * weights).sum().backward, type(mixer), BACKWARD)
    if mixer.surrogate_gradient:
        return
    # A layer that computes in float32 has outputs that float32 holds, whatever their dtype.
    coarse = torch.equal(y.detach().float().to(y.dtype), y.detach())
    shifts = SHIFTS_FLOAT32 if coarse else SHIFTS
    rounding = ROUNDINGS * torch.finfo(torch.float32 if coarse else y.dtype).eps * (y.detach() * weights).norm().item()
    for name, tensor in [("x", x), *((name, p) for name, p in mixer.named_parameters() if p.requires_grad)]:
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for seed in range(2):
            _seed(4 + seed)
            direction = torch.randn_like(tensor)
            expected = (gradient * direction).sum().item()
            size = tensor.detach().square().mean().sqrt().item() or 1.0
            for shift in (share * size for share in shifts):
                measured = _slope(forward, x, tensor, direction, shift, weights)
                # Rounding alone gives a slope where the true one is 0, as for a bias of the keys of softmax attention.
                allowed = GRADIENT_TOLERANCE * max(gradient.norm().item(), abs(measured)) + rounding / shift
                if abs(expected - measured) <= allowed:
                    break
            else:
                with _Types() as types:
                    forward(x.detach().clone())
                difference = EXACT if types.floating == {torch.float64} else "a difference of outputs"
                _refuse(
                    f"the gradient of {name} is not that of forward: along a random direction, the backward pass gives "
                    f"{expected:.4g} and {difference} {measured:.4g}; correct the backward pass or the "
                    "detach(), or write surrogate_gradient = True in the class if it is an estimate on purpose"
                )


class _Types(TorchFunctionMode):
    """Collects the floating types of the tensors that calls of PyTorch return."""

    def __init__(self):
        super().__init__()
        self.floating: set[torch.dtype] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.floating.add(result.dtype)
        return result


@torch.no_grad()
def _slope(
    forward: Callable[[Tensor], Tensor], x: Tensor, tensor: Tensor, direction: Tensor, shift: float, weights: Tensor
) -> float:
    """Returns the change of (y weights).sum() per shift of `tensor`, x or a parameter, which stays as it is."""
    start = tensor.clone()
    sums = []
    for sign in (1, -1):
        tensor.copy_(start + sign * shift * direction)
        _seed(2)
        sums.append((forward(x.detach().clone()) * weights).sum().item())
    tensor.copy_(start)
    return (sums[0] - sums[1]) / (2 * shift)


def _carried(mixer: Mixer, x: Tensor, y: Tensor) -> None:
    """Tests that `forward` on the second part of the tokens continues from the state after the first part."""
    first, state = _prefill(mixer, x)
    if changed := _differing(first, y[:, :CUT], y):
        _refuse(
            f"forward with a state gives another y than without one (from token {changed[0]} on); compute the "
            "same in both forms, starting from the state of `init_state`, which is zeros"
        )
    second, _ = _forward(mixer, x[:, CUT:], state)
    if changed := _differing(second, y[:, CUT:], y):
        _refuse(
            f"tokens in two calls give another y than in one call (from token {CUT + changed[0]} on; the "
            f"second call begins at {CUT}); let forward continue from the given state and return the state after it, "
            "with the number of tokens so far if it reads positions (linnet.layers.positions)"
        )


def _steps(mixer: Mixer, x: Tensor, y: Tensor) -> None:
    """Tests the same for `step`, token by token."""
    _, state = _prefill(mixer, x)
    shapes = _shapes(state)
    for t in range(CUT, CUT + STEPS):
        if (stepped := _step(mixer, x[:, t], state)) is None:
            return
        out, state = stepped
        _same_shapes(state, shapes, "step")
        if _differing(out[:, None], y[:, t : t + 1], y):
            _refuse(
                f"step gives another y than forward (at token {t}; steps begin at {CUT}); implement "
                "the same equations in both, or leave step out (the mixer then trains, but does not generate)"
            )


def _step(mixer: Mixer, x: Tensor, state: State, what: str = "step(x, state)") -> tuple[Tensor, State] | None:
    """Returns y [B, D] of one token and the state after it; None for a mixer that has no step or says so."""
    if not _has_step(type(mixer)):
        return None
    step = functools.partial(_without_gradients, mixer.step, tokens := x.clone(), state)
    try:
        out = _ask(step, type(mixer), what)
    except ConfigError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return None
        raise
    _untouched(tokens, x, "step")
    return _pair(out, x, "step")


def _served(mixer: Mixer, x: Tensor, y: Tensor) -> None:
    """Tests states as a server uses them: those of other sequences in between, and rows of other lengths together."""
    _, state = _prefill(mixer, x)
    _forward(mixer, x[:, -APART[1] :], _state(mixer, x.dtype))
    more, _ = _forward(mixer, x[:, CUT : CUT + STEPS], _copied(state))
    if _differing(more, y[:, CUT : CUT + STEPS], y):
        _refuse(
            "remembers earlier calls: forward from the state of one sequence gives another y after another sequence "
            "was computed; keep nothing between calls in the module, and all that later tokens need in the state, with "
            "the number of tokens so far if the layer reads positions (linnet.layers.positions)"
        )
    rows = [slice(row, row + 1) for row in range(BATCH)]
    parts = [slice(cut, cut + STEPS) for cut in APART]
    states = [_forward(mixer, x[row, :cut], _state(mixer, x.dtype, 1))[1] for row, cut in zip(rows, APART, strict=True)]
    state = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    tokens, right = (torch.cat([z[row, part] for row, part in zip(rows, parts, strict=True)]) for z in (x, y))
    wrong = (
        f"rows of a batch that have read {APART[0]} and {APART[1]} tokens give another y together than alone; a server "
        "computes sequences of different lengths together, so read the state of each row for itself; a position is "
        "state['position'], [batch], of which no row may take that of row 0"
    )
    together, _ = _forward(mixer, tokens, _copied(state))
    if _differing(together, right, y):
        _refuse(f"forward: {wrong}")
    for t in range(STEPS):
        if (stepped := _step(mixer, tokens[:, t], state)) is None:
            return
        out, state = stepped
        if _differing(out[:, None], right[:, t : t + 1], y):
            _refuse(f"step: {wrong}")


def _shorter_context(mixer: Mixer, x: Tensor, y: Tensor) -> None:
    """Tests that the leading corner of a state is the state for a shorter context, as an engine takes it."""
    length = CUT + STEPS
    shapes = {name: tensor.shape for name, tensor in _state(mixer, x.dtype, BATCH, length).items()}
    _, state = _prefill(mixer, x)
    if all(state[name].shape == shape for name, shape in shapes.items()):
        return
    corner = {name: state[name][tuple(map(slice, shape))].clone() for name, shape in shapes.items()}
    more, _ = _forward(mixer, x[:, CUT:length], corner)
    if changed := _differing(more, y[:, CUT:length], y):
        _refuse(
            f"the state for {TOKENS} tokens, cut to its first {length} slots, gives another y (at token "
            f"{CUT + changed[0]}) than the whole state after {CUT} tokens; where a shape of state_spec depends on "
            "context_length, fill the slots from the first on, since caches grow at their end"
        )


def _copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def _prefill(mixer: Mixer, x: Tensor) -> tuple[Tensor, State]:
    """Returns y of the first part of the tokens, and the state after it, whose shapes must be those of `state_spec`."""
    y, state = _forward(mixer, x[:, :CUT], before := _state(mixer, x.dtype))
    _same_shapes(state, _shapes(before), "forward with a state")
    return y, state


def _shapes(state: Any) -> Any:
    return {name: list(tensor.shape) for name, tensor in state.items()} if isinstance(state, dict) else state


def _same_shapes(state: Any, said: dict[str, list[int]], of: str) -> None:
    if (shapes := _shapes(state)) != said:
        _refuse(
            f"{of} returned the state {shapes}; return the state after the last token, {said}, whose size is that of "
            "state_spec(batch, context_length) at every token"
        )


def _state(mixer: Mixer, dtype: torch.dtype | None, batch: int = BATCH, length: int = TOKENS) -> State:
    spec = _ask(lambda: mixer.state_spec(batch, length), type(mixer), "state_spec(batch, context_length)")
    if not isinstance(spec, dict) or not all(isinstance(entry, TensorSpec) for entry in spec.values()):
        _refuse(f"state_spec returned {spec!r}; return {{name: TensorSpec(shape)}}, {{}} if nothing is carried")
    for name, tensor in spec.items():
        if tuple(tensor.shape[:1]) != (batch,):
            _refuse(f"state_spec: {name} has shape {list(tensor.shape)} for batch {batch}; put the batch first")
    return _ask(lambda: mixer.init_state(batch, length, None, dtype), type(mixer), "init_state")


def _forward(
    mixer: Mixer,
    x: Tensor,
    state: State | None = None,
    what: str = "forward(x, state, cu_seqlens)",
    cu_seqlens: Tensor | None = None,
    seed: int = 2,
):
    """Returns y and the state after the last token, called as a block calls the mixer."""
    _seed(seed)
    tokens = x.clone()
    out = _ask(lambda: _without_gradients(mixer, tokens, state, cu_seqlens), type(mixer), what)
    _untouched(tokens, x, "forward")
    return _pair(out, x, "forward")


def _untouched(after: Tensor, x: Tensor, of: str) -> None:
    if not x.is_meta and not torch.equal(after, x):
        _refuse(f"{of} writes into x, which other layers may read; make a new tensor, such as x = x * 2 for x.mul_(2)")


def _pair(out: Any, x: Tensor, of: str) -> tuple[Tensor, Any]:
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[0], Tensor):
        kinds = ", ".join(type(part).__name__ for part in (out if isinstance(out, tuple) else [out]))
        after = " (state None if none was given)" if of == "forward" else ""
        _refuse(f"{of} returned {kinds}, not the pair of y and the state; end it with `return y, state`{after}")
    if out[0].shape != x.shape:
        _refuse(
            f"{of} gave y of shape {list(out[0].shape)} for x of shape {list(x.shape)}; y needs the shape of x, "
            "whose last dimension is context.d_model"
        )
    return out


@torch.no_grad()
def _without_gradients(call: Callable, *args: Any) -> Any:
    return call(*args)


@torch.no_grad()
def _fill_zeros(mixer: nn.Module) -> None:
    """Fills weights that start at zero: a zero output projection, for example, would hide all earlier mistakes."""
    for parameter in mixer.parameters():
        parameter.masked_scatter_(parameter == 0, 0.1 * torch.randn_like(parameter))


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU too, which nothing restores


def _has_step(cls: type[Mixer]) -> bool:
    return cls.step is not Mixer.step


def _differing(y: Tensor, other: Tensor, scale: Tensor) -> list[int]:
    """Returns the tokens at which two y [B, T, D] differ by more than rounding."""
    same = (y - other).abs() <= TOLERANCE * scale.abs().max()  # NaN is not the same
    return (~same).any(dim=2).any(dim=0).nonzero().flatten().tolist()


def _build(cls: type[Mixer], config: Config, context: LayerContext) -> Mixer:
    return _ask(lambda: cls(config, context), cls, "__init__(config, context)")


def _ask(call: Callable[[], Any], cls: type[Mixer], what: str) -> Any:
    """Returns the result of a call into a user's class; adds the failing line of the user's file to an error."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        line = line_of(error, file)
        problem = f"{what} raised {type(error).__name__}{line}: {' '.join(str(error).split())}"
        fix = f"fix {'this line' if line else 'the class'}"
        if isinstance(error, KeyError) and "state[" in line:
            fix += ", or let state_spec and each returned state have this tensor"
        if "meta tensor" in str(error):
            fix += ": FLOPs are counted with tensors without values (device meta), so compute numbers without torch"
        raise ConfigError([f"{problem}; {fix}"], "plugins") from error


def _refuse(problem: str) -> None:
    raise ConfigError([problem], "plugins")
