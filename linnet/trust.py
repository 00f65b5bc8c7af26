"""Decides which Python files a folder may run: its config.yaml can name `plugins`, and importing one runs its code.

A file that the user names (`--mixer`, a training or study file, `load_plugin`) runs, as any script does. A file that
only the config.yaml of a run or model folder names runs if its SHA-256 is the one that the folder recorded and is on
the user's list. The same holds for Python functions of an evaluation's own tasks when such a run is trained further.

Linnet writes the list when it makes a run here. It is in the user's configuration folder, so no folder that is received
can add to it. `--allow-plugins` (`allow_plugins=True`) runs files that are not on the list.

A run or model folder keeps a copy of each file. Where the named file is missing, or is another one because the current
folder is, the copy runs in its place by the same rules. A file that was edited where a run was made stays refused.

No module is imported from the current folder, which may have been received too: every process that Linnet starts has
PYTHONSAFEPATH in its environment, as if it were started by `python -P`.
"""

import contextlib
import errno
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from linnet.config import ConfigError, gather, refuse

FOLDER = "LINNET_CONFIG_HOME"  # environment variable: the configuration folder, in place of ~/.config/linnet
LIST = "trusted-plugins"
COPIES = "plugins"  # in a run or model folder: <first 12 digits of the SHA-256>/<name of the file>
TASKS = ("", ".yaml", ".yml", ".py")  # suffixes of the files of a task; a template that others include may have none
SAFE_PATH = "PYTHONSAFEPATH"  # environment variable of Python: the current folder is not on the path of modules

_accepted: set[str] = set()  # digests of files that this process has imported or was allowed to import


class ChangedPlugin(UserWarning):
    """A plugin is not the file that a folder was made with, and runs because it was allowed."""


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keeps the current folder off the path of modules of all Python processes that are started in this context."""
    before = {name: value for name, value in os.environ.items() if name == SAFE_PATH}
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH)
        os.environ.update(before)


def trusted_list() -> Path:
    """Returns the path of the user's list: one line per file, its SHA-256 and its path when a run was made.

    Raises:
        OSError: the user has no home folder.
    """
    if folder := os.environ.get(FOLDER):
        return Path(folder) / LIST
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(folder):  # a relative one would be below the current folder, which may have been received
        return Path(folder) / "linnet" / LIST
    try:
        return Path.home() / ".config" / "linnet" / LIST
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error), "~") from None


def plugin_file(spec: str) -> Path:
    """Returns the file of `path/to/file.py:Class`."""
    return Path(spec.rpartition(":")[0])


def plugin_digest(spec: str) -> str:
    """Returns the SHA-256 of a plugin's file in hexadecimal; "" if the file does not exist."""
    path = plugin_file(spec)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def tasks_digest(include: str | Path) -> str:
    """Returns the SHA-256 of a folder of the harness's tasks that run code (`!function`); "" if they run none."""
    files = sorted(path for path in Path(include).rglob("*") if path.suffix in TASKS and path.is_file())
    texts = {path: path.read_bytes() for path in files}
    if not any(b"!function" in text for path, text in texts.items() if path.suffix != ".py"):
        return ""
    hasher = hashlib.sha256()
    for path, text in texts.items():
        hasher.update(f"{path.relative_to(include).as_posix()} {len(text)}\n".encode() + text)
    return hasher.hexdigest()


