"""The page of a corpus: what it holds (in the form of paper 001's Table 10), and what each stage did to it.

All text of documents, names of files and labels are foreign: they are escaped, and characters that are not seen, or
that turn the direction of a line, are written as their numbers.
"""

import difflib
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from linnet.config import FIGURES, check_study
from linnet.corpus.page.records import (
    COPIES,
    MEASURED,
    REMOVED,
    CorpusRecords,
    Step,
    Tally,
    is_hidden,
    plain,
    quantiles,
    read_corpus,
)
from linnet.data.tokenizer import Tokenizer
from linnet.report import shell, style, units
from linnet.report.drawing import Canvas, Figure

# The figures of the page of a corpus. Their width is that of the page, so that they fit a telephone.

WIDTH = 760  # pixels, in pictures
BAR = 26  # pixels per bar
MOST = 16  # most bars of a figure
BINS = 60  # most bins of the histogram of scores


def draw(found: CorpusRecords) -> list[Figure]:
    """All figures that the records allow, in the order of the page."""
    makers: tuple[Callable, ...] = (stages, drops, token_lengths, scores)
    return [figure for figure in (make(found) for make in makers) if figure is not None]


def on_page(figure: Figure) -> Figure:
    """Returns a figure that takes the width of the page."""
    fit = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return Figure(figure.name, figure.title, figure.caption, figure.spec | fit)


def stages(found: CorpusRecords) -> Figure | None:
    """Bytes that each stage leaves, by source."""
    rows, order = [], []
    for step in found.steps:
        ends = ("read",) if step.raw else ()  # a stage that reads files starts a chain
        for end in (*ends, "written"):
            name = f"read by {step.name}" if end == "read" else f"after {step.name}"
            order.append(name)
            for label in step.labels:
                documents, size = (step.of(f"{unit} {end}", [label]) for unit in ("documents", "bytes"))
                words = f"{units.plural(documents, 'document')}, {units.size(size)}"
                rows.append({"stage": name, "architecture": plain(label), "bytes": size, "holds": words})
    if not any(row["bytes"] for row in rows):
        return None
    canvas = Canvas(found)
    alt = canvas.alt
    y = alt.Y("stage:N", sort=order, title=None).axis(labelLimit=200)
    x = alt.X("bytes:Q", title=None).axis(labelExpr="format(datum.value, '~s') + 'B'", tickCount=6)
    bars = canvas.chart(rows).mark_bar(height=BAR - 8)
    hue = canvas.colour(legend=False)
    tooltip = canvas.tooltip(("architecture", "stage", "holds"))
    drawn = bars.encode(x, y, hue, opacity=canvas.fade(), tooltip=tooltip).properties(
        width=WIDTH, height=BAR * len(order)
    )
    caption = "Bytes of text that each stage left, by source. Point at a bar for documents and bytes."
    return canvas.figure("stages", "What each stage left", caption, drawn)


def drops(found: CorpusRecords) -> Figure | None:
    """Documents that were left out, by stage and reason."""
    rows = []
    for step in found.steps:
        read = step.of("documents read")
        for reason, number in step.drops().items():
            share = units.percent(number / read) if read else ""
            words = f"{units.plural(number, 'document')}, {share} of those that {step.name} read"
            rows.append({"reason": plain(f"{step.name}: {reason}"), "documents": number, "left out": words})
    rows = sorted(rows, key=lambda row: (-row["documents"], row["reason"]))[:MOST]
    if not rows:
        return None
    caption = "Documents that were left out, by stage and reason."
    return _bars(found, "drops", "Why documents were left out", caption, rows, "reason", "documents", ",", "left out")


def token_lengths(found: CorpusRecords) -> Figure | None:
    """Characters per token by script."""
    rows = []
    for name, share in list(found.token_scripts.items())[:MOST]:
        ratio = share.characters / share.tokens
        words = f"{ratio:.2f} characters and {share.bytes / share.tokens:.2f} bytes per token"
        rows.append({"script": name, "ratio": ratio, "length": words, "tokens": f"{share.tokens:,}"})
    if not rows:
        return None
    caption = (
        "Characters per token by script, the script with most bytes first. A token has the script of its last "
        "character. Below 1, characters are spelled as bytes."
    )
    title = "Characters per token"
    return _bars(found, "characters-per-token", title, caption, rows, "script", "ratio", ".2f", "length")


