"""What goes wrong on clusters, done to real jobs of the development cluster, many times over:

    python -m tests.faults kill=20 signal=10 cancel=5 node=2 time=2

prints a table: of so many runs, how many ended whole, with every step recorded once and the very weights of a
run that nothing happened to. tests/test_slurm.py does one of each.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from analysis.records import Attempt, Store, read_json, read_lines
from experiments.planning import Folders
from experiments.standing import View
from slurm import environment, queue
from tests.clusters import SCRIPTS, STATE, say, speaking_to
from tests.conftest import ROOT, environment_for

STEPS = 400
WORDS = (
    "method=topk", "method.density=0.01", "task=cnn_digits", "profile=smoke", "workers=2",
    f"train.steps={STEPS}", "timing.mode=production", "train.validate=never", "container=none",
    "launch.checkpoint_min=0.02",
)  # fmt: skip
DEADLINE_S = 240
AT_A_TIME = "cluster.array_parallelism=2"
Trouble = Callable[["Bench", Attempt], None]


@dataclass(frozen=True)
class Bench:
    """A results folder, and surroundings that reach the development cluster."""

    results: Path
    surroundings: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        return {**self.surroundings, **environment_for(self.results), "SLURM_CONF": self.slurm_conf}

    @property
    def slurm_conf(self) -> str:
        return self.surroundings["SLURM_CONF"]

    @property
    def folders(self) -> Folders:
        return Folders(self.results)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "experiments", *words],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def submit(self, *words: str) -> list[Attempt]:
        """The attempts that were queued."""
        where = ("cluster=devcluster", f"cluster.slurm_conf={self.slurm_conf}")
        done = self.command("submit", *WORDS, *where, *words)
        assert done.returncode == 0, done.stderr
        sweep = read_json(self.folders.sweeps / done.stdout.strip() / "sweep.json")
        assert sweep is not None, done.stderr
        runs = [run for array in sweep["arrays"] for job in array["jobs"] for run in job["runs"]]
        return [self.folders.store.attempts(run)[-1] for run in runs]

    def weights(self, attempt: Attempt) -> str:
        """Of the same run where nothing happens to it: on this machine."""
        words = [word for word in WORDS if not word.startswith("container")]
        size = (read_json(attempt.path / "config.json") or {})["task"]["batch_size"]
        done = self.command(
            "run", *words, "cluster=local", f"seed={seed_of(attempt)}", f"task.batch_size={size}"
        )
        assert done.returncode == 0, done.stderr
        name = done.stdout.split()[0]
        return str(Store(self.results / "runs").attempts(name)[-1].manifest["weights"])

    def newest_start(self, attempt: Attempt) -> Path | None:
        starts = sorted(self.folders.launch(attempt).glob("start-*"), key=lambda path: path.stat().st_mtime)
        return starts[-1] if starts else None

    def step(self, attempt: Attempt) -> int:
        """Steps done, as its newest start has told."""
        start = self.newest_start(attempt)
        note = read_json(start / "progress.json") if start else None
        return int(note["step"]) if note else 0

    def await_end(self, attempts: Sequence[Attempt]) -> None:
        """Until none is under way."""
        environment.use_slurm(self.slurm_conf)

        def ended() -> bool:
            view = View.of(self.folders, queue.queue())
            return not any(view.of_attempt(one).under_way for one in attempts)

        await_(ended, f"the end of {len(attempts)} runs", patience(attempts), pause=1.0)

    def faults_in(self, attempt: Attempt) -> list[str]:
        """What is wrong with a record that should be whole; nothing, if nothing was lost or done twice."""
        found = []
        if not attempt.is_valid(verify=True):
            return [f"it is {attempt.state}: {attempt.manifest.get('why')}"]
        if attempt.manifest["weights"] != self.weights(attempt):
            found.append("other weights")
        if not attempt.manifest["agreed"]:
            found.append("the workers disagree")
        for path in attempt.rank_paths():
            lines, broken = read_lines(path)
            steps = [line["step"] for line in lines if line["kind"] == "step"]
            if steps != [*range(STEPS)] or broken:
                found.append(
                    f"{path.name}: {len(steps)} steps, {len(set(steps))} different, {broken} broken lines"
                )
        if list(attempt.path.glob("checkpoints/*")):
            found.append("checkpoints were left")
        return found


def patience(attempts: Sized) -> float:
    return DEADLINE_S * (1 + len(attempts) / 4)


def await_(
    condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S, pause: float = 0.1
) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {deadline_s:.0f} s")
        time.sleep(pause)


def kill_a_worker(bench: Bench, attempt: Attempt) -> None:
    """kill -9 of a random rank's process"""
    start = bench.newest_start(attempt)
    assert start is not None
    notes = [note for path in start.glob("worker*.json") if (note := read_json(path))]
    victim = random.Random(attempt.run_id).choice(sorted(notes, key=lambda note: int(note["rank"])))
    with contextlib.suppress(ProcessLookupError):  # it was quicker
        os.kill(victim["pid"], signal.SIGKILL)


