"""Items are data: each file of the package parses, and what it names exists."""

import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from reproduce_items import LIBRARY

from linnet.config import ConfigError
from linnet.papers.library import ITEMS, read_library, read_own
from linnet.papers.prepare import prepare
from linnet.papers.table import Request

ROOT = Path(__file__).parents[2]
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


def test_files_of_the_parts_exist():
    """What a paper's own table names in backquotes; `{a,b}` stands for both."""
    texts = [text for paper in LIBRARY.papers.values() for part in paper.parts for text in (part.where, part.see)]
    paths = [path.partition(":")[0] for text in texts for path in re.findall(r"`([^` ]+/[^`]*?)`", text)]
    paths = [re.sub("{.*}", name, path) for path in paths for name in re.sub(".*{(.*)}.*", r"\1", path).split(",")]
    assert (
        len(paths) > 50 and [p for p in paths if not (ROOT / p).exists() and not (ROOT / "linnet" / p).exists()] == []
    )


def test_reading_needs_no_torch():
    code = "import sys; from linnet.papers.library import read_library; read_library(); "
    code += "print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


TABLE = "published: {source: T, columns: {x: u}, rows: {a: {x: 1}}}\n"
WRONG = {
    "900/paper.yaml": "title: A\norder: [missing]\n",
    "900/one.yaml": f"title: A\nstate: compleet\n{TABLE}claims: [a < b on x]\n"
    "reduced: {steps: [{verb: models, rows: {m: z}}]}\n",
    "900/two.yaml": f"title: B\nstate: complete\n{TABLE}claims: [a < b on y]\n"
    "reduced: {needs: [nothing], steps: [{verb: models}]}\n",
    "900/three.yaml": "title: C\nstate: complete\nreduced: {needs: [nothing], steps: [{verb: modles}]}\n",
    "900/four.yaml": "title: D\nstate: complete\n"
    "published: {source: T, columns: {x: u}, rows: {a: {y: 1}}, base: c, tolerance: {x: two}}\n",
    "900/seven.yaml": f"title: E\nstate: complete\n{TABLE}"
    "reduced: {seeds: [1, 1], steps: [{verb: train, vary: {a: {}, aa: {}, m: {}}, rows: {m: a}}]}\n",
    "900/eight.yaml": f"title: F\nstate: complete\n{TABLE}"
    "reduced: {steps: [{verb: train, vary: {a: {}, aa: {}, m: {}}, rows: {m: a}}]}\n",
    "900/five.yaml": "- a list\n",
    "900/six.yaml": "",
    "data.yaml": "books: {abuot: some}\n",
}
PROBLEMS = {  # file -> the key and the value or fix of each of its problems
    "900/paper.yaml": ["order: no item 'missing'"],
    "900/one.yaml": ["state: .*'compleet'", "claims: .*unknown row 'b'", "reduced.steps.models.rows: unknown row 'z'"],
    "900/two.yaml": ["unknown row 'b'", "unknown column 'y'", "reduced.needs: unknown data 'nothing'"],
    "900/three.yaml": ["verb: 'modles' is not a verb; did you mean 'models'"],
    "900/four.yaml": ["published.rows.a.y", "published.base: unknown row 'c'", "published.tolerance.x: 'two'"],
    "900/seven.yaml": ["reduced.seeds: 1 comes twice"],
    "900/eight.yaml": ["reduced.steps.train.vary: unknown row 'aa'; did you mean 'a'"],
    "900/five.yaml": ["must be a mapping"],
    "900/six.yaml": ["must be a mapping"],
    "data.yaml": ["books: abuot: unknown key .*'about'", "books: about: required"],
}


@pytest.mark.parametrize("read", [read_library, read_own])
def test_all_problems_are_reported_together(read, tmp_path):
    write(tmp_path, WRONG)
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    for file, expected in PROBLEMS.items():
        lines = [line for line in error.value.problems if line.startswith(f"{tmp_path / file}: ")]
        assert len(lines) == len(expected), lines
        for part in expected:
            assert any(re.search(part, line) for line in lines), (part, lines)
    assert len(error.value.problems) == sum(map(len, PROBLEMS.values()))


