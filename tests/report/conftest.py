"""Study folders for the tests of the report."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic_study import RESAMPLES, write_study  # noqa: E402

from linnet.report import write_report  # noqa: E402


@pytest.fixture
def study(tmp_path):
    """Writes a study folder; options are those of `synthetic_study.write_study`."""
    return lambda **options: write_study(tmp_path / "study", **options)


@pytest.fixture(scope="session")
def ladder(tmp_path_factory):
    """A whole study of three architectures with one failed and one diverged run, and its report: (folder, page)."""
    folder = tmp_path_factory.mktemp("studies") / "ladder"
    write_study(folder, architectures=("llama", "tnl", "hgrn2"), spoil={"tnl": "failed", "hgrn2": "diverged"})
    return folder, write_report(folder, bootstrap=RESAMPLES, laws=False)
