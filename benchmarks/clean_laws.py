"""Tries to break the laws of the rules that clean texts, and measures how fast they are.

    python benchmarks/clean_laws.py                        # 10,000 random strings, 1 MB of each character and pattern
    python benchmarks/clean_laws.py --strings 1000 --seed 7 --only strings
    python benchmarks/clean_laws.py --only speed FILE...   # MB of UTF-8 per second of CPU time, on one core

The laws (linnet/corpus/rules): a cleaned text stays as it is, every span comes back byte for byte and in order,
no rule lengthens a text (bytes of UTF-8 after NFD; all rules but `nfc` also bytes as they are), and no string raises. A
string of 1 MB must take less than one second of CPU time. Exit status 1 if one does not hold.
"""

import argparse
import random
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path

from linnet.corpus import rules
from linnet.corpus.rules import filters
from linnet.corpus.rules.spans import find_spans, mask

PIECES = [
    "<", ">", "</", "/>", "<b>", "</b>", "<p class='a b'>", "<br/>", "<sup>", "<script>", "</script>", "<style>",
    "</style>", "<!--", "-->", "<!DOCTYPE html>", "<unk>", "<a href=\"", "\">", "&", "&amp;", "&lt;", "&gt;",
    "&nbsp;", "&#65;", "&#x3c;", "&#0;", "&nGt;", "amp;", "lt;", "http://a.b/c", "https://x.org/(y)", "ht", "tp://",
    "www.", "www.a.de", "a@b.co", "@", "mailto:", "`", "``", "```", "\n```\n", "\n```py\n", "~~~", "\n\n~~~\n", "$",
    "$$", "\\", "\\(", "\\)", "\\[", "\\]", "\\begin{a}", "\\end{a}", "\\begin{document}", "\\url{http://a.b}", "[",
    "](", "](http://a.b)", ")", "(", "]: ", "\n[a]: x", "|", "\n|-|-|\n", "\na|b\n-|-\n1|2\n", "!", "!!", "?", "..",
    "...", "....", "\u2026", "\u2014", "-", "----", "====", "####", "*", "**", "____", ",", ",,", ";", ":",
    "\u3002", "\uff01", "\uff0c", "\uff0e", "\uff11", "\uff12\uff13\uff14", "1", "234", "\u2212", "\ufb01",
    "\uff21", "\uff76", "\uff9e", "\u2f00", "\u2010", " ", "  ", "\t", "\n", "\n\n\n", "\r", "\r\n", "\v", "\f",
    "\x85", "\u2028", "\xa0", "\u3000", "\u200b", "\u200c", "\u200d", "\u00ad", "\u202e", "\ue000", "\U0001f3f4",
    "\U000e0067\U000e007f", "\U0001f600", "\0", "\x01", "\x1c", "\x7f", "\ufeff", "\ufffd", "\ufffe", "\ud800",
    "\udc00", "\udfff", "\ud83d\ude00", "e\u0301", "a\u0323\u0301", "\u0301", "\u0315\u0300", "\u0958",
    "\u0915\u093c", "\u212b", "\u1100\u1161\u11a8", "\uac00", "\u0e01\u0e33", "\u65e5\u672c", "a", "b", "word",
    "The cat", "x" * 50, "aB3" * 20, "deadbeef0123" * 5, "=" * 210, "\u00c3\u00a9", "i", "script", "sup", "    ",
    " " * 45, "> ", "- ", "# ",
]  # fmt: skip
PATTERNS = [
    "<b ", "<b '", "<b \"", "<b>", "<script>", "<!--", "<!a", "</", "&amp;", "&#", "&a", "http://", "www.", "www.a",
    "a@", "@a.", "a.@b", "$a", "$ a", "\\$", "$$", "`a", "``a`", "`\n", "```\n", "\n\n~~~ a", "~~~\n", "\\begin{a}",
    "\\begin{", "\\[", "\\(", "](", "](a", "[a]: ", "|-", "-|", "|-|\n", "a|b\n-|-\n\n", "| ", "[", "!?", "..",
    "a..", " .", ".a", "- ", "-a", " \n", " a", "\t ", "\r\n", "\n ", "\u0315\u0300", "\u0300\u0315", "a\u0301",
    "\uff11\uff0c", "\uff76\uff9e", "\u200b\u200c", "\U0001f3f4\U000e0067", "aB3", "a1", "\udc00\ud800",
    "(http://a)", "\ufffda", "\x01 ", "&lt;", "a\n", "ab\n", "<br>\n", "\\url{", "\\\\",
]  # fmt: skip
CHARACTERS = [chr(code) for code in range(128)] + list(
    "\x85\xa0\xad\u00e9\u0301\u0315\u0600\u061c\u0915\u0958\u0964\u0e01\u0e33\u1100\u200b\u200c\u200d\u200e\u2010\u2014\u2026\u2028\u2212"
    "\u2500\u2f00\u3000\u3002\u65e5\uac00\ud800\udfff\ue000\ufb01\ufeff\uff01\uff0c\uff0e\uff11\uff21\uff76\ufffd\U0001f600\U000e0067"
)
LIMIT = 1.0  # seconds of CPU time for 1 MB
RULES = rules.Rules.model_validate({name: False for name in rules.FILTERS})


