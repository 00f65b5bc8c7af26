"""`linnet mad`: samples that a person and a program can read, and the list of what a score needs."""

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.data.synthetic import IGNORE, SelectiveCopying, generate
from linnet.mad import settings


def call(*arguments):
    return CliRunner().invoke(app, ["mad", *map(str, arguments)])


def test_samples_a_person_reads():
    result = call("data", "in-context-recall", "--set", "seq_len=16", "--n", 50, "--show", 2)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert "vocab_size=16 seq_len=16" in lines[1] and "keys 0 to 7, values 8 to 15" in lines[2]
    assert "50 train samples of 16 tokens" in lines[3] and lines[3].endswith("; 2 are shown (--show)")
    above, below = lines[5].split(), lines[6].split()
    assert len(above) == len(below) == 16 and {name[0] for name in above[::2]} == {"k"}
    assert below[14] == above[15] and below[15] == "."
    assert lines[7] == "-- train 1" and len(lines) == 10


@pytest.mark.parametrize("suffix", ["npz", "jsonl"])
def test_written_samples(suffix, tmp_path):
    path = tmp_path / f"samples.{suffix}"
    options = ("--set", "tokens_to_copy=4", "--set", "seq_len=20", "--n", 30, "--split", "test", "--seed", 4)
    result = call("data", "selective_copying", *options, "--spec", "mad-lab", "--out", path)
    assert result.exit_code == 0 and "30 samples of 20 tokens" in result.stdout
    expected = generate(SelectiveCopying(spec="mad-lab", seq_len=20, tokens_to_copy=4), "test", 30, seed=4)
    if suffix == "npz":
        with np.load(path) as file:
            found = file["inputs"], file["targets"]
            about = json.loads(str(file["about"]))
        assert about["task"] == "selective_copying" and about["num_tokens"] == 16 and about["ignore"] == IGNORE
        assert about["options"]["tokens_to_copy"] == 4 and (about["split"], about["seed"]) == ("test", 4)
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found = [row["inputs"] for row in rows], [row["targets"] for row in rows]
    assert (np.array(found[0]) == expected.inputs).all() and (np.array(found[1]) == expected.targets).all()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_is_wrong_is_said(tmp_path):
    def problems(*arguments):
        result = call(*arguments)
        assert result.exit_code == 2
        return result.stderr.replace("\n", " ")

    found = problems("data", "selective_copying", "--set", "tokens_to_copy=200", "--set", "blanks=3")
    assert "tokens_to_copy: 200 " in found and " 128" in found and "blanks: " in found
    found = problems("data", "mqar", "--out", tmp_path / "none" / "x.csv", "--split", "dev")
    assert all(part in found for part in (".npz or .jsonl", "none/x.csv", "--split 'dev'"))
    (tmp_path / "taken.npz").mkdir()
    assert "taken.npz" in problems("data", "mqar", "--out", tmp_path / "taken.npz")
    assert "'mqar'" in problems("data", "mqarr")
    assert "'compression'" in problems("list", "--tasks", "compresion")


def test_list():
    result = call("list")
    assert result.exit_code == 0
    total = "full: 66 settings x 6 (learning rate, weight decay) = 396 runs of 200 epochs, 5,384,400 steps"
    assert total in result.stdout and "not comparable" in result.stdout and "…" not in result.stdout
    assert re.search(r"--budget core +6 settings, +36 runs: the six baselines", result.stdout)
    assert max(map(len, result.stdout.split("full: 66")[0].splitlines())) <= 80

    found = json.loads(call("list", "--json").stdout)
    assert (found["runs"], found["steps"], len(found["settings"])) == (396, 5_384_400, 66)
    assert {setting["runs"] for setting in found["settings"]} == {6} and len(found["grid"]) == 6
    counts = {name: (len(one["settings"]), one["runs"], one["steps"]) for name, one in found["budgets"].items()}
    assert counts == {
        "smoke": (6, 12, 2_660),
        "core": (6, 36, 602_400),
        "screen": (26, 104, 589_600),
        "full": (66, 396, 5_384_400),
        "published": (66, 396, 5_384_400),
        "mqar": (8, 32, 801_280),
        "mqar-short": (8, 16, 140_736),
    }
    for one in found["budgets"].values():
        assert all(s["runs"] == len(one["grid"]) for s in one["settings"])
        steps = [s["epochs"] * math.ceil(s["train_samples"] / s["batch_size"]) * s["runs"] for s in one["settings"]]
        assert steps == [s["steps"] for s in one["settings"]]
    places = [(s["width"], s["options"]["num_pairs"]) for s in found["budgets"]["mqar"]["settings"]]
    assert places == [(width, pairs) for width in (64, 128) for pairs in (4, 8, 16, 64)]

    result = call("list", "--budget", "mqar").stdout
    assert "mqar: 8 settings x 4" in result and "256x16,width=128" in result and "100,096" in result

    options = ("--budget", "full", "--tasks", "noisy-recall,compression", "--settings", "seq_len, frac_noise=0.4")
    found = json.loads(call("list", *options, "--spec", "mad-lab", "--json").stdout)
    assert len(found["settings"]) == 7 and found["runs"] == 42 and found["spec"] == "mad-lab"


