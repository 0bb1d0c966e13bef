"""One call: which parts are due, which fit into its minutes, and what became of each."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from analysis.records import now
from experiments.bench.gpu_first import state as states
from experiments.bench.gpu_first.parts import Part
from experiments.bench.gpu_first.process import Ended, carry_out, last_lines, last_object
from experiments.bench.gpu_first.state import Result, State, Word
from experiments.config import code_version
from experiments.launch.end_signals import EndSignals

GRACE_S = 20.0  # that a part gets to save, once it is told to end
LEAST_S = 60.0  # that a part which resumes is worth starting for
TAIL_LINES = 12
REUSED = "already measured; --force"  # says `python -m experiments run` of a run that it did not make


@dataclass
class Call:
    """What one call has, and may do.

    Args:
        folder: of this device's results.
        results: of all results; `variables` name it to the commands.
        budget_s: of the whole call; None: no limit.
        named: parts that were asked for by name: they are tried again where they failed.
        force: all are, even where they succeeded.
    """

    state: State
    folder: Path
    results: Path
    variables: Mapping[str, str]
    signals: EndSignals
    say: Callable[[str], None]
    budget_s: float | None = None
    named: Collection[str] = ()
    force: bool = False
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    def carry_out_all(self, parts: Sequence[Part]) -> None:
        """Those that are due, in their order, until a signal comes."""
        for part in parts:
            if self.signals.told:
                return
            if why := self.settled(part):
                self.say(f"{part.name}: {why}")
            elif why := part.missing(self.state.rehearsal):
                self.keep(part, Result("skipped", why, now()))
            elif (limit_s := self.limit_s(part)) is None:
                minutes = part.planned(self.state.rehearsal).expected_min
                self.say(f"{part.name}: waits for the next call, for it takes about {minutes:g} min")
            else:
                self.run(part, limit_s)

    def settled(self, part: Part) -> str | None:
        """What an earlier call found, where that stands: a success, or a failure of this very code."""
        earlier = self.state.parts.get(part.name)
        if earlier is None or self.force:
            return None
        is_this_code = earlier.code == code_version.digest()
        if earlier.state == "ok":
            return f"ok already{'' if is_this_code else ', measured with other code'}; FORCE=1 measures again"
        is_final = earlier.state == "failed" or (earlier.state == "too long" and not part.resumable)
        if is_final and is_this_code and part.name not in self.named:
            return f"{earlier.state} before: {earlier.why}; --parts {part.name} tries again"
        return None

    def limit_s(self, part: Part) -> float | None:
        """How long it may take now; None where what is left of this call's minutes does not do."""
        planned = part.planned(self.state.rehearsal)
        if self.budget_s is None:
            return 60 * planned.limit_min
        left_s = self.budget_s - (time.monotonic() - self.began) - self.grace_s
        wanted_s = 60 * planned.expected_min
        fits = left_s >= (min(wanted_s, LEAST_S) if part.resumable else wanted_s)
        return min(60 * planned.limit_min, left_s) if fits else None

    def run(self, part: Part, limit_s: float) -> None:
        """Carry it out, and keep what became of it."""
        planned, log = part.planned(self.state.rehearsal), self.folder / f"{part.name}.log"
        earlier = self.state.parts.get(part.name)
        self.say(f"{part.name}: {part.shows}\n  {shlex.join(planned.command)}")
        begun = Result(
            "running",
            "the process that watched it was killed",
            now(),
            spent_s=earlier.spent_s if earlier and earlier.state != "ok" else 0.0,
            log=log.name,
            code=code_version.digest(),
            commit=code_version.origin()["commit"],
        )
        self.keep(part, begun)
        ended = carry_out(planned.command, log, limit_s, self.variables, self.signals, self.grace_s)
        word, why = self.judged(ended, limit_s, 60 * planned.limit_min)
        lines = last_lines(log)
        records = [path for pattern in part.leaves for path in sorted(self.results.glob(pattern))]
        self.keep(
            part,
            replace(
                begun,
                state=word,
                why=why,
                seconds=round(ended.seconds, 2),
                spent_s=round(begun.spent_s + ended.seconds, 2),
                exit=ended.code,
                reused=any(REUSED in line for line in lines),
                found=last_object(lines),
                tail="" if word == "ok" else "\n".join(lines[-TAIL_LINES:]),
                records=[str(path.relative_to(self.results)) for path in records],
            ),
        )

    def judged(self, ended: Ended, limit_s: float, own_limit_s: float) -> tuple[Word, str]:
        if ended.code == 0:
            return "ok", ""
        if ended.code is not None:
            how = f"exit code {ended.code}" if ended.code > 0 else f"killed by signal {-ended.code}"
            return "failed", how
        if self.signals.told:
            return "interrupted", "told to end"
        if limit_s < own_limit_s:
            return "interrupted", "this call's minutes were over"
        return "too long", f"it was ended at its limit of {own_limit_s / 60:g} min"

    def keep(self, part: Part, result: Result) -> None:
        """In the file of the state, before anything else happens; and say what it is."""
        self.state.parts[part.name] = result
        states.write(self.folder / states.NAME, self.state)
        if result.state != "running":
            self.say(f"{part.name}: {result.state}" + (f": {result.why}" if result.why else "")
                     + (f" ({result.seconds:.0f} s)" if result.seconds else ""))  # fmt: skip
            self.say(result.tail)
