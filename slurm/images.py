"""Image files: the program that runs them, where they are, their architecture and their definition.

singularity/build makes them; slurm/container.py starts processes in them. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slurm import environment

ROOT = Path(__file__).parent.parent
IMAGE_FOLDER = "singularity/images"  # git-ignored; $SPARSIFY_IMAGES replaces it
RUNTIMES = ("apptainer", "singularity")

# A SIF file begins with a line for the shell, a magic word, version, architecture (SIF specification v1).
LAUNCH_BYTES, MAGIC, VERSION_BYTES, ARCH_BYTES = 32, b"SIF_MAGIC\0", 3, 3
ARCHITECTURE_BY_CODE = {b"02": "amd64", b"04": "arm64", b"06": "ppc64le"}  # others do not occur in clusters
ARCHITECTURE_BY_MACHINE = {
    "x86_64": "amd64",
    "aarch64": "arm64",
}  # where images use another word than the kernel

IMAGE_PYTHON = "/opt/sparsify/bin/python"  # in images with a Python environment
IMAGE_LABEL, DEFINITION_LABEL = "org.sparsify.image", "org.sparsify.definition"
TEMPLATE_FILES = ("singularity/sparsify.def", "singularity/two_ranks.py")
# Sources of images with the project's environment, and of those with Horovod.
PACKAGE_FILES = (
    "constraints.txt", "requirements/library.txt", "requirements/figures.txt", "requirements/train.txt",
    "requirements/transformers.txt",
)  # fmt: skip
HOROVOD_FILES = ("singularity/horovod/build",)


@dataclass(frozen=True)
class ContainerConfig:
    """An image that processes are to run in, and how; a choice of conf/container explains the fields."""

    name: str
    image: str
    runtime: str = "auto"
    python: str | None = None
    binds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def unpacked_runtime_folder() -> Path:
    """The folder into which slurm/devcluster/install-apptainer unpacks a runtime."""
    return environment.cache_folder() / "sparsify" / "apptainer"


def find_runtime(wanted: str = "auto") -> str | None:
    """The path of the program that runs images, from $PATH or else from `unpacked_runtime_folder`; None if there is none."""
    names = RUNTIMES if wanted == "auto" else (wanted,)
    places = (None, str(unpacked_runtime_folder() / "usr" / "bin"))  # None: PATH
    found = (shutil.which(name, path=place) for place in places for name in names)
    return next(filter(None, found), None)


@cache
def runtime_version(program: str) -> str:
    """'apptainer 1.4.5' or 'singularity-ce 4.1.0'."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.strip().replace(" version", "")


def image_folder() -> Path:
    """The folder of images."""
    named = Path(environment.folder_from_variable("SPARSIFY_IMAGES") or ROOT / IMAGE_FOLDER)
    return environment.require_utf8(named, "the folder of images (SPARSIFY_IMAGES)")


def image_path(image: str) -> Path:
    """The path of an image: a bare name is in `image_folder`, another relative path in the checkout."""
    path = Path(image).expanduser()
    return image_folder() / path if path.name == image else ROOT / path


def image_architecture(path: Path) -> str | None:
    """The machines for which an image was built; None if the file is not a SIF file."""
    with path.open("rb") as file:
        file.seek(LAUNCH_BYTES)
        header = file.read(len(MAGIC) + VERSION_BYTES + ARCH_BYTES)
    if not header.startswith(MAGIC):
        return None
    return ARCHITECTURE_BY_CODE.get(header[len(MAGIC) + VERSION_BYTES :].rstrip(b"\0"), "other")


def machine_architecture() -> str:
    """This machine's architecture, in the words of images."""
    return ARCHITECTURE_BY_MACHINE.get(platform.machine(), platform.machine())


def read_build_arguments(name: str) -> dict[str, str]:
    """The arguments of an image's definition, from singularity/NAME.args.

    Raises:
        ValueError: there is no such image.
    """
    path = ROOT / "singularity" / f"{name}.args"
    if not path.is_file():
        there = sorted(file.stem for file in path.parent.glob("*.args"))
        raise ValueError(f"no image {name!r}; there are: {', '.join(there)}")
    lines = (line for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def source_files(name: str) -> list[str]:
    """The files of the checkout from which an image is built."""
    words = read_build_arguments(name)
    return [
        *TEMPLATE_FILES,
        f"singularity/{name}.args",
        *(PACKAGE_FILES if words["environment"] == "project" else ()),
        *(HOROVOD_FILES if words["horovod"] == "yes" else ()),
    ]


def definition_digest(name: str) -> str:
    """12 hexadecimal digits of the SHA-256 of `source_files`: when they change, the image is out of date."""
    sha = hashlib.sha256()
    for file in source_files(name):
        content = (ROOT / file).read_bytes()
        sha.update(f"{file}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:12]


def container_config(name: str) -> ContainerConfig:
    """The choice of one of our images, for code without a configuration."""
    python = None if read_build_arguments(name)["environment"] == "none" else IMAGE_PYTHON
    return ContainerConfig(name, f"{name}.sif", python=python)


def inspect_image(path: Path, program: str | None) -> dict[str, Any]:
    """{"sha256", "labels"} of an image; without a program that reads them no labels.

    Reading gigabytes takes seconds. Both are therefore stored in a file beside the image, which is valid as
    long as the image's size and modification time do not change. In a read-only folder they are computed
    every time.
    """
    stat, note = path.stat(), path.with_name(f".{path.name}.json")
    seen = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        kept = json.loads(note.read_text())
        if {key: kept[key] for key in seen} == seen:
            return {"sha256": kept["sha256"], "labels": kept["labels"]}
    except (OSError, ValueError, KeyError):
        pass  # missing or unreadable: written again below
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            sha.update(block)
    found = {"sha256": sha.hexdigest(), "labels": read_labels(path, program) if program else {}}
    part = note.with_name(f"{note.name}.{platform.node()}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps({**seen, **found}))
        part.replace(note)
    except OSError:
        part.unlink(missing_ok=True)
    return found


def read_labels(path: Path, program: str) -> dict[str, str]:
    """The labels that the image was built with; an image may have none."""
    command = [program, "inspect", "--json", "--labels", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{path} can't be read by {program}: {last_line(done.stderr)}")
    found: dict[str, str] | None = json.loads(done.stdout)["data"]["attributes"].get("labels")
    return found or {}


def last_line(text: str) -> str:
    """The last line of a program's error output, which says what went wrong."""
    return (text.strip().splitlines() or ["no word of why"])[-1]
