"""Recall probes and tasks while a model trains: they give what the checkpoint gives, and say what is wrong."""

import json
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.data import ByteTokenizer
from linnet.evaluate.retrieval.recall import RecallConfig, run_recall, to_results
from linnet.inference import Engine
from linnet.models import build_model, family
from linnet.runs import load_model
from linnet.train import train
from linnet.train.suites import RecallEvaluation, TaskEvaluation, TextEvaluation, TextSubject

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
EVERY = {"steps": 12, "log_every": 4, "evaluate_every": 6, "keep_checkpoints": 9}


def evaluated(run) -> list[dict]:
    return [row for row in run.metrics() if "evaluation" in row]


def subject(mixer: str = "tnl", seq_len: int = 64) -> TextSubject:
    model = family(mixer)(16, 2, num_heads=2, vocab_size=256)
    return TextSubject(model, torch.device("cpu"), "float32", ByteTokenizer(), seq_len, "stdlib")


def test_recall_is_that_of_the_checkpoint(settings, cache, tmp_path):
    asked = {"tasks": ["mqar", "noisy_recall"], "lengths": [64], "pairs": [4, 8], "samples": 6}
    run = train(settings(**EVERY, evaluations=[{"kind": "recall", **asked}]), tmp_path, cache)
    first, last = evaluated(run)
    assert (first["step"], last["step"]) == (6, 12) and last["shown"] == ["mqar", "noisy_recall"]
    found = run_recall(*load_model(run.path), RecallConfig(**asked))
    values = {(one.task, one.metric): one.value for one in to_results(found)}
    for task in last["shown"]:
        assert last["metrics"][task] == pytest.approx(values[f"recall-{task}", "choice"])
        assert last["metrics"][f"{task}_of_all_tokens"] == pytest.approx(values[f"recall-{task}", "accuracy"])
        chances = [cell.chance for cell in found if cell.task == task]
        assert last["chance"][task] == pytest.approx(sum(chances) / 2) and last["questions"] == 12


def test_probes_that_do_not_fit_are_told_before(settings, cache, tmp_path):
    wrong = [
        {"kind": "recall", "tasks": ["mqar"], "lengths": [8], "pairs": [16]},
        {"kind": "recall", "name": "many", "pairs": [1]},
    ]
    with pytest.raises(ConfigError, match="evaluations.1.recall.pairs.0"):
        settings(evaluations=wrong)
    with pytest.raises(ConfigError, match=r"evaluations.0 \(recall\): lengths: .*\[8\] .*\[16\]"):
        train(settings(evaluations=wrong[:1]), tmp_path, cache)
    words = parse(RecallEvaluation, {"kind": "recall", "tasks": ["mqar"], "lengths": [512], "pairs": [64]})
    with pytest.raises(ConfigError, match=r"pairs.*\[64\]|\[64\].*pairs"):
        words.prepare(subject())


def test_what_a_table_of_positions_does_not_hold_is_told_before(tmp_path):
    """An evaluation that fails while the model trains is only recorded, so each of them would."""
    (tmp_path / "held.txt").write_text("a text of more than sixty-four bytes " * 4)
    own = subject()
    own = replace(own, model=own.model.model_copy(update={"positions": "learned", "num_positions": 64}))
    with pytest.raises(ConfigError, match="lengths: .*129 is above model.num_positions: 64; .*at most 63"):
        parse(RecallEvaluation, {"kind": "recall"}).prepare(own)
    text = {"kind": "text", "paths": [str(tmp_path / "held.txt")]}
    with pytest.raises(ConfigError, match="method: carried: .* is above model.num_positions: 64"):
        parse(TextEvaluation, text | {"method": "carried"}).prepare(own)
    assert parse(TextEvaluation, text).prepare(own)(build_model(own.model, seed=0)).metrics["loss"] > 0


def test_an_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("linnet.train.suites.not_installed", list)
    with pytest.raises(ConfigError, match=r"pip install .*\[eval\]'"):
        parse(TaskEvaluation, {"kind": "tasks", "suite": "csr"})


