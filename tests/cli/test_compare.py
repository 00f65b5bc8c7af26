"""`linnet compare`: evaluations of small models side by side, and what it says when there is nothing to compare."""

import json
import re
import shlex
import shutil
from html import unescape

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.data import ByteTokenizer
from linnet.evaluate.compare import command
from linnet.evaluate.results import read_evaluations
from linnet.models import build_model, family
from linnet.runs.model import save_model

NEEDLES = ("--lengths", "300:500:3", "--depths", 3, "--scoring", "choice", "--digits", 2)


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), terminal_width=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three models: two with texts and needles in common, one with a text of its own, one without evaluations."""
    path = tmp_path_factory.mktemp("compared")
    (path / "a.jsonl").write_text("".join(json.dumps({"text": f"some text, number {i} " * 9}) + "\n" for i in range(6)))
    (path / "b.txt").write_text("another text\n" * 20)
    for number, name in enumerate(("tnl", "llama", "alone", "none")):
        config = family("llama" if name == "llama" else "tnl")(32, 2, vocab_size=256)
        save_model(path / name, config, build_model(config, seed=number).state_dict(), ByteTokenizer())
    for name in ("tnl", "llama"):
        for arguments in (("text", path / name, path / "a.jsonl"), ("needle", path / name, *NEEDLES)):
            result = call("evaluate", *arguments)
            assert result.exit_code == 0, result.output
    assert call("evaluate", "text", path / "alone", path / "b.txt").exit_code == 0
    return path


def test_json_has_every_metric_with_intervals_and_tests(folder):
    result = call("compare", folder / "tnl", folder / "llama", "--json")
    assert result.exit_code == 0, result.output
    found = {(one["task"], one["metric"]): one for one in json.loads(result.stdout)}
    bits, cells = found["text", "bits_per_byte"], found["needle-easy", "accuracy"]
    assert bits["n"] == 6 and cells["n"] == 9
    assert [number["name"] for number in bits["numbers"]] == ["tnl", "llama"]
    for number, run in zip(bits["numbers"], ("tnl", "llama"), strict=True):
        [kept] = [e for e in read_evaluations(folder / run) if e.kind == "text"]
        assert number["value"] == pytest.approx(kept.results[0].value)
        assert number["interval"][0] <= number["value"] <= number["interval"][1]
    [difference] = bits["differences"]
    assert difference["value"] == pytest.approx(bits["numbers"][0]["value"] - bits["numbers"][1]["value"])
    assert 1 / 32 <= difference["p"] <= difference["adjusted"] <= 1
    assert not found["text", "perplexity"]["differences"]  # the same scores in another unit
    assert found["needle-easy", "niah_score"]["n"] == 0


def test_the_table_and_the_page(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("compare", folder / "tnl", folder / "llama", "--threshold", 0.25)
    assert result.exit_code == 0, result.output
    for part in (
        "bits per byte",
        "adjusted",
        "needle: easy, 3 lengths up to 500 tokens",
        "The method differs",
        "other seeds",
    ):
        assert part in result.stdout, result.stdout
    assert re.search(r"guessing.*\nneedle-easy +accuracy +9 +0\.1000 ", result.stdout), result.stdout
    page = (tmp_path / "comparison" / "index.html").read_text()
    assert "comparison/index.html" in result.stdout
    for part in (
        "Needles: needle-easy",
        "from 25%",
        "Loss by context",
        "NIAH score, found from 100%",
        "minus",
        "other seeds",
    ):
        assert part in page, part
    pictures = {path.name for path in (tmp_path / "comparison").glob("*.png")}
    assert pictures == {"needle-easy-grids.png", "needle-easy-lengths.png", "intervals-1.png", "contexts-1.png"} or (
        pictures == {"needle-easy-1-grids.png", "needle-easy-1-lengths.png", "intervals-0.png", "contexts-0.png"}
    )


def test_the_page_says_the_command_that_makes_it_again(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my runs").symlink_to(folder)
    arguments = ["my runs/tnl", "my runs/llama", "--out", "a b/page.html", "--depth-ratio", 1.5]
    assert call("compare", *arguments).exit_code == 0
    page = tmp_path / "a b" / "page.html"
    before = page.read_text()
    commands = set(re.findall(r"<code>(linnet compare .*?)</code>", before))
    assert len(commands) == 1
    page.unlink()
    again = call(*shlex.split(unescape(commands.pop()))[1:])
    assert again.exit_code == 0, again.output
    assert page.read_text() == before and re.search(r"1\.5 .{1,9}step of depth", before)


def test_a_damaged_record_is_left_out_and_named(folder, tmp_path):
    for name in ("tnl", "llama"):
        shutil.copytree(folder / name, tmp_path / name)
    torn = tmp_path / "llama" / "evaluations" / "torn.json"
    torn.write_text("{")
    runs = (tmp_path / "tnl", tmp_path / "llama")
    result = call("compare", *runs, "--out", tmp_path / "page.html")
    assert result.exit_code == 0 and f"{torn}: " in result.stderr
    assert "bits per byte" in result.stdout and f"Left out: {torn}" in (tmp_path / "page.html").read_text()
    assert json.loads(call("compare", *runs, "--json").stdout)
    for path in torn.parent.glob("*-*.json"):
        path.unlink()
    result = call("compare", *runs)
    assert result.exit_code == 2
    assert "llama: " in result.output and "torn.json: " in result.output


@pytest.mark.parametrize(
    "out, message", [("file/index.html", "is a file"), ("page.txt", "name a page"), ("folder.html", "is a folder")]
)
def test_a_page_that_cannot_be_written_is_told_before_any_work(tmp_path, monkeypatch, out, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    result = call("compare", "missing", "--out", out, "--length-ratio", -1)
    assert result.exit_code == 2 and message in result.output and re.search("--length-ratio: .*-1", result.output)
    assert "missing" not in result.output  # nothing was read yet
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.html"]


def test_long_names_take_no_number_its_place(folder, tmp_path):
    """The output has 80 columns if it is not a terminal."""
    names = {"tnl": "a-run-with-a-very-long-name-of-its-layers-410m", "llama": "another-long-name-that-says-all-410m"}
    for name, long in names.items():
        shutil.copytree(folder / name, tmp_path / long)
    shown = call("compare", *(tmp_path / long for long in names.values()), "--no-page").stdout
    assert "may be chance" in shown and "…" not in shown, shown
    whole = shown.replace("\n", "").replace(" ", "")
    assert all(long in whole for long in names.values()), shown


def test_one_model_alone_has_a_table_and_no_tests(folder):
    result = call("compare", folder / "tnl", "--no-page")
    assert result.exit_code == 0 and "bits per byte" in result.stdout
    assert "adjusted" not in result.stdout and "other seeds" not in result.stdout


def test_a_model_that_lacks_one_is_told_how_to_get_it(folder):
    result = call("compare", folder / "tnl", folder / "llama", folder / "alone", "--no-page")
    assert result.exit_code == 0, result.output
    assert (
        f"alone has none of these; run: linnet evaluate text {folder / 'alone'} {folder / 'a.jsonl'}" in result.stdout
    )


def test_the_commands_make_the_same_evaluation_again(folder):
    for evaluation in read_evaluations(folder / "tnl"):
        before = {path.name for path in (folder / "tnl" / "evaluations").iterdir()}
        arguments = command(evaluation, str(folder / "tnl")).split()[1:]
        assert call(*arguments).exit_code == 0
        assert {path.name for path in (folder / "tnl" / "evaluations").iterdir()} == before


def test_names_are_as_short_as_they_can_be(folder, tmp_path):
    for name in ("a-0123456789ab", "b-0123456789ab", "b-ba9876543210"):
        shutil.copytree(folder / "tnl", tmp_path / name)
    result = call("compare", *sorted(tmp_path.iterdir()), "--json")
    assert result.exit_code == 0, result.output
    names = [number["name"] for number in json.loads(result.stdout)[0]["numbers"]]
    assert names == ["a", "b-0123456789ab", "b-ba9876543210"]


def test_what_cannot_be_compared(folder):
    result = call("compare", folder / "tnl", folder / "alone")
    text = " ".join(result.output.split())
    assert result.exit_code == 2 and "in common" in text
    assert f"{folder / 'alone'} has: linnet evaluate text RUN {folder / 'b.txt'}" in text
    assert "to compare, run: linnet evaluate " in text
    assert "--open: " in call("compare", folder / "tnl", "--json", "--open").output
    result = call("compare", folder / "none", folder / "missing", folder / "tnl", folder / "tnl", "--depth-ratio", 0)
    assert result.exit_code == 2 and re.search("--depth-ratio: .*0", result.output)
    result = call("compare", folder / "none", folder / "missing", folder / "tnl", folder / "tnl")
    text = " ".join(result.output.split())
    assert result.exit_code == 2
    for part in (
        "none: has no evaluation yet",
        "missing: is not a run folder",
        "linnet runs lists",
        "tnl: is given twice",
    ):
        assert part in text, text


def test_a_text_that_changed_between_two_evaluations_is_another_text(folder, tmp_path):
    text = tmp_path / "c.txt"
    for name, content in (("tnl", "one text\n"), ("llama", "another\n")):
        shutil.copytree(folder / name, tmp_path / name)
        shutil.rmtree(tmp_path / name / "evaluations")
        text.write_text(content * 9)
        assert call("evaluate", "text", tmp_path / name, text).exit_code == 0
    digests = [read_evaluations(tmp_path / name)[0].scored for name in ("tnl", "llama")]
    result = call("compare", tmp_path / "tnl", tmp_path / "llama", "--no-page")
    assert result.exit_code == 2 and all(digest in result.output for digest in digests), result.output
    assert call("evaluate", "text", tmp_path / "tnl", text).exit_code == 0  # a second record; the first one stays
    result = call("compare", tmp_path / "tnl", tmp_path / "llama", "--no-page")
    assert result.exit_code == 0 and digests[0] in result.output and "c.txt" in result.stdout, result.output


def test_out_may_be_a_folder(folder, tmp_path):
    result = call("compare", folder / "tnl", folder / "llama", "--out", tmp_path / "pages")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "pages" / "index.html").read_text()
    assert 'id="models"' in page and "text: " + str(folder / "a.jsonl") in page
    assert '"title":"bits per byte (lower is better)"' in page and '"title":"task and metric"' in page
