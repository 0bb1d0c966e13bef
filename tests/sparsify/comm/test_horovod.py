"""Horovod as a communicator: the laws that hold over torch.distributed, and the same runs as over it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparsify
from analysis.records.store import Store
from experiments import commands
from experiments.config import compose
from experiments.worker import connect
from slurm import environment
from sparsify.comm import virtual
from sparsify.methods import per_step
from tests.conftest import ROOT, environment_for, fine, process, python, refused
from tests.sparsify import worker_functions
from tests.sparsify.laws import live
from tests.sparsify.worker_functions import on_processes
from tests.worker.runs import carry_out, orders

INSTALLED = importlib.util.find_spec("horovod") is not None
needs_horovod = pytest.mark.skipif(not INSTALLED, reason="Horovod is not installed: `make horovod` builds it")
BUILD = ROOT / "singularity" / "horovod" / "build"
WORDS = ("task=cnn_digits", "cluster=local", "precision=fp64", "train.steps=5", "train.validate=never")
HOW = {
    # MPI spins while it waits, which on few cores takes them from the others; told so, it yields.
    "mpirun": [
        "mpirun", "--oversubscribe", "--allow-run-as-root", "--mca", "mpi_yield_when_idle", "1", "-np",
    ],
    "horovodrun": [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np"],
}  # fmt: skip


Found = list[dict[str, Tensor]]  # by rank


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What three processes find over Horovod."""
    folder = tmp_path_factory.mktemp("horovod")
    return on_processes(worker_functions.over_horovod, 3, folder, "horovod")


@pytest.fixture(scope="module")
def simulated() -> Found:
    """What three virtual ranks find."""
    return virtual.run(3, lambda comm: worker_functions.methods_collectives_and_votes(comm, comm.now))


@needs_horovod
@pytest.mark.horovod
def test_every_method_does_the_same_on_virtual_ranks_and_over_horovod(real: Found, simulated: Found) -> None:
    for name in per_step():
        for ours, theirs in zip(simulated, real, strict=True):
            if ours[f"{name} reduced"]:  # Horovod's allreduce chooses the order of its sums
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(ours[name], theirs[name]), name


@needs_horovod
@pytest.mark.horovod
def test_every_collective_returns_what_virtual_ranks_get_for_every_type(
    real: Found, simulated: Found
) -> None:
    for ours, theirs in zip(simulated, real, strict=True):
        assert ours.keys() <= theirs.keys()
        collectives = ours.keys() - {*per_step(), *(f"{name} reduced" for name in per_step()), "heard"}
        assert len(collectives) > 6 * len(worker_functions.TYPES)
        for name in collectives:
            assert torch.equal(ours[name], theirs[name]), (name, ours[name], theirs[name])


@needs_horovod
@pytest.mark.horovod
def test_a_process_set_is_a_group_of_its_own(real: Found) -> None:
    expected = virtual.run(2, lambda comm: worker_functions.any_memory(comm, comm.now))
    for found, ours in zip(real[1:], expected, strict=True):
        for name, value in ours.items():
            assert torch.equal(found[f"part {name}"], value), name
    assert real[0]["outside"].item()


@needs_horovod
@pytest.mark.horovod
def test_a_vote_tells_the_largest_word_of_the_vote_before(real: Found) -> None:
    for found in real:  # rank r votes 2 in step r + 1
        assert found["heard"].tolist() == [0, 0, 2, 2, 2]


@needs_horovod
@pytest.mark.horovod
def test_who_loses_a_worker_says_so_in_a_sentence(tmp_path: Path) -> None:
    found = on_processes(worker_functions.loss_of_a_worker, 3, tmp_path, "horovod")
    assert found[0]["right"]
    assert found[2]["right"]


@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_values_and_indices_in_flight_together_still_count_as_two_collectives(name: str) -> None:
    for apart, packed in zip(
        *(live(sparsify.build(name, density=0.05, packed=packed), 4) for packed in (False, True)), strict=True
    ):
        assert apart.counted_bytes == apart.wire_bytes
        # k values of 8 bytes and k indices of 4, as many as a packed message has with indices of 32 bits
        assert apart.wire_bytes == [k * 3 * 12 for k in apart.selected]
        assert all(torch.equal(a, b) for a, b in zip(apart.updates, packed.updates, strict=True))


