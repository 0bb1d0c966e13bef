"""The commands that concern a cluster: plan, submit, status, logs, cancel."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis.records import Attempt
from experiments import inside, submission
from experiments.diagnosis import CANCEL, POLICIES
from experiments.orders import Planned
from experiments.planning import Folders, provide
from experiments.standing import Standing, View
from experiments.sweep import name_and_configs
from slurm import environment, queue

LISTED = 30  # runs that `status` describes one by one
LOG_LINES = 15  # of each log that `logs` shows
ORDER = ("done", "running", "queued", "requeued", "stopped", "failed")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def plan(words: list[str], options: set[str]) -> int:
    """The runs, arrays and node-hours that `submit` with these words would mean; submits nothing."""
    name, configs = name_and_configs(words)
    try:
        planned = provide(configs, say)
    except ValueError as error:
        say(f"before `submit`: {error}")
        planned = [Planned(config, None) for config in configs]
    folders = Folders()
    found = submission.arrays(_on_slurm(planned), planned[0].config["launch"]["block"])
    if "--sbatch" in options:
        print("\n".join(submission.sbatch_texts(found, folders, f"{name}-001")))
        return 0
    missing = [one for one in planned if folders.store.valid(one.config) is None]
    where = planned[0].config["cluster"]["name"]
    print(f"{name} on {where}: {len(planned)} runs, {len(missing)} not measured yet")
    for number, array in enumerate(submission.arrays(missing, planned[0].config["launch"]["block"])):
        limit = f"{array.cluster['time_min']} min and {array.node_hours:.1f} node-hours at most"
        print(f"  array {number}: {len(array.jobs)} jobs of {array.shape}, {limit}")
        for job in array.jobs[:LISTED]:
            print("    " + ", ".join(_short(one.config) for one in job))
        if len(array.jobs) > LISTED:
            print(f"    ... and {len(array.jobs) - LISTED} more")
    print("`--sbatch` shows what sbatch is given; `submit` with the same words submits")
    return 0


def submit(words: list[str], options: set[str]) -> int:
    """Queue what is neither measured nor queued already; returns at once. `status` shows how it goes."""
    name, configs = name_and_configs(words)
    planned = _on_slurm(provide(configs, say))
    sweep = submission.submit(planned, Folders(), name, words, say, "--force" in options)
    if sweep is None:
        say(f"nothing to submit: all {len(planned)} runs are measured or under way")
        return 0
    print(sweep.name)
    return 0


def sweep(words: list[str], options: set[str]) -> int:
    """Make the grid's missing runs here, inside an allocation of SLURM's; slurm/sweep.sbatch calls it."""
    return inside.sweep(words, say)


def status(words: list[str], options: set[str]) -> int:
    """Where submitted runs stand: all sweeps, or those and the runs that the words name."""
    folders = Folders()
    sweeps = submission.sweeps(folders)
    if not sweeps:
        say("nothing was submitted yet")
        return 0
    chosen = [sweep for sweep in sweeps if not words or any(word in _names(sweep) for word in words)]
    if not chosen:
        raise ValueError(
            f"no sweep or run {words[0]!r}; there are: {', '.join(one['name'] for one in sweeps)}"
        )
    view = view_of(chosen, folders)
    for sweep in chosen:
        print(_table(sweep, view, folders, words))
    return 0


def logs(words: list[str], options: set[str]) -> int:
    """The end of each log of a run's newest attempt."""
    attempt = the_run(words, Folders())
    paths = log_files(attempt, Folders())
    if not paths:
        say(f"{attempt.run_id} has no logs: it has not started, or ended well on this machine")
        return 1
    for path in paths:
        if lines := path.read_text(errors="replace").splitlines()[-LOG_LINES:]:
            print(f"{path}:", *lines, sep="\n  ")
    return 0


def cancel(words: list[str], options: set[str]) -> int:
    """End the jobs of the sweeps and runs that the words name; what they computed is kept."""
    folders = Folders()
    if not words:
        names = ", ".join(sweep["name"] for sweep in submission.sweeps(folders))
        raise ValueError(f"cancel what? Sweeps: {names or 'none'}; or a run's name")
    chosen = [sweep for sweep in submission.sweeps(folders) if any(word in _names(sweep) for word in words)]
    if not chosen:
        raise ValueError(f"no sweep or run {words[0]!r} was submitted; `status` lists them")
    view, jobs = view_of(chosen, folders), list[str]()
    for attempt in _attempts(chosen, folders, words):
        job = view.job(attempt)
        if job is not None and view.of_attempt(attempt).under_way:
            (folders.launch(attempt) / CANCEL).touch()
            jobs.append(job)
    if not jobs:
        say(f"nothing to cancel: {' '.join(words)} has ended already")
        return 0
    queue.cancel(sorted(set(jobs)))
    print(f"cancelled {len(set(jobs))} jobs; `submit` with the same words goes on where checkpoints are")
    return 0


def view_of(sweeps: Sequence[dict[str, Any]], folders: Folders) -> View:
    """SLURM asked once. Where it can't be asked, what lies on the disk is all there is, which is said."""
    for sweep in sweeps:
        environment.use_slurm(sweep["slurm_conf"])
    try:
        view = View.of(folders, queue.queue())
    except queue.SlurmError as error:
        say(f"from the disk alone, for SLURM can't be asked: {error}")
        return View(folders, None)
    view.ask_accounts(_attempts(sweeps, folders))
    return view


