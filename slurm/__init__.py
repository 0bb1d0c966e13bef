"""Functions on GPUs, by SLURM or on this machine: containers, job arrays, worker processes; no gradients."""
