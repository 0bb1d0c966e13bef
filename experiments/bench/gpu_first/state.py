"""What became of each part: one file, replaced whole after every change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from analysis.files import read_as, write_json

SCHEMA, NAME = 1, "state.json"
REHEARSAL = "rehearsal-cpu"
# running: in a file that is read, its process was ended with the one that watched it.
# interrupted: by a signal, or because this call's minutes were over. too long: it reached its own limit.
Word = Literal["running", "ok", "failed", "too long", "interrupted", "skipped"]


class Result(Struct, frozen=True):
    """What became of one part when it was last tried."""

    state: Word
    why: str = ""  # unless ok
    at: str = ""  # when it began
    seconds: float = 0.0
    spent_s: float = 0.0  # over all calls, where it was resumed
    exit: int | None = None
    reused: bool = False  # its run was measured before it began, so its seconds say nothing
    found: dict[str, Any] = {}  # the JSON object that it printed last
    tail: str = ""  # of what it printed, where it failed
    log: str = ""  # beside this file
    records: list[str] = []  # below the results folder
    code: str = ""  # digest of the code's files
    commit: str | None = None


class State(Struct):
    """All parts on one device."""

    device: str
    rehearsal: bool
    schema: int = SCHEMA
    parts: dict[str, Result] = field(default_factory=dict)


def name_of(device: str, rehearsal: bool) -> str:
    """The folder of a device's results; without the host's name, because results are meant to be shared."""
    return REHEARSAL if rehearsal else "-".join(re.findall(r"[a-z0-9]+", device.lower()))


def read(path: Path, device: str, rehearsal: bool) -> State:
    """The state that earlier calls left; a new one where there was none.

    Raises:
        Damaged: something else is there.
    """
    return read_as(path, State) or State(device, rehearsal)


def write(path: Path, state: State) -> None:
    write_json(path, to_builtins(state))


def public(state: State) -> State:
    """Without what may name this machine: what commands printed beside their numbers."""
    kept = {name: replace(result, tail="", log="", records=[]) for name, result in state.parts.items()}
    return replace(state, parts=kept)
