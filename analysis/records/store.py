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
from typing import Any, TypeVar, get_args

from analysis.records import locks, schema
from analysis.records.configs import configs_by_variant, measured_config, run_id, run_key
from analysis.records.files import (
    MAX_CONFIG_BYTES,
    DamagedFileError,
    check_not_link,
    check_plain_file,
    read_json_object_if_there,
    read_json_or_none,
    read_struct_or_none,
    read_verified,
    size_and_digest,
    write_json,
)
from analysis.records.log import InterferenceError, check_logged_steps
from analysis.records.schema import SCHEMA

T = TypeVar("T")
STATES = get_args(schema.RunState)
NEWER = "newer"  # what lists call an attempt that a newer version of this code has written
DAMAGED = "damaged"  # the state of an attempt whose manifest can't be read; none is written
RANK_LOG = re.compile(r"rank(0|[1-9][0-9]{0,8})\.jsonl")
NUMBER = re.compile(r"[0-9]{1,9}")  # of an attempt, of a step


class NewerRecordError(DamagedFileError):
    """A record that a newer version of this code has written."""


def utc_now() -> str:
    """Return the time in UTC, to the second, in the format of all records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def describe_left_out(attempt: Attempt, fault: str) -> str:
    """Return the line that tells of a damaged attempt."""
    return f"left out {attempt.name}: {fault}"


@dataclass(frozen=True)
class Attempt:
    """An execution of a run, and the folder that holds its record."""

    path: Path

    @property
    def run_id(self) -> str:
        """Name of its run, which is that of the folder above."""
        return self.path.parent.name

    @property
    def key(self) -> str:
        """`run_key` of its config, in which its run's id ends."""
        return self.run_id.rpartition("-")[2]

    @property
    def number(self) -> int:
        """Place among the run's attempts, from 1."""
        return int(self.path.name)

    @property
    def name(self) -> str:
        """Run and number, as people are told."""
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
            check_not_newer(path, read_json_or_none(path) or {})
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
        manifest = read_json_or_none(self.path / "run.json")
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

    def store_job(self, note: schema.JobNote) -> None:
        """Store SLURM's id of the job, in a file of its own because the job may be writing the manifest."""
        write_json(self.path / "job.json", {"id": note.id, "cluster": note.cluster, "user": note.user})

    @property
    def job(self) -> schema.JobNote:
        """SLURM's job, from `store_job`."""
        return read_struct_or_none(self.path / "job.json", schema.JobNote) or schema.JobNote()

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; removed when the run is finished."""
        return self.path / "checkpoints"

    def check_open(self) -> None:
        """Check that its workers may go on, before they change anything.

        Raises:
            InterferenceError: it is whole, or was given up, and nobody has taken it up again.
        """
        if self.state in ("ok", "failed"):
            raise self._closed_error()

    def mark_running(self, step: int, host: str, **facts: Any) -> None:
        """Mark the attempt as running.

        If it was started before, it continues from `step`: that is added to `resumed`, and the facts of the
        first start remain.
        """
        manifest = self.manifest
        if "started" not in manifest:
            self.update_manifest(state="running", started=utc_now(), **facts)
            return
        resumption = {"step": step, "at": utc_now(), "host": host}
        self.update_manifest(state="running", resumed=[*manifest.get("resumed", []), resumption])

    def mark_preempted(self, step: int) -> None:
        """Mark the attempt as stopped on request, with its first `step` steps saved."""
        self.update_manifest(state="preempted", step=step)

    def checkpoint_by_step(self) -> dict[int, Path]:
        """Return the folders of checkpoints by step, whole or not.

        Anything else that lies there is not ours, nor is anything where a link stands for `checkpoints`.
        """
        if self.checkpoints.is_symlink():
            return {}
        numbers = (path for path in self.checkpoints.glob("*") if NUMBER.fullmatch(path.name))
        return {int(path.name): path for path in numbers if path.name == str(int(path.name))}

    def newest_checkpoint_step(self) -> int:
        """Return the step of the newest whole checkpoint; 0 without any."""
        whole = (step for step, path in self.checkpoint_by_step().items() if (path / "whole.json").is_file())
        return max(whole, default=0)

    def check_no_links(self) -> None:
        """Check that nothing that is written or removed here leads elsewhere.

        Raises:
            DamagedFileError: the folder, or that of checkpoints, is a link, or a log is no file.
        """
        check_not_link(self.path)
        check_not_link(self.checkpoints)
        for path in self.rank_paths():
            check_plain_file(path)

    def rank_path(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.path / f"rank{rank}.jsonl"

    def rank_paths(self) -> list[Path]:
        """Return the log files that exist, by rank."""
        logs = (RANK_LOG.fullmatch(path.name) for path in self.path.glob("rank*.jsonl"))
        return [self.rank_path(rank) for rank in sorted(int(log[1]) for log in logs if log)]

    def find_writer(self) -> str | None:
        """Return who holds the lock of one of its logs, in words; None where nobody writes any."""
        return next(filter(None, map(locks.describe_lock_holder, self.rank_paths())), None)

    def finish(self, workers: int, steps: int, **summary: Any) -> None:
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
        if self.rank_paths() != [self.rank_path(rank) for rank in range(workers)]:
            names = ", ".join(path.name for path in self.rank_paths())
            raise InterferenceError(f"{self.path} holds {names or 'no logs'} for {workers} workers")
        made = count_logged_steps({"steps": steps, **summary})
        for path in self.rank_paths():
            check_logged_steps(path, made or 0, [*variants] or [None])
        # Of an attempt that was taken up again they tell why it had ended, or where.
        facts = {name: value for name, value in manifest.items() if name not in ("why", "failure", "step")}
        end = {"state": "ok", "ended": utc_now(), "files": self.size_and_digest_by_log(), "steps": steps}
        self._write({**facts, **self._identity_facts(), **end, **summary})
        shutil.rmtree(self.checkpoints, ignore_errors=True)  # if some remain, they only cost space

    def size_and_digest_by_log(self) -> dict[str, dict[str, Any]]:
        """Return size and digest of each log, by its name."""
        return {path.name: size_and_digest(path) for path in self.rank_paths()}

    def _closed_error(self) -> InterferenceError:
        manifest = self.manifest
        why = f" ({manifest['why']})" if manifest.get("why") else ""
        return InterferenceError(f"{self.path} was marked as {manifest['state']}{why} by another process")

    def fail(self, why: str, kind: str = "failed") -> None:
        """Mark the attempt as failed, unless it is whole.

        Args:
            why: for people.
            kind: a failure class, for programs.
        """
        manifest = {} if self.state == DAMAGED else self.manifest
        if manifest.get("state") != "ok":
            end = {"state": "failed", "ended": utc_now(), "why": why, "failure": kind}
            self._write({**manifest, **self._identity_facts(), **end})

    def is_valid(self, verify: bool = False) -> bool:
        """Check that the record is whole, as its manifest says; `verify` compares digests of files too."""
        return self.state == "ok" and self.find_fault(verify) is None

    def find_fault(self, verify: bool = False) -> str | None:
        """Return what is wrong with this record, in a sentence; None without a fault, or before its end.

        Args:
            verify: read the files and compare their digests as well.
        """
        try:
            self.read_checked_manifest(verify)
        except DamagedFileError as damage:
            return damage.brief
        return None

    def read_checked_manifest(self, verify: bool = False) -> dict[str, Any]:
        """Return the manifest, once its claims on the files of a whole record prove true.

        Raises:
            DamagedFileError: something is.
        """
        path = self.path / "run.json"
        manifest = self.manifest
        check_not_newer(path, manifest)
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
        for rank in range(max(1, len(self.rank_paths()))):
            if self.rank_path(rank).name not in files:
                raise DamagedFileError(path, f"does not list the log of rank {rank}")
        for name, expected in files.items():
            log = self.path / name
            try:
                size = log.stat().st_size
            except OSError as error:
                raise DamagedFileError(log, f"can't be read: {error.strerror}") from error
            if size != expected["bytes"]:
                raise DamagedFileError(log, f"has {size:,} bytes instead of {expected['bytes']:,}")
            if verify:
                read_verified(log, expected)
        return manifest


def is_unreadable(path: Path) -> bool:
    """Tell whether a file or a folder is there that this user may not read."""
    wanted = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return os.access(path, os.F_OK) and not os.access(path, wanted)


def explain_no_attempts(folder: Path) -> str:
    """Return why no attempt is seen in a run's folder."""
    if is_unreadable(folder):
        return "its folder may not be read by you, so let its owner share it"
    return "there is no attempt in it"


