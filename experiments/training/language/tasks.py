"""Tasks of language: the next word, or hidden words, of text as numbers; characters are words as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from experiments.training.datasets import Dataset, Split
from experiments.training.language.optimizers import OptimizerRecipe
from experiments.training.task import IGNORED_LABEL, Task

GUESSED_SHARE = 0.15  # of the words are guessed; of these
MASKED_SHARE = 0.8  # are hidden (Devlin et al. 2019)
RANDOM_SHARE = 0.1  # are replaced by another word; the rest stays


@dataclass(frozen=True)
class NextWordTask(Task):
    """A task that guesses the next word; each sequence begins with an empty memory."""

    eval_batch: ClassVar[int] = 50

    def make_network(self, data: Dataset) -> nn.Module:
        return self.network(0, data.train.images.shape[1], data.classes)

    def draw_batch(
        self, data: Dataset, indices: Tensor, generator: Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return data.train.images[indices], data.train.labels[indices]

    def evaluation_batch(self, data: Dataset, split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return split.images, split.labels


@dataclass(frozen=True)
class AnnealedNextWordTask(NextWordTask):
    """The next word, learnt by an optimiser of choice while the learning rate falls along a cosine.

    Raises:
        ValueError: the learning rate would have fallen before it has risen.
    """

    recipe: OptimizerRecipe
    lr_cosine_epochs: float  # the learning rate has fallen by then, from the end of its warm-up,
    lr_end: float  # to this share of itself, where it stays

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_cosine_epochs <= self.lr_warmup_epochs:
            raise ValueError(
                f"lr_cosine_epochs={self.lr_cosine_epochs:g} is not after "
                f"lr_warmup_epochs={self.lr_warmup_epochs:g}, in which the rate rises; take a later epoch"
            )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.recipe.make_optimizer(model, self.lr, self.weight_decay)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        rate = super().learning_rate(step, steps_per_epoch)
        falling = step / steps_per_epoch
        falling = (falling - self.lr_warmup_epochs) / (self.lr_cosine_epochs - self.lr_warmup_epochs)
        height = (1 + math.cos(math.pi * min(1.0, max(0.0, falling)))) / 2  # from 1 to 0
        return rate * (self.lr_end + (1 - self.lr_end) * height)


@dataclass(frozen=True)
class HiddenWordTask(NextWordTask):
    """Masked language modelling (Devlin et al. 2019, section 3.1).

    Labels of words that are not asked for are `IGNORED_LABEL`. For evaluation the hidden words are always the
    same.
    """

    def draw_batch(
        self, data: Dataset, indices: Tensor, generator: Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return hide_words(data.train.images[indices], data.classes, generator)

    def evaluation_batch(self, data: Dataset, split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        always = Generator(split.images.device).manual_seed(0)
        return hide_words(split.images, data.classes, always)


def hide_words(words: Tensor, classes: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Words with some of them hidden, and labels, both (B, T). The last class stands for a hidden word."""
    draw = partial(torch.rand, words.shape, generator=generator, device=words.device)
    is_guessed = draw() < GUESSED_SHARE
    replacement_draws = draw()
    random_words = torch.randint(classes - 1, words.shape, generator=generator, device=words.device)
    labels = words.masked_fill(~is_guessed, IGNORED_LABEL)
    inputs = words.masked_fill(is_guessed & (replacement_draws < MASKED_SHARE), classes - 1)
    return torch.where(is_guessed & (replacement_draws >= 1 - RANDOM_SHARE), random_words, inputs), labels
