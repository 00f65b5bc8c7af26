"""The page of a corpus: its numbers, unfinished pipelines, and text that tries to act."""

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import Config, ConfigError
from linnet.corpus.documents import read_part
from linnet.corpus.page import _cuts, _examples, _stage_table, visible, write_corpus
from linnet.corpus.page.records import CorpusRecords, Step, read_corpus
from linnet.corpus.stage import open_stage, run_stage
from linnet.data import load_tokenizer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage "
    "--virtual-time-budget=20000 --window-size=500,2000 --enable-logging=stderr"
).split()
HOSTILE = "<script>alert(1)</script><!--<script> \u202egnp.exe \x07 & \"quoted' </pre></details>"
WEB = [f"the cat number {n} sat on the mat, and it was a good mat" for n in range(30)]
CHINESE = [f"第{n}只猫坐在垫子上，它很高兴。" for n in range(10)]


class NoSettings(Config):
    """A stage of these tests."""

    shortest: int = 5


class CleanThese:
    """Removes an exclamation mark, and leaves out every tenth document."""

    def __call__(self, part, counts, samples):
        for document in read_part(part, counts, samples):
            if document.row % 10 == 9:
                counts[f"dropped.{HOSTILE}"] += 1
                samples.add(f"dropped.{HOSTILE}", document, text=document.text)
                continue
            if "!" in document.text:
                counts["changed.punctuation"] += 1
                counts["removed.punctuation"] += document.text.count("!")
                after = document.text.replace("!", "")
                samples.add("changed.punctuation", document, before=document.text, after=after)
                document = replace(document, text=after)
            yield document


class ScoreThese:
    def __call__(self, part, counts, samples):
        for document in read_part(part, counts, samples):
            yield replace(document, extra={"nats_per_byte": 1 + document.row / 10})


