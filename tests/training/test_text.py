"""Text as data sets: numbers of words, next words, hidden words; files that are no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.datasets import Dataset, _presets
from experiments.training.language.tasks import GUESSED_SHARE, hide_words
from experiments.training.task import IGNORED_LABEL
from tests.conftest import there
from tests.training.tasks import CPU, learn, rhyme


def text(
    folder: Path, train: str = "a b a c\n\nb a d\n", test: str = "a nobody b a\n", **how: Any
) -> Dataset:
    (folder / "train.txt").write_text(train)
    (folder / "test.txt").write_text(test)
    return _presets.load_text_dataset("words", folder, ("train.txt", "test.txt"), 3, CPU, **how)


def test_the_most_frequent_words_come_first_and_labels_follow(tmp_path: Path) -> None:
    data = text(tmp_path)
    # a 3, <eos> 2, b 2, then by the alphabet <unk>, c, d
    a, end, b, unknown, c, d = range(6)
    assert data.classes == 6
    assert data.train.images.tolist() == [[a, b, a], [c, end, b]]
    assert data.train.labels.tolist() == [[b, a, c], [end, b, a]]
    assert data.test.images.tolist() == [[a, unknown, b]]
    assert data.test.labels.tolist() == [[unknown, b, a]]
    assert d < data.classes


def test_characters_stand_as_they_do_in_the_file(tmp_path: Path) -> None:
    data = text(tmp_path, "aab a\n a", "az b\n", units="characters")
    a, space, end, unknown, b = range(5)  # by how often, then by their codes
    assert data.train.images.tolist() == [[a, a, b], [space, a, end]]
    assert data.train.labels.tolist() == [[a, b, space], [a, end, space]]
    assert data.test.images.tolist() == [[a, unknown, space]]
    assert data.test.labels.tolist() == [[unknown, space, b]]


def test_a_masked_text_has_a_number_for_hidden_words_and_a_vocabulary_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = text(tmp_path, masked=True)
    assert (data.classes, len(data.train.images)) == (7, 3)
    assert torch.equal(data.train.images, data.train.labels)
    monkeypatch.setattr(_presets, "MAX_WORDS", 3)
    few = text(tmp_path)
    assert (few.classes, int(few.train.images.max())) == (3, 2)  # the last one is what is unknown


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text" / "train.txt"
    path.parent.mkdir()
    for name, content, why in (
        ("text64", b"", "has 0 words, and a sequence has 64"),
        ("text64", b"too few words\n", "has 4 words"),
        ("text64", b"\xff\xfe\x00", "no text in UTF-8"),
        ("text64", b"zero \0 bytes\n", "bytes that are zero"),
        ("text", b"too few words\n", "has 4 words, and a sequence has 35"),
        ("textchars", b"", "has 0 characters, and a sequence has 64"),
        ("textchars", b"\xff\xfe\x00", "no text in UTF-8"),
        ("textchars", b"zero \0 bytes\n" * 10, "bytes that are zero"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path}.*{why}.*put plain text there"):
            datasets.load(name, tmp_path, CPU)


def test_without_a_folder_or_its_files_the_text_is_asked_for(tmp_path: Path) -> None:
    for name in ("ptb", "ptb64", "ptbchars", "text", "text64", "textchars"):
        with pytest.raises(ValueError, match=r"set data.root=FOLDER or \$DATA_ROOT"):
            datasets.load(name, None, CPU)
        with pytest.raises(ValueError, match=r"train.txt can't be read \(No such file.*put plain text there"):
            datasets.load(name, tmp_path, CPU)


def test_hidden_words_are_asked_for_and_no_others() -> None:
    words = torch.randint(99, (50, 64), generator=torch.Generator().manual_seed(1))
    inputs, labels = hide_words(words, 100, torch.Generator().manual_seed(0))
    is_asked = labels != IGNORED_LABEL
    assert torch.equal(inputs[~is_asked], words[~is_asked])
    assert torch.equal(labels[is_asked], words[is_asked])
    assert is_asked.double().mean().item() == pytest.approx(GUESSED_SHARE, abs=0.02)
    asked = inputs[is_asked]
    shares = torch.stack([asked == 99, asked == words[is_asked]]).double().mean(1)
    assert shares.tolist() == pytest.approx([0.8, 0.1], abs=0.05)


def test_a_model_of_language_learns_and_its_accuracy_is_of_words(tmp_path: Path) -> None:
    task = TASKS.build("smalllstm_ptb", {"width": 16, "layers": 1, "batch_size": 10, "lr": 0.5})
    before, after = learn(task, rhyme(tmp_path), steps=60)
    assert there(before.top1_percent) < 50 < 99 < there(after.top1_percent) <= 100
    assert after.loss < before.loss
