"""Messages of a worker at its end, and of any command about packages that are missing."""

from __future__ import annotations

import pytest
import torch

from experiments.worker import errors
from experiments.worker.errors import explain_import_error
from experiments.worker.hardware import MachineMismatch
from sparsify.comm import WorkerLost
from tests.config.refusals import check_parts
from tests.conftest import there


def test_who_misses_a_package_is_told_what_installs_it() -> None:
    for name, package, remedy in (
        ("hydra.core", "hydra", "`make .venv/.figures`"),
        ("torch", "torch", "`make .venv/.train`"),
        ("foo", "foo", "pip install foo"),
    ):
        trouble = ModuleNotFoundError(f"No module named {name!r}", name=name)
        kind, why = there(explain_import_error(trouble))
        assert kind == "environment"
        check_parts(why, f"package {package} is not installed ... {remedy}")


def test_a_machine_without_free_ports_is_told_in_words_of_our_own() -> None:
    for error in (
        RuntimeError("[enforce fail at tcp/socket.cc:95] rv != -1. -1 vs -1. bind: Address already in use"),
        RuntimeError("failed to listen. port: 0, useIpv6: false, message: address already in use"),
        WorkerLost("worker 1 of 4 can't connect: ([enforce fail] connect: Cannot assign requested address)"),
    ):
        kind, why = errors.explain_failure(error)
        assert kind == "error"
        assert "too few free TCP ports" in why


def test_errors_of_our_own_keep_their_traceback() -> None:
    assert (
        explain_import_error(ModuleNotFoundError("No module named 'analysis.x'", name="analysis.x")) is None
    )


def test_what_a_worker_says_of_its_end() -> None:
    assert errors.explain_failure(MachineMismatch("no A100"))[0] == "machine"
    assert errors.explain_failure(ValueError("workers=0"))[0] == "bad_input"
    assert errors.explain_failure(MemoryError())[0] == "memory"
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    assert errors.explain_failure(refused.value)[0] == "memory"
    assert errors.explain_failure(RuntimeError("shapes differ"))[0] == "error"
