"""Every private API of PyTorch that Linnet uses. Tried with torch 2.11.0 and 2.13.0; check this file at a new release.

No other file of Linnet may name one (`tests/ops/test_compat.py` looks for them). A public replacement, where one
exists, is slower by more than a small kernel takes, or incomplete; each comment says which.
"""

import contextlib
import datetime
import logging
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef
from torch.nn import Parameter
from torch.utils import _python_dispatch, _pytree
from torch.utils.data import _utils

# The type of what `torch.ops.<namespace>.<name>.<overload>` gives; it has no public name.
OpOverload = torch._ops.OpOverload

# Whether `torch.func` transforms (vmap, grad, jvp) are active around this call. `torch.compiler.is_compiling` and the
# public API of functorch do not tell.
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active

# The device of this thread and its stream as an integer, without the checks and objects of `torch.cuda`: under 0.1
# microseconds each for some 2.
current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# The Newton-Schulz iteration of `torch.optim.Muon`, for matrices that are gathered before it; it is not exported.
orthogonalize = torch.optim._muon._zeropower_via_newtonschulz
muon_rate = torch.optim._muon._adjust_lr
MUON_COEFFICIENTS = (torch.optim._muon.DEFAULT_A, torch.optim._muon.DEFAULT_B, torch.optim._muon.DEFAULT_C)
MUON_EPSILON, MUON_STEPS = torch.optim._muon.EPS, torch.optim._muon.DEFAULT_NS_STEPS

# To count the memory of a model that no machine here could hold, which no public API does: tensors with shapes and no
# data, a mode that sees every operation, and the leaves of nested containers. `import torch` imports their modules.
FakeTensor, FakeTensorMode = fake_tensor.FakeTensor, fake_tensor.FakeTensorMode
TorchDispatchMode, tree_iter = _python_dispatch.TorchDispatchMode, _pytree.tree_iter


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps fake tensors from printing the traceback of an error that the caller handles."""
    level = fake_tensor.log.level
    fake_tensor.log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        fake_tensor.log.setLevel(level)


# The number of the backward that runs in this thread, -1 outside of one. Hooks and functions of a graph cannot tell
# one backward from the next otherwise.
current_backward: Callable[[], int] = torch._C._current_graph_task_id

# One kernel for a list of tensors; the public optimizers use these themselves.
foreach_norm = torch._foreach_norm
foreach_multiply_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_

_is_legacy, _is_wrapped = torch._C._functorch.is_legacy_batchedtensor, torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_batchedtensor
_GRADIENTS = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
_TENSORS = frozenset((Tensor, Parameter))
_OTHERS = frozenset((type(None), bool, int, float, str))


def is_plain(arguments: Iterable[object]) -> bool:
    """Whether a call with these arguments is eager, on ordinary tensors, and under no mode or transform.

    Modes are those of dispatch and of functions (FLOP counting, fake tensors, selective recomputation); transforms are
    those of functorch and forward-mode differentiation.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in arguments:  # a loop, since a generator takes half as long again
        kind = type(x)
        if kind in _TENSORS:
            # The older vmap of `torch.autograd.grad(..., is_grads_batched=True)` shows in its tensors alone, and a
            # tensor of a transform may outlive it.
            if x.is_meta or _is_legacy(x) or _is_wrapped(x):
                return False
        elif kind not in _OTHERS:
            return False
    return True


def has_values(x: Tensor) -> bool:
    """Whether the host may read the values of x: a meta or fake tensor has none, and `torch.vmap` allows no look."""
    if torch.compiler.is_compiling():  # breaks the graph and reads them
        return True
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if _is_batched(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return not x.is_meta and not isinstance(x, fake_tensor.FakeTensor)


def compiler_is_imported() -> bool:
    """Whether this process has imported torch.compile's tracer, which takes a second of processor time."""
    return "torch._dynamo" in sys.modules


def allow_recompilations(count: int) -> None:
    """Lets a function be compiled up to `count` times: the blocks of a model share theirs, and each may differ."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)
    limit = torch._dynamo.config.accumulated_recompile_limit
    torch._dynamo.config.accumulated_recompile_limit = max(limit, 4 * count)


def in_one_vmap(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one `torch.vmap`, no other transform and no mode is active, and batches one of these tensors."""
    if torch._C._functorch.maybe_current_level() != 1:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    return any(x is not None and _is_batched(x) for x in tensors)


def in_gradient() -> bool:
    """Whether the innermost transform of functorch around this call differentiates (`torch.func.grad`, `jvp`)."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() in _GRADIENTS


def has_tangent(x: object) -> bool:
    """Whether a value is a tensor with a tangent of forward-mode differentiation, also under `torch.vmap`."""
    if forward_ad._current_level < 0:
        return False
    while isinstance(x, Tensor) and _is_batched(x):
        x = torch._C._functorch.get_unwrapped(x)
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def implementation_of(op: CustomOpDef) -> Callable:
    """Returns the function that `op` was made of."""
    return op._init_fn


def vmap_rule_of(op: CustomOpDef) -> Callable:
    """Returns the function that `op.register_vmap` was given."""
    return op._vmap_fn


def mutated_arguments(op: CustomOpDef) -> list[int]:
    """Returns the positions of the arguments that `op` writes to."""
    arguments = op._opoverload._schema.arguments
    return [i for i, x in enumerate(arguments) if x.alias_info and x.alias_info.is_write]


def group_of(name: str) -> "torch.distributed.ProcessGroup":
    """Returns the process group with this `group_name`. An op takes the name; a compiler cannot trace the object."""
    from torch.distributed import distributed_c10d  # some builds of PyTorch lack it

    return distributed_c10d._resolve_process_group(name)


def packet_of(op: CustomOpDef) -> object:
    """Returns `torch.ops.<namespace>.<name>`, by which `register_flop_formula` knows an op."""
    return op._opoverload.overloadpacket


def name_of(op: CustomOpDef) -> str:
    """Returns `<name>` of `<namespace>::<name>`."""
    return op._name


def set_group_timeout(group: "torch.distributed.ProcessGroup", timeout: datetime.timedelta) -> None:
    """Changes how long a communication of a group may take. Public calls set it when a group is made, and only then."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout, group)


def abandon_workers(batches: Iterator) -> None:
    """Leaves the iterator of a `DataLoader` whose processes are killed without its shutdown.

    That sets an event whose lock a process may have held when it was killed, and would wait for it for ever.
    """
    batches._shutdown = True
    if batches._worker_pids_set:
        _utils.signal_handling._remove_worker_pids(id(batches))  # another iterator may have this one's address
        batches._worker_pids_set = False
    for queue in batches._index_queues:
        queue.cancel_join_thread()
        queue.close()
