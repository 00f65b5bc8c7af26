"""Finds the code, LaTeX, Markdown and layout of a text that cleaning must leave alone, and the HTML that it removes.

A span is a part of a text that comes back byte for byte. `find_spans` reads from left to right; at each place the
construct that starts first wins, as in CommonMark (0.31.2, section 6): a `<b>` inside of code is code, and a `$` inside
of a tag is not a formula. `mask` replaces each span by one character, so that no rule can match across it.

Every function takes time linear in the length of the text: each delimiter finds its partner in one walk.
"""

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from pydantic import Field

from linnet.config import Config

# Stands for a span. A lone surrogate: no text holds one once it is decoded, and no character class of a rule does.
MASK = "\udfff"

_BACKTICKS = re.compile("`++")
_FENCE = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)([^\n]*+)$", re.M)
_DOLLARS = re.compile(r"\\[\s\S]|\$\$?")
_ENTITY = re.compile("&#?[A-Za-z0-9]{2,31};")
_ESCAPES = re.compile(r"\\([\s\S])")
_ENVIRONMENTS = re.compile(r"\\(begin|end)\{([A-Za-z]{1,40}+\*?)\}")
_ADDRESSES = re.compile(r"\\(?:url|nolinkurl|path|href)\{[^{}\n\udfff]*+\}")
_TARGET = re.compile(
    r"\]\((?:<[^<>\n]*+>|(?:[^\s()<>]++|\([^\s()<>]*+\))*+)(?:[ \t]++(?:\"[^\"\n]*+\"|'[^'\n]*+'))?[ \t]*+\)"
)
_REFERENCE = re.compile(r"^ {0,3}\[[^\[\]\n^][^\[\]\n]{0,200}+\]:[ \t]++\S++(?:[ \t]++[\"'(][^\n\r]*+)?[ \t]*+$", re.M)
_DELIMITER_ROW = re.compile(r"^[ \t]*+\|?[ \t]*+:?-++:?[ \t]*+(?:\|[ \t]*+:?-++:?[ \t]*+)*+\|?[ \t]*+\r?$", re.M)
_BLANK = re.compile(r"\n[ \t\r]*+\n")
# A gap between two cells, the mark of an item of a list, a rule between rows, and a pointer at the line above.
_GAP = re.compile(r"(?<=\S) {2,}+(?=\S)")
_ITEM = re.compile(r"\s*+(?:[-*+\u2022]|\w{1,3}[.)])\s++")
_RULE = re.compile("[-=+*_~|:#. \u2500-\u257f]{3,}+")
_POINTER = re.compile(r"(?:[\s\d|>]*+(?<=[\s|])~*+\^|~*+\^{3})[\^~]*+(?:\s.*+)?")
LONGEST_ROW = 200  # characters of a line of a table
LONGEST_LABEL = 200  # characters of the text of a link
LONGEST_FORMULA = 2_000  # characters between two `$`; prices in different sentences are rarely so close

_TAG = re.compile(
    r"<(/?)([A-Za-z][A-Za-z0-9-]{0,40}+)(?=[\s/>])"
    r"(?:(?:[^<>\"'\udfff]++|\"[^\"<\udfff]*+\"|'[^'<\udfff]*+')*+|[^<>\udfff]*+)>"
)
# Attributes follow the name in a start tag; the first ones may lack a value. `a <b and c> d` has none.
_BARE = (
    "allowfullscreen async autofocus autoplay border checked compact controls default defer disabled formnovalidate "
    "hidden inert ismap itemscope loop multiple muted nohref nomodule noresize noshade novalidate nowrap open "
    "playsinline readonly required reversed selected"
).split()
_ATTRIBUTES = re.compile(rf"(?:[\s/]++(?:{'|'.join(_BARE)})(?=[\s/>]))*+[\s/]*+(?:>|[^\s\"'<>/=\udfff]++\s*+=)", re.I)
_DECLARATION = re.compile(r"<(?:![A-Za-z]{4,10}\b[^<>\udfff]*+|\?xml\b[^<>\udfff]*+)>", re.I)
_END_TAG = re.compile(r"</([A-Za-z][A-Za-z0-9-]{0,40}+)[\s>]")
_CLOSE = re.compile(r"</(script|style|svg)\s{0,9}+>", re.I)
# The elements of HTML (https://html.spec.whatwg.org, section 4, and the obsolete ones of section 16).
BLOCKS = frozenset(
    "address article aside blockquote body br caption center dd details dialog dir div dl dt fieldset figcaption "
    "figure footer form frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li main menu nav ol optgroup "
    "option p pre search section select summary table tbody tfoot thead title tr ul".split()
)
CELLS = frozenset({"td", "th"})
INLINE = frozenset(
    "a abbr acronym applet area audio b base basefont bdi bdo big blink button canvas cite code col colgroup data "
    "datalist del dfn em embed font frame i iframe img input ins kbd label link map mark marquee meta meter nobr "
    "noframes noscript object output param picture progress q rb rp rt rtc ruby s samp script slot small source span "
    "strike strong style sub sup svg template textarea time track tt u var video wbr".split()
)
# Elements whose start tag may stand without attributes and without an end tag. Of all others, it is a word in angle
# brackets: the placeholder <source>, the type Option<A>.
ALONE = frozenset("body br dd dt head hr html li p tbody td tfoot th thead tr wbr".split())
MATH = frozenset(  # MathML Core, and the annotations that formulas of Wikipedia have
    "annotation math menclose merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms "
    "mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover semantics".split()
)
ELEMENTS = BLOCKS | CELLS | INLINE | MATH


