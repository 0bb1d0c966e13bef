"""The plan, and the summary of what was met, as Markdown."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from analysis.numbers import number
from experiments.bench.gpu_first.parts import Part
from experiments.bench.gpu_first.promises import Measured, Outcome, outcomes
from experiments.bench.gpu_first.state import State
from experiments.config import code_version

NOTHING = "**Rehearsal on a CPU: nothing here is a GPU result.**"


def plan(parts: Sequence[Part], rehearsal: bool) -> str:
    """Parts with their minutes, and the total."""
    lines = ["| part | shows | expected min | limit min | goes on |", "|---|---|---:|---:|---|"]
    total = 0.0
    for part in parts:
        planned = part.planned(rehearsal)
        total += planned.expected_min
        why = part.missing(rehearsal)
        shows = part.shows + (f" (not here: {why})" if why else "")
        resumes = "where it stopped" if part.resumable else "from the start"
        lines.append(
            f"| {part.name} | {shows} | {planned.expected_min:g} | {planned.limit_min:g} | {resumes} |"
        )
    lines += [f"| all | | {total:.3g} | | |", ""]
    lines += [f"{part.name}: {said(part.planned(rehearsal).command)}" for part in parts]
    return "\n".join(lines) + "\n"


def said(command: Sequence[str]) -> str:
    """A command line, with a short name for this Python."""
    return shlex.join("python" if word == sys.executable else word for word in command)


def summary(state: State, parts: Sequence[Part]) -> str:
    """What became of the parts, and of the promises."""
    lines = [f"# A GPU's first minutes: {state.device}", ""]
    lines += [NOTHING, ""] if state.rehearsal else []
    lines += ["## Parts", "", "| part | result | s | why |", "|---|---|---:|---|"]
    for part in parts:
        result = state.parts.get(part.name)
        if result is None:
            lines.append(f"| {part.name} | waits | | |")
        else:
            lines.append(f"| {part.name} | {result.state} | {result.spent_s:.0f} | {result.why} |")
    lines += ["", *others(state), "## Promises", ""]
    lines += ["| what | promised | predicted | measured | |", "|---|---:|---|---:|---|"]
    lines += [row(outcome, state.rehearsal) for outcome in outcomes(state)]
    return "\n".join(lines) + "\n"


def row(outcome: Outcome, rehearsal: bool) -> str:
    promise, sign = outcome.promise, ">=" if outcome.promise.at_least else "<="
    toy = "toy " if rehearsal and outcome.measured else ""
    value = toy + written(outcome.measured, promise.unit)
    word = outcome.word + (f": {outcome.why}" if outcome.why else "")
    bound = f"{sign} {promise.bound:g} {promise.unit}"
    return f"| {promise.text} | {bound} | {promise.predicted} | {value} | {word} |"


def written(measured: Measured | None, unit: str) -> str:
    if measured is None:
        return ""
    value = number(measured.median)
    if measured.low is not None and measured.high is not None:
        value += f" [{number(measured.low)}, {number(measured.high)}]"
    return f"{value} {unit} (n = {measured.n})"


def others(state: State) -> list[str]:
    """The parts that this code has not measured."""
    of: dict[str, list[str]] = {}
    for name, result in state.parts.items():
        if result.code and result.code != code_version.digest():
            of.setdefault((result.commit or "of no commit")[:7], []).append(name)
    lines = [f"- measured with other code ({commit}): {', '.join(names)}" for commit, names in of.items()]
    return [*lines, ""] if lines else []
