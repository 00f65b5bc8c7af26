"""Tries to break the command line with broken input: configurations, tables, texts and run folders.

    python benchmarks/fuzz.py                                # 2,000 configurations, 500 tables, 300 texts, 100 folders
    python benchmarks/fuzz.py --workers 32                     # the same, 32 cases at a time
    python benchmarks/fuzz.py --kinds table --first 100 --count 50
    python benchmarks/fuzz.py --only train:17 --keep here      # one case again, with its files in the folder `here`

Each case is made from its kind and number alone, and has a folder of its own. It runs in a worker, a process that calls
the command line in-process, and one case in twenty as a process of its own. A case fails if it shows a traceback, takes
longer than `--limit` seconds without training, is refused without a message or with one of more than 20,000 characters,
or ends with exit status 0 although a number of its result is not finite or its resolved configuration lacks the value
that was put in. A training that has begun is interrupted, as by Ctrl-C, after `--patience` seconds. Failures are saved
with a command that repeats them; the last lines count each kind's cases. Exit status 1 if a case fails.

Needs the extras study, data and serve.
"""

import argparse
import contextlib
import gzip
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

COUNTS = {"train": 1000, "study": 500, "mad": 150, "serve": 150, "evaluate": 200} | {
    "table": 500, "text": 300, "folder": 100,
}  # fmt: skip
REAL = 20  # one case in this many runs as a process of its own
LONG = 15.0  # seconds after which a training may be interrupted before its first rows
MEMORY = 4 << 30  # bytes of private memory per case, so that absurd sizes fail instead of taking the machine down
MESSAGE = 20_000  # characters of a message that somebody can still read
NUMBERS = [
    0, 1, -1, 2, 3, 7, 64, 1000, 10**6, 2**31, 2**31 - 1, 2**63, 10**18, 10**400, 0.0, -0.0, 0.5, 1e-9, 1e-300, 1e9,
    1e18, 1e30, 1e308, -1e30, math.nan, math.inf, -math.inf,
]  # fmt: skip
OTHERS = [
    None, True, False, "", "x", " ", "nan", "1e9", "auto", "x" * 5000, "a\0b", "é😀", "../..", "/dev/zero", "[", "{}",
    [], {}, [[]], [None], [1, 2], {"a": 1}, {1: 2}, {"a": {"b": {"c": [1]}}}, [math.nan], "2001-01-01", "no-such-file",
]  # fmt: skip
WORDS = [  # that some key knows
    "cosine", "linear", "wsd", "constant", "inverse_sqrt", "adamw", "muon", "rmsnorm", "layernorm", "none", "all",
    "qkv",
    "bfloat16", "float32", "rollback", "skip", "stop", "block", "selective", "sinusoidal", "learned", "cross", "reset",
    "byte", "bpe:260", "text.txt", "tnl+sglu", "tnl+sglu x3", "(attention+swiglu tnl+sglu) x1", "tpe lightnet+swiglu",
    "mamba", "stdlib", "tnl-10m", "cpu", "local", "silu", "sigmoid", "swish", "power", "isoflop", "6nd", "total",
]  # fmt: skip
BOMB = "b0: &b0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 8)}]\n" for i in range(1, 12)
)


@dataclass
class Case:
    """One command with its files.

    Attributes:
        arguments: of `linnet`, relative to the case's folder.
        expected: (path of keys, value) that a resolved configuration must show if the command ends with status 0.
        stop: seconds after which the command is interrupted, for those that never end by themselves.
    """

    arguments: list[str]
    expected: list[tuple[tuple, Any]] = field(default_factory=list)
    stop: float | None = None


class Overdue(BaseException):
    """The case takes too long."""


# Fixtures: made once, copied into the folder of each case that needs them.


def make_fixtures(folder: Path) -> None:
    """Writes a text, two trained models, and a small study's table."""
    folder.mkdir(parents=True)
    source = "".join(f"def f{i}(x):\n    return x * {i} + {i * i % 97}\n\n" for i in range(400))
    (folder / "text.txt").write_text(source)
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in source.split("\n\n")))
    import tokenizers

    from linnet.data.tokenizer import train_bpe

    train_bpe([source], 270).save(folder / "tokenizer.json")
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for layout in ("tnl+sglu", "attention+swiglu"):
        values = train_values(f"{layout} x2", layout.partition("+")[0]) | {"name": layout.partition("+")[0]}
        (folder / "train.yaml").write_text(yaml.safe_dump(values))
        with contextlib.chdir(folder):
            status, _, output, error = call(["train", "train.yaml", "--out", "runs", "--cache", "cache"])
        if status:
            raise SystemExit(f"the fixtures cannot be made: {output}\n{error or ''}")
    for n, run in enumerate(sorted(path.parent for path in (folder / "runs").glob("*/result.json"))):
        run.rename(folder / f"run{n}")
    rows = ["architecture,N,D,C,loss"]
    for exponent in (0.45, 0.5):
        for budget in (1e15, 3e15, 1e16, 3e16):
            for step in range(-2, 3):
                N = budget**exponent * 0.1 * 2.0**step
                D = budget / 6 / N
                rows.append(f"a{exponent},{N:.6g},{D:.6g},{budget:.6g},{1.7 + 400 / N**0.34 + 410 / D**0.28:.6f}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")


