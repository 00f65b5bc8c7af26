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

    from translation import translate
    from triton import language

    def run(file: str) -> int:
        print(file, file=_interpreter.stdin, flush=True)
        answer = json.loads(_interpreter.stdout.readline())
        assert answer["code"] == 0, answer["output"][-4000:]
        for module, name, arguments, options in answer["variants"]:
            kernel = getattr(importlib.import_module(module), name)
            arguments = (language.dtype(x["dtype"]) if isinstance(x, dict) else x for x in arguments)
            translate(kernel, tuple(arguments), tuple(options.items()))
        return answer["output"].count("agrees")

    return run