def run(results: Path, *words: str, how: str = "", workers: int = 2) -> subprocess.CompletedProcess[str]:
    """`python -m experiments run ...`, by itself or as so many processes of mpirun or horovodrun."""
    starter = [*HOW[how], str(workers)] if how else []
    command = (*starter, sys.executable, "-m", "experiments", "run", *WORDS, f"workers={workers}", *words)
    return process(*command, env=environment_for(results, OMP_NUM_THREADS="1"))


def on_virtual_ranks(folder: Path, *words: str, workers: int = 2) -> tuple[Tensor, str]:
    """The losses and the weights of the same run in this process."""
    told, attempt = orders(Store(folder / "runs"), *WORDS, f"workers={workers}", *words, "cluster=virtual")
    carry_out(told, attempt, folder / "start")
    return losses_and_weights(folder / "runs")


def losses_and_weights(runs: Path) -> tuple[Tensor, str]:
    """Of the one run in this folder: the losses of each step by rank, and the digest of its final weights."""
    (manifest,) = runs.glob("*/001/run.json")
    record = json.loads(manifest.read_text())
    assert record["state"] == "ok"
    assert record["agreed"]
    losses = []
    for path in sorted(manifest.parent.glob("rank*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line["kind"] == "step"])
    return torch.tensor(losses, dtype=torch.float64), record["weights"]


@needs_horovod
@pytest.mark.horovod
@pytest.mark.parametrize(("method", "how"), [("dense", "horovodrun"), ("topk", "mpirun")])
def test_a_run_is_the_same_over_horovod_and_on_virtual_ranks(method: str, how: str, tmp_path: Path) -> None:
    """Whoever started its processes; those of `run` itself are below. What torch's processes do is the same
    as on virtual ranks, too: test_backends.py.
    """
    words = (f"method={method}", *(["method.density=0.01"] * (method == "topk")))
    done = fine(run(tmp_path / "horovod", *words, "comm=horovod", how=how))
    ours, weights = losses_and_weights(tmp_path / "horovod" / "runs")
    assert done.stdout.count("attempt 1: done") == 1  # one of the processes speaks
    theirs, expected = on_virtual_ranks(tmp_path / "virtual", *words)
    assert ours.shape == (2, 5)
    assert weights == expected  # two addends have one order, whoever adds them
    assert torch.equal(ours, theirs)
    if how == "horovodrun":  # the quicker of the two
        again = fine(run(tmp_path / "horovod", *words, "comm=horovod", how=how))
        assert again.stderr.count("already measured") == 1


@pytest.mark.parametrize("command", commands.STARTING)
def test_what_starts_its_own_workers_is_not_started_many_times(command: str, tmp_path: Path) -> None:
    told = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    done = python("-m", "experiments", command, "fig4", env=environment_for(tmp_path, **told))
    refused(done, f"mpirun started 2 processes, and {command} starts its workers itself", "make a single run")


@pytest.mark.parametrize(
    ("starter", "words", "sentence"),
    [
        (
            "mpirun",
            ("comm=horovod", "workers=3"),
            "mpirun started 2 processes for workers=3; start as many as",
        ),
        (
            "mpirun",
            ("comm=torch",),
            "processes that mpirun starts can't meet with comm=torch; take comm=horovod",
        ),
        ("torchrun", ("comm=horovod",), "take comm=torch, or horovodrun or mpirun, or start one process"),
        ("srun", ("cluster=devcluster", "container=cpu"), "started can't enter container=cpu any more"),
        (
            "torchrun",
            ("cluster=virtual",),
            "cluster=virtual runs all workers in one; add cluster=local, or leave",
        ),
    ],
)
def test_processes_that_can_not_be_the_workers_are_told_why(
    starter: str, words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    group = environment.Joined(starter, environment.WorkerPlace(0, 2, 0))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        connect.join(compose.resolve([*WORDS, *words]), group, tmp_path, torch.device("cpu"))


def test_horovod_and_virtual_ranks_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="cluster=virtual runs all workers in one; take cluster=local"):
        compose.resolve(["cluster=virtual", "comm=horovod"])


@needs_horovod
@pytest.mark.horovod
def test_as_published_waits_once_for_values_and_indices(tmp_path: Path) -> None:
    """And ends with the weights of virtual ranks."""
    words = ("method=topk", "method.density=0.01", "method.packed=false", "timing.mode=as_published")
    fine(run(tmp_path, *words, "comm=horovod", workers=3))
    losses, weights = losses_and_weights(tmp_path / "runs")
    theirs, expected = on_virtual_ranks(tmp_path / "virtual", *words, workers=3)
    assert weights == expected  # gathered values are added in the order of the ranks
    assert torch.equal(losses, theirs)
    (path,) = (tmp_path / "runs").glob("*/001/rank0.jsonl")
    steps = [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "step"]
    n = json.loads((path.parent / "run.json").read_text())["parameters"]
    for step in steps:
        assert step["phases"]["synchronize"] > 0
        assert not {"wait", "transfer"} & step["phases"].keys()
        assert step["wire_bytes"] == int(0.01 * n) * 2 * 12  # fp64 values and int32 indices, to two others


def test_without_horovod_one_sentence_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "horovod.py").write_text("raise ModuleNotFoundError('No module', name='horovod')\n")
    around = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = python("-c", "import sparsify.comm.horovod", env=around)
    assert "ValueError: comm=horovod needs Horovod, which is not installed here" in done.stderr
    assert "`make horovod` builds" in done.stderr


IN_A_STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("surroundings", "expected"),
    [
        ({}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "mpirun",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}, "horovodrun"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        ({"WORLD_SIZE": "2"}, None),
        ({**IN_A_STEP, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun"),
        ({**IN_A_STEP, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty bash
        ({**IN_A_STEP, "SLURM_STEP_ID": "batch", "SLURM_STEP_NUM_TASKS": "4"}, None),
        (IN_A_STEP, None),  # a batch script, or salloc's shell
    ],
)
def test_a_process_knows_whether_it_is_one_of_several(
    surroundings: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", surroundings)
    found = environment.joined()
    assert (found and found.starter) == expected
    assert found is None or (found.place.rank, found.place.size) in ((1, 2), (1, 4))


def test_of_horovods_settings_those_are_recorded_that_are_not_about_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"HOROVOD_CYCLE_TIME": "0.1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_RANK": "1"}
    monkeypatch.setattr(os, "environ", told)
    assert environment.recorded("HOROVOD") == {"HOROVOD_CYCLE_TIME": "0.1"}


def build(**surroundings: str) -> subprocess.CompletedProcess[str]:
    around = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", **surroundings}
    return python(str(BUILD), "--cpu", env=around)


def test_the_build_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    refused(
        build(PATH=str(tmp_path / "bin"), **cache),
        "no C++ compiler: 'g++' is not there",
        "apt-get install g++",
    )
    for name in ("g++", "make"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho 1.0\n")
        (tmp_path / "bin" / name).chmod(0o755)
        if name == "g++":
            refused(build(PATH=f"{tmp_path / 'bin'}", **cache), "no make; install it")
    done = build(PATH=f"{tmp_path / 'bin'}", **cache)
    refused(done, "`pip download` failed", "needs a package index", "put horovod-0.28.1.tar.gz into")
    folder = tmp_path / "cache" / "sparsify" / "horovod"
    (folder / "horovod-0.28.1.tar.gz").write_text("something else")
    refused(build(PATH=f"{tmp_path / 'bin'}", **cache), "is not the release (SHA-256", "delete it")


def test_the_build_finds_the_wheel_of_the_same_surroundings_again(tmp_path: Path) -> None:
    """Without compiling: a wheel laid where the first call's log said it would build."""
    for name in ("g++", "make"):
        (tmp_path / name).write_text("#!/bin/sh\necho 1.0\n")
        (tmp_path / name).chmod(0o755)
    surroundings = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert build(**surroundings).returncode == 2  # no index; but the folder is there now
    (home,) = (path for path in (tmp_path / "cache" / "sparsify" / "horovod").iterdir() if path.is_dir())
    (home / "horovod-0.28.1-any.whl").write_text("")
    done = build(**surroundings)
    assert done.returncode == 0
    assert done.stdout.strip() == str(home / "horovod-0.28.1-any.whl")
    (tmp_path / "g++").write_text("#!/bin/sh\necho 2.0\n")  # another compiler, another wheel
    assert build(**surroundings).returncode == 2
