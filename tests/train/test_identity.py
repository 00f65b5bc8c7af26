"""Which configurations are the same training, and the folder that is found for one. Folders of 0.1.0 are fixtures."""

import importlib.util
import json
import shutil
import signal
from pathlib import Path

import pytest

from linnet import provenance
from linnet.cli.study import _settings as study_settings
from linnet.config import ConfigError, override, parse, parse_yaml, read_yaml
from linnet.data import DataConfig
from linnet.models.config import EncoderConfig
from linnet.runs import RunFolder, checkpoint
from linnet.study import run_study
from linnet.study.collect import load_study
from linnet.train import TrainConfig, run_folder, train
from linnet.train.config import RunConfig, present
from linnet.train.identity import contents_of, digest_of, find, read_config, unfinished_like
from linnet.train.identity import settings as settings_of

SPEC = importlib.util.spec_from_file_location("reference", Path(__file__).parents[2] / "docs/reference/generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)
OLD = Path(__file__).parents[1] / "fixtures" / "v0.1"
EXPECTED = json.loads((OLD / "expected.json").read_text(encoding="utf-8"))
CLOCK = {"tokens_per_second", "seconds", "memory_bytes", "flop_utilisation"}
ROUNDED = {"loss", "bits_per_byte", "grad_norm", "validation_loss", "validation_bits_per_byte", "metrics"}


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A copy of what 0.1.0 left, as the folder that one works in: its configurations name `text.txt`."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def read(file: str) -> TrainConfig:
    """What `file`, which 0.1.0 read, says with today's keys."""
    return parse(TrainConfig, present(read_yaml(file)))


def same_rows(run: RunFolder, name: str) -> None:
    """Losses of another CPU may round otherwise; everything else is exact."""
    rows = [row for row in run.metrics() if "event" not in row]
    wanted = EXPECTED[name]["rows"]
    assert len(rows) == len(wanted)
    for row, one in zip(rows, wanted, strict=True):
        row = {key: value for key, value in row.items() if key not in CLOCK}
        assert row.keys() == one.keys()
        for key, value in one.items():
            assert row[key] == (pytest.approx(value, rel=1e-5) if key in ROUNDED else value), (key, row)
    assert run.result()["loss"] == pytest.approx(EXPECTED[name]["result"]["loss"], rel=1e-5)


UNFINISHED = [name for name in EXPECTED if (OLD / "runs" / name / "checkpoints").is_dir()]


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_unfinished_run_of_0_1_0_is_found_and_ends_with_the_same_losses(old, name):
    config, before = read(EXPECTED[name]["file"]), (old / "runs" / name / "config.yaml").read_text()
    started = []
    run = train(
        config, "runs", "cache", lambda row: started.append(row["step"]) if row.get("event") == "start" else None
    )
    assert run.path.name == name and started[0] > 0
    assert not any(row["event"] == "extended" for row in run.metrics() if "event" in row)
    same_rows(run, name)
    assert (run.path / "config.yaml").read_text() == before
    assert len(list((old / "runs").glob("*/config.yaml"))) == len(UNFINISHED) + 1


def test_a_finished_run_of_0_1_0_is_found_also_without_its_text(old):
    config, [name] = read("done.yaml"), [name for name in EXPECTED if name.startswith("done-")]
    for text in (True, False):
        if not text:
            (old / "text.txt").unlink()
        run = train(config, "runs", "cache", lambda row: pytest.fail("nothing is trained"))
        assert run.path.name == name and run.result()["loss"] == EXPECTED[name]["result"]["loss"]


def test_an_old_run_continues_under_another_run_but_not_with_another_result(old):
    [name] = [name for name in UNFINISHED if name.startswith("constant-")]
    values = read("constant.yaml").model_dump(mode="json")
    values["run"] |= {"log_every": 5, "checkpoint_every": 0, "recompute": "none", "peak_tflops": None}
    assert find(parse(TrainConfig, values), "runs", None).folder.path.name == name
    assert find(parse(TrainConfig, values | {"seed": 1}), "runs", None).folder.path.name != name
    values["data"]["source"] = ["study.yaml"]
    assert find(parse(TrainConfig, values), "runs", None).folder.path.name != name


def test_text_that_changed_under_an_old_run_is_an_error(old):
    (old / "text.txt").write_text("other words\n" * 200)
    with pytest.raises(ConfigError, match="^resume: .*\n.*data: "):
        train(read("constant.yaml"), "runs", "cache")


def test_a_rollback_makes_checkpoints_part_of_the_run(old):
    [name] = [name for name in UNFINISHED if name.startswith("rollback-")]
    config = read("rollback.yaml")
    for key, same in {
        "log_every": True,
        "peak_tflops": True,
        "checkpoint_every": False,
        "keep_checkpoints": False,
    }.items():
        changed = config.model_copy(update={"run": config.run.model_copy(update={key: 4})})
        assert (find(changed, "runs", None).folder.path.name == name) == same, key


@pytest.mark.parametrize("log_every", [False, True])
def test_a_study_of_0_1_0_continues(old, log_every):
    """With `log_every`, which also set the points of the curve in 0.1.0, whatever `curve_points` says."""
    file = old / "studies" / "tiny" / "study.yaml"
    if log_every:
        text = file.read_text().replace("curve_points: 3", "curve_points: 4")
        file.write_text(text.replace("train:\n", "train:\n  log_every: 3\n"))
    config = study_settings(file, None, None, None, None, [], old / "cache")
    assert config.train["run"].get("log_every") == (3 if log_every else None)
    result = run_study(config, "studies", "cache")
    names = [name for name in EXPECTED if EXPECTED[name]["file"] == "study.yaml"]
    assert sorted(row["run"] for row in result.rows) == sorted(names)
    assert sorted(path.name for path in (old / "studies/tiny/runs").iterdir()) == sorted(names)
    for name in names:
        same_rows(RunFolder(old / "studies/tiny/runs" / name), name)
    _, curves, _ = load_study(result.folder)
    assert list(curves["D"]) == [
        row["tokens"] for name in sorted(names) for row in EXPECTED[name]["rows"] if "loss" in row
    ]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in OLD.glob("runs/*/config.yaml")))
