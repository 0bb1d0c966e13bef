"""A real SLURM, from submission to figure, and what goes wrong on the way. `make slurm-up` brings it up."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from analysis.records.files import read_json
from analysis.records.store import Attempt
from experiments.launch.bad_nodes import note_failure
from slurm import jobs, queue
from tests.conftest import ROOT, fine, refused, there
from tests.launch.trouble_there import Bench
from tests.launch.troubled import await_
from tests.slurm.devcluster import SCRIPTS, of_this_venv, say
from tests.worker.runs import carry_out, orders

pytestmark = pytest.mark.slurm
THERE = ("profile=smoke", "cluster=devcluster", "container=none")
SMOKE = (*THERE, "task=vector", "train.validate=never")  # what trains nothing is loaded soonest


@pytest.fixture
def bench(devcluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path / "results", devcluster)
    for name, value in bench.reaching.items():
        monkeypatch.setenv(name, value)
    return bench


def sif() -> bool:
    """Is there an image, and something to run it?"""
    from slurm import container, images

    try:
        container.check(images.choice("thin"))
    except ValueError:
        return False
    return True


def test_a_figure_comes_out_of_real_arrays_and_is_then_only_redrawn(bench: Bench, tmp_path: Path) -> None:
    """Its words stay words: nothing in them is executed."""
    mark = tmp_path / "touched"
    odd = f"cluster.comment='a b; $(touch {mark}) `touch {mark}` \"q\"'"
    words = ("reproduce", "fig3", "profile=smoke", "cluster=devcluster", "container=none", conf(bench), odd)
    done = fine(bench.command(*words))
    assert not mark.exists()
    assert "| verdict | claim |" in done.stdout
    assert "fig3: " in done.stdout
    assert (bench.results / "figures" / "fig3-smoke.png").is_file()
    runs = bench.folders.store.all_valid()
    assert len(runs) == 3
    for attempt in runs:
        manifest = attempt.manifest
        assert manifest["provenance"]["slurm"]["SLURM_JOB_NUM_NODES"] == "2"
        assert manifest["agreed"]
    again = bench.command(*words)
    assert "0 missing" in again.stderr
    assert "submitted" not in again.stderr
    assert "3 runs: 3 done" in bench.command("status").stdout


@pytest.mark.skipif(not sif(), reason="there is no image: `make sif`")
def test_workers_run_inside_the_image(bench: Bench) -> None:
    words = [word for word in SMOKE if not word.startswith("container")]
    fine(bench.command("run", "method=topk", *words, "container=thin", conf(bench)))
    (attempt,) = bench.folders.store.all_valid()
    assert len(attempt.manifest["provenance"]["image"]["sha256"]) == 64
    assert attempt.manifest["provenance"]["commit"]


def test_more_memory_than_any_node_has_is_refused_although_slurm_keeps_the_job(bench: Bench) -> None:
    asked = bench.command("submit", "method=topk", *SMOKE, conf(bench), "cluster.mem_gb=999")
    refused(asked, "SLURM refused the job", "change cluster.mem_gb")
    assert not bench.folders.sweeps.exists() or not [*bench.folders.sweeps.iterdir()]


def test_a_site_without_pyxis_is_told_so_before_anything_is_queued(bench: Bench) -> None:
    words = [word for word in SMOKE if not word.startswith("container")]
    own = ("container=thin", "container.runtime=pyxis", "container.image=ubuntu", "method=topk")
    refused(bench.command("submit", *words, *own, conf(bench)), "this site has no pyxis")
    assert not bench.folders.sweeps.exists()
    assert bench.command("status").stdout == ""


@pytest.mark.horovod
def test_horovod_over_slurm_ends_with_the_weights_of_torch(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("horovod", reason="there is no Horovod: `make horovod`")
    fine(bench.command("run", "method=topk", *THERE, "task=cnn_digits", "comm=horovod", conf(bench)))
    (attempt,) = bench.folders.store.all_valid()
    # Virtual ranks end with the weights of torch's processes, as tests/worker/test_resume.py has it.
    told, over_torch = orders(bench.folders.store, "method=topk", "cluster=virtual")
    carry_out(told, over_torch, tmp_path / "virtual")
    assert attempt.manifest["weights"] == over_torch.manifest["weights"]


@of_this_venv
def test_plain_sbatch_makes_a_grid_in_one_allocation(bench: Bench, tmp_path: Path) -> None:
    words = ["method=dense,topk", "method.density=0.01,0.05", *SMOKE]
    log = tmp_path / "log"
    asked = ("--nodes=2", "--ntasks=2", "--exclusive", f"--output={log}", f"--chdir={ROOT}")
    script = ROOT / "slurm" / "sweep.sbatch"
    around = {**bench.environment, "PYXIS_CONTAINER_IMAGE": "of/last:week"}
    job = say(around, "sbatch", "--parsable", *asked, script, *words).strip()
    # `sbatch --wait` looks ever more rarely.
    await_(lambda: job not in jobs.live([job]), "the end of the sweep", pause=0.5)
    assert "ExitCode=0:0" in say(bench.environment, "scontrol", "show", "job", job), log.read_text()
    assert "set aside: PYXIS_CONTAINER_IMAGE (container= decides)" in log.read_text()
    attempts = bench.folders.store.all_valid()
    assert len(attempts) == 3
    assert all(attempt.manifest["alone"] for attempt in attempts)  # SLURM says that the nodes were not shared
    assert "3 runs: 3 done" in bench.command("status").stdout


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
device = prepare_device(config, environment.place_of("srun"))
print("found", visible[device.index])
"""


