"""The copy of the code that queued jobs run."""

from __future__ import annotations

import os
import py_compile
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.records.files import remove
from experiments.config import code_version
from experiments.config.code_version import FOLDERS
from tests.conftest import fine, process, python

DIGEST = "from experiments.config.code_version import digest; print(digest())"


def digest_in(copy: Path) -> str:
    return fine(python("-c", DIGEST, cwd=copy)).stdout.strip()


def test_a_copy_holds_all_that_the_packages_hold_and_has_the_same_digest(tmp_path: Path) -> None:
    tracked = fine(process("git", "ls-files", *FOLDERS)).stdout.splitlines()
    copy = code_version.copy_into(tmp_path)
    copied = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert "sparsify/kernels/native.cpp" in copied
    assert copied >= set(tracked)
    assert not any("__pycache__" in name for name in copied)
    assert digest_in(copy) == code_version.digest() == copy.name  # although it has been run meanwhile
    assert digest_in(copy) == copy.name


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("sparsify/kernels/native.cpp", None, "sparsify/kernels/native.cpp is missing"),
        ("conf/config.yaml", "", "conf/config.yaml was changed"),
        ("sparsify/methods/other.py", "", "sparsify/methods/other.py was added"),
        (code_version.NOTE, None, f"its {code_version.NOTE} is missing or changed"),
        (code_version.NOTE, '{"files": {}}', f"its {code_version.NOTE} is missing or changed"),
        ("experiments", None, "experiments/__init__.py is missing"),
    ],
)
def test_what_became_of_a_copy_is_told_and_mended(
    file: str, content: str | None, told: str, tmp_path: Path
) -> None:
    copy = code_version.copy_into(tmp_path)
    assert code_version.damage(copy) == ""
    if content is None:
        remove(copy / file)
    else:
        (copy / file).write_text(content)
    why = code_version.damage(copy)
    assert told in why
    assert str(copy) in why
    assert "submit again" in why
    assert code_version.copy_into(tmp_path) == copy
    assert code_version.damage(copy) == ""


STRAYS: dict[str, Callable[[Path], object]] = {  # what Python, or a shell, would take from a copy of the code
    "yaml.py": lambda path: path.write_text("raise SystemExit('owned')"),
    "yaml/__init__.py": lambda path: path.write_text("raise SystemExit('owned')"),
    "experiments/launch/job_hooks/__init__.py": lambda path: path.write_text("raise SystemExit('owned')"),
    "experiments/launch/job_hooks.abi3.so": lambda path: path.write_bytes(b""),
    "experiments/__pycache__/__main__.pyc": lambda path: path.write_bytes(b""),
    "conf/local/cluster/mine.yaml": lambda path: path.write_text("setup: [touch owned]"),
    ".hidden/yaml.py": lambda path: path.write_text("raise SystemExit('owned')"),
    "analysis/editors.py~": lambda path: path.write_text(""),
    "analysis/link": lambda path: path.symlink_to("/"),
    "analysis/fifo": os.mkfifo,
}


def with_parents(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize("how", ["as it is submitted again", "as a job begins"])
@pytest.mark.parametrize("name", STRAYS)
def test_what_no_copy_has_is_told_and_removed(name: str, how: str, tmp_path: Path) -> None:
    copy = code_version.copy_into(tmp_path)
    STRAYS[name](with_parents(copy / name))
    assert f"{name} was added" in code_version.damage(copy)
    if how == "as it is submitted again":
        assert code_version.copy_into(tmp_path) == copy
    else:
        assert any(name.startswith(stray) for stray in code_version.remove_strays(copy))
    assert code_version.damage(copy) == ""
    assert not os.path.lexists(copy / name)


def unchecked(path: Path) -> None:
    """Bytecode of another source than the one beside it, which Python does not compare."""
    source = path.with_suffix(".owned")
    source.write_text("raise SystemExit('owned')")
    compiled = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(source), str(compiled), invalidation_mode=mode)
    source.unlink()


def test_no_job_runs_what_a_strangers_copy_holds(tmp_path: Path) -> None:
    copy = code_version.copy_into(tmp_path)
    (copy / "yaml.py").write_text("raise SystemExit('owned')")
    unchecked(copy / "experiments" / "launch" / "job_hooks.py")
    hooks = ("-m", "experiments.launch.job_hooks", "begin", "none.json")
    assert "owned" in python(*hooks, cwd=copy).stderr
    code_version.copy_into(tmp_path)
    assert "none.json can't be read here" in python(*hooks, cwd=copy).stderr


def test_jobs_keep_no_bytecode_in_the_copy(tmp_path: Path) -> None:
    copy = code_version.copy_into(tmp_path)
    script = f"{code_version.WITHOUT_BYTECODE}\n{sys.executable} -c 'import experiments.launch.job_hooks'"
    fine(process("sh", "-c", script, cwd=copy))
    assert code_version.damage(copy) == ""


def test_by_a_note_that_was_changed_nothing_is_removed(tmp_path: Path) -> None:
    copy = code_version.copy_into(tmp_path)
    (copy / code_version.NOTE).write_text('{"files": {"analysis/claims.py": "0"}}')
    assert code_version.remove_strays(copy) == []
    assert (copy / "sparsify" / "__init__.py").is_file()


@pytest.mark.parametrize("part", ["", "analysis", "analysis/claims.py"])
def test_a_copy_that_leads_elsewhere_is_made_anew_and_the_rest_left_alone(part: str, tmp_path: Path) -> None:
    copy = code_version.copy_into(tmp_path / "code")
    elsewhere = tmp_path / "mine"
    (copy / part).rename(elsewhere)
    mine = elsewhere / "own.py" if elsewhere.is_dir() else elsewhere
    mine.write_text("mine")
    (copy / part).symlink_to(elsewhere)
    assert code_version.damage(copy) != ""
    assert code_version.copy_into(tmp_path / "code") == copy
    assert code_version.damage(copy) == ""
    assert mine.read_text() == "mine"
    assert not (copy / part).is_symlink()


def test_code_that_is_edited_while_it_is_copied_is_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_version, "digest", lambda: "0" * 12)  # as it was some moments ago
    with pytest.raises(ValueError, match="was edited while it was being copied: submit again"):
        code_version.copy_into(tmp_path)


def test_every_kind_of_file_counts_for_the_digest(tmp_path: Path) -> None:
    copy = code_version.copy_into(tmp_path)
    (copy / "sparsify/kernels/native.cpp").open("a").close()
    assert digest_in(copy) == copy.name
    (copy / "sparsify/kernels/native.cpp").write_text("// all that there was is gone")
    assert digest_in(copy) != copy.name


def test_what_belongs_to_one_machine_is_no_code() -> None:
    assert code_version._is_left(Path("conf/local/cluster/mine.yaml"))
    assert not code_version._is_left(Path("conf/cluster/generic_slurm.yaml"))