def test_the_config_yaml_of_a_run_of_0_1_0_is_that_run(old, name):
    """As `linnet train RUN/config.yaml` reads it, with keys under `run` before those of the file."""
    values = read_yaml(old / "runs" / name / "config.yaml")
    for changes in ({}, {"run": {"log_every": 9}}):
        config = parse(TrainConfig, values | changes)
        assert find(config, "runs", None).folder.path.name == name
        assert config.run.log_every == changes.get("run", values)["log_every"]
    assert config.run.keep_checkpoints == values["keep_checkpoints"]


def test_an_old_folder_with_a_key_that_no_longer_exists_is_refused_by_name(old):
    [name] = [name for name in UNFINISHED if name.startswith("constant-")]
    file = old / "runs" / name / "config.yaml"
    file.write_text(file.read_text().replace("optimizer:\n", "optimizer:\n  sharpness: 0.1\n") + "flavour: sweet\n")
    config = read("constant.yaml")
    for attempt in (lambda: train(config, "runs", "cache"), lambda: read_config(RunFolder.open(file.parent))):
        with pytest.raises(ConfigError) as caught:
            attempt()
        problems = caught.value.problems
        assert len(problems) == 2 and all(name in line for line in problems)
        assert all(any(f"{key}: unknown to" in line for line in problems) for key in ("optimizer.sharpness", "flavour"))


def test_digests_do_not_change_between_releases(tmp_path):
    """A digest that changes here renames the unfinished runs of everybody: a default needs a new FORMAT first."""
    (tmp_path / "text.txt").write_text("the same text on every machine\n" * 100)
    data = {"source": [str(tmp_path / "text.txt")]}
    found = {}
    for name, values in {
        "tnl": {"model": "tnl-10m"},
        "hybrid": {
            "model": {"d_model": 32, "layout": "hgrn2+glu attention+swiglu", "options": {"attention": {"window": 8}}},
            "data": {"tokenizer": "bpe:300", "validation_fraction": 0.1},
            "tokens": 10_000,
            "optimizer": {"name": "muon", "clip": None},
            "schedule": {"name": "wsd"},
            "evaluations": [{"kind": "recall", "tasks": ["mqar"], "every": 5}],
        },
        "rollback": {"model": "llama-10m", "guard": {"policy": "rollback"}, "run": {"device": "cpu"}},
    }.items():
        config = parse(TrainConfig, {**values, "data": {**values.get("data", {}), **data}})
        found[name] = digest_of(config, contents_of(config))
    assert found == DIGESTS


DIGESTS = {"tnl": "612c2ade6865", "hybrid": "1aad2fc8cbc9", "rollback": "0ec03644599e"}


