"""Training a model: the loop, its log, checkpoints, data sets.

Knows no processes and no SLURM.
"""
