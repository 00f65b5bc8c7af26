"""`linnet mad report` and `linnet mad correlate`: what they write and print, and what they say about bad input."""

import html
import importlib.util
import json
import math
import re
import shlex
import webbrowser

import pytest
from mad_folders import rows, write_mad, write_rows
from typer.testing import CliRunner

from linnet.cli import app
from linnet.mad.results import read_results
from linnet.mad.scores import score
from linnet.report import shell

LEVELS = {
    "mad-hyena-swiglu": 0.50,
    "mad-mh-hyena-swiglu": 0.56,
    "mad-hyena-attention-swiglu": 0.62,
    "mad-mamba": 0.60,
    "mad-mamba-attention-swiglu": 0.72,
}


def call(*arguments):
    return CliRunner().invoke(app, ["mad", *map(str, arguments)])


@pytest.fixture
def scored(tmp_path):
    return write_mad(tmp_path / "scored", LEVELS)


@pytest.fixture
def studied(tmp_path):
    """The table of a study, in which two architectures have other names and one has no score."""
    lines = ["run,architecture,params_non_embedding,tokens,flops,loss"]
    for name, level in {**LEVELS, "tnl": 0.5}.items():
        name = name.removeprefix("mad-") if "mamba" in name else name
        for budget in (1e12, 3e12, 9e12, 2.69999997e13):
            for n in (5e3, 1e4, 2e4, 4e4, 8e4, 1.6e5, 3.2e5):
                d = budget / (6 * n)
                loss = 1.5 - level + 30 / n**0.35 + 200 / d**0.37
                lines.append(f"{name}-{n:g}-{budget:g},{name},{n},{d},{budget},{loss}")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "table.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "study"


PAIRS = ("--pair", "mad-mamba=mamba", "--pair", "mad-mamba-attention-swiglu = mamba-attention-swiglu")


@pytest.mark.usefixtures("no_pictures")
def test_report_prints_the_path_of_the_page(scored, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    result = call("report", scored, "--open")
    page = scored / "report" / "index.html"
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(page) and opened == [page.resolve().as_uri()]
    assert "mad-mamba-attention-swiglu" in page.read_text()


def test_report_elsewhere_and_as_the_published_implementation(scored, tmp_path):
    page = tmp_path / "elsewhere" / "scores.html"
    result = call("report", scored, "--out", page, "--legacy", "--metric", "macro_batch")
    assert result.exit_code == 0, result.output
    assert f"linnet mad report {scored} --out {page} --metric macro_batch --legacy" in page.read_text()
    first = page.read_bytes()
    call(*shlex.split(f"report {scored} --out {page} --metric macro_batch --legacy"))
    assert page.read_bytes() == first
    assert (page.parent / "scores.png").is_file() and not (scored / "report").exists()


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("nowhere",), "nowhere: no such folder"),
        ((".", "--metric", "acuracy"), "did you mean 'accuracy'"),
        ((".", "--out", "page"), "page/index.html"),
    ],
)
def test_report_of_what_is_no_folder(scored, monkeypatch, arguments, problem):
    monkeypatch.chdir(scored)
    result = call("report", *arguments)
    assert result.exit_code == 2 and problem in result.output and "Traceback" not in result.output