def test_what_does_not_change_the_result_does_not_change_the_digest(settings):
    one = settings()
    key = digest_of(one, contents_of(one))
    run = {"log_every": 3, "device": "auto", "compile": True, "recompute": "block", "peak_tflops": 1.0}
    same = [settings(**run), settings(name="label"), settings(architecture="label"), settings(parallel={})]
    same += [settings(parallel={"tp": 2, "sp": 2, "accumulation": 2}), settings(checkpoint_minutes=5, async_save=True)]
    same += [settings(steps=None, tokens=12 * 4 * 32), settings(accumulation=1), settings(evaluate_every=3)]
    assert [digest_of(other, contents_of(other)) for other in same] == [key] * len(same)
    for change in (
        {"seed": 1},
        {"steps": 13},
        {"precision": "bfloat16"},
        {"curve_every": 2},
        {"evaluate_tokens": None},
    ):
        other = settings(**change)
        assert digest_of(other, contents_of(other)) != key, change


def test_a_model_counts_by_its_blocks():
    """However the layout is written, equal blocks are one training; another option of one block is another."""
    layer, wide = "attention+swiglu", {"attention": {"num_heads": 4, "window": 8}}

    def key(**model):
        config = parse(TrainConfig, {"model": {"d_model": 16, **model}, "data": {"source": [__file__]}})
        return digest_of(config, {})

    same = [
        {"layout": f"{layer} x2", "options": wide},
        {"layout": f"({layer}) x2", "options": wide},
        {"layout": [layer, layer], "options": wide},
        {"layout": layer, "num_layers": 2, "options": wide},
        {"layout": "L x2", "aliases": {"L": layer, "unused": "tnl+sglu"}, "options": wide},
        {"layout": "L x2", "aliases": {"L": {"layer": layer, "options": wide}}},
        {"layout": f"L {layer}", "aliases": {"L": {"layer": layer, "options": wide}}, "options": wide},
    ]
    assert len({key(**model) for model in same}) == 1
    first_only = {"layout": f"L {layer}", "aliases": {"L": {"layer": layer, "options": wide}}}
    second_only = {"layout": f"{layer} L", "aliases": first_only["aliases"]}
    both = {key(**first_only), key(**second_only), key(**same[0])}
    tpe = {key(layout=f"tpe {layer} x2", options=wide | {"tpe": {"num_modes": n}}) for n in (4, 8)}
    assert len(both | tpe) == 5


def test_options_that_the_model_chooses_do_not_change_causal_trainings():
    """tpe's defaults depend on causality since images; a text training has the options and the digest it had."""

    def model(**options):
        tpe = {"layout": "tpe gla", "d_model": 16, "options": {"gla": {"num_heads": 2}, "tpe": options}}
        return parse(TrainConfig, {"model": tpe, "data": {"source": [__file__]}})

    old = {"num_modes": 64, "decay": "learned", "residual": False, "max_time_constant": 1024}
    assert model().model.options["tpe"] == model(**old).model.options["tpe"] == old
    assert digest_of(model(), {}) == digest_of(model(**old), {})
    assert len({digest_of(model(**one), {}) for one in ({}, {"num_modes": 32}, {"residual": True})}) == 3
    given = {"d_model": 16, "layout": "tpe gla", "options": {"gla": {"num_heads": 2}}}
    encoder = parse(EncoderConfig, given)
    assert encoder.options["tpe"] == old | dict.fromkeys(("num_modes", "residual", "max_time_constant"))
    explicit = parse(EncoderConfig, given | {"options": {**given["options"], "tpe": old}})
    assert explicit.options["tpe"] == old  # and not what null chooses


def test_defaults_that_are_written_out_are_left_out(settings):
    one = settings()
    assert settings_of(parse(TrainConfig, one.model_dump(mode="json"))) == settings_of(one)
    ((block, _),) = settings_of(one)["model"]["blocks"]
    layer = block["options"]["tnl"]
    assert layer.keys() < one.model.options["tnl"].keys()  # those that differ from the layer's defaults
    assert "guard" not in settings_of(one) and "run" not in settings_of(one)


def test_text_counts_by_content(settings, tmp_path, text):
    copied = tmp_path / "copy.txt"
    shutil.copy(text, copied)
    data = settings().data.model_dump(mode="json")
    moved = settings(data=data | {"source": [str(copied)]})
    assert digest_of(moved, contents_of(moved)) == digest_of(settings(), contents_of(settings()))
    copied.write_text(copied.read_text() + "and more")
    assert digest_of(moved, contents_of(moved)) != digest_of(settings(), contents_of(settings()))
    copied.unlink()
    assert contents_of(moved) is None


