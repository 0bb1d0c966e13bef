"""The models that the tasks train."""

from __future__ import annotations

from torch import nn

VGG16 = (
    64,
    64,
    "pool",
    128,
    128,
    "pool",
    256,
    256,
    256,
    "pool",
    512,
    512,
    512,
    "pool",
    512,
    512,
    512,
    "pool",
)


def vgg16(channels: int, pixels: int, classes: int, thinner: int = 1) -> nn.Module:
    """VGG-16 for 32 x 32 images, as the published code has it: 14,728,266 parameters in 54 tensors.

    13 convolutions 3 x 3 with bias, each followed by batch norm and ReLU, five poolings, one linear layer; no
    dropout. Simonyan and Zisserman 2015, configuration D, without its two hidden linear layers.

    Args:
        thinner: every convolution has so many times fewer channels.
    """
    layers: list[nn.Module] = []
    for width in VGG16:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            width //= thinner
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
    side = pixels // 2**5
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, classes))


def slim_vgg16(channels: int, pixels: int, classes: int) -> nn.Module:
    """VGG-16 with a quarter of its channels: 924,186 parameters for CIFAR-10 in the same 54 tensors."""
    return vgg16(channels, pixels, classes, thinner=4)


def small_cnn(channels: int, pixels: int, classes: int) -> nn.Module:
    """Three strided convolutions with batch norm, one linear layer: 34,058 parameters for CIFAR-10.

    Strides instead of poolings halve the time of a step on one CPU core, which P virtual workers share.
    """
    layers: list[nn.Module] = []
    for width in (16, 32, 64):
        layers += [
            nn.Conv2d(channels, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    side = -(-pixels // 2**3)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, classes))
