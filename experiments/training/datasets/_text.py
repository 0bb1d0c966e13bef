"""Text as sequences of word numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from experiments.training.datasets._dataset import Dataset, Split, digest_of

END = "<eos>"  # of a line
UNKNOWN = "<unk>"  # as Mikolov's preprocessing of the Penn Treebank writes it
MOST_WORDS = 10_000  # of a vocabulary; the others are unknown
HOW = "put plain text there, words apart by spaces"


def read(
    name: str, folder: Path, files: tuple[str, str], length: int, device: torch.device, masked: bool = False
) -> Dataset:
    """The text for training and that for tests, cut into sequences of `length` words.

    Words are numbered by how often the first file has them, the most frequent first. What is left over at the
    end of a file is not used.

    Args:
        files: in `folder`: for training, for tests.
        masked: labels are the words themselves, and the vocabulary has a further number, its last, which
            stands for a hidden word; else the label of each word is the next one.

    Raises:
        ValueError: a file that is missing, empty, too short or no text.
    """
    train_words, test_words = (words_of(folder / file, length) for file in files)
    counted = Counter(train_words)
    counted[UNKNOWN] += 1  # there always is one
    ordered = sorted(counted, key=lambda word: (-counted[word], word))
    kept = ordered[:MOST_WORDS]
    if UNKNOWN not in kept:
        kept[-1] = UNKNOWN
    number = {word: at for at, word in enumerate(kept)}

    def split(words: list[str]) -> Split:
        numbers = torch.tensor([number.get(word, number[UNKNOWN]) for word in words])
        count = (len(numbers) - (not masked)) // length
        inputs = numbers[: count * length].view(count, length)
        following = inputs.clone() if masked else numbers[1 : count * length + 1].view(count, length)
        return Split(inputs, following)

    train, test = split(train_words), split(test_words)
    return Dataset(
        name=name,
        digest=digest_of(train, test),
        train=train,
        test=test,
        classes=len(kept) + masked,
        padding=0,
        flip=False,
        mean=(0.0,),
        std=(1.0,),
        noun="sequences",
    ).to(device)


def words_of(path: Path, length: int) -> list[str]:
    """
    Raises:
        ValueError: no such file, not even one sequence in it, or no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}); {HOW}") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}); {HOW}") from error
    if any("\0" in line for line in lines):
        raise ValueError(f"{path} is no text: it has bytes that are zero; {HOW}")
    words = [word for line in lines if line.strip() for word in (*line.split(), END)]
    if len(words) <= length:
        raise ValueError(
            f"{path} has {len(words)} words, and a sequence has {length}; {HOW}, thousands of them"
        )
    return words
