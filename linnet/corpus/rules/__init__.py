"""The rules that clean a text, in order: paper 001, appendix D.1 ("Rule-based filtering").

A rule is a pure function of a text and its settings. `clean_text` masks the spans of a text
(`spans.py`), applies every rule, and does so again until nothing changes, because what one rule removes
can bring two halves of something together that another removes. So these laws hold for every string:

- clean(clean(x)) = clean(x): a result is a text that the rules leave as it is.
- Every span of x is in clean(x), byte for byte and in order.
- No rule lengthens a text, in bytes of UTF-8 after canonical decomposition (NFD). `nfc` alone can lengthen the bytes as
  they are: Unicode has characters without a composed form, such as U+0958, which NFC writes as two.
- The time is linear in the length: no pattern backtracks over what it has read, and the passes are bounded.

A text that does not settle in `PASSES`, or that loses a span on the way, is dropped and counted as `unsettled`.
"""

import html
import re
import typing
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import Field, field_validator

from linnet.config import Config, not_installed, parse, read_yaml
from linnet.corpus.documents import Document, Part, Samples, read_part
from linnet.corpus.rules import filters
from linnet.corpus.rules.filters import Kind, Switch, kind_of_file, looks_like_code
from linnet.corpus.rules.spans import BLOCKS, CELLS, ELEMENTS, MASK, Spans, find_html, find_spans, mask, unmask
from linnet.install import install_command

PASSES = 8  # a text seldom needs more than two: one that changes it and one that finds nothing

# --- decode ---------------------------------------------------------------------------------------------------------


