from __future__ import annotations

from experiments.commands._arguments import ItemsAndSettings
from experiments.commands._messages import say
from experiments.launch.allocation import run_in_allocation

GROUP = "cluster"


def sweep(words: ItemsAndSettings, *, all: bool = False) -> int:
    """Make the missing runs here, inside an allocation of SLURM's; slurm/sweep.sbatch calls it.

    Args:
        words: figures, with settings for their runs; or the settings of one run, or of a grid.
        all: of a figure, also the runs that make it firmer, mostly with more seeds.
    """
    return run_in_allocation(words, say, all)
