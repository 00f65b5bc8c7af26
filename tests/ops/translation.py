"""Whether Triton's compiler takes a kernel, for tests without a GPU: its interpreter takes more, and no Gluon."""

import functools

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8",
}  # fmt: skip


def describe(x: object) -> object:
    """The type of an argument as Triton names it, as "*bf16" and "fp32"; of what may be a constant the value."""
    if isinstance(x, Tensor):
        return f"*{TYPES[x.dtype]}"
    return "fp32" if isinstance(x, float) else x


@functools.cache
def translate(kernel: triton.JITFunction, arguments: tuple, options: tuple = ()) -> None:
    """Makes Triton's first representation of a variant of a kernel, as for a Hopper GPU.

    Raises what Triton raises where the kernel is no valid program, as where a variable changes its type in a loop.

    Args:
        arguments: all of a call, as `describe` gives them.
        options: of the launch, pairs of name and value.
    """
    kinds = []
    for parameter, x in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr or x is None or (isinstance(x, int) and x == 1):
            kinds.append("constexpr")
        else:
            kinds.append({bool: "i1", int: "i32", float: "fp32"}.get(type(x), x))
    values = {(i,): x for i, x in enumerate(arguments) if kinds[i] == "constexpr"}
    signature = dict(zip(kernel.arg_names, kinds, strict=True))
    source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(kernel, signature, values)
    backend, context = make_backend(HOPPER), ir.context()
    settings = backend.parse_options({k: x for k, x in options if k != "scratch"} | source.parse_options())
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(HOPPER, settings, backend.get_codegen_implementation(settings), backend.get_module_map(), context)


def translate_launch(kernel, programs, tensors: tuple, numbers: tuple, constants: tuple, **options) -> None:
    """As `translate`, of the arguments of `linnet.ops.launching.launch`."""
    translate(kernel, (*map(describe, (*tensors, *numbers)), *constants), tuple(options.items()))
