"""Ranks share the items of an evaluation: the same numbers as on one device, and one end for all of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.evaluate import likelihood
from linnet.evaluate.likelihood import log_likelihoods
from linnet.models import build, build_model, family
from linnet.parallel import Mesh, ParallelConfig, mesh
from linnet.runs.model import save_model

ROOT = Path(__file__).parents[2]


def shared_work() -> list:
    """Runs in a worker. What each call returns or raises on this rank, and the items that it computed."""
    found, seen, computed = Mesh(ParallelConfig(), torch.device("cpu")), [], []

    def double(item: int) -> int:
        computed.append(item)
        return 2 * item

    def fails(item: int, rank: int, error: Exception) -> int:
        if found.rank == rank and item > 1:
            raise error
        return item

    def outside(error: Exception) -> list[int]:  # one rank fails while the others are inside `divided`
        if found.rank == 1:
            raise error
        return mesh.divided([1, 2], double)

    def nested(item: int) -> list[int]:
        return mesh.divided([item, item + 1, item + 2], double)

    wrong = ConfigError(["x: 1 is wrong; use 2"], "here")
    calls = [
        lambda: mesh.divided([5, 1, 4, 2, 3], double, float),
        lambda: mesh.divided([7], double),
        lambda: mesh.divided([], double),
        lambda: mesh.divided([10, 20], nested),
        lambda: mesh.divided([30], nested),
        lambda: mesh.divided([1, 2, 3, 4], lambda item: fails(item, 1, wrong)),
        lambda: mesh.divided([1, 2, 3, 4], lambda item: fails(item, 1, ZeroDivisionError("division"))),
        lambda: outside(wrong),
        lambda: (mesh.divided([1, 2], double), mesh.sharers()),
    ]
    with mesh.dividing(found):
        for call in calls:
            computed.clear()
            try:
                with found.together():
                    result = call()
                seen.append((result, sorted(computed)))
            except Exception as error:
                seen.append((type(error).__name__, getattr(error, "problems", str(error))))
    return seen


def test_each_rank_computes_a_share_and_gets_all(pool):
    first, second = pool.run(2, shared_work, timeout=30)
    assert first[0] == ([10, 2, 8, 4, 6], [1, 2, 5])  # the largest first, each to the rank with least to do
    assert second[0] == (first[0][0], [3, 4])
    assert first[1] == second[1] == ([14], [7]) and first[2] == ([], [])
    assert first[3] == ([[20, 22, 24], [40, 42, 44]], [10, 11, 12]) and second[3] == (first[3][0], [20, 21, 22])
    assert first[4][0] == [[60, 62, 64]] and sorted(first[4][1] + second[4][1]) == [30, 31, 32]
    assert first[5] == second[5] == ("ConfigError", ["rank 1: x: 1 is wrong; use 2"])
    assert first[6] == ("PeerError", "rank 1: ZeroDivisionError: division") and second[6][0] == "ZeroDivisionError"
    assert first[7] == second[7] == first[5]
    assert first[8][0] == ([2, 4], 1)


def scored_trees() -> list[tuple[float, bool]]:
    """Runs in a worker. Likelihoods of questions with answers: some share a long beginning, others none."""
    model = build_model(family("tnl")(32, 2, vocab_size=64), seed=0)
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(64, (count,), generator=draw).tolist()

    shots = tokens(40)
    requests = [(tokens(3), tokens(count)) for count in range(1, 30)]
    for _ in range(150):
        question = shots + tokens(20)
        requests += [(question, tokens(count)) for count in (1, 3, 5)]
    found = Mesh(ParallelConfig(), torch.device("cpu")) if mesh.world() > 1 else None
    computed: list[int] = []
    with mesh.dividing(found):
        scores = log_likelihoods(model, requests, progress=computed.append)
    return [tuple(score) for score in scores], sum(computed)


def test_likelihoods_are_those_of_one_device_and_the_requests_are_divided(pool):
    [(alone, count)] = pool.run(1, scored_trees)
    assert count == len(alone) == 479
    (first, one), (second, other) = pool.run(2, scored_trees)
    assert first == second == alone  # to the bit
    assert one + other == 479 and min(one, other) > 160
    assert likelihood.WIDE * 40 < 150 * 60  # all questions share the 40 tokens, which both ranks read


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name in ("tnl", "llama"):
        config = family(name)(32, 2, vocab_size=256)
        save_model(path / name, config, build_model(config, seed=1).state_dict(), ByteTokenizer())
    config = family("bert", "masked_lm")(16, 2, num_heads=2)
    save_model(path / "masked", config, build("masked_lm", config, 0).state_dict(), ByteTokenizer())
    for number in range(3):
        (path / f"{number}.txt").write_text("a line of a document\n" * (3 + 7 * number))
    return path


KINDS = {
    "text": ["text", "tnl", "{}/?.txt"],
    "windows": ["text", "llama", "{}/?.txt", "--window", "32"],
    "blocks": ["blocks", "tnl", "{}/?.txt", "--block", "64"],
    "blocks without a state": ["blocks", "llama", "{}/?.txt", "--block", "64"],
    "needle": ["needle", "tnl", "--lengths", "240,300", "--depths", "3", "--samples", "2"],
    "choice": ["needle", "tnl", "--lengths", "240", "--depths", "9", "--scoring", "choice"],
    "recall": ["recall", "tnl", "--lengths", "32,64", "--pairs", "2,4", "--samples", "2"],
    "tasks": ["tasks", "tnl", "capitals", "opposites", "--include", str(ROOT / "examples/tasks"), "--limit", "5"],
    "masked": ["masked", "masked", "{}/?.txt"],
}


def evaluated(folder: str, arguments: dict[str, list[str]]) -> dict:
    """Runs in a worker. What each command prints on this rank, and the files that it leaves."""
    printed = {}
    for name, (kind, model, *rest) in arguments.items():
        run = Path(folder) / model
        shutil.rmtree(run / "evaluations", ignore_errors=True) if mesh.rank() == 0 else None
        command = ["evaluate", kind, str(run), *(part.format(folder) for part in rest), "--device", "cpu", "--json"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (name, result.output, result.exception)
        files = [path.read_bytes() for path in (run / "evaluations").glob("*.csv")] if mesh.rank() == 0 else []
        printed[name] = (result.stdout, files)
    return printed


def without_date(text: str) -> dict:
    records = json.loads(text)
    for record in records.values():
        del record["model"]["evaluated"]["date"]
    return records


def test_every_kind_gives_the_same_record_and_the_same_items(pool, models):
    pytest.importorskip("lm_eval")
    [alone] = pool.run(1, evaluated, str(models), KINDS, group=False, timeout=120)
    first, *others = pool.run(3, evaluated, str(models), KINDS, group=False, timeout=120)
    for name in KINDS:
        assert without_date(first[name][0]) == without_date(alone[name][0]), name
        assert first[name][1] == alone[name][1] and len(alone[name][1]) == 1, name
        assert all(other[name][0] == "" for other in others), name  # only rank 0 prints
