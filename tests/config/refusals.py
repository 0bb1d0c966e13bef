"""Words that are refused, and with which sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from experiments.config import compose


def read_answers(table: str) -> dict[Any, str]:
    """Return the answers of a table whose lines are words, an arrow and the answer to them, by the words."""
    rows = [line.partition(" -> ") for line in table.strip().splitlines()]
    return {tuple(words.split()): answer for words, _, answer in rows}


def check_refusals(
    answers: Mapping[Any, str], *given: str, act: Callable[[Sequence[str]], object] = compose.resolve
) -> None:
    """Check that each word, beside the words given, is refused with a printable sentence.

    Args:
        answers: by a word, or a tuple of them: the parts of the sentence, with " ... " between them.
        act: what takes the words.
    """
    for key, answer in answers.items():
        words = [key] if isinstance(key, str) else [*key]
        try:
            act([*given, *words])
        except ValueError as refusal:
            sentence = str(refusal)
            assert sentence.isprintable(), (words, sentence)
            check_parts(sentence, answer)
        else:
            pytest.fail(f"{words} are not refused")


def check_parts(text: str, parts: str) -> None:
    """Check that a text has these parts, between which there is " ... ", in this order."""
    rest = text
    for part in parts.split(" ... "):
        _, found, rest = rest.partition(part)
        assert found, (part, text)
