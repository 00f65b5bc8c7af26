"""Stages: the same bytes for any number of workers, resuming, and folders that hold something else."""

import errno
import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import linnet
from linnet.config import Config, ConfigError
from linnet.corpus import documents
from linnet.corpus.documents import Document, find_inputs, read_part
from linnet.corpus.page.records import read_corpus
from linnet.corpus.stage import open_stage, run_stage
from linnet.data import records, sources
from linnet.data.parts import locked


class Settings(Config):
    word: str = "a"


@dataclass(frozen=True)
class Keep:
    """Leaves out documents with a word, or fails in the part whose file `stop` names."""

    word: str = "a"
    stop: str = ""
    how: str = "raise"

    def __call__(self, part, counts, samples):
        for document in read_part(part, counts, samples):
            if self.stop and document.text.startswith(self.stop):
                if self.how == "die":
                    os._exit(3)
                raise OSError(errno.ENOSPC, "No space left on device")
            if self.word in document.text:
                counts["filter/word"] += 1
                samples.add("filter/word", document, text=document.text)
            else:
                document.extra["length"] = len(document.text)
                yield document


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "SMALLEST", 200)
    monkeypatch.setattr(documents, "BLOCK", 100)
    folder = tmp_path / "source"
    folder.mkdir()
    rows = [{"text": f"{number} {'a' if number % 3 else 'b'}", "id": number} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    (folder / "text.txt").write_text("b\n" * 10)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def content(folder: Path) -> dict[str, bytes]:
    found = content_of(folder)
    assert found.pop("provenance.json")
    return found


def test_a_stage_is_the_same_for_any_workers_and_place(source, tmp_path):
    one = run_stage("keep", [str(source)], tmp_path / "one", Settings(), Keep())
    shutil.copytree(source, tmp_path / "elsewhere" / "source")
    run_stage("keep", [str(tmp_path / "elsewhere/source")], tmp_path / "two", Settings(), Keep(), workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert one == json.loads((tmp_path / "one/stage.json").read_text())
    assert len(one["shards"]) > 3 and one["documents"] == 15
    assert one["counts"]["filter/word"] == 26 and one["counts"]["unreadable.not JSON"] == 1
    assert one["counts"]["documents read/source"] == 41 and one["counts"]["documents written/source"] == 15


def test_the_same_command_resumes(source, tmp_path):
    run_stage("keep", [str(source)], tmp_path / "whole", Settings(), Keep())
    with pytest.raises(OSError) as error:
        run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep(stop="21 "))
    assert error.value.errno == errno.ENOSPC
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("shard-*")}
    assert len(before) > 1 and not list((tmp_path / "out").rglob("*.tmp"))
    problems: list[str] = []
    sources.find_files([str(tmp_path / "out")], "source", problems, [])
    assert "has not ended" in problems[0]
    (tmp_path / "out" / ".shard-00009.jsonl.zst.1.tmp").write_text("left by a kill")
    run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep())
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before} == before
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep(stop="0"))  # finished: nothing to do


@pytest.mark.parametrize("version", ["0.2.0", None])
def test_a_stage_that_another_version_began_is_not_continued_but_a_finished_one_stays(source, tmp_path, version):
    """Rules change from release to release, and the shards would be of two versions."""
    with pytest.raises(OSError):
        run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep(stop="21 "))
    plan = tmp_path / "out" / sources.PLAN
    values = json.loads(plan.read_text())
    assert values.pop("linnet") == linnet.__version__
    plan.write_text(json.dumps(values if version is None else values | {"linnet": version}))
    before = content_of(tmp_path / "out")
    with pytest.raises(ConfigError, match=rf"Linnet {version or 'before 0.3.0'} began it .*--anew"):
        run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep())
    assert content_of(tmp_path / "out") == before
    made = run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep(), anew=True)
    assert "linnet" not in made and made == run_stage("keep", [str(source)], tmp_path / "two", Settings(), Keep())
    run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep(stop="0"))


