"""The phases of a step, from phases.yaml, in the order of a step."""

from __future__ import annotations

from pathlib import Path

import msgspec


class StepPhase(msgspec.Struct, frozen=True):
    """A part of a step that is timed by itself, and how it looks wherever it is drawn."""

    name: str  # in records; its seconds are the column `<name>_s` of steps
    label: str
    colour: str
    group: str
    meaning: str
    hatch: str = ""
    since: str = ""  # as of a `schema.FieldDescription`


SELECTION, COMMUNICATION, OTHER = "selection", "communication", "other"  # groups, as phases.yaml has them
PHASES = msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=tuple[StepPhase, ...])
NAMES = tuple(phase.name for phase in PHASES)
# What no clock saw: the rest of a step. It is drawn, and is no column of steps.
UNACCOUNTED = StepPhase("unaccounted", "unaccounted", "#FFFFFF", OTHER, "what no phase has", hatch="....")
PHASE_BY_NAME = {phase.name: phase for phase in (*PHASES, UNACCOUNTED)}


def find_phase_or_default(name: str) -> StepPhase:
    """Return the phase of this name; an unlisted one looks as UNACCOUNTED does, under its own name."""
    return PHASE_BY_NAME.get(name) or msgspec.structs.replace(UNACCOUNTED, name=name, label=name)


def phase_names_in_group(group: str) -> tuple[str, ...]:
    """Return the names of a group's phases, in the order of a step."""
    return tuple(phase.name for phase in PHASES if phase.group == group)
