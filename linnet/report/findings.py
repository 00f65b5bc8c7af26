"""Findings of a study in sentences, computed from its records: one or two sentences per finding, as HTML."""

import math
import re
from collections import Counter
from dataclasses import replace
from html import escape, unescape
from typing import Any

import numpy as np

from linnet.config import count_of
from linnet.laws.orders import QUANTITIES, Order, order_of_means, orders
from linnet.report import downstream, tables, units
from linnet.report.records import Study, gain_of_doubling, through_optima
from linnet.study.differences import read_differences
from linnet.study.sensitivity import larger, words

CLOSE = 0.02  # losses within this fraction of the lowest count as close to it
BALANCED = 0.1  # a + b this near to 1 needs no warning
WIDE = 0.5  # of a 95 % interval of a or b: they lie in 0 to 1 where both N and D grow, so a wider one says nothing


def summary(study: Study) -> str:
    """One sentence with numbers: how much was trained, and on what."""
    table = study.table
    parts = [f"{units.plural(len(table), 'run')} of {units.plural(len(study.architectures), 'architecture')}"]
    sizes = table["params_non_embedding"].dropna()
    if len(sizes):
        parts.append(f"with {units.count(sizes.min())} to {units.count(sizes.max())} non-embedding parameters")
    if len(study.budgets) > 1:
        low, high = study.budgets[0], study.budgets[-1]
        parts.append(f"at {len(study.budgets)} budgets ({units.scientific(low)} to {units.flops(high)})")
    elif study.budgets:
        parts.append(f"at {units.flops(study.budgets[0])}")
    if source := _source(study):
        parts.append(f"on {source}")
    totals = [f"{units.flops(table['flops'].sum())} in all"]
    if table["tokens"].sum() > 0:
        totals.append(f"{units.count(table['tokens'].sum())} tokens read")
    if table["seconds"].sum() > 0:
        totals.append(f"{units.duration(table['seconds'].sum())} of training")
    text = f"{' '.join(parts)}: {', '.join(totals)}."
    if others := sum(factor != 1 for rates in study.sensitivities.values() for factor in rates.losses):
        text += f" Not counted here: {units.plural(others, 'run')} at other learning rates, which no fit reads."
    return escape(text)


def conclude(study: Study) -> dict[str, Any]:
    """Returns the conclusions of a page as plain sentences, and the orders behind them: quantity -> [lower, higher]."""
    lines = findings(study) + downstream.finding(downstream.read_series(study, bootstrap=0))
    known = {name: order for name, order in orders(study.fits).items() if name != "L" or not study.incomparable}
    pairs = {name: sorted(map(list, order.apart)) for name, order in known.items()}
    return {"conclusions": [study.in_units(plain(line)) for line in lines], "orders": pairs}


def findings(study: Study) -> list[str]:
    """The headlines, most important first. The order of the rows changes nothing."""
    study = replace(study, table=study.table.sort_values(["architecture", "run", "loss", "flops"]))
    laws = (_loss_exponents, _allocation, _held_out, _crossings, _refused)
    makers = (_lowest_loss, _differences, *laws, _state, _speed, _left_out)
    return [text for text in (make(study) for make in makers) if text]


def _differences(study: Study) -> str:
    """How many differences from a base have the sign that a paper prints."""
    printed = [difference for difference in read_differences(study.folder) if difference.printed]
    verdicts = Counter(difference.verdict.partition(":")[0] for difference in printed)
    if not verdicts:
        return ""
    same, other, open_ = (verdicts[verdict] for verdict in ("sign as printed", "opposite sign", "cannot be told"))
    text = f"{same} have the printed sign, {other} the opposite one, and {open_} cannot be told"
    doubted = sum(
        bool(words(study.sensitivities, difference.architecture, difference.base, abs(difference.bits), math.log(2)))
        for difference in printed
    )
    text += f"; the learning rate may decide {doubted} of them" if doubted else ""
    return f"Of {count_of(verdicts.total(), 'printed difference')} from a base, {text}."


def plain(text: str) -> str:
    """Returns a sentence of `findings` as the terminal prints it."""
    text = re.sub(r"<sup>(.*?)</sup>", r"^\1", re.sub(r"<sub>(.*?)</sub>", r"_\1", text))
    return unescape(re.sub(r"<[^>]+>", "", text))


