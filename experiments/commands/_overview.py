"""The list of all commands."""

from __future__ import annotations

import platform
import shutil
import textwrap

import sparsify
from experiments import commands
from experiments.commands._arguments import PROGRAM
from sparsify.registry import BrokenFile

ALONE = ("-h", "--help", "--traceback", "--version")  # options that need no command
NAMES = 16  # columns of what is explained
LEAST, MOST = 60, 110  # columns in all
GENERAL = {
    "COMMAND --help": "what stands behind a command",
    "--version": "which version this is",
    "--traceback": "show where an error came from",
    "FORCE=1": "as --force: measure again what is already measured (earlier attempts are kept)",
}


def overview() -> str:
    """Every command in a line or two, by groups."""
    width = min(max(shutil.get_terminal_size().columns - 1, LEAST), MOST)
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
            parts.append(f"{commands.GROUPS.get(group, group)}:\n{_table(found, width)}")
    return "\n".join([*parts, f"for all commands:\n{_table(GENERAL, width)}"])


def version() -> str:
    return f"sparsify {sparsify.__version__}, Python {platform.python_version()}\n"


def _table(rows: dict[str, str], width: int) -> str:
    """Names in one column, what they do in the other."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * (NAMES + 2)
    filled = []
    for name, about in rows.items():
        wrapper.initial_indent = f"  {name:{NAMES}}"
        filled.append(f"{wrapper.fill(about)}\n")
    return "".join(filled)
