"""A run's record on disk: written as a whole or not at all; a broken last line is tolerated when reading.

    <root>/<run id>/<attempt>/config.json   what was asked for, without launch fields
                              run.json      the manifest: state, times, provenance; replaced atomically
                              rank<r>.jsonl what rank r measured, one JSON object per line

A run's id ends in the hash of its config, so that a second call finds what the first one measured. Measuring
again makes a new attempt beside the old one; no results are overwritten. An attempt counts when its manifest
says ``ok`` and its files are as it says; that a folder exists means nothing. What each file must look like is
in analysis/records/schema.py: an attempt that does not is named and left out, and the others are used.

An attempt belongs to those who hold the locks of its logs, see `RankLog`. It becomes ``ok`` from ``running``
alone: what was closed meanwhile, for whatever reason, stays closed until somebody takes it up again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from analysis.records import locks, schema
from analysis.records.configs import configs_by_variant, measured_config, run_id, run_key
from analysis.records.files import (
    MAX_CONFIG_BYTES,
    DamagedFileError,
    check_not_link,
    check_plain_file_if_there,
    read_bytes_checking_digest,
    read_json_object_if_there,
    size_and_digest,
    try_read_json_object,
    try_read_struct,
    write_json,
)
from analysis.records.log import InterferenceError, check_log_has_all_steps
from analysis.records.schema import SCHEMA

T = TypeVar("T")
STATES = get_args(schema.RunState)
NEWER = "newer"  # what lists call an attempt that a newer version of this code has written
DAMAGED = "damaged"  # the state of an attempt whose manifest can't be read; none is written
RANK_LOG = re.compile(r"rank(0|[1-9][0-9]{0,8})\.jsonl")
NUMBER = re.compile(r"[0-9]{1,9}")  # of an attempt, of a step


class NewerVersionError(DamagedFileError):
    """A record that a newer version of this code has written."""


def utc_timestamp() -> str:
    """Return the time in UTC, to the second, in the format of all records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def describe_left_out(attempt: Attempt, fault: str) -> str:
    """Return the line that tells that a damaged attempt was left out, and why."""
    return f"left out {attempt.name}: {fault}"


