"""The data sets that are made in a few lines, as one table: name -> how it is made.

It is also executed lightly (see `sparsify.core.spec`), for the names and for FILES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Generator

from experiments.training.datasets._dataset import Dataset, Split, digest_splits

# What a row needs on the disk, as a file of its own would say it in its FILES.
PENN = {"title": "The Penn Treebank", "folder": "ptb"}
OWN = {"title": "Text of your own", "folder": "text"}
FILES = {"ptb": PENN, "ptb64": PENN, "ptbchars": PENN, "text": OWN, "text64": OWN, "textchars": OWN}
PENN_FILES = ("ptb.train.txt", "ptb.test.txt")
OWN_FILES = ("train.txt", "test.txt")
COUNTS = (1024, 128)  # synthetic images for training, for tests: 170 MB in each process
CLASSES = 1000  # of these
END = "<eos>"  # of a line
UNKNOWN = "<unk>"  # as Mikolov's preprocessing of the Penn Treebank writes it
MAX_WORDS = 10_000  # of a vocabulary; the others are unknown
TEXT_ADVICE = "put plain text there, words apart by spaces"
Units = Literal["words", "characters"]  # that text is cut into, and that are numbered


def _digits(name: str, repeats: int, channels: int, root: Path | None, device: torch.device) -> Dataset:
    """Load the 1,797 handwritten digits, 8 x 8, that scikit-learn carries (Alpaydin and Kaynak 1998).

    Each pixel becomes `repeats` x `repeats` and the one channel `channels`; a fifth of each is for tests.
    """
    table = torch.from_numpy(np.loadtxt(_path_in_scikit_learn("digits.csv.gz"), np.uint8, delimiter=","))
    images = table[:, :64].reshape(-1, 8, 8, 1)
    labels = table[:, 64].long()
    images = (images * (255 / 16)).to(torch.uint8)
    images = images.repeat_interleave(repeats, 1).repeat_interleave(repeats, 2).expand(-1, -1, -1, channels)
    is_test = torch.zeros(len(table), dtype=torch.bool)
    is_test[labels.argsort(stable=True)[::5]] = True
    train, test = (Split(images[part].contiguous(), labels[part]) for part in (~is_test, is_test))
    mean = (0.305,) * channels
    std = (0.377,) * channels
    return Dataset(name, digest_splits(train, test), train, test, 10, mean=mean, std=std).to(device)


def _path_in_scikit_learn(file: str) -> Path:
    """Return the path of a file that scikit-learn carries.

    To import all of scikit-learn takes each worker more than a second.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    package = "sklearn"
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(spec.origin).parent / "datasets" / "data" / file


def _synthetic(root: Path | None, device: torch.device) -> Dataset:
    """Random pixels, 3 x 224 x 224, in as many classes as ImageNet: to time networks without its files.

    Nothing can be learnt from them. They are cropped and flipped no more.
    """
    draws = Generator().manual_seed(0)

    def split(count: int) -> Split:
        images = torch.randint(256, (count, 224, 224, 3), generator=draws, dtype=torch.uint8)
        return Split(images, torch.randint(CLASSES, (count,), generator=draws))

    train, test = map(split, COUNTS)
    name = "synthetic images, for timing only"
    mean = (0.5,) * 3  # of even draws, 0 to 1
    std = (0.289,) * 3
    return Dataset(name, digest_splits(train, test), train, test, CLASSES, mean=mean, std=std).to(device)


