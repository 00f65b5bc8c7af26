"""The adapter for lm-evaluation-harness, against the harness's own on the exported model, on local tasks."""

import json
import re
from unittest import TestCase

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra eval")

from chats import sentencepiece
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.evaluate.harness import LinnetLM, sampling_of
from linnet.inference import Engine
from linnet.models import build_model, family

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}/choice.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}/text.jsonl}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}, {{metric: word_perplexity}}]
"""
SAID = """
task: local_said
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}/said.jsonl}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6}}
metric_list: [{{metric: exact_match}}]
"""


def words(generator, count: int) -> str:
    return " ".join("".join(generator.choice(list("abcdefgh"), 4)) for _ in range(count))


@pytest.fixture(scope="module")
def model():
    return build_model(family("llama")(64, 2, vocab_size=256), seed=3).eval()


@pytest.fixture(scope="module")
def lm(model):
    return LinnetLM(Engine(model, ByteTokenizer(), slots=4, context_length=512))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, lm):
    path = tmp_path_factory.mktemp("tasks")
    generator = np.random.default_rng(0)

    def write(name: str, rows: list[dict]) -> None:
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    questions = [words(generator, 5) for _ in range(24)]
    choices = [[words(generator, int(generator.integers(1, 4))) for _ in range(3)] for _ in questions]
    rows = zip(questions, choices, strict=True)
    write("choice", [{"question": q, "choices": c, "answer": i % 3} for i, (q, c) in enumerate(rows)])
    write("text", [{"text": words(generator, n)} for n in (3, 40, 11)])
    said = lm.generate_until([ask(question) for question in questions[:6]])
    write(
        "said", [{"question": q, "answer": a} for q, a in zip(questions, [*said[:3], "no", "no", "no"], strict=False)]
    )
    for name, text in {"choice": CHOICE, "text": TEXT, "said": SAID}.items():
        (path / f"{name}.yaml").write_text(text.format(path=path))
    return path


def ask(question: str) -> Instance:
    return Instance("generate_until", {}, (question, {"until": ["\n"], "max_gen_toks": 6}), 0)


def evaluate(lm, folder) -> dict:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    names = ["local_choice", "local_text", "local_said"]
    found = simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=False)["results"]
    return {
        (task, metric): value
        for task, values in found.items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def test_metrics_are_those_of_the_harness_s_own_adapter(lm, tasks, tmp_path, model):
    pytest.importorskip("transformers", reason="needs the extra hf")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import linnet.hf  # noqa: F401  (registers the classes)
    from linnet.hf import export
    from linnet.runs.model import save_model

    save_model(tmp_path / "linnet", model.config, build_model(model.config, seed=3).state_dict(), ByteTokenizer())
    export(tmp_path / "linnet", tmp_path / "hf")
    theirs = HFLM(
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf"),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "hf"),
        batch_size=8,
        max_length=512,
    )
    expected, found = evaluate(theirs, tasks), evaluate(lm, tasks)
    assert found.keys() == expected.keys() and len(found) >= 5
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-3), key
    assert found["local_said", "exact_match,none"] >= 0.5
    assert 0 < found["local_choice", "acc,none"] < 1


def test_rolling_texts_by_the_state_and_in_windows(lm, model):
    text = words(np.random.default_rng(1), 30)
    request = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    [whole] = lm.loglikelihood_rolling(request)
    ids = torch.tensor([[0, *text.encode()]])
    logs = model(ids[:, :-1])[0].log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert whole == pytest.approx(logs.sum().item(), rel=1e-5)
    [windows] = LinnetLM(lm.engine, max_length=32).loglikelihood_rolling(request)
    assert windows != pytest.approx(whole, rel=1e-6)
    assert LinnetLM(lm.engine, max_length=4096).loglikelihood_rolling(request) == pytest.approx([whole], rel=1e-5)
    assert lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("",), 0)]) == [0.0]


def test_what_is_too_long_loses_its_beginning_with_a_warning(lm):
    short = LinnetLM(lm.engine, max_length=20)
    with TestCase().assertLogs(level="WARNING") as logs:
        found = short._loglikelihood_tokens([(("", ""), list(range(1, 40)), [5, 6])])
    assert re.search("1 of 1 contexts .* 39 .*max_length.* 20", "".join(logs.output))
    assert short.cuts == 1
    assert found == lm._loglikelihood_tokens([(("", ""), list(range(21, 40)), [5, 6])])
    assert short.generate_until([ask("x" * 100)]) == lm.generate_until([ask("x" * 15)])


def test_what_is_too_long_can_be_refused(lm):
    strict = LinnetLM(lm.engine, max_length=20, too_long="refuse")
    fits, longer = [(("", ""), [1] * 19, [5, 6])], [(("", ""), [1] * 20, [5, 6])]
    assert strict._loglikelihood_tokens(fits) == lm._loglikelihood_tokens(fits)
    with pytest.raises(ConfigError, match="context: 1 of 2 .* 20 .* 21"):
        strict._loglikelihood_tokens(fits + longer)
    assert strict.generate_until([ask("x" * 15)]) == lm.generate_until([ask("x" * 15)])
    with pytest.raises(ConfigError, match=" 20 .* 21"):
        strict.generate_until([ask("x" * 16)])
    with pytest.raises(ConfigError, match=" 20 .* 30"):
        strict.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("x" * 30,), 0)])
    assert strict.cuts == 0


def test_progress_counts_every_request(lm):
    told = []
    loud = LinnetLM(lm.engine, progress=lambda done, total: told.append((done, total)))
    loud._loglikelihood_tokens([(("", ""), [1, 2], [i]) for i in range(5)])
    loud.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("ab",), 0)] * 2)
    assert told[-3:] == [(5, 5), (1, 2), (2, 2)]
    loud.generate_until([ask("ab")] * 3)
    assert told[-1] == (3, 3)


def test_generation_ends_before_its_stop(lm):
    [text] = lm.generate_until([Instance("generate_until", {}, ("ab", {"max_gen_toks": 12}), 0)])
    stop = text[4:6]
    options = {"until": stop, "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}
    [cut] = lm.generate_until([Instance("generate_until", {}, ("ab", options), 0)])
    assert cut == text[: text.index(stop)]


def test_prompts_and_texts_begin_as_a_converted_model_expects(model):
    tokenizer = ByteTokenizer()
    tokenizer.prompt_start = (1,)
    begun = LinnetLM(Engine(model, tokenizer, slots=2, context_length=512))
    assert begun.tok_encode("ab") == [1, 97, 98] and begun.tok_encode("ab", add_special_tokens=False) == [97, 98]
    [(nats, _)] = begun.loglikelihood([Instance("loglikelihood", {}, ("ab", "c"), 0)])
    [(expected, _)] = begun._loglikelihood_tokens([(("", ""), [1, 97, 98], [99])])
    assert nats == pytest.approx(expected)
    [whole] = begun.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("abc",), 0)])
    [(expected, _)] = begun._loglikelihood_tokens([(("", ""), [1], [97, 98, 99])])
    assert whole == pytest.approx(expected, rel=1e-5)


def test_a_model_without_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        LinnetLM(Engine(build_model(family("tnl")(32, 1, vocab_size=256))))


class Merging(ByteTokenizer):
    """Bytes, but "The" is the token 200 and "e " the token 201."""

    def encode(self, text: str) -> np.ndarray:
        data = text.encode().replace(b"The", b"\xc8").replace(b"e ", b"\xc9")
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)


def loglikelihoods(lm, pairs, **named) -> list[float]:
    requests = [Instance("loglikelihood", {}, pair, i, **named) for i, pair in enumerate(pairs)]
    return [nats for nats, _ in lm.loglikelihood(requests)]


def tokens_scored(lm, pairs) -> list[float]:
    return [nats for nats, _ in lm._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])]


@pytest.mark.parametrize(
    "pairs, expected, merged",
    [
        ([("Th", "e"), ("Th", "is")], [(b"Th", b"e"), (b"Th", b"is")], 1),  # "The" would be one token
        ([("Th", "e end"), ("Th", "is")], [(b"Th", b"\xc9end"), (b"Th", b"is")], 1),
        ([("To", "e"), ("Th", "e")], [(b"To", b"e"), (b"Th", b"e")], 1),
        ([("so be", " it")], [(b"so be", b" it")], 1),  # "e " would be one token
        ([("a ", "b"), ("a ", "c")], [(b"a", b" b"), (b"a", b" c")], 0),
        ([(" \n", "b"), ("", "c")], [(b"\0", b" \nb"), (b"\0", b"c")], 0),
        ([("a", ""), ("", ""), ("a", "b")], [None, None, (b"a", b"b")], 0),
    ],
)
def test_questions_and_answers_that_share_a_token_are_encoded_apart(model, pairs, expected, merged):
    lm = LinnetLM(Engine(model, Merging(), slots=2, context_length=512))
    found = loglikelihoods(lm, pairs, metadata=("task", 0, 1))
    scored = tokens_scored(lm, [tuple(map(list, one)) for one in expected if one is not None])
    assert found == pytest.approx([0.0 if one is None else scored.pop(0) for one in expected], rel=1e-5)
    assert lm.merged == merged


def test_an_answer_that_is_encoded_apart_has_no_space_of_its_own(model):
    tokenizer = sentencepiece("always")  # "hi" would be one token
    lm = LinnetLM(Engine(build_model(family("tnl")(32, 1, vocab_size=tokenizer.vocab_size)), tokenizer, device="cpu"))
    [(context, answer), (_, spaced)] = lm._encode([("h", "i"), ("h", " 4")])
    assert [tokenizer.decode(ids) for ids in (context, answer, spaced)] == ["▁h", "i", "▁4"] and lm.merged == 1


def test_white_space_is_scored_after_the_start_token_of_a_converted_model(model):
    tokenizer = ByteTokenizer()
    tokenizer.prompt_start = (1,)
    lm = LinnetLM(Engine(model, tokenizer, slots=2, context_length=512))
    expected = tokens_scored(lm, [([1], list(b"  a")), ([1], list(b"a")), ([1, 98], list(b" a"))])
    assert loglikelihoods(lm, [("  ", "a"), ("", "a"), ("b ", "a")]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_every_name_of_the_limit_is_the_limit(lm, name):
    assert sampling_of({name: 5, "until": None}).max_tokens == 5
    [text] = lm.generate_until([Instance("generate_until", {}, ("ab", {name: 5}), 0)])
    [longer] = lm.generate_until([Instance("generate_until", {}, ("ab", {"max_gen_toks": 6}), 0)])
    assert len(text) < len(longer) and longer.startswith(text)


def test_settings_reach_the_engine_or_are_refused():
    options = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 5}
    found = sampling_of({**options, "do_sample": True, "num_beams": 1, "until": "a", "stop": ["b", ""]})
    assert {key: getattr(found, key) for key in options} == options and found.stop == ["a", "b"]
    assert sampling_of({**options, "do_sample": False}).temperature == 0
    assert sampling_of({"temperature": 1, "top_k": -1}).top_k == 0 and sampling_of({}).max_tokens == 256
    for key, value in {"num_beams": 4, "max_length": 9, "typical_p": 0.5, "top_q": 1, "do_sample": "no"}.items():
        with pytest.raises(ConfigError, match=f"{key}: "):
            sampling_of({key: value})
    for key, value in {"max_gen_toks": 0, "top_p": 2.0, "min_p": -1.0, "until": 5}.items():
        with pytest.raises(ConfigError):
            sampling_of({key: value})


def test_repeats_are_independent_draws_and_the_same_in_every_run(lm):
    options = {"temperature": 1.0, "max_gen_toks": 8}
    [one, two] = [Instance("generate_until", {}, ("ab", options), 0, ("task", i, 4)) for i in range(2)]
    texts = lm.generate_until([one] * 4 + [two] * 4)
    assert len(set(texts)) == 8
    assert lm.generate_until([two, one] * 4) == [texts[i] for i in (4, 0, 5, 1, 6, 2, 7, 3)]
