"""Triton's interpreter, which wants a process of its own: one for all files of this folder."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interpreter.py")
sys.path.insert(0, str(Path(__file__).parent))  # for what the files of this folder share, also as programs: precision


@pytest.fixture(scope="session")
def _interpreter() -> Iterator[subprocess.Popen]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(PROGRAM)], env=os.environ | settings, **pipes) as process:
        yield process
        process.stdin.close()  # the end of what it is asked


@pytest.fixture
def interpreted(_interpreter) -> Callable[[str], int]:
    """interpreted(file): runs a test file as a program, which must end well; how often it said "agrees".

    Triton's compiler must take every kernel that it started: it refuses more than the interpreter does.
    """

    def run(file: str) -> int:
        print(file, file=_interpreter.stdin, flush=True)
        answer = json.loads(_interpreter.stdout.readline())
        assert answer["code"] == 0, answer["output"][-4000:]
        for variant in answer["variants"]:
            translate(*variant)
        return answer["output"].count("agrees")

    return run


def translate(module: str, kernel: str, types: list, constants: list, options: dict) -> None:
    """Makes Triton's first representation of a variant of a kernel (see `interpreter.py`), as for a Hopper GPU.

    Raises what Triton raises where the kernel is no valid program, as where a variable changes its type in a loop.
    """
    from triton import language
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    function = getattr(importlib.import_module(module), kernel)
    constants = [language.dtype(x["dtype"]) if isinstance(x, dict) else x for x in constants]
    # As in a call, None and the number 1 are constants.
    kinds = ["i32" if isinstance(x, int) and x != 1 else x if isinstance(x, str) else "constexpr" for x in types]
    signature = dict(zip(function.arg_names, [*kinds, *["constexpr"] * len(constants)], strict=True))
    values = {(i,): x for i, x in enumerate([*types, *constants]) if i >= len(types) or kinds[i] == "constexpr"}
    source = ASTSource(function, signature, values)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    settings, context = backend.parse_options(options), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, settings, backend.get_codegen_implementation(settings), backend.get_module_map(), context)
