"""How Linnet is installed: the command that adds an extra, and other packages that claim the name `linnet`.

The distribution is `linnet-lm`; the import name and the command are `linnet`. On PyPI, `linnet` is another project.
"""

import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

NAME = "linnet-lm"
_PACKAGE = Path(__file__).parent


def install_command(extra: str, package: Path = _PACKAGE) -> str:
    """Returns the command that installs an extra beside the package that runs.

    Args:
        extra: one of pyproject.toml's, such as "serve".
        package: the folder of the package `linnet`.
    """
    if clone := _clone(package):
        return f"cd {shlex.quote(str(clone))} && pip install -e '.[{extra}]' -c constraints.txt"
    return f"pip install '{NAME}[{extra}]'"


def name_conflict(package: Path = _PACKAGE) -> str | None:
    """Returns what to do about a distribution `linnet` that is installed beside this one, None without one.

    Both own `import linnet`, so each overwrites files of the other.
    """
    try:
        other = distribution("linnet")
    except PackageNotFoundError:
        return None
    here = f"{NAME} {_version()}".strip()
    again = f"cd {shlex.quote(str(clone))} && pip install -e ." if (clone := _clone(package)) else f"pip install {NAME}"
    again = again.replace("pip install", "pip install --force-reinstall --no-deps")
    return (
        f"the distribution `linnet` {other.version} (another project) is installed beside {here}, and both own "
        f"`import linnet`; remove the first and repair the second: pip uninstall linnet; {again}"
    )


def _clone(package: Path) -> Path | None:
    """The root of the clone that the package is in, None if it was installed from a wheel."""
    root = package.parent
    return root if (root / "pyproject.toml").is_file() and (root / "constraints.txt").is_file() else None


def _version() -> str:
    try:
        return distribution(NAME).version
    except PackageNotFoundError:
        return ""
