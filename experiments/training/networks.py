"""The models that the tasks train."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsify.ranges import describe_unknown

VGG16_STAGES = (
    (2, 64),
    (2, 128),
    (3, 256),
    (3, 512),
    (3, 512),
)  # convolutions, their channels; then a pooling


def vgg16(channels: int, pixels: int, classes: int, width_divisor: int = 1) -> nn.Module:
    """Make VGG-16 for 32 x 32 images, as the published code has it: 14,728,266 parameters in 54 tensors.

    13 convolutions 3 x 3 with bias, each followed by batch norm and ReLU, five poolings, one linear layer; no
    dropout. Simonyan and Zisserman 2015, configuration D, without its two hidden linear layers.

    Args:
        width_divisor: every convolution has so many times fewer channels.
    """
    layers: list[nn.Module] = []
    for convolutions, width in VGG16_STAGES:
        width //= width_divisor
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    side = pixels // 2**5
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, classes))


def slim_vgg16(channels: int, pixels: int, classes: int) -> nn.Module:
    """VGG-16 with a quarter of its channels: 924,186 parameters for CIFAR-10 in the same 54 tensors."""
    return vgg16(channels, pixels, classes, width_divisor=4)


def small_cnn(channels: int, pixels: int, classes: int, first_width: int = 16) -> nn.Module:
    """Three strided convolutions with batch norm, one linear layer: 34,058 parameters for CIFAR-10.

    Strides instead of poolings halve the time of a step on one CPU core, which P virtual workers share.
    """
    layers: list[nn.Module] = []
    for width in (first_width, 2 * first_width, 4 * first_width):
        convolution = nn.Conv2d(channels, width, 3, stride=2, padding=1)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    side = -(-pixels // 2**3)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, classes))


def wide_cnn(channels: int, pixels: int, classes: int) -> nn.Module:
    """`small_cnn` with four times its channels: 412,682 parameters for CIFAR-10."""
    return small_cnn(channels, pixels, classes, first_width=64)


def fnn3(channels: int, pixels: int, classes: int, hidden: int = 200) -> nn.Module:
    """Make two hidden layers of 200 and a linear layer: 199,210 parameters for MNIST.

    As many as the FNN-3 of Shi et al. 2019 (arXiv:1911.08772).
    """
    inputs = channels * pixels * pixels
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, hidden), nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True),
        nn.Linear(hidden, classes),
    )  # fmt: skip


def lenet5(channels: int, pixels: int, classes: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling: 61,706 parameters for MNIST.

    The first convolution pads 28 x 28 images to 32 x 32, for which the network was made.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=(32 - pixels) // 2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(inplace=True), nn.Linear(120, 84), nn.ReLU(inplace=True),
        nn.Linear(84, classes),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two convolutions 3 x 3 with batch norm, beside a way around them (He et al. 2016, Fig. 2).

    Args:
        projects: where shapes change, the way around is a convolution 1 x 1 with batch norm (option B), else
            every other pixel, with channels of zeros for those that are new (option A).
    """

    def __init__(self, channels: int, width: int, stride: int, projects: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if projects and (stride > 1 or channels != width):
            self.around = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        self.stride = stride
        self.new_channels = 0 if projects else width - channels

    def forward(self, inputs: Tensor) -> Tensor:
        around = self.around(inputs)
        if self.new_channels:
            around = functional.pad(
                around[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels)
            )
        return functional.relu(self.body(inputs) + around)


def resnet(channels: int, classes: int, widths: Sequence[int], blocks: int, projects: bool) -> nn.Module:
    """Make a residual network for 32 x 32 images.

    One convolution 3 x 3, then `blocks` blocks of each width, the first of which halves the image but for the
    first width, then the mean over pixels and a linear layer.
    """
    width = widths[0]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    ]  # fmt: skip
    for stage, wider in enumerate(widths):
        for block in range(blocks):
            layers.append(ResidualBlock(width, wider, 2 if stage and not block else 1, projects))
            width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def resnet18(channels: int, pixels: int, classes: int) -> nn.Module:
    """ResNet-18 for 32 x 32 images: 11,173,962 parameters for CIFAR-10 in 62 tensors.

    He et al. 2016 with the first layers that CIFAR-10 needs: no convolution 7 x 7 and no pooling.
    """
    return resnet(channels, classes, (64, 128, 256, 512), blocks=2, projects=True)


def slim_resnet18(channels: int, pixels: int, classes: int) -> nn.Module:
    """ResNet-18 with an eighth of its channels: 176,402 parameters for CIFAR-10 in the same 62 tensors."""
    return resnet(channels, classes, (8, 16, 32, 64), blocks=2, projects=True)


