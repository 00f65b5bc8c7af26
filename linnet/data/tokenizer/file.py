"""What the values of a tokenizer.json of the `tokenizers` library say, and the changes that Linnet makes to them."""

import functools
import math
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import pre_tokenizers

from linnet.config import shown
from linnet.data.tokenizer.config import MOST_IDS

MOST_GROWTH = 1000  # times as long as a text, after the replacements of a tokenizer.json
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def endless_growth(values: dict) -> str | None:
    """Returns a problem if a tokenizer lengthens texts without bound: six steps that write 100 letters for one make
    10^12 of each letter."""
    for key in ("normalizer", "decoder"):
        if (times := _growth(values.get(key))) > MOST_GROWTH:
            return f"{key} may make a text {times:,.0f} times as long, and {MOST_GROWTH} is the most; use another one"
    return None


def _growth(step: Any) -> float:
    """Returns how many times as long the replacements of a normalizer or decoder may make a text."""
    if not isinstance(step, dict):
        return 1.0
    inner = [part for key in ("normalizers", "decoders") if isinstance(step.get(key), list) for part in step[key]]
    times = math.prod(map(_growth, inner))
    pattern, content = step.get("pattern"), step.get("content")
    if step.get("type") == "Replace" and isinstance(pattern, dict) and isinstance(content, str):
        least = len(str(pattern.get("String", "")).encode()) or 1  # an expression may match one letter
        times *= max(1.0, len(content.encode(errors="surrogatepass")) / least)
    return times


def bad_id(values: dict) -> str | None:
    """Returns a problem if a tokenizer.json names an id that no table of tokens can have, else None."""
    model = values.get("model")
    vocab, added = model.get("vocab") if isinstance(model, dict) else None, values.get("added_tokens")
    named = list(vocab.items()) if isinstance(vocab, dict) else []
    named += [(entry.get("content"), entry.get("id")) for entry in added or [] if isinstance(entry, dict)]
    for token, number in named:
        if type(number) is int and not 0 <= number < MOST_IDS:
            return f"token {shown(token)} has the id {shown(number)}; ids are 0 to {MOST_IDS - 1:,}"
    return None


def is_byte_level(values: dict) -> bool:
    """Returns whether the tokenizer works on bytes and adds nothing, so that each token has an exact byte length."""

    def parts(step: dict | None) -> list[dict]:
        if step is None:
            return []
        inner = step.get("pretokenizers") or step.get("decoders")
        return [part for child in inner for part in parts(child)] if inner else [step]

    before = [part for part in parts(values["pre_tokenizer"]) if part["type"] == "ByteLevel"]
    after = [part["type"] for part in parts(values["decoder"])]
    return after == ["ByteLevel"] and len(before) == 1 and not before[0]["add_prefix_space"]


def places_inside(tokens: Iterable[str]) -> str:
    """Returns a regex of the places behind the first character of each token of several, "" if there is none."""
    places = [f"(?<={re.escape(token[:1])})(?={re.escape(token[1:])})" for token in tokens if len(token) > 1]
    return "|".join(places)


def keep_apart(values: dict, end: str, special: Iterable[str]) -> dict:
    """Returns the values of a tokenizer.json whose model finds no special token by its spelling, or `values` itself.

    The library keeps special tokens out of a text only where it looks for them before its model does. A model whose
    own vocabulary has them, such as Unigram or WordLevel, finds them by their spelling. So the last step before the
    model cuts the text behind the first character of such a token, and `end` becomes special.
    """
    model, added = values["model"], values["added_tokens"]
    marked = [{**token, "special": True, "normalized": False} if token["content"] == end else token for token in added]
    vocab = model["vocab"]
    pieces = {piece for piece, _ in vocab} if isinstance(vocab, list) else vocab.keys()
    reached = [token for token in special if token in pieces]
    if model["type"] == "BPE" and not model.get("ignore_merges"):
        merged = {"".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1) for merge in model["merges"]}
        reached = [token for token in reached if token in merged]
    places = places_inside(reached)
    if not places:
        return values if marked == added else {**values, "added_tokens": marked}
    cut = {"type": "Split", "pattern": {"Regex": places}, "behavior": "Isolated", "invert": False}
    before = values["pre_tokenizer"]
    if before is not None and before.get("pretokenizers", [])[-1:] == [cut]:
        return {**values, "added_tokens": marked}
    steps = {"type": "Sequence", "pretokenizers": [cut] if before is None else [before, cut]}
    return {**values, "added_tokens": marked, "pre_tokenizer": steps}


def falls_back(values: dict) -> bool:
    """Returns whether the values of a tokenizer.json are a BPE over characters that spells all others as bytes.

    Such a tokenizer has ASCII characters and the tokens <0x80> to <0xFF>, or <0x00> to <0xFF>, and changes no text.
    """
    model, before, after = values["model"], values["pre_tokenizer"], values["decoder"]
    if model["type"] != "BPE" or not model.get("byte_fallback") or values["normalizer"] is not None:
        return False
    steps = [] if before is None else [before]
    if any(step["type"] != "Split" or step["behavior"] != "Isolated" for step in steps):
        return False
    if [step["type"] for step in (after or {}).get("decoders", [])] != ["ByteFallback", "Fuse"]:
        return False
    vocab = model["vocab"]
    return all(f"<0x{i:02X}>" in vocab for i in range(128, 256)) and all(
        chr(i) in vocab or f"<0x{i:02X}>" in vocab for i in range(128)
    )


def fallback_bytes(token: str) -> bytes:
    """Returns the bytes of a token of a fall-back BPE: <0x80> is one byte, others are their UTF-8."""
    return bytes([int(match[1], 16)]) if (match := BYTE_TOKEN.fullmatch(token)) else token.encode()


@functools.cache
def byte_values() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for: printable ones of Latin-1 for themselves,
    the others for the characters from 256 on in their order (Radford et al. 2019)."""
    printable = [i for i in range(256) if chr(i) in pre_tokenizers.ByteLevel.alphabet()]
    rest = [i for i in range(256) if i not in printable]
    return {chr(i): i for i in printable} | {chr(256 + place): i for place, i in enumerate(rest)}
