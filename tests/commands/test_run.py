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
import threading
import time
from collections.abc import Iterator
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
from tests.conftest import ROOT, Command, environment_for, fine, refused, there
from tests.worker.runs import end_command, manifests, start_command, wait_for, workers_of

SMALL = ("task=cnn_digits", "profile=smoke", "method.density=0.01")
LONG = ("method=topk", *SMALL, "train.steps=100000", "train.validate=never")
RANKS = "runs/topk*/*/rank*.jsonl"  # below results


def finished(results: Path) -> None:
    """A run that ended well before."""
    synthetic.timed(Store(results / "runs"), synthetic.config("dense"))


def states(results: Path) -> dict[str, tuple[str, str | None]]:
    """By method, how its run ended, and why."""
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
    first = fine(command(*words))
    assert "attempt 1: done" in first.stdout
    (manifest,) = manifests(tmp_path / "results")
    assert manifest["agreed"] is True
    assert manifest["simulated"] is False
    assert manifest["provenance"]["data"]["name"] == "digits"
    assert len(manifest["provenance"]["data"]["digest"]) == 64
    assert set(manifest["files"]) == {"rank0.jsonl", "rank1.jsonl"}

    again = here(*words)
    assert "already measured" in again.stderr
    assert "attempt 1: done" in again.stdout

    forced = here(*words, FORCE="1")
    assert "attempt 2: done" in forced.stdout
    assert [manifest["state"] for manifest in manifests(tmp_path / "results")] == ["ok", "ok"]
    # the same seed trains to the same bits
    assert len({manifest["weights"] for manifest in manifests(tmp_path / "results")}) == 1

    explained = here("why", "topk")
    assert explained.returncode == 0
    assert "8 steps recorded on each of 2 ranks" in explained.stdout
    assert "Traceback" not in explained.stdout

    fine(here("collect"))
    tables = {path.name for path in (tmp_path / "results" / "records").iterdir()}
    assert tables >= {"runs.parquet", "steps.parquet"}
    assert not list((tmp_path / "results").rglob("*.pkl"))  # nothing pickled is left behind


def test_who_searched_is_recorded_and_overlap_needs_buckets(here: Command, tmp_path: Path) -> None:
    words = ("run", "method=topk", "cluster=local", *SMALL, "timing.mode=production", "select=fused")
    done = fine(here(*words, "method.scope=layer", "overlap=true"))
    (manifest,) = manifests(tmp_path / "results")
    searching, tensors = manifest["searching"], manifest["tensors"]
    assert searching["kernel"].startswith(("native", "numpy"))
    assert searching["steps"] == 8 * tensors
    assert searching["fallbacks"] == 0
    assert f"searched by {searching['kernel']}, the guessed bound wrong in 0 of" in done.stdout
    refused(here(*words, "overlap=true"), "scope='global'", "take scope=layer")


@pytest.mark.own_processes
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("ModuleNotFoundError('no torch', name='torch')", 2, ["torch is not installed", "make .venv/.train"]),
        ("ImportError('libcudart.so: no such file')", 2, ["can't be loaded (libcudart.so", "make clean"]),
        ("ImportError('libtorch.so: failed to map segment')", 1, ["does not fit into memory", "ulimit -v"]),
    ],
)
def test_a_torch_that_can_not_be_imported_is_told(
    here: Command, tmp_path: Path, error: str, code: int, words: list[str]
) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}")
    done = here("run", "method=topk", "cluster=virtual", *SMALL, PYTHONPATH=str(tmp_path))
    refused(done, *words, code=code)


