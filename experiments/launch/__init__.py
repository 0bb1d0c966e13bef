"""Planned runs -> processes: on this machine, or as jobs of SLURM. Every attempt begins in attempt.py."""
