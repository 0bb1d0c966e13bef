"""`run` as users meet it: real processes, real files, and what goes wrong provoked."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from analysis.pictures import captions
from analysis.records.attempts import load_attempt
from analysis.records.configs import run_id
from analysis.records.files import try_read_json_object
from analysis.records.parquet import read_parquet
from analysis.records.store import Attempt, Store
from experiments.commands._recorded_settings import replace_again_word
from experiments.config import grid
from experiments.config.folders import ResultFolders
from experiments.launch import progress_bar
from tests.analysis import synthetic
from tests.conftest import Command, environment_for, fine, process, refused, there
from tests.launch.troubled import await_
from tests.worker.runs import end_command, manifests, start_command, wait_for, workers_of

SMALL = ("task=cnn_digits", "profile=smoke", "method.density=0.01")
LONG = ("run", "method=topk", *SMALL, "train.steps=100000", "train.validate=never", "cluster=local")
TOO_FAST = ("method=dense", "task=cnn_digits", "profile=smoke", "task.lr=1e15", "task.lr_warmup_epochs=0")
RANKS = "runs/topk*/*/rank*.jsonl"  # below results


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def store(results: Path) -> Store:
    return Store(results / "runs")


@pytest.fixture
def dense(store: Store) -> Attempt:
    """Provide a run that ended well before."""
    return synthetic.timed(store, synthetic.config("dense"))


def states(results: Path) -> dict[str, tuple[str, str | None]]:
    """Return how runs ended, and why, by their method."""
    return {
        manifest["run_id"].partition("-")[0]: (manifest["state"], manifest.get("failure"))
        for manifest in manifests(results)
    }


def test_cfg_job_prints_every_setting_and_runs_nothing(here: Command, results: Path) -> None:
    printed = fine(here("run", "--cfg", "job", "method=dense,topk", *SMALL, "seed=3")).stdout
    dense, topk = yaml.safe_load_all(printed)
    assert (dense["method"]["name"], topk["method"]["density"]) == ("dense", 0.01)
    assert topk["task"]["lr"] == 0.1
    assert topk["collectives"] == "auto"  # records leave it out
    assert topk["seed"] == 3
    assert not (results / "runs").exists()


# --- the ordinary course
# --------------------------------------------------------------------------------------


def test_a_run_is_recorded_reused_and_measured_again_when_forced(
    command: Command, here: Command, results: Path, store: Store
) -> None:
    words = ("run", "method=topk", "cluster=local", *SMALL)
    assert "attempt 1: done" in fine(command(*words)).stdout
    (manifest,) = manifests(results)
    assert (manifest["agreed"], manifest["simulated"]) == (True, False)
    assert len(manifest["provenance"]["data"]["digest"]) == 64
    assert set(manifest["files"]) == {"rank0.jsonl", "rank1.jsonl"}

    for same in (words, ("run", f"again={manifest['run_id']}")):
        again = here(*same)
        assert "already measured" in again.stderr
        assert "attempt 1: done" in again.stdout

    assert "attempt 2: done" in here(*words, FORCE="1").stdout
    both = manifests(results)
    assert [manifest["state"] for manifest in both] == ["ok", "ok"]
    assert both[0]["weights"] == both[1]["weights"], "the same seed trains to the same bits"

    assert "8 steps recorded on each of 2 ranks" in fine(here("why", "topk")).stdout
    there(store.find_newest_valid_of_run(manifest["run_id"])).update_manifest(agreed=False)
    assert "these numbers are of rank 0's" in fine(here("why", "topk")).stdout
    fine(here("collect"))
    assert (results / "records" / "steps.parquet").is_file()

    fine(here("run", f"again={manifest['run_id'].rpartition('-')[2][:8]}", "seed=5"))
    (other,) = {*store.list_run_ids()} - {manifest["run_id"]}
    assert "seed" in fine(here("why", other, "--against", manifest["run_id"])).stdout
    refused(here("run", "again=none-such"), "0 runs match 'none-such'")


def test_words_mean_a_shipped_run_again(results: Path) -> None:
    folders = ResultFolders(results)
    runs = read_parquet(folders.shipped, ["runs"]).runs["run_id"]
    for kind in ("cnn_cifar10", "alternating-slimvgg_cifar10-2w-netns"):
        name = runs[runs.str.contains(kind)].iloc[-1]
        (config,) = grid.resolve_grid(replace_again_word([f"again={name}"], folders))
        assert run_id(config) == name


def test_who_searched_is_recorded_and_overlap_needs_buckets(here: Command, results: Path) -> None:
    words = ("run", "method=topk", "cluster=local", *SMALL, "timing.mode=production", "select=fused")
    done = fine(here(*words, "method.scope=layer", "overlap=true"))
    (manifest,) = manifests(results)
    searching = manifest["searching"]
    assert searching["kernel"].startswith(("native", "torch"))
    assert searching["steps"] == 8 * manifest["tensors"]
    assert searching["fallbacks"] == 0
    assert f"searched by {searching['kernel']}, the guessed bound wrong in 0 of" in done.stdout
    refused(here(*words, "overlap=true"), "scope='global'", "take scope=layer")


def test_several_values_are_several_runs_whose_progress_is_told_and_which_a_sweep_names(
    here: Command, monkeypatch: pytest.MonkeyPatch, results: Path, store: Store
) -> None:
    monkeypatch.setattr(progress_bar, "LINE_S", 0.0)
    words = ["run", "method=topk", *SMALL, "train.steps=2"]
    done = fine(here(*words, "seed=0,1", "sweep=thesis"))
    assert "thesis: 2 runs, 2 to make" in done.stderr
    assert "; 0 of 2 done" in done.stderr
    assert "| seed |" in done.stdout
    sweeps = results / "records" / "sweeps"
    index = there(try_read_json_object(sweeps / "thesis.json"))
    assert sorted(index["runs"]) == store.list_run_ids()
    assert "all 2 runs are already measured" in here(*words, "seed=0,1", "sweep=other").stderr
    assert try_read_json_object(sweeps / "other.json") == index
    assert here("list", "sweep=other", "seed=1").stdout.count("\n| ") == 2
    refused(here("run", "method=topk", *SMALL, "seed=range(0,1001)"), "1,001 runs", "--yes")
    assert len(store.list_run_ids()) == 2


# --- what breaks
# ----------------------------------------------------------------------------------------------


@pytest.mark.own_processes
def test_a_torch_that_can_not_be_imported_is_told(here: Command, tmp_path: Path) -> None:
    for error, code, *answers in (
        ("ModuleNotFoundError('no torch', name='torch')", 2, "torch is not installed", "make .venv/.train"),
        ("ImportError('libcudart.so: no such file')", 2, "can't be loaded (libcudart.so", "make clean"),
        ("ImportError('libtorch.so: failed to map segment')", 1, "does not fit into memory", "ulimit -v"),
    ):
        (tmp_path / "torch.py").write_text(f"raise {error}")
        done = here("run", "method=topk", "cluster=virtual", *SMALL, PYTHONPATH=str(tmp_path))
        refused(done, *map(str, answers), code=int(code))


def test_who_has_no_submitit_is_told_what_installs_it(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"submitit", *(name for name in sys.modules if name.startswith("submitit."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "slurm.submit", raising=False)
    done = here("submit", "method=topk", "cluster=generic_slurm", "task=cnn_digits")
    refused(done, "submitit is not installed", "make .venv/.train")


@pytest.mark.parametrize("cluster", ["local", "virtual"])
def test_a_training_that_diverges_is_a_record_and_is_not_made_again(
    here: Command, cluster: str, results: Path, store: Store
) -> None:
    words = (
        "run",
        *TOO_FAST,
        "timing.mode=production",
        "train.validate=epoch",
        f"cluster={cluster}",
        "workers=2",
    )
    assert "it diverged: rank 0, step " in fine(here(*words)).stderr
    (manifest,) = manifests(results)
    assert manifest["diverged"]["step"] < manifest["diverged"]["made"] <= manifest["steps"]
    for words_of_all in (("list",), ("why", manifest["run_id"])):
        assert "diverged" in fine(here(*words_of_all)).stdout
    assert "already measured" in fine(here(*words)).stderr
    (run,) = store.list_newest_valid_attempts()
    assert "runs diverged" in captions.describe_setting_with_remarks(load_attempt(run)[0])


def test_a_gradient_that_is_not_finite_fails_a_timed_run_and_stops_no_other(
    here: Command, results: Path
) -> None:
    words = (*TOO_FAST, "cluster=virtual", "timing.mode=serialised", "task.lr=1e30,0.1,0.05", "sweep=rates")
    done = here("run", *words)
    refused(
        done, "the others go on", "[2/3]", "rank 0, step ", "the gradient of", "NaN or Inf", "why", code=1
    )
    (failed,) = (manifest for manifest in manifests(results) if manifest["state"] != "ok")
    assert (failed["state"], failed["failure"]) == ("failed", "non_finite")
    compared = fine(here("compare", "sweep=rates", "x=task.lr", "y=step_s"))
    assert f"left out {failed['run_id']}: it is failed" in compared.stderr
    assert compared.stdout.count("| dense |") == 2


def test_workers_that_are_suspended_say_so_and_a_killed_one_ends_the_others(results: Path) -> None:
    """Suspend them as `scontrol suspend`, gang scheduling, or Ctrl-Z and `fg` do."""
    running = start_command(results, *LONG, "workers=3")
    try:
        wait_for(results, RANKS, 3)
        workers = workers_of(results)
        assert not ranks_with_stops(results)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for worker in workers.values():
                os.kill(worker, number)
        await_(lambda: len(ranks_with_stops(results)) == 3, "a stop of each rank", 60)
        os.kill(workers[1], signal.SIGKILL)
        _, err = running.communicate(timeout=60)
    finally:
        end_command(running)
    assert running.returncode == 1
    assert "worker 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert workers_of(results) == {}
    assert states(results) == {"topk": ("failed", "killed")}


def ranks_with_stops(results: Path) -> set[str]:
    """Return the ranks with a step in which they were stopped and continued, as far as steps are written."""
    return {
        path.stem
        for path in results.glob(RANKS)
        for line in path.read_text().splitlines()
        if line.endswith("}") and json.loads(line).get("stops")
    }


@pytest.mark.extended
@pytest.mark.usefixtures("dense")
def test_ctrl_c_lets_the_workers_save(results: Path) -> None:
    """See tests/launch/test_local.py for a second one, and for workers that can not save."""
    running = start_command(results, *LONG)
    try:
        wait_for(results, RANKS, 2)
        os.killpg(running.pid, signal.SIGINT)  # what a terminal does
        out, err = running.communicate(timeout=60)
    finally:
        end_command(running)
    assert running.returncode == 1
    assert "Traceback" not in out + err
    assert workers_of(results) == {}
    assert states(results) == {"dense": ("ok", None), "topk": ("preempted", None)}
    saved = manifests(results)[-1]["step"]
    assert f"saved at step {saved:,}; what was finished is kept; run again to go on" in err


# --- folders and disks
# ----------------------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """Mount a disk of its own on a folder; skip the test where this may not be."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_folder_is_named(here: Command, results: Path) -> None:
    with mounted(results, "ro"):
        refused(here("run", "method=dense", *SMALL[:2]), "read-only", f"{results}")


