"""Batches on the model's device. For a GPU, a thread reads the next batch while the GPU works on this one."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from linnet.train.objective import Batch, BatchSource


class Prefetch:
    """Serves the batches of a source on a device: of each batch the rows of one rank of `world`."""

    def __init__(self, source: BatchSource, device: torch.device, rank: int = 0, world: int = 1):
        self._source, self._device = source, device
        self._share = {} if world == 1 else {"rank": rank, "world": world}
        self._ahead: dict[int, Future[Batch]] = {}
        # On a CPU a second thread would only compete with the model for time.
        self._thread = ThreadPoolExecutor(1, "linnet-prefetch") if device.type == "cuda" else None

    def get(self, position: int) -> Batch:
        if self._thread is None:
            return self._source.batch(position, **self._share)
        future = self._ahead.pop(position, None) or self._thread.submit(self._pinned, position)
        for other in self._ahead.values():  # batches that were read ahead before the position jumped
            other.cancel()
        self._ahead = {position + 1: self._thread.submit(self._pinned, position + 1)}
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in future.result())

    def close(self) -> None:
        """Stops reading ahead, and the worker processes of the source."""
        if (close := getattr(self._source, "close", None)) is not None:
            close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _pinned(self, position: int) -> Batch:
        return tuple(tensor.pin_memory() for tensor in self._source.batch(position, **self._share))
