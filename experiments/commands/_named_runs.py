"""What words of a person name: runs, sweeps, their attempts and logs."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
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
from experiments.launch.status import RunStatus, StatusView
from slurm import commands, environment
from sparsify.ranges import quote

MOST_LISTED = 20  # names in a refusal
OF_VARIANT = re.compile(r"^([0-9a-f]{8,12})[/-][a-z0-9-]+$")  # a key's digits, and a variant
OF_KEY = re.compile(r"[0-9a-f]{8,12}")
LOG_LINES = 15  # of each log that a command shows


def find_newest_attempt(words: Sequence[str], folders: ResultFolders) -> Attempt:
    """The newest attempt of the one run that a word names; the refusal of none and of several lists them."""
    names = folders.store.run_ids()
    if len(words) != 1:
        raise ValueError(
            f"which run? There are {len(names)}: `list` shows them"
            if names
            else "which run? There is none yet"
        )
    if (shipped := find_shipped_run(words[0], folders)) is not None:
        raise ValueError(
            f"{shipped} is shipped with the repository: its logs and its record stayed on the machine that "
            "made it; `why` and `list` show what is known of it"
        )
    name = match_one_name(words[0], names)
    attempts = folders.store.attempts(name)
    if not attempts:
        raise ValueError(f"{name} can't be shown: {explain_no_attempts(folders.store.root / name)}")
    return attempts[-1]


def match_one_name(word: str, names: Sequence[str]) -> str:
    """The one of these runs that a word is part of; the refusal of none and of several lists them. With its
    key may go the variant of which a table or a page tells.
    """
    matching = [name for name in names if strip_variant(word) in name]
    if len(matching) != 1:
        there = listed(matching or names) or "none yet"
        raise ValueError(f"{len(matching)} runs match {quote(word)}; there are: {there}")
    return matching[0]


def strip_variant(word: str) -> str:
    """The part of a run's name in what a table or a page calls it."""
    return OF_VARIANT.sub(r"\1", word)


def find_shipped_run(word: str, folders: ResultFolders) -> str | None:
    """The one shipped run that a word is part of, where it is part of no run of this machine."""
    part = strip_variant(word)
    if any(part in name for name in folders.store.run_ids()):
        return None
    from analysis.records.parquet import read_parquet  # pandas comes with it

    with contextlib.suppress(DamagedFileError):
        names = {str(name) for name in read_parquet(folders.shipped, ["runs"]).runs["run_id"]}
        matching = [name for name in names if part in name]
        return matching[0] if len(matching) == 1 else None
    return None


def listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


NameTest = Callable[[str, str], bool]  # does this word mean this name?


def is_part_of_name(word: str, name: str) -> bool:
    return word in name


def is_whole_name(word: str, name: str) -> bool:
    """Tell whether a word is this name, or the key that it ends in, as far as `list` shows that."""
    key = name.rpartition("-")[2]
    return word == name or (OF_KEY.fullmatch(word) is not None and key.startswith(word))


def find_sweeps(
    words: Sequence[str], folders: ResultFolders, means: NameTest = is_part_of_name
) -> list[Sweep]:
    """The sweeps that a word names, or of which it names a run; all without words."""
    return [
        sweep
        for sweep in submission.read_sweeps(folders, say)
        if not words or any(means(word, name) for word in words for name in (sweep.name, *runs_of(sweep)))
    ]


def runs_of(sweep: Sweep) -> Iterator[str]:
    return (run for array in sweep.arrays for job in array.jobs for run in job.runs)


def newest_attempts_in_sweeps(
    sweeps: Iterable[Sweep],
    folders: ResultFolders,
    words: Sequence[str] = (),
    means: NameTest = is_part_of_name,
) -> list[Attempt]:
    """The newest attempt of each run of these sweeps that the words name; a sweep's name names all."""
    found = []
    for sweep in sweeps:
        is_all = not words or any(means(word, sweep.name) for word in words)
        for run in runs_of(sweep):
            is_named = is_all or any(means(word, run) for word in words)
            if is_named and (attempts := folders.store.attempts(run)):
                found.append(attempts[-1])
    return found


def label_attempts(attempts: Sequence[Attempt]) -> list[str]:
    """Labels of what varies among the runs of these attempts; or why that can't be read."""
    configs, troubles = dict[Attempt, dict[str, Any]](), dict[Attempt, str]()
    for attempt in attempts:
        try:
            configs[attempt] = attempt.config
        except DamagedFileError as damage:
            troubles[attempt] = damage.brief
    found = dict(zip(configs, label_configs([*configs.values()]), strict=True)) | troubles
    return [found[attempt] for attempt in attempts]


