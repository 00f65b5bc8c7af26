"""Reads the sentences and the tables of a report of a study, and says where they contradict each other.

`contradictions(html)` takes the page alone: a number, a name, an order, a crossing or a count in a sentence must be
that of a table on the same page, up to the digits that both show. A sentence of an unknown form is reported too.
"""

import math
import re
from html import unescape

NUMBER = r"(−?[\d,.]+(?:×10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?|10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)"
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def number(text: str) -> float:
    """Reads a number as pages print it: −0.205, 1,850, 55.4k, 1.2×10¹²."""
    text = text.strip().replace(",", "").replace("−", "-")
    scale = SCALES[text[-1]] if text[-1] in SCALES else 1.0
    text = text.rstrip("kMBT")
    if "10" in text and re.search("[⁰¹²³⁴⁵⁶⁷⁸⁹]", text):
        mantissa, _, power = text.rpartition("10")
        return float(mantissa.rstrip("×") or 1) * 10.0 ** int(power.translate(SUPERSCRIPTS))
    return float(text) * scale


def words(html: str) -> str:
    """The text of some HTML on one line: exponents after ^, a bar between the parts of a cell."""
    html = re.sub(r"<sup>(.*?)</sup>", r"^\1", re.sub(r"<sub>(.*?)</sub>", r"_\1", html))
    html = re.sub(r"</div>|<br>", " | ", html)
    return " ".join(unescape(re.sub(r"<[^>]+>", "", html)).replace("\N{NO-BREAK SPACE}", " ").split())


def table(html: str, name: str) -> list[list[str]]:
    """The cells of each row of a table; a cell with `data-v` gives that number's digits. [] without the table."""
    found = re.search(rf'<table id="{name}".*?</table>', html, re.S)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", found[0].partition("<tbody>")[2], re.S) if found else []
    return [
        [re.findall('data-v="([^"]*)"', tag)[0] if "data-v=" in tag else words(cell) for tag, cell in
         re.findall(r"<t[dh]([^>]*)>(.*?)</t[dh]>", row, re.S)]
        for row in rows
    ]  # fmt: skip


def near(one: float, two: float, digits: float = 0.006) -> bool:
    return math.isclose(one, two, rel_tol=digits, abs_tol=1e-9)


def as_percent(value: float, printed: str) -> bool:
    """Whether a percentage is that of a value known to about two hundredths of itself."""
    return abs(100 * value - float(printed)) <= 0.5 * 10.0 ** -len(printed.partition(".")[2]) + 2 * abs(value)


class Law:
    """A law of the table: its formula, intervals and value, as printed; None where it is refused."""

    def __init__(self, cell: str):
        self.refused = cell.startswith("refused")
        if self.refused:
            return
        formula, *lines = (part.strip() for part in cell.split("|"))
        found = re.fullmatch(rf"(?:{NUMBER} \+ )?{NUMBER} C\^{NUMBER}", formula)
        self.constant = number(found[1]) if found[1] else None
        self.exponent = number(found[3])
        self.spans = {m[1]: (number(m[2]), number(m[3])) for line in lines
                      if (m := re.fullmatch(rf"([αβabk]) {NUMBER} to {NUMBER}", line))}  # fmt: skip
        at = next(m for line in lines if (m := re.match(rf"[LND] ([\d,.]+[kMBT]?)(?: \(.*\))? at {NUMBER}$", line)))
        self.value, self.end = number(at[1]), number(at[2])

    def at(self, compute: float) -> float:
        """The loss at some FLOPs, from the printed digits of that at the end of the data."""
        constant = self.constant or 0.0
        return constant + (self.value - constant) * (compute / self.end) ** self.exponent

    def gain(self, compute: float) -> float:
        """The share that twice the compute takes off."""
        return 1 - self.at(2 * compute) / self.at(compute)


