"""The copy of the code that queued jobs run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.records.files import remove_path
from experiments.config import code_version
from experiments.config.code_version import (
    FOLDERS,
    NOTE_FILE,
    describe_copy_damage,
    ensure_code_copy,
    remove_extra_files,
)
from tests.conftest import fine, process, python

DIGEST = "from experiments.config.code_version import code_digest; print(code_digest())"
NATIVE = "sparsify/kernels/native.cpp"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return ensure_code_copy(tmp_path / "code")


def digest_in(copy: Path) -> str:
    return fine(python("-c", DIGEST, cwd=copy)).stdout.strip()


def test_a_copy_holds_all_that_the_packages_hold_and_every_file_counts_for_its_digest(copy: Path) -> None:
    tracked = fine(process("git", "ls-files", *FOLDERS)).stdout.splitlines()
    copied = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert NATIVE in copied
    assert copied >= set(tracked)
    assert not any("__pycache__" in name for name in copied)
    assert code_version._is_leftover(Path("conf/local/cluster/mine.yaml"))  # which belongs to one machine
    assert digest_in(copy) == code_version.code_digest() == copy.name
    (copy / NATIVE).open("a").close()
    assert digest_in(copy) == copy.name  # although it has been run meanwhile
    (copy / NATIVE).write_text("// all that there was is gone")
    assert digest_in(copy) != copy.name


DAMAGES = [  # a file, what it is made to hold (None: it is removed), and what is told of it
    (NATIVE, None, f"{NATIVE} is missing"),
    ("conf/config.yaml", "", "conf/config.yaml was changed"),
    ("sparsify/methods/other.py", "", "sparsify/methods/other.py was added"),
    (NOTE_FILE, None, f"its {NOTE_FILE} is missing or changed"),
    (NOTE_FILE, '{"files": {}}', f"its {NOTE_FILE} is missing or changed"),
    ("experiments", None, "experiments/__init__.py is missing"),
]


def test_damage_of_a_copy_is_told_and_mended(copy: Path) -> None:
    assert describe_copy_damage(copy) == ""
    for name, content, told in DAMAGES:
        if content is None:
            remove_path(copy / name)
        else:
            (copy / name).write_text(content)
        why = describe_copy_damage(copy)
        for words in (told, str(copy), "submit again"):
            assert words in why
        assert ensure_code_copy(copy.parent) == copy
        assert describe_copy_damage(copy) == ""


# What Python, or a shell, would take from a copy of the code.
TOUCHED = """
yaml.py yaml/__init__.py experiments/launch/job_hooks.abi3.so experiments/__pycache__/__main__.pyc
conf/local/cluster/mine.yaml .hidden/yaml.py analysis/editors.py~
"""
STRAYS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(TOUCHED.split(), Path.touch),
    "analysis/link": lambda path: path.symlink_to("/"),
    "analysis/fifo": os.mkfifo,
}


def test_strays_in_a_copy_are_told_and_removed_at_submission_and_as_a_job_begins(copy: Path) -> None:
    for name, make in STRAYS.items():
        for removes in ("submission", "job"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            make(copy / name)
            assert f"{name} was added" in describe_copy_damage(copy)
            if removes == "submission":
                assert ensure_code_copy(copy.parent) == copy
            else:
                assert any(name.startswith(stray) for stray in remove_extra_files(copy))
            assert describe_copy_damage(copy) == ""
            assert not os.path.lexists(copy / name)


def test_jobs_keep_no_bytecode_in_the_copy(copy: Path) -> None:
    script = f"{code_version.WITHOUT_BYTECODE}\n{sys.executable} -c 'import experiments.launch.job_hooks'"
    fine(process("sh", "-c", script, cwd=copy))
    assert describe_copy_damage(copy) == ""


def test_by_a_note_that_was_changed_nothing_is_removed(copy: Path) -> None:
    (copy / NOTE_FILE).write_text('{"files": {"analysis/claims.py": "0"}}')
    assert remove_extra_files(copy) == []
    assert (copy / "sparsify" / "__init__.py").is_file()


def test_a_copy_that_leads_elsewhere_is_made_anew_and_the_rest_left_alone(copy: Path) -> None:
    for number, part in enumerate(("", "analysis", "analysis/claims.py")):
        elsewhere = copy.parent.with_name(f"mine{number}")
        (copy / part).rename(elsewhere)
        mine = elsewhere / "own.py" if elsewhere.is_dir() else elsewhere
        mine.write_text("mine")
        (copy / part).symlink_to(elsewhere)
        assert describe_copy_damage(copy) != ""
        assert ensure_code_copy(copy.parent) == copy
        assert describe_copy_damage(copy) == ""
        assert mine.read_text() == "mine"
        assert not (copy / part).is_symlink()


def test_code_that_is_edited_while_it_is_copied_is_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_version, "code_digest", lambda: "0" * 12)  # as it was some moments ago
    with pytest.raises(ValueError, match="was edited while it was being copied: submit again"):
        ensure_code_copy(tmp_path)
