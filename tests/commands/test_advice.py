"""What sentences tell a person to type is understood when it is typed."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache

import pytest

from experiments import commands
from experiments.config import compose, grammar
from experiments.launch.diagnosis import POLICIES
from slurm.reasons import remedies
from tests.conftest import ROOT, process

PARTS = "cluster|task|method|train|timing|launch|data|container|alternate"
# Configurations that have every part in each of its forms.
EVERY = (
    ["cluster=generic_slurm", "container=cpu", "task=cnn_cifar10"], ["cluster=virtual", "method=dgc"],
    ["cluster=netns", "task=vector"], ["variants={dense:'method=dense',sparse:'method=topk'}"],
    ["task=gpt_ptb"],
)  # fmt: skip


def of_tables() -> Iterator[str]:
    yield from remedies().refuses.values()
    yield from remedies().waits.values()
    for policy in POLICIES.values():
        yield from (policy.advice, *policy.slurm.values())


@cache
def said() -> tuple[str, ...]:
    """All that the tables of advice and the code's own strings say; of f-strings the fixed parts."""
    found = [*of_tables()]
    for folder in ("sparsify", "slurm", "analysis", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [
                node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    return tuple(found)


def typed() -> set[str]:
    """Commands of ours that sentences name."""
    quoted = {code for text in said() for code in re.findall(r"(?<!`)`([a-z][^`\n]*)`(?!`)", text)}
    lines = {code.removeprefix("python -m experiments ") for code in quoted}
    return {line for line in lines if line.partition(" ")[0] in commands.names()}


def test_sentences_name_commands_as_they_are_typed() -> None:
    assert {"cancel", "doctor", "status", "submit"} <= typed()
    for line in typed():
        command, *words = shlex.split(line)
        if words and "..." not in words:  # else a sentence about the command
            commands.parser_of(command).parsed([word for word in words if word != "--help"])


@pytest.mark.parametrize("text", sorted(set(of_tables())))
def test_a_command_in_a_table_of_advice_is_one(text: str) -> None:
    for code in re.findall(r"`([^`]+)`", text):
        word = code.partition(" ")[0]
        assert word == "make" or word in commands.names()
        if word == "make":
            assert process(*shlex.split(code), "--dry-run").returncode == 0


@cache
def settings() -> frozenset[str]:
    return frozenset(key for words in EVERY for key in compose.leaves(compose.resolve(words)))


def test_the_fields_that_advice_names_can_be_set() -> None:
    named = {name for text in of_tables() for name in re.findall(rf"\b(?:{PARTS})\.\w+", text)}
    assert "cluster.time_min" in named
    assert named <= settings()


PAIR = re.compile(rf"(?<![\w.`])((?:{PARTS})\.\w+)=(\[[^\]]*\]|[\w.]+)")


def test_the_words_that_sentences_advise_are_read() -> None:
    pairs = {pair for text in said() for pair in PAIR.findall(text) if not pair[1].isupper()}
    assert ("cluster.sbatch", "['--wckey=yours']") in pairs
    for key, value in pairs:
        assert key in settings(), key
        grammar.values(key, value, most=9)
