"""Calls that miss the kernels of their op warn once; float16 is refused by the ops with a matrix state."""

import importlib.util
import warnings

import pytest
import torch

from linnet.ops import (
    SlowPathWarning,
    additive_attention,
    backend,
    diagonal_scan,
    forget_gated_attention,
    gated_activation,
    gated_linear_attention,
    lightning_attention,
    linear_cross_entropy,
    modal_convolution,
    rms_norm,
    rotate,
    selective_scan,
    short_convolution,
    ssd,
    use_backend,
)
from linnet.ops.activation import forget_inputs, log_sigmoid
from linnet.ops.attention import causal_attention

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


def make(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def heads(width=16, dtype=torch.float32):
    return [make(1, 4, 2, width, dtype=dtype) for _ in range(3)]


def gated(q, k, v):
    return gated_linear_attention(q, k, v, torch.zeros_like(q, dtype=torch.float32))


def scalar(q, k, v):
    return ssd(q, k, v, torch.zeros(v.shape[:3]))


@pytest.fixture(autouse=True)
def forget():
    """What was warned of, and plans, which warn when they are made."""
    from linnet.ops.lightning import triton

    backend.warn_slow.cache_clear()
    triton._plan.cache_clear()


MATRIX_STATE = {
    "lightning_attention": lightning_attention,
    "gated_linear_attention": gated,
    "forget_gated_attention": forget_gated_attention,
    "additive_attention": additive_attention,
    "ssd": scalar,
}


@pytest.mark.parametrize("op", MATRIX_STATE)
def test_float16_is_refused_where_kernels_would_run(op):
    q, k, v = heads(dtype=torch.float16)
    MATRIX_STATE[op](q, k, v)  # on a CPU, in float32 arithmetic
    for call in ((q, k, v), (q.float(), k.float(), v)):
        with use_backend("triton"), pytest.raises(ValueError, match=rf"{op}: .*float16.*bfloat16"):
            MATRIX_STATE[op](*call)


SLOW = {
    "float64": ("lightning_attention", lambda: lightning_attention(*heads(dtype=torch.float64))),
    "float64 gated": ("gated_linear_attention", lambda: gated(*heads(dtype=torch.float64))),
    "dtypes": (
        "lightning_attention",
        lambda: lightning_attention(*heads()[:2], make(1, 4, 2, 16, dtype=torch.bfloat16)),
    ),
    "width": ("lightning_attention", lambda: lightning_attention(*heads(12))),
    "width gated": ("forget_gated_attention", lambda: forget_gated_attention(*heads(264))),
    "width ssd": ("ssd", lambda: scalar(*heads(136))),
    "scan": ("diagonal_scan", lambda: diagonal_scan(*[make(1, 4, 8, dtype=torch.float64)] * 2)),
    "modes": ("modal_convolution", lambda: modal_convolution(make(1, 4, 8), *[make(8, 65)] * 2)),
    "taps": ("short_convolution", lambda: short_convolution(make(1, 4, 8), make(8, 9))),
    "cross entropy": (
        "linear_cross_entropy",
        lambda: linear_cross_entropy(
            make(1025, 2, dtype=torch.float64), make(32768, 2, dtype=torch.float64), torch.zeros(1025, dtype=torch.long)
        ),
    ),
    "attention": ("causal_attention", lambda: causal_attention(*heads(dtype=torch.float64))),
    "activation": ("gated_activation", lambda: gated_activation(*[make(2, 8, dtype=torch.float64)] * 2)),
    "forget_inputs": ("forget_inputs", lambda: forget_inputs(*[make(2, 8, dtype=torch.float64)] * 2, None)),
    "log_sigmoid": ("log_sigmoid", lambda: log_sigmoid(make(2, 8, dtype=torch.float64))),
    "norm": ("rms_norm", lambda: rms_norm(make(2, 8, dtype=torch.float64))),
    "rotation": (
        "rotate",
        lambda: rotate(make(1, 4, 2, 8, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.long), make(2, 4)),
    ),
    "states": ("selective_scan", lambda: selective_scan(*[make(1, 4, 8)] * 2, make(8, 65), *[make(1, 4, 65)] * 2)),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_slow_path_warns_once(case):
    op, call = SLOW[case]
    with warnings.catch_warnings(record=True) as said, use_backend("triton"):
        warnings.simplefilter("always")
        call()
        call()
    messages = [str(x.message) for x in said if x.category is SlowPathWarning]
    assert len(messages) == 1 and messages[0].startswith(f"{op}: ")


def test_other_reasons_warn_again():
    with pytest.warns(SlowPathWarning) as said, use_backend("triton"):
        lightning_attention(*heads(12))
        lightning_attention(*heads(20))
    assert len(said) == 2


def test_plain_calls_on_a_cpu_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, call in SLOW.values():
            call()
