"""Several models on the same items: intervals, paired differences, and tests.

Two results are compared if they have the same settings (`asked`, except for the keys in `OWN_WAYS`, which may differ
between models) and the same content (`scored`): a file that changed between two evaluations is another text. A
comparison uses the items that all models have. Intervals are percentiles of a bootstrap over items (documents,
questions, cells of a needle grid; `linnet.laws.orders.percentile_interval`). All models share the same resamples, so
that differences are paired. If all scores are 0 or 1, a share has the interval of Clopper and Pearson, and a difference
that of `linnet.evaluate.classification.paired_interval`: resamples have no answer that did not occur. The test of a
difference is a paired permutation test: it swaps the two models' scores of single items at random (R. A. Fisher, "The
Design of Experiments", 1935, section 21). With few items it enumerates all swaps. Holm's method adjusts the p-values of
one call together (S. Holm, Scand. J. Statist. 6, 1979), which bounds the probability of any false positive among them
by the level.

Only one metric per task is tested: the first that has items. If the record lists the metrics that count
(`detail["shown"]`), only these are candidates. The other metrics are shown without a test, since most of them are the
same scores in other units.
"""

import itertools
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from linnet.config import digest, first_names
from linnet.evaluate.classification import exact_interval, paired_interval
from linnet.evaluate.needle_scores import RIVALS
from linnet.evaluate.results import Evaluation, Result
from linnet.laws.orders import FEWEST, Order, holm, percentile_interval
from linnet.laws.orders import LEVEL as ALPHA
from linnet.runs.record import plain

OWN_WAYS = (  # may differ between compared models
    "precision", "method", "window", "stride", "context", "too_long", "template", "template_file",
)  # fmt: skip
RESAMPLES = 2000  # bootstrap resamples
FLIPS = 9999  # random permutations per test
EXACT = 13  # up to this many differing items, a test enumerates all 2 ** 13 permutations
BLOCK = 2**24  # upper bound of random numbers drawn at once


@dataclass(frozen=True)
class Entry:
    """One evaluation in a comparison.

    Attributes:
        name: the name in the comparison: the model's name, with the settings in `OWN_WAYS` that tell its entries apart.
        model: the model's name.
    """

    name: str
    model: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Number:
    """One model's result over the common items, with its interval (None if there are fewer than `FEWEST` items)."""

    name: str
    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Difference:
    """`first` minus `second` over common items.

    Attributes:
        interval: interval of the difference, by the paired bootstrap; None if there are fewer than `FEWEST` items.
        p: p-value of the permutation test.
        adjusted: the p-value after Holm's adjustment over all tests of one call.
    """

    first: str
    second: str
    value: float
    interval: tuple[float, float] | None
    p: float
    adjusted: float


@dataclass(frozen=True)
class Comparison:
    """One metric of one task.

    Attributes:
        n: number of common items; 0 if the result has no items (a mean over tasks).
        left_out: number of items that at least one model has and at least one model lacks.
        numbers: one per model, in the order of the runs.
        differences: one per pair of models; empty if the metric is not tested.
        untested: why the metric is not tested, or "".
        chance: the value that guessing gives; None for metrics that cannot be guessed, or if it is not recorded.
        scored: as in `Shared`.
        unproven: names of the models that are not above guessing in a metric of the same task where it is known.
    """

    kind: str
    task: str
    metric: str
    better: str
    asked: dict
    n: int
    left_out: int
    numbers: tuple[Number, ...]
    differences: tuple[Difference, ...] = ()
    untested: str = ""
    chance: float | None = None
    scored: str | None = None
    unproven: tuple[str, ...] = ()

    def guesses(self, number: Number) -> bool:
        """Whether a model is not shown to be above guessing: the lower end of its interval is not above chance.

        Without items the value counts; items that are too few for an interval show nothing.
        """
        low = number.interval[0] if number.interval is not None else -math.inf if self.n else number.value
        return self.chance is not None and not low > self.chance

    @property
    def order(self) -> Order:
        """The models with a finite value, and which of them differ by their adjusted p-values."""
        real = [difference for difference in self.differences if difference.adjusted < ALPHA]
        pairs = frozenset((d.first, d.second) if d.value < 0 else (d.second, d.first) for d in real)
        values = {number.name: number.value for number in self.numbers if math.isfinite(number.value)}
        return Order(values, tested=frozenset(values), apart=pairs)

    @property
    def first(self) -> str | None:
        """The name of the model with the best value seen, or None. It may be chance."""
        values = self.order.values
        return (max if self.better == "higher" else min)(values, key=values.__getitem__, default=None)

    @property
    def best(self) -> str | None:
        """The name of the model with the best value; None if it does not differ from all others, or may be guessing.

        Also None where fewer than two models have a finite value, since nothing is compared.

        If the value of guessing is not known, a share whose interval reaches 0 is not above it, nor is a model that
        guesses in another metric of the task.
        """
        if self.first is None or len(self.order.values) < 2 or self.order.level(self.first):
            return None
        [number] = [number for number in self.numbers if number.name == self.first]
        nothing = self.better == "higher" and number.interval is not None and number.interval[0] == 0
        nothing = self.chance is None and (nothing or number.name in self.unproven)
        return None if nothing or self.guesses(number) else number.name


