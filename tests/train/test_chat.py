"""Fine-tuning on conversations: the loss is that of transformers, rows change nothing, a run resumes and is served."""

import json
import re

import numpy as np
import pytest
import serving
import torch
import yaml
from chats import CHATML, MARKED, VOCABULARY, model_folder, special_tokenizer, turns, write_chats
from hf_models import small
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError, parse
from linnet.data import ByteTokenizer
from linnet.data.chat import ChatRows, encode_chat
from linnet.data.chat.template import ChatTemplate, load_chat_template
from linnet.inference import Engine
from linnet.models import build_model
from linnet.runs import load_model, save_model
from linnet.serve import ServeConfig, Service
from linnet.train import read_training, train
from linnet.train.identity import contents_of, digest_of
from linnet.train.objectives.chat import ChatObjective, ChatTraining
from linnet.train.objectives.text import packed_loss

TALKS = [
    [
        *turns(f"say {i}", f"it is {i}"),
        *(turns("again", f"{i}{i}") if i % 2 else []),
        *(turns("x", "y") if i % 3 else []),
    ]
    for i in range(12)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("start") / "model", small("tnl-attention", VOCABULARY))


@pytest.fixture
def values(folder, tmp_path):
    source = str(write_chats(tmp_path / "chats.jsonl", *TALKS))
    return {
        "objective": "chat", "init_from": str(folder), "data": {"source": source}, "seq_len": 96, "batch_size": 2,
        "steps": 4, "run": {"device": "cpu", "log_every": 1}, "optimizer": {"learning_rate": 1e-3},
    }  # fmt: skip


def rows_of(template: ChatTemplate, length: int) -> ChatRows:
    return ChatRows([encode_chat(talk, [], template) for talk in TALKS], length, 0, 256)


def targets_of(rows: ChatRows) -> int:
    return sum(int((chat.turns > 0).sum()) for chat in rows.chats)


def one_by_one(loss, rows: ChatRows) -> torch.Tensor:
    """The sum over conversations of `loss` of tokens [1, T], targets [1, T]."""
    total = 0.0
    for chat in rows.chats:
        tokens, marked = torch.from_numpy(chat.tokens.astype(np.int64))[None], torch.from_numpy(chat.turns)[None] > 0
        total = total + loss(tokens, tokens.masked_fill(~marked, -100))
    return total / targets_of(rows)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["tnl-attention", "gdn", "mamba-attention", "rwkv7"])
def test_packed_is_one_by_one(name):
    model = build_model(small(name, VOCABULARY), seed=1).double()
    rows = rows_of(ChatTemplate(CHATML, special_tokenizer()), 128)
    assert len(rows) < len(rows.chats)
    tokens, targets, starts, _ = rows.rows(np.arange(len(rows)))
    loss, count = packed_loss(model, tokens, targets, starts)
    (loss / count).backward()
    packed = gradients(model)
    model.zero_grad()
    alone = one_by_one(lambda tokens, targets: model.loss(tokens[:, :-1], targets[:, 1:])[0], rows)
    alone.backward()
    assert count == targets_of(rows) and abs(loss / count - alone) < 1e-9
    for key, grad in gradients(model).items():
        assert (packed[key] - grad).abs().max() <= 1e-9 * max(1.0, grad.abs().max())


@pytest.mark.parametrize("name", ["tnl-attention", "gdn"])
def test_loss_and_gradients_are_those_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    hf = pytest.importorskip("linnet.hf")
    start = model_folder(tmp_path / "model", small(name, VOCABULARY), MARKED.replace("{{ bos_token }}", ""))
    model, tokenizer = load_model(start)
    hf.export(start, tmp_path / "exported")
    its = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").train()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    rows = rows_of(load_chat_template(start, tokenizer), 128)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    total = 0.0
    for talk, chat in zip(TALKS, rows.chats, strict=True):
        made = words.apply_chat_template(talk, **options)
        tokens, mask = torch.tensor(made["input_ids"])[None], torch.tensor(made["assistant_masks"])[None] > 0
        assert tokens[0].tolist() == chat.tokens.tolist() and mask[0].tolist() == (chat.turns > 0).tolist()
        total = total + its(input_ids=tokens, labels=tokens.masked_fill(~mask, -100)).loss * mask.sum()
    (total / targets_of(rows)).backward()
    tokens, targets, starts, _ = rows.rows(np.arange(len(rows)))
    loss, count = packed_loss(model.train(), tokens, targets, starts)
    (loss / count).backward()
    assert abs(loss / count - total / targets_of(rows)) < 1e-5
    mine, theirs = gradients(model), gradients(its)
    largest = max(grad.abs().max() for grad in mine.values())
    for key, grad in mine.items():
        [other] = [theirs[other] for other in theirs if other in (key, f"model.{key}", f"lm_{key}")]
        assert (grad - other).abs().max() <= 1e-4 * largest