class Spans(Config):
    """Which parts of a text come back byte for byte."""

    code: bool = Field(True, description="fenced code and `code` between backticks")
    latex: bool = Field(
        True,
        description="formulas, environments other than `document`, and the arguments of \\url and \\href",
    )
    markdown: bool = Field(True, description="tables, links, images and definitions of references")
    layout: bool = Field(True, description="lines of tables in plain text, and code with pointers (`^^^^`) below it")


def find_spans(text: str, which: Spans, layout: list[tuple[int, int]] | None = None) -> list[tuple[int, int]]:
    """Returns the (start, end) of each span, in order. Spans are disjoint and not empty.

    Args:
        layout: receives the spans that are lines of tables or code.
    """
    candidates: list[tuple[int, int, int]] = []  # start, priority at the same start, end
    html: list[tuple[int, int, str]] | None = None
    paragraphs = _Paragraphs(text)
    if which.code:
        if "```" in text or "~~~" in text:
            candidates += [(start, 0, end) for start, end in _fences(text)]
        if "`" in text:
            candidates += [(start, 1, end) for start, end in _inline_code(text, paragraphs)]
    if which.latex:
        if "$" in text:
            html = find_html(text)
            starts = [start for start, _, _ in html]
            formulas = _dollars(text, paragraphs)
            # Between prices or shell variables of a page are tags; a formula has none.
            candidates += [
                (start, 1, end) for start, end in formulas if bisect_left(starts, start) == bisect_left(starts, end)
            ]
        if "\\" in text:
            candidates += [(start, 1, end) for start, end in _latex(text, paragraphs)]
    if which.markdown:
        if "](" in text:
            candidates += [(_link_start(text, match.start()), 1, match.end()) for match in _TARGET.finditer(text)]
        if "]: " in text or "]:\t" in text:
            candidates += [(match.start(), 1, match.end()) for match in _REFERENCE.finditer(text)]
        if "|" in text and "-" in text:
            candidates += [(start, 0, end) for start, end in _tables(text)]
    rows = which.layout and ("  " in text or "\t" in text or "^" in text)
    if not candidates and not rows:
        return []
    candidates += [(start, 2, end) for start, end, _ in (find_html(text) if html is None else html)]
    spans, taken, position = [], [], 0
    for start, priority, end in sorted(candidates):
        if start >= position:
            position = end
            if priority < 2:
                spans.append((start, end))
            if priority == 2 or "\n" in text[start:end]:
                taken.append((start, end))
    if rows and (lines := list(_layout(text, taken))):
        ends = [0, *(end for _, end in lines)]  # a span within a line is a part of it
        outside = [span for span in spans if ends[bisect_right(lines, (span[0], len(text)))] <= span[0]]
        spans = sorted([*lines, *outside])
        if layout is not None:
            layout += lines
    return spans


