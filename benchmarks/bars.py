"""The tables of docs/kernels.md, from those in benchmarks/results: bars, peers, whole models.

    python benchmarks/bars.py            # prints them
    python benchmarks/bars.py --write    # and puts them into docs/kernels.md

Needs no GPU.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from figures import NAMES, table

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
FEW = (1024, 4096, 16_384)
PRODUCT = 797.0  # TFLOP/s of a large product on an H200, for rows without the one of their run


class Bar(NamedTuple):
    """What is asked, what was measured, and whether that is enough."""

    what: str
    asked: str
    measured: str
    met: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", help="the end of the tables' names")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for name, make in {"bars": bars, "peers": peers, "models": models}.items():
        text = "\n".join(make(options.gpu))
        print(text, end="\n\n")
        if options.write:
            before, mark, rest = PAGE.read_text().partition(f"<!-- {name}: written by benchmarks/bars.py -->\n")
            PAGE.write_text(
                f"{before}{mark}{text}\n<!-- end of {name} -->{rest.partition(f'<!-- end of {name} -->')[2]}"
            )


def bars(gpu: str) -> list[str]:
    """Every bar beside what was measured."""
    lines = ["| what | bar | measured | met | rows |", "|---|---|---|---|---|"]
    for group, judge in JUDGES.items():
        try:
            lines += [
                f"| {bar.what} | {bar.asked} | {bar.measured} | {'yes' if bar.met else '**no**'} | {group} |"
                for bar in judge(table(group, gpu))
            ]
        except (KeyError, ValueError) as missing:  # rows that are not measured yet
            lines.append(f"| {group} | | not measured: {missing} | | |")
    return lines


def peers(gpu: str) -> list[str]:
    """Milliseconds and memory of each op beside its peers at the same shape."""
    lines = ["| op | T, B | forward | and backward | peak GiB |", "|---|---|---|---|---|"]
    for group in ("lightning_peers", "gated_peers", "additive_peers", "scan_peers"):
        for row in sorted(table(group, gpu), key=lambda row: (-row["batch"], row["length"])):
            times = f"{row['forward_ms']:.3f} | {row['both_ms']:.3f} | {row['memory_gib']:.1f}"
            lines.append(f"| {row['op']} | {row['length']:,.0f}, {row['batch']:.0f} | {times} |")
    return lines


def models(gpu: str) -> list[str]:
    """Thousands of tokens per second in steps of 32,768 tokens, eager / compiled; of runs without peers if possible."""
    wanted = {"tokens": 32_768, "recompute": "none", "graph": "False"}
    rows = [row for row in table("models", gpu) if wanted.items() <= row.items()]
    rows.sort(key=lambda row: row["beside"] == "")
    lengths = sorted({row["length"] for row in rows})
    lines = [f"| model | weights | {' | '.join(f'T = {length:,.0f}' for length in lengths)} |"]
    lines.append("|---|---|" + "---|" * len(lengths))
    for model, weights in dict.fromkeys((row["model"], row["weights"]) for row in rows):
        cells = []
        for length in lengths:
            same = {"model": model, "weights": weights, "length": length}
            found = {row["compiled"]: row["tokens_per_second"] / 1e3 for row in rows if same.items() <= row.items()}
            cells.append(" / ".join(f"{found[x]:.0f}" if x in found else "–" for x in ("False", "True")))
        lines.append(f"| {NAMES.get(model, model)} | {weights} | {' | '.join(cells)} |")
    return lines


def find(rows: list[dict], op: str, length: int, batch: int, key: int = 128, value: int = 128) -> dict:
    """The row of an op at a shape. KeyError where it was not measured."""
    wanted = {"op": op, "length": length, "batch": batch, "key": key, "value": value}
    for row in rows:
        if wanted.items() <= row.items():
            return row
    raise KeyError(f"{op}, T = {length}, B = {batch}, {key} x {value}")


def compare(rows: list[dict], slow: str, fast: str, lengths: tuple[int, ...]) -> list[float]:
    """How many times faster one op is than another, forward and both, at each length."""
    pairs = [[find(rows, op, T, 65_536 // T) for op in (slow, fast)] for T in lengths]
    return [a[name] / b[name] for a, b in pairs for name in ("forward_ms", "both_ms")]


def times_floor(row: dict) -> tuple[float, float]:
    return row["forward_ms"] / row["forward_floor_ms"], row["both_ms"] / row["both_floor_ms"]


def over_floor(what: str, rows: list[dict], forward: float, both: float) -> Bar:
    """A bar on times over the floor; the measured ones are those of the worst length for each."""
    found = [times_floor(row) for row in rows]
    worst = [max(column) for column in zip(*found, strict=True)]
    best = [min(column) for column in zip(*found, strict=True)]
    measured = " / ".join(
        f"{low:.2f} to {high:.2f}x" if high - low > 0.005 else f"{high:.2f}x"
        for low, high in zip(best, worst, strict=True)
    )
    return Bar(what, f"<= {forward} / {both}x the floor", measured, worst[0] <= forward and worst[1] <= both)


def milliseconds(what: str, rows: list[dict], forward: float, both: float) -> Bar:
    worst = [max(row[name] for row in rows) for name in ("forward_ms", "both_ms")]
    best = [min(row[name] for row in rows) for name in ("forward_ms", "both_ms")]
    measured = " / ".join(
        f"{low:.3g} to {high:.3g}" if len(rows) > 1 else f"{high:.3g}" for low, high in zip(best, worst, strict=True)
    )
    return Bar(what, f"<= {forward} / {both} ms", f"{measured} ms", worst[0] <= forward and worst[1] <= both)


def lightning(rows: list[dict]) -> Iterator[Bar]:
    many = [find(rows, "lightning", T, 65_536 // T) for T in LENGTHS]
    yield over_floor("lightning, T = 1k to 16k, forward / and backward", many, 1.3, 1.9)
    memory = max(row["memory_gib"] for row in many)
    yield Bar("its peak memory", "<= 2.5 GiB", f"{memory:.2f} GiB", memory <= 2.5)
    for T in (65_536, 131_072):
        yield over_floor(f"B = 1, T = {T:,}", [find(rows, "lightning", T, 1)], 1.7, 2.5)
    yield milliseconds("B = 1, T = 8,192", [find(rows, "lightning", 8192, 1)], 0.10, 0.35)
    for what, key, value, forward, both in (
        ("heads of 64", 64, 64, 1.3, 1.9),
        ("heads of 256", 256, 256, 2.0, 3.0),
        ("keys of 256, values of 128", 256, 128, 1.6, 2.4),
    ):
        shaped = [find(rows, "lightning", T, 65_536 // T, key, value) for T in FEW]
        yield over_floor(what, shaped, forward, both)


def ssd(rows: list[dict]) -> Iterator[Bar]:
    for what, heads in (("16 heads of 128, T = 1k to 16k", "16/16"), ("one key for 32 heads of 64 (Mamba-2)", "1/32")):
        ours = [row for row in rows if (row["op"], row["heads"]) == ("ssd", heads)]
        if ours:
            yield over_floor(f"scalar decay, {what}", ours, 1.4, 1.9)
        else:
            yield Bar(f"scalar decay, {what}", "<= 1.4 / 1.9x the floor", "not measured", False)


def softmax(rows: list[dict]) -> Iterator[Bar]:
    ratios = compare(rows, "cudnn", "lightning", LENGTHS)
    what = "lightning against cuDNN's softmax, forward and both, T = 1k to 16k"
    yield Bar(what, "faster", f"{min(ratios):.1f} to {max(ratios):.1f} times", min(ratios) > 1)


def gated(rows: list[dict]) -> Iterator[Bar]:
    many = [find(rows, "gated, HGRN2", T, 65_536 // T) for T in LENGTHS]
    yield milliseconds("gated with HGRN2's gates, T = 1k to 16k", many, 0.9, 5.0)


def additive(rows: list[dict]) -> Iterator[Bar]:
    many = [find(rows, "additive", T, 65_536 // T) for T in LENGTHS]
    yield milliseconds("additive, T = 1k to 16k", many, 0.45, 2.5)
    rotated = [find(rows, "additive with LRPE", T, 65_536 // T) for T in LENGTHS]
    yield over_floor("additive with LRPE (keys of 256), T = 1k to 16k", rotated, 1.6, 2.4)
    ratios = compare(rows, "two scans of gated", "additive, not causal", FEW)
    what = "LightNet, not causal, against two scans of our gated, forward and both"
    yield Bar(what, ">= 3 times faster", f"{min(ratios):.1f} to {max(ratios):.1f} times", min(ratios) >= 3)


def norm(rows: list[dict]) -> Iterator[Bar]:
    widths = [row for row in rows if row["along"] == "width"]
    ours = {row["width"]: row for row in widths if row["op"] == "srmsnorm"}
    compiled = {row["width"]: row for row in widths if row["op"] == "torch.compile"}
    forward = [row["forward_floor_ms"] / row["forward_ms"] for row in ours.values()]
    backward = [
        (row["both_floor_ms"] - row["forward_floor_ms"]) / (row["both_ms"] - row["forward_ms"]) for row in ours.values()
    ]
    yield Bar(
        "SRMSNorm, widths 64 to 8,192, forward / backward",
        ">= 85 % of copy bandwidth",
        f"{min(forward):.0%} to {max(forward):.0%} / {min(backward):.0%} to {max(backward):.0%}",
        min(*forward, *backward) >= 0.85,
    )
    slower = [max(ours[w][name] / compiled[w][name] for name in ("forward_ms", "both_ms")) for w in ours]
    worst = f"{max(slower):.2f} times its time at most"
    yield Bar("against torch.compile of the formula", "not slower (2 % are noise)", worst, max(slower) <= 1.02)


def delta(rows: list[dict]) -> Iterator[Bar]:
    ours, theirs = by_shape(rows, "delta"), by_shape(rows, "fla gated delta")
    row, peer = ours[32_768, 1, "16/32"], theirs[32_768, 1, "16/32"]
    forward = row["forward_ms"] / peer["forward_ms"]
    backward = (row["both_ms"] - row["forward_ms"]) / (peer["both_ms"] - peer["forward_ms"])
    yield Bar(
        "gated delta rule, 32,768 tokens, 16 heads of keys and 32 of values, of fla's time, forward / backward",
        "<= 0.46 / 0.44",
        f"{forward:.3f} / {backward:.3f}",
        forward <= 0.46 and backward <= 0.44,
    )
    yield against_fla("against fla at each shape of the table, forward and both", ours, theirs)


def kda(rows: list[dict]) -> Iterator[Bar]:
    ours, theirs = by_shape(rows, "kda"), by_shape(rows, "fla kda")
    yield against_fla("KDA, against fla at each shape of the table, forward and both", ours, theirs)


def by_shape(rows: list[dict], op: str) -> dict[tuple, dict]:
    return {(row["length"], row["batch"], row["heads"]): row for row in rows if row["op"] == op}


def against_fla(what: str, ours: dict[tuple, dict], theirs: dict[tuple, dict]) -> Bar:
    ratios = [theirs[shape][name] / ours[shape][name] for shape in ours for name in ("forward_ms", "both_ms")]
    return Bar(what, "faster", f"{min(ratios):.2f} to {max(ratios):.2f} times", min(ratios) > 1)


def cold_start(rows: list[dict]) -> Iterator[Bar]:
    ours = {row["op"]: row["first_s"] for row in rows if not row["op"].startswith("fla")}
    op, slowest = max(ours.items(), key=lambda item: item[1])
    yield Bar("first forward and backward of an op", "<= 15 s", f"{slowest:.1f} s at most ({op})", slowest <= 15)


def training(rows: list[dict]) -> Iterator[Bar]:
    rows = [row for row in rows if row["graph"] == "False"]
    compared = {"tokens": 32_768, "recompute": "none", "weights": "float32", "beside": "hgrn2-fla"}
    speeds: dict[str, dict[float, float]] = {"hgrn2": {}, "hgrn2-fla": {}}
    for row in rows:
        if row["model"] in speeds and compared.items() <= row.items():
            of_model = speeds[row["model"]]
            of_model[row["length"]] = max(of_model.get(row["length"], 0.0), row["tokens_per_second"])
    ours, theirs = speeds["hgrn2"], speeds["hgrn2-fla"]
    ratios = {length: ours[length] / theirs[length] for length in sorted(ours)}
    measured = ", ".join(f"{ratio:.2f}x at {length / 1024:.0f}k" for length, ratio in ratios.items())
    what = "HGRN2 of 390M, tokens per second against fla's, fastest setting each, weights in float32"
    yield Bar(what, ">= 1.5x", measured, min(ratios.values()) >= 1.5)
    for model, size in (("gdn", "GDN of 441M"), ("mamba2", "Mamba-2 of 368M")):
        wanted = {"length": 4096, "compiled": "False", "beside": f"{model}-fla"}
        times = {row["model"]: row["tokens_per_second"] for row in rows if wanted.items() <= row.items()}
        ratio = times[model] / times[f"{model}-fla"]
        what = f"{size}, tokens per second against fla's, T = 4,096, eager, weights in float32"
        yield Bar(what, ">= 1.4x in one run", f"{ratio:.2f}x", ratio >= 1.4)
    shares = {}
    for model in ("tnl", "hgrn2", "gdn", "mamba2"):
        wanted = {"model": model, "length": 4096, "compiled": "False", "recompute": "none", "beside": ""}
        row = next(row for row in rows if wanted.items() <= row.items())
        shares[model] = 6 * row["parameters"] * row["tokens_per_second"] / 1e12 / (row.get("product_tflops") or PRODUCT)
    measured = ", ".join(f"{NAMES[model]} {share:.0%}" for model, share in shares.items())
    what = (
        "training at about 390M, T = 4,096, eager, weights in float32, 6 FLOPs per parameter, of the rate of a product"
    )
    yield Bar(what, ">= 66%", measured, min(shares.values()) >= 0.66)
    for setting in ("none", "block", "selective"):
        for compiled in ("False", "True"):
            wanted = {"model": "tnl", "tokens": 131_072, "recompute": setting, "compiled": compiled}
            same = {row["length"]: row["tokens_per_second"] for row in rows if wanted.items() <= row.items()}
            if {1024, 131_072} <= set(same):
                change = same[131_072] / same[1024] - 1
                what = f"TNL, T = 131,072 against 1k, {'compiled' if compiled == 'True' else 'eager'}, "
                measured = f"{change:+.1%} ({same[1024]:,.0f} and {same[131_072]:,.0f} tokens/s)"
                yield Bar(f"{what}recompute: {setting}", "within 5 %", measured, abs(change) <= 0.05)


def decode(rows: list[dict]) -> Iterator[Bar]:
    layers = {"tnl": 26, "hgrn2": 26, "gdn": 26, "mamba2": 48}
    steps = {
        (row["model"], row["batch"]): row
        for row in rows
        if row["mode"] == "engine" and row["layers"] == layers.get(row["model"]) and row["states"] != "bfloat16"
    }
    for batch, asked in ((1, 0.48), (64, 0.53)):
        shares = {model: steps[model, batch]["floor_ms"] / steps[model, batch]["token_ms"] for model in layers}
        measured = ", ".join(f"{NAMES.get(model, model)} {share:.0%}" for model, share in shares.items())
        what = f"decoding at about 400M, batch {batch}, of the bandwidth of a copy"
        yield Bar(what, f">= {asked:.0%}", measured, min(shares.values()) >= asked)
    for model in ("gdn", "mamba2"):
        times = [steps[model, batch]["token_ms"] / steps["hgrn2", batch]["token_ms"] for batch in (1, 64)]
        what = f"decoding with {NAMES.get(model, model)}, batch 1 / 64, of HGRN2's time"
        yield Bar(what, "<= 1.15", " / ".join(f"{time:.2f}" for time in times), max(times) <= 1.15)


def released(rows: list[dict]) -> Iterator[Bar]:
    times = {(row["batch"], row["mode"]): row["token_ms"] for row in rows}
    ratios = [times[batch, "static"] / times[batch, "linnet"] for batch in (1, 64)]
    what = "decoding a shape of Qwen3.5-0.8B, batch 1 / 64, against transformers with a static cache, compiled"
    yield Bar(what, ">= 3x", " / ".join(f"{ratio:.2f}x" for ratio in ratios), min(ratios) >= 3)


def float8(rows: list[dict]) -> Iterator[Bar]:
    ratio = max(row["ratio"] for row in rows if row["mode"] == "speed" and row["precision"] == "float8")
    what = "float8 against bfloat16, two layers of TNL 7B, compiled, tokens per second"
    yield Bar(what, ">= 1.25x", f"{ratio:.2f}x", ratio >= 1.25)


JUDGES = {
    "lightning": lightning,
    "softmax": softmax,
    "gated": gated,
    "additive": additive,
    "norm": norm,
    "delta_peers": delta,
    "cold_start": cold_start,
    "kda_peers": kda,
    "ssd": ssd,
    "models": training,
    "decode": decode,
    "released": released,
    "float8": float8,
}

if __name__ == "__main__":
    main()