def test_a_template_without_an_end_of_answers_is_warned_about(values, tmp_path):
    (tmp_path / "t.jinja").write_text(CHATML.replace("im_end", "end_of_turn"))
    for template, warned in ((None, False), (str(tmp_path / "t.jinja"), True)):
        rows: list[dict] = []
        values["data"]["template"] = template
        train(read_training(values | {"steps": 1}), tmp_path / "runs", tmp_path / "cache", progress=rows.append)
        told = [row["text"] for row in rows if row.get("event") == "passes" and row.get("warning")]
        assert any("<|end_of_turn|>" in text for text in told) == warned


def test_rows_that_are_too_short_name_the_seq_len_that_fits(values, tmp_path):
    def told(seq_len: int) -> str:
        rows: list[dict] = []
        train(read_training(values | {"steps": 1, "seq_len": seq_len}), tmp_path / "runs", tmp_path / "cache",
              progress=rows.append)  # fmt: skip
        [text] = [row["text"] for row in rows if row.get("event") == "passes" and "held out" in row["text"]]
        return text

    first, last = map(int, re.findall(r"set seq_len=(\d+)", told(33)))
    shortened, whole = told(first), told(last)
    assert (
        "left out" not in shortened
        and "shortened" in shortened
        and shortened.endswith(f"; set seq_len={last} to keep all turns")
    )
    assert "seq_len" not in whole and "shortened" not in whole


def test_a_run_validates_each_turn_and_is_a_chat_model(values, folder, tmp_path):
    values |= {"steps": 30, "run": {"device": "cpu", "evaluate_every": 15}, "data": values["data"] | {"seed": 1}}
    values["data"]["validation_fraction"] = 0.3
    run = train(read_training(values), tmp_path / "runs", tmp_path / "cache")
    result, rows = run.result(), [row for row in run.metrics() if "validation_loss" in row]
    assert result["loss"] < rows[0]["validation_loss"] and rows[-1]["validation_loss"] == result["loss"]
    assert result["conversations"] + result["held_out"] == len(TALKS)
    config = read_training(values)
    objective = ChatObjective.prepare(config, torch.device("cpu"), tmp_path / "cache")
    model, tokenizer = load_model(run.path)
    held = objective.data.validation
    sums = np.zeros((4, 2))
    for chat in held.chats:
        with torch.no_grad():
            logits, _ = model(torch.from_numpy(chat.tokens.astype(np.int64))[None, :-1])
        losses = -logits[0].log_softmax(-1)[range(len(chat.tokens) - 1), chat.tokens[1:].astype(np.int64)]
        for turn in (1, 2, 3):
            sums[turn] += losses[chat.turns[1:] == turn].sum().item(), (chat.turns[1:] == turn).sum()
    for turn, name in enumerate(("first", "second", "later"), 1):
        assert result[f"{name}_turn"] == pytest.approx(sums[turn][0] / sums[turn][1], abs=1e-5)
    assert result["loss"] == pytest.approx(sums.sum(0)[0] / sums.sum(0)[1], abs=1e-5)
    assert tokenizer.to_json() == special_tokenizer().to_json()
    template = load_chat_template(run.path, tokenizer)
    assert template.source == CHATML and template.turn_ends == [259]
    again = read_training(values | {"init_from": str(run.path), "steps": 1})
    assert train(again, tmp_path / "runs", tmp_path / "cache").metrics()[0]["loss"] < rows[0]["validation_loss"]


def test_a_run_whose_first_answers_are_all_context_has_the_losses_of_the_others(values, tmp_path):
    talks = [talk for talk in TALKS if sum(turn["role"] == "assistant" for turn in talk) > 1]
    talks = [[user, answer | {"weight": 0}, *later] for user, answer, *later in talks]
    values["data"] = {"source": str(write_chats(tmp_path / "context.jsonl", *talks)), "validation_fraction": 0.5}
    result = train(read_training(values), tmp_path / "runs", tmp_path / "cache").result()
    assert result["first_turn"] is None
    low, high = sorted((result["second_turn"], result["later_turn"]))
    assert low < result["loss"] < high


def test_batches_are_a_function_of_seed_and_step(values, tmp_path):
    def batches(**changes):
        objective = ChatObjective.prepare(parse(ChatTraining, values | changes), torch.device("cpu"), tmp_path)
        return [objective.batches().batch(step) for step in (7, 0, 3)], objective

    first, objective = batches()
    again, _ = batches()
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(first[0][0], batches(seed=1)[0][0][0])
    halves = [objective.batches().batch(7, rank, 2) for rank in (0, 1)]
    assert all(torch.equal(torch.cat(parts), whole) for *parts, whole in zip(*halves, first[0], strict=True))
    meta = objective.meta()
    other = ChatObjective.prepare(parse(ChatTraining, values | {"seq_len": 90}), torch.device("cpu"), tmp_path)
    assert objective.resume_problems(meta) == [] and other.resume_problems(meta)


