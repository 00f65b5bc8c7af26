"""The verb `models`."""

import json
import re

from typer.testing import CliRunner

from linnet.cli import app
from linnet.models import RECIPES


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


def test_an_unknown_recipe_gets_the_nearest():
    result = CliRunner().invoke(app, ["models", "tln-70m"])
    assert result.exit_code == 2 and "'tnl-70m'" in result.stderr
    for command in (["models"], ["bench", "generate"], ["train", "--model"]):  # no wall of names
        result = CliRunner().invoke(app, [*command, "leaky"])
        assert result.exit_code == 2 and re.search(rf"'leaky' .*{len(RECIPES)} .*linnet models", result.stderr)
