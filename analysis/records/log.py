"""Logs of ranks, a line of JSON a step: written by one process at a time, read as they were written."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from analysis.records import locks
from analysis.records.configs import flatten
from analysis.records.files import (
    MAX_LOG_BYTES,
    DamagedFileError,
    convert_to_schema,
    decode_json,
    open_for_append,
    read_bytes,
)
from analysis.records.schema import EpochLine, LogLine, StepLine

# In which the locks of a node that died must be gone: file systems wait some 90 s for it to answer.
LOCK_TIMEOUT_S = 180.0
PROGRESS_FIELDS = {"loss": "loss", "top1": "val_top1"}  # numbers that show how a training goes, as logged
# By its kind, the names that a line may have.
FIELDS_BY_KIND = {
    kind: {"kind", *(field.name for field in msgspec.structs.fields(line))} - {"more"}
    for kind, line in (("step", StepLine), ("epoch", EpochLine))
}


class InterferenceError(ValueError):
    """A removal, change or closing by another process of a record that this process was writing."""

    kind = "disturbed"


class LogInUseError(ValueError):
    """A log that another process is writing; the message says which."""

    kind = "held"


class RankLog:
    """Log of one rank. Lines are kept in memory until `flush`: no I/O happens in a timed window.

    Who has it open holds its lock (`locks`), and nobody else can open it. On a file system without locks,
    files are written without: each `flush` sees what another process has written.

    Args:
        path: of the file, which is made where it is not.
        timeout_s: how long to wait for another process to end.
        should_give_up: asked while waiting; True ends the wait.

    Raises:
        LogInUseError: another process has it open.
        DamagedFileError: a link is there, or something else than a file.
    """

    def __init__(
        self, path: Path, timeout_s: float = 0.0, should_give_up: Callable[[], bool] = lambda: False
    ) -> None:
        self.path = path
        self.pending = list[str]()
        self.progress: dict[str, float] = {}  # the newest of PROGRESS_FIELDS
        self.file = open_for_append(path)
        deadline = time.monotonic() + timeout_s
        while locks.try_flock(path, self.file.fileno()) == "held elsewhere":
            if time.monotonic() > deadline or should_give_up():
                self.file.close()
                holder = locks.describe_lock_holder(path) or "another process"
                raise LogInUseError(f"{path} is being written by {holder}: wait for its end, or end it")
            time.sleep(locks.POLL_S)
        self.written_bytes = self.size_bytes()

    def __enter__(self) -> RankLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lock. Lines in memory are lost."""
        self.file.close()

    def add_line(self, kind: str, **values: Any) -> None:
        """Append a line to those in memory, which `flush` writes."""
        if "variant" not in values:  # variants that take turns have a loss each
            self.progress |= {
                name: values[key] for name, key in PROGRESS_FIELDS.items() if values.get(key) is not None
            }
        self.pending.append(json.dumps({"kind": kind, **values}, separators=(",", ":"), allow_nan=True))

    def flush(self, *, durable: bool = False) -> None:
        """Append the lines in memory to the file, in one write; `durable` also waits for the disk.

        Raises:
            InterferenceError: it is not the file any more that this process has written.
        """
        if not self.pending and not durable:
            return
        self._check_undisturbed()
        raw = "".join(line + "\n" for line in self.pending).encode()
        while raw:  # a raw write may be partial, for example on a disk that is almost full
            count = self.file.write(raw) or 0
            self.written_bytes += count
            raw = raw[count:]
        self.pending.clear()
        if durable:
            os.fsync(self.file.fileno())

    def size_bytes(self) -> int:
        """Return the bytes in the file, without the lines in memory."""
        return os.fstat(self.file.fileno()).st_size

    def truncate(self, size_bytes: int) -> None:
        """Remove everything after the first `size_bytes` bytes: it will be measured again."""
        if self.size_bytes() > size_bytes:
            self.file.truncate(size_bytes)
            os.fsync(self.file.fileno())
        self.written_bytes = self.size_bytes()

    def _check_undisturbed(self) -> None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            raise InterferenceError(f"{self.path} was removed while it was being written") from None
        if not os.path.samestat(status, os.fstat(self.file.fileno())):
            raise InterferenceError(f"{self.path} was replaced while it was being written")
        if status.st_size != self.written_bytes:
            raise InterferenceError(f"{self.path} was changed by another process while it was being written")


