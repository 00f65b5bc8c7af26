"""The plan of a training: its memory against peaks measured on an H200, the 7B example, what it refuses and advises."""

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError
from linnet.layers.base import MIXERS
from linnet.models import ModelConfig, family
from linnet.train import TrainConfig
from linnet.train.costs import GIB, GPUS, block_footprints, find_gpu, fixes, plan_training, refuse

H200 = find_gpu("h200")
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "models-h200.csv"


def config(model="tnl-7b", rows=16, vocab_size=100_352, **settings) -> TrainConfig:
    model = {"recipe": model, "vocab_size": vocab_size} if isinstance(model, str) else model
    return TrainConfig(**{"model": model, "seq_len": 8192, "batch_size": rows, "precision": "bfloat16"} | settings)


@pytest.mark.parametrize(
    ("name", "length", "compiled", "recompute"),
    [
        ("tnl", 4096, False, "none"),
        ("tnl", 131_072, False, "block"),
        ("hgrn2", 4096, False, "none"),
        ("lightnet", 4096, False, "none"),
        ("llama", 4096, False, "none"),
        ("llama", 4096, True, "none"),
    ],
)
def test_memory_of_one_gpu_is_within_a_tenth_of_the_measured_peak(name, length, compiled, recompute):
    with MEASURED.open() as file:
        rows = list(csv.DictReader(file))
    wanted = {"model": name, "length": str(length), "compiled": str(compiled), "recompute": recompute, "graph": "False"}
    wanted |= {"weights": "float32", "beside": ""}
    (row,) = (row for row in rows if wanted.items() <= row.items())
    model = family(name)(int(row["width"]), int(row["layers"]), 0, 2816, vocab_size=50_304)
    tokens = int(row["tokens"])
    found = plan_training(config(model, tokens // length, seq_len=length, run={"recompute": recompute}), 1, H200)
    assert found.parameters == int(row["parameters"])
    assert found.tensors / GIB == pytest.approx(float(row["memory_gib"]), rel=0.1)


def test_7b_on_8_gpus():
    """The arithmetic by hand: 16 bytes per parameter, the embedding and its gradient in float32, three blocks."""
    found = plan_training(config(rows=480, accumulation=30, tokens=300_000_000_000), 8, H200)
    memory = {name: size / GIB for name, size in found.memory.items()}
    assert found.parameters == pytest.approx(6.92e9, rel=1e-3)
    sharded = memory["weights"] + memory["optimizer"] + 4 * found.parameters / 8 / GIB
    assert sharded == pytest.approx(12.9, rel=0.01)
    assert memory["blocks in flight"] == pytest.approx(3.1, rel=0.05)
    assert memory["gathered weights outside blocks"] == pytest.approx(3.1 / 2, rel=0.05)
    assert memory["activations"] == pytest.approx(2 * 44.8, rel=0.05)
    assert found.tokens_per_step / found.step_seconds / 8 == pytest.approx(10_700, rel=0.01)
    assert found.step_seconds * found.steps / 86_400 == pytest.approx(40, rel=0.02)
    per_pass = sum(transfer.received for transfer in found.transfers) / 30
    assert per_pass == pytest.approx(48.4e9, rel=0.01)


@pytest.mark.parametrize(("recompute", "rows", "fits"), [("none", 2, True), ("none", 3, False), ("block", 18, True)])
def test_rows_of_a_7b_that_fit(recompute, rows, fits):
    found = plan_training(config(rows=8 * rows, run={"recompute": recompute}), 8, H200)
    assert found.fits == fits
    if not fits:
        with pytest.raises(ConfigError, match="memory.*parallel.accumulation=2, or run.recompute=selective"):
            refuse(found, config(rows=8 * rows, run={"recompute": recompute}))


def test_advice_fits():
    alone = config(rows=4)
    assert not plan_training(alone, 1, H200).fits
    advice = fixes(alone, 1, H200)
    assert advice == ["run.recompute=block", "--devices 2"]
    assert plan_training(
        alone.model_copy(update={"run": alone.run.model_copy(update={"recompute": "block"})}), 1, H200
    ).fits
    assert plan_training(alone, 2, H200).fits


def test_long_rows_are_cut_into_spans():
    row = config(rows=1, seq_len=1 << 20, run={"recompute": "block"})
    assert fixes(row, 1, H200) == ["--devices 8 with parallel.sp=8 and run.recompute=block"]


def test_spans_and_layer_parts_divide_activations():
    whole = plan_training(config(rows=2), 2, H200).memory["activations"]
    spans = plan_training(config(rows=1, parallel={"sp": 2}), 2, H200)
    parts = plan_training(config(rows=1, parallel={"tp": 2}), 2, H200)
    assert spans.memory["activations"] == pytest.approx(whole / 2, rel=0.1)
    assert whole / 2 < parts.memory["activations"] < whole  # the residual stream stays whole
    sums = next(transfer for transfer in parts.transfers if "tp" in transfer.name)
    assert sums.received == pytest.approx(32 * 4 * 8192 * 4096 * 2) and not sums.hidden
    states = next(transfer for transfer in spans.transfers if "sp" in transfer.name)
    assert states.received == 2 * 4 * 32 * 32 * 128 * 128  # float32 [heads, 128, 128] per layer and direction


@pytest.mark.parametrize(("name", "widths"), [("gdn", (24, 48)), ("gdn2", (32, 32)), ("rwkv7", (32, 32))])
def test_spans_of_the_delta_rule_exchange_matrices_of_transitions_too(name, widths):
    """Two layers of 8 heads, two rows; float32 [K, V] and [K, K] of each head from each other span, both ways."""
    model = {"d_model": 256, "layout": f"{name}+swiglu x2", "options": {name: {"num_heads": 8}}, "vocab_size": 512}
    (K, V), numbers = widths, {}
    for method in ("auto", "ring"):
        found = plan_training(config(model, 2, parallel={"sp": 4, "sequence_method": method}), 4, H200)
        numbers[method] = next(x.received for x in found.transfers if "states between spans" in x.name)
    assert numbers["auto"] == 2 * 2 * 2 * 3 * 4 * 8 * (K * V + K * K)
    assert numbers["ring"] == 2 * 2 * 2 * 4 * 8 * K * V


def test_windows_exchange_their_keys_and_values_alone():
    """Two layers, two rows, 2 bytes of 64 keys and values of 256 channels, and their gradients."""
    model = {"d_model": 256, "layout": "attention+swiglu x2", "vocab_size": 512}
    plans = {
        window: plan_training(
            config(model | {"options": {"attention": {"window": window}}}, 2, parallel={"sp": 2}), 2, H200
        )
        for window in (0, 64)
    }
    names = {window: {x.name: x.received for x in found.transfers} for window, found in plans.items()}
    assert "all-to-all of attention (sp)" in names[0] and "all-to-all of attention (sp)" not in names[64]
    assert names[64]["states between spans (sp)"] == 2 * 2 * 2 * (64 * 2 * 256) * 2


def test_network_between_machines_is_slower():
    hybrid = config(rows=128, parallel={"dp_replicate": 2})
    found = {t.name: t for t in plan_training(hybrid, 16, H200).transfers}
    over = found["all-reduce of gradients over copies"]
    assert over.received / over.seconds == pytest.approx(H200.network * 1e9)
    inside = found["all-gather of weights"]
    assert inside.received / inside.seconds == pytest.approx(H200.link * 1e9)
    flat = next(t for t in plan_training(config(rows=128), 16, H200).transfers if t.name == "all-gather of weights")
    assert flat.received / flat.seconds == pytest.approx(H200.network * 1e9)


def test_numbers_of_a_gpu():
    other = find_gpu("h100,speed=520,link=300,network=25", memory=95)
    assert (other.memory, other.speed, other.link, other.network) == (95, 520, 300, 25)
    for wrong in ("h300", "h100,speed", "h100,speed=-1", "h100,power=700", "h100,link=nan"):
        with pytest.raises(ConfigError, match="--gpu"):
            find_gpu(wrong)


def test_equal_blocks_are_counted_once_and_scale_with_the_row():
    model = family("hgrn2")(256, 3, 0, 688, vocab_size=512).model_dump_json()
    short, long = (block_footprints(model, length, "none", True, True) for length in (256, 512))
    assert short[1] is short[2]
    assert long[1].saved == pytest.approx(2 * short[1].saved, rel=0.01)


LAYERS = {
    "tpe": ("tpe tnl+sglu x1", {}),
    "window": ("attention+swiglu x1", {"attention": {"window": 16}}),
    "complex": ("hgrn+sglu x1", {"hgrn": {"complex": True}}),
    "moe": ("attention+moe x1", {}),
    "lrpe": ("tnl+sglu x1", {"tnl": {"lrpe": "all_layers"}}),
    **{name: (f"{name}+swiglu x1", {}) for name in sorted(set(MIXERS) - {"tpe"}) if not name.startswith("my_")},
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_a_footprint(name):
    """`none` keeps the residual stream and the inputs of the products at least, and `block` the stream alone."""
    layout, options = LAYERS[name]
    model = ModelConfig(d_model=64, layout=layout, options=options, vocab_size=512).model_dump_json()
    precisions = ((True, 2), (False, 4)) if name in ("attention", "tnl", "mamba") else ((True, 2),)
    for low_precision, least in precisions:
        (all_,) = block_footprints(model, 64, "none", low_precision, True)
        (few,) = block_footprints(model, 64, "block", low_precision, True)
        assert few.saved == 4 * 64 * 64
        assert all_.saved >= (8 + 4 * least) * 64 * 64 and all_.backward > all_.saved > few.saved
        assert few.backward >= all_.backward * 0.9  # the backward of a recomputed block holds what `none` keeps


def test_a_layer_of_billions_of_parameters_is_priced_and_does_not_fit(capfd):
    """Its activations at as many rows as it has parameters overflow the size of a tensor."""
    saved = []
    for expand in (1_000, 1_000_000):
        values = {"d_model": 64, "layout": "mamba3+swiglu x1", "options": {"mamba3": {"expand": expand}}}
        [block] = block_footprints(ModelConfig(vocab_size=512, **values).model_dump_json(), 512, "none", True, True)
        saved.append(block.saved)
    assert saved[1] == pytest.approx(1000 * saved[0], rel=0.01)
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(ConfigError, match="memory: .*; use a smaller model"):
        refuse(plan_training(found := config(values, rows=16, seq_len=512), 1, H200), found)


def test_both_norms_keep_as_much():
    """LayerNorm has the same kernels as the root-mean-square norm."""
    kept = []
    for norm in ("rmsnorm", "layernorm"):
        model = ModelConfig(d_model=64, layout="attention+swiglu x1", norm=norm, vocab_size=512).model_dump_json()
        kept.append(block_footprints(model, 64, "none", True, True))
    assert kept[0] == kept[1]


def test_degrees_that_do_not_fit_are_problems():
    with pytest.raises(ConfigError, match="parallel: .* does not divide the 6 devices"):
        plan_training(config(parallel={"tp": 4}), 6, H200)


def test_command(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {recipe: tnl-7b, vocab_size: 100352}\nseq_len: 8192\nbatch_size: 16\nprecision: bfloat16\n")
    arguments = ["train", str(file), "--plan", "--gpu", "h200"]
    result = CliRunner().invoke(app, [*arguments, "--devices", "8", "--json"])
    found = json.loads(result.stdout)
    assert found["fits"] and found["degrees"]["dp_shard"] == 8
    text = CliRunner().invoke(app, [*arguments, "--devices", "8"]).stdout
    assert "all-gather of weights" in text and "tokens/s" in text
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code
    assert "use run.recompute=block with parallel.accumulation=4, or --devices 8" in refused.stderr
    assert CliRunner().invoke(app, [*arguments, "--devices", "8", "--memory", "80"]).exit_code
    assert not (tmp_path / "runs").exists()


def test_command_shows_what_each_source_of_a_mixture_gives(tmp_path):
    for name, size in (("a", 800_000), ("b", 10_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("x" * size)
    sources = ", ".join(f"{{source: {tmp_path / name}, weight: {weight}}}" for name, weight in (("a", 3), ("b", 1)))
    file, data = tmp_path / "run.yaml", f"data: {{mixture: [{sources}], tokenizer: byte}}"
    file.write_text(f"model: tnl-10m\n{data}\nseq_len: 512\nbatch_size: 16\nsteps: 50\n")
    arguments = ["train", str(file), "--plan", "--gpu", "h200"]
    text = " ".join(CliRunner().invoke(app, arguments).stdout.split())
    assert "a: gives about 307,200 tokens; passes: about 0.392" in text
    assert "warning source" in text and "b: gives about 102,400 tokens; passes: about 10.4; past 4 passes" in text
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["sources"]
    assert [one["tokens"] for one in found] == [307_200, 102_400]
    file.write_text(file.read_text().replace("weight: 3", "epochs: 0.01").replace("weight: 1", "epochs: 1"))
    text = " ".join(CliRunner().invoke(app, arguments).stdout.split())
    assert "of 0.01 epochs, which end before the training: use fewer steps, or more epochs" in text


@pytest.mark.parametrize("name", ["b200", "gb200", "MI300X", "rtx5090", "RTX 5090", "GeForce RTX 4090", "rtx-4090"])
def test_current_cards_are_known_with_the_measured_share_of_their_peak(name):
    gpu = find_gpu(name)
    peak = {"b200": 2250, "gb200": 2500, "mi300x": 1307.4, "rtx5090": 209.5, "rtx4090": 165.2}[gpu.name]
    assert gpu.speed / peak == pytest.approx(GPUS["h200"].speed / 989.4, rel=0.01)
    assert find_gpu(f"{name},speed=7").speed == 7


@pytest.mark.parametrize(("recipe", "known"), [("tnl-10m", False), ("tnl-1b", True)])
def test_a_plan_prints_plausible_numbers_or_none(recipe, known):
    arguments = ["train", "--model", recipe, "--plan", "--gpu", "h200"]
    text, values = (CliRunner().invoke(app, [*arguments, *more]).stdout for more in ([], ["--json"]))
    found = json.loads(values)
    assert not re.search(r"\b0\.0+\b|e9\b", text)
    assert ("919M parameters" if known else "5.01M parameters") in text
    assert (found["tokens_per_second"] is not None) == known == ("per GPU;" in text)
    assert (found["step_seconds"] is not None) == known and ("narrower than 1,024" in text) == (not known)


def test_a_plan_without_a_gpu_names_the_one_that_it_assumes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = [
        CliRunner().invoke(app, ["train", "--model", "tnl-10m", "--plan", *more]).stdout
        for more in ([], ["--gpu", "AUTO,speed=500"], ["--gpu", "h200"], ["--json"])
    ]
    told = ["no GPU is visible, so this plan assumes h200; choose another with --gpu NAME" in text for text in shown]
    assert told == [True, True, False, False]


def test_a_recipe_in_place_of_a_file_is_named():
    refused = CliRunner().invoke(app, ["train", "tnl-10m"])
    assert refused.exit_code == 2 and "use --model tnl-10m" in refused.stderr


def test_a_plan_names_data_that_are_not_there(tmp_path):
    (tmp_path / "there.txt").write_text("a text")
    values = [str(tmp_path / "gone"), str(tmp_path / "there.txt"), "hf:some/name"]
    asked = ["--set", f"data.source={json.dumps(values)}", "--set", f"data.validation=[{tmp_path}/held]"]
    arguments = ["train", "--model", "tnl-10m", "--plan", "--gpu", "h200"]
    shown = CliRunner().invoke(app, [*arguments, *asked]).stdout
    assert f"missing data.source: '{tmp_path}/gone' does not exist" in shown and shown.count("missing") == 2
    assert f"data.validation: '{tmp_path}/held'" in shown and "time: " in shown
    assert len(json.loads(CliRunner().invoke(app, [*arguments, *asked, "--json"]).stdout)["missing"]) == 2
    assert "missing" not in CliRunner().invoke(app, arguments).stdout
