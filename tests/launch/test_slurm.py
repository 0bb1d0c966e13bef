"""A real SLURM, from submission to figure, and what goes wrong on the way. `make slurm-up` brings it up."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from analysis.records.files import try_read_json_object
from experiments.launch.bad_nodes import append_node_failure
from slurm import commands, jobs
from tests.conftest import fine, refused, there
from tests.launch.trouble_there import Bench
from tests.slurm.devcluster import say
from tests.worker.runs import carry_out, orders

pytestmark = pytest.mark.slurm
THERE = ("profile=smoke", "cluster=devcluster", "container=none")
SMOKE = (*THERE, "task=vector", "train.validate=never")  # what trains nothing is loaded soonest
HOLD = "cluster.sbatch=['--hold']"


@pytest.fixture
def bench(devcluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench.reached(tmp_path / "results", devcluster, monkeypatch)


def submit(bench: Bench, *words: str) -> str:
    """Queue small runs; return the name of their sweep."""
    return fine(bench.command("submit", *SMOKE, bench.conf, *words)).stdout.strip()


def has_image() -> bool:
    """Tell whether there are an image and something to run it."""
    from slurm import container, images

    try:
        container.check_container_usable_here(images.default_container_config("thin"))
    except ValueError:
        return False
    return True


def test_a_figure_comes_out_of_real_arrays_and_is_then_only_redrawn(bench: Bench, tmp_path: Path) -> None:
    """Its words stay words: nothing in them is executed."""
    mark = tmp_path / "touched"
    odd = f"cluster.comment='a b; $(touch {mark}) `touch {mark}` \"q\"'"
    words = ("reproduce", "fig3", *THERE, bench.conf, odd)
    done = fine(bench.command(*words))
    assert not mark.exists()
    assert "| verdict | claim |" in done.stdout
    assert "fig3: " in done.stdout
    assert (bench.results / "figures" / "fig3-smoke.png").is_file()
    runs = bench.folders.store.list_newest_valid_attempts()
    assert len(runs) == 3
    for attempt in runs:
        assert attempt.manifest["provenance"]["slurm"]["SLURM_JOB_NUM_NODES"] == "2"
        assert attempt.manifest["agreed"]
    again = bench.command(*words)
    assert "0 missing" in again.stderr
    assert "submitted" not in again.stderr
    assert "3 runs: 3 done" in bench.command("status").stdout


@pytest.mark.skipif(not has_image(), reason="there is no image: `make sif`")
def test_workers_run_inside_the_image(bench: Bench) -> None:
    fine(bench.command("run", "method=topk", *SMOKE, "container=thin", bench.conf))
    (attempt,) = bench.folders.store.list_newest_valid_attempts()
    assert len(attempt.manifest["provenance"]["image"]["sha256"]) == 64
    assert attempt.manifest["provenance"]["commit"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("cluster.partition=nowhere", "SLURM refused the job: "),
        ("cluster.account=nobody", "SLURM refused the job: "),
        ("cluster.constraint=v100", "SLURM refused the job: "),
        ("cluster.mem_gb=999", "SLURM refused the job: "),  # although SLURM keeps this job
        ("container=thin container.runtime=pyxis container.image=ubuntu", "this site has no pyxis"),
    ],
)
def test_what_the_site_has_not_is_refused_in_its_words_and_nothing_is_queued(
    words: str, sentence: str, bench: Bench
) -> None:
    done = bench.command("submit", "method=topk", *SMOKE, bench.conf, *words.split())
    if "account" in words and done.returncode == 0:
        pytest.skip("this cluster keeps no accounts")
    refused(done, sentence, words.partition("=")[0].replace("container", "pyxis"))
    assert not [*bench.folders.sweeps.glob("*")]


@pytest.mark.horovod
def test_horovod_over_slurm_ends_with_the_weights_of_torch(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("horovod", reason="there is no Horovod: `make horovod`")
    fine(bench.command("run", "method=topk", *THERE, "task=cnn_digits", "comm=horovod", bench.conf))
    (attempt,) = bench.folders.store.list_newest_valid_attempts()
    # Virtual ranks end with the weights of torch's processes, as tests/worker/test_resume.py has it.
    told, over_torch = orders(bench.folders.store, "method=topk", "cluster=virtual")
    carry_out(told, over_torch, tmp_path / "virtual")
    assert attempt.manifest["weights"] == over_torch.manifest["weights"]


# What a task of SLURM's computes on; in place of the driver, which the cluster's GPUs have not.
DEVICE = """
import torch
from experiments.config import compose
from experiments.worker.build import prepare_device
from slurm import environment
visible = environment.visible_gpus()
torch.cuda.is_available, torch.cuda.set_device = lambda: True, print
torch.cuda.device_count, torch.cuda.get_device_capability = lambda: len(visible), lambda device: (9, 0)
config = compose.resolve(["cluster=devcluster", "device=cuda", "precision=fp32"])
device = prepare_device(config, environment.read_rank_variables("srun"))
print("found", visible[device.index])
"""


@pytest.mark.parametrize("words", [[], ["--gpus-per-task=1"], ["--gpu-bind=single:1"]], ids=str)
def test_workers_of_a_node_have_a_gpu_each_however_slurm_binds_them(bench: Bench, words: list[str]) -> None:
    asked = ("srun", "--nodes=1", "--ntasks=2", "--gres=gpu:2", *words)
    said = say(bench.environment, *asked, sys.executable, "-c", DEVICE)
    assert sorted(re.findall(r"found (\d)", said)) == ["0", "1"]


def test_a_block_is_one_job(bench: Bench) -> None:
    name = submit(bench, "method=dense,topk", "launch.block=true")
    sweep = there(try_read_json_object(bench.folders.sweeps / name / "sweep.json"))
    (array,) = sweep["arrays"]
    (job,) = array["jobs"]
    attempts = [bench.folders.store.list_attempts(run)[-1] for run in job["runs"]]
    bench.await_end(attempts)
    assert [attempt.state for attempt in attempts] == ["ok"] * 2
    begun = [attempt.manifest["started"] for attempt in attempts]
    assert begun == sorted(begun)


def test_a_node_that_failed_twice_is_avoided_also_by_a_job_that_lands_on_it(bench: Bench) -> None:
    """And that stays away from those that it was told to avoid."""
    submit(bench, "method=topk", HOLD, "cluster.workers_per_node=2", "cluster.exclude='n[1-2]'")
    (attempt,) = bench.newest()
    ledger = bench.folders.scratch / "node-failures.jsonl"
    for job, day in (("1", 1), ("2", 2), ("3", 2)):  # two times, the second time under two jobs
        append_node_failure(ledger, "n3", job, f"2026-01-0{day}T00:00:0{job}")
    name = submit(bench, "method=dense", HOLD)
    (script,) = (bench.folders.sweeps / name / "a0").glob("*_submission.sh")
    assert "#SBATCH --exclude=n3\n" in script.read_text()
    fine(bench.command("cancel", name))
    commands.run_command("scontrol", "release", str(attempt.slurm_job.id))
    bench.await_end([attempt])
    assert attempt.is_valid(verify_digests=True)
    notes = bench.folders.launch_folder(attempt).glob("start-*/worker*.json")
    assert {there(try_read_json_object(note))["node"] for note in notes} == {"n4"}
    (log,) = bench.folders.sweeps.glob(f"*/a0/{attempt.slurm_job.id}_*0_log.out")
    assert "n3 failed before: asking for other nodes" in log.read_text()


def test_a_node_without_python_swallows_no_run_and_is_avoided(bench: Bench, tmp_path: Path) -> None:
    """Neither one that begins a job, nor one beside it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" != n1 ] || exit 127\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = ("cluster.exclusive=true", f"cluster.python={python}")
    submit(bench, "method=topk", "workers=1", "seed=0,1,2,3", *words)
    submit(bench, "method=topk", "workers=2", *words, "cluster.exclude=n4")
    attempts = bench.newest()
    bench.await_end(attempts)
    assert [attempt.state for attempt in attempts] == ["ok"] * 5
    ledger = (bench.folders.scratch / "node-failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["node"] for line in ledger} == {"n1"}
    asked = bench.command("submit", "method=dense", *SMOKE, bench.conf, *words, HOLD)
    assert "avoiding n1" in asked.stderr
    fine(bench.command("cancel", "dense", "--matching"))


def test_a_run_that_needs_more_memory_than_there_is_fails_once_and_says_so(bench: Bench) -> None:
    small = ("cluster.setup=['ulimit -v 3000000']", "train.steps=500", "task.batch_size=700")
    done = bench.command("run", "method=topk", *THERE, bench.conf, "task=cnn_digits", *small)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "memory" in bench.command("status").stdout


def test_two_that_submit_the_same_queue_each_run_once(bench: Bench) -> None:
    words = ("submit", "method=topk", "seed=0,1", *SMOKE, bench.conf, HOLD)
    with ThreadPoolExecutor(2) as pool:
        both = [fine(done) for done in pool.map(lambda _: bench.command(*words), range(2))]
    (name,) = [done.stdout.strip() for done in both if done.stdout.strip()]
    attempts = bench.newest()
    assert [(attempt.number, attempt.state) for attempt in attempts] == [(1, "submitted")] * 2
    ids = {str(attempt.slurm_job.id) for attempt in attempts}
    assert {
        *jobs.unfinished_jobs_by_id(f"{job.partition('_')[0]}_{number}" for job in ids for number in range(3))
    } == ids

    refused(bench.command("cancel", name[:3]), "is part of a name", name, "--matching")
    assert "cancelled 2 jobs" in bench.command("cancel", name).stdout
    bench.await_end(attempts)
    assert "nothing to cancel" in bench.command("cancel", attempts[0].run_id).stderr


def test_a_spec_that_was_edited_is_refused(bench: Bench) -> None:
    name = submit(bench, "method=topk", "cluster.sbatch=['--begin=now+4']")
    spec = bench.folders.sweeps / name / "a0" / "task0.json"
    spec.write_text(spec.read_text().replace('"threads": 1', '"threads": 2'))
    (attempt,) = bench.newest()
    bench.await_end([attempt])
    assert attempt.manifest["failure"] == "bad_input"
    assert "changed after it was submitted" in bench.command("status").stdout