def train_values(layout: str = "tnl+sglu x2", mixer: str = "tnl") -> dict:
    heads = {mixer: {"num_heads": 2}} if mixer in ("tnl", "attention") else {}
    return {
        "name": "fuzz",
        "data": {"source": ["text.txt"], "tokenizer": "byte", "max_bytes": 20_000},
        "model": {"d_model": 16, "layout": layout, "options": heads},
        "seq_len": 16, "batch_size": 2, "steps": 2, "evaluate_tokens": 64, "run": {"device": "cpu"},
        "schedule": {"name": "constant"},
    }  # fmt: skip


def study_values() -> dict:
    return {
        "name": "fuzz",
        "architectures": [{"name": "tnl", "options": {"tnl": {"slopes": "log_spaced"}}}],
        "budgets": [5e7],
        "sizes": [[8, 1, 2], [12, 1, 2]],
        "tokens_per_param": [0.1, 500],
        "seq_len": 16, "batch_size": 2,
        "learning_rate": {"value": 1e-2, "width": 32, "exponent": -0.5, "maximum": 1.5e-2},
        "data": {"source": ["text.txt"], "tokenizer": "byte", "max_bytes": 20_000},
        "train": {"schedule": {"name": "cosine", "warmup": 0.1}, "evaluate_tokens": 64, "run": {"device": "cpu"}},
        "executor": {"kind": "inline"},
    }  # fmt: skip


# Mutations


def paths(values: Any, at: tuple = ()) -> Iterator[tuple]:
    """Yields the path of every key and item of nested values."""
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in entries:
        yield (*at, key)
        yield from paths(value, (*at, key))


def parent(values: Any, path: tuple) -> Any:
    for key in path[:-1]:
        values = values[key]
    return values


