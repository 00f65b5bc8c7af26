"""The papers' suites: tasks and metrics that the harness has, averages by hand, and SCROLLS on texts made here."""

import dataclasses
import json
import zipfile

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the extra eval")

from lm_eval.tasks import TaskManager

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.evaluate.harness import LinnetLM
from linnet.evaluate.results import Item, Result
from linnet.evaluate.tasks import OWN
from linnet.evaluate.tasks.suites import SUITES, averages, chances, counting, find_suite, load_suite, run_suite
from linnet.inference import Engine
from linnet.models import build_model, family


@pytest.mark.parametrize("name", ["csr", "perplexity", "mmlu", "ceval"])
def test_the_harness_has_the_tasks_with_their_metrics(name):
    suite = SUITES[name]
    index = TaskManager(include_path=[OWN / folder for folder in suite.folders], include_defaults=False).task_index
    for task, metrics in suite.tasks.items():
        entry = index[task]
        key = "aggregate_metric_list" if entry.kind.name == "GROUP" else "metric_list"
        assert set(metrics) <= {one["metric"] for one in entry.cfg[key]}
        assert not entry.cfg.get("num_fewshot")


def test_the_averages_of_commonsense_by_hand():
    """000, Table 4, LLaMA of 7B: 56.70 over all seven."""
    printed = {"boolq": 57.46, "piqa": 75.19, "hellaswag": 64.39, "winogrande": 61.88, "arc_easy": 67.55}
    printed |= {"arc_challenge": 35.41, "openbookqa": 35.00}
    suite = find_suite("csr")
    results = [Result(task, suite.tasks[task][0], value) for task, value in printed.items()]
    results += [Result("piqa", "acc_norm", 0.0), Result("arc_challenge", "acc", 0.0)]
    found = {one.metric: (one.value, one.n) for one in averages(suite, results)}
    assert found["average"] == (pytest.approx(56.70, abs=0.005), 7)
    assert found["average_without_boolq"] == (pytest.approx((7 * 56.697 - 57.46) / 6, abs=0.005), 6)
    assert found["average_with_signal"] == (pytest.approx((75.19 + 64.39 + 67.55 + 35.00) / 4), 4)


def test_the_average_of_many_subjects_is_over_questions_first():
    one = Result.of_items("mmlu_a", "acc", [Item("0", 1.0), Item("1", 1.0), Item("2", 0.0)])
    other = Result.of_items("mmlu_b", "acc", [Item("0", 0.0)])
    found = averages(SUITES["mmlu"], [one, other])
    assert [(result.metric, result.value, result.n) for result in found] == [
        ("average", 0.5, 4),
        ("average_of_subjects", pytest.approx(1 / 3), 2),
    ]
    assert [item.id for item in found[0].items] == ["mmlu_a:0", "mmlu_a:1", "mmlu_a:2", "mmlu_b:0"]


@pytest.mark.parametrize(
    "row, printed",
    [  # 000, Table 8: TNL of 160M, which failed in GovReport, and cosFormer2 of 160M, which Table 4 gives 8.71
        ("- - - 9.88 1.21 8.09 3.36 0.82 2.76 8.19 6.39 27.90 9.06", 7.77),
        ("7.01 1.89 5.44 8.07 0.9 6.85 9.28 1.52 8.14 8.33 5.66 26.41 10.70", 7.71),
        ("17.4 7.33 11.43 12.92 1.75 9.95 14.59 3.7 11.8 32.35 22.31 33.84 10.03", 14.57),
    ],
)
def test_the_average_of_scrolls_is_that_of_the_numbers_printed(row, printed):
    suite = SUITES["scrolls"]
    places = [(task, metric) for task, metrics in suite.tasks.items() for metric in metrics]
    values = [float("nan") if one == "-" else float(one) for one in row.split()]
    [average] = averages(suite, [Result(*place, value) for place, value in zip(places, values, strict=True)])
    assert average.value == pytest.approx(printed, abs=0.005)


def test_a_number_that_failed_is_dropped():
    suite = SUITES["scrolls"]
    results = [Result("scrolls_qasper", "f1", 0.2), Result("scrolls_quality", "em", 0.4)]
    [average] = averages(suite, [*results, Result("scrolls_qmsum", "rouge1", float("nan"))])
    assert (average.value, average.n) == (pytest.approx(0.3), 2)
    with pytest.raises(ConfigError, match="'scroll' .*'scrolls'"):
        find_suite("scroll")


