"""What Tab offers."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import commands
from experiments.commands import completion
from tests.conftest import ROOT, Command, environment_for, fine, process, python

HEAVY = {"torch", "pandas", "numpy", "hydra", "omegaconf", "griffe", "matplotlib"}


def offered(line: str, tmp_path: Path) -> list[str]:
    """The words that complete `python -m experiments {line}`."""
    whole = f"python -m experiments {line}"
    asked = {"COMP_LINE": whole, "COMP_POINT": str(len(whole)), "_ARGCOMPLETE": "3", "_ARGCOMPLETE_IFS": "\n"}
    shell = {"_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    fine(python("-m", "experiments", env=environment_for(tmp_path, **asked, **shell)))
    return (tmp_path / "answer").read_text().splitlines()


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("", ["run", "reproduce", "--version"], ["_make"]),
        ("re", ["reproduce"], ["run"]),
        ("run m", ["method=", "method."], ["method.density=", "task="]),
        ("run method=dg", ["method=dgc"], ["method=topk"]),
        ("run method=topk,ran", ["method=topk,randomk", "method=topk,randomk_feedback"], ["method=topk,dgc"]),
        ("run method=dgc --force method.mo", ["method.momentum="], ["method.density="]),
        ("run method=randomk_feedback method.", ["method.unbiased="], ["method.momentum="]),
        ("run cluster=generic_slurm cluster.", ["cluster.partition=", "cluster.link."], ["cluster.name="]),
        ("run --force timing.mode=", ["timing.mode=production"], ["timing.mode="]),
        ("run overlap=", ["overlap=true", "overlap=false"], []),
        ("run method=nothing se", ["seed=", "select="], []),
        ("reproduce fig4 --", ["--all", "--force"], ["--ship"]),
        ("reproduce fig", ["fig4", "fig3-logs"], ["speed", "method="]),
        ("why --against n", ["none-0-abcd"], ["seed="]),
        ("list method=dg", ["method=dgc"], ["method=topk"]),
        ("compare method=dgc x=method.m", ["x=method.momentum"], ["x=method.density"]),
        ("completion ", ["bash", "zsh", "fish"], []),
    ],
)
def test_what_can_stand_there_is_offered(line: str, some: list[str], none: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "none-0-abcd").mkdir(parents=True)
    found = offered(line, tmp_path)
    # What is before the last sign that splits words in Bash stands there already.
    assert {word.rpartition("=")[2] or word for word in some} <= {
        word.rpartition("=")[2] or word for word in found
    }, found
    assert not set(none) & set(found)


@pytest.mark.parametrize("command", commands.names())
def test_nothing_slow_is_imported_at_a_tab(command: str, tmp_path: Path) -> None:
    line = f"python -m experiments {command} method=dgc method."
    script = (
        "import os, sys; from experiments.commands.completion import complete; import argcomplete;"
        "argcomplete.autocomplete = lambda *words, **how: None;"
        f"complete({line!r}); from experiments.commands import completion;"
        f"completion.settings('method.', {line.split()!r}); print({HEAVY!r} & set(sys.modules))"
    )
    done = python("-c", script, env=environment_for(tmp_path))
    assert done.stdout == "set()\n"


def test_bash_is_given_the_answer_and_left_alone_with_other_words(tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    for line, answer in (("python -m experiments run method=dg", "dgc"), ("python some_file.py", "")):
        words = " ".join(shlex.quote(word) for word in line.split())
        script = (
            f'eval "$({python} -m experiments completion bash)"; COMP_WORDS=({words}); COMP_LINE={line!r};'
            f"COMP_POINT={len(line)}; _python_m_experiments {python} 2>&1; echo ${{COMPREPLY[*]}}"
        )
        done = fine(process("bash", "-c", script))
        assert done.stdout.strip().splitlines()[-1:] == ([answer] if answer else []), done.stderr


@pytest.mark.parametrize("name", ["experiments.py", "experiments/__init__.py", "experiments/__main__.py"])
def test_tab_runs_no_module_of_the_folder_that_one_is_in(name: str, tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    evil = tmp_path / name
    evil.parent.mkdir(exist_ok=True)
    evil.write_text("open('owned', 'w')")
    line = "python -m experiments run method=dg"
    script = (
        f'eval "$({python} -m experiments completion bash)"; cd {shlex.quote(str(tmp_path))};'
        f"COMP_WORDS=({line}); COMP_LINE={line!r}; COMP_POINT={len(line)};"
        f"_python_m_experiments {python}; echo ${{COMPREPLY[*]}}"
    )
    done = fine(process("bash", "-c", script))
    assert (done.stdout.strip(), done.stderr) == ("", "")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_asks_in_this_checkout_alone(shell: str, here: Command) -> None:
    before_asking, _, _ = here("completion", shell).stdout.partition("_ARGCOMPLETE=3 ")
    before_asking, _, _ = before_asking.partition("_ARGCOMPLETE 3")
    assert str(ROOT) in before_asking
    assert completion.CHECKOUT not in before_asking


@pytest.mark.parametrize(("text", "word"), [("/a b", "'/a b'"), ("/a'b", r"'/a\'b'"), ("/a\\", r"'/a\\'")])
def test_a_folder_is_one_word_of_fish(text: str, word: str) -> None:
    assert completion._quote(text, "fish") == word


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_can_read_what_it_is_given(shell: str, here: Command) -> None:
    script = here("completion", shell)
    assert script.returncode == 0
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    read = subprocess.run([shell, "-n"], input=script.stdout, capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")
