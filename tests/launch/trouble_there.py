"""Troubles of clusters, done to real jobs of the development cluster."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from analysis.records.files import try_read_json_object
from analysis.records.store import Attempt
from experiments.config.folders import ResultFolders
from experiments.launch.attempt import UNFINISHED_STATES
from experiments.launch.status import StatusSnapshot
from slurm import environment, jobs
from tests.conftest import environment_for, fine, process, python, there
from tests.launch.troubled import DEADLINE_S, SLOW, STEPS, WORDS, await_, seed_of
from tests.slurm.devcluster import NAMES, SCRIPTS, say

SETTLE_S = 10.0  # in which SLURM requeues a job whose node died
STALE_S = 15.0  # that a node stays dead at least
AT_A_TIME = "cluster.array_parallelism=2"
Trouble = Callable[["Bench", Attempt], None]


@dataclass(frozen=True)
class Bench:
    """A results folder, and surroundings that reach the development cluster."""

    results: Path
    surroundings: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        return {**environment_for(self.results), **self.reaching}

    @property
    def reaching(self) -> dict[str, str]:
        """The variables by which a process speaks to this cluster."""
        return {name: self.surroundings[name] for name in NAMES}

    @property
    def slurm_conf(self) -> str:
        return self.surroundings["SLURM_CONF"]

    @property
    def conf(self) -> str:
        """The word of a command that names this cluster."""
        return f"cluster.slurm_conf={self.slurm_conf}"

    @property
    def folders(self) -> ResultFolders:
        return ResultFolders(self.results)

    @classmethod
    def reached(cls, results: Path, surroundings: dict[str, str], patch: pytest.MonkeyPatch) -> Bench:
        """Return one whose cluster this process, too, speaks to."""
        bench = cls(results, surroundings)
        for name, value in bench.reaching.items():
            patch.setenv(name, value)
        return bench

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "experiments", *words, env=self.environment, timeout_s=DEADLINE_S)

    def newest(self) -> list[Attempt]:
        """Return the last attempt of each run."""
        store = self.folders.store
        return [store.list_attempts(run)[-1] for run in store.list_run_ids()]

    def await_job(self, job: str, log: Path) -> None:
        """Wait until a job of a script has ended well; `sbatch --wait` looks ever more rarely."""
        await_(lambda: job not in jobs.unfinished_jobs_by_id([job]), "the end of the job", pause=0.5)
        assert "ExitCode=0:0" in say(self.environment, "scontrol", "show", "job", job), log.read_text()

    def submit(self, *words: str) -> list[Attempt]:
        """Submit runs; return the attempts that were queued."""
        done = fine(self.command("submit", *WORDS, "cluster=devcluster", self.conf, *words))
        sweep = try_read_json_object(self.folders.sweeps / done.stdout.strip() / "sweep.json")
        assert sweep is not None, done.stderr
        runs = [run for array in sweep["arrays"] for job in array["jobs"] for run in job["runs"]]
        return [self.folders.store.list_attempts(run)[-1] for run in runs]

    def newest_start(self, attempt: Attempt) -> Path | None:
        starts = sorted(
            self.folders.launch_folder(attempt).glob("start-*"), key=lambda path: path.stat().st_mtime
        )
        return starts[-1] if starts else None

    def was_interrupted(self, attempt: Attempt) -> bool:
        """Return whether the attempt's run took more than one start.

        A run that is quicker than its trouble does not.
        """
        made = self.folders.store.list_attempts(attempt.run_id)
        return len([start for one in made for start in self.folders.launch_folder(one).glob("start-*")]) > 1

    def told(self, attempt: Attempt) -> str:
        """Return what SLURM has written to the logs of its job."""
        job = str(attempt.slurm_job.id).partition("_")[0]
        return "\n".join(path.read_text() for path in self.folders.sweeps.glob(f"*/a*/{job}_*.err"))

    def step(self, attempt: Attempt) -> int:
        """Return the number of steps done, as the attempt's newest start recorded."""
        start = self.newest_start(attempt)
        note = try_read_json_object(start / "progress.json") if start else None
        return int(note["step"]) if note else 0

    def await_end(self, attempts: Sequence[Attempt]) -> None:
        """Wait until none of the attempts is under way."""
        environment.set_slurm_conf_variable_if_given(self.slurm_conf)
        quiet_since: float | None = None

        def ended() -> bool:
            nonlocal quiet_since
            view = StatusSnapshot.query(self.folders, attempts)
            if any(view.run_status(attempt).is_under_way for attempt in attempts):
                quiet_since = None
                return False
            # A job whose node died is not in the queue for a moment, until SLURM has requeued it.
            quiet_since = quiet_since or time.monotonic()
            silent = any(attempt.state in UNFINISHED_STATES for attempt in attempts)
            return not silent or time.monotonic() - quiet_since > SETTLE_S

        await_(ended, f"the end of {len(attempts)} runs", patience(attempts), pause=0.3)


