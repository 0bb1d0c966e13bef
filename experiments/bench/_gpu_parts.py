"""What a GPU's first minutes are spent on, and what was promised of them, as gpu_first.yaml has it."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct, convert
from omegaconf import OmegaConf

from experiments.config import data_root

TOY_LIMIT_MIN = 5.0  # on two idle cores


class GpuPart(Struct, frozen=True, forbid_unknown_fields=True):
    """One command, run as a process of its own; and a small one for rehearsals."""

    name: str
    shows: str
    real: str  # its words: of `python -m experiments`; or of Python, where they begin with -
    expected_min: float  # estimated
    limit_min: float  # after which it is told to end
    toy: str  # the words of a rehearsal
    toy_min: float = 0.2
    resumable: bool = False  # told to end, it saves, and goes on from there when it is run again
    under: str = ""  # a program that it is run by, with its words
    packages: tuple[str, ...] = ()  # of Python, that it needs
    programs: tuple[str, ...] = ()  # that it needs
    cifar10: bool = False  # in earnest; offline, nothing can be downloaded in a GPU's minutes

    def minutes(self, rehearsal: bool) -> tuple[float, float]:
        """Minutes that it should take, and its limit."""
        return (self.toy_min, TOY_LIMIT_MIN) if rehearsal else (self.expected_min, self.limit_min)

    def command(self, rehearsal: bool) -> list[str]:
        words = shlex.split(self.toy if rehearsal else self.real)
        module = words if words[0].startswith("-") else ["-m", "experiments", *words]
        return [*([] if rehearsal else shlex.split(self.under)), sys.executable, *module]

    def missing(self, rehearsal: bool) -> str:
        """The reason why it can't be run here; empty where it can."""
        for name in self.packages:
            if not find_spec(name):
                return f"the Python package {name} is not installed"
        for name in self.programs:
            if not shutil.which(name):
                return f"{name} is not installed, or not on PATH"
        if self.cifar10 and not rehearsal and not data_root.has(data_root.root_of(None), "cifar10"):
            return "CIFAR-10 was not found: set DATA_ROOT to the folder that holds it"
        return ""


class GpuPromise(Struct, frozen=True, forbid_unknown_fields=True):
    """A number that a GPU must reach."""

    text: str
    bound: float  # it is to be at most this, or at least where `at_least`
    unit: str
    predicted: str  # before the first GPU, from counts of bytes, launches and instructions
    part: str  # that measures it
    # Where it is in the object that the part prints last; without, the minutes of the whole command over all
    # its calls, start and validation included.
    at: tuple[str | int, ...] = ()
    at_least: bool = False

    def read(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The number with its spread, from what became of the part; None where it is not in there."""
        value: Any = row["found"]
        if not self.at:
            value = None if row["reused"] else row["spent_s"] / 60
        for step in self.at:
            try:
                value = value[step]
            except (LookupError, TypeError):
                return None
        return value if isinstance(value, dict) or value is None else {"median": value, "n": 1}


_file: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("gpu_first.yaml")), resolve=True)
PARTS = convert(_file["parts"], tuple[GpuPart, ...])
PROMISES = convert(_file["promises"], tuple[GpuPromise, ...])
