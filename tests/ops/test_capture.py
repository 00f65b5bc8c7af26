"""A captured function is the function; what happens where it cannot be captured is said as it is."""

import threading
import warnings

import pytest
import torch

from linnet.ops.capture import WARM_UP, Captured, find_out_of_memory

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_end_of_a_capture_does_not_hide_that_memory_ran_out():
    class Capture:
        def __enter__(self):
            pass

        def __exit__(self, *details):
            raise RuntimeError("operation failed due to a previous error during capture")

    full = torch.OutOfMemoryError("no memory")
    try:
        with Capture(), Capture():
            raise full
    except RuntimeError as error:
        assert error is not full and find_out_of_memory(error) is full
    assert find_out_of_memory(full) is full
    assert find_out_of_memory(RuntimeError("something else")) is None


@gpu
def test_memory_that_runs_out_in_a_capture_is_raised():
    state, calls = torch.zeros(4, device="cuda"), []

    def step(x):
        calls.append(len(calls))
        state.add_(x)
        if len(calls) == WARM_UP + 1:
            torch.empty(2**46, device="cuda")
        return state.clone()

    captured, x = Captured(step, torch.device("cuda")), torch.ones(4, device="cuda")
    for _ in range(WARM_UP):
        captured(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            captured(x)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        # There is room again: the next call is captured, and nothing of the one that failed was done.
        assert captured(x).tolist() == captured(x).sub(1).tolist() == [WARM_UP + 1.0] * 4
    assert captured.graphs == 1 and not captured.failed


@gpu
def test_other_threads_may_use_the_gpu_during_a_capture():
    def elsewhere():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(torch.ones(2**20, pin_memory=True).cuda(non_blocking=True).sum().item())

    def step(x):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x * 2

    found, captured = [], Captured(step, torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(WARM_UP + 3):
            assert captured(torch.full((4,), float(i), device="cuda")).tolist() == [2.0 * i] * 4
    assert captured.graphs == 1 and found == [2.0**20] * (WARM_UP + 1)
