"""Sources of text: the standard library, files, folders, globs, and data sets of the Hub.

A folder is read recursively: all of its UTF-8 files are read in the order of their paths, except hidden ones; other
files are skipped and listed, and so are folders that Linnet wrote and that hold no text, such as runs. Of a folder that
a stage of `linnet corpus` wrote, only the documents are read. Files that are named directly (by a path or a glob) must
be text: a binary or badly encoded one is an error. `records.py` reads them.
"""

import contextlib
import glob
import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import field_validator

import linnet
from linnet.config import Config, load_json, shown
from linnet.data import hub, wikitext
from linnet.data.parts import write_json
from linnet.data.records import BadFile, SourceFile, fingerprint, kind_of, unreadable

STDLIB = "stdlib"
# Files by which a folder that Linnet wrote, and that holds no text, is known, and what it is.
FOLDERS = {
    ("corpus.json", "train.documents"): "a corpus of tokens that `linnet data text` prepared; name the text itself",
    ("corpus.json", "labels.npy"): "a corpus of images that `linnet data images` prepared; name text instead",
    ("config.yaml", "metrics.jsonl"): "a run of `linnet train`; name the text itself",
    ("config.yaml", "model.safetensors"): "a model of Linnet; name the text itself",
    ("config.json", "model.safetensors"): "a model in the format of Hugging Face; name the text itself",
    ("config.json", "model.safetensors.index.json"): "a model in the format of Hugging Face; name the text itself",
    ("study.yaml", "plan.json"): "a study of `linnet study`; name the text itself",
    ("mad.csv", "plan.json"): "a folder of `linnet mad`; name the text itself",
    ("loop.yaml", "round-1"): "a loop of `linnet corpus`, whose rounds repeat the text; name the folder `kept` of one",
}
# Folders that are not part of the library, and tests, some of which contain invalid source text on purpose.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
FINGERPRINTS = "fingerprints.json"
STAGE = "stage.json"  # what a folder of `linnet corpus` holds; written last
PLAN = "parts/plan.json"  # what it will hold, while it is being written
LARGE = 16 << 20  # bytes from which the fingerprint of a file is stored
_SMALL: dict[str, list] = {}  # device and number of a smaller file -> its size, times and fingerprint
_FOLDERS: dict[str, list] = {}  # path of a folder -> digest of the state of its files, and that of their content
SETTLED = 2.0  # seconds after which another change to a file certainly changes its times
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SYSTEM = ("/proc", "/sys", "/dev")  # folders of devices and of the kernel's tables, which block or never end


def find_files(source: str | list[str], key: str, problems: list[str], skipped: list[str]) -> list[SourceFile]:
    """Lists the files of a source without reading all of their content.

    Args:
        source: "stdlib", or a list of paths of files and folders, globs, names on the Hub, and "stdlib".
        key: the name of the configuration key, for messages.
        problems: problems are appended here, one line each.
        skipped: files in folders that are not text are appended here with the reason.

    Returns:
        Each file once; files of folders and globs in the order of their paths.
    """
    unique: dict[str, SourceFile] = {}
    folders: dict[str, str] = {}
    for name in [source] if isinstance(source, str) else source:
        files, reason = _find(name, skipped)
        if reason:
            problems.append(f"{key}: {name!r} {reason}")
        for file in files:
            unique.setdefault(_real(file.path, folders), file)
    if not unique and not problems:
        problems.append(f"{key}: is an empty list; name at least one file, folder or glob, or {STDLIB!r}")
    return list(unique.values())