@dataclass(frozen=True)
class Shared:
    """Evaluations of several models with the same settings.

    Attributes:
        asked: the common settings.
        entries: one or more per model, in the order of the runs.
        lacking: names of the models without this evaluation.
        scored: digest of the content that was scored; None if no record has one.
    """

    kind: str
    asked: dict
    entries: tuple[Entry, ...]
    lacking: tuple[str, ...]
    scored: str | None = None

    def owns(self, comparison: Comparison) -> bool:
        """Whether a comparison is of this group."""
        key = (self.kind, self.asked, self.scored)
        return key == (comparison.kind, comparison.asked, comparison.scored)


def shared(evaluations: dict[str, Sequence[Evaluation]]) -> list[Shared]:
    """Groups evaluations that have the same settings and content; groups with the most models come first.

    A record without a digest of the content (of Linnet 0.1) joins the group of its settings if there is only one. It is
    left out if its model has a record with a digest and the same settings.

    Args:
        evaluations: the evaluations of each model, by its name. If some differ only in the training step, the latest
            step is used. If some differ only in `OWN_WAYS`, each becomes an entry with the settings in its name.
    """
    contents: dict[tuple[str, str], set[str]] = {}
    for records in evaluations.values():
        for record in records:
            contents.setdefault(_settings(record), set()).update({record.scored} - {None})
    groups: dict[tuple[str, str, str | None], list[Entry]] = {}
    for name, records in evaluations.items():
        mine: dict[tuple[str, str, str | None], list[Evaluation]] = {}
        known = {_settings(evaluation) for evaluation in records if evaluation.scored is not None}
        for evaluation in records:
            key, scored = _settings(evaluation), evaluation.scored
            if scored is None and key in known:
                continue
            if scored is None and len(contents[key]) == 1:
                [scored] = contents[key]
            mine.setdefault((*key, scored), []).append(evaluation)
        for key, same in mine.items():
            last = max(evaluation.model.get("step") or 0 for evaluation in same)
            same = [evaluation for evaluation in same if (evaluation.model.get("step") or 0) == last]
            entries = [Entry(_named(name, evaluation, same), name, evaluation) for evaluation in same]
            groups.setdefault(key, []).extend(entries)
    made = []
    for (kind, _, scored), entries in groups.items():
        lacking = tuple(name for name in evaluations if name not in {entry.model for entry in entries})
        made.append(Shared(kind, common(entries[0].evaluation.asked), tuple(entries), lacking, scored))
    return sorted(made, key=lambda group: len(group.lacking))


def _settings(evaluation: Evaluation) -> tuple[str, str]:
    return evaluation.kind, digest(plain(common(evaluation.asked)))


def compare(groups: Sequence[Shared], seed: int = 0) -> list[Comparison]:
    """Returns every metric of every task that at least one entry has, with tests if at least two entries have items."""
    comparisons = [comparison for group in groups for comparison in _of_group(group, seed)]
    tests = [difference for comparison in comparisons for difference in comparison.differences]
    adjusted = iter(holm([difference.p for difference in tests]))
    return [
        replace(c, differences=tuple(replace(d, adjusted=next(adjusted)) for d in c.differences)) for c in comparisons
    ]


