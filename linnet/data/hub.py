"""Names on the Hugging Face Hub: data sets `hf:NAME[@REVISION][:CONFIG[:SPLIT]]` and tokenizers `hf:NAME[@REVISION]`.

Files are downloaded once to the Hub's own cache and then read like any other file, so a corpus and a run are identified
by their content. A name is resolved once per process. Without a network (or with HF_HUB_OFFLINE=1) the revision in the
cache is used. NAME may also be the path of a folder in the Hub's layout, if it begins with `/`, `./`, `../` or `~`.
"""

import functools
import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from linnet.config import load_json, nearest
from linnet.install import install_command

PREFIX = "hf:"
README = "README.md"
# Each also with the next ones appended.
TEXT = (".parquet", ".pq", ".jsonl", ".ndjson", ".txt", ".json.gz", ".json.zst")
COMPRESSED = ("", ".gz", ".zst")
SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation", "t10k"},
}
PART = re.compile(r"-(\d{5})-of-(\d{5})")


class HubError(Exception):
    """Why a name cannot be used, as the end of a message that begins with the name."""


@dataclass(frozen=True)
class Resolved:
    """A repository on this machine.

    Attributes:
        folder: its snapshot.
        revision: the commit; None for a folder that the user gave.
        files: names of all of its files, downloaded or not.
        online: whether files that are missing can be downloaded.
    """

    name: str
    kind: str
    folder: Path
    revision: str | None
    files: tuple[str, ...]
    online: bool

    def fetch(self, names: list[str]) -> list[Path]:
        """Returns the paths of files, which are downloaded if they are missing.

        Raises:
            HubError: a file cannot be downloaded.
        """
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing and self.online:
            import huggingface_hub

            try:
                huggingface_hub.snapshot_download(
                    self.name,
                    repo_type=self.kind,
                    revision=self.revision,
                    allow_patterns=[glob.escape(x) for x in missing],
                )
            except Exception as error:  # the library raises what its transport does
                raise HubError(f"cannot be downloaded ({_line(error)}); run the same command again") from None
            missing = [name for name in missing if not (self.folder / name).is_file()]
        if missing:
            raise HubError(f"is not complete in the cache: {missing[0]} is missing{_download(self.name, self.kind)}")
        return [self.folder / name for name in names]


def is_name(text: str) -> bool:
    """Returns whether a source or tokenizer is a name on the Hub."""
    return text.startswith(PREFIX)


def dataset_files(text: str) -> list[Path]:
    """Returns the files of one configuration and split of a data set (default: its only configuration, `train`).

    The front matter of README.md lists configurations and splits. Without it, a configuration is a folder, and a split
    is a word in the path of a file.

    Raises:
        HubError: the name, the configuration or the split does not exist, or cannot be reached.
    """
    name, config, split = _parts(text)
    repo = resolve(name, "dataset")
    chosen = _listed(repo, config, split) or _by_path(repo, config, split)
    totals = [(int(match[2]), file) for file in chosen if (match := PART.search(file))]
    if not repo.online and totals and (short := [total for total, _ in totals if len(totals) < total]):
        raise HubError(f"has {len(totals)} of {short[0]} files in the cache{_download(repo.name, repo.kind)}")
    return repo.fetch(chosen)


def tokenizer_file(text: str) -> tuple[Path, str | None]:
    """Returns tokenizer.json of a model, and the end of a document that its tokenizer_config.json names, or None.

    Raises:
        HubError: the name does not exist, cannot be reached, or has no tokenizer.json.
    """
    name, *rest = text.removeprefix(PREFIX).split(":")
    if any(rest):
        raise HubError("has a part after ':', which only data sets have; write hf:NAME or hf:NAME@REVISION")
    repo = resolve(name, "model")
    if "tokenizer.json" not in repo.files:
        raise HubError(
            "has no tokenizer.json; with transformers, AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) "
            "writes one: give its path"
        )
    settings = "tokenizer_config.json"
    [file, *more] = repo.fetch(["tokenizer.json", *([settings] if settings in repo.files else [])])
    try:
        end = load_json(more[0]).get("eos_token") if more else None
    except (OSError, ValueError, AttributeError):
        end = None
    end = end.get("content") if isinstance(end, dict) else end
    return file, end if isinstance(end, str) else None


