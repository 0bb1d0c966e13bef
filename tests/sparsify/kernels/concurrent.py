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
Failures are printed with their seeds; `--seed SEED --cases 1 --trace` shows one, access by access.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import math
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.sparsify.kernels.accesses import Access, Memory, Site, meetings
from tests.sparsify.kernels.interpreter import interpreter, patching_once

OFTEN = (1.0, 0.5, 0.2, 0.05)  # how likely a launch's programs hand the baton on, at each access
CUT = 0.4  # how likely an access of many elements is cut in two
TELL_EVERY = 100  # cases of a long run
MOST = 1_000_000  # accesses of one launch; what takes more waits for something


class Stopped(BaseException):
    """Ends a program after another has failed. No Exception, which the interpreter would wrap."""


class Program:
    """A program of a launch, in a thread of its own. It runs while it has the baton."""

    def __init__(self, number: int, place: tuple[int, int, int], body: Callable[[], None]) -> None:
        self.number = number
        self.place = place
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread = threading.Thread(target=body, daemon=True)

    def give(self) -> None:
        """Let it go on, or begin."""
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.baton.release()


class Schedule:
    """Which program goes on: drawn anew for each launch, so that some change at every access and some let one
    wait for long, in the middle of what it does, while others run to their ends.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.often = chance.choice(OFTEN)
        self.is_queue = chance.random() < 0.5

    def after(self, alive: list[Program], now: Program | None) -> Program:
        """The one that goes on; `now` is at an access, or has ended if it is None."""
        if now is not None and self.chance.random() >= self.often:
            return now
        if not self.is_queue:
            return self.chance.choice(alive)
        if now is not None:  # behind all others
            alive.remove(now)
            alive.append(now)
        return alive[0]


class Concurrent:
    """While it is entered, launches in Triton's interpreter run their programs at once.

    Args:
        seed: of all that is random.
        trace: is told of every access.
    """

    def __init__(self, seed: int, trace: Callable[[Access], None] = lambda access: None) -> None:
        self.chance = random.Random(seed)
        self.trace = trace
        self.masks = np.random.default_rng(seed)
        self.counts = Counter[str]()  # of launches, accesses, and turns that others took
        self.meetings = set[str]()
        self.atomics = set[Site]()
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
            # These are since Triton 3.9.
            "create_atomic_load": self._note_atomic,
            "create_atomic_store": self._note_atomic,
        }
        for name, hook in hooks.items():
            if original := getattr(self.builder, name, None):
                bound = _bind(hook, original)
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

    def _note_atomic(self, original: Any, *rest: Any) -> Any:
        self._launch.is_atomic = True
        return original(*rest)

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
        kind = "atomic" if launch.is_atomic else kind
        launch.is_atomic = False  # for others
        self._turn()
        site = self._site(launch.kernel.__name__)
        addresses = pointers.data if mask is None else pointers.data[np.asarray(mask.data)]
        access = Access(launch.now.number, kind, site, addresses.reshape(-1))
        if not self.memory.has(access.addresses):
            raise IndexError(f"{kind} in {site} of memory that no tensor has")
        launch.accesses.append(access)
        self.counts["accesses"] += 1
        if kind == "atomic":
            self.atomics.add(site)
        self.trace(access)

    def _turn(self) -> None:
        self._launch.turn()

    @property
    def _launch(self) -> Launch:
        assert self.launch is not None, "no kernel runs"
        return self.launch

    def _site(self, kernel: str) -> Site:
        """The line of a kernel that is being interpreted: the innermost that is neither Triton's nor here."""
        frame = sys._getframe(2)
        triton = str(Path(self.interpreter.__file__).parents[1])
        while (file := frame.f_code.co_filename) == __file__ or file.startswith(triton):
            assert frame.f_back is not None
            frame = frame.f_back
        return Site(Path(file).name, frame.f_lineno, frame.f_code.co_name, kernel)


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
    """The programs of one launch, from their beginning to the end of the last."""

    def __init__(
        self,
        concurrent: Concurrent,
        kernel: Callable[..., None],
        programs: Sequence[tuple[tuple[int, int, int], dict[str, Any]]],
    ) -> None:
        self.concurrent = concurrent
        self.kernel = kernel
        self.schedule = Schedule(concurrent.chance)
        self.alive = [
            Program(number, place, self._body(number, arguments))
            for number, (place, arguments) in enumerate(programs)
        ]
        self.programs = list(self.alive)
        self.now = self.alive[0]
        self.ended = threading.Lock()
        self.error: BaseException | None = None
        self.accesses = list[Access]()
        self.is_atomic = False
        self.num_turns = 0

    def run(self) -> None:
        """Run all; raise what one of them has raised."""
        concurrent = self.concurrent
        concurrent.counts["launches"] += 1
        concurrent.chance.shuffle(self.alive)
        concurrent.launch = self
        self.ended.acquire()
        self._go_on(self.alive[0])
        self.ended.acquire()
        concurrent.launch = None
        if self.error is not None:
            raise self.error
        concurrent.meetings.update(meetings(self.accesses))

    def turn(self) -> None:
        """Called by the program that runs: others may run before it goes on."""
        me = self.now
        self.num_turns += 1
        if self.num_turns > MOST:
            raise RuntimeError(f"{self.kernel.__name__} does not end: a program waits for another")
        chosen = self.schedule.after(self.alive, me)
        if chosen is me:
            return
        self.concurrent.counts["switches"] += 1
        self.now = chosen
        chosen.give()
        me.baton.acquire()
        if self.error is not None:
            raise Stopped
        self._take(me)

    def _body(self, number: int, arguments: dict[str, Any]) -> Callable[[], None]:
        def run() -> None:
            me = self.programs[number]
            try:
                if self.error is None:
                    self._take(me)
                    self.kernel(**arguments)
            except Stopped:
                pass
            except BaseException as error:
                self.error = self.error or error
            self.alive.remove(me)
            if not self.alive:
                self.ended.release()
            else:
                self._go_on(self.schedule.after(self.alive, None))

        return run

    def _go_on(self, program: Program) -> None:
        self.now = program
        program.give()

    def _take(self, me: Program) -> None:
        # Triton asks it for a program's number.
        self.now, self.concurrent.builder.grid_idx = me, me.place


