"""Without an extra, verbs that need it say which it is, instead of what could not be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT = (
    "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(','))); from linnet.cli import main; main()"
)


@pytest.mark.parametrize(
    "absent, arguments, fix",
    [
        (
            "pandas,scipy",
            "fit runs.csv",
            "pandas: not installed; install the extra `study`: pip install 'linnet[study]'",
        ),
        ("pandas,scipy,altair,vl_convert", "report studies", "vl_convert: not installed; install the extra `study`"),
        ("altair", "compare run", "altair: not installed; install the extra `study`: pip install 'linnet[study]', or"),
        ("fastapi", "serve run", "fastapi missing; install them with: pip install 'linnet[serve]'"),
        ("transformers", "convert run --to hf", "pip install 'linnet[hf]'"),
        ("lm_eval", "evaluate run --task x", "suites and tasks need lm-evaluation-harness; pip install 'linnet[eval]'"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(tmp_path, absent, arguments, fix):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: tnl-10m\n")
    command = [sys.executable, "-c", WITHOUT, absent, *arguments.split()]
    environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2 and fix in done.stderr and "Traceback" not in done.stderr, done.stderr
