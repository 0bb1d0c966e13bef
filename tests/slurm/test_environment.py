"""Who started a process, and which variables others see."""

from __future__ import annotations

import os

import pytest

from slurm import environment
from tests.conftest import there

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
