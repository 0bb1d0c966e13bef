"""Words and options behind a command, and its help: from its function's signature and docstring."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments import commands
from experiments.config.choices import meaning_by_parameter
from sparsify.core.spec import read_constant
from tests.conftest import Command, fine, python, refused

SOURCE = '''
from typing import Literal

from experiments.commands._arguments import RunName, SettingWords
from sparsify.ranges import PositiveInt

GROUP = "results"


def trial(
    run: RunName,
    words: SettingWords,
    *,
    quick: bool = False,
    form: Literal["csv", "tex"] = "csv",
    limit: PositiveInt | None = None,
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
    """Provide a command `trial`, and no other."""
    (tmp_path / "trial.py").write_text(SOURCE)
    monkeypatch.setitem(vars(commands.REGISTRY), "folder", tmp_path)
    monkeypatch.setattr(commands, "LISTED_FIRST", ())
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "experiments.commands.trial", raising=False)


@pytest.mark.usefixtures("trial")
def test_options_stand_anywhere_between_words(here: Command) -> None:
    for words, given in {
        "trial a": "a [] False csv None None",
        "trial a x=1 y=2": "a ['x=1', 'y=2'] False csv None None",
        "--quick trial a --limit 3 x=1 --form=tex y=2": "a ['x=1', 'y=2'] True tex 3 None",
        "trial --save-as here a --quick x=1": "a ['x=1'] True csv None here",
    }.items():
        assert fine(here(*words.split())).stdout == f"{given}\n"


@pytest.mark.usefixtures("trial")
def test_what_a_command_does_not_take_is_answered(here: Command) -> None:
    for words, *answers in (
        ("trial", "required: RUN", "trial --help"),
        ("trial a --quik", "trial has no option '--quik' (did you mean '--quick'?)", "--save-as"),
        ("trial a --qui", "no option '--qui'"),
        ("trial a -x", "no option '-x'"),
        ("trial a --limit", "--limit", "expected one argument"),
        ("trial a --limit 0", "--limit: limit=0 is out of range", "1 or more"),
        ("trial a --form png", "no form 'png'", "csv, tex"),
        ("trail", "no command 'trail' (did you mean 'trial'?)"),
        ("--versoin", "no option '--versoin' (did you mean '--version'?)"),
    ):
        refused(here(*words.split()), *answers)


@pytest.mark.usefixtures("trial")
def test_help_is_the_docstring_and_the_signature(here: Command) -> None:
    helped = fine(here("trial", "--help"))
    for text in ("[KEY=VALUE ...]", "With details.", "100 % of a run", "{csv,tex}", "--save-as SAVE_AS"):
        assert text in helped.stdout
    listed = fine(here("--help"))
    assert "looking at results:\n  trial           A trial.\n" in listed.stdout


@pytest.mark.usefixtures("trial")
def test_a_broken_command_spoils_no_other(here: Command) -> None:
    broken = commands.REGISTRY.folder / "broken.py"
    broken.write_text("def broken(\n")
    fine(here("trial", "a"))
    assert f"can't be read: {broken}" in " ".join(here("--help").stdout.split())
    refused(here("broken"), f"{broken}, line 1: ")


def test_each_command_says_what_it_takes_and_where_lists_have_it(here: Command) -> None:
    for name in commands.command_names():
        assert read_constant(commands.REGISTRY.folder / f"{name}.py", "GROUP") in commands.GROUPS, name
        assert len(commands.REGISTRY.summary(name)) > 10, name
        assert set(meaning_by_parameter(commands.REGISTRY, name)) == set(
            commands.REGISTRY.parameters(name)
        ), name
    refused(here("run", "method=topk", "--ship"), "run has no option '--ship'", "there are: --cfg, --force")
    refused(here("collect", "--force"), "collect has no option '--force'")
    refused(here("collect", "everything"), "everything")


def test_what_everybody_asks_first_imports_little() -> None:
    """Import neither what is slow nor what may be missing; the bare command lists all, and is a mistake."""
    heavy = {"torch", "pandas", "hydra", "griffe", "matplotlib", "numpy"}
    script = (
        "import sys; from experiments.__main__ import main;"
        "assert [main(words) for words in (['--help'], ['--version'], [])] == [0, 0, 2];"
        f"assert not {heavy!r} & set(sys.modules), {heavy!r} & set(sys.modules)"
    )
    done = fine(python("-c", script))
    assert "sparsify" in done.stdout
    assert "reproduce" in done.stdout


EXPLAINED = {  # words before --help -> what is shown, and at the end what is not
    "method=dgc": ["Deep Gradient", "method.momentum=0.9", "null: do not clip", "comm="],
    "method=topk_layerwise": ["k of every tensor instead", "method.scope=layer", "task.lr="],
    "task=cnn_digits": ["8 x 8", "task.batch_size=16", "images of each worker", "method.feedback"],
    "cluster=generic_slurm": ["cluster.partition=null", "what --partition gets", "cluster.name"],
    "link=ethernet": ["10 Gbit/s", "cluster.link.beta_s_per_byte=8e-10", "cluster.gpu"],
    "recipe=yoon2022": ["workers=8", "task.lr_milestones=[81,122,155]", "threads="],
    "profile=smoke": ["train.steps=8", "end the run after so many steps", "threads="],
}


def test_a_choice_is_explained_alone(here: Command) -> None:
    for words, (*shown, hidden) in EXPLAINED.items():
        helped = fine(here("run", words, "--help")).stdout
        for text in shown:
            assert text in " ".join(helped.split()), words
        assert hidden not in helped, words


def test_help_fits_the_terminal(here: Command) -> None:
    long = {"  cluster.link.beta_s_per_byte=4.35e-12", "{dense:'method=dense',sparse:'method=topk"}
    for columns in (80, 100):
        lines = here("run", "--help", COLUMNS=str(columns)).stdout.splitlines()
        assert {line for line in lines if len(line) >= columns and line.strip()} <= long