def plausible_value(rng: random.Random, old: Any) -> Any:
    """Returns a value of the same type that may well be valid, so that commands also get beyond their checks."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice([1, 2, 3, 4, 5, 8, 17, 32, 64, 100, old + 1, 2 * old, max(old - 1, 0)])
    if isinstance(old, float):
        return rng.choice([0.0, 1e-8, 1e-3, 0.1, 0.3, 0.5, 0.9, 1.0, 2.5, 10.0, old / 3, old * 7])
    if isinstance(old, list) and old:
        return rng.choice([old[:1], old[::-1], old + old[-1:], [plausible_value(rng, old[0])]])
    return rng.choice([*WORDS, None, 1, 0.5])


def new_value(rng: random.Random, old: Any) -> Any:
    if rng.random() < 0.5:
        return plausible_value(rng, old)
    if isinstance(old, (int, float)) and not isinstance(old, bool) and rng.random() < 0.8:
        return rng.choice([*NUMBERS, old * 2, old / 2, -old, old + 1, old * 10**6, str(old)])
    if isinstance(old, str) and rng.random() < 0.4:
        longer = [old + " ", old * 3, f"({old}) x3", f"9999 {old}", f"0{old}"]
        return rng.choice([old.upper(), old[1:], old[::-1], *longer])
    return rng.choice([*NUMBERS, *OTHERS, [old], {"x": old}])


def mutated(rng: random.Random, values: dict) -> tuple[dict, list[tuple[tuple, Any]]]:
    """Changes one to three places; returns the values and the (path, value) pairs that were put in."""
    values, put = json.loads(json.dumps(values)), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not (places := list(paths(values))):
            break
        path = rng.choice(places)
        holder, key = parent(values, path), path[-1]
        how = rng.random()
        if how < 0.8:
            holder[key] = new_value(rng, holder[key])
            put = [(other, value) for other, value in put if other[: len(path)] != path] + [(path, holder[key])]
        elif how < 0.9:
            del holder[key]
            put = [(other, value) for other, value in put if other[: len(path) - 1] != path[:-1]]
        elif isinstance(holder, dict) and isinstance(key, str):
            holder[key + rng.choice("xs_")] = holder[key]
    return values, put


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Cuts, repeats, overwrites or inserts bytes in a few places."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        piece = rng.choice(
            [b"\0", b"\xff\xfe", b"\n", b",", b'"', b"{", b"[" * 3000, b"nan", b"-1", b"1e999", b"\r", b"\xc3", b"\t",
             b"9" * 5000, b"x" * 140_000, "é".encode() * 7, b": ", b"- ", b"&a *a"]
        )  # fmt: skip
        how = rng.random()
        if how < 0.3:
            data = data[:at] + piece + data[at:]
        elif how < 0.5:
            data = data[:at] + piece + data[at + len(piece) :]
        elif how < 0.7:
            data = data[:at]
        elif how < 0.85:
            data = data[:at] + data[at + rng.randrange(1, 50) :]
        else:
            data = data + data[at : at + 1000]
    return data


# Cases by kind; each fills the case's folder, which is the working folder of the command.


def write_config(rng: random.Random, folder: Path, values: dict) -> list[tuple[tuple, Any]]:
    """Writes broken.yaml; returns the values that a resolved configuration must show."""
    put: list[tuple[tuple, Any]] = []
    if rng.random() < 0.9:
        values, put = mutated(rng, values)
    data = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode()
    if not put:
        data = rng.choice([damaged_bytes(rng, data), damaged_bytes(rng, data), BOMB.encode() + data, b"", b"- 1\n"])
    (folder / "broken.yaml").write_bytes(data)
    return put


def train_case(rng: random.Random, folder: Path, fixtures: Path) -> Case:
    import linnet.layers  # noqa: F401
    from linnet.config import parse
    from linnet.layers.base import CHANNELS, MIXERS
    from linnet.train import TrainConfig

    own = (
        name for name, mixer in MIXERS.items() if mixer.__module__.startswith("linnet.")
    )  # a test may have added some
    mixer = rng.choice(sorted(name for name in own if not MIXERS[name].before_layers))
    values = train_values(f"{mixer}+{rng.choice(sorted(CHANNELS))} x2", "")
    shutil.copy(fixtures / "text.txt", folder)
    if rng.random() < 0.6:  # every key, so that every key is tried
        for heads in (2, 1):
            has_heads = "num_heads" in MIXERS[mixer].Config.model_fields
            values["model"]["options"] = {mixer: {"num_heads": heads}} if has_heads else {}
            with contextlib.suppress(ValueError), contextlib.chdir(folder):
                values = parse(TrainConfig, values).model_dump(mode="json")
                break
    arguments = ["train", "broken.yaml", "--out", "out", "--cache", "cache"]
    if rng.random() < 0.15:  # the same by --set
        changed, put = mutated(rng, values)
        (folder / "broken.yaml").write_text(yaml.safe_dump(values))
        put = [(path, value) for path, value in put if not any(isinstance(key, int) for key in path)]
        for path, value in put:
            text = yaml.safe_dump(value, default_flow_style=True, width=1e9).removesuffix("\n...\n").strip()
            arguments += ["--set", f"{'.'.join(map(str, path))}={text}"]
        return Case(arguments, put)
    return Case(arguments, write_config(rng, folder, values))


def study_case(rng: random.Random, folder: Path, fixtures: Path) -> Case:
    shutil.copy(fixtures / "text.txt", folder)
    put = write_config(rng, folder, study_values())
    plan = ["--plan"] if rng.random() < 0.7 else []
    return Case(["study", "broken.yaml", "--out", "out", "--no-report", *plan], [] if plan else put)


def flags(rng: random.Random, known: dict[str, Any]) -> list[str]:
    """Returns one to three options of a command with broken values."""
    found: list[str] = []
    for name in rng.sample(sorted(known), rng.choice([1, 1, 2, 3])):
        found += [f"--{name}", str(new_value(rng, known[name]))[:6000].replace("\0", "")]
    return found


def mad_case(rng: random.Random, folder: Path, fixtures: Path) -> Case:
    from linnet.data.synthetic import find_task

    if rng.random() < 0.7:
        task = rng.choice(["in_context_recall", "fuzzy_recall", "noisy_recall", "selective_copying", "compression",
                           "memorization", "mqar"])  # fmt: skip
        keys = {name: field.default for name, field in find_task(task).model_fields.items()}
        arguments = ["mad", "data", task, "--n", "8"]
        for key in rng.sample(sorted(keys), rng.choice([1, 1, 2])):
            value = yaml.safe_dump(new_value(rng, keys[key]), default_flow_style=True, width=1e9)
            arguments += ["--set", f"{key}={value.removesuffix(chr(10) + '...' + chr(10)).strip()}"]
        return Case(arguments)
    known = {"tasks": "compression", "settings": "compression", "spec": "paper", "seed": "0", "device": "cpu",
             "executor": "inline", "workers": 1, "state": 4096, "budget": "smoke"}  # fmt: skip
    layout = rng.choice(["tnl+swiglu x2", "tnl x2", "0tnl", "(" * 500, "", "mad-hyena", "tnl+swiglu x9999", "x" * 3000])
    changes = ["--set", f"d_model={rng.choice(NUMBERS)}"] if rng.random() < 0.3 else []
    return Case(["mad", "run", layout, "--out", "out", "--device", "cpu", *changes, *flags(rng, known)], stop=3.0)


def serve_case(rng: random.Random, folder: Path, fixtures: Path) -> Case:
    run = shutil.copytree(fixtures / rng.choice(["run0", "run1"]), folder / "run")
    known = {"host": "127.0.0.1", "port": 0, "slots": 2, "queue": 2, "max-tokens": 16, "max-prompt-tokens": 16,
             "max-body": 1000, "stream-timeout": 1.0, "grace": 1.0, "context-length": 64, "device": "cpu",
             "dtype": "float32", "allowed-host": "x", "api-key": "k", "name": "m"}  # fmt: skip
    arguments = ["serve", "run", "--port", "0", "--device", "cpu"]
    how = rng.random()
    if how < 0.6:
        arguments += flags(rng, known)
    elif how < 0.8:
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        broken = rng.choice(
            ["{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}", "{{ 'x' * 10**9 }}",
             "{{ messages.__class__ }}", "{% for x in range(10**9) %}{% endfor %}", "{{ 9**9**9 }}", "{{ 1/0 }}",
             "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{" * 5000, "((" * 2000,
             damaged_bytes(rng, template.encode()).decode("latin-1")]
        )  # fmt: skip
        (folder / "t.jinja").write_text(broken)
        arguments += ["--chat-template", "t.jinja"]
    else:
        break_folder(rng, run)
    return Case(arguments, stop=2.0)


def evaluate_case(rng: random.Random, folder: Path, fixtures: Path) -> Case:
    shutil.copytree(fixtures / rng.choice(["run0", "run1"]), folder / "run")
    text = rng.choice(["text.txt", "lines.jsonl"])
    shutil.copy(fixtures / text, folder)
    kind = rng.choice(["text", "text", "needle", "recall"])
    common = {"dtype": "float32"}
    if kind == "text":
        known = common | {"window": 8, "stride": 4, "text-key": "text", "method": "auto"}
        if rng.random() < 0.3:
            (folder / text).write_bytes(damaged_bytes(rng, (folder / text).read_bytes()[:3000]))
        return Case(["evaluate", "text", "run", text, "--json", "--device", "cpu", *flags(rng, known)])
    known = common | {"lengths": "16:32:2", "samples": 1}
    if kind == "needle":
        known |= {"depths": 2, "mode": "easy", "digits": 1, "scoring": "x", "haystack": text}
    else:
        known |= {"pairs": "2"}
    arguments = ["evaluate", kind, "run", "--json", "--device", "cpu", "--lengths", "64:96:2", "--samples", "1"]
    if kind == "needle":
        arguments += ["--depths", "2"]
    return Case([*arguments, *flags(rng, known)], stop=8.0)  # a million samples are allowed


def table_case(rng: random.Random, folder: Path, fixtures: Path) -> Case:
    rows = [line.split(",") for line in (fixtures / "table.csv").read_text().splitlines()]
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        how, row = rng.random(), rng.randrange(1, len(rows)) if len(rows) > 1 else 0
        column = rng.randrange(len(rows[row])) if rows[row] else 0
        if how < 0.5 and rows[row]:
            rows[row][column] = str(new_value(rng, 1.5)).replace("\0", "")
        elif how < 0.6:
            rows[rng.randrange(len(rows))] = rng.choice([[], ["x"], ["", "", ""], rows[row] * 3])
        elif how < 0.7:
            rows = rows[: rng.randrange(len(rows) + 1)] or [[]]
        elif how < 0.8:
            rows = [line[:column] + line[column + 1 :] for line in rows]
        elif how < 0.9 and rows[0]:
            rows[0][rng.randrange(len(rows[0]))] = rng.choice(["N", "loss", "", "budget", "status", "run", "C ", "x"])
        else:
            factor = rng.choice([0.0, 1e-30, 1e30, -1.0, 1.0])
            for line in rows[1:]:
                with contextlib.suppress(ValueError, IndexError):
                    line[column] = repr(float(line[column]) * factor)
    data = "\n".join(map(",".join, rows)).encode()
    if rng.random() < 0.25:
        data = damaged_bytes(rng, data)
    (folder / "table.csv").write_bytes(data)
    method = rng.choice(["power", "isoflop", "isoflop", "envelope", "parametric", "all"])
    arguments = ["fit", "table.csv", "--json", "--method", method, "--bootstrap", rng.choice(["0", "20"])]
    known = {"max-loss": 3.0, "min-tokens-per-param": 1.0, "budgets": "1e15,3e15", "seed": 0, "hold-out": 0.2,
             "count": "total", "flops": "6nd", "envelope": "hull", "columns": "loss=loss"}  # fmt: skip
    return Case([*arguments, *(flags(rng, known) if rng.random() < 0.3 else [])])


def text_case(rng: random.Random, folder: Path, fixtures: Path) -> Case:
    name = rng.choice(["text.txt", "text.txt", "lines.jsonl", "text.parquet", "text.txt.gz", "text.txt.zst"])
    plain = (fixtures / ("lines.jsonl" if name == "lines.jsonl" else "text.txt")).read_bytes()
    if rng.random() < 0.5:
        plain = damaged_bytes(rng, plain)
    if rng.random() < 0.15:
        runs = [b"x" * 400_000, b"ab" * 100_000, "深".encode() * 100_000, b"\n" * 50_000, b" " * 50_000]
        plain = rng.choice([*runs, b"a"])
    data = plain
    if name.endswith(".gz"):
        data = gzip.compress(plain)
    elif name.endswith(".zst"):
        import zstandard

        data = zstandard.compress(plain)
    elif name.endswith(".parquet"):
        import io

        import pyarrow
        from pyarrow import parquet

        sink = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": [plain.decode("utf-8", "replace")] * 3}), sink)
        data = sink.getvalue()
    if name.endswith((".gz", ".zst", ".parquet")) and rng.random() < 0.5:
        data = damaged_bytes(rng, data)
    (folder / name).write_bytes(data)
    tokenizer = rng.choice(["byte", "byte", "bpe:260", "bpe:300", "bpe:0", "bpe:99999999999", "tokenizer.json"])
    if tokenizer == "tokenizer.json":
        values = json.loads((fixtures / tokenizer).read_text())
        how = rng.random()
        if how < 0.3:
            key = rng.choice(list(values["model"]["vocab"]))
            values["model"]["vocab"][key] = rng.choice([2**31, 2**32 - 1, 10**9, 0, -1, 10**30])
        elif how < 0.5:
            values["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated",
                                       "invert": False}  # fmt: skip
        elif how < 0.8:
            values, _ = mutated(rng, values)
        data = json.dumps(values).encode()
        (folder / tokenizer).write_bytes(damaged_bytes(rng, data) if how > 0.9 else data)
    if rng.random() < 0.2:
        small = ["--set", "steps=1", "--set", "seq_len=8", "--set", "batch_size=1", "--set", "evaluate_tokens=32"]
        model = ["model.d_model=16", "model.layout=tnl+sglu", "model.options.tnl.num_heads=2"]
        model = [part for assignment in model for part in ("--set", assignment)]
        source = ["--model", "tnl-10m", "--data", name, "--set", f"data.tokenizer={tokenizer}"]
        return Case(["train", *source, *small, *model, "--device", "cpu", "--out", "out", "--cache", "cache"])
    known = {"validation": name, "validation-fraction": 0.1, "text-key": "text", "max-bytes": 1000, "seed": 0}
    arguments = ["data", name, "--tokenizer", tokenizer, "--out", "cache", "--json"]
    return Case([*arguments, *(flags(rng, known) if rng.random() < 0.3 else [])])


def break_folder(rng: random.Random, run: Path) -> None:
    """Damages one or two files of a run folder."""
    for _ in range(rng.choice([1, 1, 2])):
        file = rng.choice(sorted(path for path in run.rglob("*") if path.is_file()))
        how = rng.random()
        if how < 0.15:
            file.unlink()
        elif how < 0.25:
            file.unlink()
            file.mkdir()
        elif how < 0.35:
            file.write_bytes(rng.choice([b"", b"{}", b"[]", b"null", b"[" * 100_000, b"{'a': 1}", b"\0" * 100]))
        elif how < 0.45 and file.parent != run:
            folder = file.parent
            shutil.rmtree(folder)
            folder.write_bytes(b"a file")
        elif how < 0.6 and file.suffix in (".json", ".yaml"):
            with contextlib.suppress(ValueError):
                values, _ = mutated(rng, yaml.safe_load(file.read_text()))
                file.write_text(json.dumps(values) if file.suffix == ".json" else yaml.safe_dump(values))
        else:
            file.write_bytes(damaged_bytes(rng, file.read_bytes()))


def folder_case(rng: random.Random, folder: Path, fixtures: Path) -> Case:
    run = shutil.copytree(fixtures / rng.choice(["run0", "run1"]), folder / "out" / "fuzz-run")
    if rng.random() < 0.5:  # stopped before its end
        (run / "result.json").unlink()
    break_folder(rng, run)
    shutil.copy(fixtures / "text.txt", folder)
    path = str(run.relative_to(folder))
    kinds = [
        ["generate", path, "def f(", "--json", "--logprobs", "2", "--max-tokens", "4", "--device", "cpu"],
        ["evaluate", "text", path, "text.txt", "--json", "--device", "cpu"],
        ["report", "out", "--bootstrap", "0"],
        ["train", "--extend", path, "--set", "steps=3", "--out", "out", "--cache", str(fixtures / "cache")],
        ["fit", "out", "--json", "--bootstrap", "0"],
    ]
    return Case(rng.choice(kinds))


MAKERS: dict[str, Callable[[random.Random, Path, Path], Case]] = {
    "train": train_case, "study": study_case, "mad": mad_case, "serve": serve_case, "evaluate": evaluate_case,
    "table": table_case, "text": text_case, "folder": folder_case,
}  # fmt: skip


# Running and judging


Outcome = tuple[str | None, int | None]  # what is wrong, or None; the exit status
End = tuple[int, str, str, str | None]  # exit status, standard output, all output, and the traceback of an exception


def call(arguments: list[str]) -> End:
    """Runs the command line in this process."""
    from typer.testing import CliRunner

    from linnet.cli import app

    result = CliRunner().invoke(app, arguments, prog_name="linnet")
    error = result.exception
    if error is None or isinstance(error, SystemExit):
        return result.exit_code, result.stdout, result.output, None
    if isinstance(error, Overdue):
        raise error
    return 1, result.stdout, result.output, "".join(traceback.format_exception(error))


def begun(folder: Path, since: float) -> bool:
    """Whether a training of the case has written rows since a time, so that time passes for a good reason."""
    files = [*folder.rglob("metrics.jsonl")]
    if time.time() - since > LONG:  # for example, a model that is being compiled: its folder is there
        files += folder.glob("out/*/config.yaml")
    return any(path.stat().st_size and path.stat().st_mtime > since for path in files if path.is_file())


def judge(case: Case, folder: Path, status: int, result: str, output: str, error: str | None) -> str | None:
    """Returns what is wrong with the end of a case, or None."""
    if error is not None or "Traceback (most recent call last)" in output:
        return f"traceback: {(error or output).strip().splitlines()[-1][:300]}"
    if status not in (0, 1, 2, 130):
        return f"exit status {status}: {output[-300:]}"
    if status:
        if not output.strip():
            return f"exit status {status} without a message"
        return f"a message of {len(output):,} characters" if len(output) > MESSAGE else None
    since = (folder / "command.txt").stat().st_mtime
    for path in folder.rglob("result.json"):
        if path.is_file() and path.stat().st_mtime > since and not finite(json.loads(path.read_text())):
            return f"exit status 0, but {path.parent.name}/{path.name} holds a number that is not finite"
    if "--json" in case.arguments and not finite(json.loads(result)):
        return "exit status 0, but the printed result holds a number that is not finite"
    resolved = [*folder.glob("out/*/config.yaml"), *folder.glob("out/*/study.yaml")]
    if case.expected and resolved:
        shown = yaml.safe_load(resolved[0].read_text())
        for path, value in case.expected:
            if not shows(shown, path, value):
                key = ".".join(map(str, path))
                return f"exit status 0, but {resolved[0].name} does not show {key} = {value!r:.100}"
    return None


def finite(values: Any) -> bool:
    if isinstance(values, dict):
        return all(map(finite, values.values()))
    if isinstance(values, list):
        return all(map(finite, values))
    return not isinstance(values, float) or math.isfinite(values)


def shows(resolved: Any, path: tuple, value: Any) -> bool:
    """Whether a resolved configuration has a value at a path; short forms, and values that stand for a default, may
    have been written out."""
    if value is None or isinstance(value, (str, list, dict)):  # a name, a shorthand, or nothing, written out
        return True
    for key in path:
        if isinstance(key, int) and isinstance(resolved, dict):  # a list that is short for a mapping
            return True
        try:
            resolved = resolved[key]
        except (KeyError, IndexError, TypeError):
            return False
    return resolved == value or isinstance(resolved, (dict, list))


def run_case(kind: str, number: int, folder: Path, fixtures: Path, limit: float, patience: float) -> Outcome:
    """Makes and runs one case in `folder`."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        case = MAKERS[kind](random.Random(f"{kind}:{number}"), folder, fixtures)
        (folder / "command.txt").write_text(f"linnet {' '.join(map(repr, case.arguments))}\n")
        if number % REAL == REAL - 1:
            end = run_process(case, folder, limit, patience)
            return judge(case, folder, *end), end[0]
        started, since = time.monotonic(), time.time()

        def check(*_: object) -> None:
            spent = time.monotonic() - started
            if case.stop is not None and spent > case.stop:
                signal.setitimer(signal.ITIMER_REAL, limit)
                os.kill(os.getpid(), signal.SIGINT)
            elif begun(folder, since) and spent > patience:
                signal.setitimer(signal.ITIMER_REAL, limit)
                raise KeyboardInterrupt
            elif spent > limit:
                raise Overdue

        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, check)
        signal.setitimer(signal.ITIMER_REAL, min(1.0, limit), 0.5)
        try:
            end = call(case.arguments)
        except (Overdue, KeyboardInterrupt):
            frames = traceback.format_exc().splitlines()
            places = [line.strip() for line in frames if "linnet/" in line and "fuzz.py" not in line]
            return f"takes more than {limit:g} seconds: {places[-1] if places else ''}", None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return judge(case, folder, *end), end[0]


