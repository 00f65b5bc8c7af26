"""Configurations: strict, all problems at once, each with key, value and fix."""

import importlib
import os
import pickle
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator, model_validator

import linnet
from linnet.config import (
    Config,
    ConfigError,
    Problem,
    checking,
    digest,
    gather,
    load_json,
    nearest,
    override,
    parse,
    parse_yaml,
    read_yaml,
    refuse,
    unknown,
    unwritable,
)
from linnet.encoders.config import MaskedConfig
from linnet.layers import base
from linnet.layers.base import CHANNELS
from linnet.layers.channels.moe import MoeConfig
from linnet.layers.mixers.linear.gla import GlaConfig
from linnet.layers.mixers.linear.lightnet import LightnetConfig
from linnet.layers.mixers.softmax.attention import AttentionConfig
from linnet.models.config import ModelConfig
from linnet.parallel.config import ParallelConfig
from linnet.runs.folder import LockedError
from linnet.serve.service import ServeConfig
from linnet.study import StudyConfig
from linnet.train.config import RunConfig, TrainConfig
from linnet.train.monitor import GuardConfig
from linnet.train.optimizer import OptimizerConfig, ScheduleConfig
from linnet.vision.config import VisionConfig
from linnet.vision.train import DiffusionTraining


class Inner(Config):
    width: int = Field(4, ge=1)
    kind: str = "plain"


class Outer(Config):
    rate: float = 0.1
    inner: Inner = Inner()
    many: list[Inner] = []
    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name == "broken":
            raise ConfigError(["first", "second"], "elsewhere")
        return name


INFINITE = {  # keys that may be infinite: no upper end; Rates are read from a file that `linnet study tune` writes
    "Bounds.high", "ByWidth.maximum", "InitStd.maximum", "TunedRate.b_low", "TunedRate.b_high", "TunedWidth.high",
    "_Guard.losses", "_Meta.recent", "_Meta.since_point", "_Meta.recent_auxiliary",  # losses of a checkpoint
}  # fmt: skip
CHECKED = {  # token ids, which requests compare with the vocabulary, and a version
    "ChatRequest.stop_token_ids", "CompletionRequest.stop_token_ids", "GenerationRequest.stop_token_ids",
    "CompletionRequest.prompt", "Verdicts.format",
}  # fmt: skip


def _classes(cls: type[Config]) -> Iterator[type[Config]]:
    for sub in cls.__subclasses__():
        if sub.__module__.startswith("linnet."):
            yield sub
        yield from _classes(sub)


def _numbers(node: object) -> Iterator[dict]:
    """The numbers in a JSON schema, at any depth."""
    if isinstance(node, dict):
        if node.get("type") in ("number", "integer") and "enum" not in node:
            yield node
        for key, part in node.items():
            yield from _numbers(part) if key not in ("default", "examples", "const", "enum") else ()
    elif isinstance(node, list):
        for part in node:
            yield from _numbers(part)


def _values(schema: dict) -> list:
    """Values that no range allows, by the kind of number."""
    least = [1e-300] if schema.get("minimum", schema.get("exclusiveMinimum")) > 0 else []
    return [10**300, -(10**300)] if schema["type"] == "integer" else [1e300, -1e300, *least]


