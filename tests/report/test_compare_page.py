"""The page of `linnet compare`: what it says about needles, tests and texts, and that a browser draws all of it."""

import dataclasses
import re
import shutil
import subprocess

import numpy as np
import pytest

from linnet.config import ConfigError
from linnet.evaluate.compare import compare, shared
from linnet.evaluate.needle_scores import needle_scores
from linnet.evaluate.results import Evaluation, Item, Result
from linnet.evaluate.retrieval.needle import NeedleConfig
from linnet.report.compare import Constants, write_comparison

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=20000 "
    "--window-size=1280,3000 --enable-logging=stderr"
).split()
LENGTHS = [100, 200, 300, 400]
FIGURES = {"needle-easy-grids", "needle-easy-lengths", "intervals-1", "contexts-1"}


def needles(grid) -> Evaluation:
    config = NeedleConfig(lengths=LENGTHS, depths=[0.0, 0.5, 1.0]).model_dump()
    grid = np.asarray(grid, dtype=float)
    cells = [Item(f"{n} tokens, {row}", grid[row, column]) for column, n in enumerate(LENGTHS) for row in range(3)]
    score = Result("needle-easy", "niah_score", needle_scores(grid).score, n=12)
    detail = {"config": config, "accuracy": grid.tolist()}
    return Evaluation("needle", {}, config, (Result.of_items("needle-easy", "accuracy", cells), score), detail)


def texts(shift: float, method: str) -> Evaluation:
    base = np.random.default_rng(0).normal(2.0, 0.3, 20)
    documents = [Item(f"{i}", float(value + shift), 100.0 + i) for i, value in enumerate(base)]
    contexts = [{"start": 2**i, "end": 2 ** (i + 1), "loss": 3.0 - 0.2 * i + shift, "tokens": 9} for i in range(5)]
    result = Result.of_items("text", "bits_per_byte", documents, "lower")
    return Evaluation(
        "text", {"tokenizer": "x"}, {"text": ["a <b>"], "method": method}, (result,), {"contexts": contexts}
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    ended = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 1]]
    rows = {"soft": [needles(np.ones((3, 4))), texts(0.0, "windowed")]}
    rows |= {"linear": [needles(ended), texts(0.1, "carried")], "nothing": [needles(np.zeros((3, 4)))]}
    groups = shared(rows)
    path = tmp_path_factory.mktemp("page") / "out" / "index.html"
    return write_comparison(groups, compare(groups), path, command="linnet compare soft linear nothing")


def test_it_says_where_recall_ends(page):
    text = re.sub(r"<[^>]+>", "", page.read_text().split("<script")[0])
    assert re.search("soft .*100% .* 400 tokens", text)
    assert re.search("linear .* 200 tokens.* 300 .* 0% .*50%", text)
    assert re.search("nothing .*50% .* 100 tokens", text)
    assert (
        "the NIAH scores have one order under all 12 choices" in text and "the tests of the accuracy say which" in text
    )


def test_it_shows_constants_tests_and_what_is_lacking(page):
    html = page.read_text()
    linear = needle_scores([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 1]], depth_ratio=1.2, length_ratio=1.2).score
    assert f"{linear:.4f}" in html and "NIAH score, found from 25%" in html
    assert "a &lt;b&gt;" in html and "<b>soft</b> has" in html
    assert "soft windowed, linear carried" in html
    for name in FIGURES:
        assert f'id="{name}"' in html and (page.parent / f"{name}.png").stat().st_size > 5000
        assert (page.parent / f"{name}.svg").is_file()


def test_models_that_are_level_have_no_leader(tmp_path):
    groups = shared({name: [texts(0.0, "carried")] for name in ("one", "other")})
    html = write_comparison(groups, compare(groups), tmp_path / "level.html").read_text().split("<script")[0]
    assert re.search(r"<b>one</b> \([^)]*\)\) and <b>other</b> .* cannot be told apart by their bits per byte", html)
    assert "<b>one</b> has" not in html and not re.search(r"<td[^>]*><b>", html)


def test_only_tested_differences_make_an_order(tmp_path):
    groups = shared({name: [texts(shift, "carried")] for name, shift in (("a", 0.0), ("b", 0.0), ("c", 0.5))})
    [found] = compare(groups)
    assert found.order.apart == {("a", "c"), ("b", "c")} and found.best is None
    html = write_comparison(groups, [found], tmp_path / "three.html").read_text()
    assert (
        "<b>a</b> has the lowest bits per byte seen" in html
        and "that of <b>c</b> is higher, that of <b>b</b> cannot" in html
    )
    untested = dataclasses.replace(found, differences=())
    assert untested.order.apart == frozenset() and untested.best is None


