"""A command and a choice of conf/container -> the command line that runs it in the image.

Only this module decides what a container sees of the machine: folders, GPUs, environment variables. It works
the same with apptainer and with singularity; without an image, or where srun makes the container
(slurm/pyxis.py), the result is the command itself. Standard library only.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm import images, pyxis
from slurm.images import ContainerConfig

START_TIMEOUT_S = 120.0  # for a container that does nothing; a file system may be slow at first

# The variables that enter a container: a worker's rank, job, threads and links. All others stay outside: the
# host's PYTHONPATH or LD_LIBRARY_PATH are useless in the image, or harmful.
PASSED_VARIABLE = re.compile(
    r"(SPARSIFY|SLURM|SLURMD|OMPI|PRTE|PMI|PMIX|UCX|FI|HOROVOD|NCCL|GLOO|TORCH|PYTORCH|TORCHELASTIC)_\w+"
    r"|(OMP|GOMP|KMP|MKL|OPENBLAS|CUBLAS|CUDNN)_\w+"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING)|NVIDIA_TF32_OVERRIDE"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|DATA_ROOT|PYTHON(UNBUFFERED|DONTWRITEBYTECODE|HASHSEED|FAULTHANDLER|WARNINGS)|TZ"
)
SECRET_VARIABLE = re.compile(
    r"SECRET|TOKEN|PASSWORD|JWT|_KEY$"
)  # never: all users of a node can read command lines

# Folders that are never mounted: the image's own system, and what the runtime shares by itself.
SYSTEM_FOLDERS = {Path("/"), Path("/usr/local")} | {
    Path("/", name)
    for name in ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "sbin", "sys", "tmp", "usr", "var")
}


def wrap_command(
    container: ContainerConfig | None,
    command: Sequence[str],
    binds: Sequence[Path],
    cwd: Path,
    environment: Mapping[str, str],
    gpu: bool,
    for_people: bool = False,
) -> list[str]:
    """The command line that runs `command` in the image, or `command` itself without one.

    Args:
        command: a Python and its arguments. Where the image has a Python of its own (`container.python`),
            that one runs instead.
        binds: folders that the process needs, mounted under the same paths as outside.
        environment: the process gets those that PASSED names, unchanged. They become words of the command
            line, because runtimes split `--env` at commas and pass APPTAINERENV_ variables through a shell.
        for_people: show it on a machine that may have neither the program nor the image.

    Raises:
        ValueError: there is no program that runs images, or no image.
    """
    if container is None:
        return [*command]
    if pyxis.is_pyxis(container):
        return [container.python or command[0], *command[1:]]
    if for_people:
        wanted, image = container.runtime, images.image_path(container.image)
        program = images.find_runtime(wanted) or ("apptainer" if wanted == "auto" else wanted)
    else:
        program, image = _runtime_program(container), _image_file(container)
    words = [program, "--quiet", "exec", "--cleanenv", "--no-home", "--pwd", str(cwd)]
    # No --contain: ranks of one node communicate through /dev/shm, and each would get its own.
    if os.geteuid() == 0:
        words.append("--userns")  # root in a virtual machine may lack a capability that the runtime needs
    if gpu:
        words.append("--nv")
    for bind in folders_to_mount([*binds, cwd]):
        words += ["--mount", format_mount(bind)]
    for own in container.binds:
        words += ["--bind", own]
    assignments = [
        f"{name}={value}" for name, value in sorted(environment.items()) if can_enter_container(name)
    ]
    python = container.python or command[0]
    return [*words, *container.options, str(image), "env", *assignments, python, *command[1:]]


def srun_options(container: ContainerConfig | None, binds: Sequence[Path], cwd: Path) -> list[str]:
    """What srun is told where it makes the container of its tasks; nothing where a worker's command does."""
    if container is None or not pyxis.is_pyxis(container):
        return []
    return pyxis.srun_options(container, folders_to_mount([*binds, cwd]), cwd)


def can_enter_container(name: str) -> bool:
    """Tell whether this variable may enter a container."""
    return PASSED_VARIABLE.fullmatch(name) is not None and SECRET_VARIABLE.search(name) is None