def test_correlate_prints_tables_and_its_page_says_what_draws_it_again(scored, studied, monkeypatch):
    """At the largest compute, which must not be rounded beyond the laws, with the pairs and the choice of scores."""
    arguments = ["--study", studied, "--bootstrap", 20, "--seed", 3, "--metric", "macro_batch", "--legacy", *PAIRS]
    result = call("correlate", scored, *arguments)
    assert result.exit_code == 0, result.output
    assert "compute-optimal loss at 2.7×10¹³" in result.stdout
    assert "mad-mamba = mamba" in result.stdout
    for group in ("all", "within families", "between families", "hyena", "fuzzy recall", "memorization"):
        assert group in result.stdout
    assert re.search("between families: 2 families.* 3 ", result.stdout)
    page = scored / "report" / "correlate.html"
    assert f"page: {page}" in result.stdout and f"linnet mad correlate {scored} --study {studied} " in page.read_text()
    assert (page.parent / "scaling.png").is_file() and (page.parent / "scaling-by-task.svg").is_file()

    monkeypatch.setattr(shell, "write_pictures", lambda folder, figure: None)  # they were written
    first = page.read_text()
    assert "−1.00" in first
    command = shlex.split(html.unescape(re.search(r"<code>(linnet mad correlate .*?)</code>", first)[1]))
    page.unlink()
    again = call(*command[2:])
    assert again.exit_code == 0 and "macro batch on the test split" in first
    shown = [re.sub(r"<script.*?</script>", "", text, flags=re.S) for text in (first, page.read_text())]
    assert shown[0] == shown[1] and "outside the data" not in shown[0]


@pytest.mark.usefixtures("no_pictures")
def test_correlate_by_loss_turns_the_sign_and_shows_perplexities(scored, studied):
    """The lower the evaluation loss on MAD the lower the loss at scale: +1."""
    arguments = ["--study", studied, "--at", "1e13", "--bootstrap", 0, "--metric", "loss", *PAIRS]
    found = json.loads(call("correlate", scored, *arguments, "--json").stdout)
    runs = [one for one in read_results(scored) if one.ended]
    best = {}
    for one in runs:
        key = (one.architecture, one.task, one.setting)
        if key not in best or one.validation_accuracy > best[key].validation_accuracy:
            best[key] = one
    tasks = {}
    for (name, task, _), one in best.items():
        tasks.setdefault(name, {}).setdefault(task, []).append(one.loss)
    for point in found["points"]:
        means = [sum(losses) / len(losses) for losses in tasks[point["architecture"]].values()]
        assert point["score"] == pytest.approx(sum(means) / len(means))
    assert found["overall"]["all"]["spearman"] == pytest.approx(1) and found["metric"] == "loss"
    result = call("correlate", scored, *arguments)
    first = min(found["points"], key=lambda point: point["loss"])
    row = next(line for line in result.stdout.splitlines() if f"{first['loss']:.4f}" in line)
    for value in (first["score"], first["loss"]):
        assert f"{value:.4f}" in row and f"{math.exp(value):.3g}" in row
    page = (scored / "report" / "correlate.html").read_text()
    assert "Near +1" in page and "Near +1" in result.stdout and "--metric loss" in page
    assert page.count("Perplexity") == 1 and "MAD perplexity" in page


def test_a_report_has_a_heatmap_of_losses_and_no_curves_of_them(scored):
    assert call("report", scored).exit_code == 0
    spec = re.search(r'id="spec-losses">(.*?)</script>', (scored / "report" / "index.html").read_text(), re.S)[1]
    spec = json.loads(spec.replace("<\\/", "</"))
    losses = {
        row["architecture"]: row["value"]
        for part in spec["datasets"].values()
        for row in part
        if row["task"] == "score"
    }
    expected = {name: one.score for name, one in score(read_results(scored), metric="loss").items()}
    assert losses == pytest.approx(expected, rel=1e-4)
    assert min(losses, key=losses.get) == "mad-mamba-attention-swiglu"
    assert list(expected) == sorted(expected), "by name, not by loss"
    assert (scored / "report" / "losses.png").is_file()
    result = call("report", scored, "--metric", "loss")
    assert result.exit_code == 2 and "'loss'" in result.output and "macro_batch" in result.output


def test_correlate_as_json(scored, studied):
    result = call("correlate", scored, "--study", studied, "--at", "1e13", "--bootstrap", 0, "--json", *PAIRS)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["compute"] == 1e13 and len(found["points"]) == 5
    assert found["overall"]["all"]["spearman"] == pytest.approx(-1) and found["overall"]["all"]["pearson"] < -0.99
    assert found["overall"]["all"]["pearson_interval"] is None
    assert not (scored / "report").exists(), "a page with numbers for programs only where it is asked for"
    assert set(found["tasks"]) >= {"compression", "fuzzy_recall"}


