"""Each rule on its own, and the laws of all of them: a result stays, spans come back, nothing grows, time is linear."""

import importlib.util
import re
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.config import ConfigError
from linnet.corpus import rules
from linnet.corpus.page import write_corpus
from linnet.corpus.rules import Clean, Garbled, Rules, Urls, Watermarks, Whitespace, clean_text
from linnet.corpus.stage import run_stage

PATH = Path(__file__).parents[2] / "benchmarks" / "clean_laws.py"
spec = importlib.util.spec_from_file_location("clean_laws", PATH)
laws = importlib.util.module_from_spec(spec)
spec.loader.exec_module(laws)

UNFILTERED = laws.RULES


def clean(text: str) -> str | None:
    return clean_text(text, UNFILTERED).text


@pytest.mark.parametrize(
    "text, decoded",
    [
        ("\ufeff\ufeffa\0b", "ab"),
        ("\ud83d\ude00", "\U0001f600"),
        ("a\ud83db\udfff", "a\ufffdb\ufffd"),
        ("\u200ba", "\u200ba"),
    ],
)
def test_decode(text, decoded):
    assert rules.decode(text) == decoded
    decoded.encode()


def test_nfc_composes_and_shortens_long_rows_of_marks():
    assert rules.nfc("e\u0301 \u1112\u1161\u11ab \u212b") == "\u00e9 \ud55c \u00c5"
    assert rules.nfc("a" + "\u0315\u0300" * 100).count("\u0315") == 15
    assert rules.nfc("\U0001f600" * 40) == "\U0001f600" * 40


@pytest.mark.parametrize(
    "text, bare",
    [
        ("a <b class='x > y'>bold</b> word", "a bold word"),
        ("<p>one</p><p>two</p>", "\none\n\ntwo\n"),
        ("1<br/>2", "1\n2"),
        ("<tr><td>a</td>\n <td>b</td></tr>\n<tr><td>c", "\na b\nc"),
        ("<ul>\n  <li>a</li>\n  <li>b</li>\n</ul>", "\n\na\nb\n"),
        ("<body>\n  <p>a\n   b</p>\n<pre>\n  c</pre></body>", "\n\na\nb\n\n\n  c\n\n"),
        ("  <div>x</div>", "\nx\n"),
        ("x<script type='a'>if (a < b) '</b>'</script>y<style>p {}</style >z", "xyz"),
        ("<script async>never closed", "never closed"),
        ("a<svg a='b'><path d='M0'/><svg/></svg>b <my-box x>c</my-box> <your-name>", "ab c <your-name>"),
        ("<math><mi>x</mi><mo>=</mo><mn>1</mn></math>", "x=1"),
        ("a<!-- <b> -->b<!DOCTYPE html>c", "abc"),
        ("10<sup>6</sup> H<sub>2</sub>O 1<sup>st</sup>", "10^6 H2O 1st"),
        ("<unk> List<T> a < b > c <mailto:x> Vec<A> <source>", "<unk> List<T> a < b > c <mailto:x> Vec<A> <source>"),
        ("if a<b and c>d, i <p\nor q > s</b>", "if a<b and c>d, i <p\nor q > s"),
        ("<input disabled> <table border cellpadding=1><IMG\nsrc = 'a' alt><hr/ >x", "\n\nx"),
        ("<div>\n    <p>\n      Text\n  </div>\n\nMore", "\n\n\nText\n\n\n\nMore"),
        ("caf&eacute;&nbsp;&#65;&#x42; AT&amp;T &amp;amp;amp; a &lt; b", "café\xa0AB AT&T & a < b"),
        ("&lt;b&gt; &amp;lt;/i&gt; &#x3C;T> &#96; &nope; &", "&lt;b> &lt;/i> <T> &#96; &nope; &"),
    ],
)
def test_tags(text, bare):
    assert rules.tags(text) == bare


@pytest.mark.parametrize(
    "text, bare",
    [
        ("see https://a.org/b_(c)?d=e#f. Then", "see . Then"),
        ("(http://a.b) [www.x.de/y], FTP://c.d!", ", !"),
        ("请访问http://example.com/abc。谢谢", "请访问。谢谢"),
        ("write to a.b+c@d-e.co.uk, mailto:x@y.org.", "write to , ."),
        ("@name a@b user@host.x 3 @-@ 4 www. xhttp://a", "@name a@b user@host.x 3 @-@ 4 www. xhttp://a"),
    ],
)
def test_urls(text, bare):
    assert rules.urls(text, Urls()) == bare


def test_mail_addresses_can_stay():
    assert rules.urls("a@b.org http://c.de", Urls(mail=False)) == "a@b.org "


