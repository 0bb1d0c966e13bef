"""Benchmarks, by name."""

from __future__ import annotations

import os
from typing import Any

from experiments.bench import REGISTRY
from experiments.commands._arguments import BenchName
from experiments.commands._messages import is_forced
from sparsify.ranges import PositiveFloat

GROUP = "here"


def bench(
    benchmark: BenchName,
    *,
    force: bool = False,
    ship: bool = False,
    minutes: PositiveFloat | None = None,
    **options: Any,
) -> int:
    """A benchmark: medians with their spread, recorded; called again, it goes on where it was stopped.

    `bench NAME --help` says what each takes. What this code has measured is shown as it was recorded, in
    results/bench. The last line is one JSON object.

    Args:
        benchmark: its name.
        force: measure again what is measured already.
        ship: copy the newest records, and what is drawn of them, into results/shipped.
        minutes: of this call; what does not fit waits for the next one.
    """
    REGISTRY.check_name(benchmark)
    if force := is_forced(force):
        os.environ["FORCE"] = "1"  # for what a benchmark starts
    made = REGISTRY.import_function(benchmark)(**options)
    return made if isinstance(made, int) else made.run(benchmark, force=force, ship=ship, minutes=minutes)