def decode(text: str) -> str:
    """Joins halves of surrogate pairs, writes U+FFFD for those that stay alone, removes NUL and byte order marks.

    It applies to spans too, because no corpus can store what it removes: UTF-8 has no surrogates, and NUL separates
    documents.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", "").lstrip("\ufeff")


# --- nfc ------------------------------------------------------------------------------------------------------------

MOST_MARKS = 30  # combining characters in a row: Unicode's Stream-Safe Text Format (UAX 15, section 13)


@cache
def _marks() -> re.Pattern[str]:
    """Finds long runs of combining characters, and of any characters of the second plane, which is faster to match."""
    codes = [code for code in range(0x300, 0x10000) if unicodedata.combining(chr(code))]
    starts = [code for code in codes if not unicodedata.combining(chr(code - 1))]
    ends = [code for code in codes if not unicodedata.combining(chr(code + 1))]
    ranges = "".join(f"{chr(start)}-{chr(end)}" for start, end in zip(starts, ends, strict=True))
    marks = f"[{ranges}\U00010000-\U0001ffff]"
    return re.compile(f"{marks}{marks}{{{MOST_MARKS},}}+")


def _with_fewer_marks(match: re.Match[str]) -> str:
    kept, count = [], 0
    for character in match[0]:
        count = count + 1 if unicodedata.combining(character) else 0
        if count <= MOST_MARKS:
            kept.append(character)
    return "".join(kept)


def _is_ascii(text: str) -> bool:
    """Whether there is nothing but ASCII outside of spans."""
    return text.isascii() or text.replace(MASK, "").isascii()


def nfc(text: str) -> str:
    """Returns the text in Unicode's composed form, with at most 30 combining characters in a row.

    Sorting a longer row takes time with the square of its length.
    """
    if _is_ascii(text):
        return text
    text = _marks().sub(_with_fewer_marks, text)
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


# --- tags -----------------------------------------------------------------------------------------------------------

_ENTITY = re.compile(r"&(?:amp;)*+((?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});)?")


def tags(text: str) -> str:
    """Removes HTML: tags, comments, scripts, styles and drawings; and writes entities as characters.

    The tags of blocks become line ends, those of cells spaces. `<sup>` before a number becomes `^`, so that
    10<sup>6</sup> is not read as 106. Words in angle brackets that are not elements of HTML (`<unk>`, `List<T>`) stay,
    and so do those that are never closed (`<source>`), and `&lt;` where the character would start a tag.
    """
    if "<" in text and (pieces := find_html(text)):
        text = _without_markup(text, pieces)
    return _ENTITY.sub(_character, text) if "&" in text else text


def _without_markup(text: str, pieces: list[tuple[int, int, str]]) -> str:
    """Removes pieces of HTML, with white space that a browser would not show: around blocks, and before lines."""
    page = any(kind in ("html", "body") for _, _, kind in pieces)
    parts, position, last = [], 0, "\n"
    inside_block = preformatted = False
    for start, end, kind in [*pieces, (len(text), len(text), "end of the text")]:
        name, outside = kind.lstrip("/"), text[position:start]
        block = name in BLOCKS or name in CELLS
        if not preformatted:
            if inside_block and block and outside.isspace():
                outside = ""
            if page:
                outside = _INDENTATION.sub("\n", outside)
            if inside_block:
                outside = _without_indentation(outside)
            if block:
                outside = outside.rstrip(" \t")
        last = outside[-1:] or last
        instead = ""
        if name in CELLS or kind in _QUIET:
            instead = " " if kind in CELLS and last != "\n" else ""
        elif block:
            instead = "\n"
        elif kind == "sup" and text[start - 1 : start].isalnum() and text[end : end + 1] in _OF_POWERS:
            instead = "^"
        parts += [outside, instead]
        position, last, inside_block = end, instead or last, block
        if name == "pre":
            preformatted = kind == "pre"
    return "".join(parts)


def _without_indentation(text: str) -> str:
    """Returns the text behind the tag of a block without the spaces before its first word."""
    bare = text.lstrip()
    return "\n" * text.count("\n", 0, len(text) - len(bare)) + bare


_INDENTATION = re.compile(r"\n[ \t]++")
_QUIET = frozenset("/dd /dt /li /optgroup /option /tr".split())  # the next start tag begins a line
_OF_POWERS = frozenset("0123456789-+\u2212")


_NAME = re.compile(r"/?([A-Za-z][A-Za-z0-9-]{0,40}+)")
_DECLARES = ("!", "?", MASK)


def _character(match: re.Match[str]) -> str:
    """Returns what an entity stands for, escaped once or several times."""
    entity = "&" + (match[1] or "")
    character = html.unescape(entity)
    if character == "<":
        name = _NAME.match(match.string, match.end())
        if (
            match.string[match.end() : match.end() + 1] in _DECLARES
            or name
            and ("-" in name[1] or name[1].lower() in ELEMENTS)
        ):
            return "&lt;"  # the character would begin a tag
    if character in "`$\\":
        return entity  # a span
    return character if _size(character) <= len(entity) else entity


# --- urls -----------------------------------------------------------------------------------------------------------

# Only ASCII belongs to an address: Chinese and Japanese texts continue behind one without a space.
_REST = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'*+,;=%-]++|\([A-Za-z0-9._~:/?#@!$&'*+,;=%-]*+\))*+")
_DOMAIN = re.compile(r"(?:[A-Za-z0-9-]{1,63}+\.){1,8}[A-Za-z]{2,24}+(?![\w-])")
_SCHEMES = ("https", "http", "ftp")
_LOCAL = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.%+-"
_PAIRS = {"(": ")", "<": ">", "[": "]", "\uff08": "\uff09"}


class Urls(Switch):
    """Web and mail addresses."""

    mail: bool = Field(True, description="also removes mail addresses")


def urls(text: str, settings: Urls) -> str:
    """Removes web and mail addresses, with brackets that hold nothing else."""
    if "://" in text:
        text = _without(text, "://", _web)
    if "www." in text:
        text = _without(text, "www.", _www)
    if settings.mail and "@" in text:
        text = _without(text, "@", _mail)
    return text


def _web(text: str, place: int) -> tuple[int, int] | None:
    """Returns where the address with `://` at a place starts and ends."""
    before = text[max(0, place - 6) : place].lower()
    scheme = next((scheme for scheme in _SCHEMES if before.endswith(scheme)), None)
    if scheme is None or _in_word(before[: -len(scheme)][-1:]):
        return None
    return place - len(scheme), _end(text, place + 3)


def _www(text: str, place: int) -> tuple[int, int] | None:
    before, after = text[max(0, place - 1) : place], text[place + 4 : place + 5]
    if _in_word(before) or before and before in "_.@/:-" or not (after.isascii() and after.isalnum()):
        return None
    return place, _end(text, place)


def _mail(text: str, place: int) -> tuple[int, int] | None:
    before = text[max(0, place - 72) : place]
    name = len(before) - len(before.rstrip(_LOCAL))
    domain = _DOMAIN.match(text, place + 1)
    if domain is None or not 1 <= name <= 64 or _in_word(before[: len(before) - name][-1:]):
        return None
    name += len("mailto:") if before[: len(before) - name].lower().endswith("mailto:") else 0
    return place - name, domain.end()


def _in_word(character: str) -> bool:
    """Whether an address cannot begin behind a character; Chinese and Thai put no space before it."""
    return character < "\u0e00" and character.isalnum()


def _end(text: str, start: int) -> int:
    """Returns where an address ends, without punctuation that belongs to the sentence around it."""
    rest = _REST.match(text, start)
    return start + len(rest[0].rstrip(".,;:!?'*]")) if rest else start


def _without(text: str, sign: str, address: Callable[[str, int], tuple[int, int] | None]) -> str:
    """Returns the text without the addresses that have a sign."""
    kept, position, place = [], 0, text.find(sign)
    while place >= 0:
        bounds = address(text, place)
        if bounds is None or bounds[0] < position:
            place = text.find(sign, place + 1)
            continue
        start, end = bounds
        if start > position and text[end : end + 1] == _PAIRS.get(text[start - 1]):
            start, end = start - 1, end + 1
        if not start or text[start - 1] == "\n":  # no space is left at the start of a line
            while end < len(text) and text[end] == " ":
                end += 1
        kept.append(text[position:start])
        position = end
        place = text.find(sign, end)
    return "".join([*kept, text[position:]])


# --- garbled --------------------------------------------------------------------------------------------------------

_BROKEN = re.compile(f"[{filters.BROKEN}]")
# Scripts that write no spaces between words, so that a long run says nothing: Thai to Khmer, Chinese, Japanese, Korean,
# Yi, and those of the third plane. The last is MASK, with the other surrogates.
_UNSPACED = (
    "\u0e00-\u109f\u1780-\u17ff\u1950-\u1aaf\u1b00-\u1b7f\u2e80-\ua4cf\ua980-\uaadf\uac00-\uffef\U00020000-\U0003ffff"
)
_WORD = f"[^\\s{_UNSPACED}]"
_ENCODED = re.compile(r"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/=_-]{32,}+")
_HEX = re.compile(r"[0-9a-fA-F-]*+\Z")


class Garbled(Switch):
    """Strings without use."""

    share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="a line with a larger share of replacement and control characters goes; others lose them",
    )
    longest: int = Field(
        200, ge=20, description="longest run without white space, in scripts that put spaces between words"
    )
    encoded: int = Field(40, ge=32, description="smallest length of encoded data (base64, hexadecimal) that is removed")
    mojibake: bool = Field(False, description="repairs text that was decoded wrongly, by ftfy (extra `clean`)")

    @field_validator("mojibake")
    @classmethod
    def _installed(cls, mojibake: bool) -> bool:
        if mojibake and not_installed(["ftfy"]):
            raise ValueError(
                f"ftfy is not installed; install the extra `clean`: {install_command('clean')}, or use false"
            )
        return mojibake


def garbled(text: str, settings: Garbled) -> str:
    """Removes strings that say nothing: broken characters, runs that are too long for words, encoded data."""
    if settings.mojibake and not text.isascii():
        text = "\n".join(map(_repaired, text.split("\n")))
    if not (text.isascii() and text.isprintable()) and _BROKEN.search(text):
        lines = text.split("\n")
        text = "\n".join(line for line in (_unbroken(line, settings.share) for line in lines) if line is not None)
    return _long(min(settings.longest + 1, settings.encoded)).sub(lambda run: _useful(run[0], settings), text)


def _useful(run: str, settings: Garbled) -> str:
    """Returns what is left of a long run without white space."""
    run = _longer(settings.longest).sub("", run)
    return _ENCODED.sub(lambda match: "" if _is_encoded(match[0], settings.encoded) else match[0], run)


def _repaired(line: str) -> str:
    if line.isascii():
        return line
    import ftfy

    fixed = ftfy.fix_encoding(line)
    return fixed if _size(fixed) <= _size(line) and fixed.count(MASK) == line.count(MASK) else line


def _size(text: str) -> int:
    """Returns the bytes of a text after canonical decomposition, in which no rule may lengthen it."""
    return len(unicodedata.normalize("NFD", text).encode("utf-8", "surrogatepass"))


def _unbroken(line: str, share: float) -> str | None:
    """Returns a line without broken characters; None if it has too many and no span."""
    rest, count = _BROKEN.subn("", line)
    if count > share * len(line) and MASK not in line:
        return None
    return rest


@cache
def _long(length: int) -> re.Pattern[str]:
    return re.compile(rf"\S{{{length},}}+")


@cache
def _longer(length: int) -> re.Pattern[str]:
    return re.compile(f"(?<!{_WORD}){_WORD}{{{length + 1},}}+")


def _is_encoded(word: str, shortest: int) -> bool:
    """Returns whether a word changes between small letters, capitals and digits as often as random characters do.

    In base64, 43 % of the places are such borders; in names such as getValueOfTheFirst2, one in a word.
    """
    if len(word) < shortest:
        return False
    digits = sum(map(word.count, "0123456789"))
    if _HEX.match(word):
        return 5 <= digits <= len(word) - 5
    if not digits or word.islower() or word.isupper():
        return False
    # The capital of a name and the letter behind it make one border.
    borders = sum(
        before.isdigit() != after.isdigit() or after.isupper() and not before.isupper()
        for before, after in zip(word, word[1:], strict=False)
    )
    return borders >= 0.26 * len(word)


# --- punctuation ----------------------------------------------------------------------------------------------------

# Marks of which two are one too many, and symbols that notations repeat up to three times ("---", "==", "**"); the last
# of these is "-", which stands at the end of a class.
_MARKS = frozenset("!?,;\u060c\u061b\u061f\u0964\u3001\u3002\uff01\uff0c\uff1b\uff1f")
_SYMBOLS = "=*_~+%@&|:/\"'\u00b7\u2010-\u2013\u2022\u2500-\u257f\u25a0-\u25ff\u2605\u2606\uff0d\uff1a\uff1d\uff5e-"
_REPEATED = re.compile(
    rf"([!?,;\u060c\u061b\u061f\u0964\u3001\u3002\uff01\uff0c\uff1b\uff1f#.\u2026\u2014{_SYMBOLS}])\1++"
)
# Characters of which as many stay as a notation needs: headings, an ellipsis, the Chinese ellipsis and dash.
_LONGEST = {"#": 6, ".": 3, "\u2026": 2, "\u2014": 2}
_BORDER = re.compile("[-=+*_~^|:#.'\"` \\t\u2500-\u257f]{3,200}+")
_END_OF_WORD = re.compile(r"[\s\"')\]\u201d\u2019]|\Z")


def punctuation(text: str) -> str:
    """Writes repeated punctuation once.

    Sentence marks ("!!") from two on, symbols that notations repeat ("--", "==", "**") from four on. An ellipsis stays
    one mark of three dots, the Chinese ellipsis and dash stay two characters. Lines of symbols alone, up to 200
    characters, are borders of tables or underline titles, and stay.
    """
    return _REPEATED.sub(_once, text)


def _once(match: re.Match[str]) -> str:
    run, character = match[0], match[1]
    if character in _MARKS:
        return character
    if character in _LONGEST:
        if run == ".." and match.string[match.start() - 1 : match.start()].isalnum():
            return "." if _END_OF_WORD.match(match.string, match.end()) else run
        return run if len(run) <= _LONGEST[character] else character * (1 if character == "#" else _LONGEST[character])
    return run if len(run) < 4 or _in_border(match.string, *match.span()) else character


def _in_border(text: str, start: int, end: int) -> bool:
    """Returns whether the line around a run has at most 200 characters, all of them symbols."""
    first = text.rfind("\n", max(0, start - 201), start) + 1
    last = text.find("\n", end, end + 201)
    last = len(text) if last < 0 else last
    return last - first <= 200 and _BORDER.fullmatch(text, first, last) is not None


# --- characters -----------------------------------------------------------------------------------------------------

# Invisible: soft hyphen, directional marks and embeddings, word joiner and invisible operators, annotations, object
# replacement, byte order mark; private use; tags, which a flag of a region needs.
_INVISIBLE = (
    "\u00ad\u061c\u180e\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffc\ue000-\uf8ff\U000f0000-\U0010ffff"
)
_INVISIBLES = re.compile(f"[{_INVISIBLE}][{_INVISIBLE}]*+")
_ANY_TAG = re.compile("[\U000e0000-\U000e007f]")
_TAGS = re.compile("(\U0001f3f4[\U000e0030-\U000e007a]{1,8}\U000e007f)|[\U000e0000-\U000e007f]")
_BREAKS_WORDS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese and Khmer mark words with U+200B
_ZERO_WIDTH = re.compile(f"(?<=[{_BREAKS_WORDS}])(\u200b)(?=[{_BREAKS_WORDS}])|\u200b")
_JOINERS = re.compile("([\u200c\u200d])[\u200c\u200d]++")
_OLD = "\ufb00-\ufb06\u2e80-\u2fd5\uff21-\uff3a\uff41-\uff5a\uff66-\uff9f"  # stand for characters that have their own
_OLD_FORMS = re.compile(f"[{_OLD}][{_OLD}]*+")


def characters(text: str) -> str:
    """Removes invisible and private characters, and writes those of old encodings in their standard form.

    Ligatures (U+FB00 to FB06), full-width letters, half-width katakana and radicals become the characters that they
    stand for (NFKC), hyphens become "-". Quotation marks, dashes, ellipses and full-width punctuation stay: they are
    the standard of many languages. So do joiners in Persian and Hindi and U+200B between Thai or Khmer words.
    """
    if _is_ascii(text):
        return text
    text = _INVISIBLES.sub("", text)
    text = _OLD_FORMS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = text.replace("\u2010", "-").replace("\u2011", "-")
    if "\u200b" in text:
        text = _ZERO_WIDTH.sub(lambda match: match[1] or "", text)
    if "\u200c" in text or "\u200d" in text:
        text = _JOINERS.sub(r"\1", text)
    if _ANY_TAG.search(text):
        text = _TAGS.sub(lambda match: match[1] or "", text)
    return text


# --- numbers --------------------------------------------------------------------------------------------------------

_FULL = re.compile("[\uff10-\uff19][\uff10-\uff19\uff0c\uff0e]*+")
_THOUSANDS = re.compile(
    "(?<![\uff0c\uff10-\uff19])[\uff10-\uff19]{1,3}+(?:\uff0c[\uff10-\uff19]{3}+)++(?![\uff0c\uff10-\uff19])"
)
_MINUS = re.compile("\u2212(?=[0-9])")
_DIGITS = {0xFF10 + digit: str(digit) for digit in range(10)}


def numbers(text: str) -> str:
    """Writes full-width digits, their separators and the minus sign before a digit in ASCII. No digit is changed.

    Digits of other scripts (Arabic, Devanagari) belong to their languages and stay, and so do separators in ASCII.
    """
    if _is_ascii(text):
        return text
    return _MINUS.sub("-", _FULL.sub(_in_ascii, text))


def _in_ascii(match: re.Match[str]) -> str:
    """Writes a run of full-width digits and separators in ASCII. A comma separates thousands, or else sentences."""
    number = match[0]
    if "\uff0c" in number:
        number = _THOUSANDS.sub(lambda thousands: thousands[0].replace("\uff0c", ","), number)
    if "\uff0e" in number[:-1]:
        number = number[:-1].replace("\uff0e", ".") + number[-1]
    return number.translate(_DIGITS)


# --- whitespace -----------------------------------------------------------------------------------------------------

_LINE_ENDS = re.compile("[\r\v\f\x85\u2028\u2029]")
_WIDE_INDENTATION = re.compile("^[ \t]*+\u3000[ \t\u3000]*+", re.M)
_SPACES = re.compile("[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_INNER = re.compile(r"[ \t][ \t]++")
_LINE_OR_RUN = re.compile(r"^([ \t]++)([^\n]*+)|[ \t][ \t]++", re.M)
_INDENTED_CODE = re.compile(r" {4}| {0,3}\t")  # CommonMark, section 4.4
_BLANK_LINES = re.compile(r"\n{3,}+")


def _one_space(run: re.Match[str]) -> str:
    return "\t" if "\t" in run[0] else " "


class Whitespace(Switch):
    """Line ends, spaces and blank lines."""

    indentation: int = Field(40, ge=1, description="longest indentation of a line; a longer one is removed")


def whitespace(text: str, settings: Whitespace) -> str:
    """Writes one kind of line end and space, at most one space in a row and one blank line, none at line ends.

    A run with a tab becomes one tab, so that columns stay apart. The indentation of lines stays, and in lines that are
    indented by four columns, which can be code, all spaces but those at their ends.
    """

    def line_or_run(match: re.Match[str]) -> str:
        indentation, rest = match[1], match[2]
        if indentation is None:
            return _one_space(match)
        if len(indentation) > settings.indentation:
            indentation = ""
        elif _INDENTED_CODE.match(indentation):
            return match[0]
        return indentation + _INNER.sub(_one_space, rest)

    text = _LINE_ENDS.sub("\n", text.replace("\r\n", "\n"))
    if not _is_ascii(text):
        if "\u3000" in text:
            text = _WIDE_INDENTATION.sub("", text)
        text = _SPACES.sub(" ", text)
    if " \n" in text or "\t\n" in text or text[-1:] in (" ", "\t"):
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    if "  " in text or "\t" in text:
        text = _LINE_OR_RUN.sub(line_or_run, text)
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text.strip("\n")


# --- watermarks -----------------------------------------------------------------------------------------------------

_NUMBERS = re.compile("[0-9]++")


class Watermarks(Switch):
    """Lines that a page or a site writes between the lines of a text, such as `Downloaded from ... on 3 May`."""

    enabled: bool = Field(False, description="true removes them")
    repeats: int = Field(5, ge=2, description="occurrences of a line, numbers apart, from which it is a watermark")
    apart: int = Field(3, ge=1, description="least other lines between two occurrences that count")


def watermarks(text: str, settings: Watermarks) -> str:
    """Removes every line that stands `repeats` times or more in the text, with other lines between.

    Numbers, case and white space at both ends do not tell lines apart. Lines without a letter stay, and
    lines with a span too.
    """
    lines = text.split("\n")
    if len(lines) < settings.repeats * settings.apart:
        return text
    keys = [_NUMBERS.sub("0", line.strip().casefold()) for line in lines]
    last: dict[str, int] = {}
    counts: dict[str, int] = {}
    for number, key in enumerate(keys):
        if number - last.get(key, -settings.apart - 1) > settings.apart:
            counts[key] = counts.get(key, 0) + 1
        last[key] = number
    marks = {key for key, count in counts.items() if count >= settings.repeats and MASK not in key}
    marks = {key for key in marks if any(map(str.isalpha, key))}
    return "\n".join(line for line, key in zip(lines, keys, strict=True) if key not in marks) if marks else text


# --- all of them ----------------------------------------------------------------------------------------------------


class Rules(Config):
    """What `linnet corpus clean` removes and drops. Rules apply in this order, whatever the order of a file."""

    kind: typing.Literal["auto", "prose", "code"] = Field(
        "auto",
        description="kind of the documents: rules for prose leave code alone; `auto` looks at the name of the file, "
        "then at the text",
    )
    kinds: dict[str, typing.Literal["auto", "prose", "code"]] = Field(
        {}, description="kind of the documents of a source, by its label: `{github: code}`"
    )
    spans: Spans = Field(Spans(), description="parts of a text that come back byte for byte")
    nfc: Switch = Field(Switch(), description="Unicode's composed form (NFC), at most 30 combining marks in a row")
    tags: Switch = Field(
        Switch(),
        description="HTML: removes tags, comments, scripts, styles and drawings, writes entities as characters",
    )
    urls: Urls = Field(Urls(), description="removes web and mail addresses")
    garbled: Garbled = Field(
        Garbled(), description="removes broken characters, runs too long for words, and encoded data"
    )
    punctuation: Switch = Field(Switch(), description="writes repeated punctuation once")
    characters: Switch = Field(
        Switch(), description="removes invisible characters, writes others in their standard form"
    )
    numbers: Switch = Field(Switch(), description="writes full-width digits and separators in ASCII; never rounds")
    watermarks: Watermarks = Field(
        Watermarks(),
        description="removes lines that repeat through a document; off unless it is set",
        exclude_if=lambda watermarks: not watermarks.enabled,
    )
    whitespace: Whitespace = Field(
        Whitespace(), description="one kind of line end and space, one space in a row, one blank line"
    )
    broken: filters.Broken = Field(
        filters.Broken(), description="drops documents with many replacement and control characters"
    )
    length: filters.Length = Field(filters.Length(), description="drops documents that are too short or too long")
    letters: filters.Letters = Field(filters.Letters(), description="drops documents with few letters")
    repeated_lines: filters.RepeatedLines = Field(
        filters.RepeatedLines(), description="drops documents whose lines repeat"
    )
    repeated_ngrams: filters.RepeatedNgrams = Field(
        filters.RepeatedNgrams(), description="drops documents that repeat themselves"
    )

    @classmethod
    def read(cls, path: str | Path) -> "Rules":
        """Reads a YAML file. Raises `ConfigError` that names all problems."""
        return parse(cls, read_yaml(path), str(path))

    def kind_of(self, text: str, source: str, file: str) -> Kind:
        """Returns the kind of a document, from the settings, the name of its file or its text."""
        kind = self.kinds.get(source, self.kind)
        if kind != "auto":
            return kind
        return kind_of_file(file) or ("code" if looks_like_code(text) else "prose")


DEFAULT = Rules()

# Name, and the function of a text and all settings. `decode` comes before them and cannot be left out.
APPLIED: dict[str, Callable[[str, Rules], str]] = {
    "nfc": lambda text, rules: nfc(text),
    "tags": lambda text, rules: tags(text),
    "urls": lambda text, rules: urls(text, rules.urls),
    "garbled": lambda text, rules: garbled(text, rules.garbled),
    "punctuation": lambda text, rules: punctuation(text),
    "characters": lambda text, rules: characters(text),
    "numbers": lambda text, rules: numbers(text),
    "watermarks": lambda text, rules: watermarks(text, rules.watermarks),
    "whitespace": lambda text, rules: whitespace(text, rules.whitespace),
}
NAMES = ("decode", *APPLIED)
FILTERS = ("broken", "length", "letters", "repeated_lines", "repeated_ngrams")


@dataclass(frozen=True, slots=True)
class Change:
    """What one rule did to a text, with spans masked."""

    rule: str
    before: str
    after: str
    spans: list[str]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A cleaned text.

    Attributes:
        text: None if the document is dropped.
        dropped: one of `FILTERS`, "empty" or "unsettled"; "" if it is kept.
        removed: for each rule that changed the text, the characters by which it became shorter. (One ligature becomes
            two letters, so a number can be negative.)
        layout: lines of tables and code in plain text, which stay as they are.
    """

    text: str | None
    dropped: str
    removed: dict[str, int]
    layout: int = 0