def _layout(text: str, taken: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the lines of tables, whose gaps line up with those of their neighbours, and code with a pointer below it.

    Two lines are a table if three columns are blank in both, or if they have as many tabs, or `|` from end to end, two
    or more; three lines are one if a column is blank in all. A line that is added beside a table never takes away from
    it.

    Args:
        taken: HTML and spans of several lines, in order; a line that meets one is no row.
    """
    lines: list[tuple[int, int, str, set[int]]] = []
    position = place = 0
    for line in [*text.split("\n"), ""]:
        end = position + len(line)
        while place < len(taken) and taken[place][1] <= position:
            place += 1
        free = len(line) <= LONGEST_ROW and (place == len(taken) or taken[place][0] > end) and not _ENTITY.search(line)
        shown = line.rstrip().expandtabs() if free else ""
        item = _ITEM.match(shown)
        gaps = {column for gap in _GAP.finditer(shown, item.end() if item else 0) for column in range(*gap.span())}
        bare = line.strip()
        if free and (cells := bare.count("|" if bare[:1] == bare[-1:] == "|" else "\t")) > 1:
            gaps.add(-cells)
        lines.append((position, position + len(line.rstrip()), shown, gaps))
        position = end + 1
    rows = [n for n, (*_, shown, gaps) in enumerate(lines) if gaps or not _RULE.fullmatch(shown)]
    kept: set[int] = set()
    for row, other, third in zip(rows, rows[1:], [*rows[2:], rows[-1]], strict=False):
        shared = lines[row][3] & lines[other][3]
        if shared & lines[third][3]:
            kept.update(range(row, third + 1))
        elif shared and (min(shared) < 0 or any({column + 1, column + 2} <= shared for column in shared)):
            kept.update(range(row, other + 1))
        if lines[row][2] and other == row + 1 and _POINTER.fullmatch(lines[other][2]):
            kept.update((row, other))
    yield from ((lines[n][0], lines[n][1]) for n in sorted(kept) if lines[n][1] > lines[n][0])


def mask(text: str, spans: list[tuple[int, int]]) -> tuple[str, list[str]]:
    """Returns the text with `MASK` in place of each span, and the spans."""
    if not spans:
        return text, []
    kept, outside, position = [], [], 0
    for start, end in spans:
        outside.append(text[position:start])
        kept.append(text[start:end])
        position = end
    outside.append(text[position:])
    return MASK.join(outside), kept


def unmask(text: str, kept: list[str]) -> str:
    """Puts the spans back; `mask` reversed."""
    if not kept:
        return text
    first, *others = text.split(MASK)
    return "".join([first, *(part for pair in zip(kept, others, strict=True) for part in pair)])


def find_html(text: str) -> list[tuple[int, int, str]]:
    """Returns the (start, end, kind) of each piece of HTML, in order.

    A kind is the name of an element, with `/` before it for an end tag; "script", "style", "svg" and "!" (comments and
    declarations) cover what is inside of them.
    """
    if "<" not in text:
        return []
    pieces: list[tuple[int, int, str]] = []
    closes: dict[str, list[tuple[int, int]]] = {"script": [], "style": [], "svg": []}
    closed: set[str] = set()
    if "</" in text:
        closed = {name.lower() for name in _END_TAG.findall(text)}
    if not closed.isdisjoint(closes):
        for match in _CLOSE.finditer(text):
            closes[match[1].lower()].append(match.span())
    masks = [match.start() for match in re.finditer(MASK, text)] if any(closes.values()) else []
    for match in _TAG.finditer(text):
        name = match[2].lower()
        if name not in ELEMENTS and "-" not in name:  # a name with a hyphen is a custom element
            continue
        end = match.end()
        if not match[1] and "-" not in name and not _ATTRIBUTES.match(text, match.end(2)):
            continue
        if name not in closed and name not in ALONE and end - match.start() == len(name) + 2:
            continue
        if name in closes and not match[1]:
            later = bisect_left(closes[name], (end,))
            if later < len(closes[name]) and bisect_left(masks, end) == bisect_left(masks, closes[name][later][0]):
                end = closes[name][later][1]
        pieces.append((match.start(), end, match[1] + name))
    if "<!" in text or "<?" in text:
        pieces += [(*match.span(), "!") for match in _DECLARATION.finditer(text)]
        start = text.find("<!--")
        while start >= 0 and (end := text.find("-->", start + 4)) >= 0:
            if MASK not in text[start:end]:
                pieces.append((start, end + 3, "!"))
            start = text.find("<!--", end + 3)
        pieces.sort()
    disjoint, position = [], 0
    for start, end, kind in pieces:
        if start >= position:
            disjoint.append((start, end, kind))
            position = end
    return disjoint


class _Paragraphs:
    """The blank lines of a text, found when first asked for."""

    def __init__(self, text: str):
        self._text = text
        self._breaks: list[int] | None = None

    def joined(self, start: int, end: int) -> bool:
        """Returns whether no blank line is between two places."""
        if end - start < 2:
            return True
        if self._breaks is None:
            # Each match takes the second line end, with which the next blank line may begin: these are one gap.
            self._breaks = [match.start() for match in _BLANK.finditer(self._text)]
        later = bisect_left(self._breaks, start)
        return later == len(self._breaks) or self._breaks[later] >= end


def _fences(text: str) -> Iterator[tuple[int, int]]:
    """Yields what each fence would hold if it opened. One of backticks that is not closed runs to the end of the text.

    `~~~~` is also how reStructuredText underlines titles, so it must follow a blank line and be closed.
    """
    opened: dict[str, dict[int, list[int]]] = {"`": {}, "~": {}}  # by length, where they start
    lengths: dict[str, list[int]] = {"`": [], "~": []}
    for match in _FENCE.finditer(text):
        delimiter, info = match[1], match[2]
        kind, length, start = delimiter[0], len(delimiter), match.start()
        if not info or not info.strip():  # closes those that are not longer
            while lengths[kind] and lengths[kind][0] <= length:
                for earlier in opened[kind].pop(lengths[kind].pop(0)):
                    yield earlier, match.end()
        if kind == "`":
            opens = "`" not in info
        else:
            opens = not text[max(0, start - 200) : max(0, start - 1)].rpartition("\n")[2].strip()
        if opens:
            if length not in opened[kind]:
                insort(lengths[kind], length)
                opened[kind][length] = []
            opened[kind][length].append(start)
    for starts in opened["`"].values():
        for start in starts:
            yield start, len(text)


def _inline_code(text: str, paragraphs: _Paragraphs) -> Iterator[tuple[int, int]]:
    """Yields pairs of runs of equally many backticks, in one paragraph."""
    before: dict[int, int] = {}  # by length, where the last run starts
    for match in _BACKTICKS.finditer(text):
        start, end = match.span()
        length = end - start
        opening = before.get(length)
        before[length] = start
        if opening is not None and (not opening or text[opening - 1] != "\\"):
            if start - opening < length + 2 or paragraphs.joined(opening + length, start):
                yield opening, end


def _dollars(text: str, paragraphs: _Paragraphs) -> Iterator[tuple[int, int]]:
    """Yields formulas between `$` or `$$`, by Pandoc's rules: no space inside of a `$`, no digit after the second."""
    before: dict[str, int] = {}
    for match in _DOLLARS.finditer(text):
        token, start = match[0], match.start()
        if token[0] == "\\":
            continue
        opening = before.get(token)
        before[token] = start
        if opening is None:
            continue
        first, end = opening + len(token), start + len(token)
        if first == start or not paragraphs.joined(first, start):
            continue
        if token == "$":
            if start - first > LONGEST_FORMULA or text[first].isspace() or text[start - 1].isspace():
                continue
            if text[end : end + 1].isdigit():
                continue
        if "&" in text[first:start] and _ENTITY.search(text, first, start):
            continue  # the page is not yet text: `tags` writes the entities as characters first
        yield opening, end


def _latex(text: str, paragraphs: _Paragraphs) -> Iterator[tuple[int, int]]:
    """Yields formulas between `\\(` and `\\)` or `\\[` and `\\]`, environments, and addresses in LaTeX commands."""
    if "\\[" in text or "\\(" in text:
        brackets: dict[str, list[int]] = {"]": [], ")": []}
        for match in _ESCAPES.finditer(text):
            if match[1] in "[(":
                brackets["]" if match[1] == "[" else ")"].append(match.start())
            elif match[1] in "])":
                for start in brackets[match[1]]:
                    if paragraphs.joined(start, match.end()):
                        yield start, match.end()
                brackets[match[1]].clear()
    if "\\begin{" in text:
        opened: dict[str, list[int]] = {}
        for match in _ENVIRONMENTS.finditer(text):
            starts = opened.setdefault(match[2], [])
            if match[1] == "begin":
                starts.append(match.start())
            elif starts and match[2] != "document":
                yield starts.pop(), match.end()
    for match in _ADDRESSES.finditer(text):
        yield match.span()


def _link_start(text: str, place: int) -> int:
    """Returns where a link with `](` at a place begins: at its `[` or `![`, unless its text holds another link."""
    first = max(0, place - LONGEST_LABEL)
    start = text.rfind("[", first, place)
    if start < 0 or start < max(text.rfind("]", first, place), text.rfind("\n", first, place)):
        return place
    return start - 1 if text[start - 1 : start] == "!" else start


def _tables(text: str) -> Iterator[tuple[int, int]]:
    """Yields GitHub's tables: a row with `|`, a row of delimiters, and rows with `|`."""
    position = 0
    for match in _DELIMITER_ROW.finditer(text):
        if match.start() <= position or "|" not in match[0]:
            continue
        start = max(position, text.rfind("\n", position, match.start() - 1) + 1)
        if "|" not in text[start : match.start()]:
            continue
        end = match.end()
        while end < len(text):
            following = text.find("\n", end + 1)
            following = len(text) if following < 0 else following
            if "|" not in text[end + 1 : following]:
                break
            end = following
        position = end
        yield start, end
