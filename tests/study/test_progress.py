"""The progress display of a study."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from linnet.study import progress
from linnet.study.progress import StudyProgress


@pytest.mark.parametrize("epochs, left", [(0, "about 30 s left"), (8, "about 22 s left")])
def test_what_was_done_before_does_not_count_for_the_pace(tmp_path, monkeypatch, epochs, left):
    """Four runs of 10 epochs. The first ends after 10 s; the second may have 8 epochs from before the start."""
    runs = [SimpleNamespace(run=name, flops=10.0) for name in "abcd"]
    (tmp_path / "b").mkdir()
    rows = [json.dumps({"epoch": epoch + 1, "flops": epoch + 1.0}) for epoch in range(epochs)]
    (tmp_path / "b" / "metrics.jsonl").write_text("".join(row + "\n" for row in rows))
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    console = Console(file=io.StringIO(), width=100)
    with StudyProgress(runs, tmp_path, None, 1, console) as shown:
        now[0] += 10
        shown.line("a", "done")
    assert left in console.file.getvalue()