def test_who_has_no_submitit_is_told_what_installs_it(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"submitit", *(name for name in sys.modules if name.startswith("submitit."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "slurm.submit", raising=False)
    done = here("plan", "method=topk", "cluster=generic_slurm", "task=cnn_digits", "--sbatch")
    refused(done, "submitit is not installed", "make .venv/.train")


def test_fused_without_a_compiler_is_refused_before_anything_is_measured(
    here: Command, tmp_path: Path
) -> None:
    nothing = {name: str(tmp_path) for name in ("PATH", "XDG_CACHE_HOME", "TMPDIR")}
    done = here("run", "method=topk", "cluster=virtual", *SMALL, "select=fused", **nothing)
    refused(done, "select=fused does not work here: no compiler", "take select=auto")


def test_the_laptop_profile_says_in_one_line_that_it_uses_digits(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_root, "reachable", lambda host: False)
    words = ("profile=smoke", "task=cnn_cifar10", "method=dense")
    done = fine(here("run", *words, DATA_ROOT=str(tmp_path / "empty")))
    assert done.stderr.count("using scikit-learn's digits instead") == 1
    (manifest,) = manifests(tmp_path / "results")
    assert manifest["provenance"]["data"]["name"] == "digits"


def test_a_busy_terminal_shows_a_bar(tmp_path: Path) -> None:
    """On a terminal there is a bar with the run, its steps and the time left; elsewhere plain lines."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments", "run", "method=topk", *SMALL, "train.steps=400"],
        cwd=ROOT,
        env={**environment_for(tmp_path / "results"), "TERM": "xterm"},
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:
                return
            if not part:
                return
            shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(timeout=120) == 0
    reader.join(timeout=10)
    os.close(leader)
    text = b"".join(shown).decode(errors="replace")
    assert "topk-cnn_digits" in text
    assert "/400 " in text
    assert "of 1 done" in text


# --- what breaks
# ----------------------------------------------------------------------------------------------


def test_what_only_a_worker_can_know_to_be_wrong_is_refused_as_well(command: Command, tmp_path: Path) -> None:
    done = command("run", "method=topk", *SMALL, "method.density=1e-5")
    refused(done, "density=1e-05 of 24170 gradients selects none (k = 0)", "smallest", "4.14e-05")
    assert states(tmp_path / "results") == {"topk": ("failed", "bad_input")}


def test_a_recorded_run_is_asked_for_by_its_name(here: Command, tmp_path: Path) -> None:
    fine(here("run", "method=topk", *SMALL, "cluster=virtual"))
    (first,) = Store(tmp_path / "results/runs").runs()
    assert "already measured" in fine(here("run", f"again={first}")).stderr
    fine(here("run", f"again={first.rpartition('-')[2][:8]}", "seed=5"))
    (other,) = {*Store(tmp_path / "results/runs").runs()} - {first}
    told = fine(here("why", first, "--against", other)).stdout
    assert "seed" in told
    refused(here("run", "again=none-such"), "0 runs match 'none-such'")


@pytest.mark.parametrize("kind", ["cnn_cifar10", "alternating-slimvgg_cifar10-2w-netns"])
def test_words_mean_a_shipped_run_again(kind: str, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results")
    runs = read_parquet(folders.shipped, ["runs"]).runs
    name = runs.loc[runs["run_id"].str.contains(kind), "run_id"].iloc[-1]
    (config,) = grid.configs(asked([f"again={name}"], folders))
    assert run_id(config) == name


TOO_FAST = ("method=dense", "task=cnn_digits", "profile=smoke", "task.lr=1e15", "task.lr_warmup_epochs=0")


def test_a_gradient_that_is_not_finite_fails_a_run_that_is_timed(here: Command, tmp_path: Path) -> None:
    done = here("run", *TOO_FAST, "timing.mode=serialised")
    refused(done, "rank 0, step ", "the gradient of", "NaN or Inf", "why", code=1)
    (manifest,) = manifests(tmp_path / "results")
    assert (manifest["state"], manifest["failure"]) == ("failed", "non_finite")
    assert "NaN or Inf" in manifest["why"]


@pytest.mark.parametrize("cluster", ["local", "virtual"])
def test_a_training_that_diverges_is_a_record_and_is_not_made_again(
    here: Command, tmp_path: Path, cluster: str
) -> None:
    words = (*TOO_FAST, "timing.mode=production", "train.validate=epoch", f"cluster={cluster}", "workers=2")
    told = fine(here("run", *words))
    assert "it diverged: rank 0, step " in told.stderr
    (manifest,) = manifests(tmp_path / "results")
    ended = manifest["diverged"]
    assert (manifest["state"], ended["step"] < ended["made"] <= manifest["steps"]) == ("ok", True)
    for words_of_all in (("list",), ("why", manifest["run_id"])):
        assert "diverged" in fine(here(*words_of_all)).stdout
    assert "already measured" in fine(here("run", *words)).stderr
    (run,) = Store(tmp_path / "results/runs").all_valid()
    frames, _ = of_attempt(run)
    end = final(frames, list(frames.runs["key"]), "val_loss")
    assert end is not None
    assert math.isnan(end.value)
    assert len(curve(frames, list(frames.runs["key"]), "val_loss")) < len(frames.epochs)
    assert "runs diverged" in captions.setting(frames)


def test_a_run_that_fails_stops_no_other_and_compare_names_it(here: Command, tmp_path: Path) -> None:
    words = ("method=dense", "cluster=virtual", "task=cnn_digits", "profile=smoke", "task.lr_warmup_epochs=0")
    done = here("run", *words, "timing.mode=serialised", "task.lr=1e30,0.1,0.05", "sweep=rates")
    refused(done, "the others go on", "gradient", "[2/3]", code=1)
    compared = fine(here("compare", "sweep=rates", "x=task.lr", "y=step_s"))
    (failed,) = (
        manifest["run_id"] for manifest in manifests(tmp_path / "results") if manifest["state"] != "ok"
    )
    assert f"left out {failed}: it is failed" in compared.stderr
    assert compared.stdout.count("| dense |") == 2


def test_a_killed_worker_ends_the_others_and_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results"
    process = start_command(results, "run", *LONG, "cluster=local", "workers=3")
    try:
        wait_for(results, RANKS, 3)
        workers = workers_of(results)
        assert set(workers) == {0, 1, 2}
        killed_at = time.monotonic()
        os.kill(workers[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        end_command(process)
    assert time.monotonic() - killed_at < 60
    assert process.returncode == 1
    assert "worker 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert workers_of(results) == {}
    assert states(results) == {"topk": ("failed", "killed")}


def test_a_step_in_which_workers_were_suspended_says_so(tmp_path: Path) -> None:
    """As by `scontrol suspend`, gang scheduling, or Ctrl-Z and `fg`."""
    results = tmp_path / "results"
    process = start_command(results, "run", *LONG, "cluster=local", "workers=2")
    try:
        wait_for(results, RANKS, 2)
        assert not suspended(results)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for worker in workers_of(results).values():
                os.kill(worker, number)
        deadline = time.monotonic() + 60
        while len(suspended(results)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        end_command(process)
    assert {rank for rank, _ in suspended(results)} == {"rank0", "rank1"}


def suspended(results: Path) -> set[tuple[str, int]]:
    """Steps in which a rank was stopped and continued, as far as they are written."""
    lines = [
        (path.stem, json.loads(line))
        for path in results.glob(RANKS)
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    return {(rank, line["step"]) for rank, line in lines if line.get("stops")}


def test_ctrl_c_lets_the_workers_save_and_a_second_one_ends_them(tmp_path: Path) -> None:
    results = tmp_path / "results"
    finished(results)
    process = start_command(results, "run", *LONG, "cluster=local")
    try:
        wait_for(results, RANKS, 2)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        out, err = process.communicate(timeout=60)
    finally:
        end_command(process)
    assert process.returncode == 1
    assert "Traceback" not in out + err
    assert workers_of(results) == {}
    assert states(results) == {"dense": ("ok", None), "topk": ("preempted", None)}
    saved = manifests(results)[-1]["step"]
    assert saved > 0
    assert f"saved at step {saved:,}; what was finished is kept; run again to go on" in err

    for note in results.glob("launch/*/progress.json"):
        note.unlink()
    process = start_command(results, "run", *LONG, "cluster=local")
    try:
        wait_for(results, "launch/*/progress.json")
        (worker, *_) = workers_of(results).values()
        os.kill(worker, signal.SIGSTOP)  # the others wait for it, and nothing can be saved
        os.killpg(process.pid, signal.SIGINT)
        while "ending" not in there(process.stderr).readline():
            pass
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        end_command(process)
    assert process.returncode == 1
    assert workers_of(results) == {}
    assert states(results) == {"dense": ("ok", None), "topk": ("failed", "interrupted")}
    assert f"saved at step {saved:,}" in err


def test_a_folder_without_write_permission_is_named(here: Command, tmp_path: Path) -> None:
    """Root may write anywhere, so the folder stands on a read-only mount where this is root, else it is just
    locked.
    """
    results = tmp_path / "results"
    results.mkdir()
    words = ("run", "method=dense", *SMALL[:2])
    if os.geteuid() == 0:
        with mounted(results, "ro"):
            refused(here(*words), "read-only", str(results))
    else:
        results.chmod(0o500)
        refused(here(*words), "may not be written", str(results))


NO_OVERRIDE = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")  # root may read what it may not


@pytest.mark.parametrize(
    ("closed", "words", "answers", "code"),
    [
        (".", ("list",), ["results may not be read by you", "SPARSIFY_RESULTS"], 2),
        ("runs", ("why", "dense"), ["runs may not be read by you"], 2),
        ("runs/{run}", ("list", "source=own"), ["left out {run}: its folder may not be read by you"], 1),
        ("runs/{run}", ("why", "dense"), ["{run} can't be shown: its folder may not be read by you"], 2),
    ],
)
def test_a_folder_that_only_another_user_may_read_is_called_so(
    tmp_path: Path, closed: str, words: tuple[str, ...], answers: list[str], code: int
) -> None:
    results = tmp_path / "results"
    finished(results)
    (run,) = Store(results / "runs").runs()
    folder = results / closed.format(run=run)
    is_root = os.geteuid() == 0
    if is_root and shutil.which(NO_OVERRIDE[0]) is None:
        pytest.skip("no setpriv, with which root is as other users are")
    folder.chmod(0)
    command = [*(NO_OVERRIDE if is_root else ()), sys.executable, "-m", "experiments", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_for(results), capture_output=True, text=True, check=False
    )
    folder.chmod(0o700)
    refused(done, *(answer.format(run=run) for answer in answers), code=code)


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
    results.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    with mounted(results, "size=500k"):
        finished(results)
        refused(here("run", *LONG), "the disk is full", code=1)
        ended = states(results)
        assert ended["dense"] == ("ok", None)
        # a full disk may refuse even the manifest's last change
        assert ended["topk"][0] in ("failed", "running")
        assert "attempt 1: done" in here("why", "dense").stdout
        with contextlib.suppress(OSError), (results / "rest").open("wb", buffering=0) as rest:
            while rest.write(bytes(4096)):
                pass
        refused(here("collect"), f"{results}/records", ": the disk is full: ", code=1)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A disk of its own; skips the test where this may not be."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("root without the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_several_values_are_several_runs_which_a_sweep_names(here: Command, tmp_path: Path) -> None:
    words = ["method=topk", *SMALL, "train.steps=2", "seed=0,1"]
    done = fine(here("run", *words, "sweep=thesis"))
    assert "thesis: 2 runs, 2 to make" in done.stderr
    assert "| seed |" in done.stdout
    index = there(read_json(tmp_path / "results" / "records" / "sweeps" / "thesis.json"))
    assert sorted(index["runs"]) == Store(tmp_path / "results" / "runs").runs()
    again = here("run", *words, "sweep=other")
    assert "all 2 runs are already measured" in again.stderr
    assert read_json(tmp_path / "results" / "records" / "sweeps" / "other.json") == index
    assert here("list", "sweep=other", "seed=1").stdout.count("\n| ") == 2
    assert "already measured" in here("run", "method=topk", *SMALL, "train.steps=2", "seed=1").stderr


def test_a_grid_of_more_than_a_thousand_asks_first(here: Command, tmp_path: Path) -> None:
    refused(here("run", "method=topk", *SMALL, "seed=range(0,1001)"), "1,001 runs", "--yes")
    assert not (tmp_path / "results" / "runs").exists()
