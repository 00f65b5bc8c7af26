"""Which parts of a text are spans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.corpus.rules.spans import MASK, Spans, find_html, find_spans, mask, unmask

ALL = Spans()


def spans(text: str, which: Spans = ALL) -> list[str]:
    return [text[start:end] for start, end in find_spans(text, which)]


@pytest.mark.parametrize(
    "text, found",
    [
        ("a `b` c ``d`e`` f", ["`b`", "``d`e``"]),
        ("a ` b\n\nc ` d", []),
        (r"a \`b` c", []),
        ("```py\nx\n```\ny", ["```py\nx\n```"]),
        ("````\n```\n````\nz", ["````\n```\n````"]),
        ("a\n```\nnever closed\n", ["```\nnever closed\n"]),
        ("a\n\n~~~\nx\n~~~~\ny", ["~~~\nx\n~~~~"]),
        ("Title\n~~~~~\ntext\nOther\n~~~~~\n", []),
        ("~~~\nnever closed", []),
        ("costs $5 and $10, or $5-$10", []),
        ("$x$ and $$a\nb$$ and $a \\$ b$", ["$x$", "$$a\nb$$", "$a \\$ b$"]),
        ("$a\n\nb$", []),
        ("$a</i>, <i>$ but $a<b$", ["$a<b$"]),
        ("$a &lt; b$ $a & b;$", ["$a & b;$"]),
        (r"\(a\) \[b\] \\[2pt]", [r"\(a\)", r"\[b\]"]),
        (r"\begin{a}x\begin{a}y\end{a}\end{a} z", [r"\begin{a}x\begin{a}y\end{a}\end{a}"]),
        (r"\begin{document}text $x$\end{document} \end{b}", ["$x$"]),
        (r"\href{http://a.b}{c} \url{d}", [r"\href{http://a.b}", r"\url{d}"]),
        ('[a](b c) ![d](<e f> "t") [![g](h)](i)', ['![d](<e f> "t")', "![g](h)", "](i)"]),
        ("[a](b_(c)) text", ["[a](b_(c))"]),
        ("  [a]: http://b.c 'd'\nx", ["  [a]: http://b.c 'd'"]),
        ("x\na|b\n-|-\n1|2\n\n3|4", ["a|b\n-|-\n1|2"]),
        ("|-|-|\n", []),
        ("<a href='`'>b</a> `c`", ["`c`"]),
        ("<script>`a`</script> `b <i>`", ["`b <i>`"]),
        ("<!-- $a$ --> $b$", ["$b$"]),
    ],
)
def test_spans(text, found):
    assert spans(text) == found


def test_each_kind_can_be_left_out():
    text = "`a` $b$ [c](d)"
    assert spans(text, Spans(code=False)) == ["$b$", "[c](d)"]
    assert spans(text, Spans(latex=False)) == ["`a`", "[c](d)"]
    assert spans(text, Spans(markdown=False)) == ["`a`", "$b$"]


@given(st.text("`$\\[]()|-\n <>ab~:!{}", max_size=60))
def test_masks_come_off(text):
    masked, kept = mask(text, find_spans(text, ALL))
    assert masked.count(MASK) == len(kept) and all(kept)
    assert unmask(masked, kept) == text


def test_html():
    text = "<P>a<br/></p><x><script async>b</script><!-- <i> -->"
    assert [kind for _, _, kind in find_html(text)] == ["p", "br", "/p", "script", "!"]
