"""TNN against the Toeplitz matrix of its paper, and its cache."""

import pytest
import torch
from test_state_spaces import build, compare, inputs
from torch.nn import functional as F

D, T = 6, 19


def toeplitz(mixer, length):
    """T [C, T, T] from the network of distances, one distance at a time."""
    rows = torch.zeros(mixer.channels, length, length, dtype=torch.float64)
    for lag in range(length):
        y = mixer.rpe.first(torch.tensor([float(lag)], dtype=torch.float64))
        for layer in (*mixer.rpe.layers, mixer.rpe.out):
            y = layer(F.relu(y / (y.square().mean() + mixer.rpe.norm.eps).sqrt()))
        for t in range(lag, length):
            rows[:, t, t - lag] = mixer.config.decay**lag * y
    return rows


@pytest.mark.parametrize("options", [{"rpe_layers": 2}, {"expand": 1, "decay": 1.0, "rpe_dim": 5, "rpe_layers": 0}])
def test_the_unit_multiplies_by_the_toeplitz_matrix(options):
    mixer = build("tnn", options)

    def expected(x):
        u, v = F.silu(mixer.u_proj(x)), F.silu(mixer.v_proj(x))
        return mixer.out_proj(u * torch.einsum("cts,bsc->btc", toeplitz(mixer, T), v))

    compare(mixer, expected)


def test_packed_documents_continue_caches_of_their_own():
    mixer, x = build("tnn"), inputs()[:1]
    starts = mixer(inputs().flip(1)[:, :5], mixer.init_state(2, T + 5, dtype=torch.float64))[1]
    bounds = [0, 4, T]
    y, after = mixer(x, starts, torch.tensor(bounds, dtype=torch.int32))
    for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        alone, state = mixer(x[:, a:b], {name: s[i : i + 1] for name, s in starts.items()})
        torch.testing.assert_close(y[:, a:b], alone, rtol=1e-10, atol=1e-10)
        for name, s in state.items():
            torch.testing.assert_close(after[name][i : i + 1], s)


def test_the_corner_of_a_cache_gives_the_same_tokens():
    mixer, x = build("tnn"), inputs()
    whole, parts = (mixer.init_state(2, length, dtype=torch.float64) for length in (50, 50))
    with torch.no_grad():
        for t in range(T):
            y, whole = mixer.step(x[:, t], whole)
            corner = {"values": parts["values"][:, : t + 1], "position": parts["position"]}
            torch.testing.assert_close(mixer.step(x[:, t], corner)[0], y, rtol=1e-10, atol=1e-10)


def test_distances_are_exact_in_half_precision():
    """bfloat16 has no 257: neighbours far away would share a coefficient."""
    mixer = build("tnn", {"decay": 1.0}).bfloat16()
    filters = mixer.rpe(302)
    assert filters.dtype == torch.float32 and not torch.equal(filters[:, 300], filters[:, 301])
