"""The command line as users meet it: real processes, real files, and everything that can go wrong
provoked.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, Command, environment_for, refused

SMALL = ("task=cnn_digits", "profile=smoke", "method.density=0.01")
LONG = ("method=topk", *SMALL, "train.steps=100000", "train.validate=never")


def manifests(results: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(results.glob("runs/*/*/run.json"))]


def wait_for_steps(results: Path, ranks: int, timeout_s: float = 120) -> None:
    """Until a run under way has written windows of its log on every rank."""
    deadline = time.monotonic() + timeout_s
    while len([p for p in results.glob("runs/*/*/rank*.jsonl") if p.stat().st_size]) < ranks:
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)


def start(results: Path, *words: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *words],
        cwd=ROOT,
        env=environment_for(results, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a shell gives each job
    )


def workers_of(results: Path) -> dict[int, int]:
    """Process number by rank of the workers whose launch folder lies under `results`."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            environment = (path / "environ").read_text().split("\0")
        except OSError:
            continue
        if "experiments.worker" in words and any(str(results) in word for word in words):
            rank = next(word for word in environment if word.startswith("SPARSIFY_RANK="))
            found[int(rank.partition("=")[2])] = int(path.name)
    return found


# --- the ordinary course
# ---------------------------------------------------------------------------------------


def test_a_run_is_recorded_reused_and_measured_again_when_forced(command: Command, tmp_path: Path) -> None:
    words = ("run", "method=topk", "cluster=local", *SMALL)
    first = command(*words)
    assert first.returncode == 0, first.stderr
    assert "attempt 1: ok" in first.stdout
    (manifest,) = manifests(tmp_path / "results")
    assert manifest["agreed"] is True
    assert manifest["simulated"] is False
    assert manifest["provenance"]["data"]["name"] == "digits"
    assert len(manifest["provenance"]["data"]["digest"]) == 64
    assert set(manifest["files"]) == {"rank0.jsonl", "rank1.jsonl"}

    again = command(*words)
    assert "already measured" in again.stderr
    assert "attempt 1: ok" in again.stdout

    forced = command(*words, FORCE="1")
    assert "attempt 2: ok" in forced.stdout
    assert [m["state"] for m in manifests(tmp_path / "results")] == ["ok", "ok"]
    # the same seed trains to the same bits
    assert len({m["weights"] for m in manifests(tmp_path / "results")}) == 1

    explained = command("why", "topk")
    assert explained.returncode == 0
    assert "8 steps recorded on each of 2 ranks" in explained.stdout
    assert "Traceback" not in explained.stdout

    collected = command("collect")
    assert collected.returncode == 0, collected.stderr
    assert {p.name for p in (tmp_path / "results" / "records").iterdir()} >= {"runs.parquet", "steps.parquet"}
    assert not list((tmp_path / "results").rglob("*.pkl"))  # nothing pickled is left behind


def test_who_searched_is_recorded_and_overlap_needs_buckets(command: Command, tmp_path: Path) -> None:
    words = ("run", "method=topk", "cluster=local", *SMALL, "timing.mode=production", "select=fused")
    done = command(*words, "method.scope=layer", "overlap=true")
    assert done.returncode == 0, done.stderr
    (manifest,) = manifests(tmp_path / "results")
    searching, tensors = manifest["searching"], manifest["tensors"]
    assert searching["kernel"].startswith(("native", "numpy"))
    assert searching["steps"] == 8 * tensors
    assert searching["fallbacks"] == 0
    assert f"searched by {searching['kernel']}, the guessed bound wrong in 0 of" in done.stdout
    refused(command(*words, "overlap=true"), "scope='global'", "take scope=layer")


def test_a_figure_is_reproduced_then_only_redrawn(command: Command, tmp_path: Path) -> None:
    first = command("reproduce", "fig1", "profile=smoke")
    assert first.returncode == 0, first.stderr
    assert "2 runs, 2 missing" in first.stderr
    assert "| fig1 |" in first.stdout
    figures = tmp_path / "results" / "figures"
    assert {path.name for path in figures.iterdir()} == {
        f"fig1-smoke.{kind}" for kind in ("png", "pdf", "md")
    }
    again = command("reproduce", "fig1", "profile=smoke")
    assert "2 runs, 0 missing" in again.stderr
    assert [m["attempt"] for m in manifests(tmp_path / "results")] == [1, 1]


def test_two_processes_reproducing_the_same_figure_share_the_work(tmp_path: Path) -> None:
    results = tmp_path / "results"
    both = [start(results, "reproduce", "fig1", "profile=smoke") for _ in range(2)]
    ended = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert any("another process is measuring this run" in err for _, err in ended)
    found = manifests(results)
    assert [m["state"] for m in found] == ["ok"] * len(found)
    assert {m["attempt"] for m in found} == {1}


# --- bad input
# -------------------------------------------------------------------------------------------------


def test_words_that_mean_nothing(command: Command) -> None:
    refused(command("fly"), "no command 'fly'", "run, reproduce")
    refused(command("reproduce", "fig9"), "no item 'fig9'", "fig4")
    refused(command("reproduce"), "reproduce what?", "fig4")
    refused(command("run", "--fast"), "no option '--fast'", "--force")
    refused(command("run", "method=topq"), "no method 'topq'", "topk")
    refused(command("run", "cluster=mars"), "no cluster 'mars'", "local")
    refused(command("run", "method.densty=1"), "no key 'method.densty'", "method.density")
    refused(command("run", "method.density=0"), "density=0", "(0, 1]")
    refused(command("run", "workers=0"), "workers=0")
    refused(command("why", "nothing"), "0 runs match 'nothing'")
    traced = command("run", "workers=0", "--traceback")
    assert traced.returncode == 2
    assert "Traceback" in traced.stderr