def _source(study: Study) -> str:
    source = (study.config.get("data") or {}).get("source")
    if not source or source == "stdlib":
        return "the source text of the Python standard library" if source else ""
    names = [source] if isinstance(source, str) else list(source)
    shown = [str(name).rstrip("/").rsplit("/", 1)[-1] for name in names[:4]]
    return units.listed(shown) if len(names) <= 4 else f"{', '.join(shown)} and {len(names) - 4} more sources"


def _strong(name: str) -> str:
    return f"<b>{escape(name)}</b>"


def _at_largest(study: Study):
    """The usable runs of the largest budget, or all where there are no budgets, and how to say so."""
    rows = study.usable[~study.usable["run"].isin(_excluded(study))]
    if not (budgets := study.budgets):
        return rows, "Over all runs"
    return rows[rows["budget"] == budgets[-1]], f"At the largest budget, {units.flops(budgets[-1])}"


def _lowest_loss(study: Study) -> str:
    """The lowest loss at the largest budget, and which architectures differ from the one that has it."""
    rows, where = _at_largest(study)
    if rows.empty:
        return "No run has ended with a finite loss yet, so there is nothing to compare."
    if study.incomparable:
        fix = "Bits per byte of one text do: <code>linnet evaluate text</code>, then <code>linnet compare</code>."
        return f"The held-out losses of these runs do not compare: {escape(study.incomparable)}. {fix}"
    best = rows.loc[rows.groupby("architecture")["loss"].idxmin()].sort_values("loss")
    first, others = best.iloc[0], best.iloc[1:]
    bits = f" ({units.significant(first['bits_per_byte'], 4)} bits per byte)" if first["bits_per_byte"] > 0 else ""
    text = (
        f"{where}, the lowest held-out loss seen is <b>{units.loss(first['loss'])} nats per token</b>{bits}, "
        f"of {_strong(first['architecture'])} with {units.count(first['params_non_embedding'])} "
        f"parameters and {units.count(first['tokens'])} tokens."
    )
    if others.empty:
        return text
    loss = orders(study.fits)["L"]
    higher = set(loss.above(first["architecture"]))
    others = others.sort_values("architecture", key=lambda names: names.map(study.architectures.index))
    apart = [row for _, row in others.iterrows() if row["architecture"] in higher]  # by the loss, it would be a ranking
    level = [name for name in others["architecture"] if name not in higher]
    if apart:
        # Without budgets, the lowest losses belong to runs of other compute.
        losses = dict(zip(best["architecture"], best["loss"], strict=True)) if study.budgets else loss.values
        gaps = {
            name: losses[name] / losses[first["architecture"]] - 1 for name in (row["architecture"] for row in apart)
        }
        shown = [f"{_strong(name)} (+{units.percent(gap)})" for name, gap in gaps.items()]
        at = "" if study.budgets else f" at {units.flops(loss.at)}, by the laws"
        text += f" The loss of {units.listed(shown)} is higher{at}."
    elif loss.apart:  # the lowest loss seen may be of a law that is too uncertain to be told apart from any
        text += "".join(_higher_than(loss, name) for name in study.architectures)
    else:
        low, high = (units.loss(value) for value in (best["loss"].min(), best["loss"].max()))
        tested = len(loss.tested) > 1
        why = "the intervals of all differences together hold 0" if tested else "there are no intervals"
        names = sorted(best["architecture"], key=study.architectures.index)
        text = f"{where}, the losses of {_all(names)} cannot be told apart ({why}): "
        span = low if low == high else f"between {low} and {high}"
        text += f"the lowest that each has is {span} nats per token."
    if level and apart:
        text += f" The loss of {_all(level)} cannot be told apart from it."
    return text + (_by_the_rate(study, first, others) if apart else "")


def _higher_than(loss: Order, name: str) -> str:
    """Returns which architectures the loss of one is told to be above, or ""."""
    lower = [other for other in loss.values if (other, name) in loss.apart]
    if not lower:
        return ""
    gap = loss.values[name] / max(loss.values[other] for other in lower) - 1
    return f" The loss of {_strong(name)} (+{units.percent(gap)}) is higher than that of {_all(lower)}."


