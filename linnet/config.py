"""The base class of all configurations: strict and frozen, with errors that name the key, the value and the fix.

A configuration class sits next to what it configures and derives from `Config`. Files and dictionaries go through
`parse`, which reports all problems of a configuration at once.
"""

import contextlib
import copy
import difflib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import os
import pickle
import re
import reprlib
import stat
import tempfile
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.fields import FieldInfo

from linnet.install import install_command

if typing.TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Explained(ModelMetaclass):
    def __call__(cls, *args: typing.Any, **values: typing.Any) -> typing.Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:  # pydantic's own text names neither the nearest key nor the fix
            raise ConfigError(_problems(cls, values, error), cls.__name__) from None


_ENDS: dict[str, tuple[float, float]] = {"int": (-(10**30), 10**30), "float": (-1e30, 1e30)}
LEAST = 1e-30  # of a float above 0

Epsilon = typing.Annotated[float, Field(ge=LEAST, le=1)]  # added to what a norm divides by
Factor = typing.Annotated[float, Field(ge=1e-6, le=1e6)]  # scales a value or an initial weight


def added(default: typing.Any, description: str, **bounds: typing.Any) -> typing.Any:
    """Returns the field of an option that came later: a configuration without it is written as before."""
    return Field(default, exclude_if=lambda value: value == default, description=description, **bounds)


Period = typing.Annotated[float, Field(ge=1, le=1e15)]  # base of the wavelengths of positions
Seconds = typing.Annotated[float, Field(gt=0, le=1e8)]  # a time limit: clocks overflow from 9e9


