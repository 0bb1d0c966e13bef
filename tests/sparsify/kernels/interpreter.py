"""Triton's interpreter, which a machine without a GPU has, and what makes it less slow."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

READ = ((3, 6), (3, 9))  # versions of Triton, torch 2.11's to 2.15's, whose runtime/interpreter.py was read


def interpreter() -> Any:
    """Triton's module, if it is one that was read, and if Triton interprets."""
    triton = importlib.import_module("triton")
    version = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if not READ[0] <= version <= READ[1]:
        raise RuntimeError(
            f"Triton {triton.__version__}: the interpreters of 3.6 to 3.9 were read, and are changed here; "
            "read this one's runtime/interpreter.py, then change READ"
        )
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before Triton is imported")
    return importlib.import_module("triton.runtime.interpreter")


@contextmanager
def patching_once() -> Iterator[None]:
    """Triton changes its language at each call of a function, which takes a third of the time and more; here
    it does so once in a launch for each module.
    """
    module = interpreter()
    execute, patch = module.GridExecutor.__call__, module._patch_lang
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
