"""A real SLURM for tests: the development cluster of slurm/devcluster, brought up where it is not.

$SPARSIFY_SLURM says which one: system, this machine's SLURM, or newer (`slurm/devcluster/install --newer`).
Where it says nothing, a module of tests that has `SLURM = "newer"` is for that one, if it is there: the two
are used side by side.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "slurm" / "devcluster"
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd")
# What makes a process speak to one cluster and not to another.
NAMES = ("PATH", "SLURM_CONF", "SPARSIFY_DEVCLUSTER", "SPARSIFY_SLURM")
Environment = dict[str, str]
SLURMS = ("system", "newer")
OF_MODULE = re.compile(r'^SLURM = "(\w+)"', re.MULTILINE)
of_this_venv = pytest.mark.skipif(
    not (SCRIPTS.parent.parent / ".venv").exists(),
    reason="sweep.sbatch runs .venv of the checkout, and these tests run in another environment",
)


def chosen() -> str:
    """Return the name of the SLURM that tests are for."""
    return os.environ.get("SPARSIFY_SLURM") or "system"


def slurm_of(module: str, test: str = "") -> str:
    """Return the SLURM that a module's tests are for, given its text, or one test of it, given its name."""
    if "each_slurm" in module:
        return next((slurm for slurm in SLURMS if slurm in re.split(r"[\[\]-]", test)), chosen())
    wanted = OF_MODULE.search(module)
    return chosen() if wanted is None or chosen() != "system" or lacking(wanted[1]) else wanted[1]


@cache
def place_of(slurm: str) -> tuple[str, str, str]:
    """Return the state folder of that SLURM's cluster, its PATH, and the folder of its programs, if any."""
    own = {} if slurm == chosen() else {"SPARSIFY_DEVCLUSTER": ""}  # a folder that was named is of that one
    ask = '. "$0/common.sh" && printf "%s\\n" "$STATE" "$PATH" "$PROGRAMS"'
    said = say({**os.environ, **own, "SPARSIFY_SLURM": slurm}, "bash", "-c", ask, SCRIPTS)
    state, path, programs, *_ = said.split("\n")
    return state, path, programs


def lacking(slurm: str = "") -> str | None:
    """Return why this machine can have no development cluster, or None if it can."""
    if os.geteuid() != 0:
        return "a development cluster needs root"
    _, path, programs = place_of(slurm := slurm or chosen())
    if slurm == "newer" and not programs:
        return "no newer SLURM here; slurm/devcluster/install --newer installs it"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"no {', '.join(absent)} here; slurm/devcluster/install installs them" if absent else None


def speaking_to(state: Path | None = None, slurm: str = "") -> Environment:
    """Return the environment of a user of the cluster with that state, who is in no job."""
    free = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    usual, path, _ = place_of(slurm := slurm or chosen())
    conf = str((state or Path(usual)) / "slurm.conf")
    own = {"PATH": path, "SPARSIFY_SLURM": slurm, "SPARSIFY_DEVCLUSTER": str(state or usual)}
    return {**free, **own, "SLURM_CONF": conf}


def say(environment: dict[str, str], *words: str | Path, code: int = 0) -> str:
    """Return what a command prints; its errors too where it is to fail with `code`."""
    done = subprocess.run(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr if code else done.stdout


@contextmanager
def up(slurm: str) -> Iterator[Environment]:
    """Start the development cluster with that SLURM; yield the environment in which sbatch reaches it.

    A cluster that runs already keeps its accounting, or its lack of it, and is left running.
    """
    if reason := lacking(slurm):
        pytest.skip(reason)
    environment = speaking_to(slurm=slurm)
    settings = Path(environment["SLURM_CONF"])
    ping = subprocess.run(["scontrol", "ping"], env=environment, capture_output=True, text=True, check=False)
    found = settings.exists() and "is UP" in ping.stdout
    accounting = "no" if found and "accounting_storage/none" in settings.read_text() else "yes"
    say(environment, SCRIPTS / "up", accounting)  # also revives nodes that somebody left dead
    yield environment
    if not found:
        say(environment, SCRIPTS / "down")


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[str], Environment]]:
    """Return the function that starts a development cluster by its SLURM's name, until all tests are done."""
    with ExitStack() as stack:
        yield cache(lambda slurm: stack.enter_context(up(slurm)))


@pytest.fixture(scope="module")
def devcluster(request: pytest.FixtureRequest, clusters: Callable[[str], Environment]) -> Environment:
    """Return the environment of the cluster that the module's tests are for."""
    return clusters(slurm_of(request.path.read_text()))


@pytest.fixture(params=SLURMS)
def each_slurm(request: pytest.FixtureRequest, clusters: Callable[[str], Environment]) -> Environment:
    """Run the test on each SLURM, one after the other."""
    return clusters(request.param)
