"""Numbers as people read them: 1.2×10¹² FLOPs, 12.3k parameters, 48 KiB, 3 min 20 s. table.csv keeps the exact ones."""

import math
import re
from html import escape

from linnet.options import UNKNOWN as MISSING
from linnet.options import duration as duration

SPACE = "\N{NO-BREAK SPACE}"  # between a number and its unit
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_POWER = re.compile(r"(?<![\w.+-])\d+(?:\.\d+)?e[+-]\d+\b")
_THOUSANDS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant digits without an exponent: 0.012345 -> 0.0123, 12345 -> 12,300; a true minus sign."""
    if not _known(value):
        return MISSING
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    places = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{places}f}".replace("-", "−")


def scientific(value: float, digits: int = 3) -> str:
    """A mantissa of `digits` significant digits and a power of ten: 1.5e11 -> 1.5×10¹¹, 1e12 -> 10¹²."""
    if not _known(value):
        return MISSING
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa.replace('-', '−')}×{power}"


def powers(text: str) -> str:
    """Returns a reason or a note with its numbers as the page writes them: at 2.5e+10 FLOPs -> at 2.5×10¹⁰ FLOPs."""
    return _POWER.sub(lambda match: scientific(float(match[0]), 4), text)


def prose(*texts: str) -> str:
    """Returns reasons or notes as HTML, with their numbers as `powers` writes them."""
    return escape(powers("; ".join(texts)))


def p_value(p: float) -> str:
    """A p-value in two digits; <0.001 below that, where resamples do not reach."""
    return "<0.001" if p < 1e-3 else f"{p:.2g}"


def p_equals(p: float) -> str:
    """p = 0.26, p < 0.001."""
    return f"p = {p_value(p)}".replace("= <", "< ")


def flops(value: float) -> str:
    return scientific(value) + SPACE + "FLOPs" if _known(value) else MISSING


def count(value: float, digits: int = 3) -> str:
    """Parameters, tokens, runs: 950 -> 950, 12345 -> 12.3k, 2.6e6 -> 2.6M."""
    return _prefixed(value, _THOUSANDS, "", digits)


def size(value: float, digits: int = 3) -> str:
    """Bytes in binary multiples: 49152 -> 48 KiB."""
    text = _prefixed(value, _BYTES, SPACE, digits)
    return text if text == MISSING or text[-1] == "B" else text + SPACE + "B"


def loss(value: float) -> str:
    return f"{value:.4f}" if _known(value) else MISSING


def percent(fraction: float, digits: int = 2) -> str:
    """1.2 %; below a millionth, which is rounding, 0 %."""
    if not _known(fraction):
        return MISSING
    return significant(100 * fraction if abs(fraction) >= 1e-6 else 0.0, digits) + SPACE + "%"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def ranked(order, what: str, shown, most: bool = True) -> str:
    """Returns a sentence, as HTML: which name has the highest value, and which differ from it.

    The others stand in the order of `order.values`: one by their values would rank those that are not told apart.

    Args:
        order: a `linnet.laws.orders.Order`.
        what: what the values are.
        shown: name -> its value as text.
        most: whether the highest value is the best; otherwise the lowest.
    """
    first = min(order.values, key=lambda name: (order.values[name] * (-1 if most else 1), name))
    others = [name for name in order.values if name != first]
    level = [name for name in others if order.lower(first, name) is None]
    names = {name: f"<b>{escape(name)}</b>" for name in order.values}
    if level and len(level) == len(others):
        same = listed([f"{names[name]} ({shown(name)})" for name in order.values])
        return f"{same} cannot be told apart by their {what}."
    if not others:
        return f"{names[first]} has {what} <b>{shown(first)}</b>."
    word, than = ("highest", "lower") if most else ("lowest", "higher")
    text = f"{names[first]} has the {word} {what}{' seen' if level else ''}, <b>{shown(first)}</b>"
    if level:
        text += f"; that of {listed([names[name] for name in others if name not in level])} is {than}, "
        text += f"that of {listed([names[name] for name in level])} cannot be told apart from it"
    return f"{text}."


def listed(words: list[str]) -> str:
    """A, B and C."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _known(value) -> bool:
    return value is not None and math.isfinite(value)


def _prefixed(value, steps, separator: str, digits: int) -> str:
    if not _known(value):
        return MISSING
    for step, name in steps:
        if abs(float(f"{value / step:.{digits - 1}e}")) >= 1:
            return _short(significant(value / step, digits)) + separator + name
    return _short(significant(value, digits))


def _short(text: str) -> str:
    """Returns a number without trailing zeros after the decimal point."""
    return text.rstrip("0").rstrip(".") if "." in text else text
