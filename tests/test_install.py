"""The command that adds an extra, and another project's distribution of the same import name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import linnet
from linnet.install import install_command, name_conflict

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "linnet"


def make_distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder where distributions are looked for, and no other."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_a_clone_names_itself_and_its_constraints(tmp_path):
    assert install_command("serve", PACKAGE) == f"cd {ROOT} && pip install -e '.[serve]' -c constraints.txt"


def test_a_wheel_names_the_distribution(tmp_path):
    assert install_command("serve", tmp_path / "site-packages" / "linnet") == "pip install 'linnet-lm[serve]'"


def test_one_distribution_is_no_conflict(path):
    make_distribution(path, "linnet-lm", "0.2.0")
    assert name_conflict() is None


def test_another_project_of_the_name_is_named_with_the_fix(path):
    make_distribution(path, "linnet-lm", "0.2.0")
    make_distribution(path, "linnet", "1.4.0")
    told = name_conflict(path / "linnet")
    for part in ("`linnet` 1.4.0 (another project)", "linnet-lm 0.2.0", "pip uninstall linnet", "--force-reinstall"):
        assert part in told
    assert f"cd {ROOT} && pip install" in name_conflict(PACKAGE)


def test_the_command_warns_and_goes_on(tmp_path):
    make_distribution(tmp_path, "linnet", "1.4.0")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "COLUMNS": "400"}
    command = [sys.executable, "-m", "linnet", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith(f"linnet {linnet.__version__}")
    assert done.stderr.startswith("warning the distribution `linnet` 1.4.0 (another project)")