def tell_to_stop(bench: Bench, attempt: Attempt) -> None:
    """the stop signal, as before a preemption"""
    # scancel does not return while the job that it told is requeued; the signal is there by then.
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            ["scancel", "--signal=USR2", str(attempt.job)],
            timeout=1,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or "Invalid job id" in done.stderr, done.stderr  # it was quicker


def cancel_and_submit_again(bench: Bench, attempt: Attempt) -> None:
    """cancel, and submit again"""
    done = bench.command("cancel", attempt.run_id)
    assert done.returncode == 0, done.stderr
    if "nothing to cancel" in done.stderr:  # it was quicker
        return
    await_(lambda: str(attempt.job) not in queue.queue(), "the end of a cancelled job", pause=0.5)
    if attempt.state == "ok":  # its last step was quicker than scancel
        return
    bench.submit(f"seed={seed_of(attempt)}", *SLOWER)


def kill_its_node(bench: Bench, attempt: Attempt) -> None:
    """its node dies, with all on it"""
    say(bench.surroundings, SCRIPTS / "node", DYING, "kill")
    job = str(attempt.job)
    try:
        await_(lambda: queue.queue().get(job, GONE).state != "RUNNING", "SLURM missing the node", pause=0.5)
    finally:
        say(bench.surroundings, SCRIPTS / "node", DYING, "start")


def let_it_run(bench: Bench, attempt: Attempt) -> None:
    """the time limit draws near"""


def seed_of(attempt: Attempt) -> int:
    return int((read_json(attempt.path / "config.json") or {})["seed"])


DYING = "n4"  # the others' jobs stay away from it
GONE = queue.Queued("", "", "", "")
ELSEWHERE = (f"cluster.exclude={DYING}",)
THERE = ("cluster.workers_per_node=2", f"cluster.sbatch=['--nodelist={DYING}']")
# Or most runs are over before they are told.
SLOWER = (*ELSEWHERE, "task.batch_size=64")
# SLURM counts limits in minutes; told to stop 50 s before the end is told to stop after some seconds.
ONE_MINUTE = (*SLOWER, "cluster.time_min=1", "cluster.signal_delay_s=50")
TROUBLES: dict[str, tuple[Trouble, tuple[str, ...]]] = {
    "kill": (kill_a_worker, SLOWER),
    "signal": (tell_to_stop, SLOWER),
    "cancel": (cancel_and_submit_again, SLOWER),
    "node": (kill_its_node, THERE),
    "time": (let_it_run, ONE_MINUTE),
}


def make_trouble(bench: Bench, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[Attempt]]:
    """Submit a run per seed and kind of trouble, trouble each at a random step, and wait for the end of all.

    Returns:
        By kind of trouble, the newest attempts, whatever became of them.
    """
    attempts: dict[str, list[Attempt]] = {}
    due: dict[Attempt, tuple[Trouble, int]] = {}
    chance = random.Random(str(wanted))
    for name, seeds in wanted.items():
        act, words = TROUBLES[name]
        attempts[name] = bench.submit(f"seed={','.join(map(str, seeds))}", *words, AT_A_TIME)
        due |= {one: (act, chance.randrange(1, STEPS // 4)) for one in attempts[name]}
    deadline = time.monotonic() + patience(due)
    while due:
        for one, (act, step) in list(due.items()):
            if one.state == "ok" or bench.step(one) >= step:
                del due[one]
                act(bench, one)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{[one.run_id for one in due]} never came to the step of their trouble")
        time.sleep(0.05)
    bench.await_end([one for some in attempts.values() for one in some])
    return {
        name: [bench.folders.store.attempts(one.run_id)[-1] for one in some]
        for name, some in attempts.items()
    }


def main(words: Sequence[str]) -> int:
    pairs = [(name, int(times)) for name, _, times in (word.partition("=") for word in words)]
    # Seeds of their own: what one kind of trouble has left whole, another would not make again.
    wanted = {name: range(100 * at, 100 * at + times) for at, (name, times) in enumerate(pairs)}
    bad = 0
    print("| trouble | runs | interrupted | whole, each step once, same weights | otherwise |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), speaking_to(STATE))
        environment.use_slurm(bench.slurm_conf)
        for name, seeds in wanted.items():
            (found,) = make_trouble(bench, {name: seeds}).values()
            faults = [bench.faults_in(one) for one in found]
            interrupted = sum(len([*bench.folders.launch(one).glob("start-*")]) > 1 for one in found)
            others = "; ".join(
                f"{times} x {what}" for what, times in Counter(map(", ".join, faults)).items() if what
            )
            bad += sum(bool(one) for one in faults)
            does = TROUBLES[name][0].__doc__
            print(f"| {does} | {len(found)} | {interrupted} | {faults.count([])} | {others} |", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["kill=20", "signal=10", "cancel=5", "node=2", "time=2"]))
