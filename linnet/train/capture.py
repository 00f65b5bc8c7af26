"""A step as one CUDA graph: the host starts one thing where it started hundreds."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from linnet.ops import compat_torch

WARM_UP = 3  # calls of a shape that run as they are: kernels are compiled and libraries get their memory


class Captured:
    """A function of tensors that a GPU replays as one graph, for each set of shapes after the first calls of it.

    Replaying is what a call does, in the same kernels and so with the same results. The function gives a tensor, has
    all its state in tensors that it changes in place, and reads no values of them. Where it cannot be captured, a
    warning says why, and all calls run as they are; where memory runs out, that is raised.

    Attributes:
        graphs: how many shapes are replayed.
        failed: whether a capture failed.
    """

    def __init__(self, function: Callable[..., Tensor], device: torch.device):
        self.failed = False
        self._function, self._device = function, device
        self._stream = torch.cuda.Stream(device)
        self._calls: dict[tuple, int] = {}
        self._ready: dict[tuple, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}
        self._pool = None

    @property
    def graphs(self) -> int:
        return len(self._ready)

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.failed:
            return self._function(*inputs)
        key = tuple((x.shape, x.dtype) for x in inputs)
        if key not in self._ready:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= WARM_UP:
                return self._run_aside(*inputs)
            try:
                self._ready[key] = self._capture(inputs)
            except RuntimeError as error:
                full = find_out_of_memory(error)
                if full is not None:
                    raise full from None
                reason = str(error).strip().splitlines()[0]
                warnings.warn(
                    f"a step cannot be a CUDA graph, so each of its kernels is launched: {reason}", stacklevel=3
                )
                self.failed = True
                return self._function(*inputs)
        graph, places, output = self._ready[key]
        compat_torch.foreach_copy_(places, inputs)
        graph.replay()
        return output.clone()

    def _run_aside(self, *inputs: Tensor) -> Tensor:
        # On the stream of the capture, as what libraries keep for a stream has to be there before it.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = self._function(*inputs)
        current.wait_stream(self._stream)
        return output

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        places = tuple(x.clone() for x in inputs)
        graph = torch.cuda.CUDAGraph()
        # Graphs never run at once and keep nothing between two calls, so they share their memory.
        # The outer context is for a capture that fails: `torch.cuda.graph` then leaves its stream the current one.
        # "thread_local", as for decoding: by default a capture fails of what any thread of the process does meanwhile,
        # such as one that takes memory for the next batch. The function's backward has to stay in this thread.
        current = torch.cuda.current_stream(self._device)
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.stream(current), capture:
            output = self._function(*places)
        self._pool = graph.pool()
        return graph, places, output


def find_out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The error, or one during whose handling it came, that says that memory ran out: the end of a capture in which it
    did may fail as well, and hide it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error
