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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Generator, nn

from analysis.files import RankLog, read_note, write_json
from analysis.records import Attempt
from analysis.schemas import Checkpoint
from experiments.training.replica import of_all
from experiments.training.state_file import Faulty, digest, read_state, sync_folder, write_state
from experiments.training.stop import GO_ON, STOP, Preempted, Stop
from sparsify.aggregator import Aggregator
from sparsify.comm import Comm, gather_json

if TYPE_CHECKING:
    from experiments.training.step_log import StepLog
from experiments.training.stop import Agreement

FORMAT = 1
OWN, SHARED = "rank{}.pt", "shared{}.pt"
KEPT = 2


@dataclass
class TrainingState:
    """What changes while a worker trains."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    aggregator: Aggregator
    augmentation: Generator
    steps: StepLog

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
            "steps": self.steps.state(),
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
        self.steps.restore(saved["steps"])

    def _of_model(self, trained: bool) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        return {name: v for name, v in self.model.state_dict().items() if (name in parameters) == trained}


class Checkpointer:
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
        gathered = gather_json(self.comm, self._candidates() if self.comm.rank == 0 else [], self.device)
        step, log_bytes, faults = 0, 0, []
        for candidate in gathered[0]:
            whys = gather_json(self.comm, self._load(candidate), self.device)
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

    def restore(self, state: TrainingState) -> int:
        """Put what was found into its place; returns the number of steps done."""
        if self.found is None:
            return 0
        found, self.found = self.found, None
        state.restore(found)
        return int(found["aggregator"]["step"])

    def end_step(self, done: int, state: TrainingState) -> None:
        """Save if the workers agreed to.

        Args:
            done: steps.

        Raises:
            Preempted: after saving; somebody was told to stop.
        """
        word = self.agreement.after_step()
        if word != GO_ON:
            state.steps.write()
            self.save(done, state)
        if word == STOP:
            raise Preempted(done)

    def end_block(self) -> None:
        """For what can't go on from a checkpoint; where no step is being timed.

        Raises:
            Preempted: somebody was told to stop.
        """
        if self.agreement.now() == STOP:
            raise Preempted(0)

    def save(self, done: int, state: TrainingState) -> None:
        """Write a checkpoint; returns when all of it is on the disk.

        Raises:
            OSError: on all workers, if one of them could not write its part. Nothing of it is left.
        """
        folder, rank = self.attempt.checkpoints / str(done), self.comm.rank
        failed: OSError | None = None
        shared = state.shared()
        digests = gather_json(self.comm, digest(shared), self.device)
        same_as = digests.index(digests[rank])
        try:
            log_bytes = self.log.sync()
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            note = {
                "log_bytes": log_bytes,
                "own": write_state(folder / OWN.format(rank), state.own()),
                "same_as": same_as,
                "shared": write_state(folder / SHARED.format(rank), shared) if same_as == rank else None,
            }
        except OSError as error:
            failed, note = error, {"errno": error.errno, "why": error.strerror}
        notes = gather_json(self.comm, note, self.device)
        if refused := [other for other, written in enumerate(notes) if "errno" in written]:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # the error to tell is the first one
            first = notes[refused[0]]
            raise failed or OSError(first["errno"], f"rank {refused[0]} could not save: {first['why']}")
        if rank == 0:
            self._declare(folder, done, notes)
        self.comm.barrier()  # no worker ends before the checkpoint counts

    def _declare(self, folder: Path, done: int, notes: list[dict[str, Any]]) -> None:
        try:
            write_json(folder / "whole.json", {"format": FORMAT, "step": done, "ranks": notes})
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # the error to tell is the first one
            raise
        sync_folder(folder)
        sync_folder(folder.parent)
        saved = self.attempt.saved()
        whole = sorted(step for step, path in saved.items() if (path / "whole.json").exists())
        for step in saved.keys() - {*whole[-KEPT:]}:
            shutil.rmtree(saved[step])

    def _candidates(self) -> list[dict[str, Any]]:
        """The checkpoints that were declared whole, the newest first."""
        saved = self.attempt.saved()
        notes = {step: read_note(path / "whole.json", Checkpoint) for step, path in saved.items()}
        fitting = {step: note for step, note in notes.items() if note and self._fits(note, step)}
        return [msgspec.to_builtins(fitting[step]) for step in sorted(fitting, reverse=True)]

    def _fits(self, note: Checkpoint, step: int) -> bool:
        """Is it of this step and of so many ranks, and by this code?"""
        shared = [part for part in note.ranks if part.same_as < len(note.ranks)]
        all_there = all(note.ranks[part.same_as].shared for part in shared)
        same = (note.format, note.step, len(shared)) == (FORMAT, step, self.comm.size)
        return same and all_there and len(note.ranks) == self.comm.size

    def _load(self, candidate: Mapping[str, Any]) -> str | None:
        """Read this rank's part; returns what is wrong with it."""
        notes, folder = candidate["ranks"], self.attempt.checkpoints / str(candidate["step"])
        note = notes[self.comm.rank]
        same_as = note["same_as"]
        is_one = len({part["same_as"] for part in notes}) == 1
        read = partial(read_state, folder / SHARED.format(same_as), notes[same_as]["shared"])
        try:
            shared = of_all(self.comm, read) if is_one else read()
            if self.log.size() < note["log_bytes"]:
                return "its log is shorter than it was"
            self.found = shared | read_state(folder / OWN.format(self.comm.rank), note["own"])
        except Faulty as error:
            return str(error)
        return None

    def _abandon(self, after: int) -> None:
        """Remove what was saved later than the step that the run goes on from, and what was never whole:
        neither fits the logs that will be written from here on."""
        for step, path in self.attempt.saved().items():
            if step > after or not (path / "whole.json").exists():
                shutil.rmtree(path)

    def _report(self, faults: list[dict[str, Any]], step: int) -> None:
        for fault in faults:
            print(f"the checkpoint of step {fault['step']} is passed over: {fault['why']}", file=sys.stderr)
        print(f"going on from step {step}", file=sys.stderr)
        known = self.attempt.manifest.get("faulty_checkpoints", [])
        self.attempt.update(faulty_checkpoints=[*known, *faults])
