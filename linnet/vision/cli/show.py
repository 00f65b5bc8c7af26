"""Tables of `linnet evaluate images` and `samples`."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from linnet.evaluate.results import Evaluation
from linnet.options import BOLD, WIDE, make_table


def show_images(record: Evaluation, path: Path) -> None:
    console, found = Console(), record.detail
    values = {one.metric: one.value for one in record.results}
    speed = f"{found['images_per_second']:,.0f} images per second"
    console.print(f"{record.model['run']}: {found['images']:,} images, {speed}", highlight=False, markup=False)
    table = make_table(style=WIDE | {"show_header": False})
    chances = {metric: value for _, metric, value in found["chance"]}
    for metric, name in (("accuracy", "accuracy"), ("top5_accuracy", "top-5 accuracy")):
        if metric in values:
            low, high = found["wilson"][metric]
            interval = f"95 % interval {low:.2%} to {high:.2%}; guessing: {chances[metric]:.2%}"
            table.add_row(name, f"{values[metric]:.2%}", interval)
    table.add_row("loss", f"{values['nll']:.4f}", "nats per image")
    table.add_row("calibration error", f"{values['calibration_error']:.4f}", f"{len(found['bins'])} bins of confidence")
    console.print(table)
    wrong = sorted((one for one in found["confusions"] if one[0] != one[1]), key=lambda one: -one[2])
    if wrong:
        most = make_table("label", "predicted", "#images", style=BOLD)
        for label, predicted, count in wrong[:5]:
            most.add_row(escape(found["classes"][label]), escape(found["classes"][predicted]), f"{count:,}")
        console.print(most)
    console.print(f"mistakes, confusions and calibration as a page: linnet report {escape(str(path))}", soft_wrap=True,
                  style="dim")  # fmt: skip


def show_samples(record: Evaluation, path: Path) -> None:
    console, found, asked = Console(soft_wrap=True), record.detail, record.asked
    speed = f"{found['samples_per_second']:,.1f} per second"
    drawn = f"{asked['sampler']}, {asked['steps']} steps, guidance {asked['guidance']:g}"
    console.print(
        f"{record.model['run']}: {asked['samples']:,} samples ({drawn}; {speed})", highlight=False, markup=False
    )
    table = make_table(style=WIDE | {"show_header": False})
    distance, kernel = record.results[:2]
    real = found["real"]
    floor = f"to {real['images']:,} training images (held-out images: {real[distance.metric]:.3f})"
    table.add_row(escape(distance.metric), f"{distance.value:.3f}", floor)
    table.add_row(escape(kernel.metric), f"{kernel.value:.5f}", f"standard error {found['kernel_error']:.5f}")
    values = {one.metric: one.value for one in record.results}
    if "asked_class" in values:
        low, high = found["wilson"]
        interval = f"95 % interval {low:.1%} to {high:.1%}"
        table.add_row("asked class", f"{values['asked_class']:.1%}", interval)
    near = "nearer to training images than held-out images are (50 %: equally near)"
    table.add_row("memorised", f"{values['memorised']:.1%}", near)
    if "precision" in values:
        table.add_row("precision", f"{values['precision']:.1%}", "samples that lie among training images")
        table.add_row("recall", f"{values['recall']:.1%}", "training images that lie among samples")
    console.print(table)
    console.print(f"samples as a page: linnet report {escape(str(path))}", soft_wrap=True, style="dim")