def test_every_number_of_every_configuration_has_a_finite_range():
    for module in pkgutil.walk_packages(linnet.__path__, "linnet."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    open_ends, seen = set(), 0
    for cls in set(_classes(Config)):
        for name, schema in cls.model_json_schema().get("properties", {}).items():
            for number in _numbers(schema):
                seen += 1
                low = number.get("minimum", number.get("exclusiveMinimum"))
                high = number.get("maximum", number.get("exclusiveMaximum"))
                smallest = number["type"] == "integer" or number.get("exclusiveMinimum") != 0
                if low is None or high is None or not smallest or max(abs(low), abs(high)) > 1e30:
                    open_ends.add(f"{cls.__name__}.{name}")
    assert seen > 300 and open_ends == INFINITE | CHECKED


KNOWN_JSON = {"recipes", "processes", "scoring", "dedup"}  # of the package, or of work that this command began


@pytest.mark.parametrize(
    "cls",
    [TrainConfig, OptimizerConfig, ScheduleConfig, GuardConfig, RunConfig, ModelConfig, MaskedConfig, VisionConfig,
     AttentionConfig, GlaConfig, LightnetConfig, MoeConfig, DiffusionTraining, ParallelConfig, ServeConfig,
     StudyConfig],
)  # fmt: skip
def test_absurd_numbers_are_refused_by_name(cls):
    for name, schema in cls.model_json_schema()["properties"].items():
        options = [schema, *schema.get("anyOf", [])]
        numbers = [one for one in options if one.get("type") in ("number", "integer")]
        for value in [value for number in numbers for value in _values(number)]:
            with pytest.raises(ConfigError) as error:
                parse(cls, {name: value})
            assert any(re.match(rf"{name}[:.]", line) for line in error.value.problems), name


def test_every_problem_is_reported_with_key_value_and_fix():
    values = {"rate": "fast", "inner": {"widht": 3, "width": 0}, "many": [{"knid": "x"}], "colour": 1}
    with pytest.raises(ConfigError) as error:
        parse(Outer, values, "file.yaml")
    text = str(error.value)
    assert text.startswith("file.yaml: 6 problems")
    assert "rate: " in text and "'fast'" in text
    assert re.search("inner.widht: .*3.*'width'", text)
    assert re.search("inner.width: .* 0", text)
    assert re.search("many.0.knid: .*'x'.*'kind'", text)
    assert re.search("colour: .*1", text)
    assert "name: required" in text


def test_bounds_are_shown_as_people_write_them():
    class Bounded(Config):
        rate: float = Field(1.0, gt=0)
        count: int = Field(1, lt=1 << 31)

    with pytest.raises(ConfigError) as caught:
        parse(Bounded, {"rate": -1.0, "count": 1 << 40})
    low, high = caught.value.problems
    assert " 1e-30 (given -1.0)" in low and " 2147483648 (given" in high
    with pytest.raises(ConfigError, match=r" 1e\+30 \(given 1e\+31\)"):
        parse(Bounded, {"rate": 1e31})


def test_problems_of_several_configurations_are_gathered():
    problems = ["first"]
    with gather(problems):
        raise ConfigError(["second", "third"])
    with gather(problems):
        problems.append("fourth")
    assert problems == ["first", "second", "third", "fourth"]
    with pytest.raises(ZeroDivisionError), gather(problems):
        problems.append(1 / 0)


def test_types_are_not_converted():
    for values in ({"name": "x", "inner": {"width": "4"}}, {"name": "x", "inner": {"width": True}}, {"name": 3}):
        with pytest.raises(ConfigError):
            parse(Outer, values)
    assert parse(Outer, {"name": "x", "rate": 1}).rate == 1.0


def test_problems_of_a_part_come_without_its_header():
    with pytest.raises(ConfigError) as error:
        parse(Outer, {"name": "broken"})
    assert error.value.problems == ["name: first; second"]


def test_a_problem_of_several_keys_together_stands_for_itself():
    class Both(Config):
        least: int = 1
        most: int = 2

        @model_validator(mode="after")
        def _check(self) -> "Both":
            if self.least > self.most:
                raise ValueError(f"least: {self.least} is more than most")
            return self

    with pytest.raises(ConfigError) as error:
        parse(Both, {"least": 3})
    assert error.value.problems == ["least: 3 is more than most"]


class Square(Config):
    kind: Literal["square"]
    side: int


class Circle(Config):
    kind: Literal["circle"]


class Shapes(Config):
    shapes: list[Annotated[Square | Circle, Field(discriminator="kind")]]


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"kind": "sqare"}, "shapes.0.kind: 'sqare' is not one of 'square', 'circle'"),
        ({"side": 3}, "shapes.0.kind: required, but not given (given {'side': 3})"),
        ("circle", "shapes.0: must be a mapping of keys to values (given 'circle')"),
    ],
)
def test_one_of_several_kinds_names_its_key(shape, told):
    with pytest.raises(ConfigError) as caught:
        parse(Shapes, {"shapes": [shape]})
    assert caught.value.problems == [told]