def test_samples_of_the_docs():
    """docs/mad.md shows what the commands print."""
    text = (Path(__file__).parents[2] / "docs" / "mad.md").read_text(encoding="utf-8")
    examples = re.findall(r"    \$ linnet mad (.*)\n((?:    .*\n)+)", text)
    assert len(examples) == 7
    for command, shown in examples:
        printed = call(*shlex.split(command)).stdout
        assert all(line.strip() in printed for line in shown.splitlines()), command


def test_help_and_reading_records_need_no_torch_and_models_no_compiler():
    code = "import sys, linnet.cli; assert not {'torch', 'numpy'} & set(sys.modules)\n"
    code += "import linnet.evaluate.compare, linnet.report.compare, linnet.mad.page, linnet.report.page\n"
    code += "assert 'torch' not in sys.modules\n"
    code += "import linnet.models, linnet.train; assert 'torch._dynamo' not in sys.modules\n"
    code += "from linnet.models import FAMILIES, count_parameters, family\n"
    code += "for name in FAMILIES:\n"
    code += "    count_parameters(family(name)(64, 2)); assert 'torch._dynamo' not in sys.modules, name"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_evaluate_imports_no_training_and_no_triton(tmp_path):
    """Whole command: a tiny run is scored without what only training, counting and kernels need."""
    from linnet.data import ByteTokenizer
    from linnet.models import ModelConfig, build_model
    from linnet.runs.model import save_model

    config = ModelConfig(d_model=16, layout="tnl+swiglu", vocab_size=257)
    save_model(tmp_path / "run", config, build_model(config).state_dict(), ByteTokenizer())
    (tmp_path / "text.txt").write_text("a fox. " * 40, encoding="utf-8")
    unneeded = ["torch._dynamo", "triton", "torch.utils.flop_counter", "linnet.train.config", "linnet.train.loop"]
    unneeded += ["linnet.inference", "linnet.hf", "linnet.study", "linnet.report", "linnet.serve", "pandas", "altair"]
    code = "import sys; from linnet.cli import app\n"
    code += "app(['evaluate', 'text', 'run', 'text.txt', '--json'], standalone_mode=False)\n"
    code += f"print(sorted(set({unneeded}) & set(sys.modules)), file=sys.stderr)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["text"]["detail"]["tokens"] > 200, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_run_scores_layouts_and_a_mixer_file(tmp_path, monkeypatch):
    """Runs of the example in the documentation's form, but shorter; the second call only adds the outside mixer."""
    short = dataclasses.replace(settings.BUDGETS["smoke"], epochs=2, held_out=64)
    monkeypatch.setitem(settings.BUDGETS, "smoke", short)
    out, mixer = tmp_path / "mad", Path(__file__).parents[2] / "examples" / "my_mixer.py:MyMixer"
    small = ["--tasks", "memorization", "--settings", "baseline", "--set", "d_model=32", "--set"]
    common = [*small, "options={swiglu: {inner: 16}}", "--state", 0, "--out", out, "--executor", "inline"]
    planned = call("run", "attention+swiglu", "mad-gla-swiglu", *common, "--plan", "--json")
    cost = json.loads(planned.stdout)
    assert "4 runs, " in planned.stderr and cost["runs"] == cost["missing"]["runs"] == 4 and cost["flops"] > 0
    assert re.search(r"FLOPs, about [\d.]+ s on 1 worker$", planned.stderr.strip())
    assert not out.exists()
    first = call("run", "attention+swiglu", "mad-gla-swiglu", *common)
    assert first.exit_code == 0, first.output
    assert "mad-gla-swiglu: gla+swiglu x2, width 32, state 256" in first.stdout
    assert "smoke score" in first.stdout and "memorization" in first.stdout
    lines = [line for line in first.stdout.splitlines() if "memorization/baseline" in line]
    assert len(lines) == 4 and len({line.index("memorization/") for line in lines}) == 1, "columns"
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    assert len(stamps) == 4
    planned = call("run", "mad-gla-swiglu", *common, "--plan")
    assert "2 runs, " in planned.stdout and ", 0 of them still to do" in planned.stdout
    second = call("run", "attention+swiglu", "--mixer", mixer, *common, "--state", 1024, "--json")
    assert second.exit_code == 0, second.output
    changed = "my_mixer+swiglu x2: width 32, state 1,024 (for which my_mixer.num_heads 2, not 4)"
    assert changed in second.stderr and "attention+swiglu: width 32, state 0\n" in second.stderr
    found = json.loads(second.stdout)
    assert found["comparable"] is False and found["failed"] == {}
    assert {row["architecture"] for row in found["scores"]} == {
        "attention+swiglu",
        "mad-gla-swiglu",
        "my_mixer+swiglu x2",
    }
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert (out / "scores.csv").is_file() and (out / "mad.csv").is_file()


