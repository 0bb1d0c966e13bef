"""An entry's file: its statement and its tables, in one archive that others can check."""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from analysis.benchmark.statement import NAME_PATTERN, EntryStatement, enter_command
from analysis.records import parquet
from analysis.records.files import DamagedFileError, write_atomic
from analysis.records.frames import Frames
from analysis.records.public import strip_private_provenance
from analysis.records.steps import add_missing_outcomes

STATEMENT_NAME = "entry.json"
ENTRY_SUFFIX = ".entry"
TABLES = ("runs", "epochs", "steps")
MAX_MEMBER_BYTES = 2**26  # of each member, unpacked
MEMBER_DATE = (2026, 1, 1, 0, 0, 0)  # of every member, so that the same content is the same file


class EntryFile(NamedTuple):
    """The content of an entry's file: its statement and its records; and where it lies."""

    statement: EntryStatement
    frames: Frames
    path: Path


class NewestEntries(NamedTuple):
    """The newest files of entries, and a line on each file that can't be shown."""

    entries: list[EntryFile]
    notes: list[str]


def write_public_entry(path: Path, statement: EntryStatement, frames: Frames) -> Path:
    """Write an entry's file, replaced as a whole, and return its path.

    Of steps it has those of launches alone.
    """
    frames = strip_private_provenance(_keep_launch_steps(add_missing_outcomes(frames)))
    with tempfile.TemporaryDirectory() as folder:
        parquet.write_parquet(frames, Path(folder))
        raws = {f"{name}.parquet": (Path(folder) / f"{name}.parquet").read_bytes() for name in TABLES}
    statement = msgspec.structs.replace(
        statement, tables={name: hashlib.sha256(raw).hexdigest() for name, raw in raws.items()}
    )
    text = msgspec.json.format(msgspec.json.encode(statement), indent=1)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, raw in {STATEMENT_NAME: text, **raws}.items():
            archive.writestr(zipfile.ZipInfo(name, MEMBER_DATE), raw, zipfile.ZIP_DEFLATED)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, packed.getvalue())
    return path


def _keep_launch_steps(frames: Frames) -> Frames:
    timed = frames.runs.loc[frames.runs["train.validate"].eq("never"), "key"]
    steps = frames.steps[frames.steps["key"].isin(timed)]
    return frames._replace(
        steps=steps.reset_index(drop=True), spans=frames.spans.iloc[:0], looks=frames.looks.iloc[:0]
    )


def read_entry(path: Path) -> EntryFile:
    """Return an entry, whose tables are as its statement says.

    Raises:
        DamagedFileError: it is no entry's file, or was changed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(archive.namelist())
            if names != sorted([STATEMENT_NAME, *(f"{name}.parquet" for name in TABLES)]):
                raise DamagedFileError(
                    path, f"is no entry's file: it holds {', '.join(names[:9]) or 'nothing'}"
                )
            raws = {info.filename: _read_member(archive, info, path) for info in archive.infolist()}
    # The last two: members that are encrypted, or packed in ways that zipfile lacks.
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise DamagedFileError(path, f"is no entry's file: {error}") from error
    try:
        statement = msgspec.json.decode(raws[STATEMENT_NAME], type=EntryStatement)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedFileError(path, f"says what no entry says: {error}") from error
    if not re.fullmatch(NAME_PATTERN, statement.name):
        raise DamagedFileError(path, f"is of {statement.name!r:.60}, which can't be an entry's name")
    for name, digest in statement.tables.items():
        if hashlib.sha256(raws.get(name, b"")).hexdigest() != digest:
            raise DamagedFileError(path, f"was changed: {name} is not what its statement has the digest of")
    if {*statement.tables} != {*raws} - {STATEMENT_NAME}:
        raise DamagedFileError(path, "has a table without a digest")
    with tempfile.TemporaryDirectory() as folder:
        for name in statement.tables:
            (Path(folder) / name).write_bytes(raws[name])
        try:
            frames = parquet.read_parquet(Path(folder), TABLES, parquet.raise_fault)
        except DamagedFileError as damage:
            raise DamagedFileError(path, f"holds {damage.message_without_folder}") from damage
    return EntryFile(statement, frames, path)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> bytes:
    if info.file_size > MAX_MEMBER_BYTES:
        raise DamagedFileError(path, f"holds {info.filename} of {info.file_size:,} bytes; an entry has less")
    with archive.open(info) as member:
        return member.read(MAX_MEMBER_BYTES)


def read_newest_entries(folders: list[Path], tier: str, rules_digest: str) -> NewestEntries:
    """Return the newest file of each entry of a tier, and a line on each that can't be shown.

    Args:
        folders: with files of entries.
        tier: the size of everything.
        rules_digest: of the rules that they must be by.
    """
    newest_by_name = dict[str, EntryFile]()
    notes = list[str]()
    for path in (path for folder in folders for path in sorted(folder.glob(f"*{ENTRY_SUFFIX}"))):
        try:
            entry = read_entry(path)
        except DamagedFileError as damage:
            notes.append(damage.message_without_folder)
            continue
        statement = entry.statement
        if statement.tier != tier:
            continue
        if statement.rules != rules_digest:
            notes.append(
                f"{path.name} is by rules of version {statement.version}, which are not today's: "
                f"{enter_command(statement.name, tier)} enters it anew"
            )
            continue
        newest = newest_by_name.get(statement.name)
        if newest is None or newest.statement.written < statement.written:
            newest_by_name[statement.name] = entry
    return NewestEntries([*newest_by_name.values()], notes)
