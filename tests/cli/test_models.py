"""The verb `models`."""

import json
import re

import pytest
from typer.testing import CliRunner

from linnet.cli import app
from linnet.models import RECIPES, ModelConfig, build_model, get_recipe
from linnet.models.recipes import table
from linnet.runs.model import save_model


def test_json_has_full_precision():
    result = CliRunner().invoke(app, ["models", "tnl-70m", "llama-70m", "--json", "--context", "1024"])
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert set(rows) == {"tnl-70m", "llama-70m"}
    row = rows["tnl-70m"]
    assert row["params_non_embedding"] == 21_233_664 and round(row["pflops_per_step"], 3) == 0.501
    assert (row["num_layers"], row["d_model"], row["num_heads"], row["glu_width"]) == (6, 512, 4, 1536)
    assert row["state_bytes"] == 6 * 4 * 128 * 128 * 4 < rows["llama-70m"]["state_bytes"]


def test_the_table_fits_eighty_columns():
    result = CliRunner().invoke(app, ["models", "hgrn2"], env={"COLUMNS": "80"})
    assert result.exit_code == 0 and "…" not in result.output and "hgrn2-wt103" in result.output


def test_the_ladder_of_paper_004_is_listed_by_name():
    whole, ladder = (CliRunner().invoke(app, ["models", *names]).output for names in ((), ("c2-",)))
    assert "c2-150m" not in whole and "and 75 sizes of paper 004: linnet models c2- c3- c4-" in whole
    assert ladder.count("c2-") == 35
    everything = json.loads(CliRunner().invoke(app, ["models", "--json"]).output)
    assert "c2-150m" in {row["name"] for row in everything}


def test_the_column_of_a_paper_follows_the_convention_of_004():
    """Transformer++ of Table C.2 by C.4.1, at 480 sequences of 8,192 tokens."""
    result = CliRunner().invoke(app, ["models", "c2-8m", "--flops", "004", "--json"])
    [row] = json.loads(result.stdout)
    L, d, g, V = 8192, 128, 336, 50_257
    forward = 4 * (8 * L * d**2 + 4 * L**2 * d + 2 * 2 * L**2 + 6 * L * d * g) + 4 * L * d * V
    assert row["pflops_per_step"] == pytest.approx(480 * 3 * forward / 1e15)
    assert CliRunner().invoke(app, ["models", "c2-8m", "--flops", "001"]).exit_code == 2


def test_a_pattern_names_recipes():
    rows = json.loads(CliRunner().invoke(app, ["models", "*-wt103", "c2-1*", "--json"]).output)
    names = {row["name"] for row in rows}
    assert {"transformer-wt103", "hgrn2-wt103", "c2-150m"} <= names and "c2-8m" not in names
    refused = CliRunner().invoke(app, ["models", "x*"])
    assert refused.exit_code == 2 and "'x*'" in refused.output


def test_the_stored_counts_are_those_of_the_layers():
    assert set(table.stored()) == set(table.names_of(table.TEXT + table.IMAGES))
    small = {"mad-hyena-experts-attention-moe", *(name for name in RECIPES if name.endswith("-10m"))}
    small |= {"bert-4x128", "vit-8px", "lightnet-dit-8px"}
    assert len(small) > 4
    for name in small:
        assert table.counted(name) == table.stored()[name], "run python -m linnet.models.recipes.table"
        assert table.recipe_summary(name, 4096) == table.recipe_summary(name, 4096, recount=True)


def test_no_stored_count_is_of_another_configuration(monkeypatch):
    digests = {name: table.digest(get_recipe(name)) for name in table.names_of(table.TEXT + table.IMAGES)}
    fix = "run python -m linnet.models.recipes.table"
    assert {name: row["digest"] for name, row in table.stored().items()} == digests, fix
    changed = ModelConfig(**{**RECIPES["tnl-10m"]().model_dump(), "d_model": 128})
    monkeypatch.setitem(RECIPES, "tnl-10m", lambda: changed)
    assert table.recipe_summary("tnl-10m", 64)["params_total"] < table.stored()["tnl-10m"]["params_total"]