def test_what_is_no_yaml_is_told_with_file_and_line(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("steps: 3\nmodel: [tnl\nseed: 1\n")
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert f'in "{path}", line 3' in caught.value.problems[0]


def test_configurations_do_not_change():
    with pytest.raises(ValueError):
        parse(Outer, {"name": "x"}).rate = 2.0


def test_numbers_in_scientific_notation_are_numbers():
    values = parse_yaml("{a: 3e-4, b: 1E5, c: -2e3, d: 1.5e+2, e: e5, f: 0x1e3, g: 12}")
    assert values == {"a": 3e-4, "b": 1e5, "c": -2e3, "d": 150.0, "e": "e5", "f": 0x1E3, "g": 12}


def test_overrides_keep_what_a_section_says_in_one_word():
    """`data: photos` with `--set data.size=32` lost the photos, and trained on the default data."""
    words = {"data": "photos", "augment": "crop_flip", "seed": 3, "tokenizer": "byte", "none": None}
    after = override(words, ["data.size=32", "augment.mixup=0.8", "model=vit-8px", "model.pool=cls", "none.a=1"])
    assert after["data"] == {"source": "photos", "size": 32} and after["augment"] == {"kind": "crop_flip", "mixup": 0.8}
    assert after["model"] == {"recipe": "vit-8px", "pool": "cls"} and after["none"] == {"a": 1}
    for key, value in (("seed.x", "3"), ("tokenizer.size", "'byte'")):
        with pytest.raises(ConfigError, match=rf"{key}=1.* is {value}, which has no key"):
            override(words, [f"{key}=1"])


def test_overrides_reach_nested_keys_and_leave_the_original_alone():
    before = {"a": 1, "b": {"c": 2}}
    after = override(before, ["b.c=3e-4", "b.d=[1, 2]", "x.y=text", "a=null"])
    assert after == {"a": None, "b": {"c": 3e-4, "d": [1, 2]}, "x": {"y": "text"}}
    assert before == {"a": 1, "b": {"c": 2}}
    with pytest.raises(ConfigError) as error:
        override(before, ["nothing", "=3", "a={"])
    listed = {"a": [{"b": 1}, [2, 3]]}
    assert override(listed, ["a.0.b=5", "a.1.0=7"]) == {"a": [{"b": 5}, [7, 3]]} and listed["a"][0] == {"b": 1}
    for key in ("a.x", "a.1.x"):
        with pytest.raises(ConfigError, match=rf"{key}=1.* is a list of \d items, which has no 'x'; give 0 to"):
            override(listed, [f"{key}=1"])
    with pytest.raises(ConfigError, match="--set 'a.2=1': .* 2 "):
        override(listed, ["a.2=1"])
    assert len(error.value.problems) == 3


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "torn.yaml").write_text("a: {b: 1\n")
    (tmp_path / "folder.yaml").mkdir()
    wrong = {"none.yaml": "none", "list.yaml": "mapping", "torn.yaml": "line", "folder.yaml": "folder"}
    for name, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            read_yaml(tmp_path / name)


def test_a_key_of_several_kinds_is_named_alone():
    class Either(Config):
        size: Annotated[int, Field(gt=0)] | list[Annotated[int, Field(gt=0)]]

    with pytest.raises(ConfigError) as caught:
        parse(Either, {"size": 0})
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == ["size", "size"]
    with pytest.raises(ConfigError) as caught:
        parse(Either, {"size": [1, "x"]})
    assert any(problem.startswith("size.1: ") for problem in caught.value.problems)


