"""What all ops refuse alike: tensors on another device than their first one, by name and with the fix."""

import pytest
import torch

from linnet import ops


def call_of(op):
    """The op and its arguments by name, of which all but the first may be on another device."""
    q, k, v, decays = torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 4), -torch.ones(1, 4, 2, 4)
    match op:
        case "lightning":
            return ops.lightning_attention, {"q": q, "k": k, "v": v, "log_decay": torch.zeros(2)}
        case "gated":
            return ops.gated_linear_attention, {"q": q, "k": k, "v": v, "log_decay": decays}
        case "forget":
            return ops.forget_gated_attention, {"q": q, "x": k, "v": v, "lower_bound": torch.full((2, 4), 0.5)}
        case "additive":
            positions = torch.zeros(1, 4, dtype=torch.int64)
            return ops.additive_attention, {"q": q, "k": k, "v": v, "theta": torch.ones(2, 4), "positions": positions}
        case "scan":
            x = torch.zeros(1, 4, 8, 2)
            return ops.diagonal_scan, {"x": x, "log_decay": x[..., 0], "theta": torch.ones(8), "initial_state": x[:, 0]}
        case "delta":
            return ops.gated_delta_rule, {"q": q, "k": k, "v": v, "log_decay": decays, "erase": torch.ones(1, 4, 2)}
        case "dplr":
            return ops.dplr_rule, {"q": q, "k": k, "v": v, "log_decay": decays, "a": q, "b": q}
        case "ssd":
            return ops.ssd, {"q": q, "k": k, "v": v, "log_decay": decays[..., 0], "times": torch.ones(1, 4, 2)}
        case "selective":
            x, B = torch.zeros(1, 4, 8), torch.zeros(1, 4, 3)
            return ops.selective_scan, {"x": x, "delta": x, "A": -torch.ones(8, 3), "B": B, "C": B}
    x, modes = torch.zeros(1, 4, 8), torch.zeros(8, 3)
    return ops.modal_convolution, {"x": x, "log_decay": modes, "weight": modes, "initial_state": modes[None]}


OPS = ["lightning", "gated", "forget", "additive", "scan", "modal", "delta", "dplr", "ssd", "selective"]


@pytest.mark.parametrize("op", OPS)
def test_tensors_elsewhere_are_refused_by_name(op):
    function, call = call_of(op)
    function(**call)
    first, *others = call
    for name in others:
        with pytest.raises(ValueError, match=rf"{name}.* meta.* {first}.* cpu.*{name}\.to\('cpu'\)"):
            function(**call | {name: call[name].to("meta")})


def test_step_refuses_a_decay_of_another_size():
    q = torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match=r"log_decay.* \[1\].* \[2\]"):
        ops.lightning_step(q, q, q, torch.zeros(1, 2, 4, 4), log_decay=torch.zeros(1))


@pytest.mark.parametrize("op", OPS)
def test_debug_asks_no_values_of_tensors_without_any(op):
    """Models are counted on the device meta, and `torch.vmap` hides the values of its models."""
    function, call = call_of(op)
    expected = function(**call)[0]
    with ops.debug():
        counted = function(**{name: x.to("meta") for name, x in call.items()})[0]
        (mapped,) = torch.vmap(lambda models: function(**models)[0])({name: x[None] for name, x in call.items()})
    assert counted.is_meta and counted.shape == expected.shape
    torch.testing.assert_close(mapped, expected)


@pytest.mark.parametrize("op", ["gated", "delta", "dplr", "ssd", "selective"])
def test_a_list_of_boundaries_is_refused_with_the_fix(op):
    function, call = call_of(op)
    with pytest.raises(ValueError, match="cu_seqlens is a list.*torch.tensor"):
        function(**call, cu_seqlens=[0, 4])
