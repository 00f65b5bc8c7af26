"""A step as one CUDA graph: the host launches one graph instead of hundreds of kernels."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnet.ops import compat_torch

MOST = 16  # captured shapes: each keeps memory of its own; further ones run without a graph
WARM_UP = 3  # eager calls per shape before its capture: they compile kernels and let libraries allocate memory


@dataclass
class _Memory:
    """The stream of captures, and the memory pool of their graphs; None before the first."""

    stream: torch.cuda.Stream
    pool: Any = None


class Captured:
    """A function of tensors that a GPU replays as one graph. Each set of shapes is captured after its first calls.

    A replay runs the same kernels as the call, with the same results. The function returns a tensor, changes its state
    tensors in place and reads no tensor values on the host. Past `MOST` shapes, calls run without a graph. If the
    function cannot be captured, a warning gives the reason, and all calls run without a graph. An out-of-memory error
    is raised.

    Attributes:
        graphs: number of captured shapes.
        failed: whether a capture failed.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        device: torch.device,
        what: str = "a step",
        beside: "Captured | None" = None,
    ):
        """
        Args:
            what: the function, for the warning.
            beside: captures of another function that never runs at the same time; the graphs share their memory.
        """
        self.failed = False
        self._function, self._device, self._what = function, device, what
        self._memory = _Memory(torch.cuda.Stream(device)) if beside is None else beside._memory
        self._calls: dict[tuple, int] = {}
        self._ready: dict[tuple, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

    @property
    def graphs(self) -> int:
        return len(self._ready)

    def holds(self, *inputs: Tensor) -> bool:
        """Whether calls with inputs of these shapes replay a graph."""
        return not self.failed and _key(inputs) in self._ready

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.failed:
            return self._function(*inputs)
        key = _key(inputs)
        if key not in self._ready:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= WARM_UP or len(self._ready) == MOST:
                return self._run_aside(*inputs)
            try:
                self._ready[key] = self._capture(inputs)
            except RuntimeError as error:
                full = find_out_of_memory(error)
                if full is not None:
                    raise full from None
                reason = str(error).strip().splitlines()[0]
                warnings.warn(
                    f"{self._what} cannot be a CUDA graph, so each of its kernels is launched: {reason}", stacklevel=3
                )
                self.failed = True
                return self._function(*inputs)
        graph, places, output = self._ready[key]
        compat_torch.foreach_copy_(places, inputs)
        graph.replay()
        return output.clone()

    def _run_aside(self, *inputs: Tensor) -> Tensor:
        # Runs on the stream of the capture, so that libraries allocate their per-stream memory before it.
        current = torch.cuda.current_stream(self._device)
        self._memory.stream.wait_stream(current)
        with torch.cuda.stream(self._memory.stream):
            output = self._function(*inputs)
        current.wait_stream(self._memory.stream)
        return output

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        places = tuple(x.clone() for x in inputs)
        graph = torch.cuda.CUDAGraph()
        # Graphs never run at the same time and keep nothing between two calls, so they share their memory.
        # The outer context restores the stream: after a failed capture, `torch.cuda.graph` leaves its stream current.
        # "thread_local", as in decoding: in the default mode an allocation of another thread, for example for the next
        # batch, would fail the capture. The function's backward must stay in this thread.
        current = torch.cuda.current_stream(self._device)
        capture = torch.cuda.graph(
            graph, pool=self._memory.pool, stream=self._memory.stream, capture_error_mode="thread_local"
        )
        with torch.cuda.stream(current), capture:
            output = self._function(*places)
        self._memory.pool = graph.pool()
        return graph, places, output


def _key(inputs: tuple[Tensor, ...]) -> tuple:
    return tuple((x.shape, x.dtype) for x in inputs)


def find_out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Returns the out-of-memory error among an error and its contexts, None if there is none.

    When memory runs out during a capture, the end of the capture can fail as well and hide the first error.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error
