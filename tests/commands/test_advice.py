"""Commands that sentences advise are understood when they are typed."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache

from experiments import commands
from experiments.config import compose, grammar
from experiments.launch.diagnosis import POLICIES
from slurm.reasons import load_remedy_table
from tests.conftest import ROOT, fine, process

PARTS = "cluster|task|method|train|timing|launch|data|container|alternate"
# Configurations that have every part in each of its forms.
EVERY = (
    ["cluster=generic_slurm", "container=cpu", "task=cnn_cifar10"], ["cluster=virtual", "method=dgc"],
    ["cluster=netns", "task=vector"], ["variants={dense:'method=dense',sparse:'method=topk'}"],
    ["task=gpt_ptb"],
)  # fmt: skip
WORDS_IN_A_ROW = 3  # of a message of docs/messages.md, which has gaps where the code's strings have them


def sentences_of_tables() -> list[str]:
    table = load_remedy_table()
    sentences = [*table.field_by_refusal_words.values(), *table.field_by_waiting_reason.values()]
    for policy in POLICIES.values():
        sentences += [policy.advice, *policy.why_by_job_state.values()]
    return sentences


@cache
def sentences() -> tuple[str, ...]:
    """Return what the tables of advice and all strings of the code say; of f-strings the fixed parts."""
    found = sentences_of_tables()
    for folder in ("sparsify", "slurm", "analysis", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            constants = (
                node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
            )
            found += [node.value for node in constants if isinstance(node.value, str)]
    return tuple(found)


def test_commands_that_sentences_name_are_understood() -> None:
    quoted = {code for text in sentences() for code in re.findall(r"(?<!`)`([a-z][^`\n]*)`(?!`)", text)}
    lines = {code.removeprefix("python -m experiments ") for code in quoted}
    typed = {line for line in lines if line.partition(" ")[0] in commands.command_names()}
    assert {"cancel", "doctor", "status", "submit"} <= typed
    for line in typed:
        command, *words = shlex.split(line)
        if words and "..." not in words:  # else a sentence about the command
            commands.make_parser(command).parse_words([word for word in words if word != "--help"])


def test_tables_of_advice_name_commands_and_settings_that_there_are() -> None:
    advice = "\n".join(sentences_of_tables())
    codes = re.findall(r"`([^`]+)`", advice)
    assert {code.partition(" ")[0] for code in codes} <= {"make", *commands.command_names()}
    targets = {code.removeprefix("make ") for code in codes if code.startswith("make ")}
    fine(process("make", "--dry-run", *targets))
    named = set(re.findall(rf"\b(?:{PARTS})\.\w+", advice))
    assert "cluster.time_min" in named
    assert named <= settings()


@cache
def settings() -> set[str]:
    return {key for words in EVERY for key in compose.settable_type_by_key(compose.resolve(words))}


def test_the_settings_that_sentences_advise_are_read() -> None:
    pattern = rf"(?<![\w.`])((?:{PARTS})\.\w+)=(\[[^\]]*\]|[\w.]+)"
    pairs = {pair for text in sentences() for pair in re.findall(pattern, text) if not pair[1].isupper()}
    assert ("cluster.sbatch", "['--wckey=yours']") in pairs
    for key, value in pairs:
        assert key in settings(), key
        grammar.parse_values(key, value, max_count=9)


def test_messages_of_the_documentation_are_still_said() -> None:
    """Find some words in a row of each message, or all of a short one, in the code."""
    said = "\n".join(sentences())
    page = (ROOT / "docs/messages.md").read_text()
    for message in re.findall(r"(?m)^- `([^`]+)`", page):
        words = message.split()
        row = min(WORDS_IN_A_ROW, len(words))
        parts = (" ".join(words[first : first + row]) for first in range(len(words) - row + 1))
        assert any(part in said for part in parts), message
