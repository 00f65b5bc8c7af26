"""Runs test files as programs in Triton's interpreter, each in a fork of one process that imported PyTorch once.

Reads the path of a file a line and answers with a line of JSON: how it ended, what it wrote, and the variants of
Linnet's kernels that it started.
"""

import dataclasses
import functools
import gc
import json
import os
import runpy
import sys
import tempfile
import traceback
from typing import IO

import numpy
import pytest  # noqa: F401
import torch
import torch._dynamo  # noqa: F401
import torch.fx.experimental.symbolic_shapes  # noqa: F401  what the first gradient imports
import triton.experimental.gluon  # noqa: F401  what the first kernel imports
import triton.language  # noqa: F401

import linnet.layers  # noqa: F401


def patch_faster() -> None:
    """Saves more than half of the time: the interpreter repeats work at each operation and each call of a function."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton

    # The sums that look for overflow end in a `device_assert`, which does nothing outside Triton's debug mode.
    if not interpreter.interpreter_builder.options.debug:
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = options
    look_up = interpreter._get_np_dtype  # makes a table of all types in each call
    found = functools.cache(look_up)
    interpreter._get_np_dtype = lambda dtype: look_up(dtype) if dtype.scalar.is_ptr() else found(dtype.scalar)
    original, patched = interpreter._patch_lang, set()

    def patch(fn):  # once for each module of kernels, and for good: nothing here is compiled
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            original(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch

    def patch_builtin(holder, name, member, builder, scope):  # without the layers of calls that pass `_semantic` on
        function = getattr(member, "__wrapped__", member)

        def call(*args, **options):
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **options)

        scope.set_attr(holder, name, call)

    interpreter._patch_attr = patch_builtin

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple:  # numbers of a type, and the same as constants of a tensor
        shape = core.tuple(sizes)
        number = core.validate_block_shape(shape)
        return shape, number, str(shape), core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(number)

    def make_type(self, element_ty, shape) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, name, _, _ = shape_of(sizes)
        self.name = f"<{name}, {element_ty}>"

    nothing = core.tuple([])
    point = core.constexpr(1)

    def make_tensor(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape.values))[3:] if type.is_block() else (nothing, point)

    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self, left, right):
        alike = left.type.is_block() and right.type.is_block() and left.type.shape.values == right.type.shape.values
        return (left, right) if alike else broadcast(self, left, right)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_if_needed


def lose_nan() -> None:
    """Makes maximum and minimum lose NaN as on a GPU, where they return the other operand unless told to keep NaN."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, numpy.fmax)
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, numpy.fmin)


def check_bounds() -> None:
    """Makes a kernel fail that reads or writes outside the memory of the tensors that it was given."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store, swap, update = (
        getattr(builder, f"create_{name}") for name in ("masked_load", "masked_store", "atomic_cas", "atomic_rmw")
    )
    collect = interpreter.GridExecutor._init_args_hst
    bounds = numpy.zeros((0, 2), numpy.uint64)  # first byte and end of each memory, in order

    def note(self, arguments, options):
        nonlocal bounds
        values = collect(self, arguments, options)
        tensors = [getattr(x, "base", x) for x in (*values[0], *values[1].values())]  # of a descriptor, its tensor
        memories = [x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor) and not x.is_meta]
        pairs = sorted({(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in memories})
        bounds = numpy.array(pairs, numpy.uint64).reshape(-1, 2)
        return values

    def check(pointers, mask=None) -> None:
        places = pointers.data if mask is None else pointers.data[mask.data.astype(bool)]
        if places.size == 0:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        index = bounds[:, 0].searchsorted(places, "right") - 1
        if (index < 0).any() or (places + size > bounds[index, 1]).any():
            raise IndexError("outside the memory of the tensors")

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_swap(self, pointer, *rest):
        check(pointer)
        return swap(self, pointer, *rest)

    def checked_update(self, operation, pointers, value, mask, *rest):
        check(pointers, mask)
        return update(self, operation, pointers, value, mask, *rest)

    interpreter.GridExecutor._init_args_hst = note
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_cas, builder.create_atomic_rmw = checked_swap, checked_update


def note_variants() -> dict[str, tuple]:
    """Collects the kernels that start from now on, each variant once: module, name, arguments and options of a launch,
    as `translation.translate` takes them, with dtypes by name."""
    from translation import describe
    from triton.language import dtype

    from linnet.ops.launching import Launcher

    variants, call = {}, Launcher.__call__

    def start(self, *arguments):
        function = getattr(self.kernel, "fn", self.kernel)
        if function.__module__.startswith("linnet."):
            overlaps = [True] if self._may_overlap else []
            values = [{"dtype": x.name} if isinstance(x, dtype) else x for x in (*self._fixed, *overlaps)]
            variant = function.__module__, function.__name__, [*map(describe, arguments), *values]
            variants[repr(variant)] = (*variant, self.options)
        return call(self, *arguments)

    Launcher.__call__ = start
    return variants


def run(path: str, notes: IO[str]) -> None:
    """Calls the file as Python calls a program, writes the variants as JSON, and ends the process."""
    sys.path.insert(0, os.path.dirname(path))
    variants = note_variants()
    torch.manual_seed(0)  # as before every test: see tests/conftest.py
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    json.dump(list(variants.values()), notes)
    for file in (notes, sys.stdout, sys.stderr):
        file.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    patch_faster()
    lose_nan()
    check_bounds()
    gc.freeze()  # what was imported stays
    gc.set_threshold(20_000, 20, 100)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile("w+") as notes:
            if (pid := os.fork()) == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                run(line.strip(), notes)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            notes.seek(0)
            answer = {"code": code, "output": output.read().decode(errors="replace")}
            print(json.dumps(answer | {"variants": json.loads(notes.read() or "[]")}), flush=True)