@pytest.mark.parametrize(
    "text, bare",
    [
        ("caf\ufffd is open every day\n\ufffd\ufffd\ufffd.\nb\x01c\td", "caf is open every day\nbc\td"),
        ("a " + "x" * 201 + " b", "a  b"),
        ("x" * 200, "x" * 200),
        ("日本語の文章は空白を使わない。" * 40, "日本語の文章は空白を使わない。" * 40),
        ("ภาษาไทยไม่เว้นวรรคระหว่างคำ" * 40, "ภาษาไทยไม่เว้นวรรคระหว่างคำ" * 40),
        ("key U2FsdGVkX1+vupppZksvRf5pq5g5XjFRIipRkwB0K1Y96Qsv2Lm end", "key  end"),
        ("sha da39a3ee5e6b4b0d3255bfef95601890afd80709 end", "sha  end"),
        (
            "/usr/share/doc/linux/Documentation/admin/guide getTheValueOfTheFirstElementOfTheSecondList2",
            "/usr/share/doc/linux/Documentation/admin/guide getTheValueOfTheFirstElementOfTheSecondList2",
        ),
        ("3." + "1415926535" * 6, "3." + "1415926535" * 6),
    ],
)
def test_garbled(text, bare):
    assert rules.garbled(text, Garbled()) == bare


def test_mojibake_needs_the_extra(monkeypatch):
    if importlib.util.find_spec("ftfy") is None:
        with pytest.raises(ConfigError, match="mojibake"):
            Garbled(mojibake=True)
    else:
        assert rules.garbled("cafÃ© naÃ¯ve", Garbled(mojibake=True)) == "café naïve"


@pytest.mark.parametrize(
    "text, bare",
    [
        ("Hello!!! What??!! a,, b；； 好。。。", "Hello! What?! a, b； 好。"),
        ("wait.... so... end.. ../x a..b 1..2", "wait... so... end. ../x a..b 1..2"),
        ("他说………… 然后————好", "他说…… 然后——好"),
        ("a -- b --- c ---- d ** == :: // ~~~~~ ____", "a -- b --- c - d ** == :: // ~ _"),
        ("Title\n=====\n\n+----+----+\n", "Title\n=====\n\n+----+----+\n"),
        ("-" * 300, "-"),
        ("###### six ####### seven", "###### six # seven"),
    ],
)
def test_punctuation(text, bare):
    assert rules.punctuation(text) == bare


@pytest.mark.parametrize(
    "text, bare",
    [
        ("\ufb01ne o\ufb03ce co\u00adop a\u200bb \u202eabc\u202c \ue000", "fine office coop ab abc "),
        ("ＡＢＣａｂｃ　ｶﾞﾗｽ ⼀⼆ co\u2011op", "ABCabc　ガラス 一二 co-op"),
        ("คำ\u200bไทย می\u200cخواهم क्\u200dष", "คำ\u200bไทย می\u200cخواهم क्\u200dष"),
        ("“Zitat” „so“ «ici» – — … 你好，世界！", "“Zitat” „so“ «ici» – — … 你好，世界！"),
        ("\U0001f3f4\U000e0067\U000e0062\U000e007f x\U000e0041", "\U0001f3f4\U000e0067\U000e0062\U000e007f x"),
    ],
)
def test_characters(text, bare):
    assert rules.characters(text) == bare


@pytest.mark.parametrize(
    "text, bare",
    [
        ("１２３，４５６．７８", "123,456.78"),
        ("１，２，３ １２３４，５６７", "1，2，3 1234，567"),
        ("５０％ −5 a−b", "50％ -5 a−b"),
        ("٣٫١٤ १२३ 1,234.50 1.234,50", "٣٫١٤ १२३ 1,234.50 1.234,50"),
    ],
)
def test_numbers(text, bare):
    assert rules.numbers(text) == bare


@given(st.text("0123０１２９，．−, ٣१", max_size=40))
def test_numbers_change_no_digit(text):
    def digits(text: str) -> list[int]:
        return [unicodedata.digit(character) for character in text if unicodedata.digit(character, None) is not None]

    assert digits(rules.numbers(text)) == digits(text)


@pytest.mark.parametrize(
    "text, bare",
    [
        ("\n\n a  b\t\tc \t d  \r\n\r\n\r\n\r\n    e\r", " a b\tc\td\n\n    e"),
        ("　　你好　世界", "你好 世界"),
        ("a\xa0\u2009b\u2028c\x85d", "a b\nc\nd"),
        ("a\n    make  x   # y\n\tb  c\n  d  e", "a\n    make  x   # y\n\tb  c\n  d e"),
        (" " * 41 + "x\n" + " " * 40 + "y", "x\n" + " " * 40 + "y"),
    ],
)
def test_whitespace(text, bare):
    assert rules.whitespace(text, Whitespace()) == bare