class LinesAndBrokenCount(NamedTuple):
    """The decoded lines of a log, and the number of lines that were left out as broken."""

    lines: list[Any]
    broken_count: int


def read_json_lines(path: Path, schema: Any = dict) -> LinesAndBrokenCount:
    """Return the lines of a log that fit the schema, which may be a union, and the number of others.

    A killed writer may leave one broken line.

    Raises:
        FileNotFoundError, DamagedFileError: as `read_bytes`.
    """
    lines = list[Any]()
    broken_count = 0
    for line in read_bytes(path, MAX_LOG_BYTES).splitlines():
        try:
            lines.append(_decode_line(line, schema, path, ""))
        except DamagedFileError:
            broken_count += 1
    return LinesAndBrokenCount(lines, broken_count)


def decode_finished_log(raw: bytes, schema: Any, path: Path) -> LinesAndBrokenCount:
    """Return the lines of a finished log, and the number of broken ones at its end: 0 or 1.

    Raises:
        DamagedFileError: another line is not as it was written.
    """
    if raw.endswith(b"\n"):
        # Also of NaN, which is no JSON. Whatever a line holds, the slower way below tells which line it is.
        with contextlib.suppress(ValueError, RecursionError):
            decoded = msgspec.json.Decoder(schema).decode_lines(raw)
            if len(decoded) == raw.count(b"\n"):
                return LinesAndBrokenCount(decoded, 0)
    *lines, last = raw.split(b"\n")
    decoded = [_decode_line(line, schema, path, f" in line {number}") for number, line in enumerate(lines, 1)]
    return LinesAndBrokenCount(decoded, int(bool(last)))


def check_log_has_all_steps(path: Path, steps: int, variants: Sequence[str | None]) -> None:
    """Check that a log has so many steps of each variant, each once and in order.

    Raises:
        InterferenceError: something else is there.
    """
    steps_by_variant: dict[str | None, list[int]] = {variant: [] for variant in variants}
    broken = 0
    with path.open("rb") as log:
        for line in log:
            try:
                content = json.loads(line)
                if content["kind"] == "step":
                    steps_by_variant[content.get("variant")].append(operator.index(content["step"]))
            except (ValueError, TypeError, LookupError, RecursionError):
                broken += 1
    expected = [*range(steps)]
    if broken or any(logged != expected for logged in steps_by_variant.values()):
        lines = sum(map(len, steps_by_variant.values()))
        different = sum(len({*logged}.intersection(expected)) for logged in steps_by_variant.values())
        raise InterferenceError(
            f"{path} holds {lines} lines for {different} of {len(variants) * steps} steps"
            + f", and {broken} that are broken" * bool(broken)
            + ": it was removed, changed, or written by two, while the run was under way"
        )


def _decode_line(line: bytes, schema: Any, path: Path, where: str) -> Any:
    content = decode_json(line, path, where)
    return convert_to_schema(
        move_unknown_fields_under_more(content) if schema is LogLine else content, schema, path, where
    )


def move_unknown_fields_under_more(content: Any) -> Any:
    """Return a line of a log with unknown fields under `more`, as leaves: numbers, texts, lists as JSON."""
    kind = content.get("kind") if isinstance(content, dict) else None
    fields = FIELDS_BY_KIND.get(kind) if isinstance(kind, str) else None
    if fields is None or content.keys() <= fields:
        return content
    more = flatten({name: value for name, value in content.items() if name not in fields})
    return {**{name: content[name] for name in content.keys() & fields}, "more": more}
