"""Who started a process, and which variables others see."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.config import dataset_files
from experiments.config.folders import ResultFolders
from slurm import environment, images
from tests.conftest import ROOT

OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
OF_MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
OF_HOROVODRUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}
OF_SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
STARTED = [
    ({}, None),
    (OF_MPIRUN, ("mpirun", 1, 2)),
    ({**OF_MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}, None),
    (OF_HOROVODRUN, ("horovodrun", 1, 2)),
    ({**OF_TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, ("torchrun", 1, 2)),
    ({**OF_TORCHRUN, "WORLD_SIZE": "1"}, None),
    ({"WORLD_SIZE": "2"}, None),
    ({**OF_SRUN, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, ("srun", 1, 4)),
    ({**OF_SRUN, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty bash
    ({**OF_SRUN, "SLURM_STEP_ID": "batch", "SLURM_STEP_NUM_TASKS": "4"}, None),
    (OF_SRUN, None),  # a batch script, or salloc's shell
]


def test_a_process_knows_whether_it_is_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, expected in STARTED:
        monkeypatch.setattr(os, "environ", variables)
        found = environment.find_launcher_group()
        assert (found and (found.launcher, found.place.rank, found.place.size)) == expected
    monkeypatch.setattr(os, "environ", OF_TORCHRUN)
    with pytest.raises(
        ValueError, match=r"RANK, WORLD_SIZE, LOCAL_RANK are set, .* unset them, or start .*torchrun"
    ):
        environment.find_launcher_group()


def test_visible_gpus_are_read_as_cuda_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, UUID (SLURM's Flags=env_uuid) or slice; an unknown word ends the list, a slice is alone."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.visible_gpus() is None
    for value, names in {
        "2,3": ["2", "3"], "": [], "0, 1": ["0", "1"], "0,-1,1": ["0"], "NoDevFiles": [],
        "GPU-8932f937,GPU-1dfe3b5c": ["GPU-8932f937", "GPU-1dfe3b5c"],
        "MIG-2f0a,MIG-77c1": ["MIG-2f0a"], "MIG-GPU-8932f937/1/0": ["MIG-GPU-8932f937/1/0"],
    }.items():  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert environment.visible_gpus() == names, value


def test_of_horovods_settings_those_are_recorded_that_are_not_about_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"HOROVOD_CYCLE_TIME": "0.1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_RANK": "1"}
    monkeypatch.setattr(os, "environ", told)
    assert environment.recorded_variables("HOROVOD") == {"HOROVOD_CYCLE_TIME": "0.1"}


def test_it_is_recorded_whether_torch_was_told_to_use_torchcomms(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "TORCH_HOME": "/home/somebody"}
    monkeypatch.setattr(os, "environ", told)
    assert environment.recorded_variables("TORCH") == {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}


@pytest.mark.parametrize(
    ("variable", "ask"),
    [
        ("SPARSIFY_RESULTS", ResultFolders),
        ("DATA_ROOT", lambda: dataset_files.resolve_data_root(None)),
        ("SPARSIFY_IMAGES", images.image_folder),
        ("SPARSIFY_CONF", environment.conf_folders),
    ],
)
def test_a_folder_whose_name_is_not_utf8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, ask: Callable[[], object]
) -> None:
    """So is any name that is not ASCII where Python takes the locale for ASCII."""
    monkeypatch.setenv(variable, str(tmp_path / "\udcff"))
    with pytest.raises(ValueError, match=rf"{variable}.* is b'.*xff.*LC_ALL=C.UTF-8"):
        ask()
    monkeypatch.setenv(variable, str(tmp_path / "é"))
    ask()


OF_PTY_STEP = {**OF_SRUN, "SLURM_PTY_PORT": "40000", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
ASK = "from slurm import environment; print(environment.find_launcher_group() is not None)"


TYPED = ["bash", "-c", 'set -m; "$@"; true', "shell"]  # as in a shell that a person types in


@pytest.mark.parametrize(
    ("starter", "is_srun_pty_step", "is_joined"),
    [
        (TYPED, True, False),
        ([], True, True),  # srun --pty python ...
        (["bash", "-c", '"$@"; true', "script"], True, True),
        (TYPED, False, True),  # a variable that an earlier step has left
    ],
)
def test_a_command_typed_into_a_shell_of_srun_pty_is_nobodys_task(
    starter: list[str], is_srun_pty_step: bool, is_joined: bool
) -> None:
    main_end, terminal = pty.openpty()

    def begin_session() -> None:
        os.setsid()
        if is_srun_pty_step:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    words = [*starter, sys.executable, "-c", ASK]
    around = {**os.environ, **OF_PTY_STEP}
    done = subprocess.run(
        words, cwd=ROOT, env=around, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=begin_session
    )
    os.close(main_end)
    os.close(terminal)
    assert done.stdout.strip() == str(is_joined)
