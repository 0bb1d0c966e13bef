"""The orders of a run's workers: a file that the starting process writes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from analysis.records.files import write_atomic
from analysis.records.log import InterferenceError


class RunOrders(msgspec.Struct, frozen=True):
    """The orders of one run; of the processes of one job all get the same."""

    config: dict[str, Any]  # as it is recorded
    attempt: str  # the folder of its record
    data_root: str | None = None
    same_host: bool = True  # are all workers on one machine?
    interface: str | None = None  # of the network on which they meet; None: the one of the host's name
    image: dict[str, Any] | None = None  # facts about it, for the record
    network: dict[str, Any] | None = None  # facts about the emulated one, for the record
    relay: str | None = None  # the file in which its relay tells what it has done

    def write(self, path: Path) -> None:
        """Leave them where workers will look."""
        write_atomic(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> RunOrders:
        """Return the orders in a file.

        Raises:
            InterferenceError: it is not there any more, or something else is.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise InterferenceError(f"{path} was removed or damaged while its job was under way") from error
