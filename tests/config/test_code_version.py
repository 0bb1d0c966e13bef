"""The copy of the code that queued jobs run."""

from __future__ import annotations

from pathlib import Path

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


def test_every_kind_of_file_counts_for_the_digest(tmp_path: Path) -> None:
    copy = code_version.copy_into(tmp_path)
    (copy / "sparsify/kernels/native.cpp").open("a").close()
    assert digest_in(copy) == copy.name
    (copy / "sparsify/kernels/native.cpp").write_text("// all that there was is gone")
    assert digest_in(copy) != copy.name


def test_what_belongs_to_one_machine_is_no_code() -> None:
    assert code_version._is_left(Path("conf/local/cluster/mine.yaml"))
    assert not code_version._is_left(Path("conf/cluster/generic_slurm.yaml"))
