"""One run's record on disk: written whole or not at all, and read back without trust in its last line.

    <root>/<run id>/<attempt>/config.json   what was asked, launch fields left out
                              run.json      the manifest: state, times, provenance; replaced atomically
                              rank<r>.jsonl what rank r measured, one JSON object a line

A run's id ends in the hash of its config, so that a second call finds what the first one measured. Measuring
again makes a new attempt beside the old one: nothing that was computed is overwritten. An attempt counts when
its manifest says ``ok`` and its files have the sizes written there; the presence of a folder says nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
STATES = ("planned", "submitted", "running", "ok", "failed", "preempted")
# Where and how a run is started; they change neither the mathematics nor what a record means.
LAUNCH_FIELDS = ("data", "launch", "profile", "recipe")
# Of a cluster's description only this is measured; partitions, accounts and limits are how one gets there.
CLUSTER_FIELDS = ("name", "where", "gpu", "link", "workers_per_node")
# Fields that came later: without them, records mean these, and keep their keys.
IMPLIED = {"comm": "torch", "container": "none", "select": "torch", "overlap": False}


def now() -> str:
    """The time in UTC, to the second, as every record writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def measured_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved config that decides what is measured."""
    kept = {name: value for name, value in config.items() if name not in LAUNCH_FIELDS}
    kept["cluster"] = {name: kept["cluster"][name] for name in CLUSTER_FIELDS if name in kept["cluster"]}
    if isinstance(kept.get("container"), Mapping):
        kept["container"] = kept["container"]["name"]  # which image file it was is provenance
    return {name: value for name, value in kept.items() if IMPLIED.get(name) != value}


def run_key(config: Mapping[str, Any]) -> str:
    """12 hexadecimal digits of the SHA-256 of the config without its launch fields."""
    canonical = json.dumps(measured_config(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def run_id(config: Mapping[str, Any]) -> str:
    """A name that a person can read, made unique by the key."""
    method, task, where = config["method"]["name"], config["task"]["name"], config["cluster"]["where"]
    return f"{method}-{task}-{config['workers']}w-{where}-{run_key(config)}"


def write_atomic(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Replace `path` by `content`, or leave it as it was; `durable` waits for the disk."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    raw = content.encode() if isinstance(content, str) else content
    try:
        with part.open("wb") as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None where there is none or it is no whole JSON object."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return content if isinstance(content, dict) else None


@dataclass
class RankLog:
    """What one rank measured. Lines wait in memory until `flush`, so that no I/O falls into a timed
    window.
    """

    path: Path
    pending: list[str] = field(default_factory=list)

    def add(self, kind: str, **values: Any) -> None:
        self.pending.append(json.dumps({"kind": kind, **values}, separators=(",", ":"), allow_nan=True))

    def flush(self, durable: bool = False) -> None:
        """Append the waiting lines in one write; `durable` also waits for the disk."""
        if not self.pending and not durable:
            return
        with self.path.open("ab", buffering=0) as file:
            raw = "".join(line + "\n" for line in self.pending).encode()
            while raw:  # a raw write may be short, on a disk that is filling up for example
                raw = raw[file.write(raw) :]
            self.pending.clear()
            if durable:
                os.fsync(file.fileno())

    def size(self) -> int:
        """Bytes in the file; what waits is not counted."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> int:
        """`flush` to the disk; returns the size of the file."""
        self.flush(durable=True)
        return self.size()

    def truncate(self, size: int) -> None:
        """Forget what was written after the first `size` bytes: it will be measured again."""
        if self.size() > size:
            with self.path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a rank's log, and how many broken ones were dropped (a killed writer leaves one)."""
    records, dropped = [], 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            dropped += 1
    return records, dropped


