"""A short form of benchmarks/fuzz.py: broken configurations, tables, texts and run folders in-process."""

import importlib.util
import random
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"
spec = importlib.util.spec_from_file_location("fuzz", PATH)
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "fixtures"
    fuzz.make_fixtures(folder)
    return folder


CASES = {"train": 16, "study": 8, "mad": 4, "evaluate": 4, "table": 3, "text": 8, "folder": 3}


@pytest.mark.parametrize("kind", CASES)
def test_broken_input_gets_a_message(kind: str, fixtures: Path, tmp_path: Path, monkeypatch):
    for number in range(5000, 5000 + CASES[kind]):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        case = fuzz.MAKERS[kind](random.Random(f"{kind}:{number}"), folder, fixtures)
        (folder / "command.txt").write_text(repr(case.arguments))
        if (case.stop is not None and kind != "evaluate") or case.arguments[0] == "report":
            continue  # these run until they are interrupted, or draw for seconds
        problem = fuzz.judge(case, folder, *fuzz.call(case.arguments))
        assert problem is None, f"python benchmarks/fuzz.py --only {kind}:{number}: {problem}"


@pytest.mark.parametrize(
    "end, problem",
    [
        ((1, "", "", "Traceback (most recent call last):\nKeyError: 'x'"), "traceback: KeyError"),
        ((2, "", "", None), "without a message"),
        ((2, "", "x" * 30_000, None), "30,000 characters"),
        ((-11, "", "", None), "exit status -11"),
        ((0, '{"loss": NaN}', "", None), "not finite"),
        ((0, '{"loss": 1.5}', "", None), "does not show seed = 3"),
        ((2, "", "error", None), None),
    ],
)
def test_what_the_fuzz_calls_a_failure(tmp_path, end, problem):
    case = fuzz.Case(["train", "--json"], [(("seed",), 3)])
    (tmp_path / "command.txt").write_text("")
    (tmp_path / "out" / "run").mkdir(parents=True)
    (tmp_path / "out" / "run" / "config.yaml").write_text("seed: 0\n")
    found = fuzz.judge(case, tmp_path, *end)
    assert found is None if problem is None else problem in found


def test_mutations_depend_on_the_number_alone():
    values = fuzz.train_values()
    first, again = (repr(fuzz.mutated(random.Random("train:1"), values)) for _ in range(2))
    assert first == again != repr((values, []))
