"""Each setting that DistributedDataParallel or FSDP2 has is right with our methods, or refused.

The lists of settings are read from torch, so a setting that a new torch brings fails a test here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests.sparsify.worker_functions import on_processes
from tests.sparsify.wrappers import uses_settings
from tests.sparsify.wrappers.uses_settings import DDP_SETTINGS, SHARD_SETTINGS, Refusal, names_of

OF_DDP = [*inspect.signature(DistributedDataParallel.__init__).parameters][1:]
OF_SHARDS = [name for name in dir(FSDPModule) if name.startswith("set_")]
Tried = Callable[[bool], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """Return a function for what each rank found: of two under DDP, or of four with shards."""

    @cache
    def run(is_ddp: bool) -> list[dict[str, Any]]:
        body = uses_settings.tried_with_ddp if is_ddp else uses_settings.tried_with_shards
        return on_processes(body, 2 if is_ddp else 4, tmp_path_factory.mktemp("settings"))

    return run


def test_each_setting_of_this_torch_is_known() -> None:
    assert not set(OF_DDP) - set(DDP_SETTINGS)
    assert not set(OF_SHARDS) - set(SHARD_SETTINGS)


@pytest.mark.parametrize("name", names_of(DDP_SETTINGS, OF_DDP))
def test_a_setting_of_ddp_is_right_or_refused(name: str, tried: Tried) -> None:
    check_setting(DDP_SETTINGS[name], [found[name] for found in tried(True)], 1e-12)


@pytest.mark.parametrize("name", names_of(SHARD_SETTINGS, OF_SHARDS))
def test_a_setting_of_fsdp2_is_right_or_refused(name: str, tried: Tried) -> None:
    check_setting(SHARD_SETTINGS[name], [found[name] for found in tried(False)], 2e-6)


def check_setting(setting: object, ranks: list[Any], error: float) -> None:
    """Check that all workers were told the sentence; or ended where torch alone does, or sparse alike."""
    for found in ranks:
        if isinstance(setting, Refusal):
            assert setting.sentence in found
            continue
        for name, end in found.items():
            expected = found["sparse without the setting" if "sparse" in name else "torch"]
            torch.testing.assert_close(
                {name: end}, {name: expected}, rtol=0, atol=error
            )  # names it in errors
        assert not torch.allclose(found["sparse"], found["torch"], rtol=0, atol=100 * error)