def test_a_note_names_the_unfinished_run_whose_text_has_changed(settings, cache, tmp_path):
    file, root = tmp_path / "mine.txt", tmp_path / "runs"
    file.write_text("some text to begin with\n" * 400)
    config = settings(data={"source": [str(file)], "tokenizer": "byte"})
    begun = run_folder(config, root, cache)
    values = config.model_dump(mode="json")
    file.write_text("some text to begin with\n" * 401)
    note = unfinished_like(values, root)
    assert begun.path.name in note and "file" in note
    assert unfinished_like(values | {"architecture": "mine"}, root) is None
    begun.write_result({"status": "done"})
    assert unfinished_like(values, root) is None


def test_tokenizer_plugin_and_first_weights_count_by_content(settings, cache, tmp_path):
    first, second = (train(settings(steps=2, seed=seed), tmp_path, cache).path for seed in (0, 1))
    copied = tmp_path / "copied"
    shutil.copytree(first, copied)
    keys = [digest_of(c, contents_of(c)) for c in (settings(init_from=str(path)) for path in (first, copied, second))]
    assert keys[0] == keys[1] != keys[2]
    tokenizers = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in tokenizers:
        shutil.copy(first / "tokenizer.json", path)
    data = settings().data.model_dump(mode="json")
    configs = [settings(data=data | {"tokenizer": str(path)}) for path in tokenizers]
    assert len({digest_of(c, contents_of(c)) for c in configs}) == 1
    assert DataConfig.model_validate(configs[0].data.model_dump()).tokenizer.kind == "file"


def test_a_renamed_run_is_found_under_its_old_label(settings, cache, tmp_path):
    run = train(settings(name="first"), tmp_path, cache)
    assert train(settings(name="second"), tmp_path, cache).path == run.path
    other = train(settings(name="second", architecture="mine"), tmp_path, cache)  # a line of its own in tables
    assert other.path != run.path and other.path.name[-12:] == run.path.name[-12:]


def test_the_folder_states_format_and_digest_and_every_value(settings, cache, tmp_path):
    run = train(settings(), tmp_path, cache)
    stored = read_yaml(run.path / "config.yaml")
    assert stored["format"] == 2 and run.path.name.endswith(stored["digest"]) and run.digest == stored["digest"]
    assert stored["run"].keys() == RunConfig.model_fields.keys() - {"keep_best"}  # only if it is true
    unset = {
        "epochs",
        "average",
        "batch_ramp",
    }  # not written where it is not given, so that older folders have the same keys
    assert run.config.keys() == TrainConfig.model_fields.keys() - unset
    assert train(parse(TrainConfig, stored), tmp_path, cache).path == run.path  # linnet train RUN/config.yaml
    assert read_config(run).data.source == settings().data.source


def test_an_edited_configuration_is_refused(settings, cache, tmp_path):
    run = train(settings(), tmp_path, cache)
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("steps: 12", "steps: 13"))
    with pytest.raises(ConfigError) as caught:
        train(settings(), tmp_path, cache)
    assert str(file) in str(caught.value)


def test_a_digest_that_looks_like_a_number_is_read_as_text(tmp_path):
    for number, key in enumerate(["123456789012", "123456e78901", "000000000000"]):
        run = RunFolder(tmp_path / str(number))
        run.write_config({"steps": 1}, key, [{"digest": key, "steps": 4}])
        assert run.digest == key and run.extended == [{"digest": key, "steps": 4}] and run.config == {"steps": 1}


def stopped(config: TrainConfig, root: Path, cache: Path, step: int) -> RunFolder:
    def progress(row: dict) -> None:
        if row.get("step") == step and "loss" in row:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, root, cache, progress)
    return run_folder(config, root)


def test_going_on_under_another_run_is_noted(settings, cache, tmp_path, monkeypatch):
    run = stopped(settings(log_every=1), tmp_path, cache, 5)
    meta = checkpoint.load(run.checkpoints()[-1])[1]
    assert meta["digest"] == run.digest and meta["execution"]["threads"] == 1 and meta["execution"]["compile"] is False
    monkeypatch.setattr(provenance, "cpu_name", lambda: "another CPU")
    assert train(settings(log_every=4), tmp_path, cache).path == run.path
    [event] = [row for row in run.metrics() if "event" in row]
    assert event["event"] == "execution_changed" and event["step"] == 5
    assert event["changed"].keys() == {"device"} and event["changed"]["device"][1] == "another CPU"
    result = run.result()
    assert result["run"]["log_every"] == 4 and result["environment"]["device"] == "another CPU"
    whole = train(settings(log_every=1), tmp_path / "whole", cache)
    assert result["loss"] == whole.result()["loss"]


