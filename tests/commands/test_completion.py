"""Words that Tab offers."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from experiments import commands
from experiments.commands import completion
from tests.conftest import ROOT, Command, environment_for, fine, process, python

HEAVY = {"torch", "pandas", "numpy", "hydra", "omegaconf", "griffe", "matplotlib"}
OFFERED = {  # behind `python -m experiments` -> some words that are offered, and at the end one that is not
    "": ["run", "reproduce", "--version", "_make"],
    "run m": ["method=", "method.", "method.density="],
    "run method=dg": ["method=dgc", "method=topk"],
    "run method=topk,ran": ["method=topk,randomk", "method=topk,randomk_feedback", "method=topk,dgc"],
    "run method=dgc --force method.mo": ["method.momentum=", "method.density="],
    "run method=randomk_feedback method.": ["method.unbiased=", "method.momentum="],
    "run cluster=generic_slurm cluster.": ["cluster.partition=", "cluster.link.", "cluster.name="],
    "run overlap=": ["overlap=true", "overlap=false", "overlap="],
    "reproduce fig4 --": ["--all", "--force", "--ship"],
    "reproduce fig": ["fig4", "fig3-logs", "speed"],
    "why --against n": ["none-0-abcd", "seed="],
    "compare method=dgc x=method.m": ["x=method.momentum", "x=method.density"],
    "completion ": ["bash", "zsh", "fish", "run"],
}


def offered(line: str, folder: Path) -> list[str]:
    """Return the words that complete `python -m experiments {line}`."""
    whole = f"python -m experiments {line}"
    asked = {"COMP_LINE": whole, "COMP_POINT": str(len(whole)), "_ARGCOMPLETE": "3", "_ARGCOMPLETE_IFS": "\n"}
    shell = {"_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "answer")}
    fine(python("-m", "experiments", env=environment_for(folder, **asked, **shell)))
    return (folder / "answer").read_text().splitlines()


def test_what_can_stand_there_is_offered(tmp_path: Path) -> None:
    (tmp_path / "runs" / "none-0-abcd").mkdir(parents=True)
    for line, (*some, other) in OFFERED.items():
        words = offered(line, tmp_path)
        # What is before the last sign that splits words in Bash stands there already.
        ends = {word.rpartition("=")[2] or word for word in words}
        assert {word.rpartition("=")[2] or word for word in some} <= ends, line
        assert other not in words, line


def test_nothing_slow_is_imported_at_a_tab(tmp_path: Path) -> None:
    script = f"""
import argcomplete, sys
from experiments.commands import completion

argcomplete.autocomplete = lambda *words, **how: None
for name in {commands.command_names()!r}:
    line = f"python -m experiments {{name}} method=dgc method."
    completion.print_completions_and_exit(line)
    completion.complete_setting_word("method.", line.split())
    assert not {HEAVY!r} & set(sys.modules), (name, {HEAVY!r} & set(sys.modules))
"""
    fine(python("-c", script, env=environment_for(tmp_path)))


def complete_in_bash(line: str, results: Path, folder: Path = ROOT) -> str:
    """Return what Bash offers in a folder behind this line, where our function was read in the checkout."""
    python = shlex.quote(sys.executable)
    words = " ".join(shlex.quote(word) for word in line.split(" "))
    script = (
        f'eval "$({python} -m experiments completion bash)"; cd {shlex.quote(str(folder))};'
        f"COMP_WORDS=({words}); COMP_LINE={line!r}; COMP_POINT={len(line)};"
        f"_python_m_experiments {python} 2>&1; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    return fine(process("bash", "-c", script, env=environment_for(results))).stdout


def test_bash_is_given_the_answer_and_left_alone_with_other_words(tmp_path: Path) -> None:
    answers = {
        line: complete_in_bash(line, tmp_path).strip()
        for line in ("python -m experiments run method=dg", "python some_file.py")
    }
    assert [*answers.values()] == ["dgc", ""]


def test_no_folders_name_reaches_a_shell_at_a_tab(tmp_path: Path) -> None:
    hostile = ["$(touch owned)", "`touch owned`", "a;touch owned", "-rf", "a b", "a\nb", "*", "~"]
    for name in (*hostile, "none-0-abcd"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "sweeps" / name).mkdir(parents=True)
    words = complete_in_bash("python -m experiments why ", tmp_path).splitlines()
    assert {word.strip() for word in words if not word.startswith("-")} == {"none-0-abcd"}


def test_tab_runs_no_module_of_the_folder_that_one_is_in(tmp_path: Path) -> None:
    for name in ("experiments.py", "experiments/__init__.py", "experiments/__main__.py"):
        hostile = tmp_path / name.replace("/", " ") / name
        hostile.parent.mkdir(parents=True)
        hostile.write_text("open('owned', 'w')")
        folder = tmp_path / name.replace("/", " ")
        assert complete_in_bash("python -m experiments run method=dg", tmp_path, folder).strip() == ""
    assert not [*tmp_path.rglob("owned")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_asks_in_this_checkout_alone_and_can_read_what_it_is_given(
    shell: str, here: Command, tmp_path: Path
) -> None:
    script = fine(here("completion", shell)).stdout
    before_asking, _, _ = script.replace("_ARGCOMPLETE 3", "_ARGCOMPLETE=3").partition("_ARGCOMPLETE=3 ")
    assert str(ROOT) in before_asking
    assert completion.CHECKOUT_MARK not in before_asking
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    (tmp_path / "script").write_text(script)
    assert fine(process(shell, "-n", str(tmp_path / "script"))).stderr == ""


def test_a_folder_is_one_word_of_fish() -> None:
    for text, word in {"/a b": "'/a b'", "/a'b": r"'/a\'b'", "/a\\": r"'/a\\'"}.items():
        assert completion.quote_for_shell(text, "fish") == word
