"""Shared by the tests of the recall tasks."""

import pytest


@pytest.fixture
def expected_targets():
    """Mean targets of a sequence of pairs: all less one, less the distinct keys among them, and the last pair."""
    return lambda pairs, keys: (pairs - 1) - keys * (1 - (1 - 1 / keys) ** (pairs - 1)) + 1