def revisions(names: list[str], kind: str) -> dict[str, str]:
    """Returns the commit of each name on the Hub among sources (kind "dataset") or tokenizers ("model")."""
    commits = {}
    for text in names:
        if is_name(text) and (revision := resolve(_parts(text)[0], kind).revision):
            commits[text] = revision
    return commits


def resolve(name: str, kind: str) -> Resolved:
    """Returns a repository, from the network or else from the cache; asks once per process.

    Args:
        name: NAME or NAME@REVISION, or the path of a folder.
        kind: dataset or model.

    Raises:
        HubError: the repository does not exist, or can neither be reached nor is in the cache.
    """
    answer = _resolve(name, kind)
    if isinstance(answer, HubError):
        raise answer
    return answer


@functools.cache
def _resolve(name: str, kind: str) -> Resolved | HubError:
    try:
        return _find(name, kind)
    except HubError as error:  # kept too: without a network each attempt takes seconds
        return error


def _find(name: str, kind: str) -> Resolved:
    if re.match(r"(/|~|\.\.?/)", name):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise HubError("is not a folder; give one in the Hub's layout, or a name such as hf:org/name")
        return Resolved(name, kind, folder, None, _names(folder), online=False)
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError:
        raise HubError(f"needs huggingface_hub; install it: {install_command('hf')}") from None
    repo, at, revision = name.partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo) or (at and not revision):
        raise HubError("is not a name on the Hub; write hf:NAME or hf:ORGANISATION/NAME, with @REVISION if you like")
    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            options = {"repo_type": kind, "revision": revision or None}
            folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=[README], **options))
            about = huggingface_hub.HfApi().repo_info(repo, repo_type=kind, revision=folder.name)
            files = tuple(sorted(file.rfilename for file in about.siblings or ()))
            return Resolved(repo, kind, folder, folder.name, files, online=True)
        except errors.GatedRepoError:
            raise HubError("is gated; accept its terms on the Hub, then run: hf auth login") from None
        except errors.RepositoryNotFoundError:
            raise HubError(
                f"does not exist on the Hub as a {kind}, or is private; check it, or: hf auth login"
            ) from None
        except errors.RevisionNotFoundError:
            raise HubError(f"has no revision {revision!r}; give a commit, branch or tag of it") from None
        except Exception as error:  # the library raises what its transport does
            why = _line(error)
    cached = _cached(Path(constants.HF_HUB_CACHE), repo, kind, revision or "main")
    if cached is None:
        raise HubError(f"cannot be reached ({why}) and is not in the cache{_download(repo, kind, revision)}")
    return Resolved(repo, kind, cached, cached.name, _names(cached), online=False)


def _cached(cache: Path, repo: str, kind: str, revision: str) -> Path | None:
    """Returns the snapshot of a revision in the Hub's cache, or None."""
    root = cache / f"{kind}s--{repo.replace('/', '--')}"
    reference = root / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    folder = root / "snapshots" / commit
    return folder if folder.is_dir() and any(folder.iterdir()) else None


