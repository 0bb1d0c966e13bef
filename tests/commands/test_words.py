"""Words that mean nothing, and how commands end because of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.config import data_root, grammar, plan
from tests.commands.words import (
    FOREIGN,
    GROUPS,
    SIGNS,
    called,
    check_command,
    check_run,
    commands,
    some_words,
)
from tests.conftest import Command, refused


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["fly"], ["no command 'fly'", "run, reproduce"]),
        (["reproduce", "fig9"], ["no item 'fig9'", "fig4"]),
        (["reproduce"], ["reproduce what?", "fig4"]),
        (["run", "--fast"], ["no option '--fast'", "--force"]),
        (["run", "method=topq"], ["no method 'topq'", "topk"]),
        (["run", "workers=0"], ["workers=0"]),
        (["bench", "-1"], ["no benchmark '-1'", "kernels"]),
        (["why", "nothing"], ["0 runs match 'nothing'"]),
    ],
)
def test_words_that_mean_nothing_are_refused_in_a_sentence(
    words: list[str], answers: list[str], here: Command
) -> None:
    """Of the words that a configuration knows, tests/config/test_compose.py has more."""
    refused(here(*words), *answers)


def refusal_of(call: Callable[[], object]) -> str:
    """The sentence with which words are refused; empty where they are taken."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


FEW = settings(
    max_examples=120, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@FEW
@given(words=some_words(GROUPS))
def test_words_mean_a_run_that_makes_sense_or_are_answered(words: list[str]) -> None:
    check_run(words)


@FEW
@given(text=st.text(SIGNS, max_size=12))
@pytest.mark.parametrize("key", ["seed", "variants"])
def test_what_can_not_be_read_is_told_without_the_words_of_a_grammar(key: str, text: str) -> None:
    sentence = refusal_of(lambda: grammar.values(key, text, most=5))
    assert not FOREIGN.search(sentence), sentence
    if "${" not in text:  # as the sentence advises
        assert grammar.value("task.text", grammar.written(text)) == text


@FEW
@given(words=commands(GROUPS))
def test_commands_end_with_lines_that_a_terminal_can_show(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path))
    monkeypatch.setattr(data_root, "reachable", lambda host: False)
    check_command(words, called)


def test_a_refusal_is_a_sentence_and_an_exit_code_and_shows_where_it_came_from_when_asked(
    command: Command,
) -> None:
    refused(command("run", "cluster=mars"), "no cluster 'mars'", "local")
    traced = command("run", "workers=0", "--traceback")
    assert traced.returncode == 2
    assert "Traceback" in traced.stderr


def test_the_paper_profile_refuses_without_gpu_and_says_what_to_do(
    here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "has_gpu", lambda: False)
    refused(here("reproduce", "fig4", "profile=paper"), "needs an NVIDIA GPU", "profile=laptop")


def test_the_paper_profile_refuses_without_data_and_says_what_to_do(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_root, "reachable", lambda host: False)
    words = ("run", "profile=paper", "device=cpu", "task=cnn_cifar10")
    refused(here(*words, f"data.root={tmp_path}"), str(tmp_path), "cifar-10-batches-py")
    done = here(*words, DATA_ROOT=str(tmp_path))
    refused(done, "CIFAR-10 is not in", "data.root=FOLDER or $DATA_ROOT")
