"""Runs and sweeps that somebody names: their attempts, statuses and logs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from analysis.records.configs import label_configs
from analysis.records.files import MAX_LOG_BYTES, DamagedFileError, read_bytes
from analysis.records.schema import Sweep
from analysis.records.store import DAMAGED, Attempt, explain_no_attempts
from experiments.commands._messages import say
from experiments.config import choices
from experiments.config.folders import ResultFolders
from experiments.config.plan import PlannedRun
from experiments.launch import submission
from experiments.launch.status import RunStatus, StatusSnapshot
from slurm import commands, environment
from sparsify.ranges import quote

MAX_LISTED = 20  # names in a refusal
NAME_WITH_VARIANT = re.compile(r"^([0-9a-f]{8,12})[/-][a-z0-9-]+$")  # a key's digits, and a variant
KEY_DIGITS = re.compile(r"[0-9a-f]{8,12}")
LOG_LINES = 15  # of each log that a command shows
NameTest = Callable[[str, str], bool]  # does this word name this run or sweep?


def find_newest_attempt_of_run(words: Sequence[str], folders: ResultFolders) -> Attempt:
    """Return the newest attempt of the one run that a word names; refuse other words, with a list of runs."""
    names = folders.store.list_run_ids()
    if len(words) != 1:
        raise ValueError(
            f"which run? There are {len(names)}: `list` shows them"
            if names
            else "which run? There is none yet"
        )
    shipped = find_shipped_run(words[0], folders)
    if shipped is not None:
        raise ValueError(
            f"{shipped} is shipped with the repository: its logs and its record stayed on the machine that "
            "made it; `why` and `list` show what is known of it"
        )
    name = match_one_name(words[0], names)
    attempts = folders.store.list_attempts(name)
    if not attempts:
        raise ValueError(f"{name} can't be shown: {explain_no_attempts(folders.store.root / name)}")
    return attempts[-1]


def match_one_name(word: str, names: Sequence[str]) -> str:
    """Return the one name that a word is part of; refuse a word that fits none or several, with a list.

    Behind a run's key, a word may have a variant, as tables and pages write it.
    """
    matching = [name for name in names if strip_variant(word) in name]
    if len(matching) != 1:
        listed_names = join_first_names(matching or names) or "none yet"
        raise ValueError(f"{len(matching)} runs match {quote(word)}; there are: {listed_names}")
    return matching[0]


def strip_variant(word: str) -> str:
    """Return a word without the variant that tables and pages write behind a run's key."""
    return NAME_WITH_VARIANT.sub(r"\1", word)


def find_shipped_run(word: str, folders: ResultFolders) -> str | None:
    """Return the one shipped run that a word is part of; None if it is also part of a run of this machine."""
    part = strip_variant(word)
    if any(part in name for name in folders.store.list_run_ids()):
        return None
    from analysis.records.parquet import read_parquet  # pandas comes with it

    with contextlib.suppress(DamagedFileError):
        names = {str(name) for name in read_parquet(folders.shipped, ["runs"]).runs["run_id"]}
        matching = [name for name in names if part in name]
        return matching[0] if len(matching) == 1 else None
    return None


def join_first_names(names: Sequence[str]) -> str:
    """Return the names with commas between them, and the number of those beyond the first 20."""
    remainder = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + remainder


def occurs_in_name(word: str, name: str) -> bool:
    return word in name


def is_whole_name_or_key(word: str, name: str) -> bool:
    """Tell whether a word is this name, or at least the digits that `list` shows of the key in it."""
    key = name.rpartition("-")[2]
    return word == name or (KEY_DIGITS.fullmatch(word) is not None and key.startswith(word))


def find_named_sweeps(
    words: Sequence[str], folders: ResultFolders, is_named: NameTest = occurs_in_name
) -> list[Sweep]:
    """Return the sweeps that a word names, or of which a word names a run; all without words."""
    return [
        sweep
        for sweep in submission.read_sweeps(folders, say)
        if not words
        or any(is_named(word, name) for word in words for name in (sweep.name, *sweep_run_ids(sweep)))
    ]


def sweep_run_ids(sweep: Sweep) -> Iterator[str]:
    """Yield the ids of a sweep's runs."""
    return (run for array in sweep.arrays for job in array.jobs for run in job.runs)


def newest_attempts_in_sweeps(
    sweeps: Iterable[Sweep],
    folders: ResultFolders,
    words: Sequence[str] = (),
    is_named: NameTest = occurs_in_name,
) -> list[Attempt]:
    """Return the newest attempts of the runs in these sweeps that a word names, itself or by its sweep.

    Without words, all runs are meant.
    """
    newest = list[Attempt]()
    for sweep in sweeps:
        for run in sweep_run_ids(sweep):
            is_meant = any(is_named(word, name) for word in words for name in (sweep.name, run))
            if is_meant or not words:
                newest += folders.store.list_attempts(run)[-1:]
    return newest


