"""`run` as users meet it: real processes, real files, and what goes wrong provoked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pty
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from analysis.pictures import captions
from analysis.records.attempts import of_attempt
from analysis.records.configs import run_id
from analysis.records.files import read_json
from analysis.records.parquet import read_parquet
from analysis.records.store import Store
from analysis.stats import curve, final
from experiments.commands._again import asked
from experiments.config import data_root, grid
from experiments.config.folders import Folders
from tests.analysis import synthetic
from tests.conftest import ROOT, Command, environment_for, fine, process, refused, there
from tests.worker.runs import end_command, manifests, start_command, wait_for, workers_of

SMALL = ("task=cnn_digits", "profile=smoke", "method.density=0.01")
LONG = ("run", "method=topk", *SMALL, "train.steps=100000", "train.validate=never", "cluster=local")
TOO_FAST = ("method=dense", "task=cnn_digits", "profile=smoke", "task.lr=1e15", "task.lr_warmup_epochs=0")
RANKS = "runs/topk*/*/rank*.jsonl"  # below results


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Provide a folder of results with a run that ended well before."""
    synthetic.timed(Store(tmp_path / "results" / "runs"), synthetic.config("dense"))
    return tmp_path / "results"


def states(results: Path) -> dict[str, tuple[str, str | None]]:
    """Return how runs ended, and why, by their method."""
    return {
        manifest["run_id"].partition("-")[0]: (manifest["state"], manifest.get("failure"))
        for manifest in manifests(results)
    }


# --- the ordinary course
# --------------------------------------------------------------------------------------


def test_a_run_is_recorded_reused_and_measured_again_when_forced(
    command: Command, here: Command, tmp_path: Path
) -> None:
    words = ("run", "method=topk", "cluster=local", *SMALL)
    assert "attempt 1: done" in fine(command(*words)).stdout
    (manifest,) = manifests(tmp_path / "results")
    assert manifest["agreed"] is True
    assert manifest["simulated"] is False
    assert manifest["provenance"]["data"]["name"] == "digits"
    assert len(manifest["provenance"]["data"]["digest"]) == 64
    assert set(manifest["files"]) == {"rank0.jsonl", "rank1.jsonl"}

    for same in (words, ("run", f"again={manifest['run_id']}")):
        again = here(*same)
        assert "already measured" in again.stderr
        assert "attempt 1: done" in again.stdout

    assert "attempt 2: done" in here(*words, FORCE="1").stdout
    both = manifests(tmp_path / "results")
    assert [manifest["state"] for manifest in both] == ["ok", "ok"]
    assert both[0]["weights"] == both[1]["weights"], "the same seed trains to the same bits"

    explained = fine(here("why", "topk"))
    assert "8 steps recorded on each of 2 ranks" in explained.stdout
    assert "Traceback" not in explained.stdout
    fine(here("collect"))
    tables = {path.name for path in (tmp_path / "results" / "records").iterdir()}
    assert tables >= {"runs.parquet", "steps.parquet"}
    assert not list((tmp_path / "results").rglob("*.pkl"))  # nothing pickled is left behind

    fine(here("run", f"again={manifest['run_id'].rpartition('-')[2][:8]}", "seed=5"))
    (other,) = {*Store(tmp_path / "results/runs").runs()} - {manifest["run_id"]}
    assert "seed" in fine(here("why", other, "--against", manifest["run_id"])).stdout
    refused(here("run", "again=none-such"), "0 runs match 'none-such'")


