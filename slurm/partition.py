"""What SLURM says of a partition's nodes and of its own limits."""

from __future__ import annotations

import re
from typing import NamedTuple

from slurm import commands

UNUSABLE_STATE = re.compile(r"down|drain|fail|maint|unk|planned_down|power|\*", re.IGNORECASE)
MINUTES = (1, 60, 24 * 60)


class PartitionNode(NamedTuple):
    """One node of a partition, from sinfo."""

    name: str
    state: str
    cpus: int
    threads_a_core: int
    memory_mb: int
    gres: str
    limit_min: float  # the partition's time limit

    @property
    def usable(self) -> bool:
        """Tell whether a job can start there, now or when others have ended."""
        return UNUSABLE_STATE.search(self.state) is None


def list_nodes(partition: str | None) -> list[PartitionNode]:
    """The nodes of a partition; without one those of the partition that SLURM takes by default.

    Raises:
        SlurmError: there is no SLURM here, or no such partition.
    """
    where = [f"--partition={partition}"] if partition else []
    said = commands.run_command("sinfo", "--noheader", "--Node", *where, "--format=%N|%T|%c|%Z|%m|%G|%l|%P")
    rows = [line.strip().split("|") for line in said.splitlines() if line.count("|") == 7]
    if partition is None:
        rows = [row for row in rows if row[7].endswith("*")] or rows
    elif not rows:
        raise commands.SlurmError(f"sinfo: there is no partition {partition}, or it has no nodes")
    found = (
        PartitionNode(
            name,
            state,
            _leading_integer(cpus),
            _leading_integer(threads),
            _leading_integer(memory),
            gres,
            parse_minutes(limit),
        )
        for name, state, cpus, threads, memory, gres, limit, _ in rows
    )
    return list({node.name: node for node in found}.values())


def parse_minutes(limit: str) -> float:
    """A time limit as SLURM writes it, 1-00:00:00 or 30:00 or infinite, in minutes."""
    if not re.fullmatch(r"[\d:-]+", limit):
        return float("inf")
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, mins, seconds = [0] * (3 - len(parts)) + parts
    return int(days or 0) * MINUTES[2] + hours * MINUTES[1] + mins + seconds / 60


def slurm_setting(name: str) -> str | None:
    """A setting of SLURM's own, from `scontrol show config`; None where it has none of this name."""
    said = commands.run_command("scontrol", "show", "config")
    found = re.search(rf"^{re.escape(name)}\s*=\s*(.*)$", said, re.MULTILINE)
    return found[1].strip() if found else None


def _leading_integer(text: str) -> int:
    """12 of '12+', which sinfo writes where it sums up several."""
    return int(re.sub(r"\D.*", "", text) or 0)