def label_attempts(attempts: Sequence[Attempt]) -> list[str]:
    """Return labels of what varies among the runs of these attempts; or why a config can't be read."""
    config_by_attempt = dict[Attempt, dict[str, Any]]()
    label_by_attempt = dict[Attempt, str]()
    for attempt in attempts:
        try:
            config_by_attempt[attempt] = attempt.config
        except DamagedFileError as damage:
            label_by_attempt[attempt] = damage.message_without_folder
    labels = label_configs([*config_by_attempt.values()])
    label_by_attempt.update(zip(config_by_attempt, labels, strict=True))
    return [label_by_attempt[attempt] for attempt in attempts]


@contextlib.contextmanager
def use_slurm_conf_if_trusted(conf: str | None) -> Iterator[None]:
    """Within the block, let SLURM's commands ask the cluster of a sweep's `slurm_conf`.

    A results folder can come from anybody, and SLURM's commands load the libraries that their configuration
    names. So a recorded path is used only where this user's own files or environment name it, too.

    Raises:
        SlurmError: they do not.
    """
    own_paths = {
        *choices.values_in_cluster_files("slurm_conf"),
        *filter(None, [environment.slurm_conf_file()]),
    }
    if conf is not None and os.path.expanduser(conf) not in map(os.path.expanduser, own_paths):
        raise commands.SlurmError(
            f"the sweep was submitted with slurm_conf={quote(conf)}, which is taken from results only if a "
            "file of conf/cluster or SLURM_CONF names it, too: if you know that file, export it as SLURM_CONF"
        )
    with environment.temporary_slurm_conf_if_given(conf):
        yield


def query_status_by_attempt(attempts: Iterable[Attempt], folders: ResultFolders) -> dict[Attempt, RunStatus]:
    """Return the status of each attempt's run, as all commands and pages show it.

    SLURM is asked once of each cluster that may still be at work on some of the runs.
    """
    conf_by_sweep = {sweep.name: sweep.slurm_conf for sweep in submission.read_sweeps(folders, say)}
    conf_by_attempt = {attempt: conf_by_sweep.get(_sweep_name(attempt)) for attempt in attempts}
    attempts_by_conf: dict[str | None, list[Attempt]] = {}
    for attempt, conf in conf_by_attempt.items():
        attempts_by_conf.setdefault(conf, []).append(attempt)
    snapshot_by_conf = {
        conf: query_status_snapshot(conf, cluster_attempts, folders)
        for conf, cluster_attempts in attempts_by_conf.items()
    }
    return {attempt: snapshot_by_conf[conf].run_status(attempt) for attempt, conf in conf_by_attempt.items()}


def query_status_snapshot(
    conf: str | None, attempts: Sequence[Attempt], folders: ResultFolders
) -> StatusSnapshot:
    """Ask SLURM once about attempts of one cluster; where it does not answer, view the files alone."""
    try:
        with use_slurm_conf_if_trusted(conf):
            return StatusSnapshot.query(folders, attempts)
    except commands.SlurmError as error:
        say(f"from the disk alone, for SLURM can't be asked: {error}")
        return StatusSnapshot(folders, None)


def _sweep_name(attempt: Attempt) -> str:
    """Return the name of the sweep that an attempt was submitted with; '' for other attempts."""
    return "" if attempt.state == DAMAGED else attempt.manifest.get("sweep") or ""


def find_log_files(attempt: Attempt, folders: ResultFolders) -> list[Path]:
    """Return the files with the output of an attempt's processes, by rank."""
    sweep = _sweep_name(attempt)
    if not sweep:
        folder = folders.launch_folder(attempt)
        return [] if folder.is_symlink() else sorted(folder.glob("*_log.*"))
    logs = (folders.sweeps / sweep).glob(f"a*/{attempt.slurm_job.id}_*_log.*")
    return sorted(log for log in logs if not _is_empty(log))


def _is_empty(log: Path) -> bool:
    try:
        return log.stat().st_size == 0
    except OSError:  # `read_last_lines` tells it
        return False


def read_last_lines(log: Path) -> list[str]:
    """Return the end of a log, or a line that says why there is none; a link is not followed."""
    try:
        content = read_bytes(log, MAX_LOG_BYTES, follows_link=False)
    except DamagedFileError as damage:
        return [damage.message_without_folder]
    except FileNotFoundError:
        return [f"{log.name} is not there any more"]
    return content.decode(errors="replace").splitlines()[-LOG_LINES:]


def check_runs_are_for_slurm(planned: Sequence[PlannedRun]) -> None:
    """Refuse runs that are not for a SLURM cluster."""
    kinds = {run.config["cluster"]["where"] for run in planned}
    if "slurm" in kinds and len(kinds) > 1:
        raise ValueError(
            "some of these runs are for this machine and others for a SLURM cluster: `reproduce` makes all "
            "of them, one after the other"
        )
    if kinds != {"slurm"}:
        raise ValueError(
            "these runs are not for a SLURM cluster: add cluster=NAME, a file of conf/cluster (`run "
            "cluster=generic_slurm --help` explains the fields); `run` and `reproduce` make runs on this "
            "machine"
        )