MARKDOWN = """# Title

Some `code  with!!  http://a.b <b>` and [text](http://a.b/c "t  t").

| a   | b    |
|-----|------|
| 1!! |   2  |

```python
x  =  1   # see http://a.b!!!
```

[ref]: http://a.b/c   "Title"
"""
LATEX = r"""Let $x  <  y!!$ and \[ a  =  b \], so
\begin{align}
  a  &=  b \\
\end{align}
holds; see \url{http://a.b/c}."""


@pytest.mark.parametrize("text", [MARKDOWN, LATEX])
def test_structured_text_comes_back(text):
    assert clean(text) == text.rstrip("\n")


LAYOUT = {
    "numbers": "name     qty   price\napple      3    1.20\npear      12    0.80",
    "two rows": "key:      value\nother:    more",
    "rules": "name      qty\n--------- ---\napple       3\npear       12",
    "box": "+------+-----+\n| a    | b!! |\n+------+-----+\n| ccc  | d   |\n+------+-----+",
    "tabs": "a\t\tb\tc\nd\te\t\tf",
    "pointer": "  File x\n    total = a  +  b\n            ^^^^^ here!!!",
    "compiler": "3 | int  x  = 1;;\n  |      ^^^^ expected",
    "inline": "see ^^^^ and ^^^^^^^",
}


@pytest.mark.parametrize("name", LAYOUT)
def test_tables_and_code_of_plain_text_stay_as_they_are(name):
    rules_only = Rules.model_validate(dict.fromkeys(rules.FILTERS, False))
    text = f"Prose!!  Here.\n\n{LAYOUT[name]}\n\nMore  prose!!"
    cleaned = clean_text(text, rules_only)
    assert cleaned.text == f"Prose! Here.\n\n{LAYOUT[name]}\n\nMore prose!"
    assert cleaned.layout == {"numbers": 3, "rules": 4, "box": 3, "inline": 0}.get(name, 2)
    off = Rules.model_validate({**dict.fromkeys(rules.FILTERS, False), "spans": {"layout": False}})
    assert name == "inline" or clean_text(text, off).text != cleaned.text


@pytest.mark.parametrize(
    "text, bare",
    [
        ("One sentence.  Two of them.\nHere is more.  And more.\nThe end.  Really.", None),
        ("1.  First item\n2.  Second item\n3.  Third", None),
        ("-   First item\n-   Second item", None),
        ("<td>a</td>    <td>b</td>\n<td>c</td>    <td>d</td>", "a b c d"),
        ("a &amp;   b\nc &amp;   d", "a & b\nc & d"),
        ("one   table\n\nof   lines apart", None),
        ("<script>\na = 1;    b = 2;\na = 1;    b = 2;\n</script>", ""),
    ],
)
def test_prose_lists_and_html_are_no_layout(text, bare):
    rules_only = Rules.model_validate(dict.fromkeys(rules.FILTERS, False))
    cleaned = clean_text(text, rules_only)
    assert (cleaned.text or "") == (re.sub(" +", " ", text) if bare is None else bare) and cleaned.layout == 0


def test_documents_with_layout_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("Some words of prose before the table.\n\n" + LAYOUT["numbers"] + "\n")
    (tmp_path / "b.txt").write_text("Some words of prose  without any table.\n" * 2)
    counts = run_stage("clean", [str(tmp_path)], tmp_path.parent / "out", Rules(), Clean(Rules()))["counts"]
    assert counts["kept.layout"] == 1
    page, _ = write_corpus([tmp_path.parent / "out"])
    assert "layout" in page.read_text() and "1 left as they are" in page.read_text()


def test_prose_around_spans_is_cleaned():
    assert clean("<p>See  `a  b`!!  http://x.y $c  d$</p>") == "See `a  b`! $c  d$"


def test_one_rule_can_make_work_for_another():
    assert clean("<<wbr>b>x</<wbr>b>") == "x"
    assert clean("ht<b>tp://a.b/c </b>d") == "d"


def test_what_never_settles_or_loses_a_span_is_dropped():
    deep = "<" * 12 + "wbr>" * 12
    assert clean(deep) is None and clean_text(deep, UNFILTERED).dropped == "unsettled"
    lost = "`a  b`\xad`"  # without the soft hyphen, the second run of backticks has another length
    assert clean_text(lost, UNFILTERED).dropped == "unsettled"


def test_code_stays_as_it_is():
    code = "#include <b>\n\nint  main() {\r\n  // see http://a.b!!\n  return a  <b> c;;\n}\n"
    assert clean_text(code + "\0", kind="code").text == code


def test_changes_are_counted_by_rule():
    cleaned = clean_text("<b>Hi</b>!!  there \ufb01", UNFILTERED)
    assert cleaned.text == "Hi! there fi"
    assert cleaned.removed == {"tags": 7, "punctuation": 1, "characters": -1, "whitespace": 1}


