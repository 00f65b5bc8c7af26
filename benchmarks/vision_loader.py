"""Measures how many images the loader decodes and augments per second on one core.

    python benchmarks/vision_loader.py --cifar FOLDER/cifar10 --csv

Cases: CIFAR-10's JPEG files, decoded in each epoch and stored as pixels, with `crop_flip`; JPEG files of 500 x 375
pixels and about 110 kB (as ImageNet's are), resized and cut to 224 with `crop_flip`; and the same with `deit`, if timm
can be imported. The files of 500 x 375 are made here. One core means the CPU time of this process, the best of eight
rounds, because other work on the machine slows memory down; `wall` is the elapsed time. `--csv` writes
benchmarks/results/vision-loader.csv.
"""

import argparse
import csv
import io
import json
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import timing
import torch
from PIL import Image

from linnet.config import parse
from linnet.vision.data import AugmentConfig, ImageBatches, ImageDataConfig, augment_batch, prepare_images
from linnet.vision.data.batches import check_deit

RESULTS = Path(__file__).parent / "results" / "vision-loader.csv"
ROUNDS = 8
BYTES = 110_000  # the mean size of a training image of ImageNet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, help="a folder with train.parquet of CIFAR-10")
    parser.add_argument("--images", type=int, default=64, help="number of files of 500 x 375 to make")
    parser.add_argument("--seconds", type=float, default=5.0, help="CPU seconds per case")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        if arguments.cifar is not None:
            source = str(arguments.cifar / "train.parquet")
            for store in ("encoded", "pixels"):
                config = parse(ImageDataConfig, {"source": source, "max_images": 5000, "store": store})
                rows.append(measured(f"cifar10 {store}", config, cache, "crop_flip", 128, arguments.seconds))
        made, size = photographs(Path(folder, "photographs"), arguments.images)
        config = parse(ImageDataConfig, {"source": str(made), "size": 224, "store": "encoded"})
        rows.append(measured(f"500 x 375, {size / 1000:.0f} kB", config, cache, "crop_flip", 32, arguments.seconds))
        if problems := check_deit():
            print(f"deit is not measured: {problems[0]}")
        else:
            rows.append(measured(f"500 x 375, {size / 1000:.0f} kB", config, cache, "deit", 32, arguments.seconds))
    if arguments.csv:
        with open(RESULTS, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(json.dumps(rows))


def measured(name: str, config: ImageDataConfig, cache: Path, kind: str, batch_size: int, seconds: float) -> dict:
    """Returns a row of results: images per second of batches with a given augmentation, without MixUp and CutMix."""
    corpus = prepare_images(config, cache)
    augment = parse(AugmentConfig, {"kind": kind, "mixup": 0.0, "cutmix": 0.0})
    batches = ImageBatches(corpus.train, batch_size, seed=0, augment=augment)

    def batch(position: int) -> None:
        augment_batch(augment, batches.batch(position), classes=len(corpus.classes), seed=0, position=position)

    batch(0)
    core = elapsed = 0.0
    position = 0
    for _ in range(ROUNDS):
        began, wall, first = time.process_time(), time.perf_counter(), position
        while time.process_time() - began < seconds / ROUNDS:
            position += 1
            batch(position)
        images = (position - first) * batch_size
        core = max(core, images / (time.process_time() - began))
        elapsed = max(elapsed, images / (time.perf_counter() - wall))
    print(f"{name:<24}{kind:<12}{core:>10,.0f} images/s of a core{elapsed:>10,.0f} wall", flush=True)
    row = {"case": name, "augment": kind, "images_per_second": round(core), "images_per_second_wall": round(elapsed)}
    return row | {"machine": platform.machine(), "commit": timing.commit()}


def photographs(folder: Path, count: int) -> tuple[Path, float]:
    """Writes JPEG files with the spectrum of photographs, and returns their folder and mean size in bytes."""
    rng, sizes = np.random.default_rng(0), []
    frequency = np.hypot(np.fft.fftfreq(375)[:, None], np.fft.rfftfreq(500)[None]) + 1 / 500
    for number in range(count):
        noise = rng.normal(size=(3, 375, 500))
        values = np.fft.irfft2(np.fft.rfft2(noise) / frequency, s=(375, 500))  # amplitudes fall as 1 / frequency
        values = values.mean(0, keepdims=True) + 0.3 * values
        values = np.clip(127 + 50 * values / values.std(), 0, 255).astype(np.uint8).transpose(1, 2, 0)
        files = {}
        for quality in range(60, 100, 3):
            file = io.BytesIO()
            Image.fromarray(values).save(file, "JPEG", quality=quality)
            files[quality] = file.getvalue()
        data = min(files.values(), key=lambda data: abs(len(data) - BYTES))
        path = folder / "ab"[number % 2] / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sizes.append(len(data))
    return folder, float(np.mean(sizes))


if __name__ == "__main__":
    main()
