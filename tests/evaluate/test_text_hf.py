"""Windowed perplexity against the recipe of transformers' documentation, on models that transformers runs itself."""

import math

import numpy as np
import pytest
import torch

from linnet.data import ByteTokenizer
from linnet.evaluate.texts import Document, score_text
from linnet.models import build_model, get_recipe
from linnet.runs import load_model, save_model

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")

WINDOW, STRIDE = 256, 96


def sliding(model, tokens: np.ndarray, window: int, stride: int) -> tuple[float, int]:
    """Sum of the negative log-likelihoods by transformers' model, and over how many tokens.

    The recipe: windows begin every `stride` tokens until one reaches the end; each is given as input and, where the
    window before has not been, as labels, which the model shifts itself; its loss is the mean over those labels. (The
    documentation weighs that mean by one label less than it is over from the second window on; here by as many.)
    """
    ids, total, count, reached = torch.from_numpy(tokens)[None], 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        labels = ids[:, begin:end].clone()
        labels[:, : reached - begin] = -100
        scored = (labels[:, 1:] != -100).sum().item()
        with torch.no_grad():
            total += model(ids[:, begin:end], labels=labels).loss.item() * scored
        count, reached = count + scored, end
        if end == len(tokens):
            return total, count
    raise AssertionError("no window reached the end")


@pytest.fixture(scope="module")
def document():
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list("etaoin shrdlu é"), size=n)) for n in generator.integers(1, 9, 260)]
    return Document.of_text("words", " ".join(words), ByteTokenizer())


def check(causal, theirs, document):
    found = score_text(causal, [document], method="windowed", window=WINDOW, stride=STRIDE)
    total, count = sliding(theirs, document.tokens, WINDOW, STRIDE)
    assert len(document.tokens) > 4 * WINDOW and count == len(document.tokens) - 1 == found.documents[0].tokens
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    carried = score_text(causal, [document]).loss
    assert abs(carried - found.loss) > 1e-5  # windows are not the whole context


def test_an_exported_recipe(document, tmp_path):
    config = get_recipe("llama-10m").model_copy(update={"init_std": 0.1})
    save_model(tmp_path / "llama", config, build_model(config, seed=3).state_dict(), ByteTokenizer())
    hf.export(tmp_path / "llama", tmp_path / "hf")
    causal, _ = load_model(tmp_path / "llama")
    check(causal, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), document)


def test_a_llama_of_transformers_own(document, tmp_path):
    """Another implementation altogether: their Llama, read by `linnet convert`."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    hf.convert(tmp_path / "theirs", tmp_path / "ours")
    causal, _ = load_model(tmp_path / "ours")
    check(causal, theirs, document)
