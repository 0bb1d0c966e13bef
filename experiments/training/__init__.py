"""How a model is trained: the loop, its log, checkpoints, data sets. Knows no processes and no SLURM."""