def _bind(hook: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(*args: Any, **options: Any) -> Any:
        return hook(original, *args, *options.values())

    return hooked


class Contested(NamedTuple):
    """The outcome of a case."""

    counts: Counter[str]
    atomics: set[Site]
    faults: list[str]


def contest(seed: int, trace: bool = False) -> Contested:
    """Run one case, with its programs in an order that follows from its seed as well; with `trace` print what
    is done, and every access.
    """
    from tests.sparsify.kernels.contests import Contest  # imports Triton

    def show(access: Access) -> None:
        if trace:
            print(f"  {access.program:3} {access.kind:6} {len(access.addresses):5} {access.site}")

    lines = list[str]()
    faults = list[str]()
    case = Contest(seed, print if trace else lines.append)
    with Concurrent(seed, show) as run:
        case.lend = run.lend
        try:
            case.run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            faults.append(f"{type(error).__name__}: {str(error)[:200]} ({place}) | {'; '.join(lines)}")
    return Contested(run.counts, run.atomics, [*faults, *run.meetings])


def main(words: Sequence[str]) -> int:
    """Run cases for some minutes; return 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sparsify.kernels.concurrent", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each has the next (0)")
    parser.add_argument("--cases", type=int, help="no more than so many")
    parser.add_argument("--trace", action="store_true", help="print what is done, and every access")
    options = parser.parse_args(words)
    os.environ["TRITON_INTERPRET"] = "1"
    until = time.monotonic() + 60 * options.minutes
    total = Counter[str]()
    failures = list[int]()
    while time.monotonic() < until and total["cases"] != options.cases:
        seed = options.seed + total["cases"]
        done = contest(seed, options.trace)
        total += done.counts + Counter(cases=1)
        for fault in done.faults:
            print(f"seed {seed} | {fault}", flush=True)
        if done.faults:
            failures.append(seed)
        if total["cases"] % TELL_EVERY == 0:
            print(json.dumps(total), file=sys.stderr, flush=True)
    print(json.dumps({**total, "first_seed": options.seed, "failures": failures}))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
