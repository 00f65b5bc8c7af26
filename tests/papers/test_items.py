"""The items of the papers: none is missing, and what they print agrees with itself."""

import math
import operator

import pytest
from reproduce_items import LIBRARY

from linnet.papers.item import SCALES, Published
from linnet.papers.prepare import prepare
from linnet.papers.table import Request

ITEMS = {key: entry.item for key, entry in LIBRARY.items.items()}


def tables(*numbers):
    return tuple(f"table{n}" for n in numbers)


# Every table, figure, finding and appendix that has an item, by paper.
WANTED = {
    "000": ("eq1-3", "fig1", "fig2", *tables(*range(1, 14)), "appendixB.1", "appendixC.3", "appendixC.4"),
    "001": (*tables(*range(1, 13)), "fig1-left", "fig1-right", "fig4", "fig5", "fig6", "fig7", "eq38-42"),
    "002": (*tables(1, 2, 3, 5, 6, 7, 8), "fig2", "fig3", "fig4", "fig5"),
    "003": (*tables(*range(1, 9), 10, 11, 12), "fig1", "fig3"),
    "004": (
        *(
            "fig3.7",
            "fig3.7-waterfall",
            "figB.1",
            "figB.2",
            "figB.3",
            "figB.4",
            "figB.5",
            "figB.6",
            "figB.7",
            "figB.8",
            "figB.9",
        ),
        *("finding1", "finding2", "finding3", "finding5", "finding6", "fig4.1", "fig4.2", "fig4.3", "fig4.4", "fig5.1"),
        *("figC.1", "figD.1", "figD.2", "figD.3", *tables("C.1", "C.2", "C.3", "C.4", "D.1"), "appendixC.4"),
    ),
}
# Rows of a figure whose numbers do not belong to one name of the paper share an item: 004's findings 7, 8 and 9 are
# those of figures 4.2, 4.3 and 5.1.


@pytest.mark.parametrize("paper", WANTED)
def test_no_item_is_missing(paper):
    found = {name for of, name in ITEMS if of == paper}
    assert found == set(WANTED[paper])
    assert set(LIBRARY.papers[paper].order) == found


COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def items_of(paper: str) -> dict:
    """The items of a paper by their keys, which an assertion names. A case of its own for each would take longer."""
    return {key: item for key, item in ITEMS.items() if key[0] == paper}


@pytest.mark.parametrize("paper", WANTED)
def test_claims_hold_in_the_printed_numbers(paper):
    """A claim that the paper's own table contradicts is a mistake of ours, or belongs into a note."""
    for key, item in items_of(paper).items():
        for claim in item.claims:
            for column in claim.columns:
                values = [item.published.expected(one, column) if isinstance(one, str) else one for one in claim.terms]
                for left, sign, right in zip(values, claim.operators, values[1:], strict=False):
                    holds = left is None or right is None or COMPARE[sign](left, right)
                    assert holds, f"{key}, {claim.text}: {left}, {right}"


@pytest.mark.parametrize("paper", WANTED)
def test_forms_say_what_they_are(paper):
    for key, item in items_of(paper).items():
        for form in filter(None, (item.full, item.reduced)):
            assert form.skip or form.minutes is not None, (key, "minutes")
        if item.reduced and item.reduced.steps and any(step.verb != "models" for step in item.reduced.steps):
            assert item.reduced.differs, (key, "differs")
        if item.published and any(item.published.rows.values()) and item.state != "printed":
            assert item.claims or key in UNCLAIMED, (key, "claims")


def cells(form, published):
    """Returns the (row, column) that the steps of a form can give, as far as the item names them."""
    found, varied = set(), {step.name: step.vary or [step.name] for step in form.steps if step.verb == "train"}
    for step in form.steps:
        rows = {step.rows.get(label, label) for label in varied.get(step.of or step.name, ())} | {*step.rows.values()}
        columns = {*step.columns}
        if step.verb != "evaluate":
            columns |= {*published.columns} if step.verb in ("mad", "models") else {"loss", "perplexity"}
        found |= {(row, column) for row in rows or published.rows for column in columns}
    return found


def needed(claim, published):
    """The cells of a claim; `every row` stands for those with a printed number."""
    every = [(row, column) for row in claim.rows or published.rows for column in claim.columns]
    return {cell for cell in every if claim.rows or published.expected(*cell) is not None}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("paper", ["000", "001", "002", "003"])
def test_the_steps_of_a_form_decide_a_claim(paper, scale):
    """A claim needs all of its rows, so one that names rows of every size is not run in a form of few sizes."""
    for key, item in items_of(paper).items():
        form, claims = item.form(scale), [claim for claim in item.claims if not claim.untested]
        if form is None or not form.steps or not claims:
            continue
        measured = cells(form, item.published)
        decided = [claim for claim in claims if needed(claim, item.published) <= measured]
        assert decided, f"{key}: no claim has all of its rows and columns in the steps of the form"


@pytest.mark.parametrize("name", tables(4, 5, 6, 8, 9, 10, 11, 12, 13))
def test_a_full_form_of_000_measures_every_printed_column(name):
    item = ITEMS["000", name]
    printed = {column for row in item.published.rows.values() for column in row}
    named = {column for step in item.full.steps for column in step.columns}
    assert printed - named <= {"d_model", "layers"}  # columns of the study's own table


@pytest.mark.parametrize("key", [key for key in ITEMS if ITEMS[key].state == "complete"], ids=" ".join)
def test_a_complete_item_has_both_forms_or_shows_all_by_tests_and_commands(key):
    item = ITEMS[key]
    forms = [bool(form and form.steps) for form in (item.full, item.reduced)]
    assert all(forms) or (not any(forms) and not item.claims and (item.tests or item.commands))


