"""Every form of every item of the package can be priced, which checks all its configurations; three items run.

Most ladders of models are priced under the marker `reproduce` only.
"""

import shlex
from pathlib import Path

import pytest
import torch
from reproduce_items import LIBRARY

from linnet.config import ConfigError, digest, override, read_yaml
from linnet.papers.item import SCALES
from linnet.papers.library import config_of
from linnet.papers.markdown import COMMAND, write_markdown
from linnet.papers.prepare import prepare
from linnet.papers.run import run
from linnet.papers.table import Request, cells_of
from linnet.study.config import read_study

ROOT = Path(__file__).parents[2]
# Ladders of 000 and 004 count many models, so of those only two are priced without the marker `reproduce`.
LADDERS = {("000", "table6", "reduced"), ("004", "finding1", "reduced")}


def large(entry, scale):
    """Returns whether a form counts more than some dozen models."""
    verbs = {step.verb for step in entry.item.form(scale).steps}
    ladder = entry.paper in ("000", "004") and verbs & {"study", "mad"}
    return ladder and (entry.paper, entry.name, scale) not in LADDERS


def forms():
    for entry in LIBRARY.items.values():
        for scale in SCALES:
            form = entry.item.form(scale)
            if form is not None and form.steps:
                marks = [pytest.mark.reproduce] if large(entry, scale) else []
                yield pytest.param(entry, scale, marks=marks, id=f"{entry.key} {scale}")


@pytest.mark.parametrize("entry, scale", list(forms()))
def test_every_form_can_be_priced(entry, scale, tmp_path):
    """Its labels are rows of the table, so that no row stays empty by a slip of the pen."""
    (work,) = prepare(LIBRARY, [entry], Request(scale=scale, out=tmp_path / "none", planning=True))
    assert list(work.costs) == [step.name for step in entry.item.form(scale).steps]
    rows = set(entry.item.published.rows) if entry.item.published else set()
    followed = {step.of for step in entry.item.form(scale).steps}
    for step in entry.item.form(scale).steps:
        labels = work.costs[step.name].labels
        if labels is not None and step.rows:
            assert set(step.rows) <= set(labels), f"{step.name}: rows names labels that will not be measured"
        if labels is not None and rows and step.verb != "study" and step.name not in followed:
            assert {step.rows.get(label, label) for label in labels} & rows, f"{step.name} fills no row"


def test_every_configuration_has_a_digest():
    """Also those of the ladders that are priced under the marker only."""
    forms = [(entry, form) for entry in LIBRARY.items.values() for form in (entry.item.full, entry.item.reduced)]
    steps = [(entry, step) for entry, form in forms if form is not None for step in form.steps]
    assert len(steps) > 100 and all(len(digest(config_of(entry, step.config))) == 12 for entry, step in steps)


SMALLER = {
    form.smaller: entry for entry in LIBRARY.items.values() if (form := entry.item.reduced) is not None and form.smaller
}


@pytest.mark.parametrize("command", SMALLER)
def test_smaller_forms_are_commands_that_can_be_given(command):
    words = shlex.split(command)
    if words[:2] == ["linnet", "reproduce"]:
        assert LIBRARY.items[words[2], words[3]].item.reduced.device == "cpu"
        return
    assert words[:2] == ["linnet", "study"]
    values = override(read_yaml(ROOT / words[2]), words[4::2])
    assert set(words[3::2]) == {"--set"} and read_study(values).train["precision"] == "float32"
    head = (ROOT / words[2]).read_text(encoding="utf-8").partition("\nname:")[0]
    assert command in " ".join(head.replace("\\", "").replace("#", "").split()), "the head of the file has another one"


def test_without_a_gpu_the_error_names_the_smaller_form(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    entry = LIBRARY.items["004", "fig4.1"]
    with pytest.raises(ConfigError) as error:
        prepare(LIBRARY, [entry], Request(out=tmp_path))
    (line,) = error.value.problems
    assert line.startswith("004 fig4.1: needs a GPU") and line.endswith(entry.item.reduced.smaller)


def test_the_page_of_papers_is_written_from_the_items():
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert page == write_markdown(LIBRARY), f"run: {COMMAND}"


@pytest.mark.parametrize(
    "paper, name",
    [
        ("000", "table7"),
        ("000", "table11"),
        ("003", "table10"),
        pytest.param("000", "appendixC.3", marks=pytest.mark.reproduce),
        pytest.param("000", "fig1", marks=pytest.mark.reproduce),
        pytest.param("001", "table2", marks=pytest.mark.reproduce),
        pytest.param("001", "table5", marks=pytest.mark.reproduce),
        pytest.param("001", "fig5", marks=pytest.mark.reproduce),
    ],
)
def test_reduced_items_run(paper, name, tmp_path):
    """Each claim gets a verdict, each row of the steps is measured, and a second call changes nothing."""
    (entry,) = LIBRARY.find(paper, [name])
    request = Request(seeds=(0,), out=tmp_path)
    (work,) = prepare(LIBRARY, [entry], request)
    result = run(work)
    assert not result["skipped"] and not result["notes"]
    assert len(result["verdicts"]) == len(entry.item.claims)
    assert any("measured" in cell for row in result["rows"].values() for cell in row.values())
    if (paper, name) == ("000", "table11"):
        cells = {column: cell["measured"] for column, cell in result["rows"]["tnl-7b"].items()}
        at = [cells[f"easy_at_{length}"] for length in ("2k", "4k", "8k", "16k")]
        assert sum(at) / 4 == pytest.approx(cells["easy_average"])
        assert (sum(at[:2]) / 2, sum(at[:3]) / 3) == pytest.approx((cells["easy_to_4k"], cells["easy_to_8k"]))
    (again,) = prepare(LIBRARY, [entry], request)
    assert run(again) == result


DECIDED = [("002", "fig2"), ("002", "table8"), ("003", "table1"), ("003", "table2"), ("003", "table5")]


@pytest.mark.parametrize("key", DECIDED, ids=" ".join)
def test_each_claim_has_a_form_that_trains_its_rows(key, tmp_path):
    """Claims that no form decides say why (`untested`)."""
    entry = LIBRARY.items[key]
    cells = {scale: set() for scale in SCALES}
    for scale, found in cells.items():
        (work,) = prepare(LIBRARY, [entry], Request(scale=scale, out=tmp_path, planning=True))
        for job in work.jobs.values():
            found |= {cell for cell, _ in cells_of(entry.item.published, job.step, work.costs)}
    for claim in entry.item.claims:
        wanted = {(row, column) for row in claim.rows for column in claim.columns}
        assert any(wanted <= found for found in cells.values()), claim.text
    full = [
        claim for claim in entry.item.claims if claim.kind == "order" and not set(claim.columns) & {"accuracy", "loss"}
    ]
    assert all({(row, claim.columns[0]) for row in claim.rows} <= cells["full"] for claim in full)


def test_the_largest_denoisers_are_those_of_the_table(tmp_path):
    (work,) = prepare(LIBRARY, [LIBRARY.items["003", "table2"]], Request(scale="full", out=tmp_path, planning=True))
    trained = {
        label: (values["model"], values["steps"], values["batch_size"], values["optimizer"]["betas"])
        for label, values in work.jobs["train"].vary.items()
    }
    assert trained == {
        "lightnet-xl-2": ("lightnet-dit-xl", 800_000, 1024, [0.9, 0.98]),
        "dit-xl-2": ("dit-xl", 7_000_000, 256, [0.9, 0.999]),
    }
    drawn = work.jobs["guided"].values["samples"]
    assert drawn["count"] == 50_000 and drawn["settings"]["guidance"] == 1.5