def _real(path: Path, folders: dict[str, str]) -> str:
    """Returns a path without links. `folders` keeps those of folders, which are found once for all their files."""
    folder, name = os.path.split(path)
    if os.path.islink(path) or name in ("", ".", ".."):
        return os.path.realpath(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return os.path.join(folders[folder], name)


def fingerprints(files: list[SourceFile], cache: Path | None) -> list[str]:
    """Returns the `fingerprint` of each file. Stores those of large files in the folder `cache`, unless it is None.

    Like git, this treats a file as unchanged if its size and its times of modification and change are the same. The
    fingerprint of a file that changed a moment ago is not stored, because a second change could leave its times equal.
    A process remembers those of small files: the runs of a study ask for them again and again.
    """
    known = _known(cache)
    digests: list[str] = []
    fresh: dict[str, list] = {}
    for file in files:
        state = file.path.stat()
        stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns]
        large = state.st_size >= LARGE
        key = str(file.path.resolve()) if large else f"{state.st_dev} {state.st_ino}"
        remembered = (known if large else _SMALL).get(key)
        if remembered and remembered[:3] == stamp:
            digests.append(remembered[3])
            continue
        digests.append(fingerprint(file.path))
        if time.time() - max(state.st_mtime, state.st_ctime) > SETTLED:
            (fresh if large else _SMALL)[key] = [*stamp, digests[-1]]
    _remember(cache, known, fresh)
    return digests


def remembered(key: str, stamp: str, newest: float, compute: Callable[[], str], cache: Path | None) -> str:
    """Returns `compute()`, or what it returned when it was last called for this key and stamp.

    Args:
        key: the path of a folder. stamp: a digest of the names, sizes and times of its files.
        newest: time of the last change to a file. As for `fingerprints`, the result of a recent change is not stored.
        cache: the folder where results are stored; None stores nothing.
    """
    known = _known(cache)
    for values in (_FOLDERS.get(key, []), known.get(key, [])):
        if values[:1] == [stamp]:
            return values[-1]
    result = compute()
    if time.time() - newest > SETTLED:
        _FOLDERS[key] = [stamp, result]
        _remember(cache, known, {key: [stamp, result]})
    return result


def folder_digest(name: str, root: Path, files: list[Path], cache: Path | None) -> str:
    """Returns a digest of the names and the content of files of a folder; `cache` remembers that of unchanged ones.

    Args:
        name: of the folder in the cache. root: the names of the files start there.
    """
    names = [path.relative_to(root).as_posix() for path in files]

    def compute() -> str:
        lines = (f"{name}\0{fingerprint(path)}\n" for name, path in zip(names, files, strict=True))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    states = [path.stat() for path in files]
    listing = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in zip(names, states, strict=True)]
    stamp = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    newest = max(max(s.st_mtime, s.st_ctime) for s in states)
    return remembered(name, stamp, newest, compute, cache)


def _known(cache: Path | None) -> dict:
    known: dict = {}
    if cache is not None:
        with contextlib.suppress(OSError, ValueError):
            known = load_json(cache / FINGERPRINTS)
    return known


def _remember(cache: Path | None, known: dict, fresh: dict) -> None:
    """Stores fingerprints for the next call, unless the cache cannot be written: it may belong to somebody else."""
    if not fresh or cache is None:
        return
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_json(cache / FINGERPRINTS, {**known, **fresh})


def stdlib_folder() -> Path:
    """Returns the folder of the Python standard library, also from inside a virtual environment."""
    return Path(sysconfig.get_path("stdlib"))


def _find(name: str, skipped: list[str]) -> tuple[list[SourceFile], str | None]:
    if name == STDLIB:
        root = stdlib_folder()
        paths = [path for path in _walk(root, NOT_LIBRARY) if path.suffix == ".py" and os.stat(path).st_size]
        files = [SourceFile(path, "text", named=False) for path in paths]
        return files, None if files else f"found no Python source in {root}; give your own files"
    if (part := wikitext.parse_name(name)) is not None:
        paths, reason = wikitext.find_split(part)
        kinds = {path: "lines" if path.suffix in wikitext.PARQUET else "text" for path in paths}
        return [SourceFile(path, kind, named=True) for path, kind in kinds.items()], reason
    if "\0" not in name and (place := _system(Path(name).expanduser())):
        return [], f"is in {place}, which holds devices and tables of the kernel, not text; name other files"
    try:
        paths = named_paths(name)
    except BadFile as error:
        return [], str(error)
    path = paths[0]
    if path.is_dir():
        if (stage := read_stage(path)) is not None:
            return _of_stage(path, stage)
        _, folders, names = next(os.walk(path), ("", [], []))
        if reason := _without_documents(path, [*folders, *names]):
            return [], reason
        before = len(skipped)
        files = [file for file in (_sniff(path, skipped) for path in _walk(path, skipped=skipped)) if file]
        return files, None if files else _without_text(path, skipped[before:])
    results = [(path, *_named(path)) for path in paths]
    alone = paths == [Path(name).expanduser()]
    reasons = [reason if alone else f"has {path}, which {reason}" for path, _, reason in results if reason]
    return [file for _, files, _ in results for file in files], "; it also ".join(reasons) or None


