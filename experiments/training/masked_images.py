"""Masked autoencoders (He et al. 2022, arXiv:2111.06377): hidden patches of images are guessed from others.

The paper trains them with AdamW; here they are trained as all tasks are, by SGD with momentum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn

from experiments.training.datasets import Dataset, Split
from experiments.training.networks import import_transformers
from experiments.training.task import Task

HIDDEN_SHARE = 0.75  # of the patches
MLP_RATIO = 4  # times, within each layer
LONGEST_WAVELENGTH = 10_000  # of the sines of positions, the longest wavelength in patches, over 2 pi


class AutoencoderSize(NamedTuple):
    """Sizes of encoder and decoder, both Vision Transformers."""

    patch: int  # pixels, of each side
    width: int
    layers: int
    heads: int
    decoder_width: int
    decoder_layers: int
    decoder_heads: int

    def make_network(self, channels: int, pixels: int, classes: int) -> MaskedAutoencoderWithLoss:
        return MaskedAutoencoderWithLoss(channels, pixels, self)


SIZES = {
    "tiny": AutoencoderSize(4, 64, 4, 4, 48, 2, 4),
    "base": AutoencoderSize(16, 768, 12, 12, 512, 8, 16),  # ViT-B/16, and the decoder of the paper's Table 1
    "large": AutoencoderSize(16, 1024, 24, 16, 512, 8, 16),  # ViT-L/16
}


@dataclass(frozen=True)
class MaskedImageTask(Task):
    """Guessing hidden patches: validated is the loss, over always the same ones; there is no accuracy.

    A batch is a row for each image: its pixels, then a number for each patch, drawn by the run's generator.
    The three quarters of the patches with the largest numbers are hidden.
    """

    eval_batch: ClassVar[int] = 100
    patch: int = 16

    def draw_batch(
        self, data: Dataset, indices: Tensor, generator: Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        images, labels = super().draw_batch(data, indices, generator, dtype)
        return self.append_mask_numbers(images, generator), labels

    def evaluation_batch(self, data: Dataset, split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        images, labels = super().evaluation_batch(data, split, dtype)
        return self.append_mask_numbers(images, Generator(images.device).manual_seed(0)), labels

    def append_mask_numbers(self, images: Tensor, generator: Generator) -> Tensor:
        """(B, C, H, W) -> (B, C H W + patches)."""
        shape = (len(images), (images.shape[-1] // self.patch) ** 2)
        numbers = torch.rand(shape, generator=generator, device=images.device)
        return torch.cat([images.flatten(1), numbers.to(images.dtype)], dim=1)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs

    def metric_sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = outputs.double()  # the mean over these images
        return torch.stack([torch.full_like(loss, len(labels)), loss * len(labels)])


class MaskedAutoencoderWithLoss(nn.Module):
    """ViTMAEForPreTraining of transformers; weights are drawn and positions fixed as in the paper's code.

    transformers 5.23 leaves all positions at zero, so that hidden patches would all be guessed alike.

    Raises:
        ValueError: transformers is not installed.
    """

    def __init__(self, channels: int, pixels: int, size: AutoencoderSize) -> None:
        super().__init__()
        transformers = import_transformers("The masked autoencoder")
        self.shape = (channels, pixels, pixels)
        self.patches = (pixels // size.patch) ** 2
        self.model = transformers.ViTMAEForPreTraining(
            transformers.ViTMAEConfig(
                image_size=pixels,
                num_channels=channels,
                patch_size=size.patch,
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                intermediate_size=MLP_RATIO * size.width,
                decoder_hidden_size=size.decoder_width,
                decoder_num_hidden_layers=size.decoder_layers,
                decoder_num_attention_heads=size.decoder_heads,
                decoder_intermediate_size=MLP_RATIO * size.decoder_width,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                mask_ratio=HIDDEN_SHARE,
                norm_pix_loss=True,
            )
        )
        embeddings = self.model.vit.embeddings
        decoder = self.model.decoder
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight.flatten(1))  # a view
        for token in (embeddings.cls_token, decoder.mask_token):
            nn.init.normal_(token, std=0.02)
        # As buffers: no gradient is selected from, exchanged or decayed.
        _fix_positions(embeddings, "position_embeddings", pixels // size.patch)
        _fix_positions(decoder, "decoder_pos_embed", pixels // size.patch)

    def forward(self, images_and_mask_numbers: Tensor) -> Tensor:
        """(B, C H W + patches) -> () the mean squared error over hidden patches.

        Pixels are normalised, those of each patch by themselves.
        """
        images, numbers = images_and_mask_numbers.split([math.prod(self.shape), self.patches], dim=1)
        loss: Tensor = self.model(images.unflatten(1, self.shape), noise=numbers).loss
        return loss


def _fix_positions(module: nn.Module, name: str, side: int) -> None:
    """Replace a parameter by sines of positions, for patches in rows of `side`."""
    parameter = getattr(module, name)
    delattr(module, name)
    module.register_buffer(name, sine_position_embeddings(side, parameter.shape[-1]).to(parameter.device))


def sine_position_embeddings(side: int, width: int) -> Tensor:
    """(1, 1 + side^2, width): sines and cosines of each patch's column, then of its row.

    In the order of the paper's code; zeros for the token before the patches.
    """
    speeds = LONGEST_WAVELENGTH ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * speeds
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (side, width / 2)
    patches = torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, dim=0)], dim=1)
    return torch.cat([torch.zeros(1, width, dtype=torch.float64), patches])[None].float()