def test_a_rule_that_is_off_changes_nothing():
    text = "<b>a</b>  http://b.c  !!  \ufb01  １  e\u0301  \ufffd"
    names = {name: False for name in (*rules.APPLIED, *rules.FILTERS)}
    assert clean_text(text, Rules.model_validate(names)).text == text
    page = "\n".join(f"a book, page {number}\none {number}\ntwo {number}x\nthree {number}y" for number in range(9))
    for name in rules.APPLIED:
        removed = clean_text(
            page if name == "watermarks" else text, Rules.model_validate({**names, name: True})
        ).removed
        assert set(removed) == {name}


@pytest.mark.parametrize(
    "content, problem",
    [
        ("tag: false\n", "tag: unknown key (value False); did you mean 'tags'?"),
        ("garbled: {longes: 3}\n", "garbled.longes: unknown key (value 3); did you mean 'longest'?"),
        ("letters: {share: 1.5}\n", "letters.share:"),
        ("repeated_lines: {share: -0.1}\n", "repeated_lines.share:"),
        ("broken: {share: .nan}\n", "broken.share:"),
        ("length: {longest: 10}\n", "length.longest:"),
        ("urls: 3\n", "urls:"),
        ("kinds: {a: cod}\n", "kinds.a:"),
        ("- tags\n", "must be a mapping"),
    ],
)
def test_a_file_of_rules_is_checked(tmp_path, content, problem):
    path = tmp_path / "RULES.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        Rules.read(path)
    assert problem in str(error.value)


def test_a_file_of_rules(tmp_path):
    path = tmp_path / "RULES.yaml"
    path.write_text("urls: {mail: false}\ntags: false\nletters: {share: 0.2}\nkinds: {github: code}\n")
    read = Rules.read(path)
    assert not read.tags.enabled and read.urls.enabled and not read.urls.mail and read.letters.share == 0.2
    assert read.kind_of("text", "github", "a.txt") == "code"
    assert read.kind_of("text", "web", "a.txt") == read.kind_of("text", "web", "rows.jsonl") == "prose"


def test_random_strings_break_no_law():
    broken, reasons = [], []
    for number in range(1000):
        law, reason = laws.broken_law(laws.draw(laws.random.Random(f"suite:{number}")))
        reasons.append(reason)
        if law:
            broken.append(f"string {number}: {law}")
    assert broken == []
    assert reasons.count("unsettled") < 10 and reasons.count("") > 700


@given(st.text(max_size=60))
def test_no_law_is_broken(text):
    assert laws.broken_law(text)[0] is None


@given(st.lists(st.sampled_from(laws.PIECES), max_size=20).map("".join))
def test_no_law_is_broken_by_pieces_that_rules_look_at(text):
    assert laws.broken_law(text)[0] is None


@pytest.mark.parametrize("unit", ["<", "`", "$", "&", "\\", "a", " ", ".", "*", "<b '", "](", "\u0315\u0300", "~~~\n"])
def test_time_is_linear_in_the_length(unit):
    text = unit * (100_000 // len(unit))
    clean_text("warm " * 20 + "\u00e9")
    start = time.process_time()
    clean_text(text)
    assert time.process_time() - start < 4  # at most 0.2 on a quiet machine; a quadratic pattern takes minutes


def test_watermarks_are_lines_that_repeat_between_others():
    settings = Watermarks(enabled=True)
    words = ["one", "two", "three", "four", "five", "six"]
    pages = [
        f"It was {w}.\nThen {w} went.\nSo {w} it is.\n***\n12\nDownloaded from x.org, page {n}"
        for n, w in enumerate(words)
    ]
    bare = "\n".join(page.rpartition("\n")[0] for page in pages)
    assert rules.watermarks("\n".join(pages), settings) == bare
    assert rules.watermarks(bare, settings) == bare
    assert rules.watermarks("\n".join(pages[:4]), settings) == "\n".join(pages[:4])
    refrain = "\n".join(["row row row"] * 9)  # no other lines between
    assert rules.watermarks(refrain, settings) == refrain
    on = Rules(watermarks={"enabled": True}, length=False, repeated_ngrams=False, repeated_lines=False)
    cleaned = clean_text("\n".join(pages), on)
    assert cleaned.removed["watermarks"] > 100 and "Downloaded" not in cleaned.text
    assert clean_text(cleaned.text, on).text == cleaned.text
    off = clean_text("\n".join(pages), Rules(length=False, repeated_ngrams=False, repeated_lines=False))
    assert off.text.count("Downloaded") == 6 and "watermarks" not in Rules().model_dump()
    code = "\n".join([f"a {w}\nb {w}\nc {w}\n`Downloaded from`" for w in words])
    assert clean_text(code, on).text == code
