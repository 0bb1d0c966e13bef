"""Imports of a process from which workers are forked (`experiments.launch.fork_server`)."""

from __future__ import annotations

import signal

from slurm.worker_process import STOP_SIGNALS, exclude_loaded_objects_from_gc

with exclude_loaded_objects_from_gc():
    from experiments.worker import run as run

# Workers take them once they listen; this process ends with the one that started it.
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
