"""Options that srun gets for enroot's images, as pyxis documents them. No pyxis has run them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from experiments.config import compose
from experiments.launch.attempt import container_config
from slurm import container, pyxis
from slurm.environment import WorkerPlace
from slurm.images import ContainerConfig
from slurm.worker_process import WorkerCommand, WorkerStartSpec
from tests.conftest import Command, fine, refused, there
from tests.slurm.programs import Programs, programs

__all__ = ["programs"]  # a fixture is found by its name in this module
REGISTRY = "nvcr.io#nvidia/pytorch:25.01-py3"
ON_SLURM = ("method=topk", "profile=smoke", "task=cnn_digits", "cluster=devcluster", "container=thin")
# As its wiki shows it; the page has more options than these.
HELP = """      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH
                              [pyxis] the image to use for the container
      --container-mounts=SRC:DST[:FLAGS][,SRC:DST...]
                              [pyxis] bind mount[s] inside the container. Mount
      --container-workdir=PATH
                              [pyxis] working directory inside the container
      --no-container-mount-home
"""


def choice(image: str, **more: object) -> ContainerConfig:
    return ContainerConfig("mine", image, runtime="pyxis", **more)  # type: ignore[arg-type]  # as they are written


def test_srun_is_told_in_documented_words_and_the_worker_s_command_is_itself(here: Command) -> None:
    words = [
        "container.runtime=pyxis", f'container.image="{REGISTRY}"', "container.binds=[/scratch:/data:ro]",
        "container.python=/opt/python", "container.options=[--container-writable]",
    ]  # fmt: skip
    said = fine(here("plan", *ON_SLURM, *words, "--sbatch")).stdout
    (line,) = (line for line in said.splitlines() if line.startswith("srun "))
    told = shlex.split(line)
    options = {word.partition("=")[0] for word in told if word.startswith(("--container", "--no-container"))}
    assert options - {"--container-writable"} == set(re.findall(r"--(?:no-)?container-[a-z-]+", HELP))
    assert f"--container-image={REGISTRY}" in told
    (mounts,) = (word.partition("=")[2] for word in told if word.startswith("--container-mounts="))
    *own, scratch = mounts.split(",")
    assert scratch == "/scratch:/data:ro"
    assert {len({*mount.split(":")}) for mount in own} == {1}  # each under its own path
    assert told[told.index("/opt/python") :][1:3] == ["-u", "-c"]
    assert "apptainer" not in said


def test_an_image_is_a_file_or_a_name_in_a_registry() -> None:
    named = [REGISTRY, "ubuntu", "ubuntu:24.04", "user@host#a/b"]
    files = ["/images/x", "./x", "x.sqsh", "~/x.squashfs"]
    for image in (*named, *files):
        assert pyxis.is_image_path(image) == (image in files)
        words = [*ON_SLURM, "container.runtime=pyxis", f'container.image="{image}"']
        found = there(container_config(compose.resolve(words))).image
        assert Path(found).is_absolute() if image in files else found == image


def test_a_folder_that_pyxis_would_take_apart_is_refused_and_a_blank_takes_nothing_apart() -> None:
    for folder in ("/a,b", "/a:b"):
        with pytest.raises(ValueError, match="a comma or a colon"):
            pyxis.srun_options(choice(REGISTRY), [Path(folder)], Path("/code"))
    told = pyxis.srun_options(choice(REGISTRY), [Path("/a b")], Path("/a b"))
    assert {"--container-mounts=/a b:/a b", "--container-workdir=/a b"} <= {*told}


def test_a_worker_takes_its_signals_itself(tmp_path: Path) -> None:
    """The container is around its task already: it is started as without one, by the image's Python."""
    command = WorkerCommand(
        ["python", "-m", "x"], str(tmp_path), 1, choice(REGISTRY, python="/bin/echo"), [], False
    )
    with (tmp_path / "out").open("w") as out:
        child = command.start(
            WorkerStartSpec("ORDERS", tmp_path, WorkerPlace(0, 1, 0), out.fileno(), out.fileno())
        )
        assert child.wait() == 0
    assert (tmp_path / "out").read_text() == f"-m x ORDERS {tmp_path}\n"


def test_where_srun_knows_no_container_nothing_is_queued(tmp_path: Path, programs: Programs) -> None:
    programs.prints("srun", "Usage: srun [OPTIONS(0)...]")
    with pytest.raises(ValueError, match="srun has no --container-image here, so this site has no pyxis"):
        container.check_container_usable_here(choice(REGISTRY))
    programs.prints("srun", HELP)
    container.check_container_usable_here(choice(REGISTRY))
    with pytest.raises(ValueError, match=r"there is no image .*x.sqsh; make it with `enroot import -o "):
        container.check_container_usable_here(choice(str(tmp_path / "x.sqsh")))
    (tmp_path / "x.sqsh").write_bytes(b"hsqs")
    container.check_container_usable_here(choice(str(tmp_path / "x.sqsh")))
    assert len(container.image_provenance(choice(str(tmp_path / "x.sqsh")))["sha256"]) == 64


def test_without_slurm_there_is_no_pyxis(here: Command) -> None:
    words = ("method=topk", "container=thin", "container.runtime=pyxis")
    for cluster in ("local", "virtual"):
        refused(
            here("run", *words, f"cluster={cluster}"), f"pyxis is SLURM's, and cluster={cluster} has none"
        )