def _close_ranges(schema: typing.Any, cls: type) -> None:
    """Sets the ends that the numbers in a core schema leave open; other configurations inside have theirs already."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _close_ranges(part, cls)
    elif isinstance(schema, dict) and (schema.get("type") != "model" or schema["cls"] is cls):
        if schema.get("type") in _ENDS and not schema.get("allow_inf_nan"):
            low, high = _ENDS[schema["type"]]
            if schema["type"] == "float" and schema.get("gt") == 0:
                schema["ge"] = LEAST
                del schema["gt"]
            if not schema.keys() & {"ge", "gt"}:
                schema["ge"] = low
            if not schema.keys() & {"le", "lt"}:
                schema["le"] = high
        for key, part in schema.items():
            if key in ("fields", "choices"):  # by name, or in order
                _close_ranges(list(part.values() if isinstance(part, dict) else part), cls)
            elif key == "steps" or key.endswith("schema"):
                _close_ranges(part, cls)


class Config(BaseModel, metaclass=_Explained):
    """A frozen configuration: unknown keys, wrong types, NaN and infinity are errors.

    A key that may be infinite says so with `Field(allow_inf_nan=True)` and a bound, which excludes NaN. Every other
    number has a finite range: that of its `Field`, and where this leaves an end open, +-1e30, and 1e-30 of floats
    above 0. So no value overflows, or rounds to 0, in the arithmetic that reads it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    ELSEWHERE: typing.ClassVar[dict[str, str]] = {}  # keys that people try -> where to write it instead
    # Keys that hold mappings -> which entries of the mapping have a setting of a name.
    ENTRIES: typing.ClassVar[dict[str, typing.Callable[[str], list[str]]]] = {}

    @classmethod
    def extra_problems(cls, values: typing.Any) -> list[str]:
        """Returns problems of values that do not validate, found by checks that run after validation."""
        return []

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Returns what each key means: its `Field(description=...)`, or else its entry under `Attributes:`."""
        attributes: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            attributes |= _attributes(base.__dict__.get("__doc__") or "")
        descriptions = {name: field.description for name, field in cls.model_fields.items() if field.description}
        return {name: descriptions.get(name, attributes.get(name, "")) for name in cls.model_fields}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: typing.Any, handler: GetCoreSchemaHandler) -> typing.Any:
        schema = handler(source)
        _close_ranges(handler.resolve_ref_schema(schema), cls)
        return schema

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: typing.Any, handler: GetJsonSchemaHandler) -> dict:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in cls.descriptions().items():
            if text and name in properties:
                properties[name].setdefault("description", text)
        return schema


_NAMES = re.compile(r"(\w+(?:, \w+)*): (.*)")


def entries(docstring: str, section: str) -> list[str]:
    """Returns the entries of a section of a Google-style docstring, such as "Args", each on one line."""
    _, _, text = inspect.cleandoc(docstring).partition(f"\n{section}:\n")
    lines: list[str] = []
    for line in text.splitlines():
        if line and not line.startswith(" "):  # the next section
            break
        if line.startswith(" " * 8) and lines:
            lines[-1] += f" {line.strip()}"
        elif line.strip():
            lines.append(line.strip())
    return lines


def _attributes(docstring: str) -> dict[str, str]:
    attributes = {}
    for entry in entries(docstring, "Attributes"):
        if match := _NAMES.match(entry):
            attributes |= dict.fromkeys(match[1].split(", "), match[2])
    return attributes


class Problem(str):
    """A line of an error, `path: what; fix`, with its parts. Only this class takes a line apart.

    Attributes:
        path: the key, option or file; "" if there is none.
        key: the first name of `path`: `data` of `data.source`.
        text: the line without its path.
        what, fix: the parts of `text`; the fix may be "".
    """

    path = property(lambda self: self.partition(":")[0] if ":" in self else "")
    key = property(lambda self: self.path.partition(".")[0])
    text = property(lambda self: self[len(self.path) :].removeprefix(": "))
    what = property(lambda self: self.text.partition("; ")[0])
    fix = property(lambda self: self.text.partition("; ")[2])

    def at(self, path: str) -> "Problem":
        """Returns the problem of another path."""
        return Problem(path + self[len(self.path) :])

    def under(self, name: str, keys: typing.Container[str] | None = None) -> "Problem":
        """Returns the problem in a part of a configuration, `name.path`: always, or if its key is one of `keys`."""
        return Problem(f"{name}.{self}") if keys is None or self.key in keys else self


Rename = typing.Callable[[Problem], str]  # to how a surface writes it: an option for a key, say


class ConfigError(ValueError):
    """All problems of a configuration or of what it names, one per line.

    Attributes:
        problems: each names the key, the value and the fix.
    """

    def __init__(self, problems: typing.Iterable[str], where: str = "configuration"):
        self.problems, self.where = [Problem(line) for line in problems], where
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{where}: {count}\n" + "\n".join(f"  - {line}" for line in self.problems))

    def __reduce__(self):  # workers pickle errors; by default, the message would become `problems`
        return _again, (type(self), self.problems, self.where), self.__dict__


class SeveralKeys(ConfigError):
    """Problems of keys that are valid one by one, raised by a validator of their configuration.

    Each begins with its key; a message shows each on a line of its own, with the place of the configuration before it.
    """


def _again(kind: type, problems: list[str], where: str) -> ConfigError:
    error = ConfigError.__new__(kind)
    ConfigError.__init__(error, problems, where)
    return error


@contextlib.contextmanager
def gather(problems: list[str], rename: Rename = Problem) -> typing.Iterator[None]:
    """Adds the problems of a `ConfigError` inside to `problems`, so that one error reports all of them.

    If the error is about a file, each line names it. (A heading without a suffix, such as "data", is not a file, even
    if the working folder has one of that name.)
    """
    try:
        yield
    except ConfigError as error:
        file = f"{error.where}: " if Path(error.where).suffix and os.path.isfile(error.where) else ""
        problems += [line if error.where in line else Problem(file + line) for line in map(rename, error.problems)]


@contextlib.contextmanager
def checking(where: str = "configuration", rename: Rename = Problem) -> typing.Iterator[list[str]]:
    """Yields a list for problems, and raises `ConfigError` at the end if it has any; one inside ends the list."""
    problems: list[str] = []
    raised: list[str] = []
    with gather(raised, rename):
        yield problems
    refuse([*map(rename, map(Problem, problems)), *raised], where)


def refuse(problems: typing.Iterable[str], where: str = "configuration", most: int | None = None) -> None:
    """Raises ConfigError if there are problems; a problem that comes twice is reported once.

    Args:
        most: of more problems, the first are listed and the others counted.
    """
    if lines := list(dict.fromkeys(problems)):
        raise ConfigError(lines if most is None else first_of(lines, most), where)


def first_of(problems: list[str], most: int) -> list[str]:
    """Returns the first problems, with a count of the others."""
    rest = len(problems) - most
    return [*problems[:most], f"and {rest:,} more problems"] if rest > 0 else problems


K = typing.TypeVar("K")
V = typing.TypeVar("V")


def grouped(pairs: typing.Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Returns the values of each key; keys are in the order in which they first occur."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def count_of(number: int, noun: str) -> str:
    """Returns a number and its noun: `1 budget`, `2 budgets`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def first_names(names: typing.Sequence[str], most: int) -> str:
    """Returns the first names, for a message, with a count of the others."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def printable(text: str, lines: bool = True) -> str:
    """Returns text with control characters, and those that turn the direction of a line, as escapes.

    In names of received files they move the cursor of a terminal, and end a process that draws them.

    Args:
        lines: keep tabs and line breaks.
    """
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda sign: ascii(sign[0])[1:-1], text)
    return text if lines else text.replace("\t", "\\t").replace("\n", "\\n")


FIGURES = ("altair", "vl_convert")  # modules of the extra `study` that draw figures
FITS = ("pandas", "scipy")  # the others, for tables and fits


def not_installed(modules: typing.Iterable[str]) -> list[str]:
    """Returns those that are not installed, without importing any."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def check_study(modules: typing.Iterable[str], where: str, otherwise: str = "") -> None:
    """Raises ConfigError if modules of the extra `study` are missing; `otherwise` says how to do without them."""
    fix = f"install the extra `study`: {install_command('study')}{otherwise}"
    refuse([f"{name}: not installed; {fix}" for name in not_installed(modules)], where)


