from __future__ import annotations

from experiments.commands._make import is_all, say
from experiments.launch.allocation import run_in_allocation


def sweep(words: list[str], options: set[str]) -> int:
    """Make the grid's missing runs here, inside an allocation of SLURM's; slurm/sweep.sbatch calls it."""
    return run_in_allocation(words, say, is_all(options))