def test_a_mixer_from_a_file_keeps_its_state_if_no_option_reaches_the_usual_one():
    from linnet.mad.cli.run import _another_state, _models

    mixer, odd = str(Path(__file__).parents[2] / "examples" / "my_mixer.py:MyMixer"), {"d_model": 24}
    problems: list[str] = []
    models, plain = _models([], [mixer], odd, None, False, "paper", problems)
    assert not problems and models == plain and "not 4,096" in _another_state(models["my_mixer+swiglu x2"])
    models, _ = _models([], [mixer], {"d_model": 64}, None, False, "paper", problems)
    assert not problems and _another_state(models["my_mixer+swiglu x2"]) is None  # reached where it can be
    for layouts, mixers, state in (([], [mixer], 4096), (["hgrn+swiglu x2"], [], None)):
        _models(layouts, mixers, odd, state, False, "paper", problems)
        assert "--state 0" in problems.pop() and not problems


def test_a_mixer_alone_is_said_to_be_one_layer_beside_a_mixer_file(tmp_path):
    small = ["--tasks", "memorization", "--settings", "baseline", "--out", tmp_path / "mad", "--plan"]
    alone = call("run", "gdn", "attention+swiglu x2", *small)
    assert "note gdn: one layer, without a channel mixer" in alone.stdout and "'gdn+swiglu x2'" in alone.stdout
    assert alone.exit_code == 0 and alone.stdout.count("note ") == 1, alone.output
    recall = call("run", "gdn", "--budget", "mqar-short", "--out", tmp_path / "mqar", "--plan")
    assert recall.exit_code == 0 and "one layer" not in recall.output, recall.output


def test_a_mixer_that_fails_while_it_trains_leaves_the_others_their_scores(tmp_path):
    """It passes what is asked on the meta device, in eval mode and without gradients, before any run."""
    text = (Path(__file__).parents[2] / "examples" / "my_mixer.py").read_text()
    text = text.replace('"my_mixer"', '"failing"')
    head, line, body = text.partition("        q, k, v, log_decay = self._project(x)\n")
    assert line
    training = "self.training and torch.is_grad_enabled() and x.device.type == 'cpu'"
    check = f"        if {training}:\n            raise RuntimeError('no such thing')\n"
    (tmp_path / "failing.py").write_text(head + check + line + body)
    small = ["--tasks", "memorization", "--set", "d_model=32", "--set", "options={swiglu: {inner: 16}}", "--state", 0]
    where = ["--mixer", tmp_path / "failing.py:MyMixer", "--out", tmp_path / "mad", "--executor", "inline"]
    result = call("run", "attention+swiglu", *where, *small)
    assert result.exit_code == 1 and "not comparable" in result.stdout
    failed = re.search(r"2 runs failed; see (.*error.txt), and error.txt in the folders of the others", result.stdout)
    assert "RuntimeError: no such thing" in Path(failed[1]).read_text()
    assert len(list(tmp_path.glob("mad/runs/attention*/result.json"))) == 2