def test_words_mean_a_shipped_run_again(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results")
    runs = read_parquet(folders.shipped, ["runs"]).runs["run_id"]
    for kind in ("cnn_cifar10", "alternating-slimvgg_cifar10-2w-netns"):
        name = runs[runs.str.contains(kind)].iloc[-1]
        (config,) = grid.configs(asked([f"again={name}"], folders))
        assert run_id(config) == name


def test_who_searched_is_recorded_and_overlap_needs_buckets(here: Command, tmp_path: Path) -> None:
    words = ("run", "method=topk", "cluster=local", *SMALL, "timing.mode=production", "select=fused")
    done = fine(here(*words, "method.scope=layer", "overlap=true"))
    (manifest,) = manifests(tmp_path / "results")
    searching = manifest["searching"]
    assert searching["kernel"].startswith(("native", "torch"))
    assert searching["steps"] == 8 * manifest["tensors"]
    assert searching["fallbacks"] == 0
    assert f"searched by {searching['kernel']}, the guessed bound wrong in 0 of" in done.stdout
    refused(here(*words, "overlap=true"), "scope='global'", "take scope=layer")


def test_several_values_are_several_runs_which_a_sweep_names(here: Command, tmp_path: Path) -> None:
    words = ["run", "method=topk", *SMALL, "train.steps=2"]
    done = fine(here(*words, "seed=0,1", "sweep=thesis"))
    assert "thesis: 2 runs, 2 to make" in done.stderr
    assert "| seed |" in done.stdout
    sweeps = tmp_path / "results" / "records" / "sweeps"
    index = there(read_json(sweeps / "thesis.json"))
    assert sorted(index["runs"]) == Store(tmp_path / "results" / "runs").runs()
    assert "all 2 runs are already measured" in here(*words, "seed=0,1", "sweep=other").stderr
    assert read_json(sweeps / "other.json") == index
    assert here("list", "sweep=other", "seed=1").stdout.count("\n| ") == 2
    assert "already measured" in here(*words, "seed=1").stderr
    refused(here("run", "method=topk", *SMALL, "seed=range(0,1001)"), "1,001 runs", "--yes")
    assert len(Store(tmp_path / "results" / "runs").runs()) == 2


def test_the_laptop_profile_says_in_one_line_that_it_uses_digits(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_root, "reachable", lambda host: False)
    words = ("profile=smoke", "task=cnn_cifar10", "method=dense")
    done = fine(here("run", *words, DATA_ROOT=str(tmp_path / "empty")))
    assert done.stderr.count("using scikit-learn's digits instead") == 1
    (manifest,) = manifests(tmp_path / "results")
    assert manifest["provenance"]["data"]["name"] == "digits"


@pytest.mark.extended
def test_a_busy_terminal_shows_a_bar_with_the_run_its_steps_and_the_time_left(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "experiments", "run", "method=topk", *SMALL, "train.steps=400"]
    around = environment_for(tmp_path / "results", TERM="xterm")
    with subprocess.Popen(command, cwd=ROOT, env=around, stdout=follower, stderr=follower) as running:
        os.close(follower)
        shown = [b"-"]
        with contextlib.suppress(OSError):  # the command has ended
            while shown[-1]:
                shown.append(os.read(leader, 4096))
    os.close(leader)
    assert running.returncode == 0
    for text in (b"topk-cnn_digits", b"/400 ", b"of 1 done"):
        assert text in b"".join(shown)


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
    done = here("plan", "method=topk", "cluster=generic_slurm", "task=cnn_digits", "--sbatch")
    refused(done, "submitit is not installed", "make .venv/.train")


def test_what_can_not_work_is_refused_with_what_does(here: Command, tmp_path: Path) -> None:
    """Refuse before anything is measured; or, where only a worker can know, as well."""
    nothing = {name: str(tmp_path) for name in ("PATH", "XDG_CACHE_HOME", "TMPDIR")}
    done = here("run", "method=topk", "cluster=virtual", *SMALL, "select=fused", **nothing)
    refused(done, "select=fused does not work here: no compiler", "take select=auto")
    done = here("run", "method=topk", *SMALL, "method.density=1e-5")
    refused(done, "density=1e-05 of 24170 gradients selects none (k = 0)", "smallest", "4.14e-05")
    assert states(tmp_path / "results") == {"topk": ("failed", "bad_input")}


@pytest.mark.parametrize("cluster", ["local", "virtual"])
def test_a_training_that_diverges_is_a_record_and_is_not_made_again(
    here: Command, tmp_path: Path, cluster: str
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
    (manifest,) = manifests(tmp_path / "results")
    ended = manifest["diverged"]
    assert manifest["state"] == "ok"
    assert ended["step"] < ended["made"] <= manifest["steps"]
    for words_of_all in (("list",), ("why", manifest["run_id"])):
        assert "diverged" in fine(here(*words_of_all)).stdout
    assert "already measured" in fine(here(*words)).stderr
    (run,) = Store(tmp_path / "results/runs").all_valid()
    frames, _ = of_attempt(run)
    keys = list(frames.runs["key"])
    assert math.isnan(there(final(frames, keys, "val_loss")).value)
    assert len(curve(frames, keys, "val_loss")) < len(frames.epochs)
    assert "runs diverged" in captions.setting(frames)


def test_a_gradient_that_is_not_finite_fails_a_timed_run_and_stops_no_other(
    here: Command, tmp_path: Path
) -> None:
    words = (*TOO_FAST, "cluster=virtual", "timing.mode=serialised", "task.lr=1e30,0.1,0.05", "sweep=rates")
    done = here("run", *words)
    refused(
        done, "the others go on", "[2/3]", "rank 0, step ", "the gradient of", "NaN or Inf", "why", code=1
    )
    (failed,) = (manifest for manifest in manifests(tmp_path / "results") if manifest["state"] != "ok")
    assert (failed["state"], failed["failure"]) == ("failed", "non_finite")
    assert "NaN or Inf" in failed["why"]
    compared = fine(here("compare", "sweep=rates", "x=task.lr", "y=step_s"))
    assert f"left out {failed['run_id']}: it is failed" in compared.stderr
    assert compared.stdout.count("| dense |") == 2


def test_workers_that_are_suspended_say_so_and_a_killed_one_ends_the_others(tmp_path: Path) -> None:
    """Suspend them as `scontrol suspend`, gang scheduling, or Ctrl-Z and `fg` do."""
    results = tmp_path / "results"
    running = start_command(results, *LONG, "workers=3")
    try:
        wait_for(results, RANKS, 3)
        workers = workers_of(results)
        assert set(workers) == {0, 1, 2}
        assert not ranks_with_stops(results)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for worker in workers.values():
                os.kill(worker, number)
        deadline = time.monotonic() + 60
        while len(ranks_with_stops(results)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(workers[1], signal.SIGKILL)
        _, err = running.communicate(timeout=60)
    finally:
        end_command(running)
    assert ranks_with_stops(results) == {"rank0", "rank1", "rank2"}
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
def test_ctrl_c_lets_the_workers_save_and_a_second_one_ends_them(results: Path) -> None:
    def interrupt(act: Callable[[subprocess.Popen[str]], None]) -> tuple[str, tuple[str, str | None]]:
        """Start the run, act on it and send it Ctrl-C; return what it said, and how it ended."""
        running = start_command(results, *LONG)
        try:
            act(running)
            os.killpg(running.pid, signal.SIGINT)  # what a terminal does
            out, err = running.communicate(timeout=60)
        finally:
            end_command(running)
        assert running.returncode == 1
        assert "Traceback" not in out + err
        assert workers_of(results) == {}
        assert states(results)["dense"] == ("ok", None)
        return err, states(results)["topk"]

    said, state = interrupt(lambda running: wait_for(results, RANKS, 2))
    assert state == ("preempted", None)
    saved = manifests(results)[-1]["step"]
    assert saved > 0
    assert f"saved at step {saved:,}; what was finished is kept; run again to go on" in said

    for note in results.glob("launch/*/progress.json"):
        note.unlink()

    def interrupt_a_first_time(running: subprocess.Popen[str]) -> None:
        wait_for(results, "launch/*/progress.json")
        worker, *_ = workers_of(results).values()
        os.kill(worker, signal.SIGSTOP)  # the others wait for it, and nothing can be saved
        os.killpg(running.pid, signal.SIGINT)
        while "ending" not in there(running.stderr).readline():
            pass

    said, state = interrupt(interrupt_a_first_time)
    assert state == ("failed", "interrupted")
    assert f"saved at step {saved:,}" in said


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


def test_a_read_only_folder_is_named(here: Command, tmp_path: Path) -> None:
    with mounted(tmp_path / "results", "ro"):
        refused(here("run", "method=dense", *SMALL[:2]), "read-only", f"{tmp_path}/results")


NO_OVERRIDE = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")  # root may read what it may not


def test_a_folder_that_this_user_may_not_use_is_called_so(results: Path) -> None:
    (run,) = Store(results / "runs").runs()
    is_root = os.geteuid() == 0
    if is_root and shutil.which(NO_OVERRIDE[0]) is None:
        pytest.skip("no setpriv, with which root is as other users are")
    left_out = "its folder may not be read by you"
    for closed, mode, words, code, *answers in (
        (".", 0, "list", 2, "results may not be read by you", "SPARSIFY_RESULTS"),
        (".", 0o500, "run method=dense task=cnn_digits profile=smoke", 2, "may not be written", str(results)),
        ("runs", 0, "why dense", 2, "runs may not be read by you"),
        (f"runs/{run}", 0, "list source=own", 1, f"left out {run}: {left_out}"),
        (f"runs/{run}", 0, "why dense", 2, f"{run} can't be shown: {left_out}"),
    ):
        (results / str(closed)).chmod(int(mode))
        command = [
            *(NO_OVERRIDE if is_root else ()),
            sys.executable,
            "-m",
            "experiments",
            *str(words).split(),
        ]
        done = process(*command, env=environment_for(results))
        (results / str(closed)).chmod(0o700)
        refused(done, *map(str, answers), code=int(code))


def test_a_limit_on_the_size_of_files_is_told_and_not_a_full_disk(here: Command, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        done = here("run", "method=dense", *SMALL[:2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refused(done, f"{tmp_path}/results/runs/", "config.json: ", "`ulimit -f`", code=1)


def test_a_full_disk_is_named_and_nothing_is_half_written(here: Command, tmp_path: Path) -> None:
    results = tmp_path / "results"
    with mounted(results, "size=500k"):
        synthetic.timed(Store(results / "runs"), synthetic.config("dense"))
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
