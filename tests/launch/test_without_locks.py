"""A file system that refuses flock, as Lustre does without `-o flock`, and NFS without a lock server."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment_for, fine, process, python, refused

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
pytestmark = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="no C compiler to refuse flock with"
)
REFUSES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int flock(int descriptor, int how) {
  char link[64], path[PATH_MAX + 1];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, PATH_MAX);
  path[length < 0 ? 0 : length] = 0;
  if (!strncmp(path, getenv("NO_LOCKS_BELOW"), strlen(getenv("NO_LOCKS_BELOW")))) {
    errno = atoi(getenv("NO_LOCKS_ERRNO"));
    return -1;
  }
  return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(descriptor, how);
}
"""
RUN = (
    "run",
    "method=topk",
    "task=cnn_digits",
    "profile=smoke",
    "cluster=local",
    "workers=2",
    "train.steps=3",
)
HOLD = """
import sys; from pathlib import Path; from analysis.records.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
print(lock.acquire(timeout_s=0), lock.is_machine_local, flush=True)
sys.stdin.read()
"""
Surroundings = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flock that refuses below a folder, in front of the system's."""
    source = tmp_path_factory.mktemp("refusing") / "flock.c"
    source.write_text(REFUSES)
    fine(
        process(str(COMPILER), "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source), "-ldl")
    )
    return source.with_suffix(".so")


@pytest.fixture
def without(library: Path, tmp_path: Path) -> Surroundings:
    """Return a function that makes the environment of a command whose results are on such a file system."""
    (tmp_path / "tmp").mkdir()

    def surroundings(number: int = errno.ENOSYS, below: Path = tmp_path / "results") -> dict[str, str]:
        refusal = {"LD_PRELOAD": str(library), "NO_LOCKS_BELOW": str(below), "NO_LOCKS_ERRNO": str(number)}
        return environment_for(tmp_path / "results", TMPDIR=str(tmp_path / "tmp"), **refusal)

    return surroundings


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_one_process_of_a_machine_has_a_lock_until_it_is_killed(
    number: int, without: Surroundings, tmp_path: Path
) -> None:
    def begin() -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLD, str(tmp_path / "results" / "launch" / "submit.lock")]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, cwd=ROOT, env=without(number), stdin=pipe, stdout=pipe, text=True)

    def took(holding: subprocess.Popen[str]) -> str:
        assert holding.stdout is not None
        return holding.stdout.readline().strip()

    with begin() as first, begin() as second:
        assert sorted([took(first), took(second)]) == ["False True", "True True"]
        first.kill()
        second.kill()
    with begin() as third:
        assert took(third) == "True True"
        third.kill()


def test_workers_of_one_machine_meet_and_their_run_is_whole(without: Surroundings, tmp_path: Path) -> None:
    fine(python("-m", "experiments", *RUN, env=without()))
    (manifest,) = tmp_path.glob("results/runs/*/*/run.json")
    assert '"state": "ok"' in manifest.read_text()


def test_where_nothing_can_be_locked_a_sentence_says_what_to_set(
    without: Surroundings, tmp_path: Path
) -> None:
    done = python("-m", "experiments", *RUN, env=without(below=tmp_path))
    refused(done, f"no file can be locked in {tmp_path / 'tmp'}", "set TMPDIR or SPARSIFY_RESULTS")
    assert not os.path.exists(tmp_path / "results" / "runs")
