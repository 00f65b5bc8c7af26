"""Caches are read up to the current length, and that changes no token."""

import pytest
import torch

from linnet.inference import Engine, Sampling
from linnet.models import ModelConfig, build_model
from linnet.models.causal_lm import SHORTEST, CacheLengths

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def model_of(window=0, layout="(tnl+sglu attention+swiglu) x2"):
    config = ModelConfig(
        d_model=32,
        layout=layout,
        vocab_size=97,
        options={"attention": {"num_heads": 2, "num_kv_heads": 1, "window": window}, "tnl": {"num_heads": 2}},
        init_std=0.3,
    )
    model = build_model(config, seed=1)
    with torch.no_grad():
        model.embedding.weight.mul_(0.02)
    return model


def prompt(length):
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def test_lengths_double_up_to_the_context():
    assert CacheLengths(model_of(), 3000).values == [512, 1024, 2048, 3000]
    assert CacheLengths(model_of(), 512).values == [512]
    assert CacheLengths(model_of(window=800), 1 << 40).values == [512, 1 << 40]
    config = ModelConfig(d_model=32, layout="(tnl+sglu) x2", vocab_size=97, options={"tnl": {"num_heads": 2}})
    assert CacheLengths(build_model(config), 1 << 40).values == [1 << 40]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 600])
def test_tokens_are_those_of_a_cache_that_is_read_whole(window, device):
    """Over a change of length, with log-probabilities in float32; the whole cache is that of a longer context."""
    prompts, sampling = [prompt(SHORTEST - 4), prompt(40), prompt(1100)], Sampling(max_tokens=12, logprobs=0)
    settings = {"slots": 2, "device": device, "dtype": torch.float32, "context_length": 2000}
    short = Engine(model_of(window), **settings)
    whole = Engine(model_of(window), **settings)
    whole._lengths.values = whole._decoder._lengths.values = whole._lengths.values[-1:]
    for a, b in zip(short.generate(prompts, sampling), whole.generate(prompts, sampling), strict=True):
        assert a.tokens == b.tokens
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_longer_neighbour_changes_no_bit(device):
    """A row reads more slots beside a longer one, all of them empty. On a GPU, SDPA may sum in another order then."""
    engine = Engine(model_of(), slots=3, device=device, context_length=4096)
    sampling = Sampling(max_tokens=10, logprobs=0, temperature=0.8, seed=3)
    lengths = [30, 500, 508, 600, 1020, 2100]
    alone = [engine.generate([prompt(length)], sampling)[0] for length in lengths]
    together = engine.generate([prompt(length) for length in lengths], sampling)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        tolerance = 0.0 if device == "cpu" else 1e-3
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0.0, atol=tolerance)


def test_a_step_reads_the_slots_in_use(monkeypatch):
    read = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **options):
        if q.shape[2] == 1:
            read.append(k.shape[2])
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    engine = Engine(model_of(), slots=2, device="cpu", context_length=4096)
    read.clear()
    engine.generate([prompt(508)], Sampling(max_tokens=10))
    assert sorted(set(read)) == [512, 1024]


def test_a_saved_prefix_has_the_whole_cache(tmp_path):
    engine = Engine(model_of(), slots=1, device="cpu", context_length=2000)
    sampling = Sampling(max_tokens=6)
    engine.prefix(prompt(300)).save(tmp_path / "state")
    prefix = engine.load_prefix(tmp_path / "state")
    assert prefix.states["1"]["k"].shape[1] == 2000
    whole = engine.generate([prompt(300) + prompt(250)], sampling)[0].tokens
    assert engine.generate([prompt(250)], sampling, prefix)[0].tokens == whole
