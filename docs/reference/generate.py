"""Writes docs/reference/ops.md, docs/reference/layers.md and a table of docs/training.md from the code.

    python docs/reference/generate.py          # writes them all
    python docs/reference/generate.py --check  # exit status 1 where a page differs from what the code gives

Pages are made from docstrings, from descriptions of options, and from the counts that the code makes on the
meta device. To change a page, change those and run this again.
"""

import inspect
import re
import sys
import types
import typing
from pathlib import Path

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from torch.utils.flop_counter import FlopCounterMode

import linnet.models  # noqa: F401  (registers every layer)
from linnet import ops
from linnet.config import Config
from linnet.layers.base import CHANNELS, MIXERS, LayerContext
from linnet.layers.positions import Lrpe, Rope, RopeScalingConfig
from linnet.models import ModelConfig
from linnet.train import TrainConfig, identity

FOLDER = Path(__file__).parent
TOKENS, HEADS, WIDTH, MODES = 4096, 8, 64, 16
CHANNELS_OF_OP = HEADS * WIDTH

OPS_HEAD = f"""# Reference: linnet.ops

Which recurrences does Linnet have, and what do they take, return and cost? `python docs/reference/generate.py` writes
this page from the docstrings; [kernels.md](../kernels.md) says which kernel runs on which GPU.

    from linnet.ops import lightning_attention

B is the batch, T the length, H the heads, K and V the widths of keys and values per head, D channels, N states or
modes. An op whose name ends in `_step` computes one token and updates the state in place.

## Cost

Forward FLOPs per token, 2 per multiply-add, as the registered formulas count them, and the numbers that a state has per
sequence; at T = {TOKENS:,}, {HEADS} heads of {WIDTH} ({CHANNELS_OF_OP} channels), {MODES} modes or states per channel.
Chunks count whole. `filtered_attention` computes all pairs up to 4,096 tokens. Norms, rotations, gated activations and
the short convolution read and write each tensor once and count nothing.

| op | forward FLOPs per token | state per sequence |
|---|---|---|
"""

LAYERS_HEAD = """# Reference: layers

Which layers can a layout name, and which options do they have? `python docs/reference/generate.py` writes this page
from the code; [mixers.md](../mixers.md) says how to write one.

    model:
      d_model: 512
      layout: "(tnl+sglu x3 attention+swiglu) x2"
      options: {attention: {window: 512}}

The state is that of one sequence at d_model = 512 and a context of 4,096 tokens, in bytes.
"""


def cases() -> dict[str, tuple]:
    """Arguments on the meta device of every op that has a FLOP formula and a state."""
    B, T, H, K, D, N = 1, TOKENS, HEADS, WIDTH, CHANNELS_OF_OP, MODES
    tensor = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
    heads, channels = tensor(B, T, H, K), tensor(B, T, D)
    modes = ops.ModalFilter(tensor(D, N), tensor(D, N), tensor(D, N, 2), None)
    by_head = ops.ModalFilter(tensor(H, N), tensor(H, N), tensor(H, N, 2), None)
    state = {"output_final_state": True}
    return {
        "lightning_attention": ((heads, heads, heads), {"log_decay": tensor(H)} | state),
        "gated_linear_attention": ((heads, heads, heads, heads), state),
        "gated_delta_rule": ((heads, heads, heads, tensor(B, T, H), tensor(B, T, H)), state),
        "dplr_rule": ((heads,) * 6, state),
        "ssd": ((heads, heads, heads, tensor(B, T, H)), state),
        "forget_gated_attention": ((heads, heads, heads), state),
        "additive_attention": ((heads, heads, heads), state),
        "diagonal_scan": ((channels, channels), state),
        "selective_scan": ((channels, channels, tensor(D, N), tensor(B, T, N), tensor(B, T, N)), state),
        "modal_convolution": ((channels, tensor(D, N), tensor(D, N)), state),
        "long_convolution": ((channels, modes), state),
        "filtered_attention": ((heads, heads, heads, by_head), {}),
    }


def cost(name: str, arguments: tuple, options: dict) -> str:
    """A row of the table of costs."""
    with FlopCounterMode(display=False) as counter:
        out = getattr(ops, name)(*arguments, **options)
    state = out[1] if isinstance(out, tuple) else None
    tensors = state if isinstance(state, tuple) else () if state is None else (state,)
    numbers = f"{sum(x.numel() for x in tensors):,}" if tensors else "none"
    return f"| `{name}` | {counter.get_total_flops() / TOKENS:,.0f} | {numbers} |\n"


def ops_page() -> str:
    functions = [name for name in sorted(ops.__all__) if inspect.isfunction(getattr(ops, name))]
    others = [name for name in sorted(ops.__all__) if name not in functions]
    parts = [OPS_HEAD, *(cost(name, *case) for name, case in cases().items())]
    for name in functions:
        function = getattr(ops, name)
        parts.append(f"\n## {name}\n\n    {call(name, function)}\n\n{rendered(inspect.getdoc(function))}")
    parts.append("\n## Types\n")
    for name in others:
        parts.append(f"\n### {name}\n\n{rendered(inspect.getdoc(getattr(ops, name)))}")
    return "".join(parts)


def call(name: str, function) -> str:
    """The signature without types: names and defaults."""
    shown, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(parameter.name + default)
    return f"{name}({', '.join(shown)})"


