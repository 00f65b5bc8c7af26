"""Measures of whole documents, and which of them drop one."""

import random

import pytest

from linnet.corpus.rules import DEFAULT, Rules, clean_text, filters
from linnet.corpus.rules.filters import kind_of_file, looks_like_code

WORDS = (
    "the of and to a in is it you that he was for on are with as his they be at one have this from or had by".split()
)


def prose(words: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + draw.choice("abcdefgh") for _ in range(words))


def test_letters_count_marks_in_every_script():
    assert filters.letters("abc 123") == 0.5
    for text in ("हिन्दी में लिखा", "ภาษาไทยที่เขียน", "שָׁלוֹם", "日本語", "العربية"):
        assert filters.letters(text) == 1
    assert filters.letters("...") == filters.letters("") == 0


def test_broken_characters():
    assert filters.broken("a\ufffdb\x01") == 0.5
    assert filters.broken("tab\t line\n é") == 0


def test_repeated_lines_count_characters():
    assert filters.repeated_lines("abc\n\n abc \nd") == pytest.approx(3 / 7)
    assert filters.repeated_lines("\n\n\n") == 0


@pytest.mark.parametrize("words", [300, 3000])
def test_repeated_ngrams(words):
    text = prose(words)
    assert filters.repeated_ngrams(text, 50) < 0.01
    assert 0.4 < filters.repeated_ngrams(text + "\n" + text, 50) < 0.55
    assert filters.repeated_ngrams("日本語の文章です。" * words, 50) > 0.9
    assert filters.repeated_ngrams("a" * 100_000, 50) > 0.99
    assert filters.repeated_ngrams("short", 50) == 0


@pytest.mark.parametrize(
    "text, reason",
    [
        (prose(100), ""),
        ("short", "length"),
        ("<b></b>", "empty"),
        ("1 2 3 4 5 6 7 8 9 10, " * 3 + prose(2), "letters"),
        ("\n".join([prose(20), *["the same line again and again"] * 20]), "repeated_lines"),
        (prose(50) + " " + " ".join([prose(30, 1)] * 10), "repeated_ngrams"),
        ("\ufffd\ufffd \ufffd " + prose(5), "broken"),
    ],
)
def test_reasons(text, reason):
    cleaned = clean_text(text, DEFAULT)
    assert cleaned.dropped == reason and (cleaned.text is None) == bool(reason)


def test_filters_can_be_set():
    assert clean_text("short", Rules.model_validate({"length": {"shortest": 3}})).text == "short"
    assert clean_text("x" * 9, Rules.model_validate({"length": {"shortest": 3, "longest": 8}})).dropped == "length"
    assert clean_text("1 2 3 " * 20, Rules.model_validate({"letters": False, "repeated_ngrams": False})).text


@pytest.mark.parametrize(
    "file, kind",
    [
        ("a/b.py", "code"),
        ("a.C.gz", "code"),
        ("Makefile", "code"),
        ("a.md", "prose"),
        ("page.html", "prose"),
        ("a.tex", "prose"),
        ("rows.jsonl.zst", None),
        ("a.parquet", None),
        ("README", None),
    ],
)
def test_names_of_files_say_their_kind(file, kind):
    assert kind_of_file(file) == kind


def test_code_is_known_by_its_text():
    assert looks_like_code("import os\n\n\ndef f(x):\n    # a comment\n    return x + 1\n\n\nprint(f(2))\n")
    assert looks_like_code("#include <a.h>\nint main(void) {\n  int a = 1;\n  f(a);\n  return a;\n}\n")
    assert not looks_like_code(
        "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak;\n" * 3
    )
    assert not looks_like_code("# Title\n\n```py\nimport os\nx = 1\ny = 2\nz = 3\n```\n")
    assert not looks_like_code("- a list\n- of things (and more);\n* for example: this,\n1. that\n2. end\n3. of it\n")