def unwritable(folder: str | Path) -> str | None:
    """Returns why a folder cannot be written to, None if it can be, or can be created. Leaves nothing behind."""
    folder = Path(folder).absolute()
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"cannot be made, {str(there)!r} is {'a file' if there.exists() else 'a broken link'}"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written to, you may not write in {str(there)!r}"
    try:  # access rights allow root everything, which /proc refuses
        tempfile.TemporaryDirectory(prefix=".linnet-", dir=there).cleanup()
    except OSError as error:
        return f"cannot be written to, {str(there)!r} takes nothing ({error.strerror})"
    return None


C = typing.TypeVar("C", bound=Config)
MOST = 50  # upper bound of known names in a message
MOST_PATHS = 3  # of a key that is known in several places
MOST_SHOWN = 400  # characters of a value in a message
MOST_PROBLEMS = 100  # of one configuration in a message
MOST_BYTES = 1 << 20  # of a YAML file; its parser reads about 100 KB per second
MOST_TEXT = 1 << 28  # of JSON and other text that is read at once; the largest tokenizers have 40 MB
MOST_DEPTH = 50  # of YAML's nested lists and mappings
MOST_VALUES = 100_000  # in YAML whose aliases (`*name`) are written out


def parse(cls: type[C], values: Mapping, where: str = "configuration", large_integers: bool = False) -> C:
    """Builds `cls` from plain values. Raises `ConfigError` that lists all problems, with the nearest right key.

    Args:
        large_integers: accepts integers that 64 bits do not hold, for a caller with limits and messages of its own.
    """
    try:
        made, problems = cls.model_validate(values), []
    except ValidationError as error:
        made, problems = None, _problems(cls, values, error)
    known = {Problem(problem).path for problem in problems}
    if not large_integers:
        problems += [problem for key, problem in _too_large(values) if key not in known]
    if problems or made is None:
        raise ConfigError(problems, where)
    return made


def _too_large(values: typing.Any, key: str = "", seen: set[int] | None = None) -> typing.Iterator[tuple[str, str]]:
    """Yields the key and the problem of every integer that 64 bits do not hold, on which arithmetic would fail.

    A list or mapping that is there several times is read once.
    """
    seen = set() if seen is None else seen
    if isinstance(values, int):
        if not -(1 << 63) <= values < 1 << 63:
            yield key, f"{key}: {shown(values)} is too large; give an integer of at most 64 bits"
    elif isinstance(values, Mapping | list | tuple) and id(values) not in seen:
        seen.add(id(values))
        for name, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            yield from _too_large(value, f"{key}.{name}" if key else str(name), seen)


