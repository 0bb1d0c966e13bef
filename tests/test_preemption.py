"""A run that is told to stop, and goes on: the same weights, every step recorded once, whatever becomes of
its checkpoints.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed import TCPStore

from analysis.frames import from_attempts, read_parquet, resumptions, write_parquet
from analysis.records import Attempt, RankLog, Store, read_json, read_lines, write_json
from analysis.stats import warm
from experiments import checkpoints, rendezvous, run, signals, worker
from experiments import config as configs
from experiments import data as datasets
from experiments.checkpoints import GO_ON, SAVE, STOP, Agreement
from experiments.diagnosis import diagnose
from experiments.planning import Folders
from experiments.signals import Preempted, Stop
from slurm.environment import Place
from sparsify.comm import WorkerLost, virtual
from sparsify.comm.torch import TorchComm, come
from tests import bodies, synthetic
from tests.bodies import on_processes
from tests.conftest import ROOT, environment_for
from tests.laws import METHODS

CPU = torch.device("cpu")
STEPS = 12


@cache
def digits() -> datasets.Dataset:
    return datasets.load("digits", None, CPU)


# --- whole runs
# --------------------------------------------------------------------------------------------------


def orders(store: Store, *words: str) -> tuple[dict, Attempt]:
    config = configs.resolve(["task=cnn_digits", "profile=smoke", *words])
    attempt = store.begin(config)
    told = {"config": config, "attempt": str(attempt.path), "data_root": None, "meet": "file", "image": None}
    return told, attempt


class Workers(NamedTuple):
    """A started run's processes, by rank."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path

    def end(self) -> list[int]:
        """Their exit codes; where one does not end, what they all said."""
        try:
            return [process.wait(timeout=150) for process in self.processes]
        except subprocess.TimeoutExpired:
            codes = [process.poll() for process in self.processes]
            pytest.fail(f"{codes}: {[path.read_text() for path in sorted(self.folder.glob('*.err'))]}")
        finally:
            for process in self.processes:
                process.kill()
                process.wait()


def start(told: dict, folder: Path, size: int) -> Workers:
    """The run's workers, as a launcher starts them."""
    folder.mkdir()
    write_json(folder / "launch.json", told)
    command = [sys.executable, "-m", "experiments.worker", str(folder / "launch.json"), str(folder)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SPARSIFY_SIZE": str(size)}
    processes = []
    for rank in range(size):
        place = {"SPARSIFY_RANK": str(rank), "SPARSIFY_LOCAL_RANK": str(rank)}
        with (folder / f"{rank}.err").open("wb") as errors:
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=common | place, stderr=errors, preexec_fn=hold_signals_back
                )
            )
    return Workers(processes, folder)


def hold_signals_back() -> None:
    """Until the worker takes them: before that, they would end it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)


def workers_of(pid: int) -> list[int]:
    """The processes of ours that this one started."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in started if b"experiments" in Path(f"/proc/{child}/cmdline").read_bytes()]


def recorded(attempt: Attempt, rank: int, kind: str = "step") -> list[dict]:
    lines, broken = read_lines(attempt.rank_path(rank))
    assert not broken
    return [line for line in lines if line["kind"] == kind]


def wait_for(folder: Path, name: str) -> None:
    """Until there is such a file."""
    deadline = time.monotonic() + 120
    while not any(folder.glob(name)):
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.01)


