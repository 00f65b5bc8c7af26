"""The kernels of a token of softmax attention: a layer's steps against its parallel form in float64, cache included."""

import copy
import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching

from linnet import ops
from linnet.layers.base import LayerContext
from linnet.layers.mixers.softmax.attention import Attention, AttentionConfig
from linnet.ops.attention import Cache, has_step_kernel

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
YARN = {"kind": "yarn", "factor": 4.0, "length": 16}
OPTIONS = {
    "plain": {"num_heads": 2, "rope": False},
    "rope": {"num_heads": 3},
    "yarn": {"num_heads": 2, "rope_scaling": YARN, "bias": True},
    "scaled": {"num_heads": 2, "scale": 0.3},
    "window": {"num_heads": 4, "num_kv_heads": 2, "window": 7},
    "block": {"num_heads": 2, "block": 5},
    "normed": {"num_heads": 4, "num_kv_heads": 1, "qk_norm": True, "gate": "head"},
    "over the width": {"num_heads": 2, "qk_norm": True, "qk_norm_over": "width"},
    "output normed": {"num_heads": 2, "gate": "channel", "out_norm": "rmsnorm"},
    "qwen": {
        "num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "qk_norm_kind": "zero_centred_rmsnorm", "gate": "channel",
        "rope_fraction": 0.25,
    },
}  # fmt: skip


def check(name, dtype=torch.float32, device="cpu", rows=2, tokens=12, slots=16, head_dim=24, **changes):
    config = AttentionConfig(**OPTIONS[name] | {"head_dim": head_dim} | changes)
    torch.manual_seed(0)
    layer = Attention(config, LayerContext(d_model=40, norm_eps=1e-5)).to(device, dtype).requires_grad_(False)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            norm.weight.add_(0.5 * torch.randn_like(norm.weight))
    wide = copy.deepcopy(layer).double()
    x = torch.randn(rows, tokens, 40, device=device).to(dtype)
    empty = layer.init_state(rows, slots, device)
    expected, after = wide(x.double(), {key: s.double() if s.is_floating_point() else s for key, s in empty.items()})
    # The first tokens through the parallel form, the rest one by one, in views of a larger cache.
    begun = max(tokens // 3, tokens - 12)
    before, state = layer(x[:, :begun], empty)
    longest = state["k"].shape[1]
    larger = {key: torch.cat([s, s[:, :3] * 0], 1) if s.ndim > 1 else s for key, s in state.items()}
    state = {key: s[:, :longest] if s.ndim > 1 else s for key, s in larger.items()}
    outputs = [before]
    with ops.use_backend("triton"):
        for t in range(begun, tokens):
            with launching("attention.step_kernel"):
                out, same = layer.step(x[:, t], state)
            assert same is state
            outputs.append(out[:, None])
    assert_near([torch.cat(outputs, 1)], [expected], TOLERANCE[dtype])
    assert_near([state["k"], state["v"]], [after["k"], after["v"]], TOLERANCE[dtype])
    assert torch.equal(state["position"], after["position"])
    assert torch.equal(state["key_position"], after["key_position"])
    assert all(not s[:, longest:].any() for s in larger.values() if s.ndim > 1)


@gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_options(name, dtype):
    check(name, dtype, "cuda")


@gpu
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("rows", [1, 64])
def test_long_rows(head_dim, rows):
    check("qwen", torch.bfloat16, "cuda", rows, tokens=700, slots=1024, head_dim=head_dim)


@gpu
def test_a_row_does_not_depend_on_the_others():
    """The cache is cut to the longest row; the sums of a row are the same bits at every length and place."""
    layer = Attention(AttentionConfig(num_heads=4), LayerContext(d_model=256)).to("cuda", torch.bfloat16)
    layer.requires_grad_(False)
    before, x = torch.randn(8, 100, 256, device="cuda").bfloat16(), torch.randn(8, 256, device="cuda").bfloat16()
    results = []
    for slots in (128, 256, 1024):
        state = layer.init_state(8, slots, "cuda")
        _, state = layer(before, state)
        results.append(layer.step(x, state)[0])
    assert all(torch.equal(results[0], other) for other in results)


def test_what_has_no_kernel():
    """A gradient, mixed dtypes, float64, wide heads and caches that are not in one piece go through PyTorch."""

    def answer(heads=2, width=16, dtype=torch.float32, of_cache=None, **changes):
        token = torch.zeros(2, heads, width, dtype=dtype)
        slots = torch.zeros(2, 4, heads, width, dtype=of_cache or dtype)
        cache = Cache(slots, slots.clone(), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
        return has_step_kernel(changes.get("q", token), token, token, cache._replace(**changes.get("cache", {})))

    assert not answer()  # on a CPU
    with ops.use_backend("triton"):
        assert answer() and answer(dtype=torch.bfloat16)
        assert not answer(dtype=torch.float64) and not answer(of_cache=torch.bfloat16) and not answer(width=512)
        assert not answer(q=torch.zeros(2, 2, 16, requires_grad=True))
        assert not answer(cache={"keys": torch.zeros(2, 4, 2, 32)[..., ::2]})


INTERPRETED = [*((name, {}) for name in OPTIONS), ("qwen", {"rows": 1, "tokens": 110, "slots": 128}),
               ("window", {"tokens": 90, "slots": 128, "window": 70})]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED)


if __name__ == "__main__":
    for name, options in INTERPRETED:
        check(name, **options)
        print(name, options, "agrees")
