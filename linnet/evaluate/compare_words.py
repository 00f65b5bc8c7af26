"""Text of comparisons: titles of evaluations, formats of numbers, and notes on how to read them."""

import math
import re
import shlex
from collections.abc import Sequence

from linnet.evaluate.compare import ALPHA, Comparison, Shared, common
from linnet.evaluate.results import Evaluation

REAL = ALPHA  # adjusted p-values below this are called differences
FEWEST = 1 + math.ceil(math.log2(1 / REAL))  # with fewer items the least p-value, 2 / 2 ** items, is above REAL
_NEEDLE_OPTIONS = {"samples": 1, "scoring": "match", "haystack": None, "digits": 5}


def needle_name(asked: dict) -> str:
    """Returns `--mode` of `linnet evaluate needle`."""
    return asked["mode"] if asked["variant"] == "single" else asked["variant"]


def title(group: Shared) -> str:
    """Returns the kind of an evaluation, with the settings that tell it from others of its kind."""
    asked = group.asked
    if group.kind == "text":
        return f"text: {_texts(group)}"
    if group.kind == "needle":
        lengths = f"{len(asked['lengths'])} lengths up to {max(asked['lengths']):,} tokens"
        return f"needle: {needle_name(asked)}, {lengths}, {len(asked['depths'])} depths"
    if group.kind == "tasks":
        return f"tasks: {', '.join(asked['tasks'])}"
    if group.kind == "images":
        return f"images: {', '.join(asked['data']) or 'held out in training'}"
    return group.kind


def _texts(group: Shared) -> str:
    """Returns the names of the files that were scored, of which globs and folders say nothing; at most three."""
    documents = group.entries[0].evaluation.detail.get("documents") or [{"name": path} for path in group.asked["text"]]
    names = list(dict.fromkeys(re.sub(r":\d+$", "", one["name"]) for one in documents))  # rows of JSONL are numbered
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def split(groups: Sequence[Shared]) -> list[str]:
    """Returns a sentence for each evaluation whose models scored different content under the same settings."""
    same: dict[str, list[Shared]] = {}
    for group in groups:
        same.setdefault(f"{group.kind} {sorted(group.asked.items(), key=str)}", []).append(group)
    found = []
    for of_settings in same.values():
        if len(of_settings) > 1:
            sides = []
            for group in of_settings:
                names = ", ".join(dict.fromkeys(entry.name for entry in group.entries))
                sides.append(f"{names}: {'not recorded' if group.scored is None else group.scored}")
            found.append(
                f"{title(of_settings[0])}: the settings agree, but not the content that was scored (its digests: "
                f"{'; '.join(sides)}), so these are not compared; evaluate again what is older"
            )
    return found


def command(evaluation: Evaluation, run: str) -> str:
    """Returns the command that evaluates `run` with the settings of `evaluation`."""
    asked, kind = common(evaluation.asked), evaluation.kind
    own = ("text", "needle", "recall", "images", "samples", "masked", "glue", "lra", "tasks")
    name = kind if kind in own else "masked" if kind in ("sentences", "cola") else "suite"
    words = ["linnet", "evaluate", name, run]
    if kind in ("text", "masked"):
        words += asked["text"]
        words += ["--text-key", asked["text_key"]] if asked.get("text_key", "text") != "text" else []
    elif kind == "needle":
        words += ["--mode", needle_name(asked), "--lengths", ",".join(map(str, asked["lengths"]))]
        words += ["--depths", str(len(asked["depths"]))]
        for name, usual in _NEEDLE_OPTIONS.items():
            words += [f"--{name}", str(asked[name])] if asked.get(name, usual) != usual else []
    elif kind == "recall":
        words += ["--lengths", ",".join(map(str, asked["lengths"]))]
        words += ["--pairs", ",".join(map(str, asked["pairs"])), "--samples", str(asked["samples"])]
    elif kind == "images":
        words += [word for source in asked["data"] for word in ("--data", source)]
        words += ["--split", asked["split"]] if asked["split"] else []
    elif kind == "samples":
        words += ["--extractor", asked["extractor"], "--samples", str(asked["samples"])]
        words += ["--sampler", asked["sampler"], "--steps", str(asked["steps"]), "--guidance", str(asked["guidance"])]
    elif kind == "lra":
        pass  # the task and its data are those of the run
    elif kind == "glue":
        words += ["--data", asked["data"]]
    elif kind == "sentences":
        words += [word for path in asked["sentences"] for word in ("--sentences", path)]
    elif kind == "cola":
        words += ["--cola", asked["cola"]]
    else:
        words += asked["tasks"] if kind == "tasks" else [kind]
    for name in ("include", "shots", "limit"):
        words += [f"--{name}", str(asked[name])] if asked.get(name) is not None else []
    return shlex.join(words)


def shown(value: float) -> str:
    """Returns a value with four decimals, fewer for large values, and a dash for values that are not finite."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}" if abs(value) < 1e6 else f"{value:.4g}"
    return text.replace("-", "−")


def between(interval: tuple[float, float] | None) -> str:
    """Returns an interval in parentheses, to append to a value; "" for None."""
    return "" if interval is None else f" ({shown(interval[0])} to {shown(interval[1])})"


def notes(group: Shared, comparisons: Sequence[Comparison]) -> list[str]:
    """Returns notes on settings that differ between models, on too few items, and on metrics that are not tested."""
    found = []
    unknown = [entry.name for entry in group.entries if entry.evaluation.scored is None]
    if unknown and len(group.entries) > 1:
        found.append(
            f"{', '.join(unknown)}: the record is of Linnet 0.1 and does not say what was scored, so its content may "
            "differ; evaluate again to be sure."
        )
    for way in ("method", "window", "context", "precision"):
        values = {entry.name: entry.evaluation.asked.get(way) for entry in group.entries}
        if len({value for value in values.values() if value is not None}) > 1:
            found.append(f"The {way} differs: {', '.join(f'{name} {value}' for name, value in values.items())}.")
    steps = {entry.name: entry.evaluation.model.get("step") for entry in group.entries}
    if len({entry.evaluation.model.get("tokenizer") for entry in group.entries}) > 1 and group.kind == "needle":
        found.append("The tokenizers differ, so prompts with the same number of tokens hold different texts.")
    if len({step for step in steps.values() if step is not None}) > 1:
        found.append(f"The training steps differ: {', '.join(f'{name} {step}' for name, step in steps.items())}.")
    few = {(one.task, one.n) for one in comparisons if one.differences and one.n < FEWEST}
    found += [
        f"{task}: {n} item{'s' if n > 1 else ''} cannot show a difference; a test needs at least {FEWEST}, "
        "and more if several differences are tested."
        for task, n in sorted(few)
    ]
    reasons = {(one.task, one.untested) for one in comparisons if one.untested}
    return found + [f"{task}: not tested, because {reason}." for task, reason in sorted(reasons)]
