"""Triton's interpreter, which a machine without a GPU has: less slow, and strict about memory.

By itself the interpreter runs one program of a launch after the other, which no GPU does. Here they run in
any order, and three things end a launch: memory used that no tensor has, a store of two elements to a place,
and a *race*: two programs use the same memory and not both atomically, one of them writing. A race is found
in whichever order it happened. Not modelled are threads within a program: their barriers are no-ops here.
"""

from __future__ import annotations

import gc
import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from torch import Tensor

LOAD = 0
STORE = 1
ATOMIC = 2
KINDS = {"create_masked_load": LOAD, "create_masked_store": STORE, "create_atomic_rmw": ATOMIC}


def interpreter() -> Any:
    """Return Triton's module; test_races.py tells whether what is changed in it still does what it did."""
    triton = importlib.import_module("triton")
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Triton is imported"
    return importlib.import_module("triton.runtime.interpreter")


class Launch:
    """Memory accesses by the programs of one launch.

    Args:
        kernel: which they run.
        tensors: whose memory they may use.
    """

    def __init__(self, kernel: Any, tensors: list[Any]) -> None:
        self.name = kernel.__name__
        storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
        spans = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
        self.begins, self.ends = np.array(spans, np.uint64).T
        self.accesses = list[tuple[int, int, Any]]()

    def note(self, program: int, kind: int, addresses: Any) -> None:
        """Note an access to elements; raise IndexError or AssertionError if it can not be right."""
        before = self.begins.searchsorted(addresses, "right")
        if not (before.all() and (addresses < self.ends[before - 1]).all()):
            raise IndexError(f"{self.name} uses memory that no tensor has")
        assert kind != STORE or len(np.unique(addresses)) == len(addresses), f"{self.name} stores twice"
        self.accesses.append((program, kind, addresses))

    def check(self) -> None:
        """Raise AssertionError if two programs raced."""
        programs, kinds, addresses = zip(*self.accesses, strict=True)
        lengths = list(map(len, addresses))
        columns = {"program": np.repeat(programs, lengths), "kind": np.repeat(kinds, lengths)}
        users = pd.DataFrame(columns).groupby(np.concatenate(addresses)).agg(["min", "max"])
        is_shared = users["program"]["min"] != users["program"]["max"]
        is_safe = (users["kind"]["min"] == users["kind"]["max"]) & (users["kind"]["min"] != STORE)
        assert not (is_shared & ~is_safe).any(), f"programs of {self.name} race"


@contextmanager
def checking_memory(seed: int = 0) -> Iterator[None]:
    """Run the programs of each launch in an order that follows from the seed, and check what they access.

    New memory is not 0.
    """
    module = interpreter()
    builder = module.interpreter_builder
    chance = random.Random(seed)
    execute = module.GridExecutor.__call__
    set_dim = builder.set_grid_dim
    set_index = builder.set_grid_idx
    order = list[int]()
    launch: Launch

    def call(executor: Any, *args: Any, **options: Any) -> None:
        nonlocal launch
        tensors = [*args, *options.values()]
        if "group_search" in executor.fn.__module__:  # finds addresses in tables
            tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        launch = Launch(executor.fn, tensors)
        execute(executor, *args, **options)
        launch.check()

    def shuffle(number: int, *others: int) -> None:
        set_dim(number, *others)
        order[:] = chance.sample(range(number), number)

    def noted(kind: int, access: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_access(*given: Any) -> Any:
            pointers = given[kind == ATOMIC]  # that of an atomic is behind what it does
            mask = np.asarray(given[kind + 1].data)  # the second argument of a load, and so on
            launch.note(builder.grid_idx[0], kind, pointers.data[mask].reshape(-1))
            return access(*given)

        return note_and_access

    hooks: dict[str, Any] = {name: noted(kind, getattr(builder, name)) for name, kind in KINDS.items()}
    hooks["set_grid_dim"] = shuffle
    hooks["set_grid_idx"] = lambda at, *others: set_index(order[at], *others)
    is_set = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN and the largest numbers
    try:
        with (
            mock.patch.object(module.GridExecutor, "__call__", call),
            mock.patch.multiple(builder, **hooks),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(is_set)


@contextmanager
def patching_once() -> Iterator[None]:
    """Let Triton change its language once in a launch for each module.

    To change it at each call of a function, as Triton does, takes a third of the time and more.
    """
    module = interpreter()
    execute = module.GridExecutor.__call__
    patch = module._patch_lang
    patched = set[int]()

    def call(executor: Any, *args: Any, **options: Any) -> None:
        patched.clear()
        execute(executor, *args, **options)

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return None  # nobody asks for it of a function within a launch
        patched.add(id(function.__globals__))
        return patch(function)

    with (
        mock.patch.object(module.GridExecutor, "__call__", call),
        mock.patch.object(module, "_patch_lang", patch_once),
    ):
        yield