@dataclass(frozen=True)
class Attempt:
    """One execution of a run and the folder that holds it."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.parent.name

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def manifest(self) -> dict[str, Any]:
        return read_json(self.path / "run.json") or {"state": "planned"}

    @property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json") or {}

    @property
    def state(self) -> str:
        return str(self.manifest["state"])

    def update(self, **changes: Any) -> None:
        """Change fields of the manifest, atomically."""
        manifest = {"schema": SCHEMA, **self.manifest, **changes}
        assert manifest["state"] in STATES, manifest["state"]
        write_json(self.path / "run.json", manifest)

    def note_job(self, job: str | None) -> None:
        """Remember SLURM's name of the job; in a file of its own, for the job may be writing the manifest."""
        write_json(self.path / "job.json", {"id": job})

    @property
    def job(self) -> str | None:
        return (read_json(self.path / "job.json") or {}).get("id")

    def has_checkpoint(self) -> bool:
        """Is there one that was whole when it was written?"""
        return any(self.path.glob("checkpoints/*/whole.json"))

    @property
    def checkpoints(self) -> Path:
        """The folder of what an interrupted run goes on from; gone when the run is finished."""
        return self.path / "checkpoints"

    def start(self, step: int, host: str, **facts: Any) -> None:
        """Under way. Where it was before, it goes on from `step`: noted apart, and the facts of the first
        start stay.
        """
        manifest = self.manifest
        if "started" not in manifest:
            self.update(state="running", started=now(), **facts)
            return
        again = {"step": step, "at": now(), "host": host}
        self.update(state="running", resumed=[*manifest.get("resumed", []), again])

    def preempt(self, step: int) -> None:
        """Stopped as told; `step` are done and kept."""
        self.update(state="preempted", step=step)

    def saved_step(self) -> int:
        """The step of the newest checkpoint; 0 without any."""
        return max((int(path.parent.name) for path in self.checkpoints.glob("*/whole.json")), default=0)

    def rank_path(self, rank: int) -> Path:
        return self.path / f"rank{rank}.jsonl"

    def rank_paths(self) -> list[Path]:
        return sorted(self.path.glob("rank*.jsonl"), key=lambda path: int(path.stem[4:]))

    def finish(self, **summary: Any) -> None:
        """Declare the attempt whole: sizes and digests of its files, then the state, in one replacement."""
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in self.rank_paths()
        }
        self.update(state="ok", ended=now(), files=files, **summary)
        shutil.rmtree(self.checkpoints, ignore_errors=True)  # a leftover costs space and does no harm

    def fail(self, why: str, kind: str = "failed") -> None:
        """Say why the attempt ended early; `kind` is a word of the failure taxonomy, for programs."""
        self.update(state="failed", ended=now(), why=why, failure=kind)

    def is_valid(self, verify: bool = False) -> bool:
        """Is every file there as the manifest says? `verify` reads them and compares digests as well."""
        manifest = self.manifest
        if manifest["state"] != "ok" or manifest.get("schema") != SCHEMA:
            return False
        for name, expected in manifest["files"].items():
            path = self.path / name
            if not path.is_file() or path.stat().st_size != expected["bytes"]:
                return False
            if verify and hashlib.sha256(path.read_bytes()).hexdigest() != expected["sha256"]:
                return False
        return True


@dataclass(frozen=True)
class Store:
    """All runs below one folder."""

    root: Path

    def attempts(self, run: str) -> list[Attempt]:
        """A run's attempts, the oldest first."""
        folder = self.root / run
        if not folder.is_dir():
            return []
        return [Attempt(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name.isdigit()]

    def valid(self, config: Mapping[str, Any]) -> Attempt | None:
        """The newest valid attempt at this config, or None."""
        return self.newest_valid(run_id(config))

    def last(self, config: Mapping[str, Any]) -> Attempt | None:
        """The newest attempt at this config, whatever became of it."""
        attempts = self.attempts(run_id(config))
        return attempts[-1] if attempts else None

    def newest_valid(self, run: str) -> Attempt | None:
        return next((a for a in reversed(self.attempts(run)) if a.is_valid()), None)

    def begin(self, config: Mapping[str, Any]) -> Attempt:
        """A new, numbered attempt at this config; two processes never get the same one."""
        folder = self.root / run_id(config)
        number = max((attempt.number for attempt in self.attempts(folder.name)), default=0)
        while True:
            number += 1
            path = folder / f"{number:03d}"
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                continue
        write_json(path / "config.json", measured_config(config))
        attempt = Attempt(path)
        attempt.update(
            state="planned", run_id=folder.name, key=run_key(config), attempt=number, created=now()
        )
        return attempt

    def runs(self) -> list[str]:
        return (
            sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []
        )

    def all_valid(self) -> list[Attempt]:
        """The newest valid attempt of every run that has one."""
        return [attempt for run in self.runs() if (attempt := self.newest_valid(run))]