def test_a_stopped_run_goes_on_exactly(values, tmp_path):
    values["run"] |= {"checkpoint_every": 2}
    whole = train(read_training(values), tmp_path / "whole", tmp_path)

    def stop(row: dict) -> None:
        if row.get("step") == 3 and "loss" in row:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(read_training(values), tmp_path / "parts", tmp_path, progress=stop)
    parts = train(read_training(values), tmp_path / "parts", tmp_path)
    losses = [[row["loss"] for row in run.metrics() if "loss" in row] for run in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert parts.result()["loss"] == whole.result()["loss"]


def test_a_plan_counts_it_as_text(values, folder):
    words = ["train", "--from", str(folder), "--data", values["data"]["source"], "--set", "objective=chat"]
    found = json.loads(CliRunner().invoke(app, [*words, "--set", "seq_len=64", "--plan", "--json"]).stdout)
    model = json.dumps(yaml.safe_load((folder / "config.yaml").read_text())["model"])
    (folder.parent / "text.yaml").write_text(f"model: {model}\nseq_len: 64\n")
    other = json.loads(CliRunner().invoke(app, ["train", str(folder.parent / "text.yaml"), "--plan", "--json"]).stdout)
    assert found == other and found["missing"] == []
    missing = [word.replace("chats.jsonl", "no.jsonl") for word in words]
    [line] = json.loads(CliRunner().invoke(app, [*missing, "--plan", "--json"]).stdout)["missing"]
    assert "no.jsonl" in line


def test_its_folder_answers_chats(values, tmp_path):
    run = train(read_training(values | {"steps": 1}), tmp_path / "runs", tmp_path)
    engine = Engine.of_run(run.path, device="cpu", slots=1)
    template = load_chat_template(run.path, engine.tokenizer)
    with serving.run(Service(engine, ServeConfig(port=0, grace=1.0), template)) as running:
        talk = {"messages": TALKS[0][:1], "max_tokens": 3, "model": engine.name}
        assert running.post("/v1/chat/completions", **talk).json["choices"][0]["message"]["role"] == "assistant"


def test_identity_counts_template_and_files_by_content(values, folder, tmp_path):
    def key(values):
        config = parse(ChatTraining, values)
        return digest_of(config, contents_of(config))

    file = tmp_path / "other.jinja"
    file.write_text(CHATML)
    named = values | {"data": values["data"] | {"template": str(file)}}
    assert key(named) == key(values)
    file.write_text(MARKED)
    assert key(named) != key(values)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((tmp_path / "chats.jsonl").read_bytes())
    assert key(values | {"data": {"source": str(moved)}}) == key(values)
    moved.write_bytes(moved.read_bytes() * 2)
    assert key(values | {"data": {"source": str(moved)}}) != key(values)
    other = model_folder(tmp_path / "model", small("tnl-attention", VOCABULARY), seed=1)
    assert key(values | {"init_from": str(other)}) != key(values)


def test_a_folder_that_cannot_start_a_chat_is_refused(values, folder, tmp_path):
    bare = model_folder(tmp_path / "bare", small("tnl", VOCABULARY), template=None)
    with pytest.raises(ConfigError, match=r"init_from: .*bare has no chat_template.jinja; set data.template"):
        train(read_training(values | {"init_from": str(bare)}), tmp_path / "runs", tmp_path)
    config = small("tnl", VOCABULARY)
    save_model(tmp_path / "wordless", config, build_model(config).state_dict())
    with pytest.raises(ConfigError, match=r"init_from: .*wordless has no tokenizer.json"):
        train(read_training(values | {"init_from": str(tmp_path / "wordless")}), tmp_path / "runs", tmp_path)
    with pytest.raises(ConfigError, match="init_from: is not given.*--from"):
        read_training({key: value for key, value in values.items() if key != "init_from"})
    with pytest.raises(ConfigError, match="nowhere"):
        read_training(values | {"init_from": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="template: .*missing.jinja"):
        data = values["data"] | {"template": str(tmp_path / "missing.jinja")}
        train(read_training(values | {"data": data}), tmp_path / "runs", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_text_goes_on_from_a_model_folder(text, tmp_path):
    config = small("tnl")
    model = build_model(config, seed=3)
    save_model(tmp_path / "model", config, model.state_dict(), ByteTokenizer())
    values = {"init_from": str(tmp_path / "model"), "data": {"source": [str(text)]}, "seq_len": 32, "batch_size": 2}
    values |= {"steps": 1, "evaluate_tokens": 64, "run": {"device": "cpu", "log_every": 1}}
    run = train(read_training(values), tmp_path / "runs", tmp_path / "cache")
    stored = yaml.safe_load((run.path / "config.yaml").read_text())
    assert stored["model"] == json.loads(config.model_dump_json())
    fresh = read_training(values | {"init_from": None, "model": config.model_dump()})
    batch = train(fresh, tmp_path / "runs", tmp_path / "cache").metrics()[0]["loss"]
    assert run.metrics()[0]["loss"] != batch, "the weights are those of the folder"
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match="model.safetensors"):
        train(read_training(values | {"seed": 1}), tmp_path / "runs", tmp_path / "cache")