@pytest.mark.parametrize("damage", [5, [], {}, {"inputs": 5}, {"settings": []}, {"inputs": [1]}, {"inputs": [{}]}])
def test_a_plan_that_no_stage_wrote_is_not_continued_or_removed(source, tmp_path, damage):
    with pytest.raises(OSError):
        run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep(stop="21 "))
    plan = tmp_path / "out" / sources.PLAN
    plan.write_text(json.dumps(json.loads(plan.read_text()) | damage if damage and damage != 5 else damage))
    before = content_of(tmp_path / "out")
    problem = "SOURCE: was None, is now source" if damage == {"inputs": [{}]} else "is not empty .* not a stage"
    with pytest.raises(ConfigError, match=problem):
        run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep())
    assert content_of(tmp_path / "out") == before


@pytest.mark.parametrize(
    "damage",
    [
        {"labels": 5},
        {"history": [{}]},
        {"counts": {"documents read/source": "4"}},
        {"samples": {"a": [4]}},
        {"shards": [{"name": "shard-00000.jsonl.zst", "documents": 1, "bytes": 1}]},
        {"shards": [{"name": "../a", "documents": 1, "bytes": 1, "text_bytes": 1, "sha256": ""}]},
    ],
    ids=str,
)
def test_a_record_that_no_stage_wrote_is_refused(source, tmp_path, damage):
    values = run_stage("keep", [str(source)], tmp_path / "one", Settings(), Keep())
    (tmp_path / "one/stage.json").write_text(json.dumps(values | damage))
    problems: list[str] = []
    find_inputs([str(tmp_path / "one")], "SOURCE", problems)
    assert "one' is a stage of `linnet corpus keep`" in problems[0]
    with pytest.raises(ConfigError, match="is not the folder of a stage"):
        read_corpus([tmp_path / "one"])
    with pytest.raises(ConfigError, match="is not empty"):
        run_stage("keep", [str(source)], tmp_path / "one", Settings(), Keep())


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux alone")
def test_a_source_whose_name_is_not_utf_8(source, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.txt"
    (source / "text.txt").rename(os.fsdecode(name))
    values = run_stage("keep", [os.fsdecode(name)], tmp_path / "out", Settings(), Keep())
    assert values["documents"] == 1 and values["labels"] == ["\\xff"]
    recorded = json.loads((tmp_path / "out/provenance.json").read_text())["sources"]
    assert [os.fsencode(path) for path in recorded] == [name]


def test_a_worker_that_dies_is_named_and_the_same_command_resumes(source, tmp_path):
    with pytest.raises(ConfigError, match="status 3 .*rows.jsonl.*resumes"):
        run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep(stop="21 ", how="die"), workers=2)
    assert not list((tmp_path / "out").rglob("*.tmp"))
    run_stage("keep", [str(source)], tmp_path / "out", Settings(), Keep())
    run_stage("keep", [str(source)], tmp_path / "whole", Settings(), Keep())
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_another_command_in_the_same_folder_is_refused(source, tmp_path):
    out = tmp_path / "out"
    run_stage("keep", [str(source)], out, Settings(), Keep())
    before = content(out)
    with pytest.raises(ConfigError, match="word: was 'a', is now 'b'.*--anew"):
        run_stage("keep", [str(source)], out, Settings(word="b"), Keep("b"))
    with pytest.raises(ConfigError, match="holds the stage 'keep', not other"):
        run_stage("other", [str(source)], out, Settings(), Keep())
    (source / "text.txt").write_text("changed")
    with pytest.raises(ConfigError, match="the content of source has changed"):
        run_stage("keep", [str(source)], out, Settings(), Keep())
    with pytest.raises(ConfigError, match="is in SOURCE"):
        run_stage("keep", [str(source)], source / "out", Settings(), Keep())
    with pytest.raises(ConfigError, match="is not empty .*and not a stage"):
        run_stage("keep", [str(source / "text.txt")], source, Settings(), Keep())
    assert content(out) == before
    assert run_stage("keep", [str(source)], out, Settings(word="b"), Keep("b"), anew=True)["documents"] == 27