def test_models_of_images():
    result = CliRunner().invoke(app, ["models", "--vision"], env={"COLUMNS": "80"})
    lines = {line.split()[0]: line.split() for line in result.output.splitlines() if len(line.split()) == 11}
    assert result.exit_code == 0 and "…" not in result.output and "tnl-70m" not in result.output
    assert lines["lightnet-vit-s"][5:] == ["224/16", "196", "22.64", "22.64", "9.1", "80.1"]
    assert lines["lightnet-dit-xl"][5:9] == ["32/2", "258", "678.52", "680"]
    assert lines["vit-8px"][8] == lines["dit-s"][10] == "-" and lines["hgrn-vit-t"][8:] == ["6.1", "3.0", "74.4"]
    result = CliRunner().invoke(app, ["models", "deit", "tnl-70m", "--json"])
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert set(rows) == {"tnl-70m", "deit-t", "deit-s", "deit-b"}
    assert rows["deit-t"]["params_total"] == 5_717_416 and rows["deit-t"]["kind"] == "classifier"
    result = CliRunner().invoke(app, ["models", "deit", "tnl-70m"], env={"COLUMNS": "80"})
    assert "PFLOPs" in result.output and "top-1" in result.output
    for command in (["models", "--vision", "tnl-70m"], ["bench", "generate", "vit-8px"]):
        assert CliRunner().invoke(app, command).exit_code == 2


def test_an_unknown_recipe_gets_the_nearest():
    result = CliRunner().invoke(app, ["models", "tnl-70n"])
    assert result.exit_code == 2 and "'tnl-70m'" in result.stderr
    for command in (["models"], ["bench", "generate"], ["train", "--model"]):  # no wall of names
        result = CliRunner().invoke(app, [*command, "leaky"])
        assert result.exit_code == 2 and re.search(r"'leaky' .*\d+ .*linnet models", result.stderr)


def test_a_folder_is_counted_like_its_recipe(tmp_path):
    path = tmp_path / "mine"
    save_model(path, get_recipe("hgrn2-10m"), build_model(get_recipe("hgrn2-10m"), seed=0).state_dict())
    result = CliRunner().invoke(app, ["models", str(path), "hgrn2-10m", "--json", "--flops", "004"])
    recipe, mine = json.loads(result.stdout)
    assert mine["name"] == str(path)
    assert mine | {"name": recipe["name"]} == recipe
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["models", str(tmp_path / "empty")])
    assert result.exit_code == 2 and "config.yaml" in result.stderr


def test_a_mixer_of_a_file_is_counted_as_train_makes_it(tmp_path):
    mixer = "examples/my_mixer.py:MyMixer"
    shown = CliRunner().invoke(app, ["models", "tnl-10m", "--mixer", mixer, "--json"])
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    row = rows["my_mixer"]
    assert set(rows) == {"tnl-10m", "my_mixer"}
    assert (row["layout"], row["d_model"]) == ("my_mixer+swiglu x6", 256)
    assert row["params_non_embedding"] == 6 * (5 * 256**2 + 4 * 256 + 4 + 3 * 256 * 688 + 2 * 256) + 256
    (tmp_path / "wrong.py").write_text("")
    refused = CliRunner().invoke(app, ["models", "--mixer", f"{tmp_path}/wrong.py:X", "--mixer", "gone.py:Y"])
    assert refused.exit_code == 2 and "has no X" in refused.stderr and "gone.py does not exist" in refused.stderr


def test_the_caption_says_the_precision_of_caches_that_the_column_counts():
    shown = CliRunner().invoke(app, ["models", "llama-70m", "--context", "1024"]).stdout
    assert "keys and values in bfloat16" in " ".join(shown.split())
    sizes = [
        json.loads(CliRunner().invoke(app, ["models", "llama-70m", "--json", "--context", context]).output)[0]
        for context in ("1024", "2048")
    ]
    bfloat16 = 2 * sizes[0]["num_layers"] * sizes[0]["d_model"] * 2  # bytes per token, of keys and values
    more = sizes[1]["state_bytes"] - sizes[0]["state_bytes"]
    assert more == pytest.approx(1024 * bfloat16, rel=0.01), "the cache also has the place of each token"


def test_a_training_file_is_named_with_the_command_that_counts_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: tnl-10m\n")
    done = CliRunner().invoke(app, ["models", str(tmp_path / "mine.yaml"), "tnl-10m"], terminal_width=300)
    assert done.exit_code == 2 and f"linnet train {tmp_path / 'mine.yaml'} --plan" in done.output