def run_process(case: Case, folder: Path, limit: float, patience: float) -> End:
    """Runs a case as a process of its own. The time it takes to start does not count."""
    command = [sys.executable, "-P", "-m", "linnet", *case.arguments]
    with open(folder / "result.txt", "w+") as result, open(folder / "output.txt", "w+") as output:
        process = subprocess.Popen(command, stdout=result, stderr=output, stdin=subprocess.DEVNULL)
        started, since, interrupted = time.monotonic(), time.time(), False
        start = 30.0  # for imports, on a busy machine
        while process.poll() is None:
            spent = time.monotonic() - started
            soon = (case.stop is not None and spent > case.stop + start / 2) or (
                begun(folder, since) and spent > patience
            )
            if soon and not interrupted:
                process.send_signal(signal.SIGINT)
                interrupted = True
            if spent > limit + start:
                process.kill()
                return 1, "", "", f"takes more than {limit:g} seconds"
            time.sleep(0.05)
        result.seek(0)
        output.seek(0)
        printed = result.read()
        shown = printed + output.read()
        if interrupted and "KeyboardInterrupt" in shown and "linnet/" not in shown.partition("Traceback")[2]:
            shown = shown.partition("Traceback")[0]  # of another library, while Python started or ended
        stopped = interrupted and process.returncode == -signal.SIGINT
        return 130 if stopped else process.returncode, printed, shown, None


