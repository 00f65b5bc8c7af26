"""The progress display of a study."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from linnet.runs import RunFolder
from linnet.study import progress
from linnet.study.progress import StudyProgress


def test_progress_between_two_rows_counts_until_the_result(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.flops_so_far() == 0
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "flops": 5.0}\n')
    for told, shown in ((7.5, 7.5), (2.5, 5.0)):
        folder.write_progress(told)
        assert folder.flops_so_far() == shown
    folder.write_result({"status": "done"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "result.json"]


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


def test_a_line_now_and_then_while_runs_train_without_a_terminal(tmp_path, monkeypatch):
    runs = [SimpleNamespace(run=name, flops=10.0) for name in "ab"]
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    console = Console(file=io.StringIO(), width=100)
    with StudyProgress(runs, tmp_path, None, 1, console) as shown:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "metrics.jsonl").write_text('{"epoch": 1, "flops": 5.0}\n')
        for _ in range(119):
            now[0] += 0.5
            shown.tick()
    [line] = console.file.getvalue().splitlines()
    assert line == "    0/2  1 running, 25% of the work  about 1 min 30 s left"
