"""Entry point of the command line: python -m experiments COMMAND [WORD ...] [OPTION ...]."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TextIO, cast

from analysis.records.terminal_escapes import EscapingStream
from experiments.versions import check_packages
from experiments.worker.errors import NO_SPACE, explain_import_error
from slurm import environment
from sparsify.ranges import describe_unknown

OK = 0
FAILED = 1
BAD_INPUT = 2
NOBODY_READS = 141  # as a shell counts a program that SIGPIPE ended
# Of a results folder that something else has changed.
FILE_ERRORS = {
    errno.ENOENT: "is not there, or not any more: was it removed meanwhile?",
    errno.ESTALE: "is not there any more: it was removed meanwhile",
    errno.EISDIR: "is a folder where a file belongs: move it away",
    errno.ENOTDIR: "is no folder, or in none: move away what is in its place",
    errno.EEXIST: "is no folder: move it away",
    errno.ENOTEMPTY: "is a folder where a file belongs: move it away",
    errno.ENXIO: "is no file: move it away",
    errno.EIO: "can't be read: the disk fails",
}


def main(words: Sequence[str]) -> int:
    """Carry out a command; returns its exit code. Nothing that it prints makes a terminal do something."""
    out, err = (cast(TextIO, EscapingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        code = _run_command(words)
    if code == NOBODY_READS:
        sys.stdout = io.StringIO()  # what is still buffered must not fail once more
    return code


def _run_command(words: Sequence[str]) -> int:
    is_traced = "--traceback" in words
    try:
        check_packages()
        code = _parse_command(words)()
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # `plan ... | head`
        return NOBODY_READS
    except KeyboardInterrupt as error:
        sentence = str(error) or "interrupted; what was finished is kept, run again to go on"
        return _report_error(error, sentence, FAILED, is_traced)
    except ValueError as error:
        return _report_error(error, str(error), BAD_INPUT, is_traced)
    except ImportError as error:
        trouble = explain_import_error(error)
        if trouble is None:
            raise
        return _report_error(error, trouble.why, BAD_INPUT, is_traced)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return _report_error(error, _explain_permission(error), BAD_INPUT, is_traced)
        if error.errno in NO_SPACE:
            place = "" if error.filename is None else f"{error.filename}: "
            return _report_error(error, f"{place}{NO_SPACE[error.errno]}", FAILED, is_traced)
        if error.errno == errno.ELOOP:
            return _report_error(error, _explain_link(error), FAILED, is_traced)
        if error.errno in FILE_ERRORS:
            sentence = f"{error.filename2 or error.filename or 'a file'} {FILE_ERRORS[error.errno]}"
            return _report_error(error, sentence, FAILED, is_traced)
        if error.filename is not None:
            return _report_error(error, f"{error.filename}: {error.strerror}", FAILED, is_traced)
        raise


def _explain_link(error: OSError) -> str:
    """Return the sentence for a link that leads to itself, or for one where no link is followed."""
    path = os.fsdecode(error.filename2 or error.filename or "a file")
    try:
        os.stat(path)
    except FileNotFoundError:  # it leads nowhere
        pass
    except OSError:
        return f"{path} is a link that leads to itself: remove it"
    target = os.readlink(path) if os.path.islink(path) else "another file"
    return f"{path} is a link to {target}, and no link is followed here: remove it"


def _explain_permission(error: OSError) -> str:
    """Return the sentence for a file or a folder that this user may not read, enter or write."""
    from analysis.records.store import is_unreadable

    filename = error.filename
    path = Path(os.fsdecode(filename)) if isinstance(filename, str | bytes) else Path()
    closed = [folder for folder in path.parents if os.path.isdir(folder) and not os.access(folder, os.X_OK)]
    if closed or is_unreadable(path):
        advice = "let its owner share it, or set SPARSIFY_RESULTS to a folder of yours"
        return f"{[path, *closed][-1]} may not be read by you: {advice}"
    fault = "is read-only" if error.errno == errno.EROFS else "may not be written by you"
    return f"{filename or 'a file'} {fault}: make it writable, or set SPARSIFY_RESULTS to a folder that is"


def _report_error(error: BaseException, sentence: str, code: int, is_traced: bool) -> int:
    if is_traced:
        traceback.print_exception(error)
    print("experiments:", sentence.replace("\n", "\\n"), file=sys.stderr)  # a line, whatever it quotes
    return code


def _parse_command(words: Sequence[str]) -> Callable[[], int]:
    """Return a function that carries out the command; print help at once where it is asked for.

    Options may stand before a command; what all commands import is not imported for help.
    """
    from experiments import commands

    position = next((number for number, word in enumerate(words) if not word.startswith("-")), None)
    if position is None:
        return partial(_run_without_command, words)
    command = words[position]
    other_words = [*words[:position], *words[position + 1 :]]
    if command not in commands.command_names():
        raise ValueError(describe_unknown("command", command, commands.command_names()))
    asks_for_help = not {"-h", "--help"}.isdisjoint(other_words)
    parser = commands.make_parser(command, other_words, with_help=asks_for_help)
    if asks_for_help:
        from experiments.commands._help import explain_command_words

        parser.epilog = explain_command_words(command, other_words)
    try:
        arguments = parser.parse_words(other_words)
    except SystemExit:  # argparse's way to end after help
        return lambda: OK
    return partial(commands.import_command(command), **arguments)


def _run_without_command(options: Sequence[str]) -> int:
    """Print all commands, or the version, where no command is given."""
    from experiments import commands

    strangers = [option for option in options if option not in commands.GLOBAL_OPTIONS]
    if strangers:
        raise ValueError(describe_unknown("option", strangers[0], sorted(commands.GLOBAL_OPTIONS)))
    print(commands.version_text() if "--version" in options else commands.overview_text(), end="")
    return OK if options else BAD_INPUT


def _prepare_process() -> None:
    """Make sure of what the rest takes for granted: open streams that take any text, and a working folder.

    Raises:
        SystemExit: the working folder was deleted.
    """
    for number in range(3):  # a closed one would be given to the next file, and get what is printed
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115  # to the end
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115  # as above
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that the terminal lacks
    try:
        os.getcwd()
    except FileNotFoundError:
        print("experiments: the working folder was deleted; cd to one that is there", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None


if __name__ == "__main__":
    line = environment.command_line_to_complete()
    if line is not None:
        from experiments.commands.completion import print_completions_and_exit

        print_completions_and_exit(line)
    _prepare_process()
    sys.exit(main(sys.argv[1:]))
