"""Ctrl-C and SIGTERM as a request to stop between two steps."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Stop:
    """Records whether a signal requested a stop.

    Attributes:
        signal: number of the signal, None before one arrives.
    """

    signal: int | None = None

    def end(self) -> None:
        """Raises KeyboardInterrupt for SIGINT, SystemExit with the usual exit code for SIGTERM."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


@contextlib.contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Yields a `Stop` that the first SIGINT or SIGTERM sets; the second acts at once. Only in the main thread."""
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