def test_a_folder_of_ones_own_items_is_read_whole_or_not_at_all(tmp_path):
    item = "title: A\nstate: complete\nreduced: {needs: [wikitext-103], steps: [{verb: models, config: %s}]}\n"
    for folder, files, part in (
        ("none", {}, "none: not a folder"),
        ("empty", {"README": ""}, "empty: has no items"),
        ("beside", {"one.yaml": item}, "beside/one.yaml: lies in no paper's folder"),
        ("untitled", {"mine/one.yaml": item % "{}"}, "untitled/mine: has no paper.yaml; write one"),
        (
            "absent",
            {"mine/paper.yaml": "title: A", "mine/one.yaml": item % "gone.yaml"},
            "one.yaml: config 'gone.yaml'",
        ),
        (
            "broken",
            {"mine/paper.yaml": "title: A", "mine/one.yaml": item % "c.txt", "mine/c.txt": "a: [1"},
            "broken/mine/c.txt",
        ),
    ):
        write(tmp_path / folder, files)
        with pytest.raises(ConfigError) as error:
            read_own(tmp_path / folder)
        (line,) = error.value.problems
        assert part in line
    write(tmp_path / "good", {"mine/paper.yaml": "title: A", "mine/one.yaml": item % "study/demo.yaml"})
    found, others = read_own(tmp_path / "good")
    assert list(found.items) == [("mine", "one")] and found.data == LIBRARY.data and others == 0


def test_a_wrong_file_stops_only_the_items_that_need_it(tmp_path):
    item = f"title: A\nstate: complete\n{TABLE}reduced: {{steps: [{{verb: models, config: %s}}]}}\n"
    write(tmp_path, {"mine/paper.yaml": "title: A", "mine/one.yaml": item % "study/demo.yaml", "stray.yaml": ""})
    write(tmp_path, {"mine/two.yaml": "titel: B", "mine/three.yaml": item % "gone.yaml", "yours/four.yaml": "a: [1"})
    library, others = read_own(tmp_path, "mine", ["one"])
    assert ("mine", "one") in library.items and others >= 6
    for paper, name, part in (
        ("mine", "two", "mine/two.yaml: titel: unknown key"),
        ("mine", "three", f"tried {tmp_path}/mine/gone.yaml and .*linnet/gone.yaml; check"),
        ("yours", "four", "yours: has no paper.yaml"),
        ("mine", "stray", "stray.yaml: lies in no paper's folder"),
    ):
        with pytest.raises(ConfigError, match=part) as error:
            read_own(tmp_path, paper, [name])
        assert len(error.value.problems) < others


def test_the_item_of_the_docs_can_be_run(tmp_path):
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (item,) = re.findall(r"\n    title: .*?\n(?=\n)", page, re.DOTALL)
    write(tmp_path, {"mine/paper.yaml": "title: My paper", "mine/table1.yaml": textwrap.dedent(item)})
    library, _ = read_own(tmp_path)
    (work,) = prepare(library, library.find("mine", ["table1"]), Request(out=tmp_path / "out"))
    assert work.costs["train"].runs == 6 and set(work.costs["train"].labels) == {"tnl", "tnl-decay"} and not work.notes
    assert all((ROOT / "linnet" / name).is_file() for name in library.items["mine", "table1"].item.where)


CODE = """title: A
state: complete
{table}reduced:
  steps:
  - {{verb: train, config: {{plugins: ['{folder}/mixer.py:Mine'], model: {{layout: mine}}}}}}
  - {{verb: evaluate, name: score, of: train, config: {{include: tasks, tasks: [own]}}}}
  - verb: study
    config: {{plugins: ['{folder}/other.py:Mine'], train: {{evaluations: [{{include: '{folder}/more'}}]}}}}
"""


@pytest.mark.parametrize("planning", [False, True])
def test_code_that_items_of_a_user_name_runs_only_if_it_is_trusted(tmp_path, monkeypatch, planning):
    monkeypatch.setenv("LINNET_CONFIG_HOME", str(tmp_path / "config"))
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    task = "task: own\ndataset_path: json\nprocess_docs: !function code.run\n"
    write(tmp_path, {"items/mine/paper.yaml": "title: A", "items/mine/mixer.py": code, "items/mine/other.py": code})
    write(tmp_path, {"items/mine/tasks/own.yaml": task, "items/mine/tasks/code.py": code})
    write(tmp_path, {"items/mine/more/own.yaml": task, "items/mine/more/code.py": code})
    folder = tmp_path / "items" / "mine"
    write(tmp_path, {"items/mine/one.yaml": CODE.format(table=TABLE, folder=folder)})
    library, _ = read_own(tmp_path / "items")
    request = Request(out=tmp_path / "out", planning=planning)
    with pytest.raises(ConfigError) as error:
        prepare(library, library.find("mine", ["one"]), request)
    for path in ("mixer.py", "other.py", "tasks", "more"):
        assert any(f"{folder}/{path}" in one and "--allow-plugins" in one for one in error.value.problems), path
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError):  # the files define no mixer
        prepare(library, library.find("mine", ["one"]), replace(request, allow_plugins=True))
    assert (tmp_path / "ran").exists()