def state_of(job: str) -> str:
    """SLURM's word for it; empty once it has ended."""
    report = jobs.unfinished_jobs_by_id([job]).get(job)
    return report.state if report else ""


def goes_on(attempt: Attempt) -> bool:
    """Return whether SLURM still has the attempt's job."""
    return bool(state_of(str(attempt.slurm_job.id)))


def patience(attempts: Sized) -> float:
    return DEADLINE_S * (1 + len(attempts) / 4)


def kill_a_worker(bench: Bench, attempt: Attempt) -> None:
    """Kill a random rank's process by SIGKILL."""
    start = there(bench.newest_start(attempt))
    notes = [note for path in start.glob("worker*.json") if (note := try_read_json_object(path))]
    victim = random.Random(attempt.run_id).choice(sorted(notes, key=lambda note: int(note["rank"])))
    with contextlib.suppress(ProcessLookupError):  # it was quicker
        os.kill(victim["pid"], signal.SIGKILL)


def tell_to_stop(bench: Bench, attempt: Attempt) -> None:
    """Send the stop signal, as before a preemption."""
    # scancel does not return while the job that it told is requeued; the signal is there by then.
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = process("scancel", "--signal=USR2", str(attempt.slurm_job.id), timeout_s=1)
        assert done.returncode == 0 or "Invalid job id" in done.stderr, done.stderr  # it was quicker


def submit_again(bench: Bench, attempt: Attempt, words: Sequence[str], sign: str = "") -> None:
    """Wait for the end of the attempt's job, then submit its run again.

    Nothing is submitted if the last step was quicker, or if SLURM has not written `sign`.
    """
    what = f"the end of job {attempt.slurm_job.id}"
    await_(lambda: not goes_on(attempt), what, patience([attempt]), pause=0.5)
    if attempt.state != "ok" and sign in bench.told(attempt):
        bench.submit(f"seed={seed_of(attempt)}", *words)


def cancel_and_submit_again(bench: Bench, attempt: Attempt) -> None:
    """Cancel the run, and submit it again."""
    done = fine(bench.command("cancel", attempt.run_id))
    if "nothing to cancel" not in done.stderr:  # or it was quicker
        submit_again(bench, attempt, STILL_SLOWER)


def kill_its_script(bench: Bench, attempt: Attempt) -> None:
    """Kill the batch script by SIGKILL, and submit the run again."""
    array, _, task = str(attempt.slurm_job.id).partition("_")
    for script in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            around = script.environ()
            jobs_of = (around.get("SLURM_ARRAY_JOB_ID"), around.get("SLURM_JOB_ID"))
            is_its = task == around.get("SLURM_ARRAY_TASK_ID", "") and array in jobs_of
            if is_its and script.cmdline()[-1].endswith("slurm_script"):
                script.kill()
    submit_again(bench, attempt, SLOWER)


