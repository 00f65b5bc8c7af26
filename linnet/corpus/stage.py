"""A stage: reads documents part by part and writes a folder whose bytes depend only on its inputs and its settings.

    OUT/shard-00000.jsonl.zst   the documents of part 0, one JSON object per line, written whole by rename
    OUT/stage.json              settings, digests of the inputs, shards, counts and samples; written last
    OUT/provenance.json         time, machine, versions, paths: all that may differ between two runs
    OUT/parts/                  while the stage runs: its plan, and the counts of each shard that is done

A kill costs at most the shards that were being written. The same command resumes; workers, kills and paths change no
byte of the shards and of `stage.json`.
"""

import contextlib
import hashlib
import itertools
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from linnet.config import Config, ConfigError, digest, load_json, refuse, shown, unwritable
from linnet.corpus.documents import BLOCK, Document, Inputs, Samples, around, encode, find_inputs
from linnet.data.parts import Part, clear_stage, locked, remove_halves, run_parts, whole_file, write_json
from linnet.data.sources import (
    PLAN,
    STAGE,
    changed_settings,
    fingerprint,
    may_be_left,
    of_version,
    other_version,
    read_plan,
    read_stage,
)
from linnet.install import install_command

FORMAT = 1  # increase it when the same inputs give other bytes
PROVENANCE = "provenance.json"
LEVEL = 3  # of Zstandard
LISTED = 100  # most skipped files that stage.json names

Progress = Callable[[str, int, int], None]


class Work(Protocol):
    """What a stage does with a part: a picklable object, such as a frozen dataclass."""

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]: ...


def run_stage(
    name: str,
    sources: list[str],
    out: Path,
    settings: Config,
    work: Work,
    *,
    workers: int = 1,
    engine: str = "local",
    inputs: Sequence[Path] = (),
    text_key: str = "text",
    anew: bool = False,
    progress: Progress | None = None,
) -> dict:
    """Runs a stage of one pass. Returns the content of its `stage.json`.

    Args and Raises: see `open_stage` and `Stage.write`.
    """
    with open_stage(name, sources, out, settings, inputs=inputs, text_key=text_key, anew=anew) as stage:
        if not stage.done:
            stage.write(work, workers=workers, engine=engine, progress=progress)
        return stage.finish()


@contextlib.contextmanager
def open_stage(
    name: str,
    sources: list[str],
    out: Path,
    settings: Config,
    *,
    inputs: Sequence[Path] = (),
    text_key: str = "text",
    anew: bool = False,
) -> Iterator["Stage"]:
    """Checks sources and folder of a stage before it writes anything, and locks the folder.

    Args:
        name: the verb of `linnet corpus`.
        sources: as in `documents.find_inputs`.
        out: the folder of the stage.
        settings: all that its result depends on, besides the inputs; without paths of this machine.
        inputs: other files and folders that it reads, such as a model: they enter by their content.
        anew: replace a finished or another stage in `out`; the same one, if it was killed, resumes.

    Raises:
        ConfigError: all problems of sources and folder; or the folder holds another stage, or one that another process
            is writing.
    """
    out, problems = Path(out), list[str]()
    source_inputs = find_inputs(sources, "SOURCE", problems, text_key)
    described = [*source_inputs.described, *(_other_input(path, problems) for path in inputs)]
    problems += _problems_of_out(out, sources)
    refuse(problems, name)
    values = settings.model_dump(mode="json")
    plan = {"format": FORMAT, "stage": name, "settings": values, "settings_digest": digest(values)}
    plan["inputs"] = described
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        remove_halves(out)
        if anew and ((out / STAGE).exists() or read_plan(out) != of_version(plan)):
            clear_stage(out, [*out.glob("shard-*.jsonl.zst"), out / PROVENANCE], out / STAGE)
        done = _compare(out, plan)
        if not done and read_plan(out) is None:  # a kill may have left some files of a plan that was being removed
            shutil.rmtree(out / "parts", ignore_errors=True)
            (out / PLAN).parent.mkdir()
            write_json(out / PLAN, of_version(plan))
        yield Stage(out, source_inputs, plan, sources, done)


