"""`batch_ramp`: a batch that grows, resumes exactly, and is counted as it was read."""

import pytest

from linnet.config import ConfigError, parse
from linnet.runs import checkpoint
from linnet.study import StudyConfig, plan
from linnet.train import TrainConfig, extend, read_training, train
from linnet.train.costs import find_gpu
from linnet.train.costs import plan_training as plan_of
from linnet.train.identity import digest_of
from linnet.train.session import Session

GROWING = {"batch_size": 8, "accumulation": 4, "batch_ramp": 0.5, "steps": 12, "log_every": 1}  # 2 2 4 4 6 8 8 ...
ROWS = [2, 2, 4, 6, 6, 8, 8, 8, 8, 8, 8, 8]
TIMES = {"tokens_per_second", "seconds", "memory_bytes", "flop_utilisation"}


def record(run) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in run.metrics()]


@pytest.fixture(scope="module")
def whole(settings, cache, tmp_path_factory):
    """The run that was never stopped."""
    return train(settings(**GROWING), tmp_path_factory.mktemp("whole"), cache)


def test_rows_and_flops_are_counted_as_they_are_read(settings, cache, tmp_path, whole):
    rows = [row for row in whole.metrics() if "loss" in row]
    read = [sum(ROWS[: step + 1]) for step in range(12)]
    assert [row["tokens"] for row in rows] == [32 * number for number in read]
    per_row = rows[0]["flops"] / 2
    assert [row["flops"] for row in rows] == [pytest.approx(number * per_row) for number in read]
    constant = train(settings(batch_size=2, steps=1), tmp_path, cache)
    assert constant.result()["flops"] == pytest.approx(2 * per_row)
    assert whole.result()["flops_paper"] == pytest.approx(constant.result()["flops_paper"] / 2 * read[-1])
    assert whole.result()["tokens"] == 32 * read[-1] and whole.result()["batch_size"] == 8
    # The learning rate is that of the step.
    plain = {key: value for key, value in GROWING.items() if key != "batch_ramp"}
    other = [row for row in train(settings(**plain), tmp_path, cache).metrics() if "loss" in row]
    assert [row["learning_rate"] for row in rows] == [row["learning_rate"] for row in other]
    assert rows[0]["loss"] != other[0]["loss"]


def test_a_stopped_run_goes_on_with_the_same_bits(settings, cache, tmp_path, whole, stop_at):
    with pytest.raises(KeyboardInterrupt):
        train(settings(**GROWING), tmp_path, cache, progress=stop_at(4))
    seen = []
    run = train(settings(**GROWING), tmp_path, cache, progress=seen.append)
    [start] = [row for row in seen if row.get("event") == "start"]
    assert (start["step"], start["units"]) == (4, run.result()["tokens"])
    assert record(run) == record(whole)
    weights = [checkpoint.load(one.checkpoints()[-1])[0]["model"] for one in (run, whole)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])


def test_a_run_in_fewer_or_more_parts_has_the_same_losses(settings, cache, tmp_path, whole, monkeypatch):
    """`parallel.accumulation` changes the parts of a step, but not which rows it reads."""
    expected = [row["loss"] for row in whole.metrics() if "loss" in row]
    shapes, begin = set(), Session.__init__

    def watched(self, *arguments):
        begin(self, *arguments)
        loss = self._loss
        self._loss = lambda *batch: shapes.add(len(batch[0])) or loss(*batch)

    monkeypatch.setattr(Session, "__init__", watched)
    for parts, rows in ((1, {2, 4, 6, 8}), (2, {2, 3, 4}), (8, {1})):
        shapes.clear()
        run = train(settings(**GROWING, parallel={"accumulation": parts}), tmp_path / str(parts), cache)
        assert [row["loss"] for row in run.metrics() if "loss" in row] == pytest.approx(expected, rel=1e-4)
        assert shapes == rows


def test_tokens_and_steps_are_two_notations(settings):
    length = {key: value for key, value in GROWING.items() if key not in ("steps", "log_every")}
    in_tokens = settings(**length, steps=None, tokens=32 * sum(ROWS))
    assert in_tokens.total_steps == 12 and in_tokens.batch_sizes == settings(**GROWING).batch_sizes
    assert digest_of(in_tokens, {}) == digest_of(settings(**GROWING), {})
    assert in_tokens.written_batch == "2 to 8"


def test_an_extended_run_grows_as_before(settings, cache, tmp_path):
    schedule = {"name": "constant", "warmup": 0.0}
    run = train(settings(**GROWING, schedule=schedule), tmp_path, cache)
    extend(run.path, cache, steps=14)
    assert run.config["batch_ramp"] == 6
    longer = train(settings(**GROWING | {"batch_ramp": 6.0, "steps": 14}, schedule=schedule), tmp_path / "whole", cache)
    losses = [
        [(row["step"], row["tokens"], row["loss"]) for row in record(one) if "loss" in row] for one in (run, longer)
    ]
    assert losses[0] == losses[1] and run.result()["tokens"] == 32 * (sum(ROWS) + 16)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"accumulation": 1}, "accumulation is 1; set it to the number of sizes"),
        ({"accumulation": 3}, "accumulation: 3 does not divide batch_size: 8; use batch_size 6"),
        ({"batch_ramp": 0}, "batch_ramp"),
        ({"batch_ramp": float("inf")}, "batch_ramp"),
    ],
)
def test_a_ramp_without_equal_parts_is_refused(settings, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        settings(**GROWING | changes)


def test_images_are_mixed_in_pairs_in_the_first_batch_too():
    values = {"objective": "images", "model": "vit-8px", "batch_size": 12, "accumulation": 12, "batch_ramp": 0.5}
    with pytest.raises(ConfigError, match="augment"):
        read_training(values | {"augment": {"kind": "none", "mixup": 0.4}})


def test_the_plan_counts_time_with_the_sizes_and_refuses_a_first_batch_below_the_ranks():
    values = {"model": {"recipe": "tnl-7b", "vocab_size": 100352}, "seq_len": 2048, "batch_size": 32, "steps": 100}
    values |= {"precision": "bfloat16", "accumulation": 4}
    constant, growing = (
        plan_of(TrainConfig(**values | ramp), 8, find_gpu("h200")).as_dict() for ramp in ({}, {"batch_ramp": 1.0e9})
    )
    assert growing["memory_bytes"] == constant["memory_bytes"] and growing["rows_per_part"] == 1
    assert growing["seconds"] == pytest.approx(constant["seconds"] / 4)  # it ends before the second part
    many = TrainConfig(**values, batch_ramp=0.5, parallel={"accumulation": 6})
    with pytest.raises(ConfigError, match=r"batch_ramp: the first batch has 8 rows .* give 5 ranks in 2 parts"):
        plan_of(many, 5, find_gpu("h200"))


def test_runs_of_a_study_spend_their_budget():
    values = {"name": "small", "architectures": ["tnl"], "sizes": [[16, 1]], "seq_len": 32, "minimum_steps": 5}
    values |= {"batch_size": 8, "budgets": [5e9]}
    study = parse(StudyConfig, values | {"train": {"batch_ramp": 0.6, "accumulation": 4}})
    [run], [constant] = plan(study).runs, plan(parse(StudyConfig, values)).runs
    assert run.train.batch_sizes.first(run.steps) * 32 == run.tokens and run.steps > constant.steps
    assert run.flops == pytest.approx(constant.flops, rel=0.02) and run.budget == 5e9