def test_either_a_suite_or_tasks(tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    for values in ({}, {"suite": "csr", "tasks": ["piqa"]}):
        with pytest.raises(ConfigError, match="suite.*tasks"):
            parse(TaskEvaluation, {"kind": "tasks", **values})
    with pytest.raises(ConfigError) as caught:
        parse(TaskEvaluation, {"kind": "tasks", "suite": "crs", "include": str(tmp_path / "none"), "every": 0})
    assert [line.split(":")[0] for line in caught.value.problems] == ["every", "suite", "include"]


def test_tasks_are_those_of_the_checkpoint(settings, cache, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    from linnet.evaluate.harness import LinnetLM
    from linnet.evaluate.tasks import find_tasks, run_tasks

    evaluations = [
        {"kind": "tasks", "name": "both", "tasks": ["capitals", "opposites"], "include": str(EXAMPLES), "limit": 5},
        {"kind": "tasks", "name": "one", "tasks": ["capitals"], "include": str(EXAMPLES), "limit": None},
    ]
    with_them = train(settings(**EVERY, evaluations=evaluations), tmp_path, cache)
    rows = evaluated(with_them)
    assert [row["step"] for row in rows] == [6, 6, 12, 12] and not any("event" in row for row in rows)
    _, _, both, one = rows
    assert both["shown"] == ["capitals/acc", "opposites/exact_match,remove_whitespace"] or both["shown"] == [
        "capitals/acc", "opposites/exact_match",
    ]  # fmt: skip
    assert both["questions"] == 4 and both["chance"][both["shown"][1]] == 0.0
    assert one["shown"] == ["acc"] and one["chance"] == {"acc": 0.25, "acc_norm": 0.25}

    model, tokenizer = load_model(with_them.path)
    lm = LinnetLM(Engine(model, tokenizer, device="cpu"))
    tasks = find_tasks(["capitals", "opposites"], EXAMPLES)
    values = {f"{r.task}/{r.metric}": r.value for r in run_tasks(lm, tasks, 5)}
    assert both["metrics"] == pytest.approx(values)

    without = train(settings(**EVERY), tmp_path / "without", cache)
    losses = [[row["loss"] for row in run.metrics() if "loss" in row] for run in (with_them, without)]
    assert losses[0] == losses[1]


def test_suites_show_their_average_or_their_tasks(settings, cache, tmp_path, monkeypatch):
    """On questions of our own in place of the harness's, which need the network; csr with two of its seven tasks."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    import yaml

    from linnet.evaluate.tasks import OWN
    from linnet.evaluate.tasks.suites import SUITES, Suite

    questions = {
        "piqa/piqa": {"goal": "Open a door", "sol1": "Turn the handle.", "sol2": "Sing.", "label": 0},
        "arc/arc_easy": {
            "question": "Which?",
            "choices": {"text": list("abcd"), "label": list("ABCD")},
            "answerKey": "B",
        },
        "wikitext/wikitext": {"page": " = A title = \n\n Some words . \n"},
        "lambada/lambada_openai": {"text": "The last word of this sentence is here"},
    }
    for path, row in questions.items():
        name = path.rpartition("/")[2]
        files = {split: f"{name}.jsonl" for split in ("train", "validation", "test")}
        changes = {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"include": str(OWN / f"{path}.yaml"), **changes}))
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    small = Suite("csr", {"piqa": ("acc",), "arc_easy": ("acc",)}, ("piqa", "arc"), averages={"average": ()})
    monkeypatch.setitem(SUITES, "csr", small)
    asked = [{"kind": "tasks", "name": name, "suite": name, "include": str(tmp_path)} for name in ("csr", "perplexity")]
    run = train(settings(evaluations=asked), tmp_path / "runs", cache)
    csr, perplexity = evaluated(run)
    assert csr["shown"] == ["average"] and csr["chance"]["average"] == (1 / 2 + 1 / 4) / 2 and csr["questions"] == 2
    metrics = csr["metrics"]
    assert metrics["average"] == (metrics["piqa/acc"] + metrics["arc_easy/acc"]) / 2
    assert perplexity["shown"] == ["wikitext/word_perplexity", "lambada_openai/perplexity"]
    assert set(perplexity["chance"]) == {"lambada_openai/acc"}


def test_tasks_that_are_wrong_are_told_before(settings, cache, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    lines = (EXAMPLES / "capitals.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"answer": 9})
    for name, questions in (("first", "\n".join(lines)), ("second", "")):
        (tmp_path / name).mkdir()
        own = (EXAMPLES / "capitals.yaml").read_text().replace("capitals", name)
        (tmp_path / name / f"{name}.yaml").write_text(own)
        (tmp_path / name / f"{name}.jsonl").write_text(questions)
    # Unknown names are for tests/evaluate/test_tasks.py: they are looked for in all of the harness's, which takes long.
    wrong = [{"kind": "tasks", "name": n, "tasks": [n], "include": str(tmp_path / n)} for n in ("first", "second")]
    with pytest.raises(ConfigError) as caught:
        train(settings(evaluations=wrong), tmp_path / "runs", cache)
    first, second = caught.value.problems
    assert first.startswith("evaluations.0 (first): ") and "first.jsonl:2" in first
    assert second.startswith("evaluations.1 (second): ") and "second.jsonl" in second


def test_a_model_whose_state_grows_is_asked_no_more_than_it_was_trained_on():
    """Refused, or cut where that is wanted; a linear model reads all."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    asked = {"kind": "tasks", "tasks": ["capitals"], "include": str(EXAMPLES), "limit": 2}
    for mixer, ways, refused in (("llama", {}, True), ("llama", {"too_long": "cut"}, False), ("tnl", {}, False)):
        own = subject(mixer, seq_len=32)
        measure = parse(TaskEvaluation, asked | ways).prepare(own)
        model = build_model(own.model)
        if refused:
            with pytest.raises(ConfigError, match="32"):
                measure(model)
        else:
            assert 0 <= measure(model).metrics["acc"] <= 1


def test_the_suites_are_those_that_there_are():
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    from linnet.evaluate.tasks.suites import SUITES

    literal = TaskEvaluation.model_fields["suite"].annotation
    names = [name for part in typing.get_args(literal) for name in typing.get_args(part)]
    assert names == list(SUITES)


def test_guessing_in_averages():
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    from linnet.evaluate.results import Item, Result
    from linnet.evaluate.tasks.suites import Suite, averages, chances

    class Choices:
        """A task of so many choices a question; the harness's own need the network."""

        OUTPUT_TYPE = "multiple_choice"

        def __init__(self, *choices: int):
            self.eval_docs = choices

        def doc_to_choice(self, doc: int) -> list:
            return list(range(doc))

        def doc_to_target(self, doc: int) -> int:
            return 0

        def get_config(self, key: str) -> None:
            return None

    suite = Suite("s", {"a": ("acc",), "b": ("acc_norm",)}, (), averages={"average": (), "without_a": ("a",)})
    tasks = {"a": Choices(2, 2, 2), "b": Choices(4, 5, 2)}
    results = [Result("a", "acc", 0.6), Result("b", "acc", 0.3), Result("b", "acc_norm", 0.4), Result("b", "nats", 1.0)]
    results = [*averages(suite, results), *results]
    b = (1 / 4 + 1 / 5) / 2
    assert chances(tasks, results, suite, limit=2) == {
        ("a", "acc"): 0.5, ("b", "acc"): b, ("b", "acc_norm"): b,
        ("s", "average"): (0.5 + b) / 2, ("s", "without_a"): b,
    }  # fmt: skip
    group = Suite("g", {"g": ("acc",)}, (), by_question=True)
    parts = [Result.of_items(name, "acc", [Item("0", 1.0)]) for name in ("a", "b")]
    found = chances(tasks, [*averages(group, parts), *parts], group)
    assert found["g", "average"] == pytest.approx((0.5 + (1 / 4 + 1 / 5 + 1 / 2) / 3) / 2)