def test_a_digest_depends_on_content_and_not_on_order():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
    assert digest({4e18: 1, "below": {53e6: 2}}) == digest({"below": {53e6: 2}, 4e18: 1})  # as in `batch_tokens`
    assert digest(Inner()) == digest(Inner().model_dump()) and len(digest({})) == 12


def test_nearest_names_one_or_all():
    assert "'hgrn2'" in nearest("hgnr2", ["hgrn2", "tnl"]) and "tnl" not in nearest("hgnr2", ["hgrn2", "tnl"])
    assert nearest("zzz", ["b", "a"]).endswith("a, b")
    assert nearest("leaky", ["gla", "tnl"]).endswith("gla, tnl")  # half of the letters is not near
    assert "'include_usage'" in nearest("usage", ["include_usage", "n"])
    assert "'fuzzy_recall'" in nearest("fuzy", ["fuzzy_recall", "noisy_recall"])
    assert nearest("zzz", [])  # as in a file without classes
    assert re.search(r"\b14,000\b", nearest("zzz", map(str, range(14_000))))


def test_a_key_at_another_level_comes_with_its_path():
    class Rate(Config):
        value: float = 1.0

    class Schedule(Config):
        warm: float = 0.0

    class Whole(Config):
        rate: float | Rate = 1.0
        schedule: Schedule = Schedule()
        other: Annotated[Schedule | None, Field(description="as an alternative")] = None
        several: list[Rate] = []
        length: int = 1

    for key, told in {
        "value": "'rate.value'?",
        "warm": "'schedule.warm' or 'other.warm'?",
        "schedule.length": "'length' at the top level?",
        "lenght": "'length'?",
    }.items():
        *above, last = key.split(".")
        values = {above[0]: {last: 1}} if above else {last: 1}
        with pytest.raises(ConfigError) as caught:
            parse(Whole, values)
        [problem] = caught.value.problems
        assert problem.startswith(f"{key}: ") and problem.endswith(f"did you mean {told}")


@pytest.mark.parametrize(
    "values, elsewhere, not_asked",
    [
        (
            {"data": {"source": "stdlib", "window": 3}},
            "'guard.window' and 'model.options.",
            "did you mean",
        ),
        ({"window": 3}, "did you mean 'guard.window' or 'model.options.", "known:"),
        ({"num_heads": 3}, "did you mean 'model.options.LAYER.num_heads'?", "known:"),
        (
            {"guard": {"eps": 3}},
            "'optimizer.eps' and 'model.options.LAYER.eps' are keys of other sections",
            "did you mean",
        ),
        ({"guard": {"momentum": 3}}, "'optimizer.momentum' is a key of another section", "did you mean"),
        ({"guard": {"seed": 3}}, "did you mean 'seed' at the top level?", "data.seed"),
        ({"lr": 3}, "`optimizer.learning_rate`", "known:"),
    ],
)
def test_a_key_of_a_section_beside_is_not_taken_for_the_one_that_was_meant(values, elsewhere, not_asked):
    with pytest.raises(ConfigError) as caught:
        parse(TrainConfig, {"model": {"d_model": 32, "layout": "tnl+sglu"}, **values})
    (line,) = caught.value.problems
    assert elsewhere in line and not_asked not in line


def test_an_option_of_a_single_layer_is_named_with_it(monkeypatch):
    monkeypatch.setattr(base, "_ALL", {name: CHANNELS[name] for name in ("swiglu", "moe")})
    assert base.layers_with("num_experts") == ["moe"] and base.layers_with("inner") == ["LAYER"]


def test_a_folder_is_tried_and_left_as_it_was(tmp_path, monkeypatch):
    assert unwritable(tmp_path / "a" / "b") is None and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in unwritable(tmp_path / "file" / "a")

    def full(*_, **__):
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)  # as in /proc, where root has every right
    assert unwritable(tmp_path) == f"cannot be written to, '{tmp_path}' takes nothing (No such file or directory)"


