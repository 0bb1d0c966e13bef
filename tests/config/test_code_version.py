"""The copy of the code that queued jobs run."""

from __future__ import annotations

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