def _problems(cls: type[Config], values: typing.Any, error: ValidationError) -> list[str]:
    problems = first_of([line for problem in error.errors() for line in _explain(cls, problem)], MOST_PROBLEMS)
    return problems + [line for line in cls.extra_problems(values) if line not in problems]


class _Shown(reprlib.Repr):
    """`repr` whose length and time are bounded, for values in messages."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, 200, 200, 80
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 8

    def repr_dict(self, x: dict, level: int) -> str:  # in the order given; reprlib sorts all keys first
        if not x or level <= 0:
            return "{...}" if x else "{}"
        pairs = itertools.islice(x.items(), self.maxdict)
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in pairs]
        return "{" + ", ".join([*parts, "..."] if len(x) > self.maxdict else parts) + "}"

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 1 << 256 else f"an integer of {x.bit_length():,} bits"  # Python writes no long ones


def shown(value: typing.Any) -> str:
    """Returns `repr(value)` for a message; of a long or deeply nested value the beginning, with `...`."""
    text = _Shown().repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def natural(name: str) -> list[int | str]:
    """Returns a key that sorts names as people do: table2 before table10."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", name))]


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the nearest known one, or all if they are few."""
    known = sorted(known, key=natural)
    if not known:
        return "none is known"
    name = name[:MOST_SHOWN]  # the comparison takes time with the square of the length
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close and len(name) > 3:  # also a part of a long name, or its beginning
        starts = {other[: len(name) + 1]: other for other in reversed(known)}
        close = [other for other in known if name in other]
        close += [starts[start] for start in difflib.get_close_matches(name, starts, n=1, cutoff=0.75)]
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known)}" if len(known) <= MOST else f"none of the {len(known):,} known names is similar"


def unknown(key: str, names: typing.Iterable[str], known: typing.Collection[str]) -> list[str]:
    """Returns a problem for each name of a key that is not a known one."""
    return [f"{key} {name!r} is unknown; {nearest(name, known)}" for name in names if name not in known]


def read_yaml(path: str | Path) -> dict:
    """Reads a YAML mapping as `parse_yaml` does. Raises `ConfigError` naming file and line."""
    path = Path(path)
    try:
        if problem := _not_yaml(path):
            raise ConfigError([f"{path}: {problem}"])
        with path.open(encoding="utf-8") as file:
            try:
                values = pickle.loads(_pickled(file.read()))
            except yaml.YAMLError:
                file.seek(0)
                values = parse_yaml(file)  # raises it again, with the file's name
    except (FileNotFoundError, NotADirectoryError):
        here = "" if path.is_absolute() else f" (relative ones start in {Path.cwd()})"
        beside = {file.parent.name: file for file in path.parent.glob("*/study.yaml")}
        beside |= {file.stem: file for file in path.parent.glob("*.yaml") if file.exists()}
        near = difflib.get_close_matches(path.stem, beside, n=1, cutoff=0.6)
        fix = f"did you mean {str(beside[near[0]])!r}?" if near else f"give its path{here}"
        what = f"a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "no such file"
        raise ConfigError([f"{path}: {what}; {fix}"]) from None
    except DuplicateKeys as error:
        raise ConfigError(error.problems, str(path)) from None
    except ConfigError:
        raise
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([" ".join(str(error).split())], str(path)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # ValueError: a path with NUL
        raise ConfigError([f"{str(path)!r}: cannot be read ({reason}); give a YAML file"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"must be a mapping of keys to values, not {type(values).__name__}"], str(path))
    return values


def load_text(path: str | Path, most: int = MOST_TEXT, errors: str = "strict") -> str:
    """Returns the text of a file in UTF-8 that a folder from somebody else may hold.

    Raises:
        OSError: the file cannot be read, or is missing.
        ValueError: it is not UTF-8, has more than `most` bytes, or is a pipe, socket or device, which is not opened,
            since reading it may never end.
    """
    path = Path(path)
    state = path.stat()
    if _endless(state):
        raise ValueError("it is a pipe, socket or device")
    if state.st_size > most:
        raise ValueError(f"its {state.st_size:,} bytes are more than {most:,}")
    return path.read_text(encoding="utf-8", errors=errors)


def load_json(path: str | Path) -> typing.Any:
    """Returns the content of a JSON file. Raises as `load_text`, and ValueError for what is not JSON or too nested."""
    try:
        return json.loads(load_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _endless(state: os.stat_result) -> bool:
    return not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode))


class DuplicateKeys(yaml.YAMLError):
    """Keys that a mapping has more than once.

    Attributes:
        problems: each names the key with its lines and values.
    """

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("; ".join(problems))


def parse_yaml(text: str | typing.TextIO) -> typing.Any:
    """Parses YAML. `3e-4` is a float and `1e9` an integer, which float keys take too.

    Raises:
        yaml.YAMLError: not YAML, nested too deeply, or too large once its aliases are written out; from a file, the
            message names it. DuplicateKeys: all keys that come twice.
    """
    loader = _Loader(text)
    try:
        values = loader.get_single_data()
        if problems := loader.duplicates():
            raise DuplicateKeys(problems)
    except UnicodeError:
        raise
    except ValueError as error:  # a date that does not exist, or a number with thousands of digits
        raise yaml.YAMLError(f"a value cannot be read ({error})") from None
    finally:
        loader.dispose()
    return values


@functools.lru_cache(maxsize=4096)
def _pickled(text: str) -> bytes:
    """What `parse_yaml` makes of a text, to be copied: a study reads the files of its runs again and again."""
    return pickle.dumps(parse_yaml(text))


def _not_yaml(path: Path) -> str | None:
    """Returns why a path is not a file of YAML, without opening what could block or never end; None if it may be."""
    state = path.stat()
    if stat.S_ISDIR(state.st_mode):
        inside = (file for name in ("study.yaml", "config.yaml", "*.yaml") for file in sorted(path.glob(name)))
        return f"a folder; give a YAML file{f', such as {file}' if (file := next(inside, None)) else ''}"
    if _endless(state):
        return "a pipe, socket or device; give a YAML file"
    if state.st_size > MOST_BYTES:
        return f"{state.st_size:,} bytes, but a configuration has at most {MOST_BYTES:,}; give a YAML file"
    return None


SHORT_FORMS = {"model": "recipe", "data": "source", "augment": "kind"}
"""Sections that a file may write as one word: the key that it stands for."""


def in_full(section: str, value: typing.Any) -> typing.Any:
    """Returns a section that is one word as a mapping, and others as they are."""
    return {SHORT_FORMS[section]: value} if section in SHORT_FORMS and isinstance(value, str) else value


def override(values: dict, assignments: list[str]) -> dict:
    """Applies `a.b=value` assignments (values in YAML; `a.0.b` in a list) to a nested dictionary; returns a new one."""
    result, problems = copy.deepcopy(values), []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            problems.append(f"--set {shown(assignment)}: write key=value, for example --set steps=100")
            continue
        if key.count(".") >= MOST_DEPTH:
            problems.append(f"--set {shown(assignment)}: the key has more than {MOST_DEPTH} levels; write fewer")
            continue
        section, *inner = key.split(".")
        if inner and section in result:
            result[section] = in_full(section, result[section])
        try:
            result = _assigned(result, key.split("."), parse_yaml(text))
        except DuplicateKeys as error:
            problems += [f"--set {shown(assignment)}: {line}" for line in error.problems]
        except yaml.YAMLError as error:
            problems.append(f"--set {shown(assignment)}: the value is not YAML ({' '.join(str(error).split())})")
        except (IndexError, TypeError) as error:
            problems.append(f"--set {shown(assignment)}: {error}")
    refuse(problems, "command line")
    return result


def _assigned(node: typing.Any, key: list[str], value: typing.Any, path: str = "") -> typing.Any:
    """Returns `node` with a value at a key. Raises IndexError or TypeError where it has no place for the key."""
    if not key:
        return value
    part, *rest = key
    inner = f"{path}.{part}" if path else part
    if isinstance(node, list):
        if not (part.isascii() and part.isdecimal()) or int(part) >= len(node):
            fix = f"give 0 to {len(node) - 1}" if node else f"give all of it: --set {path}=[...]"
            raise IndexError(f"{path} is a list of {len(node)} items, which has no {part!r}; {fix}")
        place = int(part)
        return [*node[:place], _assigned(node[place], rest, value, inner), *node[place + 1 :]]
    if node is not None and not isinstance(node, dict):
        raise TypeError(f"{path} is {shown(node)}, which has no key {part!r}; give all of it: --set {path}={{...}}")
    return {**(node or {}), part: _assigned((node or {}).get(part), rest, value, inner)}


def digest(values: typing.Any) -> str:
    """Returns a name for a resolved configuration: 12 hexadecimal digits of the SHA-256 of its canonical JSON."""
    if isinstance(values, BaseModel):
        values = values.model_dump(mode="json")
    try:
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    except TypeError:  # numbers beside text as keys, as in `batch_tokens`: numbers become text, which can be sorted
        canonical = json.dumps(json.loads(json.dumps(values)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `3e-4` and `1e9` as strings and lets the last of equal keys win; this loader does neither."""

    def __init__(self, stream: typing.Any):
        super().__init__(stream)
        self._twice: list[tuple[yaml.ScalarNode, yaml.Node, yaml.ScalarNode, yaml.Node]] = []
        self._depth = 0
        self._open: set[str] = set()  # anchors of the nodes that are being composed
        self._sizes: dict[int, tuple[yaml.Node, int]] = {}  # by id: number of values, aliases written out

    def compose_node(self, parent: yaml.Node | None, index: typing.Any) -> yaml.Node | None:
        event = self.peek_event()
        anchor = event.anchor
        if isinstance(event, yaml.AliasEvent) and anchor in self._open:
            raise self._refused(event, f"alias {anchor!r} contains itself; write the values instead")
        if self._depth == MOST_DEPTH:
            raise self._refused(event, f"nested more than {MOST_DEPTH} levels deep; write fewer levels")
        self._depth += 1
        if anchor is not None:
            self._open.add(anchor)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._open.discard(anchor)
        if node is not None and id(node) not in self._sizes:
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
            size = 1 + sum(self._sizes[id(part)][1] for part in inner)
            if size > MOST_VALUES:
                message = f"{size:,} values, aliases written out, are more than {MOST_VALUES:,}; write fewer"
                raise self._refused(event, message)
            self._sizes[id(node)] = (node, size)
        return node

    def _refused(self, event: yaml.Event, message: str) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, message, event.start_mark)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known: dict[tuple[str, str], tuple[yaml.ScalarNode, yaml.Node]] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                first = known.setdefault((key.tag, key.value), (key, value))
                if first[0] is not key:
                    self._twice.append((*first, key, value))
        return node

    def duplicates(self) -> list[str]:
        """A problem per key that comes again in its mapping."""
        problems = []
        for first, before, again, value in self._twice:
            places = [
                f"in line {key.start_mark.line + 1} ({shown(self.construct_object(node, deep=True))})"
                for key, node in ((first, before), (again, value))
            ]
            problems.append(f"{again.value}: given {' and '.join(places)}; keep one")
        return problems