def group_by_slurm_conf(sweeps: Iterable[Sweep]) -> dict[str | None, list[Sweep]]:
    """Sweeps by the configuration of SLURM that they were submitted with; None: the environment's."""
    found: dict[str | None, list[Sweep]] = {}
    for sweep in sweeps:
        found.setdefault(sweep.slurm_conf, []).append(sweep)
    return found


@contextlib.contextmanager
def use_recorded_slurm_conf(conf: str | None) -> Iterator[None]:
    """Within this, SLURM's commands ask the cluster of a sweep's `slurm_conf`.

    A results folder can come from anybody, and SLURM's commands load the libraries that their configuration
    names: a path is taken from there only where this person's own files or environment have it, too.

    Raises:
        SlurmError: they have not.
    """
    own = {*choices.values_in_cluster_files("slurm_conf"), *filter(None, [environment.slurm_conf()])}
    if conf is not None and os.path.expanduser(conf) not in map(os.path.expanduser, own):
        raise commands.SlurmError(
            f"the sweep was submitted with slurm_conf={quote(conf)}, which is taken from results only if a "
            "file of conf/cluster or SLURM_CONF names it, too: if you know that file, export it as SLURM_CONF"
        )
    with environment.temporary_slurm_conf(conf):
        yield


def query_statuses(attempts: Iterable[Attempt], folders: ResultFolders) -> dict[Attempt, RunStatus]:
    """The status of the run of each attempt, as all commands and pages tell it: SLURM is asked once of each
    cluster that may still be at some of them.
    """
    by_sweep = defaultdict[str | None, list[Attempt]](list)
    for attempt in attempts:
        by_sweep[None if attempt.state == DAMAGED else attempt.manifest.get("sweep")].append(attempt)
    conf_of = {
        sweep.name: sweep.slurm_conf
        for sweep in submission.read_sweeps(folders, say)
        if by_sweep.keys() - {None}
    }
    by_conf = defaultdict[str | None, list[Attempt]](list)
    for name, of_sweep in by_sweep.items():
        by_conf[conf_of.get(name or "")] += of_sweep
    views = {conf: query_cluster(conf, of_conf, folders) for conf, of_conf in by_conf.items()}
    return {attempt: views[conf].run_status(attempt) for conf, mine in by_conf.items() for attempt in mine}


def query_cluster(conf: str | None, attempts: Sequence[Attempt], folders: ResultFolders) -> StatusView:
    """SLURM asked once of attempts of one cluster. Where it can't be asked, what lies on the disk is all
    there is, which is said.
    """
    try:
        with use_recorded_slurm_conf(conf):
            return StatusView.query(folders, attempts)
    except commands.SlurmError as error:
        say(f"from the disk alone, for SLURM can't be asked: {error}")
        return StatusView(folders, None)


def find_logs(attempt: Attempt, folders: ResultFolders) -> list[Path]:
    """Files of what an attempt's processes printed, by rank."""
    sweep = None if attempt.state == DAMAGED else attempt.manifest.get("sweep")
    if not sweep:
        folder = folders.launch(attempt)
        return [] if folder.is_symlink() else sorted(folder.glob("*_log.*"))
    found = (folders.sweeps / sweep).glob(f"a*/{attempt.job.id}_*_log.*")
    return sorted(path for path in found if not _is_empty(path))


def _is_empty(log: Path) -> bool:
    try:
        return log.stat().st_size == 0
    except OSError:  # `read_last_lines` tells it
        return False


def read_last_lines(log: Path) -> list[str]:
    """The end of a log, or why there is none to show; a link is not followed."""
    try:
        return (
            read_bytes(log, MAX_LOG_BYTES, follows_link=False)
            .decode(errors="replace")
            .splitlines()[-LOG_LINES:]
        )
    except DamagedFileError as damage:
        return [damage.brief]
    except FileNotFoundError:
        return [f"{log.name} is not there any more"]


def check_slurm_cluster(planned: Sequence[PlannedRun]) -> None:
    """Refuse runs that are not for a SLURM cluster."""
    if {run.config["cluster"]["where"] for run in planned} != {"slurm"}:
        raise ValueError(
            "these runs are not for a SLURM cluster: add cluster=NAME, a file of conf/cluster (`run "
            "cluster=generic_slurm --help` explains the fields); `run` and `reproduce` make runs on this "
            "machine"
        )