def test_a_mixer_that_looks_ahead_or_lacks_a_state_is_refused(tmp_path):
    """Problems of the mixers are reported before those of the normalisation, and without a score."""
    text = (Path(__file__).parents[2] / "examples" / "my_mixer.py").read_text()
    ahead = text.replace("return self._read(o, x), None if", "return self._read(o, x.flip(1)), None if")
    (tmp_path / "ahead.py").write_text(ahead.replace('"my_mixer"', '"mad_ahead"'))
    lacking = text.replace("def state_spec", "def state_shape").replace('"my_mixer"', '"mad_lacking"')
    (tmp_path / "lacking.py").write_text(lacking)
    mixers = [f"{tmp_path}/ahead.py:MyMixer", f"{tmp_path}/lacking.py:MyMixer"]
    for budget in ("core", "mqar"):
        where = ["--mixer", mixers[0], "--mixer", mixers[1], "--budget", budget, "--out", tmp_path / "mad"]
        result = call("run", *where, "--seed", "a")
        told = result.stderr
        assert result.exit_code == 2 and not (tmp_path / "mad").exists(), result.output
        assert f"mixer '{mixers[0]}': is not causal" in told and "3 problems" in told
        assert re.search(rf"mixer '{re.escape(str(mixers[1]))}': .*state_spec", told) and "--seed 'a'" in told


def test_what_cannot_run_is_said_before_anything_is(tmp_path):
    def problems(*arguments):
        result = call("run", *arguments, "--out", tmp_path / "mad")
        assert result.exit_code == 2 and not (tmp_path / "mad").exists()
        return " ".join(result.stderr.split())

    found = problems("tnl+swigl x2", "hgrn+swiglu x2")
    assert "'swiglu'" in found and re.search("hgrn: .*128 .*2,048", found)
    assert found.count("--state 0") == 1
    assert re.search("'mad-mamba'.*'mad-mambo'", problems("mad-mambo"))
    assert "tnl: options.tnl.num_hads: " in problems("tnl", "--set", "options.tnl.num_hads=3")
    assert "layout" in problems()
    for seed in ("a", "-1", "0,", "²", str(1 << 63)):
        assert f"--seed '{seed}': " in problems("tnl+swiglu x2", "--seed", seed)
    assert "'smoke'" in problems("tnl+swiglu x2", "--budget", "smok")
    assert "--device 'tpu'" in problems("tnl+swiglu x2", "--device", "tpu")
    assert "path/to/file.py:ClassName" in problems("--mixer", "nothing")
    fix = "--address: auto has no effect with --executor local; leave it out, or give --executor ray"
    assert fix in problems("tnl+swiglu x2", "--address", "auto")
    inline = problems("tnl+swiglu x2", "--executor", "inline", "--workers", 2)
    assert "--workers: 2 has no effect with --executor inline" in inline
    assert "vocab" not in problems("tnl+swiglu x2", "--set", "d_model=130")


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    """Of the models, of every option, of the budget and of the folder."""
    taken = tmp_path / "taken"
    taken.write_text("")
    options = "--budget smok --tasks fuzy --settings seqlen,nothing --spec papr --seed a --device tpu --executor rai"
    arguments = ["tnl+swigl x2", "hgrn+swiglu x2", "--mixer", "nothing", "--set", "foo", *options.split()]
    result = call("run", *arguments, "--out", taken)
    assert result.exit_code == 2
    found = " ".join(result.stderr.split())
    expected = (
        "13 problems",
        "--set 'foo': write key=value",
        "write path/to/file.py:ClassName",
        "tnl+swigl x2: layout: channel mixer 'swigl' is unknown",
        "hgrn+swiglu x2: hgrn: a layer has 128 and should have 2,048",
        "--seed 'a'",
        "--device 'tpu' is unknown",
        "--executor 'rai' is unknown",
        "budget 'smok' is unknown; did you mean 'smoke'?",
        "tasks: 'fuzy' is not a task of MAD; did you mean 'fuzzy_recall'?",
        "spec 'papr' is unknown",
        "settings: 'seqlen' is not a setting; did you mean 'seq_len'?",
        "settings: 'nothing' is not a setting; linnet mad list has them all",
        f"{taken}: is a file",
    )
    assert [part for part in expected if part not in found] == []


def test_a_folder_of_other_runs_is_named_with_all_else(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"budget": "core", "spec": "paper"}))
    found = call("run", "tnl+swiglu x2", "--tasks", "fuzy", "--out", tmp_path).stderr
    assert re.search("budget core.* smoke", found) and "'fuzzy_recall'" in found
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