def work(connection: Connection, root: Path, fixtures: Path, options: Any) -> None:
    """Runs the cases (kind, number) that the connection asks for; answers (problem, exit status) to each."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    sys.stdout = sys.stderr = open(os.devnull, "w")
    import linnet.cli  # noqa: F401  its imports do not belong to the first case, whose clock may interrupt them

    parent = os.getppid()
    while True:
        while not connection.poll(5.0):
            if os.getppid() != parent:
                return
        if (case := connection.recv()) is None:
            return
        folder = root / "-".join(map(str, case))
        try:
            problem, status = run_case(*case, folder, fixtures, options.limit, options.patience)
        except BaseException:
            problem, status = f"the case itself: {traceback.format_exc()[-1500:]}", None
        if problem is None:
            shutil.rmtree(folder, ignore_errors=True)
        connection.send((problem, status))


class Worker:
    """A process that runs one case after the other, on its own copy of the fixtures.

    Attributes:
        connection: has something to read when the case has ended, or the process.
        case: the case that runs, or None.
        overdue: when, of time.monotonic, it must have ended.
    """

    def __init__(self, root: Path, number: int, options: Any):
        self.limit = options.limit
        fixtures = root / f"fixtures{number}"
        if not fixtures.is_dir():
            shutil.copytree(root / "fixtures", fixtures)
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, root, fixtures, options), daemon=False)
        self.process.start()
        theirs.close()
        self.case: tuple[str, int] | None = None
        self.overdue = 0.0

    def begin(self, case: tuple[str, int] | None) -> None:
        """Starts a case; None ends the process."""
        self.connection.send(case)
        self.case, self.overdue = case, time.monotonic() + 2 * self.limit + 60

    def end(self) -> Outcome:
        """Returns what became of the case: call it when there is something to read, or when it is overdue."""
        self.case = None
        if not self.connection.poll():  # native code that no signal interrupts
            self.process.kill()
            self.process.join()
            return f"takes more than {self.limit:g} seconds in native code", None
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return f"the process died (exit code {self.process.exitcode})", None


Failure = tuple[str, int, str]  # kind, number, problem


def run_all(cases: list[tuple[str, int]], root: Path, options: Any) -> tuple[list[Failure], dict[str, Counter]]:
    """Runs cases in workers, a new one whenever one dies or hangs; returns the failures, and per kind how often each
    exit status came."""
    failures: list[Failure] = []
    statuses: dict[str, Counter] = {kind: Counter() for kind, _ in cases}
    waiting, done = iter(cases), 0
    workers = [Worker(root, number, options) for number in range(min(options.workers, len(cases)))]

    def go_on(number: int) -> None:
        case = next(waiting, None)
        if case is not None and not workers[number].process.is_alive():
            workers[number] = Worker(root, number, options)
        if workers[number].process.is_alive():
            workers[number].begin(case)

    try:
        for number in range(len(workers)):
            go_on(number)
        while busy := [worker for worker in workers if worker.case is not None]:
            soonest = min(worker.overdue for worker in busy) - time.monotonic()
            ready = multiprocessing.connection.wait([worker.connection for worker in busy], max(soonest, 0.0))
            for number, worker in enumerate(workers):
                if worker.case is None or (worker.connection not in ready and worker.overdue > time.monotonic()):
                    continue
                kind, case = worker.case
                problem, status = worker.end()
                done += 1
                statuses[kind][status] += 1
                if problem is not None:
                    failures.append((kind, case, problem))
                    print(f"{kind}:{case} {problem}", flush=True)
                if done % 100 == 0:
                    print(f"{done:,} of {len(cases):,} cases, {len(failures)} failures", flush=True)
                go_on(number)
        for worker in workers:
            worker.process.join(10)
    finally:
        for worker in workers:
            worker.process.kill()
    return failures, statuses


def save(failures: list[Failure], root: Path, out: Path) -> None:
    for kind, number, problem in failures:
        folder = out / f"{kind}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        if (root / folder.name).is_dir():
            shutil.copytree(root / folder.name, folder, symlinks=True, ignore_dangling_symlinks=True)
        folder.mkdir(parents=True, exist_ok=True)
        again = f"python benchmarks/fuzz.py --only {kind}:{number}"
        (folder / "failure.txt").write_text(f"{problem}\n\nrepeat with: {again}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--count", type=int, help="cases per kind; default: those of the bar")
    parser.add_argument("--only", help="one case: KIND:NUMBER")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that a case may take")
    parser.add_argument("--patience", type=float, default=4.0, help="seconds after which a training is interrupted")
    parser.add_argument("--workers", type=int, default=1, help="cases that run at a time")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where failures are saved")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.only:
        kind, _, number = options.only.partition(":")
        cases = [(kind, int(number))]
    else:
        cases = [
            (kind, options.first + i)
            for kind in options.kinds
            for i in range(COUNTS[kind] - options.first if options.count is None else options.count)
        ]
    import torch

    import linnet.models  # noqa: F401  (imported once, for all children)
    import linnet.train  # noqa: F401

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="linnet-fuzz-") as scratch:
        root = (options.keep or Path(scratch) / "work").resolve()
        if not (root / "fixtures").is_dir():  # in a child: libraries that have started threads do not survive a fork
            maker = multiprocessing.get_context("fork").Process(target=make_fixtures, args=(root / "fixtures",))
            maker.start()
            maker.join()
            if maker.exitcode:
                return 2
        started = time.monotonic()
        failures, statuses = run_all(cases, root, options)
        save(failures, root, options.failures)
    print(f"{len(cases):,} cases of at most {options.limit:g} s in {time.monotonic() - started:,.0f} s")
    if failures:
        print(f"failures, whose files are in {options.failures}:")
    for kind, number, problem in failures:
        print(f"  {problem}")
        print(f"    python benchmarks/fuzz.py --only {kind}:{number} --limit {options.limit:g} --keep FOLDER")
    for kind, ended in statuses.items():
        failed = sum(failure[0] == kind for failure in failures)
        shown = ", ".join(f"{count:,} with {status}" for status, count in ended.most_common())
        print(f"{kind}: {ended.total():,} cases from number {options.first}, {failed} failures; exit statuses: {shown}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