def scores(found: CorpusRecords) -> Figure | None:
    """The distribution of scores of each source, with the thresholds of a filter."""
    if not found.scores:
        return None
    values = np.concatenate(list(found.scores.values()))
    low, high = float(values.min()), float(np.quantile(values, 0.999))
    high = high if high > low else low + 1e-3
    bins = int(min(BINS, max(10, math.sqrt(len(values)))))
    edges = np.linspace(low, high, bins + 1)
    rows: list[dict] = []
    for label, scores in found.scores.items():
        counts, _ = np.histogram(np.minimum(scores, high), edges)
        for place, number in enumerate([*counts.tolist(), int(counts[-1])]):  # the last bin has an end too
            ends = edges[min(place, bins - 1)], edges[min(place, bins - 1) + 1]
            words = f"{number:,} of {len(scores):,} documents at {ends[0]:.2f} to {ends[1]:.2f}"
            rows.append(
                {"architecture": plain(label), "score": edges[place], "share": number / len(scores), "documents": words}
            )
    canvas = Canvas(found)
    alt = canvas.alt
    x = alt.X("score:Q", title=f"nats per {found.per}", scale=alt.Scale(domain=[low, high], nice=False)).axis(
        tickCount=7
    )
    y = alt.Y("share:Q", title="share of the documents of a source").axis(format=".0%", tickCount=5)
    lines = canvas.chart(rows).mark_line(interpolate="step-after", strokeWidth=1.6, clip=True)
    layers = [
        lines.encode(
            x, y, canvas.colour(legend=False), strokeOpacity=canvas.fade(), tooltip=canvas.tooltip(("documents",))
        )
    ]
    cuts = _cuts(found, low, high)
    rules = canvas.chart(cuts).mark_rule(strokeDash=[5, 4], strokeWidth=1.4)
    layers.append(
        rules.encode(
            x, canvas.colour(legend=False), strokeOpacity=canvas.fade(), tooltip=canvas.tooltip(("threshold",))
        )
    )
    drawn = canvas.layer(*layers).properties(width=WIDTH, height=260)
    caption = (
        "How well the evaluation model predicts the documents of each source: low scores are text that is easy to "
        "predict, often repetition, high ones text that is unlike the rest. The highest 0.1 % are in the last bin."
    )
    if cuts:
        caption += " Dashed lines are the thresholds of the filter."
    return canvas.figure("scores", "Scores", caption, drawn)


def _cuts(records: CorpusRecords, low: float, high: float) -> list[dict]:
    rows = []
    for step in records.steps:
        results = step.values.get("results") or {}
        if step.values["stage"] != "filter" or step.per != records.per:
            continue
        for label, group in results.items():
            labels = records.architectures if label == "all" else [plain(label)]
            for name, end in (("low", "below"), ("high", "above")):
                if isinstance(place := group.get(name), int | float) and low <= place <= high:
                    words = plain(f"{step.name}: {group.get(end, 0):,} documents of {label} {end} {place:.3f}")
                    rows += [{"architecture": source, "score": place, "threshold": words} for source in labels]
    return rows


def _bars(
    records: CorpusRecords,
    name: str,
    title: str,
    caption: str,
    rows: list[dict],
    label: str,
    value: str,
    form: str,
    words: str,
) -> Figure:
    """Horizontal bars with their values, in the order of the rows."""
    canvas = Canvas(records)
    alt = canvas.alt
    most = max(row[value] for row in rows)
    y = alt.Y(f"{label}:N", sort=[row[label] for row in rows], title=None).axis(labelLimit=210)
    x = alt.X(f"{value}:Q", title=None, scale=alt.Scale(domain=[0, 1.12 * most], nice=False))
    x = x.axis(labels=False, ticks=False, grid=False, domain=False)
    base = canvas.chart(rows)
    bars = base.mark_bar(height=BAR - 8, color=style.PALETTE[0]).encode(x, y, tooltip=canvas.tooltip((label, words)))
    text = base.mark_text(align="left", dx=4, style=style.INK).encode(x, y, text=alt.Text(f"{value}:Q", format=form))
    drawn = canvas.layer(bars, text).properties(width=WIDTH, height=BAR * len(rows))
    return canvas.figure(name, title, caption, drawn)


