"""The command line in odd surroundings: it works, or says in a sentence why not."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from analysis.records.store import Store
from tests.conftest import ROOT, Command, environment_for, fine, process, refused

CALL = f"{shlex.quote(sys.executable)} -m experiments"
PLAN = f"{CALL} plan method=topk cluster=generic_slurm profile=smoke task=cnn_digits"


def shell(script: str, results: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return process("bash", "-c", script, env=environment_for(results, **extra))


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    done = shell(f"{PLAN} | true; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_closed_streams_get_nothing_and_harm_no_record(tmp_path: Path) -> None:
    """Files opened first would else get the numbers of the streams, and what is printed."""
    done = shell(
        f"{CALL} run method=topk task=cnn_digits profile=smoke cluster=virtual <&- >&- 2>&-", tmp_path
    )
    assert done.returncode == 0
    (attempt,) = Store(tmp_path / "runs").list_newest_valid_attempts()
    assert attempt.is_valid()


def test_a_working_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = f"cd {shlex.quote(str(tmp_path / 'gone'))}; rmdir $PWD; {PLAN}"
    done = shell(script, tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "experiments: the working folder was deleted; cd to one that is there\n"


def test_few_letters_no_home_and_no_columns_are_enough(tmp_path: Path) -> None:
    results = str(tmp_path / "Läufe")
    around = {"PYTHONIOENCODING": "ascii", "SPARSIFY_RESULTS": results, "COLUMNS": "0", "TERM": "dumb"}
    done = fine(process(*shlex.split(PLAN), "--sbatch", env=around))
    assert r"L\xe4ufe" in done.stdout


def test_a_folder_of_results_that_is_a_file_is_named(here: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("run", "method=dense", "task=cnn_digits", "profile=smoke")
    refused(here(*words, SPARSIFY_RESULTS=str(tmp_path / "file")), str(tmp_path / "file"), code=1)


def test_what_a_terminal_would_obey_is_shown_escaped(here: Command) -> None:
    done = here("why", "\x1b]0;owned\x07\nexperiments: all is well")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.rstrip("\n").isprintable()