def clean_text(text: str, rules: Rules = DEFAULT, kind: Kind = "prose", trace: list[Change] | None = None) -> Cleaned:
    """Cleans a text, and says why it is dropped.

    Of code, `decode` and the filters `broken` and `length` apply: all of it is one span.

    Args:
        trace: receives what each rule did, in order.
    """
    removed: dict[str, int] = {}

    def record(rule: str, before: str, after: str, spans: list[str]) -> None:
        removed[rule] = removed.get(rule, 0) + len(before) - len(after)
        if trace is not None:
            trace.append(Change(rule, before, after, spans))

    decoded = decode(text)
    if decoded != text:
        record("decode", text, decoded, [])
    if kind == "code":
        return Cleaned(*_kept(decoded, decoded, decoded, rules, kind), removed)
    applied = [(name, rule) for name, rule in APPLIED.items() if getattr(rules, name).enabled]
    text, first, kept, layout = decoded, "", [], list[tuple[int, int]]()
    for turn in range(PASSES):
        masked, spans = mask(text, find_spans(text, rules.spans, None if turn else layout))
        if not turn:
            first, kept = masked, spans
        after = masked
        for name, rule in applied:
            before, after = after, rule(after, rules)
            if after != before:
                record(name, before, after, spans)
        if after == masked:
            break
        text = decode(unmask(after, spans))
    else:
        return Cleaned(None, "unsettled", removed)
    if not _in_order(kept, text):
        return Cleaned(None, "unsettled", removed)
    return Cleaned(*_kept(first, masked, text, rules, kind), removed, len(layout))