class Page:
    def __init__(self, html: str):
        found = re.search(r'<ul class="findings">(.*?)</ul>', html, re.S)
        self.sentences = [words(line) for line in re.findall(r"<li>(.*?)</li>", found[1], re.S)]
        self.html = html
        head = re.search(r'<table id="runs".*?</thead>', html, re.S)[0]
        titles = [words(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", head, re.S)]
        self.runs = [dict(zip(titles, row, strict=True)) for row in table(html, "runs")]
        self.laws = {
            row[0]: {"L": Law(row[1]), "N_opt": Law(row[2]), "D_opt": Law(row[3]), "a + b": row[4], "error": row[5]}
            for row in table(html, "laws")
        }
        self.out = {row[0] for name in ("left-out", "excluded") for row in table(html, name)}
        usable = [run for run in self.runs if run["Run"] not in self.out]
        budgets = [run["Budget (FLOPs)"] for run in usable]
        common = [float(budget) for budget in set(budgets) if budget and budgets.count(budget) > 1]
        self.largest = max(common, default=None)
        self.last = [run for run in usable if self.largest is None or float(run["Budget (FLOPs)"] or 0) == self.largest]
        self.best = {}
        for run in self.last:
            own = self.best.get(run["Architecture"])
            if own is None or float(run["Loss (nats)"]) < float(own["Loss (nats)"]):
                self.best[run["Architecture"]] = run
        self.wrong: list[str] = []

    def check(self, right: bool, sentence: str, why: str) -> None:
        if not right:
            self.wrong.append(f"{why}: {sentence}")

    def names(self, text: str) -> list[str]:
        return [name for name in re.split(r", | and ", text) if name]

    def loss(self, name: str) -> float:
        return float(self.best[name]["Loss (nats)"])


def contradictions(html: str) -> list[str]:
    """Returns what is wrong with each sentence of a page that its tables contradict, [] if all agree."""
    page = Page(html)
    for sentence in page.sentences:
        for start, judge in JUDGES:
            if re.match(start, sentence):
                judge(page, sentence)
                break
        else:
            page.wrong.append(f"not known: {sentence}")
    return page.wrong


def _lowest(page: Page, text: str) -> None:
    if page.largest is not None:
        at = re.match(rf"At the largest budget, {NUMBER} FLOPs", text)
        page.check(bool(at) and near(number(at[1]), page.largest), text, "the largest budget")
    low = min(map(page.loss, page.best))
    why = r" \((?:there are no intervals|the intervals of all differences together hold 0)\)"
    if found := re.search(
        rf"the losses of (.*?) cannot be told apart{why}: .* is (?:between ([\d.]+) and )?([\d.]+) nats", text
    ):
        page.check(set(page.names(found[1])) == set(page.best), text, "all architectures")
        ends = f"{low:.4f}", f"{max(map(page.loss, page.best)):.4f}"
        page.check(ends == (found[2] or found[3], found[3]), text, f"the losses are {ends}")
        page.check("is higher" not in text, text, "an order of what cannot be told apart")
        return
    found = re.search(r"seen is ([\d.]+) nats per token.*?, of (\S+) with (\S+) parameters and (\S+) tokens\.", text)
    if found is not None:
        run = page.best.get(found[2])
        page.check(run is not None and page.loss(found[2]) == low and found[1] == f"{low:.4f}", text, "the lowest loss")
        if run is not None:
            right = near(number(found[3]), float(run["N"])) and near(number(found[4]), float(run["D (tokens)"]))
            page.check(right, text, "parameters and tokens of that run")
    claimed: set[str] = set()
    for higher, lower in re.findall(
        r"The loss of ([^.]*(?:\.\d[^.]*)*?) is higher(?: than that of ([^.]*)| at [^.]*, by the laws)?\.", text
    ):
        for name, percent in re.findall(r"(\S+) \(\+([\d.]+) %\)", higher):
            claimed.add(name)
            if "by the laws" in text:
                first = page.laws[found[2]]["L"].value
                right = abs(page.laws[name]["L"].value / first - 1 - float(percent) / 100) < 2e-3
            elif lower:  # by the laws, as the lowest loss seen cannot be told apart from any
                gaps = [page.laws[name]["L"].value / page.laws[other]["L"].value - 1 for other in page.names(lower)]
                right = abs(min(gaps) - float(percent) / 100) < 2e-3 + 0.05 * abs(min(gaps))
            else:
                right = near(page.loss(name) / low - 1, float(percent) / 100, 0.06)
            page.check(right, text, f"how much higher the loss of {name} is")
    for level in re.findall(r"The loss of ([^.]*?) cannot be told apart from it", text):
        page.check(not claimed & set(page.names(level)), text, "told apart, and not")
        page.check(claimed | set(page.names(level)) | {found[2]} == set(page.best), text, "every architecture once")


def _slopes(page: Page, text: str) -> None:
    known = {name: laws["L"] for name, laws in page.laws.items() if not laws["L"].refused}

    at = re.search(rf"twice the compute of {NUMBER} FLOPs", text)
    compute = number(at[1]) if at else 0.0
    common = min((law.end for law in known.values()), default=0.0)
    page.check("compute of" not in text or near(compute, common, 0.05), text, "the largest common compute")

    def gain(name: str, percent: str) -> None:
        seen = known[name].gain(compute or known[name].end)
        page.check(as_percent(seen, percent), text, f"twice the compute takes {seen:.2%} off the loss of {name}")

    faster = re.match(r"The loss of (.*) falls faster with compute than that of (\S+) \(([\d.]+) %\)", text)
    level = re.match(r"How fast .* between (.*?) \(.*takes ([\d.]+) % to ([\d.]+) % off", text)
    if alone := re.match(rf"The loss of (\S+) falls as (?:{NUMBER} plus )?C\^{NUMBER}", text):
        law = known[alone[1]]
        page.check(near(number(alone[3]), law.exponent), text, "the exponent")
        page.check((number(alone[2]) if alone[2] else None) == law.constant, text, "the constant")
        if ends := re.search(rf"\(95 %: {NUMBER} to {NUMBER}\)", text):
            page.check((number(ends[1]), number(ends[2])) == law.spans["α"], text, "the interval of the exponent")
        gain(alone[1], re.search(r"takes ([\d.]+) % off", text)[1])
    elif faster:
        gain(faster[2], faster[3])
        for name, percent in re.findall(r"(\S+) \(([\d.]+) %\)", faster[1]):
            gain(name, percent)
            page.check(float(percent) > float(faster[3]), text, "who falls faster")
    elif level:
        names = page.names(level[1])
        gains = sorted(known[name].gain(compute) for name in names)
        for seen, printed in ((gains[0], level[2]), (gains[-1], level[3])):
            page.check(as_percent(seen, printed), text, "the span of the gains")
    lowest = re.findall(r"The laws? of (.*?) runs? through the lowest losses seen", text)
    page.check(bool(alone or faster or level or lowest), text, "not known")
    for names in lowest:
        for name in page.names(names):
            row = re.search(
                rf"</i>{re.escape(name)}</span></th>.*?</tr>", page.html[page.html.index('id="laws"') :], re.S
            )
            page.check("through the lowest losses seen" in row[0], text, f"the table says how the law of {name} runs")


def _sizes(page: Page, text: str) -> None:
    unknown = " ".join(re.findall(r"is unknown (.*)", text))
    for quantity, symbol in (("N_opt", "a"), ("D_opt", "b")):
        named = {n: laws[quantity] for n, laws in page.laws.items() if not laws[quantity].refused}
        for name, low, high in re.findall(rf"for (\S+) \(the 95 % interval of {symbol}, {NUMBER} to {NUMBER}", unknown):
            span = named[name].spans[symbol]
            page.check(all(near(number(e), s, 0.05) for e, s in zip((low, high), span, strict=True)), text, "interval")
        known = {n: law for n, law in named.items() if f"for {n} (" not in unknown}
        if between := re.search(rf"with {symbol} (?:between|from) {NUMBER}.*? (?:and|to) {NUMBER} ?\(", text):
            ends = sorted(law.exponent for law in known.values())
            right = abs(number(between[1]) - ends[0]) < 6e-3 and abs(number(between[2]) - ends[-1]) < 6e-3
            page.check(right, text, f"the smallest and the largest {symbol} are {ends[0]} and {ends[-1]}")
        elif alone := re.search(rf"with {symbol} = {NUMBER} for (\S+)(?: (\d+))?", text):
            values = [known[alone[2]].exponent] if alone[2] in known else [law.exponent for law in known.values()]
            page.check(all(abs(number(alone[1]) - value) < 6e-3 for value in values), text, f"the value of {symbol}")
    if far := re.search(rf"a \+ b goes as far as {NUMBER}", text):
        page.check(any(near(number(far[1]), number(laws["a + b"])) for laws in page.laws.values()
                       if laws["a + b"] != "–"), text, "a + b")  # fmt: skip


def _held_out(page: Page, text: str) -> None:
    errors = [number(found[1]) for laws in page.laws.values() if (found := re.match(r"([\d.]+) %", laws["error"]))]
    printed = [number(value) for value in re.findall(r"([\d.]+) %", text)]
    page.check((printed[0], printed[-1]) == (min(errors), max(errors)), text, f"held-out errors of {errors}")


def _crossing(page: Page, text: str) -> None:
    rows = {frozenset(row[0].split(" and ")): row for row in table(page.html, "crossings")}
    form = rf"The laws of (\S+) and (\S+) cross at {NUMBER} FLOPs \(95 %: {NUMBER} to {NUMBER}\); above it (\S+) has"
    page.check(len(re.findall(form, text)) == text.count("cross at"), text, "not known")
    for one, two, at, low, high, lower in re.findall(form, text):
        row = rows.get(frozenset((one, two)), [""] * 3)
        page.check(row[1] == at and row[2] == f"{low} to {high}", text, f"the table has {row[1:3]}")
        steep, flat = (one, two) if lower == one else (two, one)
        gains = [page.laws[name]["L"].gain(number(at)) for name in (steep, flat)]
        page.check(gains[0] > gains[1], text, "which law falls faster")


def _refusals(page: Page, text: str) -> None:
    shown = {quantity: {name for name, laws in page.laws.items() if laws[quantity].refused}
             for quantity in ("L", "N_opt", "D_opt")}  # fmt: skip
    if "had to be" in text:
        page.check(not any(shown.values()), text, f"the table refuses {shown}")
        cells = re.search(r"; (\d+) laws? of other", text)
        others = sum(cell == "refused" for row in table(page.html, "methods") for cell in row)
        others += sum(bool(row[-1]) for row in table(page.html, "conventions"))
        page.check(others == int(cells[1] if cells else 0), text, f"{others} are refused")
    if refused := re.search(r"Refused laws, because the runs cannot tell: (.*)\. The table", text):
        said: dict[str, set[str]] = {quantity: set() for quantity in shown}
        for part in refused[1].split("; "):
            quantities, _, names = part.partition(" of ")
            for quantity in page.names(quantities):
                said[quantity] |= set(page.names(names))
        page.check(said == shown, text, f"the table refuses {shown}")
    elif "had to be" not in text and "could be fitted between" not in text:
        page.check("no scaling law" in text and not page.laws, text, "there are laws")


def _state(page: Page, text: str) -> None:
    form = r"that of (.*): ([\d.]+) (\S+) per sequence, at a loss of ([\d.]+?)(?: or more)?\.$"
    names, size, unit, loss = re.search(form, text).groups()
    low = min(map(page.loss, page.best))
    said = next(line for line in page.sentences if "nats per token" in line)
    higher = set() if "is higher than that" in said else set(re.findall(r"(\S+) \(\+[\d.]+ %\)", said))
    level = [id(run) for name, run in page.best.items() if name not in higher]  # not told apart from the lowest
    close = [run for run in page.last if float(run["Loss (nats)"]) <= 1.02 * low or id(run) in level]
    close = [run for run in close if float(run["State"] or 0) > 0]
    least = min(float(run["State"]) for run in close)
    page.check(near(float(size) * BYTES[unit], least), text, "the smallest state")
    said = [run for run in close if float(run["State"]) == least]
    page.check({run["Architecture"] for run in said} == set(page.names(names)), text, "whose state that is")
    page.check(f"{min(float(run['Loss (nats)']) for run in said):.4f}" == loss, text, "the loss of that run")


def _speed(page: Page, text: str) -> None:
    sums: dict[str, list[float]] = {}
    for run in page.runs:
        if run["Time"] and run["Status"] == "done" and run["Run"] not in page.out:
            own = sums.setdefault(run["Architecture"], [0.0, 0.0])
            own[0] += float(run["C (exact FLOPs)"])
            own[1] += float(run["Time"])
    speeds = {name: flops / seconds for name, (flops, seconds) in sums.items()}
    if told := re.match(
        rf"For the same FLOPs, (\S+) took ([\d.]+) times as long as (\S+), which ran at {NUMBER}", text
    ):
        page.check(
            min(speeds, key=speeds.get) == told[1] and max(speeds, key=speeds.get) == told[3], text, "who is fast"
        )
        page.check(near(speeds[told[3]] / speeds[told[1]], float(told[2]), 0.06), text, "how many times as long")
        page.check(near(speeds[told[3]], number(told[4])), text, "the speed")
    else:
        ends = re.match(rf"The speeds of the architectures, {NUMBER} to {NUMBER} FLOP/s", text)
        right = near(number(ends[1]), min(speeds.values())) and near(number(ends[2]), max(speeds.values()))
        page.check(right, text, "the speeds")


def _left_out(page: Page, text: str) -> None:
    lost, total = re.match(r"(\d+) of ([\d,]+) runs? took", text).groups()
    page.check(int(lost) == len(page.out), text, f"{len(page.out)} rows of the tables")
    page.check(number(total) == len(page.runs), text, "all runs")
    parts = [int(count) for count in re.findall(r"(\d+) [a-z]", text.partition("(")[2])]
    page.check(sum(parts) == int(lost), text, "the sum of the reasons")


def _evaluation(page: Page, text: str) -> None:
    names = re.findall(r"(\S+) with [\d.]+", text) + re.findall(r", of (\S+)\.$", text)
    page.check(set(names) <= {run["Architecture"] for run in page.runs}, text, "architectures")
    values = [number(value) for value in re.findall(r" with ([\d.,]+)", text)]
    page.check(values in (sorted(values), sorted(values, reverse=True)), text, "from the best on")


def _no_run(page: Page, text: str) -> None:
    page.check(not page.last, text, "there are runs")


JUDGES = (
    (r"No run has ended", _no_run),
    (r"At the largest budget|Over all runs", _lowest),
    (r"The loss of .* falls|How fast the loss|The laws? of .* runs? through", _slopes),
    (r"The best model size|How the best model size", _sizes),
    (r"Laws fitted to the smaller", _held_out),
    (r"The laws of \S+ and \S+ cross", _crossing),
    (r"No law of|Refused laws|\d+ of \d+ optima|Each architecture has one size", _refusals),
    (r"Among the runs within", _state),
    (r"For the same FLOPs|The speeds of", _speed),
    (r"\d+ of [\d,]+ runs? took no part", _left_out),
    (r".*: (the best |no run |no architecture |.* cannot be told apart)", _evaluation),
)
