"""A folder that was received runs no code of its own until its user allows it."""

import multiprocessing
import os
import py_compile
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from executor_jobs import jobs_of, work
from folder_traps import set_traps
from typer.testing import CliRunner

from linnet import trust
from linnet.cli import app
from linnet.config import ConfigError, parse
from linnet.corpus.documents import Part
from linnet.data.parts import run_parts
from linnet.evaluate.session import open_session
from linnet.hf import export
from linnet.inference import Engine
from linnet.layers.base import load_plugin
from linnet.models import build_model, family
from linnet.runs import RunFolder, load_model, save_model
from linnet.study import runner
from linnet.study.executors import Job, LocalPool
from linnet.study.runner import train_run
from linnet.train import TrainConfig, extend, resolve, train
from linnet.train.identity import read_config
from linnet.vision.data import batches

ROOT = Path(__file__).parents[1]
MIXER = """
from pathlib import Path
Path({trace!r}).write_text("ran")
from linnet.config import Config
from linnet.layers import Mixer, register_mixer

class Options(Config):
    pass

@register_mixer({name!r}, Options)
class Evil(Mixer):
    pass
"""


@pytest.fixture
def stranger(monkeypatch, tmp_path):
    """A user without runs: an empty list, and a process that has imported no plugin."""
    monkeypatch.setenv(trust.FOLDER, str(tmp_path / "user"))
    monkeypatch.setattr(trust, "_accepted", set())
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def received(stranger, tmp_path):
    """A model folder whose config.yaml names a file that writes another file, and that file."""
    name = f"evil_{tmp_path.name}"
    config = family("tnl")(16, 1, num_heads=1)
    folder = save_model("received", config, build_model(config, seed=0).state_dict())
    Path("received/evil.py").write_text(MIXER.format(trace=str(tmp_path / "trace"), name=name))
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["plugins"] = ["received/evil.py:Evil"]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "SHA256SUMS").unlink()
    (folder / "tokenizer.json").write_text('{"linnet": {"kind": "byte"}}')
    return folder


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 2 and not Path("trace").exists(), result.output
    return result.output


def test_every_verb_refuses_it_and_names_file_digest_folder_and_fix(received):
    digest = trust.plugin_digest("received/evil.py:Evil")
    Path("text.txt").write_text("text")
    for arguments in (
        ("generate", received, "a"),
        ("evaluate", "text", received, "text.txt"),
        ("evaluate", "recall", received),
        ("serve", received, "--port", "0"),
        ("convert", received),
        ("train", "--extend", received, "--set", "steps=2"),
        ("train", received / "config.yaml"),
    ):
        said = refused(*arguments)
        assert all(
            part in said for part in ("received/evil.py:Evil", digest, "received/config.yaml", "--allow-plugins")
        )
    Path("plan.json").write_text("{}")
    study = {"name": "s", "architectures": ["tnl"], "sizes": [[16, 1]], "budgets": [1e9]}
    Path("study.yaml").write_text(yaml.safe_dump(study | {"plugins": ["received/evil.py:Evil"]}))
    assert digest in refused("study", "study.yaml", "--plan")


def test_python_refuses_it_until_it_is_allowed(received):
    attempts = (
        load_model,
        Engine.of_run,
        open_session,
        lambda path: export(path, "out"),
        lambda path: extend(path, "c"),
    )
    for attempt in (*attempts, lambda path: read_config(RunFolder(path))):
        with pytest.raises(ConfigError, match=r"evil\.py:Evil.*allow_plugins=True"):
            attempt(received)
    values = {"format": 2, "digest": "0" * 12, **yaml.safe_load((received / "config.yaml").read_text())}
    with pytest.raises(ConfigError, match=r"evil\.py:Evil"):
        parse(TrainConfig, values)
    assert not Path("trace").exists()
    load_model(received, allow_plugins=True)
    assert Path("trace").exists() and not trust.trusted_list().exists()  # allowed once, not for good


def test_a_changed_file_is_named_with_the_copy_that_the_folder_keeps(received):
    values = yaml.safe_load((received / "config.yaml").read_text())
    (plugin,) = values["plugins"]
    before = trust.plugin_digest(plugin)
    copy = trust.copy_of(plugin, before, received)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(trust.plugin_file(plugin).read_bytes())
    trust.remember([plugin])
    trust.plugin_file(plugin).write_text("changed = 1")
    values["plugin_digests"] = {plugin: before}
    with pytest.raises(ConfigError) as caught:
        trust.check_plugins(values, received / "config.yaml")
    assert f"move it away to use the copy {copy}, or allow it as it is: --allow-plugins" in str(caught.value)


