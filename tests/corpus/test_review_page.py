"""The review page: what it embeds, and in a real browser its keys, its progress and the file that it saves."""

import json
import re
import shutil
import subprocess

import pytest

from linnet.config import parse
from linnet.corpus.documents import Document
from linnet.corpus.scoring.sample import SHOWN, Drawn, Sample, Stratum, Verdicts, decide, review_page, write_review

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=5000 "
    "--window-size=1100,760 --enable-logging=stderr"
).split()
HARD = "</script><!-- \u2028 <img src=x onerror=alert(1)> & \U0001f600 \x00\x07\n\tend"

PROBE = """
<script>
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const seen = {begin: at("progress").textContent, text: at("text").textContent, images: document.images.length};
press("s"); seen.score = at("score").textContent; press("s"); seen.hidden = at("score").textContent;
press("1"); press("3"); press("2"); seen.place = at("place").textContent;
press("ArrowLeft"); press("0"); seen.back = at("unsure").getAttribute("aria-pressed");
press("ArrowLeft"); seen.pressed = at("bad").getAttribute("aria-pressed");
seen.width = document.documentElement.scrollWidth - document.documentElement.clientWidth;
seen.result = result();
verdicts = documents.map(() => null); restore(); seen.kept = result() === seen.result;
verdicts = documents.map(() => null); load(seen.result); seen.loaded = result() === seen.result;
load('{"sample": "another"}'); seen.note = at("note").textContent;
const report = document.createElement("pre");
report.id = "probe";
report.textContent = JSON.stringify(seen);
document.body.append(report);
</script>
"""


@pytest.fixture(scope="module")
def sample():
    drawn = [
        Drawn(Document(text, "web", f"{i}.jsonl", i, extra), Stratum("web", decile), extra.get("nats_per_byte"))
        for i, (text, extra, decile) in enumerate(
            [
                (HARD, {"nats_per_byte": 1.25}, 3),
                ("x" * (SHOWN + 1500), {"nats_per_byte": 2.5}, 10),
                ("wide " * 9 + "y" * 4000, {}, 0),
                ("last", {}, 0),
            ]
        )
    ]
    return Sample(0, {one.stratum: 1 for one in drawn}, drawn, per="byte")


def test_a_page_embeds_its_documents_and_nothing_from_a_network(sample, tmp_path):
    page = review_page(sample)
    write_review(sample, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert not re.search(r"https?://|<link|src=(?!x)", page)
    data = re.search(r'<script type="application/json" id="sample">(.*?)</script>', page, re.S)
    found = json.loads(data[1])
    assert found["sample"] == sample.digest and found["documents"][0]["text"] == HARD
    assert [one["more"] for one in found["documents"]] == [0, 1500, 0, 0]
    assert page.count("</script>") == 2


def test_keys_progress_and_file_in_a_browser(sample, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium here: install it to see the page used (apt-get install chromium)")
    body, _, end = review_page(sample).rpartition("</body>")
    (tmp_path / "page.html").write_text(f"{body}{PROBE}</body>{end}", encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [CHROMIUM, *FLAGS, profile, "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert probe, done.stderr[-2000:]
    seen = json.loads(probe[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert seen["begin"] == "0 of 4 judged: 0 good, 0 unsure, 0 bad" and seen["images"] == 0
    assert seen["text"].replace("\n", "") == HARD.replace("\n", "")
    assert seen["score"] == "1.250 nats per byte, decile 3 of 10" and seen["hidden"] == ""
    assert seen["place"] == "Document 4" and seen["back"] == "false" and seen["pressed"] == "true"
    assert seen["width"] <= 0 and seen["kept"] and seen["loaded"] and "another sample" in seen["note"]
    verdicts = parse(Verdicts, json.loads(seen["result"]))
    assert [one.verdict for one in verdicts.documents] == ["good", "bad", None, None]
    assert verdicts.sample == sample.digest and decide(verdicts).total.judged == 2
