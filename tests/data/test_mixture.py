"""Mixtures: each source in its share at every step, no row more often than its epochs, one order on any ranks."""

import json
import math

import numpy as np
import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.data import Batches, DataConfig, prepare
from linnet.data.corpus import mixture_of
from linnet.data.loader import validation_batches
from linnet.data.order import Turns
from linnet.encoders.masking import MaskedBatches, MaskingConfig
from linnet.report import tables
from linnet.report.records import read_study
from linnet.runs.model import load_model
from linnet.train import read_training
from linnet.train.identity import contents_of, digest_of

SEQ_LEN = 16
LETTERS = {"a": 4000, "b": 2500, "c": 900}


@pytest.fixture
def folder(tmp_path):
    for letter, size in LETTERS.items():
        words = [f"{letter}{number:04d}" for number in range(size // 5)]
        (tmp_path / f"{letter}.txt").write_text("".join(words))
    (tmp_path / "held.txt").write_text("h" * 500)
    return tmp_path


def config_of(folder, **measures) -> DataConfig:
    """{letter: {"epochs" or "weight": value}} -> a mixture of the files of the letters, in the order of the call."""
    mixture = [{"source": str(folder / f"{letter}.txt"), **measure} for letter, measure in measures.items()]
    return parse(DataConfig, {"mixture": mixture, "validation": str(folder / "held.txt")})


def batches_of(config, folder, batch_size=5, seed=3, **options):
    corpus = prepare(config, folder / "cache")
    return Batches(corpus.train, SEQ_LEN, batch_size, seed, mixture=mixture_of(config, corpus), **options), corpus


def letters(batches, rows):
    """The letter of the source of each of the first rows."""
    tokens = torch.cat([batches.batch(step)[0] for step in range(-(-rows // batches.sizes.batch_size))])[:rows]
    return [next(chr(token) for token in row if chr(token) in LETTERS) for row in tokens.tolist()]


@pytest.mark.parametrize("parts", [[1, 1], [7, 2, 1], [151, 243, 150, 4, 435, 17], [1, 0, 999], [9] * 7 + [1], [5]])
def test_every_prefix_has_each_source_within_one_sample_of_its_share(parts):
    samples = 3 * sum(parts) + 7
    sources, uses = Turns(parts).at(np.arange(samples))
    counts = np.cumsum(sources[:, None] == np.arange(len(parts)), axis=0)
    ideal = np.arange(1, samples + 1)[:, None] * np.array(parts) / sum(parts)
    assert np.abs(counts - ideal).max() < 1
    assert np.array_equal(uses, counts[np.arange(samples), sources] - 1)
    late = Turns(parts)  # computed from the middle, as after a resume
    assert np.array_equal(late.at(np.arange(samples // 2, samples))[0], sources[samples // 2 :])
    assert late.counts(samples - 1) == counts[-2].tolist()


def test_a_mixture_without_sources_is_refused_by_name():
    for values in ({"mixture": []}, {"mixture": [], "tokenizer": "byte"}):
        with pytest.raises(ConfigError, match=r"mixture: is an empty list"):
            parse(DataConfig, values)
    recorded = parse(DataConfig, {"source": ["a.txt"]}).model_dump(mode="json")
    assert parse(DataConfig, recorded).source == ["a.txt"]


def test_a_mixture_of_one_source_is_the_source_bit_for_bit(folder):
    alone = parse(DataConfig, {"source": [str(folder / "a.txt")], "validation": str(folder / "held.txt")})
    plain = prepare(alone, folder / "cache")
    for measure in ({"weight": 0.3}, {"epochs": 2.5}):
        batches, corpus = batches_of(config_of(folder, a=measure), folder)
        assert corpus.digest == plain.digest
        for packing in ("cross", "reset"):
            batches, _ = batches_of(config_of(folder, a=measure), folder, packing=packing)
            for step in (0, 1, 50, 1000):
                old = Batches(plain.train, SEQ_LEN, 5, 3, packing).batch(step)
                assert all(map(torch.equal, batches.batch(step), old))


def test_epochs_give_each_source_its_rows_and_no_row_too_often(folder):
    epochs = {"a": 1.53, "b": 0.44, "c": 2.49}
    config = config_of(folder, **{letter: {"epochs": value} for letter, value in epochs.items()})
    batches, corpus = batches_of(config, folder, batch_size=1)
    mixture = mixture_of(config, corpus)
    assert batches.limit == sum(
        round(source.epochs * windows) for source, windows in zip(mixture, batches.per_source, strict=True)
    )
    rows = [tuple(batches.batch(step)[0][0].tolist()) for step in range(batches.limit)]
    for source, windows in zip(mixture, batches.per_source, strict=True):
        part = corpus.train[source.start : source.end]
        counts = [
            rows.count(tuple(part[SEQ_LEN * number : SEQ_LEN * (number + 1)].tolist())) for number in range(windows)
        ]
        assert abs(sum(counts) - source.epochs * windows) <= 1
        assert {math.floor(source.epochs), math.ceil(source.epochs)} == set(counts)
    other, _ = batches_of(config, folder, batch_size=1, seed=4)
    part = {row for row in rows if ord("b") in row}
    assert part != {
        row for step in range(batches.limit) if ord("b") in (row := tuple(other.batch(step)[0][0].tolist()))
    }


def test_weights_ranks_resume_and_the_order_of_the_list(folder):
    weights = {"a": {"weight": 2}, "b": {"weight": 1.0}, "c": {"weight": 0.5}}
    batches, _ = batches_of(config_of(folder, **weights), folder)
    assert {letter: letters(batches, 350).count(letter) for letter in LETTERS} == {"a": 200, "b": 100, "c": 50}
    turned, _ = batches_of(config_of(folder, **dict(reversed(weights.items()))), folder)
    for step in (0, 7, 300):
        whole = batches.batch(step)
        fresh, corpus = batches_of(config_of(folder, **weights), folder)
        assert all(map(torch.equal, fresh.batch(step), whole)) and all(map(torch.equal, turned.batch(step), whole))
        for world in (2, 3):
            ranks = [fresh.batch(step, rank, world) for rank in range(world)]
            assert all(
                torch.equal(torch.cat(parts), all_) for parts, all_ in zip(zip(*ranks, strict=True), whole, strict=True)
            )
    bytes_ = fresh.bytes_per_token()  # of `byte` tokens: all but the end of a document
    assert bytes_ == pytest.approx((2 * 4000 / 4001 + 2500 / 2501 + 0.5 * 900 / 901) / 3.5)
    reset, _ = batches_of(config_of(folder, **weights), folder, packing="reset")
    assert torch.equal(reset.batch(7)[0], batches.batch(7)[0]) and len(reset.batch(7)) == 3
    assert len(list((folder / "cache").glob("[0-9a-f]*"))) == 1 and corpus.metadata["sources"]


def training(folder, mixture, **values):
    model = {"d_model": 32, "layout": "gla+mlp"}
    data = {"mixture": mixture, "validation": str(folder / "held.txt")}
    return read_training({"model": model, "data": data, "seq_len": SEQ_LEN, "batch_size": 4, "steps": 5, **values})


def test_the_digest_of_a_run_has_the_weight_of_each_source_and_not_their_order(folder):
    def key(*weights, order=1):
        mixture = [{"source": str(folder / f"{one}.txt"), "weight": w} for one, w in zip("abc", weights, strict=False)]
        config = training(folder, mixture[::order])
        return digest_of(config, contents_of(config, folder / "cache"))

    assert key(1, 2) == key(1, 2, order=-1)
    assert len({key(1, 2), key(2, 1), key(1, 3), key(1, 2, 1), key(1)}) == 5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([("a", {"weight": 0}), ("b", {"weight": 0})], "mixture: the weights sum to 0"),
        ([("a", {"epochs": 1, "weight": 2})], "weight: epochs (1) and weight (2) are both given"),
        ([("a", {})], "weight: neither epochs nor weight"),
        ([("a", {"epochs": 1}), ("b", {"weight": 1})], "mixture: some sources have epochs"),
        ([("a", {"epochs": -1})], "epochs"),
    ],
)
def test_bad_mixtures_are_refused(folder, values, words):
    mixture = [{"source": str(folder / f"{letter}.txt"), **measure} for letter, measure in values]
    with pytest.raises(ConfigError) as error:
        parse(DataConfig, {"mixture": mixture})
    assert words in str(error.value)


def test_problems_that_need_the_text(folder):
    with pytest.raises(ConfigError, match="source: .* and mixture are both given"):
        parse(DataConfig, {"source": "x", "mixture": [{"source": "y", "weight": 1}]})
    (folder / "d.txt").write_text((folder / "a.txt").read_text())
    with pytest.raises(ConfigError, match=r"mixture: .*a.txt' and .*d.txt' have the same content"):
        prepare(config_of(folder, a={"weight": 1}, d={"weight": 1}), folder / "cache")
    (folder / "e.txt").write_text("e" * 9)
    with pytest.raises(ConfigError, match=r"e.txt' has .* tokens to train on, less than one row"):
        batches_of(config_of(folder, a={"weight": 1}, e={"weight": 1}), folder)
    with pytest.raises(ConfigError, match=r"epochs 0.001 of .*b.txt' are less than one row; use at least 0.00"):
        batches_of(config_of(folder, a={"epochs": 1}, b={"epochs": 0.001}), folder)
    mixed = {"a": {"weight": 1}, "b": {"weight": 1}}
    sources = [{"source": [str(folder / f"{one}.txt")], **measure} for one, measure in mixed.items()]
    sources[0]["source"].append(str(folder / "c.txt"))
    held = parse(DataConfig, {"mixture": sources, "validation": str(folder / "c.txt")})
    with pytest.warns(UserWarning, match=r"data.validation: .*c.txt' of data.mixture"):
        prepare(held, folder / "cache")


def test_a_training_records_what_each_source_gave_and_ends_with_its_epochs(folder):
    from linnet.train import train

    mixture = [{"source": str(folder / f"{one}.txt"), "epochs": 0.2} for one in "ab"]
    with pytest.raises(ConfigError, match=r"data.mixture: its sources end .* use steps=\d+, more epochs"):
        train(training(folder, mixture, steps=200), folder / "runs", cache=folder / "cache")
    mixture = [{"source": str(folder / f"{one}.txt"), "weight": w} for one, w in (("a", 3), ("c", 1))]
    events = []
    config = training(folder, mixture, steps=80, run={"device": "cpu"})
    run = train(config, folder / "runs", cache=folder / "cache", progress=events.append)
    shown = {one["source"][-5:]: one for one in json.loads((run.path / "result.json").read_text())["sources"]}
    assert shown["a.txt"]["tokens"] == 240 * SEQ_LEN and shown["c.txt"]["tokens"] == 80 * SEQ_LEN
    assert shown["a.txt"]["passes"] == 240 / (4000 // SEQ_LEN)
    html = tables.source_table(read_study(folder / "runs", bootstrap=0))
    assert "a.txt (" in html and "c.txt (" in html and "3.84k" in html
    assert read_training(config.model_dump(mode="json")) == config
    texts = [event["text"] for event in events if event.get("event") == "passes"]
    assert any("a.txt: gives 3,840 tokens; passes: 0.96" in text for text in texts)


def test_masked_rows_are_those_of_the_mixture(folder):
    config = config_of(folder, a={"weight": 1}, c={"weight": 3})
    batches, corpus = batches_of(config, folder, batch_size=4)
    masked = MaskedBatches(corpus.train, SEQ_LEN, 4, 3, MaskingConfig(), 256, mixture=mixture_of(config, corpus))
    inputs, targets = masked.batch(9)
    assert torch.equal(torch.where(targets >= 0, targets, inputs), batches.batch(9)[0])
    assert sum(ord("c") in row for row in batches.batch(9)[0].tolist()) == 3


def test_the_held_out_loss_of_each_source_is_in_record_result_and_report(folder):
    """Losses of sources are those of their held-out tokens alone, and their mean by tokens is the loss of all."""
    from linnet.train import train

    for letter in "ac":
        rows = [json.dumps({"text": f"{letter}{number:04d}" * 20}) for number in range(200)]
        (folder / f"{letter}.jsonl").write_text("\n".join(rows))
    mixture = [{"source": str(folder / f"{one}.jsonl"), "weight": w} for one, w in (("a", 3), ("c", 1))]
    model = {"d_model": 32, "layout": "gla+mlp"}
    losses = []
    for packing, order, tokens in (("cross", 1, None), ("cross", -1, None), ("reset", 1, None), ("cross", 1, 64)):
        data = {"mixture": mixture[::order], "validation_fraction": 0.1, "packing": packing}
        values = {
            "model": model,
            "data": data,
            "seq_len": SEQ_LEN,
            "batch_size": 4,
            "steps": 20,
            "precision": "float32",
        }
        config = read_training({**values, "evaluate_tokens": tokens, "run": {"device": "cpu"}})
        run = train(config, folder / "runs", cache=folder / "cache")
        row = run.metrics()[-1]
        each = {name[-7:]: loss for name, loss in row["validation_source_losses"].items()}
        assert set(each) == {"a.jsonl", "c.jsonl"}
        shown = {one["source"][-7:]: one["validation_loss"] for one in run.result()["sources"]}
        assert shown == each
        losses.append((row["validation_loss"], each))
        if tokens is None:
            corpus = prepare(config.data, folder / "cache")
            held = {portion.name[-7:]: portion.held for portion in mixture_of(config.data, corpus)}
            assert sorted(held.values())[0][0] == 0 and sorted(held.values())[1][1] == len(corpus.validation)
            for name, (start, end) in held.items():
                text = corpus.validation[start:end].tolist()
                assert {chr(token) for token in text if token > ord("9")} == {name[0]}
                batches = validation_batches(corpus.validation, SEQ_LEN, 4, None, packing, (start, end))
                plain = validation_batches(corpus.validation, SEQ_LEN, 4, None, packing)
                counted, every = (sum(int((batch[1] >= 0).sum()) for batch in some) for some in (batches, plain))
                if packing == "cross":
                    assert batches.tokens == counted == end - start - (start == 0) < every == plain.tokens
            if packing == "cross":
                loaded, sums = load_model(run.path, "cpu")[0], dict.fromkeys(held, 0.0)
                for number, (inputs, targets) in enumerate(validation_batches(corpus.validation, SEQ_LEN, 1)):
                    with torch.no_grad():
                        nll = torch.nn.functional.cross_entropy(
                            loaded(inputs)[0][0].double(), targets[0], reduction="none", ignore_index=-100
                        )
                    places = number * SEQ_LEN + 1 + torch.arange(SEQ_LEN)
                    for name, (start, end) in held.items():
                        sums[name] += nll[(start <= places) & (places < end)].sum().item()
                for name, (start, end) in held.items():
                    assert each[name] == pytest.approx(sums[name] / (end - start - (start == 0)), rel=1e-5)
                assert row["validation_loss"] == pytest.approx(sum(sums.values()) / every, rel=1e-5)
    assert losses[0] == losses[1] and losses[0] != losses[3]
    html = tables.source_table(read_study(folder / "runs", bootstrap=0))
    assert "Held-out loss" in html and html.count("a.jsonl (") == 1
