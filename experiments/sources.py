"""Where data sets come from: found, downloaded, or replaced by what a machine without network has. No torch
needed.
"""

from __future__ import annotations

import copy
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.tasks import REGISTRY as TASKS
from slurm import environment

ROOT = Path(__file__).parent.parent
FOLDER = "cifar-10-batches-py"
DOWNLOAD_TIMEOUT_S = 20  # of silence on the line, not of the whole download

# torchvision knows address, checksum and layout; run apart, it keeps torch out of this process.
DOWNLOAD = f"""
import socket, sys
socket.setdefaulttimeout({DOWNLOAD_TIMEOUT_S})
from torchvision.datasets import CIFAR10
CIFAR10(sys.argv[1], download=True)
"""


def cifar10_root(config: dict[str, Any]) -> Path:
    """The folder that should hold CIFAR-10: data.root, else $DATA_ROOT, else data/ of the checkout."""
    return Path(config["data"]["root"] or environment.data_root() or ROOT / "data").expanduser().resolve()


def provide(config: dict[str, Any], say: Any) -> tuple[dict[str, Any], Path | None]:
    """The config with its data at hand, and the folder they are in.

    Where CIFAR-10 is neither found nor downloadable, a config that allows it is changed to scikit-learn's
    digits, which `say` tells in one line.

    Raises:
        ValueError: no data, and no substitute allowed.
    """
    task = config["task"]["name"]
    if not task.endswith("_cifar10"):
        return config, None
    root = cifar10_root(config)
    if (root / FOLDER).is_dir():
        return config, root
    if config["data"]["root"] is not None:
        raise ValueError(f"data.root={root} has no {FOLDER}; point it at the folder that holds {FOLDER}")
    if download(root, say):
        return config, root
    changed = substituted(config)
    if config["data"]["fallback"] != "digits" or changed is None:
        raise ValueError(
            f"CIFAR-10 is not in {root} and could not be downloaded: put {FOLDER} there, or say where it is "
            "with data.root=FOLDER or $DATA_ROOT"
        )
    name = changed["task"]["name"]
    say(f"CIFAR-10 is not at hand (see DATA_ROOT): using scikit-learn's digits instead, task {name}")
    return changed, None


def substituted(config: dict[str, Any]) -> dict[str, Any] | None:
    """The same config on scikit-learn's digits, None where there is no such task."""
    task = config["task"]
    name = task["name"].removesuffix("_cifar10") + "_digits"
    if name not in TASKS.names():
        return None
    changed = copy.deepcopy(config)
    changed["task"] = {key: value for key, value in task.items() if key in TASKS.defaults(name)} | {
        "name": name
    }
    return changed


def download(root: Path, say: Any) -> bool:
    """Let torchvision download CIFAR-10 to `root`; False where that fails."""
    if not reachable("www.cs.toronto.edu"):
        return False
    say(f"downloading CIFAR-10 (163 MiB) to {root}")
    part = root / "download.part"
    try:
        part.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, "-c", DOWNLOAD, str(part)], capture_output=True, check=False)
        if done.returncode == 0:
            (part / FOLDER).replace(root / FOLDER)
        return done.returncode == 0
    finally:
        shutil.rmtree(part, ignore_errors=True)


def reachable(host: str) -> bool:
    """Does anybody answer there? Saves starting torch only to learn that there is no network."""
    try:
        socket.create_connection((host, 443), timeout=5).close()
    except OSError:
        return False
    return True
