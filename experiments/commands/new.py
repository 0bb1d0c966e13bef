from __future__ import annotations

from typing import Literal

from experiments.commands import _new

GROUP = "here"


def new(kind: Literal["figure", "method", "task", "dataset", "cluster"], name: str) -> int:
    """A file of your own that works and says what to change in it: new figure thesis_density

    Args:
        kind: what the file is to be.
        name: what it is to be called; a figure <paper>_<item>, a task <network>_<data set>.
    """
    path = _new.write(kind, name, _new.text(kind, name))
    print(f"{path} is yours now. Next:")
    for command in _new.next_commands(kind, name):
        print(f"  {command}")
    return 0
