"""Without an extra, verbs that need it say which it is, instead of what could not be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from linnet.install import install_command

ROOT = Path(__file__).parents[2]
WITHOUT = (
    "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(','))); from linnet.cli import main; main()"
)


def run(folder, absent, arguments):
    command = [sys.executable, "-c", WITHOUT, absent, *arguments.split()]
    environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)


STUDY = "pandas,scipy,altair,vl_convert"
NAMED = f"pandas: not installed; install the extra `study`: {install_command('study')}"


@pytest.mark.parametrize(
    "absent, arguments, fix",
    [
        ("pandas,scipy", "fit runs.csv", NAMED),
        (STUDY, "report studies", NAMED),
        (STUDY, f"study {ROOT / 'configs' / 'demo.yaml'}", NAMED),
        (STUDY, "compare run", f"{NAMED}, or give --no-page"),
        (STUDY, "mad report run", "vl_convert: not installed; install the extra `study`"),
        (STUDY, "mad correlate run --study studies --out page.html", NAMED),
        ("fastapi", "serve run", "fastapi: not installed; install them: " + install_command("serve")),
        ("transformers", "convert run --to hf", install_command("hf")),
        ("lm_eval", "evaluate tasks run x", install_command("eval")),
    ],
)
def test_an_extra_that_is_not_installed_is_named(tmp_path, absent, arguments, fix):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: tnl-10m\n")
    done = run(tmp_path, absent, arguments)
    assert done.returncode == 2 and fix in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_what_was_measured_is_shown_and_kept_without_what_draws_it(tmp_path):
    small = "mad-mamba --device cpu --prompt 8 --new 3 --repeats 1 --batch 1 --batch 2 --out speed"
    done = run(tmp_path, STUDY, f"bench generate {small}")
    assert done.returncode == 0 and "altair: " in done.stderr, done.stderr
    assert "tokens/s" in done.stdout and (tmp_path / "speed" / "generate.csv").read_text().count("mad-mamba") >= 2
