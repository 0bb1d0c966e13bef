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

from experiments.config import data_root
from experiments.config.folders import Folders
from slurm import environment, images
from tests.conftest import ROOT, there

OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_torchrun_is_known_by_what_it_alone_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**OF_TORCHRUN, "TORCHELASTIC_RUN_ID": "none"})
    found = there(environment.joined())
    assert (found.starter, found.place.rank) == ("torchrun", 1)


def test_ranks_that_somebody_else_set_are_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(OF_TORCHRUN))
    with pytest.raises(
        ValueError, match=r"RANK, WORLD_SIZE, LOCAL_RANK are set, .* unset them, or start .*torchrun"
    ):
        environment.joined()
    for alone in ({**OF_TORCHRUN, "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}):
        monkeypatch.setattr(os, "environ", alone)
        assert environment.joined() is None


@pytest.mark.parametrize(
    ("variable", "ask"),
    [
        ("SPARSIFY_RESULTS", Folders),
        ("DATA_ROOT", lambda: data_root.root_of(None)),
        ("SPARSIFY_IMAGES", images.folder),
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


OF_PTY_STEP = {
    "SLURM_PTY_PORT": "40000",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
}
ASK = "from slurm import environment; print(environment.joined() is not None)"


@pytest.mark.parametrize(
    ("starter", "has_terminal", "is_joined"),
    [
        (["bash", "-c", 'set -m; "$@"; true', "shell"], True, False),  # as in a shell that a person types in
        ([], True, True),  # srun --pty python ...
        (["bash", "-c", '"$@"; true', "script"], True, True),
        (
            ["bash", "-c", 'set -m; "$@"; true', "shell"],
            False,
            True,
        ),  # a variable that an earlier step has left
    ],
)
def test_a_command_typed_into_a_shell_of_srun_pty_is_nobodys_task(
    starter: list[str], has_terminal: bool, is_joined: bool
) -> None:
    main_end, terminal = pty.openpty()

    def begin_session() -> None:
        os.setsid()
        if has_terminal:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    words = [*starter, sys.executable, "-c", ASK]
    around = {**os.environ, **OF_PTY_STEP}
    done = subprocess.run(
        words, cwd=ROOT, env=around, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=begin_session
    )
    os.close(main_end)
    os.close(terminal)
    assert done.stdout.strip() == str(is_joined)
