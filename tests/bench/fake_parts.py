"""Parts that are not real, and a call that carries them out; light, for processes of their own import it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from experiments.bench.gpu_first import state
from experiments.bench.gpu_first.call import Call
from experiments.bench.gpu_first.parts import PYTHON, Need, Part, Planned
from experiments.bench.gpu_first.state import State
from experiments.launch.end_signals import EndSignals


def fake(
    name: str,
    script: str,
    limit_min: float = 1.0,
    expected_min: float = 0.01,
    needs: tuple[Need, ...] = (),
    resumable: bool = False,
) -> Part:
    """A part whose command is a script that can say `note(WORD)`: it is then in notes.txt."""
    begin = f"def note(word):\n    open('notes.txt', 'a').write('{name} ' + word + chr(10))\n"
    folder = "import os; os.chdir(os.environ['SPARSIFY_RESULTS'])\n"
    planned = Planned((PYTHON, "-c", folder + begin + script), expected_min, limit_min, needs)
    return Part(name, "", planned, planned, resumable)


def call(folder: Path, *parts: Part, **how: Any) -> State:
    """One call in this folder; returns the state that the next call will read."""
    folder.mkdir(exist_ok=True)
    found, variables = (
        state.read(folder / state.NAME, "CPU", True),
        {**os.environ, "SPARSIFY_RESULTS": str(folder)},
    )
    with EndSignals() as signals:
        Call(found, folder, folder, variables, signals, lambda line: None, grace_s=0.2, **how).carry_out_all(
            parts
        )
    return state.read(folder / state.NAME, "CPU", True)


def ran(folder: Path) -> list[str]:
    """The parts that ran, in their order."""
    notes = folder / "notes.txt"
    return [line.split()[0] for line in notes.read_text().splitlines()] if notes.exists() else []