def _in_order(spans: list[str], text: str) -> bool:
    position = 0
    for span in spans:
        position = text.find(span, position)
        if position < 0:
            return False
        position += len(span)
    return True


def _kept(first: str, masked: str, text: str, rules: Rules, kind: Kind) -> tuple[str | None, str]:
    """Returns the text and no reason, or None and the reason why it is dropped.

    Args:
        first: the text before all rules, masked; a second cleaning sees `masked`, so both must pass `broken`.
    """
    if not text:
        return None, "empty"
    if rules.broken.enabled and max(filters.broken(first), filters.broken(masked)) > rules.broken.share:
        return None, "broken"
    if rules.length.enabled:
        size = len(text.encode())
        if size < rules.length.shortest or size > (rules.length.longest or size):
            return None, "length"
    if kind == "code":
        return text, ""
    if rules.letters.enabled and filters.letters(text) < rules.letters.share:
        return None, "letters"
    if rules.repeated_lines.enabled and filters.repeated_lines(text) > rules.repeated_lines.share:
        return None, "repeated_lines"
    if rules.repeated_ngrams.enabled:
        settings = rules.repeated_ngrams
        if filters.repeated_ngrams(text, settings.length) > settings.share:
            return None, "repeated_ngrams"
    return text, ""


# The stage `clean`: rules applied to every document, with counts and samples of what each rule removed.

