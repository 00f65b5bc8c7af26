"""metrics.jsonl: rows are whole, never twice, and cut back to what a checkpoint knew of."""

import errno
import math
import os
import resource

import pytest

from linnet.config import ConfigError
from linnet.runs import Record, read_rows
from linnet.runs.record import curve_rows


def test_rows_are_there_at_once(tmp_path):
    record = Record(tmp_path / "metrics.jsonl")
    record.write({"step": 1, "loss": 0.1 + 0.2})
    record.write({"step": 2, "loss": math.nan, "nested": {"worst": [math.inf]}})
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.1 + 0.2},
        {"step": 2, "loss": None, "nested": {"worst": [None]}},
    ]
    assert record.rows == 2


def test_goes_on_behind_the_rows_of_a_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = Record(path)
    for step in range(5):
        record.write({"step": step})
    record.close()
    record = Record(path, keep=3)
    record.write({"step": "again"})
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, "again"]


def test_going_back_keeps_the_events(tmp_path):
    record = Record(tmp_path / "metrics.jsonl")
    spike, failed = {"step": 3, "event": "spike"}, {"step": 2, "event": "evaluation_failed", "evaluation": "text"}
    for row in ({"step": 1}, {"step": 2}, spike, {"step": 2}, failed, spike):
        record.write(row)
    record.roll_back(1)
    record.write({"step": 2})
    assert [row.get("event", row["step"]) for row in read_rows(record.path)] == [1, "spike", "spike", 2]
    assert record.rows == 4


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\x00\x00\x00", b'{"step": 3}', b"\xff\n", b'{"step":\n'])
def test_a_torn_last_line_is_repaired(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert read_rows(path) == [{"step": 1}, {"step": 2}]
    Record(path).write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_rows_do_not_go_where_a_link_leads(tmp_path):
    """A folder from somebody else may link its record to any file of this machine."""
    other, path = tmp_path / "other", tmp_path / "metrics.jsonl"
    for content in (None, '{"step": 1}\n', "not rows\n"):
        other.unlink(missing_ok=True)
        if content is not None:
            other.write_text(content)
        path.unlink(missing_ok=True)
        path.symlink_to(other)
        with Record(path) as record:
            record.write({"step": 2})
        assert (other.read_text() if other.exists() else None) == content
        assert read_rows(path)[-1] == {"step": 2} and not path.is_symlink()


def test_a_record_that_never_ends_is_a_record_without_rows(tmp_path):
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.touch())):
        path = tmp_path / f"{number}.jsonl"
        make(path)
        if path.stat().st_size == 0 and path.is_file():
            os.truncate(path, 1 << 40)
        assert read_rows(path) == []
        Record(path).write({"step": 1})
        assert path.read_text() == '{"step": 1}\n'


def test_fewer_rows_than_the_checkpoint_knew_of(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    assert Record(path, keep=9).rows == 1
    assert read_rows(tmp_path / "nothing.jsonl") == []


def test_disk_full(tmp_path, monkeypatch, in_child):
    """Both ways in which a system says so: an error, and fewer bytes than asked for."""
    record = Record(tmp_path / "metrics.jsonl")
    record.write({"step": 1})

    class Full:
        def write(self, line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record, "_file", Full())
    with pytest.raises(ConfigError, match="metrics.jsonl: .*No space left on device"):
        record.write({"step": 2})

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
        record = Record(tmp_path / "metrics.jsonl")
        try:
            for step in range(10):
                record.write({"step": step})
        except ConfigError as error:
            return error

    assert "metrics.jsonl: " in in_child(fill)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 0, 1]


def test_a_curve_has_the_losses_of_steps_alone():
    rows = [
        {"step": 1, "loss": 2.0},
        {"step": 1, "event": "rollback", "loss": 9.0},
        {"step": 1, "validation_loss": 2.1},
    ]
    assert curve_rows(rows) == rows[:1]
    mean = {"step": 2, "loss": 1.5, "curve": 1.7}  # the mean over the steps since the point before
    assert curve_rows([*rows, mean]) == [mean | {"loss": 1.7}]