NO_OVERRIDE = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")  # root may read what it may not


def test_a_folder_that_this_user_may_not_use_is_called_so(dense: Attempt, results: Path) -> None:
    run = dense.run_id
    is_root = os.geteuid() == 0
    if is_root and shutil.which(NO_OVERRIDE[0]) is None:
        pytest.skip("no setpriv, with which root is as other users are")
    left_out = "its folder may not be read by you"
    user = NO_OVERRIDE if is_root else ()
    for closed, mode, words, code, answer in (
        (".", 0, "list", 2, "results may not be read by you"),
        (".", 0o500, f"run {' '.join(LONG[1:])}", 2, "may not be written"),
        ("runs", 0, "why dense", 2, "runs may not be read by you"),
        (f"runs/{run}", 0, "list source=own", 1, f"left out {run}: {left_out}"),
        (f"runs/{run}", 0, "why dense", 2, f"{run} can't be shown: {left_out}"),
    ):
        (results / closed).chmod(mode)
        command = (*user, sys.executable, "-m", "experiments", *words.split())
        done = process(*command, env=environment_for(results))
        (results / closed).chmod(0o700)
        refused(done, answer, code=code)


def test_a_limit_on_the_size_of_files_is_told_and_not_a_full_disk(here: Command, results: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        done = here("run", "method=dense", *SMALL[:2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refused(done, f"{results}/runs/", "config.json: ", "`ulimit -f`", code=1)


def test_a_full_disk_is_named_and_nothing_is_half_written(here: Command, results: Path, store: Store) -> None:
    with mounted(results, "size=500k"):
        synthetic.timed(store, synthetic.config("dense"))
        refused(here(*LONG), "the disk is full", code=1)
        ended = states(results)
        assert ended["dense"] == ("ok", None)
        # a full disk may refuse even the manifest's last change
        assert ended["topk"][0] in ("failed", "running")
        assert "attempt 1: done" in here("why", "dense").stdout
        with contextlib.suppress(OSError), (results / "rest").open("wb", buffering=0) as rest:
            while rest.write(bytes(4096)):
                pass
        refused(here("collect"), f"{results}/records", ": the disk is full: ", code=1)
