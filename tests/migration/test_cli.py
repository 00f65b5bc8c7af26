"""Command lines of 0.1.0 are refused as any unknown one is."""

import pytest
from typer.testing import CliRunner

from linnet.cli import app


@pytest.mark.parametrize(
    "line, unknown",
    [
        ("evaluate RUN --text PATH", "No such command 'RUN'"),
        ("evaluate neddle RUN", "Did you mean 'needle'?"),
        ("mad run tnl --spare-decay", "No such option: --spare-decay"),
    ],
)
def test_old_forms(line, unknown):
    result = CliRunner().invoke(app, line.split(), env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2 and unknown in result.stderr


def test_groups_still_help():
    assert "Commands" in CliRunner().invoke(app, ["evaluate"]).output
