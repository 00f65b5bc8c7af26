"""Shared by all tests: one thread a process (the suite runs in parallel), seeds, and real text where it is at hand."""

import argparse
import functools
import gc
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Tests make runs with plugins; these must not enter the user's own list of trusted files.
_config_home = tempfile.TemporaryDirectory(prefix="linnet-tests-")  # goes at the end of the process
os.environ["LINNET_CONFIG_HOME"] = _config_home.name

# Read when numpy and torch are imported, here and in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes, each of which imports torch

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import typer.testing  # noqa: E402
from hypothesis import settings  # noqa: E402

import linnet.options  # noqa: E402

torch.set_num_threads(1)
linnet.options.QUIET = 1e6  # whether a command says what takes long depends on how busy the machine is
# No test cuts the power, and the disk takes milliseconds for each of thousands of calls. Both need an open file.
os.fsync = os.fstat
typer.testing._get_command = functools.cache(typer.testing._get_command)  # 20 ms each time that a test calls a verb
if not torch.cuda.is_available():  # a seed for GPUs that may be found later keeps the stack as text, 1 ms for each kind
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
gc.disable()  # while modules are imported and tests collected: what they make stays anyway
sys.path.insert(0, str(Path(__file__).parent))  # for what tests of several folders share: mad_folders

# Shells start commands in the background with SIGINT ignored, and so would be the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same 50 examples in every run; `pytest --hypothesis-profile=search` draws 500 new ones. None has a deadline: on a
# busy machine any may take long.
settings.register_profile("suite", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("search", max_examples=500, deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts first what takes longest, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.path.name not in ("test_cluster.py", "test_train_devices.py"))


def pytest_collection_finish() -> None:
    """Leaves modules and collected tests out of every later garbage collection, and makes those rare.

    With Python's own thresholds they take a fifth of the time of a test that compiles.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    # Workers take each other's tests, in an order that varies: what a test draws must not depend on those before it.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def stop_at() -> Callable[[int], Callable[[dict], None]]:
    """stop_at(step): the `progress` of a training that presses Ctrl-C at the row of this step."""

    def of_step(step: int) -> Callable[[dict], None]:
        def progress(row: dict) -> None:
            if row.get("step") == step and "loss" in row:
                signal.raise_signal(signal.SIGINT)

        return progress

    return of_step


@pytest.fixture
def openai():
    """The client's package, which takes a second to import: not while every worker collects all tests."""
    return pytest.importorskip("openai")


@pytest.fixture
def no_pictures(monkeypatch) -> None:
    """Pages come without their PNG and SVG files, which take seconds: for tests of what a page says."""
    monkeypatch.setattr("linnet.report.shell.write_pictures", lambda folder, figure: None)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Real texts and scaling data (wikitext-2, tinyshakespeare, chinchilla), which are not in the repository."""
    folder = Path(os.environ.get("LINNET_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"no real data at {folder}: set LINNET_TEST_DATA to a folder with wikitext-2, tinyshakespeare, chinchilla"
        )
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """About 100 kB of text that is on every machine."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")
