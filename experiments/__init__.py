"""What does the paper do? Configs in, records and figures out: the trunk that joins sparsify, slurm and
analysis.
"""
