"""Experiments, from configs to records and figures.

The trunk that joins sparsify, slurm and analysis.
"""
