"""A command in an image: what it sees of the machine, what reaches it, and what is said where it can't be.

The tests that start containers need apptainer or singularity, and the thin image (`make sif`).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurm import container, images
from slurm.images import ContainerConfig
from tests.conftest import ROOT, there

IMAGES = sorted(path.stem for path in (ROOT / "singularity").glob("*.args"))
HERE = [Path(sys.prefix), Path(sys.base_prefix)]
# What a shell, a list of variables or a list of mounts would trip over.
ODD = [
    "",
    "a,b:c",
    "two  words",
    "$(touch pwned) `touch pwned` $HOME",
    "'\"\\",
    "line\nline",
    "--help",
    "ä; exit 3 #",
]


def a_sif(path: Path, architecture: bytes = b"02", magic: bytes = b"SIF_MAGIC\0") -> Path:
    """Write a file that begins as an image does."""
    path.write_bytes(
        b"#!/usr/bin/env run-singularity\n\0" + magic + b"01\0" + architecture + b"\0" + bytes(64)
    )
    return path


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program named apptainer on the PATH that answers as apptainer does and starts nothing.

    Its images have no labels.
    """
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'echo "$*" >> "$0.log"\n'
        'case "$1" in\n'
        "  --version) echo apptainer version 9.9.9 ;;\n"
        '  inspect) cat "$0.labels" 2> /dev/null || echo \'{"data": {"attributes": {"labels": {}}}}\' ;;\n'
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    images.runtime_version.cache_clear()
    return program


def choice(image: Path | str, **more: Any) -> ContainerConfig:
    return replace(images.default_container_config("thin"), image=str(image), **more)


