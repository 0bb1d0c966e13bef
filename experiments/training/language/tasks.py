"""Tasks of language: the next word, or hidden words, of text as numbers; characters are words as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from experiments.training.datasets import Dataset, Split
from experiments.training.language.optimisers import Recipe
from experiments.training.task import UNASKED, Task

HIDDEN = 0.15  # of the words are guessed; of these
REPLACED, RANDOM = 0.8, 0.1  # are hidden, and replaced by another word; the rest stays (Devlin et al. 2019)


@dataclass(frozen=True)
class NextWord(Task):
    """Sequences do not follow each other: each begins with an empty memory."""

    eval_batch: ClassVar[int] = 50

    def built(self, data: Dataset) -> nn.Module:
        return self.network(0, data.train.images.shape[1], data.classes)

    def drawn(
        self, data: Dataset, chosen: Tensor, generator: Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return data.train.images[chosen], data.train.labels[chosen]

    def asked(self, data: Dataset, some: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return some.images, some.labels


@dataclass(frozen=True)
class AnnealedWords(NextWord):
    """The next word, learnt by an optimiser of choice while the learning rate falls along a cosine.

    Raises:
        ValueError: the learning rate would have fallen before it has risen.
    """

    recipe: Recipe
    lr_cosine_epochs: float  # the learning rate has fallen by then, from the end of its warm-up,
    lr_end: float  # to this share of itself, where it stays

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_cosine_epochs <= self.lr_warmup_epochs:
            raise ValueError(
                f"lr_cosine_epochs={self.lr_cosine_epochs:g} is not after "
                f"lr_warmup_epochs={self.lr_warmup_epochs:g}, in which the rate rises; take a later epoch"
            )

    def optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.recipe.optimiser(model, self.lr, self.weight_decay)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        rate, falling = super().learning_rate(step, steps_per_epoch), step / steps_per_epoch
        falling = (falling - self.lr_warmup_epochs) / (self.lr_cosine_epochs - self.lr_warmup_epochs)
        height = (1 + math.cos(math.pi * min(1.0, max(0.0, falling)))) / 2  # from 1 to 0
        return rate * (self.lr_end + (1 - self.lr_end) * height)


@dataclass(frozen=True)
class HiddenWords(NextWord):
    """Masked language modelling (Devlin et al. 2019, section 3.1): labels of words that are not asked for are
    `UNASKED`. For evaluation always the same words are hidden.
    """

    def drawn(
        self, data: Dataset, chosen: Tensor, generator: Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return hidden(data.train.images[chosen], data.classes, generator)

    def asked(self, data: Dataset, some: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        always = Generator(some.images.device).manual_seed(0)
        return hidden(some.images, data.classes, always)


def hidden(words: Tensor, classes: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Words with some of them hidden, and labels, both (B, T). The last class stands for a hidden word."""
    draw = partial(torch.rand, words.shape, generator=generator, device=words.device)
    is_asked, how = draw() < HIDDEN, draw()
    others = torch.randint(classes - 1, words.shape, generator=generator, device=words.device)
    labels = words.masked_fill(~is_asked, UNASKED)
    inputs = words.masked_fill(is_asked & (how < REPLACED), classes - 1)
    return torch.where(is_asked & (how >= 1 - RANDOM), others, inputs), labels
