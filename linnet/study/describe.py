"""The columns of a run table that follow from a run's configuration: its shape, its state, and how it was trained.

Nothing of them is recorded while a run trains, so folders of earlier releases have them too. Counts of the model are
made on the meta device and need torch; the other columns are read from config.yaml alone.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import yaml

from linnet.config import ConfigError
from linnet.runs import RunFolder

if TYPE_CHECKING:
    import pandas as pd

DESCRIBED = (
    "params_active",
    "d_model",
    "num_layers",
    "attention_share",
    "layout",
    "seq_len",
    "batch_tokens",
    "learning_rate",
    "state_fixed",
    "state_dynamic",
    "seed",
    "domain",
)
"""Columns that follow from the configuration, in the order of the table. `flops_causal` follows from it too."""

TEXTS = ("layout", "domain")


def describe(run: RunFolder, flops: float | None = None) -> dict[str, Any]:
    """Returns `DESCRIBED` and `flops_causal` of a run; a column that its configuration does not determine is absent.

    Args:
        run: the run folder.
        flops: its exact training FLOPs; `flops_causal` is their part that the causal mask does not hide.
    """
    try:
        config = run.config
    except (ConfigError, OSError, yaml.YAMLError):
        return {}
    found = _plain(config)
    with contextlib.suppress(ConfigError, ImportError, ValueError):  # without torch, or a model that cannot be read
        found |= _counted(run, config, flops)
    return found


def complete(rows: list[dict[str, Any]], folder: Path) -> int:
    """Adds the missing columns of `describe` to rows of a table in place. Returns the number of rows that gained some.

    Args:
        rows: mappings with `path` (relative to `folder`) or `run` (a folder in `folder`/runs), and `flops`.
        folder: the study.
    """
    gained = 0
    for row in rows:
        missing = [name for name in (*DESCRIBED, "flops_causal") if _absent(row.get(name))]
        path = folder / str(row["path"] if not _absent(row.get("path")) else f"runs/{row.get('run')}")
        if not missing or not (path / "config.yaml").is_file():
            continue
        flops: Any = row.get("flops", row.get("C"))
        found = describe(RunFolder(path), None if _absent(flops) else float(flops))
        row.update({name: found[name] for name in missing if name in found})
        gained += any(name in found for name in missing)
    return gained


def complete_table(table: "pd.DataFrame", folder: Path) -> "pd.DataFrame":
    """Returns a table of `linnet.study.table.load_study` with the missing columns of `describe`."""
    import pandas as pd

    rows = table.to_dict("records")
    if not complete(rows, folder):
        return table
    whole = pd.DataFrame(rows, index=table.index)
    whole.attrs = table.attrs
    return whole


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that config.yaml holds as they are."""
    model, optimizer, data = (_mapping(config.get(key)) for key in ("model", "optimizer", "data"))
    found = {"d_model": model.get("d_model"), "layout": model.get("layout"), "seq_len": config.get("seq_len")}
    found |= {"learning_rate": optimizer.get("learning_rate"), "seed": config.get("seed")}
    batch = config.get("batch_size")
    if isinstance(batch, int) and isinstance(found["seq_len"], int):
        found["batch_tokens"] = batch * found["seq_len"]
    source = data.get("source")
    names = [source] if isinstance(source, str) else source if isinstance(source, list) else []
    if names:
        found["domain"] = "+".join(PurePath(str(name)).stem or str(name) for name in names)
    return {name: value for name, value in found.items() if isinstance(value, int | float | str)}


def _counted(run: RunFolder, config: Mapping[str, Any], flops: float | None) -> dict[str, Any]:
    """Returns the columns that need the model's layers."""
    if "model" not in config:
        return {}
    from linnet.models import active_parameters, attention_share, flops_causal, flops_exact, state_numbers
    from linnet.runs.model import read_config

    model = read_config(run)
    found: dict[str, Any] = {"num_layers": model.num_layers, "params_active": active_parameters(model)}
    found["attention_share"] = attention_share(model)
    seq_len = config.get("seq_len")
    if isinstance(seq_len, int):
        found["state_fixed"], found["state_dynamic"] = state_numbers(model, seq_len)
        if flops is not None:
            found["flops_causal"] = flops * flops_causal(model, seq_len) / flops_exact(model, seq_len)
    return {name: value for name, value in found.items() if value is not None}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _absent(value: Any) -> bool:
    return value is None or value == "" or value != value  # NaN
