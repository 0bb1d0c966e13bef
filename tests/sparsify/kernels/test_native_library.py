"""The compiled library's cache: what is loaded is whole, ours, and was tried; what is not is built again."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsify.kernels import native, native_library
from sparsify.kernels.native_library import Unavailable, ready
from tests.conftest import ROOT

OTHER_USER = 12345
WRONG = """
extern "C" {
int sparsify_level() { return 0; }
long sparsify_parts() { return 1; }
int sparsify_topk() { return 0; }
void sparsify_above() {}
void sparsify_add() {}
void sparsify_clear_at() {}
void sparsify_norms() {}
void sparsify_statistical2() {}
void sparsify_move() {}
void sparsify_chunks() {}
}
"""

ABORT = """
#include <cstdlib>
__attribute__((constructor)) static void when_loaded() { std::abort(); }
"""
COMPILER = next(filter(None, map(shutil.which, native_library.COMPILERS)), None)


@pytest.fixture
def real() -> Path:
    """The library of this machine."""
    if not any(map(shutil.which, native_library.COMPILERS)):
        pytest.skip("there is no compiler")
    return Path(native.library()._name)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A compiler that takes no time: it runs these lines, in which $out is its output. Returns where its
    calls are noted. Both folders of the cache are empty.
    """
    programs, notes = tmp_path / "programs", tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # of the processes that are started
    (tmp_path / "tmp").mkdir()
    programs.mkdir()
    notes.touch()

    def make(lines: str) -> Path:
        program = programs / "c++"
        program.write_text(f"#!/bin/sh\necho $$ >> {notes}\nfor out; do :; done\n{lines}\n")
        program.chmod(0o755)
        return notes

    return make


def calls(notes: Path) -> int:
    return len(notes.read_text().split())


def cache() -> Path:
    """The first of the two folders."""
    return next(native_library.places())


def left_by_an_earlier_process(content: bytes) -> Path:
    """It is not loaded here: who changes a library that is in use ends its users."""
    path = cache() / f"native-{native_library.key()}-{native_library.digest(content)}.so"
    cache().mkdir(parents=True, mode=0o700)
    path.write_bytes(content)
    path.chmod(0o700)
    return path


def the_file(folder: Path) -> Path:
    """The only library there; nothing else is left but the lock."""
    (path,) = (path for path in folder.iterdir() if path.name != "lock")
    return path


def test_it_is_built_and_tried_once_and_only_its_user_can_write_it(
    real: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = compiler(f'cp "{real}" "$out"')
    old = os.umask(0)  # the most careless of users
    try:
        assert ready().sparsify_level() >= 0
    finally:
        os.umask(old)
    assert cache().stat().st_mode & 0o777 == 0o700
    assert the_file(cache()).stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(sys, "executable", "/no/python")  # what would try it
    assert Path(ready()._name) == the_file(cache())
    assert calls(notes) == 1


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def replaced_by_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o700)


def writable_by_all(path: Path) -> None:
    path.chmod(0o777)


def anothers(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, OTHER_USER, -1)


@pytest.mark.parametrize(
    "damage", [shorter, emptied, flipped, replaced_by_a_link, replaced_by_a_pipe, writable_by_all, anothers]
)
def test_a_library_that_is_damaged_or_not_ours_is_not_loaded_but_built_again(
    real: Path, compiler: Callable[[str], Path], damage: Callable[[Path], None]
) -> None:
    notes = compiler(f'cp "{real}" "$out"')
    path = left_by_an_earlier_process(real.read_bytes())
    damage(path)
    assert Path(ready()._name) == the_file(cache()) == path
    assert calls(notes) == 1
    assert path.read_bytes() == real.read_bytes()
    ready()
    assert calls(notes) == 1


def test_a_library_that_does_not_load_here_is_left_to_the_systems_that_share_the_home(
    real: Path, compiler: Callable[[str], Path]
) -> None:
    compiler(f'cp "{real}" "$out"')
    content = b"for another system"
    theirs = left_by_an_earlier_process(content)
    assert Path(ready()._name).read_bytes() == real.read_bytes()
    assert theirs.read_bytes() == content


def in_a_file(folder: Path) -> None:
    folder.parent.parent.write_text("no folder can be made here")


def of_another(folder: Path) -> None:
    folder.mkdir(parents=True)
    anothers(folder)


