"""Horovod as a communicator: the laws that hold over torch.distributed, and the same runs as over it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.records.store import Store
from experiments import commands
from experiments.config import compose
from experiments.worker import connect
from slurm import environment
from sparsify.comm import virtual
from sparsify.methods import per_step_names
from tests.conftest import ROOT, Command, environment_for, fine, process, python, refused
from tests.sparsify import worker_functions
from tests.sparsify.worker_functions import on_processes
from tests.worker.runs import carry_out, orders, recorded

INSTALLED = importlib.util.find_spec("horovod") is not None
BUILD = ROOT / "singularity" / "horovod" / "build"
WORDS = ("task=cnn_digits", "cluster=local", "precision=fp64", "train.steps=5", "train.validate=never")
HOW = {
    # MPI spins while it waits, which on few cores takes them from the others; told so, it yields.
    "mpirun": [
        "mpirun", "--oversubscribe", "--allow-run-as-root", "--mca", "mpi_yield_when_idle", "1", "-np",
    ],
    "horovodrun": [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np"],
}  # fmt: skip


def needs_horovod(test: Callable[..., None]) -> Any:
    """Mark a test that is skipped where Horovod is not installed."""
    reason = "Horovod is not installed: `make horovod` builds it"
    return pytest.mark.horovod(pytest.mark.skipif(not INSTALLED, reason=reason)(test))


@needs_horovod
def test_three_processes_find_over_horovod_what_virtual_ranks_find(tmp_path: Path) -> None:
    """Compare every method, every collective for every type, a process set, and votes."""
    real = on_processes(worker_functions.over_horovod, 3, tmp_path, "horovod")
    simulated = virtual.run(3, lambda comm: worker_functions.methods_collectives_and_votes(comm, comm.now_s))
    assert len(simulated[0]) > 2 * len(per_step_names()) + 6 * len(worker_functions.TYPES)
    for ours, theirs in zip(simulated, real, strict=True):
        for name, value in ours.items():
            if ours.get(f"{name} reduced"):  # Horovod's allreduce chooses the order of its sums
                torch.testing.assert_close(value, theirs[name], rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(value, theirs[name]), (name, value, theirs[name])
        assert theirs["heard"].tolist() == [0, 0, 2, 2, 2]  # rank r votes 2 in step r + 1
    in_part = virtual.run(2, lambda comm: worker_functions.any_memory(comm, comm.now_s))
    for ours, theirs in zip(in_part, real[1:], strict=True):
        for name, value in ours.items():
            assert torch.equal(theirs[f"part {name}"], value), name
    assert real[0]["outside"].item()


@needs_horovod
def test_who_loses_a_worker_says_so_in_a_sentence(tmp_path: Path) -> None:
    found = on_processes(worker_functions.loss_of_a_worker, 3, tmp_path, "horovod")
    assert found[0]["right"]
    assert found[2]["right"]


def run(results: Path, *words: str, how: str, workers: int) -> subprocess.CompletedProcess[str]:
    """Call `python -m experiments run ...`, by itself or as so many processes of mpirun or horovodrun."""
    starter = [*HOW[how], str(workers)] if how else []
    command = (*starter, sys.executable, "-m", "experiments", "run", *WORDS, f"workers={workers}", *words)
    return process(*command, env=environment_for(results, OMP_NUM_THREADS="1"))


def losses_and_weights(runs: Path) -> tuple[Tensor, str]:
    """Return the losses of the one run in a folder, by rank and step, and the digest of its final weights."""
    store = Store(runs)
    (attempt,) = store.list_newest_valid_attempts()
    assert attempt.manifest["agreed"]
    losses = [[line["loss"] for line in recorded(attempt, rank)] for rank in range(attempt.config["workers"])]
    return torch.tensor(losses, dtype=torch.float64), attempt.manifest["weights"]


@needs_horovod
@pytest.mark.parametrize(
    ("method", "how", "workers"),
    [
        (["method=dense"], "horovodrun", 2),
        (["method=topk", "method.density=0.01"], "mpirun", 2),
        (["method=topk", "method.density=0.01", "method.packed=false", "timing.mode=as_published"], "", 3),
    ],
    ids=["horovodrun", "mpirun", "as published"],
)
def test_a_run_is_the_same_over_horovod_and_on_virtual_ranks(
    method: list[str], how: str, workers: int, tmp_path: Path
) -> None:
    """The launcher of the processes makes no difference.

    Torch's processes do the same as virtual ranks, too: test_backends.py. As published, a run waits once for
    values and indices.
    """
    done = fine(run(tmp_path / "horovod", *method, "comm=horovod", how=how, workers=workers))
    ours, weights = losses_and_weights(tmp_path / "horovod" / "runs")
    assert done.stdout.count("attempt 1: done") == 1  # one of the processes speaks
    words = (*WORDS, f"workers={workers}", *method, "cluster=virtual")
    told, attempt = orders(Store(tmp_path / "virtual"), *words)
    carry_out(told, attempt, tmp_path / "start")
    theirs, expected = losses_and_weights(tmp_path / "virtual")
    assert ours.shape == (workers, 5)
    assert weights == expected  # two addends have one order; gathered values are added in the order of ranks
    assert torch.equal(ours, theirs)
    (real,) = Store(tmp_path / "horovod" / "runs").list_newest_valid_attempts()
    for step in recorded(real, 0) if not how else ():
        assert step["phases"]["synchronize"] > 0
        assert not {"wait", "transfer"} & step["phases"].keys()
        # fp64 values and int32 indices, to two others
        assert step["wire_bytes"] == int(0.01 * real.manifest["parameters"]) * 2 * 12


def test_what_starts_its_own_workers_is_not_started_many_times(here: Command) -> None:
    told = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    for command in commands.STARTING_WORKERS:
        sentence = f"mpirun started 2 processes, and {command} starts its workers itself"
        refused(here(command, "fig4", **told), sentence, "make a single run")


def test_processes_that_can_not_be_the_workers_are_told_why(tmp_path: Path) -> None:
    rows = [
        ("mpirun", ["comm=horovod", "workers=3"], "mpirun started 2 processes for workers=3; start as many"),
        ("mpirun", ["comm=torch"], "that mpirun starts can't meet with comm=torch; take comm=horovod"),
        ("torchrun", ["comm=horovod"], "take comm=torch, or horovodrun or mpirun, or start one process"),
        ("srun", ["cluster=devcluster", "container=cpu"], "started can't enter container=cpu any more"),
        ("torchrun", ["cluster=virtual"], "cluster=virtual runs all workers in one; add cluster=local, or"),
    ]
    for starter, words, sentence in rows:
        group = environment.LauncherGroup(starter, environment.WorkerPlace(0, 2, 0))
        with pytest.raises(ValueError, match=re.escape(sentence)):
            connect.join_external_group(
                compose.resolve([*WORDS, *words]), group, tmp_path, torch.device("cpu")
            )
    with pytest.raises(ValueError, match="cluster=virtual runs all workers in one; take cluster=local"):
        compose.resolve(["cluster=virtual", "comm=horovod"])


def test_without_horovod_one_sentence_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").write_text("raise ModuleNotFoundError('No module', name='horovod')\n")
    around = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = python("-c", "import sparsify.comm.horovod", env=around)
    assert "ValueError: comm=horovod needs Horovod, which is not installed here" in done.stderr
    assert "`make horovod` builds" in done.stderr


def test_the_build_says_what_is_missing_and_finds_a_wheel_of_the_same_surroundings_again(
    tmp_path: Path,
) -> None:
    """Nothing is compiled: a wheel is laid where the first call would put it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    around = {
        **os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PATH": str(programs),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip

    def build() -> subprocess.CompletedProcess[str]:
        return python(str(BUILD), "--cpu", env=around)

    def add_program(name: str, version: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\necho {version}\n")
        (programs / name).chmod(0o755)

    refused(build(), "no C++ compiler: 'g++' is not there", "apt-get install g++")
    add_program("g++", "1.0")
    refused(build(), "no make; install it")
    add_program("make", "1.0")
    refused(build(), "`pip download` failed", "needs a package index", "put horovod-0.28.1.tar.gz into")
    folder = tmp_path / "cache" / "sparsify" / "horovod"
    (home,) = (path for path in folder.iterdir() if path.is_dir())
    wheel = home / "horovod-0.28.1-any.whl"
    wheel.write_text("")
    assert fine(build()).stdout.strip() == str(wheel)
    add_program("g++", "2.0")  # another compiler, another wheel
    (folder / "horovod-0.28.1.tar.gz").write_text("something else")
    refused(build(), "is not the release (SHA-256", "delete it")