def _listed(repo: Resolved, config: str | None, split: str) -> list[str]:
    """Returns the files that the front matter of README.md lists; an empty list if it lists none."""
    known = {}
    for entry in _front_matter(repo):
        if isinstance(entry, dict) and isinstance(entry.get("config_name"), str) and entry.get("data_files"):
            known[entry["config_name"]] = entry
    if not known:
        return []
    if config is None:
        defaults = [name for name, entry in known.items() if entry.get("default") is True]
        config = next(iter(defaults or ([*known] if len(known) == 1 else [n for n in known if n == "default"])), None)
        if config is None:
            raise HubError(f"has several configurations; add one, :CONFIG ({_some(known)})")
    elif config not in known:
        raise HubError(f"has no configuration {config!r}; {nearest(config, known)}")
    data = known[config]["data_files"]
    folder = known[config].get("data_dir")
    by_split: dict[str, list[str]] = {}
    for item in data if isinstance(data, list) else [data]:
        where, paths = (item.get("split"), item.get("path")) if isinstance(item, dict) else ("train", item)
        paths = paths if isinstance(paths, list) else [paths]
        prefix = f"{folder}/" if isinstance(folder, str) else ""
        by_split.setdefault(str(where), []).extend(prefix + path for path in paths if isinstance(path, str))
    if split not in by_split:
        raise HubError(f"has no split {split!r}; {nearest(split, by_split)}")
    patterns = [_pattern(path) for path in by_split[split]]
    chosen = [file for file in repo.files if any(pattern.fullmatch(file) for pattern in patterns)]
    if not chosen:
        raise HubError(f"has none of the files {_some(by_split[split])}{_download(repo.name, repo.kind)}")
    if unread := [file for file in chosen if not _is_text(file)]:
        raise HubError(f"keeps this split in {unread[0]}, which is not read; {_CONVERTED}")
    return chosen


def _by_path(repo: Resolved, config: str | None, split: str) -> list[str]:
    """Returns the files of a configuration (a folder) and a split (a word in the path)."""
    files = [file for file in repo.files if _is_text(file) and not file.startswith(".")]
    if not files:
        raise HubError(f"has no files of text, JSONL or Parquet; {_CONVERTED}")
    if config is not None:
        folders = {file.split("/")[0] for file in files if "/" in file}
        if config not in folders:
            raise HubError(f"has no configuration {config!r}; {nearest(config, folders)}")
        files = [file for file in files if file.startswith(f"{config}/")]
    places = {file: split_of(file) for file in files}
    if not any(places.values()):  # files without the name of a split are for training
        places = dict.fromkeys(files, "train")
    wanted = next((kind for kind, words in SPLITS.items() if split in words), split)
    chosen = [file for file, place in places.items() if place == wanted]
    if not chosen:
        raise HubError(f"has no split {split!r}; {nearest(split, {place for place in places.values() if place})}")
    folders = {file.split("/")[0] for file in chosen if "/" in file} if config is None else set()
    if len(folders) > 1:
        raise HubError(f"has files of this split in several folders; add one, :CONFIG ({_some(folders)})")
    return chosen


_CONVERTED = "try @refs/convert/parquet after NAME, the Hub's copy in Parquet"


def split_of(file: str) -> str | None:
    """Returns "train", "validation" or "test" if a word of a path names one of them, else None."""
    words = set(re.split(r"[^a-z0-9]+", file.lower()))
    return next((kind for kind, names in SPLITS.items() if words & names), None)


def _is_text(file: str) -> bool:
    return any(file.lower().endswith(end + more) for end in TEXT for more in COMPRESSED)


def _front_matter(repo: Resolved) -> list[Any]:
    """Returns `configs` of the front matter of README.md; an empty list if there is none."""
    if README not in repo.files:
        return []
    [path] = repo.fetch([README])
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---"):
        return []
    try:
        values = yaml.safe_load(text.split("---", 2)[1])
    except (yaml.YAMLError, RecursionError):
        return []
    configs = values.get("configs") if isinstance(values, dict) else None
    return configs if isinstance(configs, list) else []


def _parts(text: str) -> tuple[str, str | None, str]:
    """Returns name, configuration or None, and split of `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`."""
    name, *rest = text.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise HubError("is not a name on the Hub; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    config, split = [*rest, "", ""][:2]
    return name, config or None, split or "train"


def _pattern(path: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern of the front matter: `*` stays in a folder, `**` does not."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", path.removeprefix("./"))
    rules = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(rules.get(piece, re.escape(piece)) for piece in pieces))


def _names(folder: Path) -> tuple[str, ...]:
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return tuple(sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file()))


def _download(name: str, kind: str, revision: str = "") -> str:
    option = "" if kind == "model" else f" --repo-type {kind}"
    at = f" --revision {revision}" if revision else ""
    return f"; where there is a network run: hf download {name}{option}{at}, or give your own files"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _some(names: Any) -> str:
    shown = sorted(names)
    return ", ".join(shown[:10]) + (", ..." if len(shown) > 10 else "")
