"""Image files: the program that runs them, their folder, their architecture and their definition.

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
from typing import NamedTuple

from slurm import environment

ROOT = Path(__file__).parent.parent
IMAGE_FOLDER = "singularity/images"  # git-ignored; $SPARSIFY_IMAGES replaces it
RUNTIMES = ("apptainer", "singularity")

# A SIF file begins with a line for the shell, a magic word, version, architecture (SIF specification v1).
LAUNCH_BYTES = 32
MAGIC = b"SIF_MAGIC\0"
VERSION_BYTES = 3
ARCH_BYTES = 3
ARCHITECTURE_BY_CODE = {b"02": "amd64", b"04": "arm64", b"06": "ppc64le"}  # others do not occur in clusters
ARCHITECTURE_BY_MACHINE = {
    "x86_64": "amd64",
    "aarch64": "arm64",
}  # where images use another word than the kernel

IMAGE_PYTHON = "/opt/sparsify/bin/python"  # in images with a Python environment
IMAGE_LABEL = "org.sparsify.image"
DEFINITION_LABEL = "org.sparsify.definition"
TEMPLATE_FILES = ("singularity/sparsify.def", "singularity/two_ranks.py")
# Sources of images with the project's environment, and of those with Horovod.
PACKAGE_FILES = (
    "constraints.txt",
    "requirements/library.txt",
    "requirements/figures.txt",
    "requirements/train.txt",
    "requirements/transformers.txt",
)
HOROVOD_FILES = ("singularity/horovod/build",)


@dataclass(frozen=True)
class ContainerConfig:
    """An image that processes run in, and its options; a file of conf/container explains the fields."""

    name: str
    image: str
    runtime: str = "auto"
    python: str | None = None
    binds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def unpacked_runtime_folder() -> Path:
    """Return the folder into which slurm/devcluster/install-apptainer unpacks a runtime."""
    return environment.cache_folder() / "sparsify" / "apptainer"


def find_container_runtime(name: str = "auto") -> str | None:
    """Return the path of the program that runs images; None where there is none.

    The program is looked for on $PATH, then in `unpacked_runtime_folder`.

    Args:
        name: name of the program; auto for any of RUNTIMES.
    """
    names = RUNTIMES if name == "auto" else (name,)
    for search_path in (None, str(unpacked_runtime_folder() / "usr" / "bin")):  # None: $PATH
        for program in names:
            path = shutil.which(program, path=search_path)
            if path:
                return path
    return None


@cache
def runtime_version(program: str) -> str:
    """Return the name and version of a runtime, as 'apptainer 1.4.5' or 'singularity-ce 4.1.0'."""
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return output.strip().replace(" version", "")


def image_folder() -> Path:
    """Return the folder of images."""
    folder = Path(environment.folder_from_variable("SPARSIFY_IMAGES") or ROOT / IMAGE_FOLDER)
    return environment.require_utf8(folder, "the folder of images (SPARSIFY_IMAGES)")


def image_path(image: str) -> Path:
    """Return an image's path: a bare name is in `image_folder`, another relative path in the checkout."""
    path = Path(image).expanduser()
    return image_folder() / path if path.name == image else ROOT / path


def sif_architecture(path: Path) -> str | None:
    """Return the architecture for which an image was built; None if the file is not a SIF file."""
    with path.open("rb") as file:
        file.seek(LAUNCH_BYTES)
        header = file.read(len(MAGIC) + VERSION_BYTES + ARCH_BYTES)
    if not header.startswith(MAGIC):
        return None
    return ARCHITECTURE_BY_CODE.get(header[len(MAGIC) + VERSION_BYTES :].rstrip(b"\0"), "other")


def machine_architecture() -> str:
    """Return this machine's architecture, in the words of images."""
    return ARCHITECTURE_BY_MACHINE.get(platform.machine(), platform.machine())


def build_arguments_file(name: str) -> Path:
    """Return the path of the arguments of an image's definition."""
    return ROOT / "singularity" / f"{name}.args"


def read_build_arguments(name: str) -> dict[str, str]:
    """Return the arguments of an image's definition, from singularity/NAME.args.

    Raises:
        ValueError: there is no such image.
    """
    path = build_arguments_file(name)
    if not path.is_file():
        names = sorted(file.stem for file in path.parent.glob("*.args"))
        raise ValueError(f"no image {name!r}; there are: {', '.join(names)}")
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def image_source_files(name: str) -> list[str]:
    """Return the files of the checkout from which an image is built."""
    arguments = read_build_arguments(name)
    files = [*TEMPLATE_FILES, f"singularity/{name}.args"]
    if arguments["environment"] == "project":
        files += PACKAGE_FILES
    if arguments["horovod"] == "yes":
        files += HOROVOD_FILES
    return files


def image_definition_digest(name: str) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of an image's sources.

    When they change, the image is out of date.
    """
    sha = hashlib.sha256()
    for file in image_source_files(name):
        content = (ROOT / file).read_bytes()
        sha.update(f"{file}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:12]


def default_container_config(name: str) -> ContainerConfig:
    """Return the default container of one of our images, for code without a configuration."""
    python = None if read_build_arguments(name)["environment"] == "none" else IMAGE_PYTHON
    return ContainerConfig(name, f"{name}.sif", python=python)


class ImageInspection(NamedTuple):
    """The digest and the labels of an image."""

    sha256: str
    labels: dict[str, str]


def inspect_image_with_cache_file(path: Path, program: str | None) -> ImageInspection:
    """Return the digest and the labels of an image; without a program that reads them, no labels.

    Reading gigabytes takes seconds. Both are therefore stored in a file beside the image, which is valid as
    long as the image's size and modification time do not change. In a read-only folder they are computed
    every time.
    """
    stat = path.stat()
    version = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    cache_file = path.with_name(f".{path.name}.json")
    try:
        cached = json.loads(cache_file.read_text())
        if {key: cached[key] for key in version} == version:
            return ImageInspection(cached["sha256"], cached["labels"])
    except (OSError, ValueError, KeyError):
        pass  # missing or unreadable: written again below
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            sha.update(block)
    inspection = ImageInspection(sha.hexdigest(), read_image_labels(path, program) if program else {})
    part = cache_file.with_name(f"{cache_file.name}.{platform.node()}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps({**version, **inspection._asdict()}))
        part.replace(cache_file)
    except OSError:
        part.unlink(missing_ok=True)
    return inspection


def read_image_labels(path: Path, program: str) -> dict[str, str]:
    """Return the labels that the image was built with; an image may have none."""
    command = [program, "inspect", "--json", "--labels", str(path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise ValueError(f"{path} can't be read by {program}: {last_error_line(process.stderr)}")
    labels: dict[str, str] | None = json.loads(process.stdout)["data"]["attributes"].get("labels")
    return labels or {}


def last_error_line(stderr: str) -> str:
    """Return the last line of a program's error output, which says what went wrong."""
    return (stderr.strip().splitlines() or ["no word of why"])[-1]