# A question of each, in the words of the data that the harness asks; the first choice is the longest.
QUESTIONS = {
    "boolq": ("super_glue/boolq/default.yaml", {"passage": "It is dark.", "question": "is it dark", "label": 1}),
    "piqa": ("piqa/piqa.yaml", {"goal": "Open a door", "sol1": "Turn the handle.", "sol2": "Sing.", "label": 0}),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        {
            "activity_label": "Door",
            "ctx_a": "A man waits.",
            "ctx_b": "he",
            "endings": ["opens it.", "eats.", "b", "c"],
            "label": "0",
        },
    ),
    "winogrande": (
        "winogrande/default.yaml",
        {"sentence": "The cat saw the dog and _ ran.", "option1": "the cat", "option2": "the dog", "answer": "1"},
    ),
    "arc_easy": (
        "arc/arc_easy.yaml",
        {"question": "Which?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"},
    ),
    "arc_challenge": (
        "arc/arc_challenge.yaml",
        {"question": "Which?", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "1"},
    ),
    "openbookqa": (
        "openbookqa/openbookqa.yaml",
        {"question_stem": "The sun", "choices": {"text": ["shines", "sinks"], "label": ["A", "B"]}, "answerKey": "A"},
    ),
    "wikitext": ("wikitext/wikitext.yaml", {"page": " = A title = \n\n Some @-@ what words . \n"}),
    "lambada_openai": ("lambada/lambada_openai.yaml", {"text": "The last word of this sentence is here"}),
}


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The harness's tasks on questions of our own: what somebody without a network has."""
    folder = tmp_path_factory.mktemp("copies")
    for name, (path, row) in QUESTIONS.items():
        files = {split: f"{name}.jsonl" for split in ("train", "validation", "test")}
        changes = {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"include": str(OWN / path), **changes}))
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 2)
    return folder


@pytest.mark.parametrize("name", ["csr", "perplexity"])
def test_a_suite_is_asked_of_local_copies(copies, name):
    suite = SUITES[name]
    tasks = load_suite(suite, include=copies)
    assert list(tasks) == list(suite.tasks) and all(task.get_config("num_fewshot") == 0 for task in tasks.values())
    lm = LinnetLM(Engine(build_model(family("tnl")(32, 1, vocab_size=256)), ByteTokenizer(), slots=1))
    results = run_suite(lm, suite, tasks)
    counted = counting(suite, results)
    assert [(one.task, one.metric) for one in counted] == [(t, m) for t, ms in suite.tasks.items() for m in ms]
    assert all(len(one.items) == one.n == 2 for one in counted)
    if name == "csr":
        by_name = {one.metric: one for one in results if one.task == "csr"}
        assert by_name["average"].value == pytest.approx(sum(one.value for one in counted) / 7)
    else:
        assert all(one.better == "lower" and one.average == "exp" for one in counted)


