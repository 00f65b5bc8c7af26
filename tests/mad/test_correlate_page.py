"""The page of scores against compute-optimal loss: its points, its intervals, its words."""

import dataclasses
import json
import re

import pytest

from linnet.mad.correlate import Correlation, Correlations, Point
from linnet.mad.page.correlate import Families, headlines, scatter, write_correlate_page


def correlations():
    tasks = {"compression": 0.3, "fuzzy_recall": 0.5}
    points = [
        Point("mad-hyena-swiglu", "hyena", "hyena", 0.5, tasks, 3.0, (2.9, 3.1), False, 0.01),
        Point("mad-mh-hyena-swiglu", "mad-mh-hyena-swiglu", "hyena", 0.6, tasks, 2.8, (2.7, 2.9), False),
        Point("mad-mamba", "mamba", "mamba", 0.7, tasks, 2.6, None, True, 0.02),
    ]
    points[2] = Point(*[*vars(points[2]).values()][:4], {"compression": 0.6}, 2.6, None, True, 0.02)
    overall = {
        "all": Correlation("all", 3, -0.99, -1.0, None, (-1.0, -0.4)),
        "within families": Correlation("within families", 2, refused="no family has enough architectures"),
    }
    alone = {"compression": Correlation("compression", 3, -0.8, -0.7)}
    alone["fuzzy_recall"] = Correlation("fuzzy_recall", 2, refused="2 architectures; 3 are needed")
    return Correlations(1e13, "isoflop", points, overall, alone, ["mind the gap"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mad") / "core"
    page = write_correlate_page(correlations(), folder, "studies/ladder")
    source = page.read_text(encoding="utf-8")
    specs = re.findall(r'<script type="application/json" id="spec-([^"]+)">(.*?)</script>', source, re.S)
    words = re.sub(r"</?(b|code|i|a|span)\b[^>]*>", "", re.sub(r"<(script|style)\b.*?</\1>", " ", source, flags=re.S))
    words = " ".join(re.sub(r"<[^>]*>", " ", words).replace("\N{NO-BREAK SPACE}", " ").split())
    return page, words, {name: json.loads(text.replace("<\\/", "</")) for name, text in specs}


def test_points_intervals_and_families(made):
    page, _, specs = made
    assert page.name == "correlate.html" and set(specs) == {"scaling", "scaling-by-task"}
    assert (page.parent / "scaling.png").read_bytes().startswith(b"\x89PNG")
    named = {row["name"]: row for part in specs["scaling"]["datasets"].values() for row in part if "name" in row}
    first, last = named["mad-hyena-swiglu"], named["mad-mamba"]
    assert (first["score"], first["loss"], first["low"], first["high"]) == (0.5, 3.0, 2.9, 3.1)
    assert (first["left"], first["right"]) == (0.49, 0.51) and first["architecture"] == first["family"] == "hyena"
    assert (last["low"], last["high"]) == (2.6, 2.6) and last["beyond"] and "extrapolated" in last["law"]
    line = [row for part in specs["scaling"]["datasets"].values() for row in part if "name" not in row]
    assert [(row["score"], pytest.approx(row["loss"])) for row in line] == [(0.5, 3.0), (0.7, 2.6)]


def test_each_task_has_a_panel_of_those_that_have_it(made):
    spec = made[2]["scaling-by-task"]
    titles = [panel["title"] for panel in spec["concat"]]
    assert titles == ["compression: rank −0.70", "fuzzy recall"]
    counts = [len(spec["datasets"][panel["layer"][-1]["data"]["name"]]) for panel in spec["concat"]]
    assert counts == [1, 2], "the last layer of a panel: hollow points where any are, else the filled ones"


def test_words(made):
    words = made[1]
    assert re.search("3 architectures .*2 families.* 10¹³ FLOPs", words)
    assert re.search(r"\(3\).* −1\.00 \(95 %: −1\.00 to −0\.40\).* −0\.99", words)
    assert "Within families" in words
    assert "Of single tasks" not in words, "one has a number"
    assert "Mind the gap." in words and "Hollow points: the law is extrapolated there." in words
    assert "Bars: 95 % of the fit up and down, one standard deviation over seeds to the sides." in words
    plain = [dataclasses.replace(point, beyond=False, spread=None) for point in correlations().points]
    figure = scatter(dataclasses.replace(correlations(), points=plain), Families.of(correlations()))
    assert "Hollow" not in figure.caption and "over seeds" not in figure.caption and "95 %" in figure.caption
    both = correlations()
    both.tasks["fuzzy_recall"] = Correlation("fuzzy_recall", 3, -0.5, -0.4)
    assert headlines(both)[-1] == "How much single tasks tell cannot be told apart: rank −0.70 to −0.40."
    for task, ends in (("compression", (-0.8, -0.6)), ("fuzzy_recall", (-0.5, -0.3))):
        both.tasks[task] = dataclasses.replace(both.tasks[task], spearman_interval=ends)
    last = headlines(both)[-1]
    assert last == "Of single tasks <b>compression</b> (rank −0.70) tells more than <b>fuzzy recall</b> (−0.40)."
    assert f"linnet mad correlate {made[0].parents[1]} --study studies/ladder --at 1e+13 --pair" in words
    assert "mad-mamba mamba mamba 70.0 2.6" in words
    source = re.sub(r"<script.*?</script>", "", made[0].read_text(encoding="utf-8"), flags=re.S)
    assert not re.search(r'(src|href)="(https?:)?//', source)


def test_architectures_stand_by_name_because_an_order_by_the_loss_would_be_a_ranking(made):
    table = re.search(r'<table id="points".*?</table>', made[0].read_text(encoding="utf-8"), re.S)[0]
    rows = re.findall(r"<tr><td>(mad-[\w-]+)</td>", table)
    assert rows == sorted(rows) and len(rows) == 3
