"""The core works without the companions: neither a module nor a command of it needs one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import linnet
from linnet.companions import VERBS, companions

EVERY = """
import importlib, pkgutil, sys
import linnet
broken = []
for module in pkgutil.walk_packages(linnet.__path__, "linnet."):
    try:
        module.name == "linnet.__main__" or importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("linnet"):
            broken.append(f"{module.name}: {error}")
sys.exit("; ".join(broken) or None)
"""


@pytest.fixture
def without(tmp_path):
    """Runs Python on a copy of the package that lacks the packages of some verbs."""

    def run(verbs: list[str], *arguments: str) -> str:
        home = Path(linnet.__file__).parent
        gone = {VERBS[verb].rpartition(".")[2] for verb in verbs}
        shutil.copytree(home, tmp_path / "linnet", ignore=lambda folder, names: gone if Path(folder) == home else ())
        command = [sys.executable, "-P", *arguments]
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "100"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_companion_is_there_and_has_its_verb(without):
    assert companions() == VERBS
    help_ = without([], "-m", "linnet", "--help")
    assert all(f" {verb} " in help_ for verb in VERBS)


@pytest.mark.parametrize("verbs", [["reproduce"], ["reproduce", "mad"]])
def test_help_lacks_the_verb_of_a_companion_that_is_not_there(without, verbs):
    help_ = without(verbs, "-m", "linnet", "--help")
    assert [verb for verb in VERBS if f" {verb} " not in help_] == [verb for verb in VERBS if verb in verbs]


def test_every_module_of_the_core_is_imported_without_companions(without):
    without(list(VERBS), "-c", EVERY)
