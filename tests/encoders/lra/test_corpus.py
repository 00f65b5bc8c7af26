"""Folders of shards: the same bytes for any number of workers, resuming, and batches that are read from them."""

import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from linnet.config import ConfigError, digest, parse
from linnet.corpus.stage import locked
from linnet.data.labelled import LabelledBatches
from linnet.encoders.lra import LraCorpus, LraDataConfig, SampleCounts, check_lra, lra_content, prepare_lra
from linnet.encoders.lra.corpus import Generated, find_maker
from linnet.encoders.lra.listops import generate_listops
from linnet.encoders.lra.stage import open_shard, plan_of, read_lra_stage, write_lra

COUNTS = SampleCounts(train=1500, validation=40, test=30)


def config(**values) -> LraDataConfig:
    return LraDataConfig(**{"task": "listops", "size": "reduced", "samples": COUNTS, **values})


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> LraCorpus:
    return prepare_lra(config(), tmp_path_factory.mktemp("cache"))


def test_a_split_has_the_generated_rows_across_its_shards(corpus):
    assert [len(corpus.split(name)) for name in ("train", "validation", "test")] == [1500, 40, 30]
    second = generate_listops("reduced", "train", 1, 500, 0)
    ends = np.cumsum(second.lengths)
    rows = corpus.train.rows(np.array([1499, 1000, 999]))
    assert rows.inputs.dtype == rows.lengths.dtype == rows.labels.dtype == torch.int64
    assert rows.inputs.shape == (3, int(rows.lengths.max()))
    for row, number in enumerate((499, 0)):
        length = second.lengths[number]
        expected = second.values[ends[number] - length : ends[number]]
        assert np.array_equal(rows.inputs[row, :length], expected)
        assert not rows.inputs[row, length:].any()
        assert rows.labels[row] == second.labels[number]
    assert corpus.train.lengths[1000] == second.lengths[0]
    with pytest.raises(ValueError, match="split"):
        corpus.split("tests")


def test_workers_change_no_byte(corpus, tmp_path):
    write_lra(find_maker(config(), None), tmp_path / "two", workers=2)
    assert contents(tmp_path / "two") == contents(corpus.folder)
    assert json.loads((corpus.folder / "stage.json").read_text())["rows"]["train"] == 1500


@dataclass
class Stops(Generated):
    """Fails at a shard, as a full disk would."""

    at: str = ""

    def shards(self, unit):
        for name, make in super().shards(unit):
            if name.startswith(self.at):
                raise OSError("no space")
            yield name, make


def test_a_stopped_command_resumes_and_keeps_what_it_has(corpus, tmp_path):
    maker = find_maker(config(), None)
    with pytest.raises(OSError, match="no space"):
        write_lra(Stops(maker.settings, at="validation"), tmp_path)
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("train-*")}
    assert len(kept) == 2 and read_lra_stage(tmp_path) is None
    (tmp_path / ".train-00001.safetensors.99.tmp").write_bytes(b"half")
    write_lra(maker, tmp_path)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in kept} == kept
    assert contents(tmp_path) == contents(corpus.folder)


def test_a_task_that_another_version_began_is_begun_again(corpus, tmp_path):
    maker = find_maker(config(), None)
    with pytest.raises(OSError, match="no space"):
        write_lra(Stops(maker.settings, at="validation"), tmp_path)
    plan = tmp_path / "parts" / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"linnet": "0.2.0"}))
    with pytest.raises(ConfigError, match=r"Linnet 0\.2\.0 began it .*--anew"):
        write_lra(maker, tmp_path)
    write_lra(maker, tmp_path, anew=True)
    assert contents(tmp_path) == contents(corpus.folder)


def test_a_finished_folder_is_not_written_again(corpus):
    before = {path.name: path.stat().st_mtime_ns for path in corpus.folder.iterdir()}
    again = prepare_lra(config(), corpus.folder.parent)
    assert {path.name: path.stat().st_mtime_ns for path in corpus.folder.iterdir()} == before
    assert again.digest == corpus.digest


def test_other_settings_are_refused_until_told(corpus, tmp_path):
    write_lra(find_maker(config(samples=SampleCounts(train=5, validation=5, test=5)), None), tmp_path)
    other = find_maker(config(seed=1, samples=SampleCounts(train=5, validation=5, test=5)), None)
    with pytest.raises(ConfigError, match="seed: was 0, is now 1"):
        write_lra(other, tmp_path)
    assert write_lra(other, tmp_path, anew=True)["settings"]["seed"] == 1
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    for _ in range(2):
        with pytest.raises(ConfigError, match="notes.txt"):
            write_lra(other, tmp_path / "foreign")
        (tmp_path / "foreign/parts").mkdir(exist_ok=True)
        (tmp_path / "foreign/parts/plan.json").write_text("{}")  # of another program


