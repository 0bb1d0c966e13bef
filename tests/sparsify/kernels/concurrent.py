"""Triton's interpreter with all programs of a launch at once, to find races between them.

By itself the interpreter runs one program after the other, which no GPU does. Here each program has a thread,
one of them has the baton, and hands it on at random before it loads or stores. A load or store of many
elements is also cut in two, with others in between, for on a GPU none is atomic as a whole. What is random
follows from a seed, so that every order of events can be repeated.

Three things are found: wrong results; memory used that no tensor has; and *meetings*: two programs of a
launch use the same memory and not both atomically, one of them writing. A meeting is found in whichever order
it happened; a wrong result needs both the order and data that show it. Not modelled are threads within a
program, whose barriers are no-ops here, and weaker orders than one after the other in all memory.

Long runs: python -m tests.sparsify.kernels.concurrent --minutes 60 --seed 0
Faults are printed with their seeds, which repeat them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import math
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.sparsify.kernels.accesses import Access, Memory, meetings
from tests.sparsify.kernels.interpreter import interpreter, patching_once

OFTEN = (1.0, 0.5, 0.2, 0.05)  # how likely a launch's programs hand the baton on, at each access
CUT = 0.4  # how likely an access of many elements is cut in two


class Stopped(BaseException):
    """Ends a program after another has failed. No Exception, which the interpreter would wrap."""


class Concurrent:
    """While it is entered, launches in Triton's interpreter run their programs at once.

    Args:
        seed: of all that is random.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.masks = np.random.default_rng(seed)
        self.num_switches = 0  # of programs
        self.meetings = set[str]()
        self.atomics = set[str]()  # kernels that have some
        self.launch: Launch | None = None
        self.memory = Memory.of([])
        self.lent = list[Tensor]()

    def lend(self, *tensors: Tensor) -> None:
        """Let kernels use the memory of tensors whose addresses they find in tables."""
        self.lent += tensors

    def __enter__(self) -> Concurrent:
        self.interpreter = interpreter()
        self.builder = self.interpreter.interpreter_builder
        self.stack = ExitStack()
        self.stack.enter_context(patching_once())
        execute = self.interpreter.GridExecutor.__call__

        def call(executor: Any, *args: Any, **options: Any) -> None:
            kernel = executor.fn
            executor.fn = Gathered(kernel, self)
            self.memory = Memory.of([*args, *options.values(), *self.lent])
            try:
                execute(executor, *args, **options)
            finally:
                executor.fn = kernel

        replace = mock.patch.object
        self.stack.enter_context(replace(self.interpreter.GridExecutor, "__call__", call))
        # Whether integers overflow is asked elsewhere, and takes a third of the time.
        options = dataclasses.replace(self.builder.options, sanitize_overflow=False)
        self.stack.enter_context(replace(self.builder, "options", options))
        hooks: dict[str, Callable[..., Any]] = {
            "create_masked_load": self._load,
            "create_masked_store": self._store,
            "create_atomic_rmw": self._update,
            "create_atomic_cas": self._swap,
        }
        for name, hook in hooks.items():
            bound = _bind(hook, getattr(self.builder, name))
            self.stack.enter_context(replace(self.builder, name, bound, create=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.close()

    # Before each access of a kernel; `original` is the interpreter's own.
    def _load(self, original: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        self._before("load", pointers, mask)
        for part in self._parts(mask):
            other = original(pointers, part, other, *rest)
        return other

    def _store(self, original: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        self._before("store", pointers, mask)
        for part in self._parts(mask):
            original(pointers, value, part, *rest)

    def _update(self, original: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._before("atomic", pointers, mask)
        found = value
        for part in self._parts(mask):
            before = original(op, pointers, value, part, *rest)
            found = self._handle(np.where(part.data, before.data, found.data), before.dtype)
        return found

    def _swap(self, original: Any, pointers: Any, *rest: Any) -> Any:
        self._before("atomic", pointers, None)
        return original(pointers, *rest)

    def _handle(self, data: NDArray[Any], kind: Any) -> Any:
        return self.interpreter.TensorHandle(data, kind)

    def _parts(self, mask: Any) -> Iterator[Any]:
        """Yield the elements of an access at once, or any of them and then the others."""
        live = np.asarray(mask.data)
        if live.size < 2 or self.chance.random() >= CUT:
            yield mask
            return
        first = self.masks.random(live.shape) < self.chance.random()
        yield self._handle(live & first, mask.dtype)
        self._turn()
        yield self._handle(live & ~first, mask.dtype)

    def _before(self, kind: str, pointers: Any, mask: Any) -> None:
        """Let others run; then note what is accessed."""
        launch = self._launch
        self._turn()
        site = self._site()
        addresses = pointers.data if mask is None else pointers.data[np.asarray(mask.data)]
        access = Access(launch.now, kind, site, addresses.reshape(-1))
        if not self.memory.has(access.addresses):
            raise IndexError(f"{kind} in {site} of memory that no tensor has")
        launch.accesses.append(access)
        if kind == "atomic":
            self.atomics.add(launch.kernel.__name__)

    def _turn(self) -> None:
        self._launch.turn()

    @property
    def _launch(self) -> Launch:
        assert self.launch is not None, "no kernel runs"
        return self.launch

    def _site(self) -> str:
        """Return the line that is being interpreted: the innermost that is neither Triton's nor here."""
        kernel = self._launch.kernel.__name__
        triton = str(Path(self.interpreter.__file__).parents[1])
        for frame, line in traceback.walk_stack(None):
            file = frame.f_code.co_filename
            if file != __file__ and not file.startswith(triton):
                return f"{kernel}, {frame.f_code.co_name} ({Path(file).name}:{line})"
        raise AssertionError("no kernel runs")


class Gathered:
    """In place of a kernel, which the interpreter calls for each program: the last call runs all of them."""

    def __init__(self, kernel: Any, concurrent: Concurrent) -> None:
        self.kernel = kernel
        self.concurrent = concurrent
        functools.update_wrapper(self, kernel)  # the interpreter asks a kernel for these
        self.__globals__ = kernel.__globals__
        self.__signature__ = inspect.signature(kernel)
        self.programs = list[tuple[tuple[int, int, int], dict[str, Any]]]()

    def __call__(self, **arguments: Any) -> None:
        builder = self.concurrent.builder
        self.programs.append((builder.grid_idx, arguments))
        if len(self.programs) == math.prod(builder.grid_dim):
            Launch(self.concurrent, self.kernel, self.programs).run()


class Launch:
    """The programs of one launch, each in a thread of its own, which runs while it has the baton.

    How often it is handed on is drawn for each launch: so that some change at every access, and some let one
    wait for long, in the middle of what it does, while others run to their ends.
    """

    def __init__(
        self,
        concurrent: Concurrent,
        kernel: Callable[..., None],
        programs: Sequence[tuple[tuple[int, int, int], dict[str, Any]]],
    ) -> None:
        self.concurrent = concurrent
        self.kernel = kernel
        self.programs = programs
        self.often = concurrent.chance.choice(OFTEN)
        self.alive = list(range(len(programs)))
        self.batons = [threading.Semaphore(0) for _ in programs]
        self.now = 0
        self.error: BaseException | None = None
        self.accesses = list[Access]()

    def run(self) -> None:
        """Run all; raise what one of them has raised."""
        threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in self.alive]
        self.concurrent.launch = self
        for thread in threads:
            thread.start()
        self._hand_on()
        for thread in threads:
            thread.join()
        self.concurrent.launch = None
        if self.error is not None:
            raise self.error
        self.concurrent.meetings |= meetings(self.accesses)

    def turn(self) -> None:
        """Let others run before the program goes on that runs."""
        own = self.now
        if self.concurrent.chance.random() < self.often:
            self._hand_on()
            self._wait(own)

    def _hand_on(self) -> None:
        if self.alive:
            self.batons[self.concurrent.chance.choice(self.alive)].release()

    def _wait(self, own: int) -> None:
        self.batons[own].acquire()
        if self.error is not None:
            raise Stopped
        self.concurrent.num_switches += own != self.now
        self.now = own
        self.concurrent.builder.grid_idx = self.programs[own][0]  # Triton asks it for a program's number

    def _run(self, own: int) -> None:
        try:
            self._wait(own)
            self.kernel(**self.programs[own][1])
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.alive.remove(own)
        self._hand_on()


def _bind(hook: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(*args: Any, **options: Any) -> Any:
        return hook(original, *args, *options.values())

    return hooked


def contest(seed: int) -> tuple[Concurrent, list[str]]:
    """Run one case, with its programs in an order that follows from its seed as well; return what was seen,
    and the faults.
    """
    from tests.sparsify.kernels.contests import Contest  # imports Triton

    case = Contest(seed)
    with Concurrent(seed) as run:
        case.lend = run.lend
        try:
            case.run()
        except Exception:
            return run, [traceback.format_exc(), *run.meetings]
    return run, list(run.meetings)


def main() -> None:
    """Run cases for some minutes; exit with 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sparsify.kernels.concurrent", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each has the next (0)")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    until = time.monotonic() + 60 * options.minutes
    seed = options.seed
    num_faults = 0
    while time.monotonic() < until:
        _, faults = contest(seed)
        for fault in faults:
            print(f"seed {seed} | {fault}", flush=True)
            num_faults += 1
        seed += 1
    print(f"{num_faults} faults in seeds {options.seed} to {seed - 1}")
    sys.exit(bool(num_faults))


if __name__ == "__main__":
    main()
