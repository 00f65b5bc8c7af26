"""The core works without the companions: neither a module nor a command of it needs one."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import linnet
from linnet.cli import groups
from linnet.companions import ROOMS, VERBS, Offer, companions
from linnet.models import KINDS
from linnet.report.run import WRITERS
from linnet.study.config import STUDIES
from linnet.train.objectives import OBJECTIVES

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


# What Linnet imports takes most of the time of a new process.
FORKS = """
import gc, json, os, runpy, sys, tempfile
import numpy, pandas, torch, torch._dynamo, typer.testing
if any(name.partition(".")[0] == "linnet" for name in sys.modules):
    sys.exit("Linnet itself must be imported by the forks")
gc.freeze()
for line in sys.stdin:
    folder, module, code, arguments = json.loads(line)
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.path.insert(0, folder)
        sys.argv[1:] = arguments
        status = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True) if module else exec(code, {})
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            print("" if status == end.code else end.code, file=sys.stderr)
        except BaseException:
            status = 1
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps([status, *(file.seek(0) or file.read() for file in files)]), flush=True)
"""


@pytest.fixture(scope="module")
def forks():
    """A process that has imported what Linnet imports, and forks for each program."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-P", "-c", FORKS], env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def without(forks, tmp_path):
    """Runs a module or a program on a copy of the package that lacks the packages of some verbs and rooms."""

    def run(names: list[str], *arguments: str, module: str = "", code: str = "") -> str:
        home = Path(linnet.__file__).parent
        gone = {(VERBS | ROOMS)[name].rpartition(".")[2] for name in names}
        shutil.copytree(home, tmp_path / "linnet", ignore=lambda folder, names: gone if Path(folder) == home else ())
        print(json.dumps([str(tmp_path), module, code, arguments]), file=forks.stdin, flush=True)
        status, output, errors = json.loads(forks.stdout.readline())
        assert status == 0, errors
        return output

    return run


def test_every_companion_is_there_and_has_its_verb(without):
    assert companions() == VERBS
    help_ = without([], "--help", module="linnet")
    assert all(f" {verb} " in help_ for verb in VERBS)


@pytest.mark.parametrize("verbs", [pytest.param(["reproduce"], marks=pytest.mark.thorough), ["reproduce", "mad"]])
def test_help_lacks_the_verb_of_a_companion_that_is_not_there(without, verbs):
    help_ = without(verbs, "--help", module="linnet")
    assert [verb for verb in VERBS if f" {verb} " not in help_] == [verb for verb in VERBS if verb in verbs]


def test_every_module_of_the_core_is_imported_without_companions(without):
    without([*VERBS, *ROOMS], code=EVERY)


@pytest.mark.parametrize("package", ROOMS.values())
def test_every_offer_of_a_room_is_found(package):
    for sort, things in importlib.import_module(package).OFFERS.items():
        offer = Offer(sort)
        for name, thing in things.items():
            assert offer[name] == thing if ":" not in thing else not isinstance(offer[name], str)


LACKING = """
import json, sys
from typer.testing import CliRunner
from linnet.cli import app, groups
from linnet.models import KINDS, OBJECTIVE_KINDS, get_recipe
from linnet.report.run import WRITERS
from linnet.study.config import STUDIES
from linnet.train.objectives import OBJECTIVES
kinds = {name: [one.name for one in group.registered_commands] for name, group in groups.items()}
told = [CliRunner().invoke(app, line.split()) for line in sys.argv[1:]]
assert all(done.exit_code == 2 for done in told), told
get_recipe("tnl-10m")
print(json.dumps({
    "commands": kinds, "objectives": [*OBJECTIVES], "kinds": [*KINDS], "pages": [*WRITERS], "studies": [*STUDIES],
    "told": [done.stderr for done in told]
}))
"""


@pytest.mark.parametrize("room", ROOMS)
def test_the_core_lacks_what_a_room_offers_and_nothing_else_without_it(without, room, tmp_path):
    (tmp_path / "images.yaml").write_text("objective: images\nmodel: vit-8px\n")
    (tmp_path / "masked.yaml").write_text("objective: masked\nmodel: bert-10m\ndata: {source: [stdlib]}\n")
    lines = {
        "vision": [f"train {tmp_path / 'images.yaml'}", "demo --vision"],
        "encoders": [f"train {tmp_path / 'masked.yaml'}", "data listops"],
    }
    keys = {"vision": ["objective: 'images'", "--vision: "], "encoders": ["objective: 'masked'", "PATH: 'listops'"]}
    found = json.loads(without(["reproduce", room], *lines[room], code=LACKING))
    offers = importlib.import_module(ROOMS[room]).OFFERS
    for sort, all_ in (("objectives", OBJECTIVES), ("kinds", KINDS), ("pages", WRITERS), ("studies", STUDIES)):
        assert found[sort] == [name for name in all_ if name not in offers.get(sort, {})]
    for group, commands in found["commands"].items():
        names = [one.name for one in groups[group].registered_commands]
        assert commands == [name for name in names if f"{group} {name}".strip() not in offers["commands"]]
    assert all(key in told for key, told in zip(keys[room], found["told"], strict=True)), found["told"]
