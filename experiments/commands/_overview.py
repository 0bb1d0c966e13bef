"""The list of all commands."""

from __future__ import annotations

import platform

import sparsify
from experiments import commands
from experiments.commands._arguments import PROGRAM
from experiments.commands._layout import table
from sparsify.registry import BrokenFile

ALONE = ("-h", "--help", "--traceback", "--version")  # options that need no command
GENERAL = {
    "COMMAND --help": "what stands behind a command",
    "--version": "which version this is",
    "--traceback": "show where an error came from",
    "FORCE=1": "as --force: measure again what is already measured (earlier attempts are kept)",
}


def overview() -> str:
    """Every command in a line or two, by groups."""
    listed: dict[str, dict[str, str]] = {group: {} for group in commands.GROUPS}
    for name in commands.names():
        try:
            group, about = commands.group_of(name), commands.REGISTRY.summary(name)
        except BrokenFile as broken:
            group, about = "here", f"can't be read: {broken}"
        listed.setdefault(group, {})[name] = about
    parts = [f"{PROGRAM} COMMAND [WORD ...] [OPTION ...]\n"]
    for group, found in listed.items():
        if found:
            parts.append(f"{commands.GROUPS.get(group, group)}:\n{table(found)}")
    return "\n".join([*parts, f"for all commands:\n{table(GENERAL)}"])


def version() -> str:
    return f"sparsify {sparsify.__version__}, Python {platform.python_version()}\n"