def test_the_parts_of_a_problem():
    problem = Problem("data.source: 'a: b' is odd; write 'a'; or 'b'")
    assert (problem.path, problem.key) == ("data.source", "data")
    assert (problem.what, problem.fix) == ("'a: b' is odd", "write 'a'; or 'b'")
    assert problem.at("PATH") == "PATH: 'a: b' is odd; write 'a'; or 'b'"
    assert problem.under("train").key == "train" and problem.under("train", {"model"}) is problem
    whole = Problem("must be a mapping")
    assert (whole.path, whole.text, whole.fix) == ("", "must be a mapping", "")


def test_problems_are_refused_once_and_under_other_names():
    refuse([])
    with pytest.raises(ConfigError) as caught:
        refuse(["a: 1", "b: 2", "a: 1"], "there")
    assert caught.value.problems == ["a: 1", "b: 2"] and caught.value.where == "there"
    with pytest.raises(ConfigError) as caught, checking("here", "model.{}".format) as problems:
        problems.append("depth: 0 is too small; use 1")
        raise ConfigError(["width: 3 is odd; use 4"])
    assert caught.value.problems.pop(0) == "model.depth: 0 is too small; use 1"
    assert caught.value.problems == ["model.width: 3 is odd; use 4"] and caught.value.problems[0].path == "model.width"
    assert pickle.loads(pickle.dumps(caught.value)).problems[0].fix == "use 4"


def test_unknown_names_come_with_the_nearest_known_one():
    assert unknown("--mode", ["train", "trian"], ("train", "forward")) == [
        "--mode 'trian' is unknown; did you mean 'train'?"
    ]


def test_an_error_comes_back_whole_from_another_process():
    error = pickle.loads(pickle.dumps(ConfigError(["a: is wrong", "b: too"], "there")))
    assert error.problems == ["a: is wrong", "b: too"] and str(error).startswith("there: 2 problems")
    locked = pickle.loads(pickle.dumps(LockedError(Path("run"), "7")))
    assert isinstance(locked, LockedError) and str(locked) == str(LockedError(Path("run"), "7"))


