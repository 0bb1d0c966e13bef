"""Models of language: the next word, or hidden words, of text as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from experiments.training.datasets import Dataset, Split
from experiments.training.networks import transformers_for
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


class LSTM(nn.Module):
    """Words to vectors, so many layers of LSTM of the same width, and a linear layer over all words (Zaremba
    et al. 2014, without dropout).
    """

    def __init__(self, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(classes, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.words = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) numbers of words -> (B, T, classes)."""
        states, _ = self.lstm(self.vectors(words))
        found: Tensor = self.words(states)
        return found


class BERT(nn.Module):
    """BERT of transformers (Devlin et al. 2019) with its head for hidden words, without dropout, which would
    draw from torch's own generator.

    Raises:
        ValueError: transformers is not installed.
    """

    def __init__(self, classes: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        transformers = transformers_for("BERT")
        self.model = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=classes,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * width,
                max_position_embeddings=max(512, length),
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) numbers of words -> (B, T, classes)."""
        logits: Tensor = self.model(input_ids=words).logits
        return logits
