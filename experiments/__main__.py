"""The command line: python -m experiments COMMAND [WORD ...]"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence

from experiments.config import packages
from experiments.worker.errors import DISK_FULL
from sparsify.ranges import unknown

USAGE = """\
python -m experiments COMMAND [WORD ...]

  run WORD ...              one run:  run method=topk method.density=0.001 task=cnn_cifar10 workers=8
  reproduce ITEM ... WORD   figures:  reproduce fig4 profile=laptop        (make reproduce-fig4)
  figures [ITEM ...]        draw again from stored records; needs no torch (make figures)
  collect [--ship]          all runs into results/records/*.parquet        (--ship: the complete figures' runs
                            into results/shipped, which the repository carries, and redraw those)

on a cluster (cluster=NAME, a file of conf/cluster), `run` and `reproduce` queue jobs and wait for them, or:

  plan ITEM|WORD ...        runs, arrays, node-hours; --sbatch: what sbatch is given
  submit ITEM|WORD ...      queue what is missing, return at once:  submit method=topk,dgc cluster=NAME
  status [SWEEP|RUN]        where they are
  logs RUN                  the end of its logs
  cancel SWEEP|RUN          end jobs; what is finished or saved is kept
  why RUN [--against RUN]   what a run did and why it failed; or what differed between where two were measured

  COMMAND --help            what stands behind a command
  --all                     of a figure, also the runs that make it firmer, mostly with more seeds
  --force, or FORCE=1       measure again what is already measured (earlier attempts are kept)
  --traceback               show where an error came from
"""

OK, FAILED, BAD_INPUT, NOBODY_READS = 0, 1, 2, 141  # as a shell counts a program that SIGPIPE ended
# Of a results folder that something else has changed.
IN_THE_WAY = {
    errno.ENOENT: "is not there, or not any more: was it removed meanwhile?",
    errno.ESTALE: "is not there any more: it was removed meanwhile",
    errno.EISDIR: "is a folder where a file belongs: move it away",
    errno.ENOTDIR: "is no folder, or in none: move away what is in its place",
    errno.EEXIST: "is no folder: move it away",
    errno.ENOTEMPTY: "is a folder where a file belongs: move it away",
    errno.ELOOP: "is a link that leads to itself: remove it",
    errno.ENXIO: "is no file: move it away",
    errno.EIO: "can't be read: the disk fails",
}
OPTIONS = ("--against", "--all", "--force", "--help", "--sbatch", "--ship", "--traceback")


def main(words: Sequence[str]) -> int:
    options = {word for word in words if word.startswith("--") or word == "-h"}
    plain = [word for word in words if word not in options]
    try:
        code = _dispatch(plain, options)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # `plan ... | head`; what is still buffered must not fail once more
        sys.stdout = io.StringIO()
        return NOBODY_READS
    except KeyboardInterrupt as error:
        told = str(error) or "interrupted; what was finished is kept, run again to go on"
        return _end(error, told, FAILED, options)
    except ValueError as error:
        return _end(error, str(error), BAD_INPUT, options)
    except ImportError as error:
        if (trouble := packages.trouble(error)) is None:
            raise
        return _end(error, trouble[1], BAD_INPUT, options)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = "is read-only" if error.errno == errno.EROFS else "may not be written by you"
            advice = "make it writable, or set SPARSIFY_RESULTS to a folder that is"
            return _end(error, f"{error.filename} {what}: {advice}", BAD_INPUT, options)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _end(error, f"{error.filename}: {DISK_FULL}", FAILED, options)
        if error.errno in IN_THE_WAY:
            what = f"{error.filename2 or error.filename} {IN_THE_WAY[error.errno]}"
            return _end(error, what, FAILED, options)
        if error.filename is not None:
            return _end(error, f"{error.filename}: {error.strerror}", FAILED, options)
        raise


def _end(error: BaseException, sentence: str, code: int, options: set[str]) -> int:
    if "--traceback" in options:
        traceback.print_exception(error)
    # A line, whatever a message quotes: what a terminal would obey is escaped.
    line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in sentence)
    print(f"experiments: {line}", file=sys.stderr)
    return code


def _dispatch(words: Sequence[str], options: set[str]) -> int:
    from experiments import commands  # after the options are known: a bare --help imports nothing

    command, rest = (words[0], words[1:]) if words else ("", [])
    if strangers := options - {*OPTIONS, "-h"}:
        raise ValueError(unknown("option", min(strangers), OPTIONS))
    if not command:
        print(USAGE, end="")
        return OK if options & {"--help", "-h"} else BAD_INPUT
    if command not in commands.names():
        raise ValueError(unknown("command", command, commands.names()))
    if options & {"--help", "-h"}:
        from experiments.commands._help import explain

        print(explain(command), end="")
        return OK
    return commands.execute(command, list(rest), options)


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
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115  # to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that the terminal lacks
    try:
        os.getcwd()
    except FileNotFoundError:
        print("experiments: the working folder was deleted; cd to one that is there", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None


if __name__ == "__main__":
    _prepare_process()
    sys.exit(main(sys.argv[1:]))
