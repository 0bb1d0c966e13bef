"""Checkpoints, from which an interrupted run continues.

    <attempt>/checkpoints/<step>/rank<r>.pt    what is rank r's own of all that changes while it trains
                                 shared<r>.pt  the rest: of rank r, and of the ranks that have the same bits
                                 whole.json    what belongs to it; written when all of it is on the disk

The workers agree at the end of a step to save, by votes that travel while they compute. They agree as well on
which checkpoint they load: the newest one that every rank finds whole. The last two are kept.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import msgspec
import torch
from msgspec import Struct
from torch import Generator, Tensor, nn

from analysis.records.files import check_not_link, remove_path, try_read_struct, write_json
from analysis.records.log import RankLog
from analysis.records.schema import FileFacts, WholeNumber
from analysis.records.store import Attempt
from experiments.training.replicas.local import LocalReplica
from experiments.training.replicas.shared import make_once_for_virtual_ranks
from experiments.training.stop_signal import Preempted, StepVote, StopAgreement, StopSignal
from sparsify.comm import Comm, gather_json
from sparsify.wrappers.aggregator import Aggregator

if TYPE_CHECKING:
    from experiments.training.step_log import StepLog

FORMAT = 1
RANK_FILE = "rank{}.pt"
SHARED_FILE = "shared{}.pt"
NUM_KEPT = 2
BLOCK_BYTES = 2**20  # bytes that are read at a time


class SavedPart(Struct, frozen=True):
    """Part of a checkpoint that a rank has written."""

    log_bytes: WholeNumber
    own: FileFacts
    same_as: WholeNumber  # the rank whose shared part is this one's too
    shared: FileFacts | None


class CheckpointManifest(Struct, frozen=True):
    """whole.json: a checkpoint that all ranks have written."""

    format: int
    step: WholeNumber
    ranks: list[SavedPart]


@dataclass
class TrainingState:
    """All that changes while a worker trains."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    aggregator: Aggregator | LocalReplica
    augmentation: Generator
    steps: StepLog

    def shared_state(self) -> dict[str, Any]:
        """Return the part that is alike on all workers, unless they have drifted apart.

        It holds tensors, numbers and text only.
        """
        return {"parameters": self._model_tensors(trained=True), "optimiser": self.optimiser.state_dict()}

    def rank_state(self) -> dict[str, Any]:
        """Return the part that differs between workers, with batch-norm statistics."""
        device = self.augmentation.device
        return {
            "buffers": self._model_tensors(trained=False),
            "aggregator": self.aggregator.state_dict(),
            "augmentation": self.augmentation.get_state(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "steps": self.steps.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was `own` and `shared`."""
        self.model.load_state_dict({**saved["parameters"], **saved["buffers"]})
        self.optimiser.load_state_dict(saved["optimiser"])
        self.aggregator.load_state_dict(saved["aggregator"])
        self.augmentation.set_state(saved["augmentation"])
        torch.set_rng_state(saved["random"])
        if saved["cuda_random"] is not None:
            torch.cuda.set_rng_state(saved["cuda_random"], self.augmentation.device)
        self.steps.load_state_dict(saved["steps"])

    def _model_tensors(self, trained: bool) -> dict[str, Any]:
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
        stop: StopSignal,
        every_min: float | None,
        device: torch.device,
    ) -> None:
        self.attempt = attempt
        self.comm = comm
        self.log = log
        self.device = device
        self.agreement = StopAgreement(comm, stop, None if every_min is None else 60 * every_min)
        self.loaded: dict[str, Any] | None = None

    def load_newest_and_cut_log(self) -> int:
        """Load the newest whole checkpoint, cut the log back to it, and return its step; 0 without any.

        Raises:
            Preempted: a worker was told to stop before there was anything to do.
            DamagedFileError: on all workers, where a link stands for the folder of checkpoints.
        """
        check_not_link(self.attempt.checkpoint_folder)
        gathered = gather_json(self.comm, self._candidates() if self.comm.rank == 0 else [], self.device)
        step = 0
        log_bytes = 0
        faults = []
        for candidate in gathered[0]:
            whys = gather_json(self.comm, self._try_load(candidate), self.device)
            why = next((f"{why} (rank {rank})" for rank, why in enumerate(whys) if why), None)
            if why is None:
                step = candidate["step"]
                log_bytes = candidate["ranks"][self.comm.rank]["log_bytes"]
                break
            faults.append({"step": candidate["step"], "why": why})
        if not step:
            self.loaded = None
        self.log.truncate(log_bytes)
        if self.comm.rank == 0:
            for saved, path in self.attempt.checkpoint_folder_by_step().items():
                # Neither what is later nor what was never whole fits the logs that will be written from here.
                if saved > step or not (path / "whole.json").exists():
                    remove_path(path)
            self._report_faults(faults, step)
        self.comm.barrier()
        if self.agreement.vote_now() == StepVote.STOP:
            raise Preempted(step)
        return step

    def restore_loaded(self, state: TrainingState) -> int:
        """Give a training the loaded state, and return the number of steps done; 0 where none was loaded."""
        if self.loaded is None:
            return 0
        saved = self.loaded
        self.loaded = None
        state.load_state_dict(saved)
        return int(saved["aggregator"]["step"])

    def save_if_agreed(self, num_steps: int, state: TrainingState) -> None:
        """Save if the workers agreed to.

        Args:
            num_steps: that are done.

        Raises:
            Preempted: after saving; somebody was told to stop.
        """
        word = self.agreement.vote_after_step()
        if word != StepVote.GO_ON:
            state.steps.write_waiting_steps()
            self.save(num_steps, state)
        if word == StepVote.STOP:
            raise Preempted(num_steps)

    def save(self, num_steps: int, state: TrainingState) -> None:
        """Write a checkpoint; returns when all of it is on the disk.

        Raises:
            OSError: on all workers, if one of them could not write its part. Nothing of it is left.
        """
        folder = self.attempt.checkpoint_folder / str(num_steps)
        rank = self.comm.rank
        failed: OSError | None = None
        shared = state.shared_state()
        digests = gather_json(self.comm, state_digest(shared), self.device)
        same_as = digests.index(digests[rank])
        try:
            self.log.flush(durable=True)
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            note = {
                "log_bytes": self.log.size_bytes(),
                "own": write_state(folder / RANK_FILE.format(rank), state.rank_state()),
                "same_as": same_as,
                "shared": write_state(folder / SHARED_FILE.format(rank), shared) if same_as == rank else None,
            }
        except OSError as error:
            failed = error
            note = {"errno": error.errno, "why": error.strerror}
        notes = gather_json(self.comm, note, self.device)
        refused = [other for other, written in enumerate(notes) if "errno" in written]
        if refused:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # the error to tell is the first one
            first = notes[refused[0]]
            raise failed or OSError(first["errno"], f"rank {refused[0]} could not save: {first['why']}")
        if rank == 0:
            self._mark_whole(folder, num_steps, notes)
        self.comm.barrier()  # no worker ends before the checkpoint counts

    def _mark_whole(self, folder: Path, num_steps: int, notes: list[dict[str, Any]]) -> None:
        try:
            write_json(folder / "whole.json", {"format": FORMAT, "step": num_steps, "ranks": notes})
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # the error to tell is the first one
            raise
        sync_folder(folder)
        sync_folder(folder.parent)
        saved = self.attempt.checkpoint_folder_by_step()
        whole = sorted(step for step, path in saved.items() if (path / "whole.json").exists())
        for step in saved.keys() - {*whole[-NUM_KEPT:]}:
            remove_path(saved[step])

    def _candidates(self) -> list[dict[str, Any]]:
        """Return the checkpoints that were declared whole, the newest first."""
        saved = self.attempt.checkpoint_folder_by_step()
        notes = {
            step: try_read_struct(path / "whole.json", CheckpointManifest) for step, path in saved.items()
        }
        fitting = {step: note for step, note in notes.items() if note and self._is_loadable(note, step)}
        return [msgspec.to_builtins(fitting[step]) for step in sorted(fitting, reverse=True)]

    def _is_loadable(self, note: CheckpointManifest, step: int) -> bool:
        """Tell whether it is of this step and of so many ranks, and by this code."""
        if (note.format, note.step, len(note.ranks)) != (FORMAT, step, self.comm.size):
            return False
        return all(part.same_as < len(note.ranks) and note.ranks[part.same_as].shared for part in note.ranks)

    def _try_load(self, candidate: Mapping[str, Any]) -> str | None:
        """Read this rank's part; returns what is wrong with it."""
        notes = candidate["ranks"]
        folder = self.attempt.checkpoint_folder / str(candidate["step"])
        note = notes[self.comm.rank]
        same_as = note["same_as"]
        is_one = len({part["same_as"] for part in notes}) == 1
        read = partial(read_verified_state, folder / SHARED_FILE.format(same_as), notes[same_as]["shared"])
        try:
            shared = make_once_for_virtual_ranks(self.comm, read) if is_one else read()
            if self.log.size_bytes() < note["log_bytes"]:
                return "its log is shorter than it was"
            self.loaded = shared | read_verified_state(folder / RANK_FILE.format(self.comm.rank), note["own"])
        except DamagedStateError as error:
            return str(error)
        return None

    def _report_faults(self, faults: list[dict[str, Any]], step: int) -> None:
        if not faults:
            return
        for fault in faults:
            print(f"the checkpoint of step {fault['step']} is passed over: {fault['why']}", file=sys.stderr)
        print(f"going on from step {step}", file=sys.stderr)
        earlier_faults = self.attempt.manifest.get("faulty_checkpoints", [])
        self.attempt.update_manifest(faulty_checkpoints=[*earlier_faults, *faults])


# Files of states, each either whole or refused.


class DamagedStateError(Exception):
    """A file is not what was written."""


class DigestingFile:
    """A file to write to that knows the digest and the size of what it was given.

    It remembers an error and takes the rest calmly: thrown through torch's writer, which is C++, an
    OSError would come out as something else.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, raw: bytes | bytearray | memoryview) -> int:
        if self.error is None:
            try:
                self.file.write(raw)
            except OSError as error:
                self.error = error
        self.sha256.update(raw)
        self.size += len(raw)
        return len(raw)

    def flush(self) -> None:
        """Torch asks for it; `write_state` does it, where errors can be raised."""


def state_digest(state: Any) -> str:
    """Return a digest that is equal for states of the same bits, whatever their layout in memory."""
    sha256 = hashlib.sha256()

    def take(part: Any) -> None:
        if isinstance(part, Tensor):
            sha256.update(f"{part.dtype}{tuple(part.shape)}".encode())
            raw = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            sha256.update(raw.numpy().data)
        elif isinstance(part, Mapping):
            for name, value in part.items():
                take(name)
                take(value)
        elif isinstance(part, list | tuple):
            for value in part:
                take(value)
        else:
            sha256.update(f"{part!r};".encode())

    take(state)
    return sha256.hexdigest()


def write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `path`, wait for the disk, and return the facts that `read_verified_state` will compare.

    The file is there whole or not at all.
    """
    part = path.with_suffix(".part")
    try:
        with part.open("wb", buffering=0) as file:
            digested = DigestingFile(file)
            torch.save(dict(state), cast(IO[bytes], digested))  # of a file it needs `write` and `flush`
            if digested.error is not None:
                raise digested.error
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)
    return {"bytes": digested.size, "sha256": digested.sha256.hexdigest()}


def read_verified_state(path: Path, bytes_and_sha256: Mapping[str, Any]) -> dict[str, Any]:
    """Read a state that `write_state` wrote, onto the CPU, and verify its size and digest.

    Raises:
        DamagedStateError: the file is missing, changed or no state.
    """
    sha256 = hashlib.sha256()
    try:
        size = path.stat().st_size
        if size != bytes_and_sha256["bytes"]:
            raise DamagedStateError(f"a file has {size} bytes instead of {bytes_and_sha256['bytes']}")
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                sha256.update(block)
    except FileNotFoundError as error:
        raise DamagedStateError("a file is missing") from error
    except OSError as error:
        raise DamagedStateError(f"a file can't be read: {error.strerror}") from error
    if sha256.hexdigest() != bytes_and_sha256["sha256"]:
        raise DamagedStateError("a file was changed after it was written")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:  # it was signed by others
        raise DamagedStateError("a file holds more than numbers, or is no state") from error
    return state


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
