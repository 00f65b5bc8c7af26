"""`linnet reproduce`: the list, plans of every item, three tiny reduced items, and the page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reproduce_items import LIBRARY, make_items
from typer.testing import CliRunner

from linnet.cli import app
from linnet.papers.cli import EXAMPLES
from linnet.papers.library import ITEMS

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["reproduce", *arguments], terminal_width=200)


def test_the_list_has_every_item():
    result = invoke()
    assert result.exit_code == 0
    for entry in LIBRARY.items.values():
        assert entry.name in result.output
    records = json.loads(invoke("--paper", "000", "--json").output)
    assert [record["item"] for record in records] == [entry.name for entry in LIBRARY.of("000")]
    assert "\n-: no such form" in result.output and "not yet: cannot be run today" in result.output
    assert all(record["state"] and "reduced" in record and "full" in record for record in records)


def test_the_list_takes_less_than_two_seconds():
    code = (
        "import sys, time; sys.argv = ['linnet', 'reproduce']\n"
        "from linnet.cli import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "print(time.process_time(), 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, torch = output.splitlines()[-1].split()
    assert float(seconds) < 2 and torch == "False"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("005",), ("PAPER '005': unknown; known: 000, 001, 002, 003, 004",)),
        (("1", "table9"), ("did you mean '001'?",)),
        (("table9",), ("PAPER 'table9': is an item of 000, 001; write linnet reproduce 000 table9",)),
        (("other",), ("PAPER 'other': has no items",)),
        (("000", "zz"), ("table2, table3, ", "table9, table10, ")),
        (("000", "table7", "--out", str(ITEMS / "data.yaml" / "x")), ("1 problem",)),
        (("000", "tabel7"), ("ITEM 'tabel7'", "table7")),
        (
            ("000", "table7", "--scale", "huge", "--seeds", "a", "--data", "foo=/x", "--only", "none"),
            ("--scale 'huge'", "--seeds 'a'", "--data foo: unknown", "--only 'none'"),
        ),
        (("000", "table1"), ("no steps of its own", "run linnet models --json --recount")),
        (("000", "table7", "--data", "corpus", "--only", "x", "--plan"), ("--data 'corpus'", "--only 'x'")),
        (("--plan",), ("--plan",)),
        (("--paper", "9"), ("--paper '9'",)),
        (("000", "--paper", "000"), ("--paper",)),
        (("000", "table7", "--markdown"), ("--markdown",)),
        (("--markdown", "--items", str(ITEMS)), ("leave --items out",)),
        (("mine", "table1", "--items", "nowhere", "--seeds", "a"), ("nowhere: not a folder", "--seeds 'a'")),
        (("002", "table7", "--waterfall"), ("--waterfall: 002 table7 has no waterfall; only 004 fig3.7 has one",)),
        (("report", "no-such-folder"), ("no-such-folder",)),
    ],
)
def test_errors(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr


def test_help_shows_the_options_and_commands_that_can_be_given():
    shown = invoke("--help").output
    assert all(option in shown for option in ("--only", "--data", "--items", "--plan"))
    for command in EXAMPLES:
        assert command in shown
        named = re.match(r"linnet reproduce (\d{3}) ([\w.]+)", command)
        assert named is None or named.groups() in LIBRARY.items, command


def test_a_waterfall_is_an_item_of_its_own(tmp_path):
    found = [
        json.loads(invoke(*one, "--plan", "--json", "--out", str(tmp_path)).stdout)[0]["item"] for one in WATERFALL
    ]
    assert found == ["fig3.7-waterfall"] * 2


WATERFALL = (("004", "fig3.7", "--waterfall"), ("004", "fig3.7-waterfall"))


def test_items_of_ones_own_are_listed_priced_run_and_reported(tmp_path):
    make_items(tmp_path)
    own, out = ("--items", str(tmp_path / "items")), ("--out", str(tmp_path / "out"))
    (first, _) = json.loads(invoke(*own, "--json").stdout)
    assert (first["paper"], first["item"]) == ("900", "table1")
    (plan,) = json.loads(invoke("900", "table1", *own, *out, "--plan", "--json").stdout)
    assert plan["steps"][0]["runs"] == 4
    result = invoke("900", "table2", *own, *out)
    assert result.exit_code == 0 and "second: not run (needs --data books=FOLDER)" in result.stdout, result.output
    page = Path(invoke("report", out[1]).stdout.strip()).read_text()
    assert f"linnet reproduce 900 table2 --items {own[1]}</code>" in page and ">900 table2: with data</h2>" in page
    assert "PAPER '000': unknown" in invoke("000", *own).stderr  # in place of those of the papers


def test_problems_of_other_items_are_a_note(tmp_path):
    make_items(tmp_path)
    own = ("--items", str(tmp_path / "items"))
    (tmp_path / "items" / "900" / "wrong.yaml").write_text("titel: A")
    result = invoke("900", "table1", *own, "--plan")
    assert result.exit_code == 0 and "in other files of" in result.stderr and "lists them" in result.stderr
    assert invoke(*own).exit_code == 2


def test_a_changed_copy_keeps_its_result_beside_that_of_the_original(tmp_path):
    own = tmp_path / "items" / "000"
    own.mkdir(parents=True)
    (own / "paper.yaml").write_text("title: my changes")
    text = (ITEMS / "000" / "table7.yaml").read_text()
    (own / "table7.yaml").write_text(text.replace("title: ", "title: changed ", 1))
    out = ("--out", str(tmp_path / "out"))
    for more in (("--items", str(tmp_path / "items")), ()):
        result = invoke("000", "table7", *more, *out)
        assert result.exit_code == 0, result.output
    page = Path(invoke("report", out[1]).stdout.strip()).read_text()
    assert (
        f"linnet reproduce 000 table7 --items {tmp_path}/items</code>" in page
        and "linnet reproduce 000 table7</code>" in page
    )
    assert page.count("<h2 id=") == 2 and 'id="own-000-table7-reduced"' in page


def test_an_item_and_its_page(tmp_path):
    out = str(tmp_path)
    result = invoke("000", "table7", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("holds:") == 3 and "tnl-7b" in result.stdout
    again = invoke("000", "table7", "--out", out, "--scale", "full", "--json")
    (record,) = json.loads(again.stdout)
    assert record["outcome"]["says"] == "reproduced" and record["outcome"]["compared"] == 48
    page = invoke("report", out)
    assert page.exit_code == 0
    text = (tmp_path / "report" / "index.html").read_text()
    assert text.count("<h2 id=") == 2 and "154.4" in text and "<script" not in text


def test_the_plan_of_an_item(tmp_path):
    plan = invoke("000", "table7", "--plan", "--json", "--out", str(tmp_path / "none"))
    (record,) = json.loads(plan.stdout)
    assert record["steps"][0]["runs"] >= 24 and not (tmp_path / "none").exists()


def test_a_plan_says_what_its_form_changes():
    full = invoke("002", "table7", "--scale", "full", "--plan", "--only", "average").stdout
    assert "the full form differs: " in full and "the reduced form differs" not in full
    reduced = invoke("002", "table7", "--plan", "--only", "listops").stdout
    assert "the reduced form differs: " in reduced


def test_a_plan_names_data_that_are_not_given(tmp_path):
    (tmp_path / "bpe").mkdir()
    for name in ("encoder.json", "vocab.bpe", "dict.txt"):
        (tmp_path / "bpe" / name).write_text("")
    given = ["002", "table5", "--scale", "full", "--plan", "--data", f"gpt2-bpe={tmp_path}/bpe"]
    shown = invoke(*given).stdout
    assert "missing --data wikitext-103=FOLDER: WikiText-103" in shown and "missing --data gpt2-bpe" not in shown
    assert "note data gpt2-bpe: encoder.json is not the published file" in shown
    (record,) = json.loads(invoke(*given, "--json").stdout)
    assert record["missing"] == ["wikitext-103"] and sum(note.startswith("data") for note in record["notes"]) == 2
    assert "missing --data wikitext-2=FOLDER" in invoke("002", "table5", "--plan").stdout  # of single steps
    assert "missing" not in invoke("002", "table5", "--plan", "--only", "parameters").stdout


def test_days_of_devices_are_priced_or_unknown(tmp_path):
    """`001 table4` names no throughput and runs on a cluster; the throughput of `002 fig3`, on a GPU, is not stated."""
    for item, known in (("001 table4", True), ("002 fig3", False)):
        plan = invoke(*item.split(), "--scale", "full", "--plan", "--json", "--out", str(tmp_path))
        (record,) = json.loads(plan.stdout)
        assert (record["device_days"] is not None) == known and record["flops"] > 0
    assert record["steps"][0]["device_days"] is None


def test_a_plan_says_where_its_two_costs_come_from():
    shown = invoke("001", "table9", "--scale", "full", "--plan", "--only", "parameters,train").stdout
    assert "device-days: FLOPs at 3e+14 FLOP/s; stated in the item: 12.5 GPU days, estimated\n" in shown


def test_items_that_the_docs_name_exist():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    named = {found for page in pages for found in re.findall(r"linnet reproduce (\d{3}) ([\w.-]+)", page.read_text())}
    assert named and named <= set(LIBRARY.items)


def test_a_long_plan_shows_that_it_is_at_work(monkeypatch):
    monkeypatch.setattr(sys.modules["linnet.papers.cli"], "TICK", 0.02)
    shown = CliRunner().invoke(app, ["reproduce", "001", "table4", "--plan"])
    assert shown.exit_code == 0 and "models built" in shown.stderr and "models built" not in shown.stdout