def the_run(words: Sequence[str], folders: Folders) -> Attempt:
    """The newest attempt of the one run that a word names."""
    names = folders.store.runs()
    if len(words) != 1:
        raise ValueError(f"which run? There are: {', '.join(names) or 'none yet'}")
    matching = [name for name in names if words[0] in name]
    if len(matching) != 1:
        listing = ", ".join(matching or names) or "none yet"
        raise ValueError(f"{len(matching)} runs match {words[0]!r}; there are: {listing}")
    return folders.store.attempts(matching[0])[-1]


def log_files(attempt: Attempt, folders: Folders) -> list[Path]:
    """What an attempt's processes printed, by rank."""
    sweep, job = attempt.manifest.get("sweep"), attempt.job
    if not sweep:
        return sorted(folders.launch(attempt).glob("*_log.*"))
    return sorted(path for path in (folders.sweeps / sweep).glob(f"a*/{job}_*_log.*") if path.stat().st_size)


def _table(sweep: dict[str, Any], view: View, folders: Folders, words: Sequence[str]) -> str:
    stands = {attempt: view.of_attempt(attempt) for attempt in _attempts([sweep], folders)}
    counts = Counter(stand.state for stand in stands.values())
    summary = ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
    lines = [f"{sweep['name']}: {len(stands)} runs: {summary}{_time_left(stands)}"]
    lines[0] += f"; {_node_hours(sweep, stands):.2f} node-hours spent"
    shown = [(one, stand) for one, stand in stands.items() if stand.state != "done" or _named(one, words)]
    lines += [f"  {one.run_id}: {_sentence(one, stand, folders)}" for one, stand in shown[:LISTED]]
    if len(shown) > LISTED:
        lines.append(f"  ... and {len(shown) - LISTED} more")
    return "\n".join(lines)


def _sentence(attempt: Attempt, stand: Standing, folders: Folders) -> str:
    if stand.state == "running":
        return f"running {stand.why}, step {stand.step}" + (f" of {stand.steps}" if stand.steps else "")
    if stand.state not in ("failed", "stopped"):
        return f"{stand.state}" + (f" ({stand.why})" if stand.why else "")
    advice = POLICIES[stand.kind].advice if stand.kind in POLICIES else ""
    errors = [path for path in log_files(attempt, folders) if path.suffix == ".err"]
    where = f" [{errors[0]}]" if errors and stand.kind == "error" else ""
    return f"{stand.state} ({stand.kind}): {stand.why}" + (f"; {advice}" if advice else "") + where


def _time_left(stands: dict[Attempt, Standing]) -> str:
    """From how long the finished ones took, and how many run at a time."""
    took = [seconds for one, stand in stands.items() if stand.state == "done" and (seconds := _seconds(one))]
    left = sum(stand.under_way for stand in stands.values())
    at_a_time = sum(stand.state == "running" for stand in stands.values())
    if not took or not left or not at_a_time:
        return ""
    return f"; about {statistics.median(took) * left / at_a_time / 60:.0f} min left"


def _node_hours(sweep: dict[str, Any], stands: dict[Attempt, Standing]) -> float:
    nodes = {run: array["nodes"] for array in sweep["arrays"] for job in array["jobs"] for run in job["runs"]}
    return sum(nodes[one.run_id] * (_seconds(one) or 0) for one in stands) / 3600


def _seconds(attempt: Attempt) -> float | None:
    """From its first start to its end, by the clock of one node."""
    manifest = attempt.manifest
    if not manifest.get("started") or not manifest.get("ended"):
        return None
    times = [datetime.strptime(manifest[name], "%Y-%m-%dT%H:%M:%SZ") for name in ("started", "ended")]
    return max(0.0, (times[1] - times[0]).total_seconds())


def _attempts(sweeps: Iterable[dict[str, Any]], folders: Folders, words: Sequence[str] = ()) -> list[Attempt]:
    """The newest attempt of each run of these sweeps that the words name; a sweep's name names all."""
    found = []
    for sweep in sweeps:
        everything = not words or any(word in sweep["name"] for word in words)
        for run in (run for array in sweep["arrays"] for job in array["jobs"] for run in job["runs"]):
            if (everything or any(word in run for word in words)) and (
                attempts := folders.store.attempts(run)
            ):
                found.append(attempts[-1])
    return found


def _names(sweep: dict[str, Any]) -> str:
    runs = (run for array in sweep["arrays"] for job in array["jobs"] for run in job["runs"])
    return " ".join([sweep["name"], *runs])


def _named(attempt: Attempt, words: Sequence[str]) -> bool:
    return any(word in attempt.run_id for word in words)


def _on_slurm(planned: Sequence[Any]) -> Sequence[Any]:
    where = {one.config["cluster"]["where"] for one in planned}
    if where != {"slurm"}:
        raise ValueError(
            "these runs are not for a SLURM cluster: add cluster=NAME, a file of conf/cluster "
            "(generic_slurm.yaml explains the fields); `run` and `reproduce` make runs on this machine"
        )
    return planned


def _short(config: dict[str, Any]) -> str:
    density = config["method"].get("density")
    return f"{config['method']['name']}" + (f"@{density}" if density else "") + f" seed {config['seed']}"
