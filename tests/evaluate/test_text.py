"""Perplexity of texts: carried against one pass, windows against the recipe, sums by hand."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.evaluate.texts import (
    Document,
    DocumentScore,
    check_lengths,
    natural_method,
    read_texts,
    resampled,
    score_text,
)
from linnet.models import ModelConfig, build_model, family

FAMILIES = ["tnl", "hgrn2", "lightnet", "cosformer2", "hgrn", "gla", "llama"]


def tiny(name: str, seed: int = 0):
    return build_model(family(name)(32, 2, vocab_size=256), seed=seed).double().eval()


def documents(*lengths: int) -> list[Document]:
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice(list("abcd é \n"), size=n)) for n in lengths]
    return [Document.of_text(str(n), text, ByteTokenizer()) for n, text in zip(lengths, texts, strict=True)]


def losses_of_one_pass(model, tokens: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        return F.cross_entropy(model(ids[:, :-1])[0][0], ids[0, 1:], reduction="none")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_carried_state_gives_what_one_pass_gives(name):
    model, texts = tiny(name), documents(1, 130, 301)
    passes = [losses_of_one_pass(model, text.tokens) for text in texts]
    for chunk in (1, 64, 100, 4096) if name == "tnl" else (100,):
        found = score_text(model, texts, chunk=chunk)
        for document, losses in zip(found.documents, passes, strict=True):
            assert document.nats == pytest.approx(losses.sum().item(), rel=1e-9)
            assert document.tokens == len(losses)


@pytest.mark.parametrize(
    "layout, options",
    [
        ("tnl+sglu attention+sglu", {"attention": {"num_heads": 2, "num_kv_heads": 1}}),
        ("attention+sglu", {"attention": {"num_heads": 2, "window": 600}}),
        ("attention+sglu", {"attention": {"num_heads": 2, "block": 64}}),
        ("mla+sglu", {"mla": {"num_heads": 2, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 8}}),
        ("hyena+sglu", {}),
        ("tnn+sglu", {}),
    ],
)
def test_the_part_of_a_cache_that_is_in_use_is_enough(layout, options):
    """Caches of documents above 512 tokens are read up to the last token of each pass."""
    config = ModelConfig(d_model=32, layout=layout, vocab_size=256, options=options, init_std=0.3)
    model, [document] = build_model(config, seed=1).double().eval(), documents(1100)
    losses = losses_of_one_pass(model, document.tokens)
    found = score_text(model, [document], chunk=256)
    assert found.documents[0].nats == pytest.approx(losses.sum().item(), rel=1e-9)


def test_real_text_in_one_pass(real_data):
    """The WikiText-2 text with <unk>, its first part; `linnet evaluate RUN --text` takes the whole."""
    text = (real_data / "wikitext-2" / "valid.txt").read_text()[:40_000]
    model, document = tiny("hgrn2"), Document.of_text("wikitext-2", text, ByteTokenizer())
    found = score_text(model, [document], chunk=3000)
    expected = losses_of_one_pass(model, document.tokens).mean().item()
    assert found.loss == pytest.approx(expected, rel=1e-9)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2), rel=1e-9)  # a token is a byte


def recipe(model, tokens: np.ndarray, window: int, stride: int) -> tuple[float, int]:
    """transformers' perplexity of models of fixed length: windows whose first targets are masked."""
    ids, total, count, previous = torch.from_numpy(tokens)[None], 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        targets = ids[:, begin:end].clone()
        targets[:, : -(end - previous)] = -100
        with torch.no_grad():
            logits = model(ids[:, begin:end])[0]
        shifted = targets[:, 1:].flatten()
        total += F.cross_entropy(logits[:, :-1].flatten(0, 1), shifted, ignore_index=-100, reduction="sum").item()
        count += (shifted != -100).sum().item()
        previous = end
        if end == ids.shape[1]:
            break
    return total, count


@pytest.mark.parametrize("window, stride", [(32, 16), (32, 7), (50, 49), (400, 200), (2, 1)])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 48, 175])
def test_windows_are_those_of_the_recipe(window, stride, length, monkeypatch):
    model, [document] = tiny("llama"), documents(length)
    monkeypatch.setattr("linnet.evaluate.texts.LOGITS", 3 * window * 256)  # several groups of windows
    found = score_text(model, [document], method="windowed", window=window, stride=stride)
    total, count = recipe(model, document.tokens, window, stride)
    assert found.documents[0].nats == pytest.approx(total, rel=1e-9)
    assert found.documents[0].tokens == count == len(document.tokens) - 1


def test_contexts_hold_every_token_once_where_it_belongs():
    model, [document] = tiny("tnl"), documents(100)
    losses = losses_of_one_pass(model, document.tokens).numpy()
    found = score_text(model, [document])
    assert sum(bucket.tokens for bucket in found.contexts) == len(losses)
    for bucket in found.contexts:  # the token at place i of the document has i tokens before it
        assert bucket.loss == pytest.approx(losses[bucket.start - 1 : bucket.end - 1].mean())
    windows = score_text(model, [document], method="windowed", window=16, stride=4)
    assert max(bucket.end for bucket in windows.contexts) == 16
    assert sum(bucket.tokens for bucket in windows.contexts if bucket.start >= 8) >= len(losses) - 12