def digests(plugins: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of each plugin's file, as config.yaml records them under `plugin_digests`."""
    return {plugin: plugin_digest(plugin) for plugin in plugins}


def with_copies(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the content of a folder's config.yaml with its copies in place of plugins whose files are elsewhere."""
    plugins, recorded = values.get("plugins"), values.get("plugin_digests")
    if not (isinstance(plugins, list) and isinstance(recorded, dict)):
        return values
    names = {plugin: plugin for plugin in recorded}
    for plugin, known in recorded.items():
        if isinstance(plugin, str) and isinstance(known, str) and plugin_digest(plugin) != known:
            copy = copy_of(plugin, known, folder)
            if copy.is_file() and _listed().get(known) != _written(plugin_file(plugin)):
                names[plugin] = f"{copy}:{plugin.rpartition(':')[2]}"
    plugins = [names.get(plugin, plugin) if isinstance(plugin, str) else plugin for plugin in plugins]
    return values | {"plugins": plugins, "plugin_digests": {names[plugin]: recorded[plugin] for plugin in recorded}}


def copy_of(plugin: str, recorded: str, folder: Path) -> Path:
    """Returns where the folder of a run or model keeps its copy of a plugin of this SHA-256."""
    return folder / COPIES / recorded[:12] / plugin_file(plugin).name


def accept(found: Iterable[str]) -> None:
    """Trusts files with these SHA-256 in this process, for example in a worker whose parent process trusts them."""
    _accepted.update(digest for digest in found if digest)


def remember(plugins: Iterable[str], includes: Iterable[str] = ()) -> None:
    """Adds files to the user's list, because a run is made with them. Warns if the list cannot be written.

    Args:
        plugins: files of mixers. includes: folders of tasks.
    """
    paths = {digest: plugin_file(plugin) for plugin, digest in digests(plugins).items()}
    paths |= {tasks_digest(include): Path(include) for include in includes}
    missing = {digest: path for digest, path in paths.items() if digest and digest not in _listed()}
    if not missing:
        return
    try:
        file = trusted_list()
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab+", buffering=0) as out:  # one write per line: several processes may append at once
            out.seek(max(0, out.tell() - 1))
            start = "" if out.read() in (b"", b"\n") else "\n"  # a full disk may have cut off the last line
            for sha256, path in missing.items():
                out.write(f"{start}{sha256}  {_written(path)}\n".encode())
                start = ""
    except OSError as error:
        message = f"the list of trusted plugins cannot be written ({error}), so loading this run needs --allow-plugins"
        warnings.warn(message, stacklevel=2)


def check_plugins(values: Mapping[str, Any], where: str | Path, allow: bool = False) -> None:
    """Checks the plugins of a folder's config.yaml before any of them is imported.

    Args:
        values: the content of config.yaml.
        where: its path, for messages.
        allow: accept files that are not on the user's list, and with a warning those that have changed.

    Raises:
        ConfigError: lists every plugin that is missing, changed or not trusted, with its digest and the fix.
    """
    where = str(where)
    plugins, recorded = values.get("plugins") or [], values.get("plugin_digests") or {}
    if not isinstance(plugins, list) or any(not isinstance(plugin, str) for plugin in plugins):
        raise ConfigError([f"plugins: {plugins!r} is not a list; write path/to/file.py:Class in each line"], where)
    if not isinstance(recorded, Mapping):
        raise ConfigError([f"plugin_digests: {recorded!r} is not a mapping of plugins to SHA-256"], where)
    problems, trusted = [], {*_listed(), *_accepted}
    for plugin in dict.fromkeys(plugins):
        digest, known = plugin_digest(plugin), recorded.get(plugin)
        if not digest:
            problems.append(_missing(plugin, where))
        elif allow:
            if known not in (None, digest):
                message = f"{where}: {plugin} has changed since then (SHA-256 {digest}, recorded {known})"
                warnings.warn(message, ChangedPlugin, stacklevel=4)
        elif known not in (None, digest):
            copy = copy_of(plugin, str(known), Path(where).parent)
            fix = f"move it away to use the copy {copy}" if copy.is_file() else "restore the file"
            problems.append(
                f"plugins: {plugin!r} has changed since {where} was written (SHA-256 {digest}, recorded {known}); "
                f"{fix}, or allow it as it is: --allow-plugins, in Python allow_plugins=True"
            )
        elif digest not in trusted:
            problems.append(
                f"plugins: {where} would run {plugin!r} (SHA-256 {digest}), and no run was made here with this file; "
                "read it, and if you trust it, allow it: --allow-plugins, in Python allow_plugins=True"
            )
    refuse(problems, where)
    accept(plugin_digest(plugin) for plugin in plugins)


def check_training(values: Mapping[str, Any], where: str | Path, allow: bool = False) -> None:
    """Checks a folder's config.yaml as `check_plugins` does, and its evaluations, before it is trained further.

    Raises:
        ConfigError: as `check_plugins`; or the Python functions of an evaluation's own tasks are not trusted.
    """
    problems: list[str] = []
    with gather(problems):
        check_plugins(values, where, allow)
    evaluations = values.get("evaluations")
    trusted = {*_listed(), *_accepted}
    for evaluation in evaluations if isinstance(evaluations, list) else []:
        include = evaluation.get("include") if isinstance(evaluation, Mapping) else None
        digest = tasks_digest(include) if isinstance(include, str) else ""
        if digest and not allow and digest not in trusted:
            problems.append(
                f"evaluations: {where} would run the functions (!function) of the tasks in {include!r} (SHA-256 "
                f"{digest}), and no run was made here with them; read them, and if you trust them, allow them: "
                "--allow-plugins, in Python allow_plugins=True"
            )
    refuse(problems, str(where))


def _missing(plugin: str, where: str) -> str:
    path = plugin_file(plugin)
    if path.suffix != ".py":
        return f"plugins: {plugin!r}: write path/to/file.py:Class"
    fix = "restore it" if path.is_absolute() else f"restore it (its path starts in {Path.cwd()})"
    return f"plugins: {plugin!r} of {where}: the file {path} does not exist; {fix}"


def _written(path: Path) -> str:
    return json.dumps(str(path.resolve()))


def _listed() -> dict[str, str]:
    """Returns the user's list: the SHA-256 of each file -> its path, as `_written`."""
    try:
        lines = trusted_list().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    rows = [line.split(maxsplit=1) for line in lines if line.strip()]
    return {row[0]: row[-1].strip() for row in rows}
