"""Tasks of one's own: groups, relative paths, every item's score, and questions that are wrong."""

import json
import math
import re

import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval")

import datasets
import huggingface_hub

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.evaluate.harness import LinnetLM
from linnet.evaluate.tasks import find_tasks, run_tasks
from linnet.evaluate.tasks.suites import chances
from linnet.inference import Engine
from linnet.models import build_model, family

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: {choices}
doc_to_target: {target}
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""
LAST = """
task: last
dataset_path: json
dataset_kwargs: {data_files: {test: last.jsonl}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{text}}"
doc_to_target: " {{word}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""


def write(folder, name: str, rows: list, choices: str = "choices", target: str = "answer") -> None:
    (folder / f"{name}.yaml").write_text(CHOICE.format(name=name, choices=choices, target=target))
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def question(answer, **changes) -> dict:
    return {"question": "Which?", "choices": ["one", "two", "three"], "answer": answer, **changes}


@pytest.fixture(scope="module")
def lm():
    model = build_model(family("tnl")(32, 2, vocab_size=256), seed=1).eval()
    return LinnetLM(Engine(model, ByteTokenizer(), slots=4))


def test_every_kind_of_metric_is_the_average_of_its_items(lm, tmp_path):
    write(tmp_path, "choice", [question(i % 3, question=f"Which {i}?") for i in range(7)])
    (tmp_path / "texts.yaml").write_text(TEXT)
    (tmp_path / "texts.jsonl").write_text('{"text": "some words and more"}\n{"text": "a few"}\n')
    (tmp_path / "last.yaml").write_text(LAST)
    (tmp_path / "last.jsonl").write_text('{"text": "to be or not to", "word": "be"}\n{"text": "so", "word": "it"}\n')
    (tmp_path / "all.yaml").write_text("group: all\ntask: [texts, last]\n")
    tasks = find_tasks(["all", "choice"], tmp_path)
    assert list(tasks) == ["texts", "last", "choice"]
    found = {(one.task, one.metric): one for one in run_tasks(lm, tasks)}
    shape = {key: (one.n, len(one.items), one.average, one.better) for key, one in found.items()}
    assert shape == {
        ("texts", "bits_per_byte"): (2, 2, "mean", "lower"),
        ("texts", "word_perplexity"): (2, 2, "exp", "lower"),
        ("last", "perplexity"): (2, 2, "exp", "lower"),
        ("last", "acc"): (2, 2, "mean", "higher"),
        ("choice", "acc"): (7, 7, "mean", "higher"),
        ("choice", "acc_norm"): (7, 7, "mean", "higher"),
    }
    nats = -sum(lm._loglikelihood_tokens([(("", ""), [0], list(b"a few"))])[0][:1])
    few = found["texts", "bits_per_byte"].items[1]
    assert few.weight == 5 and few.score == pytest.approx(nats / 5 / math.log(2), rel=1e-5)
    assert [item.id.partition(":")[0] for item in found["choice", "acc"].items] == list("0123456")
    assert run_tasks(lm, find_tasks(["choice"], tmp_path), limit=3)[0].n == 3


def test_shots_are_the_task_s_unless_asked_and_never_where_it_wants_none(tmp_path):
    write(tmp_path, "choice", [question(0)] * 3)
    assert find_tasks(["choice"], tmp_path)["choice"].get_config("num_fewshot") == 0
    assert find_tasks(["choice"], tmp_path, shots=2)["choice"].get_config("num_fewshot") == 2
    with open(tmp_path / "choice.yaml", "a") as file:
        file.write("num_fewshot: 0\n")
    assert find_tasks(["choice"], tmp_path, shots=2)["choice"].get_config("num_fewshot") == 0


@pytest.mark.parametrize(
    "choices, target, right, wrong",
    [
        ("choices", "answer", ["two", 0], ["four", 3, -1, "2"]),  # digits in a field are text, as the harness has it
        ('["12", "29"]', "answer", ["29", 1], ["1"]),
        ('"{{choices}}"', '"{{answer}}"', [0, 2], [3, "x"]),
        ('["a", "b"]', '"{{answer - 1}}"', [1, 2], [3]),
        ('["a", "{{question}}"]', "answer", ["a"], ["b", "Which?"]),  # the harness takes a list as it is
    ],
)
def test_an_answer_is_an_index_or_one_of_the_choices(tmp_path, choices, target, right, wrong):
    for answers in ([one] for one in right):
        write(tmp_path, "good", [question(one) for one in answers], choices, target)
        task = find_tasks(["good"], tmp_path)["good"]
        [doc] = task.test_docs()
        count = len(task.doc_to_choice(doc))
        likeliest = [task.process_results(doc, [(-float(i != j), False) for j in range(count)]) for i in range(count)]
        assert sum(found["acc"] for found in likeliest) == 1, "the harness finds the right answer among the choices"
    write(tmp_path, "bad", [question(one) for one in wrong], choices, target)
    with pytest.raises(ConfigError) as error:
        find_tasks(["bad"], tmp_path)
    assert len(error.value.problems) == len(wrong)
    for number, problem in enumerate(error.value.problems, 1):
        assert f"bad.jsonl:{number}: answer " in problem


def test_guessing_at_questions_with_several_right_answers(lm, tmp_path):
    rows = [question([0, 2], question=f"Which {i}?") for i in range(3)] + [question([1]), question([1, 1])]
    write(tmp_path, "several", rows)
    tasks = find_tasks(["several"], tmp_path)
    results = run_tasks(lm, tasks)
    doc = next(iter(tasks["several"].test_docs()))
    scores = [tasks["several"].process_results(doc, [(-float(i != j), False) for j in range(3)]) for i in range(3)]
    assert [score["acc"] for score in scores] == [1, 0, 1], "the harness takes each of several answers"
    guessed = (3 * 2 / 3 + 2 * 1 / 3) / 5
    assert chances(tasks, results) == pytest.approx({("several", "acc"): guessed, ("several", "acc_norm"): guessed})
    assert chances(tasks, results, limit=3)["several", "acc"] == pytest.approx(2 / 3)


def test_guessing_is_not_known_where_a_task_scores_choices_itself(lm, tmp_path):
    write(tmp_path, "mass", [question(0), question(1)])
    (tmp_path / "own.py").write_text("def mass(doc, results):\n    return {'acc': 0.5}\n")
    text = (tmp_path / "mass.yaml").read_text().replace(", {metric: acc_norm}", "")
    (tmp_path / "mass.yaml").write_text(text + "process_results: !function own.mass\n")
    tasks = find_tasks(["mass"], tmp_path)
    results = run_tasks(lm, tasks)
    assert results[0].value == 0.5 and chances(tasks, results) == {}


def test_lists_of_answers_that_the_harness_would_score_as_wrong_or_fail_on(tmp_path):
    write(tmp_path, "bad", [question([0]), question([]), question(["two"]), question([True]), question([0, 3])])
    with pytest.raises(ConfigError) as error:
        find_tasks(["bad"], tmp_path)
    starts = [
        r"bad.jsonl:2: answer \[\]",
        "bad.jsonl:3: answer 'two'",
        "bad.jsonl:4: answer True",
        "bad.jsonl:5: answer 3",
    ]
    assert len(error.value.problems) == len(starts)
    for start, problem in zip(starts, error.value.problems, strict=True):
        assert re.search(start, problem)
    write(tmp_path, "mixed", [question("1"), question("[0, 2]")], target='"{{answer}}"')
    with pytest.raises(ConfigError, match="mixed.jsonl:2: the answer is a list.*mixed.jsonl:1;"):
        find_tasks(["mixed"], tmp_path)
    write(tmp_path, "lists", [question([0]), question([1, 2])])
    with pytest.raises(ConfigError, match="lists: 2 shots"):
        find_tasks(["lists"], tmp_path, shots=2)
    assert find_tasks(["lists"], tmp_path)


def test_all_that_is_wrong_is_told_at_once_with_its_line(tmp_path):
    rows = [question(0), "", "{'question': 1}", {"question": "x"}, "[1]", question(7), question(1, choices=["one"])]
    write(tmp_path, "bad", rows)
    write(tmp_path, "empty", [])
    write(tmp_path, "gone", [])
    (tmp_path / "gone.jsonl").unlink()
    with pytest.raises(ConfigError) as error:
        find_tasks(["bad", "empty", "gone"], tmp_path)
    expected = [
        "bad.jsonl:3: ",
        "bad.jsonl:4: .*'answer', 'choices'.*'question'",
        "bad.jsonl:5: ",
        "bad.jsonl:6: answer 7 .* 3 .* 0 .* 2",
        r"bad.jsonl:7: choices \['one'\]",
        "empty.jsonl",
        "gone.jsonl",
    ]
    assert len(error.value.problems) == len(expected)
    for part, problem in zip(expected, error.value.problems, strict=True):
        assert re.search(part, problem)
    write(tmp_path, "many", [{}] * 80)
    with pytest.raises(ConfigError, match="many: .*30 "):
        find_tasks(["many"], tmp_path)


def test_data_with_a_byte_order_mark_is_read_as_the_harness_reads_it(tmp_path):
    write(tmp_path, "marked", [question(0), question(1)])
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert find_tasks(["marked"], tmp_path)


def test_a_template_that_fails_on_a_row_names_its_line(tmp_path):
    write(tmp_path, "keys", [question("A"), question("D")], target="\"{{['A', 'B', 'C'].index(answer)}}\"")
    with pytest.raises(ConfigError, match=r"keys.jsonl:2: .*ValueError"):
        find_tasks(["keys"], tmp_path)


def test_fields_that_a_template_asks_for_may_be_missing(tmp_path):
    text = CHOICE.format(name="some", choices="choices", target="answer")
    text = text.replace("{{question}}", "{% if hint is defined %}{{hint}}{% endif %}{{question}}")
    write(tmp_path, "some", [question(0)])
    (tmp_path / "some.yaml").write_text(text)
    assert find_tasks(["some"], tmp_path)


def test_names_and_folders_that_are_not_there(tmp_path):
    write(tmp_path, "choice", [question(0)])
    with pytest.raises(ConfigError, match="2 problems(?s:.*)'choise' .*'choice'"):
        find_tasks(["choise", "other"], tmp_path, folders=[])
    with pytest.raises(ConfigError, match="include: .*none"):
        find_tasks(["choice"], tmp_path / "none")


def test_data_that_only_the_network_has(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # no server there
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as error:
        find_tasks(["piqa", "arc_easy", "arc_challenge"], folders=["piqa", "arc"])
    first, second, fix = error.value.problems
    assert first.startswith("piqa: ") and "'baber/piqa'" in first
    assert second.startswith("arc_easy, arc_challenge: ") and "'allenai/ai2_arc'" in second
    assert "HF_HOME" in fix and "--include" in fix
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_an_empty_choice_names_its_line(tmp_path):
    rows = [question(0), question(0, choices=["", "two"]), question(0, choices=["one", 2])]
    write(tmp_path, "some", rows)
    with pytest.raises(ConfigError) as error:
        find_tasks(["some"], tmp_path)
    first, second = error.value.problems
    assert "some.jsonl:2: choice 1 " in first and "some.jsonl:3: choice 2 " in second


def test_only_data_of_the_hub_are_said_to_come_from_there(tmp_path):
    write(tmp_path, "some", [question(0)])
    text = (tmp_path / "some.yaml").read_text().replace("test_split: test", "test_split: other")
    (tmp_path / "some.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        find_tasks(["some"], tmp_path)
    [problem] = error.value.problems
    assert "some.yaml cannot be loaded" in problem and "HF_HOME" not in problem


def test_settings_of_generation_that_the_engine_lacks_are_refused_before_work(tmp_path):
    write(tmp_path, "some", [question(0)])
    text = (tmp_path / "some.yaml").read_text().replace("multiple_choice", "generate_until")
    text = text.replace("acc_norm", "exact_match").replace("{metric: acc}, ", "").replace("doc_to_choice", "#")
    (tmp_path / "some.yaml").write_text(text + "generation_kwargs: {num_beams: 4, max_new_tokens: 5}\n")
    with pytest.raises(ConfigError, match="some: generation_kwargs.num_beams: 4"):
        find_tasks(["some"], tmp_path)
