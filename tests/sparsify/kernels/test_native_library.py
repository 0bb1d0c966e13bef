"""The compiled library's cache: what is loaded is whole, ours, and was tried; what is not is built again."""

from __future__ import annotations

import contextlib
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
from sparsify.kernels.native_library import KernelUnavailableError, load_or_build
from tests.conftest import ROOT

OTHER_USER = 12345
WRONG = """
extern "C" {
int sparsify_level() { return 0; }
long sparsify_num_blocks() { return 1; }
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
MakeCompiler = Callable[[str], Path]


@pytest.fixture
def real() -> Path:
    """Return the library of this machine."""
    if COMPILER is None:
        pytest.skip("there is no compiler")
    return Path(native.get_library()._name)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCompiler:
    """Return a function that makes a compiler that takes no time.

    The compiler runs the given lines, in which $out is its output; the function returns where its calls are
    noted. Both folders of the cache are empty.
    """
    programs = tmp_path / "programs"
    notes = tmp_path / "calls"
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


@pytest.fixture
def notes(real: Path, compiler: MakeCompiler) -> Path:
    """Return where calls are noted of a compiler that makes the library of this machine."""
    return compiler(f'cp "{real}" "$out"')


def num_calls(notes: Path) -> int:
    return len(notes.read_text().split())


def cache() -> Path:
    """Return the first of the two folders."""
    return next(native_library.cache_folders())


def leave_in_cache(content: bytes) -> Path:
    """Write a library as an earlier process left it.

    It is not loaded here: who changes a library that is in use ends its users.
    """
    path = cache() / f"native-{native_library.build_digest()}-{native_library.content_digest(content)}.so"
    cache().mkdir(parents=True, mode=0o700)
    path.write_bytes(content)
    path.chmod(0o700)
    return path


def the_file(folder: Path) -> Path:
    """Return the only library there; nothing else is left but the lock."""
    (path,) = (path for path in folder.iterdir() if path.name != "lock")
    return path


def test_it_is_built_and_tried_once_and_only_its_user_can_write_it(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache().mkdir(parents=True)
    cache().chmod(0o777)  # is closed first
    before = os.umask(0)  # the most careless of users
    try:
        assert load_or_build().sparsify_level() >= 0
    finally:
        os.umask(before)
    assert cache().stat().st_mode & 0o777 == 0o700
    assert the_file(cache()).stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/python")  # what would try it
        assert Path(load_or_build()._name) == the_file(cache())
    assert num_calls(notes) == 1
    # Each kind of processor has its own: it was tried on the one that it was built on; homes are shared.
    monkeypatch.setattr(native_library, "cpu_features", lambda: "fpu sse2")
    load_or_build()
    assert num_calls(notes) == 2


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def replace_by_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o700)


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.lchown(path, OTHER_USER, -1)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit flipped": flip_a_bit,
    "a link": replace_by_a_link,
    "a pipe": replace_by_a_pipe,
    "writable by all": lambda path: path.chmod(0o777),
    "another's": give_away,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_damaged_or_not_ours_is_not_loaded_but_built_again(
    real: Path, notes: Path, damage: str
) -> None:
    path = leave_in_cache(real.read_bytes())
    DAMAGES[damage](path)
    for _ in range(2):
        assert Path(load_or_build()._name) == the_file(cache()) == path
        assert num_calls(notes) == 1
        assert path.read_bytes() == real.read_bytes()


def test_a_library_that_does_not_load_here_is_left_to_the_systems_that_share_the_home(
    real: Path, notes: Path
) -> None:
    content = b"for another system"
    theirs = leave_in_cache(content)
    assert Path(load_or_build()._name).read_bytes() == real.read_bytes()
    assert theirs.read_bytes() == content


def put_a_file_there(folder: Path) -> None:
    folder.parent.parent.write_text("no folder can be made here")


def give_the_folder_away(folder: Path) -> None:
    folder.mkdir(parents=True)
    give_away(folder)


def lead_through_anothers_link(folder: Path) -> None:
    target = folder.parent.parent.with_name("target")
    target.mkdir()
    folder.parent.mkdir(parents=True)
    folder.symlink_to(target)
    give_away(folder)


@pytest.mark.parametrize("spoil", [put_a_file_there, give_the_folder_away, lead_through_anothers_link])
def test_where_the_home_can_not_be_used_the_machine_keeps_it(
    notes: Path, spoil: Callable[[Path], None]
) -> None:
    home, machine = native_library.cache_folders()
    spoil(home)
    assert Path(load_or_build()._name) == the_file(machine)


def test_where_nothing_can_be_used_both_folders_are_named(compiler: MakeCompiler) -> None:
    compiler("exit 1")
    home, machine = native_library.cache_folders()
    put_a_file_there(home)
    machine.write_text("")
    with pytest.raises(KernelUnavailableError, match=f"{home}.*{machine}"):
        load_or_build()


def test_a_link_of_ours_is_followed(real: Path, notes: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    cache().parent.mkdir(parents=True)
    cache().symlink_to(tmp_path / "scratch")
    load_or_build()
    assert the_file(tmp_path / "scratch").read_bytes() == real.read_bytes()


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
    real: Path, compiler: MakeCompiler, tmp_path: Path, lines: str, why: str
) -> None:
    (tmp_path / "wrong.cpp").write_text(WRONG)
    (tmp_path / "abort.cpp").write_text(ABORT)
    compiler(lines.format(build=f'cd "{tmp_path}"; "{COMPILER}" -shared -fPIC -o "$out"'))
    with pytest.raises(KernelUnavailableError, match=why):
        load_or_build()
    assert [path.name for path in cache().iterdir()] == ["lock"]


def test_a_compiler_that_hangs_is_given_up_with_all_that_it_started(
    compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_library, "TIMEOUT_S", 0.5)
    notes = compiler(f"sleep 100 & echo $! >> {tmp_path}/calls; sleep 100")
    with pytest.raises(KernelUnavailableError, match=r"did not end within 0\.5 s"):
        load_or_build()
    processes = list(map(int, notes.read_text().split()))
    until = time.monotonic() + 30  # the kernel may be busy; they would sleep longer
    while any(map(is_asleep, processes)):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert [path.name for path in cache().iterdir()] == ["lock"]


def is_asleep(process: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return "sleep" in Path(f"/proc/{process}/cmdline").read_text()
    return False


def test_who_waits_for_another_s_compiler_gives_up_too(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "TIMEOUT_S", 0.2)
    cache().mkdir(parents=True, mode=0o700)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(KernelUnavailableError, match=r"another process has been compiling it for 0\.2 s"):
            load_or_build()
    assert num_calls(notes) == 0


TOGETHER = f"""
import sys
sys.path.insert(0, {str(ROOT / "sparsify/kernels")!r})
import native_library
print(native_library.load_or_build()._name)
"""


def test_of_workers_that_start_together_one_builds(real: Path, compiler: MakeCompiler) -> None:
    notes = compiler(f'sleep 0.2; cp "{real}" "$out"')
    words = [sys.executable, "-S", "-c", TOGETHER]
    workers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {worker.communicate(timeout=60)[0].strip() for worker in workers}
    assert said == {str(the_file(cache()))}
    assert num_calls(notes) == 1
