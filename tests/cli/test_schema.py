"""`linnet schema`: every key is described, and files that Linnet reads are valid."""

import json
import re
import types
import typing
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

import linnet.layers  # noqa: F401  (registers the layers)
from linnet.cli import app
from linnet.config import parse_yaml, read_yaml
from linnet.data.synthetic import TASKS
from linnet.layers.base import CHANNELS, MIXERS
from linnet.study.config import StudyConfig
from linnet.train import TrainConfig

ROOT = Path(__file__).parents[2]
LAYERS = [layer.Config for layer in (*MIXERS.values(), *CHANNELS.values())]


def models_in(annotation) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return {annotation} if issubclass(annotation, BaseModel) else set()
    return set().union(*map(models_in, typing.get_args(annotation)))


def nested(roots) -> list[type[BaseModel]]:
    """The configurations, and all that their keys hold."""
    found, left = {}, list(roots)
    while left:
        model = left.pop()
        if model not in found:
            found[model] = None
            left += [inner for field in model.model_fields.values() for inner in models_in(field.annotation)]
    return sorted(found, key=lambda model: model.__qualname__)


@pytest.fixture(scope="module")
def schemas():
    found = {}
    for kind in ("train", "study", "mad"):
        result = CliRunner().invoke(app, ["schema", kind])
        assert result.exit_code == 0, result.output
        found[kind] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def validate(schemas):
    """validate(value, kind): `jsonschema.validate`, which checks the schema itself at each call, here once."""
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    validators = {kind: jsonschema.Draft202012Validator(schema) for kind, schema in schemas.items()}

    def run(value, kind):
        if error := jsonschema.exceptions.best_match(validators[kind].iter_errors(value)):
            raise error

    return run


@pytest.mark.parametrize(
    "model", nested([TrainConfig, StudyConfig, *LAYERS, *TASKS.values()]), ids=lambda m: m.__name__
)
def test_every_key_is_described(model):
    assert not [name for name, text in model.descriptions().items() if not text]


@pytest.mark.parametrize("kind", ["train", "study", "mad"])
def test_every_key_of_the_schema_is_described(schemas, kind):
    def walk(node, path=""):
        if isinstance(node, dict):
            for name, one in node.get("properties", {}).items():
                if "description" not in one and "$ref" not in one:
                    yield f"{path}.{name}"
            for key, one in node.items():
                yield from walk(one, f"{path}.{key}")
        elif isinstance(node, list):
            for one in node:
                yield from walk(one, path)

    assert not list(walk(schemas[kind]))


SHIPPED = [*ROOT.glob("configs/*.yaml"), *ROOT.glob("linnet/study/*.yaml")]
FILES = [path for path in SHIPPED if "objective" not in read_yaml(path)]  # those of studies


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "needles.yaml"], ids=lambda path: path.name)
def test_shipped_studies_are_valid(validate, path):
    validate(read_yaml(path), "study")


@pytest.mark.parametrize(
    "text",
    [
        "model: tnl-10m",
        "model: {recipe: tnl-10m, vocab_size: 4096}\ndata: {source: a.txt, tokenizer: bpe:4096}",
        "model: {d_model: 64, layout: tnl+sglu x2, options: {tnl: {num_heads: 4}}}\nrun: {device: cpu}\nsteps: 1e3",
        "model: tnl-10m\nevaluations: [{kind: text, paths: [a.txt]}, {kind: recall, tasks: [mqar]}]",
        *(path.read_text() for path in SHIPPED if path not in FILES),
    ],
)
def test_trainings_are_valid(validate, text):
    validate(parse_yaml(text), "train")


def test_a_study_of_images_is_valid(validate):
    text = "name: a\narchitectures: [vit]\nimages: [1e4]\nsizes: [[8, 1]]\ndata: {source: digits}\n"
    validate(parse_yaml(text + "train: {objective: images, augment: flip}"), "study")


@pytest.mark.parametrize(
    "kind, text, key",
    [
        ("train", "model: tnl-10m\nstpes: 3", "stpes"),
        ("train", "model: {d_model: 64, layout: tnl, options: {tnl: {heads: 4}}}", "heads"),
        ("train", "objective: images\nmodel: vit-8px\nseq_len: 4", "seq_len"),
        ("train", "objective: text\nmodel: tnl-10m\nepoch: 4", "epoch"),
        ("study", "name: a\narchitectures: [tnl]\nbudgets: [1e10]\ntrain: {optimiser: {name: adamw}}", "optimiser"),
        ("study", "name: a\narchitectures: [vit]\nimages: [100]\nseq_len: 3\ntrain: {objective: images}", "seq_len"),
        ("mad", "mqar: {pairs: 3}", "pairs"),
    ],
)
def test_mistakes_are_not(validate, kind, text, key):
    with pytest.raises(jsonschema.ValidationError, match=key):
        validate(parse_yaml(text), kind)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_study_files_name_their_schema(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert path.name == "needles.yaml" or re.fullmatch(
        r"# yaml-language-server: \$schema=\S*study\.schema\.json", first
    )