UNCLAIMED = {("004", name) for name in tables("C.1", "C.3", "C.4")}  # sizes and settings, which claim nothing

CSR = ("boolq", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")
SIX = CSR[1:]
SCROLLS = tuple(f"{task}_{score}" for task in ("govreport", "summscreen", "qmsum") for score in ("r1", "r2", "rl"))
SCROLLS += ("qasper", "narrativeqa", "quality", "contractnli")
LRA = ("listops", "text", "retrieval", "image", "pathfinder", "path_x")
GLUE = ("mnli", "mnli_mm", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")
MEANS = [
    *(("000", f"table{n}", "csr", CSR, 7, 0.0075) for n in (4, 5, 6)),
    *(("000", f"table{n}", "scrolls", SCROLLS, None, 0.0065) for n in (8, 9, 10)),
    ("001", "table3", "scrolls", SCROLLS, None, 0.0065),
    ("002", "table6", "average", SIX, 6, 0.034),  # Mamba's 50.20 is that of another paper
    ("003", "table7", "average", SIX, 6, 0.0065),
    ("002", "table7", "average", LRA, 6, 0.0065),
    ("003", "table5", "glue", GLUE, 9, 0.051),
]


@pytest.mark.parametrize("paper, name, mean, parts, count, margin", MEANS, ids=lambda value: str(value)[:12])
def test_averages_are_those_of_their_rows(paper, name, mean, parts, count, margin):
    """So that no digit of a row was lost on the way here. Without `count`, missing numbers are left out of the mean."""
    published = ITEMS[paper, name].published
    for row, cells in published.rows.items():
        values = [published.expected(row, part) for part in parts if part in cells]
        if mean in cells:
            average = sum(values) / (count or len(values))
            assert average == pytest.approx(published.expected(row, mean), abs=margin), row


@pytest.mark.parametrize("name", tables(4, 5, 6, 7, 8, 9, 11, 12))
def test_losses_of_001_are_in_bits(name):
    published = ITEMS["001", name].published
    for row in published.rows:
        ratio = published.expected(row, "perplexity") / 2 ** published.expected(row, "loss")
        assert 1.0015 < ratio < 1.005, row


@pytest.mark.parametrize("paper", WANTED)
def test_tolerances_are_those_of_every_table(paper):
    """Perplexity 2 % (its loss in bits accordingly), parameters 0.25 %, accuracy and scores of the Arena one point."""
    tables = {key: item.published for key, item in items_of(paper).items() if item.published}
    for key, column in [(key, column) for key, published in tables.items() for column in published.tolerance]:
        bound, unit = tables[key].tolerance[column], tables[key].columns[column]
        if "param" in column:
            assert bound == "0.25 %", (key, column)
        elif column == "loss":
            assert unit.startswith("bits") and bound == pytest.approx(math.log2(1.02), abs=5e-5), key
        elif "ppl" in column or "perplexity" in column:
            assert bound == "2 %", (key, column)
        else:
            points = "accuracy" in f"{column} {unit}" or key == ("002", "table7")
            assert bound == (1.0 if points else "digits"), (key, column)


@pytest.mark.parametrize(
    "printed, near, off",
    [("2.300", 2.3004, 2.3006), (1e-5, 1.4e-5, 1.6e-5), ("1.2e-3", 1.249e-3, 1.251e-3), (12, 12.4, 12.6),
     ("3.0e3", 3040, 3060)],
)  # fmt: skip
def test_digits_are_those_that_are_printed_whatever_the_notation(printed, near, off):
    published = Published(source="a", columns={"x": ""}, rows={"a": {"x": printed}}, tolerance={"x": "digits"})
    assert [published.inside("a", "x", value) for value in (near, off)] == [True, False]


def test_the_same_numbers_are_the_same_in_every_table():
    first = ITEMS["001", "table1"].published.rows
    for key in (("002", "table5"), ("003", "table3")):
        other = ITEMS[key].published.rows
        shared = set(first) & set(other)
        assert len(shared) >= 12
        assert all(first[row] == other[row] for row in shared)
    ours, theirs = ITEMS["002", "table6"].published.rows, ITEMS["003", "table7"].published.rows
    assert all(ours[row] == theirs[row] for row in set(ours) & set(theirs))
    scrolls, all_tasks = ITEMS["000", "table8"].published, ITEMS["000", "table4"].published
    needles = ITEMS["000", "table11"].published
    for row in all_tasks.rows:
        assert all_tasks.expected(row, "scrolls") == scrolls.expected(row, "scrolls"), row
        assert all_tasks.expected(row, "niah") == needles.expected(row, "easy_weighted"), row


def test_mixed_rows_of_000():
    """The rows of 1B in Table 4 take some columns from one row of Table 5 and some from another (an erratum)."""
    four, five = ITEMS["000", "table4"].published.rows, ITEMS["000", "table5"].published.rows
    for name in ("llama", "cosformer2"):
        for column in (*CSR, "csr", "wikitext", "lambada"):
            assert four[f"{name}-1b"][column] == five[f"{name}-2048"][column]
        for column in ("niah", "scrolls"):
            assert four[f"{name}-1b"][column] == five[f"{name}-1536"][column]


@pytest.mark.parametrize("key, undecided", [(("000", "table4"), 26), (("001", "table3"), 2)], ids=str)
def test_a_plan_knows_which_claims_an_evaluation_leaves_open(key, undecided, tmp_path):
    """Rows are those of the step that it scores; of tasks, whose numbers are not known before, the named columns."""
    (work,) = prepare(LIBRARY, [LIBRARY.items[key]], Request(out=tmp_path, planning=True))
    total = len(ITEMS[key].claims)
    assert any(line.startswith(f"{undecided} of {total} claims name rows that") for line in work.notes), work.notes
