"""Progress of runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

LINE_S = 30.0  # between two plain lines


class ProgressBar:
    """Shows the current runs, their steps, the time left, and runs done and left."""

    def __init__(self, num_runs: int, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self.num_runs, self.stream = num_runs, stream
        self.done = 0
        self.known_steps: dict[str, int] = {}
        self.began = self.last_line = time.monotonic()
        self.bar: tqdm[Any] | None = None
        if stream.isatty() and num_runs:
            layout = "{desc} |{bar:20}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"
            self.bar = tqdm(total=1, file=stream, bar_format=layout, leave=False, dynamic_ncols=True)

    def say(self, line: str) -> None:
        """One visible line, beside the bar. A terminal that is gone is told nothing, and ends nothing."""
        with contextlib.suppress(OSError):
            tqdm.write(line, file=self.stream)
            self.stream.flush()

    def finished(self, run: str) -> None:
        self.done += 1
        self.say(f"[{self.done}/{self.num_runs}] {run}")

    def show(self, running: list[tuple[str, int, int | None]], num_waiting: int) -> None:
        """Args: running: name, steps done, steps in all (None until the run has said)."""
        for name, _, total in running:
            if total:
                self.known_steps[name] = total
        current = {name for name, _, _ in running}
        finished = sum(steps for name, steps in self.known_steps.items() if name not in current)
        steps = finished + sum(done for _, done, _ in running)
        # Runs that have not said their length yet are taken to be as long as the others.
        total = sum(self.known_steps.values())
        if self.known_steps:
            total = round(total / len(self.known_steps) * max(self.num_runs, len(self.known_steps)))
        what = ", ".join(name.rsplit("-", 1)[0] for name, _, _ in running)
        if self.bar is not None:
            self.bar.total = max(total, steps, 1)
            self.bar.n = steps
            self.bar.set_description_str(what, refresh=False)
            self.bar.set_postfix_str(
                f"{self.done} runs done, {num_waiting + len(running)} left", refresh=False
            )
            with contextlib.suppress(OSError):
                self.bar.refresh()
        elif running and time.monotonic() - self.last_line > LINE_S:
            self.last_line = time.monotonic()
            elapsed = self.last_line - self.began
            self.say(
                f"{what}: {steps} of {total or '?'} steps{_left(steps, total, elapsed)}; "
                f"{self.done} runs done, {num_waiting} waiting"
            )

    def close(self) -> None:
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()


def _left(steps: int, total: int, elapsed: float) -> str:
    """How long it will take; variants that take turns go on beyond their least number of rounds."""
    if steps > total:
        return ", until the ratios are known or the time is over"
    return f", about {elapsed / steps * (total - steps) / 60:.0f} min left" if steps else ""
