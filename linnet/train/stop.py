"""Ctrl-C and SIGTERM as a request that is granted between two steps."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Stop:
    """Whether somebody asked to stop, and how the process then ends."""

    signal: int | None = None

    def end(self) -> None:
        """Raises what the signal stands for: KeyboardInterrupt, or SystemExit with the usual code of SIGTERM."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


@contextlib.contextmanager
def graceful_stop() -> Iterator[Stop]:
    """The first SIGINT or SIGTERM only sets `stop.signal`, the second acts at once. For the main thread only."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def note(number, frame) -> None:
        stop.signal = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
