"""Texts of ListOps rows, which have a number per symbol."""

import numpy as np

from linnet.encoders.lra import END, PADDING, listops


def decode(ids: np.ndarray) -> str:
    """Returns the symbols of a row with spaces between."""
    names = {number: symbol for symbol, number in listops.IDS.items()}
    return " ".join(names[number] for number in ids.tolist() if number not in (PADDING, END))
