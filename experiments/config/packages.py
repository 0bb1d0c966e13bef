"""The Python packages that commands need: what is done about one that is missing or can't be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

OURS = ("analysis", "experiments", "slurm", "sparsify", "tests")
# As they are imported; requirements/ has their names on package indices.
LIBRARY = ("numpy", "torch")
FIGURES = (
    "argcomplete", "filelock", "griffe", "hydra", "jinja2", "markupsafe", "matplotlib", "msgspec", "numpy",
    "omegaconf", "pandas", "pyarrow", "pynvml", "rich", "scipy",
)  # fmt: skip
TRAIN = ("greenlet", "psutil", "sklearn", "submitit", "torchvision", *LIBRARY)
LONGEST = 300  # characters of a reason; some packages write a page
# What the loader of libraries says where an address space (ulimit -v) or a machine is too small.
NO_MEMORY = ("failed to map segment", "cannot allocate memory")


def trouble(error: ImportError) -> tuple[str, str] | None:
    """The class of this failure and a sentence for people; None where the error is in our own code."""
    package = (error.name or "").partition(".")[0]
    if package in OURS or "partially initialized module" in str(error):
        return None
    if isinstance(error, ModuleNotFoundError):
        return (
            "environment",
            f"the Python package {package} is not installed in {sys.prefix}: {_install(package)}",
        )
    said = " ".join(str(error).split())[:LONGEST]
    if any(words in said.lower() for words in NO_MEMORY):
        return (
            "memory",
            f"a Python package does not fit into memory ({said}); see `ulimit -v`, or cluster.mem_gb",
        )
    return (
        "environment",
        f"a Python package can't be loaded ({said}); `make clean`, then `make .venv/.train`, installs all",
    )


def _install(package: str) -> str:
    """How it is."""
    if package in FIGURES:
        return "`make .venv/.figures` installs what figures need, `make .venv/.train` what runs need"
    if package in TRAIN:
        return "`make .venv/.train` installs what runs need"
    return f"`{Path(sys.executable).name} -m pip install {package}` may install it"
