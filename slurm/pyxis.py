"""Containers that SLURM makes: enroot's, by pyxis, a plugin of srun (github.com/NVIDIA/pyxis).

The plugin puts each task of a step into a container. So srun gets the image, and the processes that a task
starts are inside already. Written from its wiki ("Usage"), its source and its tests, and not run against a
real one.

All that the host exports enters the container, except what the image sets itself: the image's value wins
unless --container-env names the variable. A worker's rank and threads are set inside, by its task. Options
that are also exported (PYXIS_CONTAINER_IMAGE) count where srun is told nothing of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from slurm import commands, images
from slurm.images import ContainerConfig

RUNTIME = "pyxis"
IMAGE_OPTION = "--container-image"
FILE_SUFFIXES = (".sqsh", ".squashfs")
SEPARATOR = re.compile(r"[,:]")  # of mounts and their parts


def is_pyxis(container: ContainerConfig | None) -> TypeGuard[ContainerConfig]:
    """Tell whether srun makes this container."""
    return container is not None and container.runtime == RUNTIME


def is_image_path(image: str) -> bool:
    """Tell whether an image is a file's path, and not a name in a registry: pyxis takes both."""
    return image.startswith(("/", ".", "~")) or image.endswith(FILE_SUFFIXES)


def srun_options(container: ContainerConfig, folders: Sequence[Path], cwd: Path) -> list[str]:
    """Return the srun options that start tasks in the container.

    Args:
        folders: folders to mount under the same paths as outside.

    Raises:
        ValueError: a folder's path has a character that separates mounts.
    """
    for folder in folders:
        if SEPARATOR.search(str(folder)):
            raise ValueError(
                f"container.runtime=pyxis can't mount {str(folder)!r}: its path has a comma or a colon, at "
                "which --container-mounts is taken apart; give the folder another name"
            )
    mounts = ",".join([*(f"{folder}:{folder}" for folder in folders), *container.binds])
    return [
        f"{IMAGE_OPTION}={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={cwd}",
        "--no-container-mount-home",
        *container.options,
    ]


def check_pyxis_and_image(container: ContainerConfig) -> None:
    """Check that srun has pyxis here, and that the image, if it is a file, is there.

    Raises:
        ValueError: why not, and what to do.
    """
    if is_image_path(container.image) and not Path(container.image).is_file():
        raise ValueError(
            f"container={container.name}: there is no image {container.image}; make it with `enroot import "
            f"-o {container.image} docker://NAME`, or name another with container.image="
        )
    if IMAGE_OPTION not in commands.run_command("srun", "--help"):
        raise ValueError(
            f"container.runtime=pyxis is a plugin of srun's, and srun has no {IMAGE_OPTION} here, so this "
            "site has no pyxis; take container.runtime=auto, for Apptainer or Singularity, or container=none"
        )


def image_provenance(container: ContainerConfig) -> dict[str, Any]:
    """Return facts for the record: which image.

    A name in a registry may mean another image tomorrow, and nobody tells its digest here.
    """
    path = Path(container.image) if is_image_path(container.image) else None
    return {
        "name": container.name,
        "file": path.name if path else container.image,
        "sha256": images.inspect_image_with_cache_file(path, None).sha256 if path else None,
        "arch": None,
        "runtime": RUNTIME,
        "runtime_version": None,
        "definition": None,
    }