def _by_the_rate(study: Study, first, others) -> str:
    """Returns a sentence about the architectures that differ from the best by less than the rate sensitivity, or ""."""
    sensitivities, lowest = study.sensitivities, first["architecture"]
    near = [
        row["architecture"]
        for _, row in others.iterrows()
        if row["loss"] - first["loss"] < larger(sensitivities, lowest, row["architecture"])
    ]
    if not near:
        return ""
    gap = "gap is" if len(near) == 1 else "gaps are"
    return (
        f" For {_all(near)} the {gap} smaller than the rate sensitivity: the learning rate may decide which is better."
    )


def _loss_exponents(study: Study) -> str:
    fits = {name: fit for name, fit in study.fits.items() if not fit.L.refused}
    known = {name: fit.L for name, fit in fits.items() if through_optima(fit)}
    others = [name for name in fits if name not in known]
    text = _steepest(known, orders(study.fits)["gain"]) if known else ""
    if others:
        laws = f"law of {_strong(others[0])} runs" if len(others) == 1 else f"laws of {_all(others)} run"
        text += (
            f" The {laws} through the lowest losses seen instead of optima: {'its' if len(others) == 1 else 'their'} "
        )
        text += f"{'slope says' if len(others) == 1 else 'slopes say'} as much about the sizes that were trained."
    return text.strip()


def _all(names: list[str]) -> str:
    return units.listed([_strong(name) for name in names])


def _steepest(known: dict, gain: Order) -> str:
    """Returns for which architectures twice the compute takes more off the loss, if their differences say so."""
    names = sorted(known, key=lambda name: gain.values[name])
    if len(known) == 1:
        return f"The loss of {_strong(names[0])} falls {_power(known[names[0]])}."
    at = f"twice the compute of {units.flops(gain.at)}"
    faster = {name: [other for other in gain.above(name) if other in known] for name in names}
    flat = max(names, key=lambda name: len(faster[name]))
    if steep := faster[flat]:
        taken = units.listed([f"{_strong(name)} ({units.percent(gain.values[name])})" for name in steep])
        return (
            f"The loss of {taken} falls faster with compute than that of {_strong(flat)} "
            f"({units.percent(gain.values[flat])}). Each percentage is what {at} takes off."
        )
    ends = [units.percent(gain.values[name]) for name in (names[0], names[-1])]
    tested = len(gain.tested & set(known)) > 1
    why = "the intervals of the differences hold 0" if tested else "there are no intervals"
    return (
        f"How fast the loss falls with compute cannot be told apart between {_all(list(known))} ({why}): "
        f"{at} takes {ends[0]} to {ends[1]} off."
    )


def _power(law) -> str:
    span = law.exponent_interval
    ends = f" (95 %: {units.significant(span[0])} to {units.significant(span[1])})" if span else ""
    constant = f"{units.significant(law.constant)} plus " if law.constant is not None else ""
    gain = units.percent(gain_of_doubling(law))
    return f"as {constant}C<sup>{units.significant(law.exponent)}</sup>{ends}: twice the compute takes {gain} off"


def _allocation(study: Study) -> str:
    """The laws of optimal size and tokens, where their intervals are narrow enough to say something."""
    fits = {
        name: fit
        for name, fit in study.fits.items()
        if fit.sizes.method != "power" and not fit.N_opt.refused and not fit.D_opt.refused
    }
    doubts = {name: doubt for name, fit in fits.items() if (doubt := _doubt(fit))}
    known = {name: fit for name, fit in fits.items() if name not in doubts}
    unknown = ""
    if doubts:
        reasons = "; ".join(f"for {_strong(name)} {doubt}" for name, doubt in doubts.items())
        unknown = f"How the best model size and its tokens grow with compute is unknown {reasons}."
    if not known:
        return unknown
    ranking = orders(study.fits)
    sizes = _range("a", {name: fit.N_opt for name, fit in known.items()}, ranking["a"])
    tokens = _range("b", {name: fit.D_opt for name, fit in known.items()}, ranking["b"])
    text = (
        f"The best model size grows as C<sup>a</sup> with {sizes}, "
        f"and the tokens to train it on as C<sup>b</sup> with {tokens}."
    )
    sums = [fit.sizes.a_plus_b for fit in known.values() if fit.sizes.a_plus_b is not None]
    far = max(sums, key=lambda value: abs(value - 1), default=1.0)
    if abs(far - 1) > BALANCED:
        text += (
            f" a + b goes as far as {units.significant(far)}. It would be 1 if cost were proportional to N D: "
            "read the two laws together, and do not extrapolate them far."
        )
    return f"{text} {unknown}".strip()