def guessing(evaluation: Evaluation) -> dict[tuple[str, str], float]:
    """Returns (task, metric) -> the value that guessing gives, for results that are shares of right answers."""
    if evaluation.kind == "needle":
        guessed = 1 / (RIVALS + 1) if evaluation.asked.get("scoring") == "choice" else 0.0
        return {(result.task, "accuracy"): guessed for result in evaluation.results}
    if evaluation.kind == "recall":
        cells: dict[str, list[float]] = {}
        for cell in evaluation.detail["cells"]:
            cells.setdefault(f"recall-{cell['task']}", []).append(cell["chance"])
        return {(task, "choice"): sum(chances) / len(chances) for task, chances in cells.items()}
    return {(task, metric): value for task, metric, value in evaluation.detail.get("chance", ())}


def common(asked: dict) -> dict:
    """Returns the settings that must agree for two evaluations to be compared."""
    return {name: value for name, value in asked.items() if name not in OWN_WAYS}


def permutation_p(differences: np.ndarray, seed: int = 0) -> float:
    """Returns the two-sided p-value of the sum of paired differences under random signs.

    Args:
        differences: float64 [n].
        seed: seed of the random signs.

    Raises:
        ValueError: a difference is not finite.
    """
    if not np.isfinite(differences).all():
        raise ValueError("differences: some are not finite; the test needs finite numbers; leave those items out")
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    observed = abs(differences.sum()) * (1 - 1e-9)  # sums of equal terms in another order count as equal
    if len(differences) <= EXACT:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(differences))))
        return float((np.abs(signs @ differences) >= observed).mean())
    generator, reached, left = np.random.default_rng(seed), 0, FLIPS
    while left:
        rows = min(left, max(1, BLOCK // len(differences)))
        signs = generator.integers(0, 2, (rows, len(differences)), dtype=np.int8)
        sums = 2 * (signs @ differences) - differences.sum()
        reached += int((np.abs(sums) >= observed).sum())
        left -= rows
    return (1 + reached) / (1 + FLIPS)


def bootstrap_means(scores: np.ndarray, weights: np.ndarray, seed: int = 0) -> np.ndarray:
    """Returns weighted means over `RESAMPLES` bootstrap resamples of the items, the same resamples for every model.

    Args:
        scores, weights: float64 [models, items].
        seed: seed of the resampling.

    Returns:
        float64 [RESAMPLES, models].
    """
    count, generator = scores.shape[1], np.random.default_rng(seed)
    columns = np.concatenate([scores * weights, weights]).T
    sums, left = [], RESAMPLES
    while left:
        rows = min(left, max(1, BLOCK // count))
        drawn = generator.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        sums.append(np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count) @ columns)
        left -= rows
    totals = np.concatenate(sums)
    models = scores.shape[0]
    return totals[:, :models] / totals[:, models:]


def _named(name: str, evaluation: Evaluation, same: list[Evaluation]) -> str:
    """Returns the model's name, with the settings that tell this evaluation from the model's others."""
    if len(same) == 1:
        return name
    ways = [way for way in OWN_WAYS if len({str(other.asked.get(way)) for other in same}) > 1]
    return f"{name} ({', '.join(str(evaluation.asked.get(way)) for way in ways)})"


def _of_group(group: Shared, seed: int) -> list[Comparison]:
    results: dict[tuple[str, str], dict[str, Result]] = {}
    for entry in group.entries:
        for result in entry.evaluation.results:
            results.setdefault((result.task, result.metric), {})[entry.name] = result
    chances = {place: value for entry in group.entries for place, value in guessing(entry.evaluation).items()}
    counting = {tuple(pair) for entry in group.entries for pair in entry.evaluation.detail.get("shown", [])}
    comparisons, tested = [], set()
    for (task, metric), by_name in results.items():
        asks = task not in tested and all(result.items for result in by_name.values())
        asks = asks and (not counting or (task, metric) in counting)
        tested |= {task} if asks else set()
        comparison = _of_metric(group, by_name, asks, seed)
        comparisons.append(replace(comparison, chance=chances.get((task, metric)), scored=group.scored))
    guess: dict[str, set[str]] = {}
    for comparison in comparisons:
        names = {number.name for number in comparison.numbers if comparison.guesses(number)}
        guess.setdefault(comparison.task, set()).update(names)
    return [replace(c, unproven=tuple(sorted(guess[c.task]))) for c in comparisons]


def _of_metric(group: Shared, by_name: dict[str, Result], asks: bool, seed: int) -> Comparison:
    names, results = list(by_name), list(by_name.values())
    first = results[0]
    about = (group.kind, first.task, first.metric, first.better, group.asked)
    untested_numbers = tuple(Number(name, result.value, None) for name, result in by_name.items())
    if not all(result.items for result in results):
        return Comparison(*about, 0, 0, untested_numbers)
    scores = [{item.id: (item.score, item.weight) for item in result.items} for result in results]
    ids = [id_ for id_ in scores[0] if all(id_ in other for other in scores)]
    everything = set().union(*scores)
    if not ids:
        return Comparison(*about, 0, len(everything), untested_numbers, untested="they have no item in common")
    table = np.array([[by_id[id_] for id_ in ids] for by_id in scores])  # [models, items, score and weight]
    values, weights = table[..., 0], table[..., 1]
    finite = bool(np.isfinite(values).all())  # a model may give NaN
    change = _exp if first.average == "exp" else np.asarray
    means = change((values * weights).sum(1) / weights.sum(1))
    drawn = change(bootstrap_means(values, weights, seed)) if finite and len(ids) > 1 else None
    right = _right(values, weights) if first.average == "mean" else None
    numbers = tuple(
        Number(
            name,
            mean,
            None if drawn is None else _interval(drawn[:, i], weights[i], None if right is None else right[i]),
        )
        for i, (name, mean) in enumerate(zip(names, means.tolist(), strict=True))
    )
    differences, untested = [], ""
    if asks and len(names) > 1:
        if not finite:
            untested = "some of their scores are not finite"
        elif drawn is None:
            untested = "there is only one item; evaluate six or more (of a text, documents)"
        elif not np.allclose(weights, weights[0], rtol=1e-9, atol=0):
            untested = "the weights of the items differ between the models (different text or tokenizer)"
        else:
            parts = values * weights / weights.sum(1, keepdims=True)
            for i, j in itertools.combinations(range(len(names)), 2):
                p = permutation_p(parts[i] - parts[j], seed)
                pair = None if right is None else (right[i], right[j])
                between = _interval(drawn[:, i] - drawn[:, j], weights[i], *pair or ())
                differences.append(Difference(names[i], names[j], (means[i] - means[j]).item(), between, p, p))
    left_out = len(everything) - len(ids)
    return Comparison(*about, len(ids), left_out, numbers, tuple(differences), untested)


def _right(values: np.ndarray, weights: np.ndarray) -> np.ndarray | None:
    """Returns which items are right, bool [models, items]; None for scores other than 0 and 1, or unequal weights."""
    is_share = np.isin(values, (0.0, 1.0)).all() and np.ptp(weights) <= 1e-9 * weights.max()
    return values == 1 if is_share else None


def _interval(
    drawn: np.ndarray, weights: np.ndarray, right: np.ndarray | None = None, other: np.ndarray | None = None
) -> tuple[float, float] | None:
    """Returns the interval of a mean, or of a difference of two, over items; None for fewer than `FEWEST` items.

    Resamples of 12 right answers hold no wrong one, and their interval has no width. So shares of right answers have
    the interval of Clopper and Pearson, and their differences that of `paired_interval`.

    Args:
        drawn: float64 [RESAMPLES], bootstrap draws of the number.
        weights: of the items.
        right, other: which items are right of the model, and of the second of a difference.
    """
    if right is None or len(right) < FEWEST:
        return percentile_interval(drawn, len(weights), weights)
    if other is None:
        return exact_interval(int(right.sum()), len(right))
    return paired_interval(int((right & ~other).sum()), int((other & ~right).sum()), len(right))


def _exp(means: np.ndarray) -> np.ndarray:
    """Returns perplexities with the upper bound that `Result.of_items` uses, so that all are finite."""
    return np.exp(np.minimum(means, 700.0))


# Text of comparisons: titles of evaluations, formats of numbers, and notes on how to read them.

REAL = ALPHA  # adjusted p-values below this are called differences
SCOPE = (
    "The tests compare these trained models over items, and know nothing of other seeds of the trainings: "
    "to compare architectures, train each with several seeds."
)
_NEEDLE_OPTIONS = {"samples": 1, "scoring": "match", "haystack": None, "digits": 5}


def needle_name(asked: dict) -> str:
    """Returns `--mode` of `linnet evaluate needle`."""
    return asked["mode"] if asked["variant"] == "single" else asked["variant"]


def title(group: Shared) -> str:
    """Returns the kind of an evaluation, with the settings that tell it from others of its kind."""
    asked = group.asked
    if group.kind == "text":
        return f"text: {_texts(group)}"
    if group.kind == "chat":
        return f"chat: {first_names(asked['text'], 3)}"
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
    names = list(dict.fromkeys(re.sub(r":\d+$", "", text["name"]) for text in documents))  # rows of JSONL are numbered
    return first_names(names, 3)


def split(groups: Sequence[Shared]) -> list[str]:
    """Returns a sentence for each evaluation whose models scored different content under the same settings."""
    same: dict[str, list[Shared]] = {}
    for group in groups:
        same.setdefault(f"{group.kind} {sorted(group.asked.items(), key=str)}", []).append(group)
    sentences = []
    for of_settings in same.values():
        if len(of_settings) > 1:
            sides = []
            for group in of_settings:
                names = ", ".join(dict.fromkeys(entry.name for entry in group.entries))
                sides.append(f"{names}: {'not recorded' if group.scored is None else group.scored}")
            sentences.append(
                f"{title(of_settings[0])}: the settings agree, but not the content that was scored (its digests: "
                f"{'; '.join(sides)}), so these are not compared; evaluate again what is older"
            )
    return sentences


def command(evaluation: Evaluation, run: str) -> str:
    """Returns the command that evaluates `run` with the settings of `evaluation`."""
    asked, kind = common(evaluation.asked), evaluation.kind
    commands = ("text", "chat", "needle", "recall", "images", "samples", "masked", "glue", "lra", "tasks")
    name = kind if kind in commands else "masked" if kind in ("sentences", "cola") else "suite"
    words = ["linnet", "evaluate", name, run]
    if kind in ("text", "masked"):
        words += asked["text"]
        words += ["--text-key", asked["text_key"]] if asked.get("text_key", "text") != "text" else []
    elif kind == "chat":
        words += asked["text"]
        words += ["--template", file] if (file := evaluation.asked["template_file"]) else []
        words += ["--per-answer"] if asked["per_answer"] else []
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


_PER_TOKEN = "losses and perplexities per token do not compare"
_OTHER_TOKENS = {
    "needle": "prompts with the same number of tokens hold different texts",
    "text": f"{_PER_TOKEN}; bits per byte and numbers per byte and word do",
    "blocks": f"{_PER_TOKEN}; bits per byte and perplexities per word do",
    "chat": "losses per token do not compare",
}


def notes(group: Shared, comparisons: Sequence[Comparison]) -> list[str]:
    """Returns notes on settings that differ between models, on too few items, and on metrics that are not tested."""
    sentences = []
    unknown = [entry.name for entry in group.entries if entry.evaluation.scored is None]
    if unknown and len(group.entries) > 1:
        sentences.append(
            f"{', '.join(unknown)}: the record is of Linnet 0.1 and does not say what was scored, so its content may "
            "differ; evaluate again to be sure."
        )
    for way in ("method", "window", "context", "precision", "template"):
        values = {entry.name: entry.evaluation.asked.get(way) for entry in group.entries}
        if len({value for value in values.values() if value is not None}) > 1:
            sentences.append(f"The {way} differs: {', '.join(f'{name} {value}' for name, value in values.items())}.")
    steps = {entry.name: entry.evaluation.model.get("step") for entry in group.entries}
    if len({entry.evaluation.model.get("tokenizer") for entry in group.entries}) > 1:
        sentences += [f"The tokenizers differ, so {_OTHER_TOKENS[group.kind]}."] if group.kind in _OTHER_TOKENS else []
    if len({step for step in steps.values() if step is not None}) > 1:
        sentences.append(f"The training steps differ: {', '.join(f'{name} {step}' for name, step in steps.items())}.")
    few = {
        (comparison.task, comparison.n)
        for comparison in comparisons
        if comparison.differences and comparison.n < FEWEST
    }
    sentences += [
        f"{task}: {n} item{'s' if n > 1 else ''} cannot show a difference; intervals and tests need at least {FEWEST}, "
        "and more if several differences are tested."
        for task, n in sorted(few)
    ]
    reasons = {(comparison.task, comparison.untested) for comparison in comparisons if comparison.untested}
    return sentences + [f"{task}: not tested, because {reason}." for task, reason in sorted(reasons)]
