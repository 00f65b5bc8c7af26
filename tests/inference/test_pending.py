"""Pending tokens beside the slots' states: the same tokens as with states that every step writes."""

import random

import pytest
import torch

from linnet.inference import Engine, Sampling
from linnet.inference.decoding import INTERVAL, choose_interval, pending_bytes, saved_bytes
from linnet.layers.mixers.delta.gdn import Gdn
from linnet.models import CausalLM, ModelConfig, build_model, family

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
CONFIG = ModelConfig(
    d_model=64,
    layout="tnl+sglu attention+swiglu hgrn2+sglu gdn+swiglu kda+swiglu mamba2 delta_net gated_delta_product gdn2",
    vocab_size=67,
    options={
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "gdn": {"num_heads": 2, "num_v_heads": 4},
        "mamba2": {"head_dim": 16, "state": 16, "num_groups": 2},
        **{name: {"num_heads": 4} for name in ("tnl", "hgrn2", "kda", "delta_net", "gated_delta_product", "gdn2")},
    },
    init_std=0.3,
)


def lively(config=CONFIG):
    model = build_model(config, seed=1)
    with torch.no_grad():
        model.embedding.weight.mul_(0.02)
    return model


@pytest.fixture
def write_every(monkeypatch):
    def set_to(tokens):
        monkeypatch.setattr("linnet.inference.decoding.choose_interval", lambda *_: tokens)

    return set_to


def run(device, order_seed=None, dtype=torch.float32):
    """Tokens of ten prompts on three slots, which come one by one, at different times if there is an order."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 67, (1 + 5 * i % 13,), generator=generator).tolist() for i in range(10)]
    lengths = [4 + 7 * i % 19 for i in range(10)]
    engine = Engine(lively(), slots=3, prefill_chunk=5, device=device, dtype=dtype)
    delayed = engine._decoder.write_every > 1
    assert delayed == any("pending" in state for state in engine._decoder.states.values())
    order, arrivals, requests = list(range(10)), random.Random(order_seed), {}
    arrivals.shuffle(order)
    tokens = [[] for _ in prompts]
    while order or engine.busy:
        while order and (order_seed is None or arrivals.random() < 0.3):
            index = order.pop()
            requests[engine.submit(prompts[index], Sampling(max_tokens=lengths[index]))] = index
        for request, piece in engine.advance():
            tokens[requests[request]].append(piece.token)
    return tokens


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_those_of_states_that_are_always_written(device, write_every):
    write_every(1)
    expected = run(device)
    assert len({token for tokens in expected for token in tokens}) > 4
    for tokens, seed in ((2, 0), (4, 1), (8, 2)):
        write_every(tokens)
        assert run(device, seed) == expected


@gpu
def test_bfloat16_tokens_depend_on_no_company(write_every):
    write_every(4)
    assert run("cuda", 0, torch.bfloat16) == run("cuda", 1, torch.bfloat16) == run("cuda", 2, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_a_saved_prefix_is_a_whole_state(device, write_every, tmp_path):
    """Pending tokens stay in their slot: prefixes are read apart from the slots, and a slot begins with none."""
    write_every(4)
    engine = Engine(lively(), slots=2, prefill_chunk=5, device=device, dtype=torch.float32)
    states = engine.model.backbone.state_bytes(engine.limit)
    assert engine.state_bytes == states + pending_bytes(engine.model, 4) > states
    prompt, settings = [5, 3, 9, 12, 40, 2, 8], Sampling(max_tokens=10)
    engine.generate([[1, 2, 3]] * 2, Sampling(max_tokens=6))  # the slots have pending tokens
    engine.prefix(prompt[:6]).save(tmp_path / "prefix.state")
    prefix = engine.load_prefix(tmp_path / "prefix.state")
    assert not any("pending" in state for state in prefix.states.values())
    [whole] = engine.generate([prompt], settings)
    [behind] = engine.generate([prompt[6:]], settings, prefix=prefix)
    assert behind.tokens == whole.tokens


def test_which_layers_delay_writes():
    """Not those of several steps per token."""
    blocks = lively().backbone.blocks
    assert [block.mixer.name for block in blocks if not block.pending_spec(1, 4)] == [
        "attention",
        "gated_delta_product",
    ]


@pytest.mark.parametrize("method", ["step", "token", "heads", "log_decay", "recurrence_step", "state_spec"])
def test_a_subclass_with_its_own_token_says_itself_that_it_delays_writes(method):
    """Its step may read the state, take several steps per token, or have other decays."""
    mixer = lively().backbone.blocks[3].mixer
    assert type(mixer) is Gdn and set(mixer.pending_spec(1, 4)) == {"keys", "updates", "decays"}
    own = {method: lambda *_: None}
    mixer.__class__ = type("Own", (Gdn,), own)
    assert mixer.pending_spec(1, 4) == {}
    mixer.__class__ = type("Other", (type(mixer),), {})
    assert mixer.pending_spec(1, 4) == {}
    mixer.__class__ = type("Declares", (Gdn,), own | {"pending_decays": "channel"})
    assert mixer.pending_spec(1, 4)["decays"].shape == (1, 4, 3, mixer.key_dim)
    mixer.__class__ = type("Renamed", (Gdn,), {"gate": lambda *_: None})
    assert set(mixer.pending_spec(1, 4)) == {"keys", "updates", "decays"}


def test_only_recurrent_states_are_written_less_often():
    """Not the last inputs of convolutions; a state in bfloat16 saves half."""
    with torch.device("meta"):
        model = CausalLM(family("mamba2")(256, 1, vocab_size=64))
    [spec] = [spec for name, spec in model.backbone.blocks[0].state_spec(1, 1).items() if name == "ssm"]
    buffers = pending_bytes(model, 4) // 2 + pending_bytes(model, 4) // 4
    assert saved_bytes(model, 4) == spec.bytes * 3 // 4 - buffers
    assert saved_bytes(model, 4, torch.bfloat16) == spec.bytes * 3 // 8 - buffers


def test_states_are_written_every_token_unless_they_are_large():
    with torch.device("meta"):
        large, without = (CausalLM(family(name)(4096, 4, vocab_size=64)) for name in ("tnl", "llama"))
    state = large.backbone.state_bytes(1)
    cuda = torch.device("cuda")
    assert choose_interval(large, 1, cuda) == 1 and choose_interval(large, 10_000, cuda) == INTERVAL
    assert choose_interval(large, 10_000, torch.device("cpu")) == 1
    assert choose_interval(without, 10_000, cuda) == 1 and saved_bytes(without, INTERVAL) == 0
    assert pending_bytes(large) == 4 * 2 * (INTERVAL - 1) * 4096 * 4  # float32 weights
    moved = [n * pending_bytes(large) // (INTERVAL - 1) for n in range(INTERVAL)]  # the pending tokens, read
    moved = [read + pending_bytes(large) // (INTERVAL - 1) for read in moved[:-1]] + [moved[-1] + state]  # and written
    assert saved_bytes(large, INTERVAL) == state - sum(moved) // INTERVAL
    assert saved_bytes(large, 1) == 0