def test_workers_told_at_any_moment_end_together_and_go_on_to_the_same_weights(tmp_path: Path) -> None:
    """One rank is told in the middle of training; then, before they have even begun, all, and twice."""
    chance = random.Random(4)
    words = ("method=dgc", "method.density=0.01", "cluster=local", "workers=2", "train.steps=120")
    told, attempt = orders(Store(tmp_path / "runs"), *words)
    workers = start(told, tmp_path / "first", 2)
    wait_for(tmp_path / "first", "progress.json")
    time.sleep(chance.uniform(0, 0.3))
    workers.processes[chance.randrange(2)].send_signal(signal.SIGUSR2)
    assert workers.end() == [75, 75]
    done = attempt.manifest["step"]
    assert attempt.state == "preempted"
    assert 0 < done < 120
    assert [line["step"] for line in recorded(attempt, 1)] == list(range(done))

    workers = start(told, tmp_path / "second", 2)
    for process in workers.processes:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR2)
    assert workers.end() == [75, 75]
    assert (attempt.state, attempt.manifest["step"]) == ("preempted", done)

    assert start(told, tmp_path / "third", 2).end() == [0, 0]
    assert attempt.is_valid()
    assert not attempt.checkpoints.exists()
    assert [again["step"] for again in attempt.manifest["resumed"]] == [done]
    for rank in range(2):
        assert [line["step"] for line in recorded(attempt, rank)] == list(range(120))
    epochs = recorded(attempt, 0, "epoch")
    assert [line["epoch"] for line in epochs] == list(range(1, len(epochs) + 1))
    steps_s = sum(line["step_s"] for line in recorded(attempt, 0))
    assert epochs[-1]["wall_s"] == pytest.approx(steps_s)

    told, straight = orders(Store(tmp_path / "runs"), *words)
    assert start(told, tmp_path / "straight", 2).end() == [0, 0]
    assert straight.manifest["weights"] == attempt.manifest["weights"]
    assert [measured(line) for line in recorded(straight, 0)] == [
        measured(line) for line in recorded(attempt, 0)
    ]
    assert [measured(line) for line in recorded(straight, 0, "epoch")] == [measured(e) for e in epochs]


