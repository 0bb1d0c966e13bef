"""A real SLURM for tests: the development cluster of slurm/devcluster, brought up where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "slurm" / "devcluster"
STATE = Path(os.environ.get("SPARSIFY_DEVCLUSTER") or Path.home() / ".cache" / "sparsify-devcluster")
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd")


def lacking() -> str | None:
    """Why this machine can have no development cluster."""
    if os.geteuid() != 0:
        return "a development cluster needs root"
    paths = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=paths) is None]
    return f"no {', '.join(absent)} here; slurm/devcluster/install installs them" if absent else None


def speaking_to(state: Path) -> dict[str, str]:
    """The environment of a user of the cluster with that state, who is in no job."""
    free = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return {**free, "SPARSIFY_DEVCLUSTER": str(state), "SLURM_CONF": str(state / "slurm.conf")}


def say(environment: dict[str, str], *words: str | Path, code: int = 0) -> str:
    """What a command prints; its errors too where it is to fail with `code`."""
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


@pytest.fixture(scope="session")
def devcluster() -> Iterator[dict[str, str]]:
    """The environment in which sbatch, squeue and the like speak to the development cluster.

    One that runs keeps its accounting, or its lack of it, and is left running.
    """
    if reason := lacking():
        pytest.skip(reason)
    environment = speaking_to(STATE)
    settings = STATE / "slurm.conf"
    ping = subprocess.run(["scontrol", "ping"], env=environment, capture_output=True, text=True, check=False)
    found = settings.exists() and "is UP" in ping.stdout
    accounting = "no" if found and "accounting_storage/none" in settings.read_text() else "yes"
    say(environment, SCRIPTS / "up", accounting)  # also revives nodes that somebody left dead
    yield environment
    if not found:
        say(environment, SCRIPTS / "down")