SHOWN = 3  # most examples of a rule or a reason
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
Progress = Callable[[str, int, int], None]


def write_corpus(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    tokenizer_name: str | None = None,
    measure_bytes: int = MEASURED,
    progress: Progress | None = None,
) -> tuple[Path, CorpusRecords]:
    """Writes the page of a corpus, and a PNG and an SVG of each figure beside it.

    Args:
        folders, tokenizer, measure_bytes: as in `read_corpus`.
        out: the page; default `report/index.html` in the last of the folders.
        tokenizer_name: how the command named the tokenizer.

    Returns:
        The path of the page, and what it shows.

    Raises:
        ConfigError: as `read_corpus`; or the page cannot be written, or the extra `study` is not installed.
    """
    check_study(FIGURES, "report")
    shell.check_page(shell.page_name(folders[-1], out))
    records = read_corpus(folders, tokenizer, measure_bytes=measure_bytes, progress=progress)
    page = shell.page_path(folders[-1], out)
    options = {"tokenizer": tokenizer_name, "out": out}
    options["measure_bytes"] = None if measure_bytes == MEASURED else measure_bytes
    command = shell.typed("linnet", "corpus", "report", *folders, **options)
    figures = {figure.name: figure for figure in draw(records)}
    sections = {name: shell.section(on_page(figure), command) for name, figure in figures.items()}
    shell.write_page(page, _page(records, sections, command), figures.values())
    return page, records


def _page(records: CorpusRecords, sections: dict[str, str], command: str) -> str:
    parts = [
        f'<p class="lead">{_lead(records)}</p>',
        *(f'<p class="notice">{visible(problem)}.</p>' for problem in records.problems),
        *_findings(records),
        shell.key(records.architectures) if len(records.sources) > 1 else "",
        *_holdings(records),
        sections.get("stages", ""),
        _stage_table(records),
        sections.get("drops", ""),
        _drop_table(records),
        *_rules(records),
        *_unreadable(records),
        sections.get("scores", ""),
        *_score_table(records),
        sections.get("characters-per-token", ""),
        *_token_table(records),
        *_examples(records),
        *_making(records, command),
    ]
    return shell.document(f"Corpus: {records.name}", [part for part in parts if part])


def visible(text: object) -> str:
    """Returns text as HTML in which nothing acts: markup is escaped, and characters that are not seen, such as those
    that turn the direction of a line, are written as their numbers."""
    return "".join(
        f'<span class="code">U+{ord(character):04X}</span>' if is_hidden(character) else escape(character)
        for character in str(text)
    )


def about(records: CorpusRecords, number: float | None) -> str:
    """Returns a number of tokens in words, with a sign where it is an estimate."""
    if number is None:
        return units.MISSING
    return ("≈ " if records.measured < 1 else "") + units.count(number)


def _lead(records: CorpusRecords) -> str:
    total, stages = records.total, units.listed([step.name for step in records.steps])
    tokens = "" if total.tokens is None else f", {about(records, total.tokens)} tokens"
    text = f"<b>{total.documents:,} documents, {units.size(total.bytes)}{tokens}</b>"
    return f"{text} after {units.plural(len(records.steps), 'stage')} ({visible(stages)})."


def _findings(records: CorpusRecords) -> list[str]:
    lines = []
    total = records.total
    read, documents = (
        sum(step.of(f"{unit} read", step.raw) for step in records.steps) for unit in ("bytes", "documents")
    )
    if read:
        share = (
            f"{units.percent(total.bytes / read, 3)} of the bytes and {units.percent(total.documents / documents, 3)}"
        )
        lines.append(f"{share} of the documents that were read are left.")
    drops = [(number, step, reason) for step in records.steps for reason, number in step.drops().items()]
    if drops:
        number, step, reason = max(drops, key=lambda drop: drop[0])
        out = sum(number for number, *_ in drops)
        most = f"the most ({number:,}) by {visible(step.name)}: {visible(reason)}"
        lines.append(f"{units.plural(out, 'document')} were left out, {most}.")
    if len(records.sources) > 1 and total.bytes:
        name, tally = next(iter(records.sources.items()))
        lines.append(
            f"The largest source is {visible(name)}, with {units.percent(tally.bytes / total.bytes)} of the bytes."
        )
    if records.token_scripts:
        share = next(iter(records.token_scripts.values()))
        name = next(iter(records.token_scripts))
        ratio = share.characters / share.tokens
        lines.append(f"A token holds {ratio:.2f} characters of {visible(name)} on average.")
    bad = sum(sum(step.group("unreadable").values()) for step in records.steps)
    if bad:
        lines.append(f"{units.plural(bad, 'row')} could not be read.")
    return shell.findings(lines) if lines else []