def test_a_changed_file_is_refused_even_if_it_is_trusted(received):
    Path("mine.py").write_text("mine = 1")
    values = yaml.safe_load((received / "config.yaml").read_text())
    values["plugin_digests"] = {"received/evil.py:Evil": trust.plugin_digest("mine.py:Mine")}
    (received / "config.yaml").write_text(yaml.safe_dump(values))
    trust.remember(["mine.py:Mine", "received/evil.py:Evil"])
    with pytest.raises(ConfigError, match=r"has changed since received/config\.yaml"):
        load_model(received)
    for broken in ({"plugins": 3}, {"plugins": [3]}, {"plugins": ["none.py:X"]}, {"plugins": ["a"]}):
        with pytest.raises(ConfigError, match="plugins"):
            trust.check_plugins(values | broken, "config.yaml")


def test_bytecode_beside_a_trusted_file_is_not_run(stranger, tmp_path):
    source = MIXER.format(trace="honest", name=f"honest_{tmp_path.name}")
    file = Path("mixer.py")
    file.write_text(MIXER.format(trace="forged", name=f"honest_{tmp_path.name}"))
    py_compile.compile(str(file))
    before = file.stat()
    file.write_text(source)  # of the same length, and with the same time, which is all that bytecode records
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    load_plugin("mixer.py:Evil")
    assert Path("honest").exists() and not Path("forged").exists()