def test_gathered_problems_of_a_file_name_it(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("model: x\n")
    (tmp_path / "train").write_text("a file that goes by the name of a heading\n")
    monkeypatch.chdir(tmp_path)
    problems = []
    for where, line in ((str(tmp_path / "a.yaml"), "steps: required"), ("train", "seed: no number")):
        with gather(problems):
            raise ConfigError([line], where)
    assert problems == [f"{tmp_path / 'a.yaml'}: steps: required", "seed: no number"]


def test_keys_that_come_twice_are_refused_with_file_lines_and_values(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("steps: 100\ndata: {source: a.txt, seed: 1, source: b.txt}\nsteps: 200\n")
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert error.value.where == str(path) and len(error.value.problems) == 2
    source, steps = error.value.problems
    for part in ("source: ", "line 2", "'a.txt'", "'b.txt'"):
        assert part in source
    for part in ("steps: ", "line 1 ", "(100)", "line 3 ", "(200)"):
        assert part in steps
    with pytest.raises(ConfigError, match="--set .*a: given"):
        override({}, ["x={a: 1, a: 2}"])


def test_a_merge_is_not_a_key_that_comes_twice():
    values = parse_yaml("base: &base {a: 1, b: 2}\nmore: &more {<<: *base, b: 3}\nmost: {<<: *more, a: 4}\n")
    assert values["more"] == {"a": 1, "b": 3} and values["most"] == {"a": 4, "b": 3}


class Counted(Config):
    """Numbers.

    Attributes:
        steps: how many.
        low, high: bounds, which
            take two lines.

    Raises:
        nothing: this is not an attribute.
    """

    steps: int = 1
    low: float = 0.0
    high: float = Field(1.0, description="the upper bound")


@pytest.mark.parametrize("given, steps", [("1e9", 10**9), ("5e3", 5000), ("2E0", 2), ("1_0e2", 1000)])
def test_an_exponent_is_an_integer_where_one_is_asked(tmp_path, given, steps):
    (tmp_path / "a.yaml").write_text(f"steps: {given}\nlow: {given}\n")
    for values in (read_yaml(tmp_path / "a.yaml"), override({}, [f"steps={given}", f"low={given}"])):
        found = parse(Counted, values)
        assert (found.steps, found.low) == (steps, steps) and (type(found.steps), type(found.low)) == (int, float)


@pytest.mark.parametrize("given", ["1.5", "1e-3", "100.0", "1.5e3", "1e300"])
def test_other_floats_are_no_integers(given):
    with pytest.raises(ConfigError, match="steps: "):
        parse(Counted, override({}, [f"steps={given}"]))


def test_keys_are_described_by_the_docstring():
    assert Counted.descriptions() == {
        "steps": "how many.",
        "low": "bounds, which take two lines.",
        "high": "the upper bound",
    }
    described = Counted.model_json_schema()["properties"]
    assert {name: one["description"] for name, one in described.items()} == Counted.descriptions()


class Longer(Counted):
    """More numbers.

    Attributes:
        steps: of training.
    """


def test_descriptions_are_inherited():
    assert Longer.descriptions() == Counted.descriptions() | {"steps": "of training."}


class Numbers(Config):
    rate: float = 0.1
    rates: list[float] = []
    most: float = Field(float("inf"), gt=0, allow_inf_nan=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_key(value):
    with pytest.raises(ConfigError) as error:
        parse(Numbers, {"rate": value, "rates": [1.0, value]})
    assert [line.partition(":")[0] for line in error.value.problems] == ["rate", "rates.1"]
    assert parse(Numbers, {"most": float("inf")}).most == float("inf")
    with pytest.raises(ConfigError, match="most"):
        parse(Numbers, {"most": float("nan")})


def test_integers_that_arithmetic_cannot_take_are_refused_by_key():
    with pytest.raises(ConfigError) as caught:
        parse(StudyConfig, {"steps": 10**400, "sizes": [[2**63, 2, 2]], "budgets": 3, "seq_len": 2**63 - 1})
    problems = caught.value.problems
    assert any(problem.startswith("steps") for problem in problems)
    assert any("9223372036854775808 is too large" in one and one.startswith("sizes.0.0") for one in problems), problems
    assert not any(problem.startswith("seq_len") for problem in problems)
    with pytest.raises(ConfigError, match="learning_rate.width"):
        parse(StudyConfig, {"learning_rate": {"value": 1.0, "width": 10**9, "exponent": -0.5}})


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"data": {"tokenizer": {"kind": "byte", "vocab_size": 9}}}, "data.tokenizer.byte.vocab_size"),
        (
            {"data": {"tokenizer": {"kind": "bpe", "vocab_size": 300, "end_of_document": "x"}}},
            "data.tokenizer.bpe.end_of_document",
        ),
        ({"evaluations": [{"kind": "recall", "window": 9}]}, "evaluations.0.recall.window"),
    ],
)
def test_a_key_of_another_kind_is_not_suggested_again(values, key):
    with pytest.raises(ConfigError) as caught:
        parse(TrainConfig, {"model": {"d_model": 32, "layout": "tnl+sglu"}, **values})
    (line,) = caught.value.problems
    assert line.startswith(f"{key}: unknown key ") and f"'{key.rpartition('.')[2]}'" not in line, line


def test_a_configuration_made_in_python_explains_like_a_file():
    with pytest.raises(ConfigError, match="widht: unknown key .*did you mean 'width'"):
        Inner(widht=3)
    with pytest.raises(ConfigError, match=r"Outer: 2 problems(.|\n)*inner.width(.|\n)*name: required"):
        Outer(inner={"width": 0})


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    "text, problem",
    [
        (BOMB, "aliases written out"),
        ("a: &a [1, *a]", "contains itself"),
        ("[" * 5000, "levels deep"),
        ("- " * 200 + "x", "levels deep"),
        ("a: 2001-99-99", "cannot be read"),
        ("a: " + "9" * 5000, "cannot be read"),
    ],
)
def test_small_files_that_would_never_load_are_refused(tmp_path, text, problem):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        read_yaml(path)
    assert len(str(error.value)) < 1000


