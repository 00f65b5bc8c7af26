"""One server for tests that leave it as they found it."""

from collections.abc import Iterator

import pytest
from serving import Running, serve


@pytest.fixture(scope="session")
def tiny() -> Iterator[Running]:
    with serve() as running:
        yield running
