"""The stop signal: SLURM's warning before it takes the nodes away, or a person's Ctrl-C.

A worker notes it and goes on; the workers agree at the end of a step on what to do about it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

from slurm.worker_process import STOP_SIGNALS

if TYPE_CHECKING:  # a worker listens for signals before torch is loaded, which takes seconds
    from sparsify.comm import Comm

# `nohup` has one ignored, and shells the other in what runs in the background; so it stays then.
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
_continued = list[float]()  # when this process went on after it was stopped, as by `scontrol suspend`
MAX_WAIT_ALONE_S = 20.0  # after the signal, a worker that is still alone stops waiting for the others


def count_sigcont_signals() -> int:
    """Return how often this process was continued since it began to listen."""
    return len(_continued)


class Preempted(Exception):
    """The run was told to stop, and can go on from `step`."""

    def __init__(self, step: int) -> None:
        how_far = f"saved at step {step:,}" if step else "before anything was saved"
        super().__init__(f"told to stop, {how_far}")
        self.step = step


@dataclass
class StopSignal:
    """Note of whether this process was told to stop. A signal to one forked from it does not count."""

    received_at_s: float | None = None
    process_id: int = 0

    def install_handlers(self) -> StopSignal:
        """Handle the stop signals from now on; the starting process may have blocked them."""
        self.process_id = os.getpid()
        for number in STOP_SIGNALS:
            if number not in TERMINAL_SIGNALS or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle_signal)
        signal.signal(signal.SIGCONT, lambda number, frame: _continued.append(time.monotonic()))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    @property
    def is_set(self) -> bool:
        """True once a stop signal has come."""
        return self.received_at_s is not None

    def is_overdue(self) -> bool:
        """Tell whether it has been too long for a worker that still waits for the others to come."""
        return self.received_at_s is not None and time.monotonic() - self.received_at_s > MAX_WAIT_ALONE_S

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        # A forked child, as a DataLoader's worker is, inherits this handler, and SLURM signals it too.
        if os.getpid() == self.process_id and self.received_at_s is None:
            self.received_at_s = time.monotonic()


# Between two votes: one takes 5.5 ms of CPU time of 8 gloo processes together, which is 0.6 % of 2 cores.
VOTE_INTERVAL_S = 0.5
# Over a link with distance one travels for longer than that: who waited so long for it votes half as often,
# down to once in so many seconds.
LONG_WAIT_S = 0.02
MAX_VOTE_INTERVAL_S = 8.0
MAX_STEPS = 1000  # between two votes, should steps take no time at all


class StepVote(IntEnum):
    """The action at the end of a step for which a worker votes; the largest vote wins."""

    GO_ON = 0
    SAVE = 1
    STOP = 2


class StopAgreement:
    """The workers' agreement on what to do at the end of a step, with the delay of one vote.

    Short steps share a vote, else it would show in their times: rank 0 proposes, with each vote, how many
    steps the next ones are apart.
    """

    def __init__(
        self,
        comm: Comm,
        stop: StopSignal,
        save_every_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.comm = comm
        self.stop = stop
        self.save_every_s = save_every_s
        self.clock = clock
        self.gap = 1  # steps between two votes
        self.steps = 0  # since the last vote
        self.votes_s = VOTE_INTERVAL_S  # between two of them
        self.voted_at = self.saved_at = clock()

    def vote_now(self) -> StepVote:
        """Collect every worker's vote now, and return StepVote.GO_ON or STOP.

        Blocks, so call it outside timed steps.
        """
        self.comm.lagged_max(StepVote.STOP if self.stop.is_set else StepVote.GO_ON)
        return StepVote(self.comm.lagged_max(StepVote.GO_ON))

    def vote_after_step(self) -> StepVote:
        """Return the action that the last vote decided; call it after every step."""
        self.steps += 1
        if self.steps < self.gap:
            return StepVote.GO_ON
        own_vote = self._own_vote() * (MAX_STEPS + 1) + self._propose_gap()
        started_s = self.clock()
        word, gap = divmod(self.comm.lagged_max(own_vote), MAX_STEPS + 1)
        if self.clock() - started_s > LONG_WAIT_S:
            self.votes_s = min(2 * self.votes_s, MAX_VOTE_INTERVAL_S)
        self.gap = max(gap, 1)
        self.steps = 0
        return StepVote(word)

    def _own_vote(self) -> StepVote:
        if self.stop.is_set:
            return StepVote.STOP
        if self.comm.rank or self.save_every_s is None or self.clock() - self.saved_at < self.save_every_s:
            return StepVote.GO_ON
        self.saved_at = self.clock()  # asked once
        return StepVote.SAVE

    def _propose_gap(self) -> int:
        """Rank 0's alone: clocks and loads differ."""
        now_s = self.clock()
        elapsed_s = now_s - self.voted_at
        self.voted_at = now_s
        if self.comm.rank:
            return 0
        return min(int(self.votes_s * self.steps / elapsed_s), MAX_STEPS) if elapsed_s > 0 else MAX_STEPS