def test_a_run_made_here_is_trusted_and_workers_learn_it_by_digest(stranger, tmp_path, monkeypatch):
    text = (Path(__file__).parents[1] / "examples" / "my_mixer.py").read_text()
    Path("mine.py").write_text(text.replace('"my_mixer"', f'"trusted_{tmp_path.name}"'))
    Path("text.txt").write_text("".join(f"{n} and {n * n % 89}\n" for n in range(300)))
    values = {
        "plugins": ["mine.py:MyMixer"],
        "data": {"source": ["text.txt"]},
        "model": {"d_model": 16, "layout": f"trusted_{tmp_path.name}+sglu"},
        "steps": 1,
        "seq_len": 16,
        "batch_size": 2,
        "evaluate_tokens": 64,
        "run": {"device": "cpu"},
    }
    config = parse(TrainConfig, values)
    run = train(config, "runs", "cache")
    assert trust.plugin_digest("mine.py:MyMixer") in trust.trusted_list().read_text()
    monkeypatch.setattr(trust, "_accepted", set())
    load_model(run.path)

    monkeypatch.setenv(trust.FOLDER, str(tmp_path / "another machine"))
    monkeypatch.setattr(trust, "_accepted", set())
    with pytest.raises(ConfigError, match="no run was made here"):
        load_model(run.path)
    payload = {"config": resolve(config).model_dump(mode="json"), "root": "runs", "cache": "cache"}
    job = Job("run", payload | {"trusted": list(trust.digests(config.plugins).values())})
    assert train_run(job) == "done"
    Path("mine.py").write_text(text + "\n# another file on the worker's machine\n")
    with pytest.raises(ConfigError, match="has changed"):
        train_run(job)


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def carried(stranger, tmp_path, monkeypatch):
    """A run whose mixer was named by a relative path, seen from another folder."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    name = f"carried_{tmp_path.name}"
    text = (ROOT / "examples" / "my_mixer.py").read_text().replace('"my_mixer"', f'"{name}"')
    Path("gdn.py").write_text(text)
    texts = tmp_path / "text.txt"
    texts.write_text("".join(f"{n} and {n * n % 89}\n" for n in range(300)))
    values = {
        "plugins": ["gdn.py:MyMixer"],
        "data": {"source": [str(texts)]},
        "model": {"d_model": 16, "layout": f"{name}+sglu"},
        "steps": 2,
        "schedule": {"name": "constant"},
        "seq_len": 16,
        "batch_size": 2,
        "evaluate_tokens": 64,
        "run": {"device": "cpu"},
    }
    run = train(parse(TrainConfig, values), tmp_path / "runs", tmp_path / "cache")
    monkeypatch.chdir(tmp_path / "second")
    return run


def test_a_run_carries_its_mixer_into_every_folder(carried, tmp_path, monkeypatch):
    run, cache = carried.path, ["--cache", tmp_path / "cache"]
    [copy] = run.glob("plugins/*/gdn.py")
    digest = trust.plugin_digest(f"{copy}:MyMixer")
    assert copy.parent.name == digest[:12] and copy.read_bytes() == (tmp_path / "first/gdn.py").read_bytes()
    assert yaml.safe_load((run / "config.yaml").read_text())["plugins"] == ["gdn.py:MyMixer"]  # as it was given
    Path("gdn.py").write_text("raise SystemExit('another file')\n")
    for name in ("another file", "no file"):
        command("generate", run, "a", "--max-tokens", "1")
        command("evaluate", "text", run, tmp_path / "text.txt", "--device", "cpu")
        Engine.of_run(run)
        before = carried.result()
        command("train", run / "config.yaml", "--out", run.parent, *cache)
        assert carried.result() == before and len(list(run.parent.iterdir())) == 1  # it is found, and done
        export(run, tmp_path / name)
        Path("gdn.py").unlink(missing_ok=True)
    command("train", "--extend", run, "--set", "steps=3", *cache)
    assert carried.result()["steps"] == 3
    monkeypatch.chdir(tmp_path / "first")
    command("generate", run, "a", "--max-tokens", "1")
    os.rename(run, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "second")
    command("generate", tmp_path / "moved", "a", "--max-tokens", "1")


def test_a_copy_is_trusted_by_the_rules_of_its_original(carried, tmp_path, monkeypatch):
    run = carried.path
    [copy] = run.glob("plugins/*/gdn.py")
    (tmp_path / "first/gdn.py").write_text("changed = 1\n")
    monkeypatch.chdir(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"gdn\.py:MyMixer' has changed"):  # edited where the run was made
        load_model(run)
    monkeypatch.chdir(tmp_path / "second")
    load_model(run)
    text = copy.read_text()
    copy.write_text(text + "import os\n")
    with pytest.raises(ConfigError, match="has changed"):
        load_model(run)
    copy.write_text(text)
    monkeypatch.setenv(trust.FOLDER, str(tmp_path / "another user"))
    monkeypatch.setattr(trust, "_accepted", set())
    with pytest.raises(ConfigError, match=r"plugins/.*/gdn\.py:MyMixer.*no run was made here.*--allow-plugins"):
        load_model(run)
    load_model(run, allow_plugins=True)


def test_a_model_folder_carries_its_mixer(carried, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "first")
    model, tokenizer = load_model(carried.path)
    save_model(tmp_path / "model", model.config, model.state_dict(), tokenizer, ["gdn.py:MyMixer"])
    monkeypatch.chdir(tmp_path / "second")
    command("generate", tmp_path / "model", "a", "--max-tokens", "1")


def test_a_study_carries_its_mixer_and_every_verb_of_it_checks_the_file(stranger, tmp_path, monkeypatch):
    name = f"studied_{tmp_path.name}"
    folder = tmp_path / "studies/s"
    copy = folder / "runs/r/plugins/0123456789ab/mine.py"
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / "examples" / "my_mixer.py").read_text().replace('"my_mixer"', f'"{name}"'))
    study = {"name": "s", "architectures": [name], "sizes": [[16, 1], [32, 1], [64, 1]], "budgets": [1e12]}
    (folder / "plan.json").write_text("{}")
    (folder / "study.yaml").write_text(yaml.safe_dump(study | {"plugins": ["mine.py:MyMixer"]}))
    verbs = [["study", folder / "study.yaml", "--plan"], ["study", "tune", folder / "study.yaml", "--plan"]]
    for verb in verbs:
        assert "no run was made here" in refused(*verb)
    trust.remember([f"{copy}:MyMixer"])
    monkeypatch.setenv("COLUMNS", "200")
    for verb in verbs:
        assert name in command(*verb, "--out", tmp_path / "new")


def test_functions_of_an_evaluation_are_code_too(stranger):
    Path("tasks").mkdir()
    Path("tasks/one.yaml").write_text("task: one\nprocess_docs: !function code.run\n")
    Path("tasks/code.py").write_text("")
    values = {"evaluations": [{"kind": "tasks", "include": "tasks"}]}
    with pytest.raises(ConfigError, match=r"evaluations: .*'tasks'"):
        trust.check_training(values, "config.yaml")
    trust.check_training(values, "config.yaml", allow=True)
    trust.remember([], ["tasks"])
    trust.check_training(values, "config.yaml")
    Path("tasks/code.py").write_text("changed = 1")
    with pytest.raises(ConfigError, match="evaluations"):
        trust.check_training(values, "config.yaml")


def test_a_line_that_a_full_disk_cut_off_does_not_spoil_the_next(stranger, monkeypatch, tmp_path):
    monkeypatch.setenv(trust.FOLDER, str(tmp_path / "config"))
    trust.trusted_list().parent.mkdir(parents=True, exist_ok=True)
    Path("mine.py").write_text("mine = 1")
    trust.trusted_list().write_bytes(b"0123  " + "\u00e9".encode()[:1])
    trust.remember(["mine.py:Mine"])
    trust.check_plugins({"plugins": ["mine.py:Mine"]}, "config.yaml")


def test_a_list_that_cannot_be_written_does_not_stop_a_training(stranger, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setenv(trust.FOLDER, str(Path("file").absolute()))
    Path("mine.py").write_text("mine = 1")
    with pytest.warns(UserWarning, match="--allow-plugins"):
        trust.remember(["mine.py:Mine"])


@pytest.fixture
def trapped(tmp_path, monkeypatch) -> Path:
    """The current folder has traps. The folder of these tests is not the current one."""
    folder = tmp_path / "trapped"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    monkeypatch.delenv(trust.SAFE_PATH, raising=False)
    # These tests may run under `python -P`, which multiprocessing would pass on.
    monkeypatch.setattr("multiprocessing.util._args_from_interpreter_flags", lambda: [])
    return set_traps(folder)


def test_workers_of_a_study_import_nothing_from_the_current_folder(trapped, tmp_path):
    outcomes = LocalPool(1).run(jobs_of(tmp_path, "fine"), work)
    assert [outcome.status for outcome in outcomes if outcome] == ["done"]
    assert trapped.read_text() == ""
    assert trust.SAFE_PATH not in os.environ


def test_workers_of_a_corpus_import_nothing_from_the_current_folder(trapped):
    parts = [Part(number, ()) for number in range(2)]
    assert sorted(result for _, result in run_parts(attrgetter("number"), parts, workers=2)) == [0, 1]
    assert trapped.read_text() == ""


def test_a_pool_imports_nothing_from_the_current_folder(trapped):
    with trust.safe_path(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(abs, -1).result() == 1
    assert trapped.read_text() == ""


def test_data_workers_import_nothing_from_the_current_folder(trapped):
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)  # newer releases of Python do not fork
    try:
        loader, _ = batches._start({0: "first", 1: "second"}, [0, 1], 1)
        assert list(loader) == ["first", "second"]
    finally:
        multiprocessing.set_start_method(method, force=True)
    assert trapped.read_text() == ""


def test_a_run_of_a_study_on_several_devices_imports_nothing_from_the_current_folder(trapped, tmp_path, monkeypatch):
    started = subprocess.Popen

    def show_version(command, **options):
        assert command[-1] == "--json" and "--devices" in command
        return started([*command[: command.index("train")], "--version"], **options)

    monkeypatch.setattr(subprocess, "Popen", show_version)
    with pytest.raises(RuntimeError, match="ended with 0"):  # it trained nothing
        runner.train_on_devices(
            resolve(TrainConfig(model=family("tnl")(16, 1, num_heads=1), steps=1)),
            tmp_path / "runs",
            tmp_path / "cache",
        )
    assert trapped.read_text() == ""


def test_the_command_and_its_processes_import_nothing_from_the_current_folder(trapped):
    (trapped.parent / "linnet.py").unlink()  # `python -m linnet` would run it; `python -P -m linnet` does not
    done = subprocess.run([sys.executable, "-m", "linnet", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("linnet "), done.stderr
    show = "import os, subprocess, sys\nsys.argv = ['linnet', '--version']\nfrom linnet.cli import main\n"
    show += (
        "try:\n    main()\nexcept SystemExit:\n    subprocess.run([sys.executable, '-c', 'import yaml'], check=True)"
    )
    subprocess.run([sys.executable, "-P", "-c", show], check=True, capture_output=True)
    assert trapped.read_text() == ""


def test_every_process_of_the_package_is_started_without_the_current_folder():
    for path in Path(trust.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for command in re.findall(r"sys\.executable, *(\[?.*)", text):
            assert '"-P"' in command, f"{path}: {command}"
        if re.search(r"get_context\(|DataLoader\(|ray\.init\(\n", text):
            assert "safe_path()" in text, path


@pytest.mark.parametrize("page", ["docs/distributed.md", "linnet/cli/train/__init__.py"])
def test_torchrun_is_documented_without_the_current_folder(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    starts = re.findall(r"(PYTHONSAFEPATH=1 )?torchrun (?:--nnodes|\.\.\.)", text)
    assert starts and all(starts)
