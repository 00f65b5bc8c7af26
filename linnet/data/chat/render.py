"""Renders one chat template in a process of its own, which its parent can end.

A template is a program that came with a model: two nested loops take hours, and `'x' * 10**9` a gigabyte. Jinja's
sandbox keeps it away from Python's objects, but bounds neither time nor memory. This file runs as a script that imports
nothing of Linnet, so that it starts fast. The first line of its input is the template, each further line holds the
variables of one rendering, all as JSON. It answers each line with one line: {"text": ...} or {"error": ...}. The text
of the first answer is JSON: the `variables` that the template takes, and the texts that it has `sought` in others.
"""

import contextlib
import datetime
import json
import signal
import sys

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 << 20  # bytes of the process
MOST_CHARACTERS = 1 << 22  # of a conversation as text
ALONE = 30  # seconds after which a rendering ends its process, if no parent is left to do so


class Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, with which templates mark an assistant's turn.

    The variable `generation_mark` is written before and behind the turn.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.Name("generation_mark", "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, mark: str, caller) -> str:
        return f"{mark}{caller()}{mark}"


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Returns a value as JSON; the parameters are those of the filter of transformers, by name and place."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    """Returns a Jinja environment with the filters and functions that templates of Hugging Face's tokenizers use."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def variables(made: jinja2.Environment, source: str) -> set[str]:
    """Returns the names that a template reads and does not set, or sets only where none was given."""
    tree = made.parse(source)
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    for check in tree.find_all((nodes.Test, nodes.Filter)):
        if check.name in ("defined", "undefined", "default", "d") and isinstance(check.node, nodes.Name):
            assigned.discard(check.node.name)
    return meta.find_undeclared_variables(tree) - made.globals.keys() - assigned


SEEKING = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "count"}
SEEKING |= {"replace", "removeprefix", "removesuffix"}


def sought(made: jinja2.Environment, source: str) -> set[str]:
    """Returns the texts that a template looks for in others, such as </think> in a message."""
    tree = made.parse(source)
    arguments = [node.expr for node in tree.find_all(nodes.Compare) if node.ops[0].op in ("in", "notin")]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in SEEKING:
            arguments += call.args[:1]
    arguments += [
        argument for look in tree.find_all(nodes.Filter) if look.name == "replace" for argument in look.args[:1]
    ]
    return {node.value for node in arguments if isinstance(node, nodes.Const) and isinstance(node.value, str)}


def answer(template: jinja2.Template | None, line: str) -> tuple[jinja2.Template | None, dict]:
    """Compiles the template of the first line, renders it for the others; returns the template and the answer."""
    try:
        values = json.loads(line)
        if template is None:
            made = environment()
            about = {"variables": sorted(variables(made, values)), "sought": sorted(sought(made, values))}
            return made.from_string(values), {"text": json.dumps(about)}
        if (date := values.pop("date", None)) is not None:
            values["strftime_now"] = datetime.datetime.fromisoformat(date).strftime
        parts, length = [], 0
        for part in template.generate(**values):
            parts.append(part)
            length += len(part)
            if length > MOST_CHARACTERS:
                return template, {"error": f"its text has more than {MOST_CHARACTERS:,} characters"}
        return template, {"text": "".join(parts)}
    except MemoryError:
        return template, {"error": f"it needs more than {MEMORY >> 20} MB of memory"}
    except RecursionError:
        return template, {"error": "it is nested too deeply"}
    except Exception as error:  # a template is a program and can raise any exception
        return template, {"error": str(error) or type(error).__name__}


def main() -> None:
    with contextlib.suppress(ImportError):  # Windows has no limits
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    template = None
    alarm = getattr(signal, "alarm", lambda seconds: None)  # Windows has none
    for line in sys.stdin:
        alarm(ALONE)
        template, reply = answer(template, line)
        alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