class Stage:
    """A stage that is open.

    Attributes:
        out: its folder.
        parts: its units of work.
        done: whether it was finished before; then only `finish` may be called.
    """

    def __init__(self, out: Path, found: Inputs, plan: dict, sources: list[str], done: bool):
        self.out, self.parts, self.done = out, found.parts, done
        self._found, self._plan, self._sources, self._began = found, plan, sources, time.time()

    def map(
        self,
        name: str,
        function: Callable[[Part], bytes],
        *,
        parts: Sequence[Part] | None = None,
        workers: int = 1,
        engine: str = "local",
        progress: Progress | None = None,
    ) -> list[Path]:
        """Returns one file per part with the bytes that `function` returns; files of an earlier command are kept.

        Args:
            name: of this pass; it is the start of the names of the files, which `finish` removes.
            parts: other units of work than the stage's own, numbered from 0.
        """
        parts = self.parts if parts is None else parts
        paths = [self.out / "parts" / f"{name}-{part.number:05d}" for part in parts]
        rest = [part for part in parts if not paths[part.number].exists()]
        self._run(name, _Saved(function, self.out / "parts", name), parts, rest, workers, engine, progress)
        return paths

    def write(self, work: Work, *, workers: int = 1, engine: str = "local", progress: Progress | None = None) -> None:
        """Writes the shards that do not exist yet.

        Raises:
            ConfigError: a worker died. What `work` raises is raised here.
        """
        rest = [part for part in self.parts if not self._written(part)]
        self._run(self._plan["stage"], _Shards(work, self.out), self.parts, rest, workers, engine, progress)

    def finish(self, results: Mapping[str, Any] | None = None) -> dict:
        """Writes `stage.json`, removes intermediate files, and returns the content of `stage.json`.

        Args:
            results: what the stage found, beyond counts and samples; JSON values.

        Raises:
            ConfigError: a source changed while it was read, or no document of it can be read.
        """
        if self.done:
            shutil.rmtree(self.out / "parts", ignore_errors=True)
            values = read_stage(self.out)
            assert values is not None
            return values
        if changed := self._found.changed():
            message = "changed while it was read; run again with --anew when nothing writes to it"
            raise ConfigError([f"{path}: {message}" for path in changed[:LISTED]], self._plan["stage"])
        shards, samples = [], Samples()
        counts: Counter[str] = Counter()
        for part in self.parts:
            record = load_json(_counts_path(self.out, part))
            shards.append(record["shard"])
            counts.update(record["counts"])
            samples.merge(record["samples"])
        unreadable = {name: examples for name, examples in samples.values().items() if name.startswith("unreadable.")}
        unread = list(itertools.chain.from_iterable(unreadable.values()))
        if unread and not any(name.startswith("documents read/") for name in counts):
            first = f"{unread[0]['file']}:{unread[0]['row']} {unread[0]['reason']}"
            fix = "give the key or column of the text with --text-key, or other sources"
            raise ConfigError([f"SOURCE: has no document that can be read: {first}; {fix}"], self._plan["stage"])
        values = {
            **self._plan,
            "labels": sorted(self._found.labels),
            "shards": shards,
            "documents": sum(shard["documents"] for shard in shards),
            "text_bytes": sum(shard["text_bytes"] for shard in shards),
            "counts": {name: counts[name] for name in sorted(counts)},
            "samples": samples.values(),
            "results": dict(results or {}),
            "skipped": len(self._found.skipped),
            "skipped_files": self._found.skipped[:LISTED],
            "history": self._found.history,
        }
        write_json(self.out / PROVENANCE, _provenance(self._sources, self._began))
        write_json(self.out / STAGE, values)
        shutil.rmtree(self.out / "parts")
        return values

    def _written(self, part: Part) -> bool:
        with contextlib.suppress(OSError, ValueError):
            record = load_json(_counts_path(self.out, part))
            return (self.out / record["shard"]["name"]).stat().st_size == record["shard"]["bytes"]
        return False

    def _run(
        self,
        what: str,
        function: Callable[[Part], Any],
        parts: Sequence[Part],
        rest: list[Part],
        workers: int,
        engine: str,
        progress: Progress | None,
    ) -> None:
        total = sum(part.size or 1 for part in parts)
        done = total - sum(part.size or 1 for part in rest)
        if progress:
            progress(what, done, total)
        try:
            for part, _ in run_parts(function, rest, workers=workers, engine=engine):
                done += part.size or 1
                if progress:
                    progress(what, done, total)
        except BaseException:
            remove_halves(self.out)  # of workers, which are killed
            raise


