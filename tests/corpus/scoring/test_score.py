"""Scores agree with those of single texts, batches change nothing, and models that cannot score are refused."""

import json
from collections import Counter

import pytest
import torch
import yaml
from safetensors.torch import load_file

from linnet.config import ConfigError, parse
from linnet.corpus.documents import find_parts, read_part
from linnet.corpus.scoring import score as scoring
from linnet.corpus.scoring.score import NATS, Scorer, half_of, score_stage
from linnet.data import ByteTokenizer
from linnet.evaluate.texts import Document, score_text
from linnet.models import ModelConfig, build_model
from linnet.runs.model import load_model, save_model


def model_folder(path, layout, seed=0, options=None):
    model = {"recipe": "tnl-10m", "d_model": 16, "layout": layout, "vocab_size": 257, "options": options or {}}
    config = parse(ModelConfig, model)
    return save_model(path, config, build_model(config, seed).state_dict(), ByteTokenizer())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    small = {"tnl": {"num_heads": 2}}
    return [
        model_folder(folder / "first", "tnl+sglu x2", 0, small),
        model_folder(folder / "second", "tnl+sglu x2", 1, small),
        model_folder(folder / "attention", "attention+swiglu x1", 0, {"attention": {"num_heads": 2}}),
    ]


@pytest.mark.parametrize("number", [0, 2])
def test_scores_are_those_of_each_text_read_alone(models, monkeypatch, number):
    texts = ["a" * 70, "The quick brown fox. " * 30, "Übung " * 20, "The quick brown fox. " * 31]
    scorer = Scorer(str(models[number]), "cpu", "float32", False)
    found = scorer.nats_per_byte(texts)
    model, tokenizer = load_model(models[number])
    alone = [score_text(model, [Document.of_text("d", text, tokenizer)]) for text in texts]
    assert found == pytest.approx([one.documents[0].nats / one.documents[0].bytes for one in alone], abs=2e-6)
    monkeypatch.setattr(scoring, "LONG", 100)  # long documents are read in chunks, and score the same
    assert scorer.nats_per_byte(texts) == pytest.approx(found, abs=2e-6)


@pytest.mark.parametrize(("precision", "error"), [("float64", 1e-5), ("bfloat16", 0.1)])
def test_other_precisions_score_alike(models, precision, error):
    texts = ["The quick brown fox. " * 9, "a" * 70]
    expected = Scorer(str(models[0]), "cpu", "float32", False).nats_per_byte(texts)
    assert Scorer(str(models[0]), "cpu", precision, False).nats_per_byte(texts) == pytest.approx(expected, abs=error)


def test_attention_is_not_used_beyond_the_length_of_its_training(models):
    scorer = Scorer(str(models[2]), "cpu", "float32", False)
    scorer.window = 64
    text = "The quick brown fox. " * 10
    model, tokenizer = load_model(models[2])
    windowed = score_text(model, [Document.of_text("d", text, tokenizer)], method="windowed", window=64)
    assert scorer.nats_per_byte([text])[0] == pytest.approx(windowed.documents[0].nats / len(text), abs=2e-6)


def rows(folder):
    return [d for part in find_parts([str(folder)], "scored", [], []) for d in read_part(part, Counter())]


def test_two_models_score_the_half_that_they_have_not_read(models, sources, tmp_path):
    stage = score_stage(sources, models[:2], tmp_path / "out", seed=5)
    documents = rows(tmp_path / "out")
    assert len(documents) == 80 and stage["counts"]["scores.scored"] == 75
    assert stage["counts"]["scores.none, under 64 bytes"] == 5
    scorers = [Scorer(str(path), "cpu", "float32", False) for path in models[:2]]
    for document in documents:
        if len(document.text) < 64:
            assert NATS not in document.extra
        else:
            (alone,) = scorers[1 - half_of(document.text, 5)].nats_per_byte([document.text])
            assert document.extra[NATS] == pytest.approx(alone, abs=2e-6)
    halves = Counter(half_of(document.text, 5) for document in documents)
    assert min(halves.values()) > 20
    assert half_of("copy", 1) == half_of("copy", 1) and {half_of("copy", i) for i in range(20)} == {0, 1}


def test_bytes_do_not_depend_on_workers_threads_or_groups(models, sources, tmp_path, monkeypatch):
    first = score_stage(sources, models[:1], tmp_path / "one")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        second = score_stage(sources, models[:1], tmp_path / "two", workers=2)
    finally:
        torch.set_num_threads(before)
    assert first == second
    assert [p.read_bytes() for p in sorted((tmp_path / "one").glob("shard-*"))] == [
        p.read_bytes() for p in sorted((tmp_path / "two").glob("shard-*"))
    ]
    monkeypatch.setattr(scoring, "GROUP", 7)  # rounding may differ, the scores do not
    score_stage(sources, models[:1], tmp_path / "three")
    pairs = zip(rows(tmp_path / "one"), rows(tmp_path / "three"), strict=True)
    assert all(a.extra.get(NATS, 0) == pytest.approx(b.extra.get(NATS, 0), abs=2e-6) for a, b in pairs)


def test_a_model_scores_its_own_text_again(models, sources, tmp_path):
    """A score of an earlier round is replaced, not kept for documents that have none now."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, NATS: 99.0}) for text in ("short", "long enough " * 10)))
    score_stage([str(path)], models[:1], tmp_path / "out")
    short, scored = rows(tmp_path / "out")
    assert NATS not in short.extra and 0 < scored.extra[NATS] < 20


@pytest.mark.parametrize(("objective", "title"), [("images", "image"), ("diffusion", "denoiser"), ("masked", "masked")])
def test_models_that_cannot_score_text_are_refused_by_name(models, sources, tmp_path, objective, title):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"objective": objective, "model": {}}))
    with pytest.raises(ConfigError) as error:
        score_stage(sources, [folder, tmp_path / "missing"], tmp_path / "out")
    assert len(error.value.problems) == 2 and not (tmp_path / "out").exists()
    assert str(folder) in error.value.problems[0] and title in error.value.problems[0]


def test_models_without_tokenizer_too_many_models_and_damaged_weights(models, sources, tmp_path):
    bare = model_folder(tmp_path / "bare", "tnl+sglu x1")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        score_stage(sources, [bare], tmp_path / "out")
    with pytest.raises(ConfigError, match="3 models"):
        score_stage(sources, models[:1] * 3, tmp_path / "out")
    weights = load_file(models[0] / "model.safetensors")
    weights["embedding.weight"][0] = float("nan")
    broken = save_model(tmp_path / "broken", load_model(models[0])[0].config, weights, ByteTokenizer())
    with pytest.raises(ConfigError, match="embedding"):
        score_stage(sources, [broken], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_letters_of_two_bytes_count_once(models, tmp_path):
    assert [scoring.letters(text) for text in ("abc", "äöü", "привет", "汉字", "😀", "a\u0800")] == [3, 3, 6, 6, 4, 4]
    text = "Übung macht den Meister. " * 4
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    score_stage([str(tmp_path / "a.jsonl")], models[:1], tmp_path / "out")
    (document,) = rows(tmp_path / "out")
    assert document.extra["nats_per_letter"] == pytest.approx(document.extra[NATS] * 104 / 100, abs=2e-6)
