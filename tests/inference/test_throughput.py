"""What the throughput measurements run and count."""

import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linnet.config import ConfigError
from linnet.inference import Engine, Sampling
from linnet.inference.benchmark import NUMBERS, Case, Linnet, _fill, measure
from linnet.models import ModelConfig, build_model, family, get_recipe

SMALL = {"d_model": 32, "vocab_size": 64}


def linnet(layout="tnl+sglu x2", **settings):
    return Linnet(ModelConfig(layout=layout, **SMALL), "small", "cpu", torch.float32, **settings)


def test_rows_hold_what_the_protocol_asks_for():
    rows = []
    for system in (linnet(chunk=8), linnet("attention+swiglu")):
        rows += measure(system, [Case(1, 24, 6), Case(3, 10, 4)], 2, 1e10)
    assert [row["system"] for row in rows] == ["linnet"] * 4
    for row in rows:
        assert row.keys() - {"model", "system", "error"} == NUMBERS
        assert row["error"] == "" and row["first_token_s"] > 0 and row["token_ms"] > 0
        whole = row["first_token_s"] + (row["new"] - 1) * row["token_ms"] / 1e3
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * row["new"] / whole)
        assert row["decode_tokens_per_second"] == pytest.approx(row["batch"] * 1e3 / row["token_ms"])
    recurrent, cached = rows[0], rows[2]
    assert rows[0]["carried_bytes"] == rows[1]["carried_bytes"]
    assert recurrent["carried_bytes"] == 4 * 2 * 32 * 32 // 8  # two layers of 8 heads, [4, 4] each, float32
    assert cached["carried_bytes"] - rows[3]["carried_bytes"] == (30 - 14) * (2 * 32 * 4 + 8)  # k, v and a position
    moved = recurrent["weight_bytes"] + 2 * recurrent["carried_bytes"]
    assert recurrent["bandwidth_share"] == pytest.approx(moved / (recurrent["token_ms"] / 1e3) / 1e10)


def test_the_second_token_is_not_counted_with_the_first(monkeypatch):
    system, tokens = linnet(), torch.zeros(1, 4, dtype=torch.long)
    system.warm(tokens, 2)
    decoder = system._prepare(1, 6)
    advance = decoder.advance
    monkeypatch.setattr(decoder, "advance", lambda tokens: (time.sleep(0.2), advance(tokens)))
    assert system.run(tokens, 2)[1] >= 0.2


def test_batches_are_read_in_parts_as_in_one_piece(monkeypatch):
    tokens, outputs = torch.randint(64, (5, 30), generator=torch.Generator().manual_seed(0)), []
    state = linnet().carried_bytes(30)
    for at_a_time, states, rows in ((1, 10**9, 1), (60, 10**9, 5), (10_000, 10**9, 5), (10_000, 2 * state, 2)):
        monkeypatch.setattr("linnet.inference.benchmark._AT_A_TIME", at_a_time)
        monkeypatch.setattr("linnet.inference.benchmark._STATES_AT_A_TIME", states)
        torch.manual_seed(0)
        system = linnet(chunk=12)
        assert system._rows(5, 30, 35) == rows
        system.run(tokens, 5)
        outputs.append(system._decoder[1].logits.clone())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


def test_a_full_memory_has_room_for_what_a_sequence_grows_to(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (10**7, 10**8))
    cached = linnet("attention+swiglu")
    for case, length in ((Case("max", 8, 4), 12), (Case("max", 8, 4, room=50), 50)):
        assert _fill(cached, case) == int(0.9 * 10**7 / (cached.carried_bytes(length) + 8 * 64))
    recurrent = linnet()
    assert _fill(recurrent, Case("max", 8, 4)) == _fill(recurrent, Case("max", 8, 4, room=50))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", ["tnl", "hgrn2", "lightnet", "mamba"])
def test_long_prompts_take_no_more_memory_than_a_few_chunks(name):
    largest = []
    for chunks in (2, 16):
        engine = Engine(build_model(family(name)(32, 2, vocab_size=64)), slots=1, prefill_chunk=64, device="cpu")
        with Largest() as mode:
            engine.generate([[1] * (64 * chunks)], Sampling(max_tokens=2))
        largest.append(mode.numel)
    assert largest[1] <= max(largest[0], 8 * 64 * 16)  # or the prompt itself, as integers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: fla's layers run nowhere else")
def test_flas_hgrn2_is_the_model_of_the_recipe():
    pytest.importorskip("fla")
    from linnet.inference.benchmark import make_peer

    config = family("hgrn2")(128, 2, vocab_size=64)
    ours = Linnet(config, "hgrn2", "cuda", torch.bfloat16)
    peer = make_peer("fla", config, "hgrn2", "cuda", torch.bfloat16)
    assert peer.carried_bytes(10) == ours.carried_bytes(10)
    assert peer.weight_bytes == pytest.approx(ours.weight_bytes, rel=0.02)  # it has gains in its norms
    [row] = measure(peer, [Case(2, 8, 5)], 1, 1e10)
    assert row["error"] == "" and row["decode_tokens_per_second"] > 0
    with pytest.raises(ConfigError, match="tnl-10m .*HGRN2"):
        make_peer("fla", get_recipe("tnl-10m"), "tnl-10m", "cuda", torch.bfloat16)


def test_transformers_llama_is_the_model_of_the_recipe():
    pytest.importorskip("transformers")
    from linnet.inference.benchmark import TransformersLlama

    config = family("llama")(32, 2, vocab_size=64)
    ours = Linnet(config, "llama", "cpu", torch.float32)
    for name in ("transformers", "transformers-static"):
        peer = TransformersLlama(name, config, "llama", "cpu", torch.float32)
        assert peer.weight_bytes == ours.weight_bytes
        positions = 8 * 2  # which Linnet's cache notes beside keys and values, a token and layer
        assert peer.carried_bytes(10) - peer.carried_bytes(9) + positions == (
            ours.carried_bytes(10) - ours.carried_bytes(9)
        )
        [row] = measure(peer, [Case(2, 8, 5)], 1, 1e10)
        assert row["error"] == "" and row["decode_tokens_per_second"] > 0
    tokens = torch.randint(64, (1, 8))
    peer.start(tokens)()
    with pytest.raises(ConfigError, match="tnl-10m .*Llama"):
        TransformersLlama("transformers", get_recipe("tnl-10m"), "tnl-10m", "cpu", torch.float32)
