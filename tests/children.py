"""Processes of their own for tests that kill or stop one, forked from a server that has imported PyTorch and Linnet.

A new interpreter takes two seconds to import them.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import weakref
from pathlib import Path

PRELOAD = ["torch", "torch._dynamo", "linnet.cli", "linnet.train"]  # the second for the first optimizer of a process
COMMAND = "from linnet.cli import main; main()"


class Child:
    """A process that runs a program: what tests use of `subprocess.Popen`."""

    def __init__(self, program: str, *arguments: object, **environment: str):
        """Starts it.

        Args:
            program: source text, which runs as `python -c` runs it.
            arguments: become sys.argv[1:] as strings.
            environment: more variables.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)  # no effect after the pool of tests/parallel has started the server
        descriptor, name = tempfile.mkstemp(prefix="linnet-child-")
        os.close(descriptor)
        self._output = Path(name)
        weakref.finalize(self, self._output.unlink, missing_ok=True)
        environment = dict(os.environ) | environment
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        given = program, [str(one) for one in arguments], environment, os.getcwd(), cores, name
        self._process = context.Process(target=_run, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Negative for the signal that ended it, None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float = 300) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, f"it still runs after {timeout} s\n{self.output()}"
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def output(self) -> str:
        """All that it has written to stdout and stderr so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")


def _run(program: str, arguments: list[str], environment: dict[str, str], folder: str, cores: set | None, out: str):
    with open(out, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if cores is not None:  # those of the test, not of what started the server
        os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # found anew, from the environment
    sys.argv[:] = ["-c", *arguments]
    exec(compile(program, "<child>", "exec"), {"__name__": "__main__"})
