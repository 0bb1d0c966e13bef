"""What a run goes on from after an interruption.

    <attempt>/checkpoints/<step>/rank<r>.pt    what is rank r's own of all that changes while it trains
                                 shared<r>.pt  the rest: of rank r, and of the ranks that have the same bits
                                 whole.json    what belongs to it; written when all of it is on the disk

The workers agree at the end of a step to save, by votes that travel while they compute. They agree as well on
which checkpoint they load: the newest one that every rank finds whole. The last two are kept.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, nn

from analysis.records import Attempt, RankLog, read_json, write_json
from experiments.machine import exchange
from experiments.signals import Preempted, Stop
from experiments.storage import Faulty, digest, read_state, sync_folder, write_state
from sparsify.aggregator import Aggregator
from sparsify.comm import Comm

if TYPE_CHECKING:
    from experiments.train import Window

FORMAT = 1
OWN, SHARED = "rank{}.pt", "shared{}.pt"
KEPT = 2
GO_ON, SAVE, STOP = 0, 1, 2
# Between two votes: one takes 5.5 ms of CPU time of 8 gloo processes together, which is 0.6 % of 2 cores.
VOTES_S = 0.5
MOST_STEPS = 1000  # between two votes, should steps take no time at all


@dataclass
class Parts:
    """What changes while a worker trains."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    aggregator: Aggregator
    augmentation: Generator
    window: Window

    def shared(self) -> dict[str, Any]:
        """What is alike on all workers, unless they have drifted apart. Tensors, numbers and text only."""
        return {"parameters": self._of_model(trained=True), "optimiser": self.optimiser.state_dict()}

    def own(self) -> dict[str, Any]:
        """The rest, batch-norm statistics among it."""
        device = self.augmentation.device
        return {
            "buffers": self._of_model(trained=False),
            "aggregator": self.aggregator.state_dict(),
            "augmentation": self.augmentation.get_state(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "window": self.window.state(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was `own` and `shared`."""
        self.model.load_state_dict({**saved["parameters"], **saved["buffers"]})
        self.optimiser.load_state_dict(saved["optimiser"])
        self.aggregator.load_state_dict(saved["aggregator"])
        self.augmentation.set_state(saved["augmentation"])
        torch.set_rng_state(saved["random"])
        if saved["cuda_random"] is not None:
            torch.cuda.set_rng_state(saved["cuda_random"], self.augmentation.device)
        self.window.restore(saved["window"])

    def _of_model(self, trained: bool) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        return {name: v for name, v in self.model.state_dict().items() if (name in parameters) == trained}


class Agreement:
    """What the workers do at the end of a step: the same on all, with the delay of one vote.

    Short steps share a vote, else it would show in their times: rank 0 proposes, with each vote, how many
    steps the next ones are apart.
    """

    def __init__(
        self,
        comm: Comm,
        stop: Stop,
        save_every_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.comm, self.stop, self.save_every_s, self.clock = comm, stop, save_every_s, clock
        self.gap, self.steps = 1, 0  # steps between two votes, and since the last one
        self.voted_at = self.saved_at = clock()

    def now(self) -> int:
        """Waits for everybody's word: for when no steps are being timed."""
        self.comm.vote(STOP if self.stop.told else GO_ON)
        return self.comm.vote(GO_ON)

    def after_step(self) -> int:
        """GO_ON, SAVE or STOP; call it after every step."""
        self.steps += 1
        if self.steps < self.gap:
            return GO_ON
        word, gap = divmod(self.comm.vote(self._word() * (MOST_STEPS + 1) + self._proposal()), MOST_STEPS + 1)
        self.gap, self.steps = max(gap, 1), 0
        return word

    def _word(self) -> int:
        if self.stop.told:
            return STOP
        if self.comm.rank or self.save_every_s is None or self.clock() - self.saved_at < self.save_every_s:
            return GO_ON
        self.saved_at = self.clock()  # asked once
        return SAVE

    def _proposal(self) -> int:
        """Rank 0's alone: clocks and loads differ."""
        now = self.clock()
        took, self.voted_at = now - self.voted_at, now
        if self.comm.rank:
            return 0
        return min(int(VOTES_S * self.steps / took), MOST_STEPS) if took > 0 else MOST_STEPS


class Keeper:
    """Saves one worker's part of a run, and finds it again. All methods are collective.

    Args:
        every_min: minutes between two checkpoints; None: only when told to stop.
    """

    def __init__(
        self,
        attempt: Attempt,
        comm: Comm,
        log: RankLog,
        stop: Stop,
        every_min: float | None,
        device: torch.device,
    ) -> None:
        self.attempt, self.comm, self.log, self.device = attempt, comm, log, device
        self.agreement = Agreement(comm, stop, None if every_min is None else 60 * every_min)
        self.found: dict[str, Any] | None = None

    def find(self) -> int:
        """Load the newest whole checkpoint, cut the log back to it, and return its step; 0 without any.

        Raises:
            Preempted: a worker was told to stop before there was anything to do.
        """
        everybody = exchange(self.comm, self._candidates() if self.comm.rank == 0 else [], self.device)
        step, log_bytes, faults = 0, 0, []
        for candidate in everybody[0]:
            whys = exchange(self.comm, self._load(candidate), self.device)
            why = next((f"{why} (rank {rank})" for rank, why in enumerate(whys) if why), None)
            if why is None:
                step, log_bytes = candidate["step"], candidate["ranks"][self.comm.rank]["log_bytes"]
                break
            faults.append({"step": candidate["step"], "why": why})
        if not step:
            self.found = None
        self.log.truncate(log_bytes)
        if self.comm.rank == 0:
            self._abandon(after=step)
            if faults:
                self._report(faults, step)
        self.comm.barrier()
        if self.agreement.now() == STOP:
            raise Preempted(step)
        return step

    def restore(self, parts: Parts) -> int:
        """Put what was found into its place; returns the number of steps done."""
        if self.found is None:
            return 0
        found, self.found = self.found, None
        parts.restore(found)
        return int(found["aggregator"]["step"])

    def end_step(self, done: int, parts: Parts) -> None:
        """Save if the workers agreed to.

        Args:
            done: steps.

        Raises:
            Preempted: after saving; somebody was told to stop.
        """
        word = self.agreement.after_step()
        if word != GO_ON:
            parts.window.close()
            self.save(done, parts)
        if word == STOP:
            raise Preempted(done)

    def save(self, done: int, parts: Parts) -> None:
        """Write a checkpoint; returns when all of it is on the disk.

        Raises:
            OSError: on all workers, if one of them could not write its part. Nothing of it is left.
        """
        folder, rank = self.attempt.checkpoints / str(done), self.comm.rank
        failed: OSError | None = None
        shared = parts.shared()
        digests = exchange(self.comm, digest(shared), self.device)
        same_as = digests.index(digests[rank])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            note = {
                "log_bytes": self.log.sync(),
                "own": write_state(folder / OWN.format(rank), parts.own()),
                "same_as": same_as,
                "shared": write_state(folder / SHARED.format(rank), shared) if same_as == rank else None,
            }
        except OSError as error:
            failed, note = error, {"errno": error.errno, "why": error.strerror}
        notes = exchange(self.comm, note, self.device)
        if refused := [other for other, one in enumerate(notes) if "errno" in one]:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # the error to tell is the first one
            one = notes[refused[0]]
            raise failed or OSError(one["errno"], f"rank {refused[0]} could not save: {one['why']}")
        if rank == 0:
            self._declare(folder, done, notes)
        self.comm.barrier()  # nobody ends before it counts

    def _declare(self, folder: Path, done: int, notes: list[dict[str, Any]]) -> None:
        try:
            write_json(folder / "whole.json", {"format": FORMAT, "step": done, "ranks": notes})
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # the error to tell is the first one
            raise
        sync_folder(folder)
        sync_folder(folder.parent)
        whole = sorted(int(path.parent.name) for path in folder.parent.glob("*/whole.json"))
        for path in folder.parent.iterdir():
            if int(path.name) not in whole[-KEPT:]:
                shutil.rmtree(path)

    def _candidates(self) -> list[dict[str, Any]]:
        """The checkpoints that were declared whole, the newest first."""
        found = [read_json(path) for path in self.attempt.checkpoints.glob("*/whole.json")]
        fitting = [one for one in found if one and one.get("format") == FORMAT]
        return sorted(fitting, key=lambda one: -one["step"])

    def _load(self, candidate: Mapping[str, Any]) -> str | None:
        """Read this rank's part; returns what is wrong with it."""
        notes, folder = candidate["ranks"], self.attempt.checkpoints / str(candidate["step"])
        note = notes[self.comm.rank]
        same_as = note["same_as"]
        if self.log.size() < note["log_bytes"]:
            return "its log is shorter than it was"
        try:
            own = read_state(folder / OWN.format(self.comm.rank), note["own"])
            self.found = own | read_state(folder / SHARED.format(same_as), notes[same_as]["shared"])
        except Faulty as error:
            return str(error)
        return None

    def _abandon(self, after: int) -> None:
        """Remove what was saved later than the step that the run goes on from, and what was never whole:
        neither fits the logs that will be written from here on."""
        for path in self.attempt.checkpoints.glob("*"):
            if int(path.name) > after or not (path / "whole.json").exists():
                shutil.rmtree(path)

    def _report(self, faults: list[dict[str, Any]], step: int) -> None:
        for one in faults:
            print(f"the checkpoint of step {one['step']} is passed over: {one['why']}", file=sys.stderr)
        print(f"going on from step {step}", file=sys.stderr)
        known = self.attempt.manifest.get("faulty_checkpoints", [])
        self.attempt.update(faulty_checkpoints=[*known, *faults])
