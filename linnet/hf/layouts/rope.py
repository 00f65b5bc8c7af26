"""RoPE in config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""

import math
from collections.abc import Mapping
from typing import Any

from linnet.hf.layouts.base import Settings

ROTATIONS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
YARN_KEYS = ("beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def read_rope(
    settings: Settings, fraction: float | None = None, theta: float = 10000.0, inert: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns RoPE's options, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        fraction: default of `partial_rotary_factor`; None: the source rotates all channels.
        theta: default of `rope_theta`.
        inert: keys that do not change the rotation of text.
    """
    # The precedence of transformers 5, where a file has both: the older key, and the length beside the parameters.
    parameters = settings.values.get("rope_scaling") or settings.values.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        settings.problems.append(f"rope_parameters: must be an object (given {parameters!r})")
        return {}
    outer = {key: settings.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = Settings({**outer, **parameters})
    if fraction is None:
        rope.only("partial_rotary_factor", 1, why="Linnet's RoPE rotates all channels of a head")
    share = {} if fraction is None else {"rope_fraction": rope.number("partial_rotary_factor", fraction, largest=1)}
    base, kind = rope.number("rope_theta", theta), parameters.get("rope_type", parameters.get("type", "default"))
    known = (*ROPE_KEYS, *inert, *(YARN_KEYS if kind == "yarn" else ()))
    for key in sorted(key for key, value in parameters.items() if value is not None and key not in known):
        rope.problems.append(
            f"{key}: Linnet's RoPE does not have it (given {parameters[key]!r}); it has {', '.join(known)}"
        )
    scaling = None
    if kind == "linear":
        scaling = {"kind": "linear", "factor": rope.number("factor", None)}
    elif kind in ROTATIONS:
        (low, high), yarn = ROTATIONS[kind], kind == "yarn"
        key = "original_max_position_embeddings"
        length = settings.values.get(key, parameters.get(key, settings.values.get("max_position_embeddings")))
        scaling = {
            "kind": kind,
            "factor": rope.number("factor", None),
            "low": rope.number(low, 1.0 if yarn else None),
            "high": rope.number(high, 32.0 if yarn else None),
            "length": Settings({key: length}, problems=rope.problems).integer(key, None),
        }
        if yarn:
            scaling |= {
                "truncate": rope.flag("truncate", True),
                "attention_factor": _amplitude(rope, scaling["factor"]),
            }
    elif kind != "default":
        rope.problems.append(f"rope_type: Linnet does not have {kind!r}; it has default, linear, llama3 and yarn")
    settings.problems += [f"rope_parameters.{problem}" for problem in rope.problems]
    return {"rope_base": base, "rope_scaling": scaling, **share}


def write_rope(attention: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of config.json for RoPE's options, the inverse of `read_rope`."""
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": attention["rope_base"]}
    if attention.get("rope_fraction", 1.0) != 1.0:
        values["partial_rotary_factor"] = attention["rope_fraction"]
    scaling = attention["rope_scaling"]
    if not scaling:
        return {"rope_parameters": values}
    scaling = scaling if isinstance(scaling, Mapping) else scaling.model_dump()
    values |= {"rope_type": scaling["kind"], "factor": scaling["factor"]}
    if scaling["kind"] == "linear":
        return {"rope_parameters": values}
    low, high = ROTATIONS[scaling["kind"]]
    values |= {
        low: scaling["low"],
        high: scaling["high"],
        "original_max_position_embeddings": scaling["length"],
        **{key: scaling[key] for key in ("attention_factor", "truncate") if key in scaling},
    }
    return {"rope_parameters": values, "max_position_embeddings": int(scaling["factor"] * scaling["length"])}


def _amplitude(rope: Settings, factor: float) -> float | None:
    """Returns the factor of rotated queries and keys that YaRN's keys name, None for Linnet's default."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor", None)
    if not (rope.values.get("mscale") and rope.values.get("mscale_all_dim")):
        return None
    own, all_dim = (
        0.1 * rope.number(key, None) * math.log(max(1.0, factor)) + 1.0 for key in ("mscale", "mscale_all_dim")
    )
    return own / all_dim