def test_equal_rows_are_an_error(corpus, tmp_path, monkeypatch):
    shard = open_shard(corpus.folder / "test-00000.safetensors")
    equal = {"listops": (lambda size: corpus.task, lambda *arguments: shard)}
    monkeypatch.setattr("linnet.encoders.lra.corpus.GENERATORS", equal)
    settings = {"task": "listops", "size": "reduced", "seed": 0, "samples": COUNTS.model_dump()}
    with pytest.raises(ConfigError, match="seed: 0 draws 90 rows twice"):
        write_lra(Generated(settings), tmp_path)


def test_some_small_images_may_be_equal(tmp_path):
    """Of 4,000 images of 16 x 16 pixels a few are equal by chance; a whole task of `reduced` has 10,000."""
    counts = SampleCounts(train=4000, validation=5, test=5)
    stage = write_lra(find_maker(config(task="pathfinder", samples=counts), None), tmp_path, workers=2)
    hashes = np.concatenate([open_shard(tmp_path / shard["name"]).hashes for shard in stage["shards"]])
    assert 0 < len(hashes) - len(np.unique(hashes)) <= 4


def test_trainings_that_begin_together_wait_for_their_task(corpus, tmp_path, monkeypatch):
    slow = SimpleNamespace(monotonic=count(0, 1000).__next__, sleep=time.sleep)  # each look at the lock takes long
    monkeypatch.setattr("linnet.corpus.stage.time", slow)
    few = config(samples=SampleCounts(train=5, validation=5, test=5))
    maker = find_maker(few, None)
    folder = tmp_path / digest(plan_of(maker))
    folder.mkdir()
    with ThreadPoolExecutor() as pool:
        with locked(folder):
            with pytest.raises(ConfigError, match="another process is writing it"):
                write_lra(maker, folder, wait=0.0)
            waiting = pool.submit(prepare_lra, few, tmp_path)  # no error, however long it takes
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            assert read_lra_stage(folder) is None
        assert len(waiting.result(20).train) == 5


def test_a_damaged_shard_is_named(corpus, tmp_path):
    few = config(samples=SampleCounts(train=5, validation=5, test=5))
    folder = prepare_lra(few, tmp_path).folder
    path = folder / "train-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x63")
    with pytest.raises(ConfigError, match="train-00000.safetensors: is corrupted"):
        prepare_lra(few, tmp_path)


def test_a_folder_serves_as_source_and_its_first_rows(corpus, tmp_path):
    whole = LraDataConfig(task="listops", size="reduced", source=str(corpus.folder))
    assert lra_content(whole) == lra_content(config())
    few = whole.model_copy(update={"samples": SampleCounts(train=10, validation=5, test=5), "selection": "test"})
    part = prepare_lra(few, tmp_path)
    assert len(part.train) == 10 and part.validation is part.test and len(part.test) == 5
    assert part.digest != corpus.digest
    assert torch.equal(part.train.rows(np.arange(10)).inputs, corpus.train.rows(np.arange(10)).inputs)
    assert not list(tmp_path.iterdir())
    for change, key in (
        ({"samples": SampleCounts(train=2000, validation=5, test=5)}, "samples.train"),
        ({"size": "full"}, "size"),
        ({"task": "pathfinder"}, "task"),
    ):
        with pytest.raises(ConfigError, match=key):
            check_lra(whole.model_copy(update=change), tmp_path)


def test_batches_are_a_function_of_seed_and_step(corpus):
    batches = LabelledBatches(corpus.train, 12, seed=0)
    whole = batches.batch(7)
    parts = [batches.batch(7, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    assert torch.equal(parts[1].lengths, whole.lengths[4:8])
    epoch = np.concatenate([batches.batch(step).lengths for step in range(125)])
    assert sorted(epoch) == sorted(corpus.train.lengths)
    assert not torch.equal(LabelledBatches(corpus.train, 12, seed=1).batch(7).labels, whole.labels)
    with pytest.raises(ValueError, match="rank"):
        batches.batch(0, 3, 3)


def test_a_split_is_pickled_without_its_rows(corpus):
    data = pickle.dumps(corpus.train)
    assert len(data) < 2000
    assert torch.equal(pickle.loads(data).rows(np.array([3])).inputs, corpus.train.rows(np.array([3])).inputs)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"task": "text"}, "source"),
        ({"task": "path-x", "size": "reduced"}, "size"),
        ({"task": "listop"}, "task"),
        ({"task": "listops", "samples": {"train": 0, "validation": 1, "test": 1}}, "samples.train"),
    ],
)
def test_problems_of_a_configuration(values, key):
    with pytest.raises(ConfigError, match=key):
        parse(LraDataConfig, values)
