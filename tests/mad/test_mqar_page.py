"""The page of MQAR: what it says, its figure and its table."""

import json
import re

import pytest
from mad_folders import rows, write_rows

from linnet.mad.mqar import place_of
from linnet.mad.page import write_mad_report

STEPS = {"hgrn2": 0.08, "hgrn": 0.3}  # how much less each of the four lengths has


@pytest.fixture(scope="module")
def found():
    made = []
    for name, step in STEPS.items():
        for row in rows({name: 1.5}, "mqar", seeds=(0, 1, 2)):
            place = place_of(row["setting"])
            level = 0.999 - step * [64, 128, 256, 512].index(place.length) * (0.5 if place.width == 128 else 1)
            level += 0.0005 * (int(row["seed"]) - 1) * (1 if name == "hgrn" else -1)
            made.append(row | {"accuracy": level, "validation_accuracy": level - row["learning_rate"]})
    return made


def page_of(folder, found):
    page = write_mad_report(write_rows(folder, found))
    source = page.read_text(encoding="utf-8")
    specs = re.findall(r'<script type="application/json" id="spec-([^"]+)">(.*?)</script>', source, re.S)
    words = re.sub(r"<(script|style)\b.*?</\1>", " ", source, flags=re.S)
    words = " ".join(re.sub(r"<[^>]*>", " ", words).replace("\N{NO-BREAK SPACE}", " ").split())
    return page, words, {name: json.loads(text.replace("<\\/", "</")) for name, text in specs}


def test_page(found, tmp_path):
    page, words, specs = page_of(tmp_path / "mqar", found)
    assert (page.parent / "mqar.png").read_bytes().startswith(b"\x89PNG") and set(specs) == {"mqar"}
    claim = (
        "hgrn2 never below hgrn, and above it wherever that stays under 95% (paper 002, 4.1): holds in all 8 settings"
    )
    assert claim in words and re.search("hgrn .*99% in 2 of 8 settings.* 512 with 64 pairs", words)
    assert "the lowest accuracy seen is 9.9 %, at 512 with 64 pairs at width 64" in words
    assert "The scores leave out" not in words and "Striped" not in words
    panels = specs["mqar"]["hconcat"]
    assert [panel["title"] for panel in panels] == ["width 64", "width 128"]
    data = [row for part in specs["mqar"]["datasets"].values() for row in part]
    chosen = [row for row in data if row["architecture"] == "hgrn" and row["width"] == 64 and row["place"] == "512, 64"]
    assert chosen and all(row["score"] == pytest.approx(0.099) and row["learning rate"] == "0.0001" for row in chosen)
    assert "hgrn 64 99.9 69.9 39.9 9.9 54.9" in words


def test_sizes_may_not_be_recorded(found, tmp_path):
    specs = page_of(tmp_path / "bare", [{**row, "state_size": ""} for row in found])[2]
    data = [row for part in specs["mqar"]["datasets"].values() for row in part]
    assert {row["sizes"] for row in data} == {"2.4M parameters"}


def test_one_seed_is_told_to_decide_nothing(found, tmp_path):
    words = page_of(tmp_path / "one", [row for row in found if int(row["seed"]) == 0])[1]
    assert re.search("cannot be told ; the difference may be chance at .*; one seed tells no difference", words)


def test_what_is_wrong_or_missing_is_named(found, tmp_path):
    worse = [row | {"accuracy": 0.05} if (row["architecture"], row["setting"]) == ("hgrn2", "mqar/512x64,width=64")
             else row for row in found]  # fmt: skip
    words = page_of(tmp_path / "worse", worse)[1]
    assert re.search(r"does not hold.* 512 .*64 pairs .*64 \(5.00 and 9.90 %\)", words)
    fewer = [row for row in found if row["setting"] != "mqar/256x16,width=128"]
    words = page_of(tmp_path / "fewer", fewer)[1]
    assert (
        "not enough runs : it holds in the 7 settings that both have, and both are needed at 256 with 16 pairs" in words
    )
    assert "1 of 8 settings" in words
    assert re.search(r"hgrn2 128 [0-9.]+ [0-9.]+ – [0-9.]+ – ", words), "no mean where a length is missing"
