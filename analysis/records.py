"""A run's record on disk: written as a whole or not at all; a broken last line is tolerated when reading.

    <root>/<run id>/<attempt>/config.json   what was asked for, without launch fields
                              run.json      the manifest: state, times, provenance; replaced atomically
                              rank<r>.jsonl what rank r measured, one JSON object per line

A run's id ends in the hash of its config, so that a second call finds what the first one measured. Measuring
again makes a new attempt beside the old one; no results are overwritten. An attempt counts when its manifest
says ``ok`` and its files are as it says; that a folder exists means nothing. What each file must look like is
in analysis/schemas.py: an attempt that does not is named and left out, and the others are used.

An attempt belongs to those who hold the locks of its logs, see `RankLog`. It becomes ``ok`` from ``running``
alone: what was closed meanwhile, for whatever reason, stays closed until somebody takes it up again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from analysis import schemas
from analysis.files import (
    MOST_LOG_BYTES,
    Damaged,
    Disturbed,
    lock_holder,
    read_bytes,
    read_json,
    read_note,
    read_object,
    write_json,
)
from analysis.schemas import SCHEMA

STATES = get_args(schemas.State)
DAMAGED = "damaged"  # the state of an attempt whose manifest can't be read; none is written
RANK_LOG = re.compile(r"rank(0|[1-9][0-9]{0,8})\.jsonl")
ATTEMPT = re.compile(r"[0-9]{1,9}")
# Where and how a run is started. They change neither the mathematics nor the meaning of a record.
LAUNCH_FIELDS = ("data", "launch", "profile", "recipe")
# The part of a cluster's description that affects measurements; partitions, accounts and limits do not.
CLUSTER_FIELDS = ("name", "where", "gpu", "link", "inside", "workers_per_node")
# Fields that were added later: records without them mean these values, and keep their keys.
IMPLIED = {
    "comm": "torch", "container": "none", "select": "torch", "overlap": False, "cuda_graph": True,
    "train.epoch_steps": None, "train.validate_every": 1, "train.held_out": 0,
    "train.look_every": None,
    "variants": {}, "late": {"draw": "none", "s": 0, "spread": 0, "rank": None}, "late.draw": "none",
}  # fmt: skip


def now() -> str:
    """The time in UTC, to the second, in the format of all records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def measured_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved config that determines what is measured."""
    kept = {name: value for name, value in config.items() if name not in LAUNCH_FIELDS}
    kept["cluster"] = {name: kept["cluster"][name] for name in CLUSTER_FIELDS if name in kept["cluster"]}
    if kept["cluster"]["where"] == "virtual" and not kept["cluster"].get("inside"):
        for name in ("inside", "workers_per_node"):  # one link joins all
            kept["cluster"].pop(name, None)
    if isinstance(kept.get("container"), Mapping):
        kept["container"] = kept["container"]["name"]  # which image file was used is provenance
    if not kept.get("variants"):
        kept.pop("alternate", None)  # how variants take turns
    return _without_implied(kept)


def _without_implied(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without_implied(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not (prefix + name in IMPLIED and IMPLIED[prefix + name] == value)
    }


def variant_configs(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The variants that take turns in a run, by name, each as the config of a run of its own; {} in an
    ordinary run.
    """
    shared = {name: value for name, value in config.items() if name != "variants"}
    return {parts["name"]: _with(shared, parts) for parts in config.get("variants") or []}