def resnet20(channels: int, pixels: int, classes: int) -> nn.Module:
    """ResNet-20 for CIFAR-10 (He et al. 2016, section 4.2): 269,722 parameters in 59 tensors.

    Ways around blocks that change shape have no parameters (option A).
    """
    return resnet(channels, classes, (16, 32, 64), blocks=3, projects=False)


class WhiteningConvolution(nn.Module):
    """A convolution 2 x 2 that is fitted to images, not trained.

    It gives the principal components of every patch, each with variance 1 over the images, and their
    negatives.

    As in Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds" (arXiv:2404.00498), after Page 2019, "How to Train
    Your ResNet".

    Its weights are a buffer: no gradient is computed, selected or exchanged.
    """

    SIDE = 2  # pixels
    LEAST = 5e-4  # added to each variance, as there: components that images hardly have stay small

    def __init__(self, channels: int) -> None:
        super().__init__()
        components = channels * self.SIDE**2
        self.width = 2 * components
        self.weight: Tensor
        self.register_buffer("weight", torch.zeros(self.width, channels, self.SIDE, self.SIDE))

    def fit(self, images: Tensor) -> None:
        """Fit it to (B, C, H, W) images."""
        shape = self.weight.shape[1:]
        patches = functional.unfold(images.double(), self.SIDE).transpose(1, 2).flatten(0, 1)
        variances, components = torch.linalg.eigh(patches.T.cov())
        rows = (components / (variances + self.LEAST).sqrt()).T.reshape(-1, *shape)
        self.weight.copy_(torch.cat([rows, -rows]))

    def forward(self, images: Tensor) -> Tensor:
        return functional.conv2d(images, self.weight)


class HalvingBlock(nn.Module):
    """Two convolutions 3 x 3; the first halves the image by pooling, the second has a way around it.

    Each has batch norm and GELU.
    """

    # Of 8 images the statistics are noisy, and rank 0 validates with its own running ones: over 50 batches.
    NEW = 0.02

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.MaxPool2d(2),
            nn.BatchNorm2d(width, momentum=self.NEW), nn.GELU(),
        )  # fmt: skip
        self.second = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width, momentum=self.NEW), nn.GELU(),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        half = self.first(inputs)
        outputs: Tensor = half + self.second(half)
        return outputs


class ScaledLogits(nn.Module):
    """Logits times a factor that is not trained, so that they begin small."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * inputs


def fast_resnet(channels: int, pixels: int, classes: int) -> nn.Module:
    """Make a small residual network that learns CIFAR-10 in few steps: 1,160,960 parameters in 19 tensors.

    A fitted `WhiteningConvolution`, three times `HalvingBlock`, the greatest over pixels, one linear layer
    without bias. After Page's ResNet-9 and Jordan's airbench94 (see `WhiteningConvolution`), with fewer
    channels, for CPUs.
    """
    whitening = WhiteningConvolution(channels)
    layers = list[nn.Module]([whitening, nn.GELU()])
    width = whitening.width
    for wider in (64, 128, 256):
        layers.append(HalvingBlock(width, wider))
        width = wider
    layers += [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(width, classes, bias=False)]
    return nn.Sequential(*layers, ScaledLogits(1 / 8))


def imagenet_resnet50(channels: int, pixels: int, classes: int) -> nn.Module:
    """Make torchvision's ResNet-50: 25,557,032 parameters for ImageNet in 161 tensors.

    He et al. 2016, with strides in the 3 x 3 convolutions.
    """
    from torchvision.models import resnet50

    model: nn.Module = resnet50(weights=None, num_classes=classes)
    return model


def imagenet_vgg16(channels: int, pixels: int, classes: int) -> nn.Module:
    """Make torchvision's VGG-16: 138,357,544 parameters for ImageNet in 32 tensors.

    Simonyan and Zisserman 2015, configuration D.

    Without dropout, which would draw from torch's own generator.
    """
    from torchvision.models import vgg16

    model: nn.Module = vgg16(weights=None, num_classes=classes, dropout=0.0)
    return model


def import_transformers(model_name: str) -> Any:
    """Import the package transformers, which only some models need.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"{model_name} is transformers' implementation, and transformers is not installed here "
            f"({error}): `make transformers` installs it"
        ) from error


NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {
    network.__name__: network
    for network in (
        vgg16, slim_vgg16, small_cnn, wide_cnn, fnn3, lenet5, resnet18, slim_resnet18, resnet20, fast_resnet,
        imagenet_resnet50, imagenet_vgg16,
    )
}  # fmt: skip


def find_network(name: str) -> Callable[[int, int, int], nn.Module]:
    """Return the function that makes a network for images of (channels, pixels, classes).

    Raises:
        ValueError: there is no network of that name; the message lists what there is.
    """
    if name not in NETWORKS:
        raise ValueError(describe_unknown("network", name, [*NETWORKS]))
    return NETWORKS[name]