def test_curve_points_do_not_depend_on_log_every(settings, cache, tmp_path):
    runs = [train(settings(curve_every=3, steps=14, log_every=n), tmp_path / str(n), cache) for n in (1, 3, 4, 5)]
    curves = [[(row["step"], row["curve"]) for row in run.metrics() if "curve" in row] for run in runs]
    assert curves[0] == curves[1] == curves[2] == curves[3]
    assert [step for step, _ in curves[0]] == [3, 6, 9, 12, 14]
    assert all(row["curve"] == row["loss"] for row in runs[1].metrics() if "loss" in row)
    run = stopped(settings(curve_every=3, steps=14, log_every=1, seed=0), tmp_path / "stopped", cache, 8)
    run = train(settings(curve_every=3, steps=14, log_every=4), tmp_path / "stopped", cache)
    assert [(row["step"], row["curve"]) for row in run.metrics() if "curve" in row] == curves[0]


def test_parse_of_a_yaml_that_uses_the_new_places():
    config = parse(TrainConfig, parse_yaml("model: tnl-10m\nrun: {device: cpu, loggers: [tensorboard]}"))
    assert config.run.device == "cpu" and config.run.loggers == ["tensorboard"]


def leaves(values, prefix: str = "") -> set[str]:
    """Dotted keys of plain values; options of layers and names of plugins are values."""
    found = set()
    for key, value in values.items():
        inside = isinstance(value, dict) and key not in ("options", "plugin_digests", "aliases")
        found |= leaves(value, f"{prefix}{key}.") if inside else {prefix + key}
    return found


def test_every_key_has_one_kind_and_the_docs_say_it():
    table = generate.kinds()
    keys = [key for own in table.values() for key in own]
    assert len(keys) == len(set(keys))
    config = parse(TrainConfig, {"model": "tnl-10m"})
    assert leaves(config.model_dump()) - {"data.mixture", "model.aliases", "evaluations"} <= set(keys)
    assert {"evaluations.every", "evaluations.paths", "model.aliases.layer"} <= set(keys)  # inside of these two
    page = (OLD.parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    for kind, own in table.items():
        assert f"| {kind} | {', '.join(f'`{key}`' for key in own)} |" in page, "run: python docs/reference/generate.py"


def test_kinds_are_what_the_digest_does():
    """Another value of a key changes the digest if its kind says so."""
    base = {"model": {"d_model": 32, "layout": "tnl+sglu"}, "data": {"source": [__file__]}}
    others = {
        "seq_len": 64, "batch_size": 3, "accumulation": 2, "steps": 7, "seed": 5, "precision": "bfloat16",
        "optimizer.name": "muon", "optimizer.eps": 1e-6, "schedule.warmup": 3.0, "schedule.decay": 0.5,
        "evaluate_tokens": 5, "curve_every": 3, "guard.spike": 2.0, "guard.policy": "skip", "data.max_bytes": 99,
        "data.seed": 2, "data.text_key": "body", "data.validation_fraction": 0.3, "model.init_std": 0.1,
        "run.device": "cpu", "run.compile": True, "run.recompute": "block", "run.loggers": ["tensorboard"],
        "run.log_every": 3, "run.checkpoint_every": 5, "run.keep_checkpoints": 1, "run.evaluate_every": 2,
        "run.peak_tflops": 1.0, "name": "mine", "architecture": "mine",
    }  # fmt: skip
    digests = {}
    for policy in ("stop", "rollback"):
        first = override(base, [f"guard.policy={policy}", "run.device=cpu"])
        digests[policy] = {}
        for key, value in {"": None, **others}.items():
            config = parse(TrainConfig, override(first, [f"{key}={json.dumps(value)}"]) if key else first)
            digests[policy][key] = digest_of(config, contents_of(config))
    of = {key: kind for kind, own in generate.kinds().items() for key in own}
    for key in others:
        changes = digests["stop"][key] != digests["stop"][""]
        assert changes == (of[key] == "identity"), key
        if key.startswith("run."):
            changes = digests["rollback"][key] != digests["rollback"][""]
            assert changes == (key in ("run.checkpoint_every", "run.keep_checkpoints")), key
