"""The versions of Python and of packages with which this is tested.

Any Python 3 can run this file, also by its path. `experiments` and the Makefile do so before anything else,
so that a Python that is too old gets a sentence instead of a syntax error.
"""

import re
import sys

# The oldest and the newest. pyproject.toml and requirements/ have the same for pip.
PYTHON = ((3, 10), (3, 14))
PACKAGES = {"torch": ((2, 11), (2, 15)), "hydra-core": ((1, 3), (1, 4))}


def check_python() -> None:
    """Exit with code 2 and a sentence where this Python is older or newer than those that are tested."""
    oldest, newest = PYTHON
    version = sys.version_info[:2]
    if oldest <= version <= newest:
        return
    sys.stderr.write(
        f"this needs Python {_format_range(PYTHON)}, and {sys.executable} is {_format_version(version)}: "
        f"`make PYTHON=python{_format_version(newest)} .venv/.train` makes .venv, and "
        "`. .venv/bin/activate` takes the Python in it\n"
    )
    raise SystemExit(2)


def check_packages() -> None:
    """Refuse packages that are older or newer than those that are tested. One may be missing.

    Raises:
        ValueError: torch or Hydra is older or newer.
    """
    from importlib import metadata  # which Python has since 3.8

    for name, (oldest, newest) in PACKAGES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not oldest <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= newest:
            raise ValueError(
                f"this is tested with {name} {_format_range((oldest, newest))}, and {sys.prefix} has "
                f"{version}: `make clean`, then `make .venv/.train`, installs one of these; to try {version} "
                "all the same, widen the range in experiments/versions.py and run `make test`"
            )


def _format_range(versions: "tuple[tuple[int, int], tuple[int, int]]") -> str:
    return " to ".join(map(_format_version, versions))


def _format_version(version: "tuple[int, int]") -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    check_python()
