"""The kernels of a token of softmax attention: a layer's steps against its parallel form in float64, cache included."""

import copy
import importlib.util

import pytest
import torch
from precision import TOLERANCE, assert_near, launching

from linnet import ops
from linnet.layers.base import LayerContext
from linnet.layers.mixers.softmax.attention import Attention, AttentionConfig
from linnet.ops.attention import Cache, Turn, attend_token, has_step_kernel

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


@gpu
def test_a_cache_of_more_than_2_31_numbers():
    """The last tokens of it, in a window, as those of a small one."""
    tokens = torch.randn(2, 16, 16, 256, device="cuda").bfloat16()
    q, k, v = torch.randn(3, 1, 16, 256, device="cuda").bfloat16()
    outputs = []
    for slots in (64, 2**19 + 64):
        keys, values = torch.zeros(2, 1, slots, 16, 256, device="cuda", dtype=torch.bfloat16)
        places = torch.zeros(1, slots, dtype=torch.int64, device="cuda")
        keys[0, -24:-8], values[0, -24:-8] = tokens
        places[0, -24:-8] = torch.arange(slots - 23, slots - 7, device="cuda")
        cache = Cache(keys, values, places, torch.full((1,), slots - 8, device="cuda"))
        assert has_step_kernel(q, k, v, cache)
        outputs.append(attend_token(q, k, v, cache, Turn(), window=16))
        assert torch.equal(keys[0, -8], k[0])
    assert_near(outputs[1:], outputs[:1])


def test_what_has_no_kernel():
    """A gradient, mixed dtypes, float64, wide heads and caches that are not in one piece go through PyTorch."""

    def answer(heads=2, width=16, dtype=torch.float32, of_cache=None, of_keys=None, **changes):
        q, k = (torch.zeros(2, count, width, dtype=dtype) for count in (heads, of_keys or heads))
        slots = torch.zeros(2, 4, *k.shape[1:], dtype=of_cache or dtype)
        cache = Cache(slots, slots.clone(), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
        return has_step_kernel(changes.get("q", q), k, k, cache._replace(**changes.get("cache", {})))

    assert not answer()  # on a CPU
    with ops.use_backend("triton"):
        assert answer() and answer(dtype=torch.bfloat16)
        assert not answer(dtype=torch.float64) and not answer(of_cache=torch.bfloat16) and not answer(width=512)
        assert not answer(q=torch.zeros(2, 2, 16, requires_grad=True))
        assert not answer(cache={"keys": torch.zeros(2, 4, 2, 32)[..., ::2]})
        # PyTorch says what is wrong: another batch, another device, rows that share their memory.
        assert not answer(q=torch.zeros(3, 2, 16)) and not answer(cache={"values": torch.zeros(2, 5, 2, 16)})
        assert not answer(cache={"keys": torch.zeros(2, 4, 2, 16, device="meta")})
        assert not answer(cache={"position": torch.zeros(1, dtype=torch.int64).expand(2)})
        assert not answer(cache={"position": torch.zeros(4, dtype=torch.int64)[::2]})
        assert not answer(cache={"keys": torch.zeros(2, 4, 2, 16, requires_grad=True)})
        # Many queries share a head of keys: a program would have no memory for them.
        assert answer(64, 128, of_keys=1) and not answer(64, 256, of_keys=1)
        assert answer(64, 256, torch.bfloat16, of_keys=1) and not answer(512, 64, torch.bfloat16, of_keys=1)


def test_a_card_with_little_shared_memory_has_no_kernel_for_many_queries(monkeypatch):
    from linnet.ops.attention import step_kernel

    monkeypatch.setattr(step_kernel, "has_little_shared_memory", lambda device: True)
    fits = step_kernel._fits.__wrapped__
    assert fits(16, 256, torch.float32, None) and fits(64, 128, torch.bfloat16, None)
    assert not fits(32, 256, torch.float32, None) and not fits(128, 128, torch.bfloat16, None)


def test_all_lengths_of_a_cache_share_one_variant():
    """An engine tries its model with caches of 1 and 3 slots before it has its own."""
    from linnet.ops.attention.step_kernel import step_kernel

    assert {"S", "places_stride"} == {x.name for x in step_kernel.params if x.do_not_specialize}


def test_a_gate_learns_while_the_projections_are_fixed():
    layer = Attention(AttentionConfig(num_heads=2, rope=False, gate="head"), LayerContext(d_model=16))
    layer.requires_grad_(False).gate_proj.requires_grad_(True)
    with ops.use_backend("triton"), launching(None):
        y, _ = layer.step(torch.randn(2, 16), layer.init_state(2, 4, "cpu"))
    y.square().sum().backward()
    assert layer.gate_proj.weight.grad.any()


INTERPRETED = [*((name, {}) for name in OPTIONS), ("qwen", {"rows": 1, "tokens": 110, "slots": 128}),
               ("window", {"tokens": 90, "slots": 128, "window": 70})]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels themselves are tested")
def test_interpreted(interpreted):
    assert interpreted(__file__) == len(INTERPRETED)


if __name__ == "__main__":
    for name, options in INTERPRETED:
        check(name, **options)
        print(name, options, "agrees")
