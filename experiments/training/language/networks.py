"""Networks for text as numbers: (B, T) numbers of words -> (B, T, classes)."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.training.networks import import_transformers

INITIAL_STD = 0.02  # of initial weights (Radford et al. 2019, and nanoGPT)
MLP_RATIO = 4  # times, within each block


class LSTM(nn.Module):
    """Word vectors, layers of LSTM of the same width, and a linear layer over all words.

    Zaremba et al. 2014, without dropout.
    """

    def __init__(self, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(classes, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.words = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) numbers of words -> (B, T, classes)."""
        states, _ = self.lstm(self.vectors(words))
        logits: Tensor = self.words(states)
        return logits


class BERT(nn.Module):
    """BERT of transformers (Devlin et al. 2019) with its head for hidden words.

    It has no dropout, which would draw from torch's own generator.

    Raises:
        ValueError: transformers is not installed.
    """

    def __init__(self, classes: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        transformers = import_transformers("BERT")
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


class GPT(nn.Module):
    """The decoder of GPT-2 (Radford et al. 2019): what comes later changes nothing before it.

    The head is the table of word vectors, as there. Without dropout, which would draw from torch's own
    generator. Layers are named so that a block's matrices are its only parameters of two dimensions.

    Args:
        length: of the longest sequence.
        heads: of each block; they divide its width.
    """

    def __init__(self, classes: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(classes, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for name, p in self.named_parameters():
            if name.endswith("onto.weight"):  # two a block add up along the stream
                nn.init.normal_(p, std=INITIAL_STD / math.sqrt(2 * layers))

    def forward(self, words: Tensor) -> Tensor:
        """(B, T) numbers of words -> (B, T, classes)."""
        stream = self.words(words) + self.places.weight[: words.shape[1]]
        return functional.linear(self.norm(self.blocks(stream)), self.words.weight)


class DecoderBlock(nn.Module):
    """Attention to what came before, then two linear layers, each added to the stream of (B, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(width, heads)
        self.further = FeedForward(width)

    def forward(self, stream: Tensor) -> Tensor:
        """(B, T, width) -> the same."""
        stream = stream + self.attention(stream)
        outputs: Tensor = stream + self.further(stream)
        return outputs


class CausalSelfAttention(nn.Module):
    """Causal attention of several heads, of the normalised stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.asked = nn.Linear(width, 3 * width)
        self.onto = nn.Linear(width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """(B, T, width) -> what is added to it."""
        query, key, value = self.asked(self.norm(stream)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        of_heads = [part.transpose(1, 2) for part in (query, key, value)]  # (B, heads, T, width / heads)
        attended = causal_attention(*of_heads).transpose(1, 2).flatten(2)
        outputs: Tensor = self.onto(attended)
        return outputs


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, of the normalised stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, MLP_RATIO * width)
        self.onto = nn.Linear(MLP_RATIO * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """(B, T, width) -> what is added to it."""
        outputs: Tensor = self.onto(functional.gelu(self.wide(self.norm(stream))))
        return outputs


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, of which a GPU takes the plain way: others need not add in the same order twice."""
    if query.is_cuda:
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