def named_paths(name: str) -> list[Path]:
    """Returns the folder or file at a path; or the files of a glob, in their order, or of a name on the Hub.

    Raises:
        BadFile: there is none; the reason ends a message that begins with the name.
    """
    if not name or "\0" in name:  # as a path, an empty name would mean the current folder
        raise BadFile(f"{'contains NUL, which no path can' if name else 'is empty'}; name a file, folder or glob")
    if hub.is_name(name):
        try:
            return hub.dataset_files(name)
        except hub.HubError as error:
            raise BadFile(str(error)) from None
    path, here = Path(name).expanduser(), f"(relative ones start in {Path.cwd()})"
    if path.exists():
        return [path]
    if not glob.has_magic(name):
        raise BadFile(f"does not exist; check the path {here}")
    if files := [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(file)]:
        return files
    raise BadFile(f"matches no files; check the pattern {here}")


class _Plan(Config, extra="ignore"):
    format: int
    stage: str
    settings: dict[str, Any]
    inputs: list[dict[str, Any]]


class _Shard(Config, extra="ignore"):
    name: str
    documents: int
    bytes: int
    text_bytes: int
    sha256: str

    @field_validator("name")
    @classmethod
    def _in_its_folder(cls, name: str) -> str:
        if Path(name).name != name:
            raise ValueError("is not the name of a file")
        return name


class _Earlier(_Plan):
    labels: list[str]
    shards: list[_Shard]
    documents: int
    text_bytes: int
    counts: dict[str, int]


class _Stage(_Earlier):
    samples: dict[str, list[dict[str, Any]]]
    history: list[_Earlier]


def read_stage(folder: Path) -> dict | None:
    """Returns the content of `stage.json` of a folder that a stage of `linnet corpus` wrote; None for other folders.

    Other files of this name are of other programs, or of other stages, such as `linnet data lra`, whose shards hold no
    documents.
    """
    return _read_record(folder / STAGE, _Stage)


def read_plan(folder: Path) -> dict | None:
    """Returns the plan of a stage that is not finished; None for other folders."""
    return _read_record(folder / PLAN, _Plan)


def of_version(plan: dict) -> dict:
    """Returns a plan as it is written: with the version of Linnet that began, whose rules may differ from another's."""
    return {**plan, "linnet": linnet.__version__}


def other_version(begun: dict) -> str | None:
    """Returns a problem if another version of Linnet began a stage, given its plan as it was written; else None."""
    version = begun.get("linnet")
    if version == linnet.__version__:
        return None
    by = f"Linnet {version}" if isinstance(version, str) else "Linnet before 0.3.0"
    return f"{by} began it and this is {linnet.__version__}, whose output may differ"


def _read_record(path: Path, form: type[Config]) -> dict | None:
    with contextlib.suppress(OSError, ValueError):
        values = load_json(path)
        form.model_validate(values)
        return values
    return None


def may_be_left(path: Path) -> bool:
    """Whether a killed command may have left this in the folder of a stage that has no plan yet."""
    return path.name == "parts" or path.name.startswith(".") and path.name.endswith(".tmp")