def test_files_that_are_not_yaml_are_refused_before_they_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "large.yaml").write_text("# comment\n" * 200_000)
    for path, problem in (
        (tmp_path / "pipe.yaml", "pipe"),
        (tmp_path / "large.yaml", "bytes"),
        (Path("/dev/zero"), "device"),
        (tmp_path / "large.yaml" / "below", "no such file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_yaml(path)


def test_json_that_never_ends_or_is_too_much_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "nested").write_text("[" * 100_000)
    for name, problem in (("pipe", "pipe"), ("link", "device"), ("sparse", "more than"), ("nested", "nested")):
        with pytest.raises(ValueError, match=problem):
            load_json(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load_json(tmp_path / "nothing")


def test_files_of_folders_are_read_within_bounds():
    """`Path.read_text` of a link to a device, or of a file that is all holes, takes all memory."""
    for path in Path(linnet.__file__).parent.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            loads = re.search(r"json\.loads\(.*read_(text|bytes)\(", line)
            assert not loads or path.parent.name in KNOWN_JSON, f"{path}: use load_json: {line.strip()}"


def test_a_configuration_that_is_not_there_names_a_near_one_or_where_paths_start(tmp_path, monkeypatch):
    (tmp_path / "demo.yaml").write_text("a: 1\n")
    for name in ("studies/mine/study.yaml", "runs/mine/config.yaml", "configs/other.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("a: 1\n")
    (tmp_path / "lost.yaml").symlink_to("gone.yaml")  # as in a copy of configs/ alone
    monkeypatch.chdir(tmp_path)
    for path, problem in (
        ("lost.yaml", r"lost\.yaml: a link to gone\.yaml, which does not exist; give its path \(relative"),
        ("losst.yaml", r"losst\.yaml: no such file; give its path \(relative ones start in "),
        ("studies/mine", r"studies/mine: a folder; give a YAML file, such as studies/mine/study\.yaml$"),
        ("studies/mne", r"studies/mne: no such file; did you mean 'studies/mine/study\.yaml'\?$"),
        ("runs/mine", r"runs/mine: a folder; give a YAML file, such as runs/mine/config\.yaml$"),
        ("configs", r"configs: a folder; give a YAML file, such as configs/other\.yaml$"),
        ("studies", r"studies: a folder; give a YAML file$"),
        ("demmo.yaml", r"demmo\.yaml: no such file; did you mean 'demo\.yaml'\?"),
        ("o.yaml", r"no such file; give its path \(relative ones start in "),
        ("other/run.yaml", r"no such file; give its path \(relative ones start in "),
        (tmp_path / "zzz", r"no such file; give its path$"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_yaml(path)


def test_messages_quote_a_bounded_part_of_a_value():
    values: dict = {"rate": [["x" * 5000] * 5000] * 5000, "name": 10**6000, "k" * 100_000: 1}
    with pytest.raises(ConfigError) as error:
        parse(Outer, values)
    assert all(len(line) < 5000 for line in error.value.problems)
    with pytest.raises(ConfigError, match="levels"):
        override({}, ["a" + ".a" * 2000 + "=1"])


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "file.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match=r"file\.yaml(.|\n)*utf-8"):
        read_yaml(tmp_path / "file.yaml")


def test_all_problems_of_a_check_are_raised_together():
    with pytest.raises(ConfigError) as error, checking("evaluate") as problems:
        problems.append("a: is wrong")
        raise ConfigError(["b: is wrong too"], "text")
    assert error.value.problems == ["a: is wrong", "b: is wrong too"] and error.value.where == "evaluate"
    with checking("evaluate") as problems:
        assert problems == []