class CutThese:
    def __call__(self, part, counts, samples):
        for document in read_part(part, counts, samples):
            if document.extra["nats_per_byte"] > 3:
                counts["left out.high tail"] += 1
            else:
                yield document


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Folders of clean, score and filter, and the names of two sources."""
    folder = tmp_path_factory.mktemp("corpus")
    names = {"web <script>": WEB, "zh": CHINESE}
    for number, texts in enumerate(names.values()):
        rows = [{"text": f"{text}! {HOSTILE if n == 3 else ''}"} for n, text in enumerate(texts)]
        lines = [*map(json.dumps, rows), "not JSON"]
        path = folder / ("web<!--<script>.jsonl", "zh.jsonl")[number]
        path.write_text("\n".join(lines))
    stages = {"clean": ([f"{folder}/web<!--<script>.jsonl", f"{folder}/zh.jsonl"], CleanThese())}
    stages |= {"score": ([f"{folder}/clean"], ScoreThese())}
    for name, (sources, work) in stages.items():
        run_stage(name, sources, folder / name, NoSettings(), work)
    with open_stage("filter", [f"{folder}/score"], folder / "filter", NoSettings()) as stage:
        stage.write(CutThese())
        shown = {"score": 3.5, "source": HOSTILE, "file": HOSTILE, "row": 1, "text": HOSTILE}
        group = {"scored": 27, "above": 9, "below": 0, "low": None, "high": 3.0, "lowest": [], "highest": [shown]}
        stage.finish({"web<!--<script>": group})
    return folder


@pytest.fixture(scope="module")
def page(corpus):
    made, found = write_corpus(
        [corpus / "clean", corpus / "score", corpus / "filter"], tokenizer=load_tokenizer(_tokenizer(corpus))
    )
    return made, made.read_text(encoding="utf-8"), found


def _tokenizer(corpus):
    path = corpus / "tokenizer.json"
    if not path.exists():
        words = ["corpus", "tokenizer", corpus / "clean", "--vocab", 320, "--cjk", 20, "--out", path]
        assert CliRunner().invoke(app, list(map(str, words))).exit_code == 0
    return path


def test_sources_and_scripts_add_up_to_the_documents_of_the_last_stage(corpus, page):
    found = page[2].values()
    stage = json.loads((corpus / "filter" / "stage.json").read_text())
    assert found["total"]["documents"] == stage["documents"] == 19 + 9
    assert found["total"]["bytes"] == stage["text_bytes"]
    tokenizer = load_tokenizer(_tokenizer(corpus))
    for kind in ("sources", "scripts"):
        for unit in ("documents", "bytes", "tokens"):
            assert sum(row[unit] for row in found[kind].values()) == found["total"][unit]
    assert {name: row["documents"] for name, row in found["scripts"].items()} == {"Latin": 20, "Han": 8}
    assert found["total"]["bytes"] == sum(share["bytes"] for share in found["token_scripts"].values())
    texts = sum(share["tokens"] for share in found["token_scripts"].values())
    assert found["total"]["tokens"] == texts + 28 and found["tokenizer"]["digest"] == tokenizer.digest


def test_stages_tell_what_they_left_out_and_scores_are_those_before_the_filter(page):
    found = page[2].values()
    assert [stage["name"] for stage in found["stages"]] == ["clean", "score", "filter"]
    assert [sum(stage["drops"].values()) for stage in found["stages"]] == [4, 0, 8]
    assert found["stages"][0]["documents read"] == 40 and found["stages"][0]["counts"]["unreadable.not JSON"] == 2
    assert found["scores"]["web<!--<script>"]["documents"] == 27
    assert found["scores"]["web<!--<script>"]["highest"] == 3.8


def test_the_last_stage_alone_has_all_counts_and_one_stage_is_enough(corpus):
    alone = read_corpus([corpus / "filter"]).values()
    assert [stage["name"] for stage in alone["stages"]] == ["clean", "score", "filter"]
    assert [sum(stage["drops"].values()) for stage in alone["stages"]] == [4, 0, 8]
    assert alone["total"]["tokens"] is None and alone["total"]["documents"] == 28
    clean = read_corpus([corpus / "clean"]).values()
    assert [stage["name"] for stage in clean["stages"]] == ["clean"] and clean["scores"] == {}


def test_what_is_left_is_a_share_of_the_files_read_also_from_the_last_stage_alone(corpus, page, tmp_path):
    alone = write_corpus([corpus / "filter"], tmp_path / "page.html")[0].read_text(encoding="utf-8")
    found = r"<li>([\d.]+.% of the bytes and [\d.]+).% of the documents"
    left = [re.search(found, text)[1] for text in (page[1], alone)]
    assert left[0] == left[1] and left[0].endswith("and 70.0")  # 28 of 40
    assert "read by clean" in alone and "read by score" not in alone


def test_documents_with_evaluation_items_are_no_duplicates():
    counts = {"documents read/a": 20, "documents written/a": 8, "bytes read/a": 20, "bytes written/a": 8}
    counts |= {"documents removed/exact copy/a": 4, "documents removed/near copy/a": 1}
    values = {"labels": ["a"], "counts": counts | {"documents removed/evaluation item/a": 7}, "settings": {}}
    step = Step("dedup", None, values)
    assert sum(step.drops().values()) == 12
    table = _stage_table(CorpusRecords("a", [step], [], {}))
    assert re.findall(r"<td[^>]*>([^<]*)</td>", table)[-1] == "5"


def test_a_part_of_the_bytes_stands_for_all(corpus):
    found = read_corpus([corpus / "clean"], load_tokenizer(_tokenizer(corpus)), measure_bytes=1000)
    exact = read_corpus([corpus / "clean"], load_tokenizer(_tokenizer(corpus)))
    assert 0 < found.measured < 1 == exact.measured
    assert found.total.documents == exact.total.documents and found.total.bytes == exact.total.bytes
    assert found.total.tokens == pytest.approx(exact.total.tokens, rel=0.2)


def test_text_of_documents_names_and_reasons_cannot_act(page):
    _, text, _ = page
    before, _, after = text.partition('<script type="application/json" id="themes">')
    assert "<script>alert" not in text and "<!--" not in before and "\u202e" not in text and "\x07" not in text
    assert before.count("<script") == before.count('<script type="application/json" id="spec-')
    assert "&lt;script&gt;alert(1)" in text and "U+202E" in text and "U+0007" in text
    assert before.count("<pre>") == before.count("</pre>") and before.count("<details") == before.count("</details>")
    assert visible("a<b>\u200b\n") == 'a&lt;b&gt;<span class="code">U+200B</span>\n'


def test_a_browser_draws_every_figure_and_runs_nothing_of_a_document(page, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium here: install it to see the page drawn (apt-get install chromium)")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page[0].as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert 'data-drawn="4"' in done.stdout and "CONSOLE" not in done.stderr
    drawn = re.findall(r'<svg[^>]*class="marks"[^>]*width="(\d+)"', done.stdout)
    assert len(drawn) == 4 and all(300 < int(width) <= 460 for width in drawn)


def test_examples_mark_what_changed(page):
    assert "<del>!</del>" in page[1]
    assert page[1].count('class="example"') >= 4


def test_thresholds_per_letter_are_not_among_scores_per_byte(corpus):
    found = read_corpus([corpus / "filter"])
    assert _cuts(found, 0, 9) and "3.500 nats per byte" in "".join(_examples(found))
    found.steps[-1].values["settings"]["per"] = "letter"
    assert not _cuts(found, 0, 9) and "3.500 nats per letter" in "".join(_examples(found))


def test_the_same_stages_give_the_same_page(corpus, page, tmp_path):
    folders = [corpus / "clean", corpus / "score", corpus / "filter"]
    again, _ = write_corpus(folders, tmp_path / "a.html", tokenizer=load_tokenizer(_tokenizer(corpus)))
    assert again.read_text().replace(f" --out {tmp_path}/a.html", "") == page[1]
    assert {path.name for path in page[0].parent.glob("*.png")} == {path.name for path in tmp_path.glob("*.png")}


def test_the_command_prints_tables_or_json(corpus, page, tmp_path):
    words = ["corpus", "report", f"{corpus}/clean", f"{corpus}/filter", "--tokenizer", "byte"]
    shown = CliRunner().invoke(app, [*words, "--out", f"{tmp_path}/page.html"])
    assert shown.exit_code == 0, shown.output
    assert "high tail" in shown.stdout and "Latin" in shown.stdout and (tmp_path / "page.html").is_file()
    values = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert values["total"]["tokens"] == values["total"]["bytes"] + values["total"]["documents"]


def test_folders_that_are_no_stages_are_told_and_an_unfinished_one_is_named(corpus, tmp_path):
    (tmp_path / "half" / "parts").mkdir(parents=True)
    (tmp_path / "half" / "parts" / "plan.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        read_corpus([tmp_path / "half", tmp_path])
    assert ["not finished" in line for line in caught.value.problems] == [True, False]
    with pytest.raises(ConfigError, match=r"holds stages.*/filter"):
        read_corpus([corpus])
    found = read_corpus([corpus / "clean", tmp_path / "half"])
    assert len(found.problems) == 1 and found.total.documents == 36
    copy = tmp_path / "copy"
    shutil.copytree(corpus / "clean", copy)
    next(copy.glob("shard-*")).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="shard-"):
        read_corpus([copy])
    for words in (["--tokenizer", "missing.json"], ["--out", str(tmp_path)]):
        found = CliRunner().invoke(app, ["corpus", "report", f"{corpus}/clean", *words])
        assert found.exit_code == 2 and words[0].strip("-") in found.output


def test_documents_of_any_script_have_a_page(corpus, tmp_path):
    texts = ["ひらがなだけ", "ｶﾀｶﾅ", "漢字", "한글", "ไทย", "𐌰𐌱", "12 + 3", "\u0301", "\U000e0041", "\ue000", "𝒜", "😀"]
    rows = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "scripts.jsonl").write_text("\n".join(rows))
    run_stage("clean", [f"{tmp_path}/scripts.jsonl"], tmp_path / "stage", NoSettings(), CleanThese())
    for tokenizer in (None, load_tokenizer(_tokenizer(corpus))):
        page, found = write_corpus([tmp_path / "stage"], tokenizer=tokenizer)
        assert sum(tally.documents for tally in found.scripts.values()) == found.total.documents
        assert found.scripts["Han and kana"].documents == 2 and "Han and kana" in page.read_text(encoding="utf-8")


def test_an_empty_stage_has_a_page(corpus, tmp_path):
    class Nothing:
        def __call__(self, part, counts, samples):
            counts.update(Counter({"dropped.all": sum(1 for _ in read_part(part, counts, samples))}))
            return iter(())

    run_stage("clean", [f"{corpus}/zh.jsonl"], tmp_path / "empty", NoSettings(), Nothing())
    page, found = write_corpus([tmp_path / "empty"])
    assert found.total.documents == 0 and "0 documents" in page.read_text()