def _doubt(fit) -> str:
    """Why a fit's laws of optimal size and tokens are not stated, or ""."""
    for symbol, law in (("a", fit.N_opt), ("b", fit.D_opt)):
        span = law.exponent_interval
        if span is None and fit.sizes.bootstrap.resamples:
            return f"(too few resamples give {symbol} for an interval)"
        if span and span[1] - span[0] > WIDE:
            return f"(the 95 % interval of {symbol}, {_to(span)}, is wider than {WIDE:g})"
    return ""


def _to(span: tuple[float, float]) -> str:
    return " to ".join(units.significant(end, 2) for end in span)


def _range(symbol: str, laws: dict, exponents: Order) -> str:
    """The smallest and the largest exponent of some architectures' laws, with their intervals."""
    low, high = (choose(laws, key=lambda name: laws[name].exponent) for choose in (min, max))
    least, most = (units.significant(laws[name].exponent, 2) for name in (low, high))
    spans = {name: f"95 %: {_to(span)}" for name in laws if (span := laws[name].exponent_interval)}
    if len(laws) > 1 and (low, high) not in exponents.apart and least != most:
        return f"{symbol} between {least} and {most} (architectures cannot be told apart)"
    if len(laws) > 1 and least != most:
        ends = [", ".join([_strong(name), *filter(None, [spans.get(name)])]) for name in (low, high)]
        return f"{symbol} from {least} ({ends[0]}) to {most} ({ends[1]})"
    if len(laws) == 1:
        return f"{symbol} = {least} for {_strong(low)}" + (f" ({spans[low]})" if spans else "")
    within = list(zip(*filter(None, (law.exponent_interval for law in laws.values())), strict=True))
    shown = f" (95 % intervals within {_to((min(within[0]), max(within[1])))})" if within else ""
    return f"{symbol} = {least} for {'both' if len(laws) == 2 else f'all {len(laws)}'}{shown}"


def _held_out(study: Study) -> str:
    tests = {name: fit.held_out for name, fit in study.fits.items() if fit.held_out and not fit.held_out.refused}
    if not tests:
        return ""
    errors = {name: test.mean_error for name, test in tests.items()}
    low, high = units.percent(min(errors.values())), units.percent(max(errors.values()))
    shown = high if low == high else f"{low} to {high}"
    return f"Laws fitted to the smaller budgets alone miss the losses at the largest by {shown}, on average."


def _crossings(study: Study) -> str:
    if study.incomparable:
        return ""
    texts = []
    for crossing in study.crossings:
        # Laws of one slope cross anywhere. The table of crossings says why one has no interval.
        if crossing.lower_above is None or crossing.interval is None or not crossing.inside:
            continue
        low, high = (units.scientific(end) for end in crossing.interval)
        texts.append(
            f"The laws of {_strong(crossing.first)} and {_strong(crossing.second)} cross at {units.flops(crossing.C)} "
            f"(95 %: {low} to {high}); above it {_strong(crossing.lower_above)} has the lower loss."
        )
    rest = f" So do {len(texts) - 3} more pairs." if len(texts) > 3 else ""
    return " ".join(texts[:3]) + rest