def changed_settings(before: dict, after: dict) -> list[str]:
    """Returns a line per setting of a stage that differs."""
    return [
        f"{key}: was {shown(before.get(key))}, is now {shown(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _of_stage(folder: Path, stage: dict) -> tuple[list[SourceFile], str | None]:
    files = [SourceFile(folder / shard["name"], "jsonl", True, True) for shard in stage["shards"] if shard["documents"]]
    for file, size in zip(files, [shard["bytes"] for shard in stage["shards"] if shard["documents"]], strict=True):
        if not file.path.is_file():
            return [], f"is a stage of `linnet corpus` whose shard {file.path.name} is missing; make it again"
        if (length := file.path.stat().st_size) != size:
            return [], f"has {file.path.name} with {length:,} bytes instead of {size:,}; make the stage again"
        if reason := unreadable(file):
            return [], f"has {file.path.name}, which {reason}"
    return files, None if files else "is a stage of `linnet corpus` that holds no documents; give another folder"


def _without_text(folder: Path, skipped: list[str]) -> str:
    """Returns the problem of a folder without text; one with pictures gets the command that reads them."""
    if any(path.suffix.lower() in PICTURES for path in _walk(folder)):
        return f"is a folder of images without text; prepare images with: linnet data images {folder}"
    first = f"; the first that is left out: {skipped[0]}" if skipped else ""
    return f"is a folder without text; give a folder with UTF-8 text, JSONL or Parquet files{first}"


def _without_documents(folder: Path, names: list[str]) -> str | None:
    """Returns why a folder that Linnet wrote is not text, from the names in it; None for other folders."""
    for file in (STAGE, PLAN):
        if file.split("/")[0] not in names:
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            values = load_json(folder / file)
            stage, _ = values["stage"], values["format"]
            command = f"data {stage}" if stage == "lra" else f"corpus {stage}"
            if file == PLAN:
                return f"is a stage of `linnet {command}` that has not ended; run its command again, which resumes"
            return f"is a stage of `linnet {command}`, which holds no documents; name the text itself"
    return next((f"is {what}" for known, what in FOLDERS.items() if {*known} <= {*names}), None)


def _system(path: Path) -> str | None:
    """Returns the folder of `SYSTEM` that a path leads into, or None. Files in shared memory (/dev/shm) are files."""
    real = os.path.realpath(path)
    if real.startswith("/dev/shm/"):
        return None
    return next((place for place in SYSTEM if real == place or real.startswith(f"{place}/")), None)


def _named(path: Path) -> tuple[list[SourceFile], str | None]:
    if not path.is_file():
        return [], "is neither a file nor a folder"
    if place := _system(path):
        return [], f"is in {place}, which holds devices and tables of the kernel, not text; name other files"
    files = [SourceFile(path, kind_of(path), named=True)]
    if reason := unreadable(files[0]):
        return [], reason
    return files, None if path.stat().st_size else "is an empty file; leave it out or give one with text"


def _walk(
    folder: Path, leave_out: frozenset[str] = frozenset({"__pycache__"}), skipped: list[str] | None = None
) -> Iterator[Path]:
    paths: list[str] = []  # names of thousands of files, which take a fifth of the time of their Paths
    for parent, folders, names in os.walk(folder):
        reason = _without_documents(Path(parent), [*folders, *names])
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in leave_out and os.path.join(parent, name) not in SYSTEM
        ]
        if STAGE in names and (stage := read_stage(Path(parent))) is not None:  # its documents, not its records
            names, folders[:] = [shard["name"] for shard in stage["shards"] if shard["documents"]], []
        elif reason:
            names, folders[:] = [], []
            if skipped is not None:
                skipped.append(f"{parent}: {reason}")
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    files = [path for path in paths if os.path.isfile(path) and not (os.path.islink(path) and _system(Path(path)))]
    root = len(os.path.join(folder, ""))
    yield from map(Path, sorted(files, key=lambda path: path[root:].replace(os.sep, "/")))


def _sniff(path: Path, skipped: list[str]) -> SourceFile | None:
    file = SourceFile(path, kind_of(path), named=False)
    if reason := unreadable(file):
        skipped.append(f"{path}: {reason}")
        return None
    return file