_WHOLE = re.compile(r"^[-+]?\d[\d_]*[eE]\+?\d+$", re.ASCII)  # without a dot, which floats of Python have


def _number(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    value = loader.construct_yaml_float(node)
    return int(value) if _WHOLE.match(node.value) and abs(value) < 2**53 else value


_Loader.add_constructor("tag:yaml.org,2002:float", _number)

_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$", re.ASCII),
    list("-+0123456789"),
)


# What pydantic inserts into the path of a key of several types: the type that did not fit.
_KIND = re.compile(r"(constrained-)?(int|float|str|bool)|(list|dict|tuple)\[.*")


def _explain(cls: type[BaseModel], problem: dict) -> list[str]:
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, SeveralKeys):
        key = ".".join(str(part) for part in problem["loc"] if not _KIND.fullmatch(str(part)))
        lines = [f"{key}.{line}" if key else line for line in cause.problems]
    else:
        lines = [_explained(cls, problem)]
    return [text if len(text) <= 10 * MOST_SHOWN else f"{text[: 10 * MOST_SHOWN - 3]}..." for text in lines]


def _explained(cls: type[BaseModel], problem: dict) -> str:
    text = shown(problem["input"])
    *parents, last = problem["loc"] or ("",)
    key = ".".join(str(part) for part in problem["loc"] if not _KIND.fullmatch(str(part)))
    at = f"{key}: " if key else ""  # a problem of the whole has no key
    if problem["type"] == "extra_forbidden":
        classes = _models_at(cls, parents)
        places = [getattr(c, "ELSEWHERE", {}) for c in classes]
        fix = next((hints[last] for hints in places if last in hints), None)
        paths = [] if fix else sorted(dict.fromkeys(_paths(cls, str(last))), key=lambda path: path.count("."))
        here = [str(part) for part in parents]
        near = [path for path in paths if _is_near(path.split(".")[:-1], here)][:MOST_PATHS]
        if near:
            top = " at the top level" if "." not in near[0] else ""
            fix = f"did you mean {' or '.join(map(repr, near))}{top if len(near) == 1 else ''}?"
        if fix is None:
            fix = nearest(str(last), {name for c in classes for name in c.model_fields})
            if beside := " and ".join(map(repr, paths[:MOST_PATHS])):  # may be of something else: a window of losses
                are = "are keys of other sections" if len(paths) > 1 else "is a key of another section"
                fix = f"{beside} {are}; {fix}"
        return f"{key}: unknown key (value {text}); {fix}"
    if problem["type"] == "missing":
        return f"{key}: required, but not given"
    if problem["type"] == "union_tag_not_found":
        tag = problem["ctx"]["discriminator"].strip("'")
        return f"{key}.{tag}: required, but not given (given {text})"
    if problem["type"] == "union_tag_invalid":
        about = problem["ctx"]
        tag = about["discriminator"].strip("'")
        return f"{key}.{tag}: {shown(about['tag'])} is not one of {about['expected_tags']}"
    if problem["type"] in ("model_attributes_type", "model_type"):
        return f"{at}must be a mapping of keys to values (given {text})"
    cause = problem.get("ctx", {}).get("error")
    message = problem["msg"].removeprefix("Value error, ")
    for bound in problem.get("ctx", {}).values():
        if isinstance(bound, int | float) and not 1e-4 <= abs(bound) < 1e10 and bound != 0:
            message = re.sub(r"-?[\d.]+$", f"{bound:g}", message)  # pydantic writes out all zeros of 1e-30
    if isinstance(cause, ConfigError):  # from a part that is parsed by itself
        message = "; ".join(cause.problems)
    return at + message + ("" if problem["type"] == "value_error" else f" (given {text})")