def _refused(study: Study) -> str:
    if not study.fits:
        return ""
    if study.fit is not None and study.fit.compares:
        fix = (
            "the differences from a base compare them, paired by seed"
            if any(study.bases.values())
            else "<code>base: NAME</code> of an architecture compares it with NAME, paired by seed"
        )
        return f"Each architecture has one size at one budget, so there is no scaling law; {fix}."
    groups = [group for fit in study.fits.values() if fit.isoflop is not None for group in fit.isoflop.groups]
    inside = sum(group.inside for group in groups)
    text = (
        f"{inside} of {len(groups)} optima, one for each architecture and budget, could be fitted between the "
        "sizes that were trained; the others are refused. "
        if inside < len(groups)
        else ""
    )
    laws = {}  # names of the architectures -> what is refused of exactly these
    for attribute, shown in (("L", "L"), ("N_opt", "N<sub>opt</sub>"), ("D_opt", "D<sub>opt</sub>")):
        names = [name for name, fit in study.fits.items() if getattr(fit, attribute).refused]
        if names:
            laws.setdefault(_all(names), []).append(shown)
    if not laws:
        cells = tables.method_table(study).count('class="refused"')
        cells += sum(bool(convention.refused) for fit in study.fits.values() for convention in fit.conventions)
        more = f"; {units.plural(cells, 'law')} of other methods and ways of counting had to be" if cells else ""
        return text.strip() or f"No law of the headline had to be refused{more}."
    named = "; ".join(f"{units.listed(shown)} of {names}" for names, shown in laws.items())
    return f"{text}Refused laws, because the runs cannot tell: {named}. The table gives the reasons."


def _state(study: Study) -> str:
    rows, _ = _at_largest(study)
    rows = rows[rows["state_bytes"] > 0]
    if rows["architecture"].nunique() < 2 or study.incomparable:
        return ""
    best = rows.loc[rows.groupby("architecture")["loss"].idxmin()].sort_values("loss")
    higher = orders(study.fits)["L"].above(best.iloc[0]["architecture"])
    level = best[~best["architecture"].isin(higher)]  # their losses may be as low as the lowest one
    close = rows[(rows["loss"] <= (1 + CLOSE) * rows["loss"].min()) | rows.index.isin(level.index)]
    least = close[close["state_bytes"] == close["state_bytes"].min()].sort_values("loss")
    small, names = least.iloc[0], sorted(set(least["architecture"]), key=study.architectures.index)
    return (
        f"Among the runs within {units.percent(CLOSE, 1)} of the lowest loss or not told apart from it, the smallest "
        f"state is that of {_all(names)}: {units.size(small['state_bytes'])} per sequence, at a loss of "
        f"{units.loss(small['loss'])}{'' if len(names) == 1 else ' or more'}."
    )


def _speed(study: Study) -> str:
    rows = study.usable[(study.usable["seconds"] > 0) & (study.usable["flops"] > 0)]
    if rows["architecture"].nunique() < 2:
        return ""
    sums = rows.groupby("architecture")[["flops", "seconds"]].sum()
    speeds = sums["flops"] / sums["seconds"]
    fast, slow = speeds.idxmax(), speeds.idxmin()
    errors = {}
    for name, part in rows.groupby("architecture"):
        # The speed is the mean of the runs' speeds, weighted by their seconds. Resamples of few runs are too alike.
        weight = part["seconds"] / part["seconds"].sum()
        deviation = np.log(part["flops"] / part["seconds"]).std()
        if len(part) > 1:
            errors[str(name)] = (float(deviation * np.sqrt((weight**2).sum())), len(part) - 1)
    ranking = order_of_means({str(name): math.log(speed) for name, speed in speeds.items()}, errors, QUANTITIES)
    if (slow, fast) not in ranking.apart:
        ends = dict.fromkeys(units.scientific(speeds[name]) for name in (slow, fast))
        return f"The speeds of the architectures, {' to '.join(ends)} FLOP/s, cannot be told apart."
    return (
        f"For the same FLOPs, {_strong(slow)} took {units.significant(speeds[fast] / speeds[slow], 2)} times as long "
        f"as {_strong(fast)}, which ran at {units.scientific(speeds[fast])} FLOP/s."
    )


def _left_out(study: Study) -> str:
    status = study.table["status"].where(study.table["status"] != "done", "without a finite loss")
    lost = status[~study.table["usable"]].tolist() + ["excluded"] * len(_excluded(study))
    shown = units.listed([f"{number} {escape(str(reason))}" for reason, number in Counter(lost).most_common()])
    return f"{len(lost)} of {units.plural(len(study.table), 'run')} took no part in the fits ({shown})." if lost else ""


def _excluded(study: Study) -> set[str]:
    """The runs that the fits leave out though they ended well."""
    return {row["run"] for row in study.fit.excluded} & set(study.usable["run"]) if study.fit is not None else set()
