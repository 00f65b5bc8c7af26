"""The tables of benchmarks/laws.py, made from known laws."""

import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "laws.py"


@pytest.fixture(scope="session")
def tables():
    spec = importlib.util.spec_from_file_location("benchmark_of_laws", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