def test_a_table_that_is_cut_off_is_refused(scored):
    text = (scored / "mad.csv").read_text()
    (scored / "mad.csv").write_text(text.rstrip("\n"))
    result = call("report", scored)
    assert result.exit_code == 2 and "mad.csv: not a whole CSV table (the last line has no line end" in result.output


def test_correlate_with_too_few_common_architectures(scored, studied):
    write_rows(scored, [row for row in rows(LEVELS) if "hyena-attention" not in row["architecture"]])
    result = call("correlate", scored, "--study", studied)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "2 architectures" in result.output
    assert "the study" in result.output and "mad-mamba, mad-mamba-attention-swiglu\n" in result.output
    assert "mad-hyena-attention-swiglu, mamba, mamba-attention-swiglu, tnl" in result.output
    assert "--pair SCORED=STUDIED" in result.output


@pytest.mark.parametrize(
    "pairs, problem",
    [
        (("--pair", "mad-mamba"), "write SCORED=STUDIED"),
        (("--pair", "mad-mamba=a", "--pair", "mad-mamba=b"), "is paired with a already"),
        (("--pair", "mad-mamb=mamba"), "did you mean 'mad-mamba'"),
        (("--pair", "mad-mamba=mambo"), "did you mean 'mamba'"),
    ],
)
def test_correlate_with_bad_pairs(scored, studied, pairs, problem):
    result = call("correlate", scored, "--study", studied, *pairs)
    assert result.exit_code == 2 and problem in result.output and "Traceback" not in result.output


def test_all_that_is_wrong_with_a_correlation_is_said_at_once(tmp_path):
    wrong = ["--pair", "mad-mamba", "--at", "-1", "--out", tmp_path / "page", "--metric", "acuracy"]
    result = call("correlate", tmp_path / "unscored", "--study", tmp_path / "nowhere", *wrong)
    assert result.exit_code == 2 and "6 problems" in result.output
    for problem in ("unscored", "nowhere", "write SCORED=STUDIED", "--at -1: give FLOPs above zero", "index.html"):
        assert problem in result.output
    result = call("report", tmp_path / "unscored", *wrong[-4:])
    assert result.exit_code == 2 and "3 problems" in result.output


def test_whether_the_usual_page_can_be_written_is_asked_before_anything_is_fitted(scored, studied, monkeypatch):
    monkeypatch.setattr("linnet.mad.correlate.correlate", lambda *_, **__: pytest.fail("fitted"))
    (scored / "report" / "correlate.html").mkdir(parents=True)
    result = call("correlate", scored, "--study", studied, "--at", "-1")
    assert result.exit_code == 2 and "2 problems" in result.output
    assert "page" in result.output
    (scored / "report" / "correlate.html").rmdir()
    (scored / "report").rmdir()
    (scored / "report").write_text("")
    for verb in (["correlate", scored, "--study", studied], ["report", scored, "--metric", "acuracy"]):
        result = call(*verb)
        assert result.exit_code == 2 and "folder" in result.output


def test_what_draws_the_page_is_asked_for_before_anything_is_fitted(scored, studied, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "altair" else real(name))
    result = call("correlate", scored, "--study", studied, *PAIRS)
    assert result.exit_code == 2 and not result.stdout
    assert "altair: " in result.stderr and "--no-page" in result.stderr
    result = call("correlate", scored, "--study", studied, "--bootstrap", 0, "--no-page", *PAIRS)
    assert result.exit_code == 0 and "in-context recall" in result.stdout and not (scored / "report").exists()


@pytest.mark.parametrize("verb, words", [("report", "linnet mad report mad/core"), ("correlate", "--study")])
def test_help_teaches(verb, words):
    result = call(verb, "--help")
    assert result.exit_code == 0 and words in result.output
