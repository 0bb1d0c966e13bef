"""Ctrl-C and its like in the process that starts workers: the first is passed on, the second ends all."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from experiments.launch.diagnosis import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndSignals:
    """Takes SIGINT, SIGTERM and SIGHUP inside a `with` block. The first one sets `told`; the next one raises.

    What this process was started to ignore stays ignored, as SIGHUP under `nohup`.
    """

    def __init__(self) -> None:
        self.told = self.passed_on = False
        self.before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            wanted = {number: signal.getsignal(number) for number in SIGNALS}
            self.before = {number: how for number, how in wanted.items() if how is not signal.SIG_IGN}
            for number in self.before:
                signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, how in self.before.items():
            signal.signal(number, how)

    def pass_on(self) -> bool:
        """Has the first one come, and was not passed on yet? True once."""
        due = self.told and not self.passed_on
        self.passed_on = self.passed_on or due
        return due

    def ignore(self) -> None:
        """From now on to the end of the block."""
        for number in self.before:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.told:
            raise Interrupted
        self.told = True