def _is_near(section: list[str], here: list[str]) -> bool:
    """Returns whether a section is above or below another one, and not beside it."""
    shorter = min(len(section), len(here))
    return section[:shorter] == here[:shorter]


def _models_at(cls: type[BaseModel], path: typing.Iterable) -> set[type[BaseModel]]:
    classes = {cls}
    for part in path:
        fields = [c.model_fields[part] for c in classes if part in c.model_fields]
        if fields:
            classes = set().union(*(_models_in(field.annotation) for field in fields))
        else:  # the kind of one of several configurations, or a place in a list
            classes = {c for c in classes if any(_names(field, part) for field in c.model_fields.values())} or classes
    return classes


def _paths(cls: type[BaseModel], name: str, above: tuple[str, ...] = ()) -> list[str]:
    """Returns where a configuration has a key of this name, as paths with dots, outside of lists and most mappings."""
    paths = [".".join((*above, name))] if name in cls.model_fields else []
    for key, having in getattr(cls, "ENTRIES", {}).items():
        paths += [".".join((*above, key, entry, name)) for entry in having(name)]
    for key, field in cls.model_fields.items():
        parts = [field.annotation, *_alternatives(field.annotation)]
        for part in parts:
            if isinstance(part, type) and not isinstance(part, types.GenericAlias) and issubclass(part, BaseModel):
                paths += _paths(part, name, (*above, key)) if len(above) < 3 else []
    return paths


def _alternatives(annotation: typing.Any) -> typing.Iterable:
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType, typing.Annotated):
        return
    for part in typing.get_args(annotation):
        yield part
        yield from _alternatives(part)


def _names(field: FieldInfo, tag: object) -> bool:
    return typing.get_origin(field.annotation) is typing.Literal and tag in typing.get_args(field.annotation)


def _models_in(annotation: typing.Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return {annotation} if issubclass(annotation, BaseModel) else set()
    return set().union(*(_models_in(part) for part in typing.get_args(annotation)), set())
