"""The page of MAD scores: what it says and holds, that it needs no network, and that a browser draws it."""

import csv
import json
import math
import random
import re
import shutil
import subprocess

import numpy as np
import pytest
from mad_folders import rows, write_mad, write_rows, write_runs

from linnet.config import ConfigError
from linnet.laws.orders import order_of_means
from linnet.mad.page import write_mad_report
from linnet.mad.results import read_results
from linnet.mad.scores import score

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=20000 "
    "--window-size=1280,3000 --enable-logging=stderr"
).split()
TASKS = "in-context-recall fuzzy-recall noisy-recall selective-copying compression memorization".split()
FIGURES = {"scores", "losses", "score-against-size", *(f"difficulty-{task}" for task in TASKS)}
SIX = (
    "mad-attention-swiglu",
    "mad-hyena-swiglu",
    "mad-hyena-attention-swiglu",
    "mad-mh-hyena-swiglu",
    "mad-mamba",
    "mad-gla-swiglu",
)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Six architectures at all 66 settings with two seeds, one run of which diverged: (folder, page)."""
    folder = tmp_path_factory.mktemp("mad") / "full"
    found = rows(SIX, "full", seeds=(0, 1))
    found[1] |= {"status": "diverged", "accuracy": math.nan, "validation_accuracy": math.nan, "macro_batch": math.nan}
    return folder, write_mad_report(write_rows(folder, found))


@pytest.fixture
def write(monkeypatch):
    """Writes the page of a folder without the pictures, and returns its text and its specifications."""
    monkeypatch.setattr("linnet.report.shell.write_pictures", lambda folder, figure: None)
    return lambda folder, **options: read(write_mad_report(folder, **options))


def read(path):
    """The words of a page (without tags, entities in place) and the specifications of its figures."""
    source = path.read_text(encoding="utf-8")
    specs = re.findall(r'<script type="application/json" id="spec-([^"]+)">(.*?)</script>', source, re.S)
    words = re.sub(r"<(script|style)\b.*?</\1>", " ", source, flags=re.S)
    words = re.sub(r"</?(b|code|i|a|span)\b[^>]*>", "", words)
    words = " ".join(re.sub(r"<[^>]*>", " ", words).replace("\N{NO-BREAK SPACE}", " ").split())
    return words, {name: json.loads(text.replace("<\\/", "</")) for name, text in specs}


def data(spec):
    return [row for part in spec["datasets"].values() for row in part]


def test_page_and_pictures_are_where_they_were_promised(full):
    folder, page = full
    assert page == folder / "report" / "index.html" and page.stat().st_size < 2_500_000
    assert set(read(page)[1]) == FIGURES
    for name in FIGURES:
        assert (page.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (page.parent / f"{name}.svg").read_text().startswith("<svg")


def test_page_needs_no_network(full):
    source = re.sub(r"<script.*?</script>", "", full[1].read_text(), flags=re.S)
    assert not re.search(r'(src|href)="(https?:)?//', source) and "@import" not in source and "url(" not in source


def test_numbers_on_the_page_are_the_scores(full):
    folder, page = full
    scores = score(read_results(folder))
    words, specs = read(page)
    cells = data(specs["scores"])
    assert len(cells) == len(SIX) * 7
    for row in cells:
        one = scores[row["architecture"]]
        task = row["task"].replace("-", "_").replace(" ", "_")
        assert row["value"] == pytest.approx(one.score if task == "score" else one.tasks[task].score, rel=1e-5)
    assert "By guessing: " in words and re.search(r"0\.\d % \(memorization\)", words)
    first = next(iter(scores.values()))
    assert re.search(rf"{first.architecture} .*{100 * first.score:.1f} ± {100 * first.spread:.1f} %", words)
    assert "cannot be told apart by their score" in words, "two seeds"
    assert re.search("4,752 runs .*6 architectures .*66 settings .*6 tasks.* 2 seeds.* full", words)
    assert re.search(r"1 of 4,752 runs .*\(1 diverged\)", words) and "Not comparable" not in words
    with open(page.parent / "scores.csv", newline="") as file:
        assert {row["architecture"] for row in csv.DictReader(file)} == set(SIX)


def test_findings_have_numbers_or_say_what_is_missing(full):
    words, _ = read(full[1])
    told = "Striped architectures outperform uniform ones: too few pairs to tell. mad-hyena-attention-swiglu minus "
    assert told in words
    assert re.search(r"minus mad-hyena-swiglu is \+1[234]\.\d points; paper 004: 8\.1 points", words)
    assert re.search("0 of 1 striped .*highest score of a uniform one, that of mad-attention-swiglu", words)
    assert re.search("SwiGLU: not enough runs.*moe", words)


def test_difficulty_goes_from_easy_to_hard_with_the_baseline_first(full):
    specs = read(full[1])[1]
    spec = specs["difficulty-noisy-recall"]
    assert len(spec["concat"]) == 4
    orders = [panel["layer"][0]["encoding"]["x"]["sort"] for panel in spec["concat"]]
    assert ["16", "32", "64", "128"] in orders and ["128", "256", "512", "1,024"] in orders
    assert ["12.8", "6.4", "3.2", "1.6", "0.8"] in orders and ["0.2", "0.4", "0.6", "0.8"] in orders
    assert all("setting" in row and "learning rate" in row for row in data(spec))
    assert len(specs["difficulty-memorization"]["concat"]) == 1


def test_attention_alone_has_no_fixed_state(full):
    spec = read(full[1])[1]["score-against-size"]
    panels = spec["hconcat"]
    names = [panel["layer"][-1]["data"]["name"] for panel in panels]
    left, right = ({row["architecture"] for row in spec["datasets"][name]} for name in names)
    assert right - left == {"mad-attention-swiglu"}
    assert re.search("not in the first panel: mad-attention-swiglu", read(full[1])[0])


def test_where_all_do_as_well_nobody_leads(tmp_path, write):
    equal = {"accuracy": 1.0, "validation_accuracy": 1.0}
    found = [row | (equal if row["task"] == "memorization" else {}) for row in rows(SIX[:3])]
    words, _ = write(write_rows(tmp_path / "mad", found))
    [level] = re.findall(r"The highest cannot be told apart from others at (.*?)\. [A-Z]", words)
    assert re.search(r"compression .*memorization \(3 of 3, up to 100\.0 %\)", level)
    assert "The highest on each task" not in words and "One seed gives no interval" in words


def test_seeds_that_tell_architectures_apart_make_an_order(tmp_path, write):
    found = rows(SIX[:3], seeds=(0, 1, 2, 3))
    folder = write_rows(tmp_path / "mad", [row | level(row, {SIX[0]: 0.9, SIX[1]: 0.5, SIX[2]: 0.5}) for row in found])
    words, _ = write(folder)
    assert re.search(rf"{SIX[0]} has the highest score, 90\.\d ± \d\.\d %\.", words)
    assert re.search(rf"The highest on each task: {SIX[0]} at .*compression \(9\d\.\d %\)", words)
    told = score(read_results(folder)).order()
    assert told.apart == {(SIX[1], SIX[0]), (SIX[2], SIX[0])}


def level(row, levels):
    """The accuracies of a row near the level of its architecture; seeds differ by about a point."""
    noise = random.Random(f"{row['architecture']}{row['seed']}").gauss(0, 0.01)
    value = levels[row["architecture"]] + noise
    return {"accuracy": value, "validation_accuracy": value}


def test_seeds_of_equal_architectures_are_hardly_ever_ranked():
    generator, ranked = np.random.default_rng(0), 0
    for _ in range(200):
        values = generator.standard_normal((5, 3))
        errors = {str(n): (float(own.std(ddof=1) / 3**0.5), 2) for n, own in enumerate(values)}
        ranked += bool(order_of_means(dict(zip(errors, values.mean(1), strict=True)), errors).apart)
    assert ranked <= 17  # 5 %: 10 of 200, with 2.2 standard errors


def test_models_of_nearly_one_size_have_an_axis_that_tells_its_ticks_apart(tmp_path, write):
    found = [row | {"parameters": 109_000 + len(row["architecture"])} for row in rows(SIX[:2])]
    _, specs = write(write_rows(tmp_path / "mad", found))
    axis = specs["score-against-size"]["hconcat"][-1]["layer"][-1]["encoding"]["x"]["axis"]
    ticks = re.findall(r"'([^']+)'", axis["labelExpr"])
    assert 1 < len(ticks) == len(set(ticks))


def test_same_rows_give_the_same_bytes(tmp_path, monkeypatch):
    pages = []
    for part in "ab":
        write_mad(tmp_path / part / "mad", SIX[:2])
        monkeypatch.chdir(tmp_path / part)
        pages.append(write_mad_report("mad").resolve())
    assert "<code>linnet mad report mad</code>" in pages[0].read_text()
    one, two = (page.parent for page in pages)
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


def test_smoke_is_labelled_not_comparable(tmp_path, write):
    words, specs = write(write_mad(tmp_path / "smoke", SIX[:3], "smoke"))
    assert re.search(r"[Nn]ot comparable .*smoke score", words)
    assert "asterisk" in words
    assert set(specs) == {"scores", "losses", "score-against-size"}
    assert re.search("Heads .*not enough runs", words)
    totals = [row["text"] for row in data(specs["scores"]) if row["task"] == "score"]
    assert all(text.endswith("*") for text in totals)


def test_one_architecture_with_some_tasks_and_a_name_that_is_a_layout(tmp_path, write):
    name = "<b>+swiglu x2"
    found = rows({name: 0.5}, "core", tasks=["compression"])
    words, specs = write(write_rows(tmp_path / "one", found), out=tmp_path / "page" / "one.html")
    assert (
        re.search(r"&lt;b&gt;\+swiglu x2 scores (29|30)\.\d %\.", words)
        and "5 of 6 settings have no run that trained to the end" in words
    )
    assert re.search("leave out in-context recall, fuzzy recall, noisy recall, selective copying and memor", words)
    assert {row["architecture"] for row in data(specs["scores"])} == {name}


def test_scores_over_different_settings_are_not_ranked(tmp_path, write):
    """Half of a benchmark: one architecture has an easy task alone, and would lead all others with it."""
    easy, both = (rows({name: level}, "core", tasks=tasks) for name, level, tasks in (
        ("mad-mamba", 0.5, ["memorization"]), ("mad-gla-swiglu", 0.7, ["memorization", "compression"])))  # fmt: skip
    both = [row | ({"accuracy": 0.01} if row["task"] == "compression" else {}) for row in both]
    scores = score(read_results(write_rows(tmp_path / "part", easy + both)))
    assert max(scores, key=lambda name: scores[name].score) == "mad-mamba", "the mean over its one task"
    words, _ = write(tmp_path / "part")
    high = 100 * scores["mad-gla-swiglu"].tasks["memorization"].score
    assert "ranked" in words and "highest score" not in words
    assert f"cannot be told apart from others at memorization (2 of 2, up to {high:.1f} %)" in words
    words, specs = write(tmp_path / "part")
    dashes = [row for row in data(specs["scores"]) if row["value"] is None]
    assert {(row["architecture"], row["task"]) for row in dashes} == {
        ("mad-mamba", p) for p in ("score", "compression")
    }
    assert {row["text"] for row in dashes} == {"–"} and "dash" in words
    sizes = {row["architecture"] for row in data(specs["score-against-size"])}
    assert sizes == {"mad-gla-swiglu"}, "a mean over fewer tasks is not comparable"
    assert re.search("18 runs .*2 architectures .*2 settings .*2 tasks.* 1 seed.* core", words)
    assert "72 runs" in words
    apart = [row for row in easy + both if row["architecture"] == "mad-mamba" or row["task"] == "compression"]
    words, _ = write(write_rows(tmp_path / "apart", apart))
    assert "ranked" in words and "that all have" not in words and "on each task" not in words


def test_nothing_trained_to_its_end(tmp_path, write):
    found = [row | {"status": "diverged", "accuracy": math.nan} for row in rows(["mad-mamba"], "smoke")]
    words, specs = write(write_rows(tmp_path / "lost", found))
    assert re.search("mad-mamba has no score: .*12 runs", words)
    assert specs == {}


def test_legacy_is_told(tmp_path, write):
    words, _ = write(write_mad(tmp_path / "mad", SIX[:2]), legacy=True, metric="macro_batch")
    assert "test split" in words and "classes and batches" in words


def test_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="folder"):
        write_mad_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


PROBE = """
<script>
const timer = setInterval(async () => {
  if (document.body.dataset.drawn === undefined) return;
  clearInterval(timer);
  const pause = () => new Promise((resolve) => setTimeout(resolve, 300));
  const cells = () => [...document.querySelectorAll("#scores .mark-rect.role-mark path")];
  const strong = () => cells().filter((p) => Number(p.getAttribute("fill-opacity") ?? 1) > 0.5).length;
  const seen = {drawn: Number(document.body.dataset.drawn), cells: cells().length, before: strong()};
  const wide = (figure) => figure.scrollWidth - figure.clientWidth;
  seen.width = Math.max(...[...document.querySelectorAll(".figure")].map(wide));
  const fire = (type) => cells()[0].dispatchEvent(new PointerEvent(type, {bubbles: true, clientX: 1, clientY: 1}));
  fire("pointermove"); await pause();
  seen.tooltip = document.getElementById("vg-tooltip-element").textContent;
  fire("click"); await pause();
  seen.found = document.querySelector("tr.found")?.id;
  document.querySelector('.key button[data-name="mad-mamba"]').click(); await pause();
  seen.after = strong();
  const report = document.createElement("pre");
  report.id = "probe";
  report.textContent = JSON.stringify(seen);
  document.body.append(report);
}, 50);
</script>
"""


def test_a_browser_draws_it(full, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium here: install it to see the report drawn (apt-get install chromium)")
    body, _, end = full[1].read_text().rpartition("</body>")
    (tmp_path / "index.html").write_text(f"{body}{PROBE}</body>{end}")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [*command, (tmp_path / "index.html").as_uri()], capture_output=True, text=True, timeout=300, check=False
    )
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert probe, done.stderr[-2000:]
    seen = json.loads(probe[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert seen["drawn"] == len(FIGURES) and seen["cells"] == seen["before"] == len(SIX) * 7
    assert seen["after"] == 7 and seen["width"] <= 1
    assert seen["found"] == f"run-{SIX[0]}" and "accuracy" in seen["tooltip"]


def test_the_page_says_when_and_with_what_the_runs_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr("linnet.report.shell.write_pictures", lambda folder, figure: None)
    stamp = {"date": "2026-01-02T00:00:00+00:00", "environment": {"commit": "a" * 40, "device": "H200"}}
    folder = write_runs(tmp_path, [row | stamp for row in rows(["mad-mamba"])])
    text = write_mad_report(folder).read_text()
    assert f"Trained with</dt><dd>2026-01-02, commit {'a' * 12}, device H200" in text