@dataclass(frozen=True)
class _Shards:
    """Writes the shard of a part, then its counts, which say that the shard is whole."""

    work: Work
    out: Path

    def __call__(self, part: Part) -> None:
        import zstandard

        counts: Counter[str] = Counter()
        samples, name = Samples(), f"shard-{part.number:05d}.jsonl.zst"
        documents = text_bytes = 0
        with whole_file(self.out / name) as file:
            hashed: Any = _Hashed(file)
            compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
            with compressor.stream_writer(hashed, closefd=False) as compressed:
                held = bytearray()
                for document in self.work(part, counts, samples):
                    size = len(document.text.encode())
                    documents, text_bytes = documents + 1, text_bytes + size
                    counts[f"documents written/{document.source}"] += 1
                    counts[f"bytes written/{document.source}"] += size
                    held += encode(document)
                    if len(held) >= BLOCK:
                        compressed.write(held)
                        held = bytearray()
                compressed.write(held)
        shard = {"name": name, "documents": documents, "bytes": hashed.size, "text_bytes": text_bytes}
        shard["sha256"] = hashed.sha256.hexdigest()
        write_json(_counts_path(self.out, part), {"shard": shard, "counts": counts, "samples": samples.dump()})


@dataclass(frozen=True)
class _Saved:
    function: Callable[[Part], bytes]
    folder: Path
    name: str

    def __call__(self, part: Part) -> None:
        data = self.function(part)
        with whole_file(self.folder / f"{self.name}-{part.number:05d}") as file:
            file.write(data)


class _Hashed:
    def __init__(self, file: BinaryIO):
        self._file, self.sha256, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self._file.write(data)


def _counts_path(out: Path, part: Part) -> Path:
    return out / "parts" / f"counts-{part.number:05d}.json"


def _other_input(path: Path, problems: list[str]) -> dict:
    """Describes a file or folder by its name and content. A stage is described by its `stage.json`, which has both."""
    path = Path(path)
    description = {"label": path.name, "kind": "input"}
    if not path.exists():
        problems.append(f"{path}: does not exist; check the path")
        return description
    if path.is_dir() and read_stage(path) is None:
        files = sorted(file for file in path.rglob("*") if file.is_file())
        content = digest([[file.relative_to(path).as_posix(), fingerprint(file)] for file in files])
    else:
        content = fingerprint(path / STAGE if path.is_dir() else path)
    return description | {"digest": content}


def _problems_of_out(out: Path, sources: list[str]) -> list[str]:
    problems = []
    try:
        import zstandard  # noqa: F401
    except ImportError:
        problems.append(f"stages are written with zstandard; install it: {install_command('data')}")
    if reason := unwritable(out):
        return [*problems, f"--out {out}: {reason}; name another folder"]
    for name in around(out, sources):
        problems.append(f"--out {out}: is in SOURCE {name}, which would then read it; name a folder outside of it")
    ours = read_stage(out) is not None or read_plan(out) is not None
    if not ours and out.is_dir() and (foreign := [path.name for path in out.iterdir() if not may_be_left(path)]):
        problems.append(f"--out {out}: is not empty ({min(foreign)}) and not a stage; name another folder")
    return problems


def _compare(out: Path, plan: dict) -> bool:
    """Returns whether the stage is finished. Raises ConfigError if the folder holds another one."""
    finished = read_stage(out)
    there = read_plan(out) if finished is None else finished
    if there is None:
        return False
    old = {key: there.get(key) for key in plan}
    if old != plan:
        fix = f"name another --out than {out}, or give --anew to replace it"
        raise ConfigError([f"{line}; {fix}" for line in _differences(old, plan)], plan["stage"])
    if finished is None:
        if reason := other_version(there):
            fix = f"finish with that version, name another --out than {out}, or give --anew to begin again"
            raise ConfigError([f"{out}: {reason}; {fix}"], plan["stage"])
        return False
    for shard in finished["shards"]:
        path = out / shard["name"]
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            raise ConfigError([f"{path}: is missing or damaged; give --anew to make it again"], plan["stage"])
    return True


def _differences(old: dict, new: dict) -> list[str]:
    """Returns what differs between two plans, by key."""
    if old["stage"] != new["stage"]:
        return [f"the folder holds the stage {shown(old['stage'])}, not {new['stage']}"]
    if old["format"] != new["format"]:
        return ["the folder was written by another version of Linnet"]
    lines = changed_settings(old["settings"] or {}, new["settings"])
    was, now = ([str(source.get("label")) for source in plan["inputs"]] for plan in (old, new))
    if was != now:
        lines.append(f"SOURCE: was {', '.join(was)}, is now {', '.join(now)}")
    else:
        pairs = zip(old["inputs"], new["inputs"], strict=True)
        lines += [f"SOURCE: the content of {b['label']} has changed" for a, b in pairs if a != b]
    return lines


def _provenance(sources: list[str], began: float) -> dict:
    import platform
    from importlib.metadata import version

    import linnet

    versions = {name: version(name) for name in ("numpy", "zstandard")}
    return {
        "sources": sources,
        "command": sys.argv,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(time.time() - began, 1),
        "machine": platform.machine(),
        "versions": {"linnet": linnet.__version__, "python": platform.python_version(), **versions},
    }
