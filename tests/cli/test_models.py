"""The verb `models`."""

import json
import re

from typer.testing import CliRunner

from linnet.cli import app
from linnet.models import RECIPES, ModelConfig
from linnet.models.recipes import table


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


def test_the_stored_counts_are_those_of_the_layers():
    assert set(table.stored()) == set(RECIPES)
    small = {"mad-hyena-experts-attention-moe", *(name for name in RECIPES if name.endswith("-10m"))}
    assert len(small) > 4
    for name in small:
        assert table.counted(name) == table.stored()[name], "run python -m linnet.models.recipes.table"
        assert table.recipe_summary(name, 4096) == table.recipe_summary(name, 4096, recount=True)


def test_no_stored_count_is_of_another_configuration(monkeypatch):
    digests = {name: table.digest(RECIPES[name]()) for name in RECIPES}
    fix = "run python -m linnet.models.recipes.table"
    assert {name: row["digest"] for name, row in table.stored().items()} == digests, fix
    changed = ModelConfig(**{**RECIPES["tnl-10m"]().model_dump(), "d_model": 128})
    monkeypatch.setitem(RECIPES, "tnl-10m", lambda: changed)
    assert table.recipe_summary("tnl-10m", 64)["params_total"] < table.stored()["tnl-10m"]["params_total"]


def test_an_unknown_recipe_gets_the_nearest():
    result = CliRunner().invoke(app, ["models", "tln-70m"])
    assert result.exit_code == 2 and "'tnl-70m'" in result.stderr
    for command in (["models"], ["bench", "generate"], ["train", "--model"]):  # no wall of names
        result = CliRunner().invoke(app, [*command, "leaky"])
        assert result.exit_code == 2 and re.search(r"'leaky' .*\d+ .*linnet models", result.stderr)
