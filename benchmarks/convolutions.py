"""The rows of Mamba's and Hyena's ops in `kernels.py`: the selective scan, the short and the long convolution."""

from collections.abc import Iterator

import torch
from cases import TOKENS, Case, Cost, compare, draw
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import long_convolution, selective_scan, short_convolution


def selective(length: int, batch: int, width: int, states: int) -> Case:
    """Mamba's recurrence with the usual decays, 1 to N times the step. Its FLOPs are outside the tensor cores."""

    def draw_inputs(length: int, batch: int) -> list[Tensor]:
        x, B, C = (draw(batch, length, columns) for columns in (width, states, states))
        delta = F.softplus(draw(batch, length, width, dtype=torch.float32) - 3)
        rates = torch.arange(1.0, states + 1, device="cuda").expand(width, states)
        return [x, delta, -rates, B, C, draw(width, dtype=torch.float32)]

    def check() -> float:
        def call(x, delta, A, B, C, D, state):
            return selective_scan(x, delta, A, B, C, D, initial_state=state, output_final_state=True)

        short, few = min(length, 2048) - 5, min(batch, 2)
        return compare(call, [*draw_inputs(short, few), draw(few, width, states, dtype=torch.float32)])

    shape = {"length": length, "batch": batch, "width": width, "states": states}
    tokens = length * batch
    # x, delta, B, C in, y out; backward those and dy in, and their gradients out
    cost = Cost(tokens * (8 * width + 4 * states), tokens * (14 * width + 8 * states))
    run = lambda *inputs: selective_scan(*inputs)[0]  # noqa: E731
    return Case("selective_scan", shape, lambda: draw_inputs(length, batch), run, cost, check)


def short_conv(width: int, taps: int) -> Case:
    """The convolution before it, with SiLU."""
    shape, elements = {"length": 2048, "batch": TOKENS // 2048, "width": width, "states": taps}, TOKENS * width

    def call(x, weight):
        return short_convolution(x, weight, silu=True)

    def check() -> float:
        return compare(lambda *inputs: (call(*inputs),), [draw(2, 1003, width), draw(width, taps).float()])

    inputs = lambda: [draw(TOKENS // 2048, 2048, width), draw(width, taps).float()]  # noqa: E731
    return Case("short_convolution", shape, inputs, call, Cost(4 * elements, 6 * elements), check)


def selective_group() -> Iterator[Case]:
    yield selective(128, 24 * 128, 256, 4)  # as large as a bundle of MAD
    for length, batch in ((1024, 64), (8192, 8), (65_536, 1), (8192, 1)):
        yield selective(length, batch, 2048, 16)
    yield short_conv(2048, 4)


def long_conv(length: int, batch: int, width: int = 1024) -> Case:
    """Hyena's convolution with a filter a channel, given by its values; the floor is that of its bytes."""
    shape = {"length": length, "batch": batch, "width": width}

    def draw_inputs(length: int, batch: int) -> list[Tensor]:
        return [draw(batch, length, width), draw(width, length, dtype=torch.float32) / length**0.5]

    def call(x, kernel):
        return long_convolution(x, kernel)[0]

    def check() -> float:
        # The same side of the choice between Toeplitz products and FFTs.
        inputs = draw_inputs(length if length <= 512 else 1019, min(batch, 128 if length <= 512 else 2))
        return compare(lambda *inputs: (call(*inputs),), inputs)

    values, filters = batch * length * width, 4 * width * length
    cost = Cost(4 * values + filters, 6 * values + 2 * filters)
    return Case("long_convolution", shape, lambda: draw_inputs(length, batch), call, cost, check)


def longconv_group() -> Iterator[Case]:
    yield from (long_conv(length, TOKENS // length) for length in (128, 256, 512, 1024, 4096, 16_384, 65_536))