def test_k_of_zero_is_refused_with_the_smallest_density(command: Command, tmp_path: Path) -> None:
    done = command("run", "method=topk", *SMALL, "method.density=1e-5")
    refused(done, "density=1e-05 of 24170 gradients selects none (k = 0)", "smallest", "4.14e-05")
    assert [m["state"] for m in manifests(tmp_path / "results")] == ["failed"]


def test_more_workers_than_batches_are_refused(command: Command) -> None:
    refused(command("run", *SMALL, "workers=100"), "workers=100", "1437 training images", "fewer workers")


def test_the_paper_profile_refuses_without_gpu_and_says_what_to_do(command: Command) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU driver")
    refused(command("reproduce", "fig4", "profile=paper"), "needs an NVIDIA GPU", "profile=laptop")


def test_the_paper_profile_refuses_without_data_and_says_what_to_do(command: Command, tmp_path: Path) -> None:
    words = ("run", "profile=paper", "device=cpu", "task=cnn_cifar10", f"data.root={tmp_path}")
    refused(command(*words), str(tmp_path), "cifar-10-batches-py")
    done = command("run", "profile=paper", "device=cpu", "task=cnn_cifar10", DATA_ROOT=str(tmp_path))
    refused(done, "CIFAR-10 is not in", "data.root=FOLDER or $DATA_ROOT")


def test_the_laptop_profile_says_in_one_line_that_it_uses_digits(command: Command, tmp_path: Path) -> None:
    done = command(
        "run", "profile=smoke", "task=cnn_cifar10", "method=dense", DATA_ROOT=str(tmp_path / "empty")
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("using scikit-learn's digits instead") == 1
    (manifest,) = manifests(tmp_path / "results")
    assert manifest["provenance"]["data"]["name"] == "digits"


def test_corrupt_data_are_refused(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"not an image")
    done = command("run", "profile=smoke", "task=cnn_cifar10", "method=dense", f"data.root={tmp_path}")
    refused(done, "missing or corrupt", str(folder))


# --- what breaks while it runs
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["serialised", "production"])
def test_a_gradient_that_is_not_finite_stops_the_run(command: Command, tmp_path: Path, mode: str) -> None:
    done = command(
        "run", "method=dense", "task=cnn_digits", "profile=smoke", "task.lr=1e30", "task.lr_warmup_epochs=0"
    )
    refused(done, "rank 0, step ", "the gradient of", "NaN or Inf", "why", code=1)
    (manifest,) = manifests(tmp_path / "results")
    assert manifest["state"] == "failed"
    assert manifest["failure"] == "non_finite"
    assert "NaN or Inf" in manifest["why"]


def test_a_killed_worker_ends_the_others_and_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results"
    process = start(results, "run", *LONG, "cluster=local", "workers=3")
    try:
        wait_for_steps(results, ranks=3)
        workers = workers_of(results)
        assert set(workers) == {0, 1, 2}
        killed_at = time.monotonic()
        os.kill(workers[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        _end(process)
    assert time.monotonic() - killed_at < 60
    assert process.returncode == 1
    assert "worker 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert workers_of(results) == {}
    (manifest,) = manifests(results)
    assert (manifest["state"], manifest["failure"]) == ("failed", "killed")


def test_ctrl_c_stops_the_workers_and_keeps_what_is_finished(command: Command, tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert command("run", "method=dense", "task=cnn_digits", "profile=smoke").returncode == 0
    process = start(results, "run", *LONG, "cluster=local")
    try:
        wait_for_steps(results, ranks=2 + 2)  # two of the finished run
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        out, err = process.communicate(timeout=60)
    finally:
        _end(process)
    assert process.returncode == 1
    assert "interrupted" in err
    assert "Traceback" not in out + err
    assert workers_of(results) == {}
    states = {m["run_id"].partition("-")[0]: m for m in manifests(results)}
    assert states["dense"]["state"] == "ok"
    assert (states["topk"]["state"], states["topk"]["failure"]) == ("failed", "interrupted")


def test_a_folder_without_write_permission_is_named(command: Command, tmp_path: Path) -> None:
    """Root may write anywhere, so the folder stands on a read-only mount where this is root, else it is just
    locked.
    """
    results = tmp_path / "results"
    results.mkdir()
    if os.geteuid() == 0:
        if not mount(results, "-o", "ro"):
            pytest.skip("root without the right to mount")
        try:
            refused(command("run", "method=dense", *SMALL[:2]), "read-only", str(results), code=2)
        finally:
            subprocess.run(["umount", str(results)], check=True)
    else:
        results.chmod(0o500)
        refused(command("run", "method=dense", *SMALL[:2]), "may not be written", str(results), code=2)


def test_a_full_disk_is_named_and_nothing_is_half_written(command: Command, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    if os.geteuid() != 0 or not mount(results, "-o", "size=500k"):
        pytest.skip("needs root with the right to mount")
    try:
        assert command("run", "method=dense", *SMALL[:2]).returncode == 0
        done = command("run", *LONG)
        refused(done, "the disk is full", code=1)
        states = {m["run_id"].partition("-")[0]: m["state"] for m in manifests(results)}
        assert states["dense"] == "ok"
        assert states["topk"] in (
            "failed",
            "running",
        )  # a full disk may refuse even the manifest's last change
        again = command("why", "dense")
        assert "attempt 1: ok" in again.stdout
    finally:
        subprocess.run(["umount", str(results)], check=True)


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
    assert "/400 steps" in text
    assert "runs done" in text


def mount(folder: Path, *options: str) -> bool:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "none", str(folder)], capture_output=True, check=False
    )
    return done.returncode == 0


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()