def test_a_stage_reads_a_stage_with_the_same_identity(source, tmp_path):
    first = run_stage("keep", [str(source)], tmp_path / "first", Settings(), Keep())
    second = run_stage("again", [str(tmp_path / "first")], tmp_path / "second", Settings(word="0"), Keep("0"))
    assert second["labels"] == ["source"] and [one["stage"] for one in second["history"]] == ["keep"]
    assert second["history"][0]["shards"] == first["shards"]
    problems: list[str] = []
    found = find_inputs([str(tmp_path / "second")], "SOURCE", problems)
    read = [document for part in found.parts for document in read_part(part, Counter())]
    assert Document("3 b", "source", "rows.jsonl", 3, {"id": 3, "length": 3}) in read
    assert "label 'source'" in _problems(tmp_path / "first", tmp_path / "second")[0]
    shard = next((tmp_path / "second").glob("shard-*"))
    shard.write_bytes(b"x" * shard.stat().st_size)
    assert "not a whole .zst file" in _problems(tmp_path / "second")[0]
    shard.unlink()
    assert "missing" in _problems(tmp_path / "second")[0]


def _problems(*folders: Path) -> list[str]:
    problems: list[str] = []
    find_inputs([str(folder) for folder in folders], "SOURCE", problems)
    return problems


def test_a_folder_that_holds_a_stage_is_refused_but_its_documents_are_text(source, tmp_path):
    stage = run_stage("keep", [str(source)], tmp_path / "all" / "first", Settings(), Keep())
    (tmp_path / "all" / "more.txt").write_text("more")
    assert "holds the stage" in _problems(tmp_path / "all")[0]
    files = sources.find_files([str(tmp_path / "all")], "source", [], [])
    texts = [text for file in files for text in records.read_documents(file, "text", [])]
    assert len(texts) == stage["documents"] + 1


def test_sources_without_any_document_are_an_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"body": "text"}\n')
    with pytest.raises(ConfigError, match="rows.jsonl:0 .*body.*--text-key"):
        run_stage("keep", [str(tmp_path / "rows.jsonl")], tmp_path / "out", Settings(), Keep())
    stage = run_stage("keep", [str(tmp_path / "rows.jsonl")], tmp_path / "new", Settings(), Keep(), text_key="body")
    assert stage["counts"]["documents read/rows"] == 1


def test_intermediate_files_are_made_once_and_removed(source, tmp_path):
    calls = tmp_path / "calls"

    def measure(part) -> bytes:
        calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
        return str(part.number).encode()

    for _ in range(2):
        with open_stage("two", [str(source)], tmp_path / "out", Settings()) as stage:
            paths = stage.map("sizes", measure)
            assert [path.read_text() for path in paths] == [str(part.number) for part in stage.parts]
    assert len(calls.read_text()) == len(stage.parts)
    (tmp_path / "out" / "parts" / "plan.json").unlink()  # without the plan, their command is unknown
    with open_stage("two", [str(source)], tmp_path / "out", Settings(word="b")) as stage:
        stage.map("sizes", measure)
    assert len(calls.read_text()) == 2 * len(stage.parts)
    shutil.rmtree(tmp_path / "out")
    with open_stage("two", [str(source)], tmp_path / "out", Settings()) as stage:
        stage.write(Keep())
        assert stage.finish({"pairs": 3})["results"] == {"pairs": 3}
    assert not (tmp_path / "out" / "parts").exists()


def test_one_process_at_a_time_writes_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(ConfigError, match="another process is writing it"), locked(tmp_path, wait=0):
        pass
    with locked(tmp_path, wait=0):
        pass
