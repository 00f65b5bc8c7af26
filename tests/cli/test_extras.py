"""Without an extra, verbs that need it say which it is, instead of what could not be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from linnet.install import install_command

ROOT = Path(__file__).parents[2]
FORKS = """
import gc, json, os, sys, tempfile
import linnet.models, linnet.train  # once for all cases
from linnet.cli import main

gc.freeze()
for line in sys.stdin:
    folder, absent, arguments = json.loads(line)
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        os.chdir(folder)
        sys.modules.update(dict.fromkeys(absent.split(",")))
        sys.argv[1:] = arguments.split()
        try:
            main()
        except SystemExit as end:  # at once: to take down what was imported takes longer than most commands
            sys.stdout.flush()
            os._exit(end.code or 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = [file.seek(0) or file.read() for file in files]
    print(json.dumps([code, *texts]), flush=True)
"""


@pytest.fixture(scope="module")
def forks():
    """A process that has imported Linnet and torch, and forks for each command: the extras are absent in the fork."""
    environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKS], env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(forks):
    """run(folder, absent modules, arguments) -> exit code, stdout, stderr of the command."""

    def call(folder, absent, arguments):
        print(json.dumps([str(folder), absent, arguments]), file=forks.stdin, flush=True)
        return json.loads(forks.stdout.readline())

    return call


STUDY = "pandas,scipy,altair,vl_convert"
ONE_RUN = "name: one\narchitectures: [tnl]\nbudgets: [1.0e+8]\nsizes: [[8, 1]]\ndata: {source: [text.txt]}\n"
NAMED = f"pandas: not installed; install the extra `study`: {install_command('study')}"
PNG = f"Pillow: not installed; it writes PNG files; install it: {install_command('vision')}"
DIT = "objective: diffusion\nmodel: dit-8px\ndata: {source: digits}\nsteps: 1\nbatch_size: 8\n"


@pytest.mark.parametrize(
    "absent, arguments, fix",
    [
        ("pandas,scipy", "fit runs.csv", NAMED),
        (STUDY, "report studies", NAMED),
        (STUDY, "study study.yaml", NAMED),
        (STUDY, "compare run", f"{NAMED}, or give --no-page"),
        (STUDY, "mad report run", "vl_convert: not installed; install the extra `study`"),
        (STUDY, "mad correlate run --study studies --out page.html", NAMED),
        ("fastapi", "serve run", "fastapi: not installed; install them: " + install_command("serve")),
        ("transformers", "convert run --to hf", install_command("hf")),
        ("lm_eval", "evaluate tasks run x", install_command("eval")),
        ("PIL", "evaluate images run", PNG),
        ("PIL", "train dit.yaml", f"{PNG}, or set run.pictures=0"),  # before the first step
    ],
)
def test_an_extra_that_is_not_installed_is_named(run, tmp_path, absent, arguments, fix):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: tnl-10m\n")
    (tmp_path / "text.txt").write_text("a text " * 9)
    (tmp_path / "study.yaml").write_text(ONE_RUN)
    (tmp_path / "dit.yaml").write_text(DIT)
    code, _, shown = run(tmp_path, absent, arguments)
    assert code == 2 and fix in shown and "Traceback" not in shown, shown


def test_what_was_measured_is_shown_and_kept_without_what_draws_it(run, tmp_path):
    small = "mad-mamba --device cpu --prompt 8 --new 3 --repeats 1 --batch 1 --batch 2 --out speed"
    code, printed, shown = run(tmp_path, STUDY, f"bench generate {small}")
    assert code == 0 and "altair: " in shown, shown
    assert "tokens/s" in printed and (tmp_path / "speed" / "generate.csv").read_text().count("mad-mamba") >= 2