def _holdings(records: CorpusRecords) -> list[str]:
    """The two halves of Table 10: by source, and by script where the paper has languages."""
    estimate = ""
    if records.measured < 1:
        estimate = f" Tokens and scripts are estimates from {units.percent(records.measured)} of the bytes."
    tokens = (
        " Give --tokenizer to count tokens."
        if records.tokenizer is None
        else f" Tokens are those of {visible(records.tokenizer.name)}, with an end of each document."
    )
    script = (
        "A document has the script of most of its letters, by the names of the letters in Unicode. Scripts are not "
        "languages: English and code are both Latin. Give code a source of its own to count it apart."
    )
    return [
        "<h2>What the corpus holds</h2>",
        f'<p class="caption">In the form of Table 10 of paper 001.{tokens}{estimate}</p>',
        _tally_table(records, "sources", "Source", records.sources, exact=True),
        "<h3>By script</h3>",
        f'<p class="caption">{script}</p>',
        _tally_table(records, "scripts", "Script", records.scripts, exact=records.measured >= 1),
    ]


def _tally_table(records: CorpusRecords, name: str, title: str, rows: dict[str, Tally], exact: bool) -> str:
    total = records.total
    by = "tokens" if total.tokens else "bytes"
    lines = []
    for label, tally in [*rows.items(), ("Total", total)]:
        whole, part = (total.tokens, tally.tokens) if total.tokens else (total.bytes, tally.bytes)
        share = (part or 0) / whole if whole else 0.0
        documents = f"{round(tally.documents):,}" if exact or label == "Total" else "≈ " + units.count(tally.documents)
        cells = [
            (documents, tally.documents),
            (units.size(tally.bytes), tally.bytes),
            (about(records, tally.tokens), tally.tokens),
        ]
        columns = [shell.sorted_by(None if value is None else round(value), text) for text, value in cells]
        mark = "" if label == "Total" else _bar(share)
        columns.append(shell.sorted_by(f"{share:.6f}", mark + units.percent(share, 3)))
        known = (
            visible(label)
            if title == "Script" or label == "Total"
            else shell.swatch(records.architectures, plain(label))
        )
        lines.append((known, *columns))
    return shell.table(name, (f"*{title}", "#Documents", "#Size", "#Tokens", f"#Share of {by}"), lines)


def _bar(share: float) -> str:
    return f'<i class="share" style="width:{max(1, round(60 * min(1.0, share)))}px"></i>'


def _stage_table(records: CorpusRecords) -> str:
    rows = []
    for step in records.steps:
        documents, left = step.of("documents read"), step.of("documents written")
        size, kept = step.of("bytes read"), step.of("bytes written")
        copies = [f"{REMOVED}/{reason}/" for reason in COPIES]
        removed = sum(n for key, n in step.counts.items() if key.startswith(tuple(copies)))
        cells = [
            f"{documents:,}",
            f"{left:,} ({units.percent(left / documents, 3)})" if documents else f"{left:,}",
            units.size(size),
            f"{units.size(kept)} ({units.percent(kept / size, 3)})" if size else units.size(kept),
            units.plural(lines, "line") if (lines := step.of("lines removed")) else f"{removed:,}" if removed else "",
        ]
        rows.append((visible(step.name), *cells, _settings(step.values.get("settings"))))
    columns = ("*Stage", "#Documents read", "#left", "#Bytes read", "#left", "#Duplicates", "Settings")
    return shell.table("stages-table", columns, rows)


def _settings(values: object) -> str:
    """Returns the settings of a stage in a line where they are few, and folded away where they are many."""
    if not isinstance(values, dict):
        return ""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict | list)}
    if len(values) == len(plain) <= 6:
        return f'<span class="fine">{visible(", ".join(f"{key} {value}" for key, value in plain.items()))}</span>'
    lines = "\n".join(f"{key}: {value}" for key, value in values.items())
    return f"<details><summary>{len(values)} settings</summary><pre>{visible(lines)}</pre></details>"


