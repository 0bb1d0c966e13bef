"""What goes wrong on clusters, done to real jobs of the development cluster, many times over:

    python -m tests.faults kill=20 signal=10 cancel=3 node=1 time=1

prints a table: of so many runs, how many ended whole, with every step recorded once and the very weights of a
run that nothing happened to. tests/test_slurm.py does a few of each.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.records import Attempt, Store, read_json, read_lines
from experiments.planning import Folders
from experiments.standing import View
from slurm import environment, queue
from tests.clusters import STATE, speaking_to
from tests.conftest import ROOT, environment_for

STEPS = 400
WORDS = (
    "method=topk", "method.density=0.01", "task=cnn_digits", "profile=smoke", "workers=2",
    f"train.steps={STEPS}", "timing.mode=production", "train.validate=never", "container=none",
    "launch.checkpoint_min=0.02",
)  # fmt: skip
DEADLINE_S = 240
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
        assert sweep is not None, done.stdout
        runs = [run for array in sweep["arrays"] for job in array["jobs"] for run in job["runs"]]
        return [self.folders.store.attempts(run)[-1] for run in runs]

    def weights(self, seed: int) -> str:
        """Of a run on this machine that nothing happened to."""
        words = [word for word in WORDS if not word.startswith("container")]
        done = self.command("run", *words, "cluster=local", f"seed={seed}")
        assert done.returncode == 0, done.stderr
        name = done.stdout.split()[0]
        return str(Store(self.results / "runs").attempts(name)[-1].manifest["weights"])

    def newest_start(self, attempt: Attempt) -> Path | None:
        starts = sorted(self.folders.launch(attempt).glob("start-*"), key=lambda path: path.stat().st_mtime)
        return starts[-1] if starts else None

    def await_step(self, attempt: Attempt, step: int) -> None:
        """Until it runs and has done so many steps."""

        def reached() -> bool:
            start = self.newest_start(attempt)
            note = read_json(start / "progress.json") if start else None
            return attempt.state == "ok" or bool(note and note["step"] >= step)

        await_(reached, f"step {step} of {attempt.run_id}")

    def await_end(self, attempts: Sequence[Attempt]) -> None:
        """Until none is under way."""
        environment.use_slurm(self.slurm_conf)

        def ended() -> bool:
            view = View.of(self.folders, queue.queue())
            return not any(view.of_attempt(one).under_way for one in attempts)

        await_(ended, f"the end of {len(attempts)} runs", pause=1.0)

    def faults_in(self, attempt: Attempt, weights: str) -> list[str]:
        """What is wrong with a record that should be whole; nothing, if nothing was lost or done twice."""
        found = []
        if not attempt.is_valid(verify=True):
            return [f"it is {attempt.state}: {attempt.manifest.get('why')}"]
        if attempt.manifest["weights"] != weights:
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


def await_(condition: Callable[[], bool], what: str, pause: float = 0.1) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {DEADLINE_S} s")
        time.sleep(pause)


def kill_a_worker(bench: Bench, attempt: Attempt) -> None:
    """kill -9 of a random rank's process."""
    start = bench.newest_start(attempt)
    assert start is not None
    notes = [note for path in start.glob("worker*.json") if (note := read_json(path))]
    victim = random.Random(attempt.run_id).choice(sorted(notes, key=lambda note: int(note["rank"])))
    try:
        os.kill(victim["pid"], signal.SIGKILL)
    except ProcessLookupError:
        return  # it had just ended


def tell_to_stop(bench: Bench, attempt: Attempt) -> None:
    """What SLURM does before a time limit or a preemption."""
    queue.command("scancel", "--signal=USR2", str(attempt.job))


def cancel_and_submit_again(bench: Bench, attempt: Attempt) -> None:
    done = bench.command("cancel", attempt.run_id)
    assert done.returncode == 0, done.stderr
    if "nothing to cancel" in done.stderr:  # it was quicker
        return
    await_(lambda: str(attempt.job) not in queue.queue(), "the end of a cancelled job", pause=0.5)
    seed = (read_json(attempt.path / "config.json") or {})["seed"]
    bench.submit(f"seed={seed}")


TROUBLES: dict[str, Trouble] = {
    "kill": kill_a_worker,
    "signal": tell_to_stop,
    "cancel": cancel_and_submit_again,
}


def trouble(bench: Bench, name: str, seeds: Iterable[int], weights: Callable[[int], str]) -> list[list[str]]:
    """Submit a run per seed, trouble each at a random step, wait; of each what is wrong with its record."""
    seeds = [*seeds]
    attempts = bench.submit(f"seed={','.join(map(str, seeds))}")
    chance = random.Random(f"{name}{seeds}")
    for attempt in attempts:
        bench.await_step(attempt, chance.randrange(1, STEPS // 2))
        if attempt.state != "ok":
            TROUBLES[name](bench, attempt)
    bench.await_end(attempts)
    newest = [bench.folders.store.attempts(attempt.run_id)[-1] for attempt in attempts]
    return [bench.faults_in(one, weights(seed)) for one, seed in zip(newest, seeds, strict=True)]


def main(words: Sequence[str]) -> int:
    bad = 0
    print("| trouble | runs | ended whole, nothing twice, same weights | otherwise |\n|---|---|---|---|")
    for word in words:
        name, _, times = word.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), speaking_to(STATE))
            environment.use_slurm(bench.slurm_conf)
            found = trouble(bench, name, range(int(times)), bench.weights)
            faults = Counter("; ".join(one) for one in found if one)
            bad += sum(faults.values())
            print(
                f"| {TROUBLES[name].__doc__ or name} | {len(found)} | {sum(not one for one in found)} | "
                f"{json.dumps(faults) if faults else ''} |",
                flush=True,
            )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["kill=20", "signal=10", "cancel=5"]))