def test_a_run_under_torchrun_stops_as_told_and_goes_on(tmp_path: Path) -> None:
    """Its processes are another program's, which ends them all when one ends without success."""
    words = ("task=cnn_digits", "profile=smoke", "cluster=local", "workers=2", "train.steps=300")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "experiments", "run", "method=topk", "method.density=0.01", *words,
    ]  # fmt: skip
    around = environment_for(tmp_path, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with (tmp_path / "said").open("wb") as said:
        first = subprocess.Popen(command, cwd=ROOT, env=around, stderr=said)
    wait_for(Folders(tmp_path).scratch, "*/progress.json")
    os.kill(workers_of(first.pid)[0], signal.SIGUSR2)
    assert first.wait(timeout=100) == 1, (tmp_path / "said").read_text()
    store = Store(tmp_path / "runs")
    (attempt,) = store.attempts(*store.runs())
    done = attempt.manifest["step"]
    assert attempt.state == "preempted"
    assert 0 < done < 300
    assert f"told to stop; it can go on from step {done}: run again" in (tmp_path / "said").read_text()

    again = subprocess.run(command, cwd=ROOT, env=around, timeout=100, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [told["step"] for told in attempt.manifest["resumed"]] == [done]
    for rank in range(2):
        assert [line["step"] for line in recorded(attempt, rank)] == list(range(300))


def measured(line: dict) -> dict:
    """What does not depend on clocks."""
    return {
        key: v for key, v in line.items() if key not in ("start_s", "step_s", "phases", "spans", "wall_s")
    }


def test_processes_of_every_kind_of_state_go_on_to_the_same_bits(tmp_path: Path) -> None:
    """dense, topk, dgc, oktopk, powersgd and randomk on two gloo processes. A random rank gets a real signal
    at a random step."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    for found in on_processes(bodies.told_to_stop, 2, tmp_path / "a"):
        assert set(found) == set(bodies.KEPT)
        assert all(0 < int(step) < bodies.KEPT_STEPS for step in found.values())
    for found in on_processes(bodies.going_on, 2, tmp_path / "b"):
        assert len(found) == len(bodies.KEPT)
        for name, bits in found.items():
            assert bits.all(), name


# --- over virtual ranks, in this process
# -------------------------------------------------------------------------


def carry_out(told: dict, attempt: Attempt, folder: Path, stop: Stop | None = None) -> None:
    folder.mkdir(exist_ok=True)
    run.execute(told, attempt, Place(0, 1, 0), folder, stop or Stop())


class StopAt(Stop):
    """Tells to stop once so many steps are recorded."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.asked = step, 0

    @property
    def told(self) -> bool:
        self.asked += 1
        return self.asked > self.step


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes are not rationed by the clock: what happens is the same on every machine."""
    monkeypatch.setattr(checkpoints, "VOTES_S", 0.0)


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    words = (
        f"method={name}",
        "cluster=virtual",
        "workers=3",
        f"train.steps={STEPS}",
        "task.lr_warmup_epochs=0.1",
    )
    if "density" in configs.resolve([f"method={name}"])["method"]:
        words = (*words, "method.density=0.02")
    told, attempt = orders(Store(tmp_path / "runs"), *words)
    _, straight = orders(Store(tmp_path / "runs"), *words)
    carry_out(told, straight, tmp_path / "straight")
    with pytest.raises(Preempted) as stopped:
        carry_out(told, attempt, tmp_path / "a", StopAt(3 * random.Random(name).randrange(2, STEPS - 2)))
    assert 0 < stopped.value.step < STEPS
    assert attempt.manifest["step"] == stopped.value.step
    carry_out(told, attempt, tmp_path / "a")
    assert attempt.manifest["weights"] == straight.manifest["weights"]
    for rank in range(3):
        assert [measured(line) for line in recorded(attempt, rank)] == [
            measured(line) for line in recorded(straight, rank)
        ]


VIRTUAL = ("method=topk", "method.density=0.02", "cluster=virtual", "workers=2", f"train.steps={STEPS}")


@pytest.fixture
def interrupted(tmp_path: Path, every_step: None, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, Attempt]:
    """A run of `STEPS` steps that saved after most of them, kept two checkpoints and was told to stop."""
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, "launch.checkpoint_min=0")
    with pytest.raises(Preempted):
        carry_out(told, attempt, tmp_path / "a", StopAt(16))
    assert len(saved_steps(attempt)) == 2
    return told, attempt


def saved_steps(attempt: Attempt) -> list[int]:
    return sorted(int(path.parent.name) for path in attempt.checkpoints.glob("*/whole.json"))


def goes_on(told: dict, attempt: Attempt, folder: Path) -> list[dict]:
    """Finish it; it must come to the weights of a run that nothing happened to, every step recorded once.
    Returns where it went on."""
    carry_out(told, attempt, folder / "b")
    _, straight = orders(Store(folder / "runs"), *VIRTUAL)
    carry_out(told, straight, folder / "c")
    assert attempt.manifest["weights"] == straight.manifest["weights"]
    for rank in range(2):
        assert [line["step"] for line in recorded(attempt, rank)] == list(range(STEPS))
    return attempt.manifest["resumed"]


def test_a_checkpoint_is_plain_data(interrupted: tuple[dict, Attempt]) -> None:
    _, attempt = interrupted
    saved = torch.load(next(attempt.checkpoints.glob("*/rank1.pt")), weights_only=True)
    assert saved["aggregator"]["rank"] == 1
    # What all ranks share is there once.
    for step in saved_steps(attempt):
        assert [path.name for path in attempt.checkpoints.glob(f"{step}/shared*.pt")] == ["shared0.pt"]
    assert not list(attempt.path.rglob("*.part"))


@pytest.mark.parametrize(
    "harm", ["cut short", "changed", "removed", "shared part removed", "no whole.json", "log cut short"]
)
def test_a_broken_checkpoint_is_passed_over_for_the_one_before(
    harm: str, interrupted: tuple[dict, Attempt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, attempt = interrupted
    older, newest = saved_steps(attempt)
    path = attempt.checkpoints / str(newest) / "rank1.pt"
    raw = path.read_bytes()
    if harm == "cut short":
        path.write_bytes(raw[:-100])
    elif harm == "changed":
        path.write_bytes(raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:])
    elif harm == "removed":
        path.unlink()
    elif harm == "shared part removed":
        path.with_name("shared0.pt").unlink()
    elif harm == "no whole.json":  # killed while it was saving
        path.with_name("whole.json").unlink()
    else:
        log = attempt.rank_path(1)
        log.write_bytes(log.read_bytes()[:-10])
    assert [again["step"] for again in goes_on(told, attempt, tmp_path)] == [older]
    if harm != "no whole.json":
        (fault,) = attempt.manifest["faulty_checkpoints"]
        assert fault["step"] == newest
        assert re.search(r"\(rank [01]\)", fault["why"])
        assert f"the checkpoint of step {newest} is passed over" in capsys.readouterr().err


def test_ranks_that_drifted_apart_save_everything_of_their_own(
    tmp_path: Path, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = map(str, itertools.count())
    monkeypatch.setattr(checkpoints, "digest", lambda state: next(digests))
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL)
    with pytest.raises(Preempted) as stopped:
        carry_out(told, attempt, tmp_path / "a", StopAt(10))
    folder = attempt.checkpoints / str(stopped.value.step)
    assert len(list(folder.glob("shared*.pt"))) == 2
    goes_on(told, attempt, tmp_path)


def test_without_a_whole_checkpoint_the_run_begins_again(
    interrupted: tuple[dict, Attempt], tmp_path: Path
) -> None:
    told, attempt = interrupted
    for path in attempt.checkpoints.glob("*/shared0.pt"):
        path.write_bytes(b"")
    assert [again["step"] for again in goes_on(told, attempt, tmp_path)] == [0]


def test_a_killed_run_goes_on_from_its_last_save(
    tmp_path: Path, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it logged after that is measured again."""
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, "launch.checkpoint_min=0")
    progress = run.Progress.__call__

    def die(self: run.Progress, step: int) -> None:
        progress(self, step)
        if step == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(run.Progress, "__call__", die)
    with pytest.raises(KeyboardInterrupt):
        carry_out(told, attempt, tmp_path / "a")
    monkeypatch.undo()
    with attempt.rank_path(0).open("a") as log:
        log.write('{"kind":"step","st')
    newest = saved_steps(attempt)[-1]
    assert newest < 9
    assert [again["step"] for again in goes_on(told, attempt, tmp_path)] == [newest]


def test_a_full_disk_leaves_the_older_checkpoints_and_is_named(
    tmp_path: Path, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands for the disk: the same error, from the same call."""
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, "launch.checkpoint_min=0")
    progress, limits = run.Progress.__call__, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_up(self: run.Progress, step: int) -> None:
        progress(self, step)
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))

    monkeypatch.setattr(run.Progress, "__call__", fill_up)
    try:
        with pytest.raises(OSError, match="too large") as full:
            carry_out(told, attempt, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        monkeypatch.undo()
    assert full.value.errno == errno.EFBIG
    assert worker.explain(full.value) == ("disk", worker.DISK_FULL)
    steps = saved_steps(attempt)
    assert len(steps) == 2
    assert {path.name for path in attempt.checkpoints.iterdir()} == {str(step) for step in steps}
    assert not list(attempt.path.rglob("*.part"))
    goes_on(told, attempt, tmp_path)


# --- what the workers agree on
# -----------------------------------------------------------------------------------


def test_all_stop_after_the_same_step_whoever_was_told() -> None:
    def body(comm: virtual.VirtualComm) -> int:
        stop, now = Stop(), [0.0]
        agreement = Agreement(comm, stop, None, lambda: now[0])
        for step in range(10**4):
            now[0] += 1e-3 * (1 + comm.rank)  # clocks differ
            if comm.rank == 2 and step == 777:
                stop.told_at = 0.0
            if (word := agreement.after_step()) != GO_ON:
                assert word == STOP
                return step
        raise AssertionError("nobody stopped")

    steps = virtual.run(3, body)
    assert len(set(steps)) == 1
    assert 777 < steps[0] < 777 + 2 * checkpoints.VOTES_S / 1e-3 + 2


def test_short_steps_share_a_vote_and_long_ones_do_not() -> None:
    votes = 0

    class Counting:
        rank, size = 0, 1

        def vote(self, word: int) -> int:
            nonlocal votes
            votes, self.before, before = votes + 1, word, getattr(self, "before", 0)
            return before

    for step_s, fewest, most in ((0.001, 3, 9), (10.0, 1000, 1000)):
        votes, now = 0, [0.0]
        agreement = Agreement(Counting(), Stop(), None, lambda now=now: now[0])
        for _ in range(1000):
            now[0] += step_s
            agreement.after_step()
        assert fewest <= votes <= most


def test_rank_0s_clock_says_when_to_save_and_once() -> None:
    def body(comm: virtual.VirtualComm) -> list[int]:
        now = [0.0]
        agreement = Agreement(comm, Stop(), 60.0 if comm.rank == 0 else 1.0, lambda: now[0])
        words = []
        for _ in range(100):
            now[0] += 2.0
            words.append(agreement.after_step())
        return [at for at, word in enumerate(words) if word == SAVE]

    first, second = virtual.run(2, body)
    assert first == second
    assert len(first) == 3  # in 200 s


def test_a_vote_tells_the_word_before_and_moves_no_clock() -> None:
    def body(comm: virtual.VirtualComm) -> tuple[list[int], float]:
        if comm.rank == 1:
            time.sleep(0.05)
        heard = [comm.vote(2 if step == comm.rank else 0) for step in range(4)]
        return heard, comm.now()

    (words, early), (same, late) = virtual.run(2, body)
    assert words == same == [0, 2, 2, 0]
    assert late - early > 0.04


# --- the signal
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def restored() -> object:
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_a_forked_child_takes_no_notice(number: signal.Signals) -> None:
    stop = Stop().listen()
    child = subprocess.Popen(["sleep", "60"])  # a program of its own ends as always
    child.send_signal(number)
    assert child.wait(timeout=10) == -number
    code = (
        "import os, signal, sys\n"
        "from experiments.signals import Stop, ignore_in_child\n"
        "stop = Stop().listen()\n"
        "if not (child := os.fork()):\n"
        "    if sys.argv[2] == 'ignored': ignore_in_child()\n"
        "    os.kill(os.getpid(), int(sys.argv[1]))\n"
        "    os._exit(9 if stop.told else 3)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert not stop.told\n"
        "os.kill(os.getpid(), int(sys.argv[1]))\n"
        "os.kill(os.getpid(), int(sys.argv[1]))\n"
        "sys.exit(os.waitstatus_to_exitcode(status) if stop.told else 8)\n"
    )
    for how in ("inherited", "ignored"):
        done = subprocess.run([sys.executable, "-c", code, str(int(number)), how], cwd=ROOT, check=False)
        assert done.returncode == 3
    assert not stop.told


def test_a_signal_that_was_held_back_is_not_lost() -> None:
    """Whoever starts a worker may block the signal until the worker can take it."""
    code = (
        "import os, signal, sys\n"
        "from experiments.signals import Stop\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "sys.exit(3 if Stop().listen().told else 4)\n"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, preexec_fn=hold_signals_back, check=False).returncode == 3
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGUSR2


# --- meeting
# -----------------------------------------------------------------------------------------------------


def test_workers_of_several_machines_find_rank_0(tmp_path: Path) -> None:
    first, _ = rendezvous.open_store(tmp_path, Place(0, 2, 0), False, None, timedelta(seconds=5))
    second, address = rendezvous.open_store(tmp_path, Place(1, 2, 0), False, None, timedelta(seconds=5))
    first.set("word", "heard")
    assert second.get("word") == b"heard"
    assert address in read_json(tmp_path / rendezvous.NOTE)["addresses"]


def test_whoever_waits_in_vain_says_for_what(tmp_path: Path) -> None:
    soon, one = timedelta(seconds=0.2), Place(1, 2, 0)
    with pytest.raises(WorkerLost, match=r"found no meet.json of rank 0 in .*all nodes see them"):
        rendezvous.open_store(tmp_path, one, False, None, soon)
    write_json(tmp_path / rendezvous.NOTE, {"addresses": ["127.0.0.1"], "port": 1, "host": "elsewhere"})
    with pytest.raises(
        WorkerLost, match=r"can't reach rank 0 on elsewhere at 127.0.0.1, port 1; set cluster"
    ):
        rendezvous.open_store(tmp_path, one, False, None, soon)
    with pytest.raises(ValueError, match=r"cluster.interface=wlan9 has no IPv4 address on .*there are: .*lo"):
        rendezvous.open_store(tmp_path, Place(0, 2, 0), False, "wlan9", soon)
    store, _ = rendezvous.open_store(tmp_path, one, True, None, soon)
    with pytest.raises(WorkerLost, match=r"worker 1 of 2 waits in vain.*did not come: 0; their logs"):
        TorchComm.meet(store, 1, 2, CPU, soon)


def test_whoever_is_told_while_waiting_alone_ends_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "ALONE_S", 0.0)
    told, attempt = orders(Store(tmp_path / "runs"), "cluster=local", "workers=2", "method=dense")
    with pytest.raises(Preempted):
        run.execute(told, attempt, Place(0, 2, 0), tmp_path, Stop(told_at=0.0))
    assert (attempt.state, attempt.manifest["step"]) == ("preempted", 0)
    # Who comes later finds that out, told or not.
    with pytest.raises(Preempted):
        run.execute(told, attempt, Place(1, 2, 0), tmp_path, Stop())


def test_a_store_that_ends_while_workers_wait_is_a_lost_worker() -> None:
    served = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    store = TCPStore("localhost", served[0].port, is_master=False, timeout=timedelta(seconds=5))
    with pytest.raises(WorkerLost, match="worker 1 of 2 lost rank 0"):
        come(store, 1, 2, timedelta(seconds=60), lambda: bool(served.clear()))


# --- what the rest makes of it
# -----------------------------------------------------------------------------------


def test_batches_begin_anywhere() -> None:
    task = run.TASKS.build("cnn_digits", {"batch_size": 100})  # 7 batches a pass of 2 workers

    def batches(first: int) -> object:
        return task.batches(digits(), 1, 2, 3, torch.Generator(), torch.float32, first)

    everything = batches(0)
    for number in range(20):
        inputs, labels = next(everything)
        there, those = next(batches(number))
        assert torch.equal(inputs, there)
        assert torch.equal(labels, those)


def test_steps_after_an_interruption_are_warm_up_again(tmp_path: Path) -> None:
    attempt = synthetic.timed(Store(tmp_path), synthetic.config(train={"epochs": 1, "steps": 40}))
    frames, _ = from_attempts([attempt])
    key = frames.runs["key"].iloc[0]
    at_least = int(frames.runs["timing.warmup_steps"].iloc[0])
    assert warm(frames, key).again == 0

    manifest = attempt.manifest
    attempt.update(resumed=[{"step": 20}, {"step": 38}])
    again, _ = from_attempts([attempt])
    write_parquet(again, tmp_path / "kept")
    for some in (again, read_parquet(tmp_path / "kept")):
        left = warm(some, key)
        assert set(left.steps["step"]).isdisjoint({*range(at_least), *range(20, 20 + at_least), 38, 39})
        assert {19, 37} <= set(left.steps["step"])
        assert left.n + left.dropped + left.again == 40

    older = frames._replace(runs=frames.runs.drop(columns="resumed"))
    assert warm(older, key).n == warm(frames, key).n
    assert resumptions(manifest) == []
    assert resumptions({"resumed": [{"step": 5}, {"step": 30}, {"step": 10}]}) == [5, 10]


def test_a_run_that_is_nothing_but_interruptions_keeps_some_steps(tmp_path: Path) -> None:
    attempt = synthetic.timed(Store(tmp_path), synthetic.config(train={"epochs": 1, "steps": 8}))
    attempt.update(resumed=[{"step": 4}])
    frames, _ = from_attempts([attempt])
    assert warm(frames, frames.runs["key"].iloc[0]).n == 4


def test_what_a_worker_says_of_its_end() -> None:
    from experiments.machine import MachineMismatch

    assert worker.explain(MachineMismatch("no A100"))[0] == "machine"
    assert worker.explain(ValueError("workers=0"))[0] == "bad_input"
    assert worker.explain(MemoryError())[0] == "memory"
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    assert worker.explain(refused.value)[0] == "memory"
    assert worker.explain(RuntimeError("shapes differ"))[0] == "error"


LOST = "worker 0 of 2 lost the others during all_gather"


@pytest.mark.parametrize(
    ("notes", "codes", "expected"),
    [
        ({0: ("lost", LOST)}, {0: 1, 1: -9}, ("killed", "worker 1 was killed by SIGKILL")),
        # The end of the one that was left aborted as well: that is no cause.
        ({0: ("lost", LOST)}, {0: -6, 1: -9}, ("killed", "worker 1 was killed by SIGKILL")),
        ({0: ("lost", LOST), 1: ("memory", "out of memory")}, {0: 1, 1: -6}, ("memory", "out of memory")),
        ({0: ("lost", LOST)}, {0: 1}, ("killed", "the process of worker 1 ended without a word")),
        ({0: ("lost", LOST)}, {0: 1, 1: 1}, ("lost", LOST)),
        ({}, {0: 0, 1: 3}, ("error", "a worker ended with exit code 3 and no explanation")),
    ],
)
def test_the_first_cause_is_told_and_not_its_consequences(
    notes: dict[int, tuple[str, str]], codes: dict[int, int], expected: tuple[str, str], tmp_path: Path
) -> None:
    for rank, (kind, why) in notes.items():
        write_json(tmp_path / f"failure{rank}.json", {"rank": rank, "kind": kind, "why": why})
    kind, why = diagnose(tmp_path, codes, 2)
    assert kind == expected[0]
    assert why.startswith(expected[1])


def test_a_log_forgets_what_came_later(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank0.jsonl")
    log.truncate(0)  # there is none yet
    log.add("step", step=0)
    size = log.sync()
    log.add("step", step=1)
    assert log.sync() > size
    log.truncate(size)
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [0]