def _with(config: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these parts of a variant: a method as a whole, of other mappings the values given."""
    given = {
        name: {**config[name], **part} if isinstance(part, Mapping) and name != "method" else part
        for name, part in parts.items()
        if name != "name"
    }
    return {**config, **given}


def run_key(config: Mapping[str, Any]) -> str:
    """12 hexadecimal digits of the SHA-256 of `measured_config`."""
    canonical = json.dumps(measured_config(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def run_id(config: Mapping[str, Any]) -> str:
    """A readable name, unique because it ends in the key."""
    method = "alternating" if config.get("variants") else config["method"]["name"]
    task, where = config["task"]["name"], config["cluster"]["where"]
    return f"{method}-{task}-{config['workers']}w-{where}-{run_key(config)}"


def left_out(attempt: Attempt, fault: str) -> str:
    """The line that tells of a damaged attempt."""
    return f"left out {attempt.name}: {fault}"


@dataclass(frozen=True)
class Attempt:
    """One execution of a run and the folder that holds it."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.parent.name

    @property
    def key(self) -> str:
        """`run_key` of its config, in which its run's id ends."""
        return self.run_id.rpartition("-")[2]

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def name(self) -> str:
        return f"{self.run_id}/{self.path.name}"

    @property
    def manifest(self) -> dict[str, Any]:
        """What run.json says; before it is written, that the attempt is planned.

        Raises:
            Damaged: something else lies there.
        """
        return read_object(self.path / "run.json", schemas.Manifest) or {"state": "planned"}

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for.

        Raises:
            Damaged: it is not there, or not that of this run.
        """
        path = self.path / "config.json"
        config = read_object(path, schemas.Config)
        if config is None:
            raise Damaged(path, "is missing")
        if run_id(config) != self.run_id:
            raise Damaged(path, f"is not that of this run, but of {run_id(config)}")
        return config

    @property
    def state(self) -> str:
        """One of STATES, or DAMAGED."""
        try:
            return str(self.manifest["state"])
        except Damaged:
            return DAMAGED

    def update(self, **changes: Any) -> None:
        """Change fields of the manifest atomically.

        Raises:
            Disturbed: there is none any more.
        """
        self._write({**self._present(), **changes})

    def _present(self) -> dict[str, Any]:
        """The manifest that must be there."""
        if (manifest := read_json(self.path / "run.json")) is None:
            raise Disturbed(f"{self.path / 'run.json'} was removed or damaged while the run was under way")
        return manifest

    def _write(self, manifest: dict[str, Any]) -> None:
        assert manifest["state"] in STATES, manifest["state"]
        write_json(self.path / "run.json", manifest)

    def _identity(self) -> dict[str, Any]:
        """The fields of the manifest that follow from where it lies."""
        return {"schema": SCHEMA, "run_id": self.run_id, "key": self.key, "attempt": self.number}

    def note_job(self, job: str | None) -> None:
        """Store SLURM's id of the job, in a file of its own because the job may be writing the manifest."""
        write_json(self.path / "job.json", {"id": job})

    @property
    def job(self) -> str | None:
        """SLURM's id of the job, from `note_job`."""
        note = read_note(self.path / "job.json", schemas.JobNote)
        return note.id if note else None

    def has_checkpoint(self) -> bool:
        """Is there a checkpoint that was written as a whole?"""
        return self.saved_step() > 0

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; removed when the run is finished."""
        return self.path / "checkpoints"

    def check_open(self) -> None:
        """For its workers, before they change anything.

        Raises:
            Disturbed: it is whole, or was given up, and nobody has taken it up again.
        """
        if self.state in ("ok", "failed"):
            raise self._closed()

    def start(self, step: int, host: str, **facts: Any) -> None:
        """Mark the attempt as running.

        If it was started before, it continues from `step`: that is added to `resumed`, and the facts of the
        first start remain.
        """
        manifest = self.manifest
        if "started" not in manifest:
            self.update(state="running", started=now(), **facts)
            return
        resumption = {"step": step, "at": now(), "host": host}
        self.update(state="running", resumed=[*manifest.get("resumed", []), resumption])

    def preempt(self, step: int) -> None:
        """Mark the attempt as stopped on request, with its first `step` steps saved."""
        self.update(state="preempted", step=step)

    def saved(self) -> dict[int, Path]:
        """The folders of checkpoints by step, whole or not. What else lies there is not ours."""
        return {int(path.name): path for path in self.checkpoints.glob("*") if _is_number(path.name)}

    def saved_step(self) -> int:
        """The step of the newest whole checkpoint; 0 without any."""
        whole = (step for step, path in self.saved().items() if (path / "whole.json").is_file())
        return max(whole, default=0)

    def rank_path(self, rank: int) -> Path:
        """The file of a rank's log."""
        return self.path / f"rank{rank}.jsonl"

    def rank_paths(self) -> list[Path]:
        """The log files that exist, by rank."""
        logs = (RANK_LOG.fullmatch(path.name) for path in self.path.glob("rank*.jsonl"))
        return [self.rank_path(rank) for rank in sorted(int(log[1]) for log in logs if log)]

    def writer(self) -> str | None:
        """Who holds the lock of one of its logs; None: nobody writes it."""
        return next((holder for path in self.rank_paths() if (holder := lock_holder(path))), None)

    def finish(self, workers: int, steps: int, **summary: Any) -> None:
        """Mark the attempt as whole, in one replacement: state, `summary`, sizes and digests of its files.

        Args:
            workers, steps: each of so many ranks must have logged each of so many steps once, in order; where
                variants took turns, of each variant.

        Raises:
            Disturbed: what lies there is not what these workers wrote, or somebody has closed the attempt.
        """
        try:
            manifest, variants = self._present(), variant_configs(self.config)
        except Damaged as damage:
            what = f"{damage.path} was changed while the run was under way: it {damage.why}"
            raise Disturbed(what) from damage
        if manifest["state"] != "running":
            raise self._closed()
        if [path.name for path in self.rank_paths()] != [f"rank{rank}.jsonl" for rank in range(workers)]:
            found = ", ".join(path.name for path in self.rank_paths())
            raise Disturbed(f"{self.path} holds {found or 'no logs'} for {workers} workers")
        for path in self.rank_paths():
            _check_steps(path, steps, [*variants] or [None])
        # Of an attempt that was taken up again they tell why it had ended, or where.
        kept = {name: value for name, value in manifest.items() if name not in ("why", "failure", "step")}
        end = {"state": "ok", "ended": now(), "files": self.fingerprints(), "steps": steps}
        self._write({**kept, **self._identity(), **end, **summary})
        shutil.rmtree(self.checkpoints, ignore_errors=True)  # if some remain, they only cost space

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Size and digest of each log."""
        return {path.name: fingerprint(path) for path in self.rank_paths()}

    def _closed(self) -> Disturbed:
        manifest = self.manifest
        why = f" ({manifest['why']})" if manifest.get("why") else ""
        return Disturbed(f"{self.path} was marked as {manifest['state']}{why} by another process")

    def fail(self, why: str, kind: str = "failed") -> None:
        """Mark the attempt as failed: `why` for people, `kind` (a failure class) for programs. What is whole
        stays so."""
        manifest = {} if self.state == DAMAGED else self.manifest
        if manifest.get("state") != "ok":
            end = {"state": "failed", "ended": now(), "why": why, "failure": kind}
            self._write({**manifest, **self._identity(), **end})

    def is_valid(self, verify: bool = False) -> bool:
        """Is the record whole, and all as its manifest says? `verify` compares the files' digests as well."""
        return self.state == "ok" and self.fault(verify) is None

    def fault(self, verify: bool = False) -> str | None:
        """What is wrong with this record, in a sentence; None where nothing is, or where it is not finished.

        Args:
            verify: read the files and compare their digests as well.
        """
        try:
            self.check(verify)
        except Damaged as damage:
            return damage.brief
        return None

    def check(self, verify: bool = False) -> dict[str, Any]:
        """The manifest, once nothing is wrong with what it says; see `fault`.

        Raises:
            Damaged: something is.
        """
        path, manifest = self.path / "run.json", self.manifest
        if manifest["state"] != "ok":
            if not path.exists():
                raise Damaged(path, "is missing")
            return manifest
        if manifest.get("schema") != SCHEMA:
            raise Damaged(path, f"has schema {manifest.get('schema')}, and this code reads schema {SCHEMA}")
        if manifest.get("key") != run_key(self.config):
            raise Damaged(path, f"has the key {manifest.get('key')}, which is not that of its config")
        files, logs = manifest.get("files", {}), [log.name for log in self.rank_paths()]
        for rank in range(max(1, len(logs))):
            if f"rank{rank}.jsonl" not in files:
                raise Damaged(path, f"does not list the log of rank {rank}")
        for name, expected in files.items():
            self._check_file(self.path / name, expected, verify)
        return manifest

    def _check_file(self, path: Path, expected: Mapping[str, Any], verify: bool) -> None:
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise Damaged(path, f"has {size:,} bytes instead of {expected['bytes']:,}")
            if verify:
                read_recorded(path, expected)
        except OSError as error:
            raise Damaged(path, f"can't be read: {error.strerror}") from error


def read_recorded(path: Path, expected: Mapping[str, Any]) -> bytes:
    """A file of a record, as it was when the record was finished.

    Args:
        expected: what the manifest says of it.

    Raises:
        Damaged: it is not.
    """
    try:
        raw = read_bytes(path, MOST_LOG_BYTES)
    except FileNotFoundError as error:
        raise Damaged(path, "is missing") from error
    if hashlib.sha256(raw).hexdigest() != expected["sha256"]:
        raise Damaged(path, "is not what was recorded: it has another digest")
    return raw


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def fingerprint(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def _check_steps(path: Path, steps: int, variants: Sequence[str | None]) -> None:
    """Each of so many steps of each variant stands in a log once, in order."""
    found: dict[str | None, list[int]] = {variant: [] for variant in variants}
    broken = 0
    with path.open("rb") as log:
        for line in log:
            try:
                content = json.loads(line)
                if content["kind"] == "step":
                    found[content.get("variant")].append(content["step"])
            except (ValueError, TypeError, LookupError):
                broken += 1
    if broken or any(of_variant != [*range(steps)] for of_variant in found.values()):
        lines = sum(map(len, found.values()))
        different = sum(len({*of_variant} & {*range(steps)}) for of_variant in found.values())
        raise Disturbed(
            f"{path} holds {lines} lines for {different} of {len(variants) * steps} steps"
            + f", and {broken} that are broken" * bool(broken)
            + ": it was removed, changed, or written by two, while the run was under way"
        )


@dataclass(frozen=True)
class Store:
    """All runs below one folder."""

    root: Path

    def attempts(self, run: str) -> list[Attempt]:
        """A run's attempts, oldest first."""
        folder = self.root / run
        if not folder.is_dir():
            return []
        found = [path for path in folder.iterdir() if ATTEMPT.fullmatch(path.name) and path.is_dir()]
        return sorted(map(Attempt, found), key=lambda attempt: (attempt.number, attempt.path.name))

    def valid(self, config: Mapping[str, Any]) -> Attempt | None:
        """The newest valid attempt at this config."""
        return self.newest_valid(run_id(config))

    def last(self, config: Mapping[str, Any]) -> Attempt | None:
        """The newest attempt at this config, in any state."""
        attempts = self.attempts(run_id(config))
        return attempts[-1] if attempts else None

    def newest_valid(self, run: str) -> Attempt | None:
        """The newest valid attempt of a run, by its id."""
        return next((attempt for attempt in reversed(self.attempts(run)) if attempt.is_valid()), None)

    def faults(self, run: str) -> list[str]:
        """A line on each attempt that does not count because it is damaged, newer ones than the newest valid
        attempt."""
        lines = []
        for attempt in reversed(self.attempts(run)):
            if fault := attempt.fault():
                lines.append(left_out(attempt, fault))
            elif attempt.state == "ok":
                break
        return lines

    def begin(self, config: Mapping[str, Any]) -> Attempt:
        """A new, numbered attempt at this config; concurrent processes get different ones."""
        folder = self.root / run_id(config)
        number = max((attempt.number for attempt in self.attempts(folder.name)), default=0)
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            number += 1
            path = folder / f"{number:03d}"
            try:
                path.mkdir()
                break
            except FileExistsError:
                continue
        write_json(path / "config.json", measured_config(config))
        attempt = Attempt(path)
        attempt._write({**attempt._identity(), "state": "planned", "created": now()})
        return attempt

    def runs(self) -> list[str]:
        """The ids of all runs, sorted."""
        return (
            sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []
        )

    def all_valid(self) -> list[Attempt]:
        """The newest valid attempt of every run that has one."""
        return [attempt for run in self.runs() if (attempt := self.newest_valid(run))]