def through_anothers_link(folder: Path) -> None:
    (target := folder.parent.parent.with_name("target")).mkdir()
    folder.parent.mkdir(parents=True)
    folder.symlink_to(target)
    if os.geteuid() != 0:
        pytest.skip("only root can give links away")
    os.lchown(folder, OTHER_USER, -1)


@pytest.mark.parametrize("spoil", [in_a_file, of_another, through_anothers_link])
def test_where_the_home_can_not_be_used_the_machine_keeps_it(
    real: Path, compiler: Callable[[str], Path], spoil: Callable[[Path], None]
) -> None:
    compiler(f'cp "{real}" "$out"')
    home, machine = native_library.places()
    spoil(home)
    assert Path(ready()._name) == the_file(machine)


def test_where_nothing_can_be_used_both_folders_are_named(compiler: Callable[[str], Path]) -> None:
    compiler("exit 1")
    home, machine = native_library.places()
    in_a_file(home)
    machine.write_text("")
    with pytest.raises(Unavailable, match=f"{home}.*{machine}"):
        ready()


def test_a_folder_that_all_may_write_is_closed_first(real: Path, compiler: Callable[[str], Path]) -> None:
    compiler(f'cp "{real}" "$out"')
    cache().mkdir(parents=True)
    cache().chmod(0o777)
    ready()
    assert cache().stat().st_mode & 0o777 == 0o700


def test_a_link_of_ours_is_followed(real: Path, compiler: Callable[[str], Path], tmp_path: Path) -> None:
    compiler(f'cp "{real}" "$out"')
    (tmp_path / "scratch").mkdir()
    cache().parent.mkdir(parents=True)
    cache().symlink_to(tmp_path / "scratch")
    ready()
    assert the_file(tmp_path / "scratch").read_bytes() == real.read_bytes()


def test_each_kind_of_processor_has_its_own(
    real: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried on the one that it was built on; homes are shared by many."""
    notes = compiler(f'cp "{real}" "$out"')
    ready()
    monkeypatch.setattr(native_library, "cpu_features", lambda: "fpu sse2")
    ready()
    assert calls(notes) == 2


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("echo disk is full >&2; exit 1", "disk is full"),
        ("{build} abort.cpp", "made was ended by SIGABRT"),
        ("{build} wrong.cpp", "AssertionError"),
    ],
    ids=["fails", "makes what crashes", "makes what is wrong"],
)
def test_what_fails_is_told_and_leaves_nothing(
    real: Path, compiler: Callable[[str], Path], tmp_path: Path, lines: str, why: str
) -> None:
    (tmp_path / "wrong.cpp").write_text(WRONG)
    (tmp_path / "abort.cpp").write_text(ABORT)
    compiler(lines.format(build=f'cd "{tmp_path}"; "{COMPILER}" -shared -fPIC -o "$out"'))
    with pytest.raises(Unavailable, match=why):
        ready()
    assert [path.name for path in cache().iterdir()] == ["lock"]


def test_a_compiler_that_hangs_is_given_up_with_all_that_it_started(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_library, "LIMIT_S", 0.5)
    notes = compiler(f"sleep 100 & echo $! >> {tmp_path}/calls; sleep 100")
    with pytest.raises(Unavailable, match=r"did not end within 0\.5 s"):
        ready()
    for process in map(int, notes.read_text().split()):
        until = time.monotonic() + 30  # the kernel may be busy; they would sleep longer
        while "sleep" in (words := running(process)) and time.monotonic() < until:
            time.sleep(0.02)
        assert "sleep" not in words
    assert [path.name for path in cache().iterdir()] == ["lock"]


def test_who_waits_for_another_s_compiler_gives_up_too(
    real: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "LIMIT_S", 0.2)
    notes = compiler(f'cp "{real}" "$out"')
    cache().mkdir(parents=True, mode=0o700)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match=r"another process has been compiling it for 0\.2 s"):
            ready()
    assert calls(notes) == 0


def running(process: int) -> str:
    """Its command line; empty where it ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


TOGETHER = f"""
import sys
sys.path.insert(0, {str(ROOT / "sparsify/kernels")!r})
import native_library
print(native_library.ready()._name)
"""


def test_of_workers_that_start_together_one_builds(real: Path, compiler: Callable[[str], Path]) -> None:
    notes = compiler(f'sleep 0.2; cp "{real}" "$out"')
    workers = [
        subprocess.Popen([sys.executable, "-S", "-c", TOGETHER], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = {worker.communicate(timeout=60)[0].strip() for worker in workers}
    assert said == {str(the_file(cache()))}
    assert calls(notes) == 1
