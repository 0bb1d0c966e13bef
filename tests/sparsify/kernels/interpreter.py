"""Triton's interpreter, which a machine without a GPU has, and what makes it less slow."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def interpreter() -> Any:
    """Return Triton's module; test_races.py tells whether what is changed in it still does what it did."""
    triton = importlib.import_module("triton")
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Triton is imported"
    return importlib.import_module("triton.runtime.interpreter")


@contextmanager
def patching_once() -> Iterator[None]:
    """Let Triton change its language once in a launch for each module: at each call of a function, as it
    does, that takes a third of the time and more.
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
