"""Scores image classifiers: accuracy, likelihood, calibration, confusions and the worst mistakes.

Images are read in the order of their corpus and are not augmented. The digest of a record is of the pixels, labels and
class names that were scored, so that two classifiers are compared on the same images only.
"""

import base64
import hashlib
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from linnet.data.images.decode import encode_png
from linnet.data.labelled import HeldOut
from linnet.evaluate.classification import Scores, calibration, confusions, join, score_logits, wilson, worst
from linnet.evaluate.likelihood import evaluating
from linnet.evaluate.results import Item, Result, digest_of
from linnet.parallel.mesh import divided

if TYPE_CHECKING:
    from linnet.vision.data import ImageSplit
    from linnet.vision.models import ImageClassifier

TASK = "images"
BATCH = 256  # images per forward pass
MISTAKES = 24  # worst mistakes that a record keeps
PICTURE = 96  # largest side in pixels of their pictures


class ImageScore:
    """Scores of images of a split.

    Attributes:
        scores: what the model made of each image.
        classes: names of the classes.
        digest: of the pixels, labels and class names, 12 hexadecimal digits.
        seconds: time of the forward passes; reading the images is not in it.
        mistakes: the worst mistakes: index, label, predicted, probability of both, and `png`, a picture in base64.
    """

    def __init__(self, scores: Scores, classes: list[str], digest: str, seconds: float, mistakes: list[dict]):
        self.scores, self.classes, self.digest = scores, classes, digest
        self.seconds, self.mistakes = seconds, mistakes

    @property
    def images(self) -> int:
        return len(self.scores.labels)

    def results(self) -> tuple[Result, ...]:
        """Returns accuracy, top-5 accuracy (from six classes on), NLL in nats, and the calibration error."""
        ids = [str(i) for i in range(self.images)]

        def of(metric: str, values: np.ndarray, better: Any = "higher") -> Result:
            return Result.of_items(TASK, metric, map(Item, ids, values.astype(float).tolist()), better)

        results = [of("accuracy", self.scores.top(1))]
        results += [of("top5_accuracy", self.scores.top(5))] if len(self.classes) > 5 else []
        results.append(of("nll", self.scores.nll, "lower"))
        error, _ = calibration(self.scores)
        return (*results, Result(TASK, "calibration_error", error, better="lower", n=self.images))

    def detail(self) -> dict[str, Any]:
        """Returns intervals, chance, bins of confidence, confusions and mistakes, for the record."""
        right = {name: int(self.scores.top(k).sum()) for name, k in (("accuracy", 1), ("top5_accuracy", 5))}
        error, bins = calibration(self.scores)
        chance = [[TASK, "accuracy", 1 / len(self.classes)]]
        chance += [[TASK, "top5_accuracy", 5 / len(self.classes)]] if len(self.classes) > 5 else []
        return {
            "images": self.images,
            "classes": self.classes,
            "shown": [[TASK, "accuracy"], [TASK, "nll"]],
            "chance": chance,
            "wilson": {name: list(wilson(count, self.images)) for name, count in right.items()},
            "calibration_error": error,
            "bins": [vars(bucket) for bucket in bins],
            "confusions": [list(confusion) for confusion in confusions(self.scores)],
            "mistakes": self.mistakes,
            "images_per_second": self.images / self.seconds if self.seconds else math.inf,
        }


@torch.no_grad()
def score_images(
    model: "ImageClassifier",
    split: "ImageSplit",
    classes: list[str],
    batch: int = BATCH,
    mistakes: int = MISTAKES,
    progress: Callable[[int], None] | None = None,
    most: int | None = None,
) -> ImageScore:
    """Scores the images of a split.

    Args:
        split: images as uint8 [C, H, W] of the model's channels, and their labels.
        classes: names of the classes, in the order of the labels.
        batch: images per forward pass.
        mistakes: number of worst mistakes to keep.
        progress: called with the number of images of each batch.
        most: scores this many images, spread evenly over the split; None scores all.

    Raises:
        ValueError: there is no image, or logits are not finite.
    """
    if not len(split):
        raise ValueError("split: has no image to score; name other data")
    device = next(model.parameters()).device
    pixels, numbers = hashlib.sha256(), hashlib.sha256()
    held_out = HeldOut(split, batch, split.spread(most))

    def score(number: int) -> tuple[Scores, float]:
        images, labels = held_out[number]
        images = images.to(device)
        began = time.perf_counter()
        logits = model(images).double().cpu()  # copying to the host waits for the device
        seconds = time.perf_counter() - began
        if progress:
            progress(len(labels))
        return score_logits(logits.numpy(), labels.numpy()), seconds

    with evaluating(model):
        parts = divided(range(len(held_out)), score)
    for images, labels in held_out:
        pixels.update(images.contiguous().numpy().tobytes())
        numbers.update(labels.numpy().astype("<i8").tobytes())
    scores, seconds = join([part for part, _ in parts]), sum(part for _, part in parts)
    kept = [_mistake(split, scores, int(place), int(held_out.order[place])) for place in worst(scores, mistakes)]
    shape = (held_out.size, *split.images([0]).shape[1:])
    digest = digest_of([repr((classes, shape)), pixels.digest(), numbers.digest()])
    return ImageScore(scores, classes, digest, seconds, kept)


def _mistake(split: "ImageSplit", scores: Scores, place: int, index: int) -> dict[str, Any]:
    """Returns the record of the image `index` of a split, whose scores are at `place`."""
    image = split.images([index])[0]
    return {
        "index": index,
        "label": int(scores.labels[place]),
        "predicted": int(scores.predicted[place]),
        "probability": float(scores.confidence[place]),
        "label_probability": math.exp(-float(scores.nll[place])),
        "png": base64.b64encode(encode_png(smaller(image if len(image) in (1, 3) else image[:1]))).decode(),
    }


def smaller(image: torch.Tensor, most: int = PICTURE) -> torch.Tensor:
    """Returns an image [C, H, W] whose sides are at most `most` pixels; it is averaged over squares of pixels."""
    factor = -(-max(image.shape[1:]) // most)
    if factor == 1:
        return image
    pooled = torch.nn.functional.avg_pool2d(image[None].float(), factor, ceil_mode=True, count_include_pad=False)[0]
    return pooled.round().clamp(0, 255).to(torch.uint8)