def kill_its_node(bench: Bench, attempt: Attempt) -> None:
    """Kill the node with all processes on it.

    SLURM goes on to tell a dead node that its job is over. One that is back when it hears of that, half a
    minute later, ends the job's next start instead: its user submits again.
    """
    say(bench.surroundings, SCRIPTS / "node", DYING, "kill")
    job = str(attempt.slurm_job.id)
    try:
        await_(lambda: state_of(job) != "RUNNING", "SLURM missing the node", pause=0.5)
        time.sleep(STALE_S)
    finally:
        say(bench.surroundings, SCRIPTS / "node", DYING, "start")
    await_(
        lambda: bench.was_interrupted(attempt) or attempt.state == "ok", f"a new start of {attempt.run_id}"
    )
    await_(
        lambda: attempt.state not in UNFINISHED_STATES or not goes_on(attempt),
        f"the end of {attempt.run_id}",
        patience([attempt]),
        pause=0.5,
    )
    if attempt.state != "ok" and CANCELLED in bench.told(attempt):
        bench.submit(f"seed={seed_of(attempt)}", *THERE, *SLOW)


def let_it_run(bench: Bench, attempt: Attempt) -> None:
    """Let the time limit draw near.

    On a busy machine a start takes all of its minute until it heeds the signal; SLURM ends it, and nobody
    requeues it: its user submits again.
    """
    submit_again(bench, attempt, (*ELSEWHERE, *SLOWEST), TIMED_OUT)


DYING = "n4"  # the others' jobs stay away from it
CANCELLED = f"ON {DYING} CANCELLED AT"  # as SLURM says of a step that it ended
ELSEWHERE = (f"cluster.exclude={DYING}",)
THERE = ("cluster.workers_per_node=2", f"cluster.sbatch=['--nodelist={DYING}']")
SLOWER = (*ELSEWHERE, *SLOW)
SLOWEST = ("late.draw=constant", "late.s=0.05")  # 20 s
STILL_SLOWER = (*ELSEWHERE, *SLOWEST)  # the command that cancels takes seconds
# SLURM counts limits in minutes; told to stop 50 s before the end is told to stop after some seconds.
TIMED_OUT = "DUE TO TIME LIMIT"  # as SLURM says of a job that it ended
ONE_MINUTE = (*ELSEWHERE, *SLOWEST, "cluster.time_min=1", "cluster.signal_delay_s=50")
TROUBLES: dict[str, tuple[Trouble, tuple[str, ...]]] = {
    "kill": (kill_a_worker, SLOWER),
    "signal": (tell_to_stop, SLOWER),
    "cancel": (cancel_and_submit_again, STILL_SLOWER),
    "batch": (kill_its_script, SLOWER),
    "node": (kill_its_node, (*THERE, *SLOW)),
    "time": (let_it_run, ONE_MINUTE),
}


def make_trouble(bench: Bench, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[Attempt]]:
    """Submit a run per seed and kind of trouble, trouble each at a random step, and wait for the end of all.

    Returns:
        By kind of trouble, the newest attempts, whatever became of them.
    """
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:  # or some runs end before the others are submitted
        kinds = {name: pool.submit(_submit_and_trouble, bench, name, seeds) for name, seeds in wanted.items()}
        attempts = {name: found.result() for name, found in kinds.items()}
    bench.await_end([attempt for of_kind in attempts.values() for attempt in of_kind])
    return {
        name: [bench.folders.store.list_attempts(attempt.run_id)[-1] for attempt in of_kind]
        for name, of_kind in attempts.items()
    }


def _submit_and_trouble(bench: Bench, name: str, seeds: Sequence[int]) -> list[Attempt]:
    act, words = TROUBLES[name]
    attempts = bench.submit(f"seed={','.join(map(str, seeds))}", *words, AT_A_TIME)
    chance = random.Random(f"{name} {seeds}")
    # A time limit strikes by itself; on a busy machine it does so before any step.
    steps = [0 if act is let_it_run else chance.randrange(1, STEPS // 4) for _ in attempts]

    def strike(attempt: Attempt, step: int) -> None:
        """When it has come so far; a run that was quicker is left in peace."""
        what = f"step {step} of {attempt.run_id}"
        await_(lambda: attempt.state == "ok" or bench.step(attempt) >= step, what, patience(attempts))
        if attempt.state != "ok":
            act(bench, attempt)

    with ThreadPoolExecutor(len(attempts)) as pool:
        list(pool.map(strike, attempts, steps))
    return attempts