def wrapped(
    image: ContainerConfig,
    *words: str,
    binds: tuple[Path, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the command that runs this Python with these words in the image."""
    command = [sys.executable, *words]
    return container.wrap_command(image, command, [*HERE, *binds], ROOT, variables or {}, gpu=False)


# fmt: off
ENTER = [
    "SPARSIFY_RANK", "SLURM_JOB_ID", "SLURMD_NODENAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR",
    "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "HOROVOD_SIZE", "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DATA_ROOT", "PYTHONUNBUFFERED",
    "CUBLAS_WORKSPACE_CONFIG",
]
STAY = [
    "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "HOME", "SLURM_JWT", "HOROVOD_SECRET_KEY",
    "AWS_TOKEN", "MY_RANK", "SPARSIFY_X%%",
]
# fmt: on


def test_ranks_jobs_threads_and_links_enter_and_nothing_else_of_the_environment() -> None:
    assert [name for name in [*ENTER, *STAY] if container.can_variable_enter_container(name)] == ENTER


def test_folders_are_mounted_once_and_systems_never(tmp_path: Path) -> None:
    inner, other, link = tmp_path / "a" / "inner", tmp_path / "b", tmp_path / "link"
    for folder in (inner, other):
        folder.mkdir(parents=True)
    link.symlink_to(other)
    found = container.folders_to_mount(
        [inner, tmp_path / "a", link, Path("/usr"), Path("/"), Path("/usr/local")]
    )
    assert found == [tmp_path / "a", other, link]


def test_the_gpu_is_asked_for_and_the_image_s_own_python_taken(runtime: Path, tmp_path: Path) -> None:
    sif = a_sif(tmp_path / "x.sif")
    mine = choice(sif, python="/opt/python", binds=["/scratch:/data:ro"], options=["--ipc"])
    command = container.wrap_command(mine, ["/host/python", "-c", "x"], [], ROOT, {}, gpu=True)
    assert command[0] == str(runtime)
    assert "--nv" in command
    assert command[command.index("--bind") + 1] == "/scratch:/data:ro"
    assert command[-6:] == ["--ipc", str(sif), "env", "/opt/python", "-c", "x"]
    other = runtime.rename(runtime.with_name("singularity"))  # does as well
    command = container.wrap_command(choice(sif), ["python"], [], ROOT, {}, gpu=False)
    assert command[0] == str(other)
    assert "--nv" not in command


def test_bare_names_of_images_are_in_their_folder_and_relative_ones_in_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SPARSIFY_IMAGES", raising=False)
    assert images.image_path("x.sif") == ROOT / "singularity" / "images" / "x.sif"
    assert images.image_path("some/x.sif") == ROOT / "some" / "x.sif"
    assert images.image_path("/some/x.sif") == Path("/some/x.sif")
    monkeypatch.setenv("SPARSIFY_IMAGES", str(tmp_path))
    assert images.image_path("x.sif") == tmp_path / "x.sif"


def says(image: ContainerConfig, *words: str) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        container.check_container_usable_here(image)


def test_a_machine_without_a_program_for_images_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    says(choice("x.sif"), "container=thin", "neither apptainer nor singularity", "container=none")
    says(choice("x.sif", runtime="singularity"), "singularity is not here")


def test_images_that_can_not_be_used_are_named_and_what_to_do(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    says(choice(tmp_path / "no.sif"), "no image", "make sif IMAGE=thin", "container.image=")
    says(choice(a_sif(tmp_path / "not.sif", magic=b"something\0")), "no SIF image")
    says(choice(a_sif(tmp_path / "arm.sif", b"04")), "arm64", "amd64")
    unlabelled: list[dict[str, Any]] = [{"labels": {}}, {"labels": None}, {}]
    for attributes in unlabelled:  # somebody's own
        give_labels(runtime, attributes)
        container.check_container_usable_here(choice(a_sif(tmp_path / "x.sif")))
    labels = {images.IMAGE_LABEL: "cpu", images.DEFINITION_LABEL: "0" * 12}
    give_labels(runtime, {"labels": labels})
    ours = choice(a_sif(tmp_path / "ours.sif"))
    says(
        ours, "another definition (000000000000)", images.image_definition_digest("cpu"), "make sif IMAGE=cpu"
    )


def give_labels(runtime: Path, attributes: Mapping[str, Any]) -> None:
    """Let images have these attributes from now on."""
    runtime.with_name("apptainer.labels").write_text(json.dumps({"data": {"attributes": attributes}}))


def test_an_image_is_read_once(runtime: Path, tmp_path: Path) -> None:
    sif = a_sif(tmp_path / "x.sif")
    first = there(container.image_provenance(choice(sif)))
    assert (first["runtime_version"], first["arch"]) == ("apptainer 9.9.9", "amd64")
    assert container.image_provenance(choice(sif)) == first
    assert runtime.with_name("apptainer.log").read_text().count("inspect") == 1
    a_sif(sif, b"04")
    os.utime(sif, ns=(1, 1))  # a clock of coarse ticks must not hide that it is another file now
    second = there(container.image_provenance(choice(sif)))
    assert second["sha256"] != first["sha256"]


@pytest.mark.parametrize("name", IMAGES)
def test_definitions_are_whole_and_their_sections_shell(name: str) -> None:
    words = {**images.read_build_arguments(name), "definition": "0" * 12, "mirror": "none"}
    text = (ROOT / "singularity" / "sparsify.def").read_text()
    declared = text.partition("\n%arguments\n")[2].partition("\n%")[0].split()
    for key, value in {**dict(word.split("=", 1) for word in declared), **words}.items():
        assert f"{{{{ {key} }}}}" in text, f"{key} has no place in the template"
        text = text.replace(f"{{{{ {key} }}}}", value)
    assert "{{" not in text
    for section in text.split("\n%"):
        kind, _, body = section.partition("\n")
        if kind.split()[0] in ("post", "environment", "test"):
            done = subprocess.run(["bash", "-n"], input=body, text=True, capture_output=True, check=False)
            assert done.returncode == 0, (kind, done.stderr)


def test_the_definition_s_digest_follows_what_goes_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "singularity", tmp_path / "singularity", ignore=shutil.ignore_patterns("images"))
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    monkeypatch.setattr(images, "ROOT", tmp_path)
    thin, cpu = images.image_definition_digest("thin"), images.image_definition_digest("cpu")
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    assert images.image_definition_digest("thin") == thin  # holds no packages
    assert images.image_definition_digest("cpu") != cpu
    (tmp_path / "singularity" / "sparsify.def").write_text("another")
    assert images.image_definition_digest("thin") != thin
    with pytest.raises(ValueError, match="no image 'fat'; there are: cpu, gpu, thin"):
        images.image_definition_digest("fat")


@pytest.fixture(scope="module")
def thin() -> ContainerConfig:
    image = images.default_container_config("thin")
    if images.find_container_runtime() is None:
        pytest.skip("neither apptainer nor singularity is here (slurm/devcluster/install-apptainer)")
    if not images.image_path(image.image).is_file():
        pytest.skip("there is no thin image (make sif)")
    container.check_container_usable_here(image)
    return image


@pytest.mark.extended
def test_words_variables_and_exit_codes_come_through_to_the_letter(
    thin: ContainerConfig, tmp_path: Path
) -> None:
    body = (
        "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), sys.prefix])); "
        "sys.exit(75)"
    )
    variables = {"PYTHONPATH": "/host"} | {f"SPARSIFY_{number}": value for number, value in enumerate(ODD)}
    command = wrapped(thin, "-c", body, *ODD, variables=variables)
    outside = {**os.environ, "LD_LIBRARY_PATH": "/host", "SOMETHING": "else"}
    done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 75
    words, inside, cwd, prefix = json.loads(done.stdout)
    assert words == ODD
    assert {name: inside.get(name) for name in variables} == variables | {"PYTHONPATH": None}
    assert "SOMETHING" not in inside
    assert inside.get("LD_LIBRARY_PATH") != "/host"
    assert (cwd, prefix) == (str(ROOT), sys.prefix)
    assert not list(tmp_path.iterdir()), "something was executed"
    assert done.stderr == ""


@pytest.mark.extended
def test_odd_folders_are_there_and_home_is_not(thin: ContainerConfig, tmp_path: Path, private: Path) -> None:
    odd = tmp_path / "a,b:c \"d\" '$(id)'"
    odd.mkdir()
    body = "import os, sys; open(sys.argv[1] + '/written', 'w').write(str(os.path.exists(sys.argv[2])))"
    subprocess.run(wrapped(thin, "-c", body, str(odd), str(private), binds=(odd,)), check=True)
    assert (odd / "written").read_text() == "False"


@pytest.fixture
def private() -> Iterator[Path]:
    """Make a file in the user's home, which a container must not see."""
    path = Path.home() / f".sparsify-test-{os.getpid()}"
    path.touch()
    yield path
    path.unlink()


WORKER = """
import os, signal, sys, time
told = []
signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
print(os.getpid(), flush=True)
while not told:
    time.sleep(0.05)
os.listdir("/usr/share"), open("/usr/bin/env", "rb").read()  # the image's files are there still
sys.exit(75)
"""


@contextlib.contextmanager
def started(thin: ContainerConfig) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a worker in a container; yield it and the worker's own process id."""
    with subprocess.Popen(wrapped(thin, "-u", "-c", WORKER), stdout=subprocess.PIPE, text=True) as outer:
        try:
            yield outer, int(there(outer.stdout).readline())
        finally:
            outer.kill()


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_the_stop_signal_reaches_the_worker_and_leaves_the_image_in_place(
    thin: ContainerConfig, number: signal.Signals
) -> None:
    """The signal also arrives where every process of a step gets it.

    Whether a file server bears signals is up to this machine's apptainer, but for the one that we unpack.
    """
    with started(thin) as (outer, inner):
        if images.unpacked_runtime_folder() in Path(images.find_container_runtime() or "").parents:
            for child in psutil.Process(outer.pid).children():  # squashfuse, where images are mounted by it
                if child.pid != inner:
                    child.send_signal(number)
            time.sleep(0.2)  # for a server that would end of it
        outer.send_signal(number)
        assert outer.wait(timeout=20) == 75


@pytest.mark.extended
def test_a_killed_container_leaves_no_worker(thin: ContainerConfig) -> None:
    with started(thin) as (outer, inner):
        worker = psutil.Process(inner)
        outer.kill()
        outer.wait()
        assert not psutil.wait_procs([worker], timeout=20)[1]
