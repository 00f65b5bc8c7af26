"""Another process, without the time that a fresh interpreter takes to import torch."""

import os
from collections.abc import Callable

import pytest


def _in_child(function: Callable[[], object]) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture
def in_child() -> Callable[[Callable[[], object]], str]:
    """in_child(function): calls it in a forked process and returns what it returned, as text."""
    return _in_child
