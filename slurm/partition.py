"""A partition's nodes and SLURM's own settings, as SLURM reports them."""

from __future__ import annotations

import re
from typing import NamedTuple

from slurm import commands

UNUSABLE_STATE = re.compile(r"down|drain|fail|maint|unk|planned_down|power|\*", re.IGNORECASE)
TESTED_RELEASES = ((22, 5), (26, 5))  # the oldest and the newest: year and month


class PartitionNode(NamedTuple):
    """Node of a partition, from sinfo."""

    name: str
    state: str
    time_limit_min: float  # the partition's

    @property
    def is_usable(self) -> bool:
        """True if a job can start there, now or when others have ended."""
        return UNUSABLE_STATE.search(self.state) is None


def list_partition_nodes(partition: str | None) -> list[PartitionNode]:
    """Return the nodes of a partition, with their states; None: of the partition that is SLURM's default.

    Raises:
        SlurmError: there is no SLURM here, or no such partition.
    """
    options = [f"--partition={partition}"] if partition else []
    output = commands.run_command("sinfo", "--noheader", "--Node", *options, "--format=%N|%T|%l|%P")
    rows = [line.strip().split("|") for line in output.splitlines() if line.count("|") == 3]
    if partition is None:
        rows = [row for row in rows if row[3].endswith("*")] or rows
    elif not rows:
        raise commands.SlurmError(f"sinfo: there is no partition {partition}, or it has no nodes")
    node_by_name = {
        name: PartitionNode(name, state, parse_time_limit_min(limit)) for name, state, limit, _ in rows
    }
    return list(node_by_name.values())


def parse_time_limit_min(limit: str) -> float:
    """Return a time limit in minutes, which SLURM writes as 1-00:00:00, 30:00 or infinite."""
    if not re.fullmatch(r"[\d:-]+", limit):
        return float("inf")
    days, _, clock = limit.rpartition("-")
    hours, minutes, seconds = map(int, f"0:0:{clock}".split(":")[-3:])
    return int(days or 0) * 24 * 60 + hours * 60 + minutes + seconds / 60


def query_slurm_setting(name: str) -> str | None:
    """Return one of SLURM's own settings, from `scontrol show config`; None if it has none of this name."""
    output = commands.run_command("scontrol", "show", "config")
    match = re.search(rf"^{re.escape(name)}\s*=\s*(.*)$", output, re.MULTILINE)
    return match[1].strip() if match else None


def describe_untested_version() -> str:
    """Return a sentence where the controller's SLURM is older or newer than those tested; else empty.

    Raises:
        SlurmError: SLURM can't be asked.
    """
    version = query_slurm_setting("SLURM_VERSION") or ""
    match = re.match(r"(\d+)\.(\d+)", version)
    oldest, newest = TESTED_RELEASES
    if match is None or oldest <= (int(match[1]), int(match[2])) <= newest:
        return ""
    tested = " to ".join(f"{year}.{month:02}" for year, month in TESTED_RELEASES)
    return (
        f"SLURM's version is {version}, and tests run with {tested}: the meaning of an option or of an "
        "answer may be another"
    )