@pytest.mark.parametrize("words", [[], ["--gpus-per-task=1"], ["--gpu-bind=single:1"]], ids=str)
def test_workers_of_a_node_have_a_gpu_each_however_slurm_binds_them(bench: Bench, words: list[str]) -> None:
    asked = ("srun", "--nodes=1", "--ntasks=2", "--gres=gpu:2", *words)
    said = say(bench.environment, *asked, sys.executable, "-c", DEVICE)
    assert sorted(re.findall(r"found (\d)", said)) == ["0", "1"]


def test_a_block_is_one_job(bench: Bench) -> None:
    done = fine(bench.command("submit", "method=dense,topk", *SMOKE, conf(bench), "launch.block=true"))
    sweep = there(read_json(bench.folders.sweeps / done.stdout.strip() / "sweep.json"))
    (array,) = sweep["arrays"]
    (job,) = array["jobs"]
    assert len(job["runs"]) == 2
    attempts = [newest(bench, run) for run in job["runs"]]
    bench.await_end(attempts)
    begun = [attempt.manifest["started"] for attempt in attempts]
    assert [attempt.state for attempt in attempts] == ["ok"] * 2
    assert begun == sorted(begun)


def blame(bench: Bench, node: str) -> None:
    """It failed at two times, the second time under two jobs."""
    bench.folders.scratch.mkdir(parents=True, exist_ok=True)
    for job, at in (("1", "2026-01-01T00:00:00"), ("2", "2026-01-02T00:00:00"), ("3", "2026-01-02T00:00:01")):
        note_failure(bench.folders.scratch / "node-failures.jsonl", node, job, at)


def test_a_node_that_failed_twice_is_avoided(bench: Bench) -> None:
    blame(bench, "n2")
    done = fine(bench.command("submit", "method=topk", *SMOKE, conf(bench), "cluster.sbatch=['--hold']"))
    text = next((bench.folders.sweeps / done.stdout.strip() / "a0").glob("*_submission.sh")).read_text()
    assert "#SBATCH --exclude=n2\n" in text
    assert bench.command("cancel", done.stdout.strip()).returncode == 0


