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
    """Measure a benchmark and record medians with their spread; go on where it was stopped.

    `bench NAME --help` says which options each benchmark has. Cases that this code has measured already are
    shown from the records in results/bench. The last line is one JSON object.

    Args:
        benchmark: the name of the benchmark.
        force: measure again what is measured already.
        ship: copy the newest records, and what is drawn from them, into results/shipped.
        minutes: the longest time for this call; cases that do not fit wait for the next call.
    """
    REGISTRY.check_name(benchmark)
    force = is_forced(force)
    if force:
        os.environ["FORCE"] = "1"  # for what a benchmark starts
    suite_or_code = REGISTRY.import_function(benchmark)(**options)
    return (
        suite_or_code
        if isinstance(suite_or_code, int)
        else suite_or_code.run(benchmark, force=force, ship=ship, minutes=minutes)
    )
