"""Two sets of images compared in the features of a network: Fréchet and kernel distance (KID), precision and recall,
and memorisation.

Fréchet inception distance: Heusel et al. 2017, arXiv:1706.08500, equation 6. Kernel inception distance: Binkowski et
al. 2018, arXiv:1801.01401, section 4. Precision and recall: Kynkäänniemi et al. 2019, arXiv:1904.06991, equations 1 and
2. All sums are float64.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SUBSETS, SUBSET = 100, 1000  # of the kernel distance
SPLITS = 10  # of the Inception Score
NEIGHBOUR = 3  # of precision and recall: a ball reaches to this neighbour
CHUNK = 1024  # rows of a matrix of distances that are held at a time


@dataclass(frozen=True)
class Statistics:
    """Mean and covariance of features.

    Attributes:
        mean: float64 [D]. covariance: float64 [D, D], with the divisor count - 1. count: number of images.
    """

    mean: Tensor
    covariance: Tensor
    count: int


def statistics(features: Iterable[Tensor]) -> Statistics:
    """Returns the statistics of batches of features [n, D].

    Raises:
        ValueError: fewer than two images, or a feature that is not finite.
    """
    rows = torch.cat([batch.double().cpu() for batch in features])
    if len(rows) < 2:
        raise ValueError(f"features: {len(rows)} images have no covariance; use at least 2")
    if not rows.isfinite().all():
        raise ValueError("features: NaN or infinite; use another extractor, or check the images")
    mean = rows.mean(0)
    rows -= mean
    return Statistics(mean, rows.T @ rows / (len(rows) - 1), len(rows))


def frechet_distance(first: Statistics, second: Statistics) -> float:
    """Returns |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)).

    The trace of the root is the sum of the roots of the eigenvalues of C1 C2, which are those of the symmetric
    C1^(1/2) C2 C1^(1/2): no complex numbers, and rounding below zero is cut at zero.
    """
    values, vectors = torch.linalg.eigh(first.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    shared = torch.linalg.eigvalsh(root @ second.covariance @ root).clamp(min=0).sqrt().sum()
    gap = (first.mean - second.mean).square().sum()
    return (gap + first.covariance.trace() + second.covariance.trace() - 2 * shared).item()


def inception_score(logits: Tensor, splits: int = SPLITS) -> float:
    """Returns exp of the mean KL divergence of the classes of an image from those of all images, [n, classes].

    The images are cut into `splits` parts of their order, and the scores of the parts averaged (Salimans et al. 2016,
    arXiv:1606.03498, section 4). The order must not go by class: draw classes in turns.

    Raises:
        ValueError: fewer images than parts.
    """
    if len(logits) < splits:
        raise ValueError(f"logits: {len(logits)} images cannot be cut into {splits} parts; use more images")
    found = []
    for number in range(splits):
        part = logits[number * len(logits) // splits : (number + 1) * len(logits) // splits].double()
        logs = part.log_softmax(1)
        mean = logs.exp().mean(0).clamp(min=torch.finfo(torch.float64).tiny)
        found.append((logs.exp() * (logs - mean.log())).sum(1).mean().exp())
    return torch.stack(found).mean().item()


class KernelDistance(NamedTuple):
    """Squared maximum mean discrepancy: mean over subsets and its standard error."""

    value: float
    error: float


def kernel_distance(
    first: Tensor, second: Tensor, subsets: int = SUBSETS, size: int = SUBSET, seed: int = 0
) -> KernelDistance:
    """Returns the unbiased squared MMD with the kernel (x.y / D + 1)^3 over random subsets of both sets, [n, D] each.

    Args:
        size: images of a subset; the smaller set's number if that is less. One subset of everything is enough then.

    Raises:
        ValueError: a set has fewer than two images.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError(f"features: sets of {len(first)} and {len(second)} images; use at least 2 of each")
    size = min(size, len(first), len(second))
    subsets = 1 if size == len(first) == len(second) else subsets
    draw = np.random.default_rng(seed)
    values = []
    for _ in range(subsets):
        x, y = (
            features[torch.from_numpy(draw.choice(len(features), size, replace=False))].double()
            for features in (first, second)
        )
        values.append(_mmd(x, y))
    spread = float(np.std(values, ddof=1)) / subsets**0.5 if subsets > 1 else 0.0
    return KernelDistance(float(np.mean(values)), spread)


def _mmd(x: Tensor, y: Tensor) -> float:
    width, n = x.shape[1], len(x)
    inside, other, across = ((a @ b.T / width + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    pairs = n * (n - 1)
    same = (inside.sum() - inside.diagonal().sum() + other.sum() - other.diagonal().sum()) / pairs
    return (same - 2 * across.mean()).item()


def nearest(features: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the Euclidean distance of each row of features [n, D] to the nearest reference, and which one it is."""
    distances, indices = [], []
    references = references.double()
    for rows in features.double().split(CHUNK):
        found = torch.cdist(rows, references).min(1)
        distances.append(found.values)
        indices.append(found.indices)
    return torch.cat(distances), torch.cat(indices)


def memorised_share(samples: Tensor, held_out: Tensor, training: Tensor) -> float:
    """Returns the share of pairs (sample, held-out image) in which the sample is closer to a training image.

    0.5 means that samples are as far from the training images as new real images are, 1 that they are copies.
    """
    own, real = nearest(samples, training)[0], nearest(held_out, training)[0].sort().values
    below = torch.searchsorted(real, own, right=True), torch.searchsorted(real, own)
    farther = len(real) - (below[0] + below[1]).double() / 2  # ties count one half
    return (farther / len(real)).mean().item()


class Coverage(NamedTuple):
    """Shares of images that lie among the images of the other set.

    Attributes:
        precision: of samples that lie among real images. recall: of real images that lie among samples.
    """

    precision: float
    recall: float


def coverage(samples: Tensor, real: Tensor, neighbour: int = NEIGHBOUR) -> Coverage:
    """Returns precision and recall of samples, [n, D] and [m, D].

    An image lies among those of a set if it lies in a ball around one of them that reaches to its `neighbour`-th
    nearest image of the same set. Both shares depend on the number of images, so compare equal numbers only.

    Raises:
        ValueError: a set has no more than `neighbour` images.
    """
    if min(len(samples), len(real)) <= neighbour:
        fewest = f"sets of {len(samples)} and {len(real)} images"
        raise ValueError(f"features: {fewest}; use more than {neighbour} of each")
    return Coverage(_share_among(samples, real, neighbour), _share_among(real, samples, neighbour))


def _share_among(rows: Tensor, others: Tensor, neighbour: int) -> float:
    others = others.double()
    # The nearest image of the same set is the image itself, at a distance of 0.
    reach = [torch.cdist(part, others).kthvalue(neighbour + 1).values for part in others.split(CHUNK)]
    radii = torch.cat(reach)
    inside = [(torch.cdist(part, others) <= radii).any(1) for part in rows.double().split(CHUNK)]
    return torch.cat(inside).double().mean().item()
