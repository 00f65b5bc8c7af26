"""`linnet schema`: JSON schemas of configurations, for editors."""

import math
from typing import Any, Literal

from linnet.options import echo_json, options


@options
def schema(
    kind: Literal["train", "study", "mad"],
) -> None:
    """Print the JSON schema of a configuration: every key with its type, default and description.

    An editor that knows the schema completes keys and marks mistakes. The
    first line of a YAML file names it:

    [bold]# yaml-language-server: $schema=study.schema.json[/]

    [bold]linnet schema study > study.schema.json[/]

    Args:
        kind: train and study: their YAML files, with every objective (text, images, ...). mad: the variables of each
            task.
    """

    echo_json(build_schema(kind), allow_nan=False)


def build_schema(kind: str) -> dict[str, Any]:
    """Returns the schema of "train", "study" or "mad", with the short forms that YAML files may use."""
    from pydantic.json_schema import models_json_schema

    from linnet.data.synthetic import TASKS
    from linnet.layers.base import CHANNELS, MIXERS
    from linnet.models import KINDS
    from linnet.study.config import STUDIES, Architecture
    from linnet.train.objectives import OBJECTIVES

    layers = {name: layer.Config for registry in (MIXERS, CHANNELS) for name, layer in registry.items()}
    trainings = {name: objective.Config for name, objective in OBJECTIVES.items()}
    studies = tuple(STUDIES.values())
    wanted = [*TASKS.values()] if kind == "mad" else [*trainings.values(), *studies, *layers.values()]
    references, made = models_json_schema([(model, "validation") for model in dict.fromkeys(wanted)])
    definitions = made["$defs"]

    def refer(model: type) -> dict:
        return references[model, "validation"]

    def define(model: type) -> dict:
        return definitions[refer(model)["$ref"].rpartition("/")[2]]

    if kind == "mad":
        tasks = {name: refer(task) for name, task in TASKS.items()}
        root = {"title": "MAD tasks", "type": "object", "additionalProperties": False, "properties": tasks}
    else:
        for layer in layers.values():  # options of a layer change its defaults
            define(layer).pop("required", None)
        options = {"type": "object", "properties": {name: refer(layer) for name, layer in layers.items()}}
        recipe = {"type": "string", "description": "name of a recipe whose keys the others change"}
        number = {"type": "integer", "minimum": 1, "description": "the layout is repeated and cut at so many blocks"}
        alias = definitions["Alias"]["properties"]
        alias["options"] = alias["options"] | options
        blocks = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Alias"}]}}
        as_name = {"type": "string", "description": "name of a recipe"}
        for model in (
            definitions[kind.config.__name__] for kind in KINDS.values() if kind.config.__name__ in definitions
        ):
            model.pop("required", None)  # a recipe gives what is missing
            described = {"description": model["properties"]["layout"]["description"]}
            model["properties"] |= {
                "recipe": recipe,
                "num_layers": number,
                "layout": described | {"anyOf": [{"type": "string"}, blocks]},
                "options": model["properties"]["options"] | options,
            }
        for training in trainings.values():
            properties = define(training)["properties"]
            field = properties["model"]
            properties["model"] = {"description": field["description"], "anyOf": [as_name, {"$ref": field["$ref"]}]}
        architecture = definitions[Architecture.__name__]["properties"]
        architecture["options"] = architecture["options"] | options
        for study in studies:
            properties, keys = define(study)["properties"], define(trainings[study.OBJECTIVE])["properties"]
            properties["train"] |= {"type": "object", "properties": keys, "additionalProperties": False}
            if (units := OBJECTIVES[study.OBJECTIVE].units) != "tokens":
                description = f"{units} per run, in place of `budgets`"
                properties[units] = properties.pop("tokens") | {"description": description}
                del properties["seq_len"]
        if kind == "train":
            cases = [_where(name, refer(training)) for name, training in trainings.items()]
        else:
            cases = [_where(study.OBJECTIVE, refer(study), inside="train") for study in studies]
        root = {"type": "object", "allOf": cases}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}
    return _clean(schema)


def _where(objective: str, then: dict[str, Any], inside: str | None = None) -> dict[str, Any]:
    """Returns the schema of what has an objective; that of text is also the one of what has not the key.

    Args:
        inside: the key whose mapping has the objective; None is the whole.
    """
    named: dict[str, Any] = {"properties": {"objective": {"const": objective, "description": "the training objective"}}}
    if objective != "text":
        named["required"] = ["objective"]
    if inside is not None:
        named = {"properties": {inside: named | {"description": "settings of all runs"}}}
        if objective != "text":
            named["required"] = [inside]
    return {"if": named, "then": then}


def _clean(node: Any) -> Any:
    """Returns a schema without infinite defaults, which JSON does not allow, and without titles, which repeat keys."""
    if isinstance(node, list):
        return [_clean(child) for child in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _clean(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str)) and not (isinstance(value, float) and math.isinf(value))
    }