def test_perplexities_are_by_tokens_words_and_bytes():
    text = "two words, é"
    document = Document.of_text("x", text, ByteTokenizer())
    found = score_text(tiny("tnl"), [document, document])
    nats = found.documents[0].nats
    assert (document.words, document.bytes) == (3, 13)
    assert found.perplexity == pytest.approx(math.exp(nats / 13))
    assert found.word_perplexity == pytest.approx(math.exp(nats / 3))
    assert found.bits_per_byte == pytest.approx(nats / 13 / math.log(2))
    assert found.to_dict()["tokens"] == 26


def test_no_more_is_read_than_is_wanted(tmp_path):
    """The beginning of a large corpus costs no reading of the rest, which here is no text."""
    (tmp_path / "a.jsonl").write_text('{"text": "four"}\n{"text": "andé"}\n{"text": "no')
    (tmp_path / "b.jsonl").write_text("[]")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    found = read_texts(paths, ByteTokenizer(), most_bytes=8)  # in the middle of é
    assert [(document.name, document.bytes) for document in found] == [(f"{paths[0]}:1", 4), (f"{paths[0]}:2", 3)]
    for wanted in (10, None):
        with pytest.raises(ConfigError, match="a.jsonl"):
            read_texts(paths, ByteTokenizer(), most_bytes=wanted)


def test_a_document_begins_as_the_model_expects():
    tokenizer = ByteTokenizer()
    assert Document.of_text("x", "ab", tokenizer).tokens.tolist() == [0, 97, 98]
    tokenizer.prompt_start = (1,)  # as of a converted Llama
    assert Document.of_text("x", "ab", tokenizer).tokens.tolist() == [1, 97, 98]


def test_the_interval_is_over_documents():
    one, other = DocumentScore("a", 100.0, 10, 5, 100), DocumentScore("b", 300.0, 10, 5, 100)
    drawn = resampled([one, other]) * math.log(2)
    assert set(np.round(drawn, 9)) == {1.0, 2.0, 3.0}
    assert 0.2 < (drawn < 1.5).mean() < 0.3
    found = score_text(tiny("tnl"), documents(50, 60, 70, 80, 90, 100))
    low, high = found.interval()
    assert low < found.bits_per_byte < high
    assert score_text(tiny("tnl"), documents(50, 60, 70, 80, 90)).interval() is None


def test_what_cannot_be_scored():
    model = tiny("tnl")
    with pytest.raises(ValueError, match="to score"):
        score_text(model, documents(0))
    with pytest.raises(ValueError, match="stride.*8.*window|stride < window"):
        score_text(model, documents(5), method="windowed", window=8, stride=8)


@pytest.mark.parametrize("method", ["carried", "windowed"])
def test_progress_counts_every_token_once(method):
    told = []
    found = score_text(tiny("tnl"), documents(100, 1, 37), method=method, window=16, chunk=30, progress=told.append)
    assert sum(told) == found.to_dict()["tokens"] and len(told) > 6


def test_results_hold_each_document_with_what_it_weighs():
    found = score_text(tiny("tnl"), documents(50, 80))
    results = {one.metric: one for one in found.results()}
    for metric in ("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert results[metric].value == pytest.approx(getattr(found, metric)) and results[metric].better == "lower"
    assert [item.id for item in results["loss"].items] == ["50", "80"]
    assert [item.weight for item in results["bits_per_byte"].items] == [one.bytes for one in found.documents]


def test_a_failure_leaves_the_model_in_training():
    model = tiny("tnl").train()
    broken = Document("x", np.array([0, 999]), 1, 1)
    with pytest.raises(IndexError):
        score_text(model, [broken, broken])
    assert model.training


def test_a_state_is_carried_only_where_there_is_one_of_a_fixed_size():
    hyena = ModelConfig(d_model=8, layout="hyena+glu")
    assert natural_method(hyena) == "carried"
    table = {"positions": "learned", "num_positions": 16}
    assert natural_method(hyena.model_copy(update=table)) == "windowed"  # beyond it there is no state to carry
    assert natural_method(family("llama")(8, 1, num_heads=2)) == "windowed"
    assert natural_method(hyena.model_copy(update={"options": {"hyena": {"filter": "implicit"}}})) == "windowed"


def test_what_a_table_of_positions_does_not_hold_is_refused():
    model = ModelConfig(d_model=8, layout="hyena+glu", vocab_size=16, positions="learned", num_positions=8)
    short, long = (Document(name, np.ones(size, dtype=np.int64), 1, size) for name, size in (("s", 9), ("l", 10)))
    check_lengths(model, [short], "carried", 99)  # 9 tokens: the model reads 8 of them
    check_lengths(model, [short], "windowed", 99)
    check_lengths(model, [short, long], "windowed", 8)
    with pytest.raises(ConfigError, match="tokens of l: 9 is above model.num_positions: 8; use method: windowed"):
        check_lengths(model, [short, long], "carried", 8)
    with pytest.raises(ConfigError, match="window: 99 is above model.num_positions: 8; use at most 8"):
        check_lengths(model, [short, long], "windowed", 99)
    check_lengths(ModelConfig(d_model=8, layout="hyena+glu"), [long], "carried", 8)
    score_text(build_model(model, seed=0), [short])  # the longest document that is let through can be read
