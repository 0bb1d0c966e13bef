"""The orders of a run's workers: a file that the starting process writes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from analysis.records.files import write_atomic
from analysis.records.log import InterferenceError


class RunOrders(msgspec.Struct, frozen=True):
    """The orders of one run, equal for all its workers."""

    config: dict[str, Any]  # as it is recorded
    attempt_folder: str  # of the run's record
    data_root: str | None = None
    same_host: bool = True  # are all workers on one machine?
    interface: str | None = None  # network interface on which they meet; None: the one of the host's name
    image_facts: dict[str, Any] | None = None  # for the record
    network_facts: dict[str, Any] | None = None  # about the emulated network, for the record
    relay_statistics_file: str | None = None  # that the emulated network's relay keeps up to date

    def write(self, path: Path) -> None:
        """Write the orders into a file, which the workers will read."""
        write_atomic(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> RunOrders:
        """Return the orders in a file.

        Raises:
            InterferenceError: the file is not there any more, or something else is.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise InterferenceError(f"{path} was removed or damaged while its job was under way") from error