def draw(random: random.Random) -> str:
    """Returns a string of pieces that rules look at; every eighth of any characters."""
    length = random.choice([1, 3, 8, 20, 60])
    if random.random() < 0.125:
        return "".join(chr(random.randrange(0x110000)) for _ in range(length))
    some = random.sample(PIECES, random.choice([2, 4, 8, 40]))
    return "".join(random.choice(some) for _ in range(length))


def decomposed(text: str) -> int:
    return len(unicodedata.normalize("NFD", text).encode("utf-8", "surrogatepass"))


def broken_law(text: str) -> tuple[str | None, str]:
    """Returns the law that a string breaks, or None; and why the string is dropped, or an empty text."""
    trace: list[rules.Change] = []
    first = rules.clean_text(text, RULES, trace=trace)
    for change in trace:
        if decomposed(change.after) > decomposed(change.before):
            return f"{change.rule} lengthens {change.before!r}", first.dropped
        if change.rule != "nfc" and _bytes(change.after) > _bytes(change.before):
            return f"{change.rule} lengthens the bytes of {change.before!r}", first.dropped
    if first.text is None:
        return None, first.dropped
    again = rules.clean_text(first.text, RULES)
    if again.text != first.text:
        return f"not idempotent: {first.text!r} becomes {again.text!r}", first.dropped
    position, decoded = 0, rules.decode(text)
    for span in mask(decoded, find_spans(decoded, RULES.spans))[1]:
        position = first.text.find(span, position)
        if position < 0:
            return f"span {span!r} is lost", first.dropped
        position += len(span)
    first.text.encode()
    for kind in ("prose", "code"):
        kept = rules.clean_text(text, kind=kind).text
        if kept is not None and rules.clean_text(kept, kind=kind).text != kept:
            return f"the filters for {kind} drop what they kept", first.dropped
    return None, first.dropped


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def strings(count: int, seed: int) -> int:
    dropped: Counter[str] = Counter()
    failures = 0
    for number in range(count):
        text = draw(random.Random(f"{seed}:{number}"))
        try:
            law, reason = broken_law(text)
        except Exception as error:
            law, reason = f"raises {error!r}", ""
        dropped[reason] += 1
        if law:
            failures += 1
            print(f"string {number} of seed {seed}: {law}\n  {text!r}")
    print(
        f"{count:,} strings of seed {seed}: {failures} break a law; {dropped['unsettled']} are dropped as unsettled, "
        f"{dropped['empty']} are empty"
    )
    return failures


def linear(size: int, limit: float) -> int:
    failures, slowest = 0, []
    for unit in CHARACTERS + PATTERNS:
        for text in {unit * (size // len(unit)), "a" + unit * (size // len(unit)) + "b"}:
            start = time.process_time()
            rules.clean_text(text)
            seconds = time.process_time() - start
            slowest.append((seconds, unit))
            if seconds > limit:
                failures += 1
                print(f"{size:,} characters of {unit!r}: {seconds:.2f} s")
    slowest.sort(reverse=True)
    worst = ", ".join(f"{unit!r} {seconds:.2f} s" for seconds, unit in slowest[:5])
    print(f"{len(slowest)} strings of {size:,} characters: {failures} take more than {limit:g} s; slowest {worst}")
    return failures


def speed(files: list[Path], repeats: int = 3) -> None:
    """Prints the throughput of texts of each kind, the fastest of some repeats, with what was removed."""
    filters.letters("a"), rules.nfc("\xe9")  # tables that are made once per process
    size: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for file in files:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
        times = []
        for _ in range(repeats):
            start = time.process_time()
            kind = rules.DEFAULT.kind_of(text, "", file.name)
            cleaned = rules.clean_text(text, kind=kind)
            times.append(time.process_time() - start)
        size[kind] += _bytes(text)
        seconds[kind] += min(times)
        changed.update([f"changed.{rule}" for rule in cleaned.removed])
        changed.update([f"dropped.{cleaned.dropped}"] if cleaned.dropped else [])
    for kind in size:
        print(
            f"{kind}: {size[kind]:,} bytes, {size[kind] / 1e6 / max(seconds[kind], 1e-9):.1f} MB per second of CPU time"
        )
    print(", ".join(f"{name} {count}" for name, count in sorted(changed.items())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["strings", "linear", "speed"])
    parser.add_argument("--strings", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="texts for the speed")
    options = parser.parse_args()
    failures = 0
    if options.only in (None, "strings"):
        failures += strings(options.strings, options.seed)
    if options.only in (None, "linear"):
        failures += linear(1_000_000, LIMIT)
    if options.only == "speed" or options.files:
        speed(options.files)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