def folders_to_mount(folders: Sequence[Path]) -> list[Path]:
    """The folders to mount: each once, none inside another; for links their targets as well."""
    paths = {path for folder in folders for path in (Path(os.path.abspath(folder)), folder.resolve())}
    wanted = paths - SYSTEM_FOLDERS
    return sorted(path for path in wanted if not set(path.parents) & wanted)


def format_mount(folder: Path) -> str:
    """The value of --mount for a folder: CSV, so that its path may contain commas, colons and quotes."""
    line = io.StringIO()
    fields = ["type=bind", f"source={folder}", f"destination={folder}"]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def image_provenance(container: ContainerConfig) -> dict[str, Any]:
    """Provenance: which image and which runtime."""
    if pyxis.is_pyxis(container):
        return pyxis.image_provenance(container)
    program, image = _runtime_program(container), _image_file(container)
    found = images.inspect_image(image, program)
    return {
        "name": container.name,
        "file": image.name,
        "sha256": found["sha256"],
        "arch": images.image_architecture(image),
        "runtime": Path(program).name,
        "runtime_version": images.runtime_version(program),
        "definition": found["labels"].get(images.DEFINITION_LABEL),
    }


def check_container(container: ContainerConfig) -> None:
    """Make sure that processes can be started in the container on this machine, by starting one.

    Raises:
        ValueError: why they cannot, and what to do.
    """
    if pyxis.is_pyxis(container):
        return pyxis.check_pyxis(container)
    program, image = _runtime_program(container), _image_file(container)
    built_for = images.image_architecture(image)
    if built_for is None:
        raise ValueError(
            f"container.image={image} is no SIF image; build one with `{_build_command(container)}`"
        )
    if built_for != images.machine_architecture():
        raise ValueError(
            f"container.image={image} is for {built_for} machines, but this one is {images.machine_architecture()}; build it "
            f"here with `{_build_command(container)}`"
        )
    labels = images.inspect_image(image, program)["labels"]
    name, definition = labels.get(images.IMAGE_LABEL), labels.get(images.DEFINITION_LABEL)
    # An image that is not ours has no such label; whoever chose it knows what is in it.
    if name is not None and definition != (now := images.definition_digest(name)):
        raise ValueError(
            f"container.image={image} was built from another definition ({definition}) than the checkout's "
            f"({now}): other packages or another recipe; build it again with `make sif IMAGE={name}`"
        )
    check_container_starts(container)


def check_container_starts(container: ContainerConfig) -> None:
    """Start a process in the container that does nothing; needs no checkout.

    Raises:
        ValueError: why it does not start, and what to do.
    """
    if pyxis.is_pyxis(container):  # a task that asks is in it
        return pyxis.check_pyxis(container)
    here = [Path(sys.prefix), Path(sys.base_prefix)]
    command = wrap_command(container, [sys.executable, "-c", ""], here, images.ROOT, {}, gpu=False)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"container={container.name}: {command[0]} did not start within {START_TIMEOUT_S:.0f} s; is "
            f"the file system that holds {container.image} well?"
        ) from None
    if done.returncode:
        raise ValueError(
            f"container={container.name}: {container.python or sys.executable} does not start in "
            f"{container.image}: {images.last_line(done.stderr)}"
        )


def _runtime_program(container: ContainerConfig) -> str:
    wanted = container.runtime
    if (program := images.find_runtime(wanted)) is None:
        sought = "neither apptainer nor singularity is" if wanted == "auto" else f"{wanted} is not"
        raise ValueError(
            f"container={container.name} was asked for, but {sought} here; load the cluster's module (and "
            "name it in cluster.setup, for the jobs), or say container=none"
        )
    return program


def _image_file(container: ContainerConfig) -> Path:
    path = images.image_path(container.image)
    if not path.is_file():
        raise ValueError(
            f"container={container.name}: there is no image {path}; build it with `{_build_command(container)}`, "
            "or name another with container.image=FILE"
        )
    return path


def _build_command(container: ContainerConfig) -> str:
    """The command that builds this image; a description of somebody's own has a name of its own."""
    named = (container.name, Path(container.image).stem)
    known = [name for name in named if (images.ROOT / "singularity" / f"{name}.args").exists()]
    return f"make sif IMAGE={(*known, *named)[0]}"