BEFORE, AFTER = 25, 140  # characters of a sample before and behind the first place that changed
SPAN = 40  # characters of a span in a sample


@dataclass(frozen=True)
class Clean:
    """Cleans the documents of a part.

    Counts: `kind.KIND` and `dropped.REASON` (documents), `changed.RULE` (documents that are kept or dropped),
    `removed.RULE` (characters), and `kept.layout` (documents with tables or code in plain text, which stay as they
    are). Samples: `changed.RULE` with the text before and after, `dropped.REASON` with the text.
    """

    rules: Rules = DEFAULT

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]:
        for document in read_part(part, counts, samples):
            kind = self.rules.kind_of(document.text, document.source, document.file)
            counts[f"kind.{kind}"] += 1
            cleaned = clean_text(document.text, self.rules, kind)
            for rule, characters in cleaned.removed.items():
                counts[f"changed.{rule}"] += 1
                counts[f"removed.{rule}"] += characters
            if any(samples.wants(f"changed.{rule}", document) for rule in cleaned.removed):
                trace: list[Change] = []
                clean_text(document.text, self.rules, kind, trace)
                for rule in cleaned.removed:
                    change = next(change for change in trace if change.rule == rule)
                    before, after = excerpts(change)
                    samples.add(f"changed.{rule}", document, before=before, after=after)
            if cleaned.text is None:
                counts[f"dropped.{cleaned.dropped}"] += 1
                samples.add(f"dropped.{cleaned.dropped}", document, text=document.text)
            else:
                if cleaned.layout:
                    counts["kept.layout"] += 1
                yield replace(document, text=cleaned.text)


def excerpts(change: Change) -> tuple[str, str]:
    """Returns the surroundings of the first place that a rule changed, before and after it."""
    place = _common(change.before, change.after)
    start = max(0, place - BEFORE)
    span = change.before.count(MASK, 0, start)
    return _excerpt(change.before, start, place, change.spans[span:]), _excerpt(
        change.after, start, place, change.spans[span:]
    )


def _common(text: str, other: str) -> int:
    """Returns the length of the longest common beginning."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _excerpt(text: str, start: int, place: int, spans: list[str]) -> str:
    first, *others = text[start : place + AFTER].split(MASK)
    shown = [span if len(span) <= SPAN else f"{span[: SPAN // 2]}…{span[-SPAN // 2 :]}" for span in spans]
    return first + "".join(span + outside for span, outside in zip(shown, others, strict=False))
