"""The core works without the companions: neither a module nor a command of it needs one."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import linnet
from linnet.cli import groups
from linnet.companions import ROOMS, VERBS, Offer, companions

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
    """Runs Python on a copy of the package that lacks the packages of some verbs and rooms."""

    def run(names: list[str], *arguments: str) -> str:
        home = Path(linnet.__file__).parent
        gone = {(VERBS | ROOMS)[name].rpartition(".")[2] for name in names}
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
    without([*VERBS, *ROOMS], "-c", EVERY)


def test_every_offer_of_a_room_is_found():
    for package in ROOMS.values():
        for sort, things in importlib.import_module(package).OFFERS.items():
            offer = Offer(sort)
            for name, thing in things.items():
                assert offer[name] == thing if ":" not in thing else not isinstance(offer[name], str)


OBJECTIVES = {"vision": ["images", "diffusion"]}
LACKING = """
import sys
from linnet.cli import app
from linnet.models import KINDS, OBJECTIVE_KINDS, families_of, get_recipe
from linnet.report.run.page import WRITERS
from linnet.study.config import STUDIES
from linnet.train.objectives import OBJECTIVES
for name in sys.argv[1].split():
    assert name not in OBJECTIVES and name not in OBJECTIVE_KINDS and name not in STUDIES, name
assert set(OBJECTIVE_KINDS.values()) == set(KINDS)
get_recipe("tnl-10m")
"""


@pytest.mark.parametrize("room", ROOMS)
def test_the_core_works_without_a_room(without, room):
    without(["reproduce", room], "-c", LACKING, " ".join(OBJECTIVES[room]))


COMMANDS = {  # group -> those of its commands that a room has
    "vision": {"": ["sample"], "data": ["images"], "evaluate": ["images", "samples"], "bench": ["vision"]}
}


@pytest.mark.parametrize("room", ROOMS)
def test_help_lacks_the_commands_of_a_room_that_is_not_there(without, room):
    code = "from linnet.cli import groups; print({name: [one.name for one in group.registered_commands] "
    code += "for name, group in groups.items()})"
    lacking = ast.literal_eval(without([room], "-c", code))
    for group, names in COMMANDS[room].items():
        whole = [one.name for one in groups[group].registered_commands]
        assert lacking[group] == [name for name in whole if name not in names] != whole


@pytest.mark.parametrize("arguments, told", [("train FILE", "objective: 'images'"), ("demo --vision", "--vision: ")])
def test_what_needs_a_room_is_refused_without_it(without, tmp_path, arguments, told):
    (tmp_path / "train.yaml").write_text("objective: images\nmodel: vit-8px\n")
    code = "from typer.testing import CliRunner; from linnet.cli import app; import sys; "
    code += "done = CliRunner().invoke(app, sys.argv[1:]); print(done.exit_code, done.stderr)"
    said = without(
        ["vision", "reproduce"], "-c", code, *arguments.replace("FILE", str(tmp_path / "train.yaml")).split()
    )
    assert said.startswith("2 ") and told in said
