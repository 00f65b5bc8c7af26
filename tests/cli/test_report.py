"""`linnet report`: its page, its output, and its errors for folders that are not studies."""

import json
import math
import webbrowser

import pytest
from page_claims import contradictions
from typer.testing import CliRunner

from linnet.cli import app


@pytest.fixture
def folder(tmp_path):
    """The table of a small study, without its runs."""
    rows = ["run,architecture,params_non_embedding,tokens,flops,loss"]
    for budget in (1e12, 3e12, 9e12):
        for n in (1e4, 2e4, 4e4, 8e4):
            d = budget / (6 * n)
            rows.append(f"r{n:g}-{budget:g},tnl,{n},{d},{budget},{1 + 30 / n**0.35 + math.e * 70 / d**0.37}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.mark.usefixtures("no_pictures")
def test_prints_the_path_of_the_page(folder):
    result = call(folder, "--bootstrap", 20)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(folder / "report" / "index.html")
    page = (folder / "report" / "index.html").read_text()
    assert "tnl" in page and contradictions(page) == []
    path, *lines = result.output.splitlines()
    notes = lines[: lines.index("What you may conclude")]
    lines = lines[len(notes) + 1 :]
    assert all(note.startswith("note ") for note in notes) and lines[0].startswith("Over all runs")
    found = json.loads(call(folder, "--bootstrap", 20, "--json").stdout)
    assert found == {"page": path, "conclusions": lines}


@pytest.mark.usefixtures("no_pictures")
def test_the_terminal_says_why_laws_are_absent(folder):
    table = folder / "table.csv"
    table.write_text(table.read_text() + table.read_text().splitlines()[1] + "\n")
    result = call(folder)
    assert result.exit_code == 0, result.output
    assert "note No laws could be fitted: the same row 2 times" in result.output


def test_out_and_open(folder, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    page = folder / "elsewhere" / "page.html"
    result = call(folder, "--out", page, "--bootstrap", 20, "--open")
    assert result.exit_code == 0, result.output
    assert page.is_file() and (page.parent / "isoflop-curves.svg").is_file()
    assert opened == [page.resolve().as_uri()]


def test_no_study(tmp_path):
    result = call(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "1 problem" in result.output and "Traceback" not in result.output


def test_help_teaches():
    result = CliRunner().invoke(app, ["report", "--help"])
    assert result.exit_code == 0
    assert "linnet report studies/demo" in result.output and "--open" in result.output