def test_a_page_takes_the_place_of_another_when_it_is_whole(tmp_path):
    groups = shared({"one": [texts(0.0, "carried")], "other": [texts(0.1, "carried")]})
    page = write_comparison(groups, compare(groups), tmp_path / "page.html", command="before")
    (tmp_path / "reader").hardlink_to(page)
    before = page.read_text()
    assert write_comparison(groups, compare(groups), page, command="after").read_text() != before
    assert (tmp_path / "reader").read_text() == before


def quiz(right: int) -> Evaluation:
    """So many of forty answers right, of which guessing gets ten."""
    items = [Item(f"{i}", float(i < right)) for i in range(40)]
    detail = {"chance": [["quiz", "acc", 0.25]]}
    return Evaluation("tasks", {}, {"tasks": ["quiz"]}, (Result.of_items("quiz", "acc", items),), detail)


def test_a_leader_that_guesses_is_not_called_best(tmp_path):
    groups = shared({"one": [quiz(12)], "other": [quiz(9)]})  # 0.3 of 40 answers: guessing lies in the interval
    html = write_comparison(groups, compare(groups), tmp_path / "guess.html").read_text()
    assert re.search("quiz: .*acc 0.2500", html)
    assert "<b>one</b> has" not in html
    assert '<div class="fine">guessing has 0.2500</div>' in html
    groups = shared({"one": [quiz(38)], "other": [quiz(9)]})
    html = write_comparison(groups, compare(groups), tmp_path / "know.html").read_text()
    assert re.search(r"<b>one</b> has the highest acc, <b>0.9500 \([^)]*\)</b>; guessing has 0.2500", html)
    assert '"task":"quiz: acc","value":0.25}' in html  # the mark of guessing in the figure
    assert "Grey lines are guessing" in html


def test_the_figure_shows_the_metric_that_is_tested(tmp_path):
    def asked(right) -> Evaluation:
        items = [Item(f"{i}", float(i in right)) for i in range(8)]
        results = tuple(Result.of_items("quiz", metric, items) for metric in ("acc", "acc_norm"))
        return Evaluation("tasks", {}, {"tasks": ["quiz"]}, results, {"shown": [["quiz", "acc_norm"]]})

    groups = shared({"one": [asked({0, 1})], "other": [asked({0, 1, 2})]})
    write_comparison(groups, compare(groups), tmp_path / "index.html")
    assert "quiz: acc norm" in (tmp_path / "intervals-0.svg").read_text()


def test_too_few_items_for_a_difference_are_told(tmp_path):
    """Five answers that all differ give p = 2 / 2 ** 5 = 0.0625, six 0.03."""
    for n in (5, 6):
        items = [[Item(f"{i}", float(right)) for i in range(n)] for right in (0, 1)]
        one, other = (Evaluation("tasks", {}, {"tasks": ["q"]}, (Result.of_items("q", "acc", part),)) for part in items)
        groups = shared({"one": [one], "other": [other]})
        comparisons = compare(groups)
        assert (comparisons[0].differences[0].p < 0.05) == (n == 6)
        html = write_comparison(groups, comparisons, tmp_path / f"{n}.html").read_text()
        assert bool(re.search("q: 5 items.* 6[ ,]", html)) == (n == 5)


def test_other_constants_are_shown(page, tmp_path):
    groups = shared({"linear": [needles([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 1]])]})
    constants = Constants(depth_ratio=2.0, length_ratio=1.0, threshold=0.9)
    html = write_comparison(groups, compare(groups), tmp_path / "one.html", constants=constants).read_text()
    assert re.search("2 .{1,9}step of depth and 1 .{1,9}step of length", html) and "90%" in html
    assert re.search("<b>linear</b> .*<b>100 tokens</b>", html)


def test_a_page_whose_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder"):
        write_comparison([], [], tmp_path / "file" / "out" / "index.html")


def test_a_page_is_an_html_file(tmp_path):
    with pytest.raises(ConfigError, match="page"):
        write_comparison([], [], tmp_path / "page")


def test_a_browser_draws_every_figure_without_a_complaint(page, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium here: install it to see the page drawn (apt-get install chromium)")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert f'data-drawn="{len(FIGURES)}"' in done.stdout
    assert done.stdout.count("<svg") >= len(FIGURES)


def test_the_page_says_when_and_with_what_models_were_made(tmp_path):
    stamps = [{"date": f"2026-01-0{day}T00:00:00+00:00", "environment": {"device": "H200"}} for day in (2, 3)]
    about = {"trained": stamps[0], "evaluated": stamps[1]}
    one = Evaluation("tasks", about, {"tasks": ["quiz"]}, quiz(3).results, quiz(3).detail)
    groups = shared({"mine": [one], "old": [quiz(4)]})
    text = write_comparison(groups, compare(groups), tmp_path / "page.html").read_text()
    assert "Trained with</dt><dd>2026-01-02, device H200" in text
    assert "Evaluated with</dt><dd>2026-01-03, device H200" in text
