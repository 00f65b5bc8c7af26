"""`data.packing: reset`: rows of packed documents train as the documents one by one, for every mixer."""

import itertools
import json
import re

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.data import prepare
from linnet.data.loader import IGNORED, mark_documents
from linnet.layers import MIXERS
from linnet.models import ModelConfig, build_model
from linnet.runs import load_model
from linnet.train import TrainConfig, train
from linnet.train.objectives.text import packed_loss

END = 0
OWN = [name for name, kind in MIXERS.items() if kind.__module__.startswith("linnet.")]
MODELS = {name: {"layout": f"({name}+swiglu) x2"} for name in OWN} | {
    "attention, window": {"layout": "(attention+swiglu) x2", "options": {"attention": {"window": 3}}},
    "attention, grouped": {"layout": "(attention+swiglu) x2", "options": {"attention": {"num_kv_heads": 1}}},
    "sinusoidal positions": {"layout": "(tnl+sglu) x2", "positions": "sinusoidal"},
    "learned positions": {"layout": "(tnl+sglu) x2", "positions": "learned", "num_positions": 16},
    "tpe": {"layout": "tpe (cosformer2+sglu) x2"},
    "tnl, rotations": {"layout": "(tnl+sglu) x2", "options": {"tnl": {"lrpe": "all_layers"}}},
    "hybrid": {"layout": "mamba+moe attention+swiglu", "options": {"moe": {"num_experts": 4}}},
}


def model_of(changes):
    options = {name: dict(values) for name, values in changes.get("options", {}).items()}
    for name in set(re.findall(r"\w+", changes["layout"])) & set(MIXERS):
        if "num_heads" in MIXERS[name].Config.model_fields:
            options.setdefault(name, {})["num_heads"] = 2
    config = ModelConfig(**{"d_model": 16, "vocab_size": 11, "init_std": 0.3, **changes, "options": options})
    return build_model(config, seed=1).double()


def rows_of_documents():
    """Tokens and targets [3, 16]: ends inside, at the end and at the start of rows, an empty document, a whole row."""
    rows = [
        [3, 4, 5, END, 6, 7, 8, 9, 1, END, END, 2, 3, 4, 5, END, 7],
        [END, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, END, 8, 9, 1],
        [3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, END],
    ]
    rows = torch.tensor(rows)
    return rows[:, :-1], rows[:, 1:]


def one_by_one(model, tokens, targets):
    """The loss of each document by itself; a document is what ends in an end of document, in its row."""
    total, count = 0.0, 0
    for row, following in zip(tokens.tolist(), targets.tolist(), strict=True):
        text = [*row, following[-1]]
        while text:
            size = text.index(END) + 1 if END in text else len(text)
            document, text = text[:size], text[size:]
            if len(document) > 1:
                nll, scored = model.loss(torch.tensor([document[:-1]]), torch.tensor([document[1:]]))
                total, count = total + nll, count + scored
    return total, count


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_packed_rows_have_the_loss_of_documents_one_by_one(changes):
    model, (tokens, targets) = model_of(changes), rows_of_documents()
    found = []
    for loss in (packed_loss(model, *mark_documents(tokens, targets, END)), one_by_one(model, tokens, targets)):
        model.zero_grad()
        loss[0].backward()
        found.append([*loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found)
    crossing = model.loss(tokens, targets)
    assert crossing[1] > found[0][1] and not torch.isclose(crossing[0], found[0][0])


def test_micro_batches_add_up():
    model, batch = model_of(MODELS["hybrid"]), mark_documents(*rows_of_documents(), END)
    parts = [packed_loss(model, *part) for part in zip(*(x.tensor_split(2) for x in batch), strict=True)]
    torch.testing.assert_close([sum(x) for x in zip(*parts, strict=True)], list(packed_loss(model, *batch)))


def test_starts_of_documents():
    tokens, targets, starts = mark_documents(*rows_of_documents(), END)
    assert starts.tolist() == [[0, 4, 10, 11], [0, 1, 14, 16], [0, 16, 16, 16]]
    assert ((targets == IGNORED) == (tokens == END)).all()


@pytest.fixture(scope="module")
def packed(text, settings, tmp_path_factory):
    """Runs on documents of a hundred bytes or so, in rows that hold some of them."""
    path, whole = tmp_path_factory.mktemp("documents") / "documents.jsonl", text.read_text(encoding="utf-8")
    cuts = [0, *itertools.accumulate(60 + 37 * i % 90 for i in range(300))]
    lines = (json.dumps({"text": whole[a:b]}) for a, b in itertools.pairwise(cuts) if whole[a:b])
    path.write_text("\n".join(lines), encoding="utf-8")

    def build(packing="reset", **changes):
        return settings(data={"source": [str(path)], "packing": packing}, evaluate_tokens=None, **changes)

    return build


def test_a_run_validates_documents_one_by_one(packed, cache, tmp_path):
    config = packed(steps=3, seq_len=200)
    run = train(config, tmp_path, cache)
    model, _ = load_model(run.path)
    corpus, model = prepare(config.data, cache), model.double().eval()
    total, count = 0.0, 0
    tokens = torch.from_numpy(corpus.validation[0 : len(corpus.validation)].astype("int64"))
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, config.seq_len):
            window = tokens[start : start + config.seq_len + 1][None]
            nll, scored = one_by_one(model, window[:, :-1], window[:, 1:])
            total, count = total + nll, count + scored
    assert run.result()["loss"] == pytest.approx((total / count).item(), rel=1e-5)


def test_packing_changes_the_run_and_not_the_corpus(packed, cache, tmp_path):
    across, config = packed("cross", steps=3), packed(steps=3)
    assert prepare(across.data, cache).digest == prepare(config.data, cache).digest
    runs = [train(config, tmp_path, cache) for config in (across, config)]
    assert runs[0].path != runs[1].path
    assert runs[0].result()["loss"] != runs[1].result()["loss"]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_stopped_run_goes_on_bit_for_bit(packed, cache, tmp_path, parts, stop_at):
    config = packed(steps=8, log_every=1, checkpoint_every=3, accumulation=parts)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", cache, stop_at(5))
    losses = [
        [row["loss"] for row in train(config, tmp_path / folder, cache).metrics() if "loss" in row]
        for folder in ("stopped", "whole")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_a_compiled_loss_is_the_same():
    """Attention leaves the graph for the documents; that ops with documents compile is tested with them."""
    model = model_of({"layout": "attention+swiglu"}).float()
    batch = mark_documents(*rows_of_documents(), END)
    expected = packed_loss(model, *batch)
    compiled = torch.compile(lambda *batch: packed_loss(model, *batch), backend="aot_eager")
    torch.testing.assert_close(compiled(*batch), expected)


def test_an_unknown_packing_is_refused():
    with pytest.raises(ConfigError, match=r"packing.*best_fit"):
        parse(TrainConfig, {"model": "tnl-10m", "data": {"packing": "best_fit"}})
