"""Perplexities in blocks without memory and with a carried state: conventions, definitions, records, the command."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import parse
from linnet.data.tokenizer import train_bpe
from linnet.evaluate.texts import read_stream, score_stream
from linnet.models import ModelConfig, build_model
from linnet.train import TrainConfig, train

LINES = [" = A title = ", "", " the cat sat on the mat , and the dog sat too . ", " the end "]
TEXT = "".join(f"{line}\n" for line in LINES)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([TEXT * 3], 270, line_ends=True)


def model(layout="hgrn2", vocab=270):
    options = {"num_heads": 2}
    values = {"d_model": 16, "layout": layout, "vocab_size": vocab, "options": {layout: options}}
    return build_model(parse(ModelConfig, values), seed=1).double()


def nats_of(net, ids, block):
    """The definition: every block alone, from the token before it."""
    found = []
    for start in range(0, len(ids) - 1, block):
        row = torch.tensor(ids[start : start + block + 1])[None]
        with torch.no_grad():
            logits = net(row[:, :-1])[0][0]
        found += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none").tolist()
    return np.array(found)


@pytest.mark.parametrize("block", [7, 16, 1000])
def test_blocks_see_themselves_and_one_token(tokenizer, block):
    stream, net = read_stream([("a", TEXT)], tokenizer), model()
    ids = [0, *tokenizer.encode(TEXT).tolist(), 0]
    assert stream.tokens.tolist() == ids
    nats = nats_of(net, ids, block)
    score = score_stream(net, stream, block)
    perplexity, word, bits = (one.value for one in score.results("blocks"))
    assert perplexity == pytest.approx(math.exp(nats.sum() / (len(ids) - 1)), rel=1e-12)
    # From the nats of BPE tokens, the word-level number is that of a direct count of words and line ends.
    assert word == pytest.approx(math.exp(nats.sum() / (len(TEXT.split()) + TEXT.count("\n"))), rel=1e-9)
    assert bits == pytest.approx(nats.sum() / math.log(2) / len(TEXT.encode()), rel=1e-12)


def test_a_carried_state_is_one_long_block(tokenizer):
    stream, net = read_stream([("a", TEXT), ("b", TEXT[:-1])], tokenizer), model()
    carried, long = score_stream(net, stream, None), score_stream(net, stream, 10_000)
    np.testing.assert_allclose(carried.nats, long.nats, rtol=1e-9)
    assert stream.bytes.sum() == 2 * len(TEXT) - 1 and stream.words.sum() == 2 * (len(TEXT.split()) + 4)
    assert stream.names[0] == "a:1" and stream.names[-1] == "b:4"
    assert carried.tokens.sum() == len(stream.tokens) - 1


def test_the_nats_of_a_line_are_those_of_its_tokens_and_its_end(tokenizer):
    stream, net = read_stream([("a", TEXT)], tokenizer), model()
    nats, place = nats_of(net, stream.tokens.tolist(), 8), 0
    for number, line in enumerate(LINES):
        size = len(tokenizer.encode(line)) + 1
        assert score_stream(net, stream, 8).nats[number] == pytest.approx(nats[place : place + size].sum(), rel=1e-9)
        place += size
    assert place == len(nats)


def test_without_line_ends_the_unit_is_a_document():
    plain = train_bpe([TEXT * 3], 270)
    stream = read_stream([("a", TEXT), ("b", "no line feed")], plain)
    assert stream.names == ("a", "b") and not stream.line_ends
    assert stream.words.tolist() == [len(TEXT.split()) + 4, 3 + 1]
    assert stream.bytes.tolist() == [len(TEXT), 12]


def test_the_command_writes_a_record(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 30)
    data = {"source": [str(tmp_path / "text.txt")], "validation_fraction": 0.1}
    data["tokenizer"] = {"kind": "bpe", "vocab_size": 265, "line_ends": True}
    values = {"model": {"d_model": 16, "layout": "hgrn2", "options": {"hgrn2": {"num_heads": 2}}}, "data": data}
    run = train(parse(TrainConfig, values | {"seq_len": 16, "batch_size": 2, "steps": 2}), tmp_path, tmp_path / "cache")
    held = tmp_path / "held.txt"
    held.write_text(TEXT)
    result = CliRunner().invoke(app, ["evaluate", "blocks", str(run.path), str(held), "--json", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)["blocks"]
    assert record["asked"]["block"] == 16 and len(record["scored"]) == 12
    found = {(one["task"], one["metric"]): one["value"] for one in record["results"]}
    assert set(found) == {
        (t, m) for t in ("blocks", "carried") for m in ("perplexity", "word_perplexity", "bits_per_byte")
    }
    direct = math.exp(record["detail"]["nats"]["blocks"] / (len(TEXT.split()) + TEXT.count("\n")))
    assert found["blocks", "word_perplexity"] == pytest.approx(direct, rel=1e-9)
    assert list((run.path / "evaluations").glob("blocks-*.json"))
    shown = CliRunner().invoke(app, ["evaluate", "blocks", str(run.path), str(held), "--block", "8", "--device", "cpu"])
    assert shown.exit_code == 0 and "per word and line end" in shown.output and "blocks of 8" in shown.output


def test_a_table_of_positions_ends_before_the_text_does_so_no_state_is_carried(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 30)
    values = {"model": {"d_model": 16, "layout": "hgrn2", "options": {"hgrn2": {"num_heads": 2}}}}
    values["model"] |= {"positions": "learned", "num_positions": 16}
    values["data"] = {"source": [str(tmp_path / "text.txt")], "validation_fraction": 0.1}
    run = train(parse(TrainConfig, values | {"seq_len": 16, "batch_size": 2, "steps": 1}), tmp_path, tmp_path / "cache")
    shown = CliRunner().invoke(
        app, ["evaluate", "blocks", str(run.path), str(tmp_path / "text.txt"), "--device", "cpu"]
    )
    assert shown.exit_code == 0 and "no carried state" in shown.output, shown.output

    def refused(*arguments):
        found = CliRunner().invoke(app, ["evaluate", *arguments, "--device", "cpu"])
        assert found.exit_code == 2 and "model.num_positions: 16; " in found.output, found.output
        return found.output

    text = str(tmp_path / "text.txt")
    assert "--block: 32 " in refused("blocks", str(run.path), text, "--block", "32")
    assert "--window: 32 " in refused("text", str(run.path), text, "--window", "32")
    assert "give --method windowed" in refused("text", str(run.path), text, "--method", "carried")
    assert "--lengths: " in refused("recall", str(run.path))
    shown = CliRunner().invoke(app, ["evaluate", "text", str(run.path), text, "--device", "cpu"])
    assert shown.exit_code == 0, shown.output  # in windows by itself
