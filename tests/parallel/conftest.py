"""Gives the distributed tests one pool of worker processes, and runs them first."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for pool, and for what the files of this folder share

from pool import Pool  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks these tests as those of a system, and puts them before all others.

    Under `-n 2 --dist worksteal` each worker gets a run of adjacent tests, and others take from its end: these stay
    together on the first worker, so that one pool serves them all. A second pool would be slower, not wrong.
    """
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.system)
    items.sort(key=lambda item: here not in item.path.parents)


_pools: list[Pool] = []


@pytest.fixture(scope="session")
def pool():
    """Worker processes with gloo groups of 1 to 4 ranks; pool.py says how to use them."""
    _pools.append(Pool())
    return _pools[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the workers after the last of these tests: they have threads that wake often even while nothing is asked."""
    if _pools and (nextitem is None or Path(__file__).parent not in nextitem.path.parents):
        _pools[0].close()