def rendered(doc: str) -> str:
    """A docstring as Markdown: its sections as lists, indented equations as code, paragraphs on one line."""
    out = []
    for block in doc.split("\n\n"):
        title, _, body = block.partition("\n")
        if title in ("Args:", "Returns:", "Raises:", "Attributes:"):
            body = inspect.cleandoc(body)
            if title in ("Args:", "Raises:", "Attributes:"):
                entries = re.split(r"\n(?=\S)", body)
                body = "\n".join(f"- `{e.partition(':')[0]}`:{one_line(e.partition(':')[2])}" for e in entries)
            else:
                body = one_line(body)
            out.append(f"**{title.removesuffix(':')}**\n\n{body}" if title != "Returns:" else f"**Returns** {body}")
        elif block.startswith("    "):
            out.append(block)
        else:
            out.append(one_line(block))
    return "\n\n".join(out) + "\n"


def one_line(text: str) -> str:
    lead = " " if text.startswith(" ") else ""
    return lead + " ".join(text.split())


def layers_page() -> str:
    parts = [LAYERS_HEAD, "\n## Keys of a model\n\n", options_table(ModelConfig)]
    for title, registry in (("Token mixers", MIXERS), ("Channel mixers", CHANNELS)):
        parts.append(f"\n## {title}\n")
        own = {name: cls for name, cls in registry.items() if cls.__module__.startswith("linnet.")}
        modules: dict[str, list[str]] = {}
        for name, cls in sorted(own.items()):
            modules.setdefault(cls.__module__, []).append(name)
        for module, names in modules.items():
            parts.append(f"\n### {', '.join(names)}\n\n{rendered(inspect.cleandoc(sys.modules[module].__doc__))}")
            for name in names:
                if len(names) > 1:
                    parts.append(f"\n`{name}`: {one_line(inspect.getdoc(own[name]))}\n")
                if registry is MIXERS:
                    parts.append(f"\nState: {carried(own[name])}.\n")
                parts.append("\n" + options_table(own[name].Config))
    parts.append("\n## Positions\n")
    for cls, configs in ((Rope, [RopeScalingConfig]), (Lrpe, [])):
        parts.append(f"\n### {cls.__name__.lower()}\n\n{rendered(inspect.getdoc(cls))}")
        parts += ["\n" + rendered(inspect.getdoc(config)) + "\n" + options_table(config) for config in configs]
    return "".join(parts)


def carried(cls) -> str:
    """The tensors of a mixer's state with their shapes, and the bytes."""
    with torch.device("meta"):
        mixer = cls(cls.Config(), LayerContext(d_model=512, num_layers=2, mixer_count=2))
    spec = mixer.state_spec(1, TOKENS)
    if not spec:
        return "none"
    shown = ", ".join(f"`{name}` {list(one.shape)[1:]}" for name, one in spec.items())
    return f"{shown}; {sum(one.bytes for one in spec.values()):,} bytes"


def options_table(config: type[Config]) -> str:
    rows = [row(name, field) for name, field in config.model_fields.items()]
    return "| option | value | default | |\n|---|---|---|---|\n" + "".join(rows) if rows else "No options.\n"


def row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
    cells = (f"`{name}`", kind(field.annotation), default, field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def shown(value) -> str:
    if isinstance(value, Config):
        return "see there"
    if value in ("", (), [], {}):
        return "empty"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def kind(annotation) -> str:
    """A type in words that a YAML file uses."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(one) for one in arguments))
    if origin in (list, tuple):
        return "list"
    if origin is dict or annotation is dict:
        return "mapping"
    names = {int: "integer", float: "number", bool: "boolean", str: "text", types.NoneType: "null"}
    return names.get(annotation, "mapping" if inspect.isclass(annotation) and issubclass(annotation, Config) else "any")


def training_page() -> str:
    """docs/training.md with the table of the kinds of keys put in."""
    before, start, rest = read(FOLDER.parent / "training.md").partition(f"{KINDS_START}\n")
    after = rest[rest.index(KINDS_END) :]
    lines = ["| kind | keys |", "|---|---|"]
    lines += [f"| {kind} | {', '.join(f'`{key}`' for key in keys)} |" for kind, keys in kinds().items()]
    return before + start + "\n".join(lines) + "\n" + after


def kinds() -> dict[str, list[str]]:
    """Every key of a training, with dots, by its kind."""
    found: dict[str, list[str]] = {
        kind: [] for kind in ("identity", "identity, by content", "run", "run; identity with rollback", "label")
    }
    for key in keys_of(TrainConfig):
        top = key.partition(".")[0]
        if key in identity.BY_CONTENT:
            kind = "identity, by content"
        elif top in identity.LABELS:
            kind = "label"
        elif top == "run" and key.partition(".")[2] in (*identity.ROLLBACK, *identity.ROLLBACK_GPU):
            kind = "run; identity with rollback"
        else:
            kind = "run" if {top, key} & {*identity.CARRIED_OUT} else "identity"
        found[kind].append(key)
    return found


def keys_of(cls: type[BaseModel]) -> list[str]:
    """The keys of a configuration and of nested configurations, each once."""
    found: dict[str, None] = {}
    for name, field in cls.model_fields.items():
        inside = [f"{name}.{key}" for part in configs_in(field.annotation) for key in keys_of(part)]
        found |= dict.fromkeys(inside or [name])
    return list(found)


def configs_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [found for part in typing.get_args(annotation) for found in configs_in(part)]


KINDS_START = "<!-- kinds of keys: written by docs/reference/generate.py -->"
KINDS_END = "<!-- end of kinds -->"
PAGES = {"ops.md": ops_page, "layers.md": layers_page, "../training.md": training_page}


def main() -> int:
    stale = [name for name, page in PAGES.items() if (text := page()) != read(FOLDER / name) and update(name, text)]
    for name in stale:
        print(f"docs/reference/{name}: {'differs from the code' if '--check' in sys.argv else 'written'}")
    return int(bool(stale) and "--check" in sys.argv)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def update(name: str, text: str) -> bool:
    if "--check" not in sys.argv:
        (FOLDER / name).write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.exit(main())
