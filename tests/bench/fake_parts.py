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
    """A part whose command is a script that runs in the results folder."""
    folder = "import os; os.chdir(os.environ['SPARSIFY_RESULTS'])\n"
    planned = Planned((PYTHON, "-c", folder + script), expected_min, limit_min, needs)
    return Part(name, "fake", planned, planned, resumable)


def call(folder: Path, *parts: Part, **how: Any) -> State:
    """One call in this folder; returns the state that the next call will read."""
    folder.mkdir(exist_ok=True)
    found = state.read(folder / state.NAME, "CPU", True)
    variables = {**os.environ, "SPARSIFY_RESULTS": str(folder)}

    def say(line: str) -> None:
        with (folder / "said.txt").open("a") as said:
            said.write(line + "\n")

    with EndSignals() as signals:
        first = Call(found, folder, folder, variables, signals, say, grace_s=0.2, **how)
        first.carry_out_all(parts)
    return state.read(folder / state.NAME, "CPU", True)


def ran(folder: Path) -> list[str]:
    """The parts that were started, in their order."""
    said = (folder / "said.txt").read_text().splitlines()
    return [line.partition(":")[0] for line in said if line.endswith(": fake")]
