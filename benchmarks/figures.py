"""Draws the pictures of docs/kernels.md from the tables in benchmarks/results. Needs no GPU, only the extra `study`.

    python benchmarks/figures.py --gpu h200

Writes docs/images/<name>-<gpu>.svg and .png: attention (time and memory against length: paper 001, Figure 4), srmsnorm
(Figure 7), training (tokens a second of whole models against length: Figure 1).
"""

import argparse
from pathlib import Path

import altair as alt
import timing
import vl_convert

from linnet.report import style

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NAMES = {
    "lightning": "Linnet, lightning",
    "srmsnorm": "Linnet",
    "cudnn": "softmax, cuDNN",
    "flash": "softmax, FlashAttention-2 (PyTorch)",
    "left product": "linear, plain PyTorch",
    "formula": "the formula, eager",
    "torch.compile": "the formula, torch.compile",
    "tnl": "TNL",
    "hgrn2": "HGRN2",
    "gdn": "GDN",
    "mamba2": "Mamba-2",
    "hgrn": "HGRN",
    "gla": "GLA",
    "gdn-fla": "GDN (fla)",
    "mamba2-fla": "Mamba-2 (fla)",
    "lightnet": "LightNet",
    "cosformer2": "cosFormer2",
    "llama": "LLaMA",
    "llama-transformers": "LLaMA (transformers)",
    "hgrn2-fla": "HGRN2 (fla)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", help="the end of the tables' names")
    gpu = parser.parse_args().gpu
    for name, draw in {"attention": draw_attention, "srmsnorm": draw_srmsnorm, "training": draw_training}.items():
        chart = draw(gpu)
        if chart is None:
            continue
        spec = chart.to_dict() | {"config": style.theme(font=style.PICTURE_FONT)}
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / f"{name}-{gpu}.svg").write_text(vl_convert.vegalite_to_svg(spec))
        (IMAGES / f"{name}-{gpu}.png").write_bytes(vl_convert.vegalite_to_png(spec, scale=2))
        print(IMAGES / f"{name}-{gpu}.svg")


def table(name: str, gpu: str) -> list[dict]:
    """Rows of a result, numbers as numbers."""
    return [
        {key: number(value) for key, value in row.items()} for row in timing.read(timing.RESULTS / f"{name}-{gpu}.csv")
    ]


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def draw_attention(gpu: str) -> alt.HConcatChart | None:
    """Time and memory of 131,072 tokens against the length of the sequences that they are cut into."""
    rows = table("figure4", gpu)
    if not rows:
        return None
    times = [row | {"backward_ms": row["both_ms"] - row["forward_ms"]} for row in rows]
    length = "tokens per sequence"
    return alt.hconcat(
        panel(times, "length", "forward_ms", length, "ms", "Forward"),
        panel(times, "length", "backward_ms", length, "ms", "Backward"),
        panel(times, "length", "memory_gib", length, "GiB", "Peak memory, forward and backward"),
    )


def draw_srmsnorm(gpu: str) -> alt.VConcatChart | None:
    """Time against length at width 3,072, and share of the copy bandwidth against width with equal work."""
    rows = table("norm", gpu)
    for row in rows:
        row["backward_ms"] = row["both_ms"] - row["forward_ms"]
        row["forward_share"] = row["forward_floor_ms"] / row["forward_ms"]
        row["backward_share"] = (row["both_floor_ms"] - row["forward_floor_ms"]) / row["backward_ms"]
    lengths = [row for row in rows if row["along"] == "length"]
    widths = [row for row in rows if row["along"] == "width"]
    if not lengths or not widths:
        return None
    title, share = "tokens (width 3,072)", "share of copy bandwidth"
    return alt.vconcat(
        alt.hconcat(
            panel(lengths, "tokens", "forward_ms", title, "ms", "Forward"),
            panel(lengths, "tokens", "backward_ms", title, "ms", "Backward"),
        ),
        alt.hconcat(
            panel(widths, "width", "forward_share", "width (2²⁸ numbers)", share, "Forward", logarithmic=False),
            panel(widths, "width", "backward_share", "width (2²⁸ numbers)", share, "Backward", logarithmic=False),
        ),
    )


def draw_training(gpu: str) -> alt.Chart | None:
    """Tokens a second against length; the fastest setting of each model at each length."""
    best: dict[tuple, dict] = {}
    for row in table("models", gpu):
        if row["tokens"] != 32_768:
            continue
        row["op"], key = row["model"], (row["model"], row["length"])
        if key not in best or row["tokens_per_second"] > best[key]["tokens_per_second"]:
            best[key] = row | {"thousands": row["tokens_per_second"] / 1e3}
    if not best:
        return None
    title = "Training about 390M parameters on one GPU, 32,768 tokens per step"
    return panel(
        list(best.values()), "length", "thousands", "tokens per sequence", "1,000 tokens/s", title, False, (620, 320)
    )


def panel(
    rows: list[dict],
    x: str,
    y: str,
    x_title: str,
    y_title: str,
    title: str,
    logarithmic: bool = True,
    size: tuple[int, int] = (300, 240),
) -> alt.LayerChart:
    """Lines of all contenders over a logarithmic axis of powers of two."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    labels = [NAMES.get(op, op) for op in ops]
    data = alt.Data(values=[{"x": row[x], "y": row[y], "who": NAMES.get(row["op"], row["op"])} for row in rows])
    hue = alt.Color("who:N", scale=alt.Scale(domain=labels, range=list(style.PALETTE[: len(ops)])), sort=labels)
    hue.legend = alt.Legend(title=None, orient="bottom", columns=3, labelLimit=400)
    mark = alt.Shape("who:N", scale=alt.Scale(domain=labels, range=list(style.SHAPES[: len(ops)])), sort=labels)
    mark.legend = alt.Legend(title=None, orient="bottom", columns=3, labelLimit=400)
    ticks = sorted({row[x] for row in rows})
    across = alt.X(
        "x:Q",
        title=x_title,
        scale=alt.Scale(type="log", base=2, domain=[ticks[0], ticks[-1]]),
        axis=alt.Axis(values=ticks, labelExpr="datum.value >= 1024 ? datum.value / 1024 + 'k' : datum.value"),
    )
    values = [row[y] for row in rows]
    if logarithmic:
        domain = style.padded(values, True)
        places = style.decimal_ticks(*domain)
        up = alt.Y("y:Q", title=y_title, scale=alt.Scale(type="log", domain=domain, nice=False))
        up.axis = alt.Axis(values=places, format="~g")
    else:
        up = alt.Y("y:Q", title=y_title, scale=alt.Scale(domain=[0, 1.05 * max(values)], nice=False))
    base = alt.Chart(data).encode(x=across, y=up, color=hue)
    lines, points = base.mark_line(strokeWidth=2), base.mark_point(filled=True, size=45, opacity=1).encode(shape=mark)
    return alt.layer(lines, points).properties(title=title, width=size[0], height=size[1])


if __name__ == "__main__":
    main()
