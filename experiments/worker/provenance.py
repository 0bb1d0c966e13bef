"""Provenance of a record: machine, software, code, data.

No folder names: records are meant to be shared.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from typing import Any

import psutil
import torch

from experiments.config import code_version
from experiments.worker.cores import cpu_model, usable_cpus
from experiments.worker.hardware import gpu_bus_id
from slurm import environment, gpus
from sparsify.core import huge_pages

PACKAGES = (
    "torch", "torchvision", "numpy", "hydra-core", "submitit", "greenlet", "triton", "horovod", "torchcomms",
)  # fmt: skip


def collect_provenance(data_name: str, data_digest: str, device: torch.device) -> dict[str, Any]:
    """Return the facts that a reader needs in order to trust, compare or repeat a record."""
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": len(usable_cpus()) or os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "huge_pages": huge_pages.system_setting(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "before": machine_state(device),
        "topology": _run_command(["nvidia-smi", "topo", "-m"]) if device.type == "cuda" else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **package_versions()},
        **code_version.git_state(),
        "data": {"name": data_name, "digest": data_digest},
        "slurm": environment.recorded_variables("SLURM"),
        "horovod": environment.recorded_variables("HOROVOD"),
        "torch": environment.recorded_variables("TORCH"),
        "image": None,  # no container
    }


def machine_state(device: torch.device) -> dict[str, Any]:
    """Return facts that may drift while a run goes on, for before and after: load, GPU clocks."""
    return {
        "load": round(os.getloadavg()[0], 2),
        # Users of clusters can't lock clocks, so we note them.
        "gpu": gpus.gpu_state(gpu_bus_id(device.index)) if device.type == "cuda" else None,
    }


def package_versions() -> dict[str, str]:
    """Return the versions of PACKAGES, by name, of those that are installed."""
    version_by_package = {}
    for name in PACKAGES:
        try:
            version_by_package[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return version_by_package


def _run_command(command: list[str]) -> str | None:
    """Return the output of a command, or None where it is absent or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None
