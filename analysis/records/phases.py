"""What a step is made of: the one list of phases, in the order of a step."""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """A part of a step that is timed by itself, and how it looks wherever it is drawn."""

    name: str  # in records; its seconds are the column `<name>_s` of steps
    label: str
    colour: str
    hatch: str
    group: str
    meaning: str
    since: str = ""  # as of a `schema.Field`


INPUT, COMPUTATION, SELECTION, COMMUNICATION, OTHER = (
    "input", "computation", "selection", "communication", "other",
)  # fmt: skip
PHASES = (
    Phase("io", "input", "#C9B79C", "", INPUT, "loading the batch"),
    Phase("forward", "forward (FP)", "#9BC9E8", "", COMPUTATION, "forward pass"),
    Phase("backward", "backward (BP)", "#2F7FB8", "", COMPUTATION, "backpropagation"),
    Phase("late", "late on purpose", "#F5C6B8", "xx", OTHER, "doing nothing, on purpose", "2026-11-22"),
    Phase("check", "own guard", "#5D5D5D", "", OTHER, "looking for NaN and Inf"),
    Phase("select", "compression (select)", "#D55E00", "", SELECTION, "choosing what to send"),
    Phase("exchange", "packing", "#8C510A", "", SELECTION, "preparing the messages"),
    Phase("wait", "communication: wait", "#E4E4E4", "////", COMMUNICATION, "waiting for the slowest worker"),
    Phase("transfer", "communication: transfer", "#009E73", "", COMMUNICATION, "collective communication"),
    Phase(
        "synchronize", "communication, unsplit", "#7FCEB9", "////", COMMUNICATION,
        "communication and the wait for it, in mode as_published",
    ),
    Phase("scatter", "scatter", "#CC79A7", "", SELECTION, "adding up what was received"),
    Phase("update", "update", "#E8B92F", "", COMPUTATION, "the optimiser's step"),
    Phase(
        "validate", "validation", "#6A4C93", "", OTHER,
        "validation inside the timed loop, in mode as_published",
    ),
)  # fmt: skip
NAMES = tuple(phase.name for phase in PHASES)
# What no clock saw: the rest of a step. It is drawn, and is no column of steps.
UNACCOUNTED = Phase("unaccounted", "unaccounted", "#FFFFFF", "....", OTHER, "what no phase has")
DRAWN = {phase.name: phase for phase in (*PHASES, UNACCOUNTED)}


def find(name: str) -> Phase:
    """The phase of this name; one that is not listed looks unaccounted, under its own name."""
    return DRAWN.get(name) or UNACCOUNTED._replace(name=name, label=name)


def of_group(group: str) -> tuple[str, ...]:
    """Names of a group's phases, in the order of a step."""
    return tuple(phase.name for phase in PHASES if phase.group == group)