def check_not_newer(path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest that a newer version of this code has written."""
    number = manifest.get("schema")
    if isinstance(number, int) and number > SCHEMA:
        what = f"is of a newer version of this code (schema {number}; this one reads schema {SCHEMA})"
        raise NewerRecordError(path, f"{what}: update this checkout to read it")


def count_logged_steps(manifest: Mapping[str, Any]) -> int | None:
    """Return how many steps each rank has logged: all that were asked for, or those until it diverged."""
    diverged = manifest.get("diverged")
    return diverged["made"] if diverged else manifest.get("steps")


@dataclass(frozen=True)
class Store:
    """The records of all runs, below one folder."""

    root: Path

    def attempts(self, run: str) -> list[Attempt]:
        """Return a run's attempts, oldest first, by the names of folders alone: there may be many."""
        try:
            with os.scandir(self.root / run) as entries:
                numbered = [entry.name for entry in entries if NUMBER.fullmatch(entry.name)]
        except OSError:  # there is none, or it was removed meanwhile
            return []
        names = [name for name in numbered if os.path.isdir(self.root / run / name)]
        return [Attempt(self.root / run / name) for name in sorted(names, key=lambda name: (int(name), name))]

    def read_newest(
        self,
        runs: Iterable[str],
        read: Callable[[Attempt, dict[str, Any]], T],
        verify: bool = False,
    ) -> tuple[list[T], list[str]]:
        """Read each run's newest attempt that is whole by `read`, which gets it and its manifest.

        Also return a line on each newer attempt that does not count because it is damaged.
        """
        results = list[T]()
        notes = list[str]()
        for run in runs:
            attempts = self.attempts(run)
            if not attempts and (self.root / run).is_dir():
                notes.append(f"left out {run}: {explain_no_attempts(self.root / run)}")
            for attempt in reversed(attempts):
                try:
                    manifest = attempt.read_checked_manifest(verify)
                    if manifest["state"] == "ok":
                        results.append(read(attempt, manifest))
                        break
                except DamagedFileError as damage:
                    notes.append(describe_left_out(attempt, damage.brief))
        return results, notes

    def newest_attempts(self, runs: Iterable[str], verify: bool = False) -> tuple[list[Attempt], list[str]]:
        """Return each run's newest attempt that is whole, and a line on each newer one that is damaged."""
        return self.read_newest(runs, lambda attempt, _: attempt, verify)

    def find_valid(self, config: Mapping[str, Any]) -> Attempt | None:
        """Return the newest valid attempt at this config."""
        return self.find_newest_valid(run_id(config))

    def find_last(self, config: Mapping[str, Any]) -> Attempt | None:
        """Return the newest attempt at this config, in any state."""
        attempts = self.attempts(run_id(config))
        return attempts[-1] if attempts else None

    def find_newest_valid(self, run: str) -> Attempt | None:
        """Return the newest valid attempt of a run, by its id."""
        attempts, _ = self.newest_attempts([run])
        return attempts[0] if attempts else None

    def describe_damaged(self, run: str) -> list[str]:
        """Return a line on each damaged attempt that is newer than the newest valid one."""
        return self.newest_attempts([run])[1]

    def begin_attempt(self, config: Mapping[str, Any]) -> Attempt:
        """Make a new, numbered attempt at this config; concurrent processes get different ones."""
        folder = self.root / run_id(config)
        number = max((attempt.number for attempt in self.attempts(folder.name)), default=0)
        folder.mkdir(parents=True, exist_ok=True)
        for following in itertools.count(number + 1):
            attempt = Attempt(folder / f"{following:03d}")
            with contextlib.suppress(FileExistsError):
                attempt.path.mkdir()
                break
        write_json(attempt.path / "config.json", measured_config(config))
        attempt._write({**attempt._identity_facts(), "state": "planned", "created": utc_now()})
        return attempt

    def run_ids(self) -> list[str]:
        """Return the ids of all runs, sorted."""
        return (
            sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []
        )

    def newest_valid_attempts(self) -> list[Attempt]:
        """Return the newest valid attempt of every run that has one."""
        return self.newest_attempts(self.run_ids())[0]

    def last_number_by_run(self) -> dict[str, int]:
        """Return the number of each run's newest attempt, in any state."""
        attempts_by_run = {run: self.attempts(run) for run in self.run_ids()}
        return {run: attempts[-1].number for run, attempts in attempts_by_run.items() if attempts}
