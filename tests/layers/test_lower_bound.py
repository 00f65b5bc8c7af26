"""Lower bounds kept for decoding."""

import copy

import torch

from linnet.layers.lower_bound import LowerBounds


def test_kept_until_gamma_changes():
    bounds = LowerBounds(4, 8)
    with torch.no_grad():
        kept = bounds.constant(2, "inclusive")
        assert torch.equal(kept, bounds(2, "inclusive")) and bounds.constant(2, "inclusive") is kept
        assert bounds.constant(2, "exclusive") is not kept
        bounds.gamma[1] += 1.0
        assert torch.equal(bounds.constant(2, "inclusive"), bounds(2, "inclusive"))
        assert not torch.equal(bounds.constant(2, "inclusive"), kept)
        other = copy.deepcopy(bounds)
        other.load_state_dict({"gamma": torch.randn(4, 8)})
        assert torch.equal(other.constant(3, "inclusive"), other(3, "inclusive"))
        kept = bounds.constant(1, "inclusive")
        bounds.gamma = torch.nn.Parameter(bounds.gamma.detach().clone())
        assert bounds.constant(1, "inclusive") is not kept
        assert copy.deepcopy(bounds).state_dict().keys() == {"gamma"}
        assert bounds.double().constant(1, "inclusive").dtype == torch.float64
    assert bounds.constant(2, "inclusive").requires_grad