def _drop_table(records: CorpusRecords) -> str:
    rows = []
    for step in records.steps:
        read = step.of("documents read")
        for reason, number in step.drops().items():
            share = number / read if read else 0.0
            cells = (shell.sorted_by(number, f"{number:,}"), shell.sorted_by(share, units.percent(share)))
            rows.append((visible(step.name), visible(reason), *cells))
    return shell.table("drop-table", ("Stage", "Reason", "#Documents", "#Of those it read"), rows, "sortable")


def _rules(records: CorpusRecords) -> list[str]:
    rows = []
    for step in records.steps:
        changed, removed = step.group("changed"), step.group("removed")
        read = step.of("documents read")
        for rule in changed:
            share = changed.get(rule, 0) / read if read else 0.0
            cells = [(changed.get(rule, 0), ",d"), (share, ".2%"), (removed.get(rule, 0), ",d")]
            numbers = [shell.sorted_by(value, f"{value:{form}}") for value, form in cells]
            rows.append((visible(step.name), visible(rule), *numbers))
        for what, number in step.group("kept").items():
            rows.append((visible(step.name), visible(what), f"{number:,} left as they are", "", ""))
        if lines := step.of("lines removed"):
            rows.append((visible(step.name), "copied lines", "", "", units.plural(lines, "line")))
    columns = ("Stage", "Rule", "#Documents changed", "#Of those it read", "#Characters removed")
    return ["<h2>What rules changed</h2>", shell.table("rules", columns, rows, "sortable")] if rows else []


def _unreadable(records: CorpusRecords) -> list[str]:
    rows = []
    for step in records.steps:
        for kind, number in step.group("unreadable").items():
            samples = step.samples.get(f"unreadable.{kind}", [])
            example = f"{_origin(samples[0])}: {visible(samples[0].get('reason', ''))}" if samples else ""
            rows.append((visible(step.name), visible(kind), f"{number:,}", example))
        if skipped := step.values.get("skipped"):
            first = (step.values.get("skipped_files") or [""])[0]
            rows.append((visible(step.name), "files skipped", f"{skipped:,}", visible(first)))
    table = shell.table("unreadable", ("Stage", "What", "#Rows", "?For example"), rows)
    return ["<h2>What could not be read</h2>", table] if rows else []


def _score_table(records: CorpusRecords) -> list[str]:
    rows = []
    for label, scores in records.scores.items():
        known = quantiles(scores)
        numbers = (f"{known['documents']:,}", *(f"{known[name]:.3f}" for name in _QUANTILES))
        rows.append((shell.swatch(records.architectures, plain(label)), *numbers))
    columns = ("*Source", "#Documents", *(f"#{name}" for name in _QUANTILES))
    return [shell.table("score-table", columns, rows)] if rows else []


_QUANTILES = ("lowest", "1 %", "10 %", "median", "90 %", "99 %", "highest")


def _token_table(records: CorpusRecords) -> list[str]:
    rows = []
    for name, share in records.token_scripts.items():
        cells = (units.size(share.bytes), f"{share.tokens:,}")
        cells += (f"{share.characters / share.tokens:.2f}", f"{share.bytes / share.tokens:.2f}")
        rows.append((visible(name), *cells))
    columns = ("*Script", "#Size", "#Tokens", "#Characters per token", "#Bytes per token")
    return [shell.table("tokens", columns, rows)] if rows else []


def _examples(records: CorpusRecords) -> list[str]:
    parts = []
    for step in records.steps:
        for name, samples in step.samples.items():
            group, _, reason = name.partition(".")
            if group != "unreadable" and samples and reason not in _copies(step):
                shown = "".join(_example(sample, step.per) for sample in samples[:SHOWN])
                parts.append(_folded(f"{step.name}: {name.replace('.', ', ', 1)}", len(samples[:SHOWN]), shown))
        for reason, copies in _copies(step).items():
            shown = "".join(_copy(copy, reason) for copy in copies[:SHOWN])
            parts.append(_folded(f"{step.name}: {reason}", len(copies[:SHOWN]), shown))
        for label, group in _tails(step).items():
            for tail in ("lowest", "highest"):
                if not group[tail]:
                    continue
                shown = "".join(_example(sample, step.per) for sample in group[tail][:SHOWN])
                parts.append(_folded(f"{step.name}: {tail} scores of {label}", len(group[tail][:SHOWN]), shown))
    if not parts:
        return []
    without = [step.name for step in records.steps if step.folder is None]
    caption = "What stages changed and left out, chosen by a hash of the documents. Characters that are not seen are "
    caption += "written as their numbers."
    if without:
        caption += f" Name the folders of {units.listed(without)} too for their examples."
    parts[0] = parts[0].replace("<details", "<details open", 1)
    return shell.captioned("Before and after", visible(caption), *parts)


