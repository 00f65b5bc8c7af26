"""Ctrl-C and SIGTERM as a request to stop between two steps."""

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Iterator


def stop_with_parent() -> None:
    """Asks Linux to send this process SIGTERM when the process that started it dies; elsewhere does nothing."""
    if sys.platform == "linux":
        set_signal_at_death_of_parent = 1  # PR_SET_PDEATHSIG of prctl(2)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_signal_at_death_of_parent, signal.SIGTERM)


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
