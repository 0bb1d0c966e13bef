"""What a worker says of its end."""

from __future__ import annotations

import pytest
import torch

from experiments.worker import errors
from experiments.worker.hardware import MachineMismatch


def test_what_a_worker_says_of_its_end() -> None:
    assert errors.explain(MachineMismatch("no A100"))[0] == "machine"
    assert errors.explain(ValueError("workers=0"))[0] == "bad_input"
    assert errors.explain(MemoryError())[0] == "memory"
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    assert errors.explain(refused.value)[0] == "memory"
    assert errors.explain(RuntimeError("shapes differ"))[0] == "error"
