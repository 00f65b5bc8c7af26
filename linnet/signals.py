"""Stops of a process by Ctrl-C (SIGINT) or SIGTERM: exceptions, so that what runs can save, clean up and end its own
processes."""

import signal
import threading
from types import FrameType


class Terminated(SystemExit):
    """Ends the process with the usual exit code for SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Interrupt:
    """Signal handler that raises an error once no module is being imported: PyTorch's imports would swallow it.

    A second signal before then ends the process at once; without `patient`, so does the first one during an import.
    """

    def __init__(self, error: type[BaseException] = KeyboardInterrupt, patient: bool = True):
        self._error, self._patient = error, patient
        self._waits = self._again = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        importing = _importing(frame)
        if (self._waits or (importing and not self._patient)) and not self._again:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._again, self._waits = False, importing
        if not importing:
            raise self._error()
        timer = threading.Timer(0.01, self._send, (number,))
        timer.daemon = True
        timer.start()

    def _send(self, number: int) -> None:
        self._again = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)  # only there do handlers run


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