@dataclass(frozen=True)
class Attempt:
    """An execution of a run, and the folder that holds its record."""

    path: Path

    @property
    def run_id(self) -> str:
        """Id of the run, the name of the folder above."""
        return self.path.parent.name

    @property
    def key(self) -> str:
        """`run_key` of the configuration, in which the run's id ends."""
        return self.run_id.rpartition("-")[2]

    @property
    def number(self) -> int:
        """Number among the run's attempts, from 1."""
        return int(self.path.name)

    @property
    def name(self) -> str:
        """Run's id and attempt's number, as people are told."""
        return f"{self.run_id}/{self.path.name}"

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of run.json; before it is written, a state of planned.

        Raises:
            DamagedFileError: something else lies there.
        """
        path = self.path / "run.json"
        try:
            return read_json_object_if_there(path, schema.Manifest) or {"state": "planned"}
        except DamagedFileError:
            check_not_newer_version(path, try_read_json_object(path) or {})
            raise

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that was asked for.

        Raises:
            DamagedFileError: it is not there, or not that of this run.
        """
        path = self.path / "config.json"
        config = read_json_object_if_there(path, schema.ConfigFile, MAX_CONFIG_BYTES)
        if config is None:
            raise DamagedFileError(path, "is missing")
        if run_id(config) != self.run_id:
            raise DamagedFileError(path, f"is not that of this run, but of {run_id(config)}")
        return config

    @property
    def state(self) -> str:
        """The state in the manifest, or DAMAGED."""
        try:
            return str(self.manifest["state"])
        except DamagedFileError:
            return DAMAGED

    def update_manifest(self, **changes: Any) -> None:
        """Change fields of the manifest atomically.

        Raises:
            InterferenceError: there is none any more.
        """
        self._write({**self._read_present_manifest(), **changes})

    def _read_present_manifest(self) -> dict[str, Any]:
        manifest = try_read_json_object(self.path / "run.json")
        if manifest is None:
            raise InterferenceError(
                f"{self.path / 'run.json'} was removed or damaged while the run was under way"
            )
        return manifest

    def _write(self, manifest: dict[str, Any]) -> None:
        assert manifest["state"] in STATES, manifest["state"]
        write_json(self.path / "run.json", manifest)

    def _identity_facts(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "run_id": self.run_id, "key": self.key, "attempt": self.number}

    def store_slurm_job(self, job: schema.SlurmJobRecord) -> None:
        """Store SLURM's id of the job, in a file of its own because the job may be writing the manifest."""
        write_json(self.path / "job.json", {"id": job.id, "cluster": job.cluster, "user": job.user})

    @property
    def slurm_job(self) -> schema.SlurmJobRecord:
        """SLURM's job of this attempt, from job.json; without fields where none is stored."""
        return try_read_struct(self.path / "job.json", schema.SlurmJobRecord) or schema.SlurmJobRecord()

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of checkpoints; removed when the run is finished."""
        return self.path / "checkpoints"

    def check_not_closed(self) -> None:
        """Check that the attempt is neither whole nor given up, before its workers change anything.

        Raises:
            InterferenceError: it is, and nobody has taken it up again.
        """
        if self.state in ("ok", "failed"):
            raise self._closed_error()

    def mark_running(self, first_step: int, host: str, **facts: Any) -> None:
        """Mark the attempt as running.

        If it was started before, it continues from `first_step`: that is added to `resumed`, and the facts of
        the first start remain.
        """
        manifest = self.manifest
        if "started" not in manifest:
            self.update_manifest(state="running", started=utc_timestamp(), **facts)
            return
        resumption = {"step": first_step, "at": utc_timestamp(), "host": host}
        self.update_manifest(state="running", resumed=[*manifest.get("resumed", []), resumption])

    def mark_preempted(self, saved_steps: int) -> None:
        """Mark the attempt as stopped on request, with its first `saved_steps` steps saved."""
        self.update_manifest(state="preempted", step=saved_steps)

    def checkpoint_folder_by_step(self) -> dict[int, Path]:
        """Return the folders of checkpoints by step, whole or not.

        Anything else that lies there is not ours, nor is anything where a link stands for `checkpoints`.
        """
        if self.checkpoint_folder.is_symlink():
            return {}
        numbers = (path for path in self.checkpoint_folder.glob("*") if NUMBER.fullmatch(path.name))
        return {int(path.name): path for path in numbers if path.name == str(int(path.name))}

    def newest_whole_checkpoint_step_or_zero(self) -> int:
        """Return the step of the newest whole checkpoint; 0 without any."""
        whole_steps = (
            step for step, path in self.checkpoint_folder_by_step().items() if (path / "whole.json").is_file()
        )
        return max(whole_steps, default=0)

    def check_no_links(self) -> None:
        """Check that nothing that is written or removed here leads elsewhere.

        Raises:
            DamagedFileError: the folder, or that of checkpoints, is a link, or a log is no file.
        """
        check_not_link(self.path)
        check_not_link(self.checkpoint_folder)
        for path in self.find_rank_logs():
            check_plain_file_if_there(path)

    def rank_log_path(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.path / f"rank{rank}.jsonl"

    def find_rank_logs(self) -> list[Path]:
        """Return the log files that exist, by rank."""
        logs = (RANK_LOG.fullmatch(path.name) for path in self.path.glob("rank*.jsonl"))
        return [self.rank_log_path(rank) for rank in sorted(int(log[1]) for log in logs if log)]

    def describe_writer(self) -> str | None:
        """Return who holds the lock of one of its logs, in words; None where nobody writes any."""
        return next(filter(None, map(locks.describe_lock_holder, self.find_rank_logs())), None)

    def check_logs_and_mark_whole(self, workers: int, steps: int, **summary: Any) -> None:
        """Mark the attempt as whole, in one replacement: state, `summary`, sizes and digests of its files.

        Args:
            workers, steps: each of so many ranks must have logged each of so many steps once, in order; where
                variants took turns, of each variant; where it `diverged`, those that it made.

        Raises:
            InterferenceError: these workers did not write what lies there, or somebody closed the attempt.
        """
        try:
            manifest = self._read_present_manifest()
            variants = configs_by_variant(self.config)
        except DamagedFileError as damage:
            what = f"{damage.path} was changed while the run was under way: it {damage.why}"
            raise InterferenceError(what) from damage
        if manifest["state"] != "running":
            raise self._closed_error()
        if self.find_rank_logs() != [self.rank_log_path(rank) for rank in range(workers)]:
            names = ", ".join(path.name for path in self.find_rank_logs())
            raise InterferenceError(f"{self.path} holds {names or 'no logs'} for {workers} workers")
        logged_steps = expected_logged_steps({"steps": steps, **summary})
        for path in self.find_rank_logs():
            check_log_has_all_steps(path, logged_steps or 0, [*variants] or [None])
        # Of an attempt that was taken up again they tell why it had ended, or where.
        facts = {name: value for name, value in manifest.items() if name not in ("why", "failure", "step")}
        end = {
            "state": "ok",
            "ended": utc_timestamp(),
            "files": self.size_and_digest_by_log(),
            "steps": steps,
        }
        self._write({**facts, **self._identity_facts(), **end, **summary})
        shutil.rmtree(self.checkpoint_folder, ignore_errors=True)  # if some remain, they only cost space

    def size_and_digest_by_log(self) -> dict[str, dict[str, Any]]:
        """Return size and digest of each log, by its name."""
        return {path.name: size_and_digest(path) for path in self.find_rank_logs()}

    def _closed_error(self) -> InterferenceError:
        manifest = self.manifest
        why = f" ({manifest['why']})" if manifest.get("why") else ""
        return InterferenceError(f"{self.path} was marked as {manifest['state']}{why} by another process")

    def mark_failed_unless_whole(self, why: str, kind: str = "failed") -> None:
        """Mark the attempt as failed, unless it is whole.

        Args:
            why: for people.
            kind: a failure class, for programs.
        """
        manifest = {} if self.state == DAMAGED else self.manifest
        if manifest.get("state") != "ok":
            end = {"state": "failed", "ended": utc_timestamp(), "why": why, "failure": kind}
            self._write({**manifest, **self._identity_facts(), **end})

    def is_valid(self, *, verify_digests: bool = False) -> bool:
        """Tell whether the record is whole, as its manifest says.

        Args:
            verify_digests: read the files and compare their digests as well.
        """
        return self.state == "ok" and self.find_damage_if_complete(verify_digests=verify_digests) is None

    def find_damage_if_complete(self, *, verify_digests: bool = False) -> str | None:
        """Return what is wrong with a complete record, in a sentence; None if nothing, or in another state.

        Args:
            verify_digests: read the files and compare their digests as well.
        """
        try:
            self.read_checked_manifest(verify_digests=verify_digests)
        except DamagedFileError as damage:
            return damage.message_without_folder
        return None

    def read_checked_manifest(self, *, verify_digests: bool = False) -> dict[str, Any]:
        """Return the manifest, once its claims on the files of a whole record prove true.

        Args:
            verify_digests: read the files and compare their digests as well.

        Raises:
            DamagedFileError: a claim does not, or there is no manifest.
        """
        path = self.path / "run.json"
        manifest = self.manifest
        check_not_newer_version(path, manifest)
        if manifest["state"] != "ok":
            if not path.exists():
                raise DamagedFileError(path, "is missing")
            return manifest
        if manifest.get("schema") != SCHEMA:
            raise DamagedFileError(
                path, f"has schema {manifest.get('schema')}, and this code reads schema {SCHEMA}"
            )
        if manifest.get("key") != run_key(self.config):
            raise DamagedFileError(
                path, f"has the key {manifest.get('key')}, which is not that of its config"
            )
        files = manifest.get("files", {})
        for rank in range(max(1, len(self.find_rank_logs()))):
            if self.rank_log_path(rank).name not in files:
                raise DamagedFileError(path, f"does not list the log of rank {rank}")
        for name, expected in files.items():
            log = self.path / name
            try:
                size = log.stat().st_size
            except OSError as error:
                raise DamagedFileError(log, f"can't be read: {error.strerror}") from error
            if size != expected["bytes"]:
                raise DamagedFileError(log, f"has {size:,} bytes instead of {expected['bytes']:,}")
            if verify_digests:
                read_bytes_checking_digest(log, expected["sha256"])
        return manifest


def is_unreadable(path: Path) -> bool:
    """Tell whether a file or a folder is there that this user may not read."""
    needed_access = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return os.access(path, os.F_OK) and not os.access(path, needed_access)


def explain_no_attempts(folder: Path) -> str:
    """Return why no attempt is seen in a run's folder."""
    if is_unreadable(folder):
        return "its folder may not be read by you, so let its owner share it"
    return "there is no attempt in it"