@pytest.mark.parametrize("name, subject", [("mmlu", "mmlu_anatomy"), ("ceval", "ceval-valid_law")])
def test_five_examples_come_before_a_question_of_a_subject(tmp_path, name, subject):
    suite = SUITES[name]
    index = TaskManager(include_path=[OWN / folder for folder in suite.folders], include_defaults=False).task_index
    files = dict.fromkeys(("dev", "val", "test", "validation", "auxiliary_train"), "asked.jsonl")
    changes = {"task": subject, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({"include": str(index[subject].yaml_path), **changes}))
    choices = {"choices": list("wxyz"), "answer": 1} if name == "mmlu" else dict(zip("ABCD", "wxyz", strict=True))
    rows = [{"answer": "B", **choices, "question": f"Which is number {i}?"} for i in range(6)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = dataclasses.replace(suite, tasks={subject: suite.tasks[next(iter(suite.tasks))]})
    tasks = load_suite(one, include=tmp_path)
    lm = LinnetLM(Engine(build_model(family("tnl")(32, 1, vocab_size=256)), ByteTokenizer(), slots=1))
    average, by_subject, *_ = run_suite(lm, one, tasks)
    assert average.n == 6 and by_subject.n == 1 and average.value == pytest.approx(by_subject.value)
    asked = tasks[subject].instances[-1].args[0]
    assert [asked.count(f"Which is number {i}?") for i in range(6)] == [1] * 6 and asked.count(" B\n") == 5
    assert load_suite(one, shots=0, include=tmp_path)[subject].get_config("num_fewshot") == 0


STORY = "It was a dark night. Nobody slept."
ROWS = {
    "gov_report": [("a", "The report is long.", "A summary."), ("b", "Another report.", "Short.")],
    "summ_screen_fd": [("a", "JO: Hello.\nANN: Hello.", "Two say hello.")],
    "qmsum": [("a", f"What was said?\n\n{STORY}", "Nobody slept.")],
    "qasper": [
        ("a", f"Is it dark?\n\n{STORY}", "Yes"),
        ("b", f"Who slept?\n\n{STORY}", "nobody"),
        ("b", f"Who slept?\n\n{STORY}", "no one"),
    ],
    "narrative_qa": [("a", f"When?\n\n{STORY}", "at night"), ("a", f"When?\n\n{STORY}", "in the night")],
    "quality": [("a", f"What was it?\n\n (A) A  day\n (B) A night\n (C) A cat\n (D) A hat\n\n\n{STORY}", "A night")],
    "contract_nli": [("a", f"Nobody slept.\n\n{STORY}", "Entailment")],
}


@pytest.fixture
def zips(tmp_path):
    for name, rows in ROWS.items():
        keys = ("id", "input", "output")
        text = "".join(json.dumps(dict(zip(keys, row, strict=True)) | {"pid": row[0]}) + "\n" for row in rows)
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr(f"{name}/validation.jsonl", text)
    return tmp_path


def test_the_questions_of_scrolls(zips):
    tasks = load_suite(SUITES["scrolls"], include=zips)
    documents = {name.removeprefix("scrolls_"): list(task.validation_docs()) for name, task in tasks.items()}
    yes, who = documents["qasper"]
    assert yes["choices"] == ["yes", "no"] and yes["prompt"] == f"{STORY}\n\nQuestion: Is it dark?\nAnswer:"
    assert who["choices"] == [] and who["outputs"] == ["nobody", "no one"]
    [quality] = documents["quality"]
    assert quality["choices"] == ["A day", "A night", "A cat", "A hat"]
    assert quality["prompt"] == f"{STORY}\n\nQuestion: What was it?\nAnswer:"
    [contract] = documents["contractnli"]
    assert contract["prompt"] == f"{STORY}\n\nHypothesis: Nobody slept.\nConclusion:"
    assert documents["govreport"][0]["prompt"].startswith("The report is long.\n\nQuestion: What is a summary")
    assert len(documents["narrativeqa"]) == 1 and documents["qmsum"][0]["prompt"].count("What was said?") == 1


class Oracle(LinnetLM):
    """Generates fixed answers and gives choices fixed likelihoods, without asking the model."""

    said = {"report is long": "the summary", "Another report": "", "Hello": "two people say hello"}
    said |= {"What was said?": "nobody", "Who slept?": "  ", "When?": "in night"}

    def generate_until(self, requests, disable_tqdm=False):
        assert all(request.args[1]["until"] == ["\n"] for request in requests)
        return [next(said for part, said in self.said.items() if part in one.args[0]) for one in requests]

    def loglikelihood(self, requests, disable_tqdm=True):
        """By character, QuALITY's "A night" and ContractNLI's "Not mentioned" are likeliest; of yes and no, yes."""
        nats = {" A day": -5.0, " A night": -6.0, " A cat": -5.0, " A hat": -9.0, " yes": -1.0, " no": -2.0}
        nats |= {" Not mentioned": -12.0, " Entailment": -10.0, " Contradiction": -13.1}
        return [(nats[request.args[1]], False) for request in requests]


def test_the_scores_of_scrolls_by_hand(zips):
    suite = SUITES["scrolls"]
    lm = Oracle(Engine(build_model(family("tnl")(32, 1, vocab_size=256)), ByteTokenizer(), slots=1))
    results = run_suite(lm, suite, load_suite(suite, include=zips))
    found = {(one.task.removeprefix("scrolls_"), one.metric): one for one in results}
    expected = {
        ("govreport", "rouge1"): 0.25,  # "the summary" and "a summary" share one word of two; nothing said is 0
        ("govreport", "rouge2"): 0.0,
        ("govreport", "rougeL"): 0.25,
        ("summscreenfd", "rouge1"): 2 * 3 / 7,
        ("summscreenfd", "rouge2"): 2 * 1 / 5,
        ("summscreenfd", "rougeL"): 2 * 3 / 7,
        ("qmsum", "rouge1"): 2 / 3,
        ("qmsum", "rouge2"): 0.0,
        ("qmsum", "rougeL"): 2 / 3,
        ("qasper", "f1"): 0.5,  # yes is right; nothing said is "Unanswerable", which is not
        ("narrativeqa", "f1"): 1.0,
        ("quality", "em"): 1.0,
        ("contractnli", "em"): 0.0,
    }
    assert {key: one.value for key, one in found.items() if key[0] != "scrolls"} == pytest.approx(expected)
    average = found["scrolls", "average"]
    assert average.value == pytest.approx(sum(expected.values()) / 13) and average.n == 13
    assert [item.score for item in found["qasper", "f1"].items] == [1.0, 0.0]
    guessed = chances(load_suite(suite, include=zips), results, suite)
    assert {place[0].removeprefix("scrolls_"): value for place, value in guessed.items()} == {
        "qasper": 0.25,  # one of two questions is answered by yes or no
        "narrativeqa": 0.0,
        "quality": 0.25,
        "contractnli": pytest.approx(1 / 3),
    }


def test_scrolls_of_a_model_with_long_contexts_cut(zips):
    suite = SUITES["scrolls"]
    engine = Engine(build_model(family("llama")(32, 1, vocab_size=256)), ByteTokenizer(), slots=2, context_length=301)
    lm = LinnetLM(engine, max_length=300)
    results = run_suite(lm, suite, load_suite(suite, include=zips), limit=1)
    assert len(results) == 14 and lm.cuts > 0


def test_a_local_copy_that_is_no_yaml_is_named_instead_of_asking_the_harness_s(tmp_path):
    (tmp_path / "piqa.yaml").write_text("task: piqa\ntest_split: [\nmetric_list: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_suite(SUITES["csr"], include=tmp_path)
    [problem] = caught.value.problems
    assert "piqa.yaml: " in problem and "YAML" in problem and "line 2" in problem
