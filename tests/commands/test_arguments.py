"""What stands behind a command: its function's signature says, its docstring explains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments import commands
from experiments.config.choices import meanings
from tests.conftest import Command, fine, python, refused

SOURCE = '''
from typing import Literal

from experiments.commands._words import RunName, SettingWords
from sparsify.ranges import Count

GROUP = "results"


def trial(
    run: RunName,
    words: SettingWords,
    *,
    quick: bool = False,
    form: Literal["csv", "tex"] = "csv",
    limit: Count | None = None,
    save_as: str | None = None,
) -> int:
    """A trial.

    With details.

    Args:
        run: 100 % of a run, in part of its name.
        words: its settings.
        quick, form: how.
        limit: so many rows.
        save_as: a file.
    """
    print(run, list(words), quick, form, limit, save_as)
    return 0
'''


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command `trial`, and nothing else."""
    (tmp_path / "trial.py").write_text(SOURCE)
    monkeypatch.setitem(vars(commands.REGISTRY), "folder", tmp_path)
    monkeypatch.setattr(commands, "FIRST", ())
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "experiments.commands.trial", raising=False)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("trial a", "a [] False csv None None"),
        ("trial a x=1 y=2", "a ['x=1', 'y=2'] False csv None None"),
        ("--quick trial a --limit 3 x=1 --form=tex y=2", "a ['x=1', 'y=2'] True tex 3 None"),
        ("trial --save-as here a --quick x=1", "a ['x=1'] True csv None here"),
    ],
)
def test_options_stand_anywhere_between_words(words: str, given: str, trial: None, here: Command) -> None:
    done = here(*words.split())
    assert (done.returncode, done.stdout) == (0, f"{given}\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("trial", ["required: RUN", "trial --help"]),
        ("trial a --quik", ["trial has no option '--quik' (did you mean '--quick'?)", "--save-as"]),
        ("trial a --qui", ["no option '--qui'"]),
        ("trial a -x", ["no option '-x'"]),
        ("trial a --limit", ["--limit", "expected one argument"]),
        ("trial a --limit 0", ["--limit: limit=0 is out of range", "1 or more"]),
        ("trial a --form png", ["no form 'png'", "csv, tex"]),
        ("trail", ["no command 'trail' (did you mean 'trial'?)"]),
        ("--versoin", ["no option '--versoin' (did you mean '--version'?)"]),
    ],
)
def test_what_a_command_does_not_take_is_answered(
    words: str, answers: list[str], trial: None, here: Command
) -> None:
    refused(here(*words.split()), *answers)


def test_help_is_the_docstring_and_the_signature(trial: None, here: Command) -> None:
    helped = fine(here("trial", "--help"))
    for text in ("[KEY=VALUE ...]", "With details.", "100 % of a run", "{csv,tex}", "--save-as SAVE_AS"):
        assert text in helped.stdout
    listed = here("--help")
    assert listed.returncode == 0
    assert "looking at results:\n  trial           A trial.\n" in listed.stdout


def test_a_broken_command_spoils_no_other(trial: None, here: Command) -> None:
    broken = commands.REGISTRY.folder / "broken.py"
    broken.write_text("def broken(\n")
    assert here("trial", "a").returncode == 0
    assert f"can't be read: {broken}" in " ".join(here("--help").stdout.split())
    refused(here("broken"), f"{broken}, line 1: ")


def test_each_command_says_what_it_takes_and_where_lists_have_it() -> None:
    for name in commands.names():
        assert commands.group_of(name) in commands.GROUPS, name
        assert len(commands.REGISTRY.summary(name)) > 10, name
        assert set(meanings(commands.REGISTRY, name)) == set(commands.REGISTRY.parameters(name)), name


def test_an_option_is_taken_where_it_means_something(here: Command) -> None:
    refused(here("run", "method=topk", "--ship"), "run has no option '--ship'", "there are: --force")
    refused(here("collect", "--force"), "collect has no option '--force'")
    refused(here("collect", "everything"), "everything")


def test_what_everybody_asks_first_imports_little() -> None:
    """Neither what is slow nor what may be missing; the bare command lists them all, and is a mistake."""
    heavy = {"torch", "pandas", "hydra", "griffe", "matplotlib", "numpy"}
    for words, code in ((["--help"], 0), (["--version"], 0), ([], 2)):
        script = (
            f"import sys; from experiments.__main__ import main; code = main({words!r});"
            f"assert code == {code}; assert not {heavy!r} & set(sys.modules), {heavy!r} & set(sys.modules)"
        )
        done = fine(python("-c", script))
        assert "sparsify" in done.stdout or "reproduce" in done.stdout