def _no_images(root: Path | None, device: torch.device) -> Dataset:
    """No images: task vector draws its gradients itself."""
    none = Split(torch.empty(0, 1, 1, 1, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    return Dataset("seeded vectors", digest_splits(none, none), none, none, 1).to(device)


def _text(
    dataset: str,
    files: tuple[str, str],
    length: int,
    masked: bool,
    units: Units,
    root: Path | None,
    device: torch.device,
) -> Dataset:
    """Load text in sequences of `length` words or characters.

    Where it is masked, some are hidden and guessed; else labels are the next ones.
    """
    described = FILES[dataset]
    if root is None:
        raise ValueError(f"{described['title']} has no folder: set data.root=FOLDER or $DATA_ROOT")
    return load_text_dataset(
        described["title"], root / described["folder"], files, length, device, masked, units
    )


def load_text_dataset(
    title: str,
    folder: Path,
    files: tuple[str, str],
    length: int,
    device: torch.device,
    masked: bool = False,
    units: Units = "words",
) -> Dataset:
    """Read a text for training and a text for tests, cut into sequences of `length` words or characters.

    Characters are treated as words.

    Words are numbered by how often the first file has them, the most frequent first. What is left over at the
    end of a file is not used.

    Args:
        files: in `folder`: for training, for tests.
        masked: labels are the words themselves, and the vocabulary has a further number, its last, which
            stands for a hidden word; else the label of each word is the next one.

    Raises:
        ValueError: a file that is missing, empty, too short or no text.
    """
    train_words, test_words = (read_words(folder / file, length, units) for file in files)
    counted = Counter(train_words)
    counted[UNKNOWN] += 1  # there always is one
    ordered = sorted(counted, key=lambda word: (-counted[word], word))
    vocabulary = ordered[:MAX_WORDS]
    if UNKNOWN not in vocabulary:
        vocabulary[-1] = UNKNOWN
    number_by_word = {word: index for index, word in enumerate(vocabulary)}

    def split(words: Sequence[str]) -> Split:
        numbers = torch.from_numpy(number_words(words, number_by_word))
        count = (len(numbers) - (not masked)) // length
        inputs = numbers[: count * length].view(count, length)
        following = inputs.clone() if masked else numbers[1 : count * length + 1].view(count, length)
        return Split(inputs, following)

    train = split(train_words)
    test = split(test_words)
    classes = len(vocabulary) + masked
    return Dataset(title, digest_splits(train, test), train, test, classes, noun="sequences").to(device)


def number_words(words: Sequence[str], number_by_word: Mapping[str, int]) -> np.ndarray:
    """(n,) numbers; of characters, which are millions, by a table."""
    unknown = number_by_word[UNKNOWN]
    if not isinstance(words, str):
        return np.array([number_by_word.get(word, unknown) for word in words])
    codes = np.frombuffer(words.encode("utf-32-le"), dtype=np.uint32)
    table = np.full(int(codes.max()) + 1, unknown)
    for word, index in number_by_word.items():
        if len(word) == 1 and ord(word) < len(table):
            table[ord(word)] = index
    return table[codes]


def read_words(path: Path, min_words: int, units: Units = "words") -> Sequence[str]:
    """Return the words of a file with an `END` after each line, or all of the file's characters.

    Raises:
        ValueError: no such file, not even one sequence in it, or no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}); {TEXT_ADVICE}") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}); {TEXT_ADVICE}") from error
    if "\0" in text:
        raise ValueError(f"{path} is no text: it has bytes that are zero; {TEXT_ADVICE}")
    words: Sequence[str] = text
    if units == "words":
        words = [word for line in text.splitlines() if line.strip() for word in (*line.split(), END)]
    if len(words) <= min_words:
        raise ValueError(
            f"{path} has {len(words)} {units}, and a sequence has {min_words}; "
            f"{TEXT_ADVICE}, thousands of them"
        )
    return words


PRESETS: dict[str, Callable[..., Dataset]] = {
    "digits": partial(_digits, "digits", 1, 1),
    # Enlarged to 32 x 32 and three channels, so that networks for CIFAR-10 take them.
    "digits32": partial(_digits, "digits 32 x 32", 4, 3),
    "images224": _synthetic,
    # As Mikolov et al. 2010 prepared it: 10,000 words.
    "ptb": partial(_text, "ptb", PENN_FILES, 35, False, "words"),
    "ptb64": partial(_text, "ptb64", PENN_FILES, 64, True, "words"),
    "ptbchars": partial(_text, "ptbchars", PENN_FILES, 64, False, "characters"),
    "text": partial(_text, "text", OWN_FILES, 35, False, "words"),
    "text64": partial(_text, "text64", OWN_FILES, 64, True, "words"),
    "textchars": partial(_text, "textchars", OWN_FILES, 64, False, "characters"),
    "vector": _no_images,
}
