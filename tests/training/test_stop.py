"""Told to stop: what the workers agree on, and what becomes of the signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import cast

import pytest

from experiments.training import stop_signal as stop_rules
from experiments.training.stop_signal import StepVote, StopAgreement, StopSignal
from slurm.worker_process import STOP_SIGNALS
from sparsify.comm import Comm, virtual
from tests.conftest import ROOT
from tests.worker.runs import hold_signals_back


def test_all_stop_after_the_same_step_whoever_was_told() -> None:
    def body(comm: virtual.VirtualComm) -> int:
        stop, now = StopSignal(), [0.0]
        agreement = StopAgreement(comm, stop, None, lambda: now[0])
        for step in range(10**4):
            now[0] += 1e-3 * (1 + comm.rank)  # clocks differ
            if comm.rank == 2 and step == 777:
                stop.received_at_s = 0.0
            if (word := agreement.vote_after_step()) != StepVote.GO_ON:
                assert word == StepVote.STOP
                return step
        raise AssertionError("nobody stopped")

    steps = virtual.run(3, body)
    assert len(set(steps)) == 1
    assert 777 < steps[0] < 777 + 2 * stop_rules.VOTE_INTERVAL_S / 1e-3 + 2


class Alone:
    """A communicator of one, for votes only, each of which travels for a while."""

    rank, size = 0, 1

    def __init__(self, travel_s: float = 0.0) -> None:
        self.travel_s = travel_s
        self.now = self.arrives = self.waited_s = 0.0
        self.votes = self.word = 0

    def lagged_max(self, word: int) -> int:
        left_s = max(0.0, self.arrives - self.now)
        self.now += left_s
        self.waited_s += left_s
        self.arrives = self.now + self.travel_s
        before, self.word = self.word, word
        self.votes += 1
        return before

    def take_steps(self, count: int, step_s: float) -> StopAgreement:
        agreement = StopAgreement(cast(Comm, self), StopSignal(), None, lambda: self.now)
        for _ in range(count):
            self.now += step_s
            agreement.vote_after_step()
        return agreement


def test_short_steps_share_a_vote_long_ones_do_not_and_votes_that_travel_for_long_are_rare() -> None:
    for step_s, fewest, most in ((0.001, 3, 9), (10.0, 1000, 1000)):
        alone = Alone()
        alone.take_steps(1000, step_s)
        assert fewest <= alone.votes <= most
    alone = Alone(travel_s=1.4)
    agreement = alone.take_steps(10_000, 0.1)
    assert alone.waited_s < 0.01 * alone.now
    assert agreement.votes_s <= stop_rules.MAX_VOTE_INTERVAL_S


def test_rank_0s_clock_says_when_to_save_and_once() -> None:
    def body(comm: virtual.VirtualComm) -> list[int]:
        now = [0.0]
        agreement = StopAgreement(comm, StopSignal(), 60.0 if comm.rank == 0 else 1.0, lambda: now[0])
        words = []
        for _ in range(100):
            now[0] += 2.0
            words.append(agreement.vote_after_step())
        return [at for at, word in enumerate(words) if word == StepVote.SAVE]

    first, second = virtual.run(2, body)
    assert first == second
    assert len(first) == 3  # in 200 s


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_forked_child_takes_no_notice(number: signal.Signals) -> None:
    code = (
        "import os, signal, sys\n"
        "from experiments.training.stop_signal import StopSignal\n"
        "stop = StopSignal().install_handlers()\n"
        "if not (child := os.fork()):\n"
        "    os.kill(os.getpid(), int(sys.argv[1]))\n"
        "    os._exit(9 if stop.is_set else 3)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert not stop.is_set\n"
        "os.kill(os.getpid(), int(sys.argv[1]))\n"
        "os.kill(os.getpid(), int(sys.argv[1]))\n"
        "sys.exit(os.waitstatus_to_exitcode(status) if stop.is_set else 8)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(int(number))], cwd=ROOT, check=False)
    assert done.returncode == 3


def test_a_signal_that_was_held_back_is_not_lost() -> None:
    """Whoever starts a worker may block the signal until the worker can take it."""
    code = (
        "import os, signal, sys\n"
        "from experiments.training.stop_signal import StopSignal\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "sys.exit(3 if StopSignal().install_handlers().is_set else 4)\n"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, preexec_fn=hold_signals_back, check=False).returncode == 3
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGUSR2
