"""The archives of the library are checked before somebody releases them."""

from __future__ import annotations

import tarfile
import zipfile
from importlib import util
from pathlib import Path

import pytest

import sparsify
from tests import dist
from tests.conftest import fine, python

WHOLE = dict.fromkeys(dist.NEEDED, b"")


@pytest.mark.extended
@pytest.mark.skipif(util.find_spec("twine") is None, reason="there is no twine: `make dist`")
def test_archives_pass_their_checks_and_the_owners_decisions_are_named(tmp_path: Path) -> None:
    said = fine(python("-m", "tests.dist", str(tmp_path / "dist"))).stdout
    release = f"gradient_sparsification-{sparsify.__version__}"
    assert {path.name for path in (tmp_path / "dist").iterdir()} == {
        f"{release}-py3-none-any.whl",
        f"{release}.tar.gz",
    }
    assert "twine takes both, and the wheel works where nothing else is installed" in said
    assert [line.partition(": ")[2].split()[1] for line in said.splitlines()[-2:]] == ["licence,", "name:"]


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (WHOLE, ""),
        ({"sparsify/py.typed": b""}, "lacks sparsify/kernels/native.cpp"),
        ({**WHOLE, "tests/test_laws.py": b""}, "has tests: tests/test_laws.py"),
        ({**WHOLE, "sparsify/large": bytes(dist.MAX_BYTES)}, "MB; 1 MB is the limit"),
    ],
)
def test_faults_of_archives_are_found(tmp_path: Path, files: dict[str, bytes], fault: str) -> None:
    wheel = tmp_path / "a.whl"
    source = tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive, tarfile.open(source, "w") as tar:
        for name, content in files.items():
            path = tmp_path / "a" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            archive.write(path, name)
            tar.add(path, f"a/{name}")
    for archive_file in (wheel, source):
        faults = dist.find_faults(archive_file)
        assert len(faults) == bool(fault)
        assert fault in "".join(faults)


def test_a_wheel_that_can_not_be_imported_alone_is_found(tmp_path: Path) -> None:
    wheel = tmp_path / "sparsify-1-py3-none-any.whl"
    about = "sparsify-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sparsify/__init__.py", "import no_such_package")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: sparsify\nVersion: 1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    (fault,) = dist.try_alone(wheel)
    assert "No module named 'no_such_package'" in fault