def _folded(title: str, number: int, shown: str) -> str:
    count = f' <span class="fine">{units.plural(number, "example")}</span>'
    return f'<details class="examples"><summary>{visible(title)}{count}</summary>{shown}</details>'


def _example(sample: dict, per: str) -> str:
    score = sample.get("score")
    words = f" · {score:.3f} nats per {per}" if isinstance(score, int | float) else ""
    words += f" · {visible(sample['reason'])}" if "reason" in sample else ""
    if isinstance(sample.get("before"), str) and isinstance(sample.get("after"), str):
        before, after = _compared(sample["before"], sample["after"])
        body = f'<div class="both"><pre>{before}</pre><pre>{after}</pre></div>'
    elif isinstance(sample.get("lines"), list):
        body = f"<pre>{visible(chr(10).join(map(str, sample['lines'])))}</pre>"
    else:
        body = f"<pre>{visible(sample.get('text', ''))}</pre>"
    return f'<div class="example"><p class="files">{_origin(sample)}{words}</p>{body}</div>'


def _copy(example: dict, reason: str) -> str:
    removed, kept = example["removed"], example["because of"]
    similar = f" · similarity {example['similarity']:.3f}" if isinstance(example.get("similarity"), int | float) else ""
    link = "holds" if reason == "evaluation item" else "is a copy of"
    origin = f"{_origin(removed)} {link} {_origin(kept)}{similar}"
    first, second = _compared(str(removed.get("text", "")), str(kept.get("text", "")))
    body = f'<div class="both"><pre>{first}</pre><pre>{second}</pre></div>'
    return f'<div class="example"><p class="files">{origin}</p>{body}</div>'


def _copies(step: Step) -> dict[str, list[dict]]:
    examples = (step.values.get("results") or {}).get("examples") if step.values["stage"] == "dedup" else None
    return examples if step.folder is not None and isinstance(examples, dict) else {}


def _tails(step: Step) -> dict[str, dict]:
    results = (step.values.get("results") or {}) if step.values["stage"] == "filter" and step.folder is not None else {}
    return {
        label: group
        for label, group in results.items()
        if isinstance(group, dict) and {"lowest", "highest"} <= set(group)
    }


def _compared(before: str, after: str) -> tuple[str, str]:
    """Returns two texts as HTML, in which what only one of them has is marked."""
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    first, second = [], []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        gone, come = visible("".join(old[a:b])), visible("".join(new[c:d]))
        first.append(gone if kind == "equal" or not gone else f"<del>{gone}</del>")
        second.append(come if kind == "equal" or not come else f"<ins>{come}</ins>")
    return "".join(first), "".join(second)


def _origin(sample: dict) -> str:
    return visible(f"{sample.get('source', '')}/{sample.get('file', '')}:{sample.get('row', '')}")


def _making(records: CorpusRecords, command: str) -> list[str]:
    facts = {
        "Stages": "<br>".join(_digests(step) for step in records.steps),
        "Tokenizer": ""
        if records.tokenizer is None
        else visible(f"{records.tokenizer.name}, {records.tokenizer.digest}"),
        "Measured": f"{units.percent(records.measured, 3)} of the bytes",
    }
    return shell.how_made(command, "stage.json and the shards", facts)


def _digests(step: Step) -> str:
    read = ", ".join(
        f"{source.get('label', '')} {str(source.get('digest', ''))[:12]}" for source in step.values["inputs"]
    )
    folder = f" in {step.folder}" if step.folder else ""
    return visible(f"{step.name}{folder}: settings {step.values.get('settings_digest', '')}, read {read}")