def test_a_job_that_lands_on_a_node_that_failed_twice_goes_to_another(bench: Bench) -> None:
    """And stays away from those that it was told to avoid."""
    done = bench.command(
        "submit", "method=topk", *SMOKE, conf(bench), "cluster.workers_per_node=2",
        "cluster.exclude='n[1-2]'", "cluster.sbatch=['--hold']",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    blame(bench, "n3")
    (run,) = bench.folders.store.runs()
    queue.command("scontrol", "release", str(newest(bench, run).job.id))
    bench.await_end([newest(bench, run)])
    assert newest(bench, run).is_valid(verify=True)
    notes = [*bench.folders.launch(newest(bench, run)).glob("start-*/worker*.json")]
    assert {(read_json(note) or {})["node"] for note in notes} == {"n4"}
    (log,) = bench.folders.sweeps.glob("*/a0/*_0_log.out")
    assert "n3 failed before: asking for other nodes" in log.read_text()


def without_python(nodes: Sequence[str], folder: Path) -> str:
    """A Python that these nodes do not have."""
    path = folder / "python"
    lacks = "|".join(nodes)
    path.write_text(
        f'#!/bin/sh\ncase $SLURMD_NODENAME in {lacks}) exit 127;; esac\nexec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return f"cluster.python={path}"


def test_a_node_without_python_swallows_no_run_and_is_avoided(bench: Bench, tmp_path: Path) -> None:
    """Neither one that begins a job, nor one beside it."""
    words = (*SMOKE, conf(bench), "cluster.exclusive=true", without_python(["n1"], tmp_path))
    fine(bench.command("submit", "method=topk", "workers=1", "seed=0,1,2,3", *words))
    fine(bench.command("submit", "method=topk", "workers=2", *words, "cluster.exclude=n4"))
    attempts = [newest(bench, run) for run in bench.folders.store.runs()]
    bench.await_end(attempts)
    assert [attempt.state for attempt in attempts] == ["ok"] * 5
    ledger = (bench.folders.scratch / "node-failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["node"] for line in ledger} == {"n1"}
    assert (
        "avoiding n1" in bench.command("submit", "method=dense", *words, "cluster.sbatch=['--hold']").stderr
    )
    assert bench.command("cancel", "dense", "--matching").returncode == 0


def test_a_python_that_no_node_has_is_named(bench: Bench, tmp_path: Path) -> None:
    nowhere = without_python(["n1", "n2", "n3", "n4"], tmp_path)
    fine(bench.command("submit", "method=topk", "workers=1", *SMOKE, conf(bench), nowhere))
    (run,) = bench.folders.store.runs()
    bench.await_end([newest(bench, run)])
    told = bench.command("status").stdout
    assert "failed (python)" in told
    assert f"{tmp_path}/python can't be started on n1, n2, n3" in told


def test_a_run_that_needs_more_memory_than_there_is_fails_once_and_says_so(bench: Bench) -> None:
    done = bench.command(
        "run", "method=topk", *THERE, conf(bench), "cluster.setup=['ulimit -v 3000000']", "train.steps=500",
        "task=cnn_digits", "task.batch_size=700",
    )  # fmt: skip
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "memory" in bench.command("status").stdout


def test_two_that_submit_the_same_queue_each_run_once(bench: Bench) -> None:
    words = ("submit", "method=topk", "seed=0,1", *SMOKE, conf(bench), "cluster.sbatch=['--hold']")
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(lambda _: bench.command(*words), range(2))]
    assert [done.returncode for done in both] == [0, 0], [done.stderr for done in both]
    (name,) = [done.stdout.strip() for done in both if done.stdout.strip()]
    attempts = [newest(bench, run) for run in bench.folders.store.runs()]
    assert [(attempt.number, attempt.state) for attempt in attempts] == [(1, "submitted")] * 2
    ids = {str(attempt.job.id) for attempt in attempts}
    assert {*jobs.live(f"{job.partition('_')[0]}_{number}" for job in ids for number in range(3))} == ids

    refused(bench.command("cancel", "nothing-like-it"), "no sweep or run")
    refused(bench.command("cancel", name[:3]), "is part of a name", name, "--matching")
    assert "cancelled 2 jobs" in bench.command("cancel", name).stdout
    bench.await_end(attempts)
    assert "nothing to cancel" in bench.command("cancel", attempts[0].run_id).stderr


def test_a_spec_that_was_edited_is_refused(bench: Bench) -> None:
    done = bench.command("submit", "method=topk", *SMOKE, conf(bench), "cluster.sbatch=['--begin=now+4']")
    assert done.returncode == 0, done.stderr
    spec = bench.folders.sweeps / done.stdout.strip() / "a0" / "task0.json"
    spec.write_text(spec.read_text().replace('"threads": 1', '"threads": 2'))
    (run,) = bench.folders.store.runs()
    bench.await_end([newest(bench, run)])
    assert newest(bench, run).manifest["failure"] == "bad_input"
    assert "changed after it was submitted" in bench.command("status").stdout


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("cluster.partition=nowhere", "cluster.partition"),
        ("cluster.account=nobody", "cluster.account"),
        ("cluster.constraint=v100", "cluster.constraint"),
    ],
)
def test_what_slurm_rejects_is_said_in_its_words(word: str, field: str, bench: Bench) -> None:
    done = bench.command("submit", "method=topk", *SMOKE, conf(bench), word)
    if word.startswith("cluster.account") and done.returncode == 0:
        pytest.skip("this cluster keeps no accounts")
    refused(done, "SLURM refused the job: ", field)
    assert not [*bench.folders.sweeps.iterdir()]


def test_a_cluster_without_accounts_will_do(bench: Bench) -> None:
    """There `sacct` fails, and a job that is cancelled behind our back leaves no word of its own."""
    kept = "AccountingStorageType=accounting_storage/slurmdbd" in Path(bench.slurm_conf).read_text()
    say(bench.surroundings, SCRIPTS / "up", "no")
    try:
        assert jobs._accounted(["1"], ()) == {}
        done = fine(bench.command("run", "method=topk", *SMOKE, conf(bench)))
        done = bench.command(
            "submit", "method=topk", "seed=1", *SMOKE, conf(bench), "cluster.sbatch=['--hold']"
        )
        name = done.stdout.strip()
        (run,) = (run for run in bench.folders.store.runs() if newest(bench, run).state == "submitted")
        queue.command("scancel", str(newest(bench, run).job.id))
        bench.await_end([newest(bench, run)])
        told = bench.command("status", name).stdout
        assert "cancelled: the job was cancelled" in told  # its controller remembers that a while
    finally:
        say(bench.surroundings, SCRIPTS / "up", "yes" if kept else "no")


def conf(bench: Bench) -> str:
    return f"cluster.slurm_conf={bench.slurm_conf}"


def newest(bench: Bench, run: str) -> Attempt:
    return bench.folders.store.attempts(run)[-1]
