"""Items are data: each file of the package parses, and what it names exists."""

import subprocess
import sys
from pathlib import Path

import pytest
from reproduce_items import LIBRARY

from linnet.config import ConfigError
from linnet.study.reproduce.library import ITEMS, read_library

ROOT = Path(__file__).parents[3]
ENTRIES = [pytest.param(entry, id=entry.key) for entry in LIBRARY.items.values()]


def test_the_fast_reader_reads_the_same():
    assert read_library(strict=True) == LIBRARY


def test_no_item_is_python():
    assert not list(ITEMS.rglob("*.py"))


@pytest.mark.parametrize("entry", ENTRIES)
def test_files_exist(entry):
    names = [*entry.item.where, *entry.item.tests]
    missing = [n for n in names if not (ROOT / n).exists() and not (ROOT / "linnet" / n.partition(":")[0]).exists()]
    assert not missing


def test_reading_needs_no_torch():
    code = "import sys; from linnet.study.reproduce.library import read_library; read_library(); "
    code += "print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_all_problems_are_reported_together(tmp_path):
    folder = tmp_path / "900"
    folder.mkdir()
    (folder / "paper.yaml").write_text("title: A\norder: [missing]\n")
    (folder / "one.yaml").write_text("title: A\nstate: compleet\n")
    (folder / "two.yaml").write_text(
        "title: B\nstate: complete\npublished: {source: T, columns: {x: u}, rows: {a: {x: 1}}}\n"
        "claims: [a < b on x]\nreduced: {needs: [nothing], steps: [{verb: models}]}\n"
    )
    (folder / "three.yaml").write_text(
        "title: C\nstate: complete\nreduced: {needs: [nothing], steps: [{verb: modles}]}\n"
    )
    with pytest.raises(ConfigError) as error:
        read_library(tmp_path)
    text = str(error.value)
    for word in ("'missing'", "'compleet'", "unknown row 'b'", "'modles'"):
        assert word in text
