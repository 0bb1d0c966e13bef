"""What SLURM says, passed on."""

from __future__ import annotations

import re

import pytest

from slurm import queue


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (
            "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed",
            "cluster.partition",
        ),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "cluster.account",
        ),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "cluster.constraint"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "cluster.qos"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid", "cluster.time_min"),
    ],
)
def test_a_refusal_is_passed_on_with_the_field_to_change(said: str, field: str) -> None:
    sentence = queue.refusal(said)
    assert field in sentence
    assert re.sub(r"sbatch: |error: ", "", said.splitlines()[0]) in sentence


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("None", ["its turn comes"]),
        ("Priority", ["Priority"]),
        ("Resources", ["Resources"]),
        ("AssocGrpCpuLimit", ["AssocGrpCpuLimit"]),
        ("PartitionConfig", ["PartitionConfig, which does not pass by itself", "cluster.partition"]),
        ("PartitionTimeLimit", ["does not pass by itself", "cluster.time_min"]),
        ("QOSMaxWallDurationPerJobLimit", ["does not pass by itself", "cluster.time_min"]),
        ("AssocMaxNodePerJobLimit", ["does not pass by itself", "workers"]),
        ("QOSMaxGRESPerJob", ["does not pass by itself", "cluster.qos"]),
        ("BadConstraints", ["does not pass by itself", "cluster.constraint"]),
        ("JobHeldAdmin", ["until somebody releases it", "scontrol release"]),
    ],
)
def test_a_reason_that_does_not_pass_is_told_with_what_to_change(reason: str, words: list[str]) -> None:
    said = queue.why_waiting(reason)
    for word in words:
        assert word in said
    assert len(words) > 1 or said == words[0]
