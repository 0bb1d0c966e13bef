"""A cluster's description -> the shape of jobs, and the options that sbatch is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.config import compose
from slurm import cluster as clusters
from slurm.submit import sbatch_text


def described(**changes: Any) -> dict[str, Any]:
    return {**compose.resolve(["cluster=generic_slurm"])["cluster"], **changes}


@pytest.mark.parametrize(
    ("workers", "per_node", "nodes", "tasks"),
    [(1, 8, 1, 1), (8, 8, 1, 8), (12, 8, 2, 6), (6, 4, 2, 3), (5, 4, 5, 1)],
)
def test_workers_are_spread_evenly(workers: int, per_node: int, nodes: int, tasks: int) -> None:
    cluster = described(workers_per_node=per_node)
    assert clusters.shape(cluster, workers, 1, True) == (nodes, tasks, cluster["cpus_per_worker"], tasks)


def test_a_warning_that_comes_before_the_job_is_refused() -> None:
    with pytest.raises(ValueError, match="told to stop as they start"):
        clusters.check(described(signal_delay_s=7200))


def test_odd_values_stay_values() -> None:
    """A directive is a comment to the shell; quotes, semicolons and $(...) arrive in SLURM as they are."""
    odd = "a b; $(touch x) `y` \"q\" 'z'"
    cluster = described(comment=odd, account="a;b")
    shape = clusters.shape(cluster, 2, 1, False)
    options = clusters.parameters(cluster, shape, "name", Path("/a folder/$(x)"), "true")
    text = sbatch_text(Path("/a folder"), options, "/py thon", 3)
    directives = [
        line for line in text.splitlines() if "touch x" in line or "a;b" in line or "a folder" in line
    ]
    assert all(line.startswith(("#SBATCH", "srun")) for line in directives)
    (call,) = (line for line in text.splitlines() if line.startswith("srun"))
    assert "'/py thon' -u" in call
    assert "'/a folder'" in call