def check_not_newer_version(path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest that a newer version of this code has written."""
    number = manifest.get("schema")
    if isinstance(number, int) and number > SCHEMA:
        what = f"is of a newer version of this code (schema {number}; this one reads schema {SCHEMA})"
        raise NewerVersionError(path, f"{what}: update this checkout to read it")


def expected_logged_steps(manifest: Mapping[str, Any]) -> int | None:
    """Return how many steps each rank's log must have: all that were planned, or those until it diverged."""
    diverged = manifest.get("diverged")
    return diverged["made"] if diverged else manifest.get("steps")


class NewestAttempts(NamedTuple):
    """The newest valid attempts of some runs, and a line on each damaged attempt that is newer."""

    attempts: list[Attempt]
    notes: list[str]


@dataclass(frozen=True)
class Store:
    """The records of all runs, below one folder."""

    root: Path

    def list_attempts(self, run_id: str) -> list[Attempt]:
        """Return a run's attempts, oldest first, by the names of folders alone: there may be many."""
        try:
            with os.scandir(self.root / run_id) as entries:
                numbered = [entry.name for entry in entries if NUMBER.fullmatch(entry.name)]
        except OSError:  # there is none, or it was removed meanwhile
            return []
        names = [name for name in numbered if os.path.isdir(self.root / run_id / name)]
        in_order = sorted(names, key=lambda name: (int(name), name))
        return [Attempt(self.root / run_id / name) for name in in_order]

    def read_newest_valid(
        self,
        run_ids: Iterable[str],
        read: Callable[[Attempt, dict[str, Any]], T],
        *,
        verify_digests: bool = False,
    ) -> tuple[list[T], list[str]]:
        """Read each run's newest attempt that is whole by `read`, which gets it and its manifest.

        Also return a line on each newer attempt that does not count because it is damaged.
        """
        results = list[T]()
        notes = list[str]()
        for name in run_ids:
            attempts = self.list_attempts(name)
            if not attempts and (self.root / name).is_dir():
                notes.append(f"left out {name}: {explain_no_attempts(self.root / name)}")
            for attempt in reversed(attempts):
                try:
                    manifest = attempt.read_checked_manifest(verify_digests=verify_digests)
                    if manifest["state"] == "ok":
                        results.append(read(attempt, manifest))
                        break
                except DamagedFileError as damage:
                    notes.append(describe_left_out(attempt, damage.message_without_folder))
        return results, notes

    def find_newest_valid(self, run_ids: Iterable[str], *, verify_digests: bool = False) -> NewestAttempts:
        """Return each run's newest attempt that is whole, and a line on each newer one that is damaged."""
        results = self.read_newest_valid(run_ids, lambda attempt, _: attempt, verify_digests=verify_digests)
        return NewestAttempts(*results)

    def find_newest_valid_of_config(self, config: Mapping[str, Any]) -> Attempt | None:
        """Return the newest valid attempt at this config; None without any."""
        return self.find_newest_valid_of_run(run_id(config))

    def find_newest_of_config(self, config: Mapping[str, Any]) -> Attempt | None:
        """Return the newest attempt at this config, in any state; None without any."""
        attempts = self.list_attempts(run_id(config))
        return attempts[-1] if attempts else None

    def find_newest_valid_of_run(self, run_id: str) -> Attempt | None:
        """Return the newest valid attempt of a run, by its id; None without any."""
        return next(iter(self.find_newest_valid([run_id]).attempts), None)

    def create_attempt(self, config: Mapping[str, Any]) -> Attempt:
        """Make a new, numbered attempt at this config; concurrent processes get different ones."""
        folder = self.root / run_id(config)
        number = max((attempt.number for attempt in self.list_attempts(folder.name)), default=0)
        folder.mkdir(parents=True, exist_ok=True)
        for following in itertools.count(number + 1):
            attempt = Attempt(folder / f"{following:03d}")
            with contextlib.suppress(FileExistsError):
                attempt.path.mkdir()
                break
        write_json(attempt.path / "config.json", measured_config(config))
        attempt._write({**attempt._identity_facts(), "state": "planned", "created": utc_timestamp()})
        return attempt

    def list_run_ids(self) -> list[str]:
        """Return the ids of all runs, sorted."""
        return (
            sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []
        )

    def list_newest_valid_attempts(self) -> list[Attempt]:
        """Return the newest valid attempt of every run that has one."""
        return self.find_newest_valid(self.list_run_ids()).attempts

    def newest_attempt_number_by_run(self) -> dict[str, int]:
        """Return the number of each run's newest attempt, in any state."""
        attempts_by_run = {run: self.list_attempts(run) for run in self.list_run_ids()}
        return {run: attempts[-1].number for run, attempts in attempts_by_run.items() if attempts}
