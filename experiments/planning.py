"""Where results lie, what this machine can do, and what a run needs before it can start. Imports nothing
heavy.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.records import Attempt, Store
from experiments import config as configs
from experiments import figures, sources
from experiments.orders import Planned
from slurm import environment

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Folders:
    """Where results lie. `shipped` comes with the repository, the others are this checkout's own."""

    results: Path = field(
        default_factory=lambda: Path(environment.results_root() or ROOT / "results").resolve()
    )

    @property
    def store(self) -> Store:
        return Store(self.results / "runs")

    @property
    def scratch(self) -> Path:
        return self.results / "launch"

    def launch(self, attempt: Attempt) -> Path:
        """An attempt's orders, and its starts with their notes."""
        return self.scratch / f"{attempt.run_id}-{attempt.number:03d}"

    @property
    def sweeps(self) -> Path:
        """What was submitted to SLURM."""
        return self.results / "sweeps"

    @property
    def code(self) -> Path:
        """Copies of the code, one for each version that was submitted."""
        return self.scratch / "code"

    @property
    def records(self) -> Path:
        return self.results / "records"

    @property
    def index(self) -> Path:
        """Which runs each figure was drawn from."""
        return self.records / "figures"

    @property
    def figures(self) -> Path:
        return self.results / "figures"

    @property
    def shipped(self) -> Path:
        return ROOT / "results" / "shipped"


def default_profile(overrides: Sequence[str]) -> str:
    """paper where there is a GPU, here or on the cluster that the words choose, else laptop."""
    if cluster := [word for word in overrides if word.startswith("cluster=")]:
        chosen = configs.resolve(cluster[-1:])["cluster"]
        if chosen["where"] == "slurm":
            return "laptop" if chosen["gpu"] == "none" else "paper"
    return "paper" if has_gpu() else "laptop"


def has_gpu() -> bool:
    """Does NVIDIA's driver list a GPU? Asked without torch, which takes seconds to import."""
    if not shutil.which("nvidia-smi"):
        return False
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def plan(item: str, profile: str, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The resolved configs of a figure's runs."""
    extra = [word for word in overrides if not word.startswith("profile=")]
    return [configs.resolve([*run, *extra]) for run in figures.load(item).runs(profile)]


def profile_of(overrides: Sequence[str]) -> str:
    """The profile that the words ask for, else this machine's default."""
    given = [word.partition("=")[2] for word in overrides if word.startswith("profile=")]
    profile = given[-1] if given else default_profile(overrides)
    if profile not in configs.options("profile"):
        raise ValueError(f"no profile {profile!r}; there are: {', '.join(configs.options('profile'))}")
    return profile


def provide(wanted: Sequence[dict[str, Any]], say: Callable[[str], None]) -> list[Planned]:
    """The same configs with their data at hand; a GPU that is asked for is there.

    Raises:
        ValueError: no data, or no GPU.
    """
    here = [config for config in wanted if config["cluster"]["where"] != "slurm"]
    if any(config["device"] == "cuda" for config in here) and not has_gpu():
        raise ValueError(
            "profile=paper (device=cuda) needs an NVIDIA GPU, and there is none; take profile=laptop"
        )
    once: dict[str, None] = {}
    planned = []
    for config in wanted:
        changed, root = sources.provide(config, lambda line: once.setdefault(line) or None)
        planned.append(Planned(changed, root))
    for line in once:
        say(line)
    return planned
