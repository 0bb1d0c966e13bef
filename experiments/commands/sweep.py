from __future__ import annotations

from experiments.commands._arguments import ItemsAndSettings
from experiments.commands._messages import say
from experiments.launch.allocation import run_in_allocation

GROUP = "cluster"


def sweep(words: ItemsAndSettings, *, all: bool = False) -> int:
    """Make missing runs inside this allocation of SLURM's; slurm/sweep.sbatch calls this command.

    Args:
        words: figures, with settings for their runs; or the settings of one run, or of a grid.
        all: also make the runs that make a figure firmer, mostly with more seeds.
    """
    return run_in_allocation(words, say, include_additional=all)
