"""Experiments, from configs to records and figures.

The trunk that joins sparsify, slurm and analysis.
"""

from experiments.versions import check_python

check_python()
