"""Runs that are missing -> runs that are done: on this machine, or by SLURM, which is watched until it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from experiments import standing
from experiments.launch import RunFailed, make
from experiments.orders import Planned
from experiments.planning import Folders
from experiments.progress import Progress

LOOK_S = 1.0  # between two looks at the records, which are files
ASK_S = 5.0  # between two questions to SLURM
SETTLE_S = 30.0  # that a job's last words may need to become visible on a shared file system


def make_all(
    missing: Sequence[Planned],
    folders: Folders,
    name: str,
    words: Sequence[str],
    say: Callable[[str], None],
    force: bool = False,
) -> None:
    """Carry out these runs, wherever their cluster is.

    Raises:
        RunFailed: a run that did not end well; on a cluster only when all the others have ended.
    """
    remote = [one for one in missing if one.config["cluster"]["where"] == "slurm"]
    here = [one for one in missing if one not in remote]
    if remote:
        from experiments.submission import submit

        sweep = submit(remote, folders, name, words, say, force)
        if sweep is not None:
            say(f"submitted as {sweep.name}; Ctrl-C leaves the jobs alone, the same command goes on watching")
    make(here, folders.store, folders.scratch, force)
    if remote:
        watch(remote, folders)


def watch(planned: Sequence[Planned], folders: Folders) -> None:
    """Until none of these is queued or running any more."""
    from slurm import queue

    attempts = [one for run in planned if (one := folders.store.last(run.config))]
    progress, done = Progress(len(attempts)), set[str]()
    view, asked, quiet_since = standing.View.of(folders, queue.queue()), time.monotonic(), None
    try:
        while True:
            stands = {one: view.of_attempt(one) for one in attempts}
            for one, stand in stands.items():
                if stand.state == "done" and one.run_id not in done:
                    done.add(one.run_id)
                    progress.finished(one.run_id)
            running = [
                (one.run_id, stand.step, stand.steps)
                for one, stand in stands.items()
                if stand.state == "running"
            ]
            waiting = [stand for stand in stands.values() if stand.state in ("queued", "requeued")]
            progress.show(running, len(waiting))
            bad = {one: stand for one, stand in stands.items() if stand.state in ("failed", "stopped")}
            if not running and not waiting:
                quiet_since = quiet_since or time.monotonic()
                silent = any(one.state in ("submitted", "running") for one in bad)
                if not silent or time.monotonic() - quiet_since > SETTLE_S:
                    break
            else:
                quiet_since = None
            time.sleep(LOOK_S)
            if time.monotonic() - asked > ASK_S:
                view, asked = standing.View.of(folders, queue.queue()), time.monotonic()
    finally:
        progress.close()
    if bad:
        view.ask_accounts(list(bad))
        one = next(iter(bad))
        stand = view.of_attempt(one)
        others = f" ({len(bad) - 1} more failed: `status` lists them)" if len(bad) > 1 else ""
        raise RunFailed(f"{stand.why}{others}", stand.kind, one)
