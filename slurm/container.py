"""The command line that runs a command in an image.

Only this module decides which folders, GPUs and environment variables of the machine a container sees. It
works alike with apptainer and with singularity. Without an image, or where srun makes the container
(slurm/pyxis.py), the command line is the command itself. Standard library only.
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
SECRET_VARIABLE = re.compile(r"SECRET|TOKEN|PASSWORD|JWT|_KEY$")  # all users of a node can read command lines

# Folders that are never mounted: the image's own system, and those that the runtime shares by itself.
SYSTEM_FOLDERS = {Path("/"), Path("/usr/local")} | {
    Path("/", name)
    for name in ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "sbin", "sys", "tmp", "usr", "var")
}


def wrap_command(
    container: ContainerConfig | None,
    command: Sequence[str],
    binds: Sequence[Path],
    cwd: Path,
    variables: Mapping[str, str],
    gpu: bool,
    for_display: bool = False,
) -> list[str]:
    """Return the command line that runs `command` in the image, or `command` itself without one.

    Args:
        command: a Python and its arguments. Where the image has a Python of its own (`container.python`),
            that one runs instead.
        binds: folders that the process needs, mounted under the same paths as outside.
        variables: the process gets those that PASSED_VARIABLE names, unchanged. They become words of the
            command line, because runtimes split `--env` at commas and pass APPTAINERENV_ variables through a
            shell.
        for_display: show it on a machine that may have neither the program nor the image.

    Raises:
        ValueError: there is no program that runs images, or no image.
    """
    if container is None:
        return [*command]
    python = container.python or command[0]
    if pyxis.is_pyxis(container):
        return [python, *command[1:]]
    if for_display:
        image = images.image_path(container.image)
        default = "apptainer" if container.runtime == "auto" else container.runtime
        program = images.find_container_runtime(container.runtime) or default
    else:
        image = _image_file(container)
        program = _runtime_program(container)
    words = [program, "--quiet", "exec", "--cleanenv", "--no-home", "--pwd", str(cwd)]
    # No --contain: ranks of one node communicate through /dev/shm, and each would get its own.
    if os.geteuid() == 0:
        words.append("--userns")  # root in a virtual machine may lack a capability that the runtime needs
    if gpu:
        words.append("--nv")
    for folder in folders_to_mount([*binds, cwd]):
        words += ["--mount", format_mount(folder)]
    for bind in container.binds:
        words += ["--bind", bind]
    assignments = [
        f"{name}={value}" for name, value in sorted(variables.items()) if can_variable_enter_container(name)
    ]
    return [*words, *container.options, str(image), "env", *assignments, python, *command[1:]]


def can_variable_enter_container(name: str) -> bool:
    """Tell whether a variable may enter a container."""
    return PASSED_VARIABLE.fullmatch(name) is not None and SECRET_VARIABLE.search(name) is None


def folders_to_mount(folders: Sequence[Path]) -> list[Path]:
    """Return the folders to mount: each once, none inside another; for links their targets as well."""
    paths = {Path(os.path.abspath(folder)) for folder in folders}
    paths |= {folder.resolve() for folder in folders}
    paths -= SYSTEM_FOLDERS
    return sorted(path for path in paths if not paths.intersection(path.parents))


def format_mount(folder: Path) -> str:
    """Return the value of --mount for a folder: CSV, so that its path may have commas, colons and quotes."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["type=bind", f"source={folder}", f"destination={folder}"])
    return line.getvalue()


def image_provenance(container: ContainerConfig) -> dict[str, Any]:
    """Return facts for the record: which image and which runtime."""
    if pyxis.is_pyxis(container):
        return pyxis.image_provenance(container)
    program = _runtime_program(container)
    image = _image_file(container)
    inspection = images.inspect_image_with_cache_file(image, program)
    return {
        "name": container.name,
        "file": image.name,
        "sha256": inspection.sha256,
        "arch": images.sif_architecture(image),
        "runtime": Path(program).name,
        "runtime_version": images.runtime_version(program),
        "definition": inspection.labels.get(images.DEFINITION_LABEL),
    }


def check_container_usable_here(container: ContainerConfig) -> None:
    """Check that processes start in the container, and that its image fits this machine and checkout.

    Raises:
        ValueError: why processes can't be started in the container, and what to do.
    """
    if pyxis.is_pyxis(container):
        return pyxis.check_pyxis_and_image(container)
    program = _runtime_program(container)
    image = _image_file(container)
    architecture = images.sif_architecture(image)
    machine = images.machine_architecture()
    if architecture is None:
        raise ValueError(
            f"container.image={image} is no SIF image; build one with `{_build_command(container)}`"
        )
    if architecture != machine:
        raise ValueError(
            f"container.image={image} is for {architecture} machines, but this one is {machine}; build it "
            f"here with `{_build_command(container)}`"
        )
    labels = images.inspect_image_with_cache_file(image, program).labels
    name = labels.get(images.IMAGE_LABEL)
    if name is not None:  # an image that is not ours has no such label; whoever chose it knows it
        built_from = labels.get(images.DEFINITION_LABEL)
        current = images.image_definition_digest(name)
        if built_from != current:
            raise ValueError(
                f"container.image={image} was built from another definition ({built_from}) than the "
                f"checkout's ({current}): other packages or another recipe; build it again with `make sif "
                f"IMAGE={name}`"
            )
    check_container_starts(container)


def check_container_starts(container: ContainerConfig) -> None:
    """Check that a process starts in the container, by starting one; needs no checkout.

    Raises:
        ValueError: why it does not start, and what to do.
    """
    if pyxis.is_pyxis(container):  # a task that asks is in it
        return pyxis.check_pyxis_and_image(container)
    binds = [Path(sys.prefix), Path(sys.base_prefix)]
    command = wrap_command(container, [sys.executable, "-c", ""], binds, images.ROOT, {}, gpu=False)
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"container={container.name}: {command[0]} did not start within {START_TIMEOUT_S:.0f} s; is "
            f"the file system that holds {container.image} well?"
        ) from None
    if process.returncode:
        raise ValueError(
            f"container={container.name}: {container.python or sys.executable} does not start in "
            f"{container.image}: {images.last_error_line(process.stderr)}"
        )


def _runtime_program(container: ContainerConfig) -> str:
    program = images.find_container_runtime(container.runtime)
    if program is None:
        is_auto = container.runtime == "auto"
        missing = "neither apptainer nor singularity is" if is_auto else f"{container.runtime} is not"
        raise ValueError(
            f"container={container.name} was asked for, but {missing} here; load the cluster's module (and "
            "name it in cluster.setup, for the jobs), or say container=none"
        )
    return program


def _image_file(container: ContainerConfig) -> Path:
    path = images.image_path(container.image)
    if not path.is_file():
        raise ValueError(
            f"container={container.name}: there is no image {path}; build it with "
            f"`{_build_command(container)}`, or name another with container.image=FILE"
        )
    return path


def _build_command(container: ContainerConfig) -> str:
    """Return the command that builds this image; a description of somebody's own has a name of its own."""
    for name in (container.name, Path(container.image).stem):
        if images.build_arguments_file(name).exists():
            return f"make sif IMAGE={name}"
    return f"make sif IMAGE={container.name}"
